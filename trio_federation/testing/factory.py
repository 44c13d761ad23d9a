"""Simulated federations as tests get them from the fixture `federation`: with the run's seed, with every invariant
switched on, and remembered, so that the report of a failure can show what happened. What pytest has to do with it is
`pytest_plugin.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock

from trio_federation.config import HubSettings
from trio_federation.testing.invariants import Invariant, every_invariant
from trio_federation.testing.network import OtherHub
from trio_federation.testing.simulation import LONGEST, Simulation, simulated_federation

#: lines of an event log that a report shows, the last ones
LINES_SHOWN = 40


class FederationFactory:
    """What the fixture `federation` is: called like `simulated_federation`, whose arguments it takes, it makes a
    simulated federation.

    `seed`: that of the run, for every federation that is given none of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        #: how many federations it has made
        self.made = 0
        #: the one that it has made last
        self.latest: Simulation | None = None
        self._in_real_time = False
        #: lines of its log that it had when it was left
        self._until: int | None = None

    @asynccontextmanager
    async def __call__(
        self,
        *names: str,
        hubs: int = 1,
        ttl: float = 30.0,
        seed: int | None = None,
        hub_ttl: float = 60.0,
        grace: float = 10.0,
        hub_settings: HubSettings | None = None,
        invariants: Sequence[Invariant] | None = None,
        check_every: float = 1.0,
        start: bool = True,
        longest: float = LONGEST,
        scripted_hubs: Sequence[OtherHub] = (),
        events: bool = True,
    ) -> AsyncIterator[Simulation]:
        """A simulated federation, as `simulated_federation` makes it, but that `seed` is by default that of the run,
        and `invariants` every one that there is; `invariants=()` switches them off. Raises what that one raises."""
        async with simulated_federation(
            *names,
            hubs=hubs,
            ttl=ttl,
            seed=self.seed if seed is None else seed,
            hub_ttl=hub_ttl,
            grace=grace,
            hub_settings=hub_settings,
            invariants=every_invariant() if invariants is None else invariants,
            check_every=check_every,
            start=start,
            longest=longest,
            scripted_hubs=scripted_hubs,
            events=events,
        ) as simulation:
            self.made += 1
            self.latest, self._until = simulation, None
            clock = trio.lowlevel.current_clock()
            self._in_real_time = not (isinstance(clock, MockClock) and clock.rate == 0)
            try:
                yield simulation
            finally:
                # What is torn down after a failure says nothing of how it came to it.
                ended = simulation.broken_at_line
                self._until = len(simulation.log.lines) if ended is None else ended

    def report(self) -> str:
        """What happened in the federation that was made last, for the report of a failure; "" where there is none."""
        if self.latest is None:
            return ""
        lines = self.latest.log.lines[: self._until]
        shown = lines[-LINES_SHOWN:]
        told = [f"the last {len(shown)} of {len(lines)} events:" if len(shown) < len(lines) else "every event:"]
        if self.made > 1:
            told.insert(0, f"of {self.made} federations that the test has made, this is the last one")
        if self.latest.seed != self.seed:
            told.insert(0, f"its seed, given by the test, is {self.latest.seed}")
        if self._in_real_time:
            told.insert(0, "it ran in real time, in which no two runs are alike; take the fixture autojump_clock, too")
        return "\n".join([*told, *shown])

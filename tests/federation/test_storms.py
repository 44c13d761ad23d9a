"""What a hub meets that comes back: agents that it has lost together try again spread over a window, no two of them for
the same reason in the same moment, and those of a small fleet at once. First on the delays alone, for fleets and
outages of all kinds; then with whole agents, of which every attempt is written down."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.federation.helpers import item
from tests.simulation import Simulation, member, simulated_federation
from trio_federation.errors import Unauthenticated, Unavailable
from trio_federation.pb.sandbox.sync.v1 import ClusterOrigin, FederationBroadcast
from trio_federation.retry import FIRST, LONGEST, STABLE, Backoff, first_window, share
from trio_federation.rpc import FederationServer, IncomingReport, IncomingWatch
from trio_federation.testing.network import Route

#: agents, in a large fleet and in a small one
MANY, FEW = 200, 5
#: seconds for which a hub is down, and which connections then last for a while
DOWN, LIVED = 90.0, 1.0
#: seconds for which the agents at a door know of each other without hearing of it: into an outage, and not to its end
TTL = 60.0


def busiest(moments: Iterable[float]) -> int:
    """How many of these moments, in seconds, lie in the fullest of the seconds."""
    return max(Counter(int(moment) for moment in moments).values())


# --- delays alone ----------------------------------------------------------------------------------------------------


def attempts(clusters: int, seed: int, *, down: float, dropping: float) -> list[list[float]]:
    """Of each of the agents of so many clusters the moments of its attempts, in seconds since all of them have lost
    their hub. It is down for a while; then, for another while, every connection lasts for LIVED."""
    fleet = []
    for number in range(clusters):
        backoff = Backoff(
            random.Random(f"{seed}/{number}"),
            first=partial(first_window, clusters),
            part=partial(share, f"c{number}", [f"c{other}" for other in range(clusters)], f"hub-{seed}"),
        )
        moments = [backoff.again(1000.0)]
        while moments[-1] < down + dropping:
            lived = LIVED if moments[-1] >= down else 0.0
            moments.append(moments[-1] + lived + backoff.again(lived))
        fleet.append(moments[:-1])
    return fleet


@settings(max_examples=200)
@given(
    clusters=st.integers(100, 250),
    seed=st.integers(0, 2**32),
    down=st.floats(30, 120),
    dropping=st.sampled_from((0, 30)),
)
def test_no_second_of_an_outage_holds_a_tenth_of_a_large_fleets_attempts(
    clusters: int, seed: int, down: float, dropping: float
) -> None:
    """The fullest second holds 0.27 attempts for each agent on average, just before the end of a first window of ten
    seconds; an outage of 30 s has more than six of each."""
    fleet = attempts(clusters, seed, down=down, dropping=dropping)
    every = [moment for moments in fleet for moment in moments]
    assert busiest(every) <= 0.1 * len(every)
    first = [moments[0] for moments in fleet]
    assert max(first) <= first_window(clusters)
    # A second of the clock may begin and end in the midst of a part.
    assert busiest(first) <= math.ceil(max(20, 0.1 * clusters)) + 1


@settings(max_examples=100)
@given(clusters=st.integers(1, 100), seed=st.integers(0, 2**32))
def test_a_small_fleet_is_no_storm(clusters: int, seed: int) -> None:
    """However soon its agents try again: 20 first attempts in a second, and the second and third ones of some."""
    fleet = attempts(clusters, seed, down=DOWN, dropping=0.0)
    assert busiest(moment for moments in fleet for moment in moments) <= 65


# --- whole agents ----------------------------------------------------------------------------------------------------


class Door:
    """A hub that is down, ends each connection after a while, or works, as a test says; it writes down who comes and
    when. It serves calls with real gRPC, and tells every watcher of all `clusters`; to relay what each of them says
    would take a real hub half a minute for as many as there are here."""

    def __init__(self, clusters: Sequence[str]) -> None:
        self.name = "hub"
        self.routes: list[Route] = []
        #: set by the simulation that it is part of
        self.nursery: trio.Nursery | None = None
        self.is_up = True
        #: seconds after which each new connection is ended
        self.lasts: float | None = None
        #: whether calls are let in, and whether connections are kept that make any
        self.lets_in = True
        self.keeps = True
        #: who came, and when
        self.came: list[tuple[str, float]] = []
        #: by cluster, when its last connection was ended
        self.ended: dict[str, float] = {}
        #: the delays between that and the next attempt, for each attempt that has an earlier connection
        self.delays: list[tuple[str, float]] = []
        #: who reports, and who watches
        self.reporters: set[str] = set()
        self.watchers: set[str] = set()
        self._everybody = FederationBroadcast(
            items=[item(cluster=name, idle=1, seq=1) for name in clusters],
            origins=[ClusterOrigin(cluster_id=name, instance="aa", uptime_ms=60_000) for name in clusters],
        )
        self._server = FederationServer(self._report, self._watch)

    def serve(self, stream: trio.abc.Stream) -> None:
        """Take in a connection. Raises Unavailable while it is down."""
        assert self.nursery is not None
        cluster, now = stream.name, trio.current_time()  # type: ignore[attr-defined]
        self.came.append((cluster, now))
        if cluster in self.ended:
            self.delays.append((cluster, now - self.ended.pop(cluster)))
        if not self.is_up:
            raise Unavailable("nobody listens (simulated)", peer=self.name)
        self.nursery.start_soon(self._serve, cluster, stream)

    def go_down(self) -> None:
        """Every connection breaks, and nobody listens any more."""
        self.is_up = False
        for route in self.routes:
            route.cut()

    def forget(self) -> None:
        """Write down anew who comes."""
        self.came.clear()
        self.delays.clear()

    async def _serve(self, cluster: str, stream: trio.abc.Stream) -> None:
        refusal = None if self.keeps else Unavailable("go away (simulated)")
        with trio.move_on_after(math.inf if self.lasts is None else self.lasts):
            await self._server.serve(stream, refusal)
        self.ended[cluster] = trio.current_time()

    async def _report(self, call: IncomingReport) -> None:
        self._let_in()
        await call.accept()
        cluster = call.metadata["x-federation-cluster"]
        while await call.receive() is not None:
            self.reporters.add(cluster)
        await call.answer()

    async def _watch(self, call: IncomingWatch) -> None:
        self._let_in()
        await call.request()
        if self.lasts is None or self.lasts > LIVED:
            await call.send(self._everybody)
        self.watchers.add(call.metadata["x-federation-cluster"])
        await trio.sleep_forever()

    def _let_in(self) -> None:
        if not self.lets_in:
            raise Unauthenticated("nobody is let in (simulated)")


@asynccontextmanager
async def fleet(size: int, *, seed: int = 0) -> AsyncIterator[tuple[Simulation, Door]]:
    """So many agents at one door, which know of each other for TTL seconds after they were told last."""
    names = [f"c{number:03}" for number in range(size)]
    door = Door(names)
    async with simulated_federation(
        *names, hubs=0, scripted_hubs=[door], ttl=TTL, seed=seed, start=False, events=False
    ) as federation:
        for name in names:
            federation[name].source.set(member(name, idle=1))
            await federation[name].start()
        await trio.sleep(3.0)
        assert everybody_has_everything(federation, door)
        door.forget()
        try:
            yield federation, door
        finally:
            # Agents may try to connect until they have ended, when nobody can serve them any more.
            door.is_up = False


def everybody_has_everything(federation: Simulation, door: Door) -> bool:
    """Whether the door hears and tells every agent, and each has what it tells."""
    names = set(federation.clusters)
    return door.reporters == door.watchers == names and all(
        {record.cluster_id for record in cluster.registry.snapshot()} == names
        for cluster in federation.clusters.values()
    )


def first_of_each(door: Door) -> list[float]:
    """When each agent came first."""
    first: dict[str, float] = {}
    for cluster, at in door.came:
        first.setdefault(cluster, at)
    return list(first.values())


def delays(door: Door) -> list[tuple[float, float]]:
    """Of each agent that comes again and again to a door that is down: when each delay began, and its seconds."""
    last: dict[str, float] = {}
    found = []
    for cluster, at in door.came:
        if cluster in last:
            found.append((last[cluster], at - last[cluster]))
        last[cluster] = at
    return found


@pytest.mark.slow
async def test_two_hundred_agents_that_lose_their_hub_together(autojump_clock: MockClock) -> None:
    """The hub is down for 90 s, then ends each connection after a second, then works. Each of 200 agents tries first
    in its own two hundredth of ten seconds, so that none of these holds more than a tenth of them. In the whole outage
    no second holds a tenth of the attempts, and at the cap the delays are spread over all that there is."""
    async with fleet(MANY) as (federation, door):
        lost_at = trio.current_time()
        door.go_down()
        await trio.sleep(DOWN)
        first = [at - lost_at for at in first_of_each(door)]
        assert len(first) == MANY
        assert busiest(first) <= 0.1 * MANY
        assert [int(at * 20) for at in sorted(first)] == list(range(MANY))
        assert max(first) > 0.9 * first_window(MANY)
        # Without the last ten seconds, so that every delay that began before them has ended.
        spread = Counter(int(delay) for began, delay in delays(door) if began - lost_at <= DOWN - LONGEST)
        assert sorted(spread) == list(range(int(LONGEST)))
        assert min(spread.values()) > 0.08 * sum(spread.values())
        assert max(spread.values()) < 0.12 * sum(spread.values())

        # They have forgotten each other by now, and still do not come any sooner.
        door.is_up, door.lasts = True, LIVED
        door.delays.clear()
        await trio.sleep(LONGEST)
        assert busiest(at - lost_at for _, at in door.came) <= 0.1 * len(door.came)
        assert len(door.delays) > MANY / 2
        assert sum(delay > FIRST for _, delay in door.delays) > 0.8 * len(door.delays)

        door.lasts = None
        door.reporters.clear()
        door.watchers.clear()
        door.forget()
        works_from = trio.current_time()
        await trio.sleep(LIVED + LONGEST + 0.5)
        # Who waits has a draw from ten seconds before it, of which a part is over: up to a fifth of them come at once.
        assert busiest(at - works_from for _, at in door.came) <= 0.3 * MANY
        assert everybody_has_everything(federation, door)


async def test_a_small_fleet_is_back_at_once_after_a_blip(autojump_clock: MockClock) -> None:
    """Nobody's connection takes longer than half a second to be tried again, and all is as before within one."""
    for seed in range(3):
        async with fleet(FEW, seed=seed) as (federation, door):
            lost_at = trio.current_time()
            door.reporters.clear()
            door.watchers.clear()
            for route in door.routes:
                route.cut()
            await trio.sleep(1.0)
            assert len(door.came) == FEW
            assert max(at - lost_at for _, at in door.came) <= FIRST
            assert everybody_has_everything(federation, door)


async def test_only_a_stable_minute_makes_delays_small_again(autojump_clock: MockClock) -> None:
    """Connections that last a second, or 50, do not; those that last for more than a minute do."""
    async with fleet(FEW) as (_, door):
        door.go_down()
        await trio.sleep(DOWN)
        door.is_up = True
        for lasts, rounds in ((LIVED, 10), (50.0, 4)):
            door.lasts = lasts
            door.forget()
            await trio.sleep(rounds * (lasts + LONGEST))
            assert len(door.delays) >= FEW * (rounds - 1)
            assert sum(delay for _, delay in door.delays) > 0.3 * LONGEST * len(door.delays)
        door.lasts = STABLE + 5.0
        await trio.sleep(50.0 + LONGEST)
        door.forget()
        await trio.sleep(3 * door.lasts)
        assert len(door.delays) >= 2 * FEW
        assert max(delay for _, delay in door.delays) <= FIRST


def refuse_calls(door: Door) -> None:
    """Let nothing in; connections last for longer than a stable minute all the same."""
    door.lets_in, door.lasts = False, STABLE + 10.0


def say_goodbye(door: Door) -> None:
    """Refuse connections, and end each of them in HTTP/2's words."""
    door.keeps = False


@pytest.mark.parametrize("turn_bad, rounds_take", [(refuse_calls, STABLE + 10.0), (say_goodbye, 2.0)])
async def test_a_connection_that_lets_nothing_in_has_not_lived(
    turn_bad: Callable[[Door], None], rounds_take: float, autojump_clock: MockClock
) -> None:
    """However long it stands: what follows it is the next delay and not the first."""
    async with fleet(FEW) as (_, door):
        turn_bad(door)
        for route in door.routes:
            route.cut()
        await trio.sleep(8 * (rounds_take + LONGEST))
        assert len(door.delays) >= 6 * FEW
        # By then the bound is at the cap.
        late = door.delays[5 * FEW :]
        assert sum(delay for _, delay in late) > 0.3 * LONGEST * len(late)
        assert max(delay for _, delay in door.delays) <= LONGEST


@pytest.mark.slow
async def test_a_real_hub_that_comes_and_goes_has_everything_in_the_end(autojump_clock: MockClock) -> None:
    """Down for 90 s, then broken off after each second, then up: everybody has what everybody says."""
    names = [f"c{number:03}" for number in range(20)]
    async with simulated_federation(*names, events=False) as federation:
        for name in names:
            federation[name].source.set(member(name, idle=1))
        await federation.settle()
        await federation.restart_hub(0, down_for=DOWN)
        for round_number in range(10):
            await trio.sleep(LIVED)
            for name in names:
                federation.cut(name)
                federation[name].source.set(member(name, idle=round_number))
        await trio.sleep(LONGEST)
        await federation.settle()
        for name in names:
            known = {record.cluster_id: record.idle for record in federation[name].registry.snapshot()}
            assert known == dict.fromkeys(names, 9)

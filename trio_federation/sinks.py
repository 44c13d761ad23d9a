"""One sink, from the configuration's table to the agent: made, run and told where plugins run (`isolation.py`), closed
when it fails, and made anew after a while. A sink is told everything when it starts, and again after every change; what
changes while it is being told is conflated into the next telling. Whatever it is told, it is asked each second what
keeps it from showing it. What goes wrong is noted on the agent's side, in a `SinkAccount`, and costs nobody else
anything."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import structlog
import trio

from trio_federation.capacity import Capacity
from trio_federation.clock import Clock
from trio_federation.health import Health
from trio_federation.hookspecs import CapacitySink, Trouble
from trio_federation.isolation import Line
from trio_federation.logs import tell_failure
from trio_federation.metrics import FederationMetrics
from trio_federation.registry import Registry
from trio_federation.retry import Backoff
from trio_federation.sources import checked_troubles, failure_text, given_up_after, run_lives

log = structlog.get_logger("trio_federation.sinks")

#: Seconds that a sink gets to take one snapshot.
DEADLINE = 10.0
#: Seconds between looks at whether there is anything new to tell, and between questions for what troubles it.
LOOK_INTERVAL = 1.0
#: Seconds after which a sink is told again although nothing but ages has changed, and after which its troubles are
#: noted again although they are the same.
REFRESH_INTERVAL = 10.0
#: Seconds before a telling, or a question, that failed is tried again: at first, and at most.
FIRST_RETRY = 1.0
LONGEST_RETRY = 30.0


class SinkAccount:
    """What the agent keeps of one sink: its health, its metrics, its lines in the log. Used on the agent's loop only.

    It is also who hears of a loop that is blocked (`isolation.Watch`)."""

    def __init__(self, name: str, clock: Clock, metrics: FederationMetrics) -> None:
        self.name = name
        self.health = Health(name, clock())
        self._clock = clock
        self._metrics = metrics

    def told(self, seconds: float) -> None:
        """It has taken a snapshot, in so many seconds."""
        self._metrics.sink_told(self.name, seconds, self._clock())
        self.health.next_try = None
        for what in ("create", "run"):
            self._over(what)
        before = self.health.worked("update", self._clock())
        if before.was_told:
            log.info("sink_works", sink=self.name, what="update", failures_before=before.in_a_row)

    def has_started(self) -> None:
        """It runs, and there is nothing to tell it yet."""
        self.health.next_try = None
        for what in ("create", "run"):
            self._over(what)

    def failed(self, what: str, error: str, next_try: float | None = None) -> None:
        """`what` has failed, and is tried again at `next_try`."""
        self.health.next_try = next_try
        self._metrics.sink_failed(self.name, what)
        noted = self.health.failed(what, error, self._clock())
        tell_failure(log, noted, "sink_failed", {"sink": self.name, "what": what, "error": error})

    def troubled(self, troubles: Sequence[Trouble]) -> None:
        """It has said what keeps it from showing everything. It is told as ever."""
        self._over("troubles")
        told = sorted({(trouble.reason, trouble.party) for trouble in troubles})
        labels = self._metrics.sink_troubles(self.name, told)
        if not troubles:
            self._over("trouble")
            return
        error = "; ".join(trouble.detail for trouble in troubles)
        details: dict[str, object] = {"sink": self.name, "what": "trouble", "error": error}
        details["reasons"] = sorted({reason for reason, _ in told})
        if parties := sorted({party for _, party in told if party}):
            details["parties"] = parties
        last = self.health.last_error
        # By the labels, of which there are not too many: names without end would be lines without end.
        kind = " ".join(f"{reason}={party}" for reason, party in labels)
        noted = self.health.failed("trouble", error, self._clock(), counts=False, kind=kind)
        if self.health.state != "partly":  # what has failed is told first
            self.health.last_error = last
        tell_failure(log, noted, "sink_trouble", details)

    def would_not_say(self, error: str) -> None:
        """It has failed to say what troubles it. When it is told next does not depend on that."""
        self.failed("troubles", error, self.health.next_try)

    def _over(self, what: str) -> None:
        before = self.health.over(what, self._clock())
        if before.was_told:
            log.info("sink_works", sink=self.name, what=what, failures_before=before.in_a_row)

    # isolation.Watch

    def blocked(self, seconds: float) -> None:
        """Its loop does not turn."""
        error = f"it has not given way for {seconds:.0f} s: a call in it blocks; it should await, or use a thread"
        if self.health.state != "blocked":
            self.failed("blocked", error)
        else:  # one failure, however long it takes
            tell_failure(
                log,
                self.health.failed("blocked", error, self._clock(), counts=False),
                "sink_failed",
                {"sink": self.name, "what": "blocked", "error": error},
            )

    def turns_again(self) -> None:
        """Its loop turns again."""
        self._over("blocked")

    def abandoned(self) -> None:
        """It did not let itself be stopped."""
        log.warning("plugin_abandoned", sink=self.name, error="it did not end when it was stopped")


class SinkRunner:
    """Runs one sink for as long as the agent lives.

    `make`: makes the sink, as often as need be. `registry`: what it is told of. `clock`: seconds. `generator`: for
    jitter, and this runner's alone."""

    def __init__(
        self,
        name: str,
        make: Callable[[], CapacitySink],
        *,
        registry: Registry,
        clock: Clock,
        generator: random.Random,
        account: SinkAccount,
    ) -> None:
        self._name = name
        self._make = make
        self._registry = registry
        self._clock = clock
        self._random = generator
        self._account = account
        #: what it was told last, in whichever of its lives; None where nobody knows what became of that. At first that
        #: is nothing, which is what an empty registry would tell.
        self._told: Sequence[Capacity] | None = ()

    async def run(self, line: Line) -> NoReturn:
        """Run it until cancelled, wherever this is called; `line` leads to the agent."""

        def begin(sink: CapacitySink, nursery: trio.Nursery) -> None:
            nursery.start_soon(self._keep_told, sink, line, nursery)
            nursery.start_soon(self._keep_asking, sink, line)

        await run_lives(
            self._name,
            self._make,
            begin,
            start_within=self._registry.ttl / 2,
            failed=partial(line.tell, self._account.failed),
            clock=self._clock,
            generator=self._random,
        )

    async def _keep_told(self, sink: CapacitySink, line: Line, nursery: trio.Nursery) -> NoReturn:
        backoff = Backoff(self._random, first=FIRST_RETRY, longest=LONGEST_RETRY, least=0.5)
        if self._told != ():  # to know nothing yet is nothing to tell; a new sink does not know what the last one did
            self._told = None
        told_version, told_at = -1, 0.0
        while True:
            now = trio.current_time()
            while not self._registry.free():
                await trio.lowlevel.checkpoint()
            version = self._registry.version()
            if version != told_version or now >= told_at + REFRESH_INTERVAL:
                snapshot = self._snapshot()
                if snapshot != self._told:
                    self._told = None
                    # The list is then the sink's to change.
                    failure = await self._tell(sink, list(snapshot), line, nursery)
                    took = trio.current_time() - now
                    if failure is not None:
                        delay = backoff.again(0.0)
                        line.tell(self._account.failed, "update", failure, self._clock() + delay)
                        await trio.sleep(delay)
                        continue
                    backoff.reset()
                    line.tell(self._account.told, took)
                elif told_version == -1:
                    line.tell(self._account.has_started)
                self._told, told_version, told_at = snapshot, version, now
            await trio.sleep(LOOK_INTERVAL)

    async def _keep_asking(self, sink: CapacitySink, line: Line) -> NoReturn:
        """Ask it what troubles it, also while it is told something, or nothing."""
        backoff = Backoff(self._random, first=FIRST_RETRY, longest=LONGEST_RETRY, least=0.5)
        noted: tuple[Trouble, ...] | None = None
        noted_at = 0.0
        while True:
            try:
                troubles = checked_troubles(sink.troubles())
            except BaseException as error:
                noted = None
                line.tell(self._account.would_not_say, failure_text(error))
                await trio.sleep(backoff.again(0.0))
                continue
            backoff.reset()
            now = trio.current_time()
            if troubles != noted or (troubles and now >= noted_at + REFRESH_INTERVAL):
                line.tell(self._account.troubled, troubles)
                noted, noted_at = troubles, now
            await trio.sleep(LOOK_INTERVAL)

    def _snapshot(self) -> tuple[Capacity, ...]:
        # Env by env, because a snapshot of everything in one step would hold the registry's lock, and the agent, for
        # as long as that takes.
        found = [record for env in self._registry.by_env() for record in env]
        found.sort(key=lambda record: record.sort_key)
        return tuple(found)

    async def _tell(
        self, sink: CapacitySink, snapshot: Sequence[Capacity], line: Line, nursery: trio.Nursery
    ) -> str | None:
        """Tell it once. Returns why that failed."""
        try:
            with given_up_after(nursery, DEADLINE, deaf=partial(line.tell, self._account.failed, "update")) as scope:
                await sink.update(snapshot)
        except BaseException as error:
            return failure_text(error)
        return f"not done within {DEADLINE:g} s" if scope.cancelled_caught else None

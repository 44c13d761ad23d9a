"""What a plugin's loop may come to, and what it starts with: one that breaks is replaced and costs nobody else
anything, one that blocks for long is told of again, and none finds anything of the agent's in its context. Real threads
under a real clock, as in `test_own_loop.py`."""

from __future__ import annotations

import contextvars
import random
import threading
from collections.abc import Callable, Sequence

import pytest
import structlog.testing
import trio
import trio_asyncio
from structlog.typing import EventDict

from tests.federation.helpers import counted, lines
from trio_federation import isolation, sources
from trio_federation.agent import Agent
from trio_federation.capacity import Capacity
from trio_federation.clock import BootClock, boot_time
from trio_federation.config import Federation
from trio_federation.health import SUMMARY_AFTER, Health
from trio_federation.hookspecs import CapacitySink, CapacitySource
from trio_federation.isolation import Line, on_own_loop
from trio_federation.metrics import FederationMetrics
from trio_federation.sinks import SinkAccount
from trio_federation.sources import CLOSE_DEADLINE, SourceAccount

#: seconds after which a test is lost
PATIENCE = 20.0
#: seconds between two looks
LOOK = 0.01


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Impatient supervision."""
    monkeypatch.setattr(isolation, "LOOK_INTERVAL", 0.02)
    monkeypatch.setattr(isolation, "BLOCKED_AFTER", 0.1)
    monkeypatch.setattr(isolation, "BLOCKED_AGAIN", 0.05)
    monkeypatch.setattr(isolation, "END_DEADLINE", 0.3)
    monkeypatch.setattr(sources, "FIRST_REMAKE", 0.05)


class Heard:
    """Keeps what a watch is told."""

    def __init__(self) -> None:
        #: for how long it had been blocked, each time
        self.seconds: list[float] = []
        self.turned = self.left = False

    def blocked(self, seconds: float) -> None:
        """Keep it."""
        self.seconds.append(seconds)

    def turns_again(self) -> None:
        """Keep it."""
        self.turned = True

    def failed(self, what: str, error: str, next_try: float | None = None) -> None:
        """Nothing fails here."""
        raise AssertionError(error)

    def abandoned(self) -> None:
        """Keep it."""
        self.left = True


class Counting(CapacitySource):
    """Has one more idle with every collect."""

    def __init__(self) -> None:
        self.collects = 0

    async def collect(self) -> Sequence[Capacity]:
        """Count."""
        await trio.lowlevel.checkpoint()
        self.collects += 1
        return [Capacity("west", "ns", "env", "good", idle=self.collects)]


def break_loop() -> None:
    """What a client library does that hands its events over with `run_sync_soon` into a channel that is full."""

    def full() -> None:
        raise trio.WouldBlock("no room\nfor events")

    trio.lowlevel.current_trio_token().run_sync_soon(full)


class BreaksOnce(CapacitySource):
    """Breaks its loop in the first of its lives, and works in the others."""

    lives = 0

    def __init__(self) -> None:
        type(self).lives += 1

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Break the loop, or do as every source does."""
        if self.lives == 1:
            break_loop()
        await super().run(task_status=task_status)

    async def collect(self) -> Sequence[Capacity]:
        """One record."""
        await trio.lowlevel.checkpoint()
        return [Capacity("west", "ns", "env", "broken", idle=1)]


class SinkBreaksOnce(CapacitySink):
    """The same as a sink."""

    lives = 0

    def __init__(self) -> None:
        type(self).lives += 1

    async def update(self, snapshot: Sequence[Capacity]) -> None:
        """Break the loop, or take it."""
        if self.lives == 1:
            break_loop()
        await trio.lowlevel.checkpoint()


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again, until it is so."""
    while not condition():  # noqa: ASYNC110 – what it looks at are health and metrics, which tell nobody
        await trio.sleep(LOOK)


@pytest.mark.parametrize("kind", ["source", "sink"])
def test_a_loop_that_breaks_is_replaced_and_costs_no_other_anything(kind: str, quick: None) -> None:
    """A callback that raises breaks Trio's whole loop: here the plugin's alone. It is a failure like any: counted, told
    in one line, shown, tried again after a backoff, and over when the plugin works."""
    BreaksOnce.lives = SinkBreaksOnce.lives = 0
    name = "broken"
    health: dict[str, Health] = {}

    async def main() -> Agent:
        agent = Agent(
            "west",
            Federation(report_interval=0.05),
            sources={"good": Counting} | ({name: BreaksOnce} if kind == "source" else {}),
            sinks={name: SinkBreaksOnce} if kind == "sink" else {},
            isolated=True,
            clock=boot_time,
            generator=random.Random(0),
        )
        account = agent.source_accounts[name] if kind == "source" else agent.sink_accounts[name]
        health[name] = account.health
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                await nursery.start(agent.run)
                await until(lambda: account.health.failures > 0)
                assert account.health.state == "failing"
                assert account.health.next_try is not None
                idle = max((each.idle for each in agent.registry.records("ns", "env")), default=0)
                await until(lambda: account.health.state in ("live", "working"))
                await until(lambda: any(each.idle > idle + 2 for each in agent.registry.records("ns", "env")))
                nursery.cancel_scope.cancel()
        return agent

    with structlog.testing.capture_logs() as logs:
        agent = trio.run(main, clock=BootClock())
    assert (BreaksOnce if kind == "source" else SinkBreaksOnce).lives == 2
    (failure,) = lines(logs, f"{kind}_failed")
    assert failure["what"] == "run"
    assert failure["error"].startswith("its loop broke: ")
    assert "WouldBlock" in failure["error"]
    assert failure["error"].isprintable()
    assert health[name].failures == 1
    assert counted(agent, f"trio_federation_{kind}_failures_total", kind="run") == 1
    assert ("run", 1) in [(line["what"], line["failures_before"]) for line in lines(logs, f"{kind}_works")]


async def test_nothing_of_the_agents_context_is_in_the_plugins() -> None:
    """The agent's loop has a bridge to asyncio open. A plugin that found that in its context would drive the agent's
    asyncio loop from its own thread."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nobody's")
    variable.set("the agent's")
    found: list[object] = []

    async def body(line: Line) -> None:
        await trio.lowlevel.checkpoint()
        found.extend([trio_asyncio.current_loop.get(), variable.get()])
        variable.set("the plugin's")

    with trio.fail_after(PATIENCE):
        async with trio_asyncio.open_loop() as loop:
            await on_own_loop("plugin", BootClock, body, Heard())
            assert trio_asyncio.current_loop.get() is loop
    assert found == [None, "nobody's"]
    assert variable.get() == "the agent's"


async def test_a_block_that_lasts_is_told_again_and_again(quick: None) -> None:
    """With the time that it has lasted for, until it is over."""
    release = threading.Event()

    async def body(line: Line) -> None:
        await trio.lowlevel.checkpoint()
        release.wait()
        await trio.sleep_forever()

    watch = Heard()
    try:
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(on_own_loop, "plugin", BootClock, body, watch)
                await until(lambda: len(watch.seconds) >= 4)
                assert not watch.turned
                release.set()
                await until(lambda: watch.turned)
                nursery.cancel_scope.cancel()
    finally:
        release.set()
    assert not watch.left
    assert watch.seconds[0] == isolation.BLOCKED_AFTER
    assert watch.seconds == sorted(set(watch.seconds))


@pytest.mark.parametrize("kind", ["source", "sink"])
def test_a_block_that_lasts_is_one_failure_and_summed_up(kind: str) -> None:
    """It is counted once, and told at first and then ever more rarely; also one that comes soon after another, which
    is not worth a line in itself."""
    now = 0.0
    metrics = FederationMetrics()
    of_kind = SourceAccount if kind == "source" else SinkAccount
    account = of_kind("x", lambda: now, metrics)

    def blocked(since: float, until: float) -> None:
        nonlocal now
        now = since + 2.0
        account.blocked(2.0)
        for _ in range(int((until - now) / 60.0)):
            now += 60.0
            account.blocked(now - since)

    def told(logs: Sequence[EventDict]) -> list[tuple[str, str]]:
        return [
            (line["event"].removeprefix(kind), line.get("error", "")[:33])
            for line in logs
            if line["log_level"] in ("info", "warning")
        ]

    with structlog.testing.capture_logs() as logs:
        blocked(0.0, 3.0)
        now = 4.0
        account.turns_again()
    assert told(logs) == [("_failed", "it has not given way for 2 s: a c"), ("_works", "")]
    with structlog.testing.capture_logs() as logs:
        blocked(10.0, SUMMARY_AFTER)  # and goes on
    assert told(logs)[0][1].startswith("it has not given way for 62 s")
    assert len(told(logs)) == 1
    assert account.health.failures == 2
    assert account.health.state == "blocked"
    assert sum(s.value for f in metrics.registry.collect() for s in f.samples if s.name.endswith("failures_total")) == 2


def test_a_loop_gets_the_time_that_its_plugin_was_promised() -> None:
    """CLOSE_DEADLINE for an iterator of changes, and then the same for `aclose()`."""
    assert isolation.END_DEADLINE > 2 * CLOSE_DEADLINE

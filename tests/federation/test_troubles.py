"""What a source says that keeps it from telling everything, and where people find it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import exposition, lines
from trio_federation.agent import Agent
from trio_federation.capacity import Capacity, Change
from trio_federation.config import Federation
from trio_federation.hookspecs import CapacitySource, Trouble


class TroubledSource(CapacitySource):
    """Polled; says what the test tells it to."""

    def __init__(self) -> None:
        self.said: Any = ()
        self.live = True
        self.unknown: Any = ()
        self.namespaces = ["agents"]
        #: when it was asked whether it is live
        self.asked: list[float] = []

    async def collect(self) -> Sequence[Capacity]:
        return [Capacity("west", namespace, "python", "p", idle=1) for namespace in self.namespaces]

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        await trio.sleep_forever()
        yield ()

    def is_live(self) -> bool:
        self.asked.append(trio.current_time())
        return self.live

    def unknown_namespaces(self) -> Collection[str]:
        unknown: Collection[str] = self.unknown
        return unknown

    def troubles(self) -> Sequence[Trouble]:
        said: Sequence[Trouble] = self.said
        return said


@pytest.fixture
async def troubled(
    autojump_clock: MockClock,
) -> AsyncIterator[tuple[TroubledSource, Agent]]:
    source = TroubledSource()
    async with trio.open_nursery() as nursery:
        agent = Agent("west", Federation(), sources={"source[0]:troubled": lambda: source}, generator=Random(0))
        await nursery.start(agent.run)
        await trio.sleep(1)
        yield source, agent
        nursery.cancel_scope.cancel()


def shown(agent: Agent) -> dict[str, Any]:
    """What /readyz says of the one source."""
    (source,) = agent.health()["sources"]
    assert isinstance(source, dict)
    return source


async def troubles_exported(agent: Agent) -> dict[str, float]:
    """The metric's value, by reason."""
    text = await exposition(agent)
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name == "trio_federation_source_trouble":
            found = {sample.labels["reason"]: sample.value for sample in family.samples}
    return found


async def test_what_troubles_a_source_shows_until_it_is_over(
    troubled: tuple[TroubledSource, Agent], autojump_clock: MockClock
) -> None:
    """In its state, in the error and in a metric; the records that it tells are as good as ever."""
    source, agent = troubled
    assert shown(agent)["state"] == "live"
    source.said = [Trouble("forbidden", "may not list pools in ns-b:\n grant it"), Trouble("not_found", "no such CRD")]
    await trio.sleep(11)
    state = shown(agent)
    assert state["state"] == "partly"
    assert state["last_error"]["text"] == "may not list pools in ns-b: grant it; no such CRD"
    assert state["failures"] == 0
    assert len(agent.registry.snapshot()) == 1
    assert await troubles_exported(agent) == {"forbidden": 1, "not_found": 1}
    source.said = source.said[1:]
    await trio.sleep(11)
    assert await troubles_exported(agent) == {"forbidden": 0, "not_found": 1}
    source.said = ()
    await trio.sleep(11)
    assert shown(agent)["state"] == "live"
    assert await troubles_exported(agent) == {"forbidden": 0, "not_found": 0}


async def test_who_else_is_involved_is_in_the_line_and_no_label(
    troubled: tuple[TroubledSource, Agent], logs: list[EventDict], autojump_clock: MockClock
) -> None:
    source, agent = troubled
    source.said = [Trouble("contested", "x", "rival"), Trouble("contested", "y", party="other"), Trouble("schema", "z")]
    await trio.sleep(11)
    (line,) = lines(logs, "source_trouble")
    assert (line["reasons"], line["parties"]) == (["contested", "schema"], ["other", "rival"])
    assert await troubles_exported(agent) == {"contested": 1, "schema": 1}
    source.said = [Trouble("forbidden", "x")]
    await trio.sleep(10)
    assert "parties" not in lines(logs, "source_trouble")[-1]


async def test_a_source_that_is_not_live_says_why(
    troubled: tuple[TroubledSource, Agent], autojump_clock: MockClock
) -> None:
    """One line, with the reason in it; and its records run out."""
    source, agent = troubled
    source.live, source.said = False, [Trouble("unreachable", "10.0.0.1:6443 does not answer")]
    await trio.sleep(45)
    state = shown(agent)
    assert state["state"] == "not_live"
    assert state["last_error"]["text"] == "it cannot vouch for what it has pushed: 10.0.0.1:6443 does not answer"
    assert agent.registry.snapshot() == []
    assert await troubles_exported(agent) == {"unreachable": 1}
    source.live, source.said = True, ()
    await trio.sleep(11)
    assert shown(agent)["state"] == "live"
    assert len(agent.registry.snapshot()) == 1


@pytest.mark.parametrize(
    "said, fault",
    [
        (None, "troubles() returned a NoneType"),
        (["forbidden"], "troubles() returned a list"),
        ([Trouble("Not a word", "x")], "the reason 'Not a word'"),
    ],
)
async def test_troubles_that_are_none(
    troubled: tuple[TroubledSource, Agent], said: object, fault: str, autojump_clock: MockClock
) -> None:
    """A mistake in a plugin is its failure, by name."""
    source, agent = troubled
    source.said = said
    await trio.sleep(11)
    assert shown(agent)["state"] == "failing"
    assert fault in shown(agent)["last_error"]["text"]


def namespaces(agent: Agent) -> list[str]:
    """Of what the agent itself knows."""
    return [record.namespace for record in agent.registry.snapshot()]


async def test_what_is_in_an_unknown_namespace_is_not_withdrawn(
    troubled: tuple[TroubledSource, Agent], autojump_clock: MockClock
) -> None:
    """It ages out: that nothing is known of a namespace does not mean that nothing is there."""
    source, agent = troubled
    source.namespaces = ["a", "b", "c"]
    await trio.sleep(10)
    assert namespaces(agent) == ["a", "b", "c"]
    source.namespaces, source.unknown = ["a"], {"b"}
    await trio.sleep(10)
    assert namespaces(agent) == ["a", "b"], "c is withdrawn: the source knows that nothing is there"
    await trio.sleep(10)
    assert namespaces(agent) == ["a", "b"]
    await trio.sleep(15)
    assert namespaces(agent) == ["a"]
    source.namespaces, source.unknown = ["a", "b"], ()
    await trio.sleep(10)
    assert namespaces(agent) == ["a", "b"]


@pytest.mark.parametrize("said", [None, "agents", [1]])
async def test_unknown_namespaces_that_are_none(
    troubled: tuple[TroubledSource, Agent], said: object, autojump_clock: MockClock
) -> None:
    source, agent = troubled
    source.unknown = said
    await trio.sleep(11)
    assert "unknown_namespaces() returned a" in shown(agent)["last_error"]["text"]
    assert namespaces(agent) == ["agents"]


async def test_a_source_that_is_not_live_is_asked_again_each_second(
    troubled: tuple[TroubledSource, Agent], autojump_clock: MockClock
) -> None:
    """Its records run out meanwhile, so it must not wait for the next resync once it can vouch for them again."""
    source, _ = troubled
    source.live = False
    await trio.sleep(20)
    waited = [after - before for before, after in pairwise(source.asked[-8:])]
    assert waited == pytest.approx([1.0] * 7, abs=0.1)
    source.live = True
    await trio.sleep(30)
    waited = [after - before for before, after in pairwise(source.asked[-3:])]
    assert waited == pytest.approx([10.0, 10.0], abs=0.1)

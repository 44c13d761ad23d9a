"""The invariants of a simulated federation: each of them fires in a world that is wrong in the way that it is about,
and none of them in the real one. What is wrong is a piece of the product that the test has broken, or a peer that
lies."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import structlog.testing
import trio

import trio_federation.reporter
from trio_federation import waits
from trio_federation.capacity import Capacity, Change, Withdrawal
from trio_federation.hookspecs import CapacityFilter
from trio_federation.hub import Hub
from trio_federation.local import LocalTruth
from trio_federation.pb.sandbox.sync.v1 import ClusterOrigin, EnvCapacity, ReportFederationRequest
from trio_federation.registry import ForeignMember, Registry, _Env
from trio_federation.retry import Backoff
from trio_federation.router import Placement, Router
from trio_federation.samples import SampleTable
from trio_federation.testing.invariants import (
    ALL_INVARIANTS,
    AgesNeverShrink,
    Invariant,
    InvariantBroken,
    NothingCountsTwice,
    NothingOutlivesItsTtl,
    TruthIsEverywhere,
    every_invariant,
)
from trio_federation.testing.ledger import Statement
from trio_federation.testing.records import member
from trio_federation.testing.scripted import PushingSource, ScriptedSource
from trio_federation.testing.simulation import Simulation, run_simulated, simulated_federation
from trio_federation.testing.ways import Ways
from trio_federation.waits import Waits
from trio_federation.watcher import Watcher

Story = Callable[[Simulation], Awaitable[None]]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing that agents and hubs log is printed."""
    with structlog.testing.capture_logs():
        yield


def told(
    story: Story, invariants: Sequence[Invariant], *names: str, seed: int = 0, hubs: int = 1, ttl: float = 30.0
) -> str:
    """Run a story, and return what the invariants say of it; "" where they hold."""

    async def run() -> str:
        clusters = names or ("west", "east")
        try:
            async with simulated_federation(*clusters, hubs=hubs, seed=seed, ttl=ttl, invariants=invariants) as fed:
                await story(fed)
        except InvariantBroken as error:
            return str(error)
        return ""

    return run_simulated(run, seed=seed)


async def east_dies(fed: Simulation) -> None:
    """East says something, dies without a word, and is forgotten."""
    fed["east"].source.set(member("east", idle=3), member("east", "p2", env="other", idle=1))
    fed["west"].source.set(member("west", idle=2))
    await trio.sleep(12.0)
    await fed["east"].kill()
    await trio.sleep(50.0)


async def west_stops_telling(fed: Simulation) -> None:
    """West says something, and then its sources fail for longer than a TTL."""
    fed["west"].source.set(member("west", idle=2))
    await trio.sleep(12.0)
    fed["west"].fail_sources(OSError("no answer"))
    await trio.sleep(50.0)


async def east_renames(fed: Simulation) -> None:
    """East renames a pool, moves another one to another group, and changes what both have."""
    fed["east"].source.set(member("east", idle=3, scaling_group="a"), member("east", "p2", idle=1, scaling_group="a"))
    await trio.sleep(7.0)
    fed["east"].source.set(member("east", "q1", idle=3, scaling_group="a"), member("east", "p2", scaling_group="b"))
    await trio.sleep(20.0)


# --- every checker can fire: NothingOutlivesItsTtl -------------------------------------------------------------------


def test_a_registry_that_keeps_records_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SampleTable.__init__
    monkeypatch.setattr(SampleTable, "__init__", lambda self, *, ttl, **more: real(self, ttl=ttl + 2.0, **more))
    said = told(east_dies, [NothingOutlivesItsTtl()])
    # The moment, the checker, the registry, the record, what it says, and what is true, in one line.
    assert re.fullmatch(
        r"at 3\d\.\d{3} s: NothingOutlivesItsTtl: the registry of west: snapshot\(\) has east/ns/(env/p1|other/p2), "
        r"3\d\.\d{3} s old by its own clock, and the TTL is 30 s",
        said,
    )


def stale(real: Callable[..., Any]) -> Callable[..., Any]:
    """A query that answers with everything that it has ever answered with."""
    known: dict[object, Any] = {}

    def query(registry: Registry, *names: str) -> Any:
        answer = real(registry, *names)
        if isinstance(answer, Iterator):
            answer = [record for records in answer for record in records]
            return iter([merged((id(registry), names), answer)])
        if isinstance(answer, list):
            return merged((id(registry), names), answer)
        return known.setdefault((id(registry), names), answer) if answer else known.get((id(registry), names), answer)

    def merged(key: object, records: Sequence[Capacity]) -> list[Capacity]:
        found = known.setdefault(key, {})
        found.update((record.identity, record) for record in records)
        return sorted(found.values(), key=lambda record: record.sort_key)

    return query


@pytest.mark.parametrize(
    "query, story",
    [
        ("snapshot", east_dies),
        ("records", east_dies),
        ("by_env", west_stops_telling),
        ("foreign_members", east_dies),
        ("best_foreign_member", east_dies),
        ("local_idle", west_stops_telling),
    ],
)
def test_a_query_that_answers_with_what_has_run_out(query: str, story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, query, stale(getattr(Registry, query)))
    said = told(story, [NothingOutlivesItsTtl()])
    # What by_env() answers comes from records().
    assert f": the registry of west: {'by_env' if query == 'records' else query}(" in said
    moment = float(said.split()[1])
    assert 35.0 <= moment <= 46.0


def test_a_router_whose_candidates_have_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real, known = Router.place, dict[tuple[int, str], Placement]()

    def place(self: Router, namespace: str, env_name: str, *args: Any, **more: Any) -> Placement:
        placement = real(self, namespace, env_name, *args, **more)
        key = (id(self.registry), env_name)
        if len(placement.candidates):
            known[key] = placement
        return known.get(key, placement)

    monkeypatch.setattr(Router, "place", place)
    said = told(east_dies, [NothingOutlivesItsTtl()])
    assert re.search(r"the registry of west: a candidate of ns/(env|other) is east::p\d, \d+\.\d{3} s old", said)


def freshening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hubs tell who comes to watch everything as if it had just been true."""
    real = Hub._everything

    def everything(self: Hub) -> list[Change]:
        now = self._clock()
        return [replace(each, observed_at=now) if isinstance(each, Capacity) else each for each in real(self)]

    monkeypatch.setattr(Hub, "_everything", everything)


async def east_dies_and_west_comes_back(fed: Simulation) -> None:
    """The hub tells another agent of west what it had told the one before it."""
    fed["east"].source.set(member("east", idle=3))
    await trio.sleep(12.0)
    await fed["east"].kill()
    await trio.sleep(5.0)
    await fed["west"].kill()
    await fed["west"].start()
    await trio.sleep(50.0)


def test_a_hub_that_makes_a_record_live_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cluster's own clock all is well; its source has been silent for longer than the TTL."""
    freshening(monkeypatch)
    said = told(east_dies_and_west_comes_back, [NothingOutlivesItsTtl()])
    assert re.search(
        r"the registry of west: snapshot\(\) has east/ns/env/p1, for which its source has vouched last at 5\.000 s, "
        r"\d\d\.\d{3} s ago; the TTL is 30 s, and 0\.002 s are allowed for",
        said,
    )


# --- NothingCountsTwice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query, twice",
    [
        ("snapshot", lambda answer: [record for record in answer for _ in range(2)]),
        ("by_env", lambda answer: iter([*(envs := list(answer)), *envs])),
        ("foreign_members", lambda answer: answer + answer),
        ("local_idle", lambda answer: 2 * answer),
    ],
)
def test_a_query_that_counts_twice(query: str, twice: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(Registry, query)
    monkeypatch.setattr(Registry, query, lambda self, *names: twice(real(self, *names)))
    said = told(east_dies, [NothingCountsTwice()])
    assert ": NothingCountsTwice: the registry of " in said
    assert query in said


def test_aggregates_beside_the_members_that_they_sum_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fed: Simulation) -> None:
        fed["east"].source.set(member("east", "", idle=5), member("east", "p1", idle=3))
        await trio.sleep(7.0)

    assert told(story, [NothingCountsTwice()]) == ""
    monkeypatch.setattr(_Env, "visible", lambda self, now, ttl: [*self.rows, *aggregates_of(self)])
    said = told(story, [NothingCountsTwice()])
    assert "snapshot() has the aggregate east/ns/env// beside the member east/ns/env/p1" in said


def aggregates_of(env: _Env) -> list[Capacity]:
    """The aggregate rows of an env, shadowed or not."""
    return [record for segment in env.clusters.values() for record in segment.aggregates.values()]


def relaying(monkeypatch: pytest.MonkeyPatch, which: Callable[[Sequence[Change]], Sequence[Change]]) -> None:
    """Have hubs relay only some of their news."""
    real = Hub._relay
    monkeypatch.setattr(Hub, "_relay", lambda self, cluster_id, news: real(self, cluster_id, which(news)))


def no_withdrawal(news: Sequence[Change]) -> Sequence[Change]:
    """The news without what is gone."""
    return [change for change in news if not isinstance(change, Withdrawal)]


def test_a_renamed_pool_that_counts_under_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    relaying(monkeypatch, no_withdrawal)
    said = told(east_renames, [NothingCountsTwice()])
    assert re.search(
        r"the registry of west: it has .*p1 \[idle 3, group a\].*, which the sources of east have never", said
    )
    assert "q1 [idle 3, group a]" in said


def test_values_of_different_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two pools that have changed together only one arrives: the sum was never true."""

    async def story(fed: Simulation) -> None:
        fed["east"].source.set(member("east", idle=3), member("east", "p2"))
        await trio.sleep(7.0)
        relaying(monkeypatch, lambda news: news[:1])
        fed["east"].source.set(member("east"), member("east", "p2", idle=3))
        await trio.sleep(20.0)

    said = told(story, [NothingCountsTwice()], "west", "east")
    assert re.search(
        r"it has east/ns/env/p1 \[idle 0\], east/ns/env/p2 \[idle 0\], which .* never said at one moment", said
    )


def test_an_agent_that_keeps_what_its_source_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalTruth, "_drop", lambda *_: None)
    said = told(east_renames, [NothingCountsTwice()])
    assert ": the registry of east: it has " in said


# --- AgesNeverShrink --------------------------------------------------------------------------------------------------


def test_a_hub_that_does_not_count_how_long_it_has_had_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    freshening(monkeypatch)
    said = told(east_dies_and_west_comes_back, [AgesNeverShrink()])
    assert re.search(
        r"the registry of west: it was told east/ns/env/p1 \[idle 3\] \(number \d+ of \w{8}\) of \d+\.\d{3} s, "
        r"\d+\.\d{3} s later than its source has vouched for it, \d+\.000 s; 0\.002 s are allowed for",
        said,
    )


def test_an_agent_that_takes_the_moment_of_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Watcher._take

    def take(self: Watcher, broadcast: Any, now: float) -> list[Change]:
        taken = real(self, broadcast, now)
        return [replace(each, observed_at=now) if isinstance(each, Capacity) else each for each in taken]

    monkeypatch.setattr(Watcher, "_take", take)
    assert "later than its source has vouched for it" in told(east_dies, [AgesNeverShrink()])


def test_a_registry_that_freshens_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Registry.snapshot
    monkeypatch.setattr(
        Registry, "snapshot", lambda self: [replace(each, observed_at=self.now()) for each in real(self)]
    )
    said = told(east_dies, [AgesNeverShrink()])
    assert re.search(
        r"snapshot\(\) has \S+/p\d \[idle \d\] \(number \d+ of \w{8}\), which has become \d\.\d{3} s younger", said
    )


def test_an_agent_that_vouches_for_more_than_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source takes two seconds to answer, and answers of the moment at which it was asked."""
    real = LocalTruth.collecting

    def collecting(
        self: LocalTruth, source: str, records: Any, observed_at: float, now: float, *more: Any, **most: Any
    ) -> Any:
        return real(self, source, records, now, now, *more, **most)

    async def story(fed: Simulation) -> None:
        fed["east"].source.set(member("east", idle=3))
        fed["east"].slow_sources(2.0)
        await trio.sleep(20.0)

    assert told(story, [AgesNeverShrink()]) == ""
    monkeypatch.setattr(LocalTruth, "collecting", collecting)
    said = told(story, [AgesNeverShrink()])
    assert re.search(
        r"the registry of east: it has taken in .* which its own sources have said last of \d+\.000 s", said
    )


@pytest.mark.parametrize("instance", ["aa", None])
def test_a_peer_that_says_what_no_source_has_said(instance: str | None) -> None:
    async def story(fed: Simulation) -> None:
        fed.add("east")
        item = EnvCapacity(namespace="ns", env_name="env", member_pool="p1", idle=9, seq=1 if instance else 0)
        rows = [ClusterOrigin(instance=instance, uptime_ms=1000)] if instance else []
        async with fed.connection("east", instance=instance) as connection, connection.report() as call:
            await call.send(ReportFederationRequest(items=[item], origins=rows))
            await trio.sleep(5.0)

    said = told(story, [AgesNeverShrink()], "west")
    assert re.search(
        r"the registry of west: it was told east/ns/env/p1 \[idle 9\].*, which no source of east has said", said
    )
    # Of a cluster that is no part of the simulation nobody knows what is true.
    assert told(story, [AgesNeverShrink()], "west", seed=1).startswith("at ")


def test_a_peer_of_no_cluster_of_ours_may_say_anything() -> None:
    async def story(fed: Simulation) -> None:
        item = EnvCapacity(namespace="ns", env_name="env", member_pool="p1", idle=9)
        async with fed.connection("stranger") as connection, connection.report() as call:
            for _ in range(3):
                await call.send(ReportFederationRequest(items=[item]))
                await trio.sleep(5.0)
        await trio.sleep(40.0)

    assert told(story, every_invariant()) == ""


async def a_report_is_held(fed: Simulation) -> None:
    """What east says is in the network for a while, and east dies soon after."""
    fed["east"].source.set(member("east", idle=3))
    await trio.sleep(2.0)
    fed["east"].source.set(member("east", idle=4))
    fed.partition("east", one_way="to_hub")
    await trio.sleep(10.0)
    fed.heal("east")
    await trio.sleep(0.1)
    await fed["east"].kill()
    await trio.sleep(40.0)


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts from now on for how long a message was on its way."""
    monkeypatch.setattr(Waits, "waited", lambda *_: 0.0)
    monkeypatch.setattr(Waits, "is_bounded", lambda *_: True)


def test_a_hub_that_does_not_count_the_time_in_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(a_report_is_held, every_invariant()) == ""
    forgetful(monkeypatch)
    said = told(a_report_is_held, [AgesNeverShrink()])
    # Written at 5.2 s and let go at 12 s; the first of what is read then is one of 5 s.
    assert re.search(
        r"\[idle 4\] .* of 11\.800 s, 6\.800 s later than .* vouched for it, 5\.000 s; 0\.0\d\d s are allowed for",
        said,
    )
    said = told(a_report_is_held, [NothingOutlivesItsTtl()])
    assert re.search(r"has vouched last at 5\.000 s, 3\d\.\d{3} s ago; .* and 0\.0\d\d s are allowed for", said)


def test_an_agent_that_does_not_count_the_time_in_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fed: Simulation) -> None:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(9.0)
        fed["east"].source.set(member("east", idle=4))
        fed.partition("west", one_way="to_cluster")
        await trio.sleep(9.0)
        fed.heal("west")
        await trio.sleep(1.0)

    assert told(story, every_invariant()) == ""
    forgetful(monkeypatch)
    assert "later than its source has vouched for it" in told(story, [AgesNeverShrink()])


async def a_slow_line(fed: Simulation) -> None:
    """What east and west say takes its time from the start, and later longer than that."""
    fed.delay("west", 0.5)
    fed["east"].source.set(member("east", idle=3))
    fed.delay("east", 1.0)
    fed.cut("west")
    fed.cut("east")
    await trio.sleep(100.0)
    fed.delay("east", 2.25)
    await trio.sleep(100.0)


def test_only_what_the_quickest_took_is_allowed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the opening does not count any more, ages lack what the network takes at least, and that is allowed for;
    what is forgotten too quickly is not."""
    assert told(a_slow_line, every_invariant()) == ""
    monkeypatch.setattr(waits, "LEAK", 0.05)
    said = told(a_slow_line, [AgesNeverShrink()])
    assert "later than its source has vouched for it" in said


def test_the_opening_of_a_connection_leaves_nothing_to_allow_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "OPENING_COUNTS_FOR", 0.0)
    said = told(a_slow_line, [AgesNeverShrink()])
    assert "later than its source has vouched for it" in said


def test_the_rounding_is_needed_and_no_more_than_that() -> None:
    async def story(fed: Simulation) -> None:
        fed["east"].source.set(member("east", idle=3))
        for _ in range(20):
            await trio.sleep(1.7777)
            fed.cut("west")

    assert told(story, [AgesNeverShrink()]) == ""
    said = told(story, [AgesNeverShrink(rounding=0.0)])
    assert re.search(r" 0\.00[012] s later than its source has vouched for it", said)


# --- TruthIsEverywhere ------------------------------------------------------------------------------------------------


async def east_changes(fed: Simulation) -> None:
    """What east has changes, comes and goes."""
    for idle in (1, 2):
        fed["east"].source.set(member("east", idle=idle), member("east", f"p{idle + 1}"))
        await trio.sleep(15.0)


def test_a_hub_that_relays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    relaying(monkeypatch, lambda news: [])
    said = told(east_changes, [TruthIsEverywhere()])
    assert re.fullmatch(
        r"at 0\.\d{3} s: TruthIsEverywhere: the registry of west: it lacks east/ns/env/p\d \[idle \d\], which east "
        r"says since 0\.000 s, on a way that was ready at 0\.\d{3} s",
        said,
    )


def test_a_hub_that_relays_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is new arrives, and what has become of it does not."""
    seen: set[object] = set()

    def new(news: Sequence[Change]) -> list[Change]:
        fresh = [change for change in news if change.identity not in seen]
        seen.update(change.identity for change in fresh)
        return fresh

    relaying(monkeypatch, new)
    said = told(east_changes, [TruthIsEverywhere()])
    assert re.search(
        r"the registry of west: it has east/ns/env/p1 \[idle 1\] .*, and east says \[idle 2\] since 15\.000 s", said
    )


def test_a_hub_that_relays_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    relaying(monkeypatch, no_withdrawal)
    said = told(east_changes, [TruthIsEverywhere()])
    assert re.search(r"the registry of west: it has east/ns/env/p2 .*, which east has no longer since 15\.000 s", said)


async def east_stops(fed: Simulation) -> None:
    """East stops cleanly."""
    fed["east"].source.set(member("east", idle=1))
    await trio.sleep(12.0)
    await fed["east"].stop()
    await trio.sleep(10.0)


def test_an_agent_that_stops_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(east_stops, [TruthIsEverywhere()]) == ""
    monkeypatch.setattr(LocalTruth, "withdrawn", lambda self, now: [])
    said = told(east_stops, [TruthIsEverywhere()])
    assert re.search(
        r"the registry of west: it has east/ns/env/p1 .*, and the agent of east has stopped cleanly at 12\.000 s", said
    )


async def east_is_cut_off(fed: Simulation) -> None:
    """East is out of reach for a minute, and comes back."""
    fed["east"].source.set(member("east", idle=1))
    await trio.sleep(12.0)
    fed.partition("east")
    await trio.sleep(60.0)
    fed.heal("east")
    await trio.sleep(30.0)


def test_an_agent_that_takes_its_time_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(east_is_cut_off, [TruthIsEverywhere()]) == ""
    monkeypatch.setattr(Backoff, "again", lambda self, lived: 19.0)
    said = told(east_is_cut_off, [TruthIsEverywhere()])
    assert re.search(
        r"the registry of west: it lacks east/ns/env/p1 \[idle 1\], .* on a way that was ready at 82\.\d{3} s", said
    )


def test_a_reporter_that_gathers_changes_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio_federation.reporter, "DEBOUNCE", 0.4)
    said = told(east_changes, [TruthIsEverywhere()])
    assert "since 15.000 s" in said
    assert 15.2 < float(said.split()[1]) < 15.4
    monkeypatch.setattr(trio_federation.reporter, "DEBOUNCE", 0.2)
    assert told(east_changes, [TruthIsEverywhere()]) == ""


def test_an_agent_that_does_not_know_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleTable, "_withdrawal", lambda self, withdrawal, now: None)
    said = told(east_changes, [TruthIsEverywhere()], "east")
    assert "the registry of east: it has east/ns/env/p2" in said


class Longest(random.Random):
    """Draws the most that it may."""

    def uniform(self, a: float, b: float) -> float:
        """The upper bound."""
        return b


def test_the_bounds_are_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth less of each, and the real system does not keep up in its worst case."""
    real = Backoff.__init__
    monkeypatch.setattr(Backoff, "__init__", lambda self, generator, **more: real(self, Longest(), **more))

    async def story(fed: Simulation) -> None:
        fed["east"].source.set(member("east", idle=1))
        await trio.sleep(12.0)
        fed.partition("east")
        # It tries again 0.5, 1, 2, 4, 8, 10, 10 and 10 s after the break, and each of these; and then it is healed.
        await trio.sleep(45.6)
        fed.heal("east")
        await trio.sleep(12.0)
        fed["east"].source.set(member("east", idle=2))
        await trio.sleep(8.0)

    assert told(story, [TruthIsEverywhere()]) == ""
    assert "since 70.000 s" in told(story, [TruthIsEverywhere(news=0.14)])
    assert "lacks east/ns/env/p1 [idle 1]" in told(story, [TruthIsEverywhere(healing=9.5)])


# --- the real system --------------------------------------------------------------------------------------------------


async def an_eventful_day(fed: Simulation) -> None:
    """Pools come, go, are renamed and change their group; sources push and answer; agents and hubs come and go."""
    pushing = fed["east"].more_sources["push"] = PushingSource()
    await fed["east"].stop()
    await fed["east"].start()
    for number in range(6):
        group, other = ("a", "b") if number % 2 else ("b", "a")
        fed["west"].source.set(
            member("west", f"p{number % 3}", idle=number, scaling_group=group),
            member("west", "steady", idle=1, scaling_group=other),
            *([member("west", "", env="summed", idle=number), member("west", "", env="summed", scaling_group="a")]),
            *([member("west", "m", env="summed", idle=1)] if number % 2 else []),
        )
        pushing.push(
            member("east", f"q{number % 2}", idle=number), Withdrawal(member("east", f"q{number % 3}").identity)
        )
        await trio.sleep(7.3)
        match number:
            case 0:
                await fed.restart_hub(0, down_for=3.0)
            case 1:
                await fed["west"].kill()
                await fed["west"].start()
            case 2:
                fed.delay("north", 0.3, jitter=0.2)
            case 3:
                fed.heal("north")
                await fed["east"].stop()
                await trio.sleep(8.0)
                await fed["east"].start()
            case 4:
                await fed.restart_hub(0)
    await trio.sleep(25.0)


@pytest.mark.parametrize("hubs", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_the_real_system_breaks_none(hubs: int, seed: int) -> None:
    assert told(an_eventful_day, every_invariant(), "west", "east", "north", hubs=hubs, seed=seed) == ""


def test_two_agents_of_one_cluster_break_none() -> None:
    """What is true of a cluster that is run by two agents is what the one that reports says."""

    async def story(fed: Simulation) -> None:
        other = fed.add("east-2", cluster_id="east")
        fed["east"].source.set(member("east", idle=3))
        other.source.set(member("east", idle=5))
        await trio.sleep(7.0)
        await other.start()
        await trio.sleep(20.0)
        await fed["east"].kill()
        await trio.sleep(40.0)
        assert fed["west"].idle("east") == [5]

    assert told(story, every_invariant()) == ""


def test_filters_break_none() -> None:
    """What others are told is not what the sources say, and that is right."""

    class Halved(CapacityFilter):
        def report(self, record: Capacity) -> Capacity | None:
            return None if record.member_pool == "secret" else replace(record, idle=record.idle // 2)

    async def story(fed: Simulation) -> None:
        await fed["east"].stop()
        fed["east"].use_filter("halved", lambda context: Halved())
        fed["east"].source.set(member("east", idle=8), member("east", "secret", idle=1))
        await fed["east"].start()
        await trio.sleep(12.0)
        assert fed["west"].idle("east") == [4]
        await fed["east"].kill()
        await trio.sleep(40.0)

    assert told(story, every_invariant()) == ""


def test_a_source_with_stamps_of_its_own_breaks_none() -> None:
    async def story(fed: Simulation) -> None:
        now = fed["east"].clock()
        old = member("east", idle=3, observed_at=now - 12.0)
        fed["east"].source.set(old, member("east", "ahead", observed_at=now + 100.0), frozen=True)
        await trio.sleep(40.0)
        assert [record.member_pool for record in fed["west"].known("east")] == ["ahead"]

    assert told(story, every_invariant()) == ""


def test_what_two_sources_claim_breaks_none() -> None:
    """An agent takes the word of the first of them, until that one is silent for a TTL."""

    async def story(fed: Simulation) -> None:
        other = fed["east"].more_sources["push"] = PushingSource()
        await fed["east"].stop()
        await fed["east"].start()
        fed["east"].source.set(member("east", idle=1), member("east", "p2", idle=2))
        await trio.sleep(6.0)
        other.set(member("east", idle=9), member("east", "p3", idle=3))
        await trio.sleep(12.0)
        fed["east"].source.failure = OSError("no answer")
        await trio.sleep(50.0)
        assert fed["west"].idle("east") == [9, 3]

    assert told(story, every_invariant()) == ""


def test_a_source_that_knows_nothing_of_a_namespace_for_now_breaks_none() -> None:
    class Partly(ScriptedSource):
        unknown: Collection[str] = ()

        def unknown_namespaces(self) -> Collection[str]:
            return self.unknown

    async def story(fed: Simulation) -> None:
        source = fed["east"].more_sources["partly"] = Partly()
        await fed["east"].stop()
        await fed["east"].start()
        source.set(member("east", idle=1, namespace="here"), member("east", idle=2, namespace="there"))
        await trio.sleep(6.0)
        source.unknown = {"there"}
        source.set(member("east", idle=3, namespace="here"))
        await trio.sleep(12.0)
        assert fed["west"].idle("east") == [3, 2]
        await trio.sleep(30.0)
        assert fed["west"].idle("east") == [3]

    assert told(story, every_invariant()) == ""


def test_a_sample_that_comes_back_may_be_younger_than_it_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one sample west hears over one hub, to which east has connected over a slow line, so that it looks older there
    than it is. When that has run out it hears it once more over the other one, where it is as old as it is."""
    ages: list[float] = []
    monkeypatch.setattr(waits, "OPENING_COUNTS_FOR", 60.0)  # so that it is a sample of a later moment

    async def story(fed: Simulation) -> None:
        fed.delay("east", 2.0, hub=0)
        fed.cut("east", hub=0)
        await trio.sleep(24.0)
        fed["east"].source.set(member("east", idle=1))
        await trio.sleep(1.1)
        # What was collected at 25 s is sent at 25.2 s.
        fed.partition("east", hub=1, one_way="to_hub")
        fed["east"].fail_sources(OSError("no answer"))
        await trio.sleep(7.9)
        fed.heal("east", hub=1)
        await trio.sleep(19.9)
        ages.extend(fed["west"].ages("east"))
        await trio.sleep(0.6)
        assert fed["west"].known("east") == []
        fed.cut("west", hub=1)
        await trio.sleep(0.5)
        ages.extend(fed["west"].ages("east"))
        await trio.sleep(7.0)
        assert fed["west"].known("east") == []

    assert told(story, every_invariant(), hubs=2) == ""
    assert ages == [pytest.approx(29.9, abs=0.01), pytest.approx(29.0, abs=0.01)]


def test_a_sample_that_looks_older_than_it_is_may_run_out_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came over a connection that took long to open, and keeps its age when it is told again over another one."""
    monkeypatch.setattr(waits, "OPENING_COUNTS_FOR", 60.0)

    async def story(fed: Simulation) -> None:
        fed.delay("east", 2.0)
        fed.cut("east")
        await trio.sleep(15.0)
        fed["east"].source.set(member("east", idle=1))
        await trio.sleep(10.0)
        fed["east"].fail_sources(OSError("no answer"))
        await trio.sleep(5.0)
        fed.heal("east")
        fed.cut("east")
        await trio.sleep(40.0)

    assert told(story, every_invariant()) == ""
    monkeypatch.setattr(Ways, "excess", lambda *_: 0.0)
    assert "TruthIsEverywhere: the registry of west: it lacks east/ns/env/p1 [idle 1]" in told(story, every_invariant())


def test_watching_changes_nothing() -> None:
    """A run is the same, to the last byte, whether anybody looks or not."""

    def text(invariants: Sequence[Invariant]) -> str:
        async def run() -> str:
            async with simulated_federation("west", "east", "north", hubs=2, seed=3, invariants=invariants) as fed:
                await an_eventful_day(fed)
            return fed.log.text()

        return run_simulated(run, seed=3)

    assert text(every_invariant()) == text([])


# --- how they are run -------------------------------------------------------------------------------------------------


def test_every_invariant_is_a_new_one_of_each() -> None:
    one, other = every_invariant(), every_invariant()
    assert [type(each) for each in one] == list(ALL_INVARIANTS)
    assert not set(map(id, one)) & set(map(id, other))


class Counting(Invariant):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.told = {"said": 0, "applied": 0, "look": 0}

    def said(self, process: Any, statement: Statement) -> None:
        """Count it."""
        self.told["said"] += 1

    def applied(self, process: Any, changes: Sequence[Change], news: Sequence[tuple[str, str, str]]) -> None:
        """Count it."""
        self.told["applied"] += 1

    def look(self) -> None:
        """Count it."""
        self.told["look"] += 1
        assert all(view.records is not None for view in self.ledger.views)


def test_an_invariant_of_ones_own_is_told_and_may_look() -> None:
    counting = Counting()

    async def story(fed: Simulation) -> None:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(12.5)

    assert told(story, [counting]) == ""
    # Two clusters that are asked at 0, 5 and 10 s; east takes in its own, and west what it is told of it.
    assert counting.told["said"] == 6
    assert counting.told["applied"] >= 6
    assert counting.told["look"] == 13


class Failing(Invariant):
    """Fails at the first look, in the way that it is told to."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def look(self) -> None:
        """Fail."""
        raise self.error


@pytest.mark.parametrize("error", [InvariantBroken("as told"), ZeroDivisionError("a bug in the checker")])
def test_what_a_checker_raises_ends_the_simulation_and_comes_out(error: Exception) -> None:
    reached = []

    async def run() -> None:
        async with simulated_federation("west", invariants=[Failing(error)], check_every=2.0):
            reached.append(trio.current_time())
            await trio.sleep(60.0)
            reached.append(trio.current_time())

    with pytest.raises(type(error)) as caught:
        run_simulated(run)
    assert caught.value is error
    assert reached == [0.0]


def test_a_broken_invariant_tells_more_than_what_the_test_raised_because_of_it() -> None:
    async def run() -> None:
        async with simulated_federation("west", invariants=[Failing(InvariantBroken("as told"))]):
            await trio.sleep(0.5)
            raise ValueError("the test's own")

    with pytest.raises(ValueError, match="the test's own"):
        run_simulated(run)

    async def later() -> None:
        async with simulated_federation("west", invariants=[Failing(InvariantBroken("as told"))]):
            try:
                await trio.sleep(5.0)
            finally:
                raise ValueError("the test's own")

    with pytest.raises(InvariantBroken, match="as told") as caught:
        run_simulated(later)
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_last_look_is_at_the_end() -> None:
    """What is wrong in the moment at which a test ends is found, too."""
    counting = Counting()

    async def story(fed: Simulation) -> None:
        await trio.sleep(0.25)

    assert told(story, [counting]) == ""
    assert counting.told["look"] == 1


def test_best_foreign_member_is_a_member_of_what_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that never existed is found out."""
    monkeypatch.setattr(Registry, "best_foreign_member", lambda self, *names: ForeignMember("nobody", "p1", 1))
    said = told(east_dies, [NothingOutlivesItsTtl()])
    assert "is nobody::p1, of which nothing fresh is known" in said

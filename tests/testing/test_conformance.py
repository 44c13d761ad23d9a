"""The conformance suite itself: what it is given and what it refuses, what it leaves behind, what it tells, and how it
gets along with threads, real time, profilers and cancellation."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.testing.test_wrong_sources import WRONG
from tests.testing.worlds import Cached, Polled, Pushing, Threaded, World, record
from trio_federation import Capacity, CapacitySource, SourceContext
from trio_federation.local import LocalTruth
from trio_federation.testing import (
    RULES,
    ConformanceError,
    ConformanceReport,
    Rule,
    check_capacity_source,
    source_context,
    watching,
)
from trio_federation.testing.watching import Watch


def check(factory: Callable[..., CapacitySource], **more: Any) -> ConformanceReport:
    """Check a source in simulated time, from outside of Trio."""
    return trio.run(partial(check_capacity_source, factory, **more), clock=MockClock(autojump_threshold=0))


def polled(context: SourceContext) -> CapacitySource:
    """A source that is right."""
    return Polled(World(), context)


# --- rules and what is told of them


def test_each_rule_is_explained_and_broken_by_a_source() -> None:
    assert set(RULES) == set(Rule)
    assert {rule for rule, _, _ in WRONG} == set(Rule) - {Rule.FACTORY}  # which is broken below


def test_an_error_names_the_rule_what_was_seen_and_what_to_do() -> None:
    class Broken(Polled):
        async def collect(self) -> Sequence[Capacity]:
            raise ValueError("bad\nnews")

    with pytest.raises(AssertionError) as caught:
        check(lambda context: Broken(World(), context))
    assert isinstance(caught.value, ConformanceError)
    assert caught.value.rule is Rule.ANSWER
    assert caught.value.seen == "collect() raises ValueError: bad news"
    assert str(caught.value).startswith("collect() raises ValueError: bad news; see its cause, above;")
    assert str(caught.value).endswith(f"(rule answer: {RULES[Rule.ANSWER]})")
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_report_tells_what_was_not_checked_and_what_it_would_take() -> None:
    report = check(polled)
    assert report.not_checked == {
        Rule.AGREEMENT: "it does not push: changes() is None",
        Rule.CHANGE: "give change=",
        Rule.FAILURE: "give breaks=",
        Rule.RECOVERY: "give breaks=",
        Rule.REMOVAL: "give remove=",
    }
    assert set(report.checked) == set(Rule) - set(report.not_checked)
    assert str(report).splitlines()[0].startswith("checked: factory, start, live, ")
    assert "not checked: removal: give remove=" in str(report).splitlines()


def test_a_source_that_pushes_nothing_by_itself_is_not_held_to_it() -> None:
    report = check(lambda context: Pushing(World(), context))
    assert report.not_checked[Rule.AGREEMENT] == "nothing was pushed; give change= or remove="
    assert Rule.CHANGES in report.checked


def test_removal_alone_shows_that_pushes_agree() -> None:
    world = World()
    report = check(lambda context: Pushing(world, context), remove=world.remove)
    assert {Rule.AGREEMENT, Rule.REMOVAL} <= set(report.checked)


# --- the factory


def test_a_factory_may_do_without_the_context() -> None:
    world = World()
    made = []

    def factory(idle: int = 3) -> CapacitySource:
        made.append(idle)
        return Polled(world, source_context(cluster_id="east"))

    check(factory, cluster_id="east")
    assert set(made) == {3}


@pytest.mark.parametrize(
    "factory, said",
    [
        (lambda: object(), "the factory has returned an object of type object"),
        (lambda: None, "the factory has returned None"),
        (lambda: 1 / 0, "the factory raises ZeroDivisionError: division by zero"),
    ],
)
def test_a_factory_that_makes_no_sources_is_found(factory: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConformanceError, match=said) as caught:
        check(factory)
    assert caught.value.rule is Rule.FACTORY


def test_a_factory_that_makes_one_source_for_all_is_found() -> None:
    source = Polled(World(), source_context(clock=lambda: 0.0))
    with pytest.raises(ConformanceError, match="the factory has returned the same object twice"):
        check(lambda: source)


def test_an_async_factory_is_found() -> None:
    async def factory(context: SourceContext) -> CapacitySource:
        return polled(context)

    with pytest.raises(ConformanceError, match="the factory has returned an object of type coroutine"):
        check(factory)  # type: ignore[arg-type]


def test_every_source_gets_an_equal_context_of_its_own(tmp_path: Path) -> None:
    contexts: list[SourceContext] = []

    def factory(context: SourceContext) -> CapacitySource:
        contexts.append(context)
        assert context.base_dir.is_dir()
        return polled(context)

    check(factory, cluster_id="north", base_dir=tmp_path)
    assert {(each.name, each.cluster_id, each.base_dir) for each in contexts} == {
        ("source[0]:checked", "north", tmp_path)
    }
    assert len({id(each.random) for each in contexts}) == len(contexts)
    assert len({each.random.random() for each in contexts}) == 1
    contexts.clear()
    check(factory)
    (folder,) = {each.base_dir for each in contexts}
    assert not folder.exists()


# --- what it refuses


@pytest.mark.parametrize(
    "more, said",
    [
        ({"cluster_id": "West"}, "cluster_id 'West' is no lower-case RFC 1123 label"),
        ({"skip": ["clocks"]}, "rule 'clocks' cannot be skipped; did you mean \"clock\"?"),
        ({"skip": ["cancellation"]}, "rule 'cancellation' cannot be skipped"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        check(polled, **more)


def test_a_clock_that_stands_still_is_refused() -> None:
    with pytest.raises(ValueError, match="this MockClock stands still; set its autojump_threshold to 0"):
        trio.run(check_capacity_source, polled, clock=MockClock())


def test_what_remove_returns_has_to_have_been_there() -> None:
    world = World()
    with pytest.raises(ValueError, match="none of what collect\\(\\) said before"):
        check(lambda context: Polled(world, context), remove=lambda: record("z", 1))


def test_whatever_else_remove_returns_some_record_has_to_be_missing() -> None:
    world = World()

    def remove() -> int:
        world.remove()
        return 17  # as a write of a file does

    assert Rule.REMOVAL in check(lambda context: Polled(world, context), remove=remove).checked
    with pytest.raises(
        ConformanceError, match="collect\\(\\) still has every record: agents/python/a, agents/python/c"
    ):
        check(lambda context: Polled(world, context), remove=lambda: None)


def test_what_the_tests_own_functions_raise_comes_out() -> None:
    class Mine(Exception):
        pass

    def change() -> None:
        raise Mine

    with pytest.raises(Mine):
        check(polled, change=change)


# --- rules that can be left out


@pytest.mark.parametrize(
    "kind, rule",
    [(kind, rule) for rule, _, kind in WRONG if rule in (Rule.BLOCKING, Rule.CLOCK, Rule.DETERMINISTIC, Rule.RANDOM)],
)
def test_an_optional_rule_can_be_left_out(kind: type[Polled], rule: Rule) -> None:
    world = World()
    left_out = {rule.value}
    if rule is Rule.DETERMINISTIC:
        # what differs from call to call also differs after a cancellation, so such a source is not simulated
        report = trio.run(partial(check_capacity_source, lambda context: kind(world, context), skip=left_out))
    else:
        report = check(lambda context: kind(world, context), skip=left_out)
    assert report.not_checked[rule] == "left out by skip"
    assert rule not in report.checked


# --- cancellation at every step


class Steps(Polled):
    """Gives way a number of times, and does something wrong when it is cancelled at one of them."""

    steps = 0
    wrong_at = 0

    async def collect(self) -> Sequence[Capacity]:
        for step in range(1, self.steps + 1):
            try:
                await trio.sleep(0.01)
            except trio.Cancelled:
                if step == self.wrong_at:
                    return []
                raise
        return await super().collect()


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(1, 8).flatmap(lambda steps: st.tuples(st.just(steps), st.integers(1, steps + 1))))
def test_a_swallowed_cancellation_is_found_at_whichever_step(case: tuple[int, int]) -> None:
    kind = type("Kind", (Steps,), {"steps": case[0], "wrong_at": case[1]})
    if case[1] > case[0]:
        assert Rule.CANCELLATION in check(lambda context: kind(World(), context)).checked
    else:
        with pytest.raises(ConformanceError) as caught:
            check(lambda context: kind(World(), context))
        assert caught.value.rule is Rule.CANCELLATION


# --- records


names = st.sampled_from(["agents", "python", "a", "b", "", "Bad", "x" * 64])
numbers = st.sampled_from([0, 1, -1, 2**31, True])
records = st.builds(
    Capacity,
    st.sampled_from(["west", "west", "east"]),
    names,
    names,
    names,
    names,
    idle=numbers,
    running=numbers,
    capacity=numbers,
    saturated_for=st.sampled_from([0.0, 1.0, -1.0, float("nan")]),
    state=st.sampled_from(["", "Active", "a\nb"]),
) | st.builds(record, st.sampled_from("abcd"), st.integers(0, 3))


@pytest.mark.slow
@given(st.lists(records, max_size=4))
def test_records_are_found_wrong_exactly_where_an_agent_drops_them(told: list[Capacity]) -> None:
    class Told(Polled):
        async def collect(self) -> Sequence[Capacity]:
            return told

    truth = LocalTruth("west", instance="00", started_at=0.0)
    refused = truth.collected("source", told, 0.0, 0.0).refused
    if not refused:
        check(lambda context: Told(World(), context))
        return
    with pytest.raises(ConformanceError) as caught:
        check(lambda context: Told(World(), context))
    only_doubled = all(fault.reason == "duplicate" for fault in refused)
    assert caught.value.rule is (Rule.UNIQUE if only_doubled else Rule.RECORD)


# --- the loop


class Blocking(Polled):
    async def collect(self) -> Sequence[Capacity]:
        threading.Event().wait(60)
        return []


class Spinning(Polled):
    async def collect(self) -> Sequence[Capacity]:
        for _ in iter(int, 1):
            pass
        return []


class BlockingLive(Polled):
    def is_live(self) -> bool:
        return threading.Event().wait(60)


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "STEP_LIMIT", 0.2)


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize("kind, what", [(Blocking, "collect()"), (Spinning, "collect()"), (BlockingLive, "is_live()")])
def test_a_call_that_does_not_give_way_is_interrupted(kind: type[Polled], what: str) -> None:
    began = time.perf_counter()
    with pytest.raises(ConformanceError) as caught:
        check(lambda context: kind(World(), context))
    assert caught.value.rule is Rule.BLOCKING
    assert caught.value.seen.startswith(
        f"{what} holds the loop for more than 0.2 s, in tests.testing.test_conformance, line "
    )
    assert time.perf_counter() - began < 30


@pytest.mark.usefixtures("short_limit")
def test_a_call_that_cannot_be_interrupted_is_told_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """In another thread than the first, where no signal arrives."""
    release = threading.Event()

    class Waiting(Polled):
        async def collect(self) -> Sequence[Capacity]:
            release.wait(60)
            return []

    errors: list[BaseException] = []

    def run() -> None:
        try:
            check(lambda context: Waiting(World(), context))
        except ConformanceError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    told = ""
    while "this test goes on when that ends" not in told and thread.is_alive():
        told += capfd.readouterr().err
        time.sleep(0.01)  # noqa: TID251 - waits for another thread
    release.set()
    thread.join()
    assert told.startswith("trio_federation.testing: collect() holds the loop for more than 0.2 s, in ")
    (error,) = errors
    assert isinstance(error, ConformanceError)
    assert error.rule is Rule.BLOCKING


def test_ctrl_c_is_nobodys_failure() -> None:
    class Interrupting(Polled):
        async def collect(self) -> Sequence[Capacity]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(lambda context: Interrupting(World(), context))


# --- threads and simulated time


class SlowThreads(Threaded):
    """Reads in a thread that takes its time, and does something every now and then."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:  # noqa: ASYNC110
            await trio.sleep(1)

    async def collect(self) -> Sequence[Capacity]:
        await trio.to_thread.run_sync(threading.Event().wait, 0.005)
        return await super().collect()


def test_simulated_time_waits_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(lambda context: SlowThreads(World(), context))
    # without that, the source would seem to take for ever
    monkeypatch.setattr(Watch, "_hold_time", lambda _: None)
    with pytest.raises(ConformanceError, match="has not ended within 15 s"):
        check(lambda context: SlowThreads(World(), context))


@pytest.mark.usefixtures("short_limit")
def test_simulated_time_does_not_wait_for_threads_that_hang() -> None:
    class Hanging(Polled):
        async def collect(self) -> Sequence[Capacity]:
            await trio.to_thread.run_sync(threading.Event().wait, 2, abandon_on_cancel=True)
            return []

    with pytest.raises(ConformanceError, match=r"collect\(\) has not ended within 15 s"):
        check(lambda context: Hanging(World(), context))


# --- what it leaves behind


@pytest.mark.parametrize("kind", [Polled, WRONG[0][2]])
async def test_it_leaves_nothing_behind(autojump_clock: MockClock, kind: type[Polled]) -> None:
    threads = threading.active_count()
    statistics = trio.lowlevel.current_statistics()
    try:
        await check_capacity_source(lambda context: kind(World(), context))
    except ConformanceError:
        assert kind is not Polled
    assert sys.getprofile() is None
    assert autojump_clock.autojump_threshold == 0
    assert trio.lowlevel.current_statistics().tasks_living == statistics.tasks_living
    while threading.active_count() > threads:  # it looks for its end every now and then
        time.sleep(watching.LOOK_INTERVAL)  # noqa: ASYNC251, TID251


async def test_it_can_be_cancelled_itself(autojump_clock: MockClock) -> None:
    class Slow(Cached):
        async def collect(self) -> Sequence[Capacity]:
            await trio.sleep(3)
            return await super().collect()

    for seconds in range(0, 120, 7):
        world = World()
        with trio.move_on_after(seconds) as scope:
            await check_capacity_source(lambda context, world=world: Slow(world, context), change=world.change)
        assert scope.cancelled_caught
        assert autojump_clock.autojump_threshold == 0


def test_a_profiler_keeps_it_from_looking_at_clocks() -> None:
    class Reading(Polled):
        async def collect(self) -> Sequence[Capacity]:
            time.time()  # noqa: TID251
            return await super().collect()

    @contextmanager
    def profiler() -> Iterator[None]:
        sys.setprofile(lambda *_: None)
        try:
            yield
        finally:
            sys.setprofile(None)

    with profiler():
        report = check(lambda context: Reading(World(), context))
        assert sys.getprofile() is not None
    assert report.not_checked[Rule.CLOCK] == "Python's profiling hook is in use by somebody else"
    assert report.not_checked[Rule.RANDOM] == "Python's profiling hook is in use by somebody else"


def test_clocks_that_others_read_are_not_held_against_it() -> None:
    """What logging, libraries and other tasks do is not the source's doing."""

    class Logging(Polled):
        async def collect(self) -> Sequence[Capacity]:
            self.context.log.info("collecting")
            return await super().collect()

    async def main() -> None:
        async def other() -> None:
            while True:
                time.time()  # noqa: TID251
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            await check_capacity_source(lambda context: Logging(World(), context))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


# --- real time


async def test_in_real_time_it_checks_what_it_can() -> None:
    world = World()
    report = await check_capacity_source(
        lambda context: Polled(world, context), change=world.change, remove=world.remove, breaks=world.breaks
    )
    assert report.not_checked == {
        Rule.DETERMINISTIC: "it takes a MockClock",
        Rule.AGREEMENT: "it does not push: changes() is None",
    }


# --- contexts


async def test_a_context_for_tests(autojump_clock: MockClock, tmp_path: Path) -> None:
    context = source_context()
    assert (context.name, context.cluster_id, context.base_dir) == ("source[0]:test", "west", Path.cwd())
    began = context.clock()
    await trio.sleep(7)
    assert context.clock() - began == 7
    assert context.random.random() == source_context().random.random()
    other = source_context(name="source[1]:x", cluster_id="east", clock=lambda: 5.0, base_dir=tmp_path)
    assert (other.name, other.cluster_id, other.clock(), other.base_dir) == ("source[1]:x", "east", 5.0, tmp_path)


def test_outside_of_trio_a_context_needs_a_clock() -> None:
    with pytest.raises(RuntimeError):
        source_context()
    assert source_context(clock=lambda: 1.0).clock() == 1.0

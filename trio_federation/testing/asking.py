"""Sources on a bench: made, run, asked, followed and closed as an agent does it, with each answer held against the
rules that it has to keep whatever the question. What is done to sources, and in which order, is `conformance.py`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NoReturn, TypeAlias

import trio

from trio_federation.capacity import Capacity, Change, Identity, Withdrawal, change_fault, same_value
from trio_federation.clock import trio_clock
from trio_federation.hookspecs import CapacitySource, SourceContext, Trouble
from trio_federation.identity import is_uid
from trio_federation.plugins import in_one_line
from trio_federation.testing.contexts import source_context
from trio_federation.testing.rules import ConformanceError, Rule, broken
from trio_federation.testing.watching import Call, Interrupted, Kind, NotAwaitable, Watch, packages_of, shown

#: What makes a source: called with a context, or, where it can be called with nothing, with nothing.
Factory: TypeAlias = Callable[[SourceContext], CapacitySource] | Callable[[], CapacitySource]

#: Seconds after which a record counts for nothing any more: the agents' default `ttl`.
TTL = 30.0
#: Seconds that an agent gives a source to close, and this suite gives a cancelled call to end.
PROMPT = 1.0
#: The same where time is real, and the machine may be busy.
PROMPT_IN_REAL_TIME = 5.0
#: Seconds between two tries of something that may take a while.
RETRY_INTERVAL = 1.0

_ADVICE = {
    Kind.BLOCKING: "await an async counterpart, or call it with trio.to_thread.run_sync",
    Kind.CLOCK: "call the context's clock, which is the agent's, and simulated in tests",
    Kind.RANDOM: "draw from the context's random",
}


@dataclass
class Subject:
    """A source in use, or one that was."""

    source: CapacitySource
    context: SourceContext
    #: its `run()`
    running: Call
    #: set by `task_status.started()`
    started: trio.Event

    @property
    def drew(self) -> bool:
        """Whether it has drawn anything by lot."""
        assert isinstance(self.context.random, _CountingRandom)
        return self.context.random.drawn > 0


class Bench:
    """Where the sources of one check are made and asked.

    `deadline`: seconds that a source may take to start and to answer. `simulated`: whether time is. `skip`: rules that
    do not count here. The others are those of `check_capacity_source`."""

    def __init__(
        self,
        factory: Factory,
        *,
        cluster_id: str,
        base_dir: Path,
        deadline: float,
        simulated: bool,
        skip: set[Rule],
    ) -> None:
        self.watch = Watch(prompt=PROMPT if simulated else PROMPT_IN_REAL_TIME)
        self._factory = factory
        self._with_context = _wants_argument(factory)
        self._cluster_id = cluster_id
        self._base_dir = base_dir
        self.deadline = deadline
        self.simulated = simulated
        self.skip = skip
        self.clock = trio_clock()
        self._made: list[CapacitySource] = []

    # The life of a source.

    def prepare(self) -> Subject:
        """A new source, not started yet."""
        context = source_context(
            name="source[0]:checked",
            cluster_id=self._cluster_id,
            clock=self.clock,
            random=_CountingRandom(0),
            base_dir=self._base_dir,
        )
        factory: Callable[..., CapacitySource] = self._factory
        arguments = (context,) if self._with_context else ()
        source = self.now(Rule.FACTORY, "the factory", lambda: factory(*arguments))
        if not isinstance(source, CapacitySource):
            discard(source)
            broken(
                Rule.FACTORY,
                f"the factory has returned {shown(source)}",
                "return an object of a subclass of CapacitySource",
            )
        self._made.append(source)  # kept, so that no two can have one id
        self.watch.packages |= packages_of([source])
        return Subject(source, context, Call(source, "run()"), trio.Event())

    @asynccontextmanager
    async def in_use(self, count: int = 1, *, tolerant: bool = False) -> AsyncIterator[list[Subject]]:
        """New sources, started, live, and closed at the end. `tolerant`: run() may fail."""
        subjects = [self.prepare() for _ in range(count)]
        async with trio.open_nursery() as nursery:
            for subject in subjects:
                self.run(nursery, subject)
            try:
                for subject in subjects:
                    await self._wait_started(subject)
                    await self._wait_live(subject)
                yield subjects
            finally:
                for subject in subjects:
                    await self.watch.stop(subject.running)
            for subject in subjects:
                self.check_run(subject, tolerant=tolerant)
        for subject in subjects:
            await self.close(subject.source, "after use")

    def run(self, nursery: trio.Nursery, subject: Subject, *, cancel_at: int | None = None) -> Call:
        """Start a source, without waiting for it."""
        status = _Status(subject.started)
        subject.running = self.watch.begin(
            nursery, subject.source, "run()", lambda: subject.source.run(task_status=status), cancel_at=cancel_at
        )
        return subject.running

    async def until_started_or_over(self, subject: Subject) -> None:
        """Wait until a source has started, or failed to."""
        async with trio.open_nursery() as nursery:

            async def wait(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait, subject.started)
            nursery.start_soon(wait, subject.running.ended)

    async def _wait_started(self, subject: Subject) -> None:
        with trio.move_on_after(self.deadline):
            await self.until_started_or_over(subject)
        self.check_run(subject)
        if not subject.started.is_set():
            broken(
                Rule.START,
                f"run() has not called task_status.started() within {self.deadline:g} s",
                "call it as soon as the source can be used",
            )

    async def _wait_live(self, subject: Subject) -> None:
        until = self.clock() + self.deadline
        while not self.is_live(subject):
            if self.clock() > until:
                broken(
                    Rule.LIVE,
                    f"is_live() is False {self.deadline:g} s after the start, so that collect() would never be called",
                    "answer True while nothing speaks against it",
                )
            await trio.sleep(RETRY_INTERVAL)

    async def stop(self, subject: Subject, *, tolerant: bool = False) -> None:
        """Stop a source."""
        await self.watch.stop(subject.running)
        self.check_run(subject, tolerant=tolerant)

    def check_run(self, subject: Subject, *, tolerant: bool = False) -> None:
        """That run() goes on, or has ended as it has to."""
        self.tell_sightings()
        call = subject.running
        if not call.ended.is_set():
            return
        if call.cancelled:
            self.check_cancelled(call)
            if call.error is None and not call.let_through:
                self._swallowed(call)
        if tolerant:
            return
        if call.error is not None:
            self.raised(Rule.START, call)
        if not call.cancelled:
            broken(
                Rule.START,
                "run() has returned while the source was in use",
                "let it go on until it is cancelled, with trio.sleep_forever() if it has nothing to do",
            )

    # Questions.

    def is_live(self, subject: Subject) -> bool:
        """Whether a source says that it is live."""
        live = self.now(Rule.LIVE, "is_live()", subject.source.is_live)
        if not isinstance(live, bool):
            discard(live)
            broken(
                Rule.LIVE,
                f"is_live() has returned {shown(live)}",
                "make it a plain function, not an async one, that returns True or False",
            )
        troubles = self.now(Rule.LIVE, "troubles()", subject.source.troubles)
        if not isinstance(troubles, Sequence) or not all(isinstance(each, Trouble) for each in troubles):
            discard(troubles)
            broken(
                Rule.LIVE,
                f"troubles() has returned {shown(troubles)}",
                "make it a plain function, not an async one, that returns a list of Trouble, an empty one for none",
            )
        return live

    async def collect(self, subject: Subject) -> Sequence[Capacity]:
        """Ask a source that has to answer."""
        call = await self.call(subject, "collect()", subject.source.collect)
        self.check_run(subject)
        if call.late:
            self.too_late(call)
        if call.error is not None:
            self.raised(Rule.ANSWER, call)
        unknown = self.now(Rule.ANSWER, "unknown_namespaces()", subject.source.unknown_namespaces)
        if isinstance(unknown, str) or not isinstance(unknown, Collection):
            discard(unknown)
            broken(
                Rule.ANSWER,
                f"unknown_namespaces() has returned {shown(unknown)}",
                "make it a plain function, not an async one, that returns a set of names, an empty one for none",
            )
        uid = self.now(Rule.ANSWER, "cluster_uid()", subject.source.cluster_uid)
        if uid is not None and not (isinstance(uid, str) and is_uid(uid)):
            discard(uid)
            broken(
                Rule.ANSWER,
                f"cluster_uid() has returned {shown(uid)}",
                'make it a plain function that returns None, or 1 to 128 letters, digits, and any of ". _ : -"',
            )
        return self.records(call)

    async def collect_at_once(
        self, first: Subject, second: Subject, rule: Rule
    ) -> tuple[Sequence[Capacity], Sequence[Capacity]]:
        """Ask two sources at the same time. `rule`: what it breaks if one does not answer, which each of them does when
        it is asked alone."""
        calls = await self._calls(first.source, second.source)
        answers = []
        for subject, call in zip((first, second), calls, strict=True):
            self.check_run(subject)
            if call.late:
                self.too_late(call, rule)
            if call.error is not None:
                self.raised(rule, call)
            try:
                answers.append(self.records(call))
            except ConformanceError as error:
                raise ConformanceError(rule, error.seen, error.advice) from error
        return answers[0], answers[1]

    async def call(self, subject: Subject, what: str, function: Callable[[], Any]) -> Call:
        """One call, with nothing said about what became of it."""
        async with trio.open_nursery() as nursery:
            call = self.watch.begin(nursery, subject.source, what, function)
            await self.watch.wait(call, self.deadline)
        self.tell_sightings()
        return call

    async def _calls(self, *sources: CapacitySource) -> list[Call]:
        async with trio.open_nursery() as nursery:
            calls = [self.watch.begin(nursery, source, "collect()", source.collect) for source in sources]
            until = self.clock() + self.deadline
            for call in calls:
                await self.watch.wait(call, max(0.0, until - self.clock()))
        self.tell_sightings()
        return calls

    def records(self, call: Call) -> Sequence[Capacity]:
        """What a collect() has said, seen to be valid."""
        records = call.value
        if not isinstance(records, Sequence) or isinstance(records, str | bytes):
            discard(records)
            broken(Rule.ANSWER, f"collect() has returned {shown(records)}", "return a list of Capacity")
        for record in records:
            if not isinstance(record, Capacity):
                broken(
                    Rule.ANSWER,
                    f"collect() has returned a {type(record).__name__} among its records",
                    "return a list of Capacity and nothing else",
                )
            self.check_record(record, "collect()")
        for identity, count in Counter(record.identity for record in records).items():
            if count > 1:
                broken(
                    Rule.UNIQUE,
                    f"collect() has returned {count} records of {path_of(identity)}",
                    "return one for each pool, and for aggregate rows one for each scaling group",
                )
        return list(records)

    def check_record(self, record: Change, what: str) -> None:
        """That a record or a withdrawal can be taken in."""
        if (bad := change_fault(record)) is not None:
            broken(Rule.RECORD, f"{what} has a record that would be dropped: {bad.detail}", "correct or convert it")
        if record.identity[0] != self._cluster_id:
            broken(
                Rule.RECORD,
                f"{what} has a record of cluster {record.identity[0]!r} instead of {self._cluster_id!r}",
                "take the context's cluster_id",
            )
        stamp = record.observed_at if isinstance(record, Capacity) else None
        if stamp is not None:
            age = self.clock() - stamp
            if not 0 <= age <= TTL:
                broken(
                    Rule.OBSERVED,
                    f"{what} has a record of {path_of(record.identity)} with observed_at {stamp:g}, "
                    + (f"{-age:g} s in the future" if age < 0 else f"{age:g} s ago, when {TTL:g} s are a TTL"),
                    "leave it None where the record was true when collect() began; else take it from the context's "
                    "clock",
                )

    async def close(self, source: CapacitySource, when: str) -> None:
        """Close a source, which has to work whatever came before."""
        async with trio.open_nursery() as nursery:
            call = self.watch.begin(nursery, source, "aclose()", source.aclose)
            await self.watch.wait(call, self.watch.prompt)
        self.tell_sightings()
        if call.late:
            broken(
                Rule.CLOSE, f"aclose() {when} has not ended within a second", "let go of what is held without waiting"
            )
        if isinstance(call.error, NotAwaitable):
            self.raised(Rule.CLOSE, call)
        if call.error is not None:
            broken(
                Rule.CLOSE,
                f"aclose() {when} raises {in_one_line(call.error)}",
                "let it work whatever came before, also where run() never came to start",
                call.error,
            )
        if self.watch.leftovers(source):
            await trio.sleep(self.watch.prompt)
        if left := self.watch.leftovers(source):
            broken(
                Rule.LEFTOVERS,
                f"after aclose() there are tasks that the source has started: {', '.join(left)}",
                "start tasks in a nursery that run() or collect() opens itself",
            )

    def now(self, rule: Rule, what: str, function: Callable[[], Any]) -> Any:
        """Call a synchronous function of the source's."""
        try:
            return self.watch.now(what, function)
        except Interrupted:
            pass  # and was seen
        except Exception as error:
            broken(rule, f"{what} raises {in_one_line(error)}", "let it work at any time", error)
        finally:
            self.tell_sightings()

    # What is wrong with a call.

    def check_cancelled(self, call: Call) -> None:
        """That a call which was cancelled, if it was, has ended as it has to."""
        if not call.cancelled:
            return
        if call.stuck:
            broken(
                Rule.CANCELLATION,
                f"{call.what} has not ended within a second of being cancelled",
                "give whatever it shields from cancellation a short deadline",
            )
        if call.deliveries and call.error is not None:
            broken(
                Rule.CANCELLATION,
                f"{call.what} was cancelled, and raises {in_one_line(call.error)} instead of Trio's Cancelled",
                "catch Exception rather than BaseException, and do not raise while Cancelled is on its way",
                call.error,
            )
        if call.swallowed:
            self._swallowed(call)

    def _swallowed(self, call: Call) -> NoReturn:
        broken(
            Rule.CANCELLATION,
            f"{call.what} was cancelled, and goes on or returns as if it was not",
            "catch Exception rather than BaseException or everything; Trio's Cancelled must be let through",
        )

    def too_late(self, call: Call, rule: Rule = Rule.ANSWER) -> NoReturn:
        """A call has not ended by the deadline."""
        broken(
            rule,
            f"{call.what} has not ended within {self.deadline:g} s",
            "give what it waits for a deadline of its own"
            + ("; if that is a real socket or process, check under a real clock" if self.simulated else ""),
        )

    def raised(self, rule: Rule, call: Call) -> NoReturn:
        """A call has raised something."""
        assert call.error is not None
        if isinstance(call.error, NotAwaitable):
            broken(
                rule, f"{call.what} has returned {call.error}", "define it with async def, and without a yield in it"
            )
        broken(
            rule,
            f"{call.what} raises {in_one_line(call.error)}",
            "see its cause, above; if what the source reads is not there yet, make it before the check",
            call.error,
        )

    def tell_sightings(self) -> None:
        """That nothing was seen that a source must not do."""
        for sighting in self.watch.sightings:
            rule = {Kind.BLOCKING: Rule.BLOCKING, Kind.CLOCK: Rule.CLOCK, Kind.RANDOM: Rule.RANDOM}[sighting.kind]
            if rule not in self.skip or self.watch.interrupted:
                broken(rule, sighting.text, _ADVICE[sighting.kind])
        self.watch.sightings.clear()


class Follower:
    """Follows what a source pushes, as an agent does, until it is stopped: begins, takes each batch, closes. All of it
    is one call, in one task. `tolerant`: where the iterator raises or ends, it is begun again."""

    def __init__(
        self,
        bench: Bench,
        subject: Subject,
        nursery: trio.Nursery,
        *,
        cancel_at: int | None = None,
        tolerant: bool = False,
    ) -> None:
        self.subject = subject
        #: batches that had anything in them
        self.pushed = 0
        #: what was withdrawn
        self.withdrawn: set[Identity] = set()
        self._bench = bench
        self._tolerant = tolerant
        self._base: dict[Identity, Capacity] = {}
        self._since: dict[Identity, Capacity | None] = {}
        self._more = trio.Event()
        self.call = bench.watch.begin(nursery, subject.source, "changes()", self._follow, cancel_at=cancel_at)

    async def rebase(self) -> None:
        """Begin from what collect() says now."""
        self._since.clear()
        now = self._bench.clock()
        records = await self._bench.collect(self.subject)
        self._base = {record.identity: stamped(record, now) for record in records}

    def model(self) -> list[Capacity]:
        """What collect() has said at first, with all that was pushed since."""
        merged = self._base | self._since
        return [record for record in merged.values() if record is not None]

    async def pushed_more_than(self, batches: int) -> None:
        """Wait for another batch, or the end of it all."""
        while self.pushed <= batches and not self.call.ended.is_set():
            await self._more.wait()

    async def stop(self) -> None:
        """Stop it, and see that it ended as it has to."""
        await self._bench.watch.stop(self.call, closing=self._bench.watch.prompt)
        self.check()
        self._bench.check_cancelled(self.call)

    def check(self) -> None:
        """That nothing is wrong with it so far."""
        self._bench.tell_sightings()
        error = self.call.error
        if isinstance(error, ConformanceError):
            raise error
        if error is not None and not self.call.deliveries:
            broken(
                Rule.CHANGES,
                f"changes() raises {in_one_line(error)}",
                "let it go on for as long as the source is used, and be begun again",
                error,
            )

    async def _follow(self) -> None:
        while True:
            try:
                iterator = self.subject.source.changes()
                if iterator is None:
                    broken(Rule.CHANGES, "changes() is None at one time, and an iterator at another", "decide on one")
                try:
                    async for batch in iterator:
                        self._take(batch)
                finally:
                    await self._close(iterator)
                if self.call.cancelled:
                    return
                if not self._tolerant:
                    broken(
                        Rule.CHANGES,
                        "what changes() returned has ended while the source was in use",
                        "let it wait for the next change",
                    )
            except ConformanceError:
                raise
            except Exception:
                if not self._tolerant or self.call.cancelled:
                    raise
            await trio.sleep(RETRY_INTERVAL)

    async def _close(self, iterator: object) -> None:
        aclose = getattr(iterator, "aclose", None)
        if aclose is None:
            return
        with trio.move_on_after(self._bench.watch.prompt, shield=True) as scope:
            await aclose()
        if scope.cancelled_caught:
            broken(
                Rule.CHANGES,
                "aclose() of what changes() returned has not ended within a second",
                "give what it shields from cancellation a short deadline",
            )

    def _take(self, batch: object) -> None:
        if not isinstance(batch, Sequence) or not all(isinstance(each, Capacity | Withdrawal) for each in batch):
            broken(
                Rule.CHANGES,
                f"changes() has pushed {shown(batch)}",
                "push batches: lists of Capacity and Withdrawal",
            )
        now = self._bench.clock()
        for each in batch:
            self._bench.check_record(each, "changes()")
            if isinstance(each, Capacity):
                self._since[each.identity] = stamped(each, now)
                self.withdrawn.discard(each.identity)
            else:
                self._since[each.identity] = None
                self.withdrawn.add(each.identity)
        if batch:
            self.pushed += 1
            self._more.set()
            self._more = trio.Event()


class _CountingRandom(Random):
    """A generator that knows how often it was asked."""

    drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return super().random()

    def getrandbits(self, count: int, /) -> int:
        self.drawn += 1
        return super().getrandbits(count)


class _Status:
    """What is called when a source has started."""

    def __init__(self, started: trio.Event) -> None:
        self._started = started

    def started(self, value: None = None) -> None:
        if self._started.is_set():
            raise RuntimeError("called 'started' twice on the same task status")
        self._started.set()


def _wants_argument(function: Callable[..., object]) -> bool:
    """Whether a function cannot be called with nothing."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return True
    return False


def discard(value: object) -> None:
    """Let go of something that is no answer, without a warning that it was never awaited."""
    if inspect.iscoroutine(value):
        value.close()


# Records.


def stamped(record: Capacity, now: float) -> Capacity:
    """A record as an agent stamps it."""
    return record if record.observed_at is not None else replace(record, observed_at=now)


def bare(records: Sequence[Capacity]) -> list[Capacity]:
    """Their names alone."""
    return [
        Capacity(each.cluster_id, each.namespace, each.env_name, each.member_pool, each.scaling_group)
        for each in records
    ]


def difference(one: Sequence[Capacity], other: Sequence[Capacity], *, stamps: bool = False) -> tuple[str, str] | None:
    """The first record in which two answers differ, as the one says it and as the other does. `stamps`: whether it
    matters when the records were true."""
    ours = {record.identity: record for record in one}
    theirs = {record.identity: record for record in other}
    for identity in sorted(ours.keys() | theirs.keys()):
        mine, its = ours.get(identity), theirs.get(identity)
        if mine is None or its is None:
            return _said(mine, identity), _said(its, identity)
        if not (mine == its if stamps else same_value(mine, its)):
            return _said(mine, identity, its), _said(its, identity, mine)
    return None


def _said(record: Capacity | None, identity: Identity, other: Capacity | None = None) -> str:
    if record is None:
        return f"that there is no {path_of(identity)}"
    if other is None:
        return f"that there is {path_of(identity)}"
    fields = ("idle", "running", "pending", "desired", "autoscaling_enabled", "capacity", "saturated_for", "state")
    names = [name for name in (*fields, "scaling_group") if getattr(record, name) != getattr(other, name)]
    values = ", ".join(f"{name} {getattr(record, name)!r}" for name in names or ["observed_at"])
    return f"{values} of {path_of(identity)}"


def path_of(identity: Identity) -> str:
    """An identity without its cluster: "agents/browser/a"; of an aggregate row with its group."""
    return "/".join(identity[1:]).rstrip("/")


def listed(identities: Collection[Identity]) -> str:
    """The first few of them."""
    if not identities:
        return "nothing"
    paths = sorted(path_of(each) for each in identities)
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def nth(number: int) -> str:
    """A number in the order of things: "first", "4th"."""
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")

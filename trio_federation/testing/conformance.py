"""What any capacity source must do, as a suite that a source's own tests can run: `check_capacity_source`. It asks a
source as an agent would (`sources.py`), and disturbs it as the world would. The rules are `rules.py`; how sources are
made and asked is `asking.py`, and how their calls are watched and cancelled `watching.py`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_federation.capacity import Capacity, is_label
from trio_federation.plugins import in_one_line
from trio_federation.suggest import did_you_mean
from trio_federation.testing.asking import (
    RETRY_INTERVAL,
    TTL,
    Bench,
    Factory,
    Follower,
    Subject,
    bare,
    difference,
    discard,
    listed,
    nth,
    path_of,
    stamped,
)
from trio_federation.testing.rules import OPTIONAL, ConformanceError, ConformanceReport, Rule, broken
from trio_federation.testing.watching import shown

#: Steps of one call at which it is cancelled, at most.
MOST_STEPS = 40
#: Seconds from the making of two equal sources to the moments at which both are asked.
MOMENTS = (0.0, 0.0, 0.9, 5.0, 10.0, 17.3, 31.0, 31.0, 59.5)


async def check_capacity_source(
    factory: Factory,
    *,
    cluster_id: str = "west",
    base_dir: Path | None = None,
    change: Callable[[], object] | None = None,
    remove: Callable[[], object] | None = None,
    breaks: Callable[[], AbstractContextManager[object]] | None = None,
    deadline: float = TTL / 2,
    skip: Collection[str] = (),
) -> ConformanceReport:
    """Check that a source does what an agent relies on. To be awaited in a test, normally under a MockClock with
    autojump (the fixture `autojump_clock` of pytest-trio); there it takes about a second, and some minutes of simulated
    time.

    `factory`: makes the source, as often as it is called. It is given a SourceContext, made here for each source: equal
    ones, with the running loop's clock, a seeded generator and a logger. A factory that can be called with nothing is
    called with nothing. To check a type that a plugin offers: `lambda context: create(Options(…), context)`.
    `cluster_id`: the context's, and so the one that every record must have.
    `base_dir`: the context's; by default an empty folder that is removed at the end.

    With these it can check more. They are plain functions, called between two calls of the source:

    `change`: makes the truth change, so that collect() has to say something else than before.
    `remove`: makes a record vanish for good; called last. Returns the record or its identity; where it returns anything
    else, it is enough that any record is missing afterwards.
    `breaks`: a context manager that breaks what the source reads, and mends it at the end, with the truth as it was.

    `deadline`: seconds that the source may take to start, to answer and to notice that it cannot know the truth; half
    of the agents' `ttl`.
    `skip`: names of rules to leave out, of "blocking", "clock", "deterministic" and "random".

    Real sockets and subprocesses need a real clock, as simulated time does not wait for them; worker threads of Trio it
    waits for. Under a real clock, what needs simulated time is not checked.

    Returns what was checked, and what was not. Raises ConformanceError for the first rule that is broken, ValueError
    for arguments that cannot be meant, and what `change`, `remove` and `breaks` raise."""
    if not is_label(cluster_id):
        raise ValueError(f"cluster_id {cluster_id!r} is no lower-case RFC 1123 label")
    for name in skip:
        if name not in OPTIONAL:
            raise ValueError(f"rule {name!r} cannot be skipped{did_you_mean(name, OPTIONAL, f'; {OPTIONAL} can')}")
    clock = trio.lowlevel.current_clock()
    simulated = isinstance(clock, MockClock) and clock.rate == 0
    if isinstance(clock, MockClock) and simulated:
        if clock.autojump_threshold == math.inf:
            raise ValueError(
                "this MockClock stands still; set its autojump_threshold to 0, as pytest-trio's autojump_clock does"
            )
        # So that a moment near the clock's own zero is a long time ago, as it is in an agent.
        clock.jump(10 * TTL)
    with tempfile.TemporaryDirectory() as empty:
        suite = _Suite(
            factory,
            cluster_id=cluster_id,
            base_dir=base_dir if base_dir is not None else Path(empty),
            deadline=deadline,
            simulated=simulated,
            skip={Rule(name) for name in skip},
        )
        try:
            async with suite.watch:
                await suite.check(change, remove, breaks)
        except BaseExceptionGroup as group:
            # Nurseries put everything into groups, which say nothing here but that there were nurseries.
            errors = list(_members(group))
            found: BaseException | None
            found = next((error for error in errors if isinstance(error, ConformanceError)), None)
            if found is None and len(errors) == 1:
                found = errors[0]
            if found is None:
                raise
            raise found from found.__cause__
    return suite.report()


class _Suite(Bench):
    """One check. Every part of it uses new sources, so that none spoils another."""

    def __init__(self, factory: Factory, **settings: Any) -> None:
        super().__init__(factory, **settings)
        self._checked: set[Rule] = set()
        self._not_checked: dict[Rule, str] = {}
        #: whether changes() gives an iterator
        self._pushes = False

    async def check(
        self,
        change: Callable[[], object] | None,
        remove: Callable[[], object] | None,
        breaks: Callable[[], AbstractContextManager[object]] | None,
    ) -> None:
        """Check everything; the order is that of a source's life."""
        await self._check_unused()
        await self._check_use()
        await self._check_beside()
        await self._check_cancelled_start()
        await self._check_cancelled_collect()
        await self._check_changes(change)
        await self._check_change(change)
        await self._check_breaks(breaks)
        await self._check_removal(remove)
        self._checked |= {Rule.BLOCKING, Rule.LEFTOVERS, Rule.CLOSE, Rule.CANCELLATION}
        if self.watch.profiles:
            self._checked |= {Rule.CLOCK, Rule.RANDOM}
        else:
            for rule in (Rule.CLOCK, Rule.RANDOM):
                self._not_checked[rule] = "Python's profiling hook is in use by somebody else"
        for rule in self.skip:
            self._not_checked[rule] = "left out by skip"

    def report(self) -> ConformanceReport:
        """What the check came to."""
        not_checked = {rule: self._not_checked[rule] for rule in Rule if rule in self._not_checked}
        return ConformanceReport(
            tuple(rule for rule in Rule if rule in self._checked and rule not in not_checked), not_checked
        )

    # The parts.

    async def _check_unused(self) -> None:
        source, another = self.prepare().source, self.prepare().source
        if source is another:
            broken(Rule.FACTORY, "the factory has returned the same object twice", "make a new one at each call")
        self._checked.add(Rule.FACTORY)
        for each in (source, another):
            await self.close(each, "without use")

    async def _check_use(self) -> None:
        """A source on its own: asked twice, closed."""
        async with self.in_use() as (subject,):
            for _ in range(2):
                await self.collect(subject)
        self._checked |= {Rule.START, Rule.LIVE, Rule.ANSWER, Rule.RECORD, Rule.UNIQUE, Rule.OBSERVED}

    async def _check_beside(self) -> None:
        """Two sources side by side."""
        async with self.in_use(2) as (first, second):
            if not self.simulated or Rule.DETERMINISTIC in self.skip:
                self._not_checked[Rule.DETERMINISTIC] = "it takes a MockClock"
                for _ in range(2):
                    await self.collect_at_once(first, second, Rule.BESIDE)
            else:
                made = self.clock()
                for moment in MOMENTS:
                    await trio.sleep_until(made + moment)
                    one, other = await self.collect_at_once(first, second, Rule.BESIDE)
                    differs = difference(one, other, stamps=True)
                    if differs is not None:
                        broken(
                            Rule.DETERMINISTIC,
                            f"asked at the same moment, {moment:g} s after they were made, one source says "
                            f"{differs[0]} and an equal one {differs[1]}",
                            "let what it says depend on what it reads, its options, and the context's clock and "
                            "generator alone",
                        )
                self._checked.add(Rule.DETERMINISTIC)
        self._checked.add(Rule.BESIDE)

    async def _check_cancelled_start(self) -> None:
        """run() is cancelled at each of its steps, and a little after its start."""
        for step in range(MOST_STEPS + 1):
            subject = self.prepare()
            async with trio.open_nursery() as nursery:
                running = self.run(nursery, subject, cancel_at=step)
                with trio.move_on_after(self.deadline):
                    await self.until_started_or_over(subject)
                    await trio.sleep(RETRY_INTERVAL if self.simulated else 0)
                    await wait_all_tasks_blocked()
                reached = running.cancelled
                await self.stop(subject)
            await self.close(subject.source, "after run() was cancelled")
            if not reached:
                break

    async def _check_cancelled_collect(self) -> None:
        """collect() is cancelled at each of its steps, the first one and a later one of a source; after that, it says
        what another source says that was left in peace."""
        for step in range(MOST_STEPS + 1):
            reached = False
            async with self.in_use(2) as (subject, other):
                for _ in range(2):
                    reached |= await self._cancel_collect(subject, step)
                    disturbed, undisturbed = await self.collect_at_once(subject, other, Rule.AFTERWARDS)
                    self._compare_afterwards(subject, step, disturbed, undisturbed)
            if not reached:
                break
        self._checked.add(Rule.AFTERWARDS)

    async def _cancel_collect(self, subject: Subject, step: int) -> bool:
        """Whether there was such a step."""
        async with trio.open_nursery() as nursery:
            call = self.watch.begin(nursery, subject.source, "collect()", subject.source.collect, cancel_at=step)
            await self.watch.wait(call, self.deadline)
        self.tell_sightings()
        if call.late:
            self.too_late(call)
        self.check_cancelled(call)
        if call.error is not None:  # it has failed by itself, before it was cancelled
            self.raised(Rule.ANSWER, call)
        return call.cancelled

    def _compare_afterwards(
        self, subject: Subject, step: int, disturbed: Sequence[Capacity], undisturbed: Sequence[Capacity]
    ) -> None:
        if not self.simulated:  # the truth may have moved between two answers
            return
        if subject.drew:  # and the cancelled call may have drawn what the other source draws now
            disturbed, undisturbed = bare(disturbed), bare(undisturbed)
        differs = difference(disturbed, undisturbed)
        if differs is not None:
            where = "before it began" if step == 0 else f"where it gave way for the {nth(step)} time"
            broken(
                Rule.AFTERWARDS,
                f"after a collect() that was cancelled {where}, the next one says {differs[0]}, but a source that "
                f"was left in peace {differs[1]}",
                "keep what a collect() gathers in its own variables until it is complete",
            )

    async def _check_changes(self, change: Callable[[], object] | None) -> None:
        """The iterator is cancelled at each of its steps, closed and begun again; then what is pushed, with nobody
        doing anything, has to agree with what collect() says."""
        async with self.in_use() as (subject,):
            self._pushes = await self._begins_to_push(subject)
        if not self._pushes:
            why = "it does not push: changes() is None"
            self._not_checked |= {Rule.AGREEMENT: why}
            self._checked.add(Rule.CHANGES)
            return
        for step in range(MOST_STEPS + 1):
            async with self.in_use() as (subject,), trio.open_nursery() as nursery:
                first = Follower(self, subject, nursery, cancel_at=step)
                await wait_all_tasks_blocked()
                if change is not None:
                    change()
                with trio.move_on_after(self.deadline if self.simulated else RETRY_INTERVAL):
                    await first.call.moved.wait()
                reached = first.call.cancelled
                await first.stop()
                # It can be begun again, and asked.
                second = Follower(self, subject, nursery)
                await wait_all_tasks_blocked()
                await self.collect(subject)
                second.check()
                await second.stop()
            if not reached:
                break
        async with self.in_use() as (subject,), trio.open_nursery() as nursery:
            follower = Follower(self, subject, nursery)
            await follower.rebase()
            if self.simulated:
                with trio.move_on_after(TTL):
                    await follower.pushed_more_than(2)
            await self._agree(follower, "while nothing was done to it")
            pushed = follower.pushed
            await follower.stop()
        self._checked.add(Rule.CHANGES)
        if pushed:
            self._checked.add(Rule.AGREEMENT)
        elif change is None:
            self._not_checked[Rule.AGREEMENT] = "nothing was pushed; give change= or remove="

    async def _begins_to_push(self, subject: Subject) -> bool:
        """Whether a source has an iterator of changes. It is closed unused."""
        iterator = self.now(Rule.CHANGES, "changes()", subject.source.changes)
        if iterator is None:
            return False
        if not hasattr(iterator, "__aiter__"):
            discard(iterator)
            broken(
                Rule.CHANGES,
                f"changes() has returned {shown(iterator)}",
                "make it an async generator, or a plain function that returns an async iterator or None",
            )
        if hasattr(iterator, "aclose"):
            call = await self.call(subject, "changes()", iterator.aclose)
            if call.error is not None:
                self.raised(Rule.CHANGES, call)
        return True

    async def _check_change(self, change: Callable[[], object] | None) -> None:
        if change is None:
            self._not_checked[Rule.CHANGE] = "give change="
            return
        await self._check_shows("change()", change, Rule.CHANGE, self._say_change)
        self._checked.add(Rule.CHANGE)

    def _say_change(self, before: Sequence[Capacity], after: Sequence[Capacity], _: object) -> str | None:
        if difference(before, after) is None:
            return "collect() says the same as before"
        return None

    async def _check_removal(self, remove: Callable[[], object] | None) -> None:
        if remove is None:
            self._not_checked[Rule.REMOVAL] = "give remove="
            return
        await self._check_shows("remove()", remove, Rule.REMOVAL, self._say_removal)
        self._checked.add(Rule.REMOVAL)

    def _say_removal(self, before: Sequence[Capacity], after: Sequence[Capacity], removed: object) -> str | None:
        had = {record.identity for record in before}
        has = {record.identity for record in after}
        name = removed.identity if isinstance(removed, Capacity) else removed
        if not isinstance(name, tuple):
            return None if had - has else f"collect() still has every record: {listed(had)}"
        if name not in had:
            raise ValueError(f"remove() has returned {name}, which is none of what collect() said before")
        if name in has:
            return f"collect() still has {path_of(name)}"
        if lost := had - has - {name}:
            return f"collect() has lost {listed(lost)} with it"
        return None

    async def _check_shows(
        self,
        what: str,
        act: Callable[[], object],
        rule: Rule,
        say: Callable[[Sequence[Capacity], Sequence[Capacity], object], str | None],
    ) -> None:
        """`act` changes the truth; `say` tells what is wrong with the answers before and after it. A source that stamps
        its records itself, or pushes, may take its time until the deadline."""
        async with self.in_use() as (subject,), trio.open_nursery() as nursery:
            follower = Follower(self, subject, nursery) if self._pushes else None
            if follower is not None:
                await follower.rebase()
            before = await self.collect(subject)
            if self.simulated:
                await trio.sleep(0.5)
            acted_at = self.clock()
            returned = act()
            while True:
                if follower is not None:
                    await wait_all_tasks_blocked()
                after = await self.collect(subject)
                wrong = say(before, after, returned)
                if wrong is None:
                    break
                at_once = follower is None and all(record.observed_at is None for record in after)
                if at_once or self.clock() > acted_at + self.deadline:
                    broken(
                        rule,
                        f"after {what}, {wrong}",
                        "say the whole truth at each collect(), as it is then; records that are kept from earlier "
                        "need their own observed_at",
                    )
                await trio.sleep(RETRY_INTERVAL)
            if follower is not None:
                await self._agree(follower, f"after {what}")
                self._checked.add(Rule.AGREEMENT)
                self._not_checked.pop(Rule.AGREEMENT, None)
                await follower.stop()

    async def _check_breaks(self, breaks: Callable[[], AbstractContextManager[object]] | None) -> None:
        if breaks is None:
            self._not_checked |= {Rule.FAILURE: "give breaks=", Rule.RECOVERY: "give breaks="}
            return
        async with self.in_use(tolerant=True) as (subject,), trio.open_nursery() as nursery:
            follower = Follower(self, subject, nursery, tolerant=True) if self._pushes else None
            if follower is not None:
                await follower.rebase()
            before = await self.collect(subject)
            if follower is not None:
                follower.withdrawn.clear()
            with breaks():
                for _ in range(2):
                    await self._until_failing(subject, before)
                    if self.simulated:
                        await trio.sleep(RETRY_INTERVAL)
                if follower is not None and (gone := follower.withdrawn & {record.identity for record in before}):
                    broken(
                        Rule.FAILURE,
                        f"while what it reads is broken, changes() has withdrawn {listed(gone)}",
                        "withdraw only what is known to be gone",
                    )
                await self._check_use_while_broken()
            if not subject.running.ended.is_set():
                await self._until_recovered(subject, before)
            if follower is not None:
                await follower.stop()
        # One that has given up is made anew by an agent, and so it is here.
        async with self.in_use() as (subject,):
            await self._until_recovered(subject, before)
        self._checked |= {Rule.FAILURE, Rule.RECOVERY}

    async def _until_failing(self, subject: Subject, before: Sequence[Capacity]) -> None:
        """Wait until a source shows that it does not know the truth: by the deadline where it pushes, or stamps its
        records itself, and else at once."""
        until = self.clock() + self.deadline
        while True:
            if subject.running.ended.is_set() or not self.is_live(subject):
                return
            call = await self.call(subject, "collect()", subject.source.collect)
            if call.late:
                broken(
                    Rule.FAILURE,
                    f"while what it reads is broken, collect() has not ended within {self.deadline:g} s",
                    "give what it waits for a deadline of its own, and raise",
                )
            if call.error is not None:
                return
            records = self.records(call)
            at_once = not self._pushes and all(record.observed_at is None for record in records)
            if at_once or self.clock() > until:
                broken(
                    Rule.FAILURE,
                    f"while what it reads is broken, collect() has returned {len(records)} of {len(before)} records",
                    "raise where the truth is not known: what is missing from an answer is withdrawn"
                    + (", or let is_live() say False" if self._pushes else ""),
                )
            await trio.sleep(RETRY_INTERVAL)

    async def _check_use_while_broken(self) -> None:
        """A source that is made now may fail, and can be closed all the same."""
        try:
            subject = self.prepare()
        except ConformanceError as error:
            if error.__cause__ is None:
                raise
            return  # to refuse to be made is as good
        async with trio.open_nursery() as nursery:
            self.run(nursery, subject)
            with trio.move_on_after(self.deadline):
                await self.until_started_or_over(subject)
            if not subject.running.ended.is_set() and subject.started.is_set() and self.is_live(subject):
                await self.call(subject, "collect()", subject.source.collect)
            await self.stop(subject, tolerant=True)
        await self.close(subject.source, "after a failure")

    async def _until_recovered(self, subject: Subject, before: Sequence[Capacity]) -> None:
        until = self.clock() + self.deadline
        wanted = {record.identity for record in before}
        while True:
            told: str
            cause: BaseException | None = None
            if subject.running.ended.is_set():
                return
            if not self.is_live(subject):
                told = "is_live() is False"
            else:
                call = await self.call(subject, "collect()", subject.source.collect)
                cause = call.error
                if call.late:
                    told = f"collect() has not ended within {self.deadline:g} s"
                elif call.error is not None:
                    told = f"collect() raises {in_one_line(call.error)}"
                else:
                    found = {record.identity for record in self.records(call)}
                    if found == wanted:
                        return
                    told = f"collect() says {listed(found)} instead of {listed(wanted)}"
            if self.clock() > until:
                broken(
                    Rule.RECOVERY,
                    f"{self.deadline:g} s after what it reads was mended, {told}",
                    "open and read anew what has failed, at each collect()",
                    cause,
                )
            await trio.sleep(RETRY_INTERVAL)

    async def _agree(self, follower: Follower, when: str) -> None:
        """Wait until what was pushed comes to what collect() says."""
        until = self.clock() + self.deadline
        while True:
            await wait_all_tasks_blocked()
            follower.check()
            pushed = follower.pushed
            model = follower.model()
            asked_at = self.clock()
            told = [stamped(each, asked_at) for each in await self.collect(follower.subject)]
            differs = difference(model, told)
            if differs is None:
                return
            if self.clock() > until:
                pushes = f"what changes() has pushed comes to {differs[0]}, but collect() says {differs[1]}"
                broken(
                    Rule.AGREEMENT,
                    f"{when}, "
                    + (pushes if pushed else f"collect() says {differs[1]}, but changes() has pushed nothing"),
                    "push every change, also the end of a record, as a Withdrawal",
                )
            with trio.move_on_after(RETRY_INTERVAL):
                await follower.pushed_more_than(pushed)


def _members(error: BaseException) -> Iterator[BaseException]:
    """The errors that an error consists of: those of a group, or the one."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _members(each)
    else:
        yield error

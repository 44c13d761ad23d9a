"""One source of capacity, from the configuration's table to the agent: made, run, asked and listened to where plugins
run (`isolation.py`), closed when it fails, and made anew after a while. What it says is filtered there, too, and handed
to the agent in batches. What goes wrong is noted on the agent's side, in a `SourceAccount`, and costs no other source
anything. What a batch means is `local.py`'s business.

    made ─▶ run() started ─┬▶ collect() every interval ─┐
       ▲                   └▶ changes(), if it pushes ──┴▶ filters ─▶ batch ─▶ agent
       └──── after a backoff ◀── closed ◀── create or run failed

A batch waits until the agent has taken it, so no more than two are on their way from each source."""

from __future__ import annotations

import inspect
import math
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import structlog
import trio

from trio_federation.capacity import Capacity, Change, Identity, fault
from trio_federation.clock import Clock
from trio_federation.config import Federation
from trio_federation.errors import PluginError
from trio_federation.health import Health
from trio_federation.hookspecs import CapacityFilter, CapacitySink, CapacitySource, Trouble
from trio_federation.identity import is_uid
from trio_federation.isolation import Line
from trio_federation.local import Reports, record_fault
from trio_federation.logs import tell_failure
from trio_federation.metrics import FederationMetrics
from trio_federation.plugins import in_one_line, plugins_failure
from trio_federation.retry import LONGEST, Backoff, failures_of

log = structlog.get_logger("trio_federation.sources")

_P = TypeVar("_P", CapacitySource, CapacitySink)

#: What a source or sink may call a trouble: it becomes a metric's label.
_REASON = re.compile(r"[a-z][a-z_]{0,39}")
#: How many characters of what it says about one, and of who else is involved, are shown.
_LONGEST_DETAIL = 1000
_LONGEST_PARTY = 100

#: Seconds between two questions to a source that pushes whether it can vouch again for what it has pushed.
NOT_LIVE_INTERVAL = 1.0
#: Seconds that one source or sink gets to let go of what it holds.
CLOSE_DEADLINE = 1.0
#: Seconds before a source or sink that could not be made, or has ended, is made again: at first, and at most.
FIRST_REMAKE = 1.0
LONGEST_REMAKE = 60.0


class Collected(NamedTuple):
    """A source's whole truth."""

    source: str
    records: Sequence[Capacity]
    observed_at: float
    reports: Reports | None
    #: namespaces that it says nothing of
    unknown: Collection[str] = ()
    #: what tells the cluster that it reads from every other
    cluster_uid: str | None = None


class Pushed(NamedTuple):
    """What a source says has changed."""

    source: str
    changes: Sequence[Change]
    observed_at: float
    reports: Reports | None


Batch = Collected | Pushed


class SourceAccount:
    """What the agent keeps of one source: its health, its metrics, its lines in the log. Used on the agent's loop only.

    It is also who hears of a loop that is blocked (`isolation.Watch`)."""

    def __init__(self, name: str, clock: Clock, metrics: FederationMetrics) -> None:
        self.name = name
        self.health = Health(name, clock(), working="live")
        #: its records that the agent holds
        self.records = 0
        self._clock = clock
        self._metrics = metrics
        self._shown_live: bool | None = None
        self._show_live()

    def worked(self, what: str) -> None:
        """`what` has worked."""
        before = self.health.worked(what, self._clock())
        self._show_live()
        if before.was_told:
            log.info("source_works", source=self.name, what=what, failures_before=before.in_a_row)

    def collected(self, seconds: float, records: int, next_try: float) -> None:
        """A collect has told so many records, after so many seconds; the next one begins at `next_try`."""
        self._metrics.source_collected(self.name, seconds, records, self._clock())
        for what in ("live", "create", "run"):
            self.over(what)
        self.health.next_try = next_try
        self.worked("collect")

    def over(self, what: str) -> None:
        """`what` is no trouble any more."""
        before = self.health.over(what, self._clock())
        self._show_live()
        if before.was_told:
            log.info("source_works", source=self.name, what=what, failures_before=before.in_a_row)

    def failed(self, what: str, error: str, next_try: float | None = None) -> None:
        """`what` has failed, and is tried again at `next_try`."""
        self.health.next_try = next_try
        self._metrics.source_failed(self.name, what)
        self._tell("source_failed", what, error, "kept until they are older than the TTL")

    def troubled(self, troubles: Sequence[Trouble], live: bool, next_try: float) -> None:
        """It says what keeps it from telling everything, and whether it can vouch for any of what it has pushed."""
        self._metrics.source_troubles(self.name, [trouble.reason for trouble in troubles])
        error = "; ".join(trouble.detail for trouble in troubles)
        reasons = sorted({trouble.reason for trouble in troubles})
        if live and troubles:
            records = "those that it cannot vouch for age out"
            details = {"reasons": reasons}
            if parties := sorted({trouble.party for trouble in troubles if trouble.party}):
                details["parties"] = parties
            self._tell("source_trouble", "trouble", error, records, counts=False, kind=" ".join(reasons), **details)
        elif live:
            self.over("trouble")
        else:  # which says the same, and more
            self.health.over("trouble", self._clock())
            self.health.next_try = next_try
            error = "it cannot vouch for what it has pushed" + (f": {error}" if error else "")
            kind = " ".join(reasons)
            self._tell("source_not_live", "live", error, "not refreshed meanwhile", counts=False, kind=kind)

    def filter_failed(self, name: str, error: str, count: int) -> None:
        """A filter has failed on so many of its records."""
        self._metrics.filter_failed(name, count)
        self._tell(
            "filter_failed", f"filter {name}", error, "not reported anew; what was told before ages out", filter=name
        )

    def filter_works(self, name: str) -> None:
        """A filter has done its work on a whole collect."""
        self.over(f"filter {name}")

    def withheld(self, name: str, count: int) -> None:
        """A filter keeps so many records of a collect from others."""
        self._metrics.records_withheld(name, count)

    # isolation.Watch

    def blocked(self, seconds: float) -> None:
        """Its loop does not turn."""
        error = f"it has not given way for {seconds:.0f} s: a call in it blocks; it should await, or use a thread"
        if self.health.state != "blocked":
            self.failed("blocked", error)
        else:  # one failure, however long it takes
            self._tell("source_failed", "blocked", error, "kept until they are older than the TTL", counts=False)

    def turns_again(self) -> None:
        """Its loop turns again."""
        self.over("blocked")

    def abandoned(self) -> None:
        """It did not let itself be stopped."""
        log.warning("plugin_abandoned", source=self.name, error="it did not end when it was stopped")

    def _tell(
        self,
        event: str,
        what: str,
        error: str,
        records: str,
        *,
        counts: bool = True,
        kind: str = "",
        **details: str | list[str],
    ) -> None:
        noted = self.health.failed(what, error, self._clock(), counts=counts, kind=kind)
        self._show_live()
        known: dict[str, str | list[str]] = {"source": self.name, "what": what, "error": error, "records": records}
        tell_failure(log, noted, event, known | details)

    def _show_live(self) -> None:
        live = self.health.state in ("live", "partly")
        if live is not self._shown_live:
            self._shown_live = live
            self._metrics.source_live(self.name, live)


class SourceRunner:
    """Runs one source for as long as the agent lives.

    `make`: makes the source, as often as need be. `filters`: what makes each filter, by its name. `clock`: seconds.
    `generator`: for jitter, and this runner's alone. `deliver`: takes a batch, on the agent's loop."""

    def __init__(
        self,
        name: str,
        make: Callable[[], CapacitySource],
        *,
        filters: Mapping[str, Callable[[], CapacityFilter]],
        settings: Federation,
        clock: Clock,
        generator: random.Random,
        account: SourceAccount,
        deliver: Callable[[Batch], Awaitable[None]],
    ) -> None:
        self.name = name
        self.settings = settings
        self.clock = clock
        self.generator = generator
        self.account = account
        self.deliver = deliver
        self._make = make
        self._make_filters = filters

    async def run(self, line: Line) -> NoReturn:
        """Run it until cancelled, wherever this is called; `line` leads to the agent."""

        def begin(source: CapacitySource, nursery: trio.Nursery) -> None:
            life = _Life(self, source, _Filters(self._make_filters, line, self.account), line)
            nursery.start_soon(life.take_pushed)
            nursery.start_soon(life.poll, nursery)

        await run_lives(
            self.name,
            self._make,
            begin,
            start_within=self.settings.ttl / 2,
            failed=partial(line.tell, self.account.failed),
            clock=self.clock,
            generator=self.generator,
        )


class _Life:
    """A source that was made and runs."""

    def __init__(self, runner: SourceRunner, source: CapacitySource, filters: _Filters, line: Line) -> None:
        self._runner = runner
        self._account = runner.account
        self._source = source
        self._filters = filters
        self._line = line
        interval = runner.settings.report_interval
        self._collect_backoff = Backoff(runner.generator, first=interval, longest=LONGEST, least=0.5)
        self._push_backoff = Backoff(runner.generator, first=interval, longest=LONGEST, least=0.5)
        #: what it said last of whether it can vouch for what it has pushed
        self._live = True
        #: since when there has been an iterator of changes; None while there is none
        self._pushing_since: float | None = None

    async def poll(self, nursery: trio.Nursery) -> NoReturn:
        """Ask for everything: at once, and then every report interval, or, of a source that pushes, at every resync at
        which it can vouch for what it has pushed. What fails is tried again after a backoff."""
        settings = self._runner.settings
        while True:
            began = trio.current_time()
            failure = await self._collect(began, nursery)
            if failure is None:
                self._collect_backoff.reset()
                # A source may have begun to push, or stopped, while it was asked.
                await trio.sleep_until(began + self._interval(settings))
            else:
                delay = self._collect_backoff.again(0.0)
                self._line.tell(self._account.failed, "collect", failure, self._runner.clock() + delay)
                await trio.sleep(delay)

    def _interval(self, settings: Federation) -> float:
        if self._pushing_since is None:
            return settings.report_interval
        # One that could not vouch for what it has is asked again soon: once it can, each second counts.
        return settings.resync_interval if self._live else min(NOT_LIVE_INTERVAL, settings.resync_interval)

    async def _collect(self, began: float, nursery: trio.Nursery) -> str | None:
        """Ask once. Returns why that failed; None where the source has told what it has, or that it cannot vouch for
        it."""
        runner, clock = self._runner, self._runner.clock
        asked_at = clock()
        deadline = runner.settings.ttl / 2
        records: tuple[Capacity, ...] | None = None
        unknown: frozenset[str] = frozenset()
        uid: str | None = None
        try:
            live, troubles = _yes_or_no(self._source.is_live()), checked_troubles(self._source.troubles())
            self._live = live
            self._line.tell(self._account.troubled, troubles, live, asked_at + self._interval(runner.settings))
            if not live:
                return None
            with given_up_after(nursery, deadline, deaf=partial(self._line.tell, self._account.failed, "collect")):
                records = _listed(await self._source.collect(), "collect() returned")
                unknown = _namespaces(self._source.unknown_namespaces())
                uid = _uid(self._source.cluster_uid())
        except BaseException as error:
            return failure_text(error)
        if records is None:
            return f"no answer within {deadline:g} s"
        took = trio.current_time() - began
        reports = self._filters.reports(records)
        await self._line.ask(runner.deliver, Collected(runner.name, records, asked_at, reports, unknown, uid))
        self._line.tell(self._account.collected, took, len(records), asked_at + self._interval(runner.settings))
        if self._pushing_since is not None and began - self._pushing_since >= runner.settings.ttl / 2:
            self._pushing_works()  # also where there was nothing to push
        return None

    async def take_pushed(self) -> None:
        """Take what the source pushes, for as long as it does; one that does not is only polled."""
        while True:
            try:
                changes = self._source.changes()
                if changes is None:
                    self._line.tell(self._account.over, "push")  # as it was once, of a source that has changed its mind
                    return
                if inspect.iscoroutine(changes):
                    changes.close()  # else Python warns that nobody has awaited it
                    raise PluginError("changes() is a coroutine; write it as an async generator, with yield")
                self._pushing_since = trio.current_time()
                async with _closing(changes):
                    async for batch in changes:
                        await self._push(_listed(batch, "changes() yielded"))
                failure = "it stopped pushing changes"
            except BaseException as error:
                failure = failure_text(error)
            self._pushing_since = None
            delay = self._push_backoff.again(0.0)
            self._line.tell(self._account.failed, "push", failure, self._runner.clock() + delay)
            await trio.sleep(delay)

    async def _push(self, changes: Sequence[Change]) -> None:
        observed_at = self._runner.clock()
        records = [change for change in changes if isinstance(change, Capacity)]
        reports = self._filters.reports(records, last=True)
        await self._line.ask(self._runner.deliver, Pushed(self._runner.name, changes, observed_at, reports))
        self._push_backoff.reset()
        self._line.tell(self._account.worked, "push")

    def _pushing_works(self) -> None:
        self._push_backoff.reset()
        self._line.tell(self._account.over, "push")


def _yes_or_no(answer: object) -> bool:
    """What is_live() said. Raises PluginError where that is neither: a coroutine would pass for a yes."""
    if isinstance(answer, bool):
        return answer
    if inspect.iscoroutine(answer):
        answer.close()
    raise PluginError(f"is_live() returned a {type(answer).__name__}; make it a plain function that returns a bool")


def _uid(answer: object) -> str | None:
    """What cluster_uid() said. Raises PluginError where that is nothing of the kind."""
    if answer is None or (isinstance(answer, str) and is_uid(answer)):
        return answer
    if inspect.iscoroutine(answer):
        answer.close()
    raise PluginError(
        f"cluster_uid() returned a {type(answer).__name__} that is no UID; make it a plain function that returns 1 to "
        '128 letters, digits, and any of ". _ : -", or None'
    )


def _namespaces(answer: object) -> frozenset[str]:
    """What unknown_namespaces() said. Raises PluginError where that is nothing of the kind."""
    if inspect.iscoroutine(answer):
        answer.close()
    if isinstance(answer, Collection) and not isinstance(answer, str) and all(isinstance(each, str) for each in answer):
        return frozenset(answer)
    what = type(answer).__name__
    raise PluginError(f"unknown_namespaces() returned a {what}; make it a plain function that returns a set of names")


def _listed(records: Any, what: str) -> tuple[Any, ...]:
    """What a source has handed over, if it can be gone through."""
    if not isinstance(records, Iterable):
        raise PluginError(f"{what} a {type(records).__name__}; it should be a list of Capacity, an empty one for none")
    return tuple(records)


class _Filters:
    """The filters of one source, in their order. One that cannot be made fails on every record, and is tried again with
    the next batch: what others may know is not known then, but what this cluster has still is."""

    def __init__(self, makers: Mapping[str, Callable[[], CapacityFilter]], line: Line, account: SourceAccount) -> None:
        self._makers = makers
        self._filters: dict[str, CapacityFilter] = {}
        #: why those that are not there could not be made
        self._unmade: dict[str, str] = {}
        self._line = line
        self._account = account

    def reports(self, records: Sequence[Capacity], *, last: bool = False) -> Reports | None:
        """What others may know of these records. Of several with one identity the first counts, or the `last`."""
        if not self._makers:
            return None
        self._make()
        reports: dict[Identity, Capacity | None] = {}
        seen: set[Identity] = set()
        failed: dict[str, list[str]] = {}
        withheld: dict[str, int] = {}
        for record in records:
            # What is not valid is refused later, and is no matter for filters.
            if record_fault(record) is not None:
                continue
            identity = record.identity
            if identity in seen and not last:
                continue
            seen.add(identity)
            outcome = self._report(record)
            if isinstance(outcome, _FilterFailure):
                reports.pop(identity, None)
                failed.setdefault(outcome.name, []).append(f"{'/'.join(identity[1:])}: {outcome.text}")
            else:
                reports[identity] = outcome.record
                if outcome.record is None:
                    withheld[outcome.name] = withheld.get(outcome.name, 0) + 1
        for name in self._makers:
            if texts := failed.get(name):
                more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
                self._line.tell(self._account.filter_failed, name, texts[0] + more, len(texts))
            elif not last:
                self._line.tell(self._account.filter_works, name)
            if name in withheld:
                self._line.tell(self._account.withheld, name, withheld[name])
        return reports

    def _make(self) -> None:
        for name in [name for name in self._makers if name not in self._filters]:
            try:
                self._filters[name] = self._makers[name]()
            except BaseException as error:
                self._unmade[name] = f"it cannot be made: {failure_text(error)}"

    def _report(self, record: Capacity) -> _FilterFailure | _Filtered:
        told: Capacity = record
        name = ""
        for name in self._makers:
            if name not in self._filters:
                return _FilterFailure(name, self._unmade[name])
            try:
                answer = self._filters[name].report(told)
                if answer is None:
                    return _Filtered(name, None)
                wrong = _wrong_answer(answer, record)
            except BaseException as error:
                return _FilterFailure(name, failure_text(error))
            if wrong is not None:
                return _FilterFailure(name, wrong)
            told = answer
        return _Filtered(name, told)


@dataclass(frozen=True, slots=True)
class _FilterFailure:
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class _Filtered:
    #: the filter that decided
    name: str
    record: Capacity | None


def _wrong_answer(answer: object, record: Capacity) -> str | None:
    """Why a filter's answer cannot be told to others."""
    if type(answer) is not Capacity:  # nor of a class of its own, which may be, and do, anything
        return f"it answered with a {type(answer).__name__}, and not with a Capacity or None"
    bad = fault(answer)
    if bad is not None:
        return f"what it made of it is no valid record: {bad.detail}"
    if answer.identity != record.identity:
        return f"it made {'/'.join(answer.identity)} of it; a filter must keep who a record is of"
    return None


# What sources and sinks have in common.


def checked_troubles(answer: object) -> tuple[Trouble, ...]:
    """What troubles() said, each text in one line. Raises PluginError where that is nothing of the kind."""
    if inspect.iscoroutine(answer):
        answer.close()
    if not isinstance(answer, Sequence) or not all(isinstance(each, Trouble) for each in answer):
        raise PluginError(
            f"troubles() returned a {type(answer).__name__}; make it a plain function that returns a list of Trouble"
        )
    for trouble in answer:
        if not isinstance(trouble.reason, str) or not _REASON.fullmatch(trouble.reason):
            raise PluginError(f"troubles() has the reason {trouble.reason!r}; use lower-case letters and underscores")
        if not isinstance(trouble.party, str):
            raise PluginError(f"troubles() has the party {trouble.party!r}; give a name, or an empty string for none")
    return tuple(
        Trouble(
            trouble.reason,
            _one_line(str(trouble.detail), _LONGEST_DETAIL),
            _one_line(trouble.party, _LONGEST_PARTY),
        )
        for trouble in answer
    )


def _one_line(text: str, longest: int) -> str:
    """A plugin's text without what nobody could read, or write as UTF-8."""
    return "".join(each if each.isprintable() else "\ufffd" for each in " ".join(text.split())[:longest])


class Ended(Exception):
    """The end of one life of a plugin: `what` of it failed, and how."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(text)
        self.what = what
        self.text = text


def failure_text(error: BaseException) -> str:
    """What a plugin has raised, in one line; raises `error` again where it is no plugin's failure, as `plugins_failure`
    does.

    Where nothing is cancelled, a Cancelled asks nobody to stop: it was kept from an earlier cancellation, in a cache of
    outcomes for instance, and raised again. Let through, it would end a nursery of the agent's without an error."""
    try:
        return plugins_failure(error)
    except BaseException as other:
        stray = other.split(trio.Cancelled)[1] is None if isinstance(other, BaseExceptionGroup) else False
        if not (stray or isinstance(other, trio.Cancelled)) or trio.current_effective_deadline() == -math.inf:
            raise
    return f"{in_one_line(error)}; this is an old Cancelled, as nothing is cancelled now, and it must not be kept"


async def run_lives(
    name: str,
    make: Callable[[], _P],
    begin: Callable[[_P, trio.Nursery], object],
    *,
    start_within: float,
    failed: Callable[..., object],
    clock: Clock,
    generator: random.Random,
) -> NoReturn:
    """Let a source or sink live, and live again when that ends, until cancelled.

    `make`: makes it. `begin`: starts what is done with it, once its `run()` has started, for which it has
    `start_within` seconds. `failed(what, text, next_try)`: told why a life has ended, and when, on `clock`, the next
    one begins; without
    `next_try` also where a start does not let itself be cancelled. `generator`: for jitter."""
    backoff = remake_backoff(generator)
    began = delay = 0.0

    def over(ended: Ended) -> None:
        nonlocal delay
        delay = backoff.again(trio.current_time() - began)
        failed(ended.what, ended.text, clock() + delay)

    while True:
        began, delay = trio.current_time(), 0.0
        try:
            plugin = make()
        except BaseException as error:
            over(Ended("create", failure_text(error)))
        else:
            try:
                async with trio.open_nursery() as nursery:
                    await start_plugin(nursery, plugin, within=start_within, deaf=partial(failed, "run"))
                    begin(plugin, nursery)
            except* Ended as group:
                # Told before it is closed, which may take long.
                over(failures_of(group, Ended)[0])
            finally:
                await close(plugin, name)
        await trio.sleep(delay)


def remake_backoff(generator: random.Random) -> Backoff:
    """When a plugin that has ended is made again."""
    return Backoff(generator, first=FIRST_REMAKE, longest=LONGEST_REMAKE, least=0.5)


@contextmanager
def given_up_after(
    nursery: trio.Nursery, seconds: float, *, deaf: Callable[[str], object]
) -> Iterator[trio.CancelScope]:
    """What a plugin gets so many seconds for, after which it is cancelled. `deaf` hears of it where that does not end
    it soon: nothing more can be done then, but it must not pass for one that works."""
    ended = trio.Event()

    async def notice() -> None:
        # In two steps: after a freeze of the whole process the first is over at once, and the second still gives time.
        for wait in (seconds, CLOSE_DEADLINE):
            with trio.move_on_after(wait):
                await ended.wait()
                return
        deaf(f"not done within {seconds:g} s, and it does not let itself be cancelled; it must let Cancelled through")

    nursery.start_soon(notice)
    try:
        with trio.move_on_after(seconds) as scope:
            yield scope
    finally:
        ended.set()


async def start_plugin(
    nursery: trio.Nursery, plugin: CapacitySource | CapacitySink, *, within: float, deaf: Callable[[str], object]
) -> None:
    """Start the life of a source or sink in `nursery`, in so many seconds. It is to go on until it is cancelled; when
    it does not, or does not start, Ended is raised, here or in the nursery. `deaf` as in `given_up_after`."""
    with given_up_after(nursery, within, deaf=deaf) as starting:
        await nursery.start(_run_plugin, plugin)
    if starting.cancelled_caught:
        raise Ended("run", f"it has not started within {within:g} s")


async def _run_plugin(
    plugin: CapacitySource | CapacitySink, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> NoReturn:
    try:
        await plugin.run(task_status=task_status)
        failure = "its run() has ended; it is to go on until it is cancelled"
    except BaseException as error:
        failure = failure_text(error)
    raise Ended("run", failure)


async def close(plugin: CapacitySource | CapacitySink, name: str) -> None:
    """Have a source or sink let go of what it holds, within CLOSE_DEADLINE."""
    with trio.move_on_after(CLOSE_DEADLINE, shield=True) as scope:
        try:
            await plugin.aclose()
        except BaseException as error:
            log.warning("close_failed", plugin=name, error=failure_text(error))
    if scope.cancelled_caught:
        log.warning("close_failed", plugin=name, error=f"not done within {CLOSE_DEADLINE:g} s")


@asynccontextmanager
async def _closing(changes: AsyncIterator[Sequence[Change]]) -> AsyncIterator[None]:
    """Close an iterator that can be closed, which generators can, in the task that uses it and in bounded time."""
    try:
        yield
    finally:
        aclose = getattr(changes, "aclose", None)
        if aclose is not None:
            with trio.move_on_after(CLOSE_DEADLINE, shield=True):
                await aclose()

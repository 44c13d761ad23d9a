"""The contract for plugins: the hooks, and the classes that they offer. A plugin is a distribution with an entry point
in the group `trio_federation` that names a module (or object) whose functions are marked with `hookimpl`. Hooks are
synchronous and only say what there is; the objects that do the work are made later, one for each table in the
configuration, and run by the agent. How plugins are found and kept apart is `plugins.py`."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec
import pluggy
import trio

from trio_federation.capacity import Capacity, Change
from trio_federation.clock import Clock

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

#: pluggy's project name, and the group of the entry points
PROJECT = "trio_federation"

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a plugin's function as an implementation of the hook of the same name.
hookimpl = pluggy.HookimplMarker(PROJECT)


# What does the work.


class _Lifecycle:
    """What sources and sinks have in common: how one begins and ends."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Goes on for as long as this object is used, in a nursery of the agent's: the place for what has to be open
        meanwhile, and for tasks of its own. The default does nothing, for ever.

            async def run(self, *, task_status=trio.TASK_STATUS_IGNORED):
                async with httpx.AsyncClient() as self._client, trio.open_nursery() as nursery:
                    nursery.start_soon(self._follow)
                    task_status.started()
                    await trio.sleep_forever()

        Call `task_status.started()` when the rest may be used: nothing else is called before. Called once. What is
        raised here, a return before the agent cancels it, and a start that takes longer than half of `ttl`, are
        failures of the whole object: it is closed, and after a backoff a new one is made."""
        task_status.started()
        await trio.sleep_forever()

    async def aclose(self) -> None:
        """Let go of what is still held. The last call, made once, also after a failure and where `run()` never came to
        start; there is a deadline of one second."""


class Trouble(NamedTuple):
    """What keeps a source from telling everything, or a sink from showing everything, although it goes on, and tries by
    itself to get over it."""

    #: one of a few fixed words, in lower-case letters and underscores, such as "forbidden": a metric's label
    reason: str
    #: a line for people: what is missing because of what, and what to do about it
    detail: str
    #: who else is involved, where that is one of a few names, such as a field manager of Kubernetes; "" for nobody.
    #: One line, of which 100 characters are kept. A label of a sink's metric, but not of a source's
    party: str = ""


class CapacitySource(_Lifecycle, abc.ABC):
    """Where an agent learns how much room its own cluster has.

    The life of a source: its type's `create` makes it; `run()` is started; once that says that it is ready, and while
    it goes on, `collect()`, `changes()` and `is_live()` are called; at the end it is cancelled, and `aclose()` is
    called. A source whose `create` or `run()` fails is closed, and a new one is made after a backoff.

    `collect()` is called every report interval. Where `changes()` gives an iterator, what that pushes is taken as it
    comes, and `collect()` is called only every resync interval, while `is_live()`. There is never a second `collect()`
    before the first has ended, and it is cancelled when it takes longer than half of `ttl`. Anything raised is logged
    and counted under the source's name, costs no other source anything, and is tried again after a backoff; the records
    that are known stay until they are older than `ttl`. Trio's Cancelled must be let through.

    Each source runs on a Trio loop of its own, in a thread of its own. So a call that blocks holds up this source
    alone; it is reported, and better made with `trio.to_thread.run_sync`, as a loop that does not turn cannot be
    cancelled. `trio.current_time()` is the agent's clock. Nothing of the agent's or of other sources may be touched;
    what these methods return, and the context's logger, which is safe to use from any thread, are the ways to say
    something. In simulations a source runs on the test's own loop."""

    @abc.abstractmethod
    async def collect(self) -> Sequence[Capacity]:
        """The whole truth now: every record of this source, and no other. What is missing from it is withdrawn at once,
        but for what is in `unknown_namespaces()`.

        `observed_at` None means that the record was true when the call began. Raise, rather than leave records out,
        when the truth is not known: a failed collect withdraws nothing."""

    def changes(self) -> AsyncIterator[Sequence[Change]] | None:
        """The changes as they happen, each item one batch, or None (the default) for a source that must be polled.

        Called again, after a backoff, when the iterator has raised or ended; meanwhile the source is polled."""
        return None

    def is_live(self) -> bool:
        """For a source that pushes: whether there is evidence now that what it has pushed is still true.

        While it answers False its records are not refreshed, and age out. The default, True, is right for polling."""
        return True

    def unknown_namespaces(self) -> Collection[str]:
        """Namespaces that the last `collect()` has said nothing of, because nothing is known of them at this moment:
        what was told of them before is not withdrawn, and ages out. Asked right after each `collect()`. For a source
        whose parts can fail one by one; where nothing at all is known, `collect()` raises."""
        return ()

    def cluster_uid(self) -> str | None:
        """What tells the cluster that it reads from every other, whatever its cluster id says, or None (the default)
        where it is not known: for Kubernetes, the UID of the namespace kube-system. 1 to 128 letters, digits, and any
        of ". _ : -". Asked right after each `collect()`, so it answers at once, from memory. With it, hubs refuse one
        cluster that is set up under two ids; it may change when the cluster was built anew."""
        return None

    def troubles(self) -> Sequence[Trouble]:
        """What keeps it, at this moment, from telling everything, in an order that stays: a right that is missing, a
        server that does not answer. Asked together with `is_live()`, and shown in the log, in `/readyz` and as a metric
        until it is not answered any more. For a source that goes on all the same; what makes a whole `collect()`
        impossible is better raised by it. Records that it cannot vouch for carry their own `observed_at`."""
        return ()


class CapacitySink(_Lifecycle, abc.ABC):
    """Somewhere that an agent keeps up to date with everything it knows, its own cluster and the others.

    A sink lives like a source (`CapacitySource`): made, run, told while `run()` goes on, cancelled, closed; on a Trio
    loop and in a thread of its own; and made anew, after a backoff, when `create` or `run()` fails."""

    @abc.abstractmethod
    async def update(self, snapshot: Sequence[Capacity]) -> None:
        """Take every fresh record, sorted like `Registry.snapshot()`. Called again after a change; calls never overlap,
        and snapshots that come up while one is being taken are skipped for the newest. A call that takes longer than
        ten seconds is cancelled. That, and what is raised, is logged and counted, and the newest snapshot tried again
        after a backoff."""

    def troubles(self) -> Sequence[Trouble]:
        """What keeps it, at this moment, from showing everything, in an order that stays: a right that is missing, a
        server that does not answer, somebody who undoes what it has done. Asked each second while `run()` goes on, also
        while there is nothing to tell it, while an `update()` goes on, and after one that failed; so it answers at
        once, from memory. Shown in the log, in `/readyz` and as a metric until it is not answered any more. For a sink
        that goes on all the same: it is told as ever. What is raised here is logged and counted, costs the sink nothing
        else, and it is asked again after a backoff."""
        return ()


class CapacityFilter(abc.ABC):
    """Decides what others may know of this cluster's records. It stands between the sources and the hubs: the agent's
    own registry, and so its own placements, always have the whole truth.

    A filter is a rule and no more: quick, without I/O, and with nothing to open or to close. Each source has filters of
    its own, which are made with it and called where it runs."""

    @abc.abstractmethod
    def report(self, record: Capacity) -> Capacity | None:
        """What others may know of `record`: the record itself, a copy with other values
        (`dataclasses.replace(record, pending=0)`), or None, so that nobody else is told, and whoever was told before is
        told that it is gone.

        `record` is valid, and may be what an earlier filter made of it. Called for every record of every collect and
        every push, so the answer should depend on nothing but the record and the options. Its identity cannot be
        changed, and `observed_at` and `origin` are the agent's to say, whatever the answer has there. Where this
        raises, or answers with anything else, the record is not reported: what others were told before ages out. That
        is logged and counted under the filter's name, and costs no other record anything."""


class Backplane(abc.ABC):
    """How several hubs share what their agents tell them, so that an agent needs to know only one of them.

    **No hub of this version uses one.** The class is here so that relays can be written and tried; what it promises may
    change until a hub does.

    What a hub needs is a relay, and little of it: each batch of changes is a message of bytes for every other hub.
    Messages may be lost, doubled, out of order, or come back to the hub that published them: every record carries its
    place in its agent's history, and all of them are repeated within a resync interval. They must not be kept for
    later, as the ages of records in them do not grow on the way."""

    @abc.abstractmethod
    async def run(
        self,
        receive: Callable[[bytes], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Goes on for as long as the hub does: connects, calls `task_status.started()`, and awaits `receive(message)`
        for each message that another hub has published, one after the other; it raises for none. Connects anew by
        itself where it can; what it raises, or that it returns, is a failure, after which a new backplane is made."""

    @abc.abstractmethod
    async def publish(self, message: bytes) -> None:
        """Hand a message, at most 3 MiB, to the relay for every other hub. Called only while `run()` goes on, and never
        again before the last call has ended. Raise where the relay has not taken it; it is not tried again."""


# What they may use.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    #: how logs, metrics and errors name this one: its key path and type, for instance "source[0]:fixtures"
    name: str
    #: the process's one clock, in seconds; nothing else may be asked for the time
    clock: Clock
    #: the generator for everything that is drawn by lot
    random: Random
    #: bound to the name and, where there is one, the cluster id; may be used from any thread
    log: FilteringBoundLogger
    #: what relative paths in the options are relative to: the folder of the configuration file
    base_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContext(_Context):
    """What everything that an agent runs may use of it."""

    #: the id of the local cluster
    cluster_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContext(ClusterContext):
    """What a source may use of its agent."""

    #: seconds after which a record that nobody vouches for is gone; who pushes needs evidence that is younger than half
    ttl: float = 30.0


def only_reporter() -> bool | None:
    """What a sink is told where nobody else could report for its cluster: True."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext(ClusterContext):
    """What a sink may use of its agent."""

    #: seconds after which a record that nobody vouches for is gone from what the sink is told
    ttl: float = 30.0
    #: whether this agent is the one that reports for its cluster. True: each hub that says anything takes this agent's
    #: reports, or there are no hubs; False: each of them takes another agent's; None: no hub says anything now, or they
    #: differ, so that whoever did last what only one should do may go on. May be called from any thread
    is_reporter: Callable[[], bool | None] = only_reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterContext(ClusterContext):
    """What a filter may use of its agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackplaneContext(_Context):
    """What a backplane may use of its hub, which has no cluster."""


# What a plugin offers.

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)
ContextT = TypeVar("ContextT", bound=_Context)
MadeT = TypeVar("MadeT")


@dataclass(frozen=True, slots=True)
class PluginType(Generic[OptionsT, ContextT, MadeT]):
    """What the types of all kinds have in common: something that can be named in a table of the configuration."""

    #: what `type = "…"` says: a lower-case RFC 1123 label
    name: str
    #: the rest of the table, so no key of it can be `type`; unknown keys are refused whether or not the Struct forbids
    #: them. `trio_federation.Duration` is the type for lengths of time. A field's `msgspec.Meta(description=…)` is what
    #: a person is told was expected; what `__post_init__` raises as ValueError is shown with the table's key path.
    options: type[OptionsT]
    #: makes one object from checked options: a class with such an `__init__`, or a function. Synchronous, and quick:
    #: what has to be awaited belongs into `run()`. Called again, with options of its own, for each new object.
    create: Callable[[OptionsT, ContextT], MadeT]
    #: one line for `trio-federation plugins`
    summary: str = ""


@dataclass(frozen=True, slots=True)
class SourceType(PluginType[OptionsT, SourceContext, CapacitySource]):
    """A kind of source that can be named in a `[[source]]` table."""


@dataclass(frozen=True, slots=True)
class SinkType(PluginType[OptionsT, SinkContext, CapacitySink]):
    """A kind of sink that can be named in a `[[sink]]` table."""


@dataclass(frozen=True, slots=True)
class FilterType(PluginType[OptionsT, FilterContext, CapacityFilter]):
    """A kind of filter that can be named in a `[[filter]]` table."""


@dataclass(frozen=True, slots=True)
class BackplaneType(PluginType[OptionsT, BackplaneContext, Backplane]):
    """A kind of backplane, for `[hub.backplane]`, which takes none of them in this version."""


# The hooks. An answer is a list of types with options of any kind; hence Any.


@hookspec
def capacity_sources() -> Iterable[SourceType[Any]]:
    """The kinds of source that this plugin has. Called once, when the plugin is loaded."""
    raise NotImplementedError  # pluggy calls the plugins' functions, never this one


@hookspec
def capacity_sinks() -> Iterable[SinkType[Any]]:
    """The kinds of sink that this plugin has. Called once, when the plugin is loaded."""
    raise NotImplementedError  # pluggy calls the plugins' functions, never this one


@hookspec
def capacity_filters() -> Iterable[FilterType[Any]]:
    """The kinds of filter that this plugin has. Called once, when the plugin is loaded."""
    raise NotImplementedError  # pluggy calls the plugins' functions, never this one


@hookspec
def hub_backplanes() -> Iterable[BackplaneType[Any]]:
    """The kinds of backplane that this plugin has. Called once, when the plugin is loaded."""
    raise NotImplementedError  # pluggy calls the plugins' functions, never this one

"""The contract for plugins: the hooks, and the classes that they offer. A plugin is a distribution with an entry point
in the group `trio_federation` that names a module (or object) whose functions are marked with `hookimpl`. Hooks are
synchronous and only say what there is; the objects that do the work are made later, one for each table in the
configuration, and run by the agent. How plugins are found and kept apart is `plugins.py`."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import pluggy

from trio_federation.capacity import Capacity, Change
from trio_federation.clock import Clock

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

#: pluggy's project name, and the group of the entry points
PROJECT = "trio_federation"

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a plugin's function as an implementation of the hook of the same name.
hookimpl = pluggy.HookimplMarker(PROJECT)


class CapacitySource(abc.ABC):
    """Where an agent learns how much room its own cluster has.

    The agent calls `collect()` every report interval; where `changes()` gives an iterator, it takes what that pushes,
    and calls `collect()` only every resync interval, while `is_live()`. Calls never overlap. Anything raised is logged
    and counted under the source's name, costs no other source anything, and is tried again; Trio's Cancelled must be
    let through."""

    @abc.abstractmethod
    async def collect(self) -> Sequence[Capacity]:
        """The whole truth now: every record of this source, and no other. What is missing from it is withdrawn at once.

        `observed_at` None means that the record was true when the call began. Raise, rather than leave records out,
        when the truth is not known: a failed collect withdraws nothing."""

    def changes(self) -> AsyncIterator[Sequence[Change]] | None:
        """The changes as they happen, each item one batch, or None (the default) for a source that must be polled."""
        return None

    def is_live(self) -> bool:
        """For a source that pushes: whether there is evidence now that what it has pushed is still true.

        While it answers False its records are not refreshed, and age out. The default, True, is right for polling."""
        return True

    # Not abstract: most sources hold nothing that needs closing.
    async def aclose(self) -> None:  # noqa: B027
        """Let go of files and connections. Called once, also after a failure, and under a deadline."""


class CapacitySink(abc.ABC):
    """Somewhere that an agent keeps up to date with everything it knows, its own cluster and the others."""

    @abc.abstractmethod
    async def update(self, snapshot: Sequence[Capacity]) -> None:
        """Take every fresh record, sorted like `Registry.snapshot()`. Called again after a change; calls never overlap,
        and snapshots that come up while one is being taken are skipped for the newest. What is raised is logged and
        counted, and the next snapshot tried."""

    # Not abstract: many sinks hold nothing that needs closing.
    async def aclose(self) -> None:  # noqa: B027
        """Let go of files and connections. Called once, also after a failure, and under a deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    #: how logs, metrics and errors name this one: its key path and type, for instance "source[0]:fixtures"
    name: str
    #: the id of the local cluster
    cluster_id: str
    #: the process's one clock, in seconds; nothing else may be asked for the time
    clock: Clock
    #: the generator for everything that is drawn by lot
    random: Random
    #: bound to the name and the cluster id
    log: FilteringBoundLogger
    #: what relative paths in the options are relative to: the folder of the configuration file
    base_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContext(_Context):
    """What a source may use of its agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext(_Context):
    """What a sink may use of its agent."""


OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class SourceType(Generic[OptionsT]):
    """A kind of source that can be named in a `[[source]]` table."""

    #: what `type = "…"` says: a lower-case RFC 1123 label
    name: str
    #: the rest of the table; unknown keys are refused whether or not the Struct forbids them
    options: type[OptionsT]
    #: makes one source from checked options. Synchronous: what has to be awaited belongs into the first `collect()`.
    create: Callable[[OptionsT, SourceContext], CapacitySource]
    #: one line for `trio-federation plugins`
    summary: str = ""


@dataclass(frozen=True, slots=True)
class SinkType(Generic[OptionsT]):
    """A kind of sink that can be named in a `[[sink]]` table."""

    #: what `type = "…"` says: a lower-case RFC 1123 label
    name: str
    #: the rest of the table; unknown keys are refused whether or not the Struct forbids them
    options: type[OptionsT]
    #: makes one sink from checked options. Synchronous: what has to be awaited belongs into the first `update()`.
    create: Callable[[OptionsT, SinkContext], CapacitySink]
    #: one line for `trio-federation plugins`
    summary: str = ""


# A hook's answer is a list of types with options of any kind; hence Any.


@hookspec
def capacity_sources() -> Iterable[SourceType[Any]]:
    """The kinds of source that this plugin has. Called once, when the plugin is loaded."""
    raise NotImplementedError  # pluggy calls the plugins' functions, never this one


@hookspec
def capacity_sinks() -> Iterable[SinkType[Any]]:
    """The kinds of sink that this plugin has. Called once, when the plugin is loaded."""
    raise NotImplementedError  # pluggy calls the plugins' functions, never this one

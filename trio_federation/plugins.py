"""The manager of plugins: finds them through entry points, keeps each one apart from the others and from the agent,
and makes the sources and sinks that a configuration asks for. Nothing is loaded on import and there is no global
manager. The contract itself is `hookspecs.py`; when sources run, and what happens when one fails then, is the agent's
business."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec
import pluggy
import structlog
import trio

from trio_federation import hookspecs
from trio_federation.capacity import is_label
from trio_federation.clock import Clock
from trio_federation.errors import ConfigurationError, PluginError
from trio_federation.hookspecs import (
    PROJECT,
    CapacitySink,
    CapacitySource,
    SinkContext,
    SinkType,
    SourceContext,
    SourceType,
)
from trio_federation.suggest import did_you_mean, every_fault, nearest

if TYPE_CHECKING:
    from trio_federation.config import PluginTable

#: the group of entry points that plugins are found in
ENTRY_POINT_GROUP = PROJECT

AnyType: TypeAlias = SourceType[Any] | SinkType[Any]
T = TypeVar("T", SourceType[Any], SinkType[Any])

# Each hook, and the class of what it offers.
_HOOKS: dict[str, type[AnyType]] = {"capacity_sources": SourceType, "capacity_sinks": SinkType}
_KINDS: dict[type[AnyType], str] = {SourceType: "source", SinkType: "sink"}


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """Something that a plugin got wrong, while others went on."""

    #: the entry point's name, or the one it was registered under
    name: str
    #: "DISTRIBUTION VERSION", or "" for a plugin registered by hand
    package: str
    #: what happened and what to do, one line
    error: str
    #: what was raised, for a traceback in the log; None where nothing was
    cause: BaseException | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"plugin {_named(self.name, self.package)}: {self.error}"


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One plugin that was found, whether or not it could be loaded."""

    #: the entry point's name, or the one it was registered under
    name: str
    #: the distribution that it came with; "" for a plugin registered by hand
    distribution: str
    #: that distribution's version
    version: str
    #: the names of the source types and sink types that it offers and that can be used, sorted
    sources: tuple[str, ...]
    sinks: tuple[str, ...]
    #: what is wrong with it, a line each; empty if nothing is
    failures: tuple[str, ...]


class _Plugin:
    """What is known of one plugin; `types` is what its hooks answered, so far as that is usable."""

    def __init__(self, name: str, distribution: str, version: str) -> None:
        self.name = name
        self.distribution = distribution
        self.version = version
        self.types: list[AnyType] = []
        self.failures: list[PluginFailure] = []

    @property
    def package(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    def __str__(self) -> str:
        return _named(self.name, self.package)

    def blame(self, error: str, cause: BaseException | None = None) -> None:
        self.failures.append(PluginFailure(self.name, self.package, error, cause))


class PluginManager:
    """The plugins of one process, or of one test. Empty at first: `load_entry_points()` or `register()` fill it.

    Each plugin gets a pluggy manager of its own. So a hook that raises cannot keep the others from being called, a hook
    wrapper cannot change what others answer, and a plugin that fails half-way leaves nothing behind."""

    def __init__(self) -> None:
        self._plugins: list[_Plugin] = []

    @classmethod
    def load(cls) -> PluginManager:
        """A manager with every plugin that is installed."""
        manager = cls()
        manager.load_entry_points()
        return manager

    # --- finding plugins

    def load_entry_points(self) -> None:
        """Load every entry point of the group `trio_federation`. What fails is in `failures`, and the rest goes on.

        Only KeyboardInterrupt, GeneratorExit and Trio's Cancelled come out."""
        found: list[tuple[_Plugin, Callable[[], object]]] = []
        # `importlib.metadata.entry_points()` would do, but that one broken entry_points.txt makes it raise for all
        seen: set[str] = set()
        for distribution in importlib.metadata.distributions():
            name, version = _name_and_version(distribution)
            # of two installations, only the first on sys.path is the one that Python would import
            normalized = re.sub(r"[-_.]+", "-", name).lower()
            if normalized in seen:
                continue
            if name:
                seen.add(normalized)
            else:
                name = f"(unnamed package in {distribution.locate_file('')})"
            package = _Plugin(name, name, version)
            with self._blamed_on(package, "its entry points cannot be read; mend or uninstall it"):
                # looked at first, as a stranger's broken file is none of our business
                if ENTRY_POINT_GROUP in (distribution.read_text("entry_points.txt") or ""):
                    for entry_point in distribution.entry_points.select(group=ENTRY_POINT_GROUP):
                        found.append((_Plugin(entry_point.name, name, version), entry_point.load))
            if package.failures:
                self._plugins.append(package)
        # sorted, so that neither the order of sys.path nor that of a folder shows
        found.sort(key=lambda each: (each[0].name, each[0].package))
        for plugin, load in found:
            self._take(plugin, load)

    def register(self, plugin: object, name: str) -> None:
        """Take a plugin that is already there: a module, or any object with functions marked `hookimpl`.

        For tests and for programs that embed an agent. What is wrong with it is in `failures`, as for the others."""
        self._take(_Plugin(name, "", ""), lambda: plugin)

    def _take(self, plugin: _Plugin, load: Callable[[], object]) -> None:
        self._plugins.append(plugin)
        with self._blamed_on(plugin, "cannot be imported; mend or uninstall it"):
            loaded = load()
            with self._blamed_on(plugin, "does not fit the plugin contract"):
                hooks = _hooks_of(loaded, plugin.name)
                for hook_name, offered in _HOOKS.items():
                    with self._blamed_on(plugin, f"hook {hook_name} failed"):
                        for answer in getattr(hooks, hook_name)():
                            self._take_answer(plugin, hook_name, offered, answer)

    def _take_answer(self, plugin: _Plugin, hook_name: str, offered: type[AnyType], answer: object) -> None:
        if inspect.iscoroutine(answer):
            answer.close()
            raise PluginError("it is async; hooks are synchronous functions that return a list")
        if not isinstance(answer, Iterable):
            raise PluginError(f"it returned {_shown(answer)}; return a list of {offered.__name__}")
        for item in answer:
            fault = _fault_of_type(item, offered)
            if fault is not None:
                plugin.blame(f"hook {hook_name}: {fault}")
            else:
                plugin.types.append(item)

    @contextmanager
    def _blamed_on(self, plugin: _Plugin, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not is_plugins_own(error):
                raise
            plugin.blame(f"{what}: {in_one_line(error)}", error)

    # --- what there is

    @property
    def source_types(self) -> dict[str, SourceType[Any]]:
        """The source types that can be used, by name, sorted. One that several plugins offer is not among them."""
        return {name: kind for name, kind in self._usable(SourceType).items() if isinstance(kind, SourceType)}

    @property
    def sink_types(self) -> dict[str, SinkType[Any]]:
        """The sink types that can be used, by name, sorted. One that several plugins offer is not among them."""
        return {name: kind for name, kind in self._usable(SinkType).items() if isinstance(kind, SinkType)}

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin that was found, sorted by name and package."""
        usable = {kind: self._usable(kind) for kind in _KINDS}
        found = []
        for plugin in self._sorted():
            offers = {
                kind: tuple(sorted(each.name for each in plugin.types if usable[kind].get(each.name) is each))
                for kind in _KINDS
            }
            failures = tuple(failure.error for failure in (*plugin.failures, *self._clashes(plugin)))
            names = (plugin.name, plugin.distribution, plugin.version)
            found.append(PluginInfo(*names, offers[SourceType], offers[SinkType], failures))
        return tuple(found)

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """Everything that went wrong, sorted by the plugin's name and package."""
        return tuple(failure for plugin in self._sorted() for failure in (*plugin.failures, *self._clashes(plugin)))

    def _sorted(self) -> list[_Plugin]:
        return sorted(self._plugins, key=lambda plugin: (plugin.name, plugin.package))

    def _offers(self, kind: type[AnyType]) -> dict[str, list[tuple[_Plugin, AnyType]]]:
        """Who offers which type: by the type's name, sorted."""
        offers: dict[str, list[tuple[_Plugin, AnyType]]] = {}
        for plugin in self._sorted():
            for each in plugin.types:
                if isinstance(each, kind):
                    offers.setdefault(each.name, []).append((plugin, each))
        return dict(sorted(offers.items()))

    def _usable(self, kind: type[AnyType]) -> dict[str, AnyType]:
        return {name: offers[0][1] for name, offers in self._offers(kind).items() if len(offers) == 1}

    def _clashes(self, plugin: _Plugin) -> list[PluginFailure]:
        """The types of `plugin` that are refused, as more than one of the name are offered. All of them are: which one
        is right is for a person to say, not for the order of a folder."""
        return [
            PluginFailure(plugin.name, plugin.package, f"{_KINDS[kind]} type {name!r} is refused: {_clash(offers)}")
            for kind in _KINDS
            for name, offers in self._offers(kind).items()
            if len(offers) > 1 and any(owner is plugin for owner, _ in offers)
        ]

    # --- making sources and sinks

    @property
    def faults(self) -> dict[str, Callable[[PluginTable], list[str]]]:
        """Who finds what is wrong with a table, by its kind, for `config.load`."""
        return {"source": self.source_faults, "sink": self.sink_faults}

    def source_faults(self, table: PluginTable) -> list[str]:
        """Everything that is wrong with a `[[source]]` table, a line each with its key path. Makes nothing."""
        return self._check(table, SourceType)[1]

    def sink_faults(self, table: PluginTable) -> list[str]:
        """Everything that is wrong with a `[[sink]]` table, a line each with its key path. Makes nothing."""
        return self._check(table, SinkType)[1]

    def create_source(
        self, table: PluginTable, cluster_id: str, clock: Clock, random: Random, base_dir: Path
    ) -> CapacitySource:
        """The source that a `[[source]]` table describes.

        Raises ConfigurationError, with every fault, for an unknown type or wrong options, and PluginError where the
        plugin cannot make the source from them."""
        kind, options = self._checked(table, SourceType)
        context = SourceContext(
            name=table_name(table),
            cluster_id=cluster_id,
            clock=clock,
            random=random,
            log=structlog.get_logger(PROJECT).bind(source=table_name(table), cluster=cluster_id),
            base_dir=base_dir,
        )
        made = self._made(table, kind, lambda: kind.create(options, context))
        assert isinstance(made, CapacitySource)
        return made

    def create_sink(
        self, table: PluginTable, cluster_id: str, clock: Clock, random: Random, base_dir: Path
    ) -> CapacitySink:
        """The sink that a `[[sink]]` table describes. Raises like `create_source`."""
        kind, options = self._checked(table, SinkType)
        context = SinkContext(
            name=table_name(table),
            cluster_id=cluster_id,
            clock=clock,
            random=random,
            log=structlog.get_logger(PROJECT).bind(sink=table_name(table), cluster=cluster_id),
            base_dir=base_dir,
        )
        made = self._made(table, kind, lambda: kind.create(options, context))
        assert isinstance(made, CapacitySink)
        return made

    def _checked(self, table: PluginTable, wanted: type[T]) -> tuple[T, msgspec.Struct]:
        kind, faults = self._check(table, wanted)
        if kind is None or faults:
            raise ConfigurationError(faults)
        return kind, msgspec.convert(table.options, kind.options)

    def _check(self, table: PluginTable, wanted: type[T]) -> tuple[T | None, list[str]]:
        offers = self._offers(wanted).get(table.type, [])
        if len(offers) != 1:
            return None, [f"{table.key_path}.type: {self._why_not(table.type, wanted)}"]
        plugin, kind = offers[0]
        assert isinstance(kind, wanted)
        what = f"{table.key_path}: the {_KINDS[wanted]} type {table.type!r} of plugin {plugin}"
        try:
            return kind, every_fault(table.options, kind.options, table.key_path)
        except BaseException as error:
            if not is_plugins_own(error):
                raise
            return kind, [f"{what} cannot check its options: {in_one_line(error)}"]

    def _why_not(self, name: str, wanted: type[AnyType]) -> str:
        """Why there is no type `name`, and what to do about it."""
        kind = _KINDS[wanted]
        offers = self._offers(wanted)
        if name in offers:
            return f"{kind} type {name!r} is refused: {_clash(offers[name])}"
        text = f"no {kind} type {name!r} is installed"
        elsewhere = [each for other, each in _KINDS.items() if other is not wanted and name in self._offers(other)]
        # A plugin that failed may not have come to say what it has; as a rule it has a type of its own name.
        failed = [plugin for plugin in self._sorted() if plugin.failures]
        meant = nearest(name, [*offers, *(plugin.name for plugin in failed)])
        if elsewhere:
            text += f"; there is a {elsewhere[0]} type of this name, for [[{elsewhere[0]}]]"
        elif meant is None:
            text += f"; installed: {', '.join(offers) or 'none'}"
        elif meant != name:
            text += f'; did you mean "{meant}"?'
        for plugin in failed:
            if plugin.name in (name, meant):
                text += f"; plugin {plugin} failed: {', '.join(failure.error for failure in plugin.failures)}"
        others = [str(plugin) for plugin in failed if plugin.name not in (name, meant)]
        if others:
            text += f"; it may belong to a plugin that failed: {', '.join(others)}"
        return text

    def _made(self, table: PluginTable, kind: AnyType, create: Callable[[], object]) -> object:
        """What `create` makes, seen to be what its kind promises."""
        wanted = CapacitySource if isinstance(kind, SourceType) else CapacitySink
        owner = next(plugin for plugin in self._plugins if any(each is kind for each in plugin.types))
        where = f"{table.key_path}: plugin {owner} cannot make its {table.type!r}"
        try:
            made = create()
        except BaseException as error:
            if not is_plugins_own(error):
                raise
            raise PluginError(f"{where}: {in_one_line(error)}") from error
        if not isinstance(made, wanted):
            raise PluginError(f"{where}: it returned {_shown(made)}, which is no {wanted.__name__}")
        return made


def table_name(table: PluginTable) -> str:
    """How logs, metrics and errors name the source or sink of a table: "source[0]:fixtures"."""
    return f"{table.key_path}:{table.type}"


def _hooks_of(plugin: object, name: str) -> pluggy.HookRelay:
    """The hooks of this plugin alone. Raises PluginError or PluginValidationError where they break the specs."""
    if plugin is None:
        raise PluginError("the entry point names None; let it name a module")
    own = pluggy.PluginManager(PROJECT)
    own.add_hookspecs(hookspecs)
    marked: dict[str, bool] = {}
    for attribute in dir(plugin):
        options = own.parse_hookimpl_opts(plugin, attribute)
        if options is not None:
            marked[options.get("specname") or attribute] = bool(options.get("optionalhook"))
    if not marked:
        raise PluginError(f"nothing in it is marked with hookimpl; the hooks are {', '.join(_HOOKS)}")
    own.register(plugin, name)
    try:
        own.check_pending()
    except pluggy.PluginValidationError as error:
        # pluggy names the first unknown hook only, and not the one that was meant
        otherwise = f"; the hooks are {', '.join(_HOOKS)}"
        unknown = [hook for hook, optional in marked.items() if hook not in _HOOKS and not optional]
        told = [f"there is no hook {hook!r}{did_you_mean(hook, _HOOKS, otherwise)}" for hook in unknown]
        raise PluginError("; ".join(told)) from error
    return own.hook


def _fault_of_type(item: object, offered: type[AnyType]) -> str | None:
    """Why `item`, from a plugin's list, is no type that could be used."""
    if not isinstance(item, offered):
        return f"{_shown(item)} is no {offered.__name__}"
    if not is_label(item.name):
        return f"the type name {_shown(item.name)} is no lower-case RFC 1123 label"
    if not (isinstance(item.options, type) and issubclass(item.options, msgspec.Struct)):
        return f"the options of type {item.name!r} are {_shown(item.options)}; give a subclass of msgspec.Struct"
    if not callable(item.create):
        return f"create of type {item.name!r} is {_shown(item.create)}; give a function"
    return None


def is_plugins_own(error: BaseException) -> bool:
    """Whether what a plugin raised is the plugin's failure. SystemExit is: a plugin must not end the agent. What asks
    this process or this task to stop is not, alone or in a group."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_plugins_own(each) for each in error.exceptions)
    return not isinstance(error, KeyboardInterrupt | GeneratorExit | trio.Cancelled)


def plugins_failure(error: BaseException) -> str:
    """What a plugin has raised, in one line. Raises `error` again where it is not a plugin's failure; of a cancellation
    with which a failure came along, the cancellation alone."""
    if is_plugins_own(error):
        return in_one_line(error)
    if isinstance(error, BaseExceptionGroup):
        _, rest = error.split(is_plugins_own)
        assert rest is not None
        if rest.split(trio.Cancelled)[1] is None:
            raise rest
    raise error


def in_one_line(error: BaseException) -> str:
    """An error in one line. Its type is part of it, unless it is ours, whose texts stand alone."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    if isinstance(error, PluginError | ConfigurationError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shown(value: object) -> str:
    """A plugin's value for a message: short, and safe where its own repr raises."""
    return reprlib.repr(value)


def _named(name: str, package: str) -> str:
    return f"{name!r} of {package}" if package else repr(name)


def _clash(offers: list[tuple[_Plugin, AnyType]]) -> str:
    owners = list(dict.fromkeys(str(plugin) for plugin, _ in offers))
    if len(owners) == 1:
        return f"plugin {owners[0]} offers it {len(offers)} times"
    return f"plugins {' and '.join(owners)} offer it; uninstall all but one"


def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Of an installed package; what is left of a badly removed one may have neither."""
    try:
        return distribution.metadata["Name"] or "", distribution.metadata["Version"] or ""
    except Exception:
        return "", ""

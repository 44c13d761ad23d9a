"""The manager of plugins: finds them through entry points, keeps each one apart from the others and from the agent,
and makes the sources, sinks and filters that a configuration asks for. Nothing is loaded on import and there is no
global manager. The contract itself is `hookspecs.py`; when sources run, and what happens when one fails then, is the
agent's business."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import reprlib
import warnings
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import pluggy
import structlog
import trio

from trio_federation import hookspecs
from trio_federation.capacity import is_label
from trio_federation.clock import Clock
from trio_federation.config import Federation
from trio_federation.errors import ConfigurationError, PluginError
from trio_federation.hookspecs import (
    PROJECT,
    Backplane,
    BackplaneType,
    CapacityFilter,
    CapacitySink,
    CapacitySource,
    ClusterContext,
    FilterContext,
    FilterType,
    PluginType,
    SinkContext,
    SinkType,
    SourceContext,
    SourceType,
    only_reporter,
)
from trio_federation.suggest import did_you_mean, every_fault, nearest

if TYPE_CHECKING:
    from trio_federation.config import PluginTable

#: the group of entry points that plugins are found in
ENTRY_POINT_GROUP = PROJECT

AnyType: TypeAlias = PluginType[Any, Any, Any]
_T = TypeVar("_T", bound=AnyType)
_C = TypeVar("_C", bound=ClusterContext)
_M = TypeVar("_M")


class _Kind(NamedTuple):
    """One kind of what plugins offer."""

    #: how messages call it
    word: str
    #: where the configuration names its types
    table: str
    hook: str
    #: what `create` has to return
    makes: type[object]
    #: type names that are no plugin's to have
    built_in: tuple[str, ...] = ()


_KINDS: dict[type[AnyType], _Kind] = {
    SourceType: _Kind("source", "[[source]]", "capacity_sources", CapacitySource),
    SinkType: _Kind("sink", "[[sink]]", "capacity_sinks", CapacitySink),
    FilterType: _Kind("filter", "[[filter]]", "capacity_filters", CapacityFilter),
    BackplaneType: _Kind("backplane", "[hub.backplane]", "hub_backplanes", Backplane, built_in=("memory",)),
}
_HOOKS = {kind.hook: offered for offered, kind in _KINDS.items()}
_ALL_HOOKS = f"the hooks are {', '.join(_HOOKS)}"

#: Characters that a line tells of one error at most; a plugin may raise any text.
_LONGEST_TEXT = 1000
#: Members of a group of errors that a line tells at most.
_MOST_MEMBERS = 3


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
    #: the names of the types that it offers and that can be used, of each kind, sorted
    sources: tuple[str, ...]
    sinks: tuple[str, ...]
    filters: tuple[str, ...]
    backplanes: tuple[str, ...]
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

    @contextmanager
    def blamed(self, what: str) -> Iterator[None]:
        """Whatever is raised inside is this plugin's failure, and goes no further; `what` failed, and what to do."""
        try:
            yield
        except BaseException as error:
            if not is_plugins_own(error):
                raise
            self.blame(f"{what}: {in_one_line(error)}", error)


class PluginManager:
    """The plugins of one process, or of one test. Empty at first: `load_entry_points()` or `register()` fill it.

    Each function of each plugin is asked by itself. So one that raises cannot keep the others from being asked, none
    can change what another answers, and what is wrong with one hook costs the plugin's other hooks nothing. Once it is
    filled, a manager may be used from any thread."""

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
            with package.blamed("its entry points cannot be read; mend or uninstall it"):
                # looked at first, as a stranger's broken file is none of our business
                if ENTRY_POINT_GROUP in (distribution.read_text("entry_points.txt") or ""):
                    for entry_point in distribution.entry_points.select(group=ENTRY_POINT_GROUP):
                        found.append((_Plugin(entry_point.name, name, version), partial(_loaded, entry_point)))
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
        # What a plugin decides about warnings, to make errors of them for instance, ends with its import.
        with warnings.catch_warnings(), plugin.blamed("cannot be imported; mend or uninstall it"):
            loaded = load()
            with plugin.blamed("does not fit the plugin contract; mend or uninstall it"):
                for attribute, hook in _hooks_of(plugin, loaded).items():
                    with plugin.blamed(f"hook {hook} failed; mend or uninstall it"):
                        _take_answer(plugin, hook, _answer(loaded, attribute, hook))

    # --- what there is

    @property
    def source_types(self) -> dict[str, SourceType[Any]]:
        """The source types that can be used, by name, sorted. One that several plugins offer is not among them."""
        return self._usable(SourceType)

    @property
    def sink_types(self) -> dict[str, SinkType[Any]]:
        """The sink types that can be used, like `source_types`."""
        return self._usable(SinkType)

    @property
    def filter_types(self) -> dict[str, FilterType[Any]]:
        """The filter types that can be used, like `source_types`."""
        return self._usable(FilterType)

    @property
    def backplane_types(self) -> dict[str, BackplaneType[Any]]:
        """The backplane types that plugins offer, like `source_types`; so "memory", which is built in, is not there."""
        return self._usable(BackplaneType)

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
            found.append(
                PluginInfo(
                    plugin.name,
                    plugin.distribution,
                    plugin.version,
                    sources=offers[SourceType],
                    sinks=offers[SinkType],
                    filters=offers[FilterType],
                    backplanes=offers[BackplaneType],
                    failures=tuple(failure.error for failure in (*plugin.failures, *self._clashes(plugin))),
                )
            )
        return tuple(found)

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """Everything that went wrong, sorted by the plugin's name and package."""
        return tuple(failure for plugin in self._sorted() for failure in (*plugin.failures, *self._clashes(plugin)))

    def _sorted(self) -> list[_Plugin]:
        return sorted(self._plugins, key=lambda plugin: (plugin.name, plugin.package))

    def _offers(self, wanted: type[_T]) -> dict[str, list[tuple[_Plugin, _T]]]:
        """Who offers which type: by the type's name, sorted."""
        offers: dict[str, list[tuple[_Plugin, _T]]] = {}
        for plugin in self._sorted():
            for each in plugin.types:
                if isinstance(each, wanted):
                    offers.setdefault(each.name, []).append((plugin, each))
        return dict(sorted(offers.items()))

    def _usable(self, wanted: type[_T]) -> dict[str, _T]:
        return {name: offers[0][1] for name, offers in self._offers(wanted).items() if len(offers) == 1}

    def _clashes(self, plugin: _Plugin) -> list[PluginFailure]:
        """The types of `plugin` that are refused, as more than one of the name are offered. All of them are: which one
        is right is for a person to say, not for the order of a folder."""
        return [
            PluginFailure(plugin.name, plugin.package, f"{kind.word} type {name!r} is refused: {_clash(offers)}")
            for offered, kind in _KINDS.items()
            for name, offers in self._offers(offered).items()
            if len(offers) > 1 and any(owner is plugin for owner, _ in offers)
        ]

    # --- what tables of the configuration ask for

    @property
    def faults(self) -> dict[str, Callable[[PluginTable], list[str]]]:
        """Who finds what is wrong with a table, by its kind, for `config.load`."""
        return {
            "source": self.source_faults,
            "sink": self.sink_faults,
            "filter": self.filter_faults,
            "backplane": self.backplane_faults,
        }

    @property
    def faults_of_the_file(self) -> dict[str, Callable[[PluginTable], list[str]]]:
        """The same for a process that is to run: without what is not the file's fault, but that of a plugin that could
        not be loaded, or cannot check its options. Such a table costs its own records, and not the start of the agent;
        what is made of it fails, and tells why."""

        def of(wanted: type[AnyType]) -> Callable[[PluginTable], list[str]]:
            return lambda table: [] if self._is_a_plugins_fault(table, wanted) else self._faults(table, wanted)

        return {kind.word: of(wanted) for wanted, kind in _KINDS.items()}

    def _is_a_plugins_fault(self, table: PluginTable, wanted: type[AnyType]) -> bool:
        """Whether what is wrong with a table comes from a plugin, and another file would not help."""
        offers = self._offers(wanted)
        if table.type in offers:
            if len(offers[table.type]) > 1:
                return True
            try:
                every_fault(table.options, offers[table.type][0][1].options, table.key_path)
            except BaseException as error:
                if not is_plugins_own(error):
                    raise
                return True
            return False
        # One that failed before it could say what it has may have had this type, unless it looks like a slip.
        failed = [plugin for plugin in self._plugins if plugin.failures]
        if any(plugin.name == table.type for plugin in failed):
            return True
        return any(not plugin.types for plugin in failed) and nearest(table.type, offers) is None

    def source_faults(self, table: PluginTable) -> list[str]:
        """Everything that is wrong with a `[[source]]` table, a line each with its key path. Makes no source."""
        return self._faults(table, SourceType)

    def sink_faults(self, table: PluginTable) -> list[str]:
        """Everything that is wrong with a `[[sink]]` table, a line each with its key path. Makes no sink."""
        return self._faults(table, SinkType)

    def filter_faults(self, table: PluginTable) -> list[str]:
        """Everything that is wrong with a `[[filter]]` table, a line each with its key path. Makes no filter."""
        return self._faults(table, FilterType)

    def backplane_faults(self, table: PluginTable) -> list[str]:
        """Everything that is wrong with a `[hub.backplane]` table that names a plugin's type, a line each with its key
        path. That no hub of this version uses one is for `config.py` to say."""
        return self._faults(table, BackplaneType)

    def create_source(
        self,
        table: PluginTable,
        cluster_id: str,
        clock: Clock,
        random: Random,
        base_dir: Path,
        *,
        ttl: float = Federation().ttl,
    ) -> CapacitySource:
        """The source that a `[[source]]` table describes; a new one, with options of its own, at each call. `ttl`: that
        of the agent, in seconds.

        Raises ConfigurationError, with every fault, for an unknown type or wrong options, and PluginError where the
        plugin cannot make the source from them."""
        return self._create(SourceType, partial(SourceContext, ttl=ttl), table, cluster_id, clock, random, base_dir)

    def create_sink(
        self,
        table: PluginTable,
        cluster_id: str,
        clock: Clock,
        random: Random,
        base_dir: Path,
        *,
        ttl: float = Federation().ttl,
        is_reporter: Callable[[], bool | None] = only_reporter,
    ) -> CapacitySink:
        """The sink that a `[[sink]]` table describes, like `create_source`. `is_reporter`: as in `SinkContext`; called
        from any thread."""
        context = partial(SinkContext, ttl=ttl, is_reporter=is_reporter)
        return self._create(SinkType, context, table, cluster_id, clock, random, base_dir)

    def create_filter(
        self, table: PluginTable, cluster_id: str, clock: Clock, random: Random, base_dir: Path
    ) -> CapacityFilter:
        """The filter that a `[[filter]]` table describes, like `create_source`."""
        return self._create(FilterType, FilterContext, table, cluster_id, clock, random, base_dir)

    def _create(
        self,
        wanted: type[PluginType[Any, _C, _M]],
        context: Callable[..., _C],
        table: PluginTable,
        cluster_id: str,
        clock: Clock,
        random: Random,
        base_dir: Path,
    ) -> _M:
        checked = self._check(table, wanted)
        if isinstance(checked, list):
            raise ConfigurationError(checked)
        plugin, kind, options = checked
        name = table_name(table)
        log = structlog.get_logger(PROJECT).bind(**{_KINDS[wanted].word: name}, cluster=cluster_id)
        given = context(name=name, cluster_id=cluster_id, clock=clock, random=random, log=log, base_dir=base_dir)
        try:
            made = kind.create(options, given)
            _check_made(made, _KINDS[wanted].makes)
        except BaseException as error:
            if not is_plugins_own(error):
                raise
            where = f"{table.key_path}: plugin {plugin} cannot make its {table.type!r}"
            raise PluginError(f"{where}: {in_one_line(error)}") from error
        return made

    def _faults(self, table: PluginTable, wanted: type[AnyType]) -> list[str]:
        checked = self._check(table, wanted)
        return checked if isinstance(checked, list) else []

    def _check(self, table: PluginTable, wanted: type[_T]) -> tuple[_Plugin, _T, msgspec.Struct] | list[str]:
        """Who offers the type that a table names, the type, and the table's options; or everything that is wrong."""
        offers = self._offers(wanted).get(table.type, [])
        if len(offers) != 1:
            return [f"{table.key_path}.type: {self._why_not(table.type, wanted)}"]
        plugin, kind = offers[0]
        try:
            if found := every_fault(table.options, kind.options, table.key_path):
                return found
            return plugin, kind, msgspec.convert(table.options, kind.options)
        except BaseException as error:
            if not is_plugins_own(error):
                raise
            what = f"the {_KINDS[wanted].word} type {table.type!r} of plugin {plugin} cannot check its options"
            return [f"{table.key_path}: {what}; mend or uninstall it: {in_one_line(error)}"]

    def _why_not(self, name: str, wanted: type[AnyType]) -> str:
        """Why there is no type `name`, and what to do about it."""
        kind = _KINDS[wanted]
        offers = self._offers(wanted)
        if name in offers:
            return f"{kind.word} type {name!r} is refused: {_clash(offers[name])}"
        text = f"no {kind.word} type {name!r} is installed"
        elsewhere = [each for other, each in _KINDS.items() if other is not wanted and name in self._offers(other)]
        installed = sorted({*kind.built_in, *offers})
        # A plugin that failed may not have come to say what it has; as a rule it has a type of its own name.
        failed = [plugin for plugin in self._sorted() if plugin.failures]
        meant = nearest(name, [*installed, *(plugin.name for plugin in failed)])
        if elsewhere:
            text += f"; there is a {elsewhere[0].word} type of this name, for {elsewhere[0].table}"
        elif meant is None:
            text += f"; installed: {', '.join(installed) or 'none'}"
        elif meant != name:
            text += f'; did you mean "{meant}"?'
        for plugin in failed:
            if plugin.name in (name, meant):
                text += f"; plugin {plugin} failed: {', '.join(failure.error for failure in plugin.failures)}"
        others = [str(plugin) for plugin in failed if plugin.name not in (name, meant)]
        if others:
            text += f"; it may belong to a plugin that failed: {', '.join(others)}"
        return text


def table_name(table: PluginTable) -> str:
    """How logs, metrics and errors name the source, sink or filter of a table: "source[0]:fixtures"."""
    return f"{table.key_path}:{table.type}"


# One plugin, from its entry point to the types that it offers.


def _loaded(entry_point: importlib.metadata.EntryPoint) -> object:
    """What an entry point names. Raises PluginError where that is not there, and whatever the import raises."""
    if entry_point.pattern.match(entry_point.value) is None:
        shown = _shown(entry_point.value)
        raise PluginError(f"its entry point says {shown}, which names no module; write MODULE or MODULE:OBJECT")
    loaded: object = importlib.import_module(entry_point.module)
    for attribute in entry_point.attr.split(".") if entry_point.attr else ():
        try:
            loaded = getattr(loaded, attribute)
        except AttributeError as error:
            text = f"its entry point says {entry_point.value!r}, and there is no {attribute!r}"
            raise PluginError(f"{text}; correct the entry point, and install it again") from error
    return loaded


def _hooks_of(plugin: _Plugin, loaded: object) -> dict[str, str]:
    """The functions of a plugin that can be asked, and the hook of each. What cannot be is blamed on it."""
    if loaded is None:
        raise PluginError("the entry point names None; let it name a module")
    reader = pluggy.PluginManager(PROJECT)
    good: dict[str, str] = {}
    marked = set()
    for attribute in dir(loaded):
        options = reader.parse_hookimpl_opts(loaded, attribute)
        if options is None:
            continue
        hook = options.get("specname") or attribute
        marked.add(hook)
        if hook in _HOOKS:
            fault = _fault_of_hook(loaded, attribute, hook, options)
        elif options.get("optionalhook"):  # as may be one of a later version
            fault = None
        else:
            fault = f"there is no hook {hook!r}{did_you_mean(hook, _HOOKS, f'; {_ALL_HOOKS}')}"
        if fault is not None:
            plugin.blame(f"does not fit the plugin contract: {fault}")
        elif hook in _HOOKS:
            good[attribute] = hook
    forgotten = [hook for hook in _HOOKS if hook not in marked and _is_unmarked(loaded, hook)]
    for hook in forgotten:
        plugin.blame(f"does not fit the plugin contract: {hook} is not marked; put @hookimpl above the function")
    if not marked and not forgotten:
        raise PluginError(f"nothing in it is marked with hookimpl; {_ALL_HOOKS}")
    return good


def _is_unmarked(loaded: object, hook: str) -> bool:
    """Whether there is a function of a hook's name that is not the hook itself, imported from the contract."""
    there = inspect.getattr_static(loaded, hook, None)
    return callable(there) and there is not getattr(hookspecs, hook)


def _fault_of_hook(loaded: object, attribute: str, hook: str, options: Mapping[str, Any]) -> str | None:
    """Why a function cannot be asked what its hook asks."""
    if options.get("wrapper") or options.get("hookwrapper"):
        return f"hook {hook} is marked as a wrapper, and there is nothing to wrap, as each plugin is asked by itself"
    known = inspect.signature(getattr(hookspecs, hook)).parameters
    wanted = inspect.signature(getattr(loaded, attribute)).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in wanted if each.default is each.empty and each.kind not in variable]
    if inspect.isclass(loaded) and needed[:1] == ["self"]:
        return f"the entry point names the class {loaded.__name__}; let it name an object of that class"
    if unknown := [name for name in needed if name not in known]:
        shown = ", ".join(map(repr, unknown))
        return f"hook {hook} has no argument {shown}; the arguments that it has: {', '.join(known) or 'none'}"
    return None


class _OneHook(pluggy.PluginManager):
    """pluggy for one function of one plugin."""

    def __init__(self, attribute: str) -> None:
        super().__init__(PROJECT)
        self._attribute = attribute
        self.add_hookspecs(hookspecs)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if name == self._attribute else None


def _answer(loaded: object, attribute: str, hook: str) -> object:
    own = _OneHook(attribute)
    own.register(loaded, attribute)
    answers = getattr(own.hook, hook)()
    return answers[0] if answers else None  # pluggy leaves None out


def _take_answer(plugin: _Plugin, hook: str, answer: object) -> None:
    """Note the types that a hook offers. What it offers beside them is blamed on the plugin; of a generator that fails,
    what came before counts."""
    offered = _HOOKS[hook]
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns that nobody has awaited it
    if inspect.isawaitable(answer) or isinstance(answer, AsyncIterable):
        raise PluginError("it is async; make it a plain function that returns a list")
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping):
        raise PluginError(f"it returned {_shown(answer)}; return a list of {offered.__name__}, an empty one for none")
    for item in answer:
        fault = _fault_of_type(item, offered)
        if fault is not None:
            plugin.blame(f"hook {hook}: {fault}")
        else:
            plugin.types.append(item)


def _fault_of_type(item: object, offered: type[AnyType]) -> str | None:
    """Why `item`, from a plugin's list, is no type that could be used."""
    if not isinstance(item, offered):
        return f"{_shown(item)} is no {offered.__name__}; leave it out, or make one of it"
    if not is_label(item.name):
        return f"the type name {_shown(item.name)} is no lower-case RFC 1123 label; give another"
    if item.name in _KINDS[offered].built_in:
        return f"the type name {item.name!r} is built in; give another"
    if not (isinstance(item.options, type) and issubclass(item.options, msgspec.Struct)):
        return f"the options of type {item.name!r} are {_shown(item.options)}; give a subclass of msgspec.Struct"
    if not callable(item.create):
        return f"create of type {item.name!r} is {_shown(item.create)}; give a function, or the class"
    if not isinstance(item.summary, str):
        return f"the summary of type {item.name!r} is {_shown(item.summary)}; give one line of text"
    return _fault_of_options(item.name, item.options)


def _fault_of_options(name: str, options: type[msgspec.Struct]) -> str | None:
    """Why no table could ever be read as these options."""
    try:
        msgspec.json.Decoder(options)  # which looks at every annotation, also those of Structs inside
        fields = {each.encode_name for each in msgspec.structs.fields(options)}
    except Exception as error:
        return (
            f"the options of type {name!r} cannot be read from a table; mend {options.__name__}: {in_one_line(error)}"
        )
    if options.__struct_config__.array_like:
        return f"the options of type {name!r} are read from an array; define {options.__name__} without array_like"
    if "type" in fields:
        return f"the options of type {name!r} have a key 'type', which names the type itself; give it another name"
    return None


def _check_made(made: object, wanted: type[object]) -> None:
    """See that a plugin made what its kind promises. Raises PluginError where it did not."""
    if inspect.iscoroutine(made):
        made.close()  # else Python warns that nobody has awaited it
        raise PluginError("create is async; make it a plain function, and await in run()")
    if not isinstance(made, wanted):
        # Not shown itself: it was made from options, and one of them may be a secret.
        raise PluginError(f"create returned a {type(made).__name__}, which is no {wanted.__name__}")


# Whose failure it is, and how to tell it.


def is_plugins_own(error: BaseException) -> bool:
    """Whether what a plugin raised is the plugin's failure. SystemExit is: a plugin must not end the agent. What asks
    this process or this task to stop is not, alone or in a group."""
    return not any(isinstance(each, KeyboardInterrupt | GeneratorExit | trio.Cancelled) for each in _members(error))


def _members(error: BaseException) -> Iterator[BaseException]:
    """The errors that an error consists of, in their order: those of a group, or the one."""
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseExceptionGroup):
            waiting += reversed(each.exceptions)
        else:
            yield each


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
    """An error in one line, those of a group with it. Its type is part of it, unless it is ours, whose texts stand
    alone."""
    try:
        text = "".join(each if each.isprintable() else "\ufffd" for each in " ".join(str(error).split()))
    except BaseException as failure:
        if not is_plugins_own(failure):
            raise
        text = ""
    if isinstance(error, PluginError | ConfigurationError):
        return text
    name = type(error).__name__
    line = f"{name}: {text}" if text else name
    if len(line) > _LONGEST_TEXT:
        line = line[:_LONGEST_TEXT] + "…"
    if isinstance(error, BaseExceptionGroup):
        members = list(_members(error))
        told = [in_one_line(each) for each in members[:_MOST_MEMBERS]]
        more = [f"{len(members) - len(told)} more"] if len(members) > len(told) else []
        line += f": {', '.join(told + more)}"
    return line


def _shown(value: object) -> str:
    """A plugin's value for a message: short, in one line, and safe where its own repr raises."""
    return " ".join(reprlib.repr(value).split())


def _named(name: str, package: str) -> str:
    return f"{name!r} of {package}" if package else repr(name)


def _clash(offers: Sequence[tuple[_Plugin, AnyType]]) -> str:
    """Who offers one type several times, and what to do about it."""
    plugins = list({id(plugin): plugin for plugin, _ in offers}.values())
    if len(plugins) == 1:
        return f"plugin {plugins[0]} offers it {len(offers)} times; mend or uninstall it"
    several = len({plugin.package for plugin in plugins}) > 1 or not plugins[0].package
    advice = "uninstall all but one" if several else "mend or uninstall the package"
    return f"plugins {' and '.join(map(str, plugins))} offer it; {advice}"


def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Of an installed package; what is left of a badly removed one may have neither."""
    try:
        return distribution.metadata["Name"] or "", distribution.metadata["Version"] or ""
    except Exception:
        return "", ""

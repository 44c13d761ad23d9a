"""What a plugin may do wrong, and that it costs nobody else anything: its hooks, its types, their options, and the
making of what they describe. Each test is about one kind of type; `test_kinds.py` sees that all kinds are alike."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pluggy
import pytest
import structlog
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_federation import (
    Capacity,
    CapacitySink,
    CapacitySource,
    SinkContext,
    SinkType,
    SourceContext,
    SourceType,
    hookimpl,
    hookspecs,
)
from trio_federation.config import PluginTable
from trio_federation.errors import ConfigurationError, FederationError, PluginError
from trio_federation.plugins import PluginManager


class Options(msgspec.Struct):
    path: str
    limit: int = 0


class Source(CapacitySource):
    def __init__(self, options: Options, context: SourceContext) -> None:
        self.options = options
        self.context = context

    async def collect(self) -> Sequence[Capacity]:
        return []


class Sink(CapacitySink):
    def __init__(self, options: Options, context: SinkContext) -> None:
        self.options = options
        self.context = context

    async def update(self, snapshot: Sequence[Capacity]) -> None:
        return None


def plugin(**hooks: Callable[..., Any]) -> object:
    """A plugin with these functions, all of them marked."""
    return SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})


def sources(*names: str) -> object:
    """A good plugin that offers source types of these names."""
    return plugin(capacity_sources=lambda: [SourceType(name, Options, Source) for name in names])


def empty() -> Callable[[], list[Any]]:
    """A hook, a new one each time as marking changes it, that offers nothing."""

    def hook() -> list[Any]:
        return []

    return hook


def raising(error: BaseException) -> Callable[[], Any]:
    def hook() -> Any:
        raise error

    return hook


def managed(**plugins: object) -> PluginManager:
    manager = PluginManager()
    for name, each in plugins.items():
        manager.register(each, name)
    return manager


def errors(manager: PluginManager) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for failure in manager.failures:
        assert "\n" not in str(failure)
        assert str(failure).startswith(f"plugin '{failure.name}'")
        found.setdefault(failure.name, []).append(failure.error)
    return found


# --- the contract


def hook_names() -> list[str]:
    """Every hook that there is, read as pluggy reads them."""
    reader = pluggy.PluginManager(hookspecs.PROJECT)
    return sorted(name for name in dir(hookspecs) if reader.parse_hookspec_opts(hookspecs, name) is not None)


def test_the_hooks() -> None:
    assert hook_names() == ["capacity_filters", "capacity_sinks", "capacity_sources", "hub_backplanes"]


@pytest.mark.parametrize("name", hook_names())
def test_each_hook_is_documented_and_called(name: str) -> None:
    calls: list[str] = []

    def hook() -> list[Any]:
        calls.append(name)
        return []

    assert errors(managed(only=plugin(**{name: hook}))) == {}
    assert calls == [name]
    assert getattr(hookspecs, name).__doc__


@pytest.mark.parametrize("name", hook_names())
def test_the_specs_are_never_run_themselves(name: str) -> None:
    with pytest.raises(NotImplementedError):
        getattr(hookspecs, name)()


# --- one plugin's failure is its own


def test_a_manager_is_empty_at_first() -> None:
    manager = PluginManager()
    assert (manager.plugins, manager.failures) == ((), ())
    assert [*manager.source_types, *manager.sink_types, *manager.filter_types, *manager.backplane_types] == []


def test_what_good_plugins_offer() -> None:
    manager = managed(
        two=plugin(
            capacity_sources=lambda: [SourceType("b", Options, Source), SourceType("a", Options, Source, "of letters")],
            capacity_sinks=lambda: iter([SinkType("a", Options, Sink)]),
        ),
        nothing=plugin(capacity_sources=empty(), capacity_sinks=empty()),
    )
    assert list(manager.source_types) == ["a", "b"]
    assert manager.source_types["a"].summary == "of letters"
    assert list(manager.sink_types) == ["a"]
    assert errors(manager) == {}
    assert [(each.name, each.sources, each.sinks, each.failures) for each in manager.plugins] == [
        ("nothing", (), (), ()),
        ("two", ("a", "b"), ("a",), ()),
    ]


FAILED = "hook capacity_sources failed; mend or uninstall it"
UNFIT = "does not fit the plugin contract"


class Custom(BaseException):
    """As of an extension module that panics, or a test framework's skip."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class UnprintableForGood(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


@pytest.mark.parametrize(
    "error, told",
    [
        (RuntimeError("broken\nin two lines"), "RuntimeError: broken in two lines"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit(), "SystemExit"),
        (Custom("panic"), "Custom: panic"),
        (Unprintable(), "Unprintable"),
        (UnprintableForGood(), "UnprintableForGood"),
        (
            ExceptionGroup("one", [ValueError("of\ntwo lines")]),
            "ExceptionGroup: one (1 sub-exception): ValueError: of two lines",
        ),
        (BaseExceptionGroup("one", [SystemExit()]), "BaseExceptionGroup: one (1 sub-exception): SystemExit"),
        (
            ExceptionGroup("a", [ExceptionGroup("b", [ValueError(), TypeError()]), *map(KeyError, "xyz")]),
            "ExceptionGroup: a (4 sub-exceptions): ValueError, TypeError, KeyError: 'x', 2 more",
        ),
        (RuntimeError("x" * 2000), f"RuntimeError: {'x' * 986}…"),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_hook_that_raises_is_told_and_the_others_are_called(error: BaseException, told: str) -> None:
    bad = plugin(capacity_sources=raising(error), capacity_sinks=lambda: [SinkType("kept", Options, Sink)])
    manager = managed(a=sources("a"), bad=bad, z=sources("z"))
    assert errors(manager) == {"bad": [f"{FAILED}: {told}"]}
    assert manager.failures[0].cause is error
    assert list(manager.source_types) == ["a", "z"]
    assert list(manager.sink_types) == ["kept"]


def test_a_generator_that_fails_half_way_has_offered_the_first_half() -> None:
    def hook() -> Iterator[SourceType[Any]]:
        yield SourceType("first", Options, Source)
        raise RuntimeError("no second")

    manager = managed(half=plugin(capacity_sources=hook))
    assert list(manager.source_types) == ["first"]
    assert errors(manager) == {"half": [f"{FAILED}: RuntimeError: no second"]}


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        GeneratorExit(),
        BaseExceptionGroup("several", [ValueError(), BaseExceptionGroup("inner", [KeyboardInterrupt()])]),
    ],
)
def test_what_asks_the_process_to_stop_is_not_a_plugins_failure(error: BaseException) -> None:
    manager = PluginManager()
    with pytest.raises(type(error)) as caught:
        manager.register(plugin(capacity_sources=raising(error)), "stopped")
    assert caught.value is error


async def test_cancelled_is_not_a_plugins_failure() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as error:
            for hook in (raising(error), raising(BaseExceptionGroup("several", [error, ValueError()]))):
                with pytest.raises((trio.Cancelled, BaseExceptionGroup)):
                    PluginManager().register(plugin(capacity_sources=hook), "cancelled")
            make = SourceType("make", Options, raising_create(error))
            manager = managed(make=plugin(capacity_sources=lambda: [make]))
            with pytest.raises(trio.Cancelled):
                create(manager, PluginTable("make", {"path": "x"}, "source[0]"))
            raise
    assert scope.cancelled_caught


def raising_create(error: BaseException) -> Callable[[Any, Any], Any]:
    def make(options: Any, context: Any) -> Any:
        raise error

    return make


def test_a_misspelt_hook_is_named_with_the_nearest_one() -> None:
    half = plugin(capacity_sinx=empty(), capacity_sources=lambda: [SourceType("half", Options, Source)])
    manager = managed(good=sources("good"), bad=plugin(capacity_source=empty()), half=half, more=plugin(zzz=empty()))
    every = "capacity_sources, capacity_sinks, capacity_filters, hub_backplanes"
    assert errors(manager) == {
        "bad": [f"{UNFIT}: there is no hook 'capacity_source'; did you mean \"capacity_sources\"?"],
        "half": [f"{UNFIT}: there is no hook 'capacity_sinx'; did you mean \"capacity_sinks\"?"],
        "more": [f"{UNFIT}: there is no hook 'zzz'; the hooks are {every}"],
    }
    # a misspelt hook costs the plugin's other hooks nothing
    assert list(manager.source_types) == ["good", "half"]


def test_a_hook_may_have_another_name_in_the_plugin_and_a_later_hook_may_be_optional() -> None:
    good = SimpleNamespace(
        mine=hookimpl(lambda: [SourceType("mine", Options, Source)], specname="capacity_sources"),
        a_hook_of_a_later_version=hookimpl(empty(), optionalhook=True),
    )
    bad = SimpleNamespace(later=hookimpl(empty(), optionalhook=True), misspelt=hookimpl(empty()))
    manager = managed(good=good, bad=bad)
    (error,) = errors(manager)["bad"]
    assert error.startswith(f"{UNFIT}: there is no hook 'misspelt'; the hooks are")
    assert list(errors(manager)) == ["bad"]
    assert list(manager.source_types) == ["mine"]


def asks_by_name(*, config: object) -> list[Any]:
    return []


@pytest.mark.parametrize(
    "hook, shown",
    [
        (lambda config: [], "'config'"),
        (lambda config, registry, more=1: [], "'config', 'registry'"),
        (asks_by_name, "'config'"),
    ],
)
def test_an_unknown_argument_is_named(hook: Callable[..., Any], shown: str) -> None:
    bad = plugin(capacity_sources=hook, capacity_sinks=lambda: [SinkType("kept", Options, Sink)])
    manager = managed(bad=bad, good=sources("good"))
    told = f"{UNFIT}: hook capacity_sources has no argument {shown}; the arguments that it has: none"
    assert errors(manager) == {"bad": [told]}
    assert list(manager.source_types) == ["good"]
    assert list(manager.sink_types) == ["kept"]


def test_arguments_that_nobody_has_to_give_are_no_fault() -> None:
    def hook(config: object = None, *more: object, **others: object) -> list[Any]:
        assert (config, more, others) == (None, (), {})
        return [SourceType("good", Options, Source)]

    manager = managed(good=plugin(capacity_sources=hook))
    assert errors(manager) == {}
    assert list(manager.source_types) == ["good"]


def test_a_class_in_the_place_of_an_object_is_named() -> None:
    class Plugin:
        @hookimpl
        def capacity_sources(self) -> list[Any]:
            return [SourceType("good", Options, Source)]

    manager = managed(bad=Plugin, good=Plugin())
    told = f"{UNFIT}: the entry point names the class Plugin; let it name an object of that class"
    assert errors(manager) == {"bad": [told]}
    assert list(manager.source_types) == ["good"]


def test_a_hook_that_is_not_marked_is_named() -> None:
    half = SimpleNamespace(
        capacity_sources=hookimpl(lambda: [SourceType("half", Options, Source)]),
        capacity_sinks=empty(),
        hub_backplanes=hookspecs.hub_backplanes,  # imported with the rest of the contract, and nobody's hook
    )
    manager = managed(half=half, bad=SimpleNamespace(capacity_filters=empty()))
    assert errors(manager) == {
        "bad": [f"{UNFIT}: capacity_filters is not marked; put @hookimpl above the function"],
        "half": [f"{UNFIT}: capacity_sinks is not marked; put @hookimpl above the function"],
    }
    assert list(manager.source_types) == ["half"]


@pytest.mark.parametrize("how", [{"wrapper": True}, {"hookwrapper": True}])
def test_a_wrapper_is_refused_and_changes_nothing_for_others(how: dict[str, Any]) -> None:
    def wrapper() -> Iterator[None]:
        yield

    bad = SimpleNamespace(
        also=hookimpl(wrapper, specname="capacity_sources", **how),
        capacity_sources=hookimpl(lambda: [SourceType("kept", Options, Source)]),
    )
    manager = managed(good=sources("good"), bad=bad)
    assert list(manager.source_types) == ["good", "kept"]
    assert errors(manager) == {
        "bad": [
            f"{UNFIT}: hook capacity_sources is marked as a wrapper, and there is nothing to wrap, as each plugin is "
            "asked by itself"
        ]
    }


def test_two_functions_for_one_hook_are_asked_apart() -> None:
    both = SimpleNamespace(
        first=hookimpl(raising(RuntimeError("of the first")), specname="capacity_sources"),
        second=hookimpl(lambda: [SourceType("kept", Options, Source)], specname="capacity_sources"),
        third=hookimpl(lambda: [SourceType("more", Options, Source)], specname="capacity_sources"),
    )
    manager = managed(both=both)
    assert list(manager.source_types) == ["kept", "more"]
    assert errors(manager) == {"both": [f"{FAILED}: RuntimeError: of the first"]}


class Odd:
    """A plugin object that gets in the way of being compared, hashed, listed or shown."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("not shown")

    @hookimpl
    def capacity_sources(self) -> list[Any]:
        return [self]


class Unlisted:
    def __dir__(self) -> list[str]:
        raise RuntimeError("not listed")


def unmarked() -> object:
    return SimpleNamespace(capacity_sources=empty())


@pytest.mark.parametrize(
    "odd, text",
    [
        (None, f"{UNFIT}; mend or uninstall it: the entry point names None"),
        (SimpleNamespace(), f"{UNFIT}; mend or uninstall it: nothing in it is marked with hookimpl; the hooks are"),
        (unmarked(), "capacity_sources is not marked"),
        ("a text", "nothing in it is marked with hookimpl"),
        (Unlisted(), f"{UNFIT}; mend or uninstall it: RuntimeError: not listed"),
        (Odd(), "is no SourceType"),
    ],
    ids=["none", "empty", "unmarked", "text", "unlisted", "odd"],
)
def test_odd_plugins_are_told_and_the_others_go_on(odd: object, text: str) -> None:
    manager = managed(a=sources("a"), odd=odd, z=sources("z"))
    (error,) = errors(manager).pop("odd")
    assert text in error
    assert list(manager.source_types) == ["a", "z"]


async def coroutine() -> list[Any]:
    return []


async def async_generator() -> AsyncIterator[Any]:
    yield SourceType("x", Options, Source)


class Unresolvable(msgspec.Struct):
    path: Missing  # type: ignore[name-defined]  # noqa: F821


class Outer(msgspec.Struct):
    inner: list[Unresolvable] = []


class Unsupported(msgspec.Struct):
    path: dict[str, int] | dict[int, str]


class Array(msgspec.Struct, array_like=True):
    path: str


class Taken(msgspec.Struct):
    kind: str = msgspec.field(name="type", default="")


@pytest.mark.parametrize(
    "answer, text",
    [
        (3, f"{FAILED}: it returned 3; return a list of SourceType, an empty one for none"),
        (None, f"{FAILED}: it returned None; return a list of SourceType"),
        ({"x": SourceType("x", Options, Source)}, "return a list of SourceType"),
        (SourceType("x", Options, Source), "return a list of SourceType"),
        ("ab", f"{FAILED}: it returned 'ab'; return a list of SourceType"),
        ([None], "hook capacity_sources: None is no SourceType"),
        ([SinkType("x", Options, Sink)], "is no SourceType"),
        ([SourceType], "is no SourceType"),
        ([SourceType("", Options, Source)], "the type name '' is no lower-case RFC 1123 label"),
        ([SourceType("A b", Options, Source)], "the type name 'A b' is no lower-case RFC 1123 label"),
        ([SourceType(3, Options, Source)], "the type name 3 is no"),  # type: ignore[arg-type]
        ([SourceType("x", dict, Source)], "options of type 'x' are <class 'dict'>"),  # type: ignore[type-var,arg-type]
        ([SourceType("x", Options(path=""), Source)], "give a subclass of msgspec.Struct"),  # type: ignore[arg-type]
        ([SourceType("x", Options, None)], "create of type 'x' is None; give a function"),  # type: ignore[arg-type]
        ([SourceType("x", Options, Source, 3)], "the summary of type 'x' is 3; give one line"),  # type: ignore[arg-type]
        ([SourceType("x", Unresolvable, Source)], "mend Unresolvable: NameError: name 'Missing' is not defined"),  # type: ignore[arg-type]
        ([SourceType("x", Outer, Source)], "mend Outer: NameError: name 'Missing' is not defined"),  # type: ignore[arg-type]
        ([SourceType("x", Unsupported, Source)], "type 'x' cannot be read from a table; mend Unsupported: TypeError: "),  # type: ignore[arg-type]
        ([SourceType("x", Array, Source)], "are read from an array; define Array without array_like"),  # type: ignore[arg-type]
        ([SourceType("x", Taken, Source)], "have a key 'type', which names the type itself"),  # type: ignore[arg-type]
    ],
)
def test_garbage_from_a_hook_is_named(answer: object, text: str) -> None:
    manager = managed(bad=plugin(capacity_sources=lambda: answer), good=sources("good"))
    found = errors(manager)["bad"]
    assert len(found) == 1
    assert text in found[0]
    assert list(manager.source_types) == ["good"]


def test_a_good_type_beside_garbage_is_kept() -> None:
    manager = managed(mixed=plugin(capacity_sources=lambda: [1, SourceType("good", Options, Source), 2]))
    assert list(manager.source_types) == ["good"]
    assert errors(manager) == {
        "mixed": [
            f"hook capacity_sources: {number} is no SourceType; leave it out, or make one of it" for number in (1, 2)
        ]
    }


@pytest.mark.parametrize("hook", [coroutine, async_generator])
def test_an_async_hook_is_refused(hook: Callable[[], Any]) -> None:
    # that no warning about a coroutine that was never awaited follows is seen to by warnings being errors
    manager = managed(bad=plugin(capacity_sources=hook))
    assert errors(manager) == {"bad": [f"{FAILED}: it is async; make it a plain function that returns a list"]}


# --- several plugins, one name


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "b", "c"])))
def test_a_type_that_two_plugins_offer_is_refused_whatever_the_order(order: tuple[str, ...]) -> None:
    plugins = {"a": sources("x", "only-a"), "b": sources("x"), "c": sources("only-c")}
    manager = managed(**{name: plugins[name] for name in order})
    clash = "source type 'x' is refused: plugins 'a' and 'b' offer it; uninstall all but one"
    assert errors(manager) == {"a": [clash], "b": [clash]}
    assert list(manager.source_types) == ["only-a", "only-c"]
    assert {each.name: each.sources for each in manager.plugins} == {"a": ("only-a",), "b": (), "c": ("only-c",)}
    assert manager.source_faults(PluginTable("x", {}, "source[1]")) == [f"source[1].type: {clash}"]


def test_a_type_that_one_plugin_offers_twice_is_refused() -> None:
    manager = managed(a=sources("x", "x", "y"))
    assert errors(manager) == {
        "a": ["source type 'x' is refused: plugin 'a' offers it 2 times; mend or uninstall it"],
    }
    assert list(manager.source_types) == ["y"]


def test_a_source_type_and_a_sink_type_may_share_a_name() -> None:
    both = plugin(
        capacity_sources=lambda: [SourceType("x", Options, Source)],
        capacity_sinks=lambda: [SinkType("x", Options, Sink)],
    )
    manager = managed(both=both)
    assert errors(manager) == {}
    assert (list(manager.source_types), list(manager.sink_types)) == (["x"], ["x"])


def test_one_object_under_two_names_and_two_plugins_of_one_name() -> None:
    one = sources("x")
    manager = managed(a=one, b=one)
    assert list(manager.source_types) == []
    manager = PluginManager()
    manager.register(sources("x"), "same")
    manager.register(sources("y"), "same")
    assert list(manager.source_types) == ["x", "y"]


offers = st.lists(st.lists(st.sampled_from(["p", "q", "r", "s"]), max_size=3), min_size=1, max_size=5)


@settings(max_examples=40)
@given(offers, st.randoms(use_true_random=False))
def test_the_order_of_plugins_never_shows(offered: list[list[str]], random: Random) -> None:
    plugins = [(f"plugin-{index}", names) for index, names in enumerate(offered)]
    views = []
    for _ in range(2):
        manager = PluginManager()
        for name, names in plugins:
            manager.register(sources(*names), name)
        views.append((list(manager.source_types), manager.plugins, manager.failures))
        random.shuffle(plugins)
    assert views[0] == views[1]
    every = [name for names in offered for name in names]
    assert views[0][0] == sorted(name for name in set(every) if every.count(name) == 1)


# --- making sources and sinks


def create(manager: PluginManager, table: PluginTable) -> CapacitySource:
    return manager.create_source(table, "west", lambda: 7.0, Random(1), Path("/etc/here"))


def test_a_source_gets_its_options_and_its_context() -> None:
    random = Random(1)
    manager = managed(good=sources("good"))
    table = PluginTable("good", {"path": "x"}, "source[2]")
    source = manager.create_source(table, "west", lambda: 7.0, random, Path("/etc/here"))
    assert isinstance(source, Source)
    assert source.options == Options(path="x")
    context = source.context
    assert (context.name, context.cluster_id, context.clock()) == ("source[2]:good", "west", 7.0)
    assert context.random is random
    assert context.base_dir == Path("/etc/here")
    assert structlog.get_context(context.log) == {"source": "source[2]:good", "cluster": "west"}


def test_a_sink_gets_its_options_and_its_context() -> None:
    manager = managed(good=plugin(capacity_sinks=lambda: [SinkType("good", Options, Sink)]))
    table = PluginTable("good", {"path": "x", "limit": 3}, "sink[0]")
    sink = manager.create_sink(table, "west", lambda: 7.0, Random(1), Path("/etc/here"))
    assert isinstance(sink, Sink)
    assert sink.options == Options(path="x", limit=3)
    assert isinstance(sink.context, SinkContext)
    assert sink.context.name == "sink[0]:good"
    assert (sink.context.ttl, sink.context.is_reporter()) == (30.0, True)
    assert manager.sink_faults(PluginTable("good", {}, "sink[0]")) == ["sink[0].path: is missing; the table needs it"]
    with pytest.raises(ConfigurationError, match=r"sink\[0\]\.path"):
        manager.create_sink(PluginTable("good", {}, "sink[0]"), "west", lambda: 7.0, Random(1), Path())


@pytest.mark.parametrize("answer", [True, False, None])
def test_a_sink_can_ask_whether_its_agent_is_the_reporter(answer: bool | None) -> None:
    """Whenever it likes: what it gets is the question, and not an answer of the past."""
    manager = managed(good=plugin(capacity_sinks=lambda: [SinkType("good", Options, Sink)]))
    table = PluginTable("good", {"path": "x"}, "sink[0]")
    said: list[bool | None] = [None]
    sink = manager.create_sink(table, "west", lambda: 7.0, Random(1), Path(), ttl=12.0, is_reporter=lambda: said[-1])
    assert isinstance(sink, Sink)
    said.append(answer)
    assert (sink.context.ttl, sink.context.is_reporter()) == (12.0, answer)


def test_every_fault_of_the_options_is_raised_at_once() -> None:
    manager = managed(good=sources("good"))
    table = PluginTable("good", {"pth": "x", "limit": "3"}, "source[0]")
    with pytest.raises(ConfigurationError) as caught:
        create(manager, table)
    assert caught.value.faults == [
        'source[0].pth: unknown key; did you mean "path"?',
        "source[0].limit: expected a whole number, got a string",
        "source[0].path: is missing; the table needs it",
    ]
    assert manager.source_faults(table) == caught.value.faults
    assert manager.source_faults(PluginTable("good", {"path": "x"}, "source[0]")) == []


class Hostile(msgspec.Struct):
    path: str

    def __post_init__(self) -> None:
        raise SystemExit(4)


class Fickle(msgspec.Struct):
    """Good when it is checked, and bad when it is used."""

    path: str
    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        Fickle.made += 1
        if Fickle.made % 2 == 0:
            raise KeyError("a second time")


@pytest.mark.parametrize("options, told", [(Hostile, "SystemExit: 4"), (Fickle, "KeyError: 'a second time'")])
def test_options_that_cannot_be_checked_are_a_fault_of_the_plugin(options: type[msgspec.Struct], told: str) -> None:
    manager = managed(bad=plugin(capacity_sources=lambda: [SourceType("odd", options, raising_create(ValueError()))]))
    with pytest.raises(ConfigurationError) as caught:
        create(manager, PluginTable("odd", {"path": "x"}, "source[0]"))
    (fault,) = caught.value.faults
    what = "source[0]: the source type 'odd' of plugin 'bad' cannot check its options; mend or uninstall it"
    assert fault == f"{what}: {told}"


@pytest.mark.parametrize(
    "error, told",
    [
        (RuntimeError("no such\nfile"), "RuntimeError: no such file"),
        (SystemExit(1), "SystemExit: 1"),
        (PluginError("its own words"), "its own words"),
    ],
)
def test_a_source_that_cannot_be_made_is_an_error_with_its_cause(error: BaseException, told: str) -> None:
    manager = managed(bad=plugin(capacity_sources=lambda: [SourceType("odd", Options, raising_create(error))]))
    with pytest.raises(PluginError) as caught:
        create(manager, PluginTable("odd", {"path": "x"}, "source[0]"))
    assert str(caught.value) == f"source[0]: plugin 'bad' cannot make its 'odd': {told}"
    assert caught.value.__cause__ is error


def test_keyboard_interrupt_while_a_source_is_made_comes_out() -> None:
    stop = raising_create(KeyboardInterrupt())
    manager = managed(bad=plugin(capacity_sources=lambda: [SourceType("odd", Options, stop)]))
    with pytest.raises(KeyboardInterrupt):
        create(manager, PluginTable("odd", {"path": "x"}, "source[0]"))


@pytest.mark.parametrize("made", [None, Source, object()])
def test_what_is_no_source_is_refused(made: Any) -> None:
    manager = managed(bad=plugin(capacity_sources=lambda: [SourceType("odd", Options, lambda options, context: made)]))
    with pytest.raises(PluginError, match="which is no CapacitySource"):
        create(manager, PluginTable("odd", {"path": "x"}, "source[0]"))


# --- a type that is not there


def why(manager: PluginManager, name: str) -> str:
    (fault,) = manager.source_faults(PluginTable(name, {}, "source[0]"))
    place, _, text = fault.partition(": ")
    assert place == "source[0].type"
    with pytest.raises(FederationError) as caught:
        create(manager, PluginTable(name, {}, "source[0]"))
    assert str(caught.value) == fault
    return text


def test_an_unknown_type_with_the_nearest_one() -> None:
    manager = managed(a=sources("fixtures", "kubernetes"))
    assert why(manager, "fixture") == "no source type 'fixture' is installed; did you mean \"fixtures\"?"
    assert why(manager, "zzz") == "no source type 'zzz' is installed; installed: fixtures, kubernetes"
    assert why(PluginManager(), "zzz") == "no source type 'zzz' is installed; installed: none"


def test_an_unknown_type_whose_plugin_failed() -> None:
    broken = plugin(capacity_sources=raising(RuntimeError("no kubeconfig")))
    manager = managed(kubernetes=broken, fixtures=sources("fixtures"))
    failed = f"plugin 'kubernetes' failed: {FAILED}: RuntimeError: no kubeconfig"
    assert why(manager, "kubernetes") == f"no source type 'kubernetes' is installed; {failed}"
    meant = "no source type 'kuberneets' is installed; did you mean \"kubernetes\"?"
    assert why(manager, "kuberneets") == f"{meant}; {failed}"
    assert why(manager, "zzz") == (
        "no source type 'zzz' is installed; installed: fixtures; it may belong to a plugin that failed: 'kubernetes'"
    )


def test_a_source_type_that_is_a_sink_type() -> None:
    manager = managed(a=plugin(capacity_sinks=lambda: [SinkType("status", Options, Sink)]))
    assert (
        why(manager, "status")
        == "no source type 'status' is installed; there is a sink type of this name, for [[sink]]"
    )

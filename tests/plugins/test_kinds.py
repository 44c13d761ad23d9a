"""The four kinds of what plugins offer are alike: the classes that do the work, how they are offered, kept apart, made,
and named in a configuration. What else a plugin may do wrong is in `test_plugin_manager.py`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import structlog
import trio
from structlog.testing import capture_logs

import trio_federation
from tests.plugins.test_plugin_manager import errors, managed, plugin
from trio_federation import (
    Backplane,
    BackplaneContext,
    BackplaneType,
    Capacity,
    CapacityFilter,
    CapacitySink,
    CapacitySource,
    FilterContext,
    FilterType,
    SinkContext,
    SinkType,
    SourceContext,
    SourceType,
    hookspecs,
)
from trio_federation.config import PluginTable, load
from trio_federation.errors import ConfigurationError, PluginError
from trio_federation.plugins import PluginManager


class Options(msgspec.Struct):
    path: str
    words: list[str] = []


class _Made:
    """What is made keeps what it was made of."""

    def __init__(self, options: Any, context: Any) -> None:
        self.options = options
        self.context = context


class Source(_Made, CapacitySource):
    async def collect(self) -> Sequence[Capacity]:
        return []


class Sink(_Made, CapacitySink):
    async def update(self, snapshot: Sequence[Capacity]) -> None:
        return None


class Hide(_Made, CapacityFilter):
    def report(self, record: Capacity) -> Capacity | None:
        return None if record.namespace == "hidden" else replace(record, pending=0)


class Relay(_Made, Backplane):
    async def run(
        self,
        receive: Callable[[bytes], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        task_status.started()
        await receive(b"of another hub")
        await trio.sleep_forever()

    async def publish(self, message: bytes) -> None:
        return None


@dataclass(frozen=True)
class Kind:
    word: str
    hook: str
    offers: Any
    base: Any
    works: type[_Made]
    context: type[Any]

    def offering(self, *names: str, create: Callable[[Any, Any], Any] | None = None) -> object:
        """A plugin that offers types of this kind with these names."""
        return plugin(**{self.hook: lambda: [self.offers(name, Options, create or self.works) for name in names]})

    def types(self, manager: PluginManager) -> list[str]:
        found = getattr(manager, f"{self.word}_types")
        assert all(isinstance(each, self.offers) for each in found.values())
        return list(found)

    def faults(self, manager: PluginManager, table: PluginTable) -> list[str]:
        found: list[str] = manager.faults[self.word](table)
        assert getattr(manager, f"{self.word}_faults")(table) == found
        return found

    def create(self, manager: PluginManager, table: PluginTable) -> Any:
        return getattr(manager, f"create_{self.word}")(table, "west", lambda: 7.0, Random(1), Path("/etc/here"))


KINDS = [
    Kind("source", "capacity_sources", SourceType, CapacitySource, Source, SourceContext),
    Kind("sink", "capacity_sinks", SinkType, CapacitySink, Sink, SinkContext),
    Kind("filter", "capacity_filters", FilterType, CapacityFilter, Hide, FilterContext),
    Kind("backplane", "hub_backplanes", BackplaneType, Backplane, Relay, BackplaneContext),
]
#: the kinds of which something is made in this version
MADE = KINDS[:3]

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.word)
each_made_kind = pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.word)


# --- the classes


def test_these_are_all_kinds() -> None:
    assert sorted(PluginManager().faults) == sorted(kind.word for kind in KINDS)
    hooks = [name for name, each in vars(hookspecs).items() if hasattr(each, f"{hookspecs.PROJECT}_spec")]
    assert hooks == [kind.hook for kind in KINDS]


@each_kind
def test_what_plugins_need_is_public_and_documented(kind: Kind) -> None:
    for each in (kind.base, kind.offers, kind.context, getattr(hookspecs, kind.hook)):
        assert inspect.getdoc(each)
        assert each is getattr(hookspecs, kind.hook) or getattr(trio_federation, each.__name__) is each
        assert each is getattr(hookspecs, kind.hook) or each.__name__ in trio_federation.__all__
    for name, method in inspect.getmembers(kind.base, inspect.isfunction):
        assert inspect.getdoc(method), name
    assert {"Duration", "seconds", "hookimpl", "hookspecs"} <= set(trio_federation.__all__)


@pytest.mark.parametrize(
    "kind, wanted",
    list(zip(KINDS, [{"collect"}, {"update"}, {"report"}, {"run", "publish"}], strict=True)),
    ids=[kind.word for kind in KINDS],
)
def test_what_each_has_to_do_itself(kind: Kind, wanted: set[str]) -> None:
    assert kind.base.__abstractmethods__ == wanted
    with pytest.raises(TypeError, match=sorted(wanted)[0]):
        kind.base()


def test_the_rest_of_a_source_has_defaults() -> None:
    source = Source(None, None)
    assert source.changes() is None
    assert source.is_live() is True


@pytest.mark.parametrize("works", [Source, Sink])
async def test_a_source_or_sink_that_does_not_say_otherwise_runs_until_it_is_cancelled(
    works: type[Source] | type[Sink], autojump_clock: trio.testing.MockClock
) -> None:
    made = works(None, None)
    ended = []

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        try:
            await made.run(task_status=task_status)
        finally:
            ended.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        with trio.fail_after(1):
            await nursery.start(run)
        await trio.sleep(3600)
        assert ended == []
        nursery.cancel_scope.cancel()
    assert len(ended) == 1
    with trio.fail_after(1):
        await made.aclose()
        await works(None, None).aclose()  # also where it was never run


async def test_a_run_that_nobody_waits_for_is_no_error(autojump_clock: trio.testing.MockClock) -> None:
    with trio.move_on_after(10) as scope:
        await Source(None, None).run()
    assert scope.cancelled_caught


def test_a_filter_says_what_others_may_know() -> None:
    hide = Hide(None, None)
    record = Capacity("west", "open", "python", "pool", idle=3, pending=2)
    assert hide.report(record) == replace(record, pending=0)
    assert hide.report(replace(record, namespace="hidden")) is None


@each_kind
def test_what_a_context_holds(kind: Kind) -> None:
    common = ["name", "clock", "random", "log", "base_dir"]
    found = [field.name for field in fields(kind.context)]
    assert found == common if kind.word == "backplane" else [*common, "cluster_id"]


# --- offering


@each_kind
def test_a_type_is_found(kind: Kind) -> None:
    manager = managed(good=kind.offering("b", "a"))
    assert kind.types(manager) == ["a", "b"]
    assert errors(manager) == {}
    (info,) = manager.plugins
    words = {each.word: getattr(info, f"{each.word}s") for each in KINDS}
    assert words == {each.word: () for each in KINDS} | {kind.word: ("a", "b")}


@pytest.mark.parametrize("kind, other", list(itertools.permutations(KINDS, 2)), ids=lambda kind: kind.word)
def test_a_type_of_another_kind_is_refused(kind: Kind, other: Kind) -> None:
    manager = managed(bad=plugin(**{kind.hook: lambda: [other.offers("x", Options, other.works)]}))
    (error,) = errors(manager)["bad"]
    assert error.startswith(f"hook {kind.hook}: ")
    assert error.endswith(f" is no {kind.offers.__name__}; leave it out, or make one of it")
    assert kind.types(manager) == other.types(manager) == []


def test_one_name_may_stand_for_one_type_of_each_kind() -> None:
    manager = managed(**{kind.word: kind.offering("x") for kind in KINDS})
    assert errors(manager) == {}
    assert [kind.types(manager) for kind in KINDS] == [["x"]] * 4


@each_kind
@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_a_type_that_two_offer_is_refused(kind: Kind, order: tuple[str, str]) -> None:
    offering = {"one": kind.offering("x", "y"), "two": kind.offering("x", "z")}
    manager = managed(**{name: offering[name] for name in order})
    clash = f"{kind.word} type 'x' is refused: plugins 'one' and 'two' offer it; uninstall all but one"
    assert errors(manager) == {"one": [clash], "two": [clash]}
    assert kind.types(manager) == ["y", "z"]
    assert kind.faults(manager, PluginTable("x", {}, "here")) == [f"here.type: {clash}"]


@each_kind
def test_a_hook_that_fails_costs_the_others_nothing(kind: Kind) -> None:
    def broken() -> Iterator[Any]:
        yield kind.offers("first", Options, kind.works)
        raise SystemExit("no licence")

    good = {each.hook: lambda each=each: [each.offers("kept", Options, each.works)] for each in KINDS}
    manager = managed(half=plugin(**good | {kind.hook: broken}))
    assert errors(manager) == {
        "half": [f"hook {kind.hook} failed; mend or uninstall it: SystemExit: no licence"],
    }
    assert [each.types(manager) for each in KINDS] == [["first"] if each is kind else ["kept"] for each in KINDS]


# --- tables of a configuration


@each_kind
def test_faults_of_a_table(kind: Kind) -> None:
    manager = managed(good=kind.offering("good"))
    assert kind.faults(manager, PluginTable("good", {"path": "x"}, "here")) == []
    assert kind.faults(manager, PluginTable("good", {"pth": 1}, "here")) == [
        'here.pth: unknown key; did you mean "path"?',
        "here.path: is missing; the table needs it",
    ]
    assert kind.faults(manager, PluginTable("god", {}, "here")) == [
        f"here.type: no {kind.word} type 'god' is installed; did you mean \"good\"?"
    ]


@pytest.mark.parametrize("kind, other", list(itertools.permutations(KINDS, 2)), ids=lambda kind: kind.word)
def test_a_type_of_another_kind_is_pointed_out(kind: Kind, other: Kind) -> None:
    table = "[hub.backplane]" if other.word == "backplane" else f"[[{other.word}]]"
    assert kind.faults(managed(a=other.offering("thing")), PluginTable("thing", {}, "here")) == [
        f"here.type: no {kind.word} type 'thing' is installed; there is a {other.word} type of this name, for {table}"
    ]


@each_made_kind
def test_what_is_made_gets_its_options_and_its_context(kind: Kind) -> None:
    manager = managed(good=kind.offering("good"))
    table = PluginTable("good", {"path": "x"}, f"{kind.word}[2]")
    made = kind.create(manager, table)
    assert type(made) is kind.works
    assert made.options == Options(path="x")
    context = made.context
    assert type(context) is kind.context
    assert (context.name, context.cluster_id, context.clock()) == (f"{kind.word}[2]:good", "west", 7.0)
    assert context.random.random() == Random(1).random()
    assert context.base_dir == Path("/etc/here")


@each_made_kind
def test_the_logger_names_what_it_belongs_to(kind: Kind) -> None:
    context = kind.create(managed(good=kind.offering("good")), PluginTable("good", {"path": "x"}, "at[0]")).context
    assert structlog.get_context(context.log) == {kind.word: "at[0]:good", "cluster": "west"}
    with capture_logs() as logs:
        context.log.info("done", count=3)
    assert logs == [{kind.word: "at[0]:good", "cluster": "west", "event": "done", "count": 3, "log_level": "info"}]


@each_made_kind
def test_each_is_made_anew_with_options_of_its_own(kind: Kind) -> None:
    manager = managed(good=kind.offering("good"))
    table = PluginTable("good", {"path": "x", "words": ["a"]}, "at[0]")
    first = kind.create(manager, table)
    first.options.words.append("changed by the first")
    second = kind.create(manager, table)
    assert second is not first
    assert second.options == Options(path="x", words=["a"])


async def async_create(options: Any, context: Any) -> Any:
    return Source(options, context)


def secret_create(options: Any, context: Any) -> Any:
    return Options(path="hunter2")


@each_made_kind
@pytest.mark.parametrize(
    "create, told",
    [
        (lambda options, context: None, "create returned a NoneType, which is no {base}"),
        (lambda options, context: [], "create returned a list, which is no {base}"),
        (lambda options, context: Relay(options, context), "create returned a Relay, which is no {base}"),
        (lambda options: None, "TypeError: "),
        (secret_create, "create returned a Options, which is no {base}"),
        # that no warning about a coroutine that was never awaited follows is seen to by warnings being errors
        (async_create, "create is async; make it a plain function, and await in run()"),
    ],
    ids=["none", "list", "other", "arguments", "secret", "async"],
)
def test_what_is_not_what_it_should_be_is_refused(kind: Kind, create: Callable[..., Any], told: str) -> None:
    manager = managed(bad=kind.offering("odd", create=create))
    with pytest.raises(PluginError) as caught:
        kind.create(manager, PluginTable("odd", {"path": "hunter2"}, "at[0]"))
    start = "at[0]: plugin 'bad' cannot make its 'odd': "
    assert str(caught.value).startswith(start + told.format(base=kind.base.__name__))
    assert "hunter2" not in str(caught.value)


@each_made_kind
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), BaseExceptionGroup("", [ValueError(), KeyboardInterrupt()])])
def test_a_wish_to_stop_while_something_is_made_comes_out(kind: Kind, stop: BaseException) -> None:
    def create(options: Any, context: Any) -> Any:
        raise stop

    with pytest.raises(type(stop)) as caught:
        kind.create(managed(bad=kind.offering("odd", create=create)), PluginTable("odd", {"path": "x"}, "at[0]"))
    assert caught.value is stop


@each_made_kind
def test_what_has_faults_is_not_made(kind: Kind) -> None:
    manager = managed(good=kind.offering("good"))
    table = PluginTable("good", {}, "at[0]")
    with pytest.raises(ConfigurationError) as caught:
        kind.create(manager, table)
    assert caught.value.faults == kind.faults(manager, table) == ["at[0].path: is missing; the table needs it"]


# --- filters and backplanes in a file


def file_faults(folder: Path, text: str, manager: PluginManager) -> list[str]:
    path = folder / "some.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load(path, {}, manager.faults)
    return [line.removeprefix(f"{path}: ") for line in caught.value.faults]


def test_faults_of_filters_in_a_file(tmp_path: Path) -> None:
    manager = managed(good=KINDS[2].offering("hide"))
    text = 'cluster_id = "west"\n[[filter]]\ntype = "hide"\npath = 1\n[[filter]]\ntype = "hdie"\n'
    assert file_faults(tmp_path, text, manager) == [
        "filter[0].path: expected a string, got a whole number",
        "filter[1].type: no filter type 'hdie' is installed; did you mean \"hide\"?",
    ]


HUB = '[hub]\nsecret = "s"\nbind = "127.0.0.1:0"\n[hub.backplane]\n'


def test_the_backplane_that_is_built_in_is_no_plugins_to_offer(tmp_path: Path) -> None:
    manager = managed(bad=KINDS[3].offering("memory", "relay"))
    assert errors(manager) == {
        "bad": ["hook hub_backplanes: the type name 'memory' is built in; give another"],
    }
    assert list(manager.backplane_types) == ["relay"]
    path = tmp_path / "some.toml"
    path.write_text(HUB + 'type = "memory"')
    config = load(path, {}, manager.faults)
    assert config.hub is not None
    assert config.hub.backplane.type == "memory"


def test_backplanes_in_a_file(tmp_path: Path) -> None:
    manager = managed(relay=KINDS[3].offering("relay"))
    unused = "[hub.backplane] type: 'relay' is installed, but no hub of this version uses it; use \"memory\""
    assert file_faults(tmp_path, HUB + 'type = "relay"\npath = "x"', manager) == [unused]
    assert file_faults(tmp_path, HUB + 'type = "relay"', manager) == [
        unused,
        "hub.backplane.path: is missing; the table needs it",
    ]
    unknown = "hub.backplane.type: no backplane type"
    assert file_faults(tmp_path, HUB + 'type = "memoria"', manager) == [
        f"{unknown} 'memoria' is installed; did you mean \"memory\"?"
    ]
    assert file_faults(tmp_path, HUB + 'type = "zzz"', manager) == [
        f"{unknown} 'zzz' is installed; installed: memory, relay"
    ]
    (later,) = file_faults(tmp_path, HUB + 'type = "nats"', manager)
    assert '"nats" is not available in this version yet' in later

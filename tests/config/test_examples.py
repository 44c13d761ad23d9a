"""The files in config/: good as they are, complete, and true about the defaults."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trio_federation.capacity import Capacity, fault
from trio_federation.config import Config, Endpoint, PluginTable, Secret, Tables, load
from trio_federation.registry import Registry
from trio_federation_fixtures.options import FixtureOptions
from trio_federation_fixtures.source import RecordFile

FOLDER = Path(__file__).resolve().parents[2] / "config"
AGENT, HUB = FOLDER / "agent.toml", FOLDER / "hub.toml"
WEST, EAST, QUICK_HUB = (FOLDER / "quickstart" / name for name in ("west.toml", "east.toml", "hub.toml"))
ENVIRON = {"TRIO_FEDERATION_SECRET": "from the environment"}

#: a setting, or the head of a table, that is commented out: "#" with nothing between
COMMENTED = re.compile(r"#(?=\[|[a-z_]+ = )")


def uncommented(path: Path) -> dict[str, Any]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return tomllib.loads(
        "\n".join(COMMENTED.sub("", line, count=1) if COMMENTED.match(line) else line for line in lines)
    )


def commented_only(path: Path) -> dict[str, Any]:
    """What is commented out, below the heads of tables that may be live."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if COMMENTED.match(line) or line[:1] == "["]
    return tomllib.loads("\n".join(COMMENTED.sub("", line, count=1) for line in lines))


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        items = value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]
        for item in items:
            if isinstance(item, dict):
                yield from leaves(item, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", item


def model_keys(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the model with its default (None: it has none), taken from the Structs; an endpoint as text."""
    for each in msgspec.structs.fields(kind):
        structs = [
            inner for inner in _inner(each.type) if isinstance(inner, type) and issubclass(inner, msgspec.Struct)
        ]
        if PluginTable in structs:
            yield f"{prefix}{each.name}.type", None
        elif structs and Endpoint not in structs:
            yield from model_keys(structs[0], f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", None if each.required else _as_written(each.default)


def _inner(kind: Any) -> Iterator[Any]:
    yield kind
    for each in getattr(kind, "__args__", ()):
        yield from _inner(each)
    if hasattr(kind, "__origin__") and hasattr(kind, "__metadata__"):
        yield kind.__origin__


def _as_written(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Endpoint) else value


MODEL = dict(model_keys(Tables))


def test_the_walk_over_the_model_finds_what_is_there() -> None:
    some: dict[str, Any] = {
        "cluster_id": None,
        "federation.ttl": 30.0,
        "hub.tls.key_file": None,
        "hub.backplane.type": "memory",
    }
    some |= {"metrics.bind": "127.0.0.1:9464", "hub.accept": ["shared"], "source.type": None, "federation.hubs": []}
    some |= {"filter.type": None, "sink.type": None, "placement.settle_time": 2.0, "placement.reservation_ttl": 10.0}
    some |= {"placement.ranking": "left", "hub.limits.streams": 16, "hub.limits.first_message": 15.0}
    some |= {"hub.policy.clusters": None, "hub.policy.see": ["*/*"], "hub.policy.max_idle": None}
    some |= {"hub.tls.cluster_san": None, "admin.token": None, "admin.tls.key_file": None}
    assert {key: MODEL.get(key, "absent") for key in some} == some
    assert len(MODEL) == 54


@pytest.mark.parametrize(
    "path", [AGENT, HUB, WEST, EAST, QUICK_HUB], ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_files_are_good_as_they_are(path: Path) -> None:
    config = load(path, ENVIRON)
    is_hub = path.name == "hub.toml"
    assert (config.has_agent, config.enabled, config.hub is not None) == (not is_hub, not is_hub, is_hub)
    assert [line for line in config.warnings if "[hub] accept" not in line] == []
    assert load(path, {}).has_agent is not is_hub


def test_every_key_of_the_model_is_there() -> None:
    there = dict(leaves(uncommented(AGENT))) | dict(leaves(uncommented(HUB)))
    plugins_own = {"source.path"}
    assert sorted(set(there) - plugins_own) == sorted(MODEL)


@pytest.mark.parametrize("path", [AGENT, HUB], ids=lambda path: path.name)
def test_each_file_is_complete_for_its_part(path: Path) -> None:
    agents = ("cluster_id", "federation.", "source.", "filter.", "sink.", "placement.")
    wanted = [key for key in MODEL if key.startswith("hub.") == (path == HUB) or not key.startswith((*agents, "hub."))]
    wanted = [key for key in wanted if not (path == HUB and key.startswith(agents))]
    assert [key for key in wanted if key not in dict(leaves(uncommented(path)))] == []


@pytest.mark.parametrize("path", [AGENT, HUB], ids=lambda path: path.name)
def test_what_is_commented_out_is_the_default(path: Path) -> None:
    found = dict(leaves(commented_only(path)))
    assert len(found) > 5
    durations = {key: float(value[:-1]) for key, value in found.items() if isinstance(MODEL[key], float)}
    said = {key: value for key, value in (found | durations).items() if MODEL[key] is not None}
    assert said == {key: MODEL[key] for key in said}


@pytest.mark.parametrize("path", [AGENT, HUB], ids=lambda path: path.name)
def test_every_setting_has_a_sentence(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    explained = {line for before, line in pairwise(lines) if before.startswith("# ")}
    # A plugin's table is explained as a whole, above its head.
    settings = [line for line in lines if re.match(r"#?[a-z_]+ = ", line) and not re.match("#?(type|path) = ", line)]
    assert len(settings) > 10
    assert [line for line in settings if line not in explained] == []


@pytest.mark.parametrize("path", [AGENT, HUB], ids=lambda path: path.name)
def test_what_is_commented_out_would_be_good_too(path: Path, tmp_path: Path) -> None:
    """With everything live, and the files that it names in place, nothing is at odds but what has a file of its own."""
    text = path.read_text(encoding="utf-8").replace("/run/secrets", str(tmp_path))
    lines = [COMMENTED.sub("", line, count=1) if COMMENTED.match(line) else line for line in text.splitlines()]
    live = "\n".join(line for line in lines if not line.startswith(("secret = ", "token = ")))
    (tmp_path / "tls").mkdir()
    for name in ("federation", "tls/ca.crt", "tls/tls.crt", "tls/tls.key"):
        (tmp_path / name).write_text("x")
    (tmp_path / "admin-token").write_text("y" * 16)
    target = tmp_path / path.name
    target.write_text(live, encoding="utf-8")
    config = load(target, {})
    sections = [section for section in (config.federation if config.has_agent else None, config.hub) if section]
    assert [section.secret for section in sections] == [Secret("x")]
    assert config.admin.token == Secret("y" * 16)
    if config.hub is not None:
        assert [policy.clusters for policy in config.hub.policy] == [("west",)]
        assert str(config.hub.tls and config.hub.tls.cluster_san) == "DNS:{cluster}.agents.example"


def quickstart() -> tuple[Config, Config, Config]:
    return load(WEST, {}), load(EAST, {}), load(QUICK_HUB, {})


def test_quickstart_fits_together() -> None:
    west, east, hub = quickstart()
    assert hub.hub is not None
    assert (west.cluster_id, east.cluster_id) == ("west", "east")
    for agent in (west, east):
        assert agent.federation.hubs == (hub.hub.bind,)
        assert agent.federation.secret == hub.hub.secret
        assert hub.hub.bind.is_loopback
    binds = [hub.hub.bind, *(bind for config in quickstart() for bind in (config.metrics.bind, config.admin.bind))]
    assert len(set(binds)) == len(binds) == 7
    assert all(bind.is_loopback for bind in binds)


def records(config: Config) -> list[Capacity]:
    (source,) = config.source
    options = msgspec.convert(source.options, FixtureOptions)
    assert config.path is not None
    assert options.path is not None
    assert config.cluster_id is not None
    rows = msgspec.convert(tomllib.loads((config.path.parent / options.path).read_text(encoding="utf-8")), RecordFile)
    return [Capacity(config.cluster_id, **msgspec.structs.asdict(row)) for row in rows.record]


def test_quickstart_has_something_to_show() -> None:
    west, east, _ = quickstart()
    found = [*records(west), *records(east)]
    assert [fault(record) for record in found] == [None] * 3
    registry = Registry("west", clock=lambda: 0.0)
    registry.upsert(found)
    assert registry.local_idle("team-a", "python") == 0
    assert not registry.local_can_grow("team-a", "python")
    best = registry.best_foreign_member("team-a", "python")
    assert best is not None
    assert best.target == "east::pool-large"


def test_the_agents_source_is_there() -> None:
    assert records(load(AGENT, {})) == records(load(WEST, {}))

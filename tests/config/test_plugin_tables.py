"""The tables that belong to plugins: who is asked what is wrong with them, and how that is told beside the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trio_federation.config import Config, PluginTable, load
from trio_federation.errors import ConfigurationError

HUB = '[hub]\nsecret = "s"\nbind = "127.0.0.1:0"\n'
AGENT = 'cluster_id = "west"\n'

Finder = Callable[[PluginTable], list[str]]


def faults(folder: Path, text: str, **finders: Finder) -> list[str]:
    """The faults, less the file's name, which each has to begin with."""
    path = folder / "some.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load(path, {}, finders)
    start = f"{path}: "
    assert [line for line in caught.value.faults if not line.startswith(start)] == []
    return [line.removeprefix(start) for line in caught.value.faults]


def good(folder: Path, text: str, **finders: Finder) -> Config:
    path = folder / "some.toml"
    path.write_text(text)
    return load(path, {}, finders)


def seeing(seen: list[PluginTable], *found: str) -> Finder:
    """A finder that notes what it is asked about, and finds these faults."""

    def find(table: PluginTable) -> list[str]:
        seen.append(table)
        return [f"{table.key_path}{each}" for each in found]

    return find


THREE = AGENT + "\n".join(
    f'[[{kind}]]\ntype = "{kind}-{index}"\nkey = {index}' for index in (0, 1) for kind in ("sink", "source", "filter")
)


def test_each_table_is_shown_to_who_knows_its_kind(tmp_path: Path) -> None:
    seen: dict[str, list[PluginTable]] = {"source": [], "sink": [], "filter": [], "backplane": []}
    good(tmp_path, THREE, **{kind: seeing(tables) for kind, tables in seen.items()})
    assert seen == {"backplane": []} | {
        kind: [PluginTable(f"{kind}-{index}", {"key": index}, f"{kind}[{index}]") for index in (0, 1)]
        for kind in ("source", "sink", "filter")
    }


def test_their_faults_are_told_with_all_others_in_the_order_of_the_model(tmp_path: Path) -> None:
    finders = {kind: seeing([], ".key: is odd") for kind in ("sink", "filter", "source")}
    assert faults(tmp_path, THREE + '\n[log]\nlevel = "loud"', **finders) == [
        '[log] level: \'loud\' is not known here; use "debug", "info", "warning", "error"',
        *(f"{kind}[{index}].key: is odd" for kind in ("source", "filter", "sink") for index in (0, 1)),
    ]


def test_a_table_without_a_type_is_shown_to_nobody(tmp_path: Path) -> None:
    seen: list[PluginTable] = []
    text = AGENT + '[[filter]]\ntype = 3\n[[filter]]\ntype = "good"\n[[source]]\n'
    found = faults(tmp_path, text, filter=seeing(seen, ": is odd"), source=seeing(seen, ": is odd"))
    assert [line.partition(": ")[0] for line in found] == [
        "[[filter]] filter[0].type",
        "[[source]] source[0].type",
        "filter[1]",
    ]
    assert [table.key_path for table in seen] == ["filter[1]"]


@pytest.mark.parametrize("text", ["filter = 3", "[filter]\ntype = 'x'", "filter = [1]"])
def test_what_is_no_array_of_tables_is_shown_to_nobody(tmp_path: Path, text: str) -> None:
    seen: list[PluginTable] = []
    assert len(faults(tmp_path, AGENT + text, filter=seeing(seen, ": is odd"))) == 1
    assert seen == []


# The hub's backplane, of which there is one that can be used.


@pytest.mark.parametrize("table", ["", "[hub.backplane]", '[hub.backplane]\ntype = "memory"'])
def test_the_backplane_that_is_built_in_is_no_plugins_business(tmp_path: Path, table: str) -> None:
    seen: list[PluginTable] = []
    config = good(tmp_path, HUB + table, backplane=seeing(seen, ".type: is odd"))
    assert config.hub is not None
    assert config.hub.backplane.type == "memory"
    assert seen == []


def test_an_installed_backplane_is_refused_with_the_reason_and_its_own_faults(tmp_path: Path) -> None:
    seen: list[PluginTable] = []
    text = HUB + '[hub.backplane]\ntype = "relay"\nurl = "x"\n[log]\nlevel = "loud"'
    reason = "[hub.backplane] type: 'relay' is installed, but no hub of this version uses it; use \"memory\""
    found = faults(tmp_path, text, backplane=seeing(seen))
    assert found[:1] == [reason]
    assert [line.partition(":")[0] for line in found[1:]] == ["[log] level"]
    assert seen == [PluginTable("relay", {"url": "x"}, "hub.backplane")]
    found = faults(tmp_path, text, backplane=seeing(seen, ".url: is odd", ".type_of_it: is missing"))
    assert found[:3] == [reason, "hub.backplane.url: is odd", "hub.backplane.type_of_it: is missing"]


def test_an_unknown_backplane_is_told_by_who_knows_what_is_installed(tmp_path: Path) -> None:
    text = HUB + '[hub.backplane]\ntype = "memoria"\nurl = "x"'
    assert faults(tmp_path, text, backplane=seeing([], ".type: none is installed")) == [
        "hub.backplane.type: none is installed"
    ]
    # where nobody knows, the table is the model's own
    assert faults(tmp_path, text) == [
        "[hub.backplane] type: 'memoria' is not known here; did you mean \"memory\"?",
        "[hub.backplane] url: unknown key; valid here: type",
    ]


@pytest.mark.parametrize(
    "table, place, words",
    [
        ('type = "nats"', "[hub.backplane] type", '"nats" is not available in this version yet'),
        ('type = "nats"\nservers = []', "[hub.backplane] type", '"nats" is not available in this version yet'),
        ("type = 3", "[hub.backplane] type", "expected a string"),
        ('type = "memory"\nservers = []', "[hub.backplane] servers", "not available in this version yet"),
        ('typ = "relay"', "[hub.backplane] typ", 'did you mean "type"?'),
    ],
)
def test_what_this_project_itself_says_of_backplanes_stands(tmp_path: Path, table: str, place: str, words: str) -> None:
    seen: list[PluginTable] = []
    found = faults(tmp_path, HUB + f"[hub.backplane]\n{table}", backplane=seeing(seen, ".type: is odd"))
    assert seen == []
    assert found[0].startswith(f"{place}: ")
    assert words in found[0]


def test_a_secret_in_a_backplanes_options_is_not_shown(tmp_path: Path) -> None:
    found = faults(tmp_path, HUB + '[hub.backplane]\ntype = "relay"\ntoken = "hunter2"', backplane=seeing([]))
    assert "hunter2" not in "\n".join(found)

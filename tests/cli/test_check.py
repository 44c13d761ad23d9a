"""`trio-federation check`: what is good and what is not, told so that people can mend it and programs can read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.cli.conftest import Call
from trio_federation.cli.check import described_lines
from trio_federation.cli.tables import NARROWEST, plain, visible
from trio_federation.credentials import make_token

FOLDER = Path(__file__).resolve().parents[2] / "config"
#: Those of the manifests name files in pods; tests/kubernetes checks them with such files.
GOOD = sorted(
    path
    for path in FOLDER.rglob("*.toml")
    if not path.name.endswith("-capacity.toml") and "kubernetes" not in path.relative_to(FOLDER).parts
)

AGENT = 'cluster_id = "west"\n[federation]\nsecret = "not-to-be-seen"\nhubs = ["127.0.0.1:7443"]\n'
HUB = '[hub]\nbind = "127.0.0.1:7443"\nsecret = "not-to-be-seen"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of the file under test; relative to nothing, so that faults show all of it."""
    return tmp_path / "some.toml"


def test_there_are_examples() -> None:
    assert len(GOOD) >= 5


@pytest.mark.parametrize("path", GOOD, ids=lambda path: str(path.relative_to(FOLDER)))
def test_examples_are_good(path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parent)
    name = path.relative_to(FOLDER.parent)
    ended = call("check", name)
    assert ended.code == 0
    assert f"{name} is good" in ended.output
    runs = "hub" if path.name == "hub.toml" else "agent"
    assert ["runs", runs] in [line.split() for line in ended.output.splitlines()]
    assert [line for line in ended.lines if not line.startswith(f"note: {name}: ")] == []
    # Nothing in it is for terminals only.
    assert ended.output.isascii()
    assert "\x1b" not in ended.output + "".join(ended.lines)


def test_nothing_is_lost_in_a_pipe_and_what_looks_like_markup_is_shown(tmp_path: Path, call: Call) -> None:
    """Rich would take "[fe80::1]" for a style, and ":smile:" for a picture."""
    file = tmp_path / "-".join(["a-long-name"] * 15) / ":smile:.toml"
    file.parent.mkdir()
    hubs = [f"[fe80::{number}]:7443" for number in range(1, 10)]
    file.write_text(f'cluster_id = "west"\n[federation]\ninsecure = true\nsecret = "s"\nhubs = {json.dumps(hubs)}\n')
    ended = call("check", file)
    assert ended.code == 0
    lines = ended.output.splitlines()
    assert lines[0] == f"{file} is good"
    (shown,) = [line for line in lines if line.startswith("federation.hubs ")]
    assert shown.split(maxsplit=1)[1] == ", ".join(hubs)
    (shown,) = [line for line in lines if line.startswith("file ")]
    assert shown.split(maxsplit=1)[1] == str(file)


@given(st.text(max_size=300), st.lists(st.text(max_size=300), max_size=3), st.integers(NARROWEST, 120))
def test_a_terminal_gets_what_fits(path: str, values: list[str], width: int) -> None:
    described = [(f"federation.key_{number}", value) for number, value in enumerate(values)]
    lines = [plain(line) for line in described_lines(path, described, width)]
    assert max(cell_len(line) for line in lines) <= width
    # Folded, and nothing left out.
    told = "".join("".join(lines).split())
    for value in values:
        assert "".join(visible(value).split()) in told


def test_no_secret_is_shown(file: Path, call: Call) -> None:
    file.write_text(AGENT + HUB + '[admin]\ntoken = "not-to-be-seen by anybody"\n')
    ended = call("check", file)
    assert ended.code == 0
    assert ended.output.count("set, not shown") == 3
    assert "not-to-be-seen" not in ended.output + "".join(ended.lines)


def test_a_second_secret_that_is_none_is_noted(file: Path, call: Call) -> None:
    """It may come later, or its path may be misspelt."""
    hub = HUB.replace("not-to-be-seen", "5" * 64)
    file.write_text(f'{hub}accept = ["token"]\nnext_secret_file = "next"\n')
    after = ", so there is no second secret now"
    note = f"note: {file}: [hub] next_secret_file: {str(file.parent / 'next')!r}"
    ended = call("check", file)
    assert (ended.code, ended.lines) == (0, [f"{note} is not there{after}"])
    assert f"{file} is good" in ended.output
    (file.parent / "next").touch()
    assert call("check", file).lines == [f"{note} is empty{after}"]
    (file.parent / "next").write_text("6" * 64)
    assert call("check", file).lines == []


def test_a_token_in_the_place_of_the_second_secrets_path_is_not_told(file: Path, call: Call) -> None:
    token = make_token("5" * 64, "west")
    file.write_text(f'{HUB}next_secret_file = "{token}"\n')
    ended = call("check", file)
    assert "[hub] next_secret_file: " in "".join(ended.lines)
    assert token.rpartition(".")[2] not in "".join(ended.lines)


def test_policies_are_shown_one_by_one(file: Path, call: Call) -> None:
    file.write_text(
        HUB.replace("not-to-be-seen", "5" * 64)
        + 'accept = ["token"]\n[[hub.policy]]\nclusters = ["west", "east"]\nreport = ["team-a/*"]\nmax_idle = 50\n'
        + '[[hub.policy]]\nclusters = ["*"]\nsee = []\n'
    )
    ended = call("check", file)
    assert (ended.code, ended.lines) == (0, [])
    rows = dict(line.split(maxsplit=1) for line in ended.output.splitlines() if line.startswith("hub.policy"))
    assert rows == {
        "hub.policy[0].clusters": "west, east",
        "hub.policy[0].report": "team-a/*",
        "hub.policy[0].see": "*/*",
        "hub.policy[0].max_records": "not set",
        "hub.policy[0].max_idle": "50",
        "hub.policy[1].clusters": "*",
        "hub.policy[1].report": "*/*",
        "hub.policy[1].see": "none",
        "hub.policy[1].max_records": "not set",
        "hub.policy[1].max_idle": "not set",
    }


def test_the_environment_counts(file: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[federation]\nhubs = ['127.0.0.1:7443']\n")
    assert "single-cluster" in call("check", file).output
    monkeypatch.setenv("LOCAL_CLUSTER_ID", "north")
    monkeypatch.setenv("TRIO_FEDERATION_SECRET", "not-to-be-seen")
    ended = call("check", file)
    assert "federated" in ended.output
    assert "north" in ended.output
    assert "not-to-be-seen" not in ended.output
    monkeypatch.setenv("LOCAL_CLUSTER_ID", "North!")
    ended = call("check", file)
    assert (ended.code, ended.output, len(ended.lines)) == (2, "", 1)
    assert ended.lines[0].startswith("environment: LOCAL_CLUSTER_ID: ")


# Known failure C44 as a kind: one wrong key beside good ones, each with words that its line must have.
MISSPELT = [
    (HUB + 'adress = "x"', ["[hub] adress", "bind"]),
    (HUB + 'ttll = "5s"', ["[hub] ttll", 'did you mean "ttl"?']),
    (HUB + "[registy]", ["[registy]", "unknown table", "federation"]),
    (HUB + "[federaton]\ninsecure = true", ["[federaton]", 'did you mean "federation"?']),
    (HUB + 'resync_interval = "5s"', ["[hub] resync_interval", "[federation]"]),
    (HUB + "[hub.limits]\nstreems = 5", ["[hub.limits] streems", 'did you mean "streams"?']),
    (HUB + "[hub.limits]\nstreams = 5.0", ["[hub.limits] streams", "a whole number"]),
    (HUB + '[hub.policy]\nclusters = ["west"]', ["[hub] policy", "[[hub.policy]]"]),
    (HUB + '[[hub.policy]]\nclusters = ["west"]\nmax_idel = 5', ["[hub.policy[0]] max_idel", '"max_idle"?']),
    (HUB + '[[hub.policy]]\nclusters = ["west"]\nsee = ["team-a"]', ["[hub.policy[0]] see[0]", "NAMESPACE/ENV"]),
    (HUB + 'accept = ["certificate"]', ["[hub] accept", "client_ca_file", "cluster_san"]),
    (HUB + '[admin]\nbind = "0.0.0.0:1"', ["[admin] bind", "token_file", "[admin.tls]"]),
    (HUB.replace("not-to-be-seen", "tf1.a.1.b"), ["[hub] secret", "holds a token"]),
    (AGENT.replace("not-to-be-seen", "tf1.a.1.b"), ["[federation] secret", "begins like a token"]),
    (AGENT + 'grace = "5s"', ["[federation] grace", "[hub]"]),
    (AGENT + 'ttl = "5 seconds"', ["[federation] ttl", "ms, s, m, h"]),
    (AGENT + 'resync_interval = "20s"', ["[federation] resync_interval", "ttl"]),
    ('unknown = "x"\n' + AGENT, ["unknown", "cluster_id"]),
    (AGENT + '[[sources]]\ntype = "fixtures"', ["sources", "did you mean [[source]]?"]),
    (AGENT + '[[source]]\ntype = "fixtues"\npath = "x.toml"', ["source[0].type", 'did you mean "fixtures"?']),
    (
        AGENT + '[[source]]\ntype = "kafka"',
        ["source[0].type", "'kafka'", "installed: crd, fixtures, kubernetes, sandboxset, warmpool"],
    ),
    (AGENT + '[[sink]]\ntype = "fixtures"', ["sink[0].type", "[[source]]"]),
    (AGENT + '[[source]]\ntype = "fixtures"\npat = "x.toml"', ["source[0].pat", 'did you mean "path"?']),
    (AGENT + '[[source]]\ntype = "fixtures"\npath = 5', ["source[0].path", "a string"]),
    (AGENT + '[[source]]\ntype = "fixtures"', ["source[0]", "path, scenario and member"]),
    (
        AGENT + '[[source]]\ntype = "fixtures"\n[[source.member]]\nnamespace = "a"',
        ["source[0].member[0].size", "missing"],
    ),
]


@pytest.mark.parametrize("text, words", MISSPELT, ids=[str(words[0]) for _, words in MISSPELT])
def test_one_wrong_key_is_told_and_refused(text: str, words: list[str], file: Path, call: Call) -> None:
    file.write_text(text)
    ended = call("check", file)
    assert (ended.code, ended.output) == (2, "")
    assert len([line for line in ended.lines if all(word in line for word in words)]) == 1
    # What else is there is about this file, too: the last one of the list lacks more than one key.
    assert [line for line in ended.lines if not line.startswith(f"{file}: ")] == []
    assert call("run", file) == ended


def test_every_fault_at_once(file: Path, call: Call) -> None:
    file.write_text(
        'cluster_id = "West"\n[federation]\nhubs = ["hub.example"]\nttl = 30\nkeepalive = "20s"\n'
        '[hub]\nadress = "x"\nsecret = ""\nbind = "127.0.0.1:0"\n[log]\nlevel = "loud"\n[registy]\n'
        '[admin]\nbind = "0.0.0.0:1"\n[[source]]\ntype = "fixtures"\npat = 1\n[[sink]]\ntype = "no-sink"\n'
    )
    ended = call("check", file)
    assert (ended.code, ended.output) == (2, "")
    places = [line.removeprefix(f"{file}: ").split(": ")[0] for line in ended.lines]
    assert places == [
        "cluster_id",
        "[federation] hubs[0]",
        "[federation] ttl",
        "[federation] keepalive",
        "[hub] adress",
        "[hub] secret",
        "[log] level",
        "[registy]",
        "[admin] bind",
        "source[0].pat",
        "sink[0].type",
    ]


def test_every_fault_of_every_plugin_at_once(file: Path, call: Call) -> None:
    file.write_text(
        AGENT
        + '[[source]]\ntype = "fixtures"\npath = "x.toml"\n'
        + '[[source]]\ntype = "fixtures"\npat = 1\nsed = 2\n'
        + '[[source]]\ntype = "none-such"\n'
        + '[[sink]]\ntype = "no-sink"\n'
    )
    ended = call("check", file)
    assert (ended.code, ended.output) == (2, "")
    places = [line.removeprefix(f"{file}: ").split(": ")[0] for line in ended.lines]
    assert places == ["source[1].pat", "source[1].sed", "source[2].type", "sink[0].type"]


@pytest.mark.parametrize(
    "content, words",
    [
        (b"cluster_id = ", ["not valid TOML", "line 1"]),
        (b"cluster_id = '\xff'", ["line 1", "UTF-8"]),
        (b"", ["neither an agent nor a hub"]),
    ],
)
def test_what_is_no_configuration(content: bytes, words: list[str], file: Path, call: Call) -> None:
    file.write_bytes(content)
    ended = call("check", file)
    assert (ended.code, ended.output, len(ended.lines)) == (2, "", 1)
    assert all(word in ended.lines[0] for word in words)


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_file_that_is_not_there(command: str, tmp_path: Path, call: Call) -> None:
    ended = call(command, tmp_path / "none.toml")
    assert (ended.code, ended.output) == (2, "")
    assert ended.lines == [f"{tmp_path / 'none.toml'}: cannot be read: No such file or directory; correct the path"]
    assert call(command, tmp_path).lines == [f"{tmp_path}: cannot be read: Is a directory; correct the path"]

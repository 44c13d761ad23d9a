"""The README and the documents beside it are true: the README's Python works as it stands there, what all of them name
exists, and an operator's questions are answered as docs/operations.md shows. docs/plugins.md, docs/testing.md and the
rest of docs/operations.md are followed elsewhere."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trio

from scripts.check_types import blocks
from tests.cli.conftest import Call, call, logs_as_before  # noqa: F401 - fixtures
from tests.process.running import PATIENCE, Program, free_port, start
from trio_federation.cli import demo
from trio_federation.cli.main import COMMANDS
from trio_federation.plugins import PluginManager

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
OPERATIONS = ROOT / "docs" / "operations.md"
PYTHON = blocks(README.read_text(encoding="utf-8"))
DOCUMENTS = [
    path for pattern in ("*.md", "docs/*.md", "proto/*.md", "plugins/*/*.md") for path in sorted(ROOT.glob(pattern))
]


def by_name(path: Path) -> str:
    """The path of a document from the root, for the names of tests."""
    return path.relative_to(ROOT).as_posix()


# The README's Python.


def execute(block: str) -> dict[str, Any]:
    """Run a block as a module of its own."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, str(README), "exec", dont_inherit=True), names)  # noqa: S102 - our own README
    return names


def test_every_block_is_tested() -> None:
    assert len(PYTHON) == 2


def test_the_source_is_a_plugin() -> None:
    """The manager takes it without a complaint, and offers its type."""
    names = execute(PYTHON[0])
    module = type("Plugin", (), {"capacity_sources": staticmethod(names["capacity_sources"])})
    manager = PluginManager()
    manager.register(module, "readme")
    assert not manager.failures
    assert list(manager.source_types) == ["constant"]


def test_the_test_passes() -> None:
    names = execute(PYTHON[1])
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 1
    for test in tests:
        assert not inspect.signature(test).parameters
        test()


def test_the_configuration_is_good(tmp_path: Path, call: Call) -> None:  # noqa: F811 - the fixture
    """With a secret and a file of capacity where it says that they are."""
    [text] = re.findall(r"^```toml\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    secret = tmp_path / "federation"
    secret.write_text("not much of a secret\n")
    assert text.count("/run/secrets/federation") == 1
    (tmp_path / "agent.toml").write_text(text.replace("/run/secrets/federation", str(secret)))
    (tmp_path / "capacity.toml").write_text("record = []\n")
    ended = call("check", tmp_path / "agent.toml")
    assert (ended.code, ended.lines) == (0, [])


# What the documents name.


def targets(path: Path) -> Iterator[str]:
    """Where the links and pictures of a document lead to."""
    yield from re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """What a link can point to within a document: its headings, in the form that they have in addresses."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in targets(path):
        parts = urlsplit(target)
        if parts.scheme:
            continue
        file = (path.parent / parts.path).resolve() if parts.path else path
        assert file.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert file.exists(), f"{target} leads nowhere"
        if parts.fragment:
            assert parts.fragment in anchors(file), f"{target} names no heading"


def test_the_readme_links_something() -> None:
    assert {"docs/demo.svg", "docs/plugins.md", "docs/operations.md"} <= set(targets(README))


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_paths_exist(path: Path) -> None:
    """Whatever looks like a path that begins in a folder of the repository is one, seen from its root or from the
    document's own folder; but for what stands in fenced blocks, which may be other people's code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    tops = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith(".")} | {".ci"}
    named = set(re.findall(r"(?<![\w./:<-])((?:\.?[\w-]+/)+[\w.-]*\w)", text))
    missing = {
        name
        for name in named
        if name.partition("/")[0] in tops and not (ROOT / name).exists() and not (path.parent / name).exists()
    }
    assert missing == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_commands_exist(path: Path) -> None:
    """The targets of make, and the subcommands of the command, with the options that are given to them."""
    text = path.read_text(encoding="utf-8")
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"(?:^    |`|\$ )make ([a-z-]+)", text, re.M)) <= made
    for name, rest in re.findall(r"(?:^    |`|\$ )(?:\S*/)?trio-federation ([a-z]+)([^`|#\n]*)", text, re.M):
        assert name in COMMANDS, f"trio-federation {name}"
        command = getattr(importlib.import_module(f"trio_federation.cli.{name}"), name)
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known | {"--help"}, f"trio-federation {name}{rest}"


def test_the_readme_calls_all_that_an_operator_needs() -> None:
    """So that the test above cannot pass because it sees nothing."""
    called = set(re.findall(r"^    \.venv/bin/trio-federation ([a-z]+)", README.read_text(encoding="utf-8"), re.M))
    assert called == {"check", "run", "status", "place"}


def test_metrics_that_are_named_exist() -> None:
    """docs/metrics.md has all of them, and is generated."""
    known = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for path in (README, OPERATIONS):
        text = path.read_text(encoding="utf-8").replace("_{idle,running,desired}", "_idle")
        # Not what goes on in another way: modules, and what begins a group of metrics.
        named = set(re.findall(r"\b(?:trio|agentbox)_federation_[a-z_]*[a-z]\b(?![.*])", text))
        assert {name for name in named if f"`{name}`" not in known} == set()
        assert len(named) >= (1 if path == README else 5)


# The picture.


def test_the_picture_is_of_this_demo() -> None:
    """`make picture` makes it anew; here, what the demo always says is looked for."""
    root = ET.parse(ROOT / "docs" / "demo.svg").getroot()  # noqa: S314 - our own
    text = "".join(root.itertext()).replace("\N{NO-BREAK SPACE}", " ")
    headings = [str(column.header) for column in demo.table([]).columns]
    envs = [env for _, env in demo.ENVS]
    for words in [*headings, *envs, *demo.CLUSTERS, *demo._ABOUT.split(), *demo._TITLE.split(), "ran dry of"]:
        assert words in text, words


def test_the_picture_loads_nothing() -> None:
    """No font, no picture, no script and no style from elsewhere; it would not show everywhere, or tell who looks."""
    text = (ROOT / "docs" / "demo.svg").read_text(encoding="utf-8")
    assert re.findall(r"\w+://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"url\(|@import|@font-face|<script|<image|<use|href", text)


# What an operator asks.

#: the ports of the quickstart, which docs/operations.md asks
METRICS, ADMIN, HUB = 9474, 9475, 7443
#: the id of a placement, as JSON tells it
ID = re.compile(r'"id":"([0-9a-f]{16})"')


def questions(text: str) -> list[tuple[str, str]]:
    """The commands of a part of docs/operations.md, each with the answer that is shown."""
    shown = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", text, re.M | re.S)
    assert shown
    return shown


def comparable(text: str) -> list[str]:
    """An answer without what is different each time: numbers, and how wide they make a column."""
    masked = ID.sub('"id":"0"', text)
    masked = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "0", masked)
    return [" ".join(line.split()) for line in masked.splitlines()]


class Quickstart:
    """The hub and the two agents of config/quickstart, on free ports."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        #: what stands here for each id of docs/operations.md
        self._ids: dict[str, str] = {}

    async def begin(self) -> None:
        """Start all three, with the mistake that docs/operations.md tells of."""
        port = free_port()
        for path in (ROOT / "config" / "quickstart").glob("*.toml"):
            text = path.read_text(encoding="utf-8").replace(f":{HUB}", f":{port}")
            (self._folder / path.name).write_text(re.sub(r'(:)94\d\d"', r':0"', text))
        with (self._folder / "west-capacity.toml").open("a") as file:
            file.write('\n[[record]]\nnamespace = "team-a"\nenv_name = "python"\nmember_pool = "new"\nidle = -1\n')
        self.hub, self.west, self.east = [
            await (await start(self._nursery, "run", self._folder / f"{name}.toml")).started()
            for name in ("hub", "west", "east")
        ]
        self._ports = {METRICS: self.west.metrics_port, ADMIN: self.west.admin_port, HUB: port}

    async def answer(self, command: str) -> str:
        """What a command of docs/operations.md says, asked of these processes."""
        for documented in (METRICS, ADMIN):
            command = command.replace(f":{documented}", f":{self._ports[documented]}")
        for documented_id, own in self._ids.items():
            command = command.replace(documented_id, own)
        if command.startswith("trio-federation "):
            asked: Program = await start(self._nursery, *shlex.split(command)[1:])
            await asked.ended()
            said = asked.output + "".join(f"{line}\n" for line in asked.lines)
        else:
            said = await self._curl(command)
        for documented_id, own in self._ids.items():
            said = said.replace(own, documented_id)
        return said.replace(f":{self._ports[HUB]}", f":{HUB}")

    async def _curl(self, command: str) -> str:
        """What curl and grep would say; neither has to be installed."""
        parsed = re.fullmatch(r"curl -s (?:-H '(.*)' -d '(.*)' )?(\S+)(?: \| grep '(.*)')?", command)
        assert parsed, f"{command!r} is of no kind that is known here"
        header, body, url, pattern = parsed.groups()
        headers = dict([header.split(": ")]) if header else {}
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            answer = await (client.post(url, content=body, headers=headers) if body else client.get(url))
        lines = answer.text.splitlines(keepends=True)
        return "".join(line for line in lines if re.search(pattern or "", line))

    async def expect(self, command: str, shown: str) -> None:
        """Ask until the answer is as it is shown."""
        said = ""
        with trio.move_on_after(PATIENCE):
            while comparable(said) != comparable(shown):
                said = await self.answer(command)
                await trio.sleep(0.1)
        assert comparable(said) == comparable(shown), command
        self._ids |= zip(ID.findall(shown), ID.findall(said), strict=True)


@pytest.mark.slow
async def test_an_operators_questions_are_answered_as_shown(nursery: trio.Nursery, tmp_path: Path) -> None:
    # What follows is walked by tests/process/test_walk.py.
    asked = OPERATIONS.read_text(encoding="utf-8").partition("<!-- the way begins -->")[0]
    well, ill = asked.split("<!-- the hub stops -->")
    quickstart = Quickstart(nursery, tmp_path)
    await quickstart.begin()
    for command, shown in questions(well):
        await quickstart.expect(command, shown)
    assert await quickstart.hub.stop() == 0
    for command, shown in questions(ill):
        await quickstart.expect(command, shown)
    nursery.cancel_scope.cancel()

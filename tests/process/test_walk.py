"""From the shared secret to tokens to mutual TLS, as docs/operations.md says it: its files, its commands, its restarts,
in its order, with real processes. All the while each agent is asked what it knows of the other cluster. And the admin
side beyond loopback, in the same way."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest
import trio

from scripts.follow_docs import Command, Step, WriteFile, answers, read_page
from scripts.follow_docs import Program as Script
from tests.process.running import COMMAND, PATIENCE, Program, environment, free_port, start

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "operations.md"
#: what the page says in between, for this test
BEGIN, NO_SHARED_SECRET, NO_TOKENS, END = (
    "<!-- the way begins -->",
    "<!-- the shared secret counts no more -->",
    "<!-- tokens count no more -->",
    "<!-- the end of the way -->",
)
ADMIN_BEGIN, ADMIN_END = "<!-- the admin side -->", "<!-- the end of the admin side -->"
CAPACITY = "west/capacity.toml"
#: Seconds between two looks at what an agent knows, and between two answers to a command that is asked again.
LOOK_INTERVAL = 0.05
ASK_INTERVAL = 0.1

CLUSTERS = ("west", "east")
_ACTION = re.compile(r"\*\*(Start|Stop|Restart) the (?:(hub)|agent of (\w+))\.\*\*")


@dataclass(frozen=True, slots=True)
class Action:
    """A process to start, stop or restart."""

    line: int
    verb: str
    name: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the page at which this test looks closer."""

    line: int
    text: str


#: what one says that finds another at its port, before it ends
_TAKEN = "cannot listen on "


Part: TypeAlias = Step | Action | Mark


def parts(begin: str, end: str) -> Iterator[Part]:
    """All that a chapter of the page says is to be done, in its order."""
    page = PAGE.read_text(encoding="utf-8")
    chapter = page[page.index(begin) : page.index(end)]
    found: list[Part] = [*read_page(chapter)]
    for number, line in enumerate(chapter.splitlines(), start=1):
        if matched := _ACTION.fullmatch(line):
            found.append(Action(number, matched[1], matched[2] or matched[3]))
        elif line in (NO_SHARED_SECRET, NO_TOKENS):
            found.append(Mark(number, line))
    yield from sorted(found, key=lambda part: part.line)


@dataclass
class Look:
    """What was seen, in all this time, of the other cluster from one."""

    #: how often it was there
    seen: int = 0
    #: how often it was not, although it had been, and what the agent knew instead
    missing: list[str] = field(default_factory=list)


class Walk:
    """The processes of the page, in a folder, on ports of this machine that were free when it began."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self._hub_port = free_port()
        self._metrics = {name: free_port() for name in ("hub", *CLUSTERS)}
        self._admin = {name: free_port() for name in ("hub", *CLUSTERS)}
        self.running: dict[str, Program] = {}
        #: all that ever ran, for what it said
        self.all: list[Program] = []
        self.looks = {name: Look() for name in CLUSTERS}

    def config(self, name: str) -> Path:
        """The configuration file of a process."""
        return self._folder / name / ("hub.toml" if name == "hub" else "agent.toml")

    def local(self, text: str, name: str) -> str:
        """A configuration of the page, or one made from it, for this machine: other addresses; and what an agent knows
        is told more often. The steps follow each other within seconds here, so that agents wait the longer before they
        try a hub again, and the less of a record's life may be gone by then."""
        text = text.replace('"hub.example:7443"', f'"127.0.0.1:{self._hub_port}"')
        text = text.replace('"0.0.0.0:7443"', f'"127.0.0.1:{self._hub_port}"')
        text = text.replace('"0.0.0.0:9464"', f'"127.0.0.1:{self._metrics[name]}"')
        text = text.replace("[federation]\n", '[federation]\nreport_interval = "1s"\nresync_interval = "2s"\n')
        # What the certificate of hub.example is for, at an address that is not that.
        text = text.replace("[federation.tls]\n", '[federation.tls]\nserver_name = "hub.example"\n')
        if "[admin]" in text:
            return text.replace('"0.0.0.0:9465"', f'"0.0.0.0:{self._admin[name]}"')
        return f'{text}\n[admin]\nbind = "127.0.0.1:{self._admin[name]}"\n'

    async def start(self, name: str) -> None:
        """Start one, with its file as the page has left it."""
        local = self.config(name).with_name("here.toml")
        local.write_text(self.local(self.config(name).read_text(encoding="utf-8"), name), encoding="utf-8")
        with trio.fail_after(PATIENCE):
            while not await self._runs(name, program := await start(self._nursery, "run", local)):
                assert _TAKEN in "\n".join(program.lines), program.lines
                await trio.sleep(ASK_INTERVAL)

    async def _runs(self, name: str, program: Program) -> bool:
        """Wait until it has started, or has ended instead: while it was away, a port may have gone to somebody else for
        a moment, as that of a connection for instance."""

        async def end() -> None:
            await program.ended()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end)
            await program.started()
            nursery.cancel_scope.cancel()
        if not program.events("started"):
            return False
        self.running[name] = program
        self.all.append(program)
        return True

    async def stop(self, name: str) -> None:
        """Stop one, as a service manager would."""
        assert await self.running.pop(name).stop() == 0

    def write(self, file: WriteFile) -> None:
        """Write a file of the page."""
        path = self._folder / file.name
        path.parent.mkdir(exist_ok=True)
        path.write_text(file.text, encoding="utf-8")

    async def act(self, action: Action) -> None:
        """Do what the page says of a process."""
        if action.verb in ("Stop", "Restart"):
            await self.stop(action.name)
        if action.verb in ("Start", "Restart"):
            await self.start(action.name)

    async def type(self, command: Command) -> None:
        """Type a command. One that asks a process is typed until the answer is as the page shows it."""
        asks = command.text.startswith(("curl ", "trio-federation status "))
        lines: list[str] = []
        with trio.move_on_after(PATIENCE):
            while True:
                code, lines = await self._bash(command.text)
                lines = [re.sub(r"localhost:\d+", "west.example:9465", line) for line in lines]
                if answers(command.answer, lines) and (code == 0) != command.may_fail:
                    return
                if not asks:
                    break
                await trio.sleep(ASK_INTERVAL)
        said = {name: program.lines[-5:] for name, program in self.running.items()}
        raise AssertionError(f"line {command.line}: {command.text}\n{lines}\ninstead of\n{command.answer}\n{said}")

    async def _bash(self, text: str) -> tuple[int, list[str]]:
        """What the shell says to a command, and its exit code."""
        text = re.sub(r"http://(\w+)\.example:9464", lambda it: f"http://127.0.0.1:{self._metrics[it[1]]}", text)
        text = re.sub(r"https://(\w+)\.example:9465", lambda it: f"https://localhost:{self._admin[it[1]]}", text)
        found = environment()
        # As the shell of the page has it from its first command on.
        found |= {"PATH": f"{COMMAND.parent}:{found['PATH']}", "COLUMNS": "100"}
        done = await trio.run_process(
            ["bash", "-o", "pipefail", "-c", f"umask 077\n{text}"],
            cwd=self._folder,
            env=found,
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.returncode, done.stdout.decode().splitlines()

    def stranger(self, folder: Path, credential: str) -> Path:
        """Write what the agent of a third cluster needs, in a folder of its own; the path of its configuration."""
        folder.mkdir()
        (folder / "federation").write_text(credential)
        file = folder / "agent.toml"
        ca_file = self._folder / "west/tls/hubs.crt"
        file.write_text(
            f'cluster_id = "north"\n[federation]\nhubs = ["127.0.0.1:{self._hub_port}"]\nsecret_file = "federation"\n'
            f'[federation.tls]\nca_file = "{ca_file}"\nserver_name = "hub.example"\n'
            '[metrics]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n'
        )
        return file

    async def look(self, name: str) -> None:
        """Ask an agent again and again, while it is ready, whether it knows of the other cluster."""
        (other,) = set(CLUSTERS) - {name}
        look = self.looks[name]
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            while True:
                await trio.sleep(LOOK_INTERVAL)
                # While it is restarted nobody answers, and a new one that is not ready is not asked.
                with contextlib.suppress(httpx.TransportError):
                    at = f"http://127.0.0.1:{self._admin[name]}"
                    if (await client.get(f"{at}/readyz")).status_code != 200:
                        continue
                    known = (await client.get(f"{at}/v1/capacity")).json()
                    if any(record["cluster_id"] == other for record in known["records"]):
                        look.seen += 1
                    elif look.seen:
                        look.missing.append(str(known))


async def refused(nursery: trio.Nursery, walk: Walk, folder: Path, credential: str) -> str:
    """What the agent of a third cluster is told that comes with this credential."""
    agent = await start(nursery, "run", walk.stranger(folder, credential))
    error: str = (await agent.event("hub_failed"))["error"]
    assert agent.events("hub_works") == []
    assert await agent.stop() == 0
    return error


async def let_in(nursery: trio.Nursery, walk: Walk, folder: Path, credential: str) -> None:
    """The agent of a third cluster comes with this credential, and is let in."""
    agent = await start(nursery, "run", walk.stranger(folder, credential))
    await agent.event("hub_works")
    assert await agent.stop() == 0


async def back_to_tokens(nursery: trio.Nursery, walk: Walk, step_5: WriteFile, folder: Path, token: str) -> None:
    """Go back from step 6 to step 5, as the page says, where tokens count, too."""
    line = step_5.line
    await walk.type(Command(line, "cp ca/master hub/secrets/master", ()))
    walk.write(step_5)
    await walk.act(Action(line, "Restart", "hub"))
    async with trio.open_nursery() as both:
        both.start_soon(let_in, nursery, walk, folder, token)
        asked = 'curl -s http://hub.example:9464/readyz | grep -Eo \'"(east|west)":"certificate"\''
        both.start_soon(walk.type, Command(line, asked, ('"east":"certificate"', '"west":"certificate"')))


def capacity() -> str:
    """What west has, as the page's file of fixtures."""
    [text] = [part.text for part in parts(BEGIN, END) if isinstance(part, WriteFile) and part.name == CAPACITY]
    return text


def test_the_page_says_all_that_is_walked() -> None:
    """A walk that found nothing to do would succeed."""
    found = [*parts(BEGIN, END)]
    assert not [part for part in found if isinstance(part, Script)]
    assert {part.name for part in found if isinstance(part, WriteFile)} >= {"hub/hub.toml", "west/agent.toml", CAPACITY}
    assert [part.text for part in found if isinstance(part, Mark)] == [NO_SHARED_SECRET, NO_TOKENS]
    acted = {(part.verb, part.name) for part in found if isinstance(part, Action)}
    assert acted >= {("Restart", "hub"), ("Start", "west"), ("Start", "east"), ("Stop", "west"), ("Stop", "east")}
    shown = "\n".join("\n".join(part.answer) for part in found if isinstance(part, Command))
    for credential in ("shared", "token 1", "token 2", "certificate"):
        assert f'"west":"{credential}"' in shown
        assert f'"east":"{credential}"' in shown


@pytest.mark.slow
async def test_nobody_loses_sight_from_the_shared_secret_to_mutual_tls(nursery: trio.Nursery, tmp_path: Path) -> None:
    walk = Walk(nursery, tmp_path)
    page = parts(BEGIN, END)
    shared = token = ""
    # Of the hub's configuration, in the page's order; the last one is that of step 6.
    hubs: list[WriteFile] = []
    for cluster in CLUSTERS:
        nursery.start_soon(walk.look, cluster)
    for part in page:
        match part:
            case WriteFile():
                walk.write(part)
                hubs += [part] if part.name == "hub/hub.toml" else []
            case Command():
                if part.text.startswith("rm hub/secrets/shared"):
                    shared = (tmp_path / "hub/secrets/shared").read_text()
                elif part.text.startswith("rm hub/secrets/master"):
                    token = await token_for_north(walk, tmp_path)
                await walk.type(part)
            case Action():
                await walk.act(part)
            case Mark(text=text) if text == NO_SHARED_SECRET:
                error = await refused(nursery, walk, tmp_path / "north-shared", shared)
                assert error.startswith("this hub takes no shared secret; ")
            case Mark():
                for name, credential in (("shared", shared), ("token", token)):
                    error = await refused(nursery, walk, tmp_path / f"north-{name}-late", credential)
                    assert "the other side demands a certificate, and got none" in error
    await back_to_tokens(nursery, walk, hubs[-2], tmp_path / "north-back", token)
    for name, look in walk.looks.items():
        assert look.missing == [], name
        assert look.seen > 50, name
    for name in ("west", "east", "hub"):
        await walk.stop(name)
    assert_silent(walk.all, {"shared": shared, "token": token})
    nursery.cancel_scope.cancel()


async def token_for_north(walk: Walk, folder: Path) -> str:
    """A token of a third cluster, which the hub takes as long as it takes any."""
    made = await trio.run_process(
        [str(COMMAND), "token", "north", "--secret-file", str(folder / "hub/secrets/master")], capture_stdout=True
    )
    return made.stdout.decode()


def assert_silent(programs: list[Program], secrets: Mapping[str, str]) -> None:
    """That all of them have logged, and nothing else, and none of these."""
    for program in programs:
        program.assert_only_logged()
        for name, secret in secrets.items():
            assert len(secret) > 40
            assert secret.strip() not in "\n".join(program.lines), name


@pytest.mark.slow
async def test_the_admin_side_beyond_loopback(nursery: trio.Nursery, tmp_path: Path) -> None:
    walk = Walk(nursery, tmp_path)
    (tmp_path / "west").mkdir()
    (tmp_path / CAPACITY).write_text(capacity())
    typed = 0
    for part in parts(ADMIN_BEGIN, ADMIN_END):
        match part:
            case WriteFile():
                walk.write(part)
            case Command(text="echo $?"):
                pass  # looked at with the command before
            case Command():
                typed += part.text.startswith("trio-federation status ")
                await walk.type(part)
            case Action():
                await walk.act(part)
    assert typed == 3
    await walk.stop("west")
    assert_silent(walk.all, {"token": (tmp_path / "west/secrets/admin").read_text()})
    nursery.cancel_scope.cancel()

"""How a process ends that cannot go on: the exit code, and what it says to whoever has to mend it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.process.running import COMMAND, Program, agent_file, hub_file, run_all

#: Runs the command line with something in it replaced first, as `python -c`; the arguments are the command's own.
_DRIVER = """
import sys
import trio
from trio_federation.cli import main
{patch}
main()
"""


def with_patch(patch: str, *arguments: str | Path) -> list[str | Path]:
    """The command `trio-federation` with these arguments, and with a patch in its code."""
    return [sys.executable, "-c", _DRIVER.format(patch=patch), *arguments]


async def run_patched(patch: str, *arguments: str | Path) -> Program:
    """Run that to its end."""
    return (await run_all(patched=with_patch(patch, *arguments)))["patched"]


async def test_a_port_that_is_taken_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        hub = hub_file(tmp_path / "hub.toml", port=port, secret="s")
        files = {"hub": hub}
        for section in ("metrics", "admin"):
            agent = agent_file(tmp_path / f"{section}.toml", "west", {"west": 1}, hub_port=port, secret="s")
            free = f'[{section}]\nbind = "127.0.0.1:0"'
            assert free in agent.read_text()
            agent.write_text(agent.read_text().replace(free, f'[{section}]\nbind = "127.0.0.1:{port}"'))
            files[section] = agent
        commands: dict[str, list[str | Path]] = {name: [COMMAND, "run", file] for name, file in files.items()}
        ended = await run_all(**commands)
    for name, program in ended.items():
        assert program.process.returncode == 1
        assert program.output == ""
        said = [line for line in program.lines if not line.startswith("{")]
        assert said == [
            f"{name}: cannot listen on 127.0.0.1:{port}: address already in use; choose another [{name}] bind"
        ]
        assert program.events("started") == []


async def test_a_bug_in_a_task_ends_the_process_with_its_traceback(tmp_path: Path) -> None:
    patch = """
from trio_federation.agent import Agent
async def broken(self):
    raise KeyError("a bug of ours")
Agent._feed_registry = broken
"""
    config = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=1, secret="s")
    ended = await run_patched(patch, "run", config)
    assert ended.process.returncode == 1
    said = "\n".join(ended.lines)
    assert "Traceback" in said
    assert "in broken" in said
    assert "KeyError: 'a bug of ours'" in said
    assert ended.output == ""


@pytest.mark.parametrize("first, second", [("Unavailable", "TypeError"), ("TypeError", "Unavailable")])
async def test_a_bug_beside_a_lost_connection_is_not_taken_for_one(tmp_path: Path, first: str, second: str) -> None:
    """Known failure C24 (3): both come in one tick, in one nursery, and both are told."""
    patch = f"""
from trio_federation.errors import Unavailable
from trio_federation.link import HubLink
from trio_federation.rpc import tcp_dialer
import trio_federation.process

async def fail(error):
    raise error

async def report(self, connection):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail, {first}("came together"))
        nursery.start_soon(fail, {second}("came together"))
HubLink._report = report
HubLink._watch = lambda self, connection: trio.sleep_forever()
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=listener.getsockname()[1], secret="s")
        ended = await run_patched(patch, "run", config)
    assert ended.process.returncode == 1
    said = "\n".join(ended.lines)
    assert "errors.Unavailable: came together" in said
    assert "TypeError: came together" in said
    assert said.count("in fail\n") == 2


async def test_lost_connections_alone_end_nothing(tmp_path: Path) -> None:
    """C24 (1) and (2): one alone, and two in one tick, are tried again; the patch ends the process at the third."""
    patch = """
from trio_federation.errors import Unavailable
from trio_federation.link import HubLink

tries = []
async def fail():
    raise Unavailable("gone", peer="hub")

async def report(self, connection):
    tries.append(1)
    if len(tries) == 1:
        await fail()
    if len(tries) == 2:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            nursery.start_soon(fail)
    raise ZeroDivisionError("third try")
HubLink._report = report
HubLink._watch = lambda self, connection: trio.sleep_forever()
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=listener.getsockname()[1], secret="s")
        ended = await run_patched(patch, "run", config)
    assert ended.process.returncode == 1
    assert [event["error"] for event in ended.events("hub_failed", call="report")] == ["gone"] * 2
    assert "ZeroDivisionError: third try" in "\n".join(ended.lines)


async def test_nothing_is_opened_for_a_file_with_faults(tmp_path: Path) -> None:
    """Python's own audit events tell every bind and connect; the good file shows that they would."""
    patch = """
def audit(event, arguments):
    if event in ("socket.bind", "socket.connect") and "127.0.0.1" in str(arguments):
        sys.stderr.write(f"opened: {event} {arguments[1]}\\n")
sys.addaudithook(audit)
"""
    good = agent_file(tmp_path / "good.toml", "west", {"west": 1}, hub_port=1, secret="s")
    bad = {
        "key": good.read_text() + "[hub]\nadress = 1\n",
        "option": good.read_text().replace("path =", "pth ="),
    }
    for name, text in bad.items():
        (tmp_path / f"{name}.toml").write_text(text)
    # As for the good file: it ends at the first sign that a hub is not there.
    end = "import trio_federation.link as link\nlink._Trouble.delay = lambda *_: 1 / 0\n"
    ended = await run_all(
        good=with_patch(patch + end, "run", good),
        **{name: with_patch(patch, "run", tmp_path / f"{name}.toml") for name in bad},
    )
    opened = {name: [line for line in each.lines if line.startswith("opened: ")] for name, each in ended.items()}
    assert len(opened.pop("good")) >= 2
    assert opened == {name: [] for name in bad}
    for name in bad:
        assert ended[name].process.returncode == 2
        assert ended[name].output == ""
        assert [line for line in ended[name].lines if not line.startswith(f"{tmp_path / name}.toml: ")] == []
    (fault,) = ended["option"].lines
    assert 'source[0].pth: unknown key; did you mean "path"?' in fault

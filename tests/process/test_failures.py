"""How a process ends that cannot go on: the exit code, and what it says to whoever has to mend it."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.process.running import COMMAND, Program, agent_file, hub_file, run_all, start, start_any

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


#: For a patch: `fail` raises one error, or several in one tick, each in a task of a nursery; a tuple is one in that.
_TOGETHER = """
from trio_federation.errors import Unavailable
from trio_federation.link import HubLink
from trio_federation.hub import Hub

async def fail(*errors):
    if len(errors) == 1 and not isinstance(errors[0], tuple):
        raise errors[0]
    async with trio.open_nursery() as nursery:
        for error in errors:
            nursery.start_soon(fail, *(error if isinstance(error, tuple) else (error,)))
"""


@asynccontextmanager
async def speaking() -> AsyncIterator[int]:
    """The port of something that begins to speak as a hub does, which is when agents open calls, and says no more."""

    async def greet(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(bytes.fromhex("000000040000000000"))
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, greet, [listener])
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def test_a_bug_beside_a_lost_connection_is_not_taken_for_one(tmp_path: Path) -> None:
    """Known failure C24 (3): both come in one tick, in one nursery, or in nurseries in it, and both are told."""
    shapes = {
        "first": 'Unavailable("came together"), TypeError("came together")',
        "second": 'TypeError("came together"), Unavailable("came together")',
        "deep": 'Unavailable("came together"), (Unavailable("deep"), (TypeError("came together"), Unavailable("x")))',
    }
    commands: dict[str, list[str | Path]] = {}
    async with speaking() as port:
        for name, errors in shapes.items():
            patch = f"""{_TOGETHER}
async def report(self, connection):
    await fail({errors})
HubLink._report = report
HubLink._watch = lambda self, connection: trio.sleep_forever()
"""
            config = agent_file(tmp_path / f"{name}.toml", name, {name: 1}, hub_port=port, secret="s")
            commands[name] = with_patch(patch, "run", config)
        ended = await run_all(**commands)
    for name, each in ended.items():
        assert each.process.returncode == 1, name
        said = "\n".join(each.lines)
        assert "errors.Unavailable: came together" in said
        assert "TypeError: came together" in said
        assert said.count("in fail\n") >= 2


async def test_lost_connections_alone_end_nothing(tmp_path: Path) -> None:
    """C24 (1) and (2): one alone, two in one tick, and groups in groups are tried again, of either call; the patch ends
    the process after that."""
    patch = f"""{_TOGETHER}
def gone():
    return Unavailable("gone", peer="hub")

shapes = [[gone()], [gone(), gone()], [(gone(), gone())], [gone(), (gone(), (gone(), gone()))]]
async def use(tries):
    if not tries:
        await trio.sleep_forever()
    await fail(*tries.pop(0))

reports, watches = list(shapes), list(shapes)
async def report(self, connection):
    if not reports and not watches:
        raise ZeroDivisionError("all were tried")
    await use(reports + [[gone()]] * 1000 if not reports else reports)
HubLink._report = report
HubLink._watch = lambda self, connection: use(watches)
from trio_federation.link import _Trouble
delay = _Trouble.delay
_Trouble.delay = lambda *arguments: min(delay(*arguments), 0.1)
"""
    async with speaking() as port:
        config = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=port, secret="s")
        ended = await run_patched(patch, "run", config)
    assert ended.process.returncode == 1
    for call in ("report", "watch"):
        errors = [event["error"] for event in ended.events("hub_failed", call=call)]
        assert len(errors) >= 4
        assert set(errors) == {"gone"}
    assert ended.events("hub_failed", call="connection") == []
    assert "ZeroDivisionError: all were tried" in "\n".join(ended.lines)


async def test_both_calls_that_fail_in_one_tick_with_their_connection_end_nothing(tmp_path: Path) -> None:
    """C24 (2), where the nursery that gets both is the connection's own."""
    patch = f"""{_TOGETHER}
tries = []
both = trio.Event()
async def use(self, connection):
    tries.append(connection)
    if len(tries) > 6:
        raise ZeroDivisionError("all were tried")
    if len(tries) % 2:
        await both.wait()
    else:
        both.set()
        globals()["both"] = trio.Event()
    connection.transport.abort("cut")
    raise Unavailable("gone", peer="hub")
HubLink._report = HubLink._watch = use
"""
    async with speaking() as port:
        config = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=port, secret="s")
        ended = await run_patched(patch, "run", config)
    assert ended.process.returncode == 1
    assert len(ended.events("hub_failed", call="connection")) == 3
    assert "ZeroDivisionError: all were tried" in "\n".join(ended.lines)


async def test_errors_together_in_a_hubs_call_end_that_call_and_are_told(nursery: trio.Nursery, tmp_path: Path) -> None:
    """C24 on the other side: the hub goes on, and so does the agent, which tries again."""
    patch = f"""{_TOGETHER}
rest = Hub._report
shapes = [[Unavailable("came together"), (TypeError("came together"), Unavailable("deep"))], [Unavailable("alone")]]
async def report(self, call):
    if shapes:
        await fail(*shapes.pop(0))
    await rest(self, call)
Hub._report = report
"""
    hub = await start_any(nursery, *with_patch(patch, "run", hub_file(tmp_path / "hub.toml", secret="s")))
    await hub.started()
    config = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=hub.hub_port, secret="s")
    west = await start(nursery, "run", config)
    await west.event("hub_failed", call="report", number=2)
    await hub.event("reporter_came", cluster="west")
    told = [line for line in hub.lines if "TypeError: came together" in line]
    assert len(told) == 1
    assert await west.stop() == 0
    assert await hub.stop() == 0


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

"""Real processes of `trio-federation`, for tests: started with a configuration, read line by line, sent signals. Time
and sockets are real here; nobody sleeps to wait for another, everybody waits for a line or a number."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import trio
from prometheus_client.parser import text_string_to_metric_families

#: the command as it is installed beside this interpreter
COMMAND = Path(sys.executable).with_name("trio-federation")
#: Seconds after which a test gives up waiting. Far more than anything takes, so that a busy machine fails nothing.
PATIENCE = 60.0
#: Seconds between two scrapes of one that waits for a number.
SCRAPE_INTERVAL = 0.05

#: what the environment of a test run may hold that would change what is tested
UNWANTED = (
    "LOCAL_CLUSTER_ID",
    "TRIO_FEDERATION_SECRET",
    "COLUMNS",
    "LINES",
    "FORCE_COLOR",
    "NO_COLOR",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "PYTHONWARNINGS",
)


def environment() -> dict[str, str]:
    """The environment of a process under test. Nothing that it leaves behind goes unsaid: unclosed files and streams
    warn."""
    kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    return kept | {"PYTHONWARNINGS": "default::ResourceWarning,default::RuntimeWarning"}


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


class Program:
    """One process: what it has said so far, and what can be done to it."""

    def __init__(self, process: trio.Process, name: str) -> None:
        self.process = process
        self.name = name
        #: what it has written to standard error, a line each
        self.lines: list[str] = []
        #: what it has written to standard output
        self.output = ""
        self._more = trio.Event()
        self._ended = trio.Event()

    async def run(self) -> None:
        """Take in what it says, until it has ended; kill it when cancelled before."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_lines)
                nursery.start_soon(self._read_output)
            await self.process.wait()
            self._ended.set()
        finally:
            if self.process.returncode is None:
                self.process.kill()  # also ends one that is stopped
                with trio.CancelScope(shield=True):
                    await self.process.wait()

    async def _read_lines(self) -> None:
        assert self.process.stderr is not None
        rest = b""
        async for chunk in self.process.stderr:
            *lines, rest = (rest + chunk).split(b"\n")
            self.lines += [line.decode() for line in lines]
            self._wake()
        self.lines += [rest.decode()] if rest else []
        self._wake()

    async def _read_output(self) -> None:
        assert self.process.stdout is not None
        data = b""
        async for chunk in self.process.stdout:
            data += chunk
            self.output = data.decode()
            self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = trio.Event()

    def events(self, name: str, **fields: object) -> list[dict[str, Any]]:
        """The log's events of a name that have these fields, in their order."""
        logged = (json.loads(line) for line in self.lines if line.startswith("{"))
        return [
            event for event in logged if event["event"] == name and all(event.get(k) == v for k, v in fields.items())
        ]

    async def until(self, said: Callable[[], bool]) -> None:
        """Wait until `said`, which looks at what it has written, is true."""
        with trio.move_on_after(PATIENCE):
            while not said():
                await self._more.wait()
            return
        raise AssertionError(f"{self.name} has not said it within {PATIENCE:g} s, but:\n" + "\n".join(self.lines))

    async def event(self, name: str, *, number: int = 1, **fields: object) -> dict[str, Any]:
        """Wait for the log's first event of a name with these fields, or the second, and so on."""
        await self.until(lambda: len(self.events(name, **fields)) >= number)
        return self.events(name, **fields)[number - 1]

    async def started(self) -> Program:
        """Wait until it runs; itself."""
        await self.event("started")
        return self

    @property
    def metrics_port(self) -> int:
        """Where it serves its metrics. Only once it has started."""
        (started,) = self.events("started")
        port: int = started["metrics_port"]
        return port

    @property
    def admin_port(self) -> int:
        """Where it serves its admin interface. Only once it has started."""
        (started,) = self.events("started")
        port: int = started["admin_port"]
        return port

    @property
    def hub_port(self) -> int:
        """Where its hub listens. Only once it has started."""
        (started,) = self.events("started")
        (port,) = started["hub_ports"]
        assert isinstance(port, int)
        return port

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait until it has ended, and said everything; its exit code, or minus the signal that has killed it."""
        with trio.move_on_after(PATIENCE):
            await self._ended.wait()
            assert self.process.returncode is not None
            return self.process.returncode
        raise AssertionError(f"{self.name} has not ended within {PATIENCE:g} s, but said:\n" + "\n".join(self.lines))

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send it a signal and wait for its end; its exit code."""
        self.send(number)
        return await self.ended()

    def assert_only_logged(self) -> None:
        """That it has said nothing but lines of its log: no traceback, no warning of Python's, no stray print."""
        assert self.output == ""
        assert [line for line in self.lines if not line.startswith("{")] == []
        assert [line for line in self.lines if "Traceback" in line] == []


async def start(nursery: trio.Nursery, *arguments: str | Path, **variables: str) -> Program:
    """Start `trio-federation` with these arguments, and environment variables besides; killed when the nursery is
    cancelled, unless it has ended then."""
    return await start_any(nursery, COMMAND, *arguments, **variables)


async def start_any(nursery: trio.Nursery, *command: str | Path, **variables: str) -> Program:
    """Start any command; otherwise like `start`."""
    process = await trio.lowlevel.open_process(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment() | variables,
    )
    started = Program(process, " ".join(str(part)[-40:] for part in command[1:]))
    nursery.start_soon(started.run)
    return started


async def run_all(**commands: Sequence[str | Path]) -> dict[str, Program]:
    """Run commands side by side to their ends; the finished ones, by the same names."""
    async with trio.open_nursery() as nursery:
        running = {name: await start_any(nursery, *command) for name, command in commands.items()}
        for each in running.values():
            await each.ended()
    return running


# What it serves.

#: (cluster, namespace, env, group) -> idle
Idle = dict[tuple[str, str, str, str], float]


def idle_by_env(exposition: str) -> Idle:
    """The env_idle gauges of an exposition text, as Prometheus' own parser reads them."""
    return {
        (labels["cluster"], labels["namespace"], labels["env"], labels["group"]): value
        for family in text_string_to_metric_families(exposition)
        for name, labels, value, *_ in family.samples
        if name == "agentbox_federation_env_idle"
    }


async def scrape(port: int) -> str:
    """What `/metrics` says now."""
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE)
    assert answer.status_code == 200
    return answer.text


async def wait_idle(port: int, wanted: Callable[[Idle], bool], within: float = PATIENCE) -> Idle:
    """Scrape until `wanted` is true of the idle gauges; what they were then, and an AssertionError after `within`
    seconds."""
    found: Idle = {}
    async with httpx.AsyncClient(trust_env=False) as client:
        with trio.move_on_after(within):
            while True:
                found = idle_by_env((await client.get(f"http://127.0.0.1:{port}/metrics", timeout=within)).text)
                if wanted(found):
                    return found
                await trio.sleep(SCRAPE_INTERVAL)
    raise AssertionError(f"port {port} does not say so within {within:g} s, but: {found}")


# What it is configured with.


def records(idle: Mapping[str, int]) -> str:
    """A fixtures file: what is idle in the pools of team-a/python, by name; all are in the group "cpu"."""
    return "\n".join(
        f'[[record]]\nnamespace = "team-a"\nenv_name = "python"\nmember_pool = "{pool}"\nscaling_group = "cpu"\n'
        f"idle = {count}\ndesired = {count}\n"
        for pool, count in idle.items()
    )


def hub_file(path: Path, *, port: int = 0, secret: str, more: str = "", level: str = "debug") -> Path:
    """Write the configuration of a hub; its path."""
    path.write_text(
        f'[hub]\nbind = "127.0.0.1:{port}"\nsecret = "{secret}"\n{more}\n'
        f'[metrics]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n[log]\nlevel = "{level}"\nformat = "json"\n'
    )
    return path


def agent_file(
    path: Path,
    cluster_id: str,
    idle: Mapping[str, int],
    *,
    hub_port: int,
    secret: str | None,
    more: str = "",
    level: str = "debug",
) -> Path:
    """Write the configuration of an agent, and beside it the file of its `records`, `<cluster>-capacity.toml`. `more`
    stands in [federation]. Its path."""
    (path.parent / f"{cluster_id}-capacity.toml").write_text(records(idle))
    path.write_text(
        f'cluster_id = "{cluster_id}"\n'
        f'[federation]\nhubs = ["127.0.0.1:{hub_port}"]\nreport_interval = "200ms"\n'
        + (f'secret = "{secret}"\n' if secret is not None else "")
        + f'{more}\n[[source]]\ntype = "fixtures"\npath = "{cluster_id}-capacity.toml"\n'
        f'[metrics]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n[log]\nlevel = "{level}"\nformat = "json"\n'
    )
    return path

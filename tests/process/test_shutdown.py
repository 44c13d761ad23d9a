"""One signal ends `trio-federation run` within 5 s, exit code 0, whatever is the matter at that moment: with its hubs,
an API server, a plugin, its log, or its own start. Where a hub listens, it hears goodbye. What a process does that
never comes to its end by itself is in test_last_resort."""

from __future__ import annotations

import array
import fcntl
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio

from tests.process.plugin_packages import install
from tests.process.running import (
    COMMAND,
    PATIENCE,
    SCRAPE_INTERVAL,
    Program,
    agent_file,
    environment,
    free_port,
    hub_file,
    records,
    scrape,
    start,
    wait_idle,
)
from trio_federation.capacity import Capacity
from trio_federation.errors import Unavailable
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.rpc import HubConnection, open_bridge
from trio_federation.wire import report_messages

#: any shared secret
SECRET = "last-words-2f71"
#: Seconds from the signal to the end at the most: 5, and as much again for a machine that is busy with much else. What
#: ends by its last resort takes less, and what does not end takes for ever.
LATEST = 10.0
#: agents in trouble at a time, so that each gets its share of a small machine
AT_A_TIME = 4

#: HTTP/2: the settings that a server begins with, empty
SETTINGS = bytes.fromhex("000000040000000000")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS


# What is in the way. Each gives what the agent is configured with, and a check that it is in trouble.


async def accept_only(_: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def greet_only(stream: trio.SocketStream) -> None:
    """A hub that speaks HTTP/2, and then takes in nothing."""
    await stream.send_all(SETTINGS)
    await trio.sleep_forever()


async def hang_up(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await stream.aclose()


class Peer:
    """A listener that does one thing to each connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connections: list[trio.SocketStream] = []
        self._more = trio.Event()

    async def connected(self) -> None:
        """Wait until somebody has connected."""
        while not self.connections:
            await self._more.wait()

    async def has_filled(self, size: int) -> None:
        """Wait until so many bytes lie unread in one connection."""
        unread = array.array("i", [0])
        while True:
            for each in self.connections:
                fcntl.ioctl(each.socket.fileno(), termios.FIONREAD, unread)
                if unread[0] >= size:
                    return
            await trio.sleep(0.02)


async def open_peer(nursery: trio.Nursery, behave: Callable[[trio.SocketStream], Awaitable[None]]) -> Peer:
    """Listen on a free port."""

    async def serve(stream: trio.SocketStream) -> None:
        peer.connections.append(stream)
        peer._more.set()
        try:
            await behave(stream)
        except trio.BrokenResourceError:
            pass
        finally:
            await trio.aclose_forcefully(stream)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    peer = Peer(listener.socket.getsockname()[1])
    nursery.start_soon(trio.serve_listeners, serve, [listener])
    return peer


def black_hole(stack: ExitStack) -> int:
    """A port where connecting gets no answer: its queue is full, and the kernel drops what comes."""
    listener = stack.enter_context(closing(socket.socket()))
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    port: int = listener.getsockname()[1]
    for _ in range(3):
        filling = stack.enter_context(closing(socket.socket()))
        filling.setblocking(False)
        filling.connect_ex(("127.0.0.1", port))
    return port


async def api_server(stream: trio.SocketStream, *, answers: bool) -> None:
    """An API server that never answers; or one that lists nothing, and begins to answer a watch."""
    rest = b""
    while True:
        while b"\r\n\r\n" not in rest:
            part = await stream.receive_some()
            if not part:
                return
            rest += part
        head, _, rest = rest.partition(b"\r\n\r\n")
        if not answers:
            await trio.sleep_forever()
        if b"watch=" in head.split(b"\r\n")[0]:
            await stream.send_all(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            await trio.sleep_forever()
        body = json.dumps(
            {
                "apiVersion": "agents.navix.sh/v1alpha1",
                "kind": "SandboxEnvList",
                "metadata": {"resourceVersion": "1"},
                "items": [],
            }
        ).encode()
        await stream.send_all(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )


#: What a plugin does that is asked for something, or told something, the second time.
STUCK = """
import ctypes, threading

class Stuck:
    def __init__(self, options, context):
        self.context, self.calls = context, 0

    async def collect(self):
        self.calls += 1
        if self.calls > 1:
            print_to_log("stuck", self.context.cluster_id)
            await self.stick()
        return [Capacity(self.context.cluster_id, "team-a", "stuck", "stuck", idle=1)]

    async def update(self, snapshot):
        print_to_log("stuck", self.context.cluster_id)
        await self.stick()

def print_to_log(event, cluster):
    import structlog
    structlog.get_logger("trio_federation").info(event, cluster=cluster)

async def sleeps(self):
    time.sleep(60)

async def spins(self):
    while True:
        pass

async def holds(self):
    while True:  # the interpreter itself, in pieces
        ctypes.PyDLL(None).usleep(300_000)

async def shields(self):
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()

async def waits(self):
    await trio.sleep_forever()

async def clings(self):
    while True:
        try:
            await trio.sleep_forever()
        except BaseException:
            pass

async def keeps_thread(self):
    await trio.to_thread.run_sync(time.sleep, 60)

WAYS = [sleeps, spins, holds, shields, waits, clings, keeps_thread]

@hookimpl
def capacity_sources():
    return [
        SourceType(f"source-{way.__name__.replace('_', '-')}", Options,
                   type(way.__name__, (Stuck, CapacitySource), {"stick": way}))
        for way in WAYS
    ]

@hookimpl
def capacity_sinks():
    return [
        SinkType(f"sink-{way.__name__.replace('_', '-')}", Options,
                 type(way.__name__, (Stuck, CapacitySink), {"stick": way}))
        for way in WAYS
    ]
"""


class Scene:
    """What the cases share: a hub that works, and a folder."""

    def __init__(self, nursery: trio.Nursery, folder: Path, hub: Program, stack: ExitStack) -> None:
        self.nursery = nursery
        self.folder = folder
        self.hub = hub
        self.stack = stack

    async def run(self, name: str, *ports: int, pools: int = 1, tables: str = "", tls: bool = False) -> Program:
        """Start an agent that is called `name`, of the hub that works and those at `ports`, and wait until the former
        takes its reports. With `tls` it has only those."""
        hubs = [f"127.0.0.1:{port}" for port in ([] if tls else [self.hub.hub_port]) + list(ports)]
        if not tables.startswith("[[source]]"):
            (self.folder / f"{name}-pools.toml").write_text(records({f"pool-{number}": 1 for number in range(pools)}))
            tables = f'[[source]]\ntype = "fixtures"\npath = "{name}-pools.toml"\n{tables}'
        file = self.folder / f"{name}.toml"
        file.write_text(
            f'cluster_id = "{name}"\n[federation]\nhubs = {json.dumps(hubs)}\nreport_interval = "200ms"\n'
            f'secret = "{SECRET}"\n{"[federation.tls]" if tls else ""}\n{tables}\n'
            '[metrics]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n[log]\nlevel = "debug"\nformat = "json"\n'
        )
        agent = await start(self.nursery, "run", file, PYTHONPATH=str(self.folder))
        await agent.started()
        if not tls:
            await agent.event("hub_works", call="report", hub=hubs[0])
        return agent

    # The cases.

    async def every_hub_in_another_trouble(self, name: str) -> Program:
        """Refused, black-holed, silent, deaf, and resetting."""
        peers = [await open_peer(self.nursery, each) for each in (accept_only, greet_only, hang_up)]
        agent = await self.run(name, free_port(), black_hole(self.stack), *(each.port for each in peers))
        for each in peers:
            await each.connected()
        return agent

    async def hub_takes_nothing(self, name: str) -> Program:
        """And a large report waits for it."""
        peer = await open_peer(self.nursery, greet_only)
        agent = await self.run(name, peer.port, pools=3000)
        await peer.has_filled(60_000)
        return agent

    async def tls_is_never_answered(self, name: str) -> Program:
        peer = await open_peer(self.nursery, accept_only)
        agent = await self.run(name, peer.port, tls=True)
        await peer.has_filled(100)
        return agent

    async def api_server_hangs(self, name: str, *, answers: bool) -> Program:
        peer = await open_peer(self.nursery, partial(api_server, answers=answers))
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{peer.port}"}}],
            "users": [{"name": "x", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        }
        (self.folder / f"{name}.kubeconfig").write_text(json.dumps(kubeconfig))
        table = f'\ntype = "kubernetes{{}}"\nkubeconfig = "{name}.kubeconfig"\n'
        both = f"[[source]]{table.format('')}[[sink]]{table.format('-status')}"
        agent = await self.run(name, tables=both)
        await peer.connected()
        if answers:
            await agent.until(lambda: any("kubernetes" in line for line in agent.lines))
        return agent

    async def plugin_is_stuck(self, name: str, *, kind: str, way: str) -> Program:
        agent = await self.run(name, tables=f'\n[[{kind}]]\ntype = "{kind}-{way}"\n')
        await agent.event("stuck")
        return agent


def cases(scene: Scene) -> dict[str, Callable[[str], Awaitable[Program]]]:
    """What is tried, by the name of the cluster that it befalls."""

    def stuck(kind: str, way: str) -> dict[str, Callable[[str], Awaitable[Program]]]:
        return {f"{kind}-{way}": partial(scene.plugin_is_stuck, kind=kind, way=way)}

    # Those that take all of a processor are not neighbours.
    return {
        **stuck("source", "spins"),
        "hubs": scene.every_hub_in_another_trouble,
        **stuck("source", "sleeps"),
        **stuck("sink", "waits"),
        **stuck("source", "holds"),
        "deaf": scene.hub_takes_nothing,
        "tls": scene.tls_is_never_answered,
        "api-silent": partial(scene.api_server_hangs, answers=False),
        "api-stalls": partial(scene.api_server_hangs, answers=True),
        **stuck("source", "shields"),
        **stuck("source", "clings"),
        **stuck("source", "keeps-thread"),
        **stuck("sink", "sleeps"),
    }


async def time_of_end(program: Program, number: signal.Signals) -> tuple[int, float]:
    """Send a signal; the exit code, and the seconds that it took."""
    began = trio.current_time()
    code = await program.stop(number)
    return code, trio.current_time() - began


@pytest.mark.slow
async def test_one_signal_ends_an_agent_in_any_trouble(nursery: trio.Nursery, tmp_path: Path) -> None:
    """Cases run side by side. Where its cluster could be told, the hub hears goodbye, also from an agent whose plugin
    does not let go."""
    install(tmp_path, stuck=STUCK)
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET))
    await hub.started()
    ended: dict[str, tuple[int, float]] = {}
    agents: dict[str, Program] = {}
    at_a_time = trio.CapacityLimiter(AT_A_TIME)

    async def try_one(name: str, case: Callable[[str], Awaitable[Program]], number: signal.Signals) -> None:
        async with at_a_time:
            agents[name] = await case(name)
            ended[name] = await time_of_end(agents[name], number)

    with ExitStack() as stack:
        everything = cases(Scene(nursery, tmp_path, hub, stack))
        async with trio.open_nursery() as trying:
            for position, (name, case) in enumerate(everything.items()):
                number = (signal.SIGTERM, signal.SIGINT)[position % 2]
                trying.start_soon(try_one, name, case, number, name=name)
        assert {name: code for name, (code, _) in ended.items()} == dict.fromkeys(everything, 0)
        assert {name: took for name, (_, took) in ended.items() if took >= LATEST} == {}
        for name, agent in agents.items():
            assert len(agent.events("stopping")) == 1
            assert [line for line in agent.lines if "Traceback" in line] == [], name
            if name != "tls":
                assert (await hub.event("reporter_left", cluster=name))["said_goodbye"], name
    assert await hub.stop() == 0


# A hub.


def credentials(cluster: str) -> list[tuple[str, str]]:
    """What a call of a cluster says of itself."""
    return [
        ("authorization", f"Bearer {SECRET}"),
        ("x-federation-cluster", cluster),
        ("x-federation-instance", "0123456789abcdef"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_signal_ends_a_hub_that_nobody_lets_alone(
    nursery: trio.Nursery, tmp_path: Path, number: signal.Signals
) -> None:
    """With watchers that take nothing, a reporter that never stops, connections that say nothing, and one that floods
    it with pings."""
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET, level="info"))
    await hub.started()
    flooded = trio.Event()

    async def flood() -> None:
        """Pings that nobody reads the answers of, as many as the hub takes, on as many connections as it ends."""
        while True:
            try:
                async with await trio.open_tcp_stream("127.0.0.1", hub.hub_port) as stream:
                    await stream.send_all(PREFACE)
                    while True:
                        await stream.send_all((bytes.fromhex("000008060000000000") + bytes(8)) * 64)
                        flooded.set()
            except OSError:
                return
            except trio.BrokenResourceError:
                continue

    async def say_nothing() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", hub.hub_port):
            await trio.sleep_forever()

    async def report(cluster: str) -> None:
        with suppress(Unavailable):
            async with (await connect(cluster)).report() as call:
                for count in range(1_000_000):
                    many = [Capacity(cluster, "team-a", f"env-{env}", "p", idle=count) for env in range(500)]
                    for message in report_messages(many, 0.0):
                        await call.send(message)

    async def connect(cluster: str) -> HubConnection:
        stream = await trio.open_tcp_stream("127.0.0.1", hub.hub_port)
        return await HubConnection.open(peers, stream, peer="hub", metadata=lambda: credentials(cluster))

    async def watch(cluster: str) -> None:
        with suppress(Unavailable):
            async with (await connect(cluster)).watch(WatchFederationRequest()):
                await trio.sleep_forever()

    async with open_bridge(), trio.open_nursery() as peers:
        for watcher in range(20):
            peers.start_soon(watch, f"slow-{watcher}")
        for _ in range(5):
            peers.start_soon(say_nothing)
        with trio.fail_after(PATIENCE):
            while True:
                if "hub_watchers 20" in await scrape(hub.metrics_port):
                    break
                await trio.sleep(SCRAPE_INTERVAL)
            peers.start_soon(report, "busy")
            await hub.event("reporter_came", cluster="busy")
            peers.start_soon(flood)
            await flooded.wait()
        code, took = await time_of_end(hub, number)
        peers.cancel_scope.cancel()
    assert code == 0
    assert took < LATEST
    assert [line for line in hub.lines if "Traceback" in line] == []


# The log.


@pytest.mark.slow
@pytest.mark.parametrize("prints", [False, True], ids=["log", "print"])
async def test_a_full_disk_takes_the_log_and_nothing_else(tmp_path: Path, prints: bool) -> None:
    """No line of it can be written, from the first on; nor what a plugin prints beside it."""
    install(tmp_path, printing=PRINTING)
    port = free_port()
    file = agent_file(tmp_path / "west.toml", "west", {"p1": 1}, hub_port=1, secret=SECRET)
    at_port(file, port, more='[[source]]\ntype = "printing"\n' if prints else "")
    with opened("/dev/full") as full:
        async with running(file, full, PYTHONPATH=str(tmp_path)) as process:
            await wait_idle_of(port, process)
            process.send_signal(signal.SIGTERM)
            with trio.fail_after(LATEST):
                assert await process.wait() == 0


@pytest.mark.slow
async def test_a_log_that_nobody_reads_any_more_is_no_reason_to_end(tmp_path: Path) -> None:
    """Its reader has gone. Lines are lost, and the numbers go on."""
    port = free_port()
    file = agent_file(tmp_path / "west.toml", "west", {"p1": 1}, hub_port=1, secret=SECRET)
    file.write_text(
        file.read_text().replace('[metrics]\nbind = "127.0.0.1:0"', f'[metrics]\nbind = "127.0.0.1:{port}"')
    )
    reading, writing = os.pipe()
    async with running(file, writing) as process:
        os.close(writing)
        os.close(reading)
        await wait_idle_of(port, process)
        process.send_signal(signal.SIGINT)
        with trio.fail_after(LATEST):
            assert await process.wait() == 0


@pytest.mark.slow
async def test_a_log_that_can_be_written_again_tells_what_is_missing(tmp_path: Path) -> None:
    """A file that may not grow stands for a disk that is full for a while. What fitted in part is a line by itself."""
    file = agent_file(tmp_path / "west.toml", "west", {"p1": 1}, hub_port=1, secret=SECRET)
    log = tmp_path / "log"
    with opened(log) as appended:
        async with running(file, appended) as process:
            await log_until(log, lambda text: '"started"' in text)
            full = len(log.read_text()) + 20
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
            # It tries its hub again and again, and tells of that.
            await log_until(log, lambda text: len(text) >= full)
            (tmp_path / "west-capacity.toml").write_text(records({"p1": 2}))
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            text = await log_until(log, lambda text: "log_lines_lost" in text and text.endswith("}\n"))
            process.send_signal(signal.SIGTERM)
            with trio.fail_after(LATEST):
                assert await process.wait() == 0
    *_, torn, told, _ = text[:full].split("\n") + text[full:].removeprefix("\n").split("\n", 1)
    assert torn
    lost = json.loads(told)
    assert (lost["event"], lost["level"], lost["error"]) == ("log_lines_lost", "error", "file too large")
    assert lost["lines"] >= 1
    after = text[full:].split("\n")[2:-1]
    assert after
    assert all(json.loads(line)["event"] != "log_lines_lost" for line in after)


PRINTING = """
class Source(CapacitySource):
    def __init__(self, options, context):
        pass

    async def collect(self):
        print("x" * 100)
        import sys
        sys.stderr.write("y" * 100)
        return []

@hookimpl
def capacity_sources():
    return [SourceType("printing", Options, Source)]
"""


@asynccontextmanager
async def running(file: Path, stderr: int, **variables: str) -> AsyncIterator[trio.Process]:
    """A process whose standard error is this descriptor, and its output, too; killed in the end, if need be."""
    process = await trio.lowlevel.open_process(
        [str(COMMAND), "run", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=stderr,
        stderr=stderr,
        # With the buffers that Python has wherever nobody has told it to do without.
        env=environment() | {"PYTHONUNBUFFERED": ""} | variables,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


def at_port(file: Path, port: int, *, more: str = "") -> None:
    """Have a configuration serve its numbers at a port that is known without its log, and hold `more`."""
    text = file.read_text()
    assert '[metrics]\nbind = "127.0.0.1:0"' in text
    file.write_text(text.replace('[metrics]\nbind = "127.0.0.1:0"', f'[metrics]\nbind = "127.0.0.1:{port}"') + more)


@contextmanager
def opened(path: str | Path) -> Iterator[int]:
    """A descriptor that appends to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def wait_idle_of(port: int, process: trio.Process) -> None:
    """Wait until a process serves its numbers."""
    with trio.fail_after(PATIENCE):
        while True:
            assert process.returncode is None
            try:
                await wait_idle(port, lambda idle: len(idle) > 0)
                return
            except httpx.ConnectError:
                await trio.sleep(SCRAPE_INTERVAL)


async def log_until(log: Path, wanted: Callable[[str], bool]) -> str:
    """Wait until a log is as wanted; what it is."""
    with trio.fail_after(PATIENCE):
        while True:
            text = await trio.Path(log).read_text()
            if wanted(text):
                return text
            await trio.sleep(SCRAPE_INTERVAL)


# Its start.

#: seconds after a process has begun to look after signals, at which it gets one; it starts within the first of them
MOMENTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)


async def takes_signals(process: trio.Process) -> None:
    """Wait until a process does something else at SIGTERM than being ended by it. Python takes a while until it runs
    anything of ours."""
    with trio.fail_after(PATIENCE):
        while True:
            status = await trio.Path(f"/proc/{process.pid}/status").read_text()
            (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
            if int(caught, 16) & 1 << (signal.SIGTERM - 1):
                return
            await trio.sleep(0.005)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="it is read there what a process does at signals")
async def test_a_signal_at_any_moment_of_the_start(tmp_path: Path) -> None:
    """And another one right after it, and a third, as from somebody who is impatient."""
    file = agent_file(tmp_path / "west.toml", "west", {"p1": 1}, hub_port=1, secret=SECRET)
    file.write_text(file.read_text() + f'[hub]\nbind = "127.0.0.1:0"\nsecret = "{SECRET}"\n')
    codes: dict[float, int] = {}

    async def try_at(moment: float, number: signal.Signals) -> None:
        async with at_a_time, running(file, subprocess.DEVNULL) as process:
            await takes_signals(process)
            await trio.sleep(moment)
            for pause in (0.01, 0.1, 0.0):
                process.send_signal(number)
                await trio.sleep(pause)
            with trio.fail_after(LATEST):
                codes[moment] = await process.wait()

    at_a_time = trio.CapacityLimiter(3)
    async with trio.open_nursery() as nursery:
        for position, moment in enumerate(MOMENTS):
            nursery.start_soon(try_at, moment, (signal.SIGTERM, signal.SIGINT)[position % 2])
    assert codes == dict.fromkeys(MOMENTS, 0)

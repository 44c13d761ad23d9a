"""What fuzzing feeds: one function for each place where bytes of others come in. Each takes any bytes, and raises only
where something of ours is wrong: an exception that nobody has declared, something that hangs or is left behind, a
record that is none, a peer that suffers for what another one has sent. What they are fed is in `inputs.py`; who feeds
them is `test_fuzz.py`, and, led by coverage, `with_atheris.py`. Time is virtual, but for `admin`, which is about real
sockets."""

from __future__ import annotations

import atexit
import logging
import math
import random
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import betterproto2
import msgspec
import structlog.testing
import trio
import trio.testing
from hyperframe.frame import SettingsFrame
from starlette.types import ASGIApp
from trio.testing import MockClock

from tests.admin.helpers import Placements
from tests.config.test_fuzz import PLUGINS, read
from tests.rpc.harness import nothing_left
from trio_federation import wire
from trio_federation.admin import admin_app, metrics_app, serve_http
from trio_federation.admin.server import IDLE_TIMEOUT, REQUEST_TIMEOUT
from trio_federation.agent import Agent
from trio_federation.capacity import Capacity, Change, fault
from trio_federation.config import Federation, HubSettings, Secret
from trio_federation.credentials import make_token
from trio_federation.errors import ProtocolViolation, ResourceExhausted
from trio_federation.hub import Hub
from trio_federation.identity import call_metadata
from trio_federation.pb.sandbox.sync.v1 import (
    ClusterOrigin,
    EnvCapacity,
    FederationBroadcast,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
)
from trio_federation.registry import Registry
from trio_federation.rpc import HubConnection, MemoryLink
from trio_federation.testing import ScriptedSource
from trio_federation.testing.scheduling import seeded_scheduling
from trio_federation_kubernetes.errors import AnswerError
from trio_federation_kubernetes.lines import Lines
from trio_federation_kubernetes.mapping import Mapper
from trio_federation_kubernetes.options import CrdOptions
from trio_federation_kubernetes.reflector import Put, Reflector, Watch
from trio_federation_kubernetes.sandboxenv import SandboxEnvMapper
from trio_federation_kubernetes.sandboxset import SandboxSetMapper
from trio_federation_kubernetes.store import Store
from trio_federation_kubernetes.table import TableMapper
from trio_federation_kubernetes.warmpool import WarmPoolMapper

T = TypeVar("T")

#: the moment at which messages are read
NOW = 5000.0
#: how the hub of a target is called
HUB = "hub.example:7443"
SECRET = "the secret of a fuzzed hub"
#: the cluster whose connection is fuzzed, and one that must not feel anything of it
ODD, GOOD = "west", "good"
#: what opens the admin interface
TOKEN = "the-token-of-a-fuzzed-port"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: the first frame of either side
SETTINGS: bytes = SettingsFrame(0).serialize()
#: what a hub is reported, and an agent told, where nothing is odd
RECORD = Capacity(ODD, "agents", "python", "p1", "cpu", idle=3, running=2, state="Active")


@contextmanager
def no_fault_told() -> Iterator[None]:
    """Inside, no line is logged that stands for a fault of ours, by us or by a library, and none shows the secret."""
    told: list[logging.LogRecord] = []
    faults: list[object]
    libraries = logging.Handler(logging.ERROR)
    libraries.emit = told.append  # type: ignore[method-assign, assignment]
    logging.getLogger().addHandler(libraries)
    try:
        with structlog.testing.capture_logs() as lines:
            yield
    finally:
        logging.getLogger().removeHandler(libraries)
    faults = [(line.name, line.getMessage(), line.exc_info) for line in told]
    faults += [line for line in lines if line["log_level"] in ("error", "critical")]
    assert faults == [], faults
    assert SECRET not in repr(lines)
    assert TOKEN not in repr(lines)


# --- the wire codec --------------------------------------------------------------------------------------------------

MESSAGES: tuple[type[betterproto2.Message], ...] = (
    FederationBroadcast,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
    EnvCapacity,
    ClusterOrigin,
)


def feed_wire(data: bytes) -> int:
    """The bytes as a message of every type: read or refused, kept through another passage, and of records only good
    ones taken. Returns how many types they can be."""
    read_as = 0
    for message_type in MESSAGES:
        try:
            message = wire.decode(data, message_type)
        except (ProtocolViolation, ResourceExhausted) as error:
            _is_one_line(error)
            continue
        read_as += 1
        again = wire.encode(message)
        assert wire.decode(again, message_type) == message
        assert wire.encode(wire.decode(again, message_type)) == again
        _agrees_with_betterproto2(again, message)
        if isinstance(message, FederationBroadcast | ReportFederationRequest):
            _take_records(data, message)
    return read_as


def _agrees_with_betterproto2(data: bytes, message: betterproto2.Message) -> None:
    """betterproto2's own parser, which shares no code with ours, reads what we write as we do. Not where a known number
    came with another type: what we keep as unknown, it takes for that field."""
    parts = [message, *getattr(message, "items", ()), *getattr(message, "origins", ())]
    if not any(part._unknown_fields for part in parts):
        assert type(message).parse(data) == message


def _take_records(data: bytes, message: FederationBroadcast | ReportFederationRequest) -> None:
    received_type = wire.ReceivedBroadcast if isinstance(message, FederationBroadcast) else wire.ReceivedReport
    received = received_type(data)
    assert received.decoded() == message
    for cluster_id in (None, "east"):
        found = wire.changes_of(message, NOW, cluster_id)
        as_received = wire.changes_of(received, NOW, cluster_id)
        assert (_told(found.changes), found.refused) == (_told(as_received.changes), as_received.refused)
        for refusal in found.refused:
            _is_one_line(refusal.detail)
        for change in found.changes:
            if isinstance(change, Capacity):
                assert fault(change) is None
                assert change.observed_at is not None
                assert change.observed_at <= NOW
            assert cluster_id in (None, change.identity[0])
        _pass_on(found.changes)


def _pass_on(changes: Sequence[Change]) -> None:
    """What was taken in can be told to others, who make the same of it."""
    messages = [wire.encode(message) for message in wire.broadcast_messages(changes, NOW)]
    assert [message.data for message in wire.BroadcastEncoder().messages(changes, NOW)] == messages
    passed: list[Change] = []
    for data in messages:
        found = wire.changes_of(wire.decode(data, FederationBroadcast), NOW)
        assert found.refused == []
        passed += found.changes
    # Ages are whole milliseconds on the way, and saturation whole seconds.
    assert sorted(map(_timeless, passed), key=_identity) == sorted(map(_timeless, changes), key=_identity)


def _timeless(change: Change) -> Change:
    if isinstance(change, Capacity):
        return replace(change, observed_at=None, saturated_for=math.ceil(change.saturated_for))
    return change


def _identity(change: Change) -> tuple[str, ...]:
    return change.identity


def _told(changes: Sequence[Change]) -> list[tuple[Change, object]]:
    """Changes with their origins, which are no part of equality."""
    return [(change, change.origin) for change in changes]


def _is_one_line(text: object) -> None:
    assert str(text).isprintable(), text


# --- HTTP/2 ----------------------------------------------------------------------------------------------------------


def feed_server(data: bytes) -> int:
    """A peer sends HTTP/2's preface, these bytes, and then nothing more, to a hub that another cluster reports to and
    watches. Only the peer's connection ends. Returns how many records of the peer's cluster the hub has taken."""
    return _run(lambda: _feed_server(data))


async def _feed_server(data: bytes) -> int:
    async with nothing_left(), _hub() as hub, _good_cluster(hub) as still_served:
        link = MemoryLink(client=ODD, server=HUB)
        hub.serve(link.server)
        with trio.fail_after(100):
            async with trio.open_nursery() as peer:
                peer.start_soon(_swallow, link.client)
                with suppress(trio.BrokenResourceError):
                    await link.client.send_all(PREFACE + data)
                await trio.sleep(1)
                await still_served()
                await link.client.send_eof()
        await trio.testing.wait_all_tasks_blocked()
        await still_served()
        records = hub.snapshot()
        assert {record.cluster_id for record in records} <= {GOOD, ODD}
        assert [record for record in records if fault(record) is not None] == []
        health = hub.health()
        assert (health["clusters"], health["watchers"]) == ([GOOD], 1)
        return sum(record.cluster_id == ODD for record in records)


def feed_client(data: bytes) -> int:
    """A hub sends these bytes to an agent, and then nothing more. The agent takes no record that is none, nor one of
    its own cluster, and goes on to a hub that is well. Returns how many records of others it has taken."""
    return _run(lambda: _feed_client(data))


async def _feed_client(data: bytes) -> int:
    dialled = 0
    async with nothing_left(), _hub() as hub, trio.open_nursery() as nursery:

        async def dial() -> trio.abc.Stream:
            nonlocal dialled
            dialled += 1
            link = MemoryLink(client=ODD, server=HUB)
            if dialled == 1:
                nursery.start_soon(_say, link.server, data)
            else:
                hub.serve(link.server)
            await trio.lowlevel.checkpoint()
            return link.client

        agent = an_agent(ODD, dial)
        async with _running(agent):
            await trio.sleep(5)
            taken = agent.registry.snapshot()
            assert [record for record in taken if fault(record) is not None or record.cluster_id == ODD] == []
            with trio.fail_after(60):
                while not (hub.health()["clusters"] == [ODD] and hub.health()["watchers"]):  # noqa: ASYNC110
                    await trio.sleep(0.5)
        return len(taken)


async def _say(stream: trio.abc.HalfCloseableStream, data: bytes) -> None:
    """What a hub's side says: its settings, and a second later, when calls are open, all the rest."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_swallow, stream)
        with suppress(trio.BrokenResourceError):
            await stream.send_all(SETTINGS)
            await trio.sleep(1)
            await stream.send_all(data)
            await trio.sleep(1)
            await stream.send_eof()


async def _swallow(stream: trio.abc.ReceiveStream) -> None:
    """Read everything, so that nobody waits for us."""
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


@asynccontextmanager
async def _hub() -> AsyncIterator[Hub]:
    hub = Hub(HubSettings(secret=Secret(SECRET), accept=("token",)))
    async with trio.open_nursery() as nursery:
        await nursery.start(hub.run)
        yield hub
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _good_cluster(hub: Hub) -> AsyncIterator[Callable[[], Any]]:
    """A cluster that reports and watches; gives what asserts that it is still served."""
    link = MemoryLink(client=GOOD, server=HUB)
    hub.serve(link.server)
    metadata = call_metadata(GOOD, "aa", make_token(SECRET, GOOD))
    idle = 0
    async with trio.open_nursery() as nursery:
        connection = await HubConnection.open(nursery, link.client, peer=HUB, metadata=metadata)
        async with connection.report() as report, connection.watch(WatchFederationRequest()) as watch:

            async def still_served() -> None:
                nonlocal idle
                idle += 1
                item = EnvCapacity(namespace="ns", env_name="env", member_pool="p1", idle=idle)
                with trio.fail_after(1):
                    await report.send(ReportFederationRequest(items=[item]))
                    while [each.idle for each in (await watch.receive()).items if each.cluster_id == GOOD] != [idle]:
                        pass

            await watch.receive()
            await still_served()
            yield still_served
        nursery.cancel_scope.cancel()


def an_agent(cluster_id: str, dial: Callable[[], Any], *records: Capacity) -> Agent:
    """An agent of one hub, with these records to report, and the same randomness each time."""
    source = ScriptedSource()
    source.set(*records)
    return Agent(
        cluster_id,
        Federation(),
        sources={"fuzz": lambda: source},
        hubs={HUB: dial},
        credential=make_token(SECRET, cluster_id),
        generator=random.Random(1),
    )


@asynccontextmanager
async def _running(agent: Agent) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        yield
        nursery.cancel_scope.cancel()


def _run(main: Callable[[], Awaitable[T]]) -> T:
    """Run it on virtual time, and the same way each time, so that what was found once is found again."""

    async def in_order() -> T:
        # Under which an agent opens its calls in the order of the conversations that are fed to it.
        with seeded_scheduling("d"):
            return await main()

    with no_fault_told():
        found: T = trio.run(in_order, clock=MockClock(autojump_threshold=0))
    return found


def conversation(*, client_side: bool, to_its_end: bool) -> bytes:
    """What one side says where an agent and a hub are well: an agent's side without the preface. It reports a record,
    is told one of another cluster, answers pings, and says goodbye, or is cut off before that."""
    recorded = bytearray()
    so_far = b""

    async def dial(hub: Hub) -> trio.abc.Stream:
        link = MemoryLink(client=ODD, server=HUB)
        side = link.client if client_side else link.server
        send_all = side.send_all

        async def send_and_record(data: bytes | bytearray | memoryview) -> None:
            recorded.extend(data)
            await send_all(data)

        side.send_all = send_and_record  # type: ignore[method-assign]
        hub.serve(link.server)
        await trio.lowlevel.checkpoint()
        return link.client

    async def main() -> None:
        nonlocal so_far
        async with (
            nothing_left(),
            _hub() as hub,
            _good_cluster(hub) as still_served,
            _running(an_agent(ODD, lambda: dial(hub), RECORD)),
        ):
            await trio.sleep(12)
            await still_served()
            await trio.sleep(12)
            so_far = bytes(recorded)

    _run(main)
    return (bytes(recorded) if to_its_end else so_far).removeprefix(PREFACE)


# --- configuration ---------------------------------------------------------------------------------------------------


@cache
def _folder() -> Path:
    """One for all files, as making one takes longer than reading what is in it."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def feed_config(data: bytes) -> int:
    """The bytes as a configuration file: a Config, or faults in a line each, whoever knows plugins. Returns how many
    faults there are."""
    folder = _folder()
    without = read(folder, data, {})
    with_plugins = read(folder, data, {}, PLUGINS.faults)
    assert isinstance(with_plugins, list) or not isinstance(without, list)
    return len(without) if isinstance(without, list) else 0


# --- Kubernetes ------------------------------------------------------------------------------------------------------

_TABLE = {
    "group": "pools.example.com",
    "version": "v1",
    "resource": "runnerpools",
    "fields": {
        "env": "spec.template",
        "group": "metadata.labels['example.com/group']",
        "idle": "status.free",
        "running": "status.parts[0].busy",
        "desired": "spec.replicas",
        "ceiling": "spec.maxReplicas",
    },
}
_MAPPERS: tuple[Callable[[], Mapper], ...] = (
    lambda: SandboxEnvMapper(ODD),
    lambda: SandboxSetMapper(ODD),
    lambda: WarmPoolMapper(ODD),
    lambda: TableMapper(ODD, msgspec.convert(_TABLE, CrdOptions)),
)
_LISTED = b'{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"before","namespace":"ns"}}]}'
_LAST = b'{"type":"ADDED","object":{"metadata":{"name":"after","namespace":"ns","resourceVersion":"2"}}}\n'


def feed_kubernetes(data: bytes) -> int:
    """The bytes as a list, and as a watch, of each resource that is read. What cannot be read costs nothing else.
    Returns how many records they come to that an agent would take."""
    records = 0
    for make in _MAPPERS:
        mapper = make()
        for index in range(len(mapper.watched)):
            records += _feed_list(mapper, index, data) + _feed_watch(mapper, index, data)
    return records


def _feed_list(mapper: Mapper, index: int, data: bytes) -> int:
    store, reflector = Store(mapper), Reflector[Any](page_size=10, random=random.Random(1))
    reflector.request()
    try:
        page = mapper.watched[index].decoder.page(data)
    except AnswerError as error:
        _is_one_line(error)
        reflector.failed(error)
        assert reflector.pause() > 0
        return 0
    content = reflector.page(page)
    if content is None:  # there is more, or it has no version
        reflector.request()
        content = dict(page.objects)
    store.replace(index, None, content)
    return _take_rows(store, index)


def _feed_watch(mapper: Mapper, index: int, data: bytes) -> int:
    store, reflector = Store(mapper), Reflector[Any](page_size=10, random=random.Random(1))
    decoder = mapper.watched[index].decoder
    lines = Lines()
    reflector.request()
    content = reflector.page(decoder.page(_LISTED))
    assert content is not None
    store.replace(index, None, content)
    reflector.request()
    try:
        # In pieces of odd sizes, as a network makes them; what stands last is taken whatever came before it.
        ends = [*range(0, len(data), 1 + len(data) % 97), len(data)]
        for chunk in (*(data[begin:end] for begin, end in pairwise(ends)), b"\n", _LAST):
            for line in lines.feed(chunk):
                change = reflector.event(decoder.event(line))
                if change is not None:
                    store.apply(index, change.key, change.object if isinstance(change, Put) else None)
                if chunk is _LAST and reflector.under_way:
                    assert change is not None
                    assert change.key == ("ns", "after")
    except AnswerError as error:
        _is_one_line(error)
        reflector.failed(error)
    if not reflector.under_way:
        _is_one_line(reflector.trouble)
    request = reflector.request()
    assert isinstance(request, Watch) == bool(reflector.position)
    return _take_rows(store, index)


def _take_rows(store: Store, index: int) -> int:
    """Hands what a store has to the agent, as a source does, and counts the records that are good: those can be told
    to everybody. Then all is gone, and nothing may be left of it."""
    changes = dict(store.changes(2**31, lambda namespace: True))
    assert not store.has_changes()
    good: list[Change] = []
    for row in store.rows():
        assert changes[row.record.identity] == row
        if row.saturated_until is not None:
            assert abs(row.saturated_until) < 1e12
        if fault(row.record) is None:
            good.append(row.record)
    for contested in store.contested():
        assert contested.counts < contested.does_not
    _pass_on(good)
    store.replace(index, None, {})
    assert len(store) == 0
    assert all(row is None for _, row in store.changes(2**31, lambda namespace: True))
    return len(good)


# --- the admin interface ---------------------------------------------------------------------------------------------

_STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) [^\r\n]*\r\n")
#: statuses of HTTP itself: a method or a version that nobody serves
_HTTP_ONLY = (501, 505)
_HEALTHY = b"GET /healthz HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n"


def feed_admin(data: bytes) -> list[int]:
    """A client sends these bytes, and then nothing more, to the metrics port and to the admin port, without a token and
    with one. None of it is a fault of ours, and others are answered. Returns the statuses of the answers over
    HTTP/1."""
    statuses: list[int] = []

    async def main() -> None:
        registry = Registry(ODD, ttl=30.0, clock=lambda: NOW)
        registry.upsert([replace(RECORD, cluster_id=cluster, observed_at=NOW - 1) for cluster in (ODD, "east")])
        given = Placements(registry).answers
        for app in (
            metrics_app(given),
            admin_app(given, host="127.0.0.1"),
            admin_app(given, host="127.0.0.1", token=lambda: TOKEN),
        ):
            async with _served(app) as listener:
                statuses.extend(map(int, _STATUS.findall(await listener.answer_to(data))))
                assert (await listener.answer_to(_HEALTHY)).startswith(b"HTTP/1.1 200 ")

    _run(main)
    assert [status for status in statuses if status >= 500 and status not in _HTTP_ONLY] == []
    return statuses


class _Listener(trio.abc.Listener[Any]):
    """Listens where `answer_to` connects."""

    def __init__(self) -> None:
        self.socket = _Socket(MemoryLink())
        self._connect, self._connected = trio.open_memory_channel[Any](1)

    async def accept(self) -> Any:
        return await self._connected.receive()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    async def answer_to(self, data: bytes) -> bytes:
        """All that a client is told who sends this, and stays until the server closes."""
        link = MemoryLink()
        link.server.socket = _Socket(link)  # type: ignore[attr-defined]
        answer = bytearray()
        with trio.fail_after(IDLE_TIMEOUT + 2 * REQUEST_TIMEOUT):
            await self._connect.send(link.server)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send, link.client, data)
                with suppress(trio.BrokenResourceError):
                    while more := await link.client.receive_some():
                        answer += more
                nursery.cancel_scope.cancel()
        await trio.aclose_forcefully(link.client)
        return bytes(answer)


@asynccontextmanager
async def _served(app: ASGIApp) -> AsyncIterator[_Listener]:
    """An application, served as on a port."""
    listener = _Listener()

    async def listeners(port: int, *, host: str) -> list[_Listener]:
        await trio.lowlevel.checkpoint()
        return [listener]

    async with trio.open_nursery() as nursery:
        with mock.patch("trio.open_tcp_listeners", listeners):
            await nursery.start(partial(serve_http, app, "127.0.0.1", 0, section="admin"))
        yield listener
        nursery.cancel_scope.cancel()


async def _send(stream: trio.abc.SendStream, data: bytes) -> None:
    with suppress(trio.BrokenResourceError):
        await stream.send_all(data)


class _Socket:
    """What an HTTP server asks of the socket below a stream, over a link."""

    family = socket.AF_INET

    def __init__(self, link: MemoryLink) -> None:
        self._link = link

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 50000

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 9465

    def setsockopt(self, *_: object) -> None:
        pass

    def close(self) -> None:
        self._link.cut()


#: By name, what fuzzing feeds.
TARGETS: dict[str, Callable[[bytes], object]] = {
    "wire": feed_wire,
    "server": feed_server,
    "client": feed_client,
    "config": feed_config,
    "kubernetes": feed_kubernetes,
    "admin": feed_admin,
}

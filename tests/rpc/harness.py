"""What the tests of `rpc/` share: a client and a server joined by an in-memory link, handlers that say what became of
them, and a peer that speaks bare HTTP/2 frames, for what no well-behaved peer does. Time is trio's MockClock."""

from __future__ import annotations

import asyncio
import gc
import struct
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpclib.server
import trio
import trio_asyncio
from grpclib.const import Handler as MethodHandler
from grpclib.events import _DispatchServerEvents
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, RequestReceived, ResponseReceived, TrailersReceived

from trio_federation import wire
from trio_federation.pb.sandbox.sync.v1 import (
    EnvCapacity,
    FederationBroadcast,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
)
from trio_federation.rpc import (
    ConnectionSettings,
    FederationServer,
    HubConnection,
    IncomingReport,
    IncomingWatch,
    MemoryLink,
    open_bridge,
)
from trio_federation.rpc.codec import FederationCodec
from trio_federation.rpc.transport import Http2Connection

REPORT_PATH = "/sandbox.sync.v1.FederationService/ReportFederation"
WATCH_PATH = "/sandbox.sync.v1.FederationService/WatchFederation"
#: how the client of a pair names the hub
HUB = "hub.example:7443"
#: how the server of a pair names the agent
AGENT = "agent.example"
#: Seconds of virtual time after which a test that waits for something that cannot take so long has failed.
FOR_EVER = 100_000.0

_E = TypeVar("_E", bound=Event)

Report = Callable[[IncomingReport], Awaitable[None]]
Watch = Callable[[IncomingWatch], Awaitable[None]]


def new_link(*, capacity: int = 64 * 1024) -> MemoryLink:
    """A link whose ends are named as the tests expect."""
    return MemoryLink(client=AGENT, server=HUB, capacity=capacity)


def report_of(number: int, *, padding: int = 0) -> ReportFederationRequest:
    """A report that is told from others by its number, with `padding` bytes in an unknown field."""
    message = ReportFederationRequest(items=[EnvCapacity(cluster_id="west", idle=number)])
    message._unknown_fields = unknown_field(padding)
    return message


def broadcast_of(number: int, *, padding: int = 0) -> FederationBroadcast:
    """As `report_of`, for a broadcast."""
    message = FederationBroadcast(items=[EnvCapacity(cluster_id="west", idle=number)])
    message._unknown_fields = unknown_field(padding)
    return message


def number_of(message: wire.RecordMessage | None) -> int:
    """The number that `report_of` or `broadcast_of` has put into a message."""
    assert message is not None
    number: int = message.items[0].idle
    return number


def unknown_field(size: int) -> bytes:
    """`size` bytes of a field, number 1000, that nobody knows; 0, or enough for its tag and its length."""
    if not size:
        return b""
    for length_bytes in range(1, 6):
        rest = size - 2 - length_bytes
        encoded = b"\xc2\x3e" + _varint(rest) + bytes(max(rest, 0))
        if len(encoded) == size:
            return encoded
    raise ValueError(f"no field takes up {size} bytes")


def padded_to(message: Any, size: int) -> Any:
    """The message, made to take up exactly `size` bytes."""
    message._unknown_fields = unknown_field(size - len(wire.encode(message)))
    assert len(wire.encode(message)) == size
    return message


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, max(number, 0)])


def framed(message: Any) -> bytes:
    """A message with gRPC's prefix: not compressed, and its length."""
    data = wire.encode(message)
    return struct.pack("!?I", False, len(data)) + data


def headers_of(event: RequestReceived | ResponseReceived | TrailersReceived) -> dict[str, str]:
    """The headers in an event."""
    # bytes or str, as the connection is configured, and a RawPeer's is to str
    return {str(name): str(value) for name, value in event.headers or ()}


# --- a pair ----------------------------------------------------------------------------------------------------------


async def take_reports(call: IncomingReport) -> None:
    """A report handler that takes everything and answers."""
    while await call.receive() is not None:
        pass
    await call.answer()


async def send_one(call: IncomingWatch) -> None:
    """A watch handler that sends one broadcast, and then nothing more."""
    await call.request()
    await call.send(broadcast_of(1))
    await trio.sleep_forever()


@dataclass
class Watched:
    """Wraps a handler, and says what became of its calls."""

    handler: Callable[[Any], Awaitable[None]]
    started: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    #: how each call ended: the exception's type, or None
    outcomes: list[type[BaseException] | None] = field(default_factory=list)

    async def __call__(self, call: IncomingReport | IncomingWatch) -> None:
        self.started.set()
        outcome: type[BaseException] | None = None
        try:
            await self.handler(call)
        except BaseException as error:
            outcome = type(error)
            raise
        finally:
            self.outcomes.append(outcome)
            self.ended.set()


async def hang(call: IncomingReport | IncomingWatch) -> None:
    """A handler that neither reads nor sends."""
    await trio.sleep_forever()


@dataclass
class Pair:
    """A client's connection, and what it is connected to."""

    connection: HubConnection
    link: MemoryLink
    nursery: trio.Nursery
    #: cancels the server's `serve`
    server_scope: trio.CancelScope
    #: set when `serve` has returned
    server_ended: trio.Event


@asynccontextmanager
async def joined(
    report: Report = take_reports,
    watch: Watch = send_one,
    *,
    metadata: Sequence[tuple[str, str]] = (),
    client: ConnectionSettings | None = None,
    server: ConnectionSettings | None = None,
    link: MemoryLink | None = None,
) -> AsyncIterator[Pair]:
    """A client joined to a server of the two handlers. On leaving, the client closes its connection; then the server
    has to end too, and neither may leave anything behind."""
    link = link or new_link()
    service = FederationServer(report, watch, server)
    async with nothing_left(), trio.open_nursery() as nursery:
        scope, ended = trio.CancelScope(), trio.Event()

        async def serve() -> None:
            with scope:
                await service.serve(link.server)
            ended.set()

        nursery.start_soon(serve)
        connection = await HubConnection.open(
            nursery, link.client, peer=HUB, metadata=metadata, settings=client or ConnectionSettings()
        )
        yield Pair(connection, link, nursery, scope, ended)
        await connection.aclose()
        link.hold(to_server=False, to_client=False)
        with trio.fail_after(10):
            await connection.wait_closed()
            await ended.wait()


@asynccontextmanager
async def joined_to_raw_server(
    *, client: ConnectionSettings | None = None, link: MemoryLink | None = None
) -> AsyncIterator[tuple[HubConnection, RawPeer]]:
    """A client whose server is a bare HTTP/2 peer."""
    link = link or new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        connection = await HubConnection.open(nursery, link.client, peer=HUB, settings=client or ConnectionSettings())
        peer = RawPeer(link.server, client_side=False)
        await peer.start()
        yield connection, peer
        await connection.aclose()
        link.cut()
        with trio.fail_after(10):
            await connection.wait_closed()


@asynccontextmanager
async def joined_to_raw_client(
    report: Report = take_reports,
    watch: Watch = send_one,
    *,
    server: ConnectionSettings | None = None,
    link: MemoryLink | None = None,
) -> AsyncIterator[tuple[RawPeer, trio.Event]]:
    """A server whose client is a bare HTTP/2 peer, and an event that is set when `serve` has returned."""
    link = link or new_link()
    service = FederationServer(report, watch, server)
    async with nothing_left(), trio.open_nursery() as nursery:
        ended = trio.Event()

        async def serve() -> None:
            await service.serve(link.server)
            ended.set()

        nursery.start_soon(serve)
        peer = RawPeer(link.client, client_side=True)
        await peer.start()
        yield peer, ended
        link.cut()
        with trio.fail_after(10):
            await ended.wait()


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """A bridge around the block, in which no asyncio task and no unclosed thing may be left after it. (A Trio task that
    is left keeps its nursery open, which ends in FOR_EVER.)"""
    with unclosed_things_raise():
        async with open_bridge():
            loop = trio_asyncio.current_loop.get()
            with trio.fail_after(FOR_EVER):
                yield
                # What asyncio has been told at the very end gets its turn.
                await trio.testing.wait_all_tasks_blocked()
                assert asyncio.all_tasks(loop) == set()


@contextmanager
def unclosed_things_raise() -> Iterator[None]:
    """What is collected inside the block may not warn that it was never closed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect(1)
    assert [str(warning.message) for warning in caught] == []


async def serve_methods(stream: trio.abc.Stream, methods: Mapping[str, MethodHandler]) -> None:
    """Serve methods in grpclib's own way: what another kind of server says."""
    handler = grpclib.server.Handler(dict(methods), FederationCodec(), None, _DispatchServerEvents())
    try:
        await Http2Connection(stream, handler, ConnectionSettings(), client_side=False).run()
    finally:
        loop = trio_asyncio.current_loop.get()
        with trio.move_on_after(1, shield=True):
            await loop.run_aio_coroutine(handler.wait_closed())


def report_method(function: Callable[[Any], Awaitable[None]]) -> MethodHandler:
    """grpclib's record of a ReportFederation."""
    return MethodHandler(
        function, grpclib.const.Cardinality.STREAM_UNARY, ReportFederationRequest, ReportFederationResponse
    )


def watch_method(function: Callable[[Any], Awaitable[None]]) -> MethodHandler:
    """grpclib's record of a WatchFederation."""
    return MethodHandler(function, grpclib.const.Cardinality.UNARY_STREAM, WatchFederationRequest, FederationBroadcast)


# --- a peer of bare frames -------------------------------------------------------------------------------------------


class RawPeer:
    """One side of a connection that does only what it is told to. `acknowledge`: whether it gives back the window of
    what it reads."""

    def __init__(self, stream: trio.abc.Stream, *, client_side: bool) -> None:
        self.stream = stream
        self.acknowledge = True
        self.h2 = H2Connection(
            H2Configuration(
                client_side=client_side,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        self._events: list[Event] = []

    async def start(self) -> None:
        """Send the preface, and the settings."""
        self.h2.initiate_connection()
        await self.flush()

    async def flush(self) -> None:
        """Send what h2 has to say."""
        data = self.h2.data_to_send()
        if data:
            await self.stream.send_all(data)

    async def read_some(self) -> bool:
        """Take in what has come; False at the end of the stream."""
        data = await self.stream.receive_some()
        if not data:
            return False
        for event in self.h2.receive_data(data):
            self._events.append(event)
            if isinstance(event, DataReceived) and self.acknowledge and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        await self.flush()
        return True

    async def wait_for(self, kind: type[_E]) -> _E:
        """The next event of a kind; what came before it is dropped."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
            if not await self.read_some():
                raise AssertionError(f"the stream ended before a {kind.__name__}")

    async def request(
        self,
        path: str,
        data: bytes = b"",
        *,
        end: bool = False,
        reset: bool = False,
        headers: Sequence[tuple[str, str]] = (),
    ) -> int:
        """Open a call, send `data` on it and end it or give it up, all in one go; the number of its stream."""
        stream_id = self.h2.get_next_available_stream_id()
        first = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", HUB),
            ("te", "trailers"),  # codespell:ignore te
            ("content-type", "application/grpc"),
        ]
        self.h2.send_headers(stream_id, [*first, *headers])
        for start in range(0, len(data), self.h2.max_outbound_frame_size):
            self.h2.send_data(stream_id, data[start : start + self.h2.max_outbound_frame_size])
        if end:
            self.h2.end_stream(stream_id)
        if reset:
            self.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        await self.flush()
        return stream_id

    async def wait_called(self) -> int:
        """Wait for a call to come in; the number of its stream."""
        stream_id = (await self.wait_for(RequestReceived)).stream_id
        assert stream_id is not None
        return stream_id

    async def send_data(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Send one frame."""
        self.h2.send_data(stream_id, data, end_stream=end)
        await self.flush()

    async def respond(self, stream_id: int, *headers: tuple[str, str], end: bool = False) -> None:
        """Send response headers: 200 and gRPC's type, unless `headers` say something else."""
        given = dict(headers)
        first = [
            (":status", given.pop(":status", "200")),
            ("content-type", given.pop("content-type", "application/grpc")),
        ]
        self.h2.send_headers(stream_id, [*first, *given.items()], end_stream=end)
        await self.flush()

    async def send_trailers(self, stream_id: int, status: int, message: str = "") -> None:
        """End a response."""
        self.h2.send_headers(stream_id, [("grpc-status", str(status)), ("grpc-message", message)], end_stream=True)
        await self.flush()

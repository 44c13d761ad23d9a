"""The agent's side of the two calls. A `HubConnection` is one HTTP/2 connection; its tasks live in the nursery that it
was opened in, and end with it. Trio's cancellation ends a call and resets its stream. When to connect, and what to do
about an error, is decided in `link.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

import grpclib.client
import trio
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol

from trio_federation.errors import RpcError, Unavailable
from trio_federation.pb.sandbox.sync.v1 import (
    FederationServiceBase,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
)
from trio_federation.rpc import bridge
from trio_federation.rpc._status import FOREIGN_ERRORS, end_of, to_error
from trio_federation.rpc.codec import FederationCodec
from trio_federation.rpc.transport import (
    ConnectionSettings,
    Http2Connection,
    Traffic,
    ignore_traffic,
    last_received,
)
from trio_federation.wire import ReceivedBroadcast

_T = TypeVar("_T")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

#: Seconds that giving up a call may take. Nothing in it waits for the peer.
_CLEANUP_DEADLINE = 1.0

#: Paths by kind of call, from the generated service, so that they are written down once.
_PATHS = {handler.cardinality: path for path, handler in FederationServiceBase().__mapping__().items()}


class _Channel(grpclib.client.Channel):
    """grpclib's channel over a connection that exists already, and that is never replaced by another."""

    def __init__(self, authority: str, scheme: str) -> None:
        super().__init__(codec=FederationCodec())
        self._authority = authority
        self._scheme = scheme

    async def _create_connection(self) -> H2Protocol:
        raise ConnectionError("the connection is closed")

    def use(self, protocol: H2Protocol) -> None:
        self._protocol = protocol


class _Call(Generic[_Request, _Response]):
    """What both calls share: running grpclib's coroutines, and telling what went wrong in our own words."""

    def __init__(self, connection: HubConnection, stream: grpclib.client.Stream[_Request, _Response]) -> None:
        self._connection = connection
        self._stream = stream
        #: trio's time before anything of the call was sent
        self.began = trio.current_time()
        #: set when `wait_accepted` has seen that the hub serves the call, and trio's time at which it did
        self.accepted = trio.Event()
        self.accepted_at: float | None = None

    @property
    def peer(self) -> str:
        """The hub, for people."""
        return self._connection.peer

    async def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await bridge.run(coroutine)
        except (RpcError, *FOREIGN_ERRORS) as error:
            # A connection that is cancelled together with its calls is no failure of theirs.
            await trio.lowlevel.checkpoint_if_cancelled()
            cause = self._telling(error)
            raise to_error(cause, self._connection.transport, self._connection.peer) from cause

    async def wait_accepted(self) -> None:
        """Wait for the hub's first sign that it serves the call. Older hubs give none before their first message, or,
        of a report, before its end. Raises an RpcError when the call has failed."""
        if not self._stream._recv_initial_metadata_done:
            await self._run(self._stream.recv_initial_metadata())
        if self.accepted_at is None:
            self.accepted_at = trio.current_time()
            self.accepted.set()

    def _raise_for_status(self) -> None:
        """Raise what the hub's status says, where it has come and is not good."""
        status = self._bad_status()
        if status is not None:
            raise to_error(status, self._connection.transport, self._connection.peer) from status

    def _telling(self, error: Exception) -> Exception:
        """What tells more than `error` does, or else `error`. A hub that refuses sends its status and resets the
        stream; whatever fails on it after that, it is the status that counts. grpclib makes UNKNOWN of headers that it
        does not expect, even of a status that is short of them, as its own server's is for an unknown method."""
        if isinstance(error, RpcError) or not self._stream._send_request_done:
            return error
        if isinstance(error, GRPCError) and error.status is not Status.UNKNOWN:
            return error
        return self._bad_status() or error

    def _bad_status(self) -> GRPCError | None:
        """The hub's status, where it has come and is not good."""
        try:
            self._stream._maybe_raise()
        except GRPCError as status:
            return status
        except KeyError:
            pass  # headers without even an HTTP status
        return None


class ReportCall(_Call[ReportFederationRequest, ReportFederationResponse]):
    """A running ReportFederation."""

    async def send(self, message: ReportFederationRequest) -> None:
        """Send one message; waits while the hub takes no more. Raises an RpcError when the call has failed."""
        await self._run(self._stream.send_message(message))

    async def end(self) -> None:
        """Tell the hub that this was all; `wait_answered` tells when it has taken it. Raises as `send`."""
        await self._run(self._stream.end())

    async def wait_answered(self) -> None:
        """Wait until the hub ends the call. It does so on its own only to refuse it. Raises as `send`."""
        answer = await self._run(self._stream.recv_message())
        if answer is None:
            self._raise_for_status()
        if self._stream._end_done:
            await self._run(self._stream.recv_trailing_metadata())


class WatchCall(_Call[WatchFederationRequest, ReceivedBroadcast]):
    """A running WatchFederation."""

    @property
    def last_received(self) -> float:
        """trio's time at which anything of a broadcast came in last; when the call began, before that."""
        return max(self.began, last_received(self._stream._stream))

    async def receive(self) -> ReceivedBroadcast:
        """The next broadcast. Raises an RpcError when the call has failed or the hub has ended it."""
        message = await self._run(self._stream.recv_message())
        if message is None:
            self._raise_for_status()
            if not self._stream._recv_trailing_metadata_done:
                await self._run(self._stream.recv_trailing_metadata())
            raise Unavailable("the hub ended the watch", peer=self._connection.peer)
        return message


class HubConnection:
    """A connection to a hub. Make one with `open`; `aclose` it on every path, or end the nursery that it lives in."""

    def __init__(
        self,
        transport: Http2Connection,
        channel: _Channel,
        peer: str,
        metadata: Callable[[], Sequence[tuple[str, str]]],
    ) -> None:
        self.transport = transport
        self.peer = peer
        self._channel = channel
        self._metadata = metadata

    @classmethod
    async def open(
        cls,
        nursery: trio.Nursery,
        stream: trio.abc.Stream,
        *,
        peer: str,
        metadata: Sequence[tuple[str, str]] | Callable[[], Sequence[tuple[str, str]]] = (),
        settings: ConnectionSettings | None = None,
        traffic: Traffic = ignore_traffic,
    ) -> HubConnection:
        """Speak HTTP/2 over `stream`, which belongs to the connection from now on. `peer`: the hub, for people, and the
        authority of its calls. `metadata`: sent with each call, or asked for at each. `traffic`: told of the bytes
        (sent, received). The connection's tasks run in `nursery`."""
        scheme = "https" if isinstance(stream, trio.SSLStream) else "http"
        channel = _Channel(peer, scheme)
        transport = Http2Connection(
            stream, grpclib.client.Handler(), settings or ConnectionSettings(), client_side=True, traffic=traffic
        )
        channel.use(transport.protocol)
        await nursery.start(_drive, transport, channel)
        return cls(transport, channel, peer, metadata if callable(metadata) else lambda: metadata)

    @asynccontextmanager
    async def report(self) -> AsyncIterator[ReportCall]:
        """Open a ReportFederation. Leaving the block before the hub has answered resets the stream."""
        stream: grpclib.client.Stream[ReportFederationRequest, ReportFederationResponse] = self._channel.request(
            _PATHS[Cardinality.STREAM_UNARY],
            Cardinality.STREAM_UNARY,
            ReportFederationRequest,
            ReportFederationResponse,
            metadata=self._metadata(),
        )
        call = ReportCall(self, stream)
        async with self._opened(call, stream):
            await call._run(stream.send_request())
            yield call

    @asynccontextmanager
    async def watch(self, request: WatchFederationRequest) -> AsyncIterator[WatchCall]:
        """Open a WatchFederation. Leaving the block resets the stream."""
        stream: grpclib.client.Stream[WatchFederationRequest, ReceivedBroadcast] = self._channel.request(
            _PATHS[Cardinality.UNARY_STREAM],
            Cardinality.UNARY_STREAM,
            WatchFederationRequest,
            ReceivedBroadcast,
            metadata=self._metadata(),
        )
        call = WatchCall(self, stream)
        async with self._opened(call, stream):
            await call._run(stream.send_message(request, end=True))
            yield call

    @asynccontextmanager
    async def _opened(self, call: _Call[Any, Any], stream: grpclib.client.Stream[Any, Any]) -> AsyncIterator[None]:
        await call._run(stream.__aenter__())
        try:
            yield
        finally:
            with trio.move_on_after(_CLEANUP_DEADLINE, shield=True):
                await _give_up(stream)

    async def wait_heard(self, within: float) -> None:
        """Wait until the hub has said anything at all, which every server of HTTP/2 does at once: who accepts a
        connection and is silent may be a process that stands still, and what it is told would be old when it goes on.

        Raises an RpcError where that takes more than `within` seconds, or the connection has ended."""
        with trio.move_on_after(within):
            await self.transport.heard.wait()
        if self.transport.heard_at is None and not self.transport.closed.is_set():
            self.transport.abort(
                f"connected, but nothing was said within {within:g} s: the other side hangs, or is no gRPC endpoint"
            )
        if self.transport.heard_at is None:
            raise await self.wait_closed()

    async def wait_closed(self) -> RpcError:
        """Wait until the connection has ended, whoever ended it; the error that says why, for whoever wants to raise
        it."""
        await self.transport.closed.wait()
        return end_of(self.transport, self.peer)

    async def aclose(self) -> None:
        """End the connection; what is queued is still written, within a second. Calls on it fail."""
        self._channel.close()
        await trio.lowlevel.checkpoint()


async def _drive(
    transport: Http2Connection, channel: _Channel, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a connection to its end, however it comes; a channel that is forgotten unclosed reports an error to the
    loop."""
    try:
        await transport.run(task_status=task_status)
    finally:
        channel.close()


async def _give_up(stream: grpclib.client.Stream[Any, Any]) -> None:
    """Reset the stream unless it has ended, and release it. Told of an error, grpclib does not wait for the peer."""
    with suppress(*FOREIGN_ERRORS):  # the connection is gone, and with it the stream
        await bridge.run(stream.__aexit__(_Ended, _Ended(), None))


class _Ended(Exception):
    """Tells grpclib that a call is not to be finished."""

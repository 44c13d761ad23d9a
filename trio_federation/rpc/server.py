"""The hub's side of the two calls: gRPC over Trio streams, one task per connection, Trio-flavoured handlers. A handler
is cancelled when its stream ends; the errors that it raises become gRPC statuses. What the calls do is the hub's
business."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import grpclib.server
import structlog
import trio
from grpclib.const import Cardinality
from grpclib.const import Handler as MethodHandler
from grpclib.events import _DispatchServerEvents
from grpclib.metadata import Deadline
from grpclib.protocol import Stream
from h2.errors import ErrorCodes

from trio_federation.errors import DeadlineExceeded, RpcError
from trio_federation.pb.sandbox.sync.v1 import (
    FederationBroadcast,
    FederationServiceBase,
    ReportFederationResponse,
    WatchFederationRequest,
)
from trio_federation.rpc import bridge
from trio_federation.rpc._status import FOREIGN_ERRORS, to_error, to_status
from trio_federation.rpc.codec import FederationCodec
from trio_federation.rpc.transport import (
    ConnectionSettings,
    Cut,
    Http2Connection,
    LimitedStream,
    peer_name,
    reset_unfinished,
)
from trio_federation.tls import certificate_names
from trio_federation.wire import EncodedBroadcast, ReceivedReport

_T = TypeVar("_T")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Call = TypeVar("_Call", bound="IncomingReport | IncomingWatch")

#: Seconds that handlers get to end once their connection is gone.
_HANDLERS_DEADLINE = 2.0
#: Seconds that a connection lasts whose calls are all refused: enough to tell it, and no more.
REFUSED_FOR = 2.0

log = structlog.get_logger("trio_federation.rpc")


def _ignore_cut(_peer: str, _cut: Cut, _reason: str) -> None:
    """Nobody wants to know."""


class _OpenCalls:
    """The calls of one connection that were let in: how many are open, and since when there is none."""

    def __init__(self) -> None:
        self._count = 0
        self.none_since = trio.current_time()
        self.none = trio.Event()
        self.none.set()

    def begin(self) -> None:
        """One more is open."""
        if self._count == 0:
            self.none = trio.Event()
        self._count += 1

    def end(self) -> None:
        """One has ended."""
        self._count -= 1
        if self._count == 0:
            self.none_since = trio.current_time()
            self.none.set()


class _IncomingCall(Generic[_Request, _Response]):
    """A call that a peer has made."""

    def __init__(
        self,
        stream: grpclib.server.Stream[_Request, _Response],
        connection: Http2Connection,
        peer: str,
        names: Sequence[tuple[str, str]] = (),
        open_calls: _OpenCalls | None = None,
    ) -> None:
        self._stream = stream
        self._connection = connection
        #: the caller's address, for people
        self.peer = peer
        #: the subject alternative names (kind, value) of the client certificate that TLS has verified; none without one
        self.names = names
        self._open_calls = open_calls

    @property
    def metadata(self) -> Mapping[str, str]:
        """The call's metadata, by lower-case key; the first value where one is repeated, and no binary ones."""
        found: dict[str, str] = {}
        for key, value in (self._stream.metadata or {}).items():
            if isinstance(value, str):
                found.setdefault(key, value)
        return found

    @property
    def time_allowed(self) -> float:
        """Seconds after which the caller wants the call to end, from its beginning; infinite where it does not say."""
        stream = self._stream._stream
        return stream.time_allowed if isinstance(stream, LimitedStream) else math.inf

    @property
    def last_received(self) -> float:
        """trio's time at which anything came in on the caller's connection last, signs of life included."""
        return self._connection.last_received

    def end_connection(self, reason: str, cut: Cut) -> None:
        """End the caller's connection, with all calls on it, because of what it does, and tell it why."""
        self._connection.say_goodbye(reason, cut)

    @contextmanager
    def let_in(self) -> Iterator[None]:
        """Inside, the call is a reason to keep its connection."""
        calls = self._open_calls or _OpenCalls()
        calls.begin()
        try:
            yield
        finally:
            calls.end()

    async def accept(self) -> None:
        """Tell the caller that it is being served, before there is anything to send."""
        await self._run(self._stream.send_initial_metadata())

    async def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await bridge.run(coroutine)
        except (RpcError, *FOREIGN_ERRORS) as error:
            # When the call ends, its handler is cancelled, whatever it was waiting for.
            await trio.lowlevel.checkpoint_if_cancelled()
            raise to_error(error, self._connection, self.peer) from error


class IncomingReport(_IncomingCall[ReceivedReport, ReportFederationResponse]):
    """A cluster that reports."""

    async def receive(self) -> ReceivedReport | None:
        """The next message; None when the agent has said that this was all."""
        return await self._run(self._stream.recv_message())

    async def answer(self) -> None:
        """Tell the agent that everything was taken."""
        await self._run(self._stream.send_message(ReportFederationResponse()))


class IncomingWatch(_IncomingCall[WatchFederationRequest, FederationBroadcast | EncodedBroadcast]):
    """A cluster that watches."""

    async def request(self) -> WatchFederationRequest:
        """What it asks for."""
        message = await self._run(self._stream.recv_message())
        return message if message is not None else WatchFederationRequest()

    async def send(self, message: FederationBroadcast | EncodedBroadcast) -> None:
        """Send one broadcast; waits while the watcher takes no more."""
        await self._run(self._stream.send_message(message))


class FederationServer:
    """Serves FederationService over streams that it is given.

    `report`, `watch`: handlers, each called in a task of its own per call. An RpcError that one raises is the call's
    status; anything else is logged and the peer is told UNKNOWN. When a handler returns the call ends well.
    `first_call`: seconds after which a connection is ended that has no call that a handler has let in. `cut`: told of
    each connection that was ended because of what its peer did: the peer, what it is, and why in words."""

    def __init__(
        self,
        report: Callable[[IncomingReport], Awaitable[None]],
        watch: Callable[[IncomingWatch], Awaitable[None]],
        settings: ConnectionSettings | None = None,
        first_call: float = math.inf,
        cut: Callable[[str, Cut, str], None] = _ignore_cut,
    ) -> None:
        self._report = report
        self._watch = watch
        self._settings = settings or ConnectionSettings()
        self._first_call = first_call
        self._cut = cut

    async def serve(self, stream: trio.abc.Stream, refusal: RpcError | None = None) -> None:
        """Serve one connection until it ends; `stream` is closed then, and every handler of it has ended. `refusal`:
        how each of its calls ends at once, where the connection should not be there at all; it lasts REFUSED_FOR."""
        peer = peer_name(stream)
        async with trio.open_nursery() as nursery:
            methods = _Methods(self._report, self._watch, nursery, peer, certificate_names(stream), refusal)
            handler = _Handler(methods.mapping(), FederationCodec(), None, _DispatchServerEvents())
            connection = Http2Connection(stream, handler, self._settings, client_side=False)
            methods.connection = connection
            if refusal is not None:
                nursery.start_soon(_end_soon, connection, refusal)
            elif self._first_call < math.inf:
                nursery.start_soon(_end_idle, connection, methods.open_calls, self._first_call)
            try:
                await connection.run()
            finally:
                # grpclib's tasks end first: they cancel ours, which the nursery then waits for.
                with trio.move_on_after(_HANDLERS_DEADLINE, shield=True):
                    await bridge.run(handler.wait_closed())
                nursery.cancel_scope.cancel()
                log.debug("connection_ended", peer=peer, reason=connection.ended)
                if connection.cut is not None:
                    self._cut(peer, connection.cut, connection.ended)


async def _end_idle(connection: Http2Connection, calls: _OpenCalls, seconds: float) -> None:
    """End a connection that has had no call for so long that was let in: one that is refused again and again takes the
    place of others."""
    while True:
        await calls.none.wait()
        await trio.sleep_until(calls.none_since + seconds)
        if calls.none.is_set() and trio.current_time() >= calls.none_since + seconds:
            connection.say_goodbye(f"no call that was let in within {seconds:g} s", Cut.NO_CALL)
            return


async def _end_soon(connection: Http2Connection, refusal: RpcError) -> None:
    await trio.sleep(REFUSED_FOR)
    connection.say_goodbye(refusal.message)


#: what a request over HTTP/2 consists of beside its headers; the first may be left out
_PARTS = [":authority", ":method", ":path", ":scheme"]
#: headers that are about a connection, of which HTTP/2 has none
_OF_CONNECTIONS = {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"}


def _is_malformed(headers: Sequence[tuple[str, str]]) -> bool:
    """Whether this is no request (RFC 9113, 8.2 and 8.3), and ends its stream. h2's own check would end the connection,
    without a reason, and also over a blank at the end of a credential, of which `identity.py` tells what is wrong."""
    names = [name for name, _ in headers]
    parts = [name for name in names if name.startswith(":")]
    return (
        names[: len(parts)] != parts
        or sorted(parts) not in (_PARTS, _PARTS[1:])
        or (":path", "") in headers
        or any(name != name.lower() or name in _OF_CONNECTIONS for name in names)
    )


def _is_about_us(record: logging.LogRecord) -> bool:
    """Whether a line of grpclib's is about our handlers. With "Server error" and a traceback it tells of requests that
    it stumbled over, and of answers to peers that had broken the connection: any stranger can have it say so, as often
    as they like."""
    return record.msg != "Server error"


logging.getLogger("grpclib.server").addFilter(_is_about_us)


class _Handler(grpclib.server.Handler):
    """grpclib's, which starts a task per call, and here leaves nothing of a call behind."""

    def accept(self, stream: Stream, headers: Any, release_stream: Callable[[], Any]) -> None:
        if _is_malformed(headers):
            release_stream()
            reset_unfinished(stream, ErrorCodes.PROTOCOL_ERROR)
            return
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                release_stream()

        def finish(_: object) -> None:
            # A task that is cancelled before its first step does not release its stream, and so keeps the window that
            # unread data took; one that fails over the call's headers does not end it, and the caller would wait.
            release()
            reset_unfinished(stream)

        # grpclib would have asyncio's loop keep something of every call until the moment that its caller has named,
        # however distant, and however soon the call has ended. Trio forgets what is over.
        with suppress(ValueError):  # one that cannot be read is grpclib's to answer
            deadline = Deadline.from_headers(headers)
            if deadline is not None:
                assert isinstance(stream, LimitedStream)
                stream.time_allowed = deadline.time_remaining()
                headers = [pair for pair in headers if pair[0] != "grpc-timeout"]
        super().accept(stream, headers, release)
        self._tasks[stream].add_done_callback(finish)


class _Methods:
    """Gives grpclib its handlers for one connection, and runs ours as Trio tasks in the connection's nursery."""

    connection: Http2Connection

    def __init__(
        self,
        report: Callable[[IncomingReport], Awaitable[None]],
        watch: Callable[[IncomingWatch], Awaitable[None]],
        nursery: trio.Nursery,
        peer: str,
        names: Sequence[tuple[str, str]],
        refusal: RpcError | None,
    ) -> None:
        self._report = report
        self._watch = watch
        self._nursery = nursery
        self._peer = peer
        self._names = names
        self._refusal = refusal
        self.open_calls = _OpenCalls()

    def mapping(self) -> dict[str, MethodHandler]:
        """By path: grpclib's record of each method of the generated service, with our function in it, and what it
        receives in our form."""
        functions = {
            Cardinality.STREAM_UNARY: (self._serve_report, ReceivedReport),
            Cardinality.UNARY_STREAM: (self._serve_watch, WatchFederationRequest),
        }
        return {
            path: method._replace(func=functions[method.cardinality][0], request_type=functions[method.cardinality][1])
            for path, method in FederationServiceBase().__mapping__().items()
        }

    async def _serve_report(self, stream: grpclib.server.Stream[Any, Any]) -> None:
        await self._serve(self._report, self._incoming(IncomingReport, stream))

    async def _serve_watch(self, stream: grpclib.server.Stream[Any, Any]) -> None:
        await self._serve(self._watch, self._incoming(IncomingWatch, stream))

    def _incoming(self, kind: type[_Call], stream: grpclib.server.Stream[Any, Any]) -> _Call:
        return kind(stream, self.connection, self._peer, self._names, self.open_calls)

    async def _serve(self, function: Callable[[_Call], Awaitable[None]], call: _Call) -> None:
        """asyncio's half: grpclib cancels it when the stream ends."""
        if self._refusal is not None:
            raise to_status(self._refusal) from self._refusal
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        scope = trio.CancelScope(deadline=trio.current_time() + call.time_allowed)
        self._nursery.start_soon(self._run, function, call, scope, future)
        try:
            await future
        except asyncio.CancelledError:
            scope.cancel()
            raise
        except RpcError as error:
            raise to_status(error) from error

    async def _run(
        self,
        function: Callable[[_Call], Awaitable[None]],
        call: _Call,
        scope: trio.CancelScope,
        future: asyncio.Future[None],
    ) -> None:
        """Trio's half. What a handler raises is its call's business and never another call's."""
        try:
            with scope:
                await function(call)
        except Exception as error:
            if not future.done():
                future.set_exception(error)
            elif not isinstance(error, RpcError):
                log.exception("handler_failed_late", peer=self._peer)
        finally:
            if not future.done():
                if scope.cancelled_caught:
                    future.set_exception(DeadlineExceeded("the time that the caller has given this call is over"))
                elif sys.exc_info()[0] is not None:
                    future.cancel()
                else:
                    future.set_result(None)

"""HTTP/2 over any Trio stream: grpclib's protocol object, driven by Trio tasks. One connection is one call of
`Http2Connection.run`: it reads, writes, keeps the connection alive, notices when the peer falls silent, and leaves
nothing behind. It is the same for sockets, TLS and memory. What the frames mean is grpclib's and h2's business.

grpclib's own transports (asyncio's) are not used: they wait for a peer that does not read before they report a closed
connection, and turn an error in a protocol callback into a crash of the loop."""

from __future__ import annotations

import asyncio
import enum
import math
import ssl
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import trio
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import AbstractHandler, Buffer, Connection, EventsProcessor, H2Protocol, Stream
from grpclib.utils import Wrapper
from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, Event, RequestReceived, StreamReset
from h2.exceptions import FrameTooLargeError, TooManyStreamsError
from h2.settings import SettingCodes, Settings
from h2.stream import StreamState
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, SettingsFrame

from trio_federation.rpc.floods import BudgetedFrames, FloodError, FrameBudget, FrameHeads, too_many
from trio_federation.tls import broken_by
from trio_federation.wire import MAX_RECEIVE

#: Bytes that wait for the socket before senders are made to wait. Small, so that a peer that does not read is noticed
#: early and what is meant for it is conflated instead of queued.
HIGH_WATER = 64 * 1024
LOW_WATER = 16 * 1024
#: Bytes that wait for the socket at which the connection is given up. Senders wait long before, so what has piled up is
#: answers to a peer that asks for signs of life and does not read them.
MOST_WAITING = 1024 * 1024
#: Bytes of which a peer has to take at least so many within the silence limit.
WRITE_SIZE = 16 * 1024
#: Bytes read from the stream in one step.
READ_SIZE = 64 * 1024
#: Seconds for which a closing connection may still write what it has.
CLOSE_DEADLINE = 1.0
#: Bytes of a reason that are told a peer whose connection is ended.
MAX_REASON = 500
#: HEADERS frames that are read in one go, before others have their turn: it takes some 50 µs to read the headers of one
#: call, and as much to begin it.
HEADERS_AT_ONCE = 16
#: Bytes of headers that are taken in one request.
MAX_HEADERS = 16 * 1024
#: Bytes of data that are sent in one frame, and of headers that are remembered to shorten later ones, whatever more a
#: peer offers.
MAX_FRAME = 16 * 1024
MAX_HEADER_TABLE = 4096
#: Calls that a peer may have open at once on one connection.
MAX_STREAMS = 100
#: What a client's side of a connection begins with.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: The connection's own receive window: it must not be what limits a stream.
CONNECTION_WINDOW = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How one connection is kept. Times in seconds."""

    #: ask for a sign of life after so long without one
    keepalive: float = 5.0
    #: give the connection up after so long without one
    silence_limit: float = 15.0
    #: bytes in flight towards us on one stream
    stream_window: int = 64 * 1024
    #: bytes of one message that are taken; more is refused at its length prefix
    max_message: int = MAX_RECEIVE


class _Bytes(Buffer):
    """What has come in of a stream and is not read yet. grpclib keeps every piece by itself, in objects of some hundred
    bytes each, so that a message in pieces of a byte would take up hundreds of times its size."""

    def __init__(self, ack_callback: Callable[[int], None]) -> None:
        super().__init__(ack_callback)
        self._bytes = bytearray()
        #: of these, so many still take up the sender's window
        self._not_given_back = 0
        self._more = asyncio.Event()
        #: trio's time at which any of it came in last
        self.last_received = -math.inf

    def add(self, data: bytes, ack_size: int) -> None:
        self.last_received = trio.current_time()
        self._bytes += data
        self._not_given_back += len(data)
        if ack_size > len(data):
            self._ack_callback(ack_size - len(data))  # padding, which nobody reads
        self._more.set()

    def eof(self) -> None:
        self._eof = True
        self._more.set()

    async def read(self, size: int) -> bytes:
        while len(self._bytes) < size and not self._eof:
            # Who waits for more than a window holds has to give back what it waits with.
            self._give_back(self._not_given_back)
            self._more.clear()
            await self._more.wait()
        if len(self._bytes) < size:
            if not self._bytes:
                return b""
            raise AssertionError("Received less data than expected")
        taken = bytes(self._bytes[:size])
        del self._bytes[:size]
        self._give_back(self._not_given_back - len(self._bytes))
        return taken

    def unacked_size(self) -> int:
        size, self._not_given_back = self._not_given_back, 0
        return size

    def _give_back(self, size: int) -> None:
        if size > 0:
            self._not_given_back -= size
            self._ack_callback(size)


class LimitedStream(Stream):
    """A stream that refuses a message at its length prefix, before anything of it is read, and whose end is noticed by
    everybody who waits for something of it."""

    max_message = MAX_RECEIVE
    #: seconds that a call may take, from its beginning
    time_allowed = math.inf

    def init_stream(self, stream_id: int, connection: Connection) -> None:
        super().init_stream(stream_id, connection)
        self.buffer = _Bytes(partial(connection.ack, stream_id))

    async def recv_data(self, size: int) -> bytes:
        if size > self.max_message:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"a message of {size} bytes is too large, at most {self.max_message} are taken",
            )
        return await super().recv_data(size)

    def __ended__(self) -> None:
        super().__ended__()
        # Headers and trailers that have not come by now never will; who waits for them fails on finding none.
        self.headers_received.set()
        self.trailers_received.set()


class _Gate(asyncio.Event):
    """Open while bytes may be written. Once the connection has ended, whoever waits, or comes, is told so, of which not
    everybody in grpclib who waits here would hear otherwise."""

    _broken = False

    def fail(self) -> None:
        self._broken = True
        self.set()

    async def wait(self) -> Literal[True]:
        await super().wait()
        # Another one that waited may have filled the buffer again since this one was woken.
        while not self._broken and not self.is_set():
            await super().wait()
        if self._broken:
            raise ConnectionError("the connection is closed")
        return True


class _InOrder(dict["asyncio.Task[Any]", None]):
    """The tasks that grpclib cancels when a stream ends, in the order of their coming: a set's differs from run to run,
    and with it which of the callers of a stream hears of its end first."""

    def add(self, task: asyncio.Task[Any]) -> None:
        self[task] = None

    def discard(self, task: asyncio.Task[Any]) -> None:
        self.pop(task, None)


class _Connection(Connection):
    max_message = MAX_RECEIVE

    def __init__(self, connection: H2Connection, transport: asyncio.Transport, *, config: Configuration) -> None:
        super().__init__(connection, transport, config=config)
        self._gate = self.write_ready = _Gate()
        self._gate.set()

    def close(self) -> None:
        super().close()
        self._gate.fail()
        self.stream_close_waiter.set()

    def flush(self) -> None:
        if not self.is_closing():
            super().flush()

    def create_stream(self, *, stream_id: int | None = None, wrapper: Wrapper | None = None) -> Stream:
        if wrapper is not None:
            wrapper._tasks = _InOrder.fromkeys(wrapper._tasks)  # type: ignore[assignment]
        stream = LimitedStream(self, self._connection, self._transport, stream_id=stream_id, wrapper=wrapper)
        stream.max_message = self.max_message
        return stream


class _Processor(EventsProcessor):
    goaway: ConnectionTerminated | None = None

    def process(self, event: Event) -> None:
        # A frame or an event of a kind that grpclib does not know is not an error: HTTP/2 tells to ignore it.
        if event.__class__ in getattr(self, "processors", ()):
            super().process(event)

    def process_data_received(self, event: DataReceived) -> None:
        # grpclib takes an empty frame for the end of the stream, of which h2 tells in an event of its own.
        if event.flow_controlled_length:
            super().process_data_received(event)

    def process_connection_terminated(self, event: ConnectionTerminated) -> None:
        self.goaway = event
        super().process_connection_terminated(event)


class _H2(H2Connection):
    """h2's, but frames that carry nothing are counted, a peer's offers are taken up only so far, and a goodbye is only
    told: h2 closes with it, and then makes an error of what follows it, as it does from servers that end their calls
    after it, and with that error it forgets the goodbye."""

    def __init__(self, config: H2Configuration) -> None:
        super().__init__(config)
        self.budget = FrameBudget()
        self.incoming_buffer = BudgetedFrames(self.budget, trio.current_time, server=not config.client_side)

    def _prepare_for_sending(self, frames: list[Frame]) -> None:
        for frame in frames:
            self.budget.sent(frame)
        super()._prepare_for_sending(frames)

    def _receive_settings_frame(self, frame: SettingsFrame) -> tuple[list[Frame], list[Event]]:
        result = super()._receive_settings_frame(frame)
        # Larger frames would fill the buffer in one go, and a larger table keeps every header that was ever sent.
        self.max_outbound_frame_size = min(self.max_outbound_frame_size, MAX_FRAME)
        if self.encoder.header_table_size > MAX_HEADER_TABLE:
            self.encoder.header_table_size = MAX_HEADER_TABLE
        return result

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        event = ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        event.additional_data = frame.additional_data or None
        return [], [event]


class _Protocol(H2Protocol):
    """grpclib's protocol, with our windows and limits."""

    h2: _H2
    processor: _Processor

    def __init__(self, handler: AbstractHandler, settings: ConnectionSettings, *, client_side: bool) -> None:
        super().__init__(
            handler,
            Configuration(),
            H2Configuration(
                client_side=client_side,
                header_encoding="ascii",
                # grpclib's own choice for speed; what is wrong in a header ends that call, not the process
                validate_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_inbound_headers=False,
                normalize_outbound_headers=False,
            ),
        )
        self._settings = settings
        self._heads = FrameHeads(0 if client_side else len(_PREFACE))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.h2 = _H2(config=self.h2_config)
        client_side = bool(self.h2_config.client_side)
        values = {
            SettingCodes.INITIAL_WINDOW_SIZE: self._settings.stream_window,
            SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADERS,
        }
        if client_side:
            values[SettingCodes.ENABLE_PUSH] = 0
        self.h2.local_settings = Settings(client=client_side, initial_values=values)
        self.h2.decoder.max_header_list_size = MAX_HEADERS
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(CONNECTION_WINDOW - 65535)
        self.connection = _Connection(self.h2, transport, config=self.config)
        self.connection.max_message = self._settings.max_message
        self.connection.flush()
        self.processor = _Processor(self.handler, self.connection)

    def look_ahead(self, data: bytes) -> list[int]:
        """Where to part what has come in so that reading no part of it takes long. Raises what reading all of it would
        end in, a flood or more calls than may be open, so that it need not be read for that."""
        # `opened` is never too high: an end is counted also where the call stays open in the other direction. The
        # parts end behind a head, not behind a frame: h2 keeps what is not complete.
        weightless = opened = 0
        headers = []
        most = self.h2.budget.can_pay(trio.current_time())
        for head in self._heads.find(data):
            if head.kind != DataFrame.type:
                weightless += 1
                if weightless > most:
                    raise FloodError(too_many(head.kind))
            if head.kind == HeadersFrame.type:
                headers.append(head.position)
                opened += 1
            opened -= head.ends
        if opened > HEADERS_AT_ONCE and opened + self.h2.open_inbound_streams > MAX_STREAMS:
            raise TooManyStreamsError(f"more than {MAX_STREAMS} calls would be open")
        return headers[HEADERS_AT_ONCE::HEADERS_AT_ONCE]

    def data_received(self, data: bytes) -> None:
        # As grpclib's, but what breaks the protocol is raised, so that it can be told.
        events = self.connection.feed(data)
        self.connection.flush()
        for event in self._without_resets(events):
            self.processor.process(event)
        self.connection.flush()
        # h2 looks at the length of a frame when it has all of it, which may be 16 MiB.
        length = int.from_bytes(self.h2.incoming_buffer._data[:3], "big")
        if length > self.h2.max_inbound_frame_size:
            raise FrameTooLargeError(f"a frame of {length} bytes, at most {self.h2.max_inbound_frame_size} are taken")

    def _without_resets(self, events: list[Event]) -> list[Event]:
        """Leave out calls that are over before anybody could serve them."""
        reset = {event.stream_id for event in events if isinstance(event, StreamReset)}
        if not reset:
            return events
        reset &= {event.stream_id for event in events if isinstance(event, RequestReceived)}
        kept = []
        for event in events:
            if getattr(event, "stream_id", None) not in reset:
                kept.append(event)
            elif isinstance(event, DataReceived) and event.flow_controlled_length:
                self.connection.ack(event.stream_id, event.flow_controlled_length)
        return kept

    def resume_writing(self) -> None:
        super().resume_writing()
        # What was not written while writing was paused: the resets of calls that were given up.
        self.connection.flush()


class Cut(enum.StrEnum):
    """What a peer has done wrong of which this side has ended the connection."""

    #: it has broken HTTP/2, or does not speak it
    PROTOCOL = "protocol"
    #: it sends frames that carry nothing, more than there is a use for
    FLOOD = "flood"
    #: nothing has come from it for the silence limit
    SILENT = "silent"
    #: it does not take what it is sent
    STALLED = "stalled"
    #: it has no call that was let in
    NO_CALL = "no_call"
    #: what it tells arrives when it has run out
    LATE = "late"


#: Told of bytes as they go out and come in: (sent, received).
Traffic: TypeAlias = Callable[[int, int], None]


def ignore_traffic(_sent: int, _received: int) -> None:
    """Nobody wants to know."""


class Http2Connection(asyncio.Transport):
    """One HTTP/2 connection over a Trio stream, from its start to its end.

    To grpclib it is the transport: synchronous `write`, `close`, `is_closing`. To us it is a task, `run`."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        handler: AbstractHandler,
        settings: ConnectionSettings,
        *,
        client_side: bool,
        traffic: Traffic = ignore_traffic,
    ) -> None:
        super().__init__()
        self.protocol = _Protocol(handler, settings, client_side=client_side)
        #: why the connection ended, for people; "" while it lives
        self.ended = ""
        #: what the peer has done of which this side has ended it, where that is so
        self.cut: Cut | None = None
        #: trio's time at which it began, before anything was sent
        self.began = trio.current_time()
        #: trio's time at which bytes of the peer came in first; None before
        self.heard_at: float | None = None
        #: set when bytes of the peer have come in, or the connection has ended
        self.heard = trio.Event()
        #: trio's time at which bytes of the peer came in last
        self.last_received = self.began
        #: whether it is TLS that has ended it
        self.tls_failed = False
        #: set when the connection has ended
        self.closed = trio.Event()
        self._traffic = traffic
        self._stream = stream
        self._settings = settings
        self._scope = trio.CancelScope()
        self._waiting: deque[bytes] = deque()
        self._waiting_size = 0
        self._paused = False
        self._closing = False
        self._something_to_write = trio.Event()

    @property
    def too_many_pings(self) -> bool:
        """Whether the peer ended the connection because it was asked for signs of life too often."""
        goaway = self.protocol.processor.goaway
        return goaway is not None and goaway.error_code == ErrorCodes.ENHANCE_YOUR_CALM

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drive the connection until it ends, for whatever reason; `ended` tells which. Never raises because of the
        peer. On return the stream is closed and every call on it has been told."""
        try:
            with self._scope:
                self.protocol.connection_made(self)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_all)
                    nursery.start_soon(self._watch_silence)
                    nursery.start_soon(self._read_all)
                    task_status.started()
        finally:
            self._closing = True
            self._ended("closed")
            try:
                self.protocol.connection_lost(None)
            finally:
                self.closed.set()
                self.heard.set()
                # Forcefully: everything that was to be written has had its time.
                await trio.aclose_forcefully(self._stream)

    # What grpclib calls.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Queue bytes; the caller is asked to wait (`pause_writing`) while more than HIGH_WATER are queued."""
        if self._closing or not data:
            return
        self._waiting.append(bytes(data))
        self._waiting_size += len(data)
        self._something_to_write.set()
        if self._waiting_size > HIGH_WATER and not self._paused:
            self._paused = True
            self.protocol.pause_writing()
        if self._waiting_size > MOST_WAITING:
            self.abort(f"the peer does not read: {self._waiting_size} bytes wait for it", Cut.STALLED)

    def is_closing(self) -> bool:
        """Whether the connection has ended or is about to."""
        return self._closing

    def close(self) -> None:
        """End the connection once what is queued is written, or CLOSE_DEADLINE is over."""
        if not self._closing:
            self._closing = True
            goaway = self.protocol.processor.goaway
            self._ended("closed by this side" if goaway is None else _goodbye(goaway))
            self._scope.deadline = min(self._scope.deadline, trio.current_time() + CLOSE_DEADLINE)
            self._something_to_write.set()

    def abort(self, reason: str = "aborted", cut: Cut | None = None) -> None:
        """End the connection at once. `cut`: what the peer has done, where it is because of that."""
        self._closing = True
        self._ended(reason, cut)
        self._scope.cancel()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """asyncio's way to ask a transport things; here only `peername`, a line for people."""
        return peer_name(self._stream) if name == "peername" else default

    # Tasks.

    async def _read_all(self) -> None:
        try:
            while data := await self._stream.receive_some(READ_SIZE):
                if trio.current_time() > self.last_received + self._settings.silence_limit:
                    # This process was frozen, or the machine suspended: the bytes may be as old as that, and so may
                    # what they say, whatever age it claims.
                    self._abort_silent()
                    return
                self.last_received = trio.current_time()
                if self.heard_at is None:
                    self.heard_at = self.last_received
                    self.heard.set()
                self._traffic(0, len(data))
                if not await self._take(bytes(data)):
                    return
            self.abort("the peer closed the connection")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._abort_broken(error)

    async def _take(self, data: bytes) -> bool:
        try:
            parts = [0, *self.protocol.look_ahead(data), len(data)]
            for start, end in pairwise(parts):
                if start:
                    await trio.lowlevel.checkpoint()
                self.protocol.data_received(data[start:end])
        except Exception as error:
            # h2 and grpclib answer some forms of nonsense with whatever exception they hit first.
            if isinstance(error, FloodError):
                self._ended(f"the peer sent {error}", Cut.FLOOD)
            elif self.protocol.h2.incoming_buffer._data.startswith(b"HTTP/"):
                self._ended("the other side speaks HTTP/1: not a gRPC endpoint?", Cut.PROTOCOL)
            else:
                self._ended(f"the peer broke HTTP/2: {type(error).__name__}: {one_line(str(error))}", Cut.PROTOCOL)
            self._say_goodbye(getattr(error, "error_code", ErrorCodes.PROTOCOL_ERROR))
            self.close()
            return False
        return True

    def say_goodbye(self, reason: str, cut: Cut | None = None) -> None:
        """End the connection, and tell the peer why, in the words that come with HTTP/2's GOAWAY. `cut`: what the peer
        has done, where it is because of that."""
        if not self._closing:
            h2 = self.protocol.h2
            if h2.state_machine.state is not ConnectionState.CLOSED:
                h2.close_connection(ErrorCodes.NO_ERROR, additional_data=reason.encode("utf-8")[:MAX_REASON])
                self.protocol.connection.flush()
            self._ended(reason, cut)
            self.close()

    def _say_goodbye(self, code: ErrorCodes) -> None:
        """Tell a peer that has broken the protocol, and how; h2 may have done so itself."""
        h2 = self.protocol.h2
        if h2.state_machine.state is not ConnectionState.CLOSED:
            h2.close_connection(code)
        self.protocol.connection.flush()

    async def _write_all(self) -> None:
        try:
            while True:
                if not self._waiting:
                    if self._closing:
                        self._scope.cancel()
                        return
                    self._something_to_write = trio.Event()
                    await self._something_to_write.wait()
                    continue
                data = b"".join(self._waiting)
                self._waiting.clear()
                if not await self._write(data):
                    return
                self._traffic(len(data), 0)
                # Only what the stream has taken makes room; what came meanwhile waits in the queue.
                self._waiting_size -= len(data)
                if self._paused and self._waiting_size <= LOW_WATER:
                    self._paused = False
                    self.protocol.resume_writing()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._abort_broken(error)

    async def _write(self, data: bytes) -> bool:
        """Write bytes; False, with the connection ended, where the peer does not take them."""
        view = memoryview(data)
        for start in range(0, len(data), WRITE_SIZE):
            with trio.move_on_after(self._settings.silence_limit) as scope:
                await self._stream.send_all(view[start : start + WRITE_SIZE])
            if scope.cancelled_caught:
                self.abort(
                    f"the peer has not taken {WRITE_SIZE} bytes within {self._settings.silence_limit:g} s", Cut.STALLED
                )
                return False
        return True

    async def _watch_silence(self) -> None:
        asked = 0
        while True:
            # Moments are compared, never differences: those may round to just below what was slept for.
            await trio.sleep_until(self.last_received + self._settings.keepalive)
            while trio.current_time() >= self.last_received + self._settings.keepalive:
                if self._closing:
                    return  # h2 takes no ping any more
                given_up_at = self.last_received + self._settings.silence_limit
                if trio.current_time() >= given_up_at:
                    self._abort_silent()
                    return
                asked += 1
                self.protocol.h2.ping(struct.pack("!Q", asked))
                self.protocol.connection.flush()
                await trio.sleep_until(min(trio.current_time() + self._settings.keepalive, given_up_at))

    def _abort_silent(self) -> None:
        self.abort(f"silent for {self._settings.silence_limit:g} s", Cut.SILENT)

    def _abort_broken(self, error: Exception) -> None:
        self.tls_failed = isinstance(error.__cause__, ssl.SSLError)
        self.abort(one_line(broken_by(error)))

    def _ended(self, reason: str, cut: Cut | None = None) -> None:
        if not self.ended:
            self.ended = reason
            self.cut = cut


def peer_name(stream: trio.abc.Stream) -> str:
    """The other end of a stream, for people: address and port where it has one."""
    inner = stream
    while isinstance(inner, trio.SSLStream):
        inner = inner.transport_stream
    if isinstance(inner, trio.SocketStream):
        try:
            name = inner.socket.getpeername()
        except OSError:
            return "a peer that is gone"
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
    return getattr(inner, "name", "memory")


def reset_unfinished(stream: Stream, code: ErrorCodes = ErrorCodes.INTERNAL_ERROR) -> None:
    """Reset a server's stream whose response has not ended, so that its caller does not wait for the rest."""
    if stream.closable:
        assert stream.id is not None
        state = stream._h2_connection.streams[stream.id].state_machine.state
        if state in (StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE):
            stream.reset_nowait(code)


def last_received(stream: Stream) -> float:
    """trio's time at which anything of a message came in last on a stream; infinitely long ago where nothing has."""
    return stream.buffer.last_received if isinstance(stream.buffer, _Bytes) else -math.inf


def one_line(text: str, most: int = 500) -> str:
    """What a peer says, fit for a line of a log: no line breaks, no control characters, at most `most` characters."""
    line = " ".join(text.split())
    line = "".join(character if character.isprintable() else "\ufffd" for character in line)
    return line if len(line) <= most else line[: most - 1] + "…"


def _goodbye(goaway: ConnectionTerminated) -> str:
    detail = one_line((goaway.additional_data or b"").decode("utf-8", "replace"))
    return f"the peer said goodbye ({_error_name(goaway.error_code)}{': ' if detail else ''}{detail})"


def _error_name(code: int | None) -> str:
    return next((known.name for known in ErrorCodes if known == code), f"code {code}")

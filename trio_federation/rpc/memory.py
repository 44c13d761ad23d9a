"""An in-memory link: two Trio streams that carry bytes to each other without a socket, for tests on virtual time and
for a hub and an agent in one process. Buffers are bounded, like a socket's, so that a reader that stalls makes the
writer wait. Whoever owns the link can cut it, hold either direction, have bytes take time on their way, and hear for
how long those that were read had been on their way. How a network of such links behaves is its owner's business."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import trio

#: Draws how many seconds the bytes of one write are on their way.
Transit = Callable[[], float]
#: Told, at a read, at which end, and how many seconds the bytes had been on their way, where it was any time at all.
Waited: TypeAlias = Callable[[Literal["client", "server"], float], None]

#: Bytes that a link carries without a flow control above it in the way: a quarter of the smallest window that a
#: connection has (HTTP/2's first one, 65,535 bytes, of which a reader may keep half to itself).
_AT_EASE = 16 * 1024


class Carried(NamedTuple):
    """What has been written into one direction of a link since it was made."""

    #: how many bytes
    size: int
    #: the CRC-32 of all of them, in their order
    checksum: int


class _Chunk:
    """Bytes that were written in one moment, and arrive in one."""

    __slots__ = ("arrives_at", "size", "written_at")

    def __init__(self, written_at: float, arrives_at: float, size: int) -> None:
        self.written_at = written_at
        self.arrives_at = arrives_at
        self.size = size


class _Rest:
    """Since when a link has had anything on its way, in either direction, and how many bytes it has carried since."""

    def __init__(self) -> None:
        self.since = -math.inf
        self.carried = 0
        #: bytes in both pipes, and writers who wait for room in them
        self.under_way = 0
        self.writers = 0


class _Pipe:
    """Bytes one way. `held`: what is written stays in the pipe; the reader waits. `transit`: how long it is on its way;
    None: it is there at once."""

    def __init__(self, capacity: int, rest: _Rest, waited: Callable[[float], None] | None) -> None:
        self.capacity = capacity
        self.held = False
        self.transit: Transit | None = None
        self.carried = Carried(0, 0)
        self._rest = rest
        self._at_ease = min(_AT_EASE, capacity)
        self._waited = waited
        self._bytes = bytearray()
        #: how the bytes in the pipe came there, the oldest first
        self._chunks: deque[_Chunk] = deque()
        self._arrives_last = -math.inf
        self._ended = False
        self._broken = False
        #: the pipe that carries word to the writer of ours that the reader is gone; None while the reader is there
        self._word_of_reader: _Pipe | None = None
        self._changed = trio.Event()

    def wake(self) -> None:
        """Have everybody who waits look again."""
        self._changed.set()
        self._changed = trio.Event()

    def end(self) -> None:
        """The writer says no more. That, too, takes its time to arrive."""
        if not self._ended:
            self._ended = True
            self._arrives_last = self._arrival(trio.current_time())
        self.wake()

    def close_reader(self, back: _Pipe) -> None:
        """Nobody reads any more. The writer hears of it once word of that has come over `back`."""
        if self._word_of_reader is None:
            self._word_of_reader = back
            self._drop()

    def break_off(self) -> None:
        """Both ends are told that the link is broken, and what was on its way is lost."""
        self._broken = True
        self._drop()

    def hold(self, held: bool) -> None:
        """Hold what is in the pipe, or let it go."""
        self.held = held
        self.wake()

    @property
    def is_over(self) -> bool:
        """Whether nothing is written or read any more."""
        return self._broken or (self._ended and self._word_of_reader is not None)

    @property
    def writable(self) -> bool:
        """Whether a write would be taken, or told that it is not, at once."""
        return self._is_broken or self._ended or len(self._bytes) < self.capacity

    async def wait_writable(self) -> None:
        """Wait until that is so."""
        while not self.writable:
            await self._wait_for_room()

    async def write(self, data: bytes) -> None:
        """Put bytes into the pipe; waits while it is full."""
        view = self._write_some(memoryview(data))
        if not view:
            return
        self._rest.writers += 1
        try:
            while view:
                await self._wait_for_room()
                view = self._write_some(view)
        finally:
            self._rest.writers -= 1

    async def read(self, most: int | None) -> bytes:
        """Take bytes out that have arrived, b"" at the end; waits while there are none."""
        while True:
            if self._word_of_reader is not None:
                raise trio.ClosedResourceError("this end was closed")
            if self._broken:
                raise trio.BrokenResourceError("the link is cut")
            if not self.held:
                if self._chunks and (data := self._take(most)):
                    self.wake()
                    return data
                if self._ended and not self._chunks and self._arrives_last <= trio.current_time():
                    return b""
            await self._wait_for_arrival()

    # Inside.

    def _write_some(self, view: memoryview) -> memoryview:
        """Put in what there is room for. Returns the rest."""
        if self._ended:
            raise trio.ClosedResourceError("this end was closed")
        if self._is_broken:
            raise trio.BrokenResourceError("the link is cut")
        room = self.capacity - len(self._bytes)
        if room > 0 and view:
            self._put(view[:room])
            self.wake()
        return view[max(room, 0) :]

    @property
    def _is_broken(self) -> bool:
        """Whether the writer has been told that it writes in vain."""
        back = self._word_of_reader
        return self._broken or (back is not None and not back.held and back._arrives_last <= trio.current_time())

    async def _wait_for_room(self) -> None:
        back = self._word_of_reader
        with trio.move_on_at(math.inf if back is None or back.held else back._arrives_last):
            await self._changed.wait()

    async def _wait_for_arrival(self) -> None:
        arrival = math.inf
        if not self.held and (self._chunks or self._ended):
            arrival = self._chunks[0].arrives_at if self._chunks else self._arrives_last
        with trio.move_on_at(arrival):
            await self._changed.wait()

    def _arrival(self, now: float) -> float:
        """When what is written now arrives: nothing overtakes what was written before it."""
        return max(self._arrives_last, now + self.transit() if self.transit is not None else now)

    def _put(self, piece: memoryview) -> None:
        now, size = trio.current_time(), len(piece)
        self._bytes += piece
        self.carried = Carried(self.carried.size + size, zlib.crc32(piece, self.carried.checksum))
        self._arrives_last = self._arrival(now)
        latest = self._chunks[-1] if self._chunks else None
        if latest is not None and latest.written_at == now and latest.arrives_at == self._arrives_last:
            latest.size += size
        else:
            self._chunks.append(_Chunk(now, self._arrives_last, size))
        rest = self._rest
        if not rest.under_way and not rest.writers:
            rest.since, rest.carried = now, 0
        rest.carried += size
        rest.under_way += size

    def _take(self, most: int | None) -> bytes:
        """Remove and return bytes that have arrived, at most so many; b"" where none have."""
        now = trio.current_time()
        wanted = len(self._bytes) if most is None else most
        oldest, size = self._chunks[0].written_at, 0
        while self._chunks and size < wanted and self._chunks[0].arrives_at <= now:
            chunk = self._chunks[0]
            if chunk.size > wanted - size:
                chunk.size -= wanted - size
                size = wanted
            else:
                size += chunk.size
                self._chunks.popleft()
        data = bytes(self._bytes[:size])
        if size:
            del self._bytes[:size]
            self._rest.under_way -= size
            if self._waited is not None:
                # What has carried so much without coming to rest may have kept somebody from writing, whose bytes were
                # to be on their way before they were in the pipe.
                since = oldest if self._rest.carried < self._at_ease else min(oldest, self._rest.since)
                if now > since:
                    self._waited(now - since)
        return data

    def _drop(self) -> None:
        self._rest.under_way -= len(self._bytes)
        self._bytes.clear()
        self._chunks.clear()
        self.wake()


class _End(trio.abc.HalfCloseableStream):
    def __init__(self, name: str, incoming: _Pipe, outgoing: _Pipe) -> None:
        #: how the other end appears in logs
        self.name = name
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False
        self._sending = _OneAtATime("another task is sending")
        self._receiving = _OneAtATime("another task is receiving")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._sending:
            await trio.lowlevel.checkpoint()
            await self._outgoing.write(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending:
            await trio.lowlevel.checkpoint()
            if not self._closed:
                await self._outgoing.wait_writable()
            if self._closed:
                raise trio.ClosedResourceError("this end was closed")

    async def send_eof(self) -> None:
        with self._sending:
            await trio.lowlevel.checkpoint()
            if self._closed:
                raise trio.ClosedResourceError("this end was closed")
            self._outgoing.end()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        with self._receiving:
            await trio.lowlevel.checkpoint()
            if max_bytes is not None:
                if not isinstance(max_bytes, int):
                    raise TypeError("max_bytes must be a whole number")
                if max_bytes < 1:
                    raise ValueError("max_bytes must be at least 1")
            return await self._incoming.read(max_bytes)

    async def aclose(self) -> None:
        self._closed = True
        self._outgoing.end()
        self._incoming.close_reader(self._outgoing)
        await trio.lowlevel.checkpoint()


class _OneAtATime:
    """A stream's two directions may be used by two tasks, each direction by one at a time, as Trio asks for."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._busy = False

    def __enter__(self) -> None:
        if self._busy:
            raise trio.BusyResourceError(self._message)
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False


class MemoryLink:
    """Two streams, `client` and `server`, joined in memory.

    `capacity`: bytes that fit in each direction before a writer has to wait. `waited`: told for how long bytes had been
    on their way, at every read of such as had been for any time. That is counted from the moment at which they were
    written; or, where the link has carried more than 16 KiB since it was last at rest, from that rest on, as a full
    pipe or a flow control above it may have kept them from being written earlier."""

    def __init__(
        self,
        *,
        client: str = "client",
        server: str = "server",
        capacity: int = 64 * 1024,
        waited: Waited | None = None,
    ) -> None:
        rest = _Rest()
        self._to_server = _Pipe(capacity, rest, None if waited is None else lambda seconds: waited("server", seconds))
        self._to_client = _Pipe(capacity, rest, None if waited is None else lambda seconds: waited("client", seconds))
        self.client = _End(server, self._to_client, self._to_server)
        self.server = _End(client, self._to_server, self._to_client)

    def cut(self) -> None:
        """Break both directions: both ends are told at once."""
        self._to_server.break_off()
        self._to_client.break_off()

    def hold(self, *, to_server: bool, to_client: bool) -> None:
        """Hold or let go of what travels in each direction: bytes, and word that an end was closed. Nothing is lost,
        and nobody is told: writers notice when the pipe is full."""
        self._to_server.hold(to_server)
        self._to_client.hold(to_client)
        # Word of a closed end travels one way, and concerns those who write the other way.
        self._to_server.wake()

    def slow(self, transit: Transit | None) -> None:
        """Have what is written from now on take time on its way, in both directions; None: no longer. What was written
        before arrives before it."""
        self._to_server.transit = self._to_client.transit = transit

    @property
    def is_over(self) -> bool:
        """Whether nothing will ever be carried any more: it was cut, or both ends were closed."""
        return self._to_server.is_over and self._to_client.is_over

    @property
    def to_server(self) -> Carried:
        """What the client has written."""
        return self._to_server.carried

    @property
    def to_client(self) -> Carried:
        """What the server has written."""
        return self._to_client.carried

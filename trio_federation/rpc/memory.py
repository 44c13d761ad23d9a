"""An in-memory link: two Trio streams that carry bytes to each other without a socket, for tests on virtual time and
for a hub and an agent in one process. Buffers are bounded, like a socket's, so that a reader that stalls makes the
writer wait. Whoever owns the link can cut it, hold either direction, and have bytes take time on their way."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import trio

#: Draws how many seconds the bytes of one write are on their way.
Transit = Callable[[], float]


class Carried(NamedTuple):
    """What has been written into one direction of a link since it was made."""

    #: how many bytes
    size: int
    #: the CRC-32 of all of them, in their order
    checksum: int


class _Pipe:
    """Bytes one way. `held`: what is written stays in the pipe; the reader waits. `transit`: how long it is on its way;
    None: it is there at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = False
        self.transit: Transit | None = None
        self.carried = Carried(0, 0)
        self._bytes = bytearray()
        #: the latest of the bytes that are still on their way: when they arrive, and how many they are
        self._travelling: deque[tuple[float, int]] = deque()
        self._arrives_last = -math.inf
        self._ended = False
        self._broken = False
        self._reader_gone = False
        self._changed = trio.Event()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    @property
    def waiting(self) -> int:
        """Bytes in the pipe."""
        return len(self._bytes)

    def end(self) -> None:
        self._ended = True
        self._wake()

    def close_reader(self) -> None:
        self._reader_gone = True
        self._drop()

    def break_off(self) -> None:
        self._broken = True
        self._drop()

    def _drop(self) -> None:
        self._bytes.clear()
        self._travelling.clear()
        self._wake()

    def hold(self, held: bool) -> None:
        self.held = held
        self._wake()

    @property
    def writable(self) -> bool:
        return self._broken or self._reader_gone or self._ended or len(self._bytes) < self.capacity

    async def wait_writable(self) -> None:
        while not self.writable:
            await self._changed.wait()

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while True:
            if self._ended:
                raise trio.ClosedResourceError("this end was closed")
            if self._broken or self._reader_gone:
                raise trio.BrokenResourceError("the link is cut")
            room = self.capacity - len(self._bytes)
            if room > 0 and view:
                self._put(view[:room])
                view = view[room:]
                self._wake()
            if not view:
                return
            await self._changed.wait()

    def _put(self, piece: memoryview) -> None:
        self._bytes += piece
        self.carried = Carried(self.carried.size + len(piece), zlib.crc32(piece, self.carried.checksum))
        if self.transit is not None or self._travelling:
            # Nothing overtakes what was written before it.
            seconds = self.transit() if self.transit is not None else 0.0
            self._arrives_last = max(self._arrives_last, trio.current_time() + seconds)
            self._travelling.append((self._arrives_last, len(piece)))

    def _arrived(self) -> int:
        """How many bytes have arrived."""
        while self._travelling and self._travelling[0][0] <= trio.current_time():
            self._travelling.popleft()
        return len(self._bytes) - sum(size for _, size in self._travelling)

    async def _wait_for_change(self) -> None:
        with trio.move_on_at(self._travelling[0][0] if self._travelling and not self.held else math.inf):
            await self._changed.wait()

    async def read(self, most: int | None) -> bytes:
        while True:
            if self._reader_gone:
                raise trio.ClosedResourceError("this end was closed")
            if self._broken:
                raise trio.BrokenResourceError("the link is cut")
            if self._bytes and not self.held and (arrived := self._arrived()):
                data = bytes(self._bytes[: arrived if most is None else min(arrived, most)])
                del self._bytes[: len(data)]
                self._wake()
                return data
            if self._ended and not self._bytes and not self.held:
                return b""
            await self._wait_for_change()


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
        self._incoming.close_reader()
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

    `capacity`: bytes that fit in each direction before a writer has to wait."""

    def __init__(self, *, client: str = "client", server: str = "server", capacity: int = 64 * 1024) -> None:
        self._to_server = _Pipe(capacity)
        self._to_client = _Pipe(capacity)
        self.client = _End(server, self._to_client, self._to_server)
        self.server = _End(client, self._to_server, self._to_client)

    def cut(self) -> None:
        """Break both directions: both ends are told at once."""
        self._to_server.break_off()
        self._to_client.break_off()

    def hold(self, *, to_server: bool, to_client: bool) -> None:
        """Hold or let go of what travels in each direction. Nothing is lost, and nobody is told: writers notice when
        the pipe is full."""
        self._to_server.hold(to_server)
        self._to_client.hold(to_client)

    def slow(self, transit: Transit | None) -> None:
        """Have what is written from now on take time on its way, in both directions; None: no longer. What was written
        before arrives before it."""
        self._to_server.transit = self._to_client.transit = transit

    @property
    def to_server(self) -> Carried:
        """What the client has written."""
        return self._to_server.carried

    @property
    def to_client(self) -> Carried:
        """What the server has written."""
        return self._to_client.carried

"""An in-memory link: two Trio streams that carry bytes to each other without a socket, for tests on virtual time and
for a hub and an agent in one process. Buffers are bounded, like a socket's, so that a reader that stalls makes the
writer wait. The link can be cut, and either direction held, by whoever owns it."""

from __future__ import annotations

import trio


class _Pipe:
    """Bytes one way. `held`: what is written stays in the pipe; the reader waits."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = False
        self._bytes = bytearray()
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
        self._bytes.clear()
        self._wake()

    def break_off(self) -> None:
        self._broken = True
        self._bytes.clear()
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
                self._bytes += view[:room]
                view = view[room:]
                self._wake()
            if not view:
                return
            await self._changed.wait()

    async def read(self, most: int | None) -> bytes:
        while True:
            if self._reader_gone:
                raise trio.ClosedResourceError("this end was closed")
            if self._broken:
                raise trio.BrokenResourceError("the link is cut")
            if self._bytes and not self.held:
                data = bytes(self._bytes[:most])
                del self._bytes[: len(data)]
                self._wake()
                return data
            if self._ended and not self._bytes and not self.held:
                return b""
            await self._changed.wait()


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

"""A TCP proxy that breaks things on purpose: it delays, stalls, narrows, cuts, resets and forgets what goes through it,
refuses connections, takes them and says nothing, or loses every packet. Real sockets and real time. It knows nothing of
what it carries, and draws nothing by itself but the jitter; when to break what is the caller's business."""

from __future__ import annotations

import enum
import math
import random
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

#: Bytes that the kernel may keep in each direction of a connection, on either side. Small, so that a stall reaches the
#: sender early instead of filling megabytes of buffers; the kernel doubles it.
KERNEL_BUFFER = 16 * 1024
#: Bytes that are taken from a connection in one step.
_CHUNK = 8 * 1024
#: Bytes that may be on their way in one direction while it is delayed; as on a real line, more waits at the sender.
_ON_THE_WAY = 256 * 1024
#: Seconds' worth of bytes that go through a narrow way at once.
_BREATH = 0.05
#: Seconds for which a connection that was cut may still be read to its end.
_LINGER = 1.0


class Mode(enum.Enum):
    """What becomes of those who connect."""

    #: they get through
    PASS = "pass"
    #: they are refused at once
    REFUSE = "refuse"
    #: they are taken, and never hear a word
    SILENT = "silent"
    #: their first packet is lost, as all others are
    HOLE = "hole"


class _End(enum.Enum):
    """How what comes from one side ends."""

    FINISHED = enum.auto()
    BROKEN = enum.auto()


class Way:
    """One direction of everything that goes through a proxy. What is set counts from the next chunk on."""

    def __init__(self) -> None:
        #: seconds that everything takes longer
        self.delay = 0.0
        #: seconds that may be added to that, drawn for each chunk; nothing overtakes anything
        self.jitter = 0.0
        #: bytes a second
        self.rate = math.inf
        #: bytes that went through
        self.carried = 0
        self._open = trio.Event()
        self._open.set()

    @property
    def stalled(self) -> bool:
        """Whether nothing goes through for now."""
        return not self._open.is_set()

    def stall(self) -> None:
        """Let nothing through, and read nothing, from now on. No connection is closed by it."""
        if not self.stalled:
            self._open = trio.Event()

    def resume(self) -> None:
        """Go on where it was stalled."""
        self._open.set()

    async def wait_open(self) -> None:
        """Wait until it is not stalled."""
        while self.stalled:
            await self._open.wait()


class Proxy:
    """Listens on a port of 127.0.0.1 and carries what it gets to what `connect` opens, and back.

    `run` is its task; `port` is known from the start. `generator` draws the jitter."""

    def __init__(self, connect: Callable[[], Awaitable[trio.SocketStream]], generator: random.Random) -> None:
        self.forth = Way()
        self.back = Way()
        #: connections that were taken so far
        self.taken = 0
        self.mode = Mode.PASS
        self._connect = connect
        self._random = generator
        self._connections: dict[_Connection, None] = {}
        self._accepting = trio.CancelScope()
        # Keeps the port while nobody listens on it: who connects then is refused.
        self._place = _bound(0)
        self.port: int = self._place.getsockname()[1]
        self._listener: trio.socket.SocketType | None = None
        #: fills the queue of those who wait to be accepted
        self._plug: socket.socket | None = None
        self._listen()

    @property
    def ways(self) -> tuple[Way, Way]:
        """Both directions: there, and back."""
        return self.forth, self.back

    @property
    def open_connections(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    async def run(self) -> None:
        """Carry until cancelled; every connection is closed then."""
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    with trio.CancelScope() as self._accepting:
                        if self._listener is None or self.mode is Mode.HOLE:
                            await trio.sleep_forever()
                        taken, address = await self._listener.accept()
                        nursery.start_soon(self._serve, trio.SocketStream(taken), address)
        finally:
            self.close()

    def close(self) -> None:
        """Give the port up. Only for a proxy that does not run; one that does ends with its task."""
        self._unplug()
        if self._listener is not None:
            self._listener.close()
        self._place.close()

    def set_mode(self, mode: Mode) -> None:
        """What becomes of those who connect from now on. What is connected stays so; see `cut`, `reset` and `stall`."""
        if mode is self.mode:
            return
        self.mode = mode
        self._accepting.cancel()  # first: what is closed under it would be an error there
        self._unplug()
        if mode is Mode.REFUSE:
            assert self._listener is not None
            self._listener.close()
            self._listener = None
        elif self._listener is None:
            self._listen()
        if mode is Mode.HOLE:
            assert self._listener is not None
            # A queue for one, and one in it: the kernel drops the packets of all others who want to connect.
            self._listener.listen(0)
            self._plug = socket.socket()
            self._plug.setblocking(False)
            self._plug.connect_ex(("127.0.0.1", self.port))
        elif self._listener is not None:
            self._listener.listen(128)

    def stall(self) -> None:
        """Stall both directions."""
        for way in self.ways:
            way.stall()

    def heal(self) -> None:
        """Carry everything again, at once. Connections that are broken stay so."""
        for way in self.ways:
            way.delay = way.jitter = 0.0
            way.rate = math.inf
            way.resume()
        self.set_mode(Mode.PASS)

    def cut(self) -> None:
        """Close every connection in good order, towards both sides (FIN)."""
        for connection in self._connections:
            connection.cut()

    def reset(self) -> None:
        """Break every connection towards both sides (RST)."""
        for connection in self._connections:
            connection.reset()

    def forget(self) -> None:
        """Let go of every connection without a word: nothing goes through it ever again, and neither side hears that
        the other is gone, as when a translator of addresses was restarted. Who connects anew gets through."""
        for connection in self._connections:
            connection.forget()

    def _listen(self) -> None:
        listener = _bound(self.port)
        # Those who connect inherit it, early enough to count for the first window.
        _limit_buffers(listener)
        listener.listen(128)
        listener.setblocking(False)
        self._listener = trio.socket.from_stdlib_socket(listener)

    def _unplug(self) -> None:
        if self._plug is not None:
            self._plug.close()
            self._plug = None

    async def _serve(self, client: trio.SocketStream, address: tuple[str, int]) -> None:
        if self._plug is not None and address == self._plug.getsockname():
            await trio.aclose_forcefully(client)
            return
        self.taken += 1
        connection = _Connection(self, client, self._random)
        self._connections[connection] = None
        try:
            await connection.run(None if self.mode is Mode.SILENT else self._connect)
        finally:
            del self._connections[connection]


class _Connection:
    """One connection, and the one that it is carried on."""

    def __init__(self, proxy: Proxy, client: trio.SocketStream, generator: random.Random) -> None:
        self._proxy = proxy
        self._client = client
        self._server: trio.SocketStream | None = None
        self._random = generator
        self._scope = trio.CancelScope()
        #: how it ends towards both sides
        self._broken = self._forgotten = False

    async def run(self, connect: Callable[[], Awaitable[trio.SocketStream]] | None) -> None:
        """Carry until one side has broken, both are finished, or somebody ends it. Without `connect`, say nothing."""
        try:
            with self._scope:
                if connect is None:
                    await _hear_out(self._client)
                    return
                try:
                    self._server = await connect()
                except OSError:
                    self._broken = True  # nobody is there, and who connects through a proxy hears it a little later
                    return
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._carry, self._client, self._server, self._proxy.forth)
                    nursery.start_soon(self._carry, self._server, self._client, self._proxy.back)
            if self._forgotten:
                await self._hear_each_out()
            elif self._scope.cancelled_caught and not self._broken:
                await self._finish()
        finally:
            for side in self._sides:
                _close(side, reset=self._broken)

    def cut(self) -> None:
        """End it in good order."""
        self._scope.cancel()

    def reset(self) -> None:
        """Break it."""
        self._broken = True
        self._scope.cancel()

    def forget(self) -> None:
        """Carry nothing more, and say nothing."""
        self._forgotten = True
        self._scope.cancel()

    @property
    def _sides(self) -> list[trio.SocketStream]:
        return [side for side in (self._client, self._server) if side is not None]

    async def _finish(self) -> None:
        """Say the end to both sides, and take what they still send: a close with something unread would be a reset."""
        with trio.move_on_after(_LINGER):
            async with trio.open_nursery() as nursery:
                for side in self._sides:
                    nursery.start_soon(_finish, side)

    async def _hear_each_out(self) -> None:
        async with trio.open_nursery() as nursery:
            for side in self._sides:
                nursery.start_soon(_hear_out, side)

    async def _carry(self, source: trio.SocketStream, target: trio.SocketStream, way: Way) -> None:
        line: deque[tuple[float, bytes | _End]] = deque()
        on_the_way = 0
        moved = trio.Event()

        async def take() -> None:
            nonlocal on_the_way, moved
            due = -math.inf
            while True:
                await way.wait_open()
                while on_the_way >= (_ON_THE_WAY if way.delay or way.jitter else 1):
                    await moved.wait()
                part: bytes | _End
                try:
                    part = await source.receive_some(_CHUNK) or _End.FINISHED
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    part = _End.BROKEN
                due = max(due, trio.current_time() + way.delay + self._random.uniform(0.0, way.jitter))
                line.append((due, part))
                on_the_way += 0 if isinstance(part, _End) else len(part)
                moved.set()
                moved = trio.Event()
                if isinstance(part, _End):
                    return

        async def give() -> None:
            nonlocal on_the_way, moved
            while True:
                while not line:
                    await moved.wait()
                due, part = line[0]
                await trio.sleep_until(due)
                await way.wait_open()
                if part is _End.BROKEN:
                    self.reset()
                    return
                try:
                    if isinstance(part, _End):
                        await target.send_eof()
                        return
                    await _send(target, part, way)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    self.reset()
                    return
                line.popleft()
                on_the_way -= len(part)
                moved.set()
                moved = trio.Event()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            nursery.start_soon(give)


def connector(port: int, host: str = "127.0.0.1") -> Callable[[], Awaitable[trio.SocketStream]]:
    """Opens connections to a port, with small kernel buffers."""

    async def connect() -> trio.SocketStream:
        opened = trio.socket.socket()
        try:
            _limit_buffers(opened)
            await opened.connect((host, port))
        except BaseException:
            opened.close()
            raise
        return trio.SocketStream(opened)

    return connect


def reserved_port() -> tuple[int, socket.socket]:
    """A port of 127.0.0.1 that nobody else gets while the socket is open, also while nobody listens on it. A listener
    that sets SO_REUSEADDR can take it, as often as it likes."""
    place = _bound(0)
    return place.getsockname()[1], place


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _limit_buffers(limited: socket.socket | trio.socket.SocketType) -> None:
    limited.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BUFFER)
    limited.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER)


async def _send(target: trio.SocketStream, data: bytes, way: Way) -> None:
    """Send no faster than the way is wide."""
    while data:
        size = len(data) if math.isinf(way.rate) else max(1, int(way.rate * _BREATH))
        part, data = data[:size], data[size:]
        await target.send_all(part)
        way.carried += len(part)
        await trio.sleep(len(part) / way.rate)


async def _finish(side: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await side.send_eof()
    await _hear_out(side)


async def _hear_out(side: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while await side.receive_some(_CHUNK):
            pass


def _close(side: trio.SocketStream, *, reset: bool) -> None:
    if reset:
        with suppress(OSError):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    side.socket.close()

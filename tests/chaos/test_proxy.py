"""The proxy does to real connections what it says: whoever blames the program for a fault has to know that first."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from tests.chaos.proxy import KERNEL_BUFFER, Mode, Proxy, connector, reserved_port

#: Seconds after which a test gives up; nothing here takes a second of its own.
PATIENCE = 20.0
#: Seconds in which nothing happens, where that is to be shown.
QUIET = 0.05


@dataclass
class Line:
    """A proxy, and both ends of a connection through it."""

    proxy: Proxy
    client: trio.SocketStream
    server: trio.SocketStream

    @property
    def ends(self) -> tuple[trio.SocketStream, trio.SocketStream]:
        return self.client, self.server


@asynccontextmanager
async def line() -> AsyncIterator[Line]:
    """A connection through a proxy. Everything has to be over within PATIENCE."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    proxy = Proxy(connector(listener.socket.getsockname()[1]), random.Random(1))
    with trio.fail_after(PATIENCE):
        async with listener, trio.open_nursery() as nursery:
            nursery.start_soon(proxy.run)
            client = await trio.open_tcp_stream("127.0.0.1", proxy.port)
            server = await listener.accept()
            async with client, server:
                yield Line(proxy, client, server)
            nursery.cancel_scope.cancel()


async def receive(stream: trio.SocketStream, size: int) -> bytes:
    """So many bytes."""
    data = b""
    while len(data) < size:
        part = await stream.receive_some(size - len(data))
        assert part, "the connection has ended"
        data += part
    return data


async def is_quiet(stream: trio.SocketStream) -> bool:
    """Whether nothing comes, no end either."""
    with trio.move_on_after(QUIET):
        await stream.receive_some(1)
        return False
    return True


async def test_what_goes_in_comes_out_both_ways() -> None:
    data = random.Random(2).randbytes(300_000)
    async with line() as through:
        for source, target in (through.ends, through.ends[::-1]):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(source.send_all, data)
                assert await receive(target, len(data)) == data
        # Each side may end by itself, and still hear the other.
        await through.client.send_eof()
        assert await through.server.receive_some(1) == b""
        await through.server.send_all(b"last")
        assert await receive(through.client, 4) == b"last"
        await through.server.send_eof()
        assert await through.client.receive_some(1) == b""
        while through.proxy.open_connections:  # noqa: ASYNC110 - the number tells nobody
            await trio.sleep(0.001)
        assert [way.carried for way in through.proxy.ways] == [len(data), len(data) + 4]


async def test_a_delay_delays_and_jitter_keeps_the_order() -> None:
    async with line() as through:
        way = through.proxy.forth
        way.delay, way.jitter = 0.05, 0.05
        began = trio.current_time()
        sent = b"".join(bytes([number]) * 100 for number in range(50))
        for start in range(0, len(sent), 100):
            await through.client.send_all(sent[start : start + 100])
            await trio.lowlevel.checkpoint()
        assert await receive(through.server, 1)
        assert trio.current_time() - began >= 0.05
        assert await receive(through.server, len(sent) - 1) == sent[1:]


@pytest.mark.parametrize("direction", ["forth", "back"])
async def test_a_stalled_direction_stops_its_sender_and_no_other(direction: str) -> None:
    async with line() as through:
        source, target = through.ends if direction == "forth" else through.ends[::-1]
        source.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER)
        way = getattr(through.proxy, direction)
        way.stall()
        sent = 0
        with trio.move_on_after(QUIET) as waiting:
            while True:
                await source.send_all(b"x" * 1024)
                sent += 1024
                waiting.deadline = trio.current_time() + QUIET
        assert sent < 16 * KERNEL_BUFFER
        assert await is_quiet(target)
        await target.send_all(b"other")
        assert await receive(source, 5) == b"other"
        way.resume()
        assert await receive(target, sent) == b"x" * sent


async def test_a_stall_also_keeps_back_the_end() -> None:
    async with line() as through:
        through.proxy.stall()
        await through.client.send_eof()
        assert await is_quiet(through.server)
        through.proxy.heal()
        assert await through.server.receive_some(1) == b""


async def test_a_cut_is_an_end_in_good_order() -> None:
    async with line() as through:
        through.proxy.stall()  # no stall keeps it back, and neither does what waits in buffers
        await through.client.send_all(b"never read")
        through.proxy.cut()
        assert [await end.receive_some(1) for end in through.ends] == [b"", b""]


async def test_a_reset_breaks_both_sides() -> None:
    async with line() as through:
        through.proxy.reset()
        for end in through.ends:
            with pytest.raises(trio.BrokenResourceError) as caught:
                await end.receive_some(1)
            assert isinstance(caught.value.__cause__, ConnectionResetError)


async def test_a_forgotten_connection_hears_nothing_ever_again() -> None:
    async with line() as through:
        through.proxy.forget()
        for source, target in (through.ends, through.ends[::-1]):
            await source.send_all(b"into nowhere")
            assert await is_quiet(target)
        await through.client.send_eof()
        assert await is_quiet(through.server)
        assert through.proxy.open_connections == 1
        await through.server.send_eof()
        # Whoever connects anew gets through.
        async with await trio.open_tcp_stream("127.0.0.1", through.proxy.port) as stream:
            await stream.send_all(b"another")
            while through.proxy.forth.carried < len(b"another"):  # noqa: ASYNC110 - the number tells nobody
                await trio.sleep(0.001)
        assert through.proxy.taken == 2
        assert through.proxy.open_connections == 1


async def test_a_side_that_breaks_breaks_the_other() -> None:
    async with line() as through:
        through.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
        await trio.aclose_forcefully(through.client)
        with pytest.raises(trio.BrokenResourceError):
            await through.server.receive_some(1)


async def test_a_narrow_line_takes_its_time() -> None:
    async with line() as through:
        through.proxy.forth.rate = 100_000
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(through.client.send_all, b"x" * 20_000)
            await receive(through.server, 20_000)
        # What was sent last need not be waited for.
        assert trio.current_time() - began >= 0.1
        assert through.proxy.forth.carried == 20_000


async def test_who_connects_is_refused_and_let_in_again_on_the_same_port() -> None:
    async with line() as through:
        for _ in range(3):
            through.proxy.set_mode(Mode.REFUSE)
            with pytest.raises(OSError, match="all attempts to connect"):
                await trio.open_tcp_stream("127.0.0.1", through.proxy.port)
            through.proxy.heal()
            async with await trio.open_tcp_stream("127.0.0.1", through.proxy.port):
                pass
        await through.client.send_all(b"still")
        assert await receive(through.server, 5) == b"still"


async def test_who_connects_is_taken_and_hears_nothing() -> None:
    async with line() as through:
        through.proxy.set_mode(Mode.SILENT)
        async with await trio.open_tcp_stream("127.0.0.1", through.proxy.port) as stream:
            await stream.send_all(b"hello")
            assert await is_quiet(stream)
            through.proxy.heal()
            assert await is_quiet(stream)
            through.proxy.reset()
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some(1)


async def test_in_a_hole_nobody_even_connects() -> None:
    async with line() as through:
        through.proxy.set_mode(Mode.HOLE)
        through.proxy.stall()
        connected = trio.Event()

        async def connect(open_stream: Callable[..., Awaitable[trio.SocketStream]]) -> None:
            async with await open_stream("127.0.0.1", through.proxy.port) as stream:
                connected.set()
                await stream.send_all(b"again")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect, trio.open_tcp_stream)
            with trio.move_on_after(QUIET):
                await connected.wait()
            assert not connected.is_set()
            await through.client.send_all(b"kept")
            assert await is_quiet(through.server)
            through.proxy.heal()
            # The kernel sends its first packet again, a second after the first time.
            await connected.wait()
        assert await receive(through.server, 4) == b"kept"


async def test_nobody_behind_it_breaks_who_connects() -> None:
    port, place = reserved_port()
    proxy = Proxy(connector(port), random.Random(1))
    with place, trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(proxy.run)
            async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as stream:
                with pytest.raises(trio.BrokenResourceError):
                    await stream.receive_some(1)
            nursery.cancel_scope.cancel()
    assert proxy.taken == 1
    assert proxy.open_connections == 0

"""The in-memory link is a stream like any other, bounded, and does what its owner does to it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from trio_federation.rpc import MemoryLink, peer_name

CAPACITY = 1000


async def make_ends() -> tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]:
    link = MemoryLink()
    return link.client, link.server


async def make_clogged_ends() -> tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]:
    link = MemoryLink(capacity=CAPACITY)
    for end in (link.client, link.server):
        await end.send_all(bytes(CAPACITY))
    return link.client, link.server


async def test_the_ends_are_streams() -> None:
    await trio.testing.check_two_way_stream(make_ends, make_clogged_ends)


async def test_the_ends_can_be_closed_by_halves() -> None:
    await trio.testing.check_half_closeable_stream(make_ends, make_clogged_ends)


async def test_a_writer_waits_when_the_reader_does_not_read(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink(capacity=CAPACITY)
    data = bytes(range(250)) * 10
    async with trio.open_nursery() as nursery:
        sent = trio.Event()

        async def send() -> None:
            await link.client.send_all(data)
            sent.set()

        nursery.start_soon(send)
        received = b""
        # Whatever is asked for, there is no more than what fits, and never more goes in than has come out.
        for _ in range(2):
            await trio.sleep(3600)
            assert not sent.is_set()
            piece = await link.server.receive_some()
            assert len(piece) == CAPACITY
            received += piece
        await sent.wait()
        assert received + await link.server.receive_some() == data


async def test_each_direction_is_held_alone(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink()
    link.hold(to_server=True, to_client=False)
    await link.client.send_all(b"late")
    await link.client.send_eof()
    await link.server.send_all(b"at once")
    assert await link.client.receive_some() == b"at once"
    with trio.move_on_after(3600) as scope:
        await link.server.receive_some()
    assert scope.cancelled_caught
    link.hold(to_server=False, to_client=True)
    assert await link.server.receive_some() == b"late"
    assert await link.server.receive_some() == b""


async def test_what_is_held_is_let_go_to_a_reader_who_waits(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink()
    link.hold(to_server=True, to_client=True)
    await link.client.send_all(b"held")
    async with trio.open_nursery() as nursery:
        read: list[bytes] = []

        async def receive() -> None:
            read.append(await link.server.receive_some())

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        assert read == []
        link.hold(to_server=False, to_client=False)
    assert read == [b"held"]


async def test_a_held_end_is_not_told_of_the_close(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink()
    link.hold(to_server=True, to_client=True)
    await link.client.aclose()
    with trio.move_on_after(60) as scope:
        await link.server.receive_some()
    assert scope.cancelled_caught


async def test_a_cut_is_told_to_everybody_who_waits(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink(capacity=CAPACITY)
    broken: list[str] = []

    async def expect_broken(name: str, end: trio.abc.Stream, *, sends: bool) -> None:
        step = end.send_all(bytes(CAPACITY + 1)) if sends else end.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await step
        broken.append(name)

    # Held, so that the readers have something to wait for.
    link.hold(to_server=True, to_client=True)
    async with trio.open_nursery() as nursery:
        for name, end in (("client", link.client), ("server", link.server)):
            nursery.start_soon(lambda name, end: expect_broken(f"{name} sends", end, sends=True), name, end)
            nursery.start_soon(lambda name, end: expect_broken(f"{name} receives", end, sends=False), name, end)
        await trio.testing.wait_all_tasks_blocked()
        assert broken == []
        link.cut()
    assert sorted(broken) == ["client receives", "client sends", "server receives", "server sends"]
    # And to everybody who comes later, to whom nothing is delivered any more.
    for end in (link.client, link.server):
        with pytest.raises(trio.BrokenResourceError):
            await end.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await end.send_all(b"too late")


async def test_the_ends_tell_whom_they_lead_to() -> None:
    link = MemoryLink(client="west", server="hub-0")
    assert peer_name(link.client) == "hub-0"
    assert peer_name(link.server) == "west"


@given(
    capacity=st.integers(1, 40),
    pieces=st.lists(st.binary(max_size=60), max_size=12),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
)
def test_bytes_arrive_in_order_however_they_are_cut(capacity: int, pieces: list[bytes], sizes: list[int]) -> None:
    async def main() -> None:
        link = MemoryLink(capacity=capacity)
        received = bytearray()

        async def receive() -> None:
            turn = 0
            while data := await link.server.receive_some(sizes[turn % len(sizes)]):
                assert len(data) <= min(capacity, sizes[turn % len(sizes)])
                received.extend(data)
                turn += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            for piece in pieces:
                await link.client.send_all(piece)
            await link.client.send_eof()
        assert received == b"".join(pieces)

    trio.run(main)


# --- bytes that take time on their way --------------------------------------------------------------------------------


def taking(*seconds: float) -> Callable[[], float]:
    """A transit that takes these, one after the other, and then the last again and again."""
    drawn = itertools.chain(seconds, itertools.repeat(seconds[-1]))
    return lambda: next(drawn)


async def arrivals(end: trio.abc.Stream, count: int) -> list[tuple[float, bytes]]:
    """The next bytes that come at this end, and when, in seconds from now."""
    began, found = trio.current_time(), []
    for _ in range(count):
        data = bytes(await end.receive_some())
        found.append((round(trio.current_time() - began, 6), data))
    return found


async def test_bytes_arrive_so_much_later_and_in_their_order(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink()
    link.slow(taking(2.0, 0.5, 3.0))
    await link.client.send_all(b"first ")
    await link.client.send_all(b"does not overtake ")
    await link.client.send_all(b"last")
    # The writer does not wait, and both directions are slow.
    assert trio.current_time() == 0.0
    await link.server.send_all(b"back")
    assert await arrivals(link.server, 2) == [(2.0, b"first does not overtake "), (3.0, b"last")]
    assert await arrivals(link.client, 1) == [(0.0, b"back")]


async def test_what_is_written_when_it_is_fast_again_waits_for_what_was_written_before(
    autojump_clock: trio.testing.MockClock,
) -> None:
    link = MemoryLink()
    link.slow(taking(5.0))
    await link.client.send_all(b"slow")
    link.slow(None)
    await trio.sleep(1.0)
    await link.client.send_all(b"fast")
    assert await arrivals(link.server, 1) == [(4.0, b"slowfast")]
    await link.client.send_all(b"at once")
    assert await arrivals(link.server, 1) == [(0.0, b"at once")]


async def test_bytes_on_their_way_take_up_room(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink(capacity=CAPACITY)
    link.slow(taking(2.0))
    await link.client.send_all(bytes(CAPACITY))
    with trio.move_on_after(1.5) as scope:
        await link.client.wait_send_all_might_not_block()
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.client.send_all, b"more")
        assert await arrivals(link.server, 2) == [(0.5, bytes(CAPACITY)), (2.5, b"more")]


async def test_a_reader_takes_no_more_than_has_arrived_and_than_it_asked_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    link = MemoryLink()
    link.slow(taking(1.0, 2.0))
    await link.client.send_all(b"abcd")
    await link.client.send_all(b"efgh")
    assert await link.server.receive_some(3) == b"abc"
    assert await link.server.receive_some(3) == b"d"
    assert trio.current_time() == 1.0
    assert await link.server.receive_some(3) == b"efg"
    assert trio.current_time() == 2.0
    assert await link.server.receive_some(3) == b"h"


async def test_what_is_held_and_slow_is_there_when_both_are_over(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink()
    link.slow(taking(2.0))
    link.hold(to_server=True, to_client=False)
    await link.client.send_all(b"early")
    await trio.sleep(3.0)
    await link.client.send_all(b"late")
    await trio.sleep(1.0)
    link.hold(to_server=False, to_client=False)
    # The first has been on its way for longer than it takes, the second has not.
    assert await arrivals(link.server, 2) == [(0.0, b"early"), (1.0, b"late")]


async def test_the_end_comes_after_the_bytes_and_takes_as_long(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink()
    link.slow(taking(2.0, 1.0))
    await link.client.send_all(b"last words")
    await link.client.send_eof()
    assert await arrivals(link.server, 2) == [(2.0, b"last words"), (2.0, b"")]
    # Also without any bytes before it.
    await trio.sleep(10.0)
    await link.server.aclose()
    assert await arrivals(link.client, 1) == [(1.0, b"")]


async def test_a_cut_takes_what_is_on_its_way_with_it(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink()
    link.slow(taking(2.0))
    await link.client.send_all(b"lost")
    await trio.sleep(1.0)
    link.cut()
    with pytest.raises(trio.BrokenResourceError):
        await link.server.receive_some()
    assert trio.current_time() == 1.0


async def test_a_writer_hears_of_a_reader_that_is_gone_when_word_of_it_arrives(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """As on TCP: who writes to a peer that has gone away finds out when its answer comes, and not before."""
    link = MemoryLink(capacity=CAPACITY)
    link.hold(to_server=False, to_client=True)
    await link.server.aclose()
    await link.client.send_all(bytes(CAPACITY - 1))
    async with trio.open_nursery() as nursery:

        async def write_more() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await link.client.send_all(b"no room for this")
            assert trio.current_time() == 7.0

        nursery.start_soon(write_more)
        await trio.sleep(7.0)
        link.hold(to_server=False, to_client=False)
    assert await link.client.receive_some() == b""

    slow = MemoryLink()
    slow.slow(taking(2.0))
    await slow.server.aclose()
    await slow.client.send_all(b"in vain")
    await trio.sleep(2.0)
    with pytest.raises(trio.BrokenResourceError):
        await slow.client.send_all(b"now it is known")


async def test_a_link_tells_when_it_is_over() -> None:
    link = MemoryLink()
    assert not link.is_over
    await link.client.aclose()
    assert not link.is_over
    await link.server.aclose()
    assert link.is_over
    other = MemoryLink()
    other.cut()
    assert other.is_over


async def test_what_was_written_is_counted_byte_by_byte(autojump_clock: trio.testing.MockClock) -> None:
    link = MemoryLink()
    assert link.to_server == link.to_client == (0, 0)
    link.hold(to_server=True, to_client=True)
    for piece in (b"two ", b"pieces"):
        await link.client.send_all(piece)
    assert link.to_server == (10, zlib.crc32(b"two pieces"))
    assert link.to_client == (0, 0)
    link.cut()
    assert link.to_server == (10, zlib.crc32(b"two pieces"))


@given(
    capacity=st.integers(1, 40),
    writes=st.lists(
        st.tuples(st.binary(min_size=1, max_size=30), st.floats(0.0, 3.0), st.floats(0.0, 2.0)), max_size=8
    ),
    holds=st.lists(st.tuples(st.floats(0.0, 4.0), st.booleans()), max_size=4),
    size=st.integers(1, 50),
)
def test_slow_bytes_arrive_in_order_in_time_and_whole(
    capacity: int, writes: list[tuple[bytes, float, float]], holds: list[tuple[float, bool]], size: int
) -> None:
    """Whatever is delayed, held and let go: nothing is lost or out of order, nothing is there before its time, and how
    long it was on its way is told."""

    async def main() -> None:
        waits: list[tuple[str, float]] = []
        link = MemoryLink(capacity=capacity, waited=lambda end, seconds: waits.append((end, seconds)))
        received = bytearray()
        #: for each byte that was written, its earliest arrival
        due: list[float] = []

        async def receive() -> None:
            while data := await link.server.receive_some(size):
                assert all(moment <= trio.current_time() for moment in due[len(received) : len(received) + len(data)])
                received.extend(data)

        async def hold() -> None:
            for seconds, held in holds:
                await trio.sleep(seconds)
                link.hold(to_server=held, to_client=False)
            link.hold(to_server=False, to_client=False)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            nursery.start_soon(hold)
            for data, pause, transit in writes:
                await trio.sleep(pause)
                link.slow(taking(transit))
                due += [trio.current_time() + transit] * len(data)
                await link.client.send_all(data)
            await link.client.send_eof()
        assert received == b"".join(data for data, _, _ in writes)
        assert all(end == "server" and 0 < seconds < 60 for end, seconds in waits)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# --- how long bytes were on their way ---------------------------------------------------------------------------------


class Waits:
    """Links that tell here how long bytes were on their way."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def link(self, capacity: int = 64 * 1024) -> MemoryLink:
        """A new one."""
        return MemoryLink(capacity=capacity, waited=lambda end, seconds: self.told.append((end, round(seconds, 6))))


async def test_no_wait_is_told_of_what_arrives_at_once(autojump_clock: trio.testing.MockClock) -> None:
    waits = Waits()
    link = waits.link()
    for _ in range(3):
        await link.client.send_all(b"ping")
        await link.server.receive_some()
        await trio.sleep(1.0)
    assert waits.told == []


async def test_the_wait_is_that_of_the_oldest_byte_that_is_read(autojump_clock: trio.testing.MockClock) -> None:
    waits = Waits()
    link = waits.link()
    link.hold(to_server=True, to_client=True)
    await link.client.send_all(b"old")
    await link.server.send_all(b"back")
    await trio.sleep(3.0)
    await link.client.send_all(b"new")
    await trio.sleep(1.0)
    link.hold(to_server=False, to_client=False)
    assert await link.server.receive_some(4) == b"oldn"
    assert await link.server.receive_some() == b"ew"
    assert await link.client.receive_some() == b"back"
    assert waits.told == [("server", 4.0), ("server", 1.0), ("client", 4.0)]


async def test_a_reader_that_stalls_makes_bytes_wait_too(autojump_clock: trio.testing.MockClock) -> None:
    waits = Waits()
    link = waits.link()
    await link.client.send_all(b"there at once")
    await trio.sleep(5.0)
    await link.server.receive_some()
    assert waits.told == [("server", 5.0)]


async def test_behind_a_full_pipe_the_wait_counts_from_when_it_was_last_empty(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Whoever writes into a full pipe may have wanted to since the link was last at rest: how long is not known, so
    the longest that it can be is told."""
    waits = Waits()
    link = waits.link(capacity=CAPACITY)
    link.hold(to_server=True, to_client=False)
    await trio.sleep(1.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.client.send_all, bytes(CAPACITY + 1))
        await trio.sleep(6.0)
        link.hold(to_server=False, to_client=False)
        assert len(await link.server.receive_some()) == CAPACITY
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(2.0)
        assert len(await link.server.receive_some()) == 1
    assert waits.told == [("server", 6.0), ("server", 8.0)]
    # At rest, and from then on exact again.
    await trio.sleep(1.0)
    link.slow(taking(0.5))
    await link.client.send_all(b"x")
    await link.server.receive_some()
    assert waits.told[2:] == [("server", 0.5)]

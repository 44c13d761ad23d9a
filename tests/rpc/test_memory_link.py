"""The in-memory link is a stream like any other, bounded, and does what its owner does to it."""

from __future__ import annotations

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

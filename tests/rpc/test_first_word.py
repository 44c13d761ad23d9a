"""The first word of a hub: no call is opened before it, it has its deadline, and what is no word of HTTP/2 is told for
what it is. Silence after it is in `test_silence.py`; what an agent does about any of it is in `tests/federation/`."""

from __future__ import annotations

import random
import socket
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from h2.errors import ErrorCodes
from h2.events import RequestReceived
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame, PingFrame, SettingsFrame
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.rpc.harness import HUB, RawPeer, new_link, nothing_left
from tests.simulation import ScriptedSource, always, member
from trio_federation.agent import Agent
from trio_federation.config import Federation
from trio_federation.errors import RpcError, TooManyPings, Unavailable
from trio_federation.rpc import CONNECT_DEADLINE, ConnectionSettings, HubConnection, tcp_dialer
from trio_federation.rpc.memory import MemoryLink
from trio_federation.testing import run_simulated

#: what a client of HTTP/2 begins with
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = SettingsFrame().serialize()
#: never noticed as silent in these tests
PATIENT = ConnectionSettings(keepalive=1000, silence_limit=3000)
NOT_A_WORD = "connected, but nothing was said within {:g} s: the other side hangs, or is no gRPC endpoint"


async def frames_of(link: MemoryLink) -> list[Frame]:
    """What the client of a link has sent so far, as frames; it must have sent something."""
    data = bytes(await link.server.receive_some())
    data = data.removeprefix(PREFACE)
    frames = []
    while data:
        frame, length = Frame.parse_frame_header(memoryview(data[:9]))
        frame.parse_body(memoryview(data[9 : 9 + length]))
        frames.append(frame)
        data = data[9 + length :]
    return frames


async def reads_to_the_end(stream: trio.abc.Stream) -> float:
    """Trio's time at which a stream has ended, in good order."""
    while await stream.receive_some():
        pass
    return trio.current_time()


# --- in time, and too late -------------------------------------------------------------------------------------------


async def heard(word: bytes, after: float, within: float) -> None:
    """A hub says something after a while; its client waits for it only so long."""
    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        began = trio.current_time()
        connection = await HubConnection.open(nursery, link.client, peer=HUB, settings=PATIENT)

        async def speak() -> None:
            await trio.sleep_until(began + after)
            await link.server.send_all(word)

        async with trio.open_nursery() as speaking:
            speaking.start_soon(speak)
            if after < within:
                await connection.wait_heard(within)
                assert trio.current_time() == began + after
                assert connection.transport.heard_at == trio.current_time()
                # It has been heard; nobody waits for it again, however short of time.
                await connection.wait_heard(0.0)
                assert not connection.transport.is_closing()
            else:
                with pytest.raises(Unavailable) as caught:
                    await connection.wait_heard(within)
                assert trio.current_time() == began + within
                assert str(caught.value) == f"{HUB}: {NOT_A_WORD.format(within)}"
                # Who speaks later finds that nobody listens any more.
                await connection.wait_closed()
                assert trio.current_time() == began + within
                assert await reads_to_the_end(link.server) == began + within
                speaking.cancel_scope.cancel()
        await connection.aclose()


@settings(max_examples=40, deadline=None)
@given(
    word=st.sampled_from([SETTINGS, SETTINGS[:1], PingFrame(0).serialize(), SETTINGS[:9]]),
    after=st.floats(0.0, 20.0),
    within=st.floats(0.01, 15.0),
)
def test_a_word_counts_that_begins_within_its_time(word: bytes, after: float, within: float) -> None:
    """Whatever it is, and if it is only its first byte: to the moment, and not a moment later."""
    assume(abs(after - within) > 1e-3)
    run_simulated(heard, word, after, within)


async def test_silence_after_the_first_byte_is_another_matter(autojump_clock: MockClock) -> None:
    """A hub that begins a frame and never ends it has been heard, and falls silent like any other."""
    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        connection = await HubConnection.open(nursery, link.client, peer=HUB)
        await link.server.send_all(SETTINGS[:1])
        await connection.wait_heard(CONNECT_DEADLINE)
        heard_at = trio.current_time()
        assert str(await connection.wait_closed()) == f"{HUB}: silent for 15 s"
        assert trio.current_time() == heard_at + 15


async def test_only_the_first_word_is_the_first(autojump_clock: MockClock) -> None:
    """From when on a hub was heard is what ages are reckoned by; what it says later changes nothing about it."""
    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        connection = await HubConnection.open(nursery, link.client, peer=HUB)
        began = trio.current_time()
        await trio.sleep(1)
        for word in (SETTINGS, PingFrame(0).serialize(), PingFrame(0).serialize()):
            await link.server.send_all(word)
            await trio.sleep(2)
            assert connection.transport.heard_at == began + 1
        await connection.aclose()


async def test_a_word_from_before_a_freeze_is_not_taken(autojump_clock: MockClock) -> None:
    """The machine stands still while it waits. What lies there then is as old as that."""
    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        connection = await HubConnection.open(nursery, link.client, peer=HUB)
        await trio.testing.wait_all_tasks_blocked()
        await link.server.send_all(SETTINGS)
        autojump_clock.jump(3600)
        with pytest.raises(Unavailable) as caught:
            await connection.wait_heard(CONNECT_DEADLINE)
        assert str(caught.value) == f"{HUB}: silent for 15 s"
        assert connection.transport.heard_at is None


async def test_whoever_waits_may_be_cancelled(autojump_clock: MockClock) -> None:
    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        connection = await HubConnection.open(nursery, link.client, peer=HUB)
        with trio.move_on_after(1) as scope:
            await connection.wait_heard(CONNECT_DEADLINE)
        assert scope.cancelled_caught
        # The connection is none the worse for it.
        await link.server.send_all(SETTINGS)
        await connection.wait_heard(CONNECT_DEADLINE)
        nursery.cancel_scope.cancel()


# --- no word of HTTP/2 -----------------------------------------------------------------------------------------------

Saying = Callable[[MemoryLink], Awaitable[None]]


def say(data: bytes) -> Saying:
    """Say this, and nothing more."""

    async def saying(link: MemoryLink) -> None:
        await link.server.send_all(data)

    return saying


async def hang_up(link: MemoryLink) -> None:
    """Close, in good order."""
    await link.server.aclose()


async def half_close(link: MemoryLink) -> None:
    """Close one direction, and go on to listen."""
    await link.server.send_eof()


async def break_off(link: MemoryLink) -> None:
    """As with a RST."""
    link.cut()


def goodbye(code: int, data: bytes = b"") -> Saying:
    """A GOAWAY, as it may stand right after the settings, or before them."""
    return say(GoAwayFrame(0, last_stream_id=0, error_code=code, additional_data=data).serialize())


ENDS: dict[str, tuple[Saying, type[RpcError], str]] = {
    "hangs up": (hang_up, Unavailable, "the peer closed the connection"),
    "half-closes": (half_close, Unavailable, "the peer closed the connection"),
    "resets": (break_off, Unavailable, "the connection broke: the link is cut"),
    "says goodbye": (
        goodbye(ErrorCodes.NO_ERROR, b"restart"),
        Unavailable,
        "the peer said goodbye (NO_ERROR: restart)",
    ),
    "asks for calm": (
        goodbye(ErrorCodes.ENHANCE_YOUR_CALM),
        TooManyPings,
        "the peer said goodbye (ENHANCE_YOUR_CALM)",
    ),
    "speaks HTTP/1": (
        say(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"),
        Unavailable,
        "the other side speaks HTTP/1: not a gRPC endpoint?",
    ),
    "speaks SSH": (say(b"SSH-2.0-OpenSSH_9.6\r\n"), Unavailable, "the peer broke HTTP/2: "),
    "sends a TLS alert": (
        say(bytes.fromhex("15030300020246") + bytes(9)),
        Unavailable,
        "the peer broke HTTP/2: ",
    ),
    "begins with data": (
        say(bytes.fromhex("000001000000000001") + b"x"),
        Unavailable,
        "the peer broke HTTP/2: ",
    ),
}


@pytest.mark.parametrize("what", ENDS)
@pytest.mark.parametrize("after", [0.0, 3.0], ids=["at once", "later"])
async def test_what_is_no_word_is_told_at_once(what: str, after: float, autojump_clock: MockClock) -> None:
    """Nobody waits for the rest of the deadline, and each says what it is: to who waits for the word, or, where there
    was one, to who goes on to a call."""
    act, kind, text = ENDS[what]
    link = new_link()
    async with nothing_left(), trio.open_nursery() as nursery:
        connection = await HubConnection.open(nursery, link.client, peer=HUB)
        began = trio.current_time()

        async def later() -> None:
            await trio.sleep(after)
            await act(link)

        nursery.start_soon(later)

        async def go_on() -> None:
            await connection.wait_heard(CONNECT_DEADLINE)
            async with connection.report() as call:
                await call.wait_accepted()

        with pytest.raises(RpcError) as caught:
            await go_on()
        assert type(caught.value) is kind
        assert str(caught.value).startswith(f"{HUB}: {text}")
        assert trio.current_time() == began + after
        assert connection.transport.is_closing()
        ended = await connection.wait_closed()
        assert (type(ended), str(ended)) == (kind, str(caught.value))


# --- what an agent says before it ------------------------------------------------------------------------------------


async def test_an_agent_opens_no_call_before_the_hub_has_spoken(autojump_clock: MockClock) -> None:
    """What it would say would be old when the hub goes on. It says who it is in HTTP/2's own words, and that is all;
    once it is spoken to, both calls come at once."""
    link = new_link()
    source = ScriptedSource()
    source.set(member("west", idle=1))

    async def dial() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return link.client

    agent = Agent("west", Federation(), sources={"set": always(source)}, hubs={"hub": dial}, generator=random.Random(1))
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await trio.sleep(4.9)
        assert [type(frame).__name__ for frame in await frames_of(link)] == ["SettingsFrame", "WindowUpdateFrame"]
        with trio.move_on_after(0) as scope:
            await link.server.receive_some()
        assert scope.cancelled_caught
        (hub,) = agent.health()["hubs"]
        assert hub["state"] == "connecting"
        await link.server.send_all(SETTINGS)
        await trio.testing.wait_all_tasks_blocked()
        frames = await frames_of(link)
        assert sum(isinstance(frame, HeadersFrame) for frame in frames) == 2
        nursery.cancel_scope.cancel()


async def test_an_agent_whose_hub_is_silent_longer_begins_anew(autojump_clock: MockClock) -> None:
    """A connection that was given up is never used again: what was said on it is thrown away, and the next one is told
    everything."""
    links: list[MemoryLink] = []
    source = ScriptedSource()
    source.set(member("west", idle=1))

    async def dial() -> trio.abc.Stream:
        links.append(new_link())
        await trio.lowlevel.checkpoint()
        return links[-1].client

    agent = Agent("west", Federation(), sources={"set": always(source)}, hubs={"hub": dial}, generator=random.Random(1))
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        began = trio.current_time()
        await trio.sleep(5.9)
        assert len(links) == 2
        assert await reads_to_the_end(links[0].server) == trio.current_time()
        with pytest.raises(trio.BrokenResourceError):
            await links[0].server.send_all(SETTINGS)
        (hub,) = agent.health()["hubs"]
        assert hub["last_error"] == {
            "what": "connection",
            "text": NOT_A_WORD.format(5),
            "age": pytest.approx(trio.current_time() - began - 5.0, abs=0.001),
        }
        peer = RawPeer(links[1].server, client_side=False)
        await peer.start()
        assert len([await peer.wait_for(RequestReceived) for _ in range(2)]) == 2
        nursery.cancel_scope.cancel()


# --- over a socket ---------------------------------------------------------------------------------------------------


async def test_a_port_that_only_accepts() -> None:
    """The kernel accepts for a process that never does, as one that is frozen."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with nothing_left(), trio.open_nursery() as nursery:
            stream = await tcp_dialer("127.0.0.1", listener.getsockname()[1])()
            connection = await HubConnection.open(nursery, stream, peer=HUB, settings=PATIENT)
            with pytest.raises(Unavailable) as caught:
                await connection.wait_heard(0.2)
            assert caught.value.message == NOT_A_WORD.format(0.2)
            await connection.wait_closed()
            # And the stream with it.
            with pytest.raises(trio.ClosedResourceError):
                await stream.receive_some()

"""A hub, as a process of its own, that hostile peers attack, many at once, over real sockets: each of them is cut off
or refused, with a status and counted; the hub's memory stays bounded; and meanwhile everything that an honest cluster
reports is with all honest watchers, one report after the other."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from h2.errors import ErrorCodes
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.hostile.honest import honest_peers
from tests.hostile.peers import (
    LOOK_INTERVAL,
    NOTHING,
    PATIENCE,
    REPORT_PATH,
    WATCH_PATH,
    Hostile,
    HubProcess,
    called,
    frame,
    hub_process,
    message,
    packed,
    request,
)
from trio_federation import wire
from trio_federation.pb.sandbox.sync.v1 import EnvCapacity
from trio_federation.rpc import Cut

#: The hub's, in seconds: as short as a busy machine allows.
TTL, SILENCE, FIRST = 6.0, 4.0, 5.0
RECORD_RATE = 2500
SETTINGS = f"""ttl = "{TTL:g}s"
keepalive = "1s"
silence_limit = "{SILENCE:g}s"
[hub.limits]
first_message = "{FIRST:g}s"
record_rate = {RECORD_RATE}
"""
#: Bytes by which the hub's memory may grow in an attack, and in one with messages that are as large as they may be.
GROWTH, GROWTH_OF_MESSAGES = 24 * 2**20, 64 * 2**20
#: bytes that a flood sends if nobody stops it
FLOOD = 64 * 2**20

Attack = Callable[[int], Awaitable[None]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with hub_process(tmp_path_factory.mktemp("hostile"), SETTINGS) as process:
        yield process


@asynccontextmanager
async def attacked(hub: HubProcess, growth: int) -> AsyncIterator[None]:
    """Honest peers go on during the block, and the hub's memory grows by so much at most."""
    async with honest_peers(hub.port) as honest:
        before = hub.memory()
        hub.forget_peak()
        async with honest.meanwhile():
            yield
        assert hub.memory("VmHWM") - before < growth


async def all_at_once(
    hub: HubProcess, *attacks: Attack, endless: Sequence[Attack] = (), growth: int = GROWTH, **wanted: int
) -> dict[str, float]:
    """Start attacks side by side, and wait for their ends, and until so many connections are cut off for each reason;
    by how much each metric has grown. `endless`: attacks that do not hear of their end."""
    before = await hub.counts()
    async with attacked(hub, growth), trio.open_nursery() as endlessly:
        for attack in endless:
            endlessly.start_soon(attack, hub.port)
        async with trio.open_nursery() as nursery:
            for attack in attacks:
                nursery.start_soon(attack, hub.port)
        with trio.fail_after(PATIENCE):
            while True:
                after = await hub.counts()
                grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
                cut = {str(reason): grown[f"connections_cut_total/{reason}"] for reason in Cut}
                if sum(cut.values()) >= sum(wanted.values()):
                    break
                await trio.sleep(LOOK_INTERVAL)  # a connection counts once all of it has ended
        endlessly.cancel_scope.cancel()
    assert {reason: count for reason, count in cut.items() if count} == wanted
    return grown


# --- frames that carry nothing ---------------------------------------------------------------------------------------


def flood_of(repeated: Callable[[], bytes] | bytes, *first: bytes) -> Attack:
    """Flood a hub with the same bytes, or ever new ones, after some others. It ends as floods do."""

    async def attack(port: int) -> None:
        async with Hostile.connected(port) as peer:
            await peer.begin()
            await peer.send(b"".join(first))
            data = repeated if isinstance(repeated, bytes) else repeated()
            fate = await peer.flood(data, most=FLOOD)
        assert fate.closed
        assert fate.goodbye in (ErrorCodes.ENHANCE_YOUR_CALM, None), fate
        # What it was sent: answers up to where it was cut off, and a window's worth of what there is to watch.
        assert fate.received < 192 * 1024

    return attack


def rapid_resets() -> bytes:
    """Calls that are reset as soon as they are open."""
    block = packed(request(WATCH_PATH))
    return b"".join(
        frame(HeadersFrame, number, data=block, flags=["END_HEADERS"]) + frame(RstStreamFrame, number, error_code=8)
        for number in range(3, 8000, 2)
    )


def split_headers() -> bytes:
    """Calls whose headers come in pieces with nothing in them."""
    block = packed(request(WATCH_PATH))
    return b"".join(
        frame(HeadersFrame, number, data=block)
        + frame(ContinuationFrame, number, data=b"") * 50
        + frame(ContinuationFrame, number, data=b"", flags=["END_HEADERS"])
        + frame(RstStreamFrame, number, error_code=8)
        for number in range(3, 2000, 2)
    )


async def open_a_window_byte_by_byte(port: int) -> None:
    """Each byte that a hub may send costs it a frame."""
    async with Hostile.connected(port) as peer:
        peer.for_data = frame(WindowUpdateFrame, 1, window_increment=1) * 8
        await peer.begin((4, 1))
        await peer.send(called(1, WATCH_PATH, message(b""), end=True))
        fate = await peer.listen()
    assert (fate.closed, fate.goodbye) == (True, ErrorCodes.ENHANCE_YOUR_CALM)


@pytest.mark.slow
async def test_floods_of_frames_that_carry_nothing(hub: HubProcess) -> None:
    """All kinds at once, on a connection with a call that is let in."""
    floods = [flood_of(data, called(1, WATCH_PATH, message(b""))) for data in NOTHING.values()]
    floods += [
        flood_of(frame(RstStreamFrame, 1, error_code=8), called(1, WATCH_PATH, message(b""))),
        flood_of(rapid_resets),
        flood_of(split_headers),
        flood_of(frame(DataFrame, 1, data=b"x"), called(1, REPORT_PATH, struct.pack("!?I", False, 2**23))),
        flood_of(
            frame(SettingsFrame, 0, settings={4: 0}) + frame(SettingsFrame, 0, settings={4: 2**31 - 1}),
            called(1, WATCH_PATH, message(b""), end=True),
        ),
        open_a_window_byte_by_byte,
    ]
    await all_at_once(hub, *floods, flood=len(floods))
    [line] = [line for line in hub.events("connection_cut") if line["reason"] == "flood"]
    assert "carry nothing" in line["error"] or "small pieces" in line["error"]


# --- what breaks HTTP/2 ----------------------------------------------------------------------------------------------


def breach(data: bytes, *codes: ErrorCodes, preface: bool = True) -> Attack:
    """Send bytes that are against the rules; the connection is closed, with one of these codes where any are given."""

    async def attack(port: int) -> None:
        async with Hostile.connected(port) as peer:
            if preface:
                await peer.begin()
            await peer.send(data)
            fate = await peer.listen()
        assert fate.closed
        assert not codes or fate.goodbye in codes, fate

    return attack


def unpacked_to_much() -> bytes:
    """A small block that names one big entry again and again."""
    encoder = Encoder()
    first = encoder.encode([*request(WATCH_PATH), ("x-big", "v" * 3000)])
    return frame(HeadersFrame, 1, data=first + encoder.encode([("x-big", "v" * 3000)]) * 10_000, flags=["END_HEADERS"])


#: of frames that are too long: h2's code, and the one that stands for any breach
TOO_LONG = (ErrorCodes.FRAME_SIZE_ERROR, ErrorCodes.PROTOCOL_ERROR)
BREACHES = {
    "garbage": breach(bytes(range(256)) * 100, preface=False),
    "HTTP/1": breach(b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n", preface=False),
    "TLS": breach(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600), preface=False),
    "garbage after the preface": breach(b"\xff" * 20_000, *TOO_LONG),
    "a frame of 16 MiB": breach(struct.pack("!I", 2**24 - 1)[1:] + b"\0\0\0\0\0\1", *TOO_LONG),
    "more calls than may be open": breach(
        b"".join(called(number, WATCH_PATH) for number in range(1, 301, 2)), ErrorCodes.PROTOCOL_ERROR
    ),
    "headers that unpack to much": breach(unpacked_to_much(), ErrorCodes.ENHANCE_YOUR_CALM),
    "headers without end": breach(
        frame(HeadersFrame, 1, data=packed(request(WATCH_PATH)))
        + frame(ContinuationFrame, 1, data=packed([("x-more", "v" * 16_000)])) * 200,
        ErrorCodes.PROTOCOL_ERROR,
        ErrorCodes.ENHANCE_YOUR_CALM,
    ),
    "a window that overflows": breach(
        frame(WindowUpdateFrame, 0, window_increment=2**31 - 1) * 2, ErrorCodes.FLOW_CONTROL_ERROR
    ),
    "a first window that overflows": breach(
        called(1, WATCH_PATH) + frame(SettingsFrame, 0, settings={4: 2**31}), ErrorCodes.FLOW_CONTROL_ERROR
    ),
    "more data than the window holds": breach(
        called(1, WATCH_PATH) + frame(DataFrame, 1, data=bytes(2**14)) * 300, ErrorCodes.FLOW_CONTROL_ERROR
    ),
    "data of no call": breach(frame(DataFrame, 7, data=b"x"), ErrorCodes.PROTOCOL_ERROR),
    "a reset of no call": breach(frame(RstStreamFrame, 7, error_code=8), ErrorCodes.PROTOCOL_ERROR),
    "a call with an even number": breach(called(2, WATCH_PATH), ErrorCodes.PROTOCOL_ERROR),
}


async def test_peers_that_break_http_2(hub: HubProcess) -> None:
    await all_at_once(hub, *BREACHES.values(), protocol=len(BREACHES))
    # One line for an address and a reason, however many there are.
    assert len([line for line in hub.events("connection_cut") if line["reason"] == "protocol"]) == 1


async def test_a_thousand_calls_at_once(hub: HubProcess) -> None:
    """More than may be open, which is a breach; and, where they come in one piece, more frames than anybody has a use
    for, which is known before any of them is read."""
    before = await hub.counts()
    attack = breach(
        b"".join(called(number, WATCH_PATH) for number in range(1, 2001, 2)),
        ErrorCodes.PROTOCOL_ERROR,
        ErrorCodes.ENHANCE_YOUR_CALM,
    )
    async with attacked(hub, GROWTH):
        await attack(hub.port)
        with trio.fail_after(PATIENCE):
            cut: dict[str, float] = {}
            while not cut:
                await trio.sleep(LOOK_INTERVAL)
                grown = {name: value - before.get(name, 0.0) for name, value in (await hub.counts()).items()}
                cut = {str(each): count for each in Cut if (count := grown[f"connections_cut_total/{each}"])}
    assert cut in ({"flood": 1}, {"protocol": 1})


# --- calls that ask for too much -------------------------------------------------------------------------------------

#: one record, as a report holds it
RECORD = wire.encode(EnvCapacity(cluster_id="", namespace="ns", env_name="env", member_pool="p1", idle=1))
ITEM = b"\x0a" + bytes([len(RECORD)]) + RECORD


def refusal(status: int, data: bytes, cluster: str, *, words: str, **wanted: object) -> Attack:
    """Report bytes, which ends the call with a status, and not the connection."""

    async def attack(port: int) -> None:
        async with Hostile.connected(port) as peer, trio.open_nursery() as nursery:
            await peer.begin()
            await peer.read()  # the hub's settings, with its windows
            await peer.send(called(1, REPORT_PATH, cluster=cluster))
            nursery.start_soon(peer.say, 1, data)
            fate = await peer.listen(until_ended=1)
            nursery.cancel_scope.cancel()
        assert fate.statuses == {1: status}, fate
        assert words in fate.details[1]
        assert not fate.closed

    return attack


async def many_calls_with_large_headers(port: int) -> None:
    """Some megabytes of headers, of calls that nobody has let in."""
    headers = packed([*request(WATCH_PATH, secret="nonsense"), *((f"x-{n}", "v" * 1000) for n in range(12))])
    async with Hostile.connected(port) as peer:
        await peer.begin()
        await peer.send(called(1, WATCH_PATH, message(b""), cluster="headers"))  # or it ends for want of a call
        for first in range(3, 603, 120):
            calls = range(first, first + 120, 2)
            await peer.send(
                b"".join(frame(HeadersFrame, n, data=headers, flags=["END_HEADERS", "END_STREAM"]) for n in calls)
            )
            for number in calls:
                await peer.listen(until_ended=number)
        assert set(peer.fate.statuses.values()) == {16}
        assert len(peer.fate.statuses) == 300


@pytest.mark.slow
async def test_calls_that_ask_for_too_much(hub: HubProcess) -> None:
    attacks = [
        refusal(8, (struct.pack("!?I", False, 2**30)), "gibibyte", words="1073741824 bytes is too large"),
        refusal(8, (message(b"") * 6000), "messages", words="more than 100 messages a second"),
        refusal(8, (message(ITEM * 5_000) * 40), "records", words=f"more than {RECORD_RATE} records a second"),
        refusal(8, (message(b"\x0a\x00" * 100_001)), "large", words="100001 items is too large"),
        many_calls_with_large_headers,
    ]
    grown = await all_at_once(hub, *attacks, growth=GROWTH_OF_MESSAGES)
    assert grown["calls_refused_total/RESOURCE_EXHAUSTED"] >= 2
    assert grown["calls_refused_total/UNAUTHENTICATED"] == 300


# --- peers that do not take what they are sent, or say nothing -------------------------------------------------------


def reads_nothing(cluster: str, *, pings: bool = False, a_byte: bool = False) -> Attack:
    """Watch, with windows of any size, and leave what comes where it is, or take a byte of it a second; with signs of
    life all the while, or without."""

    async def attack(port: int) -> None:
        async with Hostile.connected(port, small_buffer=True) as peer:
            await peer.begin((4, 2**31 - 1))
            await peer.send(frame(WindowUpdateFrame, 0, window_increment=2**30))
            await peer.send(called(1, WATCH_PATH, message(b""), end=True, cluster=cluster))
            while not pings or await peer.send(NOTHING["pings"]):
                await trio.sleep(1.0)
                if a_byte:
                    await peer.read(1)

    return attack


def watch_with(status: int, *settings: tuple[int, int], cluster: str) -> Attack:
    """Watch, and read, but open no window."""

    async def attack(port: int) -> None:
        async with Hostile.connected(port) as peer:
            await peer.begin(*settings)
            await peer.send(called(1, WATCH_PATH, message(b""), end=True, cluster=cluster))
            fate = await peer.listen(until_ended=1)
        assert fate.statuses == {1: status}, fate
        assert fate.received < 128 * 1024

    return attack


async def no_call(port: int) -> None:
    async with Hostile.connected(port) as peer:
        await peer.begin()
        fate = await peer.listen()
    assert (fate.goodbye, fate.words) == (ErrorCodes.NO_ERROR, f"no call that was let in within {FIRST:g} s")


async def no_word(port: int) -> None:
    async with Hostile.connected(port) as peer:
        with trio.fail_after(PATIENCE):
            while await peer.stream.receive_some():
                pass


async def no_message(port: int) -> None:
    async with Hostile.connected(port) as peer:
        await peer.begin()
        await peer.send(called(1, REPORT_PATH, cluster="wordless"))
        fate = await peer.listen(until_ended=1)
    assert fate.statuses == {1: 4}


@pytest.mark.slow
async def test_peers_that_take_nothing_or_say_nothing(hub: HubProcess) -> None:
    """Nine watchers that read nothing or nearly nothing among three that do."""
    stalled = [reads_nothing(f"lazy-{n}", pings=True, a_byte=n % 2 == 0) for n in range(6)]
    silent = [reads_nothing(f"mute-{n}") for n in range(3)]
    others = [
        watch_with(14, (4, 0), cluster="closed"),
        watch_with(14, cluster="unopened"),
        no_message,
        no_call,
        no_word,
    ]
    grown = await all_at_once(hub, *others, endless=[*stalled, *silent], stalled=6, silent=4, no_call=1)
    assert grown["calls_refused_total/DEADLINE_EXCEEDED"] == 1

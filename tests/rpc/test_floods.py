"""How many frames that carry nothing one peer may send: a rule about any order of frames, kinds of peers that may never
be cut off, and floods that always are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RequestReceived
from hyperframe.frame import (
    AltSvcFrame,
    ContinuationFrame,
    DataFrame,
    ExtensionFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given
from hypothesis import strategies as st

from trio_federation import wire
from trio_federation.limits import BURST
from trio_federation.pb.sandbox.sync.v1 import EnvCapacity, FederationBroadcast
from trio_federation.rpc.floods import (
    EARNED_BY_DATA,
    EARNED_BY_HEADERS,
    FIRST,
    FREE,
    MOST_EARNED,
    SMALL,
    SMALL_RATE,
    BudgetedFrames,
    FloodError,
    FrameBudget,
    FrameHeads,
    too_many,
)

AT_ONCE = int(FIRST)


def ping(*, ack: bool = False) -> PingFrame:
    return PingFrame(0, b"12345678", flags=["ACK"] if ack else [])


def settings(*, ack: bool = False) -> SettingsFrame:
    return SettingsFrame(0, flags=["ACK"] if ack else [])


def window(stream_id: int = 0) -> WindowUpdateFrame:
    return WindowUpdateFrame(stream_id, 100)


def data(size: int, *, end: bool = False, padding: int = 0) -> DataFrame:
    flags = [name for name, there in (("PADDED", padding), ("END_STREAM", end)) if there]
    return DataFrame(1, b"x" * size, pad_length=padding, flags=flags)


#: one of every kind of frame that carries nothing
EMPTY: dict[str, Callable[[], Frame]] = {
    "PING": ping,
    "PING ack": lambda: ping(ack=True),
    "SETTINGS": settings,
    "SETTINGS ack": lambda: settings(ack=True),
    "PRIORITY": lambda: PriorityFrame(1, depends_on=3),
    "WINDOW_UPDATE": window,
    "WINDOW_UPDATE of a call": lambda: window(1),
    "RST_STREAM": lambda: RstStreamFrame(1),
    "DATA": lambda: data(0),
    "DATA that ends": lambda: data(0, end=True),
    "DATA of padding": lambda: data(0, padding=20),
    "HEADERS": lambda: HeadersFrame(1, b"", flags=["END_HEADERS"]),
    "CONTINUATION": lambda: ContinuationFrame(1, b""),
    "ALTSVC": lambda: AltSvcFrame(1),
    "GOAWAY": lambda: GoAwayFrame(0),
    "of unknown type 66": lambda: ExtensionFrame(66, 0),
}


def taken(budget: FrameBudget, frames: Iterable[Frame], now: float) -> int:
    """How many frames are taken until one is too many."""
    count = 0
    for frame in frames:
        if budget.received(frame, now) is not None:
            break
        count += 1
    return count


def endless(make: Callable[[], Frame]) -> Iterator[Frame]:
    frame = make()
    while True:
        yield frame


# --- floods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EMPTY)
def test_a_flood_of_any_kind_ends_at_what_is_free(kind: str) -> None:
    budget = FrameBudget()
    assert taken(budget, endless(EMPTY[kind]), 5.0) == AT_ONCE
    reason = budget.received(EMPTY[kind](), 5.0)
    assert reason is not None
    assert f"the latest of them {kind.split(' ack')[0].split(' that')[0].split(' of a')[0].split(' of p')[0]}" in reason
    # A second later there is a second's worth again.
    assert taken(budget, endless(EMPTY[kind]), 6.0) == FREE


def test_calls_that_are_reset_at_once_are_a_flood() -> None:
    budget = FrameBudget()
    call = (EMPTY["HEADERS"](), EMPTY["RST_STREAM"]())
    assert taken(budget, (frame for _ in range(AT_ONCE) for frame in call), 0.0) == AT_ONCE


@pytest.mark.parametrize("size", [1, 5, SMALL - 1])
def test_pieces_of_a_few_bytes_are_a_flood_in_the_end(size: int) -> None:
    budget = FrameBudget()
    assert taken(budget, endless(lambda: data(size)), 0.0) == SMALL_RATE * BURST
    reason = budget.received(data(size), 0.0)
    assert reason is not None
    assert "small pieces of data" in reason
    # They take nothing from what others may cost.
    assert taken(budget, endless(ping), 0.0) == AT_ONCE


def test_whole_pieces_are_never_a_flood() -> None:
    budget = FrameBudget()
    assert all(budget.received(data(SMALL), 0.0) is None for _ in range(int(SMALL_RATE * BURST) + AT_ONCE + 10))
    assert taken(budget, endless(ping), 0.0) == AT_ONCE


def test_a_window_of_a_few_bytes_earns_nothing() -> None:
    """Opening a window byte by byte makes this side send a frame for each, which must not pay for the next."""
    budget = FrameBudget()
    for _ in range(AT_ONCE):
        assert budget.received(window(1), 0.0) is None
        budget.sent(data(SMALL - 1))
    assert budget.received(window(1), 0.0) is not None


def test_no_message_with_a_record_is_small() -> None:
    """Or a watcher that gives back the window of each would be cut off."""
    smallest = FederationBroadcast(items=[EnvCapacity(cluster_id="a", namespace="b", env_name="c")])
    assert len(wire.encode(smallest)) + 5 >= SMALL


def test_what_is_earned_is_bounded() -> None:
    budget = FrameBudget()
    for _ in range(MOST_EARNED):
        budget.sent(data(1000))
    assert taken(budget, endless(window), 0.0) == MOST_EARNED + AT_ONCE


@pytest.mark.parametrize("kind", ["PING ack", "SETTINGS ack", "WINDOW_UPDATE", "RST_STREAM", "PRIORITY", "DATA"])
def test_what_this_side_answers_with_earns_nothing(kind: str) -> None:
    """Or a flood of pings would pay for itself."""
    budget = FrameBudget()
    for _ in range(1000):
        budget.sent(EMPTY[kind]())
    assert taken(budget, endless(ping), 0.0) == AT_ONCE


# --- the rule --------------------------------------------------------------------------------------------------------

#: seconds that go by, a frame that comes in, or one that goes out
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("time"), st.floats(0.0, 30.0)),
        st.tuples(st.just("in"), st.sampled_from(sorted(EMPTY)), st.integers(1, 2000)),
        st.tuples(st.just("out"), st.sampled_from(["data", "headers", "ping", "ack"]), st.integers(1, 3000)),
    ),
    max_size=20,
)
_EARNS: dict[str, tuple[Callable[[], Frame], int]] = {
    "data": (lambda: data(SMALL), EARNED_BY_DATA),
    "headers": (EMPTY["HEADERS"], EARNED_BY_HEADERS),
    "ping": (ping, 1),
    "ack": (lambda: ping(ack=True), 0),
}


@given(_STEPS)
def test_what_is_taken_is_what_was_earned_and_what_time_gives(steps: list[tuple[object, ...]]) -> None:
    """Against a count of our own: never one less, as a peer that only reacts may not be cut off, and never one more."""
    budget = FrameBudget()
    assert budget.received(ping(), 0.0) is None  # from which on time counts
    now, earned, free = 0.0, 0, FIRST - 1
    for step in steps:
        match step:
            case ("time", float(seconds)):
                now += seconds
                free = min(FREE * BURST, free + FREE * seconds)
            case ("in", str(kind), int(count)):
                frame = EMPTY[kind]()
                expected = min(count, earned + int(free + 1e-6))
                got = taken(budget, [frame] * count, now)
                assert abs(got - expected) <= (1 if got < count else 0)  # where rounding falls
                paid = min(got, earned)
                earned -= paid
                free -= got - paid
            case ("out", str(what), int(count)):
                make, each = _EARNS[what]
                for _ in range(count):
                    budget.sent(make())
                earned = min(MOST_EARNED, earned + each * count)


# --- peers that may never be cut off ---------------------------------------------------------------------------------


def told(budget: FrameBudget, now: float, *frames: Frame) -> None:
    """Frames that come in, none of which may be too many."""
    for frame in frames:
        assert budget.received(frame, now) is None, f"{frame} at {now}"


def test_a_watcher_of_a_thousand_broadcasts_a_second() -> None:
    """It gives back the window of each, of its call and of the connection, and measures its bandwidth with a ping and
    with settings, for as long as it likes; also when it was frozen and then reads what had waited."""
    budget = FrameBudget()
    for second in range(20):
        for number in range(1000):
            budget.sent(data(SMALL))
            told(budget, second + number / 1000, window(1), window(), ping(), settings())
    for _ in range(2000):
        budget.sent(data(SMALL))
    for _ in range(2000):
        told(budget, 70.0, window(1), window(), ping(), settings())


def test_a_reporter_of_a_hundred_messages_a_second_with_keepalive() -> None:
    budget = FrameBudget()
    for tick in range(6000):
        told(budget, tick / 100, data(13))
        if tick % 10 == 0:
            told(budget, tick / 100, ping())
        if tick % 100 == 0:
            budget.sent(ping())
            told(budget, tick / 100, ping(ack=True))


@pytest.mark.parametrize("at_once", [1, 100])
def test_calls_that_come_and_go_as_fast_as_they_are_answered(at_once: int) -> None:
    """10,000 calls that are refused early, in no time at all, as many open at once as may be; each with its message,
    its end, the reset by a caller that hears of the end early, and windows."""
    budget = FrameBudget()
    for _ in range(10_000 // at_once):
        for _ in range(at_once):
            told(budget, 0.0, EMPTY["HEADERS"](), data(7), EMPTY["DATA that ends"](), window(1))
        for _ in range(at_once):
            budget.sent(HeadersFrame(1, b"", flags=["END_STREAM", "END_HEADERS"]))
        for _ in range(at_once):
            told(budget, 0.0, RstStreamFrame(1), window())


def test_calls_that_are_given_up_now_and_then() -> None:
    """Some callers give up before they hear anything, and a hub that is busy has not answered a hundred at once."""
    budget = FrameBudget()
    for second in range(1, 600):
        for _ in range(33):
            told(budget, float(second), EMPTY["HEADERS"](), EMPTY["DATA that ends"](), RstStreamFrame(1))
    for _ in range(100):
        told(budget, 700.0, EMPTY["HEADERS"](), data(7), EMPTY["DATA that ends"](), window(1), RstStreamFrame(1))


def test_a_hub_that_answers_what_an_agent_sends() -> None:
    """The agent's side: the hub gives back windows, answers calls, measures, and broadcasts small things quickly."""
    budget = FrameBudget()
    for second in range(15):
        budget.sent(EMPTY["HEADERS"]())
        told(budget, float(second), EMPTY["HEADERS"](), EMPTY["HEADERS"](), RstStreamFrame(1))
        for number in range(100):
            budget.sent(data(40))
            told(budget, second + number / 100, window(1), window(), ping())
        for _ in range(2000):
            told(budget, float(second + 1), data(13))


# --- in h2 -----------------------------------------------------------------------------------------------------------

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/p"), (":authority", "h")]


class Budgeted(H2Connection):
    """h2's server with a budget."""

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(H2Configuration(client_side=False))
        self.budget = FrameBudget()
        self.incoming_buffer = BudgetedFrames(self.budget, now, server=True)

    def _prepare_for_sending(self, frames: list[Frame]) -> None:
        for frame in frames:
            self.budget.sent(frame)
        super()._prepare_for_sending(frames)


def opened(now: Callable[[], float] = lambda: 0.0) -> tuple[H2Connection, Budgeted]:
    """A client, and a server that has heard of its beginning and of one call."""
    client, server = H2Connection(H2Configuration(client_side=True)), Budgeted(now)
    client.initiate_connection()
    server.initiate_connection()
    client.receive_data(server.data_to_send())
    client.send_headers(1, REQUEST)
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    return client, server


def goodbyes(sent: bytes) -> list[int]:
    """The codes of the GOAWAY frames in what was sent."""
    codes = []
    while sent:
        frame, length = Frame.parse_frame_header(memoryview(sent[:9]))
        frame.parse_body(memoryview(sent[9 : 9 + length]))
        sent = sent[9 + length :]
        if isinstance(frame, GoAwayFrame):
            codes.append(frame.error_code)
    return codes


@pytest.mark.parametrize("kind", [kind for kind in EMPTY if kind not in ("HEADERS", "DATA that ends", "CONTINUATION")])
def test_a_flood_is_noticed_in_the_middle_of_one_read(kind: str) -> None:
    """However much comes at once, no frame after the one too many is looked at; also where h2 tells of no event, as for
    what comes for a call that was reset."""
    _, server = opened()
    answers = len(server.data_to_send())
    with pytest.raises(FloodError, match="carry nothing"):
        server.receive_data(EMPTY[kind]().serialize() * 5000)
    sent = server.data_to_send()
    assert goodbyes(sent) == [ErrorCodes.ENHANCE_YOUR_CALM]
    # Nobody is sent more than a few answers for it.
    assert len(sent) + answers <= (AT_ONCE + 2) * 17 + 100


def test_frames_for_a_call_that_has_ended_count() -> None:
    client, server = opened()
    client.reset_stream(1)
    server.receive_data(client.data_to_send())
    with pytest.raises(FloodError, match="WINDOW_UPDATE"):
        server.receive_data(window(1).serialize() * (AT_ONCE + 1))


def test_a_header_block_in_many_pieces_costs_each_of_them() -> None:
    client, server = opened()
    pieces = 50

    def open_call(number: int) -> None:
        stream_id = 2 * number + 1
        block = HeadersFrame(stream_id, client.encoder.encode(REQUEST), flags=["END_STREAM"]).serialize()
        block += ContinuationFrame(stream_id, b"").serialize() * (pieces - 2)
        block += ContinuationFrame(stream_id, b"", flags=["END_HEADERS"]).serialize()
        assert RequestReceived in {type(event) for event in server.receive_data(block)}

    most = AT_ONCE // pieces
    for number in range(1, most):
        open_call(number)
    with pytest.raises(FloodError, match="CONTINUATION"):
        open_call(most)


def test_answers_and_data_earn_through_h2() -> None:
    """What h2 sends is counted where it leaves, so any number of calls that are answered is fine."""
    client, server = opened()
    for number in range(1, 3 * AT_ONCE):
        stream_id = 2 * number + 1
        client.send_headers(stream_id, REQUEST)
        server.receive_data(client.data_to_send())
        server.send_headers(stream_id, [(":status", "200"), ("grpc-status", "16")], end_stream=True)
        client.receive_data(server.data_to_send())
        client.reset_stream(stream_id)
        server.receive_data(client.data_to_send())


def test_time_is_that_of_the_clock() -> None:
    now = 0.0
    _, server = opened(lambda: now)
    for _ in range(10):
        now += 10.0
        server.receive_data(ping().serialize() * AT_ONCE)
        server.data_to_send()
    with pytest.raises(FloodError):
        server.receive_data(ping().serialize() * int(FREE * BURST))


# --- what is known of frames that are not read yet -------------------------------------------------------------------

some_frames = st.lists(
    st.one_of(
        st.sampled_from(sorted(EMPTY)).map(lambda kind: EMPTY[kind]()),
        st.integers(0, 600).map(data),
        st.integers(0, 600).map(lambda size: HeadersFrame(1, bytes(size))),
    ),
    max_size=30,
)


@given(some_frames, st.integers(0, 40), st.lists(st.integers(1, 400), max_size=20))
def test_heads_are_found_however_the_bytes_come(frames: list[Frame], skip: int, sizes: list[int]) -> None:
    """Of each frame the type, and whether it ends a call, where its head is complete, whatever the pieces."""
    sent = b"\xff" * skip + b"".join(frame.serialize() for frame in frames)
    wanted, end = [], skip
    for frame in frames:
        wanted.append((frame.type, "END_STREAM" in frame.flags or isinstance(frame, RstStreamFrame), end + 9))
        end += len(frame.serialize())
    heads, found, at = FrameHeads(skip), [], 0
    for size in [*sizes, len(sent)]:
        piece = sent[at : at + size]
        positions = list(heads.find(piece))
        assert all(0 < head.position <= len(piece) for head in positions)
        found += [(head.kind, head.ends, at + head.position) for head in positions]
        at += len(piece)
    assert found == wanted


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_any_bytes_have_heads_of_some_kind(pieces: list[bytes]) -> None:
    one, other = FrameHeads(24), FrameHeads(24)
    found = [head[:2] for piece in pieces for head in list(one.find(piece))]
    assert found == [head[:2] for head in other.find(b"".join(pieces))]


@given(
    st.integers(0, 600),
    st.integers(0, 700),
    st.integers(0, 10),
    st.floats(0.0, 20.0),
    st.sampled_from([kind for kind in sorted(EMPTY) if "DATA" not in kind]),
)
def test_what_is_foreseen_comes_to_pass(before: int, number: int, calls: int, later: float, kind: str) -> None:
    """As many can be paid as are taken then; and to ask is all that comes of it."""
    budget, never_asked = FrameBudget(), FrameBudget()
    for each in (budget, never_asked):
        taken(each, [EMPTY[kind]()] * before, 0.0)
        for _ in range(calls):
            each.sent(EMPTY["HEADERS"]())
    most = budget.can_pay(later)
    assert (number <= most) == (taken(never_asked, [EMPTY[kind]()] * number, later) == number)
    assert taken(budget, endless(EMPTY[kind]), later) == math.floor(most)
    assert budget.received(EMPTY[kind](), later) == too_many(EMPTY[kind]().type)

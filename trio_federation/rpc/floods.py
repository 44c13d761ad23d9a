"""When a peer has sent too many frames that carry nothing. HTTP/2 sets no limit on settings, pings, resets and the
like, each of which costs the receiver more than the sender, and some of which have to be answered. Pure: frames and
times are arguments. What is done about such a peer is `transport.py`'s business, how many messages and records a
cluster may send is `limits.py`'s, and how long a peer may be silent or not read is the transport's again.

The rule: a frame that carries nothing costs one. It is paid with what this side has earned the peer by what it sent,
and else with an allowance that grows with time. So a peer may always react to what it gets, however fast that comes,
and may do a little of its own accord.

    this side sent ──▶ earned, at most MOST_EARNED ──┐
    time went by ──▶ FREE a second, BURST s of it ───┴──▶ pays for what came in, or the peer is told to calm down

What reading one such frame costs, in h2 alone, is 5 to 10 µs, and a call that is opened and reset costs 40 (one core of
a small machine). FREE keeps what a peer can take up with them near a thousandth of a core, and all of its savings at
once near 0.1 s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.frame_buffer import FrameBuffer
from hyperframe.frame import FRAMES, DataFrame, Frame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame

from trio_federation.limits import Allowance

#: Frames that carry nothing that a peer may send of its own accord, in a second, and ten times as many at once. A ping
#: every 100 ms, which is more than any gRPC library sends, is a tenth of it. What comes at once and has not been
#: answered yet is a hundred calls at most, as no more may be open, each of them two or three frames.
FREE: Final = 100.0
#: What of it a peer begins with, so that one that is cut off and comes back costs no more than one that stays: enough
#: for a hundred calls that are opened at once, which is as many as may be open.
FIRST: Final = 300.0
#: What a DATA frame that this side sends earns: a WINDOW_UPDATE of its stream and one of the connection, and for gRPC
#: libraries that estimate the bandwidth by what they get, a ping, and the settings that follow from it.
EARNED_BY_DATA: Final = 4
#: What a HEADERS frame that this side sends earns: it begins or ends a call. The one that opened it, the empty DATA
#: frame that ends the request, the reset of a caller that hears of its end early, WINDOW_UPDATEs of both kinds, and one
#: more. So a call that is answered has cost its caller nothing, however fast calls come, and one that is given up
#: before there was an answer is paid with FREE.
EARNED_BY_HEADERS: Final = 6
#: What can be earned and not used at any time: a peer that was frozen may still react to some thousand frames that were
#: on their way to it.
MOST_EARNED: Final = 10_000

#: A DATA frame with fewer bytes is small: no message with a record is. It may be a part of a message, or a sign of
#: life, and costs as much to read as one that carries nothing, so that a message in pieces of a byte is a flood as
#: well. And it earns nothing when it is sent, or a peer that opens its window byte by byte would earn more than that
#: costs it.
SMALL: Final = 16
#: Small DATA frames that are taken in a second, and ten times as many at once. Agents send 100 messages a second at
#: most, unless the hub lets them send more, and hubs some thousand; behind a proxy many of them may share a connection.
SMALL_RATE: Final = 2_000.0


#: Bytes of a frame's head: length, type, flags, stream.
_HEAD: Final = 9
#: The types of frames that may have the flag that ends their side of a call, and the flag.
_MAY_END: Final = (DataFrame.type, HeadersFrame.type)
_END_STREAM: Final = 0x1


class FloodError(ProtocolError):
    """A peer has sent too many frames that carry nothing. h2 says so to it by itself: GOAWAY, ENHANCE_YOUR_CALM."""

    error_code = ErrorCodes.ENHANCE_YOUR_CALM


class FrameBudget:
    """What one peer may still send on one connection of frames that carry nothing. Told of every frame in both
    directions; times are seconds of any clock, and begin anywhere."""

    __slots__ = ("_earned", "_free", "_small")

    def __init__(self) -> None:
        self._earned = 0
        self._free = Allowance(FREE, first=FIRST)
        self._small = Allowance(SMALL_RATE)

    def received(self, frame: Frame, now: float) -> str | None:
        """Count a frame that came in at `now`; pieces of a header block one by one. None, or in words why that was one
        too many."""
        if isinstance(frame, DataFrame):
            size = len(frame.data)  # without padding, which is nothing as well
            if size >= SMALL:
                return None
            if size and self._small.take(1, now):
                return None
            if size:
                return f"too many small pieces of data: over {SMALL_RATE:g} frames a second of less than {SMALL} bytes"
        if self._earned:
            self._earned -= 1
            return None
        if self._free.take(1, now):
            return None
        return too_many(frame.type)

    def can_pay(self, now: float) -> float:
        """How many frames that are not DATA can be paid at `now`, where nothing is sent in between."""
        return self._earned + self._free.left(now)

    def sent(self, frame: Frame) -> None:
        """Count a frame that this side has sent, or is about to."""
        if isinstance(frame, DataFrame):
            earned = EARNED_BY_DATA if len(frame.data) >= SMALL else 0
        elif isinstance(frame, HeadersFrame):
            earned = EARNED_BY_HEADERS
        elif isinstance(frame, (PingFrame, SettingsFrame)):
            # The peer has to acknowledge it. Acknowledgements of this side's are answers themselves.
            earned = 0 if "ACK" in frame.flags else 1
        else:
            earned = 0
        self._earned = min(self._earned + earned, MOST_EARNED)


class Head(NamedTuple):
    """The head of a frame among bytes: its type, whether it ends a call, and the position behind it."""

    kind: int
    ends: bool
    position: int


class FrameHeads:
    """The heads of the frames in the bytes of one peer, found without a look at what is in them. That costs a hundredth
    of reading them, so what comes of much that comes in one piece is known before any of it is read.

    `skip`: bytes before the first frame."""

    __slots__ = ("_begun", "_left")

    def __init__(self, skip: int = 0) -> None:
        #: bytes of the current frame, or of what is skipped, that are still to come
        self._left = skip
        #: of a head that is not complete
        self._begun = b""

    def find(self, data: bytes) -> Iterator[Head]:
        """The heads that are complete with the next bytes. To be read to its end, if anything is to follow. Any bytes
        are frames of some kind."""
        position, size = 0, len(data)
        while True:
            step = min(self._left, size - position)
            self._left -= step
            position += step
            part = data[position : position + _HEAD - len(self._begun)]
            position += len(part)
            head = self._begun + part
            if self._left or len(head) < _HEAD:
                self._begun = head
                return
            self._begun = b""
            self._left = int.from_bytes(head[:3], "big")
            kind = head[3]
            ends = kind == RstStreamFrame.type or (kind in _MAY_END and bool(head[4] & _END_STREAM))
            yield Head(kind, ends, position)


class BudgetedFrames(FrameBuffer):
    """h2's buffer of what came in, which counts each frame as it is taken out, before h2 does anything with it.

    `clock`: seconds. Taking a frame out raises FloodError where that was one too many."""

    def __init__(self, budget: FrameBudget, clock: Callable[[], float], *, server: bool) -> None:
        super().__init__(server=server)
        self._budget = budget
        self._clock = clock

    def _update_header_buffer(self, f: Frame | None) -> Frame | None:
        # h2's hook for each frame. Its own events leave out some: pieces of a header block, and whatever comes for a
        # call that has ended.
        if f is not None:
            reason = self._budget.received(f, self._clock())
            if reason is not None:
                raise FloodError(reason)
        return super()._update_header_buffer(f)


def too_many(latest: int | None) -> str:
    """That there were too many frames that carry nothing, in words. `latest`: the type of the latest."""
    return f"too many frames that carry nothing, the latest of them {_name(latest)}: over {FREE:g} a second"


def _name(kind: int | None) -> str:
    """A type of frame, as the protocol calls it."""
    if kind not in FRAMES:
        return f"of unknown type {kind}"
    names = {"RstStream": "RST_STREAM", "WindowUpdate": "WINDOW_UPDATE", "PushPromise": "PUSH_PROMISE"}
    name = FRAMES[kind].__name__.removesuffix("Frame")
    return names.get(name, name.upper())

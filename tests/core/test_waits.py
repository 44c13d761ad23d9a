"""For how long messages had waited, held against what nobody in the federation knows: when they really were made and
read. Two clocks that run apart, and a line that does with messages what it likes but reorder them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trio_federation import waits as room
from trio_federation.waits import LEAK, LEAST, OPENING_COUNTS_FOR, Waits, microseconds

#: Seconds that arithmetic and whole microseconds on the wire may make of nothing.
TINY = 1e-5
#: the worst that a clock of these tests is off, in seconds per second
WORST_DRIFT = 5e-4


class Sent(NamedTuple):
    """One message, in seconds of true time: when it was made, and for how long it was on its way."""

    at: float
    delay: float


@dataclass
class Clocks:
    """What two clocks show at a moment of true time."""

    sender_offset: float = 0.0
    receiver_offset: float = 0.0
    sender_drift: float = 0.0
    receiver_drift: float = 0.0

    def sender(self, at: float) -> float:
        """What the sender's clock shows."""
        return self.sender_offset + at * (1 + self.sender_drift)

    def receiver(self, at: float) -> float:
        """What the receiver's clock shows."""
        return self.receiver_offset + at * (1 + self.receiver_drift)

    def apart(self, seconds: float) -> float:
        """By how much they come apart in that time, at the most."""
        return seconds * (abs(self.sender_drift) + abs(self.receiver_drift))


def in_order(sent: Iterable[Sent]) -> list[Sent]:
    """None overtakes one that was made before it."""
    found: list[Sent] = []
    read_at = -math.inf
    for each in sorted(sent):
        read_at = max(read_at, each.at + each.delay)
        found.append(Sent(each.at, read_at - each.at))
    return found


def counted(clocks: Clocks, sent: Sequence[Sent], *, opening: float | None, told_in: int = 0) -> list[float]:
    """What a receiver counts of messages that come in. It has begun the connection at 0, and its sender has heard of
    it `opening` seconds later; None: it does not tell. `told_in`: the number of the message that tells it."""
    waits = Waits(clocks.receiver(0.0))
    found = []
    for number, each in enumerate(sent):
        tells = opening is not None and number == told_in
        opened_us = microseconds(clocks.sender(opening)) if tells and opening is not None else 0
        sent_us = microseconds(clocks.sender(each.at))
        now = clocks.receiver(each.at + each.delay)
        assert waits.is_bounded(sent_us, opened_us) == (opening is not None and number >= told_in)
        found.append(waits.waited(sent_us, opened_us, now))
    return found


drifts = st.floats(-WORST_DRIFT, WORST_DRIFT)
# A clock counts since some moment of its owner's choosing, which a sender's times are never before.
clocks_of_any_kind = st.builds(Clocks, st.floats(0.001, 1e8), st.floats(-1e6, 1e8), drifts, drifts)
delays = st.one_of(st.just(0.0), st.floats(0.0, 0.05), st.floats(0.0, 60.0))


@st.composite
def stories(draw: st.DrawFn) -> tuple[float, list[Sent]]:
    """How long the opening took, and the messages that followed it, in the order in which they are read."""
    opening = draw(st.one_of(st.just(0.0), st.floats(0.0, 20.0)))
    gaps = st.one_of(st.floats(0.0, 1.0), st.floats(0.0, 15.0), st.floats(0.0, 3600.0))
    at, sent = opening, []
    for gap, delay in draw(st.lists(st.tuples(gaps, delays), min_size=1, max_size=30)):
        at += gap
        sent.append(Sent(at, delay))
    return opening, in_order(sent)


class Expected(NamedTuple):
    """The bounds of what may be counted of one message."""

    at_least: float
    at_most: float


def expected(clocks: Clocks, sent: Sequence[Sent], opening: float | None, told_in: int) -> list[Expected]:
    """What may be counted of each message, told by somebody who looks at the true time. Naive: of each message it asks
    all before it."""
    told_at = clocks.receiver(sent[told_in].at + sent[told_in].delay) if told_in < len(sent) else math.inf
    found = []
    for number, each in enumerate(sent):
        read_at = each.at + each.delay
        quickest, least = math.inf, math.inf
        for one in sent[: number + 1]:
            one_read_at = one.at + one.delay
            apart = clocks.apart(max(read_at - one_read_at, each.at - one.at))
            forgotten = LEAK * (clocks.receiver(read_at) - clocks.receiver(one_read_at))
            quickest = min(quickest, one.delay + forgotten + apart)
            least = min(least, one.delay - apart)
        if opening is not None and number >= told_in and clocks.receiver(read_at) < told_at + OPENING_COUNTS_FOR:
            # As if a message had come before it was sent, as long as the opening took.
            quickest = min(quickest, -opening + clocks.apart(read_at))
            least = min(least, -opening - clocks.apart(read_at))
        found.append(Expected(each.delay - quickest - LEAST, each.delay - least))
    return found


@given(clocks=clocks_of_any_kind, story=stories(), told_in=st.one_of(st.none(), st.just(0), st.integers(0, 5)))
@example(clocks=Clocks(), story=(0.0, [Sent(0.0, 11.9), Sent(11.9, 0.0)]), told_in=0)
@example(clocks=Clocks(), story=(3.0, [Sent(3.0, 5.0), Sent(4.0, 8.0), Sent(70.0, 8.0)]), told_in=0)
@example(clocks=Clocks(), story=(3.0, [Sent(3.0, 5.0), Sent(4.0, 8.0), Sent(12.5, 8.0)]), told_in=1)
def test_a_message_is_never_counted_younger_or_older_than_that(
    clocks: Clocks, story: tuple[float, list[Sent]], told_in: int | None
) -> None:
    """A message is counted for no less than it took longer than the quickest so far, but for what is forgotten of that
    and what the clocks came apart; and, for a while, for all that it took and the opening besides, from the message on
    that tells of that. It is counted for no
    more than that, and never for more than it took once the opening does not count."""
    opening, sent = story
    heard = None if told_in is None else opening
    found = counted(clocks, sent, opening=heard, told_in=told_in or 0)
    slack = TINY + 1e-14 * (abs(clocks.sender_offset) + abs(clocks.receiver_offset)) * 100
    for wait, bounds in zip(found, expected(clocks, sent, heard, told_in or 0), strict=True):
        assert bounds.at_least - slack <= wait <= max(0.0, bounds.at_most) + slack


@given(clocks=clocks_of_any_kind, story=stories())
def test_it_is_the_quickest_so_far_that_counts(clocks: Clocks, story: tuple[float, list[Sent]]) -> None:
    """On clocks that run equally fast, and without an opening, to the microsecond: how much longer than the quickest
    so far, of which each second that has passed since then forgets a millisecond."""
    clocks.sender_drift = clocks.receiver_drift = 0.0
    sent = story[1]
    for number, wait in enumerate(counted(clocks, sent, opening=None)):
        read_at = sent[number].at + sent[number].delay
        quickest = min(one.delay + LEAK * (read_at - one.at - one.delay) for one in sent[: number + 1])
        exact = sent[number].delay - quickest
        assert wait == (pytest.approx(exact, abs=TINY) if wait else 0.0)
        assert wait or exact < LEAST + TINY


def every(seconds: float, hours: float, delay: float, *, since: float = 0.0) -> list[Sent]:
    """Messages at that distance, all of them equally long on their way."""
    return [Sent(since + number * seconds, delay) for number in range(round(hours * 3600 / seconds))]


@pytest.mark.parametrize("drift", [-WORST_DRIFT, 0.0, WORST_DRIFT])
def test_a_line_that_has_become_slow_stays_so(drift: float) -> None:
    """Five seconds for an hour, after an hour without any: none of it is taken for quick but what is forgotten, three
    and a half seconds in an hour; a minute later nearly nothing is."""
    quick = every(5.0, 1.0, 0.0)
    slow = every(5.0, 1.0, 5.0, since=3600.0)
    found = counted(Clocks(7.0, 1e6, -drift, drift), [*quick, *slow], opening=0.0)[len(quick) :]
    for number, wait in enumerate(found):
        passed = 5.0 * number + 15.0
        assert 5.0 - (LEAK + 2 * WORST_DRIFT) * passed - LEAST <= wait <= 5.0 + 2 * WORST_DRIFT * (passed + 5.0) + TINY
    if drift == 0.0:
        assert found[12] > 4.9
        assert found[-1] > 1.0


@pytest.mark.parametrize("sender", [-WORST_DRIFT, 0.0, WORST_DRIFT])
@pytest.mark.parametrize("receiver", [-WORST_DRIFT, 0.0, WORST_DRIFT])
def test_drift_alone_adds_up_to_nothing_in_a_day(sender: float, receiver: float) -> None:
    clocks = Clocks(1.0, 5000.0, sender, receiver)
    found = counted(clocks, every(10.0, 24.0, 0.02), opening=0.02)
    # While the opening counts, what the clocks have come apart until then counts, too, and what it has taken.
    while_it_counts, later = found[:7], found[7:]
    assert max(while_it_counts) <= 0.04 + clocks.apart(61.0) + TINY
    assert max(later) <= 10.0 * max(0.0, receiver - sender) + LEAST
    assert max(later) == 0.0 or receiver > sender


def test_an_opening_counts_for_a_while_and_no_longer() -> None:
    """The first messages have nothing to be compared with but it: what waited in a peer that stood still when the
    connection was made is as old as it is from the first message on."""
    until = 12.0 + OPENING_COUNTS_FOR
    sent = [Sent(4.0, 8.0), *(Sent(at, 0.25) for at in (12.5, 13.0, until - 1.0, until + 0.5, until + 100.0))]
    found = counted(Clocks(3.0, 900.0), sent, opening=4.0)
    # Read at 12 s.
    assert found == pytest.approx([12.0, 4.25, 4.25, 4.25, 0.0, 0.0], abs=TINY)


def test_a_peer_that_does_not_tell_is_never_late() -> None:
    """Nor does it make anything of what it says later, or of an opening without a moment."""
    waits = Waits(100.0)
    assert [waits.waited(0, opened_us, now) for opened_us, now in ((0, 101.0), (5, 200.0), (0, 9000.0))] == [0.0] * 3
    assert waits.waited(1_000_000, 0, 9001.0) == 0.0
    assert waits.waited(0, 0, 9500.0) == 0.0
    assert waits.waited(2_000_000, 0, 9004.0) == pytest.approx(2.0 - 3 * LEAK)


def test_only_what_can_be_held_against_an_opening_is_bounded() -> None:
    """A time alone bounds nothing, before the opening was told; who tells no time at all is taken at its word."""
    waits = Waits(100.0)
    assert waits.is_bounded(0, 0)
    assert not waits.is_bounded(1, 0)
    assert waits.waited(1_000_000, 0, 108.0) == 0.0
    assert not waits.is_bounded(2_000_000, 0)
    assert waits.is_bounded(3_000_000, 3_000_000)
    assert not waits.is_bounded(3_000_000, 0)
    # Sent when it had heard what was said at 100 s; quicker than that can nothing have been.
    assert waits.waited(3_000_000, 3_000_000, 110.0) == pytest.approx(10.0)
    assert waits.is_bounded(4_000_000, 0)


def test_an_opening_that_is_a_lie_hides_nothing() -> None:
    """A peer that has heard of the connection before it was begun, by its own account: its messages are still compared
    with each other."""
    waits = Waits(1000.0)
    assert waits.waited(100_000_000, 1, 1000.0) == 0.0
    assert waits.waited(101_000_000, 0, 1011.0) == pytest.approx(10.0 - 11 * LEAK)


def test_a_clock_that_goes_back_forgets_nothing() -> None:
    """None should. What was quick before stays so, and is not quicker than it was."""
    waits = Waits(0.0)
    assert waits.waited(1_000_000, 0, 1000.0) == 0.0
    assert waits.waited(400_000_000 + 1_000_000, 0, 500.0) == 0.0  # the quickest, by 900 s
    assert waits.waited(401_000_000 + 1_000_000, 0, 511.0) == pytest.approx(10.0)
    assert waits.waited(899_000_000 + 1_000_000, 0, 1009.0) == pytest.approx(10.0 - 9 * LEAK)


stamps = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**63, 2**64 - 1]))


@given(
    began=st.floats(-1e9, 1e9),
    told=st.lists(st.tuples(stamps, stamps, st.floats(0.0, 100.0)), max_size=30),
    back=st.booleans(),
)
def test_nothing_that_a_peer_says_does_any_harm(began: float, told: list[tuple[int, int, float]], back: bool) -> None:
    """Any numbers, in any order, on a clock that stands, goes on, or, which none should, goes back."""
    waits, now = Waits(began), began
    for sent_us, opened_us, seconds in told:
        now += -seconds if back else seconds
        wait = waits.waited(sent_us, opened_us, now)
        assert math.isfinite(wait)
        assert wait == 0.0 or wait >= LEAST
        assert wait == 0.0 or sent_us > 0


@given(st.floats(0.0, 1e9))
def test_a_moment_on_the_wire_is_never_nothing(seconds: float) -> None:
    assert microseconds(seconds) >= 1
    assert abs(microseconds(seconds) / 1e6 - seconds) <= 1.1e-6


def test_the_figures_fit_together() -> None:
    """What is forgotten is more than two of the worst clocks come apart."""
    assert (1 + WORST_DRIFT) - (1 - WORST_DRIFT) <= room.LEAK * (1 + WORST_DRIFT)

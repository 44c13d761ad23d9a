"""A server's clock, from whole seconds that it tells now and then: how good the estimate is, and what ends it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation_kubernetes.server_clock import ServerClock, unix_seconds


@given(
    offset=st.floats(-1e6, 1e9),
    answers=st.lists(st.tuples(st.floats(0, 30), st.floats(0, 5), st.floats(0, 1)), min_size=1, max_size=30),
    drift=st.floats(-400e-6, 400e-6),
)
def test_the_estimate_is_never_further_off_than_the_last_answer_allows(
    offset: float, answers: list[tuple[float, float, float]], drift: float
) -> None:
    clock = ServerClock()
    assert clock.offset is None
    now = 1000.0
    worst = float("inf")
    for pause, way, where in answers:
        sent = now + pause
        received = now = sent + way
        begun = sent + way * where
        true = offset + drift * begun
        clock.observe((begun + true) // 1, sent, received)
        assert clock.offset is not None
        error = abs(clock.offset - (offset + drift * received))
        # of a whole second, and the way there and back; plus what the clocks drift, and what floats cannot say
        assert error <= (1 + way) / 2 + 5e-3
        worst = min(worst, (1 + way) / 2)


def test_many_answers_say_more_than_one() -> None:
    clock = ServerClock()
    for number in range(100):
        now = 1000 + number * 1.37
        clock.observe((now + 0.123) // 1, now, now + 0.001)
    assert clock.offset == pytest.approx(0.123, abs=0.03)


def test_what_was_known_long_ago_is_worth_less() -> None:
    clock = ServerClock()
    for number in range(100):
        now = 1000 + number * 1.37
        clock.observe((now + 0.123) // 1, now, now)
    # in these 2,000 seconds the server's clock has gained 0.8; its Date does not contradict what was known before
    clock.observe((3000 + 0.923) // 1, 3000, 3000)
    assert clock.offset == pytest.approx(0.923, abs=0.5)


def test_a_clock_that_was_set_is_followed() -> None:
    clock = ServerClock()
    for now in range(100):
        clock.observe(now + 50.0, now, now)
    clock.observe(100 - 3600.0, 100, 100)
    assert clock.offset == -3599.5


def test_http_dates() -> None:
    for date in ("Sun, 06 Nov 1994 08:49:37 GMT", "06 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:37 -0000"):
        assert unix_seconds(date) == 784111777.0
    assert unix_seconds(None) is None


@given(
    st.one_of(st.text(), st.from_regex(r"[A-Z][a-z]{2}, \d{1,5} [A-Z][a-z]{2} \d{1,6} \d\d:\d\d:\d\d [A-Z+\-\d]{1,6}"))
)
def test_other_dates_are_none_or_a_number(date: str) -> None:
    found = unix_seconds(date)
    assert found is None or isinstance(found, float)


def test_dates_without_a_zone_are_not_read_in_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert unix_seconds("Sun, 06 Nov 1994 08:49:37") == 784111777.0
    finally:
        monkeypatch.undo()
        time.tzset()

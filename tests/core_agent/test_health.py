"""How a source, a sink or a hub is doing, what of that is worth a line, and when an agent is ready."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation.health import (
    FLAPPING,
    HUB_GRACE,
    LONGEST_SUMMARY,
    SUMMARY_AFTER,
    Health,
    HubHealth,
    Tell,
    why_not_ready,
)

THINGS = ("collect", "push", "live", "blocked", "create")

#: what happens to a source, and how many seconds after what happened before
steps = st.lists(
    st.tuples(st.sampled_from(THINGS), st.sampled_from(["worked", "failed", "over"]), st.floats(0.0, 100.0)),
    max_size=40,
)


@given(steps)
def test_the_state_is_what_is_wrong_now(history: list[tuple[str, str, float]]) -> None:
    """Against a model: the set of things that failed and have not worked since. `since` moves when the state does."""
    now, since, state = 0.0, 0.0, "starting"
    wrong: set[str] = set()
    has_worked = False
    health = Health("source[0]:x", now, working="live")
    for what, event, later in history:
        now += later
        if event == "failed":
            health.failed(what, "why", now)
            wrong.add(what)
        elif event == "worked":
            health.worked(what, now)
            wrong.discard(what)
            has_worked = True
        else:
            health.over(what, now)
            wrong.discard(what)
        if "blocked" in wrong:
            expected = "blocked"
        elif "live" in wrong:
            expected = "not_live"
        elif wrong:
            expected = "failing"
        else:
            expected = "live" if has_worked else "starting"
        if expected != state:
            state, since = expected, now
        assert (health.state, health.since, health.has_worked) == (state, since, has_worked)


@given(st.lists(st.floats(0.0, 500.0), min_size=1, max_size=200))
def test_a_failure_that_goes_on_is_a_line_and_then_ever_rarer_ones(pauses: list[float]) -> None:
    """The first is told, the repetitions are summed up: after SUMMARY_AFTER, then after twice as long each time, up to
    LONGEST_SUMMARY. Nothing of its number is lost."""
    now, told_at, wait = 0.0, 0.0, SUMMARY_AFTER
    health = Health("x", now)
    for number, pause in enumerate(pauses, start=1):
        now += pause if number > 1 else 0.0
        noted = health.failed("collect", "why", now)
        assert (noted.in_a_row, noted.lasting) == (number, now)
        if number == 1:
            assert noted.tell is Tell.FIRST
        elif now >= told_at + wait:
            assert noted.tell is Tell.SUMMARY
        else:
            assert noted.tell is Tell.AGAIN
        if noted.tell is Tell.SUMMARY:
            told_at, wait = now, min(LONGEST_SUMMARY, 2 * wait)
    assert health.failures == len(pauses)
    assert health.worked("collect", now).in_a_row == len(pauses)
    assert health.failed("collect", "why", now + FLAPPING + 1.0).tell is Tell.FIRST


@given(st.lists(st.tuples(st.floats(0.0, 200.0), st.floats(0.0, 200.0)), min_size=1, max_size=100))
def test_what_comes_and_goes_is_told_once_and_then_summed_up(history: list[tuple[float, float]]) -> None:
    """A source that fails every second time would be two lines for each try. A failure within FLAPPING after a recovery
    is more of the same; an end is told if a failure was."""
    now, ended, summary_at, pause, in_a_row = 0.0, -FLAPPING, 0.0, SUMMARY_AFTER, 0
    health = Health("x", now)
    for fails_after, works_after in history:
        now += fails_after
        noted = health.failed("collect", "why", now)
        if now - ended >= FLAPPING:
            in_a_row, pause, expected = 0, SUMMARY_AFTER, Tell.FIRST
        else:
            expected = Tell.SUMMARY if now >= summary_at else Tell.AGAIN
        in_a_row += 1
        assert (noted.tell, noted.in_a_row) == (expected, in_a_row)
        if expected is Tell.FIRST:
            summary_at, pause = now + SUMMARY_AFTER, SUMMARY_AFTER
        elif expected is Tell.SUMMARY:
            pause = min(LONGEST_SUMMARY, 2 * pause)
            summary_at = now + pause
        now += works_after
        ended = now
        assert health.worked("collect", now) == (in_a_row, expected is not Tell.AGAIN)
        assert health.worked("collect", now) == (0, False)


def test_what_seemed_to_come_and_go_and_then_stays_is_told() -> None:
    """The last line in the log must not say for long that all is well when it is not."""
    health = Health("x", 0.0)
    health.failed("collect", "why", 0.0)
    assert health.worked("collect", 10.0).was_told
    told = {n: health.failed("collect", "why", 20.0 + n).tell for n in range(0, 100, 10)}
    assert [n for n, tell in told.items() if tell is not Tell.AGAIN] == [FLAPPING]
    assert health.worked("collect", 200.0) == (11, True)


def test_two_kinds_that_take_turns_are_a_line_each() -> None:
    """A hub behind a flapping proxy fails in two ways by turns: that is no news every time."""
    health = Health("x", 0.0)
    told = [health.failed("watch", "why", float(n), kind="AB"[n % 2]).tell for n in range(20)]
    assert told == [Tell.FIRST, Tell.FIRST] + [Tell.AGAIN] * 18


def test_what_is_no_failure_is_not_counted_as_one() -> None:
    """A source that says itself that it cannot vouch is told, and shown, and not counted."""
    health = Health("x", 0.0, working="live")
    assert health.failed("live", "cannot vouch", 1.0, counts=False).tell is Tell.FIRST
    assert (health.failures, health.state) == (0, "not_live")


@given(steps, st.floats(0.0, 1e6))
def test_what_is_shown_is_json_and_relative(history: list[tuple[str, str, float]], later: float) -> None:
    """No number is negative, none is a clock's, and nothing is null that has happened."""
    now = 1e9
    health = HubHealth("hub", now)
    for what, event, pause in history:
        now += pause
        if event == "failed":
            health.failed(what, "why", now)
            health.next_try = now + 3.0
        elif event == "worked":
            health.worked(what, now)
        else:
            health.stream("report" if what == "push" else "watch", what != "live", now)
    now += later
    shown: dict[str, Any] = health.shown(now)
    assert json.loads(json.dumps(shown)) == shown
    for key in ("since", "last_success", "next_try", "last_batch"):
        assert shown[key] is None or 0.0 <= shown[key] <= now - 1e9 + 3.0
    assert (shown["last_error"] is None) == (shown["failures"] == 0)


@pytest.mark.parametrize(
    "report, watch, failed, state",
    [
        (False, False, False, "connecting"),
        (False, False, True, "failing"),
        (True, False, False, "partly"),
        (False, True, True, "partly"),
        (True, True, False, "connected"),
    ],
)
def test_a_hub_is_as_connected_as_its_streams(report: bool, watch: bool, failed: bool, state: str) -> None:
    """Each with the time since it is as it is."""
    health = HubHealth("hub", 0.0)
    if failed:
        health.failed("connection", "refused", 1.0)
    health.stream("report", report, 2.0)
    health.stream("watch", watch, 3.0)
    health.stream("watch", watch, 4.0)
    shown = health.shown(10.0)
    assert shown["state"] == state
    assert shown["streams"]["watch"] == {"up": watch, "since": 7.0 if watch else 10.0}


def test_ready_means_that_every_source_and_a_hub_have_told_something() -> None:
    """And says whom it waits for, with what is known of the reason."""
    sources = [Health("source[0]:a", 0.0), Health("source[1]:b", 0.0)]
    hubs = [HubHealth("hub-a:1", 0.0), HubHealth("hub-b:1", 0.0)]
    sources[0].worked("collect", 1.0)
    sources[1].failed("collect", "no such file", 1.0)
    why = why_not_ready(sources, hubs, 2.0)
    assert len(why) == 2
    assert "source[1]:b" in why[0]
    assert "no such file" in why[0]
    assert "no hub" in why[1]
    sources[1].worked("collect", 3.0)
    assert len(why_not_ready(sources, hubs, 3.0)) == 1
    hubs[1].last_batch = 4.0
    assert why_not_ready(sources, hubs, 4.0) == []


def test_a_hub_that_never_answers_holds_nobody_up_for_long() -> None:
    """What the own cluster has does not depend on it."""
    hub = HubHealth("hub", 0.0)
    assert why_not_ready([], [hub], HUB_GRACE - 0.1) != []
    assert why_not_ready([], [hub], HUB_GRACE) == []
    assert why_not_ready([Health("source", 0.0)], [hub], 10 * HUB_GRACE) != []
    assert why_not_ready([], [], 0.0) == []

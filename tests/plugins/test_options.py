"""Lengths of time as options of plugins: what is taken, what is refused and how that is told, and what they come to."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.plugins.test_plugin_manager import Source, managed, plugin
from trio_federation import Duration, SourceType, seconds
from trio_federation.config import PluginTable, show_duration
from trio_federation.plugins import PluginManager
from trio_federation.suggest import every_fault


class Inner(msgspec.Struct):
    after: Duration = "0s"


class Options(msgspec.Struct):
    every: Duration = "5s"
    limit: Duration | None = None
    step: list[Inner] = []

    def __post_init__(self) -> None:
        if seconds(self.every) == 0:
            raise ValueError("every must be longer than nothing")


def faults(**options: object) -> list[str]:
    return every_fault(options, Options, "source[0]")


@pytest.mark.parametrize(
    "text, value",
    [
        ("200ms", 0.2),
        ("1.5s", 1.5),
        ("0s", 0.0),
        ("1m", 60.0),
        ("2h", 7200.0),
        ("007s", 7.0),
        ("999999999s", 999999999.0),
    ],
)
def test_a_duration_and_its_seconds(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value, rel=1e-12)
    assert faults(limit=text) == []
    assert msgspec.convert({"limit": text}, Options).limit == text


NO_DURATIONS = [
    *("5", "", "5 s", " 5s", "5s ", "5s\n", "-5s", "+5s", ".5s", "5.s", "1e3s", "nan", "nans", "infs", "5S", "5d"),
    *("5min", "1m30s", "\N{ARABIC-INDIC DIGIT FIVE}s", "5_0s", "0x5s", "5s5s", "x5s"),
]


@pytest.mark.parametrize("text", NO_DURATIONS)
def test_what_is_no_duration_is_refused_by_both(text: str) -> None:
    assert faults(limit=text) == ['source[0].limit: expected a duration in ms, s, m or h, such as "5s"']
    with pytest.raises(
        ValueError, match="is not a duration; write a number and one of the units ms, s, m, h"
    ) as caught:
        seconds(text)
    assert repr(text) in str(caught.value)


def test_another_kind_of_value_is_told_with_its_path() -> None:
    expected = 'expected a duration in ms, s, m or h, such as "5s"'
    assert faults(every=5, limit=2.5, step=[{}, {"after": True}]) == [
        f"source[0].every: {expected}, got a whole number",
        f"source[0].limit: {expected}, got a number",
        f"source[0].step[1].after: {expected}, got true or false",
    ]


def test_what_a_struct_itself_says_of_its_durations_is_told() -> None:
    assert faults(every="0ms") == ["source[0]: every must be longer than nothing"]


def test_a_long_text_is_shown_in_part() -> None:
    with pytest.raises(ValueError, match="is not a duration") as caught:
        seconds("s" * 5000)
    assert len(str(caught.value)) < 200


@given(st.text("0123456789.hms \n-", max_size=12) | st.text(max_size=6))
@example("5s\n")
@example("1.0.0s")
@example("9999999999s")
@example("0.0000000001h")
def test_every_option_that_is_taken_has_its_seconds(text: str) -> None:
    taken = faults(limit=text) == []
    try:
        value = seconds(text)
    except ValueError:
        assert not taken
    else:
        # the option is the narrower one: its number has at most nine digits on either side
        assert taken == all(len(part) <= 9 for part in text.rstrip("hms").split("."))
        assert 0 <= value < float("inf")


@given(st.integers(1, 24 * 3600 * 1000))
def test_what_the_configuration_shows_is_a_duration_of_the_same_length(milliseconds: int) -> None:
    shown = show_duration(milliseconds / 1000)
    if "e" not in shown:
        assert faults(limit=shown) == []
        # shown with six digits
        assert seconds(shown) == pytest.approx(milliseconds / 1000, rel=1e-5)


def test_a_plugin_gets_its_durations_and_turns_them_into_seconds() -> None:
    made: list[Options] = []

    class Waiting(Source):
        def __init__(self, options: Options, context: object) -> None:
            made.append(options)

    manager: PluginManager = managed(good=plugin(capacity_sources=lambda: [SourceType("good", Options, Waiting)]))
    table = PluginTable("good", {"every": "1.5m"}, "source[0]")
    manager.create_source(table, "west", lambda: 0.0, Random(0), Path())
    assert [seconds(options.every) for options in made] == [90.0]

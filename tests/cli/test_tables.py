"""What tables and texts promise for a terminal: they fit, numbers stay whole, names stay distinct and harmless."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from trio_federation.cli.tables import (
    NARROWEST,
    Column,
    Line,
    Row,
    Section,
    as_many_as_fit,
    duration,
    fold,
    headroom,
    number,
    paragraph,
    plain,
    shorten,
    table,
    visible,
)

#: what others may call things: mostly ordinary, sometimes anything at all
names = st.one_of(
    st.text("abc-0", min_size=1, max_size=20),
    st.text("abc-0.", min_size=40, max_size=253),
    st.text(max_size=40),
    st.sampled_from(
        ["", "-", "a b", "\x1b[31m", "\u202eevil", "两个集群", "e\u0301", "❤\ufe0f", "[red]x[/]", ":smile:"]
    ),
)
numbers = st.one_of(st.integers(0, 999), st.integers(0, 2**31 - 1))


def texts(lines: list[Line]) -> list[str]:
    return [plain(line) for line in lines]


# Texts.


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    assert not {unicodedata.category(each) for each in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize(
    "text, shown",
    [
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\u202eevil\u2066\u200f\u061c", r"\u202eevil\u2066\u200f\u061c"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("\x9b31m", r"\x9b31m"),
        ("\ud800", r"\ud800"),
        ("Zürich 两 [bold] :smile:", "Zürich 两 [bold] :smile:"),
    ],
)
def test_what_would_be_obeyed_is_seen(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    "seconds, shown",
    [
        (-1, "0.0s"),
        (0, "0.0s"),
        (0.449, "0.4s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (3599.6, "1h00m"),
        (7620, "2h07m"),
        (86399, "1d00h"),
        (12 * 86400 + 3 * 3600, "12d03h"),
        (999 * 86400, "999d00h"),
        (1000 * 86400, ">999d"),
        (1e300, ">999d"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@given(st.floats(0, 999 * 86400))
def test_a_duration_is_short_and_near_the_truth(seconds: float) -> None:
    shown = duration(seconds)
    assert len(shown) <= 7
    parts = re.findall(r"([0-9.]+)([dhms])", shown)
    assert "".join(value + unit for value, unit in parts) == shown
    assert all(float(value) < 60 for value, unit in parts if unit in "ms")
    assert all(float(value) < 24 for value, unit in parts if unit == "h")
    last = 0.1 if "." in shown else _UNITS[parts[-1][1]]
    assert abs(sum(float(value) * _UNITS[unit] for value, unit in parts) - seconds) <= 0.51 * last


def test_headroom() -> None:
    assert [headroom(count) for count in (-1, 0, 12)] == ["no limit", "0", "12"]


@given(names.map(visible), st.integers(1, 100))
def test_what_is_shortened_loses_its_middle_only(text: str, width: int) -> None:
    shown = shorten(text, width)
    assert cell_len(shown) <= width
    if cell_len(text) <= width:
        assert shown == text
    else:
        left, right = max(
            ((shown[:at], shown[at + 1 :]) for at, each in enumerate(shown) if each == "…"),
            key=lambda ends: text.startswith(ends[0]) and text.endswith(ends[1]),
        )
        assert text.startswith(left)
        assert text.endswith(right)
        if text.isascii():
            assert len(shown) == width
            assert 0 <= len(left) - len(right) <= 1


@given(st.one_of(names, st.lists(names, max_size=8).map(" ".join)).map(visible), st.integers(8, 100))
def test_what_is_folded_is_all_there(text: str, width: int) -> None:
    lines = fold(text, width)
    assert [line for line in lines if cell_len(line) > width] == []
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    # no line could have taken the first word of the next one, and no word is broken that fits a line
    for line, following in pairwise(lines):
        word = following.split(" ")[0]
        assert cell_len(line) + 1 + cell_len(word) > width
    if text.isascii():
        whole = {word for line in lines for word in line.split(" ")}
        assert [word for word in text.split(" ") if 0 < len(word) <= width and word not in whole] == []


@given(names, st.integers(NARROWEST, 100), st.integers(0, 6))
def test_a_paragraph_fits(text: str, width: int, indent: int) -> None:
    lines = texts(list(paragraph(text, width, indent=indent, first="failed: ")))
    assert [line for line in lines if cell_len(line) > width] == []
    assert lines[0].startswith(" " * indent + "failed:")
    assert all(line.startswith(" " * (indent + 8)) for line in lines[1:])
    assert len(list(paragraph(text, None, first="failed: "))) == 1


# Tables.

COLUMNS = (
    Column("cluster", least=9),
    Column("pool", least=11),
    number("idle"),
    number("running"),
    Column("state", least=6),
    Column("verdict", least=16, folds=True),
)


def row(cluster: str = "west", pool: str = "small", idle: int = 1, state: str = "-", verdict: str = "-") -> Row:
    return Row((cluster, pool, str(idle), str(idle + 1000), state, verdict))


rows = st.builds(row, names, names, numbers, names, names)
sections = st.lists(st.builds(Section, names, st.lists(rows, min_size=1, max_size=4)), min_size=1, max_size=3)


def shown(*rows: Row, width: int | None) -> list[str]:
    return texts(list(table(COLUMNS, [Section("", rows)], width)))


@given(sections, st.integers(NARROWEST, 200), st.sampled_from([0, 2]))
def test_a_table_fits_and_has_every_number(found: list[Section], width: int, indent: int) -> None:
    lines = texts(list(table(COLUMNS, found, width, indent=indent)))
    assert [line for line in lines if cell_len(line) > width] == []
    # In their order, so that a number of one row cannot stand in for that of another.
    words = iter(" ".join(lines).split())
    for each in (row for section in found for row in section.rows):
        assert each.cells[2] in words
        assert each.cells[3] in words


@given(sections)
def test_without_a_width_everything_is_there_on_one_line_for_each_row(found: list[Section]) -> None:
    lines = texts(list(table(COLUMNS, found, None)))
    assert len(lines) == 1 + sum(len(section.rows) + (2 if section.title else 0) for section in found)
    header, *_ = lines
    assert header.split() == [column.heading for column in COLUMNS]
    left = iter(lines[1:])
    for section in found:
        if section.title:
            assert visible(section.title).rstrip() in left
        for each in section.rows:
            line = next(line for line in left if line)
            for cell in each.cells:
                assert visible(cell).strip() in line


#: names that are alike in their beginnings and ends
alike = st.builds(
    lambda left, middle, right: "a" * left + middle + "b" * right,
    st.integers(1, 40),
    st.sampled_from("xyz"),
    st.integers(1, 40),
)


@given(st.lists(st.tuples(alike, alike), min_size=2, max_size=5, unique=True), st.integers(NARROWEST, 120))
def test_names_that_differ_look_different(found: list[tuple[str, str]], width: int) -> None:
    """Rows that have only their names to be told apart by."""
    lines = shown(*(row(cluster, pool) for cluster, pool in found), width=width)
    if lines[0].split()[:3] == ["cluster", "pool", "idle"]:
        blocks = lines[1:]
    else:
        blocks = re.split(r"\n(?! )", "\n".join(lines))
    assert len(set(blocks)) == len(blocks) == len(found)


ONE = row("west", "small", 3, "Active", "less idle")
TWO = row("eu-central-1-zone-seven", "standard-large-amd64", 12, "Saturated", "nothing idle, cannot grow")


@given(st.lists(st.text(max_size=70), min_size=1, max_size=40), st.integers(29, 120))
def test_as_many_names_as_fit(names: list[str], width: int) -> None:
    shown_names = [visible(name) for name in names]
    assert as_many_as_fit(names, None) == ", ".join(shown_names)
    text = as_many_as_fit(names, width)
    assert cell_len(text) <= width
    if cell_len(", ".join(shown_names)) <= width:
        assert text == ", ".join(shown_names)
        return
    # What is there is the beginning, with nothing but the first cut short, and the number of the others.
    candidates = [
        f"{', '.join(shown_names[:number])} and {len(names) - number} more" for number in range(1, len(names))
    ]
    fitting = [candidate for candidate in candidates if cell_len(candidate) <= width]
    if fitting:
        assert text == fitting[-1]
    else:
        assert "…" in text
        assert len(names) == 1 or text.endswith(f" and {len(names) - 1} more")


def test_wide_enough() -> None:
    assert shown(ONE, TWO, width=None) == [
        "cluster                  pool                  idle  running  state      verdict",
        "west                     small                    3     1003  Active     less idle",
        "eu-central-1-zone-seven  standard-large-amd64    12     1012  Saturated  nothing idle, cannot grow",
    ]
    assert shown(ONE, TWO, width=100) == shown(ONE, TWO, width=None)


def test_closer_together() -> None:
    assert shown(ONE, TWO, width=93) == [
        "cluster                 pool                 idle running state     verdict",
        "west                    small                   3    1003 Active    less idle",
        "eu-central-1-zone-seven standard-large-amd64   12    1012 Saturated nothing idle, cannot grow",
    ]


def test_names_lose_their_middles_and_sentences_are_folded() -> None:
    assert shown(ONE, TWO, width=80) == [
        "cluster             pool               idle running state     verdict",
        "west                small                 3    1003 Active    less idle",
        "eu-centra…one-seven standard-…ge-amd64   12    1012 Saturated nothing idle,",
        "                                                              cannot grow",
    ]


def test_columns_with_nothing_in_them_go_first() -> None:
    found = [each._replace(cells=[*each.cells[:4], "-", "-"]) for each in (ONE, TWO)]
    assert shown(*found, width=None)[0].split() == ["cluster", "pool", "idle", "running", "state", "verdict"]
    assert shown(*found, width=62) == [
        "cluster                  pool                  idle  running",
        "west                     small                    3     1003",
        "eu-central-1-zone-seven  standard-large-amd64    12     1012",
    ]


def test_a_row_becomes_a_paragraph_where_columns_do_not_fit() -> None:
    assert shown(ONE, TWO, width=50) == [
        "cluster west  pool small  idle 3  running 1003",
        "    state Active  verdict less idle",
        "cluster eu-central-1-zone-seven",
        "    pool standard-large-amd64  idle 12",
        "    running 1012  state Saturated",
        "    verdict nothing idle, cannot grow",
    ]
    assert shown(row("w" * 63, "p" * 40, idle=2**31 - 1, verdict="less idle"), width=40) == [
        "cluster " + "w" * 32,
        "        " + "w" * 31,
        "    pool " + "p" * 31,
        "         " + "p" * 9,
        "    idle 2147483647  running 2147484647",
        "    verdict less idle",
    ]


def test_a_row_becomes_a_paragraph_where_names_would_look_the_same() -> None:
    same = [row(f"a-cluster-in-the-{side}-with-a-long-name-at-its-end", "small") for side in ("east", "west")]
    # One alone is shortened, at either end of which both are the same.
    assert shown(same[0], width=50)[1] == "a-cluster-in-th…name-at-its-end small    1    1001"
    assert shown(*same, width=50) == [
        "cluster a-cluster-in-the-east-with-a-long-name-at-",
        "        its-end",
        "    pool small  idle 1  running 1001",
        "cluster a-cluster-in-the-west-with-a-long-name-at-",
        "        its-end",
        "    pool small  idle 1  running 1001",
    ]
    # Where the difference is to be seen, there is no need to.
    other = [row(f"{side}-is-where-the-cluster-is-with-a-long-name", "small") for side in ("east", "west")]
    assert shown(*other, width=50)[1] == "east-is-where-t…ith-a-long-name small    1    1001"


def test_titles_and_notes() -> None:
    noted = ONE._replace(notes=[("a note\nof two lines", "red")])
    found = [Section("first", [noted]), Section("second", [TWO])]
    assert texts(list(table(COLUMNS, found, None))) == [
        "cluster                  pool                  idle  running  state      verdict",
        "",
        "first",
        "west                     small                    3     1003  Active     less idle",
        r"    a note\nof two lines",
        "",
        "second",
        "eu-central-1-zone-seven  standard-large-amd64    12     1012  Saturated  nothing idle, cannot grow",
    ]

"""How commands show things to people: names of others made safe, durations in few characters, and tables that fit the
terminal without ever losing a number. Into a pipe or a file everything is written as long as it is, without colours.
What is shown is the business of the commands; nothing here asks for anything."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import click
from rich.cells import cell_len, chop_cells, split_graphemes

from trio_federation.errors import FederationError

#: Lines are not made narrower than this: a terminal that is breaks them itself.
NARROWEST = 40
#: Cells that the lines which go on with something are moved to the right by.
_INDENT = 4

#: A part of a line, and its style as rich names it ("" for none). The text is fit for a terminal.
Span: TypeAlias = tuple[str, str]
Line: TypeAlias = list[Span]


def visible(text: str) -> str:
    """`text` with everything that is no printable character, or a space other than " ", as Python escapes it: control
    characters, marks that change the direction of writing, what has no width, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def duration(seconds: float) -> str:
    """A duration for people, in at most seven characters: "0.4s", "12s", "3m05s", "2h07m", "12d03h"; from 1,000 days on
    ">999d". Less than none is none."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    if seconds < 59.5:
        return f"{seconds:.0f}s"
    if seconds >= 1000 * 86400 - 1800:
        return ">999d"
    # Rounded to what is shown before it is taken apart, so that there is no "59m60s".
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, rest = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours}h{rest:02}m"
    days, rest = divmod(round(seconds / 3600), 24)
    return f"{days}d{rest:02}h"


def headroom(count: int) -> str:
    """Scale-up headroom for people: -1 is no ceiling."""
    return "no limit" if count == -1 else str(count)


def shorten(text: str, width: int) -> str:
    """`text` in at most `width` cells (at least one): what is too long loses its middle to a "…"."""
    if cell_len(text) <= width:
        return text
    spans, _ = split_graphemes(text)
    left, right = width // 2, (width - 1) // 2
    start, end = 0, len(text)
    for _, stop, cells in spans:
        left -= cells
        if left < 0:
            break
        start = stop
    for begin, _, cells in reversed(spans):
        right -= cells
        if right < 0:
            break
        end = begin
    return f"{text[:start]}…{text[end:]}"


def as_many_as_fit(names: Sequence[str], width: int | None) -> str:
    """Names from anywhere, with commas between them: as many as fit in `width` cells, and how many more there are; all
    of them where there is no limit. A first one that is too long by itself loses its middle."""
    names = [visible(name) for name in names]
    text = ", ".join(names)
    if width is None or cell_len(text) <= width:
        return text
    for shown in range(min(len(names) - 1, width), 0, -1):
        text = f"{', '.join(names[:shown])} and {len(names) - shown} more"
        if cell_len(text) <= width:
            return text
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return shorten(names[0], width - len(more)) + more


def fold(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` cells: broken at spaces, and inside of a word that is longer than a line."""
    lines: list[str] = []
    line, room = "", width
    for word in text.split(" "):
        cells = cell_len(word)
        if cells < room or room == width >= cells:
            line = f"{line} {word}" if line else word
            room = width - cell_len(line)
            continue
        lines += [line] if line else []
        *whole, line = chop_cells(word, width) or [""]
        lines += whole
        room = width - cell_len(line)
    return [*lines, line]


def paragraph(text: str, width: int | None, *, style: str = "", indent: int = 0, first: str = "") -> Iterator[Line]:
    """A text from anywhere, folded where there is a `width`. `first` stands before it, in the same style; its other
    lines are moved to the right by as much as `first` takes, and all of them by `indent`."""
    text, margin = visible(text), " " * indent
    if width is None:
        yield [(margin, ""), (first + text, style)]
        return
    for line in fold(text, width - indent - cell_len(first)):
        yield [(margin, ""), (first + line, style)]
        first = " " * cell_len(first)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    heading: str
    #: How many cells it may be narrowed to, by shortening what is in it, or None for one that is never narrowed. What
    #: is shortened must stay distinct.
    least: int | None = None
    right: bool = False
    #: Whether texts that are too long for it are folded instead: for sentences, in the last column.
    folds: bool = False


def number(heading: str) -> Column:
    """A column of numbers, which are always whole."""
    return Column(heading, right=True)


class Row(NamedTuple):
    """A row: the texts of its columns, from anywhere; "-" and "" count as nothing."""

    cells: Sequence[str]
    #: styles of columns, by their place
    styles: Mapping[int, str] = MappingProxyType({})
    #: what is to be said below it, in lines of its own
    notes: Sequence[Span] = ()


class Section(NamedTuple):
    """Rows with a title above them, or "" for none."""

    title: str
    rows: Sequence[Row]


class _Layout(NamedTuple):
    """Which columns a table shows, by their places, how wide they are, and how many cells are between them."""

    places: Sequence[int]
    widths: Sequence[int]
    gap: int


def table(
    columns: Sequence[Column], sections: Iterable[Section], width: int | None, *, indent: int = 0
) -> Iterator[Line]:
    """The lines of a table, none of them wider than `width` where there is one (at least NARROWEST).

    What is too wide is brought closer together; then columns with nothing in them are left out; then names lose their
    middles. Where that is not enough, or would make two names look the same, each row becomes a paragraph, in which
    names are folded and nothing is left out. Numbers are always shown whole. `indent`: of all but the titles."""
    sections = [
        Section(title, [row._replace(cells=[visible(cell) for cell in row.cells]) for row in rows])
        for title, rows in sections
    ]
    rows = [row for section in sections for row in section.rows]
    room = None if width is None else width - indent
    layout = _layout(columns, rows, room)
    margin: Span = (" " * indent, "")
    headed = layout is not None and any(column.heading for column in columns)
    if layout is not None and headed:
        headings = [columns[place].heading for place in layout.places]
        yield [margin, *_cells(headings, ["dim"] * len(headings), columns, layout)]
    for index, section in enumerate(sections):
        if section.title:
            if headed or index:
                yield []
            yield from paragraph(section.title, width, style="bold")
        for row in section.rows:
            lines = _stacked(columns, row, room) if layout is None else _beside(columns, row, layout)
            yield from ([margin, *line] for line in lines)
            for text, style in row.notes:
                yield from paragraph(text, width, style=style, indent=indent + _INDENT)


def _layout(columns: Sequence[Column], rows: Sequence[Row], room: int | None) -> _Layout | None:
    """How the table is laid out, or None where its columns do not fit side by side."""
    natural = [
        max(cell_len(column.heading), *(cell_len(row.cells[place]) for row in rows), 0)
        for place, column in enumerate(columns)
    ]
    places = list(range(len(columns)))
    if room is None:
        return _Layout(places, natural, 2)
    filled = [
        place
        for place, column in enumerate(columns)
        if place == 0 or column.least is None or any(row.cells[place] not in ("", "-") for row in rows)
    ]
    for shown, gap in ((places, 2), (places, 1), (filled, 2), (filled, 1)):
        widths = [natural[place] for place in shown]
        if sum(widths) + gap * (len(shown) - 1) <= room:
            return _Layout(shown, widths, gap)
    narrowed = _narrowed([columns[place] for place in filled], widths, room - (len(filled) - 1))
    if narrowed is None:
        return None
    for place, cells in zip(filled, narrowed, strict=True):
        if cells < natural[place] and not columns[place].folds:
            names = {row.cells[place] for row in rows}
            if len({shorten(name, cells) for name in names}) < len(names):
                return None
    return _Layout(filled, narrowed, 1)


def _narrowed(columns: Sequence[Column], natural: Sequence[int], room: int) -> list[int] | None:
    """The widths of columns in a `room` that is too small for them: the widest are narrowed first, and none below its
    least. None where even that does not fit."""
    widths = [
        cells if column.least is None else min(cells, max(column.least, cell_len(column.heading)))
        for column, cells in zip(columns, natural, strict=True)
    ]
    left = room - sum(widths)
    if left < 0:
        return None
    for _ in range(left):
        narrow = [place for place, cells in enumerate(widths) if cells < natural[place]]
        if not narrow:
            break
        widths[min(narrow, key=lambda place: widths[place])] += 1
    return widths


def _beside(columns: Sequence[Column], row: Row, layout: _Layout) -> Iterator[Line]:
    """A row whose columns are side by side; more than one line where one of them is folded."""
    cells = []
    for place, width in zip(layout.places, layout.widths, strict=True):
        cell = row.cells[place]
        cells.append(fold(cell, width) if columns[place].folds else [shorten(cell, width)])
    styles = [row.styles.get(place, "") for place in layout.places]
    for line in range(max(map(len, cells))):
        yield _cells([cell[line] if line < len(cell) else "" for cell in cells], styles, columns, layout)


def _cells(texts: Sequence[str], styles: Sequence[str], columns: Sequence[Column], layout: _Layout) -> Line:
    """One line of texts that fit their columns."""
    line: Line = []
    space = 0
    for place, width, text, style in zip(layout.places, layout.widths, texts, styles, strict=True):
        padding = width - cell_len(text)
        before, after = (padding, 0) if columns[place].right else (0, padding)
        line += [(" " * (space + before), ""), (text, style)]
        space = after + layout.gap
    return line


def _stacked(columns: Sequence[Column], row: Row, width: int | None) -> Iterator[Line]:
    """A row as a paragraph: each heading with what is below it, and names in as many lines as they need."""
    assert width is not None, "without a limit everything fits"
    line: Line = []
    used = 0
    for place, column in enumerate(columns):
        text, style = row.cells[place], row.styles.get(place, "")
        if text in ("", "-"):
            continue
        heading = f"{column.heading} " if column.heading else ""
        cells = cell_len(heading) + cell_len(text)
        if line and used + 2 + cells > width:
            yield line
            line, used = [], 0
        margin = _INDENT if place else 0
        if line:
            line += [("  ", ""), (heading, "dim"), (text, style)]
            used += 2 + cells
        elif margin + cells <= width:
            line = [(" " * margin, ""), (heading, "dim"), (text, style)]
            used = margin + cells
        else:
            first, *others = fold(text, width - margin - cell_len(heading))
            yield [(" " * margin, ""), (heading, "dim"), (first, style)]
            hanging = " " * (margin + cell_len(heading))
            yield from ([(hanging, ""), (other, style)] for other in others)
    if line:
        yield line


def plain(line: Line) -> str:
    """A line without its styles, and without spaces at its end."""
    return "".join(text for text, _ in line).rstrip()


def show(lines: Callable[[int | None], Iterable[Line]]) -> None:
    """Write to standard output what `lines` makes of its width: that of the terminal, or None where it is none.

    Colours are for terminals only, and not for those that cannot show them, or whose NO_COLOR is set. Characters that
    the encoding of standard output does not have are escaped. Raises FederationError where it is closed."""
    _require_output()
    on_terminal = sys.stdout.isatty()
    width = max(NARROWEST, shutil.get_terminal_size().columns) if on_terminal else None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if not on_terminal or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        click.echo("\n".join(map(plain, lines(width))))
        return
    from rich.console import Console
    from rich.text import Text

    # Where there is a terminal is decided above: rich would also believe an environment that says so.
    console = Console(file=sys.stdout, force_terminal=True, width=width, markup=False, emoji=False, highlight=False)
    for line in lines(width):
        console.print(Text.assemble(*line), soft_wrap=True)


def show_json(answer: object) -> None:
    """Write one JSON object to standard output, in one line of ASCII: what strings of others may hold, and a terminal
    would obey, stays escaped. Raises FederationError where standard output is closed."""
    _require_output()
    click.echo(json.dumps(answer))


def _require_output() -> None:
    # How Python shows that a process was started without one; click would be content with that.
    if sys.stdout is None:
        raise FederationError("standard output is closed, so nothing can be shown; send it somewhere")

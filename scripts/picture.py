"""Makes the README's picture of the demo, docs/demo.svg, from a run of it: what its terminal showed at one moment.

What is drawn is what the demo's own view draws, into a terminal of a fixed size that nobody sees. The picture names no
font and no address to load, so that it shows the same wherever it is opened; it brings its own background, so that it
can be read on a light page as well as on a dark one."""

from __future__ import annotations

import argparse
import io
import re
import sys
from functools import partial
from pathlib import Path

import trio
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.terminal_theme import TerminalTheme

from trio_federation import logs
from trio_federation.cli.demo import Look, Terminal, run_demo
from trio_federation.clock import BootClock
from trio_federation.config import Log
from trio_federation.plugins import PluginManager

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "demo.svg"
#: the terminal's size in characters
WIDTH, HEIGHT = 84, 32
#: how long the demo is said to run, as `make demo` does by itself
WHOLE = 30.0
#: the moment of the picture: each cluster has run dry once, and one is dry again, so the table shows where it turns to
SECONDS = 23.0

#: background and text, then the eight colours of a terminal, plain and bright; each legible on this background
COLOURS = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        (72, 79, 88),
        (255, 123, 114),
        (86, 211, 100),
        (227, 179, 65),
        (121, 192, 255),
        (210, 168, 255),
        (86, 212, 221),
        (230, 237, 243),
    ],
)

#: filled in twice: with names of ours, then by rich's export_svg with its own; a screen reader says the title
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{{width}}" height="{{height}}" viewBox="0 0 {{width}} {{height}}"
    role="img" aria-labelledby="title">
<title id="title">{title}</title>
<style>
.text {{{{
    font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace;
    font-size: {{char_height}}px;
}}}}
{{styles}}
</style>
<rect width="{{width}}" height="{{height}}" rx="10" fill="{background}" stroke="#6e7681"/>
<g transform="translate({{terminal_x}}, 24)" class="text">
{{backgrounds}}
{{matrix}}
</g>
</svg>
"""
TITLE = "The demo in a terminal: what each of three clusters has, and where a create would go"


class Remembered(Terminal):
    """The demo's view of a terminal, which also remembers what it showed last."""

    last: RenderableType = ""

    def show(self, elapsed: float, looks: list[Look], news: list[str]) -> None:
        """Draw, and remember."""
        super().show(elapsed, looks, news)
        self.last = self._live.renderable


def terminal(width: int, *, record: bool) -> Console:
    """A terminal of `width` characters that writes into nothing, with the settings of the demo's own one."""
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        width=width,
        height=HEIGHT,
        record=record,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
        _environ={},
    )


def picture(shown: RenderableType) -> str:
    """The SVG of something that rich can show, as wide as our terminal and as high as it is."""
    console = terminal(WIDTH + 2, record=True)
    console.print(Padding(shown, (0, 1)))
    # 0.6 is what a letter of a font for terminals is wide, in parts of its height.
    drawn = console.export_svg(
        title="",
        theme=COLOURS,
        code_format=FORMAT.format(title=TITLE, background=COLOURS.background_color.hex),
        font_aspect_ratio=0.6,
        unique_id="demo",
    )
    # Lines are cut to the terminal's width already, and their ends need not be drawn. With one element on each line, a
    # new picture differs from the last one in few lines.
    drawn = re.sub(r' clip-path="[^"]*"|<text [^>]*>\n</text>', "", drawn).replace("</text><text", "</text>\n<text")
    return "".join(f"{line.rstrip()}\n" for line in drawn.splitlines() if line.strip())


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo and writes the picture. Exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the moment to show (default: %(default)g)")
    parser.add_argument("--into", type=Path, default=PICTURE, help="the file to write (default: docs/demo.svg)")
    options = parser.parse_args(arguments)
    seconds: float = options.seconds
    into: Path = options.into
    logs.configure(Log(level="warning"))
    show = Remembered(terminal(WIDTH, record=False), WHOLE)
    trio.run(partial(run_demo, seconds, PluginManager.load(), show), clock=BootClock())
    into.write_text(picture(show.last), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Other people's words, made fit for a line of a log: bounded, and without what would end the line or act on a
terminal. Pure. What they stand beside is up to whoever shows them."""

from __future__ import annotations

#: characters that are kept of what somebody else says
LONGEST_WORDS = 500
#: characters of a value that are quoted
_LONGEST_QUOTE = 100


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters: this one, or its start with "…" behind it."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def one_line(text: str, most: int = LONGEST_WORDS) -> str:
    """A text in one line of at most `most` characters, without control characters."""
    # Blanks in a row become one, so more than `most` is looked at; but not the whole of an endless text.
    start = text[: 4 * most]
    line = " ".join("".join(each if each.isprintable() else " " for each in start).split())
    return cut(line if start == text else f"{line}…", most)


def quoted(text: str) -> str:
    """A text in quotes, with escapes for what cannot be printed; of a long one the start."""
    return repr(cut(text, _LONGEST_QUOTE))

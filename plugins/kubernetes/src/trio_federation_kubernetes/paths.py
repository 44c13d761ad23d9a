"""The way to one value in an object of the Kubernetes API, as an operator writes it: `status.free`,
`metadata.labels['example.com/pool']`, `status.pools[0].free`. Here is its grammar; pure. What is read by such paths is
`table.py`, whether a resource has them at all `schema.py`.

The grammar: names joined by dots; `['…']` or `["…"]` around a name of any characters; `[0]` for an item of a list. A
backslash takes the next character as it is. What kubectl's `-o jsonpath` and `-o custom-columns` accept around a path
is accepted too: `.status.free`, `$.status.free`, `{.status.free}`. A path names one value, so wildcards, filters,
slices and searches are faults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from trio_federation_kubernetes.texts import quoted

#: the most steps that a path may have
MOST_STEPS = 64
#: the most characters that a path may have
LONGEST_PATH = 1000

_BARE = re.compile(r"[A-Za-z0-9_-]+")
#: characters that need neither quotes nor a backslash; a slash is there as `\.` takes a name with one out of quotes
_PLAIN = re.compile(r"[\w/-]")
_DIGITS = re.compile(r"[0-9]+")
_SPACE_AROUND = re.compile(r"\A\s|\s\Z")


class PathError(ValueError):
    """A text is no path. The message shows the text, the position (from 1) and what was expected there."""


@dataclass(frozen=True, slots=True)
class Path:
    """The way to one value."""

    #: the name of a field, or the number (from 0) of an item in a list; at least one
    steps: tuple[str | int, ...]

    def __str__(self) -> str:
        """The path as `parse` reads it, each name in its shortest form."""
        text = ""
        for step in self.steps:
            if isinstance(step, str) and _BARE.fullmatch(step):
                text += f".{step}" if text else step
            elif isinstance(step, str):
                text += "['" + step.replace("\\", "\\\\").replace("'", "\\'") + "']"
            else:
                text += f"[{step}]"
        return text


def parse(text: str) -> Path:
    """The path that a text stands for. Raises PathError."""
    return _Parser(text).path()


class _Parser:
    """Goes through one text from its start to its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._end = len(text)

    def path(self) -> Path:
        if self._end > LONGEST_PATH:
            raise PathError(f"a path of {self._end} characters is longer than the {LONGEST_PATH} that are possible")
        if space := _SPACE_AROUND.search(self._text):
            self._at = space.start()
            self._fault("there is a space around the path; take it away")
        if self._text.startswith("{"):
            if not self._text.endswith("}"):
                self._at = self._end
                self._fault('expected "}" at the end, as the path begins with "{"')
            self._at, self._end = 1, self._end - 1
        if self._next() == "$":
            self._at += 1
            if self._at < self._end and self._next() not in (".", "["):
                self._fault(f'expected "." after "$", got {self._shown()}')
        steps: list[str | int] = []
        # a first name may stand without the dot that every other one needs
        if self._next() not in ("", ".", "["):
            steps.append(self._name())
        while self._at < self._end:
            if len(steps) == MOST_STEPS:
                self._fault(f"a path of more than {MOST_STEPS} steps is not possible")
            steps.append(self._step())
        if not steps:
            self._fault('expected the name of a field, such as in "status.free"')
        return Path(tuple(steps))

    def _step(self) -> str | int:
        match self._next():
            case ".":
                self._at += 1
                if self._next() == ".":
                    self._fault('a search ("..") is not possible; write the whole path to the one value')
                return self._name()
            case "[":
                self._at += 1
                return self._bracket()
            case _:
                self._fault(f'expected ".", "[" or the end, got {self._shown()}')

    def _name(self) -> str:
        name = ""
        while (character := self._next()) not in ("", ".", "["):
            if character == "\\":
                name += self._escaped()
            elif _PLAIN.fullmatch(character):
                name += character
                self._at += 1
            elif character == "*":
                self._fault('a wildcard ("*") is not possible; a path names one value')
            elif name:
                self._fault(f"{self._shown()} cannot stand in a bare name; write ['…'] around the name")
            else:
                break
        if not name:
            self._fault(f"expected the name of a field, got {self._shown()}")
        return name

    def _bracket(self) -> str | int:
        first = self._next()
        if first in ("'", '"'):
            step: str | int = self._quoted(first)
        elif digits := _DIGITS.match(self._text, self._at, self._end):
            if len(digits[0]) > 9:
                self._fault("the number of an item has at most 9 digits")
            self._at = digits.end()
            step = int(digits[0])
        else:
            meant = {
                "*": 'a wildcard ("[*]") is not possible; a path names one value',
                "?": 'a filter ("[?(…)]") is not possible; a path names one value',
                "-": "counting from the end of a list is not possible; items are numbered from 0",
                ":": 'a slice ("[:]") is not possible; a path names one value',
            }
            self._fault(meant.get(first, f"expected a number or a name in quotes, got {self._shown()}"))
        match self._next():
            case "]":
                self._at += 1
                return step
            case ":":
                self._fault('a slice ("[0:1]") is not possible; a path names one value')
            case ",":
                self._fault('a choice ("[0,1]") is not possible; a path names one value')
            case _:
                self._fault(f'expected "]", got {self._shown()}')

    def _quoted(self, quote: str) -> str:
        opened = self._at
        self._at += 1
        name = ""
        while (character := self._next()) != quote:
            if character == "":
                self._at = opened
                self._fault(f"the quote ({quote}) that begins here has no end")
            elif character == "\\":
                name += self._escaped()
            else:
                name += character
                self._at += 1
        self._at += 1
        return name

    def _escaped(self) -> str:
        self._at += 1
        character = self._next()
        if not character:
            self._fault("expected a character after the backslash")
        self._at += 1
        return character

    def _next(self) -> str:
        """The character that comes next, or "" at the end."""
        return self._text[self._at] if self._at < self._end else ""

    def _shown(self) -> str:
        return repr(self._next()) if self._at < self._end else "the end"

    def _fault(self, text: str) -> NoReturn:
        raise PathError(f"{quoted(self._text)}, position {self._at + 1}: {text}")

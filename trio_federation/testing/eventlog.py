"""What happened in a simulated federation, line by line, in virtual time: for people who ask why a test failed, and for
the proof that the same seed makes the same run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial


class EventLog:
    """The events of one run. A line is the time since the start, the node, the event, and details as `key=value`.

    `now`: seconds since the start."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.lines: list[str] = []

    def note(self, node: str, event: str, **details: object) -> None:
        """Add a line."""
        told = "".join(f" {key}={value}" for key, value in details.items())
        self.lines.append(f"{self._now():12.6f} {node} {event}{told}")

    def of(self, node: str) -> Callable[..., None]:
        """`note`, for one node."""
        return partial(self.note, node)

    def text(self) -> str:
        """All lines."""
        return "".join(f"{line}\n" for line in self.lines)

    def digest(self) -> str:
        """A short name for `text`: that of two runs is the same when every byte of it is."""
        return hashlib.sha256(self.text().encode()).hexdigest()

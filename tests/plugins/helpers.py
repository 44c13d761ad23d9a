"""What the tests of plugins share: a clock that only moves when it is told to, and a source's context on it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import structlog

from trio_federation import SourceContext
from trio_federation.clock import Clock


class SetClock:
    """A clock that shows what it is set to, in seconds."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_context(clock: Clock, base_dir: Path, cluster_id: str = "west") -> SourceContext:
    """What an agent gives to its first source, of type "fixtures"."""
    return SourceContext(
        name="source[0]:fixtures",
        cluster_id=cluster_id,
        clock=clock,
        random=Random(0),
        log=structlog.get_logger("tests"),
        base_dir=base_dir,
    )

"""What every test of a federation gets: its log lines, and two rules for them that no test may break."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog.testing
from structlog.typing import EventDict

from tests.simulation import SECRET


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    """Every line that is logged during the test, at any level, as keys and values.

    The shared secret is in none of them, and none is an error, which stands for a fault of our own."""
    with structlog.testing.capture_logs() as lines:
        yield lines
    assert SECRET not in repr(lines)
    assert [line for line in lines if line["log_level"] in ("error", "critical")] == []

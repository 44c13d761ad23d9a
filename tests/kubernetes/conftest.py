"""Fixtures for the tests of the Kubernetes plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog.testing
from structlog.typing import EventDict


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """Every line that is logged during the test, at any level, as keys and values. None is an error, which stands for a
    fault of our own."""
    with structlog.testing.capture_logs() as lines:
        yield lines
    assert [line for line in lines if line["log_level"] in ("error", "critical")] == []

"""Fixtures for the tests of plugins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.helpers import SetClock, make_context
from trio_federation import SourceContext


@pytest.fixture
def clock() -> SetClock:
    """A clock that has run for a while already: sources may not take its zero for their start."""
    return SetClock(1024.0)


@pytest.fixture
def context(clock: SetClock, tmp_path: Path) -> SourceContext:
    """What an agent gives to a source, for cluster "west" and a temporary folder."""
    return make_context(clock, tmp_path)

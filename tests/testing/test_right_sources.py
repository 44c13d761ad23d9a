"""Sources that are right pass the conformance suite, whichever way they work, and it tells what it has checked."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from tests.testing.worlds import RIGHT, Polled, Pushing, World
from trio_federation.testing import Rule, check_capacity_source


@pytest.mark.parametrize("kind", RIGHT)
async def test_a_right_source_passes(autojump_clock: MockClock, kind: type[Polled]) -> None:
    world = World()
    report = await check_capacity_source(
        lambda context: kind(world, context), change=world.change, remove=world.remove, breaks=world.breaks
    )
    unchecked = set() if issubclass(kind, Pushing) else {Rule.AGREEMENT}
    assert set(report.not_checked) == unchecked
    assert set(report.checked) == set(Rule) - unchecked

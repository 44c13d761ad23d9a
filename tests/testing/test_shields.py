"""A source that shields itself anew whenever its shield is taken away is found, and does not hold up the suite."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
import trio
from trio.testing import MockClock

from trio_federation import Capacity, CapacitySource
from trio_federation.testing import ConformanceError, Rule, check_capacity_source

#: shields after which a source lets go, lest a suite that cannot end it goes on for ever
MANY = 5000


async def test_a_source_that_shields_itself_anew_is_found(autojump_clock: MockClock) -> None:
    """As one does that tries again and again, each time shielded, and forgives whatever comes of it."""
    shields = 0

    class Source(CapacitySource):
        async def collect(self) -> Sequence[Capacity]:
            nonlocal shields
            while shields < MANY:
                shields += 1
                with suppress(BaseException), trio.CancelScope(shield=True):
                    await trio.sleep(0.5)
            return []

    with pytest.raises(ConformanceError) as caught:
        await check_capacity_source(Source)
    assert shields < MANY
    assert caught.value.rule is Rule.ANSWER
    assert "collect() has not ended within 15 s" in str(caught.value)

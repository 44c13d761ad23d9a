"""The contexts that are made for tests are those that an agent gives."""

from __future__ import annotations

from dataclasses import fields

import pytest

from trio_federation.config import Federation
from trio_federation.hookspecs import SinkContext
from trio_federation.testing import sink_context, source_context


def test_records_count_for_as_long_as_in_an_agent_that_says_nothing_else() -> None:
    for make in (source_context, sink_context):
        assert make(clock=lambda: 0.0).ttl == Federation().ttl
        assert make(clock=lambda: 0.0, ttl=12.0).ttl == 12.0


@pytest.mark.parametrize("answer", [True, False, None])
def test_a_sink_is_told_what_the_test_says_of_the_reporter(answer: bool | None) -> None:
    assert sink_context(clock=lambda: 0.0).is_reporter() is True
    context = sink_context(clock=lambda: 0.0, is_reporter=lambda: answer)
    assert context.is_reporter() is answer


def test_a_sinks_context_is_as_good_without_what_came_later() -> None:
    """Who makes one by hand, as an older test may, gets an agent that is alone."""
    made = sink_context(clock=lambda: 0.0)
    older = {each.name: getattr(made, each.name) for each in fields(made) if each.name not in ("ttl", "is_reporter")}
    assert SinkContext(**older) == made

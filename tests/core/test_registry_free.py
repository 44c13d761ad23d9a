"""Registry.free: what has run out is freed in steps, so that nobody waits for long for the lock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_federation.capacity import Capacity
from trio_federation.registry import FREED_PER_STEP, Registry

TTL = 30.0


def make_registry(records: int) -> tuple[Registry, list[float]]:
    """A registry of so many records; and its clock's time, to be set, in its only element."""
    now = [100.0]
    registry = Registry("west", TTL, lambda: now[0])
    registry.upsert([Capacity("east", "ns", f"env-{n}", "p1", observed_at=now[0]) for n in range(records)])
    return registry, now


@given(st.integers(0, 60), st.integers(1, 20))
def test_it_is_done_in_steps(records: int, limit: int) -> None:
    registry, now = make_registry(records)
    now[0] += TTL + 1.0
    steps = 0
    before = registry.held().records
    assert before == records
    while True:
        done = registry.free(limit)
        steps += 1
        held = registry.held().records
        assert before - held <= limit
        before = held
        if done:
            break
        assert steps < 1000
    assert held == 0
    # Whether nothing is left is seen at once, without a step more.
    assert steps == max(1, -(-records // limit))
    assert registry.free(limit)


@given(st.integers(0, 30), st.integers(0, 30))
def test_what_has_not_run_out_stays(old: int, fresh: int) -> None:
    registry, now = make_registry(old)
    now[0] += 20.0
    registry.upsert([Capacity("north", "ns", f"env-{n}", "p1", observed_at=now[0]) for n in range(fresh)])
    now[0] += 20.0
    assert registry.free(1000)
    assert registry.held().records == fresh == len(registry.snapshot())


def test_the_version_alone_frees_nothing_and_changes_with_what_is_freed() -> None:
    registry, now = make_registry(3 * FREED_PER_STEP)
    known = registry.version()
    now[0] += TTL + 1.0
    assert registry.version() == known
    assert registry.held().records == 3 * FREED_PER_STEP
    versions = {known}
    while not registry.free():
        versions.add(registry.version())
    versions.add(registry.version())
    assert len(versions) == 4

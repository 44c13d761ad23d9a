"""Registry.by_env and held: everything, env by env, while the registry changes, and what is kept, at no cost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.guarded import Guarded
from trio_federation.capacity import Capacity, Origin
from trio_federation.registry import Registry, RegistryHeld

NOW = 1000.0


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hand:
    return Hand()


@pytest.fixture
def registry(clock: Hand) -> Registry:
    return Registry("west", 30.0, clock)


def member(
    env: str = "a", cluster_id: str = "east", pool: str = "p1", namespace: str = "ns", **values: Any
) -> Capacity:
    return Capacity(cluster_id, namespace, env, pool, **values)


def shown(records: list[Capacity]) -> list[tuple[str, ...]]:
    return sorted((r.namespace, r.env_name, r.cluster_id, r.member_pool, r.scaling_group) for r in records)


NAMES = st.sampled_from(["a", "b", "c", "b-2"])
RECORDS = st.builds(
    Capacity,
    NAMES,
    NAMES,
    NAMES,
    st.sampled_from(["", "p1", "p2"]),
    st.sampled_from(["", "gpu"]),
    observed_at=st.floats(NOW - 60, NOW),
)


@given(st.lists(RECORDS, max_size=30))
def test_it_is_the_snapshot_env_by_env_in_the_order_of_their_names(records: list[Capacity]) -> None:
    registry = Registry("a", 30.0, lambda: NOW)
    registry.upsert(records)
    envs = list(registry.by_env())
    keys = [(found[0].namespace, found[0].env_name) for found in envs]
    assert keys == sorted(set(keys))
    assert all({(r.namespace, r.env_name) for r in found} == {key} for key, found in zip(keys, envs, strict=True))
    assert sorted((r for found in envs for r in found), key=lambda r: r.sort_key) == registry.snapshot()


def test_an_empty_registry_has_no_envs(registry: Registry) -> None:
    assert list(registry.by_env()) == []


def test_shadowed_rows_and_what_has_run_out_are_left_out(registry: Registry, clock: Hand) -> None:
    registry.upsert([member("a"), member("a", pool=""), member("b", pool=""), member("c", observed_at=NOW - 29)])
    clock.now = NOW + 2
    assert [shown(found) for found in registry.by_env()] == [
        [("ns", "a", "east", "p1", "")],
        [("ns", "b", "east", "", "")],
    ]


def test_each_env_is_looked_up_when_its_turn_comes(registry: Registry, clock: Hand) -> None:
    registry.upsert([member("a", idle=1), member("b", idle=1), member("c", idle=1), member("e", observed_at=NOW - 30)])
    envs = registry.by_env()
    assert [record.idle for record in next(envs)] == [1]
    registry.upsert([member("a", idle=2), member("b", idle=2), member("d", idle=2)])
    registry.withdraw([member("c").identity])
    clock.now = NOW + 1  # e has run out
    assert [[record.idle for record in found] for found in envs] == [[2]]


def test_what_is_withdrawn_and_comes_back_is_there_once(registry: Registry) -> None:
    registry.upsert([member("a"), member("b")])
    envs = registry.by_env()
    next(envs)
    registry.withdraw([member("b").identity])
    registry.upsert([member("b", idle=3)])
    assert [[record.idle for record in found] for found in envs] == [[3]]


def test_a_list_is_the_callers_own(registry: Registry) -> None:
    registry.upsert([member("a")])
    next(registry.by_env()).clear()
    assert len(registry) == 1


@pytest.mark.parametrize("steps", [0, 1, 50])
def test_no_step_looks_at_the_records_of_more_than_one_env(registry: Registry, steps: int) -> None:
    registry.upsert([member(f"env-{number:03}") for number in range(100)])
    envs = registry.by_env()
    for _ in range(steps):
        next(envs)
    real = registry._table.envs
    # From here on only the envs' names may be listed, in the first step, and one env may be asked for.
    registry._table.envs = _Named(real, frozenset({("ns", f"env-{steps:03}")}))
    assert shown(next(envs)) == [("ns", f"env-{steps:03}", "east", "p1", "")]


class _Named(Guarded):
    """A dict whose keys may be listed, and of whose values only those of `allowed` keys may be asked for."""

    def __iter__(self) -> Iterator[Any]:
        return dict.__iter__(self)


def test_the_lock_is_free_between_two_steps(registry: Registry) -> None:
    registry.upsert([member("a"), member("b")])
    envs = registry.by_env()
    next(envs)
    assert registry._lock.acquire(blocking=False)
    registry._lock.release()
    assert len(list(envs)) == 1


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Python switches between threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
def test_an_env_is_never_seen_half_updated_by_another_thread() -> None:
    registry = Registry("west", 30.0, lambda: NOW)

    def update(idle: int) -> None:
        for env in ("a", "b"):
            registry.upsert([member(env, cluster, f"p{pool}", idle=idle) for cluster in "xyz" for pool in range(30)])

    update(0)
    done = threading.Event()

    def keep_updating(update: Callable[[int], None]) -> None:
        idle = 0
        while not done.is_set():
            idle += 1
            update(idle)

    updater = threading.Thread(target=keep_updating, args=(update,))
    seen: set[int] = set()
    looks = 0
    try:
        updater.start()
        while updater.is_alive() and (looks < 500 or len(seen) < 10):
            looks += 1
            envs = list(registry.by_env())
            assert [len(found) for found in envs] == [90, 90]
            for found in envs:
                (idle,) = {record.idle for record in found}
                seen.add(idle)
    finally:
        done.set()
        updater.join()
    assert len(seen) >= 10


# Held.


def test_what_is_held_counts_everything_in_memory(registry: Registry, clock: Hand) -> None:
    assert registry.held() == RegistryHeld(0, 0, 0)
    origin = Origin("aa", 1, NOW - 60)
    registry.upsert([member("a", origin=origin), member("a", pool="", origin=origin), member("b", "north")])
    registry.withdraw([member("c").identity])
    assert registry.held() == RegistryHeld(records=3, tombstones=1, instances=1)
    clock.now = NOW + 1000
    assert registry.held() == RegistryHeld(records=3, tombstones=1, instances=1)
    assert list(registry.by_env()) == []
    registry.snapshot()  # frees
    assert registry.held() == RegistryHeld(0, 0, 0)


def test_what_is_held_is_known_without_looking(registry: Registry) -> None:
    registry.upsert([member(f"env-{number}") for number in range(10)])
    registry._table.envs = Guarded(registry._table.envs, frozenset())
    registry._table._slots = Guarded(registry._table._slots, frozenset())
    assert registry.held().records == 10

"""What counts as growth: a little more with every event does, whatever comes and goes besides; noise and a moment's
excess do not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.churn import RECORDS, SHARED_ENVS, Cluster
from tests.soak.fleet import AT_REST, LEAST, Plan
from tests.soak.growth import Growth, Measured, Point, complaints, growth

WARM_UP = 100.0
#: points of a third
THIRD = 20
BLOCKS = f"blocks{AT_REST}"

PLAN = Plan(
    seed=0,
    agents=50,
    processes=5,
    length=1800.0,
    rests=20,
    forgotten_after=7.0,
    warm_up=WARM_UP,
    measure_interval=10.0,
    allowed_blocks=2_000,
    allowed_memory=4.0 * 2**20,
)
#: noise between 0 and 1, of every point of three thirds
NOISE = st.integers(0, 2**32).map(random.Random).map(lambda generator: [generator.random() for _ in range(3 * THIRD)])


def points(values: Sequence[float]) -> list[Point]:
    return [Point(WARM_UP + 10.0 * number, value) for number, value in enumerate(values)]


def measured(name: str, values: Sequence[float]) -> Measured:
    """A process that is flat in all that is judged, but for one series."""
    found = Measured({each: points([1000.0] * len(values)) for each in PLAN.allowed})
    found.series[name] = points(values)
    return found


def judged(found: Measured) -> list[str]:
    return complaints("hub", found, warm_up=WARM_UP, allowed=PLAN.allowed, least=LEAST)


@pytest.mark.parametrize("name", list(PLAN.allowed))
@given(noise=NOISE)
def test_what_leaks_is_found_in_every_series(name: str, noise: list[float]) -> None:
    """It grows by a fixed amount with each point; between the middles of the first third and of the last there are two
    thirds, and noise takes away its own height at the most."""
    most = PLAN.allowed[name]
    step = (most + most + 1.0) / (2 * THIRD)
    leaking = [1000.0 + step * number + most * each for number, each in enumerate(noise)]
    found = judged(measured(name, leaking))
    assert found[0].startswith(f"hub: {name} have grown by ")
    assert len(found) == 2


@pytest.mark.parametrize("name", list(PLAN.allowed))
@given(noise=NOISE)
def test_noise_is_no_growth(name: str, noise: list[float]) -> None:
    assert judged(measured(name, [1000.0 + PLAN.allowed[name] * each for each in noise])) == []


def test_less_is_no_growth() -> None:
    assert judged(measured(BLOCKS, [1e6 - 1000.0 * number for number in range(3 * THIRD)])) == []


@given(excess=st.sets(st.integers(0, THIRD - 1), max_size=THIRD // 2 - 1), third=st.integers(0, 2))
def test_a_moment_counts_for_nothing(excess: set[int], third: int) -> None:
    """However much it is, for less than half of a third."""
    values = [1000.0] * (3 * THIRD)
    for number in excess:
        values[third * THIRD + number] = 1e9
    assert growth(points(values), WARM_UP) == Growth(1000.0, 1000.0, 1000.0)


@given(
    extra=st.lists(st.floats(0.0, 1e6), min_size=3 * THIRD, max_size=3 * THIRD),
    at_need=st.lists(st.integers(0, THIRD - 1), min_size=3, max_size=3),
)
def test_what_is_held_by_chance_is_no_growth_where_the_least_counts(extra: list[float], at_need: list[int]) -> None:
    """However much and however often, so long as each third has one point without."""
    for third, number in enumerate(at_need):
        extra[third * THIRD + number] = 0.0
    assert growth(points([1000.0 + each for each in extra]), WARM_UP, least=True).amount == 0
    assert judged(measured(BLOCKS, [1000.0 + each for each in extra])) == []


def test_what_came_before_the_warm_up_counts_for_nothing() -> None:
    filling = [Point(at / 2, 10.0 * at) for at in range(int(WARM_UP))]
    flat = points([1000.0] * (3 * THIRD))
    assert growth(filling + flat, WARM_UP).amount == 0
    assert growth(filling + flat, 0.0).amount > 0


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_little_is_no_proof(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} points after 100 s are too few"):
        growth(points([1000.0] * count), WARM_UP)


def test_what_there_is_more_of_is_named() -> None:
    found = measured(BLOCKS, [1000.0 * number for number in range(3 * THIRD)])
    found.types = [
        (WARM_UP + 10.0 * number, {"builtins.dict": 500 - number, "hub._Watcher": 10 + number, "hub._News": 3 * number})
        for number in range(3 * THIRD)
    ]
    assert judged(found)[1] == "hub: there are more of hub._News +120, hub._Watcher +40"


@given(st.integers(0, 2**32), st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_at_rest_there_is_as_much_to_hold_as_at_the_beginning(seed: int, changes: list[int]) -> None:
    """However much has come and gone: so many records, in envs that others have, too."""
    cluster = Cluster("east", random.Random(seed))
    for count in changes:
        for _ in range(count):
            cluster.change()
        cluster.settle()
        assert len({record.identity for record in cluster.records}) == RECORDS == len(cluster.records)
        assert {record.env_name for record in cluster.records} <= set(SHARED_ENVS)

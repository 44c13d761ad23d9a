"""A fleet in motion for as long as one likes: nothing grows, nothing is left over, and in the end everybody knows what
is true."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.fleet import KINDS, Plan, Report, soak

#: Says for how many minutes a soak goes on; and from which seed, where one is to be repeated.
MINUTES = "SOAK_MINUTES"
SEED = "SOAK_SEED"
#: what everything besides the churn takes, at the most, on a busy machine; seconds
REST = 600.0


def check(report: Report, wrong: list[str]) -> None:
    if wrong:
        pytest.fail("\n".join([*wrong, report.table]), pytrace=False)


@pytest.mark.slow
async def test_the_fleet_knows_what_is_true_and_keeps_nothing_else(tmp_path: Path, say: Callable[[str], None]) -> None:
    """What the long run does, for a moment: too short to tell what grows, but nothing is left over."""
    plan = Plan(
        seed=689,  # each kind of thing is done within the first two seconds
        agents=8,
        processes=2,
        length=4.0,
        rests=1,
        forgotten_after=0.0,
        warm_up=0.0,
        measure_interval=0.3,
        allowed_blocks=2_000,
        allowed_memory=4.0 * 2**20,
        pace=20.0,
    )
    report = await soak(plan, tmp_path, say, judge_growth=False)
    check(report, report.troubles)
    for name in (*(kind.name for kind in KINDS), "value", "new pool", "placement", "scrape", "sink update"):
        assert f"× {name}" in report.table


@pytest.mark.soak
async def test_nothing_grows(
    tmp_path: Path,
    say: Callable[[str], None],
    allow_seconds: Callable[[float], None],
    soak_tables: list[str],
) -> None:
    minutes = float(os.environ.get(MINUTES, "30"))
    allow_seconds(minutes * 60 + REST)
    plan = Plan(
        seed=int(os.environ.get(SEED, random.SystemRandom().randrange(1_000_000))),
        agents=50,
        processes=5,
        length=minutes * 60,
        rests=20,
        forgotten_after=7.0,
        warm_up=minutes * 10,
        measure_interval=min(10.0, minutes),
        allowed_blocks=2_000,
        allowed_memory=4.0 * 2**20,
    )
    say(f"{plan.agents} agents for {minutes:g} min, seed {plan.seed}")
    report = await soak(plan, tmp_path, say)
    soak_tables.append(report.table)
    check(report, report.troubles + report.growth)

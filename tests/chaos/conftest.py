"""What chaos runs share: where their figures are gathered, and the table of them at the end of a run."""

from __future__ import annotations

import random

import pytest

from tests.chaos.fleet import Figures, table

_FIGURES = pytest.StashKey[list[Figures]]()
_SEED = pytest.StashKey[int]()


@pytest.fixture
def chaos_figures(pytestconfig: pytest.Config) -> list[Figures]:
    """Where the figures of rounds go that are to be shown at the end of the run."""
    return pytestconfig.stash.setdefault(_FIGURES, [])


@pytest.fixture
def soak_seed(pytestconfig: pytest.Config) -> int:
    """A seed that is drawn anew for each run, and the same all through it. Shown at once: a run may never get to its
    end."""
    if _SEED not in pytestconfig.stash:
        seed = pytestconfig.stash[_SEED] = random.SystemRandom().randrange(1_000_000)
        if (reporter := pytestconfig.pluginmanager.get_plugin("terminalreporter")) is not None:
            reporter.write_line(f"chaos, seed {seed}")
    return pytestconfig.stash[_SEED]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Shows the figures of the rounds that were run."""
    if figures := config.stash.get(_FIGURES, []):
        seed = config.stash.get(_SEED, None)
        terminalreporter.section("chaos" if seed is None else f"chaos, seed {seed}")
        terminalreporter.write_line(table(figures))

"""What every test gets: how hypothesis draws its examples, and the folder of shared cases. Fixtures about one room live
beside the tests of that room."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

#: runs of pytest as tests: of the plugin that the test kit brings
pytest_plugins = ["pytester"]

#: the folder that the shared designs and cases are laid in, beside the repo
SHARED = Path(__file__).resolve().parent.parent.parent / "shared"

# A shell that starts a run in the background has it ignore Ctrl-C, and so the runs of the tests that interrupt
# something in the way of Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A run has to mean the same on every machine, so examples are derived from the test itself, none are remembered from
# one run to the next, and nothing depends on how fast a machine is. HYPOTHESIS_PROFILE=explore draws new examples each
# time, and soak many of them.
settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", settings.get_profile("explore"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Ends the run where Ctrl-C has ended a test under Trio. That comes in a group there, which pytest would take for a
    failure of the test's own, and go on."""
    try:
        return (yield)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from group
        raise


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared designs and cases. A test that needs it is skipped in a clone that stands alone; what every
    run has to prove must not need it."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not there")
    return SHARED

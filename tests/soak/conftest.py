"""What soaks share: where the table of one is gathered, and how it is shown at the end of a run; and time enough."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

_TABLES = pytest.StashKey[list[str]]()


@pytest.fixture
def soak_tables(pytestconfig: pytest.Config) -> list[str]:
    """Where tables go that are to be shown at the end of the run."""
    return pytestconfig.stash.setdefault(_TABLES, [])


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Shows a line at once, while the test goes on."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", end="", flush=True)  # noqa: T201 - it is for whoever looks on

    return show


@pytest.fixture
def allow_seconds(pytestconfig: pytest.Config) -> Callable[[float], None]:
    """Gives the test so many seconds from now before it counts as one that hangs, instead of what all others have."""

    def allow(seconds: float) -> None:
        stderr = pytestconfig.stash.get(fault_handler_stderr_fd_key, None)
        if stderr is not None:
            faulthandler.dump_traceback_later(seconds, file=stderr, exit=True)

    return allow


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Shows the tables."""
    for table in config.stash.get(_TABLES, []):
        terminalreporter.section("soak")
        terminalreporter.write_line(table)

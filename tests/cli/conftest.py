"""The command line, called in this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog

from tests.process.running import UNWANTED
from trio_federation import logs
from trio_federation.cli import main


class Ended(NamedTuple):
    """What came of a command."""

    code: int
    output: str
    #: what it wrote to standard error
    lines: list[str]


#: Calls the command line with these arguments.
Call = Callable[..., Ended]


@pytest.fixture
def logs_as_before() -> Iterator[None]:
    """What a command sets up for logs is undone: its stream is closed when the test ends."""
    root, own = logging.getLogger(), logging.getLogger(logs.ROOT)
    levels = root.level, own.level
    yield
    structlog.reset_defaults()
    root.handlers = [handler for handler in root.handlers if handler.get_name() != logs.ROOT]
    root.setLevel(levels[0])
    own.setLevel(levels[1])


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logs_as_before: None) -> Call:
    """Calls the command line, as a shell would whose output goes into a file."""
    for name in UNWANTED:
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["trio-federation", *(str(each) for each in arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, said.out, said.err.splitlines())

    return run

"""`trio-federation run`: how it ends where no signal ends it. What it runs is tested in tests/process."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from tests.cli.conftest import Call
from tests.process.running import COMMAND, agent_file, environment
from trio_federation import process
from trio_federation.errors import ConfigurationError

LINE = (
    "ended by a KeyboardInterrupt that no signal has brought, but a plugin, for instance; "
    "`trio-federation --verbose run` shows from where"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=1, secret=None)


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        BaseExceptionGroup("", [KeyboardInterrupt()]),
        BaseExceptionGroup("", [BaseExceptionGroup("", [KeyboardInterrupt()]), KeyboardInterrupt()]),
    ],
    ids=["alone", "in a group", "in groups"],
)
def test_an_interrupt_from_inside(
    error: BaseException, file: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise error

    monkeypatch.setattr(process, "run", run)
    ended = call("run", file)
    assert (ended.code, ended.output, ended.lines) == (1, "", [LINE])
    ended = call("--verbose", "run", file)
    assert (ended.code, ended.output, ended.lines[-1]) == (1, "", LINE)
    assert any(line.strip(" |").startswith("KeyboardInterrupt") for line in ended.lines)
    assert any("test_run.py" in line for line in ended.lines)


@pytest.mark.parametrize(
    "other, code, lines",
    [
        (ConfigurationError(["one: bad"]), 2, ["interrupted", "one: bad"]),
        (ValueError("a bug"), None, []),
    ],
)
def test_an_interrupt_does_not_hide_what_else_was_wrong(
    other: Exception, code: int | None, lines: list[str], file: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise BaseExceptionGroup("", [KeyboardInterrupt(), other])

    monkeypatch.setattr(process, "run", run)
    if code is None:
        with pytest.raises(BaseExceptionGroup):
            call("run", file)
    else:
        ended = call("run", file)
        assert (ended.code, ended.output, ended.lines) == (code, "", lines)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}, {"TERM": "xterm"}])
def test_a_terminal_is_logged_to_as_it_wants(variables: dict[str, str], tmp_path: Path) -> None:
    file = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=1, secret=None)
    file.write_text(file.read_text().replace('format = "json"', 'format = "auto"'))
    controller, terminal = pty.openpty()
    said = b""
    with subprocess.Popen(
        [COMMAND, "run", file], stdout=terminal, stderr=terminal, env=environment() | variables
    ) as run:
        os.close(terminal)
        with suppress(OSError):  # how Linux says that nobody holds the other end any more
            while part := os.read(controller, 65536):
                said += part
                if b"metrics_port" in said:
                    run.send_signal(signal.SIGTERM)
        os.close(controller)
        assert run.wait() == 0
    assert b"started" in said
    assert (b"\x1b[" in said) is (variables == {"TERM": "xterm"})

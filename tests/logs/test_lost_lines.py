"""What becomes of a log that cannot be written: lines are lost, each is counted, the next that can be written comes
after one that says how many, and whoever logs notices nothing."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from trio_federation import logs
from trio_federation.config import Log

log = structlog.get_logger("trio_federation.test")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with as_before():
        yield


@contextmanager
def as_before() -> Iterator[None]:
    """What `logs.configure` sets up is taken back in the end."""
    loggers = [logging.getLogger(name) for name in (None, logs.ROOT)]
    levels = [each.level for each in loggers]
    handlers = loggers[0].handlers[:]
    try:
        yield
    finally:
        structlog.reset_defaults()
        loggers[0].handlers[:] = handlers
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def set_up(stream: TextIO, *, level: str = "info") -> None:
    """Log to a stream, as JSON."""
    logs.configure(Log(level=level, format="json"), stream)  # type: ignore[arg-type]


def parsed(text: str) -> list[dict[str, Any]]:
    """The whole lines of a log; what was torn off is left out."""
    found = []
    for line in text.split("\n"):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Script(io.StringIO):
    """A stream whose descriptor takes what a script says: so many bytes, or an error, one for each write; in the end
    everything."""

    def __init__(self, steps: list[int | None]) -> None:
        super().__init__()
        self.steps = steps
        self.taken = b""

    def fileno(self) -> int:
        return -1

    def write_to(self, descriptor: int, data: bytes) -> int:
        assert descriptor == -1
        step = self.steps.pop(0) if self.steps else len(data)
        if step is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.taken += data[:step]
        return min(step, len(data))


@given(st.lists(st.one_of(st.none(), st.integers(1, 400)), max_size=40), st.integers(1, 20))
def test_every_line_is_there_or_counted(steps: list[int | None], count: int) -> None:
    stream = Script(steps)
    before = logs.lines_lost()
    with as_before(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", stream.write_to)
        set_up(stream)
        for number in range(count):
            log.info("line", number=number)
        stream.steps.clear()
        log.info("line", number=count)
    lost = logs.lines_lost() - before
    lines = parsed(stream.taken.decode())
    numbers = [line["number"] for line in lines if line["event"] == "line"]
    told = [line for line in lines if line["event"] == "log_lines_lost"]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == count
    assert len(numbers) + lost == count + 1
    assert sum(line["lines"] for line in told) == lost
    # Where lines are missing, that is told before the next.
    expected = 0
    for line in lines:
        if line["event"] == "line":
            assert line["number"] == expected
            expected += 1
        else:
            assert line["error"] == "no space left on device"
            expected += line["lines"]


@contextmanager
def full_disk() -> Iterator[TextIO]:
    with open("/dev/full", "w", encoding="utf-8") as stream:
        yield stream


@contextmanager
def pipe_without_reader() -> Iterator[TextIO]:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        yield stream


@contextmanager
def full_pipe_that_does_not_wait() -> Iterator[TextIO]:
    """As a terminal or a pipe is after a program beside this one has asked for that."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(reading, "rb"), os.fdopen(writing, "w", encoding="utf-8") as stream:
        for size in (4096, 1):
            try:
                while True:
                    os.write(writing, b"x" * size)
            except BlockingIOError:
                pass
        yield stream


@contextmanager
def closed_stream() -> Iterator[TextIO]:
    stream = io.StringIO()
    stream.close()
    yield stream


@contextmanager
def closed_descriptor() -> Iterator[TextIO]:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", encoding="utf-8", closefd=False)
    os.close(writing)
    yield stream


@pytest.mark.parametrize(
    "broken", [full_disk, pipe_without_reader, full_pipe_that_does_not_wait, closed_stream, closed_descriptor]
)
def test_a_log_that_takes_nothing_raises_nothing_and_says_nothing(
    broken: Callable[[], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor is anything left in a buffer, to fail when the stream is closed."""
    if broken is full_disk and not Path("/dev/full").exists():
        pytest.skip("a system without /dev/full")
    before = logs.lines_lost()
    with broken() as stream:
        set_up(stream)
        for _ in range(3):
            log.warning("line")
        logging.getLogger("a.library").warning("another")
        assert logs.lines_lost() - before == 4
    assert capfd.readouterr() == ("", "")


def test_a_stream_in_memory_is_written_as_any() -> None:
    stream = io.StringIO()
    set_up(stream)
    log.info("line", text="ä")
    (line,) = parsed(stream.getvalue())
    assert (line["event"], line["text"]) == ("line", "ä")


def test_what_a_stream_cannot_encode_costs_no_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("w", encoding="ascii") as stream:
        set_up(stream)
        logs.configure(Log(level="info", format="console"), stream)
        log.info("line", text="ä\udc80")
    assert "\\xe4\\udc80" in file.read_text()


def test_lost_lines_are_told_at_every_level() -> None:
    """Also where only errors are wanted: that some of those are missing is one."""
    stream = Script([None])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", stream.write_to)
        set_up(stream, level="error")
        log.error("lost")
        log.error("written")
    assert [line["event"] for line in parsed(stream.taken.decode())] == ["log_lines_lost", "written"]


def test_threads_lose_no_count() -> None:
    """Plugins log from their own."""
    stream = Script([None if number % 3 else 10_000 for number in range(300)])
    before = logs.lines_lost()

    def say(thread: int) -> None:
        for number in range(50):
            log.info("line", thread=thread, number=number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", stream.write_to)
        set_up(stream)
        threads = [threading.Thread(target=say, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stream.steps.clear()
        log.info("last")
    lines = parsed(stream.taken.decode())
    lost = logs.lines_lost() - before
    assert lost > 0
    assert sum(line["event"] == "line" for line in lines) + lost == 200
    assert sum(line.get("lines", 0) for line in lines) == lost


def test_without_a_standard_error_nothing_is_written_or_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    before = logs.lines_lost()
    logs.configure(Log(level="info", format="json"))
    log.info("line")
    assert logs.lines_lost() == before

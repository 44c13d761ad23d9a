"""How the process logs: structlog set up once from `[log]`, key by key, as JSON for machines or readable on a terminal,
with what libraries log through the standard library in the same form. A line that cannot be written is lost, and
counted. What is logged, and when, is each room's own business."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from trio_federation.config import Log, Secret
from trio_federation.health import Failed, Tell

#: Above the loggers of this project, as the standard library names them; libraries are outside of it.
ROOT = "trio_federation"

#: What is shown for a secret that somebody logs.
MASK = "***"

log = structlog.get_logger("trio_federation.logs")


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a part of this process, for instance "agent" or "source.fixtures"; bind keys with `.bind()`.

    It may be made before `configure` and follows it from then on; what `.bind()` gave keeps the set-up of its time."""
    full = name if name == ROOT or name.startswith(f"{ROOT}.") else f"{ROOT}.{name}"
    return structlog.stdlib.get_logger(full)


def tell_failure(log: FilteringBoundLogger, noted: Failed, event: str, details: Mapping[str, object]) -> None:
    """A line about a failure, where it is worth one; one that sums up says how many there were and for how long. What
    has been told already is left to those who debug."""
    if noted.tell is Tell.AGAIN:
        log.debug(event, **details)
    elif noted.tell is Tell.SUMMARY:
        log.warning(event, **details, failures=noted.in_a_row, for_seconds=round(noted.lasting))
    else:
        log.warning(event, **details)


def configure(log: Log, stream: TextIO | None = None) -> None:
    """Log to `stream` (None: standard error) from now on, in the level and format of `log`; a later call replaces it.
    Colours are for terminals only, and not for those that cannot show them, or whose NO_COLOR is set.

    Libraries are heard from warnings upwards, or from `log.level` where that is higher. A line that `stream` does not
    take, as on a full disk, is lost, and nothing else happens; the first that it takes again comes after one that tells
    how many were lost."""
    stream = sys.stderr if stream is None else stream
    level = logging.getLevelNamesMapping()[log.level.upper()]
    readable = log.format == "console" or (log.format == "auto" and stream is not None and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    # Tracebacks are plain ones: the richer forms show local variables, among which a secret may be.
    last: list[Processor]
    if readable:
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=_shows_colours(stream), exception_formatter=plain)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, mask_secrets, *last],
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # So that loggers made before a second call follow it.
        cache_logger_on_first_use=False,
    )
    # A process may have been started without a standard error: nobody listens then.
    handler: logging.Handler = _Lines(stream) if stream is not None else logging.NullHandler()
    handler.set_name(ROOT)
    handler.setFormatter(formatter)
    libraries = max(level, logging.WARNING)
    # The root's level is not enough: a library that sets a level of its own passes it by.
    handler.addFilter(lambda record: record.levelno >= libraries or f"{record.name}.".startswith(f"{ROOT}."))
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.get_name() == ROOT]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(libraries)
    logging.getLogger(ROOT).setLevel(level)


class _Losses:
    """What could not be written since the process started: each line once, however the log was set up since."""

    lines = 0


def lines_lost() -> int:
    """Lines of the log that could not be written since the process started."""
    return _Losses.lines


class _Lines(logging.Handler):
    """Writes lines to a stream, and goes on without those that it does not take.

    Where the stream has a file descriptor, lines go past its buffer: what stays in that after a failure would come out
    later, in pieces, and Python ends with an exit code of its own while it is there."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        #: lines that were lost since the last one that was written, and why the last of them was
        self._lost = 0
        self._reason = ""
        #: whether the last line was written in part, and what comes next has to begin a new one
        self._torn = False
        #: whether what comes now is the line that tells of lost ones, and whether that was written
        self._is_telling = False
        self._is_taken = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or count it."""
        try:
            line = self.format(record)
        except Exception:  # a fault of the code that logs; logging tells of it as of any
            self.handleError(record)
            return
        if self._is_telling:
            self._is_taken = self._takes(line)
            return
        if self._lost:
            self._tell_lost()
        # A line does not come before one that tells what is missing in front of it.
        if self._lost or not self._takes(line):
            self._lost += 1
            _Losses.lines += 1

    def _tell_lost(self) -> None:
        """Have the line written that tells of those that were lost. It comes back to `emit`, as any does, in the midst
        of this call."""
        self._is_telling, self._is_taken = True, True
        try:
            log.error("log_lines_lost", lines=self._lost, error=self._reason)
        finally:
            self._is_telling = False
        if self._is_taken:
            self._lost = 0

    def _takes(self, line: str) -> bool:
        """Write a line; whether the stream has taken it."""
        try:
            self._write(f"{line}\n")
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._reason = (getattr(error, "strerror", None) or str(error)).lower()
            return False
        return True

    def _write(self, text: str) -> None:
        try:
            descriptor = self._stream.fileno()
        except (AttributeError, io.UnsupportedOperation):  # one in memory
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode(getattr(self._stream, "encoding", None) or "utf-8", "backslashreplace")
        if self._torn:
            data = b"\n" + data
        written = 0
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            if written < len(data) - 1:  # else only the end of the line is missing, which comes with the next one
                raise
        finally:
            self._torn = self._torn if not written else written < len(data)


def _shows_colours(stream: TextIO | None) -> bool:
    unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not unwanted


def mask_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A structlog processor that puts `MASK` in the place of a `Secret`; one inside of another value hides itself."""
    return {key: MASK if isinstance(value, Secret) else value for key, value in event.items()}

"""Other processes that a benchmark needs: started, told things, heard, measured from outside, and always ended, also
when a benchmark fails or is interrupted. What they say to each other is a line of JSON at a time, and each benchmark's
own business."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.measure import resident_bytes

#: Seconds after which a child that says nothing has failed. Far more than anything takes.
PATIENCE = 120.0
#: Seconds that a child gets to end when asked to.
END_DEADLINE = 5.0

_ROOT = Path(__file__).resolve().parent.parent
#: Becomes the command that is given to it, and has the kernel kill that when this process ends, however it does
#: (prctl's PR_SET_PDEATHSIG is 1, SIGKILL is 9): so nothing is left behind by a benchmark that was killed itself.
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
#: what the environment may hold that would change what a configuration means
_UNWANTED = ("LOCAL_CLUSTER_ID", "TRIO_FEDERATION_SECRET")
#: Linux makes the number of a process's CPU clock from its id, in this way (clock_getcpuclockid): nanoseconds of all
#: its threads, those that have ended included, where /proc/PID/stat counts in steps of 10 ms.
_CPU_CLOCK = 2


class BenchmarkError(Exception):
    """A benchmark cannot say anything; the message says why."""


def command() -> Path:
    """`trio-federation`, as it is installed beside this interpreter. Raises BenchmarkError where it is not."""
    path = Path(sys.executable).with_name("trio-federation")
    if not path.exists():
        raise BenchmarkError(f"no trio-federation beside {sys.executable}: run `make setup`")
    return path


def environment() -> dict[str, str]:
    """The environment of a child."""
    return {name: value for name, value in os.environ.items() if name not in _UNWANTED}


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU, in user and in kernel code, that a process has used so far, all its threads together."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


class Child:
    """A process that runs: made by `running`."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        #: lines with the moment of their coming (`time.perf_counter`); None: no more come
        self._lines: queue.SimpleQueue[tuple[float, str] | None] = queue.SimpleQueue()
        self._latest: deque[str] = deque(maxlen=20)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        # ValueError: it was closed under us, as the child has been ended.
        with suppress(ValueError):
            for line in self._process.stdout:
                self._lines.put((time.perf_counter(), line))
        self._lines.put(None)

    def tell(self, **message: Any) -> None:
        """Write a line of JSON to its standard input."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("has ended") from error

    def hear(self, **wanted: object) -> dict[str, Any]:
        """The next line of JSON that it writes and that has these fields. Raises BenchmarkError where none comes."""
        return self.hear_at(**wanted)[1]

    def hear_at(self, **wanted: object) -> tuple[float, dict[str, Any]]:
        """Like `hear`, with the moment at which the line came in (`time.perf_counter`)."""
        deadline = time.perf_counter() + PATIENCE
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.perf_counter()))
            except queue.Empty:
                raise self._failure(f"has not said what was expected within {PATIENCE:g} s") from None
            if line is None:
                raise self._failure(f"has ended with code {self._process.wait()}")
            at, text = line
            self._latest.append(text)
            if text.startswith("{"):
                message: dict[str, Any] = json.loads(text)
                if all(message.get(key) == value for key, value in wanted.items()):
                    return at, message

    def rest(self, for_seconds: float) -> None:
        """Let it be for so long, and fail if it ends."""
        deadline = time.perf_counter() + for_seconds
        while (left := deadline - time.perf_counter()) > 0:
            with suppress(queue.Empty):
                line = self._lines.get(timeout=left)
                if line is None:
                    raise self._failure(f"has ended with code {self._process.wait()}")
                self._latest.append(line[1])

    def cpu_seconds(self) -> float:
        """Seconds of CPU, in user and in kernel code, that it has used so far, all its threads together."""
        return cpu_seconds(self.pid)

    def resident_bytes(self) -> int:
        """Bytes of memory that it holds now (RSS)."""
        return resident_bytes(self.pid)

    def _failure(self, what: str) -> BenchmarkError:
        said = "".join(self._latest).strip() or "nothing"
        return BenchmarkError(f"{self.name} {what}; it said last:\n{said}")


@contextmanager
def running(*arguments: str | Path, name: str, tied: bool = True) -> Iterator[Child]:
    """Run a command, whose first part is a path; inside the block it can be talked to, and after the block it has
    ended. Its standard error comes together with its standard output. Tying it to this process takes a moment; where
    its start is measured, do without.

    It gets a session of its own, so that Ctrl-C on the terminal interrupts only the benchmark, which then ends it."""
    process = subprocess.Popen(  # noqa: S603 - commands of our own
        [*([sys.executable, "-c", _TIED] if tied else []), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=_ROOT,
        env=environment(),
        start_new_session=True,
    )
    try:
        yield Child(process, name)
    finally:
        try:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_DEADLINE)
        finally:  # also where somebody interrupts once more
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()


def running_module(module: str, *arguments: str | int, name: str) -> Any:
    """Like `running`, for a module of this package."""
    return running(sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments), name=name)


def seconds_to_end(*arguments: str | Path) -> float:
    """Seconds that a command takes from its start to its end. Raises BenchmarkError where it fails."""
    began = time.perf_counter()
    ended = subprocess.run(  # noqa: S603 - commands of our own
        [str(argument) for argument in arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=_ROOT,
        env=environment(),
        check=False,
    )
    took = time.perf_counter() - began
    if ended.returncode != 0:
        raise BenchmarkError(f"{' '.join(map(str, arguments))} ended with {ended.returncode}:\n{ended.stdout}")
    return took


# --- in the child ----------------------------------------------------------------------------------------------------

_saying = threading.Lock()


def say(**message: Any) -> None:
    """Write a line of JSON for the benchmark, in one piece, from whichever thread."""
    with _saying:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def listen() -> dict[str, Any]:
    """The benchmark's next line."""
    message: dict[str, Any] = json.loads(sys.stdin.readline())
    return message

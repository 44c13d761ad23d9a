"""Runs the whole test suite as two runs of pytest side by side: the tests that mostly wait, for a real API server for
instance, one after the other; and all others. Fails where one of them does.

What the others say is seen as they say it. What the tests that wait say is kept meanwhile, shown after that in one
piece, and from then on as it is said, too: the two never mix, and something is seen of the progress all the time.
Ctrl-C, and being asked to end, go to both.

Which tests there are and how they run is up to pytest and its settings. Whoever wants some of the tests, or options of
pytest, calls pytest, as `make test` does where it is given ARGS."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
#: The folders whose tests mostly wait. To be chosen so that both runs take about as long.
WAITING = ("tests/apiserver", "tests/chaos", "tests/process", "tests/soak")
#: what ends both runs early, in their own way
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: seconds between two looks at what a run has said
LOOK_EVERY = 0.2
_libc = ctypes.CDLL(None)


def _end_with_us() -> None:
    """In a child that is to become a run: where we are killed, and can tell it nothing, the kernel ends it."""
    if sys.platform == "linux":
        _libc.prctl(1, signal.SIGTERM)


class Run:
    """A run of pytest in the folder `root`, which begins at once. What it says goes into the file `output`, or (None)
    to where ours goes."""

    def __init__(self, name: str, arguments: Sequence[str], root: Path, output: Path | None = None) -> None:
        self.name = name
        command = [sys.executable, "-m", "pytest", *arguments]
        if sys.stdout.isatty():
            command.append("--color=yes")
        with (output or Path(os.devnull)).open("ab") as said:
            self.process = subprocess.Popen(
                command,
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=None if output is None else said,
                stderr=None if output is None else subprocess.STDOUT,
                # Ctrl-C at a terminal reaches it once, through us.
                start_new_session=True,
                preexec_fn=_end_with_us,
            )

    def show(self, output: Path) -> None:
        """Print what it has said into this file, and what it says until it has ended."""
        with output.open("rb") as said:
            ended = False
            while not ended:
                # Looked at first: what it has said until then is what is read last.
                ended = self.process.poll() is not None
                sys.stdout.buffer.write(said.read())
                sys.stdout.flush()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(LOOK_EVERY)

    @property
    def code(self) -> int:
        """The exit code, once it has ended, as a shell has it."""
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def __str__(self) -> str:
        return f"{self.name}: {'passed' if self.code == 0 else f'failed (exit code {self.code})'}"


def run(root: Path = ROOT) -> int:
    """Run both, and return the exit code: 0, or that of one that has failed."""
    runs: list[Run] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for each in runs:
            each.process.send_signal(number)

    # Whoever has us ignore one, as nohup does, has both ignore it.
    heard = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heard}
    try:
        with tempfile.TemporaryDirectory() as temporary:
            kept = Path(temporary) / "output"
            # Two runs would write over each other's memory of what has failed; that of the others is kept.
            waiting = Run(", ".join(WAITING), [*WAITING, "-p", "no:cacheprovider"], root, kept)
            runs.append(waiting)
            others = Run("all others", [f"--ignore={folder}" for folder in WAITING], root)
            runs.append(others)
            others.process.wait()
            print(f"\n{waiting.name}, beside the tests above:", flush=True)
            waiting.show(kept)
    finally:
        for each in runs:
            # Does nothing where it has ended, as it has unless something went wrong here.
            each.process.terminate()
            each.process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    print(*runs[::-1], sep="\n", flush=True)
    return max(each.code for each in runs)


if __name__ == "__main__":
    sys.exit(run())

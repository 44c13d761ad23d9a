"""`make test` without ARGS runs the suite as two runs of pytest: both count, what they say is not mixed, and Ctrl-C
ends both in good order, also where a test is under Trio."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.run_tests import ROOT, WAITING
from tests.apiserver.cluster import looked
from tests.apiserver.test_harness import alive
from tests.process.running import PATIENCE

#: how the run of those that wait is called
NAME = ", ".join(WAITING)
GOOD = "def test_good():\n    pass\n"
BAD = "def test_bad():\n    assert 1 == 2\n"
#: waits until it is interrupted; leaves its number in a file when it has begun, and a file when it is put away
HANGING = """
import os
import threading
from pathlib import Path
import pytest
import trio

@pytest.fixture
def put_away():
    yield
    Path(__file__).with_suffix(".left").touch()

def begun():
    Path(__file__).with_suffix(".pid").write_text(f"{os.getpid()}\\n")
"""
BLOCKED = f"""{HANGING}
def test_blocked(put_away):
    begun()
    threading.Event().wait()
"""
UNDER_TRIO = f"""{HANGING}
async def test_under_trio(put_away):
    begun()
    await trio.sleep_forever()
"""

#: without the options that somebody gives to all runs
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}

pytestmark = pytest.mark.slow


def lay_out(root: Path, files: Mapping[str, str]) -> list[str]:
    """Write these test modules below a folder, with the suite's own conftest.py. Returns the command that runs them."""
    for folder in WAITING:
        (root / folder).mkdir(parents=True)
    (root / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\naddopts = --import-mode=importlib\ntrio_mode = true\n"
    )
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(ROOT / "tests" / "conftest.py", root / "tests")
    code = (
        f"import sys; from pathlib import Path; from scripts.run_tests import run; sys.exit(run(Path({str(root)!r})))"
    )
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    "waiting, other, code",
    [(GOOD, GOOD, 0), (BAD, GOOD, 1), (GOOD, BAD, 1)],
    ids=["both-pass", "one-that-waits-fails", "another-fails"],
)
def test_both_count(waiting: str, other: str, code: int, tmp_path: Path) -> None:
    command = lay_out(tmp_path, {f"{WAITING[0]}/test_waiting.py": waiting, "tests/other/test_other.py": other})
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    first, second = done.stdout.split(f"\n{NAME}, beside the tests above:\n")
    # The name of a module stands in the line of its progress.
    for said, module, text in ((first, "test_other.py", other), (second, "test_waiting.py", waiting)):
        assert re.findall(r"test_\w+\.py(?= [.F])", said) == [module]
        assert ("1 passed" if text == GOOD else "1 failed") in said
    assert done.stdout.splitlines()[-2:] == [
        f"{name}: {'passed' if text == GOOD else 'failed (exit code 1)'}"
        for name, text in (("all others", other), (NAME, waiting))
    ]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "asked-to-end", "killed"]
)
def test_both_end(number: signal.Signals, tmp_path: Path) -> None:
    names = [f"{WAITING[-1]}/test_waiting", "tests/other/test_other"]
    command = lay_out(tmp_path, {f"{names[0]}.py": BLOCKED, f"{names[1]}.py": UNDER_TRIO})

    def pids() -> list[int]:
        said = [path.read_text() for name in names if (path := tmp_path / f"{name}.pid").exists()]
        return [int(text) for text in said if text.endswith("\n")]

    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert looked(lambda: len(pids()) == 2, PATIENCE)
            process.send_signal(number)
            output, _ = process.communicate(timeout=PATIENCE)
        finally:
            # Takes both along.
            process.kill()
    if number == signal.SIGKILL:
        assert looked(lambda: not any(map(alive, pids())), PATIENCE)
        return
    assert not any(map(alive, pids()))
    # What pytest itself says where it was interrupted is 2.
    code = 2 if number == signal.SIGINT else 128 + number
    assert process.returncode == code, output
    assert output.count(f"failed (exit code {code})") == 2
    if number == signal.SIGINT:
        # Both have put away what they had.
        assert all((tmp_path / f"{name}.left").exists() for name in names)

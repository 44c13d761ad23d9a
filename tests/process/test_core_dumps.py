"""What is in the memory of `run`, secrets among it, does not end in a core dump. Real processes, started where dumps
may be of any size, are ended by the signals that make one; beside them stands a bare Python that leaves one, where
this machine writes any."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
from pathlib import Path

import pytest
import trio

from tests.process.plugin_packages import install
from tests.process.running import COMMAND, Program, hub_file, start_any, wait_idle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what the kernel says of a process is Linux's")

SECRET = "kept-in-memory-4c1b"
#: where the kernel puts core dumps: a path, or "|" and a program that takes them
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")

#: Runs a command in a folder, with core dumps of any size allowed, as some distributions do by default. Says its
#: process id and, when it has ended, its exit code, or minus the signal that has killed it, and whether the kernel has
#: made a dump. A parent of its own, as the status can be taken only once.
_UNLIMITED = """
import ctypes, os, resource, sys
folder, *command = sys.argv[1:]
pid = os.fork()
if pid == 0:
    ctypes.CDLL(None).prctl(1, 9)  # ends when its parent does
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    os.chdir(folder)
    os.execv(command[0], command)
print(pid, flush=True)
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status), os.WCOREDUMP(status), flush=True)
"""

#: A source that tells, from inside of the process, what prctl(PR_GET_DUMPABLE) answers, above 7.
_TELLING = """
import ctypes

class Source(CapacitySource):
    def __init__(self, options, context):
        self.cluster = context.cluster_id

    async def collect(self):
        dumpable = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
        return [Capacity(self.cluster, "team-a", "dumpable", "dumpable", idle=7 + dumpable)]

@hookimpl
def capacity_sources():
    return [SourceType("telling", Options, Source)]
"""


class _Watched:
    """A program, and the process that watches its end."""

    def __init__(self, watcher: Program) -> None:
        self.watcher = watcher
        self.pid = int(watcher.output.split()[0])

    async def ended(self, number: signal.Signals) -> tuple[int, bool]:
        """Send it a signal and wait for its end: its exit code, and whether there was a dump."""
        os.kill(self.pid, number)
        assert await self.watcher.ended() == 0
        _, code, dumped = self.watcher.output.split()
        return int(code), dumped == "True"


async def _start(nursery: trio.Nursery, folder: Path, *command: str | Path, **variables: str) -> _Watched:
    watcher = await start_any(nursery, sys.executable, "-c", _UNLIMITED, folder, *command, **variables)
    await watcher.until(lambda: "\n" in watcher.output)
    return _Watched(watcher)


async def _run(nursery: trio.Nursery, folder: Path, more: str = "", **variables: str) -> _Watched:
    """A hub, in a folder of its own, with core dumps allowed by whoever has started it."""
    config = hub_file(folder / "hub.toml", secret=SECRET)
    config.write_text(more + config.read_text())
    started = await _start(nursery, folder, COMMAND, "run", config, **variables)
    await started.watcher.started()
    return started


def _limit(pid: int) -> str:
    """The soft limit on the size of core dumps, as every user of the machine sees it."""
    (line,) = [each for each in Path(f"/proc/{pid}/limits").read_text().splitlines() if each.startswith("Max core")]
    return line.removeprefix("Max core file size").split()[0]


def _owner(pid: int) -> int:
    """The user whom the kernel lets read what is inside of a process."""
    return Path(f"/proc/{pid}/environ").stat().st_uid


def _dumps(folder: Path, pid: int, pattern: str | None = None) -> list[Path]:
    """Files that may be core dumps of a process: all in the folder that it was in, which is its own; and where the
    kernel would put them, which the whole machine shares, those that name it.

    `pattern`: what the kernel makes their paths from; this machine's where it is not said. Where that has no process
    id, only what the kernel itself says tells whether there was a dump."""
    pattern = CORE_PATTERN.read_text().strip() if pattern is None else pattern
    found = [file for file in folder.iterdir() if "core" in file.name]
    shared = Path(pattern).parent
    if pattern.startswith("/") and shared.is_dir() and shared != folder:
        found += [file for file in shared.iterdir() if re.search(rf"(?<!\d){pid}(?!\d)", file.name)]
    return found


def test_only_dumps_of_the_process_are_looked_at(tmp_path: Path) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    for each in (own / "core", own / "core.7", own / "other", shared / "core.python.77", shared / "core.77.7.python"):
        each.parent.mkdir(exist_ok=True)
        each.touch()
    assert {*_dumps(own, 7, f"{shared}/core.%p.%e")} == {own / "core", own / "core.7", shared / "core.77.7.python"}
    assert {*_dumps(own, 5, f"{shared}/core.%p.%e")} == {own / "core", own / "core.7"}
    assert {*_dumps(own, 77, "|/usr/bin/taker %P")} == {own / "core", own / "core.7"}


async def _bare_process_dumps(nursery: trio.Nursery, folder: Path, number: signal.Signals) -> bool:
    """Whether a process that forbids nothing leaves a dump here. Its memory holds no secret; the dump is removed."""
    bare = await _start(nursery, folder, sys.executable, "-c", "import time; time.sleep(600)")
    before = _dumps(folder, bare.pid)
    code, dumped = await bare.ended(number)
    for each in _dumps(folder, bare.pid):
        if each not in before:
            each.unlink()
    assert code == -number
    return dumped


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
async def test_a_crash_leaves_no_core_dump(number: signal.Signals, nursery: trio.Nursery, tmp_path: Path) -> None:
    """Whether there was one is asked of the kernel, so that it counts as well where a program takes dumps: such a one
    gets them whatever the limit is, but not from a process that is not dumpable.

    Where the kernel does not even dump the bare process, because it is told not to or its program fails, this shows
    nothing; what the next two tests ask does not depend on it."""
    machine_dumps = await _bare_process_dumps(nursery, tmp_path, number)
    program = await _run(nursery, tmp_path)
    before = _dumps(tmp_path, program.pid)
    assert _limit(program.pid) == "0"
    assert await program.ended(number) == (-number, False), f"the machine dumps a bare process: {machine_dumps}"
    assert _dumps(tmp_path, program.pid) == before


@pytest.mark.slow
async def test_no_dump_even_where_the_limit_is_raised_again(nursery: trio.Nursery, tmp_path: Path) -> None:
    """The limit and the mark of the process are two locks; the second holds by itself. To raise the limit from outside
    takes root, of everybody else it is refused, and the limit stays."""
    program = await _run(nursery, tmp_path)
    pid = program.pid
    _, hard = resource.prlimit(os.getpid(), resource.RLIMIT_CORE)
    if os.geteuid() == 0:
        resource.prlimit(pid, resource.RLIMIT_CORE, (hard, hard))
        assert _limit(pid) != "0"
    else:
        with pytest.raises(PermissionError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (hard, hard))
        assert _limit(pid) == "0"
        # What is not dumpable belongs to root in /proc, so that nobody else reads its memory or its environment.
        assert _owner(pid) != os.geteuid()
    before = _dumps(tmp_path, pid)
    assert await program.ended(signal.SIGABRT) == (-signal.SIGABRT, False)
    assert _dumps(tmp_path, pid) == before


@pytest.mark.slow
async def test_the_process_is_not_dumpable(nursery: trio.Nursery, tmp_path: Path) -> None:
    """As the kernel answers it from inside, after everything has started, plugins too; the threads that they run in
    share the mark. The bare process answers 1."""
    code = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    bare = await start_any(nursery, sys.executable, "-c", code)
    assert await bare.ended() == 0
    assert bare.output == "1\n"
    install(tmp_path, telling=_TELLING)
    table = 'cluster_id = "west"\n[[source]]\ntype = "telling"\n'
    program = await _run(nursery, tmp_path, table, PYTHONPATH=str(tmp_path))
    told = await wait_idle(program.watcher.metrics_port, lambda idle: len(idle) > 0)
    assert told == {("west", "team-a", "dumpable", ""): 7}
    assert await program.ended(signal.SIGTERM) == (0, False)

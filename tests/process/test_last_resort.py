"""SIGTERM ends a process within 5 s, exit code 0, also one that a plugin does not let go of, and one whose log nobody
reads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.process.plugin_packages import install, plugins_file
from tests.process.running import COMMAND, agent_file, environment, start

#: any shared secret
SECRET = "last-resort-secret-4711"
#: Seconds from the signal to the end at the most, with one for a busy machine.
LATEST = 6.0

PROGRAM = """
import threading, trio
from trio_federation.cli.signals import signals_cancel

async def until_cancelled_then_block():
    try:
        await trio.sleep_forever()
    finally:
        threading.Event().wait(60)

async def main():
    scope = trio.CancelScope()
    async with signals_cancel(scope, lambda name: print("told", name, flush=True)):
        with scope:
            print("up", flush=True)
            {stuck}

trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "stuck",
    [
        "with trio.CancelScope(shield=True): await trio.sleep(60)",
        "await until_cancelled_then_block()",
    ],
    ids=["shielded", "blocking"],
)
async def test_a_process_that_does_not_end_is_ended(stuck: str) -> None:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    [sys.executable, "-c", PROGRAM.format(stuck=stuck)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    check=False,
                )
            )
            assert process.stdout is not None
            assert process.stderr is not None
            assert (await process.stdout.receive_some()).startswith(b"up")
            process.send_signal(signal.SIGTERM)
            began = trio.current_time()
            await process.wait()
            assert trio.current_time() - began < 5.0
            assert process.returncode == 0
            assert b"does not let itself be stopped" in await process.stderr.receive_some()


#: Leaves a thread behind that keeps the interpreter from ending: its executor waits for it at exit.
EXECUTOR = """
from concurrent.futures import ThreadPoolExecutor

class Source(CapacitySource):
    def __init__(self, options, context):
        self.pool = ThreadPoolExecutor()
        self.pool.submit(time.sleep, 60)

    async def collect(self):
        return []

@hookimpl
def capacity_sources():
    return [SourceType("executor", Options, Source)]
"""


@pytest.mark.slow
async def test_a_process_that_a_plugins_thread_keeps_is_ended(tmp_path: Path) -> None:
    """Everything of ours has ended by then, and the interpreter waits for the thread."""
    install(tmp_path, executor=EXECUTOR)
    file = plugins_file(tmp_path / "west.toml", "west", '[[source]]\ntype = "executor"', hub_port=1, secret=SECRET)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            west = await start(nursery, "run", file, PYTHONPATH=str(tmp_path))
            await west.started()
            began = trio.current_time()
            assert await west.stop() == 0
            assert trio.current_time() - began < LATEST
    assert len(west.events("stopping")) == 1
    assert "does not let itself be stopped" in west.lines[-1]


def fill(pipe: int) -> None:
    """Fill a pipe to its last byte."""
    os.set_blocking(pipe, False)
    for size in (4096, 1):
        try:
            while True:
                os.write(pipe, b"x" * size)
        except BlockingIOError:
            pass
    os.set_blocking(pipe, True)


@pytest.mark.slow
async def test_a_process_whose_log_nobody_reads_is_ended(tmp_path: Path) -> None:
    """Its standard error is a pipe that gets full, behind a collector of logs that has stopped: from then on a line
    holds the process, and the signal that is to end it finds it held."""
    file = agent_file(tmp_path / "west.toml", "west", {"p1": 1}, hub_port=1, secret=SECRET)
    reading, writing = os.pipe()
    process = await trio.lowlevel.open_process(
        [str(COMMAND), "run", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=writing,
        env=environment(),
    )
    try:
        with trio.fail_after(60):
            said = b""
            while (started := re.search(rb'"metrics_port": ?(\d+)', said)) is None:
                await trio.lowlevel.wait_readable(reading)
                said += os.read(reading, 65536)
            fill(writing)
            # It tries its hub again and again, and tells of that.
            while await answers(int(started[1])):
                pass
            process.send_signal(signal.SIGTERM)
            began = trio.current_time()
            assert await process.wait() == 0
            assert trio.current_time() - began < LATEST
    finally:
        if process.returncode is None:
            process.kill()
        os.close(reading)
        os.close(writing)


async def answers(port: int) -> bool:
    """Whether a process answers a probe within a second. Time enough: one that is merely slow is held soon, too."""
    with trio.move_on_after(1.0):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n")
            return await stream.receive_some() != b""
    return False

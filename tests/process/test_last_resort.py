"""SIGTERM ends a process within 5 s, exit code 0, also one that a plugin does not let go of."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial

import pytest
import trio

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

"""Waiting on virtual time until something is so. What, and for how long at most, is up to the tests."""

from __future__ import annotations

from collections.abc import Callable

import trio


async def within(seconds: float, condition: Callable[[], bool], *, step: float = 0.1) -> float:
    """Wait until it is so; returns after how many seconds it was."""
    began = trio.current_time()
    while not condition():
        assert trio.current_time() - began <= seconds, f"not so after {seconds:g} s"
        await trio.sleep(step)
    return trio.current_time() - began

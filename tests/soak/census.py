"""What runs in every process of a soak: it counts what the process holds, when it is told to, and makes small what is
bounded, so that bounds are reached in minutes. As a program it is `trio-federation` with both.

    python -m tests.soak.census run hub.toml
"""

from __future__ import annotations

import asyncio
import collections
import functools
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import trio
from trio._core import _run

from trio_federation import agent, capacity, hub, retry, router
from trio_federation.cli import main
from trio_federation.metrics import health
from trio_federation.samples import SampleTable

#: The signal that asks for a census, and the environment variable that says where to write it.
ASK = signal.SIGUSR2
VARIABLE = "SOAK_CENSUS"

#: What is kept at the most, or for how long: small, so that it is full long before the end. A cache that fills up would
#: else look like a leak for days.
BOUNDS: tuple[tuple[ModuleType, str, float], ...] = (
    (capacity, "_NAMES_KEPT", 500),
    (hub, "_MOST_TOLD", 20),
    (health, "ORIGINS_PER_KIND", 8),
    (router, "PLACEMENTS_KEPT", 10),
    (agent, "HUB_TTL", 5.0),
    (retry, "STABLE", 2.0),
    # Trio keeps deadlines that were given up, until there are so many.
    (_run, "DEADLINE_HEAP_MIN_PRUNE_THRESHOLD", 10),
)


def make_bounds_small() -> None:
    """Put them in the place of the real ones. Raises AttributeError for one that is not there any more."""
    for module, name, value in BOUNDS:
        assert getattr(module, name) > value, name
        setattr(module, name, type(getattr(module, name))(value))
    small = functools.lru_cache(200)(router._leaning.__wrapped__)
    router._leaning = small


def count_when_asked(more: Callable[[], dict[str, Any]] = dict) -> None:
    """Write a census each time that the process is asked for one. `more`: what else there is to tell."""

    def tell() -> None:
        path = os.environ[VARIABLE]
        told = census() | more()
        with open(f"{path}.part", "w") as file:
            json.dump(told, file)
        os.replace(f"{path}.part", path)

    def asked(_number: int, _frame: FrameType | None) -> None:
        # Not here, where anything may be half done.
        trio.lowlevel.current_trio_token().run_sync_soon(tell)

    signal.signal(ASK, asked)


def census() -> dict[str, Any]:
    """What this process holds: blocks of memory that Python has handed out, objects that can hold others, by their
    types, tasks by their names, and threads; tables of records, of agents and hubs that have long ended, too, and what
    is in them, what has run out and is not freed yet included."""
    gc.collect()
    blocks = sys.getallocatedblocks()
    tasks = collections.Counter[str]()
    waiting = [trio.lowlevel.current_root_task()]
    while waiting:
        task = waiting.pop()
        if task is not None:
            tasks[f"trio: {task.name}"] += 1
            for nursery in task.child_nurseries:
                waiting += nursery.child_tasks
    types = collections.Counter[str]()
    objects = gc.get_objects()
    tables = collections.Counter[str]()
    for each in objects:
        # Not isinstance: an object may say anything of its class.
        kind = type(each)
        types[f"{kind.__module__}.{kind.__qualname__}"] += 1
        if issubclass(kind, SampleTable):
            tables.update({"tables": 1} | each.held())
        if issubclass(kind, asyncio.Task) and not each.done():
            tasks[f"asyncio: {getattr(each.get_coro(), '__qualname__', '?')}"] += 1
    return {
        "blocks": blocks,
        "objects": len(objects),
        "threads": threading.active_count(),
        **{name: tables[name] for name in ("tables", "records", "tombstones", "instances")},
        "tasks": tasks,
        "types": types,
    }


if __name__ == "__main__":
    make_bounds_small()
    count_when_asked()
    main()

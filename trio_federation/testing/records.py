"""Short ways to write down records, and to look at something again and again, in tests of a federation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, TypeVar, Unpack

import trio

from trio_federation.capacity import Capacity

T = TypeVar("T")


class Values(TypedDict, total=False):
    """The fields of a record that have defaults."""

    idle: int
    running: int
    pending: int
    desired: int
    autoscaling_enabled: bool
    capacity: int
    saturated_for: float
    state: str
    observed_at: float | None
    scaling_group: str


def member(
    cluster: str, pool: str = "p1", *, env: str = "env", namespace: str = "ns", **values: Unpack[Values]
) -> Capacity:
    """A member record of `cluster`: one pool of one env."""
    return Capacity(cluster, namespace, env, pool, **values)


async def sampled(seconds: float, look: Callable[[], T], *, step: float = 0.1) -> list[T]:
    """What `look` tells now and after every `step`, for so many seconds of the running loop's time."""
    ends_at = trio.current_time() + seconds
    found = [look()]
    while trio.current_time() + step <= ends_at:
        await trio.sleep(step)
        found.append(look())
    return found

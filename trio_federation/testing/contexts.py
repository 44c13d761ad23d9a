"""The contexts that an agent would give to a source, a sink or a filter, for their tests. What a context holds, and
what it is for, is said in `hookspecs.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeVar

import structlog

from trio_federation.clock import Clock, trio_clock
from trio_federation.config import Federation
from trio_federation.hookspecs import (
    PROJECT,
    ClusterContext,
    FilterContext,
    SinkContext,
    SourceContext,
    only_reporter,
)

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_C = TypeVar("_C", bound=ClusterContext)


def source_context(
    *,
    name: str = "source[0]:test",
    cluster_id: str = "west",
    clock: Clock | None = None,
    random: Random | None = None,
    log: FilteringBoundLogger | None = None,
    base_dir: Path | None = None,
    ttl: float = Federation().ttl,
) -> SourceContext:
    """What a source may use of its agent, made for a test.

    `clock`: seconds; by default that of the running Trio loop, which under a MockClock is simulated time.
    `random`: by default a new generator that always starts alike. `log`: by default one bound like an agent's.
    `base_dir`: what relative paths in the options are relative to; by default the working folder. `ttl`: seconds.

    Raises RuntimeError outside of Trio where no `clock` is given."""
    kind = partial(SourceContext, ttl=ttl)
    return _context(kind, "source", name, cluster_id, clock, random, log, base_dir)


def sink_context(
    *,
    name: str = "sink[0]:test",
    cluster_id: str = "west",
    clock: Clock | None = None,
    random: Random | None = None,
    log: FilteringBoundLogger | None = None,
    base_dir: Path | None = None,
    ttl: float = Federation().ttl,
    is_reporter: Callable[[], bool | None] = only_reporter,
) -> SinkContext:
    """What a sink may use of its agent, made for a test, like `source_context`. `is_reporter`: whether the agent is the
    one that reports for its cluster; by default it is."""
    kind = partial(SinkContext, ttl=ttl, is_reporter=is_reporter)
    return _context(kind, "sink", name, cluster_id, clock, random, log, base_dir)


def filter_context(
    *,
    name: str = "filter[0]:test",
    cluster_id: str = "west",
    clock: Clock | None = None,
    random: Random | None = None,
    log: FilteringBoundLogger | None = None,
    base_dir: Path | None = None,
) -> FilterContext:
    """What a filter may use of its agent, made for a test, like `source_context`."""
    return _context(FilterContext, "filter", name, cluster_id, clock, random, log, base_dir)


def _context(
    kind: Callable[..., _C],
    word: str,
    name: str,
    cluster_id: str,
    clock: Clock | None,
    random: Random | None,
    log: FilteringBoundLogger | None,
    base_dir: Path | None,
) -> _C:
    return kind(
        name=name,
        cluster_id=cluster_id,
        clock=clock if clock is not None else trio_clock(),
        random=random if random is not None else Random(0),
        log=log if log is not None else structlog.get_logger(PROJECT).bind(**{word: name}, cluster=cluster_id),
        base_dir=base_dir if base_dir is not None else Path.cwd(),
    )

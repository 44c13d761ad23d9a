"""Shared runtime capacity between Kubernetes clusters: the names that plugins and programs may rely on.

Everything here is described in the README; rooms that are not re-exported are the project's own business."""

from trio_federation.capacity import Capacity, Change, Identity, Origin, Withdrawal, rollup
from trio_federation.hookspecs import (
    Backplane,
    BackplaneContext,
    BackplaneType,
    CapacityFilter,
    CapacitySink,
    CapacitySource,
    FilterContext,
    FilterType,
    SinkContext,
    SinkType,
    SourceContext,
    SourceType,
    hookimpl,
)
from trio_federation.metrics import publish_metrics
from trio_federation.options import Duration, seconds
from trio_federation.registry import ForeignMember, Registry
from trio_federation.router import Placement, Router

__all__ = [
    "Backplane",
    "BackplaneContext",
    "BackplaneType",
    "Capacity",
    "CapacityFilter",
    "CapacitySink",
    "CapacitySource",
    "Change",
    "Duration",
    "FilterContext",
    "FilterType",
    "ForeignMember",
    "Identity",
    "Origin",
    "Placement",
    "Registry",
    "Router",
    "SinkContext",
    "SinkType",
    "SourceContext",
    "SourceType",
    "Withdrawal",
    "hookimpl",
    "hookspecs",
    "publish_metrics",
    "rollup",
    "seconds",
]

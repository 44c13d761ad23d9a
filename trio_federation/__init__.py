"""Shared runtime capacity between Kubernetes clusters: the names that plugins and programs may rely on.

Everything here is described in the README; rooms that are not re-exported are the project's own business."""

from trio_federation.capacity import Capacity, Change, Identity, Origin, Withdrawal, rollup
from trio_federation.hookspecs import (
    CapacitySink,
    CapacitySource,
    SinkContext,
    SinkType,
    SourceContext,
    SourceType,
    hookimpl,
)
from trio_federation.metrics import publish_metrics
from trio_federation.registry import ForeignMember, Registry
from trio_federation.router import Placement, Router

__all__ = [
    "Capacity",
    "CapacitySink",
    "CapacitySource",
    "Change",
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
]

"""Shared runtime capacity between Kubernetes clusters: the names that plugins and programs may rely on.

What they are for is in the README, the contract for plugins in docs/plugins.md; rooms that are not re-exported are the
project's own business. A name's room is imported when the name is first asked for: `trio-federation --version` needs
none of them, and a plugin no metrics."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trio_federation import hookspecs
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
        Trouble,
        hookimpl,
    )
    from trio_federation.metrics import publish_metrics
    from trio_federation.options import Duration, seconds
    from trio_federation.registry import ForeignMember, Registry
    from trio_federation.reservations import Outcome
    from trio_federation.router import Candidate, Placed, Placement, Router, Rule, Tier
else:
    # Not for type checkers, who would then believe in any name at all.
    #: By room, the names that come from it; a test holds them against the imports above.
    _HOMES = {
        "capacity": ("Capacity", "Change", "Identity", "Origin", "Withdrawal", "rollup"),
        "hookspecs": (
            "Backplane",
            "BackplaneContext",
            "BackplaneType",
            "CapacityFilter",
            "CapacitySink",
            "CapacitySource",
            "FilterContext",
            "FilterType",
            "SinkContext",
            "SinkType",
            "SourceContext",
            "SourceType",
            "Trouble",
            "hookimpl",
        ),
        "metrics": ("publish_metrics",),
        "options": ("Duration", "seconds"),
        "registry": ("ForeignMember", "Registry"),
        "reservations": ("Outcome",),
        "router": ("Candidate", "Placed", "Placement", "Router", "Rule", "Tier"),
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name == "hookspecs":
            return importlib.import_module("trio_federation.hookspecs")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "Backplane",
    "BackplaneContext",
    "BackplaneType",
    "Candidate",
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
    "Outcome",
    "Placed",
    "Placement",
    "Registry",
    "Router",
    "Rule",
    "SinkContext",
    "SinkType",
    "SourceContext",
    "SourceType",
    "Tier",
    "Trouble",
    "Withdrawal",
    "hookimpl",
    "hookspecs",
    "publish_metrics",
    "rollup",
    "seconds",
]

"""What tests need: `simulated_federation`, a whole federation in memory and on virtual time; `check_capacity_source`,
the conformance suite for sources; and the contexts that an agent would give to sources, sinks and filters.
docs/testing.md says what they are for.

Everything runs in any test runner that can await under Trio. A name's room is imported when the name is first asked
for: the plugin for pytest lives here, and pytest imports that one into every run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trio_federation.testing.clusters import AgentProcess, SimulatedCluster
    from trio_federation.testing.conformance import check_capacity_source
    from trio_federation.testing.contexts import filter_context, sink_context, source_context
    from trio_federation.testing.eventlog import EventLog
    from trio_federation.testing.factory import FederationFactory
    from trio_federation.testing.hubs import SimulatedHub
    from trio_federation.testing.invariants import (
        AgesNeverShrink,
        Invariant,
        InvariantBroken,
        NothingCountsTwice,
        NothingOutlivesItsTtl,
        TruthIsEverywhere,
        every_invariant,
    )
    from trio_federation.testing.ledger import Statement
    from trio_federation.testing.network import OtherHub, Route
    from trio_federation.testing.records import member, sampled
    from trio_federation.testing.rules import RULES, ConformanceError, ConformanceReport, Rule
    from trio_federation.testing.scripted import PushingSource, ScriptedSource
    from trio_federation.testing.simulation import Simulation, run_simulated, simulated_federation
else:
    # Not for type checkers, who would then believe in any name at all.
    #: By room, the names that come from it; a test holds them against the imports above.
    _HOMES = {
        "clusters": ("AgentProcess", "SimulatedCluster"),
        "conformance": ("check_capacity_source",),
        "contexts": ("filter_context", "sink_context", "source_context"),
        "eventlog": ("EventLog",),
        "factory": ("FederationFactory",),
        "hubs": ("SimulatedHub",),
        "invariants": (
            "AgesNeverShrink",
            "Invariant",
            "InvariantBroken",
            "NothingCountsTwice",
            "NothingOutlivesItsTtl",
            "TruthIsEverywhere",
            "every_invariant",
        ),
        "ledger": ("Statement",),
        "network": ("OtherHub", "Route"),
        "records": ("member", "sampled"),
        "rules": ("RULES", "ConformanceError", "ConformanceReport", "Rule"),
        "scripted": ("PushingSource", "ScriptedSource"),
        "simulation": ("Simulation", "run_simulated", "simulated_federation"),
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "RULES",
    "AgentProcess",
    "AgesNeverShrink",
    "ConformanceError",
    "ConformanceReport",
    "EventLog",
    "FederationFactory",
    "Invariant",
    "InvariantBroken",
    "NothingCountsTwice",
    "NothingOutlivesItsTtl",
    "OtherHub",
    "PushingSource",
    "Route",
    "Rule",
    "ScriptedSource",
    "SimulatedCluster",
    "SimulatedHub",
    "Simulation",
    "Statement",
    "TruthIsEverywhere",
    "check_capacity_source",
    "every_invariant",
    "filter_context",
    "member",
    "run_simulated",
    "sampled",
    "simulated_federation",
    "sink_context",
    "source_context",
]

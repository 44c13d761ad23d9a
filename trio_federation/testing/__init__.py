"""What tests of plugins need: `check_capacity_source`, the conformance suite for sources, and the contexts that an
agent would give to sources, sinks and filters. It runs in any test runner that can await under Trio."""

from trio_federation.testing.conformance import check_capacity_source
from trio_federation.testing.contexts import filter_context, sink_context, source_context
from trio_federation.testing.rules import RULES, ConformanceError, ConformanceReport, Rule

__all__ = [
    "RULES",
    "ConformanceError",
    "ConformanceReport",
    "Rule",
    "check_capacity_source",
    "filter_context",
    "sink_context",
    "source_context",
]

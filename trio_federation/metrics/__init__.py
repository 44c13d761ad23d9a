"""What Prometheus sees: capacity as gauges, rewritten from a full snapshot, and the health of one agent or hub. Only
this package imports prometheus_client. `catalogue.py` says what there is, `capacity.py` exports a snapshot, `writer.py`
writes the same gauges into the answer to a scrape, and `health.py` counts what happens and answers scrapes. Here are
only the names that other rooms use. How the text is served is in `admin/`, how records add up in `capacity.py` beside
this package."""

from trio_federation.metrics.capacity import publish_metrics
from trio_federation.metrics.catalogue import (
    BUCKETS,
    CATALOGUE,
    OUTCOMES,
    PLACEMENTS,
    REFUSALS,
    SINK_FAILURES,
    SOURCE_FAILURES,
    Family,
    Group,
    Kind,
)
from trio_federation.metrics.health import (
    CONTENT_TYPE,
    ORIGINS_PER_KIND,
    OTHER_PARTIES,
    OTHERS,
    PARTIES,
    REASONS,
    WORDS,
    FederationMetrics,
)
from trio_federation.metrics.writer import LINES_PER_SLICE, RECORDS_PER_SLICE, by_env

__all__ = [
    "BUCKETS",
    "CATALOGUE",
    "CONTENT_TYPE",
    "LINES_PER_SLICE",
    "ORIGINS_PER_KIND",
    "OTHERS",
    "OTHER_PARTIES",
    "OUTCOMES",
    "PARTIES",
    "PLACEMENTS",
    "REASONS",
    "RECORDS_PER_SLICE",
    "REFUSALS",
    "SINK_FAILURES",
    "SOURCE_FAILURES",
    "WORDS",
    "Family",
    "FederationMetrics",
    "Group",
    "Kind",
    "by_env",
    "publish_metrics",
]

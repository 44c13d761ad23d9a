"""How the tests of metrics read a scrape: with Prometheus' own parser, and as series by name and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from trio_federation.capacity import Capacity
from trio_federation.metrics import FederationMetrics
from trio_federation.registry import RegistryHeld

#: Values by the name and the sorted labels of their series.
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

ENV = "agentbox_federation_env_"
MEMBER = "trio_federation_member_"
NOW = 100.0


def series_of(text: bytes) -> Series:
    """Every series of a scrape; one that is exported twice fails the test."""
    series: Series = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in series, f"exported twice: {key}"
            series[key] = sample.value
    return series


def families(
    metrics: FederationMetrics,
    envs: Iterable[Sequence[Capacity]] = (),
    *,
    now: float = NOW,
    held: Callable[[], RegistryHeld] | None = None,
) -> dict[str, Metric]:
    """What a scrape shows, by the name of the family (a counter's without _total); the companions _created, which
    prometheus_client adds on its own, are left out."""
    text = metrics.whole_exposition(envs, now=now, held=held).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    return {name: family for name, family in found.items() if not name.endswith("_created")}


def samples(metrics: FederationMetrics, name: str, *, now: float = NOW) -> dict[tuple[str, ...], float]:
    """The values of the series of one name (a counter's with _total), by their labels' values in the order of the
    labels' names."""
    text = metrics.whole_exposition([], now=now)
    return {
        tuple(value for _, value in labels): value
        for (found, labels), value in series_of(text).items()
        if found == name
    }

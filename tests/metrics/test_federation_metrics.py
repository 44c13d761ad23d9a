"""FederationMetrics: what one agent or hub counts, in a registry of its own, and how its text reads."""

from __future__ import annotations

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from trio_federation.capacity import Capacity
from trio_federation.metrics import ORIGINS_PER_KIND, OTHERS, REASONS, FederationMetrics


def families(metrics: FederationMetrics) -> dict[str, Metric]:
    """What a scrape shows, by the name of the family (a counter's without _total)."""
    return {family.name: family for family in text_string_to_metric_families(metrics.exposition([]).decode())}


def samples(metrics: FederationMetrics, family: str) -> dict[tuple[str, ...], float]:
    """The values of one family, by its labels' values in the order of the labels' names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for sample in families(metrics)[family].samples
        if not sample.name.endswith("_created")
    }


def test_dropped_records_are_counted_by_origin_and_reason() -> None:
    metrics = FederationMetrics()
    metrics.record_dropped("source:kubernetes", "idle")
    metrics.record_dropped("source:kubernetes", "idle", 4)
    metrics.record_dropped("source:kubernetes", "namespace")
    metrics.record_dropped("hub:hub-a.example:7443", "own cluster")
    assert samples(metrics, "trio_federation_records_dropped") == {
        ("source:kubernetes", "idle"): 5,
        ("source:kubernetes", "namespace"): 1,
        ("hub:hub-a.example:7443", "own cluster"): 1,
    }


def test_origins_and_reasons_are_bounded_and_nothing_goes_uncounted() -> None:
    metrics = FederationMetrics()
    for number in range(ORIGINS_PER_KIND + 50):
        metrics.record_dropped(f"cluster:c{number}", "idle")
    for number in range(REASONS + 50):
        metrics.record_dropped("cluster:c0", f"reason {number}")
    shown = samples(metrics, "trio_federation_records_dropped")
    assert len({origin for origin, _ in shown}) == ORIGINS_PER_KIND + 1
    assert len({reason for _, reason in shown}) == REASONS + 1
    assert shown[(f"cluster:{OTHERS}", "idle")] == 50
    assert shown[("cluster:c0", OTHERS)] == 51
    assert sum(shown.values()) == ORIGINS_PER_KIND + 50 + REASONS + 50


def test_a_flood_of_cluster_ids_leaves_room_for_sources_and_hubs() -> None:
    metrics = FederationMetrics()
    for number in range(2 * ORIGINS_PER_KIND):
        metrics.record_dropped(f"cluster:c{number}", "idle")
    metrics.record_dropped("source:fixtures", "idle")
    assert samples(metrics, "trio_federation_records_dropped")[("source:fixtures", "idle")] == 1


def test_an_agent_counts_its_sources_and_hubs() -> None:
    metrics = FederationMetrics()
    metrics.source_failed("kubernetes")
    metrics.source_failed("kubernetes")
    metrics.hub_connected("hub-a:7443", "watch", True)
    metrics.hub_connected("hub-a:7443", "report", True)
    metrics.hub_connected("hub-a:7443", "report", False)
    assert samples(metrics, "trio_federation_source_failures") == {("kubernetes",): 2}
    assert samples(metrics, "trio_federation_hub_connected") == {
        ("hub-a:7443", "watch"): 1,
        ("hub-a:7443", "report"): 0,
    }
    assert samples(metrics, "trio_federation_hub_reconnects") == {("hub-a:7443",): 0}
    metrics.hub_reconnected("hub-a:7443")
    assert samples(metrics, "trio_federation_hub_reconnects") == {("hub-a:7443",): 1}


def test_a_hub_shows_who_is_connected_and_an_agent_does_not() -> None:
    metrics = FederationMetrics()
    assert not {"trio_federation_hub_watchers", "trio_federation_hub_reporters"} & families(metrics).keys()
    metrics.watchers(0)
    metrics.reporters(3)
    metrics.reporters(2)
    metrics.call_refused("UNAUTHENTICATED")
    metrics.call_refused("UNAUTHENTICATED")
    assert samples(metrics, "trio_federation_hub_watchers") == {(): 0}
    assert samples(metrics, "trio_federation_hub_reporters") == {(): 2}
    assert samples(metrics, "trio_federation_hub_calls_refused") == {("UNAUTHENTICATED",): 2}


def test_two_in_one_process_share_nothing_and_leave_the_global_registry_alone() -> None:
    before = {family.name for family in REGISTRY.collect()}
    west, east = FederationMetrics(), FederationMetrics()
    west.source_failed("fixtures")
    first = west.exposition([Capacity("west", "agents", "py", "p", idle=1)])
    second = east.exposition([Capacity("east", "agents", "py", "p", idle=2)])
    assert b'env_idle{cluster="west",env="py",group="",namespace="agents"} 1.0' in first
    assert b'env_idle{cluster="east",env="py",group="",namespace="agents"} 2.0' in second
    assert b'"east"' not in first
    assert b'"west"' not in second
    assert samples(east, "trio_federation_source_failures") == {}
    assert {family.name for family in REGISTRY.collect()} == before


def test_an_exposition_shows_the_snapshot_it_was_given_and_ages_at_the_time_it_was_given() -> None:
    metrics = FederationMetrics()
    record = Capacity("west", "agents", "py", "p", idle=1, observed_at=5.0)
    assert b'member_age_seconds{cluster="west"' in metrics.exposition([record], now=6.0)
    assert b"west" not in metrics.exposition([], now=7.0)


def test_everything_has_a_type_and_a_help_text() -> None:
    metrics = FederationMetrics()
    metrics.watchers(1)
    metrics.reporters(1)
    for family in families(metrics).values():
        assert family.type in {"gauge", "counter"}
        assert family.documentation.endswith(".") or "whole env" in family.documentation

"""FederationMetrics: what one agent or hub counts, in a registry of its own, what is there from the start, and what is
absent until it has happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.metrics.reading import NOW, families, samples, series_of
from trio_federation.capacity import Capacity
from trio_federation.metrics import (
    ORIGINS_PER_KIND,
    OTHER_PARTIES,
    OTHERS,
    OUTCOMES,
    PARTIES,
    PLACEMENTS,
    REASONS,
    REFUSALS,
    SINK_FAILURES,
    SOURCE_FAILURES,
    WORDS,
    FederationMetrics,
)
from trio_federation.registry import Registry, RegistryHeld
from trio_federation.reservations import Outcome
from trio_federation.router import Rule

PREFIX = "trio_federation_"
HUB = "hub-a.example:7443"
SOURCE = "source[0]:fixtures"
SINK = "sink[0]:mirror"
FILTER = "filter[0]:private"


@pytest.fixture
def metrics() -> FederationMetrics:
    return FederationMetrics()


def of(metrics: FederationMetrics, name: str, *, now: float = NOW) -> dict[tuple[str, ...], float]:
    return samples(metrics, PREFIX + name, now=now)


# Dropped records.


def test_dropped_records_are_counted_by_origin_and_reason(metrics: FederationMetrics) -> None:
    metrics.record_dropped("source:kubernetes", "idle")
    metrics.record_dropped("source:kubernetes", "idle", 4)
    metrics.record_dropped("source:kubernetes", "namespace")
    metrics.record_dropped("hub:hub-a.example:7443", "own cluster")
    assert of(metrics, "records_dropped_total") == {
        ("source:kubernetes", "idle"): 5,
        ("source:kubernetes", "namespace"): 1,
        ("hub:hub-a.example:7443", "own cluster"): 1,
    }


def test_origins_and_reasons_are_bounded_and_nothing_goes_uncounted(metrics: FederationMetrics) -> None:
    for number in range(ORIGINS_PER_KIND + 50):
        metrics.record_dropped(f"cluster:c{number}", "idle")
    for number in range(REASONS + 50):
        metrics.record_dropped("cluster:c0", f"reason {number}")
    shown = of(metrics, "records_dropped_total")
    assert len({origin for origin, _ in shown}) == ORIGINS_PER_KIND + 1
    assert len({reason for _, reason in shown}) == REASONS + 1
    assert shown[(f"cluster:{OTHERS}", "idle")] == 50
    assert shown[("cluster:c0", OTHERS)] == 51
    assert sum(shown.values()) == ORIGINS_PER_KIND + 50 + REASONS + 50


def test_a_flood_of_cluster_ids_leaves_room_for_sources_and_hubs(metrics: FederationMetrics) -> None:
    for number in range(2 * ORIGINS_PER_KIND):
        metrics.record_dropped(f"cluster:c{number}", "idle")
    metrics.record_dropped("source:fixtures", "idle")
    assert of(metrics, "records_dropped_total")[("source:fixtures", "idle")] == 1


# What an agent records.


def test_what_the_configuration_names_is_there_from_the_start(metrics: FederationMetrics) -> None:
    metrics.configured(hubs=[HUB], sources=[SOURCE], sinks=[SINK], filters=[FILTER])
    assert of(metrics, "hub_connected") == {(HUB, "report"): 0, (HUB, "watch"): 0}
    for counter in ("reconnects", "received_records", "reported_records", "received_bytes", "sent_bytes"):
        assert of(metrics, f"hub_{counter}_total") == {(HUB,): 0}
    assert of(metrics, "source_live") == {(SOURCE,): 0}
    assert of(metrics, "source_failures_total") == {(kind, SOURCE): 0 for kind in SOURCE_FAILURES}
    assert of(metrics, "source_collect_duration_seconds_count") == {(SOURCE,): 0}
    assert of(metrics, "sink_failures_total") == {(kind, SINK): 0 for kind in SINK_FAILURES}
    assert of(metrics, "sink_update_duration_seconds_count") == {(SINK,): 0}
    assert of(metrics, "filter_failures_total") == of(metrics, "filter_withheld_records_total") == {(FILTER,): 0}
    assert of(metrics, "placements_total") == dict.fromkeys(PLACEMENTS, 0)
    assert of(metrics, "placement_outcomes_total") == {(word,): 0 for word in OUTCOMES}


def test_what_never_happened_is_absent_and_not_0(metrics: FederationMetrics) -> None:
    metrics.configured(hubs=[HUB], sources=[SOURCE], sinks=[SINK], filters=[FILTER])
    for name in (
        "hub_last_batch_age_seconds",
        "source_last_success_age_seconds",
        "source_records",
        "sink_last_success_age_seconds",
        "uptime_seconds",
        "build_info",
        "registry_held_records",
        "placement_reservations",
        "hub_watchers",
        "hub_reporters",
        "hub_calls_refused_total",
    ):
        assert of(metrics, name) == {}, name


@pytest.mark.parametrize(
    "mention",
    [
        lambda metrics: metrics.hub_connected(HUB, "watch", False),
        lambda metrics: metrics.hub_reconnected(HUB),
        lambda metrics: metrics.hub_received(HUB, 0, NOW),
        lambda metrics: metrics.hub_reported(HUB, 0),
        lambda metrics: metrics.hub_bytes(HUB, 0, 0),
    ],
)
def test_a_hub_begins_when_it_is_first_mentioned(
    metrics: FederationMetrics, mention: Callable[[FederationMetrics], None]
) -> None:
    mention(metrics)
    for counter in ("reconnects", "received_records", "reported_records", "received_bytes", "sent_bytes"):
        assert of(metrics, f"hub_{counter}_total").keys() == {(HUB,)}


def test_hubs(metrics: FederationMetrics) -> None:
    metrics.hub_connected(HUB, "watch", True)
    metrics.hub_connected(HUB, "report", True)
    metrics.hub_connected(HUB, "report", False)
    assert of(metrics, "hub_connected") == {(HUB, "watch"): 1, (HUB, "report"): 0}
    assert of(metrics, "hub_reconnects_total") == {(HUB,): 0}
    metrics.hub_reconnected(HUB)
    assert of(metrics, "hub_reconnects_total") == {(HUB,): 1}
    metrics.hub_received(HUB, 5, NOW)
    metrics.hub_received(HUB, 0, NOW + 2)
    metrics.hub_reported(HUB, 3)
    metrics.hub_reported(HUB, 4)
    metrics.hub_bytes(HUB, 100, 10)
    metrics.hub_bytes(HUB, 1, 2)
    assert of(metrics, "hub_received_records_total") == {(HUB,): 5}
    assert of(metrics, "hub_reported_records_total") == {(HUB,): 7}
    assert of(metrics, "hub_sent_bytes_total") == {(HUB,): 101}
    assert of(metrics, "hub_received_bytes_total") == {(HUB,): 12}
    assert of(metrics, "hub_last_batch_age_seconds", now=NOW + 5) == {(HUB,): 3}


def test_each_hub_has_its_own_counts(metrics: FederationMetrics) -> None:
    for hub, count in (("hub-a:1", 1), ("hub-b:1", 10), ("hub-a:1", 100)):
        metrics.hub_bytes(hub, count, 2 * count)
        metrics.hub_received(hub, 3 * count, NOW)
        metrics.hub_reported(hub, 4 * count)
    metrics.hub_reconnected("hub-b:1")
    for counter, times in (("sent_bytes", 1), ("received_bytes", 2), ("received_records", 3), ("reported_records", 4)):
        assert of(metrics, f"hub_{counter}_total") == {("hub-a:1",): 101 * times, ("hub-b:1",): 10 * times}
    assert of(metrics, "hub_reconnects_total") == {("hub-a:1",): 0, ("hub-b:1",): 1}


def test_sources(metrics: FederationMetrics) -> None:
    metrics.source_live(SOURCE, True)
    metrics.source_collected(SOURCE, 0.3, 7, NOW)
    metrics.source_collected(SOURCE, 20.0, 6, NOW + 10)
    metrics.source_failed(SOURCE)
    metrics.source_failed(SOURCE, "push")
    metrics.source_failed(SOURCE, "push")
    assert of(metrics, "source_live") == {(SOURCE,): 1}
    assert of(metrics, "source_records") == {(SOURCE,): 6}
    assert of(metrics, "source_last_success_age_seconds", now=NOW + 14) == {(SOURCE,): 4}
    assert of(metrics, "source_collect_duration_seconds_count") == {(SOURCE,): 2}
    assert of(metrics, "source_collect_duration_seconds_sum") == {(SOURCE,): 20.3}
    buckets = of(metrics, "source_collect_duration_seconds_bucket")
    assert (buckets["0.25", SOURCE], buckets["0.5", SOURCE], buckets["15.0", SOURCE]) == (0, 1, 1)
    assert (buckets["30.0", SOURCE], buckets["+Inf", SOURCE]) == (2, 2)
    assert of(metrics, "source_failures_total") == {
        ("collect", SOURCE): 1,
        ("push", SOURCE): 2,
        ("run", SOURCE): 0,
        ("create", SOURCE): 0,
        ("blocked", SOURCE): 0,
    }
    metrics.source_live(SOURCE, False)
    assert of(metrics, "source_live") == {(SOURCE,): 0}


def test_sinks_and_filters(metrics: FederationMetrics) -> None:
    metrics.sink_told(SINK, 0.02, NOW)
    metrics.sink_failed(SINK)
    metrics.sink_failed(SINK, "blocked")
    metrics.filter_failed(FILTER)
    metrics.filter_failed(FILTER, 3)
    metrics.records_withheld(FILTER, 6)
    assert of(metrics, "sink_last_success_age_seconds", now=NOW + 1) == {(SINK,): 1}
    assert of(metrics, "sink_update_duration_seconds_sum") == {(SINK,): 0.02}
    assert of(metrics, "sink_failures_total") == {
        ("update", SINK): 1,
        ("run", SINK): 0,
        ("create", SINK): 0,
        ("troubles", SINK): 0,
        ("blocked", SINK): 1,
    }
    assert of(metrics, "filter_failures_total") == {(FILTER,): 4}
    assert of(metrics, "filter_withheld_records_total") == {(FILTER,): 6}


def test_troubles_of_a_sink_last_until_they_are_told_no_more(metrics: FederationMetrics) -> None:
    metrics.configured(sinks=[SINK])
    assert of(metrics, "sink_trouble") == {}
    forbidden, rival = ("forbidden", ""), ("contested", "rival")
    assert metrics.sink_troubles(SINK, [rival, forbidden, rival]) == [rival, forbidden]
    assert metrics.sink_troubles("sink[1]:other", []) == []
    labels = {forbidden: ("", "forbidden", SINK), rival: ("rival", "contested", SINK)}
    assert of(metrics, "sink_trouble") == {labels[forbidden]: 1, labels[rival]: 1}
    metrics.sink_troubles(SINK, [forbidden])
    assert of(metrics, "sink_trouble") == {labels[forbidden]: 1, labels[rival]: 0}
    metrics.sink_troubles(SINK, [])
    assert of(metrics, "sink_trouble") == {labels[forbidden]: 0, labels[rival]: 0}


def test_parties_and_reasons_of_troubles_are_bounded(metrics: FederationMetrics) -> None:
    """For each sink, and of each reason, by themselves; nobody is no party, and what is past the bound is over, too."""
    many = [("contested", f"manager {number}") for number in range(PARTIES + 5)]
    told = metrics.sink_troubles(SINK, [("contested", ""), *many])
    assert told == sorted([("contested", ""), *many[:PARTIES], ("contested", OTHER_PARTIES)])
    assert metrics.sink_troubles(SINK, [many[-1]]) == [("contested", OTHER_PARTIES)]
    assert metrics.sink_troubles(SINK, [("conflict", "manager 24")]) == [("conflict", "manager 24")]
    assert metrics.sink_troubles("sink[1]:other", [many[-1]]) == [many[-1]]
    shown = of(metrics, "sink_trouble")
    assert len([party for party, reason, sink in shown if (reason, sink) == ("contested", SINK)]) == PARTIES + 2
    assert {labels for labels, value in shown.items() if value} == {
        ("manager 24", "conflict", SINK),
        ("manager 24", "contested", "sink[1]:other"),
    }
    for number in range(WORDS + 10):
        metrics.sink_troubles(SINK, [(f"reason {number}", "")])
    reasons = {reason for _, reason, sink in of(metrics, "sink_trouble") if sink == SINK}
    assert len(reasons) == WORDS + 1
    assert of(metrics, "sink_trouble")[("", OTHERS, SINK)] == 1


def test_placements(metrics: FederationMetrics) -> None:
    metrics.placed("foreign", "foreign_idle")
    metrics.placed("foreign", "foreign_idle")
    metrics.placed("local", "nothing_anywhere")
    assert of(metrics, "placements_total") == dict.fromkeys(PLACEMENTS, 0) | {
        ("foreign", "foreign_idle"): 2,
        ("local", "nothing_anywhere"): 1,
    }


def test_every_rule_and_every_outcome_of_the_router_is_there_from_the_start() -> None:
    assert sorted(rule for _, rule in PLACEMENTS) == sorted(Rule)
    assert sorted(OUTCOMES) == sorted([*Outcome, "repeated", "unknown"])


def test_outcomes(metrics: FederationMetrics) -> None:
    for word in ("served", "unknown", "served"):
        metrics.outcome(word)
    assert of(metrics, "placement_outcomes_total") == {
        ("served",): 2,
        ("empty",): 0,
        ("refused",): 0,
        ("repeated",): 0,
        ("unknown",): 1,
    }


def test_reservations_are_those_of_the_scrape(metrics: FederationMetrics) -> None:
    count = 3
    metrics.reservations(lambda: count)
    assert of(metrics, "placement_reservations") == {(): 3}
    count = 0
    assert of(metrics, "placement_reservations") == {(): 0}


def test_words_are_bounded_and_nothing_goes_uncounted(metrics: FederationMetrics) -> None:
    for number in range(WORDS + 10):
        metrics.source_failed(SOURCE, f"kind {number}")
        metrics.sink_failed(SINK, f"kind {number}")
        metrics.placed("local", f"rule {number}")
        metrics.outcome(f"word {number}")
        metrics.call_refused(f"STATUS_{number}")
    for name, place in (
        ("source_failures_total", 0),
        ("sink_failures_total", 0),
        ("placements_total", 1),
        ("placement_outcomes_total", 0),
        ("hub_calls_refused_total", 0),
    ):
        shown = of(metrics, name)
        assert sum(shown.values()) == WORDS + 10
        assert len(shown) == WORDS + 1
        assert [value for labels, value in shown.items() if labels[place] == OTHERS] == [
            10 + len([value for value in shown.values() if value == 0])
        ]


@pytest.mark.parametrize("behind", [0.0, 50.0])
def test_an_age_is_never_negative(behind: float) -> None:
    """A scrape's time may be a moment older than what was recorded while it went on."""
    metrics = FederationMetrics(started_at=NOW)
    metrics.hub_received(HUB, 1, NOW)
    metrics.source_collected(SOURCE, 0.1, 1, NOW)
    metrics.sink_told(SINK, 0.1, NOW)
    for name in (
        "hub_last_batch_age_seconds",
        "source_last_success_age_seconds",
        "sink_last_success_age_seconds",
        "uptime_seconds",
    ):
        assert list(of(metrics, name, now=NOW - behind).values()) == [0]


# What a hub records.


def test_a_hub_shows_who_is_connected_and_an_agent_does_not(metrics: FederationMetrics) -> None:
    assert not {PREFIX + "hub_watchers", PREFIX + "hub_reporters"} & families(metrics).keys()
    metrics.watchers(0)
    metrics.reporters(3)
    metrics.reporters(2)
    assert of(metrics, "hub_watchers") == {(): 0}
    assert of(metrics, "hub_reporters") == {(): 2}
    assert of(metrics, "hub_calls_refused_total") == {(status,): 0 for status in REFUSALS}
    metrics.call_refused("UNAUTHENTICATED")
    metrics.call_refused("UNAUTHENTICATED")
    assert of(metrics, "hub_calls_refused_total")[("UNAUTHENTICATED",)] == 2


# What both record.


def test_queues_are_read_at_each_scrape(metrics: FederationMetrics) -> None:
    waiting = [1, 2, 3]
    conflated = 0
    metrics.queue("sources", lambda: len(waiting))
    metrics.queue(f"report:{HUB}", lambda: 0, lambda: conflated)
    assert of(metrics, "queue_depth") == {("sources",): 3, (f"report:{HUB}",): 0}
    assert of(metrics, "queue_conflations_total") == {(f"report:{HUB}",): 0}
    waiting.clear()
    conflated = 5
    assert of(metrics, "queue_depth")[("sources",)] == 0
    assert of(metrics, "queue_conflations_total") == {(f"report:{HUB}",): 5}
    metrics.queue("sources", lambda: 9)
    assert of(metrics, "queue_depth")[("sources",)] == 9


def test_build_and_uptime() -> None:
    metrics = FederationMetrics(started_at=NOW - 60)
    metrics.build("0.1.0", python="3.11.7", trio="0.35.0", grpclib="0.4.9")
    assert of(metrics, "build_info") == {("0.4.9", "3.11.7", "0.35.0", "0.1.0"): 1}
    metrics.build("0.1.1", python="3.11.7")
    assert of(metrics, "build_info") == {("3.11.7", "0.1.1"): 1}
    assert of(metrics, "uptime_seconds", now=NOW + 5) == {(): 65}


def test_the_size_of_the_registry_is_what_was_gathered_and_what_it_holds(metrics: FederationMetrics) -> None:
    registry = Registry("a", clock=lambda: NOW)
    registry.upsert([Capacity("a", "ns", "e", "p"), Capacity("a", "ns", "e"), Capacity("b", "ns", "f", "p")])
    registry.withdraw([("c", "ns", "e", "p")])

    def size() -> dict[str, float]:
        text = metrics.whole_exposition(registry.by_env(), now=NOW, held=registry.held)
        return {
            name.removeprefix(PREFIX + "registry_"): value
            for (name, _), value in series_of(text).items()
            if name.startswith(PREFIX + "registry_")
        }

    assert registry.held() == RegistryHeld(records=3, tombstones=1, instances=0)
    assert size() == {"records": 2, "held_records": 3, "tombstones": 1, "instances": 0}

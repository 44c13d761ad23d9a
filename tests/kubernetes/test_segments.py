"""What the view of the fleet looks like in an env's status, and how much two views differ."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.kubernetes import fake_apply
from tests.kubernetes.json_texts import JSON, dump, places, replaced
from tests.kubernetes.statuses import COUNTS, KEY, RECORDS, SCHEMA, record, seen
from trio_federation import Capacity
from trio_federation.capacity import fault
from trio_federation_kubernetes.decoding import Decoder
from trio_federation_kubernetes.mirrored import MirroredEnv, Write
from trio_federation_kubernetes.ownership import FIELD_MANAGER
from trio_federation_kubernetes.schema import StatusFields
from trio_federation_kubernetes.segments import (
    ALL_FIELDS,
    Entry,
    Env,
    Member,
    Segment,
    body,
    content,
    difference,
    entries,
    has_summary,
    idle,
    moment,
    segments,
    told,
)

OFFSETS = st.floats(-1e6, 2e9)
LAST = 253402300799


def written(
    records: Sequence[Capacity], offset: float = 0.0, fields: StatusFields = ALL_FIELDS, *, summary: bool = True
) -> dict[str, Any]:
    """What is applied for these records."""
    found: dict[str, Any] = json.loads(body(KEY, segments(records), fields, offset, summary=summary))
    return found


def shown(records: Sequence[Capacity], offset: float = 0.0, shuffle: random.Random | None = None) -> Env:
    """The object as the server has it after that; with lists in any order, if wanted."""
    applied = written(records, offset)
    if shuffle is not None:
        for entry in applied.get("status", {}).get("clusters", ()):
            shuffle.shuffle(entry.get("observedMembers", []))
            shuffle.shuffle(entry.get("scalingGroups", []))
        shuffle.shuffle(applied.get("status", {}).get("clusters", []))
    return seen(applied)


def contents(records: Sequence[Capacity], offset: float = 0.0) -> dict[str, Entry]:
    """The entries that are told for these records, ages apart."""
    return {cluster: content(entry) for cluster, entry in entries(shown(records, offset)).items()}


def apart(one: Sequence[Capacity], other: Sequence[Capacity]) -> int:
    """By how much two views differ."""
    return difference(segments(one), contents(other))


# --- what is written


def time(unix_seconds: float) -> str:
    """As a calendar has it."""
    return datetime.fromtimestamp(max(0, math.floor(min(unix_seconds, LAST))), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def said(record: Capacity, offset: float) -> dict[str, Any]:
    """What is written of a pool."""
    assert record.observed_at is not None
    found: dict[str, Any] = {
        "name": record.member_pool,
        "idleCount": record.idle,
        "runningCount": record.running,
        "desiredReplicas": record.desired,
        "pendingRequests": record.pending,
        "autoscalingEnabled": record.autoscaling_enabled,
    }
    if record.scaling_group != "":
        found["scalingGroup"] = record.scaling_group
    if record.autoscaling_enabled and record.capacity != -1:
        found["scaleUpHeadroom"] = record.capacity
    if record.saturated_for > 0:
        found["saturatedUntil"] = time(record.observed_at + record.saturated_for + offset)
    if record.state != "":
        found["state"] = record.state
    return found


def expected(records: Sequence[Capacity], offset: float) -> dict[str, Any]:
    """What is written, field by field."""
    clusters = []
    for cluster in sorted({each.cluster_id for each in records}):
        own = [each for each in records if each.cluster_id == cluster]
        oldest = min(each.observed_at for each in own if each.observed_at is not None)
        entry: dict[str, Any] = {"clusterID": cluster, "isLocal": False, "lastSnapshotTime": time(oldest + offset)}
        for each in own:
            if each.member_pool:
                entry.setdefault("observedMembers", []).append(said(each, offset))
            elif each.scaling_group:
                sums = {
                    "name": each.scaling_group,
                    "totalIdle": each.idle,
                    "totalRunning": each.running,
                    "totalDesired": each.desired,
                    "totalPending": each.pending,
                }
                entry.setdefault("scalingGroups", []).append(sums)
            else:
                entry["idleReplicas"] = each.idle
                entry["runningReplicas"] = each.running
                entry["desiredReplicas"] = each.desired
        clusters.append(entry)
    found: dict[str, Any] = {
        "apiVersion": "agents.navix.sh/v1alpha1",
        "kind": "SandboxEnv",
        "metadata": {"name": KEY[1], "namespace": KEY[0]},
    }
    if clusters:
        total = 0
        for entry in clusters:
            if "observedMembers" in entry:
                total += sum(member["idleCount"] for member in entry["observedMembers"])
            elif "idleReplicas" in entry:
                total += entry["idleReplicas"]
            else:
                total += sum(group["totalIdle"] for group in entry["scalingGroups"])
        found["status"] = {
            "clusters": clusters,
            "federation": {
                "clusters": len(clusters),
                "idleReplicas": min(total, 2**31 - 1),
                "lastSnapshotTime": max(entry["lastSnapshotTime"] for entry in clusters),
            },
        }
    return found


@given(RECORDS, OFFSETS)
def test_what_is_written_is_what_the_records_say(records: list[Capacity], offset: float) -> None:
    assert not any(fault(record) for record in records), "the records must be such as come"
    assert written(records, offset) == expected(records, offset)


@given(RECORDS, OFFSETS)
def test_without_the_summary_the_rest_is_the_same(records: list[Capacity], offset: float) -> None:
    wanted = expected(records, offset)
    wanted.get("status", {}).pop("federation", None)
    assert written(records, offset, summary=False) == wanted
    assert written(records, offset, ALL_FIELDS._replace(federation=False)) == wanted


@given(RECORDS, OFFSETS)
def test_nothing_empty_is_written_and_no_null(records: list[Capacity], offset: float) -> None:
    applied = written(records, offset)
    for place in places(applied):
        value: Any = applied
        for part in place:
            value = value[part]
        assert value is not None, place
        assert value not in ([], {}, ""), place


#: What YAML does not take as it is: controls, and what is no character.
NOT_YAML = re.compile("[\x00-\x1f\x7f-\x9f\ufffe\uffff]")


@given(RECORDS)
def test_what_is_written_can_be_read_as_yaml(records: list[Capacity]) -> None:
    """A server does so. Of what JSON takes, YAML takes neither these raw nor surrogates that are escaped."""
    text = body(KEY, segments(records), ALL_FIELDS, 0.0, summary=True).decode()
    assert not NOT_YAML.search(text)
    assert "\\u" not in text


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_name_that_is_good_enough_for_a_record_is_bad_for_yaml(group: str, state: str) -> None:
    found = record("east", scaling_group=group, state=state)
    if fault(found) is None:
        text = body(KEY, segments([found]), ALL_FIELDS, 0.0, summary=True).decode()
        assert not NOT_YAML.search(text)
        assert "\\u" not in text


@given(RECORDS, st.randoms(use_true_random=False))
def test_the_same_view_is_always_written_the_same_way(records: list[Capacity], shuffle: random.Random) -> None:
    """Another order of the same entries would be a change to the server."""
    found = list(segments(records).items())
    shuffle.shuffle(found)
    assert body(KEY, dict(found), ALL_FIELDS, 0.0, summary=True) == body(
        KEY, segments(records), ALL_FIELDS, 0.0, summary=True
    )


@given(RECORDS, OFFSETS)
def test_the_schema_takes_what_is_written(records: list[Capacity], offset: float) -> None:
    env = {"apiVersion": "agents.navix.sh/v1alpha1", "kind": "SandboxEnv", "metadata": {"name": "e", "namespace": "n"}}
    applied = written(records, offset)
    after = fake_apply.apply(SCHEMA, env, applied, FIELD_MANAGER, now="2026-11-30T12:00:00Z")
    assert after.get("status", {}) == applied.get("status", {})


FIELDS = st.builds(
    StatusFields,
    st.booleans(),
    st.frozensets(st.sampled_from(sorted(ALL_FIELDS.entry))),
    st.frozensets(st.sampled_from(sorted(ALL_FIELDS.member))).map(lambda names: names | {"name"}),
)


@given(RECORDS, OFFSETS, FIELDS)
def test_fields_that_the_server_does_not_take_are_left_out(
    records: list[Capacity], offset: float, fields: StatusFields
) -> None:
    wanted = expected(records, offset)
    for entry in wanted.get("status", {}).get("clusters", ()):
        for member in entry.get("observedMembers", ()):
            for name in member.keys() - fields.member:
                del member[name]
        for name in entry.keys() - fields.entry - {"clusterID"}:
            del entry[name]
    if not fields.federation:
        wanted.get("status", {}).pop("federation", None)
    assert written(records, offset, fields) == wanted


def test_all_fields_are_those_of_the_definition() -> None:
    entry = SCHEMA["properties"]["status"]["properties"]["clusters"]["items"]["properties"]
    assert entry.keys() >= ALL_FIELDS.entry
    assert entry["observedMembers"]["items"]["properties"].keys() >= ALL_FIELDS.member
    assert "name" in ALL_FIELDS.member


@pytest.mark.parametrize(
    "unix_seconds, said",
    [
        (0.0, "1970-01-01T00:00:00Z"),
        (1.999, "1970-01-01T00:00:01Z"),
        (1_796_040_000.0, "2026-11-30T12:00:00Z"),
        (1_796_039_999.999, "2026-11-30T11:59:59Z"),
        (-5.0, "1970-01-01T00:00:00Z"),
        (-math.inf, "1970-01-01T00:00:00Z"),
        (LAST + 0.5, "9999-12-31T23:59:59Z"),
        (1e300, "9999-12-31T23:59:59Z"),
    ],
)
def test_moments(unix_seconds: float, said: str) -> None:
    assert moment(unix_seconds) == said


def test_a_cluster_is_as_old_as_its_oldest_record_and_the_summary_as_the_youngest_cluster() -> None:
    records = [record("east", at=50.9), record("east", at=40.9, pool="q"), record("north", at=30.0)]
    status = written(records, 100.0)["status"]
    assert [entry["lastSnapshotTime"] for entry in status["clusters"]] == [time(140.0), time(130.0)]
    assert status["federation"]["lastSnapshotTime"] == time(140.0)


def test_the_sum_of_large_counts_is_the_largest_that_there_is() -> None:
    records = [record(cluster, 2**31 - 1) for cluster in ("east", "north")]
    assert written(records)["status"]["federation"]["idleReplicas"] == 2**31 - 1


@pytest.mark.parametrize(
    "records, total",
    [
        ([record("east", 2), record("east", 3, pool="q")], 5),
        ([record("east", 4, pool=""), record("east", 3, pool="", scaling_group="g")], 4),
        ([record("east", 3, pool="", scaling_group="g"), record("east", 2, pool="", scaling_group="h")], 5),
        ([record("east", 0, pool=""), record("east", 3, pool="", scaling_group="g")], 0),
    ],
)
def test_what_is_idle_in_a_cluster(records: list[Capacity], total: int) -> None:
    assert idle(segments(records)["east"].content) == total


# --- what is there


@given(RECORDS, OFFSETS, st.randoms(use_true_random=False))
def test_what_was_written_is_read_back_as_it_was(
    records: list[Capacity], offset: float, shuffle: random.Random
) -> None:
    wanted = segments(records)
    found = entries(shown(records, offset, shuffle))
    assert {cluster: content(entry) for cluster, entry in found.items()} == {
        cluster: segment.content for cluster, segment in wanted.items()
    }
    assert difference(wanted, {cluster: content(entry) for cluster, entry in found.items()}) == 0
    assert has_summary(shown(records, offset)) == bool(records)


def test_sums_in_another_order_are_the_same() -> None:
    records = [record("east", pool="", scaling_group=group) for group in "abc"]
    (entry,) = entries(shown(records)).values()
    assert entry.scaling_groups is not None
    assert content(replace(entry, scaling_groups=entry.scaling_groups[::-1])) == segments(records)["east"].content


@given(RECORDS, st.randoms(use_true_random=False))
def test_what_is_told_does_not_depend_on_the_order(records: list[Capacity], shuffle: random.Random) -> None:
    before, after = (entries(shown(records, 0.0, each)) for each in (None, shuffle))
    assert {name: told(entry) for name, entry in before.items()} == {name: told(entry) for name, entry in after.items()}


@given(RECORDS)
def test_contents_and_what_is_told_are_what_they_are(records: list[Capacity]) -> None:
    """To do it twice changes nothing."""
    for entry in entries(shown(records)).values():
        assert content(content(entry)) == content(entry)
        assert told(told(entry)) == told(entry)


def test_what_is_told_is_what_a_controller_keeps_of_an_entry() -> None:
    """One with a type of its own, that knows pools and no sums."""
    (entry,) = entries(shown([record("east", pool="", scaling_group="g"), record("east", pool="")])).values()
    assert told(entry) == Entry(cluster_id="east", last_snapshot_time=time(0.0))
    (entry,) = entries(shown([record("east", 3)])).values()
    kept = Entry(cluster_id="east", last_snapshot_time=time(0.0), observed_members=[Member(name="p", idle_count=3)])
    assert told(entry) == told(kept) == kept, "what is 0 or false may as well be absent"
    (other,) = entries(shown([record("east", 4)])).values()
    assert told(other) != told(entry)
    (other,) = entries(shown([record("east", 3, at=1.0)])).values()
    assert told(other) != told(entry), "a time that somebody has changed is a change"


@given(RECORDS)
def test_ages_are_no_part_of_a_content(records: list[Capacity]) -> None:
    later = [dataclasses.replace(each, observed_at=(each.observed_at or 0.0) + 1000.0) for each in records]
    assert {name: each.content for name, each in segments(records).items()} == {
        name: each.content for name, each in segments(later).items()
    }


# --- how much it differs


@given(RECORDS, RECORDS)
def test_a_difference_is_nothing_exactly_where_the_contents_are_equal(
    one: list[Capacity], other: list[Capacity]
) -> None:
    same = {name: each.content for name, each in segments(one).items()} == contents(other)
    assert (apart(one, other) == 0) == same
    assert apart(one, other) >= 0
    assert apart(one, one) == 0


@given(RECORDS, RECORDS)
def test_a_difference_is_the_same_from_both_sides(one: list[Capacity], other: list[Capacity]) -> None:
    assert apart(one, other) == apart(other, one)


@given(st.sampled_from(["idle", "running", "desired", "pending"]), COUNTS, COUNTS, COUNTS, st.booleans())
def test_the_more_sandboxes_differ_the_larger_a_difference_is(
    count: str, first: int, second: int, third: int, grouped: bool
) -> None:
    one, other, farthest = sorted((first, second, third))

    def with_count(value: int) -> list[Capacity]:
        found = record("east", at=1.0, pool="" if grouped else "p", scaling_group="g")
        values: dict[str, Any] = {count: value}
        return [dataclasses.replace(found, **values)]

    assert apart(with_count(one), with_count(other)) <= apart(with_count(one), with_count(farthest))
    if other < farthest:
        assert apart(with_count(one), with_count(other)) < apart(with_count(one), with_count(farthest))
    assert apart(with_count(one), with_count(farthest)) >= farthest - one


@given(COUNTS, COUNTS)
def test_the_sums_of_a_whole_env_count_as_well(one: int, other: int) -> None:
    assert apart([record("east", one, pool="")], [record("east", other, pool="")]) >= abs(one - other)


@given(RECORDS, RECORDS)
def test_clusters_add_up(one: list[Capacity], other: list[Capacity]) -> None:
    def of(records: list[Capacity], cluster: str) -> list[Capacity]:
        return [record for record in records if record.cluster_id == cluster]

    clusters = {record.cluster_id for record in [*one, *other]}
    assert apart(one, other) == sum(apart(of(one, cluster), of(other, cluster)) for cluster in clusters)


# --- whatever stands there


EXAMPLE: dict[str, Any] = {
    **written([record("east", state="Active", saturated_for=5.0, scaling_group="g"), record("north", pool="")]),
    "metadata": {
        "name": "e",
        "namespace": "n",
        "uid": "u",
        "resourceVersion": "7",
        "managedFields": [
            {
                "manager": FIELD_MANAGER,
                "operation": "Apply",
                "subresource": "status",
                "time": "2026-11-30T12:00:00Z",
                "fieldsV1": {"f:status": {"f:clusters": {'k:{"clusterID":"east"}': {".": {}}}, "f:federation": {}}},
            }
        ],
    },
}
IDENTITY = [("metadata",), ("metadata", "name"), ("metadata", "namespace"), ()]


@given(st.data())
def test_whatever_an_object_holds_it_can_be_looked_at(data: st.DataObject) -> None:
    found: Any = EXAMPLE
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([each for each in places(found) if each not in IDENTITY]))
        found = replaced(found, place, data.draw(JSON))
    env = Decoder(Env).single(dump(found))
    wanted = segments([record("east", 2), record("south", pool="")])
    has_summary(env)
    for cluster, entry in entries(env).items():
        assert isinstance(cluster, str)
        assert content(content(entry)) == content(entry)
        assert told(told(entry)) == told(entry)
        assert difference(wanted, {cluster: content(entry)}) > 0
        assert difference({}, {cluster: content(entry)}) > 0
    mirrored(env, wanted)


def mirrored(odd: Env, wanted: dict[str, Segment]) -> None:
    """An env that is like this at any time."""
    good = Decoder(Env).single(dump(EXAMPLE))
    for order in ((odd, good), (good, odd), (odd, odd)):
        env = MirroredEnv(KEY, "west")
        env.want([record("east"), record("north", pool="")])
        for now, each in enumerate(order):
            list(env.observed(each, float(now), acting=True))
            env.plan(float(now), refresh_interval=60.0, env_interval=5.0, keep_until=0.0)
        list(env.written(Write(KEY, 3.0, env.life, wanted, True), odd, 3.0, acting=True))
        list(env.observed(good, 4.0, acting=True))
        list(env.observed(odd, 5.0, acting=False))
        env.left_to_others()

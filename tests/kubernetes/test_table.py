"""A table of paths over a resource's objects: pools without a status, counts written in all ways, and values that are
none, each of which costs its own pool and no other. All of it goes through the decoder, from JSON to rows."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kubernetes.json_texts import standing_at
from trio_federation import Capacity
from trio_federation.capacity import fault
from trio_federation.suggest import every_fault
from trio_federation_kubernetes.options import CrdOptions
from trio_federation_kubernetes.paths import Path
from trio_federation_kubernetes.table import TableMapper

FIELDS = {
    "env": "spec.template",
    "group": "metadata.labels['example.com/group']",
    "idle": "status.free",
    "running": "status.busy",
    "pending": "status.waiting",
    "desired": "spec.replicas",
    "ceiling": "spec.maxReplicas",
}
COUNTS = ("idle", "running", "pending", "desired")


def mapper(fields: dict[str, str] | None = None, texts: list[str] | None = None) -> TableMapper:
    table = {"group": "pools.example.com", "version": "v1", "resource": "runnerpools", "fields": fields or FIELDS}
    return TableMapper("west", msgspec.convert(table, CrdOptions), texts)


def pool(name: str = "p1", **parts: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "resourceVersion": "7", "managedFields": [{"manager": "x"}]}
    return {"apiVersion": "v1", "metadata": metadata, "spec": {"template": "browser"}, **parts}


def rows(objects: list[Any], mapper: TableMapper) -> list[Capacity]:
    """The records of all objects of a list. "@huge" stands for a number that no float can hold."""
    body = json.dumps({"metadata": {"resourceVersion": "9"}, "items": objects}).replace('"@huge"', "1e400")
    records = []
    for key, found in mapper.watched[0].decoder.page(body.encode()).objects:
        (owner,) = mapper.take(0, key, found)
        (row,) = mapper.rows(owner)
        assert row.saturated_until is None
        records.append(row.record)
    return records


def row(found: dict[str, Any], fields: dict[str, str] | None = None, texts: list[str] | None = None) -> Capacity:
    (record,) = rows([found], mapper(fields, texts))
    return record


def test_what_is_watched() -> None:
    (watched,) = mapper().watched
    assert str(watched.resource) == "runnerpools.pools.example.com"
    assert watched.resource.path("ns") == "/apis/pools.example.com/v1/namespaces/ns/runnerpools"


def test_a_whole_object() -> None:
    found = pool(
        spec={"template": "browser", "replicas": 10, "maxReplicas": 25},
        status={"free": 3, "busy": 5, "waiting": 1, "conditions": [{"type": "Ready"}]},
    )
    found["metadata"]["labels"] = {"example.com/group": "gpu", "other": "x"}
    expected = Capacity(
        "west",
        "ns",
        "browser",
        "p1",
        "gpu",
        idle=3,
        running=5,
        pending=1,
        desired=10,
        autoscaling_enabled=True,
        capacity=15,
    )
    assert row(found) == expected
    assert fault(expected) is None


def test_the_least_table_reads_names_from_the_metadata() -> None:
    assert row(pool(status={"free": 2}), {"idle": "status.free"}) == Capacity("west", "ns", "p1", "p1", idle=2)


@pytest.mark.parametrize("parts", [{}, {"status": None}, {"status": {}}, {"status": {"free": None}}])
def test_what_is_absent_is_not_ready(parts: dict[str, Any]) -> None:
    assert row(pool(**parts)) == Capacity("west", "ns", "browser", "p1")


@pytest.mark.parametrize(
    "value, count",
    [(0, 0), (10, 10), (2**31 - 1, 2**31 - 1), (10.0, 10), (1e2, 100), (-0.0, 0), ("10", 10), ("0", 0), ("007", 7)],
)
@pytest.mark.parametrize("name", COUNTS)
def test_good_counts(name: str, value: object, count: int) -> None:
    record = row(pool(x=value), {"idle": "y", name: "x"})
    assert getattr(record, name) == count
    assert type(getattr(record, name)) is int
    assert fault(record) is None


BAD = ["500m", "10%", "", " 10", "+10", "-0", "1_0", "1e2", "٣", "9" * 400, "x" * 5000, True, False, -1, -1.0, 1.5]
BAD += [1e300, 2**31, 2**63, 2**64, 10**400, "@huge", "2147483648", [], [1], {}, {"a": 1}]


@pytest.mark.parametrize("value", BAD, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("name", [*COUNTS, "ceiling"])
def test_a_bad_count_costs_its_pool_and_no_other(name: str, value: object) -> None:
    objects = [pool("p1", x=1), pool("p2", x=value), pool("p3", x="3")]
    records = rows(objects, mapper({"idle": "y", name: "x"}))
    reason = "capacity" if name == "ceiling" else name
    found = [fault(record) for record in records]
    assert [bad.reason if bad else None for bad in found] == [None, reason, None]
    assert [record.member_pool for record in records] == ["p1", "p2", "p3"]
    # little of it is kept
    assert len(repr(records[1])) < 700


@pytest.mark.parametrize("value", ["x", 5, True, [], [1]])
def test_something_else_where_an_object_should_be_is_no_zero(value: object) -> None:
    objects = [pool("p1", status=value), pool("p2", status={"free": 1})]
    first, second = rows(objects, mapper())
    bad = fault(first)
    assert bad is not None
    assert bad.reason == "idle"
    assert json.dumps(value) in bad.detail
    assert fault(second) is None


def test_digits_are_a_count_only_where_the_schema_allows_texts() -> None:
    found = pool(spec={"template": "browser", "replicas": "5", "maxReplicas": "9"}, status={"free": "1"})
    record = row(found, texts=["desired", "ceiling"])
    assert (record.desired, record.capacity) == (5, 4)
    bad = fault(record)
    assert bad is not None
    assert bad.reason == "idle"
    assert fault(row(found)) is None
    # the schema may be known only after the mapper was made
    one = mapper()
    one.texts = frozenset(["idle"])
    assert [bad.reason if (bad := fault(record)) else None for record in rows([found], one)] == ["desired"]


@pytest.mark.parametrize("value", [None, 5, True, "", "Browser", [], {"a": 1}, "a" * 254, "a" * 5000, "@huge"])
@pytest.mark.parametrize("name, reason", [("env", "env_name"), ("pool", "member_pool")])
def test_a_bad_name_costs_its_pool_and_no_other(name: str, reason: str, value: object) -> None:
    objects = [pool("p1", x="a"), pool("p2", x=value), pool("p3")]
    records = rows(objects, mapper({"idle": "y", name: "x"}))
    assert len(repr(records[1])) < 700
    found = [fault(record) for record in records]
    # p3 has none at all
    assert [bad.reason if bad else None for bad in found] == [None, reason, reason]


@pytest.mark.parametrize(
    "value, bad", [(None, False), ("", False), ("gpu", False), (5, True), (True, True), ([], True)]
)
def test_a_group_is_a_text_or_absent(value: object, bad: bool) -> None:
    record = row(pool(x=value), {"idle": "y", "group": "x"})
    assert (fault(record) is not None) == bad
    if not bad:
        assert record.scaling_group == (value or "")


@pytest.mark.parametrize(
    "spec, status, enabled, capacity",
    [
        # the ceiling alone
        ({"max": 10}, {}, True, 10),
        ({"max": 10, "want": 4}, {"free": 9, "busy": 9}, True, 6),
        ({"max": 10}, {"free": 3, "busy": 2}, True, 5),
        ({"max": 10, "want": 0}, {"free": 3, "busy": 2}, True, 10),
        ({"max": 10, "want": None}, {"free": 3}, True, 7),
        ({"max": 10, "want": 14}, {}, True, 0),
        ({"max": 0}, {}, True, 0),
        ({"max": None, "want": 4}, {}, False, 0),
        ({"want": 4}, {}, False, 0),
    ],
)
def test_headroom_is_what_is_left_to_the_ceiling(
    spec: dict[str, Any], status: dict[str, Any], enabled: bool, capacity: int
) -> None:
    fields = {"idle": "status.free", "running": "status.busy", "desired": "spec.want", "ceiling": "spec.max"}
    record = row(pool(spec=spec, status=status), fields)
    assert (record.autoscaling_enabled, record.capacity) == (enabled, capacity)
    assert fault(record) is None


@pytest.mark.parametrize(
    "spec, enabled, capacity",
    [
        ({"on": True, "max": 10}, True, 10),
        ({"on": True}, True, -1),
        ({"on": True, "max": None}, True, -1),
        ({"on": False, "max": 10}, False, 0),
        ({"on": False}, False, 0),
        ({"max": 10}, False, 0),
        ({"on": None}, False, 0),
        ({}, False, 0),
    ],
)
def test_autoscaling_can_be_said_apart_from_the_ceiling(spec: dict[str, Any], enabled: bool, capacity: int) -> None:
    record = row(pool(spec=spec), {"idle": "status.free", "autoscaling": "spec.on", "ceiling": "spec.max"})
    assert (record.autoscaling_enabled, record.capacity) == (enabled, capacity)
    assert fault(record) is None


@pytest.mark.parametrize(
    "spec", [{"max": 2**31}, {"max": 2**31, "on": False}, {"max": "500m", "on": False}, {"max": -1}]
)
def test_a_bad_ceiling_is_bad_whatever_it_is_needed_for(spec: dict[str, Any]) -> None:
    fields = {"idle": "status.free", "ceiling": "spec.max", **({"autoscaling": "spec.on"} if "on" in spec else {})}
    bad = fault(row(pool(spec=spec, status={"free": 5}), fields))
    assert bad is not None
    assert bad.reason == "capacity"


@pytest.mark.parametrize("value", ["true", "", 1, 0, 1.0, [], {}, "@huge"])
def test_a_bad_flag_costs_its_pool_and_no_other(value: object) -> None:
    objects = [pool("p1", x=True), pool("p2", x=value), pool("p3", x=False)]
    found = [fault(record) for record in rows(objects, mapper({"idle": "y", "autoscaling": "x"}))]
    assert [bad.reason if bad else None for bad in found] == [None, "autoscaling_enabled", None]


def test_a_change_from_a_good_value_to_a_bad_one_is_a_change() -> None:
    # in Python 1 == True == 1.0
    assert row(pool(x=1), {"idle": "x"}) != row(pool(x=True), {"idle": "x"})
    assert row(pool(x=0), {"idle": "x"}) != row(pool(x=False), {"idle": "x"})
    assert row(pool(x=False), {"idle": "y", "autoscaling": "x"}) != row(pool(x=0), {"idle": "y", "autoscaling": "x"})


def test_rows_go_with_their_object() -> None:
    one = mapper()
    rows([pool("p1", status={"free": 1}), pool("p2")], one)
    assert [row.record.idle for row in one.rows(("ns", "p1"))] == [1]
    assert list(one.take(0, ("ns", "p1"), None)) == [("ns", "p1")]
    assert list(one.rows(("ns", "p1"))) == []
    assert len(one.rows(("ns", "p2"))) == 1
    assert list(one.take(0, ("ns", "p1"), None)) == [("ns", "p1")]
    assert list(one.rows(("other", "p2"))) == []


def test_events_give_the_same_rows_as_lists() -> None:
    one = mapper()
    found = pool(status={"free": 4, "busy": [1]})
    event = one.watched[0].decoder.event(json.dumps({"type": "ADDED", "object": found}).encode())
    assert event.key is not None
    one.take(0, event.key, event.object)
    assert [row.record for row in one.rows(event.key)] == rows([found], mapper())


def test_only_what_is_read_is_decoded() -> None:
    one = mapper()
    found = pool(spec={"template": "browser", "secret": "x" * 100}, status={"free": 1, "conditions": [{"a": 1}]})
    page = one.watched[0].decoder.page(json.dumps({"metadata": {}, "items": [found]}).encode())
    shown = repr(page.objects)
    assert "free=1" in shown
    assert not [word for word in ("secret", "xxx", "conditions", "managedFields", "manager") if word in shown]


def test_lists_and_odd_names() -> None:
    fields = {
        "env": "spec['class']",
        "pool": "spec['_0']",
        "idle": "status.pools[0].free",
        "running": "status.pools[1]['not an identifier']",
        "pending": "status.matrix[0][1]",
        "desired": "status['é.b']['']",
        "group": "continue",
    }
    found = pool(
        spec={"class": "browser", "_0": "blue"},
        status={
            "pools": [{"free": 1}, {"not an identifier": 2, "free": "x"}, 7],
            "matrix": [[5, 6], None],
            "é.b": {"": 9},
        },
        **{"continue": "gpu"},
    )
    record = row(found, fields)
    assert (record.env_name, record.member_pool, record.scaling_group) == ("browser", "blue", "gpu")
    assert (record.idle, record.running, record.pending, record.desired) == (1, 2, 6, 9)
    found["status"] = {"pools": [], "matrix": [[5]]}
    record = row(found, fields)
    assert (record.idle, record.running, record.pending, record.desired) == (0, 0, 0, 0)


@given(st.lists(st.text(max_size=4) | st.sampled_from(["class", "_0", "name"]) | st.integers(0, 2), max_size=5))
def test_every_path_that_the_options_take_is_read(steps: list[str | int]) -> None:
    path = Path(("spec", *steps))
    table = {"group": "", "version": "v1", "resource": "pods", "fields": {"idle": str(path)}}
    if every_fault(table, CrdOptions, "source[0]"):
        assert any(set(step) & {'"', "\\"} or min(step) < " " for step in steps if isinstance(step, str) and step)
        return
    value: Any = 7
    for step in reversed(path.steps):
        value = {"beside": "x", step: value} if isinstance(step, str) else [*[None] * step, value, "x"]
    assert row(pool(**value), {"idle": str(path)}).idle == 7


values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
    | st.sampled_from(["10", "500m", "@huge", "browser"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["free", "busy", "waiting", "replicas", "maxReplicas", "template"]), inner)
    ),
    max_leaves=10,
)


def is_blocked(path: Path, document: object) -> bool:
    """Whether something on the way is neither null nor absent, and still cannot be gone into."""
    for length in range(len(path.steps)):
        before = standing_at(document, path.steps[:length])
        if before is None:
            return False
        if not isinstance(before, dict if isinstance(path.steps[length], str) else list):
            return True
    return False


@given(st.fixed_dictionaries({}, optional={"spec": values, "status": values}))
def test_whatever_an_object_holds_it_is_one_record_of_what_it_says(parts: dict[str, Any]) -> None:
    one = mapper()
    found = pool(**parts)
    first, record, last = rows([pool("p0"), found, pool("p9")], one)
    assert fault(first) is None
    assert fault(last) is None
    paths = msgspec.convert(
        {"group": "", "version": "v1", "resource": "pods", "fields": FIELDS}, CrdOptions
    ).fields.paths()
    bad = fault(record)
    for name in COUNTS:
        value = standing_at(found, paths[name].steps)
        count = getattr(record, name)
        if is_blocked(paths[name], found):
            assert bad is not None
        elif value is None:
            assert count == 0
        elif isinstance(value, str) and value.isascii() and value.isdigit():
            assert count == int(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**31 and value % 1 == 0:
            assert count == value
        else:
            assert bad is not None
    if bad is None:
        assert record.env_name == standing_at(found, paths["env"].steps)
        assert record.autoscaling_enabled == (standing_at(found, paths["ceiling"].steps) is not None)


@given(
    st.sampled_from(COUNTS),
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.data(),
)
def test_exactly_one_pool_is_lost_for_each_bad_value(name: str, counts: list[int], data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    drawn = [data.draw(st.sampled_from(BAD)) if index in bad else value for index, value in enumerate(counts)]
    objects = [pool(f"p{index}", x=value) for index, value in enumerate(drawn)]
    records = rows(objects, mapper({"idle": "y", name: "x"}))
    assert {index for index, record in enumerate(records) if fault(record) is not None} == bad
    assert [getattr(record, name) for record in records if fault(record) is None] == [
        value for index, value in enumerate(counts) if index not in bad
    ]

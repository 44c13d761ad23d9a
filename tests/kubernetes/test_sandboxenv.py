"""SandboxEnvs come to the rows that their status says, and a bad value costs exactly the pool that it stands in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kubernetes.json_texts import (
    JSON,
    NO_BOOL,
    NO_COUNT,
    NO_OBJECT,
    NO_TEXT,
    Verbatim,
    dump,
    listed,
    places,
    replaced,
)
from trio_federation import Capacity
from trio_federation.capacity import fault
from trio_federation_kubernetes.resources import Row
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS, SandboxEnvMapper


def env(status: object = None, spec: object = None, name: str = "python") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "agents"}, "spec": spec, "status": status}


def local(*members: object, **rest: object) -> dict[str, Any]:
    return {"clusters": [{"isLocal": True, "observedMembers": list(members)}], **rest}


def rows(*envs: object) -> list[Row]:
    """What a list of envs comes to in cluster "west"."""
    mapper = SandboxEnvMapper("west")
    found: list[Row] = []
    for key, value in mapper.watched[0].decoder.page(listed(*envs)).objects:
        assert list(mapper.take(0, key, value)) == [key]
        found.extend(mapper.rows(key))
    return found


def records(*envs: object) -> list[Capacity]:
    return [row.record for row in rows(*envs)]


def good(*envs: object) -> list[Row]:
    """The rows that the agent takes."""
    return [row for row in rows(*envs) if fault(row.record) is None]


def member(pool: str = "p1", group: str = "", **rest: Any) -> Capacity:
    return Capacity("west", "agents", "python", pool, group, **rest)


# --- members


def test_every_field_of_a_local_member_has_its_place() -> None:
    observed = {
        "name": "p1",
        "idleCount": 3,
        "runningCount": 4,
        "desiredReplicas": 7,
        "pendingRequests": 2,
        "scalingGroup": "gpu",
        "autoscalingEnabled": True,
        "scaleUpHeadroom": 5,
        "saturatedUntil": "2026-01-02T03:04:05Z",
        "state": "Saturated",
        "unknown": {},
    }
    expected = member(
        group="gpu",
        idle=3,
        running=4,
        desired=7,
        pending=2,
        autoscaling_enabled=True,
        capacity=5,
        state="Saturated",
    )
    assert rows(env(local(observed))) == [Row(expected, 1767323045.0)]


def test_the_resource() -> None:
    assert SANDBOXENVS.path("agents") == "/apis/agents.navix.sh/v1alpha1/namespaces/agents/sandboxenvs"
    assert SandboxEnvMapper("west").watched[0].resource == SANDBOXENVS


def test_what_is_absent_or_null_is_0_and_off() -> None:
    nulls = dict.fromkeys(
        (
            "idleCount",
            "runningCount",
            "desiredReplicas",
            "pendingRequests",
            "scalingGroup",
            "autoscalingEnabled",
            "scaleUpHeadroom",
            "saturatedUntil",
            "state",
        )
    )
    assert rows(env(local({"name": "p1"}, {"name": "p2", **nulls}))) == [Row(member()), Row(member("p2"))]


@pytest.mark.parametrize(
    "said,capacity",
    [({}, -1), ({"scaleUpHeadroom": None}, -1), ({"scaleUpHeadroom": 0}, 0), ({"scaleUpHeadroom": -1}, -1)],
)
def test_headroom_with_autoscaling(said: dict[str, object], capacity: int) -> None:
    (record,) = records(env(local({"name": "p1", "autoscalingEnabled": True, **said})))
    assert record == member(autoscaling_enabled=True, capacity=capacity)


@pytest.mark.parametrize("headroom", [None, 5, "500m"])
def test_headroom_without_autoscaling_means_nothing(headroom: object) -> None:
    assert records(env(local({"name": "p1", "scaleUpHeadroom": headroom}))) == [member()]


@pytest.mark.parametrize("state", ["Missing", "Inconsistent"])
def test_a_member_out_of_order_has_nothing_to_give(state: str) -> None:
    observed = {"name": "p1", "idleCount": 3, "runningCount": 4, "desiredReplicas": 7, "autoscalingEnabled": True}
    assert records(env(local({**observed, "scaleUpHeadroom": 5, "state": state}))) == [
        member(running=4, desired=7, state=state)
    ]


@pytest.mark.parametrize("state,passed", [("Draining", "Draining"), ("x" * 63, "x" * 63), ("x" * 64, ""), ("a\nb", "")])
def test_an_unknown_state_is_passed_on_where_it_can_be_shown(state: str, passed: str) -> None:
    (record,) = records(env(local({"name": "p1", "idleCount": 1, "state": state})))
    assert record == member(idle=1, state=passed)
    assert fault(record) is None


@pytest.mark.parametrize(
    "text,seconds",
    [
        ("1970-01-01T00:00:00Z", 0.0),
        ("1970-01-01T00:00:00.25Z", 0.25),
        ("1970-01-01T02:00:10+02:00", 10.0),
        ("1969-12-31T19:00:00.000001-05:00", 0.000001),
        ("2026-01-02t03:04:05z", 1767323045.0),
        ("2026-01-02T03:04:05.123456789Z", 1767323045.123457),
        ("0001-01-01T00:00:00Z", -62135596800.0),
        ("9999-12-31T23:59:59Z", 253402300799.0),
    ],
)
def test_until_when_a_member_is_saturated_is_a_moment(text: str, seconds: float) -> None:
    (row,) = rows(env(local({"name": "p1", "saturatedUntil": text})))
    assert row == Row(member(), seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "2026-01-02",
        "2026-01-02T03:04:05",
        "2026-01-02T03:04Z",
        "2026-02-30T03:04:05Z",
        "2026-01-02T25:04:05Z",
        "2026-01-02T03:04:05+25:00",
        " 2026-01-02T03:04:05Z",
        "10000-01-02T03:04:05Z",
        1767323045,
        0,
        True,
        1.5,
        [],
    ],
)
def test_a_bad_moment_costs_its_pool_only(text: object) -> None:
    bad, other = rows(env(local({"name": "p1", "saturatedUntil": text}, {"name": "p2"})))
    found = fault(bad.record)
    assert found is not None
    assert found.reason == "saturated_for"
    assert other == Row(member("p2"))


def test_members_of_other_clusters_are_not_ours() -> None:
    clusters = [
        {"isLocal": False, "observedMembers": [{"name": "p9", "idleCount": "x"}]},
        {"observedMembers": [{"name": "p8"}]},
        {"isLocal": None, "observedMembers": 5},
        {"isLocal": True, "observedMembers": [{"name": "p1"}]},
        {"isLocal": True, "observedMembers": None},
        {"isLocal": True, "observedMembers": [{"name": "p2"}]},
    ]
    # several that are ours are one
    assert records(env({"clusters": clusters, "idleReplicas": 9})) == [member("p1"), member("p2")]


# --- groups by the spec


def spec(*members: object, cluster: object = "west") -> dict[str, Any]:
    theirs = {"clusterID": "other", "members": [{"name": "p1", "scalingGroup": "theirs"}]}
    return {"clusters": [theirs, {"clusterID": cluster, "members": list(members)}]}


@pytest.mark.parametrize(
    "wanted,group",
    [
        ({"config": {"scalingGroup": "gpu"}}, "gpu"),
        ({"scalingGroup": "old"}, "old"),
        ({"config": {"scalingGroup": "gpu"}, "scalingGroup": "old"}, "gpu"),
        ({"config": {"scalingGroup": ""}, "scalingGroup": "old"}, "old"),
        ({"config": {}, "scalingGroup": "old"}, "old"),
        ({"config": None, "scalingGroup": "old"}, "old"),
        ({"config": {"scalingGroup": None}}, ""),
        ({}, ""),
    ],
)
@pytest.mark.parametrize("own", [{}, {"scalingGroup": None}, {"scalingGroup": ""}])
def test_a_member_without_a_group_has_that_of_the_spec(
    wanted: dict[str, object], group: str, own: dict[str, object]
) -> None:
    found = env(local({"name": "p1", **own}), spec({"name": "p0", "scalingGroup": "no"}, {"name": "p1", **wanted}))
    assert records(found) == [member(group=group)]


def test_a_member_with_a_group_keeps_it_whatever_the_spec_says() -> None:
    found = env(local({"name": "p1", "scalingGroup": "own"}), spec({"name": "p1", "scalingGroup": "spec"}))
    assert records(found) == [member(group="own")]
    assert records(env(local({"name": "p1", "scalingGroup": "own"}), 5)) == [member(group="own")]


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        {"clusters": None},
        {"clusters": []},
        spec(),
        spec({"name": "p2", "scalingGroup": "x"}),
        spec(cluster="e"),
    ],
)
def test_a_member_that_the_spec_does_not_name_is_in_no_group(given: object) -> None:
    assert records(env(local({"name": "p1"}), given)) == [member()]


@pytest.mark.parametrize(
    "given",
    [
        5,
        {"clusters": 5},
        {"clusters": [5]},
        spec(5),
        spec({"name": 5, "scalingGroup": "x"}),
        spec({"name": "p1", "scalingGroup": 5}),
        spec({"name": "p1", "config": 5}),
        spec({"name": "p1", "config": {"scalingGroup": 5}}),
        spec({"name": "p1", "scalingGroup": "x"}, cluster=5),
    ],
)
def test_a_group_that_cannot_be_read_costs_the_members_that_need_it(given: object) -> None:
    found = rows(env(local({"name": "p1"}, {"name": "p2", "scalingGroup": "own"}), given))
    assert [row.record for row in found if fault(row.record) is None] == [member("p2", "own")]
    bad = fault(found[0].record)
    assert bad is not None
    assert bad.reason == "scaling_group"


# --- sums


SUMS = {
    "scalingGroups": [
        {"name": "gpu", "totalIdle": 1, "totalRunning": 2, "totalDesired": 3, "totalPending": 4},
        {"name": "cpu"},
    ],
    "idleReplicas": 5,
    "runningReplicas": 6,
    "desiredReplicas": 7,
}
SUMMED = [
    member("", "gpu", idle=1, running=2, desired=3, pending=4),
    member("", "cpu"),
    member("", idle=5, running=6, desired=7),
]


@pytest.mark.parametrize(
    "clusters",
    [
        {},
        {"clusters": None},
        {"clusters": []},
        local(),
        {"clusters": [{"isLocal": True}]},
        {"clusters": [{"isLocal": True, "observedMembers": None}]},
        {"clusters": [{"isLocal": False, "observedMembers": [{"name": "p1", "pendingRequests": 3}]}]},
    ],
)
def test_an_env_without_observed_members_has_its_sums(clusters: dict[str, object]) -> None:
    assert records(env({**SUMS, **clusters})) == SUMMED


def test_an_env_with_observed_members_has_no_sums() -> None:
    assert records(env({**SUMS, **local({"name": "p1"})})) == [member()]


@pytest.mark.parametrize("status", [{}, {"status": None}, {"status": {}}])
def test_an_env_without_a_status_has_nothing_yet(status: dict[str, object]) -> None:
    bare = {"metadata": {"name": "python", "namespace": "agents"}}
    assert records({**bare, **status}) == [member("")]


@pytest.mark.parametrize("name", [{}, {"name": None}, {"name": ""}, {"name": 5}])
def test_a_group_without_a_name_does_not_pass_for_the_whole(name: dict[str, object]) -> None:
    groups = [{"totalIdle": 99, **name}, {"name": "cpu", "totalIdle": 1}]
    assert [row.record for row in good(env({"scalingGroups": groups, "idleReplicas": 2}))] == [
        member("", "cpu", idle=1),
        member("", idle=2),
    ]


@pytest.mark.parametrize("name", [{}, {"name": None}, {"name": ""}])
def test_a_member_without_a_name_does_not_pass_for_a_sum(name: dict[str, object]) -> None:
    found = env({**SUMS, **local({"idleCount": 99, **name}, {"name": "p1"})})
    assert [row.record for row in good(found)] == [member()]
    # and with it members have been observed
    assert good(env({**SUMS, **local({"idleCount": 99, **name})})) == []


# --- bad values


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "idleCount": NO_COUNT | st.just(-1),
    "runningCount": NO_COUNT | st.just(-1),
    "desiredReplicas": NO_COUNT | st.just(-1),
    "pendingRequests": NO_COUNT | st.just(-1),
    "scaleUpHeadroom": NO_COUNT,
    "autoscalingEnabled": NO_BOOL,
    "scalingGroup": NO_TEXT | st.sampled_from(["a::b", "a//b", "x" * 64]),
    "state": NO_TEXT,
    "name": NO_TEXT | st.sampled_from(["", "Upper", "a_b", "x" * 254]),
    "saturatedUntil": NO_TEXT | st.sampled_from(["", "2026-01-02"]),
}


@st.composite
def bad_members(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int, str, Any]:
    """Good members, which of them is to be spoilt, in which field, and by what."""
    counts = st.integers(0, 9) | st.none()
    members = [
        {
            "name": f"p{number}",
            "idleCount": draw(counts),
            "runningCount": draw(counts),
            "desiredReplicas": draw(counts),
            "pendingRequests": draw(counts),
            "autoscalingEnabled": True,
            "scaleUpHeadroom": draw(counts),
            "scalingGroup": draw(st.sampled_from(["", "gpu", None])),
            "saturatedUntil": draw(st.none() | st.just("2026-01-02T03:04:05Z")),
            "state": draw(st.sampled_from(["Active", "Saturated", "", None])),
        }
        for number in range(draw(st.integers(1, 4)))
    ]
    field = draw(st.sampled_from(sorted(FIELDS)))
    return members, draw(st.integers(0, len(members) - 1)), field, draw(FIELDS[field])


@given(bad_members())
def test_a_bad_value_costs_exactly_its_pool(drawn: tuple[list[dict[str, Any]], int, str, Any]) -> None:
    members, spoilt, field, value = drawn
    other = env(local({"name": "p1", "idleCount": 1}), name="other")
    groups = spec({"name": "p1", "scalingGroup": "spec"})
    whole = good(env(local(*members), groups), other)
    assert len(whole) == len(members) + 1
    bad = [each | {field: value} if number == spoilt else each for number, each in enumerate(members)]
    assert good(env(local(*bad), groups), other) == whole[:spoilt] + whole[spoilt + 1 :]
    # and is told of by its own field's name, where it has one in the record
    (refused,) = [found for row in rows(env(local(*bad), groups), other) if (found := fault(row.record)) is not None]
    assert (
        refused.reason
        in {
            "idleCount": {"idle"},
            "runningCount": {"running"},
            "desiredReplicas": {"desired"},
            "pendingRequests": {"pending"},
            "scaleUpHeadroom": {"capacity"},
            "autoscalingEnabled": {"autoscaling_enabled"},
            "scalingGroup": {"scaling_group"},
            "state": {"state"},
            "name": {"member_pool"},
            "saturatedUntil": {"saturated_for"},
        }[field]
    )


@given(st.sampled_from(sorted(SUMS)), st.data())
def test_a_bad_value_among_the_sums_costs_exactly_its_row(field: str, data: st.DataObject) -> None:
    if field == "scalingGroups":
        number = data.draw(st.integers(0, 1))
        inner = data.draw(st.sampled_from(["totalIdle", "totalRunning", "totalDesired", "totalPending", "name"]))
        value = data.draw(NO_TEXT | st.just("a::b") if inner == "name" else NO_COUNT | st.just(-1))
        status = replaced(SUMS, ("scalingGroups", number), {**SUMS["scalingGroups"][number], inner: value})  # type: ignore[index]
    else:
        number = 2
        status = {**SUMS, field: data.draw(NO_COUNT | st.just(-1))}
    assert [row.record for row in good(env(status))] == SUMMED[:number] + SUMMED[number + 1 :]


@given(NO_OBJECT)
def test_a_member_that_is_none_costs_only_itself(value: object) -> None:
    found = env({**SUMS, **local({"name": "p1"}, value, {"name": "p2"})})
    assert [row.record for row in good(found)] == [member("p1"), member("p2")]
    assert len(rows(found)) == 3


@given(NO_OBJECT)
def test_what_holds_everything_costs_everything_once(value: object) -> None:
    (status,) = rows(env(value))
    (clusters,) = rows(env({**SUMS, "clusters": Verbatim('{"a":1}')}))
    (members,) = rows(env({**SUMS, "clusters": [{"isLocal": True, "observedMembers": Verbatim('"x"')}]}))
    for row in (status, clusters, members):
        assert fault(row.record) is not None
    # a group's list and the whole's counts are things apart
    assert [row.record for row in good(env({**SUMS, "scalingGroups": Verbatim('{"a":1}')}))] == SUMMED[2:]


@given(NO_BOOL)
def test_a_cluster_that_may_be_ours_or_not_is_not_ours(value: object) -> None:
    clusters = [{"isLocal": value, "observedMembers": [{"name": "p9"}]}, *local({"name": "p1"})["clusters"]]
    assert [row.record for row in good(env({"clusters": clusters}))] == [member("p1")]
    assert [row.record for row in good(env({**SUMS, "clusters": clusters[:1]}))] == SUMMED


WHOLE = env(
    {
        **SUMS,
        "clusters": [
            {"isLocal": True, "observedMembers": [{"name": "p1", "idleCount": 1, "autoscalingEnabled": True}]},
            {"isLocal": False, "observedMembers": [{"name": "p2"}]},
        ],
    },
    spec({"name": "p1", "config": {"scalingGroup": "gpu"}}),
    name="odd",
)


@given(st.sampled_from(sorted(places(WHOLE), key=str)), JSON)
def test_whatever_stands_wherever_other_envs_stay_as_they_are(place: tuple[str | int, ...], value: object) -> None:
    first, last = env(local({"name": "p1"}), name="a"), env(SUMS, name="z")
    odd = replaced(WHOLE, place, value)
    found = rows(first, odd, last)
    assert found[:1] == rows(first)
    assert found[-3:] == rows(last)
    for row in found:
        fault(row.record)
        hash(row.record.identity)  # what knows records by it need not fear any
    # an event says the same as a list
    mapper = SandboxEnvMapper("west")
    event = mapper.watched[0].decoder.event(dump({"type": "MODIFIED", "object": odd}))
    if event.key is not None:
        mapper.take(0, event.key, event.object)
        assert list(mapper.rows(event.key)) == found[1:-3]
    else:
        assert found[1:-3] == []


# --- one object after the other


def test_an_env_that_is_gone_has_no_rows() -> None:
    mapper = SandboxEnvMapper("west")
    ((key, value),) = mapper.watched[0].decoder.page(listed(env(local({"name": "p1"})))).objects
    assert list(mapper.take(0, key, None)) == []
    assert list(mapper.take(0, key, value)) == [key]
    assert [row.record for row in mapper.rows(key)] == [member()]
    assert list(mapper.take(0, key, None)) == [key]
    assert list(mapper.rows(key)) == []


def test_names_that_come_twice_are_all_told() -> None:
    found = env(local({"name": "p1", "idleCount": 1}, {"name": "p2"}, {"name": "p1", "idleCount": 3}))
    assert records(found) == [member("p1", idle=1), member("p2"), member("p1", idle=3)]

"""Capacity: identity, what can grow, the names and ranges that `fault` checks, and how records add up in `rollup`."""

from __future__ import annotations

import copy
import dataclasses
import enum
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation import capacity
from trio_federation.capacity import (
    INT32_MAX,
    LABELS,
    Capacity,
    Origin,
    Withdrawal,
    fault,
    filled,
    is_group,
    is_label,
    is_subdomain,
    rollup,
    same_value,
    stamped,
)
from trio_federation.registry import Registry

GOOD = Capacity("east", "ns", "a", "p1", "gpu", idle=1, capacity=-1, autoscaling_enabled=True, observed_at=100.0)
COUNTS = ("idle", "running", "pending", "desired")
FIELDS = tuple(field.name for field in dataclasses.fields(Capacity) if field.name != "origin")


def good_but(**values: Any) -> Capacity:
    """A good record, but for some of its fields."""
    return replace(GOOD, **values)


# One record.


def test_a_member_is_known_by_four_names_and_an_aggregate_row_by_its_group_too() -> None:
    assert GOOD.identity == ("east", "ns", "a", "p1")
    assert replace(GOOD, scaling_group="cpu").identity == GOOD.identity, "a member may change its group"
    assert replace(GOOD, member_pool="").identity == ("east", "ns", "a", "", "gpu")
    assert replace(GOOD, member_pool="", scaling_group="").identity == ("east", "ns", "a", "", "")


def test_the_origin_is_no_part_of_equality() -> None:
    taken = replace(GOOD, origin=Origin("a", 1, 0.0))
    assert taken == GOOD
    assert hash(taken) == hash(GOOD)
    assert replace(GOOD, observed_at=101.0) != GOOD


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.idle = 2  # type: ignore[misc]
    assert not hasattr(GOOD, "__dict__")


@pytest.mark.parametrize(
    "idle, enabled, capacity, can_grow, schedulable",
    [
        (0, False, 0, False, False),
        (0, False, -1, False, False),
        (0, False, 5, False, False),
        (0, True, 0, False, False),
        (0, True, -1, True, True),
        (0, True, 5, True, True),
        (1, False, 0, False, True),
        (1, True, 0, False, True),
        (1, True, 1, True, True),
    ],
)
def test_what_can_grow_and_what_is_schedulable(
    idle: int, enabled: bool, capacity: int, can_grow: bool, schedulable: bool
) -> None:
    record = replace(GOOD, idle=idle, autoscaling_enabled=enabled, capacity=capacity, saturated_for=100.0)
    assert record.can_grow is can_grow
    assert record.schedulable is schedulable


# The quick way to make one.

VALUES = tuple(field.name for field in dataclasses.fields(Capacity))
RECORD = replace(GOOD, running=2, pending=3, desired=4, saturated_for=5.5, state="Active", origin=Origin("0f", 7, 1.0))


def test_one_that_is_made_quickly_is_like_any_other() -> None:
    quick = filled(*(getattr(RECORD, name) for name in VALUES))
    assert type(quick) is Capacity
    assert [getattr(quick, name) for name in VALUES] == [getattr(RECORD, name) for name in VALUES]
    assert quick == RECORD
    assert hash(quick) == hash(RECORD)
    assert repr(quick) == repr(RECORD)
    assert replace(quick, idle=9) == replace(RECORD, idle=9)
    assert copy.copy(quick) == copy.deepcopy(quick) == RECORD
    assert not hasattr(quick, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        quick.idle = 2  # type: ignore[misc]


@pytest.mark.parametrize("observed_at", [None, 3.5])
@pytest.mark.parametrize("origin", [None, Origin("0a", 1, 0.5)])
def test_a_stamp_leaves_the_rest_as_it_was(observed_at: float | None, origin: Origin | None) -> None:
    record = stamped(RECORD, observed_at, origin)
    assert record == replace(RECORD, observed_at=observed_at, origin=origin)
    assert record.origin is origin
    assert (RECORD.observed_at, RECORD.origin) == (100.0, Origin("0f", 7, 1.0)), "it is another record"


# Names and ranges.

GOOD_LABELS = ["a", "0", "a-b", "a--b", "7x", "x" * 63, "0" * 63]
SUBDOMAINS = [*GOOD_LABELS, "a.b", "a-b.c-d.0", "x" * 253, ".".join(["a"] * 127)]
NOT_SUBDOMAINS = [
    "",
    "A",
    "East",
    "a_b",
    "a b",
    " a",
    "a ",
    "a\n",
    "-a",
    "a-",
    ".a",
    "a.",
    "a..b",
    "a.-b",
    "a-.b",
    "é",
    "ａ",  # noqa: RUF001 - a full-width letter, which only looks like one
    "٣",
    "a:b",
    "a/b",
    "a\x00",
    "\ud800",
]
GROUPS = ["", "a", "GPU large", "h100:8", "a/b", "x" * 63, "größe", "池", "a-b_c.d", ":", "/", "😀", " "]
NOT_GROUPS = [
    "x" * 64,
    "a::b",
    "::",
    ":::",
    "a//b",
    "///",
    "a\nb",
    "a\tb",
    "\x00",
    "\x7f",
    "\x85",
    "a\u2028b",
    "a\u2029b",
    "\ud800",
]


@pytest.mark.parametrize("name", GOOD_LABELS)
def test_labels(name: str) -> None:
    assert is_label(name)
    assert fault(Capacity(name, name, name, name)) is None


@pytest.mark.parametrize("name", SUBDOMAINS)
def test_subdomains(name: str) -> None:
    assert is_subdomain(name)
    assert is_label(name) is ("." not in name and len(name) <= 63)
    assert fault(Capacity("east", "ns", name, name)) is None


@pytest.mark.parametrize("name", [*NOT_SUBDOMAINS, "x" * 254, ".".join(["a"] * 127) + "-b"], ids=ascii)
def test_what_is_no_name(name: str) -> None:
    assert not is_label(name)
    assert not is_subdomain(name)
    for field in ("cluster_id", "namespace", "env_name", *(("member_pool",) if name else ())):
        bad = fault(good_but(**{field: name}))
        assert bad is not None
        assert bad.reason == field


@pytest.mark.parametrize("name", ["x" * 64, "a.b"])
def test_what_is_a_subdomain_and_no_label(name: str) -> None:
    assert [is_subdomain(name), is_label(name)] == [True, False]
    for field in ("cluster_id", "namespace"):
        bad = fault(good_but(**{field: name}))
        assert bad is not None
        assert bad.reason == field


@pytest.mark.parametrize("name", GROUPS, ids=ascii)
def test_groups(name: str) -> None:
    assert is_group(name)
    assert fault(replace(GOOD, scaling_group=name)) is None


@pytest.mark.parametrize("name", NOT_GROUPS, ids=ascii)
def test_what_is_no_group(name: str) -> None:
    assert not is_group(name)
    bad = fault(replace(GOOD, scaling_group=name))
    assert bad is not None
    assert bad.reason == "scaling_group"


class Cluster(enum.StrEnum):
    """Names of a plugin's own making."""

    EAST = "east"


class Whole(enum.IntEnum):
    """Numbers of a plugin's own making."""

    ONE = 1


@pytest.mark.parametrize(
    "field, value",
    [
        *((name, value) for name in COUNTS for value in (0, 1, INT32_MAX, Whole.ONE)),
        *(("capacity", value) for value in (-1, 0, 1, INT32_MAX)),
        *(("autoscaling_enabled", value) for value in (True, False)),
        *(("saturated_for", value) for value in (0, 0.0, -0.0, 0.001, 5, 1e9, INT32_MAX)),
        *(("state", value) for value in ("", "Active", "Whatever it says", "x" * 63)),
        *(("observed_at", value) for value in (None, 0, 0.0, -5.0, 1e300, -1e300, 10**300)),
        ("cluster_id", Cluster.EAST),
        ("member_pool", ""),
    ],
)
def test_values_within_their_range(field: str, value: object) -> None:
    assert fault(good_but(**{field: value})) is None


@pytest.mark.parametrize(
    "field, value",
    [
        *((name, value) for name in COUNTS for value in (-1, INT32_MAX + 1, True, False, 1.0, "1", None, math.nan)),
        *(("capacity", value) for value in (-2, INT32_MAX + 1, True, -1.0, None, math.inf)),
        *(("autoscaling_enabled", value) for value in (0, 1, None, "true")),
        *(("saturated_for", value) for value in (-0.001, INT32_MAX + 1, math.inf, math.nan, True, None, "5")),
        *(("state", value) for value in ("x" * 64, "a\nb", "\u2028", None, 3)),
        *(("observed_at", value) for value in (math.inf, -math.inf, math.nan, True, "100")),
        *((name, 10**size) for name in (*COUNTS, "capacity", "saturated_for", "observed_at") for size in (400, 5000)),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isprintable() else type(value).__name__,
)
def test_values_out_of_their_range(field: str, value: object) -> None:
    bad = fault(good_but(**{field: value}))
    assert bad is not None
    assert bad.reason == field
    assert bad.detail.startswith(field)
    assert bad.detail.isprintable(), "one line"
    assert len(bad.detail) < 200


class Unhashable(str):
    """Equal to a name, and yet of no use as a key."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]


class Mute:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError


garbage: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.just(-(10**5000)),
    st.floats(),
    st.text(st.characters(), max_size=5),
    st.text("a.-:/ \n\u2028", max_size=4),
    st.binary(max_size=3),
    st.complex_numbers(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=1), st.none(), max_size=1),
    st.builds(object),
    st.builds(Mute),
    st.sampled_from((Unhashable("a"), Cluster.EAST, Whole.ONE, GOOD, int, "x" * 100_000, b"a", bytearray(b"a"))),
)


@given(st.dictionaries(st.sampled_from(FIELDS), garbage, min_size=1, max_size=3))
def test_whatever_a_field_holds_is_named_and_never_raised(values: dict[str, Any]) -> None:
    record = good_but(**values)
    bad = fault(record)
    if bad is not None:
        assert bad.reason in values
        assert len(bad.detail) < 250
    else:
        # What passes can be kept, sorted and sent: it can be told apart, and its numbers are numbers.
        assert record.identity in {record.identity}
        assert all(0 <= getattr(record, name) <= INT32_MAX for name in COUNTS)


usual = st.fixed_dictionaries(
    {},
    optional={
        "cluster_id": st.sampled_from((*GOOD_LABELS, "", "East")),
        "env_name": st.sampled_from((*SUBDOMAINS, "a.", "")),
        "member_pool": st.sampled_from((*SUBDOMAINS, "", ".a")),
        "scaling_group": st.sampled_from((*GROUPS, *NOT_GROUPS)),
        "state": st.sampled_from(("", "Active", "a\nb", "x" * 64)),
        **{name: st.sampled_from((-1, 0, 1, INT32_MAX, INT32_MAX + 1, True)) for name in COUNTS},
        "capacity": st.sampled_from((-2, -1, 0, INT32_MAX, INT32_MAX + 1)),
        "saturated_for": st.sampled_from((0.0, -0.0, 1.5, -0.5, 0, 7, math.nan, math.inf, INT32_MAX, INT32_MAX + 0.5)),
        "observed_at": st.sampled_from((None, 0.0, 5, -5.0, math.nan, -math.inf)),
        "origin": st.sampled_from((None, Origin("0f", 7, 1.0), ("0f", 7, 1.0))),
    },
)


@given(usual | st.dictionaries(st.sampled_from(VALUES), garbage, max_size=3), st.booleans())
def test_what_is_seen_quickly_is_what_the_whole_check_finds(values: dict[str, Any], known: bool) -> None:
    """Whether its names are known already or not."""
    record = good_but(**values)
    found = capacity._name_fault(record) or capacity._value_fault(record)
    if not known:
        for names in (capacity.LABELS, capacity.SUBDOMAINS, capacity.GROUPS, capacity.STATES):
            names.clear()
    quick = capacity._is_plainly_good(record)
    assert not (quick and found), "what is bad is never good"
    bad = fault(record)
    assert (bad and bad.reason) == (found and found.reason)
    # The quick check is worth nothing where it does not see what nearly all records are.
    plain = all(type(getattr(record, name)) is type(getattr(RECORD, name)) for name in VALUES if name != "origin")
    assert quick == (found is None) or not plain


def test_names_are_kept_once_as_long_as_they_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_NAMES_KEPT", 3)
    LABELS.clear()
    first = "".join(["ea", "st"])
    assert LABELS[first] is first
    assert LABELS["".join(["eas", "t"])] is first
    for name in ("West", "x" * 64, "", "a.b"):
        assert LABELS[name] is None
        assert not is_label(name)
    assert list(LABELS) == ["east"], "what is no name is not kept"
    for number in range(20):
        assert is_label(f"c{number}")
        assert len(LABELS) <= 3
    assert is_label("east")
    assert is_label(Cluster.EAST)
    assert all(type(name) is str for name in LABELS), "and nothing that only looks like one"


@pytest.mark.parametrize("one", [0.0, 3.0])
@pytest.mark.parametrize("other", [0.0, 3.0, 3.5, 9.0])
def test_a_rest_of_saturation_is_measured_by_its_end(one: float, other: float) -> None:
    records = [good_but(saturated_for=one), good_but(saturated_for=other)]
    same = one == other or (one > 0 and other > 0 and abs(one - other) < 1.0)
    assert same_value(*records) is same_value(*reversed(records)) is same
    later = good_but(saturated_for=one, observed_at=100.0 + other)
    assert same_value(records[0], later) is (one == 0 or other < 1.0)


@pytest.mark.parametrize("field", ["cluster_id", "namespace", "env_name", "member_pool", "scaling_group"])
def test_a_name_that_has_no_hash_is_refused(field: str) -> None:
    bad = fault(good_but(**{field: Unhashable("a")}))
    assert bad is not None
    assert bad.reason == field


def test_the_first_of_several_faults_is_named() -> None:
    bad = fault(Capacity("East", "", "a", idle=-1))
    assert bad is not None
    assert bad.reason == "cluster_id"
    assert "'East'" in bad.detail


# Sums.

envs = st.sampled_from((("east", "ns", "a"), ("east", "ns", "b"), ("north", "ns", "a")))
amounts = st.one_of(st.integers(0, 5), st.just(INT32_MAX))


def rows(pools: Iterable[str], groups: Iterable[str] = ("", "cpu", "gpu")) -> st.SearchStrategy[list[Capacity]]:
    """Records of a few envs, no identity twice."""
    one = st.builds(
        lambda env, *names, **values: Capacity(*env, *names, **values),
        envs,
        st.sampled_from(tuple(pools)),
        st.sampled_from(tuple(groups)),
        idle=amounts,
        running=amounts,
        pending=amounts,
        desired=amounts,
        autoscaling_enabled=st.booleans(),
        capacity=st.integers(-1, 3),
        saturated_for=st.sampled_from((0.0, 1.5, 20.0)),
        state=st.sampled_from(("", "Active")),
        observed_at=st.sampled_from((None, 90.0, 100.0)),
    )
    return st.lists(one, max_size=10, unique_by=lambda record: record.identity)


anything = rows(("", "p1", "p2", "p3"))


def test_rollup_of_members() -> None:
    members = [
        Capacity("east", "ns", "a", "p1", "gpu", idle=1, running=2, pending=3, desired=4, observed_at=100.0),
        Capacity(
            "east",
            "ns",
            "a",
            "p2",
            "gpu",
            idle=10,
            autoscaling_enabled=True,
            capacity=5,
            saturated_for=9.0,
            observed_at=90.0,
        ),
        Capacity(
            "east",
            "ns",
            "a",
            "p3",
            "",
            idle=100,
            autoscaling_enabled=True,
            capacity=2,
            saturated_for=3.0,
            observed_at=80.0,
        ),
        Capacity("east", "ns", "a", "p4", "cpu", capacity=-1, saturated_for=1.0),
    ]
    cpu = Capacity("east", "ns", "a", "", "cpu")
    gpu = Capacity(
        "east", "ns", "a", "", "gpu", idle=11, running=2, pending=3, desired=4,
        autoscaling_enabled=True, capacity=5, saturated_for=9.0, observed_at=90.0,
    )  # fmt: skip
    whole = replace(gpu, scaling_group="", idle=111, capacity=7, saturated_for=3.0, observed_at=80.0)
    assert rollup(members) == [whole, cpu, gpu]


def test_a_row_without_a_ceiling_makes_the_sum_one_without_a_ceiling() -> None:
    unlimited = Capacity("east", "ns", "a", "p1", autoscaling_enabled=True, capacity=-1)
    limited = Capacity("east", "ns", "a", "p2", autoscaling_enabled=True, capacity=5)
    for records in ([unlimited, limited], [limited, unlimited]):
        assert [row.capacity for row in rollup(records)] == [-1]
    assert [row.capacity for row in rollup([replace(unlimited, autoscaling_enabled=False), limited])] == [5]


def test_sums_may_pass_the_range_of_one_record() -> None:
    full = [Capacity("east", "ns", "a", f"p{number}", idle=INT32_MAX) for number in range(3)]
    assert [row.idle for row in rollup(full)] == [3 * INT32_MAX]


def test_of_aggregate_rows_the_whole_env_is_its_own_row_and_else_the_sum_of_the_groups() -> None:
    gpu, cpu = (Capacity("east", "ns", "a", "", group, idle=5) for group in ("gpu", "cpu"))
    whole = Capacity("east", "ns", "a", idle=100)
    assert rollup([gpu, cpu, whole]) == [whole, cpu, gpu]
    assert rollup([gpu, cpu]) == [replace(whole, idle=10), cpu, gpu]
    assert rollup([whole]) == [whole]


def test_members_shadow_aggregate_rows_of_their_own_cluster_and_env_only() -> None:
    member = Capacity("east", "ns", "a", "p1", idle=1)
    shadowed = [Capacity("east", "ns", "a", "", group, idle=50) for group in ("", "gpu")]
    others = [Capacity("east", "ns", "b", idle=2), Capacity("north", "ns", "a", idle=3)]
    assert rollup([*shadowed, member, *others]) == [replace(member, member_pool=""), *others]


def test_rollup_of_nothing() -> None:
    assert rollup([]) == []


@given(anything)
def test_rollup_follows_the_rules(records: list[Capacity]) -> None:
    result = rollup(records)
    assert result == sorted(result, key=lambda row: row.sort_key)
    found: dict[tuple[str, str, str], list[Capacity]] = {}
    for record in records:
        found.setdefault((record.cluster_id, record.namespace, record.env_name), []).append(record)
    assert len(result) == sum(
        1 + len({part.scaling_group for part in shown(of) if part.scaling_group}) for of in found.values()
    )
    for row in result:
        parts = shown(found[row.cluster_id, row.namespace, row.env_name])
        if row.scaling_group:
            parts = [part for part in parts if part.scaling_group == row.scaling_group]
        elif not parts[0].member_pool:
            parts = [part for part in parts if not part.scaling_group] or parts
        enabled = [part for part in parts if part.autoscaling_enabled]
        assert row.member_pool == ""
        for name in COUNTS:
            assert getattr(row, name) == sum(getattr(part, name) for part in parts)
        assert row.autoscaling_enabled is (len(enabled) > 0)
        if -1 in [part.capacity for part in enabled]:
            assert row.capacity == -1
        else:
            assert row.capacity == sum(part.capacity for part in enabled)
        assert row.saturated_for == min([part.saturated_for for part in enabled], default=0.0)
        stamps = [part.observed_at for part in parts if part.observed_at is not None]
        assert row.observed_at == min(stamps, default=None)
        assert row.can_grow is any(part.can_grow for part in parts)


def shown(of_one_env: list[Capacity]) -> list[Capacity]:
    """Its members, or, without one, its aggregate rows."""
    return [record for record in of_one_env if record.member_pool] or of_one_env


@given(anything)
def test_rollup_of_a_rollup_is_the_same(records: list[Capacity]) -> None:
    assert rollup(rollup(records)) == rollup(records)


@given(anything, st.randoms(use_true_random=False))
def test_rollup_does_not_depend_on_the_order(records: list[Capacity], order: Any) -> None:
    shuffled = list(records)
    order.shuffle(shuffled)
    assert rollup(shuffled) == rollup(records)


@given(anything)
def test_a_registry_answers_for_its_own_cluster_what_the_rollup_says(records: list[Capacity]) -> None:
    registry = Registry("east", clock=lambda: 100.0)
    registry.upsert(records)
    summed = {row.identity: row for row in rollup(registry.snapshot())}
    for namespace, env in (("ns", "a"), ("ns", "b")):
        for group in ("", "cpu", "gpu"):
            row = summed.get(("east", namespace, env, "", group))
            assert registry.local_idle(namespace, env, group) == (row.idle if row else 0)
            assert registry.local_can_grow(namespace, env, group) is (row.can_grow if row else False)


def test_a_withdrawal_can_do_without_an_origin() -> None:
    assert Withdrawal(GOOD.identity) == (GOOD.identity, None)

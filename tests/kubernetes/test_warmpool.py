"""SandboxWarmPools come to one row each, with the claims on them counted; the counts are those of a recount, whatever
comes first, and cost the same however many claims there are."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kubernetes.json_texts import JSON, NO_COUNT, NO_OBJECT, NO_TEXT, listed, places, replaced
from trio_federation import Capacity
from trio_federation.capacity import fault
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.warmpool import SANDBOXCLAIMS, SANDBOXWARMPOOLS, WarmPoolMapper

POOLS, CLAIMS = 0, 1


def pool(status: object = None, spec: object = None, name: str = "warm", namespace: str = "agents") -> dict[str, Any]:
    if spec is None:
        spec = {"replicas": 0, "sandboxTemplateRef": {"name": "python"}}
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec, "status": status}


def claim(
    of: object = "warm", sandbox: object = None, name: str = "c1", namespace: str = "agents", **status: object
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"warmPoolRef": {"name": of}},
        "status": {"sandbox": {"name": sandbox}, **status},
    }


def condition(kind: str, status: str, reason: str = "Any") -> dict[str, object]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    }


def take(mapper: WarmPoolMapper, index: int, *objects: object) -> list[Key]:
    """Hands over objects as a list has them; the owners that may have changed."""
    changed: list[Key] = []
    for key, value in mapper.watched[index].decoder.page(listed(*objects)).objects:
        changed.extend(mapper.take(index, key, value))
    return changed


def record(name: str = "warm", namespace: str = "agents", **rest: Any) -> Capacity:
    return Capacity("west", namespace, "python", name, **rest)


def only(mapper: WarmPoolMapper, key: Key = ("agents", "warm")) -> Capacity:
    ((found, until),) = mapper.rows(key)
    assert until is None
    return found


# --- pools


def test_the_resources() -> None:
    assert str(SANDBOXWARMPOOLS) == "sandboxwarmpools.extensions.agents.x-k8s.io"
    assert SANDBOXCLAIMS.path("a") == "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/a/sandboxclaims"
    assert [each.resource for each in WarmPoolMapper("west").watched] == [SANDBOXWARMPOOLS, SANDBOXCLAIMS]


def test_a_pool_belongs_to_the_env_of_its_template() -> None:
    mapper = WarmPoolMapper("west")
    spec = {"replicas": 10, "sandboxTemplateRef": {"name": "python"}, "updateStrategy": {"type": "Recreate"}}
    assert take(mapper, POOLS, pool({"readyReplicas": 7, "replicas": 9, "selector": "x"}, spec)) == [("agents", "warm")]
    assert only(mapper) == record(idle=7, desired=10)


@pytest.mark.parametrize("status", [None, {}, {"readyReplicas": None}])
def test_a_pool_without_a_status_has_nothing_yet(status: object) -> None:
    mapper = WarmPoolMapper("west")
    take(mapper, POOLS, pool(status, {"replicas": 5, "sandboxTemplateRef": {"name": "python"}}))
    assert only(mapper) == record(desired=5)


@pytest.mark.parametrize("replicas", [{}, {"replicas": None}])
def test_a_pool_that_does_not_say_how_many_wants_one_as_the_schema_has_it(replicas: dict[str, object]) -> None:
    mapper = WarmPoolMapper("west")
    take(mapper, POOLS, pool(None, {"sandboxTemplateRef": {"name": "python"}, **replicas}))
    assert only(mapper) == record(desired=1)


@pytest.mark.parametrize("spec", [{}, {"sandboxTemplateRef": None}, {"sandboxTemplateRef": {}}])
def test_a_pool_without_a_template_is_refused(spec: object) -> None:
    mapper = WarmPoolMapper("west")
    take(mapper, POOLS, pool(None, spec))
    found = fault(only(mapper))
    assert found is not None
    assert found.reason == "env_name"


@given(NO_COUNT | st.just(-1), NO_COUNT | st.just(-1), NO_TEXT | st.sampled_from(["", "Upper"]))
def test_a_bad_value_costs_exactly_its_pool(idle: object, desired: object, template: object) -> None:
    bad = {
        "a": ({"readyReplicas": idle}, None),
        "b": (None, {"replicas": desired, "sandboxTemplateRef": {"name": "python"}}),
        "c": (None, {"sandboxTemplateRef": {"name": template}}),
        "d": ("x", None),
        "e": (None, 5),
        "f": (None, {"sandboxTemplateRef": "python"}),
    }
    mapper = WarmPoolMapper("west")
    pools = [pool(status, spec, name) for name, (status, spec) in bad.items()]
    take(mapper, POOLS, *pools, pool({"readyReplicas": 3}))
    for name in bad:
        assert fault(only(mapper, ("agents", name))) is not None
    assert only(mapper) == record(idle=3)


def test_a_pool_that_is_gone_has_no_row_and_comes_back_with_its_claims() -> None:
    mapper = WarmPoolMapper("west")
    assert list(mapper.take(POOLS, ("agents", "warm"), None)) == []
    take(mapper, POOLS, pool())
    assert take(mapper, CLAIMS, claim(sandbox="s1")) == [("agents", "warm")]
    assert take(mapper, CLAIMS, claim(sandbox="s2"), claim("cold", name="c2")) == []
    assert list(mapper.take(POOLS, ("agents", "warm"), None)) == [("agents", "warm")]
    assert list(mapper.rows(("agents", "warm"))) == []
    take(mapper, POOLS, pool())
    assert only(mapper) == record(running=1)


def test_without_claims_nothing_runs_or_waits() -> None:
    mapper = WarmPoolMapper("west", claims=False)
    assert [each.resource for each in mapper.watched] == [SANDBOXWARMPOOLS]
    take(mapper, POOLS, pool({"readyReplicas": 3}))
    assert only(mapper) == record(idle=3)


# --- which claims count, and for what


def counts(*claims: object) -> tuple[int, int]:
    """(running, pending) of the pool "warm" with these claims."""
    mapper = WarmPoolMapper("west")
    take(mapper, POOLS, pool())
    take(mapper, CLAIMS, *claims)
    found = only(mapper)
    return found.running, found.pending


def test_a_claim_runs_when_it_has_a_sandbox_and_waits_when_not() -> None:
    assert counts(claim(sandbox="s1")) == (1, 0)
    assert counts(claim()) == (0, 1)
    assert counts(claim(sandbox="")) == (0, 1)
    statuses: list[object] = [None, {}, {"sandbox": None}, {"sandbox": {}}]
    for status in statuses:
        assert counts({**claim(), "status": status}) == (0, 1)
    assert counts(claim(name="c1"), claim(name="c2"), claim(sandbox="s", name="c3")) == (1, 2)


def test_a_claim_counts_for_the_pool_of_its_own_namespace_only() -> None:
    assert counts(claim(namespace="other"), claim(sandbox="s1", namespace="other", name="c2"), claim("cold")) == (0, 0)


READY, NOT_READY = condition("Ready", "True"), condition("Ready", "False", "SandboxNotReady")


@pytest.mark.parametrize(
    "conditions,bound,waiting",
    [
        ([], True, True),
        ([READY], True, True),
        ([NOT_READY], True, True),
        ([condition("Ready", "Unknown", "ClaimExpired")], True, True),
        ([condition("Ready", "False", "ReconcilerError")], True, True),
        ([condition("Ready", "False", "WarmPoolNotFound")], True, True),
        ([condition("Ready", "False", "TemplateNotFound")], True, True),
        ([condition("Ready", "False", "SandboxMissing")], True, True),
        ([condition("Ready", "False", "AdoptionPending")], True, True),
        # over
        ([condition("Ready", "False", "ClaimExpired")], False, False),
        ([condition("Ready", "False", "SandboxExpired")], False, False),
        ([NOT_READY, condition("Finished", "True", "PodSucceeded")], False, False),
        ([condition("Finished", "True", "PodFailed"), READY], False, False),
        ([condition("Finished", "False", "PodRunning"), READY], True, True),
        # never to be served; but what it had before, it has
        ([condition("Ready", "False", "InvalidMetadata")], True, False),
        ([condition("Ready", "False", "EnvVarsInjectionRejected")], True, False),
        ([condition("Ready", "False", "VolumeClaimTemplatesError")], True, False),
        # other people's conditions
        ([condition("example.com/Finished", "True"), condition("Other", "False", "ClaimExpired")], True, True),
    ],
)
def test_a_claim_counts_until_it_has_ended(conditions: list[object], bound: bool, waiting: bool) -> None:
    assert counts(claim(sandbox="s1", conditions=conditions)) == (int(bound), 0)
    assert counts(claim(conditions=conditions)) == (0, int(waiting))


@pytest.mark.parametrize("sandbox", [None, "s1"])
def test_a_claim_that_is_being_deleted_counts_no_more(sandbox: object) -> None:
    found = claim(sandbox=sandbox)
    found["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    assert counts(found) == (0, 0)
    found["metadata"]["deletionTimestamp"] = None
    assert sum(counts(found)) == 1


@given(NO_OBJECT, NO_TEXT)
def test_a_claim_that_cannot_be_read_counts_nowhere_and_costs_nothing(no_object: object, no_text: object) -> None:
    odd = [
        claim(no_text, name="a"),
        claim(sandbox=no_text, name="b"),
        {**claim(name="c"), "spec": no_object},
        {**claim(name="d"), "spec": {"warmPoolRef": no_object}},
        {**claim(name="e"), "status": no_object},
        {**claim(name="f"), "status": {"sandbox": no_object}},
    ]
    # conditions that cannot be read end nothing
    waiting = [claim(conditions=[no_object, READY], name="g"), claim(conditions=no_text, name="h")]
    assert counts(*odd, *waiting, claim(sandbox="s1", name="i")) == (1, 2)


WHOLE_POOL = pool({"readyReplicas": 1}, {"replicas": 2, "sandboxTemplateRef": {"name": "python"}}, name="odd")
WHOLE_CLAIM = claim("odd", "s1", conditions=[READY], name="odd")


@given(
    st.sampled_from(sorted(places(WHOLE_POOL), key=str)), st.sampled_from(sorted(places(WHOLE_CLAIM), key=str)), JSON
)
def test_whatever_stands_wherever_other_pools_stay_as_they_are(
    in_pool: tuple[str | int, ...], in_claim: tuple[str | int, ...], value: object
) -> None:
    mapper = WarmPoolMapper("west")
    take(mapper, POOLS, pool(), replaced(WHOLE_POOL, in_pool, value))
    take(mapper, CLAIMS, claim(sandbox="s1"), replaced(WHOLE_CLAIM, in_claim, value))
    assert only(mapper) == record(running=1)
    for row in mapper.rows(("agents", "odd")):
        fault(row.record)
        hash(row.record.identity)


# --- one change after the other

NAMESPACES = st.sampled_from(["agents", "other"])
NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pool"), NAMESPACES, NAMES, st.booleans()),
        st.tuples(
            st.just("claim"),
            NAMESPACES,
            st.sampled_from(["c1", "c2", "c3", "c4", "c5"]),
            st.none() | st.tuples(NAMES, st.sampled_from(["", "s1"]), st.booleans()),
        ),
    ),
    max_size=30,
)


@given(STEPS)
def test_the_counts_are_those_of_a_recount(steps: list[tuple[str, str, str, Any]]) -> None:
    mapper = WarmPoolMapper("west")
    pools: set[Key] = set()
    claims: dict[Key, tuple[str, str, bool]] = {}

    def count(pool_key: Key, bound: bool) -> int:
        return sum(
            (namespace, of) == pool_key and (sandbox != "") == bound and not over
            for (namespace, _), (of, sandbox, over) in claims.items()
        )

    def recount() -> dict[Key, Capacity]:
        return {key: record(key[1], key[0], running=count(key, True), pending=count(key, False)) for key in pools}

    for kind, namespace, name, what in steps:
        key = (namespace, name)
        before = recount()
        if kind == "pool":
            (pools.add if what else pools.discard)(key)
            there = pool(name=name, namespace=namespace)
            changed = take(mapper, POOLS, there) if what else list(mapper.take(POOLS, key, None))
        elif what is None:
            claims.pop(key, None)
            changed = list(mapper.take(CLAIMS, key, None))
        else:
            of, sandbox, over = claims[key] = what
            conditions = [condition("Finished", "True")] if over else []
            changed = take(mapper, CLAIMS, claim(of, sandbox, name, namespace, conditions=conditions))
        after = recount()
        assert {owner for owner in before | after if before.get(owner) != after.get(owner)} <= set(changed)
        for owner in itertools.product(("agents", "other"), ("a", "b", "c")):
            assert [row.record for row in mapper.rows(owner)] == ([after[owner]] if owner in after else [])
    # what ends leaves nothing behind
    for key in claims:
        mapper.take(CLAIMS, key, None)
    for key in pools:
        mapper.take(POOLS, key, None)
    kept = [value for value in vars(mapper).values() if isinstance(value, dict)]
    assert len(kept) == 3
    assert not any(kept)


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python it takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_claims_change_costs_the_same_however_many_there_are() -> None:
    def cost(claims: int) -> int:
        mapper = WarmPoolMapper("west")
        take(mapper, POOLS, pool())
        take(mapper, CLAIMS, *(claim(name=f"c{number}") for number in range(claims)))
        ((key, bound),) = mapper.watched[CLAIMS].decoder.page(listed(claim(sandbox="s1", name="c1"))).objects

        def change() -> None:
            assert list(mapper.take(CLAIMS, key, bound)) == [("agents", "warm")]
            assert only(mapper) == record(running=1, pending=claims - 1)

        return lines_run(change)

    assert cost(10) == cost(2000)

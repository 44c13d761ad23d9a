"""SandboxSets come to one row each, with what their status tells and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kubernetes.json_texts import JSON, NO_COUNT, NO_TEXT, listed, places, replaced
from trio_federation import Capacity
from trio_federation.capacity import fault
from trio_federation_kubernetes.resources import Row
from trio_federation_kubernetes.sandboxset import SANDBOXSETS, SandboxSetMapper


def sandboxset(status: object = None, spec: object = None, name: str = "warm") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "agents"}, "spec": spec, "status": status}


def records(*sets: object) -> list[Capacity]:
    mapper = SandboxSetMapper("west")
    found: list[Row] = []
    for key, value in mapper.watched[0].decoder.page(listed(*sets)).objects:
        assert list(mapper.take(0, key, value)) == [key]
        found.extend(mapper.rows(key))
    assert all(row.saturated_until is None for row in found)
    return [row.record for row in found]


def record(env: str = "warm", name: str = "warm", **rest: Any) -> Capacity:
    return Capacity("west", "agents", env, name, **rest)


def test_the_resource() -> None:
    assert SANDBOXSETS.path() == "/apis/agents.kruise.io/v1alpha1/sandboxsets"
    assert [each.resource for each in SandboxSetMapper("west").watched] == [SANDBOXSETS]


def test_a_set_is_a_pool_of_its_templates_env() -> None:
    spec = {"replicas": 10, "templateRef": {"name": "python", "kind": "SandboxTemplate"}}
    # replicas of the status counts more than what is idle, and does not tell what
    status = {"replicas": 14, "availableReplicas": 7, "updatedReplicas": 3, "observedGeneration": 2}
    assert records(sandboxset(status, spec)) == [record("python", idle=7, desired=10)]


@pytest.mark.parametrize("spec", [{"template": {"spec": {}}}, {"templateRef": None}, {"templateRef": {}}, {}, None])
def test_a_set_without_a_template_to_name_is_an_env_by_itself(spec: object) -> None:
    assert records(sandboxset({"availableReplicas": 1}, spec)) == [record(idle=1)]


@pytest.mark.parametrize("status", [None, {}, {"availableReplicas": None}, {"replicas": 5}])
def test_a_set_without_a_status_has_nothing_yet(status: object) -> None:
    assert records(sandboxset(status, {"replicas": 5})) == [record(desired=5)]


@given(NO_COUNT | st.just(-1), NO_COUNT | st.just(-1), NO_TEXT | st.just("Upper"))
def test_a_bad_value_costs_exactly_its_pool(idle: object, desired: object, template: object) -> None:
    bad = [
        sandboxset({"availableReplicas": idle}),
        sandboxset(None, {"replicas": desired}),
        sandboxset(None, {"templateRef": {"name": template}}),
        sandboxset("x"),
        sandboxset(None, 5),
        sandboxset(None, {"templateRef": "python"}),
    ]
    found = records(*bad, sandboxset({"availableReplicas": 3}))
    assert [each for each in found if fault(each) is None] == [record(idle=3)]
    assert len(found) == len(bad) + 1


WHOLE = sandboxset({"availableReplicas": 1}, {"replicas": 2, "templateRef": {"name": "python"}}, "odd")


@given(st.sampled_from(sorted(places(WHOLE), key=str)), JSON)
def test_whatever_stands_wherever_other_sets_stay_as_they_are(place: tuple[str | int, ...], value: object) -> None:
    found = records(sandboxset(name="a"), replaced(WHOLE, place, value), sandboxset(name="z"))
    assert (found[0], found[-1]) == (record("a", "a"), record("z", "z"))
    for each in found:
        fault(each)
        hash(each.identity)


def test_a_set_that_is_gone_has_no_row() -> None:
    mapper = SandboxSetMapper("west")
    ((key, value),) = mapper.watched[0].decoder.page(listed(sandboxset())).objects
    assert list(mapper.take(0, key, None)) == []
    mapper.take(0, key, value)
    assert list(mapper.take(0, key, None)) == [key]
    assert list(mapper.rows(key)) == []

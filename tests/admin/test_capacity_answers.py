"""`/v1/capacity`: every record that the registry has, as JSON, in pieces; and nothing that was not asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from structlog.typing import EventDict

from tests.admin.conftest import ServeAdmin
from tests.admin.helpers import Placements, answers, ask, post
from trio_federation.admin import admin_app
from trio_federation.admin.api import _SLICE, capacity_pieces
from trio_federation.capacity import INT32_MAX, Capacity, Origin
from trio_federation.registry import Registry

NAMES = st.sampled_from(["a", "b", "a-b", "c1"])
COUNTS = st.integers(0, INT32_MAX)
RECORDS = st.builds(
    Capacity,
    cluster_id=NAMES,
    namespace=NAMES,
    env_name=st.sampled_from(["a", "b.c", "d" * 253]),
    member_pool=st.sampled_from(["", "p1", "p.2"]),
    scaling_group=st.sampled_from(["", "cpu", 'größe "大"\\', "</script>"]),
    idle=COUNTS,
    running=COUNTS,
    pending=COUNTS,
    desired=COUNTS,
    autoscaling_enabled=st.booleans(),
    capacity=st.integers(-1, INT32_MAX),
    saturated_for=st.floats(0, 1e9),
    state=st.sampled_from(["", "Active", "Größe “x”"]),
    observed_at=st.none() | st.floats(70, 100),
    origin=st.none() | st.builds(Origin, st.just("ab" * 16), st.integers(0, 2**64 - 1), st.floats(0, 100)),
)


def make_registry(records: Sequence[Capacity] = (), *, now: float = 100.0) -> Registry:
    registry = Registry("a", ttl=30.0, clock=lambda: now)
    assert registry.upsert(records) == []
    return registry


def as_told(record: Capacity, now: float) -> dict[str, Any]:
    """What is promised for one record, written down once more."""
    assert record.observed_at is not None
    origin = record.origin
    return {
        "cluster_id": record.cluster_id,
        "namespace": record.namespace,
        "env_name": record.env_name,
        "member_pool": record.member_pool,
        "scaling_group": record.scaling_group,
        "idle": record.idle,
        "running": record.running,
        "pending": record.pending,
        "desired": record.desired,
        "autoscaling_enabled": record.autoscaling_enabled,
        "capacity": record.capacity,
        "saturated_for": record.saturated_for,
        "state": record.state,
        "observed_at": record.observed_at,
        "origin": {"instance": origin.instance, "seq": origin.seq} if origin is not None else None,
        "age": round(now - record.observed_at, 3),
    }


def test_every_field_is_told() -> None:
    told = as_told(Capacity("a", "b", "c", observed_at=1.0), 1.0)
    assert told.keys() == {field.name for field in dataclasses.fields(Capacity)} | {"age"}


@given(st.lists(RECORDS, max_size=12), st.none() | NAMES, st.none() | st.sampled_from(["a", "b.c", "x"]))
def test_what_is_told_is_what_the_registry_has(records: list[Capacity], namespace: str | None, env: str | None) -> None:
    registry = make_registry(records)
    app = admin_app(answers(registry=registry), host="127.0.0.1")
    env = env if namespace is not None else None
    query = f"namespace={namespace}" if namespace is not None else ""
    query += f"&env={env}" if env is not None else ""
    answer = trio.run(lambda: ask(app, "/v1/capacity", query=query.encode()))
    assert answer.status == 200
    expected = [
        as_told(record, 100.0)
        for record in sorted(registry.snapshot(), key=lambda each: (each.namespace, each.env_name, each.sort_key))
        if namespace in (None, record.namespace) and env in (None, record.env_name)
    ]
    assert answer.json == {"cluster_id": "a", "ttl": 30.0, "records": expected}


async def test_an_empty_registry_is_an_empty_list() -> None:
    app = admin_app(answers(registry=make_registry()), host="127.0.0.1")
    assert (await ask(app, "/v1/capacity")).json == {"cluster_id": "a", "ttl": 30.0, "records": []}


async def test_a_record_that_has_run_out_is_not_told() -> None:
    now = 0.0
    registry = Registry("a", ttl=30.0, clock=lambda: now)
    registry.upsert([Capacity("b", "ns", "env", "p1")])
    app = admin_app(answers(registry=registry), host="127.0.0.1")
    now = 30.0
    assert [record["age"] for record in (await ask(app, "/v1/capacity")).json["records"]] == [30.0]
    now = 30.1
    assert (await ask(app, "/v1/capacity")).json["records"] == []


@pytest.mark.parametrize("envs, pools", [(1, 3000), (3000, 1), (30, 100)])
@pytest.mark.parametrize("namespace", [None, "ns-0", "ns"])
async def test_no_piece_is_long(envs: int, pools: int, namespace: str | None) -> None:
    registry = make_registry(
        [Capacity("b", f"ns-{env % 2}", f"env-{env}", f"p{pool}") for env in range(envs) for pool in range(pools)]
    )
    looked_at, longest, text = 0, 0, b""

    class Watched(Registry):
        """Counts the envs that are looked at between two pieces."""

        def records(self, namespace: str, env_name: str) -> list[Capacity]:
            nonlocal looked_at
            looked_at += 1
            return registry.records(namespace, env_name)

    watched = Watched("a", ttl=30.0, clock=lambda: 100.0)
    watched._table = registry._table
    async for piece in capacity_pieces(watched, namespace, None):
        assert piece.count(b'"cluster_id":"b"') <= _SLICE
        longest = max(longest, looked_at)
        looked_at = 0
        text += piece
    assert longest <= _SLICE
    told = {(record["env_name"], record["member_pool"]) for record in json.loads(text)["records"]}
    assert told == {
        (record.env_name, record.member_pool) for record in registry.snapshot() if namespace in (None, record.namespace)
    }


async def test_others_have_their_turn_after_every_piece() -> None:
    registry = make_registry([Capacity("b", "ns", f"env-{env}", "p1") for env in range(10 * _SLICE)])
    app = admin_app(answers(registry=registry), host="127.0.0.1")
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        # No record of this namespace is sent, so that no waiting for a client gives others their turn.
        answer = await ask(app, "/v1/capacity", query=b"namespace=other")
        nursery.cancel_scope.cancel()
    assert answer.json["records"] == []
    assert turns >= 10


async def test_changes_between_pieces_leave_the_answer_whole() -> None:
    registry = make_registry([Capacity("b", "ns", f"env-{env:04}", "p1") for env in range(4 * _SLICE)])
    last = ("b", "ns", f"env-{4 * _SLICE - 1:04}", "p1")
    text, pieces = b"", 0
    async for piece in capacity_pieces(registry, None, None):
        pieces += 1
        if pieces == 1:
            registry.withdraw([last])
            registry.upsert([Capacity("b", "ns", "env-0000-new", "p1")])
        text += piece
    envs = [record["env_name"] for record in json.loads(text)["records"]]
    assert pieces > 4
    assert envs == sorted(envs)
    assert len(envs) == 4 * _SLICE - 1
    assert last[2] not in envs


async def test_capacity_over_a_socket(serve_admin: ServeAdmin, client: httpx.AsyncClient) -> None:
    registry = make_registry([Capacity("b", "ns", f"env-{env}", "p1", idle=env) for env in range(2000)])
    url = f"http://127.0.0.1:{await serve_admin(answers(registry=registry))}/v1/capacity"
    response = await client.get(url)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert sum(record["idle"] for record in response.json()["records"]) == sum(range(2000))
    response = await client.get(url, params={"namespace": "ns", "env": "env-7"})
    assert [record["idle"] for record in response.json()["records"]] == [7]
    response = await client.head(url)
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    "query, error",
    [
        (b"env=x", "env is given without a namespace; add namespace=NAMESPACE"),
        (b"namespace=", "namespace '' is not a lower-case RFC 1123 label (≤ 63)"),
        (b"namespace=Ns", "namespace 'Ns' is not a lower-case RFC 1123 label (≤ 63)"),
        (b"namespace=a&env=", "env '' is not a lower-case RFC 1123 subdomain (≤ 253)"),
        (b"namespace=a&env=b%0ac", r"env 'b\nc' is not a lower-case RFC 1123 subdomain (≤ 253)"),
        (b"namespace=a&namespace=a", "namespace is given twice; give it once"),
        (b"cluster=a", "unknown query parameter 'cluster'; /v1/capacity takes namespace, env"),
        (b"x", "unknown query parameter 'x'; /v1/capacity takes namespace, env"),
        (b"group=g", "unknown query parameter 'group'; /v1/capacity takes namespace, env"),
    ],
)
async def test_a_wrong_query_is_named(query: bytes, error: str) -> None:
    app = admin_app(answers(registry=make_registry()), host="127.0.0.1")
    answer = await ask(app, "/v1/capacity", query=query)
    assert (answer.status, answer.error) == (400, error)


async def test_a_process_without_an_agent_says_so() -> None:
    answer = await ask(admin_app(answers(), host="127.0.0.1"), "/v1/capacity")
    assert answer.status == 404
    assert answer.error.startswith("this process runs no agent")


async def test_a_fault_of_ours_is_told_to_both_sides(logs: list[EventDict]) -> None:
    class Broken(Registry):
        def now(self) -> float:
            raise RuntimeError("no clock")

    registry = Broken("a", ttl=30.0, clock=lambda: 100.0)
    registry.upsert([Capacity("b", "ns", "env", "p1")])
    answer = await ask(admin_app(answers(registry=registry), host="127.0.0.1"), "/v1/capacity")
    assert (answer.status, answer.error) == (500, "the records could not be written; the log says why")
    assert [(line["event"], line["what"]) for line in logs] == [("answer_failed", "/v1/capacity")]


class Scalar(str):
    """Text as parsers of YAML and XML hand it over."""


class Count(int):
    """The same for a whole number."""


class Seconds(float):
    """The same for any other."""


PARSED = Capacity(
    Scalar("b"),
    Scalar("ns"),
    Scalar("env"),
    Scalar("p1"),
    Scalar('"cpu"'),
    idle=Count(3),
    capacity=Count(-1),
    saturated_for=Seconds(2.5),
    state=Scalar("Active"),
    observed_at=Seconds(99.5),
)


async def test_values_of_a_kind_of_their_own_are_told_as_what_they_are() -> None:
    answer = await ask(admin_app(answers(registry=make_registry([PARSED])), host="127.0.0.1"), "/v1/capacity")
    assert answer.status == 200
    assert answer.json["records"] == [as_told(PARSED, 100.0)]


@pytest.mark.parametrize("reserve", [False, True])
async def test_a_placement_of_such_values_is_told(reserve: bool) -> None:
    registry = make_registry([PARSED])
    app = admin_app(answers(registry=registry, place=Placements(registry)), host="127.0.0.1")
    if reserve:
        answer = await post(app, {"namespace": "ns", "env": "env"})
    else:
        answer = await ask(app, "/v1/place", query=b"namespace=ns&env=env")
    assert answer.status == 200
    (candidate,) = answer.json["candidates"]
    assert (candidate["cluster_id"], candidate["member_pool"], candidate["idle"]) == ("b", "p1", 3)
    assert candidate["state"] == "Active"

"""`/v1/place`: where a create would go, and why; a GET reserves nothing, a POST does."""

from __future__ import annotations

import dataclasses
import json

import httpx
import pytest
import trio
from structlog.typing import EventDict

from tests.admin.conftest import ServeAdmin
from tests.admin.helpers import Answer, Placements, answers, ask, post
from trio_federation.admin import admin_app
from trio_federation.admin.api import MAX_BODY
from trio_federation.agent import PLACEMENTS_KEPT
from trio_federation.capacity import Capacity
from trio_federation.registry import Registry
from trio_federation.router import Candidate, Placement

LABEL = "is not a lower-case RFC 1123 label (≤ 63)"
SUBDOMAIN = "is not a lower-case RFC 1123 subdomain (≤ 253)"
GROUP = "is not at most 63 printable characters without '::' and '//'"


@pytest.fixture
def now() -> list[float]:
    """The registry's time, in its only element."""
    return [100.0]


@pytest.fixture
def placements(now: list[float]) -> Placements:
    registry = Registry("west", ttl=30.0, clock=lambda: now[0])
    registry.upsert(
        [
            Capacity("west", "agents", "py", "p1", "cpu", running=4, observed_at=100.0),
            Capacity("east", "agents", "py", "p1", "cpu", idle=3, state="Active", observed_at=98.87654),
            Capacity("north", "agents", "py", "p1", "gpu", autoscaling_enabled=True, capacity=-1, observed_at=90.0),
        ]
    )
    return Placements(registry)


async def get(placements: Placements, query: str) -> Answer:
    given = answers(registry=placements.router.registry, place=placements, placed=placements.remembered.get)
    return await ask(admin_app(given, host="127.0.0.1"), "/v1/place", query=query.encode())


async def send(placements: Placements, fields: object, *headers: tuple[bytes, bytes]) -> Answer:
    app = admin_app(answers(registry=placements.router.registry, place=placements), host="127.0.0.1")
    return await post(app, fields, *headers)


async def test_a_placement_is_told_field_by_field(placements: Placements) -> None:
    answer = await get(placements, "namespace=agents&env=py")
    assert answer.status == 200
    told = answer.json
    assert told.keys() == {field.name for field in dataclasses.fields(Placement)}
    expected = placements.router.place("agents", "py", reserve=False)
    assert told.pop("id") != expected.id
    assert told == {
        "local": False,
        "target": "east::p1",
        "reason": "west has none idle for agents/py; east::p1 has 3 idle",
        "rule": "foreign_idle",
        "candidates": [
            {
                "cluster_id": "east",
                "member_pool": "p1",
                "target": "east::p1",
                "tier": "idle",
                "idle": 3,
                "reserved": 0,
                "headroom": 0,
                "age": 1.123,
                "state": "Active",
                "verdict": "chosen",
            },
            {
                "cluster_id": "north",
                "member_pool": "p1",
                "target": "north::p1",
                "tier": "grow",
                "idle": 0,
                "reserved": 0,
                "headroom": -1,
                "age": 10.0,
                "state": "",
                "verdict": "nothing idle, east::p1 has",
            },
        ],
    }
    assert told["candidates"][0].keys() == {field.name for field in dataclasses.fields(Candidate)} | {"target"}


async def test_a_local_placement_has_no_target(placements: Placements) -> None:
    told = (await get(placements, "namespace=agents&env=other")).json
    assert (told["local"], told["target"], told["candidates"]) == (True, None, [])


async def test_a_get_reserves_nothing_and_a_post_does(placements: Placements) -> None:
    await get(placements, "namespace=agents&env=py&group=gpu")
    await send(placements, {"namespace": "agents", "env": "py", "group": "gpu"})
    await get(placements, "namespace=agents&env=py")
    await send(placements, {"namespace": "agents", "env": "py"})
    assert placements.asked == [
        ("agents", "py", "gpu", False),
        ("agents", "py", "gpu", True),
        ("agents", "py", "", False),
        ("agents", "py", "", True),
    ]


async def test_both_methods_tell_the_same(placements: Placements) -> None:
    asked = (await get(placements, "namespace=agents&env=py&group=cpu")).json
    placed = (await send(placements, {"namespace": "agents", "env": "py", "group": "cpu"})).json
    del asked["id"], placed["id"]
    assert asked == placed
    assert [candidate["target"] for candidate in asked["candidates"]] == ["east::p1"]


async def test_a_placement_of_the_past_is_told_by_its_id(placements: Placements, now: list[float]) -> None:
    """As it was decided then, whatever is known by now; and what it was for, and when."""
    first = (await send(placements, {"namespace": "agents", "env": "py", "group": "cpu"})).json
    now[0] += 0.5
    second = (await send(placements, {"namespace": "agents", "env": "other"})).json
    now[0] += 12.34567
    placements.router.registry.upsert([Capacity("north", "agents", "py", "p1", "cpu", idle=9)])
    answer = await get(placements, f"id={first['id']}")
    assert answer.status == 200
    assert answer.json == first | {"namespace": "agents", "env": "py", "group": "cpu", "ago": 12.846}
    assert answer.json["target"] == "east::p1"
    told = (await get(placements, f"id={second['id']}")).json
    assert told == second | {"namespace": "agents", "env": "other", "group": "", "ago": 12.346}
    # Told of, and not placed once more.
    assert placements.reserved == len(placements.asked) == 2


@pytest.mark.parametrize("placement_id", ["0123456789abcdef", "", "%00%E2%80%A8", "a" * 5000])
async def test_a_placement_that_is_not_remembered(placements: Placements, placement_id: str) -> None:
    asked = (await get(placements, "namespace=agents&env=py")).json["id"]  # which reserves nothing
    for each in (placement_id, asked):
        answer = await get(placements, f"id={each}")
        assert answer.status == 404
        assert answer.error.startswith("no placement with the id '")
        assert f"remembers the last {PLACEMENTS_KEPT:,} that reserved, and a restart forgets them" in answer.error
        assert len(answer.error) < 300


@pytest.mark.parametrize(
    "query, error",
    [
        ("", "namespace is missing; ask for /v1/place?namespace=NAMESPACE&env=ENV"),
        ("namespace=a", "env is missing; ask for /v1/place?namespace=NAMESPACE&env=ENV"),
        ("env=a", "namespace is missing; ask for /v1/place?namespace=NAMESPACE&env=ENV"),
        ("namespace=a&env=b&cluster=c", "unknown query parameter 'cluster'; /v1/place takes namespace, env, group, id"),
        ("id=a&namespace=b", "id is given together with namespace; an id alone says which placement is meant"),
        ("group=c&id=a&env=b", "id is given together with env and group; an id alone says which placement is meant"),
        ("id=a&id=a", "id is given twice; give it once"),
        ("id=a&cluster=c", "unknown query parameter 'cluster'; /v1/place takes namespace, env, group, id"),
        ("namespace=a&env=b&env=b", "env is given twice; give it once"),
        ("namespace=a.b&env=b", f"namespace 'a.b' {LABEL}"),
        ("namespace=a&env=B", f"env 'B' {SUBDOMAIN}"),
        ("namespace=a&env=b&group=c::d", f"group 'c::d' {GROUP}"),
        ("namespace=a&env=b&group=%00", f"group '\\x00' {GROUP}"),
        ("namespace=a&env=b&group=%E2%80%A8", f"group '\\u2028' {GROUP}"),
    ],
)
async def test_a_wrong_query_is_named(placements: Placements, query: str, error: str) -> None:
    answer = await get(placements, query)
    assert (answer.status, answer.error) == (400, error)
    assert placements.asked == []


@pytest.mark.parametrize(
    "body, error",
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"no", "truncated"),
        (b'{"namespace": "a", "env": "b"} {}', "JSON is malformed: trailing characters (byte 32)"),
        (b'{"namespace": "\xff", "env": "b"}', "UTF-8"),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b"[" * 16000, "Expected `object`, got `array`"),
        (b'{"namespace": "a"}', "missing required field `env`"),
        (b'{"namespace": "a", "env": 1}', "Expected `str`, got `int` - at `$.env`"),
        (b'{"namespace": "a", "env": "b", "group": null}', "Expected `str`, got `null` - at `$.group`"),
        (b'{"namespace": "a", "env": "b", "reserve": false}', "unknown field `reserve`"),
        (b'{"a\\nb": 1}', "unknown field `a\N{REPLACEMENT CHARACTER}b`"),
        (b'{"' + b"a" * 10000 + b'": 1}', "unknown field `aaa"),
    ],
)
async def test_a_wrong_body_is_named(placements: Placements, body: bytes, error: str) -> None:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    app = admin_app(answers(place=placements), host="127.0.0.1")
    answer = await ask(app, "/v1/place", method="POST", headers=headers, body=[body])
    assert answer.status == 400
    assert answer.error.startswith("the body is not what was asked for: ")
    assert error in answer.error
    assert answer.error.endswith('send {"namespace": "…", "env": "…", "group": "…"}; group may be left out')
    assert len(answer.error) < 400
    assert placements.asked == []


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"namespace": "A", "env": "b"}, f"namespace 'A' {LABEL}"),
        ({"namespace": "a", "env": ""}, f"env '' {SUBDOMAIN}"),
        ({"namespace": "a", "env": "b", "group": "x//y"}, f"group 'x//y' {GROUP}"),
    ],
)
async def test_wrong_names_in_a_body_are_named(placements: Placements, fields: object, error: str) -> None:
    answer = await send(placements, fields)
    assert (answer.status, answer.error) == (400, error)
    assert placements.asked == []


async def test_a_post_takes_no_query(placements: Placements) -> None:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    body = [json.dumps({"namespace": "agents", "env": "py"}).encode()]
    app = admin_app(answers(place=placements), host="127.0.0.1")
    answer = await ask(app, "/v1/place", method="POST", query=b"namespace=agents", headers=headers, body=body)
    assert answer.status == 400
    assert "POST takes its fields from a JSON object in the body" in answer.error
    assert placements.asked == []


async def test_a_long_body_is_refused_before_it_is_read_to_its_end(placements: Placements) -> None:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    app = admin_app(answers(place=placements), host="127.0.0.1")
    longest = json.dumps({"namespace": "agents", "env": "py"}).encode().ljust(MAX_BODY)
    in_parts = [longest[start : start + 1000] for start in range(0, MAX_BODY, 1000)]
    assert (await ask(app, "/v1/place", method="POST", headers=headers, body=in_parts)).status == 200
    taken = 0

    async def receive() -> dict[str, object]:
        nonlocal taken
        await trio.lowlevel.checkpoint()
        taken += 1000
        return {"type": "http.request", "body": b" " * 1000, "more_body": True}

    sent: list[dict[str, object]] = []

    async def send(message: object) -> None:
        await trio.lowlevel.checkpoint()
        assert isinstance(message, dict)
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/place", "query_string": b"", "headers": headers}
    with trio.fail_after(5):
        await app(scope, receive, send)
    assert sent[0]["status"] == 413
    assert MAX_BODY < taken <= MAX_BODY + 1000
    assert placements.reserved == 1


async def test_a_client_that_leaves_while_it_sends_places_nothing(
    placements: Placements, logs: list[EventDict]
) -> None:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    app = admin_app(answers(place=placements), host="127.0.0.1")
    messages: list[dict[str, object]] = [
        {"type": "http.request", "body": b'{"namespace": "agents", "env": "py"}', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, object]:
        await trio.lowlevel.checkpoint()
        return messages.pop(0)

    async def send(message: object) -> None:
        await trio.lowlevel.checkpoint()

    scope = {"type": "http", "method": "POST", "path": "/v1/place", "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    assert placements.asked == []
    assert logs == []


async def test_a_process_without_an_agent_says_so() -> None:
    app = admin_app(answers(), host="127.0.0.1")
    for answer in (
        await ask(app, "/v1/place", query=b"namespace=a&env=b"),
        await ask(app, "/v1/place", query=b"id=a"),
        await post(app, {"namespace": "a", "env": "b"}),
    ):
        assert answer.status == 404
        assert answer.error.startswith("this process runs no agent")


async def test_place_over_a_socket(serve_admin: ServeAdmin, client: httpx.AsyncClient, placements: Placements) -> None:
    url = f"http://127.0.0.1:{await serve_admin(answers(place=placements))}/v1/place"
    response = await client.get(url, params={"namespace": "agents", "env": "py"})
    assert (response.status_code, response.json()["target"]) == (200, "east::p1")
    assert placements.reserved == 0
    response = await client.post(url, json={"namespace": "agents", "env": "py"})
    assert (response.status_code, response.json()["target"]) == (200, "east::p1")
    assert placements.reserved == 1
    response = await client.post(url, content=b" " * (MAX_BODY + 1), headers={"content-type": "application/json"})
    assert (response.status_code, list(response.json())) == (413, ["error"])
    response = await client.post(url, data={"namespace": "agents", "env": "py"})
    assert (response.status_code, list(response.json())) == (415, ["error"])
    assert placements.reserved == 1


async def test_a_fault_of_ours_is_told_to_both_sides(
    serve_admin: ServeAdmin, client: httpx.AsyncClient, logs: list[EventDict]
) -> None:
    def broken(namespace: str, env: str, group: str, reserve: bool) -> Placement:
        raise RuntimeError("a fault")

    url = f"http://127.0.0.1:{await serve_admin(answers(place=broken))}/v1/place"
    response = await client.get(url, params={"namespace": "agents", "env": "py"})
    assert response.status_code == 500
    assert response.json() == {"error": "this could not be answered; the log says why"}
    assert (await client.get(url)).status_code == 400  # by now the first one has been told of
    assert [(line["event"], line["path"]) for line in logs] == [("http_answer_failed", "/v1/place")]
    assert repr(logs[0]["exc_info"]) == "RuntimeError('a fault')"

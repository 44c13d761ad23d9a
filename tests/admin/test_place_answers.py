"""`/v1/place`: where a create would go, and why; a GET reserves nothing, a POST does. And what became of it, which is
reported to `/v1/place/ID/outcome`."""

from __future__ import annotations

import dataclasses
import json

import httpx
import pytest
import trio
from structlog.typing import EventDict

from tests.admin.conftest import ServeAdmin
from tests.admin.helpers import Answer, Asked, Placements, answers, ask, post
from trio_federation.admin import admin_app
from trio_federation.admin.api import MAX_BODY, MOST_TARGETS
from trio_federation.capacity import Capacity
from trio_federation.registry import Registry
from trio_federation.reservations import Outcome
from trio_federation.router import PLACEMENTS_KEPT, Candidate, Placement

LABEL = "is not a lower-case RFC 1123 label (≤ 63)"
SUBDOMAIN = "is not a lower-case RFC 1123 subdomain (≤ 253)"
TAKES = "namespace, env, group, not_these, id"
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
    return await ask(admin_app(placements.answers, host="127.0.0.1"), "/v1/place", query=query.encode())


async def send(placements: Placements, fields: object, *headers: tuple[bytes, bytes]) -> Answer:
    return await post(admin_app(placements.answers, host="127.0.0.1"), fields, *headers)


async def report(placements: Placements, placement_id: str, fields: object) -> Answer:
    """Tell what became of a placement."""
    return await post(admin_app(placements.answers, host="127.0.0.1"), fields, path=f"/v1/place/{placement_id}/outcome")


async def test_a_placement_is_told_field_by_field(placements: Placements) -> None:
    answer = await get(placements, "namespace=agents&env=py")
    assert answer.status == 200
    told = answer.json
    assert told.keys() == {field.name for field in dataclasses.fields(Placement)} | {"explanation"}
    expected = placements.router.place("agents", "py", reserve=False)
    assert told.pop("id") != expected.id
    assert told.pop("explanation") == list(expected.explanation)
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
        Asked("agents", "py", "gpu", False),
        Asked("agents", "py", "gpu", True),
        Asked("agents", "py", "", False),
        Asked("agents", "py", "", True),
    ]
    # A GET tells what is reserved, and adds nothing to it.
    east, north = (await get(placements, "namespace=agents&env=py")).json["candidates"]
    assert (east["target"], east["idle"], east["reserved"]) == ("east::p1", 2, 1)
    assert (north["target"], north["headroom"], north["reserved"]) == ("north::p1", -1, 1)
    assert (await get(placements, "namespace=agents&env=py")).json["candidates"] == [east, north]


async def test_a_create_that_was_turned_away_has_no_such_choice(placements: Placements) -> None:
    """`not_these`, in a body as a list, in a query with commas between."""
    fields = {"namespace": "agents", "env": "py", "not_these": ["east::p1"]}
    placed = (await send(placements, fields)).json
    asked = (await get(placements, "namespace=agents&env=py&not_these=east::p1")).json
    assert placed["target"] == asked["target"] == "north::p1"
    (east,) = [each for each in asked["candidates"] if each["target"] == "east::p1"]
    assert east["tier"] == "excluded"
    both = (await get(placements, "namespace=agents&env=py&not_these=east::p1,north::p1")).json
    assert (both["local"], both["rule"]) == (True, "nothing_anywhere")
    assert (await get(placements, "namespace=agents&env=py&not_these=")).json["target"] == "east::p1"
    assert [asked.not_these for asked in placements.asked] == [
        ("east::p1",),
        ("east::p1",),
        ("east::p1", "north::p1"),
        (),
    ]


async def test_a_create_that_was_forwarded_stays(placements: Placements) -> None:
    fields = {"namespace": "agents", "env": "py", "forwarded": True}
    placed = (await send(placements, fields)).json
    assert (placed["local"], placed["target"], placed["rule"]) == (True, None, "forwarded")
    assert (await send(placements, fields | {"forwarded": False})).json["target"] == "east::p1"
    assert [asked.forwarded for asked in placements.asked] == [True, False]


@pytest.mark.parametrize("target", ["", "x", "east", "east::", "::p1", "East::p1", "east::p_1", "e.a::p1", "a::b::c"])
async def test_a_wrong_target_is_named(placements: Placements, target: str) -> None:
    error = f"not_these: {target!r} is no target; write each as CLUSTER::POOL"
    fields = {"namespace": "agents", "env": "py", "not_these": ["east::p1", target]}
    for answer in (
        await send(placements, fields),
        await get(placements, f"namespace=agents&env=py&not_these=east::p1,{target}"),
    ):
        assert (answer.status, answer.error) == (400, error)
    assert placements.asked == []


async def test_the_most_targets_that_there_can_be(placements: Placements) -> None:
    """As long as names can be, in one body; one more is too many."""
    most = [f"{'c' * 63}::{f'p{number}':p<253}" for number in range(MOST_TARGETS)]
    fields = {"namespace": "n" * 63, "env": "e" * 253, "group": "g" * 63, "not_these": most}
    assert (await send(placements, fields)).status == 200
    for answer in (
        await send(placements, fields | {"not_these": [*most, "east::p1"]}),
        await get(placements, f"namespace=n&env=e&not_these={','.join(['east::p1'] * (MOST_TARGETS + 1))}"),
    ):
        assert (answer.status, answer.error) == (400, "not_these names 101 targets; name at most 100")
    assert placements.reserved == 1


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
    assert answer.json == first | {"namespace": "agents", "env": "py", "group": "cpu", "ago": 12.846, "outcome": None}
    assert answer.json["target"] == "east::p1"
    told = (await get(placements, f"id={second['id']}")).json
    assert told == second | {"namespace": "agents", "env": "other", "group": "", "ago": 12.346, "outcome": None}
    # Told of, and not placed once more.
    assert placements.reserved == len(placements.asked) == 2


# What became of it.


async def test_the_first_outcome_counts(placements: Placements) -> None:
    placed = (await send(placements, {"namespace": "agents", "env": "py"})).json["id"]
    for word in ("empty", "served"):
        answer = await report(placements, placed, {"outcome": word})
        assert (answer.status, answer.json) == (200, {"id": placed, "outcome": "empty"})
        assert (await get(placements, f"id={placed}")).json["outcome"] == "empty"
    assert placements.told == [(placed, Outcome.EMPTY), (placed, Outcome.SERVED)]


async def test_where_it_was_found_empty_the_next_one_does_not_go(placements: Placements, now: list[float]) -> None:
    """Until something newer is known; the placement itself is told as it was decided."""
    placed = (await send(placements, {"namespace": "agents", "env": "py"})).json
    assert placed["target"] == "east::p1"
    await report(placements, placed["id"], {"outcome": "empty"})
    told = (await get(placements, "namespace=agents&env=py")).json
    assert told["target"] == "north::p1"
    assert {each["target"]: each["tier"] for each in told["candidates"]}["east::p1"] == "turned_away"
    assert (await get(placements, f"id={placed['id']}")).json["candidates"] == placed["candidates"]
    now[0] += 3.0
    placements.router.registry.upsert([Capacity("east", "agents", "py", "p1", "cpu", idle=3, observed_at=now[0])])
    assert (await get(placements, "namespace=agents&env=py")).json["target"] == "east::p1"


@pytest.mark.parametrize("placement_id", ["0123456789abcdef", "%00", "\u2028", "a" * 5000, "a b"])
async def test_an_outcome_of_what_is_not_remembered(placements: Placements, placement_id: str) -> None:
    asked = (await get(placements, "namespace=agents&env=py")).json["id"]  # which reserves nothing
    for each in (placement_id, asked):
        answer = await report(placements, each, {"outcome": "served"})
        assert answer.status == 404
        assert answer.error.startswith("no placement with the id '")
        assert f"remembers the last {PLACEMENTS_KEPT:,} that reserved, and a restart forgets them" in answer.error
        assert len(answer.error) < 300
    assert (await get(placements, "namespace=agents&env=py")).json["target"] == "east::p1"


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"outcome": "lost"}, "Invalid enum value 'lost' - at `$.outcome`"),
        ({"outcome": "Served"}, "Invalid enum value 'Served' - at `$.outcome`"),
        ({"outcome": None}, "Expected `str`, got `null` - at `$.outcome`"),
        ({}, "missing required field `outcome`"),
        ({"outcome": "served", "id": "x"}, "unknown field `id`"),
        (["served"], "Expected `object`, got `array`"),
        ({"outcome": "x\u2028" * 100}, "Invalid enum value"),
    ],
)
async def test_a_wrong_outcome_is_named(placements: Placements, fields: object, error: str) -> None:
    placed = (await send(placements, {"namespace": "agents", "env": "py"})).json["id"]
    answer = await report(placements, placed, fields)
    assert answer.status == 400
    assert error in answer.error
    assert answer.error.endswith('; send {"outcome": "…"}, with one of served, empty, refused')
    assert len(answer.error) < 400
    assert placements.told == []
    assert (await get(placements, f"id={placed}")).json["outcome"] is None


async def test_an_outcome_takes_no_query_and_no_long_body(placements: Placements) -> None:
    app = admin_app(placements.answers, host="127.0.0.1")
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    body = b'{"outcome": "served"}'
    answer = await ask(app, "/v1/place/x/outcome", method="POST", query=b"a=b", headers=headers, body=[body])
    assert answer.status == 400
    assert "POST takes its fields from a JSON object in the body" in answer.error
    answer = await ask(app, "/v1/place/x/outcome", method="POST", headers=headers, body=[body.ljust(MAX_BODY), b" "])
    assert answer.status == 413
    assert answer.error.endswith("with one of served, empty, refused")
    assert placements.told == []


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
        ("namespace=a&env=b&cluster=c", f"unknown query parameter 'cluster'; /v1/place takes {TAKES}"),
        ("id=a&namespace=b", "id is given together with namespace; an id alone says which placement is meant"),
        ("group=c&id=a&env=b", "id is given together with env and group; an id alone says which placement is meant"),
        ("id=a&not_these=a::b", "id is given together with not_these; an id alone says which placement is meant"),
        ("namespace=a&env=b&forwarded=true", f"unknown query parameter 'forwarded'; /v1/place takes {TAKES}"),
        ("namespace=a&env=b&not_these=a::b&not_these=c::d", "not_these is given twice; give it once"),
        ("id=a&id=a", "id is given twice; give it once"),
        ("id=a&cluster=c", f"unknown query parameter 'cluster'; /v1/place takes {TAKES}"),
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
        (b'{"namespace": "a", "env": "b", "not_these": "east::p1"}', "Expected `array`, got `str` - at `$.not_these`"),
        (b'{"namespace": "a", "env": "b", "not_these": [1]}', "Expected `str`, got `int` - at `$.not_these[0]`"),
        (b'{"namespace": "a", "env": "b", "forwarded": 1}', "Expected `bool`, got `int` - at `$.forwarded`"),
        (b'{"namespace": "a", "env": "b", "reserve": false}', "unknown field `reserve`"),
        (b'{"a\\nb": 1}', "unknown field `a\N{REPLACEMENT CHARACTER}b`"),
        (b'{"' + b"a" * 10000 + b'": 1}', "unknown field `aaa"),
    ],
)
async def test_a_wrong_body_is_named(placements: Placements, body: bytes, error: str) -> None:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    app = admin_app(placements.answers, host="127.0.0.1")
    answer = await ask(app, "/v1/place", method="POST", headers=headers, body=[body])
    assert answer.status == 400
    assert answer.error.startswith("the body is not what was asked for: ")
    assert error in answer.error
    assert '; send {"namespace": "…", "env": "…"}, and, where they apply, "group": ' in answer.error
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
    app = admin_app(placements.answers, host="127.0.0.1")
    answer = await ask(app, "/v1/place", method="POST", query=b"namespace=agents", headers=headers, body=body)
    assert answer.status == 400
    assert "POST takes its fields from a JSON object in the body" in answer.error
    assert placements.asked == []


async def test_a_long_body_is_refused_before_it_is_read_to_its_end(placements: Placements) -> None:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    app = admin_app(placements.answers, host="127.0.0.1")
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
    app = admin_app(placements.answers, host="127.0.0.1")
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
        await post(app, {"outcome": "served"}, path="/v1/place/x/outcome"),
    ):
        assert answer.status == 404
        assert answer.error.startswith("this process runs no agent")


async def test_place_over_a_socket(serve_admin: ServeAdmin, client: httpx.AsyncClient, placements: Placements) -> None:
    url = f"http://127.0.0.1:{await serve_admin(placements.answers)}/v1/place"
    response = await client.get(url, params={"namespace": "agents", "env": "py"})
    assert (response.status_code, response.json()["target"]) == (200, "east::p1")
    assert placements.reserved == 0
    response = await client.post(url, json={"namespace": "agents", "env": "py"})
    assert (response.status_code, response.json()["target"]) == (200, "east::p1")
    placed = response.json()["id"]
    assert placements.reserved == 1
    response = await client.post(url, content=b" " * (MAX_BODY + 1), headers={"content-type": "application/json"})
    assert (response.status_code, list(response.json())) == (413, ["error"])
    response = await client.post(url, data={"namespace": "agents", "env": "py"})
    assert (response.status_code, list(response.json())) == (415, ["error"])
    assert placements.reserved == 1
    url = f"{url}/{placed}/outcome"
    response = await client.post(url, json={"outcome": "served"})
    assert (response.status_code, response.json()) == (200, {"id": placed, "outcome": "served"})
    assert (await client.get(url)).status_code == 405


async def test_a_fault_of_ours_is_told_to_both_sides(
    serve_admin: ServeAdmin, client: httpx.AsyncClient, logs: list[EventDict]
) -> None:
    def broken(*asked: object, **options: object) -> Placement:
        raise RuntimeError("a fault")

    url = f"http://127.0.0.1:{await serve_admin(answers(place=broken))}/v1/place"
    response = await client.get(url, params={"namespace": "agents", "env": "py"})
    assert response.status_code == 500
    assert response.json() == {"error": "this could not be answered; the log says why"}
    assert (await client.get(url)).status_code == 400  # by now the first one has been told of
    assert [(line["event"], line["path"]) for line in logs] == [("http_answer_failed", "/v1/place")]
    assert repr(logs[0]["exc_info"]) == "RuntimeError('a fault')"

"""Whatever is sent: no answer is a fault of ours, refusals under /v1 are a line of JSON, and a GET changes nothing."""

from __future__ import annotations

import json

import trio
from hypothesis import example, given
from hypothesis import strategies as st

from tests.admin.helpers import Placements, ask
from trio_federation.admin import admin_app, metrics_app
from trio_federation.admin.api import MAX_BODY
from trio_federation.capacity import Capacity
from trio_federation.registry import Registry

NAMES = ["namespace", "env", "group", "agents", "py", "cpu", "", "A", "x::y", "\x00", "ü", "\N{LINE SEPARATOR}"]
WORDS = st.sampled_from(NAMES) | st.text(max_size=10)

PLACEMENT_ID = "0123456789abcdef"
OUTCOME = f"/v1/place/{PLACEMENT_ID}/outcome"
PATHS = (
    st.sampled_from(["/", "/metrics", "/healthz", "/readyz", "/v1/capacity", "/v1/place", "/v1", "/v1/", OUTCOME])
    | st.text(max_size=10).map(lambda text: f"/{text}")
    | st.text(max_size=10).map(lambda text: f"/v1/place/{text}/outcome")
)

METHODS = st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "X"])


def quoted(text: str) -> bytes:
    return "".join(f"%{byte:02x}" for byte in text.encode()).encode()


PAIRS = st.lists(st.tuples(WORDS, WORDS), max_size=4).map(
    lambda pairs: b"&".join(quoted(name) + b"=" + quoted(value) for name, value in pairs)
)
QUERIES = (
    st.sampled_from(
        [
            *(b"", b"namespace=agents&env=py", b"namespace=agents&env=py&group=cpu", b"&&==&;", b"%", b"%ff=%fe"),
            *(b"namespace=agents&env=py&not_these=east::p1", b"namespace=agents&env=py&not_these=,"),
        ]
    )
    | PAIRS
    | st.binary(max_size=30)
)

HOSTS = st.sampled_from([b"localhost", b"127.0.0.1:9465", b"[::1]", b"evil.example", b"[", b"]", b":", b"[::1%eth0]"])
CONTENT_TYPES = st.sampled_from([b"application/json", b"application/json; charset=x", b"text/plain"])
ORIGINS = st.sampled_from([b"http://localhost", b"null", b"http://["])
LENGTHS = st.sampled_from([b"0", b"-1", b"9" * 5000, b"x"])
OTHERS = st.sampled_from([b"accept", b"range", b"cookie", b"x-forwarded-host", b"expect"])
HEADERS = st.lists(
    st.tuples(st.just(b"host"), HOSTS | st.binary(max_size=10))
    | st.tuples(st.just(b"content-type"), CONTENT_TYPES | st.binary(max_size=10))
    | st.tuples(st.just(b"origin"), ORIGINS | st.binary(max_size=10))
    | st.tuples(st.just(b"content-length"), LENGTHS)
    | st.tuples(OTHERS, st.binary(max_size=10)),
    max_size=5,
)
ORDINARY = [(b"host", b"localhost"), (b"content-type", b"application/json")]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
BODIES = (
    st.binary(max_size=40)
    | JSON.map(lambda value: json.dumps(value).encode())
    | (
        st.fixed_dictionaries(
            {"namespace": WORDS, "env": WORDS},
            optional={
                "group": WORDS,
                "not_these": st.lists(WORDS | st.just("east::p1"), max_size=3),
                "forwarded": st.booleans(),
            },
        )
        | st.fixed_dictionaries({"outcome": st.sampled_from(["served", "empty", "refused"]) | WORDS})
    ).map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    | st.sampled_from([b"[" * 20000, b"{" * 20000, b'{"namespace":' * 2000, b" " * MAX_BODY, b" " * (MAX_BODY + 1)])
)

RECORDS = [
    Capacity("west", "agents", "py", "p1", "cpu", running=4, observed_at=100.0),
    Capacity("east", "agents", "py", "p1", "cpu", idle=3, observed_at=98.0),
]


@given(PATHS, METHODS, QUERIES, HEADERS | st.just(ORDINARY), st.lists(BODIES, max_size=3))
@example("/v1/place", "POST", b"", ORDINARY, [b'{"namespace": "agents", "env": "py"}'])
@example("/v1/place", "GET", b"namespace=agents&env=py", ORDINARY, [])
@example(OUTCOME, "POST", b"", ORDINARY, [b'{"outcome": "served"}'])
@example("/metrics", "PUT", b"", [(b"host", b"[")], [])
def test_nothing_that_is_sent_is_a_fault_of_ours(
    path: str, method: str, query: bytes, headers: list[tuple[bytes, bytes]], body: list[bytes]
) -> None:
    registry = Registry("west", ttl=30.0, clock=lambda: 100.0)
    registry.upsert(RECORDS)
    before = registry.snapshot(), registry.statistics()
    placements = Placements(registry)
    given_answers = placements.answers

    async def main() -> None:
        for app in (metrics_app(given_answers), admin_app(given_answers, host="127.0.0.1")):
            answer = await ask(app, path, method=method, query=query, headers=headers, body=body)
            assert answer.status in (200, 400, 403, 404, 405, 413, 415)
            admin = "v1" in path and answer.status != 200 and answer.headers["content-type"] == "application/json"
            if admin and method != "HEAD":
                assert answer.error
            if answer.status != 200 and not admin:
                assert answer.body.count(b"\n") == 1
            if answer.status != 200:
                assert len(answer.body) < 1000

    trio.run(main)
    assert (registry.snapshot(), registry.statistics()) == before
    if method != "POST":
        assert placements.reserved == len(placements.told) == 0
    assert placements.reserved + len(placements.told) <= 1


@given(QUERIES)
def test_a_get_of_place_answers_or_names_what_is_wrong(query: bytes) -> None:
    registry = Registry("west", ttl=30.0, clock=lambda: 100.0)
    placements = Placements(registry)
    app = admin_app(placements.answers, host="127.0.0.1")
    answer = trio.run(lambda: ask(app, "/v1/place", query=query))
    if answer.status == 200:
        assert placements.asked[-1].reserve is False
        assert answer.json["local"]
    else:
        assert answer.status == 400
        assert answer.error
        assert placements.asked == []

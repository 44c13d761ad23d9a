"""Whom the admin interface listens to: the rules for headers, and where they are applied."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.admin.conftest import ServeAdmin
from tests.admin.helpers import Placements, answers, ask, post
from trio_federation.admin import admin_app
from trio_federation.admin.protection import content_type_fault, host_fault, origin_fault, shown
from trio_federation.registry import Registry

NAMES = st.from_regex(r"[a-zA-Z0-9]([-a-zA-Z0-9]{0,10}[a-zA-Z0-9])?(\.[a-zA-Z]{1,5}){0,3}", fullmatch=True)
IPV4 = st.ip_addresses(v=4).map(str)
IPV6 = st.ip_addresses(v=6).map(lambda address: f"[{address}]")
PORTS = st.just("") | st.integers(0, 65535).map(lambda port: f":{port}")


@given(IPV4 | IPV6 | st.just("localhost") | st.just("LocalHost") | st.just("admin.example"), PORTS)
def test_addresses_localhost_and_the_own_name_are_known(host: str, port: str) -> None:
    assert host_fault([host + port], "Admin.Example") is None


@given(NAMES.filter(lambda name: name.lower() not in ("localhost", "own")), PORTS)
def test_no_other_name_is_known(name: str, port: str) -> None:
    fault = host_fault([name + port], "own")
    assert (
        fault
        == f"Host {shown(name + port)} is not a name of this interface; ask for localhost or for an IP address instead"
    )


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        ":80",
        "localhost:",
        "localhost:x",
        "localhost:123456",
        "localhost:80:80",
        "localhost/x",
        "localhost#",
        "user@localhost",
        "localhost.",
        "localhost, evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1.",
        "127.1",
        "0x7f000001",
        "2130706433",
        "::1",
        "[::1",
        "[::1]x",
        "[localhost]",
        "[127.0.0.1]",
        "[]",
        "localhost\n",
        "größe",
    ],
)
def test_what_only_looks_like_a_known_host_is_refused(host: str) -> None:
    assert host_fault([host], "127.0.0.1") is not None


def test_the_host_is_given_once() -> None:
    wanted = "the request must say in one Host header which host it is for"
    assert host_fault([], "127.0.0.1") == wanted
    assert host_fault(["localhost", "localhost"], "127.0.0.1") == wanted


@given(st.sampled_from(["http", "https", "HTTP"]), NAMES | IPV4 | IPV6, PORTS)
def test_the_page_of_the_same_host_may_post(scheme: str, host: str, port: str) -> None:
    assert origin_fault([f"{scheme}://{host}{port}"], host.upper() + port) is None


@given(NAMES | IPV4, NAMES | IPV4, PORTS, PORTS)
def test_the_page_of_another_host_or_port_may_not(theirs: str, ours: str, their_port: str, our_port: str) -> None:
    same = theirs.lower() == ours.lower() and (their_port or ":80") == (our_port or ":80")
    assert (origin_fault([f"http://{theirs}{their_port}"], ours + our_port) is None) == same


@pytest.mark.parametrize(
    "origins",
    [
        ["null"],
        [""],
        ["localhost"],
        ["http://"],
        ["http://localhost/"],
        ["http://localhost:9465/"],
        ["http://localhost:9465", "http://localhost:9465"],
        ["http://localhost:9465 http://localhost:9465"],
        ["ftp://localhost:9465"],
        ["http://user@localhost:9465"],
        ["http://127.0.0.1:9465"],
        ["http://localhost:80"],
        ["http://localhost"],
    ],
)
def test_what_is_not_the_own_origin_is_refused(origins: list[str]) -> None:
    fault = origin_fault(origins, "localhost:9465")
    assert fault is not None
    assert fault.endswith("is not the page of this interface; only its own page may post here")


def test_default_ports_need_not_be_said() -> None:
    assert origin_fault(["http://localhost"], "localhost:80") is None
    assert origin_fault(["https://localhost:443"], "localhost") is None
    assert origin_fault(["https://localhost"], "localhost:80") is not None


@pytest.mark.parametrize(
    "value", ["application/json", "Application/JSON", "application/json;charset=utf-8", " application/json ; x"]
)
def test_json_is_json(value: str) -> None:
    assert content_type_fault([value]) is None


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ["text/plain"],
        ["text/plain; application/json"],
        ["application/x-www-form-urlencoded"],
        ["multipart/form-data; boundary=application/json"],
        ["application/jsonp"],
        ["application/json, text/plain"],
        ["application/json", "text/plain"],
    ],
)
def test_what_a_form_can_send_is_not_json(values: list[str]) -> None:
    fault = content_type_fault(values)
    assert fault is not None
    assert fault.endswith("send the fields as a JSON object, with Content-Type: application/json")


@given(st.text())
def test_what_is_repeated_stays_short_and_on_its_line(text: str) -> None:
    assert shown(text).isprintable()
    assert len(shown(text)) <= 80


# Where the rules are applied.


@pytest.fixture
def placements() -> Placements:
    return Placements(Registry("west", ttl=30.0, clock=lambda: 100.0))


#: where posts go, and a good body for each
POSTS = {"/v1/place": {"namespace": "a", "env": "b"}, "/v1/place/x/outcome": {"outcome": "served"}}
REBOUND = [(b"host", b"evil.example:9465")]


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
@pytest.mark.parametrize("headers", [REBOUND, [], [*REBOUND, *REBOUND]])
async def test_probes_are_answered_under_any_name(path: str, headers: list[tuple[bytes, bytes]]) -> None:
    assert (await ask(admin_app(answers(), host="127.0.0.1"), path, headers=headers)).status == 200


@pytest.mark.parametrize(
    "path", ["/", "/v1/capacity", "/v1/place", "/v1/place/x/outcome", "/v1/x", "/v1", "/x", "/metrics/", "//"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT"])
async def test_everything_else_only_under_a_known_name(placements: Placements, path: str, method: str) -> None:
    app = admin_app(placements.answers, host="127.0.0.1")
    headers = [*REBOUND, (b"content-type", b"application/json")]
    query = b"" if method == "POST" else b"namespace=a&env=b"
    body = [json.dumps(POSTS.get(path, {})).encode()]
    answer = await ask(app, path, method=method, query=query, headers=headers, body=body)
    assert answer.status == 403
    line = "Host 'evil.example:9465' is not a name of this interface; ask for localhost or for an IP address instead"
    if path.startswith("/v1"):
        assert answer.error == line
    else:
        assert answer.body.decode() == f"403 {line}\n"
    assert (placements.asked, placements.told) == ([], [])


async def test_a_name_that_was_bound_is_known(placements: Placements) -> None:
    app = admin_app(placements.answers, host="admin.example")
    for host in (b"admin.example", b"ADMIN.example:8080", b"localhost", b"192.0.2.7:1", b"[2001:db8::1]:9465"):
        answer = await ask(app, "/v1/place", query=b"namespace=a&env=b", headers=[(b"host", host)])
        assert answer.status == 200


@pytest.mark.parametrize(
    "origin, ours",
    [
        (b"http://localhost:9465", True),
        (b"https://localhost:9465", True),
        (b"http://localhost:3000", False),
        (b"http://127.0.0.1:9465", False),
        (b"https://evil.example", False),
        (b"null", False),
    ],
)
@pytest.mark.parametrize("path", POSTS)
async def test_a_post_comes_from_the_own_page_or_from_none(
    placements: Placements, path: str, origin: bytes, ours: bool
) -> None:
    app = admin_app(placements.answers, host="127.0.0.1")
    answer = await post(app, POSTS[path], (b"origin", origin), path=path)
    # No placement has the id x, and only who may ask is told so.
    assert answer.status == ({"/v1/place": 200}.get(path, 404) if ours else 403)
    assert placements.reserved + len(placements.told) == int(ours)
    if not ours:
        assert "only its own page may post here" in answer.error


@pytest.mark.parametrize("path", POSTS)
async def test_a_post_is_json(placements: Placements, path: str) -> None:
    app = admin_app(placements.answers, host="127.0.0.1")
    body = [json.dumps(POSTS[path]).encode()]
    for content_type in ([], [(b"content-type", b"text/plain")]):
        headers = [(b"host", b"localhost"), *content_type]
        answer = await ask(app, path, method="POST", headers=headers, body=body)
        assert answer.status == 415
        assert "Content-Type: application/json" in answer.error
    assert (placements.asked, placements.told) == ([], [])


async def test_no_answer_lets_another_site_read_it(placements: Placements) -> None:
    app = admin_app(placements.answers, host="127.0.0.1")
    origin = (b"origin", b"https://evil.example")
    preflight = (b"access-control-request-method", b"POST")
    for path in ("/", "/v1/capacity", *POSTS, "/metrics", "/readyz", "/healthz"):
        for method in ("GET", "OPTIONS", "POST"):
            headers = [(b"host", b"localhost"), origin, preflight, (b"content-type", b"application/json")]
            answer = await ask(app, path, method=method, query=b"", headers=headers, body=[b"{}"])
            assert not [name for name in answer.headers if name.startswith("access-control")]
            if method == "OPTIONS":
                assert answer.status == 405


async def test_protection_over_a_socket(
    serve_admin: ServeAdmin, client: httpx.AsyncClient, placements: Placements
) -> None:
    port = await serve_admin(placements.answers)
    url = f"http://127.0.0.1:{port}"
    rebound = {"host": f"evil.example:{port}"}
    assert (await client.get(f"{url}/v1/capacity", headers=rebound)).status_code == 403
    assert (await client.get(f"{url}/", headers=rebound)).status_code == 403
    assert (await client.get(f"{url}/readyz", headers=rebound)).status_code == 200
    fields = {"namespace": "a", "env": "b"}
    response = await client.post(f"{url}/v1/place", json=fields, headers={"origin": "https://evil.example"})
    assert response.status_code == 403
    assert re.fullmatch(r'\{"error":"Origin .*"\}', response.text)
    response = await client.post(
        f"{url}/v1/place", json=fields, headers=rebound | {"origin": f"http://evil.example:{port}"}
    )
    assert response.status_code == 403
    assert placements.asked == []
    response = await client.post(f"{url}/v1/place", json=fields, headers={"origin": url})
    assert response.status_code == 200
    assert placements.reserved == 1

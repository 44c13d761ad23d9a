"""The token of the admin interface: which headers hold it, what is answered without it, and that it is told nowhere."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence

import httpx
import pytest
import trio
import trio.testing
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import ASGIApp
from structlog.typing import EventDict

from tests.admin.conftest import Connect, ServeAdmin
from tests.admin.helpers import Answer, Placements, answers, ask, pass_time, post, read_to_end
from trio_federation.admin import admin_app
from trio_federation.admin.protection import token_fault
from trio_federation.admin.server import REQUEST_TIMEOUT
from trio_federation.registry import Registry

TOKEN = "correct horse, battery: staple"
GOOD = b"Bearer " + TOKEN.encode()
ASK_WITH = "send Authorization: Bearer TOKEN, with the token of [admin] in the configuration"

#: where something is asked of the process, or changed in it, and where nothing is
CLOSED = (
    "/v1/capacity",
    "/v1/place",
    "/v1/place/x/outcome",
    "/v1",
    "/v1/",
    "/v1/x",
    "/x",
    "/metrics/",
    "//",
    "/%2f",
    "",
)
OPEN = ("/", "/metrics", "/healthz", "/readyz")

#: headers that nearly hold the token, and any bytes
SCHEMES = st.sampled_from([b"Bearer", b"bearer", b"BEARER", b"Basic", b"Beare", b"Bearer:", b"", b"\xe2\x84\xaa"])
SPACES = st.sampled_from([b" ", b"  ", b"", b"\t", b"\0", b"\n"])
TOKENS = st.sampled_from(
    [TOKEN.encode(), TOKEN.upper().encode(), TOKEN[:-1].encode(), TOKEN.encode() + b"x", b"", b"\xff"]
)
NEARLY = st.builds(lambda *parts: b"".join(parts), SPACES, SCHEMES, SPACES, TOKENS, SPACES)
AUTHORIZATIONS = st.lists(NEARLY | st.binary(max_size=40) | st.just(GOOD), max_size=3)


def holds_it(authorizations: Sequence[bytes]) -> bool:
    """What the headers mean, said in another way."""
    good = rb"[ \t]*bearer +(?-i:" + re.escape(TOKEN.encode()) + rb")[ \t]*"
    return len(authorizations) == 1 and re.fullmatch(good, authorizations[0], re.IGNORECASE) is not None


@pytest.fixture
def placements() -> Placements:
    return Placements(Registry("west", ttl=30.0, clock=lambda: 100.0))


@pytest.fixture
def app(placements: Placements) -> ASGIApp:
    return admin_app(placements.answers, host="127.0.0.1", token=lambda: TOKEN)


async def asked(app: ASGIApp, path: str, method: str = "GET", *authorizations: bytes, host: bytes = b"west") -> Answer:
    """Everything as it should be, but for the token."""
    headers = [(b"host", host), (b"content-type", b"application/json")]
    headers += [(b"authorization", value) for value in authorizations]
    fields = {"outcome": "served"} if path.endswith("/outcome") else {"namespace": "a", "env": "b"}
    query = b"namespace=a&env=b" if method == "GET" else b""
    return await ask(app, path, method=method, query=query, headers=headers, body=[json.dumps(fields).encode()])


# The rule.


@given(AUTHORIZATIONS)
@example([])
@example([GOOD])
@example([GOOD, GOOD])
@example([b"bEARER   " + TOKEN.encode() + b"\t "])
def test_only_the_token_passes_whatever_is_sent(authorizations: list[bytes]) -> None:
    fault = token_fault(authorizations, TOKEN)
    assert (fault is None) == holds_it(authorizations)
    if fault is not None:
        assert fault.isprintable()


@given(st.text(st.characters(codec="ascii", min_codepoint=0x21), min_size=1), st.text())
def test_every_token_is_told_from_every_other(token: str, other: str) -> None:
    assert token_fault([b"Bearer " + token.encode()], token) is None
    if other.strip(" \t") != token:
        assert token_fault([b"Bearer " + other.encode()], token) is not None


@pytest.mark.parametrize("sent", [[], [b""], [b"Bearer"], [b"Bearer "], [b"Bearer  \t"]])
def test_no_token_is_nobodys(sent: list[bytes]) -> None:
    assert token_fault(sent, "") is not None


@pytest.mark.parametrize(
    "sent, line",
    [
        ([], f"a token is needed; {ASK_WITH}"),
        ([GOOD, b"x"], "Authorization is given 2 times; give it once"),
        ([b"Basic c2VjcmV0"], f"Authorization is not of the kind Bearer; {ASK_WITH}"),
        ([b"Bearer s3cret-of-another"], f"the token is not the one that is asked for; {ASK_WITH}"),
    ],
)
def test_the_line_says_what_to_do_and_repeats_nothing(sent: list[bytes], line: str) -> None:
    assert token_fault(sent, TOKEN) == line


# Where it is applied.


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("sent", [[], [b"Bearer wrong"], [GOOD, GOOD], [b"\xff\xfe\0"], [TOKEN.encode()]])
@pytest.mark.parametrize("host", [b"localhost", b"evil.example"])
async def test_everything_but_the_probes_and_the_page_needs_it(
    app: ASGIApp, placements: Placements, path: str, method: str, sent: list[bytes], host: bytes
) -> None:
    answer = await asked(app, path, method, *sent, host=host)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    line = token_fault(sent, TOKEN)
    if path.startswith("/v1"):
        assert answer.error == line
    else:
        assert answer.body.decode() == f"401 {line}\n"
    assert answer.headers["cache-control"] == "no-store"
    assert (placements.asked, placements.told) == ([], [])


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("sent", [[], [b"Bearer wrong"], [GOOD, GOOD], [b"\xff\xfe\0"], [GOOD]])
@pytest.mark.parametrize("host", [b"localhost", b"west.example"])
async def test_the_probes_and_the_page_do_not(app: ASGIApp, path: str, sent: list[bytes], host: bytes) -> None:
    answer = await asked(app, path, "GET", *sent, host=host)
    assert (answer.status, "www-authenticate" in answer.headers) == (200, False)


@pytest.mark.parametrize("host", [b"localhost", b"west.example:9465", b"192.0.2.7", b"["])
async def test_with_it_every_name_is_good(app: ASGIApp, placements: Placements, host: bytes) -> None:
    """The names of an interface that is bound wide are not known here."""
    statuses = {
        (path, method): (await asked(app, path, method, GOOD, host=host)).status
        for path in ("/v1/capacity", "/v1/place", "/v1/x", "/x")
        for method in ("GET", "POST")
    }
    assert statuses == {
        ("/v1/capacity", "GET"): 200,
        ("/v1/capacity", "POST"): 405,
        ("/v1/place", "GET"): 200,
        ("/v1/place", "POST"): 200,
        ("/v1/x", "GET"): 404,
        ("/v1/x", "POST"): 404,
        ("/x", "GET"): 404,
        ("/x", "POST"): 404,
    }
    assert placements.reserved == 1


@pytest.mark.parametrize("path", ["/v1/place", "/v1/place/x/outcome"])
async def test_a_post_still_comes_from_the_own_page_and_is_json(
    app: ASGIApp, placements: Placements, path: str
) -> None:
    token = (b"authorization", GOOD)
    answer = await post(app, {}, token, (b"origin", b"https://evil.example"), path=path)
    assert answer.status == 403
    headers = [(b"host", b"west"), token, (b"content-type", b"text/plain")]
    assert (await ask(app, path, method="POST", headers=headers, body=[b"{}"])).status == 415
    assert (placements.asked, placements.told) == ([], [])
    answer = await post(app, {"namespace": "a", "env": "b"}, token, (b"origin", b"http://localhost:9465"))
    assert answer.status == 200


@given(
    st.sampled_from([*CLOSED, *OPEN]) | st.text(max_size=20),
    st.sampled_from(["GET", "HEAD", "POST", "OPTIONS", "BREW"]),
    AUTHORIZATIONS,
)
def test_whatever_is_sent_nothing_crashes_and_nothing_passes(path: str, method: str, sent: list[bytes]) -> None:
    placements = Placements(Registry("west", ttl=30.0, clock=lambda: 100.0))
    app = admin_app(placements.answers, host="127.0.0.1", token=lambda: TOKEN)
    answer = trio.run(asked, app, path, method, *sent)
    assert answer.status < 500
    assert (answer.status == 401) == (path not in OPEN and not holds_it(sent))
    if answer.status == 401:
        assert placements.asked == []
        assert TOKEN.encode() not in answer.body
        for header in answer.headers.values():
            assert TOKEN not in header


async def test_the_token_of_the_moment_counts(placements: Placements) -> None:
    tokens = ["first-of-them", "second-of-them"]
    app = admin_app(placements.answers, host="127.0.0.1", token=lambda: tokens[0])
    for token in list(tokens):
        assert (await asked(app, "/v1/place", "GET", b"Bearer " + token.encode())).status == 200
        others = [other for other in ("first-of-them", "second-of-them") if other != token]
        assert (await asked(app, "/v1/place", "GET", b"Bearer " + others[0].encode())).status == 401
        del tokens[0]


async def test_no_answer_without_it_lets_another_site_read_it(app: ASGIApp) -> None:
    """Nor learn that a token would be taken from there: a preflight is answered as everything else is."""
    for path in (*CLOSED, *OPEN):
        headers = [
            (b"host", b"localhost"),
            (b"origin", b"https://evil.example"),
            (b"access-control-request-method", b"GET"),
            (b"access-control-request-headers", b"authorization"),
        ]
        answer = await ask(app, path, method="OPTIONS", headers=headers)
        assert answer.status == (405 if path in OPEN else 401)
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_over_a_socket_and_in_no_log(
    serve_admin: ServeAdmin,
    client: httpx.AsyncClient,
    placements: Placements,
    logs: list[EventDict],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> dict[str, object]:
        raise RuntimeError("no state")

    port = await serve_admin(
        answers(readiness=fail, registry=placements.router.registry, place=None), token=lambda: TOKEN
    )
    url = f"http://127.0.0.1:{port}"
    with caplog.at_level(logging.DEBUG, "trio_federation"):
        good = {"authorization": f"bearer {TOKEN}"}
        assert (await client.get(f"{url}/v1/capacity", headers=good)).status_code == 200
        assert (await client.get(f"{url}/readyz", headers=good)).status_code == 503
        for headers in ([], [("authorization", f"Bearer {TOKEN}-and-more")], [*good.items(), *good.items()]):
            response = await client.get(f"{url}/v1/capacity", headers=headers)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            assert TOKEN not in response.text
            assert list(response.json()) == ["error"]
    assert [line["event"] for line in logs] == ["answer_failed"]
    assert TOKEN not in repr(logs) + caplog.text


async def test_a_token_that_cannot_be_told_lets_nobody_in(
    serve_admin: ServeAdmin, client: httpx.AsyncClient, placements: Placements, logs: list[EventDict]
) -> None:
    def lost() -> str:
        raise RuntimeError("no token")

    url = f"http://127.0.0.1:{await serve_admin(placements.answers, token=lost)}"
    for headers in ({}, {"authorization": "Bearer x"}):
        response = await client.get(f"{url}/v1/place?namespace=a&env=b", headers=headers)
        assert response.status_code == 500
    assert placements.asked == []
    assert [line["event"] for line in logs] == ["http_answer_failed"] * 2


async def test_a_body_that_never_comes_ends_with_its_time(
    serve_admin: ServeAdmin, connect: Connect, clock: trio.testing.MockClock, placements: Placements
) -> None:
    port = await serve_admin(placements.answers, token=lambda: TOKEN)
    stream = await connect(port, b"POST /v1/place HTTP/1.1\r\nHost: test\r\nContent-Length: 1000\r\n\r\nx")
    await pass_time(clock, REQUEST_TIMEOUT, port)
    await read_to_end(stream)
    assert placements.asked == []

"""The client against scripted peers on real sockets: what it sends, what it makes of answers and of silence, and that
it leaves nothing behind, however it is left."""

from __future__ import annotations

import gc
import gzip
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import trio
import trio.testing

from tests.kubernetes.peers import (
    SOON,
    Authority,
    FixedCredential,
    Proxy,
    Request,
    Server,
    Wire,
    access_to,
    client_for,
    fine,
    proxying,
    serving,
)
from trio_federation_kubernetes.access import Access
from trio_federation_kubernetes.client import KEEPALIVE_OPTIONS, Answer, ApiClient
from trio_federation_kubernetes.errors import (
    AnswerError,
    ApiError,
    Cause,
    CredentialError,
    KubeconfigError,
    KubernetesError,
    UnreachableError,
)

#: a deadline that is meant to pass, in seconds
SHORT = 0.5
TOKEN = "Bearer not-for-logs-7d1f"
#: what is applied
BODY = json.dumps({"status": {"clusters": [{"clusterID": "é\N{SNOWMAN}"}]}}, ensure_ascii=False).encode()
APPLIED_AS = {"fieldManager": "trio-federation", "fieldValidation": "Strict"}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@asynccontextmanager
async def talking(handler: Any = fine, **more: Any) -> AsyncIterator[tuple[ApiClient, Server]]:
    """A client to a server without TLS."""
    async with serving(handler) as server, client_for(access_to(f"http://127.0.0.1:{server.port}"), **more) as client:
        yield client, server


@asynccontextmanager
async def signed(
    authority: Authority, credential: Any, handler: Any = fine, **more: Any
) -> AsyncIterator[tuple[ApiClient, Server]]:
    """A client with a credential, to a server with TLS."""
    async with serving(handler, authority.server("127.0.0.1")) as server:
        access = access_to(f"https://127.0.0.1:{server.port}", ca=authority.pem, credential=credential)
        async with client_for(access, **more) as client:
            yield client, server


async def failure(call: Callable[[], Awaitable[object]], kind: type[KubernetesError]) -> Any:
    """The error of this kind, of which something is expected of all: one line, with a cause."""
    with pytest.raises(kind) as caught:
        await call()
    assert "\n" not in str(caught.value)
    return caught.value


def applying(
    client: ApiClient, path: str = "/a", *, body: bytes = BODY, deadline: float = 10
) -> Callable[[], Awaitable[Answer]]:
    """One apply, to be called."""
    return lambda: client.apply(path, APPLIED_AS, body, deadline=deadline)


def asking(client: ApiClient, method: str, path: str = "/a") -> Callable[[], Awaitable[Answer]]:
    """One plain request, to be called."""
    return applying(client, path) if method == "PATCH" else lambda: client.get(path)


async def content_of(client: ApiClient, *, deadline: float = 5) -> bytes:
    """All that a stream has to say."""
    async with client.stream("/a", deadline=deadline) as chunks:
        return b"".join([chunk async for chunk in chunks])


# --- what is asked


async def test_what_a_request_says(authority: Authority) -> None:
    async with signed(authority, FixedCredential(TOKEN)) as (client, server):
        params = {"labelSelector": "a=b+c,d in (é,f)", "continue": "x/y==&z", "limit": "500"}
        await client.get("/apis/agents/v1/things", params)
        async with client.stream("/apis/agents/v1/things", {"watch": "1"}, deadline=5) as chunks:
            assert b"".join([chunk async for chunk in chunks]) == b'{"kind": "List"}'
    first, second = server.requests
    assert urlsplit(first.target).path == "/apis/agents/v1/things"
    assert {name: values[0] for name, values in parse_qs(urlsplit(first.target).query).items()} == params
    for request, encoding in ((first, "gzip"), (second, "identity")):
        assert request.headers["authorization"] == TOKEN
        assert request.headers["accept"] == "application/json"
        assert request.headers["accept-encoding"] == encoding
        assert request.headers["user-agent"].startswith("trio-federation-kubernetes/")
    assert first.connection != second.connection


async def test_what_an_apply_says(authority: Authority) -> None:
    async with signed(authority, FixedCredential(TOKEN)) as (client, server):
        answer = await applying(client, "/apis/agents/v1/things/a/status")()
        assert answer.body == b'{"kind": "List"}'
        await client.get("/a")
    first, second = server.requests
    assert (first.method, first.body) == ("PATCH", BODY)
    url = urlsplit(first.target)
    assert url.path == "/apis/agents/v1/things/a/status"
    assert {name: values[0] for name, values in parse_qs(url.query).items()} == APPLIED_AS
    assert first.headers["content-type"] == "application/apply-patch+yaml"
    assert first.headers["content-length"] == str(len(BODY))
    for request in (first, second):
        assert request.headers["authorization"] == TOKEN
        assert request.headers["accept"] == "application/json"
        assert request.headers["accept-encoding"] == "gzip"
        assert request.headers["user-agent"].startswith("trio-federation-kubernetes/")
        assert request.connection == 0
    # and nothing of it is left for the next
    assert (second.method, second.body) == ("GET", b"")
    assert "content-type" not in second.headers


@pytest.mark.parametrize("size", [0, 1, 3 * 2**20])
async def test_bodies_of_any_size_are_applied(authority: Authority, size: int) -> None:
    body = Random(size).randbytes(size)
    async with signed(authority, FixedCredential(TOKEN)) as (client, server):
        await applying(client, body=body)()
    assert server.requests[0].body == body


async def test_a_server_below_a_path() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(fine))
        access = access_to(f"http://127.0.0.1:{server.port}/k8s/clusters/c-1")
        client = await stack.enter_async_context(client_for(access))
        await client.get("/api/v1/pods", {})
    assert server.requests[0].target == "/k8s/clusters/c-1/api/v1/pods"


async def test_no_credential_is_sent_in_the_clear() -> None:
    async with serving(refusing(401)) as server:
        credential = FixedCredential(TOKEN)
        async with client_for(access_to(f"http://127.0.0.1:{server.port}", credential=credential)) as client:
            error = await failure(lambda: client.get("/api"), ApiError)
    assert "over http, no credential is sent" in str(error)
    assert credential.refusals == 0
    (request,) = server.requests
    assert "authorization" not in request.headers


async def test_requests_in_turn_share_a_connection_and_streams_have_their_own() -> None:
    async with talking() as (client, server):
        for _ in range(3):
            await client.get("/a")
        async with client.stream("/b", deadline=5) as chunks:
            await client.get("/a")
            assert [chunk async for chunk in chunks]
        await client.get("/a")
        assert [request.connection for request in server.requests] == [0, 0, 0, 1, 0, 0]


async def test_cookies_are_not_kept() -> None:
    async def handler(_request: Request, wire: Wire) -> None:
        await wire.answer("{}", headers={"Set-Cookie": "session=not-ours"})

    async with talking(handler) as (client, server):
        await client.get("/a")
        await client.get("/a")
        assert all("cookie" not in request.headers for request in server.requests)


async def test_a_client_is_used_inside_of_its_block() -> None:
    async with talking() as (client, server):
        pass
    with pytest.raises(RuntimeError, match="inside of its"):
        await client.get("/a")
    assert server.requests == []


# --- answers


async def test_a_packed_answer_is_unpacked() -> None:
    body = json.dumps({"items": list(range(1000))}).encode()

    async def handler(_request: Request, wire: Wire) -> None:
        await wire.answer(gzip.compress(body), headers={"Content-Encoding": "gzip"})

    async with talking(handler) as (client, _):
        assert (await client.get("/a")).body == body
        assert (await applying(client)()).body == body


async def test_an_answer_that_cannot_be_unpacked() -> None:
    async def handler(_request: Request, wire: Wire) -> None:
        await wire.answer(b"nothing of the kind", headers={"Content-Encoding": "gzip"})

    async with talking(handler) as (client, _):
        for method in ("GET", "PATCH"):
            assert "cannot be unpacked" in str(await failure(asking(client, method), AnswerError))
        with pytest.raises(AnswerError, match="cannot be unpacked"):
            await content_of(client)


@pytest.mark.parametrize("size", [0, 1, 2**20, 3 * 2**20 + 1])
async def test_packed_answers_of_any_size(size: int) -> None:
    body = Random(1).randbytes(size // 2) + bytes(size - size // 2)

    async def handler(_request: Request, wire: Wire) -> None:
        await wire.answer(gzip.compress(body, 1), headers={"Content-Encoding": "GZIP"})

    async with talking(handler) as (client, _):
        assert (await client.get("/a")).body == body
        assert await content_of(client) == body


async def test_a_packed_answer_that_is_cut_short() -> None:
    async def handler(request: Request, wire: Wire) -> None:
        encoding = "br" if request.target == "/br" else "gzip"
        await wire.answer(gzip.compress(b"x" * 1000)[:-9], headers={"Content-Encoding": encoding})

    async with talking(handler) as (client, _):
        assert "ends too early" in str(await failure(lambda: client.get("/a"), AnswerError))
        assert "'br'" in str(await failure(lambda: client.get("/br"), AnswerError))


@pytest.mark.parametrize("form", ["declared", "chunked", "packed"])
@pytest.mark.parametrize("method, remedy", [("GET", "ask for smaller pages"), ("PATCH", "see what answers there")])
async def test_too_large_an_answer(form: str, method: str, remedy: str) -> None:
    async def handler(request: Request, wire: Wire) -> None:
        if request.target == "/small":
            await wire.answer("{}")
            return
        if form == "declared":
            await wire.begin(headers={"Content-Length": "100001"})
        elif form == "packed":
            await wire.answer(gzip.compress(b" " * 100_001), headers={"Content-Encoding": "gzip"})
        else:
            await wire.begin_chunks()
            for _ in range(1001):
                await wire.chunk(b" " * 100)
        await wire.wait_closed()

    async with talking(handler, largest_body=100_000) as (client, server):
        # on a connection that was kept, too
        for _ in range(2):
            error = await failure(asking(client, method), AnswerError)
            assert "more than the 100000 bytes" in str(error)
            assert remedy in str(error)
            # the rest is not read
            await server.wires[-1].closed.wait()
            await client.get("/small")
        assert [request.connection for request in server.requests] == [0, 1, 1, 2]


async def test_the_largest_answer_is_taken() -> None:
    async def handler(_request: Request, wire: Wire) -> None:
        await wire.answer(b" " * 100_000)

    async with talking(handler, largest_body=100_000) as (client, _):
        assert len((await client.get("/a")).body) == 100_000


# --- refusals


def refusing(status: int, body: Any = b"", **headers: str) -> Any:
    async def handler(_request: Request, wire: Wire) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await wire.answer(body, status, named)

    return handler


async def refusal(status: int, body: Any = b"", **headers: str) -> ApiError:
    async with talking(refusing(status, body, **headers)) as (client, server):
        error = await failure(lambda: client.get("/apis/a"), ApiError)
        async with AsyncExitStack() as stack:
            with pytest.raises(ApiError) as caught:
                await stack.enter_async_context(client.stream("/apis/a", deadline=5))
        assert str(caught.value) == str(error)
        # an apply is refused in the same words, and in those of the request
        other = await failure(applying(client, "/apis/a"), ApiError)
        assert str(other) == str(error).replace("http://", "PATCH http://", 1)
        assert {**vars(other), "args": ()} == {**vars(error), "args": ()}
        assert f"http://127.0.0.1:{server.port}/apis/a" in str(error)
        assert error.code == status
        assert isinstance(error, ApiError)
        return error


async def test_a_status_object() -> None:
    error = await refusal(
        410,
        {
            "kind": "Status",
            "metadata": {"continue": "t2"},
            "message": "The provided continue parameter is too old\nto display",
            "reason": "Expired",
            "details": {
                "causes": [
                    {"reason": "ResourceVersionTooLarge", "message": "x"},
                    {"message": "y"},
                    1,
                    {"reason": None},
                ],
                "retryAfterSeconds": 3,
            },
            "code": 410,
        },
    )
    assert error.status_reason == "Expired"
    assert error.message == "The provided continue parameter is too old to display"
    assert error.continue_token == "t2"
    assert error.causes == (Cause("ResourceVersionTooLarge", "", "x"), Cause(message="y"))
    assert error.retry_after == 3
    assert "410 Expired: The provided" in str(error)


def conflict(*fields: str) -> dict[str, Any]:
    """What an API server says to an apply of fields that are "ops"'s."""
    owner = 'conflict with "ops" with subresource "status" using agents.navix.sh/v1alpha1'
    return {
        "kind": "Status",
        "status": "Failure",
        "message": f"Apply failed with {len(fields)} conflicts: " + "\n- ".join((owner, *fields)),
        "reason": "Conflict",
        "details": {
            "causes": [{"reason": "FieldManagerConflict", "message": owner, "field": field} for field in fields]
        },
        "code": 409,
    }


async def test_a_conflict() -> None:
    fields = ['.status.clusters[clusterID="east"].isLocal', ".status.federation.clusters"]
    error = await refusal(409, conflict(*fields))
    assert (error.code, error.status_reason) == (409, "Conflict")
    assert [cause.field for cause in error.causes] == fields
    assert {cause.reason for cause in error.causes} == {"FieldManagerConflict"}
    assert "/apis/a: 409 Conflict: Apply failed with 2 conflicts" in str(error)


async def test_a_conflict_about_a_whole_env() -> None:
    """It has some 250 kB, and API servers pack so much."""
    pools = [f'[clusterID="cluster-{number // 5}"].observedMembers[name="pool-{number % 5}"]' for number in range(100)]
    fields = [f".status.clusters{pool}.field{number}" for pool in pools for number in range(9)]
    body = gzip.compress(json.dumps(conflict(*fields)).encode())
    error = await refusal(409, body, Content_Encoding="gzip", Content_Type="application/json")
    assert [cause.field for cause in error.causes] == fields


@pytest.mark.parametrize(
    "body, media_type, message",
    [
        (b"", "", ""),
        (b"no healthy upstream", "text/plain", "no healthy upstream"),
        (b"slow\r\n\x1b[31m down\xff", "text/plain; charset=utf-8", "slow [31m down\ufffd"),
        (b"<html>Bad gateway</html>", "text/html", ""),
        (b'{"message": "not a Status"}', "application/json", ""),
        (b'{"kind": "Status", "message": 1, "reason": [], "metadata": [], "details": "x"}', "", ""),
        (b'{"kind": "Status", "message": null, "details": {"causes": {}, "retryAfterSeconds": true}}', "", ""),
        (b'{"kind": "Status", "message": "m", "details": {"retryAfterSeconds": -1}}', "", "m"),
        (b'{"kind": "Status", "message": "m", "details": {"retryAfterSeconds": 1e400}}', "", "m"),
        (b'{"kind": "Status", "message": "' + b"x" * 1000 + b'"}', "", "x" * 499 + "…"),
        (b"[" * 50_000, "application/json", ""),
        (b"z" * 1_000_000, "text/plain", "z" * 499 + "…"),
    ],
)
async def test_whatever_comes_with_a_refusal(body: bytes, media_type: str, message: str) -> None:
    error = await refusal(500, body, Content_Type=media_type)
    assert error.message == message
    assert (error.retry_after, error.continue_token, error.causes, error.status_reason) == (None, "", (), "")
    assert "500 Internal Server Error" in str(error)
    assert len(str(error)) < 700


@pytest.mark.parametrize(
    "header, seconds",
    [
        ("7", 7.0),
        ("0", 0.0),
        (" 7 ", 7.0),
        ("Fri, 01 Jan 2027 00:00:20 GMT", 20.0),
        ("Fri, 01 Jan 2027 00:00:20 -0000", 20.0),
        ("Thu, 31 Dec 2026 23:00:00 GMT", 0.0),
        ("soon", 3.0),
        ("-1", 3.0),
        ("1.5", 3.0),
        ("9" * 400, 3.0),
        ("\u0667", 3.0),
    ],
)
async def test_retry_after(header: str, seconds: float) -> None:
    body = {"kind": "Status", "reason": "TooManyRequests", "details": {"retryAfterSeconds": 3}}
    error = await refusal(429, body, Retry_After=header, Date="Fri, 01 Jan 2027 00:00:00 GMT")
    assert error.retry_after == seconds


async def test_a_date_to_retry_after_without_a_date_of_the_answer() -> None:
    assert (await refusal(503, Retry_After="Fri, 01 Jan 2027 00:00:20 GMT")).retry_after is None


async def test_a_refusal_whose_text_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_federation_kubernetes.client.ERROR_BODY_DEADLINE", SHORT)

    async def handler(_request: Request, wire: Wire) -> None:
        await wire.begin(503, {"Content-Type": "text/plain", "Content-Length": "100"})
        await wire.send(b"leader changed")
        await wire.wait_closed()

    async with talking(handler) as (client, _):
        error = await failure(lambda: client.get("/a"), ApiError)
        assert error.message == "leader changed"


async def test_a_refusal_whose_text_cannot_be_unpacked() -> None:
    for encoding in ("gzip", "br"):
        assert (await refusal(503, "nothing", Content_Encoding=encoding, Content_Type="text/plain")).message == ""


async def test_a_refusal_whose_text_breaks_off() -> None:
    async def handler(_request: Request, wire: Wire) -> None:
        await wire.begin(503, {"Content-Type": "text/plain", "Content-Length": "100"})
        await wire.send(b"leader changed")
        await wire.stream.aclose()

    async with talking(handler) as (client, _):
        assert (await failure(lambda: client.get("/a"), ApiError)).code == 503


@pytest.mark.parametrize("location", ["https://login.test/start?ticket=s3cret", "/elsewhere", "http://[", ""])
async def test_redirects_are_not_followed(location: str) -> None:
    async with talking(refusing(302, Location=location)) as (client, server):
        for number, method in enumerate(("GET", "PATCH"), 1):
            error = await failure(asking(client, method), AnswerError)
            assert len(server.requests) == number
            assert "redirect" in str(error)
            assert "s3cret" not in str(error)
            assert ("to login.test" in str(error)) is location.startswith("https")


# --- credentials


class Rotating:
    """A credential that is a new one each time it was refused."""

    def __init__(self) -> None:
        self.refusals = 0

    async def authorization(self) -> str:
        await trio.lowlevel.checkpoint()
        return f"Bearer number-{self.refusals}"

    async def client_certificate(self) -> None:
        return None

    def refused(self) -> None:
        self.refusals += 1


def only_with(*values: str) -> Any:
    async def handler(request: Request, wire: Wire) -> None:
        good = request.headers.get("authorization") in values
        await (wire.answer("fine") if good else wire.answer({"kind": "Status", "reason": "Unauthorized"}, 401))

    return handler


async def test_a_refused_credential_is_renewed_once(authority: Authority) -> None:
    credential = Rotating()
    async with signed(authority, credential, only_with("Bearer number-1")) as (client, server):
        assert (await client.get("/a")).body == b"fine"
        assert credential.refusals == 1
        assert [request.headers["authorization"] for request in server.requests] == [
            "Bearer number-0",
            "Bearer number-1",
        ]
        assert (await client.get("/a")).body == b"fine"
        assert credential.refusals == 1


async def test_a_renewed_credential_applies_the_same_again(authority: Authority) -> None:
    credential = Rotating()
    async with signed(authority, credential, only_with("Bearer number-1")) as (client, server):
        assert (await applying(client)()).body == b"fine"
        assert credential.refusals == 1
    assert [(request.method, request.body, request.headers["authorization"]) for request in server.requests] == [
        ("PATCH", BODY, "Bearer number-0"),
        ("PATCH", BODY, "Bearer number-1"),
    ]
    assert server.requests[0].target == server.requests[1].target


async def test_a_stream_renews_a_refused_credential(authority: Authority) -> None:
    credential = Rotating()
    async with signed(authority, credential, only_with("Bearer number-1")) as (client, _):
        assert await content_of(client) == b"fine"
    assert credential.refusals == 1


async def test_a_credential_that_is_refused_again_is_an_error(authority: Authority) -> None:
    for credential in (Rotating(), FixedCredential(TOKEN), FixedCredential(None)):
        async with signed(authority, credential, only_with()) as (client, server):
            error = await failure(lambda client=client: client.get("/a"), ApiError)  # type: ignore[misc]
            assert (error.code, error.reason) == (401, "unauthorized")
            assert len(server.requests) == 2
            assert credential.refusals == 1


async def test_those_who_are_refused_together_renew_the_credential_once(authority: Authority) -> None:
    credential = Rotating()
    arrived = 0
    all_there = trio.Event()

    async def handler(request: Request, wire: Wire) -> None:
        nonlocal arrived
        if request.headers["authorization"] == "Bearer number-0":
            arrived += 1
            if arrived == 5:
                all_there.set()
            await all_there.wait()
        await only_with("Bearer number-1")(request, wire)

    async with signed(authority, credential, handler) as (client, server):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(client.get, "/a")
        assert credential.refusals == 1
        assert len(server.requests) == 10


@pytest.mark.parametrize("secret", ["Bearer s3cret\n", "Bearer s3cret\r\nX: y", "Bearer s3crét", "", " Bearer s3cret"])
async def test_a_credential_that_no_header_may_have(authority: Authority, secret: str) -> None:
    async with signed(authority, FixedCredential(secret)) as (client, server):
        error = await failure(lambda: client.get("/a"), CredentialError)
        assert server.requests == []
    while error is not None:
        assert "s3cr" not in repr(error)
        error = error.__cause__ or error.__context__


async def test_a_server_that_quotes_the_credential(authority: Authority) -> None:
    async def handler(request: Request, wire: Wire) -> None:
        text = "x" * 490 + request.headers["authorization"]
        if request.target == "/status":
            await wire.answer({"kind": "Status", "message": text, "reason": text}, 403)
        else:
            await wire.answer(text, 403, {"Content-Type": "text/plain"})

    async with signed(authority, FixedCredential(TOKEN), handler) as (client, _):
        for path in ("/status", "/text"):
            error = await failure(lambda path=path: client.get(path), ApiError)  # type: ignore[misc]
            for text in (str(error), error.message, error.status_reason):
                assert "Bearer n" not in text
                assert "not-for" not in text


class Failing(FixedCredential):
    async def authorization(self) -> str | None:
        raise CredentialError("the plugin failed")


class Sleeping(FixedCredential):
    async def authorization(self) -> str | None:
        await trio.sleep_forever()
        return None


async def test_credentials_that_cannot_be_had(authority: Authority) -> None:
    async with signed(authority, Failing()) as (client, server):
        assert str(await failure(lambda: client.get("/a"), CredentialError)) == "the plugin failed"
        with pytest.raises(CredentialError, match="the plugin failed"):
            async with client.stream("/a", deadline=5):
                pass
    async with signed(authority, Sleeping(), headers_deadline=SHORT / 4, credential_deadline=SHORT) as (client, server):
        # what makes one has its own time
        error = await failure(lambda: client.get("/a", deadline=SHORT / 4), CredentialError)
        assert f"no credential within {SHORT} s" in str(error)
        # a stream's answer has to begin soon once there is a credential
        with pytest.raises(CredentialError, match=f"no credential within {SHORT} s"):
            async with client.stream("/a", deadline=SHORT):
                pass
        assert server.requests == []


async def test_a_new_client_certificate_ends_what_was_opened_with_the_old(authority: Authority) -> None:
    context = authority.server("127.0.0.1")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.pem.decode())
    shown: list[bytes | None] = []

    async def handler(request: Request, wire: Wire) -> None:
        assert isinstance(wire.stream, trio.SSLStream)
        shown.append(wire.stream.getpeercert(binary_form=True))
        if request.target == "/get":
            await wire.answer("{}")
        else:
            await wire.begin_chunks()
            await wire.wait_closed()

    credential = FixedCredential(certificate=authority.issue("ana@users.test"))
    async with serving(handler, context) as server:
        access = access_to(f"https://127.0.0.1:{server.port}", ca=authority.pem, credential=credential)
        async with client_for(access) as client, trio.open_nursery() as nursery:

            async def watch() -> None:
                async with client.stream("/watch", deadline=60) as chunks:
                    await client.get("/get")
                    credential.certificate = authority.issue("ana@users.test")
                    nursery.start_soon(client.get, "/get")
                    await anext(chunks)

            await client.get("/get")
            with pytest.raises(UnreachableError, match="client certificate has changed"):
                await watch()
            # kept connections of the old one are closed, too
            for wire in server.wires[:2]:
                await wire.closed.wait()
            async with client.stream("/watch", deadline=60):
                await client.get("/get")
        assert len(shown) == 6
        assert shown[0] == shown[1] == shown[2]
        assert shown[3] == shown[4] == shown[5] != shown[0]
        assert [request.connection for request in server.requests] == [0, 1, 0, 2, 3, 2]


async def test_an_exec_plugins_certificate_does_not_matter_where_the_kubeconfig_has_one(authority: Authority) -> None:
    credential = FixedCredential(certificate=authority.issue("ana@users.test"))
    async with serving(endless, authority.server("127.0.0.1")) as server:
        access = access_to(
            f"https://127.0.0.1:{server.port}",
            ca=authority.pem,
            credential=credential,
            client_certificate=authority.issue("ana@users.test"),
        )
        async with client_for(access) as client, client.stream("/a", deadline=60):
            credential.certificate = authority.issue("ana@users.test")
            async with client.stream("/a", deadline=60) as chunks:
                assert await anext(chunks)


# --- silence


async def test_a_server_that_accepts_and_says_nothing() -> None:
    async def handler(_request: Request, wire: Wire) -> None:
        await wire.wait_closed()

    async with talking(handler, headers_deadline=SHORT) as (client, server):
        error = await failure(lambda: client.get("/apis/a", deadline=SHORT), UnreachableError)
        assert f"http://127.0.0.1:{server.port}/apis/a: not done within {SHORT} s (waiting for the answer)" in str(
            error
        )
        await server.wires[0].closed.wait()
        with pytest.raises(UnreachableError, match=rf"not done within {SHORT} s \(waiting"):
            async with client.stream("/apis/a", deadline=60):
                pass
        await server.wires[1].closed.wait()


@asynccontextmanager
async def deaf(size: int) -> AsyncIterator[tuple[ApiClient, trio.SocketListener, bytes]]:
    """A client, a listener that takes its connections, and a body of this size."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with listeners[0], client_for(access_to(f"http://127.0.0.1:{port}")) as client:
        with trio.fail_after(SOON):
            yield client, listeners[0], bytes(size)


@pytest.mark.parametrize(
    "size, step",
    [
        (1000, "waiting for the answer"),
        # more than the buffers of two sockets hold
        (32 * 2**20, "sending the request"),
    ],
)
async def test_a_server_that_reads_no_more_than_the_head(size: int, step: str) -> None:
    async with deaf(size) as (client, listener, body), trio.open_nursery() as nursery:

        async def read_the_head() -> None:
            async with await listener.accept() as stream:
                assert (await stream.receive_some(20)).startswith(b"PATCH /a?fieldManage")
                await stop.wait()
                # it was closed, and nothing more was sent
                with suppress(trio.BrokenResourceError):
                    while await stream.receive_some():
                        pass

        stop = trio.Event()
        nursery.start_soon(read_the_head)
        error = await failure(applying(client, body=body, deadline=SHORT), UnreachableError)
        assert f"/a: not done within {SHORT} s ({step})" in str(error)
        assert ": PATCH http://127.0.0.1:" in str(error)
        stop.set()


async def test_headers_that_never_end() -> None:
    async def drip(_request: Request, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await wire.send(b"X: y\r\n")
            await trio.sleep(SHORT / 4)

    async def flood(_request: Request, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await wire.send(b"X: y\r\n" * 1000)

    async with talking(drip, headers_deadline=SHORT) as (client, server):
        await failure(lambda: client.get("/a", deadline=SHORT), UnreachableError)
        with pytest.raises(UnreachableError):
            async with client.stream("/a", deadline=60):
                pass
        for wire in server.wires:
            await wire.closed.wait()
    async with talking(flood) as (client, server):
        await failure(lambda: client.get("/a", deadline=60), UnreachableError)
        await server.wires[0].closed.wait()


async def test_a_body_that_takes_too_long() -> None:
    async def drip(_request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        while True:
            await wire.chunk(b" ")
            await trio.sleep(SHORT / 8)

    async with talking(drip) as (client, server):
        error = await failure(lambda: client.get("/a", deadline=SHORT), UnreachableError)
        assert "(reading the answer)" in str(error)
        with pytest.raises(UnreachableError, match=rf"not done within {SHORT} s \(reading"):
            await content_of(client, deadline=SHORT)
        for wire in server.wires:
            await wire.closed.wait()


async def test_a_streams_deadline_holds_for_the_whole_block() -> None:
    async with talking() as (client, _):
        with pytest.raises(UnreachableError, match=f"not done within {SHORT} s"):
            async with client.stream("/a", deadline=SHORT):
                await trio.sleep_forever()


async def test_a_server_that_does_not_shake_hands(authority: Authority) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with listeners[0]:
        access = access_to(f"https://127.0.0.1:{port}", ca=authority.pem)
        async with client_for(access, connect_deadline=SHORT) as client:
            error = await failure(lambda: client.get("/a", deadline=60), UnreachableError)
            assert "no connection in time (TLS handshake)" in str(error)
            error = await failure(lambda: client.get("/a", deadline=SHORT / 2), UnreachableError)
            assert f"not done within {SHORT / 2} s (TLS handshake)" in str(error)
            with trio.fail_after(SOON):
                for _ in range(2):
                    async with await listeners[0].accept() as stream:
                        while await stream.receive_some():
                            pass


async def test_nobody_there() -> None:
    async with client_for(access_to("http://127.0.0.1:1")) as client:
        error = await failure(lambda: client.get("/a"), UnreachableError)
        assert "Connection refused (connecting)" in str(error)
        assert error.__cause__ is not None
        with pytest.raises(UnreachableError, match="refused"):
            async with client.stream("/a", deadline=5):
                pass


async def test_a_name_that_is_none() -> None:
    async with client_for(access_to("http://nowhere.invalid")) as client:
        await failure(lambda: client.get("/a", deadline=5), UnreachableError)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n123",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"SSH-2.0-nothing\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
    ],
)
async def test_an_answer_that_breaks_off(start: bytes) -> None:
    async def handler(_request: Request, wire: Wire) -> None:
        await wire.send(start)
        await wire.stream.aclose()

    async with talking(handler) as (client, _):
        await failure(lambda: client.get("/a"), UnreachableError)
        with pytest.raises(UnreachableError):
            await content_of(client)


@pytest.mark.parametrize("method", ["GET", "PATCH"])
async def test_a_kept_connection_that_the_server_has_closed_is_no_error(method: str) -> None:
    async def handler(request: Request, wire: Wire) -> None:
        # closes when asked for the second time on one connection, as if it had been about to
        if [other.connection for other in server.requests].count(request.connection) > 1:
            await wire.stream.aclose()
        else:
            await wire.answer("{}")

    async with talking(handler) as (client, server):
        await client.get("/a")
        await asking(client, method, "/b")()
        assert [(urlsplit(request.target).path, request.connection) for request in server.requests] == [
            ("/a", 0),
            ("/b", 0),
            ("/b", 1),
        ]
        assert server.requests[1].body == server.requests[2].body == (BODY if method == "PATCH" else b"")
        assert server.requests[2].method == method


@pytest.mark.parametrize("method", ["GET", "PATCH"])
async def test_a_kept_connection_is_made_anew_once(method: str) -> None:
    async def handler(request: Request, wire: Wire) -> None:
        await (wire.answer("{}") if request.target == "/first" else wire.stream.aclose())

    async with talking(handler) as (client, server):
        await client.get("/first")
        await failure(asking(client, method), UnreachableError)
        assert [request.connection for request in server.requests] == [0, 0, 1]


@pytest.mark.parametrize("method", ["GET", "PATCH"])
async def test_a_new_connection_that_breaks_is_not_tried_again(method: str) -> None:
    async def handler(_request: Request, wire: Wire) -> None:
        await wire.stream.aclose()

    async with talking(handler) as (client, server):
        await failure(asking(client, method), UnreachableError)
        assert len(server.requests) == 1


# --- streams


@pytest.mark.parametrize("seed", range(5))
async def test_chunks_are_what_was_sent(seed: int) -> None:
    random = Random(seed)
    content = random.randbytes(100_000)

    async def handler(_request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        rest = content
        while rest:
            size = random.choice([1, 2, 7, 1000, 70_000])
            framed = b"%X;name=value\r\n%s\r\n" % (len(rest[:size]), rest[:size])
            cut = random.randrange(len(framed))
            await wire.send(framed[:cut])
            if random.random() < 0.1:
                await trio.lowlevel.checkpoint()
            await wire.send(framed[cut:])
            rest = rest[size:]
        await wire.chunk(b"")

    async with talking(handler) as (client, _), client.stream("/a", deadline=5) as chunks:
        assert b"".join([chunk async for chunk in chunks]) == content


async def test_a_chunk_comes_as_soon_as_it_is_there() -> None:
    go_on = trio.Event()

    async def handler(_request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        await wire.chunk(b"first")
        await go_on.wait()
        await wire.chunk(b"second")
        await wire.chunk(b"")

    async with talking(handler) as (client, _), client.stream("/a", deadline=5) as chunks:
        assert await anext(chunks) == b"first"
        go_on.set()
        assert await anext(chunks) == b"second"
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)


async def test_a_read_that_was_cancelled_does_not_look_like_the_end() -> None:
    async with talking(endless) as (client, _), client.stream("/a", deadline=60) as chunks:
        await anext(chunks)
        with trio.move_on_after(0.01):
            await anext(chunks)
        for _ in range(2):
            with pytest.raises(UnreachableError, match="an earlier read failed or was cancelled"):
                await anext(chunks)


class Oops(Exception):
    pass


async def fail_in_a_stream(client: ApiClient) -> None:
    async with client.stream("/a", deadline=60) as chunks:
        await anext(chunks)
        raise Oops


async def endless(_request: Request, wire: Wire) -> None:
    await wire.begin_chunks()
    await wire.chunk(b"x" * 1000)
    await wire.wait_closed()


async def test_leaving_a_stream_closes_its_connection(authority: Authority) -> None:
    async with signed(authority, FixedCredential(TOKEN), endless) as (client, server):
        async with client.stream("/a", deadline=60):
            pass
        async with client.stream("/a", deadline=60) as chunks:
            async for _ in chunks:
                break
        with pytest.raises(Oops):
            await fail_in_a_stream(client)
        with trio.CancelScope() as scope:
            async with client.stream("/a", deadline=60) as chunks:
                async for _ in chunks:
                    scope.cancel()
        assert scope.cancelled_caught
        # none of them waits for the collector of garbage
        for wire in server.wires:
            await wire.closed.wait()
        assert len(server.wires) == 4
        gc.collect()


async def test_closing_the_client_ends_its_streams() -> None:
    async with serving(endless) as server, trio.open_nursery() as nursery:
        client = client_for(access_to(f"http://127.0.0.1:{server.port}"))
        started = trio.Event()

        async def read() -> None:
            async with client.stream("/a", deadline=60) as chunks:
                async for _ in chunks:
                    started.set()

        async def watch() -> None:
            with pytest.raises(UnreachableError, match="the client was closed"):
                await read()

        async with client:
            nursery.start_soon(watch)
            await started.wait()
    await server.wires[0].closed.wait()


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope after so many steps of one task."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self.scope = trio.CancelScope()
        self.task: trio.lowlevel.Task | None = None

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self._left -= 1
            if self._left == 0:
                self.scope.cancel()


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.mark.parametrize(
    "way", ["plain", "direct", "tunnel", pytest.param("secure tunnel", marks=pytest.mark.slow), "forwarded"]
)
@pytest.mark.parametrize("how", ["stream", "get", "apply"])
async def test_nothing_is_left_of_what_is_cancelled_at_any_step(authority: Authority, way: str, how: str) -> None:
    async def handler(_request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        await wire.chunk(b"x" * 1000)
        await wire.chunk(b"y" * 1000)
        await wire.chunk(b"")

    async def use(client: ApiClient) -> None:
        if how == "stream":
            async with client.stream("/a", deadline=60) as chunks:
                await trio.lowlevel.checkpoint()
                async for _ in chunks:
                    await trio.lowlevel.checkpoint()
        elif how == "apply":
            await applying(client, body=bytes(300_000), deadline=60)()
        else:
            await client.get("/a", deadline=60)

    secure = way not in ("plain", "forwarded")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(handler, authority.server("127.0.0.1") if secure else None))
        proxy: Proxy | None = None
        address = None
        if way in ("tunnel", "secure tunnel", "forwarded"):
            context = authority.server("127.0.0.1") if way == "secure tunnel" else None
            proxy = await stack.enter_async_context(proxying(server.port, context))
            address = f"{'https' if context else 'http'}://127.0.0.1:{proxy.port}"
        access = access_to(
            f"{'https' if secure else 'http'}://127.0.0.1:{server.port}",
            ca=authority.pem,
            proxy=address,
            credential=FixedCredential(TOKEN),
        )
        await trio.testing.wait_all_tasks_blocked(0.01)
        before = open_files()
        for step in count(1):
            instrument = CancelAtStep(step)
            async with client_for(access) as client:
                trio.lowlevel.add_instrument(instrument)
                with instrument.scope:
                    instrument.task = trio.lowlevel.current_task()
                    await use(client)
                trio.lowlevel.remove_instrument(instrument)
                if how == "stream" or instrument.scope.cancelled_caught:
                    # before the client is closed; a request that was done keeps its connection
                    for closed in [wire.closed for wire in server.wires] + (proxy.closed if proxy else []):
                        await closed.wait()
                    await trio.testing.wait_all_tasks_blocked(0.001)
                    assert open_files() == before
            if not instrument.scope.cancelled_caught:
                break
        assert step > 5
    gc.collect()


# --- connections


def options_towards(port: int) -> list[dict[int, int]]:
    """The keepalive options of this process's connections to that port."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with duplicate:
            try:
                if duplicate.getpeername()[1] != port:
                    continue
            except (OSError, IndexError):
                continue
            found.append({option: duplicate.getsockopt(level, option) for level, option, _ in KEEPALIVE_OPTIONS})
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks at the process's own sockets")
@pytest.mark.parametrize("way", ["plain", "direct", "tunnel", "forwarded"])
async def test_connections_are_kept_under_watch(authority: Authority, way: str) -> None:
    secure = way in ("direct", "tunnel")
    async with (
        serving(endless, authority.server("127.0.0.1") if secure else None) as server,
        proxying(server.port) as proxy,
    ):
        proxied = way in ("tunnel", "forwarded")
        access = access_to(
            f"{'https' if secure else 'http'}://127.0.0.1:{server.port}",
            ca=authority.pem,
            proxy=f"http://127.0.0.1:{proxy.port}" if proxied else None,
        )
        async with client_for(access) as client, client.stream("/a", deadline=60) as chunks:
            await anext(chunks)
            (options,) = options_towards(proxy.port if proxied else server.port)
            assert options == {
                socket.SO_KEEPALIVE: 1,
                socket.TCP_KEEPIDLE: 10,
                socket.TCP_KEEPINTVL: 5,
                socket.TCP_KEEPCNT: 2,
                socket.TCP_USER_TIMEOUT: 20_000,
            }


# --- proxies


async def test_the_environments_proxy(authority: Authority) -> None:
    async with serving(fine, authority.server("api.test")) as server, proxying(server.port) as proxy:
        access = access_to("https://api.test:6443", ca=authority.pem)
        address = f"ana:p%40ss-word@127.0.0.1:{proxy.port}"
        async with client_for(access, {"https_proxy": address, "NO_PROXY": "b.test"}) as client:
            await client.get("/a")
        (request,) = proxy.requests
        assert request.target == "api.test:6443"
        # ana:p@ss-word
        assert request.headers["proxy-authorization"] == "Basic YW5hOnBAc3Mtd29yZA=="
        assert "proxy-authorization" not in server.requests[0].headers


async def test_a_proxy_that_refuses(authority: Authority) -> None:
    answer = b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n"
    async with proxying(1, answer=answer) as proxy:
        address = f"http://ana:s3cret@127.0.0.1:{proxy.port}"
        access = access_to("https://api.test:6443", ca=authority.pem, proxy=address)
        async with client_for(access) as client:
            error = await failure(lambda: client.get("/a"), UnreachableError)
        assert f"through the proxy http://127.0.0.1:{proxy.port}: the proxy refuses: 407 Who are you" in str(error)
        await proxy.closed[0].wait()
    while error is not None:
        assert "s3cret" not in repr(error)
        error = error.__cause__ or error.__context__


async def test_what_fails_behind_a_proxy_is_not_remembered(authority: Authority) -> None:
    async with serving(fine, authority.server("other.test")) as server, proxying(server.port) as proxy:
        access = access_to("https://api.test:6443", ca=authority.pem, proxy=f"http://127.0.0.1:{proxy.port}")
        async with client_for(access) as client:
            for _ in range(5):
                await failure(lambda: client.get("/a"), UnreachableError)
            gc.collect()
            # the HTTP library's pools keep those for ever
            kept = [thing for thing in gc.get_objects() if type(thing).__name__ == "AsyncTunnelHTTPConnection"]
            assert kept == []


async def test_a_proxy_that_says_nothing(authority: Authority) -> None:
    async with proxying(1, answer=b"") as proxy:
        access = access_to("https://api.test:6443", ca=authority.pem, proxy=f"http://127.0.0.1:{proxy.port}")
        async with client_for(access, headers_deadline=SHORT) as client:
            error = await failure(lambda: client.get("/a", deadline=SHORT), UnreachableError)
            assert "(waiting for the proxy's answer)" in str(error)
            with pytest.raises(UnreachableError, match="waiting for the proxy"):
                async with client.stream("/a", deadline=60):
                    pass
            for closed in proxy.closed:
                await closed.wait()


# --- what cannot work


@pytest.mark.parametrize(
    "server",
    [
        "",
        "a.test",
        "a.test:6443",
        "ftp://a.test",
        "https://",
        "https:///x",
        "https://[::1",
        "https://a.test:port",
        "https://a.test:99999",
        "https://a.test/",
        "https://a.test?x=y",
        "https://a.test#x",
        "https://a b.test",
        "https://\0",
    ],
)
def test_a_broken_address_is_known_at_once(server: str) -> None:
    with pytest.raises(KubernetesError, match=r"^test: .*server") as caught:
        client_for(access_to(server))
    assert "\n" not in str(caught.value)


def test_a_password_in_the_address_is_refused_and_not_shown() -> None:
    for server in ("https://ana:s3cret@a.test", "https://ana:s3cret@[::1"):
        with pytest.raises(KubernetesError) as caught:
            client_for(access_to(server))
        assert "s3cret" not in str(caught.value)
        assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize(
    "proxy, reason",
    [
        ("socks5://ana:s3cret@p:1080", "'socks5' proxy, which is not supported"),
        ("socks5h://p", "not supported"),
        ("ftp://ana:s3cret@p", "not supported"),
        ("http://ana:s3cret@", "no host"),
        ("http://ana:s3cret@[::1", "no address"),
        ("http://ana:s3cret@p:s3cret", "no address"),
    ],
)
def test_a_broken_proxy_is_known_at_once_and_not_shown(proxy: str, reason: str) -> None:
    for access, environment in (
        (access_to("https://a.test", proxy=proxy), {}),
        (access_to("https://a.test"), {"HTTPS_PROXY": proxy}),
    ):
        with pytest.raises(KubernetesError, match=r"^test: ") as caught:
            client_for(access, environment)
        assert "s3cret" not in str(caught.value)
        error: BaseException | None = caught.value
        while error is not None:
            assert "s3cret" not in repr(error)
            error = error.__cause__
    with pytest.raises(KubernetesError, match=reason):
        client_for(access_to("https://a.test", proxy=proxy))


def test_a_broken_certificate_is_known_at_once() -> None:
    with pytest.raises(KubeconfigError, match="certificate-authority"):
        client_for(access_to("https://a.test", ca=b"nothing"))


def test_nothing_secret_shows(authority: Authority) -> None:
    chain, key = authority.issue("ana@users.test")
    access = access_to(
        "https://a.test",
        credential=FixedCredential(TOKEN),
        client_certificate=(chain, key),
        proxy="http://ana:s3cret@p:1",
    )
    assert isinstance(access, Access)
    client = client_for(access)
    for text in (repr(access), repr(client)):
        assert "s3cret" not in text
        assert "not-for-logs" not in text
        assert "PRIVATE" not in text


# --- the server's clock


async def test_the_time_of_an_answer_and_the_offset_of_the_servers_clock() -> None:
    async def handler(request: Request, wire: Wire) -> None:
        await wire.answer("{}", headers={"Date": "Fri, 01 Jan 2027 00:00:00 GMT"} if request.target == "/a" else {})

    now = 5000.0
    async with serving(handler) as server:
        access = access_to(f"http://127.0.0.1:{server.port}")
        async with ApiClient(access, clock=lambda: now, environment={}) as client:
            assert (await client.get("/b")).server_time is None
            assert client.server_clock_offset is None
            assert (await client.get("/a")).server_time == 1798761600.0
            # the second that has begun: its middle is at most half a second off
            assert client.server_clock_offset == 1798761600.5 - 5000
            # half a second later, and still the same second: it has only just begun, then
            now += 0.5
            await client.get("/a")
            assert client.server_clock_offset == pytest.approx(1798761600.25 - 5000, abs=0.001)


async def test_what_is_no_good_answer_says_nothing_of_the_servers_clock() -> None:
    async with talking(refusing(502, Date="Fri, 01 Jan 2027 00:00:00 GMT")) as (client, _):
        await failure(lambda: client.get("/a"), ApiError)
        assert client.server_clock_offset is None

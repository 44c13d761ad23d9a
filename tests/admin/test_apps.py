"""Which paths each application serves, what the probes say, and what every answer carries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp
from structlog.typing import EventDict

from tests.admin.conftest import Serve, ServeAdmin
from tests.admin.helpers import READY, Placements, answers, ask
from trio_federation.admin import Answers, admin_app, metrics_app
from trio_federation.metrics import CONTENT_TYPE
from trio_federation.registry import Registry

SERVED = (
    "served here are GET /, /metrics, /healthz, /readyz, /v1/capacity and /v1/place, and POST /v1/place and "
    "/v1/place/ID/outcome"
)


@pytest.fixture
def admin() -> ASGIApp:
    placements = Placements(Registry("west", ttl=30.0, clock=lambda: 100.0))
    return admin_app(placements.answers, host="127.0.0.1")


@pytest.fixture(params=["metrics", "admin"])
def either(request: pytest.FixtureRequest, admin: ASGIApp) -> ASGIApp:
    return admin if request.param == "admin" else metrics_app(answers())


async def test_both_serve_metrics_and_probes(either: ASGIApp) -> None:
    answer = await ask(either, "/metrics")
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"up 1\n", CONTENT_TYPE)
    answer = await ask(either, "/healthz")
    assert (answer.status, answer.body) == (200, b"ok")
    answer = await ask(either, "/readyz")
    assert (answer.status, answer.json) == (200, READY)
    for path in ("/metrics", "/healthz", "/readyz"):
        answer = await ask(either, path, method="HEAD")
        assert answer.status == 200


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
async def test_probes_do_not_mind_a_query(either: ASGIApp, path: str) -> None:
    assert (await ask(either, path, query=b"name[]=x&%ff=")).status == 200


async def test_the_metrics_port_serves_nothing_else() -> None:
    app = metrics_app(answers())
    under_v1 = ("/v1", "/v1/capacity", "/v1/place", "/v1/place/x/outcome")
    for path in ("/", *under_v1, "/metrics/", "/readyz/", "/favicon.ico"):
        answer = await ask(app, path)
        assert answer.status == 404
        assert answer.body == b"404 not found; only GET /metrics, GET /healthz and GET /readyz are served here\n"


@pytest.mark.parametrize("path", ["/x", "//", "/metrics/", "/favicon.ico"])
async def test_the_admin_port_serves_nothing_else(admin: ASGIApp, path: str) -> None:
    answer = await ask(admin, path)
    assert (answer.status, answer.body.decode()) == (404, f"404 not found; {SERVED}\n")


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/x", "/v1/capacity/", "/v1/place/x", "/v1/place//outcome", "/v1/place/x/outcome/"]
)
async def test_what_is_not_there_under_v1_is_told_as_json(admin: ASGIApp, path: str) -> None:
    answer = await ask(admin, path)
    assert (answer.status, answer.error) == (404, f"not found; {SERVED}")


@pytest.mark.parametrize(
    "path, allowed",
    [
        ("/", {"GET", "HEAD"}),
        ("/metrics", {"GET", "HEAD"}),
        ("/v1/capacity", {"GET", "HEAD"}),
        ("/v1/place", {"GET", "HEAD", "POST"}),
        ("/v1/place/x/outcome", {"POST"}),
    ],
)
async def test_other_methods_are_refused_by_name(admin: ASGIApp, path: str, allowed: set[str]) -> None:
    for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"} - allowed:
        answer = await ask(admin, path, method=method)
        assert answer.status == 405
        assert set(answer.headers["allow"].split(", ")) == allowed
        if path.startswith("/v1"):
            assert answer.error == f"method not allowed; {SERVED}"
        else:
            assert answer.body.decode() == f"405 method not allowed; {SERVED}\n"


async def test_readiness_decides_the_status_and_is_always_told() -> None:
    told: dict[str, Any] = {"ready": False, "why_not": ["hub-a.example:7443: größe"], "uptime": 1.5, "hub": None}
    for app in (metrics_app(answers(readiness=lambda: told)), admin_app(answers(readiness=lambda: told), host="::1")):
        told["ready"] = False
        answer = await ask(app, "/readyz")
        assert (answer.status, answer.json) == (503, told)
        told["ready"] = True
        answer = await ask(app, "/readyz")
        assert (answer.status, answer.json) == (200, told)


async def test_a_readiness_that_fails_is_not_ready(logs: list[EventDict]) -> None:
    failing = True

    def readiness() -> dict[str, Any]:
        if failing:
            raise RuntimeError("no state")
        return READY

    app = metrics_app(answers(readiness=readiness))
    for _ in range(3):
        answer = await ask(app, "/readyz")
        assert answer.status == 503
        assert answer.json == {"ready": False, "why_not": ["this process could not say how it is; its log says why"]}
    failing = False
    assert (await ask(app, "/readyz")).status == 200
    assert [(line["event"], line["what"]) for line in logs] == [
        ("answer_failed", "/readyz"),
        ("answer_works", "/readyz"),
    ]


async def test_a_health_check_that_fails_is_not_healthy(logs: list[EventDict]) -> None:
    def healthy() -> bool:
        raise RuntimeError("no pulse")

    for _ in range(2):
        answer = await ask(metrics_app(answers(healthy=healthy)), "/healthz")
        assert (answer.status, answer.body) == (503, b"503 not healthy; the log says why\n")
    assert [line["event"] for line in logs] == ["answer_failed"] * 2  # once for each application


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/healthz", "/readyz", "/v1/capacity", "/v1/place", "/v1/place/x/outcome", "/v1/x", "/x", "/"],
)
@pytest.mark.parametrize("host", [b"localhost", b"evil.example"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_every_answer_carries_what_protects_it(admin: ASGIApp, path: str, host: bytes, method: str) -> None:
    answer = await ask(admin, path, method=method, query=b"namespace=a&env=b", headers=[(b"host", host)])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    policy = answer.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy


async def test_both_over_sockets(serve: Serve, serve_admin: ServeAdmin, client: httpx.AsyncClient) -> None:
    async def exposition() -> AsyncIterator[bytes]:
        yield b"up "
        yield b"1\n"

    told: dict[str, Any] = {"ready": False, "why_not": ["starting"]}
    given = Answers(exposition=exposition, readiness=lambda: told)
    for port in (await serve(given), await serve_admin(given)):
        for text, path in (("up 1\n", "metrics"), ("ok", "healthz")):
            response = await client.get(f"http://127.0.0.1:{port}/{path}")
            assert (response.status_code, response.text) == (200, text)
        response = await client.get(f"http://127.0.0.1:{port}/readyz")
        assert (response.status_code, response.json()) == (503, told)
        assert (await client.head(f"http://127.0.0.1:{port}/readyz")).status_code == 503
        response = await client.get(f"http://127.0.0.1:{port}/v1/capacity")
        assert response.status_code == 404
        told_as = "application/json" if '"error"' in response.text else "text/plain; charset=utf-8"
        assert response.headers["content-type"] == told_as

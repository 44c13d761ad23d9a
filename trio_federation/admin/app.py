"""What is answered over HTTP, as ASGI applications: which paths there are, what the probes and the scrape say, and what
every answer carries. Answers come from memory, through functions that are handed in (`answers.py`); what is asked about
capacity is in `api.py`, the web page in `page.py`. Sockets, timeouts and limits are in `server.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trio_federation.admin.answers import Answers
from trio_federation.admin.api import MAX_BODY, Refusal, api_routes, error_response, json_response
from trio_federation.admin.page import load_page
from trio_federation.admin.protection import host_fault, token_fault
from trio_federation.admin.streaming import StreamedResponse, Trouble
from trio_federation.metrics import CONTENT_TYPE

#: What may be asked for by anybody who can connect, under any name.
PROBES = frozenset({"/metrics", "/healthz", "/readyz"})
#: What needs no token besides: the web page, which holds no data and asks for the token itself.
_WEB_PAGE = "/"

# On every answer, unless it says otherwise itself: it is what it says it is, it is of this moment, it stands in no
# other page, and a browser finds nothing in it to load or run.
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def metrics_app(answers: Answers) -> ASGIApp:
    """`GET` and `HEAD` of `/metrics`, `/healthz` and `/readyz`, and nothing else: every other path is a 404, every
    other method a 405. Fit for a port that anybody can reach."""
    served = "only GET /metrics, GET /healthz and GET /readyz are served here"
    return _WithHeaders(_application(_probe_routes(answers), served, _as_text))


def admin_app(answers: Answers, *, host: str, token: Callable[[], str] | None = None) -> ASGIApp:
    """What `metrics_app` serves, `/v1/capacity`, `/v1/place` and `/v1/place/ID/outcome`, and the web page on `/`.

    `host`: the host that it is bound to, a name or an address. Everything but the probes is answered under that name,
    localhost, or an IP address only. `token`: gives the token that counts for the request at hand; then everything but
    the probes and the page needs `Authorization: Bearer TOKEN`, or is answered with 401, and any name is good.
    `protection.py` says why, and what a POST needs besides."""
    page = load_page()

    async def web_page(request: Request) -> Response:
        return Response(page.html, media_type="text/html", headers={"content-security-policy": page.policy})

    served = (
        "served here are GET /, /metrics, /healthz, /readyz, /v1/capacity and /v1/place, and POST /v1/place and "
        "/v1/place/ID/outcome"
    )
    routes = [*_probe_routes(answers), *api_routes(answers), Route(_WEB_PAGE, web_page)]
    app = _application(routes, served, _as_asked)
    return _WithHeaders(_TakesBodies(_KnownHostsOnly(app, host) if token is None else _WithTokenOnly(app, token)))


#: Makes the answer to a request that is refused, from its path, the status, a line for people, and headers.
_Refusing: TypeAlias = Callable[[str, int, str, Mapping[str, str] | None], Response]


def _application(routes: list[Route], served: str, refusing: _Refusing) -> Starlette:
    async def refuse(request: Request, error: Exception) -> Response:
        """One line for what is not answered. The path is not repeated: whoever asked knows it."""
        assert isinstance(error, HTTPException)
        text = error.detail if isinstance(error, Refusal) else f"{error.detail.lower()}; {served}"
        return refusing(request.scope["path"], error.status_code, text, error.headers)

    async def fail(request: Request, error: Exception) -> Response:
        """A fault of ours; starlette raises it again once this is sent, and `server.py` logs it."""
        return refusing(request.scope["path"], 500, "this could not be answered; the log says why", None)

    app = Starlette(routes=routes, exception_handlers={HTTPException: refuse, Exception: fail})
    app.router.redirect_slashes = False  # "/metrics/" is another path, and those are not served
    return app


def _as_text(path: str, status_code: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{status_code} {text}\n", status_code, headers)


def _as_asked(path: str, status_code: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """JSON under /v1, and plain text everywhere else."""
    refusing = error_response if path == "/v1" or path.startswith("/v1/") else partial(_as_text, path)
    return refusing(status_code, text, headers)


def _probe_routes(answers: Answers) -> list[Route]:
    metrics_trouble, health_trouble, readiness_trouble = Trouble("/metrics"), Trouble("/healthz"), Trouble("/readyz")

    # Handlers are async although none of them waits: starlette runs plain functions in a thread.
    async def metrics(request: Request) -> Response:
        return StreamedResponse(
            answers.exposition,
            media_type=CONTENT_TYPE,
            trouble=metrics_trouble,
            instead=PlainTextResponse("500 the metrics could not be written; the log says why\n", status_code=500),
        )

    async def healthz(request: Request) -> Response:
        try:
            healthy = answers.healthy()
        except Exception as error:
            health_trouble.failed(error)
            healthy = False
        else:
            health_trouble.works()
        if healthy:
            return PlainTextResponse("ok")
        return PlainTextResponse("503 not healthy; the log says why\n", status_code=503)

    async def readyz(request: Request) -> Response:
        told: dict[str, Any]
        try:
            told = answers.readiness()
            response = json_response(told, 200 if told["ready"] else 503)
        except Exception as error:
            readiness_trouble.failed(error)
            why_not = "this process could not say how it is; its log says why"
            return json_response({"ready": False, "why_not": [why_not]}, 503)
        readiness_trouble.works()
        return response

    return [Route("/metrics", metrics), Route("/healthz", healthz), Route("/readyz", readyz)]


class _WithHeaders:
    """Adds `_HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _TakesBodies:
    """Takes what is left of a request's body before its answer ends, unless all of it is too long. Otherwise whoever is
    refused would not read why: over HTTP/2 the server takes what comes after an answer for a fault, over HTTP/1 it
    closes with words unread, and both reset the connection. The body goes nowhere. One that never comes ends with the
    request's time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        whole, taken = False, 0

        async def counting_receive() -> Message:
            nonlocal whole, taken
            message = await receive()
            whole = message["type"] != "http.request" or not message.get("more_body", False)
            taken += len(message.get("body", b""))
            return message

        async def send_after_the_body(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                while not whole and taken <= MAX_BODY:
                    await counting_receive()
            await send(message)

        await self._app(scope, counting_receive, send_after_the_body)


class _KnownHostsOnly:
    """Refuses requests to a host that is not known to be ours, but for the probes."""

    def __init__(self, app: ASGIApp, own_host: str) -> None:
        self._app = app
        self._own_host = own_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES:
            text = host_fault(Headers(scope=scope).getlist("host"), self._own_host)
            if text is not None:
                await _as_asked(scope["path"], 403, text)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _WithTokenOnly:
    """Refuses requests without the token, but for the probes and the page."""

    def __init__(self, app: ASGIApp, token: Callable[[], str]) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES and scope["path"] != _WEB_PAGE:
            given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
            text = token_fault(given, self._token())
            if text is not None:
                headers = {"www-authenticate": "Bearer"}
                await _as_asked(scope["path"], 401, text, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

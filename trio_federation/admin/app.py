"""What is answered over HTTP, as starlette applications: which paths there are, and what each says. Answers come from
memory, through functions that are handed in. Sockets, timeouts and limits are in `server.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from trio_federation.metrics import CONTENT_TYPE

logger = logging.getLogger("trio_federation.admin")


def metrics_app(*, exposition: Callable[[], bytes], healthy: Callable[[], bool] = lambda: True) -> Starlette:
    """`GET /metrics` and `GET /healthz`, and nothing else: every other path is a 404, every other method a 405.

    `exposition` returns Prometheus' text format. Where it raises, the scrape is answered with 500 and the next one
    tries again; the failure is logged when it begins or changes, not at every scrape. `healthy` says whether `/healthz`
    answers "ok" or 503. Both are called in Trio's thread and must not block."""
    logged = ""

    # Handlers are async although none of them waits: starlette runs plain functions in a thread.
    async def metrics(request: Request) -> Response:
        nonlocal logged
        try:
            body = exposition()
        except Exception as error:
            if logged != repr(error):
                logged = repr(error)
                logger.exception("the metrics could not be written; scrapes are answered with 500 until they can")
            return PlainTextResponse("500 the metrics could not be written; the log says why\n", status_code=500)
        logged = ""
        return Response(body, media_type=CONTENT_TYPE)

    async def healthz(request: Request) -> Response:
        if healthy():
            return PlainTextResponse("ok")
        return PlainTextResponse("503 not healthy; the log says why\n", status_code=503)

    app = Starlette(
        routes=[Route("/metrics", metrics), Route("/healthz", healthz)],
        exception_handlers={HTTPException: _refuse},
    )
    app.router.redirect_slashes = False  # "/metrics/" is another path, and those are not served
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """One line for what starlette itself refuses. The path is not repeated: whoever asked knows it."""
    assert isinstance(error, HTTPException)
    paths = "only GET /metrics and GET /healthz are served here"
    text = f"{error.status_code} {error.detail.lower()}; {paths}\n"
    return PlainTextResponse(text, status_code=error.status_code, headers=error.headers)

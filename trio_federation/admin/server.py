"""HTTP on Trio: listening, one task for each connection, and an end for every connection that gets stuck. What is
answered is in `app.py`.

Each connection is spoken to by the handler of hypercorn's trio worker, but the loop around it is ours, because that
worker's own is not good enough for a port that may be bound wide:

* It shields its writes from cancellation, and gives them no deadline, so one client that asks and never reads would
  hold up the shutdown of the whole process, and its connection would stay open until then.
* Any error in one connection ends the server: HTTP/2 data for a request that has been answered is enough.
* Its idle timeout ends with the first word of HTTP/2, whether a request follows or not.
* It has no limit on connections.

So each connection has a guard, which closes the socket when its time is up, when newer connections need its place, or
when the server is cancelled; and an error in it is logged and ends with it. HTTP/1 clients that ask for nothing, or
never finish asking, are closed earlier, by hypercorn's own `keep_alive_timeout`; it counts from the connection's start
or its last answer, however slowly bytes drip in."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.types import ASGIApp, Receive, Scope, Send

from trio_federation.admin.app import metrics_app
from trio_federation.errors import FederationError

logger = logging.getLogger("trio_federation.admin")

#: Seconds that a connection may stay open without a request, or with one that is not complete.
IDLE_TIMEOUT = 5.0
#: Seconds from a connection's start to its first request, and from each request to the end of its answer, which the
#: client has to read, or to the next request.
REQUEST_TIMEOUT = 10.0
#: Open connections; one more, and the oldest is closed. Far above what scrapers and probes need, and far below the
#: number of files that a process may usually open, so that nobody who connects can starve the streams to the hubs.
MAX_CONNECTIONS = 100


async def serve_metrics(
    host: str,
    port: int,
    *,
    exposition: Callable[[], bytes],
    healthy: Callable[[], bool] = lambda: True,
    idle_timeout: float = IDLE_TIMEOUT,
    request_timeout: float = REQUEST_TIMEOUT,
    max_connections: int = MAX_CONNECTIONS,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Serve `/metrics` and `/healthz` until cancelled: `metrics_app` has the answers, `serve_http` the rest."""
    await serve_http(
        metrics_app(exposition=exposition, healthy=healthy),
        host,
        port,
        section="metrics",
        idle_timeout=idle_timeout,
        request_timeout=request_timeout,
        max_connections=max_connections,
        task_status=task_status,
    )


async def serve_http(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    section: str,
    idle_timeout: float = IDLE_TIMEOUT,
    request_timeout: float = REQUEST_TIMEOUT,
    max_connections: int = MAX_CONNECTIONS,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Serve an ASGI application on host:port (port 0: one that is free) until cancelled, and then end at once, whatever
    the clients do. `task_status` reports the port, once connections are accepted.

    `section` is the part of the configuration that the address came from; errors name it. `IDLE_TIMEOUT`,
    `REQUEST_TIMEOUT` and `MAX_CONNECTIONS` say what the limits mean. Raises FederationError when the address cannot be
    listened on. No failure of a client, a connection or the application ends the server."""
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except (OSError, UnicodeError) as error:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        reason = getattr(error, "strerror", None) or str(error)
        raise FederationError(
            f"{section}: cannot listen on {address}: {reason[:1].lower()}{reason[1:]}; choose another [{section}] bind"
        ) from error
    config = Config()
    config.accesslog = None
    config.errorlog = logger
    config.include_server_header = False
    config.keep_alive_timeout = idle_timeout
    connections = _Connections(app, config, request_timeout=request_timeout, limit=max_connections)
    task_status.started(listeners[0].socket.getsockname()[1])
    await trio.serve_listeners(connections.serve, listeners)


class _Connections:
    """The open connections of one server."""

    def __init__(self, app: ASGIApp, config: Config, *, request_timeout: float, limit: int) -> None:
        self._app = app
        self._config = config
        self._context = WorkerContext(max_requests=None)
        self._request_timeout = request_timeout
        self._limit = limit
        #: what is left of each connection's time, the oldest connection first
        self._open: dict[trio.CancelScope, None] = {}

    async def serve(self, stream: trio.SocketStream) -> None:
        """Speak to one client until either side ends it. Raises no Exception, whatever the client sends."""
        while len(self._open) >= self._limit:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        time_left = trio.CancelScope(deadline=trio.current_time() + self._request_timeout)
        self._open[time_left] = None

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            time_left.deadline = trio.current_time() + self._request_timeout
            await self._app(scope, receive, send)

        # hypercorn's types describe ASGI more closely than starlette's do, and only the encrypted kind of stream
        wrapped: Any = ASGIWrapper(app)  # type: ignore[arg-type]
        state = ConnectionState({})
        handler = TCPServer(wrapped, self._config, self._context, state, stream)  # type: ignore[arg-type]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_guard, stream, time_left, nursery.cancel_scope)
                await handler.run()
                nursery.cancel_scope.cancel()
        except* Exception as errors:
            # One line: what a client can cause, it can cause often. The traceback is there for whoever looks for it.
            verbose = logger.isEnabledFor(logging.DEBUG)
            logger.warning("an HTTP connection failed and was closed; the others go on: %r", errors, exc_info=verbose)
        finally:
            self._open.pop(time_left, None)


async def _guard(stream: trio.SocketStream, time_left: trio.CancelScope, connection: trio.CancelScope) -> None:
    """Close the socket when the time is up or when cancelled: that is what ends a write that hypercorn has shielded."""
    try:
        with time_left:
            await trio.sleep_forever()
        # Reset instead of a polite end, which the kernel would keep, with what was not read, until the client takes it.
        with suppress(OSError):  # closed in the same moment, in the ordinary way
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        stream.socket.close()
        connection.cancel()

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
or its last answer, however slowly bytes drip in.

Encrypted, a connection begins with a handshake, which has a time of its own. It is made here, so that one that fails
is no more than a client that went away; the client is told why, by TLS itself."""

from __future__ import annotations

import logging
import math
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trio_federation.errors import FederationError
from trio_federation.tls import HandshakeFailed, shake_hands

log = structlog.get_logger("trio_federation.admin")

#: Seconds that a connection may stay open without a request, or with one that is not complete; and again that its
#: handshake may take.
IDLE_TIMEOUT = 5.0
#: Seconds from a connection's start to its first request, and from each request to the end of its answer, which the
#: client has to read, or to the next request.
REQUEST_TIMEOUT = 10.0
#: Open connections; one more, and the oldest that waits for no answer is closed, or the oldest of all. Far above what
#: scrapers and probes need, and far below the number of files that a process may usually open, so that nobody who
#: connects can starve the streams to the hubs.
MAX_CONNECTIONS = 100
#: Seconds between warnings about connections that failed: what a client can cause, it can cause often.
WARNING_INTERVAL = 60.0


async def serve_http(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    section: str,
    tls: Callable[[], ssl.SSLContext] | None = None,
    idle_timeout: float = IDLE_TIMEOUT,
    request_timeout: float = REQUEST_TIMEOUT,
    max_connections: int = MAX_CONNECTIONS,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Serve an ASGI application on host:port (port 0: one that is free) until cancelled, and then end at once, whatever
    the clients do. `task_status` reports the port, once connections are accepted.

    `section` is the part of the configuration that the address came from; errors name it. `tls` gives the context for a
    connection that comes now; without it nothing is encrypted. `IDLE_TIMEOUT`, `REQUEST_TIMEOUT` and `MAX_CONNECTIONS`
    say what the limits mean. Raises FederationError when the address cannot be listened on. No failure of a
    client, a connection or the application ends the server."""
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
    config.errorlog = logging.getLogger("trio_federation.admin")
    config.include_server_header = False
    config.keep_alive_timeout = idle_timeout
    config.h2_max_concurrent_streams = 4
    connections = _Connections(
        app, config, tls, section=section, request_timeout=request_timeout, limit=max_connections
    )
    task_status.started(listeners[0].socket.getsockname()[1])
    await trio.serve_listeners(connections.serve, listeners)


class _Connection:
    """One open connection: what is left of its time, and how many of its requests are being answered."""

    __slots__ = ("answering", "time_left")

    def __init__(self, time_left: trio.CancelScope) -> None:
        self.time_left = time_left
        self.answering = 0


class _Connections:
    """The open connections of one server."""

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        tls: Callable[[], ssl.SSLContext] | None,
        *,
        section: str,
        request_timeout: float,
        limit: int,
    ) -> None:
        self._app = app
        self._config = config
        self._tls = tls
        self._section = section
        self._context = WorkerContext(max_requests=None)
        self._request_timeout = request_timeout
        self._limit = limit
        #: the oldest first
        self._open: dict[_Connection, None] = {}
        self._warned_at = -math.inf
        self._not_warned = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        """Speak to one client until either side ends it. Raises no Exception, whatever the client sends."""
        while len(self._open) >= self._limit:
            self._end_one()
        connection = _Connection(trio.CancelScope(deadline=trio.current_time() + self._request_timeout))
        self._open[connection] = None

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            connection.time_left.deadline = trio.current_time() + self._request_timeout
            connection.answering += 1
            broken: Exception | None = None

            async def send_on(message: Message) -> None:
                nonlocal broken
                try:
                    await send(message)
                except Exception as error:
                    broken = error
                    raise

            try:
                await self._app(scope, receive, send_on)
            except Exception as error:
                if broken is not None:
                    # The client has broken HTTP in the middle of the answer. Any client can, and often.
                    log.debug("http_connection_failed", server=self._section, error=repr(broken), exc_info=broken)
                    return
                # Left to hypercorn, it would be told without a name. The client gets 500, or the end of the connection.
                log.error("http_answer_failed", server=self._section, path=scope.get("path"), exc_info=error)
            finally:
                connection.answering -= 1

        # hypercorn's types describe ASGI more closely than starlette's do, and only the encrypted kind of stream
        wrapped: Any = ASGIWrapper(app)  # type: ignore[arg-type]
        state = ConnectionState({})
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_guard, stream, connection.time_left, nursery.cancel_scope)
                spoken: Any = stream
                if self._tls is not None:
                    # Closed without a word of TLS, which a client that reads nothing could hold up: HTTP says itself
                    # where an answer ends.
                    spoken = trio.SSLStream(stream, self._tls(), server_side=True, https_compatible=True)
                    await shake_hands(spoken, within=self._config.keep_alive_timeout)
                await _Server(wrapped, self._config, self._context, state, spoken).run()
                nursery.cancel_scope.cancel()
        except* HandshakeFailed as failed:
            # Scanners do it, and clients that do not trust the certificate: nothing is wrong with us.
            log.debug("http_connection_failed", server=self._section, error=str(failed.exceptions[0]))
        except* Exception as errors:
            self._tell(errors)
        finally:
            self._open.pop(connection, None)

    def _end_one(self) -> None:
        """Whoever connects and asks for nothing must not end an answer that somebody waits for."""
        oldest = next(iter(self._open))
        ended = next((connection for connection in self._open if not connection.answering), oldest)
        del self._open[ended]
        ended.time_left.cancel()

    def _tell(self, errors: ExceptionGroup[Exception]) -> None:
        """One line, and not for every connection; the tracebacks are there for whoever looks for them."""
        if trio.current_time() < self._warned_at + WARNING_INTERVAL:
            self._not_warned += 1
            log.debug("http_connection_failed", server=self._section, error=repr(errors), exc_info=errors)
            return
        log.warning(
            "http_connection_failed",
            server=self._section,
            error=repr(errors),
            more=self._not_warned,
            exc_info=errors if logging.getLogger("trio_federation.admin").isEnabledFor(logging.DEBUG) else None,
        )
        self._warned_at = trio.current_time()
        self._not_warned = 0


class _Server(TCPServer):
    """hypercorn's, which would end a connection that has broken HTTP while the application begins to answer, and have
    either fail for the other."""

    async def _close(self) -> None:
        if self.send_lock.locked():
            # The other side takes no more of what is being sent, or not soon enough.
            await self.stream.aclose()
            return
        async with self.send_lock:
            await super()._close()


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

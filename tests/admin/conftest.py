"""What the tests of the HTTP side get: a server on a real socket, clients, the log, and a clock that runs as fast as
the real one, so that sockets are not left behind, and is moved ahead where a test is about a timeout."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol

import httpx
import pytest
import structlog.testing
import trio
import trio.testing
from structlog.typing import EventDict

from tests.admin.helpers import REQUEST, answers
from trio_federation.admin import Answers, admin_app, metrics_app, serve_http


class Serve(Protocol):
    """Starts a metrics server in the test's nursery and returns its port."""

    def __call__(self, exposition: Callable[[], bytes] | Answers = ..., **options: Any) -> Awaitable[int]: ...


class ServeAdmin(Protocol):
    """Starts an admin server in the test's nursery and returns its port. `token`: as for `admin_app`; other options are
    those of `serve_http`."""

    def __call__(self, given: Answers, *, token: Callable[[], str] | None = ..., **options: Any) -> Awaitable[int]: ...


class Connect(Protocol):
    """Opens a plain connection to a port of this machine, says something, and closes it at the end of the test. As
    `connect_unread`: asks for the metrics, sees the answer begin, and reads none of the rest."""

    def __call__(self, port: int, begin: bytes = ...) -> Awaitable[trio.SocketStream]: ...


@pytest.fixture
async def serve(nursery: trio.Nursery) -> Serve:
    async def start(exposition: Callable[[], bytes] | Answers = lambda: b"up 1\n", **options: Any) -> int:
        given = exposition if isinstance(exposition, Answers) else answers(exposition)
        app = metrics_app(given)
        port = await nursery.start(partial(serve_http, app, "127.0.0.1", 0, section="metrics", **options))
        assert isinstance(port, int)
        return port

    return start


@pytest.fixture
async def serve_admin(nursery: trio.Nursery) -> ServeAdmin:
    async def start(given: Answers, *, token: Callable[[], str] | None = None, **options: Any) -> int:
        app = admin_app(given, host="127.0.0.1", token=token)
        port = await nursery.start(partial(serve_http, app, "127.0.0.1", 0, section="admin", **options))
        assert isinstance(port, int)
        return port

    return start


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        yield client


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with AsyncExitStack() as streams:

        async def open_stream(port: int, begin: bytes = b"") -> trio.SocketStream:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await streams.enter_async_context(stream)
            await stream.send_all(begin)
            return stream

        yield open_stream


@pytest.fixture
async def connect_unread(connect: Connect) -> Connect:
    async def open_stream(port: int, begin: bytes = REQUEST) -> trio.SocketStream:
        stream = await connect(port, begin)
        with trio.fail_after(5):
            assert (await stream.receive_some(5)) == b"HTTP/"
        return stream

    return open_stream


@pytest.fixture(autouse=True)
def clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(rate=1.0)


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """Every line that is logged during the test, at any level, as keys and values."""
    with structlog.testing.capture_logs() as lines:
        yield lines

"""The metrics port over real sockets: what it answers, and that no client can hold it up. The clock runs as fast as the
real one, so that sockets are not left behind, and is moved ahead where a test is about a timeout."""

from __future__ import annotations

import errno
import logging
import select
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Protocol

import h2.config
import h2.connection
import httpx
import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from trio_federation.admin.server import IDLE_TIMEOUT, REQUEST_TIMEOUT, serve_http, serve_metrics
from trio_federation.capacity import Capacity
from trio_federation.errors import FederationError
from trio_federation.metrics import CONTENT_TYPE, FederationMetrics
from trio_federation.registry import Registry

#: Far more than a socket pair's buffers hold, so that an answer of this size waits for its reader.
BIG = 32 * 2**20

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n"


class Serve(Protocol):
    """Starts a metrics server in the test's nursery and returns its port."""

    def __call__(self, exposition: Callable[[], bytes] = ..., **options: Any) -> Awaitable[int]: ...


class Connect(Protocol):
    """Opens a plain connection to a port of this machine, says something, and closes it at the end of the test. As
    `connect_unread`: asks for the metrics, sees the answer begin, and reads none of the rest."""

    def __call__(self, port: int, begin: bytes = ...) -> Awaitable[trio.SocketStream]: ...


@pytest.fixture
async def serve(nursery: trio.Nursery) -> Serve:
    async def start(exposition: Callable[[], bytes] = lambda: b"up 1\n", **options: Any) -> int:
        port = await nursery.start(partial(serve_metrics, "127.0.0.1", 0, exposition=exposition, **options))
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


async def pass_time(clock: trio.testing.MockClock, seconds: float, port: int) -> None:
    """Moves the clock ahead, once the server has taken notice of every connection there is."""
    with trio.fail_after(5):
        async with httpx.AsyncClient(trust_env=False) as last, last.stream("GET", f"http://127.0.0.1:{port}/healthz"):
            pass
    clock.jump(seconds)


async def read_to_end(stream: trio.SocketStream, within: float = 5) -> bytes:
    """All that comes until the other side closes or resets the connection. Fails where it does neither in that time."""
    parts = []
    with trio.fail_after(within):
        try:
            async for part in stream:
                parts.append(part)
        except trio.BrokenResourceError:
            pass
    return b"".join(parts)


async def is_reset(stream: trio.SocketStream) -> None:
    """Waits until the other side resets the connection, without reading or writing. Fails where it does not in 5 s."""
    with select.epoll() as hang_up:
        hang_up.register(stream.socket.fileno(), 0)  # asks for nothing but the end of the connection in both directions
        with trio.fail_after(5):
            await trio.lowlevel.wait_readable(hang_up.fileno())


def values(text: str, name: str, label: str) -> dict[str, float]:
    """One gauge of an exposition, by one of its labels."""
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def test_metrics_are_served_as_prometheus_reads_them(serve: Serve, client: httpx.AsyncClient) -> None:
    metrics = FederationMetrics()
    group = 'a "quoted" back\\slash, größe=大}'
    port = await serve(lambda: metrics.exposition([Capacity("west", "agents", "py", "p1", group, idle=3)]))
    response = await client.get(f"http://127.0.0.1:{port}/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == CONTENT_TYPE
    assert "server" not in response.headers
    assert values(response.text, "agentbox_federation_env_idle", "group") == {group: 3, "": 3}


async def test_health_is_ok_while_the_process_says_so(serve: Serve, client: httpx.AsyncClient) -> None:
    healthy = True
    port = await serve(healthy=lambda: healthy)
    response = await client.get(f"http://127.0.0.1:{port}/healthz")
    assert (response.status_code, response.text) == (200, "ok")
    healthy = False
    response = await client.get(f"http://127.0.0.1:{port}/healthz")
    assert response.status_code == 503
    assert response.text.count("\n") == 1


@pytest.mark.parametrize(
    "path", ["/", "/metrics/", "/metrics/x", "/healthz/", "/favicon.ico", "/v1/capacity", "//", "/%00"]
)
async def test_every_other_path_is_not_found(serve: Serve, client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(f"http://127.0.0.1:{await serve()}{path}")
    assert response.status_code == 404
    assert response.text == "404 not found; only GET /metrics and GET /healthz are served here\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/metrics", "/healthz"])
async def test_every_other_method_is_refused(serve: Serve, client: httpx.AsyncClient, method: str, path: str) -> None:
    response = await client.request(method, f"http://127.0.0.1:{await serve()}{path}")
    assert response.status_code == 405
    assert "GET" in response.headers["allow"]
    assert response.text == "405 method not allowed; only GET /metrics and GET /healthz are served here\n"


async def test_head_is_a_get_without_the_body(serve: Serve, client: httpx.AsyncClient) -> None:
    response = await client.head(f"http://127.0.0.1:{await serve()}/metrics")
    assert (response.status_code, response.content) == (200, b"")


async def test_an_ipv6_address_can_be_bound(nursery: trio.Nursery, client: httpx.AsyncClient) -> None:
    start = partial(nursery.start, partial(serve_metrics, "::1", 0, exposition=lambda: b"up 1\n"))
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:  # a machine without IPv6 must say so in one line
        with pytest.raises(FederationError, match=r"^metrics: cannot listen on \[::1\]:0: .*choose another"):
            await serve_metrics("::1", 0, exposition=lambda: b"")
    else:
        response = await client.get(f"http://[::1]:{await start()}/metrics")
        assert response.text == "up 1\n"


async def test_a_taken_port_is_one_clear_line(serve: Serve) -> None:
    port = await serve()
    with pytest.raises(FederationError) as caught:
        await serve_metrics("127.0.0.1", port, exposition=lambda: b"")
    assert str(caught.value) == (
        f"metrics: cannot listen on 127.0.0.1:{port}: address already in use; choose another [metrics] bind"
    )
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EADDRINUSE


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "a" * 64 + ".example"])
async def test_an_address_that_is_not_ours_is_one_clear_line(host: str) -> None:
    with pytest.raises(FederationError) as caught:
        await serve_metrics(host, 9464, exposition=lambda: b"")
    shown = f"[{host}]" if ":" in host else host
    assert str(caught.value).startswith(f"metrics: cannot listen on {shown}:9464: ")
    assert str(caught.value).endswith("; choose another [metrics] bind")
    assert "\n" not in str(caught.value)


async def test_a_failing_exposition_costs_its_scrapes_and_is_logged_once(
    serve: Serve, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    failing: Exception | None = RuntimeError("no snapshot")

    def exposition() -> bytes:
        if failing is not None:
            raise failing
        return b"up 1\n"

    url = f"http://127.0.0.1:{await serve(exposition)}/metrics"
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            response = await client.get(url)
            assert response.status_code == 500
            assert response.text == "500 the metrics could not be written; the log says why\n"
        assert [record.exc_info is not None for record in caplog.records if record.name == "trio_federation.admin"] == [
            True
        ]
        failing = None
        assert (await client.get(url)).text == "up 1\n"
        failing = RuntimeError("no snapshot")
        assert (await client.get(url)).status_code == 500
    assert len([record for record in caplog.records if record.name == "trio_federation.admin"]) == 2


async def test_expired_rows_are_gone_at_the_next_scrape(serve: Serve, client: httpx.AsyncClient) -> None:
    now = 0.0
    capacities = Registry("a", ttl=30.0, clock=lambda: now)
    metrics = FederationMetrics()
    url = f"http://127.0.0.1:{await serve(lambda: metrics.exposition(capacities.snapshot(), now=now))}/metrics"
    capacities.upsert([Capacity("b", "agents", "py", "p1", idle=5)])
    now = 20.0
    capacities.upsert([Capacity("c", "agents", "py", "p1", idle=6)])
    text = (await client.get(url)).text
    assert values(text, "agentbox_federation_env_idle", "cluster") == {"b": 5, "c": 6}
    assert values(text, "trio_federation_member_age_seconds", "cluster") == {"b": 20, "c": 0}
    now = 31.0
    text = (await client.get(url)).text
    assert values(text, "agentbox_federation_env_idle", "cluster") == {"c": 6}
    assert 'cluster="b"' not in text


async def test_two_agents_in_one_process_have_metrics_of_their_own(serve: Serve, client: httpx.AsyncClient) -> None:
    ports = []
    for cluster in ("west", "east"):
        metrics = FederationMetrics()
        metrics.source_failed(cluster)
        ports.append(await serve(partial(metrics.exposition, [Capacity(cluster, "agents", "py", "p1", idle=1)])))
    west, east = [(await client.get(f"http://127.0.0.1:{port}/metrics")).text for port in ports]
    for text, cluster in ((west, "west"), (east, "east")):
        assert values(text, "agentbox_federation_env_idle", "cluster") == {cluster: 1}
        assert values(text, "trio_federation_source_failures_total", "source") == {cluster: 1}


async def test_scrapes_stay_complete_while_capacity_changes(serve: Serve, client: httpx.AsyncClient) -> None:
    """Scrapes over HTTP while a task updates the registry: in each, the groups add up to the whole env."""
    capacities = Registry("a", ttl=30.0, clock=lambda: 0.0)
    metrics = FederationMetrics()
    url = f"http://127.0.0.1:{await serve(lambda: metrics.exposition(capacities.snapshot()))}/metrics"
    updates = 0

    async def update() -> None:
        nonlocal updates
        while True:
            updates += 1
            pools = range(1 + updates % 5)
            capacities.upsert(Capacity("b", "agents", "py", f"p{n}", f"g{n % 2}", idle=updates) for n in pools)
            await trio.lowlevel.checkpoint()

    seen = set()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(update)
        await trio.lowlevel.checkpoint()
        for _ in range(100):
            groups = values((await client.get(url)).text, "agentbox_federation_env_idle", "group")
            whole = groups.pop("")
            assert whole == sum(groups.values())
            seen.add(whole)
        nursery.cancel_scope.cancel()
    assert len(seen) > 50


async def test_a_scrape_starts_no_thread(serve: Serve, client: httpx.AsyncClient) -> None:
    before = set(threading.enumerate())
    during: set[threading.Thread] = set()

    def exposition() -> bytes:
        during.update(threading.enumerate())
        return b"up 1\n"

    response = await client.get(f"http://127.0.0.1:{await serve(exposition)}/metrics")
    assert response.status_code == 200
    assert during | set(threading.enumerate()) == before


async def test_200_silent_clients_neither_stop_a_scrape_nor_stay(
    serve: Serve, client: httpx.AsyncClient, connect: Connect, clock: trio.testing.MockClock
) -> None:
    port = await serve(max_connections=1000)
    silent = [await connect(port) for _ in range(200)]
    with trio.fail_after(3):
        assert (await client.get(f"http://127.0.0.1:{port}/metrics")).text == "up 1\n"
    await pass_time(clock, IDLE_TIMEOUT, port)
    async with trio.open_nursery() as nursery:
        for stream in silent:
            nursery.start_soon(read_to_end, stream)


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nHo", id="half a head"),
        pytest.param(REQUEST, id="nothing more"),
    ],
)
async def test_a_client_that_asks_for_nothing_is_closed(
    serve: Serve, connect: Connect, clock: trio.testing.MockClock, begun: bytes
) -> None:
    port = await serve()
    stream = await connect(port, begun)
    await pass_time(clock, IDLE_TIMEOUT, port)
    await read_to_end(stream, within=REQUEST_TIMEOUT - IDLE_TIMEOUT - 1)


async def test_an_http2_client_that_asks_for_nothing_is_closed(
    serve: Serve, connect: Connect, clock: trio.testing.MockClock
) -> None:
    port = await serve()
    stream = await connect(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    await pass_time(clock, REQUEST_TIMEOUT, port)
    await read_to_end(stream)


async def test_a_client_that_drips_its_request_is_closed(
    serve: Serve, connect: Connect, clock: trio.testing.MockClock
) -> None:
    port = await serve()
    stream = await connect(port, b"GET /metrics HTTP/1.1\r\nx: ")
    for _ in range(10):
        await pass_time(clock, IDLE_TIMEOUT / 10, port)
        with suppress(trio.BrokenResourceError):  # on a slow machine the end comes before the last byte
            await stream.send_all(b"y")
    await read_to_end(stream, within=REQUEST_TIMEOUT - IDLE_TIMEOUT - 1)


async def test_a_request_whose_body_never_comes_is_answered_and_closed(serve: Serve, connect: Connect) -> None:
    begun = b"POST /metrics HTTP/1.1\r\nHost: test\r\nContent-Length: 1000\r\n\r\nx"
    assert (await read_to_end(await connect(await serve(), begun))).startswith(b"HTTP/1.1 405")


async def test_a_body_in_thousands_of_pieces_does_not_stay(
    serve: Serve, connect: Connect, clock: trio.testing.MockClock
) -> None:
    port = await serve()
    head = b"POST /metrics HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    stream = await connect(port, head + b"1\r\nx\r\n" * 5000)
    await pass_time(clock, REQUEST_TIMEOUT, port)
    assert (await read_to_end(stream)).startswith(b"HTTP/1.1 405")


async def test_an_answer_that_nobody_reads_ends_with_its_time(
    serve: Serve, connect_unread: Connect, clock: trio.testing.MockClock
) -> None:
    port = await serve(lambda: b"x" * BIG)
    stream = await connect_unread(port)
    await pass_time(clock, REQUEST_TIMEOUT, port)
    await is_reset(stream)


async def test_each_request_has_its_time_anew(serve: Serve, connect: Connect, clock: trio.testing.MockClock) -> None:
    port = await serve(idle_timeout=3 * REQUEST_TIMEOUT)
    stream = await connect(port)
    for _ in range(5):
        await stream.send_all(REQUEST)
        answer = b""
        while not answer.endswith(b"up 1\n"):
            answer += (part := await stream.receive_some())
            assert part, "closed although each request was answered in time"
        await pass_time(clock, REQUEST_TIMEOUT / 2, port)


async def test_a_client_that_leaves_in_the_middle_of_a_reply_harms_nobody(
    serve: Serve, client: httpx.AsyncClient, connect_unread: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    body = b"x" * BIG
    port = await serve(lambda: body)
    with caplog.at_level(logging.DEBUG, "trio_federation"):
        for _ in range(5):
            stream = await connect_unread(port)
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
            await stream.aclose()
        body = b"up 1\n"
        with trio.fail_after(3):
            assert (await client.get(f"http://127.0.0.1:{port}/metrics")).text == "up 1\n"
    assert not caplog.records


async def test_http2_data_after_the_answer_ends_that_connection_only(
    serve: Serve, client: httpx.AsyncClient, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    port = await serve()
    stream = await connect(port)
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    connection.send_headers(1, [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "test")])
    await stream.send_all(connection.data_to_send())
    answered = False
    with trio.fail_after(5):
        while not answered:
            events = connection.receive_data(await stream.receive_some())
            answered = any(isinstance(event, h2.events.StreamEnded) for event in events)
    connection.send_data(1, b"x")
    await stream.send_all(connection.data_to_send())
    await read_to_end(stream)
    assert (await client.get(f"http://127.0.0.1:{port}/metrics")).text == "up 1\n"
    lines = [record.getMessage() for record in caplog.records if record.name == "trio_federation.admin"]
    assert len(lines) == 1
    assert "the others go on" in lines[0]


@pytest.mark.parametrize(
    "rubbish",
    [
        bytes(range(256)) * 8,
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: test\r\nx: " + b"y" * 100_000,
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: !\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_rubbish_ends_its_own_connection_only(
    serve: Serve, client: httpx.AsyncClient, connect: Connect, clock: trio.testing.MockClock, rubbish: bytes
) -> None:
    port = await serve()
    stream = await connect(port, rubbish)
    await pass_time(clock, REQUEST_TIMEOUT, port)
    assert b" 200 " not in await read_to_end(stream)
    assert (await client.get(f"http://127.0.0.1:{port}/metrics")).text == "up 1\n"


async def test_past_the_limit_the_oldest_connection_makes_room(
    serve: Serve, client: httpx.AsyncClient, connect: Connect
) -> None:
    port = await serve(max_connections=3)
    oldest, *others = [await connect(port) for _ in range(3)]
    assert (await client.get(f"http://127.0.0.1:{port}/metrics")).text == "up 1\n"
    assert await read_to_end(oldest) == b""
    for stream in others:
        await stream.send_all(REQUEST)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


async def test_a_failing_application_costs_one_answer(nursery: trio.Nursery, client: httpx.AsyncClient) -> None:
    calls = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("broken")

    port = await nursery.start(partial(serve_http, app, "127.0.0.1", 0, section="admin"))
    for _ in range(2):
        assert (await client.get(f"http://127.0.0.1:{port}/")).status_code == 500
    assert calls == 2


async def test_a_hanging_application_ends_with_its_time(
    nursery: trio.Nursery, connect: Connect, clock: trio.testing.MockClock
) -> None:
    called, ended = trio.Event(), trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    port = await nursery.start(partial(serve_http, app, "127.0.0.1", 0, section="admin"))
    stream = await connect(port, REQUEST)
    await called.wait()
    clock.jump(REQUEST_TIMEOUT)
    assert await read_to_end(stream) == b""
    with trio.fail_after(5):
        await ended.wait()


async def test_cancelling_ends_at_once_whatever_the_clients_do(connect: Connect, connect_unread: Connect) -> None:
    clients: list[trio.SocketStream] = []
    async with trio.open_nursery() as nursery:
        port = await nursery.start(partial(serve_metrics, "127.0.0.1", 0, exposition=lambda: b"x" * BIG))
        for begun in (b"", b"GET /metrics HT", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            clients.append(await connect(port, begun))
        clients += [await connect_unread(port) for _ in range(3)]
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began < 2
    for client in clients:
        assert len(await read_to_end(client)) < BIG
    # the port is free again
    async with trio.open_nursery() as nursery:
        assert await nursery.start(partial(serve_metrics, "127.0.0.1", port, exposition=lambda: b"")) == port
        nursery.cancel_scope.cancel()

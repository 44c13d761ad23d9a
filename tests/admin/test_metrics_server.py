"""The metrics port over real sockets: what it answers, and that no client can hold it up."""

from __future__ import annotations

import errno
import logging
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import h2.config
import h2.connection
import httpx
import pytest
import trio
import trio.testing
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.typing import EventDict

from tests.admin.conftest import Connect, Serve
from tests.admin.helpers import BIG, READY, REQUEST, answers, is_reset, pass_time, read_to_end
from trio_federation.admin import Answers, metrics_app
from trio_federation.admin.server import (
    IDLE_TIMEOUT,
    MAX_CONNECTIONS,
    REQUEST_TIMEOUT,
    WARNING_INTERVAL,
    serve_http,
)
from trio_federation.capacity import Capacity
from trio_federation.errors import FederationError
from trio_federation.metrics import CONTENT_TYPE, publish_metrics
from trio_federation.registry import Registry

ONLY = "only GET /metrics, GET /healthz and GET /readyz are served here"


async def serve_metrics(host: str, port: int, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    """The metrics port on any address."""
    await serve_http(metrics_app(answers()), host, port, section="metrics", task_status=task_status)


def values(text: str, name: str, label: str) -> dict[str, float]:
    """One gauge of an exposition, by one of its labels."""
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def exposed(records: Iterable[Capacity], now: float | None = None) -> bytes:
    """Records as Prometheus' text."""
    registry = CollectorRegistry()
    publish_metrics(records, registry, now=now)
    return generate_latest(registry)


async def test_metrics_are_served_as_prometheus_reads_them(serve: Serve, client: httpx.AsyncClient) -> None:
    group = 'a "quoted" back\\slash, größe=大}'
    port = await serve(lambda: exposed([Capacity("west", "agents", "py", "p1", group, idle=3)]))
    response = await client.get(f"http://127.0.0.1:{port}/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == CONTENT_TYPE
    assert "server" not in response.headers
    assert values(response.text, "agentbox_federation_env_idle", "group") == {group: 3, "": 3}


async def test_health_is_ok_while_the_process_says_so(serve: Serve, client: httpx.AsyncClient) -> None:
    healthy = True
    port = await serve(answers(healthy=lambda: healthy))
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
    assert response.text == f"404 not found; {ONLY}\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
async def test_every_other_method_is_refused(serve: Serve, client: httpx.AsyncClient, method: str, path: str) -> None:
    response = await client.request(method, f"http://127.0.0.1:{await serve()}{path}")
    assert response.status_code == 405
    assert "GET" in response.headers["allow"]
    assert response.text == f"405 method not allowed; {ONLY}\n"


async def test_head_is_a_get_without_the_body(serve: Serve, client: httpx.AsyncClient) -> None:
    response = await client.head(f"http://127.0.0.1:{await serve()}/metrics")
    assert (response.status_code, response.content) == (200, b"")


async def test_an_ipv6_address_can_be_bound(nursery: trio.Nursery, client: httpx.AsyncClient) -> None:
    start = partial(nursery.start, partial(serve_metrics, "::1", 0))
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:  # a machine without IPv6 must say so in one line
        with pytest.raises(FederationError, match=r"^metrics: cannot listen on \[::1\]:0: .*choose another"):
            await serve_metrics("::1", 0)
    else:
        response = await client.get(f"http://[::1]:{await start()}/metrics")
        assert response.text == "up 1\n"


async def test_a_taken_port_is_one_clear_line(serve: Serve) -> None:
    port = await serve()
    with pytest.raises(FederationError) as caught:
        await serve_metrics("127.0.0.1", port)
    assert str(caught.value) == (
        f"metrics: cannot listen on 127.0.0.1:{port}: address already in use; choose another [metrics] bind"
    )
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EADDRINUSE


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "a" * 64 + ".example"])
async def test_an_address_that_is_not_ours_is_one_clear_line(host: str) -> None:
    with pytest.raises(FederationError) as caught:
        await serve_metrics(host, 9464)
    shown = f"[{host}]" if ":" in host else host
    assert str(caught.value).startswith(f"metrics: cannot listen on {shown}:9464: ")
    assert str(caught.value).endswith("; choose another [metrics] bind")
    assert "\n" not in str(caught.value)


async def test_a_failing_exposition_costs_its_scrapes_and_is_logged_once(
    serve: Serve, client: httpx.AsyncClient, logs: list[EventDict]
) -> None:
    failing: Exception | None = RuntimeError("no snapshot")

    def exposition() -> bytes:
        if failing is not None:
            raise failing
        return b"up 1\n"

    url = f"http://127.0.0.1:{await serve(exposition)}/metrics"
    for _ in range(3):
        response = await client.get(url)
        assert response.status_code == 500
        assert response.text == "500 the metrics could not be written; the log says why\n"
    told = [(line["event"], line["what"], line["exc_info"]) for line in logs]
    assert told == [("answer_failed", "/metrics", failing)]
    failing = RuntimeError("another reason")
    assert (await client.get(url)).status_code == 500
    failing = None
    for _ in range(2):
        assert (await client.get(url)).text == "up 1\n"
    failing = RuntimeError("another reason")
    assert (await client.get(url)).status_code == 500
    told_since = [line["event"] for line in logs[1:]]
    assert told_since == ["answer_failed", "answer_works", "answer_failed"]


async def test_expired_rows_are_gone_at_the_next_scrape(serve: Serve, client: httpx.AsyncClient) -> None:
    now = 0.0
    capacities = Registry("a", ttl=30.0, clock=lambda: now)
    url = f"http://127.0.0.1:{await serve(lambda: exposed(capacities.snapshot(), now))}/metrics"
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
    ports = [await serve(partial(exposed, [Capacity(name, "agents", "py", "p1", idle=1)])) for name in ("west", "east")]
    west, east = [(await client.get(f"http://127.0.0.1:{port}/metrics")).text for port in ports]
    assert values(west, "agentbox_federation_env_idle", "cluster") == {"west": 1}
    assert values(east, "agentbox_federation_env_idle", "cluster") == {"east": 1}


async def test_scrapes_stay_complete_while_capacity_changes(serve: Serve, client: httpx.AsyncClient) -> None:
    """Scrapes over HTTP while a task updates the registry: in each, the groups add up to the whole env."""
    capacities = Registry("a", ttl=30.0, clock=lambda: 0.0)
    url = f"http://127.0.0.1:{await serve(lambda: exposed(capacities.snapshot()))}/metrics"
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


@pytest.mark.parametrize("limit", [MAX_CONNECTIONS, 1000])
async def test_silent_slow_and_leaving_clients_neither_stop_a_scrape_nor_stay(
    serve: Serve,
    client: httpx.AsyncClient,
    connect: Connect,
    connect_unread: Connect,
    clock: trio.testing.MockClock,
    limit: int,
) -> None:
    """200 clients ask for nothing, one leaves in the middle of its answer, one takes its answer a byte at a time."""
    begun, ended = 0, 0
    size = BIG

    async def exposition() -> AsyncIterator[bytes]:
        nonlocal begun, ended
        begun += 1
        try:
            for _ in range(size // 2**16):
                yield b"x" * 2**16
            yield b"up 1\n"
        finally:
            ended += 1

    port = await serve(Answers(exposition=exposition, readiness=lambda: READY), max_connections=limit)
    slow = await connect_unread(port)
    silent = [await connect(port) for _ in range(200)]
    await drop(await connect_unread(port))
    for _ in range(100):
        assert await slow.receive_some(1)
    size = 0
    with trio.fail_after(1):
        assert (await client.get(f"http://127.0.0.1:{port}/metrics")).text == "up 1\n"
    await pass_time(clock, IDLE_TIMEOUT, port)
    async with trio.open_nursery() as nursery:
        for stream in silent:
            nursery.start_soon(read_to_end, stream)
    clock.jump(REQUEST_TIMEOUT)
    await is_reset(slow)
    with trio.fail_after(1):
        assert (await client.get(f"http://127.0.0.1:{port}/metrics")).text == "up 1\n"
    assert begun == ended == 4


@pytest.mark.parametrize("asked_before", [False, True])
async def test_silent_clients_do_not_end_an_answer_that_is_under_way(
    serve: Serve, client: httpx.AsyncClient, connect: Connect, asked_before: bool
) -> None:
    half, rest = trio.Event(), trio.Event()

    async def exposition() -> AsyncIterator[bytes]:
        yield b"up "
        half.set()
        await rest.wait()
        yield b"1\n"

    port = await serve(Answers(exposition=exposition, readiness=lambda: READY), max_connections=5)
    async with client.stream("GET", f"http://127.0.0.1:{port}/metrics") as response:
        await half.wait()
        silent = []
        for _ in range(10):
            silent.append(await connect(port))
            if asked_before:
                await silent[-1].send_all(b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n")
                assert (await silent[-1].receive_some()).startswith(b"HTTP/1.1 200")
        for stream in silent[:6]:
            await read_to_end(stream)
        rest.set()
        assert await response.aread() == b"up 1\n"


async def test_pieces_are_sent_as_they_come(serve: Serve, connect: Connect) -> None:
    more = trio.Event()

    async def exposition() -> AsyncIterator[bytes]:
        yield b"first"
        yield b""
        await more.wait()
        yield b"second"

    stream = await connect(await serve(Answers(exposition=exposition, readiness=lambda: READY)), REQUEST)
    text = b""
    with trio.fail_after(5):
        while b"first" not in text:
            text += await stream.receive_some()
        assert b"second" not in text
        more.set()
        while not text.endswith(b"0\r\n\r\n"):
            text += await stream.receive_some()
    assert b"6\r\nsecond\r\n" in text


async def test_an_answer_that_fails_half_way_is_no_whole_answer(
    serve: Serve, client: httpx.AsyncClient, logs: list[EventDict]
) -> None:
    async def exposition() -> AsyncIterator[bytes]:
        yield b"up 1\n"
        raise RuntimeError("half way")

    url = f"http://127.0.0.1:{await serve(Answers(exposition=exposition, readiness=lambda: READY))}/metrics"
    for _ in range(2):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(url)
    assert [line["event"] for line in logs] == ["answer_failed"]


async def test_a_client_that_leaves_ends_the_making_of_its_answer(serve: Serve, connect_unread: Connect) -> None:
    ended = trio.Event()

    async def exposition() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
                await trio.sleep(0.01)
        finally:
            ended.set()

    port = await serve(Answers(exposition=exposition, readiness=lambda: READY))
    await drop(await connect_unread(port))
    with trio.fail_after(3):
        await ended.wait()


async def test_head_costs_no_more_than_the_first_piece(serve: Serve, client: httpx.AsyncClient) -> None:
    pieces = 0

    async def exposition() -> AsyncIterator[bytes]:
        nonlocal pieces
        while True:
            pieces += 1
            yield b"up 1\n"

    response = await client.head(
        f"http://127.0.0.1:{await serve(Answers(exposition=exposition, readiness=lambda: READY))}/metrics"
    )
    assert (response.status_code, response.content, pieces) == (200, b"", 1)
    assert response.headers["content-type"] == CONTENT_TYPE


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
        while not answer.endswith(b"0\r\n\r\n"):
            answer += (part := await stream.receive_some())
            assert part, "closed although each request was answered in time"
        await pass_time(clock, REQUEST_TIMEOUT / 2, port)


async def test_a_client_that_leaves_in_the_middle_of_a_reply_harms_nobody(
    serve: Serve,
    client: httpx.AsyncClient,
    connect_unread: Connect,
    logs: list[EventDict],
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = b"x" * BIG
    port = await serve(lambda: body)
    with caplog.at_level(logging.DEBUG, "trio_federation"):
        for _ in range(5):
            await drop(await connect_unread(port))
        body = b"up 1\n"
        with trio.fail_after(3):
            assert (await client.get(f"http://127.0.0.1:{port}/metrics")).text == "up 1\n"
    assert logs == []
    assert not caplog.records


async def test_http2_data_after_the_answer_ends_that_connection_only(
    serve: Serve, client: httpx.AsyncClient, connect: Connect, clock: trio.testing.MockClock, logs: list[EventDict]
) -> None:
    port = await serve()
    for _ in range(3):
        await send_data_after_the_answer(await connect(port))
    assert (await client.get(f"http://127.0.0.1:{port}/metrics")).text == "up 1\n"
    told = [(line["event"], line["log_level"], line["server"]) for line in logs]
    assert told == [("http_connection_failed", level, "metrics") for level in ("warning", "debug", "debug")]
    await pass_time(clock, WARNING_INTERVAL, port)
    await send_data_after_the_answer(await connect(port))
    assert (await client.get(f"http://127.0.0.1:{port}/metrics")).text == "up 1\n"
    assert (logs[-1]["log_level"], logs[-1]["more"]) == ("warning", 2)


async def drop(stream: trio.SocketStream) -> None:
    """Close with a reset."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await stream.aclose()


async def send_data_after_the_answer(stream: trio.SocketStream) -> None:
    """An HTTP/2 client that goes on with a request that has been answered; until the server closes."""
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


async def test_a_failing_application_costs_one_answer(
    nursery: trio.Nursery, client: httpx.AsyncClient, logs: list[EventDict]
) -> None:
    calls = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("broken")

    port = await nursery.start(partial(serve_http, app, "127.0.0.1", 0, section="admin"))
    for _ in range(2):
        assert (await client.get(f"http://127.0.0.1:{port}/")).status_code == 500
    assert calls == 2
    told = [(line["event"], line["server"], line["path"]) for line in logs]
    assert told == [("http_answer_failed", "admin", "/")] * 2


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
        port = await nursery.start(
            partial(serve_http, metrics_app(answers(lambda: b"x" * BIG)), "127.0.0.1", 0, section="metrics")
        )
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
        assert await nursery.start(partial(serve_metrics, "127.0.0.1", port)) == port
        nursery.cancel_scope.cancel()

"""gRPC's own implementation where streams die or are ended in good order: as a hub that says goodbye, by and by or
again and again, and that allows only so many pings; and as a client that pings us, and whose silence we notice. On real
sockets; where retries are waited for, Trio's clock runs ten times as fast as the real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import grpc
import pytest
import trio
from hyperframe.frame import Frame, GoAwayFrame, PingFrame
from trio.testing import MockClock

from tests.interop import peers
from tests.interop.peers import NO_LIMITS, SECRET, GrpcHub, LogWatch, Schema, Worker, record
from tests.interop.strangers import Seen, refusal, running_hub, until
from tests.interop.test_grpcio_hub import HUB, plain, running_agent
from tests.simulation import member
from trio_federation.config import Federation, HubSettings, Secret
from trio_federation.rpc.floods import FrameBudget

#: Nothing counts as silent, however slow the machine is, where the clock runs fast.
PATIENT = Federation(keepalive=100, silence_limit=1000)


@pytest.fixture
def clock() -> MockClock:
    """Ten times as fast as the real one."""
    return MockClock(rate=10)


@contextmanager
def options_of_servers(monkeypatch: pytest.MonkeyPatch, *options: tuple[str, int]) -> Iterator[None]:
    """Servers of gRPC's that are made inside have these options."""
    with monkeypatch.context() as patch:
        patch.setattr(peers, "NO_LIMITS", [*NO_LIMITS, *options])
        yield


class Truth:
    """Plays the part of a hub on every connection that an agent makes to one of gRPC's: takes its reports, and tells
    each watch all there is first."""

    def __init__(self, hub: GrpcHub, *rows: dict[str, Any]) -> None:
        self._hub = hub
        self._rows = rows
        #: of each report, what its first message has named
        self.first: list[list[str]] = []
        #: how many watches there were
        self.watches = 0

    async def take_reports(self) -> None:
        """Until cancelled."""
        while True:
            report = await self._hub.next_report()
            message = await report.next()
            if isinstance(message, self._hub.schema.ReportFederationRequest):
                self.first.append(sorted(item.member_pool for item in message.items))

    async def tell_watches(self) -> None:
        """Until cancelled."""
        while True:
            watch = await self._hub.next_watch()
            watch.send(self._hub.schema.broadcast(*self._rows))
            self.watches += 1


@asynccontextmanager
async def played(truth: Truth) -> AsyncIterator[None]:
    """Inside, the part is played."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(truth.take_reports)
        nursery.start_soon(truth.tell_watches)
        yield
        nursery.cancel_scope.cancel()


def failures(logs: LogWatch) -> list[str]:
    """What was said of the connection and of calls, in their order."""
    return [entry["error"] for entry in logs.of("hub_failed")]


# --- a hub that says goodbye -----------------------------------------------------------------------------------------


async def test_a_hub_that_stops_with_grace(schema: Schema, logs: LogWatch, clock: MockClock) -> None:
    """It says goodbye at once, and would wait for calls to end. The agent goes, is back when the hub is, and nothing is
    withdrawn meanwhile, on either side."""
    settings = PATIENT
    async with GrpcHub(schema) as hub, running_agent(hub.port, member("west", idle=3), settings=settings) as west:
        report = await hub.next_report()
        await report.next()
        (await hub.next_watch()).send(schema.broadcast(record("east", idle=2)))
        await west.wait_until(lambda: len(west.foreign()) == 1)
        known = west.foreign()
        stopped = hub._server.stop(grace=10.0)
        failed = await logs.wait_for("hub_failed")
        assert failed["call"] == "connection"
        assert failed["error"].startswith(("the peer said goodbye (NO_ERROR", "the peer closed the connection"))
        assert west.foreign() == known
        assert [message for message in await report.rest() if message not in (None, peers.BrokenOff)] == []
        # Nobody is left to be waited for.
        assert await trio.to_thread.run_sync(stopped.wait, 5.0)
        async with GrpcHub(schema, port=hub.port) as again:
            message = await (await again.next_report()).next()
            assert [plain(item) for item in message.items] == [record("west", idle=3)]
            assert west.foreign() == known
            (await again.next_watch()).send(schema.broadcast(record("east", idle=5)))
            await west.wait_until(lambda: [row.idle for row in west.foreign()] == [5])
            assert west.metric("trio_federation_hub_reconnects_total", hub=HUB) == 1
    warnings = [entry for entry in logs.of("hub_failed") if entry["level"] == "warning"]
    assert [entry["call"] for entry in warnings] == ["connection"]


@pytest.mark.slow
async def test_a_hub_that_says_goodbye_every_second(
    schema: Schema, logs: LogWatch, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections may be a tenth of a second old, which is one of Trio's. Streams go on by connecting again; each
    time everything is told once in each direction, and nothing is ever missing or there twice."""
    with options_of_servers(monkeypatch, ("grpc.max_connection_age_ms", 100), ("grpc.max_connection_age_grace_ms", 50)):
        hub = GrpcHub(schema)
    # Nothing is told again but because of a new call.
    settings = Federation(keepalive=100, silence_limit=1000, ttl=1000, report_interval=300, resync_interval=300)
    rows = [member("west", f"p{number}", idle=number) for number in range(3)]
    truth = Truth(hub, *[record("east", f"p{number}", idle=number) for number in range(4)])
    seen: list[Counter[str]] = []
    async with hub, running_agent(hub.port, *rows, settings=settings) as west, played(truth):
        await west.wait_until(lambda: len(west.foreign()) == 4)
        while truth.watches < 6 or len(truth.first) < 6:
            with trio.move_on_after(60):
                await west.wait_until(lambda before=truth.watches: truth.watches > before)  # type: ignore[misc]
            seen.append(Counter(row.member_pool for row in west.foreign()))
        assert set(map(str, seen)) == {str(Counter(f"p{number}" for number in range(4)))}
        assert truth.first == [["p0", "p1", "p2"]] * len(truth.first)
        assert west.metric("trio_federation_hub_reconnects_total", hub=HUB) >= 4
    assert all(error.startswith("the peer said goodbye (NO_ERROR: max_age)") for error in failures(logs))
    # One line, and not one a second.
    warnings = [entry for entry in logs.of("hub_failed") if entry["level"] == "warning"]
    assert len(warnings) == 1


# --- a hub that allows so many pings ---------------------------------------------------------------------------------


@pytest.mark.slow
async def test_pings_become_as_rare_as_a_hub_allows_and_no_rarer(
    schema: Schema, logs: LogWatch, clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ping in 0.3 s, which are three of Trio's, and one more often than that, are allowed. The interval doubles
    until it is allowed, and stays; people hear of it once."""
    with options_of_servers(
        monkeypatch,
        ("grpc.http2.min_ping_interval_without_data_ms", 300),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 300),
        ("grpc.http2.max_ping_strikes", 1),
    ):
        hub = GrpcHub(schema)
    settings = Federation(keepalive=1.0, silence_limit=1000, report_interval=3000, resync_interval=3000, ttl=9000)
    truth = Truth(hub, record("east", idle=2))
    async with hub, running_agent(hub.port, member("west", idle=1), settings=settings) as west, played(truth):
        told = await logs.wait_for("hub_forbids_pings")
        while told["keepalive"] < 4.0:
            told = await logs.wait_for("hub_forbids_pings", len(logs.of("hub_forbids_pings")) + 1)
        await west.wait_until(lambda: truth.watches > len(logs.of("hub_forbids_pings")))
        # Signs of life go on, five of them, and no further goodbye comes.
        heard = west.metric("trio_federation_hub_received_bytes_total", hub=HUB)
        await until(
            lambda: (
                west.metric("trio_federation_hub_received_bytes_total", hub=HUB) >= heard + 5 * 17
                or len(logs.of("hub_forbids_pings")) > 2
            )
        )
        assert [entry["keepalive"] for entry in logs.of("hub_forbids_pings")] == [2.0, 4.0]
        assert len(west.foreign()) == 1
        (hub_shown,) = west.agent.health()["hubs"]
        assert hub_shown["state"] == "connected"
    assert [entry["level"] for entry in logs.of("hub_forbids_pings")] == ["warning", "debug"]
    assert all("ENHANCE_YOUR_CALM: too_many_pings" in error for error in failures(logs))


# --- a client that pings ---------------------------------------------------------------------------------------------

#: Once a second, as gRPC's own minimum is.
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


@contextmanager
def counted_frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Frame]]:
    """What comes in at our side of connections, frame by frame."""
    frames: list[Frame] = []
    real = FrameBudget.received

    def received(self: FrameBudget, frame: Frame, now: float) -> str | None:
        frames.append(frame)
        return real(self, frame, now)

    with monkeypatch.context() as patch:
        patch.setattr(FrameBudget, "received", received)
        yield frames


def pinging_worker(schema: Schema, port: int, cluster: str, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker of gRPC's that pings every second."""
    with monkeypatch.context() as patch:
        patch.setattr(peers, "NO_LIMITS", [*NO_LIMITS, *KEEPALIVE])
        return Worker(schema, port, cluster)


def pings(frames: Sequence[Frame], *, answers: bool) -> int:
    """How many there are among frames: pings, or answers to ours."""
    return sum(isinstance(frame, PingFrame) and ("ACK" in frame.flags) == answers for frame in frames)


@pytest.mark.slow
async def test_a_client_may_ping_every_second(schema: Schema, logs: LogWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does into silence, with calls and without, and nobody complains."""
    settings = HubSettings(secret=Secret(SECRET), keepalive=30, silence_limit=90)
    with counted_frames(monkeypatch) as frames:
        async with running_hub(logs, settings) as host:
            with pinging_worker(schema, host.port, "west", monkeypatch) as west:
                watch = west.watch()
                report = west.report(schema.report(record("west", idle=1)))
                await watch.next()
                await until(lambda: pings(frames, answers=False) >= 3)
                report.send(schema.report(record("west", idle=2)))
                await until(lambda: host.idle.get(("west", "p1")) == 2)
                assert host.metric("reporters") == host.metric("watchers") == 1
                # Also when it has no call.
                report.close()
                watch.close()
                await until(lambda: host.metric("reporters") == host.metric("watchers") == 0)
                before = pings(frames, answers=False)
                await until(lambda: pings(frames, answers=False) > before)
                assert host.metric("connections_cut_total") == 0
            assert not any(isinstance(frame, GoAwayFrame) and frame.error_code for frame in frames)
    assert logs.of("connection_cut") == []


class Line:
    """A TCP connection through which a client reaches a port, until nothing comes through any more."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.port = 0
        self._open = trio.Event()
        self._open.set()

    def stall(self) -> None:
        """Keep what comes, in both directions; and who connects waits."""
        self._open = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry, until cancelled."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._carry, listeners)
            task_status.started()

    async def _carry(self, stream: trio.SocketStream) -> None:
        await self._open.wait()
        async with await trio.open_tcp_stream("127.0.0.1", self._to) as other, trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, stream, other)
            nursery.start_soon(self._pump, other, stream)

    async def _pump(self, come: trio.SocketStream, go: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await come.receive_some():
                await self._open.wait()
                await go.send_all(data)
            await self._open.wait()
            await go.send_eof()


@pytest.mark.slow
async def test_a_line_that_dies_is_noticed_by_both_sides(
    schema: Schema, logs: LogWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's client by its keepalive, our hub by its own; what was reported stays, as nobody has withdrawn it, and
    others do not notice."""
    settings = HubSettings(secret=Secret(SECRET), keepalive=0.25, silence_limit=1.2)
    with counted_frames(monkeypatch) as frames:
        async with running_hub(logs, settings) as host, trio.open_nursery() as nursery:
            line = Line(host.port)
            await nursery.start(line.run)
            with (
                pinging_worker(schema, line.port, "west", monkeypatch) as west,
                Worker(schema, host.port, "east") as east,
            ):
                seen = Seen(east.watch())
                watch = west.watch()
                report = west.report(schema.report(record("west", idle=1)))
                await watch.next()
                await seen.shows("west", 1)
                # It lives on our pings, into a silence that is longer than the limit.
                await until(lambda: pings(frames, answers=True) >= 12)
                line.stall()
                cut = await logs.wait_for("connection_cut")
                assert (cut["reason"], cut["error"]) == ("silent", "silent for 1.2 s")
                assert host.metric("connections_cut_total", reason="silent") == 1
                refused = await refusal(report.answer())
                assert refused.code is grpc.StatusCode.UNAVAILABLE
                # The hub goes on, and keeps what it was told.
                await until(lambda: host.metric("reporters") == 0)
                assert host.idle == {("west", "p1"): 1}
                steady = east.report(schema.report(record("east", idle=4)))
                await seen.shows("east", 4)
                assert seen.idle["west", "env/p1"] == 1
                assert host.metric("watchers") == 1
                steady.close()
            nursery.cancel_scope.cancel()
    assert [entry["said_goodbye"] for entry in logs.of("reporter_left") if entry["cluster"] == "west"] == [False]

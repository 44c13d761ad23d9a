"""grpcio as a worker, against our hub on a real socket."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
import trio
import trustme

from tests.federation.helpers import counted
from tests.interop.peers import SECRET, LogWatch, Refused, Schema, Worker, record
from trio_federation.config import HubSettings, Secret
from trio_federation.hub import Hub
from trio_federation.rpc import open_listeners, server_tls
from trio_federation.wire import MAX_RECEIVE

Code = grpc.StatusCode

#: 2**40: the age of what is withdrawn
WITHDRAWN = 2**40
ONE, OTHER = "0a" * 16, "0b" * 16


@dataclass
class RunningHub:
    """A hub of ours."""

    hub: Hub
    port: int
    logs: LogWatch

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series that the hub exports; 0 without it."""
        return counted(self.hub, name, **labels)


@asynccontextmanager
async def running_hub(logs: LogWatch, tls: tuple[str, str] | None = None) -> AsyncIterator[RunningHub]:
    hub = Hub(HubSettings(secret=Secret(SECRET)))
    listeners = await open_listeners("127.0.0.1", 0)
    context = None
    if tls is not None:
        context = server_tls(cert_file=tls[0], key_file=tls[1], client_ca_file=None)
    async with trio.open_nursery() as nursery:
        await nursery.start(hub.run, listeners, context)
        yield RunningHub(hub, listeners[0].socket.getsockname()[1], logs)
        nursery.cancel_scope.cancel()


@pytest.fixture
async def hub(logs: LogWatch) -> AsyncIterator[RunningHub]:
    async with running_hub(logs) as hub:
        yield hub


def plain(item: object) -> dict[str, object]:
    """The fields of a received record that are not zero, but its age, which depends on the day."""
    values = {field.name: value for field, value in item.ListFields()}  # type: ignore[attr-defined]
    values.pop("observed_for_ms", None)
    return values


# --- reporting and watching ------------------------------------------------------------------------------------------


async def test_what_is_reported_is_seen_by_who_watches(hub: RunningHub, schema: Schema) -> None:
    with (
        Worker(schema, hub.port, "west", instance=ONE) as west,
        Worker(schema, hub.port, "east", instance=OTHER) as east,
    ):
        watch = east.watch()
        # A snapshot first, even if it is empty.
        assert (await watch.next()).items == []
        full = record(
            "west",
            scaling_group="gpu",
            idle=1,
            running=2,
            pending=3,
            desired=4,
            capacity=-1,
            saturated_for=7,
            observed_for_ms=60,
            autoscaling_enabled=True,
            state="Active",
            seq=5,
        )
        report = west.report(schema.report(full, origins=[{"cluster_id": "west", "instance": ONE, "uptime_ms": 1000}]))
        received = await watch.next()
        [item] = received.items
        assert {**plain(item), "observed_for_ms": 60} == full
        assert 60 <= item.observed_for_ms < 20_000
        [origin] = received.origins
        assert (origin.cluster_id, origin.instance) == ("west", ONE)
        assert 1000 <= origin.uptime_ms < 21_000
        # Changes follow.
        report.send(schema.report(record("west", idle=9)))
        [item] = (await watch.next()).items
        assert plain(item) == record("west", idle=9)
        report.end()
        await report.answer()


async def test_a_newcomer_gets_everything_first(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west") as west, Worker(schema, hub.port, "east") as east:
        first = east.watch()
        await first.next()
        west.report(schema.report(*(record("west", f"p{number}", idle=number) for number in range(100))))
        await first.next()
        snapshot = await east.watch().next()
        assert {item.member_pool: item.idle for item in snapshot.items} == {
            f"p{number}": number for number in range(100)
        }
        # Age adds up through the hub.
        assert all(item.observed_for_ms >= 0 for item in snapshot.items)


async def test_a_watcher_may_be_spared_its_own_echo(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west") as west, Worker(schema, hub.port, "east") as east:
        spared, unspared = west.watch(spare_own_cluster=True), west.watch()
        await spared.next()
        await unspared.next()
        west.report(schema.report(record("west", idle=1)))
        assert [plain(item) for item in (await unspared.next()).items] == [record("west", idle=1)]
        east.report(schema.report(record("east", idle=2)))
        assert [plain(item) for item in (await spared.next()).items] == [record("east", idle=2)]


async def test_the_end_of_a_report_is_answered(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west", instance=ONE) as west:
        report = west.report(schema.report(record("west", idle=1)))
        report.end()
        assert isinstance(await report.answer(), schema.ReportFederationResponse)
        # With nothing in it, too.
        empty = west.report()
        empty.end()
        await empty.answer()
        left = await hub.logs.wait_for("reporter_left", 2)
        assert left["said_goodbye"]


async def test_a_watch_is_cancelled_without_a_trace(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west") as west:
        watches = [west.watch() for _ in range(3)]
        for watch in watches:
            await watch.next()
        assert hub.metric("trio_federation_hub_watchers") == 3
        watches[0].cancel()
        with pytest.raises(Refused) as caught:
            await watches[0].next()
        assert caught.value.code is Code.CANCELLED
        await hub.logs.wait_for("watcher_left")
        assert hub.metric("trio_federation_hub_watchers") == 2
        # The others go on.
        west.report(schema.report(record("west", idle=1)))
        for watch in watches[1:]:
            assert len((await watch.next()).items) == 1
    await hub.logs.wait_for("watcher_left", 3)
    assert [entry for entry in hub.logs.entries if entry["level"] in ("warning", "error", "exception")] == []


async def test_a_report_that_breaks_off_withdraws_nothing(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "east") as east:
        watch = east.watch()
        await watch.next()
        with Worker(schema, hub.port, "west", instance=ONE) as west:
            west.report(schema.report(record("west", idle=1)))
            await watch.next()
        left = await hub.logs.wait_for("reporter_left")
        assert not left["said_goodbye"]
        # Within the grace, newcomers still get its records.
        assert [plain(item) for item in (await east.watch().next()).items] == [record("west", idle=1)]


# --- who may call ----------------------------------------------------------------------------------------------------


async def refusals_of(worker: Worker) -> list[Refused]:
    """How a worker's report and watch are refused."""
    found = []
    report = worker.report(worker.schema.report(record("west", idle=1)))
    watch = worker.watch()
    for step in (report.answer, watch.next):
        with pytest.raises(Refused) as caught:
            await step()
        found.append(caught.value)
    return found


@pytest.mark.parametrize("secret", [None, "", "wrong", SECRET + " "])
async def test_a_wrong_secret_is_refused(hub: RunningHub, schema: Schema, secret: str | None) -> None:
    with Worker(schema, hub.port, "west", secret=secret) as worker:
        for refused in await refusals_of(worker):
            assert refused.code is Code.UNAUTHENTICATED
            assert "credential" in refused.details
            assert SECRET not in refused.details
            assert "wrong" not in refused.details.replace("wrong credential", "")
    assert hub.metric("trio_federation_hub_calls_refused_total", status="UNAUTHENTICATED") == 2
    assert hub.hub.snapshot() == []


@pytest.mark.parametrize("header", [f"bearer {SECRET}", f"BEARER {SECRET}"])
async def test_the_scheme_is_written_in_any_case(hub: RunningHub, schema: Schema, header: str) -> None:
    with Worker(schema, hub.port, "west", secret=None, metadata=[("authorization", header)]) as worker:
        await worker.watch().next()


@pytest.mark.parametrize("header", [SECRET, f"Basic {SECRET}", f"Bearer{SECRET}"])
async def test_another_scheme_is_refused(hub: RunningHub, schema: Schema, header: str) -> None:
    with Worker(schema, hub.port, "west", secret=None, metadata=[("authorization", header)]) as worker:
        assert [refused.code for refused in await refusals_of(worker)] == [Code.UNAUTHENTICATED] * 2


@pytest.mark.parametrize("cluster", [None, "", "West", "west.one", "-west", "w" * 64, "we st", "west/../east"])
async def test_an_invalid_id_is_refused(hub: RunningHub, schema: Schema, cluster: str | None) -> None:
    with Worker(schema, hub.port, cluster) as worker:
        for refused in await refusals_of(worker):
            assert refused.code is Code.INVALID_ARGUMENT
            assert "x-federation-cluster" in refused.details


@pytest.mark.parametrize("instance", ["", "0A", "xyz", "a" * 65])
async def test_an_invalid_instance_is_refused(hub: RunningHub, schema: Schema, instance: str) -> None:
    with Worker(schema, hub.port, "west", instance=instance) as worker:
        for refused in await refusals_of(worker):
            assert refused.code is Code.INVALID_ARGUMENT
            assert "x-federation-instance" in refused.details


async def test_a_second_instance_is_refused_and_the_first_goes_on(hub: RunningHub, schema: Schema) -> None:
    with (
        Worker(schema, hub.port, "west", instance=ONE) as first,
        Worker(schema, hub.port, "west", instance=OTHER) as second,
        Worker(schema, hub.port, "east") as east,
    ):
        watch = east.watch()
        await watch.next()
        report = first.report(schema.report(record("west", idle=1)))
        await watch.next()
        with pytest.raises(Refused) as caught:
            await second.report(schema.report(record("west", idle=666))).answer()
        assert caught.value.code is Code.ALREADY_EXISTS
        assert "'west'" in caught.value.details
        report.send(schema.report(record("west", idle=2)))
        assert [plain(item) for item in (await watch.next()).items] == [record("west", idle=2)]
        # Once the first has said goodbye, it is the second's turn.
        report.end()
        await report.answer()
        second.report(schema.report(record("west", idle=3)))
        assert [plain(item) for item in (await watch.next()).items] == [record("west", idle=3)]


async def test_the_same_instance_replaces_its_older_call(hub: RunningHub, schema: Schema) -> None:
    with (
        Worker(schema, hub.port, "west", instance=ONE) as first,
        Worker(schema, hub.port, "west", instance=ONE) as again,
        Worker(schema, hub.port, "east") as east,
    ):
        watch = east.watch()
        await watch.next()
        old = first.report(schema.report(record("west", idle=1)))
        await watch.next()
        new = again.report(schema.report(record("west", idle=2)))
        assert [plain(item) for item in (await watch.next()).items] == [record("west", idle=2)]
        with pytest.raises(Refused) as caught:
            await old.answer()
        assert caught.value.code is Code.ALREADY_EXISTS
        # The late end of the old one changes nothing.
        await hub.logs.wait_for("reporter_left")
        new.send(schema.report(record("west", idle=3)))
        assert [plain(item) for item in (await watch.next()).items] == [record("west", idle=3)]
        assert hub.metric("trio_federation_hub_reporters") == 1


# --- older and stranger peers ----------------------------------------------------------------------------------------


async def test_peers_that_know_nothing_of_ours_are_served(hub: RunningHub, older: Schema, schema: Schema) -> None:
    """None of the fields from 100 up, no instance."""
    with (
        Worker(older, hub.port, "west") as west,
        Worker(older, hub.port, "east") as east,
        Worker(older, hub.port, "west") as rival,
    ):
        watch = east.watch()
        assert (await watch.next()).items == []
        report = west.report(older.report(record("west", idle=1, observed_for_ms=30)))
        [item] = (await watch.next()).items
        assert plain(item) == record("west", idle=1)
        assert item.observed_for_ms >= 30
        # To each other they are instances of their own.
        with pytest.raises(Refused) as caught:
            await rival.report(older.report(record("west", idle=2))).answer()
        assert caught.value.code is Code.ALREADY_EXISTS
        report.end()
        await report.answer()
        rival.report(older.report(record("west", idle=3)))
        [item] = (await watch.next()).items
        assert plain(item) == record("west", idle=3)


async def test_an_older_peer_sees_a_withdrawal_as_an_expired_record_without_room(
    hub: RunningHub, older: Schema, schema: Schema
) -> None:
    with Worker(schema, hub.port, "west", instance=ONE) as west, Worker(older, hub.port, "east") as east:
        watch = east.watch()
        await watch.next()
        origins = [{"cluster_id": "west", "instance": ONE, "uptime_ms": 1000}]
        report = west.report(schema.report(record("west", idle=5, seq=1), origins=origins))
        [item] = (await watch.next()).items
        assert plain(item) == record("west", idle=5)
        report.send(schema.report(record("west", observed_for_ms=WITHDRAWN, seq=2), origins=origins))
        [item] = (await watch.next()).items
        assert plain(item) == record("west")
        # The hub never adds to it.
        assert item.observed_for_ms == WITHDRAWN
        # A late copy of the older sample does not bring it back, nor does it reach anybody.
        report.send(
            schema.report(record("west", idle=5, seq=1), origins=origins),
            schema.report(record("west", "p2", idle=6, seq=3), origins=origins),
        )
        [item] = (await watch.next()).items
        assert plain(item) == record("west", "p2", idle=6)
        assert [plain(item) for item in (await east.watch().next()).items if item.observed_for_ms < WITHDRAWN] == [
            record("west", "p2", idle=6)
        ]


async def test_the_identity_of_the_call_is_stamped_over_what_a_record_claims(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west", instance=ONE) as west, Worker(schema, hub.port, "south") as south:
        watch = south.watch()
        await watch.next()
        west.report(
            schema.report(
                record("east", "p1", idle=1, seq=1),
                record("", "p2", idle=2, seq=1),
                record("NOT A LABEL", "p3", idle=3, seq=1),
                origins=[{"cluster_id": "east", "instance": ONE, "uptime_ms": 1000}],
            )
        )
        received = await watch.next()
        assert [(item.cluster_id, item.member_pool, item.idle) for item in received.items] == [
            ("west", "p1", 1),
            ("west", "p2", 2),
            ("west", "p3", 3),
        ]
        assert [origin.cluster_id for origin in received.origins] == ["west"]


async def test_bad_records_are_dropped_and_counted_and_the_rest_goes_on(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west") as west, Worker(schema, hub.port, "east") as east:
        watch = east.watch()
        await watch.next()
        report = west.report(
            schema.report(
                record("west", "good-1", idle=1),
                record("west", "NOT A POOL", idle=1),
                record("west", "p", idle=-1),
                record("west", "q", idle=-2),
                record("west", "r", capacity=-2),
                {**record("west"), "namespace": "../etc"},
                {**record("west"), "scaling_group": "a::b"},
                record("west", "good-2", idle=2),
            )
        )
        assert [item.member_pool for item in (await watch.next()).items] == ["good-1", "good-2"]
        counts = {
            reason: hub.metric("trio_federation_records_dropped_total", origin="cluster:west", reason=reason)
            for reason in ("member_pool", "idle", "capacity", "namespace", "scaling_group")
        }
        assert counts == {"member_pool": 1, "idle": 2, "capacity": 1, "namespace": 1, "scaling_group": 1}
        # Told once for each reason; the call goes on.
        assert len(hub.logs.of("record_dropped")) == 5
        report.send(schema.report(record("west", "p", idle=-1)), schema.report(record("west", "good-3", idle=3)))
        assert [item.member_pool for item in (await watch.next()).items] == ["good-3"]
        assert len(hub.logs.of("record_dropped")) == 5


# --- messages --------------------------------------------------------------------------------------------------------


def padded_to(size: int, message: bytes) -> bytes:
    """The message, with a field that nobody knows, number 1000, so that it has `size` bytes."""
    rest = size - len(message) - 2 - 4
    assert 2**21 <= rest < 2**28
    length = bytes([rest & 0x7F | 0x80, rest >> 7 & 0x7F | 0x80, rest >> 14 & 0x7F | 0x80, rest >> 21])
    return message + b"\xc2\x3e" + length + bytes(rest)


async def test_16_mib_are_taken_and_not_a_byte_more(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west") as west, Worker(schema, hub.port, "east") as east:
        watch = east.watch()
        await watch.next()
        small = schema.report(record("west", idle=1)).SerializeToString()
        report = west.report(padded_to(MAX_RECEIVE, small))
        assert [plain(item) for item in (await watch.next()).items] == [record("west", idle=1)]
        report.send(padded_to(MAX_RECEIVE + 1, small))
        with pytest.raises(Refused) as caught:
            await report.answer()
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        assert str(MAX_RECEIVE + 1) in caught.value.details
        # The connection, and everybody else, go on.
        west.report(schema.report(record("west", idle=2)))
        assert [plain(item) for item in (await watch.next()).items] == [record("west", idle=2)]


async def test_a_message_that_is_none_is_refused(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west") as west:
        with pytest.raises(Refused) as caught:
            await west.report(b"\xff\xff\xff").answer()
        assert caught.value.code is Code.INTERNAL
        assert "ReportFederationRequest" in caught.value.details
        await west.watch().next()


async def test_a_compressed_message_is_refused(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west", compression=grpc.Compression.Gzip) as west:
        message = schema.report(*(record("west", f"p{number}", idle=1) for number in range(50)))
        with pytest.raises(Refused) as caught:
            await west.report(message).answer()
        assert caught.value.code is Code.INTERNAL
        assert "compressed" in caught.value.details
        await west.watch().next()


async def test_an_unknown_method_is_unimplemented(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west") as west:
        call = west.channel.unary_unary("/sandbox.sync.v1.FederationService/Unknown")
        future = call.future(b"", timeout=10)
        error = await trio.to_thread.run_sync(future.exception)
        assert error.code() is Code.UNIMPLEMENTED


async def test_a_large_snapshot_comes_in_pieces(hub: RunningHub, schema: Schema) -> None:
    """grpcio takes 4 MiB at most, unless it is told otherwise; we send 3."""
    long_name = ".".join(["n" * 60] * 4)
    with Worker(schema, hub.port, "west") as west, Worker(schema, hub.port, "east") as east:
        watch = east.watch()
        await watch.next()
        count = 8000
        items = [
            {**record("west", f"{long_name}.p{number}", idle=1), "env_name": long_name, "state": "Active"}
            for number in range(count)
        ]
        west.report(*(schema.report(*items[start : start + 1000]) for start in range(0, count, 1000)))
        seen = 0
        while seen < count:
            broadcast = await watch.next()
            assert broadcast.ByteSize() <= 3 * 2**20
            seen += len(broadcast.items)
        pools: set[str] = set()
        newcomer = east.watch()
        while len(pools) < count:
            broadcast = await newcomer.next()
            assert broadcast.ByteSize() <= 3 * 2**20
            pools |= {item.member_pool for item in broadcast.items}


async def test_fields_that_nobody_knows_are_no_fault(hub: RunningHub, schema: Schema) -> None:
    with Worker(schema, hub.port, "west") as west, Worker(schema, hub.port, "east") as east:
        watch = east.watch()
        await watch.next()
        item = schema.EnvCapacity(**record("west", idle=1)).SerializeToString() + b"\xc2\x3e\x03new"
        west.report(b"\x0a" + struct.pack("B", len(item)) + item + b"\xca\x3e\x03new")
        [received] = (await watch.next()).items
        assert plain(received) == record("west", idle=1)


async def test_the_whole_over_tls(logs: LogWatch, schema: Schema, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "chain.pem")
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    async with running_hub(logs, (str(folder / "chain.pem"), str(folder / "key.pem"))) as hub:
        with (
            Worker(schema, hub.port, "west", credentials=credentials) as west,
            Worker(schema, hub.port, "east", credentials=credentials) as east,
        ):
            watch = east.watch()
            await watch.next()
            west.report(schema.report(record("west", idle=1)))
            assert [plain(item) for item in (await watch.next()).items] == [record("west", idle=1)]
        # Somebody who does not speak TLS is turned away, and the hub goes on.
        with Worker(schema, hub.port, "west") as stranger:
            with pytest.raises(Refused) as caught:
                await stranger.watch().next()
            assert caught.value.code is Code.UNAVAILABLE
        entry = await logs.wait_for("handshake_failed")
        assert "TLS failed" in str(entry["error"])
        with Worker(schema, hub.port, "east", credentials=credentials) as east:
            assert len((await east.watch().next()).items) == 1

"""grpcio as a hub, with its default settings, against our agent on a real socket. Where retries are waited for, Trio's
clock runs ten times as fast as the real one."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import trio
import trustme
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock

from tests.federation.helpers import counted, exposition
from tests.interop.peers import PATIENCE, SECRET, BrokenOff, GrpcHub, HubReport, LogWatch, Schema, record
from tests.simulation import ScriptedSource, always, member
from trio_federation.agent import Agent
from trio_federation.capacity import Capacity
from trio_federation.config import Federation
from trio_federation.rpc import client_tls, tcp_dialer
from trio_federation.wire import MAX_RECEIVE

Code = grpc.StatusCode

WITHDRAWN = 2**40
HUB = "the hub"
#: Nothing counts as silent, however slow the machine is, where the clock runs fast.
PATIENT = Federation(keepalive=100, silence_limit=1000)


@pytest.fixture
def clock() -> MockClock:
    """Ten times as fast as the real one."""
    return MockClock(rate=10)


@dataclass
class RunningAgent:
    """An agent of ours, cluster west."""

    agent: Agent
    source: ScriptedSource
    _stop: Callable[[], None]
    _stopped: trio.Event
    _applied: list[trio.Event]

    async def stop(self) -> None:
        """Stop it, and wait until it has stopped."""
        self._stop()
        with trio.fail_after(PATIENCE):
            await self._stopped.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until something holds, which changes only with what the registry takes in."""
        with trio.fail_after(PATIENCE):
            while not condition():
                await self._applied[0].wait()

    def foreign(self) -> list[Capacity]:
        """What it knows of other clusters."""
        return [row for row in self.agent.registry.snapshot() if row.cluster_id != "west"]

    def metric(self, name: str, **labels: str) -> float:
        """The value of one counter or gauge of the agent's health; 0 without it."""
        return counted(self.agent, name, **labels)


@asynccontextmanager
async def running_agent(
    port: int, *records: Capacity, settings: Federation | None = None, ca_file: str | None = None
) -> AsyncIterator[RunningAgent]:
    source = ScriptedSource()
    source.set(*records)
    tls = None if ca_file is None else client_tls(ca_file=ca_file, cert_file=None, key_file=None)
    applied = [trio.Event()]

    def tell(changes: object) -> None:
        applied[0].set()
        applied[0] = trio.Event()

    agent = Agent(
        "west",
        settings or Federation(),
        sources={"set": always(source)},
        hubs={HUB: tcp_dialer("127.0.0.1", port, tls=tls)},
        credential=SECRET,
        generator=random.Random(1),
        applied=tell,
    )
    stopped = trio.Event()
    scope = trio.CancelScope()

    async def run() -> None:
        with scope:
            await agent.run()
        stopped.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield RunningAgent(agent, source, scope.cancel, stopped, applied)
        scope.cancel()


def plain(item: object) -> dict[str, object]:
    """The fields of a received record that are not zero, but its age and its seq."""
    values = {field.name: value for field, value in item.ListFields()}  # type: ignore[attr-defined]
    return {name: value for name, value in values.items() if name not in ("observed_for_ms", "seq")}


async def until(report: HubReport, records: list[dict[str, object]]) -> Any:
    """The next message with exactly these records; others may come before it, as resyncs do."""
    while True:
        message = await report.next()
        if [plain(item) for item in message.items] == records:
            return message


async def test_an_agent_reports_what_it_has_at_once(schema: Schema) -> None:
    async with GrpcHub(schema) as hub:
        rows = [
            member("west", "p1", idle=3, state="Active"),
            member("west", "p2", autoscaling_enabled=True, capacity=-1),
        ]
        async with running_agent(hub.port, *rows) as west:
            report = await hub.next_report()
            with trio.fail_after(1):
                message = await report.next()
            assert [plain(item) for item in message.items] == [
                record("west", "p1", idle=3, state="Active"),
                record("west", "p2", autoscaling_enabled=True, capacity=-1),
            ]
            assert all(0 <= item.observed_for_ms < 1000 for item in message.items)
            assert all(item.seq > 0 for item in message.items)
            [origin] = message.origins
            assert (origin.cluster_id, origin.instance) == ("west", west.agent.instance)
            assert 0 <= origin.uptime_ms < 10_000


async def test_the_metadata_of_both_calls(schema: Schema) -> None:
    async with GrpcHub(schema) as hub, running_agent(hub.port, member("west", idle=1)) as west:
        for call in (await hub.next_report(), await hub.next_watch()):
            assert call.metadata["authorization"] == f"Bearer {SECRET}"
            assert call.metadata["x-federation-cluster"] == "west"
            assert call.metadata["x-federation-instance"] == west.agent.instance


async def test_what_the_hub_relays_reaches_the_registry(schema: Schema) -> None:
    async with GrpcHub(schema) as hub, running_agent(hub.port, member("west", idle=1)) as west:
        watch = await hub.next_watch()
        assert watch.request.spare_own_cluster
        began = trio.current_time()
        origins = [{"cluster_id": "east", "instance": "0e", "uptime_ms": 60_000}]
        watch.send(
            schema.broadcast(
                record("east", "p1", idle=2, observed_for_ms=4000, seq=1, state="Active"),
                record("east", "p2", autoscaling_enabled=True, capacity=5, saturated_for=9, seq=1),
                origins=origins,
            )
        )
        await west.wait_until(lambda: len(west.foreign()) == 2)
        [first, second] = west.foreign()
        assert (first.member_pool, first.idle, first.state) == ("p1", 2, "Active")
        assert first.observed_at is not None
        assert began - 4 <= first.observed_at <= trio.current_time() - 4
        assert (second.capacity, second.saturated_for) == (5, 9)
        assert second.origin is not None
        assert (second.origin.instance, second.origin.seq) == ("0e", 1)
        best = west.agent.registry.best_foreign_member("ns", "env")
        assert best is not None
        assert best.target == "east::p1"
        # Then changes, and withdrawals.
        watch.send(schema.broadcast(record("east", "p1", observed_for_ms=WITHDRAWN, seq=2), origins=origins))
        await west.wait_until(lambda: len(west.foreign()) == 1)
        best = west.agent.registry.best_foreign_member("ns", "env")
        assert best is not None
        assert best.target == "east::p2"


async def test_changes_are_told_as_they_happen(schema: Schema) -> None:
    settings = Federation(report_interval=0.1)
    async with GrpcHub(schema) as hub, running_agent(hub.port, member("west", idle=1), settings=settings) as west:
        report = await hub.next_report()
        await report.next()
        west.source.set(member("west", idle=7), member("west", "p2", idle=8))
        await until(report, [record("west", idle=7), record("west", "p2", idle=8)])
        west.source.set(member("west", idle=7))
        message = await until(report, [record("west", "p2")])
        assert message.items[0].observed_for_ms == WITHDRAWN


async def test_a_hub_that_knows_nothing_of_ours(older: Schema) -> None:
    """None of the fields from 100 up, in either direction."""
    async with GrpcHub(older) as hub, running_agent(hub.port, member("west", idle=3, state="Active")) as west:
        report = await hub.next_report()
        [item] = (await report.next()).items
        assert plain(item) == record("west", idle=3)
        watch = await hub.next_watch()
        watch.send(older.broadcast(record("east", idle=2), record("west", idle=666)))
        await west.wait_until(lambda: len(west.foreign()) == 1)
        [row] = west.foreign()
        assert (row.idle, row.origin) == (2, None)
        # What it echoes of our own is not believed, but counted.
        assert west.agent.registry.local_idle("ns", "env") == 3
        dropped = "trio_federation_records_dropped_total"
        assert west.metric(dropped, origin=f"hub:{HUB}", reason="own_cluster") == 1
        await west.stop()
        [goodbye, end] = await report.rest()
        assert [(plain(item), item.observed_for_ms) for item in goodbye.items] == [(record("west"), WITHDRAWN)]
        assert end is None


async def test_a_hub_without_a_watch_gets_reports_all_the_same(
    schema: Schema, logs: LogWatch, clock: MockClock
) -> None:
    settings = Federation(report_interval=0.5, keepalive=100, silence_limit=1000)
    async with (
        GrpcHub(schema, watch=False) as hub,
        running_agent(hub.port, member("west", idle=0), settings=settings) as west,
    ):
        report = await hub.next_report()
        assert [item.idle for item in (await report.next()).items] == [0]
        told = await logs.wait_for("hub_is_older")
        assert (told["hub"], told["call"], told["level"]) == (HUB, "watch", "warning")
        # Retried in minutes.
        assert told["retry_in"] == 300
        for number in range(1, 6):
            west.source.set(member("west", idle=number))
            await until(report, [record("west", idle=number)])
    assert len(logs.of("hub_is_older")) == 1
    assert logs.of("hub_failed") == []


async def test_an_older_hub_is_asked_again_after_minutes(schema: Schema, logs: LogWatch, clock: MockClock) -> None:
    """It may have been updated meanwhile. The clock is moved once everybody waits."""
    settings = Federation(keepalive=1000, silence_limit=3000, report_interval=1000, resync_interval=1000, ttl=3000)
    async with GrpcHub(schema, watch=False) as hub, running_agent(hub.port, member("west", idle=1), settings=settings):
        told = await logs.wait_for("hub_is_older")
        clock.jump(told["retry_in"])
        retried = await logs.wait_for("hub_is_older", 2)
        assert 300 <= retried["at"] - told["at"] < 400
        # Known already, so no further warning.
        assert retried["level"] == "debug"


async def test_a_taken_id_is_tried_again_every_second_or_two(schema: Schema, logs: LogWatch, clock: MockClock) -> None:
    async with GrpcHub(schema) as hub:
        for _ in range(3):
            hub.refusals.put((Code.ALREADY_EXISTS, "cluster 'west' is reported by another"))
        async with running_agent(hub.port, member("west", idle=1), settings=PATIENT):
            for number in range(1, 4):
                await hub.next_report()
                told = await logs.wait_for("hub_failed", number)
                assert told["call"] == "report"
                assert told["error"] == "cluster 'west' is reported by another"
                assert 1 <= told["retry_in"] <= 2
                assert told["level"] == ("warning" if number == 1 else "debug")
            report = await hub.next_report()
            assert trio.current_time() - told["at"] >= told["retry_in"] - 0.06  # told in tenths
            assert [plain(item) for item in (await report.next()).items] == [record("west", idle=1)]
    # The connection was never given up for it.
    assert {entry["call"] for entry in logs.of("hub_failed")} == {"report"}


async def test_a_wrong_secret_is_tried_again_and_told_in_one_line(
    schema: Schema, logs: LogWatch, clock: MockClock
) -> None:
    async with GrpcHub(schema) as hub:
        for _ in range(5):
            hub.refusals.put((Code.UNAUTHENTICATED, "wrong credential: compare the secrets"))
        async with running_agent(hub.port, member("west", idle=1), settings=PATIENT):
            for number in range(1, 6):
                await hub.next_report()
                told = await logs.wait_for("hub_failed", number)
                # Full jitter below a bound that doubles.
                assert 0 <= told["retry_in"] <= 0.5 * 2 ** (number - 1)
            report = await hub.next_report()
            await report.next()
    warnings = [entry for entry in logs.of("hub_failed") if entry["level"] == "warning"]
    assert [(entry["hub"], entry["error"]) for entry in warnings] == [(HUB, "wrong credential: compare the secrets")]
    assert SECRET not in str(logs.entries)


async def test_odd_values_and_unknown_fields_of_a_newer_hub(schema: Schema) -> None:
    async with GrpcHub(schema) as hub, running_agent(hub.port, member("west", idle=1)) as west:
        watch = await hub.next_watch()
        unknown = b"\xc2\x3e\x03new"
        item = schema.EnvCapacity(**record("east", "p1", idle=1, state="Exploding")).SerializeToString() + unknown
        odd = schema.broadcast(
            record("east", "p2", idle=-1),
            record("east", "p3", capacity=-7),
            record("EAST", "p4", idle=1),
            record("east", "p5", idle=1, observed_for_ms=-5000),
            record("east", "p6", idle=1, state="line\nbreak"),
            record("east", "p7", idle=1, seq=3),
            origins=[{"cluster_id": "east", "instance": "NOT HEX", "uptime_ms": -1}],
        )
        watch.send(b"\x0a" + bytes([len(item)]) + item + unknown, odd)
        await west.wait_until(lambda: len(west.foreign()) == 3)
        assert [(row.member_pool, row.idle) for row in west.foreign()] == [("p1", 1), ("p5", 1), ("p7", 1)]
        # A state that we have never heard of is for people to read.
        assert west.foreign()[0].state == "Exploding"
        # Age is never negative.
        assert all(row.observed_at is not None and row.observed_at <= trio.current_time() for row in west.foreign())
        counts = {
            reason: west.metric("trio_federation_records_dropped_total", origin=f"hub:{HUB}", reason=reason)
            for reason in ("idle", "capacity", "cluster_id", "state", "instance")
        }
        assert counts == {"idle": 1, "capacity": 1, "cluster_id": 1, "state": 1, "instance": 1}


async def test_a_broadcast_that_is_too_large_or_nonsense_costs_the_watch_alone(
    schema: Schema, logs: LogWatch, clock: MockClock
) -> None:
    settings = Federation(report_interval=0.5, keepalive=100, silence_limit=1000)
    async with GrpcHub(schema) as hub, running_agent(hub.port, member("west"), settings=settings) as west:
        report = await hub.next_report()
        await report.next()
        watch = await hub.next_watch()
        watch.send(bytes(MAX_RECEIVE + 1))
        told = await logs.wait_for("hub_failed")
        assert told["call"] == "watch"
        assert str(MAX_RECEIVE + 1) in told["error"]
        watch = await hub.next_watch()
        watch.send(b"\xff\xff\xff")
        told = await logs.wait_for("hub_failed", 2)
        assert "FederationBroadcast" in told["error"]
        watch = await hub.next_watch()
        watch.send(schema.broadcast(record("east", idle=2)))
        await west.wait_until(lambda: len(west.foreign()) == 1)
        # The report call is still the first.
        west.source.set(member("west", idle=5))
        await until(report, [record("west", idle=5)])


@pytest.mark.parametrize("ends", ["the report", "the watch"])
async def test_a_call_that_the_hub_ends_is_opened_again(
    schema: Schema, logs: LogWatch, clock: MockClock, ends: str
) -> None:
    async with GrpcHub(schema) as hub:
        if ends == "the report":
            hub.refusals.put((Code.UNAVAILABLE, "restarting"))
        async with running_agent(hub.port, member("west", idle=1), settings=PATIENT):
            watch = await hub.next_watch()
            if ends == "the watch":
                watch.send(None)
                await hub.next_watch()
                assert (await logs.wait_for("hub_failed"))["error"] == "the hub ended the watch"
                report = await hub.next_report()
            else:
                await hub.next_report()
                report = await hub.next_report()
                assert (await logs.wait_for("hub_failed"))["error"] == "restarting"
            await report.next()


async def test_a_hub_that_comes_back_is_told_everything_again(schema: Schema, logs: LogWatch, clock: MockClock) -> None:
    async with GrpcHub(schema) as hub, running_agent(hub.port, member("west", idle=3), settings=PATIENT) as west:
        report = await hub.next_report()
        assert [plain(item) for item in (await report.next()).items] == [record("west", idle=3)]
        watch = await hub.next_watch()
        watch.send(schema.broadcast(record("east", idle=2)))
        await west.wait_until(lambda: len(west.foreign()) == 1)
        await hub.stop()
        await logs.wait_for("hub_failed")
        # What is known stays known, until it is too old.
        assert len(west.foreign()) == 1
        async with GrpcHub(schema, port=hub.port) as again:
            assert again.port == hub.port
            report = await again.next_report()
            assert [plain(item) for item in (await report.next()).items] == [record("west", idle=3)]
            # An empty snapshot removes nothing.
            (await again.next_watch()).send(schema.broadcast(), schema.broadcast(record("east", "p2", idle=1)))
            await west.wait_until(lambda: len(west.foreign()) == 2)
            assert west.metric("trio_federation_hub_reconnects_total", hub=HUB) >= 1


async def test_a_hub_that_forbids_pings_is_asked_less_often(schema: Schema, logs: LogWatch, clock: MockClock) -> None:
    """gRPC's servers allow a ping in five minutes, unless they are told otherwise, and after a few more say goodbye."""
    settings = Federation(keepalive=0.2, silence_limit=1000, report_interval=3000, resync_interval=3000, ttl=9000)
    async with GrpcHub(schema) as hub, running_agent(hub.port, member("west", idle=1), settings=settings):
        await (await hub.next_report()).next()
        told = await logs.wait_for("hub_forbids_pings")
        assert (told["hub"], told["keepalive"], told["level"]) == (HUB, 0.4, "warning")
        failed = await logs.wait_for("hub_failed")
        assert "too_many_pings" in failed["error"]
        # It comes back, and is calmer each time.
        await (await hub.next_report()).next()
        told = await logs.wait_for("hub_forbids_pings", 2)
        assert told["keepalive"] == 0.8
        assert told["silence_limit"] >= 2 * told["keepalive"]
        await (await hub.next_report()).next()


async def test_an_agent_that_stops_withdraws_everything_before_it_ends_its_report(schema: Schema) -> None:
    rows = [member("west", f"p{number}", idle=number) for number in range(10)]
    async with GrpcHub(schema) as hub, running_agent(hub.port, *rows) as west:
        report = await hub.next_report()
        first = await report.next()
        watch = await hub.next_watch()
        with trio.fail_after(2):
            await west.stop()
        [goodbye, end] = await report.rest()
        assert end is None
        assert sorted(item.member_pool for item in goodbye.items) == sorted(f"p{number}" for number in range(10))
        assert all(plain(item) == record("west", item.member_pool) for item in goodbye.items)
        assert all(item.observed_for_ms == WITHDRAWN for item in goodbye.items)
        assert min(item.seq for item in goodbye.items) > max(item.seq for item in first.items)
        assert [origin.instance for origin in goodbye.origins] == [west.agent.instance]
        with trio.fail_after(PATIENCE):
            await watch.ended.wait()


async def test_an_agent_that_is_cut_off_withdraws_nothing(schema: Schema) -> None:
    async with GrpcHub(schema) as hub, running_agent(hub.port, member("west", idle=1)):
        report = await hub.next_report()
        await report.next()
        await hub.stop()
        # Which end it is depends on whether gRPC ends the call or the server first.
        [end] = await report.rest()
        assert end in (None, BrokenOff)


async def test_the_whole_over_tls(schema: Schema, tmp_path_factory: pytest.TempPathFactory) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca_file = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    key, chain = issued.private_key_pem.bytes(), b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    credentials = grpc.ssl_server_credentials([(key, chain)])
    async with (
        GrpcHub(schema, credentials=credentials) as hub,
        running_agent(hub.port, member("west", idle=1), ca_file=str(ca_file)) as west,
    ):
        report = await hub.next_report()
        await report.next()
        (await hub.next_watch()).send(schema.broadcast(record("east", idle=2)))
        await west.wait_until(lambda: len(west.foreign()) == 1)
        await west.stop()
        assert [type(message) for message in await report.rest()] == [schema.ReportFederationRequest, type(None)]


async def test_what_the_agent_exports_parses(schema: Schema) -> None:
    async with GrpcHub(schema) as hub, running_agent(hub.port, member("west", idle=1, scaling_group="gpu")) as west:
        (await hub.next_watch()).send(
            schema.broadcast(record("east", idle=2, running=4, desired=6, scaling_group="gpu"))
        )
        await west.wait_until(lambda: len(west.foreign()) == 1)
        families = list(text_string_to_metric_families(await exposition(west.agent)))
        values = {
            (sample.name, *map(sample.labels.get, ("cluster", "namespace", "env", "group"))): sample.value
            for family in families
            for sample in family.samples
        }
        for group in ("", "gpu"):
            for name, value in (("idle", 2), ("running", 4), ("desired", 6)):
                assert values[f"agentbox_federation_env_{name}", "east", "ns", "env", group] == value
            assert values["agentbox_federation_env_idle", "west", "ns", "env", group] == 1
        assert len({family.name for family in families}) == len(families)
        for family in families:
            assert family.documentation
            assert family.type in ("gauge", "counter", "histogram", "info")
            series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
            assert len(set(series)) == len(series)

"""How much is said: bounds on messages, what the debounce makes of many changes, and that every run says the same."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import trio
from trio.testing import MockClock

from tests.simulation import PushingSource, Simulation, member, sampled, simulated_federation
from trio_federation.pb.sandbox.sync.v1 import FederationBroadcast, ReportFederationRequest
from trio_federation.reporter import DEBOUNCE
from trio_federation.rpc import IncomingWatch, ReportCall
from trio_federation.wire import EncodedBroadcast, decode, encode

RESYNC = 10.0
POLL = 5.0
KEEPALIVE = 5.0


class Traffic:
    """What went over every call while it was watched."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, ReportFederationRequest]] = []
        self.broadcasts: list[tuple[float, str, FederationBroadcast]] = []

    def messages_of(self, cluster_id: str) -> list[tuple[float, ReportFederationRequest]]:
        """The reports of one cluster, with the moments of their sending."""
        return [(at, message) for at, message in self.reports if message.items[0].cluster_id == cluster_id]

    def heard_by(self, cluster_id: str) -> tuple[list[FederationBroadcast], list[FederationBroadcast]]:
        """What one cluster was told: the broadcasts with records, and those that are nothing but a sign of life."""
        heard = [message for _, peer, message in self.broadcasts if peer == cluster_id]
        return [message for message in heard if message.items], [message for message in heard if not message.items]

    def clear(self) -> None:
        """Forget what was said so far."""
        self.reports.clear()
        self.broadcasts.clear()


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Every message of every call of the test."""
    seen = Traffic()
    real_report, real_broadcast = ReportCall.send, IncomingWatch.send

    async def send_report(self: ReportCall, message: ReportFederationRequest) -> None:
        seen.reports.append((trio.current_time(), message))
        await real_report(self, message)

    async def send_broadcast(self: IncomingWatch, message: FederationBroadcast | EncodedBroadcast) -> None:
        whole = decode(message.data, FederationBroadcast) if isinstance(message, EncodedBroadcast) else message
        seen.broadcasts.append((trio.current_time(), self.peer, whole))
        await real_broadcast(self, message)

    monkeypatch.setattr(ReportCall, "send", send_report)
    monkeypatch.setattr(IncomingWatch, "send", send_broadcast)
    return seen


# --- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_quiet_hour_costs_the_resyncs_and_no_more(autojump_clock: MockClock, traffic: Traffic) -> None:
    """semantics.md, "Agent": reports "at once when connected; then changes as they happen […]; a full resync every
    resync_interval (10 s […])". While nothing changes, a cluster sends one message for each resync, and gets one for
    each of every other cluster's; all of an hour's state is in them, and it is never old."""
    hour, pools = 3600.0, 4
    async with simulated_federation("west", "east", "north") as fed:
        for cluster in fed.clusters.values():
            cluster.source.set(*(member(cluster.name, f"p{number}", idle=1) for number in range(pools)))
        await fed.settle()
        traffic.clear()
        ages = await sampled(hour, lambda: [age for of in fed.clusters for age in fed["west"].ages(of)], step=7.3)
        assert {len(all_ages) for all_ages in ages} == {3 * pools}
        assert max(max(all_ages) for all_ages in ages) <= RESYNC + POLL + 0.1
        most = int(hour / RESYNC) + 1
        for name in fed.clusters:
            messages = traffic.messages_of(name)
            assert most - 2 <= len(messages) <= most
            assert {len(message.items) for _, message in messages} == {pools}
            heard, beats = traffic.heard_by(name)
            assert len(beats) <= hour / KEEPALIVE
            assert len(heard) <= 2 * most
            assert sum(len(message.items) for message in heard) <= 2 * most * pools
        assert [cluster.routes["hub-0"].dialled for cluster in fed.clusters.values()] == [1, 1, 1]


async def test_busy_minutes_cost_one_message_per_change_beside_the_resyncs(
    autojump_clock: MockClock, traffic: Traffic
) -> None:
    """With a change at every collect there is one more message for each, with what has changed and not the rest."""
    seconds, pools = 300.0, 5
    async with simulated_federation("west", "east", "north") as fed, trio.open_nursery() as nursery:

        async def work() -> None:
            number = 0
            while True:
                number += 1
                for cluster in fed.clusters.values():
                    quiet = (member(cluster.name, f"p{pool}", idle=1) for pool in range(1, pools))
                    cluster.source.set(member(cluster.name, "p0", idle=number), *quiet)
                await trio.sleep(POLL)

        nursery.start_soon(work)
        await fed.settle()
        traffic.clear()
        await trio.sleep(seconds)
        resyncs, changes = int(seconds / RESYNC) + 1, int(seconds / POLL) + 1
        for name in fed.clusters:
            messages = traffic.messages_of(name)
            assert len(messages) <= resyncs + changes
            sizes = Counter(len(message.items) for _, message in messages)
            assert sizes[pools] <= resyncs
            assert sizes[1] >= changes - resyncs  # a resync takes a change that waits with it
            assert set(sizes) == {1, pools}
            heard, beats = traffic.heard_by(name)
            assert len(beats) <= seconds / KEEPALIVE
            assert len(heard) <= 2 * (resyncs + changes)
        nursery.cancel_scope.cancel()


async def test_many_changes_within_the_debounce_are_one_message(autojump_clock: MockClock, traffic: Traffic) -> None:
    """semantics.md, "Agent": "changes as they happen (debounced 200 ms […])"."""
    async with pushing_federation(traffic) as (fed, source):
        for number in range(100):
            source.push(member("east", f"p{number % 5}", idle=number))
            await trio.sleep(0.0019)
        await trio.sleep(0.3)
        assert [len(message.items) for _, message in traffic.reports] == [5]
        assert fed["west"].idle("east") == [95, 96, 97, 98, 99]
        assert [(peer, len(message.items)) for _, peer, message in traffic.broadcasts] == [("west", 5)]


async def test_steady_change_is_told_five_times_a_second(autojump_clock: MockClock, traffic: Traffic) -> None:
    """The debounce gathers, and does not put off for ever: what goes on changing is told every 200 ms."""
    async with pushing_federation(traffic) as (fed, source):
        began = trio.current_time()
        for number in range(500):
            source.push(member("east", "p0", idle=number))
            await trio.sleep(0.01)
        await trio.sleep(DEBOUNCE)
        moments = [began, *(at for at, _ in traffic.reports)]
        pauses = [later - earlier for earlier, later in pairwise(moments)]
        assert max(pauses) <= DEBOUNCE + 0.011
        assert len(pauses) <= 5.0 / DEBOUNCE + 2  # one for each 200 ms, one at the end, one resync
        assert fed["west"].idle("east") == [499]


async def test_a_change_that_is_taken_back_within_the_debounce_ends_as_it_was(
    autojump_clock: MockClock, traffic: Traffic
) -> None:
    """What is told is the newest value, once."""
    async with pushing_federation(traffic) as (fed, source):
        source.push(member("east", "p0", idle=1))
        await trio.sleep(1.0)
        traffic.clear()
        source.push(member("east", "p0", idle=2))
        await trio.sleep(0.05)
        source.push(member("east", "p0", idle=1))
        await trio.sleep(1.0)
        assert [[record.idle for record in message.items] for _, message in traffic.reports] == [[1]]
        assert fed["west"].idle("east") == [1]


async def test_a_snapshot_that_is_too_large_for_one_message_comes_whole(
    autojump_clock: MockClock, traffic: Traffic
) -> None:
    """semantics.md, "Wire": "a message is at most 3 MiB when we send (larger snapshots are split)": here 3,000 records,
    sent by reporter and hub in batches, arrive in full, at those who were there and those who come."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(*(member("east", f"p{number}", idle=number) for number in range(3000)))
        await fed.settle()
        await fed.add("north").start()
        await trio.sleep(0.1)
        for name in ("west", "north"):
            assert sorted(fed[name].idle("east")) == list(range(3000))
        assert max(len(encode(message)) for _, message in traffic.reports) <= 3 * 2**20
        assert max(len(encode(message)) for *_, message in traffic.broadcasts) <= 3 * 2**20
        await fed["east"].stop()
        assert fed["west"].known("east") == fed["north"].known("east") == []


@asynccontextmanager
async def pushing_federation(traffic: Traffic) -> AsyncIterator[tuple[Simulation, PushingSource]]:
    """West watches, and east has nothing but a source that pushes; the next resync is some seconds away."""
    async with simulated_federation("west", "east", start=False) as fed:
        source = fed["east"].more_sources["push"] = PushingSource()
        source.live = False
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(2.0)
        traffic.clear()
        yield fed, source


# --- the ground that all of this stands on ---------------------------------------------------------------------------


async def history(seed: int) -> str:
    """What a federation goes through whose connections break, whose agents and hubs restart, and whose delays are
    drawn."""
    seen: list[object] = []
    async with simulated_federation("west", "east", hubs=2, seed=seed, start=False) as fed:

        def look() -> None:
            # To the tenth of a second: each way through a hub rounds an age to whole milliseconds on its own.
            known = [
                (
                    cluster.name,
                    record.cluster_id,
                    record.member_pool,
                    record.idle,
                    round(record.observed_at or 0, 1),
                )
                for cluster in fed.clusters.values()
                for record in cluster.registry.snapshot()
            ]
            dialled = [route.dialled for cluster in fed.clusters.values() for route in cluster.routes.values()]
            seen.append([round(trio.current_time(), 6), known, dialled])

        for number, cluster in enumerate(fed.clusters.values()):
            cluster.source.set(member(cluster.name, idle=number), member(cluster.name, "p2"))
            # A collect and a resync that are due at one moment may come in any order; here they are not.
            cluster.source.slowness = 0.05
            await cluster.start()
        await trio.sleep(1.0037)
        fed.hubs[0].stop()
        await sampled(6.0, look, step=0.5)
        await fed["east"].kill()
        await fed.hubs[0].start()
        await sampled(4.0, look, step=0.5)
        await fed["east"].start()
        await sampled(6.0, look, step=0.5)
        await fed["west"].stop()
        await sampled(6.0, look, step=0.5)
    return json.dumps(seen)


def virtual_history(seed: int) -> str:
    return trio.run(history, seed, clock=MockClock(autojump_threshold=0))


def test_every_run_of_a_federation_is_the_same() -> None:
    """C25: "suite with MockClock and an in-process hub, 20 runs", right: "0 flakes: memory streams under MockClock […];
    code reads time from one injected clock": the same seed gives the same history, with breaking connections, restarts
    and drawn delays in it, although Trio itself runs tasks in another order each time."""
    assert len({virtual_history(0) for _ in range(20)}) == 1
    assert virtual_history(0) != virtual_history(1)


@pytest.mark.soak
def test_every_run_is_the_same_for_many_seeds() -> None:
    """C25 at length: 200 runs under CPU load."""
    with multiprocessing.Pool(2 * (os.cpu_count() or 1)) as pool:
        for seed in range(10):
            assert len(set(pool.map(virtual_history, [seed] * 20))) == 1, f"seed {seed}"


async def test_records_are_relayed_with_everything_they_have(autojump_clock: MockClock) -> None:
    """Every field of a record arrives as it was sent; a rest of saturation in whole seconds, rounded up."""
    async with simulated_federation("west", "east") as fed:
        record = member(
            "east",
            idle=1,
            running=2,
            pending=3,
            desired=4,
            autoscaling_enabled=True,
            capacity=-1,
            saturated_for=2.5,
            state="Saturated",
            scaling_group="größe xl",
        )
        fed["east"].source.set(record, replace(record, member_pool="", saturated_for=0.0))
        await fed.settle()
        (known,) = fed["west"].known("east")  # the aggregate row is shadowed
        assert replace(known, observed_at=None) == replace(record, saturated_for=3.0)
        fed["east"].source.set(replace(record, member_pool="", saturated_for=0.0))
        await trio.sleep(POLL + 0.3)
        (known,) = fed["west"].known("east")
        assert replace(known, observed_at=None) == replace(record, member_pool="", saturated_for=0.0)

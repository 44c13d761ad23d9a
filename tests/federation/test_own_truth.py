"""Local truth is the sources' alone: no hub touches it, a hub is not needed for it, and nobody speaks for another."""

from __future__ import annotations

import random
from typing import NoReturn

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import ListSink, counted, exposition, item, lines, take_everything
from tests.simulation import SECRET, ScriptedHub, ScriptedSource, always, member, sampled, simulated_federation
from trio_federation.agent import Agent
from trio_federation.config import Endpoint, Federation
from trio_federation.link import HubLink
from trio_federation.pb.sandbox.sync.v1 import (
    ClusterOrigin,
    FederationBroadcast,
    ReportFederationRequest,
    WatchFederationRequest,
)
from trio_federation.rpc import IncomingWatch
from trio_federation.wire import WITHDRAWN_AGE_MS

# --- echoes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forged", ["another process", "the same process", "no process"])
async def test_records_of_our_own_cluster_from_a_hub_are_dropped_and_counted(
    forged: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """semantics.md, "Agent": "Local truth never goes through a hub […]. Records of the local cluster id that arrive
    from a hub are dropped and counted", however new they claim to be; and the others in the message count."""

    async def forge(call: IncomingWatch) -> None:
        await call.request()
        instance = fed["west"].agent.instance if forged == "the same process" else "ff"
        rows = [ClusterOrigin(cluster_id="west", instance=instance, uptime_ms=2**30)]
        for number in range(3):
            items = [
                item("p1", cluster="west", idle=99, seq=1000 + number),
                item("p2", cluster="west", seq=2000, age_ms=WITHDRAWN_AGE_MS),
                item("p9", cluster="west", idle=9, seq=1000),
                item("p1", cluster="east", idle=number + 1),
            ]
            await call.send(FederationBroadcast(items=items, origins=rows if forged != "no process" else []))
            await trio.sleep(1.0)
        await trio.sleep_forever()

    hub = ScriptedHub("forger", take_everything, forge)
    async with simulated_federation("west", hubs=0, scripted_hubs=[hub], start=False) as fed:
        fed["west"].source.set(member("west", "p1", idle=1), member("west", "p2", idle=2))
        await fed["west"].start()
        await trio.sleep(0.5)
        assert all(await sampled(40.0, lambda: fed["west"].idle("west") == [1, 2], step=0.5))
        agent = fed["west"].agent
        dropped = "trio_federation_records_dropped_total"
        assert counted(agent, dropped, origin="hub:forger", reason="own_cluster") == 9
        told = lines(logs, "record_dropped")
        assert [(line["origin"], line["reason"], line["log_level"]) for line in told] == [
            ("hub:forger", "own_cluster", "warning")
        ]
        # What it said of others was taken, and has run out since.
        assert fed["west"].known("east") == []
        assert fed["west"].registry.statistics().refused == {}


async def test_what_a_hub_echoes_of_others_is_taken_beside_our_own(autojump_clock: MockClock) -> None:
    """A watcher that does not ask to be spared gets its own echo from a real hub, and everything else."""
    async with simulated_federation("west", "east") as fed:
        fed["west"].source.set(member("west", idle=1))
        fed["east"].source.set(member("east", idle=2))
        await fed.settle()
        async with fed.connection("west") as connection:
            async with connection.watch(WatchFederationRequest()) as call:
                assert sorted(item.cluster_id for item in (await call.receive()).items) == ["east", "west"]
            async with connection.watch(WatchFederationRequest(spare_own_cluster=True)) as call:
                assert [item.cluster_id for item in (await call.receive()).items] == ["east"]


async def test_a_hub_stamps_the_callers_identity_over_what_records_claim(autojump_clock: MockClock) -> None:
    """semantics.md, "Hub": "The cluster id of a record is the identity of its *call*, stamped over whatever the
    record claims"."""
    async with simulated_federation("west", "east") as fed:
        fed["west"].source.set(member("west", idle=1))
        fed["east"].source.set(member("east", idle=2))
        await fed.settle()
        async with fed.connection("mallory", instance="ab") as connection, connection.report() as call:
            claims = (("west", "p1"), ("east", "p2"), ("", "p3"))
            items = [item(pool, cluster=claimed, idle=66, seq=999) for claimed, pool in claims]
            row = ClusterOrigin(cluster_id="east", instance="ab", uptime_ms=2**39)
            await call.send(ReportFederationRequest(items=items, origins=[row]))
            await trio.sleep(0.5)
            assert fed["west"].idle("mallory") == fed["east"].idle("mallory") == [66, 66, 66]
            for name in ("west", "east"):
                assert (fed[name].idle("west"), fed[name].idle("east")) == ([1], [2])
            assert [r.cluster_id for r in fed.hubs[0].hub.snapshot()] == [
                "east",
                "mallory",
                "mallory",
                "mallory",
                "west",
            ]


# --- a cluster of its own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["no hub", "no cluster id"])
async def test_a_single_cluster_starts_no_stream(
    why: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """semantics.md, "Agent": "Otherwise the agent runs single-cluster: registry, metrics and queries work, and no
    stream task is ever started"."""

    async def never(self: object) -> NoReturn:
        raise AssertionError("a stream task was started")

    async def dial() -> trio.abc.Stream:
        raise AssertionError("a hub was dialled")

    monkeypatch.setattr(HubLink, "run", never)
    cluster_id = None if why == "no cluster id" else "west"
    source, sink = ScriptedSource(), ListSink()
    source.set(member(cluster_id or "local", idle=3))
    agent = Agent(
        cluster_id,
        Federation(hubs=(Endpoint("hub", 7443),)),
        sources={"set": always(source)},
        sinks={"list": always(sink)},
        hubs={} if why == "no hub" else {"hub": dial},
        credential=None if why == "no hub" else SECRET,
        generator=random.Random(0),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await trio.sleep(60.0)
        assert agent.links == []
        assert agent.registry.local_idle("ns", "env") == 3
        assert agent.registry.best_foreign_member("ns", "env") is None
        assert agent.router.place("ns", "env").local
        cluster = agent.registry.local_cluster_id
        series = f'agentbox_federation_env_idle{{cluster="{cluster}",env="env",group="",namespace="ns"}} 3.0'
        assert series in (await exposition(agent)).splitlines()
        assert [record.idle for record in sink.snapshots[-1]] == [3]
        source.set()
        await trio.sleep(6.5)  # in between two looks of the sink, which come every second
        assert agent.registry.snapshot() == sink.snapshots[-1] == []
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() == began
    assert source.closed == 1
    assert [line["event"] for line in logs] == ["single_cluster", "placed"]

"""Whole federations whose clusters read their envs from an API server, and show there what the others have: real
agents, a real hub, and for each cluster a source and a sink of the Kubernetes plugin on a server in memory of its
own."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import counted, lines
from tests.kubernetes.fake_api import FakeConnection, FakeServer, env_body, pool
from tests.kubernetes.mirroring import MANAGER, Sent, StatusServer, Writer
from tests.kubernetes.waiting import within
from tests.simulation import SimulatedCluster, Simulation, sampled, simulated_federation
from trio_federation.retry import TAKEOVER
from trio_federation.testing import sink_context, source_context
from trio_federation_kubernetes.options import KubernetesOptions, StatusOptions
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS, SandboxEnvMapper
from trio_federation_kubernetes.sink import KubernetesStatusSink
from trio_federation_kubernetes.source import KubernetesSource

#: Seconds from a change in one cluster's API server to its write in another's: the watch tells it, agents gather for
#: 0.2 s, and look once a second.
SOON = 1.6
#: seconds between two writes of one env
ENV_INTERVAL = 5.0
TTL = 30.0
REFRESH = 60.0


class Mirrored:
    """A cluster whose envs are those of an API server, in which it shows what the others have."""

    def __init__(self, cluster: SimulatedCluster, server: FakeServer) -> None:
        self.cluster = cluster
        self.server = server
        #: what its sink has sent
        self.sent: list[Sent] = []
        ttl = cluster.simulation.settings.ttl
        reading = source_context(
            cluster_id=cluster.cluster_id, clock=cluster.clock, random=Random(cluster.name), ttl=ttl
        )
        writing = sink_context(
            cluster_id=cluster.cluster_id,
            clock=cluster.clock,
            random=Random(cluster.name),
            ttl=ttl,
            is_reporter=cluster.is_reporter,
        )
        mapper = SandboxEnvMapper(cluster.cluster_id)
        source = KubernetesSource(KubernetesOptions(), reading, mapper, connect=server.connect)
        cluster.more_sources["kubernetes"] = source
        self.sink = KubernetesStatusSink(StatusOptions(), writing, connect=self._connect)
        cluster.sinks["kubernetes-status"] = self.sink

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[FakeConnection]:
        await trio.lowlevel.checkpoint()
        yield Writer(self.server, self.sent)


class ClusterServer(StatusServer):
    """The API server of one cluster."""

    def __init__(self, cluster_id: str, **idle: int) -> None:
        super().__init__()
        self._cluster_id = cluster_id
        for name, count in idle.items():
            self.has(name, count)

    def has(self, name: str, idle: int) -> None:
        """An env with so many idle sandboxes, from now on; the controller writes it by the keys of its own entry."""
        if ("ns", name) not in self.names(SANDBOXENVS):
            body = env_body(pool("own", idle))
            body["status"]["clusters"][0]["clusterID"] = self._cluster_id
            self.put(SANDBOXENVS, "ns", name, **body)
        else:
            self.tick(name, idle=idle)


@asynccontextmanager
async def mirrored_federation(**servers: ClusterServer) -> AsyncIterator[tuple[Simulation, dict[str, Mirrored]]]:
    """A cluster for each API server, one hub, and some seconds until everything is shown; in the end no sink or source
    has ever failed."""
    async with simulated_federation(*servers, start=False) as fed:
        mirrored = {name: Mirrored(fed[name], server) for name, server in servers.items()}
        for cluster in list(fed.clusters.values()):
            await cluster.start()
        await trio.sleep(3 * ENV_INTERVAL)
        yield fed, mirrored
        for each in mirrored.values():
            for kind in ("sink", "source"):
                assert counted(each.cluster.agent, f"trio_federation_{kind}_failures_total") == 0


def content(server: StatusServer, name: str = "env") -> dict[str, Any]:
    """What an env says of all clusters, times apart."""
    status = server.env(name)["status"]
    entries = [{k: v for k, v in entry.items() if k != "lastSnapshotTime"} for entry in status["clusters"]]
    summary = {k: v for k, v in status.get("federation", {}).items() if k != "lastSnapshotTime"}
    return {"clusters": entries, "federation": summary}


def shows(server: StatusServer, name: str = "env", **clusters: int) -> Callable[[], bool]:
    """Whether an env says that these clusters, and no others, have so many idle in the pool "own"."""
    expected = {cluster: {"own": idle} for cluster, idle in clusters.items()}
    return lambda: server.foreign(name) == expected


# --- the story -------------------------------------------------------------------------------------------------------


async def test_a_cluster_that_runs_dry_is_seen_in_the_other(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """At once, and also that it has recovered; the summary says the same."""
    west, east = ClusterServer("west", env=5), ClusterServer("east", env=7)
    async with mirrored_federation(west=west, east=east) as (_, mirrored):
        assert shows(west, east=7)()
        assert shows(east, west=5)()
        for idle in (0, 12, 3, 0):
            east.has("env", idle)
            await within(SOON, shows(west, east=idle))
            assert west.summary() == (1, idle)
            await trio.sleep(ENV_INTERVAL)
        # Neither has ever touched what is the other's business.
        assert {tuple(sent.clusters) for sent in mirrored["west"].sent} == {("east",)}
        assert {tuple(sent.clusters) for sent in mirrored["east"].sent} == {("west",)}
        assert shows(east, west=5)()
    assert lines(logs, "kubernetes_status_disturbed") == []


async def test_what_is_shown_is_nobodys_own(autojump_clock: MockClock) -> None:
    """Entries of other clusters are not read as capacity of this one: everybody knows of each cluster what that has,
    and no more, however often all of it goes round."""
    servers = {name: ClusterServer(name, env=idle) for name, idle in {"west": 5, "east": 7, "north": 9}.items()}
    async with mirrored_federation(**servers) as (fed, _):
        await trio.sleep(5 * 60.0)
        for cluster in fed.clusters.values():
            assert {name: cluster.idle(name) for name in servers} == {"west": [5], "east": [7], "north": [9]}
        assert shows(servers["west"], east=7, north=9)()
        assert shows(servers["north"], east=7, west=5)()
        assert servers["north"].summary() == (2, 12)
        # Nobody's writes are news for anybody.
        for server in servers.values():
            assert len(server.asked("apply", trio.current_time() - 4 * 60.0)) == 4


async def test_only_envs_that_are_there_show_anything(autojump_clock: MockClock) -> None:
    """One that only the other cluster has appears nowhere, until it is made here."""
    west, east = ClusterServer("west", env=5), ClusterServer("east", env=7, theirs=4)
    async with mirrored_federation(west=west, east=east):
        assert west.names(SANDBOXENVS) == {("ns", "env")}
        west.has("theirs", 0)
        await within(SOON, shows(west, "theirs", east=4))
        await within(SOON + ENV_INTERVAL, shows(east, "theirs", west=0))


# --- what goes -------------------------------------------------------------------------------------------------------


async def test_a_cluster_that_dies_goes_when_what_is_known_of_it_is_too_old(autojump_clock: MockClock) -> None:
    """Nobody says that it is dead. What it said last is shown for as long as anybody believes it, with its time."""
    west, east = ClusterServer("west", env=5), ClusterServer("east", env=7)
    async with mirrored_federation(west=west, east=east) as (fed, mirrored):
        await fed["east"].kill()
        died_at = trio.current_time()
        seen_until = died_at
        for shown in await sampled(TTL + SOON, shows(west, east=7)):
            seen_until += 0.1 if shown else 0.0
        assert died_at + TTL / 2 <= seen_until <= died_at + TTL + SOON
        assert west.foreign() == {}
        assert west.summary() is None
        assert west.managed(MANAGER) == []
        writes = len(mirrored["west"].sent)
        await trio.sleep(5 * 60.0)
        assert len(mirrored["west"].sent) == writes


async def test_a_cluster_that_says_goodbye_goes_at_once(autojump_clock: MockClock) -> None:
    """And is there again as soon as it is back."""
    west, east = ClusterServer("west", env=5), ClusterServer("east", env=7)
    async with mirrored_federation(west=west, east=east) as (fed, _):
        await fed["east"].stop()
        await within(SOON, lambda: west.foreign() == {})
        # While it was gone nobody has taken away what it had written.
        assert shows(east, west=5)()
        await trio.sleep(ENV_INTERVAL)
        writes = len(east.asked("apply"))
        Mirrored(fed["east"], east)
        await fed["east"].start()
        await within(SOON, shows(west, east=7))
        await trio.sleep(20.0)
        assert shows(east, west=5)()
        assert len(east.asked("apply")) == writes, "it has found its entry, and it is right"


async def test_an_env_that_is_deleted_elsewhere_goes(autojump_clock: MockClock) -> None:
    """Its other envs stay."""
    west, east = ClusterServer("west", env=5, more=1), ClusterServer("east", env=7, more=2)
    async with mirrored_federation(west=west, east=east):
        east.delete(SANDBOXENVS, "ns", "env")
        await within(SOON, lambda: west.foreign() == {})
        await trio.sleep(60.0)
        assert west.foreign() == {}
        assert shows(west, "more", east=2)()


# --- the hub ---------------------------------------------------------------------------------------------------------


async def test_a_hub_that_restarts_changes_nothing(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """It comes back knowing nothing, and nobody's status shows it: nothing goes, and nothing is written but the ages
    that were due."""
    west, east = ClusterServer("west", env=5), ClusterServer("east", env=7)
    async with mirrored_federation(west=west, east=east) as (fed, mirrored):
        before = content(west), content(east)
        began = trio.current_time()
        for down_for in (0.0, 1.0, 3.0):
            await fed.restart_hub(0, down_for=down_for)
            assert all(await sampled(60.0, lambda: (content(west), content(east)) == before, step=0.25))
        seconds = trio.current_time() - began
        for each in mirrored.values():
            assert len([sent for sent in each.sent if sent.at >= began]) <= seconds / REFRESH + 1
            assert each.sink.troubles() == []
    assert Counter(line["event"] for line in logs)["kubernetes_status_writes"] == 2
    assert lines(logs, "kubernetes_status_stands_by") == []


async def test_while_there_is_no_hub_what_is_too_old_goes(autojump_clock: MockClock) -> None:
    """The agents cannot know better. Once it is back, so is the view."""
    west, east = ClusterServer("west", env=5), ClusterServer("east", env=7)
    async with mirrored_federation(west=west, east=east) as (fed, _):
        fed.hubs[0].stop()
        await trio.sleep(TTL + SOON)
        assert west.foreign() == east.foreign() == {}
        await fed.hubs[0].start()
        await within(20.0, lambda: shows(west, east=7)() and shows(east, west=5)())


# --- two agents of one cluster ---------------------------------------------------------------------------------------


async def test_of_two_agents_of_a_cluster_one_writes_and_the_other_takes_over(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """The second one reads everything, and never writes, whatever changes; when the first stops, it is the reporter,
    and writes what is new, and only that."""
    west, east = ClusterServer("west", env=5, same=1), ClusterServer("east", env=7, same=2)
    async with mirrored_federation(west=west, east=east) as (fed, mirrored):
        standby = Mirrored(fed.add("standby", cluster_id="west"), west)
        await standby.cluster.start()
        for idle in range(20, 30):
            east.has("env", idle)
            await trio.sleep(ENV_INTERVAL + 1.0)
            assert shows(west, east=idle)()
        assert standby.sent == []
        assert standby.sink.troubles() == []
        first = len(mirrored["west"].sent)
        await fed["west"].stop()
        east.has("env", 99)
        await within(TAKEOVER[1] + SOON + 1.0, shows(west, east=99))
        assert len(mirrored["west"].sent) == first
        assert {sent.key[1] for sent in standby.sent} == {"env"}
        await trio.sleep(3 * 60.0)
        assert shows(west, "same", east=2)()
        assert len(mirrored["west"].sent) == first
        # The first one comes back, finds the place taken, and writes nothing.
        back = Mirrored(fed["west"], west)
        await fed["west"].start()
        for idle in range(5):
            east.has("env", idle)
            await trio.sleep(ENV_INTERVAL + 1.0)
            assert shows(west, east=idle)()
        assert back.sent == []
    assert lines(logs, "kubernetes_status_disturbed") == []


async def test_a_rolling_restart_takes_nothing_away(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """The new process starts beside the old one, or after it: all the while the entry stands there, and it is not
    written for that."""
    west, east = ClusterServer("west", env=5), ClusterServer("east", env=7)
    async with mirrored_federation(west=west, east=east) as (fed, mirrored), trio.open_nursery() as nursery:
        began = trio.current_time()

        async def restarts() -> None:
            for overlap in (0.3, 7.0, 0.0):
                old = fed["west"].process
                if not overlap:
                    await old.stop()
                Mirrored(fed["west"], west).sent = mirrored["west"].sent
                await fed["west"].start()
                await trio.sleep(overlap)
                await old.stop()
                await trio.sleep(40.0)

        nursery.start_soon(restarts)
        assert all(await sampled(130.0, shows(west, east=7), step=0.25))
        assert len([sent for sent in mirrored["west"].sent if sent.at >= began]) <= 3
    assert lines(logs, "kubernetes_status_disturbed") == []


async def test_who_is_cut_off_does_not_write_against_the_one_that_took_its_place(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Its hub does not hear of it any more, and takes the standby; it still reaches its API server, and what it knows
    grows old there. It must not take away what the other writes."""
    west, east = ClusterServer("west", env=5), ClusterServer("east", env=7)
    async with mirrored_federation(west=west, east=east) as (fed, mirrored):
        standby = Mirrored(fed.add("standby", cluster_id="west"), west)
        await standby.cluster.start()
        await trio.sleep(5.0)
        fed.black_hole("west")
        taken_over = trio.current_time() + 20.0
        await trio.sleep(20.0)
        for idle in range(30, 60):
            east.has("env", idle)
            await trio.sleep(ENV_INTERVAL + 1.0)
            shown = await sampled(4.0, shows(west, east=idle))
            assert shown[-1], (idle, west.foreign())
        assert [sent.clusters for sent in mirrored["west"].sent if sent.at > taken_over + TTL] == []
        assert standby.sink.troubles() == []
        fed["west"].routes["hub-0"].release()
        await trio.sleep(60.0)
        assert shows(west, east=59)()
    assert lines(logs, "kubernetes_status_stopped") == []

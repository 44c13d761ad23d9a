"""Whole sources against an API server in memory, on virtual time, by themselves and inside of a real agent: what is
told, for how long, and what is said where something is in the way."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.federation.helpers import counted
from tests.kubernetes.fake_api import FakeServer, Script, env_body, line, pool
from tests.kubernetes.waiting import within
from tests.simulation import sampled, simulated_federation
from trio_federation import Capacity, CapacitySource, Change, Identity, SourceContext, Withdrawal
from trio_federation.agent import Agent
from trio_federation.config import Federation
from trio_federation.testing import source_context
from trio_federation_kubernetes.errors import KubernetesError
from trio_federation_kubernetes.options import KubernetesOptions, WarmPoolOptions
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS, SandboxEnvMapper
from trio_federation_kubernetes.source import LARGEST_PUSH, KubernetesSource
from trio_federation_kubernetes.warmpool import SANDBOXCLAIMS, SANDBOXWARMPOOLS, WarmPoolMapper

pytestmark = pytest.mark.usefixtures("logs")

TTL = 30.0
#: what the server's latency and the steps of a loop may cost
SLACK = 0.2
NAME = "source[0]:kubernetes"
#: Unix seconds at the server's start: about now, an hour earlier and later, and a clock whose battery is empty
WALL_CLOCKS = [1.796e9, 1.796e9 - 3600, 1.796e9 + 3600, 0.0]


def from_envs(server: FakeServer, context: SourceContext, **options: Any) -> KubernetesSource:
    """A source of type "kubernetes"."""
    mapper = SandboxEnvMapper(context.cluster_id)
    return KubernetesSource(KubernetesOptions(**options), context, mapper, connect=server.connect)


def from_warm_pools(
    server: FakeServer, context: SourceContext, *, claims: bool = True, **options: Any
) -> KubernetesSource:
    """A source of type "warmpool"."""
    checked = WarmPoolOptions(claims=claims, **options)
    mapper = WarmPoolMapper(context.cluster_id, claims=claims)
    return KubernetesSource(checked, context, mapper, connect=server.connect)


@pytest.fixture
def server(autojump_clock: MockClock) -> FakeServer:
    """One with an env in each of three namespaces."""
    autojump_clock.jump(1000)
    server = FakeServer(SANDBOXENVS, SANDBOXWARMPOOLS, SANDBOXCLAIMS)
    for number, namespace in enumerate(["a", "b", "c"], 1):
        server.put(SANDBOXENVS, namespace, "env", **env_body(pool("p1", number), pool("p2", 10 * number)))
    return server


@asynccontextmanager
async def running(source: CapacitySource) -> AsyncIterator[None]:
    """A source by itself."""
    async with trio.open_nursery() as nursery:
        await nursery.start(source.run)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def agent_of(*makes: Callable[[SourceContext], CapacitySource], seed: int = 0) -> AsyncIterator[Agent]:
    """An agent of cluster "west" with these sources, at work."""

    def maker(number: int, make: Callable[[SourceContext], CapacitySource]) -> Callable[[], CapacitySource]:
        name = f"source[{number}]:kubernetes"
        return lambda: make(source_context(name=name, random=Random(f"{seed} {number}"), ttl=TTL))

    async with trio.open_nursery() as nursery:
        sources = {f"source[{number}]:kubernetes": maker(number, make) for number, make in enumerate(makes)}
        agent = Agent("west", Federation(ttl=TTL), sources=sources, generator=Random(seed))
        await nursery.start(agent.run)
        await trio.sleep(1)
        yield agent
        nursery.cancel_scope.cancel()


def shown(agent: Agent) -> dict[str, Any]:
    """What /readyz says of the first source."""
    found = agent.health()["sources"][0]
    assert isinstance(found, dict)
    return found


def told(agent: Agent) -> dict[str, int]:
    """The idle count of each pool that the agent knows of its own cluster."""
    return {
        f"{record.namespace}/{record.member_pool}": record.idle
        for record in agent.registry.snapshot()
        if record.cluster_id == "west"
    }


def idle_of(records: Sequence[Capacity]) -> dict[str, int]:
    return {f"{record.namespace}/{record.member_pool}": record.idle for record in records}


def troubles(agent: Agent) -> dict[str, float]:
    """The metric of troubles, by reason, those that are over left out."""
    return {
        reason: value
        for reason in ("forbidden", "not_found", "unreachable", "schema", "contested", "answer", "unauthorized")
        if (value := counted(agent, "trio_federation_source_trouble", reason=reason))
    }


EVERYTHING = {"a/p1": 1, "a/p2": 10, "b/p1": 2, "b/p2": 20, "c/p1": 3, "c/p2": 30}


class Follower:
    """Holds what a source pushes."""

    def __init__(self) -> None:
        self.held: dict[Identity, Capacity] = {}
        self.batches: list[Sequence[Change]] = []
        #: seconds that a batch takes
        self.slowness = 0.0

    async def follow(self, source: CapacitySource, most: float = math.inf) -> None:
        """Take so many batches, and close the iterator."""
        changes = source.changes()
        assert changes is not None
        try:
            while most > 0:
                batch = await anext(changes)
                most -= 1
                await trio.sleep(self.slowness)
                self.batches.append(batch)
                for change in batch:
                    if isinstance(change, Withdrawal):
                        self.held.pop(change.identity, None)
                    else:
                        self.held[change.identity] = change
        finally:
            close = getattr(changes, "aclose")  # noqa: B009 - an AsyncIterator need not have it, and this one does
            await close()


# --- the beginning


async def test_with_the_first_list_it_has_started_and_tells_everything(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    source = from_envs(server, source_context())
    async with running(source):
        assert trio.current_time() <= 1000 + SLACK
        assert source.is_live()
        assert idle_of(await source.collect()) == EVERYTHING
        assert source.troubles() == []


@pytest.mark.parametrize("state", ["gone", "silent", "refusing"])
async def test_a_server_that_does_not_answer_holds_up_no_start(
    autojump_clock: MockClock, server: FakeServer, state: str
) -> None:
    """That is no failure of the source: it starts, says that it knows nothing, and why."""
    if state == "gone":
        server.vanish()
    elif state == "silent":
        server.black_hole = True
    else:
        server.refuse(403)
    source = from_envs(server, source_context())
    async with running(source):
        assert trio.current_time() <= 1000 + TTL / 6 + SLACK
        assert not source.is_live()
        with pytest.raises(KubernetesError, match=r"source\[0\]:test: nothing is known of its objects"):
            await source.collect()
        await trio.sleep(LONG := 40)
        assert trio.current_time() > 1000 + LONG
        (trouble,) = source.troubles()
        assert trouble.reason == ("forbidden" if state == "refusing" else "unreachable")
        with pytest.raises(KubernetesError, match=r"sandboxenvs\.agents\.navix\.sh: "):
            await source.collect()


async def test_while_nothing_was_ever_listed_own_capacity_is_unknown_and_not_zero(
    autojump_clock: MockClock, server: FakeServer, logs: list[EventDict]
) -> None:
    """The agent holds nothing of the cluster, does everything else, says why, and gets over it by itself."""
    down = server.vanish()
    async with agent_of(lambda context: from_envs(server, context)) as agent:
        for _ in range(20):
            await trio.sleep(5)
            assert agent.registry.snapshot() == []
            state = shown(agent)
            assert state["state"] == "not_live"
            assert "connection refused" in state["last_error"]["text"]
        (why,) = agent.health()["why_not"]
        assert why.startswith(f"{NAME} has not told yet what it has")
        assert "connection refused" in why
        assert troubles(agent) == {"unreachable": 1}
        assert counted(agent, "trio_federation_source_live", source=NAME) == 0
        down.end()
        await within(30 + SLACK, lambda: told(agent) == EVERYTHING)
        await trio.sleep(10)
        assert agent.health()["why_not"] == []
        assert shown(agent)["state"] == "live"
        assert troubles(agent) == {}
    # It was one trouble, and is told once, not at every try.
    assert len([each for each in logs if each["event"] == "source_not_live" and each["log_level"] != "debug"]) == 1


# --- what happens, and when it is known


async def test_a_change_is_pushed_at_once_and_a_deletion_withdraws_at_once(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    async with agent_of(lambda context: from_envs(server, context)) as agent:
        server.put(SANDBOXENVS, "a", "env", **env_body(pool("p1", 7)))
        server.delete(SANDBOXENVS, "b", "env")
        await trio.sleep(SLACK)
        assert told(agent) == {"a/p1": 7, "c/p1": 3, "c/p2": 30}
        assert server.counts() == {"list": 1, "watch": 1, "namespace": 1}


async def test_an_echo_that_changes_nothing_that_is_read_is_not_pushed(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """Somebody writes a status of their own into each object every second, for ten minutes."""
    source = from_envs(server, source_context())
    follower = Follower()
    async with running(source), trio.open_nursery() as nursery:
        nursery.start_soon(follower.follow, source)
        await wait_all_tasks_blocked()
        before = len(follower.batches)
        for second in range(600):
            for number, namespace in enumerate(["a", "b", "c"], 1):
                body = env_body(pool("p1", number), pool("p2", 10 * number), lastSeen=f"{second}", federation=[second])
                server.put(SANDBOXENVS, namespace, "env", **body)
            await trio.sleep(1)
        assert len(follower.batches) == before
        nursery.cancel_scope.cancel()


async def test_bursts_are_told_as_what_they_come_to(autojump_clock: MockClock, server: FakeServer) -> None:
    """Whoever is slow misses what is not true any more, and nothing else."""
    source = from_envs(server, source_context())
    follower = Follower()
    follower.slowness = 1.0
    async with running(source), trio.open_nursery() as nursery:
        nursery.start_soon(follower.follow, source)
        await trio.sleep(5)
        follower.batches.clear()
        for idle in range(1000):
            server.put(SANDBOXENVS, "a", "env", **env_body(pool("p1", idle)))
            await trio.sleep(0.002)
        await trio.sleep(5)
        assert 1 <= len(follower.batches) <= 6
        assert sum(len(batch) for batch in follower.batches) <= 8
        assert {record.identity: record for record in await source.collect()}.keys() == follower.held.keys()
        assert follower.held["west", "a", "env", "p1"].idle == 999
        nursery.cancel_scope.cancel()


async def test_pushes_are_of_bounded_size(autojump_clock: MockClock, server: FakeServer) -> None:
    members = 2 * LARGEST_PUSH + 123
    server.put(SANDBOXENVS, "a", "env", **env_body(*(pool(f"p{number}", 1) for number in range(members))))
    source = from_envs(server, source_context())
    follower = Follower()
    async with running(source), trio.open_nursery() as nursery:
        nursery.start_soon(follower.follow, source)
        await trio.sleep(1)
        assert len(follower.held) == members + 4
        assert max(len(batch) for batch in follower.batches) == LARGEST_PUSH
        assert len(follower.batches) == 3
        nursery.cancel_scope.cancel()


async def test_changes_that_are_closed_and_begun_again_lose_nothing(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """What was pushed before, and after, comes to what is true, without a collect in between."""
    source = from_envs(server, source_context())
    follower = Follower()
    async with running(source):
        await follower.follow(source, 1)
        server.put(SANDBOXENVS, "a", "env", **env_body(pool("p1", 5)))
        server.delete(SANDBOXENVS, "c", "env")
        await trio.sleep(1)
        for idle in (8, 9):
            # Once while nobody listens, and once while somebody does, who is cancelled.
            with trio.move_on_after(1):
                await follower.follow(source)
            server.put(SANDBOXENVS, "b", "env", **env_body(pool("p1", idle)))
        with trio.move_on_after(1):
            await follower.follow(source)
        assert idle_of(list(follower.held.values())) == {"a/p1": 5, "b/p1": 9}
        assert follower.held.keys() == {record.identity for record in await source.collect()}


@pytest.mark.parametrize("gone_as", ["event", "status"])
async def test_what_was_deleted_while_the_server_was_away_is_withdrawn_when_it_is_back(
    autojump_clock: MockClock, server: FakeServer, gone_as: Any
) -> None:
    """The history that would tell of it is gone; no record of it may last until it has aged out."""
    server.gone_as = gone_as
    async with agent_of(lambda context: from_envs(server, context)) as agent:
        await trio.sleep(10)
        with server.down():
            await trio.sleep(3)
            server.delete(SANDBOXENVS, "b", "env")
            server.put(SANDBOXENVS, "d", "env", **env_body(pool("p1", 4)))
            server.compact()
        took = await within(10, lambda: "d/p1" in told(agent), step=0.05)
        assert took < TTL / 2
        assert "b/p1" not in told(agent)
        assert told(agent) == {key: idle for key, idle in EVERYTHING.items() if key[0] != "b"} | {"d/p1": 4}


# --- how long it is true


async def test_a_quiet_hour_is_live_at_every_moment(autojump_clock: MockClock, server: FakeServer) -> None:
    """And costs a probe every third of the TTL, a watch every few minutes, and one list."""
    async with agent_of(lambda context: from_envs(server, context)) as agent:
        await within(5, lambda: told(agent) == EVERYTHING)
        known = await sampled(3600, lambda: (shown(agent)["state"], told(agent) == EVERYTHING), step=1.0)
        assert set(known) == {("live", True)}
        counts = server.counts()
        assert counts["list"] == 1
        assert counts["watch"] <= 16
        assert counts["probe"] <= 3600 / (TTL / 3)


@pytest.mark.parametrize("seed", range(4))
async def test_a_half_open_connection_is_not_live_within_half_of_the_ttl(
    autojump_clock: MockClock, server: FakeServer, seed: int
) -> None:
    """Since the last evidence, which is no older than half of the TTL itself. Its records are gone after the TTL."""
    source = from_envs(server, source_context(random=Random(seed)))
    async with running(source):
        await trio.sleep(100 + 3 * seed)
        assert source.is_live()
        server.black_hole = True
        took = await within(TTL / 2 + SLACK, lambda: not source.is_live())
        (trouble,) = source.troubles()
        assert trouble.reason == "unreachable"
        assert took > 0.1
        await trio.sleep(TTL / 2 + SLACK)
        with pytest.raises(KubernetesError, match="nothing is known"):
            await source.collect()


async def test_an_outage_ages_records_out_and_withdraws_none(autojump_clock: MockClock, server: FakeServer) -> None:
    """They stay until they are older than the TTL, counted from the last resync at which there was evidence of the last
    half of it; no longer. And they are back soon after the server is."""
    async with agent_of(lambda context: from_envs(server, context)) as agent:
        await trio.sleep(20)
        with server.down():
            lasted = await within(2 * TTL, lambda: told(agent) == {})
            assert TTL / 2 < lasted <= 1.5 * TTL + SLACK
            await trio.sleep(300)
            assert shown(agent)["state"] == "not_live"
            server.put(SANDBOXENVS, "a", "env", **env_body(pool("p1", 5)))
        await within(30 + SLACK, lambda: told(agent) != {})
        assert told(agent)["a/p1"] == 5


async def test_a_short_outage_is_not_seen_at_all(autojump_clock: MockClock, server: FakeServer) -> None:
    """A restart of the API server in seconds changes no record and no state."""
    async with agent_of(lambda context: from_envs(server, context)) as agent:
        await trio.sleep(20)
        with server.down():
            known = await sampled(5, lambda: (shown(agent)["state"], told(agent) == EVERYTHING))
        known += await sampled(60, lambda: (shown(agent)["state"] in ("live", "partly"), told(agent) == EVERYTHING))
        assert {all(each) for each in known} == {True}


# --- namespaces and rights


async def test_namespaces_are_read_one_by_one_and_never_all_at_once(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    async with agent_of(lambda context: from_envs(server, context, namespaces=("a", "c"))) as agent:
        await trio.sleep(60)
        assert told(agent) == {key: idle for key, idle in EVERYTHING.items() if key[0] != "b"}
        asked = {request.namespace for request in server.requests if request.kind != "namespace"}
        assert asked == {"a", "c"}


async def test_a_forbidden_namespace_costs_the_others_nothing(
    autojump_clock: MockClock, server: FakeServer, logs: list[EventDict]
) -> None:
    """It is named, with what to do; when the right is there, it comes by itself."""
    refused = server.refuse(403, namespace="b")
    others = {key: idle for key, idle in EVERYTHING.items() if key[0] != "b"}
    async with agent_of(lambda context: from_envs(server, context, namespaces=("a", "b", "c"))) as agent:
        await within(5, lambda: told(agent) == others)
        states = await sampled(500, lambda: (shown(agent)["state"], told(agent) == others), step=1.0)
        assert set(states[11:]) == {("partly", True)}
        text = shown(agent)["last_error"]["text"]
        assert "sandboxenvs.agents.navix.sh in b: " in text
        assert "grant its user list and watch on sandboxenvs.agents.navix.sh" in text
        assert troubles(agent) == {"forbidden": 1}
        assert agent.health()["why_not"] == []
        asked = [request for request in server.requests if request.namespace == "b"]
        assert len(asked) <= 120
        refused.end()
        await within(30 + SLACK, lambda: told(agent) == EVERYTHING)
        await trio.sleep(10 + SLACK)
        assert shown(agent)["state"] == "live"
        assert troubles(agent) == {}
    assert len([each for each in logs if each["event"] == "source_trouble" and each["log_level"] != "debug"]) == 1


async def test_a_right_that_is_taken_away_ages_out_its_records_alone(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """The watch that is open goes on, as API servers end none for that; the probe finds out."""
    server.bookmark_interval = math.inf
    async with agent_of(lambda context: from_envs(server, context, namespaces=("a", "b", "c"))) as agent:
        await trio.sleep(20)
        refused = server.refuse(403, namespace="b")
        lasted = await within(2 * TTL, lambda: told(agent).keys() == {"a/p1", "a/p2", "c/p1", "c/p2"})
        assert TTL / 2 < lasted <= 1.5 * TTL + SLACK
        assert shown(agent)["state"] == "partly"
        assert "sandboxenvs.agents.navix.sh in b: " in shown(agent)["last_error"]["text"]
        fresh = await sampled(300, lambda: len(told(agent)), step=1.0)
        assert set(fresh) == {4}
        refused.end()
        await within(60, lambda: told(agent) == EVERYTHING)


async def test_a_record_of_a_namespace_that_is_doubtful_says_how_old_it_is(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """While others are live, and are true now."""
    until = trio.current_time() + 100
    body = env_body(pool("p1", 0, saturatedUntil=rfc3339(server.server_time() + 100)))
    server.put(SANDBOXENVS, "b", "env", **body)
    source = from_envs(server, source_context(), namespaces=("a", "b"))
    async with running(source):
        await trio.sleep(5)
        server.refuse(403, namespace="b")
        server.end()
        revoked_at = trio.current_time()
        await trio.sleep(TTL / 2 + 5)
        assert source.is_live()
        stamps = {record.namespace: record.observed_at for record in await source.collect()}
        assert stamps == {"a": None, "b": pytest.approx(revoked_at, abs=TTL / 3)}
        (doubtful,) = [record for record in await source.collect() if record.namespace == "b"]
        assert doubtful.observed_at is not None
        # It was so much then.
        assert doubtful.observed_at + doubtful.saturated_for == pytest.approx(until, abs=2.2)
        await trio.sleep(TTL / 2)
        assert {record.namespace for record in await source.collect()} == {"a"}


async def test_several_namespaces_with_the_same_trouble_are_one_trouble(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    server.vanish()
    source = from_envs(server, source_context(), namespaces=("a", "b", "c", "d", "e"))
    async with running(source):
        (trouble,) = source.troubles()
        assert (
            trouble.detail == "sandboxenvs.agents.navix.sh in a, b, c and 2 more namespaces: fake: connection refused"
        )


async def test_a_definition_that_comes_later_is_found(autojump_clock: MockClock, server: FakeServer) -> None:
    """Until then the agent is up, says what to do, and asks a few times a minute."""
    server.uninstall(SANDBOXENVS)
    async with agent_of(lambda context: from_envs(server, context)) as agent:
        await trio.sleep(600)
        assert told(agent) == {}
        (why,) = agent.health()["why_not"]
        assert "install the CustomResourceDefinition of sandboxenvs.agents.navix.sh, or take the source out" in why
        assert troubles(agent) == {"not_found": 1}
        assert len(server.requests) <= 120
        server.install(SANDBOXENVS)
        server.put(SANDBOXENVS, "a", "env", **env_body(pool("p1", 1)))
        await within(30 + SLACK, lambda: told(agent) == {"a/p1": 1})
        # And one that is taken away takes its records with it.
        server.uninstall(SANDBOXENVS)
        await within(1.5 * TTL + SLACK, lambda: told(agent) == {})
        await within(10 + SLACK, lambda: troubles(agent) == {"not_found": 1})


async def test_sources_beside_each_other(autojump_clock: MockClock, server: FakeServer) -> None:
    """Several per agent, of one server: the trouble of one is its own."""
    server.refuse(403, namespace="b")
    async with agent_of(
        lambda context: from_envs(server, context, namespaces=("a",)),
        lambda context: from_envs(server, context, namespaces=("b",)),
    ) as agent:
        await trio.sleep(30)
        assert told(agent).keys() == {"a/p1", "a/p2"}
        first, second = agent.health()["sources"]
        assert (first["state"], second["state"]) == ("live", "not_live")


# --- saturation, by the server's clock


def rfc3339(unix: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize("wall", WALL_CLOCKS)
async def test_how_long_a_pool_is_saturated_goes_by_the_servers_clock(
    autojump_clock: MockClock, server: FakeServer, wall: float
) -> None:
    """Whatever it shows. A resync, or a list, does not begin the time anew."""
    server.wall_offset = wall
    until = trio.current_time() + 120
    body = env_body(pool("p1", 0, saturatedUntil=rfc3339(server.server_time() + 120), autoscalingEnabled=True))
    server.put(SANDBOXENVS, "a", "env", **body)
    async with agent_of(lambda context: from_envs(server, context, namespaces=("a",))) as agent:

        def ends_at() -> float:
            (record,) = agent.registry.snapshot()
            assert record.observed_at is not None
            return record.observed_at + record.saturated_for

        await trio.sleep(SLACK)
        seen = await sampled(100, ends_at, step=1.0)
        server.compact()
        server.put(SANDBOXENVS, "b", "other")
        server.end()
        seen += await sampled(10, ends_at, step=1.0)
        # A Date has whole seconds, and so has the moment.
        assert min(seen) > until - 2.2
        assert max(seen) < until + 2.2
        await trio.sleep(20)
        (record,) = agent.registry.snapshot()
        assert record.saturated_for == 0
        # A push has it, too.
        server.put(
            SANDBOXENVS, "a", "env", **env_body(pool("p1", 0, saturatedUntil=rfc3339(server.server_time() + 60)))
        )
        await trio.sleep(SLACK)
        assert ends_at() == pytest.approx(trio.current_time() + 60, abs=2.2)


async def test_before_the_servers_clock_is_known_nothing_is_saturated(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """And a moment that is long past, or absurd, is no trouble."""
    for name, moment in (("p1", "1970-01-01T00:00:00Z"), ("p2", "9999-12-31T23:59:59Z")):
        server.put(SANDBOXENVS, "a", name, **env_body(pool(name, 1, saturatedUntil=moment)))
    server.delete(SANDBOXENVS, "a", "env")
    async with agent_of(lambda context: from_envs(server, context, namespaces=("a",))) as agent:
        await trio.sleep(SLACK)
        p1, p2 = agent.registry.snapshot()
        assert p1.saturated_for == 0
        assert p2.saturated_for > 1e6


# --- several resources


def put_warm_pool(server: FakeServer, name: str, ready: int, namespace: str = "a") -> None:
    spec = {"replicas": 9, "sandboxTemplateRef": {"name": "python"}}
    server.put(SANDBOXWARMPOOLS, namespace, name, spec=spec, status={"readyReplicas": ready})


def put_claim(server: FakeServer, name: str, of: str, sandbox: str | None = None, namespace: str = "a") -> None:
    status = {} if sandbox is None else {"sandbox": {"name": sandbox}}
    server.put(SANDBOXCLAIMS, namespace, name, spec={"warmPoolRef": {"name": of}}, status=status)


async def test_claims_and_pools_are_joined_as_they_come(autojump_clock: MockClock, server: FakeServer) -> None:
    put_warm_pool(server, "p1", 3)
    put_claim(server, "c1", "p1", "s1")
    async with agent_of(lambda context: from_warm_pools(server, context)) as agent:
        put_claim(server, "c2", "p1")
        put_claim(server, "c3", "later")
        await trio.sleep(SLACK)
        (record,) = agent.registry.snapshot()
        assert (record.env_name, record.idle, record.running, record.pending) == ("python", 3, 1, 1)
        put_warm_pool(server, "later", 0)
        server.delete(SANDBOXCLAIMS, "a", "c1")
        await trio.sleep(SLACK)
        counts = {record.member_pool: (record.running, record.pending) for record in agent.registry.snapshot()}
        assert counts == {"p1": (0, 1), "later": (0, 1)}


async def test_half_of_the_truth_is_not_told(autojump_clock: MockClock, server: FakeServer) -> None:
    """Where pools can be read and claims cannot, nobody knows what runs; what to do is said. Without claims all is
    well."""
    put_warm_pool(server, "p1", 3)
    refused = server.refuse(403, plural="sandboxclaims")
    async with agent_of(lambda context: from_warm_pools(server, context)) as agent:
        await trio.sleep(100)
        put_warm_pool(server, "p1", 4)
        await trio.sleep(SLACK)
        assert told(agent) == {}
        (why,) = agent.health()["why_not"]
        assert "grant its user list and watch on sandboxclaims.extensions.agents.x-k8s.io" in why
        refused.end()
        await within(30 + SLACK, lambda: told(agent) == {"a/p1": 4})
    server.refuse(403, plural="sandboxclaims")
    async with agent_of(lambda context: from_warm_pools(server, context, claims=False)) as agent:
        await trio.sleep(SLACK)
        assert told(agent) == {"a/p1": 4}


async def test_where_one_resource_is_lost_no_push_of_the_other_makes_its_part_fresh(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """A record is as good as the worst of what it comes from: how many claims wait is not known any more, however often
    the pool changes."""
    put_warm_pool(server, "p1", 3)
    put_claim(server, "c1", "p1")
    async with agent_of(lambda context: from_warm_pools(server, context)) as agent:
        await trio.sleep(10)
        assert told(agent) == {"a/p1": 3}
        server.refuse(403, plural="sandboxclaims")
        for watch in server.watches:
            watch.ends = watch.resource == SANDBOXCLAIMS
            watch.wake()
        for ready in range(60):
            put_warm_pool(server, "p1", ready)
            await trio.sleep(1)
        assert told(agent) == {}


async def test_a_push_is_as_old_as_the_worst_of_what_it_rests_on(autojump_clock: MockClock, server: FakeServer) -> None:
    """Once that is doubtful; and when it is older than the TTL, the change waits until all is known again."""
    put_warm_pool(server, "p1", 3)
    put_claim(server, "c1", "p1")
    source = from_warm_pools(server, source_context())
    follower = Follower()
    async with running(source), trio.open_nursery() as nursery:
        nursery.start_soon(follower.follow, source)
        await trio.sleep(5)
        refused = server.refuse(403, plural="sandboxclaims")
        for watch in server.watches:
            watch.ends = watch.resource == SANDBOXCLAIMS
            watch.wake()
        seen = {}
        for after in (10, 20, 40):
            await trio.sleep_until(1000 + after)
            put_warm_pool(server, "p1", after)
            await trio.sleep(SLACK)
            (record,) = follower.held.values()
            seen[after] = (record.idle, record.observed_at)
        listed_at = pytest.approx(1000, abs=SLACK)
        assert seen == {10: (10, None), 20: (20, listed_at), 40: (20, listed_at)}
        refused.end()
        await within(30 + SLACK, lambda: [record.idle for record in follower.held.values()] == [40])
        nursery.cancel_scope.cancel()


# --- what people read


async def test_a_pool_that_two_objects_claim_is_told_once_and_named(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """Two SandboxEnvs cannot share a pool; by a table of paths two objects can (see test_table_source.py). Here it is
    one status that names a member twice: the first counts, and nobody needs to be told."""
    server.put(SANDBOXENVS, "a", "env", **env_body(pool("p1", 1), pool("p1", 2)))
    source = from_envs(server, source_context(), namespaces=("a",))
    async with running(source):
        assert idle_of(await source.collect()) == {"a/p1": 1}
        assert source.troubles() == []


@pytest.mark.parametrize(
    "code, reason, advice",
    [
        (401, "unauthorized", "see whether its token or certificate has expired or was revoked"),
        (403, "forbidden", "config/kubernetes/rbac has the roles"),
        (404, "not_found", "install the CustomResourceDefinition"),
        (429, "throttled", ""),
        (500, "server", ""),
    ],
)
async def test_each_refusal_says_what_to_do(
    autojump_clock: MockClock, server: FakeServer, code: int, reason: str, advice: str
) -> None:
    server.refuse(code, message="as the server says")
    source = from_envs(server, source_context())
    async with running(source):
        (trouble,) = source.troubles()
        assert trouble.reason == reason
        assert trouble.detail.startswith("sandboxenvs.agents.navix.sh: ")
        assert "as the server says" in trouble.detail
        assert advice in trouble.detail


# --- bad news in a watch


def says(*events: bytes) -> Script:
    async def script(request: Any) -> Any:
        for event in events:
            yield event
        await trio.sleep_forever()

    return script


async def test_a_flood_of_events_is_followed(autojump_clock: MockClock, server: FakeServer) -> None:
    """Thousands of them in one chunk, about objects that come and go."""
    async with agent_of(lambda context: from_envs(server, context)) as agent:
        events = b""
        for number in range(3000):
            metadata = {"name": f"e{number % 50}", "namespace": "a", "resourceVersion": f"v{number}"}
            kind = "DELETED" if number % 7 == 6 else "MODIFIED"
            events += line(kind, {"metadata": metadata, **env_body(pool("p1", number))})
        server.send(events)
        await trio.sleep(1)
        last: dict[str, int | None] = {}
        for number in range(3000):
            last[f"e{number % 50}"] = None if number % 7 == 6 else number
        held = {record.env_name: record.idle for record in agent.registry.snapshot() if record.env_name != "env"}
        assert held == {name: idle for name, idle in last.items() if idle is not None}


# --- through a federation


async def test_what_the_api_server_says_is_seen_in_another_cluster(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """Source, agent, hub, agent; and what is gone here is gone there at once."""
    async with simulated_federation("west", "east", start=False) as federation:
        west, east = federation["west"], federation["east"]
        west.more_sources["kubernetes"] = from_envs(server, source_context(clock=west.clock))
        await west.start()
        await east.start()
        await federation.settle()
        assert idle_of(east.known("west")) == EVERYTHING
        assert east.router.place("a", "env").target == "west::p2"
        server.delete(SANDBOXENVS, "a", "env")
        await trio.sleep(1)
        assert {record.namespace for record in east.known("west")} == {"b", "c"}
        with server.down():
            await trio.sleep(2 * TTL)
            assert east.known("west") == []
        await within(40, lambda: len(east.known("west")) == 4)

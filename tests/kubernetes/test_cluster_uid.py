"""How sources come to know the UID of their cluster: against an API server in memory, on virtual time. It is there, is
not, or may not be read; the server is slow, gone, or another one than before; and none of it costs anything else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.kubernetes.fake_api import FakeServer, env_body, namespace_body, pool
from tests.kubernetes.test_conformance import KINDS, World
from tests.kubernetes.waiting import within
from trio_federation import CapacitySource
from trio_federation.testing import source_context
from trio_federation_kubernetes.cluster_uid import DEADLINE, LEAST_BETWEEN, REFUSED_PAUSE, ClusterUid, uid_in
from trio_federation_kubernetes.errors import AnswerError, CredentialError, KubernetesError
from trio_federation_kubernetes.options import KubernetesOptions
from trio_federation_kubernetes.reflector import LONGEST_PAUSE
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS, SandboxEnvMapper
from trio_federation_kubernetes.source import KubernetesSource

TTL = 30.0
#: what the server's latency and the steps of a loop may cost
SLACK = 0.2
#: seconds between two probes of a watch that is silent, which show that a server is there
EVIDENCE = TTL / 3
HOUR = 3600.0


@pytest.fixture
def server(autojump_clock: MockClock) -> FakeServer:
    """One with an env."""
    autojump_clock.jump(1000)
    server = FakeServer(SANDBOXENVS)
    server.put(SANDBOXENVS, "a", "env", **env_body(pool("p1", 1)))
    return server


@asynccontextmanager
async def running(server: FakeServer, **options: Any) -> AsyncIterator[KubernetesSource]:
    """A source of type "kubernetes" that has started."""
    context = source_context(ttl=TTL)
    mapper = SandboxEnvMapper(context.cluster_id)
    source = KubernetesSource(KubernetesOptions(**options), context, mapper, connect=server.connect)
    async with at_work(source):
        yield source


@asynccontextmanager
async def at_work(source: CapacitySource) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(source.run)
        yield
        nursery.cancel_scope.cancel()


async def idle(source: CapacitySource) -> list[int]:
    return [record.idle for record in await source.collect()]


def told(logs: list[EventDict], event: str) -> list[EventDict]:
    return [each for each in logs if each["event"] == event]


# It is known


@pytest.mark.parametrize("kind", KINDS)
async def test_every_type_of_source_knows_it_soon(autojump_clock: MockClock, logs: list[EventDict], kind: str) -> None:
    """It is asked for once, however long the source runs, and said once."""
    world = World(KINDS[kind])
    server = world.server
    options = msgspec.convert(world.kind.table, world.kind.options)
    source = world.kind.make(server, options, source_context(ttl=TTL))
    assert source.cluster_uid() is None
    async with at_work(source):
        await trio.sleep(SLACK)
        assert source.cluster_uid() == server.uid is not None
        await trio.sleep(HOUR)
        assert source.cluster_uid() == server.uid
    assert len(server.asked("namespace")) == 1
    assert [(each["uid"], each["before"]) for each in told(logs, "kubernetes_cluster_uid")] == [(server.uid, "unknown")]


@pytest.mark.usefixtures("logs")
async def test_two_clusters_have_two_and_two_sources_of_one_have_one(autojump_clock: MockClock) -> None:
    servers = [FakeServer(SANDBOXENVS), FakeServer(SANDBOXENVS)]
    async with running(servers[0]) as one, running(servers[0], namespaces=("a",)) as same, running(servers[1]) as other:
        await trio.sleep(SLACK)
        assert one.cluster_uid() == same.cluster_uid() == servers[0].uid
        assert other.cluster_uid() == servers[1].uid != servers[0].uid


# It is not to be had


REFUSALS: dict[str, Callable[[FakeServer], object]] = {
    "no such namespace": lambda server: setattr(server, "uid", None),
    "forbidden": lambda server: server.refuse(403, "namespace"),
    "gone": lambda server: server.refuse(404, "namespace"),
    "no such path": lambda server: server.refuse(405, "namespace"),
    "a page": lambda server: server.fault("namespace", body=b"<html>"),
    "nothing": lambda server: server.fault("namespace", body=b""),
    "a list": lambda server: server.fault("namespace", body=b"[]"),
    "no uid": lambda server: server.fault("namespace", body=namespace_body("")),
    "too long": lambda server: server.fault("namespace", body=namespace_body("a" * 129)),
    "another object": lambda server: server.fault(
        "namespace", body=namespace_body("x").replace(b'"name": "kube-system"', b'"name": "default"')
    ),
    "another kind": lambda server: server.fault(
        "namespace", body=namespace_body("x").replace(b'"Namespace"', b'"Pod"')
    ),
    "null": lambda server: server.fault("namespace", body=b'{"kind": "Namespace", "metadata": null}'),
    "deep": lambda server: server.fault("namespace", body=b'{"metadata": ' + b"[" * 100_000),
    "too large": lambda server: server.fault("namespace", error=lambda _: AnswerError("fake: kube-system: too large")),
}


@pytest.mark.parametrize("refusal_of", REFUSALS)
async def test_what_cannot_be_had_is_unknown_and_costs_nothing(
    autojump_clock: MockClock, server: FakeServer, logs: list[EventDict], refusal_of: str
) -> None:
    """The source is live and has no trouble. It says so once, and asks a few times an hour."""
    REFUSALS[refusal_of](server)
    async with running(server) as source:
        assert trio.current_time() <= 1000 + SLACK
        for _ in range(360):
            assert source.is_live()
            assert source.cluster_uid() is None
            assert source.troubles() == []
            assert await idle(source) == [1]
            await trio.sleep(HOUR / 360)
    assert HOUR / REFUSED_PAUSE / 1.3 <= len(server.asked("namespace")) <= HOUR / REFUSED_PAUSE * 1.3 + 1
    (line,) = told(logs, "kubernetes_cluster_uid_unknown")
    assert (line["log_level"], "config/kubernetes/rbac/cluster-uid" in line["advice"]) == ("info", True)
    assert "kube-system" in line["error"]
    assert "\n" not in line["error"] + line["advice"]
    assert len(line["error"]) < 1000


@pytest.mark.usefixtures("logs")
async def test_a_right_that_is_granted_later_is_found(autojump_clock: MockClock, server: FakeServer) -> None:
    refused = server.refuse(403, "namespace")
    async with running(server) as source:
        await trio.sleep(HOUR)
        refused.end()
        await within(REFUSED_PAUSE * 1.2 + SLACK, lambda: source.cluster_uid() == server.uid)


@pytest.mark.usefixtures("logs")
async def test_rights_that_come_moments_after_the_agent_are_found_at_once(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """As when everything is applied together: the list was refused at first as well."""
    refused = server.refuse(403)
    async with running(server) as source:
        await trio.sleep(2)
        refused.end()
        await within(LONGEST_PAUSE + LEAST_BETWEEN, lambda: source.cluster_uid() == server.uid)


async def test_a_right_that_is_taken_away_is_no_reason_to_believe_what_was(
    autojump_clock: MockClock, server: FakeServer, logs: list[EventDict]
) -> None:
    """Whoever answers after a failure and does not say who it is may be anybody; without one, it is not asked."""
    async with running(server) as source:
        await trio.sleep(60)
        refused = server.refuse(403, "namespace")
        await trio.sleep(HOUR)
        assert source.cluster_uid() == server.uid
        server.cut()
        await within(LEAST_BETWEEN + EVIDENCE, lambda: source.cluster_uid() is None)
        refused.end()
        server.cut()
        await within(LEAST_BETWEEN + EVIDENCE, lambda: source.cluster_uid() == server.uid)
    assert [each["before"] for each in told(logs, "kubernetes_cluster_uid")] == ["unknown", "unknown"]
    assert len(told(logs, "kubernetes_cluster_uid_unknown")) == 1


async def test_a_namespace_that_stays_forbidden_is_no_doubt_for_ever(
    autojump_clock: MockClock, server: FakeServer, logs: list[EventDict]
) -> None:
    """Its list is asked for again and again, and the UID is not."""
    server.refuse(403, namespace="b")
    async with running(server, namespaces=("a", "b")) as source:
        await trio.sleep(HOUR)
        assert source.cluster_uid() == server.uid
        assert len(server.asked("namespace")) <= 2
        assert len([each for each in server.asked("list") if each.namespace == "b"]) > 100
    assert len(told(logs, "kubernetes_cluster_uid")) == 1


# There is no answer, or not yet


@pytest.mark.parametrize("reason", ["hangs", "unreachable", "503", "429", "401", "no credential"])
async def test_no_answer_holds_nothing_up_and_is_asked_for_again(
    autojump_clock: MockClock, server: FakeServer, logs: list[EventDict], reason: str
) -> None:
    """Rarely: that the server works otherwise is heard each third of the TTL, and the pauses grow."""
    match reason:
        case "hangs":
            fault = server.hang("namespace")
        case "unreachable":
            fault = server.vanish("namespace")
        case "no credential":
            fault = server.fault("namespace", error=lambda _: CredentialError("fake: no credential"))
        case code:
            fault = server.refuse(int(code), "namespace")
    async with running(server) as source:
        assert trio.current_time() <= 1000 + SLACK
        for _ in range(60):
            assert source.is_live()
            assert source.cluster_uid() is None
            assert source.troubles() == []
            assert await idle(source) == [1]
            await trio.sleep(10)
        assert 10 <= len(server.asked("namespace")) <= 600 / EVIDENCE + 2
        fault.end()
        await within(LONGEST_PAUSE + EVIDENCE + DEADLINE + 1, lambda: source.cluster_uid() == server.uid)
    assert told(logs, "kubernetes_cluster_uid_unknown") == []
    assert {each["log_level"] for each in told(logs, "kubernetes_cluster_uid_failed")} == {"debug"}


@pytest.mark.usefixtures("logs")
async def test_a_slow_answer_comes_late_and_alone(autojump_clock: MockClock, server: FakeServer) -> None:
    """What is read is told meanwhile, as ever."""
    server.hang("namespace", times=1)
    async with running(server) as source:
        assert trio.current_time() <= 1000 + SLACK
        assert await idle(source) == [1]
        assert source.cluster_uid() is None
        server.put(SANDBOXENVS, "a", "env", **env_body(pool("p1", 2)))
        await trio.sleep(SLACK)
        assert await idle(source) == [2]
        await within(DEADLINE + EVIDENCE + 1, lambda: source.cluster_uid() == server.uid)


@pytest.mark.usefixtures("logs")
async def test_a_server_asks_for_patience(autojump_clock: MockClock, server: FakeServer) -> None:
    server.refuse(429, "namespace", times=1, retry_after=50.0)
    async with running(server) as source:
        await trio.sleep(49)
        assert len(server.asked("namespace")) == 1
        await within(2 + EVIDENCE, lambda: source.cluster_uid() == server.uid)


@pytest.mark.usefixtures("logs")
async def test_a_server_that_is_down_is_asked_once_until_it_is_back(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    down = server.vanish()
    async with running(server) as source:
        await trio.sleep(HOUR)
        assert len(server.asked("namespace")) == 1
        down.end()
        await within(LONGEST_PAUSE + EVIDENCE, lambda: source.cluster_uid() == server.uid)
        assert len(server.asked("namespace")) == 2


# The server is another one than before


def rebuilt(server: FakeServer, uid: str) -> None:
    """The cluster is made anew, at the same address; what there was is lost."""
    server.uid = uid
    server.delete(SANDBOXENVS, "a", "env")
    server.put(SANDBOXENVS, "a", "env", **env_body(pool("p1", 7)))
    server.compact()


@pytest.mark.parametrize("gone_as", ["event", "status"])
@pytest.mark.parametrize("how", ["down", "cut", "ended"])
async def test_a_cluster_that_was_rebuilt_is_another_one(
    autojump_clock: MockClock, server: FakeServer, logs: list[EventDict], how: str, gone_as: Any
) -> None:
    """However the watch came to its end, and however the new server says that it does not know the old version."""
    server.gone_as = gone_as
    old, new = server.uid, "11111111-2222-4333-8444-555555555555"
    async with running(server) as source:
        await trio.sleep(100)
        assert source.cluster_uid() == old
        if how == "down":
            with server.down():
                await trio.sleep(20)
                assert source.cluster_uid() == old, "nobody has said anything else"
                rebuilt(server, new)
        else:
            with server.holding_events():
                rebuilt(server, new)
                if how == "cut":
                    server.cut()
                else:
                    server.end()
                await trio.lowlevel.checkpoint()
        await within(LONGEST_PAUSE + LEAST_BETWEEN, lambda: source.cluster_uid() == new)
        assert await idle(source) == [7]
        await trio.sleep(HOUR)
        assert len(server.asked("namespace")) == 2
    assert [(each["uid"], each["before"]) for each in told(logs, "kubernetes_cluster_uid")] == [
        (old, "unknown"),
        (new, old),
    ]


@pytest.mark.parametrize("page_size", [2, 500])
async def test_what_the_old_cluster_had_does_not_live_on_in_the_new_one(
    autojump_clock: MockClock, server: FakeServer, logs: list[EventDict], page_size: int
) -> None:
    """The watch goes on as if nothing had been, as the old version is a good one here, too."""
    for number in range(3):
        server.put(SANDBOXENVS, "a", f"old-{number}", **env_body(pool("p1", number)))
    async with running(server, page_size=page_size) as source:
        await trio.sleep(50)
        server.replace_cluster("another")
        server.put(SANDBOXENVS, "a", "new", **env_body(pool("p2", 5)))
        await within(LONGEST_PAUSE + EVIDENCE + 1, lambda: source.cluster_uid() == "another")
        await trio.sleep(SLACK)
        assert source.is_live()
        assert [(record.env_name, record.idle) for record in await source.collect()] == [("new", 5)]
        assert source.troubles() == []
        assert len(server.asked("list")) == 2
        server.put(SANDBOXENVS, "a", "new", **env_body(pool("p2", 6)))
        await trio.sleep(SLACK)
        assert await idle(source) == [6]
        await trio.sleep(60)
        assert len(server.asked("namespace")) == 2


@pytest.mark.usefixtures("logs")
async def test_until_it_is_listed_nothing_is_known_of_the_new_cluster(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    async with running(server) as source:
        await trio.sleep(50)
        failing = server.refuse(503, "list")
        server.replace_cluster("another")
        await within(LONGEST_PAUSE + EVIDENCE + 1, lambda: source.cluster_uid() == "another")
        await trio.sleep(1)
        assert not source.is_live()
        with pytest.raises(KubernetesError, match="nothing is known of its objects"):
            await source.collect()
        failing.end()
        await within(LONGEST_PAUSE, source.is_live)
        assert await idle(source) == []


@pytest.mark.usefixtures("logs")
async def test_a_probe_that_is_refused_is_a_doubt_although_the_watch_goes_on(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """What balances before two servers sends new connections elsewhere, and keeps the old ones."""
    async with running(server) as source:
        await trio.sleep(50)
        server.refuse(403, "probe", times=1)
        server.uid = "another"
        await within(2 * EVIDENCE + LONGEST_PAUSE, lambda: source.cluster_uid() == "another")


@pytest.mark.parametrize("kind", ["list", "page", "watch"])
async def test_whatever_is_under_way_when_another_cluster_is_found_all_is_listed_anew(
    autojump_clock: MockClock, server: FakeServer, logs: list[EventDict], kind: Any
) -> None:
    """Of two namespaces one has found it, while the other one's request is still waited for. What the old one had is
    never told any more, not even for a moment."""
    for number in range(3):
        server.put(SANDBOXENVS, "b", f"old-{number}", **env_body(pool("p1", number)))
    async with running(server, namespaces=("a", "b"), page_size=2) as source:
        await trio.sleep(50)
        hanging = server.fault(kind, namespace="b")
        if kind != "watch":
            server.refuse(410, "watch", namespace="b", times=1)
        server.cut()
        await trio.sleep(2)
        server.replace_cluster("another")
        await within(LEAST_BETWEEN + EVIDENCE + 1, lambda: source.cluster_uid() == "another")
        server.put(SANDBOXENVS, "b", "new", **env_body(pool("p2", 5)))
        hanging.end()
        for _ in range(1200):
            await trio.sleep(0.05)
            assert not [record for record in await source.collect() if record.env_name.startswith("old")]
        assert source.is_live()
        assert [(record.env_name, record.idle) for record in await source.collect()] == [("new", 5)]
        assert source.troubles() == []


@pytest.mark.usefixtures("logs")
async def test_watches_that_break_all_the_time_do_not_make_it_a_habit(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    async with running(server) as source:
        for number in range(500):
            await trio.sleep(1)
            server.put(SANDBOXENVS, "a", "env", **env_body(pool("p1", number)))
            await trio.sleep(SLACK)
            server.cut()
        assert source.cluster_uid() == server.uid
        assert 2 <= len(server.asked("namespace")) <= 600 / LEAST_BETWEEN + 2


# By itself


async def test_a_doubt_that_comes_while_it_is_asked_is_not_lost(autojump_clock: MockClock, server: FakeServer) -> None:
    """The answer under way may be of the server from before."""
    context = source_context(ttl=TTL)
    moves: list[float] = []
    known = ClusterUid(clock=context.clock, random=Random(0), log=context.log, moved=moves.append)
    async with server.connect() as api, trio.open_nursery() as nursery:
        server.latency = 1.0
        nursery.start_soon(known.follow, api, trio.current_time)
        await trio.sleep(0.5)
        known.doubt()
        await trio.sleep(1)
        assert known.uid == server.uid
        server.uid = "another"
        await within(LEAST_BETWEEN + 1, lambda: known.uid == "another")
        assert len(server.asked("namespace")) == 2
        assert moves == [1000]
        nursery.cancel_scope.cancel()


# Answers


@given(st.text("abcXYZ019._:-", min_size=1, max_size=128))
def test_what_hubs_take_is_taken(uid: str) -> None:
    assert uid_in(namespace_body(uid)) == uid


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["Namespace", "kube-system"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "metadata", "name", "uid", "x"]), inner, max_size=4)
    ),
)


@given(
    st.binary()
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.text(max_size=140).map(namespace_body)
    | st.tuples(st.binary(min_size=1, max_size=3), st.integers(0, 250)).map(
        lambda drawn: namespace_body("a-b")[: drawn[1]] + drawn[0] + namespace_body("a-b")[drawn[1] :]
    )
)
def test_anything_else_is_an_error_that_says_so_in_one_line(body: bytes) -> None:
    fault: AnswerError | None = None
    uid = ""
    try:
        uid = uid_in(body)
    except AnswerError as error:
        fault = error
    if fault is not None:
        assert "kube-system" in str(fault)
        assert str(fault).isprintable()
        assert len(str(fault)) < 1000
    else:
        assert 1 <= len(uid) <= 128
        assert set(uid) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")
        # JSON has many ways to write the same, and this is one of them.
        read = json.loads(body.decode(errors="replace"))
        assert (read["kind"], read["metadata"]["name"], read["metadata"]["uid"]) == ("Namespace", "kube-system", uid)

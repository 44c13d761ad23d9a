"""The whole sink in a real agent, on virtual time, against an API server in memory: what stands in the status of envs,
for how long, at what price, and what is said where something is in the way. That no write is forced, empty, too early
or one too many is checked after each of these tests (`mirroring.py`)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
import structlog.testing
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.typing import EventDict
from trio.abc import Instrument
from trio.testing import MockClock

from tests.kubernetes.fake_api import Request, sandboxenvs
from tests.kubernetes.mirroring import (
    IN_FLIGHT,
    MANAGER,
    OWN,
    REPORTS,
    SOON,
    TTL,
    Mirroring,
    StatusServer,
    Writer,
    counts,
    has,
    mirroring,
    told,
    unix,
)
from tests.kubernetes.waiting import within
from tests.simulation import sampled
from trio_federation import Capacity
from trio_federation.testing import sink_context
from trio_federation_kubernetes.options import StatusOptions
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS
from trio_federation_kubernetes.sink import KubernetesStatusSink

pytestmark = pytest.mark.usefixtures("logs")

REFRESH = 60.0
ENV_INTERVAL = 5.0
LEAVE_ALONE = 600.0
#: seconds that a write may take
WRITE_DEADLINE = 10.0
#: the longest pause of one that tries again
LONGEST_PAUSE = 30.0
#: seconds, and up to half as many more, after which an agent that hears of no hub takes over what nobody writes
UNATTENDED = TTL + 2 * REFRESH
MINUTE = 60.0
STRIKES = ("kubernetes_status_disturbed", "kubernetes_status_stopped")
#: what is told where nothing was ever in the way
NOTHING_BUT_THE_START = ["kubernetes_status_writes"]


@pytest.fixture
def server(autojump_clock: MockClock) -> StatusServer:
    """One with one env."""
    autojump_clock.jump(1000)
    server = StatusServer()
    server.make("env")
    return server


class Answer:
    """What the agent says of being the reporter."""

    def __init__(self, value: bool | None) -> None:
        self.value = value

    def __call__(self) -> bool | None:
        return self.value


# --- what stands there -----------------------------------------------------------------------------------------------


async def test_what_others_have_is_shown_and_all_else_stays(server: StatusServer, autojump_clock: MockClock) -> None:
    """With the time at which it was known, and not that of the write; what the controller owns stays its own."""
    before, owners = server.env()["status"], server.managed()
    async with mirroring(server) as mirror:
        await trio.sleep(3.0)
        assert mirror.sent == [], "there is nothing to show"
        known_at = server.server_time()
        mirror.others.have(
            has("east", 3, running=1, desired=4, autoscaling_enabled=True, capacity=5, scaling_group="gpu"),
            has("east", 1, "p2", autoscaling_enabled=True, capacity=-1, saturated_for=50.0, state="Saturated"),
            Capacity("north", "ns", "env", idle=7, running=2, desired=9),
        )
        await within(SOON, lambda: server.summary() is not None)
        entries = server.entries()
        assert entries.pop(OWN) == before["clusters"][0]
        seen = {cluster: entry.pop("lastSnapshotTime") for cluster, entry in entries.items()}
        until = entries["east"]["observedMembers"][1].pop("saturatedUntil")
        # In whole seconds, and by a clock that is known to a second.
        assert all(known_at - 2.0 <= unix(time) <= known_at for time in seen.values())
        assert known_at + 48.0 <= unix(until) <= known_at + 50.0
        zero = {"runningCount": 0, "desiredReplicas": 0, "pendingRequests": 0}
        small = {"name": "p1", "scalingGroup": "gpu", "idleCount": 3, "runningCount": 1, "desiredReplicas": 4}
        assert entries == {
            "east": {
                "clusterID": "east",
                "isLocal": False,
                "observedMembers": [
                    {**small, "pendingRequests": 0, "autoscalingEnabled": True, "scaleUpHeadroom": 5},
                    {"name": "p2", "idleCount": 1, **zero, "autoscalingEnabled": True, "state": "Saturated"},
                ],
            },
            "north": {
                "clusterID": "north",
                "isLocal": False,
                "idleReplicas": 7,
                "runningReplicas": 2,
                "desiredReplicas": 9,
            },
        }
        assert server.summary() == (2, 11)
        assert server.managed() == owners
        assert len(mirror.sent) == 1
        assert mirror.well()


async def test_what_ages_out_goes_without_a_message(server: StatusServer, autojump_clock: MockClock) -> None:
    """When the last that was heard of a cluster is older than the TTL, and no sooner; the others stay."""
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3), has("north", 4))
        await trio.sleep(2 * REPORTS + 0.5)
        ends_at = trio.current_time() - 0.5 + TTL
        mirror.others.fall_silent("east")
        seen = await sampled(ends_at - trio.current_time(), lambda: "east" in server.foreign())
        assert all(seen)
        await within(SOON, lambda: server.foreign() == {"north": {"p1": 4}})
        assert server.summary() == (1, 4)
        await trio.sleep(3 * MINUTE)
        assert server.foreign() == {"north": {"p1": 4}}
        assert mirror.well()


async def test_who_is_last_to_go_leaves_nothing(server: StatusServer, autojump_clock: MockClock) -> None:
    """Neither a summary nor a name in the book of who owns what: the env is as it was."""
    before = server.env()
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3), has("north", 4))
        await trio.sleep(1.0)
        mirror.others.fall_silent("east", "north")
        await trio.sleep(TTL + SOON)
        after = server.env()
        assert after["status"] == before["status"]
        assert after["metadata"]["managedFields"] == before["metadata"]["managedFields"]
        assert len(mirror.sent) == 2
        await trio.sleep(10 * MINUTE)
        assert len(mirror.sent) == 2


async def test_what_is_withdrawn_goes_at_once(server: StatusServer, autojump_clock: MockClock) -> None:
    """A pool of several, then the cluster; within the interval between two writes of one env."""
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3), has("east", 2, "p2"), has("north", 4))
        await trio.sleep(ENV_INTERVAL + 1.0)
        mirror.others.withdraw(has("east", 3))
        await within(SOON, lambda: server.foreign() == {"east": {"p2": 2}, "north": {"p1": 4}})
        mirror.others.withdraw(has("east", 2, "p2"))
        took = await within(ENV_INTERVAL + SOON, lambda: server.foreign() == {"north": {"p1": 4}})
        assert took >= ENV_INTERVAL - SOON, "there was a write just before"
        assert len(mirror.sent) == 3


async def test_the_envs_of_others_are_not_made_here(server: StatusServer, autojump_clock: MockClock) -> None:
    """An env that only other clusters have is none of this one's; nor is one that is in another namespace, until it is
    there."""
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3, env="theirs"), has("east", 3, namespace="elsewhere"))
        await trio.sleep(2 * MINUTE)
        assert mirror.sent == []
        server.make("env", namespace="elsewhere")
        await within(SOON, lambda: server.foreign("env", "elsewhere") == {"east": {"p1": 3}})
        assert server.names(SANDBOXENVS) == {("ns", "env"), ("elsewhere", "env")}


async def test_what_is_not_read_is_not_written(server: StatusServer, autojump_clock: MockClock) -> None:
    """By namespace and by label."""
    server.make("env", "plain", namespace="a")
    server.make("env", namespace="b")
    server.put(SANDBOXENVS, "a", "env", {"shown": "yes"}, status={"clusters": []})
    async with mirroring(server, namespaces=["a", "c"], label_selector="shown=yes") as mirror:
        mirror.others.have(*(has("east", 3, env=env, namespace=where) for env in ("env", "plain") for where in "abc"))
        await trio.sleep(2 * MINUTE)
        assert {sent.key for sent in mirror.sent} == {("a", "env")}
        assert {each.namespace for each in server.asked("list")} == {"a", "c"}


async def test_the_controllers_work_costs_no_write(server: StatusServer, autojump_clock: MockClock) -> None:
    """It counts anew each second, and keeps what it finds: nothing of ours has changed."""
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3))
        await trio.sleep(1.0)
        for number in range(50):
            server.tick(idle=number)
            await trio.sleep(1.0)
        assert len(mirror.sent) == 1
        assert server.foreign() == {"east": {"p1": 3}}
        assert mirror.well()


# --- envs that come and go -------------------------------------------------------------------------------------------


async def test_an_env_that_is_deleted_meanwhile_ends_quietly(
    server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """It is gone, and the event of that is late: the server says so to the write. Nobody is told of any of it, and
    nothing is tried once the event is there."""
    server.make("other")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3), has("east", 3, env="other"))
        await trio.sleep(ENV_INTERVAL + 1.0)
        with server.holding_events():
            server.delete(SANDBOXENVS, "ns", "env")
            mirror.others.have(has("east", 4), has("east", 4, env="other"))
            assert all(await sampled(3 * ENV_INTERVAL, mirror.well))
        assert server.foreign("other") == {"east": {"p1": 4}}
        tried = counts(mirror.sent)
        assert 2 <= tried["env"] <= 5
        await trio.sleep(0.5)
        tried = counts(mirror.sent)
        await trio.sleep(10 * MINUTE)
        assert counts(mirror.sent)["env"] == tried["env"]
        assert mirror.well()
    assert told(logs) == NOTHING_BUT_THE_START
    assert [line for line in logs if line["log_level"] == "warning"] == []


@pytest.mark.parametrize("seen", [True, False])
async def test_an_env_that_is_made_again_is_written_again(
    seen: bool, server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Whether its end was seen, or the new one takes the old one's place in a watch that had broken off."""
    async with mirroring(server) as mirror:
        mirror.reborn.add(("ns", "env"))
        mirror.others.have(has("east", 3))
        await trio.sleep(ENV_INTERVAL + 1.0)
        if not seen:
            server.cut()
            server.compact()
        server.delete(SANDBOXENVS, "ns", "env")
        if seen:
            await trio.sleep(1.0)
        server.make("env")
        await within(LONGEST_PAUSE, lambda: server.foreign() == {"east": {"p1": 3}})
        assert len(mirror.sent) == 2
        assert told(logs) == NOTHING_BUT_THE_START
        assert mirror.well()


# --- how much is written ---------------------------------------------------------------------------------------------


async def test_the_most_changed_is_the_first_under_the_cap(server: StatusServer, autojump_clock: MockClock) -> None:
    """And the others follow by how much they differ, one at a time, at the rate that was asked for."""
    names = [f"env-{number}" for number in range(8)]
    server.make(*names)
    async with mirroring(server, writes_per_second=2.0) as mirror:
        await trio.sleep(1.0)
        change = dict(zip(names, Random(0).sample(range(1, 100), len(names)), strict=True))
        mirror.others.have(*(has("east", idle, env=name) for name, idle in change.items()))
        await trio.sleep(SOON + len(names) / 2.0)
        order = [sent.key[1] for sent in mirror.sent]
        assert order == sorted(names, key=lambda name: -change[name])
        # What has changed most by then is the next, though it has changed last.
        mirror.others.have(*(has("east", change[name] + 1, env=name) for name in names))
        await trio.sleep(SOON)
        mirror.others.have(has("east", change[order[0]] + 50, env=order[0]))
        await trio.sleep(SOON)
        assert order[0] in {sent.key[1] for sent in mirror.sent[len(names) :][:5]}


async def test_a_small_change_waits_no_longer_than_a_refresh_interval(
    server: StatusServer, autojump_clock: MockClock
) -> None:
    """However much goes on elsewhere: at one write in ten seconds, with more to write than that."""
    busy = [f"busy-{number}" for number in range(4)]
    server.make(*busy, "small")
    async with mirroring(server, writes_per_second=0.1) as mirror, trio.open_nursery() as nursery:

        async def work() -> None:
            while True:
                for name in busy:
                    mirror.others.have(has("east", 1000 if round(trio.current_time()) % 2 else 0, env=name))
                await trio.sleep(7.0)

        nursery.start_soon(work)
        await trio.sleep(MINUTE)
        mirror.others.have(has("east", 1, env="small"))
        await within(REFRESH + 10.0 + SOON, lambda: server.foreign("small") == {"east": {"p1": 1}})
        nursery.cancel_scope.cancel()


async def test_what_changes_all_the_time_is_written_once_in_an_interval(
    server: StatusServer, autojump_clock: MockClock
) -> None:
    """Every five seconds, with the newest view."""
    async with mirroring(server) as mirror:
        for number in range(120):
            mirror.others.have(has("east", number))
            await trio.sleep(0.5)
        await trio.sleep(ENV_INTERVAL + SOON)
        assert 11 <= len(mirror.sent) <= 14
        assert server.foreign() == {"east": {"p1": 119}}


async def test_ages_alone_are_written_once_a_minute(server: StatusServer, autojump_clock: MockClock) -> None:
    """In ten minutes ten times; each time the time is that of the last report, and no more than one report old."""
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3), has("north", 4))
        await trio.sleep(1.0)
        began, requests = trio.current_time(), len(server.requests)
        await trio.sleep(10 * MINUTE)
        times = [sent.at for sent in mirror.since(began)]
        assert len(times) == 10
        for sent in mirror.since(began):
            for entry in sent.body["status"]["clusters"]:
                assert sent.at - REPORTS - 2.5 <= unix(entry["lastSnapshotTime"]) - server.wall_offset <= sent.at
        # And the watch and the evidence for it cost their own, which is no more than a request in half a minute.
        assert len(server.requests) - requests <= 10 + 25
        assert mirror.well()


async def test_a_saturation_that_ends_at_the_same_time_is_no_news(
    server: StatusServer, autojump_clock: MockClock
) -> None:
    """It is told as a rest of time, in whole seconds, which is another one at each report."""
    async with mirroring(server) as mirror:
        ends = trio.current_time() + 10 * MINUTE

        def say() -> None:
            rest = math.ceil(ends - trio.current_time())
            mirror.others.have(has("east", 0, saturated_for=float(rest), state="Saturated"))

        for _ in range(40):
            say()
            await trio.sleep(3.3)
        assert len(mirror.sent) == 3
        ends += 2 * MINUTE
        say()
        await trio.sleep(SOON + ENV_INTERVAL)
        assert len(mirror.sent) == 4


class CheapServer(StatusServer):
    """Notes nothing of who owns what, as that takes longer than all the rest where there is much of it."""

    def applied(self, request: Request, told_in: float = 0.0) -> bytes:
        """The object with our entries in place of the last ones."""
        status = json.loads(request.body).get("status", {})

        def put(found: dict[str, Any]) -> None:
            found["clusters"] = [each for each in found["clusters"] if each["isLocal"]] + status.get("clusters", [])

        assert request.namespace is not None
        found = dict(self.get(SANDBOXENVS, request.namespace, request.name))
        found["status"] = json.loads(json.dumps(found["status"]))
        put(found["status"])
        found["metadata"] = {k: v for k, v in found["metadata"].items() if k not in ("resourceVersion", "labels")}
        self.put(SANDBOXENVS, request.namespace, request.name, manager="", **found)
        return json.dumps(self.get(SANDBOXENVS, request.namespace, request.name)).encode()


@pytest.mark.slow
async def test_a_large_steady_fleet_costs_one_write_per_env_and_minute(autojump_clock: MockClock) -> None:
    """500 envs that 20 other clusters have, each of which is heard of every ten seconds; told to the sink alone, as all
    of an agent is not what is looked at."""
    envs, clusters, minutes = 500, 20, 10
    server = CheapServer()
    server.make(*(f"env-{number}" for number in range(envs)))
    sent: list[Any] = []
    sink = KubernetesStatusSink(
        StatusOptions(), sink_context(random=Random(0)), connect=lambda: _Connecting(server, sent)
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(sink.run)
        began = 0.0
        for number in range(minutes * 6 + 6):
            if number == 6:
                assert set(counts(sent).values()) == {1}
                began = trio.current_time()
            # Few objects, as they are read only: one for each cluster and env, with the time of the report.
            await sink.update(_fleet(envs, clusters, trio.current_time()))
            await trio.sleep(REPORTS)
        steady = [each for each in sent if each.at >= began]
        assert set(counts(steady).values()) <= {minutes - 1, minutes}
        last: dict[str, float] = {}
        for each in sent:
            assert each.at - last.get(each.key[1], -math.inf) >= REFRESH - 0.01
            last[each.key[1]] = each.at
        assert max(Counter(int(each.at) for each in sent).values()) <= 21
        assert sink.troubles() == []
        assert len(server.foreign("env-7")) == clusters
        nursery.cancel_scope.cancel()


class _Connecting:
    """What a sink connects by: one `Writer`."""

    def __init__(self, server: StatusServer, sent: list[Any]) -> None:
        self.writer = Writer(server, sent)

    async def __aenter__(self) -> Writer:
        await trio.lowlevel.checkpoint()
        return self.writer

    async def __aexit__(self, *_: object) -> None:
        await trio.lowlevel.checkpoint()


def _fleet(envs: int, clusters: int, now: float) -> list[Capacity]:
    return [
        Capacity(f"c-{cluster:02}", "ns", f"env-{number}", "p1", idle=3, observed_at=now)
        for cluster in range(clusters)
        for number in range(envs)
    ]


# --- a server that says no, or nothing -------------------------------------------------------------------------------


async def test_a_server_that_is_gone_for_a_minute(
    server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Afterwards every env has the newest view, written once, and at no more than the usual rate (which is checked of
    all tests); what lay between is never written."""
    names = [f"env-{number}" for number in range(60)]
    server.make(*names)
    async with mirroring(server) as mirror:
        mirror.others.have(*(has("east", 0, env=name) for name in names))
        await trio.sleep(10.0)
        assert len(mirror.sent) == len(names)
        gone_at = trio.current_time()
        with server.down():
            for number in range(1, 7):
                mirror.others.have(*(has("east", number, env=name) for name in names))
                await trio.sleep(10.0)
            assert mirror.troubles() == {("unreachable", ""): 1.0}
            assert mirror.shown()["state"] == "partly"
            assert len(mirror.since(gone_at)) <= 9
        back_at = trio.current_time()
        await within(LONGEST_PAUSE + 10.0, lambda: all(server.foreign(name) == {"east": {"p1": 6}} for name in names))
        await trio.sleep(SOON)
        assert mirror.well()
        assert {sent.body["status"]["federation"]["idleReplicas"] for sent in mirror.since(back_at)} == {6}
        assert counts(mirror.since(back_at)) == dict.fromkeys(names, 1)
    assert [line for line in told(logs) if line != "kubernetes_status_writes"] == ["sink_trouble", "sink_works"]


async def test_without_the_right_it_says_so_and_all_else_goes_on(
    server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """In one of two namespaces it may not write. That is told once, with what to grant, and tried again ever less; once
    it may, everything is written."""
    names = [f"env-{number}" for number in range(5)]
    for namespace in ("may", "may-not"):
        server.make(*names, namespace=namespace)
    fault = server.refuse(403, "apply", namespace="may-not")
    async with mirroring(server) as mirror:
        mirror.others.have(
            *(has("east", 3, env=name, namespace=where) for name in names for where in ("may", "may-not"))
        )
        await trio.sleep(SOON)
        assert all(server.foreign(name, "may") == {"east": {"p1": 3}} for name in names)
        await trio.sleep(SOON)
        assert mirror.troubles() == {("forbidden", ""): 1.0}
        text = mirror.shown()["last_error"]["text"]
        assert "may-not" in text
        assert "patch on sandboxenvs/status" in text
        await trio.sleep(10 * MINUTE)
        refused = [sent.at for sent in mirror.sent if sent.key[0] == "may-not"]
        assert 20 <= len(refused) <= 50
        assert counts([sent for sent in mirror.sent if sent.key[0] == "may"]) == dict.fromkeys(names, 11)
        fault.end()
        await within(LONGEST_PAUSE + SOON, lambda: all(server.foreign(name, "may-not") != {} for name in names))
        await trio.sleep(SOON)
        assert mirror.well()
    assert told(logs)[1:] == ["sink_trouble", "sink_works"]


async def test_an_edit_that_came_in_between_is_no_conflict(
    server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """A refusal that names no field says so: the same is tried again soon, and nobody is told."""
    server.refuse(409, "apply", times=3, message="the object has been modified; please apply your changes")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3))
        await within(3 * ENV_INTERVAL + SOON, lambda: server.foreign() == {"east": {"p1": 3}})
        assert len(mirror.sent) == 4
        assert mirror.well()
    assert told(logs) == NOTHING_BUT_THE_START


async def test_a_server_that_asks_to_wait_is_waited_for(server: StatusServer, autojump_clock: MockClock) -> None:
    """By everybody, and for as long as it says; then one asks, and the others follow."""
    names = [f"env-{number}" for number in range(20)]
    server.make(*names)
    server.refuse(429, "apply", times=IN_FLIGHT, retry_after=20.0)
    async with mirroring(server) as mirror:
        mirror.others.have(*(has("east", 3, env=name) for name in names))
        await trio.sleep(SOON + 1.0)
        tried = len(mirror.sent)
        assert tried <= IN_FLIGHT
        assert mirror.troubles() == {("throttled", ""): 1.0}
        began = mirror.sent[-1].at
        await trio.sleep(16.0)
        assert len(mirror.sent) == tried
        await within(2 * 20.0 * IN_FLIGHT, lambda: all(server.foreign(name) != {} for name in names))
        assert mirror.sent[tried].at - began >= 20.0 - 0.1
        await trio.sleep(SOON)
        assert mirror.well()


async def test_an_overloaded_server_is_asked_less_and_less(server: StatusServer, autojump_clock: MockClock) -> None:
    """Whatever there is to write."""
    names = [f"env-{number}" for number in range(50)]
    server.make(*names)
    server.refuse(503, "apply")
    async with mirroring(server) as mirror:
        mirror.others.have(*(has("east", 3, env=name) for name in names))
        await trio.sleep(10 * MINUTE)
        assert 20 <= len(mirror.sent) <= IN_FLIGHT + 50
        late = mirror.since(trio.current_time() - 5 * MINUTE)
        assert len(late) <= 5 * MINUTE / (LONGEST_PAUSE / 2) + 1


def _all_show(server: StatusServer, names: Sequence[str], expected: dict[str, dict[str, int]]) -> bool:
    return all(server.foreign(name) == expected for name in names)


@pytest.mark.parametrize("code", [500, 400, 422])
async def test_one_env_that_is_refused_costs_the_others_nothing(
    code: int, server: StatusServer, autojump_clock: MockClock
) -> None:
    """It is tried again ever less, whatever the server says of it, and the others change meanwhile."""
    names = [f"env-{number}" for number in range(10)]
    server.make(*names, "bad")
    fault = server.refuse(code, "apply", name="bad", message="something about this one")
    async with mirroring(server) as mirror:
        for number in range(60):
            mirror.others.have(*(has("east", number, env=name) for name in [*names, "bad"]))
            expected = {"east": {"p1": number}}
            took = await within(10.0, partial(_all_show, server, names, expected))
            await trio.sleep(10.0 - took)
        assert 5 <= counts(mirror.sent)["bad"] <= 50
        assert mirror.troubles() == {("refused", ""): 1.0}
        text = mirror.shown()["last_error"]["text"]
        assert "ns/bad" in text
        assert "something about this one" in text
        fault.end()
        await within(LEAVE_ALONE, lambda: server.foreign("bad") == {"east": {"p1": 59}})
        await trio.sleep(SOON)
        assert mirror.well()


@pytest.mark.parametrize("done", [True, False])
async def test_a_write_that_hangs_is_given_up_and_others_are_served(
    done: bool, server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """A write that gets no answer is cancelled at its deadline. While it hangs, others are written; and as nobody knows
    whether it was done, what is found afterwards is nobody's fault."""
    server.make("hangs", "other")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 2, env="hangs"))
        await trio.sleep(ENV_INTERVAL + SOON)
        server.fault("apply", name="hangs", times=1, done=done)
        mirror.others.have(has("east", 3, env="hangs"), has("east", 3, env="other"))
        await within(SOON, lambda: server.foreign("other") == {"east": {"p1": 3}})
        mirror.others.have(has("east", 4, env="hangs"), has("east", 4, env="other"))
        await within(ENV_INTERVAL + SOON, lambda: server.foreign("other") == {"east": {"p1": 4}})
        _, hanging = [sent for sent in mirror.sent if sent.key[1] == "hangs"]
        assert hanging.ended is None
        await trio.sleep(WRITE_DEADLINE)
        assert hanging.ended == pytest.approx(hanging.at + WRITE_DEADLINE)
        await within(2.0, lambda: server.foreign("hangs") == {"east": {"p1": 4}})
        await trio.sleep(SOON)
        assert mirror.well()
    assert "kubernetes_status_disturbed" not in told(logs)


async def test_answers_that_are_lost_are_nobodys_fault(
    server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Each write is done, and its answer does not arrive: what is found is ours, and the newest view is there when the
    answers are."""
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 0))
        await trio.sleep(SOON)
        fault = server.vanish("apply", done=True)
        for number in range(1, 7):
            mirror.others.have(has("east", number))
            await trio.sleep(10.0)
        fault.end()
        await within(LONGEST_PAUSE + SOON, lambda: server.foreign() == {"east": {"p1": 6}})
        await trio.sleep(2 * MINUTE)
        assert mirror.well()
    assert [line for line in told(logs) if line.startswith("kubernetes_status")] == NOTHING_BUT_THE_START


async def test_a_slow_server_has_a_few_writes_at_a_time(autojump_clock: MockClock) -> None:
    """As many as are allowed (that there are no more is checked of all tests), whatever waits."""
    names = [f"env-{number}" for number in range(20)]
    server = StatusServer(latency=2.0)
    server.make(*names)
    async with mirroring(server) as mirror:
        mirror.others.have(*(has("east", 3, env=name) for name in names))
        await within(30.0, lambda: all(server.foreign(name) != {} for name in names))
        assert mirror.most_under_way() == IN_FLIGHT
        assert counts(mirror.sent) == dict.fromkeys(names, 1)
        await trio.sleep(3.0)
        assert mirror.well()


async def test_a_black_hole_is_left_within_the_deadlines(server: StatusServer, autojump_clock: MockClock) -> None:
    """Nothing comes any more, for writes, watch and lists; then all does again."""
    server.make("other")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3), has("east", 3, env="other"))
        await trio.sleep(2.0)
        server.black_hole = True
        mirror.others.have(has("east", 4), has("east", 4, env="other"))
        await trio.sleep(5 * MINUTE)
        assert all(sent.ended is None or sent.ended - sent.at <= WRITE_DEADLINE + 0.1 for sent in mirror.sent)
        assert 4 <= len(mirror.sent) <= 20
        assert mirror.troubles() == {("unreachable", ""): 1.0}
        server.black_hole = False
        await within(LONGEST_PAUSE + WRITE_DEADLINE + SOON, lambda: server.foreign() == {"east": {"p1": 4}})
        await trio.sleep(MINUTE)
        assert server.foreign("other") == {"east": {"p1": 4}}
        assert mirror.well()


# --- a restart in the middle -----------------------------------------------------------------------------------------


async def test_a_restart_in_the_middle_writes_nothing_twice(server: StatusServer, autojump_clock: MockClock) -> None:
    """Half of the envs were written; the next process writes the other half, and knows the first by what it finds."""
    names = [f"env-{number}" for number in range(10)]
    server.make(*names)
    view = [has("east", 3, env=name) for name in names]
    async with mirroring(server, writes_per_second=1.0) as first:
        first.others.have(*view)
        await within(10.0, lambda: len(first.sent) == 5 and first.sent[-1].done)
    async with mirroring(server, writes_per_second=1.0) as second:
        await trio.sleep(3.0)
        assert second.sent == []
        second.others.have(*view)
        await trio.sleep(20.0)
        assert all(server.foreign(name) == {"east": {"p1": 3}} for name in names)
        assert counts([*first.sent, *second.sent]) == dict.fromkeys(names, 1)
        await trio.sleep(REFRESH + 10.0)
        assert counts([*first.sent, *second.sent]) == dict.fromkeys(names, 2)


async def test_a_restart_takes_nothing_away_before_the_ttl(server: StatusServer, autojump_clock: MockClock) -> None:
    """What was there may rest on words that are still on their way. What has come is shown at once all the same; what
    has not by then goes."""
    async with mirroring(server) as first:
        first.others.have(has("east", 3), has("north", 4))
        await trio.sleep(SOON)
    async with mirroring(server) as second:
        began = trio.current_time()
        await trio.sleep(5.0)
        second.others.have(has("east", 3), has("south", 5))
        seen = await sampled(TTL - 5.0 - 0.1, server.foreign)
        assert all("north" in each for each in seen)
        await within(began + TTL + SOON - trio.current_time(), lambda: "north" not in server.foreign())
        assert server.foreign() == {"east": {"p1": 3}, "south": {"p1": 5}}
        assert second.well()


async def test_a_restart_that_hears_of_nobody_lets_go_after_the_ttl(
    server: StatusServer, autojump_clock: MockClock
) -> None:
    """Nobody has to say so."""
    before = server.env()["status"]
    async with mirroring(server) as first:
        first.others.have(has("east", 3))
        await trio.sleep(SOON)
    async with mirroring(server) as second:
        assert all(await sampled(TTL - 0.1, lambda: server.foreign() != {}))
        await within(SOON, lambda: server.foreign() == {})
        assert server.env()["status"] == before
        await trio.sleep(10 * MINUTE)
        assert len(second.sent) == 1


# --- rivals ----------------------------------------------------------------------------------------------------------


class Rival:
    """Somebody who writes to the env every ten seconds."""

    def __init__(self, server: StatusServer, strike: Callable[[StatusServer, int], object]) -> None:
        self._server = server
        self._strike = strike
        self.strikes = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(10.0)
            self.strikes += 1
            # What somebody is refused is their own trouble.
            with suppress(Exception):
                self._strike(self._server, self.strikes)


def _own_list(server: StatusServer, _: int) -> None:
    """The controller puts back the list as it knows it, which has not changed."""
    server.replace_list()


def _own_count(server: StatusServer, number: int) -> None:
    """An operator's script, with a count of its own."""
    server.replace_list(manager="ops", idle=number)


def _old_copy(server: StatusServer, number: int) -> None:
    """A script writes back what it has once read, with one of our counts changed."""
    copied = json.loads(json.dumps(server.entries().get("east", {"clusterID": "east", "isLocal": False})))
    copied["observedMembers"] = [{"name": "p1", "idleCount": 1000 + number}]
    server.replace_list(copied, manager="ops")


@pytest.mark.parametrize(
    "strike, party", [(_own_list, "controller"), (_own_count, "ops")], ids=["same list", "other count"]
)
async def test_a_rival_that_replaces_the_list_is_left_alone_for_ten_minutes_and_named(
    strike: Callable[[StatusServer, int], object],
    party: str,
    server: StatusServer,
    autojump_clock: MockClock,
    logs: list[EventDict],
) -> None:
    """Each time: what was taken once is written again, what is taken twice within a minute is let go of; so in half an
    hour it is three times three writes, and no more."""
    rival = Rival(server, strike)
    async with mirroring(server) as mirror, trio.open_nursery() as nursery:
        mirror.others.have(has("east", 3))
        began = trio.current_time()
        nursery.start_soon(rival.run)
        await trio.sleep(25.0)
        assert mirror.troubles() == {("contested", party): 1.0}
        text = mirror.shown()["last_error"]["text"]
        assert "ns/env" in text
        assert party in text
        assert server.foreign() == {}
        assert server.managed(MANAGER) == []
        await trio.sleep(30 * MINUTE - 25.0 - 1.0)
        times = [round(sent.at - began) for sent in mirror.sent]
        assert times == [0, 10, 20, 620, 630, 640, 1240, 1250, 1260]
        (stop, *_) = [line for line in logs if line["event"] == "kubernetes_status_stopped"]
        assert (stop["env"], stop["manager"], stop["entries"], stop["again_in"]) == ("ns/env", party, ["east"], 600.0)
        nursery.cancel_scope.cancel()
        # It is gone. What is known by then is shown when the ten minutes are over.
        mirror.others.have(has("east", 8))
        await trio.sleep(began + 1260.0 + LEAVE_ALONE - trio.current_time() - 1.0)
        assert server.foreign() == {}
        await within(2.0 + SOON, lambda: server.foreign() == {"east": {"p1": 8}})
        await trio.sleep(SOON)
        assert mirror.well()
    assert Counter(told(logs))["kubernetes_status_stopped"] == 3
    assert Counter(told(logs))["kubernetes_status_disturbed"] == 3


async def test_a_rival_of_one_env_costs_no_other(server: StatusServer, autojump_clock: MockClock) -> None:
    """The rest of the fleet is shown as ever."""
    server.make("other")
    async with mirroring(server) as mirror, trio.open_nursery() as nursery:
        nursery.start_soon(Rival(server, _own_list).run)
        for number in range(20):
            mirror.others.have(has("east", number), has("east", number, env="other"))
            await trio.sleep(10.0)
            assert server.foreign("other") == {"east": {"p1": number}}
        assert mirror.troubles() == {("contested", "controller"): 1.0}
        nursery.cancel_scope.cancel()


async def test_who_strikes_once_costs_one_write(
    server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """And so does the next one, more than a minute later: nothing stops."""
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3))
        await trio.sleep(10.0)
        for _ in range(3):
            before = len(mirror.sent)
            server.replace_list()
            assert server.foreign() == {}
            await within(ENV_INTERVAL, lambda: server.foreign() == {"east": {"p1": 3}})
            assert len(mirror.sent) == before + 1
            await trio.sleep(MINUTE + 1.0)
        assert mirror.well()
    assert Counter(told(logs)) == {"kubernetes_status_writes": 1, "kubernetes_status_disturbed": 3}


def _forced(server: StatusServer, number: int) -> None:
    """Somebody applies an entry of the same cluster with counts of its own, and takes it over by force."""
    entry = {"clusterID": "east", "isLocal": False, "observedMembers": [{"name": "p1", "idleCount": 1000 + number}]}
    server.apply_as(SANDBOXENVS, "ns", "env", {"status": {"clusters": [entry]}}, "ops", force=True)


@pytest.mark.parametrize(
    "strike, times",
    [(_forced, [0, 10, 15, 620, 1220]), (_old_copy, [0, 10, 15, 630, 1230])],
    ids=["forced apply", "old copy"],
)
async def test_a_rival_that_takes_an_entry_over_keeps_it(
    strike: Callable[[StatusServer, int], object],
    times: list[int],
    server: StatusServer,
    autojump_clock: MockClock,
    logs: list[EventDict],
) -> None:
    """We ask for it once, are told whose it is, and let go of it; and ask once more every ten minutes. Never by force,
    and never twice. As it goes on, it is also one who changes what was ours."""
    rival = Rival(server, strike)
    async with mirroring(server) as mirror, trio.open_nursery() as nursery:
        mirror.others.have(has("east", 3))
        began = trio.current_time()
        nursery.start_soon(rival.run)
        await trio.sleep(12.0)
        assert mirror.troubles() == {("conflict", "ops"): 1.0}
        text = mirror.shown()["last_error"]["text"]
        assert "east in ns/env" in text
        assert "ops" in text
        await trio.sleep(25.0)
        assert mirror.troubles() == {("conflict", "ops"): 1.0, ("contested", "ops"): 1.0}
        await trio.sleep(began + 30 * MINUTE - trio.current_time() - 1.0)
        assert [round(sent.at - began) for sent in mirror.sent] == times
        assert mirror.troubles() == {("conflict", "ops"): 1.0}
        assert server.foreign()["east"]["p1"] == 1000 + rival.strikes
        conflicts = [line for line in logs if line["event"] == "kubernetes_status_conflict"]
        assert len(conflicts) == 3
        for line in conflicts:
            assert (line["env"], line["owner"], line["again_in"]) == ("ns/env", "ops", 600.0)
            assert line["field"] == '.status.clusters[clusterID="east"].observedMembers[name="p1"].idleCount'
        nursery.cancel_scope.cancel()


async def test_an_entry_of_somebody_elses_is_theirs_until_they_let_go(
    server: StatusServer, autojump_clock: MockClock
) -> None:
    """They were first. Ours of other clusters stand beside it; when theirs is gone, ours takes its place."""
    entry = {"clusterID": "south", "isLocal": False, "observedMembers": [{"name": "p1", "idleCount": 70}]}
    server.apply_as(SANDBOXENVS, "ns", "env", {"status": {"clusters": [entry]}}, "ops")
    owners = server.managed("ops")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3), has("south", 5))
        await trio.sleep(10 * MINUTE)
        assert server.foreign() == {"east": {"p1": 3}, "south": {"p1": 70}}
        assert server.managed("ops") == owners
        assert mirror.troubles() == {("conflict", "ops"): 1.0}
        assert all(sent.clusters == ["east"] for sent in mirror.sent)
        server.apply_as(SANDBOXENVS, "ns", "env", {}, "ops")
        await within(LEAVE_ALONE + SOON, lambda: server.foreign() == {"east": {"p1": 3}, "south": {"p1": 5}})
        await trio.sleep(SOON)
        assert mirror.well()


async def test_a_summary_that_is_somebody_elses_costs_the_entries_nothing(
    server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """It is left out, and asked for again after ten minutes."""
    theirs = {"clusters": 9, "idleReplicas": 99}
    server.merge_patch(SANDBOXENVS, "ns", "env", {"status": {"federation": theirs}}, "ops")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3))
        await within(SOON + ENV_INTERVAL, lambda: server.foreign() == {"east": {"p1": 3}})
        assert server.summary() == (9, 99)
        await trio.sleep(9 * MINUTE)
        conflicts = [line for line in logs if line["event"] == "kubernetes_status_conflict"]
        assert {line["field"] for line in conflicts} == {
            ".status.federation.clusters",
            ".status.federation.idleReplicas",
        }
        assert len(conflicts) == 2
        server.merge_patch(SANDBOXENVS, "ns", "env", {"status": {"federation": None}}, "ops")
        await within(3 * MINUTE, lambda: server.summary() == (1, 3))


# --- who writes ------------------------------------------------------------------------------------------------------


async def test_who_is_not_the_reporter_never_writes(
    server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """For an hour, whatever changes."""
    async with mirroring(server, is_reporter=Answer(False)) as mirror:
        for number in range(60):
            mirror.others.have(has("east", number))
            await trio.sleep(MINUTE)
        assert mirror.sent == []
        # It stands by, and nobody else writes: that is worth a word.
        assert mirror.troubles() == {("unattended", ""): 1.0}
    assert told(logs) == ["sink_trouble"]


async def test_a_reporter_that_hears_of_no_hub_any_more_goes_on(
    server: StatusServer, autojump_clock: MockClock
) -> None:
    """Nobody else is known to write."""
    is_reporter = Answer(True)
    async with mirroring(server, is_reporter=is_reporter) as mirror:
        mirror.others.have(has("east", 3))
        await trio.sleep(5.0)
        is_reporter.value = None
        for number in range(20):
            mirror.others.have(has("east", number))
            await trio.sleep(MINUTE)
            assert server.foreign() == {"east": {"p1": number}}


async def test_who_has_never_heard_of_a_hub_takes_over_what_nobody_keeps_up(
    server: StatusServer, autojump_clock: MockClock
) -> None:
    """Not before a reporter would have written, if there were one; else entries would stand for ever."""
    async with mirroring(server) as first:
        first.others.have(has("east", 3))
        await trio.sleep(SOON)
    async with mirroring(server, is_reporter=Answer(None)) as second:
        began = trio.current_time()
        assert all(await sampled(UNATTENDED - 1.0, lambda: second.sent == []))
        await within(UNATTENDED / 2 + 2.0, lambda: server.foreign() == {})
        assert trio.current_time() - began >= UNATTENDED


async def test_who_has_never_heard_of_a_hub_leaves_alone_what_another_keeps_up(
    server: StatusServer, autojump_clock: MockClock
) -> None:
    """One is the reporter and writes, the other does not know what it is and does not, for half an hour, though it has
    another view; both are content."""
    async with mirroring(server) as reporter, mirroring(server, is_reporter=Answer(None), seed=1) as other:
        reporter.others.have(has("east", 3))
        other.others.have(has("east", 2), has("north", 1))
        await trio.sleep(30 * MINUTE)
        assert server.foreign() == {"east": {"p1": 3}}
        assert other.sent == []
        assert reporter.well()
        assert other.well()
        reporter.others.fall_silent("east")
        reporter.scope.cancel()
        await within(
            1.5 * UNATTENDED + REFRESH + SOON, lambda: server.foreign() == {"east": {"p1": 2}, "north": {"p1": 1}}
        )


async def test_who_does_not_know_yields_to_another_that_writes(
    server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """It was the reporter, and has lost its hub; now another agent writes, under the same name. That is no rival."""
    is_reporter = Answer(True)
    async with mirroring(server, is_reporter=is_reporter) as first:
        first.others.have(has("east", 3))
        await trio.sleep(5.0)
        is_reporter.value = None
        await trio.sleep(5.0)
        async with mirroring(server, seed=1) as second:
            second.others.have(has("east", 9))
            await within(SOON, lambda: server.foreign() == {"east": {"p1": 9}})
            began = trio.current_time()
            await trio.sleep(20 * MINUTE)
            assert first.since(began) == []
            assert server.foreign() == {"east": {"p1": 9}}
            assert first.well()
            assert second.well()
    assert "kubernetes_status_stopped" not in told(logs)
    assert told(logs)[-1] == "kubernetes_status_stands_by"


@pytest.mark.parametrize("later", [0.0, 2.5])
async def test_two_that_both_believe_to_be_the_reporter_do_not_go_on_for_ever(
    later: float, server: StatusServer, autojump_clock: MockClock
) -> None:
    """Each has a hub of its own that says so, and views that differ. It costs no more than a rival does, and is seen.
    `later`: seconds between their first writes."""
    async with mirroring(server) as one, mirroring(server, seed=1) as other:
        one.others.have(has("east", 3))
        await trio.sleep(later)
        other.others.have(has("east", 9))
        await trio.sleep(30 * MINUTE)
        assert len(one.sent) + len(other.sent) <= 6 * 4
        assert {reason for mirror in (one, other) for reason, _ in mirror.troubles()} == {"contested"}


def _as_us(server: StatusServer, number: int) -> None:
    """Another agent of the same cluster writes what it knows."""
    entry = {"clusterID": "east", "isLocal": False, "lastSnapshotTime": server.stamp()}
    entry["observedMembers"] = [{"name": "p1", "idleCount": 1000 + number}]
    server.apply_as(SANDBOXENVS, "ns", "env", {"status": {"clusters": [entry]}}, MANAGER)


@pytest.mark.parametrize("later", [0.3, 5.0])
async def test_another_agent_that_writes_as_us_is_named_as_such(
    later: float, server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """And not the controller, which has done nothing. `later`: seconds after our write; servers note when a manager has
    written in whole seconds only."""
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3))
        for number in range(2):
            await within(ENV_INTERVAL + SOON, lambda: server.foreign() == {"east": {"p1": 3}}, step=0.01)
            await trio.sleep(mirror.sent[-1].at + later - trio.current_time())
            _as_us(server, number)
        await trio.sleep(SOON)
        assert mirror.troubles() == {("contested", MANAGER): 1.0}
        assert "one agent alone" in mirror.shown()["last_error"]["text"]
    seen = [line["manager"] for line in logs if line["event"] in STRIKES]
    assert seen == [f"{MANAGER}, as another agent"] * 2


async def test_a_standby_takes_over(server: StatusServer, autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """It has followed all the while, so it writes at once what is different, and nothing else."""
    server.make("same")
    first_is, second_is = Answer(True), Answer(False)
    async with (
        mirroring(server, is_reporter=first_is) as first,
        mirroring(server, is_reporter=second_is, seed=1) as second,
    ):
        for mirror in (first, second):
            mirror.others.have(has("east", 3), has("east", 3, env="same"))
        await trio.sleep(MINUTE + 30.0)
        assert second.sent == []
        assert second.well()
        second.others.have(has("east", 4))
        first_is.value = None
        await trio.sleep(1.0)
        first_is.value, second_is.value = False, True
        await within(SOON, lambda: server.foreign() == {"east": {"p1": 4}})
        handed_over = trio.current_time()
        assert counts(second.sent) == {"env": 1}
        await trio.sleep(10 * MINUTE)
        assert first.since(handed_over) == []
        assert first.well()
        assert second.well()
    assert Counter(told(logs)) == {"kubernetes_status_writes": 2, "kubernetes_status_stands_by": 1}


# --- schemas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"keyed": False}, {"subresource": False}], ids=["no keys", "no subresource"])
async def test_nothing_is_written_before_the_schema_is_good(
    change: dict[str, bool], autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """It is named from the start, and once it is mended all is well."""
    server = StatusServer(sandboxenvs(**change))
    server.make("env")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3))
        await trio.sleep(SOON)
        assert mirror.troubles() == {("schema", ""): 1.0}
        await trio.sleep(10 * MINUTE)
        assert mirror.sent == []
        server.define(sandboxenvs())
        await within(15.0 + SOON, lambda: server.foreign() == {"east": {"p1": 3}})
        await trio.sleep(SOON)
        assert mirror.well()
    assert [line for line in told(logs) if line != "kubernetes_status_writes"] == ["sink_trouble", "sink_works"]


async def test_a_schema_without_the_summary_is_written_without_it(autojump_clock: MockClock) -> None:
    """The field is left out where nobody has described it."""
    server = StatusServer(sandboxenvs(federation=False))
    server.make("env")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3))
        await within(SOON, lambda: server.foreign() == {"east": {"p1": 3}})
        await trio.sleep(10 * MINUTE)
        assert len(mirror.sent) == 11
        assert mirror.well()


async def test_a_definition_that_is_not_there_yet(autojump_clock: MockClock) -> None:
    """It says what to install; when that is done, it writes."""
    server = StatusServer()
    server.openapi.clear()
    server.uninstall(SANDBOXENVS)
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3))
        await trio.sleep(5 * MINUTE)
        assert mirror.troubles() != {}
        assert mirror.sent == []
        server.install(SANDBOXENVS)
        server.define(sandboxenvs())
        server.make("env")
        await within(2 * LONGEST_PAUSE, lambda: server.foreign() == {"east": {"p1": 3}})
        await trio.sleep(SOON)
        assert mirror.well()


# --- the end ---------------------------------------------------------------------------------------------------------


class _CancelAfter(Instrument):
    """Cancels a scope after so many steps of tasks."""

    def __init__(self, steps: int, scope: trio.CancelScope) -> None:
        self._steps = steps
        self._scope = scope
        self.seen = 0
        self.cancelled_at = math.inf

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """One more."""
        self.seen += 1
        if self.seen == self._steps:
            self.cancelled_at = trio.current_time()
            self._scope.cancel()


async def _a_life(steps: int) -> int:
    """A sink alone, through a start, writes, a rival, an answer that is lost and a break; ended after so many steps.
    Returns how many it had."""
    server = StatusServer()
    server.make("env", "other", "hangs")
    server.fault("apply", name="hangs", done=True)
    sent: list[Any] = []
    writers: list[Writer] = []

    def connect() -> _Connecting:
        connecting = _Connecting(server, sent)
        writers.append(connecting.writer)
        return connecting

    sink = KubernetesStatusSink(StatusOptions(), sink_context(random=Random(0)), connect=connect)
    ended_at = math.inf

    async def run() -> None:
        nonlocal ended_at
        with scope:
            await sink.run()
        ended_at = trio.current_time()

    scope = trio.CancelScope()
    instrument = _CancelAfter(steps, scope)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        trio.lowlevel.add_instrument(instrument)
        for number in range(16):
            await sink.update([has("east", number, env=env, observed_at=0.0) for env in ("env", "other", "hangs")])
            await trio.sleep(1.0)
            if ended_at < math.inf:
                break
            if number == 3:
                server.replace_list()
            if number == 6:
                server.cut()
            if number == 12:
                server.delete(SANDBOXENVS, "ns", "other")
        scope.cancel()
    trio.lowlevel.remove_instrument(instrument)
    assert ended_at == min(instrument.cancelled_at, trio.current_time())
    assert all(each.ended is not None for each in sent)
    assert all(writer.open_watches == 0 for writer in writers)
    assert server.watches == []
    return instrument.seen


@pytest.mark.slow
async def test_its_end_may_come_at_any_step(autojump_clock: MockClock) -> None:
    """It ends at once, however far it has come, and leaves nothing open or under way."""
    steps = await _a_life(-1)
    assert steps > 100
    for last in range(1, steps):
        await _a_life(last)


# --- all of it together ----------------------------------------------------------------------------------------------

NAMES = ("env", "other")
CLUSTERS = ("east", "north", "south")
#: what may happen; the first is what goes on most
WHAT = ["have"] * 3 + ["withdraw", "silence", "tick", "replace", "delete", "make", "restart", "cut", "compact"]
WHAT += ["refuse", "hang", "lose", "works"]
#: one thing that happens, and how many seconds pass then
Step = tuple[str, int, float]


async def _live_through(steps: list[Step]) -> None:
    """Things happen one after the other; then all is well for long enough, and the view has to be true."""
    server = StatusServer(latency=0.02)
    server.make(*NAMES)
    known: dict[tuple[str, str], Capacity] = {}
    lives: list[Mirroring] = []
    fault = None
    async with trio.open_nursery() as nursery:

        async def restart() -> Mirroring:
            mirror = Mirroring(server, seed=len(lives))
            for name in NAMES:
                mirror.reborn.add(("ns", name))
            await nursery.start(mirror.run)
            nursery.start_soon(mirror.others.keep_telling)
            lives.append(mirror)
            return mirror

        mirror = await restart()
        for what, number, seconds in steps:
            name, cluster = NAMES[number % 2], CLUSTERS[number % 3]
            there = ("ns", name) in server.names(SANDBOXENVS)
            if fault is not None and what in ("works", "refuse", "hang", "lose"):
                fault.end()
                fault = None
            if what == "have":
                known[name, cluster] = has(cluster, number, env=name)
                mirror.others.have(known[name, cluster])
            elif what == "withdraw" and (record := known.pop((name, cluster), None)) is not None:
                mirror.others.withdraw(record)
            elif what == "silence":
                mirror.others.fall_silent(cluster)
                known = {key: record for key, record in known.items() if key[1] != cluster}
            elif what == "tick" and there:
                server.tick(name, idle=number)
            elif what == "replace" and there:
                server.replace_list(name=name)
            elif what == "delete" and there:
                server.delete(SANDBOXENVS, "ns", name)
            elif what == "make" and not there:
                server.make(name)
            elif what == "restart":
                mirror.scope.cancel()
                await mirror.agent.ended.wait()
                mirror = await restart()
                mirror.others.have(*known.values())
            elif what == "cut":
                server.cut()
            elif what == "compact":
                server.compact()
                server.end()
            elif what == "refuse":
                fault = server.refuse((403, 409, 422, 429, 500, 503)[number % 6], "apply")
            elif what == "hang":
                fault = server.hang("apply", done=number % 2 == 0)
            elif what == "lose":
                fault = server.vanish("apply", done=number % 2 == 0)
            await trio.sleep(seconds)
        if fault is not None:
            fault.end()
        # The longest that anything is put off for is that somebody else has disturbed us twice.
        await trio.sleep(LEAVE_ALONE + LONGEST_PAUSE + TTL + 5.0)
        for name in NAMES:
            if ("ns", name) not in server.names(SANDBOXENVS):
                continue
            expected = {cluster: {"p1": record.idle} for (env, cluster), record in known.items() if env == name}
            assert server.foreign(name) == expected, name
            idle = sum(sum(pools.values()) for pools in expected.values())
            assert server.summary(name) == ((len(expected), idle) if expected else None)
            assert (server.managed(MANAGER, name=name) == []) is (not expected)
        assert mirror.sink.troubles() == []
        nursery.cancel_scope.cancel()
    for each in lives:
        each.check()


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(WHAT),
            st.integers(0, 29),
            st.sampled_from([0.0, 0.01, 0.025, 0.3, 1.0, 3.0, 12.0, 40.0]),
        ),
        max_size=25,
    )
)
def test_whatever_happens_the_view_is_true_in_the_end(steps: list[Step]) -> None:
    """Every env that is there shows what is known, all of it and nothing else, with a summary that agrees; of an env
    of which nothing is known, nothing is owned. Nothing is in the way any more."""
    with structlog.testing.capture_logs():
        trio.run(_live_through, steps, clock=MockClock(autojump_threshold=0))

"""The sink "kubernetes-status" writes to a real API server that is well: what stands in the envs, who owns what before
and after, that every object is one that the server takes, and that as little is written as can be. Rivals, and servers
that are not well, are in `test_writing_faults.py`; what is checked besides, all the time, at `writing.Mirror`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.apiserver.cluster import ApiServer
from tests.apiserver.following import SANDBOXENVS_CRD, Json, do, server_time
from tests.apiserver.writing import (
    MANAGER,
    Written,
    entries,
    env_of,
    foreign,
    managed,
    mirroring,
    owned,
    pool,
    strange,
    summary,
)
from trio_federation import Capacity
from trio_federation.capacity import is_group, is_label, is_subdomain

LARGEST = 2**31 - 1
#: what the sink owns of a pool that is all defaults
PLAIN = {"name", "idleCount", "runningCount", "desiredReplicas", "pendingRequests", "autoscalingEnabled"}
#: how many envs and other clusters a large fleet has
ENVS, CLUSTERS = 500, 20


@pytest.fixture(scope="module")
def server(api_server: ApiServer) -> ApiServer:
    """The shared server, with SandboxEnvs."""
    api_server.create_crds([SANDBOXENVS_CRD])
    return api_server


@pytest.fixture
def envs(server: ApiServer, namespace: str) -> Written:
    """SandboxEnvs of this test alone."""
    return Written(server, namespace)


def seconds(moment: str) -> float:
    """A moment as it stands in an object, in Unix seconds."""
    return datetime.fromisoformat(moment).timestamp()


# Whose is what


async def test_who_owns_what_before_and_after(envs: Written) -> None:
    """Beside a controller, somebody who applies an entry of a cluster that nobody else knows, and somebody who owns a
    label."""
    await do(envs.make, "e")
    await do(envs.apply, "e", {"clusters": [strange("south", 9)]}, "ops")
    await do(envs.label, "e", team="blue")
    before = await do(envs.get, "e")
    assert foreign(before) == {"south": {"theirs": 9}}

    def is_untouched(env: Json) -> bool:
        """Whether what is not ours is byte for byte what it was."""
        mine = ("east", "north")
        rest = {cluster: entry for cluster, entry in entries(env).items() if cluster not in mine}
        others = {name: value for name, value in env["status"].items() if name not in ("clusters", "federation")}
        return (
            managed(env) == managed(before)
            and rest == entries(before)
            and others == {name: value for name, value in before["status"].items() if name != "clusters"}
            and env["spec"] == before["spec"]
            and env["metadata"]["labels"] == before["metadata"]["labels"]
        )

    async with mirroring(envs) as mirror:
        east, north = pool("e", "east", "small", 3, scaling_group="gpu"), pool("e", "north", "large", 4)
        await mirror.show(east, north)
        theirs = {"south": {"theirs": 9}}
        both = {"east": {"small": 3}, "north": {"large": 4}}
        env = await mirror.until_env(envs, "e", lambda env: foreign(env) == both | theirs)
        assert is_untouched(env)
        assert summary(env) == (2, 7)
        assert owned(env) == {
            f"clusters/{cluster}/{path}"
            for cluster, name, more in (("east", "small", {"scalingGroup"}), ("north", "large", set()))
            for path in (
                *(".", "clusterID", "isLocal", "lastSnapshotTime"),
                *(f"observedMembers/{name}/{field}" for field in {".", *PLAIN, *more}),
            )
        } | {"federation/clusters", "federation/idleReplicas", "federation/lastSnapshotTime"}

        await mirror.show(pool("e", "east", "small", 1), pool("e", "east", "large", 2), north)
        both["east"] = {"small": 1, "large": 2}
        assert is_untouched(await mirror.until_env(envs, "e", lambda env: foreign(env) == both | theirs))
        await mirror.show(north)
        del both["east"]
        env = await mirror.until_env(envs, "e", lambda env: foreign(env) == both | theirs)
        assert is_untouched(env)
        assert not any(path.startswith("clusters/east") for path in owned(env))

        await mirror.show()
        env = await mirror.until_env(envs, "e", lambda env: summary(env) is None)
        assert is_untouched(env)
        assert env["status"] == before["status"]
        # Not even our name is left.
        assert managed(env, MANAGER) == "[]"
        assert not mirror.ever
        assert len(mirror.written("e")) == len(mirror.writes()) == 4


@pytest.mark.parametrize("idle", [None, 2], ids=["nobody", "controller"])
async def test_nothing_is_left_where_nobody_knows_anything_any_more(idle: int | None, envs: Written) -> None:
    """Also in an env whose status nobody else has written: an empty one is none."""
    await do(envs.make, "e", idle=idle)
    before = await do(envs.get, "e")
    async with mirroring(envs) as mirror:
        for count in (1, 2):
            await mirror.show(pool("e", "east", idle=count))
            await mirror.until_shown(envs, "e", {"east": {"p": count}})
            await mirror.show()
            env = await mirror.until_shown(envs, "e", {})
            assert env.get("status") == before.get("status")
            assert env["metadata"]["managedFields"] == before["metadata"]["managedFields"]
        await mirror.until_quiet()
        assert len(mirror.writes()) == 4
        assert not mirror.ever


async def test_an_entry_that_is_somebody_elses_stays_theirs(envs: Written) -> None:
    """Somebody writes the entry of a cluster of which there are records. The rest is shown all the same."""
    await do(envs.make, "e", "f")
    await do(envs.apply, "e", {"clusters": [strange("east", 9)]}, "ops")
    theirs = managed(await do(envs.get, "e"), "ops")
    async with mirroring(envs) as mirror:
        for idle in (1, 2):
            await mirror.show(
                *(pool(env, cluster, idle=idle) for env, cluster in itertools.product("ef", ("east", "north")))
            )
            await mirror.until_shown(envs, "f", {"east": {"p": idle}, "north": {"p": idle}})
            env = await mirror.until_env(envs, "e", lambda env, idle=idle: foreign(env).get("north") == {"p": idle})  # type: ignore[misc]
            assert foreign(env)["east"] == {"theirs": 9}
            assert managed(env, "ops") == theirs
            assert not any(path.startswith("clusters/east") for path in owned(env))
        await mirror.until(lambda: mirror.reasons() == ["conflict"])
        (trouble,) = mirror.troubles
        assert trouble.party == "ops"
        assert f"{envs.namespace}/e" in trouble.detail
        assert "east" in trouble.detail
        # Once it is let go, it is ours to write.
        await do(envs.apply, "e", {}, "ops")
        await mirror.until_shown(envs, "e", {"east": {"p": 2}, "north": {"p": 2}})
        await mirror.until(lambda: not mirror.troubles)


# What is shown


async def test_everything_that_is_known_is_shown_as_it_was_when_it_was_known(envs: Written) -> None:
    await do(envs.make, "e")
    async with mirroring(envs) as mirror:
        now = mirror.context.clock()
        full: dict[str, Any] = {"running": 2, "pending": 4, "desired": 7, "autoscaling_enabled": True}
        await mirror.show(
            pool("e", "east", "limited", 3, scaling_group="gpu", capacity=5, state="Active", **full),
            pool("e", "east", "ceiling", 0, capacity=0, saturated_for=300, observed_at=now - 30, **full),
            pool("e", "east", "endless", 1, capacity=-1, observed_at=now - 20, **full),
            pool("e", "east", "fixed", 1, capacity=9, observed_at=now - 10),
            # Of these, only sums are known.
            pool("e", "north", "", 6, running=1, desired=8, observed_at=now - 40),
            pool("e", "north", "", 5, scaling_group="gpu", running=1, pending=3, desired=8, observed_at=now - 5),
            pool("e", "south", "", 2, scaling_group="cpu", observed_at=now - 5),
            # Not the sink's business: its own cluster.
            pool("e", "west", "own", 77),
            # There is no such env here.
            pool("elsewhere", "east", "p", 5),
        )
        env = await mirror.until_env(envs, "e", lambda env: summary(env) == (3, 3 + 0 + 1 + 1 + 6 + 2))
        at = server_time(envs.server).timestamp() - (mirror.context.clock() - now)
        east, north, south = (entries(env)[cluster] for cluster in ("east", "north", "south"))

        # The server tells its time in whole seconds, and ours are cut to whole seconds.
        def is_about(moment: str, wanted: float) -> bool:
            return abs(seconds(moment) - wanted) <= 2.5

        assert is_about(east.pop("lastSnapshotTime"), at - 30)
        assert is_about(north.pop("lastSnapshotTime"), at - 40)
        assert is_about(south.pop("lastSnapshotTime"), at - 5)
        assert is_about(env["status"]["federation"]["lastSnapshotTime"], at - 5)
        members = {member.pop("name"): member for member in east["observedMembers"]}
        assert is_about(members["ceiling"].pop("saturatedUntil"), at - 30 + 300)
        counts = {"runningCount": 2, "pendingRequests": 4, "desiredReplicas": 7, "autoscalingEnabled": True}
        nothing = {"runningCount": 0, "pendingRequests": 0, "desiredReplicas": 0, "autoscalingEnabled": False}
        assert members == {
            "limited": {"idleCount": 3, "scalingGroup": "gpu", "scaleUpHeadroom": 5, "state": "Active"} | counts,
            "ceiling": {"idleCount": 0, "scaleUpHeadroom": 0} | counts,
            "endless": {"idleCount": 1} | counts,
            "fixed": {"idleCount": 1} | nothing,
        }
        sums = {"totalIdle": 5, "totalRunning": 1, "totalPending": 3, "totalDesired": 8}
        assert north == {
            "clusterID": "north",
            "isLocal": False,
            "idleReplicas": 6,
            "runningReplicas": 1,
            "desiredReplicas": 8,
            "scalingGroups": [{"name": "gpu"} | sums],
        }
        assert south["scalingGroups"] == [
            {"name": "cpu", "totalIdle": 2, "totalRunning": 0, "totalPending": 0, "totalDesired": 0}
        ]
        assert south.keys() == {"clusterID", "isLocal", "scalingGroups"}
        assert len(mirror.writes()) == 1


_WORDS = st.text(st.sampled_from("az09-."), min_size=1)
_LABELS = _WORDS.filter(is_label) | st.sampled_from(["e" * 63, "0", "1e3", "null", "true", "on", "yes", "2030-01-01"])
_NAMES = _WORDS.filter(is_subdomain) | st.sampled_from(["p" * 253, "0", "1.5", "null", "false", "no", "0x1f"])
_ODD = [
    "#",
    "'",
    '"',
    "\\",
    "{",
    "[]",
    "&a",
    "*a",
    "!!str",
    "%",
    "@",
    "`",
    "~",
    "=",
    "<<",
    "- a",
    "a: b",
    "a #b",
    "\\n",
]
_LONG = ["\N{GRINNING FACE}" * 63, "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 63]
_TEXTS = (st.text(max_size=63) | st.sampled_from(["", *_ODD, *_LONG])).filter(is_group)
_COUNTS = st.integers(0, LARGEST) | st.sampled_from([0, LARGEST])
_VALUES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "idle": _COUNTS,
        "running": _COUNTS,
        "pending": _COUNTS,
        "desired": _COUNTS,
        "autoscaling_enabled": st.booleans(),
        "capacity": st.integers(-1, LARGEST) | st.sampled_from([-1, 0, LARGEST]),
        "saturated_for": st.floats(0, LARGEST) | st.sampled_from([0.0, LARGEST]),
        "state": _TEXTS,
    }
)


@st.composite
def fleets(draw: st.DrawFn) -> list[Capacity]:
    """What other clusters may have of the env "e": of some, sums alone are known. The namespace is left open."""
    found = []
    for cluster in draw(st.lists(_LABELS.filter(lambda name: name != "west"), min_size=1, max_size=6, unique=True)):
        if draw(st.booleans()):
            names = [(name, draw(_TEXTS)) for name in draw(st.lists(_NAMES, min_size=1, max_size=4, unique=True))]
        else:
            names = [("", group) for group in draw(st.lists(_TEXTS, min_size=1, max_size=4, unique=True))]
        found += [Capacity(cluster, "", "e", name, group, **draw(_VALUES)) for name, group in names]
    return found


async def test_every_object_that_is_written_is_one_that_the_server_takes(envs: Written) -> None:
    """Whatever valid records hold. Each object also reads back as what was told: a document is not taken for another
    one on its way."""
    await do(envs.make, "e")
    fleet: list[list[Capacity]] = []

    @settings(max_examples=60)
    @given(fleets())
    def draw(records: list[Capacity]) -> None:
        fleet.append(records)

    draw()
    async with mirroring(envs, refresh_interval="10s") as mirror:
        for records in fleet:
            await mirror.show(*records)
            wanted = {
                (record.cluster_id, record.member_pool, "" if record.member_pool else record.scaling_group): record
                for record in records
            }
            env = await mirror.until_env(envs, "e", lambda env, wanted=wanted: told(env) == shown(wanted))  # type: ignore[misc]
            idle = sum(_idle(env_entry) for env_entry in entries(env).values() if not env_entry["isLocal"])
            assert summary(env) == (len({record.cluster_id for record in records}), min(idle, LARGEST))
        assert not mirror.ever
        assert mirror.written() == mirror.writes()


def _idle(entry: Json) -> int:
    if "observedMembers" in entry:
        return sum(int(member["idleCount"]) for member in entry["observedMembers"])
    if "idleReplicas" in entry:
        return int(entry["idleReplicas"])
    return sum(int(group["totalIdle"]) for group in entry["scalingGroups"])


def told(env: Json) -> dict[tuple[str, str, str], Json]:
    """What an env says of pools, groups and sums elsewhere, without moments, but for whether there is one."""
    found = {}
    for cluster, entry in entries(env).items():
        if entry["isLocal"]:
            continue
        for member in entry.get("observedMembers", ()):
            found[cluster, member["name"], ""] = dict(member, saturatedUntil="saturatedUntil" in member)
        for group in entry.get("scalingGroups", ()):
            found[cluster, "", group["name"]] = group
        sums: Json = {
            name: entry[name] for name in ("idleReplicas", "runningReplicas", "desiredReplicas") if name in entry
        }
        if sums:
            found[cluster, "", ""] = sums
    return found


def shown(records: dict[tuple[str, str, str], Capacity]) -> dict[tuple[str, str, str], Json]:
    """What an env should say of these, as `told` reads it."""
    return {key: _shown(record) for key, record in records.items()}


def _shown(record: Capacity) -> Json:
    if not record.member_pool and not record.scaling_group:
        return {"idleReplicas": record.idle, "runningReplicas": record.running, "desiredReplicas": record.desired}
    if not record.member_pool:
        return {
            "name": record.scaling_group,
            "totalIdle": record.idle,
            "totalRunning": record.running,
            "totalDesired": record.desired,
            "totalPending": record.pending,
        }
    found: Json = {
        "name": record.member_pool,
        "idleCount": record.idle,
        "runningCount": record.running,
        "desiredReplicas": record.desired,
        "pendingRequests": record.pending,
        "autoscalingEnabled": record.autoscaling_enabled,
        "saturatedUntil": record.saturated_for > 0,
    }
    if record.scaling_group:
        found["scalingGroup"] = record.scaling_group
    if record.autoscaling_enabled and record.capacity >= 0:
        found["scaleUpHeadroom"] = record.capacity
    if record.state:
        found["state"] = record.state
    return found


# How much is written


async def test_what_only_grows_older_is_not_written(envs: Written) -> None:
    """Also not by what comes back: its own writes, and what the controller does to its own part."""
    await do(envs.make, "e", "f")
    async with mirroring(envs) as mirror:
        records = [pool(env, cluster, idle=3) for env, cluster in itertools.product("ef", ("east", "north"))]
        await mirror.show(*records)
        shown = {"east": {"p": 3}, "north": {"p": 3}}
        for env in "ef":
            await mirror.until_shown(envs, env, shown)
        before = await do(envs.all)
        for round_number in range(10):
            await mirror.show(*records)
            if round_number == 5:
                await do(envs.merge, "e", {"idleReplicas": 5})
            await trio.sleep(0.1)
        await mirror.until_quiet()
        after = await do(envs.all)
        assert [foreign(env) for env in after] == [foreign(env) for env in before]
        assert after[1]["metadata"] == before[1]["metadata"]
        assert len(mirror.writes()) == 2
        assert len(mirror.record.of("list")) == 1


async def test_ages_are_refreshed_once_in_an_interval(envs: Written) -> None:
    """Never before."""
    await do(envs.make, "e")
    async with mirroring(envs, refresh_interval="10s") as mirror:
        began = trio.current_time()
        moments = []
        while trio.current_time() < began + 12:
            await mirror.show(pool("e", "east", idle=3))
            moments.append((await do(envs.get, "e"))["status"].get("federation", {}).get("lastSnapshotTime"))
            await trio.sleep(0.5)
        first, second = mirror.writes()
        assert 9.9 < second.at - first.at < 12
        assert seconds(moments[-1]) - seconds(next(filter(None, moments))) in (9, 10, 11)


async def test_a_burst_is_spread_with_the_most_changed_first(envs: Written) -> None:
    names = [f"e{number}" for number in range(20)]
    await do(envs.make, *names)
    async with mirroring(envs, writes_per_second=20) as mirror:
        await mirror.show(*(pool(name, "east", idle=1) for name in names))
        await mirror.until(lambda: len(mirror.written()) == len(names))
        # The more, the further down the alphabet.
        await mirror.show(*(pool(name, "east", idle=2 + 10 * number) for number, name in enumerate(names)))
        await mirror.until(lambda: len(mirror.written()) == 2 * len(names))
        writes = mirror.writes()
        for first, later in itertools.pairwise(writes):
            assert later.at - first.at >= 0.05 - 0.01
        assert list(map(env_of, writes[len(names) :])) == names[::-1]


async def test_what_changes_again_and_again_is_written_once_in_an_interval(envs: Written) -> None:
    await do(envs.make, "e")
    async with mirroring(envs, env_interval=1.0) as mirror:
        await mirror.show(pool("e", "east", idle=0))
        await mirror.until_shown(envs, "e", {"east": {"p": 0}})
        for idle in range(1, 16):
            await mirror.show(pool("e", "east", idle=idle))
            await trio.sleep(0.1)
        await mirror.until_shown(envs, "e", {"east": {"p": 15}})
        # Mirror sees to the pauses.
        assert 3 <= len(mirror.writes()) <= 4


async def test_what_a_new_agent_has_not_heard_of_yet_stays_for_the_ttl(envs: Written) -> None:
    """Others may be slower to report than this one to start."""
    await do(envs.make, "e", "f")
    async with mirroring(envs) as mirror:
        await mirror.show(*(pool(env, cluster, idle=1) for env in "ef" for cluster in ("east", "north")))
        for env in "ef":
            await mirror.until_shown(envs, env, {"east": {"p": 1}, "north": {"p": 1}})
    began = trio.current_time()
    async with mirroring(envs, ttl=4.0) as mirror:
        await mirror.show(pool("e", "east", idle=2))
        while trio.current_time() < began + 3.5:
            found = {env["metadata"]["name"]: foreign(env) for env in await do(envs.all)}
            assert found["e"]["north"] == found["f"]["north"] == found["f"]["east"] == {"p": 1}
            await trio.sleep(0.1)
        await mirror.until_shown(envs, "e", {"east": {"p": 2}})
        await mirror.until_shown(envs, "f", {})


# Envs that come and go


async def test_envs_come_go_and_come_back(envs: Written) -> None:
    async with mirroring(envs) as mirror:
        # Known before there is an env here.
        await mirror.show(pool("e", "east", idle=1), pool("f", "east", idle=2), pool("g", "east", idle=3))
        await do(envs.make, "e", "f")
        await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        await mirror.until_shown(envs, "f", {"east": {"p": 2}})
        assert not mirror.writes("g")

        # It is deleted, and created again with nothing in it.
        await do(envs.delete, "e")
        mirror.forget("e")
        await do(envs.make, "e")
        await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        # It is deleted, and something else to show of it comes later.
        await do(envs.delete, "f")
        mirror.forget("f")
        await mirror.show(pool("e", "east", idle=1), pool("f", "east", idle=5))
        await mirror.until_quiet()
        count = len(mirror.writes("f"))
        await mirror.show(pool("e", "east", idle=1), pool("f", "east", idle=6))
        await mirror.until_quiet()
        assert len(mirror.writes("f")) == count <= 2
        await do(envs.make, "f")
        await mirror.until_shown(envs, "f", {"east": {"p": 6}})
        assert not mirror.ever


async def test_an_env_that_waits_for_its_finalizers_is_left_in_order(envs: Written) -> None:
    await do(envs.make, "e", finalizers=["tests.example/wait"])
    async with mirroring(envs) as mirror:
        await mirror.show(pool("e", "east", idle=1))
        await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        await do(envs.delete, "e")
        await mirror.show()
        await mirror.until_shown(envs, "e", {})
        headers = {"Content-Type": "application/merge-patch+json"}
        path = f"{envs.root}/e"
        await do(lambda: envs.server.admin.patch(path, json={"metadata": {"finalizers": None}}, headers=headers))
        await mirror.show(pool("e", "east", idle=2))
        await mirror.until_quiet()
        assert not mirror.ever


async def test_only_the_envs_that_are_chosen_are_written(envs: Written) -> None:
    other = Written(envs.server, await do(envs.server.namespace))
    await do(envs.make, "e", "f", labels={"mirrored": "yes"})
    await do(envs.make, "g")
    await do(other.make, "e", labels={"mirrored": "yes"})
    async with mirroring(envs, label_selector="mirrored=yes") as mirror:
        there = Capacity("east", other.namespace, "e", "p", idle=1)
        await mirror.show(there, *(pool(name, "east", idle=1) for name in "efg"))
        await mirror.until_shown(envs, "e", {"east": {"p": 1}})
        await mirror.until_shown(envs, "f", {"east": {"p": 1}})
        # What is not chosen any more is let go of, once.
        await do(envs.label, "f", mirrored="no")
        await mirror.show(pool("e", "east", idle=2), pool("f", "east", idle=2), pool("g", "east", idle=2))
        await mirror.until_shown(envs, "e", {"east": {"p": 2}})
        await mirror.until_shown(envs, "f", {})
        await mirror.until_quiet()
        assert not owned(await do(envs.get, "f"))
        assert await do(envs.foreign, "g") == await do(other.foreign, "e") == {}
        assert len(mirror.writes("f")) <= 3
    await do(envs.server.delete_namespace, other.namespace)


# Many


async def test_a_large_fleet_is_shown_and_a_restart_half_way_costs_nothing(envs: Written) -> None:
    """500 envs, each in 20 other clusters. The first agent dies half-way; the next one finds what was written. One of
    the clusters is gone by then."""
    names = [f"e{number:03}" for number in range(ENVS)]
    clusters = [f"c{number:02}" for number in range(CLUSTERS)]
    await do(envs.make, *names, idle=1)
    fleet = [pool(env, cluster, idle=index) for index, cluster in enumerate(clusters) for env in names]

    def whole(found: Sequence[str]) -> dict[str, dict[str, int]]:
        return {cluster: {"p": index} for index, cluster in enumerate(clusters) if cluster in found}

    async with mirroring(envs) as mirror:
        await mirror.show(*fleet)
        await mirror.until(lambda: len(mirror.written()) >= ENVS // 3)
    first = mirror
    # Of the last few, the answers have not been heard, and they may be done a moment later.
    assert len(first.writes()) - len(first.written()) <= 4
    assert len(first.writes()) < ENVS
    done = set(map(env_of, first.written()))

    async with mirroring(envs) as mirror:
        await mirror.show(*fleet)
        await mirror.until(lambda: len(mirror.written()) >= ENVS - len(first.writes()))
        await mirror.until_quiet()
        # Those that were written before are not written again, and no other one twice.
        again = list(map(env_of, mirror.writes()))
        assert len(again) == len(set(again))
        assert set(again) <= set(names) - done
        assert all(foreign(env) == whole(clusters) for env in await do(envs.all))
        assert not mirror.ever

    # Another restart, and one of the clusters is gone from some of the envs. Whether it is, or was only not heard of
    # yet, shows after the TTL.
    left = set(names[: ENVS // 5])
    rest = [record for record in fleet if (record.env_name, record.cluster_id) not in {(name, "c07") for name in left}]
    began = trio.current_time()
    async with mirroring(envs, ttl=4.0) as mirror:
        await mirror.show(*rest)
        await mirror.until(lambda: len(mirror.written()) >= len(left))
        assert min(write.at for write in mirror.writes()) >= began + 4
        await mirror.until_quiet()
        assert sorted(map(env_of, mirror.writes())) == sorted(left)
        without = [cluster for cluster in clusters if cluster != "c07"]
        for env in await do(envs.all):
            gone = env["metadata"]["name"] in left
            assert foreign(env) == whole(without if gone else clusters)
            assert summary(env) == (len(whole(without)), 183) if gone else (CLUSTERS, 190)

"""What a cluster may say and see, as grpcio meets it on a hub of ours: from outside, what breaks a policy is never seen
by anybody, and is told to the operator alone."""

from __future__ import annotations

from typing import Any

from tests.interop.peers import LogWatch, Schema, Worker, record
from tests.interop.strangers import MASTER, ONE, WITHDRAWN, Host, Seen, Steady, running_hub
from trio_federation.config import HubSettings, PolicySettings, Secret
from trio_federation.credentials import make_token

#: the largest count that a record can have
MOST_IDLE = 2**31 - 1


def settings(*policy: PolicySettings) -> HubSettings:
    """A hub that takes tokens, with these policies."""
    return HubSettings(secret=Secret(MASTER), accept=("token",), policy=policy)


def worker(hub: Host, schema: Schema, cluster: str) -> Worker:
    """A worker with a token."""
    return Worker(schema, hub.port, cluster, secret=make_token(MASTER, cluster), instance=ONE)


def of(env: str, pool: str = "p1", **values: Any) -> dict[str, Any]:
    """A record of another env than `record` has. It claims to be of a cluster that may do anything."""
    return {**record("free", pool, **values), "env_name": env}


def breaches(hub: Host) -> dict[tuple[str, str], float]:
    """What was counted, by cluster and reason."""
    return {
        (cluster, reason): count
        for cluster in ("west", "east", "free")
        for reason in ("env_not_allowed", "too_many_records", "idle_cut")
        if (count := hub.metric("policy_breaches_total", cluster=cluster, reason=reason))
    }


async def test_an_env_that_a_cluster_may_not_report_is_seen_by_nobody(logs: LogWatch, schema: Schema) -> None:
    policy = PolicySettings(clusters=("west",), report=("ns/env", "ns/team-*"))
    async with running_hub(logs, settings(policy)) as hub:
        with (
            worker(hub, schema, "west") as west,
            worker(hub, schema, "free") as free,
            worker(hub, schema, "south") as south,
        ):
            seen = Seen(south.watch())
            await seen.take()
            report = west.report(
                schema.report(
                    of("other", idle=1),
                    of("env", idle=2),
                    of("team-a", idle=3),
                    of("other", "p2", idle=4),
                    {**of("env", "p2", idle=5), "namespace": "elsewhere"},
                    of("team", idle=6),
                )
            )
            await seen.shows("west", 3, env="team-a")
            # The call goes on, and so does the counting; the log has its one line.
            report.send(
                schema.report(of("other", idle=7)),
                # What may not be reported is not withdrawn, either; nothing is wrong with it.
                schema.report(of("other", "p3", observed_for_ms=WITHDRAWN)),
                schema.report(of("env", idle=8)),
            )
            await seen.shows("west", 8)
            assert seen.named == {("west", "env/p1"), ("west", "team-a/p1")}
            assert breaches(hub) == {("west", "env_not_allowed"): 5}
            [line] = hub.told("policy_breach")
            assert (line["cluster"], line["reason"], line["told"]) == ("west", "env_not_allowed", "once")
            assert "ns/other" in line["detail"]
            # Others may; what counts is whose call it is, and not what its records claim.
            free.report(schema.report(of("other", idle=9)))
            await seen.shows("free", 9, env="other")
            assert breaches(hub) == {("west", "env_not_allowed"): 5}
            newcomer = Seen(south.watch())
            await newcomer.take()
            assert newcomer.idle == {("west", "env/p1"): 8, ("west", "team-a/p1"): 3, ("free", "other/p1"): 9}


async def test_what_a_cluster_may_not_see_is_in_no_snapshot_and_no_news(logs: LogWatch, schema: Schema) -> None:
    policy = PolicySettings(clusters=("east",), see=("ns/env",))
    async with running_hub(logs, settings(policy)) as hub:
        with (
            worker(hub, schema, "free") as free,
            worker(hub, schema, "east") as east,
            worker(hub, schema, "south") as south,
        ):
            everything = Seen(south.watch())
            report = free.report(schema.report(of("env", idle=1), of("secret", idle=1), of("secret", "p2", idle=1)))
            await everything.shows("free", 1, "p2", "secret")
            # The snapshot,
            watch = Seen(east.watch())
            snapshot = await watch.take()
            assert [(item.env_name, item.idle) for item in snapshot.items] == [("env", 1)]
            # news,
            report.send(schema.report(of("secret", idle=2)), schema.report(of("env", idle=2), of("secret", idle=3)))
            await watch.shows("free", 2)
            # and withdrawals: of those it might learn that there was something.
            report.send(
                schema.report(of("secret", observed_for_ms=WITHDRAWN), of("secret", "p2", observed_for_ms=WITHDRAWN)),
                schema.report(of("env", observed_for_ms=WITHDRAWN)),
            )
            await watch.until(lambda seen: not seen)
            report.send(schema.report(of("env", "end", idle=1)))
            await watch.shows("free", 1, "end")
            assert watch.named == {("free", "env/p1"), ("free", "env/end")}
            # Nor is a withdrawal in the snapshot of a newcomer, which has those of what it may see.
            newcomer = Seen(east.watch())
            await newcomer.take()
            assert newcomer.named == watch.named
            # Who may see all has seen all of it.
            await everything.shows("free", 1, "end")
            assert everything.named == watch.named | {("free", "secret/p1"), ("free", "secret/p2")}
            assert breaches(hub) == {}


async def test_who_may_see_nothing_gets_an_empty_snapshot_and_may_report(logs: LogWatch, schema: Schema) -> None:
    policy = PolicySettings(clusters=("east",), see=())
    async with running_hub(logs, settings(policy)) as hub:
        with worker(hub, schema, "free") as free, worker(hub, schema, "east") as east:
            steady = Steady(free, "free")
            await steady.goes_on()
            watch = Seen(east.watch())
            assert (await watch.take()).items == []
            report = east.report(schema.report(record("east", idle=4)))
            await steady.seen.shows("east", 4)
            await steady.goes_on()
            report.end()
            await report.answer()
            # All of that has come to others, and nothing to this one.
            assert await hub_ended_with_nothing(watch)


async def hub_ended_with_nothing(watch: Seen) -> bool:
    """Whether nothing more has come on a watch: what had come before it was given up is handed out first."""
    watch.watch.cancel()
    try:
        await watch.take()
    except Exception as error:
        return "CANCELLED" in str(error)
    return False


async def test_no_more_records_are_kept_of_a_cluster_than_it_may_have(logs: LogWatch, schema: Schema) -> None:
    policy = PolicySettings(clusters=("west",), max_records=2)
    async with running_hub(logs, settings(policy)) as hub:
        with (
            worker(hub, schema, "west") as west,
            worker(hub, schema, "free") as free,
            worker(hub, schema, "south") as south,
        ):
            seen = Seen(south.watch())
            await seen.take()
            report = west.report(schema.report(*(record("west", f"p{number}", idle=1) for number in range(1, 5))))
            await seen.shows("west", 1, "p2")
            assert breaches(hub) == {("west", "too_many_records"): 2}
            # What is there may change, whatever else is refused,
            report.send(schema.report(record("west", "p3", idle=2), record("west", "p2", idle=2)))
            await seen.shows("west", 2, "p2")
            assert breaches(hub) == {("west", "too_many_records"): 3}
            # a withdrawal makes room, in the same message,
            report.send(
                schema.report(record("west", "p1", observed_for_ms=WITHDRAWN), record("west", "p3", idle=3)),
            )
            await seen.shows("west", 3, "p3")
            assert hub.idle == {("west", "p2"): 2, ("west", "p3"): 3}
            # one of what is not there makes none,
            report.send(
                schema.report(
                    *(record("west", f"q{number}", observed_for_ms=WITHDRAWN) for number in range(10)),
                    *(record("west", f"q{number}", idle=4) for number in range(10)),
                    record("west", "p2", idle=4),
                ),
            )
            await seen.shows("west", 4, "p2")
            assert hub.idle == {("west", "p2"): 4, ("west", "p3"): 3}
            assert breaches(hub) == {("west", "too_many_records"): 13}
            assert [line["reason"] for line in hub.told("policy_breach")] == ["too_many_records"]
            # and others are not touched.
            free.report(schema.report(*(record("free", f"p{number}", idle=1) for number in range(1, 5))))
            await seen.shows("free", 1, "p4")
            # A new call of the cluster finds no new room.
            report.end()
            await report.answer()
            west.report(schema.report(record("west", "p5", idle=5), record("west", "p2", idle=5)))
            await seen.shows("west", 5, "p2")
            assert {pool for cluster, pool in hub.idle if cluster == "west"} == {"p2", "p3"}
            assert ("west", "env/p5") not in seen.named


async def test_an_idle_of_two_thousand_million_counts_for_what_it_may(logs: LogWatch, schema: Schema) -> None:
    policy = PolicySettings(clusters=("west",), max_idle=20)
    async with running_hub(logs, settings(policy)) as hub:
        with (
            worker(hub, schema, "west") as west,
            worker(hub, schema, "free") as free,
            worker(hub, schema, "south") as south,
        ):
            seen = Seen(south.watch())
            await seen.take()
            report = west.report(
                schema.report(
                    record("west", "lie", idle=MOST_IDLE, desired=7, running=5, capacity=-1, state="Active"),
                    record("west", "edge", idle=20),
                    record("west", "over", idle=21),
                    record("west", "none", idle=0),
                )
            )
            broadcast = await seen.take()
            assert {item.member_pool: item.idle for item in broadcast.items} == {
                "lie": 20,
                "edge": 20,
                "over": 20,
                "none": 0,
            }
            # The rest of the record is as it was.
            [lie] = [item for item in broadcast.items if item.member_pool == "lie"]
            assert (lie.desired, lie.running, lie.capacity, lie.state) == (7, 5, -1, "Active")
            assert breaches(hub) == {("west", "idle_cut"): 2}
            report.send(schema.report(record("west", "lie", idle=MOST_IDLE)), schema.report(record("west", "end")))
            await seen.shows("west", 0, "end")
            assert breaches(hub) == {("west", "idle_cut"): 3}
            [line] = hub.told("policy_breach")
            assert (line["cluster"], line["reason"]) == ("west", "idle_cut")
            assert str(MOST_IDLE) in line["detail"]
            # Nobody else is cut.
            free.report(schema.report(record("free", idle=MOST_IDLE)))
            await seen.shows("free", MOST_IDLE)
            assert max(idle for (cluster, _), idle in hub.idle.items() if cluster == "west") == 20


async def test_the_policy_of_a_named_cluster_is_its_own_and_of_the_others_the_common_one(
    logs: LogWatch, schema: Schema
) -> None:
    common = PolicySettings(clusters=("*",), report=("ns/env",), max_idle=10, max_records=3)
    own = PolicySettings(clusters=("west",), report=("ns/other",))
    async with running_hub(logs, settings(common, own)) as hub:
        with (
            worker(hub, schema, "west") as west,
            worker(hub, schema, "east") as east,
            worker(hub, schema, "south") as south,
        ):
            seen = Seen(south.watch())
            for each in (west, east):
                each.report(schema.report(of("env", idle=100), of("other", idle=100)))
            await seen.until(lambda idle: len(idle) == 2)
            assert seen.idle == {("west", "other/p1"): 100, ("east", "env/p1"): 10}
            assert breaches(hub) == {
                ("west", "env_not_allowed"): 1,
                ("east", "env_not_allowed"): 1,
                ("east", "idle_cut"): 1,
            }


async def test_one_batch_may_break_every_rule_and_the_rest_of_it_counts(logs: LogWatch, schema: Schema) -> None:
    policy = PolicySettings(clusters=("west",), report=("ns/env",), max_idle=5, max_records=2)
    async with running_hub(logs, settings(policy)) as hub:
        with worker(hub, schema, "west") as west, worker(hub, schema, "south") as south:
            seen = Seen(south.watch())
            await seen.take()
            west.report(
                schema.report(
                    of("other", idle=MOST_IDLE),
                    record("west", "p1", idle=MOST_IDLE),
                    record("west", "NO POOL", idle=MOST_IDLE),
                    record("west", "p2", idle=1),
                    record("west", "p3", idle=MOST_IDLE),
                )
            )
            await seen.take()
            assert seen.idle == {("west", "env/p1"): 5, ("west", "env/p2"): 1}
            assert breaches(hub) == {
                ("west", "env_not_allowed"): 1,
                ("west", "idle_cut"): 1,
                ("west", "too_many_records"): 1,
            }
            assert [line["reason"] for line in hub.told("record_dropped")] == ["member_pool"]

"""What a hub's policy and limits come to in a whole federation, with real agents: nobody is told what it may not see,
not even that it has gone; what breaks a rule is dropped or cut, and counted; and what one peer asks for beyond a limit
is refused with a clear status, while the others notice nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.typing import EventDict
from trio.testing import MockClock

import trio_federation.policy
from tests.federation.helpers import counted, item, lines
from tests.simulation import member, simulated_federation
from trio_federation.capacity import INT32_MAX, Change
from trio_federation.config import HubSettings, Limits, PolicySettings
from trio_federation.errors import ResourceExhausted, Unauthenticated, Unavailable
from trio_federation.pb.sandbox.sync.v1 import EnvCapacity, ReportFederationRequest, WatchFederationRequest
from trio_federation.rpc import HubConnection
from trio_federation.testing import Invariant, run_simulated
from trio_federation.testing.clusters import AgentProcess
from trio_federation.wire import WITHDRAWN_AGE_MS

BREACHES = "trio_federation_hub_policy_breaches_total"
REFUSED = "trio_federation_hub_calls_refused_total"


def hub(*policy: PolicySettings, limits: Limits | None = None) -> HubSettings:
    """A hub with a policy, where each cluster proves what it is."""
    return HubSettings(accept=("token",), policy=policy, limits=limits if limits is not None else Limits())


def policy(*clusters: str, **rules: tuple[str, ...] | int) -> PolicySettings:
    """One table of it."""
    return PolicySettings(clusters=clusters, **rules)  # type: ignore[arg-type]


class NeverTold(Invariant):
    """The registry of one cluster is never handed anything, records or withdrawals, of these envs."""

    def __init__(self, name: str, *envs: tuple[str, str]) -> None:
        self.name = name
        self.envs = envs
        self.told = 0

    def applied(self, process: AgentProcess, changes: Sequence[Change], news: Sequence[tuple[str, str, str]]) -> None:
        """Whatever the agent takes in comes here before anything is made of it."""
        if process.cluster.name != self.name:
            return
        for change in changes:
            self.told += 1
            if change.identity[0] != self.name and change.identity[1:3] in self.envs:
                raise self.broken(process.cluster, f"it was told {change}")


# --- what may be seen ------------------------------------------------------------------------------------------------


async def test_what_may_not_be_seen_is_not_told_and_neither_is_its_end(autojump_clock: MockClock) -> None:
    """A cluster that may not see an env never has it in its registry: not when it comes, not when it changes, not in
    the snapshot that newcomers get, and no withdrawal of it either, by which it would learn the name."""
    nothing_secret = NeverTold("west", ("secret", "env"), ("ns", "hidden"))
    settings = hub(policy("west", see=("ns/env*",)))
    async with simulated_federation("west", "north", "east", hub_settings=settings, invariants=[nothing_secret]) as fed:
        both = [
            member("east", namespace="secret", idle=1),
            member("east", env="hidden", idle=2),
            member("east", idle=3),
            member("east", env="env2", idle=4),
        ]
        fed["east"].source.set(*both)
        await fed.settle()
        assert fed["north"].idle("east") == [3, 4, 2, 1]
        assert fed["west"].idle("east") == [3, 4]
        # All of them change; all but one go; west comes again, and is told what there is and what is gone.
        fed["east"].source.set(*(member("east", env=each.env_name, namespace=each.namespace, idle=9) for each in both))
        await trio.sleep(12.0)
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(12.0)
        assert fed["north"].idle("east") == fed["west"].idle("east") == [3]
        fed.cut("west")
        await trio.sleep(12.0)
        assert fed["west"].idle("east") == [3]
        await fed["west"].stop()
        await fed["west"].start()
        await trio.sleep(1.0)
        assert fed["west"].idle("east") == [3]
        await fed["east"].stop()
        await trio.sleep(1.0)
        assert fed["north"].idle("east") == fed["west"].idle("east") == []
        assert nothing_secret.told > 10


async def test_who_may_see_nothing_reports_all_the_same(autojump_clock: MockClock) -> None:
    """And what it sees of itself it does not see through a hub."""
    async with simulated_federation("west", "east", hub_settings=hub(policy("west", see=()))) as fed:
        for name in fed.clusters:
            fed[name].source.set(member(name, idle=3))
        await trio.sleep(20.0)
        assert fed["west"].known("east") == []
        assert fed["west"].idle("west") == fed["east"].idle("west") == [3]
        assert fed["west"].agent.links[0].watcher.watching


async def test_a_policy_is_about_the_envs_of_others(autojump_clock: MockClock) -> None:
    """A watcher that does not ask to be spared its own cluster's echo is told all of that, and of other clusters what
    it may see: the hub keeps to the policy whatever a watcher asks for."""
    async with simulated_federation("east", hub_settings=hub(policy("*", see=("ns/env",)))) as fed:
        fed["east"].source.set(member("east", idle=3), member("east", env="hidden", idle=4))
        await fed.settle()
        for name, seen in (("east", {"env", "hidden"}), ("north", {"env"})):
            async with fed.connection(name) as connection, connection.watch(WatchFederationRequest()) as call:
                assert {each.env_name for each in (await call.receive()).items} == seen
                fed["east"].source.set()
                withdrawn: set[str] = set()
                while withdrawn != seen:
                    items = (await call.receive()).items
                    assert {each.env_name for each in items} <= seen
                    withdrawn |= {each.env_name for each in items if each.observed_for_ms >= WITHDRAWN_AGE_MS}
                fed["east"].source.set(member("east", idle=3), member("east", env="hidden", idle=4))
                await fed.settle()


# --- what may be reported --------------------------------------------------------------------------------------------


async def test_what_may_not_be_reported_is_dropped_counted_and_told_once(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """The rest of the report goes on, and so do its call and all other clusters."""
    settings = hub(policy("east", report=("ns/env",)), policy("*", report=("*/*",)))
    async with simulated_federation("west", "east", "north", hub_settings=settings) as fed:
        for name in ("east", "north"):
            fed[name].source.set(member(name, idle=3), member(name, namespace="other", idle=4))
        await fed.settle()
        assert fed["west"].idle("east") == [3]
        assert fed["west"].idle("north") == [3, 4]
        before = counted(fed.hubs[0].hub, BREACHES, cluster="east", reason="env_not_allowed")
        assert before >= 1
        fed["east"].source.set(member("east", idle=5), member("east", namespace="other", idle=6))
        await fed.settle()
        assert fed["west"].idle("east") == [5]
        assert counted(fed.hubs[0].hub, BREACHES, cluster="east", reason="env_not_allowed") > before
        assert counted(fed.hubs[0].hub, BREACHES, cluster="north") == 0
        assert fed["east"].routes["hub-0"].dialled == 1
        # Its own truth is its own.
        assert fed["east"].idle("east") == [5, 6]
    [line] = lines(logs, "policy_breach")
    assert (line["log_level"], line["cluster"], line["reason"]) == ("warning", "east", "env_not_allowed")
    assert "other/env is not among what it may report" in line["detail"]


async def test_a_cluster_that_claims_all_there_is_lures_nothing_to_itself(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """One that claims 2^31-1 idle: with a bound it counts as much as that, so that a neighbour with more is the better
    one; it is counted, and told once."""
    async with simulated_federation("west", "liar", "east", hub_settings=hub(policy("*", max_idle=50))) as fed:
        fed["west"].source.set(member("west", idle=0))
        fed["liar"].source.set(member("liar", idle=INT32_MAX))
        fed["east"].source.set(member("east", "p1", idle=50), member("east", "p2", idle=20))
        await fed.settle()
        assert fed["west"].idle("liar") == [50]
        assert fed["west"].idle("east") == [50, 20]
        assert fed["liar"].idle("liar") == [INT32_MAX]
        # Of a hundred creates it gets no more than the fifty that count.
        targets = [fed["west"].router.place("ns", "env").target for _ in range(100)]
        assert sum(target is not None and target.startswith("liar") for target in targets) <= 50
        assert counted(fed.hubs[0].hub, BREACHES, cluster="liar", reason="idle_cut") >= 1
        assert counted(fed.hubs[0].hub, BREACHES, cluster="east") == 0
    [line] = lines(logs, "policy_breach")
    assert (line["cluster"], line["reason"]) == ("liar", "idle_cut")
    assert "2147483647 idle, of which 50 count" in line["detail"]


async def test_no_more_records_than_may_be_are_kept_and_room_is_made(autojump_clock: MockClock) -> None:
    """Which of them comes first stays; when one goes, or runs out, another one finds room at its next report."""
    async with simulated_federation("west", "east", hub_settings=hub(policy("east", max_records=2))) as fed:
        fed["east"].source.set(*(member("east", f"p{number}", idle=number) for number in (1, 2, 3, 4)))
        await fed.settle()
        assert fed["west"].idle("east") == [1, 2]
        await trio.sleep(60.0)
        assert fed["west"].idle("east") == [1, 2]
        assert counted(fed.hubs[0].hub, BREACHES, cluster="east", reason="too_many_records") >= 2
        # Those that are kept may change.
        fed["east"].source.set(*(member("east", f"p{number}", idle=10 + number) for number in (1, 2, 3, 4)))
        await trio.sleep(12.0)
        assert fed["west"].idle("east") == [11, 12]
        fed["east"].source.set(*(member("east", f"p{number}", idle=number) for number in (2, 3, 4)))
        await trio.sleep(17.0)
        assert fed["west"].idle("east") == [2, 3]


records = st.builds(
    lambda name, idle, withdrawn: item(
        f"p{name}", idle=idle, age_ms=WITHDRAWN_AGE_MS if withdrawn else 0, seq=idle % 4
    ),
    st.integers(1, 6),
    st.sampled_from((0, 3, 9, INT32_MAX)),
    st.booleans(),
)
reports = st.tuples(st.sampled_from(("east", "north")), st.lists(records, min_size=1, max_size=6))


@settings(max_examples=15)
@given(st.lists(reports, min_size=4, max_size=12))
def test_whatever_a_cluster_sends_no_more_of_it_is_known_than_may_be(
    sent: list[tuple[str, list[EnvCapacity]]],
) -> None:
    """No history that a cluster makes up, of changes and withdrawals with any seq, goes beyond its bounds, in the hub
    or in an agent; nor does it take a place from another cluster."""

    async def play() -> None:
        table = policy("*", max_records=3, max_idle=5)
        async with (
            simulated_federation("west", hub_settings=hub(table)) as fed,
            fed.connection("east") as east,
            fed.connection("north") as north,
            east.report() as from_east,
            north.report() as from_north,
        ):
            for name, items in sent:
                call = from_east if name == "east" else from_north
                await call.send(ReportFederationRequest(items=items))
                await trio.sleep(0.1)
                for found in (fed.hubs[0].hub.snapshot(), fed["west"].registry.snapshot()):
                    assert all(record.idle <= 5 for record in found)
                    for cluster_id in ("east", "north"):
                        assert sum(record.cluster_id == cluster_id for record in found) <= 3

    run_simulated(play)


async def test_withdrawals_of_what_never_was_take_no_more_memory_than_records_do(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """A withdrawal is remembered for a TTL, and told to every newcomer. Of a cluster whose records are limited no more
    of them are, whether it withdraws what it has made up, or has pools come and go; then it is as it was before. Others
    are not concerned."""
    monkeypatch.setattr(trio_federation.policy, "LEAST_REMEMBERED", 20)
    monkeypatch.setattr(trio_federation.policy, "REMEMBERED_FOR_EACH", 2)
    settings = hub(policy("*", max_records=3))
    async with (
        simulated_federation("west", "east", hub_settings=settings) as fed,
        fed.connection("flood") as connection,
        connection.report() as call,
    ):
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        store = fed.hubs[0].hub._store
        for number in range(5):
            gone = [item(f"p{number}-{each}", age_ms=WITHDRAWN_AGE_MS) for each in range(30)]
            await call.send(ReportFederationRequest(items=gone))
            await trio.sleep(0.1)
            assert store.held()["tombstones"] == store.tombstones["flood"] == 20
        assert counted(fed.hubs[0].hub, BREACHES, cluster="flood", reason="too_many_records") == 5 * 30 - 20
        # A new record would be withdrawn one day; east's are let in.
        await call.send(ReportFederationRequest(items=[item("new", idle=1)]))
        fed["east"].source.set(member("east", "p2", idle=4))
        await fed.settle()
        assert fed["west"].idle("flood") == []
        assert fed["west"].idle("east") == [4]
        await trio.sleep(76.0)  # a TTL, and a quarter of one until it is freed
        assert "flood" not in store.tombstones
        for number in range(40):
            for age_ms in (0, WITHDRAWN_AGE_MS):
                items = [item(f"p{number}-{each}", idle=1, age_ms=age_ms) for each in range(3)]
                await call.send(ReportFederationRequest(items=items))
            await trio.sleep(0.1)
            assert store.tombstones["flood"] <= 20 + 3
        await trio.sleep(76.0)
        await call.send(ReportFederationRequest(items=[item("new", idle=1)]))
        await trio.sleep(0.5)
        assert fed["west"].idle("flood") == [1]
        assert dict(store.records) == {"east": 1, "flood": 1}
    assert [line["cluster"] for line in lines(logs, "policy_breach")] == ["flood"]


# --- how much at a time ----------------------------------------------------------------------------------------------


async def taken_until_refused(peer: HubConnection, records: int) -> int:
    """How many messages of so many records the hub takes, one after the other in no time worth mentioning, before it
    ends the call for one too many."""
    refused = trio.Event()

    async def wait_refused() -> None:
        with pytest.raises(ResourceExhausted, match="cluster 'peer' sends more than"):
            await call.wait_answered()
        refused.set()

    async with peer.report() as call, trio.open_nursery() as nursery:
        nursery.start_soon(wait_refused)
        for number in range(1000):
            await call.send(ReportFederationRequest(items=[item(f"p{each}") for each in range(records)]))
            await trio.sleep(0.001)
            if refused.is_set():
                return number
    raise AssertionError("the hub takes whatever comes")


async def test_too_many_messages_end_the_call_and_the_allowance_comes_back(autojump_clock: MockClock) -> None:
    """2 messages a second: what ten seconds allow at once, then no more, then two for each second that passes, over all
    calls of the cluster, each of which counts as one; another cluster has its own."""
    settings = hub(limits=Limits(message_rate=2))
    async with simulated_federation("west", "east", hub_settings=settings) as fed, fed.connection("peer") as peer:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        assert await taken_until_refused(peer, 1) == 19
        assert await taken_until_refused(peer, 1) == 0
        for pause, more in ((0.3, 0), (0.3, 0), (5.0, 9)):
            await trio.sleep(pause)
            assert await taken_until_refused(peer, 1) == more
            assert fed["west"].idle("east") == [3]
        await trio.sleep(60.0)
        async with fed.connection("peer") as again:
            assert await taken_until_refused(again, 1) == 19
        assert fed["west"].idle("east") == [3]
        assert counted(fed.hubs[0].hub, REFUSED, status="RESOURCE_EXHAUSTED") == 6


async def test_too_many_records_end_the_call_and_the_allowance_comes_back(autojump_clock: MockClock) -> None:
    """5 records a second, in messages of any size but one that is never allowed."""
    settings = hub(limits=Limits(record_rate=5))
    async with simulated_federation("west", "east", hub_settings=settings) as fed, fed.connection("peer") as peer:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        assert await taken_until_refused(peer, 10) == 5
        await trio.sleep(4.0)
        assert await taken_until_refused(peer, 10) == 2
        await trio.sleep(4.0)
        assert await taken_until_refused(peer, 1) == 20
        await trio.sleep(60.0)
        async with fed.connection("peer") as again:
            async with again.report() as call:
                await call.send(ReportFederationRequest(items=[item(f"p{each}") for each in range(51)]))
                with pytest.raises(ResourceExhausted, match="51 records in one message, more than 10 s of 5 records"):
                    await call.wait_answered()
            # Nothing of it was taken in, and nothing taken from the allowance.
            assert len(fed["west"].known("peer")) == 0
            assert await taken_until_refused(again, 50) == 1
        assert fed["west"].idle("east") == [3]


async def test_an_agent_that_reports_too_much_says_so_and_comes_again(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Its own log has the hub's words. When it has fewer records it is let in without anybody's help, once what it has
    withdrawn is forgotten, too."""
    settings = hub(limits=Limits(record_rate=5))
    async with simulated_federation("west", "east", hub_settings=settings) as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        fed["east"].source.set(*(member("east", f"p{number}", idle=3) for number in range(60)))
        await trio.sleep(60.0)
        assert fed["west"].known("east") == []
        told = [line["error"] for line in lines(logs, "hub_failed")]
        assert any(
            "cluster 'east' sends" in error and "raise record_rate in the hub's [hub.limits]" in error for error in told
        )
        fed["east"].source.set(member("east", idle=4))
        await trio.sleep(75.0)
        assert fed["west"].idle("east") == [4]


async def test_a_call_needs_a_first_message_in_time_and_a_connection_a_call(autojump_clock: MockClock) -> None:
    """15 s by default. After the first one there is no such deadline."""
    async with simulated_federation("west", hub_settings=hub()) as fed, AsyncExitStack() as stack:
        silent = await stack.enter_async_context(fed.connection("silent"))
        nothing = await stack.enter_async_context(fed.connection("nothing"))
        began = trio.current_time()
        async with silent.report() as call:
            await call.wait_accepted()
            assert fed.hubs[0].hub.health()["clusters"] == ["silent", "west"]
            # To an agent it is a reason to try again, like any other that passes by itself.
            with pytest.raises(Unavailable, match="no message within 15 s"):
                await call.wait_answered()
        assert counted(fed.hubs[0].hub, REFUSED, status="DEADLINE_EXCEEDED") == 1
        assert trio.current_time() - began == pytest.approx(15.0, abs=0.5)
        with pytest.raises(Unavailable, match="no call that was let in within 15 s"):
            raise await nothing.wait_closed()
        assert trio.current_time() - began == pytest.approx(15.0, abs=1.0)
        assert fed.hubs[0].hub.health()["clusters"] == ["west"]
        async with silent.report() as call:
            await call.send(ReportFederationRequest())
            await trio.sleep(300.0)
            assert fed.hubs[0].hub.health()["clusters"] == ["silent", "west"]


async def test_a_connection_is_kept_by_calls_that_are_let_in(autojump_clock: MockClock) -> None:
    """One of a stranger whose calls are all refused is ended, however many of them it makes; any other 15 s after it
    had its last call that was let in, and not while it has one."""
    async with simulated_federation("west", hub_settings=hub()) as fed, AsyncExitStack() as stack:
        began = trio.current_time()
        ended: dict[str, float] = {}

        async def note(name: str, connection: HubConnection) -> None:
            await connection.wait_closed()
            ended[name] = trio.current_time() - began

        stranger = await stack.enter_async_context(fed.connection("stranger", credential=""))
        good = await stack.enter_async_context(fed.connection("good"))
        for name, connection in (("stranger", stranger), ("good", good)):
            fed.nursery.start_soon(note, name, connection)
        async with good.report() as call, good.watch(WatchFederationRequest()) as watch:
            await call.send(ReportFederationRequest())
            await watch.receive()
            for _ in range(14):
                async with stranger.report() as refused:
                    with pytest.raises(Unauthenticated):
                        await refused.wait_answered()
                await trio.sleep(1.0)
            await trio.sleep_until(began + 30.0)
            await call.end()
            await call.wait_answered()
            await trio.sleep_until(began + 60.0)  # the watch goes on
        await trio.sleep_until(began + 70.0)
        async with good.watch(WatchFederationRequest()) as watch:
            await watch.receive()
        await trio.sleep_until(began + 100.0)
        assert ended == {"stranger": pytest.approx(15.0, abs=0.5), "good": pytest.approx(85.0, abs=0.5)}


async def test_to_open_a_report_costs_a_message_and_takes_nothing_where_it_is_refused(
    autojump_clock: MockClock,
) -> None:
    """Else a cluster without any allowance left could go on replacing its own reporter, whose records everybody would
    lose and get again. Nor does what it says of itself pile up: each time another uid."""
    settings = hub(limits=Limits(message_rate=1))
    async with simulated_federation("west", hub_settings=settings) as fed, AsyncExitStack() as stack:
        hub_itself = fed.hubs[0].hub
        let_in = 0
        for number in range(9):
            async with (
                fed.connection("peer", instance="aa", uid=f"u{number}") as connection,
                connection.report() as call,
            ):
                await call.wait_accepted()
                let_in += 1
            assert len(hub_itself._sessions._uids) <= 1
        live = await stack.enter_async_context(fed.connection("peer", instance="aa"))
        last = await stack.enter_async_context(live.report())
        await last.wait_accepted()
        for _ in range(5):
            async with fed.connection("peer", instance="aa") as connection, connection.report() as call:
                with pytest.raises(ResourceExhausted, match="'peer' sends more than 1 message a second"):
                    await call.wait_answered()
        assert let_in == 9
        assert counted(hub_itself, REFUSED, status="RESOURCE_EXHAUSTED") == 5
        # The last one that was let in is still the one that counts.
        await trio.sleep(3.0)
        await last.send(ReportFederationRequest(items=[item(idle=7)]))
        await trio.sleep(0.5)
        assert fed["west"].idle("peer") == [7]


async def test_an_agent_with_nothing_to_report_is_not_cut(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """It says that it has nothing, in a message of its own; so does one that knows nothing yet."""
    async with simulated_federation("west", "east", hub_settings=hub(), start=False) as fed:
        fed["east"].source.failure = OSError("not yet")
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(600.0)
        assert [fed[name].routes["hub-0"].dialled for name in fed.clusters] == [1, 1]
        assert lines(logs, "call_ended") == lines(logs, "reporter_left") == []
        assert fed.hubs[0].hub.health()["clusters"] == ["east", "west"]
        fed["east"].source.failure = None
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(60.0)
        assert fed["west"].idle("east") == [3]


async def test_a_cluster_has_so_many_calls_open_and_no_more(autojump_clock: MockClock) -> None:
    """Over all of its connections; when one ends, another is let in. Other clusters have theirs."""
    settings = hub(limits=Limits(streams=3))
    async with simulated_federation("west", "east", hub_settings=settings) as fed, AsyncExitStack() as stack:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        greedy = [await stack.enter_async_context(fed.connection("greedy")) for _ in range(2)]
        async with AsyncExitStack() as calls:
            for number in range(3):
                watch = await calls.enter_async_context(greedy[number % 2].watch(WatchFederationRequest()))
                assert [each.idle for each in (await watch.receive()).items] == [3]
            async with greedy[1].watch(WatchFederationRequest()) as one_more:
                with pytest.raises(ResourceExhausted, match="'greedy' has 3 calls open, and more are not served"):
                    await one_more.receive()
            async with greedy[0].report() as one_more_report:
                with pytest.raises(ResourceExhausted, match="raise streams in"):
                    await one_more_report.wait_answered()
            # A call that was refused takes nothing away, and who is not greedy comes and goes.
            await fed["east"].stop()
            fed["east"].source.set(member("east", idle=4))
            await fed["east"].start()
            await trio.sleep(1.0)
            assert fed["west"].idle("east") == [4]
        await trio.sleep(0.1)
        async with greedy[0].watch(WatchFederationRequest()) as again:
            assert [each.idle for each in (await again.receive()).items if each.observed_for_ms < WITHDRAWN_AGE_MS] == [
                4
            ]

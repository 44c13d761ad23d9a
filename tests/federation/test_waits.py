"""What waits on its way grows older: in links that are held, in peers that stand still, in queues and windows, towards
hubs and from them. And the signs of life that hubs give on a watch, by which an agent notices one that has died."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import structlog.testing
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import counted, item, lines, take_everything
from tests.process.running import PATIENCE, agent_file, hub_file, scrape, start
from tests.simulation import PushingSource, ScriptedHub, Simulation, member, sampled, simulated_federation
from trio_federation.agent import Agent
from trio_federation.config import Federation
from trio_federation.hub import Hub
from trio_federation.pb.sandbox.sync.v1 import (
    ClusterOrigin,
    FederationBroadcast,
    ReportFederationRequest,
    WatchFederationRequest,
)
from trio_federation.reporter import TO_ACCEPT
from trio_federation.rpc import IncomingReport, IncomingWatch, MemoryLink, WatchCall, tcp_dialer
from trio_federation.testing.invariants import AgesNeverShrink, NothingOutlivesItsTtl, every_invariant
from trio_federation.waits import microseconds
from trio_federation.wire import ReceivedBroadcast

#: ages travel as whole milliseconds, rounded down once for each of two hops
ROUNDING = 0.002
#: and what was quick is forgotten, by a millisecond in each second of a call's silence
FORGOTTEN = 0.02
#: seconds between two changes of what east says
PACE = 0.5
POOLS = 60
BATCH_WAIT = "trio_federation_hub_batch_wait_seconds"


def load(number: int, pools: int = POOLS) -> list[Any]:
    """What east says after so many changes; long names, so that little of it fills a window."""
    return [member("east", f"{'pool-with-a-long-name' * 3}-{pool:03}", idle=number) for pool in range(pools)]


async def keep_changing(source: PushingSource, pools: int = POOLS) -> None:
    """Change all that east has, again and again, until cancelled."""
    number = 0
    while True:
        number += 1
        source.set(*load(number, pools))
        source.push(*load(number, pools))
        await trio.sleep(PACE)


def claims(fed: Simulation, name: str) -> list[float]:
    """By how many seconds each of east's records that a cluster shows looks older than it is; below zero: younger."""
    assert fed.ledger is not None
    found = []
    for record in fed[name].known("east"):
        _, true_at = fed.ledger.vouched(record)
        assert true_at is not None
        assert record.observed_at is not None
        found.append(true_at - (record.observed_at - fed[name].clock_offset))
    return found


def waited(agent: Agent) -> float:
    """Seconds that the batches of all hubs together have waited."""
    return counted(agent, f"{BATCH_WAIT}_sum")


# --- a watcher that stands still -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["held", "not read"])
async def test_a_watcher_that_stood_still_shows_true_ages(
    how: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 12 s it takes in nothing, as its link is held, or as its own task does not read, while windows and buffers
    fill. What lay there is as old as it is when it is read, and the batches were on their way for that long."""
    gate = trio.Event()
    gate.set()
    real = WatchCall.receive

    async def receive(self: WatchCall) -> ReceivedBroadcast:
        await gate.wait()
        return await real(self)

    monkeypatch.setattr(WatchCall, "receive", receive)
    told: list[float] = []
    async with (
        simulated_federation(
            "west",
            "east",
            start=False,
            invariants=[AgesNeverShrink(rounding=FORGOTTEN), NothingOutlivesItsTtl()],
            check_every=0.25,
        ) as fed,
        trio.open_nursery() as nursery,
    ):
        fed["east"].more_sources["push"] = source = PushingSource()
        await fed["west"].start()
        await fed["east"].start()
        nursery.start_soon(keep_changing, source)
        await trio.sleep(6.1)
        assert waited(fed["west"].agent) < 0.1
        if how == "held":
            fed.partition("west", one_way="to_cluster")
        else:
            gate = trio.Event()
        await trio.sleep(12.0)
        assert min(fed["west"].ages("east")) > 11.8
        fed.heal("west")
        gate.set()
        for _ in range(40):
            await trio.sleep(0.05)
            told += claims(fed, "west")
        # Everything arrives, true to the rounding: also what had not waited at all.
        assert min(told) >= -ROUNDING - 1e-6
        assert max(told) <= 0.05
        assert max(fed["west"].ages("east")) < 2 * PACE
        assert fed["west"].routes["hub-0"].dialled == 1
        # At least the batch that came first had waited nearly all the time.
        assert waited(fed["west"].agent) > 11.0
        nursery.cancel_scope.cancel()


async def test_the_waits_of_a_slow_reader_behind_small_windows(autojump_clock: MockClock) -> None:
    """It takes one message a second, of a call whose windows are full. Each message tells when it was sent, so that
    what it waited is known, and once it reads on it has everything in its newest state, with true ages."""
    async with (
        simulated_federation("east", start=False, invariants=every_invariant()) as fed,
        trio.open_nursery() as nursery,
    ):
        fed["east"].more_sources["push"] = source = PushingSource()
        request = WatchFederationRequest(beat_ms=1000)
        async with fed.connection("slow") as connection, connection.watch(request) as call:
            first = await call.receive()
            began = trio.current_time()
            await fed["east"].start()
            nursery.start_soon(keep_changing, source)
            late = []
            for _ in range(30):
                await trio.sleep(1.0)
                message = await call.receive()
                sent_at = began + (message.sent_us - first.sent_us) / 1e6
                late.append(trio.current_time() - sent_at)
                if message.items:
                    ages = [each.observed_for_ms / 1000 + late[-1] for each in message.items]
                    assert min(ages) >= late[-1]
            # The queue before it is as long as the windows let it become, and no longer.
            assert late[-1] > 3.0
            assert max(late) < 20.0
        nursery.cancel_scope.cancel()


# --- a hub that stands still -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["both", "east", "west"])
async def test_a_hub_that_stood_still_makes_nothing_younger(who: str, autojump_clock: MockClock) -> None:
    """Nothing goes in or out of it for 9 s, nearly too long for everybody, or between it and one of them: what agents
    have sent to it lies in its buffers, and what it has sent in theirs."""
    async with simulated_federation("west", "east", invariants=every_invariant(), check_every=0.25) as fed:
        fed["east"].source.set(member("east", idle=1))
        await trio.sleep(9.9)
        fed["east"].source.set(member("east", idle=2))
        held = [name for name in ("east", "west") if who in (name, "both")]
        for name in held:
            fed.black_hole(name)
        await trio.sleep(9.0)
        assert fed["west"].idle("east") == [1]
        for name in held:
            fed.heal(name)
        told: list[float] = []
        for _ in range(30):
            await trio.sleep(0.05)
            told += claims(fed, "west")
        assert fed["west"].idle("east") == [2]
        assert told == pytest.approx([0.0] * len(told), abs=FORGOTTEN)
        assert [fed[name].routes["hub-0"].dialled for name in held] == [1] * len(held)
        if "west" in held:
            assert waited(fed["west"].agent) > 8.0


async def test_a_report_that_waits_in_the_flow_control_of_its_agent(autojump_clock: MockClock) -> None:
    """More than all windows and buffers take: its last messages are made before they can be sent. They are older by
    that when the hub reads them."""
    pools = 1500
    async with simulated_federation("west", "east", invariants=every_invariant()) as fed:
        await trio.sleep(9.0)
        fed.partition("east", one_way="to_hub")
        fed["east"].source.set(*[member("east", f"{'pool-' * 45}{number:04}") for number in range(pools)])
        await trio.sleep(9.0)
        reporter = fed["east"].agent.links[0].reporter
        assert reporter.reporting
        fed.heal("east")
        await trio.sleep(0.2)
        known = fed["west"].known("east")
        assert len(known) >= 1000
        told = claims(fed, "west")
        assert min(told) >= -ROUNDING - 1e-6
        assert max(told) <= ROUNDING
        await trio.sleep(11.0)
        assert len(fed["west"].known("east")) == pools
        assert max(fed["west"].ages("east")) < 16.0
        assert fed["east"].routes["hub-0"].dialled == 1


async def test_what_is_told_in_several_messages_is_told_as_of_one_moment(autojump_clock: MockClock) -> None:
    """Records of two instances of one cluster go into messages of their own. The second is made with the first, and
    sent when that was taken, here eight seconds later. Its ages are those of the moment that it names."""
    sent_at = {}
    async with simulated_federation(hubs=1) as fed:
        async with fed.connection("east", instance="aa") as connection, connection.report() as call:
            for instance, uptime in (("aa", 100_000), ("bb", 1_000)):
                row = ClusterOrigin(cluster_id="", instance=instance, uptime_ms=uptime)
                items = [item(f"{instance}-{'pool-' * 40}{number:03}", seq=1) for number in range(400)]
                await call.send(ReportFederationRequest(items=items, origins=[row]))
                sent_at[instance] = trio.current_time()
                await trio.sleep(1.0)
        hub = fed.hubs[0].hub
        async with fed.connection("lazy") as connection, connection.watch(WatchFederationRequest()) as watch:
            await trio.sleep(8.0)
            messages = [await watch.receive() for _ in range(2)]
        assert [[row.instance for row in message.origins] for message in messages] == [["aa"], ["bb"]]
        for message in messages:
            made_at = hub._began + message.sent_us / 1e6
            observed = {made_at - each.observed_for_ms / 1000 for each in message.items}
            assert max(observed) <= sent_at[message.origins[0].instance] + 0.001 + 1e-6


async def test_a_hub_that_answers_four_seconds_late(autojump_clock: MockClock) -> None:
    """It takes the connection and says nothing for four seconds. No call is opened before it speaks, so nothing waits,
    and nothing is older for it."""
    async with simulated_federation("west", "east", start=False, invariants=every_invariant()) as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed["west"].start()
        fed["east"].routes["hub-0"].hold()
        await fed["east"].start()
        await trio.sleep(4.0)
        assert counted(fed.hubs[0].hub, "trio_federation_hub_reporters") == 1.0  # west's
        fed["east"].routes["hub-0"].release()
        await trio.sleep(0.1)
        assert fed["west"].idle("east") == [3]
        assert fed["east"].routes["hub-0"].dialled == 1
        early = [each for shares in await sampled(4.0, lambda: claims(fed, "west")) for each in shares]
        assert early == pytest.approx([0.0] * len(early), abs=ROUNDING)
        await trio.sleep(20.0)
        late = [each for shares in await sampled(30.0, lambda: claims(fed, "west"), step=2.5) for each in shares]
        assert len(late) >= 12
        assert late == pytest.approx([0.0] * len(late), abs=0.05)


async def test_a_first_snapshot_that_waited(autojump_clock: MockClock) -> None:
    """A watcher's very first message lies in a buffer for eight seconds. Nothing came before it to be compared with
    but the opening of the connection."""
    async with simulated_federation("west", "east", start=False, invariants=every_invariant()) as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed["east"].start()
        await trio.sleep(3.0)
        fed.delay("west", 0.5)
        await fed["west"].start()
        # Dialled after 1.0 s, heard after 1.5; the hub has the call at 2.0, and its answer is on its way.
        await trio.sleep(2.2)
        fed["west"].routes["hub-0"].hold(to_hub=False)
        await trio.sleep(8.0)
        assert fed["west"].known("east") == []
        fed["west"].routes["hub-0"].release()
        await trio.sleep(0.01)
        (claim,) = claims(fed, "west")
        # All of it, and half a second for which the hub had not heard of the connection.
        assert claim == pytest.approx(0.5, abs=ROUNDING)
        assert fed["west"].ages("east")[0] > 8.5
        assert waited(fed["west"].agent) > 8.5


# --- longer than a TTL -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["to_hub", "to_cluster"])
async def test_a_call_whose_messages_wait_longer_than_the_ttl_is_opened_again(
    direction: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Nothing in them counts any more, and a connection with so much on its way is slower than a new one, over which
    everything is known again."""
    async with simulated_federation(
        "west", "east", ttl=12.0, hub_ttl=12.0, invariants=every_invariant(), check_every=0.25
    ) as fed:
        fed["east"].source.set(member("east", idle=1))
        await trio.sleep(4.0)
        fed["east"].source.set(member("east", idle=2))
        await trio.sleep(1.1)
        name = "east" if direction == "to_hub" else "west"
        fed.partition(name, one_way="to_hub" if direction == "to_hub" else "to_cluster")
        await trio.sleep(13.5)
        assert fed["west"].known("east") == []
        fed.heal(name)
        await trio.sleep(2.0)
        failed = [line for line in lines(logs, "hub_failed") if "on its way, and counts for 12 s only" in line["error"]]
        assert [line["call"] for line in failed] == ["connection"]
        assert fed[name].routes["hub-0"].dialled == 2
        # Again and again: a TTL that is hardly longer than a resync lets it run out now and then.
        assert fed["west"].idle("east") == [2]
        seen = await sampled(60.0, lambda: fed["west"].idle("east"), step=1.0)
        assert seen.count([2]) > 40
        assert seen.count([2]) + seen.count([]) == len(seen)


@pytest.mark.parametrize("ttl, held_for, deaf", [(4.0, 4.5, "agent"), (12.0, 13.0, "hub")])
async def test_an_opening_that_took_longer_than_the_ttl_does_no_lasting_harm(
    ttl: float, held_for: float, deaf: str, autojump_clock: MockClock
) -> None:
    """West hears of the hub, or the hub of west, so late after the connection was begun that everything on it counts as
    too old. What follows is another connection."""
    async with simulated_federation("west", "east", ttl=ttl, hub_ttl=ttl, start=False) as fed:
        fed["east"].source.set(member("east", idle=1))
        fed["west"].source.set(member("west", idle=2))
        await fed["east"].start()
        await trio.sleep(2.0)
        fed["west"].routes["hub-0"].hold(to_hub=deaf == "hub", to_cluster=deaf == "agent")
        await fed["west"].start()
        await trio.sleep(held_for)
        fed["west"].routes["hub-0"].release()
        await trio.sleep(2 * fed.settings.resync_interval)
        seen = await sampled(20.0, lambda: (fed["west"].idle("east"), fed["east"].idle("west")), step=0.5)
        assert ([1], [2]) in seen


# --- peers that do not tell the time ---------------------------------------------------------------------------------


async def test_an_older_hub_is_taken_at_its_word(autojump_clock: MockClock) -> None:
    """It tells no time, and gives no signs of life: what it says counts from its receipt on, as ever; its silence is no
    failure."""
    opened: list[float] = []

    async def watch(call: IncomingWatch) -> None:
        opened.append(trio.current_time())
        await call.request()
        await call.send(FederationBroadcast(items=[item(cluster="east", idle=3, age_ms=1500)]))
        await trio.sleep(2.0)
        await call.send(FederationBroadcast(items=[item(cluster="east", idle=4, age_ms=250)]))
        await trio.sleep_forever()

    older = ScriptedHub("older", take_everything, watch)
    async with simulated_federation("west", hubs=0, scripted_hubs=[older], ttl=1000.0) as fed:
        await trio.sleep(1.0)
        fed["west"].routes["older"].hold(to_hub=False)
        await trio.sleep(10.0)
        fed["west"].routes["older"].release()
        await trio.sleep(0.5)
        assert fed["west"].idle("east") == [4]
        assert fed["west"].ages("east") == pytest.approx([0.25 + 0.5], abs=ROUNDING)
        await trio.sleep(300.0)
        assert len(opened) == 1
        assert fed["west"].ages("east") == pytest.approx([300.75], abs=ROUNDING)
        assert waited(fed["west"].agent) == 0.0
        assert not fed["west"].agent.links[0].watcher.hub_beats


def one_minute_old(began: float, opened_at: float) -> ReportFederationRequest:
    """A report of an instance that has run for a minute, made now. `began`: the moment from which on its time counts;
    `opened_at`: when it has heard of the hub."""
    row = ClusterOrigin(cluster_id="", instance="aa", uptime_ms=60_000)
    message = ReportFederationRequest(items=[item(seq=1, age_ms=1000)], origins=[row])
    message.sent_us = microseconds(trio.current_time() - began)
    message.opened_us = microseconds(opened_at - began)
    return message


def of_east(hub: Hub) -> tuple[float, float]:
    """When the one record of a hub was observed, and when its agent started."""
    (record,) = hub.snapshot()
    assert record.observed_at is not None
    assert record.origin is not None
    return record.observed_at, record.origin.started_at


@pytest.mark.parametrize("stamped", [True, False], ids=["ours", "older"])
async def test_uptimes_grow_on_their_way_as_ages_do(stamped: bool, autojump_clock: MockClock) -> None:
    """What an agent says lies in a buffer for eight seconds. Of one that does not tell the time nobody knows."""
    link = MemoryLink(client="east (test)", server="hub-0")
    async with simulated_federation(hubs=1) as fed:
        began = trio.current_time() - 1.0
        async with fed.connection("east", instance="aa", link=link) as connection, connection.report() as call:
            await call.wait_accepted()
            await trio.sleep(0.5)
            assert call.accepted_at is not None
            link.hold(to_server=True, to_client=False)
            sent_at = trio.current_time()
            message = one_minute_old(began, call.accepted_at)
            if not stamped:
                message.sent_us = message.opened_us = 0
            await call.send(message)
            await trio.sleep(8.0)
            link.hold(to_server=False, to_client=False)
            await trio.sleep(0.1)
            taken_at = sent_at if stamped else sent_at + 8.0
            assert of_east(fed.hubs[0].hub) == pytest.approx((taken_at - 1.0, taken_at - 60.0), abs=0.001)


# --- what an agent says before it has heard the hub ------------------------------------------------------------------


class Heard(NamedTuple):
    """A message of a report: when it came, and what it tells of times; its records, by how many are idle."""

    at: float
    sent_us: int
    opened_us: int
    idle: list[int]
    withdrawn: int


class Listening:
    """A hub's report calls that take in what they are told. `accept_after`: for each call, seconds after which it says
    so; infinite: never, like an older hub's, which counts on for the calls that follow."""

    def __init__(self, *accept_after: float, pause: float = 0.0) -> None:
        self._accept_after = list(accept_after)
        #: seconds before each message is taken
        self._pause = pause
        #: by call, when it was opened and what it was told
        self.calls: list[tuple[float, list[Heard]]] = []

    async def report(self, call: IncomingReport) -> None:
        """One call, to its end."""
        heard: list[Heard] = []
        self.calls.append((trio.current_time(), heard))
        after = self._accept_after.pop(0) if len(self._accept_after) > 1 else self._accept_after[0]
        async with trio.open_nursery() as nursery:

            async def accept() -> None:
                await trio.sleep(after)
                await call.accept()

            nursery.start_soon(accept)
            while True:
                await trio.sleep(self._pause)
                message = await call.receive()
                if message is None:
                    break
                idle = [each.idle for each in message.items if each.observed_for_ms < 2**40]
                gone = len(message.items) - len(idle)
                heard.append(Heard(trio.current_time(), message.sent_us, message.opened_us, idle, gone))
            nursery.cancel_scope.cancel()
        await call.answer()


@asynccontextmanager
async def told_to(listening: Listening, pools: int = 1) -> AsyncIterator[Simulation]:
    """West, which has pools with 3 idle, and reports to such a hub."""

    async def watch(call: IncomingWatch) -> None:
        await call.request()
        await call.send(FederationBroadcast())
        await trio.sleep_forever()

    hub = ScriptedHub("listening", listening.report, watch)
    async with simulated_federation("west", hubs=0, scripted_hubs=[hub], start=False) as fed:
        fed["west"].source.set(*(member("west", f"p{number:05}", idle=3) for number in range(pools)))
        await fed["west"].start()
        yield fed


async def test_a_hub_that_accepts_late_is_told_everything_again(autojump_clock: MockClock) -> None:
    """It takes nothing that was told before, and has to know when it was heard before it is told anything that it
    takes."""
    listening = Listening(3.0, 0.0)
    async with told_to(listening) as fed:
        await trio.sleep(4.0)
        ((opened_at, heard),) = listening.calls
        before, after = heard[:2], heard[2:]
        assert [each.at - opened_at for each in before] == pytest.approx([TO_ACCEPT] * 2)
        assert [(each.opened_us, each.idle) for each in before] == [(0, []), (0, [3])]
        assert [each.at - opened_at for each in after] == pytest.approx([3.0] * 2)
        assert [each.idle for each in after] == [[], [3]]
        assert after[0].opened_us == after[0].sent_us
        assert after[1].opened_us == 0
        assert all(each.sent_us > 0 for each in heard)
        # Whatever was on its way then is not said twice, and from the next call on there is nothing to say twice.
        fed.cut("west")
        await trio.sleep(2.0)
        opened_at, heard = listening.calls[1]
        assert [(each.at - opened_at, each.idle, each.opened_us > 0) for each in heard] == [
            (0.0, [], True),
            (0.0, [3], False),
        ]


async def test_what_a_hub_will_not_take_is_not_told_to_its_end(autojump_clock: MockClock) -> None:
    """It accepts while it is being told everything, and reads slowly. Nor does what was told before count as told."""
    pools, pause = 10_000, 0.1
    listening = Listening(0.5, pause=pause)
    async with told_to(listening, pools) as fed:
        await trio.sleep(20 * pause)
        ((_, heard),) = listening.calls
        opening = next(number for number, each in enumerate(heard) if each.opened_us)
        before, after = heard[:opening], heard[opening:]
        assert 0 < sum(len(each.idle) for each in before) < pools
        # What was in flight when it accepted, and no more.
        assert before[-1].at <= 0.5 + 3 * pause
        assert sum(len(each.idle) for each in after) == pools
        assert counted(fed["west"].agent, "trio_federation_hub_reported_records_total") == pools


async def test_an_older_hub_is_told_everything_at_once(autojump_clock: MockClock) -> None:
    """It accepts nothing before the end, and is waited for only for a moment; also the one that follows on a hub that
    accepts."""
    listening = Listening(0.0, math.inf)
    async with told_to(listening) as fed:
        for waited_for in (0.0, TO_ACCEPT, TO_ACCEPT):
            await trio.sleep(waited_for + 4.0)
            opened_at, heard = listening.calls[-1]
            assert [each.at - opened_at for each in heard] == pytest.approx([waited_for] * 2)
            assert [each.idle for each in heard] == [[], [3]]
            fed.cut("west")
            await trio.sleep(1.0)
        assert len(listening.calls) == 4


async def test_a_goodbye_to_a_hub_that_was_never_heard_counts(autojump_clock: MockClock) -> None:
    """It is not said twice, so it does not tell the time, and is taken by hubs that would not take it otherwise."""
    listening = Listening(math.inf)
    async with told_to(listening) as fed:
        await trio.sleep(1.0)
        await fed["west"].stop()
        ((_, heard),) = listening.calls
        assert [(each.idle, each.withdrawn, each.sent_us > 0) for each in heard] == [
            ([], 0, True),
            ([3], 0, True),
            ([], 1, False),
        ]


async def test_a_goodbye_is_taken_from_who_has_not_heard_the_hub(autojump_clock: MockClock) -> None:
    """East comes back over a slow line, and stops before the hub's first word has reached it."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(6.0)
        assert fed["west"].idle("east") == [3]
        reporter = fed["east"].agent.links[0].reporter
        fed.delay("east", 0.5)
        fed.cut("east")
        await trio.sleep(0.01)
        while not reporter.reporting:  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert fed["west"].idle("east") == [3]
        stopped_at = trio.current_time()
        await fed["east"].stop()
        # There and back.
        assert trio.current_time() - stopped_at == pytest.approx(1.0, abs=0.1)
        assert fed["west"].known("east") == []


async def test_who_starts_while_nothing_reaches_the_hub_is_no_younger_for_it(autojump_clock: MockClock) -> None:
    """The hub talks, so the agent goes on and tells what it has; the hub reads that ten seconds later."""
    async with simulated_federation("west", "east", start=False, invariants=every_invariant(), check_every=0.1) as fed:
        await fed["west"].start()
        fed["east"].source.set(member("east", idle=3))
        fed.partition("east", one_way="to_hub")
        await fed["east"].start()
        await trio.sleep(10.0)
        fed.heal("east")
        for _ in range(100):
            await trio.sleep(0.1)
            assert all(claim >= -FORGOTTEN for claim in claims(fed, "west"))
        assert fed["west"].idle("east") == [3]


@pytest.mark.parametrize("delay", [0.05, 0.15, 0.5, 1.5])
async def test_who_starts_on_a_slow_line_is_no_younger_for_it(delay: float, autojump_clock: MockClock) -> None:
    """However long that takes: at the latest, what counts is told when it has heard the hub."""
    async with simulated_federation("west", "east", start=False, invariants=every_invariant(), check_every=0.05) as fed:
        await fed["west"].start()
        fed.delay("east", delay)
        fed["east"].source.set(member("east", idle=3))
        await fed["east"].start()
        # The connection there and back, the hub's word on it, the call there and back, what it has heard.
        await trio.sleep(6 * delay + 0.1)
        assert fed["west"].idle("east") == [3]
        # For as long as the opening counts, they look older by what that took: the way there and back.
        assert claims(fed, "west") == [pytest.approx(delay, abs=FORGOTTEN)]
        await trio.sleep(30.0)
        assert claims(fed, "west") == [pytest.approx(0.0 - delay, abs=FORGOTTEN)]


async def test_whoever_never_tells_when_it_heard_the_hub_is_not_taken(autojump_clock: MockClock) -> None:
    """Nor is it passed over in silence: once it should have told, its records count as dropped, with a line for the
    first. What it tells after it has told is taken."""
    with structlog.testing.capture_logs() as logs:
        async with simulated_federation("west", hubs=1) as fed, fed.connection("east", instance="aa") as connection:
            hub = fed.hubs[0].hub
            async with connection.report() as call:
                await call.wait_accepted()
                began = trio.current_time() - 1.0

                async def tell(*, opened: bool, idle: int) -> None:
                    message = ReportFederationRequest(items=[item(idle=idle)])
                    message.sent_us = microseconds(trio.current_time() - began)
                    message.opened_us = microseconds(1.0) if opened else 0
                    await call.send(message)
                    await trio.sleep(0.01)

                await tell(opened=False, idle=1)
                assert hub.snapshot() == []
                assert counted(hub, "trio_federation_records_dropped_total") == 0.0
                await trio.sleep(hub.settings.limits.first_message)
                for dropped in (1, 2):
                    await tell(opened=False, idle=1)
                    assert hub.snapshot() == []
                    assert counted(hub, "trio_federation_records_dropped_total", reason="unbounded_age") == dropped
                (line,) = lines(logs, "record_dropped")
                assert (line["log_level"], line["cluster"]) == ("warning", "east")
                assert "opened_us" in line["detail"]
                await tell(opened=True, idle=2)
                await tell(opened=False, idle=3)
                assert [record.idle for record in hub.snapshot()] == [3]
                assert counted(hub, "trio_federation_records_dropped_total") == 2.0


# --- signs of life ---------------------------------------------------------------------------------------------------


async def messages_of(fed: Simulation, beat_ms: int, seconds: float) -> list[tuple[float, ReceivedBroadcast]]:
    """What a watch with nothing to tell says in so many seconds, and when."""
    found = []
    request = WatchFederationRequest(beat_ms=beat_ms)
    async with fed.connection("quiet") as connection, connection.watch(request) as call:
        began = trio.current_time()
        with trio.move_on_after(seconds):
            while True:
                message = await call.receive()
                found.append((trio.current_time() - began, message))
    return found


async def test_a_hub_gives_a_sign_of_life_on_a_quiet_watch_to_who_asks(autojump_clock: MockClock) -> None:
    """As often as was asked for, but not more often than ten times a second, and nothing but the time is in it."""
    async with simulated_federation(hubs=1) as fed:
        (first_at, first_word), *told = await messages_of(fed, 2000, 60.0)
        assert first_at == 0.0
        assert first_word.opened_us > 0
        assert not first_word.items
        assert {message.opened_us for _, message in told} == {0}
        assert [moment for moment, _ in told] == pytest.approx([2.0 * number for number in range(31)][: len(told)])
        assert len(told) in (30, 31)
        assert all(not message.items and not message.origins for _, message in told)
        times = [message.sent_us for _, message in told]
        apart = [after - before for before, after in pairwise(times)]
        assert apart == pytest.approx([2_000_000] * len(apart), abs=1)
        assert len(await messages_of(fed, 1, 5.0)) in (51, 52)
        # Who does not ask gets its first snapshot, and nothing else.
        (moment, _) = (await messages_of(fed, 0, 600.0))[0]
        assert moment == 0.0
        assert len(await messages_of(fed, 0, 600.0)) == 1


async def test_signs_of_life_are_no_news(autojump_clock: MockClock) -> None:
    """An agent asks for them as often as it pings; they do not count as a batch, and leave nothing in the log."""
    async with simulated_federation("west", "east", start=False) as fed:
        await fed["west"].start()
        agent = fed["west"].agent
        assert agent.links[0].watcher.request.beat_ms == Federation().keepalive * 1000
        await trio.sleep(63.0)
        (hub,) = agent.health()["hubs"]
        assert hub["last_batch"] == pytest.approx(63.0, abs=0.1)
        assert agent.links[0].watcher.hub_beats
        # The first word, the snapshot, and twelve signs of life.
        assert counted(agent, f"{BATCH_WAIT}_count") == 14
        assert waited(agent) == 0.0


@pytest.mark.parametrize("beats", [True, False], ids=["ours", "older"])
async def test_a_watch_that_has_died_on_a_connection_that_lives(
    beats: bool, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """A proxy has forgotten it, say, while the hub answers pings and takes reports. Nothing but the missing signs of
    life tells; it is opened again after the silence limit, and the report goes on. With a hub that gives none, silence
    is nothing to go by."""
    opened: list[float] = []

    async def watch(call: IncomingWatch) -> None:
        opened.append(trio.current_time() - began)
        request = await call.request()
        assert request.beat_ms == 5000
        sent = FederationBroadcast(items=[item(cluster="east", idle=len(opened))])
        sent.sent_us = microseconds(trio.current_time()) if beats else 0
        await call.send(sent)
        await trio.sleep_forever()

    reports: list[IncomingReport] = []

    async def report(call: IncomingReport) -> None:
        reports.append(call)
        await take_everything(call)

    began = trio.current_time()
    hub = ScriptedHub("half dead", report, watch)
    async with simulated_federation("west", hubs=0, scripted_hubs=[hub]) as fed:
        await trio.sleep(14.9)
        assert len(opened) == 1
        await trio.sleep(45.0)
        assert fed["west"].routes["half dead"].dialled == 1
        assert len(reports) == 1
        failed = [line for line in lines(logs, "hub_failed") if "the watch was silent for 15 s" in line["error"]]
        if beats:
            # The silence limit, and a short delay that grows with each failure.
            assert 3 <= len(opened) <= 4
            assert opened[1] == pytest.approx(15.25, abs=0.26)
            assert {line["call"] for line in failed} == {"watch"}
        else:
            assert len(opened) == 1
            assert failed == []


# --- on real sockets -------------------------------------------------------------------------------------------------


async def capacity(port: int) -> tuple[float, list[dict[str, Any]]]:
    """What an agent says about east, and when it was asked, on this process' clock."""
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
        asked_at = trio.current_time()
        answer = await client.get(f"http://127.0.0.1:{port}/v1/capacity")
    found = json.loads(answer.text)["records"]
    return asked_at, [each for each in found if each["cluster_id"] == "east"]


@pytest.mark.slow
async def test_a_process_that_was_stopped_shows_nothing_younger_than_it_is(tmp_path: Path) -> None:
    """East changes ten times a second. An agent and then a hub, each a process of its own, stand still meanwhile. After
    that nothing that the agent shows is younger than it was said, by the clock of who has said it."""
    secret = "a-secret-of-more-than-32-characters"
    said_at: dict[int, float] = {}
    source = PushingSource()

    async def keep_saying() -> None:
        number = 0
        while True:
            number += 1
            said_at[number] = trio.current_time()
            source.set(member("east", idle=number))
            source.push(member("east", idle=number))
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        hub = await (await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=secret))).started()
        config = agent_file(tmp_path / "west.toml", "west", {"a": 1}, hub_port=hub.hub_port, secret=secret)
        west = await (await start(nursery, "run", config)).started()
        east = Agent(
            "east",
            Federation(),
            sources={"push": lambda: source},
            hubs={"hub": tcp_dialer("127.0.0.1", hub.hub_port)},
            credential=secret,
        )
        await nursery.start(east.run)
        nursery.start_soon(keep_saying)

        async def seen(wanted: Callable[[int], bool]) -> None:
            """Ask until the value that is shown is a wanted one; whatever is shown meanwhile is no younger than it
            is."""
            with trio.fail_after(PATIENCE):
                while True:
                    asked_at, found = await capacity(west.admin_port)
                    for each in found:
                        assert each["age"] >= asked_at - said_at[each["idle"]] - 2 * ROUNDING
                    if any(wanted(each["idle"]) for each in found):
                        return
                    await trio.sleep(0.02)

        async def newer() -> None:
            """Until something is shown that has not been said yet."""
            latest = len(said_at)
            await seen(lambda idle: idle > latest)

        await newer()
        for stopped, seconds in ((west, 2.0), (hub, 1.0)):
            stopped.send(signal.SIGSTOP)
            await trio.sleep(seconds)
            stopped.send(signal.SIGCONT)
            await newer()
        exposition = await scrape(west.metrics_port)
        (total,) = [line for line in exposition.splitlines() if line.startswith(f"{BATCH_WAIT}_sum")]
        assert float(total.split()[-1]) > 1.0
        nursery.cancel_scope.cancel()

"""A watcher that stalls costs nobody else anything, and loses no final state; and two hubs leave no gap."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import lines
from tests.simulation import PushingSource, Simulation, member, sampled, simulated_federation
from trio_federation.capacity import Capacity
from trio_federation.hub import Hub
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.reporter import DEBOUNCE
from trio_federation.samples import SampleTable
from trio_federation.wire import changes_of

POOLS = 100
#: seconds between two changes of everything
PACE = 0.5


def load(number: int) -> list[Capacity]:
    """The state of east's pools after so many changes; long names, so that little of it fills a window."""
    return [member("east", f"{'pool-with-a-long-name' * 3}-{pool:03}", idle=number) for pool in range(POOLS)]


async def push_load(source: PushingSource, *, changes: int, first: int = 1) -> None:
    """Change every pool `changes` times, and let `collect` tell the same."""
    for number in range(first, first + changes):
        source.set(*load(number))
        source.push(*load(number))
        await trio.sleep(PACE)


async def start_load(fed: Simulation, nursery: trio.Nursery, *, changes: int) -> None:
    """Let cluster "east" change for `changes` times `PACE` seconds."""
    source = PushingSource()
    fed["east"].more_sources["push"] = source
    await fed["east"].start()
    nursery.start_soon(lambda: push_load(source, changes=changes))


def waiting(hub: Hub) -> list[int]:
    """How many changes wait for each watcher of a hub, in the order of their coming."""
    return [len(watcher.outbox) for watcher in hub._watchers]


def newest(fed: Simulation, name: str) -> set[int]:
    """The values that one cluster knows of east's pools."""
    idle = fed[name].idle("east")
    return set(idle) if len(idle) in (0, POOLS) else {-1}


def test_a_watcher_that_does_not_read_delays_nobody() -> None:
    """semantics.md, "Hub": "A slow watcher costs nobody else anything": to the tenth of a second everybody else knows
    the same at the same time, whether or not there is one."""

    async def run(lazy: bool) -> list[set[int]]:
        async with (
            simulated_federation("west", "east", start=False) as fed,
            trio.open_nursery() as nursery,
            AsyncExitStack() as stack,
        ):
            await fed["west"].start()
            if lazy:
                connection = await stack.enter_async_context(fed.connection("lazy"))
                await stack.enter_async_context(connection.watch(WatchFederationRequest()))
            await start_load(fed, nursery, changes=40)
            await trio.sleep(0.037)  # so that nothing happens at the moment of a look
            seen = await sampled(22.0, lambda: newest(fed, "west"))
            assert (max(waiting(fed.hubs[0].hub)) > 0) is lazy
            nursery.cancel_scope.cancel()
        return seen

    alone = trio.run(run, False, clock=MockClock(autojump_threshold=0))
    assert trio.run(run, True, clock=MockClock(autojump_threshold=0)) == alone
    # Each value is there within the debounce of its change, and so every one of them is seen.
    assert set().union(*alone) - {-1} == set(range(1, 41))
    assert {len(values) for values in alone[10:]} == {1}


async def test_a_watcher_that_does_not_read_loses_no_final_state(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """semantics.md, "Hub": "what waits for it is conflated to the newest value per identity, so it loses no final
    state, and its memory is bounded by the number of identities. Windows and send buffers are small enough that
    conflation starts early"."""
    async with simulated_federation("west", "east", start=False) as fed, trio.open_nursery() as nursery:
        async with fed.connection("lazy") as connection, connection.watch(WatchFederationRequest()) as call:
            await start_load(fed, nursery, changes=60)
            lengths = await sampled(35.0, lambda: max(waiting(fed.hubs[0].hub), default=0), step=0.25)
            assert max(lengths) == POOLS
            # Now it reads: what was on its way, then the newest of everything, with all of its age.
            table = SampleTable(ttl=1000.0)
            messages = 0
            with trio.move_on_after(0.2):
                while True:
                    changes = changes_of(await call.receive(), trio.current_time()).changes
                    table.apply(changes, trio.current_time())
                    messages += 1
            truth = {record.identity: record for record in fed["east"].known("east")}
            held = {record.identity: record for record in table.fresh(trio.current_time())}
            assert {record.idle for record in held.values()} == {60}
            assert held.keys() == truth.keys()
            for identity, record in held.items():
                assert record.observed_at == pytest.approx(truth[identity].observed_at, abs=10.5)
            # Fewer than there were changes, by far: a window's worth and the rest in one go.
            assert messages <= 15
        await trio.sleep(0.1)
        left = lines(logs, "watcher_left")
        assert [line["cluster"] for line in left] == ["lazy"]
        assert left[0]["conflated"] > 30 * POOLS
        nursery.cancel_scope.cancel()


async def test_what_waited_for_a_watcher_is_as_old_as_it_is(autojump_clock: MockClock) -> None:
    """semantics.md, "Time": "Age only grows on its way: reporter's queue, hub's dwell, buffers": ages are made when a
    message is sent and not when it began to wait."""
    async with simulated_federation("east", start=False) as fed, trio.open_nursery() as nursery:
        async with fed.connection("lazy") as connection, connection.watch(WatchFederationRequest()) as call:
            await start_load(fed, nursery, changes=30)
            await trio.sleep(30 * PACE + 0.5)
            await fed["east"].kill()
            truth = {record.identity: record for record in fed.hubs[0].hub.snapshot()}
            await trio.sleep(20.0)
            table = SampleTable(ttl=1000.0)
            with trio.move_on_after(0.2):
                while True:
                    changes = changes_of(await call.receive(), trio.current_time()).changes
                    table.apply(changes, trio.current_time())
        held = list(table.fresh(trio.current_time()))
        assert {record.idle for record in held} == {30}
        for record in held:
            assert record.observed_at == pytest.approx(truth[record.identity].observed_at, abs=0.002)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("stall", [10.0, 40.0])
async def test_a_stalled_agent_ends_with_the_newest_state(stall: float, autojump_clock: MockClock) -> None:
    """A stalled link, for less and for more than the silence limit of 15 s: when it moves again the agent has what
    everybody has, and nobody else waited."""
    async with (
        simulated_federation("west", "north", "east", start=False) as fed,
        trio.open_nursery() as nursery,
    ):
        for name in ("west", "north"):
            await fed[name].start()
        await start_load(fed, nursery, changes=int((stall + 8.0) / PACE))
        await trio.sleep(4.0)
        fed["north"].routes["hub-0"].hold(to_hub=False)
        began = trio.current_time()
        seen = await sampled(
            stall, lambda: (trio.current_time(), newest(fed, "west"), max(waiting(fed.hubs[0].hub), default=0))
        )
        for now, values, length in seen:
            # What was pushed before the last debounce is there.
            assert min(values) >= int((now - DEBOUNCE - 0.01) / PACE)
            assert length <= POOLS
        assert trio.current_time() - began < stall + 0.1
        fed["north"].routes["hub-0"].release()
        await trio.sleep(0.3 if stall < 15.0 else 10.5)
        assert (fed["north"].routes["hub-0"].dialled == 1) is (stall < 15.0)
        assert newest(fed, "north") == newest(fed, "west")
        await trio.sleep(15.0)
        assert newest(fed, "north") == newest(fed, "west") == newest(fed, "east") == {int((stall + 8.0) / PACE)}
        nursery.cancel_scope.cancel()


async def test_two_hubs_of_which_one_is_killed_under_load_leave_no_gap(autojump_clock: MockClock) -> None:
    """semantics.md, "Agent": "the agent reports to and watches all of them; […] duplicates free and order irrelevant":
    at every tenth of a second every record is there, and no older than the change before the last."""
    async with (
        simulated_federation("west", "east", hubs=2, start=False) as fed,
        trio.open_nursery() as nursery,
    ):
        await fed["west"].start()
        await start_load(fed, nursery, changes=200)
        await trio.sleep(5.037)
        history: list[tuple[int, float]] = []

        def look() -> None:
            history.append((len(fed["west"].known("east")), max(fed["west"].ages("east"))))

        for number in (0, 1):
            fed.hubs[number].stop()
            await sampled(10.0, look)
            await fed.hubs[number].start()
            await sampled(15.0, look)
        assert {count for count, _ in history} == {POOLS}
        assert max(age for _, age in history) <= PACE + DEBOUNCE + 0.1
        assert [len(hub.hub.snapshot()) for hub in fed.hubs] == [POOLS, POOLS]
        nursery.cancel_scope.cancel()


async def test_a_hub_that_lags_does_not_bring_older_values_back(autojump_clock: MockClock) -> None:
    """Two hubs, one of them seconds behind: what it passes on late changes nothing, and values never go back."""
    async with (
        simulated_federation("west", "east", hubs=2, start=False) as fed,
        trio.open_nursery() as nursery,
    ):
        await fed["west"].start()
        await start_load(fed, nursery, changes=100)
        await trio.sleep(3.0)
        seen: list[int] = []
        for _ in range(4):
            fed["west"].routes["hub-1"].hold(to_hub=False)
            seen += await sampled(7.0, lambda: max(newest(fed, "west")))
            fed["west"].routes["hub-1"].release()
            seen += await sampled(3.0, lambda: max(newest(fed, "west")))
        assert seen == sorted(seen)
        assert seen[-1] > seen[0] + 60
        nursery.cancel_scope.cancel()

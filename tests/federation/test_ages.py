"""Time: ages add up on their way, nothing freshens them, and no clock but the agents' own counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from tests.simulation import Simulation, member, sampled, simulated_federation

#: ages travel as whole milliseconds, rounded down once for each of two hops
ROUNDING = 0.002


async def test_age_adds_up_through_the_hub(autojump_clock: MockClock) -> None:
    """semantics.md, "Time": "What a hub replays later carries the reported age plus the time it sat there"."""
    async with simulated_federation("west", "east", start=False) as fed:
        await trio.sleep(100.0)
        fed["east"].source.set(member("east", idle=3, observed_at=trio.current_time() - 7.0), frozen=True)
        await fed["east"].start()
        await trio.sleep(0.5)
        fed.partition("east")
        await trio.sleep(8.25)
        await fed["west"].start()
        await trio.sleep(0.1)
        assert fed["west"].ages("east") == pytest.approx([7.0 + 0.5 + 8.25 + 0.1], abs=ROUNDING)
        # The same hub tells it once more, to the same agent and to a new one.
        fed["west"].routes["hub-0"].cut()
        await fed.add("north").start()
        await trio.sleep(0.9)
        for name in ("west", "north"):
            assert fed[name].ages("east") == pytest.approx([7.0 + 0.5 + 8.25 + 1.0], abs=ROUNDING)


async def test_a_replay_never_freshens(autojump_clock: MockClock) -> None:
    """C35: "b last heard at t=0, TTL 60; the watch reconnects every 5 s and the hub replays b each time; the agent
    restarts at t=40"; right: "b gone by t=60 plus tolerance"."""
    async with simulated_federation("west", "east", ttl=60.0, hub_ttl=60.0, grace=60.0) as fed:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(5.5)
        await fed["east"].kill()
        last_true = fed["west"].known("east")[0].observed_at
        assert last_true is not None
        history = []
        for step in range(14):
            if step == 8:
                await fed["west"].kill()
                await fed["west"].start()
            else:
                fed["west"].routes["hub-0"].cut()
            history += await sampled(5.0, lambda: (trio.current_time(), fed["west"].ages("east")))
        assert fed["west"].routes["hub-0"].dialled >= 10
        shown = [(now, ages) for now, ages in history if ages]
        for now, ages in shown:
            assert ages == pytest.approx([now - last_true], abs=ROUNDING)
        # There all the time, but for moments without a connection just after a start, and gone at the end of its TTL.
        assert len([now for now, _ in history if now <= last_true + 60.0]) - len(shown) <= 5
        assert 59.0 < shown[-1][0] - last_true <= 60.0 + ROUNDING


async def story(fed: Simulation, disturb: Callable[[], None]) -> list[object]:
    """A small eventful history, as everybody sees it, with something in the midst of it that should not matter."""
    fed["east"].source.set(member("east", idle=3), member("east", "p2", idle=1))
    fed["west"].source.set(member("west", idle=1))
    for cluster in fed.clusters.values():
        await cluster.start()

    def look() -> object:
        return [(round(trio.current_time(), 3), cluster.registry.snapshot()) for cluster in fed.clusters.values()]

    seen = await sampled(7.05, look, step=0.5)
    disturb()
    fed["east"].source.set(member("east", idle=9))
    seen += await sampled(8.0, look, step=0.5)
    await fed["east"].kill()
    return seen + await sampled(35.0, look, step=0.5)


@pytest.mark.parametrize("jump", [86400.0, -86400.0])
def test_the_wall_clock_does_not_matter(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """C31: "wall clock +/- 1 h", right: "no change"; semantics.md, "Time": "No wall clock crosses the wire"."""
    wall = [1.7e9]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    monkeypatch.setattr(time, "time_ns", lambda: int(wall[0] * 1e9))

    async def run(by: float) -> list[object]:
        def disturb() -> None:
            wall[0] += by

        async with simulated_federation("west", "east", start=False) as fed:
            return await story(fed, disturb)

    undisturbed = trio.run(run, 0.0, clock=MockClock(autojump_threshold=0))
    assert trio.run(run, jump, clock=MockClock(autojump_threshold=0)) == undisturbed
    assert wall == [1.7e9 + jump]


async def test_an_hour_of_suspend_expires_what_is_foreign_at_the_first_query(autojump_clock: MockClock) -> None:
    """C31: "1 h suspend", right: "expired before the first routing answer; age never negative". And the suspended
    cluster's own wake-up heals: nobody else loses anything."""
    async with simulated_federation("west", "east", "north") as fed:
        for number, name in enumerate(("west", "east", "north")):
            fed[name].source.set(member(name, idle=number))
        await trio.sleep(12.5)
        best = fed["west"].registry.best_foreign_member("ns", "env")
        assert best is not None
        assert best.target == "north::p1"
        fed["west"].clock_offset += 3600.0
        assert fed["west"].registry.best_foreign_member("ns", "env") is None
        assert fed["west"].registry.foreign_members("ns", "env") == []
        assert fed["west"].router.place("ns", "env").local

        others = [("east", "north"), ("north", "east"), ("east", "west"), ("north", "west")]

        def look() -> tuple[list[float], list[float]]:
            ours = [age for of in ("west", "east", "north") for age in fed["west"].ages(of)]
            return ours, [age for name, of in others for age in fed[name].ages(of)]

        history = await sampled(60.0, look)
        for ours, theirs in history:
            assert min(ours, default=0.0) >= 0.0
            assert len(theirs) == len(others)
            assert min(theirs) >= 0.0
        # Healed with the next collect here, and the next resync of the others.
        assert [len(ours) for ours, _ in history[105:]] == [3] * len(history[105:])


async def test_an_hour_of_suspend_of_a_hub_harms_nobody_for_longer_than_a_resync(autojump_clock: MockClock) -> None:
    """A hub that wakes up has lost everything, like one that was restarted: what agents hold stays, and the next
    resync fills it again."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(12.5)
        fed.hubs[0].clock_offset += 3600.0
        assert fed.hubs[0].hub.snapshot() == []
        assert all(await sampled(30.0, lambda: fed["west"].idle("east") == [3]))
        assert [record.idle for record in fed.hubs[0].hub.snapshot()] == [3]
        assert max(fed["west"].ages("east")) <= 16.0


async def test_foreign_clocks_may_stand_anywhere(autojump_clock: MockClock) -> None:
    """semantics.md, "Time": "On the wire time is relative": clocks that are a year apart tell the same ages."""
    async with simulated_federation("west", "east", start=False) as fed:
        fed["west"].clock_offset = 3.2e7
        fed["east"].source.set(member("east", idle=3))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(7.25)
        await fed["east"].kill()
        await trio.sleep(1.0)
        # Collected at 5 s, and told by the first resync, which comes early.
        assert fed["west"].ages("east") == pytest.approx([3.25], abs=ROUNDING)

"""Chaos: a fleet of real processes, to which everything is done that networks and machines do. Whatever happens, no
registry shows anything false, everything heals by itself, and nothing is left behind."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.chaos.faults import DECK, HUB, SEVERAL, Kind, Script, script
from tests.chaos.fleet import (
    HEAL_WITHIN,
    POOLS,
    SLACK,
    SPARE_THREADS,
    TTL,
    Census,
    Figures,
    Fleet,
    Result,
    is_fault,
    left_over,
    open_fleet,
    run_rounds,
)
from tests.chaos.namespaces import Namespace, NoNamespaces, namespaces
from tests.chaos.oracle import Answer, Seen

AGENTS = ("a", "b", "c", "d")
#: One whose faults take little time in all, and yet are longer than the silence limit where that matters.
SEED = 3473
#: Names the rounds to run instead of those of a seed, as their names in what failed: "357/3", or several with commas.
VARIABLE = "CHAOS_ROUNDS"
#: Decks of rounds in a soak: 200 rounds.
DECKS = 200 // DECK


def chosen(environment: Mapping[str, str], otherwise: Sequence[Script]) -> Sequence[Script]:
    """The rounds to run."""
    names = [name.partition("/") for name in environment.get(VARIABLE, "").split(",") if name]
    return [script(int(seed), int(number), AGENTS) for seed, _, number in names] or otherwise


def deck(seed: int, first: int) -> list[Script]:
    """Rounds with every kind of fault."""
    return [script(seed, first + index, AGENTS) for index in range(DECK)]


async def check_rounds(folder: Path, rounds: Sequence[Script], figures: list[Figures]) -> None:
    """Run them, and fail for what was wrong in any."""
    wrong = await run_rounds(folder, rounds, AGENTS, lambda result: figures.append(result.figures))
    assert not wrong, "\n".join([*wrong, f"To run a round again, set {VARIABLE} to its name."])


@pytest.mark.slow
async def test_nothing_false_nothing_lost_everything_heals(tmp_path: Path) -> None:
    await check_rounds(tmp_path, chosen(os.environ, deck(SEED, 0)), [])


@pytest.mark.soak
@pytest.mark.parametrize("number", range(DECKS))
async def test_it_does_so_for_long(tmp_path: Path, number: int, soak_seed: int, chaos_figures: list[Figures]) -> None:
    await check_rounds(tmp_path, chosen(os.environ, deck(soak_seed, number * DECK)), chaos_figures)


@pytest.mark.slow
async def test_a_link_is_taken_down(tmp_path: Path) -> None:
    """What is lost here are packets: neither side is told anything."""
    try:
        with namespaces(2) as made:
            await break_links(tmp_path, made)
    except NoNamespaces as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


async def break_links(folder: Path, made: Sequence[Namespace]) -> None:
    """A link that is down for a moment, and then all of them for longer than anything is known."""

    async def down(side: str, length: float, broken: Sequence[Namespace]) -> None:
        for each in broken:
            each.take_down(side)
        await trio.sleep(length)
        for each in broken:
            each.bring_up(side)

    places = {"a": made[0].place, "b": made[1].place}
    async with open_fleet(folder, SEED, ("a", "b", "c"), places=places) as fleet:
        short = await fleet.during(lambda: down("here", 1.0, made[:1]), label="link", text="a link is down for 1 s")
        long = await fleet.during(
            lambda: down("there", TTL + 1.0, made), label="link", text="two links are down for longer than a TTL"
        )
        assert [*short.troubles, *long.troubles, *await fleet.stop()] == []
    # Who could not be heard was forgotten meanwhile, by those behind the links and by the one that is not.
    assert long.figures.expired == 6 * len(POOLS)
    assert long.figures.noticed is not None


# The scripts, and those who judge.


def test_a_deck_has_every_kind_and_is_the_same_each_time() -> None:
    for seed in range(20):
        drawn = deck(seed, 3 * DECK)
        assert drawn == deck(seed, 3 * DECK)
        assert {each.label for each in drawn} == {kind.value for kind in Kind} | {SEVERAL}
        for each in drawn:
            assert each.faults[0].begin == 0.0
            # Nobody is hit twice in a round: one fault's end would end the other.
            for lines in (True, False):
                hit = [target for fault in each.faults for target in fault.targets if fault.is_of_lines is lines]
                assert len(hit) == len(set(hit))
            for fault in each.faults:
                assert fault.targets
                assert set(fault.targets) <= {HUB, *AGENTS}


def test_rounds_are_asked_for_by_their_names() -> None:
    other = [script(1, 1, AGENTS)]
    assert chosen({}, other) == other
    (first, second) = chosen({VARIABLE: "357/3,5/0"}, other)
    assert [first, second] == [script(357, 3, AGENTS), script(5, 0, AGENTS)]
    assert [first.name, second.name] == ["357/3", "5/0"]


class MadeUp:
    """A fleet of which nothing runs: what its registries show is made up here."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        #: by cluster: what is true
        self.truth: dict[str, int] = {}
        self.said_before: dict[str, int] = {}

    def say(self) -> None:
        """Every cluster has another number now."""
        self.said_before = dict(self.truth)
        for name in self.fleet.agents:
            self.truth[name] = self.fleet.oracle.next_value(name)
            self.fleet.oracle.said(name, trio.current_time(), trio.current_time())

    def show(self, observer: str, **otherwise: Seen | None) -> None:
        """A registry shows what is true, but for these clusters, or without them."""
        shown = {name: Seen(value, 0.0) for name, value in self.truth.items()} | otherwise
        records = {(name, pool): seen for name, seen in shown.items() if seen is not None for pool in POOLS}
        self.fleet.take(Answer(observer, trio.current_time(), trio.current_time(), records))

    async def go_on(self) -> None:
        """What is true is shown, all the time."""
        while True:
            self.say()
            for name in self.fleet.agents:
                self.show(name)
            await trio.sleep(0.2)


async def judged(folder: Path, act: Callable[[MadeUp], Awaitable[None]], *, heals: bool = True) -> Result:
    """What is said of a round in which this happens."""
    async with trio.open_nursery() as nursery:
        fleet = Fleet(folder, nursery, random.Random(1), ("a", "b"), places={})
        made_up = MadeUp(fleet)
        made_up.say()
        try:
            async with trio.open_nursery() as after:

                async def happen() -> None:
                    await act(made_up)
                    if heals:
                        after.start_soon(made_up.go_on)

                result = await fleet.during(happen, label="made up", text="something happens")
                after.cancel_scope.cancel()
            return result
        finally:
            fleet.close()


async def test_a_round_in_which_nothing_is_wrong(tmp_path: Path, autojump_clock: MockClock) -> None:
    async def act(made_up: MadeUp) -> None:
        for _ in range(20):
            made_up.say()
            await trio.sleep(1)
            for name in ("a", "b"):
                made_up.show(name)

    result = await judged(tmp_path, act)
    assert result.troubles == []
    healed = result.figures.healed
    assert result.figures == Figures("made up", None, healed, lost=0, false=0, expired=0, younger=0.0)
    assert healed is not None
    assert healed < 0.5


async def shows_what_is_over(made_up: MadeUp) -> None:
    made_up.say()
    await trio.sleep(TTL + SLACK + 0.1)
    made_up.show("a", b=Seen(made_up.said_before["b"], TTL))
    made_up.show("a", b=Seen(made_up.said_before["b"], TTL))


async def shows_the_dead(made_up: MadeUp) -> None:
    made_up.fleet.oracle.died("b", trio.current_time())
    await trio.sleep(TTL + SLACK + 0.1)
    made_up.show("a")
    made_up.fleet.oracle.lives("b")


async def shows_what_nobody_said(made_up: MadeUp) -> None:
    made_up.show("a", b=Seen(made_up.truth["b"] + 1, 0.0))


async def shows_as_new_what_is_not(made_up: MadeUp) -> None:
    made_up.say()
    await trio.sleep(SLACK + 0.2)
    made_up.show("a", b=Seen(made_up.said_before["b"], 0.1))


@pytest.mark.parametrize(
    "act, kind",
    [
        (shows_what_is_over, "old, 6 times"),
        (shows_the_dead, "dead, 3 times"),
        (shows_what_nobody_said, "unsaid, 3 times"),
        (shows_as_new_what_is_not, "younger, 3 times"),
    ],
)
async def test_what_is_false_is_told_and_counted_once(
    tmp_path: Path, autojump_clock: MockClock, act: Callable[[MadeUp], Awaitable[None]], kind: str
) -> None:
    result = await judged(tmp_path, act)
    assert [trouble.partition(";")[0] for trouble in result.troubles][:1] == [kind]
    assert result.figures.false == len(POOLS)
    assert "wrong: " + kind in str(result)


async def test_an_agent_that_forgets_itself_is_told_of(tmp_path: Path, autojump_clock: MockClock) -> None:
    async def act(made_up: MadeUp) -> None:
        made_up.show("a", a=None)  # it may not have looked yet
        made_up.show("a")
        made_up.show("a", a=None)

    (trouble,) = (await judged(tmp_path, act)).troubles
    assert trouble.startswith("own, 1 times")


async def test_records_that_do_not_come_back_are_lost(tmp_path: Path, autojump_clock: MockClock) -> None:
    async def act(made_up: MadeUp) -> None:
        for name in ("a", "b"):
            made_up.show(name)

    result = await judged(tmp_path, act, heals=False)
    # What was known before the end of the last fault proves nothing.
    assert result.figures.lost == 4 * len(POOLS)
    assert result.figures.healed is None
    assert f"{HEAL_WITHIN:g} s after the last fault a does not know what is true in b" in result.troubles


def test_what_is_left_behind_is_named() -> None:
    well = [Census(10, 3, Counter(run=2)), Census(11, 3, Counter(run=1, ask=1))]
    assert left_over(well, Census(11, 3 + SPARE_THREADS, Counter(run=2, ask=1))) == ""
    left = left_over(well, Census(12, 4 + SPARE_THREADS, Counter(run=3, stray=2)))
    assert left == "12 descriptors, 11 before; 6 threads, 3 before; tasks: 1 run, 2 stray"


def test_faults_of_the_program_are_told_from_what_it_logs() -> None:
    assert [is_fault(line) for line in ('{"level": "warning", "event": "x"}', '{"level": "debug"}')] == [False, False]
    for line in ("", "Traceback (most recent call last):", '{"level": "error"}', '{"level": "info", "e": "Traceback"}'):
        assert is_fault(line)

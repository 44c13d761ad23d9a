"""Trio's order, seeded: what `scheduling.py` reaches into is there in every Trio that we support, and does what it is
said to do; the order follows from the seed and from nothing else; and afterwards Trio is as it was."""

from __future__ import annotations

import tomllib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio._core._run as trio_run
from packaging.requirements import Requirement
from trio.testing import MockClock

from trio_federation.testing import scheduling
from trio_federation.testing.scheduling import KNOWN, seeded_scheduling

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

#: What is replaced in Trio.
REPLACED = ((trio_run, "_r"), (trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING"), (trio_run, "CancelStatus"))


def simulated(test: Callable[[], Awaitable[list[int]]]) -> list[int]:
    """What an async function returns on virtual time."""
    return trio.run(test, clock=MockClock(autojump_threshold=0))


async def order_of_tasks(seed: object, *, count: int = 8, rounds: int = 3) -> list[int]:
    """In which order tasks run that are always ready together."""
    ran: list[int] = []

    async def run(number: int) -> None:
        for _ in range(rounds):
            ran.append(number)
            await trio.sleep(1.0)

    with seeded_scheduling(seed):
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(run, number)
    return ran


# --- the Trio that we support ----------------------------------------------------------------------------------------


def test_this_trio_is_a_known_one() -> None:
    """The dependency bounds begin with the first version that is known, and the one that runs these tests is known."""
    needed = [Requirement(each) for each in tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]]
    (bounds,) = [each.specifier for each in needed if each.name == "trio"]
    assert [str(each) for each in bounds if each.operator == ">="] == [f">={KNOWN[0]}"]
    assert all(bounds.contains(version) for version in KNOWN)
    assert bounds.contains(trio.__version__)
    assert ".".join(trio.__version__.split(".")[:2]) in KNOWN, (
        f"Trio {trio.__version__} is new: see whether its _core/_run.py still runs tasks, cancels them and keeps "
        "deadlines as trio_federation/testing/scheduling.py says; run the tests of determinism; then add it to KNOWN"
    )


def test_an_unknown_trio_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody knows, nobody promises."""
    monkeypatch.setattr(trio, "__version__", "0.99.1")
    with pytest.warns(RuntimeWarning, match=r"two runs with the same seed may differ, as this is Trio 0\.99\.1"):
        simulated(partial(order_of_tasks, 0))


def test_a_trio_that_has_changed_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is missing, and what to do; nothing is left half replaced."""
    before = [getattr(owner, name) for owner, name in REPLACED]
    monkeypatch.delattr(trio_run.Deadlines, "add")
    with (
        pytest.raises(RuntimeError, match=r"has no Deadlines\.add; install Trio 0\.35") as raised,
        seeded_scheduling(0),
    ):
        pass
    assert "\n" not in str(raised.value)
    assert [getattr(owner, name) for owner, name in REPLACED] == before


def test_trio_asks_our_generator_and_only_where_the_flag_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag has Trio hand over whole batches; without it, it draws one number per batch, to reverse it or not."""
    asked: list[int] = []
    shuffle = scheduling._Order.shuffle

    def counting(order: scheduling._Order, batch: list[trio.lowlevel.Task]) -> None:
        asked.append(len(batch))
        shuffle(order, batch)

    monkeypatch.setattr(scheduling._Order, "shuffle", counting)
    simulated(partial(order_of_tasks, 0))
    assert max(asked) == 8

    async def without_flag() -> list[int]:
        with seeded_scheduling(0):
            trio_run._ALLOW_DETERMINISTIC_SCHEDULING = False  # type: ignore[misc]
            asked.clear()
            return await order_of_tasks(0)

    simulated(without_flag)
    assert asked == []


def test_trio_hands_over_tasks_in_the_order_of_their_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has woken them: here one event that all of them wait for, whose waiters are a set."""
    batches: list[list[str]] = []
    monkeypatch.setattr(scheduling._Order, "shuffle", lambda _, batch: batches.append([task.name for task in batch]))

    async def test() -> list[int]:
        with seeded_scheduling(0):
            event = trio.Event()
            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(event.wait, name=f"{number:02d}")
                await trio.sleep(1.0)
                batches.clear()
                event.set()
        return []

    simulated(test)
    (woken,) = [batch for batch in batches if len(batch) > 10]
    assert woken == [f"{number:02d}" for number in range(50)]


# --- the order -------------------------------------------------------------------------------------------------------


def test_the_order_follows_from_the_seed() -> None:
    """The same one for the same seed, whatever has run or was drawn before in this process, and others for others."""
    orders = {}
    for seed in range(20):
        orders[seed] = simulated(partial(order_of_tasks, seed))
        trio_run._r.random()
    for seed, order in orders.items():
        assert simulated(partial(order_of_tasks, seed)) == order
    assert len({tuple(order) for order in orders.values()}) == 20


def test_every_order_comes_up() -> None:
    """Nothing is hidden by seeding: each of three tasks is the first as often as the others."""
    firsts = [simulated(partial(order_of_tasks, seed, count=3, rounds=1))[0] for seed in range(300)]
    assert all(70 < firsts.count(number) < 130 for number in range(3))


@pytest.mark.parametrize("seed", range(5))
def test_other_tasks_change_nothing(seed: int) -> None:
    """Tasks of the test that were there before, and are ready in the same moments."""

    async def among_others() -> list[int]:
        async def other() -> None:
            for _ in range(100):
                await trio.sleep(0.5)

        async with trio.open_nursery() as nursery:
            for _ in range(7):
                nursery.start_soon(other)
            await trio.testing.wait_all_tasks_blocked()
            order = await order_of_tasks(seed)
            nursery.cancel_scope.cancel()
        return order

    assert simulated(among_others) == simulated(partial(order_of_tasks, seed))


def test_two_at_a_time_do_not_disturb_each_other() -> None:
    """Each has an order of its own, whoever ends first."""
    orders: dict[int, list[int]] = {}

    async def keep(seed: int, rounds: int) -> None:
        orders[seed] = await order_of_tasks(seed, rounds=rounds)

    async def both() -> list[int]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep, 1, 3)
            nursery.start_soon(keep, 2, 6)
        return []

    simulated(both)
    assert orders[1] == simulated(partial(order_of_tasks, 1, rounds=3))
    assert orders[2] == simulated(partial(order_of_tasks, 2, rounds=6))


# --- what is cancelled together --------------------------------------------------------------------------------------


async def _wait(number: int, aborted: list[int]) -> None:
    """Wait to be cancelled, and note when that is asked for: not in the task, but by whoever cancels."""

    def abort(_: object) -> trio.lowlevel.Abort:
        aborted.append(number)
        return trio.lowlevel.Abort.SUCCEEDED

    await trio.lowlevel.wait_task_rescheduled(abort)


async def _wait_in_a_scope(number: int, aborted: list[int], scope: trio.CancelScope) -> None:
    with scope:
        await _wait(number, aborted)


async def cancelled_tasks(scopes: Callable[[int], trio.CancelScope | None]) -> list[int]:
    """In which order tasks are cancelled, by their nursery, that were made in the order of their numbers and have begun
    in another one."""
    aborted: list[int] = []
    with seeded_scheduling(0):
        async with trio.open_nursery() as nursery:
            made = []
            for number in range(50):
                scope = scopes(number)
                if scope is None:
                    nursery.start_soon(_wait, number, aborted)
                else:
                    made.append(scope)
                    nursery.start_soon(_wait_in_a_scope, number, aborted, scope)
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()
    return aborted


async def scopes_with_one_deadline() -> list[int]:
    """In which order scopes are cancelled that have one deadline, and were entered in the order of their numbers."""
    aborted: list[int] = []
    with seeded_scheduling(0):
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(_wait_in_a_scope, number, aborted, trio.CancelScope(deadline=10.0))
                await trio.sleep(0.01)
    return aborted


def test_tasks_are_cancelled_in_the_order_of_their_making() -> None:
    """Trio goes through a set of them."""
    assert simulated(partial(cancelled_tasks, lambda _: None)) == list(range(50))


def test_scopes_are_cancelled_in_the_same_order_every_time() -> None:
    """Trio goes through a set of them, too; here in the order in which they were entered, which the seed decides."""
    orders = {tuple(simulated(partial(cancelled_tasks, lambda _: trio.CancelScope()))) for _ in range(5)}
    assert len(orders) == 1
    assert sorted(orders.pop()) == list(range(50))


def test_what_has_one_deadline_is_cancelled_in_the_order_of_its_making() -> None:
    """Trio compares addresses there."""
    assert simulated(scopes_with_one_deadline) == list(range(50))


def test_trio_by_itself_has_no_such_order() -> None:
    """Else there would be nothing to replace."""

    async def test() -> list[int]:
        with trio.fail_at(10.0) as scope:
            await trio.lowlevel.checkpoint()
            status = scope._cancel_status
            assert type(status) is trio_run.CancelStatus
            assert [type(each) for each in (status._tasks, status._children)] == [set, set]
            assert [entry[1] for entry in trio_run.GLOBAL_RUN_CONTEXT.runner.deadlines._heap] == [id(scope)]
        return []

    simulated(test)


# --- afterwards ------------------------------------------------------------------------------------------------------


def test_afterwards_trio_is_as_it_was() -> None:
    """After the outermost, also where it has failed; and Trio draws by lot from where it was."""
    places = (*REPLACED, (trio_run.Deadlines, "add"))
    before = [getattr(owner, name) for owner, name in places]
    drawn = trio_run._r.getstate()

    def unchanged() -> bool:
        return all(getattr(owner, name) is value for (owner, name), value in zip(places, before, strict=True))

    def fail() -> None:
        with seeded_scheduling(1):
            with seeded_scheduling(2):
                pass
            assert not unchanged()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert unchanged()
    assert trio_run._r.getstate() == drawn

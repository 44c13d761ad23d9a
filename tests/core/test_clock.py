"""The process's one clock: boot time, Trio running on it, and what can be given as a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import trio
import trio.testing

from trio_federation import clock as clock_module
from trio_federation.clock import LONGEST_SLEEP, BootClock, as_clock, boot_time, trio_clock


def test_no_clock_is_boot_time() -> None:
    assert as_clock(None) is boot_time


def test_a_function_is_a_clock_as_it_is() -> None:
    def clock() -> float:
        return 7.0

    assert as_clock(clock) is clock


def test_an_object_with_a_current_time_is_a_clock() -> None:
    mock = trio.testing.MockClock()
    clock = as_clock(mock)
    before = clock()
    mock.jump(12.5)
    assert clock() - before == 12.5


@pytest.mark.parametrize("bad", [3.0, "clock", object(), []])
def test_anything_else_is_refused(bad: object) -> None:
    with pytest.raises(TypeError, match="a clock is a function"):
        as_clock(bad)  # type: ignore[arg-type]


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time since boot; what the monotonic clock and the wall clock say stays as it is."""
    real = time.clock_gettime

    def set_boot_time(seconds: float) -> None:
        def clock_gettime(clock_id: int) -> float:
            return seconds if clock_id == time.CLOCK_BOOTTIME else real(clock_id)

        monkeypatch.setattr(time, "clock_gettime", clock_gettime)

    return set_boot_time


def test_boot_time_counts_what_the_monotonic_clock_misses(boot: Callable[[float], None]) -> None:
    boot(5000.0)
    assert boot_time() == 5000.0
    boot(8600.0)
    assert boot_time() == 8600.0


def test_trio_runs_on_boot_time() -> None:
    async def main() -> tuple[float, float, float]:
        return boot_time(), trio.current_time(), boot_time()

    before, now, after = trio.run(main, clock=BootClock())
    assert before <= now <= after


def test_a_timer_is_looked_at_again_before_long(boot: Callable[[float], None]) -> None:
    clock = BootClock()
    clock.start_clock()
    boot(5000.0)
    assert clock.deadline_to_sleep_time(5000.25) == 0.25
    assert clock.deadline_to_sleep_time(9000.0) == LONGEST_SLEEP
    assert clock.deadline_to_sleep_time(float("inf")) == LONGEST_SLEEP
    assert clock.deadline_to_sleep_time(4999.0) <= 0


def test_a_sleep_that_spans_a_suspend_ends_soon_after_it(
    boot: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "LONGEST_SLEEP", 0.001)

    async def main() -> float:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 3600)
            await trio.testing.wait_all_tasks_blocked()
            boot(8600.0)  # the machine slept for an hour
        return trio.current_time()

    boot(5000.0)
    assert trio.run(main, clock=BootClock()) == 8600.0


async def test_the_clock_of_the_loop_follows_it_and_works_in_threads(mock_clock: trio.testing.MockClock) -> None:
    clock = trio_clock()
    before = clock()
    mock_clock.jump(5.0)
    assert clock() - before == 5.0
    assert await trio.to_thread.run_sync(clock) == clock()


def test_there_is_no_clock_of_the_loop_outside_of_it() -> None:
    with pytest.raises(RuntimeError):
        trio_clock()

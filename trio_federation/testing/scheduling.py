"""Trio's own scheduling order, seeded. Trio runs the tasks that are ready in the same moment in an order that it draws
by lot, so that nobody relies on one, and goes through sets of what it cancels in the order of their addresses. A
simulation that is to run twice alike needs these orders, too. This is the one place that reaches into Trio for them; a
test pins what it finds there to the versions of Trio that we support."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from heapq import heappush
from itertools import count
from typing import Any, ClassVar

import trio
import trio._core._run as trio_run

#: The versions of Trio of which it is known that nothing else decides which task is run when. Others are warned about.
KNOWN = ("0.35",)

#: Draws from 0 up to 1. Every task of a simulation inherits that of its own.
_Draw = Callable[[], float]
_draw: ContextVar[_Draw] = ContextVar("trio_federation.testing.scheduling")

#: Numbers what Trio itself does not, in the order of its making. Only which is the larger one ever counts.
_numbers = count()


class _Order(random.Random):
    """What stands in for the generator from which Trio draws the order of tasks.

    A task of a simulation gets its place by a draw of its simulation's own, so that neither tasks of the test that were
    there before, nor Trio's own, which signals and threads wake, change the order of the others."""

    def shuffle(self, batch: list[trio.lowlevel.Task]) -> None:  # type: ignore[override]
        """Put tasks, which come in the order of their making, into the order in which they run."""
        drawn = [task.context.get(_draw, self.random)() for task in batch]
        if len(batch) > 1:
            batch[:] = [batch[place] for place in sorted(range(len(batch)), key=drawn.__getitem__)]


class _InOrder(set[Any]):
    """A set that is gone through in the order in which what is in it was made."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=_made))


def _made(item: Any) -> int:
    """A task's number, or that of what can be cancelled together; the latter has none where it is Trio's own."""
    number: int = getattr(item, "_counter", -1)
    return number


class _CancelStatus(trio_run.CancelStatus):
    """What is cancelled together. Trio's, with sets in an order: to cancel is to call functions, which may do anything,
    and those of trio-asyncio queue callbacks."""

    def __attrs_post_init__(self) -> None:
        self._counter = next(_numbers)
        self._children = _InOrder()
        self._tasks = _InOrder()
        super().__attrs_post_init__()


def _add_deadline(deadlines: trio_run.Deadlines, deadline: float, scope: trio.CancelScope) -> None:
    """Trio's Deadlines.add, but of scopes with the same deadline the first comes first, not that with the smaller
    address."""
    heappush(deadlines._heap, (deadline, next(_numbers), scope))
    deadlines._active += 1


class _Patch:
    """What is another one in Trio as long as any simulation runs."""

    in_use: ClassVar[int] = 0
    restore: ClassVar[Callable[[], None]]

    @classmethod
    def enter(cls, seed: object) -> None:
        if cls.in_use == 0:
            if ".".join(trio.__version__.split(".")[:2]) not in KNOWN:
                warnings.warn(
                    f"two runs with the same seed may differ, as this is Trio {trio.__version__}; they do not in "
                    f"{' and '.join(KNOWN)}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            cls.restore = _replaced(
                (trio_run, "_r", _Order(f"{seed}/scheduling of others")),
                # With this Trio puts the tasks into the order of their making before it shuffles them.
                (trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
                (trio_run, "CancelStatus", _CancelStatus),
                (trio_run.Deadlines, "add", _add_deadline),
            )
        cls.in_use += 1

    @classmethod
    def leave(cls) -> None:
        cls.in_use -= 1
        if cls.in_use == 0:
            cls.restore()


def _replaced(*places: tuple[Any, str, object]) -> Callable[[], None]:
    """Put values into attributes that exist; returns what puts the old ones back."""
    for owner, name, _ in places:
        if not hasattr(owner, name):
            raise RuntimeError(
                f"the order of tasks cannot be made to follow from a seed: Trio {trio.__version__} has no "
                f"{owner.__name__}.{name}; install Trio {' or '.join(KNOWN)}"
            )
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)

    def restore() -> None:
        for owner, name, value in before:
            setattr(owner, name, value)

    return restore


@contextmanager
def seeded_scheduling(seed: object) -> Iterator[None]:
    """Inside, the tasks of this context, and those that they start, are run in an order that follows from `seed` alone,
    whatever ran before and whatever else runs; what is seeded again inside has an order of its own. Afterwards Trio
    draws by lot again, from where it was.

    To be entered within a run: in a run that begins inside, Trio's own tasks take part. What can be cancelled together,
    say a nursery, keeps Trio's order where it was opened outside. Raises RuntimeError where Trio has changed so much
    that there is no way, and warns where it is not known whether it has."""
    _Patch.enter(seed)
    token = _draw.set(random.Random(f"{seed}/scheduling").random)
    try:
        yield
    finally:
        _draw.reset(token)
        _Patch.leave()

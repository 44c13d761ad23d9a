"""Trio's own scheduling order, seeded. Trio runs the tasks that are ready in the same moment in an order that it draws
by lot, from a generator of its own, so that nobody relies on one. A simulation that is to run twice alike needs that
order, too. This is the one place that reaches into Trio for it; a test pins what it finds there to the versions of Trio
that we support."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio._core._run as trio_run


@contextmanager
def seeded_scheduling(seed: object) -> Iterator[None]:
    """Inside, tasks that are ready in the same moment are run in an order that follows from `seed` alone. Works before
    trio.run and within it; afterwards Trio draws by lot again, from where it was."""
    drawn, deterministic = trio_run._r.getstate(), trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    trio_run._r.seed(f"{seed}/scheduling")
    # With this Trio puts the tasks in the order of their making before it shuffles them: sets of tasks, which it goes
    # through when it cancels them, have an order that differs from process to process.
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    try:
        yield
    finally:
        trio_run._r.setstate(drawn)
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = deterministic  # type: ignore[misc]

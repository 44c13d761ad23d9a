"""When to try again: exponential backoff with full jitter, and which errors may be retried at all when several arrive
at once. Pure: the generator and the time are arguments."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection
from typing import TypeVar

import trio

from trio_federation.errors import AlreadyExists, RpcError, Unimplemented

_E = TypeVar("_E", bound=Exception)

#: Seconds: the first delay is drawn from up to FIRST, doubling up to LONGEST.
FIRST = 0.5
LONGEST = 10.0
#: Seconds that each cluster of a large fleet adds to the first delay: 20 a second come back, however many there are.
PER_CLUSTER = 0.05
#: Seconds without a failure after which the delays start small again.
STABLE = 60.0
#: Seconds between tries while another instance holds our cluster id.
TAKEOVER = (1.0, 2.0)
#: Seconds between tries of a method that the hub does not have.
OLDER_HUB = 300.0


def first_window(clusters: int) -> float:
    """Seconds from which the first delay is drawn after the loss of a hub that so many clusters share: FIRST in a small
    fleet, where a blip heals at once, and more in a large one, which must not be back in one moment."""
    return min(LONGEST, max(FIRST, PER_CLUSTER * clusters))


def share(own: str, everybody: Collection[str], of: str) -> tuple[float, float]:
    """The part of the first delay's bound, from 0.0 to 1.0, that belongs to one of those who lose the same thing in one
    moment: where each knows of all the others, every part has somebody, and no part has two. `of` names what is lost;
    the order in which they come back is another one for each name. `own` counts whether it is among `everybody` or
    not."""

    def number(name: str) -> bytes:
        return hashlib.blake2b(f"{of}\0{name}".encode(), digest_size=8).digest()

    mine = number(own)
    others = [number(each) for each in everybody if each != own]
    place, parts = sum(other < mine for other in others), len(others) + 1
    return place / parts, (place + 1) / parts


class Backoff:
    """Delays for one thing that fails and is tried again.

    The first delay is drawn from up to `first` seconds; the bound doubles up to `longest`. `first` may be a function,
    which is asked at each failure: the bound is never below what it says then. `least`: the part of the bound below
    which no delay is drawn; 0 is full jitter. The bound is capped before the draw, so that delays at the cap are as
    spread as any. `part`: asked at a first failure, from which part of all that the first delay is drawn."""

    def __init__(
        self,
        generator: random.Random,
        *,
        first: float | Callable[[], float] = FIRST,
        longest: float = LONGEST,
        least: float = 0.0,
        part: Callable[[], tuple[float, float]] = lambda: (0.0, 1.0),
    ) -> None:
        self._random = generator
        self._part = part
        self._first = first if callable(first) else lambda: first
        self._longest = longest
        self._least = least
        #: of the last delay; 0.0 where the next failure is the first
        self._bound = 0.0

    def delay(self, error: RpcError, lived: float) -> float:
        """Seconds to wait after a call has failed that had worked for `lived` seconds: since it was known to work, and
        not since it was tried, as what hangs does not live."""
        if isinstance(error, Unimplemented):
            return OLDER_HUB
        if isinstance(error, AlreadyExists):
            return self._random.uniform(*TAKEOVER)
        return self.again(lived)

    def again(self, lived: float) -> float:
        """Seconds to wait after a failure of something that had worked for `lived` seconds."""
        if lived >= STABLE:
            self.reset()
        begins, ends = (0.0, 1.0) if self._bound else self._part()
        self._bound = max(self._first(), min(self._longest, 2 * self._bound))
        least = self._least * self._bound
        return least + (self._bound - least) * self._random.uniform(begins, ends)

    def reset(self) -> None:
        """It works: the next failure is the first again."""
        self._bound = 0.0


def failures_of(error: BaseException, kind: type[_E]) -> list[_E]:
    """The errors of `kind` that `error` consists of: itself, or, in a group, every member.

    Raises `error` again where it holds anything that must not be retried. Where the rest is only Trio's Cancelled, it
    raises that rest alone: a cancellation is passed on, and what failed on its way down was to end anyway."""
    if isinstance(error, kind):
        return [error]
    if not isinstance(error, BaseExceptionGroup):
        raise error
    matched, rest = error.split(kind)
    if rest is not None:
        raise rest if _only_cancelled(rest) else error
    assert matched is not None
    return _leaves(matched, kind)


def _only_cancelled(group: BaseExceptionGroup[BaseException]) -> bool:
    return group.split(trio.Cancelled)[1] is None


def _leaves(group: BaseExceptionGroup[_E], kind: type[_E]) -> list[_E]:
    found: list[_E] = []
    for member in group.exceptions:
        if isinstance(member, BaseExceptionGroup):
            found += _leaves(member, kind)
        else:
            found.append(member)
    return found

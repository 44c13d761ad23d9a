"""What placements have taken that no report shows yet: how much of a member, or of one's own env, is set aside for
creates under way, until when, and what was empty or refused when a create arrived. Pure bookkeeping; time and
observations are arguments. What a reservation means for a placement is decided in `router.py`.

Whether an observation retires a reservation is looked at when a placement asks about that env; nothing here is told
of reports. So nothing has to be done for a report, and a placement costs the same however many reservations there are:
each is looked at once when it is made, and once when it goes."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, TypeAlias

#: Seconds after a placement from which on an observation shows it.
SETTLE_TIME = 2.0
#: Seconds after which a reservation is given up, whatever was observed.
RESERVATION_TTL = 10.0


class Outcome(StrEnum):
    """What came of a create where it was placed."""

    #: it got its sandbox
    SERVED = "served"
    #: there was none idle, where one was to be; what was sent to a pool that has to grow first, or has to wait, was
    #: empty only if it gave up waiting
    EMPTY = "empty"
    #: it was not taken, for whatever other reason
    REFUSED = "refused"


#: What is reserved of, in one env: another cluster's member, (cluster_id, member_pool), or here a scaling group, "" for
#: the whole env.
Place: TypeAlias = tuple[str, str] | str
#: (namespace, env_name)
EnvName: TypeAlias = tuple[str, str]


class TurnedAway(NamedTuple):
    """Word that a place was empty, or refused a create."""

    outcome: Outcome
    #: seconds, when it was said
    at: float
    #: what was known of the place then: its observed_at, None where nothing was known
    known: float | None

    def is_over(self, observed_at: float) -> bool:
        """Whether an observation is newer: than what was known, and not older than the word itself."""
        return observed_at >= self.at and (self.known is None or observed_at > self.known)


class Slot:
    """What is set aside of one place."""

    __slots__ = ("served", "turned_away", "under_way")

    def __init__(self) -> None:
        #: by placement id, in the order of their making: when they were placed
        self.under_way: OrderedDict[str, float] = OrderedDict()
        #: those that are known to have been served before they settled: from when on an observation shows them
        self.served: OrderedDict[str, float] = OrderedDict()
        self.turned_away: TurnedAway | None = None

    def __len__(self) -> int:
        """How much is set aside."""
        return len(self.under_way) + len(self.served)


class Reservations:
    """The reservations of one router.

    `settle_time`: seconds after which a create shows in observations. `ttl`: seconds after which a reservation is given
    up. `memory`: seconds for which it is remembered who turned a create away: as long as an observation from before can
    count, a registry's ttl. Raises ValueError for times that are not positive, or a ttl below the settle time."""

    def __init__(self, *, settle_time: float = SETTLE_TIME, ttl: float = RESERVATION_TTL, memory: float = 30.0) -> None:
        if not 0 < settle_time <= ttl < float("inf"):
            raise ValueError(
                f"settle_time {settle_time!r} s and reservation_ttl {ttl!r} s: both must be positive, "
                "and reservation_ttl no shorter"
            )
        self.settle_time = settle_time
        self.ttl = ttl
        self._memory = memory
        self._envs: dict[EnvName, dict[Place, Slot]] = {}
        #: by placement id, what stands
        self._standing: dict[str, tuple[EnvName, Place]] = {}
        #: (when they were placed, id), the oldest first; some are gone already
        self._made: deque[tuple[float, str]] = deque()
        #: (when it was said, env, place) of what was turned away, the oldest first
        self._said: deque[tuple[float, EnvName, Place]] = deque()

    def __len__(self) -> int:
        """How many reservations stand, those included that an observation shows which no placement has met yet."""
        return len(self._standing)

    def place_of(self, placement_id: str) -> tuple[EnvName, Place] | None:
        """What a placement has reserved of; None where it has no reservation any more."""
        return self._standing.get(placement_id)

    def was_served(self, placement_id: str) -> bool:
        """Whether a placement whose reservation stands is known to have been served."""
        found = self._standing.get(placement_id)
        return found is not None and placement_id in self._envs[found[0]][found[1]].served

    # What is asked.

    def expire(self, now: float) -> None:
        """Give up what has run out. To be called before anything else is asked at `now`. Where time has gone back,
        because another clock is used, nothing can be told of what was placed before, and all of it is given up."""
        if self._made and now < self._made[-1][0]:
            self._envs.clear()
            self._standing.clear()
            self._made.clear()
            self._said.clear()
        while self._made and self._made[0][0] + self.ttl <= now:
            self._release(self._made.popleft()[1])
        while self._said and self._said[0][0] + self._memory < now:
            said_at, env, place = self._said.popleft()
            slot = self._envs.get(env, {}).get(place)
            if slot is not None and slot.turned_away is not None and slot.turned_away.at == said_at:
                slot.turned_away = None
                self._tidy(env, place, slot)

    def envs(self) -> list[EnvName]:
        """The envs of which something is set aside."""
        return list(self._envs)

    def of_env(self, env: EnvName) -> Mapping[Place, Slot] | None:
        """What is set aside in one env, by place; None for nothing."""
        return self._envs.get(env)

    def observe(self, env: EnvName, place: Place, slot: Slot, observed_at: float) -> None:
        """Let go of what an observation of a place shows."""
        while slot.under_way and next(iter(slot.under_way.values())) + self.settle_time <= observed_at:
            self._standing.pop(slot.under_way.popitem(last=False)[0], None)
        while slot.served and next(iter(slot.served.values())) <= observed_at:
            self._standing.pop(slot.served.popitem(last=False)[0], None)
        if slot.turned_away is not None and slot.turned_away.is_over(observed_at):
            slot.turned_away = None
        self._tidy(env, place, slot)

    # What is done.

    def reserve(self, placement_id: str, env: EnvName, place: Place, now: float) -> None:
        """Set one aside."""
        self._slot(env, place).under_way[placement_id] = now
        self._standing[placement_id] = (env, place)
        self._made.append((now, placement_id))

    def served(self, placement_id: str, known: float | None, now: float) -> None:
        """The create is under way no more: an observation from now on shows it, also before it has settled. `known` is
        the observed_at of what is known of the place now, which does not."""
        if (found := self._standing.get(placement_id)) is None:
            return
        slot = self._envs[found[0]][found[1]]
        placed_at = slot.under_way.get(placement_id)
        if placed_at is not None and now < placed_at + self.settle_time:
            del slot.under_way[placement_id]
            slot.served[placement_id] = now if known is None or known < now else math.nextafter(now, math.inf)

    def turned_away(
        self, placement_id: str, env: EnvName, place: Place, outcome: Outcome, known: float | None, now: float
    ) -> None:
        """The create has taken nothing: what was set aside for it is given back. The place is not to be chosen until an
        observation of it is newer; `known` is the observed_at of what is known of it now."""
        self._release(placement_id)
        self._slot(env, place).turned_away = TurnedAway(outcome, now, known)
        self._said.append((now, env, place))

    # Inside.

    def _slot(self, env: EnvName, place: Place) -> Slot:
        return self._envs.setdefault(env, {}).setdefault(place, Slot())

    def _release(self, placement_id: str) -> None:
        found = self._standing.pop(placement_id, None)
        if found is None:
            return
        env, place = found
        slot = self._envs[env][place]
        slot.under_way.pop(placement_id, None)
        slot.served.pop(placement_id, None)
        self._tidy(env, place, slot)

    def _tidy(self, env: EnvName, place: Place, slot: Slot) -> None:
        """Forget a place of which nothing is set aside, and nothing said."""
        if not slot and slot.turned_away is None:
            places = self._envs[env]
            del places[place]
            if not places:
                del self._envs[env]

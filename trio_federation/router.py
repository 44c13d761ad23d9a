"""Where a create should go, and why. It reads the Registry's records and its clock, and decides; pinning the create is
the caller's business. Pure apart from a lock. What earlier placements have taken, and no report shows yet, is kept in
`reservations.py`."""

from __future__ import annotations

import hashlib
import heapq
import math
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, overload

from trio_federation.capacity import Capacity
from trio_federation.registry import Registry, in_group
from trio_federation.reservations import (
    RESERVATION_TTL,
    SETTLE_TIME,
    EnvName,
    Outcome,
    Place,
    Reservations,
    Slot,
    TurnedAway,
)

#: Placements that are remembered, and the candidates of each, so that it can be asked later why a create went there.
PLACEMENTS_KEPT = 1000
CANDIDATES_KEPT = 20
#: Members that an env may have for a placement that is remembered to hold on to them, and to be explained when somebody
#: asks. Of a larger one the best candidates are explained at once, which takes longer than to choose one.
EXPLAINED_LATER = 100


class Tier(StrEnum):
    """What a member has to offer, best first."""

    IDLE = "idle"
    GROW = "grow"
    SATURATED = "saturated"
    FULL = "full"
    #: was empty, or refused a create, and nothing newer is known of it
    TURNED_AWAY = "turned_away"
    #: not for this create
    EXCLUDED = "excluded"


class Ranking(StrEnum):
    """Which of several members that have idle is the best one."""

    #: the one that has most idle left, after what is reserved
    LEFT = "left"
    #: the one whose idle is most for each create that this cluster has reserved of it, with one more: creates are
    #: spread in proportion to what is idle, instead of filling up the one that stands out
    SHARE = "share"


class Rule(StrEnum):
    """Which branch of the decision a placement came from."""

    #: the local cluster has idle
    LOCAL_IDLE = "local_idle"
    #: another cluster has idle, and the local one has not
    FOREIGN_IDLE = "foreign_idle"
    #: nobody has idle, and another cluster can grow
    FOREIGN_GROWTH = "foreign_growth"
    #: nobody has idle, and the local cluster can grow itself
    LOCAL_GROWTH = "local_growth"
    #: no pool elsewhere has room: the create waits for the local autoscaler
    NOTHING_ANYWHERE = "nothing_anywhere"
    #: no cluster is known to have such an env, or such a group of it
    UNKNOWN_ENV = "unknown_env"
    #: the create came from another cluster: it was forwarded once, and is not forwarded again
    FORWARDED = "forwarded"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member of another cluster that was looked at, and what came of it."""

    cluster_id: str
    member_pool: str
    tier: Tier
    #: sandboxes ready, less those reserved
    idle: int
    #: sandboxes or headroom set aside for creates that were placed there and are under way
    reserved: int
    #: scale-up headroom, -1 without a ceiling, 0 where it cannot grow
    headroom: int
    #: seconds since the member was last known to be so
    age: float
    #: what its owner says of it
    state: str
    #: why it was chosen, or why not
    verdict: str

    @property
    def target(self) -> str:
        """`<cluster>::<pool>`."""
        return f"{self.cluster_id}::{self.member_pool}"

    @property
    def explanation(self) -> str:
        """All of it in one line."""
        return (
            f"{self.target}: {self.verdict} ({self.tier}, {self.idle} idle, {self.reserved} reserved, headroom "
            f"{self.headroom}, {self.age:.1f} s old, {self.state or 'no state'})"
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one create should go."""

    id: str
    local: bool
    #: `<cluster>::<pool>`; None when local
    target: str | None
    #: one line for a person
    reason: str
    #: every foreign member that was looked at, best first
    candidates: Sequence[Candidate]
    #: the same in one word, for programs
    rule: Rule = Rule.NOTHING_ANYWHERE

    @property
    def explanation(self) -> tuple[str, ...]:
        """Why it goes there: the reason, and a line for each candidate."""
        return (self.reason, *(candidate.explanation for candidate in self.candidates))


class Placed(NamedTuple):
    """A placement that reserved, and what it was for."""

    placement: Placement
    namespace: str
    env_name: str
    group: str
    #: seconds on the registry's clock
    at: float
    #: what came of it; None as long as nobody has said
    outcome: Outcome | None = None


class Router:
    """Decides placements from a Registry (semantics.md, "Placement"). Costs time in the members of the one env.

    `settle_time`: seconds after a placement from which on an observation of where it went shows it, and its reservation
    retires. `reservation_ttl`: seconds after which it retires anyway. `ranking`: which of several members that have
    idle is the best one; docs/placement.md compares them under load. `random`: where placement ids come from; by
    default the operating system. `placed`: told of every placement that reserves; `reported`: of every report of an
    outcome, by the placement's id and "served", "empty" or "refused", or, of reports that change nothing, "repeated" or
    "unknown".
    Safe to call from any task and from worker threads. Raises ValueError for times that are not positive, or a
    reservation_ttl below the settle_time."""

    def __init__(
        self,
        registry: Registry,
        *,
        settle_time: float = SETTLE_TIME,
        reservation_ttl: float = RESERVATION_TTL,
        ranking: Ranking | str = Ranking.LEFT,
        random: random.Random | None = None,
        placed: Callable[[Placed], None] | None = None,
        reported: Callable[[str, str], None] | None = None,
    ) -> None:
        self.registry = registry
        self.ranking = Ranking(ranking)
        self._reservations = Reservations(settle_time=settle_time, ttl=reservation_ttl, memory=registry.ttl)
        self._random = random if random is not None else _system_random()
        self._placed = placed
        self._reported = reported
        #: the last placements that reserved, by id, the oldest first
        self._recent: OrderedDict[str, Placed] = OrderedDict()
        self._lock = threading.Lock()

    def place(
        self,
        namespace: str,
        env_name: str,
        group: str = "",
        *,
        reserve: bool = True,
        not_these: Iterable[str] = (),
        forwarded: bool = False,
    ) -> Placement:
        """Where a create of this env (and, unless "", this scaling group) should go.

        `reserve`: whether the placement counts against where it goes until an observation shows it; False only asks,
        and takes nothing from anybody. `not_these`: targets, `<cluster>::<pool>`, that are no choice for this create,
        as it was turned away there. `forwarded`: whether the create came from another cluster: it is not forwarded
        again."""
        targets = frozenset((not_these,) if isinstance(not_these, str) else not_these)
        question = _Question(namespace, env_name, group, targets, forwarded)
        with self._lock:
            now = self.registry.now()
            self._reservations.expire(now)
            env = _Env(question, self.registry, self._reservations, now, self.ranking)
            decision = _decide(env)
            env.local = _NOBODY  # what the candidates are explained from is kept for a while, and these are none
            placement = Placement(
                f"{self._random.getrandbits(64):016x}",
                decision.chosen is None,
                decision.chosen.target if decision.chosen is not None else None,
                decision.reason,
                Candidates(lambda: _explained(env, decision)),
                decision.rule,
            )
            if reserve:
                placed = self._reserve(env, placement, decision)
        if reserve and self._placed is not None:
            self._placed(placed)
        return placement

    def _reserve(self, env: _Env, placement: Placement, decision: _Decision) -> Placed:
        question = env.question
        place: Place = question.group
        if decision.chosen is not None:
            place = (decision.chosen.record.cluster_id, decision.chosen.record.member_pool)
        self._reservations.reserve(placement.id, question.env, place, env.now)
        kept = placement
        if len(env.foreign) > CANDIDATES_KEPT:
            # Why it was decided so is in the best of them; all of a large env, a thousand times, would be too much.
            best = Candidates(lambda: _explained(env, decision, CANDIDATES_KEPT))
            if len(env.foreign) > EXPLAINED_LATER:
                len(best)
            kept = replace(placement, candidates=best)
        placed = Placed(kept, question.namespace, question.env_name, question.group, env.now)
        self._recent[placement.id] = placed
        if len(self._recent) > PLACEMENTS_KEPT:
            self._recent.popitem(last=False)
        return placed

    def recent(self, placement_id: str) -> Placed | None:
        """A placement of the past that reserved, by its id; None where it is not among the last PLACEMENTS_KEPT."""
        with self._lock:
            return self._recent.get(placement_id)

    def held(self) -> int:
        """How many reservations are kept, those included that an observation shows which no placement has met yet: the
        same cost whatever there is."""
        with self._lock:
            self._reservations.expire(self.registry.now())
            return len(self._reservations)

    def reserved(self) -> int:
        """How many reservations there are now. Costs time in the members of the envs that they are in."""
        with self._lock:
            now = self.registry.now()
            self._reservations.expire(now)
            for namespace, env_name in self._reservations.envs():
                question = _Question(namespace, env_name, "", (), False)
                _Env(question, self.registry, self._reservations, now)  # meets what was observed
            return len(self._reservations)

    def report_outcome(self, placement_id: str, outcome: Outcome | str) -> bool:
        """Say what came of a create where it was placed: it was "served", found the pool "empty", or was "refused".

        Whatever had none for it is not chosen again until something newer is known of it: the other cluster's member,
        or what is idle here. Returns whether the placement is remembered; where it is not, nothing changes. The first
        outcome of a placement counts, and a later one changes nothing. One that is no longer among the last
        PLACEMENTS_KEPT is remembered as long as its reservation stands. Raises ValueError for any other word."""
        try:
            outcome = Outcome(outcome)
        except ValueError as error:
            known = ", ".join(f'"{each}"' for each in Outcome)
            raise ValueError(f"{str(outcome)[:80]!r} is no outcome of a placement; it is one of {known}") from error
        with self._lock:
            word = self._report(placement_id, outcome)
        if self._reported is not None:
            self._reported(placement_id, word)
        return word != "unknown"

    def outcome(self, placement_id: str) -> Outcome | None:
        """What came of a placement, as far as it was said and is remembered."""
        with self._lock:
            placed = self._recent.get(placement_id)
            if placed is None and self._reservations.was_served(placement_id):
                return Outcome.SERVED
            return placed.outcome if placed is not None else None

    def _report(self, placement_id: str, outcome: Outcome) -> str:
        placed = self._recent.get(placement_id)
        now = self.registry.now()
        self._reservations.expire(now)
        if placed is None:
            # Of many placements a second some are no longer remembered, and their reservations still stand.
            found = self._reservations.place_of(placement_id)
            if found is None:
                return "unknown"
            if self._reservations.was_served(placement_id):
                return "repeated"
            env, place = found
        elif placed.outcome is not None:
            return "repeated"
        else:
            self._recent[placement_id] = placed._replace(outcome=outcome)
            env = (placed.namespace, placed.env_name)
            target = placed.placement.target
            place = placed.group if target is None else _member_of(target)
        if placed is not None and now - placed.at > self.registry.ttl:
            return outcome  # everything that is known by now is newer
        known_at = _observed_at(self.registry, env, place)
        if outcome is Outcome.SERVED:
            self._reservations.served(placement_id, known_at, now)
        else:
            self._reservations.turned_away(placement_id, env, place, outcome, known_at, now)
        return outcome


def _member_of(target: str) -> tuple[str, str]:
    cluster_id, _, pool = target.partition("::")
    return cluster_id, pool


def _observed_at(registry: Registry, env: EnvName, place: Place) -> float | None:
    """When what is known of a place was observed; of a group here, its oldest record. None where nothing is known."""
    records = registry.records(*env)
    if isinstance(place, str):
        local = [record for record in records if record.cluster_id == registry.local_cluster_id]
        found = in_group(local, place)
    else:
        found = [record for record in records if (record.cluster_id, record.member_pool) == place]
    return min((record.observed_at for record in found if record.observed_at is not None), default=None)


class _Question(NamedTuple):
    """What is asked of a router."""

    namespace: str
    env_name: str
    group: str
    not_these: Collection[str]
    forwarded: bool

    @property
    def env(self) -> EnvName:
        return (self.namespace, self.env_name)

    def __str__(self) -> str:
        text = f"{self.namespace}/{self.env_name}" + (f" (group {self.group})" if self.group else "")
        return text if text.isprintable() else repr(text)  # no record has such names, and a caller may


_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_NOBODY: list[Capacity] = []


class _Env:
    """What is known of the env that a question is about, and what is reserved of it."""

    # Kept as long as a placement is remembered: the fewer objects, the less the garbage collector has to look at.
    __slots__ = (
        "foreign",
        "known",
        "local",
        "local_cluster_id",
        "now",
        "question",
        "ranking",
        "reserved",
        "reserved_here",
        "turned_away",
        "turned_away_here",
    )

    def __init__(
        self,
        question: _Question,
        registry: Registry,
        reservations: Reservations,
        now: float,
        ranking: Ranking = Ranking.LEFT,
    ) -> None:
        self.question = question
        self.now = now
        self.ranking = ranking
        self.local_cluster_id = registry.local_cluster_id
        records = registry.records(question.namespace, question.env_name)
        #: whether anybody has it, or its group
        self.known = False
        #: this cluster's records, of every group
        self.local: list[Capacity] = []
        #: the members of other clusters that could be chosen
        self.foreign: list[Capacity] = []
        group = question.group
        for record in records:
            of_group = not group or record.scaling_group == group
            self.known = self.known or of_group
            if record.cluster_id == self.local_cluster_id:
                self.local.append(record)
            elif record.member_pool and of_group:
                self.foreign.append(record)
        #: by the number of a foreign record, how much of it is reserved; none for nothing
        self.reserved: Mapping[int, int] = _NOTHING
        #: by the number of a foreign record, what is said of it; none for nothing
        self.turned_away: Mapping[int, TurnedAway] = _NOTHING
        #: by scaling group that there is here, how much is reserved; "": of no group in particular
        self.reserved_here: Mapping[str, int] = _NOTHING
        #: whether what was idle here has turned a create away
        self.turned_away_here: TurnedAway | None = None
        if (places := reservations.of_env(question.env)) is not None:
            self._less(places, reservations)

    def _less(self, places: Mapping[Place, Slot], reservations: Reservations) -> None:
        env = self.question.env
        reserved: dict[int, int] = {}
        turned_away: dict[int, TurnedAway] = {}
        for number, record in enumerate(self.foreign):
            place = (record.cluster_id, record.member_pool)
            slot = places.get(place)
            if slot is not None and record.observed_at is not None:
                reservations.observe(env, place, slot, record.observed_at)
                if slot:
                    reserved[number] = len(slot)
                if slot.turned_away is not None:
                    turned_away[number] = slot.turned_away
        self.reserved, self.turned_away = reserved, turned_away
        # Only groups that there are: nobody here can serve what was placed for another word.
        reserved_here: dict[str, int] = {}
        for group, observed_at in _observed_by_group(self.local).items():
            slot = places.get(group)
            if slot is not None:
                reservations.observe(env, group, slot, observed_at)
                if slot:
                    reserved_here[group] = len(slot)
                # Where the whole env had none, no group of it had.
                if slot.turned_away is not None and group in ("", self.question.group):
                    self.turned_away_here = slot.turned_away
        self.reserved_here = reserved_here


def _observed_by_group(local: list[Capacity]) -> dict[str, float]:
    """When what is known of each group here, and, as "", of the whole env, was observed: the oldest of its records."""
    observed: dict[str, float] = {}
    for group, records in (("", in_group(local, "")), (None, local)):
        for record in records:
            key = record.scaling_group if group is None else group
            if record.observed_at is not None and (group is not None or key):
                observed[key] = min(record.observed_at, observed.get(key, record.observed_at))
    return observed


class _Room(NamedTuple):
    """What there is in this cluster for one group."""

    #: idle, less what is reserved; below 0 where more is reserved than is idle
    left: int
    #: the same of idle and headroom together; infinite without a ceiling
    left_in_all: float
    idle: int
    reserved: int


def _room_here(env: _Env) -> _Room:
    """What there is for the group, and never more than is left of the env as a whole. What is reserved of any group may
    be served by this one; what is reserved of another group takes of the env only what that group has to give."""
    group, reserved = env.question.group, env.reserved_here
    room = _room(in_group(env.local, group), reserved.get(group, 0), env.now)
    if not reserved or (len(reserved) == 1 and group in reserved):
        return room
    taken = reserved.get("", 0)
    taken_in_all: float = taken
    by_group: dict[str, list[Capacity]] = {}
    for record in env.local:
        by_group.setdefault(record.scaling_group, []).append(record)
    for name, count in reserved.items():
        if name:
            has = _room(by_group[name], 0, env.now)
            taken += min(has.idle, count)
            taken_in_all += min(has.left_in_all, count)
    whole = _room(in_group(env.local, ""), 0, env.now)
    left, left_in_all = whole.idle - taken, whole.left_in_all - taken_in_all
    if not group:
        return _Room(left, left_in_all, whole.idle, taken)
    return room._replace(left=min(room.left, left), left_in_all=min(room.left_in_all, left_in_all))


def _room(records: Sequence[Capacity], reserved: int, now: float) -> _Room:
    idle = sum([record.idle for record in records])
    headroom: float = 0
    for record in records:
        if _can_grow(record, now):
            headroom += math.inf if record.capacity == -1 else record.capacity
    return _Room(idle - reserved, idle + headroom - reserved, idle, reserved)


class _Decision(NamedTuple):
    """What becomes of a create."""

    rule: Rule
    reason: str
    #: where it goes; None: it stays
    chosen: _Offer | None = None
    #: why none of the offers was chosen that could have been
    verdict: str = ""


def _decide(env: _Env) -> _Decision:
    """The four rules of semantics.md, "Placement", and what comes before them."""
    question, here = env.question, env.local_cluster_id
    room = _room_here(env)
    idle = 0 if env.turned_away_here is not None else room.left
    less = f", {room.reserved} more reserved" if room.reserved else ""
    if question.forwarded:
        reason = f"the create was forwarded to {here} and is not forwarded again; {max(0, idle)} idle for {question}"
        return _Decision(Rule.FORWARDED, reason + less, verdict="a create is forwarded once at most")
    if not env.known:
        reason = f"no cluster is known to have {question}: wait for it in {here}"
        return _Decision(Rule.UNKNOWN_ENV, reason)
    if idle > 0:
        return _Decision(Rule.LOCAL_IDLE, f"{here} has {idle} idle for {question}{less}", verdict="not needed")
    has_none = _why_none_here(env, room)
    best = _best(env)
    if best is None:
        reason = f"{has_none} and no pool elsewhere has room: wait for the local autoscaler"
        return _Decision(Rule.NOTHING_ANYWHERE, reason)
    if best.tier is Tier.GROW and room.left_in_all > max(0, room.left) and _grows(env):
        reason = f"{has_none}, nobody else has one idle, and {here} can grow"
        return _Decision(Rule.LOCAL_GROWTH, reason, verdict="no idle, and the local cluster can grow")
    offered = f"{best.idle} idle" if best.tier is Tier.IDLE else f"room to grow ({_headroom(best.headroom)})"
    rule = Rule.FOREIGN_IDLE if best.tier is Tier.IDLE else Rule.FOREIGN_GROWTH
    less = f", {best.reserved} more reserved" if best.reserved else ""
    return _Decision(rule, f"{has_none}; {best.target} has {offered}{less}", best)


def _why_none_here(env: _Env, room: _Room) -> str:
    question, here = env.question, env.local_cluster_id
    if not in_group(env.local, question.group):
        return f"{here} does not have {question}"
    if env.turned_away_here is not None:
        return f"{here} {_said(env.turned_away_here, env.now)} for {question}"
    if room.idle:
        return f"{here} has none idle for {question} that is not reserved"
    return f"{here} has none idle for {question}"


def _said(word: TurnedAway, now: float) -> str:
    done = "was reported empty" if word.outcome is Outcome.EMPTY else "refused a create"
    return f"{done} {max(0.0, now - word.at):.1f} s ago"


def _grows(env: _Env) -> bool:
    return any(_can_grow(record, env.now) for record in in_group(env.local, env.question.group))


def _explained(env: _Env, decision: _Decision, most: int | None = None) -> Iterator[Candidate]:
    """The candidates, best first, and what became of each."""
    offers = [_offer(env, number) for number in _likeliest(env, most)]

    def rank(offer: _Offer) -> tuple[int, float, int, str]:
        return _rank(offer, env.local_cluster_id)

    for offer in sorted(offers, key=rank)[:most]:
        yield _candidate(offer, env, _verdict(offer, env, decision))


def _likeliest(env: _Env, most: int | None) -> Iterable[int]:
    """The numbers of the foreign records among which the best `most` are, with those that are as good as the last of
    them: to rank them all takes longer."""
    numbers = range(len(env.foreign))
    if most is None or most >= len(numbers):
        return numbers
    standings = []
    for number in numbers:
        tier, size, _, _ = _left(env, number)
        standings.append((_TIER_RANK[tier], -size))
    last = heapq.nsmallest(most, standings)[-1]
    return [number for number in numbers if standings[number] <= last]


class Candidates(Sequence[Candidate]):
    """The candidates of a placement, as a tuple would hold them. They are put in order and explained when somebody
    looks: to decide takes a fraction of that."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Iterable[Candidate]]) -> None:
        self._make: Callable[[], Iterable[Candidate]] | None = make
        self._made: tuple[Candidate, ...] = ()

    def _all(self) -> tuple[Candidate, ...]:
        make = self._make  # in one step, as two threads may look at the same time
        if make is not None:
            self._made = tuple(make())
            self._make = None
        return self._made

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...

    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Candidates):
            return self._all() == other._all()
        return self._all() == tuple(other) if isinstance(other, tuple | list) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all())

    def __reduce__(self) -> tuple[type[tuple[Candidate, ...]], tuple[tuple[Candidate, ...]]]:
        return (tuple, (self._all(),))

    def __repr__(self) -> str:
        return repr(self._all())


class _Offer(NamedTuple):
    """A foreign member, and what it has to offer, less what is reserved of it."""

    number: int
    record: Capacity
    target: str
    tier: Tier
    #: how much it has of what its tier stands for: more is better
    size: float
    idle: int
    reserved: int
    headroom: int


def _offer(env: _Env, number: int) -> _Offer:
    record = env.foreign[number]
    tier, size, idle, headroom = _left(env, number)
    target = f"{record.cluster_id}::{record.member_pool}"
    return _Offer(number, record, target, tier, size, idle, env.reserved.get(number, 0), headroom)


def _left(env: _Env, number: int) -> tuple[Tier, float, int, int]:
    """What a foreign member has to offer: its tier, how much of that, and how much is idle and how much headroom there
    is, less what is reserved."""
    record = env.foreign[number]
    reserved = env.reserved.get(number, 0)
    idle = max(0, record.idle - reserved)
    growing = _can_grow(record, env.now)
    # What was placed there uses up what is idle first, and headroom after that.
    headroom = 0
    if growing:
        headroom = -1 if record.capacity == -1 else max(0, record.capacity - max(0, reserved - record.idle))
    if env.question.not_these and f"{record.cluster_id}::{record.member_pool}" in env.question.not_these:
        tier = Tier.EXCLUDED
    elif number in env.turned_away:
        tier = Tier.TURNED_AWAY
    elif idle > 0:
        tier = Tier.IDLE
    elif headroom != 0:
        tier = Tier.GROW
    else:
        tier = Tier.SATURATED if record.can_grow and not growing else Tier.FULL
    size: float = math.inf if headroom == -1 else headroom
    if tier is Tier.IDLE:
        size = idle if env.ranking is Ranking.LEFT else _share(record.idle, reserved)
    return tier, size, idle, headroom


def _share(idle: int, reserved: int) -> float:
    """What each create that is reserved of so much idle has, with one more; 0 where nothing is left.

    To give each create to the one with the largest share is how D'Hondt gives seats to parties: in proportion. What
    several routers take in this way fits, though none of them sees the reservations of the others."""
    return idle / (reserved + 1) if idle > reserved else 0


def _best(env: _Env) -> _Offer | None:
    """The offer that ranks first, if it can take a create. One look at each record, and a closer one only at those that
    may be it; `_rank` decides between these."""
    foreign, reserved = env.foreign, env.reserved
    barred: Collection[int] = env.turned_away
    if env.question.not_these:
        barred = {number for number in range(len(foreign)) if _offer(env, number).tier in _BARRED}
    by_share = env.ranking is Ranking.SHARE
    most: float = 0
    contenders: list[int] = []
    for number, record in enumerate(foreign):
        size: float = record.idle
        if reserved and (taken := reserved.get(number)):
            size = _share(record.idle, taken) if by_share else size - taken
        if size < most or size <= 0 or number in barred:
            continue
        if size > most:
            most, contenders = size, [number]
        else:
            contenders.append(number)
    if not contenders:
        contenders = [number for number, record in enumerate(foreign) if record.can_grow and number not in barred]
    offers = [_offer(env, number) for number in contenders]
    best = min(offers, key=lambda offer: _rank(offer, env.local_cluster_id), default=None)
    return best if best is not None and best.tier in (Tier.IDLE, Tier.GROW) else None


def _candidate(offer: _Offer, env: _Env, verdict: str) -> Candidate:
    record = offer.record
    age = 0.0 if record.observed_at is None else max(0.0, env.now - record.observed_at)
    return Candidate(
        record.cluster_id,
        record.member_pool,
        offer.tier,
        offer.idle,
        offer.reserved,
        offer.headroom,
        age,
        record.state,
        verdict,
    )


def _can_grow(record: Capacity, now: float) -> bool:
    """Whether it can grow now: scale-up that is known to fail for a while longer does not count."""
    observed_at = now if record.observed_at is None else record.observed_at
    return record.can_grow and not (record.saturated_for > 0 and now < observed_at + record.saturated_for)


#: In the order of their ranks.
_TIER_RANK = {tier: number for number, tier in enumerate(Tier)}
_BARRED = (Tier.TURNED_AWAY, Tier.EXCLUDED)


def _rank(offer: _Offer, local_cluster_id: str) -> tuple[int, float, int, str]:
    """Sorts the best first. Equal offers are ordered by a hash of (local cluster, candidate), so that clusters that see
    the same numbers do not all lean to the same pool; it is the same in every process and on every machine."""
    return (_TIER_RANK[offer.tier], -offer.size, _leaning(local_cluster_id, offer.target), offer.target)


@lru_cache(65536)
def _leaning(local_cluster_id: str, target: str) -> int:
    digest = hashlib.blake2b(f"{local_cluster_id}>{target}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _headroom(headroom: int) -> str:
    return "no ceiling" if headroom == -1 else f"{headroom} more"


def _verdict(offer: _Offer, env: _Env, decision: _Decision) -> str:
    """Why an offer was taken, or what was against it."""
    chosen = decision.chosen
    if chosen is not None and offer.number == chosen.number:
        return "chosen"
    if decision.rule is Rule.FORWARDED:
        return decision.verdict
    if offer.tier is Tier.EXCLUDED:
        return "not for this create"
    if offer.tier is Tier.TURNED_AWAY:
        return f"{_said(env.turned_away[offer.number], env.now)}, and nothing newer is known"
    if offer.tier is Tier.SATURATED:
        return f"{_none_idle(offer)}, and scale-up is known to fail for now"
    if offer.tier is Tier.FULL:
        return f"{_none_idle(offer)}, {'headroom all reserved' if offer.record.can_grow else 'cannot grow'}"
    if chosen is None:
        return decision.verdict
    if chosen.tier is Tier.IDLE and offer.tier is Tier.GROW:
        return f"{_none_idle(offer)}, {chosen.target} has"
    if chosen.tier is Tier.IDLE:
        per_create = " for each create" if env.ranking is Ranking.SHARE else ""
        if offer.size == chosen.size:
            return f"as much idle{per_create}, the tie went elsewhere"
        return f"less idle{per_create}"
    return "as much headroom, the tie went elsewhere" if offer.headroom == chosen.headroom else "less headroom"


def _none_idle(offer: _Offer) -> str:
    return "all idle reserved" if offer.record.idle else "nothing idle"


def _system_random() -> random.Random:
    return random.SystemRandom()

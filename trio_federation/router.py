"""Where a create should go, and why. Pure: it reads the Registry's records and its clock, and decides; pinning the
create is the caller's business. What was placed already and cannot show in reports yet comes from a `Reservations`;
today's, `NoReservations`, knows of none."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Protocol, overload

from trio_federation.capacity import Capacity
from trio_federation.registry import Registry, in_group


class Tier(StrEnum):
    """What a member has to offer, best first."""

    IDLE = "idle"
    GROW = "grow"
    SATURATED = "saturated"
    FULL = "full"


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
    #: nobody else has room: the create waits for the local autoscaler
    NOTHING_ANYWHERE = "nothing_anywhere"


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
    rule: Rule


class Placed(NamedTuple):
    """A placement that reserved, and what it was for."""

    placement: Placement
    namespace: str
    env_name: str
    group: str
    #: seconds on the registry's clock
    at: float


class Reservations(Protocol):
    """What placements have taken that no report shows yet."""

    def member(self, record: Capacity, now: float) -> int:
        """How much is taken of this foreign member."""
        ...

    def local(self, namespace: str, env_name: str, group: str, now: float) -> int:
        """How many creates were placed in this cluster's own env and group."""
        ...


class NoReservations:
    """Nothing is ever taken."""

    def member(self, record: Capacity, now: float) -> int:
        """Always 0."""
        return 0

    def local(self, namespace: str, env_name: str, group: str, now: float) -> int:
        """Always 0."""
        return 0


class Router:
    """Decides placements from a Registry (semantics.md, "Placement"). Costs time in the members of the one env.

    `random`: where placement ids come from; by default the operating system. `placed`: told of every placement that
    reserves."""

    def __init__(
        self,
        registry: Registry,
        *,
        reservations: Reservations | None = None,
        random: random.Random | None = None,
        placed: Callable[[Placed], None] | None = None,
    ) -> None:
        self.registry = registry
        self._reservations: Reservations = reservations if reservations is not None else NoReservations()
        self._random = random if random is not None else _system_random()
        self._placed = placed

    def place(self, namespace: str, env_name: str, group: str = "", *, reserve: bool = True) -> Placement:
        """Where a create of this env (and, unless "", this scaling group) should go.

        `reserve`: whether the placement counts against the chosen member until a report shows it; False only asks. As
        long as there are no reservations (`NoReservations`) both do the same, but that what only asks is not counted in
        metrics."""
        placement = self._decide(namespace, env_name, group)
        if reserve and self._placed is not None:
            self._placed(Placed(placement, namespace, env_name, group, self.registry.now()))
        return placement

    def _decide(self, namespace: str, env_name: str, group: str) -> Placement:
        now = self.registry.now()
        local_cluster_id = self.registry.local_cluster_id
        local: list[Capacity] = []
        foreign: list[Capacity] = []
        for record in self.registry.records(namespace, env_name):
            if record.cluster_id == local_cluster_id:
                local.append(record)
            elif record.member_pool and (not group or record.scaling_group == group):
                foreign.append(record)
        local = in_group(local, group)
        taken = self._reservations.local(namespace, env_name, group, now)
        local_idle = sum([record.idle for record in local]) - taken
        reserved = None
        if not isinstance(self._reservations, NoReservations):
            reserved = [self._reservations.member(record, now) for record in foreign]
        env = f"{namespace}/{env_name}" + (f" (group {group})" if group else "")

        def offers() -> list[_Offer]:
            taken = reserved if reserved is not None else [0] * len(foreign)
            found = [_offer(record, of_it, now) for record, of_it in zip(foreign, taken, strict=True)]
            found.sort(key=lambda offer: _rank(offer, local_cluster_id))
            return found

        def decided(local: bool, rule: Rule, reason: str, verdict: str = "", chosen: _Offer | None = None) -> Placement:
            def candidates() -> list[Candidate]:
                return [_candidate(offer, now, _verdict(offer, chosen) or verdict) for offer in offers()]

            target = chosen.target if chosen is not None else None
            return Placement(self._id(), local, target, reason, Candidates(candidates), rule)

        if local_idle > 0:
            return decided(True, Rule.LOCAL_IDLE, f"{local_cluster_id} has {local_idle} idle for {env}", "not needed")
        best = _best(foreign, reserved, now, local_cluster_id)
        here = f"{local_cluster_id} has none idle for {env}" if local else f"{local_cluster_id} does not have {env}"
        if best is None:
            reason = f"{here} and nobody else has room: wait for the local autoscaler"
            return decided(True, Rule.NOTHING_ANYWHERE, reason)
        if best.tier is Tier.GROW and any(_can_grow(record, now) for record in local):
            reason = f"{here}, nobody else has one idle, and {local_cluster_id} can grow"
            return decided(True, Rule.LOCAL_GROWTH, reason, "no idle, and the local cluster can grow")
        idle = best.tier is Tier.IDLE
        offered = f"{best.idle} idle" if idle else f"room to grow ({_headroom(best.headroom)})"
        rule = Rule.FOREIGN_IDLE if idle else Rule.FOREIGN_GROWTH
        return decided(False, rule, f"{here}; {best.target} has {offered}", chosen=best)

    def _id(self) -> str:
        return f"{self._random.getrandbits(64):016x}"


class Candidates(Sequence[Candidate]):
    """The candidates of a placement, as a tuple would hold them. They are put in order and explained when somebody
    looks: to decide takes a fraction of that."""

    def __init__(self, make: Callable[[], Iterable[Candidate]]) -> None:
        self._make: Callable[[], Iterable[Candidate]] | None = make
        self._made: tuple[Candidate, ...] = ()

    def _all(self) -> tuple[Candidate, ...]:
        if self._make is not None:
            self._made = tuple(self._make())
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
        return self._all() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


def _offer(record: Capacity, reserved: int, now: float) -> _Offer:
    """What a foreign member has to offer, less what is reserved of it."""
    idle = max(0, record.idle - reserved)
    growing = _can_grow(record, now)
    # What was placed there uses up what is idle first, and headroom after that.
    headroom = 0
    if growing:
        headroom = -1 if record.capacity == -1 else max(0, record.capacity - max(0, reserved - record.idle))
    if idle > 0:
        tier = Tier.IDLE
    elif headroom != 0:
        tier = Tier.GROW
    else:
        tier = Tier.SATURATED if record.can_grow and not growing else Tier.FULL
    return _Offer(record, f"{record.cluster_id}::{record.member_pool}", tier, idle, reserved, headroom)


def _best(
    foreign: Sequence[Capacity], reserved: Sequence[int] | None, now: float, local_cluster_id: str
) -> _Offer | None:
    """The offer that ranks first, if it can take a create. One look at each record, and a closer one only at those that
    may be it; `_rank` decides between these."""
    most, contenders = 0, []
    for number, record in enumerate(foreign):
        idle = record.idle if reserved is None else record.idle - reserved[number]
        if idle > most:
            most, contenders = idle, [number]
        elif idle == most > 0:
            contenders.append(number)
    if not contenders:
        contenders = [number for number, record in enumerate(foreign) if record.can_grow]
    offers = [_offer(foreign[number], 0 if reserved is None else reserved[number], now) for number in contenders]
    best = min(offers, key=lambda offer: _rank(offer, local_cluster_id), default=None)
    return best if best is not None and best.tier in (Tier.IDLE, Tier.GROW) else None


class _Offer(NamedTuple):
    """A candidate before it is known what becomes of it."""

    record: Capacity
    target: str
    tier: Tier
    idle: int
    reserved: int
    headroom: int


def _candidate(offer: _Offer, now: float, verdict: str) -> Candidate:
    record = offer.record
    age = 0.0 if record.observed_at is None else max(0.0, now - record.observed_at)
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


_TIER_RANK = {Tier.IDLE: 0, Tier.GROW: 1, Tier.SATURATED: 2, Tier.FULL: 3}


def _rank(offer: _Offer, local_cluster_id: str) -> tuple[int, float, int, str]:
    """Sorts the best first. Equal offers are ordered by a hash of (local cluster, candidate), so that clusters that see
    the same numbers do not all lean to the same pool; it is the same in every process and on every machine."""
    if offer.tier is Tier.IDLE:
        size: float = offer.idle
    else:
        size = float("inf") if offer.headroom == -1 else offer.headroom
    return (_TIER_RANK[offer.tier], -size, _leaning(local_cluster_id, offer.target), offer.target)


@lru_cache(65536)
def _leaning(local_cluster_id: str, target: str) -> int:
    digest = hashlib.blake2b(f"{local_cluster_id}>{target}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _headroom(headroom: int) -> str:
    return "no ceiling" if headroom == -1 else f"{headroom} more"


def _verdict(offer: _Offer, chosen: _Offer | None) -> str:
    """Why an offer was taken, or what was against it; "" where nothing was but that none was needed."""
    if chosen is not None and offer.record is chosen.record:
        return "chosen"
    if offer.tier is Tier.SATURATED:
        return "nothing idle, and scale-up is known to fail for now"
    if offer.tier is Tier.FULL:
        return "nothing idle, cannot grow"
    if chosen is None:
        return ""
    if chosen.tier is Tier.IDLE and offer.tier is Tier.GROW:
        return f"nothing idle, {chosen.target} has"
    if chosen.tier is Tier.IDLE:
        return "as much idle, the tie went elsewhere" if offer.idle == chosen.idle else "less idle"
    return "as much headroom, the tie went elsewhere" if offer.headroom == chosen.headroom else "less headroom"


def _system_random() -> random.Random:
    return random.SystemRandom()

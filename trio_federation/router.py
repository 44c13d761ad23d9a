"""Where a create should go, and why. Pure: it reads the Registry's records and its clock, and decides; pinning the
create is the caller's business. What was placed already and cannot show in reports yet comes from a `Reservations`;
today's,
`NoReservations`, knows of none."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

from trio_federation.capacity import Capacity
from trio_federation.registry import Registry, in_group


class Tier(StrEnum):
    """What a member has to offer, best first."""

    IDLE = "idle"
    GROW = "grow"
    SATURATED = "saturated"
    FULL = "full"


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
    candidates: tuple[Candidate, ...]


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

    `random`: where placement ids come from; by default the operating system."""

    def __init__(
        self,
        registry: Registry,
        *,
        reservations: Reservations | None = None,
        random: random.Random | None = None,
    ) -> None:
        self.registry = registry
        self._reservations: Reservations = reservations if reservations is not None else NoReservations()
        self._random = random if random is not None else _system_random()

    def place(self, namespace: str, env_name: str, group: str = "", *, reserve: bool = True) -> Placement:
        """Where a create of this env (and, unless "", this scaling group) should go.

        `reserve`: whether the placement counts against the chosen member until a report shows it; False only asks. As
        long as there are no reservations (`NoReservations`) both do the same."""
        now = self.registry.now()
        local_cluster_id = self.registry.local_cluster_id
        records = self.registry.records(namespace, env_name)
        local = in_group([record for record in records if record.cluster_id == local_cluster_id], group)
        taken = self._reservations.local(namespace, env_name, group, now)
        local_idle = sum(record.idle for record in local) - taken
        candidates = self._candidates(records, group, now)
        env = f"{namespace}/{env_name}" + (f" (group {group})" if group else "")

        if local_idle > 0:
            return self._local(candidates, f"{local_cluster_id} has {local_idle} idle for {env}", "not needed")
        best = next((candidate for candidate in candidates if candidate.tier in (Tier.IDLE, Tier.GROW)), None)
        here = f"{local_cluster_id} has none idle for {env}" if local else f"{local_cluster_id} does not have {env}"
        if best is None:
            return self._local(candidates, f"{here} and nobody else has room: wait for the local autoscaler", "")
        if best.tier is Tier.GROW and any(_can_grow(record, now) for record in local):
            return self._local(
                candidates,
                f"{here}, nobody else has one idle, and {local_cluster_id} can grow",
                "no idle, local can grow",
            )
        offer = f"{best.idle} idle" if best.tier is Tier.IDLE else f"room to grow ({_headroom(best.headroom)})"
        return Placement(
            self._id(), False, best.target, f"{here}; {best.target} has {offer}", _judge(candidates, best, "")
        )

    def _local(self, candidates: list[Candidate], reason: str, verdict: str) -> Placement:
        return Placement(self._id(), True, None, reason, _judge(candidates, None, verdict))

    def _id(self) -> str:
        return f"{self._random.getrandbits(64):016x}"

    def _candidates(self, records: Iterable[Capacity], group: str, now: float) -> list[Candidate]:
        local_cluster_id = self.registry.local_cluster_id
        ranked = []
        for record in records:
            if record.cluster_id == local_cluster_id or not record.member_pool:
                continue
            if group and record.scaling_group != group:
                continue
            candidate = self._candidate(record, now)
            ranked.append((_rank(candidate, local_cluster_id), candidate))
        ranked.sort(key=lambda pair: pair[0])
        return [candidate for _, candidate in ranked]

    def _candidate(self, record: Capacity, now: float) -> Candidate:
        reserved = self._reservations.member(record, now)
        idle = max(0, record.idle - reserved)
        # What was placed there uses up what is idle first, and headroom after that.
        headroom = 0
        if _can_grow(record, now):
            headroom = -1 if record.capacity == -1 else max(0, record.capacity - max(0, reserved - record.idle))
        if idle > 0:
            tier = Tier.IDLE
        elif headroom != 0:
            tier = Tier.GROW
        else:
            tier = Tier.SATURATED if record.can_grow and not _can_grow(record, now) else Tier.FULL
        age = max(0.0, now - (record.observed_at if record.observed_at is not None else now))
        return Candidate(
            record.cluster_id, record.member_pool, tier, idle, reserved, headroom, age, record.state, verdict=""
        )


def _can_grow(record: Capacity, now: float) -> bool:
    """Whether it can grow now: scale-up that is known to fail for a while longer does not count."""
    observed_at = now if record.observed_at is None else record.observed_at
    return record.can_grow and not (record.saturated_for > 0 and now < observed_at + record.saturated_for)


_TIER_RANK = {Tier.IDLE: 0, Tier.GROW: 1, Tier.SATURATED: 2, Tier.FULL: 3}


def _rank(candidate: Candidate, local_cluster_id: str) -> tuple[int, float, int, str]:
    """Sorts the best first. Equal offers are ordered by a hash of (local cluster, candidate), so that clusters that see
    the same numbers do not all lean to the same pool; it is the same in every process and on every machine."""
    if candidate.tier is Tier.IDLE:
        offer: float = candidate.idle
    else:
        offer = float("inf") if candidate.headroom == -1 else candidate.headroom
    return (_TIER_RANK[candidate.tier], -offer, _leaning(local_cluster_id, candidate.target), candidate.target)


@lru_cache(65536)
def _leaning(local_cluster_id: str, target: str) -> int:
    digest = hashlib.blake2b(f"{local_cluster_id}>{target}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _headroom(headroom: int) -> str:
    return "no ceiling" if headroom == -1 else f"{headroom} more"


def _judge(candidates: list[Candidate], chosen: Candidate | None, verdict: str) -> tuple[Candidate, ...]:
    return tuple(_with_verdict(candidate, chosen, verdict) for candidate in candidates)


def _with_verdict(candidate: Candidate, chosen: Candidate | None, verdict: str) -> Candidate:
    if candidate is chosen:
        text = "chosen"
    elif candidate.tier is Tier.SATURATED:
        text = "nothing idle, and scale-up is known to fail for now"
    elif candidate.tier is Tier.FULL:
        text = "nothing idle, cannot grow"
    elif chosen is None:
        text = verdict
    elif chosen.tier is Tier.IDLE and candidate.tier is Tier.GROW:
        text = f"nothing idle, {chosen.target} has"
    elif chosen.tier is Tier.IDLE:
        text = "as much idle, the tie went elsewhere" if candidate.idle == chosen.idle else "less idle"
    else:
        same = candidate.headroom == chosen.headroom
        text = "as much headroom, the tie went elsewhere" if same else "less headroom"
    return Candidate(
        candidate.cluster_id,
        candidate.member_pool,
        candidate.tier,
        candidate.idle,
        candidate.reserved,
        candidate.headroom,
        candidate.age,
        candidate.state,
        text,
    )


def _system_random() -> random.Random:
    return random.SystemRandom()

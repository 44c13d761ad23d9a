"""Ways to place the creates of one cluster: ours, the `Router`, and those that it stands beside. All see the same
records and keep the first three rules of semantics.md, "Placement", except that only ours reserves; they differ in
which of the other clusters' pools they take. One of them knows everything, and shows what is possible at all."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.placement_fleet import ENV, NAMESPACE, Decision, PolicyMaker, Truth
from trio_federation.capacity import Capacity
from trio_federation.registry import Registry
from trio_federation.reservations import RESERVATION_TTL, SETTLE_TIME
from trio_federation.router import Ranking, Router, Rule


class Ours:
    """`Router.place`, told of every outcome."""

    def __init__(self, registry: Registry, chance: random.Random, reservation_ttl: float, ranking: Ranking) -> None:
        self.router = Router(registry, reservation_ttl=reservation_ttl, ranking=ranking, random=chance)

    def place(self, not_these: Sequence[str], not_here: bool) -> Decision:
        """As the router says. That there is nothing at home it knows from the outcome."""
        placement = self.router.place(NAMESPACE, ENV, not_these=not_these)
        return Decision(placement.target, placement.rule in (Rule.LOCAL_IDLE, Rule.FOREIGN_IDLE), placement.id)

    def outcome(self, decision: Decision, outcome: str) -> None:
        """Report it. Of a create that stayed where it was sent on its second way there is nothing more to say."""
        if decision.id:
            self.router.report_outcome(decision.id, outcome)


class _Plain:
    """Rules 1 to 3, and then what a subclass picks. Remembers nothing."""

    def __init__(self, registry: Registry, chance: random.Random, truth: Truth) -> None:
        self.registry = registry
        self.chance = chance

    def place(self, not_these: Sequence[str], not_here: bool) -> Decision:
        """Home while there is one idle; then the pick, unless it has none idle and the home cluster can grow."""
        registry = self.registry
        if not not_here and registry.local_idle(NAMESPACE, ENV) > 0:
            return Decision(None, True)
        picked = self.pick(not_these)
        if picked is None:
            return Decision(None, False)
        target, idle = picked
        if not idle and registry.local_can_grow(NAMESPACE, ENV):
            return Decision(None, False)
        return Decision(target, idle)

    def pick(self, not_these: Sequence[str]) -> tuple[str, bool] | None:
        """A target of another cluster, and whether it has one idle; None where none is schedulable."""
        raise NotImplementedError

    def outcome(self, decision: Decision, outcome: str) -> None:
        """Not looked at."""

    def _offers(self, not_these: Sequence[str]) -> tuple[list[Capacity], bool]:
        """Those that have one idle, and True; or, where there are none, those that can grow."""
        members = [
            record
            for record in self.registry.foreign_members(NAMESPACE, ENV)
            if record.schedulable and _target(record) not in not_these
        ]
        idle = [record for record in members if record.idle > 0]
        return (idle, True) if idle else (members, False)


class BestIdle(_Plain):
    """`Registry.best_foreign_member`: the most idle."""

    def pick(self, not_these: Sequence[str]) -> tuple[str, bool] | None:
        """The first choice is the registry's; the next one follows the same order."""
        if not not_these:
            best = self.registry.best_foreign_member(NAMESPACE, ENV)
            return None if best is None else (best.target, best.idle > 0)
        offers, idle = self._offers(not_these)
        first = min(offers, key=lambda record: (-_size(record, idle), record.sort_key), default=None)
        return None if first is None else (_target(first), idle)


class WeightedRandom(_Plain):
    """By lot, in proportion to what is idle."""

    def pick(self, not_these: Sequence[str]) -> tuple[str, bool] | None:
        """Where nothing is idle, in proportion to headroom."""
        offers, idle = self._offers(not_these)
        if not offers:
            return None
        return _target(self.chance.choices(offers, [_size(record, idle) for record in offers])[0]), idle


class TwoChoices(_Plain):
    """Two by lot from those that have any, and of these the one with more idle."""

    def pick(self, not_these: Sequence[str]) -> tuple[str, bool] | None:
        """Where nothing is idle, the one with more headroom."""
        offers, idle = self._offers(not_these)
        if not offers:
            return None
        two = self.chance.sample(offers, min(2, len(offers)))
        return _target(max(two, key=lambda record: _size(record, idle))), idle


class AllKnowing:
    """Sees the truth of every pool at this moment, and what is promised to creates under way, those of other clusters
    included. Nobody can; it shows how much is left to be gained."""

    def __init__(self, registry: Registry, chance: random.Random, truth: Truth) -> None:
        self.registry = registry
        self.truth = truth

    def place(self, not_these: Sequence[str], not_here: bool) -> Decision:
        """Home where one is idle that nobody is promised, then wherever the most are."""
        home = f"{self.registry.local_cluster_id}::"
        pools = self.truth.unpromised()
        pool, idle = max((each for each in pools if each[0].startswith(home)), key=lambda each: each[1])
        if idle > 0:
            return Decision(None, True, pool=pool)
        target, idle = max((each for each in pools if not each[0].startswith(home)), key=lambda each: each[1])
        return Decision(target, True) if idle > 0 else Decision(None, False)

    def outcome(self, decision: Decision, outcome: str) -> None:
        """Known already."""


def _target(record: Capacity) -> str:
    return f"{record.cluster_id}::{record.member_pool}"


def _size(record: Capacity, idle: bool) -> int:
    """How much it has to offer; no ceiling counts as more than any fleet here has."""
    if idle:
        return record.idle
    return 1_000_000 if record.capacity == -1 else record.capacity


OURS = "ours"
OURS_BY_SHARE = "ours, by share"
ALL_KNOWING = "all-knowing"
OTHERS = {"best idle": BestIdle, "weighted random": WeightedRandom, "two choices": TwoChoices}
#: as tables and plots name them
POLICIES = (OURS, OURS_BY_SHARE, *OTHERS, ALL_KNOWING)


def reservation_ttl(interval: float) -> float:
    """Seconds for which ours reserves at a report interval: as by default, but so long that a report can show what was
    placed. This is a setting, and its description says so."""
    return max(RESERVATION_TTL, SETTLE_TIME + interval + 1.0)


def policy(name: str, interval: float) -> PolicyMaker:
    """The policy of that name, for reports that come so many seconds apart."""
    if name in (OURS, OURS_BY_SHARE):
        ranking = Ranking.LEFT if name == OURS else Ranking.SHARE
        return lambda registry, chance, truth: Ours(registry, chance, reservation_ttl(interval), ranking)
    if name == ALL_KNOWING:
        return AllKnowing
    return OTHERS[name]

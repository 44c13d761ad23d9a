"""A router that is slow and plainly right, for tests to compare the real one with. It follows semantics.md
("Placement") word by word: three plain lists, of what was placed, of what was said of it and of what was ever shown,
that only grow and are gone through from end to end for every question. No line is shared with the code under test but
the records and the words of its answers; what the registry shows comes from the naive registry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.core.naive import NaiveRegistry, observed
from trio_federation.capacity import Capacity
from trio_federation.reservations import Outcome
from trio_federation.router import Candidate, Rule, Tier

#: What a reservation is one of: (cluster_id, namespace, env_name, member_pool) of another cluster, or
#: (namespace, env_name, group) here.
Part = tuple[str, str, str, str] | tuple[str, str, str]


@dataclass
class Promise:
    """A placement that reserved."""

    id: str
    part: Part
    at: float
    looks: int


@dataclass
class Word:
    """The outcome of a placement."""

    id: str
    outcome: Outcome
    part: Part
    at: float
    #: observed_at of what was known then of the part, None where nothing was
    known: float | None
    #: how often somebody had looked by then
    looks: int


@dataclass
class Shown:
    """What the registry showed of a part, and the last of the looks that met it unchanged."""

    part: Part
    observed_at: float
    look: int


@dataclass
class Offered:
    """A foreign member, as far as it can be told without a hash."""

    record: Capacity
    #: which tiers it may be shown in; more than one where it was turned away, and excluded as well
    tiers: tuple[Tier, ...]
    idle: int
    reserved: int
    headroom: int

    @property
    def target(self) -> str:
        return f"{self.record.cluster_id}::{self.record.member_pool}"

    @property
    def size(self) -> tuple[int, float]:
        """More is better; (0, 0) is nothing."""
        if self.tiers == (Tier.IDLE,):
            return (2, self.idle)
        if self.tiers == (Tier.GROW,):
            return (1, math.inf if self.headroom == -1 else self.headroom)
        return (0, 0)

    def is_shown_by(self, candidate: Candidate, now: float) -> bool:
        record = self.record
        return candidate.tier in self.tiers and (
            candidate.cluster_id,
            candidate.member_pool,
            candidate.idle,
            candidate.reserved,
            candidate.headroom,
            candidate.age,
            candidate.state,
        ) == (
            record.cluster_id,
            record.member_pool,
            self.idle,
            self.reserved,
            self.headroom,
            now - observed(record),
            record.state,
        )


@dataclass
class Answer:
    """Where a create may go."""

    rule: Rule
    #: the targets that are equally good; none: it stays here
    targets: list[str]
    offers: list[Offered]


class NaiveRouter:
    """Places from a NaiveRegistry. An observation is what a question meets, so `looks` has to be called for each one
    first; a method that needs to know the time takes it as `now`."""

    def __init__(
        self, registry: NaiveRegistry, *, settle_time: float = 2.0, reservation_ttl: float = 10.0, kept: int = 1000
    ) -> None:
        self.registry = registry
        self.settle_time = settle_time
        self.reservation_ttl = reservation_ttl
        self.kept = kept
        self.promises: list[Promise] = []
        self.words: list[Word] = []
        self.shown: list[Shown] = []
        self.number_of_looks = 0

    # What happens.

    def looks(self, namespace: str, env_name: str, group: str, now: float) -> None:
        """Somebody asks, and meets what the registry shows of the env now: an observation of each member of the group
        in another cluster, and here, of each group, the oldest of its rows."""
        self.number_of_looks += 1
        for row in self.registry.visible(now):
            if (row.namespace, row.env_name) != (namespace, env_name):
                continue
            if row.cluster_id != self.registry.local_cluster_id:
                if row.member_pool and group in ("", row.scaling_group):
                    self._note((row.cluster_id, namespace, env_name, row.member_pool), observed(row))
                continue
            for of_group in ("", row.scaling_group):
                rows = self.registry._local(namespace, env_name, of_group, now)
                self._note((namespace, env_name, of_group), min(observed(one) for one in rows))

    def _note(self, part: Part, observed_at: float) -> None:
        last = next((one for one in reversed(self.shown) if one.part == part), None)
        if last is not None and last.observed_at == observed_at:
            last.look = self.number_of_looks
        else:
            self.shown.append(Shown(part, observed_at, self.number_of_looks))

    def placed(self, id: str, namespace: str, env_name: str, group: str, target: str | None, now: float) -> None:
        """A create was placed, and reserves: at `target`, or here."""
        if target is None:
            self.promises.append(Promise(id, (namespace, env_name, group), now, self.number_of_looks))
        else:
            cluster_id, pool = target.split("::")
            self.promises.append(Promise(id, (cluster_id, namespace, env_name, pool), now, self.number_of_looks))

    def reported(self, id: str, outcome: Outcome, now: float) -> bool:
        """Somebody says what came of a placement. Returns whether it is remembered."""
        promise = next((one for one in self.promises[-self.kept :] if one.id == id), None)
        if promise is None:
            return False
        if self.outcome(id) is None:
            known = self._known(promise.part, now)
            self.words.append(Word(id, outcome, promise.part, now, known, self.number_of_looks))
        return True

    def outcome(self, id: str) -> Outcome | None:
        return next((word.outcome for word in self.words if word.id == id), None)

    def _known(self, part: Part, now: float) -> float | None:
        if len(part) == 3:
            rows: Sequence[Capacity] = self.registry._local(*part, now)
        else:
            rows = [row for row in self.registry.visible(now) if row.identity == part]
        return min((observed(row) for row in rows), default=None)

    # What counts.

    def counts(self, promise: Promise, now: float) -> bool:
        """Whether a reservation counts still."""
        if now >= promise.at + self.reservation_ttl:
            return False
        if self._is_shown(promise.part, promise.looks, promise.at + self.settle_time):
            return False
        for word in self.words:
            if word.id == promise.id:
                if word.outcome in (Outcome.EMPTY, Outcome.REFUSED):
                    return False
                if self._is_shown_since(word):
                    return False
        return True

    def _is_shown(self, part: Part, looks: int, since: float, later_than: float = -math.inf) -> bool:
        """Whether a look after the first `looks` has met an observation not older than `since`, and newer than
        `later_than`."""
        return any(
            one.part == part and one.look > looks and one.observed_at >= since and one.observed_at > later_than
            for one in self.shown
        )

    def _is_shown_since(self, word: Word) -> bool:
        """Whether an observation was met that is newer than what was known then, and not older than the word."""
        return self._is_shown(word.part, word.looks, word.at, -math.inf if word.known is None else word.known)

    def reserved(self, now: float) -> int:
        return sum(self.counts(promise, now) for promise in self.promises)

    def reserved_of(self, part: Part, now: float) -> int:
        return sum(promise.part == part and self.counts(promise, now) for promise in self.promises)

    def turned_away(self, part: Part) -> bool:
        """Whether it was empty or refused, and nothing newer is known of it."""
        return any(
            word.part == part
            and word.outcome in (Outcome.EMPTY, Outcome.REFUSED)
            and self._is_news(word)
            and not self._is_shown_since(word)
            for word in self.words
        )

    def _is_news(self, word: Word) -> bool:
        """Whether anything can be known that was observed before the placement."""
        (placed_at,) = (promise.at for promise in self.promises if promise.id == word.id)
        return word.at - placed_at <= self.registry.ttl

    # Where to.

    def place(
        self,
        namespace: str,
        env_name: str,
        group: str,
        now: float,
        *,
        not_these: Iterable[str] = (),
        forwarded: bool = False,
    ) -> Answer:
        """Where a create should go. Changes nothing: what comes of it is for `placed` to say."""
        excluded = list(not_these)
        rows = [r for r in self.registry.visible(now) if (r.namespace, r.env_name) == (namespace, env_name)]
        offers = [
            self._offered(row, excluded, now)
            for row in rows
            if row.cluster_id != self.registry.local_cluster_id and row.member_pool
            if group in ("", row.scaling_group)
        ]
        if forwarded:
            return Answer(Rule.FORWARDED, [], offers)
        if not [row for row in rows if group in ("", row.scaling_group)]:
            return Answer(Rule.UNKNOWN_ENV, [], offers)
        empty = any(self.turned_away((namespace, env_name, each)) for each in ("", group))
        if self._idle_here(namespace, env_name, group, now) > 0 and not empty:
            return Answer(Rule.LOCAL_IDLE, [], offers)
        best = max((offer.size for offer in offers), default=(0, 0))
        if best == (0, 0):
            return Answer(Rule.NOTHING_ANYWHERE, [], offers)
        if best[0] == 1 and self._grows_here(namespace, env_name, group, now):
            return Answer(Rule.LOCAL_GROWTH, [], offers)
        rule = Rule.FOREIGN_IDLE if best[0] == 2 else Rule.FOREIGN_GROWTH
        return Answer(rule, [offer.target for offer in offers if offer.size == best], offers)

    def _offered(self, record: Capacity, excluded: list[str], now: float) -> Offered:
        part = (record.cluster_id, record.namespace, record.env_name, record.member_pool)
        reserved = self.reserved_of(part, now)
        idle = max(0, record.idle - reserved)
        headroom = _headroom(record, now)
        if headroom > 0:
            headroom = max(0, headroom - max(0, reserved - record.idle))
        against = [
            tier
            for tier, holds in (
                (Tier.TURNED_AWAY, self.turned_away(part)),
                (Tier.EXCLUDED, f"{record.cluster_id}::{record.member_pool}" in excluded),
            )
            if holds
        ]
        if against:
            tiers = tuple(against)
        elif idle:
            tiers = (Tier.IDLE,)
        elif headroom:
            tiers = (Tier.GROW,)
        else:
            saturated = record.autoscaling_enabled and record.capacity != 0 and _headroom(record, now) == 0
            tiers = (Tier.SATURATED if saturated else Tier.FULL,)
        return Offered(record, tiers, idle, reserved, headroom)

    def _takes(self, namespace: str, env_name: str, now: float, give: Callable[[Sequence[Capacity]], float]) -> float:
        """What creates that count here take of what the whole env can give: those for no group in particular one each,
        those for a group what that group itself can give at the most."""
        here = [one for one in self.promises if len(one.part) == 3 and one.part[:2] == (namespace, env_name)]
        counting = [one.part[2] for one in here if self.counts(one, now)]
        groups = {group for group in counting if group}
        rows = {group: self.registry._local(namespace, env_name, group, now) for group in groups}
        return counting.count("") + sum(min(counting.count(group), give(rows[group])) for group in groups)

    def _left_here(
        self, namespace: str, env_name: str, group: str, now: float, give: Callable[[Sequence[Capacity]], float]
    ) -> float:
        """What is left for a group of what its rows give: no more than is left of it, nor of the whole env. Where
        nothing is reserved but of the group itself, the whole env does not matter."""
        of_group = self.registry._local(namespace, env_name, group, now)
        reserved = self.reserved_of((namespace, env_name, group), now)
        here = [one for one in self.promises if len(one.part) == 3 and one.part[:2] == (namespace, env_name)]
        others = [one for one in here if one.part[2] != group and self._has(one, now) and self.counts(one, now)]
        if not others:
            return give(of_group) - reserved
        of_env = give(self.registry._local(namespace, env_name, "", now)) - self._takes(namespace, env_name, now, give)
        return min(give(of_group) - reserved, of_env) if group else of_env

    def _has(self, promise: Promise, now: float) -> bool:
        """Whether there is any row of what was promised."""
        return bool(self.registry._local(*promise.part, now)) if len(promise.part) == 3 else True

    def _idle_here(self, namespace: str, env_name: str, group: str, now: float) -> float:
        return self._left_here(namespace, env_name, group, now, _idle)

    def _grows_here(self, namespace: str, env_name: str, group: str, now: float) -> bool:
        """Whether headroom is left after what is reserved beyond the idle, in the group and in the whole env."""
        idle = self._left_here(namespace, env_name, group, now, _idle)
        both = self._left_here(namespace, env_name, group, now, lambda rows: _idle(rows) + _growth(rows, now))
        return both > max(0, idle) and _growth(self.registry._local(namespace, env_name, group, now), now) > 0


def _idle(rows: Sequence[Capacity]) -> float:
    return sum(row.idle for row in rows)


def _growth(rows: Sequence[Capacity], now: float) -> float:
    headrooms = [_headroom(row, now) for row in rows]
    return math.inf if -1 in headrooms else sum(headrooms)


def _headroom(record: Capacity, now: float) -> int:
    """By how much a member can grow now; -1: without a ceiling."""
    if not record.autoscaling_enabled or now < observed(record) + record.saturated_for:
        return 0
    return record.capacity

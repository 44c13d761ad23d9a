"""The Router with its reservations against the naive model of `naive_router.py`: whatever is placed, reported and
observed, in whatever order, they agree on where the next create goes and on what is left of every candidate. Time is a
number that a rule advances, on a grid of eighths of a second, so that sums and differences are exact and both sides of
every boundary are really met."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.core.naive import NaiveRegistry, observed
from tests.core.naive_router import Answer, NaiveRouter
from trio_federation.capacity import Capacity, Change, Identity, Origin, Withdrawal
from trio_federation.registry import Registry
from trio_federation.reservations import Outcome
from trio_federation.router import Candidate, Placed, Placement, Router, Tier

TICK = 0.125
LOCAL = "west"
CLUSTERS = (LOCAL, "east", "north")
ENVS = (("ns", "a"), ("ns", "b"))
GROUPS = ("", "cpu", "gpu")
#: what a query may name: also an env that nobody has
QUERIES = (*((namespace, env, group) for namespace, env in ENVS for group in GROUPS), ("ns", "nowhere", ""))
TARGETS = ("east::p1", "east::p2", "north::p1", "north::p2", "west::p1", "nobody::p1")

#: all but the one that traces every line, which would make finding the shortest history take minutes
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def _record(cluster_id: str, env: tuple[str, str], pool: str, group: str, idle: int, capacity: int) -> Capacity:
    """A row of a whole env has at least what all its groups have together."""
    record = Capacity(cluster_id, *env, pool, group, idle=idle, autoscaling_enabled=capacity != 0, capacity=capacity)
    if not pool and not group:
        return replace(record, idle=idle + 6, autoscaling_enabled=True, capacity=-1)
    return record


def _saturated(record: Capacity, seconds: float) -> Capacity:
    return replace(record, saturated_for=seconds) if record.member_pool or record.scaling_group else record


def samples_of(*envs: tuple[str, str], pools: tuple[str, ...] = ("p1", "p1", "p2", "")) -> st.SearchStrategy[Capacity]:
    records = st.builds(
        _record,
        st.sampled_from((LOCAL, LOCAL, "east", "east", "north")),
        st.sampled_from(envs),
        st.sampled_from(pools),
        st.sampled_from(("", *GROUPS)),
        idle=st.sampled_from((0, 0, 0, 1, 2, 3)),
        capacity=st.sampled_from((0, 0, -1, 1, 2)),
    )
    return st.builds(_saturated, records, st.sampled_from((0.0, 0.0, 0.0, 2.0, 5.0)))


samples = samples_of(*(ENVS[0],) * 5, ENVS[1])
first_samples = samples_of(ENVS[0], pools=("p1", "p2"))
identities = st.builds(lambda record: record.identity, samples)
#: seconds that pass before something happens, mostly none
pauses = st.sampled_from((0.0, 0.0, 0.0, TICK, 0.5, 1.0))
#: mostly of the env that most is known of
queries = st.sampled_from((*QUERIES, *(("ns", "a", group) for group in ("", "", "", "", "cpu", "cpu", "gpu"))))


@dataclass
class Agent:
    """One process of a cluster's agent: when it really started, and how much it has said."""

    cluster_id: str
    instance: str
    started_at: float
    seq: int = 0


@dataclass(frozen=True)
class Message:
    """One batch that an agent sent, with its true times; it may arrive at any time, and more than once."""

    agent: Agent
    changes: list[Change] = field(repr=False)


@dataclass
class Made:
    """One placement that reserved, and where the model would have it go."""

    placement: Placement
    at: float
    expected: Answer


@dataclass
class Side:
    """A router, its model, and what was placed on it."""

    router: Router
    model: NaiveRouter
    told: list[Placed]
    made: list[Made] = field(default_factory=list)


class RouterMachine(RuleBasedStateMachine):
    """Drives two routers on one registry, each with a model of its own: one is asked about everything after each step,
    so that it meets every observation, and one about nothing but what is placed."""

    messages: Bundle[Message] = Bundle("messages")

    @initialize(
        ttl=st.sampled_from((30.0, 30.0, 12.0)),
        times=st.sampled_from(((2.0, 10.0), (2.0, 10.0), (1.0, 4.0), (5.0, 20.0))),
        known=st.lists(first_samples, min_size=2, max_size=6),
    )
    def start(self, ttl: float, times: tuple[float, float], known: list[Capacity]) -> None:
        self.now = 1000.0
        self.settle_time, self.reservation_ttl = times
        self.naive = NaiveRegistry(LOCAL, ttl=ttl, tombstone_ttl=60.0, silence_limit=15.0)
        self.registry = Registry(LOCAL, ttl, lambda: self.now)
        self.asked, self.quiet = self.sides = [self.side(seed) for seed in range(2)]
        self.leaning: set[tuple[str, str]] = set()
        self.last_query = QUERIES[0]
        self.agents = {cluster_id: Agent(cluster_id, f"{cluster_id}-0", self.now - 100.0) for cluster_id in CLUSTERS}
        self.started = 0
        self.take_in(list(known))

    def side(self, seed: int) -> Side:
        told: list[Placed] = []
        settle_time, ttl = self.settle_time, self.reservation_ttl
        router = Router(
            self.registry,
            settle_time=settle_time,
            reservation_ttl=ttl,
            random=random.Random(seed),
            placed=told.append,
        )
        return Side(router, NaiveRouter(self.naive, settle_time=settle_time, reservation_ttl=ttl), told)

    def take_in(self, changes: list[Change]) -> None:
        self.naive.apply(changes, self.now)
        assert self.registry.apply(changes) == []

    # What is observed. Peers that send no origin, plugins, tests: samples with a time or without one.

    @rule(
        found=st.lists(samples, min_size=1, max_size=4),
        pause=pauses,
        age=st.sampled_from((None, 0.0, 0.0, TICK, 1.0, 2.0, 3.0, 8.0, 10.0, 29.875)),
    )
    def upsert(self, found: list[Capacity], pause: float, age: float | None) -> None:
        self.now += pause
        stamp = None if age is None else self.now - age
        self.take_in([replace(record, observed_at=stamp) for record in found])

    @rule(gone=identities)
    def withdraw(self, gone: Identity) -> None:
        self.naive.apply([Withdrawal(gone)], self.now)
        self.registry.withdraw([gone])

    # Agents and what lies between: batches with a place in their instance's history, delivered late, twice, reordered.

    @rule(cluster_id=st.sampled_from(CLUSTERS), after=st.sampled_from((None, None, 0.0, 5.0, 5.125, -5.125)))
    def restart(self, cluster_id: str, after: float | None) -> None:
        """Another process takes the place of the cluster's agent."""
        self.started += 1
        started_at = self.now if after is None else min(self.now, self.agents[cluster_id].started_at + after)
        self.agents[cluster_id] = Agent(cluster_id, f"{cluster_id}-{self.started}", started_at)

    @rule(
        target=messages,
        pause=pauses,
        said=st.lists(st.tuples(samples, st.sampled_from((True, True, True, False))), min_size=1, max_size=3),
        age=st.sampled_from((0.0, 0.0, 0.0, TICK, 2.0, 5.0, 20.0)),
        arrives=st.sampled_from((True, True, False)),
    )
    def report(self, pause: float, said: list[tuple[Capacity, bool]], age: float, arrives: bool) -> Message:
        """An agent sends a batch, of samples and withdrawals; it arrives at once, or when it is delivered. One that has
        a higher place in the history may be older by its age."""
        self.now += pause
        agent = self.agents[said[0][0].cluster_id]
        agent.seq += 1
        origin = Origin(agent.instance, agent.seq, agent.started_at)
        changes: list[Change] = []
        for record, is_there in said:
            record = replace(record, cluster_id=agent.cluster_id, observed_at=self.now - age, origin=origin)
            changes.append(record if is_there else Withdrawal(record.identity, origin))
        if arrives:
            self.take_in(changes)
        return Message(agent, changes)

    @rule(message=messages, pause=pauses, lateness=st.sampled_from((0.0, 0.0, TICK, 3.0, -5.0)))
    def deliver(self, message: Message, pause: float, lateness: float) -> None:
        """A batch arrives by one of two hubs, after all others so far. By how much a slow way has shortened its age
        differs from hub to hub."""
        self.now += pause
        self.take_in(
            [
                replace(change, observed_at=observed(change) + lateness) if isinstance(change, Capacity) else change
                for change in message.changes
            ]
        )

    # What is placed, and what comes of it.

    @rule(
        query=queries,
        times=st.sampled_from((1, 2, 4)),
        pause=pauses,
        not_these=st.lists(st.sampled_from(TARGETS), max_size=2),
        only_here=st.sampled_from((False, False, False, False, True)),
    )
    def place(
        self, query: tuple[str, str, str], times: int, pause: float, not_these: list[str], only_here: bool
    ) -> None:
        self.now += pause
        self.last_query = query
        self.places(query, times, not_these, only_here)

    @rule(times=st.sampled_from((1, 3, 5)), pause=pauses)
    def place_more(self, times: int, pause: float) -> None:
        """More of what was placed last."""
        self.now += pause
        self.places(self.last_query, times, [], False)

    def places(self, query: tuple[str, str, str], times: int, not_these: list[str], only_here: bool) -> None:
        for side in self.sides * times:
            side.model.looks(*query, self.now)
            expected = side.model.place(*query, self.now, not_these=not_these, forwarded=only_here)
            placement = side.router.place(*query, not_these=not_these, forwarded=only_here)
            # Of the quiet one nobody looks at the candidates before everything is over.
            self.is_right(placement, expected, candidates=side is self.asked)
            side.model.placed(placement.id, *query, placement.target, self.now)
            assert side.told == [Placed(placement, *query, self.now, None)]
            side.told.clear()
            side.made.append(Made(placement, self.now, expected))

    @precondition(lambda self: self.asked.made)
    @rule(
        data=st.data(),
        outcome=st.sampled_from((*Outcome, Outcome.EMPTY)),
        recent=st.sampled_from((1, 4, 1000)),
        pause=pauses,
        in_words=st.booleans(),
    )
    def report_outcome(self, data: st.DataObject, outcome: Outcome, recent: int, pause: float, in_words: bool) -> None:
        """Somebody says what came of a placement; it may be long ago, and not the first word on it."""
        self.now += pause
        number = data.draw(st.sampled_from(range(len(self.asked.made))[-recent:]), "placement")
        for side in self.sides:
            id = side.made[number].placement.id
            assert side.model.reported(id, outcome, self.now)
            assert side.router.report_outcome(id, str(outcome) if in_words else outcome) is True

    @rule(outcome=st.sampled_from(Outcome))
    def report_outcome_of_what_nobody_placed(self, outcome: Outcome) -> None:
        for side in self.sides:
            side.model.looks("ns", "nowhere", "", self.now)
            only_asked = side.router.place("ns", "nowhere", reserve=False)
            for unknown in ("", "0123456789abcdef", only_asked.id):
                assert side.router.report_outcome(unknown, outcome) is False
                assert side.router.recent(unknown) is None

    # Time.

    @rule(seconds=st.sampled_from((TICK, 0.875, 1.875, 2.0, 2.125, 3.0, 7.875, 8.0, 8.125, 10.0, 29.875)))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.boundaries())
    @rule(number=st.sampled_from((0, 0, 0, 1, 2, 5)), step=st.sampled_from((-TICK, 0.0, 0.0, TICK)))
    def advance_to_a_boundary(self, number: int, step: float) -> None:
        """To a moment at which something begins or ceases to count, or to the tick of the grid beside it."""
        boundaries = self.boundaries()
        self.now = max(self.now, boundaries[min(number, len(boundaries) - 1)] + step)

    @precondition(lambda self: self.asked.made)
    @rule(
        back=st.integers(1, 4),
        step=st.sampled_from((-TICK, 0.0, 0.0, TICK)),
        late=st.sampled_from((0.0, 0.0, 1.0)),
        found=st.lists(samples, min_size=1, max_size=3),
    )
    def observe_at_a_boundary(self, back: int, step: float, late: float, found: list[Capacity]) -> None:
        """Members are observed about when a reservation has settled; that may be known a little later."""
        made = self.asked.made[-min(back, len(self.asked.made))]
        moment = made.at + self.settle_time + step
        self.now = max(self.now, moment + late)
        self.take_in([replace(record, observed_at=moment) for record in found])

    def boundaries(self) -> list[float]:
        found = {made.at + seconds for made in self.asked.made for seconds in (self.settle_time, self.reservation_ttl)}
        found |= {observed(row) + row.saturated_for for row in self.naive.samples if row.saturated_for}
        return sorted(moment for moment in found.union(self.naive.endings(self.now)) if moment > self.now)

    # What is always so.

    def is_right(
        self, placement: Placement, expected: Answer, at: float | None = None, candidates: bool = True
    ) -> None:
        """The placement is the one that the model makes, and says so of every candidate."""
        at = self.now if at is None else at
        assert placement.rule is expected.rule
        assert placement.local is (placement.target is None)
        if placement.target is None:
            assert expected.targets == []
        else:
            assert placement.target in expected.targets
        if not candidates:
            return
        offers = {offer.target: offer for offer in expected.offers}
        assert sorted(candidate.target for candidate in placement.candidates) == sorted(offers)
        for candidate in placement.candidates:
            offer = offers[candidate.target]
            assert offer.is_shown_by(candidate, at), (candidate, offer)
        for better, worse in pairwise(placement.candidates):
            assert _size(better) >= _size(worse), "best first"
            if _size(better) == _size(worse) and better.tier in (Tier.IDLE, Tier.GROW):
                self.leaning.add((better.target, worse.target))
                assert (worse.target, better.target) not in self.leaning, "a tie that went another way before"

    def they_agree(self, side: Side) -> None:
        for query in QUERIES:
            side.model.looks(*query, self.now)
            self.is_right(side.router.place(*query, reserve=False), side.model.place(*query, self.now))
        assert side.told == [], "who only asks is not counted"
        assert side.router.reserved() == side.model.reserved(self.now)

    @invariant()
    def the_one_that_is_asked_agrees(self) -> None:
        self.they_agree(self.asked)

    @invariant()
    def what_was_placed_is_remembered(self) -> None:
        for side in self.sides:
            for made in side.made[-3:]:
                placed = side.router.recent(made.placement.id)
                assert placed is not None
                assert (placed.placement.id, placed.at) == (made.placement.id, made.at)
                assert placed.outcome == side.model.outcome(made.placement.id)

    def teardown(self) -> None:
        """What was placed is explained as it was decided, however late somebody looks. In the end, and after a while,
        nothing is reserved."""
        if not hasattr(self, "sides"):
            return
        self.they_agree(self.quiet)
        for side in self.sides:
            for made in side.made:
                self.is_right(made.placement, made.expected, made.at)
        self.now += self.reservation_ttl
        assert self.quiet.router.reserved() == self.asked.router.reserved() == 0


def _size(candidate: Candidate) -> tuple[int, float]:
    """What a member can give, more is better; of those that can give nothing, by their tier only."""
    size = 0.0
    if candidate.tier is Tier.IDLE:
        size = candidate.idle
    elif candidate.tier is Tier.GROW:
        size = float("inf") if candidate.headroom == -1 else candidate.headroom
    return (-list(Tier).index(candidate.tier), size)


def histories(number: int, steps: int) -> settings:
    """So many random histories of up to so many steps. Of those that fail, the shortest of one kind is shown."""
    return settings(max_examples=number, stateful_step_count=steps, report_multiple_bugs=False, phases=PHASES)


def test_it_agrees_with_the_model() -> None:
    run_state_machine_as_test(RouterMachine, settings=histories(15, 30))


@pytest.mark.slow
def test_it_agrees_with_the_model_over_more_and_longer_histories() -> None:
    run_state_machine_as_test(RouterMachine, settings=histories(250, 60))

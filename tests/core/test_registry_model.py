"""The Registry, and the SampleTable beneath it, against the naive model of `naive.py`: whatever happens, in whatever
order, they agree on every answer. Time is a number that a rule advances, on a grid of eighths of a second, so that sums
and differences are exact and both sides of every boundary are really met."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

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

from tests.core.naive import NaiveRegistry, observed, seen
from trio_federation.capacity import Capacity, Change, Identity, Origin, Withdrawal
from trio_federation.registry import Registry
from trio_federation.samples import SampleTable

TICK = 0.125
LOCAL = "west"
CLUSTERS = (LOCAL, "east", "north")
ENVS = (("ns", "a"), ("ns", "b"), ("other", "a"))
GROUPS = ("", "cpu", "gpu")
#: what a query may name: also an env that nobody has
QUERIES = (*((namespace, env, group) for namespace, env in ENVS for group in GROUPS), ("ns", "nowhere", ""))

#: all but the one that traces every line, which would make finding the shortest history take minutes
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)

records = st.builds(
    lambda cluster_id, env, pool, group, **values: Capacity(cluster_id, env[0], env[1], pool, group, **values),
    # More often of one foreign cluster and one env, so that identities meet.
    st.sampled_from(("east", "east", *CLUSTERS)),
    st.sampled_from((ENVS[0], ENVS[0], *ENVS)),
    st.sampled_from(("p1", "p1", "p2", "")),
    st.sampled_from(GROUPS),
    idle=st.integers(0, 3),
    running=st.integers(0, 2),
    autoscaling_enabled=st.booleans(),
    capacity=st.integers(-1, 2),
    saturated_for=st.sampled_from((0.0, 5.0)),
)
#: seconds that pass before something happens, mostly none
pauses = st.sampled_from((0.0, 0.0, 0.0, 1.0, 5.0, 12.0, 16.0))
identities = st.builds(lambda record: record.identity, records)


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


class RegistryMachine(RuleBasedStateMachine):
    """Drives a Registry that is asked everything after each step, one that is asked about single envs only (so that it
    frees what ran out bit by bit), a SampleTable, and the model."""

    messages: Bundle[Message] = Bundle("messages")

    @initialize(
        ttl=st.sampled_from((30.0, 30.0, 10.0)),
        tombstone_ttl=st.sampled_from((60.0, 60.0, 20.0, 0.0)),
        silence_limit=st.sampled_from((15.0, 15.0, 40.0)),
    )
    def start(self, ttl: float, tombstone_ttl: float, silence_limit: float) -> None:
        self.now = 1000.0
        self.ttl, self.tombstone_ttl = ttl, tombstone_ttl
        self.model = NaiveRegistry(LOCAL, ttl=ttl, tombstone_ttl=tombstone_ttl, silence_limit=silence_limit)
        self.registry, self.lazy = (
            Registry(LOCAL, ttl, lambda: self.now, tombstone_ttl=tombstone_ttl, silence_limit=silence_limit)
            for _ in range(2)
        )
        self.table = SampleTable(ttl=ttl, tombstone_ttl=tombstone_ttl, silence_limit=silence_limit)
        self.agents = {cluster_id: Agent(cluster_id, f"{cluster_id}-0", self.now - 100.0) for cluster_id in CLUSTERS}
        self.started = 0

    def take_in(self, changes: list[Change]) -> None:
        expected = self.model.apply(changes, self.now)
        assert seen(self.table.apply(changes, self.now)) == seen(expected)
        assert self.registry.apply(changes) == []
        assert self.lazy.apply(changes) == []

    # Peers that send no origin, plugins, tests: samples with a time or without one.

    @rule(
        found=st.lists(records, min_size=1, max_size=4),
        age=st.sampled_from(
            (None, -40.0, -TICK, 0.0, 0.0, TICK, 3.0, 9.875, 10.0, 10.125, 29.875, 30.0, 30.125, 500.0)
        ),
    )
    def upsert(self, found: list[Capacity], age: float | None) -> None:
        stamp = None if age is None else self.now - age
        self.take_in([replace(record, observed_at=stamp) for record in found])

    @rule(gone=st.lists(identities, min_size=1, max_size=2))
    def withdraw(self, gone: list[Identity]) -> None:
        withdrawals: list[Change] = [Withdrawal(identity) for identity in gone]
        assert seen(self.table.apply(withdrawals, self.now)) == seen(self.model.apply(withdrawals, self.now))
        self.registry.withdraw(gone)
        self.lazy.withdraw(gone)

    # Agents and what lies between: batches with a place in their instance's history, delivered late, twice, reordered.

    @rule(
        cluster_id=st.sampled_from(("east", "east", *CLUSTERS)),
        after=st.sampled_from((None, None, 0.0, TICK, -TICK, 5.0, -5.0, 5.125, -5.125, -60.0)),
    )
    def restart(self, cluster_id: str, after: float | None) -> None:
        """Another process takes the place of the cluster's agent: one that starts now, or started so much after the
        other, or turns out to be an earlier one."""
        self.started += 1
        started_at = self.now if after is None else min(self.now, self.agents[cluster_id].started_at + after)
        self.agents[cluster_id] = Agent(cluster_id, f"{cluster_id}-{self.started}", started_at)

    @rule(
        target=messages,
        pause=pauses,
        said=st.lists(st.tuples(records, st.sampled_from((True, True, False))), min_size=1, max_size=3),
        age=st.sampled_from((0.0, 0.0, 0.0, 0.0, 2.0, 20.0, 30.0, 31.0)),
        arrives=st.sampled_from((True, True, False)),
    )
    def report(self, pause: float, said: list[tuple[Capacity, bool]], age: float, arrives: bool) -> Message:
        """An agent sends a batch, of samples and withdrawals; it arrives at once, or only when it is delivered."""
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

    @rule(
        message=messages,
        pause=pauses,
        lateness=st.sampled_from((0.0, 0.0, TICK, 3.0, -5.0, 20.0, 100.0)),
        start_lateness=st.sampled_from((0.0, 0.0, 0.0, TICK, 5.0, 6.0)),
    )
    def deliver(self, message: Message, pause: float, lateness: float, start_lateness: float) -> None:
        """A batch arrives by one of two hubs, after all others so far. By how much a slow way has shortened its age,
        and its instance's uptime, differs from hub to hub."""
        self.now += pause
        changes: list[Change] = []
        for change in message.changes:
            assert change.origin is not None
            started_at = min(change.origin.started_at + start_lateness, self.now)
            origin = change.origin._replace(started_at=started_at)
            if isinstance(change, Capacity):
                changes.append(replace(change, observed_at=observed(change) + lateness, origin=origin))
            else:
                changes.append(change._replace(origin=origin))
        self.take_in(changes)

    @rule(message=messages, arrives=st.permutations(range(4)))
    def deliver_single_records(self, message: Message, arrives: list[int]) -> None:
        """Some of a batch, in another order."""
        self.take_in([message.changes[index] for index in arrives[:2] if index < len(message.changes)])

    # Time.

    @rule(seconds=st.sampled_from((TICK, 1.0, 4.875, 5.0, 5.125, 9.875, 15.0, 15.125, 30.0, 30.125, 60.125)))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.model.endings(self.now))
    @rule(data=st.data(), step=st.sampled_from((0.0, 0.0, TICK)))
    def advance_to_a_boundary(self, data: st.DataObject, step: float) -> None:
        """To the last moment at which something counts, or to the first tick of the grid after it."""
        self.now = data.draw(st.sampled_from(self.model.endings(self.now)), "moment") + step

    @precondition(lambda self: self.model.endings(self.now))
    @rule(data=st.data())
    def step_over_a_boundary(self, data: st.DataObject) -> None:
        """To the last moment at which something counts, and to the next one that a float can tell from it."""
        end = data.draw(st.sampled_from(self.model.endings(self.now)), "moment")
        self.now = end
        self.they_agree()
        self.now = math.nextafter(end, math.inf)
        self.they_agree()
        self.now = end + TICK  # back on the grid before anything is stamped

    # What is always so.

    @invariant()
    def they_agree(self) -> None:
        model, now = self.model, self.now
        model.forget(now)
        for namespace, env, group in QUERIES:
            # The one that is asked nothing else first: its freeing is never more than what these questions cause.
            for registry in (self.lazy, self.registry):
                assert registry.local_idle(namespace, env, group) == model.local_idle(namespace, env, group, now)
                grows = model.local_can_grow(namespace, env, group, now)
                assert registry.local_can_grow(namespace, env, group) == grows
                best = model.best_foreign_member(namespace, env, group, now)
                assert registry.best_foreign_member(namespace, env, group) == best
            if not group:
                expected = seen(model.foreign_members(namespace, env, now))
                assert seen(self.lazy.foreign_members(namespace, env)) == expected
                assert seen(self.registry.foreign_members(namespace, env)) == expected
        visible = model.visible(now)
        snapshot = self.registry.snapshot()
        assert seen(snapshot) == seen(visible)
        assert len(self.registry) == len(visible)
        assert all(0 <= now - observed(record) <= self.ttl for record in snapshot)

    @invariant()
    def what_is_held_is_counted_and_bounded(self) -> None:
        model = self.model
        statistics = self.registry.statistics()
        assert statistics.records == len(model.samples)
        assert statistics.tombstones == len(model.ended)
        assert statistics.instances == len(model.lives)
        self.table.expire(self.now)
        assert seen(sorted(self.table.fresh(self.now), key=repr)) == seen(sorted(model.samples, key=repr))
        remembered = [(ended.identity, ended.origin) for ended in model.ended]
        assert sorted(self.table.withdrawals(self.now), key=repr) == sorted(
            (Withdrawal(identity, origin) for identity, origin in remembered), key=repr
        )
        for table in (self.table, self.registry._table, self.lazy._table):
            held = table.held()
            assert held["entries"] <= 2 * (held["records"] + held["tombstones"] + held["instances"]) + 64

    def teardown(self) -> None:
        """In the end nothing comes in for as long as anything is remembered, and everything is free again."""
        if not hasattr(self, "model"):
            return
        self.now = math.nextafter(self.now + self.ttl, math.inf)
        statistics = self.registry.statistics()
        assert (statistics.visible, statistics.records, statistics.instances) == (0, 0, 0)
        self.now = math.nextafter(self.now + self.tombstone_ttl, math.inf)
        statistics = self.registry.statistics()
        assert (statistics.tombstones, statistics.refused) == (0, {})
        self.table.expire(self.now)
        assert self.table.held() == {"records": 0, "tombstones": 0, "instances": 0, "entries": 0}
        assert self.registry._table.held()["entries"] == 0
        assert not self.registry._table.envs
        assert not self.registry._table._held


def histories(number: int, steps: int) -> settings:
    """So many random histories of up to so many steps. Of those that fail, the shortest of one kind is shown."""
    return settings(max_examples=number, stateful_step_count=steps, report_multiple_bugs=False, phases=PHASES)


def test_it_agrees_with_the_model() -> None:
    run_state_machine_as_test(RegistryMachine, settings=histories(100, 40))


@pytest.mark.slow
def test_it_agrees_with_the_model_over_more_and_longer_histories() -> None:
    run_state_machine_as_test(RegistryMachine, settings=histories(250, 60))

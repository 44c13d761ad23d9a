"""What waits for one receiver, against a model that keeps everything: the newest change per identity and no more, in
the order in which identities began to wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trio_federation.capacity import Capacity, Change, Identity, Withdrawal
from trio_federation.outbox import Outbox, cluster_of, newest, without_cluster

members = st.builds(
    lambda cluster, pool, idle: Capacity(cluster, "ns", "env", pool, idle=idle),
    st.sampled_from(("east", "west")),
    st.sampled_from(("", "p1", "p2", "p3")),
    st.integers(0, 9),
)
changes = members | st.builds(lambda record: Withdrawal(record.identity), members)


class OutboxMachine(RuleBasedStateMachine):
    """Offers, takes and clears in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox()
        self.offered: list[Change] = []
        self.order: list[Identity] = []
        self.newest: dict[Identity, Change] = {}
        self.gone = 0

    @rule(batch=st.lists(changes, max_size=8), for_many=st.booleans())
    def offer(self, batch: list[Change], for_many: bool) -> None:
        """Newer changes replace older ones of the same identity, which keep their turn."""
        if for_many:
            self.outbox.offer_newest(newest(batch), len(batch))
        else:
            self.outbox.offer(iter(batch))
        self.offered += batch
        for change in batch:
            if change.identity not in self.newest:
                self.order.append(change.identity)
            self.newest[change.identity] = change

    @rule(most=st.integers(1, 6))
    def take(self, most: int) -> None:
        """Those that have waited longest come first, each in its newest form."""
        due, self.order = self.order[:most], self.order[most:]
        assert self.outbox.take(most) == [self.newest.pop(identity) for identity in due]
        self.gone += len(due)

    @rule()
    def clear(self) -> None:
        """Nothing waits any more."""
        self.outbox.clear()
        self.gone += len(self.order)
        self.order = []
        self.newest = {}

    @invariant()
    def is_bounded_and_counted(self) -> None:
        """semantics.md, "Hub": "what waits for it is conflated to the newest value per identity, so it loses no final
        state, and its memory is bounded by the number of identities"."""
        assert len(self.outbox) == len(self.order) <= len({change.identity for change in self.offered})
        assert self.outbox.conflated == len(self.offered) - self.gone - len(self.order)


TestOutbox = OutboxMachine.TestCase


@given(st.lists(changes, min_size=1, max_size=30), st.integers(1, 5))
def test_nothing_waits_for_ever_behind_what_keeps_changing(batch: list[Change], most: int) -> None:
    """An identity that has waited is taken within as many steps as there are identities before it, however often the
    others change meanwhile."""
    outbox = Outbox()
    outbox.offer(batch)
    waiting = {change.identity for change in batch}
    for _ in range(-(-len(waiting) // most)):
        waiting -= {change.identity for change in outbox.take(most)}
        outbox.offer(change for change in batch if change.identity not in waiting)
    assert not waiting


@given(st.lists(changes))
def test_a_cluster_can_be_left_out(batch: list[Change]) -> None:
    """A watcher may be spared its own cluster's echo: nothing of it, and everything of the others in the same order."""
    assert without_cluster(batch, "east") == [change for change in batch if change.identity[0] == "west"]
    assert {cluster_of(change) for change in without_cluster(batch, "east")} <= {"west"}

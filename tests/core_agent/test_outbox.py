"""What waits for one receiver, against a model that keeps everything: the newest change per identity and no more, in
the order in which identities began to wait."""

from __future__ import annotations

from collections import Counter

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
            batch = [change for change in batch if cluster_of(change) == "east"]
            self.outbox.offer_newest("east", newest(batch), len(batch))
        else:
            self.outbox.offer(iter(batch))
        self.offered += batch
        for change in batch:
            if change.identity not in self.newest:
                self.order.append(change.identity)
            self.newest[change.identity] = change

    @rule(most=st.integers(1, 6))
    def take(self, most: int) -> None:
        """Of each cluster those that have waited longest come first, each in its newest form; and none takes another's
        share."""
        taken = self.outbox.take(most)
        assert len(taken) == min(most, len(self.order))
        clusters = {identity[0] for identity in self.order}
        for cluster in clusters:
            of_it = [change for change in taken if cluster_of(change) == cluster]
            waited = [identity for identity in self.order if identity[0] == cluster]
            assert of_it == [self.newest[identity] for identity in waited[: len(of_it)]]
            assert len(of_it) >= min(len(waited), most // len(clusters))
        for change in taken:
            self.order.remove(change.identity)
            del self.newest[change.identity]
        self.gone += len(taken)

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
    """An identity that has waited is taken within as many turns of its cluster as there are identities of it before,
    however often the others change meanwhile."""
    outbox = Outbox()
    outbox.offer(batch)
    waiting = {change.identity for change in batch}
    by_cluster = Counter(identity[0] for identity in waiting)
    for _ in range(max(by_cluster.values()) * -(-len(by_cluster) // most)):
        waiting -= {change.identity for change in outbox.take(most)}
        outbox.offer(change for change in batch if change.identity not in waiting)
    assert not waiting


def test_one_that_says_much_does_not_hold_up_the_others() -> None:
    """What the others say goes out with the next message, however much of the one waits."""
    outbox = Outbox()
    outbox.offer(Capacity("east", "ns", "env", f"p{number}") for number in range(10_000))
    outbox.offer(Capacity(cluster, "ns", "env", "p") for cluster in ("north", "south", "west"))
    taken = outbox.take(1000)
    assert Counter(map(cluster_of, taken)) == {"east": 997, "north": 1, "south": 1, "west": 1}
    assert len(outbox) == 9003


@given(st.lists(changes))
def test_a_cluster_can_be_left_out(batch: list[Change]) -> None:
    """A watcher may be spared its own cluster's echo: nothing of it, and everything of the others in the same order."""
    assert without_cluster(batch, "east") == [change for change in batch if change.identity[0] == "west"]
    assert {cluster_of(change) for change in without_cluster(batch, "east")} <= {"west"}

"""What waits for one receiver: the newest change per identity, so that a slow receiver loses no final state and its
queue is bounded by the number of identities; and the clusters in turn, so that what one of them says, however much it
is, does not hold up what the others say. Pure; waking the task that sends is the owner's business."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from trio_federation.capacity import Capacity, Change, Identity


class Outbox:
    """Changes for one receiver, conflated. They must be offered in the order in which they became known."""

    def __init__(self) -> None:
        #: by cluster, whose turn it is first; no entry for none
        self._waiting: dict[str, dict[Identity, Change]] = {}
        self._count = 0
        #: changes that were replaced by a newer one of the same identity before they were sent
        self.conflated = 0

    def offer(self, changes: Iterable[Change]) -> None:
        """Add changes. One that replaces another keeps the older one's turn, so that nothing waits for ever."""
        by_cluster: dict[str, list[Change]] = {}
        for change in changes:
            by_cluster.setdefault(cluster_of(change), []).append(change)
        for cluster_id, of_it in by_cluster.items():
            self.offer_newest(cluster_id, newest(of_it), len(of_it))

    def offer_newest(self, cluster_id: str, changes: Mapping[Identity, Change], offered: int) -> None:
        """Add changes of one cluster as `offer` does, by identity, which is quicker where the same ones go to many.
        `offered`: how many there were, before of several of one identity only the newest was kept."""
        if not changes:
            return
        waiting = self._waiting.setdefault(cluster_id, {})
        before = len(waiting)
        waiting.update(changes)
        new = len(waiting) - before
        self._count += new
        self.conflated += offered - new

    def take(self, most: int) -> list[Change]:
        """Remove and return `most` changes, or all where there are no more: of each cluster those that have waited
        longest, and of every cluster an equal share, as far as it has so many."""
        taken: list[Change] = []
        if self._count <= most:
            for waiting in self._waiting.values():
                taken += waiting.values()
            self.clear()
            return taken
        left = most
        while left:
            share = max(1, left // len(self._waiting))
            for cluster_id in list(islice(self._waiting, left)):
                waiting = self._waiting.pop(cluster_id)
                if len(waiting) <= share:
                    taken += waiting.values()
                else:
                    taken += [waiting.pop(identity) for identity in list(islice(waiting, share))]
                    self._waiting[cluster_id] = waiting  # the last in line now
            left = most - len(taken)
        self._count -= most
        return taken

    def clear(self) -> None:
        """Drop everything: it is about to be sent in another way."""
        self._waiting.clear()
        self._count = 0

    def __len__(self) -> int:
        return self._count


def newest(changes: Iterable[Change]) -> dict[Identity, Change]:
    """The last change of each identity, in the order of the first ones."""
    return {change.identity: change for change in changes}


def without_cluster(changes: Iterable[Change], cluster_id: str) -> list[Change]:
    """The changes that concern any other cluster."""
    # As `cluster_of`, in place: every record that an agent watches goes through here.
    return [
        change
        for change in changes
        if (change.cluster_id if isinstance(change, Capacity) else change.identity[0]) != cluster_id
    ]


def cluster_of(change: Change) -> str:
    """The cluster that a change is about."""
    return change.cluster_id if isinstance(change, Capacity) else change.identity[0]

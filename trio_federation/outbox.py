"""What waits for one receiver: the newest change per identity, so that a slow receiver loses no final state and its
queue is bounded by the number of identities. Pure; waking the task that sends is the owner's business."""

from __future__ import annotations

from collections.abc import Iterable

from trio_federation.capacity import Capacity, Change, Identity


class Outbox:
    """Changes for one receiver, conflated. They must be offered in the order in which they became known."""

    def __init__(self) -> None:
        self._waiting: dict[Identity, Change] = {}
        #: changes that were replaced by a newer one of the same identity before they were sent
        self.conflated = 0

    def offer(self, changes: Iterable[Change]) -> None:
        """Add changes. One that replaces another keeps the older one's turn, so that nothing waits for ever."""
        waiting = self._waiting
        before = len(waiting)
        offered = 0
        for change in changes:
            waiting[change.identity] = change
            offered += 1
        self.conflated += offered - (len(waiting) - before)

    def take(self, most: int) -> list[Change]:
        """Remove and return the `most` changes that have waited longest."""
        if len(self._waiting) <= most:
            taken = list(self._waiting.values())
            self._waiting.clear()
            return taken
        identities = [identity for identity, _ in zip(self._waiting, range(most), strict=False)]
        return [self._waiting.pop(identity) for identity in identities]

    def clear(self) -> None:
        """Drop everything: it is about to be sent in another way."""
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)


def without_cluster(changes: Iterable[Change], cluster_id: str) -> list[Change]:
    """The changes that concern any other cluster."""
    return [change for change in changes if cluster_of(change) != cluster_id]


def cluster_of(change: Change) -> str:
    """The cluster that a change is about."""
    return change.cluster_id if isinstance(change, Capacity) else change.identity[0]

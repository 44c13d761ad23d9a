"""What waits for one receiver: the newest change per identity, so that a slow receiver loses no final state and its
queue is bounded by the number of identities. Pure; waking the task that sends is the owner's business."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trio_federation.capacity import Capacity, Change, Identity


class Outbox:
    """Changes for one receiver, conflated. They must be offered in the order in which they became known."""

    def __init__(self) -> None:
        self._waiting: dict[Identity, Change] = {}
        #: changes that were replaced by a newer one of the same identity before they were sent
        self.conflated = 0

    def offer(self, changes: Iterable[Change]) -> None:
        """Add changes. One that replaces another keeps the older one's turn, so that nothing waits for ever."""
        changes = list(changes)
        self.offer_newest(newest(changes), len(changes))

    def offer_newest(self, changes: Mapping[Identity, Change], offered: int) -> None:
        """Add changes as `offer` does, by identity, which is quicker where the same ones go to many. `offered`: how
        many there were, before of several of one identity only the newest was kept."""
        before = len(self._waiting)
        self._waiting.update(changes)
        self.conflated += offered - (len(self._waiting) - before)

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

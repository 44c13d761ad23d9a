"""Takes in what one hub relays: turns its broadcasts into changes on the local clock, drops what is not a hub's to say,
and hands the rest over. The channel that it hands over to is bounded; while it is full the stream is not read, so that
the hub conflates what waits. What becomes of the changes is the Registry's business."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from trio_federation.capacity import Change, Fault
from trio_federation.clock import Clock
from trio_federation.outbox import without_cluster
from trio_federation.rpc import WatchCall
from trio_federation.wire import RecordMessage, changes_of

#: Told of records that were dropped: the faults of one broadcast.
Refused = Callable[[Sequence[Fault]], None]


def _ignore(_records: int) -> None:
    pass


class Watcher:
    """One hub's share of the watching. `deliver`: where changes go. `refused`: told of what was dropped, and why."""

    def __init__(
        self, cluster_id: str, clock: Clock, deliver: trio.MemorySendChannel[list[Change]], refused: Refused
    ) -> None:
        self._cluster_id = cluster_id
        self._clock = clock
        self._deliver = deliver
        self._refused = refused
        #: whether a watch call is open and the hub has answered on it
        self.watching = False

    async def watch(self, call: WatchCall, received: Callable[[int], None] = _ignore) -> None:
        """Take in broadcasts until the call fails, with an RpcError. `received` is told of the number of records in
        each of them."""
        try:
            while True:
                broadcast = await call.receive()
                self.watching = True
                received(len(broadcast.items))
                changes = self._take(broadcast)
                if changes:
                    await self._deliver.send(changes)
        finally:
            self.watching = False

    def _take(self, broadcast: RecordMessage) -> list[Change]:
        # The stamps are made here, at receipt: time spent in the channel counts as age.
        received = changes_of(broadcast, self._clock())
        changes = without_cluster(received.changes, self._cluster_id)
        refused = list(received.refused)
        # Local truth never goes through a hub: its echo could only be older.
        own = len(received.changes) - len(changes)
        refused += [Fault("own_cluster", f"a record of our own cluster {self._cluster_id}, echoed")] * own
        if refused:
            self._refused(refused)
        return changes

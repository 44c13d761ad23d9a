"""Takes in what one hub relays: turns its broadcasts into changes on the local clock, older by what each of them has
waited on its way, drops what is not a hub's to say, and hands the rest over. The channel that it hands over to is
bounded; while it is full the stream is not read, so that the hub conflates what waits. What becomes of the changes is
the Registry's business."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import trio

from trio_federation.capacity import Change, Fault
from trio_federation.clock import Clock
from trio_federation.errors import Late, Unavailable
from trio_federation.outbox import without_cluster
from trio_federation.pb.sandbox.sync.v1 import WatchFederationRequest
from trio_federation.rpc import WatchCall
from trio_federation.waits import Waits
from trio_federation.wire import RecordMessage, changes_of

#: Told of records that were dropped: the faults of one broadcast.
Refused = Callable[[Sequence[Fault]], None]


def _ignore(_told: float) -> None:
    pass


class Watcher:
    """One hub's share of the watching. `deliver`: where changes go. `refused`: told of what was dropped, and why.

    `beat`: seconds without anything to tell after which a hub is asked for a sign of life on the call.
    `silence_limit`: seconds without one after which the call is given up, of a hub that is known to give them.
    `ttl`: seconds that a broadcast may have waited on its way; after that nothing in it counts any more, and a new
    connection is quicker."""

    def __init__(
        self,
        cluster_id: str,
        clock: Clock,
        deliver: trio.MemorySendChannel[list[Change]],
        refused: Refused,
        *,
        beat: float,
        silence_limit: float,
        ttl: float,
    ) -> None:
        self._cluster_id = cluster_id
        self._clock = clock
        self._deliver = deliver
        self._refused = refused
        #: what each call asks for
        self.request = WatchFederationRequest(spare_own_cluster=True, beat_ms=max(1, round(beat * 1000)))
        #: seconds, of a hub that gives signs of life
        self.silence_limit = silence_limit
        self._ttl = ttl
        #: whether a watch call is open and the hub has answered on it
        self.watching = False
        #: whether the hub is one that gives the signs of life that it is asked for, as far as its last call has told
        self.hub_beats = False
        #: how many clusters report to the hub, as far as its last call has told
        self.clusters = 0
        #: Trio's time since which a broadcast is waited for; infinite while none is
        self._receiving_since = math.inf

    async def watch(
        self,
        call: WatchCall,
        received: Callable[[int], None] = _ignore,
        waited: Callable[[float], None] = _ignore,
    ) -> None:
        """Take in broadcasts until the call fails, with an RpcError. `received` is told of the number of records in
        each of them, of none only for the snapshot: the others are a hub's first word and signs of life. `waited`: for
        how many seconds each of them has waited on its way."""
        waits = Waits(self._clock() - (trio.current_time() - call.began))
        has_snapshot = False
        try:
            while True:
                self._receiving_since = trio.current_time()
                broadcast = await call.receive()
                self._receiving_since = math.inf
                if broadcast.items or not (has_snapshot or broadcast.opened_us):
                    has_snapshot = True
                    received(len(broadcast.items))
                self.watching = True
                self.hub_beats = broadcast.sent_us > 0
                self.clusters = broadcast.clusters or self.clusters
                # The stamps are made here, at receipt: time spent in the channel counts as age.
                now = self._clock()
                wait = waits.waited(broadcast.sent_us, broadcast.opened_us, now)
                waited(wait)
                if wait >= self._ttl:
                    raise Late(
                        f"what the hub tells is {wait:.0f} s on its way, and counts for {self._ttl:g} s only",
                        peer=call.peer,
                    )
                changes = self._take(broadcast, now - wait)
                if changes:
                    await self._deliver.send(changes)
        finally:
            self.watching = False
            self._receiving_since = math.inf

    async def notice_silence(self, call: WatchCall) -> NoReturn:
        """Runs beside `watch`, and raises Unavailable when nothing has come in on the call for too long. A call may die
        while its connection lives, for instance in a proxy, and is noticed by nothing but the silence on it."""
        while True:
            silent_since = max(call.last_received, self._receiving_since)
            due_at = silent_since + self.silence_limit
            if self.hub_beats and trio.current_time() >= due_at:
                raise Unavailable(f"the watch was silent for {self.silence_limit:g} s", peer=call.peer)
            # While this side does not listen, and of a hub that need not say anything, there is nothing to notice.
            is_due = self.hub_beats and due_at < math.inf
            await trio.sleep_until(due_at if is_due else trio.current_time() + self.silence_limit)

    def _take(self, broadcast: RecordMessage, now: float) -> list[Change]:
        received = changes_of(broadcast, now)
        changes = without_cluster(received.changes, self._cluster_id)
        refused = list(received.refused)
        # Local truth never goes through a hub: its echo could only be older.
        own = len(received.changes) - len(changes)
        refused += [Fault("own_cluster", f"a record of our own cluster {self._cluster_id}, echoed")] * own
        if refused:
            self._refused(refused)
        return changes

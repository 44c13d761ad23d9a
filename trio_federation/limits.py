"""What one peer may ask for: connections of one address, calls of one cluster, and how many messages and records it may
send in a time. Pure: it counts, and times are arguments. What is over a limit is refused, so that it costs neither
memory nor the time of others. Ending the call or the connection is the hub's business; what may be said at all is
`policy.py`."""

from __future__ import annotations

import math

from trio_federation.config import Limits
from trio_federation.errors import ResourceExhausted

#: Seconds over which a rate is an average: what was not used in them may come at once.
BURST = 10.0


class Allowance:
    """How much may still come: `rate` a second, and up to BURST seconds of it at once. It begins full, or with `first`.

    Raises ValueError for a rate that is not a positive number."""

    __slots__ = ("_at", "_left", "_most", "_rate")

    def __init__(self, rate: float, *, first: float = math.inf) -> None:
        if not 0 < rate < math.inf:
            raise ValueError(f"a rate of {rate} is not a positive number")
        self._rate = rate
        self._most = rate * BURST
        self._left = min(first, self._most)
        self._at = -math.inf

    def take(self, amount: int, now: float) -> bool:
        """Take so much, if it is there at `now`, in seconds; else take nothing, and return False. More than the whole
        is never there. A time before the latest one gives nothing, and takes nothing away."""
        assert amount >= 0
        left = self._left_at(now)
        if now > self._at:
            self._at = now
        taken = amount <= left
        self._left = left - amount if taken else left
        return taken

    def left(self, now: float) -> float:
        """How much is there at `now`, in seconds."""
        return self._left_at(now)

    def is_full(self, now: float) -> bool:
        """Whether as much is there as can be, so that a new one would be no different."""
        return self._left_at(now) >= self._most

    def could_hold(self, amount: int) -> bool:
        """Whether so much can be there at any time."""
        return amount <= self._most

    def _left_at(self, now: float) -> float:
        if now <= self._at or self._at == -math.inf:
            return self._left
        return min(self._most, self._left + (now - self._at) * self._rate)


class _Cluster:
    """What one cluster uses."""

    __slots__ = ("calls", "messages", "records")

    def __init__(self, limits: Limits) -> None:
        self.calls = 0
        self.messages = Allowance(limits.message_rate)
        self.records = Allowance(limits.record_rate)


class Limiter:
    """Counts what every peer uses, and refuses what is over the limits. It remembers who is active, and nobody else, as
    long as `forget` is called now and then."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: open connections by address; no entry for none
        self._connections: dict[str, int] = {}
        self._clusters: dict[str, _Cluster] = {}

    def open_connection(self, address: str) -> bool:
        """Count a connection from an address, without its port; False, and nothing counted, where it has too many."""
        count = self._connections.get(address, 0)
        if count >= self.limits.connections:
            return False
        self._connections[address] = count + 1
        return True

    def close_connection(self, address: str) -> None:
        """A connection that was counted has ended."""
        count = self._connections.get(address, 0)
        assert count > 0, f"no connection from {address} is open"
        if count > 1:
            self._connections[address] = count - 1
        else:
            del self._connections[address]

    def open_call(self, cluster_id: str) -> None:
        """Count a call of a cluster. Raises ResourceExhausted, and counts nothing, where it has too many open."""
        cluster = self._cluster(cluster_id)
        if cluster.calls >= self.limits.streams:
            raise ResourceExhausted(
                f"cluster {cluster_id!r} has {_many(cluster.calls, 'call')} open, and more are not served; end some, "
                "or raise streams in the hub's [hub.limits]"
            )
        cluster.calls += 1

    def close_call(self, cluster_id: str) -> None:
        """A call that was counted has ended."""
        cluster = self._cluster(cluster_id)
        assert cluster.calls > 0, f"cluster {cluster_id!r} has no call open"
        cluster.calls -= 1

    def message(self, cluster_id: str, records: int, now: float) -> None:
        """Count one message of a cluster, with so many records, that came at `now`, in seconds.

        Raises ResourceExhausted where that is too much for the time. A message whose records are too many has counted
        as a message all the same; its records have not."""
        cluster = self._cluster(cluster_id)
        if not cluster.messages.take(1, now):
            raise ResourceExhausted(
                f"cluster {cluster_id!r} sends more than {_many(self.limits.message_rate, 'message')} a second; send "
                "fewer, or raise message_rate in the hub's [hub.limits]"
            )
        if cluster.records.take(records, now):
            return
        if not cluster.records.could_hold(records):
            raise ResourceExhausted(
                f"cluster {cluster_id!r} sends {records} records in one message, more than {BURST:g} s of "
                f"{_many(self.limits.record_rate, 'record')} a second allow; send fewer at once, or raise record_rate "
                "in the hub's [hub.limits]"
            )
        raise ResourceExhausted(
            f"cluster {cluster_id!r} sends more than {_many(self.limits.record_rate, 'record')} a second; send fewer, "
            "or raise record_rate in the hub's [hub.limits]"
        )

    def forget(self, now: float) -> None:
        """Free every cluster with no call open that has used nothing for so long that it might be a new one. Costs time
        in the clusters."""
        gone = [
            cluster_id
            for cluster_id, cluster in self._clusters.items()
            if cluster.calls == 0 and cluster.messages.is_full(now) and cluster.records.is_full(now)
        ]
        for cluster_id in gone:
            del self._clusters[cluster_id]

    def held(self) -> dict[str, int]:
        """How many things are kept, for tests and metrics: addresses, clusters, and what is open of each."""
        return {
            "addresses": len(self._connections),
            "connections": sum(self._connections.values()),
            "clusters": len(self._clusters),
            "calls": sum(cluster.calls for cluster in self._clusters.values()),
        }

    def _cluster(self, cluster_id: str) -> _Cluster:
        cluster = self._clusters.get(cluster_id)
        if cluster is None:
            cluster = self._clusters[cluster_id] = _Cluster(self.limits)
        return cluster


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"

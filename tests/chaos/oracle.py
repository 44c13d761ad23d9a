"""The reference clock of a chaos run: what is true in each cluster from when to when, and what is false in what a
registry answers. Pure: every moment is an argument, seconds on the clock of whoever runs the test. What is true is said
by whoever makes it so; nothing here knows of processes and faults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: The first numbers of two clusters are so far apart, so that none can pass for another's.
APART = 1_000_000


class Seen(NamedTuple):
    """A record as a registry shows it: the number, and how old it is said to be, in seconds."""

    value: int
    age: float


class Answer(NamedTuple):
    """What the registry of one agent has answered, at some moment between the two."""

    observer: str
    asked_at: float
    answered_at: float
    #: by cluster and pool
    records: Mapping[tuple[str, str], Seen]


class Breach(NamedTuple):
    """Something that is wrong, as a kind and as a line for people."""

    kind: str
    at: float
    text: str


@dataclass(slots=True)
class _True:
    """One number: since when, and until when, it may be found at the source."""

    since: float
    until: float = math.inf


@dataclass(slots=True)
class _Cluster:
    first: int
    said: list[_True] = field(default_factory=list)
    #: since when nobody speaks for it; infinite while somebody may
    dead_since: float = math.inf


class Oracle:
    """Knows the truth, and judges answers by it. `ttl`: seconds for which a record counts."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        #: the longest by which a record was older than it said, in seconds, since this was last set to 0
        self.youngest = 0.0
        self._clusters: dict[str, _Cluster] = {}

    # What is true.

    def next_value(self, cluster: str) -> int:
        """The number to say next for a cluster. None is said twice."""
        known = self._clusters.setdefault(cluster, _Cluster((len(self._clusters) + 1) * APART))
        return known.first + len(known.said)

    def said(self, cluster: str, since: float, until: float) -> None:
        """The next number was found at the source from `since` on at the earliest, and the one before it until `until`
        at the latest."""
        known = self._clusters[cluster]
        if known.said:
            known.said[-1].until = until
        known.said.append(_True(since))

    def died(self, cluster: str, at: float) -> None:
        """Nobody speaks for the cluster any more."""
        self._clusters[cluster].dead_since = at

    def lives(self, cluster: str) -> None:
        """Somebody may speak for the cluster again."""
        self._clusters[cluster].dead_since = math.inf

    # What was answered.

    def breaches(self, answer: Answer, slack: float) -> list[Breach]:
        """What is false in an answer. `slack`: seconds that no age can know of.

        - `unsaid`: a number that the cluster has never said, or not yet;
        - `old`: a record that stopped being true more than a TTL before;
        - `dead`: a record of a cluster for which nobody has spoken for more than a TTL;
        - `younger`: a record that stopped being true longer ago than it says."""
        found: list[Breach] = []

        def add(kind: str, key: tuple[str, str], text: str) -> None:
            cluster, pool = key
            line = f"{answer.observer} has shown {cluster}::{pool} with {answer.records[key].value}, {text}"
            found.append(Breach(kind, answer.asked_at, line))

        for key, seen in answer.records.items():
            cluster = key[0]
            known = self._clusters.get(cluster)
            index = -1 if known is None else seen.value - known.first
            if known is None or not 0 <= index < len(known.said) or known.said[index].since > answer.answered_at:
                add("unsaid", key, "which nobody has said")
                continue
            past = answer.asked_at - known.said[index].until
            if past > self.ttl + slack:
                add("old", key, f"which was over for {past:.2f} s; the TTL is {self.ttl:g} s")
            if (gone := answer.asked_at - known.dead_since) > self.ttl + slack:
                add("dead", key, f"{gone:.2f} s after its death; the TTL is {self.ttl:g} s")
            self.youngest = max(self.youngest, past - seen.age)
            if past - seen.age > slack:
                add("younger", key, f"{seen.age:.2f} s old, it says; it was over for {past:.2f} s")
        return found

    def is_current(self, answer: Answer, cluster: str, pool: str, *, within: float, since: float) -> bool:
        """Whether what an answer shows of a pool was true within that many seconds before it was asked for, and was
        first said at `since` or later."""
        seen = answer.records.get((cluster, pool))
        known = self._clusters[cluster]
        if seen is None or not 0 <= seen.value - known.first < len(known.said):
            return False
        said = known.said[seen.value - known.first]
        return answer.asked_at - said.until <= within and said.since >= since

"""What is true in a cluster of a soak, and how it changes: numbers, and names that come and go. From a seed. Pure: it
knows nothing of time; when something changes is the caller's business."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from trio_federation.capacity import Capacity

#: Records of a cluster: so many, or one more. What is held must not grow because there is more to hold.
RECORDS = 5
#: the envs that every cluster has pools of
SHARED_ENVS = ("python", "node")

#: A record as it is compared: cluster, namespace, env, pool, group, idle.
Row: TypeAlias = tuple[str, str, str, str, str, int]


class Cluster:
    """One cluster's truth."""

    def __init__(self, cluster_id: str, generator: random.Random) -> None:
        self.cluster_id = cluster_id
        self._random = generator
        self._named = 0
        #: what was done, by kind
        self.done: Counter[str] = Counter()
        #: Replaced as a whole, so that other threads may read it at any time.
        self.records: tuple[Capacity, ...] = ()
        for _ in range(RECORDS):
            self._add_pool(self._random.choice(SHARED_ENVS))
        self.done.clear()

    def change(self) -> None:
        """Do one thing: mostly other numbers, and now and then names that nobody has heard before."""
        drawn = self._random.random()
        if drawn < 0.8:
            index = self._random.randrange(len(self.records))
            old = self.records[index]
            new = replace(old, idle=(old.idle + self._random.randrange(1, 50)) % 100, running=self._random.randrange(9))
            self.records = (*self.records[:index], new, *self.records[index + 1 :])
            self.done["value"] += 1
        elif len(self.records) > RECORDS:
            index = self._random.randrange(len(self.records))
            self.records = (*self.records[:index], *self.records[index + 1 :])
            self.done["pool gone"] += 1
        elif drawn < 0.95:
            self._add_pool(self._random.choice(SHARED_ENVS))
        else:
            self._add_pool(self._new_name("env"))
            self.done["new env"] += 1

    def settle(self) -> None:
        """Come to rest with as much as at the beginning: RECORDS pools, all of them in envs that others have, too. What
        is held of that at one rest can be compared with what is held at another."""
        self.records = tuple(record for record in self.records if record.env_name in SHARED_ENVS)[-RECORDS:]
        while len(self.records) < RECORDS:
            self._add_pool(self._random.choice(SHARED_ENVS))

    def _add_pool(self, env_name: str) -> None:
        group = self._new_name("group") if self._random.random() < 0.3 else self._random.choice(("", "cpu", "gpu"))
        made = Capacity(
            self.cluster_id,
            "team-a",
            env_name,
            self._new_name("pool"),
            group,
            idle=self._random.randrange(100),
            desired=100,
            autoscaling_enabled=True,
            capacity=self._random.choice((-1, 0, 20)),
        )
        self.records = (*self.records, made)
        self.done["new pool"] += 1

    def _new_name(self, what: str) -> str:
        self._named += 1
        return f"{what}-{self.cluster_id}-{self._named}"


def rows(records: Iterable[Capacity]) -> list[Row]:
    """Records as they are compared, in order."""
    return sorted(
        (each.cluster_id, each.namespace, each.env_name, each.member_pool, each.scaling_group, each.idle)
        for each in records
    )

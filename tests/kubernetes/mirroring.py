"""A sink that is run by a real agent, on virtual time, against an API server in memory, and the rest of the fleet as
such an agent hears of it. What is right is up to the tests; what no sink may ever send is checked here, whatever the
test (see `Mirroring.check`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from random import Random
from typing import Any

import trio
from structlog.typing import EventDict

from tests.federation.helpers import counted
from tests.kubernetes.fake_api import FakeConnection, FakeServer, env_body, pool, sandboxenvs
from tests.kubernetes.fake_apply import Json
from tests.simulation import member
from trio_federation import Capacity, SinkContext
from trio_federation.agent import Agent
from trio_federation.config import Federation
from trio_federation.registry import Registry
from trio_federation.testing import sink_context
from trio_federation_kubernetes.client import Answer
from trio_federation_kubernetes.options import StatusOptions
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS
from trio_federation_kubernetes.sink import KubernetesStatusSink

#: the cluster whose envs are written
OWN = "west"
#: as the sink is known to the API server
MANAGER = "trio-federation"
#: what every write says of itself: not forced, and refused where a field is unknown
PARAMETERS = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
TTL = 30.0
#: Seconds until a sink has been told what is new, and has written it, where nothing is in the way: an agent looks once
#: a second.
SOON = 1.2
#: seconds in which agents are told what others have, again and again
REPORTS = 10.0
#: writes under way at a time
IN_FLIGHT = 4
#: what a computer makes of sums of seconds
ROUNDING = 1e-6
NAME = "sink[0]:kubernetes-status"


class StatusServer(FakeServer):
    """An API server that knows SandboxEnvs, as this repository defines them unless a test has them otherwise."""

    def __init__(self, definition: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(SANDBOXENVS, numeric_versions=True, **options)
        self.define(definition if definition is not None else sandboxenvs())
        self._made = 0

    def make(self, *names: str, namespace: str = "ns", idle: int = 2) -> None:
        """Envs of the cluster of this server, each with so many idle sandboxes in one pool."""
        for name in names:
            self._made += 1
            self.put(SANDBOXENVS, namespace, name, metadata={"uid": f"uid-{self._made}"}, **env_body(pool("own", idle)))

    def tick(self, name: str = "env", *, namespace: str = "ns", manager: str = "controller", idle: int = 0) -> None:
        """The controller has counted anew, and writes its own entry as it should."""

        def count(status: Json) -> None:
            (local,) = (entry for entry in status["clusters"] if entry["isLocal"])
            local["observedMembers"] = [pool("own", idle)]

        self.edit(SANDBOXENVS, namespace, name, count, manager)

    def replace_list(
        self,
        *others: Mapping[str, Any],
        name: str = "env",
        namespace: str = "ns",
        manager: str = "controller",
        idle: int = 2,
    ) -> None:
        """Somebody puts a list of its own in place of status.clusters: the local entry, and these."""
        local = env_body(pool("own", idle))["status"]["clusters"][0]
        body = {"status": {"clusters": [local, *others]}}
        self.merge_patch(SANDBOXENVS, namespace, name, body, manager)

    def env(self, name: str = "env", namespace: str = "ns") -> Json:
        """One of them, as it is."""
        return self.get(SANDBOXENVS, namespace, name)

    def entries(self, name: str = "env", namespace: str = "ns") -> dict[str, Json]:
        """What stands in status.clusters, by cluster, each of which must be there once."""
        listed = self.env(name, namespace).get("status", {}).get("clusters", [])
        found = {entry["clusterID"]: entry for entry in listed}
        assert len(found) == len(listed), listed
        return found

    def foreign(self, name: str = "env", namespace: str = "ns") -> dict[str, dict[str, int]]:
        """What an env says that other clusters have: by cluster, the idle sandboxes of each pool."""
        return {
            cluster: {each["name"]: each["idleCount"] for each in entry.get("observedMembers", ())}
            for cluster, entry in self.entries(name, namespace).items()
            if not entry["isLocal"]
        }

    def summary(self, name: str = "env", namespace: str = "ns") -> tuple[int, int] | None:
        """How many clusters and how many idle sandboxes stand in status.federation; None where it is not there."""
        found = self.env(name, namespace).get("status", {}).get("federation")
        return None if found is None else (found["clusters"], found["idleReplicas"])

    def managed(self, *managers: str, name: str = "env", namespace: str = "ns") -> list[Json]:
        """What is noted of who owns what: of these managers, or of all others than the sink."""
        return [
            each
            for each in self.env(name, namespace)["metadata"].get("managedFields", ())
            if (each["manager"] in managers if managers else each["manager"] != MANAGER)
        ]


def unix(time: str) -> float:
    """What an RFC 3339 time is, in Unix seconds."""
    return datetime.fromisoformat(time).timestamp()


@dataclass
class Sent:
    """A write that was sent."""

    #: seconds on the clock
    at: float
    key: Key
    params: Mapping[str, str]
    body: Json
    #: whether the server has said that it is done
    done: bool = False
    #: when there was an answer, or it was given up
    ended: float | None = None

    @property
    def clusters(self) -> list[str]:
        """The clusters that it has entries of."""
        return [entry["clusterID"] for entry in self.body.get("status", {}).get("clusters", ())]


class Writer(FakeConnection):
    """The way of one sink to the server, which keeps what goes over it."""

    def __init__(self, server: FakeServer, sent: list[Sent]) -> None:
        super().__init__(server)
        self._sent = sent
        self._under_way = 0
        #: the most writes that were under way at a time
        self.most_under_way = 0
        #: watches that are open
        self.open_watches = 0

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, deadline: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """As ever."""
        async with super().stream(path, params, deadline=deadline) as chunks:
            self.open_watches += 1
            try:
                yield chunks
            finally:
                self.open_watches -= 1

    async def apply(self, path: str, params: Mapping[str, str], body: bytes, *, deadline: float = 10.0) -> Answer:
        """As ever."""
        parts = path.strip("/").split("/")
        sent = Sent(trio.current_time(), (parts[4], parts[6]), dict(params), json.loads(body))
        self._sent.append(sent)
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        try:
            answer = await super().apply(path, params, body, deadline=deadline)
            sent.done = True
        finally:
            self._under_way -= 1
            sent.ended = trio.current_time()
        return answer


class Others:
    """The rest of the fleet, as a registry hears of it: what each cluster has, again and again, for as long as it
    lives."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._records: dict[object, Capacity] = {}

    def have(self, *records: Capacity) -> None:
        """From now on."""
        for record in records:
            self._records[record.identity] = record
        self._tell(records)

    def withdraw(self, *records: Capacity) -> None:
        """They are gone, and those that had them say so."""
        for record in records:
            del self._records[record.identity]
        self._registry.withdraw(record.identity for record in records)

    def fall_silent(self, *clusters: str) -> None:
        """Nothing more is heard of them."""
        self._records = {
            identity: record for identity, record in self._records.items() if record.cluster_id not in clusters
        }

    async def keep_telling(self) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(REPORTS)
            self._tell(self._records.values())

    def _tell(self, records: Any) -> None:
        now = self._registry.now()
        assert self._registry.upsert([replace(record, observed_at=now) for record in records]) == []


class Mirroring:
    """An agent of cluster "west" with a sink, both at work."""

    def __init__(
        self,
        server: FakeServer,
        *,
        is_reporter: Callable[[], bool | None] = lambda: True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.server = server
        self.options = StatusOptions(**options)
        #: what was sent, by all lives of the sink
        self.sent: list[Sent] = []
        self._writers: list[Writer] = []
        context = sink_context(name=NAME, cluster_id=OWN, random=Random(seed), ttl=TTL, is_reporter=is_reporter)
        self.agent = Agent(OWN, Federation(ttl=TTL), sinks={NAME: lambda: self._make(context)}, generator=Random(seed))
        self.others = Others(self.agent.registry)
        #: cancelled to stop the agent
        self.scope = trio.CancelScope()
        #: the sink that was made last
        self.sink: KubernetesStatusSink
        #: envs that were deleted meanwhile, of which the next life knows nothing
        self.reborn: set[Key] = set()

    def _make(self, context: SinkContext) -> KubernetesStatusSink:
        self.sink = KubernetesStatusSink(self.options, context, connect=self._connect)
        return self.sink

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[FakeConnection]:
        await trio.lowlevel.checkpoint()
        self._writers.append(Writer(self.server, self.sent))
        yield self._writers[-1]

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the agent until it is stopped."""
        with self.scope:
            await self.agent.run(task_status=task_status)

    def since(self, moment: float) -> list[Sent]:
        """What was sent since then."""
        return [sent for sent in self.sent if sent.at >= moment]

    def most_under_way(self) -> int:
        """The most writes that were under way at a time."""
        return max((writer.most_under_way for writer in self._writers), default=0)

    def shown(self) -> dict[str, Any]:
        """What /readyz says of the sink."""
        (found,) = self.agent.health()["sinks"]
        assert isinstance(found, dict)
        return found

    def troubles(self) -> dict[tuple[str, str], float]:
        """The metric of what is in the way, by reason and party, without what is over."""
        return {
            (sample.labels["reason"], sample.labels["party"]): sample.value
            for family in self.agent.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "trio_federation_sink_trouble" and sample.value
        }

    def well(self) -> bool:
        """Whether nothing is in the way, by all that people can see."""
        return self.troubles() == {} and self.shown()["state"] == "working" and self.sink.troubles() == []

    def check(self) -> None:
        """What was sent is what may be sent.

        - Each write says who it is of, is not forced, and strictly checked.
        - It has entries of other clusters, each once, in order, with their time; and nothing in it is empty.
        - There are no more writes than the cap lets pass, and no more than a few at a time.
        - After a write that was done, the same env is not written again before its interval is over.

        And the sink has never failed, and has left nothing open."""
        done: dict[Key, float] = {}
        for sent in self.sent:
            assert sent.params == PARAMETERS
            assert sent.body["metadata"] == {"namespace": sent.key[0], "name": sent.key[1]}
            assert sent.body.keys() <= {"apiVersion", "kind", "metadata", "status"}
            assert not _has_nothing(sent.body)
            if "status" in sent.body:
                assert sent.body["status"].keys() <= {"clusters", "federation"}
                assert sent.clusters == sorted(set(sent.clusters)) != []
                assert OWN not in sent.clusters
                for entry in sent.body["status"]["clusters"]:
                    assert entry["isLocal"] is False
                    if entry.keys() == {"clusterID", "isLocal"}:
                        continue  # one that holds a list's place
                    assert unix(entry["lastSnapshotTime"]) <= self.server.wall_offset + sent.at
            if sent.key not in self.reborn:
                assert sent.at >= done.get(sent.key, -1e9) + self._env_interval() - ROUNDING, sent
            if sent.done:
                done[sent.key] = sent.at
        assert all(sent.ended is not None for sent in self.sent)
        assert all(writer.open_watches == 0 for writer in self._writers)
        assert self.most_under_way() <= IN_FLIGHT
        assert counted(self.agent, "trio_federation_sink_failures_total") == 0
        least = 1 / self.options.writes_per_second
        assert all(after.at - before.at >= least - ROUNDING for before, after in pairwise(self.sent))

    def _env_interval(self) -> float:
        return float(self.options.env_interval.removesuffix("s"))


def _has_nothing(value: object) -> bool:
    """Whether there is a null, or something that holds nothing, anywhere in it."""
    if isinstance(value, dict):
        return not value or any(map(_has_nothing, value.values()))
    if isinstance(value, list):
        return not value or any(map(_has_nothing, value))
    return value is None


@asynccontextmanager
async def mirroring(server: FakeServer, **options: Any) -> AsyncIterator[Mirroring]:
    """An agent with a sink at work; `options` as of `Mirroring`. What it has sent is checked in the end, and that it
    has left nothing open."""
    mirror = Mirroring(server, **options)
    async with trio.open_nursery() as nursery:
        await nursery.start(mirror.run)
        nursery.start_soon(mirror.others.keep_telling)
        yield mirror
        nursery.cancel_scope.cancel()
    mirror.check()


def has(cluster: str, idle: int, pool: str = "p1", *, env: str = "env", namespace: str = "ns", **more: Any) -> Capacity:
    """What a cluster has of an env in one of its pools."""
    return member(cluster, pool, env=env, namespace=namespace, idle=idle, **more)


def counts(sent: Sequence[Sent]) -> Counter[str]:
    """How many writes there are of each env, by its name."""
    return Counter(each.key[1] for each in sent)


def told(logs: Sequence[EventDict]) -> list[str]:
    """What people are told of the sink, in its order: the events of lines at info and above, without the sums of what
    goes on."""
    return [
        line["event"]
        for line in logs
        if line["log_level"] in ("info", "warning")
        and line["event"].startswith(("kubernetes_status_", "sink_"))
        and "for_seconds" not in line
    ]

"""What the tests of federations share: records on the wire, metrics and log lines as tests look at them."""

from __future__ import annotations

from collections.abc import Sequence

import trio
from structlog.typing import EventDict

from trio_federation.agent import Agent
from trio_federation.capacity import Capacity
from trio_federation.hookspecs import CapacitySink
from trio_federation.hub import Hub
from trio_federation.pb.sandbox.sync.v1 import ClusterOrigin, EnvCapacity, ReportFederationRequest
from trio_federation.rpc import IncomingReport, ReportCall


def item(pool: str = "p1", *, cluster: str = "", idle: int = 0, seq: int = 0, age_ms: int = 0) -> EnvCapacity:
    """A member of env ns/env on the wire."""
    return EnvCapacity(
        cluster_id=cluster,
        namespace="ns",
        env_name="env",
        member_pool=pool,
        idle=idle,
        seq=seq,
        observed_for_ms=age_ms,
    )


async def report(call: ReportCall, idle: int, seq: int, *, instance: str = "aa", uptime: float = 60.0) -> None:
    """Report one member, from an instance that started `uptime` seconds ago and counts its reports itself."""
    row = ClusterOrigin(cluster_id="", instance=instance, uptime_ms=int(uptime * 1000))
    await call.send(ReportFederationRequest(items=[item(idle=idle, seq=seq)], origins=[row]))


async def take_everything(call: IncomingReport) -> None:
    """A hub's report call that takes in whatever it is told."""
    await call.accept()
    while await call.receive() is not None:
        pass
    await call.answer()


def counted(process: Agent | Hub, name: str, **labels: str) -> float:
    """The sum of the series of one metric of an agent or a hub that have these labels; 0 where there is none."""
    return sum(
        sample.value
        for family in process.metrics.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def exposition(agent: Agent) -> str:
    """What a scrape of an agent gets."""
    return b"".join([chunk async for chunk in agent.exposition()]).decode()


def lines(logs: Sequence[EventDict], event: str) -> list[EventDict]:
    """The log lines of one kind."""
    return [line for line in logs if line["event"] == event]


class ListSink(CapacitySink):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.snapshots: list[Sequence[Capacity]] = []

    async def update(self, snapshot: Sequence[Capacity]) -> None:
        """Keep it."""
        self.snapshots.append(snapshot)
        await trio.lowlevel.checkpoint()

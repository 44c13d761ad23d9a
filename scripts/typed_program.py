"""A program of somebody else's, for the type checker and never run: .ci/run checks it against the installed wheels, as
strictly as mypy can. It passes only if they bring their types, and if the mistakes at its end are seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

from trio_federation import Capacity, CapacitySource, ForeignMember, Placement, Registry, Router, SourceContext, rollup
from trio_federation.testing import (
    FederationFactory,
    Invariant,
    PushingSource,
    Simulation,
    every_invariant,
    member,
    run_simulated,
    sampled,
    simulated_federation,
)

registry = Registry("west")
registry.upsert([Capacity("east", "agents", "python", "pool", idle=3)])
assert_type(registry.snapshot(), list[Capacity])
assert_type(registry.best_foreign_member("agents", "python"), ForeignMember | None)
assert_type(rollup(registry.snapshot()), list[Capacity])

placement = Router(registry).place("agents", "python")
assert_type(placement, Placement)
assert_type(placement.target, str | None)


class OneSource(CapacitySource):
    """Says that there is one."""

    def __init__(self, context: SourceContext) -> None:
        self._cluster_id = context.cluster_id

    async def collect(self) -> Sequence[Capacity]:
        return [Capacity(self._cluster_id, "agents", "python", "pool", idle=1)]


class Few(Invariant):
    """Nobody ever knows of many."""

    def look(self) -> None:
        for cluster in self.federation.clusters.values():
            if len(cluster.registry.snapshot()) > 100:
                raise self.broken(cluster, "it knows of many")


async def whole_federation(seed: int) -> str:
    """What a program does with a simulated federation."""
    async with simulated_federation(
        "west", "east", hubs=2, seed=seed, invariants=[Few(), *every_invariant()], start=False
    ) as fed:
        assert_type(fed, Simulation)
        fed["east"].use_source("one", OneSource)
        fed["west"].more_sources["pushed"] = PushingSource()
        await fed["east"].start()
        fed["east"].source.set(member("east", "spare", idle=2))
        fed.partition("east", hub=0, one_way="to_hub")
        await fed.settle()
        assert_type(await sampled(1.0, lambda: fed["west"].idle("east")), list[list[int]])
        assert_type(fed["west"].router.place("ns", "env"), Placement)
        return fed.log.digest()


assert_type(run_simulated(whole_federation, 1), str)


async def test_of_a_user(federation: FederationFactory) -> None:
    """What a test does with the fixture."""
    async with federation("west", ttl=10.0) as fed:
        assert_type(fed, Simulation)
        assert_type(fed["west"].known("east"), list[Capacity])


Capacity("west", "agents", "python", idle="many")  # type: ignore[arg-type]
registry.best_foreign_member("agents")  # type: ignore[call-arg]
placement.reason = "it may not be changed"  # type: ignore[misc]
member("west", idles=1)  # type: ignore[call-arg]
simulated_federation("west", hubs="two")  # type: ignore[arg-type]

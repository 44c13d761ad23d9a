"""What must hold in a federation at every moment, as checkers that a test switches on. Each is told what the sources
said and what the registries took in, and looks at them now and then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trio_federation.capacity import Change

if TYPE_CHECKING:
    from trio_federation.testing.clusters import AgentProcess, SimulatedCluster
    from trio_federation.testing.simulation import Simulation


class InvariantBroken(AssertionError):
    """What must always hold did not: at what moment, where, and what was found."""


class Invariant:
    """One thing that must always hold. Every method raises InvariantBroken where it does not."""

    def started(self, federation: Simulation) -> None:
        """The federation that it is about; called once, before anything else."""

    def said(self, cluster: SimulatedCluster, source: str, at: float, changes: Sequence[Change]) -> None:
        """A source of `cluster` was asked, or has pushed, at `at` seconds of Trio's time, and has said this; nothing of
        it was checked yet."""

    def applied(self, cluster: SimulatedCluster, process: AgentProcess, changes: Sequence[Change]) -> None:
        """The registry of a process has taken in these changes, some of them perhaps as no news."""

    def look(self) -> None:
        """Called every `check_every` seconds of virtual time, and once at the end."""

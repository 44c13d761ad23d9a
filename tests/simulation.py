"""What tests of our own need of a simulated federation beside the public test kit: hubs whose calls do what a test
says. The rest comes from `trio_federation.testing`, and is named here again for the tests that use both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from trio_federation.rpc import FederationServer, IncomingReport, IncomingWatch
from trio_federation.testing.clusters import SECRET, SimulatedCluster, always
from trio_federation.testing.network import Route
from trio_federation.testing.records import Values, member, sampled
from trio_federation.testing.scripted import PushingSource, ScriptedSource
from trio_federation.testing.simulation import Simulation, simulated_federation

__all__ = [
    "SECRET",
    "PushingSource",
    "ScriptedHub",
    "ScriptedSource",
    "SimulatedCluster",
    "Simulation",
    "Values",
    "always",
    "member",
    "sampled",
    "simulated_federation",
]


class ScriptedHub:
    """A hub whose calls do what the test says, on the real server: for hubs that are older than ours, or worse. Each
    connection is served in `nursery`."""

    def __init__(
        self,
        name: str,
        report: Callable[[IncomingReport], Awaitable[None]],
        watch: Callable[[IncomingWatch], Awaitable[None]],
    ) -> None:
        self.name = name
        self.routes: list[Route] = []
        #: set by the simulation that it is part of
        self.nursery: trio.Nursery | None = None
        self._server = FederationServer(report, watch)

    def serve(self, stream: trio.abc.Stream) -> None:
        """Take in a connection."""
        assert self.nursery is not None
        self.nursery.start_soon(self._server.serve, stream)

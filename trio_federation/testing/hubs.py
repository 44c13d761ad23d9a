"""The hubs of a simulated federation: real ones, which can be stopped and started again."""

from __future__ import annotations

import structlog
import trio

from trio_federation.clock import trio_clock
from trio_federation.config import HubSettings
from trio_federation.errors import Unavailable
from trio_federation.hub import Hub
from trio_federation.identity import Trusted
from trio_federation.testing.network import Note, Route


class SimulatedHub:
    """A real hub that can be stopped and started again."""

    def __init__(self, name: str, settings: HubSettings, nursery: trio.Nursery, note: Note) -> None:
        self.name = name
        self.settings = settings
        self.routes: list[Route] = []
        #: seconds by which the hub's clock is ahead of everybody else's
        self.clock_offset = 0.0
        #: Trio's time at which it was started or stopped last
        self.touched_at = -float("inf")
        self._nursery = nursery
        self._note = note
        self._scope = trio.CancelScope()
        self._trusted: Trusted | None = None
        self._hub: Hub | None = None

    @property
    def hub(self) -> Hub:
        """The hub, which must be up."""
        assert self._hub is not None, f"{self.name} is down"
        return self._hub

    @property
    def is_up(self) -> bool:
        """Whether it runs."""
        return self._hub is not None

    def trust(self, trusted: Trusted) -> None:
        """Take something else for proof from now on, as when the hub's files have changed; also after a restart."""
        self._trusted = trusted
        self._note("trusts", accept=list(trusted.accept), denied=len(trusted.denied))
        if self._hub is not None:
            self._hub.trust(trusted)

    def serve(self, stream: trio.abc.Stream) -> None:
        """Take in a connection. Raises Unavailable while the hub is down."""
        if self._hub is None:
            raise Unavailable("nobody listens (simulated)", peer=self.name)
        # What comes of it is the hub's business, whoever has dialled.
        with structlog.contextvars.bound_contextvars(node=self.name):
            self._hub.serve(stream)

    async def start(self) -> None:
        """Start a hub that knows nothing."""
        self._scope = trio.CancelScope()
        await self._nursery.start(self._run)
        self.touched_at = trio.current_time()
        self._note("started")

    def stop(self) -> None:
        """The hub dies: everything it knew is gone, and every connection to it breaks."""
        self._hub = None
        self.touched_at = trio.current_time()
        self._note("stopped")
        for route in self.routes:
            route.cut()
        self._scope.cancel()

    async def _run(self, *, task_status: trio.TaskStatus[None]) -> None:
        base = trio_clock()
        # Inherited by every task below: whose line it is, in logs of many nodes.
        with structlog.contextvars.bound_contextvars(node=self.name), self._scope:
            self._hub = Hub(self.settings, trusted=self._trusted, clock=lambda: base() + self.clock_offset)
            await self._hub.run(task_status=task_status)

"""The network between one cluster and one hub of a simulated federation, and what can be wrong with it. Bytes go over
in-memory links; who dials, and what is said, is the business of the real agents and hubs at its ends."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from trio_federation.errors import Unavailable
from trio_federation.rpc import MemoryLink

#: Told what happens to a route: the event, and details.
Note = Callable[..., None]


class HubEnd(Protocol):
    """What a route leads to."""

    @property
    def name(self) -> str:
        """The hub, as agents call it."""

    @property
    def routes(self) -> list[Route]:
        """Every route to it."""

    def serve(self, stream: trio.abc.Stream) -> None:
        """Take in a connection. Raises Unavailable while the hub is down."""


class OtherHub(HubEnd, Protocol):
    """A hub of a test's own making."""

    #: where it may start tasks; set by the simulation that it is part of
    nursery: trio.Nursery | None


class Route:
    """The network between one cluster and one hub. What is done to it also holds for connections that come later.

    `generator`: draws jitter. `note`: told what is done and what happens, for an event log."""

    def __init__(self, cluster: str, hub: HubEnd, generator: random.Random, note: Note) -> None:
        self._cluster = cluster
        self._hub = hub
        self._random = generator
        self._note = note
        self._links: list[tuple[object, MemoryLink]] = []
        self._open = True
        self._answers = True
        self._hub_hears = True
        self._cluster_hears = True
        self._suspended = False
        self._resumed = trio.Event()
        self._delay = 0.0
        self._jitter = 0.0
        #: how many connections were tried
        self.dialled = 0
        #: Trio's time at which something was done to it last; from its start nothing was
        self.touched_at = -float("inf")
        hub.routes.append(self)

    # What it is like.

    @property
    def healthy(self) -> bool:
        """Whether connections can be made, and carry bytes both ways."""
        return self._open and self._hub_hears and self._cluster_hears and not self._suspended

    @property
    def longest_transit(self) -> float:
        """Seconds that bytes are on their way at the most, as long as they are not held."""
        return self._delay + self._jitter

    def dialer(self, owner: object) -> Callable[[], Awaitable[trio.abc.Stream]]:
        """How an agent, the `owner` of what it dials, gets to the hub."""

        async def dial() -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            while self._suspended:
                await self._resumed.wait()
            self.dialled += 1
            if self.longest_transit:
                await trio.sleep(2 * self._transit())
            if not self._answers:
                await trio.sleep_forever()
            if not self._open:
                raise Unavailable("no route (simulated)", peer=self._hub.name)
            link = MemoryLink(client=self._cluster, server=self._hub.name)
            self._hub.serve(link.server)
            self._links.append((owner, link))
            self._apply_to(link)
            return link.client

        return dial

    # What is done to it.

    def hold(self, *, to_hub: bool = True, to_cluster: bool = True) -> None:
        """What travels in these directions stays on its way, until `release` or `heal`, and nobody is told."""
        self._hub_hears, self._cluster_hears = not to_hub, not to_cluster
        self._changed("held" if to_hub or to_cluster else "released", to_hub=to_hub, to_cluster=to_cluster)

    def release(self) -> None:
        """Let go of everything that was held."""
        self.hold(to_hub=False, to_cluster=False)

    def delay(self, seconds: float, *, jitter: float = 0.0) -> None:
        """Each write takes so many seconds on its way, and up to `jitter` more, drawn anew each time; none overtakes
        another. To dial takes two ways. Raises ValueError for negative seconds."""
        if not (0 <= seconds < float("inf") and 0 <= jitter < float("inf")):
            raise ValueError(f"a delay of {seconds!r} s with a jitter of {jitter!r} s: both must be seconds from 0 up")
        self._delay, self._jitter = seconds, jitter
        self._changed("delayed", seconds=seconds, jitter=jitter)

    def cut(self, owner: object = None) -> None:
        """Break every connection, or those of one owner; new ones can be made."""
        for of, link in self._links:
            if owner is None or of is owner:
                link.cut()
        self._links = [(of, link) for of, link in self._links if owner is not None and of is not owner]
        self._changed("cut")

    def partition(self, *, silently: bool = False) -> None:
        """Break every connection; no new one can be made until `heal`. `silently`: who dials then gets no answer."""
        self._open = False
        self._answers = not silently
        self.cut()

    def heal(self) -> None:
        """As it was at first: connections can be made and carry bytes at once. Who waits for the answer to an earlier
        dial does so for ever, as one does whose packets were lost."""
        self._open = self._answers = self._hub_hears = self._cluster_hears = True
        self._delay = self._jitter = 0.0
        self._changed("healed")

    def suspend(self) -> None:
        """The cluster's machine stands still: nothing goes in or out, and no dial is begun."""
        self._suspended, self._resumed = True, trio.Event()
        self._changed("suspended")

    def resume(self) -> None:
        """It goes on."""
        self._suspended = False
        self._resumed.set()
        self._changed("resumed")

    def _changed(self, event: str, **details: object) -> None:
        self.touched_at = trio.current_time()
        self._note(event, **details)
        for _, link in self._links:
            self._apply_to(link)

    def _apply_to(self, link: MemoryLink) -> None:
        link.hold(
            to_server=self._suspended or not self._hub_hears, to_client=self._suspended or not self._cluster_hears
        )
        link.slow(self._transit if self.longest_transit else None)

    def _transit(self) -> float:
        return self._delay + (self._random.uniform(0.0, self._jitter) if self._jitter else 0.0)

    def carried(self) -> list[tuple[int, int, int, int]]:
        """For each connection that stands: bytes and checksum to the hub, bytes and checksum to the cluster."""
        return [(*link.to_server, *link.to_client) for _, link in self._links]

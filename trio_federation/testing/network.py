"""The network between one cluster and one hub of a simulated federation, and what can be wrong with it. Bytes go over
in-memory links; who dials, and what is said, is the business of the real agents and hubs at its ends."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import trio

from trio_federation.errors import Unavailable
from trio_federation.rpc import MemoryLink
from trio_federation.rpc.sockets import CONNECT_DEADLINE

#: Told what happens to a route: the event, and details.
Note = Callable[..., None]
#: Which way something travels.
Direction: TypeAlias = Literal["to_hub", "to_cluster"]

#: Seconds for which a route remembers how long what was read had been on its way: longer than a record can live.
_REMEMBERED = 600.0


def tell_carried(link: MemoryLink, note: Note) -> None:
    """Note how many bytes a connection has carried each way so far, and their checksums."""
    to_hub, to_cluster = link.to_server, link.to_client
    note(
        "closed" if link.is_over else "carried",
        to_hub=f"{to_hub.size}/{to_hub.checksum:08x}",
        to_cluster=f"{to_cluster.size}/{to_cluster.checksum:08x}",
    )


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

    `generator`: draws jitter, and when a flaky one breaks. `note`: told what is done and what happens, for an event
    log."""

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
        self._flaky = trio.CancelScope()
        #: by direction: when something was read, and for how long it had been on its way, the longest of these first
        self._waits: dict[Direction, deque[tuple[float, float]]] = {"to_hub": deque(), "to_cluster": deque()}
        #: how many connections were tried
        self.dialled = 0
        #: Trio's time at which something was done to it last; from its start nothing was
        self.touched_at = -math.inf
        #: Trio's time until which somebody may be waiting for the answer to a dial that was lost
        self.dial_lost_until = -math.inf
        hub.routes.append(self)

    # What it is like.

    @property
    def healthy(self) -> bool:
        """Whether connections can be made, and carry bytes both ways."""
        in_time = 2 * self.longest_transit < CONNECT_DEADLINE
        return self._open and self._hub_hears and self._cluster_hears and not self._suspended and in_time

    @property
    def longest_transit(self) -> float:
        """Seconds that bytes are on their way at the most, as long as they are not held."""
        return self._delay + self._jitter

    def longest_wait(self, direction: Direction, *, since: float) -> float:
        """For how many seconds anything that was read from `since` on (Trio's time) had been on its way in this
        direction, at the most: delayed, held, or behind what was; 0.0 where nothing was."""
        return next((wait for read_at, wait in self._waits[direction] if read_at >= since), 0.0)

    def _waited(self, end: Literal["client", "server"], wait: float) -> None:
        waits = self._waits["to_hub" if end == "server" else "to_cluster"]
        now = trio.current_time()
        # One that was read earlier and did not wait longer is never the longest of those since any moment.
        while waits and waits[-1][1] <= wait:
            waits.pop()
        while waits and waits[0][0] < now - _REMEMBERED:
            waits.popleft()
        waits.append((now, wait))

    def dialer(self, owner: object) -> Callable[[], Awaitable[trio.abc.Stream]]:
        """How an agent, the `owner` of what it dials, gets to the hub."""

        async def dial() -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            while self._suspended:
                await self._resumed.wait()
            self.dialled += 1
            self._note("dialled", number=self.dialled)
            given_up_at = trio.current_time() + CONNECT_DEADLINE
            answered_at = trio.current_time() + 2 * self._transit()
            if answered_at >= given_up_at:
                self.dial_lost_until = given_up_at
            with trio.move_on_at(given_up_at):
                if answered_at > trio.current_time():
                    await trio.sleep_until(answered_at)
                if not self._answers:
                    self.dial_lost_until = given_up_at
                    await trio.sleep_forever()
                if not self._open:
                    raise self._refusal("no route (simulated)")
                return self._connect(owner)
            raise self._refusal(f"no connection within {CONNECT_DEADLINE:g} s (simulated)")

        return dial

    def _connect(self, owner: object) -> trio.abc.Stream:
        link = MemoryLink(client=self._cluster, server=self._hub.name, waited=self._waited)
        try:
            self._hub.serve(link.server)
        except Unavailable as error:
            raise self._refusal(error.message) from error
        self._note("connected")
        over = [each for _, each in self._links if each.is_over]
        self._links = [(of, each) for of, each in self._links if not each.is_over]
        self._tell_carried(over)
        self._links.append((owner, link))
        self._apply_to(link)
        return link.client

    def _refusal(self, why: str) -> Unavailable:
        self._note("refused", why=why)
        return Unavailable(why, peer=self._hub.name)

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
        another. To dial takes two ways, and fails after five seconds, as it does over sockets. Raises ValueError for
        negative seconds."""
        if not (0 <= seconds < float("inf") and 0 <= jitter < float("inf")):
            raise ValueError(f"a delay of {seconds!r} s with a jitter of {jitter!r} s: both must be seconds from 0 up")
        self._delay, self._jitter = seconds, jitter
        self._changed("delayed", seconds=seconds, jitter=jitter)

    def cut(self, owner: object = None) -> None:
        """Break every connection, or those of one owner; new ones can be made."""
        cut = [link for of, link in self._links if owner is None or of is owner]
        self._tell_carried(cut)
        for link in cut:
            link.cut()
        self._links = [(of, link) for of, link in self._links if owner is not None and of is not owner]
        self._changed("cut")

    def partition(self, *, silently: bool = False) -> None:
        """Break every connection; no new one can be made until `heal`. `silently`: who dials then gets no answer."""
        self._open = False
        self._answers = not silently
        self.cut()

    def flaky(self, every: float, nursery: trio.Nursery) -> None:
        """Break every connection at random moments, on average every so many seconds, until `heal`, or until this is
        called again. New ones can be made at once. `nursery`: where that goes on. Raises ValueError where `every` is no
        positive number of seconds."""
        if not 0 < every < math.inf:
            raise ValueError(f"breaks every {every!r} s: it must be a positive number of seconds")
        self._flaky.cancel()
        self._flaky = trio.CancelScope()
        self._changed("flaky", every=every)
        nursery.start_soon(self._keep_breaking, every, self._flaky)

    async def _keep_breaking(self, every: float, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                await trio.sleep(self._random.expovariate(1 / every))
                self.cut()

    def heal(self) -> None:
        """As it was at first: connections can be made and carry bytes at once, and none breaks. An earlier dial that
        got no answer gets none now, and is given up after its five seconds."""
        self._flaky.cancel()
        self._open = self._answers = self._hub_hears = self._cluster_hears = True
        self._delay = self._jitter = 0.0
        self._changed("healed")

    def suspend(self) -> None:
        """The cluster's machine stands still: nothing goes in or out, and no dial is begun."""
        if not self._suspended:  # else somebody may be waiting for the event that there is
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

    def tell_carried(self) -> None:
        """Note what every connection has carried that stands, or whose end was not noted yet."""
        self._tell_carried([link for _, link in self._links])

    def _tell_carried(self, links: Sequence[MemoryLink]) -> None:
        for link in links:
            tell_carried(link, self._note)

    def carried(self) -> list[tuple[int, int, int, int]]:
        """For each connection that stands: bytes and checksum to the hub, bytes and checksum to the cluster."""
        return [(*link.to_server, *link.to_client) for _, link in self._links]

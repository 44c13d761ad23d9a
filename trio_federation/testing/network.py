"""The network between one cluster and one hub of a simulated federation, and what can be wrong with it. Bytes go over
in-memory links; who dials, and what is said, is the business of the real agents and hubs at its ends."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeAlias

import trio

from trio_federation.errors import Unavailable
from trio_federation.rpc import MemoryLink
from trio_federation.rpc.sockets import CONNECT_DEADLINE
from trio_federation.waits import LEAK, LEAST, OPENING_COUNTS_FOR

#: Told what happens to a route: the event, and details.
Note = Callable[..., None]
#: Which way something travels.
Direction: TypeAlias = Literal["to_hub", "to_cluster"]

#: Seconds for which a route remembers how long what was read had been on its way: longer than a record can live.
_REMEMBERED = 600.0
#: Seconds for which it remembers what it was like: until then a quick message of long ago is forgotten anyway.
_PHASES_REMEMBERED = 10000.0
#: Seconds after which a call has said something again, where it has anything to say.
_SAYS_SOMETHING = 15.0
#: Seconds after which a call that is open has said its first message.
_AT_FIRST = 0.05

#: Trio's time since which the call is open that carries records in a direction; infinite where none is known to be.
OpenSince: TypeAlias = Callable[[Direction], float]


def _never(_: Direction) -> float:
    return math.inf


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


class _Longest:
    """Seconds by the moment at which they were noted, the longest of these first."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, float]] = deque()

    def note(self, seconds: float) -> None:
        noted, now = self._noted, trio.current_time()
        # What was noted earlier and is not longer is never the longest since any moment.
        while noted and noted[-1][1] <= seconds:
            noted.pop()
        while noted and noted[0][0] < now - _REMEMBERED:
            noted.popleft()
        noted.append((now, seconds))

    def since(self, moment: float) -> float:
        return next((seconds for noted_at, seconds in self._noted if noted_at >= moment), 0.0)


class _Phase(NamedTuple):
    """A time in which a route was the same in one direction."""

    began_at: float
    ended_at: float
    #: seconds that bytes were on their way at the most; infinite where they were held
    transit: float


class _Connection:
    """A connection over a route: whose it is, and how long its ends had to wait for the first word of each other."""

    def __init__(self, owner: object, open_since: OpenSince) -> None:
        self.owner = owner
        self.open_since = open_since
        self.began_at = trio.current_time()
        self.ended_at = math.inf
        self.first_word: dict[Direction, float] = {"to_hub": 0.0, "to_cluster": 0.0}
        self.link: MemoryLink


class Route:
    """The network between one cluster and one hub. What is done to it also holds for connections that come later.

    `generator`: draws jitter, and when a flaky one breaks. `note`: told what is done and what happens, for an event
    log."""

    def __init__(self, cluster: str, hub: HubEnd, generator: random.Random, note: Note) -> None:
        self._cluster = cluster
        self._hub = hub
        self._random = generator
        self._note = note
        self._connections: list[_Connection] = []
        #: those that have ended, the latest last
        self._ended: deque[_Connection] = deque()
        self._open = True
        self._answers = True
        self._hub_hears = True
        self._cluster_hears = True
        self._suspended = False
        self._resumed = trio.Event()
        self._delay = 0.0
        self._jitter = 0.0
        self._flaky = trio.CancelScope()
        #: by direction: for how long what was read had been on its way, and how much of that no age tells
        self._waits: dict[Direction, _Longest] = {"to_hub": _Longest(), "to_cluster": _Longest()}
        self._uncounted: dict[Direction, _Longest] = {"to_hub": _Longest(), "to_cluster": _Longest()}
        #: by direction: what it was like, the latest last, and since when it is as it is
        self._phases: dict[Direction, deque[_Phase]] = {"to_hub": deque(), "to_cluster": deque()}
        self._present: dict[Direction, _Phase] = {
            "to_hub": _Phase(-math.inf, math.inf, 0.0),
            "to_cluster": _Phase(-math.inf, math.inf, 0.0),
        }
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

    def longest_wait(self, direction: Direction, *, since: float, uncounted: bool = False) -> float:
        """For how many seconds anything that was read from `since` on (Trio's time) had been on its way in this
        direction, at the most: delayed, held, or behind what was; 0.0 where nothing was. `uncounted`: only as far as
        ages need not tell of it, because its receiver could not know."""
        return (self._uncounted if uncounted else self._waits)[direction].since(since)

    def first_word(self, direction: Direction, *, since: float) -> float:
        """Seconds for which the first bytes of any connection were on their way in this direction, at the most, of
        those that stood at some time from `since` on (Trio's time)."""
        longest = max((each.first_word[direction] for each in self._connections), default=0.0)
        for each in reversed(self._ended):
            if each.ended_at < since:
                break
            longest = max(longest, each.first_word[direction])
        return longest

    def _end(self, connections: Sequence[_Connection]) -> None:
        """Remember connections that have ended."""
        now = trio.current_time()
        for each in connections:
            each.ended_at = now
        self._ended.extend(connections)
        while self._ended and self._ended[0].ended_at < now - _REMEMBERED:
            self._ended.popleft()

    def _waited(self, connection: _Connection, end: Literal["client", "server"], wait: float) -> None:
        direction: Direction = "to_hub" if end == "server" else "to_cluster"
        if trio.current_time() - wait <= connection.began_at:
            connection.first_word[direction] = max(wait, connection.first_word[direction])
        self._waits[direction].note(wait)
        self._uncounted[direction].note(min(wait, LEAST + self._quickest(connection, direction)))

    def _quickest(self, connection: _Connection, direction: Direction) -> float:
        """What the receiver of a call takes for no wait at all, in seconds at the most (`waits.py`): nothing while the
        opening of the connection counts; after that what the quickest of its messages took, and what was forgotten of
        that since then."""
        now = trio.current_time()
        if now < connection.began_at + OPENING_COUNTS_FOR:
            return 0.0
        open_since = connection.open_since(direction)
        quickest = math.inf
        for phase in (*self._phases[direction], self._present[direction]._replace(ended_at=now)):
            began_at = max(phase.began_at, open_since)
            # Long enough for a message to have come that was neither sent before nor behind such a one: the first one,
            # or another.
            from_the_start = phase.began_at <= connection.began_at
            if phase.ended_at - began_at >= (2 * phase.transit + _AT_FIRST if from_the_start else _SAYS_SOMETHING):
                # A hub gives signs of life. A cluster that has nothing to say says nothing, so that its last message
                # may have been its first.
                heard_at = max(began_at, phase.ended_at - _SAYS_SOMETHING) if direction == "to_cluster" else began_at
                quickest = min(quickest, phase.transit + LEAK * (now - heard_at))
        return quickest

    def dialer(self, owner: object, open_since: OpenSince = _never) -> Callable[[], Awaitable[trio.abc.Stream]]:
        """How an agent, the `owner` of what it dials, gets to the hub. `open_since`: tells of its calls."""

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
                return self._connect(owner, open_since)
            raise self._refusal(f"no connection within {CONNECT_DEADLINE:g} s (simulated)")

        return dial

    def _connect(self, owner: object, open_since: OpenSince) -> trio.abc.Stream:
        connection = _Connection(owner, open_since)
        link = MemoryLink(client=self._cluster, server=self._hub.name, waited=partial(self._waited, connection))
        connection.link = link
        try:
            self._hub.serve(link.server)
        except Unavailable as error:
            raise self._refusal(error.message) from error
        self._note("connected")
        over = [each for each in self._connections if each.link.is_over]
        self._connections = [each for each in self._connections if not each.link.is_over]
        self._end(over)
        self._tell_carried([each.link for each in over])
        self._connections.append(connection)
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
        cut = [each for each in self._connections if owner is None or each.owner is owner]
        self._tell_carried([each.link for each in cut])
        self._end(cut)
        for each in cut:
            each.link.cut()
        self._connections = [each for each in self._connections if owner is not None and each.owner is not owner]
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
        self._enter("to_hub", held=self._hub_is_deaf)
        self._enter("to_cluster", held=self._cluster_is_deaf)
        for each in self._connections:
            self._apply_to(each.link)

    @property
    def _hub_is_deaf(self) -> bool:
        return self._suspended or not self._hub_hears

    @property
    def _cluster_is_deaf(self) -> bool:
        return self._suspended or not self._cluster_hears

    def _enter(self, direction: Direction, *, held: bool) -> None:
        """Remember what it was like in a direction until now, if it is different from now on."""
        present, now = self._present[direction], trio.current_time()
        transit = math.inf if held else self.longest_transit
        if transit != present.transit:
            phases = self._phases[direction]
            phases.append(present._replace(ended_at=now))
            while phases and phases[0].ended_at < now - _PHASES_REMEMBERED:
                phases.popleft()
            self._present[direction] = _Phase(now, math.inf, transit)

    def _apply_to(self, link: MemoryLink) -> None:
        link.hold(to_server=self._hub_is_deaf, to_client=self._cluster_is_deaf)
        link.slow(self._transit if self.longest_transit else None)

    def _transit(self) -> float:
        return self._delay + (self._random.uniform(0.0, self._jitter) if self._jitter else 0.0)

    def tell_carried(self) -> None:
        """Note what every connection has carried that stands, or whose end was not noted yet."""
        self._tell_carried([each.link for each in self._connections])

    def _tell_carried(self, links: Sequence[MemoryLink]) -> None:
        for link in links:
            tell_carried(link, self._note)

    def carried(self) -> list[tuple[int, int, int, int]]:
        """For each connection that stands: bytes and checksum to the hub, bytes and checksum to the cluster."""
        return [(*each.link.to_server, *each.link.to_client) for each in self._connections]

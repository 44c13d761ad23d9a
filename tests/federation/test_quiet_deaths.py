"""Streams that die quietly, told apart by how they die: a table of faults on the way to one of two hubs, what an agent
makes of each of them, and how it comes back. The hub at the other end is a real one; what stands before it, and does
all the harm, is the test's. What one connection does by itself is in `tests/rpc/`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
import trio
from h2.errors import ErrorCodes
from h2.events import RequestReceived
from hyperframe.frame import GoAwayFrame, PriorityFrame
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import counted, exposition, item, lines, take_everything
from tests.rpc.harness import RawPeer
from tests.simulation import SECRET, ScriptedHub, Simulation, member, simulated_federation
from trio_federation.agent import Agent
from trio_federation.config import HubSettings
from trio_federation.pb.sandbox.sync.v1 import FederationBroadcast
from trio_federation.retry import FIRST, LONGEST
from trio_federation.rpc import CONNECT_DEADLINE, IncomingWatch, MemoryLink, WatchCall, client_tls, tcp_dialer
from trio_federation.testing.hubs import SimulatedHub
from trio_federation.testing.invariants import AgesNeverShrink, NothingCountsTwice, NothingOutlivesItsTtl
from trio_federation.wire import ReceivedBroadcast

#: seconds between two looks
STEP = 0.1
#: of the agents' registries
TTL = 30.0

#: what becomes of a connection: it goes through to the hub; nobody says a word on it; HTTP/2 is spoken, pings are
#: answered and calls never; or calls get the headers of an answer, and nothing else
Way = Literal["through", "mute", "no answers", "headers only"]


@dataclass
class Through:
    """A connection of an agent, and the one of its own that the front has made to the hub for it."""

    stream: Any
    link: MemoryLink


class Front:
    """Stands between west and one hub, as a proxy does."""

    def __init__(self, hub: SimulatedHub, nursery: trio.Nursery) -> None:
        #: what becomes of connections from now on
        self.way: Way = "through"
        #: when each was made, on Trio's clock
        self.dialled: list[float] = []
        self._latest: Through | None = None
        self._nursery = nursery
        self._serve = hub.serve

    @property
    def through(self) -> Through:
        """The latest connection that has gone through."""
        assert self._latest is not None
        return self._latest

    def serve(self, stream: Any) -> None:
        """Take in a connection to the hub. Those of other clusters are none of its business."""
        if stream.name != "west":
            self._serve(stream)
            return
        self.dialled.append(trio.current_time())
        if self.way == "through":
            link = MemoryLink(client="west", server="hub-0")
            self._serve(link.server)
            self._latest = Through(stream, link)
            self._nursery.start_soon(self._carry, stream, link.client, link)
            self._nursery.start_soon(self._carry, link.client, stream, link)
        elif self.way != "mute":
            self._nursery.start_soon(self._pretend, stream, self.way == "headers only")

    async def _carry(self, come: Any, go: Any, link: MemoryLink) -> None:
        try:
            while data := await come.receive_some():
                await go.send_all(data)
            await go.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            link.cut()

    async def _pretend(self, stream: Any, answers: bool) -> None:
        """Speak HTTP/2, and answer pings."""
        peer = RawPeer(stream, client_side=False)
        with suppress(trio.BrokenResourceError, AssertionError):
            await peer.start()
            while True:
                stream_id = (await peer.wait_for(RequestReceived)).stream_id
                assert stream_id is not None
                if answers:
                    await peer.respond(stream_id)


@dataclass
class Bed:
    """West and north know each other over hub-0 alone, west and east over hub-1 alone; west's way to hub-0 leads
    through the front."""

    fed: Simulation
    front: Front
    logs: list[EventDict]
    #: of each watch call on hub-0, the pools that each of its broadcasts has named
    told: list[list[list[str]]] = field(default_factory=list)

    @property
    def agent(self) -> Agent:
        """West's."""
        return self.fed["west"].agent

    def shown(self, hub: str = "hub-0") -> dict[str, Any]:
        """What `/readyz` says of a hub."""
        found: dict[str, Any] = next(each for each in self.agent.health()["hubs"] if each["name"] == hub)
        return found

    def metric(self, name: str, **labels: str) -> float:
        """One of west's, about hub-0."""
        return counted(self.agent, f"trio_federation_hub_{name}", hub="hub-0", **labels)

    def up(self, hub: str = "hub-0") -> tuple[bool, bool]:
        """Whether its report and its watch are up."""
        streams = self.shown(hub)["streams"]
        return streams["report"]["up"], streams["watch"]["up"]


@asynccontextmanager
async def bed(
    monkeypatch: pytest.MonkeyPatch, logs: list[EventDict], *, keepalive: float = 5.0, silence_limit: float = 15.0
) -> AsyncIterator[Bed]:
    """Runs, and all is well."""
    invariants = [AgesNeverShrink(), NothingCountsTwice(), NothingOutlivesItsTtl()]
    hub_settings = HubSettings(keepalive=keepalive, silence_limit=silence_limit)
    async with simulated_federation(
        "west", "north", "east", hubs=2, start=False, hub_settings=hub_settings, invariants=invariants, check_every=1.0
    ) as fed:
        fed.settings = msgspec.structs.replace(fed.settings, keepalive=keepalive, silence_limit=silence_limit)
        front = Front(fed.hubs[0], fed.nursery)
        monkeypatch.setattr(fed.hubs[0], "serve", front.serve)
        found = Bed(fed, front, logs)
        calls: dict[int, list[list[str]]] = {}
        kept: list[WatchCall] = []  # as long as it is known, no other one has its id
        real = WatchCall.receive

        async def receive(self: WatchCall) -> ReceivedBroadcast:
            broadcast = await real(self)
            if broadcast.opened_us:
                return broadcast  # a first word, before the snapshot
            if any(each.cluster_id == "west" for each in broadcast.items) or self.peer != "hub-0":
                return broadcast
            if id(self) not in calls:
                kept.append(self)
                found.told.append(calls.setdefault(id(self), []))
            calls[id(self)].append([each.member_pool for each in broadcast.items if each.cluster_id == "north"])
            return broadcast

        monkeypatch.setattr(WatchCall, "receive", receive)
        fed.partition("north", hub=1, silently=True)
        fed.partition("east", hub=0, silently=True)
        for name, idle in (("west", 2), ("north", 3), ("east", 4)):
            fed[name].source.set(member(name, "p1", idle=idle), member(name, "p2", idle=idle))
            await fed[name].start()
        await trio.sleep(12.0)
        assert found.up() == found.up("hub-1") == (True, True)
        yield found


# --- what is done ----------------------------------------------------------------------------------------------------

Strike = Callable[[Bed], Awaitable[None]]


async def reset(bed: Bed) -> None:
    """As after a RST."""
    bed.fed["west"].routes["hub-0"].cut()


async def half_close(bed: Bed) -> None:
    """The hub's side has ended, and knows nothing of it."""
    await bed.front.through.stream.send_eof()


def goodbyes(*frames: GoAwayFrame) -> Strike:
    """The hub says these, a round trip apart, as far as anybody listens."""

    async def strike(bed: Bed) -> None:
        stream = bed.front.through.stream
        for frame in frames:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await stream.send_all(frame.serialize())
            await trio.sleep(0.02)

    return strike


def hold(*, to_hub: bool, to_cluster: bool) -> Strike:
    """Packets are lost in these directions; also those of later connections."""

    async def strike(bed: Bed) -> None:
        bed.fed["west"].routes["hub-0"].hold(to_hub=to_hub, to_cluster=to_cluster)

    return strike


async def flood(bed: Bed) -> None:
    """The hub gets far more than it takes of frames that carry nothing, and says so."""
    client = bed.front.through.link.client
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await client.send_all(PriorityFrame(3, depends_on=0).serialize() * 15_000)


class Fault(NamedTuple):
    """One way for streams to die.

    `first`: what the agent says of it, as a pattern; "{limit}" stands for the silence limit. `later`: what it says of
    its next tries while it lasts. `after`: what becomes of those. `silent`: whether it shows only by silence. `cut`:
    why the hub has ended connections."""

    strike: Strike
    first: str
    later: str = "nothing fails any more"
    after: Way = "through"
    silent: bool = False
    cut: Sequence[str] = ()


#: what the hub says still comes, also to those whose calls it does not hear of
TO_HUB = "black hole to the hub"
NOT_A_WORD = "connected, but nothing was said within {first_word} s|silent for {limit} s"
FAULTS = {
    "reset": Fault(reset, "the connection broke: the link is cut"),
    "half-closed by the hub": Fault(half_close, "the peer closed the connection"),
    "goodbye, as grpc-go says it": Fault(
        goodbyes(GoAwayFrame(0, last_stream_id=2**31 - 1), GoAwayFrame(0, last_stream_id=3)),
        r"the peer said goodbye \(NO_ERROR\)",
    ),
    "goodbye of stream 0, with a reason": Fault(
        goodbyes(GoAwayFrame(0, last_stream_id=0, additional_data=b"max_age")),
        r"the peer said goodbye \(NO_ERROR: max_age\)",
    ),
    "goodbye, and then not a word": Fault(
        goodbyes(GoAwayFrame(0, error_code=ErrorCodes.INTERNAL_ERROR)),
        r"the peer said goodbye \(INTERNAL_ERROR\)",
        NOT_A_WORD,
        after="mute",
    ),
    "flood": Fault(flood, r"the peer said goodbye \(ENHANCE_YOUR_CALM\b", cut=["flood"]),
    "black hole": Fault(
        hold(to_hub=True, to_cluster=True), "silent for {limit} s", NOT_A_WORD, silent=True, cut=["silent", "no_call"]
    ),
    # The hub hears how the agent closes.
    "black hole to the agent": Fault(
        hold(to_hub=False, to_cluster=True), "silent for {limit} s", NOT_A_WORD, silent=True
    ),
    TO_HUB: Fault(
        hold(to_hub=True, to_cluster=False),
        "the peer closed the connection",
        "the peer closed the connection|no call that was let in|was not answered for {limit} s",
        silent=True,
        cut=["silent", "no_call"],
    ),
    "accepts, and says nothing": Fault(reset, "the connection broke: the link is cut", NOT_A_WORD, after="mute"),
}


class Failed(NamedTuple):
    """A failure of the connection to hub-0, or of a call on it: when it was seen, and what was said of it."""

    at: float
    call: str
    error: str


@dataclass
class Course:
    """What was seen of a fault, look by look."""

    bed: Bed
    failed: list[Failed] = field(default_factory=list)
    #: when both streams to it were seen up after a look at which they were not
    back: list[float] = field(default_factory=list)
    #: by observer, when what it knew only over hub-0 was last observed
    last_observed: dict[str, float] = field(default_factory=dict)
    _lines: int = 0
    _was_up: bool = True

    def failures(self) -> list[EventDict]:
        """Lines about west's connections to hub-0; those of east, which has no way to it, left out."""
        failed = lines(self.bed.logs, "hub_failed")
        return [line for line in failed if line["hub"] == "hub-0" and "(simulated)" not in line["error"]]

    async def watch(self, seconds: float) -> None:
        """Look again and again; what must hold at every moment, holds at each."""
        bed, ends = self.bed, trio.current_time() + seconds
        fed = bed.fed
        while trio.current_time() < ends:
            now = trio.current_time()
            # The hub that is well is as it was, and so is the agent.
            assert bed.up("hub-1") == (True, True)
            assert fed["west"].idle("east") == [4, 4]
            assert fed["east"].idle("west") == [2, 2]
            assert bed.agent.health()["why_not"] == []
            # Nothing is withdrawn, and nothing becomes younger by itself: it is there until it is too old.
            for observer, of in (("west", "north"), ("north", "west")):
                known = fed[observer].known(of)
                assert len(known) in (0, 2)
                assert known or now >= self.last_observed[observer] + TTL
                for record in known:
                    assert record.observed_at is not None
                    self.last_observed[observer] = record.observed_at
            failures = self.failures()
            self.failed += [Failed(now, line["call"], line["error"]) for line in failures[self._lines :]]
            self._lines = len(failures)
            is_up = bed.up() == (True, True)
            if is_up and not self._was_up:
                self.back.append(now)
            self._was_up = is_up
            await trio.sleep(STEP)


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(5.0, 15.0), (1.0, 3.0)], ids=["default limits", "short limits"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_each_way_to_die_is_noticed_told_and_survived(
    fault: str,
    limits: tuple[float, float],
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    logs: list[EventDict],
) -> None:
    """Noticed within the limit; both streams open again with backoff, and the first thing that the hub tells is
    everything. Until then what is foreign keeps ageing, and is not withdrawn; nobody else is touched. In metrics,
    `/readyz` and the log it looks as operators are told."""
    strike, first, later, after, silent, cut = FAULTS[fault]
    keepalive, limit = limits
    says = {"limit": f"{limit:g}", "first_word": f"{min(CONNECT_DEADLINE, limit):g}"}
    async with bed(monkeypatch, logs, keepalive=keepalive, silence_limit=limit) as b:
        course = Course(b)
        await course.watch(STEP)
        logs.clear()
        observed_before = course.last_observed["west"]
        calls_before = len(b.told)
        began = trio.current_time()
        b.front.way = after
        await strike(b)
        lasts = later != "nothing fails any more"
        if silent:
            # Nobody knows yet.
            await course.watch(limit - keepalive - STEP)
            assert course.failed == []
            assert b.shown()["state"] == "connected"
        await course.watch(keepalive + 2 * STEP if silent else 2 * STEP)
        # Noticed, and told in one line.
        assert fault == TO_HUB or course.last_observed["west"] == observed_before
        observed_before = course.last_observed["west"]
        noticed_at, call, error = course.failed[0]
        assert call == "connection"
        assert re.search(first.format_map(says), error)
        assert noticed_at <= began + (limit if silent else 0) + 2 * STEP
        (warning,) = [line for line in course.failures() if line["log_level"] == "warning"]
        assert (warning["call"], warning["hub"]) == ("connection", "hub-0")
        assert 0 <= warning["retry_in"] <= FIRST
        if lasts:
            await course.watch(2 * limit + 4 * CONNECT_DEADLINE)
            assert len(course.failed) >= 3
            for failure in course.failed[1:]:
                assert re.search(later.format_map(says), failure.error)
            assert course.last_observed["west"] == observed_before
            assert len(b.told) == calls_before
            scraped = await exposition(b.agent)
            series = 'trio_federation_hub_last_batch_age_seconds{hub="hub-0"} '
            (age,) = [line.removeprefix(series) for line in scraped.splitlines() if line.startswith(series)]
            assert float(age) >= trio.current_time() - noticed_at
            assert b.shown()["last_batch"] == pytest.approx(float(age), abs=0.002)
            if fault != TO_HUB:
                assert (b.shown()["state"], b.up()) == ("failing", (False, False))
                assert [b.metric("connected", stream=stream) for stream in ("report", "watch")] == [0.0, 0.0]
                assert b.shown()["next_try"] is not None
                assert b.metric("reconnects_total") == 0.0
        # And it is over.
        b.front.way = "through"
        b.fed["west"].routes["hub-0"].release()
        healed_at = trio.current_time()
        await course.watch(LONGEST + CONNECT_DEADLINE + 2 * STEP if lasts else 2.5)
        assert course.back
        assert b.up() == (True, True)
        assert course.back[-1] <= healed_at + LONGEST + CONNECT_DEADLINE + STEP
        # With backoff: a window that doubles, from the end of each try.
        broken = [failure for failure in course.failed if failure.call == "connection"]
        assert len(b.front.dialled) == 1 + len(broken)
        for number, (failure, dialled_at) in enumerate(zip(broken, b.front.dialled[1:], strict=True)):
            assert dialled_at <= failure.at + min(LONGEST, FIRST * 2**number)
        # Everything comes first on each call.
        assert len(b.told) > calls_before
        assert [call[0] for call in b.told[calls_before:]] == [["p1", "p2"]] * (len(b.told) - calls_before)
        assert b.fed["west"].idle("north") == [3, 3]
        assert b.fed["north"].idle("west") == [2, 2]
        assert b.shown()["state"] == "connected"
        assert b.shown()["next_try"] is None
        for stream in ("report", "watch"):
            assert b.metric("connected", stream=stream) == 1.0
        worked = [line for line in lines(logs, "hub_works") if line["log_level"] == "info"]
        assert sorted(line["call"] for line in worked) == ["report", "watch"]
        if fault != TO_HUB:
            assert b.metric("reconnects_total") == 1.0
            assert {line["failures_before"] for line in worked} == {len(course.failed)}
        # The hub tells of who has done what, and nothing of who has done nothing.
        hub = b.fed.hubs[0].hub
        reasons = ("protocol", "flood", "silent", "stalled", "no_call")
        counts = {
            reason: counted(hub, "trio_federation_hub_connections_cut_total", reason=reason) for reason in reasons
        }
        assert {reason for reason, count in counts.items() if count} <= set(cut)
        assert not cut or counts[cut[0]] >= 1
        assert {line["reason"] for line in lines(logs, "connection_cut")} <= set(cut)
        # The well one was dialled once.
        assert b.fed["west"].routes["hub-1"].dialled == 1


# --- connections that live, with calls on them that do not -----------------------------------------------------------


@pytest.mark.parametrize("way", ["no answers", "headers only"])
async def test_a_hub_whose_calls_say_nothing_while_it_answers_pings(
    way: Way, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """It is known to give signs of life, and gives none: the watch is given up at the silence limit, again and again,
    while what is known keeps ageing. Once whatever stands before the hub is itself again, so is everything."""
    async with bed(monkeypatch, logs) as b:
        course = Course(b)
        await course.watch(STEP)
        logs.clear()
        observed_before = course.last_observed["west"]
        calls_before = len(b.told)
        began = trio.current_time()
        b.front.way = way
        await reset(b)
        # Dialled anew after a short delay; and the call is not even taken by those that give no answers.
        late = began + FIRST + 2.0 + 15.0 + 2 * STEP
        while not any(re.search("silent for 15 s|not answered", failure.error) for failure in course.failed):
            await course.watch(STEP)
            assert trio.current_time() <= late
        assert trio.current_time() >= began + 15.0
        assert b.shown()["streams"]["watch"]["up"] is False
        assert b.metric("connected", stream="watch") == 0.0
        assert {"connection", "watch"} <= {line["call"] for line in course.failures()}
        await course.watch(40.0)
        assert course.last_observed["west"] == observed_before
        assert b.fed["west"].known("north") == b.fed["north"].known("west") == []
        # Only with backoff, and never often.
        assert 3 <= len(course.failed) <= 10
        b.front.way = "through"
        await reset(b)
        await course.watch(LONGEST + 1.0)
        assert b.up() == (True, True)
        assert [call[0] for call in b.told[calls_before:]] == [["p1", "p2"]]
        assert b.fed["west"].idle("north") == [3, 3]
        assert b.fed["north"].idle("west") == [2, 2]


@pytest.mark.parametrize("strike, way", [(reset, "no answers"), (hold(to_hub=True, to_cluster=False), "through")])
async def test_a_hub_that_is_known_to_take_calls_and_takes_none_never_passes_for_one_that_works(
    strike: Strike, way: Way, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """Not in `/readyz`, not in the log, not in the metrics: neither call is up that was not taken. Both are given up at
    the silence limit."""
    async with bed(monkeypatch, logs) as b:
        course = Course(b)
        await course.watch(STEP)
        b.front.way = way
        await strike(b)
        if way == "through":
            await course.watch(15.0 + STEP)
        logs.clear()
        reconnects = b.metric("reconnects_total")
        ends = trio.current_time() + 50.0
        await course.watch(STEP)
        while trio.current_time() < ends:
            await course.watch(STEP)
            assert b.up() == (False, False)
            assert b.shown()["state"] == "failing"
        assert lines(logs, "hub_works") == []
        assert b.metric("reconnects_total") == reconnects
        if way == "no answers":
            assert {line["call"] for line in course.failures()} >= {"report", "watch"}


async def test_a_hub_that_is_not_known_to_give_signs_of_life_may_be_silent_on_its_calls(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """One that is older than they are says nothing for as long as it has nothing to say. It counts as connected, as
    long as it answers pings; that it tells nothing shows in the age of its last batch, and what it has told runs
    out."""
    opened: list[float] = []

    async def watch(call: IncomingWatch) -> None:
        opened.append(trio.current_time())
        await call.request()
        await call.send(FederationBroadcast(items=[item(cluster="north", idle=3)]))
        await trio.sleep_forever()

    older = ScriptedHub("older", take_everything, watch)
    async with simulated_federation("west", "east", scripted_hubs=[older]) as fed:
        fed["east"].source.set(member("east", idle=4))
        await trio.sleep(TTL - STEP)
        agent = fed["west"].agent
        assert fed["west"].idle("north") == [3]
        await trio.sleep(2 * STEP)
        assert fed["west"].idle("north") == []
        assert fed["west"].idle("east") == [4]
        await trio.sleep(600.0)
        assert len(opened) == 2  # one of each agent
        (hub,) = [each for each in agent.health()["hubs"] if each["name"] == "older"]
        assert hub["state"] == "connected"
        assert hub["last_batch"] == pytest.approx(600.0 + TTL + STEP, abs=0.1)
        assert hub["last_success"] <= 5.0
        failed = [line for line in lines(logs, "hub_failed") if line["hub"] == "older"]
        assert failed == []
        assert fed["west"].routes["older"].dialled == 1


# --- who is told to be calm ------------------------------------------------------------------------------------------


async def test_a_hub_that_says_flood_again_and_again_is_not_given_up(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """Somebody between them floods the hub in the agent's name, ten times. The hub says ENHANCE_YOUR_CALM, as others
    say it of pings; the agent makes its pings rarer, tells so once, and is back each time."""
    async with bed(monkeypatch, logs) as b:
        course = Course(b)
        await course.watch(STEP)
        logs.clear()
        for number in range(1, 11):
            await flood(b)
            await course.watch(LONGEST + STEP)
            assert b.up() == (True, True)
            assert b.fed["west"].idle("north") == [3, 3]
            assert b.fed["north"].idle("west") == [2, 2]
            assert len(b.front.dialled) == 1 + number
        told = [line for line in lines(logs, "hub_forbids_pings") if line["hub"] == "hub-0"]
        assert [line["log_level"] for line in told] == ["warning"] + ["debug"] * 9
        assert [line["keepalive"] for line in told] == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0] + [330.0] * 4
        assert [line["silence_limit"] for line in told] == [2 * line["keepalive"] for line in told]
        (warning,) = [line for line in course.failures() if line["log_level"] == "warning"]
        assert warning["error"].startswith("the peer said goodbye (ENHANCE_YOUR_CALM")
        hub = b.fed.hubs[0].hub
        assert counted(hub, "trio_federation_hub_connections_cut_total", reason="flood") == 10.0


async def test_a_dead_line_is_noticed_in_time_also_where_pings_are_rare(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """The hub has forbidden pings, and gives signs of life by itself. When they stop, and not a byte comes, it is the
    connection that is dead, and not the watch alone."""
    async with bed(monkeypatch, logs) as b:
        course = Course(b)
        await course.watch(STEP)
        for _ in range(4):
            await goodbyes(GoAwayFrame(0, error_code=ErrorCodes.ENHANCE_YOUR_CALM))(b)
            await course.watch(LONGEST + STEP)
        assert b.up() == (True, True)
        logs.clear()
        failed_before = len(course.failed)
        began = trio.current_time()
        await hold(to_hub=True, to_cluster=True)(b)
        await course.watch(15.0 + STEP)
        noticed = course.failed[failed_before]
        assert "silent for 15 s" in noticed.error
        assert noticed.at <= began + 15.0 + STEP
        assert b.up() == (False, False)
        await course.watch(40.0)
        assert b.up() == (False, False)
        assert lines(logs, "hub_works") == []
        b.fed["west"].routes["hub-0"].release()
        await course.watch(LONGEST + CONNECT_DEADLINE + STEP)
        assert b.up() == (True, True)
        assert b.fed["west"].idle("north") == [3, 3]


# --- before the first byte of HTTP/2 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [15.0, 3.0])
async def test_a_handshake_that_never_ends_is_given_up(
    limit: float, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """TCP connects, and TLS does not answer; each try has its time, and says what it has waited for."""
    dialled: list[float] = []
    links: list[MemoryLink] = []

    async def open_tcp_stream(host: str, port: int) -> trio.abc.Stream:
        dialled.append(trio.current_time())
        links.append(MemoryLink(client="west", server="hub.test"))
        await trio.lowlevel.checkpoint()
        return links[-1].client

    monkeypatch.setattr(trio, "open_tcp_stream", open_tcp_stream)
    within = min(CONNECT_DEADLINE, limit)
    context = client_tls(ca_file=None, cert_file=None, key_file=None)
    async with bed(monkeypatch, logs, keepalive=limit / 3, silence_limit=limit) as b:
        source = b.fed["west"].source
        agent = Agent(
            "south",
            b.fed.settings,
            sources={"set": lambda: source},
            hubs={
                "hub.test:7443": tcp_dialer("hub.test", 7443, tls=context, deadline=limit),
                "hub-1": b.fed["east"].routes["hub-1"].dialer(None),
            },
            credential=SECRET,
        )
        logs.clear()
        await b.fed.nursery.start(agent.run)
        await trio.sleep(within - STEP)
        shown = {each["name"]: each for each in agent.health()["hubs"]}
        assert shown["hub.test:7443"]["state"] == "connecting"
        assert shown["hub-1"]["state"] == "connected"
        await trio.sleep(2 * STEP)
        shown = {each["name"]: each for each in agent.health()["hubs"]}
        assert shown["hub.test:7443"]["state"] == "failing"
        said = f"no TLS handshake within {within:g} s"
        assert shown["hub.test:7443"]["last_error"]["text"] == said
        assert agent.health()["why_not"] == []
        await trio.sleep(60.0)
        gaps = [after - before for before, after in pairwise(dialled)]
        assert len(gaps) >= 4
        assert all(within <= gap <= within + min(LONGEST, FIRST * 2**number) for number, gap in enumerate(gaps))
        failed = [line for line in lines(logs, "hub_failed") if line["hub"] == "hub.test:7443"]
        assert {line["error"] for line in failed} == {said}
        assert [line["log_level"] for line in failed if line["log_level"] == "warning"] == ["warning"]
        # Each was closed when it was given up.
        assert [link.is_over for link in links[:-1]] == [False] * len(links[:-1])
        for link in links[:-1]:
            while data := await link.server.receive_some():
                assert data

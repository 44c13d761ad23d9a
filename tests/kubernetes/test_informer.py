"""One informer against an API server in memory, on virtual time: it never freezes, never asks in a loop, holds what the
server has once that can be known, and says since when it knows."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest
import structlog
import trio
from trio.testing import MockClock

from tests.kubernetes.fake_api import FakeServer, Request, Script, line
from tests.kubernetes.waiting import within
from tests.simulation import sampled
from trio_federation.clock import trio_clock
from trio_federation_kubernetes.decoding import Decoder
from trio_federation_kubernetes.errors import ApiError, UnreachableError
from trio_federation_kubernetes.informer import LIST_DEADLINE, LONGEST_SILENCE, Informer
from trio_federation_kubernetes.mapping import Watched
from trio_federation_kubernetes.resources import Key, Resource

TTL = 30.0
#: what measuring costs: the server's latency, and the last digits of a clock
SLACK = 0.1
THINGS = Resource("things.example.com", "v1", "things")


class Thing(msgspec.Struct):
    """What is read of a thing."""

    size: int = 0


class Copy:
    """Holds what it is told."""

    def __init__(self) -> None:
        self.objects: dict[Key, int] = {}
        self.replaced = 0

    def replacing(self, index: int, namespace: str | None, objects: Mapping[Key, Any]) -> Iterator[None]:
        assert index == 7
        yield
        self.replaced += 1
        self.objects = {key: thing.size for key, thing in objects.items()}

    def apply(self, index: int, key: Key, value: Any | None) -> None:
        assert index == 7
        if value is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = value.size


class Subject:
    """An informer, what it has made of the server's objects, and since when it is sure of that."""

    def __init__(self, informer: Informer, copy: Copy, server: FakeServer) -> None:
        self.informer = informer
        self.copy = copy
        self._server = server

    def holds_all(self) -> bool:
        """Whether it has what the server has; sizes included."""
        objects = self._server._objects.get(THINGS, {})
        return self.copy.objects == {key: found["size"] for key, found in objects.items()}

    def age(self) -> float:
        """Seconds since the last evidence."""
        evidence = self.informer.evidence
        return math.inf if evidence is None else trio.current_time() - evidence


@pytest.fixture
def server(autojump_clock: MockClock) -> FakeServer:
    """One that has three things."""
    autojump_clock.jump(1000)
    server = FakeServer(THINGS)
    for name in ("a", "b", "c"):
        server.put(THINGS, "ns", name, size=1)
    return server


@asynccontextmanager
async def following(
    server: FakeServer,
    *,
    namespace: str | None = None,
    page_size: int = 500,
    label_selector: str = "",
    ttl: float = TTL,
    seed: int = 0,
) -> AsyncIterator[Subject]:
    """An informer at work."""
    copy = Copy()
    async with server.connect() as connection, trio.open_nursery() as nursery:
        informer = Informer(
            connection,
            copy,
            Watched(THINGS, Decoder(Thing)),
            index=7,
            namespace=namespace,
            label_selector=label_selector,
            page_size=page_size,
            ttl=ttl,
            clock=trio_clock(),
            random=Random(seed),
            log=structlog.get_logger("tests"),
            changed=lambda: None,
        )
        nursery.start_soon(informer.run)
        yield Subject(informer, copy, server)
        nursery.cancel_scope.cancel()
    assert server.watches == [], "left open"


# --- what an ordinary life looks like


async def test_a_list_and_then_what_happens(autojump_clock: MockClock, server: FakeServer) -> None:
    async with following(server) as subject:
        await subject.informer.settled.wait()
        assert subject.holds_all()
        assert subject.informer.error is None
        server.put(THINGS, "ns", "a", size=2)
        server.put(THINGS, "other", "d", size=3)
        server.delete(THINGS, "ns", "b")
        await trio.sleep(SLACK)
        assert subject.copy.objects == {("ns", "a"): 2, ("ns", "c"): 1, ("other", "d"): 3}
        assert server.counts() == {"list": 1, "watch": 1}


async def test_pages_are_joined_and_only_the_whole_counts(autojump_clock: MockClock, server: FakeServer) -> None:
    for number in range(20):
        server.put(THINGS, "ns", f"n{number}", size=number)
    async with following(server, page_size=7) as subject:
        await within(5, lambda: bool(subject.copy.objects), step=0.001)
        assert subject.holds_all()
        assert subject.copy.replaced == 1
        assert server.counts()["list"] == 1
        assert server.counts()["page"] == 3


async def test_a_list_is_as_old_as_its_first_page(autojump_clock: MockClock, server: FakeServer) -> None:
    """All its pages show that moment, however long they take; the version is that of then."""
    server.latency = 2.0
    async with following(server, page_size=2) as subject:
        await subject.informer.settled.wait()
        assert trio.current_time() >= 1004
        assert subject.informer.evidence == 1000
        await trio.sleep(TTL)
        assert subject.age() < TTL / 2


async def test_one_namespace_and_a_selector_are_asked_for(autojump_clock: MockClock, server: FakeServer) -> None:
    """In every request: the list, its pages, the watch and the probe."""
    for number in range(5):
        server.put(THINGS, "mine", f"n{number}", {"team": "blue"}, size=number)
    server.put(THINGS, "mine", "red", {"team": "red"}, size=1)
    async with following(server, namespace="mine", label_selector="team=blue", page_size=2) as subject:
        await trio.sleep(TTL)
        assert set(subject.copy.objects) == {("mine", f"n{number}") for number in range(5)}
        assert server.counts().keys() == {"list", "page", "watch", "probe"}
        for request in server.requests:
            assert request.path == "/apis/things.example.com/v1/namespaces/mine/things"
            assert request.params["labelSelector"] == "team=blue"


@pytest.mark.parametrize("latency", [0.01, 1.0])
async def test_an_hour_of_quiet_is_cheap_and_always_vouched_for(
    autojump_clock: MockClock, server: FakeServer, latency: float
) -> None:
    """One list, a watch every few minutes, a probe every third of the TTL; and never older evidence than half of it."""
    server.latency = latency
    async with following(server) as subject:
        await subject.informer.settled.wait()
        ages = await sampled(3600, subject.age, step=0.25)
        assert max(ages) <= TTL / 2
        assert subject.informer.error is None
        counts = server.counts()
        assert counts["list"] == 1
        assert counts["watch"] <= 1 + 3600 / 240
        assert counts["probe"] <= 3600 / (TTL / 3)
        assert counts.total() <= 1 + 16 + 360


async def test_where_events_come_nobody_probes(autojump_clock: MockClock, server: FakeServer) -> None:
    async with following(server) as subject:
        for size in range(120):
            await trio.sleep(5)
            server.put(THINGS, "ns", "a", size=size)
        await trio.sleep(SLACK)
        assert subject.holds_all()
        assert server.counts()["probe"] == 0


@pytest.mark.parametrize("ttl", [1.0, 7.0, 20.0, 100 / 7, 3600.0])
async def test_any_ttl_is_kept(autojump_clock: MockClock, server: FakeServer, ttl: float) -> None:
    """Also one whose third is no whole number of anything."""
    async with following(server, ttl=ttl) as subject:
        await subject.informer.settled.wait()
        ages = await sampled(20 * ttl, subject.age, step=ttl / 10)
        assert max(ages) <= ttl / 2
        assert server.counts()["probe"] <= 60 + 1


# --- a watch that is dead without a word


@pytest.mark.parametrize("seed", range(5))
async def test_a_server_that_is_gone_without_a_word_is_noticed_within_half_of_the_ttl(
    autojump_clock: MockClock, server: FakeServer, seed: int
) -> None:
    """The connection stays open and nothing comes: half-open. The watch is given up, not only doubted."""
    async with following(server, seed=seed) as subject:
        await trio.sleep(100 + seed)
        server.black_hole = True
        evidence = subject.informer.evidence
        assert evidence is not None
        await within(TTL / 2 + SLACK, lambda: subject.informer.error is not None)
        assert isinstance(subject.informer.error, UnreachableError)
        assert subject.informer.evidence is not None
        assert trio.current_time() - subject.informer.evidence <= TTL / 2 + SLACK
        assert server.watches == []
        # What happened meanwhile is there as soon as the server is.
        server.put(THINGS, "ns", "a", size=9)
        server.delete(THINGS, "ns", "b")
        await trio.sleep(60)
        assert subject.age() > 60
        server.black_hole = False
        await within(LIST_DEADLINE + 30 + SLACK, lambda: subject.informer.error is None)
        assert subject.holds_all()
        assert subject.age() <= 2 * SLACK


async def test_a_watch_whose_connection_alone_is_dead_is_made_anew(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """The probes go well meanwhile. What was missed is there within the time that no healthy watch is silent for; it
    is resumed, not listed."""
    async with following(server) as subject:
        await trio.sleep(100)
        server.go_silent()
        server.put(THINGS, "ns", "a", size=9)
        server.delete(THINGS, "ns", "b")
        took = await within(LONGEST_SILENCE + SLACK, subject.holds_all)
        assert took > 30, "the last bookmark came 40 s before"
        assert server.counts()["list"] == 1
        assert subject.informer.error is None


async def test_a_server_without_bookmarks_is_no_failure(autojump_clock: MockClock, server: FakeServer) -> None:
    """Its watches are made anew now and then, or all is listed again; nothing is told as a trouble, and nothing is
    missed."""
    server.bookmark_interval = math.inf
    async with following(server) as subject:
        await subject.informer.settled.wait()
        before = len(server.requests)
        errors = await sampled(1800, lambda: subject.informer.error, step=0.5)
        assert set(errors) == {None}
        assert len(server.asked("watch")) <= 1800 / LONGEST_SILENCE + 2
        assert len(server.asked("list")) <= 1800 / LONGEST_SILENCE + 2
        assert len(server.requests) - before <= 1800 / (TTL / 3) + 2 * 1800 / LONGEST_SILENCE
        server.put(THINGS, "ns", "a", size=9)
        await trio.sleep(SLACK)
        assert subject.holds_all()


async def test_a_watch_that_is_never_answered_is_no_evidence(autojump_clock: MockClock, server: FakeServer) -> None:
    """Where plain requests work and a watch does not even begin, that is a trouble; and what a probe would find is no
    reason to vouch for what was listed before."""
    hangs = server.hang("watch")
    async with following(server) as subject:
        await within(TTL / 2, lambda: subject.informer.error is not None)
        for size in range(100, 130):
            await trio.sleep(10)
            changed_at = trio.current_time()
            server.put(THINGS, "ns", "a", size=size)
            await trio.sleep(TTL / 2)
            vouched_for = subject.informer.evidence or 0.0
            assert vouched_for <= changed_at or subject.holds_all()
            assert subject.informer.error is not None
        assert server.counts().total() <= 750 / 8
        hangs.end()
        await within(60, lambda: subject.informer.error is None)
        assert subject.holds_all()


# --- never in a loop


async def ends_at_once(request: Request) -> AsyncGenerator[bytes]:
    await trio.lowlevel.checkpoint()
    return
    yield


async def breaks_at_once(request: Request) -> AsyncGenerator[bytes]:
    await trio.lowlevel.checkpoint()
    raise UnreachableError("fake: connection reset")
    yield


async def breaks_after_an_event(request: Request) -> AsyncGenerator[bytes]:
    yield line("MODIFIED", {"metadata": {"name": "a", "namespace": "ns", "resourceVersion": "next"}, "size": 1})
    raise UnreachableError("fake: connection reset")


async def breaks_within_a_line(request: Request) -> AsyncGenerator[bytes]:
    yield b'{"type":"MODIFIED","object":{"metadata":{"name":"a","name'
    raise UnreachableError("fake: connection reset")


async def ends_after_an_event(request: Request) -> AsyncGenerator[bytes]:
    yield line("MODIFIED", {"metadata": {"name": "a", "namespace": "ns", "resourceVersion": "next"}, "size": 1})


async def ends_after_an_unknown_event(request: Request) -> AsyncGenerator[bytes]:
    yield line("FANCY", {"metadata": {"name": "a", "namespace": "ns", "resourceVersion": "next"}})


async def says_no_json(request: Request) -> AsyncGenerator[bytes]:
    yield b"<html>504</html>\n"


async def says_what_is_no_event(request: Request) -> AsyncGenerator[bytes]:
    yield b"[1, 2]\n"


def error_event(status: dict[str, Any]) -> Script:
    async def script(request: Request) -> AsyncGenerator[bytes]:
        yield line("ERROR", {"kind": "Status", **status})

    return script


#: what watches do, and how many requests that may cost in ten minutes
BAD_WATCHES: dict[str, tuple[Script, int]] = {
    "ends at once": (ends_at_once, 150),
    "breaks at once": (breaks_at_once, 150),
    "breaks after an event": (breaks_after_an_event, 150),
    "breaks within a line": (breaks_within_a_line, 150),
    # It brings something each time, and is asked for once a second.
    "ends after an event": (ends_after_an_event, 602),
    "ends after an unknown event": (ends_after_an_unknown_event, 150),
    "no JSON": (says_no_json, 240),
    "no event": (says_what_is_no_event, 240),
    "410": (error_event({"code": 410, "reason": "Expired"}), 240),
    "410 without a code": (error_event({"reason": "Expired"}), 240),
    "500": (error_event({"code": 500}), 150),
    "403": (error_event({"code": 403}), 240),
    "nothing said": (error_event({}), 240),
}


@pytest.mark.parametrize("what", BAD_WATCHES)
async def test_watches_that_go_wrong_each_time(autojump_clock: MockClock, server: FakeServer, what: str) -> None:
    """The number of requests is bounded, and lists keep the copy fresh where no watch does."""
    script, most = BAD_WATCHES[what]
    server.script(script)
    async with following(server) as subject:
        await trio.sleep(600)
        assert server.counts().total() <= most
        # The first minute, which begins quickly, is no different in kind.
        assert len([each for each in server.requests if each.at < 1060]) <= max(30, most / 9)
        if script is not ends_after_an_event:
            assert len(server.asked("list")) >= 4
            server.put(THINGS, "ns", "a", size=77)
            await within(5 * 30 + SLACK, lambda: subject.copy.objects["ns", "a"] == 77)
        server._scripts.clear()
        server.put(THINGS, "ns", "b", size=78)
        await within(30 + SLACK, subject.holds_all)
        await within(TTL / 3 + SLACK, lambda: subject.informer.error is None)


Break = Callable[[FakeServer], object]
#: what requests meet, and how many of them may be made in ten minutes
BAD_ANSWERS: dict[str, tuple[Break, int]] = {
    "nobody there": (lambda server: server.vanish(), 120),
    "500": (lambda server: server.refuse(500), 120),
    "503": (lambda server: server.refuse(503), 120),
    "429": (lambda server: server.refuse(429), 120),
    "429, be back in 1 s": (lambda server: server.refuse(429, retry_after=1), 120),
    "429, be back in 60 s": (lambda server: server.refuse(429, retry_after=60), 12),
    "429, be back in a year": (lambda server: server.refuse(429, retry_after=3e7), 7),
    "401": (lambda server: server.refuse(401), 120),
    "403": (lambda server: server.refuse(403), 120),
    "404": (lambda server: server.uninstall(THINGS), 120),
    "410": (lambda server: server.refuse(410), 120),
    "504 too large": (lambda server: server.refuse(504, causes=("ResourceVersionTooLarge",)), 120),
    "no JSON": (lambda server: server.fault("list", body=b"<html>hello</html>"), 120),
    "no list": (lambda server: server.fault("list", body=b"{}"), 120),
    "no version": (lambda server: server.fault("list", body=b'{"metadata":{},"items":[]}'), 120),
    "never the end of a list": (
        lambda server: server.fault(
            "list", "page", body=b'{"metadata":{"resourceVersion":"1","continue":"t"},"items":[]}'
        ),
        240,
    ),
    "no answer": (lambda server: server.hang(), 30),
}


@pytest.mark.parametrize("watching", [True, False], ids=["while watching", "from the start"])
@pytest.mark.parametrize("what", BAD_ANSWERS)
async def test_requests_that_fail_each_time(
    autojump_clock: MockClock, server: FakeServer, what: str, watching: bool
) -> None:
    """Ten minutes cost a bounded number of them, a trouble is named all the while, nothing is vouched for, and what is
    held stays. Then all is well again by itself."""
    break_it, most = BAD_ANSWERS[what]
    async with following(server) as subject:
        if watching:
            await trio.sleep(30)
        break_it(server)
        # The version that a watch would go on from is of no use any more.
        server.cut()
        if what != "404":
            server.put(THINGS, "ns", "a", size=2)
        server.compact()
        held = dict(subject.copy.objects)
        broken_at = trio.current_time()
        await within(max(LIST_DEADLINE, TTL) + SLACK, lambda: subject.informer.error is not None)
        errors = await sampled(600, lambda: subject.informer.error, step=0.1)
        assert None not in errors
        assert len([each for each in server.requests if each.at >= broken_at]) <= most
        assert subject.copy.objects == held
        if watching:
            assert subject.age() >= 600
        else:
            assert subject.informer.evidence is None
        # Meanwhile one thing has gone, and one is new.
        for fault in server.faults:
            fault.end()
        if what == "404":
            server.install(THINGS)
        else:
            server.delete(THINGS, "ns", "b")
        server.put(THINGS, "ns", "new", size=1)
        await within(
            120 + LIST_DEADLINE if "year" in what else 60 + LIST_DEADLINE, lambda: subject.informer.error is None
        )
        assert subject.holds_all()
        assert subject.age() <= 2 * SLACK


# --- what is gone is gone


@pytest.mark.parametrize("gone_as", ["event", "status"])
@pytest.mark.parametrize("how", ["ends", "breaks"])
async def test_what_was_deleted_while_nobody_watched_goes(
    autojump_clock: MockClock, server: FakeServer, gone_as: Any, how: str
) -> None:
    """The version that the watch would go on from is forgotten, and is not asked for a second time."""
    server.gone_as = gone_as
    async with following(server) as subject:
        await trio.sleep(10)
        (watch,) = server.asked("watch")
        dead = watch.params["resourceVersion"]
        down = server.vanish()
        server.cut() if how == "breaks" else server.end()
        await trio.sleep(1)
        asked_before = trio.current_time()
        server.delete(THINGS, "ns", "b")
        server.put(THINGS, "ns", "d", size=4)
        server.compact()
        down.end()
        await within(30 + SLACK, subject.holds_all)
        versions = [each.params["resourceVersion"] for each in server.asked("watch", since=asked_before)]
        assert versions[0] == dead
        assert dead not in versions[1:]
        await trio.sleep(600)
        assert server.counts()["list"] == 2
        assert subject.informer.error is None


@pytest.mark.parametrize("gone_as", ["event", "status"])
async def test_a_version_that_is_too_old_now_and_then_is_no_trouble(
    autojump_clock: MockClock, server: FakeServer, gone_as: Any
) -> None:
    """One list mends it, at once."""
    server.gone_as = gone_as
    async with following(server) as subject:
        for size in range(3):
            await trio.sleep(100)
            server.end()
            server.put(THINGS, "ns", "a", size=size)
            server.compact()
            errors = await sampled(5, lambda: subject.informer.error, step=0.005)
            assert set(errors) == {None}
            assert subject.holds_all()
        assert server.counts()["list"] == 4


async def test_a_server_that_was_restored_from_a_backup(autojump_clock: MockClock, server: FakeServer) -> None:
    """It does not know our version yet, or never will: what it has counts."""
    async with following(server) as subject:
        await trio.sleep(10)
        restored = FakeServer(THINGS, seed=99)
        restored.put(THINGS, "ns", "a", size=5)
        server._words, server._places = restored._words, restored._places
        server._history, server._objects = restored._history, restored._objects
        server.end()
        await within(5, subject.holds_all)
        assert set(subject.copy.objects) == {("ns", "a")}
        assert subject.informer.error is None


@pytest.mark.parametrize("times", [1, 2, 3, math.inf])
async def test_continue_tokens_that_expire(autojump_clock: MockClock, server: FakeServer, times: float) -> None:
    """What was held stays until a list is whole; after two tries it is asked for in one piece."""
    for number in range(10):
        server.put(THINGS, "ns", f"n{number}", size=number)
    server.tokens_expire = times
    async with following(server, page_size=4) as subject:
        await within(5, lambda: bool(subject.copy.objects), step=0.001)
        assert subject.holds_all()
        assert subject.copy.replaced == 1
        unpaged = [each for each in server.asked("list") if "limit" not in each.params]
        assert len(unpaged) == (1 if times >= 2 else 0)
        assert len(server.asked("list")) == min(times, 2) + 1


# --- rights


async def test_rights_that_are_taken_away_are_named_though_the_watch_goes_on(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """An API server ends no watch because of that. The probe sees it: the evidence ages, and the trouble is told."""
    async with following(server) as subject:
        await trio.sleep(100)
        refused = server.refuse(403)
        revoked_at = trio.current_time()
        await within(TTL / 2 + SLACK, lambda: subject.informer.error is not None)
        error = subject.informer.error
        assert isinstance(error, ApiError)
        assert error.reason == "forbidden"
        assert len(server.watches) == 1, "the watch was good"
        await trio.sleep(600)
        assert subject.informer.error is not None
        assert len(server.asked("probe", since=revoked_at)) <= 120
        refused.end()
        await within(60, lambda: subject.informer.error is None)
        assert subject.holds_all()


async def test_a_probe_that_was_refused_is_forgotten_once_the_watch_brings_something(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """Where events come nobody probes any more, so they have to end the trouble."""
    async with following(server) as subject:
        await trio.sleep(65)
        server.refuse(429, "probe", times=1)
        await within(TTL / 2 + SLACK, lambda: server.faults[-1].times == 0)
        await trio.sleep(SLACK)
        for size in range(20):
            server.put(THINGS, "ns", "a", size=size)
            await trio.sleep(2)
        assert subject.informer.error is None


async def test_who_may_list_and_not_watch_stays_fresh_and_is_told_so(
    autojump_clock: MockClock, server: FakeServer
) -> None:
    """It is a trouble at every moment, not at every other one."""
    server.refuse(403, "watch")
    async with following(server) as subject:
        await within(5, lambda: subject.informer.error is not None)
        errors = await sampled(600, lambda: subject.informer.error, step=0.05)
        assert None not in errors
        assert server.counts().total() <= 180
        server.put(THINGS, "ns", "a", size=9)
        await within(30 + SLACK, subject.holds_all)


# --- odd bytes


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_chunks_of_any_size(autojump_clock: MockClock, server: FakeServer, size: int) -> None:
    """Within characters, too, and with line ends inside of an event that JSON does not take for any."""
    server.chunking = lambda data: [data[at : at + size] for at in range(0, len(data), size)]
    async with following(server) as subject:
        await trio.sleep(1)
        for name in ("é", "\u2028", "\x85", "\U0001f40b"):
            server.put(THINGS, "ns", f"n{name}n", size=len(name.encode()))
        await trio.sleep(1)
        assert subject.holds_all()
        assert len(subject.copy.objects) == 7
        assert server.counts() == {"list": 1, "watch": 1}


async def test_an_event_that_was_cut_off_is_had_again(autojump_clock: MockClock, server: FakeServer) -> None:
    async with following(server) as subject:
        await trio.sleep(1)
        for watch in server.watches:
            watch.position += 1  # of the next change only half arrives
        server.put(THINGS, "ns", "a", size=9)
        server.cut(line("MODIFIED", server._objects[THINGS]["ns", "a"])[:40])
        await within(1 + SLACK, subject.holds_all)
        assert server.counts()["list"] == 1


async def test_an_unknown_event_moves_nothing(autojump_clock: MockClock, server: FakeServer) -> None:
    async with following(server) as subject:
        await trio.sleep(1)
        before = server.version()
        server.send(line("FANCY", {"metadata": {"name": "a", "namespace": "ns", "resourceVersion": "f"}, "size": 8}))
        await trio.sleep(1)
        server.end()
        await trio.sleep(1)
        assert subject.holds_all()
        assert server.asked("watch")[-1].params["resourceVersion"] == before


# --- how it ends


@pytest.mark.parametrize("when", [0.0, 0.005, 0.01, 0.015, 0.02, 5.0, 10.005])
async def test_it_can_be_cancelled_at_any_time(autojump_clock: MockClock, server: FakeServer, when: float) -> None:
    """In a list, while a watch opens, in a watch, in a probe; nothing stays open (see `following`)."""
    async with following(server):
        await trio.sleep(when)


async def test_it_says_where_it_is(autojump_clock: MockClock, server: FakeServer) -> None:
    async with following(server, namespace="ns") as subject:
        await trio.sleep(1)
        assert repr(subject.informer).startswith("<Informer things.things.example.com in ns: <Reflector watching at '")
    async with following(server) as subject:
        assert "in all namespaces" in repr(subject.informer)

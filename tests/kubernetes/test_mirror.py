"""Whose status is written next, how fast, and what follows where the API server says no: on simulated time, which jumps
to where the mirror says that something is to be done."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kubernetes.statuses import KEY, OFFSET, Server, record, seen, stamp
from trio_federation import Capacity, Trouble
from trio_federation_kubernetes.errors import AnswerError, ApiError, Cause, KubernetesError, UnreachableError
from trio_federation_kubernetes.mirror import (
    FIRST_PAUSE,
    FIRST_REFUSAL_PAUSE,
    IN_FLIGHT,
    LONGEST_PAUSE,
    LONGEST_REFUSAL_PAUSE,
    LONGEST_RETRY_AFTER,
    PATIENCE,
    STEP,
    Mirror,
)
from trio_federation_kubernetes.mirrored import LEAVE_ALONE, MirroredEnv, Write
from trio_federation_kubernetes.ownership import FIELD_MANAGER
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.segments import ALL_FIELDS, Env, body, segments

REFRESH = 60.0
INTERVAL = 5.0
TTL = 30.0
UNATTENDED = 150.0
#: what a computer makes of sums of seconds
ROUNDING = 1e-6


class Refusal(ApiError):
    """One that a copied mirror shares."""

    def __deepcopy__(self, memo: object) -> Refusal:
        return self


def error(code: int, message: str = "no", **values: Any) -> ApiError:
    return Refusal(f"the API server answered {code}: {message}", code=code, message=message, **values)


def nothing(env: Key, version: int) -> Env:
    """An env in whose status there is nothing."""
    return seen(
        {"metadata": {"name": env[1], "namespace": env[0], "uid": "/".join(env), "resourceVersion": str(version)}}
    )


class World:
    """A mirror, envs on a server that takes everything unless `fails` says otherwise, and the time between."""

    def __init__(
        self, *, rate: float = 10.0, latency: float = 0.0, ready: bool = True, echo: bool = True, **options: Any
    ) -> None:
        self.now = 0.0
        self.lines: list[tuple[str, dict[str, Any]]] = []
        wanted: dict[str, Any] = {
            "cluster_id": "west",
            "refresh_interval": REFRESH,
            "env_interval": INTERVAL,
            "writes_per_second": rate,
            "selective": False,
            "ttl": TTL,
            "unattended": UNATTENDED,
            "random": Random(7),
        }
        self.mirror = Mirror(**wanted | options, tell=self._tell, now=0.0)
        self.latency = latency
        self.echo = echo
        #: what the server says to a write instead of doing it
        self.fails: Callable[[Write], KubernetesError | None] = lambda write: None
        #: does it
        self.does: Callable[[Write], Env] = self._do
        self.records: dict[tuple[Key, str], Capacity] = {}
        #: what was begun, and when
        self.begun: list[tuple[float, Write]] = []
        #: what is on its way, and when it is answered
        self.flying: list[tuple[float, Write]] = []
        #: each is called every so many seconds
        self.feeds: list[tuple[float, Callable[[], object]]] = []
        self.checked = True
        self._version = 1000
        if ready:
            self.mirror.allow(ALL_FIELDS, 0.0)
            self.mirror.stand(True, 0.0)

    def _tell(self, event: str, **details: Any) -> None:
        self.lines.append((event, details))

    def _do(self, write: Write) -> Env:
        self._version += 1
        applied = json.loads(body(write.key, write.shown, ALL_FIELDS, OFFSET, summary=write.summary))
        ours: dict[str, Any] = {f'k:{{"clusterID":"{cluster}"}}': {".": {}} for cluster in write.shown}
        manager = {
            "manager": FIELD_MANAGER,
            "operation": "Apply",
            "subresource": "status",
            "time": stamp(self.now + OFFSET),
            "fieldsV1": {"f:status": {"f:clusters": ours}},
        }
        applied["metadata"] |= {
            "uid": "/".join(write.key),
            "resourceVersion": str(self._version),
            "managedFields": [manager] if ours else [],
        }
        return seen(applied)

    # what is there, and what should be

    def envs(self, *keys: Key) -> None:
        """These are there."""
        for key in keys:
            self._version += 1
            self.mirror.observe(key, nothing(key, self._version), self.now)

    def want(self, *records: Capacity) -> None:
        """What others have, of all envs."""
        self.records = {((each.namespace, each.env_name), each.cluster_id): each for each in records}
        self.tell()

    def change(self, *records: Capacity) -> None:
        """The same, but for these."""
        self.records |= {((each.namespace, each.env_name), each.cluster_id): each for each in records}
        self.tell()

    def tell(self) -> None:
        snapshot = sorted(self.records.values(), key=lambda each: each.sort_key)
        for _ in self.mirror.want(snapshot, self.now):
            pass

    def restamp(self) -> None:
        """All of it is as it was, and was seen just now."""
        self.want(*(record(each.cluster_id, each.idle, self.now, key=key) for (key, _), each in self.records.items()))

    # time

    def every(self, seconds: float, feed: Callable[[], object]) -> None:
        self.feeds.append((seconds, feed))

    def step(self) -> list[Write]:
        """What is answered by now, and what is begun now."""
        for moment, write in [each for each in self.flying if each[0] <= self.now]:
            self.flying.remove((moment, write))
            self._answer(write)
        begun = []
        while (following := self.mirror.next(self.now)) is not None:
            begun.append(following)
            self.begun.append((self.now, following))
            self.flying.append((self.now + self.latency, following))
            assert len(self.flying) <= IN_FLIGHT
            if not self.latency:
                self.flying.pop()
                self._answer(following)
        return begun

    def _answer(self, write: Write) -> None:
        if (failure := self.fails(write)) is not None:
            self.mirror.failed(write, failure, self.now)
            return
        try:
            answer = self.does(write)
        except KubernetesError as refusal:
            self.mirror.failed(write, refusal, self.now)
            return
        self.mirror.written(write, answer, self.now)
        if self.echo:
            self.mirror.observe(write.key, answer, self.now)

    def run(self, seconds: float) -> list[tuple[float, Write]]:
        """So much time passes. Returns what was begun. Jumps to where the mirror says that there may be something to
        do: there, something has to come of it, and before, nothing may."""
        end, before = self.now + seconds, len(self.begun)
        looks = 0
        while True:
            begun = self.step()
            wake = self.mirror.wake_at(self.now)
            looks = 0 if begun or wake > self.now else looks + 1
            assert looks < 10 + len(self.records) // 100, "there is nothing to do, and it is looked at again and again"
            others = [moment for moment, _ in self.flying]
            others += [(math.floor(self.now / each + ROUNDING) + 1) * each for each, _ in self.feeds]
            following = min([end, *others, wake])
            if self.checked and following > self.now:
                for part in (0.01, 0.5, 0.99):
                    moment = self.now + part * (following - self.now)
                    if moment == following:
                        continue
                    assert copy.deepcopy(self.mirror, {id(self): self}).next(moment) is None, "it could have been begun"
            if following >= end:
                self.now = end
                return self.begun[before:]
            assert following >= self.now
            self.now = following
            for each, feed in self.feeds:
                if abs(self.now / each - round(self.now / each)) < ROUNDING:
                    feed()

    def when(self, key: Key) -> list[float]:
        """When an env was written."""
        return [moment for moment, write in self.begun if write.key == key]

    def events(self, *names: str) -> list[str]:
        """The lines in the log, by what they are about."""
        return [event for event, _ in self.lines if not names or event in names]

    def reasons(self) -> list[str]:
        """What is in the way."""
        return [trouble.reason for trouble in self.mirror.troubles()]


def keys(number: int, namespace: str = "n") -> list[Key]:
    return [(namespace, f"e{each:05}") for each in range(number)]


def fleet(number: int = 3, idle: int = 1, **options: Any) -> World:
    """A world with so many envs, all of which are shown as they are."""
    world = World(**options)
    world.envs(*keys(number))
    world.want(*(record("east", idle, key=key) for key in keys(number)))
    world.run(number * 1.0 + INTERVAL)
    assert {write.key for _, write in world.begun} == set(keys(number))
    world.begun.clear()
    world.lines.clear()
    return world


# --- whose turn it is


def test_the_most_changed_comes_first() -> None:
    world = World(rate=1.0)
    few, many, some, same = keys(4)
    world.envs(few, many, some, same)
    world.want(*(record("east", idle, key=key) for key, idle in {few: 1, many: 9, some: 5, same: 5}.items()))
    assert [write.key for _, write in world.run(10.0)] == [many, some, same, few]


def test_what_waits_changes_its_place_with_its_view() -> None:
    world = World(rate=1.0)
    one, two, three = keys(3)
    world.envs(one, two, three)
    world.want(record("east", 5, key=one), record("east", 4, key=two), record("east", 3, key=three))
    assert [write.key for write in world.step()] == [one]
    world.change(record("east", 9, key=three))
    world.change(record("east", 1, key=three), record("east", 2, key=two))
    world.change(record("east", 3, key=three))
    assert [write.key for _, write in world.run(10.0)] == [three, two]


def test_what_needs_no_write_any_more_gets_none() -> None:
    world = fleet(2, rate=1.0)
    one, two = keys(2)
    world.now += 100.0
    world.change(record("east", 9, key=one), record("east", 5, key=two))
    assert [write.key for write in world.step()] == [one]
    world.change(record("east", 1, key=two))
    assert world.run(10.0) == []


def test_who_has_waited_for_a_refresh_interval_goes_first() -> None:
    """However much others change. Ages alone weigh nothing, and come as well."""
    world = World(rate=1.0)
    world.checked = False
    world.envs(*keys(20))
    quiet = keys(20)[0]
    world.every(
        1.0,
        lambda: world.want(
            *(record("east", int(world.now) * 7 % 1000, world.now, key=key) for key in keys(20)[1:]),
            record("east", 0, world.now, key=quiet),
        ),
    )
    world.run(600.0)
    times = world.when(quiet)
    assert len(times) >= 4
    assert max(later - earlier for earlier, later in pairwise([0.0, *times])) <= 2 * REFRESH + 20.0
    assert len(world.begun) >= 599, "and no turn is lost"


# --- how fast


@settings(max_examples=40)
@given(
    st.sampled_from([0.5, 3.0, 7.0, 100.0]),
    st.sampled_from([0.0, 0.05, 2.0]),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 50), st.sampled_from([0.0, 0.1, 1.0, 7.0])), max_size=40),
)
def test_there_are_never_more_writes_than_there_may_be(
    rate: float, latency: float, changes: list[tuple[int, int, float]]
) -> None:
    world = World(rate=rate, latency=latency)
    world.envs(*keys(12))
    for number, idle, pause in changes:
        world.change(record("east", idle, world.now, key=keys(12)[number]))
        world.run(pause)
    world.run(30.0)
    for (earlier, _), (later, _) in pairwise(world.begun):
        assert later - earlier >= 1 / rate - ROUNDING
    for key in keys(12):
        for earlier, later in pairwise(world.when(key)):
            assert later - earlier >= INTERVAL - ROUNDING


def test_a_crowd_is_written_as_fast_as_it_may_be() -> None:
    world = World(rate=10.0, latency=0.3)
    world.checked = False
    world.envs(*keys(300))
    world.want(*(record("east", key=key) for key in keys(300)))
    assert len(world.run(30.0)) == 300


def test_no_more_than_a_few_writes_are_under_way() -> None:
    world = World(rate=1000.0, latency=5.0)
    world.envs(*keys(20))
    world.want(*(record("east", key=key) for key in keys(20)))
    world.run(0.1)
    assert len(world.flying) == IN_FLIGHT
    assert world.mirror.wake_at(world.now) == math.inf, "an answer will say"
    world.run(26.0)
    assert len(world.begun) == 20


def test_an_env_is_not_written_twice_within_a_short_while() -> None:
    world = fleet(1)
    (key,) = keys(1)
    world.every(1.0, lambda: world.change(record("east", int(world.now), world.now, key=key)))
    world.run(60.0)
    times = world.when(key)
    assert [later - earlier for earlier, later in pairwise(times)] == [pytest.approx(INTERVAL)] * (len(times) - 1)


@pytest.mark.parametrize("echo", [False, True])
def test_a_steady_fleet_costs_one_write_per_env_and_minute(echo: bool) -> None:
    """Its records are seen anew all the time, and its own writes come back as events."""
    world = fleet(50, echo=echo)
    world.checked = False
    start = world.now
    world.every(10.0, world.restamp)
    world.run(600.0)
    for key in keys(50):
        times = world.when(key)
        assert 9 <= len(times) <= 10
        assert all(later - earlier >= REFRESH - ROUNDING for earlier, later in pairwise(times))
    assert world.now == start + 600.0
    assert world.lines == []
    assert world.mirror.troubles() == []


def test_a_fleet_of_which_nothing_new_is_heard_costs_nothing() -> None:
    world = fleet(50)
    assert world.run(3600.0) == []
    assert world.mirror.wake_at(world.now) == math.inf


# --- when something is to be done


@settings(max_examples=60)
@given(st.data())
def test_it_wakes_when_there_is_something_to_do_and_only_then(data: st.DataObject) -> None:
    """What is checked at every step (see `World.run`), whatever happens."""
    world = World(rate=5.0, latency=data.draw(st.sampled_from([0.0, 0.3])))
    world.checked = True
    envs = [*keys(3), *keys(2, "m")]
    world.envs(*envs)
    answers = {
        "no": error(500),
        "forbidden": error(403),
        "invalid": error(422),
        "edited": error(409),
        "gone": error(404),
        "slowly": error(429, retry_after=20.0),
        "nowhere": UnreachableError("no"),
        "theirs": error(
            409,
            causes=(Cause("FieldManagerConflict", '.status.clusters[clusterID="east"].isLocal', 'conflict with "x"'),),
        ),
    }
    for _ in range(data.draw(st.integers(1, 12))):
        key = data.draw(st.sampled_from(envs))
        match data.draw(st.sampled_from(["want", "want", "want", "fail", "works", "gone", "there", "stand", "fields"])):
            case "want":
                cluster = data.draw(st.sampled_from(["east", "north"]))
                world.change(record(cluster, data.draw(st.integers(0, 9)), world.now, key=key))
            case "fail":
                failing, answer = data.draw(st.sets(st.sampled_from(envs))), data.draw(st.sampled_from(sorted(answers)))
                world.fails = lambda write, failing=failing, answer=answer: (  # type: ignore[misc]
                    answers[answer] if write.key in failing else None
                )
            case "works":
                world.fails = lambda write: None
            case "gone":
                world.mirror.observe(key, None, world.now)
            case "there":
                world.envs(key)
            case "stand":
                world.mirror.stand(data.draw(st.sampled_from([True, False, None])), world.now)
            case "fields":
                world.mirror.allow(data.draw(st.sampled_from([None, ALL_FIELDS])), world.now)
        world.run(data.draw(st.sampled_from([0.0, 0.5, 6.0, 61.0, 700.0])))
    world.fails = lambda write: None
    world.mirror.stand(True, world.now)
    world.mirror.allow(ALL_FIELDS, world.now)
    world.envs(*envs)
    world.run(3 * LEAVE_ALONE)
    assert world.mirror.wake_at(world.now) == math.inf
    assert world.mirror.troubles() == []
    shown = {write.key: write.shown for _, write in world.begun}
    for key in envs:
        wanted = segments([each for (env, _), each in sorted(world.records.items()) if env == key])
        assert shown.get(key, {}) == wanted, "all is shown in the end"


def test_a_look_touches_no_more_envs_than_have_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 10_000
    world = World(rate=1e9)
    world.checked = False
    world.envs(*keys(number))
    world.want(*(record("east", key=key) for key in keys(number)))
    while world.step() or world.mirror.wake_at(world.now) < math.inf:
        world.now += 0.01
    assert len(world.begun) == number
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        whole = getattr(MirroredEnv, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return whole(*args, **kwargs)

        monkeypatch.setattr(MirroredEnv, name, counted)

    for name in ("plan", "wanted", "next_change", "observed", "left_to_others"):
        count(name)
    world.now += 100.0
    world.change(record("east", 5, key=keys(number)[4711]))
    assert len(world.step()) == 1
    assert world.mirror.wake_at(world.now) == math.inf
    assert world.step() == []
    assert sum(calls.values()) < 20


# --- who writes


def test_nothing_is_written_before_it_is_known_that_it_may_be() -> None:
    world = World(ready=False)
    world.envs(*keys(1))
    world.want(record("east", key=keys(1)[0]))
    assert world.run(100.0) == []
    world.mirror.stand(True, world.now)
    assert world.run(100.0) == []
    world.mirror.allow(ALL_FIELDS, world.now)
    assert world.mirror.fields == ALL_FIELDS
    assert len(world.run(1.0)) == 1
    world.mirror.allow(None, world.now)
    world.change(record("east", 5, key=keys(1)[0]))
    assert world.run(100.0) == []
    world.mirror.allow(ALL_FIELDS, world.now)
    world.mirror.stand(False, world.now)
    assert not world.mirror.acting
    assert world.run(100.0) == []
    world.mirror.stand(True, world.now)
    assert len(world.run(1.0)) == 1


def test_what_waits_is_not_written_by_an_agent_that_stands_by() -> None:
    number = 2 * STEP + 100
    world = World(rate=1e9)
    world.envs(*keys(number))
    world.want(*(record("east", key=key) for key in keys(number)))
    world.mirror.stand(False, world.now)
    assert world.step() == []
    world.mirror.stand(True, world.now)
    world.mirror.allow(None, world.now)
    assert world.step() == []


def test_only_the_reporter_writes_and_nobody_knowing_changes_nothing() -> None:
    world = World(ready=False)
    assert not world.mirror.acting
    for answer, acting in ((False, False), (None, False), (True, True), (None, True), (False, False), (None, False)):
        world.mirror.stand(answer, world.now)
        assert world.mirror.acting is acting
        world.now += 10.0
    assert world.lines == [
        ("kubernetes_status_writes", {"reporter": True}),
        ("kubernetes_status_stands_by", {"reporter": False}),
    ]


def stood(world: World, answer: bool | None, seconds: float) -> list[float]:
    """Asked each second; when it acts."""
    found = []
    for _ in range(int(seconds)):
        world.mirror.stand(answer, world.now)
        if world.mirror.acting:
            found.append(world.now)
        world.now += 1.0
    return found


def test_what_nobody_keeps_up_is_taken_over_where_nobody_says_whose_it_is() -> None:
    world = World(ready=False)
    assert stood(world, False, 1000.0) == []
    begun = world.now
    acting = stood(world, None, 300.0)
    assert UNATTENDED <= acting[0] - begun <= 1.5 * UNATTENDED + 1.0
    assert stood(world, False, 10.0) == []


def agents_and_server() -> tuple[World, Server]:
    """An agent that stands by, with no hub to ask, and an env on a server that keeps book."""
    world = World(ready=False)
    server = Server(lambda: world.now)
    server.create()
    world.does = server.write
    world.mirror.allow(ALL_FIELDS, 0.0)
    world.mirror.stand(None, 0.0)
    world.mirror.observe(KEY, server.seen(), 0.0)
    return world, server


def elsewhere(world: World, server: Server, idle: int) -> None:
    """Another agent of this cluster writes, and that is seen."""
    server.write(Write(KEY, world.now, 0, segments([record("east", idle, world.now)]), True))
    world.mirror.observe(KEY, server.seen(), world.now)


def test_what_another_agent_keeps_up_is_left_to_it() -> None:
    world, server = agents_and_server()
    for idle in range(20):
        elsewhere(world, server, idle)
        assert stood(world, None, REFRESH) == []
    assert stood(world, None, 300.0) != []


def test_what_others_do_is_no_sign_of_an_agent() -> None:
    world, server = agents_and_server()
    elsewhere(world, server, 1)
    for _ in range(10):
        server.merge({"clusters": [entry for entry in server.clusters() if entry["clusterID"] == "west"]}, "controller")
        server.merge({"idleReplicas": int(world.now)})
        world.mirror.observe(KEY, server.seen(), world.now)
        if stood(world, None, 30.0):
            return
    pytest.fail("nobody keeps it up, and it is not taken over")


def test_of_two_agents_that_write_without_a_hub_one_gives_way() -> None:
    world, server = agents_and_server()
    stood(world, None, 300.0)
    assert world.mirror.acting
    world.want(record("east", 1, world.now, key=KEY))
    world.run(1.0)
    assert server.has_ours() == {"east"}
    world.lines.clear()
    elsewhere(world, server, 5)
    assert not world.mirror.acting
    assert world.events() == ["kubernetes_status_stands_by"]
    assert stood(world, None, UNATTENDED) == []


def test_a_reporter_does_not_give_way_but_tells() -> None:
    world, server = agents_and_server()
    world.mirror.stand(True, world.now)
    world.want(record("east", 1, world.now, key=KEY))
    for idle in (5, 6):
        world.run(10.0)
        elsewhere(world, server, idle)
        assert world.mirror.acting
    assert world.events() == [
        "kubernetes_status_writes",
        "kubernetes_status_disturbed",
        "kubernetes_status_stopped",
    ]
    assert {details["manager"] for _, details in world.lines[1:]} == {f"{FIELD_MANAGER}, as another agent"}
    (trouble,) = world.mirror.troubles()
    assert trouble.party == FIELD_MANAGER
    assert "one agent alone" in trouble.detail


def test_a_reporter_that_does_not_write_is_told_by_the_one_that_could() -> None:
    world = World(ready=False)
    world.envs(*keys(1))
    world.want(record("east", key=keys(1)[0]))
    world.mirror.allow(ALL_FIELDS, 0.0)
    stood(world, False, 2 * UNATTENDED)
    assert world.reasons() == []
    stood(world, False, 5.0)
    assert world.reasons() == ["unattended"]
    world.mirror.observe(keys(1)[0], None, world.now)
    assert world.reasons() == []


# --- where the server says no


@pytest.mark.parametrize(
    "failure",
    [UnreachableError("down"), AnswerError("odd"), error(503), error(502), error(504), error(401), error(429)],
)
def test_while_the_server_fails_it_is_asked_once_in_a_while(failure: KubernetesError) -> None:
    world = fleet(20, latency=0.1)
    start = world.now
    world.fails = lambda write: failure
    world.want(*(record("east", 5, world.now, key=key) for key in keys(20)))
    world.run(120.0)
    assert world.reasons() == [failure.reason]
    tries = [moment for moment, _ in world.begun if moment > start + 1.0]
    assert len(tries) <= 12
    assert max(later - earlier for earlier, later in pairwise(tries)) <= LONGEST_PAUSE + 0.2
    world.fails = lambda write: None
    world.begun.clear()
    world.run(LONGEST_PAUSE + 35.0)
    assert {write.key for _, write in world.begun} == set(keys(20))
    assert world.mirror.troubles() == []


def test_the_first_pause_is_short_however_many_writes_fail_at_once() -> None:
    world = fleet(20, rate=1000.0, latency=0.1)
    world.now += 100.0
    start = world.now
    world.fails = lambda write: UnreachableError("down")
    world.want(*(record("east", 5, world.now, key=key) for key in keys(20)))
    world.run(5.0)
    tries = [moment for moment, _ in world.begun[IN_FLIGHT:]]
    assert tries[0] - start <= 0.2 + FIRST_PAUSE
    world.run(60.0)
    tries = [moment for moment, _ in world.begun[IN_FLIGHT:]]
    assert all(later - earlier > world.latency for earlier, later in pairwise(tries)), "one at a time"


def test_a_server_that_fails_is_a_trouble_all_the_while() -> None:
    """With one env alone, which waits between two tries."""
    world = fleet(1)
    world.fails = lambda write: UnreachableError("down")
    world.change(record("east", 5, key=keys(1)[0]))
    world.run(1.0)
    for _ in range(300):
        world.mirror.stand(True, world.now)
        assert world.reasons() == ["unreachable"]
        world.run(1.0)
    world.fails = lambda write: None
    world.run(LONGEST_PAUSE)
    assert world.reasons() == []


def test_a_trouble_ends_when_there_is_nothing_to_write() -> None:
    world = fleet(1)
    world.fails = lambda write: UnreachableError("down")
    world.change(record("east", 5, key=keys(1)[0]))
    world.run(100.0)
    world.change(record("east", 1, key=keys(1)[0]))
    world.run(2 * LONGEST_PAUSE + 1.0)
    world.mirror.stand(True, world.now)
    assert world.reasons() == []


@pytest.mark.parametrize("asked, pause", [(20.0, 20.0), (3600.0, LONGEST_RETRY_AFTER)])
def test_a_server_that_asks_for_patience_gets_it(asked: float, pause: float) -> None:
    world = fleet(20, rate=1000.0)
    world.now += 100.0
    start = world.now
    world.fails = lambda write: error(429, retry_after=asked)
    world.want(*(record("east", 5, world.now, key=key) for key in keys(20)))
    world.run(1.0)
    assert [moment for moment, _ in world.begun] == [start]
    world.fails = lambda write: None
    world.begun.clear()
    world.run(100.0)
    assert world.begun[0][0] == pytest.approx(start + pause)
    assert len(world.begun) == 20


def test_nothing_that_was_under_way_shortens_the_time_that_was_asked_for() -> None:
    world = fleet(20, rate=1000.0, latency=0.1)
    world.now += 100.0
    start = world.now
    answers = [error(429, retry_after=20.0), UnreachableError("reset"), error(429), error(503)]
    world.fails = lambda write: answers.pop(0) if answers else None
    world.want(*(record("east", 5, world.now, key=key) for key in keys(20)))
    world.run(60.0)
    tries = [moment for moment, _ in world.begun[IN_FLIGHT:]]
    assert tries[0] >= start + 20.0


def test_a_namespace_that_gives_no_right_waits_alone() -> None:
    world = World(rate=100.0, latency=0.05)
    open_, closed = keys(20, "open"), keys(20, "closed")
    world.envs(*open_, *closed)
    world.fails = lambda write: error(403) if write.key[0] == "closed" else None
    world.want(*(record("east", key=key) for key in [*open_, *closed]))
    world.run(10.0)
    assert {write.key for _, write in world.begun} >= set(open_)
    assert world.reasons() == ["forbidden"]
    (trouble,) = world.mirror.troubles()
    assert "closed" in trouble.detail
    assert "open" not in trouble.detail
    assert "patch on sandboxenvs/status" in trouble.detail
    world.run(300.0)
    tries = [moment for moment, write in world.begun if write.key[0] == "closed"]
    late = [moment for moment in tries if moment > 10.0]
    assert len(late) <= 300.0 / (LONGEST_PAUSE / 2) + 3
    assert max(later - earlier for earlier, later in pairwise(tries)) <= LONGEST_PAUSE + 0.2
    world.begun.clear()
    world.fails = lambda write: None
    world.run(LONGEST_PAUSE + 5.0)
    assert {write.key for _, write in world.begun} == set(closed)
    assert world.mirror.troubles() == []


def test_many_namespaces_that_give_no_right_cost_one_try_a_second_all_together() -> None:
    world = World(rate=100.0, latency=0.05)
    envs = [key for number in range(60) for key in keys(3, f"n{number}")]
    world.envs(*envs)
    world.fails = lambda write: error(403)
    world.want(*(record("east", key=key) for key in envs))
    world.checked = False
    world.run(300.0)
    world.begun.clear()
    world.run(300.0)
    assert len(world.begun) <= 450
    (trouble,) = world.mirror.troubles()
    assert "and 57 more namespaces" in trouble.detail


def test_a_namespace_of_which_nothing_is_to_be_written_is_no_trouble() -> None:
    world = World()
    world.envs(*keys(2))
    world.fails = lambda write: error(403)
    world.want(*(record("east", key=key) for key in keys(2)))
    world.run(100.0)
    assert world.reasons() == ["forbidden"]
    for key in keys(2):
        world.mirror.observe(key, None, world.now)
    world.run(100.0)
    world.mirror.stand(True, world.now)
    assert world.reasons() == []


@pytest.mark.parametrize(
    "failure, longest",
    [
        (error(404), LONGEST_PAUSE),
        (error(409), LONGEST_PAUSE),
        (error(500), LONGEST_PAUSE),
        (error(422), LONGEST_REFUSAL_PAUSE),
        (error(400), LONGEST_REFUSAL_PAUSE),
        (error(413), LONGEST_REFUSAL_PAUSE),
        (error(500, "failed to create typed patch object (n/e): .status.x: field not declared"), LONGEST_REFUSAL_PAUSE),
    ],
)
def test_an_env_that_cannot_be_written_costs_the_others_nothing(failure: ApiError, longest: float) -> None:
    """It is tried again and again, ever more rarely, and is named after a while, and not any more once it works."""
    world = fleet(10, latency=0.05)
    world.checked = False
    bad, *good = keys(10)
    world.fails = lambda write: failure if write.key == bad and write.shown else None
    world.every(
        10.0, lambda: world.want(*(record("east", int(world.now) % 1000, world.now, key=key) for key in keys(10)))
    )
    world.run(1800.0)
    for key in good:
        assert len(world.when(key)) >= 175
    tries = [moment for moment, write in world.begun if write.key == bad and write.shown]
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert max(gaps) <= longest + 10.1
    assert min(gaps[PATIENCE + 2 :], default=math.inf) >= min(longest / 2, FIRST_REFUSAL_PAUSE) - ROUNDING
    assert world.reasons() == ["refused"]
    assert "n/e00000" in world.mirror.troubles()[0].detail
    world.fails = lambda write: None
    world.run(longest + 15.0)
    assert world.mirror.troubles() == []


def test_a_server_that_refuses_does_work() -> None:
    for failure in (error(403), error(404), error(409), error(422)):
        world = fleet(5)
        world.fails = lambda write: UnreachableError("down")
        world.change(record("east", 5, world.now, key=keys(5)[0]))
        world.run(10.0)
        assert world.reasons() == ["unreachable"]
        world.fails = lambda write, failure=failure: failure  # type: ignore[misc]
        world.run(LONGEST_PAUSE)
        assert "unreachable" not in world.reasons()


def test_a_server_that_fails_on_every_env_is_left_in_peace() -> None:
    world = fleet(20, rate=100.0, latency=0.1)
    world.fails = lambda write: error(500)
    world.want(*(record("east", 5, world.now, key=key) for key in keys(20)))
    world.run(300.0)
    assert len(world.begun) <= 40
    assert world.reasons()[0] == "server"
    world.fails = lambda write: None
    world.run(LONGEST_PAUSE + 10.0)
    assert world.mirror.troubles() == []


def test_a_few_envs_on_which_the_server_fails_say_nothing_of_the_server() -> None:
    """However often they do, while nothing else is to be written."""
    world = fleet(20, latency=0.1)
    bad = keys(20)[:3]
    world.fails = lambda write: error(500) if write.key in bad else None
    world.change(*(record("east", 5, world.now, key=key) for key in bad))
    world.run(300.0)
    assert world.reasons() == ["refused"]
    world.change(record("east", 5, world.now, key=keys(20)[9]))
    assert keys(20)[9] in {write.key for _, write in world.run(0.2)}


def test_a_refusal_of_the_values_says_that_the_schema_may_have_changed() -> None:
    for failure, doubtful in (
        (error(422), True),
        (error(400), True),
        (error(500, "failed to create typed patch object (n/e): no"), True),
        (error(409, causes=(Cause("FieldManagerConflict", ".status.clusters", 'conflict with "x"'),)), True),
        (error(500), False),
        (error(404), False),
        (error(409), False),
        (error(403), False),
        (UnreachableError("down"), False),
    ):
        world = World()
        world.envs(*keys(1))
        world.want(record("east", key=keys(1)[0]))
        write = world.mirror.next(0.0)
        assert write is not None
        assert world.mirror.failed(write, failure, 0.0) is doubtful, failure


def test_a_status_that_is_refused_is_not_left_to_get_old() -> None:
    """What the server takes no more of is taken away; and then nothing comes of it for a while."""
    world = fleet(1)
    (key,) = keys(1)
    world.fails = lambda write: error(422) if write.shown else None
    world.every(10.0, lambda: world.change(record("east", int(world.now) % 1000, world.now, key=key)))
    world.run(40.0)
    assert [bool(write.shown) for _, write in world.begun][:3] == [True, True, False]
    world.run(3600.0)
    assert not world.begun[-1][1].shown or world.begun[-1][0] > world.now - LONGEST_REFUSAL_PAUSE
    assert len(world.begun) <= 20


def test_what_is_written_is_no_trouble_although_it_is_old_already() -> None:
    for failure in (error(422), error(500)):
        world = fleet(1, latency=1.0)
        (key,) = keys(1)
        world.fails = lambda write, failure=failure: failure if write.shown else None  # type: ignore[misc]
        world.change(record("east", 5, key=key))
        world.run(1000.0)
        assert world.reasons() == ["refused"]
        world.fails = lambda write: None
        while not world.flying or not world.flying[0][1].shown:
            world.run(0.5)
        world.change(record("east", 5, world.now, key=key))
        world.run(1.5)
        assert world.reasons() == []


def test_a_refusal_after_a_success_is_a_first_one() -> None:
    world = fleet(1)
    (key,) = keys(1)
    for idle in (5, 6):
        world.fails = lambda write: error(422) if write.shown else None
        world.change(record("east", idle, world.now, key=key))
        begun = world.run(FIRST_REFUSAL_PAUSE + 1.0)
        assert [bool(write.shown) for _, write in begun] == [True, True]
        assert begun[1][0] - begun[0][0] == pytest.approx(FIRST_REFUSAL_PAUSE)
        world.fails = lambda write: None
        world.run(LONGEST_REFUSAL_PAUSE)
        assert world.reasons() == []


def test_what_was_refused_is_tried_again_by_itself() -> None:
    world = fleet(1)
    world.fails = lambda write: error(422) if write.shown else None
    world.change(record("east", 5, key=keys(1)[0]))
    world.run(1000.0)
    assert world.reasons() == ["refused"]
    tries = [moment for moment, write in world.begun if write.shown]
    assert len(tries) >= 5
    world.fails = lambda write: None
    world.run(LONGEST_REFUSAL_PAUSE)
    assert world.begun[-1][1].shown
    assert world.reasons() == []


@pytest.mark.parametrize("empty", [False, True])
def test_a_status_of_which_nothing_can_be_taken_away_is_not_tried_all_the_time(empty: bool) -> None:
    """Where letting go is refused, and even (`empty`) an entry that says nothing."""
    world = fleet(1)
    world.fails = lambda write: error(422) if empty or not write.shown else None
    world.want()
    world.run(3600.0)
    assert len(world.begun) <= (30 if empty else 14)


def test_a_trouble_goes_with_its_env() -> None:
    for failure in (error(422), error(409)):
        world = fleet(1)
        (key,) = keys(1)
        world.fails = lambda write, failure=failure: failure  # type: ignore[misc]
        world.change(record("east", 5, key=key))
        world.run(200.0)
        assert world.reasons() == ["refused"]
        world.mirror.observe(key, None, world.now)
        assert world.reasons() == []


def test_a_refusal_that_comes_after_the_end_of_its_env_is_forgotten() -> None:
    world = World(latency=1.0)
    (key,) = keys(1)
    world.envs(key)
    world.fails = lambda write: error(422)
    world.want(record("east", key=key))
    world.run(0.5)
    world.mirror.observe(key, None, world.now)
    world.want()
    world.run(10.0)
    assert world.reasons() == []
    assert kept(world.mirror) == {}


# --- what others do


def contested(number: int = 1) -> tuple[World, Server]:
    """Envs that are shown, on a server that keeps book."""
    world = World()
    server = Server(lambda: world.now)
    world.does = server.write
    for key in keys(number):
        server.create(key)
        world.mirror.observe(key, server.seen(key), world.now)
    world.want(*(record(cluster, key=key) for cluster in ("east", "north") for key in keys(number)))
    world.run(20.0)
    world.lines.clear()
    world.begun.clear()
    return world, server


def remove(world: World, server: Server, key: Key) -> None:
    local = [entry for entry in server.clusters(key) if entry["clusterID"] == "west"]
    server.merge({"clusters": local}, "controller", key=key)
    world.mirror.observe(key, server.seen(key), world.now)


def test_who_removes_what_is_written_twice_is_named_and_left_alone_for_a_while() -> None:
    world, server = contested(2)
    one, two = keys(2)
    remove(world, server, one)
    world.run(10.0)
    assert server.has_ours(one) == {"east", "north"}
    assert world.mirror.troubles() == []
    remove(world, server, one)
    stopped = world.now
    assert world.lines == [
        ("kubernetes_status_disturbed", {"env": "n/e00000", "entries": ["east", "north"], "manager": "controller"}),
        (
            "kubernetes_status_stopped",
            {"env": "n/e00000", "entries": ["east", "north"], "manager": "controller", "again_in": LEAVE_ALONE},
        ),
    ]
    (trouble,) = world.mirror.troubles()
    assert (trouble.reason, trouble.party) == ("contested", "controller")
    assert "n/e00000" in trouble.detail
    world.every(10.0, lambda: world.change(*(record("east", int(world.now), world.now, key=key) for key in (one, two))))
    world.begun.clear()
    world.run(stopped + LEAVE_ALONE - world.now - 0.001)
    assert [bool(write.shown) for _, write in world.begun if write.key == one] == [False], "one that lets go"
    assert len(world.when(two)) >= 50
    assert world.reasons() == ["contested"]
    world.run(10.0)
    assert server.has_ours(one) == {"east", "north"}
    assert world.mirror.troubles() == []


def test_an_entry_of_somebody_else_is_named_and_the_rest_goes_on() -> None:
    world, server = contested(5)
    for key in keys(5):
        entry = {"clusterID": "east", "observedMembers": [{"name": "p", "idleCount": 88}]}
        applied = {
            "apiVersion": "agents.navix.sh/v1alpha1",
            "kind": "SandboxEnv",
            "metadata": {"name": key[1], "namespace": key[0]},
            "status": {"clusters": [entry]},
        }
        server.apply(applied, "ops", force=True, key=key)
    world.want(*(record(cluster, 7, world.now, key=key) for cluster in ("east", "north") for key in keys(5)))
    world.run(20.0)
    conflicts = [details for event, details in world.lines if event == "kubernetes_status_conflict"]
    assert len(conflicts) == 5
    assert conflicts[0] == {
        "env": "n/e00000",
        "field": '.status.clusters[clusterID="east"].observedMembers[name="p"].idleCount',
        "fields": 1,
        "owner": "ops",
        "again_in": LEAVE_ALONE,
    }
    assert all(server.has_ours(key) == {"north"} for key in keys(5))
    (trouble,) = world.mirror.troubles()
    assert (trouble.reason, trouble.party) == ("conflict", "ops")
    assert "east in n/e00000 belongs to ops (5 envs in all)" in trouble.detail
    assert world.run(LEAVE_ALONE / 2) == []


def test_an_entry_of_somebody_else_is_tried_again_in_time_whatever_else_there_is() -> None:
    world, server = contested(1)
    (key,) = keys(1)
    found = server.clusters(key)
    next(entry for entry in found if entry["clusterID"] == "east")["observedMembers"][0]["idleCount"] = 88
    server.merge({"clusters": found}, "ops", key=key)
    world.change(record("east", 7, world.now, key=key))
    refused = world.run(1.0)[0][0]
    for moment in (refused + LEAVE_ALONE - 20.0, refused + LEAVE_ALONE - 10.0):
        world.run(moment - world.now)
        world.change(record("north", 1, world.now, key=key))
    assert world.run(20.0)[-1][0] == pytest.approx(refused + LEAVE_ALONE)
    assert server.has_ours(key) == {"east", "north"}


def test_a_write_without_an_answer_is_no_disturbance() -> None:
    for failure in (UnreachableError("down"), error(504), error(500)):
        world, server = contested(1)
        (key,) = keys(1)

        def lost(write: Write, server: Server = server, failure: KubernetesError = failure) -> Env:
            server.write(write)
            raise failure

        for idle in range(5, 9):
            world.does = lost
            world.change(record("east", idle, world.now, key=key))
            world.run(0.5)
            world.mirror.observe(key, server.seen(key), world.now)
            world.does = server.write
            world.run(40.0)
        world.mirror.stand(True, world.now)
        assert world.events("kubernetes_status_disturbed", "kubernetes_status_stopped") == []
        assert world.mirror.troubles() == []


def test_a_conflict_about_the_list_as_a_whole_is_a_matter_of_the_schema() -> None:
    world = fleet(1)
    (key,) = keys(1)
    causes = (Cause("FieldManagerConflict", ".status.clusters", 'conflict with "controller"'),)
    world.fails = lambda write: error(409, causes=causes)
    world.change(record("east", 5, key=key))
    world.run(300.0)
    assert world.reasons() == ["refused"]
    assert len(world.begun) <= 20
    assert world.events("kubernetes_status_conflict") == []


def test_odd_conflicts_are_no_endless_loop() -> None:
    for field in ("", ".spec", '.status.clusters[clusterID="other"].isLocal', ".status.federation.clusters"):
        world = fleet(1)
        (key,) = keys(1)
        causes = (Cause("FieldManagerConflict", field, 'conflict with "x"'),)
        world.fails = lambda write, causes=causes: error(409, causes=causes) if write.shown else None  # type: ignore[misc]
        world.change(record("east", 5, key=key))
        world.run(LEAVE_ALONE - 20.0)
        assert len(world.begun) <= 4, field
        assert world.events("kubernetes_status_conflict"), field


# --- what is kept


def kept(mirror: Mirror) -> dict[str, int]:
    """What a mirror keeps of envs, by the names of its parts."""
    found = {name: len(value) for name, value in vars(mirror).items() if isinstance(value, dict | list)}
    return {name: length for name, length in found.items() if length}


@settings(max_examples=60)
@given(st.data())
def test_nothing_is_kept_of_envs_that_are_gone_and_wanted_nowhere(data: st.DataObject) -> None:
    selective = data.draw(st.booleans())
    world = World(rate=20.0, latency=data.draw(st.sampled_from([0.0, 0.3])), selective=selective)
    world.checked = False
    envs = keys(4)
    failures = [None, error(403), error(404), error(409), error(422), error(500), error(503)]
    for _ in range(data.draw(st.integers(1, 15))):
        key = data.draw(st.sampled_from(envs))
        match data.draw(st.sampled_from(["want", "want", "there", "there", "gone", "fail", "stand", "nothing"])):
            case "want":
                world.change(record("east", data.draw(st.integers(0, 9)), world.now, key=key))
            case "there":
                world.envs(key)
            case "gone":
                world.mirror.observe(key, None, world.now)
            case "fail":
                failure = data.draw(st.sampled_from(failures))
                world.fails = lambda write, failure=failure: failure  # type: ignore[misc]
            case "stand":
                world.mirror.stand(data.draw(st.booleans()), world.now)
            case "nothing":
                world.want()
        world.run(data.draw(st.sampled_from([0.0, 0.1, 6.0, 61.0])))
    world.want()
    for _ in world.mirror.replacing(None, {}, world.now):
        pass
    world.fails = lambda write: error(404)
    world.run(3 * LEAVE_ALONE)
    world.mirror.stand(world.mirror.acting, world.now)
    world.run(1.0)
    assert kept(world.mirror) == {}


def test_while_nothing_can_be_written_what_is_kept_is_bounded() -> None:
    world = fleet(20)
    world.checked = False
    world.fails = lambda write: UnreachableError("down")
    world.every(
        1.0,
        lambda: world.want(
            *(
                record("east", Random(int(world.now) + number).randrange(1000), world.now, key=key)
                for number, key in enumerate(keys(20))
            )
        ),
    )
    world.run(500.0)
    assert max(kept(world.mirror).values()) <= 64 + 2 * 20 + 1


def test_a_view_that_comes_and_goes_while_its_env_waits_takes_no_more_room() -> None:
    world = fleet(5)
    world.fails = lambda write: error(422)
    world.change(*(record("east", 5, key=key) for key in keys(5)))
    world.run(1.0)
    for idle in range(500):
        world.change(*(record("east", 1 + idle % 2, key=key) for key in keys(5)))
        world.step()
    assert max(kept(world.mirror).values()) <= 64 + 2 * 5 + 10


def test_an_env_that_was_chosen_no_more_is_let_go_of() -> None:
    """Where envs are chosen by labels, one that goes out of sight may still be there."""
    world = World(selective=True, echo=False)
    one, two = keys(2)
    world.envs(one, two)
    world.want(*(record("east", key=key) for key in (one, two)))
    world.run(10.0)
    world.begun.clear()
    world.mirror.observe(one, None, world.now)
    assert [(write.key, dict(write.shown)) for _, write in world.run(20.0)] == [(one, {})]
    world.fails = lambda write: error(404)
    world.mirror.observe(two, None, world.now)
    assert next((write.key, dict(write.shown)) for _, write in world.run(20.0)) == (two, {})
    assert world.run(1000.0) == []
    world.want()
    assert kept(world.mirror) == {}


def test_an_env_that_is_seen_again_is_shown() -> None:
    world = fleet(1, selective=True)
    (key,) = keys(1)
    world.mirror.observe(key, None, world.now)
    world.envs(key)
    world.run(10.0)
    assert [bool(write.shown) for _, write in world.begun] == [True]


def test_an_agent_that_stands_by_lets_go_of_nothing_and_keeps_nothing() -> None:
    world = World(selective=True)
    (key,) = keys(1)
    world.envs(key)
    world.want(record("east", key=key))
    world.run(10.0)
    world.mirror.stand(False, world.now)
    world.want()
    world.mirror.observe(key, None, world.now)
    world.run(10.0)
    assert kept(world.mirror) == {}


# --- what comes in steps


def test_all_of_many_envs_are_looked_at_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an agent begins to write."""
    number = 3 * STEP
    world = World(ready=False)
    world.envs(*keys(number))
    world.mirror.allow(ALL_FIELDS, 0.0)
    world.step()
    calls: list[object] = []
    whole = MirroredEnv.plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return whole(*args, **kwargs)

    monkeypatch.setattr(MirroredEnv, "plan", counted)
    world.mirror.stand(True, 0.0)
    while world.mirror.wake_at(0.0) <= 0.0:
        before = len(calls)
        world.step()
        assert 0 < len(calls) - before <= STEP
    assert len(calls) == number


def test_many_records_and_envs_are_taken_in_steps() -> None:
    world = World()
    number = 3 * STEP
    objects = {key: nothing(key, 1) for key in keys(number)}
    snapshot = [record("east", key=key) for key in keys(number)]
    assert sum(1 for _ in world.mirror.replacing(None, objects, 0.0)) >= 2
    assert sum(1 for _ in world.mirror.want(snapshot, 0.0)) >= 5
    assert sum(1 for _ in world.mirror.want([], 0.0)) >= 2


def test_envs_may_come_and_go_while_records_are_taken() -> None:
    world = World(rate=1e6)
    world.checked = False
    number = 3 * STEP
    objects = {key: nothing(key, 1) for key in keys(number)}
    for _ in world.mirror.replacing(None, objects, 0.0):
        pass
    steps = world.mirror.want([record("east", key=key) for key in keys(number)], 0.0)
    for position, _ in enumerate(steps):
        world.mirror.observe(keys(number)[-1 - position], None, 0.0)
        world.envs(("n", f"new{position}"))
        world.run(0.1)
    world.want()
    for _ in world.mirror.replacing(None, {}, world.now):
        world.run(0.1)
    world.run(30.0)
    assert kept(world.mirror) == {}


def test_a_list_of_one_namespace_says_nothing_of_others() -> None:
    world = World()
    here, there = keys(2, "here"), keys(2, "there")
    world.envs(*here, *there)
    for _ in world.mirror.replacing("here", {here[0]: nothing(here[0], 5)}, 0.0):
        pass
    world.want(*(record("east", key=key) for key in [*here, *there]))
    assert {write.key for _, write in world.run(10.0)} == {here[0], *there}


def test_records_of_the_own_cluster_are_not_shown() -> None:
    world = World()
    world.envs(*keys(1))
    world.want(record("west", key=keys(1)[0]))
    assert world.run(10.0) == []
    world.want(record("west", key=keys(1)[0]), record("east", key=keys(1)[0]))
    ((_, write),) = world.run(10.0)
    assert write.shown.keys() == {"east"}


# --- what is in the way


def test_troubles_name_a_few_envs_and_count_the_others() -> None:
    world = fleet(9)
    world.fails = lambda write: error(422, "status.clusters[0]: too long")
    world.want(*(record("east", 5, key=key) for key in keys(9)))
    world.run(30.0)
    (trouble,) = world.mirror.troubles()
    assert trouble.reason == "refused"
    assert "n/e00000, n/e00001, n/e00002 and 6 more envs" in trouble.detail
    assert "too long" in trouble.detail
    world.mirror.stand(False, world.now)
    assert world.mirror.troubles() == [], "it is the other agent's business"


def test_troubles_keep_their_order() -> None:
    world, server = contested(3)
    for _ in range(2):
        for key in keys(3):
            remove(world, server, key)
        world.run(6.0)
    before: list[Trouble] = world.mirror.troubles()
    assert [trouble.reason for trouble in before] == ["contested"]
    world.run(5.0)
    assert world.mirror.troubles() == before


def test_every_party_has_a_trouble_of_its_own() -> None:
    world, server = contested(2)
    one, two = keys(2)
    for idle in (70, 71):
        remove(world, server, one)
        found = server.clusters(two)
        for entry in found:
            if entry["clusterID"] != "west":
                entry["observedMembers"][0]["idleCount"] = idle
        server.merge({"clusters": found}, "ops", key=two)
        world.mirror.observe(two, server.seen(two), world.now)
        world.run(6.0)
    assert [trouble.party for trouble in world.mirror.troubles()] == ["controller", "ops"]

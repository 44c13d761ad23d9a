"""What is to be written about one env, and what others have done to it: against a server that keeps book of owners,
with rivals, and with events and answers that come late, together, or not at all."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from tests.kubernetes.statuses import CLUSTERS, KEY, Server, record
from trio_federation import Capacity
from trio_federation_kubernetes.decoding import Misfit
from trio_federation_kubernetes.errors import ApiError
from trio_federation_kubernetes.mirrored import (
    DISTURBANCE_WINDOW,
    LEAVE_ALONE,
    SAME_MOMENT,
    Disturbance,
    MirroredEnv,
    Plan,
    Write,
)
from trio_federation_kubernetes.ownership import FIELD_MANAGER, Conflict, Owners, conflicts
from trio_federation_kubernetes.segments import Env, Member, content, entries, segments

REFRESH = 60.0
INTERVAL = 5.0


class World:
    """One env, its object on a server, and what is on the way between the two."""

    def __init__(self, *, present: bool = True) -> None:
        self.now = 1000.0
        self.server = Server(lambda: self.now)
        self.env = MirroredEnv(KEY, "west")
        #: how much of what has happened the env was told
        self.told = 0
        self.acting = True
        self.write: Write | None = None
        self.outcome: Env | ApiError | None = None
        self.disturbances: list[Disturbance] = []
        if present:
            self.server.create()
            self.tell()

    # what is seen

    def tell(self, number: int | None = None) -> list[Disturbance]:
        """So many of the events that wait; all."""
        before = len(self.disturbances)
        waiting = self.server.history[self.told :]
        for _, seen in waiting[:number]:
            self.told += 1
            self.see(seen)
        return self.disturbances[before:]

    def see(self, seen: Env | None) -> None:
        if seen is None:
            self.env.gone()
        else:
            self.disturbances += self.env.observed(seen, self.now, acting=self.acting)

    def list_anew(self) -> None:
        """The object as it is; what was before is never told."""
        self.told = len(self.server.history)
        self.see(self.server.seen() if KEY in self.server.objects else None)

    # what is written

    def want(self, *records: Capacity) -> bool:
        return self.env.want(list(records))

    def plan(self, keep_until: float = -math.inf) -> Plan | None:
        return self.env.plan(self.now, refresh_interval=REFRESH, env_interval=INTERVAL, keep_until=keep_until)

    def begin(self) -> Write:
        assert self.write is None
        self.write = self.env.begin(self.now)
        self.outcome = None
        return self.write

    def arrive(self) -> None:
        """The server has it."""
        assert self.write is not None
        try:
            self.outcome = self.server.write(self.write)
        except ApiError as error:
            self.outcome = error

    def answer(self) -> list[Disturbance]:
        """And its answer is here."""
        before = len(self.disturbances)
        write, self.write = self.write, None
        assert write is not None
        if isinstance(self.outcome, Env):
            self.disturbances += self.env.written(write, self.outcome, self.now, acting=self.acting)
        else:
            assert self.outcome is not None
            self.disturbances += self.env.failed(write, self.now, unsure=False, acting=self.acting)
            if found := conflicts(self.outcome):
                self.env.conflicted(write, found, self.now)
            else:
                self.env.retry_at = self.now + 1.0
        return self.disturbances[before:]

    def lose(self) -> list[Disturbance]:
        """Nobody knows what has become of it."""
        before = len(self.disturbances)
        write, self.write = self.write, None
        assert write is not None
        self.disturbances += self.env.failed(write, self.now, unsure=True, acting=self.acting)
        self.env.retry_at = self.now + 1.0
        return self.disturbances[before:]

    def do(self) -> Write:
        """Write what is due, when it is, and see it."""
        plan = self.plan()
        assert plan is not None
        self.now = max(self.now, plan.earliest)
        write = self.begin()
        self.arrive()
        self.answer()
        self.tell()
        return write

    # what others write

    def remove(self, *clusters: str, manager: str = "controller") -> None:
        """Somebody writes the whole list, without these; without all of ours and theirs."""
        gone = clusters or CLUSTERS
        kept = [entry for entry in self.server.clusters() if entry["clusterID"] not in gone]
        self.server.merge({"clusters": kept}, manager)

    def rewrite(self, cluster: str, idle: int = 77, manager: str = "ops") -> None:
        """Somebody writes the whole list, with another count."""
        found = self.server.clusters()
        for entry in found:
            if entry["clusterID"] == cluster:
                entry["observedMembers"][0]["idleCount"] = idle
        self.server.merge({"clusters": found}, manager)

    def force(self, cluster: str, idle: int = 88, manager: str = "rival", *, force: bool = True) -> None:
        """Somebody applies an entry, ours or not."""
        pool = {"name": "p", "idleCount": idle}
        entry = {"clusterID": cluster, "isLocal": False, "observedMembers": [pool]}
        self.server.apply(applied({"clusters": [entry]}), manager, force=force)

    def let_go(self, manager: str = "rival") -> None:
        """Somebody lets go of what was applied."""
        self.server.apply(applied(None), manager)

    def shows(self) -> dict[str, Any]:
        """What is ours, and there."""
        ours = self.server.has_ours()
        return {name: content(entry) for name, entry in entries(self.server.seen()).items() if name in ours}


def applied(status: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "apiVersion": "agents.navix.sh/v1alpha1",
        "kind": "SandboxEnv",
        "metadata": {"name": KEY[1], "namespace": KEY[0]},
    }
    return found if status is None else found | {"status": status}


def version(seen: Env) -> int:
    return int(seen.metadata.resourceVersion)


_IDLE = st.dictionaries(st.sampled_from(CLUSTERS), st.integers(0, 3)) | st.fixed_dictionaries(
    {cluster: st.integers(0, 3) for cluster in CLUSTERS}
)


class Mirroring(RuleBasedStateMachine):
    """Anything may happen, in any order, to an env that this agent writes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        #: how many of the changes that others have made may still be told as disturbances
        self.changes = 0
        self.stopped_until = -math.inf
        #: entries that were ours once, or about which there was a conflict
        self.ours_once: set[str] = set()
        #: the object as it was told last
        self.newest: Env | None = self.world.server.seen()

    # what passes

    @initialize(idle=_IDLE)
    def begins_with(self, idle: dict[str, int]) -> None:
        self.wants(idle)
        self.writes()

    @rule(seconds=st.sampled_from([0.5, 3.0, 5.0, 20.0, 61.0, 300.0]))
    def passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(idle=_IDLE)
    def wants(self, idle: dict[str, int]) -> None:
        self.world.want(*(record(cluster, count, self.world.now) for cluster, count in sorted(idle.items())))

    @rule(number=st.integers(1, 3))
    def is_told(self, number: int) -> None:
        self._note(lambda: self.world.tell(number))

    @rule()
    def lists_anew(self) -> None:
        self._note(self.world.list_anew)

    @rule()
    def stands_by_or_acts(self) -> None:
        self.world.acting = not self.world.acting

    # what is written

    @precondition(lambda self: self.world.write is None and self.world.acting)
    @rule()
    def begins(self) -> None:
        """A write that is due, or will be."""
        plan = self.world.plan()
        if plan is not None:
            self.world.now = max(self.world.now, plan.earliest)
            write = self.world.begin()
            if self.world.now < self.stopped_until:
                assert not write.shown, "it is left alone"
            there = entries(self.newest) if self.newest is not None else {}
            owned = Owners.of(self.newest.metadata.managed_fields).ours if self.newest is not None else ()
            for cluster in write.shown:
                assert cluster not in there or cluster in owned or cluster in self.ours_once, "it was never ours"

    @precondition(lambda self: self.world.write is None and self.world.acting)
    @rule()
    def writes(self) -> None:
        """From its beginning to its answer."""
        self.begins()
        if self.world.write is not None:
            self.arrives()
            self.is_answered()

    @precondition(lambda self: self.world.write is not None and self.world.outcome is None)
    @rule()
    def arrives(self) -> None:
        self.world.arrive()
        assert self.world.write is not None
        if isinstance(self.world.outcome, ApiError):
            self.ours_once |= {each.cluster for each in conflicts(self.world.outcome) if each.cluster is not None}
        else:
            self.ours_once |= self.world.write.shown.keys()

    @precondition(lambda self: self.world.write is not None and self.world.outcome is not None)
    @rule()
    def is_answered(self) -> None:
        answer, known, write = self.world.outcome, self.newest, self.world.write
        assert write is not None
        if isinstance(answer, Env) and known is not None and write.life == self.world.env.life:
            self.newest = max(answer, known, key=version) if answer.metadata.uid == known.metadata.uid else known
        self._note(self.world.answer)

    @precondition(lambda self: self.world.write is not None)
    @rule(arrives=st.booleans())
    def is_lost(self, arrives: bool) -> None:
        """What the server has not had yet may still get there."""
        write, outcome = self.world.write, self.world.outcome
        self._note(self.world.lose)
        if arrives and outcome is None:
            assert write is not None
            try:
                self.world.server.write(write)
            except ApiError:
                return
            self.ours_once |= write.shown.keys()

    # what others do

    @rule(cluster=st.sampled_from(CLUSTERS), manager=st.sampled_from(["controller", "ops"]))
    def removes(self, cluster: str, manager: str) -> None:
        self._disturb(lambda: self.world.remove(cluster, manager=manager))

    @rule(cluster=st.sampled_from(CLUSTERS), idle=st.integers(70, 79))
    def rewrites(self, cluster: str, idle: int) -> None:
        self._disturb(lambda: self.world.rewrite(cluster, idle))

    @rule(cluster=st.sampled_from(CLUSTERS), idle=st.integers(80, 89), force=st.booleans())
    def forces(self, cluster: str, idle: int, force: bool) -> None:
        self._disturb(lambda: self.world.force(cluster, idle, force=force))

    @rule()
    def lets_go(self) -> None:
        self._disturb(self.world.let_go)

    @rule()
    def is_deleted(self) -> None:
        if KEY in self.world.server.objects:
            self.world.server.delete()
        else:
            self.world.server.create()

    @rule()
    def is_made_anew(self) -> None:
        if KEY in self.world.server.objects:
            self.world.server.delete()
            self.world.server.create()

    def _disturb(self, change: Any) -> None:
        if KEY not in self.world.server.objects:
            return
        before = len(self.world.server.history)
        # Others are refused, too; and nobody can change the pool of an entry that has none.
        with contextlib.suppress(ApiError, KeyError):
            change()
        self.changes += len(self.world.server.history) - before

    def _note(self, happens: Any) -> None:
        """What is told on the occasion, against what others have done."""
        before, told = len(self.world.disturbances), self.world.told
        life = self.world.env.life
        happens()
        for _, seen in self.world.server.history[told : self.world.told]:
            if seen is None or self.newest is None or version(seen) > version(self.newest):
                self.newest = seen
        for each in self.world.disturbances[before:]:
            self.changes -= 1
            assert each.party != FIELD_MANAGER, "there is no other agent"
            assert self.changes >= 0, f"nobody has done that: {each}"
            if each.stops:
                self.stopped_until = self.world.now + LEAVE_ALONE
        if self.world.env.life != life:
            self.ours_once.clear()
            self.stopped_until = -math.inf if self.world.env.stopped is None else self.stopped_until
        if self.world.told == len(self.world.server.history) and self.world.write is None:
            self.changes = 0

    # what has to be

    @precondition(lambda self: self.world.write is None)
    @rule(how=st.sampled_from(["remove", "rewrite", "force"]), data=st.data())
    def a_change_that_is_seen_is_told_once(self, how: str, data: st.DataObject) -> None:
        """Whatever has happened before, once a write is answered and seen."""
        world = self.world
        world.acting = True
        self._note(world.tell)
        plan = world.plan()
        if plan is None or KEY not in world.server.objects:
            return
        world.now = max(world.now, plan.earliest)
        write = world.begin()
        world.arrive()
        if isinstance(world.outcome, Env):
            self.ours_once |= write.shown.keys()
        self._note(world.answer)
        self._note(world.tell)
        if not isinstance(world.outcome, Env) or not write.shown:
            return
        cluster = data.draw(st.sampled_from(sorted(write.shown)))
        before = len(world.disturbances)
        getattr(world, how)(cluster)
        self.changes += 1
        self._note(world.tell)
        (told,) = world.disturbances[before:]
        assert told.clusters == (cluster,)
        if how != "remove":
            assert told.party == {"rewrite": "ops", "force": "rival"}[how]

    def teardown(self) -> None:
        """Once nobody does anything any more, a few writes show what there is, and then there is nothing to do."""
        world = self.world
        world.acting = True
        if KEY not in world.server.objects:
            world.server.create()
        if world.write is not None:
            if world.outcome is None:
                world.arrive()
            world.answer()
        world.tell()
        for _ in range(8):  # entries that are left to others are tried again and again
            for _ in range(2 * len(CLUSTERS) + 2):
                if world.plan() is None:
                    break
                world.do()
            assert world.plan() is None, "it has no end"
            if (change := world.env.next_change(world.now)) == math.inf:
                break
            world.now = change
        wanted = segments(world.env.records)
        assert world.server.has_ours() <= wanted.keys()
        shown = world.shows()
        for cluster, segment in wanted.items():
            if cluster in shown:
                assert shown[cluster] == segment.content
            else:
                assert Owners.of(world.server.seen().metadata.managed_fields).owners(cluster), cluster
        for entry in world.server.clusters():
            assert entry["clusterID"] == "west" or entry["clusterID"] in wanted or entry["clusterID"] not in shown


@pytest.mark.slow
def test_whatever_happens() -> None:
    run_state_machine_as_test(
        Mirroring, settings=settings(max_examples=3 * settings().max_examples, stateful_step_count=40)
    )


# --- what is written, and when


def ready(*clusters: str, present: bool = True) -> World:
    """A world in which these are shown, and nothing is to be done."""
    world = World(present=present)
    world.want(*(record(cluster, at=world.now) for cluster in clusters or ("east", "north")))
    world.do()
    assert world.plan() is None
    assert world.shows().keys() == set(clusters or ("east", "north"))
    return world


def test_a_new_view_is_written_at_once_but_not_within_a_short_while_of_the_last_write() -> None:
    world = World()
    assert world.plan() is None
    assert world.want(record("east", 3))
    plan = world.plan()
    assert plan is not None
    assert plan.earliest <= world.now
    assert plan.weight > 3
    world.do()
    began = world.now
    world.now += 1.0
    assert world.want(record("east", 4))
    plan = world.plan()
    assert plan is not None
    assert plan.earliest == began + INTERVAL
    assert not world.want(record("east", 4)), "that is no news"


def test_an_env_without_an_object_or_with_a_write_under_way_is_not_written() -> None:
    world = World(present=False)
    world.want(record("east"))
    assert world.plan() is None
    world.server.create()
    world.tell()
    world.begin()
    assert world.plan() is None
    world.arrive()
    world.server.delete()
    world.tell()
    world.answer()
    assert world.plan() is None


def test_ages_alone_wait_for_the_refresh_interval() -> None:
    world = ready()
    began = world.now
    for _ in range(5):
        world.now += 10.0
        world.want(record("east", at=world.now), record("north", at=world.now))
        assert world.plan() == Plan(0, began + REFRESH)
    world.do()
    assert world.now == began + REFRESH
    assert world.plan() is None


def test_an_entry_goes_when_nothing_is_known_of_its_cluster() -> None:
    world = ready("east", "north")
    world.want(record("east"))
    world.do()
    assert world.shows().keys() == {"east"}
    world.want()
    world.do()
    assert world.server.clusters() == [{"clusterID": "west", "isLocal": True}]
    assert "federation" not in world.server.objects[KEY]["status"]
    assert FIELD_MANAGER not in {owner["manager"] for owner in world.server.objects[KEY]["metadata"]["managedFields"]}
    assert world.plan() is None


def test_the_end_of_a_saturation_may_move_a_little() -> None:
    """It is told as a rest of time, in whole seconds, and measured anew each time."""
    world = World()
    world.want(record("east", at=world.now, saturated_for=100.0))
    world.do()
    world.want(record("east", at=world.now + 2.0, saturated_for=98.0 + SAME_MOMENT))
    plan = world.plan()
    assert plan is not None
    assert plan.weight == 0
    world.want(record("east", at=world.now + 2.0, saturated_for=98.1 + SAME_MOMENT))
    plan = world.plan()
    assert plan is not None
    assert plan.weight == 1
    world.do()
    assert world.plan() is None


def test_the_time_between_two_writes_begins_with_the_answer() -> None:
    """Else those of a server that is slow with one would come closer together there."""
    world = World()
    world.want(record("east", idle=1))
    world.begin()
    world.arrive()
    world.now += 1.0
    world.answer()
    world.want(record("east", idle=2))
    plan = world.plan()
    assert plan is not None
    assert plan.earliest == world.now + INTERVAL


def test_a_write_that_failed_counts_as_one_for_the_time_between_two() -> None:
    world = World()
    world.want(record("east"))
    write = world.begin()
    world.now += 1.0
    list(world.env.failed(write, world.now, unsure=False, acting=True))
    plan = world.plan()
    assert plan is not None
    assert plan.earliest == world.now + INTERVAL
    assert world.env.failures == 1
    world.env.retry_at = world.now + 100.0
    plan = world.plan()
    assert plan is not None
    assert plan.earliest == world.now + 100.0


# --- a new process


def again(world: World) -> World:
    """The same object, found by a new process, which is told nothing yet."""
    new = World(present=False)
    new.now, new.server = world.now, world.server
    new.told = len(new.server.history)
    new.list_anew()
    return new


def test_a_new_process_writes_nothing_that_is_there() -> None:
    world = again(ready())
    world.want(record("east", at=world.now), record("north", at=world.now))
    assert world.plan() == Plan(0, world.now + REFRESH)
    world.now += REFRESH
    world.do()
    assert world.plan() is None


def test_a_new_process_takes_away_what_nobody_knows_any_more_but_not_too_soon() -> None:
    """What it rests on may come yet."""
    world = again(ready())
    world.want(record("east", 7, at=world.now))
    keep_until = world.now + 30.0
    plan = world.plan(keep_until)
    assert plan is not None
    assert plan.earliest == keep_until
    world.want(record("east", 7, at=world.now), record("north", at=world.now))
    plan = world.plan(keep_until)
    assert plan is not None
    assert plan.earliest <= world.now, "nothing is taken away"
    world.want(record("east", 7, at=world.now))
    world.do()
    assert world.shows().keys() == {"east"}
    world.want()
    plan = world.plan(world.now + 1000.0)
    assert plan is not None
    assert plan.earliest == world.now + INTERVAL, "that was written, and not found"


def test_a_summary_alone_is_taken_away() -> None:
    world = ready("east")
    world.remove()
    world = again(world)
    plan = world.plan()
    assert plan is not None
    assert plan.weight == 1
    assert world.do().shown == {}
    assert "federation" not in world.server.objects[KEY]["status"]
    assert world.plan() is None


# --- others


@pytest.mark.parametrize("order", ["answer first", "event first", "event while it is written", "list"])
def test_an_own_write_is_no_disturbance(order: str) -> None:
    world = ready()
    for idle in range(5):
        world.now += INTERVAL
        world.want(record("east", idle, world.now))
        world.begin()
        world.arrive()
        if order == "event first":
            world.tell()
        if order == "list":
            world.list_anew()
        world.answer()
        if order != "event while it is written":
            world.tell()
    assert world.disturbances == []


@pytest.mark.parametrize("held", [False, True])
def test_what_is_removed_is_written_again_and_twice_within_a_minute_is_too_often(held: bool) -> None:
    world = ready()
    before = world.now
    if held:
        world.want(record("east", 9), record("north", at=world.now))
        world.now += INTERVAL
        world.begin()
        world.remove("east", "north")
        world.tell()
        assert world.disturbances == []
        world.arrive()
        world.answer()
    else:
        world.remove("east", "north")
        world.tell()
        world.do()
    assert world.disturbances == [Disturbance(("east", "north"), "controller", False)]
    assert world.shows().keys() == {"east", "north"}
    world.now = before + DISTURBANCE_WINDOW - 0.1
    world.remove("east", "north")
    assert world.tell() == [Disturbance(("east", "north"), "controller", True)]
    stopped = world.now
    assert world.env.stopped == (stopped + LEAVE_ALONE, "controller")
    assert world.do().shown == {}, "the summary goes as well"
    assert "federation" not in world.server.objects[KEY]["status"]
    while world.now < stopped + LEAVE_ALONE:
        world.want(record("east", at=world.now), record("north", at=world.now))
        world.remove()
        assert world.tell() == []
        assert world.plan() is None
        assert world.env.next_change(world.now) == stopped + LEAVE_ALONE
        world.now += 10.0
    world.do()
    assert world.shows().keys() == {"east", "north"}
    world.remove()
    assert world.tell() == [Disturbance(("east", "north"), "controller", False)], "it counts from the beginning"


def test_twice_within_more_than_a_minute_is_no_reason_to_stop() -> None:
    world = ready()
    for _ in range(5):
        world.remove()
        assert world.tell() == [Disturbance(("east", "north"), "controller", False)]
        world.do()
        world.now += DISTURBANCE_WINDOW
    assert world.env.stopped is None


def test_what_is_taken_away_of_an_env_that_is_left_alone_is_no_news() -> None:
    world = ready("east", "north", "south")
    world.remove("east")
    assert world.tell() == [Disturbance(("east",), "controller", False)]
    world.now += 1.0
    world.remove("north")
    assert world.tell() == [Disturbance(("north",), "controller", True)]
    stopped = world.env.stopped
    world.now += 1.0
    world.remove("south")
    assert world.tell() == []
    assert world.env.stopped == stopped


def test_an_entry_that_goes_anyway_may_go() -> None:
    world = ready("east", "north")
    world.want(record("north", at=world.now))
    world.remove("east")
    assert world.tell() == []
    world.remove("north")
    assert world.tell() == [Disturbance(("north",), "controller", False)]


def test_a_change_is_told_once_however_often_its_state_is_seen() -> None:
    world = ready()
    world.rewrite("east")
    assert world.tell() == [Disturbance(("east",), "ops", False)]
    for _ in range(3):
        world.list_anew()
    world.server.merge({"idleReplicas": 5})
    world.tell()
    assert len(world.disturbances) == 1


@pytest.mark.parametrize("seen", ["before", "while it is written", "after"])
def test_what_others_own_is_left_to_them_and_the_rest_goes_on(seen: str) -> None:
    world = ready()
    world.now += 100.0
    world.want(record("east", 5, world.now), record("north", 6, world.now))
    world.rewrite("east")
    if seen == "before":
        world.tell()
    world.begin()
    world.arrive()
    if seen == "while it is written":
        world.tell()
    world.answer()
    refused = world.now
    world.tell()
    assert [each.party for each in world.disturbances] == ["ops"], "whenever it is seen, it is one disturbance"
    assert world.env.left_to_others() == {"east": ("ops",)}
    assert world.do().shown.keys() == {"north"}
    assert world.now == refused + INTERVAL
    assert world.server.entry("east") is None, "what was only changed goes with what was ours"
    world.server.merge({"idleReplicas": 5})
    assert world.tell() == [], "which is nobody's doing"
    while world.now < refused + LEAVE_ALONE:
        world.now += 50.0
        world.want(record("east", 5, world.now), record("north", 6, world.now))
        if (plan := world.plan()) is not None and plan.earliest <= world.now < refused + LEAVE_ALONE:
            assert world.do().shown.keys() == {"north"}
    assert len(world.disturbances) == 1


def test_what_others_own_is_tried_again() -> None:
    """Those may have let go, or want the same."""
    world = ready()
    world.now += 100.0
    world.want(record("east", 5, world.now), record("north", 6, world.now))
    world.force("east")
    world.do()
    refused = world.now
    world.do()
    assert world.shows().keys() == {"north"}
    assert world.env.next_change(world.now) == refused + LEAVE_ALONE
    world.now = refused + LEAVE_ALONE
    assert world.do().shown.keys() == {"east", "north"}, "and refused once more"
    refused = world.now
    assert world.shows().keys() == {"north"}
    world.now += 1.0
    world.let_go()
    world.tell()
    world.now = refused + LEAVE_ALONE
    world.do()
    assert world.shows() == {name: each.content for name, each in segments(world.env.records).items()}
    assert world.env.left_to_others() == {}


def test_an_entry_that_is_taken_and_changed_again_is_one_disturbance_too_many() -> None:
    world = ready()
    world.now += 100.0
    world.force("east", 2)
    world.want(record("east", 5, world.now), record("north", 6, world.now))
    world.do()
    world.force("east", 3)
    world.tell()
    assert [each.stops for each in world.disturbances] == [False, True]
    assert world.env.stopped == (world.now + LEAVE_ALONE, "rival")


def test_an_entry_that_was_taken_a_while_ago_may_change() -> None:
    world = ready()
    world.now += 100.0
    world.force("east", 2)
    world.want(record("east", 5, world.now), record("north", 6, world.now))
    world.do()
    world.do()
    world.now += DISTURBANCE_WINDOW
    for idle in range(10, 15):
        world.force("east", idle)
        world.now += 1.0
        assert world.tell() == []
    assert len(world.disturbances) == 1


@pytest.mark.parametrize("seen", ["before", "after"])
def test_that_an_entry_was_taken_is_told_once_however_often_it_is_seen(seen: str) -> None:
    world = ready()
    world.now += 100.0
    world.rewrite("east")
    if seen == "before":
        world.tell()
    world.want(record("east", 5, world.now), record("north", 6, world.now))
    world.do()
    for idle in range(3):
        world.server.merge({"idleReplicas": idle})
        world.tell()
    assert len(world.disturbances) == 1


def test_who_has_an_entry_is_who_has_changed_it_again() -> None:
    """Not whoever has written the list last."""
    world = ready()
    world.now += 100.0
    world.force("east", 2)
    world.want(record("east", 5, world.now), record("north", 6, world.now))
    world.do()
    world.now += 1.0
    world.force("east", 3)
    world.now += 1.0
    world.server.merge(
        {
            "clusters": [
                {**entry, "lastSnapshotTime": "2026-11-30T12:00:00Z"} if entry["clusterID"] == "west" else entry
                for entry in world.server.clusters()
            ]
        }
    )
    world.list_anew()
    assert world.env.stopped == (world.now + LEAVE_ALONE, "rival")


def test_a_time_that_somebody_has_changed_is_put_right_with_the_ages() -> None:
    world = ready()
    found = world.server.clusters()
    found[1]["lastSnapshotTime"] = "2026-11-30T12:00:00Z"
    world.server.merge({"clusters": found}, "ops")
    assert world.tell() == [Disturbance(("east",), "ops", False)]
    assert world.plan() == Plan(0, world.now + REFRESH)


def test_an_entry_that_was_never_ours_may_change_as_often_as_it_likes() -> None:
    world = World()
    world.want(record("east", 5), record("north"))
    world.force("east", 1)
    world.do()
    assert world.env.left_to_others() == {"east": ("rival",)}
    for idle in range(2, 9):
        world.force("east", idle)
        assert world.tell() == []
        world.now += 2.0
    world.do()
    assert world.env.stopped is None
    assert world.shows().keys() == {"north"}


def test_an_entry_that_somebody_else_has_made_is_not_even_tried() -> None:
    world = World()
    world.force("east", 1)
    world.tell()
    world.want(record("east", 5), record("north"))
    assert world.env.left_to_others() == {"east": ("rival",)}
    assert world.do().shown.keys() == {"north"}
    world.let_go()
    world.tell()
    assert world.env.left_to_others() == {}
    assert world.do().shown.keys() == {"east", "north"}


def test_an_entry_of_somebody_else_is_known_from_an_answer() -> None:
    world = ready("east")
    world.now += INTERVAL
    world.force("south")
    world.want(record("east", 5))
    world.begin()
    world.arrive()
    world.answer()
    world.want(record("east", 5), record("south", 5))
    assert world.env.others == {"south": ("rival",)}
    assert world.plan() is None


def test_the_own_cluster_is_nobody_elses() -> None:
    world = ready()
    assert world.env.others == {}
    world.want(record("west"), record("east"))
    assert "west" not in world.env.left_to_others()


def test_an_entry_that_somebody_had_before_our_write_is_no_others_after_it() -> None:
    """What is told late says nothing of what is."""
    world = World()
    world.want(record("north", at=world.now))
    world.do()
    world.now += INTERVAL
    world.force("east")
    world.let_go()
    world.want(record("east", at=world.now), record("north", at=world.now))
    world.begin()
    world.arrive()
    world.answer()
    world.tell(1)
    assert world.env.others == {}
    assert world.plan() is None
    world.tell()
    assert world.disturbances == []
    assert world.plan() is None


def test_a_summary_that_somebody_else_has_written_is_left_out() -> None:
    world = ready()
    world.now += 100.0
    world.server.apply(applied({"federation": {"clusters": 99}}), "rival", force=True)
    world.tell()
    world.want(record("east", 5, world.now), record("north", 6, world.now))
    assert world.do().summary
    refused = world.now
    assert not world.do().summary
    assert world.shows() == {name: each.content for name, each in segments(world.env.records).items()}
    assert world.server.objects[KEY]["status"]["federation"]["clusters"] == 99
    world.let_go()
    world.tell()
    world.now = refused + LEAVE_ALONE
    world.want(record("east", 6, world.now), record("north", 6, world.now))
    assert world.do().summary
    assert world.server.objects[KEY]["status"]["federation"]["clusters"] == 2


@pytest.mark.parametrize(
    "conflict",
    [
        Conflict(None, "", "ops"),
        Conflict(None, ".status.clusters", "ops"),
        Conflict("elsewhere", '.status.clusters[clusterID="elsewhere"].isLocal', "ops"),
        Conflict("west", '.status.clusters[clusterID="west"].isLocal', "ops"),
    ],
)
def test_a_conflict_about_nothing_that_is_written_leaves_the_env_alone(conflict: Conflict) -> None:
    """Else the same would be written again and again."""
    world = ready("east", "north")
    world.now += 100.0
    world.want(record("east", 5, world.now), record("north", 6, world.now))
    write = world.begin()
    world.write = None
    list(world.env.failed(write, world.now, unsure=False, acting=True))
    world.env.conflicted(write, [conflict], world.now)
    assert world.env.stopped == (world.now + LEAVE_ALONE, "ops")
    assert world.do().shown == {}
    assert world.plan() is None


def test_a_conflict_about_the_summary_of_a_write_without_one_leaves_the_env_alone() -> None:
    world = ready()
    world.now += 100.0
    for summary in (True, False):
        world.want(record("east", at=world.now, idle=5 + summary))
        write = world.begin()
        world.write = None
        assert write.summary is summary
        list(world.env.failed(write, world.now, unsure=False, acting=True))
        world.env.conflicted(write, [Conflict(None, ".status.federation.clusters", "ops")], world.now)
        assert (world.env.stopped is None) is summary
        world.now += INTERVAL


# --- answers that are lost, and objects that come and go


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_a_write_without_an_answer_is_no_disturbance_and_is_made_up_for(arrives: bool, held: bool) -> None:
    world = World()
    world.want(record("east", at=world.now), record("north", at=world.now))
    world.begin()
    world.arrive()
    world.answer()
    world.now += INTERVAL
    world.want(record("east", 5, world.now), record("north", at=world.now))
    world.begin()
    if held:
        world.tell()  # of the write before
    if arrives:
        world.arrive()
    world.lose()
    world.tell()
    assert world.disturbances == []
    world.do()
    assert world.shows() == {name: each.content for name, each in segments(world.env.records).items()}
    world.remove("east")
    assert world.tell() == [Disturbance(("east",), "controller", False)], "it is known again what is ours"


def test_what_a_write_without_an_answer_has_done_is_no_disturbance_however_late_it_is_seen() -> None:
    world = ready("east", "north")
    world.now += INTERVAL
    world.want(record("north", at=world.now))
    world.begin()
    world.arrive()
    world.lose()
    world.now += INTERVAL
    world.want(record("east", 2, world.now), record("north", at=world.now))
    world.begin()
    world.arrive()
    world.answer()
    assert world.tell() == []
    assert world.plan() is None


def test_a_write_that_is_done_late_is_known_as_ours() -> None:
    world = World()
    world.want(record("east", at=world.now), record("north", at=world.now))
    write = world.begin()
    world.lose()
    world.server.merge({"idleReplicas": 5})
    world.tell()
    world.server.write(write)
    world.tell()
    assert world.disturbances == []
    assert world.env.others == {}
    world.want(record("east", at=world.now))
    world.do()
    assert world.shows().keys() == {"east"}


@pytest.mark.parametrize("told", [False, True])
def test_a_write_that_comes_to_another_object_of_the_same_name_is_known_as_ours(told: bool) -> None:
    world = ready("east")
    world.now += INTERVAL
    world.want(record("east", 2, world.now), record("north", at=world.now))
    world.begin()
    world.server.delete()
    world.server.create()
    if told:
        world.tell()
    world.arrive()
    world.answer()
    world.tell()
    assert world.disturbances == []
    assert world.env.others == {}
    world.want(record("north", 5, world.now))
    world.do()
    assert world.shows().keys() == {"north"}
    assert world.plan() is None


def test_an_object_that_was_made_anew_is_no_disturbance_and_is_written() -> None:
    """Of a list it can be told only by its uid."""
    world = ready()
    for _ in range(3):
        world.server.delete()
        world.server.create()
        world.list_anew()
        assert world.disturbances == []
        plan = world.plan()
        assert plan is not None
        assert plan.earliest <= world.now
        world.do()
        assert world.shows().keys() == {"east", "north"}


def test_nothing_of_an_object_that_is_gone_counts_for_the_next_one() -> None:
    world = ready()
    world.remove()
    world.tell()
    world.remove("west")
    world.server.delete()
    world.tell()
    world.server.create()
    world.tell()
    world.do()
    world.remove()
    assert world.tell() == [Disturbance(("east", "north"), "controller", False)]


def test_a_refusal_that_was_meant_for_an_object_that_is_gone_says_nothing_of_the_next_one() -> None:
    world = ready()
    world.now += 100.0
    world.force("east")
    world.tell()
    world.want(record("east", 5, world.now), record("north", at=world.now))
    world.begin()
    world.arrive()
    world.server.delete()
    world.server.create()
    world.tell()
    world.answer()
    assert world.env.left_to_others() == {}
    assert world.do().shown.keys() == {"east", "north"}


def test_of_very_many_states_during_one_write_the_last_ones_are_kept() -> None:
    world = ready()
    world.now += INTERVAL
    world.want(record("east", 5, world.now), record("north", at=world.now))
    world.begin()
    for _ in range(40):
        world.server.merge({"idleReplicas": len(world.server.history)})
    world.remove("east")
    world.arrive()
    world.tell()
    assert len(world.env._held) <= 32
    world.answer()
    world.tell()
    assert world.disturbances == [Disturbance(("east",), "controller", False)]
    assert world.plan() is None


def test_versions_that_are_no_numbers() -> None:
    """Then each is taken for a newer one, and what comes late for somebody's doing; but it goes on."""
    world = ready("east")
    odd = world.server.seen()
    for version in ("x1", "", "1" * 40, "-5", "²"):
        metadata = type(odd.metadata)(resourceVersion=version, managed_fields=odd.metadata.managed_fields)
        assert list(world.env.observed(Env(metadata, odd.status), world.now, acting=True)) == []
    assert world.plan() is None


# --- other agents


def elsewhere(world: World, *records: Capacity) -> None:
    """Another agent of this cluster writes what it knows."""
    now = world.now
    world.server.write(Write(KEY, now, 0, segments(records), True))


def test_an_agent_that_stands_by_takes_what_is_there_as_it_is() -> None:
    world = World()
    world.acting = False
    elsewhere(world, record("east", at=world.now))
    world.list_anew()
    world.now += 1.0
    elsewhere(world, record("east", 5, world.now), record("north", at=world.now))
    assert [each.party for each in world.tell()] == [FIELD_MANAGER]
    world.server.merge({"clusters": [{"clusterID": "west", "isLocal": True}], "federation": None})
    assert world.tell() == [], "that was not an agent"
    elsewhere(world, record("north", at=world.now))
    world.tell()
    world.want(record("north", at=world.now))
    assert world.plan() == Plan(0, world.now + REFRESH)
    world.acting = True
    world.want(record("east", at=world.now), record("north", at=world.now))
    world.do()
    assert world.shows().keys() == {"east", "north"}
    assert world.env.stopped is None


def test_an_agent_that_stood_by_is_not_misled_by_what_comes_late() -> None:
    world = World()
    world.want(record("east", at=world.now))
    world.server.merge({"idleReplicas": 1})
    world.begin()
    world.arrive()
    world.answer()
    world.acting = False
    world.tell(1)
    world.acting = True
    world.tell()
    assert world.disturbances == []


@pytest.mark.parametrize("more", [False, True])
def test_an_agent_that_writes_notices_another_one_that_does(more: bool) -> None:
    """By the time of what is applied as us; the controller beside it has nothing to do with that."""
    world = ready("east")
    world.now += 10.0
    elsewhere(world, record("east", 5, world.now), *([record("north", at=world.now)] if more else []))
    (told,) = world.tell()
    assert told.party == FIELD_MANAGER
    assert told.clusters == ("east",)
    assert world.env.others == {}
    world.want(record("east", at=world.now))
    world.do()
    assert world.shows().keys() == {"east"}


def test_an_agent_that_writes_notices_another_one_that_knows_more() -> None:
    world = ready("east")
    east = world.env.records
    world.now += 10.0
    elsewhere(world, *east, record("north", at=world.now))
    (told,) = world.tell()
    assert told.party == FIELD_MANAGER
    assert world.env.others == {}
    assert world.do().shown.keys() == {"east"}
    assert world.shows().keys() == {"east"}


def test_what_another_agent_has_left_there_is_taken_away() -> None:
    world = ready("east")
    world.want()
    world.do()
    world.now += 10.0
    elsewhere(world, record("east", at=world.now))
    world.tell()
    world.remove("east")
    world.tell()
    plan = world.plan()
    assert plan is not None
    assert plan.weight == 1, "a summary is left"
    world.do()
    assert "federation" not in world.server.objects[KEY]["status"]


def test_who_takes_away_what_another_agent_has_written_is_no_agent() -> None:
    world = ready("east")
    world.now += 10.0
    elsewhere(world, record("east", 5, world.now))
    assert [each.party for each in world.tell()] == [FIELD_MANAGER]
    world.remove("east")
    assert [each.party for each in world.tell()] == ["controller"]


def test_who_takes_away_everything_is_no_agent() -> None:
    world = ready("east")
    world.server.merge({"clusters": [{"clusterID": "west", "isLocal": True}], "federation": None})
    assert [each.party for each in world.tell()] == ["controller"]


def test_nobody_else_is_taken_for_another_agent() -> None:
    world = ready()
    world.now += 10.0
    world.rewrite("east", manager="ops")
    assert [each.party for each in world.tell()] == ["ops"]
    world.now += 100.0
    world.remove("north", manager="controller")
    assert [each.party for each in world.tell()] == ["ops"], "who owns the list, with the newest time"


@pytest.mark.parametrize("members", [Misfit("7"), [Misfit("null")], [Member(name=Misfit("[]"))]])  # type: ignore[arg-type]
def test_pools_that_cannot_be_read_are_a_change_like_any_other(members: Any) -> None:
    """Of an entry that is ours alone, as no definition with keys lets it become."""
    world = World()
    world.want(record("east", 3))
    world.do()
    seen = world.server.seen()
    assert seen is not None
    assert seen.status is not None
    odd = [
        replace(entry, observed_members=members) if entry.cluster_id == "east" else entry
        for entry in seen.status.clusters or ()
    ]
    metadata = replace(seen.metadata, resourceVersion=str(int(seen.metadata.resourceVersion) + 1))
    before = len(world.disturbances)
    world.see(replace(seen, metadata=metadata, status=replace(seen.status, clusters=odd)))
    assert [each.clusters for each in world.disturbances[before:]] == [("east",)]

"""What must hold in a federation at every moment, as checkers that a test switches on: `simulated_federation(...,
invariants=every_invariant())`. They compare what registries and routers answer with what the sources really said, which
the `ledger` keeps by Trio's time. What is true, and how a registry is looked at, is decided there; here is what may
never be.

A checker costs time in what changes: a registry is looked at when something in it has changed, or should have, and
otherwise every five seconds.

Three things are allowed for, each of them here only, so that it can be taken back where it becomes untrue:

- ages travel in whole milliseconds, rounded down at each of two hops (`ROUNDING`);
- of the time for which the network has a record, delayed or held, its age tells all but what no receiver can know: what
  the quickest of its sender's messages took, once the opening of the connection does not count any more, and what was
  forgotten of that since then (`waits.py`). How much that is follows from what was done to the network
  (`Route.longest_wait`);
- what an agent has left behind that died without a word is known until it is as old as the TTL.

A cluster of the simulation is its agents and their sources. A test that speaks for such a cluster in another way, say
over `Simulation.connection`, makes something known that no source has said, and that counts as broken."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import trio

from trio_federation.capacity import Capacity, Change, Identity
from trio_federation.registry import in_group
from trio_federation.reporter import DEBOUNCE
from trio_federation.retry import LONGEST
from trio_federation.router import Router
from trio_federation.testing.ledger import Fact, History, Ledger, Observer, Statement, Told, Value, View, value_of
from trio_federation.testing.ways import SPARE, Ways, processes_of, speaker_of
from trio_federation.wire import AT_ONCE

if TYPE_CHECKING:
    from trio_federation.testing.clusters import AgentProcess, SimulatedCluster
    from trio_federation.testing.simulation import Simulation

#: Seconds by which a record may look younger than it is: an age loses up to a millisecond at each of two hops, and a
#: microsecond is forgiven to the arithmetic of clocks.
ROUNDING = 0.002 + 1e-6
#: Seconds by which two moments on one clock may differ and be the same.
_SAME = 1e-6


class InvariantBroken(AssertionError):
    """What must always hold did not: at what moment, where, and what was found."""


class Invariant:
    """One thing that must always hold. Every method raises InvariantBroken where it does not."""

    #: the simulation that it is about
    federation: Simulation

    def started(self, federation: Simulation) -> None:
        """The federation that it is about; called once, before anything else."""
        self.federation = federation

    def said(self, process: AgentProcess, statement: Statement) -> None:
        """A source of an agent has said something; the ledger has it already."""

    def applied(self, process: AgentProcess, changes: Sequence[Change], news: Sequence[tuple[str, str, str]]) -> None:
        """The registry of a process was told of these changes, some of them perhaps as no news. `news`: the cluster,
        namespace and env of those that say something that it was not told before. The ledger has them already."""

    def look(self) -> None:
        """Called every `check_every` seconds of virtual time, and once at the end. What there is to look at is in
        `self.ledger.views`."""

    # What checkers share.

    @property
    def ledger(self) -> Ledger:
        """What is true."""
        ledger = self.federation.ledger
        assert ledger is not None, "a simulation with invariants keeps a ledger"
        return ledger

    def broken(self, observer: Observer | SimulatedCluster, found: str) -> InvariantBroken:
        """What to raise: one line, which begins with the moment, this checker, and the registry it is about."""
        cluster = observer.cluster if isinstance(observer, Observer) else observer
        moment = trio.current_time() - self.federation.began
        return InvariantBroken(f"at {moment:.3f} s: {type(self).__name__}: the registry of {cluster.name}: {found}")

    def ago(self, moment: float) -> str:
        """A moment of Trio's time, for people."""
        return f"{moment - self.federation.began:.3f} s"


def every_invariant() -> list[Invariant]:
    """A new one of every checker there is, for one simulated federation."""
    return [kind() for kind in ALL_INVARIANTS]


class NothingOutlivesItsTtl(Invariant):
    """No record past its TTL is ever returned: by no query of a registry, and among no candidates of a router. By the
    cluster's own clock; and by Trio's, counted from when the source has vouched for the record last."""

    def look(self) -> None:
        """Look at every registry that is due."""
        for view in self.ledger.views:
            self._fresh(view, "snapshot()", view.records)
            for record in view.records:
                self._young_enough(view, record)
            registry = view.observer.process.agent.registry
            for records in registry.by_env():
                self._fresh(view, "by_env()", records)
            for namespace, env_name in view.envs:
                self._env(view, namespace, env_name)

    def _env(self, view: View, namespace: str, env_name: str) -> None:
        agent = view.observer.process.agent
        registry = agent.registry
        self._fresh(view, f"records({namespace}/{env_name})", registry.records(namespace, env_name))
        self._fresh(view, f"foreign_members({namespace}/{env_name})", registry.foreign_members(namespace, env_name))
        shown = [each for each in view.records if (each.namespace, each.env_name) == (namespace, env_name)]
        local = in_group([each for each in shown if each.cluster_id == registry.local_cluster_id], "")
        if registry.local_idle(namespace, env_name) > (fresh := sum(each.idle for each in local)):
            idle = registry.local_idle(namespace, env_name)
            raise self.broken(view.observer, f"local_idle({namespace}/{env_name}) is {idle}, and {fresh} of it fresh")
        targets = {f"{each.cluster_id}::{each.member_pool}" for each in shown}
        best = registry.best_foreign_member(namespace, env_name)
        if best is not None and best.target not in targets:
            what = f"best_foreign_member({namespace}/{env_name}) is {best.target}, of which nothing fresh is known"
            raise self.broken(view.observer, what)
        # A router of its own, so that nothing is drawn from the agent's generator.
        router: Router = type(agent.router)(registry, random=random.Random(0))
        for candidate in router.place(namespace, env_name, reserve=False).candidates:
            if candidate.target not in targets or candidate.age > self._ttl + _SAME:
                what = f"a candidate of {namespace}/{env_name} is {candidate.target}, {candidate.age:.3f} s old"
                raise self.broken(view.observer, f"{what}, and the TTL is {self._ttl:g} s")

    @property
    def _ttl(self) -> float:
        return self.federation.settings.ttl

    def _fresh(self, view: View, query: str, records: Iterable[Capacity]) -> None:
        for record in records:
            age = math.inf if record.observed_at is None else view.own_now - record.observed_at
            if age > self._ttl + _SAME:
                what = f"{query} has {_name(record)}, {age:.3f} s old by its own clock, and the TTL is {self._ttl:g} s"
                raise self.broken(view.observer, what)

    def _young_enough(self, view: View, record: Capacity) -> None:
        if not self.ledger.knows(record.cluster_id):
            return
        _, true_at = self.ledger.vouched(record)
        if true_at is None:
            return  # which is AgesNeverShrink's to tell
        instance = None if record.origin is None else record.origin.instance
        allowed = _allowed(view.observer.told_by.get((record.identity, instance)))
        if view.now - true_at > self._ttl + allowed:
            raise self.broken(
                view.observer,
                f"snapshot() has {_name(record)}, for which its source has vouched last at {self.ago(true_at)}, "
                f"{view.now - true_at:.3f} s ago; the TTL is {self._ttl:g} s, and {allowed:.3f} s are allowed for",
            )


class NothingCountsTwice(Invariant):
    """Each record stands once in a registry; where there are members of a cluster's env, no aggregate row of it does;
    and what a registry has of a cluster's env, and so every sum of it, is what the sources of that cluster have said at
    one moment.

    Each agent process is taken by itself: what one has left behind that died without a word stands beside what the next
    one says, until it is as old as the TTL. Of that the last rule says nothing: hubs have lost the part of it that the
    next one has said anew, and tell the rest. What expires record by record may do so. A statement of more than 1,000
    records travels in several messages, so that of its agent the last rule is not checked; nor is it for clusters with
    filters, whose records are not what the sources say."""

    def started(self, federation: Simulation) -> None:
        """Remember it."""
        super().started(federation)
        self.ways = Ways(federation)

    def applied(self, process: AgentProcess, changes: Sequence[Change], news: Sequence[tuple[str, str, str]]) -> None:
        """Look at what has changed."""
        if not news or not process.is_running:
            return
        observer = self.ledger.observer(process)
        if len(observer.told) > AT_ONCE:  # which may come in parts, so that only what has settled can be checked
            return
        for cluster_id, namespace, env_name in news:
            records = process.agent.registry.records(namespace, env_name)
            self._together(observer, [record for record in records if record.cluster_id == cluster_id])

    def look(self) -> None:
        """Look at every registry that is due."""
        for view in self.ledger.views:
            self._once(view)
            envs: dict[tuple[str, str, str], list[Capacity]] = {}
            for record in view.records:
                envs.setdefault((record.cluster_id, record.namespace, record.env_name), []).append(record)
            for records in envs.values():
                self._shadowed(view, records)
                self._together(view.observer, records)
            for namespace, env_name in view.envs:
                self._queries(view, namespace, env_name)

    def _once(self, view: View) -> None:
        for one, other in pairwise(view.records):
            if one.sort_key >= other.sort_key:
                what = f"snapshot() has {_name(one)} before {_name(other)}: twice, or not in order"
                raise self.broken(view.observer, what)
        registry = view.observer.process.agent.registry
        seen: dict[Identity, None] = {}
        for records in registry.by_env():
            for record in records:
                if record.identity in seen:
                    raise self.broken(view.observer, f"by_env() has {_name(record)} twice")
                seen[record.identity] = None
        if len(seen) != len(view.records):
            what = f"by_env() has {len(seen)} records, and snapshot() {len(view.records)}"
            raise self.broken(view.observer, what)

    def _shadowed(self, view: View, records: Sequence[Capacity]) -> None:
        member = next((record for record in records if record.member_pool), None)
        aggregate = next((record for record in records if not record.member_pool), None)
        if member is not None and aggregate is not None:
            what = f"snapshot() has the aggregate {_name(aggregate)} beside the member {_name(member)}"
            raise self.broken(view.observer, what)

    def _queries(self, view: View, namespace: str, env_name: str) -> None:
        registry = view.observer.process.agent.registry
        shown = [each for each in view.records if (each.namespace, each.env_name) == (namespace, env_name)]
        foreign = registry.foreign_members(namespace, env_name)
        if foreign != [each for each in shown if each.cluster_id != registry.local_cluster_id]:
            what = (
                f"foreign_members({namespace}/{env_name}) has {len(foreign)} records, which are not those of snapshot()"
            )
            raise self.broken(view.observer, what)
        local = in_group([each for each in shown if each.cluster_id == registry.local_cluster_id], "")
        idle, wanted = registry.local_idle(namespace, env_name), sum(each.idle for each in local)
        if idle != wanted:
            what = f"local_idle({namespace}/{env_name}) is {idle}, and the sum over its members is {wanted}"
            raise self.broken(view.observer, what)

    def _together(self, observer: Observer, records: Sequence[Capacity]) -> None:
        """Records of one cluster and env."""
        by_instance: dict[str, list[Capacity]] = {}
        has_members = any(record.member_pool for record in records)
        for record in records:
            if record.origin is not None:
                by_instance.setdefault(record.origin.instance, []).append(record)
        for instance, found in by_instance.items():
            history = self.ledger.histories.get(instance)
            if history is None or history.largest > AT_ONCE or self._was_followed(history):
                continue
            if _tells_all(history, observer):
                self._said_together(observer, history, found, has_members)

    def _was_followed(self, history: History) -> bool:
        """Whether an agent has ended, and another one speaks for its cluster."""
        process = history.process
        return not process.is_running and any(
            other.began_at > process.began_at for other in processes_of(self.federation, process.cluster.cluster_id)
        )

    def _said_together(
        self, observer: Observer, history: History, records: Sequence[Capacity], has_members: bool
    ) -> None:
        seen = {each.identity: value_of(each) for each in records if each.identity not in history.contested}
        # What is missing is told apart only where nothing may be: else the hub may have forgotten it, or hide it.
        within = _within(self.ways, history, observer)
        excess = _excess(self.ways, history, observer)
        strict = self._hears(observer, history, within)
        now, ttl = observer.cluster.clock(), self.federation.settings.ttl

        def may_be_missing(identity: Identity) -> bool:
            if not strict or identity in history.contested or (len(identity) == 5 and has_members):
                return True
            if identity[0] != observer.cluster.cluster_id:
                told = observer.told.get(identity)
                if told is not None and now - told.observed_at > ttl:
                    return True
            if (fact := history.facts.get(identity)) is not None:
                return not must_be_there(observer, fact, within, excess)
            gone = history.gone.get(identity)
            return gone is None or trio.current_time() - gone.true_at + excess > ttl - ROUNDING

        env = history.envs.get((records[0].namespace, records[0].env_name))
        if env is None or not env.was_ever(seen, may_be_missing):
            shown = ", ".join(f"{_name(each)} {_shown(value_of(each))}" for each in records)
            now_said = {} if env is None else env.now
            said = ", ".join(f"{'/'.join(each)} {_shown(value)}" for each, value in now_said.items()) or "nothing"
            what = f"it has {shown}, which the sources of {history.cluster.name} have never said at one moment"
            raise self.broken(observer, f"{what}; now they say {said}")

    def _hears(self, observer: Observer, history: History, within: float) -> bool:
        """Whether everything that an agent says reaches a registry, and nobody else speaks for that cluster."""
        process = history.process
        if process is observer.process:
            return True
        if speaker_of(self.federation, process.cluster.cluster_id) is not process or process.stopping_at < math.inf:
            return False
        return trio.current_time() > self.ways.ready_at(process, observer.process) + within


class AgesNeverShrink(Invariant):
    """What is known of a cluster of the simulation, its sources have said. A record is never younger than it is: its
    moment is no later than the one at which its source has vouched for it, but for rounding and for what nobody can
    know of the time that the network had it. And within one registry the same sample never gets younger.

    `rounding`: seconds by which a record may look younger than it is where the network takes no time."""

    def __init__(self, *, rounding: float = ROUNDING) -> None:
        self.rounding = rounding

    def applied(self, process: AgentProcess, changes: Sequence[Change], news: Sequence[tuple[str, str, str]]) -> None:
        """Look at what has come in."""
        observer, ledger = self.ledger.observer(process), self.ledger
        knows: dict[str, bool] = {}
        for change in changes:
            if not isinstance(change, Capacity) or change.observed_at is None:
                continue
            cluster_id = change.cluster_id
            if cluster_id not in knows:
                knows[cluster_id] = ledger.knows(cluster_id)
            if not knows[cluster_id]:
                continue
            history, true_at = ledger.vouched(change)
            claimed = change.observed_at - observer.cluster.clock_offset
            if true_at is None:
                raise self.broken(observer, f"it was told {_said(change)}, which no source of {cluster_id} has said")
            if cluster_id == observer.cluster.cluster_id:
                self._own(observer, change, claimed)
                continue
            allowed = _allowed(observer.told.get(change.identity), self.rounding)
            if claimed > true_at + allowed:
                raise self.broken(
                    observer,
                    f"it was told {_said(change)} of {self.ago(claimed)}, {claimed - true_at:.3f} s later than its "
                    f"source has vouched for it, {self.ago(true_at)}; {allowed:.3f} s are allowed for",
                )
            if history is not None and _tells_all(history, observer):
                latest = history.latest.get(change.identity, {}).get(value_of(change))
                if latest is None or claimed > latest + allowed:
                    raise self.broken(
                        observer,
                        f"it was told {_said(change)} of {self.ago(claimed)}, and its sources have said so last of "
                        f"{'no moment' if latest is None else self.ago(latest)}",
                    )

    def look(self) -> None:
        """Look at every registry that is due."""
        for view in self.ledger.views:
            for record in view.records:
                before = view.before.get(record.identity)
                if before is None or before.observed_at is None or record.observed_at is None:
                    continue
                younger = record.observed_at - before.observed_at
                if younger <= _SAME or not _same_sample(before, record):
                    continue
                if not self._may_come_back(view, before, record):
                    what = f"snapshot() has {_said(record)}, which has become {younger:.3f} s younger"
                    raise self.broken(view.observer, what)

    def _may_come_back(self, view: View, before: Capacity, record: Capacity) -> bool:
        """Whether a sample may be younger than it was shown before. Not as long as that one is fresh; once it has run
        out, a copy that came another way is as new, which may have looked older than it is by less."""
        assert before.observed_at is not None
        assert record.observed_at is not None
        _, true_at = self.ledger.vouched(record)
        if true_at is None or view.own_now - before.observed_at <= self.federation.settings.ttl:
            return False
        instance = None if record.origin is None else record.origin.instance
        allowed = _allowed(view.observer.told_by.get((record.identity, instance)), self.rounding)
        return record.observed_at - view.observer.cluster.clock_offset <= true_at + allowed

    def _own(self, observer: Observer, record: Capacity, claimed: float) -> None:
        """What an agent makes of what its own sources say."""
        history = self.ledger.history(observer.process)
        latest = history.latest.get(record.identity, {}).get(value_of(record))
        if latest is None or claimed > latest + _SAME:
            when = "never" if latest is None else f"last of {self.ago(latest)}"
            what = f"it has taken in {_said(record)} of {self.ago(claimed)}, which its own sources have said {when}"
            raise self.broken(observer, what)


class TruthIsEverywhere(Invariant):
    """What the sources of a live cluster say is in every live registry, and what they no longer say is in none.

    Live is who runs, while a hub is up to which there is a healthy way from both sides; and nothing of that was
    disturbed for a while. In seconds, on top of the time that the network takes each way:

    `news`: from what a source says to every live registry. By default the reporter's debounce: changes are sent that
    much after the first of them, and relayed at once.
    `healing`: from the last disturbance to where `news` holds again. By default the longest backoff: everybody has
    connected again by then, and a reporter that connects tells everything, as a hub does to a watcher that connects.

    Longer than that takes an agent that follows on one of the same cluster which has died without a word: hubs let it
    in when that one was silent for the silence limit, and registries may take its word for no better than that
    one's until then, and after that until the next resync. What dies without a word is gone with the TTL, which is
    NothingOutlivesItsTtl's business; what has stopped cleanly is gone once it has stopped.

    A record that its source does not vouch for often enough to keep it fresh may be missing. Clusters are left out that
    have filters, another credential, or several agents at once: there is more than one truth then."""

    def __init__(self, *, news: float = DEBOUNCE, healing: float = LONGEST) -> None:
        self.news = news
        self.healing = healing

    def started(self, federation: Simulation) -> None:
        """Remember it."""
        super().started(federation)
        self.ways = Ways(federation, healing=self.healing)

    def said(self, process: AgentProcess, statement: Statement) -> None:
        """See to it that all look when the news must have arrived, also those of who has just been started."""
        now = trio.current_time()
        if now in (self.ledger.history(process).news_at, process.began_at):
            self.ledger.look_again(now + self.news + SPARE)

    def look(self) -> None:
        """Look at every registry that is due."""
        cluster_ids = dict.fromkeys(each.cluster_id for each in self.federation.clusters.values())
        speakers = [speaker_of(self.federation, cluster_id) for cluster_id in cluster_ids]
        for view in self.ledger.views:
            by_cluster: dict[str, list[Capacity]] = {}
            for record in view.records:
                by_cluster.setdefault(record.cluster_id, []).append(record)
            for process in speakers:
                if process is None:
                    continue
                history, known = self.ledger.history(process), by_cluster.get(process.cluster.cluster_id, [])
                if process is view.observer.process:
                    if history.said_at < view.now:  # else it may be about to hear of it
                        self._compare(view, history, known, -math.inf, 0.0)
                elif process.cluster.cluster_id != view.observer.cluster.cluster_id:
                    self._foreign(view, history, known)

    def _foreign(self, view: View, history: History, known: Sequence[Capacity]) -> None:
        process, observer = history.process, view.observer.process
        if not _tells_all(history, view.observer):
            return
        if process.stopping_at == math.inf:
            within = _within(self.ways, history, view.observer, self.news)
            due_at = self.ways.ready_at(process, observer) + within
            if view.now > due_at:
                self._compare(view, history, known, due_at - within, within)
            elif due_at < math.inf:
                self.ledger.look_again(due_at)
        elif known and not process.was_killed:
            heard_at = self.ways.goodbye_heard_at(process, observer)
            if view.now <= heard_at < math.inf:
                self.ledger.look_again(heard_at)
            left = next(
                (each for each in known if each.origin and each.origin.instance == process.agent.instance), None
            )
            if left is not None and view.now > heard_at:
                what = f"it has {_said(left)}, and the agent of {history.cluster.name} has stopped cleanly at"
                raise self.broken(view.observer, f"{what} {self.ago(process.stopping_at)}")

    def _compare(self, view: View, history: History, known: Sequence[Capacity], ready_at: float, within: float) -> None:
        """Hold what a registry has of one cluster against what is true of it, as far as that must have come there:
        what was so for `within` seconds, on a way that was ready since `ready_at`."""
        instance, name, now = history.process.agent.instance, history.cluster.name, view.now
        excess = _excess(self.ways, history, view.observer)
        right: dict[Identity, None] = {}
        for record in known:
            identity, value = record.identity, value_of(record)
            if identity in history.contested:
                continue
            fact = history.facts.get(identity)
            if fact is not None and fact.value == value:
                right[identity] = None
            elif fact is not None:
                since = max(fact.since, ready_at)
                if now > since + within and must_be_there(view.observer, fact, within, excess):
                    what = f"it has {_said(record)}, and {name} says {_shown(fact.value)} since {self.ago(fact.since)}"
                    raise self.broken(view.observer, f"{what}, {self._way(ready_at)}")
            elif record.origin is None or record.origin.instance == instance:
                gone = history.gone.get(identity)
                if gone is None or now > max(gone.at, ready_at) + within:
                    when = "never had" if gone is None else f"has no longer since {self.ago(gone.at)}"
                    what = f"it has {_said(record)}, which {name} {when}"
                    raise self.broken(view.observer, f"{what}, {self._way(ready_at)}")
        if len(right) == len(history.facts):
            return
        # By any of its agents: what one has left behind that died shadows the rows of the next one, too.
        envs_with_members = {each[1:3]: None for each in history.facts if len(each) == 4}
        envs_with_members |= {(each.namespace, each.env_name): None for each in known if each.member_pool}
        for identity, fact in history.facts.items():
            if identity in right or identity in history.contested or now <= max(fact.since, ready_at) + within:
                continue
            if len(identity) == 5:
                # An aggregate row that members shadow, or did until lately.
                changed_at = history.envs[identity[1], identity[2]].changed_at
                if identity[1:3] in envs_with_members or now <= changed_at + within:
                    continue
            if must_be_there(view.observer, fact, within, excess):
                what = f"it lacks {'/'.join(identity)} {_shown(fact.value)}, which {name} says since"
                raise self.broken(view.observer, f"{what} {self.ago(fact.since)}, {self._way(ready_at)}")

    def _way(self, ready_at: float) -> str:
        return f"on a way that was ready at {self.ago(ready_at)}"


ALL_INVARIANTS: tuple[type[Invariant], ...] = (
    NothingOutlivesItsTtl,
    NothingCountsTwice,
    AgesNeverShrink,
    TruthIsEverywhere,
)


def _allowed(told: Told | None, rounding: float = ROUNDING) -> float:
    """Seconds by which a record that a registry was told may look younger than it is; None: its own."""
    return rounding if told is None else rounding + told.uncounted


def must_be_there(observer: Observer, fact: Fact, within: float, excess: float = 0.0) -> bool:
    """Whether what the sources of an agent say must be fresh in a registry, where news take so many seconds; 0.0: in
    their agent's own. It is as old there as it was when they said so first, or when the last resync was due. `excess`:
    seconds by which it may look older than it is."""
    if observer.clock_jumped:
        return False  # what it has is older to it than it is
    settings, now = observer.cluster.simulation.settings, trio.current_time()
    told_by = now - (settings.resync_interval + within if within else _SAME)
    if within and now > fact.since + within:
        told_by = max(told_by, fact.since)
    true_at = next((each.true_at for each in reversed(fact.vouched) if each.said_at <= told_by), -math.inf)
    return now - true_at + excess < settings.ttl - ROUNDING


def _within(ways: Ways, history: History, observer: Observer, news: float = DEBOUNCE) -> float:
    """Seconds after which a registry knows what the sources of an agent say, on a way that is ready."""
    if history.process is observer.process:
        return 0.0
    return news + ways.transit(history.process, observer.process) + SPARE


def _excess(ways: Ways, history: History, observer: Observer) -> float:
    """Seconds by which what the sources of an agent say may look older to a registry than it is."""
    return 0.0 if history.process is observer.process else ways.excess(history.process, observer.process)


def _same_sample(one: Capacity, other: Capacity) -> bool:
    if one.origin is None or other.origin is None:
        return False
    return (one.origin.instance, one.origin.seq) == (other.origin.instance, other.origin.seq)


def _tells_all(history: History, observer: Observer) -> bool:
    """Whether others are told what the sources of a cluster say, and not what filters make of it."""
    cluster = history.cluster
    return observer.cluster.cluster_id == cluster.cluster_id or not cluster.has_filters


def _name(record: Capacity) -> str:
    return "/".join(record.identity)


def _said(record: Capacity) -> str:
    origin = "" if record.origin is None else f" (number {record.origin.seq} of {record.origin.instance[:8]})"
    return f"{_name(record)} {_shown(value_of(record))}{origin}"


def _shown(value: Value) -> str:
    group, idle, running, pending, desired, autoscaling, capacity, state, saturated = value
    more = [
        f"{name} {found}"
        for name, found in (("running", running), ("pending", pending), ("desired", desired), ("headroom", capacity))
        if found
    ]
    words = [*([f"group {group}"] if group else []), *more, *([state] if state else [])]
    words += [*(["grows"] if autoscaling else []), *(["saturated"] if saturated else [])]
    return f"[{', '.join([f'idle {idle}', *words])}]"

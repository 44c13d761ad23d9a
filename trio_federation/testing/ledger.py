"""What is true in a simulated federation: what the sources of every agent have said and when, by Trio's time, which no
clock of a cluster and no network changes; what each registry was told; and which registry is due for a look. Kept for
the invariants, which compare it with what registries answer (`invariants.py`). Nothing here judges, and nothing of the
agents' own rules is used but what a valid record is."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import trio

from trio_federation.capacity import Capacity, Change, Identity, Origin, Withdrawal, fault
from trio_federation.local import withdrawal_fault

if TYPE_CHECKING:
    from trio_federation.testing.clusters import AgentProcess, SimulatedCluster
    from trio_federation.testing.network import Direction, Route
    from trio_federation.testing.simulation import Simulation

#: Seconds between two looks at a registry of which nothing new is known.
_PATROL = 5.0
#: Samples of one record whose moments are remembered before the first are looked at to be forgotten.
_MANY = 64

#: What a record says, without when: two samples with the same value say the same. How long a saturation still lasts is
#: left out, as it runs down by itself.
Value: TypeAlias = tuple[str, int, int, int, int, bool, int, str, bool]


def value_of(record: Capacity) -> Value:
    """What a record says."""
    return (
        record.scaling_group,
        record.idle,
        record.running,
        record.pending,
        record.desired,
        record.autoscaling_enabled,
        record.capacity,
        record.state,
        record.saturated_for > 0,
    )


class Statement(NamedTuple):
    """What a source has said once; nothing of it was checked yet."""

    source: str
    #: Trio's time at which the agent has called it, or it has pushed
    called_at: float
    #: Trio's time for which it speaks: at which the call has reached it, or it has pushed
    at: float
    changes: Sequence[Change]
    #: whether this is all that it has: what is missing is gone
    whole: bool = True
    #: namespaces of which it says nothing
    unknown: Collection[str] = ()


class Vouched(NamedTuple):
    """A moment at which a source has vouched for a record, and when it said so (Trio's time)."""

    said_at: float
    true_at: float


@dataclass(slots=True)
class Fact:
    """What the sources of an agent say of one record, as long as they do."""

    value: Value
    #: Trio's time since which they have said so
    since: float
    #: when they have vouched for the record, the latest last, as far as that can still matter
    vouched: deque[Vouched]


class Gone(NamedTuple):
    """The end of a record: when its sources said so, and when they had vouched for it last (Trio's time)."""

    at: float
    true_at: float


class _Env:
    """What the sources of one agent say of one env, and what they said before."""

    __slots__ = ("before", "now")

    def __init__(self) -> None:
        self.now: dict[Identity, Value] = {}
        #: the latest last: a moment, and the values that were changed then, as they were before; None: not there
        self.before: deque[tuple[float, list[tuple[Identity, Value | None]]]] = deque()

    @property
    def changed_at(self) -> float:
        """Trio's time at which they said something new of it last."""
        return self.before[-1][0] if self.before else -math.inf

    def was_ever(self, seen: Mapping[Identity, Value], may_be_missing: Callable[[Identity], bool]) -> bool:
        """Whether there was a moment at which they said just that, but for records that may be missing."""

        def agrees(identity: Identity, value: Value | None) -> bool:
            if (found := seen.get(identity)) is None:
                return value is None or may_be_missing(identity)
            return value == found

        wrong = {identity: None for identity, value in self.now.items() if not agrees(identity, value)}
        wrong.update((identity, None) for identity in seen if identity not in self.now)
        for _, changed in reversed(self.before):
            if not wrong:
                return True
            for identity, value in changed:
                if agrees(identity, value):
                    wrong.pop(identity, None)
                else:
                    wrong[identity] = None
        return not wrong


class History:
    """What the sources of one agent process have said, and which samples it has made of it."""

    def __init__(self, process: AgentProcess, remembered: float) -> None:
        self.process = process
        #: what they say now
        self.facts: dict[Identity, Fact] = {}
        #: records that they no longer have
        self.gone: dict[Identity, Gone] = {}
        #: records that two sources have claimed, which agents refuse to one of them
        self.contested: dict[Identity, None] = {}
        #: by record and what it said: the latest moment at which a source has vouched for just that
        self.latest: dict[Identity, dict[Value, float]] = {}
        #: by record and the agent's own number of the sample: the moment for which the sample stands
        self.samples: dict[Identity, dict[int, float]] = {}
        #: by namespace and env
        self.envs: dict[tuple[str, str], _Env] = {}
        #: Trio's time of the last statement, and of the last that has said anything new
        self.said_at = self.news_at = -math.inf
        #: the most records that a statement had; large ones travel in several messages
        self.largest = 0
        self._remembered = remembered
        #: by source: what it says, and what it has pushed and when
        self._said: dict[str, dict[Identity, None]] = {}
        self._pushed: dict[str, dict[Identity, float]] = {}

    @property
    def cluster(self) -> SimulatedCluster:
        """Whose sources these are."""
        return self.process.cluster

    def say(self, statement: Statement) -> None:
        """Take a statement in."""
        now = self.said_at = trio.current_time()
        source = statement.source
        said = self._said.setdefault(source, {})
        pushed = self._pushed.setdefault(source, {})
        self.largest = max(self.largest, len(statement.changes))
        news: dict[Identity, Value | None] = {}
        heard: dict[Identity, Change] = {}
        for change in statement.changes:
            # Of several words on one identity a collect's first counts, and the last of a push.
            if self._is_valid(change, statement.whole) and (not statement.whole or change.identity not in heard):
                heard[change.identity] = change
        for identity, change in heard.items():
            if not statement.whole:
                pushed[identity] = statement.at
            elif pushed.get(identity, -math.inf) > statement.called_at:
                continue  # what it has pushed while it was asked is newer
            if isinstance(change, Capacity):
                self._vouch(source, identity, change, statement.at, news)
            elif identity in said:
                self._end(source, identity, news)
        if statement.whole:
            for identity in [each for each in said if each not in heard and each[1] not in statement.unknown]:
                if pushed.get(identity, -math.inf) <= statement.called_at:
                    self._end(source, identity, news)
        if news:
            self.news_at = now
            self._note(news, now)

    def sampled(self, change: Change) -> None:
        """The agent has made this of what they said."""
        if not isinstance(change, Capacity) or change.origin is None or change.observed_at is None:
            return
        samples = self.samples.setdefault(change.identity, {})
        samples[change.origin.seq] = change.observed_at - self.cluster.clock_offset
        if len(samples) > _MANY:
            old = trio.current_time() - self._remembered
            for seq in [seq for seq, true_at in samples.items() if true_at < old]:
                del samples[seq]

    def vouched(self, identity: Identity, seq: int | None, value: Value) -> float | None:
        """The moment for which a sample stands, or, without its number, the latest at which a source has vouched for
        what it says; None where there was none."""
        if seq is not None:
            return self.samples.get(identity, {}).get(seq)
        return self.latest.get(identity, {}).get(value)

    def _is_valid(self, change: object, whole: bool) -> bool:
        if type(change) is Withdrawal:
            return not whole and withdrawal_fault(change) is None
        if type(change) is not Capacity or change.cluster_id != self.cluster.cluster_id:
            return False
        try:
            return fault(change) is None
        except Exception:  # what a source hands over may be anything, and is refused by the agent
            return False

    def _vouch(
        self, source: str, identity: Identity, record: Capacity, at: float, news: dict[Identity, Value | None]
    ) -> None:
        now = trio.current_time()
        true_at = at if record.observed_at is None else min(record.observed_at - self.cluster.clock_offset, now)
        value = value_of(record)
        if any(identity in said for other, said in self._said.items() if other != source):
            self.contested[identity] = None
        self._said[source][identity] = None
        latest = self.latest.setdefault(identity, {})
        latest[value] = max(latest.get(value, -math.inf), true_at)
        if len(latest) > _MANY:
            old = now - self._remembered
            for each in [each for each, moment in latest.items() if moment < old]:
                del latest[each]
        self.gone.pop(identity, None)
        fact = self.facts.get(identity)
        if fact is None:
            fact = self.facts[identity] = Fact(value, now, deque())
            news[identity] = value
        elif fact.value != value:
            fact.value, fact.since = value, now
            news[identity] = value
        while len(fact.vouched) > 1 and fact.vouched[1].said_at < now - self._remembered:
            fact.vouched.popleft()
        fact.vouched.append(Vouched(now, true_at))

    def _end(self, source: str, identity: Identity, news: dict[Identity, Value | None]) -> None:
        del self._said[source][identity]
        if any(identity in said for said in self._said.values()):
            return
        if (fact := self.facts.pop(identity, None)) is not None:
            self.gone[identity] = Gone(trio.current_time(), fact.vouched[-1].true_at)
            news[identity] = None

    def _note(self, news: Mapping[Identity, Value | None], now: float) -> None:
        changed: dict[tuple[str, str], list[tuple[Identity, Value | None]]] = {}
        for identity, value in news.items():
            name = (identity[1], identity[2])
            env = self.envs.get(name)
            if env is None:
                env = self.envs[name] = _Env()
            changed.setdefault(name, []).append((identity, env.now.get(identity)))
            if value is None:
                env.now.pop(identity, None)
            else:
                env.now[identity] = value
        for name, before in changed.items():
            env = self.envs[name]
            while env.before and env.before[0][0] < now - self._remembered:
                env.before.popleft()
            env.before.append((now, before))


class Told(NamedTuple):
    """A sample of a record, or word of its end, that a registry was told, whether or not it has taken it in."""

    origin: Origin | None
    #: seconds on the cluster's own clock; infinite where it was withdrawn
    observed_at: float
    #: seconds that the network had it and that its age need not tell of, at the most
    uncounted: float


class Observer:
    """One registry that is looked at: that of one agent process."""

    def __init__(self, process: AgentProcess) -> None:
        self.process = process
        #: by record of any other cluster, and by the agent process that it came from: the newest sample of that one
        self.told_by: dict[tuple[Identity, str | None], Told] = {}
        #: by record of any other cluster: what came in last
        self.told: dict[Identity, Told] = {}
        #: what it has shown at the last look
        self.shown: dict[Identity, Capacity] = {}
        #: what came in last of each record, by value
        self.values: dict[Identity, Value] = {}
        self._clock_offset = process.cluster.clock_offset
        self.version = -1
        self.next_look = -math.inf
        #: the envs that it had at the last look, in the order in which they are to be looked at more closely
        self.envs: dict[tuple[str, str], None] = {}

    @property
    def cluster(self) -> SimulatedCluster:
        """Whose registry it is."""
        return self.process.cluster

    @property
    def clock_jumped(self) -> bool:
        """Whether its clock has jumped while it ran."""
        return self.cluster.clock_offset != self._clock_offset


class View(NamedTuple):
    """What one registry answers at one moment, and the moment."""

    observer: Observer
    #: Trio's time
    now: float
    #: the same on the cluster's own clock
    own_now: float
    records: Sequence[Capacity]
    #: what it answered at the look before
    before: Mapping[Identity, Capacity]
    #: envs that are looked at closely this time: those that have lost something, and one more
    envs: Sequence[tuple[str, str]]


class Ledger:
    """The books of one simulated federation."""

    def __init__(self, federation: Simulation, *, remembered: float) -> None:
        self.federation = federation
        #: seconds for which what was said can still be heard of somewhere
        self.remembered = remembered
        #: by the instance id of the agent process
        self.histories: dict[str, History] = {}
        #: the registries that are due for a look, with what they answer; made anew before every look
        self.views: list[View] = []
        self._observers: dict[int, Observer] = {}
        #: moments at which to look at everything, the soonest first; as a heap, and none of them twice
        self._appointments: list[float] = []
        self._appointed: dict[float, None] = {}
        self._sooner = trio.Event()

    # What happens.

    def said(self, process: AgentProcess, statement: Statement) -> None:
        """A source has said something."""
        self.history(process).say(statement)

    def applied(self, process: AgentProcess, changes: Sequence[Change]) -> list[tuple[str, str, str]]:
        """A registry was told something. Returns of what (cluster, namespace, env) that was news."""
        observer = self.observer(process)
        own, now = process.cluster.cluster_id, trio.current_time()
        news: dict[tuple[str, str, str], None] = {}
        uncounted: dict[str, Callable[[float], float]] = {}
        for change in changes:
            identity = change.identity
            if isinstance(change, Capacity):
                value = value_of(change)
                if observer.values.get(identity) != value:
                    observer.values[identity] = value
                    news[identity[0], identity[1], identity[2]] = None
                if identity[0] == own:
                    self.history(process).sampled(change)
                else:
                    if identity[0] not in uncounted:
                        uncounted[identity[0]] = self._uncounted(observer.cluster, identity[0], now)
                    self._told(observer, change, uncounted[identity[0]])
            else:
                if observer.values.pop(identity, None) is not None:
                    news[identity[0], identity[1], identity[2]] = None
                observer.told[identity] = Told(change.origin, math.inf, 0.0)
        return list(news)

    def _told(self, observer: Observer, record: Capacity, uncounted: Callable[[float], float]) -> None:
        identity, origin = record.identity, record.origin
        observed_at = record.observed_at if record.observed_at is not None else observer.cluster.clock()
        true_at = observed_at - observer.cluster.clock_offset
        if origin is not None and (history := self.histories.get(origin.instance)) is not None:
            true_at = history.samples.get(identity, {}).get(origin.seq, true_at)
        told = observer.told[identity] = Told(origin, observed_at, uncounted(true_at))
        key = (identity, None if origin is None else origin.instance)
        known = observer.told_by.get(key)
        if known is not None and known.origin is not None and origin is not None:
            if known.origin.seq > origin.seq:
                return
            if known.origin.seq == origin.seq:  # the registry has taken one of the two
                told = told._replace(uncounted=max(told.uncounted, known.uncounted))
        observer.told_by[key] = told

    def _uncounted(self, observer: SimulatedCluster, cluster_id: str, now: float) -> Callable[[float], float]:
        """How much of the time that the network had a record of that cluster its age need not tell of, when the record
        reaches `observer` now, by when it was true. It came to a hub at any time since then, and from there just
        now."""
        from_hub = self._longest_uncounted(observer.routes, "to_cluster", now)
        clusters = [each for each in self.federation.clusters.values() if each.cluster_id == cluster_id]

        def uncounted(true_at: float) -> float:
            to_hub = (self._longest_uncounted(each.routes, "to_hub", true_at) for each in clusters)
            return from_hub + max(to_hub, default=0.0)

        return uncounted

    def _longest_uncounted(self, routes: Mapping[str, Route], direction: Direction, since: float) -> float:
        # Hubs of a test's own making need not tell when they have said something.
        ours = {hub.name: None for hub in self.federation.hubs}
        waits = (route.longest_wait(direction, since=since, uncounted=name in ours) for name, route in routes.items())
        return max(waits, default=0.0)

    # What is known.

    def history(self, process: AgentProcess) -> History:
        """What the sources of a process have said."""
        found = self.histories.get(process.agent.instance)
        if found is None:
            found = self.histories[process.agent.instance] = History(process, self.remembered)
        return found

    def observer(self, process: AgentProcess) -> Observer:
        """The registry of a process, as something to look at."""
        found = self._observers.get(id(process))
        if found is None:
            found = self._observers[id(process)] = Observer(process)
        return found

    def speakers(self, cluster_id: str) -> list[History]:
        """Every agent process that has ever spoken for a cluster, in the order of their coming."""
        return [history for history in self.histories.values() if history.cluster.cluster_id == cluster_id]

    def knows(self, cluster_id: str) -> bool:
        """Whether a cluster is part of the simulation, so that all that is known of it comes from its sources."""
        return any(cluster.cluster_id == cluster_id for cluster in self.federation.clusters.values())

    def vouched(self, record: Capacity) -> tuple[History | None, float | None]:
        """Who has said what a record says, and for which moment it stands; None for who, or when, nobody knows."""
        value, origin = value_of(record), record.origin
        if origin is not None:
            history = self.histories.get(origin.instance)
            if history is None or history.cluster.cluster_id != record.cluster_id:
                return None, None
            return history, history.vouched(record.identity, origin.seq, value)
        best: tuple[History | None, float | None] = (None, None)
        for history in self.speakers(record.cluster_id):
            moment = history.vouched(record.identity, None, value)
            if moment is not None and (best[1] is None or moment > best[1]):
                best = (history, moment)
        return best

    # Looking.

    def look_again(self, at: float) -> None:
        """Have every registry looked at just after that moment (Trio's time)."""
        if at not in self._appointed:
            self._appointed[at] = None
            heapq.heappush(self._appointments, at)
            if self._appointments[0] == at:
                self._sooner.set()

    async def wait_until_due(self, at: float) -> None:
        """Return at that moment (Trio's time), or just after an earlier one at which a look was asked for."""
        while True:
            self._sooner = trio.Event()
            due = min(at, math.nextafter(self._appointments[0], math.inf) if self._appointments else math.inf)
            if trio.current_time() >= due:
                return
            with trio.move_on_at(due):
                await self._sooner.wait()

    def begin_look(self, *, everything: bool = False) -> None:
        """Find out which registries are due: those in which something has changed, or has to by now, and each of them
        every few seconds; or all of them."""
        now = trio.current_time()
        while self._appointments and self._appointments[0] < now:
            del self._appointed[heapq.heappop(self._appointments)]
            everything = True
        self.views = [view for process in self._live() if (view := self._view(process, now, everything)) is not None]

    def _live(self) -> Iterator[AgentProcess]:
        for cluster in self.federation.clusters.values():
            if not cluster.is_suspended:  # where nobody can ask anything
                for process in cluster.processes:
                    if process.stopping_at == math.inf:  # one that stops takes nothing in any more
                        yield process

    def _view(self, process: AgentProcess, now: float, everything: bool) -> View | None:
        observer, registry = self.observer(process), process.agent.registry
        registry.free()
        version = registry.version()
        if not everything and version == observer.version and now < observer.next_look:
            return None
        records = registry.snapshot()
        own_now = process.cluster.clock()
        ttl = self.federation.settings.ttl
        runs_out = min((ttl - (own_now - (record.observed_at or 0.0)) for record in records), default=math.inf)
        observer.version, observer.next_look = version, now + min(_PATROL, max(0.0, runs_out) + 1e-6)
        before, observer.shown = observer.shown, {record.identity: record for record in records}
        return View(observer, now, own_now, records, before, self._closely(observer, records, before))

    def _closely(
        self, observer: Observer, records: Iterable[Capacity], before: Iterable[Identity]
    ) -> list[tuple[str, str]]:
        """The envs to be looked at closely."""
        held = {(record.namespace, record.env_name): None for record in records}
        lost = [name for name in observer.envs if name not in held]
        short = {(each[1], each[2]): None for each in before if each not in observer.shown}
        # The others take turns: the first goes to the end.
        queue = [name for name in observer.envs if name in held] + [name for name in held if name not in observer.envs]
        observer.envs = dict.fromkeys([*queue[1:], *queue[:1]])
        return list(dict.fromkeys([*lost, *short, *queue[:1]]))

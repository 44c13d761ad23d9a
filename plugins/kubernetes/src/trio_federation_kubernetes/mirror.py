"""All envs whose status shows the view of the fleet: whose turn it is to be written, how fast, and what follows where
the API server says no. Pure: `now` is an argument, and who writes is `sink.py`. What there is to write about one env,
and what others do to it, is `mirrored.py`.

Envs with something to write wait: the one whose view differs most is the next, but who has waited for a whole refresh
interval goes first. What has to wait for a moment, as its last write was a short while ago, as only its ages have
moved, or as its namespace gives no right, is looked at again then. Nothing is done twice that a newer view makes
unnecessary, so what waits takes one place per env, and no more."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

from trio_federation import Capacity, Trouble
from trio_federation_kubernetes.errors import ApiError, KubernetesError
from trio_federation_kubernetes.mirrored import LEAVE_ALONE, Disturbance, MirroredEnv, Write
from trio_federation_kubernetes.ownership import FIELD_MANAGER, Conflict, conflicts
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS
from trio_federation_kubernetes.schema import StatusFields
from trio_federation_kubernetes.segments import Env
from trio_federation_kubernetes.troubles import counted, some

#: Writes that may be under way at a time; while they fail, one.
IN_FLIGHT = 4
#: Seconds before the API server, a namespace without the right, or one env is tried again: at first, and at most.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
#: And where one env alone is refused, whatever the server says of it: it is not likely to change by itself.
FIRST_REFUSAL_PAUSE = 10.0
LONGEST_REFUSAL_PAUSE = 600.0
#: Seconds that a server may ask to wait.
LONGEST_RETRY_AFTER = 60.0
#: Failures in a row after which an env that is found to be edited at the same time, or not there, is a trouble.
PATIENCE = 4
#: Envs in a row on which the server fails, each by itself, until that is a fault of the server.
FAULTS_OF_THE_SERVER = 5
#: Envs or records that are taken in one step.
STEP = 500
#: Statuses, and 0 for no answer at all, that say something about the server, or about us, and nothing about one env.
_OF_THE_SERVER = frozenset([0, 401, 429, 502, 503, 504])
#: what a conflict names where the list has no keys
_LIST = ".status.clusters"
#: Items that a heap may have in any case.
_LEAST_HEAP = 64


class _Pause(NamedTuple):
    until: float
    failures: int
    error: KubernetesError


class Mirror:
    """Decides what is written next.

    `cluster_id`: the local cluster. `refresh_interval`: seconds after which ages alone are worth a write.
    `env_interval`: the least seconds between two writes of one env. `writes_per_second`: of all together. `selective`:
    whether an object that goes out of sight may still be there, as it was chosen by its labels. `ttl`: seconds for
    which entries that are found when all this begins are kept although nothing is known of their clusters, as it may be
    on its way. `unattended`: seconds, and up to half as many more, after which an agent takes over what nobody has
    written for so long, where no hub says whether it is the cluster's reporter. `random`: for jitter. `tell(event,
    **details)`: a line for the log, of what is worth one. `now`: seconds on the agent's clock, here as in every method;
    it never goes back, but by the time that a `want` or `replacing` takes."""

    def __init__(
        self,
        *,
        cluster_id: str,
        refresh_interval: float,
        env_interval: float,
        writes_per_second: float,
        selective: bool,
        ttl: float,
        unattended: float,
        random: Random,
        tell: Callable[..., object],
        now: float,
    ) -> None:
        self._cluster_id = cluster_id
        self._refresh_interval = refresh_interval
        self._env_interval = env_interval
        self._write_interval = 1 / writes_per_second
        self._selective = selective
        self._keep_until = now + ttl
        self._unattended = unattended
        self._random = random
        self._tell = tell
        self._fields: StatusFields | None = None
        self._envs: dict[Key, MirroredEnv] = {}
        #: who may be written now, by when they began to wait, the longest first, and how much each differs
        self._waiting: dict[Key, tuple[float, int]] = {}
        #: the same, the most changed first; an item that does not agree with `_waiting` is an old one
        self._ranking: list[tuple[int, float, Key]] = []
        #: who is looked at again, and when; an item that does not agree with `_wake` is an old one
        self._later: list[tuple[float, Key]] = []
        self._wake: dict[Key, float] = {}
        #: with something to be told: dicts for their order
        self._stopped: dict[Key, None] = {}
        self._left: dict[Key, None] = {}
        self._summaries: dict[Key, str] = {}
        self._refused: dict[Key, KubernetesError] = {}
        self._server: _Pause | None = None
        self._forbidden: dict[str, _Pause] = {}
        #: some of the envs on which alone it has failed, since a write was answered in any other way
        self._faulty: set[Key] = set()
        self._in_flight = 0
        self._next_write = -math.inf
        #: whether this agent writes, what it was told last about that, and since when it has not heard of others
        self._acting = False
        self._answer: bool | None = None
        self._unsure_since = now
        self._patience = self._draw_patience()
        self._now = now

    # --- who writes

    @property
    def acting(self) -> bool:
        """Whether this agent is the one that writes."""
        return self._acting

    @property
    def fields(self) -> StatusFields | None:
        """The fields that may be written; None: nothing may be."""
        return self._fields

    def stand(self, answer: bool | None, now: float) -> None:
        """What the agent says about being its cluster's live reporter (`SinkContext.is_reporter`). Where nobody says,
        things stay as they are; but entries that no agent keeps up are taken over, so that they do not stay for ever
        where no hub can be reached."""
        self._now = now
        if answer is not self._answer:
            self._answer = answer
            self._unsure_since = now
        self._forget_pauses(now)
        if answer is not None:
            self._act(answer, now)
        elif not self._acting and now - self._unsure_since >= self._patience:
            self._act(True, now)

    def _draw_patience(self) -> float:
        """How long this agent lets entries be unattended: two that wait for each other should not begin together."""
        return self._unattended * self._random.uniform(1.0, 1.5)

    def _forget_pauses(self, now: float) -> None:
        """What was not tried again since, as there was nothing to write any more, is no trouble."""
        if self._in_flight:
            return
        # Who waits for a pause of its own is back after the longest one.
        if self._server is not None and now > self._server.until + LONGEST_PAUSE and not self._waiting:
            self._server = None
        for namespace, pause in list(self._forbidden.items()):
            if now > pause.until + LONGEST_PAUSE:
                del self._forbidden[namespace]

    def _act(self, acting: bool, now: float) -> None:
        if acting is self._acting:
            return
        self._acting = acting
        self._tell("kubernetes_status_writes" if acting else "kubernetes_status_stands_by", reporter=self._answer)
        self._settle_all(now)

    def allow(self, fields: StatusFields | None, now: float) -> None:
        """The server takes these fields, as its schema says; None: nothing may be written."""
        if fields != self._fields:
            self._fields = fields
            self._settle_all(now)

    # --- what should be shown

    def want(self, snapshot: Iterable[Capacity], now: float) -> Iterator[None]:
        """Every fresh record, in the order of a snapshot. In steps, between which others may have their turn. One that
        is broken off is made up for by the next."""
        found: dict[Key, list[Capacity]] = {}
        for number, record in enumerate(snapshot, 1):
            if record.cluster_id != self._cluster_id:
                found.setdefault((record.namespace, record.env_name), []).append(record)
            if number % STEP == 0:
                yield
        gone: dict[Key, list[Capacity]] = {
            key: [] for key, env in self._envs.items() if env.records and key not in found
        }
        number = 0
        for key, records in [*found.items(), *gone.items()]:
            env = self._envs.get(key)
            if env is None:
                env = self._envs[key] = MirroredEnv(key, self._cluster_id)
            if env.want(records):
                self._settle(env, now)
            number += 1 + len(records)
            if number >= STEP:
                number = 0
                yield

    # --- what there is

    def replacing(self, namespace: str | None, objects: Mapping[Key, Env], now: float) -> Iterator[None]:
        """The objects of a namespace, or (None) of all, are these and no others. In steps, as `want`."""
        gone = [
            key for key, env in self._envs.items() if env.present and namespace in (None, key[0]) and key not in objects
        ]
        for number, (key, seen) in enumerate([*((key, None) for key in gone), *objects.items()], 1):
            self.observe(key, seen, now)
            if number % STEP == 0:
                yield

    def observe(self, key: Key, seen: Env | None, now: float) -> None:
        """One object is, or was, this; or it was deleted (None)."""
        env = self._envs.get(key)
        if env is None:
            env = self._envs[key] = MirroredEnv(key, self._cluster_id)
        if seen is None:
            env.gone(surely=not self._selective)
        else:
            self._take(env, env.observed(seen, now, acting=self._acting), now)
        self._settle(env, now)

    def _take(self, env: MirroredEnv, disturbances: Iterable[Disturbance], now: float) -> None:
        """What somebody has done to our entries."""
        for each in disturbances:
            as_us = each.party == FIELD_MANAGER
            if as_us and (not self._acting or self._answer is not True):
                # Another agent of this cluster writes, and there is no hub that says that it should be this one.
                self._unsure_since = now
                self._patience = self._draw_patience()
                env.stopped = None
                if self._acting:
                    self._act(False, now)
                continue
            self._tell(
                "kubernetes_status_stopped" if each.stops else "kubernetes_status_disturbed",
                env="/".join(env.key),
                entries=list(each.clusters),
                manager=f"{FIELD_MANAGER}, as another agent" if as_us else each.party or "not known",
                **({"again_in": LEAVE_ALONE} if each.stops else {}),
            )

    # --- what is to be done

    def _settle_all(self, now: float) -> None:
        """Look at all of them anew, by and by; until then nobody is written."""
        self._waiting.clear()
        for key in self._envs:
            self._look_again(key, now)

    def _settle(self, env: MirroredEnv, now: float) -> None:
        """Find out what there is to do about an env, and when."""
        key = env.key
        plan = None
        if self._acting and self._fields is not None:
            plan = env.plan(
                now,
                refresh_interval=self._refresh_interval,
                env_interval=self._env_interval,
                keep_until=self._keep_until,
            )
        _keep(self._stopped, key, env.present and env.stopped is not None)
        _keep(self._left, key, env.present and bool(env.left_to_others()))
        if env.present and (owner := env.summary_owner(now)) is not None:
            self._summaries[key] = owner
        else:
            self._summaries.pop(key, None)
        if plan is None and not env.writing and not env.is_refused:
            self._refused.pop(key, None)
        if not (env.present or env.records or env.writing or (env.leaving and self._acting)):
            self._envs.pop(key, None)
        earliest = env.next_change(now)
        if plan is not None:
            pause = self._forbidden.get(key[0])
            ready = max(plan.earliest, pause.until if pause is not None else -math.inf)
            if ready <= now:
                since, weight = self._waiting.get(key, (now, -1))
                if weight != plan.weight:
                    self._waiting[key] = since, plan.weight
                    heapq.heappush(self._ranking, (-plan.weight, since, key))
                self._look_again(key, earliest)
                return
            earliest = min(earliest, ready)
        self._waiting.pop(key, None)
        self._look_again(key, earliest)

    def _look_again(self, key: Key, moment: float) -> None:
        if moment == self._wake.get(key, math.inf):
            return
        if moment == math.inf:
            del self._wake[key]
        else:
            self._wake[key] = moment
            heapq.heappush(self._later, (moment, key))

    def wake_at(self, now: float) -> float:
        """When there may be something to do without anything happening before; inf: never."""
        self._drop_old()
        moment = self._later[0][0] if self._later else math.inf
        if self._waiting and self._in_flight < self._most_in_flight():
            pause = self._server.until if self._server is not None else -math.inf
            moment = min(moment, max(now, self._next_write, pause))
        return moment

    def _drop_old(self) -> None:
        """Old items go when they come first, and all of them when they are most of the heap."""
        if len(self._later) > _LEAST_HEAP + 2 * len(self._wake):
            self._later = [(moment, key) for key, moment in self._wake.items()]
            heapq.heapify(self._later)
        if len(self._ranking) > _LEAST_HEAP + 2 * len(self._waiting):
            self._ranking = [(-weight, since, key) for key, (since, weight) in self._waiting.items()]
            heapq.heapify(self._ranking)
        while self._later and self._wake.get(self._later[0][1]) != self._later[0][0]:
            heapq.heappop(self._later)
        while self._ranking and self._waiting.get(self._ranking[0][2]) != (
            self._ranking[0][1],
            -self._ranking[0][0],
        ):
            heapq.heappop(self._ranking)

    def _most_in_flight(self) -> int:
        return 1 if self._server is not None else IN_FLIGHT

    def next(self, now: float) -> Write | None:
        """The next write, which is under way from now on: `written` or `failed` has to be called for it. None: not
        now."""
        self._drop_old()
        for _ in range(STEP):  # of more, the rest at the next call, for which `wake_at` says that it is time
            if not self._later or self._later[0][0] > now:
                break
            _, key = heapq.heappop(self._later)
            del self._wake[key]
            if (env := self._envs.get(key)) is not None:
                self._settle(env, now)
            self._drop_old()
        if not self._waiting or self._in_flight >= self._most_in_flight() or now < self._next_write:
            return None
        if self._server is not None and now < self._server.until:
            return None
        key, (since, _) = next(iter(self._waiting.items()))
        if now - since < self._refresh_interval:
            key = self._ranking[0][2]
        del self._waiting[key]
        self._in_flight += 1
        self._next_write = now + self._write_interval
        if (pause := self._forbidden.get(key[0])) is not None:
            # One is enough to find out; the others wait for what comes of it.
            self._forbidden[key[0]] = pause._replace(until=now + LONGEST_PAUSE)
            self._settle_namespace(key[0], now)
        return self._envs[key].begin(now)

    def _settle_namespace(self, namespace: str, now: float) -> None:
        """Look anew at those of a namespace that wait."""
        for key in [key for key in self._waiting if key[0] == namespace]:
            self._settle(self._envs[key], now)

    # --- what came of it

    def written(self, write: Write, answer: Env, now: float) -> None:
        """A write was done, and this is the object now."""
        self._in_flight -= 1
        self._faulty.clear()
        self._works()
        env = self._envs[write.key]
        self._forgive(write.key[0], now)
        if write.shown:
            self._refused.pop(write.key, None)
        self._take(env, env.written(write, answer, now, acting=self._acting), now)
        self._settle(env, now)

    def failed(self, write: Write, error: KubernetesError, now: float) -> bool:
        """A write was not done, or it is not known whether it was. Returns whether the schema may have changed."""
        self._in_flight -= 1
        env = self._envs[write.key]
        code = error.code if isinstance(error, ApiError) else 0
        misfit = isinstance(error, ApiError) and _is_misfit(error)
        #: whether it may have been done all the same
        unsure = not misfit and (code == 0 or code >= 500)
        self._take(env, env.failed(write, now, unsure=unsure, acting=self._acting), now)
        own_fault = code == 500 and not misfit
        if not own_fault:
            self._faulty.clear()
        elif len(self._faulty) < FAULTS_OF_THE_SERVER:
            self._faulty.add(write.key)
        if code in _OF_THE_SERVER or len(self._faulty) >= FAULTS_OF_THE_SERVER:
            self._blame_server(write, error, now)
            env.retry_at = now + self._pause(env.failures)
            self._settle(env, now)
            return False
        self._works()
        doubtful = False
        if isinstance(error, ApiError) and (found := conflicts(error)):
            if all(conflict.field == _LIST for conflict in found):
                # A list that somebody owns as a whole has no keys.
                doubtful = True
                env.retry_at = now + self._pause(env.failures)
                self._refused[write.key] = error
            else:
                self._conflicted(env, write, found, now)
        elif code == 403:
            before = self._forbidden.get(write.key[0])
            failures = before.failures + 1 if before is not None else 1
            # Where many give no right, all of them together are tried once a second.
            pause = max(self._pause(failures), len(self._forbidden) * self._random.uniform(0.75, 1.25))
            self._forbidden[write.key[0]] = _Pause(now + pause, failures, error)
            self._settle_namespace(write.key[0], now)
        elif code == 404 and env.leaving:
            env.left()
        elif code in (404, 409) or own_fault:
            # It is being deleted or edited, and the watch will say; or the server fails on this one, and maybe on all:
            # a webhook, or a size. No other env has to wait for that.
            env.retry_at = now + self._pause(env.failures)
            if env.failures > PATIENCE:
                self._refused[write.key] = error
        else:
            doubtful = True
            pause = min(LONGEST_REFUSAL_PAUSE, FIRST_REFUSAL_PAUSE * 2.0 ** min(env.refusals, 30))
            env.refused(write, now, pause)
            self._refused[write.key] = error
        self._settle(env, now)
        return doubtful

    def _conflicted(self, env: MirroredEnv, write: Write, found: Sequence[Conflict], now: float) -> None:
        """Others own what the write would change."""
        env.failures = 0
        env.conflicted(write, found, now)
        # One line for each entry and owner: of an entry that somebody has taken, each field may be a conflict.
        lines: dict[tuple[str, str], list[Conflict]] = {}
        for conflict in found:
            place = conflict.field if conflict.cluster is None else conflict.cluster
            lines.setdefault((place, conflict.owner), []).append(conflict)
        for (_, owner), conflicts_of_one in lines.items():
            self._tell(
                "kubernetes_status_conflict",
                env="/".join(write.key),
                field=conflicts_of_one[0].field or "not said",
                fields=len(conflicts_of_one),
                owner=owner or "not said",
                again_in=LEAVE_ALONE,
            )

    def _works(self) -> None:
        """The API server does answer."""
        self._server = None

    def _forgive(self, namespace: str, now: float) -> None:
        """A namespace does give the right."""
        if self._forbidden.pop(namespace, None) is not None:
            for env in list(self._envs.values()):
                if env.key[0] == namespace:
                    self._settle(env, now)

    def _blame_server(self, write: Write, error: KubernetesError, now: float) -> None:
        before = self._server
        failures, until = 1, -math.inf
        if before is not None:
            # What was under way already when it failed for the first time says nothing new.
            failures, until = before.failures + (write.began >= before.until), before.until
        asked = error.retry_after if isinstance(error, ApiError) and error.retry_after is not None else 0.0
        pause = max(self._pause(failures), min(asked, LONGEST_RETRY_AFTER))
        self._server = _Pause(max(now + pause, until), failures, error)

    def _pause(self, failures: int) -> float:
        bound = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 30))
        return bound * self._random.uniform(0.5, 1.0)

    # --- what is in the way

    def troubles(self) -> list[Trouble]:
        """What keeps it from showing everything, in an order that stays."""
        found: list[Trouble] = []
        if not self._acting:
            waited = self._now - self._unsure_since
            if self._answer is False and waited > 2 * self._unattended and any(map(_is_shown, self._envs.values())):
                text = "another agent reports for this cluster, and does not write the view of others"
                found.append(Trouble("unattended", f"{text}; give that one a sink of this type, too"))
            return found
        if self._server is not None:
            found.append(Trouble(self._server.error.reason, f"nothing is written: {self._server.error}"))
        if self._forbidden:
            pause = next(iter(self._forbidden.values()))
            where = some([*self._forbidden], "namespace")
            advice = f"grant its user patch on {SANDBOXENVS.plural}/status; config/kubernetes/rbac has the role"
            found.append(Trouble("forbidden", f"nothing is written in {where}: {pause.error}; {advice}"))
        found += self._stops()
        found += self._conflicts()
        if self._refused:
            error = next(iter(self._refused.values()))
            advice = (
                "see what it objects to; where that is the definition, install config/kubernetes/crd, or adapt yours"
            )
            text = f"the view of other clusters is not shown, or old, in {_named(self._refused)}: {error}; {advice}"
            found.append(Trouble("refused", text))
        return found

    def _stops(self) -> Iterator[Trouble]:
        parties: dict[str, list[Key]] = {}
        for key in self._stopped:
            env = self._envs[key]
            if env.stopped is not None:
                parties.setdefault(env.stopped[1], []).append(key)
        for party, keys in sorted(parties.items()):
            who = f"field manager {party}" if party else "a field manager that cannot be told"
            if party == FIELD_MANAGER:
                who = f"another agent, as {FIELD_MANAGER},"
                advice = (
                    "see that one agent alone runs for this cluster, and that one of its sinks alone chooses these envs"
                )
            else:
                advice = f"have it leave alone what {FIELD_MANAGER} owns, or write only its own entries, by their keys"
            text = f"the view of other clusters is not shown in {_named(keys)}: {who} removes or changes it; {advice}"
            yield Trouble("contested", text, party or "unknown")

    def _conflicts(self) -> Iterator[Trouble]:
        parties: dict[str, dict[Key, list[str]]] = {}
        for key in self._left:
            for cluster, owners in self._envs[key].left_to_others().items():
                parties.setdefault(", ".join(owners), {}).setdefault(key, []).append(cluster)
        for party, keys in sorted(parties.items()):
            first, clusters = next(iter(keys.items()))
            more = f" ({counted(len(keys), 'env')} in all)" if len(keys) > 1 else ""
            names = some(sorted(clusters), "cluster")
            yield Trouble(
                "conflict",
                f"the entry of {names} in {'/'.join(first)} belongs to {party or 'an unknown field manager'}{more}, "
                "and is not written; have that let go of it, or give the clusters different ids",
                party or "unknown",
            )
        owners_of_summaries: dict[str, list[Key]] = {}
        for key, owner in self._summaries.items():
            owners_of_summaries.setdefault(owner, []).append(key)
        for party, envs in sorted(owners_of_summaries.items()):
            text = f"status.federation in {_named(envs)} belongs to {party or 'an unknown field manager'}, and is not"
            text += " written, so kubectl's columns show what that says; have it let go of it"
            yield Trouble("conflict", text, party or "unknown")


def _is_misfit(error: ApiError) -> bool:
    """Whether the server says, with a status that sounds like a fault of its own, that its schema has no such field."""
    return error.code == 500 and error.message.startswith("failed to create typed patch object")


def _is_shown(env: MirroredEnv) -> bool:
    """Whether there is something to be shown in it."""
    return env.present and bool(env.records)


def _keep(keys: dict[Key, None], key: Key, there: bool) -> None:
    if there:
        keys.setdefault(key, None)
    else:
        keys.pop(key, None)


def _named(keys: Iterable[Key]) -> str:
    """Envs, for a line."""
    return some(["/".join(key) for key in keys], "env")

"""What a cluster may say and see: the envs that it may report, how many records, how much idle of each counts, and the
envs of others that it may be told of. Pure: it sorts changes, and holds none of them. Who the caller is, is
`identity.py`'s to say, which sample is newer `samples.py`'s; how often a peer may ask is `limits.py`.

A policy is asked about every record that comes in and goes out, so names that were seen before cost a look-up and no
more; docs/benchmarks.md has the figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from trio_federation.capacity import Capacity, Change, Identity, Withdrawal, filled
from trio_federation.config import PolicySettings

#: What can be wrong with a record, in words that are fit for a metric's label.
REASONS = ("env_not_allowed", "too_many_records", "idle_cut")

#: Envs of which a policy remembers what it says; when there would be more, the remembering begins anew.
ANSWERS_KEPT = 10_000


#: Withdrawals that are remembered of a cluster whose records are limited: so many for each record, and so many at the
#: least. Far more than pools come and go while one is remembered, and few enough to be no burden.
REMEMBERED_FOR_EACH = 10
LEAST_REMEMBERED = 1_000


class Breach(NamedTuple):
    """Records of one batch that broke one rule."""

    #: how many; it hides a method of tuples that nobody misses
    count: int  # type: ignore[assignment]
    #: one line for people about the first of them: its names, and the rule
    detail: str


class Admitted(NamedTuple):
    """What is left of a batch, in its order, and what was wrong with the rest, by reason."""

    changes: list[Change]
    breaches: dict[str, Breach]


class _Answers(dict[tuple[str, str], bool]):
    """Whether one of some patterns fits an env, by namespace and env.

    Matched once for each, and kept for the next time, but no more than ANSWERS_KEPT of them: a peer that sends ever new
    names cannot make this grow."""

    def __init__(self, patterns: Iterable[str]) -> None:
        super().__init__()
        halves = [(namespace, env) for namespace, _, env in (pattern.partition("/") for pattern in patterns)]
        #: whether every env fits, so that nobody need ask
        self.all = any(set(namespace) == set(env) == {"*"} for namespace, env in halves)
        # One without a * is found at once, however many there are.
        self._exact = frozenset(each for each in halves if "*" not in "".join(each))
        self._wild = [(_compiled(namespace), _compiled(env)) for namespace, env in halves if "*" in namespace + env]

    def __missing__(self, names: tuple[str, str]) -> bool:
        namespace, env = names
        answer = names in self._exact or any(
            of_namespace.fullmatch(namespace) is not None and of_env.fullmatch(env) is not None
            for of_namespace, of_env in self._wild
        )
        if len(self) >= ANSWERS_KEPT:
            self.clear()
        self[names] = answer
        return answer


def _compiled(half: str) -> re.Pattern[str]:
    """What stands before or after a pattern's slash, as an expression whose cost stays in proportion to the name.

    Of what may follow a *, the first place is as good as any later one, so each is settled (`?>`) where it is found.
    Tried in every combination, a few of them would hold up the hub for minutes with one long name."""
    first, *others = (re.escape(part) for part in re.sub(r"\*+", "*", half).split("*"))
    if not others:
        return re.compile(first)
    *between, last = others
    return re.compile(first + "".join(f"(?>[^/]*?{part})" for part in between) + f"[^/]*{last}")


class Policy:
    """What one table of the configuration says, for every cluster that it is for.

    `settings`: that table, whose values are good: None stands for no limit, and no pattern allows nothing. Names that
    are asked about are those of records that passed `capacity.fault`."""

    def __init__(self, settings: PolicySettings) -> None:
        #: records that are kept of one cluster; None: as many as it has
        self.max_records = settings.max_records
        #: the highest idle of a record that counts; None: whatever it says
        self.max_idle = settings.max_idle
        self._report = _Answers(settings.report)
        self._see = _Answers(settings.see)
        self._most_remembered = max(REMEMBERED_FOR_EACH * (settings.max_records or 0), LEAST_REMEMBERED)
        #: whether every env may be reported
        self.reports_all = self._report.all
        #: whether every env may be seen
        self.sees_all = self._see.all
        #: whether there is nothing to check on what is reported
        self.unrestricted = self.reports_all and self.max_records is None and self.max_idle is None

    def may_report(self, namespace: str, env_name: str) -> bool:
        """Whether records of an env are taken from these clusters."""
        return self.reports_all or self._report[namespace, env_name]

    def may_see(self, namespace: str, env_name: str) -> bool:
        """Whether these clusters are told of an env."""
        return self.sees_all or self._see[namespace, env_name]

    def steps(self, changes: Sequence[Change]) -> Iterator[Sequence[Change]]:
        """One batch in parts, in its order, each to be admitted and applied before the next one is.

        A withdrawal makes room for what follows it. Whether it counts is the table's to decide, by a history that the
        sender makes up; so where records are limited, no part has a record behind a withdrawal, and `held` is what the
        table really holds. Else a cluster could claim room with withdrawals that are outdated, and fill it."""
        if self.max_records is None:
            yield changes
            return
        first, withdrawing = 0, False
        for number, change in enumerate(changes):
            is_withdrawal = isinstance(change, Withdrawal)
            if withdrawing and not is_withdrawal:
                yield changes[first:number]
                first = number
            withdrawing = is_withdrawal
        yield changes[first:] if first else changes

    def admit(
        self,
        changes: Sequence[Change],
        held: int,
        holds: Callable[[Identity], bool],
        remembered: int = 0,
        remembers: Callable[[Identity], bool] = lambda _identity: False,
    ) -> Admitted:
        """What may be said of a batch of changes of one cluster.

        `held`: how many records of that cluster are held now; `holds`: whether one of them is. What may not be reported
        is dropped, withdrawals too, which are not counted as breaches; so is a new identity for which there is no room.
        Within the batch new ones take room, and withdrawals of what is held make it. An idle that is too high is cut.
        Where nothing is restricted, a list comes back as the same object.

        `remembered`: how many withdrawals of that cluster are remembered now; `remembers`: whether that of an identity
        is. They take memory as records do, so where records are limited, they are, too: without room for one more, what
        makes one is dropped, a withdrawal of what is not held, or a new identity, which will be withdrawn one day."""
        if self.unrestricted:
            return Admitted(changes if isinstance(changes, list) else list(changes), {})
        report = None if self.reports_all else self._report
        max_idle = self.max_idle
        # Mostly there is room even if all of them were new, and then nobody need ask which of them are.
        room = self.max_records - held if self.max_records is not None else len(changes)
        memory = self._most_remembered - remembered if self.max_records is not None else len(changes)
        is_scarce = room < len(changes) or memory < len(changes)
        there: dict[Identity, bool] = {}
        admitted: list[Change] = []
        not_allowed: list[Capacity] = []
        too_many: list[Capacity] = []
        cut: list[Capacity] = []
        for change in changes:
            if isinstance(change, Capacity):
                if report is not None and not report[change.namespace, change.env_name]:
                    not_allowed.append(change)
                    continue
                if is_scarce:
                    identity = change.identity
                    if not (there[identity] if identity in there else holds(identity)):
                        if room <= 0 or memory <= 0:
                            too_many.append(change)
                            continue
                        room -= 1
                        there[identity] = True
                if max_idle is not None and change.idle > max_idle:
                    cut.append(change)
                    change = _with_idle(change, max_idle)
            else:
                identity = change.identity
                if report is not None and not report[identity[1:3]]:
                    continue
                if is_scarce:
                    if there[identity] if identity in there else holds(identity):
                        room += 1
                        memory -= 1
                        there[identity] = False
                    elif identity not in there and not remembers(identity):
                        if memory <= 0:
                            too_many.append(Capacity(*identity))
                            continue
                        memory -= 1
                        there[identity] = False
            admitted.append(change)
        breaches = {
            reason: Breach(len(found), self._detail(reason, found[0]))
            for reason, found in zip(REASONS, (not_allowed, too_many, cut), strict=True)
            if found
        }
        return Admitted(admitted, breaches)

    def visible(self, changes: Mapping[Identity, Change]) -> Mapping[Identity, Change]:
        """The changes, by identity, that these clusters may be told of; the same object where they may see all."""
        if self.sees_all:
            return changes
        see = self._see
        return {identity: change for identity, change in changes.items() if see[identity[1:3]]}

    def _detail(self, reason: str, record: Capacity) -> str:
        """What is wrong with a record, in one line for people."""
        env = f"{record.namespace}/{record.env_name}"
        part = record.member_pool or record.scaling_group
        name = f"{env}/{part}" if part else env
        if reason == "env_not_allowed":
            return f"{env} is not among what it may report"
        if reason == "too_many_records":
            return (
                f"{name} is one too many: {self.max_records} records are kept of it, and {self._most_remembered} "
                "withdrawals remembered"
            )
        return f"{name} claims {record.idle} idle, of which {self.max_idle} count"


def _with_idle(record: Capacity, idle: int) -> Capacity:
    """The same record with another idle."""
    return filled(
        record.cluster_id,
        record.namespace,
        record.env_name,
        record.member_pool,
        record.scaling_group,
        idle,
        record.running,
        record.pending,
        record.desired,
        record.autoscaling_enabled,
        record.capacity,
        record.saturated_for,
        record.state,
        record.observed_at,
        record.origin,
    )


class Policies:
    """The policy of every cluster.

    `settings`: the tables of the configuration, in which no cluster is in two of them."""

    def __init__(self, settings: Sequence[PolicySettings]) -> None:
        self._by_cluster: dict[str, Policy] = {}
        for table in settings:
            policy = Policy(table)
            for cluster_id in table.clusters:
                self._by_cluster[cluster_id] = policy
        self._otherwise = self._by_cluster.get("*") or Policy(PolicySettings(clusters=("*",)))

    def of(self, cluster_id: str) -> Policy:
        """The policy of the table that names the cluster, else of the one with "*", else one that restricts nothing;
        the same object for all clusters of one table."""
        return self._by_cluster.get(cluster_id, self._otherwise)

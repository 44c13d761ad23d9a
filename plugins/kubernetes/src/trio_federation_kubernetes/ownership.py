"""Who owns what in the status of a SandboxEnv, as the API server keeps book of it: which cluster's entries in
status.clusters are ours, who else has a hand in one, who has most likely removed or rewritten one, and which fields of
whom an apply was refused for. Read from an object's metadata.managedFields, and from the causes of a refusal, whatever
they hold. Pure. What follows from it is the mirror's business; how a Status object is read is `status.py`.

What the book can say has limits. A manager that changes a value takes the field over, and is named from then on. One
that only removes leaves no trace: no field is its own, and not even its time is set anew."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from trio_federation_kubernetes.errors import ApiError
from trio_federation_kubernetes.texts import one_line

#: the name under which our fields are applied
FIELD_MANAGER = "trio-federation"

# No cycle can lead through these: hence `gc=False`.


class Deeper(msgspec.Struct, frozen=True, gc=False):
    """Fields that are not looked at. Nothing of them is decoded; an env's may be thousands."""


class ManagedFields(msgspec.Struct, frozen=True, gc=False):
    """What is read of one manager's entry in metadata.managedFields; made for `decoding.Decoder`, which puts a Misfit
    in place of what does not fit."""

    manager: str = ""
    #: "Apply" or "Update"
    operation: str = ""
    #: through which subresource it wrote; "" = none
    subresource: str = ""
    #: RFC 3339, whole seconds; when what it owns was last set
    time: str = ""
    #: Its fields, down to the items of the lists in the status: `f:status` to `f:clusters` to `k:{"clusterID":"east"}`.
    fieldsV1: dict[str, dict[str, dict[str, Deeper]]] | None = None


@dataclass(frozen=True, slots=True)
class Owners:
    """Who owns what in one object's status."""

    #: the ids of the clusters in whose entries anything was applied by us
    ours: frozenset[str]
    #: Whether anything in the status was applied by us. An apply of an empty status leaves our name beside it, which is
    #: nothing.
    anything_ours: bool
    _others: Mapping[str, tuple[str, ...]]
    _of_the_list: tuple[str, ...]

    @classmethod
    def of(cls, managed_fields: object) -> Owners:
        """What metadata.managedFields says: a list of `ManagedFields`, or whatever else stands there."""
        managers = list(_managers(managed_fields))
        ours = [manager for manager in managers if manager.is_ours]
        others: defaultdict[str, set[str]] = defaultdict(set)
        for manager in managers:
            if manager.name != FIELD_MANAGER:
                for cluster in manager.clusters:
                    others[cluster].add(manager.name)
        return cls(
            frozenset().union(*(manager.clusters for manager in ours)),
            any(manager.owns_status for manager in ours),
            {cluster: tuple(sorted(names)) for cluster, names in others.items()},
            tuple(sorted({manager.name for manager in _of_the_list(managers) if manager.name != FIELD_MANAGER})),
        )

    def owners(self, cluster: str) -> tuple[str, ...]:
        """The names of all other managers that own anything in this cluster's entry, sorted, each once.

        The owners of the whole list own all entries, but only where nobody owns one: beside owners of entries, they own
        no more than that there is a list."""
        return self._others.get(cluster, self._of_the_list)


def suspect(managed_fields: object, clusters: Iterable[str]) -> str:
    """The name of the manager that has most likely removed or rewritten the entries of these clusters, by what
    metadata.managedFields says afterwards; "" where nothing can be said.

    It is another manager that owns anything in one of these entries. Removing leaves no trace, so it is else one that
    owns the list or any of its entries, as whoever writes lists of its own does; else one that has written the status;
    else, where our entries are ours alone, our own name, as then another agent writes under it. Of several it is the
    one with the newest time, and of these the first by name."""
    wanted = set(clusters)
    managers = list(_managers(managed_fields))
    others = [manager for manager in managers if manager.name != FIELD_MANAGER]
    for suspects in (
        [manager for manager in others if not manager.clusters.isdisjoint(wanted)],
        [manager for manager in others if manager.has_list],
        [manager for manager in others if manager.writes_status],
    ):
        if suspects:
            return min(suspects, key=lambda manager: (-manager.time, manager.name)).name
    by_our_name = any(not manager.clusters.isdisjoint(wanted) for manager in managers)
    return FIELD_MANAGER if by_our_name else ""


# --- one manager


@dataclass(frozen=True, slots=True)
class _Manager:
    """One entry in metadata.managedFields, as far as it can be read."""

    #: one line, not empty
    name: str
    is_ours: bool
    #: Unix seconds; minus infinity where it cannot be read
    time: float
    #: whether it has written the status at all
    writes_status: bool
    #: whether it owns anything below the status
    owns_status: bool
    #: in whose entries in status.clusters it owns anything
    clusters: frozenset[str]
    #: whether status.clusters is its own, or anything below
    has_list: bool
    #: whether it owns anything below, be it under a key that cannot be read
    has_entries: bool


def _managers(managed_fields: object) -> Iterator[_Manager]:
    """Those whose names can be read."""
    for each in managed_fields if isinstance(managed_fields, list) else ():
        if not isinstance(each, ManagedFields):
            continue
        if isinstance(each.manager, str) and (name := one_line(each.manager)):
            yield _manager(name, each)


def _manager(name: str, entry: ManagedFields) -> _Manager:
    status = _part(entry.fieldsV1, "f:status")
    clusters = _part(status, "f:clusters")
    items = [key for key in clusters or () if key != "."]
    return _Manager(
        name=name,
        is_ours=name == FIELD_MANAGER and entry.operation == "Apply" and entry.subresource == "status",
        time=_moment(entry.time),
        writes_status=entry.subresource == "status" or (entry.subresource == "" and status is not None),
        owns_status=any(key != "." for key in status or ()),
        clusters=frozenset(cluster for key in items if (cluster := _cluster_of_key(key)) is not None),
        has_list=clusters is not None,
        has_entries=bool(items),
    )


def _of_the_list(managers: Iterable[_Manager]) -> list[_Manager]:
    """Those that own the whole list.

    Of a list with keys, "f:clusters" with nothing below is what is left to whoever has made the list, once its own
    items are gone. Others may have put some there since, so it counts only while nobody at all owns one: then the list
    is empty, or has no keys."""
    managers = list(managers)
    if any(manager.has_entries for manager in managers):
        return []
    return [manager for manager in managers if manager.has_list]


class _ItemKeys(msgspec.Struct, frozen=True, gc=False):
    """What tells an item of status.clusters from the others."""

    clusterID: str


def _part(fields: object, name: str) -> Mapping[str, Any] | None:
    part = fields.get(name) if isinstance(fields, dict) else None
    return part if isinstance(part, dict) else None


def _cluster_of_key(key: str) -> str | None:
    """The cluster of an item in status.clusters: of `k:{"clusterID":"east"}`."""
    if not key.startswith("k:"):
        return None
    try:
        return _ITEM_KEYS.decode(key[2:]).clusterID
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


_ITEM_KEYS = msgspec.json.Decoder(_ItemKeys)


def _moment(time: object) -> float:
    try:
        moment = datetime.fromisoformat(time) if isinstance(time, str) else None
    except ValueError:
        return -math.inf
    return -math.inf if moment is None or moment.tzinfo is None else moment.timestamp()


# --- conflicts


class Conflict(NamedTuple):
    """A field that an apply would have changed, and that is another manager's."""

    #: whose entry in status.clusters it is in; None where it is in none, or cannot be told
    cluster: str | None
    #: its path, in the server's words, one line: `.status.clusters[clusterID="east"].isLocal`; "" where not said
    field: str
    #: the manager's name, one line; "" where not said
    owner: str


#: a string as Go quotes it, and what may follow a backslash in it
_QUOTED = r'"(?:[^"\\]|\\.)*+"'
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_SHORT_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}

_OWNER = re.compile(f"conflicts? with ({_QUOTED})")
_ENTRIES = ".status.clusters["
#: one of the keys of an item, and what comes behind it
_KEY = re.compile(rf'([^=,"\[\]]+)=({_QUOTED}|[^,"\[\]]*)([,\]])')

#: how a message begins that names conflicts, and what is in it: owners, each followed by paths
_APPLY_FAILED = re.compile(r"Apply failed with \d+ conflicts?:")
_NAMED = re.compile(rf'{_OWNER.pattern}|[:-] ((?:\.[^\s."\[\]]+|\[(?:[^"\[\]]|{_QUOTED})*+\])++)(?=\s|$)')


def conflicts(error: ApiError) -> list[Conflict]:
    """The fields for which an apply was refused, in the server's order, each once; empty where it was refused for
    something else, such as an edit that came in between."""
    if error.code != HTTPStatus.CONFLICT:
        return []
    found = [
        _conflict(cause.field, _owner(_OWNER.match(cause.message)))
        for cause in error.causes
        if cause.reason == "FieldManagerConflict"
    ]
    if not found and (start := _APPLY_FAILED.match(error.message)):
        # Something on the way has dropped the details.
        found = _named(error.message[start.end() - 1 :])
    return list(dict.fromkeys(found))


def _named(message: str) -> list[Conflict]:
    """What a message names; at least one, as it says that there is a conflict. It may be cut short."""
    found: list[Conflict] = []
    owner, fields = "", 0
    for match in _NAMED.finditer(message):
        if match[2] is not None:
            found.append(_conflict(match[2], owner))
            fields += 1
            continue
        if owner and not fields:
            found.append(_conflict("", owner))
        owner, fields = _owner(match), 0
    if not fields:
        found.append(_conflict("", owner))
    return found


def _conflict(field: str, owner: str) -> Conflict:
    return Conflict(_cluster_of_path(field), field, owner)


def _owner(match: re.Match[str] | None) -> str:
    return one_line(_unquoted(match[1])) if match else ""


def _cluster_of_path(path: str) -> str | None:
    if not path.startswith(_ENTRIES):
        return None
    place, behind = len(_ENTRIES), ","
    while behind == "," and (match := _KEY.match(path, place)):
        name, value, behind = match.groups()
        if name == "clusterID" and value.startswith('"'):
            return _unquoted(value)
        place = match.end()
    return None


def _unquoted(text: str) -> str:
    """What stands in a string that Go has quoted."""
    return _ESCAPE.sub(_unescaped, text[1:-1])


def _unescaped(match: re.Match[str]) -> str:
    if match[4] is not None:
        return _SHORT_ESCAPES.get(match[4], match[4])
    code = int(match[1] or match[2] or match[3], 16)
    return chr(code) if code < 0xD800 or 0xDFFF < code <= 0x10FFFF else "\ufffd"

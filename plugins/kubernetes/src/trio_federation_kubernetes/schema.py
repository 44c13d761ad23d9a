"""Whether a resource has the fields that a table of paths names, and whether the view of other clusters may be written
into the status of SandboxEnvs, by the OpenAPI v3 document that an API server has of each group and version
(GET /openapi/v3/apis/GROUP/VERSION, /openapi/v3/api/VERSION). Pure: the document is parsed already. What is read from
objects in the end is `table.py`, and what is written is `segments.py`.

For reading, a check that cannot tell says so or keeps silent, since a server need not describe everything that it
serves; only what is certain is a fault. For writing it is the other way round: nothing is written unless the document
says that it leaves the entries of others alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trio_federation_kubernetes.paths import Path
from trio_federation_kubernetes.resources import Resource

#: the fields of `options.Fields` that are read as texts, and as true or false; all others are counts
_TEXTS = frozenset(["env", "pool", "group"])
_FLAGS = frozenset(["autoscaling"])

_REFERENCE = "#/components/schemas/"
_GROUP_VERSION_KIND = "x-kubernetes-group-version-kind"
_WORDS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "an object",
    "string": "a text",
}
#: names that a fault lists where none is near
_MOST_NAMES = 12


class Verdict(NamedTuple):
    """What a schema says of a table of paths."""

    #: a line for each path that leads nowhere, or to something of another type than what is read there
    faults: tuple[str, ...]
    #: the counts that may be written as texts, by their name in the table
    texts: frozenset[str]


def check(document: object, resource: Resource, paths: Mapping[str, Path]) -> Verdict | None:
    """Holds the `paths`, as `options.Fields.paths` gives them, against the schema of a resource. None where the
    document, which may be anything, does not describe it."""
    document = _mapping(document)
    root = _root(document, resource, "read")
    if root is None:
        return None
    if isinstance(root, str):
        return Verdict((root,), frozenset())
    schemas = _schemas(document)
    faults: list[str] = []
    texts: set[str] = set()
    for name, path in paths.items():
        found = _follow(schemas, root, path)
        if isinstance(found, str):
            faults.append(f"fields.{name} {str(path)!r}: {found}")
            continue
        types = _types(schemas, found)
        wanted = _wanted(name)
        if types is not None and not types & wanted:
            faults.append(f"fields.{name} {str(path)!r}: {path} is {_words(types)}, where {_WANTED[wanted]} is read")
        elif name not in _TEXTS | _FLAGS and (types is None or "string" in types):
            texts.add(name)
    return Verdict(tuple(faults), frozenset(texts))


_COUNT_TYPES = frozenset(["integer", "number", "string"])
_TEXT_TYPES = frozenset(["string"])
_FLAG_TYPES = frozenset(["boolean"])
_WANTED = {_COUNT_TYPES: "a whole number", _TEXT_TYPES: "a text", _FLAG_TYPES: "true or false"}


def _wanted(name: str) -> frozenset[str]:
    return _TEXT_TYPES if name in _TEXTS else _FLAG_TYPES if name in _FLAGS else _COUNT_TYPES


# --- whether a status may be written

#: where the definition is that is always good
_DEFINITION = "config/kubernetes/crd/sandboxenvs.yaml"
_LIST_TYPE = "x-kubernetes-list-type"
_LIST_KEYS = "x-kubernetes-list-map-keys"

_COUNT = frozenset(["integer", "number"])
_TEXT = frozenset(["string"])
_FLAG = frozenset(["boolean"])
_OBJECT = frozenset(["object"])

_FEDERATION = {"clusters": _COUNT, "idleReplicas": _COUNT, "lastSnapshotTime": _TEXT}
_ENTRY = {
    "isLocal": _FLAG,
    "lastSnapshotTime": _TEXT,
    "idleReplicas": _COUNT,
    "runningReplicas": _COUNT,
    "desiredReplicas": _COUNT,
}
_GROUP = {"name": _TEXT, "totalIdle": _COUNT, "totalRunning": _COUNT, "totalDesired": _COUNT, "totalPending": _COUNT}
_MEMBER = {
    "name": _TEXT,
    "scalingGroup": _TEXT,
    "idleCount": _COUNT,
    "runningCount": _COUNT,
    "desiredReplicas": _COUNT,
    "pendingRequests": _COUNT,
    "autoscalingEnabled": _FLAG,
    "scaleUpHeadroom": _COUNT,
    "saturatedUntil": _TEXT,
    "state": _TEXT,
}

#: what is written of each of them, whatever is known; an entry has its pools or its sums, and nearly always the former
_ALWAYS_IN_ENTRY = frozenset(["clusterID", "isLocal", "lastSnapshotTime", "observedMembers"])
_ALWAYS_IN_MEMBER = frozenset(
    ["name", "idleCount", "runningCount", "desiredReplicas", "pendingRequests", "autoscalingEnabled"]
)

_CLUSTERS = Path(("status", "clusters"))
_ENTRIES = Path((*_CLUSTERS.steps, 0))
_GROUPS = Path((*_ENTRIES.steps, "scalingGroups"))
_MEMBERS = Path((*_ENTRIES.steps, "observedMembers"))


class StatusFields(NamedTuple):
    """The parts of a SandboxEnv's status that a server takes: those that its schema declares with a type that holds
    what is written, and all of them where the schema keeps fields that it does not know."""

    #: whether status.federation is there, with each of its fields
    federation: bool
    #: in an entry of status.clusters: isLocal, lastSnapshotTime, idleReplicas, runningReplicas, desiredReplicas,
    #: observedMembers and scalingGroups, of these two only lists with keys
    entry: frozenset[str]
    #: in an entry of observedMembers: name, scalingGroup, idleCount, runningCount, desiredReplicas, pendingRequests,
    #: autoscalingEnabled, scaleUpHeadroom, saturatedUntil, state
    member: frozenset[str]


class StatusVerdict(NamedTuple):
    """What a schema says of writing the view of other clusters into a status."""

    #: a line for each reason why nothing may be written, with what to do about it
    faults: tuple[str, ...]
    #: what may be written where there is no fault
    fields: StatusFields


def check_status(document: object, resource: Resource) -> StatusVerdict | None:
    """Whether entries of other clusters may be written into the status of SandboxEnvs, which are `resource`, and which
    of their fields. None where the document, which may be anything, does not describe them."""
    document = _mapping(document)
    root = _root(document, resource, "written")
    if root is None:
        return None
    if isinstance(root, str):
        return StatusVerdict((root,), StatusFields(False, frozenset(), frozenset()))
    schemas = _schemas(document)
    faults = []
    operations = _mapping(_mapping(document.get("paths")).get(f"{resource.path('{namespace}')}/{{name}}/status"))
    if "patch" not in operations:
        faults.append(
            f"{resource} has no status subresource, and nothing else of an object is written; add subresources: "
            f"{{status: {{}}}} to its version in your definition, or install {_DEFINITION}"
        )
    if (fault := _list_fault(schemas, root, _CLUSTERS, "clusterID")) is not None:
        faults.append(fault)

    entries = _follow(schemas, root, _ENTRIES)
    entry = _taken(schemas, entries, _ENTRY)
    members_fault = _list_fault(schemas, root, _MEMBERS, "name")
    if members_fault is None:
        entry |= {"observedMembers"}
    group = _taken(schemas, _follow(schemas, root, Path((*_GROUPS.steps, 0))), _GROUP)
    if group == _GROUP.keys() and _list_fault(schemas, root, _GROUPS, "name") is None:
        entry |= {"scalingGroups"}
    if entries and not isinstance(entries, str):  # else the fault of the list says enough
        if members_fault is not None:
            faults.append(members_fault)
        if "isLocal" not in entry:
            faults.append(
                f"{_shown(_ENTRIES)}.isLocal is not declared as true or false, so entries of other clusters could be "
                f"taken for the cluster's own; declare it with type: boolean in your definition, or install "
                f"{_DEFINITION}"
            )

    members = _follow(schemas, root, Path((*_MEMBERS.steps, 0)))
    for parts, path, always in (
        (entries, _ENTRIES, _ALWAYS_IN_ENTRY),
        (members, Path((*_MEMBERS.steps, 0)), _ALWAYS_IN_MEMBER),
    ):
        if missing := sorted(_required(parts) - always):
            faults.append(
                f"{_shown(path)} requires {', '.join(missing)}, which is not known of every pool or cluster; make it "
                f"optional in your definition, or install {_DEFINITION}"
            )
    summary = _follow(schemas, root, Path(("status", "federation")))
    federation = (
        bool(_taken(schemas, _follow(schemas, root, Path(("status",))), {"federation": _OBJECT}))
        and _taken(schemas, summary, _FEDERATION) == _FEDERATION.keys()
        and _required(summary) <= _FEDERATION.keys()
    )
    return StatusVerdict(tuple(faults), StatusFields(federation, entry, _taken(schemas, members, _MEMBER)))


def _list_fault(schemas: _Part, root: _Part, path: Path, key: str) -> str | None:
    """Why a list is not one of entries that each have an owner, told apart by `key`; None where it is."""
    parts = _follow(schemas, root, path)
    types = None if isinstance(parts, str) else _types(schemas, parts)
    if isinstance(parts, str) or types is None:
        fault = "is not declared as a list"
    elif "array" not in types:
        fault = f"is {_words(types)}, where a list is needed"
    else:
        keys = [_list(part.get(_LIST_KEYS)) for part in parts if part.get(_LIST_TYPE) == "map"]
        if [key] in keys:
            return None
        others = ", ".join(str(other) for other in keys[0]) if keys else ""
        fault = f"is a list with the keys {others} in place of {key}" if others else "is a list without keys"
        fault += ", so an apply would replace entries of others"
    remedy = f"make it a list with {_LIST_TYPE}: map and {_LIST_KEYS}: [{key}] in your definition"
    return f"{_shown(path)} {fault}; {remedy}, or install {_DEFINITION}"


def _shown(path: Path) -> str:
    """A path on which an item stands for each of its list."""
    return str(path).replace("[0]", "[]")


def _taken(schemas: _Part, parts: _Parts | str, wanted: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Of the fields that are `wanted`, with the types that would be written, those that an object of these parts may
    have; no parts describe an object that may have any, and a text is why there is no such object."""
    if isinstance(parts, str):
        return frozenset()
    if not parts:
        return frozenset(wanted)
    found = set()
    for name, types in wanted.items():
        inner = _field(schemas, parts, name)
        if inner is None:
            continue
        declared = _types(schemas, _flat(schemas, inner))
        if declared is None or declared & types:
            found.add(name)
    # Without any properties `_field` cannot tell, but a server that prunes takes none of them.
    return frozenset(found) if _names(schemas, parts) or _keeps_unknown(schemas, parts) else frozenset()


def _required(parts: _Parts | str) -> frozenset[str]:
    """The fields that an object of these parts must have."""
    named = [] if isinstance(parts, str) else [name for part in parts for name in _list(part.get("required"))]
    return frozenset(name for name in named if isinstance(name, str))


# --- where the resource is in the document


def _root(document: Mapping[object, object], resource: Resource, used: str) -> Mapping[object, object] | str | None:
    """The schema of a resource's objects; why they cannot be `used`; None where the document does not describe them."""
    kind = _kind(document, resource.path("{namespace}"))
    if kind is not None:
        return _schema(document, kind)
    if _kind(document, resource.path()) is None:
        return None
    return f"{resource} is cluster-wide; only namespaced resources can be {used}"


#: group, version and kind
_Kind = tuple[str, str, str]


def _kind(document: Mapping[object, object], path: str) -> _Kind | None:
    """What kind of object the operations at a path of the API are about."""
    for operation in _mapping(_mapping(document.get("paths")).get(path)).values():
        found = _group_version_kind(_mapping(operation).get(_GROUP_VERSION_KIND))
        if found is not None:
            return found
    return None


def _schema(document: Mapping[object, object], kind: _Kind) -> Mapping[object, object] | None:
    for schema in _schemas(document).values():
        kinds = _mapping(schema).get(_GROUP_VERSION_KIND)
        if isinstance(kinds, list) and any(_group_version_kind(one) == kind for one in kinds):
            return _mapping(schema)
    return None


def _group_version_kind(value: object) -> _Kind | None:
    found = _mapping(value)
    group, version, kind = found.get("group"), found.get("version"), found.get("kind")
    if isinstance(group, str) and isinstance(version, str) and isinstance(kind, str):
        return group, version, kind
    return None


def _schemas(document: Mapping[object, object]) -> Mapping[object, object]:
    return _mapping(_mapping(document.get("components")).get("schemas"))


def _mapping(value: object) -> Mapping[object, object]:
    return value if isinstance(value, Mapping) else {}


# --- what a schema says: a part is a schema without what it refers to; all parts of a value hold at once

_Part = Mapping[object, object]
_Parts = list[_Part]
#: stands for a schema that is referred to and not there
_OPEN: _Part = {"x-kubernetes-preserve-unknown-fields": True}


def _follow(schemas: _Part, root: _Part, path: Path) -> _Parts | str:
    """The parts that describe what a path leads to; none where that cannot be told. Or why it leads nowhere."""
    parts = _flat(schemas, [root])
    for position, step in enumerate(path.steps):
        if not parts:
            return []
        here = str(Path(path.steps[:position])) if position else "an object of this resource"
        types = _types(schemas, parts)
        if isinstance(step, str):
            if types is not None and "object" not in types:
                advice = f"; name an item of it, such as {here}[0]" if "array" in types else ""
                return f"{here} is {_words(types)} and has no field {step!r}{advice}"
            inner = _field(schemas, parts, step)
            if inner is None:
                return f"{here} has no field {step!r}{_meant(path, position, _names(schemas, parts))}"
        else:
            if types is not None and "array" not in types:
                return f"{here} is {_words(types)}, no list, and so has no item [{step}]"
            inner = [part["items"] for part in parts if isinstance(part.get("items"), Mapping)]
        parts = _flat(schemas, inner)
    return parts


def _field(schemas: _Part, parts: _Parts, name: str) -> list[object] | None:
    """The schemas of a field; none where it cannot be told; None where there is no such field."""
    described = _with_choices(schemas, parts)
    found = [properties[name] for part in described if name in (properties := _mapping(part.get("properties")))]
    if found:
        return found
    others = [
        part["additionalProperties"] for part in described if part.get("additionalProperties", False) is not False
    ]
    if others:
        # true, where anything goes, is none
        return [schema for schema in others if isinstance(schema, Mapping)]
    if any(part.get("x-kubernetes-preserve-unknown-fields") is True for part in described):
        return []
    # an object without any properties is one that is not described: a RawExtension, a resource without a schema
    return None if _names(schemas, parts) else []


def _keeps_unknown(schemas: _Part, parts: _Parts) -> bool:
    """Whether an object may have fields that are not named."""
    return any(
        part.get("x-kubernetes-preserve-unknown-fields") is True or part.get("additionalProperties", False) is not False
        for part in _with_choices(schemas, parts)
    )


def _names(schemas: _Part, parts: _Parts) -> list[str]:
    described = _with_choices(schemas, parts)
    return sorted({name for part in described for name in _mapping(part.get("properties")) if isinstance(name, str)})


def _types(schemas: _Part, parts: _Parts) -> frozenset[str] | None:
    """The JSON types that a value may have, or None where that cannot be told."""
    said: set[str] = set()
    for part in parts:
        said.update(_type_words(part))
    if said:
        return frozenset(said)
    for part in parts:
        for word in ("oneOf", "anyOf"):
            choices = [_flat(schemas, [choice]) for choice in _list(part.get(word))]
            words = [{word for part in choice for word in _type_words(part)} for choice in choices]
            if words and all(words):
                return frozenset().union(*words)
    return frozenset(["object"]) if any("properties" in part for part in parts) else None


def _type_words(part: _Part) -> Iterable[str]:
    words = part.get("type")
    return [
        word for word in (words if isinstance(words, list) else [words]) if isinstance(word, str) and word in _WORDS
    ]


def _with_choices(schemas: _Part, parts: _Parts) -> _Parts:
    """The parts, and those that a value may choose from."""
    choices = [choice for part in parts for word in ("oneOf", "anyOf") for choice in _list(part.get(word))]
    return [*parts, *_flat(schemas, choices)]


def _flat(schemas: _Part, wholes: Iterable[object]) -> _Parts:
    """Schemas with what they refer to and what they are put together from (allOf), each reference once."""
    parts: _Parts = []
    waiting = list(wholes)
    seen: set[str] = set()
    while waiting:
        part = _mapping(waiting.pop())
        parts.append(part)
        waiting.extend(_list(part.get("allOf")))
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            name = reference.removeprefix(_REFERENCE).replace("~1", "/").replace("~0", "~")
            waiting.append(schemas.get(name, _OPEN))
    return [part for part in parts if part]


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


# --- for people


def _words(types: Iterable[str]) -> str:
    return " or ".join(_WORDS[word] for word in sorted(types))


def _meant(path: Path, position: int, names: list[str]) -> str:
    """The end of a line about a step that leads nowhere: the nearest path, or the names that there are."""
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(str(path.steps[position]).casefold(), folded, n=1)
    if near:
        steps = (*path.steps[:position], folded[near[0]], *path.steps[position + 1 :])
        return f'; did you mean "{Path(steps)}"?'
    more = ", …" if len(names) > _MOST_NAMES else ""
    return f"; valid here: {', '.join(names[:_MOST_NAMES])}{more}"

"""Whether a resource has the fields that a table of paths names, by the OpenAPI v3 document that an API server has of
each group and version (GET /openapi/v3/apis/GROUP/VERSION, /openapi/v3/api/VERSION). Pure: the document is parsed
already. A check that cannot tell says so or keeps silent, since a server need not describe everything that it serves;
only what is certain is a fault. What is read from objects in the end is `table.py`."""

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
    kind = _kind(document, resource.path("{namespace}"))
    if kind is None:
        if _kind(document, resource.path()) is None:
            return None
        return Verdict((f"{resource} is cluster-wide; only namespaced resources can be read",), frozenset())
    root = _schema(document, kind)
    if root is None:
        return None
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


# --- where the resource is in the document

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

"""What an API server makes of a write to a custom object's status, pure: server-side apply with its conflicts and
removals, updates by merge patch, and who owns which field afterwards (`metadata.managedFields`), by the schema in the
CustomResourceDefinition. It follows what Kubernetes does (structured-merge-diff, and the field managers above it) as
far as SandboxEnvs go: objects, map lists, all other lists atomic, fields that the schema does not know; one version of
a resource, one thing at a time. Nobody owns metadata here, and there is no bound on how many managers are remembered.
tests/apiserver/test_fake_apply_is_true.py holds it against the real thing. Versions of objects, and who is told of a
change, are `fake_api.py`'s."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from trio_federation_kubernetes.errors import Cause

Json: TypeAlias = dict[str, Any]
#: of an openAPIV3Schema; {} for what is not described
Schema: TypeAlias = Mapping[str, Any]
#: by elements as they stand in FieldsV1: "f:status", 'k:{"clusterID":"east"}'
Path: TypeAlias = tuple[str, ...]
Paths: TypeAlias = frozenset[Path]

#: who owns what was there before anybody's fields were noted
BEFORE_FIRST_APPLY = "before-first-apply"
_KEYS = "x-kubernetes-list-map-keys"
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int, float),
    "number": (int, float),
}
#: what is called what in complaints
_WORDS = {"object": "map", "array": "list", "integer": "numeric (int or float)", "number": "numeric (int or float)"}


class Refused(Exception):
    """The write is refused; nothing has changed. `reason` and `causes`: as in the Status object that says so."""

    def __init__(self, code: int, reason: str, message: str, causes: Iterable[Cause] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.causes = tuple(causes)


class Manager(NamedTuple):
    """Somebody who owns fields."""

    name: str
    #: "Apply" or "Update"
    operation: str
    #: "agents.navix.sh/v1alpha1"
    version: str
    subresource: str = ""

    def __str__(self) -> str:
        """As conflicts name it."""
        said = json.dumps(self.name)
        if self.subresource:
            said += f' with subresource "{self.subresource}"'
        return f"{said} using {self.version}" if self.operation == "Update" else said


@dataclass(frozen=True, slots=True)
class Owned:
    """What somebody owns, and when (by the server's clock, RFC 3339) that has last changed anything."""

    paths: Paths
    time: str | None


Owners: TypeAlias = dict[Manager, Owned]


# --- what a server does


def apply(schema: Schema, found: Json, body: Mapping[str, Any], name: str, *, now: str, force: bool = False) -> Json:
    """Apply `body` to the status of `found`, as the manager `name`. Returns the object as it is afterwards, `found`
    itself where nothing changes; neither is touched. `now`: RFC 3339. Raises Refused."""
    whole = f"{found['metadata']['namespace']}/{found['metadata']['name']}; {found['apiVersion']}, Kind={found['kind']}"
    live, applied = _part(found, "status"), _part(body, "status")
    for complaint in _mistyped(schema, applied, ""):
        raise Refused(500, "", f"failed to create typed patch object ({whole}): {complaint}")
    me = Manager(name, "Apply", found["apiVersion"], "status")
    owners = owners_of(found)
    if not owners:
        before = Manager(BEFORE_FIRST_APPLY, "Update", found["apiVersion"], "status")
        owners = {before: Owned(_compare(schema, {}, live).touched, now)}
    last = owners.pop(me, Owned(frozenset(), None))
    mine = _leaves(schema, applied)
    owned = mine.union(*(theirs.paths for theirs in owners.values()))
    merged = _pruned(schema, _merged(schema, live, applied), last.paths, owned)
    change = _compare(schema, live, merged)
    conflicts = {owner: theirs.paths & change.touched for owner, theirs in owners.items()}
    if any(conflicts.values()) and not force:
        raise _conflict({owner: paths for owner, paths in conflicts.items() if paths})
    owners = {owner: Owned(theirs.paths - change.any, theirs.time) for owner, theirs in owners.items()}
    owners[me] = Owned(mine, last.time if merged == live else now)
    _check(schema, found, merged, "status")
    return _after(found, merged, owners, "status")


def update(
    schema: Schema,
    found: Json,
    body: Mapping[str, Any],
    name: str,
    *,
    now: str,
    part: str = "status",
    created: bool = False,
    checked: bool = True,
) -> Json:
    """Put `body`'s status in place of that of `found`, as an update by the manager `name`. Returns as `apply` does.

    `part`: "spec", where that is written instead. `created`: `found` is new, so that its fields are noted from the
    start; an object that has no owners yet gets none by an update. Without `checked`, values are not held against the
    schema."""
    live, new = _part(found, part), _part(body, part)
    if checked:
        _check(schema, found, new, part)
    if any(_mistyped(schema, new, "")):
        return _after(found, new, {}, part)  # a server does not know then what is owned
    change = _compare(schema, live, new)
    owners = owners_of(found)
    if owners or created:
        me = Manager(name, "Update", found["apiVersion"], part if part == "status" else "")
        owners = {owner: Owned(owned.paths - change.any, owned.time) for owner, owned in owners.items()}
        if change.touched:
            owners[me] = Owned(change.touched | owners.get(me, Owned(frozenset(), None)).paths, now)
    return _after(found, new, owners, part)


def merge_patch(schema: Schema, found: Json, body: Mapping[str, Any], name: str, *, now: str) -> Json:
    """Patch the status of `found` as RFC 7386 has it, as an update by the manager `name`. Returns as `apply` does."""
    return update(schema, found, _patched(_part(found, "status"), _part(body, "status")), name, now=now)


def owners_of(found: Mapping[str, Any]) -> Owners:
    """Who owns what of an object."""
    return {
        Manager(each["manager"], each["operation"], each["apiVersion"], each.get("subresource", "")): Owned(
            frozenset(_members(each["fieldsV1"])), each.get("time")
        )
        for each in found["metadata"].get("managedFields", ())
    }


def fields(paths: Paths) -> Json:
    """A set of paths in the form of FieldsV1."""
    tree: Json = {}
    for path in sorted(paths):
        inner = tree
        for element in path:
            inner = inner.setdefault(element, {})
    for path in paths:
        inner = tree
        for element in path:
            inner = inner[element]
        if inner:
            inner["."] = {}
    return tree


# --- inside


def _part(whole: Mapping[str, Any], name: str) -> Json:
    return {name: whole[name]} if name in whole else {}


def _members(tree: Json, path: Path = ()) -> Iterator[Path]:
    for element, inner in tree.items():
        if element == ".":
            continue
        here = (*path, element)
        if not inner or "." in inner:
            yield here
        yield from _members(inner, here)


def _inside(schema: Schema, element: str) -> Schema:
    """The schema of an element of what a schema describes."""
    found = schema.get("properties", {}).get(element[2:], {}) if element[0] == "f" else schema.get("items", {})
    assert isinstance(found, dict)
    return found


def _named(schema: Schema, element: str) -> bool:
    """Whether it is a field that the schema knows: such a one is there because of what is in it."""
    return element[0] == "f" and element[2:] in schema.get("properties", {})


def _elements(schema: Schema, value: object) -> Json | None:
    """What a value is made of; None where it is a leaf."""
    if isinstance(value, dict):
        return {f"f:{name}": inner for name, inner in value.items()}
    if isinstance(value, list) and _KEYS in schema:
        return {_key(schema, item): item for item in value}
    return None


def _key(schema: Schema, item: Mapping[str, Any]) -> str:
    return _written_key(tuple((name, item[name]) for name in sorted(schema[_KEYS])))


@functools.cache
def _written_key(values: tuple[tuple[str, object], ...]) -> str:
    return "k:" + json.dumps(dict(values), separators=(",", ":"))


def _leaves(schema: Schema, value: object) -> Paths:
    """What somebody owns who applies this."""
    found: set[Path] = set()

    def look(schema: Schema, value: object, path: Path) -> None:
        elements = _elements(schema, value)
        if elements is None:
            found.add(path)
            return
        for element, inner in elements.items():
            here = (*path, element)
            look(_inside(schema, element), inner, here)
            # `==`: an empty list is something else
            if inner is None or inner == {} or not _named(schema, element):
                found.add(here)

    look(schema, value, ())
    return frozenset(found)


class _Change(NamedTuple):
    """The paths of what is different in a value after another."""

    #: new, or not as it was
    touched: Paths
    removed: Paths

    @property
    def any(self) -> Paths:
        return self.touched | self.removed


_NOTHING = object()


def _compare(schema: Schema, old: object, new: object) -> _Change:
    touched: set[Path] = set()
    removed: set[Path] = set()

    def look(schema: Schema, old: object, new: object, path: Path) -> None:
        before, after = _elements(schema, old), _elements(schema, new)
        # null is as good as empty
        before = {} if old is None and after is not None else before
        after = {} if new is None and before is not None else after
        if old is _NOTHING:
            touched.add(path)
        elif new is _NOTHING:
            removed.add(path)
        elif old != new and (before is None or after is None or not (before or after)):
            touched.add(path)
        for element in {**(before or {}), **(after or {})}:
            inner = _inside(schema, element)
            look(inner, (before or {}).get(element, _NOTHING), (after or {}).get(element, _NOTHING), (*path, element))

    look(schema, old, new, ())
    return _Change(frozenset(touched), frozenset(removed))


def _merged(schema: Schema, old: Any, new: Any) -> Any:
    """`old` with all that is in `new`."""
    before, after = _elements(schema, old), {} if new is None else _elements(schema, new)
    if not before or after is None:
        return new
    both = {
        element: _merged(_inside(schema, element), before[element], inner) if element in before else inner
        for element, inner in after.items()
    }
    if isinstance(old, dict):
        return {element[2:]: inner for element, inner in (before | both).items()}
    return [both.get(element, before.get(element)) for element in _order(list(before), list(after))]


def _order(old: list[str], new: list[str]) -> Iterator[str]:
    """The order of a merged list: those in both are as in the new one, and the others of the old one stay where they
    are among them."""
    shared = iter([element for element in new if element in old])
    awaited = next(shared, None)
    told: set[str] = set()
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new):
            if old[i] == new[j]:
                told.add(old[i])
                yield old[i]
                awaited = next(shared, None)
                i, j = i + 1, j + 1
                continue
            if old[i] in new and awaited is not None and awaited != old[i]:
                i += 1
                continue
        if i < len(old):
            if old[i] not in new:
                yield old[i]
                i += 1
                continue
            if old[i] in told:
                i += 1
        if j < len(new):
            told.add(new[j])
            yield new[j]
            if new[j] == awaited:
                awaited = next(shared, None)
            j += 1


def _pruned(schema: Schema, merged: Json, last: Paths, owned: Paths) -> Json:
    """Without what the manager has applied before (`last`), and nobody owns now."""
    if not last:
        return merged
    last = _with_named(schema, last)
    there = _with_named(schema, _leaves(schema, merged))

    def left(pruned: Json) -> Paths:
        return _with_named(schema, _leaves(schema, pruned))

    pruned = _without(schema, merged, last)
    # What is owned comes back, and then what was not this manager's.
    pruned = _without(schema, merged, there - (left(pruned) | _with_named(schema, owned)))
    return _without(schema, merged, (there - left(pruned)) & last)


def _with_named(schema: Schema, paths: Paths) -> Paths:
    """With the fields that the schema knows above them."""
    found = set(paths)
    schemas: dict[Path, Schema] = {(): schema}

    def look(above: Path) -> Schema:
        if above not in schemas:
            outer, element = look(above[:-1]), above[-1]
            if _named(outer, element):
                found.add(above)
            schemas[above] = _inside(outer, element)
        return schemas[above]

    for path in paths:
        look(path[:-1])
    return frozenset(found)


def _without(schema: Schema, value: Json, doomed: Paths) -> Json:
    above = {path[:length] for path in doomed for length in range(len(path))}

    def look(schema: Schema, value: Any, path: Path) -> Any:
        elements = _elements(schema, value)
        if elements is None:
            return None if isinstance(value, list) else value
        kept = {}
        for element, inner in elements.items():
            here = (*path, element)
            if here not in doomed:
                kept[element] = look(_inside(schema, element), inner, here) if here in above else inner
        # So it is: where all of it goes, and it has to stay itself, there is null, which is found bad in the end.
        if not kept:
            return None
        return {name[2:]: inner for name, inner in kept.items()} if isinstance(value, dict) else list(kept.values())

    return look(schema, value, ()) or {}


def _patched(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for name, inner in patch.items():
        if inner is None:
            new.pop(name, None)
        else:
            new[name] = _patched(new.get(name), inner)
    return new


def _conflict(conflicts: Mapping[Manager, Paths]) -> Refused:
    found = [(owner, _shown(path)) for owner in sorted(conflicts) for path in sorted(conflicts[owner], key=_depth_last)]
    causes = [Cause("FieldManagerConflict", path, f"conflict with {owner}") for owner, path in found]
    if len(found) == 1:
        said = f"1 conflict: conflict with {found[0][0]}: {found[0][1]}"
    else:
        lines = [f"{len(found)} conflicts: "]
        for owner in sorted(conflicts):
            lines += [f"conflicts with {owner}:", *(f"- {path}" for who, path in found if who == owner)]
        said = lines[0] + "\n".join(lines[1:])
    return Refused(409, "Conflict", f"Apply failed with {said}", causes)


def _depth_last(path: Path) -> tuple[tuple[bool, str], ...]:
    """The order in which the members of a set are told: of each level first those that are in the set themselves."""
    return tuple((position < len(path) - 1, element) for position, element in enumerate(path))


def _shown(path: Path) -> str:
    return "".join(f".{element[2:]}" if element[0] == "f" else _shown_key(element) for element in path)


def _shown_key(element: str) -> str:
    return f"[{','.join(f'{name}={json.dumps(value)}' for name, value in json.loads(element[2:]).items())}]"


def _check(schema: Schema, found: Json, new: Json, part: str) -> None:
    if not new or new == _part(found, part):
        return
    if faults := list(_invalid(_inside(schema, f"f:{part}"), new[part], part)):
        said = ", ".join(f"{fault.field}: {fault.message}" for fault in faults)
        said = f"[{said}]" if len(faults) > 1 else said
        what = f'{found["kind"]}.{found["apiVersion"].partition("/")[0]} "{found["metadata"]["name"]}"'
        raise Refused(422, "Invalid", f"{what} is invalid: {said}", faults)


def _after(found: Json, new: Json, owners: Owners, part: str) -> Json:
    """The object as it is afterwards."""
    metadata = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    if entries := [_entry(manager, owned) for manager, owned in owners.items() if owned.paths]:
        metadata["managedFields"] = sorted(
            entries, key=lambda e: (e["operation"], e.get("time", ""), e["manager"], e.get("subresource", ""))
        )
    after = {**{name: value for name, value in found.items() if name != part}, "metadata": metadata, **new}
    return found if after == found else after


def _entry(manager: Manager, owned: Owned) -> Json:
    return {
        "manager": manager.name,
        "operation": manager.operation,
        "apiVersion": manager.version,
        **({} if owned.time is None else {"time": owned.time}),
        "fieldsType": "FieldsV1",
        "fieldsV1": fields(owned.paths),
        **({"subresource": manager.subresource} if manager.subresource else {}),
    }


def _mistyped(schema: Schema, value: object, path: str) -> Iterator[str]:
    """What is found wrong with something that is applied, before it is looked at any further."""
    kind = schema.get("type")
    if kind is None or value is None:
        return
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{path}: expected {_WORDS.get(kind, kind)}, got {json.dumps(value)}"
        return
    if isinstance(value, list) and _KEYS in schema:
        keys = schema[_KEYS]
        seen = set()
        for position, item in enumerate(value):
            if not isinstance(item, dict) or not any(key in item for key in keys):
                omitted = json.dumps(keys).replace(", ", " ")
                yield (
                    f"{path}: element {position}: associative list with keys has an element that omits all key fields "
                    f"{omitted} (and doesn't have default values for any key fields)"
                )
                return
            if (key := _key(schema, item)) in seen:
                yield f"{path}: duplicate entries for key {_shown_key(key)}"
            seen.add(key)
    for element, inner in (_elements(schema, value) or {}).items():
        yield from _mistyped(_inside(schema, element), inner, path + _shown((element,)))


def _invalid(schema: Schema, value: Any, path: str) -> Iterator[Cause]:
    """What is found wrong with an object before it is stored; not all that a schema may ask for."""
    kind = schema.get("type")
    if kind is None:
        return
    above, _, inside = path.partition(".")
    said = '"null"' if value is None else json.dumps(value)

    def bad(type_of: str, what: str) -> Cause:
        return Cause(f"FieldValue{type_of}Invalid", path, f"Invalid value: {said}: {inside} in body {what}")

    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield bad("Type", f"must be of type {kind}: {said}")
    elif isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                yield Cause("FieldValueRequired", f"{path}.{name}", "Required value")
        for name, inner in value.items():
            yield from _invalid(_inside(schema, f"f:{name}"), inner, f"{path}.{name}")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _invalid(schema.get("items", {}), item, f"{path}[{position}]")
    elif isinstance(value, str):
        if len(value) < (least := schema.get("minLength", 0)):
            yield bad("", f"should be at least {least} chars long")
        if schema.get("format") == "date-time" and not _is_time(value):
            yield bad("Type", f"must be of type date-time: {said}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if value < (least := schema.get("minimum", value)):
            yield bad("", f"should be greater than or equal to {least}")
        if isinstance(value, float) and not value.is_integer() and kind == "integer":
            yield bad("Type", 'must be of type int32: "float64"')
        if schema.get("format") == "int32" and not (-(2**31) <= value < 2**31 and value == int(value)):
            words = f"Checked value must be of type integer with format int32 in {inside}"
            yield Cause("FieldValueInvalid", above, f'Invalid value: "": {words}')


def _is_time(text: str) -> bool:
    try:
        return "T" in text and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False

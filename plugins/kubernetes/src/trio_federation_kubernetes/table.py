"""Any pool-like resource as rows of capacity, by a table of paths: the mapper of the source type "crd". An object is
one pool. Here is which parts of the objects are decoded, and what the values at the paths come to; pure. How a path is
written is `paths.py`, which of them an operator may give `options.py`, whether a resource has them `schema.py`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from keyword import iskeyword
from typing import Any, TypeAlias, cast

import msgspec

from trio_federation import Capacity
from trio_federation_kubernetes.decoding import Decoder, Misfit
from trio_federation_kubernetes.mapping import Watched
from trio_federation_kubernetes.options import CrdOptions
from trio_federation_kubernetes.paths import Path
from trio_federation_kubernetes.resources import Key, Row

#: what can be a value in a record; anything else is decoded into a Misfit
_Scalar: TypeAlias = bool | int | float | str | None

#: A text for a count: more digits are no count anyway.
_DIGITS = re.compile(r"[0-9]{1,20}")
#: Characters that are kept of a text; no name that is longer is good.
_LONGEST_TEXT = 300


class TableMapper:
    """Maps one resource's objects, one row each; a `mapping.Mapper`.

    Counts (idle, running, pending, desired, ceiling) are whole numbers, as JSON Schema has them: 10.0 is one. A text of
    digits is one, too, where a text may stand. Absent or null is 0. The env and the pool are texts and must be there;
    the group is a text or absent. A value that breaks this is put into the record all the same: what checks every
    record then drops this one, and counts it.

    Whether the pool can grow: where `autoscaling` has a path, what that says (true or false; absent is false), else
    whether there is a ceiling. The headroom is what is left from desired to the ceiling, or from idle + running where
    desired is not said; without a ceiling it is -1, no ceiling."""

    def __init__(self, cluster_id: str, options: CrdOptions, texts: Collection[str] | None = None) -> None:
        self._cluster_id = cluster_id
        paths = options.fields.paths()
        struct, self._ways = _compiled(paths)
        #: The counts of `options.fields` for which the resource's schema allows texts; None where the schema is not
        #: known, which allows them for all. May be set until the first object is taken.
        self.texts = texts
        self._row_of: dict[Key, Row] = {}
        self.watched: tuple[Watched, ...] = (Watched(options.watched(), Decoder(struct)),)

    def take(self, index: int, key: Key, object: Any | None) -> Iterable[Key]:
        """The object is now this, or gone (None); it is its own owner."""
        if object is None:
            self._row_of.pop(key, None)
        else:
            self._row_of[key] = Row(self._record(key, object))
        return (key,)

    def rows(self, owner: Key) -> Sequence[Row]:
        """The one row of an object, or none when it is gone."""
        row = self._row_of.get(owner)
        return () if row is None else (row,)

    def _record(self, key: Key, pool: msgspec.Struct) -> Capacity:
        found = {name: _follow(pool, way) for name, way in self._ways.items()}
        counts = {name: self._count(name, found.get(name)) for name in ("idle", "running", "pending", "desired")}
        enabled = found.get("ceiling") is not None
        if "autoscaling" in self._ways:
            flag = found["autoscaling"]
            # a number must not pass as a truth value, nor be equal to one
            enabled = cast(bool, False if flag is None else flag if isinstance(flag, bool) else _misfit(flag))
        used = counts["desired"]
        if found.get("desired") is None:
            used = _sum(counts["idle"], counts["running"])
        return Capacity(
            self._cluster_id,
            key[0],
            # what has no name is a fault here; an empty one of a pool would make an aggregate row of it
            cast(str, _text(found["env"]) or None),
            cast(str, _text(found["pool"]) or None),
            cast(str, _text(found.get("group")) or ""),
            idle=cast(int, counts["idle"]),
            running=cast(int, counts["running"]),
            pending=cast(int, counts["pending"]),
            desired=cast(int, counts["desired"]),
            autoscaling_enabled=enabled,
            capacity=cast(int, self._headroom(found.get("ceiling"), enabled, used)),
        )

    def _headroom(self, found: object, enabled: object, used: object) -> object:
        if found is None:
            return -1 if enabled is True else 0
        ceiling = self._count("ceiling", found)
        if not isinstance(ceiling, int):
            return ceiling
        if ceiling < 0:
            # -1 as a headroom is no fault, but means that there is no ceiling; this is none that is known to mean so
            return f"ceiling {ceiling}"
        if ceiling >= 2**31:
            return ceiling
        if enabled is not True or not isinstance(used, int):
            return 0
        return max(0, ceiling - used)

    def _count(self, name: str, found: object) -> object:
        """An int, which may be out of range, or what is no count at all."""
        match found:
            case None:
                return 0
            case bool():
                # not as it is: True is equal to 1, so that a change from the one to the other would not be seen
                return _misfit(found)
            case float() if found.is_integer():
                return int(found)
            case str() if (self.texts is None or name in self.texts) and _DIGITS.fullmatch(found):
                return int(found)
            case float() | str():
                return _misfit(found)
            case _:
                return found


def _text(found: object) -> object:
    if isinstance(found, str):
        return found[:_LONGEST_TEXT]
    return found if found is None or isinstance(found, Misfit) else _misfit(found)


def _sum(one: object, other: object) -> object:
    return one + other if isinstance(one, int) and isinstance(other, int) else None


def _misfit(value: object) -> Misfit:
    return Misfit.of(msgspec.json.encode(value).decode())


# --- from paths to what is decoded

#: how a value is reached in a decoded object: names of attributes, and numbers of items
_Way: TypeAlias = tuple[str | int, ...]


def _follow(pool: msgspec.Struct, way: _Way) -> object:
    """What stands at the end of a way: a scalar; None where it, or anything before it, is absent or null; or the Misfit
    that stands in the way."""
    value: object = pool
    for step in way:
        if isinstance(step, str):
            if not isinstance(value, msgspec.Struct):
                return value
            value = getattr(value, step)
        else:
            if not isinstance(value, list):
                return value
            value = value[step] if step < len(value) else None
    return value


class _Node:
    """What is read at one place of the objects: fields of an object, or items of a list; else a scalar."""

    def __init__(self, attribute: str) -> None:
        #: what the place is called in the struct above it
        self.attribute = attribute
        self.fields: dict[str, _Node] = {}
        #: what every item is decoded into
        self.item: _Node | None = None

    def field(self, name: str) -> _Node:
        if name not in self.fields:
            # a generated name has an underscore at its start, which no other one has
            plain = name.isascii() and name.isidentifier() and not name.startswith("_") and not iskeyword(name)
            self.fields[name] = _Node(name if plain else f"_{len(self.fields)}")
        return self.fields[name]

    def items(self) -> _Node:
        if self.item is None:
            self.item = _Node("")
        return self.item

    def as_struct(self) -> type[msgspec.Struct]:
        """The struct of the fields that are read of an object at this place."""
        return msgspec.defstruct(
            "Pool",
            [(field.attribute, field.as_type(), None) for field in self.fields.values()],
            rename={field.attribute: name for name, field in self.fields.items()},
        )

    def as_type(self) -> Any:
        """What a value at this place is decoded into."""
        if self.fields:
            return self.as_struct() | None
        if self.item is not None:
            return list[self.item.as_type()] | None  # type: ignore[misc]
        return _Scalar


def _compiled(paths: Mapping[str, Path]) -> tuple[type[msgspec.Struct], dict[str, _Way]]:
    """A struct that holds just what the paths lead to, and the way to each of them in it."""
    root = _Node("")
    ways: dict[str, _Way] = {}
    for name, path in paths.items():
        node, way = root, list[str | int]()
        for step in path.steps:
            if isinstance(step, str):
                node = node.field(step)
                way.append(node.attribute)
            else:
                node = node.items()
                way.append(step)
        ways[name] = tuple(way)
    return root.as_struct(), ways

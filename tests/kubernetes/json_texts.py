"""JSON as an API server, or whoever wrote an object to it, may send it: texts that Python's own encoder would not
write, and values that do not fit where they stand. For the tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st


class Verbatim(str):
    """Stands for itself in the JSON that `dump` writes: `1e400`, `{"a":1,"a":2}`."""

    __slots__ = ()


def dump(value: object) -> bytes:
    """JSON, as UTF-8; lone surrogates become bytes that are no UTF-8."""
    return _text(value).encode("utf-8", "surrogateescape")


def _text(value: object) -> str:
    match value:
        case Verbatim():
            return str(value)
        case dict():
            return "{" + ",".join(f"{json.dumps(key)}:{_text(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(_text(each) for each in value) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def listed(*objects: object, **metadata: object) -> bytes:
    """A list as the API server sends it."""
    found: dict[str, object] = {"resourceVersion": "1", **metadata}
    return dump({"kind": "List", "metadata": found, "items": list(objects)})


def nested(depth: int) -> Verbatim:
    """Arrays in arrays."""
    return Verbatim("[" * depth + "]" * depth)


#: values that are none of: a count, true or false, a text, a time, an object, null. Some are lists, though.
ODD = st.sampled_from(
    [1.5, -0.5, Verbatim("1.0"), Verbatim("1e400"), Verbatim("-1e999"), Verbatim("9" * 5000), Verbatim('"\udcff"')]
) | st.lists(st.sampled_from([None, 1, "x", True, Verbatim("1e400")]), min_size=1, max_size=3)

_WORDS = st.sampled_from(["", "10", "500m", "10%", "true", "null", "-1", "a\N{LINE SEPARATOR}b", "x" * 1000])
_OBJECTS = st.sampled_from([{}, {"name": "x"}, {"a": [1]}, Verbatim('{"name":"a","name":1}')])

#: what a count cannot be, in or out of range
NO_COUNT = ODD | _WORDS | _OBJECTS | st.booleans() | st.integers(max_value=-2) | st.integers(min_value=2**31)
NO_BOOL = ODD | _WORDS | _OBJECTS | st.integers()
NO_TEXT = ODD | _OBJECTS | st.booleans() | st.integers()
NO_OBJECT = ODD | _WORDS | st.booleans() | st.integers()

#: any JSON at all
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | ODD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def places(value: object) -> Iterator[tuple[str | int, ...]]:
    """Every place in a value, as the keys and indexes that lead to it; the value itself is ()."""
    yield ()
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        for rest in places(each):
            yield (key, *rest)


def standing_at(value: Any, place: tuple[str | int, ...]) -> Any:
    """What is at one place; None where it, or anything on the way, is absent, null or of another kind."""
    for key in place:
        if isinstance(key, str):
            value = value.get(key) if isinstance(value, dict) else None
        else:
            value = value[key] if isinstance(value, list) and key < len(value) else None
    return value


def replaced(value: Any, place: tuple[str | int, ...], new: object) -> Any:
    """A copy with something else at one place."""
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy

"""Help for people whose settings are wrong: the nearest valid name to a misspelt one, and every fault of a plugin's
table at once, where msgspec would stop at the first. What a table may say is declared by the Structs of the plugins;
values are never shown, as one may be a secret in the wrong place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Union

import msgspec
from msgspec import inspect

#: msgspec's names of types, which are those of JSON and Python, as a person who writes TOML would call them
_WORDS = {
    "array": "an array",
    "bool": "true or false",
    "date": "a date",
    "datetime": "a date and time",
    "float": "a number",
    "int": "a whole number",
    "object": "a table",
    "str": "a string",
    "time": "a time",
}


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The name among `valid` that `word` was probably meant to be, or None where nothing is close.

    Case and the choice between "-" and "_" do not count, and the answer does not depend on the order of `valid`."""
    folded: dict[str, str] = {}
    for name in sorted(valid):
        folded.setdefault(_fold(name), name)
    close = difflib.get_close_matches(_fold(word), folded, n=1)
    return folded[close[0]] if close else None


def _fold(name: str) -> str:
    return name.casefold().replace("-", "_")


def did_you_mean(word: str, valid: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about an unknown `word`: `; did you mean "x"?`, or `otherwise` where nothing is close."""
    found = nearest(word, valid)
    return otherwise if found is None else f'; did you mean "{found}"?'


def every_fault(value: object, struct: type[msgspec.Struct], path: str) -> list[str]:
    """Why `value` cannot be converted to `struct`: each fault a line that starts with its key path; empty if it can.

    Keys that the Struct does not have are faults, also where it would ignore them. `path` is where `value` stands, for
    instance "source[0]". A field's `msgspec.Meta(description=…)`, where it has one, says what was expected. Raises what
    msgspec raises for a Struct that it cannot handle."""
    return _faults(value, inspect.type_info(struct), struct, path)


def _faults(value: object, info: inspect.Type, annotation: Any, path: str) -> list[str]:
    """The faults of the parts, or else those that only the whole can have, such as a length or what a `__post_init__`
    finds."""
    faults = _faults_of_parts(value, info, path)
    if faults:
        return faults
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        return [_line(error, _description(info), path)]
    return []


def _faults_of_parts(value: object, info: inspect.Type, path: str) -> list[str]:
    if isinstance(info, inspect.Metadata):
        return _faults_of_parts(value, info.type, path)
    if isinstance(value, Mapping):
        if isinstance(info, inspect.StructType):
            return _faults_of_struct(value, info, path)
        if isinstance(info, inspect.UnionType):
            return _faults_of_union(value, info, path)
    elif isinstance(value, list | tuple):
        # msgspec allows at most one kind of list in a union
        kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
        for kind in kinds:
            if isinstance(kind, inspect.CollectionType):
                items = enumerate(value)
                return [fault for i, item in items for fault in _faults_of_item(item, kind.item_type, f"{path}[{i}]")]
    return []


def _faults_of_item(item: object, info: inspect.Type, path: str) -> list[str]:
    """The faults of one item of a list of tables. For a list of plain values, msgspec's first fault of the whole list
    is precise enough."""
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    structs = [kind.cls for kind in kinds if isinstance(kind, inspect.StructType)]
    if len(structs) < len(kinds):
        return []
    return _faults(item, info, Union[tuple(structs)], path)  # noqa: UP007 - the members are not known before


def _faults_of_struct(value: Mapping[str, object], info: inspect.StructType, path: str) -> list[str]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(info.cls)}
    kinds = {field.encode_name: field.type for field in info.fields}
    known = sorted(fields) if info.tag_field is None else sorted({*fields, info.tag_field})
    faults = []
    for key, item in value.items():
        if key in fields:
            faults += _faults(item, kinds[key], fields[key].type, f"{path}.{key}")
        elif key not in known:
            meant = did_you_mean(key, known, f"; valid here: {', '.join(known) or 'none'}")
            faults.append(f"{path}.{_key(key)}: unknown key{meant}")
    for key, field in fields.items():
        if field.required and key not in value:
            faults.append(f"{path}.{key}: is missing; the table needs it")
    return faults


def _faults_of_union(value: Mapping[str, object], info: inspect.UnionType, path: str) -> list[str]:
    """Those of the one kind of table that `value` claims to be, by its tag where there are several."""
    structs = [kind for kind in info.types if isinstance(kind, inspect.StructType)]
    if not structs:
        return []
    if len(structs) == 1:
        return _faults(value, structs[0], structs[0].cls, path)
    # msgspec sees to it that the tables of one union share a tag field and differ in their tags
    tag_field = str(structs[0].tag_field)
    tags = {struct.tag: struct for struct in structs}
    choice = ", ".join(sorted(map(str, tags)))
    if tag_field not in value:
        return [f"{path}.{tag_field}: is missing; write one of {choice}"]
    tag = value[tag_field]
    if isinstance(tag, str | int) and tag in tags:
        return _faults(value, tags[tag], tags[tag].cls, path)
    return [f"{path}.{tag_field}: is none of {choice}{did_you_mean(str(tag), map(str, tags))}"]


def _description(info: inspect.Type) -> str:
    """What a field holds, as far as its author or its list of words tells, or "". An optional field is a union."""
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    for kind in kinds:
        if isinstance(kind, inspect.Metadata) and kind.extra_json_schema is not None:
            return str(kind.extra_json_schema.get("description", ""))
        if isinstance(kind, inspect.LiteralType):
            return f"one of {', '.join(map(str, kind.values))}"
    return ""


def _line(error: msgspec.ValidationError, description: str, path: str) -> str:
    """msgspec's text for people, path first: "Expected `int`, got `str` - at `$.a`" becomes "PATH.a: expected a whole
    number, got a string"."""
    text, _, place = str(error).partition(" - at `$")
    place = place.rstrip("`")
    if error.__cause__ is None:  # else these are the words of a __post_init__, which are left as they are
        if text.startswith("Invalid"):  # "Invalid enum value 'x'": all others name types, this one shows the value
            text = "expected one of the values that are valid here"
        if description and not place:
            _, comma, got = text.partition(", got ")
            text = f"expected {description}{comma}{got}"
        text = re.sub("`([^`]*)`", lambda quoted: _words(quoted[1]), text[:1].lower() + text[1:])
    return f"{path}{place}: {text}"


def _words(types: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | ") if name != "null")


def _key(key: str) -> str:
    """A key from outside, fit for one line."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", key) else repr(key[:64])

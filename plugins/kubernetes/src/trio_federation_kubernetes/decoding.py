"""From the API server's bytes to objects: pages of a list and events of a watch, decoded into just those fields that a
mapper reads, and nothing of the bytes kept. Whole pages are decoded at once, into structs. Only where something in them
does not fit, object by object and then value by value, so that a bad value costs nothing but itself: a `Misfit` stands
in its place. What the values mean is the mappers' business, what is asked for the reflector's; how the Status object of
an ERROR event is read is `status.py`."""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from trio_federation_kubernetes.errors import AnswerError, ApiError
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.status import Status
from trio_federation_kubernetes.texts import one_line

T = TypeVar("T")

#: how much of a value that does not fit is kept, in characters
_EXCERPT = 80
#: How deep an answer may be nested once it was found too deep for the decoder. No mapper reads anything near as deep.
_DEEPEST = 100

#: what msgspec raises for JSON that is none, or that does not fit; the second is a kind of the first
_UNFIT = (msgspec.DecodeError, RecursionError)


class Page(NamedTuple, Generic[T]):
    """One page of a list."""

    #: opaque; "" where the server gave none
    resource_version: str
    #: asks for the next page; "" = this was the last
    continue_token: str
    objects: list[tuple[Key, T]]


class Event(NamedTuple, Generic[T]):
    """One event of a watch."""

    #: "ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", or whatever the server says; "" where it says none
    type: str
    #: of an added, modified or deleted object; None where its name cannot be read, and in all other events
    key: Key | None = None
    #: opaque, of an object or a bookmark; "" where there is none, and in all other events
    resource_version: str = ""
    #: an added or modified object, or a deleted one as it was last; None in all other events, and without a key
    object: T | None = None
    #: what an ERROR event says
    error: ApiError | None = None


@dataclass(frozen=True, slots=True)
class Misfit:
    """Stands in an object in place of a value that does not fit its field: a word where a count should be, a list where
    an object should be, a number that no float can hold. It is equal to its like alone, and no check of values takes it
    for a good one."""

    #: the value as JSON, cut to a bounded length
    text: str

    @classmethod
    def of(cls, text: str) -> Misfit:
        """The one for a value, given as JSON, that may be of any length."""
        return cls(one_line(text, _EXCERPT))

    def __repr__(self) -> str:
        """The value as JSON, so that a log shows what the server said."""
        return self.text


def reach(part: object, *names: str) -> Any:
    """What stands at the end of a path of fields, or a Misfit that stands in its way, or None where it is absent."""
    for name in names:
        if part is None or isinstance(part, Misfit):
            break
        part = getattr(part, name)
    return part


class Decoder(Generic[T]):
    """Decodes one resource's lists and watches into `struct`, which names the fields that are read ("spec", "status").

    `struct` is a plain msgspec Struct, and so are those inside of it: each field has a default, as everything may be
    absent; nothing is a Raw, which would keep the answer alive. Unknown fields are skipped. A field or an item whose
    value does not fit holds a Misfit, so whoever reads an object has to expect one in any place; `reach` helps. A field
    "metadata" of `struct` must be a struct, too, or that or None. Raises TypeError for another shape."""

    def __init__(self, struct: type[T]) -> None:
        fields = msgspec.structs.fields(cast(Any, struct))
        self._names = tuple(field.name for field in fields)
        self._struct = struct
        parameters = inspect.signature(struct).parameters.values()
        self._positional = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
        metadata = _with_identity(struct, fields)
        item = msgspec.defstruct(
            f"{struct.__name__}WithIdentity",
            [
                *(_definition(field) for field in fields if field.encode_name != "metadata"),
                ("metadata", metadata, msgspec.field(default_factory=metadata)),
            ],
            rename={field.name: field.encode_name for field in fields},
            gc=False,  # lives as long as its page, and no cycle can lead through it
        )
        self._item = _StructShape(item, item)
        self._page: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            msgspec.defstruct(
                "PageOfItems",
                [("metadata", _ListMetadata | None, None), ("items", list[item] | UnsetType | None, UNSET)],  # type: ignore[valid-type]
            )
        )
        self._event: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            msgspec.defstruct("EventOfItem", [("type", str, ""), ("object", item | None, None)])
        )
        self._unreadable = 0

    @property
    def unreadable(self) -> int:
        """How many objects were dropped so far, because no name and namespace could be read in them."""
        return self._unreadable

    def page(self, body: bytes) -> Page[T]:
        """Decodes one page of a list. Objects without a readable name and namespace are left out and counted. Raises
        AnswerError where the body is no JSON object, or none that can be a list."""
        try:
            page = self._page.decode(body)
            items = page.items
        except _UNFIT:
            page = _fitting(_RAW_PAGE, body, "list")
            items = page.items and [self._item.read(raw) for raw in page.items]
        metadata = page.metadata or _NO_LIST_METADATA
        if items is UNSET:
            if not metadata.resource_version:
                # An answer of {}, or a Status, must not look like a cluster that has lost all its objects.
                raise AnswerError(
                    f"the API server's answer of {len(body)} bytes is a JSON object, but no list of objects; "
                    "see what answers at its address"
                )
            items = None
        objects = [found for item in items or () if (found := self._identified(item)) is not None]
        return Page(metadata.resource_version or "", metadata.continue_token or "", objects)

    def single(self, body: bytes) -> T:
        """Decodes one object, as the answer to a write shows it. Raises AnswerError where the body is no JSON object
        with a name and a namespace."""
        item = self._item.read(_fitting(_RAW_OBJECT, body, "object"))
        found = self._identified(item)
        if found is None:
            raise AnswerError(
                f"the API server's answer of {len(body)} bytes is no object with a name and a namespace; "
                "see what answers at its address"
            )
        return found[1]

    def event(self, line: bytes) -> Event[T]:
        """Decodes one event of a watch. Raises AnswerError where the line is no JSON object; whatever else may be wrong
        with an event, the others after it are worth more than an error."""
        try:
            event = self._event.decode(line)
        except _UNFIT:
            return self._raw_event(line)
        if event.type in _CARRYING:
            return self._carrying(event.type, event.object)
        return self._raw_event(line)

    def _raw_event(self, line: bytes) -> Event[T]:
        event = _fitting(_RAW_EVENT, line, "event")
        kind = _TEXT.read(event.type)
        if isinstance(kind, Misfit):
            return Event("")
        if kind in _CARRYING:
            return self._carrying(kind, self._item.read(event.object))
        if kind == "BOOKMARK":
            version = reach(self._item.read(event.object), "metadata", "resourceVersion")
            return Event(kind, resource_version=_text(version))
        if kind == "ERROR":
            return Event(kind, error=_error(event.object))
        return Event(kind)

    def _carrying(self, kind: str, item: object) -> Event[T]:
        found = self._identified(item)
        if found is None:
            return Event(kind)
        return Event(kind, found[0], _text(cast(Any, item).metadata.resourceVersion), found[1])

    def _identified(self, item: Any) -> tuple[Key, T] | None:
        metadata = getattr(item, "metadata", None)
        name = getattr(metadata, "name", None)
        namespace = getattr(metadata, "namespace", None)
        if not (isinstance(name, str) and name and isinstance(namespace, str) and namespace):
            self._unreadable += 1
            return None
        # There are few namespaces and many objects.
        return (sys.intern(namespace), name), self._plain(item)

    def _plain(self, item: Any) -> T:
        """The object without its identity."""
        values = [getattr(item, name) for name in self._names]
        if self._positional:
            return self._struct(*values)
        return self._struct(**dict(zip(self._names, values, strict=True)))


_CARRYING = {"ADDED", "MODIFIED", "DELETED"}


class _ListMetadata(msgspec.Struct, rename={"resource_version": "resourceVersion", "continue_token": "continue"}):
    resource_version: str | None = None
    continue_token: str | None = None


_NO_LIST_METADATA = _ListMetadata()


class _RawPage(msgspec.Struct):
    metadata: _ListMetadata | None = None
    items: list[Raw] | UnsetType | None = UNSET


class _RawEvent(msgspec.Struct):
    type: Raw = Raw(b"null")
    object: Raw = Raw(b"null")


_RAW_PAGE = msgspec.json.Decoder(_RawPage)
_RAW_EVENT = msgspec.json.Decoder(_RawEvent)
_RAW_OBJECT = msgspec.json.Decoder(Raw)

S = TypeVar("S")


def _fitting(decoder: msgspec.json.Decoder[S], body: bytes, what: str) -> S:
    """Decodes, or raises AnswerError with the place of the fault, but none of the content."""
    try:
        try:
            return decoder.decode(body)
        except RecursionError:
            # Anybody who may create an object can nest it that deep. It must not cost the other objects of the list.
            return decoder.decode(_pruned(body, _DEEPEST))
    except _UNFIT as error:
        raise AnswerError(
            f"the API server's answer of {len(body)} bytes is not the {what} that was asked for: {error}; "
            "see what answers at its address"
        ) from error


#: strings, closed or not, and brackets
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


def _pruned(body: bytes, deepest: int) -> bytes:
    """The same JSON, with null in place of each object or array that is nested deeper than that; what is no JSON does
    not become any. No recursion."""
    kept: list[bytes] = []
    depth = begin = 0
    for token in _TOKEN.finditer(body):
        match body[token.start()]:
            case 0x5B | 0x7B:  # [ {
                depth += 1
                if depth == deepest + 1:
                    kept += (body[begin : token.start()], b"null")
            case 0x5D | 0x7D:  # ] }
                if depth == deepest + 1:
                    begin = token.end()
                depth -= 1
    kept.append(body[begin:])
    return b"".join(kept)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _error(raw: Raw) -> ApiError:
    """What the object of an ERROR event says."""
    said = Status.of_event(bytes(raw).decode("utf-8", "replace"))
    return said.error(
        f"the API server ended the watch: {said.message or said.reason or 'it did not say why'} (code {said.code})"
    )


# --- reflection: the item's struct with its identity, and the shapes by which values are read one by one


def _definition(field: msgspec.structs.FieldInfo) -> tuple[str, Any, Any]:
    if field.required:
        raise TypeError(f"field {field.name!r} needs a default: in what an API server sends, everything may be absent")
    if field.default_factory is not msgspec.NODEFAULT:
        return field.name, field.type, msgspec.field(default_factory=cast(Callable[[], Any], field.default_factory))
    return field.name, field.type, msgspec.field(default=field.default)


def _with_identity(struct: type, fields: Sequence[msgspec.structs.FieldInfo]) -> type[msgspec.Struct]:
    """The struct of an object's metadata: what the mapper wants of it, and what we want."""
    wanted = next((field for field in fields if field.encode_name == "metadata"), None)
    bases: tuple[type[msgspec.Struct], ...] = ()
    if wanted is not None:
        inner = _without_none(wanted.type)
        if not _is_struct(inner) or wanted.name != "metadata":
            raise TypeError(f"field {wanted.name!r} of {struct.__name__} must be called metadata, and be a struct")
        bases = (inner,)
    identity = [(name, str, "") for name in ("name", "namespace", "resourceVersion")]
    return msgspec.defstruct(f"{struct.__name__}Metadata", identity, bases=bases or None, gc=False)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _without_none(kind: Any) -> Any:
    """The other part of a union of two, one of which is None; any other type as it is."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        if len(parts) == 1:
            return parts[0]
    return kind


class _Shape:
    """How a value of some type is read, whatever the JSON is. This one takes it or leaves it."""

    def __init__(self, kind: Any) -> None:
        self._whole = msgspec.json.Decoder(kind)

    def read(self, raw: Raw) -> Any:
        """The value; where it does not fit, the parts of it that do, with a Misfit for each that does not."""
        try:
            return self._whole.decode(raw)
        except _UNFIT:
            try:
                return self._parts(raw)
            except _UNFIT:
                return _misfit(raw)

    def _parts(self, raw: Raw) -> Any:
        return _misfit(raw)


class _StructShape(_Shape):
    """An object, field by field."""

    def __init__(self, kind: Any, struct: type[msgspec.Struct]) -> None:
        super().__init__(kind)
        fields = msgspec.structs.fields(struct)
        for field in fields:
            _definition(field)  # refuses those without a default
        self._struct = struct
        self._twin = msgspec.json.Decoder(
            msgspec.defstruct(
                f"{struct.__name__}Unread",
                [(field.name, Raw | UnsetType, UNSET) for field in fields],
                rename={field.name: field.encode_name for field in fields},
            )
        )
        self._fields = {field.name: _shape(field.type) for field in fields}

    def _parts(self, raw: Raw) -> Any:
        twin = self._twin.decode(raw)
        values = {
            name: shape.read(value)
            for name, shape in self._fields.items()
            if (value := getattr(twin, name)) is not UNSET
        }
        return self._struct(**values)  # which checks nothing


class _ListShape(_Shape):
    """An array, element by element."""

    def __init__(self, kind: Any, element: Any) -> None:
        super().__init__(kind)
        self._element = _shape(element)

    def _parts(self, raw: Raw) -> Any:
        return [self._element.read(value) for value in _RAW_LIST.decode(raw)]


class _DictShape(_Shape):
    """An object with any keys, value by value."""

    def __init__(self, kind: Any, value: Any) -> None:
        super().__init__(kind)
        self._value = _shape(value)

    def _parts(self, raw: Raw) -> Any:
        return {key: self._value.read(value) for key, value in _RAW_DICT.decode(raw).items()}


_RAW_LIST = msgspec.json.Decoder(list[Raw])
_RAW_DICT = msgspec.json.Decoder(dict[str, Raw])


@lru_cache(256)
def _shape(kind: Any) -> _Shape:
    inner = _without_none(kind)
    if _is_struct(inner):
        return _StructShape(kind, inner)
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    if origin is list:
        return _ListShape(kind, arguments[0])
    if origin is dict and arguments[0] is str:
        return _DictShape(kind, arguments[1])
    return _Shape(kind)


def _misfit(raw: Raw) -> Misfit:
    return Misfit.of(bytes(raw).decode("utf-8", "replace"))


_TEXT = _Shape(str)

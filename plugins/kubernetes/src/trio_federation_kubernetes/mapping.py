"""What each kind of source has to say about its resources: which ones it reads, and what their objects come to as rows
of capacity. Here is only the contract; each mapper is a room of its own, pure, and knows nothing of lists, watches or
time. Who keeps the rows is `store.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from trio_federation_kubernetes.decoding import Decoder
from trio_federation_kubernetes.resources import Key, Resource, Row


class Watched(NamedTuple):
    """A resource that is read, and how."""

    resource: Resource
    #: its objects have a type of their own in each mapper; hence Any
    decoder: Decoder[Any]


class Mapper(Protocol):
    """Turns objects into rows. One of the watched resources owns the rows; objects of others may change them."""

    #: the resources that it reads, in a fixed order
    watched: tuple[Watched, ...]

    def take(self, index: int, key: Key, object: Any | None) -> Iterable[Key]:
        """The object `key` of `watched[index]` is now this, or is gone (None). Returns the owners whose rows may have
        changed by it."""

    def rows(self, owner: Key) -> Sequence[Row]:
        """What an owner says now, in a fixed order; nothing when it is gone."""

"""What a source knows now: the rows of every object, which of several objects that claim one pool counts, and what has
changed since it was last said. Fed by informers, read by the source. Pure: no I/O, no clock; when something was known
is the informers' business, and what an object says the mappers'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from trio_federation import Identity
from trio_federation_kubernetes.mapping import Mapper
from trio_federation_kubernetes.resources import Key, Row

#: Objects that are taken in one step: some 20 ms of work.
STEP = 1000


class Contested(NamedTuple):
    """Several objects claim one pool; the first of them by namespace and name counts, and here is the second."""

    identity: Identity
    counts: Key
    does_not: Key


class Store:
    """The rows of one source, as its mapper makes them.

    Memory is that of the rows, of one name per object of each watched resource, and of what the mapper keeps. What has
    changed and not been said yet is kept as names only, so it never takes more than the rows do."""

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper
        #: of each watched resource, by namespace, the names of its objects
        self._known: list[defaultdict[str, set[str]]] = [defaultdict(set) for _ in mapper.watched]
        self._rows: dict[Key, tuple[Row, ...]] = {}
        self._effective: dict[Identity, tuple[Key, Row]] = {}
        #: rows that do not count, because another object has the same pool
        self._rivals: dict[Identity, dict[Key, Row]] = {}
        #: what has changed and is there, by namespace, in the order in which it did; dicts for their order
        self._changed: dict[str, dict[Identity, None]] = {}
        #: what has changed and is gone: that is known whatever else is not
        self._gone: dict[Identity, None] = {}

    def __len__(self) -> int:
        """How many rows count."""
        return len(self._effective)

    def replace(self, index: int, namespace: str | None, objects: Mapping[Key, Any]) -> None:
        """The objects of `watched[index]`, in one namespace or (None) in all of them, are these and no others."""
        for _ in self.replacing(index, namespace, objects):
            pass

    def replacing(self, index: int, namespace: str | None, objects: Mapping[Key, Any]) -> Iterator[None]:
        """Like `replace`, in steps of at most STEP objects, between which others may have their turn. To be gone
        through to its end before anything else is told of this resource there."""
        known = self._known[index]
        namespaces = list(known) if namespace is None else [namespace]
        gone = [(each, name) for each in namespaces for name in known.get(each, ()) if (each, name) not in objects]
        owners: dict[Key, None] = {}
        for number, (key, value) in enumerate(chain(((key, None) for key in gone), objects.items()), 1):
            owners |= dict.fromkeys(self._take(index, key, value))
            if number % STEP == 0:
                yield
        # Once each: an owner may depend on a great many of the objects.
        for number, owner in enumerate(owners, 1):
            self._update(owner)
            if number % STEP == 0:
                yield

    def apply(self, index: int, key: Key, value: Any | None) -> None:
        """One object of `watched[index]` is now this, or is gone (None)."""
        for owner in self._take(index, key, value):
            self._update(owner)

    def rows(self) -> Iterator[Row]:
        """Every row that counts. The store must not be changed meanwhile."""
        for _, row in self._effective.values():
            yield row

    def has_changes(self) -> bool:
        """Whether there is something to say."""
        return bool(self._changed or self._gone)

    def changes(self, most: int, known: Callable[[str], bool]) -> list[tuple[Identity, Row | None]]:
        """What has changed and was not said yet, at most so much of it, and the oldest of each namespace first: the row
        as it is now, or None where there is none any more. It counts as said from now on. Rows in a namespace that is
        not `known`, as not all of its resources were listed, stay for later."""
        # What is there first: an env whose pools become one sum, or the reverse, is never without either. But what is
        # gone has room for half, whatever else goes on.
        for_changed = most - min(len(self._gone), most // 2)
        said: list[tuple[Identity, Row | None]] = []
        for namespace in list(self._changed):
            if len(said) == for_changed:
                break
            if not known(namespace):
                continue
            waiting = self._changed.pop(namespace)
            for identity in list(islice(waiting, for_changed - len(said))):
                del waiting[identity]
                said.append((identity, self._effective[identity][1]))
            if waiting:  # at the end, so that one that changes all the time keeps no other one waiting
                self._changed[namespace] = waiting
        for identity in list(islice(self._gone, most - len(said))):
            del self._gone[identity]
            said.append((identity, None))
        return said

    def contested(self) -> list[Contested]:
        """The pools that more than one object claims, each once, in a fixed order."""
        found = [
            Contested(identity, self._effective[identity][0], min(rivals)) for identity, rivals in self._rivals.items()
        ]
        return sorted(found, key=lambda each: (each.counts, each.does_not, str(each.identity)))

    def _take(self, index: int, key: Key, value: Any | None) -> Iterable[Key]:
        namespace, name = key
        names = self._known[index]
        if value is not None:
            names[namespace].add(name)
        elif namespace in names:
            names[namespace].discard(name)
            if not names[namespace]:
                del names[namespace]
        try:
            return self._mapper.take(index, key, value)
        except Exception as error:
            raise self._fault(index, key, error) from error

    def _fault(self, index: int, key: Key, error: Exception) -> RuntimeError:
        """A mapper takes whatever an object holds. One that does not has a fault; this says what it stumbles over."""
        resource = self._mapper.watched[index].resource
        return RuntimeError(f"{resource} {'/'.join(key)} cannot be understood: {error!r}")

    def _update(self, owner: Key) -> None:
        old = self._rows.get(owner, ())
        try:
            new = tuple(self._mapper.rows(owner))
        except Exception as error:
            raise self._fault(0, owner, error) from error
        if new == old:
            return
        if new:
            self._rows[owner] = new
        else:
            del self._rows[owner]
        rows: dict[Identity, Row] = {}
        for row in new:
            rows.setdefault(row.record.identity, row)  # of two with one identity the first counts
        for row in old:
            if (identity := row.record.identity) not in rows:
                self._settle(identity, owner, None)
        for identity, row in rows.items():
            held = self._effective.get(identity)
            if held is None or (held[0] == owner and identity not in self._rivals):
                # As nearly always: nobody else has it.
                self._effective[identity] = (owner, row)
                if held is None or held[1] != row:
                    self._mark(identity)
            else:
                self._settle(identity, owner, row)

    def _settle(self, identity: Identity, owner: Key, row: Row | None) -> None:
        """Who claims `identity`, now that `owner` says `row` of it, and what that comes to."""
        before = self._effective.get(identity)
        rivals = self._rivals.get(identity, {})
        if before is None:
            if row is None:
                return
            self._effective[identity] = owner, row
        elif owner == before[0]:
            if row is not None:
                self._effective[identity] = owner, row
            elif rivals:
                first = min(rivals)
                self._effective[identity] = first, rivals.pop(first)
            else:
                del self._effective[identity]
        else:
            rivals.pop(owner, None)
            if row is not None and owner < before[0]:
                rivals[before[0]] = before[1]
                self._effective[identity] = owner, row
            elif row is not None:
                rivals[owner] = row
        if rivals:
            self._rivals[identity] = rivals
        else:
            self._rivals.pop(identity, None)
        after = self._effective.get(identity)
        if (before and before[1]) != (after and after[1]):
            self._mark(identity)

    def _mark(self, identity: Identity) -> None:
        """It has changed, and is to be said."""
        namespace = identity[1]
        if identity in self._effective:
            self._gone.pop(identity, None)
            self._changed.setdefault(namespace, {})[identity] = None
            return
        self._gone[identity] = None
        if (waiting := self._changed.get(namespace)) is not None:
            waiting.pop(identity, None)
            if not waiting:
                del self._changed[namespace]

"""What happened in a simulated federation, line by line, in virtual time: for people who ask why a test failed, and for
the proof that the same seed makes the same run. Who notes what is the business of the rooms in which it happens; here
is how it is written down, in as few words as show every difference, and how it is found again. What the agents and hubs
log through structlog is heard here, too, and goes on to whoever else listens."""

from __future__ import annotations

import hashlib
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from itertools import takewhile
from typing import Any, ClassVar

import structlog

from trio_federation.capacity import Capacity, Identity, Withdrawal, same_value
from trio_federation.registry import Registry
from trio_federation.router import Placed

#: Records that a line shows; of those beyond it has the number and a checksum.
_SHOWN = 4
#: What stands where a secret was.
_HIDDEN = "***"
#: Lines of agents that are noted in a line of ours, which also knows whose they are when a test asks the router.
_NOTED_ALREADY = frozenset({"placed", "asked", "outcome"})

#: An address, which is another one in every process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
#: A text that needs no quotes between others.
_PLAIN = re.compile(r"[^\s'\"=\\]+")

#: Where the lines of what runs in this context go.
_log: ContextVar[EventLog] = ContextVar("trio_federation.testing.eventlog")


class EventLog:
    """The events of one run. A line is the time since the start, the node, the event, and details as `key=value`. No
    line has a secret in it, a traceback, or anything that differs from process to process.

    `now`: seconds since the start. `on`: whether anything is written down. `secrets`: texts that no line shows."""

    def __init__(self, now: Callable[[], float], *, on: bool = True, secrets: Collection[str] = ()) -> None:
        self.on = on
        self.lines: list[str] = []
        self._now = now
        self._secrets = list(secrets)
        self._listens = False

    # Writing.

    def note(self, node: str, event: str, **details: object) -> None:
        """Add a line."""
        if self.on:
            self._add(node, event, details)

    def of(self, node: str) -> Callable[..., None]:
        """`note`, for one node."""
        return partial(self.note, node)

    def _add(self, node: str, event: str, details: Mapping[str, object]) -> None:
        told = "".join([f" {key}={_shown(value)}" for key, value in details.items()])
        line = f"{self._now():12.6f} {node} {event}{told}"
        for secret in self._secrets:
            if secret in line:
                line = line.replace(secret, _HIDDEN)
        self.lines.append(line)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, what this context, and the tasks that it starts, log through structlog is written down, whatever its
        level and wherever else it goes; the node is the one bound in `structlog.contextvars`. What structlog has cached
        before (`cache_logger_on_first_use`) is not heard."""
        if not self.on:
            yield
            return
        token = _log.set(self)
        _Tap.open()
        self._listens = True
        try:
            yield
        finally:
            self._listens = False
            _Tap.close()
            _log.reset(token)

    def _heard(self, level: str, event: object, details: Mapping[str, Any]) -> None:
        if not self._listens or event in _NOTED_ALREADY:
            return
        context = structlog.contextvars.get_contextvars()
        told = {key: value for key, value in details.items() if key not in ("exc_info", "stack_info")}
        if level in ("warning", "error", "critical"):
            told["level"] = level
        error = details.get("exc_info")
        if error:  # never its traceback, and not its message either, which may hold anything
            error = error if isinstance(error, BaseException) else sys.exc_info()[1]
            told["exception"] = type(error).__name__
        # A thread has no time of the loop's, and comes at any moment of it.
        with suppress(RuntimeError):
            self._add(str(context.get("node", "test")), _shown(event), told)

    # Reading.

    def text(self) -> str:
        """All lines."""
        return "".join([f"{line}\n" for line in self.lines])

    def digest(self) -> str:
        """A short name for `text`: that of two runs is the same when every byte of it is."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def tail(self, count: int) -> list[str]:
        """The last so many lines."""
        return self.lines[-count:] if count > 0 else []

    def since(self, seconds: float) -> list[str]:
        """The lines from so many seconds after the start on."""
        # Time never goes back from one line to the next.
        late = list(takewhile(lambda line: float(line[:12]) >= seconds, reversed(self.lines)))
        return late[::-1]

    def about(self, node: str) -> list[str]:
        """The lines of one node, a cluster or a hub, and those of the network between it and others."""
        return [line for line in self.lines if node in line[12:].split(None, 1)[0].split("~")]


class AgentNotes:
    """What one agent is told by its sources, takes into its registry, and places.

    `carried`: what its connections have carried so far, by hub: bytes and checksum to the hub, and back."""

    def __init__(
        self, log: EventLog, node: str, carried: Callable[[], Mapping[str, Sequence[tuple[int, int, int, int]]]]
    ) -> None:
        self.on = log.on
        self._note = log.of(node)
        self._carried = carried
        #: by source
        self._said: dict[str, dict[Identity, Capacity]] = {}
        self._known: dict[Identity, Capacity] = {}
        self._version = 0
        #: since the last line: batches that the registry was told, and the records in them
        self._batches = self._records = 0

    def said(self, source: str, changes: Sequence[object], *, whole: bool) -> None:
        """A source has said this, of which nothing was checked yet. `whole`: it is all that it has."""
        before = self._said.get(source, {})
        after: dict[Identity, Capacity] = {} if whole else dict(before)
        gone: list[str] = []
        strange = 0
        for change in changes:
            try:
                if isinstance(change, Capacity):
                    after[change.identity] = change
                elif isinstance(change, Withdrawal):
                    after.pop(change.identity, None)
                    gone.append(_path(change.identity))
                else:
                    strange += 1
            except TypeError:  # names that are no texts
                strange += 1
        if whole:
            gone = [_path(identity) for identity in before if identity not in after]
        self._said[source] = after
        wire = [
            f"{hub}:{sent}/{sent_sum:08x}/{received}/{received_sum:08x}"
            for hub, links in self._carried().items()
            for sent, sent_sum, received, received_sum in links
        ]
        self._tell(
            "said",
            source=source,
            records=len(changes),
            strange=strange,
            **_differences(before, after, gone),
            told=f"{self._records}/{self._batches}",
            wire=",".join(wire),
        )
        self._batches = self._records = 0

    def took(self, registry: Registry, changes: Sequence[object]) -> None:
        """The registry was told of this, and has taken in what was new of it."""
        self._batches += 1
        self._records += len(changes)
        version = registry.version()
        if version != self._version:
            self._version = version
            known = {record.identity: record for record in registry.snapshot()}
            gone = [_path(identity) for identity in self._known if identity not in known]
            self._tell("took", **_differences(self._known, known, gone))
            self._known = known

    def placed(self, placed: Placed) -> None:
        """The router has placed a create, and reserved for it."""
        placement = placed.placement
        self._tell(
            "placed",
            id=placement.id,
            env=f"{placed.namespace}/{placed.env_name}",
            group=placed.group,
            target=placement.target or "",
            rule=str(placement.rule),
            reason=placement.reason,
        )

    def outcome(self, placement_id: str, outcome: str) -> None:
        """Somebody has said what came of a placement."""
        self._tell("outcome", id=placement_id, outcome=outcome)

    def _tell(self, event: str, **details: object) -> None:
        self._note(event, **{key: value for key, value in details.items() if value})


def _differences(
    before: Mapping[Identity, Capacity], after: Mapping[Identity, Capacity], gone: Sequence[str]
) -> dict[str, str]:
    new = [_record(record) for identity, record in after.items() if identity not in before]
    changed = [
        _record(record)
        for identity, record in after.items()
        if identity in before and not _same(before[identity], record)
    ]
    return {"new": _some(new), "changed": _some(changed), "gone": _some(gone)}


def _same(one: Capacity, other: Capacity) -> bool:
    try:
        return same_value(one, other)
    except Exception:  # a source may say anything
        return False


def _some(items: Sequence[str]) -> str:
    if len(items) <= _SHOWN:
        return ",".join(items)
    rest = items[_SHOWN:]
    return f"{','.join(items[:_SHOWN])},+{len(rest)}/{zlib.crc32(','.join(rest).encode()):08x}"


def _record(record: Capacity) -> str:
    values = [f"idle:{_shown(record.idle)}"]
    values += [f"{name}:{_shown(value)}" for name in _COUNTS if (value := getattr(record, name))]
    values += ["grows"] if record.autoscaling_enabled else []
    values += [_shown(text) for text in (record.scaling_group if record.member_pool else "", record.state) if text]
    values += ["saturated"] if record.saturated_for else []
    return f"{_path(record.identity)}({';'.join(values)})"


_COUNTS = ("running", "pending", "desired", "capacity")


def _path(identity: Sequence[object]) -> str:
    return "/".join([_shown(name) if name else "" for name in identity])


def _shown(value: object) -> str:
    """A value as it stands in a line: in one line, the same in every process, and safe where its own repr raises."""
    try:
        text = _text(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return _ADDRESS.sub("", text) if " at 0x" in text else text


def _text(value: object) -> str:
    if isinstance(value, str):
        return str(value) if _PLAIN.fullmatch(value) else repr(str(value))
    if value is None or isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return repr(round(value, 6))
    if isinstance(value, BaseException):
        return repr(f"{type(value).__name__}: {value}")
    if isinstance(value, Mapping):
        return "{" + ",".join([f"{_shown(key)}:{_shown(each)}" for key, each in value.items()]) + "}"
    if isinstance(value, AnySet):  # whose order differs from process to process
        return "[" + ",".join(sorted([_shown(each) for each in value])) + "]"
    if isinstance(value, list | tuple):
        return "[" + ",".join([_shown(each) for each in value]) + "]"
    return " ".join(repr(value).split())


class _Tap:
    """Hears what is logged through structlog before anything is done about it. The wrapper class is the place for that:
    processors do not see what is below the level, and `structlog.testing.capture_logs` takes all of them away."""

    in_use: ClassVar[int] = 0
    before: ClassVar[type[Any]]
    #: by the class that does the logging
    made: ClassVar[dict[type[Any], type[Any]]] = {}

    @classmethod
    def open(cls) -> None:
        if cls.in_use == 0:
            cls.before = structlog.get_config()["wrapper_class"]
            if cls.before not in cls.made:
                cls.made[cls.before] = _heard_class(cls.before)
            structlog.configure(wrapper_class=cls.made[cls.before])
        cls.in_use += 1

    @classmethod
    def close(cls) -> None:
        cls.in_use -= 1
        # Where somebody has configured another one meanwhile, that is the one that counts.
        if cls.in_use == 0 and structlog.get_config()["wrapper_class"] is cls.made[cls.before]:
            structlog.configure(wrapper_class=cls.before)


def _heard_class(base: type[Any]) -> type[Any]:
    """A wrapper class of structlog's that tells the event log first, and then does as `base`."""
    methods = {level: _heard_method(level, getattr(base, level)) for level in _LEVELS if hasattr(base, level)}
    return type(base.__name__, (base,), {"__slots__": (), **methods})


# The others of structlog's end in these.
_LEVELS = ("debug", "info", "warning", "error", "critical")


def _heard_method(level: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def tell(self: Any, event: object = None, *args: Any, **details: Any) -> Any:
        log = _log.get(None)
        if log is not None:
            log._heard(level, event, {**getattr(self, "_context", {}), **details})
        return method(self, event, *args, **details)

    return tell

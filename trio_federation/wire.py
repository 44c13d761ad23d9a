"""How records travel (semantics.md, "Wire"): changes to messages and back, with clocks turned into ages, and messages
to bytes and back. Pure: `now` is an argument, nothing here does I/O. Messages are betterproto2's dataclasses; their
bytes are made and read by protobuf's C runtime, from the descriptor embedded in the generated code, because that is
more than twenty times faster and a hub does little else. For the same reason records that come in are read straight
from what that runtime has made of the bytes (`ReceivedMessage`), and a hub encodes a record once for all who get it in
the same moment (`BroadcastEncoder`). Which of two samples is newer is decided in `samples.py`; streams, length prefixes
and the check of `MAX_RECEIVE` live in `rpc/`."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

import betterproto2
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from trio_federation.capacity import (
    GROUPS,
    INT32_MAX,
    LABELS,
    STATES,
    SUBDOMAINS,
    Capacity,
    Change,
    Fault,
    Identity,
    Origin,
    Withdrawal,
    fault,
    filled,
    is_label,
)
from trio_federation.errors import ProtocolViolation, ResourceExhausted
from trio_federation.pb.sandbox.sync.v1 import (
    ClusterOrigin,
    EnvCapacity,
    FederationBroadcast,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
)

#: Bytes that a message of ours takes up at most, without gRPC's prefix.
MAX_SEND = 3 * 2**20
#: Changes that get their ages in one go and make one message: few enough that a slow peer that is alive takes a message
#: within the silence limit, and that ages are never from long before they were sent.
AT_ONCE = 1000
#: Bytes that a message of a peer may take up.
MAX_RECEIVE = 16 * 2**20
#: Records that a message of a peer may hold: twice what fits into one of ours. Without it a message of 16 MiB could
#: hold millions of empty ones, each of which becomes an object here.
MAX_RECORDS = 100_000
#: An age (milliseconds) from which on a record is withdrawn; ordinary ages and uptimes stay below it.
WITHDRAWN_AGE_MS = 2**40


class RecordMessage(Protocol):
    """A message that carries records, ReportFederationRequest or FederationBroadcast, or what was received of one."""

    @property
    def items(self) -> Sequence[Any]:
        """Something with the fields of an EnvCapacity for each record."""

    @property
    def origins(self) -> Sequence[Any]:
        """Something with the fields of a ClusterOrigin for each row."""


_RecordMessage = TypeVar("_RecordMessage", ReportFederationRequest, FederationBroadcast)
_Message = TypeVar("_Message", bound=betterproto2.Message)


class _Part(NamedTuple):
    """Some of the records of a message, and what they come from."""

    items: Sequence[Any]
    origins: Sequence[Any]


def parts_of(message: RecordMessage, most: int) -> Iterator[RecordMessage]:
    """A report in parts of at most so many records, in their order; itself, where it has no more.

    Every part has the origin of the report's cluster, which is the first good row. What else there is among the rows,
    of which a report has no use, is in the first part only."""
    if len(message.items) <= most:
        yield message
        return
    yield _Part(message.items[:most], message.origins)
    good = next((row for row in message.origins if is_instance(row.instance)), None)
    for start in range(most, len(message.items), most):
        yield _Part(message.items[start : start + most], [] if good is None else [good])


class Received(NamedTuple):
    """What a message of a peer said: the changes in its order, and what of it was refused, and why."""

    changes: list[Change]
    refused: list[Fault]


# --- changes to messages ---------------------------------------------------------------------------------------------


def report_messages(
    changes: Iterable[Change], now: float, *, limit: int = MAX_SEND
) -> Iterator[ReportFederationRequest]:
    """The messages in which an agent tells a hub of `changes`, made as they are asked for.

    `now` is the moment of sending, of all of them, in seconds on the clock of `observed_at` and `started_at`. Records
    must be valid (`capacity.fault`). No message takes up more than `limit` bytes, so long as a single record with its
    origin does not (some 1,500 bytes at most), and none names two instances of one cluster. The changes of a message,
    and those of an identity over all messages, are in the order given. No changes make no message: who needs an empty
    one, say to open a stream, makes it."""
    return _messages(ReportFederationRequest, changes, now, limit)


def broadcast_messages(
    changes: Iterable[Change], now: float, *, limit: int = MAX_SEND
) -> Iterator[FederationBroadcast]:
    """The messages in which a hub passes `changes` on, made as `report_messages` makes them; no changes make none."""
    return _messages(FederationBroadcast, changes, now, limit)


class _Draft:
    """A message being filled: its records, the origin of each cluster in it, and a bound on its size in bytes."""

    __slots__ = ("items", "origins", "size")

    def __init__(self) -> None:
        self.items: list[EnvCapacity] = []
        self.origins: dict[str, Origin] = {}
        self.size = _TIME_BYTES

    def finish(self, message_type: type[_RecordMessage], now: float) -> _RecordMessage:
        rows = [ClusterOrigin(**values) for values in _rows(self.origins, now)]
        return message_type(items=self.items, origins=rows)


def _messages(
    message_type: type[_RecordMessage], changes: Iterable[Change], now: float, limit: int
) -> Iterator[_RecordMessage]:
    # Drafts are numbered, leave in that order, and a change never goes into an earlier one than the last change of its
    # identity. There is one draft at a time but where records of two instances of a cluster are mixed, as in a hub's
    # snapshot after a restart of an agent: then the records of each gather in a draft of their own.
    drafts: deque[_Draft] = deque()
    first = 0  # number of drafts[0]
    draft_of_instance: dict[tuple[str, str], int] = {}  # the latest one that has records of (cluster, instance)
    draft_of_cluster: dict[str, int] = {}  # the latest one that names an instance of the cluster
    draft_of_identity: dict[Identity, int] = {}  # the latest one that has it; left out where that was drafts[0]
    for change in changes:
        item = _item(change, now)
        cluster = item.cluster_id
        origin = change.origin if item.seq else None
        while True:
            number = first
            if draft_of_identity:
                number = max(number, draft_of_identity.get(change.identity, first))
            if origin is not None:
                known = draft_of_instance.get((cluster, origin.instance), -1)
                if known < number:  # not in that draft: then in the next one that names no instance of this cluster
                    known = max(number, draft_of_cluster.get(cluster, -1) + 1)
                number = known
            if number == first + len(drafts):
                drafts.append(_Draft())
            draft = drafts[number - first]
            size = _ITEM_BYTES + _bytes_of(
                cluster, item.namespace, item.env_name, item.member_pool, item.scaling_group, item.state
            )
            if origin is not None and cluster not in draft.origins:
                size += _ORIGIN_BYTES + _bytes_of(cluster, origin.instance)
            if draft.size + size <= limit or not draft.items:
                break
            while first <= number:
                yield drafts.popleft().finish(message_type, now)
                first += 1
        draft.items.append(item)
        draft.size += size
        if number > first:
            draft_of_identity[change.identity] = number
        if origin is not None:
            draft_of_instance[cluster, origin.instance] = number
            draft_of_cluster[cluster] = max(number, draft_of_cluster.get(cluster, number))
            # Uptimes are measured anew with each batch and only lose on their way, so the earliest start is the truest.
            named = draft.origins.get(cluster)
            if named is None or origin.started_at < named.started_at:
                draft.origins[cluster] = origin
    for draft in drafts:
        yield draft.finish(message_type, now)


def _item(change: Change, now: float) -> EnvCapacity:
    """The message of one change. Its seq is 0 where it has no origin, and then it must not be given an origin's row."""
    return EnvCapacity(**_item_values(change, _age(change, now)))


def _age(change: Change, now: float) -> int:
    """The age that is sent with a change, in milliseconds."""
    return WITHDRAWN_AGE_MS if isinstance(change, Withdrawal) else _milliseconds(change.observed_at, now)


def _item_values(change: Change, age: int) -> dict[str, Any]:
    """The fields of the message of one change, by name."""
    origin = change.origin
    seq = origin.seq if origin is not None and origin.seq > 0 else 0
    if isinstance(change, Withdrawal):
        cluster, namespace, env, pool, *group = change.identity
        return {
            "cluster_id": cluster,
            "namespace": namespace,
            "env_name": env,
            "scaling_group": group[0] if group else "",
            "observed_for_ms": age,
            "member_pool": pool,
            "seq": seq,
        }
    return {
        "cluster_id": change.cluster_id,
        "namespace": change.namespace,
        "env_name": change.env_name,
        "scaling_group": change.scaling_group,
        "idle": change.idle,
        "running": change.running,
        "pending": change.pending,
        "desired": change.desired,
        "capacity": change.capacity,
        # Rounded up: trusted a moment too long it sends a create elsewhere, too short to a pool that cannot grow.
        "saturated_for": math.ceil(change.saturated_for),
        "observed_for_ms": age,
        "member_pool": change.member_pool,
        "autoscaling_enabled": change.autoscaling_enabled,
        "state": change.state,
        "seq": seq,
    }


def _rows(origins: dict[str, Origin], now: float) -> Iterator[dict[str, Any]]:
    """The fields of the messages that name the origins of clusters, by name."""
    for cluster, origin in origins.items():
        uptime = _milliseconds(origin.started_at, now)
        yield {"cluster_id": cluster, "instance": origin.instance, "uptime_ms": uptime}


def _milliseconds(since: float | None, now: float) -> int:
    """How long ago `since` was: whole milliseconds, rounded down, 0 for the future and for None (not stamped yet).

    Less than a microsecond missing is the clock's rounding, and forgiven: else an age could shrink at every hub."""
    if since is None:
        return 0
    return int(min(max(0.0, (now - since) * 1000 + 0.001), WITHDRAWN_AGE_MS - 1))


def _bytes_of(*texts: str) -> int:
    """How many bytes the texts are in UTF-8."""
    text = "".join(texts)
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _bytes_beside_text(message_type: Any) -> int:
    """The most that a record in a message takes up beside its texts: for itself and each of its fields a tag of up to 2
    bytes, as our numbers are below 2048, and a length or number of up to 10."""
    return 12 * (1 + len(fields(message_type)))


_ITEM_BYTES = _bytes_beside_text(EnvCapacity)
_ORIGIN_BYTES = _bytes_beside_text(ClusterOrigin)
#: The most that a message's own time, and what else is said once in a call, takes up, which whoever sends it may add.
_TIME_BYTES = 3 * 12


# --- messages to changes ---------------------------------------------------------------------------------------------

_read_item = attrgetter(
    *("cluster_id", "namespace", "env_name", "member_pool", "scaling_group", "idle", "running", "pending", "desired"),
    *("autoscaling_enabled", "capacity", "saturated_for", "state", "observed_for_ms", "seq"),
)
_INSTANCE = re.compile("[0-9a-f]{1,64}")


def is_instance(text: object) -> bool:
    """Whether `text` can name an agent process: 1 to 64 lower-case hexadecimal digits."""
    return isinstance(text, str) and _INSTANCE.fullmatch(text) is not None


def changes_of(message: RecordMessage, now: float, cluster_id: str | None = None) -> Received:
    """What a peer's message says, on the local clock, whose time is `now` seconds at its receipt.

    `cluster_id`, given by a hub, is the identity of the call, and is stamped over whatever the records and the rows of
    origins claim. A bad record is refused and the others go on. A bad row, or a second one that names another instance
    of the same cluster, is refused too; without a row of its cluster a record has no origin. Of a withdrawal only the
    names count. Never raises for what a peer sent."""
    changes: list[Change] = []
    refused: list[Fault] = []
    origins = _origins(message.origins, now, cluster_id, refused)
    label, subdomain, group_of, state_of = LABELS.get, SUBDOMAINS.get, GROUPS.get, STATES.get
    # The records of a report follow each other, with one origin and mostly one age: what comes of these is made once.
    origin: Origin | None = None
    last_cluster, last_seq, known_cluster = "", 0, label("")
    observed_at, last_age = now, 0
    for item in message.items:
        # fmt: off
        (
            cluster, namespace, env_name, member_pool, scaling_group, idle, running, pending, desired,
            autoscaling_enabled, capacity, saturated_for, state, age, seq,
        ) = _read_item(item)
        # fmt: on
        if cluster_id is not None:
            cluster = cluster_id
        if seq != last_seq or cluster != last_cluster:
            last_cluster, last_seq = cluster, seq
            known_cluster = label(cluster)
            named = origins.get(cluster)
            origin = Origin(named.instance, seq, named.started_at) if named is not None and seq > 0 else None
        if age >= WITHDRAWN_AGE_MS:
            record = Capacity(cluster, namespace, env_name, member_pool, scaling_group)
            wrong = fault(record)
            if wrong is None:
                changes.append(Withdrawal(record.identity, origin))
            else:
                refused.append(wrong)
            continue
        if age != last_age:
            last_age = age
            observed_at = now - age / 1000 if age > 0 else now
        # What nearly all records hold, names that are known already and numbers in their ranges, is seen here; types
        # are protobuf's to check. With `filled` that makes 1.7 µs for a record, instead of 5 µs for making a Capacity
        # of whatever was sent and asking `fault`.
        known_namespace, known_env = label(namespace), subdomain(env_name)
        known_pool = subdomain(member_pool) if member_pool else ""
        known_group, known_state = group_of(scaling_group), state_of(state)
        if (
            known_cluster is not None
            and known_namespace is not None
            and known_env is not None
            and known_pool is not None
            and known_group is not None
            and known_state is not None
            # what these bits make together is below zero, or too large, as soon as one of the numbers is
            and 0 <= idle | running | pending | desired | saturated_for <= INT32_MAX
            and -1 <= capacity <= INT32_MAX
        ):
            # fmt: off
            changes.append(filled(
                known_cluster, known_namespace, known_env, known_pool, known_group, idle, running, pending, desired,
                autoscaling_enabled, capacity, float(saturated_for), known_state, observed_at, origin,
            ))
            # fmt: on
            continue
        record = Capacity(
            cluster,
            namespace,
            env_name,
            member_pool,
            scaling_group,
            idle=idle,
            running=running,
            pending=pending,
            desired=desired,
            autoscaling_enabled=autoscaling_enabled,
            capacity=capacity,
            saturated_for=float(saturated_for),
            state=state,
            observed_at=observed_at,
            origin=origin,
        )
        wrong = fault(record)  # which from now on knows the names of a good one
        if wrong is None:
            changes.append(record)
        else:
            refused.append(wrong)
    return Received(changes, refused)


def _origins(rows: Iterable[Any], now: float, cluster_id: str | None, refused: list[Fault]) -> dict[str, Origin]:
    """The origin that a message names for each cluster, without the seq, which each record has of its own.

    Bad rows go to `refused`."""
    found: dict[str, Origin] = {}
    for row in rows:
        cluster = row.cluster_id if cluster_id is None else cluster_id
        if not is_label(cluster):
            refused.append(Fault("cluster_id", f"an origin's cluster_id {cluster[:80]!r} is not an RFC 1123 label"))
        elif not is_instance(row.instance):
            text = f"instance {row.instance[:80]!r} of cluster {cluster} is not 1 to 64 lower-case hexadecimal digits"
            refused.append(Fault("instance", text))
        elif cluster not in found:
            found[cluster] = Origin(row.instance, 0, now - max(0, row.uptime_ms) / 1000)
        elif found[cluster].instance != row.instance:
            text = f"cluster {cluster} has two instances in one message, {found[cluster].instance} and {row.instance}"
            refused.append(Fault("instance", text))
    return found


# --- messages to bytes and back --------------------------------------------------------------------------------------


class _Shape:
    """How one type of message goes to and from the class that protobuf's runtime has for it.

    `values` are the names of its plain fields, `parts` its repeated messages. A message that is such a part has no
    parts of its own, which is all that sync.proto needs."""

    def __init__(self, message_type: Any, **parts: _Shape) -> None:
        self.message_type = message_type
        # The class belongs to a descriptor pool of this project's own, so it cannot clash with classes that others
        # generate from the same file.
        self.runtime_type = GetMessageClass(message_type.DESCRIPTOR)
        self.parts = parts
        self.values = tuple(field.name for field in fields(message_type) if field.name not in parts)
        self.take: Callable[[Any], tuple[Any, ...]]
        if len(self.values) > 1:
            self.take = attrgetter(*self.values)
        else:  # attrgetter takes at least one name, and for one returns no tuple
            self.take = lambda message: tuple(getattr(message, name) for name in self.values)

    def to_bytes(self, message: Any) -> bytes:
        """`message` in bytes. Unknown fields come last, where betterproto2 and the runtime itself put them."""
        values = _values(message)
        for name in self.parts:
            del values[name]
        runtime = self.runtime_type(**values)
        for name in self.parts:
            add = getattr(runtime, name).add
            for item in getattr(message, name):
                added = add(**_values(item))
                if item._unknown_fields:
                    added.MergeFromString(item._unknown_fields)
        known: bytes = runtime.SerializeToString()
        return known + message._unknown_fields if message._unknown_fields else known

    def read(self, data: bytes) -> Any:
        """What protobuf's runtime makes of `data`. Raises as `decode` does."""
        try:
            runtime = self.runtime_type.FromString(data)
        except DecodeError as error:
            text = f"{len(data)} bytes that should be a {self.message_type.__name__} are not valid protobuf"
            raise ProtocolViolation(f"{text}; check that the peer speaks sandbox.sync.v1") from error
        for name in self.parts:
            if (count := len(getattr(runtime, name))) > MAX_RECORDS:
                raise ResourceExhausted(f"a message with {count} {name} is too large, at most {MAX_RECORDS} are taken")
        return runtime

    def from_bytes(self, data: bytes) -> Any:
        """The message in `data`, with its unknown fields and those of its parts."""
        runtime = self.read(data)
        # Mostly what is known of it is all that was sent, and then nothing has to look for unknown fields. If it is
        # not, there are some, or the peer wrote known ones in another order or form.
        runtime.DiscardUnknownFields()
        if runtime.SerializeToString() == data:
            return self._known(runtime)
        return self._known_and_unknown(self.runtime_type.FromString(data))

    def _known(self, runtime: Any) -> Any:
        if not self.parts:
            return self.message_type(*self.take(runtime))
        found = self._plain(runtime)
        for name, part in self.parts.items():
            make, take = part.message_type, part.take
            found[name] = [make(*take(item)) for item in getattr(runtime, name)]
        return self.message_type(**found)

    def _plain(self, runtime: Any) -> dict[str, Any]:
        """The plain fields of a message that has parts, too, by name."""
        return dict(zip(self.values, self.take(runtime), strict=True))

    def _known_and_unknown(self, runtime: Any) -> Any:
        if self.parts:
            found = self._plain(runtime)
            for name, part in self.parts.items():
                found[name] = [part._known_and_unknown(item) for item in getattr(runtime, name)]
            message = self.message_type(**found)
        else:
            message = self.message_type(*self.take(runtime))
        for name in (*self.values, *self.parts):
            runtime.ClearField(name)
        message._unknown_fields = runtime.SerializeToString()
        return message


def _values(message: Any) -> dict[str, Any]:
    """The plain fields of a message by name."""
    values: dict[str, Any] = vars(message).copy()
    del values["_unknown_fields"]
    return values


_ITEM = _Shape(EnvCapacity)
_ORIGIN = _Shape(ClusterOrigin)
_REPORT = _Shape(ReportFederationRequest, items=_ITEM, origins=_ORIGIN)
_BROADCAST = _Shape(FederationBroadcast, items=_ITEM, origins=_ORIGIN)
_SHAPES: dict[type[betterproto2.Message], _Shape] = {
    EnvCapacity: _ITEM,
    ClusterOrigin: _ORIGIN,
    ReportFederationRequest: _REPORT,
    ReportFederationResponse: _Shape(ReportFederationResponse),
    WatchFederationRequest: _Shape(WatchFederationRequest),
    FederationBroadcast: _BROADCAST,
}


def encode(message: betterproto2.Message) -> bytes:
    """The bytes of a message of sync.proto: those that `bytes(message)` gives, unknown fields included, only faster.

    Raises TypeError for a type that sync.proto has not, and TypeError or ValueError for a value that does not fit its
    field, such as a count beyond int32."""
    try:
        return _shape(type(message)).to_bytes(message)
    except DecodeError as error:
        raise ValueError(f"the unknown fields kept in a {type(message).__name__} are not protobuf") from error


def decode(data: bytes, message_type: type[_Message]) -> _Message:
    """The message of type `message_type`, one of sync.proto, that `data` encodes.

    Fields that are not known, or not of the known type, are kept in their messages as betterproto2 keeps unknown ones.
    Raises ProtocolViolation where the bytes are no such message, a string that is not UTF-8 included, ResourceExhausted
    where it holds more than MAX_RECORDS, and TypeError for a type that sync.proto has not."""
    return cast(_Message, _shape(message_type).from_bytes(data))


def _shape(message_type: type[betterproto2.Message]) -> _Shape:
    shape = _SHAPES.get(message_type)
    if shape is None:
        raise TypeError(f"{message_type.__name__} is no message of sync.proto")
    return shape


class ReceivedMessage(Generic[_RecordMessage]):
    """A message of records as protobuf's runtime has read it: its fields, without a dataclass for each record."""

    __slots__ = ("_runtime", "items", "opened_us", "origins", "sent_us")
    _shape: ClassVar[_Shape]

    def __init__(self, data: bytes) -> None:
        """Raises ProtocolViolation and ResourceExhausted as `decode` does."""
        self._runtime = self._shape.read(data)
        #: something with the fields of an EnvCapacity for each record
        self.items: Sequence[Any] = self._runtime.items
        #: something with the fields of a ClusterOrigin for each row
        self.origins: Sequence[Any] = self._runtime.origins
        #: as they were sent, for `waits.Waits`
        self.sent_us: int = self._runtime.sent_us
        self.opened_us: int = self._runtime.opened_us

    def decoded(self) -> _RecordMessage:
        """The whole message, unknown fields included."""
        return cast(_RecordMessage, self._shape.from_bytes(self._runtime.SerializeToString()))


class ReceivedReport(ReceivedMessage[ReportFederationRequest]):
    """What was received of a ReportFederationRequest."""

    __slots__ = ()
    _shape = _REPORT


class ReceivedBroadcast(ReceivedMessage[FederationBroadcast]):
    """What was received of a FederationBroadcast."""

    __slots__ = ("clusters",)
    _shape = _BROADCAST

    def __init__(self, data: bytes) -> None:
        """Raises as every one of them."""
        super().__init__(data)
        #: how many clusters report to the hub; 0: not said
        self.clusters: int = self._runtime.clusters


class EncodedBroadcast(NamedTuple):
    """A FederationBroadcast in bytes."""

    data: bytes = b""

    def timed(self, sent_us: int, opened_us: int = 0, clusters: int = 0) -> EncodedBroadcast:
        """The same with its own time, and what else is said once in a call, which it must not have yet; numbers as in
        sync.proto, 0: not said."""
        more = _BROADCAST.runtime_type(sent_us=sent_us, opened_us=opened_us, clusters=clusters)
        return EncodedBroadcast(self.data + more.SerializeToString())


class BroadcastEncoder:
    """The messages in which a hub passes changes on to many, in bytes.

    They are those of `broadcast_messages` and `encode`. A record that goes out with the same age once more within a
    millisecond, as it does when a report is told to everybody who watches, is not encoded again; after that its age is
    another one. So what is kept is what went out within a millisecond."""

    def __init__(self) -> None:
        self._began = -math.inf
        #: by its id, a change with the age and the bytes it goes out with; while it is held the id is no other's
        self._encoded: dict[int, tuple[Change, int, bytes]] = {}

    def messages(self, changes: Sequence[Change], now: float) -> Iterator[EncodedBroadcast]:
        """The messages that tell of `changes`, made as they are asked for; no changes make none. `now` as for
        `broadcast_messages`."""
        if not changes:
            return
        alone = self._one_message(changes, now)
        if alone is not None:
            yield EncodedBroadcast(alone)
        else:
            for message in broadcast_messages(changes, now):
                yield EncodedBroadcast(encode(message))

    def _one_message(self, changes: Sequence[Change], now: float) -> bytes | None:
        """The one message that all changes go into, or None where it takes more: so many that the size has to be
        watched, or two instances of one cluster."""
        if len(changes) > AT_ONCE:
            return None
        if not 0 <= now - self._began < 0.001:
            self._began = now
            self._encoded.clear()
        parts: list[bytes] = []
        origins: dict[str, Origin] = {}
        origin: Origin | None = None
        last_cluster = ""
        age, observed_at = 0, None
        for change in changes:
            if isinstance(change, Capacity):
                cluster = change.cluster_id
                if change.observed_at is not observed_at:
                    observed_at = change.observed_at
                    age = _milliseconds(observed_at, now)
                sent_age = age
            else:
                cluster = change.identity[0]
                sent_age = WITHDRAWN_AGE_MS
            if change.origin is not origin or cluster is not last_cluster:
                origin, last_cluster = change.origin, cluster
                if origin is not None and origin.seq > 0:
                    named = origins.setdefault(cluster, origin)
                    if named.instance != origin.instance:
                        return None
                    if origin.started_at < named.started_at:
                        origins[cluster] = origin
            known = self._encoded.get(id(change))
            if known is None or known[1] != sent_age:
                known = self._encoded[id(change)] = (change, sent_age, _encoded_item(change, sent_age))
            parts.append(known[2])
        rows = _BROADCAST.runtime_type()
        for values in _rows(origins, now):
            rows.origins.add(**values)
        # A message is the sum of its parts: first the records, then the rows, as their numbers are in sync.proto.
        parts.append(rows.SerializeToString())
        return b"".join(parts)


def _encoded_item(change: Change, age: int) -> bytes:
    """A FederationBroadcast with nothing but this record."""
    message = _BROADCAST.runtime_type()
    message.items.add(**_item_values(change, age))
    encoded: bytes = message.SerializeToString()
    return encoded

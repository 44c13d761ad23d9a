"""`trio-federation status`: how a running agent is, and what it knows of its own cluster and the others. The agent
decides what each thing means; this command only asks and shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import click
import msgspec

from trio_federation.cli.client import Access, Count, Headroom, Question, ask, asks_an_agent, read, refusal
from trio_federation.cli.tables import (
    Column,
    Line,
    Row,
    Section,
    as_many_as_fit,
    duration,
    headroom,
    number,
    paragraph,
    show,
    show_json,
    table,
)

#: What was counted since the start.
Total = Annotated[int, msgspec.Meta(ge=0)]


class LastError(msgspec.Struct):
    """The last failure of a part. `age`: seconds since."""

    what: str
    text: str
    age: float


class Part(msgspec.Struct):
    """A source or a sink of an agent. Times are in seconds before now, `next_try` from now; None for never. `dropped`:
    how many of its records were refused since the start, by reason."""

    name: str
    state: str
    since: float | None = None
    last_success: float | None = None
    last_error: LastError | None = None
    next_try: float | None = None
    failures: int = 0
    dropped: dict[str, Total] = {}


class Stream(msgspec.Struct):
    """One of the two streams to a hub. `since`: seconds for which it is up, or is not."""

    up: bool
    since: float | None = None


class HubPart(Part):
    """A hub of an agent, seen from there."""

    last_batch: float | None = None
    streams: dict[str, Stream] = {}


class OwnHub(msgspec.Struct):
    """The hub that runs in the process which was asked. `clusters`: who reports to it now; `credentials`: what has
    proven each of them."""

    reporters: int
    watchers: int
    records: int
    clusters: list[str] = []
    credentials: dict[str, str] = {}


class Readiness(msgspec.Struct):
    """What `/readyz` says."""

    ready: bool
    why_not: list[str] = []
    cluster_id: str | None = None
    mode: str = ""
    version: str = ""
    #: seconds
    uptime: float | None = None
    sources: list[Part] = []
    sinks: list[Part] = []
    hubs: list[HubPart] = []
    hub: OwnHub | None = None
    #: what is allowed in the configuration, and yet should be known
    notes: list[str] = []
    plugin_failures: list[str] = []


class Record(msgspec.Struct):
    """A record of `/v1/capacity`, so far as it is shown. `age` is in seconds."""

    cluster_id: str
    namespace: str
    env_name: str
    idle: Count
    running: Count
    pending: Count
    desired: Count
    autoscaling_enabled: bool
    capacity: Headroom
    member_pool: str = ""
    scaling_group: str = ""
    state: str = ""
    age: float | None = None


class Known(msgspec.Struct):
    """What `/v1/capacity` says."""

    records: list[Record]
    cluster_id: str | None = None


class Nothing(msgspec.Struct):
    """What `/v1/capacity` says with status 404: why there are no records here."""

    error: str


@click.command()
@asks_an_agent
@click.option("--namespace", help="Only the records of this namespace.")
@click.option("--env", help="Only the records of envs of this name.")
def status(url: str, access: Access, timeout: float, as_json: bool, namespace: str | None, env: str | None) -> None:
    """Show how a running agent is, and the capacity that it knows.

    An agent that is not ready says why, and is an answer as good as any other: exit code 0. A hub without an agent
    knows of no capacity. Into a pipe or a file nothing is shortened. --json prints {"readiness": ..., "capacity": ...},
    the answers of /readyz and /v1/capacity."""
    if env is not None and namespace is None:
        raise click.UsageError("--env needs --namespace, too: an env is named by both.")
    narrow = {name: value for name, value in (("namespace", namespace), ("env", env)) if value is not None}
    questions = [Question("/readyz", statuses=(200, 503)), Question("/v1/capacity", narrow, statuses=(200, 404))]
    answers = ask(url, questions, timeout, access=access)
    known: Known | Nothing
    readiness = read(url, questions[0], answers[0], Readiness)
    if "records" in answers[1]:
        known = read(url, questions[1], answers[1], Known)
    else:
        known = read(url, questions[1], answers[1], Nothing)
        # Only a hub has nothing: an agent that does not know the path, or an address for metrics alone, is a mistake.
        if readiness.mode != "hub":
            raise refusal(url, questions[1], 404, known.error)
    if as_json:
        show_json(dict(zip(("readiness", "capacity"), answers, strict=True)))
        return
    show(lambda width: [*readiness_lines(readiness, width), [], *capacity_lines(known, narrow, width)])


#: How each state of a part is shown: green where it is well.
STATE_STYLES = {
    "live": "green",
    "working": "green",
    "connected": "green",
    "starting": "yellow",
    "connecting": "yellow",
    "partly": "yellow",
    "not_live": "yellow",
    "failing": "bold red",
    "blocked": "bold red",
}

_PARTS = (
    Column("part", least=12),
    Column("state", least=8),
    number("for"),
    number("last success"),
    number("last error"),
    number("next try"),
)


def readiness_lines(readiness: Readiness, width: int | None) -> Iterator[Line]:
    """The lines about the agent itself."""
    parts = [("hub ", part) for part in readiness.hubs] + [
        ("", part) for part in (*readiness.sources, *readiness.sinks)
    ]
    unwell = [f"{kind}{part.name} {_state(part)}" for kind, part in parts if STATE_STYLES.get(part.state) != "green"]
    if not readiness.ready:
        yield [("not ready", "bold red")]
    elif unwell:
        yield from paragraph(f"ready, but not all is well: {', '.join(unwell)}", width, style="bold yellow")
    else:
        yield [("ready", "bold green")]
    for reason in readiness.why_not:
        yield from paragraph(reason, width, indent=2, first="- ")
    facts = (
        readiness.cluster_id and f"cluster {readiness.cluster_id}",
        readiness.mode,
        readiness.version and f"version {readiness.version}",
        None if readiness.uptime is None else f"up {duration(readiness.uptime)}",
    )
    yield from paragraph(", ".join(fact for fact in facts if fact), width)
    if (hub := readiness.hub) is not None:
        text = f"hub here: {hub.reporters} reporters, {hub.watchers} watchers, {hub.records} records"
        yield from paragraph(text, width)
        if hub.clusters:
            first = "reporting: "
            room = None if width is None else width - len(first)
            proven = [f"{name} ({by})" if (by := hub.credentials.get(name)) else name for name in hub.clusters]
            yield [(first + as_many_as_fit(proven, room), "")]
    for note in readiness.notes:
        yield from paragraph(note, width, style="yellow", first="note: ")
    if parts:
        yield []
        yield from table(_PARTS, [Section("", [_part_row(kind, part) for kind, part in parts])], width)
    if readiness.plugin_failures:
        yield []
    for failure in readiness.plugin_failures:
        yield from paragraph(failure, width, style="red", first="failed: ")


def _part_row(kind: str, part: Part) -> Row:
    error = part.last_error
    successes = [part.last_success]
    if isinstance(part, HubPart):
        successes.append(part.last_batch)  # the watch worked then, however long ago it was opened
    cells = (
        f"{kind}{part.name}",
        _state(part),
        _time(part.since, ""),
        _time(min((each for each in successes if each is not None), default=None), " ago", "never"),
        _time(None if error is None else error.age, " ago"),
        "-" if part.next_try is None else f"in {duration(part.next_try)}",
    )
    notes = []
    if isinstance(part, HubPart) and not all(stream.up for stream in part.streams.values()):
        streams = [f"{name} {_stream(stream)}" for name, stream in part.streams.items()]
        notes.append((", ".join([*streams, f"last batch {_time(part.last_batch, ' ago', 'never')}"]), ""))
    if error is not None:
        text = f"{error.what}: {error.text}"
        if part.failures > 1:
            text += f" (failures so far: {part.failures})"
        notes.append((text, "dim" if STATE_STYLES.get(part.state) == "green" else "red"))
    if part.dropped:
        most_first = sorted(part.dropped.items(), key=lambda each: (-each[1], each[0]))
        notes.append((f"dropped so far: {', '.join(f'{reason} {count}' for reason, count in most_first)}", ""))
    return Row(cells, {1: STATE_STYLES.get(part.state, "")}, notes)


def _state(part: Part) -> str:
    return part.state.replace("_", " ")


def _stream(stream: Stream) -> str:
    return ("up" if stream.up else "down") + ("" if stream.since is None else f" for {duration(stream.since)}")


def _time(seconds: float | None, after: str, never: str = "-") -> str:
    return never if seconds is None else duration(seconds) + after


_RECORDS = (
    Column("cluster", least=9),
    Column("pool", least=11),
    Column("group", least=5),
    number("idle"),
    number("running"),
    number("pending"),
    number("desired"),
    number("headroom"),
    number("age"),
    Column("state", least=6),
)


def capacity_lines(known: Known | Nothing, narrow: dict[str, str], width: int | None) -> Iterator[Line]:
    """The lines about what the agent knows: the records by env, those of its own cluster marked."""
    if isinstance(known, Nothing):
        yield from paragraph(known.error, width)
        return
    of = "".join(f", {name} {value}" for name, value in narrow.items())
    if not known.records:
        yield from paragraph(f"records: none{of}", width)
        return
    envs: dict[tuple[str, str], list[Record]] = {}
    for record in known.records:
        envs.setdefault((record.namespace, record.env_name), []).append(record)
    own = known.cluster_id is not None and any(record.cluster_id == known.cluster_id for record in known.records)
    mark = "; * marks the cluster of this agent" if own else ""
    yield from paragraph(f"records: {len(known.records)}, envs: {len(envs)}{of}{mark}", width)
    yield []
    sections = [
        Section("/".join(env), [_record_row(record, known.cluster_id) for record in sorted(envs[env], key=_order)])
        for env in sorted(envs)
    ]
    yield from table(_RECORDS, sections, width)


def _order(record: Record) -> tuple[str, str, str]:
    return record.cluster_id, record.member_pool, record.scaling_group


def _record_row(record: Record, cluster_id: str | None) -> Row:
    own = record.cluster_id == cluster_id
    cells = (
        f"{record.cluster_id} *" if own else record.cluster_id,
        record.member_pool or "-",
        record.scaling_group or "-",
        str(record.idle),
        str(record.running),
        str(record.pending),
        str(record.desired),
        headroom(record.capacity) if record.autoscaling_enabled else "-",
        _time(record.age, ""),
        record.state or "-",
    )
    return Row(cells, {0: "bold" if own else "", 3: "green" if record.idle else "dim"})

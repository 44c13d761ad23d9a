"""What is asked about capacity over HTTP: `/v1/capacity`, `/v1/place` and what became of a placement, from the query or
the body of a request to JSON. Every rule about capacity and placement is in `registry.py` and `router.py`; who may ask
is `protection.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from trio_federation.admin.answers import Answers
from trio_federation.admin.protection import content_type_fault, origin_fault, shown
from trio_federation.admin.streaming import StreamedResponse, Trouble
from trio_federation.capacity import Capacity, fault, is_label, is_subdomain
from trio_federation.registry import Registry
from trio_federation.reservations import Outcome
from trio_federation.router import PLACEMENTS_KEPT, Candidate, Placement

#: Bytes that the body of a request may have: room for names and targets of any length, as many as there may be.
MAX_BODY = 64 * 1024
#: Targets that a create may have been turned away from already.
MOST_TARGETS = 100

# Records and envs that are looked at in one go: about a millisecond's work, and a piece of about 100 KiB.
_SLICE = 256

_JSON = "application/json"


def _plain(value: object) -> str | int | float:
    """A value of a subclass of str, int or float, as parsers of YAML or XML make them, as what it is."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} is nothing that JSON can say")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_NO_AGENT = "this process runs no agent, so it knows of no capacity; ask the agent of a cluster"

#: How the fields of a record are called in a query.
_NAMES = {"namespace": "namespace", "env_name": "env", "scaling_group": "group"}

#: What `GET /v1/place` takes: either a create, or the id of a placement of the past.
_PLACE_KEYS = ("namespace", "env", "group", "not_these", "id")

_StructT = TypeVar("_StructT", bound=msgspec.Struct)


class Refusal(HTTPException):
    """A request that is not answered, and a line that says what to do about it."""


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """Which create `/v1/place` is asked about."""

    namespace: str
    env: str
    group: str = ""
    not_these: list[str] = []
    forwarded: bool = False


class _Reported(msgspec.Struct, forbid_unknown_fields=True):
    """What became of a placement."""

    outcome: Outcome


_CREATE = (
    'send {"namespace": "…", "env": "…"}, and, where they apply, "group": "…", "not_these": ["CLUSTER::POOL"] and '
    '"forwarded": true'
)
_OUTCOME = f'send {{"outcome": "…"}}, with one of {", ".join(Outcome)}'


def json_response(content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON, as every answer under /v1 is."""
    return Response(_encoder.encode(content), status_code, headers, _JSON)


def error_response(status_code: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """`{"error": "one line"}`."""
    return json_response({"error": text}, status_code, headers)


def api_routes(answers: Answers) -> list[Route]:
    """`GET /v1/capacity`, `GET /v1/place`, `POST /v1/place` and `POST /v1/place/ID/outcome`. Handlers raise Refusal for
    what they do not answer."""
    capacity_trouble = Trouble("/v1/capacity")

    async def capacity(request: Request) -> Response:
        registry = answers.registry
        if registry is None:
            raise Refusal(404, _NO_AGENT)
        query = _query(request, ("namespace", "env"))
        namespace, env = query.get("namespace"), query.get("env")
        if env is not None and namespace is None:
            raise Refusal(400, "env is given without a namespace; add namespace=NAMESPACE")
        _check_names(namespace, env)
        return StreamedResponse(
            lambda: capacity_pieces(registry, namespace, env),
            media_type=_JSON,
            trouble=capacity_trouble,
            instead=error_response(500, "the records could not be written; the log says why"),
        )

    async def place(request: Request) -> Response:
        reserve = request.method == "POST"
        if not reserve and "id" in request.query_params:
            return json_response(_of_the_past(answers, _id_by_query(request)))
        asked = await _posted(request, _Asked, _CREATE) if reserve else _asked_by_query(request)
        _check_names(asked.namespace, asked.env, asked.group)
        _check_targets(asked.not_these)
        if answers.place is None:
            raise Refusal(404, _NO_AGENT)
        placement = answers.place(
            asked.namespace,
            asked.env,
            asked.group,
            reserve=reserve,
            not_these=asked.not_these,
            forwarded=asked.forwarded,
        )
        return json_response(_placement(placement))

    async def outcome(request: Request) -> Response:
        reported = await _posted(request, _Reported, _OUTCOME)
        if answers.report_outcome is None:
            raise Refusal(404, _NO_AGENT)
        placement_id = request.path_params["placement_id"]
        counts = answers.report_outcome(placement_id, reported.outcome)
        if counts is None:
            raise _not_remembered(placement_id)
        return json_response({"id": placement_id, "outcome": counts})

    return [
        Route("/v1/capacity", capacity),
        Route("/v1/place", place, methods=["GET", "POST"]),
        Route("/v1/place/{placement_id}/outcome", outcome, methods=["POST"]),
    ]


# Capacity.


async def capacity_pieces(registry: Registry, namespace: str | None, env: str | None) -> AsyncIterator[bytes]:
    """What `/v1/capacity` says, in pieces of at most `_SLICE` records; some are empty.

    All envs, those of one namespace, or one env. Sorted by namespace, env, cluster, pool and group. Each env is as it
    was at one moment; between envs time goes by. The caller lets others have their turn after every piece."""
    head = _encoder.encode({"cluster_id": registry.local_cluster_id, "ttl": registry.ttl})
    text = bytearray(head[:-1] + b',"records":[')
    separator = b""
    work = 0
    envs: Iterable[list[Capacity]]
    envs = registry.by_env() if namespace is None or env is None else [registry.records(namespace, env)]
    for found in envs:
        now = registry.now()
        work += 1
        if namespace is None or (found and found[0].namespace == namespace):
            for record in sorted(found, key=attrgetter("sort_key")):
                text += separator
                text += _encoder.encode(_record(record, now))
                separator = b","
                work += 1
                if work >= _SLICE:
                    yield bytes(text)
                    text.clear()
                    work = 0
        if work >= _SLICE:
            yield bytes(text)
            text.clear()
            work = 0
    yield bytes(text + b"]}")


_RECORD_FIELDS = tuple(field.name for field in fields(Capacity))
_record_values = attrgetter(*_RECORD_FIELDS)


def _record(record: Capacity, now: float) -> dict[str, Any]:
    told = dict(zip(_RECORD_FIELDS, _record_values(record), strict=True))
    origin = record.origin
    told["origin"] = None if origin is None else {"instance": origin.instance, "seq": origin.seq}
    told["age"] = None if record.observed_at is None else _rounded(max(0.0, now - record.observed_at))
    return told


# Placement.


def _placement(placement: Placement) -> dict[str, Any]:
    told = {field.name: getattr(placement, field.name) for field in fields(placement) if field.name != "candidates"}
    candidates = [_candidate(candidate) for candidate in placement.candidates]
    return told | {"explanation": list(placement.explanation), "candidates": candidates}


def _of_the_past(answers: Answers, placement_id: str) -> dict[str, Any]:
    """A placement that was made before, what for, how many seconds ago, and what became of it. Raises Refusal where
    nobody knows it."""
    if answers.placed is None or answers.registry is None:
        raise Refusal(404, _NO_AGENT)
    placed = answers.placed(placement_id)
    if placed is None:
        raise _not_remembered(placement_id)
    ago = _rounded(max(0.0, answers.registry.now() - placed.at))
    asked = {"namespace": placed.namespace, "env": placed.env_name, "group": placed.group}
    return _placement(placed.placement) | asked | {"ago": ago, "outcome": placed.outcome}


def _not_remembered(placement_id: str) -> Refusal:
    kept = f"an agent remembers the last {PLACEMENTS_KEPT:,} that reserved, and a restart forgets them"
    return Refusal(404, f"no placement with the id {shown(placement_id)} is remembered; {kept}")


def _candidate(candidate: Candidate) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for field in fields(candidate):
        told[field.name] = getattr(candidate, field.name)
        if field.name == "member_pool":
            told["target"] = candidate.target
    told["age"] = _rounded(candidate.age)
    return told


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


# What is asked.


def _query(request: Request, known: tuple[str, ...]) -> dict[str, str]:
    """The query's parameters, each known and given once at most."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            takes = f"{', '.join(known)}" if known else "none; POST takes its fields from a JSON object in the body"
            raise Refusal(400, f"unknown query parameter {shown(name)}; {request.scope['path']} takes {takes}")
        if name in found:
            raise Refusal(400, f"{name} is given twice; give it once")
        found[name] = value
    return found


def _id_by_query(request: Request) -> str:
    query = _query(request, _PLACE_KEYS)
    if len(query) > 1:
        others = " and ".join(name for name in _PLACE_KEYS if name in query and name != "id")
        raise Refusal(400, f"id is given together with {others}; an id alone says which placement is meant")
    return query["id"]


def _asked_by_query(request: Request) -> _Asked:
    query = _query(request, _PLACE_KEYS)
    for name in ("namespace", "env"):
        if name not in query:
            raise Refusal(400, f"{name} is missing; ask for /v1/place?namespace=NAMESPACE&env=ENV")
    targets = query.get("not_these")
    return _Asked(query["namespace"], query["env"], query.get("group", ""), targets.split(",") if targets else [])


async def _posted(request: Request, form: type[_StructT], wanted: str) -> _StructT:
    """The fields of a POST; `wanted`: what to send. Raises Refusal where it may come from a page that is not ours,
    before the body is read."""
    headers = request.headers
    if (text := origin_fault(headers.getlist("origin"), headers.get("host", ""))) is not None:
        raise Refusal(403, text)
    if (text := content_type_fault(headers.getlist("content-type"))) is not None:
        raise Refusal(415, text)
    _query(request, ())
    body = bytearray()
    try:
        async with aclosing(request.stream()) as parts:
            async for part in parts:
                body += part
                if len(body) > MAX_BODY:
                    raise Refusal(413, f"the body is longer than {MAX_BODY} bytes; {wanted}")
    except ClientDisconnect as error:
        raise Refusal(400, "the body ended early") from error
    try:
        return msgspec.json.decode(body, type=form)
    except ValueError as error:  # what msgspec's errors are, and those of text that is not UTF-8
        raise Refusal(400, f"the body is not what was asked for: {_one_line(str(error))}; {wanted}") from error


def _check_names(namespace: str | None, env: str | None, group: str = "") -> None:
    """Raises Refusal for a name that no record can have; None stands for one that is not asked for."""
    asked = Capacity("any", "any" if namespace is None else namespace, "any" if env is None else env, "", group)
    if (bad := fault(asked)) is not None:
        raise Refusal(400, _NAMES[bad.reason] + bad.detail.removeprefix(bad.reason))


def _check_targets(targets: Sequence[str]) -> None:
    """Raises Refusal for more targets than there may be, and for a text that is none."""
    if len(targets) > MOST_TARGETS:
        raise Refusal(400, f"not_these names {len(targets)} targets; name at most {MOST_TARGETS}")
    for target in targets:
        cluster_id, _, pool = target.partition("::")
        if not is_label(cluster_id) or not is_subdomain(pool):
            raise Refusal(400, f"not_these: {shown(target)} is no target; write each as CLUSTER::POOL")


def _one_line(text: str) -> str:
    """A message that may repeat what was sent, without what would break its line, and not too long."""
    text = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return text if len(text) <= 200 else text[:199] + "…"

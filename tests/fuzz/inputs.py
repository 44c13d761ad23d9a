"""What fuzzing begins with: for each target real inputs, made here or kept in `corpus/TARGET/`, and ways to damage them
that keep enough of their form to get past the first check. A kept file is one that has found a fault, or what a real
peer has said; its name says which. What the inputs are fed to is in `targets.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import DataFrame, HeadersFrame
from hypothesis import strategies as st

from tests.fuzz.targets import GOOD, ODD, RECORD, SECRET, TOKEN, conversation
from tests.kubernetes.json_texts import JSON, dump
from tests.rpc.harness import REPORT_PATH, WATCH_PATH
from tests.rpc.test_garbage import REQUEST, any_frames, frame, packed
from trio_federation import wire
from trio_federation.capacity import Capacity, Change, Origin, Withdrawal
from trio_federation.credentials import make_token
from trio_federation.identity import call_metadata

CORPUS = Path(__file__).resolve().parent / "corpus"
ROOT = Path(__file__).resolve().parent.parent.parent


def kept(target: str) -> dict[str, bytes]:
    """By name, the files that are kept for a target."""
    folder = CORPUS / target
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}


@cache
def made(target: str) -> Sequence[bytes]:
    """Inputs that a target gets far with."""
    return _MADE[target]()


def inputs(target: str) -> Sequence[bytes]:
    """All that fuzzing begins with."""
    return [*made(target), *kept(target).values()]


def _messages() -> list[bytes]:
    origin = Origin("0f0f", 7, 4000.0)
    changes: list[Change] = [
        replace(RECORD, pending=1, autoscaling_enabled=True, saturated_for=4.0, observed_at=4990.0, origin=origin),
        Withdrawal((GOOD, "agents", "python", "p2"), origin),
        Capacity(GOOD, "agents", "node", "", "gpu", idle=1, observed_at=4999.0),
    ]
    (both,) = wire.broadcast_messages(changes, 5000.0)
    return [wire.encode(both), *map(wire.encode, both.items), *map(wire.encode, both.origins), b""]


def _agents() -> list[bytes]:
    return [conversation(client_side=True, to_its_end=end) for end in (False, True)]


def _hubs() -> list[bytes]:
    return [conversation(client_side=False, to_its_end=end) for end in (False, True)]


def _configurations() -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "config").rglob("*.toml"))]


def _objects() -> list[dict[str, object]]:
    metadata = {"name": "python", "namespace": "agents", "resourceVersion": "7", "labels": {"example.com/group": "cpu"}}
    observed = {
        "name": "p1",
        "idleCount": 3,
        "runningCount": 2,
        "desiredReplicas": 5,
        "scalingGroup": "cpu",
        "autoscalingEnabled": True,
        "scaleUpHeadroom": 4,
        "state": "Saturated",
        "saturatedUntil": "2026-01-02T03:04:05Z",
    }
    sums = {"idleReplicas": 3, "scalingGroups": [{"name": "cpu", "totalIdle": 3, "totalPending": 1}]}
    return [
        # a SandboxEnv with members, and one with sums
        {
            "metadata": metadata,
            "spec": {"clusters": [{"clusterID": ODD, "members": [{"name": "p1", "config": {"scalingGroup": "cpu"}}]}]},
            "status": {"clusters": [{"isLocal": True, "observedMembers": [observed]}], **sums},
        },
        {"metadata": {**metadata, "name": "node"}, "spec": {}, "status": sums},
        # a SandboxSet, a SandboxWarmPool and a pool of a kind of its own, in one
        {
            "metadata": {**metadata, "name": "pool"},
            "spec": {
                "replicas": 3,
                "template": "browser",
                "maxReplicas": "9",
                "templateRef": {"name": "t"},
                "sandboxTemplateRef": {"name": "python"},
            },
            "status": {"readyReplicas": 2, "availableReplicas": 2, "free": "2", "parts": [{"busy": 1.0}]},
        },
        # a SandboxClaim
        {
            "metadata": {**metadata, "name": "claim"},
            "spec": {"sandboxTemplateRef": {"name": "python"}, "warmPoolRef": {"name": "pool"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}], "sandbox": {"name": "s"}},
        },
    ]


def _lists_and_watches() -> list[bytes]:
    objects = _objects()
    error = {"kind": "Status", "code": 410, "reason": "Expired", "details": {"causes": [{"reason": "X"}]}}
    events: list[object] = [
        *({"type": "ADDED", "object": each} for each in objects),
        {"type": "MODIFIED", "object": objects[1]},
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}},
        {"type": "DELETED", "object": objects[0]},
    ]
    return [
        dump({"kind": "List", "metadata": {"resourceVersion": "5"}, "items": objects}),
        dump({"metadata": {"resourceVersion": "5", "continue": "next"}, "items": objects[:1]}),
        b"".join(dump(event) + b"\n" for event in events),
        b"".join(dump(event) + b"\r\n" for event in [*events[:2], {"type": "ERROR", "object": error}]),
    ]


def _requests() -> list[bytes]:
    body = json.dumps({"namespace": RECORD.namespace, "env": RECORD.env_name, "group": "cpu"}).encode()
    known = b"host: localhost\r\nauthorization: Bearer " + TOKEN.encode() + b"\r\n"
    to_post = known + b"content-type: application/json\r\n"
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    expecting = b"content-length: 2\r\nexpect: 100-continue\r\n\r\n{}"
    return [
        b"GET /metrics HTTP/1.1\r\nhost: localhost\r\naccept: */*\r\n\r\n"
        b"HEAD /readyz HTTP/1.1\r\nhost: [::1]:80\r\n\r\n",
        b"GET /v1/capacity?namespace=agents&env=python HTTP/1.1\r\n" + known + b"\r\n",
        b"GET /v1/place?namespace=agents&env=python&group=cpu HTTP/1.1\r\n" + known + b"origin: http://x\r\n\r\n",
        b"POST /v1/place HTTP/1.1\r\n" + to_post + b"content-length: %d\r\n\r\n" % len(body) + body,
        b"POST /v1/place HTTP/1.1\r\n" + to_post + chunked,
        b"POST /v1/place/0123456789abcdef/outcome HTTP/1.1\r\n" + to_post + expecting,
        b"GET / HTTP/1.1\r\nhost: localhost\r\n" + upgrade + b"upgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\n\r\n",
        _http2_request(body),
    ]


def _http2_request(body: bytes) -> bytes:
    """A GET and a POST over HTTP/2, without asking first."""
    peer = H2Connection(H2Configuration(client_side=True))
    peer.initiate_connection()
    for stream_id, method, path, sent in ((1, "GET", "/metrics", b""), (3, "POST", "/v1/place", body)):
        headers = [(":method", method), (":scheme", "http"), (":authority", "localhost"), (":path", path)]
        peer.send_headers(stream_id, [*headers, ("content-type", "application/json")], end_stream=not sent)
        if sent:
            peer.send_data(stream_id, sent, end_stream=True)
    data: bytes = peer.data_to_send()
    return data


_MADE: dict[str, Callable[[], list[bytes]]] = {
    "wire": _messages,
    "server": _agents,
    "client": _hubs,
    "config": _configurations,
    "kubernetes": _lists_and_watches,
    "admin": _requests,
}

# --- damage ----------------------------------------------------------------------------------------------------------


def _frames(data: bytes) -> list[bytes]:
    """HTTP/2's frames; what is no whole one comes last."""
    parts = []
    while data:
        length = 9 + int.from_bytes(data[:3], "big")
        parts.append(data[:length])
        data = data[length:]
    return parts


def _fields(data: bytes) -> list[bytes]:
    """Roughly the fields of a message: cut where one of ours may begin."""
    return re.split(rb"(?=[\x08-\x7a])", data)


def _words(data: bytes) -> list[bytes]:
    """Words, and what stands between them."""
    return re.split(rb"(\W+)", data)


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


#: into which parts the inputs of a target are taken apart, and what else may stand there; the second way is finer
_PARTS: dict[str, tuple[Callable[[bytes], list[bytes]], Callable[[bytes], list[bytes]]]] = {
    "wire": (_fields, _fields),
    "server": (_frames, _frames),
    "client": (_frames, _frames),
    "config": (_lines, _words),
    "kubernetes": (_lines, _words),
    "admin": (_lines, _words),
}
#: what may stand in a request, and mostly should not
_odd_headers = st.sampled_from(
    [
        *(("grpc-timeout", text) for text in ("0S", "1n", "1S", "99999999H", "soon")),
        *(("content-length", text) for text in ("0", "5", "-1", "x")),
        *(("te", text) for text in ("gzip", "")),
        *(("content-type", text) for text in ("application/grpc+json", "text/plain", "")),
        *((":path", text) for text in (REPORT_PATH, WATCH_PATH, "", "*")),
        *(
            (name, "x")
            for name in (":method", ":odd", "connection", "X", "grpc-encoding", "x-bin", "x-federation-cluster")
        ),
        *(("authorization", text) for text in ("Bearer ", "Basic eA==", "Bearer x")),
    ]
) | st.tuples(st.text("abc-:_ ", max_size=4), st.text(st.characters(codec="ascii"), max_size=8))


@st.composite
def _odd_requests(draw: st.DrawFn) -> bytes:
    """A request of a good cluster, with some headers left out and odd ones put in, and perhaps a message."""
    headers = [*REQUEST, *call_metadata(ODD, "bb", make_token(SECRET, ODD))]
    for _ in range(draw(st.integers(0, 2))):
        del headers[draw(st.integers(0, len(headers) - 1))]
    for odd in draw(st.lists(_odd_headers, max_size=2)):
        headers.insert(draw(st.sampled_from([0, 3, len(headers)])), odd)
    stream_id = draw(st.sampled_from([1, 3, 5, 7]))
    flags = ("END_HEADERS", *draw(st.sampled_from([(), ("END_STREAM",)])))
    body = draw(st.sampled_from([b"", b"\0\0\0\0\0", b"\1\0\0\0\0", b"\0\0\0\0\2\x0a\0", b"\0\0\0"]))
    data = frame(DataFrame, stream_id, data=body, flags=("END_STREAM",)) if body else b""
    return frame(HeadersFrame, stream_id, data=packed(headers), flags=flags) + data


_numbers = st.integers(-(2**70), 2**70).map(lambda number: str(number).encode())
_texts = st.sampled_from(
    [b"", b"\0", b"\xff", b"\xc3", "\N{LINE SEPARATOR}".encode(), b"x" * 300, b"{", b"[" * 200, b'"']
)
_foreign: dict[str, st.SearchStrategy[bytes]] = {
    "wire": st.sampled_from([b"\x0a\x02\x08\x01", b"\x58" + b"\xff" * 9 + b"\x01", b"\xa0\x06\x01", b"\x0b\x0c"]),
    "server": any_frames | _odd_requests(),
    "client": any_frames,
    "config": st.sampled_from(
        [b"true", b"1e400", b"[hub]\n", b"[[source]]\n", b"inf", b'"""', b"'", b"1979-05-27", b"{}"]
    ),
    "kubernetes": JSON.map(dump),
    "admin": st.sampled_from(
        [
            b"content-length: 5\r\n",
            b"transfer-encoding: chunked\r\n",
            b"host: [\r\n",
            b"\r\n",
            b"%00",
            b"../",
            b"HTTP/2",
            b":",
            b"\t",
        ]
    ),
}


@st.composite
def damaged(draw: st.DrawFn, target: str) -> bytes:
    """An input of a target with some of it changed: bytes flipped, parts cut, doubled, moved, replaced or joined to
    those of another input."""
    begin_with = inputs(target)
    take_apart = _PARTS[target][draw(st.integers(0, 1))]
    parts = take_apart(draw(st.sampled_from(begin_with)))
    foreign = _foreign[target] | _numbers | _texts | st.binary(max_size=8)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, max(0, len(parts) - 1)))
        match draw(st.sampled_from(["flip", "cut", "double", "move", "replace", "insert", "join", "end"])):
            case "flip" if parts and parts[at]:
                part = bytearray(parts[at])
                part[draw(st.integers(0, len(part) - 1))] = draw(st.integers(0, 255))
                parts[at] = bytes(part)
            case "cut":
                del parts[at : at + draw(st.integers(1, 3))]
            case "double":
                parts[at:at] = parts[at : at + draw(st.integers(1, 3))] * draw(st.sampled_from([1, 2, 30]))
            case "move" if parts:
                parts.insert(draw(st.integers(0, len(parts) - 1)), parts.pop(at))
            case "replace":
                parts[at : at + 1] = [draw(foreign)]
            case "join":
                others = take_apart(draw(st.sampled_from(begin_with)))
                parts[at:] = others[draw(st.integers(0, max(0, len(others) - 1))) :]
            case "end" if parts:
                parts[at:] = [parts[at][: draw(st.integers(0, len(parts[at])))]]
            case _:
                parts.insert(at, draw(foreign))
    return b"".join(parts)

"""Agents that are not there: HTTP servers on loopback that say what a test wants, and peers that do not even speak
HTTP. Sockets and time are real. What an agent's answers look like is in the functions at the end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What is answered to a GET of one path: an object as JSON, or bytes as they are."""

    content: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class PretendAgent:
    """A server that knows what to say to each path, and keeps what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        #: by path, without the query; any other is a 404 in plain text
        self.replies: dict[str, Reply] = {}
        #: what was asked for, in its order, with the query
        self.asked: list[str] = []
        #: the headers of each
        self.headers: list[dict[str, str]] = []


@contextmanager
def pretend_agent() -> Iterator[PretendAgent]:
    """A server on loopback for as long as the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            agent.asked.append(self.path)
            agent.headers.append({name.lower(): value for name, value in self.headers.items()})
            reply = agent.replies.get(self.path.partition("?")[0], Reply(b"404 not found", 404))
            body = reply.content if isinstance(reply.content, bytes) else json.dumps(reply.content).encode()
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # clients may go away in the middle of an answer

    with Server(("127.0.0.1", 0), Handler) as server:
        agent = PretendAgent(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield agent
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def peer(serve: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """The URL of a peer on loopback that does `serve` to each connection; its event is set when the block ends."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            serve(connection, over)

    def accept() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                threads.append(threading.Thread(target=one, args=[listener.accept()[0]]))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.02)
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            for thread in (accepting, *threads):
                thread.join()


# What agents say.


def part(name: str, state: str = "live", **changes: Any) -> dict[str, Any]:
    """A source in `/readyz`, or a sink, which has no "dropped" there."""
    return {
        "name": name,
        "state": state,
        "since": 12.0,
        "last_success": 0.4,
        "last_error": None,
        "next_try": 4.6,
        "failures": 0,
        "dropped": {},
    } | changes


def hub_part(name: str, state: str = "connected", **changes: Any) -> dict[str, Any]:
    """A hub in `/readyz`."""
    streams = {"report": {"up": True, "since": 64.0}, "watch": {"up": True, "since": 64.0}}
    return part(name, state, next_try=None, since=64.0) | {"last_batch": 0.8, "streams": streams} | changes


def readiness(**changes: Any) -> dict[str, Any]:
    """What `/readyz` says of an agent that is ready."""
    return {
        "ready": True,
        "why_not": [],
        "cluster_id": "west",
        "mode": "federated",
        "version": "0.1.0",
        "uptime": 754.1,
        "sources": [part("source[0]:fixtures") | {"records": 3}],
        "sinks": [],
        "hubs": [hub_part("hub-a.example:7443")],
        "hub": None,
        "notes": [],
        "plugin_failures": [],
    } | changes


def record(cluster_id: str, env_name: str, member_pool: str, **changes: Any) -> dict[str, Any]:
    """A record of `/v1/capacity`."""
    return {
        "cluster_id": cluster_id,
        "namespace": "agents",
        "env_name": env_name,
        "member_pool": member_pool,
        "scaling_group": "",
        "idle": 3,
        "running": 12,
        "pending": 0,
        "desired": 20,
        "autoscaling_enabled": False,
        "capacity": 0,
        "saturated_for": 0.0,
        "state": "Active",
        "observed_at": 1024.5,
        "origin": {"instance": "abc", "seq": 7},
        "age": 3.21,
    } | changes


def capacity(*records: dict[str, Any], cluster_id: str | None = "west") -> dict[str, Any]:
    """What `/v1/capacity` says."""
    return {"cluster_id": cluster_id, "ttl": 30.0, "records": list(records)}


def candidate(target: str, **changes: Any) -> dict[str, Any]:
    """A candidate of `/v1/place`."""
    cluster_id, _, member_pool = target.partition("::")
    return {
        "cluster_id": cluster_id,
        "member_pool": member_pool,
        "target": target,
        "tier": "idle",
        "idle": 3,
        "reserved": 1,
        "headroom": 0,
        "age": 3.21,
        "state": "Active",
        "verdict": "less idle",
    } | changes


def past_placement(*candidates: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What `/v1/place` says of one by its id."""
    of = {"namespace": "agents", "env": "python", "group": "", "ago": 123.4}
    return placement(*candidates, **of) | changes


def placement(*candidates: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What `/v1/place` says."""
    return {
        "id": "0123456789abcdef",
        "local": False,
        "target": "east::large",
        "reason": "west has none idle for agents/python; east::large has 3 idle",
        "rule": "foreign_idle",
        "candidates": list(candidates),
    } | changes

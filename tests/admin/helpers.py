"""What the tests of the HTTP side share: answers to hand in, requests without a socket, and reading from sockets."""

from __future__ import annotations

import json
import select
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import httpx
import trio
import trio.testing
from starlette.types import ASGIApp, Message

from trio_federation.admin import Answers
from trio_federation.admin.answers import Place
from trio_federation.registry import Registry
from trio_federation.reservations import Outcome
from trio_federation.router import Placed, Placement, Router

#: Far more than a socket pair's buffers hold, so that an answer of this size waits for its reader.
BIG = 32 * 2**20

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n"

READY = {"ready": True, "why_not": [], "cluster_id": "west"}


def whole(exposition: Callable[[], bytes]) -> Callable[[], AsyncIterator[bytes]]:
    """An exposition that comes in one piece."""

    async def pieces() -> AsyncIterator[bytes]:
        yield exposition()

    return pieces


def answers(
    exposition: Callable[[], bytes] = lambda: b"up 1\n",
    *,
    readiness: Callable[[], dict[str, Any]] = lambda: READY,
    healthy: Callable[[], bool] = lambda: True,
    registry: Registry | None = None,
    place: Place | None = None,
    placed: Callable[[str], Placed | None] | None = None,
    report_outcome: Callable[[str, Outcome], Outcome | None] | None = None,
) -> Answers:
    """Answers of a process that is well, as far as nothing else is said."""
    return Answers(
        exposition=whole(exposition),
        readiness=readiness,
        healthy=healthy,
        registry=registry,
        place=place,
        placed=placed,
        report_outcome=report_outcome,
    )


class Asked(NamedTuple):
    """What a router was asked."""

    namespace: str
    env: str
    group: str
    reserve: bool
    not_these: tuple[str, ...] = ()
    forwarded: bool = False


class Placements:
    """A router's answers, and what it was asked and told."""

    def __init__(self, registry: Registry) -> None:
        self.router = Router(registry)
        self.asked: list[Asked] = []
        self.told: list[tuple[str, Outcome]] = []

    def __call__(
        self,
        namespace: str,
        env_name: str,
        group: str = "",
        *,
        reserve: bool = True,
        not_these: Sequence[str] = (),
        forwarded: bool = False,
    ) -> Placement:
        asked = Asked(namespace, env_name, group, reserve, tuple(not_these), forwarded)
        self.asked.append(asked)
        return self.router.place(
            namespace, env_name, group, reserve=reserve, not_these=asked.not_these, forwarded=forwarded
        )

    def report_outcome(self, placement_id: str, outcome: Outcome) -> Outcome | None:
        """As an agent takes it."""
        self.told.append((placement_id, outcome))
        self.router.report_outcome(placement_id, outcome)
        placed = self.router.recent(placement_id)
        return placed.outcome if placed is not None else None

    @property
    def answers(self) -> Answers:
        """Answers of a process that is well, and whose placements these are."""
        return answers(
            registry=self.router.registry, place=self, placed=self.router.recent, report_outcome=self.report_outcome
        )

    @property
    def reserved(self) -> int:
        """How many were reserved."""
        return sum(asked.reserve for asked in self.asked)


class Answer(NamedTuple):
    """What an application answered."""

    status: int
    #: by lower-case name
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, which has to be JSON, and to say so."""
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The one line of a refusal under /v1."""
        body = self.json
        assert list(body) == ["error"]
        line = body["error"]
        assert isinstance(line, str)
        assert line.isprintable()
        return line


async def ask(
    app: ASGIApp,
    path: str,
    *,
    method: str = "GET",
    query: bytes = b"",
    headers: Iterable[tuple[bytes, bytes]] = ((b"host", b"localhost"),),
    body: Iterable[bytes] = (),
) -> Answer:
    """Ask an application directly, with every byte of the request as given. The client stays until it is answered."""
    parts = [*body, b""]
    sent: list[Message] = []

    async def receive() -> Message:
        await trio.lowlevel.checkpoint()
        if not parts:
            await trio.sleep_forever()
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Message) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(errors="surrogatepass"),
        "query_string": query,
        "root_path": "",
        "headers": list(headers),
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 9465),
        "state": {},
        "extensions": {},
    }
    await app(scope, receive, send)
    start, *rest = sent
    assert start["type"] == "http.response.start"
    assert [part.get("more_body", False) for part in rest] == [True] * (len(rest) - 1) + [False]
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    assert len(found) == len(start["headers"]), "a header was given twice"
    return Answer(start["status"], found, b"".join(part.get("body", b"") for part in rest))


async def post(app: ASGIApp, fields: object, *headers: tuple[bytes, bytes], path: str = "/v1/place") -> Answer:
    """POST as a program would; `headers` come on top."""
    given = [(b"host", b"localhost:9465"), (b"content-type", b"application/json"), *headers]
    return await ask(app, path, method="POST", headers=given, body=[json.dumps(fields).encode()])


async def pass_time(clock: trio.testing.MockClock, seconds: float, port: int) -> None:
    """Moves the clock ahead, once the server has taken notice of every connection there is."""
    with trio.fail_after(5):
        async with httpx.AsyncClient(trust_env=False) as last, last.stream("GET", f"http://127.0.0.1:{port}/healthz"):
            pass
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(seconds)


async def read_to_end(stream: trio.SocketStream, within: float = 5) -> bytes:
    """All that comes until the other side closes or resets the connection. Fails where it does neither in that time."""
    parts = []
    with trio.fail_after(within):
        try:
            async for part in stream:
                parts.append(part)
        except trio.BrokenResourceError:
            pass
    return b"".join(parts)


async def is_reset(stream: trio.SocketStream) -> None:
    """Waits until the other side resets the connection, without reading or writing. Fails where it does not in 5 s."""
    with select.epoll() as hang_up:
        hang_up.register(stream.socket.fileno(), 0)  # asks for nothing but the end of the connection in both directions
        with trio.fail_after(5):
            await trio.lowlevel.wait_readable(hang_up.fileno())

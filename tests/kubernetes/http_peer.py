"""An API server that says what a test has written down, over real HTTP on a real socket: each list, page, watch and
probe is answered by the next line of a script, byte for byte. It keeps no objects and knows no rules; a server that
does is `fake_api.py`. How a connection is served is `peers.py`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import trio

from tests.kubernetes.fake_api import Kind, line
from tests.kubernetes.peers import Request, Server, Wire, access_to, client_for
from trio_federation.testing import source_context
from trio_federation_kubernetes.cluster_uid import PATH
from trio_federation_kubernetes.mapping import Mapper
from trio_federation_kubernetes.options import KubernetesOptions
from trio_federation_kubernetes.sandboxenv import SandboxEnvMapper
from trio_federation_kubernetes.source import KubernetesSource

#: Seconds of real time after which a test is given up.
LONGEST = 40.0

#: answers one request
Reply: TypeAlias = Callable[[Wire], Awaitable[None]]


class Asked(NamedTuple):
    """A request that has come."""

    kind: Kind
    params: Mapping[str, str]
    #: on Trio's clock
    at: float
    #: what it came by
    wire: Wire


class ScriptedApi:
    """Answers requests for one resource. Of each kind, the first one gets the first reply, and so on; the last reply is
    that of all that follow. That there is no namespace kube-system it says by itself, and keeps no account of it."""

    def __init__(
        self,
        *,
        lists: Sequence[Reply],
        watches: Sequence[Reply] = (),
        pages: Sequence[Reply] = (),
        probes: Sequence[Reply] = (),
    ) -> None:
        self._scripts: dict[Kind, Sequence[Reply]] = {
            "list": lists,
            "page": pages,
            "watch": watches or (events(),),
            "probe": probes or (page("any"),),
        }
        self.asked: list[Asked] = []

    async def handle(self, request: Request, wire: Wire) -> None:
        """A `peers.Handler`."""
        if urlsplit(request.target).path == PATH:
            await status(404, "NotFound")(wire)
            return
        params = dict(parse_qsl(urlsplit(request.target).query, keep_blank_values=True))
        kind: Kind = "list"
        if "watch" in params:
            kind = "watch"
        elif "continue" in params:
            kind = "page"
        elif params.get("limit") == "1":
            kind = "probe"
        script = self._scripts[kind]
        reply = script[min(len(self.of(kind)), len(script) - 1)]
        self.asked.append(Asked(kind, params, trio.current_time(), wire))
        await reply(wire)

    def of(self, kind: Kind) -> list[Asked]:
        """The requests of one kind."""
        return [each for each in self.asked if each.kind == kind]

    def versions(self) -> list[str]:
        """From where each watch was asked for."""
        return [each.params["resourceVersion"] for each in self.of("watch")]


@asynccontextmanager
async def listening(api: ScriptedApi) -> AsyncIterator[Server]:
    """It listens on 127.0.0.1; whatever it does has to be over in time."""
    server = Server(api.handle, None)
    with trio.fail_after(LONGEST):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, "127.0.0.1")
            yield server
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def source_of(
    api: ScriptedApi, *, ttl: float = 30.0, mapper: Mapper | None = None
) -> AsyncIterator[tuple[KubernetesSource, Server]]:
    """A source that reads from it, through a real client; started."""
    async with listening(api) as server, trio.open_nursery() as nursery:
        source = KubernetesSource(
            KubernetesOptions(),
            source_context(clock=trio.current_time, ttl=ttl, random=Random(0)),
            mapper or SandboxEnvMapper("west"),
            connect=lambda: client_for(access_to(f"http://127.0.0.1:{server.port}")),
        )
        await nursery.start(source.run)
        yield source, server
        nursery.cancel_scope.cancel()


# Replies.


def raw(body: bytes, status: int = 200, **headers: str) -> Reply:
    """This body, whatever it is. Underscores in the names of headers become hyphens."""

    async def reply(wire: Wire) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await wire.answer(body, status, {"Content-Type": "application/json", **named})

    return reply


def page(version: str, *items: Mapping[str, Any], token: str | None = None) -> Reply:
    """A page of a list, or the whole of it."""
    metadata = {"resourceVersion": version} | ({} if token is None else {"continue": token})
    return raw(json.dumps({"kind": "SandboxEnvList", "metadata": metadata, "items": items}).encode())


def status(code: int, reason: str = "", *, token: str | None = None, **headers: str) -> Reply:
    """A refusal."""
    metadata = {} if token is None else {"continue": token}
    said = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "metadata": metadata}
    return raw(json.dumps(said).encode(), code, **headers)


async def hold(wire: Wire) -> None:
    """Goes on without a word until the client leaves."""
    await wire.wait_closed()


async def stall(wire: Wire) -> None:
    """Neither reads nor writes any more, as if the machine were gone."""
    await trio.sleep_forever()


async def end(wire: Wire) -> None:
    """Ends as it should."""
    await wire.chunk(b"")


async def cut(wire: Wire) -> None:
    """Breaks off."""
    await wire.stream.aclose()


def events(*chunks: bytes, then: Reply = hold, pause: float = 0.0) -> Reply:
    """A watch that sends these chunks, with so many seconds between them, and does something then."""

    async def reply(wire: Wire) -> None:
        await wire.begin_chunks()
        for chunk in chunks:
            await wire.chunk(chunk)
            await trio.sleep(pause)
        await then(wire)

    return reply


def env(
    name: str, version: str, *, idle: Any = 1, metadata: Mapping[str, Any] | None = None, **member: Any
) -> dict[str, Any]:
    """A SandboxEnv with one member of the same name."""
    members = [{"name": name, "idleCount": idle, **member}]
    return {
        "metadata": {"name": name, "namespace": "agents", "resourceVersion": version, **(metadata or {})},
        "status": {"clusters": [{"isLocal": True, "observedMembers": members}]},
    }


def bookmark(version: str) -> bytes:
    """As API servers send it: with metadata alone."""
    return line("BOOKMARK", {"kind": "SandboxEnv", "metadata": {"resourceVersion": version}})

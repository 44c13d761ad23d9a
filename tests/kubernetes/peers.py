"""Peers for the tests of TLS, proxies and the client, on real sockets of this machine: a small HTTP/1.1 server whose
answers are written by each test, byte for byte where it matters; a proxy; and certificates."""

from __future__ import annotations

import datetime
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import h11
import trio
import trustme

from trio_federation_kubernetes.access import Access
from trio_federation_kubernetes.client import ApiClient

#: Seconds of real time within which anything on this machine has happened.
SOON = 10


class Authority:
    """Issues certificates."""

    def __init__(self, parent: trustme.CA | None = None) -> None:
        self.ca = parent or trustme.CA(key_type=trustme.KeyType.ECDSA)

    @property
    def pem(self) -> bytes:
        return self.ca.cert_pem.bytes()

    def below(self) -> Authority:
        """An intermediate authority."""
        return Authority(self.ca.create_child_ca(trustme.KeyType.ECDSA))

    def issue(self, *names: str, common_name: str | None = None, days: int = 1) -> tuple[bytes, bytes]:
        """Chain and key for these names, which end in so many days, or ended so many days ago."""
        now = datetime.datetime.now(datetime.UTC)  # noqa: TID251 - certificates live in real time
        issued = self.ca.issue_cert(
            *names,
            common_name=common_name,
            not_before=now - datetime.timedelta(days=30),
            not_after=now + datetime.timedelta(days=days),
            key_type=trustme.KeyType.ECDSA,
        )
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        return chain, issued.private_key_pem.bytes()

    def server(self, *names: str, days: int = 1, common_name: str | None = None) -> ssl.SSLContext:
        """A server's context with such a certificate."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        chain, key = self.issue(*names, days=days, common_name=common_name)
        trustme_blob = trustme.Blob(chain + key)
        with trustme_blob.tempfile() as path:
            context.load_cert_chain(path)
        return context


@dataclass
class Request:
    """What has been asked."""

    target: str
    headers: dict[str, str]
    #: counts the connections of a peer
    connection: int
    method: str = "GET"
    body: bytes = b""


@dataclass
class Wire:
    """A connection, from the server's side."""

    stream: trio.abc.Stream
    number: int
    #: set when the client has closed it
    closed: trio.Event = field(default_factory=trio.Event)

    async def send(self, content: bytes) -> None:
        await self.stream.send_all(content)

    async def answer(
        self, body: bytes | str | dict[str, Any] = b"", status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole answer."""
        if isinstance(body, dict):
            body = json.dumps(body)
        if isinstance(body, str):
            body = body.encode()
        await self.begin(status, {"Content-Length": str(len(body)), **(headers or {})})
        await self.send(body)

    async def begin(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        await self.send(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode())

    async def begin_chunks(self) -> None:
        await self.begin(headers={"Transfer-Encoding": "chunked"})

    async def chunk(self, content: bytes) -> None:
        """A chunk; an empty one ends the answer."""
        await self.send(b"%x\r\n%s\r\n" % (len(content), content))

    async def wait_closed(self) -> None:
        """Until the client has closed the connection."""
        with suppress(trio.BrokenResourceError):
            while await self.stream.receive_some():
                pass
        self.closed.set()


Handler = Callable[[Request, Wire], Awaitable[None]]


class Server:
    """Answers requests by a test's own function, on 127.0.0.1 or another address."""

    def __init__(self, handler: Handler, context: ssl.SSLContext | None) -> None:
        self._handler = handler
        self._context = context
        self.requests: list[Request] = []
        self.wires: list[Wire] = []
        #: the names that clients have sent in their TLS handshakes
        self.names: list[str | None] = []
        self.port = 0
        self.ready = trio.Event()
        if context is not None:
            context.sni_callback = lambda _socket, name, _context: self.names.append(name)

    async def run(self, host: str, *, task_status: trio.TaskStatus[None]) -> None:
        listeners = await trio.open_tcp_listeners(0, host=host)
        self.port = listeners[0].socket.getsockname()[1]
        await trio.serve_listeners(self._serve, listeners, task_status=task_status)  # type: ignore[arg-type]

    async def _serve(self, raw: trio.SocketStream) -> None:
        stream: trio.abc.Stream = raw
        if self._context is not None:
            stream = trio.SSLStream(raw, self._context, server_side=True, https_compatible=True)
        wire = Wire(stream, len(self.wires))
        self.wires.append(wire)
        async with raw:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
                while request := await read_request(stream, wire.number):
                    self.requests.append(request)
                    await self._handler(request, wire)
        wire.closed.set()


async def read_request(stream: trio.abc.Stream, number: int) -> Request | None:
    """The next request, or None where the client is gone."""
    parser = h11.Connection(h11.SERVER)
    found = None
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            content = await stream.receive_some()
            if not content:
                return None
            parser.receive_data(bytes(content))
        elif isinstance(event, h11.Request):
            headers = {name.decode().lower(): value.decode() for name, value in event.headers}
            found = Request(event.target.decode(), headers, number, event.method.decode())
        elif isinstance(event, h11.Data):
            assert found is not None
            found.body += bytes(event.data)
        else:
            return found


class Proxy:
    """An HTTP proxy that connects to one port of this machine, whatever it is asked for."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None, answer: bytes | None = None) -> None:
        self._port = port
        self._context = context
        self._answer = answer
        self.requests: list[Request] = []
        #: what clients have shown of themselves
        self.certificates: list[object] = []
        self.closed: list[trio.Event] = []
        self.port = 0

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        await trio.serve_listeners(self._serve, listeners, task_status=task_status)  # type: ignore[arg-type]

    async def _serve(self, raw: trio.SocketStream) -> None:
        stream: trio.abc.Stream = raw
        if self._context is not None:
            stream = trio.SSLStream(raw, self._context, server_side=True, https_compatible=True)
        closed = trio.Event()
        self.closed.append(closed)
        async with raw:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                request = await read_request(stream, 0)
                if request is not None:
                    self.requests.append(request)
                    self.certificates.append(stream.getpeercert() if isinstance(stream, trio.SSLStream) else None)
                    await self._relay(request, stream)
        closed.set()

    async def _relay(self, request: Request, stream: trio.abc.Stream) -> None:
        if self._answer is not None:
            await stream.send_all(self._answer)
            while await stream.receive_some():
                pass
            return
        async with await trio.open_tcp_stream("127.0.0.1", self._port) as onwards, trio.open_nursery() as nursery:
            if request.target.startswith("http:"):
                path = "/" + request.target.split("/", 3)[3]
                headers = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
                await onwards.send_all(f"{request.method} {path} HTTP/1.1\r\n{headers}\r\n".encode() + request.body)
            else:
                await stream.send_all(b"HTTP/1.1 200 Connected\r\n\r\n")
            nursery.start_soon(_copy, stream, onwards, nursery.cancel_scope)
            nursery.start_soon(_copy, onwards, stream, nursery.cancel_scope)


async def _copy(source: trio.abc.ReceiveStream, sink: trio.abc.SendStream, scope: trio.CancelScope) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while content := await source.receive_some():
            await sink.send_all(content)
    scope.cancel()


@asynccontextmanager
async def serving(
    handler: Handler, context: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Server]:
    """A running server; the block has to end in time."""
    server = Server(handler, context)
    with trio.fail_after(SOON):
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, host)
            yield server
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def proxying(
    port: int, context: ssl.SSLContext | None = None, answer: bytes | None = None
) -> AsyncIterator[Proxy]:
    """A running proxy; the block has to end in time. Where `answer` is given, it gives no other, and waits then."""
    proxy = Proxy(port, context, answer)
    with trio.fail_after(SOON):
        async with trio.open_nursery() as nursery:
            await nursery.start(proxy.run)
            yield proxy
            nursery.cancel_scope.cancel()


class FixedCredential:
    """A credential that stays what it is."""

    def __init__(self, authorization: str | None = None, certificate: tuple[bytes, bytes] | None = None) -> None:
        self.value = authorization
        self.certificate = certificate
        self.refusals = 0

    async def authorization(self) -> str | None:
        return self.value

    async def client_certificate(self) -> tuple[bytes, bytes] | None:
        return self.certificate

    def refused(self) -> None:
        self.refusals += 1


def access_to(server: str, **more: Any) -> Access:
    """A way to a server, with no credential unless one is given."""
    return Access(**{"name": "test", "server": server, "credential": FixedCredential(), **more})


def client_for(access: Access, environment: Mapping[str, str] | None = None, **more: Any) -> ApiClient:
    """A client on Trio's clock."""
    return ApiClient(access, clock=trio.current_time, environment=environment or {}, **more)


async def fine(_request: Request, wire: Wire) -> None:
    """Answers every request."""
    await wire.answer({"kind": "List"})

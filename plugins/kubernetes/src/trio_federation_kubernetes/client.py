"""HTTP to one API server: requests that are answered at once, and streams that go on, each signed, verified, bounded in
time and size, and with one kind of error for each kind of failure. What is asked, and what answers mean, is not known
here; nor is when to try again, but for two cases in which an answer was never meant for the request: a credential that
has run out, and a kept connection that the server had closed. How refusals are read is `status.py`, what is said of
connections that break `failures.py`; contexts of TLS are made in `tls.py`, and a proxy is found in `proxies.py`.

Every connection has TCP keepalive, so that a peer that is gone is noticed within 20 s. A stream has a connection, and a
pool, of its own; what is answered at once shares a pool. A pool in which anything broke is not used again: the HTTP
library keeps some connections for ever that were cut off half-open, and closing the pool is what ends them all."""

from __future__ import annotations

import importlib.metadata
import math
import re
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
import trio

from trio_federation_kubernetes.access import Access
from trio_federation_kubernetes.errors import (
    AnswerError,
    CredentialError,
    KubeconfigError,
    KubernetesError,
    UnreachableError,
)
from trio_federation_kubernetes.failures import why
from trio_federation_kubernetes.proxies import proxy_of
from trio_federation_kubernetes.server_clock import ServerClock, unix_seconds
from trio_federation_kubernetes.status import Status, phrase, retry_after
from trio_federation_kubernetes.texts import one_line
from trio_federation_kubernetes.tls import proxy_ssl_context, ssl_context
from trio_federation_kubernetes.unpacking import Unpacker

#: seconds until a TCP connection is there, and again until the TLS handshake on it is done
CONNECT_DEADLINE = 5.0
#: seconds until there is a credential, whatever makes it; more than an exec plugin has
CREDENTIAL_DEADLINE = 75.0
#: seconds until a stream's answer has begun
HEADERS_DEADLINE = 10.0
#: The largest answer that `get` and `apply` take, in bytes when unpacked. A page of 500 objects is at most 750 MB in
#: theory, as etcd takes objects of 1.5 MB; real ones have a few KB.
LARGEST_BODY = 256 * 2**20
#: How much of the body of an error is read, in bytes when unpacked, and for how many seconds. A Status object has about
#: 300 bytes; one that refuses an apply has as many for each field that is another manager's, of which an env may have a
#: thousand. One that is cut short cannot be read at all.
LARGEST_ERROR_BODY = 2 * 2**20
ERROR_BODY_DEADLINE = 2.0
#: Seconds that a connection is kept for the next request: long enough for the pages of a list, too short for load
#: balancers and firewalls to have forgotten it.
KEEP_CONNECTION = 5.0


def _keepalive_options() -> list[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    # In seconds, but the last, in milliseconds. Keepalive alone says nothing while sent data waits for its receipt.
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 20_000),
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


#: level, option and value; those that this system has
KEEPALIVE_OPTIONS = _keepalive_options()

#: What the HTTP library, the sockets and the encodings under it raise where a peer or a network is at fault. TLS errors
#: are OSErrors, failed encodings of names ValueErrors.
_BROKEN = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, zlib.error)
#: how a connection ends that was kept, and that the server has closed in the meantime
_CLOSED_BY_SERVER = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
#: what is shorter is no secret, and might be a part of any word
_SHORTEST_SECRET = 6
#: that of server-side apply; JSON is YAML
_APPLY = "application/apply-patch+yaml"
_HOST = re.compile(rb"[0-9a-z._:-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


class Answer(NamedTuple):
    """What a server has answered to a request."""

    #: unpacked
    body: bytes
    #: Unix seconds, whole ones, on the server's clock; None where the answer has no usable Date
    server_time: float | None


class ApiClient:
    """The way to one API server: `async with ApiClient(…) as client`.

    Raises KubeconfigError at once where the server's address, the proxy's, or a certificate cannot be used.
    `clock`: seconds since some fixed moment. `connect_deadline` and the like are in seconds, `largest_body`
    in bytes; `environment` is asked for a proxy only. Over plain http no credential is sent, as by kubectl."""

    def __init__(
        self,
        access: Access,
        *,
        clock: Callable[[], float],
        environment: Mapping[str, str],
        user_agent: str | None = None,
        connect_deadline: float = CONNECT_DEADLINE,
        headers_deadline: float = HEADERS_DEADLINE,
        credential_deadline: float = CREDENTIAL_DEADLINE,
        largest_body: int = LARGEST_BODY,
    ) -> None:
        self._access = access
        self._clock = clock
        self._user_agent = _default_user_agent() if user_agent is None else user_agent
        self._connect_deadline = connect_deadline
        self._headers_deadline = headers_deadline
        self._credential_deadline = credential_deadline
        self._largest_body = largest_body
        self._secure = _checked_server(access).scheme == "https"
        self._proxy = _proxy(access, environment)
        # The HTTP library would load certificates of its own where it gets no context. This one trusts nobody.
        self._context = ssl_context(access) if self._secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        #: what an exec plugin gave for this context
        self._certificate: tuple[bytes, bytes] | None = None
        self._server_clock = ServerClock()
        self._streams: set[_Stream] = set()
        self._pool: _Pool | None = None
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = False
        self._end_old_streams()
        if self._pool is not None:
            await self._pool.close()

    @property
    def server_clock_offset(self) -> float | None:
        """What to add to our clock to get the server's Unix time, in seconds, better than one second exact once a few
        answers have come; None before any."""
        return self._server_clock.offset

    async def get(self, path: str, params: Mapping[str, str] | None = None, *, deadline: float = 10.0) -> Answer:
        """Asks for `path`, which starts with a slash, with these query parameters, and reads the whole answer, all
        within `deadline` seconds from when there is a credential. An exec plugin that hands one out has a deadline of
        its own: a short one of ours would kill a slow one each time.

        Raises ApiError where the server says no, UnreachableError where there is no answer or not the whole of it,
        AnswerError where it is too large, or a redirect, CredentialError where there is none to sign with."""
        return await self._whole(_Call(self._place(path), path, params or {}, "gzip"), deadline)

    async def apply(self, path: str, params: Mapping[str, str], body: bytes, *, deadline: float = 10.0) -> Answer:
        """Applies a configuration (server-side apply) to the object at `path`, or to a subresource of it: a PATCH with
        `body`, an object as JSON, which has to name no resourceVersion. `params` hold at least the fieldManager. The
        answer is the object as it is afterwards.

        All else is as with `get`; sending the body counts as part of the request. Where a kept connection turns out to
        be closed, the request is sent once more, as by `get`, though the server may have got it the first time: the
        same configuration of the same manager, applied again, changes nothing.

        Raises what `get` does; a conflict with other managers is an ApiError with code 409 and the fields as causes."""
        call = _Call(self._place(path, "PATCH "), path, params, "gzip", method="PATCH", body=body)
        return await self._whole(call, deadline)

    async def _whole(self, call: _Call, deadline: float) -> Answer:
        """The whole answer, within so many seconds from when there is a credential."""
        self._check_open()
        with trio.move_on_after(self._credential_deadline) as signing:
            await self._signature(call)  # which is kept
        if signing.cancelled_caught:
            raise call.late(self._credential_deadline)
        with trio.move_on_after(deadline):
            exchange = await self._ask(call)
            try:
                body = await self._body(exchange)
            finally:
                await exchange.close()
            return Answer(body, exchange.server_time)
        raise call.late(deadline)

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str] | None = None, *, deadline: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Asks for `path`, on a connection of its own, and hands out the chunks of the answer as they come, cut
        anywhere. The block may be left at any time, which closes the connection.

        A read that is cancelled ends the stream: the next one raises UnreachableError.

        Once there is a credential, the answer has to begin within `headers_deadline` seconds, and the whole block ends
        after `deadline` seconds: then whatever it waits for is cancelled, and UnreachableError raised. Other errors are
        raised before the block begins, as by `get`, and in it by the iterator: UnreachableError where the connection
        breaks, AnswerError where the answer cannot be unpacked. The block is also ended, with UnreachableError, when
        the client certificate changes."""
        call = _Call(self._place(path), path, params or {}, "identity", self._headers_deadline)
        with trio.CancelScope(deadline=trio.current_time() + deadline) as scope:
            exchange = await self._ask(call, alone=True)
            stream = _Stream(call, scope, exchange.context)
            self._streams.add(stream)
            try:
                # Both may have happened while the answer began.
                self._end_old_streams()
                yield _Chunks(exchange)
            finally:
                self._streams.discard(stream)
                await exchange.close()
        if scope.cancelled_caught:
            raise call.ended_by or call.late(deadline)

    # --- one request, until its answer has begun

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("an ApiClient is used inside of its `async with` block")

    async def _ask(self, call: _Call, *, alone: bool = False) -> _Exchange:
        """An exchange whose answer is a good one, to be closed by the caller; else raises what it was."""
        self._check_open()
        signature = await self._signature(call)
        exchange = await self._send(call, signature, alone=alone)
        if exchange.status == HTTPStatus.UNAUTHORIZED and self._secure:
            await exchange.close()
            # Others may have been refused at the same time, and a new credential be there already.
            if await self._signature(call) == signature:
                self._access.credential.refused()
            signature = await self._signature(call)
            exchange = await self._send(call, signature, alone=alone)
        if exchange.status >= 300:
            try:
                raise await self._refusal(exchange, signature)
            finally:
                await exchange.close()
        return exchange

    async def _signature(self, call: _Call) -> _Signature:
        if not self._secure:
            return _Signature(None, None)
        call.step = _SIGNING  # for the second time, perhaps
        credential = self._access.credential
        authorization = await credential.authorization()
        # Checked here, as the library below would quote it in its error.
        if authorization is not None and not _HEADER_VALUE.fullmatch(authorization):
            raise CredentialError(f"{self._access.name}: the credential has characters that no HTTP header may have")
        # As in kubectl, the kubeconfig's own certificate comes before an exec plugin's.
        certificate = None if self._access.client_certificate else await credential.client_certificate()
        return _Signature(authorization, certificate)

    async def _send(self, call: _Call, signature: _Signature, *, alone: bool) -> _Exchange:
        self._show(signature.certificate)
        headers = {"Accept-Encoding": call.encoding}
        if call.body is not None:
            headers["Content-Type"] = _APPLY
        if signature.authorization is not None:
            headers["Authorization"] = signature.authorization
        exchange = None
        with trio.move_on_after(call.patience):
            exchange = await self._answered(call, headers, alone=alone)
        if exchange is None:
            raise call.late(call.patience)
        if exchange.server_time is not None and exchange.status < 300:
            # Others may come from what stands before the server, and has a clock of its own.
            self._server_clock.observe(exchange.server_time, exchange.sent_at, exchange.received_at)
        return exchange

    async def _answered(self, call: _Call, headers: Mapping[str, str], *, alone: bool) -> _Exchange:
        for last in (False, True):
            exchange = _Exchange(call, await self._take_pool(alone=alone), self._clock)
            try:
                await exchange.send(self._access.server + call.path, headers)
                break
            except _BROKEN as error:
                # What is sent once more here may have been done already. Reading does nothing, and applying the same
                # once more neither; another kind of request would need a rule of its own.
                if last or exchange.connected or not isinstance(error, _CLOSED_BY_SERVER):
                    raise call.broken(error) from error
        return exchange

    def _show(self, certificate: tuple[bytes, bytes] | None) -> None:
        """From now on, connections show this certificate, and there are no others."""
        if certificate == self._certificate:
            return
        try:
            self._context = ssl_context(self._access, certificate)
        except KubeconfigError as error:
            raise CredentialError(f"what the exec plugin gave cannot be used: {error}") from error
        self._certificate = certificate
        self._end_old_streams()

    def _end_old_streams(self) -> None:
        for stream in self._streams:
            if not self._open:
                stream.end("the client was closed")
            elif stream.context is not self._context:
                stream.end("the client certificate has changed")

    async def _take_pool(self, *, alone: bool) -> _Pool:
        """A pool that has one user more. Alone: one that nobody else will use."""
        if alone:
            pool = self._new_pool()
            pool.retired = True
            pool.users += 1
            return pool
        old = self._pool
        if old is None or old.retired or old.context is not self._context:
            pool = self._pool = self._new_pool()
        else:
            pool = old
        pool.users += 1
        if old is not None and old is not pool:
            old.retired = True
            await old.settle()
        return pool

    def _new_pool(self) -> _Pool:
        transport = httpx.AsyncHTTPTransport(
            verify=self._context,
            trust_env=False,
            proxy=self._proxy,
            # How many are asked for at a time is the callers' business: waiting in here would count as the server's
            # slowness.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=4, keepalive_expiry=KEEP_CONNECTION),
        )
        client = httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            headers={"User-Agent": self._user_agent, "Accept": "application/json"},
            timeout=httpx.Timeout(None, connect=self._connect_deadline),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )
        return _Pool(client, self._context)

    def _place(self, path: str, verb: str = "") -> str:
        through = f" through the proxy {_shown(self._proxy)}" if self._proxy is not None else ""
        return f"{self._access.name}: {verb}{self._access.server}{path}{through}"

    # --- answers

    async def _body(self, exchange: _Exchange) -> bytes:
        declared = exchange.headers.get("Content-Length", "")
        size = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else 0
        parts: list[bytes] = []
        if size <= self._largest_body:
            size = 0
            async for chunk in _Chunks(exchange):
                size += len(chunk)
                if size > self._largest_body:
                    break
                parts.append(chunk)
            else:
                return b"".join(parts)
        asked_for_a_list = exchange.call.body is None
        remedy = "ask for smaller pages" if asked_for_a_list else "no object is as large, so see what answers there"
        raise AnswerError(
            f"{exchange.call.place}: the answer has more than the {self._largest_body} bytes that are read; {remedy}"
        )

    async def _refusal(self, exchange: _Exchange, signature: _Signature) -> KubernetesError:
        """The error that an answer of 300 and above is."""
        place, status = exchange.call.place, exchange.status
        if status < 400:
            return AnswerError(
                f"{place}: answered with a redirect{_towards(exchange)} (status {status}), which is not followed; "
                "an API server does not redirect, so check its address"
            )
        body = signature.hide((await _error_body(exchange)).decode("utf-8", "replace"))
        said = Status.of_answer(body, exchange.headers.get("Content-Type", ""))
        wait = retry_after(exchange.headers.get("Retry-After"), exchange.server_time)
        said = replace(said, code=status, retry_after=said.retry_after if wait is None else wait)
        named = f"{status} {said.reason or phrase(status)}".strip()
        unsigned = "" if self._secure or status != HTTPStatus.UNAUTHORIZED else " (over http, no credential is sent)"
        return said.error(f"{place}: {named}{unsigned}{f': {said.message}' if said.message else ''}")


_SIGNING = "getting a credential"


@dataclass(eq=False)
class _Call:
    """What a caller asks for, and how far it has come."""

    #: names the server and the path in errors
    place: str
    path: str
    params: Mapping[str, str]
    #: how the answer may be packed
    encoding: str
    #: seconds from when there is a credential until the answer has begun
    patience: float = math.inf
    #: what is going on, for the error when time is up
    step: str = _SIGNING
    #: why its stream was ended before its time
    ended_by: UnreachableError | None = None
    method: str = "GET"
    #: what is applied, as JSON
    body: bytes | None = field(default=None, repr=False)

    def late(self, seconds: float) -> KubernetesError:
        """The error for a deadline that has passed."""
        if self.step == _SIGNING:
            return CredentialError(f"{self.place}: no credential within {seconds:g} s")
        return UnreachableError(f"{self.place}: not done within {seconds:g} s ({self.step})")

    def broken(self, error: Exception) -> KubernetesError:
        """The error for what the HTTP library has raised."""
        match error:
            case zlib.error():
                return AnswerError(f"{self.place}: the answer cannot be unpacked ({one_line(str(error))})")
            case httpx.ProxyError():
                said = f"the proxy refuses: {one_line(str(error))}"
            case httpx.ConnectTimeout():
                said = f"no connection in time ({self.step})"
            case _:
                said = why(error, self.step)
        return UnreachableError(f"{self.place}: {said}")


@dataclass(frozen=True, slots=True)
class _Signature:
    """What a request is signed with."""

    authorization: str | None = field(repr=False)
    certificate: tuple[bytes, bytes] | None = field(repr=False)

    def hide(self, text: str) -> str:
        """The text without the credential, should a server or something before it have quoted it."""
        if self.authorization is None:
            return text
        for secret in (self.authorization, self.authorization.rpartition(" ")[2]):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "[credential]")
        return text


@dataclass(eq=False)
class _Stream:
    """A stream in somebody's hands."""

    call: _Call
    scope: trio.CancelScope
    context: ssl.SSLContext

    def end(self, why: str) -> None:
        self.call.ended_by = UnreachableError(f"{self.call.place}: the stream was ended: {why}")
        self.scope.cancel()


class _Pool:
    """Connections that are made with one TLS context. A retired one is for no new requests, and closed when the last of
    its users has settled it."""

    def __init__(self, client: httpx.AsyncClient, context: ssl.SSLContext) -> None:
        self.client = client
        self.context = context
        self.retired = False
        self.users = 0

    async def settle(self) -> None:
        """Close it, if its time has come."""
        if self.retired and not self.users:
            await self.close()

    async def close(self) -> None:
        """Close all connections, whoever uses them."""
        self.retired = True
        with trio.CancelScope(shield=True):
            await self.client.aclose()


class _Exchange:
    """One request on one connection, and its answer. Whoever makes it has added a user to the pool."""

    def __init__(self, call: _Call, pool: _Pool, clock: Callable[[], float]) -> None:
        self.call = call
        self.context = pool.context
        self.status = 0
        self.headers = httpx.Headers()
        #: on our clock
        self.sent_at = self.received_at = 0.0
        #: the answer's Date, in Unix seconds
        self.server_time: float | None = None
        self._pool = pool
        self._clock = clock
        #: the connections, below TLS, that were made for this
        self._made: list[Any] = []
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._unpacker: Unpacker | None = None
        self._begun = False
        self._interrupted = False
        self._ended = False
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether a connection was made for this, instead of one that was kept."""
        return bool(self._made)

    async def send(self, url: str, headers: Mapping[str, str]) -> None:
        """Send the request, and wait for the answer's headers. Raises one of _BROKEN, and is closed then."""
        try:
            self.call.step = "connecting"
            request = self._pool.client.build_request(
                self.call.method,
                url,
                params=dict(self.call.params),
                headers=dict(headers),
                content=self.call.body,
                extensions={"trace": self._trace},
            )
            if self.call.body is not None:
                request.stream = _Sent(self.call.body)
            self._response = response = await self._pool.client.send(request, stream=True)
            self.received_at = self._clock()
            self.status = response.status_code
            self.headers = response.headers
            self.server_time = unix_seconds(response.headers.get("Date"))
            self._chunks = response.aiter_raw()
        except BaseException:
            await self.close()
            raise

    async def next_chunk(self) -> bytes | None:
        """The next chunk of the answer, None at its end. Raises one of _BROKEN, also once a call was cancelled."""
        assert self._chunks is not None
        self.call.step = "reading the answer"
        if self._interrupted:
            # The generators below have ended with it, which must not look like the answer's end.
            raise OSError("an earlier read failed or was cancelled, and nothing can be read any more")
        self._interrupted = True
        chunk = await self._read(self._chunks)
        self._interrupted = False
        return chunk

    async def _read(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        if not self._begun:
            self._begun = True
            self._unpacker = Unpacker.of(self.headers.get("Content-Encoding", ""))
        while True:
            if self._unpacker is not None and (piece := self._unpacker.piece()):
                return piece
            try:
                chunk = await anext(chunks)
            except StopAsyncIteration:
                self._ended = True
                if self._unpacker is not None:
                    self._unpacker.finish()
                return None
            if self._unpacker is None:
                return chunk
            self._unpacker.feed(chunk)

    async def close(self) -> None:
        """Done with it. Where the answer was not read to its end, this closes the connection."""
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True):
            if not self._ended:
                self._pool.retired = True
                # The HTTP library closes no connection whose TLS handshake was cancelled.
                for stream in self._made:
                    await stream.aclose()
                await self._unwind()
            self._pool.users -= 1
            await self._pool.settle()

    async def _unwind(self) -> None:
        if self._response is None:
            return
        await self._response.extensions["network_stream"].aclose()
        # The library reads through generators in generators. Dropped half-way, they are left to the garbage collector,
        # which complains; so let them run into the closed connection, after the little that was received already.
        if self._chunks is not None:
            with suppress(*_BROKEN):
                async for _ in self._chunks:
                    pass
        await self._response.aclose()

    async def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Told by the HTTP library what it is doing. Its own option for sockets is lost on the way to a proxy; this
        sees all connections."""
        if event == "connection.connect_tcp.complete":
            self._made.append(info["return_value"])
            made = info["return_value"].get_extra_info("socket")
            for option in KEEPALIVE_OPTIONS:
                made.setsockopt(*option)
        elif event.endswith("start_tls.started"):
            self.call.step = "TLS handshake"
        elif event == "http11.send_request_headers.started":
            to_proxy = info["request"].method == b"CONNECT"
            self.call.step = "waiting for the proxy's answer" if to_proxy else "waiting for the answer"
            self.sent_at = self._clock()
        elif event == "http11.send_request_body.started" and info["request"].method != b"CONNECT":
            # Only a large body, or one that nobody reads, takes any time.
            self.call.step = "sending the request"
        elif event == "http11.send_request_body.complete" and self.call.step == "sending the request":
            self.call.step = "waiting for the answer"


class _Sent(httpx.AsyncByteStream):
    """A body that is sent. The library's own is a generator, which the garbage collector complains of where sending
    was broken off. For one reader, once."""

    def __init__(self, body: bytes) -> None:
        self._parts = iter((body,))

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        for part in self._parts:
            return part
        raise StopAsyncIteration


class _Chunks:
    """The chunks of an answer. No generator, so that it may be dropped at any time."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._exchange.next_chunk()
        except _BROKEN as error:
            raise self._exchange.call.broken(error) from error
        if chunk is None:
            raise StopAsyncIteration
        return chunk


async def _error_body(exchange: _Exchange) -> bytes:
    """The start of an answer's body, as far as it comes at once: the status matters more than what is said to it."""
    body = bytearray()
    with suppress(KubernetesError), trio.move_on_after(ERROR_BODY_DEADLINE):
        async for chunk in _Chunks(exchange):
            body += chunk[: LARGEST_ERROR_BODY - len(body)]
            if len(body) == LARGEST_ERROR_BODY:
                break
    return bytes(body)


def _towards(exchange: _Exchange) -> str:
    """Where a redirect leads: the host alone, as tickets are often carried in what follows."""
    try:
        host = httpx.URL(exchange.headers.get("Location", "")).host
    except httpx.InvalidURL:
        return ""
    return f" to {one_line(host)}" if host else ""


# --- addresses


def _checked_server(access: Access) -> httpx.URL:
    server = access.server
    if "@" in server:
        # not shown: it may hold a password
        raise KubeconfigError(f"{access.name}: the server's address holds a user's name; a user is named in users")
    try:
        url = httpx.URL(server)
    except httpx.InvalidURL as error:
        raise KubeconfigError(f"{access.name}: server {server!r} is no address: {error}") from error
    if url.scheme not in ("https", "http") or not url.host or url.port == 0:
        raise KubeconfigError(f"{access.name}: server {server!r} is not like https://host:port")
    if not _HOST.fullmatch(url.raw_host) or (url.port is not None and url.port > 65535):
        raise KubeconfigError(
            f"{access.name}: server {server!r} names a host or a port that cannot be; write it as https://host:port"
        )
    if url.query or url.fragment or server.endswith(("/", "?", "#")):
        raise KubeconfigError(f"{access.name}: server {server!r} must end with a host, a port or a path")
    return url


def _proxy(access: Access, environment: Mapping[str, str]) -> httpx.Proxy | None:
    address = proxy_of(access, environment)
    if address is None:
        return None
    return httpx.Proxy(address, ssl_context=proxy_ssl_context(access) if address.scheme == "https" else None)


def _shown(proxy: httpx.Proxy) -> str:
    """A proxy's address; user and password are no part of it any more."""
    return f"{proxy.url.scheme}://{proxy.url.netloc.decode('ascii')}"


def _default_user_agent() -> str:
    return f"trio-federation-kubernetes/{importlib.metadata.version('trio-federation-kubernetes')}"

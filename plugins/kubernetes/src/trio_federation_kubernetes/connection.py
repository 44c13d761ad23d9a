"""A client that lasts: it is made from what the kubeconfig says, and made anew from what it says then when it does not
work any more. Tokens, certificates, authorities and addresses are replaced in kubeconfigs and in pods while an agent
runs, and nobody tells it. Files that a credential alone reads again are its own business; requests are
`client.py`'s."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Protocol, Self

from trio_federation_kubernetes.access import Access
from trio_federation_kubernetes.client import Answer
from trio_federation_kubernetes.errors import ApiError, CredentialError, KubernetesError, UnreachableError

#: Seconds between two looks at the kubeconfig while nothing works. Less than people wait who have just mended it.
RELOAD_INTERVAL = 15.0


class Api(Protocol):
    """What sources, informers and sinks need of a way to an API server; all of it raises KubernetesErrors."""

    @property
    def server_clock_offset(self) -> float | None:
        """Add it to the clock's time to get the server's, in Unix seconds; None while it is not known."""

    async def get(self, path: str, params: Mapping[str, str], *, deadline: float = ...) -> Answer:
        """The answer to a plain request."""

    async def apply(self, path: str, params: Mapping[str, str], body: bytes, *, deadline: float = ...) -> Answer:
        """The answer to a server-side apply of `body`, an object as JSON."""

    def stream(
        self, path: str, params: Mapping[str, str], *, deadline: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The chunks of a long answer."""


class Client(Api, AbstractAsyncContextManager["Client"], Protocol):
    """What `client.ApiClient` is to this room."""


class _Holder:
    """A client with those who use it; a retired one is closed by the last of them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.users = 0
        self.retired = False

    async def settle(self) -> None:
        if self.retired and not self.users:
            await self.client.__aexit__(None, None, None)


class Connection:
    """The way to one API server, as an async context manager.

    `load`: reads what the kubeconfig says now, raising KubernetesError. `make`: makes a client of that. Requests raise
    what either of them does, and what the client does. Once one has failed in a way that another access might mend
    (refused as unauthorized, no credential, no answer), the next request RELOAD_INTERVAL seconds or more after the last
    look has everything read anew. What goes on over the old client goes on."""

    def __init__(
        self, load: Callable[[], Access], make: Callable[[Access], Client], *, clock: Callable[[], float]
    ) -> None:
        self._load = load
        self._make = make
        self._clock = clock
        self._holder: _Holder | None = None
        self._looked_at = 0.0
        self._doubtful = False
        self._offset: float | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Whoever still used a retired one has ended by now, and closed it.
        if self._holder is not None:
            await self._holder.client.__aexit__(None, None, None)

    @property
    def server_clock_offset(self) -> float | None:
        """Seconds to add to our clock to get the server's Unix time; None while that is not known."""
        if self._holder is not None and self._holder.client.server_clock_offset is not None:
            self._offset = self._holder.client.server_clock_offset
        return self._offset

    async def get(self, path: str, params: Mapping[str, str], *, deadline: float = 10.0) -> Answer:
        """As `ApiClient.get`."""
        async with self._client() as client:
            return await client.get(path, params, deadline=deadline)

    async def apply(self, path: str, params: Mapping[str, str], body: bytes, *, deadline: float = 10.0) -> Answer:
        """As `ApiClient.apply`."""
        async with self._client() as client:
            return await client.apply(path, params, body, deadline=deadline)

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, deadline: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """As `ApiClient.stream`."""
        opened = False
        async with self._client(lambda: not opened) as client, client.stream(path, params, deadline=deadline) as chunks:
            # Once it is open, its end says nothing against the access: whoever asks next will see.
            opened = True
            yield chunks

    @asynccontextmanager
    async def _client(self, counts: Callable[[], bool] = lambda: True) -> AsyncIterator[Client]:
        """The client to use. `counts`: whether an error is one of the access."""
        holder = await self._current()
        holder.users += 1
        try:
            yield holder.client
        except KubernetesError as error:
            if holder is self._holder and _may_be_mended(error) and counts():
                self._doubtful = True
            raise
        finally:
            holder.users -= 1
            await holder.settle()

    async def _current(self) -> _Holder:
        now = self._clock()
        if self._holder is not None and not (self._doubtful and now - self._looked_at >= RELOAD_INTERVAL):
            return self._holder
        self._looked_at = now
        new = _Holder(await self._make(self._load()).__aenter__())
        self._doubtful = False
        self._offset = self.server_clock_offset  # until the new one knows better
        old, self._holder = self._holder, new
        if old is not None:
            old.retired = True
            await old.settle()
        return new


def _may_be_mended(error: KubernetesError) -> bool:
    if isinstance(error, ApiError):
        return error.code == 401
    return isinstance(error, CredentialError | UnreachableError)

"""A client that lasts: when a kubeconfig is read anew, and what becomes of the client that was there before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import pytest
import trio
from trio.testing import MockClock

from trio_federation_kubernetes.access import Access
from trio_federation_kubernetes.client import Answer
from trio_federation_kubernetes.connection import RELOAD_INTERVAL, Connection
from trio_federation_kubernetes.credentials import NoCredential
from trio_federation_kubernetes.errors import (
    AnswerError,
    ApiError,
    CredentialError,
    KubeconfigError,
    KubernetesError,
    UnreachableError,
)


class Kubeconfig:
    """Says a name, which is what clients are told apart by, or cannot be read."""

    def __init__(self) -> None:
        self.says: str | KubeconfigError = "first"
        self.read = 0

    def load(self) -> Access:
        self.read += 1
        if isinstance(self.says, KubeconfigError):
            raise self.says
        return Access(name=self.says, server="https://10.0.0.1:6443", credential=NoCredential())


class FakeClient:
    """Answers with its access's name, or fails by it."""

    made: list[FakeClient]
    fails: Mapping[str, KubernetesError]

    def __init__(self, access: Access) -> None:
        self.name = access.name
        self.open = False
        self.closed = 0
        self.server_clock_offset: float | None = None
        self.applied: list[tuple[str, Mapping[str, str], bytes, float]] = []
        self.made.append(self)

    async def __aenter__(self) -> Self:
        self.open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.open = False
        self.closed += 1

    async def get(self, path: str, params: Mapping[str, str] | None = None, *, deadline: float = 10.0) -> Answer:
        await trio.lowlevel.checkpoint()
        assert self.open
        if self.name in self.fails:
            raise self.fails[self.name]
        return Answer(self.name.encode(), None)

    async def apply(self, path: str, params: Mapping[str, str], body: bytes, *, deadline: float = 10.0) -> Answer:
        self.applied.append((path, params, body, deadline))
        return await self.get(path, params, deadline=deadline)

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str] | None = None, *, deadline: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async def chunks() -> AsyncIterator[bytes]:
            while True:
                await trio.sleep(1)
                assert self.open
                yield self.name.encode()

        yield chunks()


@pytest.fixture
def kubeconfig(monkeypatch: pytest.MonkeyPatch) -> Kubeconfig:
    monkeypatch.setattr(FakeClient, "made", [], raising=False)
    monkeypatch.setattr(FakeClient, "fails", {}, raising=False)
    return Kubeconfig()


def connection(kubeconfig: Kubeconfig) -> Connection:
    return Connection(kubeconfig.load, FakeClient, clock=trio.current_time)


MENDED = [ApiError("no", code=401), CredentialError("no"), UnreachableError("no")]
NOT_MENDED = [ApiError("no", code=code) for code in (400, 403, 404, 409, 410, 422, 429, 500)] + [AnswerError("no")]


async def ask(client: Connection, how: str) -> Answer:
    return await (client.apply("/", {}, b"{}") if how == "apply" else client.get("/", {}))


async def test_what_is_applied(kubeconfig: Kubeconfig) -> None:
    async with connection(kubeconfig) as client:
        assert (await client.apply("/a", {"fieldManager": "m"}, b"{}")).body == b"first"
        await client.apply("/b", {}, b"{1}", deadline=3)
    assert FakeClient.made[0].applied == [("/a", {"fieldManager": "m"}, b"{}", 10.0), ("/b", {}, b"{1}", 3)]


@pytest.mark.parametrize("how", ["get", "apply"])
@pytest.mark.parametrize("error", MENDED, ids=repr)
async def test_what_does_not_work_is_read_anew(
    kubeconfig: Kubeconfig, error: KubernetesError, how: str, autojump_clock: MockClock
) -> None:
    """Not at once, since most of it heals by itself, and not more often than every RELOAD_INTERVAL."""
    FakeClient.fails = {"first": error}
    async with connection(kubeconfig) as client:
        for _ in range(int(RELOAD_INTERVAL)):
            with pytest.raises(type(error)):
                await ask(client, how)
            await trio.sleep(1)
        assert kubeconfig.read == 1
        kubeconfig.says = "second"
        assert (await ask(client, how)).body == b"second"
        assert kubeconfig.read == 2
        assert [each.closed for each in FakeClient.made] == [1, 0]
        # One that works is not looked at any more.
        await trio.sleep(10 * RELOAD_INTERVAL)
        await client.get("/", {})
        assert kubeconfig.read == 2
    assert [each.closed for each in FakeClient.made] == [1, 1]


@pytest.mark.parametrize("how", ["get", "apply"])
@pytest.mark.parametrize("error", NOT_MENDED, ids=repr)
async def test_other_errors_say_nothing_of_the_kubeconfig(
    kubeconfig: Kubeconfig, error: KubernetesError, how: str, autojump_clock: MockClock
) -> None:
    FakeClient.fails = {"first": error}
    async with connection(kubeconfig) as client:
        for _ in range(5):
            with pytest.raises(type(error)):
                await ask(client, how)
            await trio.sleep(RELOAD_INTERVAL)
    assert kubeconfig.read == 1


async def test_a_stream_goes_on_over_the_old_client(kubeconfig: Kubeconfig, autojump_clock: MockClock) -> None:
    """And the last that uses an old client closes it, once."""
    FakeClient.fails = {"first": ApiError("no", code=401)}
    async with connection(kubeconfig) as client:
        async with client.stream("/", {}, deadline=1000) as chunks:
            with pytest.raises(ApiError):
                await client.get("/", {})
            await trio.sleep(RELOAD_INTERVAL)
            kubeconfig.says = "second"
            assert (await client.get("/", {})).body == b"second"
            assert await anext(chunks) == b"first"
            assert [each.open for each in FakeClient.made] == [True, True]
        assert [each.closed for each in FakeClient.made] == [1, 0]


async def test_a_kubeconfig_that_cannot_be_read(kubeconfig: Kubeconfig, autojump_clock: MockClock) -> None:
    """Is an error of the request, at the start at each of them; later the old client is used in between."""
    kubeconfig.says = KubeconfigError("/home/ana/.kube/config: no")
    FakeClient.fails = {"first": UnreachableError("no")}
    async with connection(kubeconfig) as client:
        for _ in range(3):
            with pytest.raises(KubeconfigError):
                await client.get("/", {})
        kubeconfig.says = "first"
        with pytest.raises(UnreachableError):
            await client.get("/", {})
        kubeconfig.says = KubeconfigError("no")
        await trio.sleep(RELOAD_INTERVAL)
        with pytest.raises(KubeconfigError):
            await client.get("/", {})
        FakeClient.fails = {}
        assert (await client.get("/", {})).body == b"first"


async def test_the_servers_clock_is_known_over_a_change(kubeconfig: Kubeconfig, autojump_clock: MockClock) -> None:
    FakeClient.fails = {"first": ApiError("no", code=401)}
    async with connection(kubeconfig) as client:
        assert client.server_clock_offset is None
        with pytest.raises(ApiError):
            await client.get("/", {})
        FakeClient.made[0].server_clock_offset = 17.0
        await trio.sleep(RELOAD_INTERVAL)
        kubeconfig.says = "second"
        await client.get("/", {})
        assert client.server_clock_offset == 17.0
        FakeClient.made[1].server_clock_offset = 18.0
        assert client.server_clock_offset == 18.0

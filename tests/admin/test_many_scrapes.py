"""Many who scrape at once, or scrape and go away: none of that may hold up the loop that serves them all."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
import trio
import trio.testing

from tests.admin.conftest import Connect, Serve
from tests.admin.helpers import READY, REQUEST
from trio_federation.admin import Answers
from trio_federation.capacity import Capacity
from trio_federation.metrics import FederationMetrics
from trio_federation.registry import Registry

#: seconds after which a test is lost
PATIENCE = 10.0


class Gathering:
    """Looks for its first piece, slice by slice, until it is told to have it, as a scrape of a large registry does."""

    def __init__(self) -> None:
        self.slices = 0
        #: one for each client
        self.begun, self.closed = trio.open_memory_channel[None](10), trio.open_memory_channel[None](10)

    def __call__(self) -> AsyncIterator[bytes]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        self.begun[0].send_nowait(None)
        try:
            while True:
                self.slices += 1
                await trio.sleep(0.001)
        finally:
            self.closed[0].send_nowait(None)
        yield b""


async def test_nothing_is_gathered_for_a_client_that_has_gone(serve: Serve, connect: Connect) -> None:
    gathering = Gathering()
    port = await serve(Answers(exposition=gathering, readiness=lambda: READY))
    with trio.fail_after(PATIENCE):
        for _ in range(3):
            stream = await connect(port, REQUEST)
            await gathering.begun[1].receive()
            await stream.aclose()
        for _ in range(3):
            await gathering.closed[1].receive()
    slices = gathering.slices
    await trio.sleep(0.02)
    assert gathering.slices == slices


async def test_one_connection_asks_for_a_few_answers_at_a_time(serve: Serve, connect: Connect) -> None:
    """Connections are limited, so the answers on each of them have to be, too."""
    port = await serve()
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    stream = await connect(port, client.data_to_send())
    settings = None
    with trio.fail_after(PATIENCE):
        while settings is None:
            for event in client.receive_data(await stream.receive_some()):
                if isinstance(event, h2.events.RemoteSettingsChanged):
                    settings = event.changed_settings
    limit = settings[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS]
    assert limit.new_value == client.remote_settings.max_concurrent_streams == 4


@pytest.mark.parametrize("scrapes", [1, 2, 7])
async def test_scrapes_take_turns(scrapes: int) -> None:
    """However many there are, all others wait for one slice of one of them, and no more; and each is whole."""
    registry = Registry("west", ttl=30.0, clock=lambda: 100.0)
    registry.upsert([Capacity("east", "ns", f"env-{number}", "p1", idle=number) for number in range(2000)])
    metrics = FederationMetrics(started_at=0.0)
    slices = most = 0
    whole: list[bytes] = []

    async def beat() -> None:
        nonlocal slices, most
        while True:
            await trio.lowlevel.checkpoint()
            most = max(most, slices)
            slices = 0

    async def scrape() -> None:
        nonlocal slices
        exposition = metrics.exposition(registry.by_env(), now=100.0, held=registry.held)
        inside = exposition._slices  # type: ignore[attr-defined]

        def counted() -> object:
            nonlocal slices
            for chunk in inside:
                slices += 1
                yield chunk

        exposition._slices = counted()  # type: ignore[attr-defined]
        whole.append(b"".join([chunk async for chunk in exposition]))

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            async with trio.open_nursery() as scraping:
                for _ in range(scrapes):
                    scraping.start_soon(scrape)
            nursery.cancel_scope.cancel()
    # Trio runs what is ready in no particular order, so that between two beats there may be the turns of two passes.
    assert 1 <= most <= 2
    assert len(whole) == scrapes
    assert all(text.count(b"agentbox_federation_env_idle{") == 2000 for text in whole)


async def test_a_scrape_that_is_given_up_leaves_the_turn_to_others() -> None:
    registry = Registry("west", ttl=30.0, clock=lambda: 100.0)
    registry.upsert([Capacity("east", "ns", f"env-{number}", "p1") for number in range(2000)])
    metrics = FederationMetrics(started_at=0.0)

    def scrape() -> AsyncIterator[bytes]:
        return metrics.exposition(registry.by_env(), now=100.0, held=registry.held)

    with trio.CancelScope() as scope:
        scope.cancel()
        await anext(scrape())
    assert scope.cancelled_caught
    left = scrape()
    await anext(left)
    del left
    gc.collect()
    with trio.fail_after(PATIENCE):
        assert b"".join([chunk async for chunk in scrape()]).endswith(b"\n")

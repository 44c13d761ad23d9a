"""Lines that carry little: what travels over them takes seconds, and is that much older when it arrives; and
connections that are older than the calls on them. Time is virtual."""

from __future__ import annotations

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import lines
from tests.simulation import Simulation, member, simulated_federation
from trio_federation.capacity import Capacity
from trio_federation.errors import Unavailable
from trio_federation.pb.sandbox.sync.v1 import (
    ClusterOrigin,
    EnvCapacity,
    ReportFederationRequest,
    WatchFederationRequest,
)
from trio_federation.rpc import MemoryLink
from trio_federation.testing.network import Route
from trio_federation.waits import microseconds

#: Bytes that a narrow line passes on in one go.
PIECE = 1024
#: a long name, so that a message of a thousand records is a large one
NAME = "p" * 120 + "." + "q" * 100


class NarrowLine:
    """The way to a real hub, over which so many bytes a second come through in each direction; 0: any number."""

    name = "line"

    def __init__(self, *, to_hub: float = 0.0, to_cluster: float = 0.0) -> None:
        self.routes: list[Route] = []
        self._to_hub = to_hub
        self._to_cluster = to_cluster
        self.federation: Simulation | None = None
        self.nursery: trio.Nursery | None = None

    def serve(self, stream: trio.abc.Stream) -> None:
        """Carry one more connection."""
        assert self.nursery is not None
        self.nursery.start_soon(self._carry, stream)

    async def _carry(self, near: trio.abc.Stream) -> None:
        assert self.federation is not None
        link = MemoryLink(client="line", server="hub-0")
        try:
            self.federation.hubs[0].serve(link.server)
        except Unavailable:  # it has ended
            await trio.aclose_forcefully(near)
            return
        async with near, link.client as far, trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, near, far, self._to_hub, nursery.cancel_scope)
            nursery.start_soon(self._pump, far, near, self._to_cluster, nursery.cancel_scope)

    async def _pump(
        self, source: trio.abc.Stream, target: trio.abc.Stream, rate: float, scope: trio.CancelScope
    ) -> None:
        try:
            while data := await source.receive_some(PIECE):
                if rate:
                    await trio.sleep(len(data) / rate)
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()


@pytest.mark.parametrize(
    "to_hub, to_cluster", [(0.0, 60_000.0), (0.0, 22_000.0), (0.0, 16_000.0), (30_000.0, 0.0), (20_000.0, 0.0)]
)
async def test_what_a_narrow_line_carries_is_as_old_as_it_is(
    to_hub: float, to_cluster: float, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """A thousand records of 240 bytes take from four seconds to longer than the silence limit. They come as far as the
    line allows, none is shown past its TTL, and nobody takes a call for dead whose bytes come all the time."""
    narrow = NarrowLine(to_hub=to_hub, to_cluster=to_cluster)
    async with simulated_federation("west", "east", scripted_hubs=[narrow], start=False) as fed:
        narrow.federation = fed
        # East is beyond the line where it is narrow towards the hub, and west where it is narrow towards the cluster.
        beyond, near = ("east", "west") if to_hub else ("west", "east")
        fed.partition(beyond, hub=0)
        fed[near].routes["line"].partition()
        fed["east"].source.set(*(member("east", f"{NAME}-{number:04}", idle=3) for number in range(1000)))
        said_at: dict[tuple[str, int], float] = {}

        def remember() -> None:
            for record in fed["east"].known("east"):
                said_at[origin_of(record)] = seen_at(record)

        await fed["east"].start()
        await fed["west"].start()
        younger, oldest, most = 0.0, 0.0, 0
        for _ in range(400):
            remember()
            known = fed["west"].known("east")
            most = max(most, len(known))
            for record in known:
                younger = max(younger, seen_at(record) - said_at[origin_of(record)])
                oldest = max(oldest, trio.current_time() - said_at[origin_of(record)])
            await trio.sleep(0.5)
        assert younger < 0.5  # the quickest message, which is short, and a little for each second of a busy line
        assert oldest <= 30.5
        assert most >= 500
        assert [line for line in lines(logs, "hub_failed") if "silent" in line["error"]] == []


def origin_of(record: Capacity) -> tuple[str, int]:
    """Which sample a record is."""
    assert record.origin is not None
    return record.origin.instance, record.origin.seq


def seen_at(record: Capacity) -> float:
    """When it was observed, as far as is known."""
    assert record.observed_at is not None
    return record.observed_at


async def test_a_report_on_an_old_connection_is_as_young_as_it_is(autojump_clock: MockClock) -> None:
    """A proxy may carry a new call over a connection that it has had for long, and an agent may open a report again on
    its own: how long ago a connection began says nothing about a call."""
    async with (
        simulated_federation(hubs=1) as fed,
        fed.connection("east", instance="aa") as connection,
        connection.watch(WatchFederationRequest()),  # for which it is kept
    ):
        await trio.sleep(1000.0)
        for number in (1, 2):
            async with connection.report() as call:
                await call.wait_accepted()
                now = trio.current_time()
                assert call.accepted_at == now
                row = ClusterOrigin(cluster_id="", instance="aa", uptime_ms=60_000)
                item = EnvCapacity(namespace="ns", env_name="env", member_pool="p", seq=number, observed_for_ms=500)
                message = ReportFederationRequest(items=[item], origins=[row])
                message.sent_us = message.opened_us = microseconds(now + 5.0)
                await call.send(message)
                await trio.sleep(0.1)
                (record,) = fed.hubs[0].hub.snapshot()
                assert origin_of(record) == ("aa", number)
                assert seen_at(record) == pytest.approx(now - 0.5, abs=0.001)
            await trio.sleep(100.0)

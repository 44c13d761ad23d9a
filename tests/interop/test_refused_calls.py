"""Thousands of calls on one connection of grpcio that a hub refuses before it has read anything of them, beside one
report that goes on: what they carried is given back to the connection's window to the last byte, and nothing of them
stays."""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
import pytest
import trio

from tests.interop import peers
from tests.interop.peers import SECRET, SERVICE, LogWatch, Schema, Worker
from tests.interop.strangers import Code, Host, Steady, running_hub, until
from trio_federation.config import HubSettings, Secret
from trio_federation.rpc import server
from trio_federation.rpc.transport import CONNECTION_WINDOW, Http2Connection

#: No word of any message is in it.
WRONG = "v6Hn-8s0k-no-secret"
#: Bytes of a large message: it is on its way in several frames when its call is refused.
LARGE = 40_000
#: Calls that are made at once; what they carry at most fits the connection's window.
AT_ONCE = 24
#: Calls after which the report says something new, and the window is looked at.
STEP = 250


class Call(NamedTuple):
    """A kind of call that a hub refuses."""

    method: str
    #: what it says of its caller, beside a proof that is right
    cluster: str
    proof: str
    #: bytes of each message that it sends, whether or not anybody reads them
    messages: Sequence[int]
    refused_with: grpc.StatusCode


KINDS = [
    Call(method, cluster, proof, messages, code)
    for method in ("ReportFederation", "WatchFederation")
    for cluster, proof, code in (
        ("No Label", SECRET, Code.INVALID_ARGUMENT),
        ("west", WRONG, Code.UNAUTHENTICATED),
    )
    for messages in ((), (10,), (LARGE,), (10, LARGE))
]


class Caller:
    """Makes calls that are refused, a few at once, each time in a thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        # As streams either way, so that a call of each kind can have no message, or several.
        self._methods = {
            method: channel.stream_stream(f"/{SERVICE}/{method}", request_serializer=bytes, response_deserializer=bytes)
            for method in ("ReportFederation", "WatchFederation")
        }
        self._made = 0

    async def make(self, count: int) -> Counter[grpc.StatusCode]:
        """Make so many calls, of all kinds in turn; how often each ended with the status that it had to end with."""
        return await trio.to_thread.run_sync(self._make, count)

    def _make(self, count: int) -> Counter[grpc.StatusCode]:
        found: Counter[grpc.StatusCode] = Counter()
        open_calls: deque[tuple[Call, Any]] = deque()
        for _ in range(count):
            if len(open_calls) == AT_ONCE:
                found[_outcome(*open_calls.popleft())] += 1
            kind = KINDS[self._made % len(KINDS)]
            self._made += 1
            metadata = [("authorization", f"Bearer {kind.proof}"), ("x-federation-cluster", kind.cluster)]
            messages = iter([bytes(size) for size in kind.messages])
            open_calls.append((kind, self._methods[kind.method](messages, timeout=peers.TIMEOUT, metadata=metadata)))
        while open_calls:
            found[_outcome(*open_calls.popleft())] += 1
        return found


def _outcome(kind: Call, call: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = call.code()
    assert code is kind.refused_with, f"{kind}: {code}, {call.details()}"
    return code


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Http2Connection]:
    """The connections that hubs have served, in the order of their coming."""
    served: list[Http2Connection] = []

    class Noted(Http2Connection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            served.append(self)

    monkeypatch.setattr(server, "Http2Connection", Noted)
    return served


def unreturned(connection: Http2Connection) -> int:
    """Bytes that a peer has sent and that nobody has read or thrown away yet, as far as the connection's window knows:
    what is missing there for good where a call has left them behind."""
    window = connection.protocol.h2._inbound_flow_control_window_manager
    assert window.max_window_size == CONNECTION_WINDOW
    return window.max_window_size - window.current_window_size - window._bytes_processed


def open_streams(connection: Http2Connection) -> int:
    """The streams of a connection that are open; to ask makes h2 forget those that are not."""
    return connection.protocol.h2.open_inbound_streams


def kept() -> tuple[int, int]:
    """Tasks of Trio, and objects that the collector knows: what must not grow."""
    gc.collect()
    return trio.lowlevel.current_statistics().tasks_living, len(gc.get_objects())


async def refuse(hub: Host, schema: Schema, connections: Sequence[Http2Connection], count: int) -> None:
    """Make so many calls that are refused, beside a report that goes on, and look at what they cost."""
    with Worker(schema, hub.port, "west") as west:
        steady = Steady(west, "west")
        await steady.goes_on()
        [connection] = connections
        caller = Caller(west.channel)
        refused: Counter[grpc.StatusCode] = Counter()
        #: seconds of CPU that each step took, of both sides, and what was kept after it
        costs: list[float] = []
        after: list[tuple[int, int]] = []
        for _ in range(count // STEP):
            began = time.process_time()
            refused += await caller.make(STEP)
            costs.append(time.process_time() - began)
            # The report is where it was: on the same stream, and each of its messages is heard of.
            await steady.goes_on()
            # What is left of the last calls may still be on its way.
            with trio.move_on_after(peers.TIMEOUT):
                await until(lambda: unreturned(connection) == 0 and open_streams(connection) == 2)
            assert (unreturned(connection), open_streams(connection)) == (0, 2)
            # Each refusal is a line, which this test would keep.
            assert not any(text in repr(hub.logs.entries) for text in (SECRET, WRONG))
            hub.logs.entries.clear()
            after.append(kept())
        assert refused == {Code.INVALID_ARGUMENT: count // 2, Code.UNAUTHENTICATED: count // 2}
        for code in refused:
            assert hub.metric("calls_refused_total", status=code.name) == count // 2
        assert len(connections) == 1
        assert hub.idle == {("west", "p1"): 1 + 1 + count // STEP}
        assert hub.held == {"addresses": 1, "connections": 1, "clusters": 1, "calls": 2}

        # The first two steps fill what has room for a limited number, as lines on strangers; what the last calls have
        # left goes now and then, so that the least of several steps counts. Half an object for each call is much.
        tasks = [tasks for tasks, _ in after[2:]]
        assert max(tasks) <= min(tasks) + 4
        objects = [objects for _, objects in after[2:]]
        half = len(objects) // 2
        assert min(objects[half:]) - min(objects[:half]) < 0.5 * STEP * half
        quarter = len(costs) // 4
        assert sum(costs[-quarter:]) < 5 * sum(costs[:quarter])


def carried(count: int) -> int:
    """Bytes that so many calls carry."""
    return sum(sum(KINDS[number % len(KINDS)].messages) for number in range(count))


@pytest.mark.slow
async def test_calls_that_are_refused_early_cost_the_others_nothing(
    logs: LogWatch, schema: Schema, connections: list[Http2Connection]
) -> None:
    """They carry several times what the connection's window holds: if it was not given back, all would stand still."""
    count = 2_000
    assert carried(count) > 8 * CONNECTION_WINDOW
    async with running_hub(logs, HubSettings(secret=Secret(SECRET))) as hub:
        await refuse(hub, schema, connections, count)


@pytest.mark.soak
async def test_twenty_thousand_calls_that_are_refused_early(
    logs: LogWatch, schema: Schema, connections: list[Http2Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for as long as it takes to exhaust what is limited by the number of calls."""
    monkeypatch.setattr(peers, "TIMEOUT", 600.0)
    async with running_hub(logs, HubSettings(secret=Secret(SECRET))) as hub:
        await refuse(hub, schema, connections, 20_000)

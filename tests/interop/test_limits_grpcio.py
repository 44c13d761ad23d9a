"""What one peer may ask of a hub of ours, as grpcio meets it: over a limit there is a clear status, the others go on,
and nothing is kept afterwards."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import grpc
import pytest
import trio

from tests.interop.peers import PATIENCE, SERVICE, TIMEOUT, LogWatch, Schema, Worker, as_bytes, record
from tests.interop.strangers import (
    MASTER,
    ONE,
    Code,
    Host,
    Seen,
    Steady,
    outcome,
    refusal,
    refusals,
    running_hub,
    until,
)
from trio_federation.config import HubSettings, Limits, Secret
from trio_federation.credentials import make_token
from trio_federation.limits import BURST

#: Seconds in which the hubs here forget: they look four times in it.
TTL = 2.0
#: Seconds for a first message, where that is what a test is about. Each of those waits for as long; others have to call
#: within it, however busy the machine is.
FIRST_MESSAGE = 2.0
FREE = {"addresses": 0, "connections": 0, "clusters": 0, "calls": 0}


def settings(**limits: Any) -> HubSettings:
    """A hub that takes tokens, with these limits."""
    return HubSettings(secret=Secret(MASTER), accept=("token",), limits=Limits(**limits), ttl=TTL)


def worker(hub: Host, schema: Schema, cluster: str) -> Worker:
    """A worker with a token, on a connection of its own."""
    return Worker(schema, hub.port, cluster, secret=make_token(MASTER, cluster), instance=ONE)


async def is_left(hub: Host) -> None:
    """Wait until nobody calls a hub any more. Whoever has used up an allowance is known to it for some seconds more, by
    two numbers."""
    await until(lambda: {**hub.held, "clusters": 0} == FREE)
    assert hub.held["clusters"] <= 2


async def is_free(hub: Host) -> None:
    """Wait until a hub that nobody calls any more keeps nothing of anybody."""
    await until(lambda: hub.held == FREE)
    assert hub.metric("reporters") == hub.metric("watchers") == 0


# --- how many at once ------------------------------------------------------------------------------------------------


async def test_connections_of_one_address(logs: LogWatch, schema: Schema) -> None:
    async with running_hub(logs, settings(connections=2)) as hub:
        with worker(hub, schema, "west") as west:
            steady = Steady(west, "west")
            await steady.goes_on()
            with worker(hub, schema, "east") as east:
                await Steady(east, "east").goes_on()
                assert hub.held["connections"] == 2
                with worker(hub, schema, "south") as south:
                    for refused in await refusals(south, "south"):
                        assert refused.code is Code.RESOURCE_EXHAUSTED
                        assert "127.0.0.1 has 2 connections open" in refused.details
                        assert "[hub.limits]" in refused.details
                    assert hub.held["connections"] == 2
                [told] = hub.told("connection_refused")
                assert told["connections"] == 2
                await steady.goes_on()
            # One has gone, so there is room for another.
            await until(lambda: hub.held["connections"] == 1)
            with worker(hub, schema, "south") as south:
                await Steady(south, "south").goes_on()
                await steady.goes_on()
        await is_free(hub)
        assert hub.metric("calls_refused_total", status="RESOURCE_EXHAUSTED") >= 1


async def test_a_connection_that_is_one_too_many_needs_no_credential_and_costs_no_session(
    logs: LogWatch, schema: Schema
) -> None:
    async with running_hub(logs, settings(connections=1)) as hub:
        with worker(hub, schema, "west") as west:
            steady = Steady(west, "west")
            await steady.goes_on()
            with Worker(schema, hub.port, "south", secret="nonsense") as south:
                assert {each.code for each in await refusals(south, "south")} == {Code.RESOURCE_EXHAUSTED}
            assert hub.held == {"addresses": 1, "connections": 1, "clusters": 1, "calls": 2}
            await steady.goes_on()
        await is_free(hub)


@pytest.mark.slow
async def test_a_flood_of_connections_is_turned_away_without_a_word(logs: LogWatch, schema: Schema) -> None:
    async with running_hub(logs, settings(connections=1)) as hub:
        with worker(hub, schema, "west") as west, ExitStack() as flood:
            steady = Steady(west, "west")
            await steady.goes_on()
            streams = []
            for _ in range(200):
                connected = flood.enter_context(closing(socket.create_connection(("127.0.0.1", hub.port))))
                connected.setblocking(False)
                streams.append(trio.socket.from_stdlib_socket(connected))
            with trio.fail_after(PATIENCE):
                words = [await drained(stream) for stream in streams]
            # A few get the word, which takes a moment in which they are there; to the others nobody speaks HTTP/2.
            assert 0 < len([word for word in words if word]) < len(words)
            assert max(len(word) for word in words) < 1000
            assert hub.held == {"addresses": 1, "connections": 1, "clusters": 1, "calls": 2}
            await steady.goes_on()
            assert len(hub.told("connection_refused")) == 1
        await is_free(hub)


async def drained(stream: trio.socket.SocketType) -> bytes:
    """What comes on a socket until the other side has closed it."""
    data = b""
    try:
        while more := await stream.recv(65536):
            data += more
    except ConnectionError:
        pass
    return data


async def test_calls_of_one_cluster(logs: LogWatch, schema: Schema) -> None:
    async with running_hub(logs, settings(streams=3)) as hub:
        with (
            worker(hub, schema, "west") as west,
            worker(hub, schema, "west") as more,
            worker(hub, schema, "east") as east,
        ):
            steady, other = Steady(west, "west"), Steady(east, "east")
            third = Seen(more.watch())
            await third.shows("west", 1)
            for refused in await refusals(more):
                assert refused.code is Code.RESOURCE_EXHAUSTED
                assert "'west' has 3 calls open" in refused.details
                assert "[hub.limits]" in refused.details
            # The second connection counts for the same cluster; another cluster has calls of its own.
            assert hub.held["calls"] == 5
            await steady.goes_on()
            await other.goes_on()
            await third.shows("west", 2)
            third.watch.cancel()
            await until(lambda: hub.held["calls"] == 4)
            await Seen(more.watch()).shows("west", 2)
            assert hub.metric("calls_refused_total", status="RESOURCE_EXHAUSTED") == 2
            [line] = [line for line in hub.told("call_refused") if line["status"] == "RESOURCE_EXHAUSTED"][:1]
            assert line["cluster"] == "west"
        await is_free(hub)


async def test_refused_calls_do_not_count(logs: LogWatch, schema: Schema) -> None:
    """Else whoever knows no secret could use up the calls of a cluster."""
    async with running_hub(logs, settings(streams=2)) as hub:
        with worker(hub, schema, "west") as west, Worker(schema, hub.port, "west", secret="nonsense") as stranger:
            for _ in range(5):
                assert {each.code for each in await refusals(stranger)} == {Code.UNAUTHENTICATED}
            assert hub.held["clusters"] == 0
            await Steady(west, "west").goes_on()
        await is_free(hub)


# --- how much --------------------------------------------------------------------------------------------------------


async def test_messages_of_one_cluster(logs: LogWatch, schema: Schema) -> None:
    rate = 3
    async with running_hub(logs, settings(message_rate=rate)) as hub:
        with worker(hub, schema, "west") as west, worker(hub, schema, "east") as east:
            other = Steady(east, "east")
            most = int(rate * BURST)
            report = west.report(*(schema.report(record("west", f"p{number}", idle=1)) for number in range(most * 10)))
            refused = await refusal(report.answer())
            assert refused.code is Code.RESOURCE_EXHAUSTED
            assert f"'west' sends more than {rate} messages a second" in refused.details
            assert "[hub.limits]" in refused.details
            # What came before that counts; what came after it does not. The call itself is one of them.
            taken = [pool for cluster, pool in hub.idle if cluster == "west"]
            assert most - 1 <= len(taken) < most * 10
            await other.goes_on()
            await until(lambda: hub.metric("reporters") == 1)
            assert [line["status"] for line in hub.told("call_ended")] == ["RESOURCE_EXHAUSTED"]
            assert hub.told("call_ended")[0]["cluster"] == "west"
        await is_left(hub)


async def test_the_allowance_comes_back_with_time(logs: LogWatch, schema: Schema) -> None:
    async with running_hub(logs, settings(message_rate=20)) as hub:
        with worker(hub, schema, "west") as west:
            flood = west.report(*(schema.report(record("west", idle=1)) for _ in range(2000)))
            assert (await refusal(flood.answer())).code is Code.RESOURCE_EXHAUSTED
            # As an agent does, again and again until it is let in.
            with trio.fail_after(PATIENCE):
                while True:
                    report = west.report(schema.report(record("west", idle=2)))
                    report.end()
                    refused = await outcome(report.answer())
                    if refused is None:
                        break
                    assert refused.code is Code.RESOURCE_EXHAUSTED
            assert hub.idle == {("west", "p1"): 2}


async def test_watches_of_one_cluster_one_after_the_other(logs: LogWatch, schema: Schema) -> None:
    """Each costs a snapshot."""
    async with running_hub(logs, settings(message_rate=2)) as hub:
        with worker(hub, schema, "west") as west, worker(hub, schema, "east") as east:
            opened = 0
            watch = west.watch()
            while (refused := await outcome(watch.next())) is None:
                opened += 1
                watch.cancel()
                await until(lambda: hub.held["calls"] == 0)
                watch = west.watch()
            assert refused.code is Code.RESOURCE_EXHAUSTED
            assert "'west' sends more than 2 messages a second" in refused.details
            assert opened >= 2 * BURST
            await Seen(east.watch()).take()


@pytest.mark.parametrize("counts", [[11], [6, 6], [10, 1], [1] * 11, [0, 11], [5, 1000]])
async def test_records_of_one_cluster(logs: LogWatch, schema: Schema, counts: Sequence[int]) -> None:
    async with running_hub(logs, settings(record_rate=1)) as hub:
        with worker(hub, schema, "west") as west, worker(hub, schema, "east") as east:
            other = Steady(east, "east")
            messages = [
                schema.report(*(record("west", f"m{place}-{number}", idle=1) for number in range(count)))
                for place, count in enumerate(counts)
            ]
            refused = await refusal(west.report(*messages).answer())
            assert refused.code is Code.RESOURCE_EXHAUSTED
            assert "[hub.limits]" in refused.details
            if counts[-1] > BURST:
                assert f"'west' sends {counts[-1]} records in one message" in refused.details
            else:
                assert "'west' sends more than 1 record a second" in refused.details
            # Nothing of the message that was too much.
            assert len([cluster for cluster, _ in hub.idle if cluster == "west"]) == sum(counts[:-1])
            await other.goes_on()
        await is_left(hub)


async def test_withdrawals_and_bad_records_count_as_records(logs: LogWatch, schema: Schema) -> None:
    async with running_hub(logs, settings(record_rate=1)) as hub:
        with worker(hub, schema, "west") as west:
            rows = [record("west", f"p{number}", observed_for_ms=2**40) for number in range(6)]
            rows += [record("west", "NO POOL", idle=1) for _ in range(6)]
            refused = await refusal(west.report(schema.report(*rows)).answer())
            assert refused.code is Code.RESOURCE_EXHAUSTED
            assert hub.told("record_dropped") == []


async def test_rows_of_origins_count_as_records(logs: LogWatch, schema: Schema) -> None:
    """Else they would be a way to send without end."""
    async with running_hub(logs, settings(record_rate=1)) as hub:
        with worker(hub, schema, "west") as west:
            origins = [{"cluster_id": "west", "instance": f"{number:02x}"} for number in range(11)]
            refused = await refusal(west.report(schema.report(record("west", idle=1), origins=origins)).answer())
            assert refused.code is Code.RESOURCE_EXHAUSTED
            assert hub.idle == {}


async def test_what_one_cluster_sends_too_much_is_no_other_clusters_matter(logs: LogWatch, schema: Schema) -> None:
    """Two clusters of one address, of which one goes on for ever."""
    async with running_hub(logs, settings(message_rate=20, record_rate=1000)) as hub:
        with worker(hub, schema, "west") as west, worker(hub, schema, "east") as east:
            steady = Steady(east, "east")
            for _ in range(10):
                flood = west.report(*(schema.report(record("west", idle=1)) for _ in range(300)))
                assert (await refusal(flood.answer())).code is Code.RESOURCE_EXHAUSTED
                await steady.goes_on()
        await is_left(hub)


# --- how long --------------------------------------------------------------------------------------------------------


@contextmanager
def silent_call(worker: Worker, method: str) -> Iterator[Callable[[], Any]]:
    """A call of a worker that sends no message, ever; yields what waits for its answer."""
    nothing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call = worker.channel.stream_stream(
        f"/{SERVICE}/{method}", request_serializer=as_bytes, response_deserializer=lambda data: data
    )(iter(nothing.get, None), timeout=TIMEOUT, metadata=worker.metadata)
    try:
        yield lambda: list(call)
    finally:
        call.cancel()
        nothing.put(None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ReportFederation", "WatchFederation"])
async def test_a_call_without_its_first_message_is_ended(logs: LogWatch, schema: Schema, method: str) -> None:
    async with running_hub(logs, settings(first_message=FIRST_MESSAGE)) as hub:
        with worker(hub, schema, "west") as west, worker(hub, schema, "east") as east:
            steady = Steady(east, "east")
            await steady.goes_on()
            with silent_call(west, method) as answer:
                with pytest.raises(grpc.RpcError) as caught:
                    await trio.to_thread.run_sync(answer)
                assert caught.value.code() is Code.DEADLINE_EXCEEDED
                assert f"no message within {FIRST_MESSAGE:g} s" in caught.value.details()
                assert "[hub.limits]" in caught.value.details()
            assert hub.metric("calls_refused_total", status="DEADLINE_EXCEEDED") == 1
            assert [line["status"] for line in hub.told("call_ended")] == ["DEADLINE_EXCEEDED"]
            # It is about the first message: one that has sent it may be silent for as long as it likes.
            await steady.goes_on()
            await until(lambda: hub.held["calls"] == 2)
            # And the cluster is free to call again.
            await Steady(west, "west").goes_on()
        await is_free(hub)


@pytest.mark.slow
async def test_a_silent_report_keeps_nobody_out_for_longer(logs: LogWatch, schema: Schema) -> None:
    async with running_hub(logs, settings(first_message=FIRST_MESSAGE)) as hub:
        with worker(hub, schema, "west") as west:
            with silent_call(west, "ReportFederation") as answer:
                with pytest.raises(grpc.RpcError) as caught:
                    await trio.to_thread.run_sync(answer)
                assert caught.value.code() is Code.DEADLINE_EXCEEDED
            assert hub.idle == {}
            await until(lambda: hub.metric("reporters") == 0)


@pytest.mark.slow
async def test_a_connection_of_grpcio_without_a_call_is_closed(logs: LogWatch, schema: Schema) -> None:
    async with running_hub(logs, settings(first_message=FIRST_MESSAGE)) as hub:
        with worker(hub, schema, "west") as idler, worker(hub, schema, "east") as east:
            steady = Steady(east, "east")
            await steady.goes_on()
            states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
            idler.channel.subscribe(states.put, try_to_connect=True)
            wanted = [grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE]
            while wanted:
                if await trio.to_thread.run_sync(states.get, True, TIMEOUT) is wanted[0]:
                    wanted.pop(0)
            await until(lambda: hub.held["connections"] == 1)
            await steady.goes_on()
            # It may come back whenever it has something to say.
            await Steady(idler, "west").goes_on()
        await is_free(hub)


#: the beginning of HTTP/2, and an empty SETTINGS frame
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


#: what connections say that make no call
SAID = (b"", PREFACE[:10], PREFACE, b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n", bytes(1000))


@pytest.mark.slow
async def test_whatever_a_connection_says_it_is_closed_without_a_call(logs: LogWatch, schema: Schema) -> None:
    """All of them at once, as each takes its time."""
    async with running_hub(logs, settings(first_message=FIRST_MESSAGE)) as hub:
        with worker(hub, schema, "east") as east:
            steady = Steady(east, "east")
            await steady.goes_on()

            async def ended(said: bytes) -> None:
                async with await trio.open_tcp_stream("127.0.0.1", hub.port) as stream:
                    await stream.send_all(said)
                    await drained(stream.socket)

            with trio.fail_after(PATIENCE):
                async with trio.open_nursery() as nursery:
                    for said in SAID:
                        nursery.start_soon(ended, said)
            await until(lambda: hub.held["connections"] == 1)
            await steady.goes_on()
        await is_free(hub)

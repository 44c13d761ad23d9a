"""Failures that Kubernetes clients are publicly known for, each as a real scenario: a scripted server on a real socket,
the real client, and a real source or agent above it, in real time."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import trio
from structlog.typing import EventDict

from tests.federation.helpers import counted
from tests.kubernetes.fake_api import line
from tests.kubernetes.http_peer import (
    Reply,
    ScriptedApi,
    bookmark,
    cut,
    end,
    env,
    events,
    hold,
    listening,
    page,
    raw,
    source_of,
    stall,
    status,
)
from tests.kubernetes.peers import access_to, client_for
from trio_federation import CapacitySource, Withdrawal
from trio_federation.agent import Agent
from trio_federation.config import Federation
from trio_federation.testing import source_context
from trio_federation_kubernetes import informer
from trio_federation_kubernetes.errors import KubernetesError
from trio_federation_kubernetes.options import KubernetesOptions
from trio_federation_kubernetes.sandboxenv import SandboxEnvMapper
from trio_federation_kubernetes.source import KubernetesSource

pytestmark = pytest.mark.usefixtures("logs")

#: Seconds of real time after which what should have happened has not.
PATIENCE = 20.0
EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it is so."""
    with trio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await trio.sleep(0.01)


async def pools(source: CapacitySource) -> dict[str, int]:
    """What it says now: how many are ready in each pool."""
    return {record.member_pool: record.idle for record in await source.collect()}


async def until_pools(source: CapacitySource, expected: dict[str, int]) -> None:
    """Wait until it says so."""
    with trio.fail_after(PATIENCE):
        while await pools(source) != expected:  # noqa: ASYNC110 - it is the question that is asked
            await trio.sleep(0.01)


class Pushed:
    """What a source pushes: for each pool every count, None for its end."""

    def __init__(self) -> None:
        self.told: dict[str, list[int | None]] = {}

    async def take(self, source: CapacitySource) -> None:
        changes = source.changes()
        assert changes is not None
        async for batch in changes:
            for change in batch:
                idle = None if isinstance(change, Withdrawal) else change.idle
                self.told.setdefault(change.identity[3], []).append(idle)


# --- a watch that is told "gone"


@pytest.mark.parametrize(
    "gone",
    [
        events(line("ERROR", EXPIRED)),
        events(line("ERROR", {"kind": "Status", "code": 410}), then=end),
        events(line("ERROR", {"kind": "Status", "reason": "Gone"}), then=cut),
        status(410, "Expired"),
        raw(b"gone", 410),
    ],
    ids=["event", "event without a reason, end", "event without a code, cut", "status", "status without a body"],
)
async def test_a_version_that_is_gone_is_listed_anew_and_never_sent_again(gone: Reply) -> None:
    """The pool that went meanwhile is withdrawn, and the new one told; a bookmark makes no pool and moves the watch; an
    event of an unknown type is skipped, and moves nothing."""
    odd = line("FANCY", {"metadata": {"name": "p9", "namespace": "agents", "resourceVersion": "999"}})
    api = ScriptedApi(
        lists=[
            page("100", env("p1", "90"), env("p2", "91")),
            page("300", env("p2", "91"), env("p3", "250")),
        ],
        watches=[gone, events(bookmark("350"), odd, then=end), events()],
    )
    pushed = Pushed()
    async with source_of(api) as (source, _), trio.open_nursery() as nursery:
        nursery.start_soon(pushed.take, source)
        await until(lambda: len(api.versions()) == 3)
        await until(lambda: len(pushed.told) == 3)
        assert api.versions() == ["100", "300", "350"]
        assert len(api.of("list")) == 2
        assert await pools(source) == {"p2": 1, "p3": 1}
        assert pushed.told == {"p1": [1, None], "p2": [1], "p3": [1]}
        nursery.cancel_scope.cancel()


# --- chunks that end anywhere, and line ends that are none


async def test_a_character_that_two_chunks_share_is_one_character() -> None:
    """The group's name has an é, cut between its two bytes; the chunks are far enough apart to be read one by one."""
    whole = line("MODIFIED", env("p1", "101", idle=2, scalingGroup="café"))
    at = whole.index("é".encode()) + 1
    api = ScriptedApi(lists=[page("100", env("p1", "90"))], watches=[events(whole[:at], whole[at:], pause=0.05)])
    async with source_of(api) as (source, _):
        await until_pools(source, {"p1": 2})
        (record,) = await source.collect()
        assert record.scaling_group == "café"
        assert len(api.asked) == 2


async def test_only_a_line_feed_ends_an_event() -> None:
    """Raw U+2028, U+2029, U+0085 and a vertical tab may stand within a string, or an event; and a carriage return
    before a line feed is none of the event's."""
    odd = "one\u2028two\u2029three\x85four"
    events_of_two = line("MODIFIED", env("p1", "101", idle=2, metadata={"annotations": {"note": odd}}))
    events_of_two += line("ADDED", env("p2", "102", idle=3, state=odd)).replace(b"\n", b"\r\n")
    assert "\u2028".encode() in events_of_two
    api = ScriptedApi(lists=[page("100", env("p1", "90"))], watches=[events(events_of_two)])
    async with source_of(api) as (source, _):
        await until_pools(source, {"p1": 2, "p2": 3})
        assert len(api.asked) == 2


async def test_two_events_in_one_chunk_and_one_in_two() -> None:
    both = line("MODIFIED", env("p1", "101", idle=2)) + line("MODIFIED", env("p1", "102", idle=3))
    last = line("ADDED", env("p2", "103", idle=4))
    api = ScriptedApi(lists=[page("100", env("p1", "90"))], watches=[events(both + last[:20], last[20:], pause=0.05)])
    async with source_of(api) as (source, _):
        await until_pools(source, {"p1": 3, "p2": 4})
        assert len(api.asked) == 2


@pytest.mark.slow
async def test_a_large_event_in_chunks_of_one_byte() -> None:
    """70 kB, which no reconnect and no square of anything stands behind."""
    whole = line("MODIFIED", env("p1", "101", idle=2, metadata={"annotations": {"note": "é" * 35_000}}))
    assert len(whole) > 70_000
    one_by_one = b"".join(b"1\r\n%c\r\n" % byte for byte in whole)

    async def dribble(wire: Any) -> None:
        await wire.begin_chunks()
        await wire.send(one_by_one)
        await hold(wire)

    api = ScriptedApi(lists=[page("100", env("p1", "90"))], watches=[dribble])
    async with source_of(api) as (source, _):
        await until_pools(source, {"p1": 2})
        assert api.versions() == ["100"]
        assert len(api.of("list")) == 1


# --- continue tokens that expire


FIRST_HALF = page("100", env("p1", "90"), token="t1")


async def test_a_token_that_expires_in_the_middle_of_a_list() -> None:
    """The list begins again; the token that the refusal offers would join two versions, and is not used."""
    api = ScriptedApi(
        lists=[FIRST_HALF, page("200", env("p1", "190"), token="t3")],
        pages=[status(410, "Expired", token="t2"), page("200", env("p2", "191"))],
    )
    async with source_of(api) as (source, _):
        await until(lambda: api.versions() == ["200"])
        assert await pools(source) == {"p1": 1, "p2": 1}
        assert [each.params["continue"] for each in api.of("page")] == ["t1", "t3"]


@pytest.mark.parametrize("last", ["", None])
async def test_an_empty_token_ends_the_list(last: str | None) -> None:
    api = ScriptedApi(lists=[FIRST_HALF], pages=[page("100", env("p2", "91"), token=last)])
    async with source_of(api) as (source, _):
        await until(lambda: api.versions() == ["100"])
        assert await pools(source) == {"p1": 1, "p2": 1}
        assert [each.kind for each in api.asked] == ["list", "page", "watch"]


async def test_tokens_that_always_expire_lead_to_a_list_in_one_piece() -> None:
    """After a bounded number of tries."""
    api = ScriptedApi(
        lists=[FIRST_HALF, FIRST_HALF, page("300", env("p1", "290"), env("p2", "291"))],
        pages=[status(410, "Expired", token="t2")],
    )
    async with source_of(api) as (source, _):
        await until(lambda: api.versions() == ["300"])
        assert await pools(source) == {"p1": 1, "p2": 1}
        assert ["limit" in each.params for each in api.of("list")] == [True, True, False]
        assert len(api.of("page")) == 2


async def test_a_part_of_a_list_replaces_nothing() -> None:
    """What was known stays known, and is told, for as long as no list is whole: here none ever is."""
    api = ScriptedApi(
        lists=[page("100", env("p1", "90"), env("p2", "91")), page("200", env("p1", "190", idle=7), token="t1")],
        pages=[status(410, "Expired", token="t2")],
        watches=[status(410, "Expired")],
    )
    pushed = Pushed()
    async with source_of(api) as (source, _), trio.open_nursery() as nursery:
        nursery.start_soon(pushed.take, source)
        await until(lambda: len(api.of("page")) >= 2)
        await trio.sleep(0.5)
        assert await pools(source) == {"p1": 1, "p2": 1}
        assert pushed.told == {"p1": [1], "p2": [1]}
        assert len(api.asked) <= 12
        nursery.cancel_scope.cancel()


# --- values that are none


async def test_no_items_is_an_empty_list() -> None:
    """And not a crash, nor a list that is not known."""
    api = ScriptedApi(lists=[raw(b'{"kind":"SandboxEnvList","metadata":{"resourceVersion":"100"},"items":null}')])
    async with source_of(api) as (source, _):
        await until(lambda: api.versions() == ["100"])
        assert await source.collect() == []
        assert source.is_live()


#: what may stand where a count should, as JSON
BAD_COUNTS = ['"10"', '"500m"', '"10%"', "-1", "true", "1e400", "1.5", "[]", "{}", "2147483648"]
GOOD_COUNTS = {"null": 0, "0": 0, "7": 7}


async def test_a_bad_value_costs_its_own_pool_and_one_warning(logs: list[EventDict]) -> None:
    """In a list and in a watch: exactly those pools are missing, each is counted under its field, and the first is
    told. What is absent or null is nothing ready."""
    bad = {f"bad-{number}": text for number, text in enumerate(BAD_COUNTS)}
    good = {f"good-{number}": text for number, text in enumerate(GOOD_COUNTS)}
    items = [json.dumps(env(name, "90", idle="@")).replace('"@"', text) for name, text in (bad | good).items()]
    without = [
        '{"metadata":{"name":"no-status","namespace":"agents","resourceVersion":"90"}}',
        '{"metadata":{"name":"null-status","namespace":"agents","resourceVersion":"90"},"status":null}',
    ]
    body = f'{{"metadata":{{"resourceVersion":"100"}},"items":[{",".join(items + without)}]}}'
    later = line("MODIFIED", env("good-2", "101", idle="@")).replace(b'"@"', b'"8"')
    later += line("ADDED", env("good-3", "102", idle=9))
    api = ScriptedApi(lists=[raw(body.encode())], watches=[events(later, pause=0.1)])
    async with listening(api) as server, trio.open_nursery() as nursery:
        access = access_to(f"http://127.0.0.1:{server.port}")

        def make() -> KubernetesSource:
            context = source_context(clock=trio.current_time)
            mapper = SandboxEnvMapper(context.cluster_id)
            return KubernetesSource(KubernetesOptions(), context, mapper, connect=lambda: client_for(access))

        agent = Agent("west", Federation(), sources={"kubernetes": make}, generator=Random(0))
        await nursery.start(agent.run)

        def told() -> dict[str, int]:
            return {record.env_name: record.idle for record in agent.registry.snapshot()}

        expected = {f"good-{number}": idle for number, idle in enumerate(GOOD_COUNTS.values())}
        expected |= {"no-status": 0, "null-status": 0, "good-3": 9}
        await until(lambda: told().keys() == expected.keys() and told()["good-3"] == 9)
        # good-2 has turned bad: it is what it was, or nothing, but never the bad value.
        assert {name: idle for name, idle in told().items() if name != "good-2"} == {
            name: idle for name, idle in expected.items() if name != "good-2"
        }
        await trio.sleep(0.2)
        dropped = counted(agent, "trio_federation_records_dropped_total", origin="source:kubernetes")
        # At least once each; and each resync that has them counts them again.
        assert dropped >= len(BAD_COUNTS) + 1
        assert counted(agent, "trio_federation_records_dropped_total", reason="idle") == dropped
        warnings = [each for each in logs if each["event"] == "record_dropped"]
        assert len(warnings) == 1
        assert warnings[0]["log_level"] == "warning"
        assert "idle" in warnings[0]["detail"]
        assert len(api.of("watch")) == 1
        nursery.cancel_scope.cancel()


# --- servers that want to be left alone, or go away


async def test_a_server_that_asks_to_wait_is_waited_for() -> None:
    """By its Retry-After, which is longer than our own first pause could be."""
    api = ScriptedApi(lists=[status(429, "TooManyRequests", Retry_After="1"), page("100", env("p1", "90"))])
    async with source_of(api) as (source, _):
        (trouble,) = source.troubles()
        assert trouble.reason == "throttled"
        await until(lambda: len(api.of("watch")) == 1)
        first, second = api.of("list")
        assert 1.0 <= second.at - first.at < 3.0
        assert await pools(source) == {"p1": 1}
        assert source.troubles() == []


async def test_watches_that_end_at_once_are_not_asked_for_in_a_loop() -> None:
    """A proxy that ends every watch cleanly, say: pauses grow from the first on."""
    api = ScriptedApi(lists=[page("100", env("p1", "90"))], watches=[events(then=end)])
    async with source_of(api) as (source, _):
        await trio.sleep(1.0)
        assert 2 <= len(api.of("watch")) <= 5
        assert len(api.of("list")) == 1
        assert await pools(source) == {"p1": 1}


async def test_a_watch_that_is_cut_off_is_resumed_and_what_was_cut_is_had_again() -> None:
    whole = line("MODIFIED", env("p1", "101", idle=2))
    api = ScriptedApi(
        lists=[page("100", env("p1", "90"))],
        watches=[events(bookmark("100.5"), whole[:50], then=cut), events(whole)],
    )
    async with source_of(api) as (source, _):
        await until_pools(source, {"p1": 2})
        assert api.versions() == ["100", "100.5"]
        assert len(api.of("list")) == 1


@pytest.mark.slow
async def test_a_server_that_has_fallen_silent_is_noticed_within_half_of_the_ttl() -> None:
    """Half-open: its sockets are there, and nobody reads or writes them. The probe finds out; the watch is given up,
    and its connection closed."""
    ttl = 2.4
    api = ScriptedApi(
        lists=[page("100", env("p1", "90")), stall], watches=[events(then=stall), stall], probes=[page("100"), stall]
    )
    async with source_of(api, ttl=ttl) as (source, server):
        await until(lambda: len(api.of("probe")) == 2)
        silent_since = api.of("probe")[0].at
        await until(lambda: not source.is_live())
        # It is noticed by the clock alone; how late this test sees it depends on the machine.
        assert trio.current_time() - silent_since > ttl / 2 - 0.05
        await until(lambda: bool(source.troubles()))
        assert source.troubles()[0].reason == "unreachable"
        await trio.sleep(ttl / 2)
        with pytest.raises(KubernetesError, match="nothing is known of its objects"):
            await source.collect()
        # The client has closed what it had given up: the peer finds the end, if it ever looks.
        watch = server.wires[1].stream
        with trio.fail_after(PATIENCE), suppress(trio.BrokenResourceError):
            while await watch.receive_some():
                pass


async def test_a_watch_whose_connection_alone_has_died_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has missed arrives by the new one, which goes on where it stood; nothing was broken."""
    monkeypatch.setattr(informer, "LONGEST_SILENCE", 0.4)
    missed = line("MODIFIED", env("p1", "101", idle=2))
    api = ScriptedApi(
        lists=[page("100", env("p1", "90"))], watches=[events(bookmark("100.5"), then=stall), events(missed)]
    )
    async with source_of(api) as (source, _):
        await until_pools(source, {"p1": 2})
        assert api.versions() == ["100", "100.5"]
        assert source.troubles() == []

"""Failures that Kubernetes clients are publicly known for, each as a real scenario. What is about reading: a scripted
server on a real socket, the real client, and a real source or agent above it, in real time. What is about writing: a
server in memory that keeps book of who owns what, and a real sink in a real agent, on virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import structlog.testing
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import counted
from tests.kubernetes.fake_api import line, sandboxenvs
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
from tests.kubernetes.json_texts import NO_OBJECT, dump
from tests.kubernetes.mirroring import MANAGER, OWN, PARAMETERS, SOON, StatusServer, has, mirroring, told
from tests.kubernetes.peers import access_to, client_for
from tests.simulation import member, simulated_federation
from trio_federation import CapacitySource, Change, Withdrawal
from trio_federation.agent import Agent
from trio_federation.config import Federation
from trio_federation.pb.sandbox.sync.v1 import ReportFederationRequest
from trio_federation.rpc import ReportCall
from trio_federation.testing import sink_context, source_context
from trio_federation_kubernetes import informer
from trio_federation_kubernetes.errors import ApiError, Cause, KubernetesError
from trio_federation_kubernetes.options import KubernetesOptions, StatusOptions
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS, SandboxEnvMapper
from trio_federation_kubernetes.sink import KubernetesStatusSink
from trio_federation_kubernetes.source import KubernetesSource
from trio_federation_kubernetes.status import Status

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
    async with source_of(api, ttl=ttl) as (source, _):
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
        watch = api.of("watch")[0].wire.stream
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


# --- a list that others write, too


FIELD = '.status.clusters[clusterID="east"].observedMembers[name="p1"].idleCount'
BY_OPS = 'conflict with "ops" with subresource "status" using agents.navix.sh/v1alpha1'


def entry(cluster: str, idle: int) -> dict[str, Any]:
    """An entry of another cluster, as somebody else writes it."""
    return {"clusterID": cluster, "isLocal": False, "observedMembers": [{"name": "p1", "idleCount": idle}]}


async def test_a_list_by_cluster_has_our_entries_beside_those_of_others(autojump_clock: MockClock) -> None:
    """Each of us writes entries of its own, under one name that stays, and neither loses any, whoever is first."""
    server = StatusServer()
    server.make("env")
    async with mirroring(server) as mirror:
        server.apply_as(SANDBOXENVS, "ns", "env", {"status": {"clusters": [entry("first", 70)]}}, "ops")
        mirror.others.have(has("east", 3), has("north", 4))
        await trio.sleep(SOON)
        both = {"status": {"clusters": [entry("first", 71), entry("last", 80)]}}
        server.apply_as(SANDBOXENVS, "ns", "env", both, "ops")
        owners = server.managed("ops", "controller")
        for number in range(20):
            mirror.others.have(has("east", number))
            await trio.sleep(10.0)
            expected = {"first": {"p1": 71}, "last": {"p1": 80}, "east": {"p1": number}, "north": {"p1": 4}}
            assert server.foreign() == expected
            assert server.managed("ops", "controller") == owners
        assert {tuple(sent.clusters) for sent in mirror.sent} == {("east", "north")}
        assert all(sent.params == PARAMETERS for sent in mirror.sent)
        mirror.others.withdraw(has("east", 0), has("north", 0))
        await trio.sleep(SOON)
        assert server.foreign() == {"first": {"p1": 71}, "last": {"p1": 80}}
        assert server.managed(MANAGER) == []
        assert next(iter(server.entries())) == OWN


async def test_a_conflict_is_told_by_field_and_owner_and_never_forced(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """The causes are doubled, and one has no field: each is told once. Nothing is asked for again for ten minutes, and
    what is not in question is written all the same."""
    server = StatusServer()
    server.make("env", "other")
    causes = [
        Cause("FieldManagerConflict", FIELD, BY_OPS),
        Cause("FieldManagerConflict", FIELD, BY_OPS),
        Cause("FieldManagerConflict", "", BY_OPS),
    ]
    server.refuse(409, "apply", name="env", times=1, message="Apply failed with 3 conflicts", causes=causes)
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3), has("north", 4), has("east", 3, env="other"))
        await trio.sleep(5.0 + SOON)
        conflicts = [each for each in logs if each["event"] == "kubernetes_status_conflict"]
        assert [(each["field"], each["owner"]) for each in conflicts] == [(FIELD, "ops"), ("not said", "ops")]
        assert {each["env"] for each in conflicts} == {"ns/env"}
        assert mirror.troubles() == {("conflict", "ops"): 1.0}
        assert server.foreign() == {"north": {"p1": 4}}
        assert server.foreign("other") == {"east": {"p1": 3}}
        began = trio.current_time()
        await trio.sleep(590.0 - 5.0)
        assert all(sent.clusters == ["north"] for sent in mirror.since(began) if sent.key[1] == "env")
        assert all("force" not in sent.params for sent in mirror.sent)
        await trio.sleep(70.0)
        assert server.foreign() == {"east": {"p1": 3}, "north": {"p1": 4}}
        assert mirror.well()


#: what may stand where the causes of a conflict should
_CAUSES = (
    NO_OBJECT
    | st.none()
    | st.lists(
        NO_OBJECT
        | st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                name: st.sampled_from(good)
                | st.text(max_size=20)
                | NO_OBJECT
                | st.none()
                | st.recursive(st.none() | st.integers(), st.lists, max_leaves=3)
                for name, good in {
                    "reason": ["FieldManagerConflict", "FieldValueInvalid"],
                    "field": [
                        FIELD,
                        ".status.federation.clusters",
                        ".status.clusters[",
                        '.status.clusters[clusterID="',
                        ".",
                    ],
                    "message": [
                        BY_OPS,
                        'conflict with "',
                        "conflict",
                        'conflict with ""',
                        'conflicts with "a" and "b"',
                    ],
                }.items()
            },
        ),
        max_size=5,
    )
)
_MESSAGES = st.sampled_from(
    [
        'Apply failed with 2 conflicts: conflicts with "ops":\n- .status.clusters[clusterID="east"].isLocal\n- .x',
        "Apply failed with 1 conflict:",
        'Apply failed with 1 conflict: conflict with "',
        "the object has been modified",
    ]
)


async def _meet(document: dict[str, Any]) -> None:
    """A conflict that says this, for one env of three, ten times."""

    def refuse(_: object) -> ApiError:
        read = Status.of_answer(dump(document).decode("utf-8", "replace"), "application/json")
        error = read.error(f"PATCH: 409: {read.message}")
        error.code = 409  # that of the answer counts
        return error

    server = StatusServer()
    server.make("env", "other")
    server.make("env", namespace="elsewhere")
    fault = server.fault("apply", namespace="ns", name="env", error=refuse, times=10)
    async with mirroring(server) as mirror:
        for number in range(6):
            mirror.others.have(*(has("east", number, env=name) for name in ("env", "other")))
            mirror.others.have(has("east", number, namespace="elsewhere"))
            await trio.sleep(10.0)
            assert server.foreign("other") == server.foreign("env", "elsewhere") == {"east": {"p1": number}}
        assert server.foreign() == {}
        assert 1 <= len([sent for sent in mirror.sent if sent.key == ("ns", "env")]) <= 12
        fault.end()
        await trio.sleep(11 * 60.0)
        assert server.foreign() == {"east": {"p1": 5}}
        assert mirror.well()


@pytest.mark.slow
@settings(max_examples=20)
@given(_CAUSES, st.none() | _MESSAGES | st.text(max_size=30))
def test_odd_causes_cost_nothing_but_the_env_that_they_are_about(causes: Any, message: Any) -> None:
    """Whatever a conflict says, the others are written; and in the end that one, too, as nobody really owns it."""
    document = {"kind": "Status", "code": 409, "reason": "Conflict", "message": message, "details": {"causes": causes}}
    with structlog.testing.capture_logs() as lines:
        trio.run(_meet, document, clock=MockClock(autojump_threshold=0))
    assert [each for each in lines if each["log_level"] in ("error", "critical")] == []


async def test_a_list_without_keys_is_named_and_never_written(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """Into it, an apply would write over the entries of others. It is named at the start, before anything is written,
    and all that is there stays as it is, for an hour."""
    server = StatusServer(sandboxenvs(keyed=False))
    server.make("env", "bare")
    server.put(SANDBOXENVS, "ns", "bare", status={})
    before = server.env(), server.env("bare")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 3), has("east", 3, env="bare"))
        await trio.sleep(SOON)
        (trouble,) = mirror.sink.troubles()
        assert trouble.reason == "schema"
        assert "status.clusters" in trouble.detail
        assert "x-kubernetes-list-map-keys" in trouble.detail
        assert str(SANDBOXENVS) in trouble.detail
        assert mirror.shown()["state"] == "partly"
        warnings = [each for each in logs if each["log_level"] == "warning"]
        assert [each["event"] for each in warnings][:1] == ["sink_trouble"]
        assert warnings[0]["reasons"] == ["schema"]
        for number in range(60):
            mirror.others.have(has("east", number), has("east", number, env="bare"))
            await trio.sleep(60.0)
        assert mirror.sent == []
        assert (server.env(), server.env("bare")) == before


# --- stamps that make events that make stamps


class Listened(KubernetesSource):
    """Keeps what it pushes."""

    pushed: list[Sequence[Change]]

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        """As ever."""
        self.pushed = []
        async for batch in super().changes():
            self.pushed.append(batch)
            yield batch


async def test_ages_that_tick_cost_one_write_a_minute_and_no_report(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """Three other clusters report through a hub, and nothing of theirs changes. Our writes come back as changes of the
    env to the source of the same agent, which has nothing to tell: the hub hears of the resyncs alone, and there is no
    write that follows from a write."""
    reports: list[tuple[float, ReportFederationRequest]] = []
    send = ReportCall.send

    async def note(self: ReportCall, message: ReportFederationRequest) -> None:
        if message.items and message.items[0].cluster_id == OWN:
            reports.append((trio.current_time(), message))
        await send(self, message)

    monkeypatch.setattr(ReportCall, "send", note)
    server = StatusServer()
    server.make("env")
    async with simulated_federation(OWN, "b", "c", "d", start=False) as fed:
        west = fed[OWN]
        context = source_context(clock=west.clock, ttl=fed.settings.ttl)
        source = Listened(KubernetesOptions(), context, SandboxEnvMapper(OWN), connect=server.connect)
        west.more_sources["kubernetes"] = source
        sink = sink_context(clock=west.clock, ttl=fed.settings.ttl, is_reporter=west.is_reporter)
        west.sinks["status"] = KubernetesStatusSink(StatusOptions(), sink, connect=server.connect)
        for cluster in fed.clusters.values():
            if cluster is not west:
                cluster.source.set(member(cluster.name, idle=3))
            await cluster.start()
        await trio.sleep(20.0)
        assert server.foreign() == {"b": {"p1": 3}, "c": {"p1": 3}, "d": {"p1": 3}}
        began, pushed, events = trio.current_time(), len(source.pushed), server.version()
        reports.clear()
        await trio.sleep(600.0)
        writes = server.asked("apply", began)
        assert len(writes) == 10
        assert server.version() != events, "each was an event"
        assert source.pushed[pushed:] == []
        assert 59 <= len(reports) <= 61
        assert all(len(message.items) == 1 for _, message in reports)
        # A change of the env itself is told all the same, and at once.
        server.tick(idle=9)
        await trio.sleep(0.5)
        assert len(source.pushed) == pushed + 1
        assert fed["b"].idle(OWN) == [9]
    assert "kubernetes_status_disturbed" not in told(logs)

"""What an agent and a hub say of themselves: what was dropped, who reports, where creates went and why."""

from __future__ import annotations

import json
from collections.abc import Sequence

import trio
from trio.testing import MockClock

from tests.federation.helpers import counted, exposition
from tests.simulation import SECRET, member, simulated_federation
from trio_federation.capacity import Capacity
from trio_federation.metrics import by_env
from trio_federation.router import CANDIDATES_KEPT, PLACEMENTS_KEPT


async def test_a_hub_names_who_reports(autojump_clock: MockClock) -> None:
    """Those that do now, sorted."""
    async with simulated_federation("west", "east", "north") as fed:
        await fed.settle()
        assert fed.hubs[0].hub.health()["clusters"] == ["east", "north", "west"]
        await fed["north"].stop()
        fed.partition("west")
        await trio.sleep(1.0)
        assert fed.hubs[0].hub.health()["clusters"] == ["east"]


async def test_what_was_dropped_is_told_by_reason_where_it_came_from(autojump_clock: MockClock) -> None:
    """Of each source and hub, from the start on; and the line in the log names the record."""
    async with simulated_federation("west", hubs=1) as fed:
        fed["west"].source.set(member("west", idle=-1), member("west", "p2", idle=1), member("west", "p2", idle=2))
        await fed.settle()
        agent = fed["west"].agent
        (source,) = agent.health()["sources"]
        collects = fed["west"].source.collects
        assert source["dropped"] == {"duplicate": collects, "idle": collects}
        assert source["records"] == 1
        assert agent.health()["hubs"][0]["dropped"] == {}
        assert json.loads(json.dumps(agent.health())) == agent.health()


async def test_a_wrong_secret_never_passes_for_a_success(autojump_clock: MockClock) -> None:
    """What is sent on a call that is refused was not reported, and the hub's refusal is no sign that it works."""
    async with simulated_federation("west", start=False) as fed:
        fed["west"].credential = f"not-{SECRET}"
        fed["west"].source.set(member("west", idle=1))
        await fed["west"].start()
        await trio.sleep(60.0)
        agent = fed["west"].agent
        (hub,) = agent.health()["hubs"]
        assert (hub["state"], hub["last_success"]) == ("failing", None)
        assert counted(agent, "trio_federation_hub_reported_records_total") == 0.0
        assert counted(agent, "trio_federation_hub_connected") == 0.0


async def test_a_placement_can_be_asked_for_later(autojump_clock: MockClock) -> None:
    """By its id, if it reserved, with what it was for; the last PLACEMENTS_KEPT, each with its best candidates."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(*[member("east", f"p{number}", idle=number) for number in range(50)])
        await fed.settle()
        agent = fed["west"].agent
        asked = agent.place("ns", "env", "", False)
        first = agent.place("ns", "env", "", True)
        at = trio.current_time()
        await trio.sleep(7.0)
        assert agent.placed(asked.id) is None
        kept = agent.placed(first.id)
        assert kept is not None
        assert (kept.namespace, kept.env_name, kept.group, kept.at) == ("ns", "env", "", at)
        assert kept.placement.reason == first.reason
        assert kept.placement.candidates == first.candidates[:CANDIDATES_KEPT]
        assert len(first.candidates) == 50
        for _ in range(PLACEMENTS_KEPT - 1):
            last = agent.place("ns", "env", "", True)
        assert agent.placed(first.id) is not None
        agent.place("ns", "env", "", True)
        assert agent.placed(first.id) is None
        assert agent.placed(last.id) is not None


async def test_a_scrape_of_a_hub_shows_what_a_newcomer_would_be_told(autojump_clock: MockClock) -> None:
    """Whatever the pauses in between; what has run out, or is hidden after a reporter vanished, is not there."""
    async with simulated_federation("west", "east", hub_ttl=60.0, grace=10.0) as fed:
        for name in ("west", "east"):
            fed[name].source.set(*[member(name, f"p{n}", env=f"e{n % 7}", idle=n) for n in range(600)])
        await fed.settle()
        hub = fed.hubs[0].hub

        def in_order(records: Sequence[Capacity]) -> list[Capacity]:
            return sorted(records, key=lambda record: record.sort_key)

        told = {records[0].env_name: in_order(records) for records in hub.by_env() if records}
        assert told == {records[0].env_name: in_order(records) for records in by_env(hub.snapshot())}
        assert len(told) == 7
        assert any(not records for records in hub.by_env())
        chunks = [chunk async for chunk in hub.metrics.exposition(hub.by_env(), now=trio.current_time())]
        assert b"".join(chunks).count(b"trio_federation_member_idle{") == 1200
        assert (await exposition(fed["west"].agent)).count("trio_federation_member_idle{") == 1200
        await fed["east"].kill()
        await trio.sleep(12.0)
        assert {record.cluster_id for records in hub.by_env() for record in records} == {"west"}

"""What is logged: one line for each change of state, none for each batch or try, and never a secret."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import lines
from tests.simulation import SECRET, member, simulated_federation
from trio_federation.errors import RpcError

#: what is told to people; debug lines are for those who look for something
TOLD = ("info", "warning")


def told(logs: list[EventDict]) -> list[tuple[str, str]]:
    """What the default level shows: each line's event and whom it is about."""
    return [
        (line["event"], line.get("cluster", line.get("hub", line.get("source", ""))))
        for line in logs
        if line["log_level"] in TOLD
    ]


async def test_steady_state_is_silent(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """Nothing is logged for a batch, a resync, a record, a ping or a look at the clock, at any level."""
    async with simulated_federation("west", "east", hubs=2) as fed:
        for number in range(20):
            for name in ("west", "east"):
                fed[name].source.set(member(name, idle=number), member(name, f"new-{number}"))
            await trio.sleep(6.0)
            if number == 0:
                logs.clear()
        assert logs == []


async def test_a_start_is_one_line_for_each_thing_that_works(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """The hub tells who came, the agent tells which call works."""
    async with simulated_federation("west", hubs=1) as fed:
        await fed.settle()
        assert sorted(told(logs)) == [
            ("hub_works", "hub-0"),
            ("hub_works", "hub-0"),
            ("reporter_came", "west"),
            ("watcher_came", "west"),
        ]
        assert sorted(line["call"] for line in lines(logs, "hub_works")) == ["report", "watch"]


async def test_every_outage_is_told_once_and_so_is_its_end(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """An outage of minutes is one warning, and its end one line for each call, the second outage like the first."""
    async with simulated_federation("west", hubs=1) as fed:
        await fed.settle()
        for _ in range(3):
            logs.clear()
            fed.hubs[0].stop()
            await trio.sleep(300.0)
            at_agent = [line for line in told(logs) if line[0].startswith("hub_")]
            assert at_agent == [("hub_failed", "hub-0")]
            assert lines(logs, "hub_failed")[0]["log_level"] == "warning"
            logs.clear()
            await fed.hubs[0].start()
            await trio.sleep(70.0)
            assert [line for line in told(logs) if line[0].startswith("hub_")] == [("hub_works", "hub-0")] * 2


async def test_a_reporter_that_comes_and_goes_is_two_lines(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """At the hub: who, from where, and whether it said goodbye."""
    async with simulated_federation("west", "east") as fed:
        await fed.settle()
        logs.clear()
        await fed["east"].stop()
        await fed["west"].kill()
        await trio.sleep(1.0)
        left = lines(logs, "reporter_left")
        assert [(line["cluster"], line["said_goodbye"]) for line in left] == [("east", True), ("west", False)]
        # What the one that was killed may still have said of its broken connection is not the hub's.
        assert (
            sorted(event for event, _ in told(logs) if event != "hub_failed")
            == ["reporter_left"] * 2 + ["watcher_left"] * 2
        )


async def test_a_source_that_fails_and_works_again_is_two_lines(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Named, with what it said, and with what becomes of its records."""
    async with simulated_federation("west", hubs=0) as fed:
        await fed.settle()
        for _ in range(2):
            logs.clear()
            fed["west"].source.failure = OSError("no API server")
            await trio.sleep(300.0)
            assert told(logs) == [("source_failed", "set")]
            assert "no API server" in lines(logs, "source_failed")[0]["error"]
            logs.clear()
            fed["west"].source.failure = None
            await trio.sleep(300.0)
            assert told(logs) == [("source_works", "set")]


@pytest.mark.parametrize("credential", [SECRET, "another-secret-0815"])
async def test_no_secret_is_ever_logged(credential: str, autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """Neither side shows a credential, right or wrong, at debug level, when it is refused, and when everything breaks;
    that the hub's own is never shown is checked after every test here."""
    async with simulated_federation("west", "east", start=False) as fed:
        fed["east"].credential = credential
        for cluster in fed.clusters.values():
            cluster.source.set(member(cluster.name, idle=1))
            await cluster.start()
        await fed.settle()
        fed.black_hole("east")
        await trio.sleep(20.0)
        await fed.restart_hub(0)
        fed["east"].routes["hub-0"].release()
        await fed.settle()
        async with fed.connection("north", credential=credential) as connection, connection.report() as call:
            with trio.move_on_after(1.0), suppress(RpcError):
                await call.wait_accepted()
        await fed["east"].stop()
        text = repr(logs)
        assert len(logs) > 10
        assert credential not in text
        assert credential[:8] not in text

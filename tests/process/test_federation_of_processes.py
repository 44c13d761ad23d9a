"""A hub and agents as real processes on loopback: numbers travel, stops, kills and restarts do what they should."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from tests.process.running import (
    PATIENCE,
    Program,
    agent_file,
    free_port,
    hub_file,
    idle_by_env,
    records,
    scrape,
    start,
    wait_idle,
)

#: Neither is to be seen anywhere in what a process says.
SECRET = "the-hubs-own-secret-5f3c"
WRONG_SECRET = "some-other-secret-77aa"

EAST = ("east", "team-a", "python", "")
WEST = ("west", "team-a", "python", "")


def assert_silent_about_secrets(programs: Sequence[Program]) -> None:
    """At level debug, which every process here logs at."""
    for each in programs:
        said = each.output + "\n".join(each.lines)
        assert len(said) > 100
        assert SECRET not in said
        assert WRONG_SECRET not in said


@pytest.mark.slow
async def test_two_agents_share_what_they_have(nursery: trio.Nursery, tmp_path: Path) -> None:
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET))
    await hub.started()
    files = {
        name: agent_file(tmp_path / f"{name}.toml", name, {name: idle}, hub_port=hub.hub_port, secret=SECRET)
        for name, idle in (("west", 1), ("east", 7))
    }
    west, east = [await start(nursery, "run", files[name]) for name in ("west", "east")]
    await west.started()
    await east.started()

    everything = {WEST: 1.0, ("west", "team-a", "python", "cpu"): 1.0}
    everything |= {EAST: 7.0, ("east", "team-a", "python", "cpu"): 7.0}
    for agent in (west, east):
        assert await wait_idle(agent.metrics_port, lambda idle: len(idle) == 4) == everything
    assert idle_by_env(await scrape(hub.metrics_port)) == everything

    # An edit arrives in the other cluster.
    (tmp_path / "east-capacity.toml").write_text(records({"east": 9, "more": 3}))
    await wait_idle(west.metrics_port, lambda idle: idle[EAST] == 12.0)

    # A stop withdraws at once, long before the TTL of 30 s, and what stays is not touched by it.
    assert await east.stop(signal.SIGTERM) == 0
    left = await wait_idle(west.metrics_port, lambda idle: EAST not in idle, within=10)
    assert left == {key: idle for key, idle in everything.items() if key[0] == "west"}
    assert (await hub.event("reporter_left", cluster="east"))["said_goodbye"]
    assert [event["signal"] for event in east.events("stopping")] == ["SIGTERM"]

    # Ctrl-C does the same, seen from the other side.
    again = await start(nursery, "run", files["east"])
    await again.started()
    await wait_idle(again.metrics_port, lambda idle: idle.get(WEST) == 1.0)
    assert await west.stop(signal.SIGINT) == 0
    await wait_idle(again.metrics_port, lambda idle: WEST not in idle, within=10)
    assert await again.stop() == 0
    assert await hub.stop(signal.SIGINT) == 0

    everybody = [hub, west, east, again]
    for each in everybody:
        each.assert_only_logged()
    assert_silent_about_secrets(everybody)


@pytest.mark.slow
async def test_a_killed_hub_comes_back_and_everything_heals(nursery: trio.Nursery, tmp_path: Path) -> None:
    port = free_port()
    hub_config = hub_file(tmp_path / "hub.toml", port=port, secret=SECRET)
    files = [
        agent_file(tmp_path / f"{name}.toml", name, {name: idle}, hub_port=port, secret=SECRET)
        for name, idle in (("west", 1), ("east", 7))
    ]
    hub = await start(nursery, "run", hub_config)
    await hub.started()
    west, east = [await start(nursery, "run", path) for path in files]
    for agent in (west, east):
        await agent.started()
        await wait_idle(agent.metrics_port, lambda idle: {EAST, WEST} <= set(idle))

    hub.send(signal.SIGKILL)
    assert await hub.ended() == -signal.SIGKILL
    await west.event("hub_failed", call="connection")
    # Nothing is lost that was known, and the own truth goes on.
    (tmp_path / "west-capacity.toml").write_text(records({"west": 2}))
    assert (await wait_idle(west.metrics_port, lambda idle: idle[WEST] == 2.0))[EAST] == 7.0

    second = await start(nursery, "run", hub_config)
    await second.started()
    assert second.hub_port == port
    await wait_idle(east.metrics_port, lambda idle: idle[WEST] == 2.0)
    (tmp_path / "east-capacity.toml").write_text(records({"east": 8}))
    await wait_idle(west.metrics_port, lambda idle: idle[EAST] == 8.0)
    assert [await each.stop() for each in (west, east, second)] == [0, 0, 0]
    for each in (hub, west, east, second):
        each.assert_only_logged()


@pytest.mark.slow
async def test_an_agent_stops_in_time_while_its_hub_is_frozen(nursery: trio.Nursery, tmp_path: Path) -> None:
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET))
    await hub.started()
    config = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=hub.hub_port, secret=SECRET)
    west = await start(nursery, "run", config)
    await west.event("hub_works", call="report")
    await west.event("hub_works", call="watch")
    hub.send(signal.SIGSTOP)
    began = trio.current_time()
    west.send(signal.SIGTERM)
    await west.event("stopping")
    # Neither a second one nor a Ctrl-C makes it worse.
    west.send(signal.SIGTERM)
    west.send(signal.SIGINT)
    assert await west.ended() == 0
    assert trio.current_time() - began < 5
    hub.send(signal.SIGCONT)
    # What the agent said is in the hub's buffers, also the end of its connection.
    await hub.event("reporter_left", cluster="west")
    assert await hub.stop() == 0
    west.assert_only_logged()
    assert len(west.events("stopping")) == 1


@pytest.mark.slow
async def test_an_agent_stops_in_time_while_it_cannot_send(nursery: trio.Nursery, tmp_path: Path) -> None:
    """A hub that takes in nothing stops the report at the flow control's first window, which is 64 KiB."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    many = {f"pool-{number}": number for number in range(3000)}
    config = agent_file(tmp_path / "west.toml", "west", many, hub_port=port, secret=SECRET, level="info")
    west = await start(nursery, "run", config)
    async with listeners[0]:
        with trio.fail_after(PATIENCE):
            stream = await listeners[0].accept()
            await stream.send_all(bytes.fromhex("000000040000000000"))  # settings, with which a hub begins
            taken = 0
            while taken < 64 * 1024:
                taken += len(await stream.receive_some())
        await west.started()
        began = trio.current_time()
        assert await west.stop() == 0
        assert trio.current_time() - began < 5
        await stream.aclose()
    west.assert_only_logged()


@pytest.mark.slow
async def test_both_in_one_process_and_a_stranger_with_a_wrong_secret(nursery: trio.Nursery, tmp_path: Path) -> None:
    port = free_port()
    both = agent_file(tmp_path / "west.toml", "west", {"west": 4}, hub_port=port, secret=SECRET)
    both.write_text(both.read_text() + f'[hub]\nbind = "127.0.0.1:{port}"\nsecret = "{SECRET}"\n')
    stranger = agent_file(tmp_path / "east.toml", "east", {"east": 5}, hub_port=port, secret=WRONG_SECRET)
    west = await start(nursery, "run", both)
    await west.started()
    assert west.hub_port == port
    await west.event("hub_works", call="report")

    # It says what is wrong once for each call, not at each try, and goes on for its own cluster.
    east = await start(nursery, "run", stranger)
    for call in ("report", "watch"):
        refused = await east.event("hub_failed", call=call)
        assert refused["level"] == "warning"
        assert refused["error"] == (
            "wrong credential: compare the agent's [federation] secret with the hub's [hub] secret"
        )
        await east.event("hub_failed", number=2, call=call)
        # Once each time, that is: a hub that is slow to refuse passes for one that works for a while.
        warnings = east.events("hub_failed", call=call, level="warning")
        assert len(warnings) <= 1 + len(east.events("hub_works", call=call))
    await wait_idle(east.metrics_port, lambda idle: idle == {EAST: 5.0, (*EAST[:3], "cpu"): 5.0})
    assert set(idle_by_env(await scrape(west.metrics_port))) == {WEST, (*WEST[:3], "cpu")}
    await west.event("call_refused", number=4, status="UNAUTHENTICATED")

    assert await east.stop() == 0
    assert await west.stop() == 0
    for each in (west, east):
        each.assert_only_logged()
    assert_silent_about_secrets([west, east])


async def test_without_a_credential_nothing_is_ever_connected(nursery: trio.Nursery, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        config = agent_file(tmp_path / "west.toml", "west", {"west": 2}, hub_port=port, secret=None)
        west = await start(nursery, "run", config)
        await west.started()
        (note,) = west.events("configuration")
        assert "single-cluster" in note["note"]
        assert "no credential" in note["note"]
        wanted = {WEST: 2.0, (*WEST[:3], "cpu"): 2.0}
        await wait_idle(west.metrics_port, lambda idle: idle == wanted)
        (tmp_path / "west-capacity.toml").write_text(records({"west": 3}))
        await wait_idle(west.metrics_port, lambda idle: idle[WEST] == 3.0)
        assert await west.stop() == 0
        # Whoever had connected would wait to be accepted, also after its end.
        with pytest.raises(BlockingIOError):
            listener.accept()
    west.assert_only_logged()

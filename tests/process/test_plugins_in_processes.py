"""Plugins of others in real processes: installed as packages, run in threads of their own, good and bad beside each
other. Known failure C42 as a kind: what one of them does costs no other, and no stream, anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.process.plugin_packages import (
    BLOCKING,
    COUNTING,
    EXITING,
    MISSPELT,
    RAISING,
    UNREADABLE,
    WRITING_AND_HIDING,
    install,
    plugins_file,
)
from tests.process.running import PATIENCE, SCRAPE_INTERVAL, agent_file, hub_file, scrape, start, wait_idle

SECRET = "the-hubs-own-secret-5f3c"
COUNTED = ("east", "team-a", "counting", "")
#: Seconds that a record may be old in another cluster: the report interval, the time for which changes are gathered,
#: and plenty for a busy machine; far less than any of what a block or a break would cost.
OLDEST = 0.2 + 0.2 + 5.0


def series(exposition: str, name: str, **labels: str) -> list[float]:
    """The values of the series of a metric that have these labels."""
    return [
        sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


async def readiness(port: int) -> tuple[int, dict[str, Any]]:
    """What `/readyz` answers."""
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/readyz", timeout=PATIENCE)
    return answer.status_code, answer.json()


async def ready(port: int) -> dict[str, Any]:
    """What `/readyz` says once it says that all is well."""
    found: dict[str, Any] = {}
    with trio.move_on_after(PATIENCE):
        while True:
            status, found = await readiness(port)
            if status == 200:
                return found
            await trio.sleep(SCRAPE_INTERVAL)
    raise AssertionError(f"port {port} is not ready within {PATIENCE:g} s: {found}")


@pytest.mark.slow
async def test_one_that_raises_and_one_that_blocks_cost_a_good_one_nothing(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    """C42: "good, raising (RuntimeError, then SystemExit), blocking 30 s": "good results used; failures counted per
    plugin; heartbeats on time despite the block"; and a stop during the block is a clean one."""
    install(tmp_path, good=COUNTING, raising=RAISING, blocking=BLOCKING)
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET))
    await hub.started()
    west_file = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=hub.hub_port, secret=SECRET)
    west = await start(nursery, "run", west_file)
    await west.started()
    tables = "\n".join(f'[[source]]\ntype = "{type_}"' for type_ in ("counting", "raising", "blocking"))
    east_file = plugins_file(tmp_path / "east.toml", "east", tables, hub_port=hub.hub_port, secret=SECRET)
    east = await start(nursery, "run", east_file, PYTHONPATH=str(tmp_path))
    await east.started()
    names = ["source[0]:counting", "source[1]:raising", "source[2]:blocking"]

    # From the first collect of the blocking one on, and so through all that follows, it blocks.
    await wait_idle(west.metrics_port, lambda idle: ("east", "team-a", "blocking", "") in idle)
    ages: list[float] = []
    first = last = (await wait_idle(west.metrics_port, lambda idle: COUNTED in idle))[COUNTED]
    noticed = None
    with trio.fail_after(PATIENCE):
        while last < first + 10 or noticed is None or last < noticed + 10 or len(ages) < 20:
            there = await scrape(west.metrics_port)
            ages += series(there, "trio_federation_member_age_seconds", cluster="east", pool="counting")
            (now,) = series(there, "agentbox_federation_env_idle", cluster="east", env="counting", group="")
            assert now >= last
            last = now
            if noticed is None and east.events("source_failed", what="blocked"):
                noticed = last
            await trio.sleep(SCRAPE_INTERVAL)
    assert max(ages) <= OLDEST

    # Each of them is as it is, and what the others do is not laid at its door.
    status, found = await readiness(east.metrics_port)
    assert [source["name"] for source in found["sources"]] == names
    assert [source["state"] for source in found["sources"]] == ["live", "failing", "blocked"]
    assert status == 503  # one of them has never told what it has
    assert found["why_not"] == [f"{names[1]} has not told yet what it has: {found['sources'][1]['last_error']['text']}"]
    assert "a call in it blocks" in found["sources"][2]["last_error"]["text"]
    exposition = await scrape(east.metrics_port)
    failures = "trio_federation_source_failures_total"
    assert sum(series(exposition, failures, source=names[0])) == 0
    assert series(exposition, failures, source=names[1], kind="collect")[0] >= 4
    assert series(exposition, failures, source=names[2], kind="blocked") == [1]
    assert sum(series(exposition, failures, source=names[2])) == 1
    assert [series(exposition, "trio_federation_source_live", source=name) for name in names] == [[1], [0], [0]]
    told = [event["error"] for event in east.events("source_failed", source=names[1])]
    assert told[:4] == ["RuntimeError: no luck today", "SystemExit: and enough of it"] * 2
    assert [event["level"] for event in east.events("source_failed", source=names[1])][:2] == ["warning", "debug"]
    assert len(east.events("source_failed", source=names[2])) == 1

    # The connection to the hub is the one that it was.
    assert east.events("hub_failed") == []
    assert sum(series(exposition, "trio_federation_hub_reconnects_total")) == 0
    assert hub.events("reporter_left") == []
    assert len(hub.events("reporter_came", cluster="east")) == 1

    began = trio.current_time()
    assert await east.stop() == 0
    assert trio.current_time() - began < 5
    await wait_idle(west.metrics_port, lambda idle: not [key for key in idle if key[0] == "east"], within=10)
    assert (await hub.event("reporter_left", cluster="east"))["said_goodbye"]
    assert [event["source"] for event in east.events("plugin_abandoned")] == [names[2]]
    assert [await each.stop() for each in (west, hub)] == [0, 0]
    for each in (hub, west, east):
        each.assert_only_logged()


@pytest.mark.slow
async def test_packages_that_cannot_be_loaded_are_told_and_cost_the_good_ones_nothing(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    """In the log, in `/readyz` and by `trio-federation plugins`, each with its package and what to do; what is good in
    a package that has something bad in it can be used."""
    install(tmp_path, good=COUNTING, unreadable=UNREADABLE, exiting=EXITING, misspelt=MISSPELT)
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET))
    await hub.started()
    tables = '[[source]]\ntype = "counting"\n[[source]]\ntype = "spelt"'
    config = plugins_file(tmp_path / "east.toml", "east", tables, hub_port=hub.hub_port, secret=SECRET)
    variables = {"PYTHONPATH": str(tmp_path)}
    east = await start(nursery, "run", config, **variables)
    shown, as_json = [
        await start(nursery, "plugins", *options, **variables) for options in ([], ["--json"])
    ]  # beside it, as an operator would
    await east.started()
    await wait_idle(hub.metrics_port, lambda idle: {COUNTED, ("east", "team-a", "spelt", "")} <= set(idle))

    expected = {
        "exiting": "SystemExit: no licence",
        "misspelt": "there is no hook 'capacity_sink'",
        "unreadable": "SyntaxError: invalid syntax (plugin_unreadable.py, line 1)",
    }
    failed = east.events("plugin_failed")
    assert [event["plugin"] for event in failed] == list(expected)
    for event in failed:
        assert event["level"] == "warning"
        assert event["package"] == f"{event['plugin']} 1.0"
        assert expected[event["plugin"]] in event["error"]
    assert 'did you mean "capacity_sinks"?' in failed[1]["error"]

    found = await ready(east.metrics_port)
    assert len(found["plugin_failures"]) == 3
    for line, (name, text) in zip(found["plugin_failures"], expected.items(), strict=True):
        assert line.startswith(f"plugin '{name}' of {name} 1.0: ")
        assert text in line

    assert await shown.ended() == await as_json.ended() == 1
    words = " ".join(shown.output.split())
    for name, text in expected.items():
        assert f"{name} ({name} 1.0)" in words
        assert text in words
    assert "counting" in words
    listed = json.loads(as_json.output)
    assert listed["failures"] == found["plugin_failures"]
    offers = {plugin["name"]: [each["name"] for each in plugin["sources"]] for plugin in listed["plugins"]}
    ours = {"fixtures": ["fixtures"], "kubernetes": ["crd", "kubernetes", "sandboxset", "warmpool"]}
    assert offers == ours | {"exiting": [], "good": ["counting"], "misspelt": ["spelt"], "unreadable": []}
    for each in (east, hub):
        assert await each.stop() == 0
        each.assert_only_logged()


@pytest.mark.slow
async def test_a_table_whose_plugin_is_broken_is_refused_by_check_and_survived_by_run(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    """Who asks before the start is told that it cannot be used. A process that is restarted meanwhile goes on with the
    rest, and says in the log, in `/readyz` and in a metric what it does without, and why."""
    install(tmp_path, good=COUNTING, exiting=EXITING)
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET))
    await hub.started()
    tables = '[[source]]\ntype = "counting"\n[[source]]\ntype = "exiting"'
    config = plugins_file(tmp_path / "east.toml", "east", tables, hub_port=hub.hub_port, secret=SECRET)
    check, east = [await start(nursery, command, config, PYTHONPATH=str(tmp_path)) for command in ("check", "run")]
    assert await check.ended() == 2
    (line,) = [line for line in check.lines if "source[1]" in line]
    assert "SystemExit: no licence" in line
    assert "exiting 1.0" in line

    await east.started()
    await wait_idle(hub.metrics_port, lambda idle: COUNTED in idle)
    failed = await east.event("source_failed", number=2, source="source[1]:exiting", what="create")
    assert failed["level"] == "debug"  # once is enough
    assert "SystemExit: no licence" in failed["error"]
    status, found = await readiness(east.metrics_port)
    assert status == 503
    assert [source["state"] for source in found["sources"]] == ["live", "failing"]
    (why,) = found["why_not"]
    assert why.startswith("source[1]:exiting has not told yet what it has: ")
    assert "exiting 1.0" in why
    exposition = await scrape(east.metrics_port)
    failures = series(exposition, "trio_federation_source_failures_total", source="source[1]:exiting", kind="create")
    assert failures[0] >= 2
    for each in (east, hub):
        assert await each.stop() == 0
        each.assert_only_logged()


@pytest.mark.slow
async def test_sinks_and_filters_of_a_package_do_their_work(nursery: trio.Nursery, tmp_path: Path) -> None:
    """What the tables say is made, in threads of their own: others see what the filters leave, the sink sees all."""
    install(tmp_path, good=COUNTING, misspelt=MISSPELT, tools=WRITING_AND_HIDING)
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET))
    await hub.started()
    west_file = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=hub.hub_port, secret=SECRET)
    west = await start(nursery, "run", west_file)
    tables = (
        '[[source]]\ntype = "counting"\n[[source]]\ntype = "spelt"\n'
        '[[filter]]\ntype = "hides-pending"\n[[filter]]\ntype = "hides-env"\nenv = "spelt"\n'
        '[[sink]]\ntype = "writing"\npath = "told.txt"'
    )
    config = plugins_file(tmp_path / "east.toml", "east", tables, hub_port=hub.hub_port, secret=SECRET)
    east = await start(nursery, "run", config, PYTHONPATH=str(tmp_path))
    await west.started()
    await east.started()
    await wait_idle(west.metrics_port, lambda idle: COUNTED in idle)
    await ready(east.metrics_port)
    await wait_idle(east.metrics_port, lambda idle: len({key[0:3] for key in idle}) == 3)
    exposition = await scrape(west.metrics_port)
    assert series(exposition, "trio_federation_member_pending", cluster="east") == [0]
    own = await scrape(east.metrics_port)
    assert sorted(series(own, "trio_federation_member_pending", cluster="east")) == [7, 7]
    withheld = series(own, "trio_federation_filter_withheld_records_total", filter="filter[1]:hides-env")
    assert withheld[0] >= 1

    everything = ["east/counting 7", "east/spelt 7", "west/python 0"]
    written = tmp_path / "told.txt"
    with trio.fail_after(PATIENCE):
        while True:
            if written.exists() and written.read_text(encoding="utf-8").splitlines() == everything:
                break
            await trio.sleep(SCRAPE_INTERVAL)
    (sink,) = (await ready(east.metrics_port))["sinks"]
    assert (sink["name"], sink["state"]) == ("sink[0]:writing", "working")
    for each in (east, west, hub):
        assert await each.stop() == 0
        each.assert_only_logged()

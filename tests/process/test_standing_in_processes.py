"""Two agents of one cluster in processes: the sinks of each, in threads of their own, know which of them reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.process.plugin_packages import ASKING, install, plugins_file
from tests.process.running import PATIENCE, SCRAPE_INTERVAL, Program, hub_file, scrape, start

SECRET = "the-hubs-own-secret-5f3c"


async def until_troubled_by(agent: Program, reason: str) -> None:
    """Until the one sink of an agent says that, and nothing else, in its metric."""
    current: set[tuple[str, str, str]] = set()
    with trio.move_on_after(PATIENCE):
        while True:
            exposition = await scrape(agent.metrics_port)
            current = {
                (sample.labels["sink"], sample.labels["reason"], sample.labels["party"])
                for family in text_string_to_metric_families(exposition)
                for sample in family.samples
                if sample.name == "trio_federation_sink_trouble" and sample.value
            }
            if current == {("sink[0]:asking", reason, "east")}:
                return
            await trio.sleep(SCRAPE_INTERVAL)
    raise AssertionError(f"not {reason} within {PATIENCE:g} s: {current}")


@pytest.mark.slow
async def test_the_sinks_of_two_agents_know_which_of_them_reports(nursery: trio.Nursery, tmp_path: Path) -> None:
    """The first one does; once it has stopped, the second; and when the hub is gone nobody knows."""
    install(tmp_path, asking=ASKING)
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET))
    await hub.started()
    table = '[[sink]]\ntype = "asking"'
    agents = []
    for name, reason in (("first", "reports"), ("second", "refused")):
        config = plugins_file(tmp_path / f"{name}.toml", "east", table, hub_port=hub.hub_port, secret=SECRET)
        config.write_text(config.read_text().replace("[federation]\n", '[federation]\nttl = "25s"\n'))
        agent = await start(nursery, "run", config, PYTHONPATH=str(tmp_path))
        await agent.started()
        await until_troubled_by(agent, reason)
        assert agent.events("sink_trouble")[-1]["error"] == "ttl 25"
        agents.append(agent)
    first, second = agents
    assert await first.stop() == 0
    await until_troubled_by(second, "reports")
    assert await hub.stop() == 0
    await until_troubled_by(second, "unknown")
    assert await second.stop() == 0
    for each in (hub, first, second):
        each.assert_only_logged()

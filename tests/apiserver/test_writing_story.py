"""The view of the fleet in `kubectl`, as its users see it: two clusters with an API server and an agent each, made from
the manifests, and a hub between them. One runs dry, and the other shows it; then it is gone, and nothing is left of it.

How the sink writes is looked at from inside in `test_writing.py` and `test_writing_faults.py`; here, only what is
printed, logged and served counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import trio

from tests.apiserver.agents import (
    ONLY_PUSHED,
    SECRET,
    WATCHFUL,
    Asking,
    Json,
    end,
    kubeconfig_of,
    run_agent,
    series,
    sink,
    source,
    two_clusters,
)
from tests.apiserver.build import Programs
from tests.apiserver.cluster import ApiServer
from tests.apiserver.following import LOOK_EVERY, do
from tests.apiserver.writing import MANAGER, Written, entries, foreign, managed, owned, summary
from tests.process.running import PATIENCE, Program, hub_file, start, start_any

RIGHTS = [
    {"apiGroups": ["agents.navix.sh"], "resources": ["sandboxenvs"], "verbs": ["list", "watch"]},
    {"apiGroups": ["agents.navix.sh"], "resources": ["sandboxenvs/status"], "verbs": ["patch"]},
]


@pytest.fixture(scope="module")
def clusters(apiserver_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ApiServer]]:
    """Two clusters, "west" and "east", as docs/kubernetes.md leaves them."""
    with two_clusters(apiserver_programs, tmp_path_factory, RIGHTS) as servers:
        yield servers


def envs_of(server: ApiServer) -> Written:
    """The envs of the story in a cluster."""
    return Written(server, "team-a")


def set_idle(server: ApiServer, idle: int) -> None:
    """What the controller of a cluster says of python's small pool when so many are idle."""
    member = "/status/clusters/0/observedMembers/0"
    operations = [
        {"op": "test", "path": f"{member}/name", "value": "small"},
        {"op": "replace", "path": f"{member}/idleCount", "value": idle},
        {"op": "replace", "path": "/status/idleReplicas", "value": idle},
    ]
    options = ("-n", "team-a", "--subresource=status", "--field-manager=sample", "--type=json", "-p")
    server.kubectl("patch", "sbe", "python", *options, json.dumps(operations))


async def kubectl(nursery: trio.Nursery, server: ApiServer, *arguments: str) -> Program:
    """Start a kubectl that goes on, such as one that watches."""
    command = (server.programs.kubectl, "--kubeconfig", server.kubeconfig, "--cache-dir", server.folder / "cache")
    return await start_any(nursery, *command, *arguments)


async def run_all(
    nursery: trio.Nursery, clusters: Mapping[str, ApiServer], folder: Path, settings: str
) -> tuple[Program, dict[str, Asking]]:
    """A hub, and an agent for each cluster that reads its envs and writes to them."""
    hub = await (await start(nursery, "run", hub_file(folder / "hub.toml", secret=SECRET))).started()
    agents = {}
    for name, server in clusters.items():
        kubeconfig = await do(kubeconfig_of, server)
        reads = source("kubernetes", kubeconfig=kubeconfig)
        writes = sink("kubernetes-status", kubeconfig=kubeconfig, env_interval="1s")
        agents[name] = await run_agent(
            nursery, folder / f"{name}.toml", name, reads, writes, hub=hub, settings=settings
        )
    return hub, agents


async def until(ask: Callable[[], Json], wanted: Callable[[Json], object]) -> Json:
    """Wait until what is asked for is so; what it is."""
    found: Json = {}
    with trio.move_on_after(PATIENCE):
        while True:
            found = await do(ask)
            if wanted(found):
                return found
            await trio.sleep(LOOK_EVERY)
    raise AssertionError(f"not so within {PATIENCE:g} s, but {found}")


def columns(line: str, header: str) -> dict[str, str]:
    """The cells of a line of a table of kubectl's, by the heading that stands above them."""
    names = header.split()
    starts = [header.index(name) for name in names]
    return {
        name: line[begin:after].strip() for name, begin, after in zip(names, starts, [*starts[1:], None], strict=True)
    }


async def test_one_cluster_runs_dry_and_the_other_shows_it(
    clusters: dict[str, ApiServer], nursery: trio.Nursery, tmp_path: Path
) -> None:
    """From the samples to a cluster that is gone. What was printed is in story.txt of the test's folder."""
    west_server, east_server = clusters["west"], clusters["east"]
    here, there = envs_of(west_server), envs_of(east_server)
    before = {name: await do(here.get, name) for name in ("python", "browser")}
    story: list[str] = []

    async def shown(*arguments: str) -> str:
        """What kubectl prints in "west"."""
        found = await do(west_server.kubectl, *arguments, "-n", "team-a")
        story.append(f"$ kubectl --context west -n team-a {' '.join(arguments)}\n{found}")
        return found

    hub, agents = await run_all(nursery, clusters, tmp_path, WATCHFUL)
    west, east = agents["west"], agents["east"]

    # Each shows what the other one has, and keeps its own.
    env = await until(lambda: here.get("python"), lambda env: foreign(env) == {"east": {"small": 5}})
    assert summary(env) == (1, 5)
    assert managed(env) == managed(before["python"])
    assert entries(env)["west"] == entries(before["python"])["west"]
    env = await until(lambda: here.get("browser"), lambda env: summary(env) == (1, 2))
    assert (entries(env)["east"]["idleReplicas"], env["status"]["idleReplicas"]) == (2, 3)
    await until(lambda: there.get("python"), lambda env: foreign(env) == {"west": {"small": 0, "large": 0}})
    await until(lambda: there.get("browser"), lambda env: summary(env) == (1, 3))
    for agent in agents.values():
        await agent.until_ready()

    header, browser, python = (await shown("get", "sbe")).splitlines()
    assert header.split() == ["NAME", "CLUSTERS", "IDLE", "FOREIGN-IDLE", "FOREIGN-AGE", "AGE"]
    cells = columns(python, header)
    assert (cells["CLUSTERS"], cells["IDLE"], cells["FOREIGN-IDLE"]) == ("1", "0", "5")
    assert cells["FOREIGN-AGE"].endswith("s")
    cells = columns(browser, header)
    assert (cells["CLUSTERS"], cells["IDLE"], cells["FOREIGN-IDLE"]) == ("1", "3", "2")

    # It runs dry, and comes back.
    watching = await kubectl(nursery, west_server, "get", "sbe", "python", "-n", "team-a", "--watch")
    await watching.until(lambda: watching.output.count("\n") >= 2)
    for idle in (3, 0, 4):
        await do(set_idle, east_server, idle)
        await until(lambda: here.get("python"), lambda env, idle=idle: summary(env) == (1, idle))  # type: ignore[misc]

    def seen() -> list[str]:
        lines = [line for line in watching.output.splitlines()[1:] if line]
        return [columns(line, watching.output.splitlines()[0])["FOREIGN-IDLE"] for line in lines]

    await watching.until(lambda: seen() == ["5", "3", "0", "4"])
    story.append(f"$ kubectl --context west -n team-a get sbe python --watch\n{watching.output}")

    described = await shown("describe", "sbe", "python")
    words = [line.strip() for line in described.splitlines()]
    for line in ("Cluster ID:          east", "Is Local:            false", "Idle Count:          4"):
        assert " ".join(line.split()) in [" ".join(word.split()) for word in words], described
    found = await west.metrics()
    assert not [each for each in found if each[0] == "trio_federation_sink_trouble" and found[each]]
    for event in ("sink_failed", "sink_trouble", "kubernetes_status_disturbed", "kubernetes_status_conflict"):
        assert not west.program.events(event)

    # The other cluster is gone, and with it what was known of it.
    await end(east.program)
    for name, env in before.items():
        after = await until(lambda name=name: here.get(name), lambda env: summary(env) is None)  # type: ignore[misc]
        assert after["status"] == env["status"]
        assert managed(after) == managed(env)
        assert not owned(after)
        assert managed(after, MANAGER) == "[]"
    await shown("get", "sbe")
    # What it left in its own cluster has its times beside it.
    assert await do(there.foreign, "python") == {"west": {"small": 0, "large": 0}}

    (tmp_path / "story.txt").write_text("\n".join(story))
    await end(west.program, hub)


async def test_what_is_written_is_no_news_to_anybody(
    clusters: dict[str, ApiServer], nursery: trio.Nursery, tmp_path: Path
) -> None:
    """Each agent sees its own writes come back, as changes of the envs that it reads. Nothing is reported for that, by
    neither of them; only for what a controller changes."""
    west_server, east_server = clusters["west"], clusters["east"]
    here = envs_of(west_server)
    await do(set_idle, east_server, 1)
    # Reports that say the same again are far apart, too.
    hub, agents = await run_all(nursery, clusters, tmp_path, f'{ONLY_PUSHED}report_interval = "100s"\n')

    async def reported() -> dict[str, float | None]:
        """How many records each agent has reported."""
        name, labels = "trio_federation_hub_reported_records_total", {"hub": f"127.0.0.1:{hub.hub_port}"}
        return {cluster: series(await agent.metrics(), name, **labels) for cluster, agent in agents.items()}

    await until(lambda: here.get("python"), lambda env: summary(env) == (1, 1))
    await until(lambda: envs_of(east_server).get("python"), lambda env: summary(env) == (1, 0))
    before = await reported()
    assert None not in before.values()
    versions = set()
    for idle in range(2, 6):
        await do(set_idle, east_server, idle)
        env = await until(lambda: here.get("python"), lambda env, idle=idle: summary(env) == (1, idle))  # type: ignore[misc]
        versions.add(env["metadata"]["resourceVersion"])
    assert len(versions) == 4
    # A change of its own shows that "west" has seen all of that.
    await do(set_idle, west_server, 9)
    await until(lambda: envs_of(east_server).get("python"), lambda env: summary(env) == (1, 9))
    after = await reported()
    assert after == {"west": (before["west"] or 0) + 1, "east": (before["east"] or 0) + 4}
    await end(*[agent.program for agent in agents.values()], hub)

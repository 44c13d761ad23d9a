"""Agents as real processes that read real API servers, for tests: what they are configured with, the service account
that docs/kubernetes.md gives them, objects as somebody with kubectl makes them, and what the processes serve. How a
process is started and read is in `tests.process.running`, the servers are in `tests.apiserver.cluster`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import httpx
import pytest
import trio

from tests.apiserver.build import Programs
from tests.apiserver.cluster import ApiServer, Rule, ServiceAccount, Token
from tests.apiserver.following import do
from tests.metrics.reading import Series, series_of
from tests.process.running import PATIENCE, SCRAPE_INTERVAL, Program, start

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]

MANIFESTS = Path(__file__).resolve().parents[2] / "config" / "kubernetes"
#: where the manifests put agents, and which account they give them
NAMESPACE, ACCOUNT = "trio-federation", "trio-federation-agent"
#: as kubectl is told of it, with the version, so that no other one of the same name is meant
SANDBOXENVS = "sandboxenvs.v1alpha1.agents.navix.sh"

#: of what a process has said, how much is shown where a test fails
LAST_LINES = 30

#: what every hub and agent here is let in by
SECRET = "between-real-clusters-8c41"

#: [federation] of an agent that hears nothing but what is pushed while a test waits
ONLY_PUSHED = 'ttl = "300s"\nresync_interval = "120s"\n'
#: [federation] of an agent that soon sees, and says, what is in the way
WATCHFUL = 'ttl = "6s"\nresync_interval = "1s"\nreport_interval = "1s"\n'

_numbers = itertools.count(1)


# What an agent is configured with.


def source(kind: str, **options: object) -> str:
    """A `[[source]]` table. Options are texts, numbers, booleans, paths, and lists and tables of texts."""
    return _plugin("source", kind, options)


def sink(kind: str, **options: object) -> str:
    """A `[[sink]]` table, like `source`."""
    return _plugin("sink", kind, options)


def _plugin(table: str, kind: str, options: Json) -> str:
    lines = [f"{name} = {_toml(value)}\n" for name, value in options.items()]
    return f'[[{table}]]\ntype = "{kind}"\n{"".join(lines)}'


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + "}"
    # What is left is written in the same way in JSON.
    return json.dumps(str(value) if isinstance(value, Path) else value)


def agent_file(
    path: Path, cluster_id: str, *sources: str, hub: Program | None, settings: str = "", secret: str = SECRET
) -> Path:
    """Write the configuration of an agent that logs everything; `settings` stand in [federation]. Its path."""
    hubs = "" if hub is None else f'hubs = ["127.0.0.1:{hub.hub_port}"]\nsecret = "{secret}"\n'
    path.write_text(
        f'cluster_id = "{cluster_id}"\n[federation]\n{hubs}{settings}\n{"".join(sources)}\n'
        '[metrics]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n[log]\nlevel = "debug"\nformat = "json"\n'
    )
    return path


def own_pool(path: Path, env: str, idle: int) -> str:
    """Write a fixtures file of one pool of team-a, and return the `[[source]]` table that reads it."""
    path.write_text(f'[[record]]\nnamespace = "team-a"\nenv_name = "{env}"\nmember_pool = "own"\nidle = {idle}\n')
    return source("fixtures", path=path)


# Who an agent is to an API server.


def account_of(server: ApiServer) -> ServiceAccount:
    """The account of the manifests, which must have been applied."""
    return ServiceAccount(server, NAMESPACE, ACCOUNT)


def token_of(server: ApiServer) -> str:
    """A new token of that account, as people get one: from kubectl."""
    return server.kubectl("create", "token", ACCOUNT, "--namespace", NAMESPACE).strip()


def kubeconfig_of(server: ApiServer) -> Path:
    """A new kubeconfig of that account."""
    return account_of(server).kubeconfig(Token(token_of(server), ""))


# What people do with kubectl.


@contextmanager
def two_clusters(
    programs: Programs, folders: pytest.TempPathFactory, rights: Sequence[Rule]
) -> Iterator[dict[str, ApiServer]]:
    """Two clusters, "west" and "east", as docs/kubernetes.md leaves them, whose agents have these rights, at least."""
    servers = {name: ApiServer(programs, folders.mktemp(name)) for name in ("west", "east")}

    def set_up(server: ApiServer, overlay: str, name: str) -> None:
        server.start()
        apply(server, "namespace")
        apply(server, "crd")
        server.wait_for_crd("sandboxenvs.agents.navix.sh")
        apply(server, f"overlays/{overlay}")
        server.wait_until_allowed(account_of(server), rights, everywhere=True)
        server.kubectl("create", "namespace", "team-a")
        apply_samples(server, name)

    with ExitStack() as both:
        for server in servers.values():
            both.callback(server.close)
        with ThreadPoolExecutor() as threads:
            # list() raises what has been raised.
            list(threads.map(set_up, servers.values(), ("with-hub", "agent-only"), servers))
        yield servers


def apply_samples(server: ApiServer, name: str) -> None:
    """The envs of config/kubernetes/samples, and what the controller of this cluster would say of them."""
    apply(server, "samples")
    options = ("--server-side", "--subresource=status", "--field-manager=sample")
    server.kubectl("apply", *options, "-f", MANIFESTS / f"samples/status-{name}.yaml")


def apply(server: ApiServer, folder: str, *options: str) -> None:
    """`kubectl apply -k` of a folder of the manifests."""
    server.kubectl("apply", "-k", MANIFESTS / folder, *options)


def create(server: ApiServer, *objects: Json) -> None:
    """`kubectl create` of objects."""
    listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    server.kubectl("create", "-f", "-", input=json.dumps(listed))


def patch_status(server: ApiServer, resource: str, namespace: str, name: str, status: Json) -> None:
    """`kubectl patch --subresource=status`: fields that are given are replaced, also those that are lists."""
    patch = json.dumps({"status": status})
    server.kubectl("patch", resource, name, "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)


def delete(server: ApiServer, resource: str, namespace: str, name: str) -> None:
    """`kubectl delete`, without waiting for anybody's finalizers."""
    server.kubectl("delete", resource, name, "-n", namespace, "--wait=false")


def sandbox_env(namespace: str, name: str) -> Json:
    """An env of which nothing is known yet."""
    metadata = {"namespace": namespace, "name": name}
    return {"apiVersion": "agents.navix.sh/v1alpha1", "kind": "SandboxEnv", "metadata": metadata}


def observed(cluster: str, **idle: int) -> Json:
    """The status of an env whose pools have so many idle in a cluster."""
    members = [{"name": pool, "idleCount": count, "desiredReplicas": count} for pool, count in idle.items()]
    return {"clusters": [{"clusterID": cluster, "isLocal": True, "observedMembers": members}]}


async def have_env(server: ApiServer, cluster: str, namespace: str, name: str, **idle: int) -> None:
    """Create an env whose pools have so many idle in that cluster."""
    await do(create, server, sandbox_env(namespace, name))
    await do(patch_status, server, SANDBOXENVS, namespace, name, observed(cluster, **idle))


# What the processes serve.

#: (cluster, namespace, env, pool, or else group) -> idle
Pools: TypeAlias = dict[tuple[str, str, str, str], int]


def series(found: Series, name: str, **labels: str) -> float | None:
    """The value of a series, or None where it is not exported."""
    return found.get((name, tuple(sorted(labels.items()))))


def troubles(found: Series, source_name: str) -> set[str]:
    """The reasons for which a source is in trouble, as the metric has it."""
    return {
        dict(labels)["reason"]
        for (name, labels), value in found.items()
        if name == "trio_federation_source_trouble" and dict(labels)["source"] == source_name and value == 1
    }


class Asking:
    """Asks one process over HTTP, again and again until it says what is waited for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        # Each connection ends with its answer, so there is nothing left that somebody would have to close.
        once = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(trust_env=False, timeout=PATIENCE, limits=once)

    async def metrics(self) -> Series:
        """What `/metrics` says."""
        answer = await self._client.get(f"http://127.0.0.1:{self.program.metrics_port}/metrics")
        assert answer.status_code == 200
        return series_of(answer.content)

    async def readiness(self) -> Json:
        """What `/readyz` says. Its status is checked."""
        answer = await self._client.get(f"http://127.0.0.1:{self.program.metrics_port}/readyz")
        told: Json = answer.json()
        assert answer.status_code == (200 if told["ready"] else 503)
        return told

    async def records(self) -> list[Json]:
        """Every record that it knows, of its own cluster and of others, as `/v1/capacity` has it."""
        answer = await self._client.get(f"http://127.0.0.1:{self.program.admin_port}/v1/capacity")
        assert answer.status_code == 200
        found: list[Json] = answer.json()["records"]
        return found

    async def pools(self) -> Pools:
        """What is idle in each of them."""
        names = ("cluster_id", "namespace", "env_name")
        return {
            (*[each[name] for name in names], each["member_pool"] or each["scaling_group"]): each["idle"]
            for each in await self.records()
        }

    async def until_ready(self, within: float = PATIENCE) -> Json:
        """Wait until `/readyz` says so; what it says."""
        return await self._until(self.readiness, lambda told: bool(told["ready"]), within)

    async def until_told(self, wanted: Callable[[Json], bool], within: float = PATIENCE) -> Json:
        """Wait until `/readyz` says what is wanted; all of it."""
        return await self._until(self.readiness, wanted, within)

    async def until_metrics(self, wanted: Callable[[Series], bool], within: float = PATIENCE) -> Series:
        """Wait until the series are what is wanted; all of them."""
        return await self._until(self.metrics, wanted, within)

    async def until_trouble(self, source_name: str, *reasons: str, within: float = PATIENCE) -> Series:
        """Wait until just these reasons are exported for a source; all series."""
        return await self.until_metrics(lambda found: troubles(found, source_name) == {*reasons}, within)

    async def until_records(self, wanted: Callable[[list[Json]], bool], within: float = PATIENCE) -> list[Json]:
        """Wait until the records are what is wanted; all of them."""
        return await self._until(self.records, wanted, within)

    async def until_pools(self, wanted: Callable[[Pools], bool], within: float = PATIENCE) -> Pools:
        """Wait until what is idle is what is wanted; all of it."""
        return await self._until(self.pools, wanted, within)

    async def quickest(self, path: str, tries: int = 2) -> tuple[float, httpx.Response]:
        """Ask several times, one after the other; how many seconds the quickest answer took, and the last answer. What
        is answered from memory may be late once on a busy machine; what waits for somebody who is silent is late each
        time."""
        quickest = float("inf")
        for _ in range(tries):
            began = trio.current_time()
            answer = await self._client.get(f"http://127.0.0.1:{self.program.metrics_port}{path}")
            quickest = min(quickest, trio.current_time() - began)
        return quickest, answer

    async def _until(self, ask: Callable[[], Awaitable[T]], wanted: Callable[[T], bool], within: float) -> T:
        found: T | None = None
        with trio.move_on_after(within):
            while True:
                found = await ask()
                if wanted(found):
                    return found
                await trio.sleep(SCRAPE_INTERVAL)
        lines = "\n".join(self.program.lines[-LAST_LINES:])
        raise AssertionError(f"{self.program.name} does not say so within {within:g} s, but: {found}\n{lines}")


async def run_agent(
    nursery: trio.Nursery, path: Path, cluster_id: str, *sources: str, hub: Program | None, settings: str = ""
) -> Asking:
    """Start an agent, and wait until it runs."""
    program = await start(nursery, "run", agent_file(path, cluster_id, *sources, hub=hub, settings=settings))
    return Asking(await program.started())


async def ask(nursery: trio.Nursery, agent: Asking, *command: str) -> Any:
    """What a command of `trio-federation` that asks an agent prints with --json."""
    program = await start(nursery, *command, "--json", "--url", f"http://127.0.0.1:{agent.program.admin_port}")
    assert await program.ended() == 0, program.lines
    return json.loads(program.output)


async def end(*programs: Program) -> None:
    """Stop processes, and see that they end as they should, having said nothing but lines of their logs."""
    for each in programs:
        assert await each.stop() == 0
        each.assert_only_logged()

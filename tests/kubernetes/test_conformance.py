"""Every source type of this plugin does what an agent relies on, against an API server in memory: objects that change
and vanish, servers that are gone, silent, overloaded or refuse, and connections that die without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import msgspec
import pytest
from trio.testing import MockClock

from tests.kubernetes.fake_api import FakeServer, env_body, pool
from trio_federation import Capacity, CapacitySource, SourceContext
from trio_federation.testing import Rule, check_capacity_source
from trio_federation_kubernetes.options import CrdOptions, KubernetesOptions, SandboxSetOptions, WarmPoolOptions
from trio_federation_kubernetes.reflector import LONGEST_PAUSE
from trio_federation_kubernetes.resources import Resource
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS, SandboxEnvMapper
from trio_federation_kubernetes.sandboxset import SANDBOXSETS, SandboxSetMapper
from trio_federation_kubernetes.source import KubernetesSource, TableSource
from trio_federation_kubernetes.warmpool import SANDBOXCLAIMS, SANDBOXWARMPOOLS, WarmPoolMapper

pytestmark = pytest.mark.usefixtures("logs")

RUNNERPOOLS = Resource("pools.example.com", "v1", "runnerpools")
TABLE: dict[str, Any] = {
    "group": RUNNERPOOLS.group,
    "version": RUNNERPOOLS.version,
    "resource": RUNNERPOOLS.plural,
    "fields": {"env": "spec.image", "idle": "status.ready", "desired": "spec.size", "ceiling": "spec.most"},
}


class Kind(NamedTuple):
    """A source type, and how its objects are made."""

    options: type[msgspec.Struct]
    make: Callable[[FakeServer, Any, SourceContext], CapacitySource]
    #: (server, namespace, name of a pool, how many of it are ready)
    put: Callable[[FakeServer, str, str, int], None]
    #: removes what `put` has made
    resource: Resource
    #: the env of a pool
    env: Callable[[str], str]
    #: what a table has to say beyond the connection
    table: dict[str, Any]


def _env(server: FakeServer, namespace: str, name: str, ready: int) -> None:
    until = "2040-01-01T00:00:00Z" if ready % 2 else None
    member = pool(name, ready, autoscalingEnabled=True, scaleUpHeadroom=3, saturatedUntil=until)
    server.put(SANDBOXENVS, namespace, name, **env_body(member))


def _warm_pool(server: FakeServer, namespace: str, name: str, ready: int) -> None:
    spec = {"replicas": 9, "sandboxTemplateRef": {"name": "python"}}
    server.put(SANDBOXWARMPOOLS, namespace, name, spec=spec, status={"readyReplicas": ready})
    for number in range(3):
        status = {"sandbox": {"name": f"s{number}"}} if number < ready % 3 else {}
        server.put(SANDBOXCLAIMS, namespace, f"{name}-{number}", spec={"warmPoolRef": {"name": name}}, status=status)


def _sandbox_set(server: FakeServer, namespace: str, name: str, ready: int) -> None:
    spec = {"replicas": 9, "templateRef": {"name": "python"}}
    server.put(SANDBOXSETS, namespace, name, spec=spec, status={"availableReplicas": ready})


def _runner_pool(server: FakeServer, namespace: str, name: str, ready: int) -> None:
    spec = {"image": "python", "size": 4, "most": 9}
    server.put(RUNNERPOOLS, namespace, name, spec=spec, status={"ready": ready})


KINDS = {
    "kubernetes": Kind(
        KubernetesOptions,
        lambda server, options, context: KubernetesSource(
            options, context, SandboxEnvMapper(context.cluster_id), connect=server.connect
        ),
        _env,
        SANDBOXENVS,
        str,
        {},
    ),
    "warmpool": Kind(
        WarmPoolOptions,
        lambda server, options, context: KubernetesSource(
            options, context, WarmPoolMapper(context.cluster_id, claims=options.claims), connect=server.connect
        ),
        _warm_pool,
        SANDBOXWARMPOOLS,
        lambda _: "python",
        {},
    ),
    "sandboxset": Kind(
        SandboxSetOptions,
        lambda server, options, context: KubernetesSource(
            options, context, SandboxSetMapper(context.cluster_id), connect=server.connect
        ),
        _sandbox_set,
        SANDBOXSETS,
        lambda _: "python",
        {},
    ),
    "crd": Kind(
        CrdOptions,
        lambda server, options, context: TableSource(options, context, connect=server.connect),
        _runner_pool,
        RUNNERPOOLS,
        lambda _: "python",
        TABLE,
    ),
}


class World:
    """A server with a few pools of one kind, and what can happen to it."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.server = FakeServer(SANDBOXENVS, SANDBOXWARMPOOLS, SANDBOXCLAIMS, SANDBOXSETS, RUNNERPOOLS)
        self._ready = 1
        for name in ("p1", "p2", "p3"):
            kind.put(self.server, "agents", name, self._ready)
        kind.put(self.server, "others", "p1", self._ready)

    def change(self) -> None:
        """A pool has one more."""
        self._ready += 1
        self.kind.put(self.server, "agents", "p1", self._ready)

    def remove(self) -> Capacity:
        """A pool is gone."""
        self.server.delete(self.kind.resource, "agents", "p2")
        return Capacity("west", "agents", self.kind.env("p2"), "p2")

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Nobody answers any more."""
        with self.server.down():
            yield

    @contextmanager
    def half_open(self) -> Iterator[None]:
        """Nothing comes any more, and nothing breaks."""
        self.server.black_hole = True
        yield
        self.server.black_hole = False

    @contextmanager
    def forbidden(self) -> Iterator[None]:
        """Nothing may be read any more; the watches go on for a while, as they do on a real server."""
        fault = self.server.refuse(403)
        yield
        fault.end()

    @contextmanager
    def overloaded(self) -> Iterator[None]:
        """Everybody is asked to come back later."""
        fault = self.server.refuse(429, retry_after=1)
        self.server.end()
        yield
        fault.end()

    @contextmanager
    def nonsense(self) -> Iterator[None]:
        """Something else answers."""
        fault = self.server.fault(body=b"<html>Please log in</html>")
        self.server.cut()
        self.server.compact()
        yield
        fault.end()


BREAKS = (World.gone, World.half_open, World.forbidden, World.overloaded)


async def check(name: str, breaks: Callable[[World], AbstractContextManager[object]], **options: Any) -> None:
    kind = KINDS[name]
    world = World(kind)
    checked = msgspec.convert({**kind.table, **options}, kind.options)
    report = await check_capacity_source(
        lambda context: kind.make(world.server, checked, context),
        change=world.change,
        remove=world.remove,
        breaks=lambda: breaks(world),
        # How soon it is back is a draw: after a few failures in a row it is up to LONGEST_PAUSE.
        deadline=LONGEST_PAUSE + 2.0,
    )
    # Every rule there is.
    assert report.not_checked == {}, str(report)
    assert set(report.checked) == set(Rule)
    assert world.server.watches == [], "left open"


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("name", KINDS)
async def test_all_of_a_cluster(
    autojump_clock: MockClock, name: str, breaks: Callable[[World], AbstractContextManager[object]]
) -> None:
    await check(name, breaks)


@pytest.mark.parametrize("name", KINDS)
async def test_namespaces_in_small_pages(autojump_clock: MockClock, name: str) -> None:
    await check(name, World.gone, namespaces=["agents", "others"], page_size=2)


def test_every_type_of_the_plugin_is_checked() -> None:
    from trio_federation_kubernetes import TYPES

    assert [kind.name for kind in TYPES] == list(KINDS)
    assert [kind.options for kind in TYPES] == [kind.options for kind in KINDS.values()]

"""`trio-federation demo`: a hub and three clusters on loopback, over real gRPC, with load that moves. A live table on a
terminal, plain lines otherwise; both tell in plain words who runs dry and where a create would go now."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trio_federation import logs
from trio_federation.agent import Agent
from trio_federation.clock import BootClock, trio_clock
from trio_federation.config import Endpoint, Federation, HubSettings, Log, PluginTable, Secret
from trio_federation.hub import Hub
from trio_federation.plugins import PluginManager
from trio_federation.router import Placement
from trio_federation.rpc import open_listeners, tcp_dialer

CLUSTERS = ("west", "east", "north")
ENVS = (("agents", "python-3-12"), ("agents", "browser"))
#: Seconds between two looks at the registries.
_LOOK = 0.25
#: Sentences kept on the screen.
_KEPT = 8


@click.command()
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=30.0,
    show_default=True,
    help="How long to run; Ctrl-C ends it sooner.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end, and nothing else.")
def demo(seconds: float, as_json: bool) -> None:
    """Watch a hub and three clusters share their capacity, on this machine, over real gRPC.

    The load of each cluster comes and goes, so that they run dry in turn, and their creates go to one another."""
    logs.configure(Log(level="warning"))
    try:
        result = trio.run(partial(run_demo, seconds, show=None if as_json else _show()), clock=BootClock())
    except* KeyboardInterrupt:
        sys.exit(0)
    if as_json:
        click.echo(json.dumps(result))


def demo_source(cluster_id: str) -> PluginTable:
    """What one cluster of the demo has, and how its load moves: the clusters are a third of a wave apart."""
    phase = CLUSTERS.index(cluster_id) * 5
    members: list[dict[str, Any]] = [
        {
            "namespace": "agents",
            "env_name": "python-3-12",
            "member_pool": "standard",
            "size": 8,
            "load": [{"shape": "wave", "high": 10, "period": "15s", "phase": f"{phase}s"}],
        },
        {
            "namespace": "agents",
            "env_name": "browser",
            "member_pool": "large",
            "size": 3,
            "autoscaling": True,
            "ceiling": 6,
            "growth_delay": "2s",
            "load": [
                {"shape": "constant", "level": 1},
                {"shape": "burst", "height": 4, "every": "6s", "length": "3s"},
            ],
        },
    ]
    return PluginTable("fixtures", {"seed": 1, "member": members}, "demo")


@dataclass(frozen=True, slots=True)
class Look:
    """What one cluster sees of one env at one moment."""

    cluster_id: str
    env: str
    idle: int
    running: int
    pending: int
    headroom: int
    placement: Placement


class Narrator:
    """Turns one look after another into sentences, one for each thing that has changed."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Look] = {}

    def tell(self, looks: list[Look]) -> Iterator[str]:
        """What is new since the looks before."""
        for look in looks:
            before = self._last.get((look.cluster_id, look.env))
            self._last[look.cluster_id, look.env] = look
            where = _destination(look.placement)
            if before is None and look.idle:
                yield f"{look.cluster_id} starts with {look.idle} idle for {look.env}"
            elif before is None:
                yield f"{look.cluster_id} starts with nothing idle for {look.env}: a create there now {where}"
            elif before.idle > 0 and look.idle == 0:
                yield f"{look.cluster_id} has run dry of {look.env}: a create there now {where}"
            elif before.idle == 0 and look.idle > 0:
                yield f"{look.cluster_id} has {look.idle} idle for {look.env} again: creates stay there"
            elif look.idle == 0 and look.placement.target != before.placement.target:
                yield f"{look.cluster_id} is still dry of {look.env}: a create there now {where}"


def _destination(placement: Placement) -> str:
    if placement.local:
        return "waits for its own autoscaler"
    chosen = next(candidate for candidate in placement.candidates if candidate.target == placement.target)
    return f"goes to {placement.target} ({f'{chosen.idle} idle' if chosen.idle else 'which can grow'})"


class _Plain:
    """Sentences, a line each."""

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, elapsed: float, looks: list[Look], news: list[str]) -> None:
        for sentence in news:
            click.echo(f"{elapsed:5.1f} s  {sentence}")


class _Terminal:
    """A table that is drawn anew, with the last sentences below it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=False)
        self._sentences: list[str] = []

    def __enter__(self) -> _Terminal:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._live.__exit__(*exc)

    def show(self, elapsed: float, looks: list[Look], news: list[str]) -> None:
        self._sentences = (self._sentences + [f"{elapsed:5.1f} s  {sentence}" for sentence in news])[-_KEPT:]
        self._live.update(Group(table(elapsed, looks), Text("\n".join(self._sentences), style="dim")))


def table(elapsed: float, looks: list[Look]) -> Table:
    """The demo's table: a row for each env and cluster."""
    shown = Table(title=f"three clusters, one hub, {elapsed:.0f} s", title_justify="left", expand=False)
    for heading, justify in (
        ("env", "left"),
        ("cluster", "left"),
        ("idle", "right"),
        ("used", "right"),
        ("waiting", "right"),
    ):
        shown.add_column(heading, justify=justify)  # type: ignore[arg-type]
    shown.add_column("a create there now")
    for number, look in enumerate(looks):
        style = "bold red" if look.idle == 0 else "green"
        where = f"stays in {look.cluster_id}" if look.idle else _destination(look.placement)
        first = number == 0 or looks[number - 1].env != look.env
        last = number + 1 == len(looks) or looks[number + 1].env != look.env
        shown.add_row(
            look.env if first else "",
            look.cluster_id,
            Text(str(look.idle), style=style),
            str(look.running),
            str(look.pending),
            where,
            end_section=last,
        )
    return shown


def _show() -> _Plain | _Terminal:
    console = Console()
    return _Terminal(console) if console.is_terminal else _Plain()


async def run_demo(seconds: float, show: _Plain | _Terminal | None) -> dict[str, Any]:
    """Run the demo for so long, and return what `--json` prints."""
    secret = Secret(f"{random.SystemRandom().getrandbits(128):032x}")
    plugins = PluginManager.load()
    settings = Federation(secret=secret, report_interval=0.5, resync_interval=2.0, ttl=10.0)
    clock = trio_clock()
    began = clock()
    async with trio.open_nursery() as nursery:
        hub = Hub(HubSettings(bind=Endpoint("127.0.0.1", 0), secret=secret))
        listeners = await open_listeners("127.0.0.1", 0)
        port = listeners[0].socket.getsockname()[1]
        await nursery.start(partial(hub.run, listeners))
        agents: dict[str, Agent] = {}
        for cluster_id in CLUSTERS:
            source = plugins.create_source(demo_source(cluster_id), cluster_id, clock, random.Random(1), Path())
            agents[cluster_id] = Agent(
                cluster_id,
                settings,
                sources={"demo": source},
                hubs={f"127.0.0.1:{port}": tcp_dialer("127.0.0.1", port)},
                credential=secret.reveal(),
            )
            await nursery.start(agents[cluster_id].run)
        with trio.move_on_at(began + seconds):
            await _watch(agents, began, show)
        result = _result(agents)
        nursery.cancel_scope.cancel()
    return result


async def _watch(agents: dict[str, Agent], began: float, show: _Plain | _Terminal | None) -> None:
    if show is None:
        await trio.sleep_forever()
        return
    narrator = Narrator()
    everything = len(CLUSTERS) * len(ENVS)
    with show:
        while True:
            # Until the first snapshots are there, there is nothing to tell.
            if all(len(agent.registry) >= everything for agent in agents.values()):
                looks = list(_looks(agents))
                show.show(trio.current_time() - began, looks, list(narrator.tell(looks)))
            await trio.sleep(_LOOK)


def _looks(agents: dict[str, Agent]) -> Iterator[Look]:
    for namespace, env_name in ENVS:
        for cluster_id, agent in agents.items():
            local = [r for r in agent.registry.records(namespace, env_name) if r.cluster_id == cluster_id]
            yield Look(
                cluster_id,
                f"{namespace}/{env_name}",
                idle=sum(record.idle for record in local),
                running=sum(record.running for record in local),
                pending=sum(record.pending for record in local),
                headroom=sum(record.capacity for record in local),
                placement=agent.router.place(namespace, env_name, reserve=False),
            )


def _result(agents: dict[str, Agent]) -> dict[str, Any]:
    clusters: dict[str, Any] = {}
    for cluster_id, agent in agents.items():
        snapshot = agent.registry.snapshot()
        best = {}
        for namespace, env_name in sorted({(record.namespace, record.env_name) for record in snapshot}):
            member = agent.registry.best_foreign_member(namespace, env_name)
            if member is not None:
                best[f"{namespace}/{env_name}"] = member.target
        clusters[cluster_id] = {
            "records": len(snapshot),
            "foreign": sum(1 for record in snapshot if record.cluster_id != cluster_id),
            "best": best,
        }
    return {"clusters": clusters, "metrics": {name: agent.exposition().decode() for name, agent in agents.items()}}

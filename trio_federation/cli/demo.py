"""`trio-federation demo`: a hub and three clusters on loopback, over real gRPC, with load that moves. A live table on a
terminal, plain lines otherwise; both tell in plain words who runs dry and where a create would go now."""

from __future__ import annotations

import errno
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trio_federation import logs
from trio_federation.agent import Agent
from trio_federation.cli.signals import signals_cancel
from trio_federation.clock import BootClock, trio_clock
from trio_federation.config import Endpoint, Federation, HubSettings, Log, PluginTable, Secret
from trio_federation.errors import ConfigurationError
from trio_federation.hub import Hub
from trio_federation.plugins import PluginManager
from trio_federation.router import Placement
from trio_federation.rpc import open_listeners, tcp_dialer

CLUSTERS = ("west", "east", "north")
ENVS = (("agents", "python-3-12"), ("agents", "browser"))
#: Seconds between two looks at the registries.
_LOOK = 0.25
#: Sentences kept on the screen, if it is high enough.
_KEPT = 10

_TITLE = "A hub and three clusters on this machine"
_ABOUT = (
    "The load comes and goes. A cluster with none idle sends its creates to the best pool of another one "
    "(cluster::pool)."
)


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
    if not math.isfinite(seconds):
        raise click.BadParameter("give a number of seconds that ends", param_hint="--seconds")
    logs.configure(Log(level="warning"))
    plugins = PluginManager.load()
    if found := plugins.source_faults(demo_source(CLUSTERS[0])):
        advice = "the demo needs the plugin for scripted load: pip install trio-federation-fixtures"
        raise ConfigurationError([f"{advice} ({fault})" for fault in found])
    show = None if as_json else how_to_show(seconds)
    try:
        result = trio.run(partial(run_demo, seconds, plugins, show), clock=BootClock())
    except BaseExceptionGroup as error:
        gone, others = error.split(BrokenPipeError)
        if gone is None or others is not None:
            raise
        # Whoever read the lines has gone. Click knows how to end then, if it sees the error itself.
        raise BrokenPipeError(errno.EPIPE, "nobody reads what the demo says") from error
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
    can_grow: bool
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
            name, env = look.cluster_id, look.env
            if look.idle:
                if before is None:
                    yield f"{name} starts with {look.idle} idle of {env}"
                elif not before.idle:
                    yield f"{name} has {look.idle} idle of {env} again: creates stay there"
            elif before is None:
                yield f"{name} starts with none idle of {env}: {_creates(look)}"
            elif before.idle:
                yield f"{name} ran dry of {env}: {_creates(look)}"
            elif look.placement.target != before.placement.target:
                yield f"{name} is still dry of {env}: {_creates(look)}"


def _creates(look: Look) -> str:
    """Where creates go while a cluster is dry, as the end of a sentence."""
    if look.placement.local:
        return f"creates wait there, {_why_wait(look)}"
    return f"creates go to {_destination(look.placement)}"


def _a_create(look: Look) -> str:
    """Where one create would go now, under the heading "a create now"."""
    if look.idle:
        return f"stays in {look.cluster_id}"
    return f"waits: {_why_wait(look)}" if look.placement.local else f"goes to {_destination(look.placement)}"


def _why_wait(look: Look) -> str:
    return f"{look.cluster_id} can grow" if look.can_grow else "no cluster has room"


def _destination(placement: Placement) -> str:
    chosen = next(candidate for candidate in placement.candidates if candidate.target == placement.target)
    return f"{placement.target} ({f'{chosen.idle} idle' if chosen.idle else 'can grow'})"


def _with_time(elapsed: float, sentence: str) -> str:
    return f"{elapsed:5.1f} s  {sentence}"


class Plain:
    """Sentences, a line each."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> Plain:
        click.echo(f"{_TITLE}, for {self._seconds:g} s; Ctrl-C ends it.\n{_ABOUT}")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, elapsed: float, looks: list[Look], news: list[str]) -> None:
        """Print what is new."""
        for sentence in news:
            click.echo(_with_time(elapsed, sentence))


class Terminal:
    """A table that is drawn anew, with the last sentences below it, as many as the screen has room for."""

    def __init__(self, console: Console, seconds: float) -> None:
        self._console = console
        self._seconds = seconds
        self._live = Live(console=console, refresh_per_second=8, transient=False)
        self._sentences: list[tuple[str, str]] = []

    def __enter__(self) -> Terminal:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._live.__exit__(*exc)

    def show(self, elapsed: float, looks: list[Look], news: list[str]) -> None:
        """Draw the table, and what is new below what was new before."""
        self._sentences = [*self._sentences, *((f"{elapsed:5.1f} s", sentence) for sentence in news)][-_KEPT:]
        title = Text(f"{_TITLE}, {elapsed:.0f} s of {self._seconds:g} s; Ctrl-C ends it.", style="bold")
        above = Group(title, Text(_ABOUT), table(looks))
        # Two lines stay free: for the cursor, and for what comes after the end, so that the title is still to be seen.
        room = self._console.size.height - self._height(above) - 2
        while self._sentences and self._height(_news(self._sentences)) > room:
            del self._sentences[0]
        self._live.update(Group(above, _news(self._sentences)))

    def _height(self, shown: RenderableType) -> int:
        return len(self._console.render_lines(shown))


def table(looks: list[Look]) -> Table:
    """The demo's table: for each env a row with its name, and one for each cluster."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("env and cluster")
    for heading in ("idle", "in use", "waiting"):
        shown.add_column(heading, justify="right")
    # As wide as the longest that the demo has to say, so that nothing moves but what changes.
    shown.add_column("a create now", min_width=len("goes to north::standard (can grow)"))
    env = ""
    for look in looks:
        if look.env != env:
            env = look.env
            shown.add_row(Text(env, style="bold"))
        shown.add_row(
            f"  {look.cluster_id}",
            Text(str(look.idle), style="green" if look.idle else "bold red"),
            str(look.running),
            Text(str(look.pending), style="yellow" if look.pending else ""),
            Text(_a_create(look), style="" if look.idle else "bold"),
        )
    return shown


def _news(sentences: list[tuple[str, str]]) -> Table:
    """The times in a column of their own, so that a sentence that needs two lines does not run below them."""
    shown = Table.grid(padding=(0, 2))
    for row in sentences:
        shown.add_row(*row, style="dim")
    return shown


def how_to_show(seconds: float) -> Plain | Terminal:
    """What suits standard output: a terminal that cannot move its cursor gets lines, too, and so does a pipe for which
    the environment asks for colours."""
    console = Console(markup=False, emoji=False, highlight=False)
    drawable = sys.stdout.isatty() and console.is_interactive
    return Terminal(console, seconds) if drawable else Plain(seconds)


async def run_demo(seconds: float, plugins: PluginManager, show: Plain | Terminal | None) -> dict[str, Any]:
    """Run the demo for so long, or until SIGTERM or SIGINT, and return what `--json` prints: what there is by then."""
    secret = Secret(f"{random.SystemRandom().getrandbits(128):032x}")
    settings = Federation(secret=secret, report_interval=0.5, resync_interval=2.0, ttl=10.0)
    clock = trio_clock()
    began = clock()
    watching = trio.CancelScope(deadline=began + seconds)
    async with signals_cancel(watching), trio.open_nursery() as nursery:
        hub = Hub(HubSettings(bind=Endpoint("127.0.0.1", 0), secret=secret))
        listeners = await open_listeners("127.0.0.1", 0)
        port = listeners[0].socket.getsockname()[1]
        await nursery.start(partial(hub.run, listeners))
        agents: dict[str, Agent] = {}
        # In a nursery of their own, so that they can say goodbye to a hub that is still there.
        async with trio.open_nursery() as clusters:
            for cluster_id in CLUSTERS:
                make = partial(
                    plugins.create_source, demo_source(cluster_id), cluster_id, clock, random.Random(1), Path()
                )
                agents[cluster_id] = Agent(
                    cluster_id,
                    settings,
                    sources={"demo": make},
                    hubs={f"127.0.0.1:{port}": tcp_dialer("127.0.0.1", port)},
                    credential=secret.reveal(),
                )
                await clusters.start(agents[cluster_id].run)
            with watching:
                await _watch(agents, began, show)
            result = await _result(agents)
            clusters.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
    return result


async def _watch(agents: dict[str, Agent], began: float, show: Plain | Terminal | None) -> None:
    if show is None:
        await trio.sleep_forever()
        return
    narrator = Narrator()
    everything = len(CLUSTERS) * len(ENVS)
    met = False
    with show:
        while True:
            # Until each has heard of all the others, there is nothing to tell.
            met = met or all(len(agent.registry) >= everything for agent in agents.values())
            if met:
                looks = list(_looks(agents))
                show.show(trio.current_time() - began, looks, list(narrator.tell(looks)))
            await trio.sleep(_LOOK)


def _looks(agents: dict[str, Agent]) -> Iterator[Look]:
    for namespace, env_name in ENVS:
        for cluster_id, agent in agents.items():
            local = [r for r in agent.registry.records(namespace, env_name) if r.cluster_id == cluster_id]
            yield Look(
                cluster_id,
                env_name,
                idle=sum(record.idle for record in local),
                running=sum(record.running for record in local),
                pending=sum(record.pending for record in local),
                can_grow=agent.registry.local_can_grow(namespace, env_name),
                placement=agent.router.place(namespace, env_name, reserve=False),
            )


async def _result(agents: dict[str, Agent]) -> dict[str, Any]:
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
    metrics = {name: b"".join([chunk async for chunk in agent.exposition()]) for name, agent in agents.items()}
    return {"clusters": clusters, "metrics": {name: text.decode() for name, text in metrics.items()}}

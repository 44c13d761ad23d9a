"""The hubs that benchmarks measure, each in a process of its own: ours, as `trio-federation run` runs it, and those on
grpcio.aio; and the same grpcio clients for all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from benchmarks.children import BenchmarkError, Child, command, running, running_module
from benchmarks.messages import SECRET


@dataclass(frozen=True, slots=True)
class RunningHub:
    """A hub that has started, and the port of loopback that it listens on."""

    child: Child
    port: int


HubFactory: TypeAlias = Callable[[], AbstractContextManager[RunningHub]]


@contextmanager
def our_hub() -> Iterator[RunningHub]:
    """Ours, with its default settings, as an operator runs it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "hub.toml")
        path.write_text(hub_config())
        with running(command(), "run", path, name="our hub") as child:
            (port,) = child.hear(event="started")["hub_ports"]
            yield RunningHub(child, port)


@contextmanager
def grpcio_hub(way: str) -> Iterator[RunningHub]:
    """The one on grpcio.aio, which passes on in the way "each" or "shared"."""
    with running_module("grpcio_hub", way, name=f"grpcio's hub ({way})") as child:
        yield RunningHub(child, child.hear()["port"])


#: by the name that tables use
HUBS: dict[str, HubFactory] = {
    "ours": our_hub,
    "grpcio": partial(grpcio_hub, "each"),
    "grpcio, shared bytes": partial(grpcio_hub, "shared"),
}


#: What every configuration file ends with: no port that two processes could want.
_EACH = '[metrics]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n[log]\nlevel = "info"\nformat = "json"\n'


#: A reporter here sends in a second what a cluster does in minutes.
_NO_LIMITS = "[hub.limits]\nconnections = 10000\nmessage_rate = 1000000\nrecord_rate = 1000000000\n"


def hub_config() -> str:
    """The configuration file of a hub."""
    return _hub_table(0) + _NO_LIMITS + _EACH


def agent_config(cluster_id: str, port: int, source: str, *, hub: bool = False) -> str:
    """The configuration file of an agent that reports to the hub at a port of loopback, or, with `hub`, to one that it
    runs there itself; `source`: the keys of its one [[source]] table."""
    return (
        f'cluster_id = "{cluster_id}"\n[federation]\nhubs = ["127.0.0.1:{port}"]\nsecret = "{SECRET}"\n'
        f"[[source]]\n{source}\n{_hub_table(port) if hub else ''}{_EACH}"
    )


def _hub_table(port: int) -> str:
    return f'[hub]\nbind = "127.0.0.1:{port}"\nsecret = "{SECRET}"\n'


class Peers:
    """A reporter and watchers on grpcio, connected to one hub; see `grpcio_peers.py`."""

    def __init__(self, child: Child, watchers: int) -> None:
        self._child = child
        self._watchers = watchers

    def send(self, records: int, batches: int) -> list[float]:
        """Report so many batches of so many records, each to all watchers; seconds until the last had it, by batch.

        Raises BenchmarkError where not exactly that has arrived."""
        self._child.tell(records=records, batches=batches)
        answer = self._child.hear(done=True)
        wanted = records * batches * self._watchers
        if answer["records"] != wanted:
            raise BenchmarkError(f"{answer['records']:,} records have arrived at the watchers, not {wanted:,}")
        took: list[float] = answer["took"]
        return took


@contextmanager
def peers_of(hub: RunningHub, watchers: int) -> Iterator[Peers]:
    """grpcio's clients, connected to a hub."""
    with running_module("grpcio_peers", hub.port, watchers, name="grpcio's reporter and watchers") as child:
        child.hear(ready=True)
        yield Peers(child, watchers)

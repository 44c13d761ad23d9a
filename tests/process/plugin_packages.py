"""Small plugin packages for tests with real processes: laid out in a folder as an installer does, so that a process
with that folder in its PYTHONPATH finds them. What each of them does wrong, or well, is in its code here."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

#: what every good package begins with
_BEGIN = """
import time
from dataclasses import replace
from pathlib import Path
import msgspec
import trio
from trio_federation import (
    Capacity, CapacityFilter, CapacitySink, CapacitySource, FilterType, SinkType, SourceType, hookimpl
)

class Options(msgspec.Struct):
    pass
"""

#: Has one more idle with every collect.
COUNTING = """
class Source(CapacitySource):
    def __init__(self, options, context):
        self.cluster, self.collects = context.cluster_id, 0

    async def collect(self):
        self.collects += 1
        return [Capacity(self.cluster, "team-a", "counting", "counting", idle=self.collects, pending=7)]

@hookimpl
def capacity_sources():
    return [SourceType("counting", Options, Source)]
"""

#: Raises with every collect: by turns what an error is, and what ends a process that lets it.
RAISING = """
class Source(CapacitySource):
    def __init__(self, options, context):
        self.collects = 0

    async def collect(self):
        self.collects += 1
        raise RuntimeError("no luck today") if self.collects % 2 else SystemExit("and enough of it")

@hookimpl
def capacity_sources():
    return [SourceType("raising", Options, Source)]
"""

#: Answers once, and blocks its thread for 30 s from then on.
BLOCKING = """
class Source(CapacitySource):
    def __init__(self, options, context):
        self.cluster, self.collects = context.cluster_id, 0

    async def collect(self):
        self.collects += 1
        if self.collects > 1:
            time.sleep(30)
        return [Capacity(self.cluster, "team-a", "blocking", "blocking", idle=5)]

@hookimpl
def capacity_sources():
    return [SourceType("blocking", Options, Source)]
"""

#: A sink that writes down what it is told, and filters that hide a field and a whole env.
WRITING_AND_HIDING = """
class PathOptions(msgspec.Struct):
    path: str

class Sink(CapacitySink):
    def __init__(self, options, context):
        self.path = context.base_dir / options.path

    async def update(self, snapshot):
        told = "".join(f"{each.cluster_id}/{each.env_name} {each.pending}\\n" for each in snapshot)
        await trio.Path(self.path).write_text(told)

class EnvOptions(msgspec.Struct):
    env: str

class HidesEnv(CapacityFilter):
    def __init__(self, options, context):
        self.env = options.env

    def report(self, record):
        return None if record.env_name == self.env else record

class HidesPending(CapacityFilter):
    def __init__(self, options, context):
        pass

    def report(self, record):
        return replace(record, pending=0)

@hookimpl
def capacity_sinks():
    return [SinkType("writing", PathOptions, Sink)]

@hookimpl
def capacity_filters():
    return [FilterType("hides-env", EnvOptions, HidesEnv), FilterType("hides-pending", Options, HidesPending)]
"""

#: A sink whose trouble is whether its agent is the reporter, as far as it knows, and for how long records count.
ASKING = """
from trio_federation import Trouble

class Sink(CapacitySink):
    def __init__(self, options, context):
        self.context = context

    async def update(self, snapshot):
        pass

    def troubles(self):
        word = {True: "reports", False: "refused", None: "unknown"}[self.context.is_reporter()]
        return [Trouble(word, f"ttl {self.context.ttl:g}", self.context.cluster_id)]

@hookimpl
def capacity_sinks():
    return [SinkType("asking", Options, Sink)]
"""

#: Cannot be read.
UNREADABLE = "def broken(:"

#: Ends the process that imports it, if that lets it.
EXITING = "raise SystemExit('no licence')"

#: Its source is good, and beside it is a hook that there is not.
MISSPELT = (
    COUNTING.replace('"counting"', '"spelt"')
    + """
@hookimpl
def capacity_sink():
    return []
"""
)


def install(folder: Path, **packages: str) -> None:
    """Lay out packages, each with its code, by the name of the distribution and its plugin. The module is called
    `plugin_…`."""
    for name, code in packages.items():
        whole = code if code in (UNREADABLE, EXITING) else dedent(_BEGIN) + code
        (folder / f"plugin_{name}.py").write_text(whole, encoding="utf-8")
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[trio_federation]\n{name} = plugin_{name}\n", encoding="utf-8")


def plugins_file(path: Path, cluster_id: str, tables: str, *, hub_port: int, secret: str) -> Path:
    """Write the configuration of an agent whose sources, sinks and filters are these tables; its path."""
    path.write_text(
        f'cluster_id = "{cluster_id}"\n'
        f'[federation]\nhubs = ["127.0.0.1:{hub_port}"]\nreport_interval = "200ms"\nsecret = "{secret}"\n'
        f"{tables}\n"
        '[metrics]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n[log]\nlevel = "debug"\nformat = "json"\n',
        encoding="utf-8",
    )
    return path

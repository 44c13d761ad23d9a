"""`trio-federation demo`: what it tells, how it is shown, and that it ends well in every way that it can end."""

from __future__ import annotations

import io
import json
import random
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tests.cli.conftest import Call
from tests.process.running import COMMAND, PATIENCE, UNWANTED, Program, environment, idle_by_env, start
from trio_federation import logs
from trio_federation.cli.demo import (
    CLUSTERS,
    ENVS,
    Look,
    Narrator,
    Plain,
    Terminal,
    demo_source,
    how_to_show,
    run_demo,
    table,
)
from trio_federation.config import Log
from trio_federation.plugins import PluginManager
from trio_federation.router import Candidate, Placement, Rule, Tier

# What is told.


def placement(target: str | None = None, idle: int = 0) -> Placement:
    """A placement on `cluster::pool`, which has so many idle or else can grow; or a local one."""
    if target is None:
        return Placement("id", True, None, "", (), Rule.NOTHING_ANYWHERE)
    cluster_id, _, pool = target.partition("::")
    tier = Tier.IDLE if idle else Tier.GROW
    chosen = Candidate(cluster_id, pool, tier, idle, 0, 2, 0.5, "Active", "chosen")
    other = Candidate("other", "pool", Tier.FULL, 0, 0, 0, 0.5, "", "")
    return Placement("id", False, target, "", (other, chosen), Rule.FOREIGN_IDLE if idle else Rule.FOREIGN_GROWTH)


def look(idle: int, where: Placement | None = None, *, cluster: str = "west", can_grow: bool = False) -> Look:
    return Look(cluster, "python", idle, 3, 0, can_grow, where if where is not None else placement())


AT_EAST = placement("east::large", 4)
GROWS_IN_NORTH = placement("north::small")

TOLD = [
    # (looks, one after another, and what the last one adds)
    ([look(8)], ["west starts with 8 idle of python"]),
    ([look(0, AT_EAST)], ["west starts with none idle of python: creates go to east::large (4 idle)"]),
    ([look(0)], ["west starts with none idle of python: creates wait there, no cluster has room"]),
    ([look(0, can_grow=True)], ["west starts with none idle of python: creates wait there, west can grow"]),
    ([look(1), look(0, AT_EAST)], ["west ran dry of python: creates go to east::large (4 idle)"]),
    ([look(1), look(0, GROWS_IN_NORTH)], ["west ran dry of python: creates go to north::small (can grow)"]),
    ([look(1), look(0)], ["west ran dry of python: creates wait there, no cluster has room"]),
    ([look(0, AT_EAST), look(2)], ["west has 2 idle of python again: creates stay there"]),
    (
        [look(0, AT_EAST), look(0, GROWS_IN_NORTH)],
        ["west is still dry of python: creates go to north::small (can grow)"],
    ),
    ([look(0, AT_EAST), look(0)], ["west is still dry of python: creates wait there, no cluster has room"]),
    # nothing that matters has changed
    ([look(8), look(8)], []),
    ([look(8), look(3)], []),
    ([look(0, AT_EAST), look(0, AT_EAST)], []),
    ([look(0, AT_EAST), look(0, placement("east::large", 1))], []),
    ([look(0), look(0, can_grow=True)], []),
]


@pytest.mark.parametrize("looks, told", TOLD)
def test_sentences(looks: list[Look], told: list[str]) -> None:
    narrator = Narrator()
    for each in looks[:-1]:
        list(narrator.tell([each]))
    assert list(narrator.tell(looks[-1:])) == told


looks = st.lists(
    st.tuples(
        st.sampled_from(["west", "east"]),
        st.integers(0, 2),
        st.sampled_from([placement(), AT_EAST, GROWS_IN_NORTH]),
        st.booleans(),
    ),
    max_size=40,
)


@given(looks)
def test_every_change_is_told_once_and_nothing_else(seen: list[tuple[str, int, Placement, bool]]) -> None:
    narrator = Narrator()
    last: dict[str, tuple[bool, str | None]] = {}
    for cluster, idle, where, can_grow in seen:
        (*told,) = narrator.tell([look(idle, where, cluster=cluster, can_grow=can_grow)])
        dry, target = idle == 0, where.target if idle == 0 else None
        before = last.get(cluster)
        if before is None:
            expected = " starts with "
        elif before[0] != dry:
            expected = " ran dry " if dry else " again: "
        else:
            expected = " is still dry " if before[1] != target else ""
        assert len(told) == (1 if expected else 0)
        for sentence in told:
            assert sentence.startswith(f"{cluster} ")
            assert expected in sentence
        last[cluster] = dry, target


# How it is shown.

#: what may stand in one row: idle, in use, waiting, can it grow, where a create goes
Row = tuple[int, int, int, bool, Placement]
ROW = st.tuples(
    st.integers(0, 10),
    st.integers(0, 10),
    st.integers(0, 10),
    st.booleans(),
    st.sampled_from(
        [
            placement(),
            *(placement(f"{c}::{pool}", n) for c in CLUSTERS for pool in ("standard", "large") for n in (0, 9)),
        ]
    ),
)
ROWS = st.lists(ROW, min_size=6, max_size=6)


def screen(rows: list[Row]) -> list[Look]:
    names = [(cluster, env) for _, env in ENVS for cluster in CLUSTERS]
    return [Look(cluster, env, *row) for (cluster, env), row in zip(names, rows, strict=True)]


def drawn(console: Console) -> list[str]:
    """What a terminal has been sent, without colours. When the cursor goes back to a line's start, a new one begins."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).replace("\r", "\n").split("\n")


def terminal(width: int = 80, height: int = 24) -> Console:
    return Console(force_terminal=True, width=width, height=height, file=io.StringIO(), markup=False, highlight=False)


def test_the_table_says_who_has_what_and_where_a_create_goes() -> None:
    console = terminal()
    rows = [look(4), look(0, AT_EAST, cluster="east"), look(0, cluster="north")]
    console.print(table(rows))
    words = [" ".join(line.split()) for line in drawn(console) if line.strip()]
    assert words[0] == "env and cluster idle in use waiting a create now"
    assert words[2:] == [
        "python",
        "west 4 3 0 stays in west",
        "east 0 3 0 goes to east::large (4 idle)",
        "north 0 3 0 waits: no cluster has room",
    ]


@given(ROWS)
def test_no_row_of_the_table_needs_two_lines_on_80_columns(rows: list[Row]) -> None:
    console = terminal()
    console.print(table(screen(rows)))
    lines = [line for line in drawn(console) if line.strip()]
    assert len(lines) == 2 + 2 + 6
    assert max(len(line.rstrip()) for line in lines) <= 80


@settings(max_examples=25)  # each is drawn as a terminal would
@given(st.lists(ROWS, min_size=1, max_size=8), st.sampled_from([(80, 24), (120, 40), (80, 20)]))
def test_all_of_the_screen_fits(seen: list[list[Row]], size: tuple[int, int]) -> None:
    width, height = size
    narrator = Narrator()
    console = terminal(width, height)
    show = Terminal(console, 30)
    latest = ""
    # Rich's own thread would draw in between; here only what is asked for is drawn.
    show._live.auto_refresh = False
    with show:
        for number, each in enumerate(seen):
            news = list(narrator.tell(screen(each)))
            latest = news[-1] if news else latest
            show.show(number, screen(each), news)
            console.file.seek(0)
            console.file.truncate()
            show._live.refresh()
            lines = drawn(console)
            assert len(lines) <= height
            assert max(len(line.rstrip()) for line in lines) <= width
            text = "\n".join(lines)
            assert "..." not in text  # Rich's mark for what it cuts off
            assert f"{number} s of 30 s; Ctrl-C ends it." in text
            assert latest.split(":")[0] in text


class Interrupted(Terminal):
    """Somebody presses Ctrl-C when they have seen it drawn three times."""

    times = 0

    def show(self, elapsed: float, looks: list[Look], news: list[str]) -> None:
        super().show(elapsed, looks, news)
        self.times += 1
        if self.times == 3:
            signal.raise_signal(signal.SIGINT)


async def test_in_a_terminal_it_is_drawn_anew_until_ctrl_c(
    logs_as_before: None, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.configure(Log(level="warning"))
    console = terminal()
    show = Interrupted(console, 600)
    with trio.fail_after(PATIENCE):
        result = await run_demo(600, PluginManager.load(), show)
    assert show.times == 3
    assert_is_result(json.dumps(result))
    lines = drawn(console)
    assert max(len(line.rstrip()) for line in lines) <= 80
    text = "\n".join(lines)
    for words in ("env and cluster", "python-3-12", "browser", "a create now", "starts with"):
        assert words in text
    # Once for each time that it was drawn, over the one before.
    assert len(re.findall(r"\d+ s of 600 s; Ctrl-C ends it\.", text)) >= 2
    assert capfd.readouterr() == ("", "")


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "stream, term, kind",
    [(Tty(), "xterm", Terminal), (Tty(), "dumb", Plain), (io.StringIO(), "xterm", Plain)],
    ids=["terminal", "dumb", "pipe"],
)
@pytest.mark.parametrize("environ", [{}, {"FORCE_COLOR": "1"}], ids=["", "colours"])
def test_a_table_only_where_it_can_be_drawn(
    stream: io.StringIO, term: str, kind: type[object], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    for name in UNWANTED:
        monkeypatch.delenv(name, raising=False)
    for name, value in (environ | {"TERM": term}).items():
        monkeypatch.setenv(name, value)
    assert type(how_to_show(5)) is kind


# How it runs and ends.


def assert_is_result(text: str) -> None:
    """One line of JSON, of the form that interfaces.md promises: three clusters, each with the records of all three."""
    assert text.strip().count("\n") == 0
    result = json.loads(text)
    assert set(result) == {"clusters", "metrics"}
    assert set(result["clusters"]) == set(result["metrics"]) == set(CLUSTERS)
    for name, cluster in result["clusters"].items():
        assert set(cluster) == {"records", "foreign", "best"}
        assert (cluster["records"], cluster["foreign"]) == (6, 4)
        assert set(cluster["best"]) <= {f"{namespace}/{env}" for namespace, env in ENVS}
        for target in cluster["best"].values():
            assert re.fullmatch(r"(west|east|north)::(standard|large)", target)
            assert not target.startswith(f"{name}::")
        families = {family.name for family in text_string_to_metric_families(result["metrics"][name])}
        assert {f"agentbox_federation_env_{value}" for value in ("idle", "running", "desired")} <= families
        idle = idle_by_env(result["metrics"][name])
        assert set(idle) == {(cluster, namespace, env, "") for cluster in CLUSTERS for namespace, env in ENVS}
    assert any(cluster["best"] for cluster in result["clusters"].values())


@pytest.mark.slow
async def test_as_a_process_to_its_end_or_to_ctrl_c(nursery: trio.Nursery) -> None:
    """Four at a time: each mode, to its end and interrupted."""
    plain = await start(nursery, "demo", "--seconds", "3")
    as_json = await start(nursery, "demo", "--seconds", "3", "--json")
    stopped = await start(nursery, "demo", "--seconds", "600")
    stopped_json = await start(nursery, "demo", "--seconds", "600", "--json")

    async def interrupt(program: Program, number: signal.Signals) -> None:
        began = trio.current_time()
        assert await program.stop(number) == 0
        assert trio.current_time() - began < 5

    await stopped.until(lambda: "starts with" in stopped.output)
    await interrupt(stopped, signal.SIGINT)
    assert [await each.ended() for each in (plain, as_json)] == [0, 0]
    # By now this one, of the same age, has everything, too.
    await interrupt(stopped_json, signal.SIGINT)

    assert_is_result(as_json.output)
    assert_is_result(stopped_json.output)
    for each in (plain, as_json, stopped, stopped_json):
        assert each.lines == []
    for each in (plain, stopped):
        title, about, *sentences = each.output.splitlines()
        assert title.startswith("A hub and three clusters on this machine, for ")
        assert "cluster::pool" in about
        starts = [line for line in sentences if " starts with " in line]
        assert len(starts) == 6
        assert sentences[:6] == starts
        for line in sentences:
            assert re.match(r" {1,2}\d+\.\d s  (west|east|north) ", line)
        assert "\x1b" not in each.output


async def test_sigterm_ends_it_like_ctrl_c(nursery: trio.Nursery) -> None:
    """At once, before there is anything to tell: what is there is printed all the same."""
    demo = await start(nursery, "demo", "--seconds", "600")
    await demo.until(lambda: "Ctrl-C" in demo.output)
    assert await demo.stop(signal.SIGTERM) == 0
    assert demo.lines == []


def test_whoever_has_read_enough_may_go() -> None:
    """As in `trio-federation demo | head -1`."""
    with subprocess.Popen(
        [COMMAND, "demo", "--seconds", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        assert demo.stdout.readline() != b""
        demo.stdout.close()
        assert demo.stderr.read() == b""
        assert demo.wait(30) == 1


def test_without_the_plugin(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PluginManager, "load", classmethod(lambda cls: cls()))
    for arguments in (["demo"], ["demo", "--json"]):
        ended = call(*arguments)
        assert (ended.code, ended.output, len(ended.lines)) == (2, "", 1)
        assert "pip install trio-federation-fixtures" in ended.lines[0]


@pytest.mark.parametrize("cluster_id", CLUSTERS)
async def test_each_cluster_runs_dry_and_has_idle_ones_again_within_half_a_minute(cluster_id: str) -> None:
    now = 0.0
    source = PluginManager.load().create_source(
        demo_source(cluster_id), cluster_id, lambda: now, random.Random(1), Path()
    )
    idle: dict[str, list[int]] = {env_name: [] for _, env_name in ENVS}
    for step in range(120):
        now = step / 4
        for record in await source.collect():
            idle[record.env_name].append(record.idle)
    for counts in idle.values():
        turns = [now == 0 for before, now in pairwise(counts) if (before == 0) != (now == 0)]
        assert len(turns) >= 2

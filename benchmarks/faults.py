"""What faults do to a federation: how soon each is noticed and healed, whether any record is false or lost, what slow
and hostile peers cost the others in latency and the hub in CPU and memory, and how a fleet comes back after its hub."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.children import BenchmarkError, Child, command, running, running_module
from benchmarks.faults_process import POOLS, step_at
from benchmarks.hubs import agent_config, hub_config
from benchmarks.measure import Figure, compared, median, percentile, shown
from benchmarks.messages import SECRET
from trio_federation.clock import boot_time

# Faults of one connection or process.

#: Faults by name, how often each is made: on a full run, and on a quick one.
FAULTS = {
    "nothing": (8, 1),
    "reset (RST)": (8, 1),
    "goodbye (GOAWAY)": (8, 1),
    "forgotten by the network": (2, 0),
    "taken, then silence": (2, 0),
    "hub frozen 3 s": (3, 0),
    "hub killed": (4, 1),
    "agent frozen 3 s": (3, 0),
    "agent killed": (1, 1),
}
#: What is to be known about a figure.
NOTES = {
    "forgotten by the network: noticed": "goal: the silence limit, 15 s",
    "taken, then silence: noticed": "a delay, and 5 s for the first byte of a hub",
    "taken, then silence: healed": "from the end of the silence, in the middle of a try",
    "hub killed: healed": "from the moment at which it serves again",
    "agent killed: noticed": "by the hub",
    "agent killed: healed": "a new instance is let in once the old one was silent for the silence limit, 15 s",
}
#: Seconds for which everything is well before the next fault.
BETWEEN = 0.5
#: Seconds that somebody is frozen; that everybody who connects meets silence; that a killed agent stays away.
FROZEN = 3.0
SILENT = 8.0
AWAY = 1.0
#: On a quick run nobody waits for the silence limit: in the tables of hub and agents alike.
QUICK_TIMES = 'keepalive = "200ms"\nsilence_limit = "1s"\n'
#: Seconds within which a fault has to be noticed, and to heal: the silence limit, and the longest backoff and two
#: resyncs, with some room.
NOTICE_WITHIN = 20.0
HEAL_WITHIN = 35.0

# Slow and hostile peers.

#: Honest watchers, and how they are called in tables.
WATCHERS = 10
QUICK_WATCHERS = 3
#: What is done, by its name in `faults_hostile.py`, and what tables call it.
ATTACKS = {
    "never read": "5 watchers that never read",
    "never read, wide": "the same, with wide windows",
    "byte a second": "5 watchers that read a byte a second",
    "beyond": "a reporter ten times over its limit",
    "pings": "PING flood",
    "settings": "SETTINGS flood",
    "resets": "rapid resets",
    "streams": "1,000 streams",
    "continuations": "CONTINUATION flood",
    "garbage": "a GiB announced, then garbage",
    "nothing": "nothing",
}
QUICK_ATTACKS = ("never read", "pings")
#: Seconds of each measurement, before and during, and how often they take turns.
PHASE = 0.8
QUICK_PHASE = 0.4
TURNS = 5
#: A message of 100,000 records is much work by itself: seconds before and during, and turns.
WITHIN = "within"
WITHIN_NAME = "a reporter within its limits, 100,000 records in a message"
WITHIN_BEFORE = 2.0
WITHIN_DURING = 6.0
WITHIN_TURNS = 2
#: Seconds that a hub gets between two turns to do what it still has to do.
SETTLE_WITHIN = 30.0
#: By how much the others' p99 may grow, and a hub's memory by one stalled watcher.
LATENCY_GOAL = 2.0
MEMORY_GOAL = 1.05

# Memory.

MANY_WATCHERS = 50
IDENTITIES = 20_000
ROUNDS = 2
QUICK_MANY = (5, 500, 1)
#: Seconds between two looks at a process's memory.
_MEMORY_LOOK = 0.1

# A storm.

FLEET = 200
QUICK_FLEET = 20


def run(*, quick: bool = False) -> list[Figure]:
    """Seconds, milliseconds, cores, bytes and counts; see docs/benchmarks.md."""
    return [*_connections(quick), *_hostile(quick), *_memory(quick), *_storm(quick)]


# --- faults of one connection or process -----------------------------------------------------------------------------


class _Process:
    """A hub or an agent of `faults_process.py`, over all of its processes."""

    def __init__(self, stack: ExitStack, path: Path, name: str) -> None:
        self.name = name
        self.child: Child
        self.port = 0
        self.looks: list[dict[str, Any]] = []
        self._stack = stack
        self._path = path
        self.start()

    def start(self) -> None:
        """Start it, and wait until it runs."""
        self.child = self._stack.enter_context(running_module("faults_process", str(self._path), name=self.name))
        ready = self.child.hear(ready=True)
        self.port = ready["ports"][0] if ready["ports"] else 0

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.child.pid, number)

    def look(self) -> dict[str, Any]:
        """What it knows now, or nearly so. Must not be frozen."""
        self.first(lambda _: True, boot_time(), math.inf)
        return self.looks[-1]

    def first(self, wanted: Callable[[dict[str, Any]], bool], after: float, until: float) -> float | None:
        """The moment from `after` on at which it says first what is wanted; None where it does not until `until`. Must
        not be frozen."""
        while True:
            look = self.child.hear(look=True)
            self.looks.append(look)
            if look["at"] >= until:
                return None
            if look["at"] >= after and wanted(look):
                return float(look["at"])


@dataclass
class _Found:
    """What came of one kind of fault. Seconds."""

    noticed: list[float] = field(default_factory=list)
    noticed_by_hub: list[float] = field(default_factory=list)
    healed: list[float] = field(default_factory=list)
    times: int = 0
    lost: int = 0


class _Fleet:
    """A hub and two agents: `near`, which is connected to it, and `far`, which is so through a line that can break."""

    def __init__(self, stack: ExitStack, folder: Path, times: str) -> None:
        self._stack = stack
        hub_path = Path(folder, "hub.toml")
        hub_path.write_text(_hub_config(0, times))
        self.hub = _Process(stack, hub_path, "the hub")
        hub_path.write_text(_hub_config(self.hub.port, times))  # where it will be once it was killed
        self.line = stack.enter_context(running_module("faults_line", self.hub.port, name="the line"))
        line_port = self.line.hear()["port"]
        self.agents = []
        for name, port in (("near", self.hub.port), ("far", line_port)):
            path = Path(folder, f"{name}.toml")
            text = agent_config(name, port, 'type = "clock"')
            path.write_text(text.replace("[federation]\n", f"[federation]\n{times}"))
            self.agents.append(_Process(stack, path, name))
        self.near, self.far = self.agents
        if self.healed(boot_time(), HEAL_WITHIN) is None:
            raise BenchmarkError("the agents have not found each other")

    def tell_line(self, what: str) -> float:
        """Break the line, or mend it; the moment at which it was done."""
        self.line.tell(do=what)
        return float(self.line.hear(done=what)["at"])

    def noticed(self, began: float, failures: int | None, peer: str | None) -> tuple[float | None, float | None]:
        """Seconds from `began` until `far` counts another failure than those before, and until the hub has no report of
        it any more from where it was; None for either that is not asked, or did not notice in time. Neither can be
        missed between two looks, however soon all is well again."""
        until = began + NOTICE_WITHIN
        by_agent = by_hub = None
        if failures is not None:
            by_agent = self.far.first(lambda look: look["failures"] > failures, began, until)
        if peer is not None:
            by_hub = self.hub.first(lambda look: look["reporting"].get("far") != peer, began, until)
        return by_agent and by_agent - began, by_hub and by_hub - began

    def healed(self, over: float, within: float) -> float | None:
        """Seconds from `over` until both agents show of each other what was true then or later; None: not in time."""
        step = step_at(over) + 1
        found = []
        for agent, other in ((self.near, "far"), (self.far, "near")):

            def current(look: dict[str, Any], other: str = other) -> bool:
                count, oldest = look["seen"].get(other, (0, 0))
                return bool(count == POOLS and oldest >= step)

            at = agent.first(current, over, over + within)
            if at is None:
                return None
            found.append(at - over)
        return max(found)

    def make(self, fault: str, found: _Found) -> None:
        """Make one fault, and see what comes of it."""
        found.times += 1
        failures: int | None = self.far.look()["failures"]
        peer: str | None = self.hub.look()["reporting"].get("far")
        wait_noticed = True
        began = boot_time()
        over: float | None = None
        if fault == "nothing" or fault.startswith(("hub frozen", "agent frozen")):
            wait_noticed = False  # it is over before anybody has to
        if fault == "reset (RST)":
            over = began = self.tell_line("reset")
        elif fault == "goodbye (GOAWAY)":
            over = began = self.tell_line("goaway")
        elif fault == "forgotten by the network":
            began = self.tell_line("forget")
        elif fault == "taken, then silence":
            # What was open is reset: it is the next connection that is silent, and is given up.
            began = self.tell_line("silent")
            two = self.far.looks[-1]["failures"] + 2
            given_up = self.far.first(lambda look: look["failures"] >= two, began, began + NOTICE_WITHIN)
            if given_up is not None:
                found.noticed.append(given_up - began)
            wait_noticed = False
            self.line.rest(began + SILENT - boot_time())
            over = self.tell_line("pass")
        elif fault == "hub killed":
            self.hub.send(signal.SIGKILL)
            peer = None
        elif fault == "agent killed":
            self.far.send(signal.SIGKILL)
            failures = None
        elif fault.endswith("frozen 3 s"):
            frozen = self.hub if fault.startswith("hub") else self.far
            frozen.send(signal.SIGSTOP)
            self.line.rest(FROZEN)
            over = boot_time()
            frozen.send(signal.SIGCONT)
        if wait_noticed:
            by_agent, by_hub = self.noticed(began, failures, peer)
            found.noticed += [by_agent] if by_agent is not None else []
            found.noticed_by_hub += [by_hub] if by_hub is not None else []
        if fault == "hub killed":
            self.hub.start()
            over = boot_time()
        elif fault == "agent killed":
            self.line.rest(AWAY)
            self.far.start()
            over = boot_time()
        elif over is None:
            over = boot_time() if fault == "nothing" else began
        healed = self.healed(over, HEAL_WITHIN)
        if healed is None:
            found.lost += POOLS
        else:
            found.healed.append(healed)
        for agent in self.agents:
            agent.first(lambda look: look["state"] == "connected", over, over + HEAL_WITHIN)
        self.line.rest(BETWEEN)


def _connections(quick: bool) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        fleet = _Fleet(stack, Path(folder), QUICK_TIMES if quick else "")
        lost = 0
        for fault, (full, few) in FAULTS.items():
            times = few if quick else full
            if not times:
                continue
            print(f"  {fault}", file=sys.stderr)
            found = _Found()
            for _ in range(times):
                fleet.make(fault, found)
            lost += found.lost
            noticed = found.noticed or found.noticed_by_hub
            if noticed:
                by_hub = found.noticed_by_hub if found.noticed else []
                figures.append(_seconds(f"{fault}: noticed", noticed, by_hub))
            if found.healed:
                figures.append(_seconds(f"{fault}: healed", found.healed))
        looks = [look for agent in fleet.agents for look in agent.looks]
    judged = sum(look["judged"] for look in looks)
    younger = max(look["younger"] for look in looks)
    of = f"goal 0; {judged:,} records read"
    figures.append(Figure("records false", sum(look["false"] for look in looks), "records", of))
    figures.append(
        Figure("records lost", lost, "records", "goal 0; not back within the longest backoff and two resyncs")
    )
    figures.append(
        Figure("a record's age, too low by at most", 1000 * max(0.0, younger), "ms", "of all that were read")
    )
    return figures


def _seconds(what: str, values: Sequence[float], by_hub: Sequence[float] = ()) -> Figure:
    beside = ["once" if len(values) == 1 else f"slowest of {len(values)}: {shown(max(values))} s"]
    if by_hub:
        beside.append(f"by the hub {shown(median(by_hub))} s")
    if what in NOTES:
        beside.append(NOTES[what])
    return Figure(what, median(values), "s", "; ".join(beside))


def _hub_config(port: int, times: str = "") -> str:
    """The configuration file of a hub with default settings, but for those in `times`."""
    return (
        f'[hub]\nbind = "127.0.0.1:{port}"\nsecret = "{SECRET}"\n{times}[metrics]\nbind = "127.0.0.1:0"\n'
        '[admin]\nbind = "127.0.0.1:0"\n[log]\nlevel = "info"\nformat = "json"\n'
    )


# --- slow and hostile peers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Hub:
    child: Child
    port: int
    metrics_port: int

    def cut(self) -> Counter[str]:
        """Connections that it has ended because of what their peer did, by reason."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            text = answer.read().decode()
        rows = re.findall(r'^trio_federation_hub_connections_cut_total\{reason="(\w+)"\} (\d+)', text, re.MULTILINE)
        return Counter({reason: int(number) for reason, number in rows})


@contextmanager
def _hub(config: str) -> Iterator[_Hub]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "hub.toml")
        path.write_text(config)
        with running(command(), "run", path, name="the hub") as child:
            started = child.hear(event="started")
            yield _Hub(child, started["hub_ports"][0], started["metrics_port"])


@dataclass
class _Measured:
    """The honest watchers' side of something. Seconds; cores."""

    #: of each turn, how long each report took to each watcher
    turns: list[list[float]] = field(default_factory=list)
    cpu: float = 0.0
    lasted: float = 0.0
    lost: int = 0

    def took(self, percent: float) -> float:
        """That percentile of a turn, of the median turn: what else the machine does in one of them counts least."""
        return median([percentile(turn, percent) for turn in self.turns])

    @property
    def cores(self) -> float:
        """Cores of the hub that were busy."""
        return self.cpu / self.lasted


def _hostile(quick: bool) -> list[Figure]:
    figures = []
    watchers = QUICK_WATCHERS if quick else WATCHERS
    with (
        _hub(_hub_config(0)) as hub,
        running_module("faults_peers", hub.port, watchers, name="honest peers") as peers,
        running_module("faults_hostile", hub.port, name="hostile peers") as hostile,
    ):
        peers.hear(ready=True)
        hostile.hear(ready=True)
        _measure(hub, peers, 0.5, _Measured())  # to warm up
        for attack in QUICK_ATTACKS if quick else ATTACKS:
            print(f"  {ATTACKS[attack]}", file=sys.stderr)
            phase, turns = (QUICK_PHASE, 1) if quick else (PHASE, TURNS)
            figures += _attacked(hub, peers, hostile, attack, ATTACKS[attack], (phase, phase), turns)
        if not quick:
            print(f"  {WITHIN_NAME}", file=sys.stderr)
            phases = (WITHIN_BEFORE, WITHIN_DURING)
            figures += _attacked(hub, peers, hostile, WITHIN, WITHIN_NAME, phases, WITHIN_TURNS)
    return figures


def _attacked(
    hub: _Hub, peers: Child, hostile: Child, attack: str, name: str, phases: tuple[float, float], turns: int
) -> list[Figure]:
    before, during = _Measured(), _Measured()
    connections = cut = 0
    codes: Counter[str] = Counter()
    counted = hub.cut()
    for _ in range(turns):
        _measure(hub, peers, phases[0], before)
        if attack != "nothing":
            hostile.tell(attack=attack, seconds=phases[1])
            hostile.hear(began=True)
        _measure(hub, peers, phases[1], during)
        if attack != "nothing":
            answer = hostile.hear(done=True)
            connections += answer["connections"]
            cut += answer["cut"]
            codes.update(answer["codes"])
        _settle(hub)
    if not all(before.turns) or not all(during.turns):
        raise BenchmarkError(f"{name}: no report has arrived at any watcher")
    figures = []
    for percent in (50, 99):
        figures.append(
            compared(
                f"{name}: p{percent}",
                1000 * during.took(percent),
                "ms",
                1000 * before.took(percent),
                "before" if percent < 99 else f"goal {LATENCY_GOAL:g}x: before",
            )
        )
    reasons = ", ".join(f"{number} {reason}" for reason, number in (hub.cut() - counted).items() if number)
    told = ", ".join(f"{number} {code}" for code, number in codes.items())
    beside = f"{before.cores:.2g} before"
    if connections:
        beside += f"; {connections} connections"
    if reasons:
        beside += f", counted as cut: {reasons}"
    if told:
        beside += f"; told {told}"
    if before.lost or during.lost:
        beside += f"; {before.lost + during.lost} reports lost"
    figures.append(Figure(f"{name}: the hub's CPU", during.cores, "cores", beside))
    return figures


def _settle(hub: _Hub) -> None:
    """Wait until the hub has nothing left to do."""
    deadline = time.perf_counter() + SETTLE_WITHIN
    while time.perf_counter() < deadline:
        used = hub.child.cpu_seconds()
        hub.child.rest(0.2)
        if hub.child.cpu_seconds() - used < 0.02:
            return


def _measure(hub: _Hub, peers: Child, seconds: float, into: _Measured) -> None:
    used, began = hub.child.cpu_seconds(), time.perf_counter()
    peers.tell(measure=seconds)
    answer = peers.hear(done=True)
    into.cpu += hub.child.cpu_seconds() - used
    into.lasted += time.perf_counter() - began
    into.turns.append(answer["took"])
    into.lost += answer["lost"]


# --- memory ----------------------------------------------------------------------------------------------------------


class _MemoryWatch:
    """What a process holds at most, and what the kernel holds for all TCP connections of the machine, inside a block.
    Bytes."""

    def __init__(self, child: Child) -> None:
        self.resident = 0
        self.sockets = 0
        self._child = child
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(_MEMORY_LOOK):
            self.resident = max(self.resident, self._child.resident_bytes())
            self.sockets = max(self.sockets, _socket_bytes())


def _socket_bytes() -> int:
    """Bytes in the buffers of all TCP connections."""
    text = Path("/proc/net/sockstat").read_text()
    found = re.search(r"^TCP: .* mem (\d+)", text, re.MULTILINE)
    return int(found[1]) * os.sysconf("SC_PAGE_SIZE") if found else 0


def _memory(quick: bool) -> list[Figure]:
    watchers, identities, rounds = QUICK_MANY if quick else (MANY_WATCHERS, IDENTITIES, ROUNDS)
    at_most: list[_MemoryWatch] = []
    took: list[float] = []
    for stalled in (0, 1):
        print(f"  memory, {stalled} stalled of {watchers} watchers", file=sys.stderr)
        with (
            _hub(hub_config()) as hub,
            running_module("faults_peers", hub.port, watchers - stalled, name="honest peers") as peers,
            running_module("faults_hostile", hub.port, name="hostile peers") as hostile,
        ):
            peers.hear(ready=True)
            hostile.hear(ready=True)
            if stalled:
                hostile.tell(stall=True)
                hostile.hear(done=True)
            with _MemoryWatch(hub.child) as watch:
                peers.tell(identities=identities, rounds=rounds)
                took.append(median(peers.hear(done=True)["took"]))
                hub.child.rest(0.5)
            at_most.append(watch)
    (none, one) = at_most
    what = f"{identities:,} identities × {watchers}, 1 of them stalled"
    return [
        Figure(
            f"{what}: the hub's memory",
            one.resident / 1e6,
            "MB",
            f"none stalled {none.resident / 1e6:.1f} MB; goal {MEMORY_GOAL:g}x: {one.resident / none.resident:.3f}x",
            one.resident / none.resident,
        ),
        compared(
            f"{what}: kernel's buffers, of the whole machine",
            one.sockets / 1e6,
            "MB",
            none.sockets / 1e6,
            "none stalled",
        ),
        compared(f"{what}: until all others have all", took[1], "s", took[0], "none stalled"),
    ]


# --- a storm ---------------------------------------------------------------------------------------------------------


def _storm(quick: bool) -> list[Figure]:
    agents = QUICK_FLEET if quick else FLEET
    print(f"  a storm of {agents}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder, "hub.toml")
        hidden = '[[hub.policy]]\nclusters = ["*"]\nsee = ["nothing/nothing"]\n'
        path.write_text(_hub_config(0) + hidden)
        hub = _Process(stack, path, "the hub")
        path.write_text(_hub_config(hub.port) + hidden)
        fleet = stack.enter_context(running_module("faults_fleet", hub.port, agents, name="the fleet"))
        fleet.hear(ready=True)
        fleet.tell(watch=True)
        fleet.hear(watching=True)
        killed = boot_time()
        hub.send(signal.SIGKILL)
        hub.start()
        up = boot_time()
        used = hub.child.cpu_seconds()
        answer = fleet.hear(done=True)
        cpu = hub.child.cpu_seconds() - used
    first: dict[int, float] = {}
    for number, at in answer["dialled"]:
        first.setdefault(number, at)
    first_ones = Counter(int(at - killed) for at in first.values())
    attempts = Counter(int(at - killed) for _, at in answer["dialled"])
    most_first, most = max(first_ones.values()), max(attempts.values())
    tries = len(answer["dialled"])
    return [
        Figure(f"hub restarted, {agents} agents: all back", answer["at"] - killed, "s",
               f"after it was killed; it was up again after {up - killed:.2f} s"),
        Figure(f"hub restarted, {agents} agents: first attempts in one second, at most", most_first, "attempts",
               f"{100 * most_first / agents:.3g}% of the agents; goal 10%; second by second {_by_second(first_ones)}"),
        Figure(f"hub restarted, {agents} agents: all attempts in one second, at most", most, "attempts",
               f"{100 * most / agents:.3g}% of the agents; second by second {_by_second(attempts)}"),
        Figure(f"hub restarted, {agents} agents: attempts", tries, "attempts", f"{tries / agents:.2f} each"),
        Figure(f"hub restarted, {agents} agents: the hub's CPU until all are back", cpu, "s"),
    ]  # fmt: skip


def _by_second(attempts: Counter[int]) -> str:
    return ", ".join(str(attempts[second]) for second in range(max(attempts) + 1))

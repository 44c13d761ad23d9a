"""A fleet that is kept in motion for minutes: a hub as a process of its own, agents in a few others, a proxy in front
of each agent. What is done to it is drawn from a seed; what the processes hold is measured all the while, and judged at
the end. What a process tells of itself is `census.py`, what agents do by themselves `worker.py`, what counts as growth
`growth.py`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.fleet import is_fault
from tests.chaos.proxy import Mode, Proxy, connector
from tests.hostile.peers import REPORT_PATH, WATCH_PATH, Hostile, called
from tests.process.running import Program, environment, hub_file
from tests.soak import census
from tests.soak.growth import Growth, Measured, complaints, growth

ROOT = Path(__file__).resolve().parents[2]
SECRET = "the-secret-of-a-soak"
HUB_SETTINGS = 'ttl = "5s"\ngrace = "2s"\nkeepalive = "1s"\nsilence_limit = "3s"\nlimits = { first_message = "3s" }'
#: Seconds for a process to start, to answer or to end, on a busy machine.
PATIENCE = 120.0
#: Seconds between two scrapes of the hub and of each other process, about.
SCRAPE_INTERVAL = 3.0
#: Seconds between two looks at what nobody tells of.
LOOK_INTERVAL = 0.2
#: Seconds in which what is left over has to be gone: some TTLs.
LEFT_WITHIN = 40.0
#: stands after the name of what was measured then
AT_REST = " at rest"
#: Threads beyond those of the beginning: Trio keeps idle ones for ten seconds.
SPARE_THREADS = 3
#: Of these it is the least that counts. Consumers of an agent may hold the records from before a resync, which are
#: other objects, or those from after it already: in a process of ten agents ten thousand blocks more or less.
LEAST = (f"blocks{AT_REST}", f"objects{AT_REST}")


class Kind(NamedTuple):
    """Something that is done to the fleet."""

    name: str
    #: seconds between two of them, on average, in a fleet of 50
    interval: float


END = Kind("agent ended in order", 5.0)
LOSE = Kind("agent lost without a word", 12.0)
CUT = Kind("connection cut", 5.0)
RESET = Kind("connection reset", 5.0)
STALL_WATCH = Kind("watcher stalled", 8.0)
STALL = Kind("connection stalled", 15.0)
FREEZE = Kind("process frozen", 45.0)
VISIT = Kind("cluster came once", 3.0)
WRONG_SECRET = Kind("call with a wrong secret", 1.0)
BAD_ID = Kind("call with a bad id", 1.5)
GARBAGE = Kind("garbage", 5.0)
KINDS = (END, LOSE, CUT, RESET, STALL_WATCH, STALL, FREEZE, VISIT, WRONG_SECRET, BAD_ID, GARBAGE)


@dataclass(frozen=True)
class Plan:
    """How large a fleet, for how long, and how it is looked at. Seconds."""

    seed: int
    agents: int
    processes: int
    #: of all the churn
    length: float
    #: so many times it rests: everything is healed then, and what is held can be compared
    rests: int
    #: seconds before it counts as rested: more than any TTL, as what is remembered of who has gone is no leak
    forgotten_after: float
    #: that do not count yet: caches fill
    warm_up: float
    measure_interval: float
    #: How many blocks of memory Python may have handed out more of, in each process at rest, in the last third than in
    #: the first, garbage collected. What is kept of anything is a block or more.
    allowed_blocks: float
    #: The same in bytes of the process's own memory, at any time. It says what blocks say more coarsely, and sees what
    #: Python does not count, such as buffers and threads.
    allowed_memory: float
    #: everything happens so many times as often as `KINDS` say
    pace: float = 1.0

    @property
    def allowed(self) -> dict[str, float]:
        """By how much what is measured of a process may grow from the first third to the last."""
        return {
            f"blocks{AT_REST}": self.allowed_blocks,
            "own RSS": self.allowed_memory,
            f"descriptors{AT_REST}": 0.0,
            f"threads{AT_REST}": SPARE_THREADS,
            f"tasks{AT_REST}": 0.0,
            f"tables{AT_REST}": 0.0,
        }


class Process:
    """One process of the fleet."""

    def __init__(self, name: str, program: Program, census_file: Path) -> None:
        self.name = name
        self.program = program
        self.measured = Measured()
        self._census_file = census_file
        self._ordering = trio.Lock()

    @property
    def pid(self) -> int:
        """Its own."""
        return self.program.process.pid

    async def order(self, what: str, value: Any = None) -> None:
        """Tell a worker to do something."""
        assert self.program.process.stdin is not None
        async with self._ordering:
            try:
                await self.program.process.stdin.send_all(f"{json.dumps({what: value})}\n".encode())
            except trio.BrokenResourceError:
                code = await self.program.ended()
                said = "\n".join(self.program.lines[-100:])
                raise AssertionError(f"{self.name} has ended with {code}, and said last:\n{said}") from None

    async def answer(self, what: str, value: Any = None, number: int = 1) -> Any:
        """Wait for a worker's word: the `number`th of a kind, with that value where one is given."""
        found: list[Any] = []

        def said() -> bool:
            told = [json.loads(line) for line in self.program.output.split("\n")[:-1]]
            found[:] = [each[what] for each in told if what in each and value in (None, each[what])]
            return len(found) >= number

        await self.program.until(said)
        return found[number - 1]

    def descriptors(self) -> int:
        """How many are open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory(self) -> dict[str, float]:
        """Bytes of its memory: all that is resident, and what is its own."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
        return {"RSS": int(sizes["VmRSS"].split()[0]) * 1024.0, "own RSS": int(sizes["RssAnon"].split()[0]) * 1024.0}

    async def census(self) -> dict[str, Any]:
        """What it says that it holds; also once it goes on after it was stopped."""
        self._census_file.unlink(missing_ok=True)
        self.program.send(census.ASK)
        with trio.fail_after(PATIENCE):
            while not self._census_file.exists():  # noqa: ASYNC110 - a file tells nobody
                await trio.sleep(0.02)
        told: dict[str, Any] = json.loads(self._census_file.read_bytes())
        return told

    async def measure(self, at: float, when: str) -> dict[str, Any]:
        """Measure it; its census. `when`: goes after the names of what was measured."""
        told = await self.census()
        numbers = {name: told[name] for name in told if isinstance(told[name], int)}
        numbers |= {"tasks": sum(told["tasks"].values()), "descriptors": self.descriptors()} | self.memory()
        self.measured.add(at, {f"{name}{when}": number for name, number in numbers.items()})
        if when:
            self.measured.types.append((at, told["types"]))
        return told


class Agent(NamedTuple):
    """Where an agent is, and the way that it takes."""

    worker: Process
    proxy: Proxy


@dataclass
class Report:
    """What a soak has shown."""

    #: the table of figures
    table: str
    #: what was wrong, a line each; nothing may be
    troubles: list[str]
    #: what has grown too much, a line each; nothing where that was not judged
    growth: list[str]


class Fleet:
    """The fleet, and what is done to it."""

    def __init__(self, plan: Plan, folder: Path, nursery: trio.Nursery, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.done: Counter[str] = Counter()
        self.troubles: list[str] = []
        self.agents: dict[str, Agent] = {}
        self.workers: list[Process] = []
        self._folder = folder
        self._nursery = nursery
        self._say = say
        self._random = random.Random(f"{plan.seed} fleet")
        #: agents to which something is done just now
        self._busy: dict[str, None] = {}
        self._endings: Counter[str] = Counter()
        self._strangers = 0
        self._told_at = 0.0
        self._checks = 0
        self._generators = {kind: random.Random(f"{plan.seed} {kind.name}") for kind in KINDS}
        self._told_by_workers: dict[str, Counter[str]] = {}

    # Its beginning and its end.

    async def start(self) -> None:
        """Start everything, and wait until everybody knows everything."""
        config = hub_file(self._folder / "hub.toml", secret=SECRET, more=HUB_SETTINGS, level="info")
        self.hub = await self._open("hub", "-m", "tests.soak.census", "run", str(config))
        await self.hub.program.started()
        await trio.sleep(1.0)  # it says that it has started while its last tasks begin
        told = await self.hub.census()
        self.empty_hub: dict[str, Any] = {
            "descriptors": self.hub.descriptors(),
            "threads": told["threads"],
            "tasks": told["tasks"],
        }
        port = self.hub.program.hub_port
        names = [f"cluster-{number}" for number in range(self.plan.agents)]
        for number in range(self.plan.processes):
            own = names[number :: self.plan.processes]
            proxies = {name: Proxy(connector(port), random.Random(f"{self.plan.seed} {name}")) for name in own}
            for proxy in proxies.values():
                self._nursery.start_soon(proxy.run)
            settings = {
                "seed": self.plan.seed * 1000 + number,
                "agents": {name: proxy.port for name, proxy in proxies.items()},
                "visitors_port": port,
            }
            worker = await self._open(f"agents-{number}", "-m", "tests.soak.worker", json.dumps(settings))
            self.workers.append(worker)
            for name, proxy in proxies.items():
                self.agents[name] = Agent(worker, proxy)
        self.ports = {worker.name: await worker.answer("port") for worker in self.workers}
        self.ports[self.hub.name] = self.hub.program.metrics_port
        await self.check()

    async def _open(self, name: str, *arguments: str) -> Process:
        file = self._folder / f"{name}.census"
        process = await trio.lowlevel.open_process(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment() | {census.VARIABLE: str(file), "SOAK_SECRET": SECRET, "PYTHONPATH": str(ROOT)},
        )
        program = Program(process, name)
        self._nursery.start_soon(program.run)
        return Process(name, program, file)

    @property
    def processes(self) -> list[Process]:
        """All of them: the hub first."""
        return [self.hub, *self.workers]

    async def check(self) -> None:
        """Wait until every agent knows everything that is true, and nothing else: nothing changes meanwhile."""
        self._checks += 1
        number = self._checks
        truth: list[Any] = []
        for worker in self.workers:
            await worker.order("truth")
            truth += await worker.answer("truth", number=number)
        for worker in self.workers:
            await worker.order("check", truth)
        for worker in self.workers:
            wrong = await worker.answer("wrong", number=number)
            self.troubles += [f"{name} {what}" for name, what in wrong.items()]
        wanted = {
            "registry_records": len(truth),
            "hub_watchers": len(self.agents),
            "hub_reporters": len(self.agents),
        }
        found: dict[str, float] = {}
        with trio.move_on_after(LEFT_WITHIN):
            while found != wanted:
                counts = await self.hub_counts()
                found = {name: counts[name] for name in wanted}
                await trio.sleep(LOOK_INTERVAL)
        if found != wanted:
            self.troubles.append(f"the hub counts {found}, and there are {wanted}")

    async def run(self) -> None:
        """The churn, and the rests in it, until everything is quiet again."""
        self._began_at = trio.current_time()
        await self._measure()
        for _ in range(self.plan.rests):
            await self._churn(self.plan.length / self.plan.rests)
            await self.check()
            await trio.sleep(self.plan.forgotten_after)
            await self._measure(AT_REST)
        self.length = self._elapsed

    async def _churn(self, length: float) -> None:
        for worker in self.workers:
            await worker.order("churn", True)
        # What was begun when it is over is brought to its end: who went comes back.
        async with trio.open_nursery() as acting, trio.open_nursery() as nursery:
            for kind in KINDS:
                nursery.start_soon(self._repeat, kind, acting)
            nursery.start_soon(self._scrape)
            nursery.start_soon(self._keep_measuring)
            await trio.sleep(length)
            nursery.cancel_scope.cancel()
        for worker in self.workers:
            await worker.order("churn", False)

    async def end(self) -> None:
        """Nothing is left over, and everybody ends well."""
        for process in self.processes:
            await self._wait_nothing_left(process)
        for worker in self.workers:
            assert worker.program.process.stdin is not None
            await worker.program.process.stdin.aclose()
            if (code := await worker.program.ended()) != 0:
                self.troubles.append(f"{worker.name} has ended with {code}")
        await self._wait_hub_empty()
        if (code := await self.hub.program.stop()) != 0:
            self.troubles.append(f"the hub has ended with {code}")
        for process in self.processes:
            lines = process.program.lines
            faults = dict.fromkeys(line for line in lines if is_fault(line))
            self.troubles += [f"{process.name} has said: {line[:500]}" for line in list(faults)[:5]]
            if any(SECRET in line for line in lines):
                self.troubles.append(f"{process.name} has told the secret")

    async def _wait_nothing_left(self, process: Process) -> None:
        """Descriptors, threads and tasks are no more than before the churn."""
        left = ""
        with trio.move_on_after(LEFT_WITHIN):
            while True:
                told = await process.census()
                tasks, found = sum(told["tasks"].values()), process.descriptors()
                before = {name: process.measured.series[name][0].value for name in ("descriptors", "threads", "tasks")}
                left = f"{found} descriptors, {told['threads']} threads, {tasks} tasks, and before the churn {before}"
                if (
                    found <= before["descriptors"]
                    and told["threads"] <= before["threads"] + SPARE_THREADS
                    and tasks <= before["tasks"]
                ):
                    return
                await trio.sleep(LOOK_INTERVAL)
        self.troubles.append(f"{process.name} still holds {left}")

    async def _wait_hub_empty(self) -> None:
        """Nobody is there any more: the hub holds nothing, as when it was started."""
        left: dict[str, float] = {}
        with trio.move_on_after(LEFT_WITHIN):
            while True:
                counts = await self.hub_counts()
                told = await self.hub.census()
                left = {name: counts[name] for name in _NOTHING_OF if counts[name]}
                left |= {name: told[name] for name in ("records", "tombstones", "instances") if told[name]}
                for name, now in {
                    "descriptors": self.hub.descriptors(),
                    "threads": told["threads"] - SPARE_THREADS,
                }.items():
                    if now > self.empty_hub[name]:
                        left[f"{name}, {self.empty_hub[name]} when it was started"] = now
                left |= Counter(told["tasks"]) - Counter(self.empty_hub["tasks"])
                if not left:
                    return
                await trio.sleep(LOOK_INTERVAL)
        self.troubles.append(f"the hub is alone, and still holds {left}")

    # What is done to it.

    async def _repeat(self, kind: Kind, acting: trio.Nursery) -> None:
        generator = self._generators[kind]
        while True:
            await trio.sleep(generator.expovariate(self.plan.pace * self.plan.agents / 50 / kind.interval))
            acting.start_soon(self._do, kind, random.Random(generator.getrandbits(64)))

    async def _do(self, kind: Kind, generator: random.Random) -> None:
        if kind in (VISIT, WRONG_SECRET, BAD_ID, GARBAGE):
            await self._be_strange(kind, generator)
            self.done[kind.name] += 1
            return
        if kind is FREEZE:
            worker = generator.choice(self.workers)
            worker.program.send(signal.SIGSTOP)
            await trio.sleep(generator.uniform(0.5, 4.0))
            worker.program.send(signal.SIGCONT)
            self.done[kind.name] += 1
            return
        free = [name for name in self.agents if name not in self._busy]
        if not free:
            return
        name = generator.choice(free)
        self._busy[name] = None
        try:
            await self._do_to(kind, name, generator)
        finally:
            del self._busy[name]
        self.done[kind.name] += 1

    async def _do_to(self, kind: Kind, name: str, generator: random.Random) -> None:
        worker, proxy = self.agents[name]
        match kind:
            case _ if kind is CUT:
                proxy.cut()
            case _ if kind is RESET:
                proxy.reset()
            case _ if kind in (STALL, STALL_WATCH):
                for way in proxy.ways if kind is STALL else (proxy.back,):
                    way.stall()
                await trio.sleep(generator.uniform(0.5, 4.5))
                proxy.heal()
            case _:
                if kind is LOSE:
                    proxy.set_mode(Mode.REFUSE)
                    proxy.reset()
                await worker.order("end", name)
                self._endings[name] += 1
                await worker.answer("ended", name, self._endings[name])
                await trio.sleep(generator.uniform(0.0, 6.0))
                proxy.heal()
                await worker.order("start", name)

    async def _be_strange(self, kind: Kind, generator: random.Random) -> None:
        self._strangers += 1
        name = f"stranger-{self._strangers}"
        if kind is VISIT:
            await generator.choice(self.workers).order("visit", name)
            return
        async with Hostile.connected(self.hub.program.hub_port) as peer:
            if kind is GARBAGE:
                await peer.send(generator.randbytes(generator.randrange(1, 5000)))
            else:
                secret = generator.randbytes(8).hex() if kind is WRONG_SECRET else SECRET
                cluster = name if kind is WRONG_SECRET else f"Bad_{name}!"
                await peer.begin()
                path = generator.choice((REPORT_PATH, WATCH_PATH))
                await peer.send(called(1, path, b"\0\0\0\0\0", cluster=cluster, secret=secret))
            with trio.move_on_after(generator.uniform(0.1, 2.0)):
                fate = await peer.listen(until_ended=1)
                if kind is not GARBAGE and not fate.closed and 1 in fate.statuses and fate.statuses[1] == 0:
                    self.troubles.append(f"a {kind.name} was let in")

    async def _scrape(self) -> None:
        async with _client() as client:
            while True:
                for name, port in self.ports.items():
                    for path in ("metrics", "readyz"):
                        try:
                            answer = await client.get(f"http://127.0.0.1:{port}/{path}")
                        except httpx.TransportError:
                            # It was frozen for longer than its own patience with those who ask.
                            self.done["scrape without an answer"] += 1
                            continue
                        if answer.status_code != 200 and not (path == "readyz" and answer.status_code == 503):
                            self.troubles.append(f"{name} answers {path} with {answer.status_code}")
                        self.done["scrape"] += 1
                    await trio.sleep(SCRAPE_INTERVAL / len(self.ports))

    # What is measured.

    @property
    def _elapsed(self) -> float:
        return trio.current_time() - self._began_at

    async def hub_counts(self) -> dict[str, float]:
        """What the hub's metrics say, by name: of those with labels the sums."""
        async with _client() as client:
            answer = await client.get(f"http://127.0.0.1:{self.hub.program.metrics_port}/metrics")
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name.startswith("trio_federation_") and not sample.name.endswith("_created"):
                    found[sample.name.removeprefix("trio_federation_")] += sample.value  # type: ignore[assignment]
        return {name: float(value) for name, value in found.items()}

    async def _measure(self, when: str = "") -> None:
        async def measure(process: Process) -> None:
            told = await process.measure(self._elapsed, when)
            if "events" in told:
                self._told_by_workers[process.name] = Counter(told["events"])

        # Side by side: one that is frozen keeps nobody waiting.
        async with trio.open_nursery() as nursery:
            for process in self.processes:
                nursery.start_soon(measure, process)
        counts = await self.hub_counts()
        self.hub.measured.add(self._elapsed, {f"{name}{when}": counts.get(name, 0.0) for name in _HUB_COUNTS})

    async def _keep_measuring(self) -> None:
        while True:
            await trio.sleep(self.plan.measure_interval)
            await self._measure()
            if self._elapsed - self._told_at >= 60.0:
                self._told_at = self._elapsed
                self._say(self._progress())

    @property
    def events(self) -> Counter[str]:
        """What has happened so far, by kind."""
        return sum(self._told_by_workers.values(), Counter(self.done))

    def _progress(self) -> str:
        hub = self.hub.measured
        agents = [worker.measured for worker in self.workers]

        def now(measured: Measured, name: str) -> float:
            return measured.series[name][-1].value

        def over(name: str, unit: float = 1.0) -> str:
            values = [now(each, name) / unit for each in agents]
            return f"{min(values):,.1f}-{max(values):,.1f}" if unit != 1.0 else f"{min(values):,.0f}-{max(values):,.0f}"

        return (
            f"{self._elapsed / 60:5.1f} min: hub RSS {now(hub, 'RSS') / 2**20:.1f} MiB"
            f" ({now(hub, 'own RSS') / 2**20:.1f} own), {now(hub, 'blocks'):,.0f} blocks,"
            f" {now(hub, 'descriptors'):.0f} descriptors, {now(hub, 'threads'):.0f} threads,"
            f" {now(hub, 'tasks'):.0f} tasks, {now(hub, 'records'):.0f} records,"
            f" {now(hub, 'tombstones'):.0f} tombstones;"
            f" agents RSS {over('RSS', 2**20)} MiB, {over('blocks')} blocks, {over('descriptors')} descriptors;"
            f" {self.events.total():,} events"
        )

    # What it comes to.

    def report(self, *, judge_growth: bool = True) -> Report:
        """What it has shown. `judge_growth`: whether it was long enough for that."""
        grown = [
            line
            for process in (self.processes if judge_growth else [])
            for line in complaints(
                process.name, process.measured, warm_up=self.plan.warm_up, allowed=self.plan.allowed, least=LEAST
            )
        ]
        return Report(self._table(), list(self.troubles), grown)

    def _table(self) -> str:
        moments = [self.length * part for part in (1 / 6, 1 / 2, 1.0)]
        lines = [
            f"{self.plan.agents} agents in {self.plan.processes} processes, {self.length / 60:.1f} min, seed"
            f" {self.plan.seed}",
            f"{'':<34}{'at ' + ', '.join(f'{each / 60:.1f}' for each in moments) + ' min':>36}"
            f"{'of thirds, median or least':>36}{'growth':>12}",
        ]
        for process in self.processes:
            for name in _SHOWN:
                points = process.measured.series[name]
                unit, digits = (2**20, 2) if "RSS" in name else (1, 0)
                line = f"{process.name + ': ' + name + (', MiB' if unit > 1 else ''):<34}"
                line += f"{_row([process.measured.at(name, moment) for moment in moments], unit, digits):>36}"
                if len([point for point in points if point.at >= self.plan.warm_up]) >= 3:
                    found = growth(points, self.plan.warm_up, least=name in LEAST)
                    line += f"{_row(found, unit, digits):>36}{found.amount / unit:>+12,.{digits}f}"
                lines.append(line)
        lines.append("events: " + ", ".join(f"{count:,} × {name}" for name, count in sorted(self.events.items())))
        return "\n".join(lines)


def _client() -> httpx.AsyncClient:
    """One that asks for every connection to be closed: a server keeps it for seconds after its client has gone."""
    return httpx.AsyncClient(trust_env=False, timeout=PATIENCE, headers={"Connection": "close"})


def _row(values: Growth | list[float], unit: float, digits: int) -> str:
    return ", ".join(f"{value / unit:,.{digits}f}" for value in values)


#: What the table shows of every process.
_SHOWN = (
    "RSS",
    "own RSS",
    "blocks",
    f"blocks{AT_REST}",
    f"objects{AT_REST}",
    "descriptors",
    f"descriptors{AT_REST}",
    f"threads{AT_REST}",
    f"tasks{AT_REST}",
    f"tables{AT_REST}",
    f"records{AT_REST}",
    f"tombstones{AT_REST}",
)
#: What the hub holds nothing of when nobody is there.
_NOTHING_OF = ("registry_records", "hub_watchers", "hub_reporters", "queue_depth")
#: What is measured of the hub besides.
_HUB_COUNTS = (*_NOTHING_OF, "hub_connections_cut_total", "hub_calls_refused_total")


@asynccontextmanager
async def open_fleet(plan: Plan, folder: Path, say: Callable[[str], None]) -> AsyncIterator[Fleet]:
    """A fleet in which everybody knows everything; killed at the end, where it was not ended. `say` is told how it
    goes, a line a minute."""
    async with trio.open_nursery() as nursery:
        fleet = Fleet(plan, folder, nursery, say)
        try:
            await fleet.start()
            yield fleet
        finally:
            nursery.cancel_scope.cancel()


async def soak(plan: Plan, folder: Path, say: Callable[[str], None], *, judge_growth: bool = True) -> Report:
    """Run a whole soak; what it has shown. `judge_growth`: whether it is long enough for that."""
    async with open_fleet(plan, folder, say) as fleet:
        await fleet.run()
        await fleet.end()
    return fleet.report(judge_growth=judge_growth)

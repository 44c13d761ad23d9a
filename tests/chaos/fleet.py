"""A fleet of real `trio-federation run` processes on one machine: a hub, and agents that reach it through proxies of
their own. It does to them what a script says, looks at every registry all the time, and says after each round what was
false, what did not heal, what was left behind, and how long things took. What is false is judged by the oracle; what
goes wrong is drawn in `faults.py`."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx
import trio

from tests.chaos.faults import HUB, Fault, Kind, Script
from tests.chaos.oracle import Answer, Breach, Oracle, Seen
from tests.chaos.proxy import Mode, Proxy, connector, reserved_port
from tests.process.running import Program, environment
from trio_federation.retry import LONGEST

# The fleet's own times, in seconds: far shorter than the defaults, so that what takes a minute in production takes some
# seconds.

TTL = 3.0
RESYNC_INTERVAL = 1.0
REPORT_INTERVAL = 0.2
KEEPALIVE = 0.5
SILENCE_LIMIT = 2.0
HUB_TTL = 4.0
GRACE = 2.0
#: after which a connection that worked makes delays small again; no configuration can say it, and the minute that it is
#: would be many rounds
STABLE = 1.0

# What is asked of it. In seconds.

#: What is shown may be that much behind: the source is asked (REPORT_INTERVAL), changes are gathered (0.2 s), twice a
#: process has to get its turn on a busy machine. Healed means: no older than this.
CURRENT_WITHIN = 1.5
#: From the end of the last fault until everybody knows everything again: the longest backoff and two resyncs. Besides,
#: it takes that long until it is seen, as only what was said after that end counts.
HEAL_WITHIN = LONGEST + 2 * RESYNC_INTERVAL + CURRENT_WITHIN
#: What no age can know of, because it is in every message alike: the way through two sockets and two event loops on a
#: busy machine, and the milliseconds in which ages are told. The moments of an answer need no allowance: a record is
#: judged by the moment before it was asked for.
SLACK = 0.5
#: From a signal to the end of a process that is told to stop: 5 s are promised; the rest is for a busy machine to
#: start the handler, and to report the end.
STOP_WITHIN = 6.0
#: For a live agent to answer who asks for its records.
ANSWER_WITHIN = 5.0
#: Between two looks at a registry, and between two changes of a cluster's number, about.
LOOK_INTERVAL = 0.1
CHANGE_INTERVAL = 0.3
#: For everything to start on a busy machine.
PATIENCE = 60.0
#: Threads that may be there besides those of the beginning: Trio keeps idle ones for ten seconds.
SPARE_THREADS = 2

POOLS = ("pool-0", "pool-1", "pool-2")
SECRET = "the-fleets-own-secret"
NAMESPACE, ENV = "team-a", "python"

#: The command `trio-federation`, and a signal that has it write down its tasks and threads.
_DRIVER = f"""
import asyncio, collections, gc, json, os, signal, threading
import trio
from trio_federation import retry
from trio_federation.cli import main

assert retry.STABLE == 60.0
retry.STABLE = {STABLE}

def tell():
    found = collections.Counter()
    waiting = [trio.lowlevel.current_root_task()]
    while waiting:
        task = waiting.pop()
        found["trio: " + task.name] += 1
        for nursery in task.child_nurseries:
            waiting += nursery.child_tasks
    for each in gc.get_objects():
        if issubclass(type(each), asyncio.Task) and not each.done():
            found["asyncio: " + each.get_coro().__qualname__] += 1
    path = os.environ["CHAOS_CENSUS"]
    with open(path + ".part", "w") as file:
        json.dump({{"tasks": found, "threads": threading.active_count()}}, file)
    os.replace(path + ".part", path)

# Between two steps of Trio's, and not in the midst of anything: a task may be half made then.
def asked(number, frame):
    trio.lowlevel.current_trio_token().run_sync_soon(tell)

signal.signal(signal.SIGUSR2, asked)
main()
"""


class Heard(Program):
    """A process, and when it has said each of its lines."""

    def __init__(self, process: trio.Process, name: str) -> None:
        super().__init__(process, name)
        self.heard_at: list[float] = []

    def _wake(self) -> None:
        self.heard_at += [trio.current_time()] * (len(self.lines) - len(self.heard_at))
        super()._wake()


class Census(NamedTuple):
    """What a process holds."""

    descriptors: int
    threads: int
    #: by name
    tasks: Counter[str]


class Figures(NamedTuple):
    """What a round has shown. Seconds."""

    #: the kind of fault
    label: str
    #: from the first fault to the first word of it in a log; None where nobody had to notice
    noticed: float | None
    #: from the end of the last fault until everybody knew everything; None: not in time
    healed: float | None
    #: records of living clusters that were not back in time
    lost: int
    #: records that were false
    false: int
    #: records of living clusters that were older than their TTL for a while, because nobody could hear of them
    expired: int
    #: the longest by which a record was older than it said
    younger: float


@dataclass
class Result:
    """A round: what was done, its figures, and what was wrong with it."""

    text: str
    figures: Figures
    troubles: list[str]

    def __str__(self) -> str:
        return "\n".join([self.text, *(f"  wrong: {text}" for text in self.troubles)])


@dataclass
class Place:
    """Where an agent runs that does not run here."""

    #: goes before its command
    prefix: tuple[str, ...]
    #: where the hub is, as seen from there
    hub_host: str
    #: opens connections to a port of its own loopback interface
    connect: Callable[[int], Callable[[], Awaitable[trio.SocketStream]]]


class Member:
    """The hub, or one agent, over all of its processes."""

    def __init__(self, name: str, config: Path, place: Place | None = None) -> None:
        self.name = name
        self.config = config
        self.place = place
        self.program: Heard | None = None
        self.frozen = False
        #: whether somebody has told the process to end
        self.ending = False
        #: set while it can be asked
        self.answers = trio.Event()
        self.asking = trio.CancelScope()
        #: whether it has shown its own records since it was started, or went on
        self.has_shown_own = False
        #: the clusters that it has shown since then
        self.has_shown: dict[str, None] = {}
        #: lines of its log that were looked at
        self.lines_read = 0
        self.programs: list[Heard] = []
        #: trio's time at which its present process was started
        self.started_at = -math.inf

    @property
    def runs(self) -> bool:
        """Whether its process is there, and nobody has told it to end."""
        return self.program is not None and not self.ending and self.program.process.returncode is None

    @property
    def pid(self) -> int:
        """Of its present process."""
        assert self.program is not None
        return self.program.process.pid

    @property
    def last_lines(self) -> list[str]:
        """What it has said last."""
        if self.program is None:
            return []
        return [line for line in self.program.lines if "fixture_file_read" not in line][-10:]

    def fall_silent(self) -> None:
        """It cannot be asked from now on."""
        self.answers = trio.Event()
        self.asking.cancel()
        self.has_shown_own = False
        self.has_shown.clear()


@dataclass
class _Round:
    """What is gathered while a round runs."""

    began_at: float
    #: trio's time at which the last fault was over
    over_at: float = math.inf
    noticed_at: float = math.inf
    breaches: list[Breach] = field(default_factory=list)
    false: dict[tuple[str, tuple[str, str], int], None] = field(default_factory=dict)
    expired: dict[tuple[str, str], None] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    #: by observer and cluster: since when it is shown as it is
    current_since: dict[tuple[str, str], float] = field(default_factory=dict)


class Fleet:
    """Use `open_fleet`."""

    def __init__(
        self,
        folder: Path,
        nursery: trio.Nursery,
        generator: random.Random,
        agents: Sequence[str],
        *,
        places: Mapping[str, Place],
    ) -> None:
        self.agents = list(agents)
        self.oracle = Oracle(TTL)
        #: answers that were judged
        self.answers = 0
        self._folder = folder
        self._nursery = nursery
        self._random = generator
        self._round = _Round(trio.current_time())
        #: seconds that something could take longer in this round, and in the one before
        self._unseen_delay = self._unseen_delay_before = 0.0
        #: by name: what the process held when it was well
        self._census: dict[str, list[Census]] = {}
        self._hub_port, self._hub_place = reserved_port()
        self.proxies = {name: Proxy(connector(self._hub_port), generator) for name in agents if name not in places}
        self.members = {HUB: Member(HUB, self._write_hub("0.0.0.0" if places else "127.0.0.1"))}
        for name in agents:
            self.members[name] = Member(name, self._write_agent(name, places.get(name)), places.get(name))

    # Its life.

    async def start(self) -> None:
        """Start everything, and wait until everybody knows everything."""
        for proxy in self.proxies.values():
            self._nursery.start_soon(proxy.run)
        for name in self.agents:
            self._nursery.start_soon(self._change, name)
        await self.start_member(HUB)
        async with trio.open_nursery() as nursery:
            for name in self.agents:
                nursery.start_soon(self.start_member, name)
        for name in self.agents:
            self._nursery.start_soon(self._look, self.members[name])
        self._round.over_at = trio.current_time()
        with trio.move_on_after(PATIENCE):
            while self._missing():  # noqa: ASYNC110 - it is the answers that are waited for
                await trio.sleep(LOOK_INTERVAL)
        if missing := self._missing():
            said = [f"{each.name}: {line}" for each in self.members.values() for line in each.last_lines]
            raise AssertionError("\n".join([*missing, *self._round.troubles, *said]))
        for _ in range(5):  # what it holds changes a little from moment to moment
            for member in self.members.values():
                self._census.setdefault(member.name, []).append(await self._count(member))
            await trio.sleep(LOOK_INTERVAL)

    async def stop(self) -> list[str]:
        """Stop everything in good order; what was wrong with that."""
        self._round = _Round(trio.current_time())
        async with trio.open_nursery() as nursery:
            for name in self.agents:
                nursery.start_soon(self.stop_member, name)
        await self.stop_member(HUB)
        self._read_logs()
        for member in self.members.values():
            for program in member.programs:
                if program.output:
                    self._round.troubles.append(f"{member.name} has printed {program.output!r}")
        return self._round.troubles

    def close(self) -> None:
        """Let go of every port."""
        for proxy in self.proxies.values():
            proxy.close()
        self._hub_place.close()

    async def round(self, script: Script) -> Result:
        """Do what a script says; see `during`."""

        async def act() -> None:
            async with trio.open_nursery() as nursery:
                for fault in script.faults:
                    nursery.start_soon(self._do, fault)

        return await self.during(act, label=script.label, text=str(script), unseen_delay=script.unseen_delay)

    async def during(
        self, act: Callable[[], Awaitable[None]], *, label: str, text: str, unseen_delay: float = 0.0
    ) -> Result:
        """Do something that goes wrong, and is over when it returns. See that nothing false is shown while it lasts and
        that everything heals after. Everybody has to be alive in the end.

        `label`: the kind of fault; `text`: what happens, for people. `unseen_delay`: seconds that something may take
        longer on its way than anybody can know."""
        now = self._round = _Round(trio.current_time())
        self._unseen_delay = max(self._unseen_delay_before, unseen_delay)
        self.oracle.youngest = 0.0
        await act()
        now.over_at = trio.current_time()
        now.current_since.clear()
        with trio.move_on_after(HEAL_WITHIN):
            while self._missing():  # noqa: ASYNC110 - it is the answers that are waited for
                await trio.sleep(LOOK_INTERVAL / 2)
        missing = self._missing()
        healed = None if missing else max(now.current_since.values()) - now.over_at
        now.troubles += [f"{HEAL_WITHIN:g} s after the last fault {what}" for what in missing]
        await self._wait_nothing_left(now.over_at + HEAL_WITHIN)
        self._read_logs()
        self._unseen_delay_before = unseen_delay
        return self._result(label, text, len(missing), healed)

    def _result(self, label: str, text: str, missing: int, healed: float | None) -> Result:
        now = self._round
        by_kind: dict[str, list[Breach]] = {}
        for breach in now.breaches:
            by_kind.setdefault(breach.kind, []).append(breach)
        for kind, breaches in by_kind.items():
            first = f"{breaches[0].at - now.began_at:.2f} s after the beginning {breaches[0].text}"
            now.troubles.append(f"{kind}, {len(breaches)} times; first: {first}")
        figures = Figures(
            label,
            None if math.isinf(now.noticed_at) else now.noticed_at - now.began_at,
            healed,
            missing * len(POOLS),
            len(now.false),
            len(now.expired) * len(POOLS),
            self.oracle.youngest,
        )
        return Result(text, figures, now.troubles)

    # Processes.

    async def start_member(self, name: str) -> None:
        """Start a process, and wait until it runs."""
        member = self.members[name]
        process = await trio.lowlevel.open_process(
            [*(member.place.prefix if member.place else ()), sys.executable, "-c", _DRIVER, "run", str(member.config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment() | {"CHAOS_CENSUS": str(self._census_file(name))},
        )
        program = Heard(process, name)
        self._nursery.start_soon(program.run)
        if name != HUB:
            self.oracle.lives(name)
        member.program, member.ending, member.lines_read = program, False, 0
        member.programs.append(program)
        member.started_at = trio.current_time()
        await program.started()
        member.answers.set()

    def freeze(self, name: str) -> None:
        """Stop a process where it is."""
        member = self.members[name]
        member.fall_silent()
        member.frozen = True
        assert member.program is not None
        member.program.send(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """Let it go on."""
        member = self.members[name]
        assert member.program is not None
        member.frozen = False
        member.program.send(signal.SIGCONT)
        member.answers.set()

    async def kill_member(self, name: str) -> None:
        """End a process without a word."""
        if (code := await self._end_member(name, signal.SIGKILL)) != -signal.SIGKILL:
            self._round.troubles.append(f"{name} had ended by itself, with code {code}")

    async def stop_member(self, name: str) -> None:
        """Have a process end in good order."""
        told = trio.current_time()
        code = await self._end_member(name, signal.SIGTERM)
        took = trio.current_time() - told
        if code != 0 or took > STOP_WITHIN:
            self._round.troubles.append(f"{name} was told to stop, and ended after {took:.2f} s with code {code}")

    async def _end_member(self, name: str, number: signal.Signals) -> int:
        member = self.members[name]
        member.ending = True
        member.fall_silent()
        assert member.program is not None
        code = await member.program.stop(number)
        if name != HUB:
            self.oracle.died(name, trio.current_time())
        self._read_log(member)
        member.program = None
        return code

    # Faults.

    async def _do(self, fault: Fault) -> None:
        await trio.sleep(fault.begin)
        async with trio.open_nursery() as nursery:
            for target in fault.targets:
                nursery.start_soon(self._do_to, fault, target)

    async def _do_to(self, fault: Fault, target: str) -> None:
        match fault.kind:
            case Kind.FREEZE_HUB | Kind.FREEZE_AGENT:
                self.freeze(target)
                await trio.sleep(fault.length)
                self.go_on(target)
            case Kind.KILL_HUB | Kind.KILL_AGENT:
                await self.kill_member(target)
                await trio.sleep(fault.length)
                await self.start_member(target)
            case Kind.STOP_HUB | Kind.STOP_AGENT:
                await self.stop_member(target)
                await trio.sleep(fault.length)
                await self.start_member(target)
            case _:
                proxy = self.proxies[target]
                _break(proxy, fault)
                await trio.sleep(fault.length)
                proxy.heal()

    # The truth.

    async def _change(self, name: str) -> None:
        while True:
            value = self.oracle.next_value(name)
            before = trio.current_time()
            _replace(self._folder / f"{name}-capacity.toml", _records(value))
            self.oracle.said(name, before, trio.current_time())
            await trio.sleep(CHANGE_INTERVAL * self._random.uniform(0.7, 1.3))

    # What is seen.

    async def _look(self, member: Member) -> None:
        relay: Proxy | None = None
        while True:
            await member.answers.wait()
            program = member.program
            assert program is not None
            port = program.admin_port
            async with trio.open_nursery() as nursery:
                if member.place is not None:
                    relay = Proxy(member.place.connect(port), self._random)
                    nursery.start_soon(relay.run)
                    port = relay.port
                with trio.CancelScope() as member.asking:
                    await self._ask(member, f"http://127.0.0.1:{port}/v1/capacity")
                nursery.cancel_scope.cancel()

    async def _ask(self, member: Member, url: str) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_WITHIN) as client:
            while True:
                asked_at = trio.current_time()
                try:
                    response = await client.get(url)
                except httpx.HTTPError as error:
                    text = f"{member.name} does not answer: {type(error).__name__}: {error}"
                    if text not in self._round.troubles:
                        self._round.troubles.append(text)
                else:
                    answered_at = trio.current_time()
                    records = {
                        (record["cluster_id"], record["member_pool"]): Seen(record["idle"], record["age"])
                        for record in response.json()["records"]
                    }
                    self.take(Answer(member.name, asked_at, answered_at, records))
                await trio.sleep(LOOK_INTERVAL)

    def take(self, answer: Answer) -> None:
        """Judge an answer."""
        self.answers += 1
        member, now = self.members[answer.observer], self._round
        breaches = self.oracle.breaches(answer, SLACK + self._unseen_delay)
        for breach in breaches:
            now.breaches.append(breach)
        if breaches:
            for key, seen in answer.records.items():
                one = Answer(answer.observer, answer.asked_at, answer.answered_at, {key: seen})
                if self.oracle.breaches(one, SLACK + self._unseen_delay):
                    now.false[answer.observer, key, seen.value] = None
        for cluster in self.agents:
            shown = all((cluster, pool) in answer.records for pool in POOLS)
            if cluster == member.name:
                if not shown and member.has_shown_own:
                    text = f"{member.name} has shown nothing of its own"
                    now.breaches.append(Breach("own", answer.asked_at, text))
                member.has_shown_own = shown
            elif shown:
                member.has_shown[cluster] = None
            elif cluster in member.has_shown and self._has_lived(cluster):
                now.expired[member.name, cluster] = None
            key = (member.name, cluster)
            current = [
                self.oracle.is_current(answer, cluster, pool, within=CURRENT_WITHIN, since=now.over_at)
                for pool in POOLS
            ]
            if not all(current):
                now.current_since[key] = math.inf
            elif now.current_since.get(key, math.inf) == math.inf:
                now.current_since[key] = answer.asked_at

    def _has_lived(self, cluster: str) -> bool:
        """Whether its agent runs, and has done so all through this round."""
        member = self.members[cluster]
        return member.runs and not member.frozen and member.started_at < self._round.began_at

    def _missing(self) -> list[str]:
        """Who does not show what is true in which cluster now. What counts was said after the faults were over: what
        was known before them proves nothing."""
        return [
            f"{observer} does not know what is true in {cluster}"
            for observer in self.agents
            for cluster in self.agents
            if self._round.current_since.get((observer, cluster), math.inf) == math.inf
        ]

    # What is left behind.

    async def _wait_nothing_left(self, until: float) -> None:
        for member in self.members.values():
            while member.runs and (left := left_over(self._census[member.name], await self._count(member))):
                if trio.current_time() > until:
                    self._round.troubles.append(f"{member.name} still holds more than before: {left}")
                    break
                await trio.sleep(LOOK_INTERVAL)

    async def _count(self, member: Member) -> Census:
        path = self._census_file(member.name)
        path.unlink(missing_ok=True)
        assert member.program is not None
        member.program.send(signal.SIGUSR2)
        with trio.fail_after(PATIENCE):
            while not path.exists():  # noqa: ASYNC110 - a file tells nobody
                await trio.sleep(0.005)
        told = json.loads(path.read_bytes())
        return Census(len(os.listdir(f"/proc/{member.pid}/fd")), told["threads"], Counter(told["tasks"]))

    def _census_file(self, name: str) -> Path:
        return self._folder / f"{name}.census"

    # What they say.

    def _read_logs(self) -> None:
        for member in self.members.values():
            self._read_log(member)
            if member.program is not None and not member.runs:
                code = member.program.process.returncode
                self._round.troubles.append(f"{member.name} has ended by itself, with code {code}")

    def _read_log(self, member: Member) -> None:
        """Look for what must not be said, and for the first word of trouble in this round."""
        program, now = member.program, self._round
        if program is None:
            return
        for index in range(member.lines_read, len(program.lines)):
            line, heard_at = program.lines[index], program.heard_at[index]
            if is_fault(line):
                now.troubles.append(f"{member.name} has said: {line}")
            elif heard_at >= now.began_at and json.loads(line)["event"] in _NOTICED:
                now.noticed_at = min(now.noticed_at, heard_at)
        member.lines_read = len(program.lines)

    # Files.

    def _write_hub(self, host: str) -> Path:
        path = self._folder / "hub.toml"
        path.write_text(
            f'[hub]\nbind = "{host}:{self._hub_port}"\nsecret = "{SECRET}"\ninsecure = true\n'
            f'ttl = "{HUB_TTL:g}s"\ngrace = "{GRACE:g}s"\n{_SIGNS_OF_LIFE}{_REST}'
        )
        return path

    def _write_agent(self, name: str, place: Place | None) -> Path:
        hub = f"127.0.0.1:{self.proxies[name].port}" if place is None else f"{place.hub_host}:{self._hub_port}"
        path = self._folder / f"{name}.toml"
        path.write_text(
            f'cluster_id = "{name}"\n[federation]\nhubs = ["{hub}"]\nsecret = "{SECRET}"\n'
            f"insecure = {'false' if place is None else 'true'}\n"
            f'ttl = "{TTL:g}s"\nresync_interval = "{RESYNC_INTERVAL:g}s"\n'
            f'report_interval = "{REPORT_INTERVAL * 1000:g}ms"\n{_SIGNS_OF_LIFE}'
            f'[[source]]\ntype = "fixtures"\npath = "{name}-capacity.toml"\n{_REST}'
        )
        return path


#: Levels of a log on which nothing is a fault of the program.
_LEVELS = ("debug", "info", "warning")
#: What a process says when it notices that another is gone.
_NOTICED = ("hub_failed", "reporter_left", "watcher_left", "connection_ended", "connection_cut")

_SIGNS_OF_LIFE = f'keepalive = "{KEEPALIVE * 1000:g}ms"\nsilence_limit = "{SILENCE_LIMIT:g}s"\n'
_REST = '[metrics]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n[log]\nlevel = "debug"\nformat = "json"\n'


@asynccontextmanager
async def open_fleet(
    folder: Path,
    seed: int,
    agents: Sequence[str] = ("a", "b", "c", "d"),
    *,
    places: Mapping[str, Place] | None = None,
) -> AsyncIterator[Fleet]:
    """A fleet that runs and knows everything; killed at the end, where it was not stopped.

    `seed`: of all that is random here, but for the scripts. `places`: of agents that do not run here; they reach the
    hub without a proxy."""
    async with trio.open_nursery() as nursery:
        generator = random.Random(f"{seed} fleet")
        fleet = Fleet(folder, nursery, generator, agents, places=places or {})
        try:
            await fleet.start()
            yield fleet
        finally:
            nursery.cancel_scope.cancel()
            fleet.close()


async def run_rounds(
    folder: Path, rounds: Sequence[Script], agents: Sequence[str], told: Callable[[Result], object]
) -> list[str]:
    """Run rounds in one fleet, all of them, whatever fails; `told` gets each as it ends. Returns what was wrong."""
    wrong: list[str] = []
    async with open_fleet(folder, rounds[0].seed, agents) as fleet:
        for each in rounds:
            result = await fleet.round(each)
            told(result)
            if result.troubles:
                wrong.append(str(result))
        wrong += await fleet.stop()
    return wrong


def left_over(well: Sequence[Census], found: Census) -> str:
    """What a process holds beyond what it held, at one moment or another, when it was well; "" for nothing."""
    descriptors, threads = max(each.descriptors for each in well), max(each.threads for each in well)
    tasks = Counter[str]()
    for each in well:
        tasks |= each.tasks
    left = []
    if found.descriptors > descriptors:
        left.append(f"{found.descriptors} descriptors, {descriptors} before")
    if found.threads > threads + SPARE_THREADS:
        left.append(f"{found.threads} threads, {threads} before")
    if more := found.tasks - tasks:
        left.append(f"tasks: {', '.join(f'{count} {name}' for name, count in sorted(more.items()))}")
    return "; ".join(left)


def is_fault(line: str) -> bool:
    """Whether a line on standard error tells of a fault of the program: a traceback, a warning of Python's, a stray
    print, an error in the log."""
    if not line.startswith("{") or "Traceback" in line:
        return True
    return json.loads(line)["level"] not in _LEVELS


def table(figures: Sequence[Figures]) -> str:
    """The figures of many rounds, a line for each kind of fault, medians and maxima; seconds."""
    lines = [
        f"{'fault':<24}{'rounds':>7}{'noticed':>15}{'healed':>15}{'lost':>6}{'false':>7}{'expired':>9}{'younger':>9}",
        f"{'':<31}{'median/max':>15}{'median/max':>15}",
    ]
    labels = dict.fromkeys(each.label for each in figures)
    for label in sorted(labels):
        of_kind = [each for each in figures if each.label == label]
        lines.append(
            f"{label:<24}{len(of_kind):>7}"
            f"{_spread([each.noticed for each in of_kind]):>15}{_spread([each.healed for each in of_kind]):>15}"
            f"{sum(each.lost for each in of_kind):>6}{sum(each.false for each in of_kind):>7}"
            f"{sum(each.expired for each in of_kind):>9}{max(each.younger for each in of_kind):>9.2f}"
        )
    return "\n".join(lines)


def _spread(found: Sequence[float | None]) -> str:
    known = [each for each in found if each is not None]
    return f"{median(known):.2f}/{max(known):.2f}" if known else "-"


def _break(proxy: Proxy, fault: Fault) -> None:
    match fault.kind:
        case Kind.STALL_REPORT:
            proxy.forth.stall()
        case Kind.STALL_WATCH:
            proxy.back.stall()
        case Kind.STALL:
            proxy.stall()
        case Kind.CUT:
            proxy.cut()
        case Kind.RESET:
            proxy.reset()
        case Kind.FORGET:
            proxy.forget()
        case Kind.DELAY:
            for way in proxy.ways:
                way.delay = way.jitter = fault.amount
        case Kind.NARROW:
            for way in proxy.ways:
                way.rate = fault.amount
        case Kind.REFUSE:
            proxy.set_mode(Mode.REFUSE)
            proxy.reset()
        case Kind.SILENT:
            proxy.set_mode(Mode.SILENT)
            proxy.reset()
        case Kind.HOLE:
            proxy.set_mode(Mode.HOLE)
            proxy.stall()
        case _:
            raise AssertionError(f"{fault.kind} is nothing that a proxy can do")


def _records(value: int) -> str:
    return "\n".join(
        f'[[record]]\nnamespace = "{NAMESPACE}"\nenv_name = "{ENV}"\nmember_pool = "{pool}"\n'
        f"idle = {value}\ndesired = {value}\n"
        for pool in POOLS
    )


def _replace(path: Path, text: str) -> None:
    """Whoever reads finds all of the one or all of the other."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)

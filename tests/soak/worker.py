"""A process of several agents for a soak: real agents, which reach their hub over real sockets, run their sources in
threads, and end and start as they are told on standard input, a JSON object each line. Their numbers change by
themselves. It answers on standard output, and logs on standard error.

    python -m tests.soak.worker '{"seed": 1, "agents": {"cluster-1": 40001}, "visitors_port": 40000}'
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import trio

from tests.soak import census
from tests.soak.churn import Cluster, rows
from trio_federation import logs
from trio_federation.admin import Answers, admin_app, serve_http
from trio_federation.agent import Agent
from trio_federation.capacity import Capacity, Change, Withdrawal
from trio_federation.clock import BootClock
from trio_federation.config import Federation, Log
from trio_federation.hookspecs import CapacitySink, CapacitySource
from trio_federation.rpc import tcp_dialer

# The fleet's own times, in seconds: a tenth of the defaults or so.

TTL = 4.0
RESYNC_INTERVAL = 1.5
REPORT_INTERVAL = 0.5
KEEPALIVE = 1.0
SILENCE_LIMIT = 3.0

#: Seconds between two changes of a cluster, two placements, and two looks at metrics and health, about.
CHANGE_INTERVAL = 0.6
PLACE_INTERVAL = 0.5
LOOK_INTERVAL = 4.0
#: Seconds between two looks at what has been said since.
POLL_INTERVAL = 0.25
#: How many of a source's answers are failures, and in how many of these the source as a whole fails.
FAILS = 0.01
ENDS = 0.3
#: Seconds for everybody to know everything, once it is quiet.
HEAL_WITHIN = 40.0


class _OnPurpose(Exception):
    """What a source raises now and then."""


class _Polled(CapacitySource):
    """Tells a cluster's truth to who asks, and fails now and then."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._ended = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await self._ended.wait()
        raise _OnPurpose("the source has ended")

    async def collect(self) -> Sequence[Capacity]:
        if self._member.worker.churns and self._member.random.random() < FAILS:
            self._member.done["source failure"] += 1
            if self._member.random.random() < ENDS:
                self._ended.set()
            raise _OnPurpose("the source does not answer")
        return self._member.cluster.records


class _Pushing(_Polled):
    """The same, but tells of changes by itself."""

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        told = {record.identity: record for record in self._member.cluster.records}
        while True:
            await trio.sleep(POLL_INTERVAL)
            now = {record.identity: record for record in self._member.cluster.records}
            changed: list[Change] = [record for identity, record in now.items() if told.get(identity) != record]
            changed += [Withdrawal(identity) for identity in told if identity not in now]
            told = now
            if changed:
                yield changed


class _Counting(CapacitySink):
    """Takes everything, and keeps nothing."""

    def __init__(self, done: Counter[str]) -> None:
        self._done = done

    async def update(self, snapshot: Sequence[Capacity]) -> None:
        self._done["sink update"] += 1


class Member:
    """One cluster: its truth, and the agent that it has now."""

    def __init__(self, worker: Worker, cluster_id: str, port: int, number: int) -> None:
        self.worker = worker
        self.cluster_id = cluster_id
        #: one for what is in the source's thread, and for the agents that it has
        self.random = random.Random(f"{worker.seed} {cluster_id}")
        self.cluster = Cluster(cluster_id, random.Random(f"{worker.seed} {cluster_id} truth"))
        self.done: Counter[str] = Counter()
        self.agent: Agent | None = None
        self._scope = trio.CancelScope()
        self._port = port
        self._number = number

    async def live(self) -> None:
        """A new agent of the cluster, until `end`."""
        source = _Pushing if self._number % 2 else _Polled
        with self._scope:
            self.agent = Agent(
                self.cluster_id,
                Federation(
                    ttl=TTL,
                    report_interval=REPORT_INTERVAL,
                    resync_interval=RESYNC_INTERVAL,
                    keepalive=KEEPALIVE,
                    silence_limit=SILENCE_LIMIT,
                ),
                sources={"scripted": partial(source, self)},
                # One of each process has one: a sink is told everything, which is as much work as all the rest.
                sinks={"counting": partial(_Counting, self.done)} if self._number == 0 else {},
                isolated=True,
                hubs={"hub": tcp_dialer("127.0.0.1", self._port, deadline=SILENCE_LIMIT)},
                credential=self.worker.secret,
                generator=random.Random(self.random.getrandbits(64)),
            )
            await self.agent.run()
        self.agent = None
        # Here, so that who is told to end before it has begun does so.
        self._scope = trio.CancelScope()
        self.worker.say({"ended": self.cluster_id})

    def end(self) -> None:
        """Have its agent end."""
        self._scope.cancel()


class Worker:
    """The process."""

    def __init__(self, settings: dict[str, Any], secret: str) -> None:
        self.seed: int = settings["seed"]
        self.secret = secret
        self.churns = False
        self.random = random.Random(f"{self.seed} worker")
        self.members = {
            cluster_id: Member(self, cluster_id, port, number)
            for number, (cluster_id, port) in enumerate(settings["agents"].items())
        }
        self._visitors: Counter[str] = Counter()
        self._visitors_port: int = settings["visitors_port"]

    @property
    def agents(self) -> list[Agent]:
        """Those that run."""
        return [member.agent for member in self.members.values() if member.agent is not None]

    def say(self, what: dict[str, Any]) -> None:
        """Tell the one that has started it."""
        sys.stdout.write(f"{json.dumps(what)}\n")
        sys.stdout.flush()

    def told(self) -> dict[str, Any]:
        """What goes into a census besides."""
        events = Counter(self._visitors)
        for member in self.members.values():
            events += member.cluster.done + member.done
        return {"events": events, "reservations": sum(agent.router.held() for agent in self.agents)}

    async def run(self) -> None:
        """Until it is told to end."""
        async with trio.open_nursery() as nursery:
            for member in self.members.values():
                nursery.start_soon(member.live)
                nursery.start_soon(self._change, member)
            nursery.start_soon(self._place)
            nursery.start_soon(self._look)
            port = await nursery.start(self._serve)
            self.say({"port": port})
            async with trio.lowlevel.FdStream(os.dup(0)) as orders:
                rest = b""
                async for chunk in orders:
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        (what, value), *_ = json.loads(line).items()
                        self._obey(what, value, nursery)
            nursery.cancel_scope.cancel()

    def _obey(self, what: str, value: Any, nursery: trio.Nursery) -> None:
        match what:
            case "churn":
                self.churns = value
                for member in () if value else self.members.values():
                    member.cluster.settle()
            case "end":
                self.members[value].end()
            case "start":
                nursery.start_soon(self.members[value].live)
            case "visit":
                nursery.start_soon(self._be_visited, value)
            case "truth":
                self.say({"truth": rows(each for member in self.members.values() for each in member.cluster.records)})
            case "check":
                nursery.start_soon(self._check, [tuple(row) for row in value])
            case _:
                raise ValueError(f"{what} is no order")

    async def _change(self, member: Member) -> None:
        while True:
            await trio.sleep(CHANGE_INTERVAL * self.random.uniform(0.5, 1.5))
            if self.churns:
                member.cluster.change()

    async def _place(self) -> None:
        while True:
            await trio.sleep(PLACE_INTERVAL * self.random.uniform(0.5, 1.5))
            if not self.churns or not self.agents:
                continue
            agent = self.random.choice(self.agents)
            placement = agent.place("team-a", self.random.choice(("python", "node", "nobody-has-it")))
            self._visitors["placement"] += 1
            if self.random.random() < 0.7:
                agent.report_outcome(placement.id, self.random.choice(("served", "empty", "refused")))

    async def _look(self) -> None:
        """What a scrape and a probe cost each agent, but for HTTP."""
        while True:
            await trio.sleep(LOOK_INTERVAL)
            for agent in self.agents:
                agent.health()
                async for _ in agent.exposition():
                    pass
                self._visitors["look"] += 1

    async def _serve(self, *, task_status: trio.TaskStatus[int]) -> None:
        """The admin interface of the first agent, whichever it is."""
        first = next(iter(self.members.values()))

        async def exposition() -> AsyncIterator[bytes]:
            if first.agent is not None:
                async for part in first.agent.exposition():
                    yield part

        def readiness() -> dict[str, Any]:
            known = first.agent.health() if first.agent is not None else {"why_not": ["it is away"]}
            return {"ready": not known["why_not"], **known}

        app = admin_app(Answers(exposition=exposition, readiness=readiness), host="127.0.0.1")
        await serve_http(app, "127.0.0.1", 0, section="admin", task_status=task_status)

    async def _be_visited(self, cluster_id: str) -> None:
        """A cluster that nobody has heard of before, which comes for a moment, and never again."""
        member = Member(self, cluster_id, self._visitors_port, 1)
        with trio.move_on_after(self.random.uniform(0.5, 3.0)):
            await member.live()
        self._visitors["visit"] += 1

    async def _check(self, truth: Sequence[tuple[Any, ...]]) -> None:
        """Wait until every agent knows just that, and say what is wrong where one does not."""
        wrong: dict[str, str] = {}
        wanted = set(truth)
        over_at = trio.current_time() + HEAL_WITHIN
        for member in self.members.values():
            found: set[tuple[Any, ...]] = set()
            while found != wanted and trio.current_time() < over_at:
                if member.agent is not None:
                    found = set(rows(member.agent.registry.snapshot()))
                await trio.sleep(0.1)
            if found != wanted:
                missing, more = sorted(wanted - found)[:3], sorted(found - wanted)[:3]
                wrong[member.cluster_id] = f"knows {len(found)} of {len(wanted)}; missing {missing}, too many {more}"
        self.say({"wrong": wrong})


def main() -> None:
    """Run the process."""
    census.make_bounds_small()
    logs.configure(Log(level="info", format="json"))

    async def run() -> None:
        worker = Worker(json.loads(sys.argv[1]), os.environ["SOAK_SECRET"])
        census.count_when_asked(worker.told)
        await worker.run()

    trio.run(run, clock=BootClock())


if __name__ == "__main__":
    main()

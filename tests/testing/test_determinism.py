"""The same seed makes the same run, to the last byte of its event log: in processes with other hashes and other
addresses, in other folders, on a busy machine, beside other tasks. And virtual time never leaps over what is on its
way."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock

from tests.testing.scenarios import everything, large_reports, quietly
from trio_federation.rpc import MemoryLink
from trio_federation.testing import Invariant, Simulation, member, run_simulated, simulated_federation

ROOT = Path(__file__).resolve().parents[2]

#: Seconds of real time after which a process of ours is given up, on however busy a machine.
PATIENCE = 1500.0
#: What is another one in each process: hashes, addresses, and when garbage is looked for.
PROCESSES = (
    {"PYTHONHASHSEED": "1"},
    {"PYTHONHASHSEED": "2", "PYTHONMALLOC": "malloc"},
    {"PYTHONHASHSEED": "3", "PYTHONMALLOC": "debug"},
    {"PYTHONHASHSEED": "random", "PYTHONOPTIMIZE": "1"},
)
#: Keeps a processor busy for as long as its parent lives, and for some minutes at most.
BUSY = """
import os, time
parent, end = os.getppid(), time.monotonic() + 900
while os.getppid() == parent and time.monotonic() < end:
    sum(range(10_000))
"""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = structlog.get_config()["wrapper_class"]
    quietly()
    yield
    structlog.configure(wrapper_class=before)


@contextmanager
def busy_machine() -> Iterator[None]:
    """Inside, every processor has something else to do."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(process.kill)
        yield


def logs_of_processes(scenario: str, folder: Path, *, seed: int, repeats: int, processes: int) -> list[str]:
    """The event logs of a scenario from so many processes at a time, each of which runs it so many times."""
    running = []
    with busy_machine(), ExitStack() as stack:
        for number, more in enumerate(PROCESSES[:processes]):
            out = folder / f"process {number}" / ("deeper" * number)
            out.mkdir(parents=True)
            command = [sys.executable, "-m", "tests.testing.scenarios", scenario, "--seed", str(seed)]
            command += ["--repeats", str(repeats), "--out", str(out)]
            environment = os.environ | {"PYTHONPATH": str(ROOT)} | more
            process = stack.enter_context(
                subprocess.Popen(command, cwd=out, env=environment, stderr=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            running.append((process, out))
        for process, _ in running:
            _, errors = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, errors[-2000:]
    return [(out / f"{number}.log").read_text() for _, out in running for number in range(repeats)]


def first_difference(one: str, other: str) -> str:
    """Where two logs part, for people; "" where they do not."""
    if one == other:
        return ""
    lines, others = one.splitlines(), other.splitlines()
    for number, (mine, theirs) in enumerate(zip(lines, others, strict=False)):
        if mine != theirs:
            return "\n".join(["after", *lines[max(0, number - 3) : number], "one has", mine, "the other", theirs])
    return f"one has {len(lines)} lines, the other {len(others)}"


def check_alike(scenario: Callable[[int], Any], folder: Path, *, seed: int, repeats: int, processes: int) -> None:
    """That a scenario runs alike everywhere, here included."""
    here = run_simulated(scenario, seed, seed=seed)
    logs = logs_of_processes(scenario.__name__, folder, seed=seed, repeats=repeats, processes=processes)
    assert len(logs) == processes * repeats
    for log in logs:
        assert first_difference(here, log) == ""


# --- the same seed, the same run -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_twenty_runs_are_alike(tmp_path: Path) -> None:
    """In two processes with other hashes and addresses, in other folders, on a busy machine."""
    check_alike(everything, tmp_path, seed=0, repeats=10, processes=2)


@pytest.mark.slow
def test_runs_with_full_buffers_are_alike(tmp_path: Path) -> None:
    """Many tasks wait for each connection that breaks, and each of them hears of it in its turn."""
    check_alike(large_reports, tmp_path, seed=0, repeats=1, processes=2)


@pytest.mark.soak
def test_two_hundred_runs_are_alike(tmp_path: Path) -> None:
    """The same in four processes."""
    check_alike(everything, tmp_path, seed=1, repeats=50, processes=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 30))
def test_runs_of_many_seeds_are_alike(seed: int, tmp_path: Path) -> None:
    """Whatever the seed has happen."""
    check_alike(everything, tmp_path / "everything", seed=seed, repeats=2, processes=4)
    check_alike(large_reports, tmp_path / "large_reports", seed=seed, repeats=1, processes=4)


@pytest.mark.slow
def test_it_has_everything_in_it() -> None:
    """What is compared is worth comparing: every kind of fault, placements and what became of them, reports, refusals,
    connections that came and went."""
    log = run_simulated(everything, 0)
    events = {line.split()[2] for line in log.splitlines()}
    assert events >= {
        *("started", "stopping", "stopped", "killed", "suspended", "resumed", "skewed"),
        *("sources_slow", "sources_fail", "sources_work", "source_failed"),
        *("held", "healed", "cut", "delayed", "flaky", "stalled"),
        *("dialled", "connected", "refused", "carried", "closed", "connection_ended"),
        *("said", "took", "placed", "outcome"),
        *("hub_works", "hub_failed", "reporter_came", "reporter_left", "watcher_came", "watcher_left"),
    }
    assert {"served", "empty", "refused"} <= {word[8:] for word in log.split() if word.startswith("outcome=")}
    assert float(log.splitlines()[-1][:12]) >= 120.0


@pytest.mark.slow
def test_other_seeds_make_other_runs() -> None:
    """So that the tests above can fail. Another order of tasks alone shows, too."""
    logs = {run_simulated(partial(everything, seconds=20.0), seed) for seed in range(5)}
    assert len(logs) == 5
    orders = {run_simulated(partial(order_only, seed)) for seed in range(5)}
    assert len(orders) == 5


async def order_only(seed: int) -> str:
    """A federation that draws nothing but the order of its tasks, and ids."""
    async with simulated_federation("west", "east", hubs=2, seed=seed) as fed:
        await trio.sleep(0.0)
        return "\n".join([line for line in fed.log.lines if "instance=" not in line])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_it_does_not_matter_what_else_runs(seed: int) -> None:
    """Neither tasks that were there before, nor what has run or was drawn before in this process."""

    async def other(generator: random.Random) -> None:
        for _ in range(2000):
            await trio.sleep(generator.uniform(0.01, 0.2))

    async def among_others() -> str:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(other, random.Random(number))
            await trio.testing.wait_all_tasks_blocked()
            log = await everything(seed)
            nursery.cancel_scope.cancel()
        return log

    alone = run_simulated(everything, seed)
    trio.run(partial(simulated_for_a_while, seed + 1), clock=MockClock(autojump_threshold=0))
    log = trio.run(among_others, clock=MockClock(autojump_threshold=0))
    assert first_difference(alone, log) == ""


def test_who_looks_on_changes_nothing() -> None:
    """A run that has broken an invariant can be run again without them."""

    async def run(invariants: Sequence[Invariant]) -> str:
        async with simulated_federation("west", "east", hubs=2, seed=3, invariants=invariants) as fed:
            for idle in range(10):
                fed["west"].source.set(member("west", idle=idle))
                await trio.sleep(3.0)
                fed.cut("east")
        return fed.log.text()

    assert first_difference(run_simulated(run, []), run_simulated(run, [Invariant()])) == ""


async def simulated_for_a_while(seed: int) -> None:
    """Another federation."""
    async with simulated_federation("north", "south", seed=seed):
        await trio.sleep(20.0)


# --- what is drawn ---------------------------------------------------------------------------------------------------

#: Who may ask for the time, for what changes nothing in a run: (module, function).
HARMLESS = {
    # Trio's mock clock multiplies it by its rate, which is 0.
    ("trio._core._mock_clock", "perf_counter"),
    # Kept for a channel's statistics, which nobody asks for.
    ("grpclib.client", "monotonic"),
    ("grpclib.protocol", "monotonic"),
    ("grpclib.server", "monotonic"),
    # When a series was made, for an exposition's `_created`.
    ("prometheus_client.metrics", "time"),
}
#: Functions that answer differently in every run, and the generator behind the functions of `random`.
UNRELIABLE = (
    *(getattr(time, name) for name in vars(time) if name.startswith(("time", "monotonic", "perf_counter", "clock_"))),
    *(getattr(time, name) for name in ("gmtime", "localtime", "sleep")),
    *(os.urandom, os.getpid),
)
GLOBAL_RANDOM = random.seed.__self__  # type: ignore[attr-defined]


class Watch:
    """Sees which unreliable functions are called, and by which module; of this project's also who asks for hashes."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        """What Python calls before every call."""
        if event == "c_call":
            module = str(frame.f_globals.get("__name__"))
            owner = getattr(function, "__self__", None)
            # By identity: not everything that can be called can be compared.
            unreliable = any(function is each for each in UNRELIABLE) or owner is GLOBAL_RANDOM
            if unreliable or (function is hash and module.startswith("trio_federation")):
                self.seen.add((module, function.__name__))

    async def over(self, run: Callable[[], Any]) -> None:
        """Watch an async function."""
        sys.setprofile(self)
        try:
            await run()
        finally:
            sys.setprofile(None)


@pytest.mark.slow
def test_everything_is_drawn_from_generators_of_the_simulation() -> None:
    """Nothing asks the machine for randomness, or for its time but in a few places where it changes nothing."""
    watch = Watch()
    run_simulated(watch.over, partial(everything, 5, seconds=60.0))
    # hypothesis, once another test has used it, measures the garbage collector's time.
    ours = {call for call in watch.seen if not call[0].startswith("hypothesis.")}
    assert ours <= HARMLESS
    assert ("trio._core._mock_clock", "perf_counter") in watch.seen


def test_what_is_watched_for_is_seen() -> None:
    """The test above can fail."""

    async def unreliable() -> None:
        random.random()  # noqa: TID251
        random.SystemRandom().random()
        time.time()  # noqa: TID251
        await trio.lowlevel.checkpoint()

    watch = Watch()
    run_simulated(watch.over, unreliable)
    assert {name for module, name in watch.seen if module in (__name__, "random")} == {"random", "urandom", "time"}


class Recorded(random.Random):
    """A generator that remembers what was drawn."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.drawn: list[float] = []

    def random(self) -> float:
        """The next float."""
        self.drawn.append(super().random())
        return self.drawn[-1]

    def getrandbits(self, k: int, /) -> int:
        """The next bits."""
        bits = super().getrandbits(k)
        self.drawn.append(bits)
        return bits


def test_more_clusters_change_nothing_of_what_others_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node has generators of its own, one for each purpose."""
    made: dict[tuple[str, ...], Recorded] = {}

    def generator(fed: Simulation, *names: str) -> random.Random:
        assert names not in made, "one name, two generators"
        made[names] = Recorded("/".join([str(fed.seed), *names]))
        return made[names]

    monkeypatch.setattr(Simulation, "generator", generator)

    async def run(*names: str) -> None:
        async with simulated_federation(*names, hubs=2, seed=4) as fed:
            for name in names:
                fed.delay(name, 0.1, jitter=0.5)
            await trio.sleep(5.0)
            await fed.restart_hub(0, down_for=10.0)
            await fed["west"].kill()
            await fed["west"].start()
            await trio.sleep(10.0)

    runs = []
    for more in ((), ("north", "south")):
        made.clear()
        run_simulated(run, *more, "west", "east")
        runs.append({names: tuple(each.drawn) for names, each in made.items()})
    few, many = runs
    assert {names for names in many if not {"north", "south"} & set(names)} == set(few)
    for names, drawn in few.items():
        shortest = min(len(drawn), len(many[names]))
        assert shortest > 0
        assert drawn[:shortest] == many[names][:shortest]
    assert len({drawn[0] for drawn in many.values()}) == len(many)


# --- virtual time does not leap --------------------------------------------------------------------------------------


def unread(links: Sequence[MemoryLink], until: float) -> list[str]:
    """What will have arrived by then, and nobody has read."""
    return [
        f"{link.client.name}: {sum(chunk.size for chunk in pipe._chunks)} bytes"
        for link in links
        for pipe in (link._to_server, link._to_client)
        if not pipe.held and pipe._chunks and pipe._chunks[0].arrives_at < until
    ]


@contextmanager
def watched_leaps(fed: Simulation) -> Iterator[list[str]]:
    """What was found to be on its way whenever time leapt over its arrival."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)
    found: list[str] = []
    leap = clock.jump

    def checked(seconds: float) -> None:
        # Nobody is about to do anything, and nothing happens before the moment that is leapt to.
        links = [
            each.link for cluster in fed.clusters.values() for r in cluster.routes.values() for each in r._connections
        ]
        found.extend(unread(links, trio.current_time() + seconds))
        leap(seconds)

    clock.jump = checked  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del clock.jump


async def nothing_is_leapt_over(seed: int) -> None:
    """Load that changes every second in a federation where nothing is wrong: whatever is said arrives when it should,
    no connection breaks, nobody waits in vain."""
    names = ["west", "east", "south"]
    async with simulated_federation(*names, hubs=2, seed=seed) as fed:
        with watched_leaps(fed) as leapt_over:
            await trio.sleep(1.0)
            fed.delay("west", 0.05, jitter=0.1)
            for second in range(20):
                for name in names:
                    fed[name].source.set(*[member(name, f"p{number}", idle=second + number) for number in range(5)])
                await trio.sleep(1.0)
                latest = fed.settings.report_interval + 2 * 0.15 + 1.0
                assert [age for one in names for other in names for age in fed[one].ages(other) if age > latest] == []
            assert leapt_over == []
        assert [route.dialled for name in names for route in fed[name].routes.values()] == [1] * 6
        assert [line for line in fed.log.lines if "level=" in line or "connection_ended" in line] == []


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_time_never_leaps_while_bytes_are_on_their_way(repeats: int) -> None:
    """However busy the machine is: there are no sockets, in whose kernel bytes could sit while time leaps."""
    with busy_machine():
        for seed in range(repeats):
            run_simulated(nothing_is_leapt_over, seed, seed=seed)


async def test_what_is_leapt_over_is_found(autojump_clock: MockClock) -> None:
    """The test above can fail: bytes that nobody reads are found, at once or once they have arrived; held ones not."""
    link = MemoryLink()
    await link.client.send_all(b"abc")
    assert unread([link], trio.current_time() + 1.0) == ["server: 3 bytes"]
    assert await link.server.receive_some() == b"abc"
    assert unread([link], trio.current_time() + 1.0) == []
    link.slow(lambda: 5.0)
    await link.server.send_all(b"abcd")
    assert unread([link], trio.current_time() + 5.0) == []
    assert unread([link], trio.current_time() + 5.1) == ["server: 4 bytes"]
    link.hold(to_server=True, to_client=True)
    assert unread([link], trio.current_time() + 5.1) == []

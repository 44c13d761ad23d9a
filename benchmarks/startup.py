"""How long it takes until something works, and what it holds when it has nothing to do: wall-clock time of commands,
and resident memory of processes at rest."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.children import command, running, seconds_to_end
from benchmarks.hubs import agent_config, grpcio_hub, our_hub
from benchmarks.measure import Figure, median, percentile, shown

RUNS = 15
QUICK_RUNS = 1
#: Seconds that a process rests before its memory is read: an agent has reported then, and heard of everything.
REST = 3.0
QUICK_REST = 0.5

_SOURCE = 'type = "fixtures"\npath = "records.toml"'
_RECORDS = "\n".join(
    f'[[record]]\nnamespace = "agents"\nenv_name = "env-{number}"\nmember_pool = "pool-{number}"\nidle = 3\n'
    for number in range(10)
)


def run(*, quick: bool = False) -> list[Figure]:
    """Milliseconds from the start of a process, and MiB of its memory at rest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "records.toml").write_text(_RECORDS)
        with our_hub() as hub:  # for a port that is free
            port = hub.port
        # An agent and a hub in one process: the agent reports to the hub beside it.
        both = folder / "both.toml"
        both.write_text(agent_config("west", port, _SOURCE, hub=True))
        return [*_times(both, QUICK_RUNS if quick else RUNS), *_memory(folder, QUICK_REST if quick else REST)]


def _times(config: Path, runs: int) -> list[Figure]:
    print("  start-up", file=sys.stderr)
    ours = str(command())

    def ended(*arguments: str) -> Callable[[], float]:
        return lambda: seconds_to_end(*arguments)

    def started() -> float:
        began = time.perf_counter()
        with running(ours, "run", config, name="the agent and hub", tied=False) as child:
            at, _ = child.hear_at(event="started")
        return at - began

    commands = {
        "python -c pass": ended(sys.executable, "-c", "pass"),
        "python -c 'import trio'": ended(sys.executable, "-c", "import trio"),
        "python -c 'import grpc'": ended(sys.executable, "-c", "import grpc"),
        "trio-federation --version": ended(ours, "--version"),
        "trio-federation check": ended(ours, "check", str(config)),
        "trio-federation run, until started": started,
    }
    took: dict[str, list[float]] = {what: [] for what in commands}
    for number in range(runs + 1):
        # In turns, so that what else the machine does meets all of them.
        for what, measure in commands.items():
            seconds = measure()
            if number:  # the first one warms the caches of files up
                took[what].append(seconds)
    bare = median(took["python -c pass"])
    figures = []
    for what, all_seconds in took.items():
        typical = median(all_seconds)
        slowest = f"slowest of {runs}: {shown(1000 * percentile(all_seconds, 100))} ms"
        if what == "python -c pass":
            figures.append(Figure(what, 1000 * typical, "ms", slowest))
        else:
            figures.append(Figure(what, 1000 * typical, "ms", f"python -c pass; {slowest}", typical / bare))
    return figures


def _memory(folder: Path, rest: float) -> list[Figure]:
    print("  memory at rest", file=sys.stderr)
    held: dict[str, int] = {}
    for what in ("pass", "import trio", "import grpc"):
        code = f"{what}; print('{{}}', flush=True); input()"
        with running(sys.executable, "-c", code, name=f"python -c '{what}'") as child:
            child.hear()
            child.rest(rest / 2)
            held[f"python -c '{what}'"] = child.resident_bytes()
    with grpcio_hub("each") as theirs:
        theirs.child.rest(rest / 2)
        held["grpcio's hub"] = theirs.child.resident_bytes()
    with our_hub() as hub:
        hub.child.rest(rest / 2)
        held["our hub"] = hub.child.resident_bytes()
        path = folder / "agent.toml"
        path.write_text(agent_config("west", hub.port, _SOURCE))
        with running(command(), "run", path, name="the agent") as agent:
            agent.hear(event="started")
            agent.rest(rest)
            held["our agent, connected, 10 records"] = agent.resident_bytes()
    base = held["python -c 'import trio'"]
    return [
        Figure(f"memory: {what}", bytes_held / 2**20, "MiB", "python -c 'import trio'", bytes_held / base)
        for what, bytes_held in held.items()
    ]

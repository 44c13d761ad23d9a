"""`python -m benchmarks [NAME …] [--quick] [--json FILE] [--docs]`: runs the benchmarks, shows tables, and writes the
figures as JSON. What is measured, and what the figures mean, is in docs/benchmarks.md."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import sys
import time
import traceback
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import page
from benchmarks.children import BenchmarkError
from benchmarks.measure import Figure

#: Each a module of this package with `run(*, quick: bool) -> list[Figure]`, imported only when it is run, so that none
#: costs another one memory or threads.
BENCHMARKS = (
    "core", "codec", "latency", "hub", "identity", "exposition", "startup", "simulation", "placement", "kubernetes",
    "kubernetes_status", "faults",
)  # fmt: skip

#: Has a page of its own.
_PLACEMENT = "placement"

_PACKAGES = (
    "trio-federation", "trio", "trio-asyncio", "grpclib", "h2", "betterproto2", "protobuf",
    "grpcio", "httpx", "kubernetes",
)  # fmt: skip


def main() -> int:
    """The command line; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What things cost; none of it a test.")
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"which ones, all by default: {', '.join(BENCHMARKS)}")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE, too")
    parser.add_argument("--quick", action="store_true", help="little of each, to see that they run: no useful figures")
    parser.add_argument("--docs", action="store_true", help="put the figures into docs/benchmarks.md and placement.md")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.name if name not in BENCHMARKS]:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    if arguments.docs and (arguments.quick or arguments.name not in ([], [_PLACEMENT])):
        parser.error(f"--docs wants a full run of all benchmarks, or of {_PLACEMENT}, which has a page of its own")

    machine = _machine()
    console = Console()
    where = f"{machine['cores']} cores, {machine['processor']}, Python {machine['python']}"
    console.print(Text(f"{where}, load {machine['load']:.1f} at the start"))
    results: dict[str, list[Figure]] = {}
    failed = False
    for name in arguments.name or BENCHMARKS:
        print(f"{name} …", file=sys.stderr)
        began = time.perf_counter()
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            results[name] = module.run(quick=arguments.quick)
        except Exception as error:  # the others can still be measured
            failed = True
            if not isinstance(error, BenchmarkError):
                traceback.print_exc()
            print(f"{name} failed: {error}", file=sys.stderr)
            continue
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        about = " ".join((module.__doc__ or "").partition("\n\n")[0].split())
        console.print(Text(f"\n{name}: {about}"), _table(results[name]), sep="\n")
    machine["load_at_end"] = os.getloadavg()[0]
    if arguments.json:
        figures = {name: [asdict(figure) for figure in found] for name, found in results.items()}
        document = {"machine": machine, "quick": arguments.quick, "figures": figures}
        Path(arguments.json).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if arguments.docs and not failed:
        from benchmarks import placement_page  # it needs all that placement needs

        placement_page.rewrite(machine, results.pop(_PLACEMENT))
        if results:
            page.rewrite(machine, results)
    return 1 if failed else 0


def _table(figures: list[Figure]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("what", ratio=1)
    table.add_column("figure", justify="right", no_wrap=True)
    table.add_column("beside", ratio=1)
    for figure in figures:
        table.add_row(Text(figure.what), Text(figure.shown), Text(figure.shown_beside))
    return table


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "packages": {name: version(name) for name in _PACKAGES},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _terminated(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    # Both leave every block on the way out, and so end what was started.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)

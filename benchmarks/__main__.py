"""`python -m benchmarks [NAME …] [--json FILE]`: runs the benchmarks, shows tables, and writes the figures as JSON."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks import codec, core, simulation
from benchmarks.measure import Figure

BENCHMARKS = {"core": core.run, "codec": codec.run, "simulation": simulation.run}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="*", choices=[[], *BENCHMARKS], help="which ones; all by default")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE, too")
    arguments = parser.parse_args()
    console = Console()
    results: dict[str, list[Figure]] = {}
    for name in arguments.name or BENCHMARKS:
        print(f"{name} …", file=sys.stderr)
        results[name] = BENCHMARKS[name]()
        table = Table("what", "figure", "beside", title=name, title_justify="left")
        for figure in results[name]:
            table.add_row(figure.what, figure.shown, figure.beside)
        console.print(table)
    if arguments.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine} | {k: [asdict(f) for f in v] for k, v in results.items()}, file, indent=2)


main()

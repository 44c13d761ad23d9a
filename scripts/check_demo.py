"""Reads what `trio-federation demo --json` printed from standard input, and says whether the federation came together:
three clusters, each of which holds, and exports metrics about, the records of all three."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

CLUSTERS = 3


def faults(result: dict[str, Any]) -> list[str]:
    """What is wrong with the demo's result, a line each; empty where all is well."""
    clusters: dict[str, Any] = result["clusters"]
    found: list[str] = []
    if len(clusters) != CLUSTERS:
        found.append(f"{len(clusters)} clusters instead of {CLUSTERS}: {sorted(clusters)}")
    for name, cluster in clusters.items():
        if not cluster["records"] > cluster["foreign"] > 0:
            found.append(f"{name} holds {cluster['records']} records, of which {cluster['foreign']} are foreign ones")
        exported = set(
            re.findall(r'^agentbox_federation_env_idle\{(?:.*,)?cluster="([^"]*)"', result["metrics"][name], re.M)
        )
        if exported != clusters.keys():
            found.append(f"{name} exports metrics about {sorted(exported)} instead of {sorted(clusters)}")
    return found


def main() -> int:
    """Exit code 0: all is well; 1: it is not, with the faults on standard error."""
    found = faults(json.load(sys.stdin))
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

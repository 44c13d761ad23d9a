"""Writes the documents that are made from the code, or, with --check, says whether they are current. A further one
needs a function that returns its text, and a line in DOCUMENTS."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.reflector_table import drawn
from trio_federation.events import EVENTS, Event
from trio_federation.metrics import BUCKETS, CATALOGUE, Family, Group, Kind

ROOT = Path(__file__).resolve().parent.parent
#: between these, docs/kubernetes.md has what is drawn from the reflector's table
REFLECTOR_BEGINS = "<!-- reflector table: begin -->"
REFLECTOR_ENDS = "<!-- reflector table: end -->"

METRICS_PAGE = """\
# Metrics

<!-- Written by scripts/generate_docs.py from trio_federation/metrics/catalogue.py; `make generate` does it. -->

`GET /metrics` on the `[metrics]` address shows all of this, in Prometheus' text format, from memory: also while a
source, a hub or a sink hangs. One scrape of each agent and hub every 10 to 30 s is plenty.

| question | where the answer is |
| --- | --- |
| Is it connected? | `trio_federation_hub_connected`, `trio_federation_hub_reconnects_total` |
| Is it fresh? | `trio_federation_source_last_success_age_seconds` for what it says of its own cluster, \
`trio_federation_hub_last_batch_age_seconds` and `trio_federation_member_age_seconds` for what it knows of others |
| What did it drop? | `trio_federation_records_dropped_total`; the log has an example of each kind |
| Where do creates go, and why? | `trio_federation_placements_total`, \
`trio_federation_placement_outcomes_total`; of a single one, `trio-federation place` tells |

- Ages are seconds before the scrape on the process's own clock, so they are never negative, and clocks of different
  machines do not matter.
- A series that stands for something that never happened is absent, so that nobody takes it for a 0. Counters of what
  the configuration names are there from the start, at 0, so that `rate` and `increase` see the first step.
- Names that peers choose cannot make the exporter grow: beyond a limit they are counted together, as `*`.
- Each counter and histogram has a companion NAME_created, the time at which it began, which Prometheus does not need;
  `PROMETHEUS_DISABLE_CREATED_SERIES=true` in the environment leaves them out.
- Histograms have buckets of {buckets} s.

What to alert on is a start: the numbers fit the default settings.
"""


def metrics_page() -> str:
    """docs/metrics.md: every family of the catalogue, group by group."""
    intro = METRICS_PAGE.format(buckets=", ".join(f"{bound:g}" for bound in BUCKETS))
    return "\n".join([intro, *map(_group, CATALOGUE)])


def _group(group: Group) -> str:
    lines = [f"## {group.title}", "", group.text, "", "| name | type | labels | meaning |", "| --- | --- | --- | --- |"]
    lines += map(_row, group.families)
    alerts = [f"- `{family.name}`: {family.alert}" for family in group.families if family.alert]
    if alerts:
        lines += ["", "Alert when:", "", *alerts]
    return "\n".join([*lines, ""])


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    kind = "gauge (info)" if family.kind is Kind.INFO else family.kind
    text = family.text.replace("|", "\\|")
    return f"| `{family.name}` | {kind} | {labels} | {text} |"


LOGS_PAGE = """\
# Logs

<!-- Written by scripts/generate_docs.py from trio_federation/events.py; `make generate` does it. -->

Lines go to standard error: JSON, one object a line, or readable ones on a terminal (`[log] format`). Each has an
`event` from the tables below, which is what to search for and to alert on, a `level`, a `logger`, a `timestamp` in UTC,
and what stands under "with"; a key in brackets is there only sometimes. What libraries and plugins log has the same
form; plugins name their own events, and their lines carry `source`, `sink` or `filter`.

- One line for each change of state, and none for a batch, a report, a collect or a ping.
- A failure is told when it begins, in the level below. While it lasts, repetitions are logged at debug, and a line sums
  them up after ten minutes, then after twenty, and so on up to an hour: with `failures` in a row and `for_seconds`. Its
  end is one more line, with `failures_before`.
- Secrets are in none of them, at no level.
"""


def logs_page() -> str:
    """docs/logs.md: every event, part by part."""
    parts = [LOGS_PAGE]
    for title, events in EVENTS.items():
        lines = [f"## {title}", "", "| event | level | says | with | what to do |", "| --- | --- | --- | --- | --- |"]
        lines += [_event(name, event) for name, event in events.items()]
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def _event(name: str, event: Event) -> str:
    keys = ", ".join(f"(`{key[:-1]}`)" if key.endswith("?") else f"`{key}`" for key in event.keys)
    return f"| `{name}` | {event.level} | {event.meaning} | {keys} | {event.advice} |"


def kubernetes_page() -> str:
    """docs/kubernetes.md, which people write, with the reflector's table between two marks."""
    before, begin, rest = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8").partition(REFLECTOR_BEGINS)
    _, end, after = rest.partition(REFLECTOR_ENDS)
    if not begin or not end:
        raise SystemExit(f"docs/kubernetes.md lacks {REFLECTOR_BEGINS} or {REFLECTOR_ENDS}: restore it")
    return f"{before}{begin}\n\n{drawn()}\n{end}{after}"


#: What is written, by its path from the repo's root.
DOCUMENTS: dict[str, Callable[[], str]] = {
    "docs/metrics.md": metrics_page,
    "docs/logs.md": logs_page,
    "docs/kubernetes.md": kubernetes_page,
}


def differences(name: str, text: str) -> Iterator[str]:
    """The lines of a unified diff from the document as it is held to `text`; none where they agree."""
    path = ROOT / name
    if not path.exists():
        yield f"{name}: missing"
        return
    held = path.read_text(encoding="utf-8").splitlines()
    yield from difflib.unified_diff(held, text.splitlines(), f"held/{name}", f"fresh/{name}", lineterm="")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: written, or current; 1: not current, with the differences on standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether the documents are current")
    check: bool = parser.parse_args(arguments).check
    stale = False
    for name, make in DOCUMENTS.items():
        text = make()
        if not check:
            (ROOT / name).write_text(text, encoding="utf-8")
        elif found := list(differences(name, text)):
            stale = True
            print(*found, f"{name} is not current: run `make generate`", sep="\n")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())

"""`trio-federation place`: where a create would go, and why, candidate by candidate. The router of the agent that is
asked decides; this command only asks, reserves nothing, and shows."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from trio_federation.cli.client import Count, Headroom, Question, ask, asks_an_agent, read
from trio_federation.cli.tables import (
    Column,
    Line,
    Row,
    Section,
    duration,
    headroom,
    number,
    paragraph,
    show,
    show_json,
    table,
)


class Candidate(msgspec.Struct):
    """A pool of another cluster that was looked at. `age` is in seconds."""

    target: str
    tier: str
    idle: Count
    reserved: Count
    headroom: Headroom
    age: float
    state: str = ""
    verdict: str = ""


class Placement(msgspec.Struct):
    """What `/v1/place` says."""

    local: bool
    target: str | None
    reason: str
    candidates: list[Candidate]


@click.command()
@click.argument("namespace")
@click.argument("env")
@click.option("--group", default="", help="Only members of this scaling group; else the whole env.")
@asks_an_agent
def place(namespace: str, env: str, group: str, url: str, timeout: float, as_json: bool) -> None:
    """Show where a create of ENV in NAMESPACE would go now, and why.

    The agent is only asked: nothing is created, and nothing reserved. Pools of other clusters are listed best first.
    Into a pipe or a file nothing is shortened."""
    parameters = {"namespace": namespace, "env": env} | ({"group": group} if group else {})
    question = Question("/v1/place", parameters)
    (answer,) = ask(url, [question], timeout)
    placement = read(url, question, answer, Placement)
    if as_json:
        show_json(answer)
        return
    show(lambda width: placement_lines(placement, width))


_CANDIDATES = (
    Column("target", least=14),
    Column("tier", least=9),
    number("idle"),
    number("reserved"),
    number("headroom"),
    number("age"),
    Column("state", least=6),
    Column("verdict", least=16, folds=True),
)
_TIER_STYLES = {"idle": "green", "grow": "yellow"}


def placement_lines(placement: Placement, width: int | None) -> Iterator[Line]:
    """The lines about one placement."""
    yield from paragraph(placement.reason, width)
    goes = "stays in the cluster of this agent" if placement.target is None else f"goes to {placement.target}"
    yield from paragraph(f"a create {goes}", width, style="bold")
    yield []
    if not placement.candidates:
        yield from paragraph("no pool of another cluster was there to look at", width)
        return
    rows = [_candidate_row(candidate, candidate.target == placement.target) for candidate in placement.candidates]
    yield from table(_CANDIDATES, [Section("", rows)], width)


def _candidate_row(candidate: Candidate, chosen: bool) -> Row:
    cells = (
        candidate.target,
        candidate.tier,
        str(candidate.idle),
        str(candidate.reserved),
        headroom(candidate.headroom),
        duration(candidate.age),
        candidate.state or "-",
        candidate.verdict or "-",
    )
    bold = "bold" if chosen else ""
    return Row(cells, {0: bold, 1: _TIER_STYLES.get(candidate.tier, "dim"), 7: bold})

"""`trio-federation place`: where a create would go, or where one went, and why, candidate by candidate. The router of
the agent that is asked decides; this command only asks, reserves nothing, and shows."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from trio_federation.cli.client import Access, Count, Headroom, Question, ask, asks_an_agent, read
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


class PastPlacement(Placement):
    """What `/v1/place` says of a placement of the past. `ago`: seconds since. `outcome`: what became of it; None as
    long as nobody has said."""

    id: str
    namespace: str
    env: str
    group: str
    ago: float
    outcome: str | None = None


@click.command()
@click.argument("namespace", required=False, metavar="NAMESPACE")
@click.argument("env", required=False, metavar="ENV")
@click.option("--group", default="", help="Only members of this scaling group; else the whole env.")
@click.option(
    "--not-these",
    metavar="TARGET",
    multiple=True,
    help="Not this pool, written as CLUSTER::POOL, as for a create that it turned away. May be given several times.",
)
@click.option("--id", "placement_id", metavar="ID", help="Instead: the placement of this id, and when it was.")
@asks_an_agent
@click.pass_context
def place(
    ctx: click.Context,
    namespace: str | None,
    env: str | None,
    group: str,
    not_these: tuple[str, ...],
    placement_id: str | None,
    url: str,
    access: Access,
    timeout: float,
    as_json: bool,
) -> None:
    """Show where a create of ENV in NAMESPACE would go now, and why.

    The agent is only asked: nothing is created, and nothing reserved. Pools of other clusters are listed best first.
    Into a pipe or a file nothing is shortened.

    With --id, and without NAMESPACE and ENV, show where a create of the past went, and what became of it, if that was
    reported: a placement that reserved, among the last 1,000 of them since the agent was started."""
    form: type[Placement]
    if placement_id is not None:
        if namespace is not None or group or not_these:
            others = "NAMESPACE, ENV, --group and --not-these"
            raise click.UsageError(f"--id says which placement is meant; leave out {others}.", ctx)
        question, form = Question("/v1/place", {"id": placement_id}), PastPlacement
    else:
        for argument, given in zip(ctx.command.params, (namespace, env), strict=False):
            if given is None:
                raise click.MissingParameter(ctx=ctx, param=argument)
        assert namespace is not None
        assert env is not None
        parameters = {"namespace": namespace, "env": env}
        if group:
            parameters["group"] = group
        if not_these:
            parameters["not_these"] = ",".join(not_these)
        question, form = Question("/v1/place", parameters), Placement
    (answer,) = ask(url, [question], timeout, access=access)
    placement = read(url, question, answer, form)
    if as_json:
        show_json(answer)
        return
    show(lambda width: placement_lines(placement, width))


_CANDIDATES = (
    Column("target", least=14),
    Column("tier", least=11),
    number("idle"),
    number("reserved"),
    number("headroom"),
    number("age"),
    Column("state", least=6),
    Column("verdict", least=16, folds=True),
)
_TIER_STYLES = {"idle": "green", "grow": "yellow", "turned_away": "red", "excluded": "dim"}
_OUTCOME_STYLES = {"served": "green", "empty": "red", "refused": "red"}


def placement_lines(placement: Placement, width: int | None) -> Iterator[Line]:
    """The lines about one placement."""
    past = isinstance(placement, PastPlacement)
    if isinstance(placement, PastPlacement):
        of = f"{placement.namespace}/{placement.env}" + (f", group {placement.group}" if placement.group else "")
        yield from paragraph(f"placement {placement.id}, {duration(placement.ago)} ago, for {of}", width)
    yield from paragraph(placement.reason, width)
    if placement.target is None:
        goes = f"{'stayed' if past else 'stays'} in the cluster of this agent"
    else:
        goes = f"{'went' if past else 'goes'} to {placement.target}"
    yield from paragraph(f"{'the' if past else 'a'} create {goes}", width, style="bold")
    if isinstance(placement, PastPlacement):
        outcome = placement.outcome or "not reported"
        yield from paragraph(f"outcome: {outcome}", width, style=_OUTCOME_STYLES.get(outcome, ""))
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

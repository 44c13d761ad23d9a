"""`trio-federation place`: what it asks, and how it tells where a create would go and why."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.cli.conftest import Call
from tests.cli.pretending import PretendAgent, Reply, candidate, past_placement, placement, pretend_agent
from tests.federation.helpers import counted
from trio_federation.admin import Answers, admin_app, serve_http
from trio_federation.agent import Agent
from trio_federation.capacity import INT32_MAX, Capacity
from trio_federation.cli.place import Placement, placement_lines
from trio_federation.cli.tables import plain
from trio_federation.config import Federation, Log, PlacementSettings
from trio_federation.logs import configure
from trio_federation.router import Tier

FOREIGN = placement(
    candidate("east::large", verdict="chosen"),
    candidate(
        "north::small", tier="grow", idle=0, reserved=0, headroom=-1, state="", verdict="nothing idle, east::large has"
    ),
    candidate("south::small", tier="full", idle=0, age=25.2, verdict="nothing idle, cannot grow"),
)
LOCAL = placement(
    candidate("east::large", verdict=""), local=True, target=None, rule="local_idle", reason="west has 3 idle"
)
NOWHERE = placement(local=True, target=None, rule="nothing_anywhere", reason="nobody has room")

SHOWN = """\
west has none idle for agents/python; east::large has 3 idle
a create goes to east::large

target        tier  idle  reserved  headroom   age  state   verdict
east::large   idle     3         1         0  3.2s  Active  chosen
north::small  grow     0         0  no limit  3.2s  -       nothing idle, east::large has
south::small  full     0         1         0   25s  Active  nothing idle, cannot grow
"""


@pytest.fixture
def agent() -> Iterator[PretendAgent]:
    """An agent that sends creates to the east."""
    with pretend_agent() as agent:
        agent.replies = {"/v1/place": Reply(FOREIGN)}
        yield agent


def told(answer: dict[str, Any], width: int | None) -> list[str]:
    return [plain(line) for line in placement_lines(msgspec.convert(answer, Placement), width)]


def test_for_people(agent: PretendAgent, call: Call) -> None:
    assert call("place", "agents", "python", "--url", agent.url) == (0, SHOWN, [])
    assert call("place", "agents", "a b", "--group", "gpu", "--url", agent.url) == (0, SHOWN, [])
    # Only ever asks: nothing is reserved.
    assert agent.asked == ["/v1/place?namespace=agents&env=python", "/v1/place?namespace=agents&env=a+b&group=gpu"]


def test_for_programs(agent: PretendAgent, call: Call) -> None:
    agent.replies["/v1/place"] = Reply(FOREIGN | {"later": ["\u202e\x1b[31m"]})
    ended = call("place", "agents", "python", "--url", agent.url, "--json")
    assert (ended.code, ended.lines) == (0, [])
    assert json.loads(ended.output) == FOREIGN | {"later": ["\u202e\x1b[31m"]}
    assert ended.output.strip().isprintable()


def test_a_placement_of_the_past(agent: PretendAgent, call: Call) -> None:
    agent.replies["/v1/place"] = Reply(past_placement(*FOREIGN["candidates"]))
    ended = call("place", "--id", "0123456789abcdef", "--url", agent.url)
    assert agent.asked == ["/v1/place?id=0123456789abcdef"]
    assert (ended.code, ended.lines) == (0, [])
    lines = ended.output.splitlines()
    assert lines[:3] == [
        "placement 0123456789abcdef, 2m03s ago, for agents/python",
        "west has none idle for agents/python; east::large has 3 idle",
        "the create went to east::large",
    ]
    assert lines[3] == "outcome: not reported"
    assert lines[4:] == SHOWN.splitlines()[2:]
    stayed = past_placement(local=True, target=None, group="gpu", ago=0.0, outcome="served")
    agent.replies["/v1/place"] = Reply(stayed)
    lines = call("place", "--id", "0123456789abcdef", "--url", agent.url).output.splitlines()
    assert lines[0] == "placement 0123456789abcdef, 0.0s ago, for agents/python, group gpu"
    assert lines[2:4] == ["the create stayed in the cluster of this agent", "outcome: served"]
    assert json.loads(call("place", "--id", "x", "--json", "--url", agent.url).output) == stayed


def test_a_create_that_was_turned_away(agent: PretendAgent, call: Call) -> None:
    """Where it would go next, and the pools that do not count."""
    agent.replies["/v1/place"] = Reply(
        placement(
            candidate("north::small", tier="grow", verdict="chosen"),
            candidate("east::large", tier="turned_away", verdict="empty or refused 3.2 s ago"),
            candidate("east::small", tier="excluded", verdict="this create was turned away there"),
            target="north::small",
        )
    )
    ended = call(
        *("place", "agents", "python", "--not-these", "east::small", "--not-these", "south::p.1", "--url", agent.url)
    )
    assert (ended.code, ended.lines) == (0, [])
    (asked,) = agent.asked
    assert unquote(asked) == "/v1/place?namespace=agents&env=python&not_these=east::small,south::p.1"
    assert ended.output.splitlines()[3:] == [
        "target        tier         idle  reserved  headroom   age  state   verdict",
        "north::small  grow            3         1         0  3.2s  Active  chosen",
        "east::large   turned_away     3         1         0  3.2s  Active  empty or refused 3.2 s ago",
        "east::small   excluded        3         1         0  3.2s  Active  this create was turned away there",
    ]


def test_a_placement_that_is_not_remembered(agent: PretendAgent, call: Call) -> None:
    """Another address would not help."""
    agent.replies["/v1/place"] = Reply({"error": "no placement with the id 'a' is remembered"}, 404)
    ended = call("place", "--id", "a", "--url", agent.url)
    assert (ended.code, ended.output) == (1, "")
    assert ended.lines == [f"{agent.url}/v1/place: answers 404: no placement with the id 'a' is remembered"]
    # Not what an agent says of one.
    agent.replies["/v1/place"] = Reply(FOREIGN)
    ended = call("place", "--id", "a", "--url", agent.url)
    assert (ended.code, ended.output, len(ended.lines)) == (1, "", 1)
    assert "not the answer of an agent" in ended.lines[0]


def test_names_that_break_rules_are_bad_usage(agent: PretendAgent, call: Call) -> None:
    agent.replies["/v1/place"] = Reply({"error": "namespace 'TEAM' is not a label"}, 400)
    for more in ([], ["--json"]):
        ended = call("place", "TEAM", "x", "--url", agent.url, *more)
        assert (ended.code, ended.output) == (2, "")
        assert ended.lines == [f"Error: {agent.url}/v1/place: answers 400: namespace 'TEAM' is not a label"]


def test_a_create_that_stays() -> None:
    assert told(LOCAL, 80) == [
        "west has 3 idle",
        "a create stays in the cluster of this agent",
        "",
        "target       tier  idle  reserved  headroom   age  state   verdict",
        "east::large  idle     3         1         0  3.2s  Active  -",
    ]
    assert told(NOWHERE, 80) == [
        "nobody has room",
        "a create stays in the cluster of this agent",
        "",
        "no pool of another cluster was there to look at",
    ]


def test_verdicts_are_folded() -> None:
    assert told(FOREIGN, 80) == [
        "west has none idle for agents/python; east::large has 3 idle",
        "a create goes to east::large",
        "",
        "target       tier idle reserved headroom  age state  verdict",
        "east::large  idle    3        1        0 3.2s Active chosen",
        "north::small grow    0        0 no limit 3.2s -      nothing idle, east::large",
        "                                                     has",
        "south::small full    0        1        0  25s Active nothing idle, cannot grow",
    ]


def test_names_of_others_are_shown_as_they_are() -> None:
    evil = placement(
        candidate("e::[red]\x1b[31m", state="\u202eevitcA", verdict="\x07"),
        reason="\x1b]0;title\x07",
        target="e::\u2066",
    )
    lines = told(evil, None)
    assert lines[:2] == [r"\x1b]0;title\x07", r"a create goes to e::\u2066"]
    assert lines[-1].split() == [r"e::[red]\x1b[31m", "idle", "3", "1", "0", "3.2s", r"\u202eevitcA", r"\x07"]


async def test_the_command_the_answer_and_the_log_say_the_same(nursery: trio.Nursery, call: Call) -> None:
    """Of one placement, with a candidate of every tier: the reason, and each candidate's verdict, word for word."""
    agent = Agent("west", Federation(), placement=PlacementSettings(settle_time=600.0, reservation_ttl=600.0))
    now = trio.current_time()
    agent.registry.upsert(
        [
            Capacity("west", "agents", "python", "p1", running=4, observed_at=now),
            *[Capacity("east", "agents", "python", f"idle-{idle}", idle=idle, observed_at=now) for idle in (9, 2)],
            Capacity("east", "agents", "python", "grows", autoscaling_enabled=True, capacity=-1, observed_at=now),
            Capacity(
                *("east", "agents", "python", "held"),
                autoscaling_enabled=True,
                capacity=5,
                saturated_for=600.0,
                state="Saturated",
                observed_at=now,
            ),
            Capacity("east", "agents", "python", "full", observed_at=now),
            Capacity("north", "agents", "python", "empty", idle=99, observed_at=now),
            Capacity("north", "agents", "python", "other", idle=50, observed_at=now),
        ]
    )
    answers = Answers(
        exposition=agent.exposition,
        readiness=lambda: {"ready": True},
        registry=agent.registry,
        place=agent.place,
        placed=agent.placed,
        report_outcome=agent.report_outcome,
    )
    app = admin_app(answers, host="127.0.0.1")
    port = await nursery.start(partial(serve_http, app, "127.0.0.1", 0, section="admin"))
    url = f"http://127.0.0.1:{port}"
    place, asked = f"{url}/v1/place", {"namespace": "agents", "env": "python"}
    written = io.StringIO()
    configure(Log(level="debug", format="json"), written)
    async with httpx.AsyncClient(trust_env=False) as client:
        first = (await client.post(place, json=asked)).json()
        await client.post(f"{place}/{first['id']}/outcome", json={"outcome": "empty"})
        told = (await client.post(place, json=asked | {"not_these": ["north::other"]})).json()
        await client.post(f"{place}/{told['id']}/outcome", json={"outcome": "refused"})
        unknown = await client.post(f"{place}/gone/outcome", json={"outcome": "served"})
        later = (await client.get(place, params={"id": told["id"]})).json()
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert first["target"] == "north::empty"
    assert sorted(each["tier"] for each in told["candidates"]) == sorted([*Tier, "idle"])

    placed = [line for line in lines if line["event"] == "placed"][-1]
    assert told["explanation"] == [placed["reason"], *placed["candidates"]] == later["explanation"]
    assert told["reason"] == placed["reason"]
    for each, line in zip(told["candidates"], placed["candidates"], strict=True):
        assert line.startswith(f"{each['target']}: {each['verdict']} ({each['tier']}, ")
    assert [(line["id"], line["outcome"], line["target"]) for line in lines if line["event"] == "outcome"] == [
        (first["id"], "empty", "north::empty"),
        (told["id"], "refused", told["target"]),
        ("gone", "unknown", None),
    ]
    assert unknown.status_code == 404
    for word in ("empty", "refused", "unknown"):
        assert counted(agent, "trio_federation_placement_outcomes_total", outcome=word) == 1

    show = partial(call, "place", "--id", told["id"], "--url", url)
    shown = (await trio.to_thread.run_sync(show)).output.splitlines()
    assert shown[1:5] == [told["reason"], f"the create went to {told['target']}", "outcome: refused", ""]
    rows = [re.split(r"  +", line) for line in shown[6:]]
    expected = [(each["target"], each["tier"], each["verdict"]) for each in told["candidates"]]
    assert [(row[0], row[1], row[-1]) for row in rows] == expected
    as_json = await trio.to_thread.run_sync(partial(show, "--json"))
    assert json.loads(as_json.output)["explanation"] == told["explanation"]
    nursery.cancel_scope.cancel()


names = st.text("abcdefgh01-.", min_size=1, max_size=253)
words = st.text(max_size=80)
counts = st.one_of(st.integers(0, 999), st.integers(0, INT32_MAX))
candidates = st.builds(
    candidate,
    st.builds("{}::{}".format, st.text("abc-", min_size=1, max_size=63), names),
    tier=st.sampled_from(["idle", "grow", "saturated", "full", "turned_away", "excluded"]),
    idle=counts,
    reserved=counts,
    headroom=counts,
    age=st.floats(0, 1e7),
    state=words,
    verdict=words,
)


@given(st.lists(candidates, min_size=1, max_size=5), words, st.integers(80, 120))
def test_it_fits_and_has_every_number(found: list[dict[str, Any]], reason: str, width: int) -> None:
    lines = told(placement(*found, reason=reason * 3, target=found[0]["target"]), width)
    assert [line for line in lines if cell_len(line) > width] == []
    words = iter(" ".join(lines).split())
    for each in found:  # in their order
        for field in ("idle", "reserved", "headroom"):
            assert str(each[field]) in words


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "Missing argument 'NAMESPACE'"),
        (["agents"], "Missing argument 'ENV'"),
        (["agents", "--group", "gpu"], "Missing argument 'ENV'"),
        (["agents", "python", "--id", "a"], "leave out NAMESPACE, ENV, --group and --not-these"),
        (["agents", "--id", "a"], "leave out NAMESPACE, ENV, --group and --not-these"),
        (["--group", "gpu", "--id", "a"], "leave out NAMESPACE, ENV, --group and --not-these"),
        (["--not-these", "a::b", "--id", "a"], "leave out NAMESPACE, ENV, --group and --not-these"),
        (["agents", "python", "gpu"], "unexpected extra argument"),
        (["agents", "python", "--url", "127.0.0.1:9465"], "is no address; write it as http://HOST:PORT"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, call: Call) -> None:
    ended = call("place", *arguments)
    assert (ended.code, ended.output) == (2, "")
    assert words in "\n".join(ended.lines)
    assert "Usage: trio-federation place [OPTIONS] NAMESPACE ENV" in ended.lines


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["people", "json"])
@pytest.mark.parametrize(
    "reply, words",
    [
        (Reply(b"404 not found", 404), "answers 404; no agent of this version answers here"),
        (Reply({"error": "another page's"}, 403), "answers 403: another page's"),
        (Reply({"candidates": []}), "not the answer of an agent (object missing required field"),
        (Reply(placement(candidate("a::b", idle="3"))), "not the answer of an agent (expected `int`, got `str`"),
    ],
)
def test_no_answer(reply: Reply, words: str, as_json: list[str], agent: PretendAgent, call: Call) -> None:
    agent.replies["/v1/place"] = reply
    ended = call("place", "agents", "python", "--url", agent.url, *as_json)
    assert (ended.code, ended.output, len(ended.lines)) == (1, "", 1)
    assert ended.lines[0].startswith(f"{agent.url}/v1/place: {words}")

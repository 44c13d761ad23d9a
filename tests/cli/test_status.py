"""`trio-federation status`: what it asks, what it tells people and programs, and how it ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.cli.conftest import Call
from tests.cli.pretending import PretendAgent, Reply, capacity, hub_part, part, pretend_agent, readiness, record
from tests.process.running import COMMAND, agent_file, environment, hub_file, run_all, start, wait_idle
from trio_federation.capacity import INT32_MAX
from trio_federation.cli.status import Known, Readiness, capacity_lines, readiness_lines
from trio_federation.cli.tables import plain

WEST = record("west", "python", "small", scaling_group="cpu", idle=0, autoscaling_enabled=True, capacity=-1)
EAST = record("east", "python", "small", running=7, pending=2, age=12.4, state="")
NORTH = record("north", "browser", "large", autoscaling_enabled=True, capacity=12, age=None)
# Somebody else's whole env, from a source that knows no members.
SOUTH = record("south", "python", "", autoscaling_enabled=True, capacity=0, namespace="zoo")
ALL = capacity(WEST, EAST, NORTH, SOUTH)

#: what is shown of `readiness()` and `ALL`
SHOWN = """\
ready
cluster west, federated, version 0.1.0, up 12m34s

part                    state        for  last success  last error  next try
hub hub-a.example:7443  connected  1m04s      0.4s ago           -         -
source[0]:fixtures      live         12s      0.4s ago           -   in 4.6s

records: 4, envs: 3; * marks the cluster of this agent

cluster  pool   group  idle  running  pending  desired  headroom   age  state

agents/browser
north    large  -         3       12        0       20        12     -  Active

agents/python
east     small  -         3        7        2       20         -   12s  -
west *   small  cpu       0       12        0       20  no limit  3.2s  Active

zoo/python
south    -      -         3       12        0       20         0  3.2s  Active
"""


@pytest.fixture
def agent() -> Iterator[PretendAgent]:
    """An agent that is ready and knows of four records."""
    with pretend_agent() as agent:
        agent.replies = {"/readyz": Reply(readiness()), "/v1/capacity": Reply(ALL)}
        yield agent


def told(known: dict[str, Any], width: int | None = None) -> list[str]:
    return [plain(line) for line in readiness_lines(msgspec.convert(known, Readiness), width)]


# What it tells.


def test_for_people(agent: PretendAgent, call: Call) -> None:
    assert call("status", "--url", agent.url) == (0, SHOWN, [])
    assert agent.asked == ["/readyz", "/v1/capacity"]


def test_for_programs(agent: PretendAgent, call: Call) -> None:
    """The answers as they came, with what this version does not know, and nothing that a terminal would obey."""
    said = readiness(later={"x": 0.1}, why_not=["\u202e\x1b[31m\x9b"])
    agent.replies["/readyz"] = Reply(said)
    ended = call("status", "--url", agent.url, "--json")
    assert (ended.code, ended.lines) == (0, [])
    assert json.loads(ended.output) == {"readiness": said, "capacity": ALL}
    assert ended.output.endswith("}\n")
    assert ended.output.strip().isprintable()
    assert ended.output.isascii()


@pytest.mark.parametrize(
    "state, said",
    [
        ("live", "ready"),
        ("failing", "ready, but not all is well: source[0]:fixtures failing"),
        ("not_live", "ready, but not all is well: source[0]:fixtures not live"),
    ],
)
def test_one_that_is_ready_and_not_well_says_so_first(agent: PretendAgent, call: Call, state: str, said: str) -> None:
    """Ready stays so whatever fails later; that must not pass for all being well."""
    agent.replies["/readyz"] = Reply(readiness(sources=[part("source[0]:fixtures") | {"state": state}]))
    ended = call("status", "--url", agent.url)
    assert (ended.code, ended.output.splitlines()[0]) == (0, said)


def test_an_agent_that_is_not_ready_is_an_answer(agent: PretendAgent, call: Call) -> None:
    said = readiness(ready=False, why_not=["source[0]:fixtures has not told yet", "no hub has told yet"])
    agent.replies["/readyz"] = Reply(said, 503)
    ended = call("status", "--url", agent.url)
    assert (ended.code, ended.lines) == (0, [])
    assert ended.output.splitlines()[:4] == [
        "not ready",
        "  - source[0]:fixtures has not told yet",
        "  - no hub has told yet",
        "cluster west, federated, version 0.1.0, up 12m34s",
    ]
    as_json = call("status", "--url", agent.url, "--json")
    assert as_json.code == 0
    assert json.loads(as_json.output)["readiness"] == said


def test_one_that_cannot_say_how_it_is(agent: PretendAgent, call: Call) -> None:
    agent.replies["/readyz"] = Reply({"ready": False, "why_not": ["this process could not say how it is"]}, 503)
    ended = call("status", "--url", agent.url)
    assert ended.code == 0
    assert ended.output.splitlines()[:2] == ["not ready", "  - this process could not say how it is"]
    assert "agents/python" in ended.output


def test_a_hub_without_an_agent(agent: PretendAgent, call: Call) -> None:
    hub = {"reporters": 2, "watchers": 3, "records": 12}
    said = readiness(cluster_id=None, mode="hub", sources=[], hubs=[], hub=hub)
    agent.replies = {"/readyz": Reply(said), "/v1/capacity": Reply({"error": "this process runs no agent"}, 404)}
    assert call("status", "--url", agent.url).output.splitlines() == [
        "ready",
        "hub, version 0.1.0, up 12m34s",
        "hub here: 2 reporters, 3 watchers, 12 records",
        "",
        "this process runs no agent",
    ]
    as_json = call("status", "--url", agent.url, "--json")
    assert json.loads(as_json.output) == {"readiness": said, "capacity": {"error": "this process runs no agent"}}
    assert as_json.code == 0


def test_who_reports_to_a_hub() -> None:
    """As many as fit on one line of a terminal, and all of them elsewhere."""
    names = [f"cluster-{number}" for number in range(12)]
    hub = {"reporters": 12, "watchers": 3, "records": 12, "clusters": names}
    known = readiness(cluster_id=None, mode="hub", sources=[], hubs=[], hub=hub)
    assert told(known)[2:] == [
        "hub here: 12 reporters, 3 watchers, 12 records",
        f"reporting: {', '.join(names)}",
    ]
    assert told(known, 60)[3] == "reporting: cluster-0, cluster-1, cluster-2 and 9 more"
    proven = hub | {"clusters": names[:2], "credentials": {"cluster-0": "token 3", "cluster-1": "certificate"}}
    assert told(readiness(hub=proven))[3] == "reporting: cluster-0 (token 3), cluster-1 (certificate)"
    assert told(readiness(hub=hub | {"clusters": ["\x1b[31m"]}))[3] == r"reporting: \x1b[31m"


def test_what_should_be_known() -> None:
    """Notes take nothing from being ready: what they are about was asked for."""
    notes = ["a.toml: [federation] hubs: not used, the agent runs single-cluster", "evil\x1b[31m"]
    lines = told(readiness(notes=notes, hubs=[], mode="single-cluster"))
    assert lines[:5] == [
        "ready",
        "cluster west, single-cluster, version 0.1.0, up 12m34s",
        f"note: {notes[0]}",
        r"note: evil\x1b[31m",
        "",
    ]
    # An agent of before says nothing of them.
    assert told({"ready": True}) == ["ready", ""]


def test_what_was_dropped_is_told_and_is_not_what_is_wrong_now() -> None:
    error = {"what": "collect", "text": "OSError", "age": 3.2}
    lines = told(
        readiness(
            hubs=[hub_part("hub-a:7443", dropped={"capacity": 12, "duplicate": 4000000000})],
            sources=[part("source[0]:a", dropped={"b": 2, "a": 2, "c\x07": 3}, last_error=error), part("source[1]:b")],
        )
    )
    assert lines[0] == "ready"
    assert [line for line in lines if line.startswith("    ")] == [
        "    dropped so far: duplicate 4000000000, capacity 12",
        "    collect: OSError",
        r"    dropped so far: c\x07 3, a 2, b 2",
    ]


def test_parts_that_fail() -> None:
    error = {"what": "collect", "text": "OSError: no such file", "age": 3.2}
    down = {"report": {"up": True, "since": 64.0}, "watch": {"up": False, "since": 3.0}}
    lost = {"report": {"up": False, "since": 700.0}, "watch": {"up": False, "since": 700.0}}
    lines = told(
        readiness(
            hubs=[
                hub_part("hub-a:7443", "partly", streams=down, last_success=64.0, last_batch=40.8, next_try=0.52),
                hub_part("hub-b:7443", "failing", streams=lost, last_success=None, last_batch=None, last_error=error),
            ],
            sources=[
                part("source[0]:a", "not_live", last_error=error, failures=1),
                part("source[1]:b", "starting", last_success=None, next_try=None),
            ],
            sinks=[part("sink[0]:c", "blocked", since=7200.0, last_error=error, failures=7, next_try=None)],
            plugin_failures=["plugin 'x' of y 1.0: cannot be imported"],
        )
    )
    assert lines[3:] == [
        "part            state       for  last success  last error  next try",
        "hub hub-a:7443  partly    1m04s       41s ago           -   in 0.5s",
        "    report up for 1m04s, watch down for 3.0s, last batch 41s ago",
        "hub hub-b:7443  failing   1m04s         never    3.2s ago         -",
        "    report down for 11m40s, watch down for 11m40s, last batch never",
        "    collect: OSError: no such file",
        "source[0]:a     not live    12s      0.4s ago    3.2s ago   in 4.6s",
        "    collect: OSError: no such file",
        "source[1]:b     starting    12s         never           -         -",
        "sink[0]:c       blocked   2h00m      0.4s ago    3.2s ago         -",
        "    collect: OSError: no such file (failures so far: 7)",
        "",
        "failed: plugin 'x' of y 1.0: cannot be imported",
    ]


def test_names_of_others_are_shown_as_they_are(agent: PretendAgent, call: Call) -> None:
    """No markup, no pictures, no colours, nothing that runs backwards."""
    evil = record("west", "python", "small", scaling_group="[red]x[/]:smile:", state="\u202eevitcA\x1b[31m\u200b")
    agent.replies["/v1/capacity"] = Reply(capacity(evil))
    ended = call("status", "--url", agent.url)
    assert r"west *   small  [red]x[/]:smile:" in ended.output
    assert r"3.2s  \u202eevitcA\x1b[31m\u200b" in ended.output


# What it asks for.


def test_only_some_of_it(agent: PretendAgent, call: Call) -> None:
    agent.replies["/v1/capacity"] = Reply(capacity())
    ended = call("status", "--url", agent.url, "--namespace", "agents", "--env", "a b")
    assert ended.output.splitlines()[-1] == "records: none, namespace agents, env a b"
    assert call("status", "--url", agent.url, "--namespace", "agents").code == 0
    assert agent.asked == [
        "/readyz",
        "/v1/capacity?namespace=agents&env=a+b",
        "/readyz",
        "/v1/capacity?namespace=agents",
    ]


def test_what_is_not_known_of_an_own_cluster_is_not_marked(agent: PretendAgent, call: Call) -> None:
    agent.replies["/v1/capacity"] = Reply(capacity(EAST))
    assert "*" not in call("status", "--url", agent.url).output
    agent.replies["/v1/capacity"] = Reply(capacity(EAST, WEST, cluster_id=None))
    assert "*" not in call("status", "--url", agent.url).output


# How it ends.


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--url", "localhost"], "Invalid value for '--url': 'localhost' is no address; write it as http://HOST:PORT"),
        (["--timeout", "0"], "0.0 is not in the range 0.1<=x<=3600"),
        (["--timeout", "nan"], "give a number of seconds"),
        (["--timeout", "inf"], "inf is not in the range"),
        (["--env", "python"], "--env needs --namespace, too"),
        (["west"], "unexpected extra argument"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, call: Call) -> None:
    ended = call("status", *arguments)
    assert (ended.code, ended.output) == (2, "")
    assert words in "\n".join(ended.lines)


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["people", "json"])
@pytest.mark.parametrize(
    "replies, words",
    [
        # an older agent, and one whose metrics are asked
        ({"/readyz": Reply(b"404 not found", 404)}, "/readyz: answers 404; no agent of this version answers here"),
        ({"/v1/capacity": Reply(b"404 not found", 404)}, "/v1/capacity: answers 404; no agent"),
        ({"/v1/capacity": Reply({"error": "not found"}, 404)}, "/v1/capacity: answers 404: not found; [admin] bind"),
        ({"/readyz": Reply({"status": "UP"})}, "/readyz: not the answer of an agent (object missing required field"),
        ({"/readyz": Reply(readiness(sources=3))}, "/readyz: not the answer of an agent (expected `array`, got `int`"),
        ({"/v1/capacity": Reply({})}, "/v1/capacity: not the answer of an agent"),
        ({"/v1/capacity": Reply(capacity(WEST | {"idle": -1}))}, "/v1/capacity: not the answer of an agent"),
        ({"/v1/capacity": Reply(capacity(WEST | {"idle": 10**30}))}, "/v1/capacity: not the answer of an agent"),
    ],
)
def test_no_answer(replies: dict[str, Reply], words: str, as_json: list[str], agent: PretendAgent, call: Call) -> None:
    agent.replies |= replies
    ended = call("status", "--url", agent.url, *as_json)
    assert (ended.code, ended.output, len(ended.lines)) == (1, "", 1)
    assert ended.lines[0].startswith(agent.url + words)
    verbose = call("--verbose", "status", "--url", agent.url, *as_json)
    assert verbose.code == 1
    assert verbose.lines[0].startswith("Traceback")
    assert verbose.lines[-1] == ended.lines[0]


def test_names_that_break_rules_are_bad_usage(agent: PretendAgent, call: Call) -> None:
    agent.replies["/v1/capacity"] = Reply({"error": "bad namespace"}, 400)
    ended = call("status", "--url", agent.url, "--namespace", "TEAM")
    assert (ended.code, ended.output) == (2, "")
    assert ended.lines == [f"Error: {agent.url}/v1/capacity: answers 400: bad namespace"]


def test_nobody_there(call: Call) -> None:
    ended = call("status", "--url", "http://127.0.0.1:1")
    assert (ended.code, ended.output) == (1, "")
    assert ended.lines == [
        "http://127.0.0.1:1: cannot be reached: connection refused; is the agent running? "
        "[admin] bind in the agent's configuration says where it answers"
    ]


# How it is shown.

names = st.text("abcdefgh01-", min_size=1, max_size=63)
long_names = st.one_of(names, st.text("abcdefgh01-.", min_size=64, max_size=253))
words = st.text(max_size=63)
counts = st.one_of(st.integers(0, 999), st.integers(0, INT32_MAX))
records = st.builds(
    record,
    names,
    long_names,
    st.one_of(st.just(""), long_names),
    namespace=names,
    scaling_group=words,
    idle=counts,
    running=counts,
    pending=counts,
    desired=counts,
    autoscaling_enabled=st.just(True),
    capacity=counts,
    state=words,
    age=st.floats(0, 1e7),
)


@given(st.lists(records, min_size=1, max_size=5), st.integers(80, 120))
def test_it_fits_and_has_every_number(found: list[dict[str, Any]], width: int) -> None:
    known = msgspec.convert(capacity(*found, cluster_id=found[0]["cluster_id"]), Known)
    lines = [plain(line) for line in capacity_lines(known, {}, width)]
    assert [line for line in lines if cell_len(line) > width] == []
    # The numbers of each record, in their order, whatever is folded between them.
    shown = " ".join(lines).split()
    for each in found:
        left = iter(shown)
        for field in ("idle", "running", "pending", "desired", "capacity"):
            assert str(each[field]) in left


@given(st.lists(st.builds(part, words, words, since=st.floats(0, 1e9), failures=counts), max_size=3), words, words)
def test_the_parts_fit(parts: list[dict[str, Any]], name: str, text: str) -> None:
    error = {"what": "collect", "text": text * 5, "age": 1e6}
    hub = hub_part(name * 3, "partly", last_error=error, streams={"watch": {"up": False, "since": None}})
    known = readiness(sources=parts, hubs=[hub], why_not=[text * 3], cluster_id=name, plugin_failures=[text * 5])
    assert [line for line in told(known, 80) if cell_len(line) > 80] == []


def test_long_names_lose_their_middle_and_no_number() -> None:
    pools = [f"sandbox-pool-of-{kind}-machines-in-zone-{zone}" for kind, zone in (("large", "a"), ("small", "b"))]
    found = [record("eu-central-1-production", "python", pool, scaling_group="gpu", pending=123456) for pool in pools]
    lines = [plain(line) for line in capacity_lines(msgspec.convert(capacity(*found), Known), {}, 80)]
    assert lines[2:] == [
        "cluster      pool        group idle running pending desired headroom  age state",
        "",
        "agents/python",
        "eu-cen…ction sandb…one-a gpu      3      12  123456      20        - 3.2s Active",
        "eu-cen…ction sandb…one-b gpu      3      12  123456      20        - 3.2s Active",
    ]


def on_terminal(columns: int, *arguments: str, **variables: str) -> str:
    """What the command writes to a terminal of so many columns."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    written = b""
    with subprocess.Popen(
        [COMMAND, *arguments], stdout=terminal, stderr=terminal, env=environment() | {"TERM": "xterm"} | variables
    ) as process:
        os.close(terminal)
        with suppress(OSError):  # how Linux says that nobody holds the other end any more
            while part := os.read(controller, 65536):
                written += part
        os.close(controller)
        assert process.wait() == 0
    return written.decode().replace("\r\n", "\n")


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.slow
def test_colours_are_for_terminals(agent: PretendAgent) -> None:
    """And only for those who want them; a pipe gets none, whatever the environment says of colours."""
    shown = on_terminal(100, "status", "--url", agent.url)
    assert "\x1b[1;32mready\x1b[0m\n" in shown
    assert without_colours(shown) == SHOWN
    for refusal in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert on_terminal(100, "status", "--url", agent.url, **refusal) == SHOWN
    piped = subprocess.run(
        [COMMAND, "status", "--url", agent.url],
        env=environment() | {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "xterm"},
        capture_output=True,
        check=True,
    )
    assert piped.stdout.decode() == SHOWN
    assert piped.stderr == b""


def test_a_terminal_gets_what_fits(agent: PretendAgent) -> None:
    long = record("a" * 63, "b" * 200, "c" * 100, idle=INT32_MAX)
    agent.replies["/v1/capacity"] = Reply(capacity(long))
    for columns in (80, 60):
        shown = without_colours(on_terminal(columns, "status", "--url", agent.url))
        assert max(len(line) for line in shown.splitlines()) <= columns
        assert str(INT32_MAX) in shown.split()


def test_an_encoding_that_does_not_have_it_all(agent: PretendAgent) -> None:
    agent.replies["/v1/capacity"] = Reply(capacity(record("west", "python", "small", state="né 两")))
    ended = subprocess.run(
        [COMMAND, "status", "--url", agent.url],
        env=environment() | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=True,
    )
    assert rb"n\xe9 \u4e24" in ended.stdout.replace(b"\xe9", rb"\xe9")
    assert ended.stderr == b""


def test_whoever_has_read_enough_may_go(agent: PretendAgent) -> None:
    """As in `trio-federation status | head -1`; what does not fit the pipe is not missed."""
    many = [record("west", f"env-{number}", "small") for number in range(5000)]
    agent.replies["/v1/capacity"] = Reply(capacity(*many))
    # Unbuffered, Python takes a write that was cut short for a whole one.
    buffered = environment() | {"PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        [COMMAND, "status", "--url", agent.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 1


# With agents that are there.


@pytest.mark.slow
async def test_real_agents(nursery: trio.Nursery, tmp_path: Path) -> None:
    """A hub and two agents: what one of them says of itself and both clusters, and where it would place a create."""
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret="secret"))
    await hub.started()
    idle = {"west": 0, "east": 7}
    for name in idle:
        agent_file(tmp_path / f"{name}.toml", name, {name: idle[name]}, hub_port=hub.hub_port, secret="secret")
    west, east = [await start(nursery, "run", tmp_path / f"{name}.toml") for name in idle]
    await west.started()
    await east.started()
    await wait_idle(west.metrics_port, lambda idle: len(idle) == 4)

    url = ["--url", f"http://127.0.0.1:{west.admin_port}"]
    ended = await run_all(
        people=[COMMAND, "status", *url],
        programs=[COMMAND, "status", *url, "--json"],
        env=[COMMAND, "status", *url, "--namespace", "team-a", "--env", "python"],
        other=[COMMAND, "status", *url, "--namespace", "team-b"],
        wrong=[COMMAND, "status", *url, "--namespace", "Team"],
        place=[COMMAND, "place", "team-a", "python", *url],
        nowhere=[COMMAND, "place", "team-a", "python", "--group", "tpu", *url],
        metrics=[COMMAND, "status", "--url", f"http://127.0.0.1:{west.metrics_port}"],
        hub=[COMMAND, "status", "--url", f"http://127.0.0.1:{hub.admin_port}"],
    )
    codes = {name: each.process.returncode for name, each in ended.items()}
    assert codes == {name: {"wrong": 2, "metrics": 1}.get(name, 0) for name in ended}

    lines = ended["people"].output.splitlines()
    assert lines[0] == "ready"
    assert lines[1].startswith("cluster west, federated, version ")
    assert [" ".join(line.split()[:3]) for line in lines[4:6]] == [
        f"hub 127.0.0.1:{hub.hub_port} connected",
        f"source[0]:fixtures live {lines[5].split()[2]}",
    ]
    assert lines[7] == "records: 2, envs: 1; * marks the cluster of this agent"
    assert [line.split()[0] for line in lines[12:]] == ["east", "west"]
    assert "west *" in lines[13]
    said = json.loads(ended["programs"].output)
    assert said["readiness"]["ready"] is True
    assert {each["cluster_id"]: each["idle"] for each in said["capacity"]["records"]} == idle
    assert "records: 2, envs: 1, namespace team-a, env python; " in ended["env"].output
    assert ended["other"].output.endswith("\nrecords: none, namespace team-b\n")

    assert ended["place"].output.splitlines()[1].startswith("a create goes to east::")
    assert ended["place"].output.splitlines()[4].endswith("chosen")
    assert ended["nowhere"].output.splitlines()[1] == "a create stays in the cluster of this agent"

    (line,) = ended["wrong"].lines
    assert "/v1/capacity: answers 400: namespace" in line
    (line,) = ended["metrics"].lines
    assert "/v1/capacity: answers 404" in line
    assert "[admin] bind" in line
    assert ended["hub"].output.splitlines()[1].startswith("hub, version ")
    assert ended["hub"].output.splitlines()[2:4] == [
        "hub here: 2 reporters, 2 watchers, 2 records",
        "reporting: east (shared), west (shared)",
    ]

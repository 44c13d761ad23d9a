"""Who speaks for a cluster in a whole federation, where each has a token of its own: whatever anybody does, a record of
a cluster is one that its own credential has sent. Then what two clusters under one id come to, and one cluster under
two; how a credential is replaced or denied while everybody works; and what an agent makes of a new one."""

from __future__ import annotations

import random
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
import trio
from click.testing import CliRunner
from hypothesis import event, given, settings
from hypothesis import strategies as st
from structlog.typing import EventDict
from trio.testing import MockClock

import trio_federation.hub
from tests.federation.helpers import counted, item, lines
from tests.simulation import SECRET, PushingSource, Simulation, member, sampled, simulated_federation
from trio_federation.capacity import Capacity
from trio_federation.cli.token import token as token_command
from trio_federation.config import HubSettings, PolicySettings, load
from trio_federation.credentials import CertificateName, DenyList, make_token, read_deny_list, read_token
from trio_federation.errors import (
    AlreadyExists,
    ConfigurationError,
    InvalidArgument,
    PermissionDenied,
    RpcError,
    Unauthenticated,
)
from trio_federation.hub import Hub
from trio_federation.identity import Trusted
from trio_federation.pb.sandbox.sync.v1 import ClusterOrigin, ReportFederationRequest, WatchFederationRequest
from trio_federation.rpc import IncomingReport, MemoryLink
from trio_federation.samples import SampleTable
from trio_federation.testing import run_simulated
from trio_federation.wire import WITHDRAWN_AGE_MS, ReceivedReport

TOKENS = HubSettings(accept=("token",))
NEXT_SECRET = "simulated-secret-4712"
ELSEWHERE = "the-secret-of-another-hub"


def denying(*entries: str, secrets: tuple[str, ...] = (SECRET,)) -> Trusted:
    """What a hub takes for proof whose deny list has these lines."""
    denied, faults = read_deny_list("\n".join(entries))
    assert not faults
    return Trusted(("token",), secrets, denied)


# --- no record but one's own -----------------------------------------------------------------------------------------

#: what peers come with; those of home and of watch, whose agents are honest, nobody else has
CREDENTIALS = {
    "west 1": make_token(SECRET, "west", 1),
    "west 2": make_token(SECRET, "west", 2),
    "east 1": make_token(SECRET, "east", 1),
    "a home of its own making": make_token(ELSEWHERE, "home", 1),
    "a north of its own making": make_token(ELSEWHERE, "north", 1),
    "west's, called north": make_token(SECRET, "west", 1).replace("west", "north"),
    "the hub's secret": SECRET,
    "none": "",
}
#: whose records each of them may send, and with which serial
GOOD_FOR = {"west 1": ("west", 1), "west 2": ("west", 2), "east 1": ("east", 1)}
IDS = ("west", "east", "home", "watch", "north")
POOLS = ("p1", "p2", "honest")


class Said(NamedTuple):
    """A record of a report, as somebody makes it up."""

    cluster: str
    pool: str
    withdrawn: bool
    seq: int


class Row(NamedTuple):
    """A row of origins, as somebody makes it up."""

    cluster: str
    #: None: that of the honest agent of home
    instance: str | None
    uptime_ms: int


class Open(NamedTuple):
    """Somebody makes a call."""

    credential: str
    cluster: str
    instance: str | None
    uid: str | None


class Send(NamedTuple):
    """Somebody sends a report on one of the calls that were made, or tries to."""

    call: int
    items: list[Said]
    rows: list[Row]


class Leave(NamedTuple):
    """Somebody ends one of the calls: well, or by dying."""

    call: int
    said_goodbye: bool


class Deny(NamedTuple):
    """The deny list is replaced."""

    entries: frozenset[str]


class Wait(NamedTuple):
    """Nobody does anything."""

    seconds: float


Step = Open | Send | Leave | Deny | Wait
#: how a call is made
OpenT = TypeVar("OpenT")


def script_of(seed: int) -> list[Step]:
    """Some dozens of steps, drawn by lot. Half of the calls are honest ones, and most reports go to the latest calls,
    so that much of what is said is let in."""
    draw = random.Random(seed)

    def opened() -> Open:
        if draw.random() < 0.5:
            credential = draw.choice(list(GOOD_FOR))
            return Open(credential, GOOD_FOR[credential][0], draw.choice(("aa", "bb", None)), None)
        uid = draw.choice((None, None, "the-uid-of-home", "u-west"))
        credential = draw.choice([*GOOD_FOR, *CREDENTIALS])
        claimed = "north" if "north" in credential else draw.choice(IDS)
        return Open(credential, claimed, draw.choice(("aa", "bb", None)), uid)

    return steps_of(draw, opened)


def steps_of(draw: random.Random, opened: Callable[[], OpenT]) -> list[OpenT | Send | Leave | Deny | Wait]:
    """Some dozens of steps; `opened` draws how a call is made."""

    def sent() -> Send:
        said = [
            Said(draw.choice(("", *IDS)), draw.choice(POOLS), draw.random() < 0.3, draw.choice((0, 1, 2, 5, 2**62)))
            for _ in range(draw.randint(1, 4))
        ]
        rows = [
            Row(draw.choice(("", *IDS)), draw.choice((None, "aa", "bb")), draw.choice((0, 60_000, 2**40, -5)))
            for _ in range(draw.randint(0, 2))
        ]
        return Send(draw.randint(1, 6), said, rows)

    def step() -> OpenT | Send | Leave | Deny | Wait:
        kind = draw.choices(("open", "send", "leave", "deny", "wait"), (6, 9, 2, 2, 1))[0]
        if kind == "open":
            return opened()
        if kind == "send":
            return sent()
        if kind == "leave":
            return Leave(draw.randint(1, 6), draw.random() < 0.5)
        if kind == "deny":
            lists = ((), (), (), ("west",), ("east",), ("west.1",), ("west.1", "west.2"), ("east.1", "west"))
            return Deny(frozenset(draw.choice(lists)))
        return Wait(draw.choice((0.5, 3.0, 16.0)))

    return [step() for _ in range(draw.randint(15, 40))]


@dataclass
class Ledger:
    """What was sent with which credential. Each record has an idle that no other has, by which it is known again."""

    sent: dict[int, tuple[str, str]] = field(default_factory=dict)
    withdrawn: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: how often each cluster was put on the deny list, by which the hub withdraws what it has of it
    denials: Counter[str] = field(default_factory=Counter)
    told_withdrawn: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: how many records of others than home a watcher was told
    told: int = 0
    wrong: list[str] = field(default_factory=list)
    denied: DenyList = field(default_factory=DenyList)

    def speaks_for(self, credential: str, claimed: str) -> str | None:
        """Whose records a call may bring in now; None: nobody's."""
        cluster_id, serial = GOOD_FOR.get(credential, ("", 0))
        return cluster_id if cluster_id == claimed and not self.denied.denies(cluster_id, serial) else None

    def check(self, where: str, cluster_id: str, pool: str, idle: int) -> None:
        """A record that somebody was told, or that a hub would tell."""
        if cluster_id == "home" and (pool, idle) == ("honest", 7):
            return
        if self.sent.get(idle) != (cluster_id, pool):
            self.wrong.append(f"{where}: {cluster_id}/{pool} with idle {idle}, sent by {self.sent.get(idle)}")

    def check_withdrawal(self, cluster_id: str, pool: str) -> None:
        """A withdrawal that a watcher was told, who has watched from the beginning."""
        self.told_withdrawn[cluster_id, pool] += 1
        said = self.withdrawn[cluster_id, pool] + self.denials[cluster_id]
        if self.told_withdrawn[cluster_id, pool] > said:
            self.wrong.append(f"a withdrawal of {cluster_id}/{pool} that nobody has sent")


class Call:
    """A call that somebody has made, in a task of its own, which ends when the hub ends it."""

    def __init__(self, fed: Simulation, how: Open) -> None:
        self.how = how
        self.fed = fed
        self.link = MemoryLink(client="somebody", server="hub-0")
        self._to_call, self._at_call = trio.open_memory_channel[ReportFederationRequest | None](100)

    async def run(self) -> None:
        """Its life."""
        connect = self.fed.connection(
            self.how.cluster,
            instance=self.how.instance,
            credential=CREDENTIALS[self.how.credential],
            uid=self.how.uid,
            link=self.link,
        )
        with suppress(RpcError):
            try:
                async with connect as connection, connection.report() as call:
                    async for message in self._at_call:
                        if message is None:
                            await call.end()
                            await call.wait_answered()
                            return
                        await call.send(message)
            except BaseExceptionGroup as group:
                if group.split(RpcError)[1] is not None:
                    raise
            finally:
                self._at_call.close()

    def send(self, message: ReportFederationRequest | None) -> bool:
        """Say something, or goodbye; False where the call has ended."""
        try:
            self._to_call.send_nowait(message)
        except trio.BrokenResourceError:
            return False
        return True


async def watch_all(fed: Simulation, ledger: Ledger) -> None:
    """Look at everything that is relayed, as it comes."""
    async with fed.connection("watch") as connection, connection.watch(WatchFederationRequest()) as call:
        while True:
            for each in (await call.receive()).items:
                if each.observed_for_ms >= WITHDRAWN_AGE_MS:
                    ledger.check_withdrawal(each.cluster_id, each.member_pool)
                else:
                    ledger.told += each.cluster_id != "home"
                    ledger.check("a watcher was told", each.cluster_id, each.member_pool, each.idle)


async def play(script: Sequence[Step]) -> Ledger:
    """Do all of it, in a federation with two honest agents, of which one watches; look at everything after each
    step."""
    ledger, made = Ledger(), list[Call]()
    async with simulated_federation("watch", "home", hub_settings=TOKENS) as fed:
        fed["home"].source.set(member("home", "honest", idle=7))
        fed["home"].source.uid = "the-uid-of-home"
        fed.nursery.start_soon(watch_all, fed, ledger)
        await fed.settle()
        for number, step in enumerate(script):
            await take(step, fed, ledger, made)
            await trio.sleep(0.3)
            for record in fed.hubs[0].hub.snapshot():
                ledger.check("the hub shows", record.cluster_id, record.member_pool, record.idle)
                if ledger.denied.denies(record.cluster_id):
                    ledger.wrong.append(f"the hub shows a record of {record.cluster_id}, which is denied")
            for record in fed["watch"].registry.snapshot():
                ledger.check("watch knows", record.cluster_id, record.member_pool, record.idle)
                if ledger.denied.denies(record.cluster_id):
                    ledger.wrong.append(f"watch knows a record of {record.cluster_id}, which is denied")
            if fed["watch"].idle("home") != [7]:
                ledger.wrong.append(f"watch knows {fed['watch'].idle('home')} of home, whose agent has always said 7")
            assert ledger.wrong == [], f"after step {number}, {step}"
        assert not any(token.rpartition(".")[2] in fed.log.text() for token in CREDENTIALS.values() if token)
    return ledger


async def take(step: Step, fed: Simulation, ledger: Ledger, made: list[Call]) -> None:
    """One step, as far as there is something that it can be done to."""
    if isinstance(step, Open):
        made.append(Call(fed, step))
        fed.nursery.start_soon(made[-1].run)
    elif isinstance(step, Deny):
        before, trusted = ledger.denied, denying(*sorted(step.entries))
        ledger.denied = trusted.denied
        ledger.denials.update(trusted.denied.clusters - before.clusters)
        fed.hubs[0].trust(trusted)
    elif isinstance(step, Wait):
        await trio.sleep(step.seconds)
    elif not made:
        return
    elif isinstance(step, Leave):
        call = made[-min(step.call, len(made))]
        if step.said_goodbye:
            call.send(None)
        else:
            call.link.cut()
    else:
        send(step, made[-min(step.call, len(made))], ledger, fed["home"].agent.instance)


def send(step: Send, call: Call, ledger: Ledger, instance_of_home: str) -> None:
    """Send a report, and write down what of it may be taken in."""
    speaks_for = ledger.speaks_for(call.how.credential, call.how.cluster)
    message = ReportFederationRequest(
        origins=[
            ClusterOrigin(cluster_id=row.cluster, instance=row.instance or instance_of_home, uptime_ms=row.uptime_ms)
            for row in step.rows
        ]
    )
    for said in step.items:
        idle = 1000 + len(ledger.sent)
        if said.withdrawn:
            message.items.append(item(said.pool, cluster=said.cluster, seq=said.seq, age_ms=WITHDRAWN_AGE_MS))
            if speaks_for is not None:
                ledger.withdrawn[speaks_for, said.pool] += 1
        else:
            message.items.append(item(said.pool, cluster=said.cluster, idle=idle, seq=said.seq))
            ledger.sent[idle] = (speaks_for or "nobody", said.pool)
    call.send(message)


@pytest.mark.slow
@settings(max_examples=80)
@given(st.integers(0, 2**32 - 1))
def test_no_calls_make_a_record_appear_that_its_clusters_credential_has_not_sent(seed: int) -> None:
    """Somebody has tokens of west and of east, and otherwise wrong ones, the hub's secret, or nothing; claims any id in
    calls, records and rows of origins, takes the instance and the uid of another agent, withdraws what is not its own,
    comes and goes, and is denied in between. At every moment all that is told of a cluster was sent with its
    credential, and what an honest agent says stands."""
    ledger = run_simulated(play, script_of(seed))
    event("something was told" if ledger.told else "nothing was told")


async def test_the_honest_are_heard_and_the_others_are_not(autojump_clock: MockClock) -> None:
    """A script of that kind, of which it is known what comes in."""
    script: list[Step] = [
        Open("west 1", "west", "aa", None),
        Open("west 1", "home", "aa", None),
        Open("the hub's secret", "home", "aa", None),
        Open("a home of its own making", "home", "aa", None),
        Open("none", "east", "aa", None),
        Open("east 1", "east", "bb", "the-uid-of-home"),
        *(
            Send(call + 1, [Said("home", "honest", True, 5), Said("east", "p1", False, 5)], [Row("home", None, 2**40)])
            for call in range(6)
        ),
    ]
    ledger = await play(script)
    assert ledger.told == 1
    assert dict(ledger.withdrawn) == {("west", "honest"): 1, ("east", "honest"): 1}
    assert dict(ledger.told_withdrawn) == {("west", "honest"): 1}  # of east a uid was claimed that is home's
    assert Counter(cluster_id for cluster_id, _ in ledger.sent.values()) == {"west": 1, "east": 1, "nobody": 4}


# --- two clusters under one id, one cluster under two ----------------------------------------------------------------


async def test_a_second_cluster_of_an_id_is_refused_and_the_first_is_steady(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """C33: "two agents of different clusters report east", right: "the second is refused with a clear status, the first
    steady". Where both say what tells them apart, the refusal says that they are two; a token of that id, which both
    have here, makes them no less so."""
    async with simulated_federation("west", "east", hub_settings=TOKENS) as fed:
        fed["east"].source.uid = "u-one"
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        rival = fed.add("rival", cluster_id="east")
        rival.source.uid = "u-two"
        rival.source.set(member("east", idle=99), member("east", "p2", idle=99))
        await rival.start()
        assert all(await sampled(60.0, lambda: fed["west"].idle("east") == [3]))
        assert fed.hubs[0].hub.health()["credentials"] == {"east": "token 1", "west": "token 1"}
        refusals = {line["error"] for line in lines(logs, "hub_failed")}
    assert any("their uids differ, so two clusters share one cluster_id" in error for error in refusals)
    assert all("'east'" in error for error in refusals)


def refused_file(folder: Path, text: str, words: str) -> None:
    """Check that a configuration is refused for one thing."""
    path = folder / "some.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=words) as caught:
        load(path, {})
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize("written", ["East", "EAST", "eaSt"])
async def test_there_is_one_spelling_of_an_id_in_every_layer(
    written: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """C33: "case rules differ between layers and make entries flap", right: "one case rule everywhere": what is no
    lower-case label is refused, in no place folded to one, and never another cluster's."""
    words = f"'{written}'.*lower-case"
    # Configuration.
    refused_file(tmp_path, f'cluster_id = "{written}"\n[federation]\nsecret = "s"\n', words)
    refused_file(
        tmp_path,
        f'[hub]\nsecret = "s"\nbind = "127.0.0.1:0"\n[[hub.policy]]\nclusters = ["{written}"]\n',
        f"clusters.*'{written}'",
    )
    other = make_token(SECRET, "east").replace("east", written)
    refused_file(tmp_path, f'cluster_id = "east"\n[federation]\nsecret = "{other}"\n', "begins like a token")
    # The deny list, tokens, certificates.
    denied, faults = read_deny_list(f"{written}\n{written}.1\n")
    assert (len(denied), len(faults)) == (0, 2)
    with pytest.raises(ValueError, match=words):
        make_token(SECRET, written)
    assert read_token(other) is None
    (tmp_path / "secret").write_text(SECRET)
    asked = CliRunner().invoke(token_command, [written, "--secret-file", str(tmp_path / "secret")])
    assert (asked.output, type(asked.exception)) == ("", ConfigurationError)
    assert re.search(words, str(asked.exception))
    for form, name in (
        ("DNS:{cluster}.agents.example", ("DNS", f"{written}.agents.example")),
        ("URI:spiffe://fleet.example/{cluster}", ("URI", f"spiffe://fleet.example/{written}")),
    ):
        assert CertificateName.parse(form).cluster_ids([name]) == frozenset()
    # Hubs.
    async with simulated_federation("west", "east", hub_settings=TOKENS) as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        for claimed, credential, refusal in (
            (written, make_token(SECRET, "east"), InvalidArgument),
            (written, other, Unauthenticated),
            ("east", other, Unauthenticated),
        ):
            async with fed.connection(claimed, credential=credential) as connection, connection.report() as call:
                with pytest.raises(refusal):
                    await call.wait_answered()
        # Denied under that spelling it is not denied; what a record claims does not matter at all.
        async with fed.connection("north") as connection, connection.report() as call:
            await call.send(ReportFederationRequest(items=[item(cluster=written, idle=5)]))
            await trio.sleep(0.3)
            assert [(each.cluster_id, each.idle) for each in fed["west"].registry.snapshot()] == [
                ("east", 3),
                ("north", 5),
            ]


async def test_one_cluster_under_two_ids_is_refused_by_name_and_counts_once(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """C33: "one cluster (same optional x-federation-uid) under two names", right: "same UID not counted twice". Each of
    them has a good token for its own id. What the second one has is never shown, as its uid is known when its first
    records are."""
    async with simulated_federation("west", "east", hub_settings=TOKENS) as fed:
        fed["east"].source.uid = "u-one"
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        twin = fed.add("twin", cluster_id="north")
        twin.source.uid = "u-one"
        twin.source.set(member("north", idle=3))
        await twin.start()
        seen = await sampled(60.0, lambda: (fed["west"].idle("east"), fed["west"].idle("north")))
        assert seen == [([3], [])] * len(seen)
        refusals = {line["error"] for line in lines(logs, "hub_failed")}
        assert len({re.sub(r"[\d.]+ s", "", error) for error in refusals}) == 1
        assert "this cluster is reported as 'east' already" in refusals.pop()
        # Its own truth is its own, and it watches.
        assert twin.registry.local_idle("ns", "env") == 3
        assert twin.idle("east") == [3]


async def test_a_cluster_takes_over_under_another_id_once_its_old_one_is_silent(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """The old agent is not heard of any more, so the new one is let in; when the old one comes back it is the one that
    is refused."""
    async with simulated_federation("west", "east", hub_settings=TOKENS) as fed:
        fed["east"].source.uid = "u-one"
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        fed.black_hole("east")
        renamed = fed.add("renamed", cluster_id="north")
        renamed.source.uid = "u-one"
        renamed.source.set(member("north", idle=3))
        await renamed.start()
        # 15 s from its last word, some 5 s ago at the most, then at one of the tries every 1 to 2 s.
        seen = await sampled(20.0, lambda: (fed.hubs[0].hub.health()["clusters"], fed["west"].idle("north")))
        assert all("east" not in clusters or "north" not in clusters for clusters, _ in seen)
        assert seen[95] == (["east", "west"], [])
        assert seen[-1] == (["north", "west"], [3])
        fed.heal("east")
        seen = await sampled(60.0, lambda: (fed.hubs[0].hub.health()["clusters"], fed["west"].idle("north")))
        assert seen == [(["north", "west"], [3])] * len(seen)
        assert fed["west"].idle("east") == []
        errors = [line["error"] for line in lines(logs, "hub_failed") if line["call"] == "report"]
        assert "reported as 'north' already" in errors[-1]


async def renamed(settings: HubSettings | None) -> list[tuple[list[int], list[int]]]:
    """What is seen of east and of north when the one is lost, and its cluster comes back as the other."""
    async with simulated_federation("west", "east", hub_settings=settings) as fed:
        fed["east"].source.uid = "u-one"
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        fed.black_hole("east")
        north = fed.add("renamed", cluster_id="north")
        north.source.uid = "u-one"
        north.source.set(member("north", idle=3))
        await north.start()
        return await sampled(60.0, lambda: (fed["west"].idle("east"), fed["west"].idle("north")))


async def test_a_cluster_that_was_taken_over_under_another_id_counts_once(autojump_clock: MockClock) -> None:
    """From the moment at which its new id counts, its old one does not: the hub knows it to be the same cluster's."""
    seen = await renamed(None)
    assert ([], [3]) in seen
    assert ([3], [3]) not in seen


async def test_a_uid_gives_no_right_to_withdraw_what_another_has_said(autojump_clock: MockClock) -> None:
    """Where ids are proven, a uid still is not: who has the token of one cluster ends nothing of another's, which runs
    out by itself."""
    seen = await renamed(TOKENS)
    assert ([3], [3]) in seen
    assert seen[-1] == ([], [3])


async def test_a_rebuilt_cluster_is_accepted_under_its_id(autojump_clock: MockClock) -> None:
    """It is another cluster by its uid, and has the
    token of the old one."""
    async with simulated_federation("west", "east", hub_settings=TOKENS) as fed:
        fed["east"].source.uid = "u-old"
        fed["east"].source.set(member("east", idle=3), member("east", "p2", idle=3))
        await fed.settle()
        await fed["east"].kill()
        await trio.sleep(61.0)
        rebuilt = fed.add("rebuilt", cluster_id="east")
        rebuilt.source.uid = "u-new"
        rebuilt.source.set(member("east", idle=1))
        await rebuilt.start()
        await trio.sleep(0.6)
        assert fed["west"].idle("east") == [1]


# --- who is denied ---------------------------------------------------------------------------------------------------


async def test_a_denied_cluster_is_withdrawn_from_everybody_at_once(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Its sessions end with PERMISSION_DENIED, nobody knows anything of it any more, and it is not let in, until it is
    taken off the list. The others notice nothing."""
    async with simulated_federation("west", "east", "north", hub_settings=TOKENS) as fed:
        for name in ("east", "north"):
            fed[name].source.set(member(name, idle=3))
        await fed.settle()
        fed.hubs[0].trust(denying("east"))
        await trio.sleep(0.1)
        newcomer = fed.add("south")
        await newcomer.start()
        seen = await sampled(
            60.0, lambda: [fed[name].idle(of) for of in ("east", "north") for name in ("west", "south")]
        )
        assert seen[5:] == [[[], [], [3], [3]]] * len(seen[5:])
        assert [each[0] for each in seen] == [[]] * len(seen)
        assert fed.hubs[0].hub.health()["clusters"] == ["north", "south", "west"]
        # It sees nothing new either.
        fed["north"].source.set(member("north", idle=4))
        await fed.settle()
        assert fed["west"].idle("north") == [4]
        assert fed["east"].idle("north") == []
        fed.hubs[0].trust(denying())
        await trio.sleep(11.0)
        assert fed["west"].idle("east") == fed["south"].idle("east") == [3]
        assert fed["east"].idle("north") == [4]
    ended = [line for line in lines(logs, "call_ended") if line["cluster"] == "east"]
    assert [line["log_level"] for line in ended] == ["info", "debug"]  # its report and its watch, told once
    assert {line["status"] for line in ended} == {"PERMISSION_DENIED"}


async def until_it_ends(receive: Callable[[], Awaitable[object]]) -> None:
    """Take in whatever comes."""
    while True:
        await receive()


async def test_a_call_that_is_denied_hears_why(autojump_clock: MockClock) -> None:
    """Both kinds of calls, at once; another one is refused in the same words."""
    async with simulated_federation("west", hub_settings=TOKENS) as fed, AsyncExitStack() as stack:
        connection = await stack.enter_async_context(fed.connection("east", instance="aa"))
        report = await stack.enter_async_context(connection.report())
        watch = await stack.enter_async_context(connection.watch(WatchFederationRequest()))
        await report.send(ReportFederationRequest(items=[item(idle=3)]))
        await watch.receive()
        await trio.sleep(0.1)
        fed.hubs[0].trust(denying("east.1"))
        began = trio.current_time()
        for receive in (report.wait_answered, watch.receive):
            with pytest.raises(PermissionDenied, match="token 1 of cluster 'east' is on this hub's deny list"):
                await until_it_ends(receive)
        async with connection.report() as again:
            with pytest.raises(PermissionDenied, match="token 1 of cluster 'east' is on this hub's deny list"):
                await again.wait_answered()
        assert trio.current_time() - began < 0.1
        # What was said with it is not withdrawn: it may be true all the same.
        assert fed["west"].idle("east") == [3]


@pytest.mark.parametrize("entry, kept", [("east", []), ("east.1", [3])])
async def test_a_message_that_is_met_by_a_denial_is_not_taken_in(
    entry: str,
    kept: list[int],
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    logs: list[EventDict],
) -> None:
    """It has woken its handler already, and in this very moment, before that goes on, the deny list is replaced: the
    call cannot be cancelled any more before its next step."""
    deny: list[str] = []
    receive = IncomingReport.receive

    async def receive_and_deny(call: IncomingReport) -> ReceivedReport | None:
        message = await receive(call)
        if deny:
            fed.hubs[0].trust(denying(deny.pop()))
        return message

    monkeypatch.setattr(IncomingReport, "receive", receive_and_deny)
    async with (
        simulated_federation("west", hub_settings=TOKENS) as fed,
        fed.connection("east", instance="aa") as connection,
        connection.report() as call,
    ):
        await call.send(ReportFederationRequest(items=[item(idle=3)]))
        await trio.sleep(0.1)
        assert fed["west"].idle("east") == [3]
        deny.append(entry)
        await call.send(ReportFederationRequest(items=[item(idle=99), item("p2", idle=99)]))
        with pytest.raises(PermissionDenied, match="is on this hub's deny list"):
            await call.wait_answered()
        assert deny == []
        for seen in await sampled(5.0, lambda: [each.idle for each in fed.hubs[0].hub.snapshot()]):
            assert seen == kept
        assert fed["west"].idle("east") == kept
        assert fed.hubs[0].hub.health()["clusters"] == ["west"]
        # It is told and counted like any other that a denial ends.
        [ended] = lines(logs, "call_ended")
        assert (ended["cluster"], ended["status"]) == ("east", "PERMISSION_DENIED")
        assert counted(fed.hubs[0].hub, "trio_federation_hub_calls_refused_total", status="PERMISSION_DENIED") == 1


def test_a_denial_costs_what_is_denied_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as many looks at every record as there are entries, in which the hub would do nothing else: one look in
    all, and none where nothing is held of those who are new on the list."""
    looked = Counter[str]()
    fresh = SampleTable.fresh

    def count(store: SampleTable, now: float) -> Iterator[Capacity]:
        for record in fresh(store, now):
            looked["records"] += 1
            yield record

    monkeypatch.setattr(SampleTable, "fresh", count)
    hub = Hub(TOKENS, trusted=denying(), clock=lambda: 100.0)
    records = [member(f"c{number % 20}", f"p{number}", idle=1) for number in range(400)]
    hub._store.apply(records, 100.0)
    many = [f"old-{number}" for number in range(300)]
    hub.trust(denying(*many, "c19.1"))
    assert looked["records"] == 0
    hub.trust(denying(*many, "c1", "c2", "c3", "c19.1"))
    assert looked["records"] == 400
    assert hub._store.held()["tombstones"] == 60
    # Who was on it before is no reason to look.
    hub.trust(denying(*many[1:], "c1", "c2", "c3"))
    assert looked["records"] == 400
    assert {record.cluster_id for record in hub.snapshot()} == {f"c{number}" for number in (0, *range(4, 20))}


@pytest.mark.parametrize("newer_token_first", [True, False])
async def test_a_denied_token_gives_way_to_a_newer_one_without_a_gap(
    newer_token_first: bool, autojump_clock: MockClock
) -> None:
    """The agent's file has the new token before the old one is denied, or soon after that; what others know of the
    cluster is there all the time, also for somebody who comes in between."""
    async with simulated_federation("west", "east", hub_settings=TOKENS) as fed, trio.open_nursery() as nursery:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        credentials: list[str] = []

        async def rotate() -> None:
            for serial in (2, 3, 4):
                await trio.sleep(7.3)
                new = make_token(SECRET, "east", serial)
                if newer_token_first:
                    fed["east"].credential = new
                fed.hubs[0].trust(denying(*(f"east.{old}" for old in range(1, serial))))
                await trio.sleep(2.0)
                fed["east"].credential = new
                await fed.add(f"newcomer-{serial}").start()
                await trio.sleep(10.5)
                credentials.append(fed.hubs[0].hub.health()["credentials"]["east"])
                assert fed[f"newcomer-{serial}"].idle("east") == [3]

        nursery.start_soon(rotate)
        assert all(await sampled(65.0, lambda: fed["west"].idle("east") == [3]))
        assert credentials == ["token 2", "token 3", "token 4"]


async def test_the_hubs_secret_is_replaced_without_a_gap(autojump_clock: MockClock) -> None:
    """Both count for a while, in which each agent gets a token of the new one; then only that counts. No call ends for
    it, and no agent has to come again."""
    async with simulated_federation("west", "east", hub_settings=TOKENS) as fed, trio.open_nursery() as nursery:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()

        async def rotate() -> None:
            await trio.sleep(5.0)
            fed.hubs[0].trust(denying(secrets=(SECRET, NEXT_SECRET)))
            for name in ("east", "west"):
                await trio.sleep(5.0)
                fed[name].credential = make_token(NEXT_SECRET, name, 2)
            await trio.sleep(5.0)
            fed.hubs[0].trust(denying(secrets=(NEXT_SECRET,)))
            await trio.sleep(5.0)
            assert fed["east"].routes["hub-0"].dialled == fed["west"].routes["hub-0"].dialled == 1
            # Who comes again comes with the new one.
            fed.cut("east")
            await trio.sleep(5.0)
            assert fed.hubs[0].hub.health()["credentials"] == {"east": "token 2", "west": "token 1"}

        nursery.start_soon(rotate)
        assert all(await sampled(40.0, lambda: fed["west"].idle("east") == [3]))
        async with fed.connection("east", credential=make_token(SECRET, "east")) as old, old.report() as call:
            with pytest.raises(Unauthenticated, match="wrong token"):
                await call.wait_answered()


# --- what an agent makes of it ---------------------------------------------------------------------------------------


async def test_a_credential_that_was_replaced_counts_from_the_next_call_on(autojump_clock: MockClock) -> None:
    """The calls that are open go on with the old one."""
    async with simulated_federation("west", "east", hub_settings=TOKENS) as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        fed["east"].credential = make_token(SECRET, "east", 2)
        await trio.sleep(60.0)
        assert fed.hubs[0].hub.health()["credentials"]["east"] == "token 1"
        assert fed["east"].routes["hub-0"].dialled == 1
        fed.cut("east")
        await fed.settle()
        assert fed.hubs[0].hub.health()["credentials"]["east"] == "token 2"


@pytest.mark.parametrize(
    "wrong, also_wrong, status",
    [
        (make_token(ELSEWHERE, "east"), make_token(ELSEWHERE, "east", 2), "UNAUTHENTICATED"),
        (make_token(SECRET, "north"), make_token(SECRET, "south"), "PERMISSION_DENIED"),
    ],
    ids=["wrong", "not-its-own"],
)
async def test_an_agent_that_is_refused_tries_what_it_is_given(
    wrong: str, also_wrong: str, status: str, autojump_clock: MockClock
) -> None:
    """A token counts for the next call of the connection that there is. Where that is refused as well, it may be that
    what was renewed is a certificate, which is shown when a connection begins, so there is a new one, once. Besides, a
    hub ends each connection on which it lets nothing in for 15 s."""
    async with simulated_federation("west", "east", hub_settings=TOKENS, start=False) as fed:
        fed["east"].source.set(member("east", idle=3))
        fed["east"].credential = wrong
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(14.0)
        assert fed["east"].routes["hub-0"].dialled == 1
        await trio.sleep(60.0)
        assert counted(fed.hubs[0].hub, "trio_federation_hub_calls_refused_total", status=status) > 4
        fed["east"].credential = also_wrong
        await trio.sleep(60.0)
        assert fed["west"].known("east") == []
        fed["east"].credential = make_token(SECRET, "east", 2)
        # The longest wait between two tries is 10 s.
        await trio.sleep(11.0)
        assert fed["west"].idle("east") == [3]
        dialled = fed["east"].routes["hub-0"].dialled
        await trio.sleep(60.0)
        assert fed["east"].routes["hub-0"].dialled == dialled


async def test_a_uid_that_is_known_late_is_said_without_losing_anything(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """The report is opened again, at once and as the same instance, and nobody notices, also when something is said in
    that very moment."""
    async with simulated_federation("west", "east", hubs=2, hub_settings=TOKENS) as fed, trio.open_nursery() as nursery:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        before = len(lines(logs, "reporter_came"))

        async def learn() -> None:
            for uid, idle in (("u-one", 4), ("u-two", 5)):
                await trio.sleep(10.0)
                fed["east"].source.uid = uid
                fed["east"].source.set(member("east", idle=idle), member("east", "p2", idle=idle))

        nursery.start_soon(learn)
        seen = await sampled(40.0, lambda: fed["west"].idle("east"))
        assert [each for number, each in enumerate(seen) if number == 0 or each != seen[number - 1]] == [
            [3],
            [4, 4],
            [5, 5],
        ]
        came = lines(logs, "reporter_came")[before:]
        assert [line["cluster"] for line in came] == ["east"] * 4
        assert fed["east"].routes["hub-0"].dialled == 1
        # It counts at the hub.
        async with fed.connection("north", instance="aa", uid="u-two") as connection, connection.report() as call:
            with pytest.raises(AlreadyExists, match="reported as 'east' already"):
                await call.wait_answered()


async def test_two_sources_that_read_two_clusters_are_told_of_once(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """The first in the configuration counts."""
    async with simulated_federation("west", "east", start=False, hub_settings=TOKENS) as fed:
        other = PushingSource()
        fed["east"].more_sources["other"] = other
        fed["east"].source.uid, other.uid = "u-one", "u-two"
        fed["east"].source.set(member("east", idle=3))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(60.0)
        warned = lines(logs, "cluster_uids_differ")
        assert [(line["log_level"], line["source"], line["other"]) for line in warned] == [("warning", "set", "other")]
        assert fed["east"].agent.identity.uid == "u-one"
        assert fed["west"].idle("east") == [3]
        # When they agree again, and then do not, it is news again.
        other.uid = "u-one"
        await trio.sleep(30.0)
        other.uid = "u-three"
        await trio.sleep(30.0)
        assert len(lines(logs, "cluster_uids_differ")) == 2


# --- strangers, and the log ------------------------------------------------------------------------------------------


async def knock(fed: Simulation, ids: Iterable[str], every: float = 0.0) -> None:
    """Calls without any credential, each of which claims another id."""
    for cluster_id in ids:
        async with fed.connection(cluster_id, credential="") as connection, connection.report() as call:
            with pytest.raises(Unauthenticated):
                await call.wait_answered()
        await trio.sleep(every)


async def fail_handshakes(fed: Simulation, addresses: Iterable[str]) -> None:
    """Connections that say something else than TLS, each from another address."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for address in addresses:
        link = MemoryLink(client=f"{address}:4711", server="hub-0")
        await link.client.send_all(b"GET / HTTP/1.0\r\n\r\n")
        await link.client.aclose()
        await fed.hubs[0].hub._serve_socket(tls, link.server)  # type: ignore[arg-type]


def loud(logs: list[EventDict], *events: str) -> int:
    """How many lines of some kinds are seen where nobody asks for every detail."""
    return sum(line["event"] in events and line["log_level"] != "debug" for line in logs)


async def test_strangers_use_up_no_lines_of_others(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """What is told once is remembered, and there is an end to that. Who has proven nothing can have any number of names
    and addresses, and none of them takes a line about a cluster that has proven itself."""
    monkeypatch.setattr(trio_federation.hub, "_MOST_TOLD", 12)
    settings = HubSettings(accept=("token",), policy=(PolicySettings(clusters=("*",), report=("ok/*",)),))
    async with simulated_federation("west", "east", hub_settings=settings) as fed:
        await knock(fed, (f"x{number}" for number in range(16)), every=0.1)
        await trio.sleep(20.0)
        await fail_handshakes(fed, (f"192.0.2.{number}" for number in range(16)))
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        hub = fed.hubs[0].hub
        assert len(hub._told_of_strangers) <= 12
        assert counted(hub, "trio_federation_hub_handshakes_failed_total") == 16
        assert counted(hub, "trio_federation_hub_calls_refused_total", status="UNAUTHENTICATED") == 16
    assert loud(logs, "call_refused") == loud(logs, "handshake_failed") == 16
    assert [line["cluster"] for line in lines(logs, "policy_breach")] == ["east"]


async def test_no_more_lines_are_written_about_strangers_than_anybody_can_read(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Two a second, and what ten seconds allow at once, of whatever kind they are; the same twice is told once. All of
    them are counted."""
    async with simulated_federation("west", hub_settings=TOKENS) as fed:
        await trio.sleep(20.0)
        began = trio.current_time()
        await knock(fed, (f"x{number}" for number in range(15)))
        await knock(fed, ["x1"] * 5)
        await fail_handshakes(fed, (f"192.0.2.{number}" for number in range(15)))
        assert trio.current_time() - began < 0.5
        assert loud(logs, "call_refused", "handshake_failed") == 20
        # A mistake that could be told apart from others is no way around it.
        for number in range(15):
            async with fed.connection(f"z{number}", credential=SECRET) as connection, connection.report() as call:
                with pytest.raises(Unauthenticated):
                    await call.wait_answered()
        assert loud(logs, "call_refused", "handshake_failed", "credential_mixed_up") == 20
        await knock(fed, (f"y{number}" for number in range(60)), every=0.1)
        # Who proves what it is is told of all the same.
        for cluster_id in ("north", "south"):
            async with fed.connection(cluster_id, instance="aa", uid="u") as connection, connection.report() as call:
                if cluster_id == "north":
                    await call.wait_accepted()
                else:
                    with pytest.raises(AlreadyExists):
                        await call.wait_answered()
        refused = [line for line in lines(logs, "call_refused") if line["cluster"] == "south"]
        assert [line["log_level"] for line in refused] == ["info"]
        passed = trio.current_time() - began
        told = loud(logs, "call_refused", "handshake_failed", "credential_mixed_up") - len(refused)
        assert 20 + 2 * passed - 2 <= told <= 20 + 2 * passed
        assert counted(fed.hubs[0].hub, "trio_federation_hub_calls_refused_total", status="UNAUTHENTICATED") == 95

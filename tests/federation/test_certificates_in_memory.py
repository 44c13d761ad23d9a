"""Who speaks for a cluster where certificates say so, alone or together with a token or the hub's secret: real agents
and a real hub over real TLS, whose bytes go through memory. What tokens alone come to is in `test_identities.py`, the
same over sockets in `tests/process`."""

from __future__ import annotations

import random
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import trio
import trustme
from hypothesis import event, given, settings
from hypothesis import strategies as st
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import item, lines
from tests.federation.test_identities import (
    CREDENTIALS,
    GOOD_FOR,
    IDS,
    Deny,
    Leave,
    Ledger,
    Row,
    Said,
    Send,
    Wait,
    steps_of,
)
from tests.simulation import SECRET, ScriptedSource, always, member
from trio_federation.agent import Agent
from trio_federation.config import Accepted, Federation, HubSettings
from trio_federation.credentials import CertificateName, DenyList, make_token, read_deny_list
from trio_federation.errors import RpcError, TlsFailed, Unavailable
from trio_federation.hub import Hub
from trio_federation.identity import Trusted, call_metadata
from trio_federation.keyring import certificates_are_optional
from trio_federation.pb.sandbox.sync.v1 import ClusterOrigin, ReportFederationRequest, WatchFederationRequest
from trio_federation.rpc import HubConnection, MemoryLink, accept_tls, client_tls, open_bridge, server_tls
from trio_federation.testing import run_simulated
from trio_federation.wire import WITHDRAWN_AGE_MS

SAN = CertificateName.parse("DNS:{cluster}.agents.example")
#: what agents call the hub
HUB = "hub.example"

# --- TLS in memory ---------------------------------------------------------------------------------------------------

#: the certificates that somebody may come with, by the names in them; those of home and of watch nobody else has
CERTIFICATES = {
    "west": ("west.agents.example",),
    "east": ("east.agents.example",),
    "west and east": ("other.example", "east.agents.example", "west.agents.example"),
    "home": ("home.agents.example",),
    "watch": ("watch.agents.example",),
    # Each of these is good, and is for nobody.
    "nobody": ("west.example",),
    "all": ("*.agents.example",),
    "nearly home": ("home.agents.example.org", "a.home.agents.example", "agents.example", "xhome.agents-example.org"),
    "home as its common name": ("other.example",),
}
#: for whom each of them is that somebody may have
NAMES: dict[str, frozenset[str]] = {
    "west": frozenset({"west"}),
    "east": frozenset({"east"}),
    "west and east": frozenset({"west", "east"}),
    "home": frozenset({"home"}),
    "watch": frozenset({"watch"}),
}
#: one that another authority has made
FORGED = "a home of its own making"


class Contexts:
    """The TLS contexts of a hub and of clients, by the certificate that a client has; "" is none."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        another = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self._folder = folder
        authority.cert_pem.write_to_path(folder / "ca.pem")
        self._write(authority, "hub", HUB)
        self._clients = {"": client_tls(ca_file=str(folder / "ca.pem"), cert_file=None, key_file=None)}
        for name, names in CERTIFICATES.items():
            common_name = "home.agents.example" if "common name" in name else None
            self._write(authority, name, *names, common_name=common_name)
        self._write(another, FORGED, "home.agents.example")
        for name in (*CERTIFICATES, FORGED):
            files = {f"{key}_file": str(folder / f"{name}.{key}") for key in ("cert", "key")}
            self._clients[name] = client_tls(
                ca_file=str(folder / "ca.pem"), cert_file=files["cert_file"], key_file=files["key_file"]
            )
        self._hub = {
            way: server_tls(
                cert_file=str(folder / "hub.cert"),
                key_file=str(folder / "hub.key"),
                client_ca_file=str(folder / "ca.pem"),
                client_certificates=way,
            )
            for way in ("required", "optional")
        }

    def _write(self, authority: trustme.CA, name: str, *names: str, common_name: str | None = None) -> None:
        issued = authority.issue_cert(*names, common_name=common_name, key_type=trustme.KeyType.ECDSA)
        issued.private_key_pem.write_to_path(self._folder / f"{name}.key")
        for blob in issued.cert_chain_pems:
            blob.write_to_path(self._folder / f"{name}.cert", append=True)

    def of_client(self, name: str) -> ssl.SSLContext:
        """That of somebody with this certificate."""
        return self._clients[name]

    def of_hub(self, accept: tuple[Accepted, ...]) -> ssl.SSLContext:
        """That of a hub which takes these ways."""
        is_optional = certificates_are_optional(HubSettings(accept=accept))
        return self._hub["optional" if is_optional else "required"]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    """Made once: it takes a while, and nothing changes them."""
    return Contexts(tmp_path_factory.mktemp("certificates"))


class Federated:
    """A hub that takes these ways, which people come to over TLS."""

    def __init__(self, contexts: Contexts, accept: tuple[Accepted, ...], nursery: trio.Nursery) -> None:
        self.contexts = contexts
        self.accept = accept
        self.nursery = nursery
        self.hub = Hub(HubSettings(accept=accept), trusted=self.trusting())

    def trusting(self, denied: DenyList | None = None) -> Trusted:
        """What it takes for proof with such a deny list."""
        return Trusted(self.accept, (SECRET,), denied if denied is not None else DenyList(), SAN)

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Take in a connection, in a task of its own, as the hub does with sockets."""
        with suppress(Unavailable):
            self.hub.serve(await accept_tls(stream, self.contexts.of_hub(self.accept), "somebody"))

    async def dial(self, certificate: str, link: MemoryLink | None = None) -> trio.abc.Stream:
        """Connect with a certificate. Raises TlsFailed where that is refused at once."""
        link = link if link is not None else MemoryLink(client=f"somebody with {certificate!r}", server=HUB)
        self.nursery.start_soon(self.serve, link.server)
        context = self.contexts.of_client(certificate)
        stream = trio.SSLStream(link.client, context, server_hostname=HUB, https_compatible=True)
        try:
            await stream.do_handshake()
        except trio.BrokenResourceError as error:
            await trio.aclose_forcefully(stream)
            raise TlsFailed("refused (in memory)") from error
        return stream

    @asynccontextmanager
    async def connection(
        self,
        cluster_id: str,
        *,
        certificate: str = "",
        credential: str | None = None,
        instance: str | None = None,
        uid: str | None = None,
        link: MemoryLink | None = None,
    ) -> AsyncIterator[HubConnection]:
        """A connection that makes no calls by itself."""
        stream = await self.dial(certificate, link)
        metadata = [pair for pair in call_metadata(cluster_id, instance or "", credential, uid) if pair[1]]
        async with trio.open_nursery() as nursery:
            yield await HubConnection.open(nursery, stream, peer=HUB, metadata=metadata)
            nursery.cancel_scope.cancel()

    def honest_credential(self, cluster_id: str) -> str | None:
        """What a cluster has beside its certificate to prove itself with."""
        parts = {part for way in self.accept for part in way.split("+")}
        return make_token(SECRET, cluster_id) if "token" in parts else SECRET if "shared" in parts else None

    async def agent(self, cluster_id: str, *, uid: str | None = None, idle: int | None = None) -> Agent:
        """Start the agent of an honest cluster, which says so much of its pool "honest"."""
        source = ScriptedSource()
        source.uid = uid
        if idle is not None:
            source.set(member(cluster_id, "honest", idle=idle))
        agent = Agent(
            cluster_id,
            Federation(),
            sources={"set": always(source)},
            hubs={HUB: partial(self.dial, cluster_id)},
            credential=self.honest_credential(cluster_id),
            generator=random.Random(cluster_id),
        )
        await self.nursery.start(agent.run)
        return agent


@asynccontextmanager
async def federated(contexts: Contexts, *accept: Accepted) -> AsyncIterator[Federated]:
    """Inside, such a hub runs."""
    async with open_bridge(), trio.open_nursery() as nursery:
        fed = Federated(contexts, accept, nursery)
        await nursery.start(fed.hub.run)
        yield fed
        nursery.cancel_scope.cancel()


# --- no record but one's own -----------------------------------------------------------------------------------------

#: what hubs accept here. Not "shared" alone, with which one may speak for anybody.
WAYS: tuple[tuple[Accepted, ...], ...] = (
    ("certificate",),
    ("token", "certificate"),
    ("certificate", "token"),
    ("token+certificate",),
    ("shared+certificate",),
    ("shared+certificate", "token"),
    ("token+certificate", "shared+certificate"),
    ("token+certificate", "certificate"),
)
#: with what somebody may come; not with what home or watch have
CARRIED = ("", *(name for name in CERTIFICATES if name not in ("home", "watch")), FORGED)


class Open(NamedTuple):
    """Somebody makes a call."""

    credential: str
    certificate: str
    cluster: str
    instance: str | None
    uid: str | None


Step = Open | Send | Leave | Deny | Wait


def is_covered(accept: Sequence[str], how: Open, denied: DenyList) -> bool:
    """Whether what a call comes with lets it speak for the cluster that it claims to be: by some way of which each part
    is for that cluster, and which is not denied."""
    cluster_id, serial = GOOD_FOR.get(how.credential, ("", 0))
    proves = {
        "shared": how.credential == "the hub's secret",
        "token": cluster_id == how.cluster,
        "certificate": how.cluster in NAMES.get(how.certificate, ()),
    }
    return any(
        all(proves[part] for part in way.split("+"))
        and not denied.denies(how.cluster, serial if "token" in way else None)
        for way in accept
    )


def script_of(seed: int, accept: Sequence[str]) -> list[Step]:
    """Some dozens of steps, drawn by lot. Many of the calls are such as are let in, and most reports go to the latest
    calls."""
    draw = random.Random(seed)
    honest = [
        how
        for credential in CREDENTIALS
        for certificate in CARRIED
        for cluster_id in IDS
        if is_covered(accept, how := Open(credential, certificate, cluster_id, "aa", None), DenyList())
    ]

    def opened() -> Open:
        instance = draw.choice(("aa", "bb", None))
        if draw.random() < 0.5:
            return draw.choice(honest)._replace(instance=instance)
        uid = draw.choice((None, None, "the-uid-of-home", "u-west"))
        return Open(draw.choice(list(CREDENTIALS)), draw.choice(CARRIED), draw.choice(IDS), instance, uid)

    return steps_of(draw, opened)


class Call:
    """A call that somebody has made, in a task of its own, which ends when the hub ends it."""

    def __init__(self, fed: Federated, how: Open) -> None:
        self.how = how
        self.fed = fed
        self.link = MemoryLink(client="somebody", server=HUB)
        self._to_call, self._at_call = trio.open_memory_channel[ReportFederationRequest | None](100)

    async def run(self) -> None:
        """Its life."""
        connect = self.fed.connection(
            self.how.cluster,
            certificate=self.how.certificate,
            credential=CREDENTIALS[self.how.credential] or None,
            instance=self.how.instance,
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

    def send(self, message: ReportFederationRequest | None) -> None:
        """Say something, or goodbye, where the call has not ended."""
        with suppress(trio.BrokenResourceError):
            self._to_call.send_nowait(message)


async def watch_all(fed: Federated, ledger: Ledger) -> None:
    """Look at everything that is relayed, as it comes."""
    connect = fed.connection("watch", certificate="watch", credential=fed.honest_credential("watch"))
    async with connect as connection, connection.watch(WatchFederationRequest()) as call:
        while True:
            for each in (await call.receive()).items:
                if each.observed_for_ms >= WITHDRAWN_AGE_MS:
                    ledger.check_withdrawal(each.cluster_id, each.member_pool)
                else:
                    ledger.told += each.cluster_id != "home"
                    ledger.check("a watcher was told", each.cluster_id, each.member_pool, each.idle)


@dataclass
class Play:
    """What one script is played with."""

    fed: Federated
    home: Agent
    watch: Agent
    ledger: Ledger = field(default_factory=Ledger)
    made: list[Call] = field(default_factory=list)

    def take(self, step: Step) -> float:
        """One step, as far as there is something that it can be done to. Returns for how long to wait."""
        if isinstance(step, Open):
            self.made.append(Call(self.fed, step))
            self.fed.nursery.start_soon(self.made[-1].run)
        elif isinstance(step, Deny):
            before = self.ledger.denied
            self.ledger.denied, faults = read_deny_list("\n".join(sorted(step.entries)))
            assert not faults
            self.ledger.denials.update(self.ledger.denied.clusters - before.clusters)
            self.fed.hub.trust(self.fed.trusting(self.ledger.denied))
        elif isinstance(step, Wait):
            return step.seconds
        elif self.made:
            call = self.made[-min(step.call, len(self.made))]
            if isinstance(step, Send):
                call.send(self.message(step, call.how))
            elif step.said_goodbye:
                call.send(None)
            else:
                call.link.cut()
        return 0.3

    def message(self, step: Send, how: Open) -> ReportFederationRequest:
        """A report, of which it is written down what may be taken in."""
        speaks_for = how.cluster if is_covered(self.fed.accept, how, self.ledger.denied) else None
        message = ReportFederationRequest(
            origins=[
                ClusterOrigin(row.cluster, row.instance or self.home.instance, uptime_ms=row.uptime_ms)
                for row in step.rows
            ]
        )
        for said in step.items:
            idle = 1000 + len(self.ledger.sent)
            if said.withdrawn:
                message.items.append(item(said.pool, cluster=said.cluster, seq=said.seq, age_ms=WITHDRAWN_AGE_MS))
                if speaks_for is not None:
                    self.ledger.withdrawn[speaks_for, said.pool] += 1
            else:
                message.items.append(item(said.pool, cluster=said.cluster, idle=idle, seq=said.seq))
                self.ledger.sent[idle] = (speaks_for or "nobody", said.pool)
        return message

    def look(self) -> None:
        """Write down everything that is shown, and must not be."""
        ledger = self.ledger
        for where, records in (("the hub", self.fed.hub.snapshot()), ("watch", self.watch.registry.snapshot())):
            for record in records:
                ledger.check(f"{where} shows", record.cluster_id, record.member_pool, record.idle)
                if ledger.denied.denies(record.cluster_id):
                    ledger.wrong.append(f"{where} shows a record of {record.cluster_id}, which is denied")
        home = [record.idle for record in self.watch.registry.snapshot() if record.cluster_id == "home"]
        if home != [7]:
            ledger.wrong.append(f"watch knows {home} of home, whose agent has always said 7")


async def play(contexts: Contexts, accept: tuple[Accepted, ...], script: Sequence[Step]) -> Ledger:
    """Do all of it, in a federation with two honest agents, of which one watches; look at everything after each
    step."""
    async with federated(contexts, *accept) as fed:
        home, watch = await fed.agent("home", uid="the-uid-of-home", idle=7), await fed.agent("watch")
        playing = Play(fed, home, watch)
        fed.nursery.start_soon(watch_all, fed, playing.ledger)
        await trio.sleep(6.0)
        for number, step in enumerate(script):
            await trio.sleep(playing.take(step))
            playing.look()
            assert playing.ledger.wrong == [], f"{accept}, after step {number}, {step}"
    return playing.ledger


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), accept=st.sampled_from(WAYS))
def test_no_calls_make_a_record_appear_that_its_clusters_credential_has_not_sent(
    seed: int, accept: tuple[Accepted, ...], contexts: Contexts
) -> None:
    """Somebody has certificates and tokens of west and of east, and the hub's secret, besides such as are good and for
    nobody, or are wrong; puts them together in any way and claims any id. At every moment all that is told of a cluster
    was sent with a proof that the hub accepts for it, of which each part is for that cluster; and what an honest agent
    says stands."""
    ledger = run_simulated(play, contexts, accept, script_of(seed, accept))
    event(f"{'something' if ledger.told else 'nothing'} was told")
    event(f"{'something' if ledger.told_withdrawn else 'nothing'} was withdrawn")


@pytest.mark.parametrize(
    "accept, let_in",
    [
        (("certificate",), ["cert", "both", "other token", "secret"]),
        (("token+certificate",), ["both"]),
        (("token", "certificate"), ["cert", "token", "both", "other token", "nobody's", "other cert", "secret"]),
        (("shared+certificate",), ["secret"]),
        (("shared+certificate", "token"), ["token", "both", "secret", "nobody's", "other cert"]),
    ],
)
async def test_what_comes_in_is_what_the_ways_say(
    accept: tuple[Accepted, ...], let_in: list[str], contexts: Contexts, autojump_clock: MockClock
) -> None:
    """Scripts of that kind, of which it is known what comes in: west reports, with one thing after the other."""
    comes_with = {
        "cert": ("none", "west"),
        "token": ("west 1", ""),
        "both": ("west 1", "west"),
        "secret": ("the hub's secret", "west"),
        "other token": ("east 1", "west and east"),
        "other cert": ("west 1", "east"),
        "nobody's": ("west 1", "nobody"),
        "nothing": ("none", ""),
        "forged": ("none", FORGED),
    }
    found = []
    for name, (credential, certificate) in comes_with.items():
        script: list[Step] = [
            Open(credential, certificate, "west", "aa", None),
            Send(1, [Said("home", "honest", True, 5), Said("", "p1", False, 5)], [Row("home", None, 2**40)]),
        ]
        ledger = await play(contexts, accept, script)
        assert ledger.told in (0, 1)
        found += [name] if ledger.told else []
        # And for nobody else.
        script[0] = Open(credential, certificate, "home", "aa", None)
        ledger = await play(contexts, accept, script)
        assert (ledger.told, dict(ledger.told_withdrawn)) == (0, {})
    assert sorted(found) == sorted(let_in)


# --- what is said of it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [("certificate", "token"), ("token", "certificate")])
async def test_the_hubs_own_secret_is_warned_of_also_where_a_certificate_lets_it_in(
    accept: tuple[Accepted, ...], contexts: Contexts, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """The agent works, and yet it has what it could make any token from: its operator hears of it once, by whatever
    calls it comes, and in words that do not show it."""
    async with federated(contexts, *accept) as fed:
        for _ in range(3):
            connect = fed.connection("west", certificate="west", credential=SECRET, instance="aa")
            async with (
                connect as connection,
                connection.report() as call,
                connection.watch(WatchFederationRequest()) as watch,
            ):
                await call.send(ReportFederationRequest(items=[item(idle=3)]))
                await watch.receive()
                assert fed.hub.health()["credentials"] == {"west": "certificate"}
        # One that has a token of its own besides is as it should be.
        connect = fed.connection("east", certificate="east", credential=make_token(SECRET, "east"), instance="aa")
        async with connect as connection, connection.report() as call:
            await call.send(ReportFederationRequest(items=[item(idle=3)]))
            await trio.sleep(1.0)
            assert list(fed.hub.health()["credentials"]) == ["east"]
    (warning,) = lines(logs, "credential_mixed_up")
    assert (warning["cluster"], warning["log_level"]) == ("west", "warning")
    assert warning["error"].startswith("an agent has the hub's own secret, with which it could make any token")
    assert lines(logs, "call_refused") == []


async def test_a_hub_that_hangs_up_and_then_refuses_the_certificate_is_told_of_twice(
    contexts: Contexts, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Under TLS 1.3 an agent hears of that after its handshake, on a connection that seemed to be open. That its hub
    was away before must not keep it from saying so; what it hears again and again it says once."""
    hangs_up = [True]
    async with federated(contexts, "certificate") as fed:

        async def dial() -> trio.abc.Stream:
            link = MemoryLink(client="west", server=HUB)
            if not hangs_up:
                return await fed.dial("", link)
            await link.server.aclose()
            return link.client

        agent = Agent("west", Federation(), hubs={HUB: dial}, generator=random.Random(0))
        await fed.nursery.start(agent.run)
        await trio.sleep(30.0)
        hangs_up.clear()
        await trio.sleep(30.0)
        refused = "TLS failed: the other side demands a certificate, and got none; set [federation.tls] cert_file"
        assert [hub["last_error"]["text"][: len(refused)] for hub in agent.health()["hubs"]] == [refused]
    failed = lines(logs, "hub_failed")
    assert len(failed) > 10
    away, about_tls = (line for line in failed if line["log_level"] == "warning")
    assert "TLS" not in away["error"]
    assert about_tls["error"].startswith(refused)
    assert {line["call"] for line in failed} == {"connection"}

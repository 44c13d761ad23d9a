"""Client certificates, alone and together with other credentials, as grpcio meets them on a hub of ours. The main cases
are certificates that the openssl command has made; what it does not make lightly, trustme has."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio
import trustme

from tests.interop import peers
from tests.interop.peers import PATIENCE, LogWatch, Schema, Worker, record
from tests.interop.strangers import (
    MASTER,
    NEXT_MASTER,
    ONE,
    Authority,
    Code,
    Host,
    Pair,
    Seen,
    Steady,
    clusters_named,
    codes,
    ended,
    outcome,
    refusal,
    refusals,
    running_hub,
    trust,
    until,
)
from tests.process.running import start
from trio_federation.config import Accepted, HubSettings, HubTls, Secret
from trio_federation.credentials import CertificateName, DenyList, make_token

DNS = "DNS:{cluster}.agents.example"
URI = "URI:spiffe://fleet.example/cluster/{cluster}"


class Fleet:
    """An authority that a hub trusts, one of the same name that it does not, and what both have issued."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "ours")
        self.other = Authority(folder / "theirs")
        self.hub = self.authority.issue("hub", "IP:127.0.0.1", usage="serverAuth")
        #: a good certificate for these clusters
        self.agent = cache(lambda *clusters: self.authority.issue("-".join(clusters), *clusters_named(*clusters)))
        self.bad = cache(self._bad)

    def _bad(self, what: str) -> Pair | None:
        """A certificate for west that proves nothing, because of one thing only."""
        names = clusters_named("west")
        match what:
            case "wrong CA":
                return self.other.issue("west", *names)
            case "expired":
                return self.authority.issue("expired", *names, begins="20010101000000Z", ends="20020101000000Z")
            case "not yet valid":
                return self.authority.issue("early", *names, begins="20900101000000Z", ends="20910101000000Z")
            case "of a server":
                return self.authority.issue("server", *names, usage="serverAuth")
            case "of its own":
                return self.authority.issue_itself("alone", *names)
            case _:
                return None

    def settings(self, *accept: Accepted, san: str = DNS) -> HubSettings:
        """A hub that takes these ways of proof."""
        tls = HubTls(
            cert_file=str(self.hub.cert_file),
            key_file=str(self.hub.key_file),
            client_ca_file=str(self.authority.file),
            cluster_san=CertificateName.parse(san),
        )
        needs_secret = any(way != "certificate" for way in accept)
        return HubSettings(accept=accept, secret=Secret(MASTER) if needs_secret else None, tls=tls)

    def worker(
        self,
        hub: Host,
        schema: Schema,
        cluster: str,
        pair: Pair | None,
        secret: str | None = None,
        *,
        instance: str | None = ONE,
    ) -> Worker:
        """A worker with a certificate, or none, that trusts this authority."""
        pem = self.authority.pem
        credentials = pair.credentials(pem) if pair is not None else grpc.ssl_channel_credentials(pem)
        return Worker(schema, hub.port, cluster, secret=secret, instance=instance, credentials=credentials)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """The certificates of these tests."""
    return Fleet(tmp_path_factory.mktemp("fleet"))


# --- a certificate alone ---------------------------------------------------------------------------------------------


async def test_a_certificate_lets_its_cluster_in(logs: LogWatch, schema: Schema, fleet: Fleet) -> None:
    async with running_hub(logs, fleet.settings("certificate")) as hub:
        with (
            fleet.worker(hub, schema, "west", fleet.agent("west")) as west,
            fleet.worker(hub, schema, "east", fleet.agent("east")) as east,
        ):
            steady = [Steady(west, "west"), Steady(east, "east")]
            for each in steady:
                await each.goes_on()
            await steady[0].seen.shows("east", 2)
            assert hub.credentials == {"east": "certificate", "west": "certificate"}
            assert hub.metric("reporters_by_credential", credential="certificate") == 2
        assert logs.of("handshake_failed") == []
        assert logs.of("call_refused") == []


async def test_a_certificate_is_for_its_cluster_alone(logs: LogWatch, schema: Schema, fleet: Fleet) -> None:
    async with running_hub(logs, fleet.settings("certificate")) as hub:
        with (
            fleet.worker(hub, schema, "east", fleet.agent("east")) as east,
            fleet.worker(hub, schema, "east", fleet.agent("west")) as false_east,
        ):
            steady = Steady(east, "east")
            await steady.goes_on()
            for refused in await refusals(false_east, "east"):
                assert refused.code is Code.PERMISSION_DENIED
                assert "'east'" in refused.details
                assert "'west'" in refused.details
            await steady.goes_on()
            assert set(hub.idle) == {("east", "p1")}


async def test_a_certificate_with_several_names_is_for_each_of_them(
    logs: LogWatch, schema: Schema, fleet: Fleet
) -> None:
    pair = fleet.authority.issue(
        "several", "DNS:unrelated.example", *clusters_named("west", "east"), "URI:spiffe://x/north", "IP:10.0.0.1"
    )
    async with running_hub(logs, fleet.settings("certificate")) as hub:
        with (
            fleet.worker(hub, schema, "west", pair) as west,
            fleet.worker(hub, schema, "east", pair) as east,
            fleet.worker(hub, schema, "north", pair) as north,
        ):
            for each in (Steady(west, "west"), Steady(east, "east")):
                await each.goes_on()
            for refused in await refusals(north, "north"):
                assert refused.code is Code.PERMISSION_DENIED
                assert "'east', 'west'" in refused.details
            assert {cluster for cluster, _ in hub.idle} == {"west", "east"}


async def test_a_certificate_may_name_its_cluster_by_a_uri(logs: LogWatch, schema: Schema, fleet: Fleet) -> None:
    west = fleet.authority.issue("uri", "URI:spiffe://fleet.example/cluster/west", "DNS:east.agents.example")
    async with running_hub(logs, fleet.settings("certificate", san=URI)) as hub:
        with (
            fleet.worker(hub, schema, "west", west) as good,
            fleet.worker(hub, schema, "east", west) as other_kind,
            fleet.worker(hub, schema, "east", fleet.agent("east")) as other_form,
        ):
            await Steady(good, "west").goes_on()
            assert await codes(other_kind, "east") == {Code.PERMISSION_DENIED}
            assert await codes(other_form, "east") == {Code.UNAUTHENTICATED}


@pytest.mark.parametrize(
    "sans",
    [
        (),
        ("DNS:west.example",),
        ("DNS:west",),
        ("DNS:agents.example",),
        ("DNS:.agents.example",),
        ("DNS:*.agents.example",),
        ("DNS:WEST.agents.example",),
        ("DNS:west.AGENTS.example",),
        ("DNS:west.agents.example.",),
        ("DNS:west.agents.example.evil.example",),
        ("DNS:evil.west.agents.example",),
        ("DNS:west.agents.example/",),
        ("DNS:we_st.agents.example",),
        ("URI:spiffe://fleet.example/cluster/west",),
        ("URI:west.agents.example",),
        ("email:west@agents.example",),
        ("email:west.agents.example",),
        ("IP:10.1.2.3",),
        ("RID:1.2.3.4",),
        ("otherName:1.2.3.4;UTF8:west.agents.example",),
    ],
    ids=lambda sans: "+".join(sans) or "none",
)
async def test_other_names_of_a_good_certificate_prove_nothing(
    logs: LogWatch, schema: Schema, fleet: Fleet, sans: tuple[str, ...]
) -> None:
    # The subject is the right one; only alternative names count.
    pair = fleet.authority.issue("other-name", *sans, subject="west.agents.example")
    async with running_hub(logs, fleet.settings("certificate")) as hub:
        with fleet.worker(hub, schema, "west", pair) as west:
            for refused in await refusals(west):
                assert refused.code is Code.UNAUTHENTICATED
                assert "certificate" in refused.details
        assert hub.idle == {}


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://fleet.example/cluster/west/more",
        "spiffe://fleet.example/cluster/west?",
        "spiffe://fleet.example/cluster/",
        "spiffe://fleet.example/cluster/west%2f",
        "spiffe://fleet.example/cluster/%77est",
        "spiffe://fleet.example/cluster//west",
        "spiffe://fleet.example/cluster/../cluster/west",
        "spiffe://FLEET.example/cluster/west",
        "SPIFFE://fleet.example/cluster/west",
        "spiffe://evil.example/spiffe://fleet.example/cluster/west",
        "spiffe://fleet.example.evil.example/cluster/west",
        "https://fleet.example/cluster/west",
    ],
)
async def test_other_uris_prove_nothing(logs: LogWatch, schema: Schema, fleet: Fleet, uri: str) -> None:
    pair = fleet.authority.issue("other-uri", f"URI:{uri}")
    async with running_hub(logs, fleet.settings("certificate", san=URI)) as hub:
        with fleet.worker(hub, schema, "west", pair) as west:
            assert await codes(west) == {Code.UNAUTHENTICATED}


#: what the hub's log says, in OpenSSL's words
REASONS = {
    "wrong CA": "unable to get local issuer certificate",
    "expired": "certificate has expired",
    "not yet valid": "certificate is not yet valid",
    "of a server": "unsuitable certificate purpose",
    "of its own": "self-signed certificate",
    "none": "did not return a certificate",
}


@pytest.mark.parametrize("what", REASONS)
@pytest.mark.parametrize("accept", ["certificate", "token+certificate", "shared+certificate"])
async def test_without_a_good_certificate_there_is_no_connection_where_one_is_needed(
    logs: LogWatch, schema: Schema, fleet: Fleet, accept: Accepted, what: str
) -> None:
    secret = {"certificate": None, "token+certificate": make_token(MASTER, "west"), "shared+certificate": MASTER}[
        accept
    ]
    async with running_hub(logs, fleet.settings(accept)) as hub:
        with (
            fleet.worker(hub, schema, "west", fleet.bad(what), secret) as stranger,
            fleet.worker(hub, schema, "west", fleet.agent("west"), secret) as west,
        ):
            steady = Steady(west, "west")
            await steady.goes_on()
            # grpcio says that there is no connection; of the alert that it was sent, it writes to its own log only.
            assert await codes(stranger) == {Code.UNAVAILABLE}
            entry = await logs.wait_for("handshake_failed")
            assert REASONS[what] in entry["error"]
            await steady.goes_on()
        assert logs.of("call_refused") == []


@pytest.mark.parametrize("what", [what for what in REASONS if what != "none"])
async def test_a_bad_certificate_is_refused_even_where_none_is_needed(
    logs: LogWatch, schema: Schema, fleet: Fleet, what: str
) -> None:
    async with running_hub(logs, fleet.settings("certificate", "token")) as hub:
        with fleet.worker(hub, schema, "west", fleet.bad(what), make_token(MASTER, "west")) as stranger:
            assert await codes(stranger) == {Code.UNAVAILABLE}
            assert REASONS[what] in (await logs.wait_for("handshake_failed"))["error"]


# --- what trustme makes ----------------------------------------------------------------------------------------------


def settings_for(authority: trustme.CA, folder: Path, *accept: Accepted) -> HubSettings:
    """A hub of trustme's."""
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "hub.key")
    issued.cert_chain_pems[0].write_to_path(folder / "hub.crt")
    return HubSettings(
        accept=accept,
        tls=HubTls(
            cert_file=str(folder / "hub.crt"),
            key_file=str(folder / "hub.key"),
            client_ca_file=str(folder / "ca.pem"),
            cluster_san=CertificateName.parse(DNS),
        ),
    )


def credentials_of(
    issued: trustme.LeafCert, authority: trustme.CA, chain: int | None = None
) -> grpc.ChannelCredentials:
    """A client's, with this many of the certificates of its chain."""
    pems = b"".join(blob.bytes() for blob in issued.cert_chain_pems[:chain])
    return grpc.ssl_channel_credentials(authority.cert_pem.bytes(), issued.private_key_pem.bytes(), pems)


async def test_a_certificate_may_come_with_those_between(logs: LogWatch, schema: Schema, tmp_path: Path) -> None:
    root = trustme.CA()
    between = root.create_child_ca()
    issued = between.issue_cert("west.agents.example")
    async with running_hub(logs, settings_for(root, tmp_path, "certificate")) as hub:
        with (
            Worker(schema, hub.port, "west", secret=None, credentials=credentials_of(issued, root)) as west,
            Worker(schema, hub.port, "west", secret=None, credentials=credentials_of(issued, root, 1)) as without,
        ):
            await Steady(west, "west").goes_on()
            assert await codes(without) == {Code.UNAVAILABLE}


async def test_the_names_of_those_between_prove_nothing(logs: LogWatch, schema: Schema, tmp_path: Path) -> None:
    """What counts is the certificate whose key the client has, and of that one all names."""
    root = trustme.CA()
    issued = root.issue_cert("west.agents.example", "south.agents.example")
    extra = root.issue_cert("east.agents.example")
    pems = issued.cert_chain_pems[0].bytes() + extra.cert_chain_pems[0].bytes()
    credentials = grpc.ssl_channel_credentials(root.cert_pem.bytes(), issued.private_key_pem.bytes(), pems)
    async with running_hub(logs, settings_for(root, tmp_path, "certificate")) as hub:
        with (
            Worker(schema, hub.port, "south", secret=None, credentials=credentials) as south,
            Worker(schema, hub.port, "east", secret=None, credentials=credentials) as east,
        ):
            await Steady(south, "south").goes_on()
            assert await codes(east, "east") == {Code.PERMISSION_DENIED}


# --- together with other credentials ---------------------------------------------------------------------------------

TOKEN, FORGED = make_token(MASTER, "west"), make_token(NEXT_MASTER, "west")
EAST = make_token(MASTER, "east")

#: accept, the cluster of the certificate, the credential, and what becomes of it: a status, or what has proven west
TOGETHER: list[tuple[tuple[Accepted, ...], str | None, str | None, grpc.StatusCode | str]] = [
    (("token+certificate",), "west", TOKEN, "token 1+certificate"),
    (("token+certificate",), "west", None, Code.UNAUTHENTICATED),
    (("token+certificate",), "west", FORGED, Code.UNAUTHENTICATED),
    (("token+certificate",), "west", MASTER, Code.UNAUTHENTICATED),
    (("token+certificate",), "east", TOKEN, Code.PERMISSION_DENIED),
    (("token+certificate",), "west", EAST, Code.PERMISSION_DENIED),
    (("token+certificate",), "east", EAST, Code.PERMISSION_DENIED),
    (("shared+certificate",), "west", MASTER, "shared+certificate"),
    (("shared+certificate",), "west", None, Code.UNAUTHENTICATED),
    (("shared+certificate",), "west", NEXT_MASTER, Code.UNAUTHENTICATED),
    (("shared+certificate",), "west", TOKEN, Code.UNAUTHENTICATED),
    (("shared+certificate",), "east", MASTER, Code.PERMISSION_DENIED),
    (("certificate", "token"), "west", None, "certificate"),
    (("certificate", "token"), None, TOKEN, "token 1"),
    (("certificate", "token"), None, None, Code.UNAUTHENTICATED),
    (("certificate", "token"), None, FORGED, Code.UNAUTHENTICATED),
    (("certificate", "token"), None, EAST, Code.PERMISSION_DENIED),
    (("certificate", "token"), None, MASTER, Code.UNAUTHENTICATED),
    (("certificate", "token"), "east", TOKEN, "token 1"),
    (("certificate", "token"), "west", EAST, "certificate"),
    (("certificate", "token"), "east", EAST, Code.PERMISSION_DENIED),
    (("certificate", "token"), "east", FORGED, Code.PERMISSION_DENIED),
    (("certificate", "shared"), None, MASTER, "shared"),
    (("certificate", "shared"), "west", None, "certificate"),
    (("certificate", "shared"), None, NEXT_MASTER, Code.UNAUTHENTICATED),
    (("shared+certificate", "token"), "west", MASTER, "shared+certificate"),
    (("shared+certificate", "token"), None, TOKEN, "token 1"),
    (("shared+certificate", "token"), None, MASTER, Code.UNAUTHENTICATED),
    (("shared+certificate", "token"), "west", None, Code.UNAUTHENTICATED),
    (("shared+certificate", "token"), "east", MASTER, Code.PERMISSION_DENIED),
    (("shared+certificate", "token+certificate"), "west", TOKEN, "token 1+certificate"),
    (("shared+certificate", "token+certificate"), "west", MASTER, "shared+certificate"),
    (("shared+certificate", "token+certificate"), "west", None, Code.UNAUTHENTICATED),
    # A hub on its way from the secret to certificates: each agent by whatever it has by now.
    (("shared", "token", "certificate"), None, MASTER, "shared"),
    (("shared", "token", "certificate"), None, TOKEN, "token 1"),
    (("shared", "token", "certificate"), "west", None, "certificate"),
]


@pytest.mark.parametrize(
    "accept, certificate, secret, outcome",
    TOGETHER,
    ids=[
        f"{'|'.join(accept)}:{certificate}:{names}:{getattr(outcome, 'name', outcome)}"
        for accept, certificate, names, outcome in (
            (
                accept,
                certificate,
                {TOKEN: "token", FORGED: "forged", EAST: "east", MASTER: "secret", None: "none"}.get(secret, "other"),
                outcome,
            )
            for accept, certificate, secret, outcome in TOGETHER
        )
    ],
)
async def test_ways_together(
    logs: LogWatch,
    schema: Schema,
    fleet: Fleet,
    accept: tuple[Accepted, ...],
    certificate: str | None,
    secret: str | None,
    outcome: grpc.StatusCode | str,
) -> None:
    pair = fleet.agent(certificate) if certificate is not None else None
    async with running_hub(logs, fleet.settings(*accept)) as hub:
        with fleet.worker(hub, schema, "west", pair, secret) as west:
            if isinstance(outcome, str):
                await Steady(west, "west").goes_on()
                assert hub.credentials == {"west": outcome}
            else:
                for refused in await refusals(west):
                    assert refused.code is outcome
                    assert secret is None or secret[-8:] not in refused.details
                assert hub.idle == {}
        assert secret is None or secret[-8:] not in repr(logs.entries)


async def test_without_a_certificate_there_is_no_connection_where_every_way_needs_one(
    logs: LogWatch, schema: Schema, fleet: Fleet
) -> None:
    async with running_hub(logs, fleet.settings("certificate", "token+certificate")) as hub:
        with fleet.worker(hub, schema, "west", None, TOKEN) as west:
            assert await codes(west) == {Code.UNAVAILABLE}
            assert REASONS["none"] in (await logs.wait_for("handshake_failed"))["error"]


async def test_a_certificate_that_names_nothing_is_no_hindrance_to_a_token(
    logs: LogWatch, schema: Schema, fleet: Fleet
) -> None:
    pair = fleet.authority.issue("nobody", "DNS:nobody.example")
    async with running_hub(logs, fleet.settings("certificate", "token")) as hub:
        with fleet.worker(hub, schema, "west", pair, TOKEN) as west:
            await Steady(west, "west").goes_on()
            assert hub.credentials == {"west": "token 1"}


# --- what follows from it --------------------------------------------------------------------------------------------


async def test_the_identity_of_a_certificate_is_stamped_over_what_a_record_claims(
    logs: LogWatch, schema: Schema, fleet: Fleet
) -> None:
    async with running_hub(logs, fleet.settings("certificate")) as hub:
        with (
            fleet.worker(hub, schema, "west", fleet.agent("west")) as west,
            fleet.worker(hub, schema, "south", fleet.agent("south")) as south,
        ):
            seen = Seen(south.watch())
            await seen.take()
            west.report(
                schema.report(
                    record("east", "p1", idle=1, seq=1),
                    record("", "p2", idle=2, seq=1),
                    record("south", "p3", idle=3, seq=1),
                    origins=[{"cluster_id": "east", "instance": ONE, "uptime_ms": 1000}],
                )
            )
            broadcast = await seen.take()
            assert seen.idle == {("west", "env/p1"): 1, ("west", "env/p2"): 2, ("west", "env/p3"): 3}
            assert [origin.cluster_id for origin in broadcast.origins] == ["west"]


async def test_a_denied_cluster_with_a_certificate_loses_its_calls(
    logs: LogWatch, schema: Schema, fleet: Fleet
) -> None:
    settings = fleet.settings("certificate")
    both = fleet.agent("west", "east")
    async with running_hub(logs, settings) as hub:
        with fleet.worker(hub, schema, "west", both) as west, fleet.worker(hub, schema, "east", both) as east:
            denied, steady = Steady(west, "west"), Steady(east, "east")
            for each in (denied, steady):
                await each.goes_on()
            hub.hub.trust(trust(settings, denied=DenyList(frozenset({"west"}), frozenset({("east", 1)}))))
            for refused in (await refusal(denied.report.answer()), await refusal(ended(denied.seen.watch))):
                assert refused.code is Code.PERMISSION_DENIED
            assert await codes(west) == {Code.PERMISSION_DENIED}
            # The same certificate, for another of its clusters; and no serial of a token is one of a certificate.
            await steady.goes_on()
            assert set(hub.idle) == {("east", "p1")}


# --- rotation --------------------------------------------------------------------------------------------------------

#: Milliseconds: the oldest that a record may be that is reported all the time. The hub would keep it for sixty seconds.
OLDEST = 10_000
REPORTED = ("west", "env/p1")


class Load:
    """A cluster that reports as fast as its reports come back on a watch of another cluster. On the whole way each is
    one call, and the record is never gone, and never old."""

    def __init__(self, west: Worker, watcher: Worker) -> None:
        self._schema = west.schema
        self._report = west.report()
        self._seen = Seen(watcher.watch())
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self.idle = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on until stopped; tells when the first report has come through. Raises Refused."""
        with self._scope:
            while True:
                self.idle += 1
                self._report.send(self._schema.report(record("west", idle=self.idle)))
                with trio.fail_after(PATIENCE):
                    while self._seen.idle.get(REPORTED) != self.idle:
                        await self._seen.take()
                        assert self.idle == 1 or REPORTED in self._seen.idle
                assert self._seen.oldest[REPORTED] < OLDEST
                if self.idle == 1:
                    task_status.started()
        self._ended.set()

    async def goes_on(self) -> None:
        """Wait for some more of it."""
        before = self.idle
        await until(lambda: self.idle >= before + 20)

    async def stop(self) -> None:
        """Stop it, and say goodbye on the call with which it has begun. Raises Refused."""
        self._scope.cancel()
        await self._ended.wait()
        self._report.end()
        await self._report.answer()


class Site:
    """The files of a hub's configuration, which are replaced while it runs."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self.folder = folder
        self.put(hub_secret=MASTER.encode(), denied=b"# nobody yet\n")
        self.put(**self.certificate(fleet.hub), client_ca=fleet.authority.pem)
        self.config = folder / "hub.toml"
        self.config.write_text(
            '[hub]\nbind = "127.0.0.1:0"\naccept = ["token+certificate"]\n'
            'secret_file = "hub_secret"\nnext_secret_file = "next_secret"\ndeny_file = "denied"\n'
            '[hub.tls]\ncert_file = "certificate"\nkey_file = "key"\nclient_ca_file = "client_ca"\n'
            f'cluster_san = "{DNS}"\n'
            "[hub.limits]\nmessage_rate = 1000000\n"
            '[metrics]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n[log]\nlevel = "info"\nformat = "json"\n'
        )

    def put(self, **files: bytes) -> None:
        """Put files in the place of others, each at once, one after the other."""
        for name, data in files.items():
            (self.folder / "new").write_bytes(data)
            (self.folder / "new").replace(self.folder / name)

    @staticmethod
    def certificate(pair: Pair) -> dict[str, bytes]:
        """The files of a certificate."""
        return {"certificate": pair.cert_file.read_bytes(), "key": pair.key_file.read_bytes()}


@pytest.mark.slow
async def test_everything_is_replaced_under_load_without_a_gap(
    nursery: trio.Nursery, schema: Schema, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The streams go on for longer than a call of another test may take.
    monkeypatch.setattr(peers, "TIMEOUT", 10 * peers.TIMEOUT)
    site = Site(tmp_path, fleet)
    hub = await start(nursery, "run", site.config)
    await hub.started()
    old, new = fleet.authority, fleet.other
    new_hub = new.issue("new-hub", "IP:127.0.0.1", usage="serverAuth")
    new_pair = new.issue("south", *clusters_named("south"))
    reloads: Counter[str] = Counter()

    def worker(
        cluster: str, *, secret: str = MASTER, serial: int = 1, pair: Pair | None = None, trusts: Authority = old
    ) -> Worker:
        credentials = (pair or fleet.agent(cluster)).credentials(trusts.pem)
        token = make_token(secret, cluster, serial)
        return Worker(schema, hub.hub_port, cluster, secret=token, instance=ONE, credentials=credentials)

    async def status(**how: Any) -> grpc.StatusCode:
        """What becomes of a watch on a new connection. One that is let in is shown what there is, and that is new."""
        with worker("south", **how) as south:
            seen = Seen(south.watch())
            if (refused := await outcome(seen.take())) is not None:
                return refused.code
            assert seen.idle[REPORTED] > 0
            assert seen.oldest[REPORTED] < OLDEST
            return Code.OK

    async def replace(what: str, **files: bytes) -> None:
        """Replace files, and wait until the hub has read them."""
        site.put(**files)
        reloads[what] += 1
        await hub.event("reloaded", what=what, number=reloads[what])
        await load.goes_on()

    with worker("west") as west, worker("north") as north, worker("east") as east:
        load = Load(west, north)
        await nursery.start(load.run)
        steady = Steady(east, "east")
        await steady.goes_on()
        assert await status() is Code.OK
        assert await status(secret=NEXT_MASTER) is Code.UNAUTHENTICATED

        # The secret: first both count, then only the new one.
        await replace("hub.secrets", next_secret=NEXT_MASTER.encode())
        assert await status() is Code.OK
        assert await status(secret=NEXT_MASTER) is Code.OK
        await replace("hub.secrets", hub_secret=NEXT_MASTER.encode())
        await replace("hub.secrets", next_secret=b"")
        assert await status() is Code.UNAUTHENTICATED
        assert await status(secret=NEXT_MASTER) is Code.OK
        await steady.goes_on()

        # The hub's certificate. What cannot be used changes nothing.
        site.put(key=b"no key")
        await hub.event("reload_failed", what="hub.tls")
        assert await status(secret=NEXT_MASTER) is Code.OK
        await replace("hub.tls", **site.certificate(new_hub))
        assert await status(secret=NEXT_MASTER, trusts=old) is Code.UNAVAILABLE
        assert await status(secret=NEXT_MASTER, trusts=new) is Code.OK

        # The authorities for clients: first both count, then only the new one.
        how: dict[str, Any] = {"secret": NEXT_MASTER, "trusts": new}
        assert await status(**how, pair=new_pair) is Code.UNAVAILABLE
        await replace("hub.tls", client_ca=old.pem + new.pem)
        assert await status(**how) is Code.OK
        assert await status(**how, pair=new_pair) is Code.OK
        await replace("hub.tls", client_ca=new.pem)
        assert await status(**how) is Code.UNAVAILABLE
        assert await status(**how, pair=new_pair) is Code.OK
        await steady.goes_on()

        # The deny list: one is out, and all the others stay.
        await replace("hub.deny_file", denied=b"east.1 # lost\nsouth.2\n")
        for refused in (await refusal(steady.report.answer()), await refusal(ended(steady.seen.watch))):
            assert refused.code is Code.PERMISSION_DENIED
            assert "token 1 of cluster 'east'" in refused.details
        assert await status(**how, pair=new_pair) is Code.OK
        assert await status(**how, pair=new_pair, serial=2) is Code.PERMISSION_DENIED
        renewed_pair = new.issue("east", *clusters_named("east"))
        with worker("east", **how, serial=2, pair=renewed_pair) as newer:
            await Steady(newer, "east", begin=100).goes_on()

        await load.goes_on()
        await load.stop()

    assert len(hub.events("reporter_came", cluster="west")) == 1
    assert [each["said_goodbye"] for each in hub.events("reporter_left", cluster="west")] == [True]
    assert len(hub.events("watcher_came", cluster="north")) == 1
    assert await hub.stop() == 0
    hub.assert_only_logged()
    text = "\n".join(hub.lines)
    assert MASTER not in text
    assert NEXT_MASTER not in text

"""TLS between a hub and agents: what each needs to be let in, and what it is told if it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trustme

from tests.process.running import COMMAND, Program, agent_file, free_port, hub_file, records, run_all, start, wait_idle

SECRET = "over-tls-only-91d2"


class Certificates:
    """An authority, and files of what it has issued."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(folder / "ca.pem")

    def issue(self, name: str, identity: str) -> None:
        """Write `<name>.crt` and `<name>.key`."""
        issued = self.authority.issue_cert(identity)
        issued.private_key_pem.write_to_path(self.folder / f"{name}.key")
        for blob in issued.cert_chain_pems:
            blob.write_to_path(self.folder / f"{name}.crt", append=True)


@pytest.mark.slow
async def test_who_is_let_in_by_a_hub_that_asks_for_certificates(nursery: trio.Nursery, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.issue("hub", "127.0.0.1")
    certificates.issue("client", "client.example")
    (tmp_path / "elsewhere").mkdir()
    Certificates(tmp_path / "elsewhere")

    pair = 'cert_file = "client.crt"\nkey_file = "client.key"\n'
    agents = {
        "west": (SECRET, '[federation.tls]\nca_file = "ca.pem"\n' + pair),
        "bare": (None, '[federation.tls]\nca_file = "ca.pem"\n' + pair),
        "none": (SECRET, '[federation.tls]\nca_file = "ca.pem"\n'),
        "lost": (SECRET, '[federation.tls]\nca_file = "elsewhere/ca.pem"\n' + pair),
    }
    tls = '[hub.tls]\ncert_file = "hub.crt"\nkey_file = "hub.key"\nclient_ca_file = "ca.pem"\n'
    hub = await start(nursery, "run", hub_file(tmp_path / "hub.toml", secret=SECRET, more=tls))
    await hub.started()
    running: dict[str, Program] = {}
    for name, (secret, table) in agents.items():
        config = agent_file(
            tmp_path / f"{name}.toml", name, {name: 3}, hub_port=hub.hub_port, secret=secret, more=table
        )
        running[name] = await start(nursery, "run", config)
    west = running["west"]
    await west.event("hub_works", call="report")
    await wait_idle(hub.metrics_port, lambda idle: {key[0] for key in idle} == {"west"})

    # A certificate alone lets nobody in yet: the hub asks for the secret.
    for call in ("report", "watch"):
        assert (await running["bare"].event("hub_failed", call=call))["error"].startswith(
            "no credential: give the agent the hub's secret as [federation] secret"
        )
    await hub.event("call_refused", number=2, status="UNAUTHENTICATED")
    errors = {
        name: (await running[name].event("hub_failed", call="connection", level="warning"))["error"]
        for name in ("none", "lost")
    }
    assert errors["lost"].startswith("TLS failed: certificate not accepted: ")
    assert errors["none"].startswith("TLS failed: the other side demands a certificate, and got none")
    await hub.until(
        lambda: any("did not return a certificate" in event["error"] for event in hub.events("handshake_failed"))
    )

    # Each runs on for its own cluster.
    for name, each in running.items():
        clusters = {key[0] for key in await wait_idle(each.metrics_port, lambda idle: len(idle) > 0)}
        assert clusters == {name}
        assert await each.stop() == 0
    assert await hub.stop() == 0
    for each in (*running.values(), hub):
        each.assert_only_logged()
        assert SECRET not in "\n".join(each.lines)


async def test_files_that_are_no_certificates_are_refused_at_once(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.issue("hub", "127.0.0.1")
    (tmp_path / "hub.key").write_text("not a key")
    tls = '[hub.tls]\ncert_file = "hub.crt"\nkey_file = "hub.key"\n'
    config = hub_file(tmp_path / "hub.toml", secret=SECRET, more=tls)
    for ended in (await run_all(run=[COMMAND, "run", config], check=[COMMAND, "check", config])).values():
        assert ended.process.returncode == 2
        assert ended.output == ""
        (fault,) = ended.lines
        assert fault == (
            f"{config}: [hub.tls] key_file {tmp_path / 'hub.key'}: no private key found that can be read; name a "
            "certificate and its own private key, both as PEM"
        )


def write_records(folder: Path, cluster_id: str, idle: int) -> None:
    """What the source of an agent says from now on."""
    (folder / f"{cluster_id}-capacity.toml").write_text(records({"p1": idle}))


@pytest.mark.slow
async def test_an_agents_certificate_is_replaced_while_it_runs(nursery: trio.Nursery, tmp_path: Path) -> None:
    """By one of another authority: what is open goes on, and the next connection shows the new one. East, whose
    certificate stays, is kept out by the hub that takes the new authority only; west, of which nobody took notice, is
    not."""
    authorities: dict[str, Certificates] = {}
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        authorities[name] = Certificates(tmp_path / name)
        for cluster_id in ("west", "east"):
            authorities[name].issue(cluster_id, f"{cluster_id}.agents.example")
    authorities["old"].issue("hub", "127.0.0.1")
    both = [(tmp_path / name / "ca.pem").read_text() for name in ("old", "new")]
    (tmp_path / "clients.pem").write_text("".join(both))
    for cluster_id in ("west", "east"):
        (tmp_path / f"{cluster_id}-pair").symlink_to("old")

    tls = (
        'accept = ["certificate"]\n[hub.tls]\ncert_file = "old/hub.crt"\nkey_file = "old/hub.key"\n'
        'client_ca_file = "clients.pem"\ncluster_san = "DNS:{cluster}.agents.example"\n'
    )
    port = free_port()
    hub_config = hub_file(tmp_path / "hub.toml", port=port, secret=SECRET, more=tls)
    hub = await (await start(nursery, "run", hub_config)).started()
    agents: dict[str, Program] = {}
    for cluster_id in ("west", "east"):
        table = (
            f'[federation.tls]\nca_file = "old/ca.pem"\ncert_file = "{cluster_id}-pair/{cluster_id}.crt"\n'
            f'key_file = "{cluster_id}-pair/{cluster_id}.key"\n'
        )
        config = agent_file(
            tmp_path / f"{cluster_id}.toml", cluster_id, {"p1": 3}, hub_port=port, secret=None, more=table
        )
        agents[cluster_id] = await start(nursery, "run", config)
        await agents[cluster_id].event("hub_works", call="report")
    west, east = agents["west"], agents["east"]
    await wait_idle(
        hub.metrics_port, lambda idle: {key[0]: value for key, value in idle.items()} == {"west": 3, "east": 3}
    )

    (tmp_path / "other-pair").symlink_to("new")
    (tmp_path / "other-pair").rename(tmp_path / "west-pair")
    await west.event("reloaded", what="federation.tls")
    write_records(tmp_path, "west", 5)
    await wait_idle(
        hub.metrics_port, lambda idle: {key[0]: value for key, value in idle.items()} == {"west": 5, "east": 3}
    )
    assert hub.events("reporter_left") == []
    assert len(hub.events("reporter_came", cluster="west", credential="certificate")) == 1

    assert await hub.stop() == 0
    (tmp_path / "clients.pem").write_text(both[1])
    hub_again = await (await start(nursery, "run", hub_config)).started()
    await hub_again.event("reporter_came", cluster="west", credential="certificate")
    refused = await east.event(
        "hub_failed",
        level="warning",
        error="TLS failed: the other side does not accept the certificate of this side: unknown authority",
    )
    assert refused["call"] == "connection"
    idle = await wait_idle(hub_again.metrics_port, lambda idle: len(idle) > 0)
    assert {key[0]: value for key, value in idle.items()} == {"west": 5}
    assert [event for event in west.events("hub_failed") if "TLS" in event["error"]] == []
    assert hub_again.events("reporter_came", cluster="east") == []

    for each in (west, east, hub_again):
        assert await each.stop() == 0
    for each in (west, east, hub, hub_again):
        each.assert_only_logged()

"""Sources of plugins/kubernetes while a real API server, or the way to it, is not well: it dies, falls silent, forgets,
refuses, or lacks the resource. In all of it nothing false is told, nothing that is only out of reach is withdrawn, what
is known ages, the reason is told, and it all ends by itself.

All tests here share one server, which they may do with as they like as long as they leave it running. What is checked
besides, all the time, is said at `following.Follower`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import trio

from tests.apiserver.build import Programs
from tests.apiserver.cluster import ApiServer, Rule, StartServer, audited, looked, started
from tests.apiserver.following import (
    SANDBOXENVS,
    SANDBOXENVS_CRD,
    TTL,
    Asked,
    Envs,
    Follower,
    Json,
    Relay,
    do,
    following,
    kubeconfig_via,
    relayed,
    server_time,
    truth,
)
from trio_federation_kubernetes import cluster_uid, connection, informer
from trio_federation_kubernetes.cluster_uid import PATH as UID_PATH
from trio_federation_kubernetes.sandboxenv import SandboxEnvMapper

READ: Sequence[Rule] = [{"apiGroups": ["agents.navix.sh"], "resources": ["sandboxenvs"], "verbs": ["list", "watch"]}]
#: Notes who asks for which path of SandboxEnvs.
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: Metadata, resources: [{group: agents.navix.sh}]}
  - {level: None}
"""


@pytest.fixture(scope="module")
def server(apiserver_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The server of this module, with SandboxEnvs, and a log of who asks for them."""
    with audited(apiserver_programs, tmp_path_factory.mktemp("faulty-api-server"), AUDIT_POLICY) as server:
        server.create_crds([SANDBOXENVS_CRD])
        yield server


@pytest.fixture(scope="module")
def forgetful(apiserver_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server that remembers nothing by itself: what was compacted is gone at once."""
    folder = tmp_path_factory.mktemp("forgetful-api-server")
    with started(ApiServer(apiserver_programs, folder, watch_cache=False)) as server:
        server.create_crds([SANDBOXENVS_CRD])
        yield server


@pytest.fixture
def envs(server: ApiServer) -> Envs:
    """SandboxEnvs in a namespace of this test alone."""
    return Envs(server, server.namespace())


@pytest.fixture
async def relay(server: ApiServer) -> AsyncIterator[Relay]:
    """A way to the server that can be cut."""
    async with relayed(server) as relay:
        yield relay


def asked_by(server: ApiServer, user: str) -> set[str]:
    """The paths of SandboxEnvs that a user has asked for, by the server's own log."""
    events = map(json.loads, (server.folder / "audit.log").read_text().splitlines())
    return {event["requestURI"].partition("?")[0] for event in events if event["user"].get("username") == user}


# The server dies, or falls silent


async def test_a_server_that_is_killed_and_comes_back(envs: Envs) -> None:
    server = envs.server
    for number in range(5):
        await do(envs.create, f"e{number}", {"p": number})
    wanted = {(envs.namespace, f"e{number}", "p"): number for number in range(5)}
    async with following("kubernetes", server.kubeconfig, namespaces=[envs.namespace], page_size=2) as follower:
        await follower.until_it_says(wanted)
        await follower.until_watching()
        await do(server.kill)
        await follower.until(lambda: follower.reasons() == ["unreachable"])
        await follower.until(lambda: not follower.live, within=TTL)
        # What it knows ages, and is there until it is too old.
        await follower.until(lambda: follower.collected is None or _stamped(follower))
        assert follower.says() in (wanted, None)
        assert follower.has_pushed() == wanted
        await do(server.start)
        await do(envs.observe, "e0", {"p": 50})
        await do(envs.delete, "e1")
        await do(envs.create, "new", {"p": 60})
        follower.deleted.add((envs.namespace, "e1"))
        wanted |= {(envs.namespace, "e0", "p"): 50, (envs.namespace, "new", "p"): 60}
        del wanted[envs.namespace, "e1", "p"]
        await follower.until_it_says(wanted)
        await follower.until(lambda: follower.live and not follower.troubles)
        assert _withdrawn(follower) == {"e1"}
        # What the server has forgotten meanwhile, as all of them do that start anew, is nothing to wait for.
        assert "expired" not in follower.ever


def _withdrawn(follower: Follower) -> set[str]:
    """The envs of which a member was withdrawn. (One that is new has no members yet, and a record of its own.)"""
    return {identity[2] for identity in follower.withdrawn if identity[3]}


def _stamped(follower: Follower) -> bool:
    """Whether the last collect() has answered with what was known at a moment before."""
    records = (follower.collected or {}).values()
    return bool(records) and all(record.observed_at is not None for record in records)


async def test_a_server_that_is_down_at_the_start(envs: Envs) -> None:
    await do(envs.create, "e", {"p": 1})
    await do(envs.server.kill)
    async with following("kubernetes", envs.server.kubeconfig, namespaces=[envs.namespace]) as follower:
        await follower.until(lambda: follower.reasons() == ["unreachable"] and follower.collect_error is not None)
        assert not follower.live
        assert SANDBOXENVS in str(follower.collect_error)
        await do(envs.server.start)
        await follower.until_it_says({(envs.namespace, "e", "p"): 1})


async def test_a_server_that_falls_silent_and_goes_on(envs: Envs) -> None:
    """All connections stay open meanwhile, and nobody says that anything is wrong."""
    await do(envs.create, "e", {"p": 1})
    await do(envs.create, "f", {"p": 2})
    wanted = {(envs.namespace, "e", "p"): 1, (envs.namespace, "f", "p"): 2}
    async with following("kubernetes", envs.server.kubeconfig, namespaces=[envs.namespace]) as follower:
        await follower.until_it_says(wanted)
        await follower.until_watching()
        await do(envs.server.pause)
        try:
            await follower.until(lambda: not follower.live, within=TTL)
            await follower.until(lambda: follower.reasons() == ["unreachable"])
            await follower.until(lambda: follower.collected is None)
            assert follower.has_pushed() == wanted
        finally:
            await do(envs.server.resume)
        await do(envs.observe, "e", {"p": 3})
        await do(envs.delete, "f")
        follower.deleted.add((envs.namespace, "f"))
        await follower.until_it_says({(envs.namespace, "e", "p"): 3})
        await follower.until(lambda: follower.live and not follower.troubles)
        assert _withdrawn(follower) == {"f"}


async def test_a_pause_too_short_to_matter_changes_nothing(envs: Envs) -> None:
    await do(envs.create, "e", {"p": 1})
    async with following("kubernetes", envs.server.kubeconfig, ttl=30.0, namespaces=[envs.namespace]) as follower:
        await follower.until_it_says({(envs.namespace, "e", "p"): 1})
        await follower.until_watching()
        await do(envs.server.pause)
        since = trio.current_time()
        await follower.until(lambda: trio.current_time() - since > 1)
        await do(envs.server.resume)
        await do(envs.observe, "e", {"p": 2})
        await follower.until_it_says({(envs.namespace, "e", "p"): 2})
        assert len(follower.record.of("watch")) == 1
        assert follower.longest_gap < 15


@pytest.mark.parametrize("alone", [False, True], ids=["with-others", "alone"])
async def test_a_watch_whose_connection_is_dead_is_made_anew(
    alone: bool, envs: Envs, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something between has forgotten the connections that are open, and lets new ones through. That is seen by the
    next probe, where it takes one of the same; else only by the silence."""
    if alone:
        monkeypatch.setattr(informer, "LONGEST_SILENCE", 3.0)
    await do(envs.create, "e", {"p": 1})
    kubeconfig = kubeconfig_via(relay.port, envs.server.kubeconfig)
    async with following("kubernetes", kubeconfig, namespaces=[envs.namespace]) as follower:
        await follower.until_it_says({(envs.namespace, "e", "p"): 1})
        await follower.until_watching()
        relay.stall_open(newest=alone)
        await do(envs.observe, "e", {"p": 2})
        await follower.until_it_says({(envs.namespace, "e", "p"): 2})
        dead, *_ = follower.record.of("watch")
        assert not dead.events
        assert follower.record.lists == 1
        assert bool([asked for asked in follower.record.of("probe") if asked.error is not None]) is not alone


async def test_a_way_that_breaks_again_and_again_loses_nothing(envs: Envs, relay: Relay) -> None:
    kubeconfig = kubeconfig_via(relay.port, envs.server.kubeconfig)
    async with following("kubernetes", kubeconfig, namespaces=[envs.namespace]) as follower:
        for number in range(3):
            name = f"e{number}"
            await follower.until_watching()
            relay.drop()
            await do(envs.create, name, {"p": number})
            if number:
                await do(envs.delete, f"e{number - 1}")
                follower.deleted.add((envs.namespace, f"e{number - 1}"))
            await follower.until_it_says({(envs.namespace, name, "p"): number})
        # To take a watch up again costs no list; where watches fail in a row, one may be better.
        assert follower.record.lists <= 2
        assert not follower.record.gone


# The server forgets


async def test_what_was_compacted_away_under_a_silent_watch_is_listed_anew(envs: Envs, relay: Relay) -> None:
    server = envs.server
    for name in ("kept", "changed", "deleted"):
        await do(envs.create, name, {"p": 1})
    wanted = {(envs.namespace, name, "p"): 1 for name in ("kept", "changed", "deleted")}
    kubeconfig = kubeconfig_via(relay.port, server.kubeconfig)
    # The watch is silent for as long as a restart takes, which must not be long for this TTL.
    async with following("kubernetes", kubeconfig, ttl=90.0, namespaces=[envs.namespace], page_size=2) as follower:
        record = follower.record
        await follower.until_it_says(wanted)
        await follower.until_watching()
        relay.stall()
        await do(envs.observe, "changed", {"p": 2})
        await do(envs.delete, "deleted")
        await do(envs.create, "new", {"p": 3})
        await do(server.compact)
        # It remembers by itself what has happened lately, until it is started anew. (To end as it should would take it
        # long: it waits for watches that do not.)
        await do(server.kill)
        await do(server.start)
        await do(_until_watched, envs)
        assert (record.lists, len(record.of("watch"))) == (1, 1)
        follower.deleted.add((envs.namespace, "deleted"))
        stale = record.of("watch")[0].version
        relay.mend()
        wanted |= {(envs.namespace, "changed", "p"): 2, (envs.namespace, "new", "p"): 3}
        del wanted[envs.namespace, "deleted", "p"]
        await follower.until_it_says(wanted)
        assert follower.pushed == await do(truth, server, SandboxEnvMapper("west"), envs.namespace)
        await follower.until_watching()
        first, second, *more = record.of("watch")
        assert (first.version, second.version, second.gone) == (stale, stale, True)
        # One list was all it took, and what is gone is never asked for again.
        assert (record.gone, record.lists) == (1, 2)
        assert all(watch.version != stale for watch in more)
        assert _withdrawn(follower) == {"deleted"}
        assert "expired" not in follower.ever


def _until_watched(envs: Envs) -> None:
    """Wait until the server, which has just started, lets somebody watch."""
    parameters: dict[str, str | int] = {"watch": 1, "timeoutSeconds": 1}
    assert looked(lambda: envs.server.admin.get(envs.root, params=parameters).is_success, 30)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_list_whose_continue_token_expires_is_begun_again(times: int, forgetful: ApiServer) -> None:
    """The first time from its beginning, the next time in one piece. Nothing is made of the pages of the old one."""
    envs = Envs(forgetful, await do(forgetful.namespace))
    for number in range(5):
        await do(envs.create, f"e{number}", {"p": number})
    expired: list[Asked] = []

    async def forget(asked: Asked) -> None:
        if asked.kind == "page" and len(expired) < times:
            expired.append(asked)
            # Between its pages an env of the first one vanishes, and the version of the list with it.
            await do(envs.delete, f"e{len(expired) - 1}")
            await do(forgetful.compact)

    async with following(
        "kubernetes", forgetful.kubeconfig, before=forget, namespaces=[envs.namespace], page_size=2
    ) as follower:
        await follower.until_it_says({(envs.namespace, f"e{number}", "p"): number for number in range(times, 5)})
        record = follower.record
        assert [asked.gone for asked in expired] == [True] * times
        assert record.gone == times
        limits = [asked.params.get("limit") for asked in record.of("list")]
        assert limits == (["2", "2"] if times == 1 else ["2", "2", None])
        assert not follower.withdrawn


# Who asks


@pytest.fixture
def quick_reloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubeconfig is read anew more often: as often as it would be for the usual TTL, in proportion."""
    monkeypatch.setattr(connection, "RELOAD_INTERVAL", 1.0)


@dataclass
class Agent:
    """A service account that may read SandboxEnvs in its namespace, with the files that it is told of."""

    envs: Envs
    folder: Path

    def __post_init__(self) -> None:
        self.account = self.envs.server.service_account(self.envs.namespace, "agent", rules=READ)
        self.token = self.account.token()
        self.file = self.folder / "token"
        self.file.write_text(self.token.value)
        #: names the file
        self.by_file = self.account.kubeconfig(self.file)
        #: holds the token
        self.by_value = self.account.kubeconfig(self.token)

    def revoke(self) -> None:
        """Make the token void, and wait until requests with it are refused."""
        self.account.revoke(self.token)

    def refused(self) -> bool:
        """Whether requests with the token are."""
        with self.envs.server.client(self.token) as client:
            return client.get(self.envs.root).status_code == 401


@asynccontextmanager
async def agent_followed(
    envs: Envs, kubeconfig: Path, wanted: dict[tuple[str, str, str], int]
) -> AsyncIterator[Follower]:
    """A source with this kubeconfig, once it says what is there."""
    async with following("kubernetes", kubeconfig, namespaces=[envs.namespace]) as follower:
        await follower.until_it_says(wanted)
        await follower.until_watching()
        yield follower


@pytest.mark.usefixtures("quick_reloads")
async def test_tokens_that_are_rotated_and_tokens_that_run_out(envs: Envs, tmp_path: Path) -> None:
    """Three sources have the same token: two in a file and one in the kubeconfig. One file is replaced in time, as the
    kubelet does it; the two others only when the server has refused it. Their watches stay open all the while."""
    await do(envs.create, "e", {"p": 1})
    wanted = {(envs.namespace, "e", "p"): 1}
    agent = await do(Agent, envs, tmp_path)
    late_file = tmp_path / "late-token"
    late_file.write_text(agent.token.value)
    late = await do(agent.account.kubeconfig, late_file)
    async with (
        agent_followed(envs, agent.by_file, wanted) as in_time,
        agent_followed(envs, late, wanted) as too_late,
        agent_followed(envs, agent.by_value, wanted) as embedded,
    ):
        second = await do(agent.account.token)
        agent.file.write_text(second.value)
        await do(agent.revoke)
        # The server remembers for ten seconds whom it let in.
        for follower in (too_late, embedded):
            await follower.until(lambda follower=follower: follower.reasons() == ["unauthorized"])  # type: ignore[misc]
            assert agent.token.value not in str(follower.troubles)
            await follower.until(lambda follower=follower: not follower.live)  # type: ignore[misc]
            assert follower.has_pushed() == wanted
        assert await do(agent.refused)
        # The watch is open still, and what comes is known to be true.
        await do(envs.observe, "e", {"p": 2})
        for follower in (in_time, too_late, embedded):
            await follower.until_it_says({(envs.namespace, "e", "p"): 2})
            assert len(follower.record.of("watch")) == 1
        late_file.write_text(second.value)
        fresh = await do(agent.account.kubeconfig, second)
        agent.by_value.write_text(fresh.read_text())
        for follower in (too_late, embedded):
            await follower.until(lambda follower=follower: follower.live and not follower.troubles)  # type: ignore[misc]
        await do(envs.observe, "e", {"p": 3})
        for follower in (in_time, too_late, embedded):
            await follower.until_it_says({(envs.namespace, "e", "p"): 3})
            assert follower.record.lists == 1
            assert not follower.withdrawn
        assert in_time.longest_gap < TTL / 2
        # Its account has no right to read the cluster's UID.
        assert not [asked for asked in in_time.record.asked if asked.error is not None and asked.kind != "uid"]


@pytest.mark.usefixtures("quick_reloads")
async def test_a_client_certificate_that_runs_out_is_replaced(envs: Envs, tmp_path: Path) -> None:
    server = envs.server
    await do(envs.create, "e", {"p": 1})
    file = tmp_path / "client.pem"

    def issue(seconds: float) -> None:
        ends = server_time(server) + timedelta(seconds=seconds)
        made = server.authority.issue_cert(
            "agent", common_name="agent", organization_name="system:masters", not_after=ends
        )
        made.private_key_and_cert_chain_pem.write_to_path(file)

    await do(issue, 4)
    # By its path: nothing in the kubeconfig itself changes.
    kubeconfig = server.write_kubeconfig("certified", {"client-certificate": str(file), "client-key": str(file)})
    async with following("kubernetes", kubeconfig, namespaces=[envs.namespace]) as follower:
        await follower.until_it_says({(envs.namespace, "e", "p"): 1})
        await follower.until_watching()
        await follower.until(lambda: follower.reasons() == ["unauthorized"])
        await do(issue, 3600)
        await follower.until(lambda: follower.live and not follower.troubles)
        await do(envs.observe, "e", {"p": 2})
        await follower.until_it_says({(envs.namespace, "e", "p"): 2})
        assert not follower.withdrawn
        assert follower.record.lists == 1


@pytest.mark.usefixtures("quick_reloads")
async def test_a_kubeconfig_that_leads_elsewhere_is_followed(envs: Envs, relay: Relay) -> None:
    server = envs.server
    await do(envs.create, "e", {"p": 1})
    kubeconfig = kubeconfig_via(relay.port, server.kubeconfig)
    async with following("kubernetes", kubeconfig, namespaces=[envs.namespace]) as follower:
        await follower.until_it_says({(envs.namespace, "e", "p"): 1})
        await follower.until_watching()
        relay.cut()
        await follower.until(lambda: follower.reasons() == ["unreachable"])
        # Half of a file is what a reader may see of one that is being written.
        content = server.kubeconfig.read_text()
        kubeconfig.write_text(content[: len(content) // 2])
        await follower.until(lambda: follower.reasons() == ["kubeconfig"])
        kubeconfig.write_text(content)
        await do(envs.observe, "e", {"p": 2})
        await follower.until_it_says({(envs.namespace, "e", "p"): 2})
        await follower.until(lambda: follower.live and not follower.troubles)
        assert not follower.withdrawn


# Who may ask


def allow(server: ApiServer, namespace: str | None, account: str) -> None:
    """Let a service account, "NAMESPACE:NAME", read the SandboxEnvs of a namespace, or (None) of all."""
    kind, scope = ("clusterrole", []) if namespace is None else ("role", ["-n", namespace])
    name = f"reader-{account.partition(':')[0]}"
    server.kubectl("create", kind, name, *scope, "--verb=list,watch", f"--resource={SANDBOXENVS}")
    server.kubectl("create", f"{kind}binding", name, *scope, f"--{kind}={name}", f"--serviceaccount={account}")


@pytest.mark.parametrize("everywhere", [False, True], ids=["one-namespace", "all-namespaces"])
async def test_who_may_read_nothing_knows_nothing_until_that_is_mended(everywhere: bool, envs: Envs) -> None:
    server, namespace = envs.server, envs.namespace
    await do(envs.create, "e", {"p": 1}, labels={"of": namespace})
    account = await do(server.service_account, namespace, "nobody")
    kubeconfig = await do(lambda: account.kubeconfig(account.token()))
    options: Json = {"label_selector": f"of={namespace}"} if everywhere else {"namespaces": [namespace]}
    async with following("kubernetes", kubeconfig, **options) as follower:
        await follower.until(lambda: follower.reasons() == ["forbidden"])
        (trouble,) = follower.troubles
        where = "" if everywhere else f" in {namespace}"
        assert trouble.detail.startswith(f"{SANDBOXENVS}{where}: ")
        assert f"grant its user list and watch on {SANDBOXENVS}" in trouble.detail
        assert account.username in trouble.detail
        # It is unknown, and not nothing.
        await follower.until(lambda: follower.collect_error is not None)
        assert not follower.live
        assert follower.collected is None
        await do(allow, server, None if everywhere else namespace, f"{namespace}:nobody")
        await follower.until_it_says({(namespace, "e", "p"): 1})
        await follower.until(lambda: not follower.troubles)


async def test_rights_that_are_taken_away_are_noticed(envs: Envs) -> None:
    """A watch stays open without them. What is known then is vouched for only by what comes."""
    server = envs.server
    await do(envs.create, "e", {"p": 1})
    account = await do(server.service_account, envs.namespace, "agent", rules=READ)
    kubeconfig = await do(lambda: account.kubeconfig(account.token()))
    async with following("kubernetes", kubeconfig, namespaces=[envs.namespace]) as follower:
        await follower.until_it_says({(envs.namespace, "e", "p"): 1})
        await follower.until_watching()
        await do(server.kubectl, "delete", "rolebinding", "agent", "-n", envs.namespace)
        await follower.until(lambda: follower.reasons() == ["forbidden"] and not follower.live)
        assert not follower.withdrawn
        await do(allow, server, envs.namespace, f"{envs.namespace}:agent")
        await follower.until(lambda: follower.live and not follower.troubles)
        assert not follower.withdrawn


async def test_a_forbidden_namespace_does_not_cost_the_others(server: ApiServer) -> None:
    places = [Envs(server, await do(server.namespace)) for _ in range(3)]
    for number, envs in enumerate(places):
        await do(envs.create, "e", {"p": number})
    one, two, three = (envs.namespace for envs in places)
    account = await do(server.service_account, one, "agent", rules=READ)
    await do(allow, server, three, f"{one}:agent")
    kubeconfig = await do(lambda: account.kubeconfig(account.token()))
    async with following("kubernetes", kubeconfig, namespaces=[one, two, three]) as follower:
        await follower.until_it_says({(one, "e", "p"): 0, (three, "e", "p"): 2})
        await follower.until_watching(2)
        await follower.until(lambda: follower.reasons() == ["forbidden"])
        assert f" in {two}: " in follower.troubles[0].detail
        await do(places[2].observe, "e", {"p": 5})
        await follower.until_it_says({(one, "e", "p"): 0, (three, "e", "p"): 5})
        assert follower.live
        assert follower.longest_gap < TTL / 2
        await do(allow, server, two, f"{one}:agent")
        await follower.until_it_says({(one, "e", "p"): 0, (two, "e", "p"): 1, (three, "e", "p"): 5})
        await follower.until(lambda: not follower.troubles)
        assert follower.longest_gap < TTL / 2
        record = follower.record
    # Nothing but the namespaces was asked for: by its own account, and by the server's.
    wanted = {envs.root for envs in places}
    assert {asked.path for asked in record.asked if asked.kind != "uid"} == wanted
    assert asked_by(server, account.username) == wanted


# Another cluster answers


@pytest.mark.usefixtures("quick_reloads")
async def test_a_cluster_that_was_built_anew_at_the_same_address_is_known_as_another_one(
    envs: Envs, relay: Relay, own_api_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address leads to it, and the kubeconfig has its certificates."""
    monkeypatch.setattr(cluster_uid, "LEAST_BETWEEN", 1.0)
    other = await do(own_api_server)
    await do(other.create_crds, [SANDBOXENVS_CRD])
    there = Envs(other, await do(other.namespace))
    await do(envs.create, "e", {"p": 1})
    await do(there.create, "f", {"p": 2})
    path = kubeconfig_via(relay.port, envs.server.kubeconfig)
    async with following("kubernetes", path, label_selector="of=this-test") as follower:
        await do(envs.label, "e", of="this-test")
        await follower.until_it_says({(envs.namespace, "e", "p"): 1})
        first = follower.source.cluster_uid()
        assert first == (await do(envs.server.call, "GET", UID_PATH))["metadata"]["uid"]
        await follower.until_watching()
        await do(there.label, "f", of="this-test")
        relay.target = other.port
        path.write_text(kubeconfig_via(relay.port, other.kubeconfig).read_text())
        relay.drop()
        await follower.until_it_says({(there.namespace, "f", "p"): 2})
        second = (await do(other.call, "GET", UID_PATH))["metadata"]["uid"]
        await follower.until(lambda: follower.source.cluster_uid() == second)
        assert second != first


# There is nothing to read yet


async def test_a_resource_that_is_not_there_yet_or_not_any_more(envs: Envs, tmp_path: Path) -> None:
    server = envs.server
    await do(server.kubectl, "delete", "crd", SANDBOXENVS, "--wait")
    async with following("kubernetes", server.kubeconfig) as follower:
        await follower.until(lambda: follower.reasons() == ["not_found"])
        assert f"install the CustomResourceDefinition of {SANDBOXENVS}" in follower.troubles[0].detail
        await follower.until(lambda: follower.collect_error is not None)
        assert not follower.live
        await do(server.create_crds, [SANDBOXENVS_CRD])
        await do(envs.create, "e", {"p": 1})
        await follower.until_it_says({(envs.namespace, "e", "p"): 1})
        await follower.until(lambda: not follower.troubles)
        # With the definition go the objects, one by one.
        await do(server.kubectl, "delete", "crd", SANDBOXENVS, "--wait")
        follower.deleted.add((envs.namespace, "e"))
        await follower.until(lambda: follower.reasons() == ["not_found"])
        await follower.until(lambda: not follower.live)
        assert follower.has_pushed() == {}
        await do(server.create_crds, [SANDBOXENVS_CRD])
        await do(envs.create, "f", {"p": 2})
        await follower.until_it_says({(envs.namespace, "f", "p"): 2})

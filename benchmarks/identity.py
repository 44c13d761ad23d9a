"""What it costs a hub to know who speaks: new connections by how they prove themselves, the checks of a call, stamping
and policy for each record, and the memory of a session that says nothing.

A new connection is all of it: TCP, TLS where there is any, HTTP/2, one watch call, its credentials, and the first
message. The clients are this project's, eight at a time, in a process of their own; what counts is the CPU of the hub's
whole process. A session is what one agent has open: a connection with a report and a watch."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

import trio
import trustme

from benchmarks.children import command, listen, running, running_module, say
from benchmarks.hubs import RunningHub
from benchmarks.measure import Figure, compared, seconds, shown
from benchmarks.messages import SECRET
from trio_federation.capacity import Capacity, Origin
from trio_federation.clock import boot_time
from trio_federation.config import PolicySettings
from trio_federation.credentials import CertificateName, make_token
from trio_federation.identity import Trusted, call_metadata, identify
from trio_federation.pb.sandbox.sync.v1 import ReportFederationRequest, WatchFederationRequest
from trio_federation.policy import Policy
from trio_federation.rpc import Dialer, HubConnection, client_tls, open_bridge, tcp_dialer
from trio_federation.wire import ReceivedReport, changes_of, encode, report_messages

#: How peers come, from the cheapest to the dearest: the ways that the hub accepts.
WAYS = ("plain text, shared", "plain text, token", "TLS, token", "mutual TLS, certificate")
CONNECTIONS = 600
QUICK_CONNECTIONS = 16
AT_A_TIME = 8
SESSIONS = 200
QUICK_SESSIONS = 10
RECORDS = 1_000
#: Microseconds of stamping and policy for each record that we want to stay under.
GOAL = 1.0
SAN = "DNS:{cluster}.agents.example"


def run(*, quick: bool = False) -> list[Figure]:
    """Handshakes per second, microseconds per call and per record, and bytes per idle session."""
    figures: list[Figure] = []
    ways = WAYS[:: len(WAYS) - 1] if quick else WAYS
    with tempfile.TemporaryDirectory() as folder:
        _make_certificates(Path(folder), sessions=2 * (QUICK_SESSIONS if quick else SESSIONS))
        costs: dict[str, float] = {}
        rates: dict[str, float] = {}
        for way in ways:
            print(f"  {way}", file=sys.stderr)
            costs[way], rates[way] = _connections(Path(folder), way, QUICK_CONNECTIONS if quick else CONNECTIONS)
        for way in ways:
            figure = compared(f"new connection and call: {way}", costs[way] * 1e3, "ms", costs[WAYS[0]] * 1e3, WAYS[0])
            figures.append(figure)
            text = (
                f"with {AT_A_TIME} at a time, clients on the same machine; CPU alone would allow {1 / costs[way]:,.0f}"
            )
            figures.append(Figure(f"handshakes per second: {way}", rates[way], "/s", text))
        held = {}
        for way in ways:
            print(f"  idle sessions, {way}", file=sys.stderr)
            held[way] = _idle_sessions(Path(folder), way, QUICK_SESSIONS if quick else SESSIONS)
        for way in ways:
            figures.append(
                compared(f"memory, per idle session: {way}", held[way] / 1e3, "kB", held[WAYS[0]] / 1e3, WAYS[0])
            )
    return [*figures, *_calls(), *_records()]


# --- connections -----------------------------------------------------------------------------------------------------


def _make_certificates(folder: Path, sessions: int) -> None:
    """A certificate for the hub, and one for each cluster that comes."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificates = {"hub": authority.issue_cert("localhost")}
    certificates |= {name: authority.issue_cert(f"{name}.agents.example") for name in map(_cluster, range(sessions))}
    for name, certificate in certificates.items():
        certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        with open(folder / f"{name}.pem", "wb") as file:
            for blob in certificate.cert_chain_pems:
                file.write(blob.bytes())


def _hub_config(way: str) -> str:
    accept = way.partition(", ")[2]
    lines = [
        *('[hub]\nbind = "127.0.0.1:0"', f'secret = "{SECRET}"', f'accept = ["{accept}"]'),
        *("[hub.limits]", "connections = 2000", "message_rate = 100000"),
    ]
    if "TLS" in way:
        lines += ["[hub.tls]", 'cert_file = "hub.pem"', 'key_file = "hub.key"']
    if "mutual" in way:
        lines += ['client_ca_file = "ca.pem"', f'cluster_san = "{SAN}"']
    lines += ['[metrics]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n[log]\nlevel = "error"\nformat = "json"']
    return "\n".join(lines)


@contextmanager
def _hub(folder: Path, way: str) -> Iterator[RunningHub]:
    path = folder / "hub.toml"
    # It has to say its port, and nothing of the thousands that come and go.
    path.write_text(_hub_config(way).replace('level = "error"', 'level = "info"'))
    with running(command(), "run", path, name=f"the hub ({way})") as child:
        (port,) = child.hear(event="started")["hub_ports"]
        yield RunningHub(child, port)


def _connections(folder: Path, way: str, number: int) -> tuple[float, float]:
    """Seconds of the hub's CPU for one new connection, and how many there were in a second."""
    with (
        _hub(folder, way) as hub,
        running_module("identity", "come", hub.port, way, str(folder), name="clients") as peers,
    ):
        peers.tell(number=AT_A_TIME)  # to warm up
        peers.hear(done=True)
        before = hub.child.cpu_seconds()
        peers.tell(number=number)
        took: float = peers.hear(done=True)["took"]
        return (hub.child.cpu_seconds() - before) / number, number / took


def _idle_sessions(folder: Path, way: str, number: int) -> float:
    """Bytes of the hub's memory for each session that is open and says nothing."""
    with (
        _hub(folder, way) as hub,
        running_module("identity", "stay", hub.port, way, str(folder), name="clients") as peers,
    ):
        peers.tell(number=number // 4)  # so that what is made once is there
        peers.hear(done=True)
        before = hub.child.resident_bytes()
        peers.tell(number=number)
        peers.hear(done=True)
        return (hub.child.resident_bytes() - before) / number


# --- in the process of the clients -----------------------------------------------------------------------------------


def _cluster(number: int) -> str:
    return f"bench-{number}"


def _dialer(port: int, way: str, folder: Path, cluster_id: str) -> Dialer:
    if "TLS" not in way:
        return tcp_dialer("127.0.0.1", port)
    mutual = "mutual" in way
    context = client_tls(
        ca_file=str(folder / "ca.pem"),
        cert_file=str(folder / f"{cluster_id}.pem") if mutual else None,
        key_file=str(folder / f"{cluster_id}.key") if mutual else None,
    )
    return tcp_dialer("127.0.0.1", port, tls=context, server_name="localhost")


def _metadata(way: str, cluster_id: str) -> list[tuple[str, str]]:
    credential = None
    if "shared" in way:
        credential = SECRET
    elif "token" in way:
        credential = make_token(SECRET, cluster_id)
    return call_metadata(cluster_id, "ab" * 16, credential)


async def _come(port: int, way: str, folder: Path) -> None:
    """Connect, watch, hear the first message, and go, as often as is asked."""
    dial = _dialer(port, way, folder, _cluster(0))
    metadata = _metadata(way, _cluster(0))

    async def some(number: int) -> None:
        for _ in range(number):
            stream = await dial()
            async with trio.open_nursery() as nursery:
                connection = await HubConnection.open(nursery, stream, peer="hub", metadata=metadata)
                async with connection.watch(WatchFederationRequest()) as call:
                    await call.receive()
                await connection.aclose()

    async with open_bridge():
        while True:
            number = (await trio.to_thread.run_sync(listen))["number"]
            began = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for _ in range(AT_A_TIME):
                    nursery.start_soon(some, number // AT_A_TIME)
            say(done=True, took=time.perf_counter() - began)


async def _stay(port: int, way: str, folder: Path) -> None:
    """Open as many sessions as is asked, and keep them."""
    made = 0
    async with open_bridge(), AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        while True:
            number = (await trio.to_thread.run_sync(listen))["number"]
            for _ in range(number):
                cluster_id = _cluster(made)
                made += 1
                stream = await _dialer(port, way, folder, cluster_id)()
                metadata = _metadata(way, cluster_id)
                connection = await HubConnection.open(nursery, stream, peer="hub", metadata=metadata)
                report = await stack.enter_async_context(connection.report())
                await report.send(ReportFederationRequest())
                await report.wait_accepted()
                watch = await stack.enter_async_context(connection.watch(WatchFederationRequest()))
                await watch.receive()
            say(done=True)


# --- calls and records -----------------------------------------------------------------------------------------------


def _calls() -> list[Figure]:
    """Microseconds that it takes to say whose call it is."""
    san = CertificateName.parse(SAN)
    names = [("DNS", "west.agents.example")]
    cases = {
        "shared": (Trusted(("shared",), (SECRET,)), SECRET, ()),
        "token": (Trusted(("token",), (SECRET,)), make_token(SECRET, "west"), ()),
        "token, of two secrets": (Trusted(("token",), ("another", SECRET)), make_token(SECRET, "west"), ()),
        "certificate": (Trusted(("certificate",), (), cluster_san=san), None, names),
    }
    costs = {}
    for name, (trusted, credential, certificate) in cases.items():
        metadata = dict(call_metadata("west", "ab" * 16, credential))
        costs[name] = seconds(partial(identify, metadata, certificate, trusted), number=2_000) * 1e6
    return [compared(f"credentials, per call: {name}", costs[name], "µs", costs["shared"], "shared") for name in cases]


def _records() -> list[Figure]:
    """Microseconds for each record of a report: reading it, stamped or not, and what a policy adds."""
    data = _report()
    now = boot_time()
    message = ReceivedReport(data)
    per = 1e6 / RECORDS
    alone = seconds(lambda: changes_of(ReceivedReport(data), now), repeat=20) * per
    stamped = seconds(lambda: changes_of(ReceivedReport(data), now, "west"), repeat=20) * per
    changes = changes_of(message, now, "west").changes
    figures = [compared("stamping and reading, per record", stamped, "µs", alone, "reading alone")]
    policies: dict[str, PolicySettings] = {
        "none": PolicySettings(clusters=("*",)),
        "envs": PolicySettings(clusters=("*",), report=("agents/*", "team-*/python")),
        "envs, most records, highest idle": PolicySettings(
            clusters=("*",), report=("agents/*", "team-*/python"), max_records=RECORDS, max_idle=1_000
        ),
        "the same, and every idle is cut": PolicySettings(
            clusters=("*",), report=("agents/*",), max_records=RECORDS, max_idle=0
        ),
    }
    for name, settings in policies.items():
        policy = Policy(settings)
        held = frozenset(change.identity for change in changes)
        cost = seconds(partial(policy.admit, changes, RECORDS, held.__contains__), repeat=50) * per
        beside = f"goal {shown(GOAL)} µs, stamping included; reading takes {shown(stamped)} µs"
        figures.append(Figure(f"policy, per record: {name}", cost, "µs", beside, cost / GOAL))
    see = Policy(PolicySettings(clusters=("*",), see=("agents/*",)))
    by_identity = {change.identity: change for change in changes}
    cost = seconds(lambda: see.visible(by_identity), repeat=50) * per
    figures.append(Figure("policy, per record shown: envs", cost, "µs", f"goal {shown(GOAL)} µs", cost / GOAL))
    return figures


def _report() -> bytes:
    now = boot_time()
    origin = Origin("ab" * 16, 7, now - 1000)
    records: Sequence[Capacity] = [
        Capacity(
            "claimed", "agents", f"env-{number}", "pool", idle=1 + number % 9, running=3, desired=9, state="Active",
            observed_at=now, origin=origin,
        )
        for number in range(RECORDS)
    ]  # fmt: skip
    (message,) = report_messages(records, now)
    return encode(message)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("come", "stay"))
    parser.add_argument("port", type=int)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    trio.run(_come if arguments.what == "come" else _stay, arguments.port, arguments.way, arguments.folder)

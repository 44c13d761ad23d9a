"""Secrets appear nowhere: not in what any command prints at its loudest, not in what is served or told a peer, not in
the arguments that a process shows of itself, not in the traceback of a crash. Every kind of secret is used, and every
way of giving one, right and wrong; then everything that has come out is searched for all of them."""

from __future__ import annotations

import base64
import socket
import ssl
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import grpc
import h2.config
import h2.connection
import httpx
import pytest
import trio
import trustme
from cryptography.hazmat.primitives import serialization

from tests.process.plugin_packages import install
from tests.process.running import (
    COMMAND,
    PATIENCE,
    UNWANTED,
    Program,
    agent_file,
    free_port,
    hub_file,
    records,
    start,
)
from trio_federation.cli import main
from trio_federation.credentials import make_token

#: Each is given in another way; any eight characters of one in a row would give it away.
HUBS = "hub-key-8fQ2xTz7vLp0"
IN_A_FILE = HUBS  # what a good agent has where the secret is shared
NEXT = "next-key-2kYs6gRu9dCj"
ADMIN = "admin-key-5pNw1oBt8hEm"
WRONG = "wrong-key-3rJ9mWb5nKs1"
FROM_ENVIRONMENT = "env-key-6yHd4cGu8aXe2"
MISPLACED = "misplaced-key-7tVo1iRq5"
IN_OPTIONS = "option-key-9zBk3pFw6jM4"
SECRETS = (HUBS, NEXT, ADMIN, WRONG, FROM_ENVIRONMENT, MISPLACED, IN_OPTIONS)

#: of the hub's secret, of the next one, and of one that is no hub's; none may be shown, whoever takes it
WEST = make_token(HUBS, "west", 3)
EAST = make_token(HUBS, "east")
DENIED = make_token(HUBS, "denied", 2)
NEWER = make_token(NEXT, "west", 4)
FORGED = make_token(WRONG, "forged")
PASTED = make_token(HUBS, "pasted")
MISPLACED_TOKEN = make_token(MISPLACED, "west")
TOKENS = (WEST, EAST, DENIED, NEWER, FORGED, PASTED, MISPLACED_TOKEN)


# --- the search ------------------------------------------------------------------------------------------------------


def _windows(text: str, length: int, step: int = 1) -> Iterator[str]:
    yield from (text[start : start + length] for start in range(0, len(text) - length + 1, step))


def traces(secret: str) -> Iterator[str]:
    """What would give a secret away: any eight characters of it, the whole in base64 or as hexadecimal digits; of a
    token, twelve of its MAC, as eight digits may well be a part of some other number."""
    data = secret.encode()
    yield base64.b64encode(data).decode().rstrip("=")
    yield data.hex()
    if secret.startswith("tf1."):
        yield from _windows(secret.rpartition(".")[2], 12)
    else:
        yield from _windows(secret.partition("key-")[2], 8)


def traces_of_key(pem: str) -> Iterator[str]:
    """What would give a private key away: some of its PEM, which is the DER in base64, wherever lines are broken; its
    number, as anybody may write it. Of 23 characters in a row, one piece of 16 is looked for."""
    yield from _windows("".join(line for line in pem.splitlines() if "-----" not in line), 16, step=8)
    key = serialization.load_pem_private_key(pem.encode(), None)
    number = key.private_numbers().private_value  # type: ignore[union-attr]
    yield from _windows(f"{number:x}", 16, step=8)
    yield from _windows(str(number), 16, step=8)


class Search:
    """Looks for all secrets, those of all, and the private keys that it is given."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        #: by the name of what it would give away
        self._traces: dict[str, list[str]] = {secret[:14]: list(traces(secret)) for secret in (*SECRETS, *TOKENS)}
        self._traces |= {f"the key of {name}": list(traces_of_key(pem)) for name, pem in (keys or {}).items()}

    def found(self, text: str) -> list[tuple[str, str]]:
        """What a text gives away, and the text around it. Lines may be broken anywhere, as a terminal breaks them."""
        found = []
        for whole in (text, "".join(text.split())):
            for name, each in self._traces.items():
                trace = next((trace for trace in each if trace in whole), None)
                if trace is not None:
                    at = whole.find(trace)
                    found.append((name, whole[max(0, at - 200) : at + 200]))
        return found

    def assert_silent(self, text: str, where: str) -> None:
        """Fail where a text gives anything away."""
        found = self.found(text)
        assert not found, f"{where}: {found}"


def _key_of(issued: trustme.LeafCert) -> str:
    return issued.private_key_pem.bytes().decode()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """One for all tests here."""
    return trustme.CA()


def test_the_search_finds_what_is_planted(authority: trustme.CA) -> None:
    """A test that could not fail would be no test. Every secret, in the forms that it may take on its way out."""
    pem = _key_of(authority.issue_cert("hub.example"))
    search = Search({"hub": pem})
    for secret in SECRETS:
        own = secret.partition("key-")[2]
        plain = (own[1:9], own[-8:], f'{{"error": "{secret}"}}', repr(f"é{secret}\xff".encode("latin-1")))
        folded = f"{own[:4]}\n    {own[4:]}"
        for text in (*plain, folded, base64.b64encode(secret.encode()).decode(), secret.encode().hex()):
            assert [name for name, _ in search.found(f"a {text} b")] != [], text
        assert search.found(own[:7]) == []
    for token in TOKENS:
        mac = token.rpartition(".")[2]
        for text in (token, mac, mac[:12], mac[-12:], f"…{mac[20:40]}…", f"{mac[:5]}\n{mac[5:20]}"):
            assert search.found(f"a {text} b") != [], text
    body = "".join(pem.splitlines()[1:-1])
    number = serialization.load_pem_private_key(pem.encode(), None).private_numbers().private_value  # type: ignore[union-attr]
    for text in (pem, pem.replace("\n", "\\n"), body, body[30:60], pem.splitlines()[2], str(number), hex(number)):
        assert "the key of hub" in dict(search.found(text)), text


def test_the_search_lets_be_what_everybody_may_know(authority: trustme.CA) -> None:
    issued = authority.issue_cert("hub.example")
    search = Search({"hub": _key_of(issued)})
    certificate = issued.cert_chain_pems[0].bytes().decode()
    harmless = f"{certificate} tf1.west.3 hub-key- Secret(***) {'0123456789abcdef' * 4}"
    assert search.found(harmless) == []


# --- real processes --------------------------------------------------------------------------------------------------


class Files:
    """What a hub and its agents are given, in one folder."""

    def __init__(self, folder: Path, authority: trustme.CA) -> None:
        self.folder = folder
        self.keys: dict[str, str] = {}
        authority.cert_pem.write_to_path(folder / "ca.pem")
        trustme.CA().cert_pem.write_to_path(folder / "elsewhere.pem")
        for name in ("hub", "agent", "admin"):
            issued = authority.issue_cert("localhost", "127.0.0.1", f"{name}.example")
            self.keys[name] = _key_of(issued)
            issued.private_key_pem.write_to_path(folder / f"{name}.key")
            issued.cert_chain_pems[0].write_to_path(folder / f"{name}.crt")
        # One that is good, but encrypted; and one whose certificate nobody asks for.
        another = _key_of(authority.issue_cert("another.example"))
        self.keys["another"] = another
        encrypted = serialization.load_pem_private_key(another.encode(), None).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(WRONG.encode()),
        )
        self.encrypted = encrypted.decode()
        self.write(secret=HUBS, next=NEXT, token=ADMIN, deny="denied.2\n", west=WEST)
        self.search = Search(self.keys)

    def write(self, **contents: str | bytes) -> None:
        """Put something into files."""
        for name, content in contents.items():
            (self.folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


_ADMIN = (
    '[admin]\nbind = "127.0.0.1:0"\ntoken_file = "token"\n'
    '[admin.tls]\ncert_file = "admin.crt"\nkey_file = "admin.key"\n'
)
_LOUD = '[metrics]\nbind = "127.0.0.1:0"\n[log]\nlevel = "debug"\nformat = "json"\n'
_CLIENT = '[federation.tls]\nca_file = "ca.pem"\ncert_file = "agent.crt"\nkey_file = "agent.key"\n'

#: A source that has a secret of its own, and fails with it at hand.
_FAILING = """
class Keyed(msgspec.Struct):
    password: str

class Source(CapacitySource):
    def __init__(self, options, context):
        self.password = options.password

    async def collect(self):
        password = self.password
        raise RuntimeError("the door is closed")

@hookimpl
def capacity_sources():
    return [SourceType("keyed", Keyed, Source)]
"""


def _tokens_hub(files: Files) -> Path:
    """A hub that takes tokens with certificates, and everything that it reads from files."""
    path = files.folder / "hub.toml"
    path.write_text(
        '[hub]\nbind = "127.0.0.1:0"\naccept = ["token", "token+certificate"]\nsecret_file = "secret"\n'
        'next_secret_file = "next"\ndeny_file = "deny"\n[hub.tls]\ncert_file = "hub.crt"\nkey_file = "hub.key"\n'
        f'client_ca_file = "ca.pem"\ncluster_san = "DNS:{{cluster}}.example"\n{_ADMIN}{_LOUD}'
    )
    return path


def _agent(files: Files, name: str, hub_port: int, credential: str, tls: str = _CLIENT, more: str = "") -> Path:
    path = files.folder / f"{name}.toml"
    (files.folder / f"{name}-capacity.toml").write_text(records({name: 1}))
    path.write_text(
        f'cluster_id = "{name}"\n[federation]\nhubs = ["127.0.0.1:{hub_port}"]\n{credential}\n{tls}'
        f'[[source]]\ntype = "fixtures"\npath = "{name}-capacity.toml"\n{more}{_ADMIN}{_LOUD}'
    )
    return path


def _shown_by_the_system(program: Program) -> str:
    """What every user of the machine may see of a process."""
    return Path(f"/proc/{program.process.pid}/cmdline").read_text(encoding="utf-8")


_PATHS = ("/", "/metrics", "/healthz", "/readyz", "/v1/capacity", "/v1/place?namespace=team-a&env=python", "/nothing")
#: what comes in the place of a good token: none, others, forms that no client library would send
_AUTHORIZATIONS: Sequence[bytes | None] = (
    None,
    f"Bearer {WRONG}".encode(),
    f"Bearer {HUBS}".encode(),
    f"Bearer {WEST}".encode(),
    f"Basic {base64.b64encode(b'admin:' + ADMIN.encode()).decode()}".encode(),
    f"{ADMIN}".encode(),
    f"Bearer {ADMIN}é".encode(),
    f"Bearer {ADMIN}\t".encode() + b"\xff\xfe",
)


async def _ask_everything(port: int, files: Files | None = None, token: str | None = None) -> str:
    """All that a process serves, with its token, with every wrong one and without; and what it says to those who ask
    wrongly. Encrypted where there are files."""
    answers: list[httpx.Response] = []
    verify: ssl.SSLContext | bool = ssl.create_default_context(cafile=files.folder / "ca.pem") if files else False
    base = f"{'https' if files else 'http'}://127.0.0.1:{port}"
    good = f"Bearer {token or WRONG}".encode()
    json = (b"content-type", b"application/json")
    # A server may end a connection after answering a body that it has not read, while the next request is on its way.
    once = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        trust_env=False, verify=verify, base_url=base, timeout=PATIENCE, limits=once
    ) as client:
        for path in _PATHS:
            answers.append(await client.get(path, headers=[(b"authorization", good)]))
        for value in _AUTHORIZATIONS:
            headers = [] if value is None else [(b"authorization", value)]
            answers.append(await client.get("/v1/capacity", headers=headers))
            answers.append(await client.post("/v1/place", content="{", headers=[*headers, json]))
        answers.append(await client.get("/v1/capacity", params={"token": WRONG, "namespace": MISPLACED_TOKEN}))
        for content in ('{"namespace": "team-a", "env": "python"}', f'{{"secret": "{WRONG}"}}', f'{{"env": "{WEST}'):
            answers.append(await client.post("/v1/place", content=content, headers=[(b"authorization", good), json]))
    assert files is None or token is None or answers[4].status_code in (200, 404), answers[4].text
    return "\n".join(f"{answer.status_code} {answer.headers}\n{answer.text}" for answer in answers)


def _ask_in_odd_bytes(port: int) -> str:
    """What a server over plain text answers to headers that break HTTP itself."""
    said = []
    for value in (
        f"Bearer {ADMIN}\0",
        f"Bearer {ADMIN}\x01\x7f",
        f"Bearer {ADMIN}\n folded {WRONG}",
        f"{WRONG}" * 5000,
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as plain:
            plain.sendall(f"GET /v1/capacity HTTP/1.1\r\nhost: localhost\r\nauthorization: {value}\r\n\r\n".encode())
            plain.shutdown(socket.SHUT_WR)
            said.append(_all_of(plain))
    return "\n".join(said)


def _all_of(stream: socket.socket) -> str:
    """What comes until the other side ends it, or resets it because it has not read everything."""
    data = b""
    stream.settimeout(PATIENCE)
    try:
        while chunk := stream.recv(65536):
            data += chunk
    except ConnectionError:
        pass
    return data.decode("latin-1")


def _call_in_odd_bytes(port: int) -> str:
    """What a hub over plain text says to a call whose credential is no text of HTTP/2."""
    said = []
    for value in (f"Bearer {HUBS}é", f"Bearer {HUBS} \t", f"Bearer {HUBS}\r\nx: {WRONG}", f"Bearer {WEST}\0"):
        quiet = h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        connection = h2.connection.H2Connection(quiet)
        connection.initiate_connection()
        head = [(":method", "POST"), (":scheme", "http"), (":path", _WATCH), (":authority", "hub"), ("te", "trailers")]
        named = [("x-federation-cluster", "west"), ("authorization", value), ("authorization-bin", value)]
        connection.send_headers(1, [*head, ("content-type", "application/grpc"), *named])
        connection.send_data(1, b"\0\0\0\0\0", end_stream=True)
        connection.close_connection()
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as plain:
            plain.sendall(connection.data_to_send())
            plain.shutdown(socket.SHUT_WR)
            said.append(_all_of(plain))
    return "\n".join(said)


_WATCH = "/sandbox.sync.v1.FederationService/WatchFederation"


def _told_by_the_hub(
    port: int,
    credentials: grpc.ChannelCredentials | None,
    calls: Sequence[tuple[str, str]],
    let_in: Sequence[tuple[str, str]] = (),
) -> str:
    """What gRPC's own implementation is told by a hub, for each (cluster, credential): status, text and metadata of a
    call that is refused, and what comes at first to one that is let in."""
    told = []
    for cluster, credential in (*calls, *let_in):
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = (
            grpc.insecure_channel(f"127.0.0.1:{port}", options)
            if credentials is None
            else grpc.secure_channel(f"127.0.0.1:{port}", credentials, options)
        )
        with channel:
            call = channel.unary_stream(_WATCH)(
                b"", metadata=[("x-federation-cluster", cluster), ("authorization", credential)], timeout=PATIENCE
            )
            told.append(f"{call.initial_metadata()}")
            if (cluster, credential) in let_in:
                call.cancel()
                continue
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            told.append(f"{call.code()} {call.details()} {call.trailing_metadata()} {caught.value}")
            told.append(call.debug_error_string())
    return "\n".join(told)


#: (cluster, credential) of calls that neither hub lets in
_REFUSED = [
    *(("west", f"Bearer {each}") for each in (EAST, DENIED, FORGED, WRONG, WEST[:-1], WEST[:-40], WEST.upper())),
    ("west", f"Bearer {WEST}x"),
    ("west", f"Bearer {NEXT}"),
    ("west", WEST),
    ("west", f"Basic {HUBS}"),
    ("denied", f"Bearer {DENIED}"),
    (WEST, f"Bearer {WEST}"),
]
_BY_TOKEN = [("west", f"Bearer {WEST}"), ("west", f"Bearer {NEWER}"), ("east", f"bearer {EAST}")]
_BY_SECRET = [("west", f"Bearer {HUBS}")]


async def _asked(nursery: trio.Nursery, *arguments: str | Path, **variables: str) -> Program:
    """A command that asks an agent, and has ended."""
    program = await start(nursery, "--verbose", *arguments, **variables)
    await program.ended()
    return program


#: By round, what each file is replaced by: the name of what is read from it, and the bad contents.
_ROUNDS: Sequence[Mapping[str, str | bytes]] = (
    {
        "secret": HUBS.encode() + b"\xff\xfe",
        "next": NEXT * 300,
        "token": f"{ADMIN}\n{WRONG}\n",
        "deny": f"denied.2\n{PASTED}\nwest {HUBS}\n",
        "west": b"",
        "hub.key": f"-----BEGIN PRIVATE KEY-----\n{HUBS}\n-----END PRIVATE KEY-----\n",
        "agent.key": "",  # the encrypted one, which is made anew for each test
        "admin.key": WRONG,
    },
    {
        "secret": f"{HUBS}\n{WRONG}\n",
        "next": NEXT.encode("utf-16"),
        "token": ADMIN[:15],
        "deny": b"denied.2\n" + PASTED.encode() + b"\xff",
        "west": WEST[:-7],
        "hub.key": "",
        "agent.key": WEST,
        "admin.key": "",
    },
)


@pytest.mark.slow
async def test_no_secret_appears_where_tokens_and_certificates_count(
    nursery: trio.Nursery, tmp_path: Path, authority: trustme.CA
) -> None:
    """A hub with everything that can be configured, a good agent and bad ones, gRPC's own client with every wrong
    credential, all at level debug; what they serve over TLS to those who have the token and those who have not; then
    every file of theirs is replaced by something bad, twice."""
    files = Files(tmp_path, authority)
    install(tmp_path, keyed=_FAILING)
    hub = await (await start(nursery, "run", _tokens_hub(files))).started()
    own = f'[[source]]\ntype = "keyed"\npassword = "{IN_OPTIONS}"\n'
    port = hub.hub_port
    configs = {
        "west": _agent(files, "west", port, 'secret_file = "west"', more=own),
        "forged": _agent(files, "forged", port, f'secret = "{FORGED}"'),
        "denied": _agent(files, "denied", port, f'secret = "{DENIED}"'),
        "master": _agent(files, "master", port, ""),
        "lost": _agent(files, "lost", port, f'secret = "{WRONG}"', '[federation.tls]\nca_file = "elsewhere.pem"\n'),
    }
    agents = {}
    for name, config in configs.items():
        variables = {"TRIO_FEDERATION_SECRET": HUBS} if name == "master" else {}
        agents[name] = await start(nursery, "run", config, PYTHONPATH=str(tmp_path), **variables)
    for each in agents.values():
        await each.started()
    west = agents["west"]
    await west.event("hub_works", call="watch")
    await west.event("source_failed")
    for name in ("forged", "denied", "master", "lost"):
        await agents[name].event("hub_failed")
    await hub.event("credential_mixed_up")
    await hub.event("handshake_failed")

    client = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    told = await trio.to_thread.run_sync(_told_by_the_hub, port, client, _REFUSED + _BY_SECRET, _BY_TOKEN)
    assert "UNAUTHENTICATED" in told
    assert "PERMISSION_DENIED" in told
    files.search.assert_silent(told, "gRPC")

    programs = [hub, *agents.values()]
    for each in programs:
        files.search.assert_silent(_shown_by_the_system(each), f"{each.name}: arguments")
    for each in (hub, west):
        files.search.assert_silent(await _ask_everything(each.admin_port, files, ADMIN), f"{each.name}: HTTPS")
        files.search.assert_silent(await _ask_everything(each.metrics_port), f"{each.name}: metrics")
    files.write(other=WRONG)
    url: list[str | Path] = ["--url", f"https://127.0.0.1:{west.admin_port}", "--ca-file", tmp_path / "ca.pem"]
    codes = {}
    questions: dict[str, list[str | Path]] = {
        "status": ["status", *url, "--token-file", tmp_path / "token"],
        "place": ["place", "team-a", "python", *url, "--token-file", tmp_path / "token"],
        "wrong": ["status", *url, "--token-file", tmp_path / "other"],
        "plain": ["status", "--url", f"http://127.0.0.1:{west.admin_port}", "--token-file", tmp_path / "token"],
    }
    for name, arguments in questions.items():
        asked = await _asked(nursery, *arguments)
        codes[name] = asked.process.returncode
        programs.append(asked)
    assert codes == {"status": 0, "place": 0, "wrong": 1, "plain": 1}

    for number, contents in enumerate(_ROUNDS, start=1):
        files.write(
            **{name: content or files.encrypted for name, content in contents.items()} | {"west": contents["west"]}
        )
        for what in ("hub.secrets", "admin.token_file", "hub.tls", "admin.tls"):
            await hub.event("reload_failed", number=number, what=what)
        for what in ("federation.secret_file", "federation.tls", "admin.tls"):
            await west.event("reload_failed", number=number, what=what)
    await hub.event("deny_line_ignored", number=2)
    # What each had goes on.
    said = await _ask_everything(west.metrics_port)
    assert '"state":"connected"' in said
    files.search.assert_silent(said, "metrics, with bad files")
    files.search.assert_silent(await _ask_everything(hub.admin_port, files, ADMIN), "HTTPS, with bad files")

    hub.process.kill()
    await west.event("hub_failed", call="connection")
    for each in agents.values():
        assert await each.stop() == 0
    for each in programs:
        said = each.output + "\n".join(each.lines)
        assert len(said) > 50
        files.search.assert_silent(said, each.name)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["console", "json"])
async def test_no_secret_appears_where_the_secret_is_shared(form: str, nursery: trio.Nursery, tmp_path: Path) -> None:
    """Over plain text, a hub and an agent in one process, whose log a person reads, or a machine; another agent has a
    token, another a wrong secret. What breaks HTTP and HTTP/2 in a credential comes here, too."""
    search = Search()
    port, admin, metrics = free_port(), free_port(), free_port()
    both = agent_file(tmp_path / "both.toml", "west", {"west": 1}, hub_port=port, secret=None)
    text = both.read_text().replace("[federation]\n", f'[federation]\nsecret = "{IN_A_FILE}"\n', 1)
    text = text.partition("[metrics]")[0] + (
        f'[metrics]\nbind = "127.0.0.1:{metrics}"\n[admin]\nbind = "127.0.0.1:{admin}"\ntoken = "{ADMIN}"\n'
        f'[hub]\nbind = "127.0.0.1:{port}"\nsecret = "{HUBS}"\n[log]\nlevel = "debug"\nformat = "{form}"\n'
    )
    both.write_text(text)
    process = await start(
        nursery, "run", both, **({"TRIO_FEDERATION_SECRET": FROM_ENVIRONMENT} if form == "json" else {})
    )
    await process.until(lambda: any("started" in line and "admin_port" in line for line in process.lines))
    others = {}
    for name, secret in {"token": make_token(HUBS, "token"), "wrong": WRONG}.items():
        others[name] = await start(
            nursery,
            "run",
            agent_file(tmp_path / f"{name}.toml", name, {name: 1}, hub_port=port, secret=secret),
        )
        await others[name].event("hub_failed", call="watch")
    if form == "console":
        await process.until(lambda: any("hub_works" in line for line in process.lines))
    await process.until(lambda: any("credential_mixed_up" in line for line in process.lines))
    refused = [*_REFUSED, *_BY_TOKEN, (WEST, f"Bearer {HUBS}")]
    for ask in (
        partial(_told_by_the_hub, port, None, refused, _BY_SECRET),
        partial(_ask_in_odd_bytes, admin),
        partial(_ask_in_odd_bytes, metrics),
        partial(_call_in_odd_bytes, port),
    ):
        said = await trio.to_thread.run_sync(ask)
        assert len(said) > 50
        assert ask.func is not _ask_in_odd_bytes or said.startswith("HTTP/1.1 400")
        search.assert_silent(said, ask.func.__name__)
    search.assert_silent(await _ask_everything(admin, token=ADMIN), "HTTP")
    search.assert_silent(await _ask_everything(metrics), "HTTP")
    for each in (process, *others.values()):
        search.assert_silent(_shown_by_the_system(each), f"{each.name}: arguments")
        assert await each.stop() == 0
        said = each.output + "\n".join(each.lines)
        assert len(said) > 100
        search.assert_silent(said, each.name)


# --- crashes ---------------------------------------------------------------------------------------------------------

#: Put into a process as it begins: what compares and makes credentials raises what nobody expects, from a frame that
#: has the secret in a variable, with the secret in the frames around it.
_CRASHING = """
import hmac

def broken(one, other, *rest):
    held = (one, other)
    raise RuntimeError("nobody expects this")

hmac.compare_digest = broken
"""

_CRASHING_MAC = """
import hmac

def broken(key, message, *rest):
    held = (key, message)
    raise RuntimeError("nobody expects this")

hmac.new = broken
"""

_CRASHING_AGENT = """
import trio_federation.identity

def broken(cluster_id, instance, credential, uid=None):
    held = credential
    raise RuntimeError("nobody expects this")

trio_federation.identity.call_metadata = broken
"""


def _breaks(folder: Path, code: str) -> dict[str, str]:
    """The environment of a process that is broken by this."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [True, False], ids=["verbose", "quiet"])
async def test_no_traceback_shows_a_secret(verbose: bool, nursery: trio.Nursery, tmp_path: Path) -> None:
    """Of an agent, which ends with it; of a hub and an admin interface, which log it and go on; of a command."""
    search = Search()
    option = ["--verbose"] if verbose else []
    hub_toml = hub_file(tmp_path / "hub.toml", secret=HUBS)
    hub_toml.write_text(hub_toml.read_text().replace("[admin]\n", f'[admin]\ntoken = "{ADMIN}"\n'))
    hub = await start(nursery, *option, "run", hub_toml, **_breaks(tmp_path / "hub", _CRASHING))
    await hub.started()
    told = await trio.to_thread.run_sync(_told_by_the_hub, hub.hub_port, None, [("west", f"Bearer {HUBS}")])
    assert "UNKNOWN" in told or "INTERNAL" in told
    search.assert_silent(told, "gRPC")
    search.assert_silent(await _ask_everything(hub.admin_port, token=ADMIN), "HTTP")
    (tmp_path / "secret").write_text(HUBS)
    agent = agent_file(tmp_path / "west.toml", "west", {"west": 1}, hub_port=hub.hub_port, secret=HUBS)
    broken = {
        "agent": await start(nursery, *option, "run", agent, **_breaks(tmp_path / "agent", _CRASHING_AGENT)),
        "token": await start(
            nursery,
            *option,
            "token",
            "west",
            "--secret-file",
            tmp_path / "secret",
            **_breaks(tmp_path / "mac", _CRASHING_MAC),
        ),
    }
    for name, each in broken.items():
        assert await each.ended() == 1, name
        assert each.output == ""
    assert await hub.stop() == 0
    for each in (hub, *broken.values()):
        said = "\n".join(each.lines)
        assert "Traceback" in said
        assert "nobody expects this" in said
        search.assert_silent(said, each.name)


# --- commands --------------------------------------------------------------------------------------------------------


def _configurations(folder: Path) -> list[tuple[str, dict[str, str]]]:
    """Files that are no good, with a secret in the wrong place, of the wrong type, with characters that no header can
    carry, beside another one; and the environment of each."""
    agent = 'cluster_id = "west"\n'
    hub = '[hub]\nbind = "127.0.0.1:0"\n'
    pair = f'cert_file = "{folder}/hub.crt"\nkey_file = "{folder}'
    texts = [
        f'{agent}secret = "{MISPLACED}"\n',
        f'{agent}[federation]\nsecret = ["{MISPLACED}"]\n',
        f'{agent}[federation]\nsecret = {{ text = "{MISPLACED}" }}\n',
        f'{agent}[federation]\nsecret = "{MISPLACED}\\u00e9"\n',
        f'{agent}[federation]\nsecret = "{MISPLACED}"\nsecret_file = "{folder}/two"\n',
        f'{agent}[federation]\nsecret = "{MISPLACED}\n',
        f'{agent}[federation]\nsecret = "{EAST}"\n',
        f'{agent}[federation]\nsecret = "{WEST[:-3]}"\n',
        f'{agent}[federation]\ntoken = "{WEST}"\n',
        f'{agent}[[source]]\ntype = "fixtures"\npath = 7\ntoken = "{IN_OPTIONS}"\n',
        f'{agent}[[source]]\ntype = "fixtures"\npath = "x"\nshape = "{IN_OPTIONS}"\n',
        f'{agent}[[source]]\ntype = "kubernetes"\nkubeconfig = ["{IN_OPTIONS}"]\nwatch = "{IN_OPTIONS}"\n',
        f'{hub}secret = "{HUBS}"\nsecrets = "{MISPLACED}"\n',
        f'{hub}secret = "{WEST}"\n',
        f'{hub}secret = "{HUBS}"\nnext_secret = "{NEXT}"\n',
        f'{hub}secret_file = "{folder}/two"\n',
        f'{hub}secret_file = "{folder}/binary"\n',
        f'{hub}secret_file = "{folder}/long"\n',
        f'{hub}secret_file = "{folder}/empty"\n',
        f'{hub}secret_file = "{folder}/token"\n',
        f'{hub}secret = "{HUBS}"\nnext_secret_file = "{folder}/two"\n',
        f'{hub}secret = "{HUBS}"\ndeny_file = "{folder}/pasted"\n',
        f'{hub}secret = "{HUBS}"\ndeny_file = "{folder}/binary"\n',
        f'{hub}secret = "{HUBS}"\n[admin]\ntoken_file = "{folder}/two"\n',
        f'{hub}secret = "{HUBS}"\n[admin]\ntoken = "{ADMIN[6:20]}"\n',
        f'{hub}secret = "{HUBS}"\n[admin]\nbind = "0.0.0.0:1"\ntoken = "{ADMIN}"\n',
        f'{hub}secret = "{HUBS}"\n[hub.tls]\n{pair}/encrypted.key"\n',
        f'{hub}secret = "{HUBS}"\n[hub.tls]\n{pair}/two"\n',
        f'{hub}secret = "{HUBS}"\n[hub.tls]\n{pair}/another.key"\n',
        f'{hub}secret = "{HUBS}"\n[hub.tls]\n{pair}/binary"\n',
        f'{hub}secret = "{HUBS}"\n[admin.tls]\n{pair}/encrypted.key"\n',
        f'{agent}[federation]\nsecret = "{WEST}"\n[federation.tls]\n{pair}/encrypted.key"\n',
        f'cluster_id = "{MISPLACED_TOKEN}"\n',
        f'{hub}secret_file = "{MISPLACED_TOKEN}"\n',
        f'{hub}secret = "{HUBS}"\naccept = ["{MISPLACED_TOKEN}"]\n',
        f'{agent}[federation]\nsecret_file = "{folder}/two"\n',
    ]
    # What the environment gives wins, and then an agent's own is not even looked at.
    by_environment = {"TRIO_FEDERATION_SECRET": FROM_ENVIRONMENT}
    cases = [(text, {} if "tf1." in text or text.endswith('two"\n') else by_environment) for text in texts]
    wrong = ({"TRIO_FEDERATION_SECRET": f"{FROM_ENVIRONMENT}\n"}, {"TRIO_FEDERATION_SECRET": EAST})
    return cases + [(f"{agent}[federation]\n", each) for each in (*wrong, {"LOCAL_CLUSTER_ID": MISPLACED_TOKEN})]


@pytest.fixture
def bad_files(tmp_path: Path, authority: trustme.CA) -> Files:
    """Files with a secret in them, and something wrong with each."""
    files = Files(tmp_path, authority)
    files.write(
        two=f"{HUBS}\n{WRONG}",
        binary=HUBS.encode() + b"\xff",
        long=HUBS * 300,
        empty="",
        token=PASTED,
        pasted=f"denied.2\n{PASTED}\n{HUBS}\n",
        **{"encrypted.key": files.encrypted, "another.key": files.keys["another"]},
    )
    return files


class Ran:
    """A command that was run in this process: its exit code, and all that it has said."""

    def __init__(self, code: int, output: str, errors: str) -> None:
        self.code = code
        self.output = output
        self.errors = errors


def _run_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path, **variables: str
) -> Ran:
    """Run a command as its entry point does, without a process of its own, which would take a hundred times as long."""
    for name in UNWANTED:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["trio-federation", *map(str, arguments)])
    capfd.readouterr()
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()  # as the interpreter does
        code = 1
    output, errors = capfd.readouterr()
    return Ran(code, output, errors)


@pytest.mark.slow
def test_no_fault_of_a_configuration_shows_a_secret(
    bad_files: Files, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fault is told, with a traceback for those who want one, and no value. Without the traceback it is a part of
    the same, so that a few are enough."""
    # In this folder, and by a short name, so that nothing is cut off before the end of what it quotes.
    monkeypatch.chdir(bad_files.folder)
    for number, (text, variables) in enumerate(_configurations(bad_files.folder)):
        Path("c.toml").write_text(text, encoding="utf-8")
        for option in (["--verbose"], []) if number < 3 else (["--verbose"],):
            ran = _run_here(capfd, monkeypatch, *option, "check", "c.toml", **variables)
            assert ran.code == 2, (text, ran.output, ran.errors)
            assert ("Traceback" in ran.errors) is bool(option)
            bad_files.search.assert_silent(ran.output + ran.errors, text)


@pytest.mark.slow
async def test_no_process_that_cannot_start_shows_a_secret(nursery: trio.Nursery, bad_files: Files) -> None:
    """The same where it is the process itself that reads the files, one of each kind."""
    cases = [each for each in _configurations(bad_files.folder) if "misplaced" in each[0] or "encrypted" in each[0]]
    cases = [*cases[:1], *cases[-1:], *_configurations(bad_files.folder)[-2:]]
    running = []
    for number, (text, variables) in enumerate(cases):
        path = bad_files.folder / f"{number}.toml"
        path.write_text(text)
        running.append(await start(nursery, "--verbose", "run", path, **variables))
    for program, (text, _) in zip(running, cases, strict=True):
        assert await program.ended() == 2, text
        said = program.output + "\n".join(program.lines)
        assert len(said) > 100
        bad_files.search.assert_silent(said, text)


def test_a_good_configuration_is_shown_without_its_secrets(
    tmp_path: Path, authority: trustme.CA, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path, authority)
    own = f'[[source]]\ntype = "keyed"\npassword = "{IN_OPTIONS}"\n'
    inline = hub_file(tmp_path / "inline.toml", secret=HUBS)
    inline.write_text(inline.read_text().replace("[admin]\n", f'[admin]\ntoken = "{ADMIN}"\n'))
    for path in (
        _tokens_hub(files),
        _agent(files, "west", 1, 'secret_file = "west"'),
        _agent(files, "west", 1, f'secret = "{WEST}"'),
        inline,
    ):
        ran = _run_here(capfd, monkeypatch, "--verbose", "check", path)
        assert ran.code == 0, ran.errors
        assert "not shown" in ran.output or "secret_file" in ran.output
        files.search.assert_silent(ran.output + ran.errors, path.read_text())
    # A plugin's options are its own, and may be anything.
    path = _agent(files, "west", 1, 'secret_file = "west"', more=own)
    ran = _run_here(capfd, monkeypatch, "--verbose", "check", path)
    assert ran.code == 2
    files.search.assert_silent(ran.output + ran.errors, "an option")


def test_commands_with_a_bad_token_file_do_not_show_it(
    bad_files: Files, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bad_files.folder)
    url = f"http://127.0.0.1:{free_port()}"
    bad_files.write(good=ADMIN)
    commands = [["status"], ["place", "team-a", "python"]]
    for command in commands:
        for name in ("two", "binary", "long", "empty", "encrypted.key", "nothing", "good"):
            ran = _run_here(capfd, monkeypatch, "--verbose", *command, "--url", url, "--token-file", name)
            assert ran.code == (1 if name == "good" else 2), ran.errors
            assert len(ran.errors) > 50
            bad_files.search.assert_silent(ran.output + ran.errors, f"{command} {name}")
    for address in (
        f"http://admin:{ADMIN}@agent.example",
        f"http://agent.example/?token={ADMIN}",
        f"http://u:{ADMIN}@[",
    ):
        ran = _run_here(capfd, monkeypatch, "--verbose", "status", "--url", address)
        assert ran.code == 2
        if not address.endswith("["):  # what is no address at all is repeated
            bad_files.search.assert_silent(ran.output + ran.errors, "an address with a secret in it")


def test_the_token_is_printed_once_and_nothing_else_is(
    bad_files: Files, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one place where a token may appear is the output of the command that makes it; the secret that it is made
    from appears there no more than elsewhere. Where anything is wrong, there is no output."""
    monkeypatch.chdir(bad_files.folder)
    ran = _run_here(capfd, monkeypatch, "--verbose", "token", "west", "--secret-file", "secret", "--serial", "3")
    assert (ran.code, ran.output) == (0, f"{WEST}\n")
    assert ran.errors.startswith("note: the secret is shorter than 32 characters")
    bad_files.search.assert_silent(ran.errors, "the note")
    assert [name for name, _ in bad_files.search.found(ran.output)] == [WEST[:14]] * 2
    for verbose in ([], ["--verbose"]):
        for cluster, name, serial in (
            *(("west", name, "1") for name in ("two", "binary", "long", "empty", "token", "hub.key", "nothing")),
            *(("west", "secret", serial) for serial in ("0", "-1", "x", WEST, str(2**31))),
            *((cluster, "secret", "1") for cluster in (WEST, "West", "", f"{WEST}.x", "a" * 64)),
        ):
            ran = _run_here(
                capfd, monkeypatch, *verbose, "token", "--secret-file", name, "--serial", serial, "--", cluster
            )
            assert ran.code == 2, (cluster, name, serial, ran.output, ran.errors)
            assert ran.output == ""
            assert ran.errors != ""
            bad_files.search.assert_silent(ran.errors, f"{cluster} {name} {serial}")


@pytest.mark.slow
def test_plugins_and_completion_show_no_secret_of_the_environment() -> None:
    """They read no configuration; what the environment holds is none of their business."""
    search = Search()
    environment = {"TRIO_FEDERATION_SECRET": FROM_ENVIRONMENT, "LOCAL_CLUSTER_ID": "west", "PATH": "/usr/bin:/bin"}
    for arguments in (["--verbose", "plugins"], ["--verbose", "plugins", "--json"], ["run", "--nothing"]):
        ran = subprocess.run([COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert len(ran.stdout + ran.stderr) > 50
        search.assert_silent(ran.stdout + ran.stderr, str(arguments))


def test_the_command_is_the_installed_one() -> None:
    """Not some other one of this name."""
    assert COMMAND.is_file()

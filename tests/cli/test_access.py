"""The token and the certificate of an agent, from the command line: asked of a real admin interface over TLS, and of
servers that would like to have the token. It is shown nowhere."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click
import pytest
import structlog.testing
import trio
import trustme
from hypothesis import given
from hypothesis import strategies as st
from structlog.typing import EventDict

from tests.cli.conftest import Call, Ended
from tests.cli.pretending import PretendAgent, Reply, capacity, pretend_agent, readiness
from trio_federation.admin import Answers, admin_app, admin_tls, serve_http
from trio_federation.capacity import Capacity
from trio_federation.cli.client import Access, Question, TokenFile, ask
from trio_federation.config import LARGEST_SECRET, Secret
from trio_federation.errors import FederationError
from trio_federation.registry import Registry
from trio_federation.router import Router

#: in every token here, and in no form is it written otherwise
SIGN = "s3cret"
TOKEN = f"{SIGN}: words, 'quotes' and a \\"
PATIENCE = 30.0


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment of a test run says about proxies is not what is tested."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    """What the servers log, which run in this process."""
    with structlog.testing.capture_logs() as lines:
        yield lines
    assert SIGN not in repr(lines)
    assert {line["log_level"] for line in lines} <= {"debug"}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


@dataclass
class Admin:
    """An agent's admin interface over TLS."""

    port: int
    ca_file: Path
    #: the one that counts
    token: str

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"


@pytest.fixture
async def admin(nursery: trio.Nursery, tmp_path: Path) -> Admin:
    registry = Registry("west", ttl=30.0, clock=lambda: 100.0)
    registry.upsert([Capacity("east", "agents", "python", "large", idle=3, observed_at=100.0)])

    async def exposition() -> AsyncIterator[bytes]:
        yield b""

    answers = Answers(
        exposition=exposition,
        readiness=readiness,
        registry=registry,
        place=Router(registry).place,
    )
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    made = Admin(0, tmp_path / "ca.pem", TOKEN)
    authority.cert_pem.write_to_path(made.ca_file)
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "tls.pem")
    context = admin_tls(str(tmp_path / "tls.pem"), str(tmp_path / "tls.pem"))
    app = admin_app(answers, host="localhost", token=lambda: made.token)
    made.port = await nursery.start(partial(serve_http, app, "127.0.0.1", 0, section="admin", tls=lambda: context))
    return made


@pytest.fixture
def agent() -> Iterator[PretendAgent]:
    with pretend_agent() as agent:
        agent.replies = {"/readyz": Reply(readiness()), "/v1/capacity": Reply(capacity())}
        yield agent


async def called(call: Call, *arguments: str | Path) -> Ended:
    """In a thread, so that the server can answer. What it said holds no token."""
    with trio.fail_after(PATIENCE):
        ended = await trio.to_thread.run_sync(partial(call, *arguments))
    assert SIGN not in ended.output + "\n".join(ended.lines)
    return ended


COMMANDS = (("status",), ("place", "agents", "python"))


@pytest.mark.parametrize("command", COMMANDS)
async def test_an_agent_over_tls_with_its_token(
    command: tuple[str, ...], admin: Admin, token_file: Path, call: Call
) -> None:
    access = ("--url", admin.url, "--ca-file", admin.ca_file, "--token-file", token_file)
    ended = await called(call, *command, *access)
    assert (ended.code, ended.lines) == (0, [])
    assert "large" in ended.output
    as_json = await called(call, *command, *access, "--json")
    assert (as_json.code, as_json.lines) == (0, [])
    assert isinstance(json.loads(as_json.output), dict)


@pytest.mark.parametrize("command, path", list(zip(COMMANDS, ("/v1/capacity", "/v1/place"), strict=True)))
async def test_without_it_or_with_another_one_line_says_what_to_do(
    command: tuple[str, ...], path: str, admin: Admin, token_file: Path, call: Call
) -> None:
    access = ("--url", admin.url, "--ca-file", admin.ca_file)
    where = f"{admin.url}{path}"
    ended = await called(call, *command, *access)
    asks = f"{where}: the agent asks for its token; name the file that holds it with --token-file FILE"
    assert ended == (1, "", [asks])
    admin.token = "rotated-in-the-meantime"
    ended = await called(call, *command, *access, "--token-file", token_file)
    wrong = f"{where}: the token of --token-file is not the agent's; it is that of [admin] in its configuration"
    assert ended == (1, "", [wrong])
    await trio.Path(token_file).write_text("rotated-in-the-meantime")
    assert (await called(call, *command, *access, "--token-file", token_file)).code == 0


async def test_a_certificate_of_nobody_we_trust(admin: Admin, token_file: Path, call: Call, tmp_path: Path) -> None:
    advice = "--ca-file FILE names the authority that the agent's certificate is from"
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    for more in ((), ("--ca-file", other)):
        ended = await called(call, "status", "--url", admin.url, "--token-file", token_file, *more)
        assert (ended.code, ended.output, len(ended.lines)) == (1, "", 1)
        assert ended.lines[0].startswith(f"{admin.url}: its certificate is not accepted: ")
        assert ended.lines[0].endswith(f"; {advice}")


async def test_a_certificate_of_another_host(admin: Admin, token_file: Path, call: Call) -> None:
    url = admin.url.replace("localhost", "127.0.0.1")
    access = ("--token-file", token_file, "--ca-file", admin.ca_file)
    ended = await called(call, "status", "--url", url, *access)
    assert (ended.code, ended.output, len(ended.lines)) == (1, "", 1)
    assert ended.lines[0].startswith(f"{url}: its certificate is not accepted: IP address mismatch")
    assert ended.lines[0].endswith("; write --url with a name or an address that it is for")


async def test_a_certificate_of_another_time(
    nursery: trio.Nursery, admin: Admin, tmp_path: Path, token_file: Path, call: Call
) -> None:
    authority = trustme.CA()
    old = datetime(2020, 1, 1, tzinfo=UTC)
    issued = authority.issue_cert("localhost", not_before=datetime(2019, 1, 1, tzinfo=UTC), not_after=old)
    file, ca_file = tmp_path / "old.pem", tmp_path / "old-ca.pem"
    issued.private_key_and_cert_chain_pem.write_to_path(file)
    authority.cert_pem.write_to_path(ca_file)
    context = admin_tls(str(file), str(file))

    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("nobody gets as far as to ask")

    start = partial(serve_http, app, "127.0.0.1", 0, section="admin", tls=lambda: context)
    url = f"https://localhost:{await nursery.start(start)}"
    ended = await called(call, "status", "--url", url, "--token-file", token_file, "--ca-file", ca_file)
    assert (ended.code, ended.output) == (1, "")
    problem = "its certificate is not accepted: certificate has expired"
    assert ended.lines == [
        f"{url}: {problem}; renew [admin.tls] cert_file of the agent, or set the clock of this machine"
    ]


async def test_plain_http_to_an_agent_with_tls(admin: Admin, call: Call) -> None:
    url = admin.url.replace("https:", "http:")
    ended = await called(call, "status", "--url", url)
    assert (ended.code, ended.output, len(ended.lines)) == (1, "", 1)
    assert ended.lines[0].endswith("; write https://… where it has [admin.tls]")


# Where the token goes.


def test_the_token_is_sent_as_it_stands_in_the_file(agent: PretendAgent, token_file: Path, call: Call) -> None:
    """To loopback, where nobody else listens in."""
    for host in ("127.0.0.1", "localhost"):
        url = agent.url.replace("127.0.0.1", host)
        assert call("status", "--url", url, "--token-file", token_file).code == 0
    assert [headers["authorization"] for headers in agent.headers] == [f"Bearer {TOKEN}"] * 4


def test_without_a_token_none_is_sent(agent: PretendAgent, call: Call) -> None:
    assert call("status", "--url", agent.url).code == 0
    assert [headers for headers in agent.headers if "authorization" in headers] == []


@pytest.mark.parametrize(
    "host", ["192.0.2.7", "west.example", "[2001:db8::1]", "127.0.0.1.example", "localhost.example"]
)
@pytest.mark.parametrize("scheme", ["http", "HTTP"])
def test_it_is_never_sent_where_others_can_read_it(
    scheme: str, host: str, agent: PretendAgent, token_file: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor to a proxy that would pass it on."""
    monkeypatch.setenv("HTTP_PROXY", agent.url)
    url = f"{scheme}://{host}:9465"
    ended = call("status", "--url", url, "--token-file", token_file)
    assert (ended.code, ended.output, agent.asked) == (2, "", [])
    why = "--token-file is not used over plain HTTP, where others can read the token"
    assert ended.lines == [f"Error: {url}: {why}; write https://…, which needs [admin.tls] at the agent"]


def test_it_is_not_sent_on_to_where_an_answer_points(agent: PretendAgent, token_file: Path, call: Call) -> None:
    with pretend_agent() as other:
        agent.replies["/readyz"] = Reply(b"", 307, {"Location": f"{other.url}/readyz"})
        assert call("status", "--url", agent.url, "--token-file", token_file).code == 1
        assert other.asked == []


def test_a_proxy_on_the_way_to_tls_sees_none_of_it(
    agent: PretendAgent, token_file: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for a tunnel, which it does not know of."""
    monkeypatch.setenv("HTTPS_PROXY", agent.url)
    ended = call("status", "--url", "https://west.example:9465", "--token-file", token_file)
    assert (ended.code, ended.output, len(ended.lines)) == (1, "", 1)
    assert SIGN not in repr(agent.headers) + ended.lines[0]


def test_another_401_is_not_the_agents(agent: PretendAgent) -> None:
    """That of a gateway, say, which wants something else."""
    agent.replies["/v1/place"] = Reply(b"<html>log in</html>", 401)
    with pytest.raises(FederationError, match="answers 401; no agent of this version answers here"):
        ask(agent.url, [Question("/v1/place")], PATIENCE)


# The files.


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"s3cret \n", "holds something that an HTTP header cannot carry"),
        (b"s3cret\nanother", "holds something that an HTTP header cannot carry"),
        ("s3cret größe".encode(), "holds something that an HTTP header cannot carry"),
        (b"s3cret\xff", "is not UTF-8"),
        (b"s3cret" * LARGEST_SECRET, f"holds more than {LARGEST_SECRET} characters"),
        (None, "No such file or directory"),
    ],
)
def test_a_token_file_that_holds_none(
    content: bytes | None, problem: str, agent: PretendAgent, call: Call, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    ended = call("status", "--url", agent.url, "--token-file", file)
    assert (ended.code, ended.output, agent.asked) == (2, "", [])
    line = ended.lines[-1]
    assert line.startswith("Error: Invalid value for '--token-file': ")
    assert repr(str(file))[:40] in line
    assert problem in line
    assert SIGN not in "\n".join(ended.lines)


@given(st.text(st.characters(codec="ascii", min_codepoint=0x20, max_codepoint=0x7E)))
def test_a_token_is_shown_by_nothing_that_holds_it(text: str) -> None:
    access = Access(Secret(SIGN + text))
    with pytest.raises(click.ClickException) as raised:
        ask("http://192.0.2.7", [Question("/readyz")], PATIENCE, access=access)
    assert SIGN not in repr(access) + str(access) + raised.value.message


def test_a_token_that_was_read_stays_so(token_file: Path) -> None:
    """click converts defaults and values that programs hand in, too."""
    read = TokenFile().convert(str(token_file), None, None)
    assert read == Secret(TOKEN)
    assert TokenFile().convert(read, None, None) is read


def test_an_authority_that_cannot_be_used(token_file: Path, call: Call, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    ended = call("status", "--url", "https://localhost:1", "--ca-file", gone)
    assert (ended.code, ended.output) == (2, "")
    shown = f"Error: Invalid value for --ca-file: '{gone}' cannot be read: no such file or directory"
    assert ended.lines[-1] == shown
    # The wrong one of two files, and it is not shown.
    ended = call("status", "--url", "https://localhost:1", "--ca-file", token_file)
    assert (ended.code, ended.output) == (2, "")
    assert ended.lines[-1] == f"Error: Invalid value for --ca-file: '{token_file}' holds no certificate as PEM"
    ended = call("status", "--url", "http://localhost:1", "--ca-file", gone)
    assert (ended.code, ended.output) == (2, "")
    said = "http://localhost:1: --ca-file is of no use over plain HTTP; write https://…, or leave it out"
    assert ended.lines == [f"Error: {said}"]


def test_there_is_no_way_to_verify_nothing(call: Call) -> None:
    for name in ("status", "place"):
        text = call(name, "--help").output
        assert "--token-file FILE" in text
        assert "--ca-file FILE" in text
        for word in ("insecure", "no-verify", "--token "):
            assert word not in text

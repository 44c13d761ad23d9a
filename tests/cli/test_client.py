"""Asking an agent: what comes back, and that nothing that answers instead of one can hold a command up or fool it."""

from __future__ import annotations

import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import click
import httpx
import msgspec
import pytest
import trustme

from tests.cli.pretending import PretendAgent, Reply, peer, pretend_agent
from trio_federation.cli import client
from trio_federation.cli.client import Address, Question, ask, read
from trio_federation.errors import FederationError

#: Seconds for answers that come.
PATIENCE = 30.0
#: Seconds to wait for answers that do not.
SOON = 0.3

WHERE = "[admin] bind in the agent's configuration says where it answers"


@pytest.fixture
def agent() -> Iterator[PretendAgent]:
    with pretend_agent() as agent:
        yield agent


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment of a test run says about proxies is not what is tested."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def refused(url: str, timeout: float = PATIENCE) -> str:
    """The line with which asking at `url` fails."""
    with pytest.raises(FederationError) as raised:
        ask(url, [Question("/v1/place")], timeout)
    line = str(raised.value)
    assert line.isprintable()
    assert line.startswith(url)
    return line.removeprefix(url)


# Answers.


def test_answers_come_in_the_order_of_the_questions(agent: PretendAgent) -> None:
    agent.replies = {"/a": Reply({"of": "a"}, 503), "/b": Reply({"of": "b"})}
    questions = [
        Question("/a", statuses=(200, 503)),
        Question("/b", {"x": "1 &/é", "y": ""}),
        Question("/a", statuses=(503,)),
    ]
    assert ask(agent.url, questions, PATIENCE) == [{"of": "a"}, {"of": "b"}, {"of": "a"}]
    assert agent.asked == ["/a", "/b?x=1+%26%2F%C3%A9&y=", "/a"]
    assert [headers["accept"] for headers in agent.headers] == ["application/json"] * 3
    assert [headers["accept-encoding"] for headers in agent.headers] == ["identity"] * 3


def test_an_address_may_have_a_path(agent: PretendAgent) -> None:
    agent.replies = {"/west/v1/place": Reply({})}
    assert ask(f"{agent.url}/west", [Question("/v1/place")], PATIENCE) == [{}]


def test_whatever_stands_in_the_strings_comes_unchanged(agent: PretendAgent) -> None:
    said = {"text": "é \u202e \x7f \x1b[31m 两", "number": 0.1, "large": 2**63 - 1, "nothing": None, "more": [True, {}]}
    agent.replies = {"/v1/place": Reply(said)}
    assert ask(agent.url, [Question("/v1/place")], PATIENCE) == [said]


class Shape(msgspec.Struct):
    number: int
    text: str = ""


def test_what_is_read_has_the_form_of_an_agents_answer() -> None:
    question = Question("/v1/place")
    assert read("http://a", question, {"number": 3, "unknown": 1}, Shape) == Shape(3)
    for answer in ({}, {"number": "3"}, {"number": True}, {"number": 3, "text": None}):
        with pytest.raises(FederationError) as raised:
            read("http://a", question, answer, Shape)
        said = r"http://a/v1/place: not the answer of an agent \(.+\); no agent of this version answers here; .*"
        assert re.fullmatch(said, str(raised.value))


# What is no answer.


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    line = refused(f"http://127.0.0.1:{port}")
    assert line == f": cannot be reached: connection refused; is the agent running? {WHERE}"


NO_AGENT = f"no agent of this version answers here; {WHERE}"


@pytest.mark.parametrize(
    "reply, line",
    [
        # other servers, and agents from before there was such a path
        (Reply(b"404 not found", 404), f"answers 404; {NO_AGENT}"),
        (Reply(b"<html>Bad Gateway</html>", 502), f"answers 502; {NO_AGENT}"),
        (Reply(b"ok"), f"answers no JSON object; {NO_AGENT}"),
        (Reply(b""), f"answers no JSON object; {NO_AGENT}"),
        (Reply([1, 2]), f"answers no JSON object; {NO_AGENT}"),
        (Reply(b'{"a": 1'), f"answers no JSON object; {NO_AGENT}"),
        (Reply(b'{"a": NaN}'), f"answers no JSON object; {NO_AGENT}"),
        (Reply(b'{"a": 1e999}'), f"answers no JSON object; {NO_AGENT}"),
        (Reply(b'{"a": "\xff"}'), f"answers no JSON object; {NO_AGENT}"),
        (Reply(b"[" * 100_000), f"answers no JSON object; {NO_AGENT}"),
        (Reply({"a": 1}, 503), f"answers 503; {NO_AGENT}"),
        # what an agent says itself
        (Reply({"error": "from another page"}, 403), "answers 403: from another page"),
        (Reply({"error": "not\nknown \x1b[31m"}, 404), rf"answers 404: not known \x1b[31m; {WHERE}"),
        (Reply({"error": {}}, 400), f"answers 400; {NO_AGENT}"),
        # elsewhere
        (
            Reply(b"", 302, {"Location": "/login?next=a"}),
            "sends elsewhere, to '/login?next=a', which is not followed; give the address of the agent itself",
        ),
        (Reply(b"", 304), f"answers 304; {NO_AGENT}"),
    ],
)
def test_others_answer(reply: Reply, line: str, agent: PretendAgent) -> None:
    agent.replies = {"/v1/place": reply}
    assert refused(agent.url) == f"/v1/place: {line}"


def test_what_breaks_a_rule_is_bad_usage(agent: PretendAgent) -> None:
    agent.replies = {"/v1/place": Reply({"error": "env\nis missing"}, 400)}
    with pytest.raises(click.ClickException) as raised:
        ask(agent.url, [Question("/v1/place")], PATIENCE)
    assert raised.value.message == f"{agent.url}/v1/place: answers 400: env is missing"


def test_a_redirect_is_never_followed(agent: PretendAgent) -> None:
    with pretend_agent() as other:
        other.replies = {"/v1/place": Reply({})}
        agent.replies = {"/v1/place": Reply(b"", 307, {"Location": f"{other.url}/v1/place"})}
        refused(agent.url)
        assert other.asked == []


def test_what_others_say_is_told_in_few_words(agent: PretendAgent) -> None:
    agent.replies = {"/v1/place": Reply({"error": "long " * 10_000}, 403)}
    assert len(refused(agent.url)) < 400


# Peers that hold on.

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"


def says(*parts: bytes) -> Callable[[socket.socket, threading.Event], None]:
    """A peer that sends these, a moment apart, and then nothing more; it does not hang up before the test is over."""

    def serve(connection: socket.socket, over: threading.Event) -> None:
        for part in parts:
            connection.sendall(part)
            if over.wait(0.05):
                return
        over.wait(PATIENCE)

    return serve


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([], id="nothing"),
        pytest.param([HEAD, b"\r\n"], id="no-body"),
        # Each of these is complete in the end, and no single read has to wait for long.
        pytest.param([bytes([byte]) for byte in HEAD + b"\r\n{}"], id="a-head-in-drops"),
        pytest.param([HEAD.replace(b"2\r", b"60\r"), b"\r\n{", *[b" "] * 58, b"}"], id="a-body-in-drops"),
    ],
)
def test_a_peer_that_takes_too_long(parts: list[bytes]) -> None:
    with peer(says(*parts)) as url:
        line = refused(url, SOON)
    assert line == f": no complete answer within 0.3 s; is the agent running? {WHERE}; --timeout waits longer"


def test_the_time_is_for_all_questions_together() -> None:
    """Each of them is answered soon enough by itself."""

    def serve(connection: socket.socket, over: threading.Event) -> None:
        while connection.recv(65536) and not over.wait(SOON / 2):
            connection.sendall(HEAD + b"\r\n{}")

    with peer(serve) as url:
        with pytest.raises(FederationError, match="no complete answer within"):
            ask(url, [Question("/v1/place")] * 20, SOON)
        assert ask(url, [Question("/v1/place")], PATIENCE) == [{}]


def test_an_answer_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LARGEST_ANSWER", 2**20)

    def serve(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n{")
        while not over.is_set():
            connection.sendall(b" " * 65536)

    with peer(serve) as url:
        line = refused(url)
    assert line == "/v1/place: the answer is larger than 1 MiB; `status` asks for less with --namespace and --env"


def test_what_is_just_small_enough_is_read(agent: PretendAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.replies = {"/v1/place": Reply({"a": "b" * 1000})}
    monkeypatch.setattr(client, "LARGEST_ANSWER", 1009)
    assert ask(agent.url, [Question("/v1/place")], PATIENCE) == [{"a": "b" * 1000}]
    monkeypatch.setattr(client, "LARGEST_ANSWER", 1008)
    refused(agent.url)


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", b""])
def test_a_peer_that_speaks_something_else_or_hangs_up(said: bytes) -> None:
    def serve(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(said)

    with peer(serve) as url:
        line = refused(url)
    assert re.fullmatch(rf": no HTTP answer, or a broken one: .+; is the agent running\? {re.escape(WHERE)}; .+", line)
    assert line.endswith("; write https://… where it has [admin.tls]")


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b""])
def test_a_peer_that_knows_no_tls(said: bytes) -> None:
    def serve(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(said)

    with peer(serve) as url:
        line = refused(url.replace("http:", "https:"))
    assert line == f": no TLS answers there; an agent speaks plain HTTP unless it has [admin.tls]: write {url}"


def test_an_agents_own_port_knows_no_tls(agent: PretendAgent) -> None:
    upper = agent.url.replace("http:", "HTTPS:")
    plain = f"{agent.url}/west"
    line = ": no TLS answers there; an agent speaks plain HTTP unless it has [admin.tls]: write "
    assert refused(f"{upper}/west") == line + plain


def test_a_certificate_that_is_not_trusted_is_another_matter() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    def serve(connection: socket.socket, over: threading.Event) -> None:
        connection.settimeout(PATIENCE)
        with context.wrap_socket(connection, server_side=True):
            pass

    with peer(serve) as url:
        line = refused(url.replace("http:", "https:"))
    assert re.fullmatch(r": its certificate is not accepted: .+; --ca-file FILE names the authority .+", line)


def test_a_fault_of_ours_is_not_taken_for_the_peers() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask("http://127.0.0.1:1", [Question("/v1/place")], PATIENCE, httpx.MockTransport(fail))


# Proxies.


def test_this_machine_is_never_asked_through_a_proxy(agent: PretendAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.replies = {"/v1/place": Reply({})}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert ask(agent.url, [Question("/v1/place")], PATIENCE) == [{}]
    assert ask(agent.url.replace("127.0.0.1", "localhost"), [Question("/v1/place")], PATIENCE) == [{}]


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("no_proxy", ["", "elsewhere.example,fd00::/8,10.0.0.0/8", "agent.example:1"])
def test_others_are(name: str, no_proxy: str, agent: PretendAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.replies = {"http://agent.example:9465/v1/place": Reply({"by": "proxy"})}
    monkeypatch.setenv(name, agent.url.removeprefix("http://"))
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert ask("http://agent.example:9465", [Question("/v1/place")], PATIENCE) == [{"by": "proxy"}]


@pytest.mark.parametrize("no_proxy", ["192.0.2.1", "192.0.2.1:9465", "fd00::/8, 192.0.2.0/24", "*"])
def test_but_for_those_that_are_exempt(no_proxy: str, agent: PretendAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has this address, which is for documentation."""
    monkeypatch.setenv("HTTP_PROXY", agent.url)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    refused("http://192.0.2.1:9465", SOON)
    assert agent.asked == []


@pytest.mark.parametrize("proxy", ["gopher://127.0.0.1:1", "http://127.0.0.1:port", "socks5://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(FederationError) as raised:
        ask("http://agent.example:9465", [Question("/v1/place")], PATIENCE)
    assert str(raised.value).startswith("the environment's proxy cannot be used: ")
    assert str(raised.value).endswith("; mend or unset HTTP_PROXY, HTTPS_PROXY, ALL_PROXY")


# Addresses.


@pytest.mark.parametrize(
    "text, url",
    [
        ("http://127.0.0.1:9465", "http://127.0.0.1:9465"),
        ("http://[::1]:9465/", "http://[::1]:9465"),
        ("https://west.example", "https://west.example"),
        ("http://gate.example/west//", "http://gate.example/west"),
        ("HTTP://localhost", "HTTP://localhost"),
    ],
)
def test_good_addresses(text: str, url: str) -> None:
    assert Address().convert(text, None, None) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:9465",
        "localhost",
        "localhost:9465",
        "ftp://localhost",
        "http://",
        "http://:9465",
        "http://localhost:port",
        "http://localhost:0",
        "http://localhost:65536",
        "http://[::1",
        "http://a..b",
        f"http://{'a' * 64}.example",
        "http://local host",
        "http://localhost/\x1b[31m",
        "http://localhost/?a=b",
        "http://localhost/#a",
        "http://user:secret@localhost",
    ],
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(click.BadParameter) as raised:
        Address().convert(text, None, None)
    assert raised.value.message.isprintable()
    assert "secret" not in raised.value.message

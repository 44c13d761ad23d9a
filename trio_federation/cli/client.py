"""Asking a running agent over HTTP: one or more questions, answered within one deadline or not at all, with its token
where it asks for one. What goes wrong becomes one line that names the address and says what to do, and never holds the
token. What is asked, and what becomes of the answers, belongs to
the commands; the answers themselves are made in `admin/`."""

from __future__ import annotations

import ipaddress
import math
import queue
import re
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import click
import msgspec

from trio_federation.capacity import INT32_MAX
from trio_federation.cli.tables import shorten, visible
from trio_federation.config import Endpoint, Secret, read_secret_file
from trio_federation.errors import FederationError

if TYPE_CHECKING:
    import httpx

#: where an agent answers unless its configuration says otherwise
DEFAULT_URL = "http://127.0.0.1:9465"
#: Seconds that all questions of a command may take together.
DEFAULT_TIMEOUT = 5.0
#: Bytes of one answer; some 200,000 records.
LARGEST_ANSWER = 64 * 2**20

_WHERE = "[admin] bind in the agent's configuration says where it answers"
_IS_IT_RUNNING = f"is the agent running? {_WHERE}"
#: how OpenSSL says that what came is no TLS at all, or that the other side hung up on its first words
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNEXPECTED_EOF_WHILE_READING")
#: OpenSSL's numbers for certificates of another host, e-mail address or IP address, and of another time
_ANOTHER_NAME = (62, 63, 64)
_ANOTHER_TIME = (9, 10)
_NOT_AN_AGENT = f"no agent of this version answers here; {_WHERE}"

#: A number of sandboxes, as it may stand in a record.
Count = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
#: Headroom: -1 without a ceiling.
Headroom = Annotated[int, msgspec.Meta(ge=-1, le=INT32_MAX)]

StructT = TypeVar("StructT", bound=msgspec.Struct)
Command: TypeAlias = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Question:
    """A GET."""

    path: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    #: the statuses with which the answer comes; any other is a failure
    statuses: tuple[int, ...] = (200,)


@dataclass(frozen=True, slots=True)
class Access:
    """What an agent may ask for besides the question, and how it is known to be the right one."""

    #: the agent's token; None where none was given
    token: Secret | None = None
    #: a file with the authorities that the agent's certificate may be from; None for the public ones
    ca_file: str | None = None


class Address(click.ParamType[str]):
    """The option `--url`: http or https, a host, and perhaps a port and a path. Converts to the URL without a slash at
    its end."""

    name = "URL"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raises click.BadParameter for what is no such URL."""
        try:
            parts = urlsplit(value)
            # Both of these raise: the port where it is no port's number, and the encoding for what is no host's name.
            good = parts.port != 0 and parts.scheme in ("http", "https") and (parts.hostname or "").encode("idna")
        except ValueError:
            good = False
        if not good or not value.isprintable() or " " in value:
            self.fail(f"{_quoted(value)} is no address; write it as http://HOST:PORT", param, ctx)
        if parts.username is not None or parts.query or parts.fragment:
            self.fail("give the address alone, without a user, a query or a fragment", param, ctx)
        return value.rstrip("/")


class TokenFile(click.Path):
    """The option `--token-file`: a file that holds a token and nothing else. Converts to the token, which is read as
    every secret's file of the configuration is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Raises click.BadParameter, which holds nothing of the file, for what cannot be read or is no token."""
        if isinstance(value, Secret):
            return value
        try:
            return read_secret_file(value)
        except ValueError as error:
            self.fail(visible(str(error)), param, ctx)


def asks_an_agent(command: Command) -> Command:
    """The options of every command that asks a running agent: `url`, `access`, which is of `--token-file` and
    `--ca-file`, `timeout` and `as_json`."""
    url = click.option(
        "--url",
        type=Address(),
        default=DEFAULT_URL,
        show_default=True,
        help="Where the agent answers: [admin] bind in its configuration.",
    )
    # Never the token itself: every program of a machine can read what others were started with.
    token_file = click.option(
        "--token-file",
        type=TokenFile(),
        metavar="FILE",
        help="The file that holds the agent's token, that of [admin] in its configuration.",
    )
    ca_file = click.option(
        "--ca-file",
        type=click.Path(),
        metavar="FILE",
        help="For https: the authority that the agent's certificate is from, as PEM, where it is a private one.",
    )
    timeout = click.option(
        "--timeout",
        type=click.FloatRange(min=0.1, max=3600),
        default=DEFAULT_TIMEOUT,
        show_default=True,
        callback=_no_nan,
        help="Seconds to wait for all of the answer.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")

    @wraps(command)
    def with_access(*arguments: Any, token_file: Secret | None, ca_file: str | None, **options: Any) -> None:
        command(*arguments, access=Access(token_file, ca_file), **options)

    return url(token_file(ca_file(timeout(as_json(with_access)))))


def _no_nan(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("give a number of seconds", ctx, param)
    return value


def ask(
    url: str,
    questions: Sequence[Question],
    timeout: float,
    transport: httpx.BaseTransport | None = None,
    *,
    access: Access = Access(),
) -> list[dict[str, Any]]:
    """The answers of the agent at `url`, one JSON object for each question, all within `timeout` seconds.

    Raises FederationError, whose one line says what to do, for anything else, and click.ClickException where the agent
    says that what it was asked for breaks a rule, where `access` does not fit the address, or where its file cannot be
    used. `transport`: instead of the network."""
    _check_way(url, access)
    trusted = None if access.ca_file is None else _authorities(access.ca_file)
    outcome: queue.SimpleQueue[list[dict[str, Any]] | Exception] = queue.SimpleQueue()
    given_up = threading.Event()

    def work() -> None:
        try:
            outcome.put(_ask(url, questions, timeout, transport, given_up, access.token, trusted))
        except Exception as error:
            outcome.put(error)

    # In a thread, because nothing else bounds the whole: neither a name server that does not answer, nor a peer that
    # sends a byte now and then, is in the hands of a read timeout. It ends with the process, if not by itself.
    threading.Thread(target=work, name="asks an agent", daemon=True).start()
    try:
        answers = outcome.get(timeout=timeout)
    except queue.Empty:
        raise _too_slow(url, timeout) from None
    finally:
        given_up.set()
    if isinstance(answers, Exception):
        raise answers
    return answers


def read(url: str, question: Question, answer: dict[str, Any], struct: type[StructT]) -> StructT:
    """What a person is shown of an answer. Raises FederationError where it is not of the form of an agent's."""
    try:
        return msgspec.convert(answer, struct)
    except msgspec.ValidationError as error:
        where = f"{url}{question.path}"
        raise FederationError(f"{where}: not the answer of an agent ({_short(error)}); {_NOT_AN_AGENT}") from error


def refusal(url: str, question: Question, status: int, text: str, *, with_token: bool = False) -> Exception:
    """The agent says itself why it gives no answer. With 400, what it was asked for breaks a rule: bad usage.
    `with_token`: whether it was sent a token."""
    if status == 401:
        return FederationError(_needs_token(f"{url}{question.path}", with_token))
    line = f"{url}{question.path}: answers {status}: {_short(text)}"
    if status == 400:
        return click.ClickException(line)
    # Of a placement that is not remembered, another address knows no more.
    elsewhere = status == 404 and "id" not in question.parameters
    return FederationError(f"{line}; {_WHERE}" if elsewhere else line)


def _ask(
    url: str,
    questions: Sequence[Question],
    timeout: float,
    transport: httpx.BaseTransport | None,
    given_up: threading.Event,
    token: Secret | None,
    trusted: ssl.SSLContext | None,
) -> list[dict[str, Any]]:
    import httpx

    with _told(url, timeout):
        if transport is None:
            transport = _transport(url, trusted)
        # Nothing is compressed, so that what is read is as large as what is made of it.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token.reveal()}"
        with httpx.Client(transport=transport, headers=headers, timeout=timeout, follow_redirects=False) as client:
            return [_answer(client, url, question, given_up, with_token=token is not None) for question in questions]


def _answer(
    client: httpx.Client, url: str, question: Question, given_up: threading.Event, *, with_token: bool
) -> dict[str, Any]:
    where = f"{url}{question.path}"
    with client.stream("GET", where, params=dict(question.parameters)) as response:
        if response.has_redirect_location:
            to = _quoted(response.headers["location"])
            raise FederationError(
                f"{where}: sends elsewhere, to {to}, which is not followed; give the address of the agent itself"
            )
        body = bytearray()
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > LARGEST_ANSWER:
                limit = f"{LARGEST_ANSWER // 2**20} MiB"
                raise FederationError(
                    f"{where}: the answer is larger than {limit}; `status` asks for less with --namespace and --env"
                )
            if given_up.is_set():
                break
    try:
        answer = msgspec.json.decode(bytes(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        answer = None
    if response.status_code in question.statuses and isinstance(answer, dict):
        return answer
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise refusal(url, question, response.status_code, answer["error"], with_token=with_token)
    said = "no JSON object" if response.status_code == 200 else str(response.status_code)
    raise FederationError(f"{where}: answers {said}; {_NOT_AN_AGENT}")


@contextmanager
def _told(url: str, timeout: float) -> Iterator[None]:
    """Turns what httpx and the sockets below it raise into a line for people."""
    import httpx

    try:
        yield
    except httpx.TimeoutException as error:
        raise _too_slow(url, timeout) from error
    except httpx.InvalidURL as error:
        raise click.BadParameter(f"{_quoted(url)} is no address: {_short(error)}", param_hint="--url") from error
    except httpx.ProxyError as error:
        raise FederationError(
            f"{url}: the proxy of the environment does not let it through: {_short(error)}"
        ) from error
    except (httpx.NetworkError, UnicodeError) as error:
        failure = _tls_failure(error)
        if isinstance(failure, ssl.SSLCertVerificationError):
            problem = f"its certificate is not accepted: {visible(failure.verify_message).rstrip('.')}"
            raise FederationError(f"{url}: {problem}; {_certificate_advice(failure)}") from error
        if url.lower().startswith("https:") and failure is not None and failure.reason in _NO_TLS:
            plain = f"http{url[len('https') :]}"
            why = "an agent speaks plain HTTP unless it has [admin.tls]"
            raise FederationError(f"{url}: no TLS answers there; {why}: write {plain}") from error
        raise FederationError(f"{url}: cannot be reached: {_short(error)}; {_IS_IT_RUNNING}") from error
    except httpx.HTTPError as error:
        encrypted = "" if url.lower().startswith("https:") else "; write https://… where it has [admin.tls]"
        problem = f"no HTTP answer, or a broken one: {_short(error)}"
        raise FederationError(f"{url}: {problem}; {_IS_IT_RUNNING}{encrypted}") from error


def _tls_failure(error: BaseException) -> ssl.SSLError | None:
    """What OpenSSL says of a connection that failed, if it was that."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _certificate_advice(failure: ssl.SSLCertVerificationError) -> str:
    if failure.verify_code in _ANOTHER_NAME:
        return "write --url with a name or an address that it is for"
    if failure.verify_code in _ANOTHER_TIME:
        return "renew [admin.tls] cert_file of the agent, or set the clock of this machine"
    return "--ca-file FILE names the authority that the agent's certificate is from"


def _needs_token(where: str, with_token: bool) -> str:
    if with_token:
        return f"{where}: the token of --token-file is not the agent's; it is that of [admin] in its configuration"
    return f"{where}: the agent asks for its token; name the file that holds it with --token-file FILE"


def _check_way(url: str, access: Access) -> None:
    """Raises click.ClickException where everybody on the way could read the token, or where no certificate is looked
    at."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return
    if access.token is not None and not Endpoint(parts.hostname or "", 0).is_loopback:
        raise click.ClickException(
            f"{url}: --token-file is not used over plain HTTP, where others can read the token; write https://…, which "
            "needs [admin.tls] at the agent"
        )
    if access.ca_file is not None:
        raise click.ClickException(f"{url}: --ca-file is of no use over plain HTTP; write https://…, or leave it out")


def _authorities(ca_file: str) -> ssl.SSLContext:
    """Trusts the authorities of a file and no others. Raises click.BadParameter where it cannot be used."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        no_pem = isinstance(error, ssl.SSLError)
        problem = "holds no certificate as PEM" if no_pem else f"cannot be read: {_short(error)}"
        raise click.BadParameter(f"{_quoted(ca_file)} {problem}", param_hint="--ca-file") from error


def _too_slow(url: str, timeout: float) -> FederationError:
    return FederationError(f"{url}: no complete answer within {timeout:g} s; {_IS_IT_RUNNING}; --timeout waits longer")


def _transport(url: str, trusted: ssl.SSLContext | None) -> httpx.HTTPTransport:
    """The way to `url`, where a certificate is always looked at: straight, or through the proxy that the environment
    names for it. Never through one to this machine: what listens on its loopback is not what listens on that of a
    proxy. httpx has a way of its own with these variables, which stumbles over networks in NO_PROXY. `trusted`: instead
    of the public authorities."""
    import httpx

    verify = True if trusted is None else trusted
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or Endpoint(host, 0).is_loopback or _is_exempt(host, parts.netloc, proxies.get("no", "")):
        return httpx.HTTPTransport(verify=verify)
    try:
        return httpx.HTTPTransport(verify=verify, proxy=proxy if "://" in proxy else f"http://{proxy}")
    except (httpx.InvalidURL, ValueError, ImportError) as error:  # ImportError: a kind that needs another package
        advice = "mend or unset HTTP_PROXY, HTTPS_PROXY, ALL_PROXY"
        raise FederationError(f"the environment's proxy cannot be used: {_short(error)}; {advice}") from error


def _is_exempt(host: str, netloc: str, no_proxy: str) -> bool:
    """Whether NO_PROXY names the host: by its name, its domain, or a network that its address is in."""
    if urllib.request.proxy_bypass(netloc) or urllib.request.proxy_bypass(host):
        return True
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        for entry in no_proxy.split(","):
            with suppress(ValueError):
                if address in ipaddress.ip_network(entry.strip(), strict=False):
                    return True
    return False


def _short(text: object) -> str:
    """Words of others, fit for one line. Errors of sockets begin with a number that helps nobody."""
    words = re.sub(r"^\[Errno -?\d+\] ", "", visible(" ".join(str(text).split())))
    return shorten(words[:1].lower() + words[1:], 300)


def _quoted(text: str) -> str:
    return f"'{shorten(visible(text), 100)}'"

"""The configuration: what a TOML file may say, every default, and how a file becomes typed values, with all its faults
found at once (names and rules: interfaces.md, "Configuration"). The Structs here are the one declaration of keys, types
and defaults. What a plugin's table may say is the plugin's business; starting things, and loading certificates, belong
to the rooms that use them."""

from __future__ import annotations

import hmac
import ipaddress
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import msgspec

from trio_federation.capacity import is_label, is_subdomain
from trio_federation.credentials import (
    CertificateName,
    DenyList,
    looks_like_token,
    read_deny_list,
    read_token,
    without_macs,
)
from trio_federation.errors import ConfigurationError
from trio_federation.options import UNITS, seconds
from trio_federation.reservations import RESERVATION_TTL, SETTLE_TIME
from trio_federation.suggest import nearest

#: The environment variables that win over the file, and the only ones that are read.
CLUSTER_ID_VARIABLE = "LOCAL_CLUSTER_ID"
SECRET_VARIABLE = "TRIO_FEDERATION_SECRET"  # noqa: S105 - the name of a variable, not a secret

#: Bounds of every duration, in seconds. Nothing here is meant to happen more often, or to be kept for longer.
SHORTEST = 0.001
LONGEST = 24 * 3600.0

#: The largest number that a limit can be: that of a record's counts.
MOST = 2**31 - 1

#: Bounds of what is read, in bytes, so that a path that names a device or a wrong file cannot fill the memory. A secret
#: travels in an HTTP header, and peers commonly limit all headers together to 8 KiB.
LARGEST_FILE = 1024 * 1024
LARGEST_SECRET = 4096

#: Words and keys of interfaces.md that are promised for a later version: known, but of no use yet.
NOT_YET = frozenset({"nats", "hub.backplane.servers"})

#: Keys that nobody has, and that are easily thought to be there: what to use instead.
_INSTEAD = {
    "federation.token": "a token is given as secret",
    "federation.token_file": "a token is given as secret_file",
    "hub.token": "the hub has the secret that tokens are made from, as secret",
    "hub.token_file": "the hub has the secret that tokens are made from, as secret_file",
    "hub.next_secret": "the second secret is given as next_secret_file",
}

#: Characters of a hub's secret below which it is told that it may be guessed: half of `openssl rand -hex 32`.
SAFE_SECRET = 32

#: The least length of the admin interface's token, in characters: fewer could be guessed.
SHORTEST_TOKEN = 16


class Secret:
    """A text that is never shown: not by str(), repr() or format(), and not by a serialiser that meets it by chance."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        ours, theirs = (each._text.encode("utf-8", "surrogatepass") for each in (self, other))
        return hmac.compare_digest(ours, theirs)

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "Secret(***)"


class Endpoint(msgspec.Struct, frozen=True):
    """A host and a TCP port. `host` has no brackets; `str()` is host:port, an IPv6 address in brackets."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether the host is this machine by its own name or address. A name that a resolver decides about is not."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.removesuffix(".") == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


# What is written as a string: how each kind is read, and shown again.


@dataclass(frozen=True)
class Written:
    """Marks, inside Annotated, a value that stands in the file as a string.

    `read` takes that string and the folder that relative paths start from, and raises ValueError with the rest of
    a fault's line."""

    read: Callable[[str, Path], object]
    example: str
    show: Callable[[Any], str] = str


def _shown(text: str) -> str:
    """A text from outside, fit for one line of a fault, and without the MAC of a token."""
    text = without_macs(text)
    return repr(text if len(text) <= 60 else text[:60] + "…")


def _shown_path(path: str) -> str:
    """The same of a path, whose end says most."""
    path = without_macs(path)
    return repr(path if len(path) <= 200 else "…" + path[-200:])


def _duration(text: str, _base: Path) -> float:
    length = seconds(text)
    if not SHORTEST <= length <= LONGEST:
        limits = f"{show_duration(SHORTEST)} to {show_duration(LONGEST)}"
        raise ValueError(f"{_shown(text)} is outside of what a duration here can be; write one from {limits}")
    return length


def show_duration(length: float) -> str:
    """A duration, in seconds, as the file would say it, for instance "30s"."""
    unit = next((unit for unit in ("h", "m", "s") if length >= UNITS[unit] and length % UNITS[unit] == 0), None)
    if unit is None:
        unit = "ms" if length < 1 else "s"
    return f"{length / UNITS[unit]:g}{unit}"


_HOST = re.compile(r"(?!.{254})[a-z0-9_]([-a-z0-9_]{0,61}[a-z0-9_])?(\.[a-z0-9_]([-a-z0-9_]{0,61}[a-z0-9_])?)*\.?")
_ENDPOINT = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*)):([0-9]{1,5})")


def _host(text: str, _base: Path) -> str:
    host = text.lower()
    if _HOST.fullmatch(host) is None:
        raise ValueError(f"{_shown(text)} is not a host name or an IPv4 address")
    # As in URLs: a host that ends in a number can only be meant as an address.
    if host.removesuffix(".").rpartition(".")[2].isdigit():
        try:
            ipaddress.IPv4Address(host)
        except ValueError as error:
            raise ValueError(f"{_shown(text)} is not an IPv4 address") from error
    return host


def _endpoint(text: str, base: Path) -> Endpoint:
    match = _ENDPOINT.fullmatch(text)
    if match is None:
        if "://" in text:
            advice = "leave out the scheme and the path, and write host:port"
        elif "[" in text or text.count(":") > 1:
            advice = 'write an IPv6 address in brackets and then the port, for instance "[::1]:7443"'
        else:
            advice = 'write host:port, for instance "127.0.0.1:7443"'
        raise ValueError(f"{_shown(text)} is not an endpoint; {advice}")
    in_brackets, name, port = match.groups()
    if int(port) > 65535:
        raise ValueError(f"{_shown(text)} has no port that exists; write one up to 65535")
    if in_brackets is None:
        if not name:
            raise ValueError(f'{_shown(text)} names no host; "0.0.0.0" or "[::]" stands for every address to listen on')
        return Endpoint(_host(name, base), int(port))
    try:
        return Endpoint(str(ipaddress.IPv6Address(in_brackets)), int(port))
    except ValueError as error:
        raise ValueError(f"{_shown(text)} holds no IPv6 address in its brackets") from error


def _hub_endpoint(text: str, base: Path) -> Endpoint:
    endpoint = _endpoint(text, base)
    if endpoint.port == 0:
        raise ValueError(f"{_shown(text)} has no port to connect to; write one from 1 to 65535")
    return endpoint


def _cluster_id(text: str, _base: Path) -> str:
    if not is_label(text):
        raise ValueError(
            f"{_shown(text)} is not a cluster id; use at most 63 lower-case letters, digits and inner hyphens "
            "(an RFC 1123 label)"
        )
    return text


def _path(text: str, base: Path) -> str:
    if not text or "\0" in text:
        raise ValueError(f"{_shown(text)} names no file; write the path of one")
    if without_macs(text) != text:
        # An error of the operating system would repeat it whole.
        raise ValueError(f"{_shown(text)} is a token, and no file; write the path of the file that holds it")
    return str(base / text)


def _readable_path(text: str, base: Path) -> str:
    path = _path(text, base)
    try:
        # Looked at first, because to open a pipe that nobody writes to would wait for ever.
        if not Path(path).is_file() and Path(path).exists():
            raise ValueError(f"{_shown_path(path)} is not a file; name one that holds PEM")
        with open(path, "rb"):
            return path
    except OSError as error:
        raise ValueError(f"cannot read {_shown_path(path)}: {error.strerror}; create it or correct the path") from error


def _secret(text: str, _base: Path) -> Secret:
    if not text:
        raise ValueError("is empty; put the secret there, or remove it")
    if len(text) > LARGEST_SECRET:
        raise ValueError(f"holds more than {LARGEST_SECRET} characters; use a shorter secret")
    # gRPC's rule for values of text headers: printable ASCII, and blanks at the ends are lost on the way.
    if not (text.isascii() and text.isprintable() and text == text.strip()):
        raise ValueError(
            "holds something that an HTTP header cannot carry; use printable ASCII, without blanks or line breaks at "
            "its ends"
        )
    return Secret(text)


def read_secret_file(path: str, read: Callable[[str, Path], Secret] = _secret) -> Secret:
    """What a secret's file holds, less one line break at its end. Raises ValueError, whose text names the file, says
    what to do, and holds nothing of what the file does."""
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_SECRET + len("\r\n") + 1)
        for line_break in (b"\r\n", b"\n"):
            if data.endswith(line_break):
                data = data.removesuffix(line_break)
                break
        # A character that the limit cut in two is no matter: the text is too long anyway, and says so.
        text: str | None = data.decode("utf-8", errors="ignore" if len(data) > LARGEST_SECRET else "strict")
    except OSError as error:
        problem = f"cannot read {_shown_path(path)}: {error.strerror}; create it or correct the path"
        raise ValueError(problem) from error
    except UnicodeDecodeError:
        text = None
    if text is None:
        # Raised out here: in there, that error would be its context, and holds the bytes.
        raise ValueError(f"{_shown_path(path)} is not UTF-8; write the secret as plain text")
    try:
        return read(text, Path())
    except ValueError as error:
        raise ValueError(f"{_shown_path(path)} {error}") from error


def read_hub_secret_file(path: str) -> Secret:
    """A hub's secret from its file. Raises ValueError as `read_secret_file`, also for a token."""
    return read_secret_file(path, _hub_secret)


def read_next_secret_file(path: str) -> Secret | None:
    """A hub's second secret from its file; None where that is missing or empty. Raises ValueError as
    `read_secret_file`, also for a token."""
    try:
        with open(path, "rb") as file:
            if not file.read(1):
                return None
    except FileNotFoundError:
        return None
    except OSError:
        pass  # told below
    return read_hub_secret_file(path)


def weak_secret(secret: Secret | None) -> str | None:
    """What should be known of a secret that tokens are made from, in words that follow its place."""
    if secret is None or len(secret.reveal()) >= SAFE_SECRET:
        return None
    return (
        f"is shorter than {SAFE_SECRET} characters: whoever has a token can try, at home, what it was made from; make "
        "another one with: openssl rand -hex 32"
    )


def read_agent_secret_file(path: str, cluster_id: str | None) -> Secret:
    """An agent's secret, or its token, from its file. Raises ValueError as `read_secret_file`, also for the token of
    another cluster."""
    secret = read_secret_file(path)
    if (problem := _token_problem(secret, cluster_id)) is not None:
        raise ValueError(f"{_shown_path(path)} {problem}")
    return secret


def read_admin_token_file(path: str) -> Secret:
    """The token of the admin interface from its file. Raises ValueError as `read_secret_file`."""
    return read_secret_file(path, _admin_token)


def read_deny_file(path: str) -> tuple[DenyList, Sequence[str]]:
    """A deny list from its file, and the faults of its lines. Raises ValueError where the file cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ValueError(f"{_shown_path(path)} is larger than {LARGEST_FILE} bytes; deny whole clusters instead")
        return read_deny_list(data.decode("utf-8-sig"))
    except OSError as error:
        problem = f"cannot read {_shown_path(path)}: {error.strerror}; create it, an empty file denies nobody"
        raise ValueError(problem) from error
    except UnicodeDecodeError:
        pass  # told out here: in there, that error would be the context, and holds the bytes
    raise ValueError(f"{_shown_path(path)} is not UTF-8; write CLUSTER or CLUSTER.SERIAL, a line each")


_NOT_A_HUBS = "holds a token; a hub needs the secret that tokens are made from"


def _hub_secret(text: str, base: Path) -> Secret:
    if looks_like_token(text):
        raise ValueError(_NOT_A_HUBS)
    return _secret(text, base)


def _token_problem(secret: Secret, cluster_id: str | None) -> str | None:
    """What is wrong with an agent's secret where it is meant as a token, in words that follow its place."""
    text = secret.reveal()
    if not looks_like_token(text):
        return None
    token = read_token(text)
    if token is None:
        return "begins like a token and is none; copy all of what `trio-federation token` prints"
    if cluster_id is not None and token.cluster_id != cluster_id:
        return f"is the token of {token.cluster_id!r}, and this is {cluster_id!r}; get its own"
    return None


def _show_secret(_secret: Secret) -> str:
    return "set, not shown"


def _admin_token(text: str, base: Path) -> Secret:
    if len(text) < SHORTEST_TOKEN:
        raise ValueError(f"is shorter than {SHORTEST_TOKEN} characters; make one with: openssl rand -hex 32")
    return _secret(text, base)


def _certificate_name(text: str, _base: Path) -> CertificateName:
    try:
        return CertificateName.parse(text)
    except ValueError as error:
        raise ValueError(f"{_shown(text)} {error}") from error


def _cluster_choice(text: str, base: Path) -> str:
    return text if text == "*" else _cluster_id(text, base)


def _env_pattern(text: str, _base: Path) -> str:
    namespace, _, env = text.partition("/")
    # A half that no name can fit is a mistake, too: with one letter, or none, for each *, it would be such a name.
    if not all(
        any(fits(half.replace("*", letter)) for letter in ("a", ""))
        for half, fits in ((namespace, is_label), (env, is_subdomain))
    ):
        raise ValueError(
            f'{_shown(text)} is not NAMESPACE/ENV; write for instance "team-a/python", "team-a/*" or "*/*", where * '
            "stands for any characters but the slash"
        )
    return text


Duration: TypeAlias = Annotated[float, Written(_duration, '"5s"', show_duration)]  # seconds, once loaded
BindEndpoint: TypeAlias = Annotated[Endpoint, Written(_endpoint, '"127.0.0.1:9464"')]  # port 0: any free one
HubEndpoint: TypeAlias = Annotated[Endpoint, Written(_hub_endpoint, '"hub.example:7443"')]
ClusterId: TypeAlias = Annotated[str, Written(_cluster_id, '"west"')]
HostName: TypeAlias = Annotated[str, Written(_host, '"hub.example"')]
FilePath: TypeAlias = Annotated[str, Written(_path, '"/run/secrets/federation"')]  # relative to the file's own folder
PemPath: TypeAlias = Annotated[str, Written(_readable_path, '"/run/tls/tls.crt"')]  # likewise; looked for while loading
SecretText: TypeAlias = Annotated[Secret, Written(_secret, '"…"', _show_secret)]
AdminToken: TypeAlias = Annotated[Secret, Written(_admin_token, '"…"', _show_secret)]
ClusterSan: TypeAlias = Annotated[CertificateName, Written(_certificate_name, '"DNS:{cluster}.agents.example"')]
ClusterChoice: TypeAlias = Annotated[str, Written(_cluster_choice, '"west"')]  # or "*"
EnvPattern: TypeAlias = Annotated[str, Written(_env_pattern, '"team-a/*"')]


# What a file may say. A key of the file is a field here, with its default.


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all tables: frozen, and without room for keys that nobody declared."""


class Tls(_Table, frozen=True, kw_only=True):
    """How an agent speaks TLS to hubs. Without ca_file, the system's authorities; the pair is a client certificate."""

    ca_file: PemPath | None = None
    cert_file: PemPath | None = None
    key_file: PemPath | None = None
    server_name: HostName | None = None


class Federation(_Table, frozen=True, kw_only=True):
    """The agent's side of the federation. Once loaded, `secret` is what the environment, secret_file or secret gave."""

    hubs: tuple[HubEndpoint, ...] = ()
    secret: SecretText | None = None
    secret_file: FilePath | None = None
    ttl: Duration = 30.0
    report_interval: Duration = 5.0
    resync_interval: Duration = 10.0
    keepalive: Duration = 5.0
    silence_limit: Duration = 15.0
    insecure: bool = False
    tls: Tls | None = None


#: A way for a cluster to prove itself; what stands together with "+" is needed together.
Accepted: TypeAlias = Literal["shared", "token", "certificate", "shared+certificate", "token+certificate"]


class HubTls(_Table, frozen=True, kw_only=True):
    """The hub's certificate. With client_ca_file, agents need a certificate from that authority, unless one of the
    ways in [hub] accept names certificates and another does not: then they may come without. `cluster_san`: where a
    certificate names its cluster."""

    cert_file: PemPath
    key_file: PemPath
    client_ca_file: PemPath | None = None
    cluster_san: ClusterSan | None = None


class Backplane(_Table, frozen=True, kw_only=True):
    """How several hubs share what they know; "memory" is one hub by itself. Hubs of this version use no other,
    whichever plugins are installed."""

    type: Literal["memory"] = "memory"


class Limits(_Table, frozen=True, kw_only=True):
    """What one peer may ask of a hub. Rates are averages over ten seconds, so what a tenth of a minute allows may come
    at once. What is over a limit is refused with RESOURCE_EXHAUSTED, or DEADLINE_EXCEEDED for `first_message`."""

    #: connections open at once, from one address
    connections: int = 256
    #: calls open at once, of one cluster
    streams: int = 16
    #: messages a second, of one cluster; a watch that is opened counts as one
    message_rate: int = 100
    #: records a second, of one cluster
    record_rate: int = 20_000
    #: how long a connection may be open without a call, and a call without its first message
    first_message: Duration = 15.0


class PolicySettings(_Table, frozen=True, kw_only=True):
    """What clusters may say, and see. `clusters` may hold "*", for those that no other table names. A pattern is
    NAMESPACE/ENV, where * stands for any characters but the slash."""

    clusters: tuple[ClusterChoice, ...]
    #: the envs that they may report
    report: tuple[EnvPattern, ...] = ("*/*",)
    #: the envs of others that they may see
    see: tuple[EnvPattern, ...] = ("*/*",)
    #: records that are kept of one of them
    max_records: int | None = None
    #: the highest idle of a record that counts
    max_idle: int | None = None


class HubSettings(_Table, frozen=True, kw_only=True):
    """The hub. Once loaded, `secret` is what secret_file or secret gave; the environment's is the agent's alone."""

    bind: BindEndpoint = Endpoint("0.0.0.0", 7443)  # noqa: S104 - refused unless TLS or insecure = true is there, too
    ttl: Duration = 60.0
    grace: Duration = 10.0
    keepalive: Duration = 5.0
    silence_limit: Duration = 15.0
    insecure: bool = False
    secret: SecretText | None = None
    secret_file: FilePath | None = None
    #: a second secret that counts, too, while one is replaced by the other; no file, or an empty one: there is none
    next_secret_file: FilePath | None = None
    #: who is not let in, whatever they prove: CLUSTER or CLUSTER.SERIAL, a line each
    deny_file: FilePath | None = None
    accept: tuple[Accepted, ...] = ("shared",)
    limits: Limits = Limits()
    policy: tuple[PolicySettings, ...] = ()
    tls: HubTls | None = None
    backplane: Backplane = Backplane()

    @property
    def makes_tokens(self) -> bool:
        """Whether tokens that are made from the secret count."""
        return any("token" in way.split("+") for way in self.accept)


class PlacementSettings(_Table, frozen=True, kw_only=True):
    """For how long a placement counts against where it went (semantics.md, "Placement"), and what is best."""

    #: what was observed sooner than this after a placement may not show its create yet
    settle_time: Duration = SETTLE_TIME
    #: when a reservation ends that no observation has ended
    reservation_ttl: Duration = RESERVATION_TTL
    #: which of several pools that have idle is the best one; see `router.Ranking`
    ranking: Literal["left", "share"] = "left"


class Metrics(_Table, frozen=True, kw_only=True):
    """Where metrics and health are served; may be bound wide."""

    bind: BindEndpoint = Endpoint("127.0.0.1", 9464)


class AdminTls(_Table, frozen=True, kw_only=True):
    """The certificate of the admin interface."""

    cert_file: PemPath
    key_file: PemPath


class Admin(_Table, frozen=True, kw_only=True):
    """Where the admin interface is served; beyond loopback only with a token and TLS. Once loaded, `token` is what
    token_file or token gave."""

    bind: BindEndpoint = Endpoint("127.0.0.1", 9465)
    token: AdminToken | None = None
    token_file: FilePath | None = None
    tls: AdminTls | None = None


class Log(_Table, frozen=True, kw_only=True):
    """What is logged, and how: "auto" is "console" on a terminal and "json" otherwise."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class PluginTable(msgspec.Struct, frozen=True):
    """A table that is a plugin's, like [[source]]: which type, its options as they stand in the file, and where, like
    "source[0]"."""

    type: str
    options: dict[str, Any] = {}
    key_path: str = ""

    def __repr__(self) -> str:
        # An option's value may be a plugin's secret, so only the names are shown.
        return f"PluginTable(type={self.type!r}, options of {list(self.options)!r}, key_path={self.key_path!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # The one of every Struct shows the values.
        return [("type", self.type), ("options", list(self.options)), ("key_path", self.key_path)]


class Tables(_Table, frozen=True, kw_only=True):
    """The whole file."""

    cluster_id: ClusterId | None = None
    federation: Federation = Federation()
    source: tuple[PluginTable, ...] = ()
    filter: tuple[PluginTable, ...] = ()
    sink: tuple[PluginTable, ...] = ()
    placement: PlacementSettings = PlacementSettings()
    metrics: Metrics = Metrics()
    admin: Admin = Admin()
    log: Log = Log()
    hub: HubSettings | None = None


class Config(Tables, frozen=True, kw_only=True):
    """A configuration that can be used: the file's tables, where they came from, and what a person should know."""

    path: Path | None = None
    #: a line each, fit to be shown and logged
    warnings: tuple[str, ...] = ()

    @property
    def has_agent(self) -> bool:
        """Whether anything of an agent is configured; a file with nothing but a hub runs no agent."""
        tables = self.source or self.filter or self.sink
        settings = self.federation != Federation() or self.placement != PlacementSettings()
        return bool(self.cluster_id or tables) or settings

    @property
    def enabled(self) -> bool:
        """Whether the agent takes part in a federation; without, it runs single-cluster (semantics.md, "Agent")."""
        return self.cluster_id is not None and bool(self.federation.hubs) and _has_credential(self.federation)


def _has_credential(federation: Federation) -> bool:
    return federation.secret is not None or (federation.tls is not None and federation.tls.cert_file is not None)


#: The keys of the file that are an agent's alone.
_AGENTS_OWN = ("cluster_id", "federation", "source", "filter", "sink", "placement")


def agent_is_configured(document: Mapping[str, object]) -> bool:
    """Whether a parsed file itself asks for an agent, whatever the environment says; `Config.has_agent` is the answer
    for a loaded one."""
    return any(table in document for table in _AGENTS_OWN)


# From TOML to those Structs.

#: Stands for a value that has a fault. It may sit in a Struct while the rest is being checked; once there is a fault,
#: no Struct leaves `load`.
_BAD: Any = object()


def _good(*values: object) -> bool:
    return not any(value is _BAD for value in values)


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", list: "an array"}


def _kind_of(value: object) -> str:
    return "a table" if isinstance(value, dict) else _KINDS.get(type(value), "a date or time")


@lru_cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """The keys of a table."""
    return {each.name: each for each in msgspec.structs.fields(kind)}


def _unwrap(kind: Any) -> tuple[Any, Written | None]:
    """A field's type without `| None` (TOML has no null), and its `Written` mark if it has one."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is not Annotated:
        return kind, None
    return get_args(kind)[0], next((mark for mark in get_args(kind)[1:] if isinstance(mark, Written)), None)


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, _Table)


def _is_plugins(kind: Any) -> bool:
    """Whether it is an array of tables that belong to plugins."""
    return PluginTable in get_args(kind)


def _item_table(kind: Any) -> type[msgspec.Struct] | None:
    """The kind of table that an array of tables of ours is made of; None where it is no such array."""
    item = get_args(kind)[0] if get_origin(kind) is tuple else None
    return item if _is_table(item) else None


def _homes(kind: type[msgspec.Struct], header: str = "") -> Iterator[tuple[str, str]]:
    """Every key of the model, and where it belongs, in words."""
    for name, known in _fields(kind).items():
        inner, _ = _unwrap(known.type)
        if _is_table(inner):
            full = f"{header}.{name}" if header else name
            yield name, f"to the file as [{full}]"
            yield from _homes(inner, full)
        elif _is_plugins(inner):
            yield name, f"to the file as [[{name}]]"
        elif (item := _item_table(inner)) is not None:
            full = f"[{header}.{name}]" if header else f"[{name}]"
            yield name, f"to the file as [{full}]"
            yield from _homes(item, full)
        else:
            yield name, f"under [{header}]" if header else "at the top of the file, above every [table]"


@dataclass
class _Reader:
    """Reads one file's tables, and collects the faults instead of stopping at the first."""

    file: str
    base: Path
    plugin_faults: Mapping[str, Callable[[PluginTable], list[str]]]
    cluster_id: str | None = None  # from the environment, like the next
    secret: str | None = None
    faults: list[str] = field(default_factory=list)
    #: by table: the place that its secret came from, as a fault begins
    secret_places: dict[str, str] = field(default_factory=dict)

    def place(self, header: str, key: str) -> str:
        """Where `key` of the table `header` is, as a fault begins; either may be empty."""
        return f"{self.file}: " + " ".join(part for part in (f"[{header}]" if header else "", key) if part)

    def fault(self, header: str, key: str, text: str) -> None:
        """Note a fault of `key` in the table `header`; either may be empty."""
        self.faults.append(f"{self.place(header, key)}: {text}")

    def wrong(self, wanted: str, value: object, header: str, key: str) -> Any:
        """Note a wrong type. Says what kind of value is there, never the value: it may be a secret in a wrong place."""
        self.fault(header, key, f"expected {wanted}, not {_kind_of(value)}")
        return _BAD

    def from_environment(self, variable: str, read: Callable[[str, Path], object], text: str) -> Any:
        """The value of a variable that is set, or `_BAD`."""
        try:
            return read(text, self.base)
        except ValueError as error:
            self.faults.append(f"environment: {variable}: {error}")
            return _BAD

    def table(self, kind: type[msgspec.Struct], table: Mapping[str, Any], header: str) -> Any:
        """The table as a Struct, with `_BAD` in the place of each value that cannot be used."""
        known, values = _fields(kind), {}
        for key, value in table.items():
            if key in known:
                values[key] = self.value(known[key].type, value, header, key)
            else:
                self.unknown(kind, value, header, key)
        for key, each in known.items():
            if each.required and key not in values:
                values[key] = _BAD
                self.fault(header, key, "is missing; the table needs it")
        read = kind(**values)
        return _RULES[kind](self, read) if kind in _RULES else read

    def value(self, kind: Any, value: Any, header: str, key: str) -> Any:
        """The value as the type wants it, or `_BAD` with its faults noted."""
        kind, written = _unwrap(kind)
        if written is not None:
            if not isinstance(value, str):
                return self.wrong(f"a string such as {written.example}", value, header, key)
            try:
                return written.read(value, self.base)
            except ValueError as error:
                self.fault(header, key, str(error))
                return _BAD
        if _is_table(kind):
            full = f"{header}.{key}" if header else key
            if not isinstance(value, dict):
                # One of an array of tables has its number in the key.
                written_as = f"[{full.partition('[')[0]}]" if key.endswith("]") else full
                return self.wrong(f"a table, written as [{written_as}]", value, header, key)
            return self.backplane(value, full) if kind is Backplane else self.table(kind, value, full)
        if kind is PluginTable:
            return self.plugin(value, f"[{header}]", key)
        if get_origin(kind) is tuple:
            item = get_args(kind)[0]
            if not isinstance(value, list):
                of_tables = item is PluginTable or _is_table(item)
                full = f"{header}.{key}" if header else key
                wanted = f"an array of tables, each written as [[{full}]]" if of_tables else "an array"
                return self.wrong(wanted, value, header, key)
            header = header or key
            return tuple(self.value(item, each, header, f"{key}[{index}]") for index, each in enumerate(value))
        if get_origin(kind) is Literal and isinstance(value, str):
            return self.word(get_args(kind), value, header, key)
        try:
            return msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError:
            return self.wrong(_KINDS.get(kind, "a string"), value, header, key)

    def word(self, valid: tuple[str, ...], value: str, header: str, key: str) -> Any:
        """One of a few words."""
        if value in valid:
            return value
        choice = ", ".join(f'"{word}"' for word in valid)
        if value in NOT_YET:
            self.fault(header, key, f'"{value}" is not available in this version yet; use {choice}')
        else:
            # What several words make together is meant as a whole: the nearest by its letters may be one of them alone.
            parts = sorted(part.strip() for part in value.split("+"))
            near = next((each for each in valid if sorted(each.split("+")) == parts), None) or nearest(value, valid)
            hint = f'did you mean "{near}"?' if near else f"use {choice}"
            self.fault(header, key, f"{_shown(value)} is not known here; {hint}")
        return _BAD

    def plugin(self, value: Any, header: str, key: str) -> Any:
        """A plugin's table, of which only the type is looked at."""
        if not isinstance(value, dict):
            return self.wrong(f"a table, written as [{header}]", value, header, key)
        name = value.get("type", "")
        if not isinstance(name, str):
            return self.wrong("a string that names a plugin", name, header, f"{key}.type")
        if not name:
            self.fault(header, f"{key}.type", 'is missing or empty; name the plugin, for instance type = "fixtures"')
            return _BAD
        return PluginTable(name, {option: each for option, each in value.items() if option != "type"}, key)

    def backplane(self, table: dict[str, Any], header: str) -> Any:
        """The hub's backplane. One of a plugin cannot be used, but may be installed, and have options of its own; where
        it is known what is installed, that is told apart from a word that nobody knows."""
        name, faults_of = table.get("type"), self.plugin_faults.get("backplane")
        own = get_args(_fields(Backplane)["type"].type)
        if faults_of is None or not isinstance(name, str) or name in own or name in NOT_YET:
            return self.table(Backplane, table, header)
        options = {option: each for option, each in table.items() if option != "type"}
        found = faults_of(PluginTable(name, options, header))
        if not any(line.startswith(f"{header}.type: ") for line in found):
            choice = ", ".join(f'"{word}"' for word in own)
            self.fault(header, "type", f"{_shown(name)} is installed, but no hub of this version uses it; use {choice}")
        self.faults += [f"{self.file}: {line}" for line in found]
        return _BAD

    def unknown(self, kind: type[msgspec.Struct], value: object, header: str, key: str) -> None:
        """Note a key that the table does not have, with the nearest one that it has, or the table that has it."""
        known = _fields(kind)
        # A table is more likely to be meant as a table, and a value as a value.
        alike = [name for name, each in known.items() if _is_table(_unwrap(each.type)[0]) == isinstance(value, dict)]
        near = nearest(key, alike) or nearest(key, known)
        home = " or ".join(dict.fromkeys(place for name, place in _homes(Tables) if name == key))
        near_kind = _unwrap(known[near].type)[0] if near else None
        if near_kind is not None and (_is_plugins(near_kind) or _item_table(near_kind) is not None):
            meant = f"[[{header}.{near}]]" if header else f"[[{near}]]"
        else:
            meant = f'"{near}"'
        if f"{header}.{key}" in NOT_YET:
            hint = "it is not available in this version yet"
        elif f"{header}.{key}" in _INSTEAD:
            hint = _INSTEAD[f"{header}.{key}"]
        elif near and home:
            hint = f"did you mean {meant}, or does it belong {home}?"
        elif near or home:
            hint = f"did you mean {meant}?" if near else f"it belongs {home}"
        else:
            hint = f"valid here: {', '.join(known)}"
        name = key if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", key) else _shown(key)
        if isinstance(value, dict):
            self.fault(f"{header}.{name}" if header else name, "", f"unknown table; {hint}")
        else:
            self.fault(header, name, f"unknown key; {hint}")

    def secret_fault(self, header: str, text: str) -> None:
        """Note a fault of the secret that counts for a table, at the place that it came from; none where no secret
        counts, as there are two."""
        if header in self.secret_places:
            self.faults.append(f"{self.secret_places[header]}: {text}")

    def read_secret(self, header: str, key: str, path: str, read: Callable[[str, Path], Secret] = _secret) -> Any:
        """What a secret's file holds, or `_BAD` with the fault noted."""
        try:
            return read_secret_file(path, read)
        except ValueError as error:
            self.fault(header, key, str(error))
            return _BAD


# Rules between keys, and what comes from elsewhere. Each looks only at values that have no fault of their own.


def _with_secret(reader: _Reader, header: str, section: Any, environment: str | None) -> Any:
    """The table with the secret that counts: the environment's, else that of the file, else the key's own."""
    secret, secret_file = section.secret, section.secret_file
    if section.secret is not None and section.secret_file is not None:
        reader.fault(header, "secret_file", "stands beside secret; keep one of the two")
    elif environment is not None:
        # Of no use then, also later, when files are read again.
        secret, secret_file = reader.from_environment(SECRET_VARIABLE, _secret, environment), None
        reader.secret_places[header] = f"environment: {SECRET_VARIABLE}"
    elif section.secret_file is not None and _good(section.secret_file):
        secret = reader.read_secret(header, "secret_file", section.secret_file)
        reader.secret_places[header] = reader.place(header, "secret_file")
    else:
        reader.secret_places[header] = reader.place(header, "secret")
    return msgspec.structs.replace(section, secret=secret, secret_file=secret_file)


def _check_silence(reader: _Reader, header: str, section: Federation | HubSettings) -> None:
    keepalive, limit = section.keepalive, section.silence_limit
    if _good(keepalive, limit) and keepalive >= limit:
        text = f"{show_duration(keepalive)} is not below silence_limit, {show_duration(limit)}"
        reader.fault(header, "keepalive", f"{text}: a live peer would pass for a silent one; use a third of it")


def _check_plain_text(reader: _Reader, header: str, key: str, section: Federation | HubSettings, at: Endpoint) -> None:
    if _good(section.insecure, section.tls, at) and section.tls is None and not section.insecure and not at.is_loopback:
        text = f"{at} is not on loopback, and without [{header}.tls] the secret would travel in plain text"
        reader.fault(header, key, f"{text}; add [{header}.tls], or insecure = true where the network is trusted")


def _federation_rules(reader: _Reader, federation: Federation) -> Federation:
    resync, ttl = federation.resync_interval, federation.ttl
    if _good(resync, ttl) and resync > ttl / 2:
        text = f"{show_duration(resync)} is more than half of ttl, {show_duration(ttl)}"
        reader.fault("federation", "resync_interval", f"{text}; use at most {show_duration(ttl / 2)}, or a longer ttl")
    _check_silence(reader, "federation", federation)
    seen: dict[tuple[str, int], int] = {}
    for index, hub in enumerate(federation.hubs if _good(federation.hubs) else ()):
        _check_plain_text(reader, "federation", f"hubs[{index}]", federation, hub)
        if _good(hub) and (first := seen.setdefault((hub.host.removesuffix("."), hub.port), index)) != index:
            reader.fault("federation", f"hubs[{index}]", f"{hub} is hubs[{first}] again; name each hub once")
    result: Federation = _with_secret(reader, "federation", federation, reader.secret)
    return result


def _tls_rules(reader: _Reader, tls: Tls) -> Tls:
    for given, other in (("cert_file", "key_file"), ("key_file", "cert_file")):
        if getattr(tls, given) is not None and getattr(tls, other) is None:
            reader.fault("federation.tls", given, f"stands without {other}; a client certificate needs both")
    return tls


def _hub_rules(reader: _Reader, hub: HubSettings) -> HubSettings:
    _check_silence(reader, "hub", hub)
    _check_plain_text(reader, "hub", "bind", hub, hub.bind)
    ways = [way for way in hub.accept if _good(way)] if _good(hub.accept) else []
    if hub.accept == ():
        reader.fault("hub", "accept", 'is empty, so that no agent could connect; use accept = ["token"]')
    # Certificates alone need no secret; nor does a way that is misspelt tell whether it does.
    needs_secret = hub.accept == () or any(way != "certificate" for way in ways)
    if hub.secret is None and hub.secret_file is None and needs_secret:
        reader.fault("hub", "secret_file", "is missing, and secret, too; agents prove themselves by it, so set either")
    if any("certificate" in way for way in ways) and _good(hub.tls):
        missing = [key for key in ("client_ca_file", "cluster_san") if hub.tls is None or getattr(hub.tls, key) is None]
        if missing:
            text = f"takes certificates, and there is no {' and no '.join(missing)} in [hub.tls]"
            reader.fault(
                "hub", "accept", f"{text}; set what says whose certificates count, and which cluster one names"
            )
    seen: dict[str, int] = {}
    for index, policy in enumerate(hub.policy if _good(hub.policy) else ()):
        _check_policy(reader, f"hub.policy[{index}]", policy)
        for cluster in policy.clusters if _good(policy) and _good(policy.clusters) else ():
            if _good(cluster) and (first := seen.setdefault(cluster, index)) != index:
                reader.fault(
                    f"hub.policy[{index}]", "clusters", f'"{cluster}" is in hub.policy[{first}], too; keep one'
                )
    result: HubSettings = _with_secret(reader, "hub", hub, None)
    if isinstance(result.secret, Secret) and looks_like_token(result.secret.reveal()):
        reader.secret_fault("hub", _NOT_A_HUBS)
    return result


def _limits_rules(reader: _Reader, limits: Limits) -> Limits:
    for key in ("connections", "streams", "message_rate", "record_rate"):
        value = getattr(limits, key)
        if _good(value) and not 1 <= value <= MOST:
            reader.fault("hub.limits", key, f"is not from 1 to {MOST}; leave it out for the default")
    return limits


def _check_policy(reader: _Reader, header: str, policy: PolicySettings) -> None:
    if not _good(policy):
        return
    for key in ("max_records", "max_idle"):
        value = getattr(policy, key)
        if _good(value) and value is not None and not 0 <= value <= MOST:
            reader.fault(header, key, f"is not from 0 to {MOST}; leave it out where nothing is limited")
    if policy.clusters == ():
        reader.fault(header, "clusters", 'is empty; name clusters, or "*" for all that no other table names')


def _placement_rules(reader: _Reader, placement: PlacementSettings) -> PlacementSettings:
    settle_time, ttl = placement.settle_time, placement.reservation_ttl
    if _good(settle_time, ttl) and ttl < settle_time:
        text = f"{show_duration(ttl)} is less than settle_time, {show_duration(settle_time)}"
        advice = f"use at least {show_duration(settle_time)}, or a shorter settle_time"
        reader.fault(
            "placement", "reservation_ttl", f"{text}: it would end before any report can show the create; {advice}"
        )
    return placement


def _admin_rules(reader: _Reader, admin: Admin) -> Admin:
    token = admin.token
    if admin.token is not None and admin.token_file is not None:
        reader.fault("admin", "token_file", "stands beside token; keep one of the two")
    elif admin.token_file is not None and _good(admin.token_file):
        token = reader.read_secret("admin", "token_file", admin.token_file, _admin_token)
    if _good(admin.bind, admin.tls) and not admin.bind.is_loopback:
        # One that is there and has a fault of its own is not missing.
        without = ["token_file"] if admin.token is None and admin.token_file is None else []
        without += ["[admin.tls]"] if admin.tls is None else []
        if without:
            text = f"{admin.bind} is not on loopback, and there is no {' and no '.join(without)}"
            reader.fault("admin", "bind", f'{text}; add what is missing, or use "127.0.0.1:{admin.bind.port}"')
    return msgspec.structs.replace(admin, token=token)


def _file_rules(reader: _Reader, tables: Tables) -> Tables:
    if reader.cluster_id is not None:
        cluster_id = reader.from_environment(CLUSTER_ID_VARIABLE, _cluster_id, reader.cluster_id)
        tables = msgspec.structs.replace(tables, cluster_id=cluster_id)
    if tables.source and tables.cluster_id is None:
        text = f"is missing; the records of a [[source]] need it: set it here, or {CLUSTER_ID_VARIABLE}"
        reader.fault("", "cluster_id", text)
    federation = tables.federation
    if _good(tables.cluster_id, federation) and isinstance(federation.secret, Secret):
        problem = _token_problem(federation.secret, tables.cluster_id)
        if problem is not None:
            reader.secret_fault("federation", problem)
    seen: dict[Endpoint, str] = {}
    for header in ("metrics", "admin", "hub"):
        section = getattr(tables, header)
        if section is not None and _good(section) and _good(section.bind) and section.bind.port != 0:
            first = seen.setdefault(section.bind, header)
            if first != header:
                reader.fault(header, "bind", f"{section.bind} is bind of [{first}], too; give each a port of its own")
    return tables


_RULES: dict[type[msgspec.Struct], Callable[[_Reader, Any], Any]] = {
    Federation: _federation_rules,
    Tls: _tls_rules,
    HubSettings: _hub_rules,
    Limits: _limits_rules,
    PlacementSettings: _placement_rules,
    Admin: _admin_rules,
    Tables: _file_rules,
}


def _parse(path: Path) -> dict[str, Any]:
    """The file as TOML. Raises ConfigurationError with one fault, which names the file and, if known, the place."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ConfigurationError([f"{path}: is larger than {LARGEST_FILE} bytes; name a configuration file"])
        text = data.decode("utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError([f"{path}: cannot be read: {error.strerror}; correct the path"]) from error
    except UnicodeDecodeError as error:
        # Raised below: that error holds the whole file, and would be the cause, or the context.
        line = error.object.count(b"\n", 0, error.start) + 1
    except tomllib.TOMLDecodeError as error:
        lines = text.replace("\r\n", "\n").split("\n")
        end = f"at line {len(lines)}, column {len(lines[-1]) + 1}, the end of the file"
        problem = str(error).replace("at end of document", end)
        raise ConfigurationError([f"{path}: is not valid TOML: {problem}"]) from error
    except RecursionError as error:
        raise ConfigurationError([f"{path}: is nested too deeply; use fewer brackets within brackets"]) from error
    except ValueError as error:
        # A NUL in the path, or a number with more digits than Python converts.
        raise ConfigurationError([f"{path}: cannot be read: {error}"]) from error
    raise ConfigurationError([f"{path}: line {line} is not UTF-8; save the file as UTF-8"])


def load(
    path: str | Path,
    environ: Mapping[str, str],
    plugin_faults: Mapping[str, Callable[[PluginTable], list[str]]] | None = None,
) -> Config:
    """Read, check and resolve a configuration file; relative paths in it start from its own folder.

    `plugin_faults`: who knows what is wrong with a "source", "filter", "sink" or "backplane" table, so that their
    faults are told together with all others; without, only the types' names are looked at.

    LOCAL_CLUSTER_ID and TRIO_FEDERATION_SECRET are looked up in `environ` and win over the file; empty ones count as
    unset, and for a file with nothing but a hub they are not looked up at all. Raises ConfigurationError with every
    fault that there is: a line each, which names file, table and key, and holds no secret."""
    path = Path(path)
    document = _parse(path)
    reader = _Reader(str(path), path.parent, plugin_faults or {})
    if agent_is_configured(document) or "hub" not in document:
        reader.cluster_id = environ.get(CLUSTER_ID_VARIABLE) or None
        reader.secret = environ.get(SECRET_VARIABLE) or None
        if reader.cluster_id is None and not agent_is_configured(document):
            reader.faults.append(
                f"{path}: sets up neither an agent nor a hub; add cluster_id and [federation], or [hub]"
            )
        # So that its rules run, and the environment's secret finds its place, also where the file leaves the table out.
        document.setdefault("federation", {})
    tables: Tables = reader.table(Tables, document, "")
    for kind, known in _fields(Tables).items():
        if _is_plugins(known.type) and (faults_of := reader.plugin_faults.get(kind)) is not None:
            found: Any = getattr(tables, kind)
            for table in found if _good(found) else ():
                if _good(table):
                    reader.faults += [f"{path}: {line}" for line in faults_of(table)]
    if reader.faults:
        raise ConfigurationError(reader.faults)
    return Config(**msgspec.structs.asdict(tables), path=path, warnings=tuple(_warnings(str(path), tables)))


def _warnings(file: str, tables: Tables) -> Iterator[str]:
    """What is allowed and yet should be known, a line each."""
    federation, hub = tables.federation, tables.hub
    missing = []
    if tables.cluster_id is None:
        missing.append(f"no cluster_id (or {CLUSTER_ID_VARIABLE})")
    if not _has_credential(federation):
        missing.append(f"no credential (secret_file, secret, {SECRET_VARIABLE} or a client certificate)")
    if federation.hubs and missing:
        text = f"not used, the agent runs single-cluster: there is {' and '.join(missing)}"
        yield f"{file}: [federation] hubs: {text}"
    if federation.report_interval > federation.ttl / 2:
        text = f"{show_duration(federation.report_interval)} is more than half of ttl, {show_duration(federation.ttl)}"
        yield f"{file}: [federation] report_interval: {text}: what polled sources report may expire between two reports"
    if hub is not None and "shared" in hub.accept:
        text = "every holder of the shared secret can speak for any cluster; give it to nobody who should not"
        yield f"{file}: [hub] accept: {text}"
    ways = hub.accept if hub is not None else ()
    if hub is not None and hub.makes_tokens:
        secrets = {"secret" if hub.secret_file is None else "secret_file": hub.secret}
        with suppress(ValueError):  # which is a fault of the file, and told with those of others
            if hub.next_secret_file is not None:
                secrets["next_secret_file"] = read_next_secret_file(hub.next_secret_file)
        for key, secret in secrets.items():
            if (weakness := weak_secret(secret)) is not None:
                yield f"{file}: [hub] {key}: {weakness}"
    for way in ways:
        weaker = next((part for part in way.split("+") if part != way and part in ways), None)
        if weaker is not None:
            yield f'{file}: [hub] accept: "{weaker}" counts alone, too, so that "{way}" asks nobody for more'
    named = hub is not None and hub.tls is not None and hub.tls.cluster_san is not None
    if named and not any("certificate" in way for way in ways):
        text = 'not used, a certificate proves no cluster: there is no "certificate" in [hub] accept'
        yield f"{file}: [hub.tls] cluster_san: {text}"


def describe(config: Config) -> list[tuple[str, str]]:
    """A loaded configuration for people: (key path, value) in the model's order, no secrets or plugins' options."""
    parts = [name for name, there in (("agent", config.has_agent), ("hub", config.hub is not None)) if there]
    rows = [("file", str(config.path or "none")), ("runs", " and ".join(parts) or "nothing")]
    if config.has_agent:
        rows.append(("mode", "federated" if config.enabled else "single-cluster"))
    hidden = () if config.has_agent else _AGENTS_OWN
    return rows + [row for row in _rows(Tables, config, "") if row[0].partition(".")[0] not in hidden]


def _rows(kind: type[msgspec.Struct], table: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for name, known in _fields(kind).items():
        value, key = getattr(table, name), f"{prefix}{name}"
        inner, written = _unwrap(known.type)
        if get_origin(inner) is tuple:
            inner, written = _unwrap(get_args(inner)[0])
        items = value if isinstance(value, tuple) else (value,)
        if value is None:
            yield key, "not set"
        elif _is_table(inner) and isinstance(value, tuple) and value:
            for index, each in enumerate(value):
                yield from _rows(inner, each, f"{key}[{index}].")
        elif _is_table(inner) and value != ():
            yield from _rows(inner, value, f"{key}.")
        elif inner is PluginTable and items:
            for each in items:
                options = f" ({', '.join(each.options)})" if each.options else ""
                yield each.key_path or key, each.type + options
        else:
            show = written.show if written is not None else str
            shown = [str(each).lower() if isinstance(each, bool) else show(each) for each in items]
            yield key, ", ".join(shown) or "none"

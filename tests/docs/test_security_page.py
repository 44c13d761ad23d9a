"""docs/security.md says of credentials, policy and defaults what the code does."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from trio_federation.capacity import Capacity
from trio_federation.config import MOST, Limits, PolicySettings, load, read_secret_file
from trio_federation.credentials import make_token, read_token
from trio_federation.errors import ConfigurationError, PermissionDenied, RpcError, Unauthenticated
from trio_federation.events import EVENTS
from trio_federation.identity import Trusted, call_metadata, identify
from trio_federation.metrics import catalogue
from trio_federation.policy import REASONS, Policies
from trio_federation.reload import REREAD_INTERVAL
from trio_federation.rpc.sockets import HANDSHAKE_DEADLINE

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "security.md"
TEXT = PAGE.read_text(encoding="utf-8")
CODE = re.findall(r"(?<!`)`([^`\n]+)`", TEXT)


def section(heading: str) -> str:
    """What stands under a heading."""
    begin = TEXT.index(f"\n## {heading}\n")
    return TEXT[begin : TEXT.find("\n## ", begin + 1)]


def rows(part: str) -> Iterator[list[str]]:
    """The rows of the tables of a part, without their heads."""
    for line in part.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


# What it names.


def test_events_and_metrics_exist() -> None:
    events = {name for part in EVENTS.values() for name in part}
    metrics = {family.name for family in vars(catalogue).values() if isinstance(family, catalogue.Family)}
    told = [*rows(section("What is told and counted"))][1:]
    assert len(told) >= 8
    for what, logged, counted in told:
        assert set(re.findall(r"`(\w+)`", logged)) <= events, what
        assert set(re.findall(r"`(\w+)`", counted)) <= metrics, what
    assert {name for name in CODE if name.startswith("trio_federation_")} <= metrics


def test_every_event_of_this_is_named() -> None:
    about = {
        name
        for part in EVENTS.values()
        for name in part
        if re.search("credential|refused|policy|reload|deny|certificate|handshake|call_ended", name)
    }
    assert about - set(CODE) == set()


def test_numbers() -> None:
    assert (REREAD_INTERVAL, HANDSHAKE_DEADLINE) == (2.0, 5.0)
    assert "every two seconds" in TEXT
    assert "a TLS handshake has five seconds" in TEXT
    for name in ("connections", "first_message"):
        assert name in Limits.__struct_fields__
        assert f"`{name}`" in TEXT


# The credentials.


def test_the_form_of_a_token() -> None:
    assert "`tf1.CLUSTER.SERIAL.MAC`" in TEXT
    token = read_token(make_token("s" * 64, "west", 3))
    assert token is not None
    assert make_token("s" * 64, "west", 3) == f"tf1.west.3.{token.mac}"


def test_who_has_what_can_do_what() -> None:
    """Of the table's rows, those that are about a call to a hub."""
    secret = "s" * 64
    token = make_token(secret, "west", 3)
    shared, by_token = Trusted(("shared",), (secret,)), Trusted(("token",), (secret,))
    assert identify(dict(call_metadata("any", "0a", secret)), (), shared).cluster_id == "any"
    assert identify(dict(call_metadata("west", "0a", token)), (), by_token).credential == "token 3"
    refused: list[tuple[type[RpcError], str, str | None, Trusted]] = [
        (Unauthenticated, "west", None, shared),
        (Unauthenticated, "west", token, shared),
        (Unauthenticated, "west", secret, by_token),
        (PermissionDenied, "east", token, by_token),
        (Unauthenticated, "west", token, Trusted(("token",), ("another" * 9,))),
    ]
    for error, cluster_id, credential, trusted in refused:
        with pytest.raises(error):
            identify(dict(call_metadata(cluster_id, "0a", credential)), (), trusted)


# The policy.


def policies() -> Policies:
    """Those of the example."""
    [text] = re.findall(r"^```toml\n(.*?)^```", TEXT, re.M | re.S)
    tables = tomllib.loads(text)["hub"]["policy"]
    return Policies(msgspec.convert(tables, list[PolicySettings]))


def record(cluster: str, env: str, idle: int = 0) -> Capacity:
    namespace, _, name = env.partition("/")
    return Capacity(cluster, namespace, name, "pool", idle=idle)


def admitted(cluster: str, env: str, idle: int, held: int = 0) -> tuple[list[int], list[str]]:
    """The idle of what is left of a report with one record, and the reasons that are counted."""
    found = policies().of(cluster).admit([record(cluster, env, idle)], held, lambda _: False)
    return [change.idle for change in found.changes if isinstance(change, Capacity)], list(found.breaches)


def test_the_example_of_a_policy() -> None:
    shown = {what: counted.strip("`") for what, _, counted in rows(section("What a cluster may say and see"))}
    assert set(shown.values()) == {"", "counted as", *REASONS}
    assert admitted("west", "team-a/python", 40) == ([40], [])
    assert admitted("lab", "lab/python", MOST) == ([20], ["idle_cut"])
    assert str(MOST) in TEXT
    assert admitted("lab", "team-a/python", 1) == ([], ["env_not_allowed"])
    assert admitted("west", "team-a/python", 1, held=1999) == ([1], [])
    assert admitted("west", "team-a/python", 1, held=2000) == ([], ["too_many_records"])
    assert admitted("north", "team-a/python", 1) == ([], ["env_not_allowed"])
    assert policies().of("lab").may_see("shared", "python-3")
    assert not policies().of("lab").may_see("team-a", "python")
    assert not policies().of("north").may_see("shared", "python-3")
    assert Policies(()).of("any").unrestricted
    assert Policies(()).of("any").sees_all


# What is refused at the start.

SECRET = f'secret = "{"s" * 32}"'
LOOPBACK = 'bind = "127.0.0.1:7443"'
HUB = f"[hub]\n{LOOPBACK}\n{SECRET}\n"
WIDE_HUB = f'[hub]\nbind = "0.0.0.0:7443"\n{SECRET}\n'
AGENT = 'cluster_id = "west"\n[[source]]\ntype = "fixtures"\n'
FAR_AGENT = f'{AGENT}[federation]\nhubs = ["hub.example:7443"]\n{SECRET}\n'


@pytest.mark.parametrize(
    "text, fault",
    [
        (WIDE_HUB, "would travel in plain text"),
        (FAR_AGENT, "would travel in plain text"),
        (f'{AGENT}[admin]\nbind = "0.0.0.0:9465"\n', r"no token_file and no \[admin.tls\]"),
        (f"[hub]\n{LOOPBACK}\n", "agents prove themselves by it"),
        (f'[hub]\n{LOOPBACK}\nsecret = ""\n', "is empty"),
        (f'[hub]\n{LOOPBACK}\nsecret = "{make_token("s", "west")}"\n', "holds a token"),
        (f'{AGENT}[federation]\nsecret = "{make_token("s", "east")}"\n', "is the token of 'east'"),
        (f"{HUB}accept = []\n", "no agent could connect"),
        (f'{HUB}accept = ["certificate"]\n', "no client_ca_file and no cluster_san"),
    ],
)
def test_what_is_refused(text: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        load(written(text, tmp_path), {})


@pytest.mark.parametrize(
    "text",
    [
        f"{WIDE_HUB}insecure = true\n",
        f"{FAR_AGENT}insecure = true\n",
        f'{HUB}accept = ["token"]\n',
        f'{AGENT}[admin]\nbind = "127.0.0.1:9465"\n',
    ],
)
def test_what_is_not(text: str, tmp_path: Path) -> None:
    """So that the test above fails for the reason that it says."""
    load(written(text, tmp_path), {})


def test_what_is_open_by_default(tmp_path: Path) -> None:
    config = load(written(HUB, tmp_path), {})
    assert config.hub is not None
    assert (config.hub.accept, config.hub.policy, config.admin.token) == (("shared",), (), None)
    assert config.admin.bind.is_loopback
    assert config.metrics.bind.is_loopback
    assert any("every holder of the shared secret" in warning for warning in config.warnings)


def written(text: str, folder: Path) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_secret_that_is_advised_can_be_read(tmp_path: Path) -> None:
    """`openssl rand -hex 32` gives 64 digits and a line break."""
    assert "openssl rand -hex 32" in TEXT
    (tmp_path / "secret").write_text("0f" * 32 + "\n")
    assert read_secret_file(str(tmp_path / "secret")).reveal() == "0f" * 32

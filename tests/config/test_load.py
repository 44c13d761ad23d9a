"""What a configuration file becomes: the values, the environment's part, the warnings, and what `describe` shows."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation.capacity import is_label, is_subdomain
from trio_federation.config import (
    Admin,
    AdminTls,
    Backplane,
    Config,
    Endpoint,
    Federation,
    HubSettings,
    HubTls,
    Limits,
    Log,
    Metrics,
    PlacementSettings,
    PluginTable,
    PolicySettings,
    Secret,
    Tls,
    agent_is_configured,
    describe,
    load,
    show_duration,
)
from trio_federation.credentials import CertificateName, make_token
from trio_federation.errors import ConfigurationError
from trio_federation.reservations import Reservations

#: what a hub that takes certificates has
CERTIFICATES = (
    '[hub.tls]\ncert_file = "pem"\nkey_file = "pem"\nclient_ca_file = "pem"\ncluster_san = "DNS:{cluster}.example"\n'
)


def loaded(folder: Path, text: str, **environ: str) -> Config:
    path = folder / "agent.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, environ)


def faults(folder: Path, text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        loaded(folder, text, **environ)
    return caught.value.faults


def test_every_value_of_an_agent(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    for name in ("ca", "cert", "key"):
        (tmp_path / "tls" / name).write_text("PEM")
    (tmp_path / "secret").write_text("from the file\n")
    config = loaded(
        tmp_path,
        """
        cluster_id = "west"
        [federation]
        hubs = ["Hub-A.example:7443", "[2001:DB8:0::1]:1", "10.0.0.1:65535"]
        secret_file = "secret"
        ttl = "1m"
        report_interval = "200ms"
        resync_interval = "30s"
        keepalive = "1.5s"
        silence_limit = "1h"
        insecure = true
        [federation.tls]
        ca_file = "tls/ca"
        cert_file = "tls/cert"
        key_file = "tls/key"
        server_name = "hub.example"
        [[source]]
        type = "fixtures"
        path = "x.toml"
        [[source]]
        type = "other"
        deep = {list = [1, 2.5, 2024-01-01]}
        [[filter]]
        type = "hide"
        env = "x"
        [[filter]]
        type = "hide"
        [[sink]]
        type = "log"
        [placement]
        settle_time = "500ms"
        reservation_ttl = "1m"
        [metrics]
        bind = "0.0.0.0:0"
        [admin]
        bind = "[::1]:9000"
        [log]
        level = "debug"
        format = "json"
        """,
    )
    tls = Tls(
        ca_file=str(tmp_path / "tls" / "ca"),
        cert_file=str(tmp_path / "tls" / "cert"),
        key_file=str(tmp_path / "tls" / "key"),
        server_name="hub.example",
    )
    assert config.cluster_id == "west"
    assert config.federation == Federation(
        hubs=(Endpoint("hub-a.example", 7443), Endpoint("2001:db8::1", 1), Endpoint("10.0.0.1", 65535)),
        secret=Secret("from the file"),
        secret_file=str(tmp_path / "secret"),
        ttl=60.0,
        report_interval=0.2,
        resync_interval=30.0,
        keepalive=1.5,
        silence_limit=3600.0,
        insecure=True,
        tls=tls,
    )
    assert [(table.type, sorted(table.options), table.key_path) for table in config.source] == [
        ("fixtures", ["path"], "source[0]"),
        ("other", ["deep"], "source[1]"),
    ]
    assert config.source[0].options == {"path": "x.toml"}
    assert config.filter == (PluginTable("hide", {"env": "x"}, "filter[0]"), PluginTable("hide", {}, "filter[1]"))
    assert config.sink == (PluginTable("log", {}, "sink[0]"),)
    assert config.placement == PlacementSettings(settle_time=0.5, reservation_ttl=60.0)
    assert config.metrics.bind == Endpoint("0.0.0.0", 0)
    assert config.admin.bind == Endpoint("::1", 9000)
    assert config.log == Log(level="debug", format="json")
    assert config.hub is None
    assert config.path == tmp_path / "agent.toml"
    assert (config.has_agent, config.enabled, config.warnings) == (True, True, ())


def test_every_value_of_a_hub(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s\n")
    (tmp_path / "admin").write_text("sixteen letters!\n")
    (tmp_path / "pem").write_text("PEM")
    config = loaded(
        tmp_path,
        """
        [hub]
        bind = "127.0.0.1:0"
        ttl = "2m"
        grace = "20s"
        keepalive = "1s"
        silence_limit = "3s"
        insecure = true
        secret_file = "secret"
        next_secret_file = "next"
        deny_file = "tls/deny"
        accept = ["token", "certificate", "token+certificate", "shared+certificate"]
        [hub.limits]
        connections = 1
        streams = 2_147_483_647
        message_rate = 0x10
        record_rate = 3
        first_message = "500ms"
        [[hub.policy]]
        clusters = ["west", "east-1"]
        report = ["team-a/python", "team-b/*", "team-*/py*.v1"]
        see = []
        max_records = 0
        max_idle = 2147483647
        [[hub.policy]]
        clusters = ["*"]
        [hub.tls]
        cert_file = "pem"
        key_file = "pem"
        client_ca_file = "pem"
        cluster_san = "URI:spiffe://fleet.example/cluster/{cluster}/agent"
        [hub.backplane]
        type = "memory"
        [admin]
        bind = "0.0.0.0:1"
        token_file = "admin"
        [admin.tls]
        cert_file = "pem"
        key_file = "pem"
        """,
    )
    pem = str(tmp_path / "pem")
    assert config.hub == HubSettings(
        bind=Endpoint("127.0.0.1", 0),
        ttl=120.0,
        grace=20.0,
        keepalive=1.0,
        silence_limit=3.0,
        insecure=True,
        secret=Secret("s"),
        secret_file=str(tmp_path / "secret"),
        next_secret_file=str(tmp_path / "next"),
        deny_file=str(tmp_path / "tls" / "deny"),
        accept=("token", "certificate", "token+certificate", "shared+certificate"),
        limits=Limits(connections=1, streams=2**31 - 1, message_rate=16, record_rate=3, first_message=0.5),
        policy=(
            PolicySettings(
                clusters=("west", "east-1"),
                report=("team-a/python", "team-b/*", "team-*/py*.v1"),
                see=(),
                max_records=0,
                max_idle=2**31 - 1,
            ),
            PolicySettings(clusters=("*",), report=("*/*",), see=("*/*",), max_records=None, max_idle=None),
        ),
        tls=HubTls(
            cert_file=pem,
            key_file=pem,
            client_ca_file=pem,
            cluster_san=CertificateName("URI", "spiffe://fleet.example/cluster/", "/agent"),
        ),
        backplane=Backplane(type="memory"),
    )
    assert config.admin == Admin(
        bind=Endpoint("0.0.0.0", 1),
        token=Secret("sixteen letters!"),
        token_file=str(tmp_path / "admin"),
        tls=AdminTls(cert_file=pem, key_file=pem),
    )
    assert (config.has_agent, config.enabled) == (False, False)


def test_defaults_are_those_of_the_design() -> None:
    federation, hub = Federation(), HubSettings()
    assert (federation.ttl, federation.report_interval, federation.resync_interval) == (30.0, 5.0, 10.0)
    assert (federation.keepalive, federation.silence_limit, federation.insecure) == (5.0, 15.0, False)
    assert (hub.ttl, hub.grace, hub.keepalive, hub.silence_limit, hub.insecure) == (60.0, 10.0, 5.0, 15.0, False)
    assert (str(hub.bind), hub.accept, hub.backplane.type) == ("0.0.0.0:7443", ("shared",), "memory")
    assert (str(Metrics().bind), str(Admin().bind)) == ("127.0.0.1:9464", "127.0.0.1:9465")
    assert (Log().level, Log().format) == ("info", "auto")
    assert (hub.policy, hub.next_secret_file, hub.deny_file, Admin().token, Admin().tls) == ((), None, None, None, None)
    limits = hub.limits
    assert (limits.connections, limits.streams, limits.first_message) == (256, 16, 15.0)
    assert (limits.message_rate, limits.record_rate) == (100, 20_000)


def test_hub_with_tls_may_be_bound_wide(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("PEM")
    (tmp_path / "key").write_text("PEM")
    config = loaded(tmp_path, '[hub]\nsecret = "s"\ntls = {cert_file = "cert", key_file = "key"}')
    assert config.hub is not None
    assert config.hub.tls is not None
    assert config.hub.tls.cert_file == str(tmp_path / "cert")
    assert config.hub.tls.client_ca_file is None
    assert config.hub.tls.cluster_san is None


@pytest.mark.parametrize("accept", ['["certificate"]', '["certificate", "certificate"]'])
def test_certificates_alone_need_no_secret(tmp_path: Path, accept: str) -> None:
    (tmp_path / "pem").write_text("PEM")
    config = loaded(tmp_path, f"[hub]\naccept = {accept}\n{CERTIFICATES}")
    assert config.hub is not None
    assert (config.hub.secret, config.warnings) == (None, ())


@pytest.mark.parametrize("accept", ["shared", "token"])
def test_the_next_secret_and_the_deny_list_need_not_be_there_to_load(tmp_path: Path, accept: str) -> None:
    """They are read while the hub runs, again and again; whether that works is told when it starts."""
    text = f'[hub]\nsecret = "s"\nbind = "[::1]:1"\naccept = ["{accept}"]\n'
    config = loaded(tmp_path, f'{text}next_secret_file = "gone"\ndeny_file = "gone"')
    assert config.hub is not None
    assert config.hub.deny_file == config.hub.next_secret_file == str(tmp_path / "gone")


def test_an_agents_own_token_is_its_secret(tmp_path: Path) -> None:
    token = make_token("s", "west", 7)
    (tmp_path / "token").write_text(f"{token}\n")
    written = ['secret_file = "token"', f'secret = "{token}"']
    for text in written:
        config = loaded(tmp_path, f'cluster_id = "west"\n[federation]\nhubs = ["[::1]:1"]\n{text}')
        assert (config.federation.secret, config.enabled) == (Secret(token), True)
    config = loaded(tmp_path, 'cluster_id = "west"', TRIO_FEDERATION_SECRET=token)
    assert config.federation.secret == Secret(token)
    # Without an id, there is no other cluster that it could be of.
    assert loaded(tmp_path, f'[federation]\nsecret = "{token}"').federation.secret == Secret(token)


@pytest.mark.parametrize("length", [16, 4096])
def test_admin_tokens(tmp_path: Path, length: int) -> None:
    (tmp_path / "token").write_text("x" * length + "\r\n")
    for text in ('token_file = "token"', f'token = "{"x" * length}"'):
        config = loaded(tmp_path, f'cluster_id = "a"\n[admin]\n{text}')
        assert config.admin.token == Secret("x" * length)


@given(st.from_regex(r"[-a-z0-9.*]{1,8}/[-a-z0-9.*]{1,8}", fullmatch=True))
def test_patterns_are_good_if_something_fits_them(tmp_path_factory: pytest.TempPathFactory, pattern: str) -> None:
    """Told by what "*" may stand for, up to two characters of it, instead of by a rule."""

    def could_be(half: str, is_one: Callable[[str], bool]) -> bool:
        texts = [""]
        for character in half:
            fills = ("", "a", "-", ".", "a.", ".a") if character == "*" else (character,)
            texts = [text + fill for text in texts for fill in fills]
        return any(map(is_one, texts))

    namespace, _, env = re.sub(r"\*+", "*", pattern).partition("/")
    wanted = could_be(namespace, is_label) and could_be(env, is_subdomain)
    text = f'[hub]\nsecret = "s"\nbind = "[::1]:1"\n[[hub.policy]]\nclusters = ["*"]\nsee = ["{pattern}"]'
    folder = tmp_path_factory.getbasetemp()
    if wanted:
        assert loaded(folder, text).hub is not None
    else:
        (found,) = faults(folder, text)
        assert "is not NAMESPACE/ENV" in found


def test_listeners_may_share_port_0_which_is_any_free_one(tmp_path: Path) -> None:
    config = loaded(tmp_path, 'cluster_id = "a"\nmetrics.bind = "127.0.0.1:0"\nadmin.bind = "127.0.0.1:0"')
    assert config.metrics.bind == config.admin.bind


def test_byte_order_mark_and_windows_line_breaks_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_bytes(b'\xef\xbb\xbfcluster_id = "west"\r\n[log]\r\nlevel = "error"\r\n')
    config = load(str(path), {})
    assert (config.cluster_id, config.log.level) == ("west", "error")


@pytest.mark.parametrize(
    "written, secret",
    [
        (b"abc", "abc"),
        (b"abc\n", "abc"),
        (b"abc\r\n", "abc"),
        (b"a b~!\n", "a b~!"),
        (b"x" * 4096 + b"\r\n", "x" * 4096),
    ],
)
def test_secret_file_loses_one_line_break(tmp_path: Path, written: bytes, secret: str) -> None:
    (tmp_path / "secret").write_bytes(written)
    config = loaded(tmp_path, '[federation]\nsecret_file = "secret"')
    assert config.federation.secret == Secret(secret)


def test_environment_wins_over_the_file(tmp_path: Path) -> None:
    text = 'cluster_id = "west"\n[federation]\nhubs = ["localhost:1"]\nsecret = "file"'
    environ = {"LOCAL_CLUSTER_ID": "east", "TRIO_FEDERATION_SECRET": "env", "TTL": "1s", "TRIO_FEDERATION_TTL": "1s"}
    config = loaded(tmp_path, text, **environ)
    assert (config.cluster_id, config.federation.secret, config.federation.ttl) == ("east", Secret("env"), 30.0)
    config = loaded(tmp_path, text, LOCAL_CLUSTER_ID="", TRIO_FEDERATION_SECRET="")
    assert (config.cluster_id, config.federation.secret) == ("west", Secret("file"))


def test_environment_spares_the_secret_file(tmp_path: Path) -> None:
    config = loaded(tmp_path, '[federation]\nsecret_file = "gone"', TRIO_FEDERATION_SECRET="env")
    assert config.federation.secret == Secret("env")


def test_environment_alone_makes_an_agent(tmp_path: Path) -> None:
    config = loaded(tmp_path, "", LOCAL_CLUSTER_ID="west", TRIO_FEDERATION_SECRET="env")
    assert (config.cluster_id, config.federation.secret, config.has_agent) == ("west", Secret("env"), True)


def test_environment_does_not_touch_a_file_with_nothing_but_a_hub(tmp_path: Path) -> None:
    text = '[hub]\nbind = "localhost:1"\nsecret = "file"\n[metrics]\nbind = "localhost:2"'
    config = loaded(tmp_path, text, LOCAL_CLUSTER_ID="Not A Label", TRIO_FEDERATION_SECRET="env")
    assert (config.has_agent, config.cluster_id, config.federation) == (False, None, Federation())
    assert config.hub is not None
    assert config.hub.secret == Secret("file")
    both = loaded(tmp_path, text + "\n[federation]", LOCAL_CLUSTER_ID="west", TRIO_FEDERATION_SECRET="env")
    assert (both.has_agent, both.cluster_id) == (True, "west")
    assert both.hub is not None
    assert both.hub.secret == Secret("file")


def test_bad_environment_is_named_and_not_shown(tmp_path: Path) -> None:
    found = faults(tmp_path, 'cluster_id = "west"', LOCAL_CLUSTER_ID="West\n", TRIO_FEDERATION_SECRET="hunter2\n")
    assert [line.split(": ")[:2] for line in found] == [
        ["environment", "TRIO_FEDERATION_SECRET"],
        ["environment", "LOCAL_CLUSTER_ID"],
    ]
    assert "hunter2" not in "".join(found)
    assert not any("\n" in line for line in found)


#: long enough that nobody guesses it
LONG = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    "text, enabled, words",
    [
        ('cluster_id = "a"\n[federation]\nhubs = ["[::1]:1"]\nsecret = "s"', True, []),
        ('cluster_id = "a"\n[federation]\nsecret = "s"', False, []),
        ('cluster_id = "a"', False, []),
        ('cluster_id = "a"\n[federation]\nhubs = ["[::1]:1"]', False, ["hubs", "credential", "single-cluster"]),
        ('[federation]\nhubs = ["[::1]:1"]\nsecret = "s"', False, ["hubs", "cluster_id", "single-cluster"]),
        ('[federation]\nhubs = ["[::1]:1"]', False, ["hubs", "cluster_id", "credential", "single-cluster"]),
        ('cluster_id = "a"\n[federation]\nttl = "9s"\nresync_interval = "1s"', False, ["report_interval", "9s"]),
        ('[hub]\nsecret = "s"\nbind = "localhost:1"', False, ["[hub] accept", "any cluster"]),
        ('[hub]\nsecret = "' + LONG + '"\nbind = "localhost:1"\naccept = ["token"]', False, []),
        ('[hub]\nsecret = "' + LONG + '"\nbind = "localhost:1"\naccept = ["token", "shared"]', False, ["any cluster"]),
        ('[hub]\nsecret = "' + LONG + '"\naccept = ["shared+certificate"]\n' + CERTIFICATES, False, []),
        ('[hub]\nsecret = "' + LONG + '"\naccept = ["token", "certificate"]\n' + CERTIFICATES, False, []),
        (
            '[hub]\nsecret = "' + LONG + '"\naccept = ["token+certificate", "certificate"]\n' + CERTIFICATES,
            False,
            ["[hub] accept", '"certificate" counts alone', '"token+certificate" asks nobody for more'],
        ),
        (
            '[hub]\nsecret = "' + LONG + '"\naccept = ["token"]\n' + CERTIFICATES,
            False,
            ["[hub.tls] cluster_san: not used", '"certificate" in [hub] accept'],
        ),
        ('[hub]\nsecret = "s"\nbind = "localhost:1"\naccept = ["token"]', False, ["[hub] secret", "32", "openssl"]),
    ],
)
def test_warnings(tmp_path: Path, text: str, enabled: bool, words: list[str]) -> None:
    (tmp_path / "pem").write_text("PEM")
    config = loaded(tmp_path, text)
    assert config.enabled is enabled
    assert len(config.warnings) == (1 if words else 0)
    line = "".join(config.warnings)
    assert line.startswith(f"{tmp_path / 'agent.toml'}: [") or not words
    assert [word for word in words if word not in line] == []


SHORT = "x" * 31


@pytest.mark.parametrize(
    "secrets, weak",
    [
        ({"secret": SHORT}, ["secret"]),
        ({"secret_file": SHORT}, ["secret_file"]),
        ({"secret": LONG, "next_secret_file": SHORT}, ["next_secret_file"]),
        ({"secret_file": LONG, "next_secret_file": SHORT}, ["next_secret_file"]),
        ({"secret_file": SHORT, "next_secret_file": SHORT}, ["secret_file", "next_secret_file"]),
        ({"secret": SHORT, "next_secret_file": LONG}, ["secret"]),
        ({"secret_file": SHORT, "next_secret_file": ""}, ["secret_file"]),
        ({"secret_file": SHORT, "next_secret_file": None}, ["secret_file"]),
        ({"secret_file": LONG, "next_secret_file": LONG}, []),
        ({"secret_file": "x" * 32, "next_secret_file": "x" * 32}, []),
        ({"secret_file": LONG, "next_secret_file": ""}, []),
        ({"secret_file": LONG, "next_secret_file": None}, []),
    ],
)
@pytest.mark.parametrize(
    "accept", ['["token"]', '["token+certificate"]', '["certificate", "token"]', '["shared+certificate"]']
)
def test_short_secrets_are_warned_of_where_tokens_are_made_from_them(
    accept: str, secrets: dict[str, str | None], weak: list[str], tmp_path: Path
) -> None:
    """Each in its own place, the file's line break not counted; a file that is missing or empty holds none. Where no
    token counts nobody can try anything at home."""
    (tmp_path / "pem").write_text("PEM")
    keys = []
    for key, secret in secrets.items():
        if key != "secret" and secret is not None:
            (tmp_path / key).write_text(f"{secret}\n" if secret else "")
        keys.append(f'{key} = "{secret if key == "secret" else key}"\n')
    rest = CERTIFICATES if "certificate" in accept else 'bind = "localhost:1"\n'
    warnings = loaded(tmp_path, f"[hub]\naccept = {accept}\n{''.join(keys)}{rest}").warnings
    assert list(warnings) == [
        f"{tmp_path / 'agent.toml'}: [hub] {key}: is shorter than 32 characters: whoever has a token can try, at home, "
        "what it was made from; make another one with: openssl rand -hex 32"
        for key in (weak if "token" in accept else [])
    ]


@pytest.mark.parametrize("secrets", ['secret_file = "s"\n', 'secret = "s"\nnext_secret_file = "s"\n'])
def test_a_short_shared_secret_is_not_warned_of_as_one_that_tokens_are_made_from(secrets: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text(SHORT)
    (warning,) = loaded(tmp_path, f'[hub]\nbind = "localhost:1"\naccept = ["shared"]\n{secrets}').warnings
    assert "[hub] accept" in warning


def test_client_certificate_is_a_credential(tmp_path: Path) -> None:
    for name in ("cert", "key"):
        (tmp_path / name).write_text("PEM")
    tls = '[federation.tls]\ncert_file = "cert"\nkey_file = "key"'
    config = loaded(tmp_path, f'cluster_id = "a"\n[federation]\nhubs = ["hub.example:1"]\n{tls}')
    assert (config.enabled, config.warnings) == (True, ())


@pytest.mark.parametrize(
    "config, has_agent",
    [
        (Config(), False),
        (Config(hub=HubSettings(), metrics=Metrics(bind=Endpoint("::1", 1)), log=Log(level="debug")), False),
        (Config(cluster_id="a"), True),
        (Config(source=(PluginTable("x"),)), True),
        (Config(filter=(PluginTable("x"),)), True),
        (Config(sink=(PluginTable("x"),)), True),
        (Config(federation=Federation(hubs=(Endpoint("a", 1),))), True),
        (Config(placement=PlacementSettings(settle_time=1.0)), True),
    ],
)
def test_has_agent(config: Config, has_agent: bool) -> None:
    assert config.has_agent is has_agent


def test_agent_is_configured() -> None:
    assert not agent_is_configured({"hub": {}, "metrics": {}, "admin": {}, "log": {}})
    agents = ("cluster_id", "federation", "source", "filter", "sink", "placement")
    assert all(agent_is_configured({"hub": {}, key: ""}) for key in agents)


@pytest.mark.parametrize(
    "endpoint, loopback, text",
    [
        (Endpoint("127.0.0.1", 1), True, "127.0.0.1:1"),
        (Endpoint("127.9.9.9", 1), True, "127.9.9.9:1"),
        (Endpoint("::1", 7443), True, "[::1]:7443"),
        (Endpoint("localhost", 1), True, "localhost:1"),
        (Endpoint("localhost.", 1), True, "localhost.:1"),
        (Endpoint("0.0.0.0", 1), False, "0.0.0.0:1"),
        (Endpoint("::", 1), False, "[::]:1"),
        (Endpoint("hub.example", 1), False, "hub.example:1"),
        (Endpoint("localhost.example", 1), False, "localhost.example:1"),
        (Endpoint("127.0.0.1.example", 1), False, "127.0.0.1.example:1"),
    ],
)
def test_endpoints(endpoint: Endpoint, loopback: bool, text: str) -> None:
    assert (endpoint.is_loopback, str(endpoint)) == (loopback, text)


@given(st.sampled_from(["a", "hub-1.example", "10.1.2.3", "2001:db8::7", "::1"]), st.integers(1, 65535))
def test_endpoints_survive_being_written(tmp_path_factory: pytest.TempPathFactory, host: str, port: int) -> None:
    endpoint = Endpoint(host, port)
    folder = tmp_path_factory.getbasetemp()
    config = loaded(folder, f'[federation]\ninsecure = true\nhubs = ["{endpoint}"]')
    assert config.federation.hubs == (endpoint,)


@given(st.integers(1, 24 * 3600 * 1000))
def test_durations_survive_being_written(tmp_path_factory: pytest.TempPathFactory, milliseconds: int) -> None:
    written = (f"{milliseconds}ms", f"{milliseconds / 1000:.3f}s")
    for text in written:
        config = loaded(tmp_path_factory.getbasetemp(), f'[hub]\nsecret = "s"\nbind = "[::1]:1"\nttl = "{text}"')
        assert config.hub is not None
        assert config.hub.ttl == pytest.approx(milliseconds / 1000, rel=1e-12)


@pytest.mark.parametrize(
    "seconds, text",
    [(0.001, "1ms"), (0.2, "200ms"), (1.5, "1.5s"), (5.0, "5s"), (60.0, "1m"), (90.0, "90s"), (86400.0, "24h")],
)
def test_durations_are_shown_as_written(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text


def test_secret_is_never_shown() -> None:
    secret = Secret("hunter2")
    config = Config(
        federation=Federation(secret=secret), hub=HubSettings(secret=secret), admin=Admin(token=Secret("hunter2" * 3))
    )
    source = Config(source=(PluginTable("x", {"token": "hunter2"}, "source[0]"),))
    shown = [str(secret), repr(secret), f"{secret}", f"{secret!r:>20}", repr([secret]), repr(config), repr(source)]
    shown += [str(describe(config)), str(describe(source))]
    assert [text for text in shown if "hunter2" in text] == []
    for encode in (msgspec.json.encode, msgspec.to_builtins):
        with pytest.raises(TypeError):
            encode(secret)
    assert secret.reveal() == "hunter2"


def test_secrets_compare_by_their_text() -> None:
    secret = Secret("a")
    assert secret == Secret("a")
    assert secret != Secret("b")
    assert secret != "a"
    assert len({secret, Secret("a"), Secret("b")}) == 2
    assert copy.deepcopy(secret) == secret
    assert pickle.loads(pickle.dumps(secret)) == secret  # noqa: S301 - made in the same line


def test_describe(tmp_path: Path) -> None:
    (tmp_path / "pem").write_text("PEM")
    config = loaded(
        tmp_path,
        """
        cluster_id = "west"
        federation = {hubs = ["[::1]:1", "localhost:2"], secret = "hunter2"}
        admin = {token = "hunter2 hunter2 hunter2"}
        [hub]
        bind = "[::1]:1"
        secret = "hunter2"
        accept = ["shared", "token+certificate"]
        [hub.tls]
        cert_file = "pem"
        key_file = "pem"
        client_ca_file = "pem"
        cluster_san = "DNS:agent-{cluster}.example"
        [[hub.policy]]
        clusters = ["west", "east"]
        report = []
        max_idle = 5
        [[hub.policy]]
        clusters = ["*"]
        [[source]]
        type = "fixtures"
        path = "x"
        [[filter]]
        type = "first"
        [[filter]]
        type = "second"
        only = ["a"]
        token = "hunter2"
        """,
    )
    rows = describe(config)
    assert "hunter2" not in str(rows)
    assert len(dict(rows)) == len(rows)
    expected = {
        "file": str(tmp_path / "agent.toml"),
        "runs": "agent and hub",
        "mode": "federated",
        "cluster_id": "west",
        "federation.hubs": "[::1]:1, localhost:2",
        "federation.secret": "set, not shown",
        "federation.secret_file": "not set",
        "federation.ttl": "30s",
        "federation.insecure": "false",
        "federation.tls": "not set",
        "source[0]": "fixtures (path)",
        "filter[0]": "first",
        "filter[1]": "second (only, token)",
        "sink": "none",
        "placement.settle_time": "2s",
        "placement.reservation_ttl": "10s",
        "placement.ranking": "left",
        "metrics.bind": "127.0.0.1:9464",
        "admin.token": "set, not shown",
        "admin.tls": "not set",
        "hub.deny_file": "not set",
        "hub.accept": "shared, token+certificate",
        "hub.limits.streams": "16",
        "hub.limits.first_message": "15s",
        "hub.policy[0].clusters": "west, east",
        "hub.policy[0].report": "none",
        "hub.policy[0].see": "*/*",
        "hub.policy[0].max_records": "not set",
        "hub.policy[0].max_idle": "5",
        "hub.policy[1].clusters": "*",
        "hub.tls.cluster_san": "DNS:agent-{cluster}.example",
        "hub.backplane.type": "memory",
        "log.level": "info",
    }
    assert {key: value for key, value in rows if key in expected} == expected


def test_a_reservation_may_last_as_long_as_a_create_takes_to_show(tmp_path: Path) -> None:
    config = loaded(tmp_path, 'cluster_id = "a"\n[placement]\nsettle_time = "3s"\nreservation_ttl = "3s"')
    assert config.placement == PlacementSettings(settle_time=3.0, reservation_ttl=3.0)
    Reservations(settle_time=config.placement.settle_time, ttl=config.placement.reservation_ttl)


def test_describe_of_a_hub_leaves_the_agent_out() -> None:
    rows = dict(describe(Config(hub=HubSettings(secret=Secret("s")))))
    assert (rows["runs"], rows["file"], rows["hub.policy"]) == ("hub", "none", "none")
    assert "mode" not in rows
    agents = ("cluster_id", "federation", "source", "filter", "sink", "placement")
    assert not [key for key in rows if key.startswith(agents)]
    assert dict(describe(Config(cluster_id="a")))["mode"] == "single-cluster"

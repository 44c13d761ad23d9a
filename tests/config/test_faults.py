"""What is refused: every fault of a file at once, a line each, which names file, table and key and says what to do."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from trio_federation.config import load, read_agent_secret_file, read_deny_file, read_hub_secret_file, read_secret_file
from trio_federation.credentials import DenyList, make_token
from trio_federation.errors import ConfigurationError

#: what a good file may begin with
AGENT = 'cluster_id = "west"\n[federation]\nsecret = "s"\n'
HUB = '[hub]\nsecret = "s"\nbind = "127.0.0.1:0"\n'
POLICY = HUB + '[[hub.policy]]\nclusters = ["west"]\n'
TOKEN = make_token("hunter2", "west", 3)
#: what a hub that takes certificates has; the file under test serves as all of the PEM files
CERTIFICATES = (
    "[hub.tls]\ncert_file = 'some.toml'\nkey_file = 'some.toml'\nclient_ca_file = 'some.toml'\n"
    "cluster_san = 'DNS:{cluster}.example'\n"
)


def faults(folder: Path, text: str | bytes, **environ: str) -> list[str]:
    """The faults, less the file's name, which each has to begin with."""
    path = folder / "some.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError) as caught:
        load(path, environ)
    assert str(caught.value) == "\n".join(caught.value.faults)
    start = f"{path}: "
    assert [line for line in caught.value.faults if not line.startswith((start, "environment: ")) or "\n" in line] == []
    return [line.removeprefix(start) for line in caught.value.faults]


def test_the_two_beginnings_are_good(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(AGENT + HUB)
    assert load(path, {}).warnings != ()


# One fault each: where it is, and words that its line has to have.
ONE_FAULT = [
    # unknown keys and tables (C44)
    (HUB + 'adress = "x"', "[hub] adress", ["unknown key", "bind"]),
    (HUB + "[registy]", "[registy]", ["unknown table", "federation", "hub"]),
    (HUB + 'resync_interval = "5s"', "[hub] resync_interval", ["unknown key", "belongs under [federation]"]),
    (HUB + 'kepalive = "5s"', "[hub] kepalive", ["unknown key", 'did you mean "keepalive"?']),
    (HUB + 'Keep-Alive = "5s"', "[hub] Keep-Alive", ['did you mean "keepalive"?']),
    (HUB + 'cluster_id = "x"', "[hub] cluster_id", ["belongs at the top of the file"]),
    (HUB + "[hub.source]", "[hub.source]", ["unknown table", "[[source]]"]),
    (HUB + "[hub.log]", "[hub.log]", ["unknown table", "as [log]"]),
    (HUB + "[hub.tsl]", "[hub.tsl]", ["unknown table", 'did you mean "tls"?']),
    (HUB + "[tls]", "[tls]", ["as [federation.tls] or to the file as [admin.tls] or to the file as [hub.tls]"]),
    (AGENT + 'hub = "x"', "[federation] hub", ['did you mean "hubs"', "[hub]"]),
    (AGENT + 'bind = "x"', "[federation] bind", ["under [metrics]", "under [admin]", "under [hub]"]),
    (AGENT + '[[sources]]\ntype = "x"', "sources", ["unknown key", "did you mean [[source]]?"]),
    (AGENT + '[[filtre]]\ntype = "x"', "filtre", ["unknown key", "did you mean [[filter]]?"]),
    (AGENT + '[filtre]\ntype = "x"', "[filtre]", ["unknown table", "did you mean [[filter]]?"]),
    (AGENT + 'filter = "x"', "[federation] filter", ["unknown key", "belongs to the file as [[filter]]"]),
    ('ttl = "5s"\n' + AGENT, "ttl", ["unknown key", "under [federation]", "under [hub]"]),
    (AGENT + "path = 1", "[federation] path", ["unknown key"]),
    (AGENT + "token = 'hunter2'", "[federation] token", ["unknown key; a token is given as secret"]),
    (AGENT + "token_file = 'x'", "[federation] token_file", ["unknown key; a token is given as secret_file"]),
    (HUB + "token = 'hunter2'", "[hub] token", ["unknown key", "as secret"]),
    (HUB + "token_file = 'x'", "[hub] token_file", ["unknown key", "as secret_file"]),
    (HUB + "next_secret = 'hunter2'", "[hub] next_secret", ["unknown key", "as next_secret_file"]),
    (HUB + "denyfile = 'x'", "[hub] denyfile", ['did you mean "deny_file"?']),
    (HUB + "next_secretfile = 'x'", "[hub] next_secretfile", ['did you mean "next_secret_file"?']),
    (HUB + "cluster_san = 'x'", "[hub] cluster_san", ["belongs under [hub.tls]"]),
    (HUB + "streams = 5", "[hub] streams", ["belongs under [hub.limits]"]),
    (HUB + "max_idle = 5", "[hub] max_idle", ["belongs under [[hub.policy]]"]),
    (AGENT + "deny_file = 'x'", "[federation] deny_file", ["or does it belong under [hub]?"]),
    (HUB + "[hub.limit]", "[hub.limit]", ["unknown table", 'did you mean "limits"?']),
    (HUB + "[hub.limits]\nstream = 5", "[hub.limits] stream", ["unknown key", 'did you mean "streams"?']),
    (HUB + "[hub.limits]\nrecords_rate = 5", "[hub.limits] records_rate", ['did you mean "record_rate"?']),
    (HUB + "[hub.limits]\nmax_records = 5", "[hub.limits] max_records", ["[[hub.policy]]"]),
    (HUB + "[limits]", "[limits]", ["unknown table", "as [hub.limits]"]),
    (HUB + "[[policy]]", "policy", ["unknown key", "as [[hub.policy]]"]),
    (HUB + "[policy]", "[policy]", ["unknown table", "as [[hub.policy]]"]),
    (HUB + "[[hub.polcy]]", "[hub] polcy", ["unknown key", "did you mean [[hub.policy]]?"]),
    (HUB + "[hub.polcy]", "[hub.polcy]", ["unknown table", "did you mean [[hub.policy]]?"]),
    (POLICY + "max_record = 5", "[hub.policy[0]] max_record", ["unknown key", 'did you mean "max_records"?']),
    (POLICY + "reports = []", "[hub.policy[0]] reports", ["unknown key", 'did you mean "report"?']),
    (POLICY + "[hub.policy.seen]", "[hub.policy[0].seen]", ["unknown table", 'did you mean "see"?']),
    (POLICY + "[hub.policy.see]", "[hub.policy[0]] see", ["expected an array, not a table"]),
    (HUB + "[admin]\ntokens = 'x'", "[admin] tokens", ["unknown key", 'did you mean "token"?']),
    (HUB + "[admin.tls]\ncert_file = 'some.toml'", "[admin.tls] key_file", ["is missing"]),
    (AGENT + "warnings = []", "[federation] warnings", ["unknown key"]),
    ('path = "x"\n' + AGENT, "path", ["unknown key"]),
    (AGENT + '"a\\nb" = 1', "[federation] 'a\\nb'", ["unknown key"]),
    (AGENT + f"{'k' * 1000} = 1", f"[federation] '{'k' * 60}…'", ["unknown key"]),
    # wrong types
    (AGENT + "hubs = 'x:1'", "[federation] hubs", ["expected an array, not a string"]),
    (AGENT + "hubs = ['[::1]:1', 5]", "[federation] hubs[1]", ["expected a string", "not a whole number"]),
    (AGENT + "ttl = 30", "[federation] ttl", ['"5s"', "not a whole number"]),
    (AGENT + "ttl = 30.0", "[federation] ttl", ['"5s"', "not a number"]),
    (AGENT + "ttl = nan", "[federation] ttl", ['"5s"', "not a number"]),
    (AGENT + "ttl = inf", "[federation] ttl", ['"5s"', "not a number"]),
    (AGENT + "ttl = 00:00:30", "[federation] ttl", ['"5s"', "not a date or time"]),
    (AGENT + "ttl = true", "[federation] ttl", ['"5s"', "not true or false"]),
    (AGENT + "insecure = 1", "[federation] insecure", ["expected true or false, not a whole number"]),
    (AGENT + "insecure = 'yes'", "[federation] insecure", ["expected true or false, not a string"]),
    (AGENT + "tls = true", "[federation] tls", ["expected a table, written as [federation.tls]"]),
    ("cluster_id = 7", "cluster_id", ['"west"', "not a whole number"]),
    ("federation = 5", "federation", ["expected a table, written as [federation], not a whole number"]),
    ("[[federation]]", "federation", ["expected a table", "not an array"]),
    ("cluster_id = 'a'\n[source]\ntype = 'x'", "source", ["each written as [[source]]", "not a table"]),
    ("cluster_id = 'a'\nsource = [1]", "[[source]] source[0]", ["[[source]]", "not a whole number"]),
    (AGENT + "[[source]]\ntype = 'a'\n[[source]]\ntype = 1", "[[source]] source[1].type", ["not a whole number"]),
    (AGENT + "[[source]]\ntype = 'a'\n[[source]]\npath = 'x'", "[[source]] source[1].type", ["missing", "type ="]),
    (AGENT + "[[sink]]\ntype = ''", "[[sink]] sink[0].type", ["empty"]),
    (AGENT + "[[filter]]\ntype = 'a'\n[[filter]]", "[[filter]] filter[1].type", ["missing", "type ="]),
    (AGENT + "[filter]\ntype = 'x'", "filter", ["each written as [[filter]]", "not a table"]),
    (HUB + "accept = 'shared'", "[hub] accept", ["expected an array, not a string"]),
    (HUB + "accept = [true]", "[hub] accept[0]", ["expected a string, not true or false"]),
    (HUB + "accept = [['shared']]", "[hub] accept[0]", ["expected a string, not an array"]),
    *[
        (HUB + f"[hub.limits]\n{key} = {value}", f"[hub.limits] {key}", ["expected a whole number", f"not {kind}"])
        for key in ("connections", "streams", "message_rate", "record_rate")
        for value, kind in {"true": "true or false", "1.0": "a number", "'5'": "a string", "[1]": "an array"}.items()
    ],
    *[
        (HUB + f"[hub.limits]\n{key} = {value}", f"[hub.limits] {key}", ["is not from 1 to 2147483647"])
        for key in ("connections", "streams", "message_rate", "record_rate")
        for value in ("0", "-1", "2147483648", "-9223372036854775809", f"0x{'f' * 5000}")
    ],
    (HUB + "[hub.limits]\nfirst_message = 15", "[hub.limits] first_message", ["a string such as", "a whole number"]),
    (HUB + "[hub.limits]\nfirst_message = '0s'", "[hub.limits] first_message", ["1ms to 24h"]),
    (HUB + "limits = 5", "[hub] limits", ["expected a table, written as [hub.limits], not a whole number"]),
    (HUB + "[hub.policy]\nclusters = ['a']", "[hub] policy", ["each written as [[hub.policy]], not a table"]),
    (HUB + "policy = 'x'", "[hub] policy", ["each written as [[hub.policy]], not a string"]),
    (HUB + "policy = [5]", "[hub] policy[0]", ["a table, written as [[hub.policy]], not a whole number"]),
    (HUB + "policy = [{clusters = ['a']}, true]", "[hub] policy[1]", ["written as [[hub.policy]], not true or false"]),
    (HUB + "[[hub.policy]]", "[hub.policy[0]] clusters", ["is missing"]),
    (HUB + "[[hub.policy]]\nclusters = []", "[hub.policy[0]] clusters", ["is empty", '"*"']),
    (HUB + "[[hub.policy]]\nclusters = 'west'", "[hub.policy[0]] clusters", ["expected an array, not a string"]),
    (HUB + "[[hub.policy]]\nclusters = ['a', 5]", "[hub.policy[0]] clusters[1]", ['"west"', "not a whole number"]),
    (HUB + "[[hub.policy]]\nclusters = ['West']", "[hub.policy[0]] clusters[0]", ["is not a cluster id"]),
    (HUB + "[[hub.policy]]\nclusters = ['we*']", "[hub.policy[0]] clusters[0]", ["is not a cluster id"]),
    (POLICY + "[[hub.policy]]\nclusters = ['a', 'west']", "[hub.policy[1]] clusters", ['"west" is in hub.policy[0]']),
    (
        HUB + "[[hub.policy]]\nclusters = ['*']\n[[hub.policy]]\nclusters = ['*']",
        "[hub.policy[1]] clusters",
        ['"*" is in hub.policy[0]'],
    ),
    *[
        (POLICY + f"{key} = {value}", f"[hub.policy[0]] {key}", [words])
        for key in ("max_records", "max_idle")
        for value, words in {
            "-1": "is not from 0 to 2147483647",
            "2147483648": "is not from 0 to 2147483647",
            f"0x{'f' * 5000}": "is not from 0 to 2147483647",
            "true": "expected a whole number, not true or false",
            "0.0": "expected a whole number, not a number",
            "'5'": "expected a whole number, not a string",
        }.items()
    ],
    *[
        (POLICY + f"{key} = [{text!r}]", f"[hub.policy[0]] {key}[0]", [repr(text)[:50], "is not NAMESPACE/ENV", "*/*"])
        for key in ("report", "see")
        for text in (
            *("", "*", "team-a", "/", "a/", "/a", "a/b/c", "Team/x", "a/B", "a b/c", "a/b ", "a_b/c", "wést/x"),
            # what no namespace, and no env, can be, whatever the * stands for
            *("team.a/x", "-*/x", "*-/x", "*/.*", "*/*.", "*/a..*", "a" * 64 + "/x", "x/" + "a" * 254),
        )
    ],
    (POLICY + "report = 'a/b'", "[hub.policy[0]] report", ["expected an array, not a string"]),
    (POLICY + "see = [5]", "[hub.policy[0]] see[0]", ["expected a string", "not a whole number"]),
    (HUB + "[admin]\ntoken = 5", "[admin] token", ["expected a string", "not a whole number"]),
    (HUB + "deny_file = ['x']", "[hub] deny_file", ["expected a string", "not an array"]),
    (HUB + "next_secret_file = ''", "[hub] next_secret_file", ["names no file"]),
    (HUB + "deny_file = ''", "[hub] deny_file", ["names no file"]),
    (HUB + "[log]\nlevel = 10", "[log] level", ["expected a string, not a whole number"]),
    (HUB + "[log]\nlevel = 'inof'", "[log] level", ["'inof'", 'did you mean "info"?']),
    (HUB + "[log]\nformat = 'x'", "[log] format", ["'x'", '"auto", "console", "json"']),
    (HUB + "[metrics]\nbind = 9464", "[metrics] bind", ["expected a string", "not a whole number"]),
    # durations
    *[
        (AGENT + f"keepalive = {text!r}", "[federation] keepalive", [repr(text), "is not a duration", '"5s"'])
        for text in (
            *("5", "", "5 s", " 5s", "5s ", "-5s", "+5s", ".5s", "5.s", "1e3s", "nan", "nans", "infs", "5S", "5d"),
            *("5min", "1m30s", "\N{ARABIC-INDIC DIGIT FIVE}s", "5_0s", "0x5s"),
        )
    ],
    *[
        (HUB + f"ttl = {text!r}", "[hub] ttl", [text[:60], "1ms to 24h"])
        for text in ["0s", "0ms", "0.0h", "0.9ms", "24.01h", "1441m", "9" * 400 + "s", "9" * 5000 + "h"]
    ],
    # endpoints
    *[
        (AGENT + f"hubs = [{text!r}]", "[federation] hubs[0]", [text.rpartition(":")[0], advice])
        for text, advice in {
            "": "write host:port",
            "hub.example": "write host:port",
            "hub.example:": "write host:port",
            "hub.example:x": "write host:port",
            "hub.example: 1": "write host:port",
            "hub.example:+1": "write host:port",
            "hub.example:\N{ARABIC-INDIC DIGIT THREE}": "write host:port",
            "hub.example:000001": "write host:port",
            "hub.example:65536": "up to 65535",
            "hub.example:99999": "up to 65535",
            "hub.example:0": "from 1 to 65535",
            ":7443": "names no host",
            "https://hub.example:7443": "leave out the scheme",
            "::1:7443": "in brackets",
            "2001:db8::1": "in brackets",
            "[::1]": "in brackets",
            "[::1:7443": "in brackets",
            "[]:1": "no IPv6 address",
            "[hub.example]:1": "no IPv6 address",
            "[1::2::3]:1": "no IPv6 address",
            "[127.0.0.1]:1": "no IPv6 address",
            "hub_.-:1": "not a host name",
            "-hub:1": "not a host name",
            "hub example:1": "not a host name",
            "hub..example:1": "not a host name",
            "hüb.example:1": "not a host name",
            "user@hub:1": "not a host name",
            f"{'a.' * 27}-.b:1": "not a host name",
            "300.1.1.1:1": "not an IPv4 address",
            "1.2.3:1": "not an IPv4 address",
            "127.0.0.01:1": "not an IPv4 address",
        }.items()
    ],
    (AGENT + "[metrics]\nbind = 'localhost:65536'", "[metrics] bind", ["up to 65535"]),
    (AGENT + "[admin]\nbind = '127.0.0.1'", "[admin] bind", ["write host:port"]),
    (AGENT + "hubs = ['a.b:1', 'c:1', 'A.B.:1']\ninsecure = true", "[federation] hubs[2]", ["hubs[0]", "once"]),
    (AGENT + "hubs = ['[::1]:1', '[0:0::1]:1']", "[federation] hubs[1]", ["hubs[0]", "once"]),
    # cluster ids
    *[
        (f"cluster_id = {text!r}", "cluster_id", [repr(text)[:50], "is not a cluster id", "lower-case"])
        for text in ["", "West", "west_1", "-west", "west-", "a.b", "a" * 64, "wést", "west "]
    ],
    (
        "[[source]]\ntype = 'x'\n[federation]\nsecret = 's'",
        "cluster_id",
        ["missing", "[[source]]", "LOCAL_CLUSTER_ID"],
    ),
    # times that contradict each other, also through a default
    (AGENT + "resync_interval = '15001ms'", "[federation] resync_interval", ["half of ttl, 30s", "at most 15s"]),
    (AGENT + "ttl = '19s'", "[federation] resync_interval", ["10s", "half of ttl, 19s", "at most 9.5s"]),
    (AGENT + "keepalive = '15s'", "[federation] keepalive", ["15s is not below silence_limit, 15s"]),
    *[
        (AGENT + f"[placement]\n{text}", "[placement] reservation_ttl", words)
        for text, words in {
            "reservation_ttl = '1999ms'": ["1.999s is less than settle_time, 2s", "at least 2s", "shorter settle_time"],
            "settle_time = '11s'": ["10s is less than settle_time, 11s", "use at least 11s"],
            "settle_time = '1h'\nreservation_ttl = '59m'": ["59m is less than settle_time, 1h"],
        }.items()
    ],
    (AGENT + "[placement]\nsettle_time = '0s'", "[placement] settle_time", ["1ms to 24h"]),
    (AGENT + "[placement]\nreservation_ttl = '0s'", "[placement] reservation_ttl", ["1ms to 24h"]),
    (AGENT + "[placement]\nsettle_time = 2", "[placement] settle_time", ["expected a string", "a whole number"]),
    (AGENT + "[placement]\nranking = 'shares'", "[placement] ranking", ["'shares'", 'did you mean "share"?']),
    (AGENT + "[placement]\nreservation_tll = '5s'", "[placement] reservation_tll", ['mean "reservation_ttl"?']),
    (AGENT + "[placements]\nsettle_time = '5s'", "[placements]", ['did you mean "placement"?']),
    (AGENT + "settle_time = '5s'", "[federation] settle_time", ["it belongs under [placement]"]),
    (HUB + "silence_limit = '4s'", "[hub] keepalive", ["5s is not below silence_limit, 4s"]),
    # plain text
    (
        AGENT + "hubs = ['[::1]:1', 'h:1']",
        "[federation] hubs[1]",
        ["plain text", "[federation.tls]", "insecure = true"],
    ),
    ("[hub]\nsecret = 's'", "[hub] bind", ["0.0.0.0:7443", "plain text", "[hub.tls]", "insecure = true"]),
    ("[hub]\nsecret = 's'\nbind = '[::]:1'", "[hub] bind", ["[::]:1", "plain text"]),
    (
        HUB + "[admin]\nbind = '0.0.0.0:9465'",
        "[admin] bind",
        ["loopback", "no token_file and no [admin.tls]", '"127.0.0.1:9465"'],
    ),
    (HUB + f"[admin]\nbind = '[::]:1'\ntoken = '{'x' * 16}'", "[admin] bind", ["there is no [admin.tls];"]),
    (
        HUB + "[admin]\nbind = '[::]:1'\ntls = {cert_file = 'some.toml', key_file = 'some.toml'}",
        "[admin] bind",
        ["there is no token_file;"],
    ),
    # a token that is there and has a fault is not said to be missing, and neither is such a table
    *[
        (
            HUB + f"[admin]\nbind = '[::]:1'\n{token}\ntls = {{cert_file = 'some.toml', key_file = 'some.toml'}}",
            f"[admin] {token.split()[0]}",
            words,
        )
        for token, words in {
            "token = 'short'": ["is shorter than 16 characters", "openssl rand -hex 32"],
            "token_file = 'gone'": ["gone", "No such file"],
            "token_file = ''": ["names no file"],
        }.items()
    ],
    (
        HUB + f"[admin]\nbind = '[::]:1'\ntoken = '{'x' * 16}'\ntls = {{cert_file = 'gone', key_file = 'some.toml'}}",
        "[admin.tls] cert_file",
        ["No such file"],
    ),
    (HUB + "[admin]\ntoken = 'hunter2'", "[admin] token", ["is shorter than 16 characters"]),
    (HUB + "[admin]\ntoken = ''", "[admin] token", ["is shorter than 16 characters"]),
    (HUB + f"[admin]\ntoken = '{'ä' * 16}'", "[admin] token", ["printable ASCII"]),
    (HUB + f"[admin]\ntoken = '{'x' * 16}'\ntoken_file = 'x'", "[admin] token_file", ["beside token", "keep one"]),
    (HUB + "[admin]\ntls = true", "[admin] tls", ["written as [admin.tls]"]),
    # listeners
    (HUB + "[admin]\nbind = '127.0.0.1:9464'", "[admin] bind", ["[metrics]", "port of its own"]),
    ("[hub]\nsecret = 's'\nbind = '127.0.0.1:9465'", "[hub] bind", ["[admin]", "port of its own"]),
    # secrets
    (AGENT + "secret_file = 'x'", "[federation] secret_file", ["beside secret", "keep one"]),
    (HUB + "secret_file = 'x'", "[hub] secret_file", ["beside secret", "keep one"]),
    ("[hub]\nbind = '[::1]:1'", "[hub] secret_file", ["missing", "secret"]),
    ("[federation]\nsecret = ''", "[federation] secret", ["empty"]),
    ("[federation]\nsecret = ' a'", "[federation] secret", ["HTTP header", "printable ASCII"]),
    ("[federation]\nsecret = 'ä'", "[federation] secret", ["printable ASCII"]),
    ('[federation]\nsecret = "a\\nb"', "[federation] secret", ["printable ASCII"]),
    (f"[federation]\nsecret = '{'x' * 4097}'", "[federation] secret", ["more than 4096 characters"]),
    ("[federation]\nsecret_file = 'gone'", "[federation] secret_file", ["gone", "No such file", "create it"]),
    ("[federation]\nsecret_file = '.'", "[federation] secret_file", ["cannot read", "irectory"]),
    ("[federation]\nsecret_file = ''", "[federation] secret_file", ["names no file"]),
    ('[federation]\nsecret_file = "a\\u0000b"', "[federation] secret_file", ["names no file"]),
    ("[hub]\nbind = '[::1]:1'\nsecret_file = 'gone'", "[hub] secret_file", ["gone", "No such file"]),
    # TLS
    (AGENT + "[federation.tls]\nca_file = 'gone'", "[federation.tls] ca_file", ["gone", "No such file"]),
    (AGENT + "[federation.tls]\nca_file = '.'", "[federation.tls] ca_file", ["is not a file"]),
    (AGENT + "[federation.tls]\nca_file = ''", "[federation.tls] ca_file", ["names no file"]),
    (AGENT + '[federation.tls]\nca_file = "\\u0000"', "[federation.tls] ca_file", ["names no file"]),
    (AGENT + f"[federation.tls]\nca_file = '{'x' * 5000}'", "[federation.tls] ca_file", ["too long"]),
    (AGENT + "[federation.tls]\ncert_file = 'some.toml'", "[federation.tls] cert_file", ["without key_file"]),
    (AGENT + "[federation.tls]\nkey_file = 'some.toml'", "[federation.tls] key_file", ["without cert_file"]),
    (AGENT + "[federation.tls]\nserver_name = 'a b'", "[federation.tls] server_name", ["not a host name"]),
    (HUB + "[hub.tls]\ncert_file = 'some.toml'", "[hub.tls] key_file", ["missing"]),
    (HUB + "[hub.tls]\nkey_file = 'some.toml'", "[hub.tls] cert_file", ["missing"]),
    (HUB + CERTIFICATES.replace("_san", "s_san"), "[hub.tls] clusters_san", ['did you mean "cluster_san"?']),
    *[
        (HUB + f"[hub.tls]\ncert_file = 'some.toml'\nkey_file = 'some.toml'\ncluster_san = {text!r}", *rest)
        for text, rest in {
            "": ("[hub.tls] cluster_san", ["names no place", "DNS:{cluster}"]),
            "spiffe://a/{cluster}": ("[hub.tls] cluster_san", ["names no place", "URI:spiffe://"]),
            "DNS:agents.example": ("[hub.tls] cluster_san", ["names no place"]),
            "DNS:{cluster}": ("[hub.tls] cluster_san", ["leaves the domain open"]),
            "URI:{cluster}": ("[hub.tls] cluster_san", ["begin with a scheme"]),
        }.items()
    ],
    # ways to prove oneself
    *[
        (HUB + f"accept = ['{way}']", "[hub] accept", ["no client_ca_file and no cluster_san in [hub.tls]"])
        for way in ("certificate", "shared+certificate", "token+certificate")
    ],
    *[
        (
            HUB + "accept = ['token', 'certificate']\n" + re.sub(f"{missing} = .*\n", "", CERTIFICATES),
            "[hub] accept",
            [f"there is no {missing} in [hub.tls]"],
        )
        for missing in ("client_ca_file", "cluster_san")
    ],
    ("[hub]\nbind = '127.0.0.1:0'\naccept = ['token']", "[hub] secret_file", ["missing"]),
    (
        "[hub]\nbind = '127.0.0.1:0'\naccept = ['certificate', 'token+certificate']\n" + CERTIFICATES,
        "[hub] secret_file",
        ["missing"],
    ),
    # it may be certificates that are meant, which need no secret
    ("[hub]\nbind = '127.0.0.1:0'\naccept = ['certificat']", "[hub] accept[0]", ['did you mean "certificate"?']),
    (HUB + "accept = ['certificate+token']", "[hub] accept[0]", ['did you mean "token+certificate"?']),
    (HUB + "accept = ['shared + certificate']", "[hub] accept[0]", ['did you mean "shared+certificate"?']),
    (HUB + "accept = ['shared+token']", "[hub] accept[0]", ["did you mean"]),
    # tokens where they do not belong, and tokens of others
    (HUB.replace('"s"', f'"{TOKEN}"'), "[hub] secret", ["holds a token", "the secret that tokens are made from"]),
    (f"cluster_id = 'east'\n[federation]\nsecret = '{TOKEN}'", "[federation] secret", ["of 'west'", "is 'east'"]),
    ("cluster_id = 'east'\n[federation]\nsecret = 'tf1.hunter2'", "[federation] secret", ["begins like a token"]),
    (f"[federation]\nsecret = '{TOKEN}0'", "[federation] secret", ["begins like a token and is none"]),
    (
        f"cluster_id = 'east'\n[federation]\nsecret = '{TOKEN}'\nsecret_file = 'x'",
        "[federation] secret_file",
        ["beside secret"],
    ),
    # what a later version will have
    (HUB + "accept = ['shraed']", "[hub] accept[0]", ['did you mean "shared"?']),
    (HUB + "accept = []", "[hub] accept", ["empty", '["token"]']),
    (HUB + "[hub.backplane]\ntype = 'nats'", "[hub.backplane] type", ['"nats" is not available in this version yet']),
    (HUB + "[hub.backplane]\ntype = 'memroy'", "[hub.backplane] type", ['did you mean "memory"?']),
    (HUB + "[hub.backplane]\nservers = []", "[hub.backplane] servers", ["not available in this version yet"]),
]


@pytest.mark.parametrize("text, place, words", ONE_FAULT, ids=range(len(ONE_FAULT)))
def test_one_fault(tmp_path: Path, text: str, place: str, words: list[str]) -> None:
    found = faults(tmp_path, text)
    assert len(found) == 1, found
    assert found[0].startswith(f"{place}: ")
    assert [word for word in words if word not in found[0]] == [], found[0]


def test_misspelt_keys_are_never_a_silent_default(tmp_path: Path) -> None:
    """Case C44: a misspelt key, a misspelt table, a key in the wrong table, and a good file with one key too many."""
    found = faults(tmp_path, HUB + 'adress = "x"\nresync_interval = "5s"\n[registy]\nttl = "5s"')
    assert [line.partition(": ")[0] for line in found] == ["[hub] adress", "[hub] resync_interval", "[registy]"]
    assert "valid here: bind, ttl," in found[0]
    assert "it belongs under [federation]" in found[1]
    assert "valid here: cluster_id, federation," in found[2]
    good = Path(__file__).parents[2] / "config" / "agent.toml"
    text = good.read_text(encoding="utf-8").replace("[federation]", '[federation]\nresync_intervall = "5s"')
    (line,) = faults(tmp_path, text)
    assert line == '[federation] resync_intervall: unknown key; did you mean "resync_interval"?'


def test_all_faults_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    found = faults(
        tmp_path,
        """
        cluster_id = "West"
        [log]
        level = "loud"
        [hub]
        adress = "x"
        bind = "[::]:0"
        accept = ["token", "x"]
        [registy]
        [hub.tls]
        cert_file = "gone"
        cluster_san = "x"
        [hub.limits]
        streams = 0
        record_rate = 1.5
        [[hub.policy]]
        clusters = ["West"]
        report = ["*"]
        sea = 1
        max_idle = -1
        [[hub.policy]]
        max_records = true
        [federation]
        hubs = ["a", "[::1]:1", "b", "c:1"]
        ttl = "5"
        resync_interval = "20s"
        keepalive = "30s"
        tls = {key_file = "gone"}
        [[source]]
        type = "x"
        [[source]]
        type = 3
        [metrics]
        bind = "127.0.0.1:9464"
        [admin]
        bind = "0.0.0.0:9465"
        tokn = "x"
        [admin.tls]
        cert_file = "some.toml"
        """,
    )
    assert [re.split(r": ", line)[0] for line in found] == [
        "cluster_id",
        "[log] level",
        "[hub] adress",
        "[hub] accept[1]",
        "[hub.tls] cert_file",
        "[hub.tls] cluster_san",
        "[hub.tls] key_file",
        "[hub.limits] record_rate",
        "[hub.limits] streams",
        "[hub.policy[0]] clusters[0]",
        "[hub.policy[0]] report[0]",
        "[hub.policy[0]] sea",
        "[hub.policy[1]] max_records",
        "[hub.policy[1]] clusters",
        "[hub] secret_file",
        "[hub.policy[0]] max_idle",
        "[registy]",
        "[federation] hubs[0]",
        "[federation] hubs[2]",
        "[federation] ttl",
        "[federation.tls] key_file",
        "[federation.tls] key_file",
        "[federation] keepalive",
        "[[source]] source[1].type",
        "[admin] tokn",
        "[admin.tls] key_file",
        "[admin] bind",
    ]


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "empty"),
        (b"\n", "empty"),
        (b"hunter2-\xff\xfe", "is not UTF-8"),
        ("\ufeffhunter2".encode(), "printable ASCII"),
        (b"hunter2\n\n", "printable ASCII"),
        (b"hunter2\r", "printable ASCII"),
        (b"x" * 4097, "more than 4096"),
        (b"x" + "ä".encode() * 4096, "printable ASCII"),
    ],
    ids=range(8),
)
def test_secret_files(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "secret").write_bytes(content)
    (found,) = faults(tmp_path, "[federation]\nsecret_file = 'secret'")
    assert found.startswith("[federation] secret_file: ")
    assert str(tmp_path / "secret")[:50] in found
    assert words in found
    assert "hunter2" not in found


def test_an_endless_secret_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    (found,) = faults(tmp_path, "[federation]\nsecret_file = '/dev/zero'")
    assert "more than 4096" in found


@pytest.mark.parametrize("table", ["hub", "federation"])
def test_a_token_in_a_secret_file(tmp_path: Path, table: str) -> None:
    """A hub's must not hold one, and an agent's must hold its own."""
    (tmp_path / "secret").write_text(f"{TOKEN}\n")
    text = "cluster_id = 'east'\n[federation]\n" if table == "federation" else "[hub]\nbind = '127.0.0.1:0'\n"
    (found,) = faults(tmp_path, f"{text}secret_file = 'secret'")
    assert found.startswith(f"[{table}] secret_file: ")
    assert ("holds a token" if table == "hub" else "is the token of 'west', and this is 'east'") in found
    assert TOKEN[-64:] not in found


def test_a_token_of_the_environment(tmp_path: Path) -> None:
    """Its own place is named, whatever else the file says; the id may come from there, too."""
    for text in ("cluster_id = 'east'", "cluster_id = 'east'\n[federation]\nsecret_file = 'gone'"):
        (found,) = faults(tmp_path, text, TRIO_FEDERATION_SECRET=TOKEN)
        assert found.startswith("environment: TRIO_FEDERATION_SECRET: is the token of 'west', and this is 'east'")
    (found,) = faults(tmp_path, f"[federation]\nsecret = '{TOKEN}'", LOCAL_CLUSTER_ID="east")
    assert found.startswith("[federation] secret: is the token of 'west'")
    (found,) = faults(tmp_path, "", TRIO_FEDERATION_SECRET="tf1.hunter2", LOCAL_CLUSTER_ID="east")
    assert found.startswith("environment: TRIO_FEDERATION_SECRET: begins like a token")
    assert "hunter2" not in found


def test_a_cluster_id_that_is_none_leaves_the_token_alone(tmp_path: Path) -> None:
    (found,) = faults(tmp_path, f"cluster_id = 'East'\n[federation]\nsecret = '{TOKEN}'")
    assert found.startswith("cluster_id: ")


@pytest.mark.parametrize(
    "content, words",
    [
        (b"short", "is shorter than 16 characters"),
        (b"", "is shorter than 16 characters"),
        (b"x" * 15 + b"\n", "is shorter than 16 characters"),
        (b"x" * 4097, "more than 4096"),
        (b"hunter2-hunter2-\xff", "is not UTF-8"),
        ("hunter2-hunter2-ä".encode(), "printable ASCII"),
    ],
    ids=range(6),
)
def test_files_of_the_admin_token(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "token").write_bytes(content)
    (found,) = faults(tmp_path, HUB + "[admin]\ntoken_file = 'token'")
    assert found.startswith("[admin] token_file: ")
    assert words in found
    assert "hunter2" not in found


READERS: dict[str, Callable[[str], object]] = {
    "secret": read_secret_file,
    "hub": read_hub_secret_file,
    "agent": lambda path: read_agent_secret_file(path, "east"),
    "deny": read_deny_file,
}


@pytest.mark.parametrize(
    "reader, content",
    [
        *((reader, content) for reader in READERS for content in (None, b"hunter2-\xff", b"hunter2" * 200_000)),
        ("hub", TOKEN.encode()),
        ("agent", TOKEN.encode()),
        ("secret", b"hunter2\n\n"),
    ],
)
def test_files_that_are_read_again_name_themselves_and_show_nothing(
    tmp_path: Path, reader: str, content: bytes | None
) -> None:
    """Also not in what led to the error, which a traceback would show."""
    file = tmp_path / "some"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(file)[:50])) as caught:
        READERS[reader](str(file))
    assert "\n" not in str(caught.value)
    told = "".join(traceback.format_exception(caught.value))
    error: BaseException | None = caught.value
    while error is not None:
        told += repr(error.args)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert str(file)[:50] in told
    assert [word for word in ("hunter2", TOKEN[-64:]) if word in told] == []


def test_deny_files(tmp_path: Path) -> None:
    file = tmp_path / "deny"
    file.write_bytes(b"\xef\xbb\xbfwest\r\neast.2\r\n\r\nx.y\r\n")
    denied, wrong = read_deny_file(str(file))
    assert denied == DenyList(frozenset({"west"}), frozenset({("east", 2)}))
    assert [line.split(" is ")[0] for line in wrong] == ["line 4"]
    with pytest.raises(ValueError, match=r"No such file.*create it, an empty file denies nobody"):
        read_deny_file(str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="irectory"):
        read_deny_file(str(tmp_path))
    file.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(ValueError, match="larger than 1048576 bytes"):
        read_deny_file(str(file))
    file.write_bytes(b"#" * (1024 * 1024))
    assert read_deny_file(str(file)) == (DenyList(), [])


def test_secret_files_that_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{TOKEN}\n")
    assert read_agent_secret_file(str(file), "west").reveal() == TOKEN
    assert read_agent_secret_file(str(file), None).reveal() == TOKEN
    file.write_text("s")
    assert read_agent_secret_file(str(file), "west").reveal() == read_hub_secret_file(str(file)).reveal() == "s"


def test_a_pipe_is_no_certificate(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (found,) = faults(tmp_path, AGENT + "[federation.tls]\nca_file = 'pipe'")
    assert "is not a file" in found


@pytest.mark.parametrize(
    "text",
    [
        "secret = 'hunter2'",
        "[hunter]\nsecret = 'hunter2'",
        "[federation]\nsecret = ['hunter2']\n[hub]\nsecret = {x = 'hunter2'}",
        "[federation]\nsecret = 'hunter2 '\nsecrte = 'hunter2'\n[hub]\nsecret = 'hunter2\t'",
        "[federation]\nsecret = 'hunter2'\nsecret_file = 'x'\ntls = 'hunter2'\ninsecure = 'hunter2'\nttl = ['hunter2']",
        "[federation]\nsecret = hunter2",
        "[federation]\nsecret = 'hunter2",
        "[federation]\nsecret = 'a'\nsecret = 'hunter2'",
        "[[source]]\ntype = {x = 'hunter2'}\ntoken = 'hunter2'",
        "[federation]\ntoken = 'hunter2'\n[hub]\nnext_secret = 'hunter2'\ntoken = 'hunter2'",
        "[admin]\ntoken = 'hunter2'",
        "[admin]\ntoken = ['hunter2 hunter2 hunter2']\ntokn = 'hunter2'",
        "[admin]\ntoken = 'hunter2 hunter2 hunter2'\ntoken_file = 'x'",
        "[admin]\ntoken = 'hunter2 hunter2 hunter2\t'",
        "cluster_id = 'east'\n[federation]\nsecret = 'tf1.hunter2'\n[hub]\nsecret = 'tf1.hunter2'",
        f"[hub]\nsecret = 'tf1.{'hunter2' * 600}'",
    ],
    ids=range(16),
)
def test_no_fault_shows_a_secret(tmp_path: Path, text: str) -> None:
    found = faults(tmp_path, text, TRIO_FEDERATION_SECRET="hunter2\n")
    assert "hunter2" not in "\n".join(found)


@pytest.mark.parametrize(
    "text, line, column",
    [
        ("a = 1\nb = [1,\n", 3, 1),
        ('[log]\nlevel = "x', 2, 11),
        ("cluster_id = west", 1, 14),
        ("\ufeffcluster_id = west", 1, 14),
        ("a = 1\r\na = 2\r\n\r\n", 2, 6),
        ("[hub]\n[hub]\n", 2, 5),
        ("a = 2024-02-30", 1, 5),
        ('"\\ud800" = 1', 1, 8),
        ("a = 1\x00", 1, 6),
    ],
)
def test_syntax_errors_tell_line_and_column(tmp_path: Path, text: str, line: int, column: int) -> None:
    (found,) = faults(tmp_path, text)
    assert "is not valid TOML" in found
    assert f"line {line}, column {column}" in found


@pytest.mark.parametrize(
    "text, words",
    [
        (b"a = 1\nb = '\xff'\n", "line 2 is not UTF-8"),
        (b"\xff\xfec\x00l\x00", "line 1 is not UTF-8"),
        (b"a = " + b"[" * 5000, "nested too deeply"),
        (b"a = " + b"9" * 5000, "4300 digits"),
        (b"#" * (1024 * 1024 + 1), "larger than 1048576 bytes"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: bytes, words: str) -> None:
    (found,) = faults(tmp_path, text)
    assert words in found


@pytest.mark.parametrize(
    "name, words", [("gone.toml", "No such file"), ("", "irectory"), ("x" * 5000, "too long"), ("a\0b", "null byte")]
)
def test_paths_that_name_no_file(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        load(tmp_path / name, {})
    assert len(caught.value.faults) == 1
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("text", ["", "# nothing", "[log]\nlevel = 'info'", "[metrics]\n[admin]\n"])
def test_nothing_to_run(tmp_path: Path, text: str) -> None:
    (found,) = faults(tmp_path, text, LOCAL_CLUSTER_ID="", TRIO_FEDERATION_SECRET="s")
    assert "neither an agent nor a hub" in found
    assert "[hub]" in found


@pytest.mark.parametrize(
    "value",
    ["0x" + "f" * 5000, "[" * 100 + "]" * 100, "{a" + ".a" * 4000 + " = 1}", "-9223372036854775809", "07:32:00"],
    ids=["number", "array", "table", "integer", "time"],
)
def test_monstrous_values_are_faults_like_others(tmp_path: Path, value: str) -> None:
    keys = ["hubs", "secret", "ttl", "insecure", "tls", "unknown"]
    text = "cluster_id = 'a'\n[federation]\n" + "\n".join(f"{key} = {value}" for key in keys)
    limits = [f"hub.limits.{key}" for key in ("connections", "streams", "message_rate", "record_rate", "first_message")]
    text += f"\n[log]\nlevel = {value}\n[[source]]\ntype = {value}\n[hub]\ndeny_file = {value}\naccept = [{value}]\n"
    text += "[hub.limits]\n" + "\n".join(f"{key.rpartition('.')[2]} = {value}" for key in limits)
    text += "\n[[hub.policy]]\n" + "\n".join(f"{key} = {value}" for key in ("clusters", "report", "max_idle"))
    found = faults(tmp_path, text)
    assert [line for line in found if len(line) > 300] == []
    places = [*(f"[federation] {key}" for key in keys[:-1]), "[log] level", "[[source]] source[0].type"]
    places += ["[hub] deny_file", "[hub] accept", *(f"[hub.limits] {key.rpartition('.')[2]}" for key in limits)]
    places += [f"[hub.policy[0]] {key}" for key in ("clusters", "report", "max_idle")]
    for place in places:
        if not (place.endswith("tls") and value.startswith("{")):
            assert [line for line in found if line.startswith((f"{place}: ", f"{place}["))], place
    assert [line for line in found if "unknown" in line]

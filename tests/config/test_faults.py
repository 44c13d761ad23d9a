"""What is refused: every fault of a file at once, a line each, which names file, table and key and says what to do."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from trio_federation.config import load
from trio_federation.errors import ConfigurationError

#: what a good file may begin with
AGENT = 'cluster_id = "west"\n[federation]\nsecret = "s"\n'
HUB = '[hub]\nsecret = "s"\nbind = "127.0.0.1:0"\n'


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
    (HUB + "[tls]", "[tls]", ["[federation.tls] or to the file as [hub.tls]"]),
    (AGENT + 'hub = "x"', "[federation] hub", ['did you mean "hubs"', "[hub]"]),
    (AGENT + 'bind = "x"', "[federation] bind", ["under [metrics]", "under [admin]", "under [hub]"]),
    (AGENT + '[[sources]]\ntype = "x"', "sources", ["unknown key", "did you mean [[source]]?"]),
    (AGENT + '[[filtre]]\ntype = "x"', "filtre", ["unknown key", "did you mean [[filter]]?"]),
    (AGENT + '[filtre]\ntype = "x"', "[filtre]", ["unknown table", "did you mean [[filter]]?"]),
    (AGENT + 'filter = "x"', "[federation] filter", ["unknown key", "belongs to the file as [[filter]]"]),
    ('ttl = "5s"\n' + AGENT, "ttl", ["unknown key", "under [federation]", "under [hub]"]),
    (AGENT + "path = 1", "[federation] path", ["unknown key"]),
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
    (HUB + "[admin]\nbind = '0.0.0.0:9465'", "[admin] bind", ["loopback", "token", '"127.0.0.1:9465"']),
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
    # what a later version will have
    (HUB + "accept = ['shared', 'token']", "[hub] accept[1]", ['"token" is not available in this version yet']),
    (HUB + "accept = ['certificate']", "[hub] accept[0]", ['"certificate" is not available in this version yet']),
    (HUB + "accept = ['shraed']", "[hub] accept[0]", ['did you mean "shared"?']),
    (HUB + "accept = []", "[hub] accept", ["empty", '["shared"]']),
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
        bind = "127.0.0.1:9465"
        """,
    )
    assert [re.split(r": ", line)[0] for line in found] == [
        "cluster_id",
        "[log] level",
        "[hub] adress",
        "[hub] accept[0]",
        "[hub] accept[1]",
        "[hub.tls] cert_file",
        "[hub.tls] key_file",
        "[hub] secret_file",
        "[registy]",
        "[federation] hubs[0]",
        "[federation] hubs[2]",
        "[federation] ttl",
        "[federation.tls] key_file",
        "[federation.tls] key_file",
        "[federation] keepalive",
        "[[source]] source[1].type",
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
    ],
    ids=range(9),
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
    found = faults(tmp_path, f"{text}\n[log]\nlevel = {value}\n[[source]]\ntype = {value}")
    assert [line for line in found if len(line) > 300] == []
    for place in [*(f"[federation] {key}" for key in keys[:-1]), "[log] level", "[[source]] source[0].type"]:
        if not (place.endswith("tls") and value.startswith("{")):
            assert [line for line in found if line.startswith((f"{place}: ", f"{place}["))], place
    assert [line for line in found if "unknown" in line]

"""Whatever stands in a file, `load` answers with a Config or with ConfigurationError, and no unknown key is ever passed
over."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trio_federation_fixtures
from trio_federation.config import Config, PluginTable, describe, load
from trio_federation.errors import ConfigurationError
from trio_federation.plugins import PluginManager

KEYS: dict[str, list[str]] = {
    "federation": [
        *("hubs", "secret", "secret_file", "ttl", "report_interval", "resync_interval", "keepalive", "silence_limit"),
        *("insecure", "tls"),
    ],
    "federation.tls": ["ca_file", "cert_file", "key_file", "server_name"],
    "hub": [
        *("bind", "ttl", "grace", "keepalive", "silence_limit", "insecure", "secret", "secret_file", "accept", "tls"),
        *("backplane", "next_secret_file", "deny_file", "limits", "policy"),
    ],
    "hub.limits": ["connections", "streams", "message_rate", "record_rate", "first_message"],
    "hub.policy": ["clusters", "report", "see", "max_records", "max_idle"],
    "hub.tls": ["cert_file", "key_file", "client_ca_file", "cluster_san"],
    "hub.backplane": ["type", "servers"],
    "placement": ["settle_time", "reservation_ttl", "ranking"],
    "metrics": ["bind"],
    "admin": ["bind", "token", "token_file", "tls"],
    "admin.tls": ["cert_file", "key_file"],
    "log": ["level", "format"],
}
TOP = ["cluster_id", "federation", "source", "filter", "sink", "placement", "metrics", "admin", "log", "hub"]
#: written as [[…]], and possibly several
ARRAYS = {"hub.policy"}
#: what a fault calls each table, where that is not its name
CALLED = {"hub.policy": "hub.policy[0]"}
ALL = sorted({*TOP, *(key for keys in KEYS.values() for key in keys)})


def toml(value: Any) -> str:
    """A value as inline TOML, which for strings is JSON but for the one control character that JSON leaves alone."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    return str(value).lower()


#: what knows a source, and nothing of the other kinds
PLUGINS = PluginManager()
PLUGINS.register(trio_federation_fixtures, "fixtures")


def read(
    folder: Path,
    content: bytes,
    environ: dict[str, str],
    finders: Mapping[str, Callable[[PluginTable], list[str]]] | None = None,
) -> Config | list[str]:
    path = folder / "fuzz.toml"
    path.write_bytes(content)
    try:
        config = load(path, environ, finders)
    except ConfigurationError as error:
        faults = error.faults
    else:
        assert all(key and value for key, value in describe(config))
        return config
    assert faults != []
    assert [line for line in faults if not line.startswith((f"{path}: ", "environment: "))] == []
    assert [line for line in faults if len(line.splitlines()) != 1 or not line.isprintable()] == []
    return faults


scalars = (
    st.text(max_size=12)
    | st.sampled_from(["5s", "1m", "0s", "9h", "127.0.0.1:0", "[::1]:7443", "hub.example:1", "west", "shared", "token"])
    | st.sampled_from(
        ["memory", "nats", "info", "json", "fuzz.toml", ".", "", "gone", "certificate", "*", "*/*", "a/b"]
    )
    | st.sampled_from(["token+certificate", "DNS:{cluster}.example", "URI:a://b/{cluster}", f"tf1.west.1.{'0' * 64}"])
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.booleans()
    | st.dates()
    | st.datetimes()
    | st.times()
)
keys = st.sampled_from(ALL) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=6
)


def tables(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """A table with mostly known keys."""
    nested: dict[str, st.SearchStrategy[Any]] = {}
    for key in KEYS[name]:
        if (full := f"{name}.{key}") in KEYS:
            nested[key] = tables(full) | (st.lists(tables(full), max_size=3) if full in ARRAYS else st.nothing())
    known = {key: values | nested.get(key, st.nothing()) for key in KEYS[name]}
    return st.fixed_dictionaries({}, optional=known)


types = st.just("fixtures") | scalars
plugins = st.lists(
    st.fixed_dictionaries({}, optional={"type": types, "path": values, "member": values, "outage": values}), max_size=3
)
documents = st.fixed_dictionaries(
    {},
    optional={
        "cluster_id": scalars,
        "source": plugins | values,
        "filter": plugins | values,
        "sink": plugins | values,
        "other": values,
        **{name: tables(name) | values for name in KEYS if "." not in name},
    },
)
environments = st.fixed_dictionaries(
    {}, optional={"LOCAL_CLUSTER_ID": st.text(max_size=8), "TRIO_FEDERATION_SECRET": st.text(max_size=8)}
)


@given(documents, environments)
def test_any_document(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any], environ: dict[str, str]
) -> None:
    text = "\n".join(f"{toml(key)} = {toml(value)}" for key, value in document.items())
    read(tmp_path_factory.getbasetemp(), text.encode(), environ)


@given(documents)
def test_any_document_with_plugins(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> None:
    """Who knows the plugins finds more faults, and takes none back but of the hub's backplane, which it may know."""
    folder = tmp_path_factory.getbasetemp()
    text = "\n".join(f"{toml(key)} = {toml(value)}" for key, value in document.items())
    without, found = read(folder, text.encode(), {}), read(folder, text.encode(), {}, PLUGINS.faults)
    if isinstance(without, list):
        assert isinstance(found, list)
        assert [line for line in without if line not in found and "[hub.backplane" not in line] == []


@given(st.binary(max_size=80) | st.text(alphabet="[]{}=.,#\"'\\\n ab19-:_", max_size=60).map(str.encode))
@example(b'[[source]]\ntype = "\\u0000"')
@example(b"a" + b".a" * 3000 + b" = 1")
@example(b"federation" + b".a" * 3000 + b" = 1")
@example(b"source = [" + b"{a = [" * 90 + b"]}" * 90 + b"]")
@example(b"[hub]\nbind = " + b"0x" + b"f" * 5000)
@example(b"[hub]\nbind = 1e99999")
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    read(tmp_path_factory.getbasetemp(), content, {})


@given(documents)
def test_faults_do_not_depend_on_one_another(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    """A misspelt key beside any others, good or bad, is one fault more and changes none of theirs."""
    folder = tmp_path_factory.getbasetemp()
    text = "\n".join(f"{toml(key)} = {toml(value)}" for key, value in document.items())
    before, after = read(folder, text.encode(), {}), read(folder, f"zzz = 1\n{text}".encode(), {})
    assert isinstance(after, list)
    own = [line for line in after if ": zzz: unknown key" in line]
    assert len(own) == 1
    assert [line for line in after if line not in own] == (before if isinstance(before, list) else [])


GOOD: dict[str, dict[str, Any]] = {
    "": {"cluster_id": "west"},
    "federation": {"hubs": ["localhost:7443"], "secret": "s"},
    "federation.tls": {},
    "metrics": {},
    "admin": {},
    "log": {"level": "info"},
    "hub": {"bind": "127.0.0.1:0", "secret": "s"},
    "hub.limits": {"streams": 1},
    "hub.policy": {"clusters": ["west"]},
    "hub.backplane": {},
}
strange_keys = st.text(alphabet=string.ascii_letters + "_-é \n\".'", min_size=1, max_size=12)
injections = st.dictionaries(
    st.sampled_from(sorted(GOOD)), st.dictionaries(strange_keys | st.sampled_from(ALL), values, max_size=3)
)


@given(injections)
def test_every_unknown_key_is_reported(
    tmp_path_factory: pytest.TempPathFactory, injected: dict[str, dict[str, Any]]
) -> None:
    known = {**KEYS, "": TOP}
    unknown = {
        header: {key: value for key, value in more.items() if key not in known[header] and key != "servers"}
        for header, more in injected.items()
    }
    lines = []
    for header, good in GOOD.items():
        lines += [f"[[{header}]]" if header in ARRAYS else f"[{header}]"] if header else []
        lines += [f"{toml(key)} = {toml(value)}" for key, value in {**good, **unknown.get(header, {})}.items()]
    found = read(tmp_path_factory.getbasetemp(), "\n".join(lines).encode(), {})
    expected = sum(map(len, unknown.values()))
    if not expected:
        assert isinstance(found, Config)
        return
    assert isinstance(found, list)
    assert len(found) == expected
    for name, more in unknown.items():
        header = CALLED.get(name, name)
        for key, value in more.items():
            table = isinstance(value, dict)
            names = [key, repr(key)]
            places = [f"[{f'{header}.{name}'.lstrip('.')}]" if table else f"[{header}] {name}" for name in names]
            places = [place.removeprefix("[] ") for place in places]
            starts = tuple(f": {place}: unknown {'table' if table else 'key'}; " for place in places)
            assert [line for line in found if any(start in line for start in starts)], (header, key)

"""Kubeconfig files for tests: written from plain dictionaries, or generated whole, with entries that meet in several
files. What they mean is stated in the tests."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl in PATH")

CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----\n"
OTHER_CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nREVG\n-----END CERTIFICATE-----\n"
KEY = b"-----BEGIN PRIVATE KEY-----\nR0hJ\n-----END PRIVATE KEY-----\n"


def encoded(data: bytes) -> str:
    """As in the `*-data` keys."""
    return base64.b64encode(data).decode()


def config(
    *,
    cluster: Mapping[str, Any] | None = None,
    user: Mapping[str, Any] | None = None,
    context: Mapping[str, Any] | None = None,
    name: str = "west",
    **more: Any,
) -> dict[str, Any]:
    """A kubeconfig of one cluster, user and context of that name, which is current."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": {"server": "https://west.test:6443", **(cluster or {})}}],
        "users": [{"name": name, "user": dict(user or {})}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, **(context or {})}}],
        **more,
    }


def write(path: Path, content: Mapping[str, Any] | str | bytes) -> Path:
    """Writes a kubeconfig, as JSON, which is YAML too; text and bytes as they are. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


# Few names, so that files share them, and a few words whose kind YAML could mistake.
NAMES = st.sampled_from(["east", "west", "north", "1", "no", "2001-01-01", "é", "with blank"])
_WORDS = st.sampled_from(["one", "two", "12", "true", "null", "~", "12:30:45", "a: b", "ü", "#", ""])
_PATHS = st.sampled_from(["", "ca.crt", "./x/../ca.crt", "../other/ca.crt", "/etc/ca.crt", "/etc//x/../ca.crt"])
_DATA = st.sampled_from(["", encoded(b"a"), encoded(CERTIFICATE), encoded(KEY)])


def _some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these keys, with "_" for "-", some of them null."""
    return st.fixed_dictionaries(
        {}, optional={name.replace("_", "-"): st.one_of(st.none(), values) for name, values in fields.items()}
    )


_CLUSTERS = _some(
    server=_WORDS,
    tls_server_name=_WORDS,
    insecure_skip_tls_verify=st.booleans(),
    certificate_authority=_PATHS,
    certificate_authority_data=_DATA,
    proxy_url=_WORDS,
    disable_compression=st.booleans(),
)
_USERS = _some(
    token=_WORDS,
    tokenFile=_PATHS,
    username=_WORDS,
    password=_WORDS,
    client_certificate=_PATHS,
    client_certificate_data=_DATA,
    client_key=_PATHS,
    client_key_data=_DATA,
    exec=st.fixed_dictionaries(
        {
            "command": st.sampled_from(["plugin", "./plugin", "bin/../plugin", "/bin/plugin", "../plugin"]),
            "apiVersion": st.just("client.authentication.k8s.io/v1"),
            "interactiveMode": st.just("Never"),
            "args": st.lists(_WORDS, max_size=2),
            "env": st.lists(st.fixed_dictionaries({"name": _WORDS, "value": _WORDS}), max_size=2),
        }
    ),
)
_CONTEXTS = _some(cluster=NAMES, user=NAMES, namespace=_WORDS)


def _entries(kind: str, values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Any]:
    entry = st.fixed_dictionaries({"name": NAMES, kind: st.one_of(values, st.none())})
    return st.one_of(st.none(), st.lists(entry, max_size=4, unique_by=lambda one: str(one["name"])))


#: the content of one kubeconfig file; {} is written as an empty file by some tests
FILES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "current-context": st.one_of(st.none(), st.just(""), NAMES),
        "clusters": _entries("cluster", _CLUSTERS),
        "users": _entries("user", _USERS),
        "contexts": _entries("context", _CONTEXTS),
    },
)

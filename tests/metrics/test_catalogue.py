"""The catalogue of metrics and docs/metrics.md: what is exported is what is declared, and all of that is written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.metrics.reading import NOW, families
from trio_federation.capacity import Capacity
from trio_federation.metrics import CATALOGUE, Family, FederationMetrics, Kind, catalogue
from trio_federation.registry import RegistryHeld

ROOT = Path(__file__).resolve().parent.parent.parent
FAMILIES = [family for group in CATALOGUE for family in group.families]

#: A call of every method that records something.
RECORDED: dict[str, Callable[[FederationMetrics], object]] = {
    "configured": lambda m: m.configured(hubs=["h:1"], sources=["s"], sinks=["k"], filters=["f"]),
    "record_dropped": lambda m: m.record_dropped("source:s", "idle"),
    "hub_connected": lambda m: m.hub_connected("h:1", "watch", True),
    "hub_reconnected": lambda m: m.hub_reconnected("h:1"),
    "hub_received": lambda m: m.hub_received("h:1", 1, NOW),
    "hub_reported": lambda m: m.hub_reported("h:1", 1),
    "hub_batch_wait": lambda m: m.hub_batch_wait("h:1", 0.1),
    "hub_bytes": lambda m: m.hub_bytes("h:1", 1, 1),
    "source_live": lambda m: m.source_live("s", True),
    "source_troubles": lambda m: m.source_troubles("s", ["forbidden"]),
    "source_collected": lambda m: m.source_collected("s", 0.1, 1, NOW),
    "source_failed": lambda m: m.source_failed("s"),
    "sink_troubles": lambda m: m.sink_troubles("k", [("contested", "rival")]),
    "sink_told": lambda m: m.sink_told("k", 0.1, NOW),
    "sink_failed": lambda m: m.sink_failed("k"),
    "filter_failed": lambda m: m.filter_failed("f"),
    "records_withheld": lambda m: m.records_withheld("f", 1),
    "placed": lambda m: m.placed("local", "local_idle"),
    "outcome": lambda m: m.outcome("served"),
    "reservations": lambda m: m.reservations(lambda: 3),
    "call_refused": lambda m: m.call_refused("UNAUTHENTICATED"),
    "watchers": lambda m: m.watchers(1),
    "reporters": lambda m: m.reporters(1),
    "handshake_failed": lambda m: m.handshake_failed(),
    "connection_cut": lambda m: m.connection_cut("flood"),
    "reporters_by_credential": lambda m: m.reporters_by_credential({"token": 1}),
    "policy_breach": lambda m: m.policy_breach("west", "idle_cut", 1),
    "certificate_expires": lambda m: m.certificate_expires("hub.tls.cert_file", NOW),
    "reload_begins": lambda m: m.reload_begins("hub.tls"),
    "reloaded": lambda m: m.reloaded("hub.tls", "ok"),
    "log_lines": lambda m: m.log_lines(lambda: 1),
    "queue": lambda m: m.queue("q", lambda: 1, lambda: 2),
    "plugin_failures": lambda m: m.plugin_failures("pools", "acme-pools 1.0", 2),
    "build": lambda m: m.build("0.1.0", python="3.11.7", trio="0.35.0", grpclib="0.4.9"),
}
SCRAPES = {"exposition", "whole_exposition"}


@pytest.fixture(scope="module")
def scraped() -> dict[str, tuple[str, str, set[tuple[str, ...]]]]:
    """Of each family that is shown when everything was recorded, by its name in a query: type, help, labels."""
    metrics = FederationMetrics(started_at=NOW)
    for record in RECORDED.values():
        record(metrics)
    envs = [[Capacity("west", "ns", "a", "p", observed_at=NOW)]]
    shown = {}
    for family in families(metrics, envs, held=lambda: RegistryHeld(1, 2, 3)).values():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {tuple(sorted(sample.labels.keys() - {"le"})) for sample in family.samples}
        shown[name] = (family.type, family.documentation, labels)
    return shown


def test_every_recording_method_is_known_here() -> None:
    public = {name for name, value in vars(FederationMetrics).items() if callable(value) and name[0] != "_"}
    assert public - SCRAPES == RECORDED.keys()


def test_a_version_of_what_the_catalogue_does_not_name_is_refused() -> None:
    with pytest.raises(ValueError, match="betterproto2"):
        FederationMetrics().build("0.1.0", betterproto2="0.10")


def test_nothing_is_exported_that_the_catalogue_does_not_name_and_the_other_way_round(
    scraped: dict[str, tuple[str, str, set[tuple[str, ...]]]],
) -> None:
    assert sorted(scraped) == sorted(family.name for family in FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_type_help_and_labels_are_as_declared(
    family: Family, scraped: dict[str, tuple[str, str, set[tuple[str, ...]]]]
) -> None:
    kind, text, labels = scraped[family.name]
    assert kind == ("gauge" if family.kind is Kind.INFO else family.kind)
    assert text == family.text
    assert labels == {tuple(sorted(family.labels))}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_and_texts_keep_the_conventions(family: Family) -> None:
    assert re.fullmatch(r"(trio_federation|agentbox_federation)(_[a-z]+)+", family.name)
    assert (family.kind is Kind.COUNTER) == family.name.endswith("_total")
    assert (family.kind is Kind.INFO) == family.name.endswith("_info")
    if family.kind is Kind.HISTOGRAM:
        assert family.name.endswith("_seconds")
    assert ("_seconds" in family.name) == family.text.startswith("Seconds ")
    assert ("_bytes_" in family.name) == family.text.startswith("Bytes ")
    for text in (family.text, family.alert):
        assert "\n" not in text
        assert not text or (text[0] == text[0].upper() and text.endswith("."))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_alerts_name_only_what_there_is(family: Family) -> None:
    names = {f.name for f in FAMILIES} | {f"{f.name}_bucket" for f in FAMILIES if f.kind is Kind.HISTOGRAM}
    mentioned = set(re.findall(r"(?:trio|agentbox)_federation_[a-z_]+", family.alert))
    assert mentioned <= names


def test_constants_are_called_like_their_families() -> None:
    """So that the code which fills a family is found by its name; and none is declared that no group has."""
    declared = {name: value.name for name, value in vars(catalogue).items() if isinstance(value, Family)}
    assert declared == {family.name.split("_federation_")[1].upper(): family.name for family in FAMILIES}


# docs/metrics.md


def generate(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`scripts/generate_docs.py` as `make` calls it."""
    command = [sys.executable, str(root / "scripts" / "generate_docs.py"), *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


def test_the_documents_are_current() -> None:
    ran = generate("--check")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_document_that_is_not_current_is_told_with_the_difference_and_made_so(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "generate_docs.py", tmp_path / "scripts")
    page = tmp_path / "docs" / "metrics.md"
    fresh = page.read_text()
    page.write_text(fresh.replace("`trio_federation_uptime_seconds` | gauge", "`trio_federation_uptime` | gauge"))

    ran = generate("--check", root=tmp_path)
    assert ran.returncode == 1
    assert "\n-| `trio_federation_uptime` | gauge" in ran.stdout
    assert "\n+| `trio_federation_uptime_seconds` | gauge" in ran.stdout
    assert ran.stdout.endswith("docs/metrics.md is not current: run `make generate`\n")
    assert page.read_text() != fresh, "a check writes nothing"

    assert generate(root=tmp_path).returncode == 0
    assert page.read_text() == fresh
    page.unlink()
    assert "docs/metrics.md: missing" in generate("--check", root=tmp_path).stdout


def test_the_page_has_every_family_once_as_a_row_of_its_group() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for group in CATALOGUE:
        section = page.split(f"\n## {group.title}\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \|", section, re.M)
        assert rows == [family.name for family in group.families]
        alerts = re.findall(r"^- `(\w+)`: ", section, re.M)
        assert alerts == [family.name for family in group.families if family.alert]

"""The options of the sources and of the sink: what is taken, what is refused and how that is told, all before anything
is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trio_federation import seconds
from trio_federation.suggest import every_fault
from trio_federation_kubernetes.errors import KubeconfigError
from trio_federation_kubernetes.options import (
    CrdOptions,
    KubernetesOptions,
    SandboxSetOptions,
    StatusOptions,
    WarmPoolOptions,
    selector_fault,
)
from trio_federation_kubernetes.paths import Path as FieldPath
from trio_federation_kubernetes.resources import Resource

CRD: dict[str, Any] = {
    "group": "pools.example.com",
    "version": "v1",
    "resource": "runnerpools",
    "fields": {"env": "spec.template", "idle": "status.free", "ceiling": "spec.maxReplicas"},
}
ALL = [(KubernetesOptions, {}), (WarmPoolOptions, {}), (SandboxSetOptions, {}), (CrdOptions, CRD), (StatusOptions, {})]


def faults(**options: object) -> list[str]:
    return every_fault(options, KubernetesOptions, "source[0]")


def crd_faults(**options: object) -> list[str]:
    return every_fault({**CRD, **options}, CrdOptions, "source[0]")


def field_faults(**fields: object) -> list[str]:
    return crd_faults(fields={"env": "spec.template", "idle": "status.free", **fields})


@pytest.mark.parametrize("struct, least", ALL)
def test_all_tables_share_their_common_options(struct: type[msgspec.Struct], least: dict[str, Any]) -> None:
    bare: Any = msgspec.convert(least, struct)
    assert (bare.kubeconfig, bare.context, bare.namespaces, bare.label_selector, bare.page_size) == (
        None,
        None,
        None,
        "",
        500,
    )
    common = {
        "kubeconfig": "west.yaml",
        "context": "admin@west",
        "namespaces": ["a", "b-1"],
        "label_selector": "team in (blue)",
        "page_size": 50,
    }
    full: Any = msgspec.convert({**least, **common}, struct)
    assert full.namespaces == ("a", "b-1")
    assert full.page_size == 50
    assert every_fault({**least, **common, "contxt": "x"}, struct, "source[0]") == [
        'source[0].contxt: unknown key; did you mean "context"?'
    ]


@pytest.mark.parametrize(
    "options, fault",
    [
        ({"kubeconfig": ""}, "source[0].kubeconfig: expected the path of a kubeconfig"),
        ({"kubeconfig": "~bob/config"}, "source[0]: kubeconfig names the home of another user"),
        ({"context": ""}, "source[0].context: expected the name of a context"),
        ({"namespaces": []}, "source[0].namespaces: expected a list with at least one namespace; leave it out"),
        ({"namespaces": "a"}, "source[0].namespaces: expected a list with at least one namespace"),
        ({"namespaces": ["a", "b", "a"]}, "source[0]: namespaces[2] 'a' is there twice, first as [0]"),
        ({"namespaces": ["a", "West"]}, "source[0]: namespaces[1] 'West' is no lower-case RFC 1123 label"),
        ({"namespaces": ["a\n"]}, "source[0]: namespaces[0] 'a\\n' is no lower-case RFC 1123 label"),
        ({"namespaces": ["*"]}, "source[0]: namespaces[0] '*' is no lower-case RFC 1123 label"),
        ({"namespaces": ["a" * 64]}, "source[0]: namespaces[0] 'aaa"),
        ({"namespaces": [""]}, "source[0]: namespaces[0] '' is no lower-case RFC 1123 label"),
        ({"page_size": 0}, "source[0].page_size: expected a whole number from 1 to 10000"),
        ({"page_size": 10_001}, "source[0].page_size: expected a whole number from 1 to 10000"),
        ({"page_size": True}, "source[0].page_size: expected a whole number from 1 to 10000"),
        ({"label_selector": "a in b"}, "source[0]: label_selector 'a in b': position 6: expected \"(\""),
    ],
)
def test_each_fault_of_the_common_options_is_one_line(options: dict[str, object], fault: str) -> None:
    assert [line[: len(fault)] for line in faults(**options)] == [fault]


def test_where_a_kubeconfig_is() -> None:
    home = {"HOME": "/home/ana"}

    def path(kubeconfig: str | None, environment: dict[str, str]) -> Path | None:
        return KubernetesOptions(kubeconfig=kubeconfig).kubeconfig_path(Path("/etc/agent"), environment)

    assert path(None, home) is None
    assert path("west.yaml", home) == Path("/etc/agent/west.yaml")
    assert path("../west.yaml", {}) == Path("/etc/agent/../west.yaml")
    assert path("/k/west.yaml", {}) == Path("/k/west.yaml")
    assert path("~/.kube/west", home) == Path("/home/ana/.kube/west")
    assert path("~//.kube", home) == Path("/home/ana/.kube")
    assert path("a/~b", home) == Path("/etc/agent/a/~b")
    with pytest.raises(KubeconfigError, match="no HOME; write the whole path"):
        path("~/west", {})


def test_claims_are_read_unless_switched_off() -> None:
    assert WarmPoolOptions().claims
    assert not msgspec.convert({"claims": False}, WarmPoolOptions).claims


def test_a_sink_writes_now_and_then_unless_told_otherwise() -> None:
    options = StatusOptions()
    assert [seconds(options.refresh_interval), seconds(options.env_interval)] == [60, 5]
    assert options.writes_per_second == 20
    options = msgspec.convert({"refresh_interval": "10s", "env_interval": "10s", "writes_per_second": 1}, StatusOptions)
    assert (options.refresh_interval, options.env_interval, options.writes_per_second) == ("10s", "10s", 1.0)
    msgspec.convert({"refresh_interval": "2h", "env_interval": "100ms", "writes_per_second": 0.1}, StatusOptions)


@pytest.mark.parametrize(
    "options, fault",
    [
        ({"refresh_interval": 60}, "sink[0].refresh_interval: expected a duration in ms, s, m or h, such as"),
        ({"refresh_interval": "-60s"}, "sink[0].refresh_interval: expected a duration"),
        ({"refresh_interval": "9999ms"}, 'sink[0]: refresh_interval "9999ms": expected "10s" or longer'),
        ({"env_interval": "0s"}, 'sink[0]: env_interval "0s": expected "100ms" or longer, and no longer than'),
        (
            {"env_interval": "1.1m"},
            'sink[0]: env_interval "1.1m": expected "100ms" or longer, and no longer than refresh_interval, which is '
            '"60s"',
        ),
        ({"env_interval": "11s", "refresh_interval": "10s"}, 'sink[0]: env_interval "11s": expected "100ms" or'),
        ({"writes_per_second": 0.09}, "sink[0].writes_per_second: expected a number from 0.1 to 1000"),
        ({"writes_per_second": 1000.5}, "sink[0].writes_per_second: expected a number from 0.1 to 1000"),
        ({"writes_per_second": math.nan}, "sink[0].writes_per_second: expected a number from 0.1 to 1000"),
        ({"writes_per_second": True}, "sink[0].writes_per_second: expected a number from 0.1 to 1000"),
        ({"refresh": "1m"}, 'sink[0].refresh: unknown key; did you mean "refresh_interval"?'),
        # the options that it shares are looked at, too
        ({"namespaces": ["a", "a"]}, "sink[0]: namespaces[1] 'a' is there twice"),
    ],
)
def test_each_fault_of_a_sink_is_one_line(options: dict[str, object], fault: str) -> None:
    assert [line[: len(fault)] for line in every_fault(options, StatusOptions, "sink[0]")] == [fault]


@given(refresh=st.integers(0, 100_000), every=st.integers(0, 100_000))
@example(refresh=10_000, every=10_000)
@example(refresh=10_000, every=10_001)
@example(refresh=60_000, every=99)
@example(refresh=9_999, every=100)
def test_intervals_of_a_sink_are_in_order(refresh: int, every: int) -> None:
    found = every_fault({"refresh_interval": f"{refresh}ms", "env_interval": f"{every}ms"}, StatusOptions, "sink[0]")
    assert (found == []) == (refresh >= 10_000 and 100 <= every <= refresh)


def test_a_table_of_paths() -> None:
    options = msgspec.convert(CRD, CrdOptions)
    assert options.watched() == Resource("pools.example.com", "v1", "runnerpools")
    assert options.fields.paths() == {
        "env": FieldPath(("spec", "template")),
        "pool": FieldPath(("metadata", "name")),
        "idle": FieldPath(("status", "free")),
        "ceiling": FieldPath(("spec", "maxReplicas")),
    }
    assert msgspec.convert({**CRD, "group": ""}, CrdOptions).watched().path() == "/api/v1/runnerpools"


@pytest.mark.parametrize(
    "options, fault",
    [
        ({"group": "Pools"}, 'source[0].group: expected an API group, such as "pools.example.com", or "" for the core'),
        ({"group": "a/v1"}, "source[0].group: expected an API group"),
        ({"version": "pools.example.com/v1"}, "source[0].version: expected a version of the API group without"),
        ({"version": ""}, "source[0].version: expected a version"),
        ({"resource": "RunnerPool"}, "source[0].resource: expected the lower-case plural of a resource"),
        ({"resource": "runnerpools.pools.example.com"}, "source[0].resource: expected the lower-case plural"),
        ({"resource": "runnerpools/status"}, "source[0].resource: expected the lower-case plural"),
        ({"fields": {}}, "source[0].fields.idle: is missing; the table needs it"),
        (
            {"fields": {"idle": 3}},
            'source[0].fields.idle: expected a path in quotes, such as "status.free", got a whole',
        ),
        ({"fields": {"idle": "a", "idl": "b"}}, 'source[0].fields.idl: unknown key; did you mean "idle"?'),
    ],
)
def test_each_fault_of_a_crd_table_is_one_line(options: dict[str, object], fault: str) -> None:
    assert [line[: len(fault)] for line in crd_faults(**options)] == [fault]


def test_all_faults_of_the_paths_are_told_at_once() -> None:
    (line,) = field_faults(idle="status..free", group="a[*]", running="[0]")
    assert line.startswith("source[0].fields: group 'a[*]', position 3: a wildcard")
    assert "; idle 'status..free', position 8: a search" in line
    assert "; running '[0]': an object is no list" in line


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"running": "status.free.now"}, "one goes on where the other ends"),
        ({"running": "status"}, "one goes on where the other ends"),
        ({"idle": "a.b", "running": "a[0]"}, "a list for the one is an object for the other"),
        ({"group": "metadata"}, "metadata is an object"),
        ({"group": "metadata[0]"}, "metadata is an object"),
        ({"group": "metadata.namespace.x"}, "metadata.namespace is a text"),
        ({"group": "spec['a\"b']"}, "quotes, backslashes or control characters"),
        ({"group": "spec['a\tb']"}, "quotes, backslashes or control characters"),
    ],
)
def test_paths_that_cannot_lead_to_a_value_are_faults(fields: dict[str, object], words: str) -> None:
    (line,) = field_faults(**fields)
    assert words in line


def test_paths_may_share_all_but_their_ends_and_be_the_same() -> None:
    assert not field_faults(
        idle="a.b[0].c", running="a.b[1].d", pending="a.x", desired="a.b[0].c", group="metadata.name"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "a",
        "!a",
        "! a , b",
        "a=b",
        "a = b",
        "a==b",
        "a!=b",
        "a=",
        "a!=,b",
        "example.com/a=b",
        "a in (b)",
        "a in(b,c),d notin (e)",
        "a in ()",
        "a in (,)",
        "a in (,b,,c,)",
        "in in (in, notin)",
        "in=in",
        "notin",
        "a>5,a<007",
        "A_b.c-d=E_f.g-h",
        f"a={'b' * 63}",
    ],
)
def test_good_label_selectors(text: str) -> None:
    assert selector_fault(text) is None
    assert faults(label_selector=text) == []


@pytest.mark.parametrize(
    "text, position, words",
    [
        (",", 1, "the key of a label, got ','"),
        ("a,", 3, "the key of a label, got the end"),
        ("a,,b", 3, "the key of a label, got ','"),
        ("!", 2, "the key of a label, got the end"),
        ("!!a", 2, "the key of a label, got '!'"),
        ("=b", 1, "the key of a label"),
        ("a b", 3, "expected one of in, notin, ="),
        ("a is (b)", 3, "expected one of in, notin, ="),
        ("a===b", 4, "expected a value, got '='"),
        ("a=b c", 5, 'expected "," or the end'),
        ("a=b=c", 4, 'expected "," or the end'),
        ("!a=b", 3, 'expected "," or the end'),
        ("!a in (b)", 4, 'expected "," or the end'),
        ("a in b", 6, 'expected "(" and values'),
        ("a in", 5, 'expected "(" and values'),
        ("a in (b", 8, 'expected "," or ")"'),
        ("a in (b c)", 9, 'expected "," or ")"'),
        ("a in (b))", 9, 'expected "," or the end'),
        ("a in (b,!c)", 9, 'expected "," or ")"'),
        ("a>b", 3, "a whole number to compare with"),
        ("a>", 3, "a whole number to compare with"),
        ("a>-1", 3, "a whole number to compare with"),
        ("a<9223372036854775808", 3, "a whole number to compare with"),
        ("-a=b", 1, "a key, after its slash"),
        ("a/b/c", 1, "the part of a key before the slash"),
        (f"{'a' * 254}/a", 1, "the part of a key before the slash"),
        ("/a", 1, "the part of a key before the slash"),
        ("Example.com/a", 1, "the part of a key before the slash"),
        ("example.com/", 1, "a key, after its slash"),
        (f"{'a' * 64}", 1, "a key, after its slash"),
        ("a=b_", 3, "a value must be empty or"),
        ("a=b/c", 3, "a value must be empty or"),
        (f"a={'b' * 64}", 3, "a value must be empty or"),
        ("a in (b,-c)", 9, "a value must be empty or"),
        ("ä=b", 1, "a key, after its slash"),
        ("a='b'", 3, "a value must be empty or"),
        ("a\x0b=b", 1, "a key, after its slash"),
    ],
)
def test_the_fault_of_a_label_selector_is_told_with_its_place(text: str, position: int, words: str) -> None:
    fault = selector_fault(text)
    assert fault is not None
    assert fault.startswith(f"position {position}: ")
    assert words in fault
    assert len(faults(label_selector=text)) == 1


words = st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,9}[A-Za-z0-9])?", fullmatch=True)
keys = words | words.map(lambda word: f"example.com/{word}")
values = words | st.just("")
requirements = st.one_of(
    keys,
    keys.map(lambda key: f"!{key}"),
    st.builds(lambda key, sign, value: f"{key}{sign}{value}", keys, st.sampled_from(["=", "==", " != "]), values),
    st.builds(
        lambda key, word, chosen: f"{key} {word} ({', '.join(chosen)})",
        keys,
        st.sampled_from(["in", "notin"]),
        st.lists(values),
    ),
    st.builds(lambda key, sign, number: f"{key}{sign}{number}", keys, st.sampled_from("<>"), st.integers(0, 2**63 - 1)),
)


@given(st.lists(requirements).map(",".join))
def test_whatever_the_grammar_makes_is_a_label_selector(text: str) -> None:
    assert selector_fault(text) is None


@given(st.text(alphabet="ab,=!<>() 1-in/", max_size=12) | st.text(max_size=5))
def test_no_text_is_too_odd_for_the_check_of_label_selectors(text: str) -> None:
    fault = selector_fault(text)
    if fault is None:
        # what is good stays good with another requirement beside it
        assert selector_fault(f"a,{text}") is None or not text.strip(" \t\r\n")
    else:
        assert "\n" not in fault
        assert selector_fault(f"{text},a") is not None

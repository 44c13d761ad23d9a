"""Tables of paths against the OpenAPI v3 document of a resource. The document here has the shape of what a
kube-apiserver of version 1.36 makes of a CustomResourceDefinition, cut down to what matters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation_kubernetes.paths import Path, parse
from trio_federation_kubernetes.resources import Resource
from trio_federation_kubernetes.schema import Verdict, check

POOLS = Resource("pools.example.com", "v1", "runnerpools")
KIND = {"group": "pools.example.com", "version": "v1", "kind": "RunnerPool"}
META = "io.k8s.apimachinery.pkg.apis.meta.v1"


def reference(name: str) -> dict[str, Any]:
    return {"description": "…", "allOf": [{"$ref": f"#/components/schemas/{name}"}]}


DOCUMENT: dict[str, Any] = {
    "openapi": "3.0.0",
    "paths": {
        "/apis/pools.example.com/v1/runnerpools": {
            "get": {"x-kubernetes-action": "list", "x-kubernetes-group-version-kind": KIND},
            "parameters": [{"name": "limit", "in": "query"}],
        },
        "/apis/pools.example.com/v1/namespaces/{namespace}/runnerpools": {
            "get": {"x-kubernetes-action": "list", "x-kubernetes-group-version-kind": KIND},
            "post": {"x-kubernetes-action": "post", "x-kubernetes-group-version-kind": KIND},
            "parameters": [{"name": "limit", "in": "query"}],
        },
        "/apis/pools.example.com/v1/wides": {
            "get": {"x-kubernetes-group-version-kind": {**KIND, "kind": "Wide"}},
        },
        "/apis/pools.example.com/v1/namespaces/{namespace}/opens": {
            "get": {"x-kubernetes-group-version-kind": {**KIND, "kind": "Open"}},
        },
        "/apis/pools.example.com/v1/namespaces/{namespace}/ghosts": {
            "get": {"x-kubernetes-group-version-kind": {**KIND, "kind": "Ghost"}},
        },
    },
    "components": {
        "schemas": {
            "com.example.pools.v1.RunnerPool": {
                "type": "object",
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": reference(f"{META}.ObjectMeta"),
                    "spec": {
                        "type": "object",
                        "properties": {
                            "template": {"type": "string"},
                            "autoscale": {"type": "boolean"},
                            # without and with a pattern of its own
                            "maxReplicas": {
                                "anyOf": [{"type": "integer"}, {"type": "string"}],
                                "x-kubernetes-int-or-string": True,
                            },
                            "replicas": {
                                "pattern": "^[0-9]+$",
                                "allOf": [{"anyOf": [{"type": "integer"}, {"type": "string"}]}],
                                "x-kubernetes-int-or-string": True,
                            },
                            "settings": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                            "raw": {"type": "object"},
                            "vague": {"anyOf": [{"type": "boolean"}, {"minLength": 1}]},
                            "slashed": {"$ref": "#/components/schemas/a~1b~0c"},
                            "surge": reference("io.k8s.apimachinery.pkg.util.intstr.IntOrString"),
                            "memory": {"$ref": "#/components/schemas/io.k8s.apimachinery.pkg.api.resource.Quantity"},
                            "node": reference("com.example.pools.v1.Node"),
                            "gone": {**reference("com.example.pools.v1.Gone"), "properties": {"x": {"type": "string"}}},
                        },
                    },
                    "status": {
                        "type": "object",
                        "anyOf": [{"required": ["free"]}, {"properties": {"busy": {"minimum": 0}}}],
                        "properties": {
                            "free": {"type": "integer", "nullable": True, "format": "int32"},
                            "busy": {"type": "integer"},
                            "words": {"type": "string"},
                            "share": {"type": "number"},
                            "any": {"x-kubernetes-preserve-unknown-fields": True},
                            "byZone": {"type": "object", "additionalProperties": {"type": "integer"}},
                            "open": {"type": "object", "additionalProperties": True},
                            "closed": {
                                "type": "object",
                                "properties": {"a": {"type": "integer"}},
                                "additionalProperties": False,
                            },
                            "conditions": {"type": "array", "items": {"type": "object"}},
                            "pools": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "properties": {"name": {"type": "string"}, "busy": {"type": "integer"}},
                                },
                            },
                        },
                    },
                },
                "x-kubernetes-group-version-kind": [KIND],
            },
            "com.example.pools.v1.RunnerPoolList": {
                "type": "object",
                "properties": {"items": {"type": "array"}},
                "x-kubernetes-group-version-kind": [{**KIND, "kind": "RunnerPoolList"}],
            },
            # refers to itself, which an aggregated API may do
            "com.example.pools.v1.Node": {
                "type": "object",
                "allOf": [{"$ref": "#/components/schemas/com.example.pools.v1.Node"}],
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"$ref": "#/components/schemas/com.example.pools.v1.Node"},
                },
            },
            "com.example.pools.v1.Open": {
                "type": "object",
                "x-kubernetes-group-version-kind": [{**KIND, "kind": "Open"}],
            },
            "a/b~c": {"type": "string"},
            f"{META}.ObjectMeta": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "namespace": {"type": "string"},
                    "generation": {"type": "integer", "format": "int64"},
                    "labels": {"type": "object", "additionalProperties": {"type": "string", "default": ""}},
                },
            },
            "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {
                "format": "int-or-string",
                "oneOf": [{"type": "integer"}, {"type": "string"}],
            },
            "io.k8s.apimachinery.pkg.api.resource.Quantity": {"oneOf": [{"type": "string"}, {"type": "number"}]},
        }
    },
}


def verdict(texts: dict[str, str], document: object = DOCUMENT, resource: Resource = POOLS) -> Verdict | None:
    return check(document, resource, {name: parse(text) for name, text in texts.items()})


def fault(name: str, text: str) -> str | None:
    found = verdict({name: text})
    assert found is not None
    assert len(found.faults) <= 1
    return found.faults[0] if found.faults else None


@pytest.mark.parametrize(
    "name, text",
    [
        ("env", "spec.template"),
        ("env", "metadata.labels['example.com/env']"),
        ("pool", "metadata.name"),
        ("group", "spec.maxReplicas"),
        ("group", "status.any"),
        ("idle", "status.free"),
        ("idle", "status.share"),
        ("idle", "status.pools[3].busy"),
        ("idle", "status.byZone['zone.a']"),
        ("idle", "status.open.x.y[0]"),
        ("idle", "status.any.x[0].y"),
        ("idle", "spec.settings.a.b"),
        ("idle", "spec.raw.a.b"),
        ("idle", "spec.vague"),
        ("idle", "spec.node.next.next.next.value"),
        ("idle", "spec.gone.y.z"),
        ("idle", "metadata.generation"),
        ("autoscaling", "spec.autoscale"),
        ("autoscaling", "spec.settings.on"),
    ],
)
def test_what_the_schema_has_or_leaves_open_is_no_fault(name: str, text: str) -> None:
    assert fault(name, text) is None


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("idle", "status.fre", "fields.idle 'status.fre': status has no field 'fre'; did you mean \"status.free\"?"),
        ("idle", "stat.free", "an object of this resource has no field 'stat'; did you mean \"status.free\"?"),
        ("idle", "STATUS.free", 'did you mean "status.free"?'),
        ("idle", "free", "has no field 'free'; valid here: apiVersion, kind, metadata, spec, status"),
        ("idle", "status.pools[0].bsy", "status.pools[0] has no field 'bsy'; did you mean \"status.pools[0].busy\"?"),
        ("pool", "metadata.nme", 'did you mean "metadata.name"?'),
        ("idle", "status.closed.b", "status.closed has no field 'b'"),
        ("idle", "spec.node.next.vlue", 'did you mean "spec.node.next.value"?'),
        # the path goes on, or has to
        ("idle", "status.pools.busy", "status.pools is a list and has no field 'busy'; name an item of it, such as"),
        ("idle", "status.free.now", "status.free is a whole number and has no field 'now'"),
        ("idle", "spec.maxReplicas.x", "spec.maxReplicas is a whole number or a text and has no field 'x'"),
        ("idle", "metadata.labels.a.b", "metadata.labels.a is a text and has no field 'b'"),
        ("idle", "status[0]", "status is an object, no list, and so has no item [0]"),
        ("idle", "status.words[0]", "status.words is a text, no list"),
        ("idle", "spec.slashed.x", "spec.slashed is a text"),
        # it ends at something else than what is read
        ("idle", "status", "status is an object, where a whole number is read"),
        ("desired", "status.pools", "status.pools is a list, where a whole number is read"),
        ("running", "spec.autoscale", "spec.autoscale is true or false, where a whole number is read"),
        ("ceiling", "status.conditions[0]", "status.conditions[0] is an object, where a whole number is read"),
        ("env", "status.free", "fields.env 'status.free': status.free is a whole number, where a text is read"),
        ("pool", "metadata", "metadata is an object, where a text is read"),
        ("group", "metadata.labels", "metadata.labels is an object, where a text is read"),
        ("autoscaling", "spec.maxReplicas", "is a whole number or a text, where true or false is read"),
    ],
)
def test_a_path_that_leads_nowhere_is_a_fault(name: str, text: str, expected: str) -> None:
    found = fault(name, text)
    assert found is not None
    assert expected in found
    assert "\n" not in found


def test_each_path_has_a_fault_of_its_own() -> None:
    found = verdict({"env": "spec.tmplate", "pool": "metadata.name", "idle": "status.fre", "running": "status.busy"})
    assert found is not None
    assert [line.split(" ")[0] for line in found.faults] == ["fields.env", "fields.idle"]


def test_counts_that_may_be_texts_are_told() -> None:
    found = verdict(
        {
            "env": "spec.template",
            "group": "status.any",
            "idle": "status.free",
            "running": "status.words",
            "pending": "status.any.x",
            "desired": "spec.replicas",
            "ceiling": "spec.maxReplicas",
        }
    )
    assert found == Verdict((), frozenset(["running", "pending", "desired", "ceiling"]))
    found = verdict(
        {"idle": "spec.surge", "running": "spec.memory", "desired": "status.share", "autoscaling": "status.any"}
    )
    assert found == Verdict((), frozenset(["idle", "running"]))


def test_what_a_document_does_not_describe_cannot_be_told() -> None:
    idle = {"idle": "status.free"}
    assert verdict(idle, resource=Resource("pools.example.com", "v1", "runnerpool")) is None
    assert verdict(idle, resource=Resource("pools.example.com", "v2", "runnerpools")) is None
    assert verdict(idle, resource=Resource("", "v1", "pods")) is None
    # served, but without a schema in the document; and with one that says nothing
    assert verdict(idle, resource=Resource("pools.example.com", "v1", "ghosts")) is None
    found = verdict(idle, resource=Resource("pools.example.com", "v1", "opens"))
    assert found == Verdict((), frozenset(["idle"]))


def test_a_cluster_wide_resource_is_a_fault() -> None:
    found = verdict({"idle": "status.free"}, resource=Resource("pools.example.com", "v1", "wides"))
    assert found == Verdict(
        ("wides.pools.example.com is cluster-wide; only namespaced resources can be read",), frozenset()
    )


trees: st.SearchStrategy[Any] = st.recursive(
    st.just("integer"),
    lambda inner: (
        st.dictionaries(st.text("abc.'\\[", min_size=1, max_size=4), inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=1)
    ),
    max_leaves=8,
)


def schema(tree: Any) -> dict[str, Any]:
    if isinstance(tree, dict):
        return {"type": "object", "properties": {name: schema(inner) for name, inner in tree.items()}}
    return {"type": "array", "items": schema(tree[0])} if isinstance(tree, list) else {"type": tree}


def leaves(tree: Any) -> list[tuple[str | int, ...]]:
    if isinstance(tree, dict):
        return [(name, *rest) for name, inner in tree.items() for rest in leaves(inner)]
    return [(7, *rest) for rest in leaves(tree[0])] if isinstance(tree, list) else [()]


@given(st.dictionaries(st.sampled_from(["spec", "status"]), trees, min_size=1))
def test_all_leaves_of_a_schema_are_good_and_nothing_else_is(tree: dict[str, Any]) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["components"]["schemas"]["com.example.pools.v1.RunnerPool"].update(schema(tree))
    for leaf in leaves(tree):
        assert check(document, POOLS, {"idle": Path(leaf)}) == Verdict((), frozenset())
        # cut short, gone on with, and each name misspelt
        wrong = [leaf[:length] for length in range(1, len(leaf))] + [(*leaf, "x"), (*leaf, 0)]
        wrong += [(*leaf[:at], f"{step}x", *leaf[at + 1 :]) for at, step in enumerate(leaf)]
        for steps in wrong:
            found = check(document, POOLS, {"idle": Path(steps)})
            assert found is not None
            assert len(found.faults) == 1


odd: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["object", "array", "#/components/schemas/x", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "properties",
                    "items",
                    "allOf",
                    "anyOf",
                    "$ref",
                    "additionalProperties",
                    "status",
                    "free",
                    "format",
                ]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=10,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a document, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((value, key), *places(inner))]


@given(st.lists(st.tuples(st.integers(min_value=0), odd), min_size=1, max_size=4))
def test_no_document_is_too_odd(changes: list[tuple[int, Any]]) -> None:
    document = copy.deepcopy(DOCUMENT)
    for number, value in changes:
        if found := places(document):
            container, key = found[number % len(found)]
            container[key] = value
    paths = {
        "idle": "status.free",
        "env": "metadata.labels.a",
        "running": "status.pools[0].busy",
        "group": "spec.node.x",
    }
    result = verdict(paths, document)
    assert result is None or all(isinstance(line, str) for line in result.faults)


@given(odd)
def test_anything_may_come_instead_of_a_document(document: Any) -> None:
    assert verdict({"idle": "status.free"}, document) is None


def test_a_document_that_is_nested_without_end_costs_no_stack() -> None:
    document = copy.deepcopy(DOCUMENT)
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(50_000):
        inner = {"allOf": [inner]}
    schemas = document["components"]["schemas"]
    schemas["com.example.pools.v1.RunnerPool"]["properties"]["status"]["properties"]["free"] = inner
    assert verdict({"idle": "status.free"}, document) == Verdict((), frozenset())
    while inner.get("allOf"):  # taken apart in a loop, as Python would do it by recursion
        (inner,) = inner.pop("allOf")

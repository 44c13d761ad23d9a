"""Tables of paths, and what a mirror writes, against the OpenAPI v3 document of a resource. The documents here have the
shape of what a kube-apiserver of version 1.36 makes of a CustomResourceDefinition, cut down to what matters; the
documents of a real one are looked at in tests/apiserver."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trio_federation_kubernetes.paths import Path, parse
from trio_federation_kubernetes.resources import Resource
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS
from trio_federation_kubernetes.schema import StatusFields, StatusVerdict, Verdict, check, check_status

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


# Whether a status may be written.

DEFINITION = FilePath(__file__).resolve().parents[2] / "config" / "kubernetes" / "crd" / "sandboxenvs.yaml"
SANDBOXENV = {"group": "agents.navix.sh", "version": "v1alpha1", "kind": "SandboxEnv"}
COLLECTION = SANDBOXENVS.path("{namespace}")
SUBRESOURCE = f"{COLLECTION}/{{name}}/status"
KEEPS = "x-kubernetes-preserve-unknown-fields"
ENTRY = frozenset(
    [
        "isLocal",
        "lastSnapshotTime",
        "observedMembers",
        "idleReplicas",
        "runningReplicas",
        "desiredReplicas",
        "scalingGroups",
    ]
)
MEMBER = frozenset(
    [
        "name",
        "scalingGroup",
        "idleCount",
        "runningCount",
        "desiredReplicas",
        "pendingRequests",
        "autoscalingEnabled",
        "scaleUpHeadroom",
        "saturatedUntil",
        "state",
    ]
)
GROUP = ("name", "totalIdle", "totalRunning", "totalDesired", "totalPending")
ALL_FIELDS = StatusFields(True, ENTRY, MEMBER)
CLUSTERS = "status.clusters"
MEMBERS = f"{CLUSTERS}.observedMembers"
GROUPS = f"{CLUSTERS}.scalingGroups"


@functools.cache
def definition() -> dict[str, Any]:
    """The schema of SandboxEnvs in config/kubernetes."""
    (version,) = yaml.safe_load(DEFINITION.read_text(encoding="utf-8"))["spec"]["versions"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


def sandboxenvs() -> dict[str, Any]:
    """Their document, to be changed at will."""
    operations = {each: {"x-kubernetes-group-version-kind": SANDBOXENV} for each in ("get", "put", "patch")}
    return {
        "openapi": "3.0.0",
        "paths": {path: copy.deepcopy(operations) for path in (COLLECTION, f"{COLLECTION}/{{name}}", SUBRESOURCE)},
        "components": {
            "schemas": {
                "sh.navix.agents.v1alpha1.SandboxEnv": {
                    **copy.deepcopy(definition()),
                    "x-kubernetes-group-version-kind": [SANDBOXENV],
                }
            }
        },
    }


def at(document: dict[str, Any], path: str) -> dict[str, Any]:
    """What a document says of a field of SandboxEnvs: names joined by dots, items of a list without a sign."""
    found: dict[str, Any] = document["components"]["schemas"]["sh.navix.agents.v1alpha1.SandboxEnv"]
    for name in filter(None, path.split(".")):
        found = found.get("items", found)["properties"][name]
    return found


def of_status(document: object) -> StatusVerdict:
    found = check_status(document, SANDBOXENVS)
    assert found is not None
    return found


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """The same, but no field is kept that is not declared."""
    for container, key in places(document):
        if key == KEEPS:
            del container[key]
    return document


@pytest.mark.parametrize("adapt", [lambda document: document, closed])
def test_what_is_defined_here_may_be_written_whole(adapt: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    assert of_status(adapt(sandboxenvs())) == StatusVerdict((), ALL_FIELDS)


def without_keys(path: str) -> Callable[[dict[str, Any]], None]:
    def adapt(document: dict[str, Any]) -> None:
        del at(document, path)["x-kubernetes-list-type"], at(document, path)["x-kubernetes-list-map-keys"]

    return adapt


def saying(path: str, **words: object) -> Callable[[dict[str, Any]], None]:
    """Says something else of a field; "type_" and "keys" stand for what has dashes."""
    names = {"type_": "x-kubernetes-list-type", "keys": "x-kubernetes-list-map-keys"}
    return lambda document: at(document, path).update({names.get(name, name): word for name, word in words.items()})


def without(path: str, *, kept: bool = False) -> Callable[[dict[str, Any]], None]:
    """Does not have a field, and does not keep it where it is not `kept`."""

    def adapt(document: dict[str, Any]) -> None:
        above, _, name = path.rpartition(".")
        whole = at(document, above)
        whole = whole.get("items", whole)
        del whole["properties"][name]
        whole[KEEPS] = kept

    return adapt


def requiring(path: str, *names: str) -> Callable[[dict[str, Any]], None]:
    """The items of a list must have these fields."""
    return lambda document: at(document, path)["items"].update(required=list(names))


def test_what_is_always_written_may_be_required() -> None:
    document = sandboxenvs()
    requiring(CLUSTERS, "clusterID", "isLocal", "lastSnapshotTime", "observedMembers")(document)
    counts = ("idleCount", "runningCount", "desiredReplicas", "pendingRequests", "autoscalingEnabled")
    requiring(MEMBERS, "name", *counts)(document)
    at(document, "status.federation")["required"] = ["clusters", "idleReplicas", "lastSnapshotTime"]
    assert of_status(document) == StatusVerdict((), ALL_FIELDS)
    at(document, "status.federation")["required"].append("health")
    assert of_status(document) == StatusVerdict((), ALL_FIELDS._replace(federation=False))


def without_operation(document: dict[str, Any]) -> None:
    del document["paths"][SUBRESOURCE]["patch"]


def without_subresource(document: dict[str, Any]) -> None:
    del document["paths"][SUBRESOURCE]


KEYS = "x-kubernetes-list-type: map and x-kubernetes-list-map-keys: "
INSTALL = "or install config/kubernetes/crd/sandboxenvs.yaml"
UNKEYED = "is a list without keys, so an apply would replace entries of others; make it a list with"


@pytest.mark.parametrize(
    "adapt, fault",
    [
        (without_keys(CLUSTERS), f"status.clusters {UNKEYED} {KEYS}[clusterID] in your definition, {INSTALL}"),
        (saying(CLUSTERS, type_="atomic"), f"status.clusters {UNKEYED}"),
        (saying(CLUSTERS, type_="set"), f"status.clusters {UNKEYED}"),
        (saying(CLUSTERS, keys=[]), f"status.clusters {UNKEYED}"),
        (
            saying(CLUSTERS, keys=["clusterID", "region"]),
            "status.clusters is a list with the keys clusterID, region in place of clusterID, so an apply would",
        ),
        (saying(CLUSTERS, type="object"), "status.clusters is an object, where a list is needed; make it a list with"),
        (without(CLUSTERS), f"status.clusters is not declared as a list; make it a list with {KEYS}[clusterID] in"),
        # lists that are not declared have no keys
        (without(CLUSTERS, kept=True), "status.clusters is not declared as a list"),
        (without("status"), "status.clusters is not declared as a list"),
        (
            without_keys(MEMBERS),
            f"status.clusters[].observedMembers {UNKEYED} {KEYS}[name] in your definition, {INSTALL}",
        ),
        (saying(MEMBERS, keys=["id"]), "status.clusters[].observedMembers is a list with the keys id in place of name"),
        (saying(MEMBERS, type="string"), "status.clusters[].observedMembers is a text, where a list is needed"),
        (without(MEMBERS), "status.clusters[].observedMembers is not declared as a list"),
        (without(MEMBERS, kept=True), "status.clusters[].observedMembers is not declared as a list"),
        (
            without(f"{CLUSTERS}.isLocal"),
            "status.clusters[].isLocal is not declared as true or false, so entries of other clusters could be taken "
            f"for the cluster's own; declare it with type: boolean in your definition, {INSTALL}",
        ),
        (saying(f"{CLUSTERS}.isLocal", type="string"), "status.clusters[].isLocal is not declared as true or false"),
        (
            without_subresource,
            "sandboxenvs.agents.navix.sh has no status subresource, and nothing else of an object is written; add "
            f"subresources: {{status: {{}}}} to its version in your definition, {INSTALL}",
        ),
        (without_operation, "sandboxenvs.agents.navix.sh has no status subresource"),
        # as tools make it of fields that are always written by somebody else
        (
            requiring(MEMBERS, "name", "idleCount", "state", "scalingGroup"),
            "status.clusters[].observedMembers[] requires scalingGroup, state, which is not known of every pool or "
            "cluster; make it optional in your definition, or install config",
        ),
        (requiring(CLUSTERS, "clusterID", "health"), "status.clusters[] requires health, which is not known of every"),
    ],
)
def test_each_reason_not_to_write_is_one_fault(adapt: Callable[[dict[str, Any]], None], fault: str) -> None:
    document = sandboxenvs()
    adapt(document)
    (found,) = of_status(document).faults
    assert found.startswith(fault)
    assert found.endswith(INSTALL)
    assert "\n" not in found


def test_all_reasons_are_told_at_once() -> None:
    document = sandboxenvs()
    for adapt in (without_subresource, without_keys(CLUSTERS), without_keys(MEMBERS), without(f"{CLUSTERS}.isLocal")):
        adapt(document)
    places = [line.split(" ")[0] for line in of_status(document).faults]
    assert places == [
        "sandboxenvs.agents.navix.sh",
        "status.clusters",
        "status.clusters[].observedMembers",
        "status.clusters[].isLocal",
    ]


#: where fields may be missing, by the field's path; not those without which nothing is written
OPTIONAL = [
    *(f"{CLUSTERS}.{name}" for name in sorted(ENTRY - {"isLocal", "observedMembers"})),
    *(f"{MEMBERS}.{name}" for name in sorted(MEMBER - {"name"})),
    *(f"{GROUPS}.{name}" for name in GROUP),
    *(f"status.federation{name}" for name in ("", ".clusters", ".idleReplicas", ".lastSnapshotTime")),
]


@given(st.sets(st.sampled_from(OPTIONAL)), st.sampled_from(["gone", "of another type"]))
def test_what_is_not_declared_is_not_written(missing: set[str], how: str) -> None:
    document = closed(sandboxenvs())
    for path in sorted(missing, reverse=True):  # what is inside comes first
        above, _, name = path.rpartition(".")
        whole = at(document, above)
        properties = whole.get("items", whole)["properties"]
        if how == "gone":
            del properties[name]
        else:
            # nothing that is written is text in one place and true or false in another
            properties[name]["type"] = "boolean" if properties[name]["type"] != "boolean" else "string"
    entry = {name for name in ENTRY if f"{CLUSTERS}.{name}" not in missing}
    if any(path.startswith(GROUPS) for path in missing):
        entry -= {"scalingGroups"}  # all of it, or nothing: a sum without its counts would read as none
    member = {name for name in MEMBER if f"{MEMBERS}.{name}" not in missing}
    federation = not any(path.startswith("status.federation") for path in missing)
    assert of_status(document) == StatusVerdict((), StatusFields(federation, frozenset(entry), frozenset(member)))


@given(st.sets(st.sampled_from([path for path in OPTIONAL if path not in (GROUPS, "status.federation")])))
def test_what_is_kept_without_being_declared_is_written(missing: set[str]) -> None:
    document = sandboxenvs()
    for path in missing:
        without(path, kept=True)(document)
    assert of_status(document) == StatusVerdict((), ALL_FIELDS)


def test_sums_by_group_need_a_list_with_keys() -> None:
    for adapt in (without_keys(GROUPS), saying(GROUPS, keys=["id"]), without(GROUPS, kept=True)):
        document = sandboxenvs()
        adapt(document)
        assert of_status(document) == StatusVerdict((), StatusFields(True, ENTRY - {"scalingGroups"}, MEMBER))


def test_what_the_federation_comes_to_may_be_kept_without_being_declared() -> None:
    document = sandboxenvs()
    without("status.federation", kept=True)(document)
    assert of_status(document) == StatusVerdict((), ALL_FIELDS)
    # but an object that says nothing of its fields has none
    document = sandboxenvs()
    at(document, "status")["properties"]["federation"] = {"type": "object"}
    assert of_status(document).fields == ALL_FIELDS._replace(federation=False)
    at(document, "status")["properties"]["federation"] = {"type": "object", "additionalProperties": True}
    assert of_status(document).fields == ALL_FIELDS


def test_a_schema_may_be_put_together_from_others() -> None:
    document = sandboxenvs()
    schemas = document["components"]["schemas"]
    for name, path in (("Entry", CLUSTERS), ("Member", MEMBERS)):
        schemas[name] = at(document, path)["items"]
    at(document, CLUSTERS)["items"] = {"allOf": [{"$ref": "#/components/schemas/Entry"}]}
    schemas["Entry"]["properties"]["observedMembers"]["items"] = {"$ref": "#/components/schemas/Member"}
    assert of_status(document) == StatusVerdict((), ALL_FIELDS)


def test_nothing_is_written_that_a_document_does_not_describe() -> None:
    assert check_status(DOCUMENT, SANDBOXENVS) is None
    assert check_status(None, SANDBOXENVS) is None
    document = sandboxenvs()
    del document["components"]["schemas"]["sh.navix.agents.v1alpha1.SandboxEnv"]
    assert check_status(document, SANDBOXENVS) is None
    assert check_status(DOCUMENT, Resource("pools.example.com", "v1", "wides")) == StatusVerdict(
        ("wides.pools.example.com is cluster-wide; only namespaced resources can be written",),
        StatusFields(False, frozenset(), frozenset()),
    )
    # one that is described by nothing but its kind
    found = check_status(DOCUMENT, Resource("pools.example.com", "v1", "opens"))
    assert found is not None
    assert [line.split(" ")[0] for line in found.faults] == ["opens.pools.example.com", "status.clusters"]


@given(st.lists(st.tuples(st.integers(min_value=0), odd), min_size=1, max_size=4))
def test_whatever_a_document_says_nothing_is_written_without_keys(changes: list[tuple[int, Any]]) -> None:
    document = sandboxenvs()
    for number, value in changes:
        if found := places(document):
            container, key = found[number % len(found)]
            container[key] = value
    verdict = check_status(document, SANDBOXENVS)
    if verdict is None or verdict.faults:
        assert verdict is None or all("\n" not in line for line in verdict.faults)
        return
    for path, keys in ((CLUSTERS, ["clusterID"]), (MEMBERS, ["name"])):
        said = at(document, path)
        assert (said["x-kubernetes-list-type"], said["x-kubernetes-list-map-keys"]) == ("map", keys)
    assert "patch" in document["paths"][SUBRESOURCE]


@given(odd)
def test_anything_may_come_instead_of_a_document_to_write_by(document: Any) -> None:
    assert check_status(document, SANDBOXENVS) is None

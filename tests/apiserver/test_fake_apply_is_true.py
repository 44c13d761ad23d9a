"""The API server in memory, which tests of the sink write to, is true: what it makes of writes to the status of a
SandboxEnv is what a real one makes of them, step by step: the status, who owns which of its fields, whether there is a
new version, and why something is refused. And its description of SandboxEnvs says what a real one's does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.apiserver.build import Programs
from tests.apiserver.cluster import SETTLE_WITHIN, ApiServer, looked, started
from tests.apiserver.following import SANDBOXENVS_CRD
from tests.kubernetes.fake_api import FakeServer, described, sandboxenvs
from trio_federation_kubernetes.errors import ApiError
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS

Json: TypeAlias = dict[str, Any]

_numbers = itertools.count(1)


class Step(NamedTuple):
    """A write to the status."""

    #: "force" is an apply that is forced; "put" replaces all of the status, as it was just read
    what: Literal["apply", "force", "merge", "put"]
    manager: str
    #: without a key "status", the body has none
    body: Json


def apply(manager: str, **status: object) -> Step:
    return Step("apply", manager, {"status": status})


def let_go(manager: str) -> Step:
    """An apply that says nothing at all of the status."""
    return Step("apply", manager, {})


def force(manager: str, **status: object) -> Step:
    return Step("force", manager, {"status": status})


def merge(manager: str, **status: object) -> Step:
    return Step("merge", manager, {"status": status})


def put(manager: str, **status: object) -> Step:
    return Step("put", manager, {"status": status})


def cluster(name: str, *members: Json, **values: object) -> Json:
    return {"clusterID": name, **({"observedMembers": list(members)} if members else {}), **values}


def member(name: str, **values: object) -> Json:
    return {"name": name, **values}


class Outcome(NamedTuple):
    """What there is after a step."""

    status: object
    #: by name, operation and subresource: fieldsV1, and whether there is a time
    owners: dict[tuple[str, str, str], tuple[Json, bool]]
    #: whether the object has a new version
    changed: bool
    #: code, reason, message and causes, as far as they are of interest
    refusal: tuple[object, ...] | None


class Peer(Protocol):
    def create(self, name: str, spec: Json | None) -> None: ...

    def write(self, name: str, step: Step) -> tuple[object, ...] | None:
        """Says why it is refused, if it is."""

    def read(self, name: str) -> Json: ...


def refusal(code: int, reason: str, message: str, causes: list[tuple[str, str, str]]) -> tuple[object, ...]:
    if code == 409:
        return code, reason, message, sorted(causes)
    # Of an object that is no good, all that counts is where.
    return code, reason, sorted((why, field) for why, field, _ in causes)


class Real:
    """The real one."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.server = server
        self.root = SANDBOXENVS.path(namespace)
        self.namespace = namespace

    def create(self, name: str, spec: Json | None) -> None:
        body = identity(self.namespace, name) | ({} if spec is None else {"spec": spec})
        self.server.call("POST", self.root, body, {"fieldManager": "controller"})

    def write(self, name: str, step: Step) -> tuple[object, ...] | None:
        body = step.body
        params = {"fieldManager": step.manager, "fieldValidation": "Strict"}
        match step.what:
            case "apply" | "force":
                method, kind, body = "PATCH", "application/apply-patch+yaml", identity(self.namespace, name) | body
                params |= {"force": "true"} if step.what == "force" else {}
            case "merge":
                method, kind = "PATCH", "application/merge-patch+json"
            case "put":
                method, kind, body = "PUT", "application/json", self.read(name) | body
        answer = self.server.admin.request(
            method,
            f"{self.root}/{name}/status",
            content=json.dumps(body),
            params=params,
            headers={"Content-Type": kind},
        )
        if answer.is_success:
            assert answer.json() == self.read(name)
            return None
        status = answer.json()
        causes = [
            (each["reason"], each["field"], each["message"]) for each in status.get("details", {}).get("causes", ())
        ]
        return refusal(status["code"], status.get("reason", ""), status["message"], causes)

    def read(self, name: str) -> Json:
        return self.server.call("GET", f"{self.root}/{name}")


class Fake:
    """The one in memory."""

    def __init__(self, namespace: str) -> None:
        self.server = FakeServer(SANDBOXENVS)
        self.namespace = namespace

    def create(self, name: str, spec: Json | None) -> None:
        body = {} if spec is None else {"spec": spec}
        self.server.put(SANDBOXENVS, self.namespace, name, manager="controller", **body)

    def write(self, name: str, step: Step) -> tuple[object, ...] | None:
        def replace(status: Json) -> None:
            status.clear()
            status.update(step.body["status"])

        where = (SANDBOXENVS, self.namespace, name)
        try:
            match step.what:
                case "apply" | "force":
                    self.server.apply_as(*where, step.body, step.manager, step.what == "force")
                case "merge":
                    self.server.merge_patch(*where, step.body, step.manager)
                case "put":
                    self.server.edit(*where, replace, step.manager)
        except ApiError as error:
            causes = [(cause.reason, cause.field, cause.message) for cause in error.causes]
            return refusal(error.code, error.status_reason, error.message, causes)
        return None

    def read(self, name: str) -> Json:
        return self.server.get(SANDBOXENVS, self.namespace, name)


def identity(namespace: str, name: str) -> Json:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "agents.navix.sh/v1alpha1", "kind": "SandboxEnv", "metadata": metadata}


def outcomes(peer: Peer, spec: Json | None, steps: list[Step]) -> list[Outcome]:
    """What comes of it, with a new object."""
    name = f"env-{next(_numbers)}"
    peer.create(name, spec)
    found = []
    version = peer.read(name)["metadata"]["resourceVersion"]
    for step in steps:
        why = peer.write(name, step)
        after = peer.read(name)
        owners = {
            (each["manager"], each["operation"], each.get("subresource", "")): (each["fieldsV1"], "time" in each)
            for each in after["metadata"].get("managedFields", ())
        }
        changed = after["metadata"]["resourceVersion"] != version
        version = after["metadata"]["resourceVersion"]
        found.append(Outcome(after.get("status"), owners, changed, why))
    return found


@pytest.fixture(scope="module")
def defined(api_server: ApiServer) -> ApiServer:
    """The server that tests share, with the definition of SandboxEnvs."""
    api_server.create_crds([SANDBOXENVS_CRD])
    return api_server


EAST = cluster("east", member("a", idleCount=1, state="Active"), isLocal=False, lastSnapshotTime="2030-01-02T03:04:05Z")
EAST_LATER = cluster(
    "east", member("a", idleCount=2, state="Active"), isLocal=False, lastSnapshotTime="2030-01-02T03:05:05Z"
)
NORTH = cluster("north", idleReplicas=3, scalingGroups=[{"name": "gpu", "totalIdle": 3}], isLocal=False)
WEST = cluster("west", member("p", idleCount=4), isLocal=True)
FEDERATION = {"clusters": 2, "idleReplicas": 4, "lastSnapshotTime": "2030-01-02T03:04:05Z"}
SPEC = {"clusters": [{"clusterID": "west", "members": [{"name": "p", "config": {"scalingGroup": "gpu"}}]}]}

#: what is done, and the refusals that there are on the way
SCRIPTS: dict[str, tuple[list[Step], list[int | None]]] = {
    "a mirror beside a controller": (
        [
            merge("controller", idleReplicas=4, clusters=[WEST]),
            apply("us", clusters=[EAST, NORTH], federation=FEDERATION),
            apply("us", clusters=[EAST, NORTH], federation=FEDERATION),
            apply("us", clusters=[NORTH, EAST_LATER], federation=FEDERATION),
            apply("us", clusters=[EAST_LATER]),
            let_go("us"),
            let_go("us"),
        ],
        [None] * 7,
    ),
    "an empty status is owned": (
        [merge("controller", clusters=[WEST]), apply("us", clusters=[EAST]), apply("us"), apply("us", clusters=[])],
        [None] * 4,
    ),
    "an empty status that is alone": ([apply("us", clusters=[EAST]), apply("us"), let_go("us")], [None, 422, None]),
    "members come and go": (
        [
            apply("us", clusters=[cluster("east", member("a"), member("b", idleCount=1))]),
            apply("us", clusters=[cluster("east", member("b", idleCount=1), member("c"), member("a", state="x"))]),
            apply("us", clusters=[cluster("east", member("c"))]),
            apply("us", clusters=[cluster("east")]),
        ],
        [None] * 4,
    ),
    "a conflict with an update": (
        [
            merge("ops", clusters=[EAST]),
            apply("us", clusters=[EAST_LATER, NORTH]),
            apply("us", clusters=[EAST, NORTH]),
            apply("us", clusters=[EAST_LATER, NORTH]),
            force("us", clusters=[EAST_LATER, NORTH]),
            apply("us", clusters=[NORTH]),
        ],
        [None, 409, None, 409, None, None],
    ),
    "a conflict with one field": (
        [
            apply("ops", clusters=[cluster("east", member("a", idleCount=5))]),
            apply("us", clusters=[cluster("east", member("a", idleCount=6, runningCount=1))]),
            apply("us", clusters=[cluster("east", member("a", runningCount=1))]),
            let_go("ops"),
        ],
        [None, 409, None, None],
    ),
    "a conflict with several": (
        [
            apply("ops", clusters=[cluster("east", isLocal=True), NORTH], idleReplicas=1),
            merge("cron", scalingGroups=[{"name": "gpu", "totalIdle": 1}], idleReplicas=2, phase={"is": "x"}),
            apply("ops", clusters=[cluster("east", isLocal=True)], idleReplicas=3),
            apply(
                "us", clusters=[EAST], idleReplicas=4, scalingGroups=[{"name": "gpu", "totalIdle": 9}], phase={"is": 1}
            ),
            force("us", clusters=[EAST], idleReplicas=4, scalingGroups=[{"name": "gpu", "totalIdle": 9}]),
            let_go("us"),
        ],
        [None, None, 409, 409, None, None],
    ),
    "a conflict near and far": (
        [
            apply("ops", clusters=[EAST, NORTH], federation=FEDERATION, phase="x"),
            apply("us", clusters=[NORTH | {"isLocal": True}, EAST_LATER], federation={"clusters": 9}, phase="y"),
        ],
        [None, 409],
    ),
    "both say the same": (
        [
            apply("us", clusters=[EAST]),
            apply("ops", clusters=[EAST]),
            apply("us", clusters=[EAST_LATER]),
            let_go("us"),
            let_go("ops"),
        ],
        [None, None, 409, None, None],
    ),
    "one takes all by force": (
        [apply("us", clusters=[EAST, NORTH]), force("ops", clusters=[EAST_LATER, NORTH]), apply("us", clusters=[EAST])],
        [None, None, 409],
    ),
    "the whole list is patched away": (
        [
            merge("controller", clusters=[WEST], idleReplicas=4),
            apply("us", clusters=[EAST, NORTH], federation=FEDERATION),
            merge("ops", clusters=[WEST]),
            apply("us", clusters=[EAST, NORTH], federation=FEDERATION),
            merge("ops", clusters=[WEST, cluster("east", member("a", idleCount=9), isLocal=False)]),
            apply("us", clusters=[EAST, NORTH], federation=FEDERATION),
            merge("ops", clusters=None, federation=None),
            apply("us", clusters=[EAST, NORTH], federation=FEDERATION),
        ],
        [None, None, None, None, None, 409, None, None],
    ),
    "a patch of the same": (
        [apply("us", clusters=[EAST]), merge("ops", clusters=[EAST]), put("ops", clusters=[EAST])],
        [None] * 3,
    ),
    "a controller that has just read it": (
        [
            put("controller", clusters=[WEST], idleReplicas=4, phase="Ready"),
            apply("us", clusters=[EAST]),
            put("controller", clusters=[WEST | {"isLocal": False}, EAST], idleReplicas=5),
            put("controller", clusters=[EAST, WEST], idleReplicas=5, conditions=[{"type": "Ready"}], more={"a": {}}),
            apply("us", clusters=[EAST_LATER, WEST]),
            put("controller", clusters=[EAST]),
            put("controller"),
        ],
        [None, None, None, None, None, None, None],
    ),
    "a list that somebody else owns": (
        [
            merge("ops", clusters=[WEST]),
            apply("us", clusters=[EAST]),
            merge("ops", clusters=[EAST]),
            let_go("us"),
            apply("us", clusters=[]),
            merge("ops", clusters=None),
            let_go("us"),
        ],
        [None, None, None, 422, 422, None, None],
    ),
    "fields that are not described": (
        [
            apply("us", phase="x", more={"a": {"b": 1}, "c": {}}, some=[{"name": "x"}]),
            merge("ops", more={"a": {"d": 1}, "c": {"e": []}}, some=[]),
            apply("us", more={"a": {"b": 2}}, some=[{"name": "x"}]),
            merge("ops", more={"a": 1}, some={"x": 1}),
            let_go("us"),
        ],
        [None, None, 409, None, None],
    ),
    "orders": (
        [
            apply("a", clusters=[cluster("1"), cluster("2"), cluster("3")]),
            apply("b", clusters=[cluster("3"), cluster("0"), cluster("1"), cluster("9")]),
            apply("c", clusters=[cluster("5"), cluster("9"), cluster("2"), cluster("8"), cluster("3")]),
            apply("b", clusters=[cluster("9"), cluster("3")]),
            let_go("a"),
        ],
        [None] * 5,
    ),
    "what is no good": (
        [
            apply("us", clusters=[EAST, EAST]),
            apply("us", clusters=[{"isLocal": False}]),
            apply("us", clusters={}),
            apply("us", clusters=[cluster("east", member("a", idleCount="1"))]),
            apply("us", clusters=[cluster("east", member("a", idleCount=-1), member(""))]),
            apply("us", clusters=[cluster("east", member("a", idleCount=2**31))]),
            apply("us", clusters=[cluster("east", lastSnapshotTime="soon")]),
            apply("us", clusters=[cluster("east", isLocal=None)]),
            merge("us", idleReplicas="many", clusters=[{}]),
        ],
        [500, 500, 500, 500, 422, 422, 422, 422, 422],
    ),
    "one name for both operations": (
        [
            merge("us", idleReplicas=1),
            apply("us", idleReplicas=2),
            force("us", idleReplicas=2),
            merge("us", idleReplicas=3),
            apply("us", idleReplicas=3),
        ],
        [None, 409, None, None, None],
    ),
}


@pytest.mark.parametrize("spec", [SPEC, None], ids=["from the start", "untracked"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_comes_of_writes_is_the_same(defined: ApiServer, namespace: str, script: str, spec: Json | None) -> None:
    steps, codes = SCRIPTS[script]
    real = outcomes(Real(defined, namespace), spec, steps)
    fake = outcomes(Fake(namespace), spec, steps)
    for number, (step, expected, found) in enumerate(zip(steps, real, fake, strict=True)):
        assert found == expected, f"step {number}: {step}"
    if spec is not None:
        assert [None if each.refusal is None else each.refusal[0] for each in real] == codes


# Whatever is written.

counts = st.integers(0, 1)
members = st.builds(
    lambda name, values: member(name, **values),
    st.sampled_from("ab"),
    st.fixed_dictionaries({}, optional={"idleCount": counts, "state": st.sampled_from(["x", "y"]), "more": counts}),
)
clusters = st.builds(
    lambda name, values: cluster(name, **values),
    st.sampled_from(["east", "north", "west"]),
    st.fixed_dictionaries(
        {},
        optional={
            "isLocal": st.booleans(),
            "observedMembers": st.lists(members, max_size=2, unique_by=lambda each: str(each["name"])),
        },
    ),
)
statuses = st.fixed_dictionaries(
    {},
    optional={
        "clusters": st.lists(clusters, max_size=3, unique_by=lambda each: str(each["clusterID"])),
        "federation": st.fixed_dictionaries({}, optional={"clusters": counts, "idleReplicas": counts}),
        "idleReplicas": counts,
        "phase": st.sampled_from([{}, {"a": 0}, {"a": 1, "b": [0]}, {"b": []}]),
    },
)
#: a null takes away
patches = st.builds(
    lambda status, gone: status | dict.fromkeys(gone),
    statuses,
    st.sets(st.sampled_from(["clusters", "federation", "idleReplicas", "phase"]), max_size=1),
)
managers = st.sampled_from(["us", "ops", "controller"])
steps = st.one_of(
    st.builds(
        Step, st.sampled_from(["apply", "apply", "force"]), managers, statuses.map(lambda each: {"status": each})
    ),
    st.builds(Step, st.just("apply"), managers, st.just({})),
    st.builds(Step, st.sampled_from(["merge"]), managers, patches.map(lambda each: {"status": each})),
    st.builds(Step, st.sampled_from(["put"]), managers, statuses.map(lambda each: {"status": each})),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([SPEC, None]), st.lists(steps, min_size=2, max_size=8))
def test_whatever_is_written_the_same_comes_of_it(
    defined: ApiServer, namespace: str, spec: Json | None, script: list[Step]
) -> None:
    real = outcomes(Real(defined, namespace), spec, script)
    fake = outcomes(Fake(namespace), spec, script)
    for number, (step, expected, found) in enumerate(zip(script, real, fake, strict=True)):
        assert found == expected, f"step {number}: {step}"


# How it is described, and served by other definitions.

DOCUMENT = "/openapi/v3/apis/agents.navix.sh/v1alpha1"


def described_by(document: Json) -> Json:
    """What a document says of SandboxEnvs, without what a server says of the fields that all objects have."""
    kind = "x-kubernetes-group-version-kind"
    (schema,) = (
        each for name, each in document["components"]["schemas"].items() if name.endswith(".v1alpha1.SandboxEnv")
    )
    paths = {
        path: {method: said[kind] for method, said in found.items() if method != "parameters"}
        for path, found in document["paths"].items()
    }
    fields = {name: schema["properties"][name] for name in ("spec", "status")}
    return {"paths": paths, "fields": fields, "type": schema["type"], kind: schema[kind]}


def test_it_is_described_as_by_the_server(defined: ApiServer) -> None:
    assert described_by(described(sandboxenvs())) == described_by(defined.call("GET", DOCUMENT))


VARIANTS: dict[str, tuple[Json, list[int | None]]] = {
    "no keys": (sandboxenvs(keyed=False), [None, 409, None, None, None]),
    "no subresource": (sandboxenvs(subresource=False), [404] * 5),
    "no federation": (sandboxenvs(federation=False), [None] * 5),
}


@pytest.fixture(scope="module")
def other(apiserver_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server of this file's own, whose definition of SandboxEnvs may be another."""
    with started(ApiServer(apiserver_programs, tmp_path_factory.mktemp("variants"))) as server:
        yield server


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_another_definition_it_is_the_same(other: ApiServer, tmp_path: Path, variant: str) -> None:
    definition, codes = VARIANTS[variant]
    expected = described_by(described(definition))
    file = tmp_path / "definition.yaml"
    file.write_text(json.dumps(definition))
    other.create_crds([file])
    # The description of the definition before this one may still be there for a moment.
    looked(lambda: described_by(other.call("GET", DOCUMENT)) == expected, SETTLE_WITHIN)
    assert described_by(other.call("GET", DOCUMENT)) == expected

    namespace = other.namespace()
    script = [
        merge("controller", clusters=[WEST]),
        apply("us", clusters=[EAST], federation=FEDERATION),
        force("us", clusters=[EAST], federation=FEDERATION),
        merge("controller", clusters=[WEST, EAST]),
        let_go("us"),
    ]
    fake = Fake(namespace)
    fake.server.define(definition)
    found = outcomes(fake, SPEC, script)
    assert found == outcomes(Real(other, namespace), SPEC, script)
    assert [None if each.refusal is None else each.refusal[0] for each in found] == codes
    other.delete_namespace(namespace)


@pytest.mark.parametrize(
    "plural, name, changes, parameters",
    [
        ("sandboxenvs", "nobody", {}, {}),
        ("others", "env", {}, {}),
        ("sandboxenvs", "env", {"metadata": {"name": "other"}}, {}),
        ("sandboxenvs", "env", {"metadata": {"namespace": "other"}}, {}),
        ("sandboxenvs", "env", {"apiVersion": "agents.navix.sh/v1"}, {}),
        ("sandboxenvs", "env", {"kind": "Other"}, {}),
        ("sandboxenvs", "env", {}, {"fieldManager": ""}),
    ],
)
def test_what_is_asked_wrongly_is_refused_alike(
    defined: ApiServer, namespace: str, plural: str, name: str, changes: Json, parameters: dict[str, str]
) -> None:
    body = identity(namespace, name)
    body |= changes | {"metadata": body["metadata"] | changes.get("metadata", {}), "status": {"idleReplicas": 1}}
    params = {"fieldManager": "us"} | parameters
    path = f"/apis/agents.navix.sh/v1alpha1/namespaces/{namespace}/{plural}/{name}/status"
    Real(defined, namespace).create("env", SPEC)
    kind = {"Content-Type": "application/apply-patch+yaml"}
    answer = defined.admin.patch(path, content=json.dumps(body), params=params, headers=kind)

    async def ask() -> ApiError:
        fake = Fake(namespace)
        fake.create("env", SPEC)
        async with fake.server.connect() as client:
            with pytest.raises(ApiError) as refused:
                await client.apply(path, params, json.dumps(body).encode())
        return refused.value

    error = trio.run(ask, clock=trio.testing.MockClock(autojump_threshold=0))
    assert error.code == answer.status_code
    # Of a resource that it does not know, a server says no more.
    assert plural == "others" or error.status_reason == answer.json()["reason"]

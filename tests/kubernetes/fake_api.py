"""A Kubernetes API server in memory, for trio's MockClock: namespaced objects of any resource, lists in pages, watches
with events and bookmarks, a history that can be compacted, writes to the status of objects by a client and by rivals,
and faults on demand. It stands where a client would, so everything above the client is the real thing, and everything
below it is made up here. Bytes are real, HTTP is not; that is `http_peer.py`. What a write makes of an object is
`fake_apply.py`'s. What is right is up to the tests."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeAlias

import trio
import yaml

from tests.kubernetes import fake_apply
from tests.kubernetes.fake_apply import Json, Refused, Schema
from trio_federation_kubernetes.client import Answer
from trio_federation_kubernetes.errors import ApiError, Cause, KubernetesError, UnreachableError
from trio_federation_kubernetes.resources import Key, Resource
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS
from trio_federation_kubernetes.sandboxset import SANDBOXSETS
from trio_federation_kubernetes.warmpool import SANDBOXCLAIMS, SANDBOXWARMPOOLS

Kind: TypeAlias = Literal["list", "page", "watch", "probe", "apply", "openapi", "namespace", "other"]
#: what a watch does instead of what it should: yields bytes, and ends or raises
Script: TypeAlias = Callable[["Request"], AsyncGenerator[bytes]]

#: Seconds within which a request has to be answered with a status, whatever its deadline is.
OPEN_DEADLINE = 10.0
#: what Status objects say
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}
_KINDS = {
    SANDBOXENVS: "SandboxEnv",
    SANDBOXWARMPOOLS: "SandboxWarmPool",
    SANDBOXCLAIMS: "SandboxClaim",
    SANDBOXSETS: "SandboxSet",
}
#: counts the servers
_numbers = itertools.count(1)
#: what a server knows of SandboxEnvs
_CRD = Path(__file__).resolve().parents[2] / "config" / "kubernetes" / "crd" / "sandboxenvs.yaml"


@dataclass(frozen=True)
class Request:
    """A request that has come."""

    #: seconds on the clock
    at: float
    kind: Kind
    path: str
    params: Mapping[str, str]
    #: where it reads; None for all namespaces, and for what is no resource
    namespace: str | None
    #: the plural of the resource; "" for what is none
    plural: str
    #: the object, where it is about one
    name: str = ""
    #: what came with it
    body: bytes = b""


def refusal(
    code: int,
    message: str = "",
    *,
    reason: str | None = None,
    retry_after: float | None = None,
    continue_token: str = "",
    causes: Iterable[Cause | str] = (),
    where: str = "fake",
) -> ApiError:
    """What a client makes of an answer with this status. `causes`: of a text, it is the reason."""
    reason = _REASONS.get(code, "") if reason is None else reason
    return ApiError(
        f"{where}: {code} {reason}: {message or 'as the test wants it'}",
        code=code,
        status_reason=reason,
        message=message,
        retry_after=retry_after,
        continue_token=continue_token,
        causes=tuple(Cause(cause) if isinstance(cause, str) else cause for cause in causes),
    )


class Fault:
    """Something that requests meet instead of an answer."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        *,
        error: Callable[[Request], KubernetesError] | None = None,
        body: bytes | None = None,
        times: float = math.inf,
        namespace: str | None = None,
        plural: str | None = None,
        name: str | None = None,
        done: bool = False,
    ) -> None:
        self._kinds = kinds
        self._name = name
        self._namespace = namespace
        self._plural = plural
        #: raised; where there is none, and no body, the request hangs
        self.error = error
        #: answered, whatever was asked for
        self.body = body
        #: how many requests it still meets
        self.times = times
        #: whether a write is carried out all the same
        self.done = done

    def meets(self, request: Request) -> bool:
        """Whether it is this request's turn; counts it."""
        met = (
            self.times > 0
            and (not self._kinds or request.kind in self._kinds)
            and self._namespace in (None, request.namespace)
            and self._plural in (None, request.plural)
            and self._name in (None, request.name)
        )
        if met:
            self.times -= 1
        return met

    def end(self) -> None:
        """It meets nothing any more."""
        self.times = 0


@dataclass
class Change:
    """A change of an object, as the history of the server has it."""

    type: str
    resource: Resource
    key: Key
    #: as it is afterwards, or was last
    object: dict[str, Any]
    #: seconds on the clock, from when on watches tell it
    told_at: float = -math.inf
    #: as it was before, where it was there
    before: dict[str, Any] | None = None

    def seen_with(self, selector: Mapping[str, str]) -> str | None:
        """What a watch with this selector is told that has happened; None: nothing that concerns it. An object that is
        chosen no more is gone for it, and one that is chosen now is new."""
        now = self.type != "DELETED" and _selected(self.object, selector)
        was = self.before is not None and _selected(self.before, selector)
        if was:
            return "MODIFIED" if now else "DELETED"
        return "ADDED" if now else None


@dataclass
class _Paging:
    """Where a list under way stands."""

    version: str
    rest: list[dict[str, Any]]


@dataclass(eq=False)
class OpenWatch:
    """A watch that is open."""

    request: Request
    resource: Resource
    #: up to where in the history it has told everything
    position: int
    selector: Mapping[str, str]
    ends_at: float
    next_bookmark: float
    #: nothing comes any more, and nothing breaks
    silent: bool = False
    #: it ends: cleanly, or (an error) not
    ends: bool = False
    error: KubernetesError | None = None
    #: bytes to be sent as they are
    raw: list[bytes] = field(default_factory=list)
    news: trio.Event = field(default_factory=trio.Event)

    def wake(self) -> None:
        """Something has happened to it."""
        self.news.set()


class FakeServer:
    """An API server.

    `wall_offset`: add it to the clock to get the server's Unix time. `latency`: seconds that each answer takes.
    `bookmark_interval`: seconds; inf for a server that sends none. `numeric_versions`: versions are decimal numbers
    that grow, as real ones do; else they are words that say nothing of their order, as tokens always are.
    `echo_first`: whether the event of a write that has come over a connection is told before the write is answered;
    None: now so, now so, by `seed`. What comes second comes `latency` later."""

    def __init__(
        self,
        *resources: Resource,
        wall_offset: float = 1.8e9,
        latency: float = 0.01,
        bookmark_interval: float = 60.0,
        seed: int = 0,
        numeric_versions: bool = False,
        echo_first: bool | None = None,
    ) -> None:
        self.wall_offset = wall_offset
        self.latency = latency
        self.bookmark_interval = bookmark_interval
        self.echo_first = echo_first
        #: the UID of its namespace kube-system, another one for each server; None: it has no such namespace
        self.uid: str | None = f"00000000-0000-4000-8000-{next(_numbers):012d}"
        self.requests: list[Request] = []
        self.watches: list[OpenWatch] = []
        self.faults: list[Fault] = []
        #: nothing is answered any more, and what is open falls silent
        self.black_hole = False
        #: how the end of an old version is told to a watch
        self.gone_as: Literal["event", "status"] = "event"
        #: how often a continue token is found to have expired, from now on
        self.tokens_expire: float = 0
        #: how a watch's bytes are cut into chunks
        self.chunking: Callable[[bytes], Iterable[bytes]] = lambda data: (data,)
        #: by path
        self.openapi: dict[str, Any] = {}
        self._resources = {resource.plural: resource for resource in resources}
        self._scripts: list[tuple[Script, float]] = []
        self._random = Random(seed)
        #: for what is new, so that words stay what they are by the seed
        self._coin = Random(seed)
        self._numeric = numeric_versions
        self._number = 1000
        self._held = 0
        #: by resource; of others nobody owns anything
        self._schemas: dict[Resource, Schema] = {SANDBOXENVS: _schema(sandboxenvs())}
        #: resources whose status is no subresource
        self._whole: set[Resource] = set()
        self._objects: dict[Resource, dict[Key, dict[str, Any]]] = {}
        self._history: list[Change] = []
        #: the words for the places in the history, from before the first change on
        self._words = [self._version()]
        self._places = {self._words[0]: 0}
        #: the first place that a watch can still start from
        self._oldest = 0
        self._pagings: dict[str, _Paging] = {}

    # What there is.

    def put(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        labels: Mapping[str, str] | None = None,
        *,
        manager: str = "controller",
        **body: Any,
    ) -> None:
        """Create an object, or replace it. `body`: everything but its identity. `manager`: who does it, and so owns
        what is new in it, where the resource is one with a schema; "" for somebody from before there were owners."""
        objects = self._objects.setdefault(resource, {})
        key = (namespace, name)
        kind = "MODIFIED" if key in objects else "ADDED"
        version = self._version()
        metadata = {"name": name, "namespace": namespace, "resourceVersion": version, "labels": dict(labels or {})}
        metadata |= body.pop("metadata", {})
        found = {**_type_of(resource), "metadata": metadata, **body}
        if manager and resource in self._schemas and "managedFields" not in metadata:
            found = self._owned(self._schemas[resource], objects.get(key), found, manager)
        before = objects.get(key)
        objects[key] = found
        self._record(Change(kind, resource, key, found, before=before), version)

    def _owned(self, schema: Schema, before: Json | None, after: Json, manager: str) -> Json:
        """As it is after the spec and then the status have been written."""
        new = {"metadata": after["metadata"], "apiVersion": after["apiVersion"]}
        if before is not None:
            owners = before["metadata"].get("managedFields", ())
            new = {**before, "metadata": {**after["metadata"], "managedFields": owners}}
        for part in ("spec", "status"):
            # Values that the schema would not have are what some tests are about.
            new = fake_apply.update(
                schema, new, after, manager, now=self.stamp(), part=part, created=before is None, checked=False
            )
        return {**after, "metadata": new["metadata"]}

    def edit(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        change: Callable[[Json], object],
        manager: str = "controller",
    ) -> None:
        """Read the status, `change` it in place, and write it as a controller does that has just read it. Raises
        ApiError."""
        found = self._found(resource, namespace, name, f"PUT {resource.path(namespace)}/{name}/status")
        status = copy.deepcopy(found.get("status", {}))
        change(status)
        self._write(resource, found, fake_apply.update, {"status": status}, manager)

    def merge_patch(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any], manager: str = "ops"
    ) -> None:
        """Patch the status, of `body`, by RFC 7386: lists are replaced as wholes, whoever owns what is in them. Raises
        ApiError."""
        found = self._found(resource, namespace, name, f"PATCH {resource.path(namespace)}/{name}/status")
        self._write(resource, found, fake_apply.merge_patch, body, manager)

    def apply_as(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Mapping[str, Any],
        manager: str = "ops",
        force: bool = False,
    ) -> None:
        """Apply the status of `body`, server-side. Raises ApiError."""
        found = self._found(resource, namespace, name, f"PATCH {resource.path(namespace)}/{name}/status")
        self._write(resource, found, functools.partial(fake_apply.apply, force=force), body, manager)

    def _found(self, resource: Resource, namespace: str, name: str, where: str) -> Json:
        if resource not in self._resources.values() or resource in self._whole:
            raise refusal(404, "the server could not find the requested resource", where=where)
        found = self._objects.get(resource, {}).get((namespace, name))
        if found is None:
            raise refusal(404, f'{resource} "{name}" not found', where=where)
        return found

    def _write(
        self,
        resource: Resource,
        found: Json,
        write: Callable[..., Json],
        body: Mapping[str, Any],
        manager: str,
        told_in: float = 0.0,
    ) -> Json:
        """The object after a write. Raises ApiError."""
        metadata = found["metadata"]
        key = (metadata["namespace"], metadata["name"])
        try:
            new = write(self._schemas.get(resource, {}), found, body, manager, now=self.stamp())
        except Refused as error:
            where = f"PATCH {resource.path(key[0])}/{key[1]}/status"
            raise refusal(error.code, error.message, reason=error.reason, causes=error.causes, where=where) from error
        if new is not found:
            version = self._version()
            new = {**new, "metadata": {**new["metadata"], "resourceVersion": version}}
            self._objects[resource][key] = new
            told_at = trio.current_time() + told_in if told_in else -math.inf
            self._record(Change("MODIFIED", resource, key, new, told_at, found), version)
        return new

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """An object as it is; not to be changed."""
        return self._objects[resource][namespace, name]

    def delete(self, resource: Resource, namespace: str, name: str) -> None:
        """Remove an object."""
        version = self._version()
        before = self._objects[resource].pop((namespace, name))
        last = before | {"metadata": before["metadata"] | {"resourceVersion": version}}
        self._record(Change("DELETED", resource, (namespace, name), last, before=before), version)

    def define(self, definition: Mapping[str, Any]) -> None:
        """The resource of a CustomResourceDefinition, which is known, is as that says from now on, and described (see
        `openapi`)."""
        resource = _resource_of(definition)
        self._schemas[resource] = _schema(definition)
        self._whole.discard(resource)
        if "status" not in definition["spec"]["versions"][0].get("subresources", {}):
            self._whole.add(resource)
        self.openapi[f"/openapi/v3/apis/{resource.group}/{resource.version}"] = described(definition)

    def names(self, resource: Resource) -> set[Key]:
        """The objects that there are."""
        return set(self._objects.get(resource, {}))

    def install(self, resource: Resource) -> None:
        """The server knows the resource from now on."""
        self._resources[resource.plural] = resource

    def uninstall(self, resource: Resource) -> None:
        """And from now on it does not; its objects are lost, and its watches end."""
        del self._resources[resource.plural]
        for key in list(self._objects.get(resource, {})):
            self.delete(resource, *key)
        for watch in self.watches:
            if watch.resource == resource:
                watch.ends = True
                watch.wake()

    def compact(self) -> None:
        """Forget the history, so that no watch can start from before now, and no list can go on."""
        self._oldest = len(self._history)
        self._pagings.clear()

    def replace_cluster(self, uid: str) -> None:
        """Another cluster stands here from now on, with none of the objects, and what is open breaks. Its versions are
        such that those of the old one mean something, too: watches go on, and never hear what became of the objects."""
        self.uid = uid
        self._objects.clear()
        self.cut()

    def version(self) -> str:
        """The newest version."""
        return self._words[-1]

    # What goes wrong.

    def fault(self, *kinds: Kind, **options: Any) -> Fault:
        """From now on requests of these kinds (all, where none is named) meet this, the oldest fault first; see
        `Fault`."""
        fault = Fault(kinds, **options)
        self.faults.append(fault)
        return fault

    def refuse(
        self,
        code: int,
        *kinds: Kind,
        times: float = math.inf,
        namespace: str | None = None,
        plural: str | None = None,
        name: str | None = None,
        **said: Any,
    ) -> Fault:
        """They meet this status."""
        return self.fault(
            *kinds,
            error=lambda request: refusal(code, where=_where(request), **said),
            times=times,
            namespace=namespace,
            plural=plural,
            name=name,
        )

    def vanish(self, *kinds: Kind, times: float = math.inf, done: bool = False) -> Fault:
        """They meet nobody. `done`: a write is carried out, and it is the answer that is lost."""
        return self.fault(*kinds, error=lambda _: UnreachableError("fake: connection refused"), times=times, done=done)

    def hang(self, *kinds: Kind, times: float = math.inf, done: bool = False) -> Fault:
        """They are never answered. `done`: but a write is carried out."""
        return self.fault(*kinds, times=times, done=done)

    @contextmanager
    def holding_events(self) -> Iterator[None]:
        """No watch tells a change for a while, so that answers and lists overtake them; at the end all are told."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            for watch in self.watches:
                watch.wake()

    def script(self, script: Script, times: float = math.inf) -> None:
        """So many watches to come do this, once they are open."""
        self._scripts.append((script, times))

    def go_silent(self) -> None:
        """What is open falls silent: the connection is half-open. New ones work."""
        for watch in self.watches:
            watch.silent = True
            watch.wake()

    def cut(self, rest: bytes = b"") -> None:
        """What is open breaks, after these last bytes."""
        for watch in self.watches:
            if rest:
                watch.raw.append(rest)
            watch.error = UnreachableError("fake: connection reset")
            watch.wake()

    def end(self) -> None:
        """What is open ends cleanly."""
        for watch in self.watches:
            watch.ends = True
            watch.wake()

    def send(self, data: bytes) -> None:
        """Send bytes as they are on every watch that is open."""
        for watch in self.watches:
            watch.raw.append(data)
            watch.wake()

    def bookmark(self) -> None:
        """Send a bookmark on every watch that is open."""
        for watch in self.watches:
            watch.next_bookmark = -math.inf
            watch.wake()

    @contextmanager
    def down(self) -> Iterator[None]:
        """The server is gone for a while, with everything that is open."""
        fault = self.vanish()
        self.cut()
        yield
        fault.end()

    # What was asked.

    def counts(self, since: float = -math.inf) -> Counter[str]:
        """How many requests of each kind have come since then."""
        return Counter(request.kind for request in self.requests if request.at >= since)

    def asked(self, kind: Kind, since: float = -math.inf) -> list[Request]:
        """The requests of one kind that have come since then."""
        return [request for request in self.requests if request.kind == kind and request.at >= since]

    @property
    def patches(self) -> list[Json]:
        """The bodies of all that was to be applied over connections, also of what was refused or met no answer."""
        return [json.loads(request.body) for request in self.asked("apply")]

    # For its connections.

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[FakeConnection]:
        """A client, as a source wants one."""
        await trio.lowlevel.checkpoint()
        yield FakeConnection(self)

    def arrived(self, path: str, params: Mapping[str, str], body: bytes | None = None) -> Request:
        """A request has come. `body`: of one that applies."""
        where: str | None
        name = ""
        match path.strip("/").split("/"):
            case ["apis", _, _, "namespaces", namespace, plural] | ["api", _, "namespaces", namespace, plural]:
                where, what = namespace, plural
            case ["apis", _, _, "namespaces", namespace, plural, name, "status"]:
                where, what = namespace, plural
            case ["apis", _, _, plural] | ["api", _, plural]:
                where, what = None, plural
            case _:
                where, what = None, ""
        kind = _kind(path, params) if body is None else "apply"
        request = Request(trio.current_time(), kind, path, dict(params), where, what, name, body or b"")
        self.requests.append(request)
        return request

    def fault_of(self, request: Request) -> Fault | None:
        """What a request meets instead of an answer."""
        return next((fault for fault in self.faults if fault.meets(request)), None)

    def answer(self, request: Request) -> bytes:
        """The answer to a plain request. Raises ApiError."""
        if request.kind == "openapi":
            if request.path not in self.openapi:
                raise refusal(404, where=_where(request))
            return json.dumps(self.openapi[request.path]).encode()
        if request.kind == "namespace":
            if self.uid is None:
                raise refusal(404, 'namespaces "kube-system" not found', where=_where(request))
            return namespace_body(self.uid)
        resource = self._resource(request)
        token = request.params.get("continue", "")
        if token:
            paging = self._pagings.pop(token, None)
            if paging is None or self.tokens_expire > 0:
                self.tokens_expire = max(0, self.tokens_expire - 1)
                raise refusal(
                    410, "The provided continue parameter is too old", continue_token=self._word(), where=request.path
                )
        else:
            paging = _Paging(self.version(), self._matching(resource, request))
        limit = int(request.params.get("limit", "0")) or len(paging.rest)
        items, paging.rest = paging.rest[:limit], paging.rest[limit:]
        metadata = {"resourceVersion": paging.version}
        if paging.rest:
            metadata["continue"] = self._word()
            self._pagings[metadata["continue"]] = paging
        return json.dumps({"kind": "List", "metadata": metadata, "items": items}).encode()

    def applied(self, request: Request, told_in: float = 0.0) -> bytes:
        """The answer to a request that applies: the object as it is afterwards. `told_in`: seconds until watches tell
        it. Raises ApiError."""
        where = _where(request)
        resource = self._resources.get(request.plural)
        if resource is None or request.path != f"{resource.path(request.namespace)}/{request.name}/status":
            raise refusal(404, "the server could not find the requested resource", where=where)
        manager = request.params.get("fieldManager", "")
        if not manager:
            needed = Cause("FieldValueRequired", "fieldManager", "Required value: is required for apply patch")
            raise refusal(422, f"fieldManager: {needed.message}", causes=(needed,), where=where)
        found = self._found(resource, request.namespace or "", request.name, where)
        try:
            body = json.loads(request.body)
        except ValueError as error:
            raise refusal(400, f"error decoding YAML: {error}", where=where) from error
        if {name: body.get(name) for name in ("apiVersion", "kind")} != _type_of(resource):
            raise refusal(400, f"invalid object type: {body.get('apiVersion')}, Kind={body.get('kind')}", where=where)
        identity = body.get("metadata", {})
        for what, asked in (("name", request.name), ("namespace", request.namespace)):
            if identity.get(what, asked) != asked:
                text = f"the {what} of the object ({identity[what]}) does not match the {what} on the URL ({asked})"
                raise refusal(400, text, where=where)
        write = functools.partial(fake_apply.apply, force=request.params.get("force") == "true")
        return json.dumps(self._write(resource, found, write, body, manager, told_in)).encode()

    def echoes_first(self) -> bool:
        """Whether watches tell a write before it is answered, this time."""
        return self._coin.random() < 0.5 if self.echo_first is None else self.echo_first

    def open(self, request: Request) -> OpenWatch:
        """Begin a watch. Raises ApiError."""
        resource = self._resource(request)
        version = request.params.get("resourceVersion", "")
        place = self._places.get(version)
        if place is None:
            raise refusal(504, f"Too large resource version: {version}", causes=("ResourceVersionTooLarge",))
        now = trio.current_time()
        watch = OpenWatch(
            request,
            resource,
            place,
            _selector(request),
            now + float(request.params.get("timeoutSeconds", "1800")),
            now + self.bookmark_interval,
        )
        if place < self._oldest:
            if self.gone_as == "status":
                raise refusal(410, f"too old resource version: {version}")
            status = {
                "kind": "Status",
                "code": 410,
                "reason": "Expired",
                "message": f"too old resource version: {version}",
            }
            watch.raw.append(line("ERROR", status))
            watch.ends = True
        self.watches.append(watch)
        return watch

    async def told(self, watch: OpenWatch) -> AsyncGenerator[bytes]:
        """The chunks of a watch."""
        for index, (script, times) in enumerate(self._scripts):
            if times > 0:
                self._scripts[index] = (script, times - 1)
                async with aclosing(script(watch.request)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
        while True:
            if watch.silent or self.black_hole:
                await trio.sleep_forever()
            if data := self._due(watch):
                for chunk in self.chunking(data):
                    yield chunk
                continue
            if watch.error is not None:
                raise watch.error
            if watch.ends or trio.current_time() >= watch.ends_at:
                return
            watch.news = trio.Event()
            with trio.move_on_at(min(watch.ends_at, watch.next_bookmark, self._next_at(watch))):
                await watch.news.wait()

    def server_time(self) -> float:
        """What the server's clock shows, in Unix seconds. Objects may be put before Trio runs: when MockClock is 0."""
        return (trio.current_time() if trio.lowlevel.in_trio_run() else 0.0) + self.wall_offset

    def stamp(self) -> str:
        """The same as objects have it: RFC 3339, in whole seconds."""
        return datetime.fromtimestamp(math.floor(self.server_time()), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    # Inside.

    def _word(self) -> str:
        return f"{self._random.getrandbits(40):010x}"

    def _version(self) -> str:
        if not self._numeric:
            return self._word()
        # Others write to the same store.
        self._number += self._coin.choice([1, 1, 2, 5])
        return str(self._number)

    def _record(self, change: Change, version: str) -> None:
        self._history.append(change)
        self._words.append(version)
        self._places[version] = len(self._history)
        for watch in self.watches:
            watch.wake()

    def _resource(self, request: Request) -> Resource:
        resource = self._resources.get(request.plural)
        if resource is None or request.path != resource.path(request.namespace):
            raise refusal(404, "the server could not find the requested resource", where=f"GET {request.path}")
        return resource

    def _matching(self, resource: Resource, request: Request) -> list[dict[str, Any]]:
        selector = _selector(request)
        return [
            found
            for key, found in sorted(self._objects.get(resource, {}).items())
            if request.namespace in (None, key[0]) and _selected(found, selector)
        ]

    def _due(self, watch: OpenWatch) -> bytes:
        """What a watch has to tell now."""
        told = b"".join(watch.raw)
        watch.raw.clear()
        for change in self._history[watch.position :]:
            if self._held or change.told_at > trio.current_time():
                break
            watch.position += 1
            if (
                change.resource == watch.resource
                and watch.request.namespace in (None, change.key[0])
                and (kind := change.seen_with(watch.selector)) is not None
            ) and not (watch.ends or watch.error):
                told += line(kind, change.object)
        if trio.current_time() >= watch.next_bookmark:
            watch.next_bookmark = trio.current_time() + self.bookmark_interval
            version = self._words[watch.position]
            told += line("BOOKMARK", {**_type_of(watch.resource), "metadata": {"resourceVersion": version}})
        return told

    def _next_at(self, watch: OpenWatch) -> float:
        """When a watch has to tell a change that there is already."""
        if self._held or watch.position == len(self._history):
            return math.inf
        return self._history[watch.position].told_at


class FakeConnection:
    """A client of the fake server, as an informer and a source want one."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._offset: float | None = None

    @property
    def server_clock_offset(self) -> float | None:
        """As good as a Date header, which has no fractions of seconds."""
        return self._offset

    async def get(self, path: str, params: Mapping[str, str], *, deadline: float = 10.0) -> Answer:
        """Ask, and get an answer or an error."""
        server = self._server
        request = server.arrived(path, params)
        with trio.move_on_after(deadline):
            fault = await self._begin(request)
            body = fault.body if fault is not None and fault.body is not None else server.answer(request)
            return Answer(body, self._dated())
        raise UnreachableError(f"fake: GET {path}: no answer within {deadline:g} s")

    async def apply(self, path: str, params: Mapping[str, str], body: bytes, *, deadline: float = 10.0) -> Answer:
        """Apply, and get the object as it is afterwards, or an error."""
        server = self._server
        request = server.arrived(path, params, body)
        with trio.move_on_after(deadline):
            echo_first = server.echoes_first()
            fault = await self._begin(request)
            if fault is not None and fault.body is not None:
                return Answer(fault.body, self._dated())
            try:
                answer = server.applied(request, 0.0 if echo_first else server.latency)
            except ApiError:
                self._dated()
                raise
            if echo_first:
                await trio.sleep(server.latency)
            return Answer(answer, self._dated())
        raise UnreachableError(f"fake: PATCH {path}: no answer within {deadline:g} s")

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, deadline: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Ask, and get chunks until it ends or breaks."""
        server = self._server
        request = server.arrived(path, params)
        until = trio.current_time() + deadline
        watch: OpenWatch | None = None
        with trio.move_on_after(min(deadline, OPEN_DEADLINE)):
            await self._begin(request)
            watch = server.open(request)
            self._dated()
        if watch is None:
            raise UnreachableError(f"fake: GET {path}: no answer")
        try:
            async with aclosing(self._chunks(watch, until)) as chunks:
                yield chunks
        finally:
            server.watches.remove(watch)

    async def _chunks(self, watch: OpenWatch, until: float) -> AsyncGenerator[bytes]:
        async with aclosing(self._server.told(watch)) as told:
            while True:
                chunk: bytes | None = None
                with trio.move_on_at(until):
                    chunk = await anext(told, None)
                    if chunk is None:
                        return
                if chunk is None:
                    raise UnreachableError("fake: the watch goes on for too long")
                yield chunk

    async def _begin(self, request: Request) -> Fault | None:
        """Wait as for any answer. Raises what the request meets; may hang."""
        server = self._server
        await trio.sleep(server.latency)
        fault = server.fault_of(request)
        if fault is not None and fault.done and request.kind == "apply":
            server.applied(request)
        if server.black_hole or (fault is not None and fault.error is None and fault.body is None):
            await trio.sleep_forever()
        if fault is not None and fault.error is not None:
            error = fault.error(request)
            if isinstance(error, ApiError):
                self._dated()
            raise error
        return fault

    def _dated(self) -> float:
        now = math.floor(self._server.server_time())
        self._offset = now - trio.current_time()
        return float(now)


def line(kind: str, found: Mapping[str, Any]) -> bytes:
    """An event of a watch, as bytes."""
    return json.dumps({"type": kind, "object": found}, ensure_ascii=False).encode() + b"\n"


def _where(request: Request) -> str:
    """How an error about it begins."""
    return f"{'PATCH' if request.kind == 'apply' else 'GET'} {request.path}"


def _kind(path: str, params: Mapping[str, str]) -> Kind:
    if path.startswith("/openapi/"):
        return "openapi"
    if path == "/api/v1/namespaces/kube-system":
        return "namespace"
    if not path.startswith("/api"):
        return "other"
    if params.get("watch"):
        return "watch"
    if params.get("continue"):
        return "page"
    return "probe" if params.get("limit") == "1" else "list"


def _selector(request: Request) -> dict[str, str]:
    text = request.params.get("labelSelector", "")
    return dict(part.split("=", 1) for part in text.split(",") if part)


def _selected(found: Mapping[str, Any], selector: Mapping[str, str]) -> bool:
    labels: dict[str, str] = found["metadata"].get("labels", {})
    return selector.items() <= labels.items()


def _type_of(resource: Resource) -> dict[str, str]:
    version = f"{resource.group}/{resource.version}" if resource.group else resource.version
    return {"apiVersion": version, "kind": _KINDS.get(resource, resource.plural)}


# What a server knows of SandboxEnvs.


def sandboxenvs(*, keyed: bool = True, subresource: bool = True, federation: bool = True) -> Json:
    """The CustomResourceDefinition of SandboxEnvs that this repository has. Without `keyed`, the list of clusters is
    atomic; without `subresource`, the status can only be written with the rest; without `federation`, the status knows
    no such field (but keeps it, as it does with all that it does not know)."""
    definition: Json = yaml.safe_load(_CRD.read_text(encoding="utf-8"))
    (version,) = definition["spec"]["versions"]
    status = _schema(definition)["properties"]["status"]["properties"]
    if not keyed:
        del status["clusters"]["x-kubernetes-list-type"], status["clusters"]["x-kubernetes-list-map-keys"]
    if not subresource:
        del version["subresources"]
    if not federation:
        del status["federation"]
    return definition


def described(definition: Mapping[str, Any]) -> Json:
    """The OpenAPI v3 document that a server publishes of the group and version of a CustomResourceDefinition, as far as
    it is about where the resource is and what is in it."""
    spec = definition["spec"]
    (version,) = spec["versions"]
    resource = _resource_of(definition)
    kind = {"group": resource.group, "version": resource.version, "kind": spec["names"]["kind"]}
    one = f"{resource.path('{namespace}')}/{{name}}"
    operations = {
        resource.path(): ["get"],
        resource.path("{namespace}"): ["get", "post", "delete"],
        one: ["get", "put", "delete", "patch"],
        **({f"{one}/status": ["get", "put", "patch"]} if "status" in version.get("subresources", {}) else {}),
    }
    # ObjectMeta is described elsewhere in the document, which is of no interest here.
    described_as = {**_schema(definition), "x-kubernetes-group-version-kind": [kind]}
    name = ".".join([*reversed(resource.group.split(".")), resource.version, kind["kind"]])
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes CRD Swagger", "version": "v0.1.0"},
        "paths": {
            path: {each: {"x-kubernetes-group-version-kind": kind} for each in found}
            for path, found in operations.items()
        },
        "components": {"schemas": {name: described_as}},
    }


def _schema(definition: Mapping[str, Any]) -> Json:
    found = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert isinstance(found, dict)
    return found


def _resource_of(definition: Mapping[str, Any]) -> Resource:
    spec = definition["spec"]
    return Resource(spec["group"], spec["versions"][0]["name"], spec["names"]["plural"])


# Objects as tests want them.


def namespace_body(uid: str) -> bytes:
    """The namespace kube-system of a cluster, as API servers show it."""
    labels = {"kubernetes.io/metadata.name": "kube-system"}
    metadata = {"name": "kube-system", "uid": uid, "resourceVersion": "4", "labels": labels}
    whole = {"kind": "Namespace", "apiVersion": "v1", "metadata": metadata, "spec": {"finalizers": ["kubernetes"]}}
    return json.dumps({**whole, "status": {"phase": "Active"}}).encode()


def env_body(*members: Mapping[str, Any], **status: Any) -> dict[str, Any]:
    """A SandboxEnv with these members in this cluster."""
    local = {"clusterID": "west", "isLocal": True, "observedMembers": list(members)}
    return {"spec": {"clusters": []}, "status": {"clusters": [local], **status}}


def pool(name: str = "p1", idle: int = 1, **values: Any) -> dict[str, Any]:
    """A member as the status of a SandboxEnv has it."""
    return {"name": name, "idleCount": idle, "state": "Active", **values}

"""A source that is run as an agent runs it, against a real API server, and looked at all the time: what it pushes, what
its collects say, whether it vouches for that, and what it asks the server for. Also the SandboxEnvs that tests write,
and a TCP relay that can cut the way to a server, or let it fall silent. What is right is mostly up to the tests; what
must never happen is checked here, whatever the test (see `Follower`)."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

import msgspec
import trio

from tests.apiserver.cluster import ApiServer, ServerError
from trio_federation import Capacity, Change, Identity, SourceContext, SourceType, Trouble, Withdrawal
from trio_federation.capacity import change_fault
from trio_federation.testing import source_context
from trio_federation_kubernetes import TYPES
from trio_federation_kubernetes.client import Answer
from trio_federation_kubernetes.cluster_uid import PATH
from trio_federation_kubernetes.connection import Api
from trio_federation_kubernetes.errors import ApiError, KubernetesError
from trio_federation_kubernetes.mapping import Mapper
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.source import KubernetesSource

P = ParamSpec("P")
T = TypeVar("T")
Json: TypeAlias = dict[str, Any]
#: (namespace, env, pool)
Place: TypeAlias = tuple[str, str, str]

SANDBOXENVS_CRD = Path(__file__).resolve().parents[2] / "config" / "kubernetes" / "crd" / "sandboxenvs.yaml"
#: the CustomResourceDefinition's name, which is how RBAC and kubectl call the resource
SANDBOXENVS = "sandboxenvs.agents.navix.sh"

#: Seconds after which nobody vouches any more; short, so that tests need not wait long for a source to go dark.
TTL = 6.0
#: seconds that something may take that takes one or two on a machine that is not busy
PATIENCE = 40.0
#: seconds between two looks at a source, and between two collects
LOOK_EVERY = 0.05
COLLECT_EVERY = 0.4

_numbers = itertools.count(1)


async def do(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call something that takes a while, such as all of `ApiServer`, in a thread."""
    return await trio.to_thread.run_sync(partial(function, *arguments, **named))


# What a source asks for.


@dataclass(eq=False)
class Asked:
    """One request of a source's, or of a sink's."""

    #: "list" (a first page), "page" (a further one), "watch", "probe", "schema", "uid", or "apply"
    kind: str
    path: str
    params: Mapping[str, str]
    #: seconds on Trio's clock
    at: float
    #: why it failed, or None
    error: KubernetesError | None = None
    #: of a watch: the types of the events that it has brought, and how often each
    events: Counter[str] = field(default_factory=Counter)
    #: of a watch: the versions in the bookmarks that it has brought
    bookmarks: list[str] = field(default_factory=list)
    #: of a watch: the codes in the errors that it has brought
    codes: list[int] = field(default_factory=list)
    #: of an apply: what was to be applied, and the object that was answered
    body: bytes = b""
    answer: bytes = b""
    #: whether a good answer has begun
    answered: bool = False
    over: bool = False

    @property
    def version(self) -> str:
        """The version that a watch begins at."""
        return self.params.get("resourceVersion", "")

    @property
    def gone(self) -> bool:
        """Whether the server has said 410 to it, in either way."""
        return 410 in self.codes or (isinstance(self.error, ApiError) and self.error.code == 410)

    def __str__(self) -> str:
        known = {name: value for name, value in self.params.items() if name not in ("watch", "allowWatchBookmarks")}
        ended = f"{self.error}" if self.error is not None else "over" if self.over else f"open, {self.answered=}"
        return f"{self.at:.2f} {self.kind} {self.path} {known} {dict(self.events)}: {ended}"


class Record:
    """What a source, or a sink, has asked for, and when it last heard anything good."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        #: seconds on Trio's clock; the last good answer, or bytes of a watch
        self.heard_at = -math.inf
        #: awaited before each request is sent
        self.before: Callable[[Asked], Awaitable[None]] | None = None

    def of(self, *kinds: str) -> list[Asked]:
        """The requests of these kinds, oldest first."""
        return [asked for asked in self.asked if asked.kind in kinds]

    @property
    def lists(self) -> int:
        """How many lists were begun."""
        return len(self.of("list"))

    @property
    def gone(self) -> int:
        """How often the server has said 410."""
        return sum(asked.gone for asked in self.asked)

    def over(self, opened: AbstractAsyncContextManager[Api]) -> AbstractAsyncContextManager[Api]:
        """The same way to a server, with everything that goes over it noted here."""

        @asynccontextmanager
        async def noted() -> AsyncIterator[Api]:
            async with opened as api:
                yield _Noting(api, self)

        return noted()

    async def begin(self, path: str, params: Mapping[str, str], body: bytes | None = None) -> Asked:
        """Note a request that is to be sent now; `body`: what it applies."""
        if body is not None:
            kind = "apply"
        elif "watch" in params:
            kind = "watch"
        elif path.startswith("/openapi"):
            kind = "schema"
        elif path == PATH:
            kind = "uid"
        elif "continue" in params:
            kind = "page"
        else:
            # Pages of lists are never that small here.
            kind = "probe" if params.get("limit") == "1" else "list"
        asked = Asked(kind, path, dict(params), trio.current_time(), body=body or b"")
        self.asked.append(asked)
        if self.before is not None:
            await self.before(asked)
        return asked

    def heard(self) -> None:
        """Note that something good has come."""
        self.heard_at = trio.current_time()


class _Noting:
    """An `Api` that notes what goes over another one."""

    def __init__(self, api: Api, record: Record) -> None:
        self._api = api
        self._record = record

    @property
    def server_clock_offset(self) -> float | None:
        return self._api.server_clock_offset

    async def get(self, path: str, params: Mapping[str, str], *, deadline: float = 10.0) -> Answer:
        asked = await self._record.begin(path, params)
        return await self._noted(asked, self._api.get(path, params, deadline=deadline))

    async def apply(self, path: str, params: Mapping[str, str], body: bytes, *, deadline: float = 10.0) -> Answer:
        asked = await self._record.begin(path, params, body)
        answer = await self._noted(asked, self._api.apply(path, params, body, deadline=deadline))
        asked.answer = answer.body
        return answer

    async def _noted(self, asked: Asked, asking: Awaitable[Answer]) -> Answer:
        try:
            answer = await asking
        except KubernetesError as error:
            asked.error = error
            raise
        finally:
            asked.over = True
        asked.answered = True
        if asked.kind != "uid":  # which says nothing of what the source reads
            self._record.heard()
        return answer

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, deadline: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        asked = await self._record.begin(path, params)
        try:
            async with (
                self._api.stream(path, params, deadline=deadline) as chunks,
                aclosing(self._chunks(asked, chunks)) as noted,
            ):
                asked.answered = True
                yield noted
        except KubernetesError as error:
            asked.error = error
            raise
        finally:
            asked.over = True

    async def _chunks(self, asked: Asked, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        rest = b""
        async for chunk in chunks:
            self._record.heard()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                event = json.loads(line)
                asked.events[event["type"]] += 1
                if event["type"] == "BOOKMARK":
                    asked.bookmarks.append(event["object"]["metadata"]["resourceVersion"])
                elif event["type"] == "ERROR":
                    asked.codes.append(event["object"]["code"])
            yield chunk


# What a source says.


def bare(record: Capacity) -> Capacity:
    """A record without what changes by itself."""
    return replace(record, observed_at=None, saturated_for=0.0)


class Follower:
    """What is known of a source that is followed.

    Checked all the time, and raised as AssertionError where it is not so:
    - While it says that it is live, the server was heard within the last half of the TTL.
    - While it does not, its records carry when they were known to be true, and that is no longer ago than the TTL;
      collect() may raise KubernetesError, and nothing else. While it is live it does not raise.
    - Each record is valid (unless `spoilt` allows for some that are not), of the right cluster, and there once.
    - An env that was deleted, and has been gone from a collect() or a push once, does not come back."""

    def __init__(self, source: KubernetesSource, record: Record, context: SourceContext) -> None:
        self.source = source
        self.record = record
        self.context = context
        #: what all that was pushed comes to
        self.pushed: dict[Identity, Capacity] = {}
        #: what the last collect() has said; None where it has failed
        self.collected: dict[Identity, Capacity] | None = None
        self.collect_error: KubernetesError | None = None
        #: what was withdrawn, in its order
        self.withdrawn: list[Identity] = []
        self.live = False
        self.troubles: Sequence[Trouble] = ()
        #: the reasons of all troubles that there ever were
        self.ever: set[str] = set()
        #: (namespace, env) of what tests have deleted; may be added to from any thread
        self.deleted: set[tuple[str, str]] = set()
        #: envs of which records may be faulty
        self.spoilt: frozenset[str] = frozenset()
        #: seconds for which it has not been live in one go, at most, since it was first live
        self.longest_gap = 0.0
        self._live_at: float | None = None
        self._seen: set[tuple[str, str]] = set()
        self._buried: set[tuple[str, str]] = set()
        self._looked = trio.Event()

    def __str__(self) -> str:
        asked = "\n  ".join(str(each) for each in self.record.asked[-12:])
        return (
            f"live: {self.live}, troubles: {list(self.troubles)}, pushed: {len(self.pushed)} records, collected: "
            f"{self.collect_error if self.collected is None else len(self.collected)}, now: {trio.current_time():.2f}, "
            f"heard: {self.record.heard_at:.2f}; asked for:\n  {asked}"
        )

    async def until(self, is_so: Callable[[], object], within: float = PATIENCE) -> None:
        """Wait until `is_so`, which is asked after each look at the source. Raises AssertionError after so many
        seconds."""
        with trio.move_on_after(within):
            while not is_so():
                await self._looked.wait()
            return
        raise AssertionError(f"not so within {within:g} s: {self}")

    async def until_it_says(self, wanted: Mapping[Place, int], within: float = PATIENCE) -> None:
        """Wait until these pools and no others are there, with so many idle ones, by what was pushed and by what is
        collected."""
        try:
            await self.until(lambda: self.says() == self.has_pushed() == wanted, within)
        except AssertionError as error:
            raise AssertionError(
                f"wanted {dict(wanted)}, collected {self.says()}, pushed {self.has_pushed()}; {error}"
            ) from None

    async def until_watching(self, watches: int = 1) -> None:
        """Wait until so many watches are open."""
        record = self.record
        await self.until(lambda: sum(each.answered and not each.over for each in record.of("watch")) == watches)

    def says(self) -> dict[Place, int] | None:
        """How many are idle in each pool by the last collect(); None where that has failed."""
        return None if self.collected is None else _idle(self.collected.values())

    def has_pushed(self) -> dict[Place, int]:
        """How many are idle in each pool by what was pushed."""
        return _idle(self.pushed.values())

    def reasons(self) -> list[str]:
        """Why it does not tell everything."""
        return [trouble.reason for trouble in self.troubles]

    # What the agent would do.

    async def take_pushed(self) -> NoReturn:
        """Take what it pushes."""
        async with aclosing(self.source.changes()) as batches:  # type: ignore[type-var]  # it is a generator
            async for batch in batches:
                for change in batch:
                    self._take(change)
                self._tell()
        raise AssertionError("changes() has ended")

    def _take(self, change: Change) -> None:
        if isinstance(change, Withdrawal):
            self.withdrawn.append(change.identity)
            self.pushed.pop(change.identity, None)
            return
        self._check(change)
        env = change.namespace, change.env_name
        assert env not in self._buried, f"{change} was pushed after it had been deleted and withdrawn"
        self._seen.add(env)
        self.pushed[change.identity] = bare(change)

    async def look(self) -> NoReturn:
        """Look at it again and again, and collect now and then."""
        collect_at = -math.inf
        while True:
            now = trio.current_time()
            self.live, self.troubles = self.source.is_live(), self.source.troubles()
            self.ever.update(self.reasons())
            if self.live:
                silent = now - self.record.heard_at
                assert silent <= self.context.ttl / 2 + 0.001, f"live after {silent:.2f} s of silence: {self}"
                if self._live_at is not None:
                    self.longest_gap = max(self.longest_gap, now - self._live_at)
                self._live_at = now
            elif self._live_at is not None:
                self.longest_gap = max(self.longest_gap, now - self._live_at)
            if now >= collect_at:
                collect_at = now + COLLECT_EVERY
                await self._collect()
            self._tell()
            await trio.sleep(LOOK_EVERY)

    async def _collect(self) -> None:
        deleted = set(self.deleted)
        was_live = self.source.is_live()
        try:
            records = await self.source.collect()
        except KubernetesError as error:
            if was_live and self.source.is_live():
                raise AssertionError(f"collect() has failed while live: {self}") from error
            self.collected, self.collect_error = None, error
            return
        now = self.context.clock()
        found: dict[Identity, Capacity] = {}
        for record in records:
            assert record.identity not in found, f"two records of {record.identity}"
            self._check(record)
            if record.observed_at is not None:
                age = now - record.observed_at
                assert 0 <= age <= self.context.ttl, f"{record} is {age:.2f} s old"
            else:
                assert was_live or self.source.is_live(), f"{record} is vouched for while not live"
            found[record.identity] = record
        envs = {(record.namespace, record.env_name) for record in records}
        assert not (back := envs & self._buried), f"deleted, gone, and collected again: {sorted(back)[:5]}"
        self._seen |= envs
        # Of one that came and went in between, word may still be on its way.
        self._buried |= (deleted & self._seen) - envs
        self.collected, self.collect_error = found, None

    def _check(self, record: Capacity) -> None:
        assert record.cluster_id == self.context.cluster_id, record
        fault = change_fault(record)
        assert fault is None or record.env_name in self.spoilt, fault

    def _tell(self) -> None:
        self._looked.set()
        self._looked = trio.Event()


def _idle(records: Iterable[Capacity]) -> dict[Place, int]:
    return {(record.namespace, record.env_name, record.member_pool): record.idle for record in records}


@asynccontextmanager
async def following(
    kind: str,
    kubeconfig: Path,
    *,
    ttl: float = TTL,
    before: Callable[[Asked], Awaitable[None]] | None = None,
    clock: Callable[[], float] | None = None,
    spoilt: Iterable[str] = (),
    **options: object,
) -> AsyncIterator[Follower]:
    """A source of the type `kind`, with these options, which runs until the block ends and is followed meanwhile.

    `before` is awaited before each request; `clock` is the source's, in seconds, by default Trio's; `spoilt` names envs
    whose records may be faulty."""
    context = source_context(ttl=ttl, clock=clock)
    source, record = made(kind, kubeconfig, context, **options)
    record.before = before
    follower = Follower(source, record, context)
    follower.spoilt = frozenset(spoilt)
    async with trio.open_nursery() as nursery:
        await nursery.start(source.run)
        nursery.start_soon(follower.take_pushed)
        nursery.start_soon(follower.look)
        yield follower
        nursery.cancel_scope.cancel()
    await source.aclose()


def made(kind: str, kubeconfig: Path, context: SourceContext, **options: object) -> tuple[KubernetesSource, Record]:
    """A source of the type `kind`, made as an agent makes it, and what it will ask for."""
    by_name: dict[str, SourceType[Any]] = {each.name: each for each in TYPES}
    offered = by_name[kind]
    table = msgspec.convert({"kubeconfig": str(kubeconfig), **options}, offered.options)
    source = offered.create(table, context)
    assert isinstance(source, KubernetesSource)
    record = Record()
    connect = source._connect
    source._connect = lambda: record.over(connect())
    return source, record


def truth(server: ApiServer, mapper: Mapper, namespace: str | None) -> dict[Identity, Capacity]:
    """What the objects that are there now come to, by a list of all of them in one answer."""
    owners: dict[Key, None] = {}
    for index, watched in enumerate(mapper.watched):
        answer = server.admin.get(watched.resource.path(namespace))
        assert answer.is_success, answer.text
        page = watched.decoder.page(answer.content)
        assert not page.continue_token
        for key, value in page.objects:
            owners |= dict.fromkeys(mapper.take(index, key, value))
    rows = [row for owner in owners for row in mapper.rows(owner)]
    return {row.record.identity: row.record for row in rows}


# What there is to read.


def patch_status(server: ApiServer, path: str, status: Json) -> None:
    """Merge this into the status of the object at `path`."""
    answer = server.admin.patch(
        f"{path}/status", json={"status": status}, headers={"Content-Type": "application/merge-patch+json"}
    )
    if answer.is_error:
        raise ServerError(f"{path}: {answer.text}", answer.status_code)


def observed(idle: Mapping[str, int], **more: object) -> Json:
    """The status of a SandboxEnv with these pools, and so many idle in each. `more`: fields of each of them."""
    members = [{"name": pool, "idleCount": count, "runningCount": 1, **more} for pool, count in idle.items()]
    return {"clusters": [{"clusterID": "west", "isLocal": True, "observedMembers": members}]}


class Envs:
    """The SandboxEnvs of one namespace. Everything takes a moment: see `do`."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.server = server
        self.namespace = namespace
        self.root = f"/apis/agents.navix.sh/v1alpha1/namespaces/{namespace}/sandboxenvs"

    def create(self, name: str, idle: Mapping[str, int], **metadata: object) -> None:
        """Make one, with so many idle in each of its pools."""
        self.server.call(
            "POST",
            self.root,
            {
                "apiVersion": "agents.navix.sh/v1alpha1",
                "kind": "SandboxEnv",
                "metadata": {"name": name, **metadata},
                "spec": {},
            },
        )
        self.observe(name, idle)

    def observe(self, name: str, idle: Mapping[str, int], **more: object) -> None:
        """Write its status: these pools and no others. `more`: further fields of each of them."""
        patch_status(self.server, f"{self.root}/{name}", observed(idle, **more))

    def label(self, name: str, **labels: str) -> None:
        """Set labels of it."""
        self.server.admin.patch(
            f"{self.root}/{name}",
            json={"metadata": {"labels": labels}},
            headers={"Content-Type": "application/merge-patch+json"},
        ).raise_for_status()

    def delete(self, *names: str) -> None:
        """Delete some."""
        for name in names:
            self.server.call("DELETE", f"{self.root}/{name}")


def server_time(server: ApiServer) -> datetime:
    """What the server's clock says, by the header Date, which has whole seconds."""
    return parsedate_to_datetime(server.admin.get("/version").headers["Date"])


# The way to a server.


def kubeconfig_via(port: int, kubeconfig: Path) -> Path:
    """A copy of a kubeconfig of `ApiServer`'s that leads to another port of this machine."""
    document = json.loads(kubeconfig.read_text())
    document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    copy = kubeconfig.with_name(f"via-{next(_numbers)}.kubeconfig")
    copy.touch(0o600)
    copy.write_text(json.dumps(document))
    return copy


class Relay:
    """A port of this machine that leads to `target`, another one, byte for byte. It knows nothing of TLS or HTTP."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        #: while this is True, new connections are closed at once
        self.refusing = False
        self._open: dict[trio.CancelScope, trio.Event] = {}
        #: set where bytes may pass; new connections take the one that is here
        self._flow = trio.Event()
        self._flow.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._serve, listeners)
            task_status.started()

    def drop(self) -> None:
        """Close every connection; new ones are as good as before."""
        for scope in self._open:
            scope.cancel()

    def cut(self) -> None:
        """Close every connection, and refuse new ones, until `mend`."""
        self.refusing = True
        self.drop()

    def stall(self) -> None:
        """Let nothing pass any more, not even the end of a connection, until `mend`; new connections are silent too."""
        self._flow = trio.Event()
        self.stall_open()

    def stall_open(self, *, newest: bool = False) -> None:
        """Let nothing pass any more over the connections that are open now, or over the newest of them alone, for good.
        New ones are as before."""
        dead = trio.Event()
        for scope in list(self._open)[-1 if newest else 0 :]:
            self._open[scope] = dead

    def mend(self) -> None:
        """After `stall` or `cut`: close what is open, as those connections have missed something; new ones work."""
        self.refusing = False
        self.drop()
        self._flow.set()

    async def _serve(self, client: trio.SocketStream) -> None:
        async with client:
            if self.refusing:
                return
            with trio.CancelScope() as scope:
                self._open[scope] = self._flow
                try:
                    await self._flowing(scope)
                    server = await trio.open_tcp_stream("127.0.0.1", self.target)
                    async with server, trio.open_nursery() as nursery:
                        nursery.start_soon(self._pump, scope, client, server)
                        nursery.start_soon(self._pump, scope, server, client)
                except* OSError:
                    pass  # the server is down
                finally:
                    del self._open[scope]

    async def _flowing(self, scope: trio.CancelScope) -> None:
        while not (flow := self._open[scope]).is_set():
            await flow.wait()

    async def _pump(self, scope: trio.CancelScope, source: trio.SocketStream, sink: trio.SocketStream) -> None:
        try:
            async for chunk in source:
                await self._flowing(scope)
                await sink.send_all(chunk)
        except trio.BrokenResourceError:
            pass
        await self._flowing(scope)
        scope.cancel()


@asynccontextmanager
async def relayed(server: ApiServer) -> AsyncIterator[Relay]:
    """A relay to a server."""
    relay = Relay(server.port)
    async with trio.open_nursery() as nursery:
        await nursery.start(relay.run)
        yield relay
        nursery.cancel_scope.cancel()

"""The capacity source that all types of this plugin are: it connects, has an informer for each resource and namespace
keep the store up to date, and tells the agent what is in it, for how much of it there is evidence, and what is in the
way. Which objects are read, and what they mean, is the mapper's business."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import NoReturn

import trio

from trio_federation import Capacity, CapacitySource, Change, Identity, SourceContext, Trouble, Withdrawal
from trio_federation_kubernetes.cluster_uid import ClusterUid
from trio_federation_kubernetes.connection import Api
from trio_federation_kubernetes.errors import ApiError, KubernetesError
from trio_federation_kubernetes.informer import Informer
from trio_federation_kubernetes.mapping import Mapper
from trio_federation_kubernetes.opening import FIRST_SCHEMA_PAUSE, LONGEST_SCHEMA_PAUSE, Opening, openapi_document
from trio_federation_kubernetes.options import ConnectionOptions, CrdOptions
from trio_federation_kubernetes.resources import Row
from trio_federation_kubernetes.schema import check as check_schema
from trio_federation_kubernetes.store import Store
from trio_federation_kubernetes.table import TableMapper
from trio_federation_kubernetes.troubles import trouble, troubles

#: Changes in one push.
LARGEST_PUSH = 500
#: Seconds for which a pool can be said to be saturated: what a record holds.
LONGEST_SATURATION = 2.0**31 - 1
#: In place of a moment, where nothing is to be told of a namespace.
_UNKNOWN = float("-inf")


class KubernetesSource(CapacitySource):
    """Rows of capacity from objects in a Kubernetes API.

    `connect`: opens a client; by default to the API server that the options and the environment name, anew each time
    that the source runs."""

    def __init__(
        self,
        options: ConnectionOptions,
        context: SourceContext,
        mapper: Mapper,
        *,
        connect: Callable[[], AbstractAsyncContextManager[Api]] | None = None,
    ) -> None:
        self._options = options
        self._context = context
        self._mapper = mapper
        self._store = Store(mapper)
        self._connect = connect if connect is not None else Opening(options, context).connect
        self._connection: Api | None = None
        self._uid = ClusterUid(clock=context.clock, random=context.random, log=context.log, moved=self._start_over)
        #: by namespace (None: all of them), who follows it
        self._scopes: dict[str | None, list[Informer]] = {}
        self._news = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Follow the API server's objects. Nothing that the server does, or that a kubeconfig says, ends this."""
        resources = range(len(self._mapper.watched))
        async with self._connect() as self._connection, trio.open_nursery() as nursery:
            self._scopes = {
                namespace: [self._informer(self._connection, index, namespace) for index in resources]
                for namespace in self._options.namespaces or (None,)
            }
            informers = [informer for scope in self._scopes.values() for informer in scope]
            nursery.start_soon(self._begin, self._connection, informers, nursery)
            # Beside everything else, which never waits for it.
            nursery.start_soon(self._uid.follow, self._connection, self._newest_evidence)
            # With the first list in hand there is something to tell at once. A server that is slow, or not there, must
            # not hold up the start: that is no failure of this source.
            with trio.move_on_after(self._context.ttl / 6):
                for informer in informers:
                    await informer.settled.wait()
            task_status.started()
            await trio.sleep_forever()

    async def _begin(self, connection: Api, informers: Sequence[Informer], nursery: trio.Nursery) -> None:
        """Have them follow."""
        for informer in informers:
            nursery.start_soon(informer.run)

    def _informer(self, connection: Api, index: int, namespace: str | None) -> Informer:
        return Informer(
            connection,
            self._store,
            self._mapper.watched[index],
            index=index,
            namespace=namespace,
            label_selector=self._options.label_selector,
            page_size=self._options.page_size,
            ttl=self._context.ttl,
            clock=self._context.clock,
            random=self._context.random,
            log=self._context.log,
            changed=self._wake,
            broken=self._uid.doubt,
        )

    def _start_over(self, since: float) -> None:
        for scope in self._scopes.values():
            for informer in scope:
                informer.start_over(since)

    def _wake(self) -> None:
        if self._store.has_changes():
            self._news.set()

    # --- what the agent asks

    async def collect(self) -> Sequence[Capacity]:
        """Every row of what was listed. Raises KubernetesError while nothing is known."""
        now = self._context.clock()
        stamps = {namespace: self._stamp(namespace, now) for namespace in self._scopes}
        if all(stamp is _UNKNOWN for stamp in stamps.values()):
            raise KubernetesError(self._why_unknown())
        whole = len(stamps) == 1
        records = []
        for row in self._store.rows():
            stamp = stamps[None] if whole and None in stamps else stamps.get(row.record.namespace, _UNKNOWN)
            if stamp is not _UNKNOWN:
                records.append(self._record(row, now, stamp))
        return records

    def unknown_namespaces(self) -> Collection[str]:
        """Those that were never listed, or for which there is no evidence any more."""
        now = self._context.clock()
        unknown = (namespace for namespace in self._scopes if self._stamp(namespace, now) is _UNKNOWN)
        return frozenset(namespace for namespace in unknown if namespace is not None)

    def cluster_uid(self) -> str | None:
        """The UID of the cluster's namespace kube-system; None while it is not known, or not to be had."""
        return self._uid.uid

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        """What changes, as it does; what changes several times before it is taken is told once."""
        while True:
            while changed := self._store.changes(LARGEST_PUSH, self._is_known):
                yield list(self._pushed(changed))
            self._news = trio.Event()
            await self._news.wait()

    def is_live(self) -> bool:
        """Whether there is evidence for the objects of any namespace that is younger than half of the TTL."""
        now = self._context.clock()
        return any(self._is_live(namespace, now) for namespace in self._scopes)

    def troubles(self) -> Sequence[Trouble]:
        """What went wrong last with each resource and namespace, and has not worked since. Namespaces with the same
        kind of trouble are told together, with the words of the first."""
        found = self._own_troubles()
        found += troubles(
            (informer.resource, namespace, informer.error)
            for namespace, scope in self._scopes.items()
            for informer in scope
        )
        if contested := self._store.contested():
            first = contested[0]
            pool = "/".join(map(str, first.identity[1:]))
            more = f" ({len(contested)} such pools)" if len(contested) > 1 else ""
            counts, does_not = "/".join(first.counts), "/".join(first.does_not)
            text = f"pool {pool} is claimed by {counts}, which counts, and by {does_not}{more}"
            found.append(Trouble("contested", f"{text}; let each object name a pool of its own"))
        return found

    def _own_troubles(self) -> list[Trouble]:
        """What is in the way before anything is read."""
        return []

    # --- how fresh it is

    def _evidence(self, namespace: str | None) -> float | None:
        """When the rows of a namespace were last known to be true: they are as good as the worst of their resources."""
        moments = [informer.evidence for informer in self._scopes.get(namespace, ())]
        known = [moment for moment in moments if moment is not None]
        return min(known) if known and len(known) == len(moments) else None

    def _newest_evidence(self) -> float | None:
        """When the server last let anything be read."""
        moments = [informer.evidence for scope in self._scopes.values() for informer in scope]
        return max((moment for moment in moments if moment is not None), default=None)

    def _is_live(self, namespace: str | None, now: float) -> bool:
        evidence = self._evidence(namespace)
        return evidence is not None and now - evidence <= self._context.ttl / 2

    def _stamp(self, namespace: str | None, now: float) -> float | None:
        """What the records of a namespace carry as `observed_at`; _UNKNOWN where they are not to be told."""
        evidence = self._evidence(namespace)
        if evidence is None or now - evidence > self._context.ttl:
            return _UNKNOWN
        return None if self._is_live(namespace, now) else evidence

    def _why_unknown(self) -> str:
        details = "; ".join(trouble.detail for trouble in self.troubles())
        return f"{self._context.name}: nothing is known of its objects: {details or 'the API server was not asked yet'}"

    # --- what is told

    def _record(self, row: Row, now: float, stamp: float | None) -> Capacity:
        if row.saturated_until is not None:
            rest = self._saturated_for(row.saturated_until, now if stamp is None else stamp)
            return replace(row.record, saturated_for=rest, observed_at=stamp)
        return row.record if stamp is None else replace(row.record, observed_at=stamp)

    def _saturated_for(self, until: float, moment: float) -> float:
        """How much longer than `moment` that is, both clocks being the server's."""
        offset = self._connection.server_clock_offset if self._connection is not None else None
        if offset is None:
            return 0.0
        return min(max(0.0, until - (moment + offset)), LONGEST_SATURATION)

    def _pushed(self, changed: Sequence[tuple[Identity, Row | None]]) -> Iterator[Change]:
        now = self._context.clock()
        for identity, row in changed:
            if row is None:
                yield Withdrawal(identity)
            else:
                # What a change comes to may rest on other objects, too, of which less is known.
                yield self._record(row, now, self._stamp(self._scope_of(identity[1]), now))

    def _is_known(self, namespace: str) -> bool:
        """Whether there is evidence for all resources of a namespace; without it its rows are half of the truth."""
        return self._stamp(self._scope_of(namespace), self._context.clock()) is not _UNKNOWN

    def _scope_of(self, namespace: str) -> str | None:
        return None if None in self._scopes else namespace


class TableSource(KubernetesSource):
    """Rows of capacity from any pool-like resource, by a table of paths that is held against the resource's schema
    first, where the server has one: a path that leads nowhere would read as a pool with nothing in it."""

    def __init__(
        self,
        options: CrdOptions,
        context: SourceContext,
        *,
        connect: Callable[[], AbstractAsyncContextManager[Api]] | None = None,
    ) -> None:
        self._table = TableMapper(context.cluster_id, options)
        super().__init__(options, context, self._table, connect=connect)
        self._resource = options.watched()
        self._fields = options.fields
        self._schema_trouble: Trouble | None = None

    async def _begin(self, connection: Api, informers: Sequence[Informer], nursery: trio.Nursery) -> None:
        """Have them follow once the paths are known to be good, or nobody can tell."""
        pause = FIRST_SCHEMA_PAUSE
        while (fault := await self._check_schema(connection)) is not None:
            self._schema_trouble = fault
            await trio.sleep(pause * self._context.random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_SCHEMA_PAUSE)
        self._schema_trouble = None
        await super()._begin(connection, informers, nursery)

    async def _check_schema(self, connection: Api) -> Trouble | None:
        """Why nothing can be read with these paths, now. None: they are good, or the server has no schema."""
        resource = self._resource
        try:
            document = await openapi_document(connection, resource)
        except KubernetesError as error:
            return trouble(resource, error)
        verdict = check_schema(document, resource, self._fields.paths())
        if verdict is None:
            return await self._missing(connection)
        if verdict.faults:
            return Trouble("schema", f"{resource}: {'; '.join(verdict.faults)}; correct [source.fields]")
        self._table.texts = verdict.texts
        return None

    async def _missing(self, connection: Api) -> Trouble | None:
        """Why there is nothing to read of a resource that no schema describes; None where there is."""
        namespace = self._options.namespaces[0] if self._options.namespaces else None
        try:
            await connection.get(self._resource.path(namespace), {"limit": "1"})
        except ApiError as error:
            if error.code == 404:
                return trouble(self._resource, error)
        except KubernetesError as error:
            return trouble(self._resource, error)
        self._context.log.info("kubernetes_schema_unknown", resource=str(self._resource))
        return None

    def _own_troubles(self) -> list[Trouble]:
        return [self._schema_trouble] if self._schema_trouble is not None else []

"""The sink that shows the view of the fleet in the status of the envs of its own cluster: it follows the envs, hands
what comes, and what the agent knows, to the mirror, and makes the writes that the mirror decides on. Which those are,
and when, is `mirror.py`; what they hold `segments.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn

import trio

from trio_federation import Capacity, CapacitySink, SinkContext, Trouble, seconds
from trio_federation_kubernetes.connection import Api
from trio_federation_kubernetes.decoding import Decoder
from trio_federation_kubernetes.errors import KubernetesError
from trio_federation_kubernetes.informer import Informer
from trio_federation_kubernetes.mapping import Watched
from trio_federation_kubernetes.mirror import Mirror
from trio_federation_kubernetes.mirrored import Write
from trio_federation_kubernetes.opening import FIRST_SCHEMA_PAUSE, LONGEST_SCHEMA_PAUSE, Opening, openapi_document
from trio_federation_kubernetes.options import StatusOptions
from trio_federation_kubernetes.ownership import FIELD_MANAGER
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS
from trio_federation_kubernetes.schema import StatusFields, check_status
from trio_federation_kubernetes.segments import Env, body
from trio_federation_kubernetes.troubles import trouble, troubles

#: Seconds for one write.
WRITE_DEADLINE = 10.0
#: Seconds between two looks at whether this agent is still the one that writes.
LOOK_INTERVAL = 1.0
#: Seconds for which the envs may be out of date: while a watch is silent, the server is asked each third of it.
EVIDENCE_TTL = 90.0
#: Seconds before a schema that was good enough is looked at again.
SCHEMA_INTERVAL = 600.0
_NO_DATE = (
    "the API server's answers have no Date, and no time can be written without; see what stands between, such as a "
    "proxy, and takes it out"
)
#: What goes with each write. Not "force": what others own is theirs.
_PARAMS = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}


class KubernetesStatusSink(CapacitySink):
    """Mirrors what other clusters have of an env into the status of the env of the same name in this one.

    `connect`: opens a client; by default to the API server that the options and the environment name, anew each time
    that the sink runs."""

    def __init__(
        self,
        options: StatusOptions,
        context: SinkContext,
        *,
        connect: Callable[[], AbstractAsyncContextManager[Api]] | None = None,
    ) -> None:
        self._options = options
        self._context = context
        self._connect = connect if connect is not None else Opening(options, context).connect
        self._decoder: Decoder[Env] = Decoder(Env)
        self._informers: list[Informer] = []
        self._schema_trouble: Trouble | None = None
        #: set where the schema is to be looked at soon
        self._doubt = trio.Event()
        self._news = trio.Event()
        self._offset: float | None = None
        refresh_interval = seconds(options.refresh_interval)
        self._mirror = Mirror(
            cluster_id=context.cluster_id,
            refresh_interval=refresh_interval,
            env_interval=seconds(options.env_interval),
            writes_per_second=options.writes_per_second,
            selective=bool(options.label_selector),
            ttl=context.ttl,
            unattended=context.ttl + 2 * refresh_interval,
            random=context.random,
            tell=context.log.info,
            now=context.clock(),
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Show what the sink was told. Nothing that the server does, or that a kubeconfig says, ends this."""
        async with self._connect() as connection, trio.open_nursery() as nursery:
            watched = Watched(SANDBOXENVS, self._decoder)
            self._informers = [
                Informer(
                    connection,
                    _Following(self._mirror, self._context.clock),
                    watched,
                    index=0,
                    namespace=namespace,
                    label_selector=self._options.label_selector,
                    page_size=self._options.page_size,
                    ttl=max(EVIDENCE_TTL, self._context.ttl),
                    clock=self._context.clock,
                    random=self._context.random,
                    log=self._context.log,
                    changed=self._wake,
                )
                for namespace in self._options.namespaces or (None,)
            ]
            for informer in self._informers:
                nursery.start_soon(informer.run)
            nursery.start_soon(self._watch_schema, connection)
            task_status.started()
            await self._keep_writing(connection, nursery)

    async def update(self, snapshot: Sequence[Capacity]) -> None:
        """Every fresh record, of all clusters. What is to be written of it is written later, by and by."""
        for _ in self._mirror.want(snapshot, self._context.clock()):
            await trio.lowlevel.checkpoint()
        self._wake()

    def troubles(self) -> Sequence[Trouble]:
        """What is in the way: of reading the envs, of writing any of them, of writing some of them."""
        found = [self._schema_trouble] if self._schema_trouble is not None else []
        found += troubles(
            ((informer.resource, informer.namespace, informer.error) for informer in self._informers), table="sink"
        )
        if self._offset is None and any(informer.evidence is not None for informer in self._informers):
            found.append(Trouble("clock", _NO_DATE))
        return [*found, *self._mirror.troubles()]

    # --- writing

    def _wake(self) -> None:
        self._news.set()

    async def _keep_writing(self, connection: Api, nursery: trio.Nursery) -> NoReturn:
        while True:
            self._news = trio.Event()
            now = self._context.clock()
            self._mirror.stand(self._context.is_reporter(), now)
            self._offset = connection.server_clock_offset
            rest = LOOK_INTERVAL
            if self._offset is not None and (fields := self._mirror.fields) is not None:
                while (write := self._mirror.next(now)) is not None:
                    nursery.start_soon(self._write, connection, write, fields, self._offset)
                # No less than a moment, which may be lost in rounding, so that simulated time would not move on.
                rest = min(rest, max(0.001, self._mirror.wake_at(now) - now))
            with trio.move_on_after(rest):
                await self._news.wait()

    async def _write(self, connection: Api, write: Write, fields: StatusFields, offset: float) -> None:
        namespace, name = write.key
        path = f"{SANDBOXENVS.path(namespace)}/{name}/status"
        try:
            applied = body(write.key, write.shown, fields, offset, summary=write.summary)
            answer = await connection.apply(path, _PARAMS, applied, deadline=WRITE_DEADLINE)
            seen = self._decoder.single(answer.body)
        except KubernetesError as error:
            self._context.log.debug("kubernetes_status_failed", env=f"{namespace}/{name}", error=str(error))
            if self._mirror.failed(write, error, self._context.clock()):
                self._doubt.set()
        else:
            self._mirror.written(write, seen, self._context.clock())
        self._wake()

    # --- whether anything may be written

    async def _watch_schema(self, connection: Api) -> NoReturn:
        """See again and again what the envs' schema has: a definition may be replaced at any time."""
        pause = FIRST_SCHEMA_PAUSE
        while True:
            self._doubt = trio.Event()
            self._schema_trouble = await self._check_schema(connection)
            self._wake()
            if self._schema_trouble is None:
                pause = FIRST_SCHEMA_PAUSE
                with trio.move_on_after(SCHEMA_INTERVAL):
                    await self._doubt.wait()
            await trio.sleep(pause * self._context.random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_SCHEMA_PAUSE)

    async def _check_schema(self, connection: Api) -> Trouble | None:
        """Why nothing may be written; None where it may. Nothing is, before that is known: into a list without keys, an
        apply would write over the entries of others."""
        try:
            document = await openapi_document(connection, SANDBOXENVS)
        except KubernetesError as error:
            # What was known of it is more likely to be true than not.
            return None if self._mirror.fields is not None else trouble(SANDBOXENVS, error, table="sink")
        verdict = check_status(document, SANDBOXENVS)
        if verdict is None:
            self._mirror.allow(None, self._context.clock())
            text = f"the API server has no schema of {SANDBOXENVS}, and nothing is written without"
            advice = "install config/kubernetes/crd, or grant the sink's user what system:discovery grants"
            return Trouble("schema", f"{text}; {advice}")
        if verdict.faults:
            self._mirror.allow(None, self._context.clock())
            return Trouble("schema", f"{SANDBOXENVS}: {'; '.join(verdict.faults)}")
        self._mirror.allow(verdict.fields, self._context.clock())
        return None


class _Following:
    """Hands what an informer finds to the mirror."""

    def __init__(self, mirror: Mirror, clock: Callable[[], float]) -> None:
        self._mirror = mirror
        self._clock = clock

    def replacing(self, index: int, namespace: str | None, objects: Mapping[Key, Any]) -> Iterator[None]:
        """All envs of a namespace, or (None) of all, step by step."""
        return self._mirror.replacing(namespace, objects, self._clock())

    def apply(self, index: int, key: Key, value: Any | None) -> None:
        """One env, or its end."""
        self._mirror.observe(key, value, self._clock())

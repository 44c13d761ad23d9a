"""Sources that say what a test tells them to say, and what stands between any source and its agent in a simulated
federation: a `SourceGate`, which can make it slow, have it fail, or let nothing through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

import trio

from trio_federation.capacity import Capacity, Change, stamped
from trio_federation.hookspecs import CapacitySource, Trouble
from trio_federation.testing.ledger import Statement


class ScriptedSource(CapacitySource):
    """A polled source that says what it was told to say."""

    def __init__(self) -> None:
        self._records: tuple[Capacity, ...] = ()
        self._frozen = False
        #: raised by every collect while it is set
        self.failure: BaseException | None = None
        #: seconds that a collect takes
        self.slowness = 0.0
        #: what `cluster_uid` says
        self.uid: str | None = None
        #: how many collects were begun
        self.collects = 0
        #: how often it was closed
        self.closed = 0

    def set(self, *records: Capacity, frozen: bool = False) -> None:
        """From now on this is the whole truth, stamped anew at every report unless `frozen`."""
        self._records, self._frozen = records, frozen

    async def collect(self) -> Sequence[Capacity]:
        """What `set` was told last, after `slowness` seconds; raises `failure` where there is one."""
        self.collects += 1
        await trio.sleep(self.slowness)
        if self.failure is not None:
            raise self.failure
        if self._frozen:
            return self._records
        return [stamped(record, None, record.origin) for record in self._records]

    def cluster_uid(self) -> str | None:
        """`uid`, as the test has set it."""
        return self.uid

    async def aclose(self) -> None:
        """Counts that it was closed."""
        self.closed += 1
        await trio.lowlevel.checkpoint()


class PushingSource(ScriptedSource):
    """A source that pushes batches as the test hands them in, and answers a collect like a polled one."""

    def __init__(self) -> None:
        super().__init__()
        #: what `is_live` says
        self.live = True
        self._to_agent, self._pushed = trio.open_memory_channel[Sequence[Change]](float("inf"))

    def push(self, *changes: Change) -> None:
        """Push one batch. Does not wait until the agent has taken it."""
        self._to_agent.send_nowait(changes)

    async def changes(self) -> AsyncIterator[Sequence[Change]]:
        """Every batch that was pushed."""
        async for batch in self._pushed:
            yield batch

    def is_live(self) -> bool:
        """What `live` was set to."""
        return self.live


class SourceFaults:
    """What is done to the sources of one cluster."""

    def __init__(self) -> None:
        #: seconds that every collect takes longer
        self.slowness = 0.0
        #: raised by every collect while it is set
        self.failure: Exception | None = None
        self._open = trio.Event()
        self._open.set()

    def close(self) -> None:
        """Nothing goes in or out until `open`."""
        self._open = trio.Event()

    def open(self) -> None:
        """Everything goes through again."""
        self._open.set()

    async def pass_through(self) -> None:
        """Return while nothing is in the way, or once it is not any more."""
        await self._open.wait()


#: Told what a source has said.
Said = Callable[[Statement], None]


class SourceGate(CapacitySource):
    """A source as its agent meets it in a simulated federation: the real one, less what `faults` keep back. `name`:
    that of the source in what `said` is told."""

    def __init__(self, name: str, source: CapacitySource, faults: SourceFaults, said: Said) -> None:
        self.name = name
        self.source = source
        self._faults = faults
        self._said = said

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The source's own life."""
        await self.source.run(task_status=task_status)

    async def aclose(self) -> None:
        """Closes the source."""
        await self.source.aclose()

    async def collect(self) -> Sequence[Capacity]:
        """What the source says, later or not at all where it is made slow or to fail."""
        called_at = trio.current_time()
        await self._faults.pass_through()
        asked_at = trio.current_time()
        if self._faults.slowness:
            await trio.sleep(self._faults.slowness)
        if self._faults.failure is not None:
            raise self._faults.failure
        records = await self.source.collect()
        await self._faults.pass_through()
        try:
            unknown: Collection[str] = frozenset(self.source.unknown_namespaces())
        except Exception:  # the agent asks, too, and tells
            unknown = ()
        self._said(Statement(self.name, called_at, asked_at, records, whole=True, unknown=unknown))
        return records

    def changes(self) -> AsyncIterator[Sequence[Change]] | None:
        """What the source pushes; None where it only answers."""
        changes = self.source.changes()
        # What is no iterator is the source's mistake, and the agent's to tell.
        return _GatedChanges(changes, self._faults, self._pushed) if isinstance(changes, AsyncIterator) else changes

    def _pushed(self, changes: Sequence[Change]) -> None:
        now = trio.current_time()
        self._said(Statement(self.name, now, now, changes, whole=False))

    def is_live(self) -> bool:
        """What the source says."""
        return self.source.is_live()

    def cluster_uid(self) -> str | None:
        """What the source says."""
        return self.source.cluster_uid()

    def unknown_namespaces(self) -> Collection[str]:
        """What the source says."""
        return self.source.unknown_namespaces()

    def troubles(self) -> Sequence[Trouble]:
        """What the source says."""
        return self.source.troubles()


class _GatedChanges(AsyncIterator[Sequence[Change]]):
    """What a source pushes, less what is kept back. Closed together with what it goes through, where that can be."""

    def __init__(
        self,
        changes: AsyncIterator[Sequence[Change]],
        faults: SourceFaults,
        pushed: Callable[[Sequence[Change]], None],
    ) -> None:
        self._changes = changes
        self._faults = faults
        self._pushed = pushed

    async def __anext__(self) -> Sequence[Change]:
        batch = await self._changes.__anext__()
        await self._faults.pass_through()
        self._pushed(batch)
        return batch

    async def aclose(self) -> None:
        close: Callable[[], Awaitable[None]] | None = getattr(self._changes, "aclose", None)
        if close is not None:
            await close()

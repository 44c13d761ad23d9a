"""Follows the objects of one resource in one namespace, or in all of them: makes the requests that the reflector
decides on, hands what comes to the store, and keeps the evidence that what the store holds is still true. What is asked
next, and after which pause, is the reflector's decision; how a request travels is the client's business.

Evidence is a complete list, an event or a bookmark. A watch may be silent because nothing happens, or because the other
end is gone and nobody has said so. So where nothing has come for a third of the TTL, the smallest possible list is
asked for; its answer shows that the API server is there and still lets us read, and that it does not come is the end of
the watch. A watch that has not even brought a bookmark for longer than API servers take between two is made anew, as
its connection may have died while others have not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import trio

from trio_federation_kubernetes.connection import Api
from trio_federation_kubernetes.errors import ApiError, KubernetesError, UnreachableError
from trio_federation_kubernetes.lines import Lines
from trio_federation_kubernetes.mapping import Watched
from trio_federation_kubernetes.reflector import LONGEST_PAUSE, LONGEST_RETRY_AFTER, ListPage, Put, Reflector, Watch
from trio_federation_kubernetes.resources import Key

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

#: Seconds for one page of a list. Hundreds of objects come in well under one; a loaded server takes longer.
LIST_DEADLINE = 30.0
#: Seconds for a whole list in one answer, the last resort where pages have expired before the last of them was had.
UNPAGED_DEADLINE = 120.0
#: Seconds that a watch may go on after the time that the server was asked to end it.
WATCH_GRACE = 15.0
#: Seconds for which a watch may bring nothing at all. API servers send a bookmark each minute where something happens.
LONGEST_SILENCE = 90.0
#: Seconds to rest after an event that had to be waited for, so that those behind it are taken together: to be woken
#: costs several times what an event costs, and what changes is not told to others sooner than 200 ms later anyway.
REST = 0.02
#: Seconds in which the next chunk is there if it came together with the last one.
AT_ONCE = 0.001


class Target(Protocol):
    """Who is told what there is."""

    def replacing(self, index: int, namespace: str | None, objects: Mapping[Key, Any]) -> Iterator[None]:
        """All of it, step by step."""

    def apply(self, index: int, key: Key, value: Any | None) -> None:
        """One object, or its end."""


def _another_cluster() -> ApiError:
    """What the end of a version is to the reflector."""
    return ApiError("another cluster answers than before", code=410, status_reason="Expired")


class Informer:
    """Keeps a store up to date with one resource in one scope.

    `index`: which of the mapper's watched resources this is. `namespace`: None for all. `ttl`: seconds. `changed` is
    called after whatever may have changed the store, the evidence or the trouble; `broken` when a request or a watch
    has failed, also where that is mended at once: once, until there is evidence again."""

    def __init__(
        self,
        api: Api,
        store: Target,
        watched: Watched,
        *,
        index: int,
        namespace: str | None,
        label_selector: str,
        page_size: int,
        ttl: float,
        clock: Callable[[], float],
        random: Random,
        log: FilteringBoundLogger,
        changed: Callable[[], None],
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        self.resource = watched.resource
        self.namespace = namespace
        #: when the store was last known to be up to date with this scope, in seconds on the clock; None: never yet
        self.evidence: float | None = None
        #: what went wrong last, and has not worked since
        self.error: KubernetesError | None = None
        #: set once there is a first outcome, good or bad
        self.settled = trio.Event()
        self._api = api
        self._store = store
        self._decoder = watched.decoder
        self._index = index
        self._path = watched.resource.path(namespace)
        self._selector = {"labelSelector": label_selector} if label_selector else {}
        self._ttl = ttl
        self._clock = clock
        self._random = random
        self._log = log.bind(resource=str(watched.resource), namespace=namespace or "*")
        self._changed = changed
        self._broken = broken
        #: whether what was read last is of another cluster
        self._foreign = False
        #: when something failed last
        self._broke_at = -math.inf
        #: whether nothing has failed since there was evidence, or since the beginning
        self._unbroken = True
        self._reflector: Reflector[Any] = Reflector(page_size=page_size, random=random)
        #: cancelled to end a watch that is open
        self._watch: trio.CancelScope | None = None
        #: why it was ended
        self._watch_error: KubernetesError | None = None
        self._list_began = -math.inf
        #: the same of the last list that has come to its end
        self._whole_list_began = -math.inf
        #: when the watch that was asked for last was open; None: it is not, or never was
        self._opened: float | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource} in {self.namespace or 'all namespaces'}: {self._reflector!r}>"

    def start_over(self, since: float) -> None:
        """Another cluster answers than at the moment `since`, in seconds on the clock. What was read up to now is not
        known to be true any more, and all is listed anew. The old version must not be gone on from: it may mean
        something here, too, and something else. Does nothing where all was listed after a failure since then."""
        if since < self._broke_at <= self._whole_list_began:
            return
        self._foreign = True
        self.evidence = None
        self._unbroken = False  # that is known already
        if self._watch is not None:
            self._watch.cancel()

    async def run(self) -> NoReturn:
        """Follow until cancelled. No failure of the API server, and nothing that it says, ends this."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._probe)
            while True:
                await trio.sleep(self._reflector.pause())
                request = self._reflector.request()
                began, before = self._clock(), self._reflector.trouble
                try:
                    if isinstance(request, Watch):
                        await self._follow(request)
                        self._reflector.ended(self._lasted())
                    else:
                        await self._list(request, began)
                except KubernetesError as error:
                    self._reflector.failed(error, self._lasted() if isinstance(request, Watch) else 0.0)
                trouble = self._reflector.trouble
                if trouble is not None and trouble is not before:
                    self._breaks()
                    # What is mended at once, such as a version that is too old, is no trouble.
                    if self._reflector.pause() > 0:
                        self._failed(trouble)

    async def _list(self, request: ListPage, began: float) -> None:
        if not request.continue_token:
            self._foreign = False
        deadline = UNPAGED_DEADLINE if request.limit is None else LIST_DEADLINE
        answer = await self._api.get(self._path, request.params() | self._selector, deadline=deadline)
        if self._foreign and request.continue_token:
            raise _another_cluster()  # of which the first pages were not
        if not request.continue_token:
            self._list_began = began
        content = self._reflector.page(self._decoder.page(answer.body))
        if content is not None:
            for _ in self._store.replacing(self._index, self.namespace, content):
                await trio.lowlevel.checkpoint()
            self._log.debug("kubernetes_listed", objects=len(content), version=self._reflector.position)
            self._whole_list_began = self._list_began
            # All pages of a list show the moment of the first one.
            self._vouch(self._list_began)

    def _lasted(self) -> float:
        """Seconds for which the watch was open. That an answer was waited for is no sign that watches work."""
        return 0.0 if self._opened is None else self._clock() - self._opened

    async def _follow(self, request: Watch) -> None:
        """Take what a watch brings, until it ends. Raises KubernetesError where it breaks; one that the reflector has
        done with has ended for it."""
        lines = Lines()
        params = request.params() | self._selector
        self._watch_error = self._opened = None
        with trio.CancelScope() as scope:
            try:
                async with self._api.stream(self._path, params, deadline=request.timeout + WATCH_GRACE) as chunks:
                    # Only now: a probe's answer says nothing of a watch that is not there yet.
                    self._watch, self._opened = scope, self._clock()
                    if self._foreign:
                        scope.cancel()
                    self._worked()
                    with trio.move_on_after(LONGEST_SILENCE) as silence:
                        asked = trio.current_time()
                        async for chunk in chunks:
                            silence.deadline = trio.current_time() + LONGEST_SILENCE
                            for line in lines.feed(chunk):
                                self._event(line)
                                if not self._reflector.under_way:
                                    return
                            if trio.current_time() - asked > AT_ONCE:
                                # It had to be waited for, and others may be right behind it.
                                await trio.sleep(REST)
                            asked = trio.current_time()
            finally:
                self._watch = None
        if self._foreign:
            raise _another_cluster()
        if self._watch_error is not None:
            raise self._watch_error
        # A last event that was cut off is sent again by the next watch.

    def _event(self, line: bytes) -> None:
        event = self._decoder.event(line)
        change = self._reflector.event(event, self._lasted())
        if change is not None:
            self._store.apply(self._index, change.key, change.object if isinstance(change, Put) else None)
        if self._reflector.under_way:
            self._worked()
            self._vouch(self._clock())

    async def _probe(self) -> NoReturn:
        """Ask, while a watch is silent, whether the API server is there and lets us read."""
        interval, pause = self._ttl / 3, self._ttl / 6
        failures = 0
        while True:
            if self._watch is None or self.evidence is None:
                # Requests of another kind are under way, and bring evidence, or trouble, of their own.
                await trio.sleep(pause / 10)
                continue
            rest = self.evidence + interval - self._clock()
            if rest > 0.001:  # less may be lost in rounding, so that simulated time would not move on
                await trio.sleep(rest)
                continue
            began = self._clock()
            watch = self._watch
            try:
                answer = await self._api.get(self._path, {"limit": "1"} | self._selector, deadline=self._ttl / 6)
                self._decoder.page(answer.body)  # a page of somebody else's is no evidence
            except KubernetesError as error:
                if watch is not self._watch:
                    continue  # it was about a watch that is over, and whose end has been told
                failures += 1
                self._breaks()
                self._failed(error)
                if isinstance(error, UnreachableError):
                    self._watch_error = error
                    watch.cancel()
                retry_after = min(error.retry_after or 0.0, LONGEST_RETRY_AFTER) if isinstance(error, ApiError) else 0.0
                bound = min(LONGEST_PAUSE, pause * 2.0 ** min(failures - 1, 30))
                await trio.sleep(max(retry_after, bound * self._random.uniform(0.8, 1.2)))
            else:
                failures = 0
                if watch is self._watch:
                    self._worked()
                    self._vouch(began)

    def _vouch(self, moment: float) -> None:
        """What the store has was true at that moment."""
        self.evidence = max(moment, self.evidence if self.evidence is not None else -math.inf)
        self._unbroken = True
        self.settled.set()
        self._changed()

    def _breaks(self) -> None:
        self._broke_at = self._clock()
        if self._unbroken:
            self._unbroken = False
            self._broken()

    def _worked(self) -> None:
        if self.error is not None:
            self._log.debug("kubernetes_works", failures=self._reflector.failures)
        self.error = None

    def _failed(self, error: KubernetesError) -> None:
        self._log.debug("kubernetes_failed", error=str(error), reason=error.reason, reflector=repr(self._reflector))
        self.error = error
        self.settled.set()
        self._changed()

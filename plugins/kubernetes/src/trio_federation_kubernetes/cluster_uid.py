"""What tells a Kubernetes cluster from every other: the UID of its namespace kube-system, which a cluster has from its
first minute on, keeps for as long as it lives, and shares with no other. Here is when it is asked for, and what counts
as an answer. Nothing waits for it: a source that does not know it tells all the same. What hubs do with it is theirs to
decide, and how a request travels is `connection.py`'s.

It is asked for once, beside the first list, and again only after the way to the server was in doubt: a request or a
watch of an informer that worked has failed, or the version that it went on from was gone. A cluster that is built anew
has another API server, and an etcd in which the old versions mean nothing, so the way from the old one to it leads
through one of these. Each whole list would be a sign as well, but where nothing happens one is made every minute and a
half, for each resource and namespace. So a cluster that is well is asked this once in all.

That another cluster answers matters to the informers as well. The versions of a young etcd are much like those of any
other, so a watch may go on in the new cluster from where it was in the old one, and never hear that what was there is
gone.

To find a server that does not answer is left to the informers. Only when they have heard of it again, it is asked for
the UID as well, so this adds nothing to what a server that is down has to put up with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NoReturn

import msgspec
import trio

from trio_federation_kubernetes.connection import Api
from trio_federation_kubernetes.errors import AnswerError, ApiError, KubernetesError
from trio_federation_kubernetes.reflector import FIRST_PAUSE, LEAST_PAUSE, LONGEST_PAUSE, LONGEST_RETRY_AFTER
from trio_federation_kubernetes.texts import one_line, quoted

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

#: the namespace that every cluster has
NAMESPACE = "kube-system"
PATH = f"/api/v1/namespaces/{NAMESPACE}"
#: Seconds for the answer, which has some hundred bytes.
DEADLINE = 10.0
#: Seconds between two requests where the way to the server is in doubt again and again, such as watches that break as
#: soon as they are open.
LEAST_BETWEEN = 15.0
#: Seconds after a refusal, or an answer that makes no sense. A right may be granted later; but where it never is, to
#: ask for it should not fill the server's audit log.
REFUSED_PAUSE = 600.0
#: Seconds between two looks at whether the informers reach the server again.
LOOK_INTERVAL = 0.5

#: what may be missing is a right
_ADVICE = "hubs cannot tell whether this cluster has a second id; config/kubernetes/rbac/cluster-uid has the right"
#: what hubs take
_UID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class _Metadata(msgspec.Struct, frozen=True, gc=False):
    name: str = ""
    uid: str = ""


class _Namespace(msgspec.Struct, frozen=True, gc=False):
    """What is read of a Namespace."""

    kind: str = ""
    metadata: _Metadata = _Metadata()


class ClusterUid:
    """Knows the UID of the cluster, or that it is not known.

    `clock`: seconds since some fixed moment. `moved` is called when another cluster answers than
    before, with the moment at which the old one was last known to be there."""

    def __init__(
        self, *, clock: Callable[[], float], random: Random, log: FilteringBoundLogger, moved: Callable[[float], None]
    ) -> None:
        #: None: not known yet, or not to be had
        self.uid: str | None = None
        self._clock = clock
        self._random = random
        self._log = log
        self._moved = moved
        #: the last one that was known, and when it was asked for last
        self._last: str | None = None
        self._last_at = -math.inf
        self._doubt = trio.Event()
        #: when the way to the server was last in doubt, in seconds on the clock
        self._doubted_at = -math.inf
        #: requests in a row that have brought neither an answer nor a refusal
        self._failures = 0
        #: the reason for which there is no UID, as it was told; "" where that was not told since there was one
        self._told = ""

    def doubt(self) -> None:
        """The way to the server was lost, and what answers next may be another cluster. What is known counts until that
        one has said what it is."""
        self._doubted_at = self._clock()
        self._doubt.set()

    async def follow(self, api: Api, evidence: Callable[[], float | None]) -> NoReturn:
        """Ask, and ask again when that may bring something else, until cancelled. No answer, and no failure, ends this.

        `evidence`: when the server was last known to be there, in seconds on the clock; None: never yet."""
        while True:
            asked_at = self._clock()
            # A doubt that comes up from here on is one of the answer.
            self._doubt = trio.Event()
            pause = await self._ask(api)
            if self._failures:
                await trio.sleep(pause)
            else:
                with trio.move_on_after(pause):
                    await self._doubt.wait()
                await trio.sleep(max(0.0, asked_at + LEAST_BETWEEN - self._clock()))
            while self._doubted_at > _moment(evidence()):  # noqa: ASYNC110 - the informers tell nobody of each
                await trio.sleep(LOOK_INTERVAL)

    async def _ask(self, api: Api) -> float:
        """Returns after how many seconds to ask again."""
        asked_at = self._clock()
        try:
            uid = uid_in((await api.get(PATH, {}, deadline=DEADLINE)).body)
        except KubernetesError as error:
            return self._refused(error) if _is_final(error) else self._failed(error)
        self._failures, self._told = 0, ""
        if uid != self.uid:
            self._log.info("kubernetes_cluster_uid", uid=uid, before=self.uid or "unknown")
        self.uid = uid
        if self._last not in (None, uid):
            self._moved(self._last_at)
        self._last, self._last_at = uid, asked_at
        return math.inf

    def _refused(self, error: KubernetesError) -> float:
        """This server does not say it. What was known may be of another one."""
        self._failures, self.uid = 0, None
        if error.reason != self._told:
            self._log.info("kubernetes_cluster_uid_unknown", error=str(error), advice=_ADVICE)
        self._told = error.reason
        return REFUSED_PAUSE * self._random.uniform(0.8, 1.2)

    def _failed(self, error: KubernetesError) -> float:
        """There is no answer yet."""
        self._log.debug("kubernetes_cluster_uid_failed", error=str(error), reason=error.reason)
        self._failures += 1
        self._doubted_at = self._clock()
        bound = min(LONGEST_PAUSE, math.ldexp(FIRST_PAUSE, min(self._failures, 30) - 1))
        retry_after = min(error.retry_after or 0.0, LONGEST_RETRY_AFTER) if isinstance(error, ApiError) else 0.0
        return max(retry_after, self._random.uniform(LEAST_PAUSE, bound))


def uid_in(body: bytes) -> str:
    """The UID in an answer of an API server. Raises AnswerError where that is not the namespace, or has none that hubs
    would take: what stands before a server may answer anything."""
    try:
        namespace = msgspec.json.decode(body, type=_Namespace)
    except (msgspec.DecodeError, RecursionError) as error:
        raise AnswerError(f"{PATH}: the answer is no Namespace: {one_line(str(error))}") from error
    if namespace.kind != "Namespace" or namespace.metadata.name != NAMESPACE:
        raise AnswerError(f"{PATH}: the answer is not the Namespace {NAMESPACE}; see what stands before the server")
    if not _UID.fullmatch(namespace.metadata.uid):
        raise AnswerError(f"{PATH}: the Namespace has no usable UID: {quoted(namespace.metadata.uid)}")
    return namespace.metadata.uid


def _is_final(error: KubernetesError) -> bool:
    """Whether the same request would get the same answer for as long as nobody changes anything."""
    if isinstance(error, ApiError):
        return 300 <= error.code < 500 and error.code not in (401, 408, 429)
    return isinstance(error, AnswerError)


def _moment(evidence: float | None) -> float:
    return -math.inf if evidence is None else evidence

"""Who reports for which cluster: one live reporter per cluster id, one id per cluster as far as clusters say what tells
them apart (their uid), who may take over, and for how long a reporter's records are still shown to newcomers when it is
gone (semantics.md, "Hub"). Pure: times are arguments, and ending a replaced session's stream is the hub's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trio_federation.errors import AlreadyExists


class Session:
    """One agent's report call. `heard`: tells when anything of it came in last, in seconds."""

    __slots__ = ("cluster_id", "ended_at", "heard", "instance", "peer", "said_goodbye", "uid")

    def __init__(
        self, cluster_id: str, instance: str | None, peer: str, heard: Callable[[], float], uid: str | None = None
    ) -> None:
        self.cluster_id = cluster_id
        self.instance = instance
        self.uid = uid
        self.peer = peer
        self.heard = heard
        self.ended_at: float | None = None
        self.said_goodbye = False

    def last_heard(self) -> float:
        """When anything of it came in last; of an ended one, when it ended at the latest."""
        return self.heard() if self.ended_at is None else min(self.heard(), self.ended_at)


class Opened(NamedTuple):
    """A session that was let in, and the live ones, mostly none, that it replaces and that have to be ended now: of its
    cluster id, and of its cluster under another id."""

    session: Session
    replaced: tuple[Session, ...]
    #: the id under which its cluster was reported before, where that was another one
    formerly: str | None = None


class Sessions:
    """The newest session of every cluster.

    `silence_limit`: seconds after which another instance may take over from one that is not heard of.
    `grace`: seconds for which the records of a vanished reporter are still shown to new watchers.
    `forget_after`: seconds after which a cluster without a session is forgotten: the hub's TTL, when its records are
    gone, too."""

    def __init__(self, *, silence_limit: float = 15.0, grace: float = 10.0, forget_after: float = 60.0) -> None:
        self.silence_limit = silence_limit
        self.grace = grace
        self.forget_after = max(forget_after, silence_limit, grace)
        self._sessions: dict[str, Session] = {}
        #: by uid, the newest session that has said it
        self._uids: dict[str, Session] = {}

    def open(
        self,
        cluster_id: str,
        instance: str | None,
        peer: str,
        heard: Callable[[], float],
        now: float,
        uid: str | None = None,
    ) -> Opened:
        """Let an instance report for a cluster. The same instance replaces its own older session at once.

        `uid`: what tells its cluster from every other, where it says so. Raises AlreadyExists while another instance
        reports for the id, or has vanished so lately that it may come back; and while the same cluster is reported
        under another id, or was so lately."""
        current = self._sessions.get(cluster_id)
        if current is not None and not self._may_replace(current, instance, now):
            another = uid is not None and current.uid is not None and uid != current.uid
            because = "their uids differ, so " if another else "if it is not, "
            raise AlreadyExists(
                f"cluster {cluster_id!r} is reported by another instance ({current.peer}); if that one is gone, this "
                f"one is let in {self._rest(current, now):.0f} s from now; {because}two clusters share one cluster_id"
            )
        twin = self._uids.get(uid) if uid is not None else None
        if twin is not None and (twin.cluster_id == cluster_id or not self._is_newest(twin)):
            twin = None
        if twin is not None and not self._may_replace(twin, None, now):
            raise AlreadyExists(
                f"this cluster is reported as {twin.cluster_id!r} already ({twin.peer}), and has one uid under both "
                f"ids: give all of its agents one cluster_id; if that one is gone, {cluster_id!r} is let in "
                f"{self._rest(twin, now):.0f} s from now"
            )
        if current is not None and current.uid is not None and self._uids.get(current.uid) is current:
            del self._uids[current.uid]
        session = self._sessions[cluster_id] = Session(cluster_id, instance, peer, heard, uid)
        if uid is not None:
            self._uids[uid] = session
        replaced = tuple(old for old in (current, twin) if old is not None and old.ended_at is None)
        if twin is not None:
            # It is still the newest of its id; from this moment its data do not count any more.
            self.close(twin, now, said_goodbye=False)
        return Opened(session, replaced, twin.cluster_id if twin is not None else None)

    def close(self, session: Session, now: float, *, said_goodbye: bool) -> None:
        """A session has ended. `said_goodbye`: the agent ended it itself, so that it needs no time to come back.
        The late end of a replaced session changes nothing."""
        if session.ended_at is None:
            # What tells it holds on to the call, which is over.
            last = min(session.heard(), now)
            session.heard = lambda: last
            session.ended_at = now
            session.said_goodbye = said_goodbye

    def is_current(self, session: Session) -> bool:
        """Whether a session is its cluster's newest and still open: only then do its data count."""
        return self._is_newest(session) and session.ended_at is None

    def hides(self, cluster_id: str, now: float) -> bool:
        """Whether a newcomer is not shown a cluster's records any more: its reporter has been gone for the grace."""
        session = self._sessions.get(cluster_id)
        return session is not None and session.ended_at is not None and now - session.ended_at > self.grace

    def forget(self, now: float) -> None:
        """Drop what no rule needs any more."""
        self._sessions = {
            cluster_id: session
            for cluster_id, session in self._sessions.items()
            if session.ended_at is None or now - session.ended_at <= self.forget_after
        }
        self._uids = {uid: session for uid, session in self._uids.items() if self._is_newest(session)}

    def live(self) -> int:
        """How many clusters have a reporter now."""
        return sum(1 for session in self._sessions.values() if session.ended_at is None)

    def live_clusters(self) -> list[str]:
        """The clusters that have a reporter now, sorted."""
        return sorted(cluster_id for cluster_id, session in self._sessions.items() if session.ended_at is None)

    def _is_newest(self, session: Session) -> bool:
        return self._sessions.get(session.cluster_id) is session

    def _rest(self, session: Session, now: float) -> float:
        """Seconds until another may take a session's place, if it is not heard of again."""
        return max(0.0, session.last_heard() + self.silence_limit - now)

    def _may_replace(self, current: Session, instance: str | None, now: float) -> bool:
        if instance is not None and instance == current.instance:
            return True
        if now - current.last_heard() > self.silence_limit:
            return True
        if current.ended_at is None:
            return False
        # An instance that vanished gets the silence limit to come back before another takes its place. A peer that
        # names no instance cannot be told from any other when it comes back, so its place is not kept.
        return current.said_goodbye or (current.instance is None)

"""Who may report for a cluster id, and under which one, against a model that only remembers the newest session of each
id, and rule by rule."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from trio_federation.errors import AlreadyExists
from trio_federation.sessions import Opened, Session, Sessions

#: seconds; on a grid, so that both sides of every limit are really met
TICK = 0.5
SILENCE = 15.0
GRACE = 10.0
FORGET = 60.0
CLUSTERS = ("east", "west", "north")


class Peer:
    """What the model knows of one session: when its peer was heard, and how it ended."""

    def __init__(self, cluster_id: str, instance: str | None, uid: str | None, now: float) -> None:
        self.cluster_id = cluster_id
        self.instance = instance
        self.uid = uid
        self.heard_at = now
        self.ended_at: float | None = None
        self.said_goodbye = False
        self.session: Session

    def heard(self) -> float:
        """When its connection carried anything last."""
        return self.heard_at


class SessionsMachine(RuleBasedStateMachine):
    """Instances come, are heard, and go, well or badly, in any order and also late; some of them say what tells their
    cluster from others, and some of these claim several ids."""

    peers = Bundle[Peer]("peers")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sessions = Sessions(silence_limit=SILENCE, grace=GRACE, forget_after=FORGET)
        self.newest: dict[str, Peer] = {}

    @rule(
        target=peers,
        cluster_id=st.sampled_from(CLUSTERS),
        instance=st.sampled_from(("aa", "bb", "cc", None)),
        uid=st.sampled_from(("u1", "u1", "u2", None)),
    )
    def open(self, cluster_id: str, instance: str | None, uid: str | None) -> Peer | MultipleResults[Peer]:
        """semantics.md, "Hub": "One cluster id, one live reporter"; and one cluster under one id only."""
        before = self.newest.get(cluster_id)
        peer = Peer(cluster_id, instance, uid, self.now)
        # The same cluster under other ids. Who speaks for it there is another process than this one, whatever it says.
        twins = [each for each in self.newest.values() if each is not before and uid is not None and each.uid == uid]
        if before is not None and not self._may_replace(before, instance):
            with pytest.raises(AlreadyExists, match=f"cluster {cluster_id!r} is reported by another instance"):
                self.sessions.open(cluster_id, instance, "peer", peer.heard, self.now, uid)
            return multiple()
        for twin in twins:
            if not self._may_replace(twin, None):
                with pytest.raises(AlreadyExists, match=f"reported as {twin.cluster_id!r} already"):
                    self.sessions.open(cluster_id, instance, "peer", peer.heard, self.now, uid)
                return multiple()
        opened = self.sessions.open(cluster_id, instance, "peer", peer.heard, self.now, uid)
        ended = [each for each in (before, *twins) if each is not None and each.ended_at is None]
        assert opened.replaced == tuple(each.session for each in ended)
        for twin in twins:
            if twin.ended_at is None:
                twin.ended_at = self.now
        peer.session = opened.session
        self.newest[cluster_id] = peer
        return peer

    def _may_replace(self, peer: Peer, instance: str | None) -> bool:
        if instance is not None and instance == peer.instance:
            return True  # "The same instance reconnecting replaces its own older session at once"
        if self.now - peer.heard_at > SILENCE:
            return True  # "it takes over once the first has been silent for the silence limit"
        # A peer that ended well needs no time to come back, one without a name cannot be told from any other.
        return peer.ended_at is not None and (peer.said_goodbye or peer.instance is None)

    @rule(peer=peers)
    def hear(self, peer: Peer) -> None:
        """Bytes come in on a connection that still lives."""
        if peer.ended_at is None:
            peer.heard_at = self.now

    @rule(peer=consumes(peers), said_goodbye=st.booleans())
    def close(self, peer: Peer, said_goodbye: bool) -> None:
        """A session ends, perhaps long after it was replaced, or after its cluster was taken over under another id."""
        if peer.ended_at is None:
            peer.ended_at = self.now
            peer.said_goodbye = said_goodbye
        self.sessions.close(peer.session, self.now, said_goodbye=said_goodbye)

    @rule(ticks=st.integers(1, 40))
    def wait(self, ticks: int) -> None:
        """Time passes."""
        self.now += ticks * TICK

    @rule()
    def forget(self) -> None:
        """What no rule needs any more is dropped: that changes no answer but frees a cluster without a reporter."""
        self.sessions.forget(self.now)
        self.newest = {
            cluster_id: peer
            for cluster_id, peer in self.newest.items()
            if peer.ended_at is None or self.now - peer.ended_at <= FORGET
        }

    @invariant()
    def only_the_newest_counts(self) -> None:
        """Hub: "late data and the late end of a replaced session change nothing"."""
        for cluster_id in CLUSTERS:
            peer = self.newest.get(cluster_id)
            gone_for = 0.0 if peer is None or peer.ended_at is None else self.now - peer.ended_at
            assert self.sessions.hides(cluster_id, self.now) is (gone_for > GRACE)
            if peer is not None:
                assert self.sessions.is_current(peer.session) is (peer.ended_at is None)
        live = sorted(cluster_id for cluster_id, peer in self.newest.items() if peer.ended_at is None)
        assert self.sessions.live() == len(live)
        assert self.sessions.live_clusters() == live

    @invariant()
    def no_more_uids_are_kept_than_sessions(self) -> None:
        """Also between two times of forgetting: a new uid at each call takes no memory."""
        assert len(self.sessions._uids) <= len(self.sessions._sessions)

    @invariant()
    def no_cluster_counts_twice(self) -> None:
        """Whatever was opened and taken over: of live reporters, no two say one uid."""
        uids = [peer.uid for peer in self.newest.values() if self.sessions.is_current(peer.session) and peer.uid]
        assert len(uids) == len(set(uids))


TestSessions = SessionsMachine.TestCase


def at(now: float) -> Callable[[], float]:
    """A peer that was heard at that moment and never again."""
    return lambda: now


def opened(
    sessions: Sessions, instance: str | None, now: float, *, cluster_id: str = "east", uid: str | None = None
) -> Opened:
    """A session, heard when it was opened and never again."""
    return sessions.open(cluster_id, instance, "10.0.0.1:1", at(now), now, uid)


def test_a_second_instance_is_refused_until_the_first_has_been_silent_for_the_limit() -> None:
    """semantics.md, "Hub": "another instance that tries is refused with ALREADY_EXISTS and a message naming the id; it
    takes over once the first has been silent for the silence limit"."""
    sessions = Sessions(silence_limit=SILENCE)
    first = opened(sessions, "aa", 0.0).session
    with pytest.raises(AlreadyExists, match=r"'east'.*10\.0\.0\.1:1.*5 s from now"):
        opened(sessions, "bb", 10.0)
    with pytest.raises(AlreadyExists, match="'east'"):
        opened(sessions, "bb", SILENCE)
    taken_over = opened(sessions, "bb", SILENCE + TICK)
    assert taken_over.replaced == (first,)
    assert not sessions.is_current(first)
    assert sessions.is_current(taken_over.session)


def test_the_late_end_of_a_replaced_session_changes_nothing() -> None:
    """semantics.md, "Hub": "The same instance reconnecting replaces its own older session at once; late data and the
    late end of a replaced session change nothing"."""
    sessions = Sessions()
    first = opened(sessions, "aa", 0.0).session
    second = opened(sessions, "aa", 0.0)
    assert second.replaced == (first,)
    sessions.close(first, 1.0, said_goodbye=True)
    assert sessions.is_current(second.session)
    assert sessions.live() == 1
    assert not sessions.hides("east", 1000.0)
    with pytest.raises(AlreadyExists):
        opened(sessions, "bb", 2.0)


def test_a_peer_without_an_instance_is_an_instance_of_its_own() -> None:
    """semantics.md, "Hub": "A peer that sends no instance id is treated as an instance of its own"."""
    sessions = Sessions()
    first = opened(sessions, None, 0.0).session
    with pytest.raises(AlreadyExists):
        opened(sessions, None, 1.0)
    with pytest.raises(AlreadyExists):
        opened(sessions, "aa", 1.0)
    sessions.close(first, 2.0, said_goodbye=False)
    assert opened(sessions, None, 2.0).replaced == ()


def test_records_are_shown_for_the_grace_after_their_reporter_vanished() -> None:
    """semantics.md, "Hub": "new watchers still get its records for the grace (10 s), afterwards not; […] a return
    within the grace changes nothing"."""
    sessions = Sessions(grace=GRACE)
    assert not sessions.hides("east", 0.0)
    sessions.close(opened(sessions, "aa", 0.0).session, 5.0, said_goodbye=False)
    assert not sessions.hides("east", 5.0 + GRACE)
    assert sessions.hides("east", 5.0 + GRACE + TICK)
    opened(sessions, "aa", 6.0)
    assert not sessions.hides("east", 5.0 + GRACE + TICK)


def test_clusters_without_a_session_are_forgotten_and_others_are_not() -> None:
    """A hub's memory is bounded by who reports: what no rule needs any more goes, a live session and a grace stay."""
    sessions = Sessions(silence_limit=SILENCE, grace=GRACE, forget_after=FORGET)
    live = sessions.open("west", "cc", "peer", at(0.0), 0.0).session
    sessions.close(opened(sessions, "aa", 0.0).session, 0.0, said_goodbye=False)
    sessions.forget(FORGET)
    assert sessions.hides("east", FORGET)
    sessions.forget(FORGET + TICK)
    assert not sessions.hides("east", FORGET + TICK)
    assert sessions.is_current(live)


def test_one_cluster_under_two_ids_is_refused_by_name() -> None:
    """With `x-federation-uid`, "one cluster under two ids is refused by name", however its agents are called."""
    sessions = Sessions(silence_limit=SILENCE)
    opened(sessions, "aa", 0.0, uid="u1")
    for instance in ("aa", "bb", None):
        with pytest.raises(AlreadyExists, match=r"reported as 'east' already \(10\.0\.0\.1:1\).*'west' is let in 10 s"):
            opened(sessions, instance, 5.0, cluster_id="west", uid="u1")
    # Another cluster, or one that does not say which it is, is let in.
    opened(sessions, "bb", 5.0, cluster_id="west", uid="u2")
    opened(sessions, "cc", 5.0, cluster_id="north")
    assert sessions.live_clusters() == ["east", "north", "west"]


def test_two_clusters_under_one_id_are_told_that_they_are_two() -> None:
    """The refusal says what tells them apart, where it is known; without it, it may be one cluster with two agents."""
    sessions = Sessions(silence_limit=SILENCE)
    opened(sessions, "aa", 0.0, uid="u1")
    with pytest.raises(AlreadyExists, match="their uids differ, so two clusters share one cluster_id"):
        opened(sessions, "bb", 0.0, uid="u2")
    for uid in ("u1", None):
        with pytest.raises(AlreadyExists, match="if it is not, two clusters share one cluster_id"):
            opened(sessions, "bb", 0.0, uid=uid)


def test_a_cluster_under_another_id_takes_over_from_one_that_is_silent() -> None:
    """And ends it, so that what it still says does not count; when it comes back, it is the one that is refused."""
    sessions = Sessions(silence_limit=SILENCE)
    first = opened(sessions, "aa", 0.0, uid="u1").session
    with pytest.raises(AlreadyExists):
        opened(sessions, "bb", SILENCE, cluster_id="west", uid="u1")
    second = opened(sessions, "bb", SILENCE + TICK, cluster_id="west", uid="u1")
    assert second.replaced == (first,)
    assert not sessions.is_current(first)
    assert sessions.live_clusters() == ["west"]
    with pytest.raises(AlreadyExists, match="reported as 'west' already"):
        opened(sessions, "aa", SILENCE + TICK, uid="u1")


def test_a_cluster_that_was_renamed_after_a_goodbye_need_not_wait() -> None:
    """An operator stops the agent, gives it another cluster_id, and starts it."""
    sessions = Sessions(silence_limit=SILENCE)
    sessions.close(opened(sessions, "aa", 0.0, uid="u1").session, 1.0, said_goodbye=True)
    assert opened(sessions, "bb", 1.0, cluster_id="west", uid="u1").replaced == ()
    # One that only vanished gets the silence limit to come back, under its own id.
    sessions.close(opened(sessions, "cc", 1.0, cluster_id="north", uid="u2").session, 2.0, said_goodbye=False)
    with pytest.raises(AlreadyExists, match="reported as 'north' already"):
        opened(sessions, "dd", 2.0, cluster_id="south", uid="u2")


def test_one_call_may_replace_two() -> None:
    """The same instance as before under one id, and a silent one of its cluster under another."""
    sessions = Sessions(silence_limit=SILENCE)
    west = opened(sessions, "bb", 0.0, cluster_id="west", uid="u1").session
    east = opened(sessions, "aa", 0.0).session
    both = opened(sessions, "aa", SILENCE + TICK, uid="u1")
    assert both.replaced == (east, west)
    assert sessions.live_clusters() == ["east"]


def test_a_uid_that_is_not_said_any_more_keeps_nobody_out() -> None:
    """What counts is what the newest session of an id says."""
    sessions = Sessions(silence_limit=SILENCE)
    opened(sessions, "aa", 0.0, uid="u1")
    opened(sessions, "aa", 1.0)
    assert opened(sessions, "bb", 1.0, cluster_id="west", uid="u1").replaced == ()
    assert sessions.live_clusters() == ["east", "west"]


def test_uids_are_forgotten_with_their_sessions() -> None:
    """A hub's memory is bounded by who reports, also where everybody says a new uid each time."""
    sessions = Sessions(silence_limit=SILENCE, grace=GRACE, forget_after=FORGET)
    for number in range(50):
        opened(sessions, "aa", float(number), uid=f"u{number}")
        assert list(sessions._uids) == [f"u{number}"]
    # One that says a uid that another has taken over takes it from nobody when it is replaced.
    opened(sessions, "bb", 100.0, cluster_id="west", uid="u49")
    opened(sessions, "aa", 100.0)
    assert list(sessions._uids) == ["u49"]
    sessions.forget(50.0)
    assert list(sessions._uids) == ["u49"]


@pytest.mark.parametrize("heard_at, frees_at", [(4.0, 4.0 + SILENCE), (9.0, 5.0 + SILENCE)])
def test_a_session_that_has_ended_keeps_its_moment_and_not_its_call(heard_at: float, frees_at: float) -> None:
    """What it was heard by holds the call and all that was received on it; the place is kept for as long as before."""

    class Call:
        """Stands for what a peer sends on."""

        def heard(self) -> float:
            """When that was; what was sent before the end may be seen after it."""
            return heard_at

    sessions, call = Sessions(silence_limit=SILENCE), Call()
    gone = weakref.ref(call)
    session = sessions.open("east", "aa", "peer", call.heard, 0.0).session
    sessions.close(session, 5.0, said_goodbye=False)
    del call
    gc.collect()
    assert gone() is None
    with pytest.raises(AlreadyExists):
        opened(sessions, "bb", frees_at)
    opened(sessions, "bb", frees_at + TICK)

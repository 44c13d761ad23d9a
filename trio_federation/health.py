"""How the parts of an agent are doing: each source, sink and hub, since when, what worked and failed last, and when it
is tried again; what of that is worth a line in the log; and whether the agent is ready. Pure: `now` is an argument. Who
writes the lines, serves `/readyz` and keeps the metrics is elsewhere; what follows a failure is decided by whoever runs
the part.

Times are seconds on the process's clock, and None stands for never. What `shown` returns is relative: seconds before
now, and for `next_try` from now, because no clock of ours means anything to others."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

#: Seconds after the first line about a failure at which the next one sums up what came since, if it still goes on; each
#: further one comes after twice the time, up to the longest.
SUMMARY_AFTER = 600.0
LONGEST_SUMMARY = 3600.0
#: Seconds after a recovery for which a failure counts as the same trouble: what comes and goes is not told each time.
FLAPPING = 60.0
#: Seconds from an agent's start for which it waits for its hubs before it counts as ready without them.
HUB_GRACE = 15.0


class Tell(Enum):
    """What a failure is worth."""

    #: the first of its kind since the last success: a line
    FIRST = "first"
    #: as before: nothing but a line for those who debug
    AGAIN = "again"
    #: as before, but for so long that a line sums it up
    SUMMARY = "summary"


class Failed(NamedTuple):
    """One failure as it was noted."""

    tell: Tell
    #: failures in a row, this one included
    in_a_row: int
    #: seconds since the first of them
    lasting: float


class Recovered(NamedTuple):
    """The end of a trouble, if there was one."""

    #: failures that it ends, since the trouble began; 0 where there was none
    in_a_row: int
    #: whether any of them was worth a line since the last end; if not, nor is this end
    was_told: bool


_NO_TROUBLE = Recovered(0, False)


class LastError(NamedTuple):
    """The last failure."""

    #: what did not work, for instance "collect"
    what: str
    text: str
    at: float


class _Trouble:
    """One thing that has failed and has not worked since, or not for long."""

    def __init__(self, now: float) -> None:
        self.began = now
        self.in_a_row = 0
        #: whether a failure was told since the last end, and when the first one came since then
        self._was_told = False
        self._streak_began: float | None = None
        self._ended_at = now
        self._kinds: set[str] = set()
        self._pause = SUMMARY_AFTER
        self._summary_at = now + self._pause

    def failed(self, kind: str, now: float) -> Failed:
        self.in_a_row += 1
        if self._streak_began is None:
            self._streak_began = now
        tell = Tell.AGAIN
        if kind not in self._kinds:
            self._kinds.add(kind)
            tell = Tell.FIRST
        elif now >= self._summary_at or (not self._was_told and now - self._streak_began >= FLAPPING):
            tell = Tell.SUMMARY  # the latter: it had seemed to come and go, and now has come to stay
        if tell is not Tell.AGAIN:
            self._was_told = True
            self._summary_at = now + self._pause
            self._pause = min(LONGEST_SUMMARY, 2 * self._pause)
        return Failed(tell, self.in_a_row, now - self.began)

    def end(self, now: float) -> Recovered:
        recovered = Recovered(self.in_a_row, self._was_told)
        self._was_told = False
        self._streak_began = None
        self._ended_at = now
        return recovered

    def goes_on(self, now: float) -> bool:
        """Whether a failure now, after the end, is more of the same."""
        return now - self._ended_at < FLAPPING


class Health:
    """How one source or sink is doing. It does several things (`what`, for instance "collect" and "push"), and each of
    them can fail by itself.

    `name`: as in logs and metrics. `now`: when it started. `working`: the state's name while nothing is wrong."""

    #: the states that a failure of these things makes; of any other it is "failing". The first that applies counts.
    _STATES = (("blocked", "blocked"), ("live", "not_live"))
    #: what makes it "partly" where nothing else is wrong
    _PART = "trouble"

    def __init__(self, name: str, now: float, *, working: str = "working") -> None:
        self.name = name
        #: when the state became what it is
        self.since = now
        self.last_success: float | None = None
        self.last_error: LastError | None = None
        self.next_try: float | None = None
        #: failures since the start
        self.failures = 0
        self._working = working
        self._state = "starting"
        #: what is wrong now, and what was
        self._troubles: dict[str, _Trouble] = {}
        self._over: dict[str, _Trouble] = {}

    @property
    def state(self) -> str:
        """ "starting", `working`, "partly", "failing", "blocked" or "not_live"."""
        return self._state

    @property
    def has_worked(self) -> bool:
        """Whether it ever did what it is there for."""
        return self.last_success is not None

    def worked(self, what: str, now: float) -> Recovered:
        """`what` has worked. Returns what that ends."""
        self.last_success = now
        return self.over(what, now)

    def failed(self, what: str, text: str, now: float, *, kind: str = "", counts: bool = True) -> Failed:
        """`what` has failed. `kind`: failures of another kind are worth a line of their own. `counts`: whether it is
        one of the `failures`."""
        self.failures += counts
        self.last_error = LastError(what, text, now)
        if what not in self._troubles:
            before = self._over.pop(what, None)
            self._troubles[what] = before if before is not None and before.goes_on(now) else _Trouble(now)
        noted = self._troubles[what].failed(kind, now)
        self._update(now)
        return noted

    def over(self, what: str, now: float) -> Recovered:
        """What was wrong with `what` does not matter any more, whether or not it has worked. Returns as `worked`."""
        trouble = self._troubles.pop(what, None)
        self._update(now)
        if trouble is None:
            return _NO_TROUBLE
        self._over[what] = trouble
        return trouble.end(now)

    def _update(self, now: float) -> None:
        state = self._now_is()
        if state != self._state:
            self._state = state
            self.since = now

    def _now_is(self) -> str:
        for what, state in self._STATES:
            if what in self._troubles:
                return state
        if self._troubles:
            return "partly" if self._troubles.keys() == {self._PART} else "failing"
        return self._working if self.has_worked else "starting"

    def shown(self, now: float) -> dict[str, Any]:
        """This, for `/readyz`."""
        error = self.last_error
        return {
            "name": self.name,
            "state": self.state,
            "since": _ago(self.since, now),
            "last_success": _ago(self.last_success, now),
            "last_error": error and {"what": error.what, "text": error.text, "age": _ago(error.at, now)},
            "next_try": None if self.next_try is None else round(max(0.0, self.next_try - now), 3),
            "failures": self.failures,
        }


class HubHealth(Health):
    """How one hub is doing, seen from an agent: the connection, and the two streams on it."""

    def __init__(self, name: str, now: float) -> None:
        super().__init__(name, now)
        #: when the last batch of a watch came in
        self.last_batch: float | None = None
        self._streams: dict[str, tuple[bool, float]] = {"report": (False, now), "watch": (False, now)}
        self._state = "connecting"

    @property
    def any_up(self) -> bool:
        """Whether a stream is up."""
        return any(up for up, _ in self._streams.values())

    def is_up(self, what: str) -> bool:
        """Whether a stream, "report" or "watch", is up."""
        return self._streams[what][0]

    def stream(self, what: str, up: bool, now: float) -> None:
        """One of the streams, "report" or "watch", is up, or is not."""
        if self._streams[what][0] != up:
            self._streams[what] = (up, now)
            self._update(now)

    def _now_is(self) -> str:
        up = [up for up, _ in self._streams.values()]
        if all(up):
            return "connected"
        if any(up):
            return "partly"
        return "failing" if self._troubles else "connecting"

    def shown(self, now: float) -> dict[str, Any]:
        """This, for `/readyz`."""
        streams = {what: {"up": up, "since": _ago(since, now)} for what, (up, since) in self._streams.items()}
        return super().shown(now) | {"last_batch": _ago(self.last_batch, now), "streams": streams}


def why_not_ready(sources: Sequence[Health], hubs: Sequence[HubHealth], uptime: float) -> list[str]:
    """Why an agent is not ready, a line each; empty once it is.

    It is ready when each source has told once what it has, and one hub has told what the others have. A hub that does
    not answer holds it up only for HUB_GRACE after its start: what its own cluster has does not depend on any hub. Once
    ready, it stays so: what fails later ages out, and shows elsewhere."""
    reasons = [
        f"{source.name} has not told yet what it has{_because(source)}" for source in sources if not source.has_worked
    ]
    if hubs and uptime < HUB_GRACE and not any(hub.last_batch is not None for hub in hubs):
        reasons.append(f"no hub has told yet what other clusters have; waiting for it for {HUB_GRACE:g} s at most")
    return reasons


def _because(health: Health) -> str:
    return f": {health.last_error.text}" if health.last_error is not None else ""


def _ago(moment: float | None, now: float) -> float | None:
    return None if moment is None else round(max(0.0, now - moment), 3)

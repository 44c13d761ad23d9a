"""Whether this agent is the one that reports for its cluster, out of what each hub has said last of its reports. Pure.
Who may report is decided by the hubs (`sessions.py`); what follows from being refused is `link.py`'s business, and what
only the reporter should do is that of whoever asks here."""

from __future__ import annotations


class Standing:
    """What the hubs say of one agent's reports.

    It is written on the agent's loop, and may be read from any thread. A hub counts from when it is first named; until
    then, and where there is none at all, nobody else can be the reporter."""

    def __init__(self) -> None:
        #: by hub: True: it takes our reports; False: it takes those of another; None: not known
        self._said: dict[str, bool | None] = {}
        # What readers get is this one attribute, which is replaced: the dictionary may change while they look.
        self._answer: bool | None = True

    def accepted(self, hub: str) -> None:
        """The hub takes this agent's reports."""
        self._say(hub, True)

    def refused(self, hub: str) -> None:
        """The hub refuses this agent's reports, because it takes those of another agent for the same cluster."""
        self._say(hub, False)

    def lost(self, hub: str) -> None:
        """What the hub said does not count any more: the call or the connection has ended, or there was none yet."""
        self._say(hub, None)

    def is_reporter(self) -> bool | None:
        """True: each hub that says anything takes this agent's reports, or there are no hubs; False: each of them takes
        those of another agent of this cluster; None: no hub says anything now, or they differ. After a hub's restart
        two agents may each have one of two hubs, for good, and neither is more of a reporter than the other."""
        return self._answer

    def _say(self, hub: str, said: bool | None) -> None:
        self._said[hub] = said
        known = set(self._said.values()) - {None}
        self._answer = known.pop() if len(known) == 1 else None

"""For how long messages had waited on their way: in a sender's queue, in buffers, in a peer that stood still. Whoever
reads them counts that as age (semantics.md, "Time": "Age only grows on its way"). Pure: it compares two clocks that
have nothing to do with each other, and the time is an argument. What is done about a message that has waited for too
long is its receiver's business.

A message tells when it was made, on its sender's clock. How long it took is not to be known from that, as nobody knows
by how much the two clocks differ; but of two messages it tells which took longer, and by how much. So what counts is
how much longer one took than the quickest so far. Two things are added to that:

- What was quick before is forgotten slowly. Two clocks do not run equally fast; what counts as the quickest therefore
  grows by LEAK, which is more than clocks differ, and so nothing adds up. To forget the quickest after a fixed time
  instead would make a line that is slow for longer than that look quick again.
- The first messages have nothing to be compared with, and they are those that may have lain in the buffers of a peer
  that stood still when the call was made. But the sender first heard the receiver after that had begun to speak, and
  tells when, on its own clock. As if a message had been sent at the one moment and had arrived at the other, no message
  can have been quicker than that. This counts for a while; after that, it is the quickest message. Who speaks before it
  has heard the receiver cannot tell: of what it says then nobody knows how old it is."""

from __future__ import annotations

#: Seconds by which the quickest becomes slower in each second: five times what the worst clock is off that is still
#: kept in time.
LEAK = 0.001
#: Seconds for which a call's messages are also held against its opening. What had piled up when the call began is read
#: by then; and not for longer, as what the opening took counts as a wait of every message meanwhile.
OPENING_COUNTS_FOR = 5.0
#: Seconds below which a wait is none: ages travel in whole milliseconds.
LEAST = 0.001


class Waits:
    """The messages of one call, and how long each of them had waited.

    `began`: when this side began to speak, in seconds on its clock: before it opened the call, or, of one that the
    other side has opened, before it told that it serves it."""

    __slots__ = ("_at", "_began", "_is_opened", "_opening", "_opening_until", "_quickest")

    def __init__(self, began: float) -> None:
        self._began = began
        #: whether the sender has told when it first heard this side
        self._is_opened = False
        #: the difference of the clocks of a message that took no time, as far as the opening tells; None: not known,
        #: or over
        self._opening: float | None = None
        self._opening_until = 0.0
        #: that of the quickest message, as it was at a moment
        self._quickest: float | None = None
        self._at = 0.0

    def is_bounded(self, sent_us: int, opened_us: int) -> bool:
        """Whether a message about to be read can be held against the call's opening, as it tells of that or one before
        it has. What an older peer says, which does not tell the time, passes for new."""
        return sent_us <= 0 or opened_us > 0 or self._is_opened

    def waited(self, sent_us: int, opened_us: int, now: float) -> float:
        """For how many seconds a message had waited that is read at `now`, in seconds on this side's clock; 0.0 where
        it does not tell. `sent_us`, `opened_us`: as they stand in it."""
        if sent_us <= 0:
            return 0.0
        lag = now - sent_us / 1e6
        if opened_us > 0 and not self._is_opened:
            self._is_opened = True
            self._opening = self._began - opened_us / 1e6
            self._opening_until = now + OPENING_COUNTS_FOR
        if self._quickest is None:
            self._quickest, self._at = lag, now
        else:
            self._quickest = min(lag, self._quickest + LEAK * max(0.0, now - self._at))
            self._at = max(self._at, now)
        quickest = self._quickest
        if self._opening is not None:
            if now < self._opening_until:
                quickest = min(quickest, self._opening)
            else:
                self._opening = None
        wait = lag - quickest
        return wait if wait >= LEAST else 0.0


def microseconds(seconds: float) -> int:
    """A moment on a sender's clock as it is sent; never 0, which says nothing."""
    return max(1, round(seconds * 1e6))

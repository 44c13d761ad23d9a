"""A server's clock, as far as the Date headers of its answers tell it. Pure: the moments by our own clock are handed
in. Whose answers count is `client.py`'s business, what the offset is used for `source.py`'s."""

from __future__ import annotations

from datetime import UTC
from email.utils import parsedate_to_datetime

#: how far apart two machines' clocks may drift, in seconds per second: the most that Linux adjusts a clock's rate by
DRIFT = 500e-6


class ServerClock:
    """What is known of a server's clock.

    A Date says the second in which the answer was begun, and that was between sending the request and receiving the
    answer; so each answer gives a lowest and a highest possible offset, at best a second apart. All answers' bounds
    hold at once, so the common part of them is what is known, and its middle the best estimate; it soon is much finer
    than a second, as answers come at different parts of one. Old bounds widen as clocks may drift apart. Bounds that
    contradict the older ones mean that a clock was set, or another server answers: then the newest alone count."""

    def __init__(self) -> None:
        self._bounds: tuple[float, float] | None = None
        self._at = 0.0

    @property
    def offset(self) -> float | None:
        """What to add to our clock to get the server's Unix time, in seconds; None before any answer."""
        return None if self._bounds is None else sum(self._bounds) / 2

    def observe(self, date: float, sent: float, received: float) -> None:
        """An answer's Date, in Unix seconds, and our clock before the request was sent and after it was answered."""
        low, high = date - received, date + 1 - sent
        if self._bounds is not None:
            drift = DRIFT * max(received - self._at, 0)
            older_low, older_high = self._bounds[0] - drift, self._bounds[1] + drift
            if older_low <= high and low <= older_high:
                low, high = max(low, older_low), min(high, older_high)
        self._bounds = low, high
        self._at = received


def unix_seconds(date: str | None) -> float | None:
    """An HTTP date in Unix seconds, or None where it is none."""
    if date is None:
        return None
    try:
        moment = parsedate_to_datetime(date)
        # HTTP's dates are all UTC, also where they do not say so
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None

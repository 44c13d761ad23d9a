"""Building blocks for the options of plugins: a length of time as it stands in a configuration file, and what it comes
to in seconds. The keys of the configuration itself, with their bounds and defaults, are `config.py`."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

import msgspec

#: seconds in each unit that a duration may have
UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")

#: The type of an option that is a length of time, written like all others in the file: "200ms", "1.5s", "1m", "0s".
#: msgspec checks it; anything else is told with its key path. It stays a text, and `seconds()` gives its value. At most
#: nine digits stand before and after the point, so that the value is always finite.
Duration: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A[0-9]{1,9}(\.[0-9]{1,9})?(ms|s|m|h)\Z", description='a duration in ms, s, m or h, such as "5s"'
    ),
]


def seconds(duration: str) -> float:
    """A duration such as "200ms" in seconds, 0.2.

    Raises ValueError, with a line that shows the text and says what to write, for a text that is no duration."""
    match = _WRITTEN.fullmatch(duration)
    if match is None:
        shown = repr(duration if len(duration) <= 60 else duration[:60] + "…")
        raise ValueError(
            f'{shown} is not a duration; write a number and one of the units ms, s, m, h, for instance "5s"'
        )
    return float(match[1]) * UNITS[match[2]]

"""Keeps what is in this process's memory, secrets among it, from being written to a disk when it crashes. Asked of the
operating system once, at the start of `run`; nothing here decides what is a secret."""

from __future__ import annotations

import ctypes
import resource
import sys

#: prctl's name for it, from Linux's <sys/prctl.h>.
_PR_SET_DUMPABLE = 4


def forbid_core_dumps() -> None:
    """From now on this process, and what it starts, leaves no core dump; and on Linux other processes of the same user
    cannot read its memory or its environment either.

    The limit alone would not do: where the kernel hands core dumps to a program, as most distributions do, it does not
    count. A debugger, or a profiler from outside, needs root then."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    # The hard limit is left as it is: to lower it could not be taken back, and dumps follow the soft one.
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)

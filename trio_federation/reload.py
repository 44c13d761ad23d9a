"""Values made from files, and made again when the files change: contexts for TLS, secrets, the deny list. What has
changed is told by the bytes of the files, never by their times: Kubernetes swaps symlinks, editors put another file in
the place, and network filesystems are not exact about times. What a value means, and what follows when there is
another, is each room's own business; when a certificate runs out is `certificates.py`'s."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

import structlog
import trio

from trio_federation.config import LARGEST_FILE
from trio_federation.errors import ConfigurationError

log = structlog.get_logger("trio_federation.reload")

T = TypeVar("T")

#: Seconds between two looks at the files.
REREAD_INTERVAL = 2.0
#: Seconds that one look may take, the making of a new value included.
READ_DEADLINE = 10.0
#: Distinct faults of one value that are remembered as told; with more of them, the oldest would be told again.
_MOST_TOLD = 16

#: How an attempt to make a value anew has ended.
Outcome: TypeAlias = Literal["ok", "failed"]

#: The state of some files: of each, in their order, a digest of its bytes, or in words why it has none.
State: TypeAlias = tuple[str, ...]


class _Nothing(NamedTuple):
    """The files are as they were when the value was made."""


class _Made(NamedTuple, Generic[T]):
    """A new value."""

    value: T
    #: what it was made from; None where the files have changed meanwhile, so that nobody knows
    made_from: State | None


class _Failed(NamedTuple):
    """No value can be made."""

    error: str
    #: of what; None where the files have changed meanwhile
    state: State | None


class FileBacked(Generic[T]):
    """A value made from files, and made again when they change.

    `doubts`: told the value that counts and the one that would replace it; where it answers True, that one counts only
    when the next look has found the same bytes, as files are also emptied before they are written.
    `what`: names it in log and metrics, for instance "hub.tls". `make`: reads the files and makes the value; raises
    ValueError or ConfigurationError, with texts that can be shown, or an OSError, where they cannot be used. It is
    called here at once, where what it raises comes out, and later in a thread. `changed`: told of each new value after
    it has taken the place of the old one, on the loop that calls `reread`. `in_thread`: False where files are to be
    read on the loop: in simulations, whose time does not wait for threads.

    May be made outside of Trio."""

    def __init__(
        self,
        what: str,
        files: Sequence[str],
        make: Callable[[], T],
        *,
        changed: Callable[[T], None] | None = None,
        doubts: Callable[[T, T], bool] = lambda _old, _new: False,
        in_thread: bool = True,
    ) -> None:
        self.what = what
        self.files = tuple(files)
        self._make = make
        self._changed = changed
        self._doubts = doubts
        #: the state of the files whose value was in doubt at the last look
        self._doubted: State | None = None
        self._in_thread = in_thread
        before = _state_of(self.files)
        self._value = make()
        self._made_from = before if _state_of(self.files) == before else None
        self._generation = 0
        #: the state of the files with which it has failed last; None where it has not, or nobody knows
        self._failing: State | None = None
        #: the faults that were told since it worked last, in the order of their coming
        self._told: dict[str, None] = {}
        self._one_at_a_time = trio.Lock()
        # One thread and no more: one that hangs in a dead filesystem is waited for, not joined by others.
        self._limiter = trio.CapacityLimiter(1)

    @property
    def value(self) -> T:
        """The newest value that could be made."""
        return self._value

    @property
    def generation(self) -> int:
        """How many times it has been replaced by a new one."""
        return self._generation

    async def reread(self) -> Outcome | None:
        """Look at the files, and make the value anew where they have changed. Returns None where there is nothing to be
        said: they have not, or it has failed for the first time, as it does while files are replaced one by one. Where
        it has failed, the old value is kept, and it is tried again at the next call."""
        async with self._one_at_a_time:
            if not self._in_thread:
                return self._note(self._look(self._made_from))
            found: _Nothing | _Made[T] | _Failed | None = None
            if self._limiter.available_tokens:  # else an earlier look has not come back yet
                with trio.move_on_after(READ_DEADLINE):
                    found = await trio.to_thread.run_sync(
                        self._look, self._made_from, abandon_on_cancel=True, limiter=self._limiter
                    )
            if found is None:
                found = _Failed(f"{', '.join(self.files)}: cannot be read within {READ_DEADLINE:g} s", ())
            return self._note(found)

    def _look(self, made_from: State | None) -> _Nothing | _Made[T] | _Failed:
        """What is in the files now. Runs in the thread, and touches nothing that the loop does."""
        before = _state_of(self.files)
        if before == made_from:
            return _Nothing()
        try:
            # To open a pipe waits for somebody to write to it.
            if special := [file for file, each in zip(self.files, before, strict=True) if each == _SPECIAL]:
                raise ConfigurationError([f"{special[0]} is not a file; put one in its place"])
            value = self._make()
        except (ValueError, OSError, ConfigurationError) as error:
            return _Failed(_text_of(error), before if _state_of(self.files) == before else None)
        return _Made(value, before if _state_of(self.files) == before else None)

    def _note(self, found: _Nothing | _Made[T] | _Failed) -> Outcome | None:
        doubted, self._doubted = self._doubted, None
        if isinstance(found, _Failed):
            return self._note_failure(found)
        if isinstance(found, _Made) and self._is_in_doubt(found, doubted):
            self._doubted = found.made_from
            return None
        told = bool(self._told)
        self._told.clear()
        self._failing = None
        if isinstance(found, _Nothing):
            if not told:
                return None
            # What it was made from is there again, so the trouble is over.
        else:
            self._value, self._made_from = found
            self._generation += 1
        log.info("reloaded", what=self.what)
        if isinstance(found, _Made) and self._changed is not None:
            self._changed(found.value)
        return "ok"

    def _is_in_doubt(self, found: _Made[T], doubted: State | None) -> bool:
        seen_twice = found.made_from is not None and found.made_from == doubted
        return not seen_twice and self._doubts(self._value, found.value)

    def _note_failure(self, failed: _Failed) -> Outcome | None:
        again = failed.state is not None and failed.state == self._failing
        self._failing = failed.state
        if not again:
            return None
        if failed.error not in self._told:
            while len(self._told) >= _MOST_TOLD:
                del self._told[next(iter(self._told))]
            self._told[failed.error] = None
            log.warning("reload_failed", what=self.what, error=failed.error)
        return "failed"


async def keep_fresh(
    items: Sequence[FileBacked[Any]],
    *,
    reloaded: Callable[[str, Outcome], None],
    interval: float = REREAD_INTERVAL,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Reread these every `interval` seconds, each by itself, until cancelled. `reloaded`: told (what, "ok") of each new
    value, and (what, "failed") of every look at which there is none although the files have changed, except the first
    one."""

    async def keep(item: FileBacked[Any]) -> NoReturn:
        while True:
            await trio.sleep(interval)
            outcome = await item.reread()
            if outcome is not None:
                reloaded(item.what, outcome)

    async with trio.open_nursery() as nursery:
        for item in items:
            nursery.start_soon(keep, item)
        task_status.started()
        await trio.sleep_forever()


_MISSING = "missing"
_SPECIAL = "not a file"


def _state_of(files: Sequence[str]) -> State:
    return tuple(_state(file) for file in files)


def _state(file: str) -> str:
    """A digest of the bytes of a file, of which no more than the largest file that is ever used are read; or why there
    are none."""
    try:
        # Without waiting, where it is a pipe or a device.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return _SPECIAL
            data = opened.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        return _MISSING
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "unreadable")
    return hashlib.sha256(data).hexdigest()


def _text_of(error: ValueError | OSError | ConfigurationError) -> str:
    """A fault in one line. What is written to be shown is shown as it is; other errors may quote what they have met,
    which may be a part of a secret."""
    if isinstance(error, UnicodeError):
        return "a file is not text in UTF-8"
    if isinstance(error, OSError):
        return f"cannot read: {(error.strerror or type(error).__name__).lower()}"
    return "; ".join(str(error).splitlines())

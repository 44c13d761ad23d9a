"""How the conformance suite looks at a source while it works: calls in tasks of their own that can be cancelled at any
of their steps, and a watch over every step of them and of the tasks that they start. What a source must do is not
decided here: that is `conformance.py`.

Three things are made visible that no test of results sees:

- what became of a cancellation: whether Cancelled was raised inside of the call, and whether it came out again;
- calls that block the loop, and reads of the wall clock or of the global random state. They are seen by Python's own
  profiling hook, which is set only while a step of the source runs, and only if nobody else uses it. So nothing is
  patched, and nothing that other tasks do is taken for the source's;
- a step that does not end. A thread interrupts it as Ctrl-C would, so that a test fails instead of hanging.

Worker threads and simulated time do not go together by themselves: a MockClock jumps as soon as every task waits, also
for a thread. So while a worker thread of Trio is at work, simulated time stands still here."""

from __future__ import annotations

import datetime
import inspect
import math
import os
import random
import reprlib
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from enum import StrEnum
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

import trio
from trio.testing import MockClock

from trio_federation.plugins import is_plugins_own

T = TypeVar("T")

#: Seconds of real time that one step of a source may hold the loop, and that simulated time waits for a thread.
STEP_LIMIT = 5.0
#: Seconds between two looks of the thread that watches.
LOOK_INTERVAL = 0.05
#: Cancellations raised in one call, after which it is given up: one that loops over them never ends.
MOST_DELIVERIES = 100
#: By this a cancellation is known for one of ours.
REASON = "trio_federation.testing cancels this call to see what becomes of it"


class Kind(StrEnum):
    """What can be seen of a step."""

    BLOCKING = "blocking"
    CLOCK = "clock"
    RANDOM = "random"


class Sighting(NamedTuple):
    """Something that a source did in one of its steps."""

    kind: Kind
    #: what it was, and where: "collect() calls time.sleep(), in my_source, line 12"
    text: str


class Interrupted(Exception):
    """A call outside of any task was interrupted, as it held the loop for too long."""


class NotAwaitable(Exception):
    """What was to be a coroutine function has returned something that cannot be awaited; the text shows it."""


class _Abandoned(Exception):
    """A call was given up: it swallowed every cancellation."""


class Call:
    """One call of a source's coroutine function, under way or ended.

    `owner`: the source. `cancel_at`: it is cancelled when it has given way so many times; None: never, 0: before it
    begins."""

    def __init__(self, owner: object, what: str, cancel_at: int | None = None) -> None:
        self.owner = owner
        #: how messages name it: "collect()"
        self.what = what
        self.cancel_at = cancel_at
        #: how many times it, or a task that it started, has given way
        self.steps = 0
        #: how many times our cancellation was raised inside of it
        self.deliveries = 0
        #: set once it has returned or raised
        self.ended = trio.Event()
        #: what it returned
        self.value: Any = None
        #: what it raised, other than Cancelled
        self.error: BaseException | None = None
        #: whether Cancelled came out of it
        self.let_through = False
        #: whether it was cancelled because it took too long
        self.late = False
        #: whether it did not end in time when it was cancelled
        self.stuck = False
        self._scope = trio.CancelScope()
        #: set once it has ended or was cancelled
        self.moved = trio.Event()

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled, in the end or on the way."""
        return self._scope.cancel_called

    def cancel(self) -> None:
        """Cancel it."""
        self._scope.cancel(REASON)
        self.moved.set()

    @property
    def swallowed(self) -> bool:
        """Whether a cancellation was raised in it and did not come out."""
        return self.deliveries > 0 and not self.let_through and self.error is None


class Watch(trio.abc.Instrument):
    """Watches the calls of one source, or of several of one kind; `async with` puts it to work.

    `prompt`: seconds that a cancelled call may take to end."""

    def __init__(self, *, prompt: float) -> None:
        self.prompt = prompt
        #: what has been seen, in its order
        self.sightings: list[Sighting] = []
        #: whether the profiling hook could be used
        self.profiles = sys.getprofile() is None
        #: top-level packages whose own reads of clocks and random numbers count
        self.packages: set[str] = set()
        self._calls: dict[trio.lowlevel.Task, Call] = {}
        self._roots: set[trio.lowlevel.Task] = set()
        #: what is running now, and since when, for the thread that watches
        self._step: tuple[str, float] | None = None
        self._stepping: trio.lowlevel.Task | None = None
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._interrupted = False
        self._over = threading.Event()
        # Simulated time.
        clock = trio.lowlevel.current_clock()
        self._jumping = clock if isinstance(clock, MockClock) and clock.autojump_threshold < math.inf else None
        self._threshold = self._jumping.autojump_threshold if self._jumping is not None else math.inf
        self._limiter = trio.to_thread.current_default_thread_limiter()
        self._held_since: float | None = None
        self._token = trio.lowlevel.current_trio_token()

    async def __aenter__(self) -> Watch:
        trio.lowlevel.add_instrument(self)
        threading.Thread(target=self._look, name="trio_federation.testing", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        trio.lowlevel.remove_instrument(self)
        self._let_time_go()

    @property
    def interrupted(self) -> bool:
        """Whether a call had to be interrupted because it held the loop."""
        return self._interrupted

    # Calls.

    def now(self, what: str, function: Callable[[], T]) -> T:
        """Call a synchronous function of the source, here and now.

        Raises what it raises, and Interrupted where it held the loop for too long."""
        self._begin(what)
        try:
            return function()
        except KeyboardInterrupt:
            if not self._interrupted:
                raise
            raise Interrupted from None
        finally:
            self._end()

    def begin(
        self,
        nursery: trio.Nursery,
        owner: object,
        what: str,
        function: Callable[[], Awaitable[Any]],
        *,
        cancel_at: int | None = None,
    ) -> Call:
        """Begin a call of a coroutine function in a task of its own."""
        call = Call(owner, what, cancel_at)
        if cancel_at == 0:
            call.cancel()
        nursery.start_soon(self._conduct, call, function, name=f"{what} under test")
        return call

    async def wait(self, call: Call, within: float) -> None:
        """Wait until a call has ended. It is cancelled after so many seconds."""
        with trio.move_on_after(within):
            await call.moved.wait()
        if not call.moved.is_set():
            call.late = True
            call.cancel()
        await self._wait_for_end(call)

    async def stop(self, call: Call, *, closing: float = 0.0) -> None:
        """Cancel a call and wait for its end, also while this task is being cancelled. `closing`: seconds that it may
        take for that more than others."""
        call.cancel()
        await self._wait_for_end(call, closing)

    async def _wait_for_end(self, call: Call, closing: float = 0.0) -> None:
        with trio.move_on_after(self.prompt + closing, shield=True):
            await call.ended.wait()
        if not call.ended.is_set():
            call.stuck = True
            while not call.ended.is_set():  # it may put up new shields as fast as they are taken away
                _unshield(call._scope)
                with trio.move_on_after(LOOK_INTERVAL, shield=True):
                    await call.ended.wait()

    async def _conduct(self, call: Call, function: Callable[[], Awaitable[Any]]) -> None:
        task = trio.lowlevel.current_task()
        try:
            with call._scope as scope:
                self._calls[task] = call
                self._roots.add(task)
                self._stepping = task
                self._begin(call.what)
                try:
                    call.value = await _driven(_awaited(function), call)
                finally:
                    self._end()
                    self._roots.discard(task)
                    self._calls.pop(task, None)
            call.let_through = scope.cancelled_caught
        except _Abandoned:
            pass
        except BaseException as error:
            if not is_plugins_own(error) and not (self._interrupted and _is_interrupt(error)):
                raise
            # Of a call that was given up, what comes after are only the pieces.
            call.error = error if call.deliveries <= MOST_DELIVERIES else None
        finally:
            call.ended.set()
            call.moved.set()

    def leftovers(self, owner: object) -> list[str]:
        """The names of the tasks that a source has started and that have not ended."""
        tasks = [task for task, call in self._calls.items() if call.owner is owner and task not in self._roots]
        return sorted(task.name for task in tasks)

    # trio.abc.Instrument

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        """A task of the source's is one that its tasks have started, whatever nursery it is in."""
        nursery = task.parent_nursery
        call = self._calls.get(nursery.parent_task) if nursery is not None else None
        if call is None and self._stepping is not None:
            call = self._calls.get(self._stepping)
        if call is not None:
            self._calls[task] = call

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        """It is not watched any more."""
        self._calls.pop(task, None)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """A step of a task of the source's is watched."""
        call = self._calls.get(task)
        if call is not None:
            self._stepping = task
            self._begin(call.what)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Its call may have to be cancelled now."""
        if self._stepping is task:
            self._stepping = None
            self._end()
        call = self._calls.get(task)
        if call is not None:
            call.steps += 1
            if call.steps == call.cancel_at:
                call.cancel()
        self._hold_time()

    # Simulated time.

    def _hold_time(self) -> None:
        if self._jumping is None:
            return
        busy = self._limiter.borrowed_tokens > 0
        if busy and self._held_since is None:
            self._held_since = time.perf_counter()
            self._jumping.autojump_threshold = math.inf
        elif not busy and self._held_since is not None:
            self._let_time_go()
            self._held_since = None

    def _let_time_go(self) -> None:
        if self._jumping is not None and self._held_since is not None:
            self._jumping.autojump_threshold = self._threshold

    # Steps.

    def _begin(self, what: str) -> None:
        self._step = (what, time.perf_counter())
        if self.profiles:
            sys.setprofile(self._profile)

    def _end(self) -> None:
        if self.profiles:
            sys.setprofile(None)
        with self._lock:
            self._step = None

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """What Python calls before and after every call of a function, in this thread and during a step."""
        if event == "c_call":
            self._saw_builtin(frame, argument)
        elif event == "call":
            caller = frame.f_back
            if frame.f_code in _BLOCKING_CODE:
                self._saw(Kind.BLOCKING, f"subprocess.{frame.f_code.co_name}()", caller)
            elif (
                self._is_own(caller)
                and frame.f_globals.get("__name__") == "random"
                and frame.f_locals.get("self") is _GLOBAL_RANDOM
            ):
                self._saw(Kind.RANDOM, f"random.{frame.f_code.co_name}()", caller)

    def _saw_builtin(self, frame: FrameType, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if owner is time and name == "sleep":
            self._saw(Kind.BLOCKING, "time.sleep()", frame)
        elif isinstance(owner, socket.socket):
            if name in _SOCKET_CALLS and owner.gettimeout() != 0.0:
                self._saw(Kind.BLOCKING, f"{name}() of a blocking socket", frame)
        elif not self._is_own(frame):
            pass
        elif owner is _GLOBAL_RANDOM:
            self._saw(Kind.RANDOM, f"random.{name}()", frame)
        elif owner is time and name in _CLOCKS:
            self._saw(Kind.CLOCK, f"time.{name}()", frame)
        elif isinstance(owner, type) and issubclass(owner, datetime.date) and name in _DATES:
            self._saw(Kind.CLOCK, f"{owner.__name__}.{name}()", frame)

    def _is_own(self, frame: FrameType | None) -> bool:
        return frame is not None and _module(frame).partition(".")[0] in self.packages

    def _saw(self, kind: Kind, name: str, frame: FrameType | None) -> None:
        what = self._step[0] if self._step is not None else "the source"
        self.sightings.append(Sighting(kind, f"{what} calls {name}, in {_place(frame)}"))

    # The thread that watches.

    def _look(self) -> None:
        while not self._over.wait(LOOK_INTERVAL):
            with self._lock:
                if self._step is not None and time.perf_counter() - self._step[1] > STEP_LIMIT:
                    self._blocked(self._step[0])
                    return
            held = self._held_since
            if held is not None and time.perf_counter() - held > STEP_LIMIT:
                # A thread that hangs must not keep deadlines from passing.
                try:
                    self._token.run_sync_soon(self._let_time_go)
                except trio.RunFinishedError:
                    return

    def _blocked(self, what: str) -> None:
        frame = sys._current_frames().get(self._thread)
        text = f"{what} holds the loop for more than {STEP_LIMIT:g} s, in {_place(self._innermost_own(frame))}"
        self.sightings.append(Sighting(Kind.BLOCKING, text))
        if self._thread == threading.main_thread().ident and _interrupts(signal.getsignal(signal.SIGINT)):
            self._interrupted = True
            signal.pthread_kill(self._thread, signal.SIGINT)
        else:  # nothing reaches into another thread, so this is all that can be done
            os.write(2, f"trio_federation.testing: {text}; this test goes on when that ends\n".encode())

    def _innermost_own(self, frame: FrameType | None) -> FrameType | None:
        found = frame
        while found is not None and not self._is_own(found):
            found = found.f_back
        return found if found is not None else frame


# What is looked for.

# Names rather than functions, for what must not be called here.
_GLOBAL_RANDOM = random.seed.__self__  # type: ignore[attr-defined]
_CLOCKS = frozenset({"time", "time_ns", "monotonic", "monotonic_ns"})
_DATES = frozenset({"now", "utcnow", "today"})
_SOCKET_CALLS = frozenset(
    {"accept", "connect", "connect_ex", "recv", "recv_into", "recvfrom", "recvmsg", "send", "sendall", "sendto"}
)
_BLOCKING_CODE = frozenset({subprocess.run.__code__, subprocess.call.__code__, subprocess.Popen.communicate.__code__})

#: Calls that ignored even GeneratorExit. Kept, since what is collected is closed again, and complains again.
_never_ending: list[Any] = []


@types.coroutine
def _driven(coroutine: Coroutine[Any, Any, T], call: Call) -> Generator[Any, Any, T]:
    """Await a coroutine, seeing what Trio sends into it. What it sends is an outcome, whose `error` is raised at the
    place that waits."""
    step: Callable[[Any], Any] = coroutine.send
    sent: Any = None
    while True:
        try:
            message = step(sent)
        except StopIteration as stop:
            value: T = stop.value
            return value
        step = coroutine.send
        try:
            sent = yield message
        except BaseException as error:  # thrown where a coroutine has yielded what Trio does not know, as asyncio's do
            step, sent = coroutine.throw, error
            continue
        raised = getattr(sent, "error", None)
        if isinstance(raised, trio.Cancelled) and raised.reason == REASON:
            call.deliveries += 1
            if call.deliveries > MOST_DELIVERIES:
                _give_up(coroutine)
                raise _Abandoned


async def _awaited(function: Callable[[], Awaitable[T]]) -> T:
    awaitable = function()
    if not inspect.isawaitable(awaitable):
        raise NotAwaitable(shown(awaitable))
    return await awaitable


def _give_up(coroutine: Coroutine[Any, Any, Any]) -> None:
    chain: list[Any] = [coroutine]
    while (inner := getattr(chain[-1], "cr_await", None)) is not None:
        chain.append(inner)
    try:
        coroutine.close()
    except RuntimeError:
        _never_ending.extend(chain)


def _unshield(scope: trio.CancelScope) -> None:
    """Take away every shield inside of a scope, so that its cancellation arrives everywhere. There is no public way; it
    is done only to a call that would not end otherwise, and has failed the test by that."""
    statuses = [scope._cancel_status]
    while statuses:
        status = statuses.pop()
        if status is not None:
            status._scope.shield = False
            statuses += status.children


def _is_interrupt(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_interrupt(each) for each in error.exceptions)
    return isinstance(error, KeyboardInterrupt)


def _interrupts(handler: object) -> bool:
    """Whether a handler of SIGINT raises KeyboardInterrupt in what is running: Python's own, or Trio's."""
    return handler is signal.default_int_handler or getattr(handler, "__module__", "").partition(".")[0] == "trio"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _place(frame: FrameType | None) -> str:
    return f"{_module(frame)}, line {frame.f_lineno}" if frame is not None else "an unknown place"


def packages_of(objects: Iterable[object]) -> set[str]:
    """The top-level packages in which the classes of objects, and what they inherit from, are written; without those
    that are the contract's and Python's own."""
    found = {base.__module__.partition(".")[0] for each in objects for base in type(each).__mro__ if base is not object}
    return found - {"abc", "builtins", "typing", "trio_federation"}


def shown(value: object) -> str:
    """A value for a message: short, in one line, without an address, and safe where its own repr raises."""
    if value is None or isinstance(value, bool | int | float | str | bytes | list | tuple | dict | set):
        return " ".join(reprlib.repr(value).split())
    return f"an object of type {type(value).__name__}"

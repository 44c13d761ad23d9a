"""Keeps one hub told what this cluster has: everything at once when a report call opens, then changes as they happen,
and everything again every resync interval; at the end, that all of it is withdrawn. What is true is `local.py`'s
business, when to connect `link.py`'s.

A hub of ours accepts a call at once, and takes nothing before it was told when we heard that (`waits.py`); one that
does not count the time accepts nothing before the end. Which of them it is nobody knows at first. So a call's hub is
given a moment to accept; then it is told everything, and once more when it does accept after all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import trio

from trio_federation.capacity import Change
from trio_federation.clock import Clock
from trio_federation.config import Federation
from trio_federation.errors import Unavailable
from trio_federation.local import LocalTruth
from trio_federation.outbox import Outbox
from trio_federation.pb.sandbox.sync.v1 import ReportFederationRequest
from trio_federation.rpc import ReportCall
from trio_federation.waits import microseconds
from trio_federation.wire import AT_ONCE, report_messages

#: Seconds for which changes are gathered before they are sent.
DEBOUNCE = 0.2
#: Seconds that a hub is given to accept a call before it is told anything.
TO_ACCEPT = 0.2


def _ignore(_records: int) -> None:
    pass


class Reporter:
    """One hub's share of the reporting. It outlives calls, and holds what is still to be said to this hub: no more than
    the newest change of each identity, however long the hub takes."""

    def __init__(self, truth: LocalTruth, clock: Clock, settings: Federation) -> None:
        self._truth = truth
        self._clock = clock
        self._settings = settings
        self._outbox = Outbox()
        self._something = trio.Event()
        self._sent: Callable[[int], None] = _ignore
        #: from when on the messages' own times count
        self._began = clock()
        #: whether the hub was told, on the open call, when we heard it first
        self._told_opening = False
        self._patience = trio.CancelScope()
        #: whether there is only one thing left to say: that everything is withdrawn
        self.stopping = False
        #: whether a report call is open
        self.reporting = False
        #: whether this hub was ever told anything
        self.has_reported = False

    def offer(self, changes: Iterable[Change]) -> None:
        """Changes that this hub is to be told soon. Without an open call they are dropped: the next one starts with
        everything."""
        if self.reporting and not self.stopping:
            self._outbox.offer(changes)
            if self._outbox:
                self._something.set()

    def accepted(self) -> None:
        """The hub has told that it takes the open call."""
        self._something.set()

    def stop(self) -> None:
        """From now on there is only one thing left to say, and after that `report` returns."""
        self.stopping = True
        self._something.set()
        self._patience.cancel()

    @property
    def waiting(self) -> int:
        """Changes that wait to be sent."""
        return len(self._outbox)

    @property
    def conflated(self) -> int:
        """Changes that a newer one has replaced while they waited, since the start."""
        return self._outbox.conflated

    async def report(self, call: ReportCall, sent: Callable[[int], None] = _ignore) -> None:
        """Use an open call until the agent stops; then the call is ended, and the hub's answer is still to come. `sent`
        is told of the number of records in each message that the hub has taken.

        Raises an RpcError when the call fails."""
        self.reporting = True
        self._told_opening = False
        self._sent = sent
        try:
            await self._wait_accepted(call)
            said_something = False
            resync_at = trio.current_time()
            while not self.stopping:
                # What was told before the hub had accepted counts for nothing with one that looks at the time.
                opens = not said_something or (call.accepted_at is not None and not self._told_opening)
                if opens or trio.current_time() >= resync_at:
                    if opens:
                        await self._open(call)
                        said_something = True
                    self._outbox.clear()
                    await self._send(call, self._truth.everything(self._clock()))
                    # The first resync comes early. Where this process takes over from one that started together with
                    # it, the hub is right not to believe what was observed before that one's withdrawal; what the
                    # sources say after the takeover has to follow soon.
                    soon = self._settings.report_interval + DEBOUNCE if opens else math.inf
                    resync_at = trio.current_time() + min(soon, self._settings.resync_interval)
                elif self._outbox:
                    await trio.sleep(DEBOUNCE)
                    await self._send(call, self._outbox.take(AT_ONCE))
                else:
                    self._something = trio.Event()
                    with trio.move_on_at(resync_at):
                        await self._something.wait()
            if not self._told_opening and call.accepted_at is not None:
                await self._open(call)
            # To a hub that has not accepted this is not told again, and has to count, however late it comes.
            await self._send(call, self._truth.withdrawn(self._clock()), timed=self._told_opening)
            await call.end()
        finally:
            self.reporting = False

    async def _wait_accepted(self, call: ReportCall) -> None:
        """Wait for the hub's first word on a call: what is told to a process that stands still, or to a proxy before
        one, would be old when it goes on. An older hub says nothing before the end, and must not wait for long."""
        if not self.stopping:
            with trio.move_on_after(TO_ACCEPT) as self._patience:
                await call.accepted.wait()

    async def _open(self, call: ReportCall) -> None:
        """Say nothing: a hub gives a call only so long for its first message, and finds out by it how quick one is. And
        say when we heard the hub first, if we have."""
        message, now = ReportFederationRequest(), self._clock()
        message.sent_us = microseconds(now - self._began)
        if call.accepted_at is not None:
            message.opened_us = microseconds(now - (trio.current_time() - call.accepted_at) - self._began)
            self._told_opening = True
        await self._send_message(call, message)

    async def _send(self, call: ReportCall, changes: Sequence[Change], *, timed: bool = True) -> None:
        """`timed`: whether the hub is to find out for how long each message has waited."""
        for start in range(0, len(changes), AT_ONCE):
            now = self._clock()
            for message in report_messages(changes[start : start + AT_ONCE], now):
                if timed:
                    message.sent_us = microseconds(now - self._began)
                await self._send_message(call, message)
                self.has_reported = True
                if timed and call.accepted_at is not None and not self._told_opening:
                    return  # the hub takes nothing of this, and is told everything again next
                self._sent(len(message.items))

    async def _send_message(self, call: ReportCall, message: ReportFederationRequest) -> None:
        with trio.move_on_after(self._settings.silence_limit) as scope:
            await call.send(message)
        if scope.cancelled_caught:
            raise Unavailable(f"took no message for {self._settings.silence_limit:g} s", peer=call.peer)

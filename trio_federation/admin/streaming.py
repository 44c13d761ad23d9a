"""Answers that are made piece by piece, so that a long one neither fills the memory nor holds up the loop; and what is
told of an answer that keeps failing. What the pieces say is their makers' business."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

import structlog
import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

log = structlog.get_logger("trio_federation.admin")

#: Makes the pieces of one answer.
Pieces: TypeAlias = Callable[[], AsyncIterator[bytes]]


class Trouble:
    """Tells of a failure when it begins or changes, and of its end: not at every request, for probes and scrapers come
    every few seconds, for as long as it lasts."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = ""

    def failed(self, error: Exception) -> None:
        """Say that the answer could not be given."""
        if self._told != repr(error):
            self._told = repr(error)
            log.error("answer_failed", what=self._what, error=self._told, exc_info=error)

    def works(self) -> None:
        """Say that the answer was given."""
        if self._told:
            self._told = ""
            log.info("answer_works", what=self._what)


class StreamedResponse(Response):
    """An answer in pieces.

    `pieces` is called, and its first piece awaited, before anything is sent: where that raises, the client gets
    `instead`. Where a later piece raises, the connection ends without the end of the answer, which every client can
    tell from a whole one. The iterator is closed in any case, also where the client has gone or is too slow. After
    every piece, other tasks have their turn. A HEAD gets the headers, for the price of the first piece."""

    def __init__(self, pieces: Pieces, *, media_type: str, trouble: Trouble, instead: Response) -> None:
        self._pieces = pieces
        self._trouble = trouble
        self._instead = instead
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: AsyncIterator[bytes] | None = None
        try:
            failed, first = False, None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
                try:
                    pieces = self._pieces()
                    first = await anext(pieces, b"")
                except Exception as error:
                    self._trouble.failed(error)
                    failed = True
                nursery.cancel_scope.cancel()
            if failed:
                await self._instead(scope, receive, send)
            if first is None or pieces is None:  # failed, or the client has gone
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b""})
                return
            complete = False
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
                complete = await self._send(first, pieces, send)
                nursery.cancel_scope.cancel()
            # Only now: the server says that the client is gone as soon as the answer ends, and has more to do then.
            if complete:
                await send({"type": "http.response.body", "body": b""})
                self._trouble.works()
        finally:
            await _close(pieces)

    async def _send(self, first: bytes, rest: AsyncIterator[bytes], send: Send) -> bool:
        """Send all pieces; whether that is the whole answer."""
        piece: bytes | None = first
        while piece is not None:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await trio.lowlevel.checkpoint()
            try:
                piece = await anext(rest, None)
            except Exception as error:
                self._trouble.failed(error)
                return False
        return True


async def _cancel_when_gone(receive: Receive, answer: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel()


async def _close(pieces: AsyncIterator[bytes] | None) -> None:
    """Let a generator end its own `with` and `finally` here and now, and not whenever it is collected as garbage."""
    close: Callable[[], Awaitable[None]] | None = getattr(pieces, "aclose", None)
    if close is not None:
        await close()

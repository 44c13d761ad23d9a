"""Slow and hostile peers of a hub on raw sockets, in a process of their own, for `faults.py`.

Told {"attack", "seconds"}, it does that for so long, and answers with what came of it: connections that it made, how
many of them the hub has ended, and with which codes of HTTP/2's GOAWAY. Told {"stall"}, it keeps one watcher that never
reads for good, with a new connection whenever the hub has ended the last one, and says only that it has begun.

Everybody here knows the secret, so that it is not for that that they are refused."""

from __future__ import annotations

import argparse
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any

import hpack
import trio
from h2.errors import ErrorCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from benchmarks.children import listen, say
from benchmarks.messages import SERVICE, ReportFederationRequest, WatchFederationRequest, metadata

#: Seconds between two connections of those that are cut.
PAUSE = 0.1
#: Watchers that read too little, at a time.
SLOW = 5
#: Frames that one connection of a flood sends at once.
FLOOD = 5_000
#: Messages of one connection of a reporter that goes beyond its limits, at once.
MESSAGES = 300
#: Records of a message that is as large as a hub takes.
MOST_RECORDS = 100_000
#: Seconds for which a flood waits to be cut.
_PATIENCE = 1.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WIDE = 2**31 - 1
#: Bytes of a message that is sent in pieces.
_PIECE = 16 * 1024

_numbers = count()


def _settings(window: int | None = None) -> bytes:
    settings = {} if window is None else {SettingsFrame.INITIAL_WINDOW_SIZE: window}
    more = b"" if window is None else WindowUpdateFrame(0, window_increment=window - 65_535).serialize()
    return _PREFACE + SettingsFrame(0, settings=settings).serialize() + more


def _request(method: str, cluster_id: str) -> bytes:
    """The headers of a call. The same at any place of a connection: nothing of them goes into a table."""
    number = next(_numbers)
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{SERVICE}/{method}"),
        (":authority", "hub"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *metadata(cluster_id, f"{number + 1_000_000:032x}"),
    ]
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode(fields))


def _call(stream: int, method: str, cluster_id: str) -> bytes:
    return HeadersFrame(stream, data=_request(method, cluster_id), flags=["END_HEADERS"]).serialize()


def _payload(message: Any) -> bytes:
    payload: bytes = message.SerializeToString()
    return b"\0" + len(payload).to_bytes(4, "big") + payload


def _data(stream: int, message: Any, *, end: bool = False) -> bytes:
    """A small message, which a hub takes at once."""
    return DataFrame(stream, data=_payload(message), flags=["END_STREAM"] if end else []).serialize()


def _watch(cluster_id: str, window: int | None) -> bytes:
    return (
        _settings(window)
        + _call(1, "WatchFederation", cluster_id)
        + _data(1, WatchFederationRequest(spare_own_cluster=True), end=True)
    )


class _Connection:
    """One connection, and what the hub has said about its end."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.codes: list[str] = []
        #: whether the hub has ended it
        self.ended = False
        #: bytes that the hub takes now: on each stream, here the first, and on all of it
        self._stream_window = self._window = 65_535
        self._hub_stream_window = 65_535
        self._wider = trio.Event()
        self._buffer = bytearray()

    async def send(self, data: bytes) -> None:
        """Send; nothing, once the hub has ended it."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self.stream.send_all(data)

    async def hear(self) -> None:
        """Read until the hub ends it."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await self.stream.receive_some(64 * 1024):
                self._buffer += data
                self._take()
        self.ended = True

    def _take(self) -> None:
        while len(self._buffer) >= 9:
            frame, length = Frame.parse_frame_header(memoryview(bytes(self._buffer[:9])))
            if len(self._buffer) < 9 + length:
                return
            frame.parse_body(memoryview(bytes(self._buffer[9 : 9 + length])))
            if isinstance(frame, GoAwayFrame):
                self.codes.append(ErrorCodes(frame.error_code).name)
            elif isinstance(frame, WindowUpdateFrame):
                self._widen(frame.stream_id, frame.window_increment)
            elif isinstance(frame, SettingsFrame) and SettingsFrame.INITIAL_WINDOW_SIZE in frame.settings:
                window = frame.settings[SettingsFrame.INITIAL_WINDOW_SIZE]
                self._widen(1, window - self._hub_stream_window)
                self._hub_stream_window = window
            del self._buffer[: 9 + length]

    def _widen(self, stream: int, by: int) -> None:
        if stream:
            self._stream_window += by
        else:
            self._window += by
        self._wider.set()
        self._wider = trio.Event()

    async def send_message(self, message: Any) -> None:
        """Send a message on its first stream, as the hub takes it; somebody has to `hear` meanwhile."""
        payload = _payload(message)
        start = 0
        while start < len(payload):
            size = min(_PIECE, self._stream_window, self._window)
            if size <= 0:
                await self._wider.wait()
                continue
            piece = payload[start : start + size]
            start += len(piece)
            self._stream_window -= len(piece)
            self._window -= len(piece)
            await self.send(DataFrame(1, data=piece).serialize())


class Hostile:
    """Peers of the hub at a port of loopback."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.connections = 0
        self.cut = 0
        self.codes: Counter[str] = Counter()

    async def _open(self, receive_buffer: int | None = None) -> _Connection:
        opened = trio.socket.socket()
        if receive_buffer is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await opened.connect(("127.0.0.1", self._port))
        self.connections += 1
        return _Connection(trio.SocketStream(opened))

    async def attack(self, name: str, seconds: float) -> None:
        """Do it for so long."""
        self.connections = self.cut = 0
        self.codes = Counter()
        with trio.move_on_after(seconds):
            await _ATTACKS[name](self)

    # Those who read too little.

    async def never_read(self, window: int | None = None) -> None:
        """Watchers that never read, in their own windows as they are by default."""
        async with trio.open_nursery() as nursery:
            for _ in range(SLOW):
                nursery.start_soon(self._hold, window, 0.0)

    async def never_read_wide(self) -> None:
        """The same, but they offer as large a window as there is: everything waits for the socket."""
        await self.never_read(_WIDE)

    async def byte_a_second(self) -> None:
        """Watchers that read a byte a second."""
        async with trio.open_nursery() as nursery:
            for _ in range(SLOW):
                nursery.start_soon(self._hold, _WIDE, 1.0)

    async def _hold(self, window: int | None, pause: float) -> None:
        connection = await self._open(4096)
        async with connection.stream:
            await connection.send(_watch(f"slow-{next(_numbers)}", window))
            while True:
                await trio.sleep(pause or 2.0)
                if pause:
                    await connection.stream.receive_some(1)
                # It lives: so it is not for silence that it is cut.
                await connection.stream.send_all(PingFrame(0, opaque_data=bytes(8)).serialize())

    async def stall(self) -> None:
        """One watcher that never reads, for good."""
        while True:
            with suppress(OSError, trio.BrokenResourceError):
                await self._hold(_WIDE, 0.0)

    # Those who send too much.

    async def _flood(self, what: Callable[[], bytes], patience: float = _PATIENCE) -> None:
        """Send this on a connection at once, see what comes of it, and do so again and again."""
        while True:
            data = what()  # before the connection is there
            connection = await self._open()
            async with connection.stream:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(connection.send, data)
                    with trio.move_on_after(patience):
                        await connection.hear()
                    nursery.cancel_scope.cancel()
                self.cut += connection.ended
                self.codes.update(connection.codes)
            await trio.sleep(PAUSE)

    async def pings(self) -> None:
        """PINGs that want to be answered."""
        data = _settings() + PingFrame(0, opaque_data=bytes(8)).serialize() * FLOOD
        await self._flood(lambda: data)

    async def settings(self) -> None:
        """SETTINGS that want to be acknowledged."""
        data = _settings() + SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 65_535}).serialize() * FLOOD
        await self._flood(lambda: data)

    async def resets(self) -> None:
        """Calls that are reset at once."""
        request = _request("WatchFederation", "hostile")
        parts = [_settings()]
        for number in range(FLOOD // 2):
            parts.append(HeadersFrame(2 * number + 1, data=request, flags=["END_HEADERS"]).serialize())
            parts.append(RstStreamFrame(2 * number + 1, error_code=8).serialize())
        data = b"".join(parts)
        await self._flood(lambda: data)

    async def streams(self) -> None:
        """A thousand calls at once."""
        request = _request("ReportFederation", "hostile")
        calls = [HeadersFrame(2 * number + 1, data=request, flags=["END_HEADERS"]) for number in range(1_000)]
        data = _settings() + b"".join(call.serialize() for call in calls)
        await self._flood(lambda: data)

    async def continuations(self) -> None:
        """A call whose headers never end."""
        pieces = ContinuationFrame(1, data=b"\0").serialize() * FLOOD
        data = _settings() + HeadersFrame(1, data=_request("WatchFederation", "hostile")).serialize() + pieces
        await self._flood(lambda: data)

    async def garbage(self) -> None:
        """A message that says it is a GiB long, and then no HTTP/2."""
        length = DataFrame(1, data=b"\0" + (2**30).to_bytes(4, "big")).serialize()
        data = _settings() + _call(1, "ReportFederation", "hostile") + length + b"\xff" * 65_536
        await self._flood(lambda: data)

    async def beyond(self) -> None:
        """A reporter that sends ten times the messages that it may."""
        message = ReportFederationRequest()
        message.items.add(cluster_id="hostile", namespace="agents", env_name="env", state="Active")
        one = _data(1, message)
        await self._flood(
            lambda: _settings() + _call(1, "ReportFederation", "hostile") + one * MESSAGES, patience=PAUSE
        )

    async def within(self, records: int = MOST_RECORDS) -> None:
        """A reporter that sends what it may at most in one message, once."""
        message = ReportFederationRequest()
        for number in range(records):
            message.items.add(
                cluster_id="flooding",
                namespace="agents",
                env_name=f"env-{number // 4}",
                member_pool=f"pool-{number}",
                idle=1,
                desired=10,
                state="Active",
            )
        connection = await self._open()
        async with connection.stream, trio.open_nursery() as nursery:
            nursery.start_soon(connection.hear)
            await connection.send(_settings() + _call(1, "ReportFederation", "flooding"))
            await connection.send_message(message)
            await trio.sleep_forever()


_ATTACKS: dict[str, Callable[[Hostile], Awaitable[None]]] = {
    "never read": Hostile.never_read,
    "never read, wide": Hostile.never_read_wide,
    "byte a second": Hostile.byte_a_second,
    "within": Hostile.within,
    "beyond": Hostile.beyond,
    "pings": Hostile.pings,
    "settings": Hostile.settings,
    "resets": Hostile.resets,
    "streams": Hostile.streams,
    "continuations": Hostile.continuations,
    "garbage": Hostile.garbage,
}


async def _run(port: int) -> None:
    hostile = Hostile(port)
    say(ready=True)
    async with trio.open_nursery() as nursery:
        while True:
            asked = await trio.to_thread.run_sync(listen, abandon_on_cancel=True)
            if "stall" in asked:
                nursery.start_soon(hostile.stall)
                say(done=True)
            else:
                say(began=True)
                await hostile.attack(asked["attack"], asked["seconds"])
                say(done=True, connections=hostile.connections, cut=hostile.cut, codes=dict(hostile.codes))


def main() -> None:
    """Be hostile to the hub at a port of loopback, until this process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    trio.run(_run, parser.parse_args().port)


if __name__ == "__main__":
    main()

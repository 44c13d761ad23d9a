"""Peers of a hub for tests over real sockets: a hostile one, which sends whatever bytes it is told and only listens for
how it ends, and the hub itself as a process, with its memory and its metrics."""

from __future__ import annotations

import json
import struct
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import trio
from h2.errors import ErrorCodes
from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from prometheus_client.parser import text_string_to_metric_families

from tests.process.running import COMMAND, environment, hub_file

SECRET = "s4Kd-7m2x-hostile"
REPORT_PATH = "/sandbox.sync.v1.FederationService/ReportFederation"
WATCH_PATH = "/sandbox.sync.v1.FederationService/WatchFederation"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: Seconds after which a test that waits has failed. Far more than anything takes.
PATIENCE = 30.0
#: Seconds between two looks at what tells nobody that it changes.
LOOK_INTERVAL = 0.05
#: the largest frame that may be sent to a hub
LARGEST = 2**14


def frame(kind: type[Frame], stream_id: int, *, flags: Sequence[str] = (), **values: Any) -> bytes:
    """One frame."""
    made = kind(stream_id, flags=flags)
    for name, value in values.items():
        setattr(made, name, value)
    return made.serialize()


def unknown(stream_id: int = 0, body: bytes = b"") -> bytes:
    """A frame of a kind that nobody knows."""
    return struct.pack("!I", len(body))[1:] + b"\x42\0" + struct.pack("!I", stream_id) + body


def request(path: str, cluster: str = "hostile", secret: str = SECRET) -> list[tuple[str, str]]:
    """The headers of a call."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "hub"),
        ("te", "trailers"),  # codespell:ignore te
        ("content-type", "application/grpc"),
        ("authorization", f"Bearer {secret}"),
        ("x-federation-cluster", cluster),
        ("x-federation-instance", "0c" * 16),
    ]


def packed(headers: Sequence[tuple[str, str]]) -> bytes:
    """A header block that stands for itself: nothing of it is remembered."""
    return Encoder().encode([(name, value, True) for name, value in headers])


def called(stream_id: int, path: str, data: bytes | None = None, *, end: bool = False, **who: str) -> bytes:
    """A call: its headers, and what it says first, in one frame, where that is anything."""
    flags = ["END_HEADERS", "END_STREAM"] if end and data is None else ["END_HEADERS"]
    sent = frame(HeadersFrame, stream_id, data=packed(request(path, **who)), flags=flags)
    if data is not None:
        sent += frame(DataFrame, stream_id, data=data, flags=["END_STREAM"] if end else [])
    return sent


def message(data: bytes) -> bytes:
    """A message with gRPC's prefix."""
    return struct.pack("!?I", False, len(data)) + data


@dataclass
class Fate:
    """How a hostile peer was treated."""

    #: the code of HTTP/2's goodbye; None without one
    goodbye: ErrorCodes | None = None
    #: what the goodbye says
    words: str = ""
    #: by call: its gRPC status
    statuses: dict[int, int] = field(default_factory=dict)
    #: by call: what the words of its status are
    details: dict[int, str] = field(default_factory=dict)
    #: by call: the code of its reset
    resets: dict[int, int] = field(default_factory=dict)
    #: whether the connection is closed
    closed: bool = False
    #: bytes that came
    received: int = 0


class Hostile:
    """A connection that sends any bytes, and takes down how it ends. While it reads it answers pings, and nothing
    else."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.fate = Fate()
        #: what it sends for each frame of data that it gets
        self.for_data = b""
        self._answer = b""
        self._sending = trio.Lock()
        #: by call, and 0 for the connection: the bytes that it may still send
        self._windows: dict[int, int] = {0: 65_535}
        self._first_window = 65_535
        self._more_window = trio.Event()
        self._decoder = Decoder()
        self._buffer = bytearray()

    @classmethod
    @asynccontextmanager
    async def connected(cls, port: int, *, small_buffer: bool = False) -> AsyncIterator[Self]:
        """A connection to a hub. `small_buffer`: its socket takes little before anybody reads."""
        with trio.socket.socket() as socket:
            if small_buffer:
                socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
            await socket.connect(("127.0.0.1", port))
            yield cls(trio.SocketStream(socket))

    async def send(self, data: bytes) -> bool:
        """Send bytes; False where the connection is gone."""
        try:
            async with self._sending:
                await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.fate.closed = True
            return False
        return True

    async def say(self, stream_id: int, data: bytes) -> None:
        """Send bytes of a call, as fast as windows allow, while somebody else reads."""
        while data:
            window = min(self._windows[0], self._windows.get(stream_id, self._first_window), LARGEST)
            if window <= 0:
                self._more_window = trio.Event()
                await self._more_window.wait()
                continue
            piece, data = data[:window], data[window:]
            self._windows[0] -= len(piece)
            self._windows[stream_id] = self._windows.get(stream_id, self._first_window) - len(piece)
            if not await self.send(frame(DataFrame, stream_id, data=piece)):
                return

    async def begin(self, *settings: tuple[int, int]) -> None:
        """The preface, with settings."""
        await self.send(PREFACE + frame(SettingsFrame, 0, settings=dict(settings)))

    async def flood(self, data: bytes, *, most: int) -> Fate:
        """Send bytes again and again, until the connection is gone, or `most` of them are sent; how that ended. What
        comes is read meanwhile."""
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                chunk = data * max(1, 65_536 // len(data))
                for _ in range(0, most, len(chunk)):
                    if self.fate.closed or not await self.send(chunk):
                        return

            nursery.start_soon(send)
            await self.listen()
            nursery.cancel_scope.cancel()
        return self.fate

    async def listen(self, *, until_ended: int | None = None) -> Fate:
        """Read until the connection is closed, or a call has ended; how."""
        with trio.fail_after(PATIENCE):
            while until_ended is None or not {until_ended} & (self.fate.statuses.keys() | self.fate.resets.keys()):
                if not await self.read():
                    return self.fate
        return self.fate

    async def read(self, most: int = 65_536) -> bool:
        """Take in what has come; False where the connection is closed."""
        try:
            data = await self.stream.receive_some(most)
        except trio.BrokenResourceError:
            data = b""
        if not data:
            self.fate.closed = True
            return False
        self.fate.received += len(data)
        self._buffer += data
        while len(self._buffer) >= 9:
            found, length = Frame.parse_frame_header(memoryview(bytes(self._buffer[:9])))
            if len(self._buffer) < 9 + length:
                break
            found.parse_body(memoryview(bytes(self._buffer[9 : 9 + length])))
            del self._buffer[: 9 + length]
            self._take(found)
        answer, self._answer = self._answer, b""
        return not answer or await self.send(answer)

    def _take(self, found: Frame) -> None:
        match found:
            case PingFrame() if "ACK" not in found.flags:
                self._answer += frame(PingFrame, 0, opaque_data=found.opaque_data, flags=["ACK"])
            case SettingsFrame() if SettingsFrame.INITIAL_WINDOW_SIZE in found.settings:
                self._first_window = found.settings[SettingsFrame.INITIAL_WINDOW_SIZE]
            case WindowUpdateFrame():
                self._windows[found.stream_id] = (
                    self._windows.get(found.stream_id, self._first_window) + found.window_increment
                )
                self._more_window.set()
            case DataFrame():
                self._answer += self.for_data
            case GoAwayFrame():
                self.fate.goodbye = ErrorCodes(found.error_code)
                self.fate.words = found.additional_data.decode()
            case RstStreamFrame():
                self.fate.resets[found.stream_id] = found.error_code
            case HeadersFrame():
                headers = {str(name): str(value) for name, value in self._decoder.decode(found.data)}
                if "grpc-status" in headers:
                    self.fate.statuses[found.stream_id] = int(headers["grpc-status"])
                    self.fate.details[found.stream_id] = headers.get("grpc-message", "")


#: one of each frame that carries nothing, as bytes
NOTHING = {
    "pings": frame(PingFrame, 0, opaque_data=b"12345678"),
    "settings": frame(SettingsFrame, 0),
    "settings with a value": frame(SettingsFrame, 0, settings={4: 70_000}),
    "acks of settings": frame(SettingsFrame, 0, flags=["ACK"]),
    "acks of pings": frame(PingFrame, 0, opaque_data=b"12345678", flags=["ACK"]),
    "windows": frame(WindowUpdateFrame, 0, window_increment=1),
    "windows of a call": frame(WindowUpdateFrame, 1, window_increment=1),
    "priorities": b"\0\0\x05\x02\0\0\0\0\x01" + struct.pack("!IB", 3, 7),
    "empty data": frame(DataFrame, 1, data=b""),
    "padding": frame(DataFrame, 1, data=b"", pad_length=3, flags=["PADDED"]),
    "unknown frames": unknown(),
    "unknown frames of a call": unknown(1, b"x" * 10),
}


class HubProcess:
    """A hub of its own process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.lines: list[str] = []
        assert process.stderr is not None
        self._said = process.stderr
        while not self.events("started"):
            line = self._said.readline()
            assert line, "the hub did not start:\n" + "\n".join(self.lines)
            self.lines.append(line.decode())
        [started] = self.events("started")
        [self.port] = started["hub_ports"]
        self._metrics_port = started["metrics_port"]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._said:
            self.lines.append(line.decode())

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's lines of a name, so far."""
        logged = [json.loads(line) for line in list(self.lines) if line.startswith("{")]
        return [line for line in logged if line["event"] == name]

    def memory(self, what: str = "VmRSS") -> int:
        """Bytes of its memory: now, or at its peak (VmHWM)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith(f"{what}:")]
        return int(line.split()[1]) * 1024

    def forget_peak(self) -> None:
        """Begin a new peak."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    async def counts(self) -> dict[str, float]:
        """Its metrics without labels, and those with one label as NAME/VALUE; without the prefix of the hub's."""
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=PATIENCE)
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                name = "/".join([sample.name.removeprefix("trio_federation_hub_"), *sample.labels.values()])
                found[name] = sample.value
        return found


@contextmanager
def hub_process(folder: Path, more: str) -> Iterator[HubProcess]:
    """A hub with these settings in its [hub], and after it. It ends well, and has said nothing but lines of its log."""
    file = hub_file(folder / "hub.toml", secret=SECRET, more=more, level="info")
    process = subprocess.Popen(
        [str(COMMAND), "run", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        hub = HubProcess(process)
        yield hub
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert [line for line in hub.lines if not line.startswith("{") or "Traceback" in line] == []
        assert SECRET not in "".join(hub.lines)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()

"""A line between an agent and a hub that can be broken, in a process of its own, for `faults.py`: it listens on a port
of loopback, and carries what it gets to another one and back. What is done to it, and when, is the benchmark's
business.

Told {"do"}, it does so to every connection that is open: "reset" breaks it towards both sides (RST), "forget" carries
nothing more and says nothing, "goaway" tells the agent HTTP/2's goodbye, as a hub does that is drained. After "silent",
whoever connects is taken and never hears a word, and what is open is reset; "pass" ends that."""

from __future__ import annotations

import argparse
import socket
import struct
from contextlib import suppress

import trio
from hyperframe.frame import GoAwayFrame

from benchmarks.children import listen, say
from trio_federation.clock import boot_time

_GOODBYE = GoAwayFrame(last_stream_id=2**31 - 1, error_code=0).serialize()
_HEADER = 9


class Frames:
    """Where frames of HTTP/2 end in what a hub sends."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._left = 0

    def end_of_first(self, data: bytes) -> int | None:
        """Where in these bytes a frame ends first; None where none does. All of them count as seen."""
        found = None
        at = 0
        while at < len(data):
            if self._left == 0:
                taken = data[at : at + _HEADER - len(self._header)]
                self._header += taken
                at += len(taken)
                if len(self._header) == _HEADER:
                    self._left = int.from_bytes(self._header[:3], "big")
                    self._header.clear()
                    if self._left == 0 and found is None:
                        found = at
            else:
                size = min(self._left, len(data) - at)
                self._left -= size
                at += size
                if self._left == 0 and found is None:
                    found = at
        return found


class _Connection:
    def __init__(self, client: trio.SocketStream) -> None:
        self._client = client
        self._sides = [client]
        self._scope = trio.CancelScope()
        self._frames = Frames()
        self._forgotten = self._broken = False
        self.says_goodbye = False

    async def run(self, port: int, *, silent: bool) -> None:
        try:
            with self._scope:
                if silent:
                    await trio.sleep_forever()
                try:
                    server = await trio.open_tcp_stream("127.0.0.1", port)
                except OSError:
                    return
                self._sides.append(server)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._carry, self._client, server)
                    nursery.start_soon(self._carry, server, self._client)
            if self._forgotten:
                await trio.sleep_forever()
        finally:
            for side in self._sides:
                if self._broken:
                    with suppress(OSError):
                        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                side.socket.close()

    async def _carry(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                await target.send_all(self._with_goodbye(bytes(data)) if target is self._client else data)
        self._scope.cancel()

    def _with_goodbye(self, data: bytes) -> bytes:
        end = self._frames.end_of_first(data)
        if not self.says_goodbye or end is None:
            return data
        self.says_goodbye = False
        return data[:end] + _GOODBYE + data[end:]

    def reset(self) -> None:
        self._broken = True
        self._scope.cancel()

    def forget(self) -> None:
        self._forgotten = True
        self._scope.cancel()


async def _run(port: int) -> None:
    connections: dict[_Connection, None] = {}
    silent = False

    async def serve(client: trio.SocketStream) -> None:
        connection = _Connection(client)
        connections[connection] = None
        try:
            await connection.run(port, silent=silent)
        finally:
            del connections[connection]

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        say(port=listener.socket.getsockname()[1])
        while True:
            asked = (await trio.to_thread.run_sync(listen, abandon_on_cancel=True))["do"]
            silent = asked == "silent"
            for connection in connections:
                if asked == "forget":
                    connection.forget()
                elif asked == "goaway":
                    connection.says_goodbye = True
                elif asked in ("reset", "silent"):
                    connection.reset()
            say(done=asked, at=boot_time())


def main() -> None:
    """Be a line to a port of loopback, until this process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    trio.run(_run, parser.parse_args().port)


if __name__ == "__main__":
    main()

"""Network namespaces of Linux, as places for agents: each has a link of its own to this machine, which can be taken
down, so that packets are lost as on a real cable. Needs `ip` and the right to make namespaces."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from tests.chaos.fleet import Place

#: Networks that are reserved for documentation and tests, and so nobody's; the first one counts that this machine has
#: no address of. Each namespace gets four addresses.
_NETWORKS = ("198.51.100.", "203.0.113.", "192.0.2.", "198.18.0.", "198.19.0.")
#: Linux' number for a network namespace
_CLONE_NEWNET = 0x40000000


class NoNamespaces(Exception):
    """There can be none here; the text says why."""


class Namespace:
    """One namespace with a link to this machine. `hub_host` is this machine's address on it."""

    def __init__(self, number: int, network: str) -> None:
        # Names of links have 15 characters at most; the process id keeps two test runs apart.
        self.name = f"chaos{os.getpid()}n{number}"
        self._here, self._there = f"ch{os.getpid()}h{number}", f"ch{os.getpid()}t{number}"
        self.hub_host = f"{network}{4 * number + 1}"
        self._address = f"{network}{4 * number + 2}"

    @property
    def place(self) -> Place:
        """An agent's place in it."""
        return Place(("ip", "netns", "exec", self.name), self.hub_host, self._connector)

    def make(self) -> None:
        """Make it. Raises NoNamespaces."""
        for command in (
            ["netns", "add", self.name],
            ["-n", self.name, "link", "set", "lo", "up"],
            ["link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self.name],
            ["address", "add", f"{self.hub_host}/30", "dev", self._here],
            ["-n", self.name, "address", "add", f"{self._address}/30", "dev", self._there],
            ["link", "set", self._here, "up"],
            ["-n", self.name, "link", "set", self._there, "up"],
        ):
            _ip(command)

    def remove(self) -> None:
        """Remove it, and what there is of it."""
        for command in (["netns", "delete", self.name], ["link", "delete", self._here]):
            with suppress(NoNamespaces):  # the link goes with the namespace, as soon as nobody is in that
                _ip(command)

    def take_down(self, side: str) -> None:
        """Take the link down, `here` or `there`: on this machine, or in the namespace."""
        _ip(self._link(side, "down"))

    def bring_up(self, side: str) -> None:
        """Bring it up again."""
        _ip(self._link(side, "up"))

    def _link(self, side: str, state: str) -> list[str]:
        if side == "here":
            return ["link", "set", self._here, state]
        return ["-n", self.name, "link", "set", self._there, state]

    def _connector(self, port: int) -> Callable[[], Awaitable[trio.SocketStream]]:
        async def connect() -> trio.SocketStream:
            opened = trio.socket.from_stdlib_socket(self._socket())
            try:
                await opened.connect(("127.0.0.1", port))
            except BaseException:
                opened.close()
                raise
            return trio.SocketStream(opened)

        return connect

    def _socket(self) -> socket.socket:
        """A socket in it. A socket stays in the namespace of the thread that has made it, so that thread is its own."""
        made: list[socket.socket | OSError] = []

        def make() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            try:
                with Path("/run/netns", self.name).open() as file:
                    if libc.setns(file.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns has failed")
                made.append(socket.socket())
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        made[0].setblocking(False)
        return made[0]


@contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    """So many namespaces, removed at the end. Raises NoNamespaces where there can be none."""
    if shutil.which("ip") is None:
        raise NoNamespaces("there is no `ip` in PATH; it comes with iproute2")
    taken = _ip(["-oneline", "address"])
    network = next((each for each in _NETWORKS if f" {each}" not in taken), None)
    if network is None:
        raise NoNamespaces(f"this machine has addresses of all networks that are for tests: {taken}")
    made = [Namespace(number, network) for number in range(count)]
    try:
        for each in made:
            each.make()
        yield made
    finally:
        for each in made:
            each.remove()


def _ip(command: Sequence[str]) -> str:
    ended = subprocess.run(["ip", *command], check=False, capture_output=True, text=True, timeout=10)
    if ended.returncode:
        raise NoNamespaces(f"`ip {' '.join(command)}` has failed: {ended.stderr.strip()}")
    return ended.stdout

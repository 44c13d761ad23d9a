"""h2spec, a public test of what speaks HTTP/2, against a hub's port and against the same connections with a handler
that answers with a body. What fails is held against a list, with a reason for each, in both directions: what fails is
on it, and what is on it fails."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import pytest
import trio
from grpclib.protocol import AbstractHandler, Stream

from tests.apiserver.build import BuildError, NoToolchain, required
from tests.fuzz.build_h2spec import h2spec
from tests.fuzz.targets import no_fault_told
from trio_federation.config import HubSettings, Secret
from trio_federation.hub import Hub
from trio_federation.rpc import ConnectionSettings, open_bridge
from trio_federation.rpc.transport import Http2Connection

pytestmark = pytest.mark.slow

#: what is asked for, where a request is good
PATH = "/sandbox.sync.v1.FederationService/WatchFederation"
#: seconds after which a case has failed that still waits; and where that is not expected, once more
PATIENCE = 1
MORE_PATIENCE = 3
#: seconds that all cases may take at once
DEADLINE = 60

#: A case, by section and title.
Case: TypeAlias = tuple[str, str]
#: Cases that may end either way, and why.
EITHER: dict[Case, str] = {
    (
        "http2/5.1.2",
        "Sends HEADERS frames that causes their advertised concurrent stream limit to be exceeded",
    ): "a hub answers its requests, which are none of gRPC's, faster than they come, so that mostly too many are never "
    "open at once; tests/rpc/test_garbage.py has calls that stay open",
}
#: Cases that fail against a hub, and why.
_NO_BODY = "waits for a body, and what is no call of gRPC's is refused in headers alone; ANSWERING has one"
FAILS: dict[Case, str] = {
    ("generic/2", "Sends a WINDOW_UPDATE frame on half-closed (remote) stream"): _NO_BODY,
    ("generic/2", "Sends a PRIORITY frame on half-closed (remote) stream"): _NO_BODY,
    (
        "http2/8.1.2.2",
        'Sends a HEADERS frame that contains the TE header field with any value other than "trailers"',
    ): "is answered with 400 and a reason, as by other gRPC servers",
}
#: Cases that are skipped against a hub: they begin with a body that is longer than a window.
SKIPPED = {
    ("http2/6.5.3", "Sends multiple values of SETTINGS_INITIAL_WINDOW_SIZE"),
    ("http2/6.9.1", "Sends SETTINGS frame to set the initial window size to 1 and sends HEADERS frame"),
    ("http2/6.9.2", "Changes SETTINGS_INITIAL_WINDOW_SIZE after sending HEADERS frame"),
    ("http2/6.9.2", "Sends a SETTINGS frame for window size to be negative"),
}
#: The sections that need a body, for the handler that has one.
ANSWERING = ("generic", "http2/6.5.3", "http2/6.9")


@pytest.fixture(scope="module")
def program() -> Path:
    """h2spec. Skips where there is no Go to build it with; with CI=true that is a failure."""
    try:
        return h2spec(os.environ)
    except NoToolchain as error:
        if required(os.environ):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(f"h2spec is built as the API server is: {error}")
    except BuildError as error:
        pytest.fail(str(error), pytrace=False)


async def test_a_hub_keeps_to_http_2(program: Path, tmp_path: Path) -> None:
    with no_fault_told():
        async with a_hub() as port:
            found = await outcomes(program, port, tmp_path)
    assert len(found) > 140
    assert unexpected(found) == {}
    assert [case for case in FAILS if found[case] == ""] == [], "take off the list what does not fail any more"
    assert {case for case, said in found.items() if said == "skipped"} == SKIPPED


async def test_a_connection_keeps_to_the_windows_of_its_peer(program: Path, tmp_path: Path) -> None:
    async with an_answering_server() as port:
        found = await outcomes(program, port, tmp_path, *ANSWERING)
    assert {case: said for case, said in found.items() if said} == {}
    # And those are the ones that a hub has no body for.
    assert found.keys() >= SKIPPED | {case for case, why in FAILS.items() if why == _NO_BODY}


async def outcomes(program: Path, port: int, folder: Path, *sections: str) -> Mapping[Case, str]:
    """What became of each case of some sections, or of all: "", "skipped", or what came instead. Where something fails
    that should not, its section is run again with more patience: the machine may have been busy."""
    found = await _outcomes(program, port, folder, sections, PATIENCE)
    if again := sorted({case[0] for case in unexpected(found)}):
        found |= await _outcomes(program, port, folder, again, MORE_PATIENCE)
    return found


def unexpected(found: Mapping[Case, str]) -> dict[Case, str]:
    """The cases that have failed, and are not known to."""
    return {
        case: said
        for case, said in found.items()
        if said not in ("", "skipped") and case not in FAILS and case not in EITHER
    }


async def _outcomes(program: Path, port: int, folder: Path, sections: Sequence[str], patience: int) -> dict[Case, str]:
    report = folder / "report.xml"
    options = ["--strict", "-h", "127.0.0.1", "-p", str(port), "-P", PATH, "-o", str(patience), "-j", str(report)]
    with trio.fail_after(DEADLINE):
        ran = await trio.run_process(
            [str(program), *options, *sections], capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
    # It says whether a case has failed; another code is a failure of its own.
    assert ran.returncode in (0, 1), ran.stdout.decode()
    found: dict[Case, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - written by h2spec, a moment ago
        skipped, fault = case.find("skipped"), case.find("error")
        if fault is None:
            fault = case.find("failure")
        said = "skipped" if skipped is not None else "" if fault is None else (fault.text or "failed")
        found[case.attrib["package"], case.attrib["classname"]] = said
    return found


@asynccontextmanager
async def a_hub() -> AsyncIterator[int]:
    """A hub on a port of its own, for plain text."""
    hub = Hub(HubSettings(secret=Secret("the secret of a hub that is tested")))
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(hub.run, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def an_answering_server() -> AsyncIterator[int]:
    """Our connections with a handler that answers everything with a body, on a port of their own."""

    async def serve(stream: trio.SocketStream) -> None:
        await Http2Connection(stream, _Answers(), ConnectionSettings(), client_side=False).run()

    async with open_bridge(), trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


class _Answers(AbstractHandler):
    """Answers every request with a few bytes, whatever it is."""

    def __init__(self) -> None:
        self._tasks: dict[Stream, asyncio.Task[None]] = {}

    def accept(self, stream: Stream, headers: Any, release_stream: Callable[[], Any]) -> None:
        """Called by grpclib for each request."""
        task = self._tasks[stream] = asyncio.get_running_loop().create_task(self._answer(stream))
        task.add_done_callback(lambda _: release_stream())

    async def _answer(self, stream: Stream) -> None:
        await stream.send_headers([(":status", "200"), ("content-type", "text/plain")])
        await stream.send_data(b"an answer of a few bytes", end_stream=True)

    def cancel(self, stream: Stream) -> None:
        """Called by grpclib where a request has ended early."""
        self._tasks.pop(stream).cancel()

    def close(self) -> None:
        """Called by grpclib when the connection has ended."""
        for task in self._tasks.values():
            task.cancel()

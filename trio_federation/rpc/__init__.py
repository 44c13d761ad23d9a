"""gRPC, carried by grpclib on trio-asyncio: the one room that knows asyncio. What leaves it are Trio-flavoured calls
that speak the generated messages, and the errors of `trio_federation.errors`; no asyncio or grpclib object does. Who
may call, what a message means and what is tried again are decided elsewhere."""

import asyncio

import grpclib.utils
import trio_asyncio  # noqa: F401 - importing it replaces asyncio.current_task, which grpclib has to call

from trio_federation.rpc.bridge import open_bridge
from trio_federation.rpc.client import HubConnection, ReportCall, WatchCall
from trio_federation.rpc.memory import MemoryLink
from trio_federation.rpc.server import FederationServer, IncomingReport, IncomingWatch
from trio_federation.rpc.sockets import (
    CONNECT_DEADLINE,
    Dialer,
    accept_tls,
    client_tls,
    open_listeners,
    server_tls,
    tcp_dialer,
)
from trio_federation.rpc.transport import ConnectionSettings, Cut, peer_name

# From Python 3.12 on, asyncio.current_task knows nothing of trio-asyncio's loops until trio-asyncio has replaced it.
# Where grpclib was imported before that, which the import of our messages does, it holds the one that does not know.
grpclib.utils._current_task = asyncio.current_task

__all__ = [
    "CONNECT_DEADLINE",
    "ConnectionSettings",
    "Cut",
    "Dialer",
    "FederationServer",
    "HubConnection",
    "IncomingReport",
    "IncomingWatch",
    "MemoryLink",
    "ReportCall",
    "WatchCall",
    "accept_tls",
    "client_tls",
    "open_bridge",
    "open_listeners",
    "peer_name",
    "server_tls",
    "tcp_dialer",
]

"""gRPC, carried by grpclib on trio-asyncio: the one room that knows asyncio. What leaves it are Trio-flavoured calls
that speak the generated messages, and the errors of `trio_federation.errors`; no asyncio or grpclib object does. Who
may call, what a message means and what is tried again are decided elsewhere."""

from trio_federation.rpc.bridge import open_bridge
from trio_federation.rpc.client import HubConnection, ReportCall, WatchCall
from trio_federation.rpc.memory import MemoryLink
from trio_federation.rpc.server import FederationServer, IncomingReport, IncomingWatch
from trio_federation.rpc.sockets import Dialer, accept_tls, client_tls, open_listeners, server_tls, tcp_dialer
from trio_federation.rpc.transport import ConnectionSettings, peer_name

__all__ = [
    "ConnectionSettings",
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

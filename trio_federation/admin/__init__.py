"""The HTTP side of a process: metrics and health now, what is asked about capacity later. `app.py` holds the answers,
`server.py` the sockets; neither holds a rule about capacity."""

from trio_federation.admin.app import metrics_app
from trio_federation.admin.server import serve_http, serve_metrics

__all__ = ["metrics_app", "serve_http", "serve_metrics"]

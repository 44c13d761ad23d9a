"""The HTTP side of a process: metrics, health, what is asked about capacity, and the web page. `app.py` holds the
paths, `api.py` what is under /v1, `page.html` the page, `protection.py` whom they answer, `answers.py` what they ask of
the process, `server.py` the sockets, `tls.py` what [admin.tls] makes for them. None holds a rule about capacity."""

from trio_federation.admin.answers import Answers
from trio_federation.admin.app import admin_app, metrics_app
from trio_federation.admin.server import serve_http
from trio_federation.admin.tls import admin_tls

__all__ = ["Answers", "admin_app", "admin_tls", "metrics_app", "serve_http"]

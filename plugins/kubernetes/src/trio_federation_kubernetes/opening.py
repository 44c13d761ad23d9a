"""How the sources and the sink of this plugin come to their API server: by what their options, the environment and a
kubeconfig say, which is read anew whenever nothing works; and the document in which a server describes a resource. What
is asked of the server then is up to them; how a client lasts is `connection.py`."""

from __future__ import annotations

import os
import time
from contextlib import AbstractAsyncContextManager
from functools import partial

import msgspec

from trio_federation import SinkContext, SourceContext
from trio_federation_kubernetes.access import Access
from trio_federation_kubernetes.client import ApiClient
from trio_federation_kubernetes.connection import Api, Connection
from trio_federation_kubernetes.errors import ApiError
from trio_federation_kubernetes.kubeconfig import find
from trio_federation_kubernetes.options import ConnectionOptions
from trio_federation_kubernetes.resources import Resource

#: Seconds for an OpenAPI document, which has as many schemas as its group has resources.
DOCUMENT_DEADLINE = 15.0
#: Seconds before it is asked for again, where what it says was not good enough: at first, and at most.
FIRST_SCHEMA_PAUSE = 2.0
LONGEST_SCHEMA_PAUSE = 15.0


class Opening:
    """The way to the API server that the options and the environment name; each `connect()` opens it anew."""

    def __init__(self, options: ConnectionOptions, context: SourceContext | SinkContext) -> None:
        self._options = options
        self._context = context
        #: how the API server was reached last, as it was told
        self._place: tuple[str, str] | None = None

    def connect(self) -> AbstractAsyncContextManager[Api]:
        """A connection. Its requests raise what is wrong with the kubeconfig, and it is read anew then."""
        make = partial(ApiClient, clock=self._context.clock, environment=os.environ)
        return Connection(self._access, make, clock=self._context.clock)

    def _access(self) -> Access:
        """What the kubeconfig says now."""
        context = self._context
        access = find(
            self._options.kubeconfig_path(context.base_dir, os.environ),
            self._options.context,
            os.environ,
            clock=context.clock,
            wall=time.time,  # noqa: TID251 - an exec plugin says in wall-clock time when its credential expires
        )
        place = (access.name, access.server)
        if place != self._place:  # while nothing works it is read anew again and again
            context.log.info(
                "kubernetes_connects",
                access=access.name,
                server=access.server,
                namespaces=self._options.namespaces or "all",
            )
        self._place = place
        return access


async def openapi_document(api: Api, resource: Resource) -> object:
    """The OpenAPI v3 document of a resource's group and version, parsed, or None where there is none to be had: it may
    be that there is no such resource, or that this server shows nobody a schema. Raises KubernetesError."""
    root = f"apis/{resource.group}" if resource.group else "api"
    try:
        answer = await api.get(f"/openapi/v3/{root}/{resource.version}", {}, deadline=DOCUMENT_DEADLINE)
        return msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, RecursionError):
        return None
    except ApiError as error:
        if error.code not in (403, 404, 406):
            raise
        return None

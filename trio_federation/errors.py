"""The errors that rooms hand to each other. What gRPC, sockets and files raise is mapped to these once, at the edge,
with the cause chained; no module outside `rpc/` needs to know a gRPC status. Nothing here decides what is retried: that
is `retry.py`."""

from __future__ import annotations

from typing import ClassVar


class FederationError(Exception):
    """Base of every error that this project raises on purpose. Its text is one line that can be shown to a person."""


class ConfigurationError(FederationError):
    """A configuration that cannot be used. `faults` holds every one of them, a line each, in the file's order."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class PluginError(FederationError):
    """A plugin that could not be loaded, configured or run; the text names it and its package."""


class RpcError(FederationError):
    """A call between an agent and a hub failed. The subclass says how; `peer` names the other side, as a person
    would."""

    #: the status's name in gRPC's own list, for logs, metrics and the wire
    status: ClassVar[str] = "UNKNOWN"

    @property
    def kind(self) -> str:
        """What tells it from other failures of the same thing, so that each is told once."""
        return self.status

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(f"{peer}: {message}" if peer else message)
        self.message = message
        self.peer = peer


class Unavailable(RpcError):
    """The peer cannot be reached, went away, fell silent, or is shutting down. Worth trying again."""

    status = "UNAVAILABLE"


class TlsFailed(Unavailable):
    """There is no connection, or no more, because of TLS: a certificate that one side does not accept, for instance.
    It does not pass by itself as others of its status do."""

    @property
    def kind(self) -> str:
        """Not that of a hub that is away, which often comes before it."""
        return "TLS"


class TooManyPings(Unavailable):
    """The peer closed the connection because it was asked for signs of life too often (HTTP/2 ENHANCE_YOUR_CALM)."""


class DeadlineExceeded(Unavailable):
    """What had to come by a certain time has not, for instance the first message of a call."""

    status = "DEADLINE_EXCEEDED"


class Late(Unavailable):
    """What the peer tells was on its way for so long that none of it counts any more. Only another connection helps,
    where nothing waits yet."""


class Unauthenticated(RpcError):
    """The credential is missing, malformed or wrong."""

    status = "UNAUTHENTICATED"


class PermissionDenied(RpcError):
    """The credential is good, but does not cover the cluster id that the call claims."""

    status = "PERMISSION_DENIED"


class InvalidArgument(RpcError):
    """The call's metadata break a rule, for instance the form of a cluster id."""

    status = "INVALID_ARGUMENT"


class AlreadyExists(RpcError):
    """Another live instance reports for this cluster id."""

    status = "ALREADY_EXISTS"


class Unimplemented(RpcError):
    """The peer does not know the method: it is an older version."""

    status = "UNIMPLEMENTED"


class ResourceExhausted(RpcError):
    """A limit was passed, for instance the size of a message."""

    status = "RESOURCE_EXHAUSTED"


class ProtocolViolation(RpcError):
    """The peer broke gRPC, HTTP/2 or protobuf, or answered with a status that has no meaning here."""

    status = "INTERNAL"

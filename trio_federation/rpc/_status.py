"""Between gRPC's statuses and exceptions and this project's errors: the one table, used by both sides of a call."""

from __future__ import annotations

import binascii

from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.exceptions import ProtocolError as GrpclibProtocolError
from h2.exceptions import H2Error

from trio_federation.errors import (
    AlreadyExists,
    InvalidArgument,
    PermissionDenied,
    ProtocolViolation,
    ResourceExhausted,
    RpcError,
    TlsFailed,
    TooManyPings,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from trio_federation.rpc.transport import Http2Connection, one_line

_ERRORS: dict[Status, type[RpcError]] = {
    Status.ALREADY_EXISTS: AlreadyExists,
    Status.INVALID_ARGUMENT: InvalidArgument,
    Status.PERMISSION_DENIED: PermissionDenied,
    Status.RESOURCE_EXHAUSTED: ResourceExhausted,
    Status.UNAUTHENTICATED: Unauthenticated,
    Status.UNIMPLEMENTED: Unimplemented,
    # What passes by itself, and so is worth another try, is all one to an agent.
    Status.ABORTED: Unavailable,
    Status.CANCELLED: Unavailable,
    Status.DEADLINE_EXCEEDED: Unavailable,
    Status.UNAVAILABLE: Unavailable,
}

#: What grpclib and h2 raise when the peer or the connection misbehaves. AssertionError: a message that ends too early.
#: NotImplementedError: a compressed one. KeyError: a header that is missing. binascii.Error, UnicodeError: one that
#: cannot be read. AttributeError: a connection that has ended. Faults of our own that look like these are given another
#: type before they get here (`codec.py`).
FOREIGN_ERRORS = (
    GRPCError,
    StreamTerminatedError,
    GrpclibProtocolError,
    H2Error,
    TimeoutError,
    OSError,
    AssertionError,
    NotImplementedError,
    AttributeError,
    KeyError,
    binascii.Error,
    UnicodeError,
)


def to_error(cause: Exception, connection: Http2Connection, peer: str) -> RpcError:
    """Our error for what grpclib or h2 raised on a connection; the caller raises it from the cause."""
    if isinstance(cause, RpcError):
        return cause if cause.peer else type(cause)(cause.message, peer=peer)
    if isinstance(cause, GRPCError):
        known = _ERRORS.get(cause.status)
        text = one_line(cause.message or "") or "no reason given"
        if known is None:
            return ProtocolViolation(f"the call failed with {cause.status.name}: {text}", peer=peer)
        return known(text, peer=peer)
    if connection.is_closing() or connection.ended:
        return end_of(connection, peer)
    if isinstance(cause, AssertionError):
        return ProtocolViolation("the stream ended too early: inside a message, or without a status", peer=peer)
    if isinstance(cause, NotImplementedError):
        return ProtocolViolation("a message is compressed, which was not agreed on", peer=peer)
    if isinstance(cause, binascii.Error | UnicodeError):
        return ProtocolViolation(f"a header cannot be read: {one_line(str(cause))}", peer=peer)
    if isinstance(cause, KeyError):
        return ProtocolViolation(f"the answer's headers have no {cause}", peer=peer)
    if isinstance(cause, StreamTerminatedError):
        return Unavailable(f"the call was cut off: {cause}", peer=peer)
    if isinstance(cause, H2Error | GrpclibProtocolError):
        return ProtocolViolation(f"{type(cause).__name__}: {cause}", peer=peer)
    return Unavailable(f"{type(cause).__name__}: {cause}", peer=peer)


def end_of(connection: Http2Connection, peer: str) -> RpcError:
    """Our error for the end of a connection, which is nobody's fault in particular."""
    kind = TooManyPings if connection.too_many_pings else TlsFailed if connection.tls_failed else Unavailable
    return kind(connection.ended or "the connection is closed", peer=peer)


def to_status(error: RpcError) -> GRPCError:
    """What a handler's error looks like to the peer."""
    return GRPCError(Status[error.status], error.message)

"""The codec through which grpclib turns messages into bytes and back. How that is done is in `wire.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpclib.encoding.base import CodecBase

from trio_federation import wire
from trio_federation.pb.sandbox.sync.v1 import FederationBroadcast


class FederationCodec(CodecBase):
    """Encodes and decodes the messages of sync.proto, for grpclib's channels and servers.

    Its content subtype is the usual one, so a peer sees `application/grpc` or `application/grpc+proto`."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        """The bytes of `message`. Raises TypeError where it is not of the type that the call declares."""
        if type(message) is wire.EncodedBroadcast and message_type is FederationBroadcast:
            return message.data
        if type(message) is not message_type:
            raise TypeError(f"this call sends {message_type.__name__}, not {type(message).__name__}")
        with _our_own_faults():
            return wire.encode(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The message of the type that the call declares. Raises ProtocolViolation where `data` is no such message."""
        with _our_own_faults():
            if issubclass(message_type, wire.ReceivedMessage):
                return message_type(data)
            return wire.decode(data, message_type)


@contextmanager
def _our_own_faults() -> Iterator[None]:
    """Gives a fault of our own another type than those that grpclib's and h2's failures have, for which it would be
    taken outside, and tried again for ever."""
    try:
        yield
    except (AssertionError, AttributeError, KeyError, NotImplementedError, UnicodeError) as error:
        raise RuntimeError(f"the codec failed: {type(error).__name__}: {error}") from error

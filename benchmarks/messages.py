"""What grpcio's hub and clients speak: the messages of sync.proto as protobuf's own classes, made from the descriptors
in the generated code, and the paths of the two calls."""

from __future__ import annotations

from typing import Any

from google.protobuf.message_factory import GetMessageClass

from trio_federation.pb.sandbox.sync import v1

SERVICE = "sandbox.sync.v1.FederationService"
SECRET = "secret of a benchmark"  # noqa: S105 - of no other use

EnvCapacity: Any = GetMessageClass(v1.EnvCapacity.DESCRIPTOR)
ClusterOrigin: Any = GetMessageClass(v1.ClusterOrigin.DESCRIPTOR)
ReportFederationRequest: Any = GetMessageClass(v1.ReportFederationRequest.DESCRIPTOR)
ReportFederationResponse: Any = GetMessageClass(v1.ReportFederationResponse.DESCRIPTOR)
WatchFederationRequest: Any = GetMessageClass(v1.WatchFederationRequest.DESCRIPTOR)
FederationBroadcast: Any = GetMessageClass(v1.FederationBroadcast.DESCRIPTOR)

#: grpcio's own limit on messages, 4 MiB, is not what is measured.
NO_LIMITS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def to_bytes(message: Any) -> bytes:
    """The bytes of a message, or bytes as they are."""
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


def metadata(cluster_id: str, instance: str) -> tuple[tuple[str, str], ...]:
    """What goes with a call of that cluster."""
    return (
        ("authorization", f"Bearer {SECRET}"),
        ("x-federation-cluster", cluster_id),
        ("x-federation-instance", instance),
    )

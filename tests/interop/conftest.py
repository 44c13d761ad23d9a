"""gRPC's own implementation, grpcio, as the other side. It runs in threads of its own; tests wait for it through its
timeouts, and for us through what we log and count, and nobody sleeps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from tests.interop.peers import LogWatch, Schema

PROTO = Path(__file__).resolve().parent.parent.parent / "proto"


@pytest.fixture(scope="session")
def file_descriptor(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What protoc makes of the .proto file: a FileDescriptorProto."""
    into = tmp_path_factory.mktemp("interop") / "sync.pb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO), f"--descriptor_set_out={into}"]
    subprocess.run([*command, "sandbox/sync/v1/sync.proto"], check=True, capture_output=True)
    [file] = descriptor_pb2.FileDescriptorSet.FromString(into.read_bytes()).file
    encoded: bytes = file.SerializeToString()
    return encoded


@pytest.fixture(scope="session")
def schema(file_descriptor: bytes) -> Schema:
    """The protocol as it is."""
    return Schema(descriptor_pb2.FileDescriptorProto.FromString(file_descriptor))


@pytest.fixture(scope="session")
def older(file_descriptor: bytes) -> Schema:
    """The protocol as it was before us: nothing from number 100 up."""
    file = descriptor_pb2.FileDescriptorProto.FromString(file_descriptor)
    for message in list(file.message_type):
        for field in [field for field in message.field if field.number >= 100]:
            message.field.remove(field)
    unused = [message for message in file.message_type if message.name == "ClusterOrigin"]
    for message in unused:
        file.message_type.remove(message)
    return Schema(file)


@pytest.fixture
def logs() -> Iterator[LogWatch]:
    """What is logged during the test, and a way to wait for it."""
    watch = LogWatch()
    with watch.installed():
        yield watch

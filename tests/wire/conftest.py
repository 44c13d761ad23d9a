"""The implementations of protobuf that have to agree on sync.proto: ours, betterproto2 alone, and two generated afresh
from the .proto file: betterproto 2.0.0b7, the last form of betterproto, and protoc's own classes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import betterproto2
import pytest

from trio_federation import wire
from trio_federation.pb.sandbox.sync import v1

PROTO = Path(__file__).resolve().parent.parent.parent / "proto"

#: which message a repeated field holds
PARTS = {"items": "EnvCapacity", "origins": "ClusterOrigin"}


class Peer:
    """One implementation. A message is written as a dict of its fields, with a list of dicts for a repeated one."""

    def __init__(self, name: str, module: ModuleType) -> None:
        self.name = name
        self.module = module

    def __repr__(self) -> str:
        return self.name

    def build(self, message_name: str, values: Mapping[str, Any]) -> Any:
        """A message of this implementation."""
        made = {
            name: [self.build(PARTS[name], part) for part in value] if name in PARTS else value
            for name, value in values.items()
        }
        return getattr(self.module, message_name)(**made)

    def values(self, message: Any) -> dict[str, Any]:
        """Every field of a message by name, zeros included."""
        names = [field.name for field in fields(getattr(v1, type(message).__name__))]
        return {
            name: [self.values(part) for part in getattr(message, name)] if name in PARTS else getattr(message, name)
            for name in names
        }

    def encode(self, message: Any) -> bytes:
        """The bytes of one of its messages."""
        return bytes(message)

    def decode(self, message_name: str, data: bytes) -> Any:
        """One of its messages from bytes."""
        return getattr(self.module, message_name)().parse(data)


class OurPeer(Peer):
    def encode(self, message: betterproto2.Message) -> bytes:
        return wire.encode(message)

    def decode(self, message_name: str, data: bytes) -> Any:
        return wire.decode(data, getattr(v1, message_name))


class ProtobufPeer(Peer):
    def encode(self, message: Any) -> bytes:
        encoded: bytes = message.SerializeToString()
        return encoded

    def decode(self, message_name: str, data: bytes) -> Any:
        return getattr(self.module, message_name).FromString(data)


def load(name: str, path: Path) -> ModuleType:
    """The module in a generated file, under a name of its own; betterproto looks it up there when it resolves types."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def ours() -> Peer:
    return OurPeer("trio_federation", v1)


@pytest.fixture(scope="session")
def betterproto2_alone() -> Peer:
    return Peer("betterproto2", v1)


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what protoc's own Python generator and betterproto 2.0.0b7's make of the .proto file."""
    into = tmp_path_factory.mktemp("generated")
    (into / "betterproto").mkdir()
    (into / "protoc").mkdir()
    plugin = Path(sys.executable).with_name("protoc-gen-python_betterproto")
    assert plugin.exists(), "betterproto[compiler]==2.0.0b7 is part of the dev dependencies"
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO)),
            *(f"--plugin={plugin}", f"--python_betterproto_out={into / 'betterproto'}"),
            *(f"--python_out={into / 'protoc'}", "sandbox/sync/v1/sync.proto"),
        ],
        check=True,
        capture_output=True,
    )
    return into


@pytest.fixture(scope="session")
def former(generated: Path) -> Iterator[Peer]:
    """betterproto 2.0.0b7, with code from its own compiler."""
    name = "betterproto_of_the_tests"
    yield Peer("betterproto", load(name, generated / "betterproto" / "sandbox" / "sync" / "v1" / "__init__.py"))
    del sys.modules[name]


@pytest.fixture(scope="session")
def protobuf(generated: Path) -> Iterator[Peer]:
    """protoc's own classes. They live in the default descriptor pool, ours in one of their own."""
    name = "sync_pb2_of_the_tests"
    yield ProtobufPeer("protobuf", load(name, generated / "protoc" / "sandbox" / "sync" / "v1" / "sync_pb2.py"))
    del sys.modules[name]


@pytest.fixture(scope="session")
def peers(ours: Peer, betterproto2_alone: Peer, former: Peer, protobuf: Peer) -> list[Peer]:
    return [ours, betterproto2_alone, former, protobuf]

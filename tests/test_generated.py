"""The generated code is what the .proto file says, and the .proto file keeps its promises to the peers that came before
this project (semantics.md, "Wire")."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import betterproto2
import pytest
from google.protobuf import descriptor_pb2

from trio_federation.pb.sandbox.sync.v1 import (
    ClusterOrigin,
    EnvCapacity,
    FederationBroadcast,
    FederationServiceBase,
    FederationServiceStub,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
)

ROOT = Path(__file__).resolve().parent.parent
Field = descriptor_pb2.FieldDescriptorProto
MESSAGES: tuple[type[betterproto2.Message], ...] = (
    ClusterOrigin,
    EnvCapacity,
    FederationBroadcast,
    ReportFederationRequest,
    ReportFederationResponse,
    WatchFederationRequest,
)

#: what the existing hub and workers speak: message, field, number, type, repeated
FIXED = [
    ("EnvCapacity", "cluster_id", 1, Field.TYPE_STRING, False),
    ("EnvCapacity", "namespace", 2, Field.TYPE_STRING, False),
    ("EnvCapacity", "env_name", 3, Field.TYPE_STRING, False),
    ("EnvCapacity", "scaling_group", 4, Field.TYPE_STRING, False),
    ("EnvCapacity", "idle", 5, Field.TYPE_INT32, False),
    ("EnvCapacity", "running", 6, Field.TYPE_INT32, False),
    ("EnvCapacity", "pending", 7, Field.TYPE_INT32, False),
    ("EnvCapacity", "desired", 8, Field.TYPE_INT32, False),
    ("EnvCapacity", "capacity", 9, Field.TYPE_INT32, False),
    ("EnvCapacity", "saturated_for", 10, Field.TYPE_INT32, False),
    ("EnvCapacity", "observed_for_ms", 11, Field.TYPE_INT64, False),
    ("EnvCapacity", "member_pool", 12, Field.TYPE_STRING, False),
    ("EnvCapacity", "autoscaling_enabled", 13, Field.TYPE_BOOL, False),
    ("ReportFederationRequest", "items", 1, Field.TYPE_MESSAGE, True),
    ("FederationBroadcast", "items", 1, Field.TYPE_MESSAGE, True),
]
#: the messages of before; one that is missing here is an addition of this project, whose numbers are its own affair
FORMER = {
    "EnvCapacity",
    "ReportFederationRequest",
    "ReportFederationResponse",
    "WatchFederationRequest",
    "FederationBroadcast",
}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorProto:
    """What protoc itself makes of the .proto file, without any code of betterproto2's."""
    into = tmp_path_factory.mktemp("described") / "set"
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto")),
            *(f"--descriptor_set_out={into}", "sandbox/sync/v1/sync.proto"),
        ],
        check=True,
    )
    files = descriptor_pb2.FileDescriptorSet.FromString(into.read_bytes()).file
    assert len(files) == 1
    return files[0]


def run_generator(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`scripts/generate.py` as `make` calls it."""
    command = [sys.executable, str(root / "scripts" / "generate.py"), *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


def test_the_generated_code_is_current() -> None:
    ran = run_generator("--check")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A repo with the parts that the generator touches, free to be changed."""
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copytree(ROOT / "trio_federation" / "pb", tmp_path / "trio_federation" / "pb")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


def test_code_that_is_not_current_is_told_and_made_so(copied: Path) -> None:
    proto = copied / "proto" / "sandbox" / "sync" / "v1" / "sync.proto"
    proto.write_text(proto.read_text() + "\nmessage Newcomer {\n  string name = 1;\n}\n")
    (copied / "trio_federation" / "pb" / "leftover.py").touch()

    ran = run_generator("--check", root=copied)
    assert ran.returncode == 1
    assert "+class Newcomer(betterproto2.Message):" in ran.stdout
    assert "leftover.py: not generated any more" in ran.stdout
    assert "make generate" in ran.stdout

    assert run_generator(root=copied).returncode == 0
    assert run_generator("--check", root=copied).returncode == 0
    assert not (copied / "trio_federation" / "pb" / "leftover.py").exists()


def test_a_broken_proto_file_fails_and_leaves_the_code_alone(copied: Path) -> None:
    (copied / "proto" / "sandbox" / "sync" / "v1" / "sync.proto").write_text("not a proto file\n")
    ran = run_generator(root=copied)
    assert ran.returncode == 1
    assert "sync.proto:1:1" in ran.stderr
    assert (copied / "trio_federation" / "pb" / "sandbox" / "sync" / "v1" / "__init__.py").exists()


def test_names_numbers_and_types_of_before_are_kept(described: descriptor_pb2.FileDescriptorProto) -> None:
    found = [
        (message.name, field.name, field.number, field.type, field.label == Field.LABEL_REPEATED)
        for message in described.message_type
        for field in message.field
        if message.name in FORMER and field.number < 100
    ]
    assert described.package == "sandbox.sync.v1"
    assert sorted(found) == sorted(FIXED)
    assert {message.name for message in described.message_type} >= FORMER


def test_items_are_env_capacities(described: descriptor_pb2.FileDescriptorProto) -> None:
    kinds = {
        message.name: field.type_name
        for message in described.message_type
        for field in message.field
        if field.name == "items"
    }
    wanted = ".sandbox.sync.v1.EnvCapacity"
    assert kinds == {"ReportFederationRequest": wanted, "FederationBroadcast": wanted}


def test_the_service_is_the_one_of_before(described: descriptor_pb2.FileDescriptorProto) -> None:
    assert [service.name for service in described.service] == ["FederationService"]
    methods = {
        method.name: (method.input_type, method.client_streaming, method.output_type, method.server_streaming)
        for method in described.service[0].method
    }
    prefix = ".sandbox.sync.v1."
    assert methods == {
        "ReportFederation": (f"{prefix}ReportFederationRequest", True, f"{prefix}ReportFederationResponse", False),
        "WatchFederation": (f"{prefix}WatchFederationRequest", False, f"{prefix}FederationBroadcast", True),
    }


def test_stub_and_service_base_name_the_methods() -> None:
    paths = {f"/sandbox.sync.v1.FederationService/{name}" for name in ("ReportFederation", "WatchFederation")}
    assert set(FederationServiceBase().__mapping__()) == paths
    assert callable(FederationServiceStub.report_federation)
    assert callable(FederationServiceStub.watch_federation)


def test_embedded_descriptors_are_those_of_the_proto_file(described: descriptor_pb2.FileDescriptorProto) -> None:
    wanted = {message.name: message for message in described.message_type}
    assert wanted.keys() == {message.__name__ for message in MESSAGES}
    for message in MESSAGES:
        embedded = descriptor_pb2.DescriptorProto()
        message.DESCRIPTOR.CopyToProto(embedded)  # type: ignore[attr-defined]
        # json_name is derived from the name, and one of the two compilers spells it out
        for field in (*embedded.field, *wanted[message.__name__].field):
            field.ClearField("json_name")
        assert embedded == wanted[message.__name__]

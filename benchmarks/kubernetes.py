"""What reading capacity from a Kubernetes API costs: a list of SandboxEnvs, from the first byte to rows, and the events
of a watch, on a real API server; beside json.loads with dicts, and beside the official client."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.children import BenchmarkError, Child, running_module
from benchmarks.measure import Figure, compared
from tests.apiserver.build import BuildError, NoToolchain, programs, required
from tests.apiserver.cluster import ApiServer, started

ENVS, QUICK_ENVS = 10_000, 300
EVENTS, QUICK_EVENTS = 5_000, 500
#: bytes of an annotation that nobody reads
PADDING = 20_000
WRITERS = 6
ROOT = "/apis/agents.navix.sh/v1alpha1"
CRDS = Path(__file__).resolve().parent.parent / "config" / "kubernetes" / "crd"
WAYS = ("ours", "json", "official")
NAMES = {"json": "json.loads and dicts", "official": "the official client"}


def run(*, quick: bool = False) -> list[Figure]:
    """Seconds, CPU and memory of lists, and CPU of events."""
    envs, events = (QUICK_ENVS, QUICK_EVENTS) if quick else (ENVS, EVENTS)
    with api_server(quick=quick) as server:
        if server is None:
            return []
        plain = make_envs(server, "plain", envs)
        padded = make_envs(server, "padded", envs // 5, {"padding": "x" * PADDING})
        figures = _lists(server, plain, envs)
        figures += _memory(server, padded, envs // 5)
        figures += _watch(server, plain, envs, events)
    return figures


@contextmanager
def api_server(*, quick: bool) -> Iterator[ApiServer | None]:
    """A server that knows SandboxEnvs; None where it cannot be built, and nobody minds. Raises BenchmarkError where it
    cannot, and somebody does."""
    try:
        built = programs(os.environ, lambda line: print(f"  {line}", file=sys.stderr))
    except NoToolchain as error:
        if not quick or required(os.environ):
            raise BenchmarkError(str(error)) from error
        print(f"  left out: {error}", file=sys.stderr)  # to see that benchmarks run, where this one cannot
        yield None
        return
    except BuildError as error:
        raise BenchmarkError(str(error)) from error
    with tempfile.TemporaryDirectory() as folder, started(ApiServer(built, Path(folder))) as server:
        server.create_crds(path for path in CRDS.glob("*.yaml") if path.name != "kustomization.yaml")
        yield server


def _members(number: int) -> list[dict[str, object]]:
    return [
        {
            "name": f"pool-{member}",
            "scalingGroup": f"group-{member % 2}",
            "idleCount": number % 7,
            "runningCount": 10,
            "desiredReplicas": 12,
            "pendingRequests": 0,
            "autoscalingEnabled": True,
            "scaleUpHeadroom": 5,
            "state": "Active",
        }
        for member in range(3)
    ]


def _status(number: int) -> dict[str, object]:
    return {
        "idleReplicas": 3,
        "runningReplicas": 30,
        "clusters": [{"clusterID": "west", "isLocal": True, "observedMembers": _members(number)}],
    }


def make_envs(server: ApiServer, prefix: str, count: int, annotations: dict[str, str] | None = None) -> str:
    """Make a namespace with so many envs; its name."""
    print(f"  {count:,} SandboxEnvs ({prefix})", file=sys.stderr)
    namespace = server.namespace(prefix)
    path = f"{ROOT}/namespaces/{namespace}/sandboxenvs"

    def make(number: int) -> None:
        env: dict[str, Any] = {
            "apiVersion": "agents.navix.sh/v1alpha1",
            "kind": "SandboxEnv",
            "metadata": {"name": f"env-{number:05}", "annotations": annotations or {}},
            "spec": {"clusters": [{"clusterID": "west", "members": [{"name": f"pool-{each}"} for each in range(3)]}]},
        }
        made = server.call("POST", path, env)
        server.call("PUT", f"{path}/env-{number:05}/status", made | {"status": _status(number)})

    with ThreadPoolExecutor(WRITERS) as writers:
        for _ in writers.map(make, range(count)):
            pass
    return namespace


@contextmanager
def _readers(server: ApiServer, namespace: str, ways: Sequence[str] = WAYS) -> Iterator[dict[str, Child]]:
    with ExitStack() as children:
        found: dict[str, Child] = {}
        for way in ways:
            arguments = (way, str(server.kubeconfig), namespace)
            name = f"the reader {way}"
            found[way] = children.enter_context(running_module("kubernetes_readers", *arguments, name=name))
            found[way].hear(ready=True)
        yield found


def _listed(reader: Child, rows: int) -> dict[str, Any]:
    reader.tell(do="list")
    found = reader.hear(done=True)
    if found["rows"] != rows:
        raise BenchmarkError(f"{reader.name} found {found['rows']} rows, and there are {rows}")
    return found


def _lists(server: ApiServer, namespace: str, envs: int) -> list[Figure]:
    print("  lists", file=sys.stderr)
    results: dict[str, dict[str, Any]] = {}
    for way in WAYS:  # each in a process that has read nothing before: its peak is that of one list
        with _readers(server, namespace, [way]) as readers:
            results[way] = _listed(readers[way], 3 * envs)
            again = [_listed(readers[way], 3 * envs) for _ in range(2)]
            for key in ("seconds", "cpu"):
                results[way][key] = min(each[key] for each in [results[way], *again])
    ours = results["ours"]
    objects = f"{envs:,} objects"
    return [
        figure
        for other in ("json", "official")
        for theirs, name in ((results[other], NAMES[other]),)
        for figure in (
            compared(f"list of {objects}", 1000 * ours["seconds"], "ms", 1000 * theirs["seconds"], name),
            compared("list, CPU per object", 1e6 * ours["cpu"] / envs, "µs", 1e6 * theirs["cpu"] / envs, name),
            compared("list, memory kept per object", ours["kept"] / envs, "B", theirs["kept"] / envs, name),
            compared("list, peak memory per object", ours["peak"] / envs, "B", theirs["peak"] / envs, name),
        )
    ]


def _memory(server: ApiServer, namespace: str, envs: int) -> list[Figure]:
    print("  larger objects", file=sys.stderr)
    peaks = {}
    for way in WAYS:
        with _readers(server, namespace, [way]) as readers:
            peaks[way] = _listed(readers[way], 3 * envs)
    what = f"{envs:,} objects of {PADDING // 1000 + 2} kB"
    return [
        compared(
            f"{what}, {kind} per object", peaks["ours"][key] / envs, "B", peaks[other][key] / envs, NAMES[other]
        )
        for key, kind in (("kept", "memory kept"), ("peak", "peak memory"))
        for other in ("json", "official")
    ]  # fmt: skip


def _watch(server: ApiServer, namespace: str, envs: int, events: int) -> list[Figure]:
    """All of them watch the same events at the same time."""
    print("  watches", file=sys.stderr)
    path = f"{ROOT}/namespaces/{namespace}/sandboxenvs"

    def change(number: int) -> None:
        patch = {"status": {"clusters": _status(number + 1)["clusters"]}}
        name = f"env-{number % envs:05}"
        answer = server.admin.patch(
            f"{path}/{name}/status", json=patch, headers={"Content-Type": "application/merge-patch+json"}
        )
        answer.raise_for_status()

    with _readers(server, namespace) as readers, ThreadPoolExecutor(WRITERS) as writers:
        for reader in readers.values():
            _listed(reader, 3 * envs)
            reader.tell(do="watch", events=events)
            reader.hear(opened=True)
        for _ in writers.map(change, range(events)):
            pass
        used = {way: reader.hear(done=True)["cpu"] for way, reader in readers.items()}
    return [
        compared(
            f"watch, CPU per event ({other})",
            1e6 * used["ours"] / events, "µs", 1e6 * used[other] / events, NAMES[other],
        )
        for other in ("json", "official")
    ] + [Figure("watch, events per second of CPU", events / used["ours"], "/s")]  # fmt: skip

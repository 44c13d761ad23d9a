"""Kubernetes sources and a sink for trio-federation: the capacity of a cluster as its API server tells it, and the view
of the fleet written back there. This module holds the hooks. The way of the data is client, informer (which asks what
its reflector decides), decoding, mapper, store, source; and the way back sink, mirror (all envs), mirrored (one),
segments, client. Each is a room of its own. Only the public contract of `trio_federation` is used."""

from __future__ import annotations

from typing import Any

from trio_federation import (
    CapacitySink,
    CapacitySource,
    SinkContext,
    SinkType,
    SourceContext,
    SourceType,
    hookimpl,
)
from trio_federation_kubernetes.options import (
    CrdOptions,
    KubernetesOptions,
    SandboxSetOptions,
    StatusOptions,
    WarmPoolOptions,
)


def _kubernetes(options: KubernetesOptions, context: SourceContext) -> CapacitySource:
    # Imported when first used: HTTP and TLS take longer to load than everything that `--version` or `check` needs.
    from trio_federation_kubernetes.sandboxenv import SandboxEnvMapper
    from trio_federation_kubernetes.source import KubernetesSource

    return KubernetesSource(options, context, SandboxEnvMapper(context.cluster_id))


def _warmpool(options: WarmPoolOptions, context: SourceContext) -> CapacitySource:
    from trio_federation_kubernetes.source import KubernetesSource
    from trio_federation_kubernetes.warmpool import WarmPoolMapper

    return KubernetesSource(options, context, WarmPoolMapper(context.cluster_id, claims=options.claims))


def _sandboxset(options: SandboxSetOptions, context: SourceContext) -> CapacitySource:
    from trio_federation_kubernetes.sandboxset import SandboxSetMapper
    from trio_federation_kubernetes.source import KubernetesSource

    return KubernetesSource(options, context, SandboxSetMapper(context.cluster_id))


def _crd(options: CrdOptions, context: SourceContext) -> CapacitySource:
    from trio_federation_kubernetes.source import TableSource

    return TableSource(options, context)


def _status(options: StatusOptions, context: SinkContext) -> CapacitySink:
    from trio_federation_kubernetes.sink import KubernetesStatusSink

    return KubernetesStatusSink(options, context)


TYPES = (
    SourceType("kubernetes", KubernetesOptions, _kubernetes, "SandboxEnv objects (agents.navix.sh) of a cluster"),
    SourceType("warmpool", WarmPoolOptions, _warmpool, "SandboxWarmPool objects (agent-sandbox) and their claims"),
    SourceType("sandboxset", SandboxSetOptions, _sandboxset, "SandboxSet objects (OpenKruise)"),
    SourceType("crd", CrdOptions, _crd, "any pool-like resource, by a table of paths"),
)


SINK_TYPES = (
    SinkType("kubernetes-status", StatusOptions, _status, "the view of other clusters in the status of SandboxEnvs"),
)


@hookimpl
def capacity_sources() -> list[SourceType[Any]]:
    """The source types of this plugin."""
    return list(TYPES)


@hookimpl
def capacity_sinks() -> list[SinkType[Any]]:
    """The sink types of this plugin."""
    return list(SINK_TYPES)

"""What a SandboxSet of OpenKruise comes to: which fields of it are read, and the one row that they make. Pure. A value
that does not fit (`Misfit`) goes into the record as it is, so that the agent's own check drops that record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trio_federation import Capacity
from trio_federation_kubernetes.decoding import Decoder, reach
from trio_federation_kubernetes.mapping import Watched
from trio_federation_kubernetes.resources import Key, Resource, Row

SANDBOXSETS = Resource("agents.kruise.io", "v1alpha1", "sandboxsets")


class TemplateReference(msgspec.Struct, frozen=True, gc=False):
    """Names the template that the sandboxes are made from."""

    name: str | None = None


class Spec(msgspec.Struct, frozen=True, gc=False):
    """What is wanted."""

    replicas: int | None = None
    templateRef: TemplateReference | None = None


class Status(msgspec.Struct, frozen=True, gc=False):
    """What there is."""

    availableReplicas: int | None = None


class SandboxSet(msgspec.Struct, frozen=True, gc=False):
    """What is read of a SandboxSet."""

    spec: Spec | None = None
    status: Status | None = None


class SandboxSetMapper:
    """The rows of SandboxSets; see `mapping.Mapper`."""

    def __init__(self, cluster_id: str) -> None:
        self.watched: tuple[Watched, ...] = (Watched(SANDBOXSETS, Decoder(SandboxSet)),)
        self._cluster_id = cluster_id
        self._rows: dict[Key, Row] = {}

    def take(self, index: int, key: Key, object: SandboxSet | None) -> Sequence[Key]:
        """A SandboxSet is now this, or is gone. It owns its row, so its own key is what may have changed."""
        if object is None:
            return (key,) if self._rows.pop(key, None) is not None else ()
        self._rows[key] = _row(self._cluster_id, key, object)
        return (key,)

    def rows(self, owner: Key) -> Sequence[Row]:
        """The one row of a SandboxSet."""
        row = self._rows.get(owner)
        return () if row is None else (row,)


def _row(cluster_id: str, key: Key, found: SandboxSet) -> Row:
    """The row of one set. Its status does not tell what runs and what waits.

    spec.replicas counts the unused sandboxes that the set keeps, and status.availableReplicas those of them that can be
    claimed now: `desired` and `idle`. status.replicas is, by its description, the sum of what is being created, is
    available, runs and is paused; controllers that count only the first two are in use. By neither reading can what
    runs be told from what is being created, so nothing is reported as running. What is being created is no request that
    waits, so nothing is reported as pending. Neither decides where a create goes.

    A set with a template of its own has no templateRef, and is an env by itself."""
    namespace, name = key
    return Row(
        Capacity(
            cluster_id,
            namespace,
            reach(found, "spec", "templateRef", "name") or name,
            name,
            idle=reach(found, "status", "availableReplicas") or 0,
            desired=reach(found, "spec", "replicas") or 0,
        )
    )

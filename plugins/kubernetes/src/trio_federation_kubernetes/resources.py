"""The small types that the rooms of this plugin hand to each other: which resource is meant, which object of it, and
what a record of capacity is before the clock has been looked at. No rules and no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from trio_federation import Capacity

#: (namespace, name) of an object
Key: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Resource:
    """A namespaced resource of the Kubernetes API."""

    #: the API group, "" for the core group
    group: str
    version: str
    #: the plural, lower-case name: what stands in paths and in rules of RBAC
    plural: str

    def __str__(self) -> str:
        """As in RBAC and kubectl: "sandboxenvs.agents.navix.sh"."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None = None) -> str:
        """Where its objects are listed and watched: in one namespace, or (None) in all of them."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/{self.plural}" if namespace is None else f"{root}/namespaces/{namespace}/{self.plural}"


class Row(NamedTuple):
    """What an object says of one pool, before it is known how long ago."""

    #: `observed_at` None, and `saturated_for` 0
    record: Capacity
    #: Unix seconds, on the API server's clock, until which the pool cannot grow; None where nothing is said
    saturated_until: float | None = None

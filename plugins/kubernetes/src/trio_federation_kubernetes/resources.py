"""The small types that the rooms of this plugin hand to each other: which resource is meant, which object of it, and
what a record of capacity is before the clock has been looked at. No I/O, and no rules but those of names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from trio_federation import Capacity

#: (namespace, name) of an object
Key: TypeAlias = tuple[str, str]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def is_namespace(name: str) -> bool:
    """Whether a namespace can have this name: a lower-case RFC 1123 label of at most 63 characters."""
    return _LABEL.fullmatch(name) is not None


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

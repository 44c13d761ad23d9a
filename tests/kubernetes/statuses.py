"""For the tests of the rooms behind the sink: records of other clusters, drawn or made, and the statuses of envs as an
API server keeps them in memory, with all their states, so that any of them can be seen late. What the server makes of
a write is `fake_apply.py`'s."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from tests.kubernetes import fake_apply
from tests.kubernetes.fake_api import sandboxenvs
from tests.kubernetes.fake_apply import Json, Refused
from trio_federation import Capacity
from trio_federation_kubernetes.decoding import Decoder
from trio_federation_kubernetes.errors import ApiError
from trio_federation_kubernetes.mirrored import Write
from trio_federation_kubernetes.ownership import FIELD_MANAGER
from trio_federation_kubernetes.resources import Key
from trio_federation_kubernetes.segments import ALL_FIELDS, Env, body

KEY: Key = ("team-a", "small")
#: what has to be added to a test's clock for the server's
OFFSET = 1_000_000.0

SCHEMA: Json = sandboxenvs()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
_DECODER: Decoder[Env] = Decoder(Env)

# --- records


def record(cluster: str, idle: int = 1, at: float = 0.0, *, pool: str = "p", key: Key = KEY, **values: Any) -> Capacity:
    """What another cluster has of an env."""
    return Capacity(cluster, *key, pool, idle=idle, observed_at=at, **values)


COUNTS = st.sampled_from([0, 0, 1, 2, 3, 40, 2**31 - 1])
_MOMENTS = st.sampled_from([0.0, 1.0, 7, 1e300, -1e300, -3.5]) | st.floats(0, 1e6)


#: the clusters that records are drawn of
CLUSTERS = ("east", "north", "south")
_ONE = st.builds(
    Capacity,
    st.sampled_from(CLUSTERS),
    *map(st.just, KEY),
    st.sampled_from(["", "", "a", "b-1", "b.c", "z"]),
    st.sampled_from(["", "gpu", "grün \N{SNOWMAN}", "\N{GRINNING FACE}", "null", "a: b", '"']),
    idle=COUNTS,
    running=COUNTS,
    pending=COUNTS,
    desired=COUNTS,
    autoscaling_enabled=st.booleans(),
    capacity=st.sampled_from([-1, 0, 1, 7, 2**31 - 1]),
    saturated_for=st.sampled_from([0.0, 0.0, 0.1, 30.0, 2.0**31 - 1]),
    state=st.sampled_from(["", "Active", "Saturated"]),
    observed_at=_MOMENTS,
)


def _unshadowed(records: list[Capacity]) -> list[Capacity]:
    exact = {record.cluster_id for record in records if record.member_pool}
    found = [record for record in records if record.member_pool or record.cluster_id not in exact]
    return sorted(found, key=lambda record: record.sort_key)


#: Records of one env, as a snapshot has them: of each cluster its pools, or else its sums.
RECORDS: st.SearchStrategy[list[Capacity]] = st.lists(_ONE, max_size=5, unique_by=lambda record: record.identity).map(
    _unshadowed
)


# --- statuses


def seen(found: Mapping[str, Any]) -> Env:
    """An object as the sink reads it."""
    return _DECODER.single(json.dumps(found, ensure_ascii=False).encode())


def stamp(moment: float) -> str:
    """A moment as the server writes it."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Server:
    """The envs of a cluster, whose controller keeps an entry of its own, "west". `clock`: its own time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._version = 100
        self.objects: dict[Key, Json] = {}
        #: what has happened, with what a watch tells of it; None: deleted
        self.history: list[tuple[Key, Env | None]] = []

    def create(self, key: Key = KEY) -> None:
        """A new env, with what the controller says of it."""
        self._version += 1
        bare: Json = {
            "apiVersion": "agents.navix.sh/v1alpha1",
            "kind": "SandboxEnv",
            "metadata": {"name": key[1], "namespace": key[0], "uid": f"uid-{self._version}"},
        }
        local = {"clusters": [{"clusterID": "west", "isLocal": True}]}
        self._keep(key, fake_apply.update(SCHEMA, bare, {"status": local}, "controller", now=self._now(), created=True))

    def delete(self, key: Key = KEY) -> None:
        """It is no more."""
        self._version += 1
        del self.objects[key]
        self.history.append((key, None))

    def write(self, write: Write, manager: str = FIELD_MANAGER) -> Env:
        """Take a write of ours. Raises ApiError."""
        applied = body(write.key, write.shown, ALL_FIELDS, OFFSET, summary=write.summary)
        return self.apply(json.loads(applied), manager, key=write.key)

    def apply(self, applied: Json, manager: str, *, force: bool = False, key: Key = KEY) -> Env:
        """Somebody applies this. Raises ApiError."""
        return self._do(
            key, lambda found: fake_apply.apply(SCHEMA, found, applied, manager, now=self._now(), force=force)
        )

    def merge(self, status: Json, manager: str = "controller", *, key: Key = KEY) -> Env:
        """Somebody patches the status. Raises ApiError."""
        return self._do(
            key, lambda found: fake_apply.merge_patch(SCHEMA, found, {"status": status}, manager, now=self._now())
        )

    def seen(self, key: Key = KEY) -> Env:
        """How it is now."""
        return seen(self.objects[key])

    def clusters(self, key: Key = KEY) -> list[Json]:
        """What stands in status.clusters; copies."""
        found: list[Json] = json.loads(json.dumps(self.objects[key].get("status", {}).get("clusters") or []))
        return found

    def entry(self, cluster: str, key: Key = KEY) -> Json | None:
        """What stands there of a cluster."""
        return next((entry for entry in self.clusters(key) if entry["clusterID"] == cluster), None)

    def has_ours(self, key: Key = KEY) -> set[str]:
        """The clusters in whose entries anything is ours."""
        return {
            json.loads(path[2][2:])["clusterID"]
            for owner, owned in fake_apply.owners_of(self.objects[key]).items()
            if owner.name == FIELD_MANAGER
            for path in owned.paths
            if path[:2] == ("f:status", "f:clusters") and len(path) > 2
        }

    def _now(self) -> str:
        return stamp(self._clock() + OFFSET)

    def _do(self, key: Key, change: Callable[[Json], Json]) -> Env:
        found = self.objects.get(key)
        if found is None:
            raise ApiError("not found", code=404, status_reason="NotFound", message="not found")
        try:
            new = change(found)
        except Refused as error:
            raise ApiError(
                str(error), code=error.code, status_reason=error.reason, message=error.message, causes=error.causes
            ) from error
        if new is not found:
            self._version += 1
            self._keep(key, new)
        return self.seen(key)

    def _keep(self, key: Key, new: Json) -> None:
        self.objects[key] = {**new, "metadata": {**new["metadata"], "resourceVersion": str(self._version)}}
        self.history.append((key, self.seen(key)))

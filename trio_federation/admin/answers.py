"""What the HTTP side asks of the process that it belongs to, as functions that are handed in. How an answer is found is
the business of those rooms; how it is asked for and written down is in `app.py` and `api.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trio_federation.registry import Registry
from trio_federation.reservations import Outcome
from trio_federation.router import Placed, Placement


class Place(Protocol):
    """Where a create should go, as `Router.place` answers it."""

    def __call__(
        self,
        namespace: str,
        env_name: str,
        group: str = "",
        *,
        reserve: bool = True,
        not_these: Sequence[str] = (),
        forwarded: bool = False,
    ) -> Placement:
        """`reserve` False only asks; `not_these`: targets that this create was turned away from; `forwarded`: it came
        from another cluster already."""
        ...


def _alive() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Answers:
    """Where the answers come from. Every function is called in Trio's thread, and must neither block nor wait for
    anything outside of this process: a probe is answered from memory, whatever hangs."""

    #: Prometheus' text format, in pieces. It is closed early where the client goes away. Where it raises before the
    #: first piece, the scrape is answered with 500; later, the connection breaks, so that nobody takes a part for all.
    exposition: Callable[[], AsyncIterator[bytes]]
    #: what `/readyz` says, made of what JSON can say; "ready", a bool, decides between 200 and 503
    readiness: Callable[[], dict[str, Any]]
    #: whether `/healthz` says "ok" or 503
    healthy: Callable[[], bool] = _alive
    #: what this cluster knows; None: this process runs no agent
    registry: Registry | None = None
    #: where a create should go; None: this process runs no agent
    place: Place | None = None
    #: a placement of the past that reserved, by its id; None where it is not remembered. Needs `registry`, whose clock
    #: tells how long ago it was. None: this process runs no agent
    placed: Callable[[str], Placed | None] | None = None
    #: takes what became of a placement, by its id, and gives the outcome that counts, the first that was reported; None
    #: where the placement is not remembered. None: this process runs no agent
    report_outcome: Callable[[str, Outcome], Outcome | None] | None = None

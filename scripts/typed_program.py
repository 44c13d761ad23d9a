"""A program of somebody else's, for the type checker and never run: .ci/run checks it against the installed wheels, as
strictly as mypy can. It passes only if they bring their types, and if the three mistakes at its end are seen."""

from __future__ import annotations

from typing import assert_type

from trio_federation import Capacity, ForeignMember, Placement, Registry, Router, rollup

registry = Registry("west")
registry.upsert([Capacity("east", "agents", "python", "pool", idle=3)])
assert_type(registry.snapshot(), list[Capacity])
assert_type(registry.best_foreign_member("agents", "python"), ForeignMember | None)
assert_type(rollup(registry.snapshot()), list[Capacity])

placement = Router(registry).place("agents", "python")
assert_type(placement, Placement)
assert_type(placement.target, str | None)

Capacity("west", "agents", "python", idle="many")  # type: ignore[arg-type]
registry.best_foreign_member("agents")  # type: ignore[call-arg]
placement.reason = "it may not be changed"  # type: ignore[misc]

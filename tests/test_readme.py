"""The README's Python works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trio_federation.plugins import PluginManager

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


def execute(block: str) -> dict[str, Any]:
    """Run a block as a module of its own."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, str(README), "exec", dont_inherit=True), names)  # noqa: S102 - our own README
    return names


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == 2


def test_the_registry_and_the_router(capsys: pytest.CaptureFixture[str]) -> None:
    """Its assertions hold, and it prints why."""
    execute(BLOCKS[0])
    assert capsys.readouterr().out.splitlines() == [
        "west has none idle for agents/python; east::pool-b has 4 idle",
        "east::pool-b chosen",
        "north::pool-c nothing idle, east::pool-b has",
    ]


def test_the_source_is_a_plugin() -> None:
    """The manager takes it without a complaint, and offers its type."""
    names = execute(BLOCKS[1])
    module = type("Plugin", (), {"capacity_sources": staticmethod(names["capacity_sources"])})
    manager = PluginManager()
    manager.register(module, "readme")
    assert not manager.failures
    assert list(manager.source_types) == ["constant"]

"""A dict that fails the test when it is gone through from end to end, or asked for what is none of a question's
business: how tests show what an answer costs, without a stopwatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn


class Guarded(dict[Any, Any]):
    """A copy of `real` that answers only for `allowed` keys (None: for all), and for one key at a time."""

    def __init__(self, real: dict[Any, Any], allowed: frozenset[Any] | None = None) -> None:
        super().__init__(real)
        self._allowed = allowed

    def _check(self, key: object) -> None:
        assert self._allowed is None or key in self._allowed, f"touched {key}"

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def _refuse(self) -> NoReturn:
        raise AssertionError("gone through from end to end")

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def keys(self) -> Any:
        self._refuse()

    def values(self) -> Any:
        self._refuse()

    def items(self) -> Any:
        self._refuse()

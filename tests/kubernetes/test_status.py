"""Status objects are read alike wherever they come from, and whatever is in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kubernetes.json_texts import JSON, Verbatim, dump, nested
from trio_federation_kubernetes.status import Status, phrase
from trio_federation_kubernetes.texts import LONGEST_WORDS

WHOLE: dict[str, Any] = {
    "kind": "Status",
    "metadata": {"continue": "t2"},
    "code": 410,
    "reason": "Expired",
    "message": "The provided continue parameter is too old\nto display",
    "details": {"causes": [{"reason": "ResourceVersionTooLarge"}, {"reason": ""}, {}, 5], "retryAfterSeconds": 3},
}


def text(value: object) -> str:
    return dump(value).decode("utf-8", "replace")


def test_all_that_is_said() -> None:
    expected = Status(
        410, "Expired", "The provided continue parameter is too old to display", 3.0, "t2", ("ResourceVersionTooLarge",)
    )
    assert Status.of_answer(text(WHOLE), "application/json") == Status.of_event(text(WHOLE)) == expected
    error = expected.error("text")
    assert str(error) == "text"
    for name in ("code", "message", "retry_after", "continue_token", "causes"):
        assert getattr(error, name) == getattr(expected, name)
    assert error.status_reason == "Expired"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(["code", "reason", "message", "details"], JSON),
            "metadata": JSON | st.fixed_dictionaries({"continue": JSON}),
        },
    ),
    JSON,
    JSON,
)
def test_whatever_is_in_one_it_is_read_alike(found: dict[str, Any], causes: object, wait: object) -> None:
    for status in (found, {**found, "details": {"causes": causes, "retryAfterSeconds": wait}}):
        read = Status.of_event(text(status))
        assert read == Status.of_answer(text({**status, "kind": "Status"}), "")
        assert 0 <= read.code <= 999
        assert read.retry_after is None or read.retry_after >= 0
        for line in (read.reason, read.message, *read.causes):
            assert line.isprintable()
            assert len(line) <= LONGEST_WORDS


@pytest.mark.parametrize("odd", [5, "x", None, [], True, Verbatim("1e400"), Verbatim("9" * 5000), nested(50)])
@pytest.mark.parametrize("field", ["metadata", "reason", "message", "details"])
def test_a_field_that_is_none_costs_no_other(field: str, odd: object) -> None:
    read = Status.of_event(text({**WHOLE, field: odd}))
    assert read.code == 410
    assert (read.continue_token == "t2") is (field != "metadata")
    assert (read.causes != ()) is (field != "details")


def test_what_is_no_status() -> None:
    for nothing in ("", "null", "[]", "5", "{", text(nested(50_000)), '{"message": "x"}'):
        assert Status.of_answer(nothing, "application/json") == Status()
    for nothing in ("", "null", "[]", text(nested(50_000)), '{"code": -1, "details": {"retryAfterSeconds": -1}}'):
        assert Status.of_event(nothing) == Status()
    assert Status.of_answer("no healthy\nupstream", "text/plain; charset=utf-8") == Status(
        message="no healthy upstream"
    )


def test_the_phrase_of_a_code() -> None:
    assert phrase(404) == "Not Found"
    assert phrase(0) == phrase(799) == ""

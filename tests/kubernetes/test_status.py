"""Status objects are read alike wherever they come from, and whatever is in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kubernetes.json_texts import JSON, Verbatim, dump, nested
from trio_federation_kubernetes.errors import Cause
from trio_federation_kubernetes.status import Status, phrase
from trio_federation_kubernetes.texts import LONGEST_WORDS

WHOLE: dict[str, Any] = {
    "kind": "Status",
    "metadata": {"continue": "t2"},
    "code": 410,
    "reason": "Expired",
    "message": "The provided continue parameter is too old\nto display",
    "details": {
        "causes": [
            {"reason": "ResourceVersionTooLarge"},
            {"reason": "FieldManagerConflict", "field": ".a.b", "message": 'conflict\nwith "x"'},
            {"reason": ""},
            {},
            5,
        ],
        "retryAfterSeconds": 3,
    },
}


def text(value: object) -> str:
    return dump(value).decode("utf-8", "replace")


def test_all_that_is_said() -> None:
    expected = Status(
        410,
        "Expired",
        "The provided continue parameter is too old to display",
        3.0,
        "t2",
        (Cause("ResourceVersionTooLarge"), Cause("FieldManagerConflict", ".a.b", 'conflict with "x"')),
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
        for line in (read.reason, read.message, *(part for cause in read.causes for part in cause)):
            assert line.isprintable()
            assert len(line) <= LONGEST_WORDS


@pytest.mark.parametrize("odd", [5, "x", None, [], True, Verbatim("1e400"), Verbatim("9" * 5000), nested(50)])
@pytest.mark.parametrize("field", ["metadata", "reason", "message", "details"])
def test_a_field_that_is_none_costs_no_other(field: str, odd: object) -> None:
    read = Status.of_event(text({**WHOLE, field: odd}))
    assert read.code == 410
    assert (read.continue_token == "t2") is (field != "metadata")
    assert (read.causes != ()) is (field != "details")


def test_of_an_odd_cause_what_can_be_read() -> None:
    causes = [
        {"reason": "A", "field": None, "message": ["x"]},
        {"reason": 5, "field": ".f", "message": Verbatim("1e400")},
        {"reason": nested(50), "field": {}, "message": "m"},
        {"reason": None, "field": 5},
        None,
        [{"reason": "A"}],
        5,
        "A",
    ]
    read = Status.of_event(text({"details": {"causes": causes}}))
    assert read.causes == (Cause("A"), Cause(field=".f"), Cause(message="m"))


@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(Cause._fields, JSON)) | JSON, max_size=20))
def test_no_cause_costs_another(odd: list[object]) -> None:
    good = Cause("FieldManagerConflict", ".a", "m")
    read = Status.of_event(text({"details": {"causes": [good._asdict(), *odd, good._asdict()]}}))
    assert read.causes[0] == read.causes[-1] == good
    assert 2 <= len(read.causes) <= 2 + len(odd)


def test_there_are_not_too_many_causes() -> None:
    causes = [{"field": f".f{number}"} for number in range(3000)]
    read = Status.of_event(text({"details": {"causes": causes}}))
    assert [cause.field for cause in read.causes] == [f".f{number}" for number in range(1000)]


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

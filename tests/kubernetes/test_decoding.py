"""Pages and events are decoded into what is read of them, and nothing that anybody may have written into an object
costs more than its own value: not the page, not the watch, not the memory."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kubernetes.json_texts import JSON, NO_COUNT, NO_OBJECT, NO_TEXT, Verbatim, dump, listed, nested
from trio_federation_kubernetes.decoding import Decoder, Event, Misfit, Page, reach
from trio_federation_kubernetes.errors import AnswerError, ApiError, Cause


class Part(msgspec.Struct):
    name: str | None = None
    count: int | None = None


class Status(msgspec.Struct, rename="camel"):
    free_now: int | None = None
    parts: list[Part] | None = None
    labels: dict[str, int] = {}


class Pool(msgspec.Struct):
    status: Status | None = None


def pool(name: object = "p1", namespace: object = "default", **rest: object) -> dict[str, object]:
    return {"metadata": {"name": name, "namespace": namespace, "resourceVersion": "7"}, **rest}


def one(body: bytes) -> Pool:
    ((_, found),) = Decoder(Pool).page(body).objects
    return found


# --- pages


def test_a_page_is_its_version_the_token_of_the_next_one_and_the_fields_that_are_read() -> None:
    status = {"freeNow": 3, "parts": [{"name": "a", "count": 1, "unknown": {}}], "labels": {"x": 2}, "more": [1]}
    decoder = Decoder(Pool)
    page = decoder.page(
        listed(pool(status=status), pool("p2", "other", spec={}), resourceVersion="300", **{"continue": "t1"})
    )
    assert page == Page(
        "300",
        "t1",
        [(("default", "p1"), Pool(Status(3, [Part("a", 1)], {"x": 2}))), (("other", "p2"), Pool())],
    )
    assert decoder.unreadable == 0


@pytest.mark.parametrize("token", [None, ""])
def test_an_empty_token_is_none(token: str | None) -> None:
    assert Decoder(Pool).page(listed(**{"continue": token})).continue_token == ""
    assert Decoder(Pool).page(listed()).continue_token == ""


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"resourceVersion": "1"}, "items": None},
        {"metadata": {"resourceVersion": "1"}, "items": []},
        {"metadata": {"resourceVersion": "1"}},
    ],
)
def test_no_items_are_an_empty_list(body: object) -> None:
    assert Decoder(Pool).page(dump(body)) == Page("1", "", [])


def test_a_list_without_metadata_has_no_version() -> None:
    assert Decoder(Pool).page(b'{"items":[]}') == Page("", "", [])
    assert Decoder(Pool).page(b'{"items":null,"metadata":null}') == Page("", "", [])


NO_LISTS = [
    b"",
    b"null",
    b"[]",
    b'"secret"',
    b"<html>secret</html>",
    b'{"items":[{"secret":1}',
    b'{"items":[]}{"secret":1}',
    b"\xef\xbb\xbf{}",
    b"{}",
    b'{"kind":"Status","status":"Failure","message":"secret"}',
    b'{"items":{"secret":1}}',
    b'{"items":"secret"}',
    # a page whose token cannot be read would pass for the last one
    b'{"items":[],"metadata":{"resourceVersion":"1","continue":["secret"]}}',
    b'{"items":[],"metadata":"secret"}',
    b'{"items":' + b"[" * 5000,
]


@pytest.mark.parametrize("body", NO_LISTS)
def test_what_is_no_list_is_an_error_that_shows_the_place_but_not_the_content(body: bytes) -> None:
    with pytest.raises(AnswerError) as caught:
        Decoder(Pool).page(body)
    text = str(caught.value)
    assert "secret" not in text
    assert f"{len(body)} bytes" in text
    assert len(text) < 300
    assert "\n" not in text


def test_objects_without_a_readable_name_and_namespace_are_left_out_and_counted() -> None:
    decoder = Decoder(Pool)
    bad: list[Any] = [
        pool(None),
        pool(""),
        pool(5),
        pool(namespace=None),
        pool(namespace=""),
        pool(namespace=["default"]),
        pool(Verbatim('"\udcff"')),
        {"metadata": None},
        {"metadata": []},
        {},
        None,
        5,
        "p1",
        [],
    ]
    page = decoder.page(listed(pool("a"), *bad, pool("b")))
    assert [key for key, _ in page.objects] == [("default", "a"), ("default", "b")]
    assert decoder.unreadable == len(bad)


def test_those_without_one_are_counted_by_the_fast_way_too() -> None:
    decoder = Decoder(Pool)
    assert decoder.page(listed({}, pool("a"), pool(""))).objects == [(("default", "a"), Pool())]
    assert decoder.unreadable == 2


STATUS = st.fixed_dictionaries(
    {},
    optional={
        "freeNow": st.none() | st.integers(),
        "parts": st.none()
        | st.lists(
            st.fixed_dictionaries({}, optional={"name": st.none() | st.text(), "count": st.none() | st.integers()}),
            max_size=3,
        ),
        "labels": st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
        "unread": JSON,
    },
)
POOLS = st.lists(
    st.builds(
        pool, st.text(min_size=1, max_size=5), st.sampled_from(["a", "b"]), status=st.none() | STATUS, unread=JSON
    ),
    max_size=4,
)


@given(POOLS)
def test_both_ways_of_decoding_agree_on_what_is_good(pools: list[object]) -> None:
    fast = Decoder(Pool)
    slow = Decoder(Pool)
    bad = pool("bad", status=5)
    assert slow.page(listed(*pools, bad)).objects[:-1] == fast.page(listed(*pools)).objects
    assert fast.unreadable == slow.unreadable
    # and on each by itself, when something beside it is bad
    for each in pools:
        assert isinstance(each, dict)
        if isinstance(each["status"], dict):
            ((_, good),) = fast.page(listed(each)).objects
            ((_, other),) = slow.page(listed(each | {"status": each["status"] | {"freeNow": "500m"}})).objects
            assert other.status is not None
            assert good.status is not None
            assert isinstance(other.status.free_now, Misfit)
            assert (other.status.parts, other.status.labels) == (good.status.parts, good.status.labels)


@given(NO_COUNT.filter(lambda value: type(value) is not int))
def test_a_value_that_does_not_fit_is_kept_as_a_misfit_and_costs_nothing_else(value: object) -> None:
    parts = [{"name": "a", "count": value}, {"name": "b", "count": 2}]
    page = Decoder(Pool).page(
        listed(pool("x", status={"freeNow": 1, "parts": parts}), pool("y", status={"freeNow": 5}))
    )
    (_, x), (_, y) = page.objects
    assert y == Pool(Status(5))
    assert x.status is not None
    assert x.status.parts is not None
    assert x.status.free_now == 1
    assert x.status.parts[1] == Part("b", 2)
    kept: Any = x.status.parts[0].count
    assert isinstance(kept, Misfit)
    assert x.status.parts[0].name == "a"
    assert len(kept.text) <= 80
    assert repr(kept) == kept.text
    hash(kept)


@given(NO_OBJECT)
def test_a_container_of_the_wrong_type_is_a_misfit(value: object) -> None:
    assert isinstance(one(listed(pool(status=value))).status, Misfit)
    found = one(listed(pool(status={"parts": [value, {"count": 1}], "labels": {"a": 1, "b": value}})))
    parts: Any = reach(found, "status", "parts")
    assert isinstance(parts[0], Misfit)
    assert parts[1] == Part(None, 1)


@given(NO_TEXT)
def test_what_is_no_text_does_not_become_one(value: object) -> None:
    parts = reach(one(listed(pool(status={"parts": [{"name": value}]}))), "status", "parts")
    assert isinstance(parts[0].name, Misfit)


def test_a_misfit_shows_the_json_and_is_equal_to_no_value() -> None:
    shown = {
        "500m": '"500m"',
        Verbatim("true"): "true",
        Verbatim("1e400"): "1e400",
        Verbatim("[1,\n 2]"): "[1, 2]",
        Verbatim('"\udcff"'): '"\N{REPLACEMENT CHARACTER}"',
        "x" * 500: '"' + "x" * 78 + "…",
        "é" * 500: '"' + "é" * 78 + "…",
        Verbatim("9" * 5000): "9" * 79 + "…",
        Verbatim("[1," + " " * 5000 + "2]"): "[1,…",
        "\N{LINE SEPARATOR}": '" "',
        "\x85": '" "',
        "\N{RIGHT-TO-LEFT OVERRIDE}": '" "',
    }
    for value, text in shown.items():
        kept: Any = reach(one(listed(pool(status={"freeNow": value}))), "status", "free_now")
        assert kept == Misfit(text)
    # True is equal to 1, and a change from one to the other would not be seen
    assert reach(one(listed(pool(status={"freeNow": True}))), "status", "free_now") not in (1, True)


def test_big_whole_numbers_are_values_like_others() -> None:
    assert one(listed(pool(status={"freeNow": 10**300}))) == Pool(Status(10**300))


def test_of_a_key_that_comes_twice_the_last_one_counts_in_both_ways() -> None:
    good = Verbatim('{"metadata":{"name":"p1","namespace":"a"},"status":{"freeNow":1,"freeNow":2}}')
    assert one(listed(good)) == Pool(Status(2))
    first_bad = Verbatim('{"metadata":{"name":"p1","namespace":"a"},"status":{"freeNow":"x","freeNow":2}}')
    assert one(listed(first_bad)) == Pool(Status(2))
    last_bad = Verbatim('{"metadata":{"name":"p1","namespace":"a"},"status":{"freeNow":2,"freeNow":"x"}}')
    assert one(listed(last_bad)).status == Status(Misfit('"x"'))  # type: ignore[arg-type]


def test_separators_that_are_no_newline_are_characters() -> None:
    note = "a\N{LINE SEPARATOR}b\x85c\N{PARAGRAPH SEPARATOR}"
    found = pool(status={"parts": [{"name": note}]})
    found["metadata"]["annotations"] = {"note": note}  # type: ignore[index]
    body = listed(found)
    assert "\N{LINE SEPARATOR}".encode() in body
    assert one(body) == Pool(Status(parts=[Part(note)]))


def test_what_is_not_read_may_be_anything() -> None:
    for odd in (Verbatim("1e400"), Verbatim('"\udcff"'), Verbatim("9" * 5000)):
        decoder = Decoder(Pool)
        found = decoder.page(listed(pool(status={"freeNow": 1, "unread": odd}, unread=odd), odd=odd))
        assert found.objects == [(("default", "p1"), Pool(Status(1)))]


TRICKY = Verbatim(r'{"a":"x\"[[[{","b":"]\\"}')


@pytest.mark.parametrize("depth", [2000, 100_000])
def test_an_object_that_is_nested_too_deep_costs_neither_the_others_nor_itself(depth: int) -> None:
    deep = pool("deep", unread=[TRICKY, nested(depth), TRICKY], status={"freeNow": 2})
    found = Decoder(Pool).page(listed(pool("a", status={"freeNow": 1}), deep, pool("b", unread=TRICKY)))
    assert found.objects == [
        (("default", "a"), Pool(Status(1))),
        (("default", "deep"), Pool(Status(2))),
        (("default", "b"), Pool()),
    ]
    deep = pool("deep", status={"freeNow": nested(depth), "parts": [{"count": 1}]})
    (_, first), (_, second) = Decoder(Pool).page(listed(deep, pool("b", status={"freeNow": 1}))).objects
    assert isinstance(reach(first, "status", "free_now"), Misfit)
    assert reach(first, "status", "parts") == [Part(None, 1)]
    assert second == Pool(Status(1))


def test_a_bad_value_before_one_that_is_nested_too_deep() -> None:
    found = Decoder(Pool).page(listed(pool("a", status={"freeNow": "x"}), pool("b", unread=nested(3000))))
    assert [key for key, _ in found.objects] == [("default", "a"), ("default", "b")]


@given(JSON)
def test_any_json_is_a_page_or_an_answer_error(value: object) -> None:
    for body in (dump(value), dump({"items": value}), dump({"items": [value]}), dump({"metadata": value, "items": []})):
        try:
            page = Decoder(Pool).page(body)
        except AnswerError:
            continue
        assert isinstance(page.objects, list)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_page_or_an_answer_error(body: bytes) -> None:
    for each in (body, b'{"items":[' + body + b"]}"):
        try:
            Decoder(Pool).page(each)
        except AnswerError:
            continue


def test_namespaces_are_kept_once() -> None:
    (first, _), (second, _) = (
        Decoder(Pool).page(listed(pool("a", "some-namespace"), pool("b", "some-namespace"))).objects
    )
    assert first[0] is second[0]


@pytest.mark.parametrize("spoilt", [False, True])
def test_of_a_page_only_what_is_read_is_kept(spoilt: bool) -> None:
    def large(number: int) -> dict[str, object]:
        status = {
            "freeNow": "x" * 100_000 if spoilt else number,
            "parts": [{"name": f"part-{number}", "count": number}],
        }
        found = pool(f"p{number}", status=status)
        found["metadata"]["managedFields"] = [{"fieldsV1": "f" * 100_000}]  # type: ignore[index]
        return found

    decoder = Decoder(Pool)
    decoder.page(listed(large(0)))
    count = 30
    tracemalloc.start()
    try:
        body = listed(*map(large, range(count)))
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        kept = decoder.page(body)
        del body
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept.objects) == count
    freed = before - after
    # the body is gone, and what remains of each object is far from the 100 kB that it was
    assert freed > count * (100_000 - 1_500)


# --- events


def event(kind: object, value: object) -> bytes:
    return dump({"type": kind, "object": value})


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
@pytest.mark.parametrize("free", [4, "500m"])
def test_an_event_carries_an_object_with_its_key_and_its_version(kind: str, free: object) -> None:
    found = Decoder(Pool).event(event(kind, pool(status={"freeNow": free})))
    fits: Any = 4 if free == 4 else Misfit('"500m"')
    assert found == Event(kind, ("default", "p1"), "7", Pool(Status(fits)))


def test_a_bookmark_carries_a_version_only() -> None:
    line = event("BOOKMARK", {"kind": "Pool", "metadata": {"resourceVersion": "350", "creationTimestamp": None}})
    assert Decoder(Pool).event(line) == Event("BOOKMARK", resource_version="350")
    # and nothing else in it is looked at
    line = event("BOOKMARK", {"metadata": {"resourceVersion": "350", "name": 5}, "status": 5})
    assert Decoder(Pool).event(line) == Event("BOOKMARK", resource_version="350")
    odds: list[object] = [None, 5, [], {}, {"metadata": None}, {"metadata": {"resourceVersion": 350}}]
    for odd in odds:
        assert Decoder(Pool).event(event("BOOKMARK", odd)) == Event("BOOKMARK")


@pytest.mark.parametrize("kind", ["PAUSED", "", "added"])
def test_an_event_of_an_unknown_type_carries_nothing(kind: str) -> None:
    decoder = Decoder(Pool)
    for value in (pool(), pool(status=5), None, 5):
        assert decoder.event(event(kind, value)) == Event(kind)
    assert decoder.unreadable == 0


def test_an_event_without_a_type_is_of_none() -> None:
    for line in (b"{}", event(None, pool()), event(5, pool()), event(["ADDED"], pool())):
        assert Decoder(Pool).event(line) == Event("")


def test_an_object_that_cannot_be_read_is_counted_and_leaves_the_type() -> None:
    decoder = Decoder(Pool)
    odd: list[object] = [None, 5, [], {}, pool(5), pool(namespace=""), {"metadata": nested(3000)}]
    for value in odd:
        assert decoder.event(event("ADDED", value)) == Event("ADDED")
    assert decoder.event(b'{"type":"DELETED"}') == Event("DELETED")
    assert decoder.unreadable == len(odd) + 1


def test_an_event_that_is_nested_too_deep_is_an_event() -> None:
    line = event("MODIFIED", pool(status={"freeNow": 1}, unread=[TRICKY, nested(50_000)]))
    assert Decoder(Pool).event(line) == Event("MODIFIED", ("default", "p1"), "7", Pool(Status(1)))


def error_of(status: object) -> ApiError:
    found = Decoder(Pool).event(event("ERROR", status))
    assert found[:4] == ("ERROR", None, "", None)
    assert found.error is not None
    return found.error


def test_an_error_event_says_what_its_status_says() -> None:
    error = error_of(
        {
            "kind": "Status",
            "status": "Failure",
            "code": 504,
            "reason": "Timeout",
            "message": "Too large resource version:\n 99, current: 5",
            "metadata": {"continue": "t2"},
            "details": {"causes": [{"reason": "ResourceVersionTooLarge", "message": "…"}], "retryAfterSeconds": 1},
        }
    )
    assert (error.code, error.status_reason, error.retry_after) == (504, "Timeout", 1)
    assert error.message == "Too large resource version: 99, current: 5"
    assert (error.causes, error.continue_token) == ((Cause("ResourceVersionTooLarge", message="…"),), "t2")
    assert str(error) == "the API server ended the watch: Too large resource version: 99, current: 5 (code 504)"


def test_an_error_event_of_an_expired_version() -> None:
    error = error_of({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"})
    assert (error.code, error.reason, error.status_reason) == (410, "expired", "Expired")
    # nothing but the code has to be there, and nothing beside it to be in order
    assert error_of({"code": 410}).code == 410
    odd: dict[str, object] = {
        "code": 410,
        "reason": 5,
        "message": [],
        "details": {"causes": [5, {"reason": 5}, {"reason": "A"}]},
    }
    assert (error_of(odd).code, error_of(odd).causes) == (410, (Cause("A"),))


@pytest.mark.parametrize("code", [None, "410", 410.5, True, -1, 1000, 10**30, Verbatim("1e400")])
def test_a_code_that_is_none_is_0(code: object) -> None:
    assert error_of({"code": code}).code == 0


@pytest.mark.parametrize("seconds", [None, "5", -1, True, Verbatim("1e400"), [], 1.5, 0, 10**400])
def test_the_wait_is_a_number_of_seconds_or_not_said(seconds: object) -> None:
    expected = seconds if seconds in (1.5, 0) and seconds is not False else None
    assert error_of({"code": 429, "details": {"retryAfterSeconds": seconds}}).retry_after == expected


def test_the_words_of_an_error_are_cut() -> None:
    error = error_of({"code": 500, "message": "x" * 100_000, "reason": "y" * 100_000})
    assert len(str(error)) < 700
    assert len(error.message) == len(error.status_reason) == 500


@pytest.mark.parametrize("line", [b"", b"null", b"[]", b"5", b'{"type":"ADDED"', b"secret", b'"secret"', b"[" * 5000])
def test_a_line_that_is_no_object_is_an_error_without_the_content(line: bytes) -> None:
    with pytest.raises(AnswerError) as caught:
        Decoder(Pool).event(line)
    assert "secret" not in str(caught.value)
    assert f"{len(line)} bytes" in str(caught.value)


@given(st.sampled_from(["ADDED", "DELETED", "BOOKMARK", "ERROR", "OTHER"]) | JSON, JSON)
def test_any_object_is_an_event(kind: object, value: object) -> None:
    found = Decoder(Pool).event(event(kind, value))
    assert found.type == (kind if isinstance(kind, str) and not isinstance(kind, Verbatim) else "")
    assert (found.error is not None) == (found.type == "ERROR")


@given(st.dictionaries(st.sampled_from(["code", "reason", "message", "details", "metadata"]), JSON), JSON, JSON)
def test_any_status_is_an_error(status: dict[str, object], causes: object, wait: object) -> None:
    assert isinstance(error_of(status), ApiError)
    error = error_of({**status, "details": {"causes": causes, "retryAfterSeconds": wait}})
    assert error.retry_after is None or error.retry_after >= 0
    assert all(isinstance(cause, Cause) for cause in error.causes)


# --- structs


class Labelled(msgspec.Struct, frozen=True, kw_only=True):
    class Metadata(msgspec.Struct, frozen=True):
        labels: dict[str, str] | None = None
        name: str = ""

    status: Status = msgspec.field(default_factory=Status)
    metadata: Metadata | None = None


@pytest.mark.parametrize("free", [1, "x"])
def test_a_struct_may_read_metadata_too_and_be_frozen_and_by_keyword_only(free: object) -> None:
    found = pool(status={"freeNow": free, "labels": {"x": 1}})
    found["metadata"]["labels"] = {"team": "a"}  # type: ignore[index]
    ((key, labelled),) = Decoder(Labelled).page(listed(found)).objects
    assert type(labelled) is Labelled
    assert key == ("default", "p1")
    assert labelled.metadata is not None
    assert (labelled.metadata.labels, labelled.metadata.name) == ({"team": "a"}, "p1")
    assert labelled.status.labels == {"x": 1}


def test_bad_metadata_that_is_read_costs_only_itself() -> None:
    found = pool(status={"freeNow": 1})
    found["metadata"]["labels"] = {"team": 5, "zone": "z"}  # type: ignore[index]
    ((_, labelled),) = Decoder(Labelled).page(listed(found)).objects
    assert labelled.status == Status(1)
    assert reach(labelled, "metadata", "labels") == {"team": Misfit("5"), "zone": "z"}


class Required(msgspec.Struct):
    spec: int


class Inside(msgspec.Struct):
    required: Required | None = None


class Untyped(msgspec.Struct):
    metadata: Any = None


@pytest.mark.parametrize("struct", [Required, Inside, Untyped])
def test_structs_that_cannot_work_are_refused(struct: type[msgspec.Struct]) -> None:
    with pytest.raises(TypeError, match=r"'(spec|metadata)'"):
        Decoder(struct)


def test_reach_goes_as_far_as_it_can() -> None:
    found = Pool(Status(3))
    assert reach(found, "status", "free_now") == 3
    assert reach(found, "status", "parts", "anything") is None
    assert reach(Pool(), "status", "free_now") is None
    misfit = Misfit("5")
    assert reach(misfit, "status") is misfit


def test_a_page_of_many_objects_is_decoded_alike_by_both_ways() -> None:
    pools = [pool(f"p{number}", status={"freeNow": number}) for number in range(600)]
    fast, slow = (
        Decoder(Pool).page(listed(*pools)),
        Decoder(Pool).page(listed(*pools, pool("odd", status=json.loads("5")))),
    )
    assert slow.objects[:-1] == fast.objects


# --- one object


def test_the_answer_to_a_write_is_one_object() -> None:
    body = dump(pool(status={"freeNow": 3, "parts": [{"name": 5}]}))
    status = Decoder(Pool).single(body).status
    assert status is not None
    assert status.free_now == 3
    assert [repr(part.name) for part in status.parts or ()] == ["5"]


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"<html>secret</html>", b"{}", b'{"kind":"Status","message":"secret"}', b'"secret"']
)
def test_what_is_no_object_is_an_error_that_shows_none_of_the_content(body: bytes) -> None:
    with pytest.raises(AnswerError) as caught:
        Decoder(Pool).single(body)
    assert "secret" not in str(caught.value)
    assert "see what answers at its address" in str(caught.value)

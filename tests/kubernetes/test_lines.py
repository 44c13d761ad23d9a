"""A watch's bytes cut into lines, whatever the chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation_kubernetes.errors import AnswerError
from trio_federation_kubernetes.lines import Lines


def cut(chunks: Iterable[bytes], lines: Lines | None = None) -> list[bytes]:
    """All lines of a stream that ends well."""
    lines = lines or Lines()
    found = [line for chunk in chunks for line in lines.feed(chunk)]
    assert lines.finish() == b""
    return found


def chunked(whole: bytes, at: Iterable[int]) -> list[bytes]:
    """The same bytes, cut at those places."""
    places = [0, *sorted(place % (len(whole) + 1) for place in at), len(whole)]
    return [whole[begin:end] for begin, end in pairwise(places)]


#: what is found in the wild, and would be an end of a line for str.splitlines or bytes.splitlines
AWKWARD = "é\u2028\u2029\u0085\x0b\x0c\x1c\r"


@given(
    st.lists(st.text(st.characters(codec="utf-8") | st.sampled_from(AWKWARD))),
    st.lists(st.integers(0)),
    st.sampled_from((b"\n", b"\r\n", b"\n\n", b"\r\n\n")),
)
def test_only_a_line_feed_ends_an_event_wherever_chunks_do(texts: list[str], at: list[int], end: bytes) -> None:
    events = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in texts]
    assert cut(chunked(b"".join(event + end for event in events), at)) == events


@given(st.binary(), st.lists(st.integers(0)), st.binary().filter(lambda rest: b"\n" not in rest))
def test_what_comes_out_does_not_depend_on_the_chunks(whole: bytes, at: list[int], rest: bytes) -> None:
    lines = Lines()
    found = [line for chunk in chunked(whole + b"\n" + rest, at) for line in lines.feed(chunk)]
    assert found == [line for part in whole.split(b"\n") if (line := part.removesuffix(b"\r"))]
    assert lines.finish() == rest
    assert lines.finish() == b"", "it is given once"


def test_a_character_split_between_its_bytes_stays_whole() -> None:
    assert cut([b'"\xc3', b'\xa9"\n']) == ['"é"'.encode()]


def test_two_events_in_a_chunk_and_one_over_three() -> None:
    assert cut([b'{"a":1}\n{"b":2}\n{"c"', b":", b"3}\n"]) == [b'{"a":1}', b'{"b":2}', b'{"c":3}']


def test_a_large_event_byte_by_byte_costs_what_its_bytes_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in bytes that are handled, not in seconds: adding a byte must not copy what is there already."""
    copied = 0

    class Counted(bytearray):
        def __bytes__(self) -> bytes:
            nonlocal copied
            copied += len(self)
            return bytes(memoryview(self))

        def __add__(self, other: object) -> Counted:
            nonlocal copied
            copied += len(self)
            return Counted(super().__add__(other))  # type: ignore[operator]

    monkeypatch.setattr("trio_federation_kubernetes.lines.bytearray", Counted, raising=False)
    event = json.dumps({"text": "é" * 35_000}, ensure_ascii=False).encode()
    assert cut(bytes([byte]) for byte in event + b"\n") == [event]
    assert copied == len(event), "once, when the line is complete"


@pytest.mark.parametrize("chunks", [[b"123456"], [b"123", b"456"], [b"123456\n"], [b"1\n123456"], [b"1\n123456\n2"]])
def test_a_line_that_is_too_long_is_an_error_and_not_kept(chunks: list[bytes]) -> None:
    with pytest.raises(AnswerError, match="more than 5 bytes"):
        cut(chunks, Lines(most=5))


def test_a_line_of_just_the_most_is_taken() -> None:
    assert cut([b"12345\n", b"123", b"45\n12345\n"], Lines(most=5)) == [b"12345"] * 3


def test_many_lines_in_a_chunk_may_be_longer_than_one() -> None:
    assert cut([b"1234\n" * 100], Lines(most=5)) == [b"1234"] * 100


def test_a_cut_event_is_no_line() -> None:
    lines = Lines()
    assert lines.feed(b'{"a":1}\n{"b"') == [b'{"a":1}']
    assert lines.finish() == b'{"b"'
    assert lines.feed(b":2}\n") == [b":2}"], "nothing of it is left for the next"

"""Answers in gzip are unpacked whatever chunks they come in, a bounded piece at a time, and no part passes for all."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation_kubernetes.unpacking import LARGEST_PIECE, Unpacker


def pieces_of(packed: bytes, size: int) -> list[bytes]:
    """What comes of an answer in chunks of that size."""
    unpacker = Unpacker.of("gzip")
    assert unpacker is not None
    pieces = []
    for start in range(0, len(packed), size):
        unpacker.feed(packed[start : start + size])
        while piece := unpacker.piece():
            pieces.append(piece)
    unpacker.finish()
    return pieces


@given(st.binary(max_size=300), st.integers(1, 50))
def test_chunks_may_be_cut_anywhere(body: bytes, size: int) -> None:
    packed = gzip.compress(body)
    assert b"".join(pieces_of(packed, size)) == body
    for cut in range(1, len(packed)):
        with pytest.raises(zlib.error, match="ends too early"):
            pieces_of(packed[:cut], size)


@pytest.mark.parametrize("size", [7, 10_000])
def test_a_small_chunk_that_holds_much_is_unpacked_in_pieces(size: int) -> None:
    pieces = pieces_of(gzip.compress(bytes(3 * LARGEST_PIECE + 5)), size)
    assert sum(map(len, pieces)) == 3 * LARGEST_PIECE + 5
    assert max(map(len, pieces)) <= LARGEST_PIECE


def test_encodings() -> None:
    for plain in ("", "identity", " Identity "):
        assert Unpacker.of(plain) is None
    for packed in ("gzip", "x-gzip", " GZIP"):
        assert Unpacker.of(packed) is not None
    with pytest.raises(zlib.error, match="its encoding is 'br'"):
        Unpacker.of("br")


def test_nothing_at_all_is_an_empty_answer() -> None:
    assert pieces_of(b"", 1) == []

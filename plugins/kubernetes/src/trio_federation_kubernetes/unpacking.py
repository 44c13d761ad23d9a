"""Unpacks answers, in bounded pieces. Pure. The HTTP library would do so by itself, but any amount at a time, and where
it fails it leaves what it reads through to the garbage collector. What is asked for, and how much is too much, is
`client.py`'s business."""

from __future__ import annotations

import zlib

#: how much is unpacked at a time, in bytes
LARGEST_PIECE = 2**20


class Unpacker:
    """Unpacks one answer in gzip. Where an answer cannot be, zlib.error is raised."""

    def __init__(self) -> None:
        self._gzip = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        self._packed = b""
        self._fed = False

    @classmethod
    def of(cls, encoding: str) -> Unpacker | None:
        """The one for a Content-Encoding; None where nothing is packed. Raises zlib.error for one that is not known."""
        encoding = encoding.strip().lower()
        if encoding in ("", "identity"):
            return None
        if encoding not in ("gzip", "x-gzip"):
            raise zlib.error(f"its encoding is {encoding[:20]!r}")
        return cls()

    def feed(self, chunk: bytes) -> None:
        """What has come, after all pieces of the former were taken."""
        self._packed = chunk
        self._fed = True

    def piece(self) -> bytes:
        """The next piece, of at most LARGEST_PIECE bytes; empty where more has to come. Raises zlib.error."""
        if not self._packed:
            return b""
        piece = self._gzip.decompress(self._packed, LARGEST_PIECE)
        self._packed = self._gzip.unconsumed_tail
        return piece

    def finish(self) -> None:
        """That was all. Raises zlib.error where it cannot be; an answer of no bytes at all can."""
        if self._fed and not self._gzip.eof:
            raise zlib.error("it ends too early")

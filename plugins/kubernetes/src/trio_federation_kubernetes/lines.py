"""A watch's bytes cut into lines: one event each, whatever chunks the network makes of them. Only "\\n" ends a line.
JSON writes a line feed inside a string as an escape, so none stands within an event; other characters that some call
line ends (U+2028, U+0085, "\\r") may. Nothing is decoded here: a chunk may end within a character. What a line says is
`decoding.py`'s business."""

from __future__ import annotations

from trio_federation_kubernetes.errors import AnswerError

#: Bytes of the longest line that is taken. The largest object that a cluster's store takes is some megabytes, even
#: where its limits were raised; more is no event, and must not fill the memory.
LONGEST_LINE = 32 * 1024 * 1024


class Lines:
    """Cuts one stream. `most`: bytes of the longest line that it takes, its end not counted.

    The cost is linear in the bytes, even where they come one by one."""

    def __init__(self, most: int = LONGEST_LINE) -> None:
        self._most = most
        # Grows in place: adding to it costs what is added, not what is there.
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that are complete by this chunk, in order, without "\\n" and without a "\\r" before it; empty ones
        are left out.

        Raises AnswerError when a line is longer than `most`, complete or not; the stream is of no use after that."""
        first, *others = chunk.split(b"\n")
        self._rest += first
        self._check(len(self._rest))
        if not others:
            return []
        *whole, last = others
        lines = [bytes(self._rest), *whole]
        for line in (*whole, last):
            self._check(len(line))
        self._rest = bytearray(last)
        return [line for line in (line.removesuffix(b"\r") for line in lines) if line]

    def finish(self) -> bytes:
        """The stream has ended: what came of a line that never did, b"" where the last one was complete. An event that
        was cut off; the next watch brings it again."""
        rest = bytes(self._rest)
        self._rest = bytearray()
        return rest

    def _check(self, length: int) -> None:
        if length > self._most:
            raise AnswerError(
                f"the watch sent a line of more than {self._most} bytes, which is no event of an API server; "
                "see what stands between this agent and the server"
            )

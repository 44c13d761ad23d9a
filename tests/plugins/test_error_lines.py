"""An error in one line: whatever its text holds, the line can be written to any terminal, log and JSON."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation.errors import ConfigurationError, PluginError
from trio_federation.plugins import in_one_line

#: any text, that which is none in UTF-8 and that which moves a terminal's cursor among it
TEXTS = st.text(st.characters(exclude_categories=()) | st.sampled_from("\x1b\x00\x07\x85\u202e\ud800\udfff\ufeff \n"))


@given(TEXTS, st.sampled_from([ValueError, PluginError, ConfigurationError]))
def test_it_is_one_line_that_can_be_written(text: str, kind: type[Exception]) -> None:
    line = in_one_line(kind(text))
    assert line.isprintable()
    line.encode()
    assert in_one_line(ExceptionGroup(text, [kind(text)])).isprintable()


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_what_can_be_read_stays_as_it_is(text: str) -> None:
    assert in_one_line(PluginError(text)) == text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("cannot read " + os.fsdecode(b"/name\xe9"), "ValueError: cannot read /name\ufffd"),
        ("\x1b[2J\x1b[31mall is well", "ValueError: \ufffd[2J\ufffd[31mall is well"),
        ("no\r\n  luck\ttoday", "ValueError: no luck today"),
        ("größe 💥", "ValueError: größe 💥"),
    ],
    ids=["file name", "escapes", "lines", "good"],
)
def test_what_cannot_be_shown_is_shown_as_that(text: str, expected: str) -> None:
    line = in_one_line(ValueError(text))
    assert line == expected
    assert json.loads(json.dumps(line, ensure_ascii=False).encode()) == line

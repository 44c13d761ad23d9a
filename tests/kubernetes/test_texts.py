"""Other people's words in a line of a log: bounded, on one line, and never more than they were."""

from __future__ import annotations

import ast

from hypothesis import given
from hypothesis import strategies as st

from trio_federation_kubernetes.texts import cut, one_line, quoted

#: also what ends a line, or acts on a terminal
texts = st.text() | st.text(alphabet=" \n\r\t\x00\x1b\x85\u2028\u202eaé")


@given(texts, st.integers(1, 30))
def test_a_text_is_cut_where_it_is_too_long_and_only_there(text: str, most: int) -> None:
    found = cut(text, most)
    assert len(found) <= most
    if len(text) <= most:
        assert found == text
    else:
        assert found.endswith("…")
        assert text.startswith(found[:-1])


@given(texts, st.integers(1, 30))
def test_words_are_put_on_one_line(text: str, most: int) -> None:
    found = one_line(text, most)
    assert found.isprintable()
    assert len(found) <= most
    assert found == found.strip()
    # nothing is added, and nothing but blanks and what cannot be printed is lost
    kept = "".join(each for each in text if each.isprintable() and each != " ")
    assert kept.startswith(found.replace(" ", "").removesuffix("…"))
    if len(text) <= most:
        assert found.replace(" ", "") == kept


def test_a_line_without_control_characters_stays_as_it_is() -> None:
    assert one_line("one  two\r\n\x1b[31mthree\x00", 30) == "one two [31mthree"
    assert one_line("größe 5", 30) == "größe 5"


def test_of_a_text_with_many_blanks_as_much_is_shown_as_of_others() -> None:
    assert one_line("a  " * 20, 30) == "a " * 14 + "a…"
    assert one_line("a" + " " * 1000 + "b", 30) == "a…"


@given(texts | st.text(min_size=101, max_size=120))
def test_what_is_quoted_can_be_read_back(text: str) -> None:
    assert quoted(text).isprintable()
    assert ast.literal_eval(quoted(text)) == (text if len(text) <= 100 else f"{text[:99]}…")

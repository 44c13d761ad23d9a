"""Paths into objects: how they are written, and what is said of a wrong one."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trio_federation_kubernetes.paths import LONGEST_PATH, MOST_STEPS, Path, PathError, parse

names = st.text(max_size=6) | st.sampled_from(["spec", "example.com/pool", "a'b", 'a"b', "a\\b", "", " ", "0", "[0]"])
steps = st.lists(names | st.integers(0, 10**9 - 1), min_size=1, max_size=8).map(tuple)
#: texts that are paths, or nearly
texts = st.text(alphabet=".[]'\"\\{}$*ab0-/ é", max_size=12)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("free", ("free",)),
        ("status.free", ("status", "free")),
        ("status.readyReplicas_2-x", ("status", "readyReplicas_2-x")),
        ("metadata.labels['example.com/pool']", ("metadata", "labels", "example.com/pool")),
        ('metadata.labels["example.com/pool"].x', ("metadata", "labels", "example.com/pool", "x")),
        ("a['it\\'s']", ("a", "it's")),
        ("['a.b']", ("a.b",)),
        ("status.pools[0].free", ("status", "pools", 0, "free")),
        ("a[0][12]['']", ("a", 0, 12, "")),
        # as kubectl has them
        (".status.free", ("status", "free")),
        ("$.status.free", ("status", "free")),
        ("$['a.b'].c", ("a.b", "c")),
        ("{.status.free}", ("status", "free")),
        ("{status.free}", ("status", "free")),
        ("{$.status.pools[0]}", ("status", "pools", 0)),
        (r".metadata.labels.example\.com/pool", ("metadata", "labels", "example.com/pool")),
        (r"metadata.labels['example\.com/pool']", ("metadata", "labels", "example.com/pool")),
        ("größe.0", ("größe", "0")),
    ],
)
def test_good_paths(text: str, expected: tuple[str | int, ...]) -> None:
    assert parse(text) == Path(expected)


@pytest.mark.parametrize(
    "text, position, words",
    [
        ("", 1, "expected the name of a field"),
        ("$", 2, "expected the name of a field"),
        (".", 2, "expected the name of a field, got the end"),
        ("{}", 2, "expected the name of a field"),
        ("status.", 8, "got the end"),
        ("status..free", 8, "a search"),
        ("..free", 2, "a search"),
        (".[0]", 2, "expected the name of a field, got '['"),
        ("status.pools[*].free", 14, "a wildcard"),
        ("status.*", 8, "a wildcard"),
        ("status.pools[?(@.name=='a')].free", 14, "a filter"),
        ("status.pools[0:2]", 15, "a slice"),
        ("status.pools[:2]", 14, "a slice"),
        ("status.pools[0,1]", 15, "a choice"),
        ("status.pools[-1]", 14, "from the end of a list"),
        ("status.pools[]", 14, "a number or a name in quotes"),
        ("status.pools[x]", 14, "a number or a name in quotes, got 'x'"),
        ("status.pools[0", 15, 'expected "]", got the end'),
        ("status.pools[1234567890]", 14, "at most 9 digits"),
        ("status.pools[0]free", 16, 'expected ".", "[" or the end, got \'f\''),
        ("labels['example.com", 8, "has no end"),
        ("labels['a'x]", 11, 'expected "]"'),
        ("labels.a\\", 10, "after the backslash"),
        (" status", 1, "a space around"),
        ("status\n", 7, "a space around"),
        ("status free", 7, "cannot stand in a bare name"),
        ("status.a'b'", 9, "cannot stand in a bare name"),
        ("{.status.free", 14, 'expected "}"'),
        ("{.a}{.b}", 4, "cannot stand in a bare name"),
        ("$status", 2, 'expected "." after "$"'),
        ("@.status", 1, "expected the name of a field, got '@'"),
    ],
)
def test_the_fault_of_a_path_is_told_with_its_place(text: str, position: int, words: str) -> None:
    with pytest.raises(PathError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"{text!r}, position {position}: ")
    assert words in str(caught.value)


def test_paths_are_bounded() -> None:
    assert len(parse(".a" * MOST_STEPS).steps) == MOST_STEPS
    with pytest.raises(PathError, match=f"more than {MOST_STEPS} steps"):
        parse(".a" * (MOST_STEPS + 1))
    with pytest.raises(PathError, match=f"longer than the {LONGEST_PATH}"):
        parse("a" * (LONGEST_PATH + 1))


@given(steps)
@example(("'", "\\", "'\\'", "\n", "a.b", 0))
def test_every_path_can_be_written_and_read_again(steps: tuple[str | int, ...]) -> None:
    assert parse(str(Path(steps))) == Path(steps)


@given(texts)
def test_a_text_is_a_path_with_one_meaning_or_a_fault_in_one_line(text: str) -> None:
    try:
        path = parse(text)
    except PathError as error:
        fault = str(error)
    else:
        assert parse(str(path)) == path
        return
    assert fault.isprintable()

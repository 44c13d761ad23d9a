"""The nearest valid name, and every fault of a table at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from trio_federation.suggest import did_you_mean, every_fault, nearest


@pytest.mark.parametrize(
    "word, valid, found",
    [
        ("adress", ["address", "bind"], "address"),
        ("registy", ["hub", "registry"], "registry"),
        ("PATH", ["path", "seed"], "path"),
        ("member-pool", ["member_pool", "member"], "member_pool"),
        ("zzz", ["path", "seed"], None),
        ("", ["path"], None),
        ("path", [], None),
    ],
)
def test_nearest(word: str, valid: list[str], found: str | None) -> None:
    assert nearest(word, valid) == found


names = st.lists(st.text("abcde_-", min_size=1, max_size=6), max_size=6)


@given(names, st.randoms(use_true_random=False), st.text("abcde_-", max_size=6))
def test_nearest_is_one_of_the_valid_names_whatever_their_order(valid: list[str], random: Any, word: str) -> None:
    found = nearest(word, valid)
    shuffled = list(valid)
    random.shuffle(shuffled)
    assert nearest(word, shuffled) == found
    assert found is None or found in valid


@given(names.filter(bool), st.data())
def test_a_name_that_is_valid_but_for_its_case_is_found(valid: list[str], data: st.DataObject) -> None:
    word = data.draw(st.sampled_from(valid))
    found = nearest(word.upper(), valid)
    assert found is not None
    assert found.replace("-", "_") == word.replace("-", "_")


def test_the_end_of_a_message() -> None:
    assert did_you_mean("pth", ["path"]) == '; did you mean "path"?'
    assert did_you_mean("zzz", ["path"]) == ""
    assert did_you_mean("zzz", ["path"], "; valid: path") == "; valid: path"


Short = Annotated[str, Meta(max_length=3, description="at most three letters")]


class Circle(Struct, tag="circle", tag_field="shape"):
    radius: int


class Box(Struct, tag="box", tag_field="shape"):
    width: int
    height: int = 1

    def __post_init__(self) -> None:
        if self.width < self.height:
            raise ValueError("`width` is Below height")


class Inner(Struct):
    count: Annotated[int, Meta(ge=0)] = 0


class Outer(Struct, rename={"kind": "type"}):
    name: str
    kind: Literal["a", "b"] = "a"
    short: Short | None = None
    limit: int | None = None
    ratio: float = 0.0
    flag: bool = False
    numbers: tuple[int, ...] = ()
    words: tuple[Literal["a", "b"], ...] = ()
    inner: Inner | None = None
    inners: Annotated[list[Inner], Meta(max_length=2)] = []
    shapes: tuple[Circle | Box, ...] | None = None


KEYS = ["name", "type", "short", "limit", "ratio", "flag", "numbers", "words", "inner", "inners", "shapes"]


@pytest.mark.parametrize(
    "value, faults",
    [
        ({"name": "x"}, []),
        ({}, ["t.name: is missing; the table needs it"]),
        ({"name": 1}, ["t.name: expected a string, got a whole number"]),
        ({"name": "x", "nmae": 1}, ['t.nmae: unknown key; did you mean "name"?']),
        (
            {"name": "x", "zz zz": 1},
            [f"t.'zz zz': unknown key; valid here: {', '.join(sorted(KEYS))}"],
        ),
        ({"name": "x", "type": "c"}, ["t.type: expected one of a, b"]),
        ({"name": "x", "type": 3}, ["t.type: expected one of a, b, got a whole number"]),
        ({"name": "x", "words": ["c"]}, ["t.words[0]: expected one of the values that are valid here"]),
        ({"name": "x", "limit": "1"}, ["t.limit: expected a whole number, got a string"]),
        ({"name": "x", "limit": True}, ["t.limit: expected a whole number, got true or false"]),
        ({"name": "x", "ratio": "1"}, ["t.ratio: expected a number, got a string"]),
        ({"name": "x", "short": "long"}, ["t.short: expected at most three letters"]),
        ({"name": "x", "short": 3}, ["t.short: expected at most three letters, got a whole number"]),
        ({"name": "x", "numbers": [1, "2", "3"]}, ["t.numbers[1]: expected a whole number, got a string"]),
        ({"name": "x", "inner": 3}, ["t.inner: expected a table, got a whole number"]),
        ({"name": "x", "inner": {"count": -1}}, ["t.inner.count: expected a whole number >= 0"]),
        ({"name": "x", "inner": {"cuont": 1}}, ['t.inner.cuont: unknown key; did you mean "count"?']),
        (
            {"name": "x", "inners": [{"count": "a"}, {"count": 1}, {"other": 1}]},
            [
                "t.inners[0].count: expected a whole number, got a string",
                "t.inners[2].other: unknown key; valid here: count",
            ],
        ),
        ({"name": "x", "inners": [{}, {}, {}]}, ["t.inners: expected an array of length <= 2"]),
        (
            {"name": "x", "shapes": [{"shape": "cirle"}, {"radius": 1}, 3, {"shape": ["circle"]}]},
            [
                't.shapes[0].shape: is none of box, circle; did you mean "circle"?',
                "t.shapes[1].shape: is missing; write one of box, circle",
                "t.shapes[2]: expected a table, got a whole number",
                't.shapes[3].shape: is none of box, circle; did you mean "circle"?',
            ],
        ),
        # the words of a __post_init__ stay as they are
        ({"name": "x", "shapes": [{"shape": "box", "width": 0}]}, ["t.shapes[0]: `width` is Below height"]),
        # a key that is named otherwise in the Struct than in the file
        ({"name": "x", "kind": "a"}, [f"t.kind: unknown key; valid here: {', '.join(sorted(KEYS))}"]),
        (3, ["t: expected a table, got a whole number"]),
    ],
)
def test_each_fault_is_found_and_named(value: object, faults: list[str]) -> None:
    assert every_fault(value, Outer, "t") == faults


@given(st.permutations([("name", 1), ("limit", "x"), ("inner", {"count": -1, "more": 1}), ("other", 1)]))
def test_all_faults_are_found_at_once(items: list[tuple[str, object]]) -> None:
    places = {fault.partition(":")[0] for fault in every_fault(dict(items), Outer, "t")}
    assert places == {"t.name", "t.limit", "t.inner.count", "t.inner.more", "t.other"}


plain = st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.sampled_from(["a", "x", "circle", "box"])
OTHER_KEYS = ["count", "shape", "radius", "width", "height"]
keys = st.sampled_from([*KEYS, *OTHER_KEYS])
anything = st.recursive(
    plain, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(keys, inside, max_size=4), max_leaves=12
)


class StrictInner(Inner, forbid_unknown_fields=True):
    pass


class StrictCircle(Circle, forbid_unknown_fields=True, tag="circle", tag_field="shape"):
    pass


class StrictBox(Box, forbid_unknown_fields=True, tag="box", tag_field="shape"):
    pass


class Strict(Struct, forbid_unknown_fields=True):
    name: str = ""
    short: Short | None = None
    limit: int | None = None
    numbers: tuple[int, ...] = ()
    inner: StrictInner | None = None
    inners: Annotated[list[StrictInner], Meta(max_length=2)] = []
    shapes: tuple[StrictCircle | StrictBox, ...] | None = None


@given(st.dictionaries(keys, anything))
def test_there_are_faults_exactly_where_msgspec_refuses(value: dict[str, object]) -> None:
    faults = every_fault(value, Strict, "t")
    try:
        msgspec.convert(value, Strict)
    except msgspec.ValidationError:
        assert faults
    else:
        assert faults == []
    assert all(fault.startswith("t") and "\n" not in fault and "`" not in fault.partition(":")[0] for fault in faults)


def test_no_value_is_shown_as_it_may_be_a_secret() -> None:
    value = {"name": ["hunter2"], "limit": "hunter2", "short": "hunter2", "inner": "hunter2", "type": "hunter2"}
    faults = every_fault(value, Outer, "t")
    assert len(faults) == 5
    assert "hunter2" not in "".join(faults)

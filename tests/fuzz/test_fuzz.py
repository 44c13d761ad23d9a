"""Random damage to real inputs, target by target. A few examples in every run, and thousands of new ones in a soak.
What fuzzing has found stays as a file of `corpus/`, and is fed again here each time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.fuzz.inputs import CORPUS, damaged, kept, made
from tests.fuzz.targets import TARGETS, feed_admin, feed_client, feed_config, feed_kubernetes, feed_server, feed_wire

#: Examples in an ordinary run. Each of the slow ones is a hub, an agent or three servers.
EXAMPLES = {"wire": 150, "config": 60, "kubernetes": 60, "server": 30, "client": 30, "admin": 30}
#: So many times that, in a soak.
MORE = 50


def test_every_target_has_its_inputs() -> None:
    assert set(EXAMPLES) == set(TARGETS)
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)


def test_what_is_not_damaged_gets_far() -> None:
    """Or the damage would only be looked at by the first check."""
    assert [feed_wire(data) for data in made("wire")] == [4] * 6 + [6]
    assert [feed_server(data) for data in made("server")] == [1, 0], "and who has said goodbye has withdrawn"
    assert [feed_client(data) for data in made("client")] == [1, 1]
    assert 0 in [feed_config(data) for data in made("config")]
    assert all(feed_kubernetes(data) >= 6 for data in made("kubernetes"))
    # The last answer is that of the port with a token. What is said over HTTP/2 is not looked into.
    last = [feed_admin(data)[-1:] for data in made("admin")]
    assert last == [[200], [200], [200], [200], [200], [400], [101], [403], [200], []]


@pytest.mark.parametrize("target, name", [(target, name) for target in TARGETS for name in kept(target)])
def test_what_was_found_is_found_no_more(target: str, name: str) -> None:
    TARGETS[target](kept(target)[name])


@pytest.mark.parametrize("target", EXAMPLES)
@pytest.mark.slow
def test_damaged_inputs(target: str) -> None:
    fuzz(target, EXAMPLES[target])


@pytest.mark.parametrize("target", EXAMPLES)
@pytest.mark.soak
def test_a_great_many_damaged_inputs(target: str) -> None:
    fuzz(target, EXAMPLES[target] * MORE)


def fuzz(target: str, examples: int) -> None:
    """Feed a target that many damaged inputs."""

    @settings(max_examples=examples)
    @given(damaged(target))
    def feed(data: bytes) -> None:
        TARGETS[target](data)

    feed()

"""When to try again, and what may be tried again at all: delays are drawn from seeded generators, and judged by their
bounds and their spread; groups of errors are taken apart without losing any."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from trio_federation.errors import (
    AlreadyExists,
    PermissionDenied,
    ProtocolViolation,
    ResourceExhausted,
    RpcError,
    TooManyPings,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from trio_federation.retry import LONGEST, STABLE, Backoff, failures_of, first_window, share

#: what is tried again with ordinary delays
ORDINARY = (Unavailable, TooManyPings, Unauthenticated, PermissionDenied, ResourceExhausted, ProtocolViolation)
seeds = st.integers(0, 2**32)
ordinary = st.sampled_from(ORDINARY).map(lambda kind: kind("no"))
lives = st.floats(0, 59.999)

# --- delays ----------------------------------------------------------------------------------------------------------


@given(seeds, st.lists(st.tuples(ordinary, lives), min_size=1, max_size=60))
def test_delays_grow_from_half_a_second_to_ten_seconds(seed: int, failures: list[tuple[RpcError, float]]) -> None:
    """semantics.md, "Agent": "exponential backoff with full jitter (0.5 s to 10 s […])"."""
    backoff = Backoff(random.Random(seed))
    for number, (error, lived) in enumerate(failures):
        assert 0 <= backoff.delay(error, lived) <= min(10.0, 0.5 * 2.0 ** min(number, 40))


@given(seeds, st.integers(1, 100), st.floats(60, 1e6))
def test_a_stable_minute_makes_delays_start_small_again(seed: int, failed: int, lived: float) -> None:
    """semantics.md, "Agent": "reset after a stable minute"."""
    backoff = Backoff(random.Random(seed))
    for _ in range(failed):
        backoff.delay(Unavailable("no"), 1.0)
    assert backoff.delay(Unavailable("no"), lived) <= 0.5
    assert backoff.delay(Unavailable("no"), 0.0) <= 1.0


def test_what_breaks_again_before_a_minute_does_not_start_small_again() -> None:
    """A hub that takes every connection and drops it after 59 s still gets ever longer delays (C39: "backoff resets
    only after a stable period")."""
    backoffs = [Backoff(random.Random(seed)) for seed in range(20)]
    for backoff in backoffs:
        for _ in range(10):
            backoff.delay(Unavailable("no"), 59.9)
    assert max(backoff.delay(Unavailable("no"), 59.9) for backoff in backoffs) > 5.0


@given(st.integers(0, 10**6))
def test_the_first_window_grows_with_the_fleet_and_has_bounds(clusters: int) -> None:
    """50 ms for each cluster, at least what a small fleet heals in, at most what any delay is."""
    assert first_window(clusters) == pytest.approx(min(10.0, max(0.5, clusters / 20)))


class Largest(random.Random):
    """Draws the upper end each time."""

    def uniform(self, a: float, b: float) -> float:
        """The upper end."""
        return b


@given(
    st.lists(st.tuples(st.integers(0, 300), st.floats(0, 59.999)), min_size=1, max_size=40),
    st.integers(0, 300),
    st.floats(60, 1e6),
)
def test_the_bound_never_falls_before_a_stable_minute(
    failures: Sequence[tuple[int, float]], clusters: int, stable: float
) -> None:
    """Whatever the number of known clusters is meanwhile: in a long outage an agent forgets the others, and must not
    come back sooner for it. Each draw here gives the bound itself."""
    known = [0]
    backoff = Backoff(Largest(), first=lambda: first_window(known[0]))
    before = 0.0
    for count, lived in failures:
        known[0] = count
        delay = backoff.again(lived)
        assert delay == max(first_window(count), min(LONGEST, 2 * before))
        before = delay
    known[0] = clusters
    assert backoff.again(stable) == first_window(clusters)


names = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=60)


@given(names, st.text())
def test_everybody_has_a_part_of_the_first_delay_and_nobody_anothers(everybody: set[str], hub: str) -> None:
    """Together they are the whole; each is the same whether its owner is on its own list or not."""
    parts = sorted(share(own, everybody, hub) for own in everybody)
    assert parts == [(number / len(parts), (number + 1) / len(parts)) for number in range(len(parts))]
    for own in everybody:
        assert share(own, everybody - {own}, hub) == share(own, everybody, hub)


def test_who_is_last_at_one_hub_need_not_be_so_at_another() -> None:
    everybody = {f"c{number}" for number in range(50)}
    last = {max(everybody, key=lambda own: share(own, everybody, hub)) for hub in map(str, range(20))}
    assert len(last) > 10


@given(seeds, st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.9), st.integers(1, 10))
def test_only_the_first_delay_is_drawn_from_a_part(seed: int, one: float, other: float, least: float, n: int) -> None:
    begins, ends = sorted((one, other))
    backoff = Backoff(random.Random(seed), first=8.0, least=least, part=lambda: (begins, ends))
    for _ in range(n):
        first = backoff.again(STABLE)
        lowest = 8.0 * least
        assert lowest + (8.0 - lowest) * begins - 1e-9 <= first <= lowest + (8.0 - lowest) * ends + 1e-9
    plain = Backoff(random.Random(), first=8.0, least=least)
    plain.again(0.0)
    for _ in range(n):
        twin = random.Random(seed)
        plain._random, backoff._random = twin, random.Random(seed)
        assert backoff.again(0.0) == plain.again(0.0)


@given(seeds, st.integers(0, 50), st.floats(0, 1e6))
def test_a_refused_second_instance_tries_every_one_to_two_seconds(seed: int, failed: int, lived: float) -> None:
    """semantics.md, "Agent": "ALREADY_EXISTS every 1–2 s", so that a takeover is not waited for longer than that."""
    backoff = Backoff(random.Random(seed))
    for _ in range(failed):
        backoff.delay(Unavailable("no"), 0.0)
    assert 1.0 <= backoff.delay(AlreadyExists("no"), lived) <= 2.0


@given(seeds, st.lists(st.sampled_from((AlreadyExists, Unimplemented)), max_size=50))
def test_waiting_for_a_takeover_does_not_make_other_delays_longer(
    seed: int, refusals: list[type[AlreadyExists | Unimplemented]]
) -> None:
    """A refusal of that kind is an answer of a hub that works, and so no reason to hold back."""
    backoff = Backoff(random.Random(seed))
    for kind in refusals:
        backoff.delay(kind("no"), 0.0)
    assert backoff.delay(Unavailable("no"), 0.0) <= 0.5


@given(seeds, st.floats(0, 1e6))
def test_an_older_hub_is_asked_again_every_five_minutes(seed: int, lived: float) -> None:
    """semantics.md, "Agent": "UNIMPLEMENTED […] tried again every 5 minutes"."""
    assert Backoff(random.Random(seed)).delay(Unimplemented("no"), lived) == 300.0


def test_delays_at_the_cap_are_spread_evenly() -> None:
    """C39: "jitter applied before the cap collapses to one value", right: "no bucket of 1 s holds over 10 % even at the
    cap" — that is what an even spread over ten seconds comes to; within 1 % of it for 200 agents and 50 delays each."""
    buckets: Counter[int] = Counter()
    for seed in range(200):
        backoff = Backoff(random.Random(seed))
        for _ in range(8):
            backoff.delay(Unavailable("no"), 1.0)
        buckets.update(int(backoff.delay(Unavailable("no"), 1.0)) for _ in range(50))
    assert sorted(buckets) == list(range(10))
    assert max(buckets.values()) <= 0.11 * 200 * 50
    assert min(buckets.values()) >= 0.09 * 200 * 50


def test_a_hub_that_comes_back_is_not_met_by_everybody_in_one_second() -> None:
    """C39: "200 agents, hub down 90 s, then accepts and drops each after 1 s". Delays between 0 and 10 s mean that on
    average one agent in five tries in a given second; never much more than that, from the first second on."""
    agents, down = 200, 90.0
    tries: Counter[int] = Counter()
    for seed in range(agents):
        backoff = Backoff(random.Random(seed))
        now = 0.0
        while now < down + 60.0:
            tries[int(now)] += 1
            lived = 1.0 if now >= down else 0.0
            now += lived + backoff.delay(Unavailable("no"), lived)
    after = [tries[second] for second in range(int(down), int(down) + 60)]
    assert max(after) <= 0.3 * agents
    assert min(after) > 0


# --- what may be tried again -----------------------------------------------------------------------------------------


def cancelled() -> trio.Cancelled:
    """One of Trio's own, which nobody can make by hand."""
    caught: list[trio.Cancelled] = []

    async def be_cancelled() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled as error:
                caught.append(error)
                raise

    trio.run(be_cancelled)
    return caught[0]


CANCELLED = cancelled()


def groups(leaves: st.SearchStrategy[BaseException]) -> st.SearchStrategy[BaseException]:
    """An error alone, or in a group of any depth."""
    return st.recursive(
        leaves, lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda some: BaseExceptionGroup("some", some))
    )


def leaves_of(error: BaseException) -> list[BaseException]:
    """The errors that a group is made of, in their order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in leaves_of(member)]
    return [error]


rpc_errors = st.sampled_from((*ORDINARY, AlreadyExists, Unimplemented)).map(lambda kind: kind("no"))
bugs = st.sampled_from((TypeError, KeyError, ValueError, OSError, SystemExit, KeyboardInterrupt)).map(
    lambda kind: kind("bug")
)


@given(groups(rpc_errors))
def test_failures_are_found_alone_and_in_groups_even_of_one(error: BaseException) -> None:
    """C24: "a handler for one error stops matching when errors arrive as a group, even of one"."""
    assert failures_of(error, RpcError) == leaves_of(error)


@given(groups(rpc_errors | bugs | st.just(CANCELLED)))
def test_whatever_else_is_among_them_is_never_swallowed(error: BaseException) -> None:
    """C24: "a connect error and a TypeError together: […] the TypeError is not swallowed: non-zero exit with both
    tracebacks"; and of a cancellation what failed on its way down is left out."""
    leaves = leaves_of(error)
    rest = [leaf for leaf in leaves if not isinstance(leaf, RpcError)]
    if not rest:
        assert failures_of(error, RpcError) == leaves
        return
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any kind at all is the point
        failures_of(error, RpcError)
    if all(isinstance(leaf, trio.Cancelled) for leaf in rest):
        assert leaves_of(caught.value) == rest
    else:
        assert caught.value is error


async def test_a_cancelled_scope_gets_its_cancellation_back_from_a_group() -> None:
    """A stream that fails while it is being cancelled must end in the cancellation, or the agent could not stop."""

    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise Unavailable("the hub went away as well")

    with trio.CancelScope() as scope:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail_when_cancelled)
                nursery.start_soon(trio.sleep_forever)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        except (RpcError, BaseExceptionGroup) as error:
            failures_of(error, RpcError)
    assert scope.cancelled_caught


async def test_a_bug_ends_a_cancelled_scope_all_the_same() -> None:
    """The other errors of such a group are passed on with it."""

    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise TypeError("a bug")

    async def be_cancelled() -> None:
        with trio.CancelScope() as scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(fail_when_cancelled)
                    nursery.start_soon(trio.sleep_forever)
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            except (RpcError, BaseExceptionGroup) as error:
                failures_of(error, RpcError)

    with pytest.raises(ExceptionGroup) as caught:
        await be_cancelled()
    assert [type(leaf) for leaf in leaves_of(caught.value)] == [TypeError]

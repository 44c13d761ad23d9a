"""What one peer may ask for: an allowance against exact arithmetic, and the counting of everybody against a model that
forgets nothing. Memory is bounded by who is active."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trio_federation.config import Limits
from trio_federation.errors import ResourceExhausted
from trio_federation.limits import BURST, Allowance, Limiter
from trio_federation.wire import MAX_RECORDS

#: Moments that a float holds exactly, so that exact arithmetic has to agree to the last unit.
moments = st.integers(0, 40 * 64).map(lambda ticks: ticks / 64)
CLUSTERS = ("east", "East", "west")
ADDRESSES = ("192.0.2.1", "2001:db8::1")


class Exact:
    """An allowance in fractions."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.most = Fraction(rate) * 10
        self.left = self.most
        self.at: Fraction | None = None

    def take(self, amount: int, now: float) -> bool:
        """Whether so much is there; then it is taken."""
        self.go_on(now)
        if amount > self.left:
            return False
        self.left -= amount
        return True

    def go_on(self, now: float) -> None:
        """Add what has come since the latest time there was."""
        if self.at is None or now > self.at:
            passed = Fraction(now) - (self.at if self.at is not None else Fraction(now))
            self.left = min(self.most, self.left + passed * self.rate)
            self.at = Fraction(now)


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 100), moments), max_size=40))
def test_an_allowance_agrees_with_exact_arithmetic(rate: int, asked: list[tuple[int, float]]) -> None:
    """Whatever is asked for and whenever, also when time stands still or goes back."""
    allowance, exact = Allowance(rate), Exact(rate)
    for amount, now in asked:
        assert allowance.take(amount, now) is exact.take(amount, now)
        assert allowance.is_full(now) is (exact.left == exact.most)


@given(
    st.floats(0.01, 1e6),
    st.lists(st.tuples(st.floats(0, 1.2), st.floats(0, 30) | st.just(0.0)), min_size=1, max_size=40),
)
def test_no_window_lets_more_pass_than_it_may(rate: float, asked: list[tuple[float, float]]) -> None:
    """Over any time T at most rate * (T + 10), wherever it begins."""
    allowance, now = Allowance(rate), 0.0
    passed: list[tuple[float, int]] = []
    for share, pause in asked:
        now += pause
        amount = int(share * rate * BURST)
        if allowance.take(amount, now):
            passed.append((now, amount))
    for first, (begin, _) in enumerate(passed):
        total = 0
        for end, amount in passed[first:]:
            total += amount
            assert total <= rate * (end - begin + 10) * (1 + 1e-9)


@given(st.integers(1, 1000), moments, st.integers(1, 2000))
def test_what_is_due_is_there(rate: int, now: float, rest: int) -> None:
    """All of it at once, in the beginning and after ten seconds; more than that never; and nothing is taken in vain."""
    allowance, most = Allowance(rate), 10 * rate
    assert not allowance.take(most + rest, now)
    assert allowance.is_full(now)
    assert allowance.take(most, now)
    assert not allowance.take(1, now)
    assert not allowance.take(1, now - 1)
    assert allowance.take(0, now)
    assert allowance.take(rate, now + 1)
    assert not allowance.is_full(now + 10.75)
    assert not allowance.take(most + 1, now + 1000)
    assert allowance.is_full(now + 1000)
    assert allowance.take(most, now + 1000)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_a_rate_is_a_positive_number(rate: float) -> None:
    with pytest.raises(ValueError, match="is not a positive number"):
        Allowance(rate)


LIMITS = Limits(connections=2, streams=3, message_rate=1, record_rate=5)


class LimiterMachine(RuleBasedStateMachine):
    """Peers come, ask and go; one limiter forgets now and then, and must decide as if it did not."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = Limiter(LIMITS)
        self.now = 100.0
        self.connections = dict.fromkeys(ADDRESSES, 0)
        self.calls = dict.fromkeys(CLUSTERS, 0)
        self.messages = {cluster: Exact(LIMITS.message_rate) for cluster in CLUSTERS}
        self.records = {cluster: Exact(LIMITS.record_rate) for cluster in CLUSTERS}

    @rule(ticks=st.integers(0, 64) | st.integers(0, 64 * 12))
    def wait(self, ticks: int) -> None:
        self.now += ticks / 64

    @rule(address=st.sampled_from(ADDRESSES))
    def connect(self, address: str) -> None:
        fits = self.connections[address] < LIMITS.connections
        assert self.limiter.open_connection(address) is fits
        self.connections[address] += fits

    @rule(address=st.sampled_from(ADDRESSES))
    def disconnect(self, address: str) -> None:
        if self.connections[address]:
            self.limiter.close_connection(address)
            self.connections[address] -= 1
        else:
            with pytest.raises(AssertionError, match="no connection"):
                self.limiter.close_connection(address)

    @rule(cluster=st.sampled_from(CLUSTERS))
    def call(self, cluster: str) -> None:
        if self.calls[cluster] < LIMITS.streams:
            self.limiter.open_call(cluster)
            self.calls[cluster] += 1
        else:
            with pytest.raises(ResourceExhausted, match="streams in the hub's"):
                self.limiter.open_call(cluster)

    @rule(cluster=st.sampled_from(CLUSTERS))
    def hang_up(self, cluster: str) -> None:
        if self.calls[cluster]:
            self.limiter.close_call(cluster)
            self.calls[cluster] -= 1
        else:
            with pytest.raises(AssertionError, match="no call"):
                self.limiter.close_call(cluster)

    @rule(cluster=st.sampled_from(CLUSTERS), records=st.integers(0, 60))
    def send(self, cluster: str, records: int) -> None:
        """A message over the rate of messages has no records that count."""
        if not self.messages[cluster].take(1, self.now):
            key = "message_rate"
        elif not self.records[cluster].take(records, self.now):
            key = "record_rate"
        else:
            self.limiter.message(cluster, records, self.now)
            return
        with pytest.raises(ResourceExhausted, match=key):
            self.limiter.message(cluster, records, self.now)

    @rule(cluster=st.sampled_from(CLUSTERS), count=st.integers(1, 12))
    def send_many(self, cluster: str, count: int) -> None:
        for _ in range(count):
            self.send(cluster, 1)

    @rule()
    def forget(self) -> None:
        """Only those stay that have something open, or have not made up for what they used."""
        self.limiter.forget(self.now)
        for cluster in CLUSTERS:
            self.messages[cluster].go_on(self.now)
            self.records[cluster].go_on(self.now)
        active = [
            cluster
            for cluster in CLUSTERS
            if self.calls[cluster]
            or self.messages[cluster].left < self.messages[cluster].most
            or self.records[cluster].left < self.records[cluster].most
        ]
        assert self.limiter.held()["clusters"] == len(active)

    @invariant()
    def counts_what_is_open(self) -> None:
        held = self.limiter.held()
        assert held["calls"] == sum(self.calls.values())
        assert held["connections"] == sum(self.connections.values())
        assert held["addresses"] == sum(count > 0 for count in self.connections.values())
        assert held["clusters"] <= len(CLUSTERS)


TestLimiter = LimiterMachine.TestCase


def test_memory_is_bounded_by_who_is_active() -> None:
    """Of thousands that came and went nothing is left; of those that stay, everything."""
    limiter = Limiter(LIMITS)
    for number in range(1000):
        cluster, address = f"cluster-{number}", f"192.0.2.{number}"
        assert limiter.open_connection(address)
        limiter.open_call(cluster)
        limiter.message(cluster, 50, 0.0)
        if number % 100:
            limiter.close_call(cluster)
            limiter.close_connection(address)
    assert limiter.held() == {"addresses": 10, "connections": 10, "clusters": 1000, "calls": 10}
    limiter.forget(9.75)
    assert limiter.held()["clusters"] == 1000
    limiter.forget(10.0)
    assert limiter.held() == {"addresses": 10, "connections": 10, "clusters": 10, "calls": 10}
    with pytest.raises(ResourceExhausted):
        limiter.message("cluster-0", 51, 10.0)  # who stays is still counted
    limiter.message("cluster-0", 50, 10.0)
    with pytest.raises(ResourceExhausted):
        limiter.message("cluster-0", 1, 10.0)


def test_to_call_again_and_again_gives_nothing() -> None:
    """What was used stays used, whether or not a call is open."""
    limiter = Limiter(LIMITS)
    for _ in range(10):
        limiter.open_call("west")
        limiter.message("west", 5, 0.0)
        limiter.close_call("west")
        limiter.forget(0.0)
    limiter.open_call("west")
    with pytest.raises(ResourceExhausted):
        limiter.message("west", 0, 0.0)


def test_a_refusal_names_the_cluster_the_limit_and_what_to_do() -> None:
    """One line each, as the agent's log will show it."""
    limiter = Limiter(Limits(streams=2, message_rate=1, record_rate=20))
    limiter.open_call("west")
    limiter.open_call("west")
    with pytest.raises(ResourceExhausted) as streams:
        limiter.open_call("west")
    with pytest.raises(ResourceExhausted) as at_once:
        limiter.message("west", 201, 0.0)
    limiter.message("west", 200, 0.0)
    with pytest.raises(ResourceExhausted) as records:
        limiter.message("west", 1, 0.0)
    for _ in range(7):
        limiter.message("west", 0, 0.0)
    with pytest.raises(ResourceExhausted) as messages:
        limiter.message("west", 0, 0.0)
    assert [str(error.value) for error in (streams, at_once, records, messages)] == [
        "cluster 'west' has 2 calls open, and more are not served; end some, or raise streams in the hub's "
        "[hub.limits]",
        "cluster 'west' sends 201 records in one message, more than 10 s of 20 records a second allow; send fewer at "
        "once, or raise record_rate in the hub's [hub.limits]",
        "cluster 'west' sends more than 20 records a second; send fewer, or raise record_rate in the hub's "
        "[hub.limits]",
        "cluster 'west' sends more than 1 message a second; send fewer, or raise message_rate in the hub's "
        "[hub.limits]",
    ]


def test_the_defaults_let_a_full_message_pass() -> None:
    """What an agent sends at once by itself is within what a hub takes by default."""
    Limiter(Limits()).message("west", MAX_RECORDS, 0.0)

"""The rules that every capacity source has to keep, and how it is told that one is broken or was not checked. How they
are checked is `conformance.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn


class Rule(StrEnum):
    """A rule that every source has to keep; `RULES` says what each one is."""

    FACTORY = "factory"
    START = "start"
    LIVE = "live"
    ANSWER = "answer"
    RECORD = "record"
    UNIQUE = "unique"
    OBSERVED = "observed"
    BESIDE = "beside"
    DETERMINISTIC = "deterministic"
    BLOCKING = "blocking"
    CLOCK = "clock"
    RANDOM = "random"
    CANCELLATION = "cancellation"
    AFTERWARDS = "afterwards"
    CHANGES = "changes"
    AGREEMENT = "agreement"
    CHANGE = "change"
    FAILURE = "failure"
    RECOVERY = "recovery"
    REMOVAL = "removal"
    CLOSE = "close"
    LEFTOVERS = "leftovers"


RULES: Mapping[Rule, str] = {
    Rule.FACTORY: "the factory makes a new CapacitySource at each call",
    Rule.START: "run() says that it has started, within the deadline, and goes on until it is cancelled",
    Rule.LIVE: "is_live() answers True or False, and True while all is well; troubles() answers a list of Trouble",
    Rule.ANSWER: "collect() answers each time, in time, with a sequence of Capacity; unknown_namespaces() with names, "
    "cluster_uid() with a UID or None",
    Rule.RECORD: "every record is of the context's cluster, its names are valid and its values within their ranges",
    Rule.UNIQUE: "no two records have one identity",
    Rule.OBSERVED: "observed_at is None, or a moment on the agent's clock, not in the future and no older than the TTL",
    Rule.BESIDE: "a source works beside another one of its kind, also when both are asked at once",
    Rule.DETERMINISTIC: "two sources with equal contexts that are asked at the same moments say the same",
    Rule.BLOCKING: "no call holds the loop: whatever waits is awaited",
    Rule.CLOCK: "the time comes from the context's clock, and from no other",
    Rule.RANDOM: "what is drawn by lot comes from the context's generator, and not from the global one",
    Rule.CANCELLATION: "a cancelled call ends within a second, and lets Trio's Cancelled through",
    Rule.AFTERWARDS: "a cancelled collect() leaves nothing behind that spoils the next one",
    Rule.CHANGES: "changes() is None, or an iterator of valid changes that goes on, can be closed and begun again",
    Rule.AGREEMENT: "what changes() has pushed comes to what collect() says",
    Rule.CHANGE: "a change of the truth shows",
    Rule.FAILURE: "while the truth cannot be known collect() raises, and nothing is withdrawn",
    Rule.RECOVERY: "once the truth can be known again, the source tells it again",
    Rule.REMOVAL: "what is gone is missing from collect(), and the rest is not",
    Rule.CLOSE: "aclose() ends within a second and raises nothing, used or unused, also after a failure",
    Rule.LEFTOVERS: "every task that the source has started has ended when it is closed",
}

#: The rules that a check may be told to leave out, as an agent can live without them.
OPTIONAL = (Rule.BLOCKING, Rule.CLOCK, Rule.DETERMINISTIC, Rule.RANDOM)


class ConformanceError(AssertionError):
    """A source breaks a rule. An AssertionError, as what has failed is a test, and test runners show it as that.

    `rule`: which one. `seen`: what the source did. `advice`: what to do about it. What the source has raised, if that
    is the point, is the cause."""

    def __init__(self, rule: Rule, seen: str, advice: str) -> None:
        super().__init__(f"{seen}; {advice} (rule {rule}: {RULES[rule]})")
        self.rule = rule
        self.seen = seen
        self.advice = advice


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """What a check came to: nothing that was checked is wrong."""

    #: the rules that were checked, in the order of `Rule`
    checked: tuple[Rule, ...]
    #: those that were not, each with what it would take
    not_checked: Mapping[Rule, str]

    def __str__(self) -> str:
        lines = [f"checked: {', '.join(self.checked)}"]
        lines += [f"not checked: {rule}: {why}" for rule, why in self.not_checked.items()]
        return "\n".join(lines)


def broken(rule: Rule, seen: str, advice: str, cause: BaseException | None = None) -> NoReturn:
    raise ConformanceError(rule, seen, advice) from cause

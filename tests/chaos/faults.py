"""What goes wrong in a round, drawn from a seed: which faults, at whom, when and for how long. Pure: the same seed and
number give the same script, whatever ran before. Who does these things is `fleet.py`."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

#: the name of the hub among those whom a fault is for
HUB = "hub"


class Kind(enum.Enum):
    """One way of going wrong; the value is what tables call it."""

    # Between an agent and its hub.
    STALL_REPORT = "stall towards the hub"
    STALL_WATCH = "stall towards the agent"
    STALL = "stall both ways"
    CUT = "cut (FIN)"
    RESET = "reset (RST)"
    FORGET = "forgotten connections"
    DELAY = "delay and jitter"
    NARROW = "narrow line"
    REFUSE = "refused connections"
    SILENT = "accepted, then silence"
    HOLE = "black hole"
    # Processes.
    FREEZE_HUB = "frozen hub"
    FREEZE_AGENT = "frozen agent"
    KILL_HUB = "killed hub"
    KILL_AGENT = "killed agent"
    STOP_HUB = "stopped hub"
    STOP_AGENT = "stopped agent"


#: What a round of several faults at once is called.
SEVERAL = "several at once"

#: Seconds that a fault lasts: from, to. Frozen peers and silent lines last longer than the silence limit of 2 s as
#: often as not; who was killed stays dead for longer than a TTL, so that it has to be forgotten.
LENGTHS: dict[Kind, tuple[float, float]] = {
    Kind.STALL_REPORT: (0.5, 4.0),
    Kind.STALL_WATCH: (0.5, 4.0),
    Kind.STALL: (0.5, 4.0),
    Kind.CUT: (0.0, 0.0),
    Kind.RESET: (0.0, 0.0),
    Kind.FORGET: (0.0, 0.0),
    Kind.DELAY: (1.0, 3.0),
    Kind.NARROW: (1.0, 3.0),
    Kind.REFUSE: (0.5, 3.0),
    Kind.SILENT: (1.0, 4.0),
    Kind.HOLE: (1.0, 4.0),
    Kind.FREEZE_HUB: (1.0, 5.0),
    Kind.FREEZE_AGENT: (1.0, 5.0),
    Kind.KILL_HUB: (0.2, 3.0),
    Kind.KILL_AGENT: (3.8, 4.5),
    Kind.STOP_HUB: (0.2, 3.0),
    Kind.STOP_AGENT: (0.2, 2.0),
}

OF_HUB = (Kind.FREEZE_HUB, Kind.KILL_HUB, Kind.STOP_HUB)
OF_AGENT = (Kind.FREEZE_AGENT, Kind.KILL_AGENT, Kind.STOP_AGENT)

#: Of a delayed line: seconds of delay, and of jitter on top, at most.
MOST_DELAY = 0.15
#: Of a narrow line: bytes a second, from, to. All that is said takes a few hundred.
RATES = (1_000.0, 5_000.0)
#: Of several faults: seconds from the first one to the beginning of the others, at most.
_APART = 1.5
#: How many of the rounds of one deck have several faults.
_ROUNDS_OF_SEVERAL = 3
#: Rounds in which every kind comes up once, and several at once a few times.
DECK = len(Kind) + _ROUNDS_OF_SEVERAL


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Times in seconds."""

    kind: Kind
    #: agents, or the hub
    targets: tuple[str, ...]
    #: since the round's beginning
    begin: float
    length: float
    #: of a delayed line, seconds; of a narrow one, bytes a second
    amount: float = 0.0

    @property
    def is_of_lines(self) -> bool:
        """Whether it is for the lines of its targets, and not for their processes."""
        return self.kind not in (*OF_HUB, *OF_AGENT)

    def __str__(self) -> str:
        amount = f" ({self.amount:.3g})" if self.amount else ""
        return f"at {self.begin:.2f} s for {self.length:.2f} s: {self.kind.value}{amount}, {', '.join(self.targets)}"


@dataclass(frozen=True, slots=True)
class Script:
    """One round: what happens in it, and what it was drawn from."""

    seed: int
    number: int
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        """What it can be asked for by again."""
        return f"{self.seed}/{self.number}"

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.faults[0].kind.value if len(self.faults) == 1 else SEVERAL

    @property
    def unseen_delay(self) -> float:
        """Seconds that something may take longer in this round, from one agent to another and from the first byte of a
        connection on: nobody at either end can tell that from clocks that differ."""
        return 2 * max((2 * fault.amount for fault in self.faults if fault.kind is Kind.DELAY), default=0.0)

    def __str__(self) -> str:
        return "\n".join([f"round {self.name}", *(f"  {fault}" for fault in self.faults)])


def script(seed: int, number: int, agents: Sequence[str]) -> Script:
    """The round of that number, among the rounds of a seed. DECK of them in a row have every kind."""
    kinds: list[Kind | None] = [*Kind, *[None] * _ROUNDS_OF_SEVERAL]
    random.Random(f"{seed} deck {number // DECK}").shuffle(kinds)
    generator = random.Random(f"{seed} round {number}")
    kind = kinds[number % DECK]
    if kind is not None:
        return Script(seed, number, (_fault(kind, 0.0, [HUB, *agents], list(agents), generator),))
    # Nobody and no line has two things done to it at once.
    processes, lines = [HUB, *agents], list(agents)
    faults: list[Fault] = []
    for index in range(generator.randint(2, 3)):
        begin = 0.0 if index == 0 else round(generator.uniform(0.0, _APART), 2)
        possible = [each for each in Kind if _candidates(each, processes, lines)]
        fault = _fault(generator.choice(possible), begin, processes, lines, generator)
        faults.append(fault)
        taken_from = lines if fault.is_of_lines else processes
        for target in fault.targets:
            taken_from.remove(target)
    return Script(seed, number, tuple(faults))


def _candidates(kind: Kind, processes: Sequence[str], lines: Sequence[str]) -> list[str]:
    if kind in OF_HUB:
        return [name for name in processes if name == HUB]
    if kind in OF_AGENT:
        return [name for name in processes if name != HUB]
    return list(lines)


def _fault(kind: Kind, begin: float, processes: Sequence[str], lines: Sequence[str], generator: random.Random) -> Fault:
    candidates = _candidates(kind, processes, lines)
    # One, a few or all of them.
    count = generator.choice([1, generator.randint(1, len(candidates)), len(candidates)])
    if kind in OF_AGENT:
        count = min(count, 2)
    drawn = generator.sample(candidates, count)
    targets = [name for name in candidates if name in drawn]
    amount = 0.0
    if kind is Kind.DELAY:
        amount = round(generator.uniform(MOST_DELAY / 3, MOST_DELAY), 3)
    elif kind is Kind.NARROW:
        amount = round(generator.uniform(*RATES))
    return Fault(kind, tuple(targets), begin, round(generator.uniform(*LENGTHS[kind]), 2), amount)

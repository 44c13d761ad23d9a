"""Draws the table of the Kubernetes plugin's reflector as Markdown: a picture of its states, what it does in each, and
how long it pauses. `generate_docs.py` puts the text into docs/kubernetes.md."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from trio_federation_kubernetes.reflector import (
    FIRST_PAUSE,
    LEAST_PAUSE,
    LONGEST_PAUSE,
    LONGEST_RETRY_AFTER,
    PATIENCE,
    SHORT_WATCH,
    STEADY_WATCH,
    TABLE,
    WATCH_TIMEOUT,
    Happening,
    State,
    Transition,
)

Table = Mapping[tuple[State, Happening], Transition]


def drawn(table: Table = TABLE) -> str:
    """The table, with a picture before it and the pauses after it. Ends with a line end."""
    return "\n".join([_picture(table), _rows(table), _pauses()])


def _picture(table: Table) -> str:
    """The ways from one state to another; what leads back to the same one is left to the table."""
    edges: dict[tuple[State, State], list[str]] = {}
    for (state, happening), transition in table.items():
        if transition.state is not state:
            edges.setdefault((state, transition.state), []).append(happening.value)
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f'    state "{state.value}" as {state.name}' for state in State]
    lines.append(f"    [*] --> {next(iter(State)).name}")
    lines += [f"    {old.name} --> {new.name} : {'<br/>'.join(labels)}" for (old, new), labels in edges.items()]
    return "\n".join([*lines, "```", ""])


def _rows(table: Table) -> str:
    lines = [
        "| while | what happens | then | what is held | the next request | why |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for states, happenings, then, transition in merged(table):
        cells = [
            _states(states),
            "; ".join(happening.value for happening in happenings),
            then,
            transition.effect.value,
            transition.pause.value,
            transition.why,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def merged(table: Table) -> Iterator[tuple[tuple[State, ...], tuple[Happening, ...], str, Transition]]:
    """The table's entries, those that say the same put together: the states and the happenings of which each pair is
    meant, the state that follows, and the transition of one of them."""
    alike: dict[tuple[object, ...], dict[Happening, list[State]]] = {}
    for (state, happening), transition in table.items():
        group = (transition[1:], _then(state, happening, table))
        alike.setdefault(group, {}).setdefault(happening, []).append(state)
    for (_, then), by_happening in alike.items():
        # Happenings share a row where they share all of its states.
        by_states: dict[tuple[State, ...], list[Happening]] = {}
        for happening, states in by_happening.items():
            by_states.setdefault(tuple(states), []).append(happening)
        for together, happenings in by_states.items():
            yield together, tuple(happenings), str(then), table[together[0], happenings[0]]


def _then(state: State, happening: Happening, table: Table) -> str:
    """The state that follows, or "the same" where an entry of another state that is otherwise equal stays, too."""
    transition = table[state, happening]
    following = {
        other: entry.state
        for (other, what), entry in table.items()
        if what is happening and entry[1:] == transition[1:]
    }
    staying = all(other is then for other, then in following.items())
    return "the same" if staying else transition.state.value


def _states(states: Collection[State]) -> str:
    lists = {state for state in State if state is not State.WATCHING}
    return "any list" if set(states) == lists else ", ".join(state.value for state in states)


def _pauses() -> str:
    return f"""\
- Backoff: drawn from {LEAST_PAUSE:g} s up to {FIRST_PAUSE:g} s after the first failure, up to twice as much after each
  further one, up to {LONGEST_PAUSE:g} s at most. A Retry-After is kept to, up to {LONGEST_RETRY_AFTER:g} s.
- A whole list ends a row of failed lists. A row of failed watches ends with one that was open for {STEADY_WATCH:g} s.
- {PATIENCE} tries in a row: of the same page, or watches that could not be had, or ended within a second.
- A watch is asked to last {WATCH_TIMEOUT[0]} to {WATCH_TIMEOUT[1]} s, drawn each time. One that ends within \
{SHORT_WATCH:g} s is not followed by another at once.
"""


if __name__ == "__main__":
    print(drawn(), end="")

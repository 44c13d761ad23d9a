"""Whether an agent is the one that reports for its cluster, against a model that keeps everything that was said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_federation.standing import Standing

HUBS = ("hub-a", "hub-b", "hub-c")
said = st.lists(st.tuples(st.sampled_from(HUBS), st.sampled_from(("accepted", "refused", "lost"))), max_size=20)


def expected(history: list[tuple[str, str]]) -> bool | None:
    """Out of the last word of each hub."""
    last = [next(word for name, word in reversed(history) if name == hub) for hub in {name for name, _ in history}]
    if not last:
        return True
    words = {word for word in last if word != "lost"}
    return (words == {"accepted"}) if len(words) == 1 else None


@given(said)
def test_the_last_word_of_each_hub_counts_where_they_agree(history: list[tuple[str, str]]) -> None:
    """Whatever was said before, and in whatever order the hubs have spoken."""
    standing = Standing()
    assert standing.is_reporter() is True
    for number, (hub, word) in enumerate(history, start=1):
        getattr(standing, word)(hub)
        assert standing.is_reporter() is expected(history[:number])
        assert standing.is_reporter() is expected(history[:number]), "asking changes nothing"


def test_a_reader_in_the_middle_of_a_word_gets_the_answer_before_it_or_after_it() -> None:
    """Another thread may look at any moment, so nothing in between may show: of hubs that differ nothing is said, and
    with none of them lost there is no moment at which one of them alone counts."""
    seen: list[bool | None] = []

    class Watched(Standing):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if "_answer" in self.__dict__:
                seen.append(self.is_reporter())

    standing = Watched()
    seen.clear()
    standing.accepted("hub-a")
    standing.refused("hub-b")
    for _ in range(3):
        standing.accepted("hub-a")
        standing.refused("hub-b")
    standing.lost("hub-a")
    assert seen == [True] + [None] * 7 + [False]

"""The reflector: its table pair by pair, what it may cost a server that fails, and, against a model of an API server,
that what it gathers is true."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise, product
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scripts import reflector_table
from trio_federation_kubernetes import reflector as room
from trio_federation_kubernetes.decoding import Decoder, Event, Page
from trio_federation_kubernetes.errors import (
    AnswerError,
    ApiError,
    Cause,
    CredentialError,
    KubernetesError,
    UnreachableError,
)
from trio_federation_kubernetes.lines import Lines
from trio_federation_kubernetes.reflector import (
    FIRST_PAUSE,
    LEAST_PAUSE,
    LONGEST_PAUSE,
    LONGEST_RETRY_AFTER,
    MOST_SILENCE,
    PATIENCE,
    SHORT_WATCH,
    SILENCE_PER_PAGE,
    STEADY_WATCH,
    TABLE,
    WATCH_TIMEOUT,
    Effect,
    Gone,
    Happening,
    ListPage,
    Put,
    Reflector,
    State,
    Watch,
)
from trio_federation_kubernetes.resources import Key

P1, P2, P3 = (("default", name) for name in ("p1", "p2", "p3"))


def a_reflector(seed: int = 1, page_size: int = 2) -> Reflector[str]:
    return Reflector(page_size=page_size, random=Random(seed))


def a_page(version: str = "v1", token: str = "", *keys: Key) -> Page[str]:
    return Page(version, token, [(key, "old") for key in keys])


def api_error(code: int, **fields: Any) -> ApiError:
    return ApiError(f"the server answered {code}", code=code, **fields)


TOO_LARGE = api_error(504, status_reason="Timeout", causes=(Cause("ResourceVersionTooLarge"),))


def error_event(error: ApiError) -> Event[str]:
    return Event("ERROR", error=error)


# --- the table, pair by pair

LISTS = (State.LISTING, State.RELISTING, State.UNPAGED)
#: What can come of a list, and of a watch.
OF_LISTS = {
    Happening.PAGE,
    Happening.LAST_PAGE,
    Happening.BAD_PAGE,
    Happening.TOKEN_EXPIRED,
}
OF_WATCHES = {
    Happening.CHANGE,
    Happening.BOOKMARK,
    Happening.UNKNOWN_EVENT,
    Happening.ENDED,
    Happening.ENDED_SOON,
    Happening.ENDED_SILENT,
    Happening.SILENT,
    Happening.ENDED_EMPTY,
}
OF_BOTH = set(Happening) - OF_LISTS - OF_WATCHES
PAIRS = sorted(
    {*product(LISTS, OF_LISTS | OF_BOTH), *product([State.WATCHING], OF_WATCHES | OF_BOTH)},
    key=lambda pair: (pair[0].name, pair[1].name),
)


def test_the_table_has_each_pair_that_can_occur_and_no_other() -> None:
    assert set(TABLE) == set(PAIRS)
    assert {state for state, _ in TABLE} == {transition.state for transition in TABLE.values()} == set(State)


def test_only_a_whole_list_leads_to_a_watch_and_only_it_replaces() -> None:
    for (state, happening), transition in TABLE.items():
        starts = state in LISTS and transition.state is State.WATCHING
        assert starts == (happening is Happening.LAST_PAGE) == (transition.effect is Effect.REPLACE)


def test_each_way_back_to_a_list_forgets_the_version() -> None:
    for (state, _), transition in TABLE.items():
        if state is State.WATCHING and transition.state is not State.WATCHING:
            assert transition.effect is Effect.DROP


def brought_to(state: State, *, pages: int = 1) -> Reflector[str]:
    """With a request under way: of a list the one after so many pages, of a watch the first."""
    reflector = a_reflector()
    for _ in range({State.RELISTING: 1, State.UNPAGED: 2}.get(state, 0)):
        reflector.request()
        reflector.page(a_page("v1", "t1", P1))
        reflector.request()
        reflector.failed(api_error(410))
    for number in range(pages):
        reflector.request()
        reflector.page(a_page("v1", f"t{number}", P1))
    reflector.request()
    if state is State.WATCHING:
        reflector.page(a_page("v1"))
        reflector.request()
    assert reflector.state is state
    return reflector


def happen(reflector: Reflector[str], happening: Happening) -> None:
    """Let it happen, through the methods that a shell calls."""
    match happening:
        case Happening.PAGE:
            reflector.page(a_page("v1", "another", P2))
        case Happening.LAST_PAGE:
            reflector.page(a_page("v1", "", P2))
        case Happening.BAD_PAGE:
            reflector.page(a_page("v1", reflector.request().params()["continue"], P2))
        case Happening.TOKEN_EXPIRED:
            reflector.failed(api_error(410, status_reason="Expired", continue_token="another version's"))
        case Happening.EXPIRED:
            reflector.failed(api_error(410))
        case Happening.CHANGE:
            reflector.event(Event("MODIFIED", P1, "v2", "new"))
        case Happening.BOOKMARK:
            reflector.event(Event("BOOKMARK", resource_version="v2"))
        case Happening.UNKNOWN_EVENT:
            reflector.event(Event("RENAMED", P1, "v2", "new"))
        case Happening.ENDED | Happening.ENDED_SOON:
            reflector.event(Event("BOOKMARK"))
            reflector.ended(100.0 if happening is Happening.ENDED else 0.4)
        case Happening.ENDED_SILENT:
            reflector.ended(SILENCE_PER_PAGE - 1)
        case Happening.SILENT:
            reflector.ended(SILENCE_PER_PAGE)
        case Happening.ENDED_EMPTY:
            reflector.ended(0.4)
        case Happening.TOO_LARGE:
            reflector.failed(TOO_LARGE)
        case Happening.BUSY:
            reflector.failed(api_error(429))
        case Happening.UNREACHABLE:
            reflector.failed(UnreachableError("nobody is there"))
        case Happening.FRUITLESS:
            for _ in range(PATIENCE):
                reflector.request()
                reflector.failed(UnreachableError("nobody is there"))
        case Happening.REFUSED:
            reflector.failed(api_error(403))
        case Happening.UNREADABLE:
            reflector.failed(AnswerError("no JSON"))


#: What each pair must come to: the state that follows, what is left of version and pages ("kept", "moved" or "none"),
#: and whether the next request waits. Written down beside the table, so that neither can change alone.
EXPECTED = """
listing         PAGE            listing          moved at-once
listing         LAST_PAGE       watching         moved at-once
listing         BAD_PAGE        listing again    none  waits
listing         TOKEN_EXPIRED   listing again    none  at-once
listing         EXPIRED         listing          none  waits
listing         TOO_LARGE       listing          kept  waits
listing         BUSY            listing          kept  waits
listing         UNREACHABLE     listing          kept  waits
listing         FRUITLESS       listing          none  waits
listing         REFUSED         listing          none  waits
listing         UNREADABLE      listing          none  waits
listing again   PAGE            listing again    moved at-once
listing again   LAST_PAGE       watching         moved at-once
listing again   BAD_PAGE        listing unpaged  none  waits
listing again   TOKEN_EXPIRED   listing unpaged  none  at-once
listing again   EXPIRED         listing again    none  waits
listing again   TOO_LARGE       listing again    kept  waits
listing again   BUSY            listing again    kept  waits
listing again   UNREACHABLE     listing again    kept  waits
listing again   FRUITLESS       listing          none  waits
listing again   REFUSED         listing          none  waits
listing again   UNREADABLE      listing          none  waits
listing unpaged PAGE            listing unpaged  moved at-once
listing unpaged LAST_PAGE       watching         moved at-once
listing unpaged BAD_PAGE        listing          none  waits
listing unpaged TOKEN_EXPIRED   listing unpaged  none  waits
listing unpaged EXPIRED         listing unpaged  none  waits
listing unpaged TOO_LARGE       listing unpaged  kept  waits
listing unpaged BUSY            listing unpaged  kept  waits
listing unpaged UNREACHABLE     listing unpaged  kept  waits
listing unpaged FRUITLESS       listing          none  waits
listing unpaged REFUSED         listing          none  waits
listing unpaged UNREADABLE      listing          none  waits
watching        CHANGE          watching         moved at-once
watching        BOOKMARK        watching         moved at-once
watching        UNKNOWN_EVENT   watching         kept  at-once
watching        ENDED           watching         kept  at-once
watching        ENDED_SOON      watching         kept  waits
watching        ENDED_SILENT    watching         kept  at-once
watching        SILENT          listing          none  at-once
watching        ENDED_EMPTY     watching         kept  waits
watching        EXPIRED         listing          none  at-once
watching        TOO_LARGE       listing          none  waits
watching        BUSY            watching         kept  waits
watching        UNREACHABLE     watching         kept  waits
watching        FRUITLESS       listing          none  waits
watching        REFUSED         listing          none  waits
watching        UNREADABLE      listing          none  waits
"""
ROWS = [
    (row[:16].strip(), row[16:32].strip(), row[32:49].strip(), *row[49:].split()) for row in EXPECTED.split("\n")[1:-1]
]


def test_what_each_pair_must_come_to_is_said() -> None:
    assert sorted((State(row[0]).name, row[1]) for row in ROWS) == [(state.name, what.name) for state, what in PAIRS]


@pytest.mark.parametrize("state, happening, following, held, waits", ROWS)
def test_each_pair_through_the_methods_that_a_shell_calls(
    state: str, happening: str, following: str, held: str, waits: str
) -> None:
    # Whether a list's 410 is to its token depends on whether it has sent one.
    reflector = brought_to(State(state), pages=0 if happening == "EXPIRED" else 1)
    before = reflector.request()
    happen(reflector, Happening[happening])

    assert reflector.state is State(following)
    assert (reflector.pause() > 0) == (waits == "waits")
    after = reflector.request()
    if held == "none":
        assert after == ListPage(None if reflector.state is State.UNPAGED else 2, "")
        assert reflector.position == ""
    elif held == "kept":
        assert after.params() | {"timeoutSeconds": ""} == before.params() | {"timeoutSeconds": ""}
    else:
        changed = "resourceVersion" if reflector.state is State.WATCHING else "continue"
        assert after.params()[changed] != before.params().get(changed)
    assert f"<Reflector {following}" in repr(reflector)


@pytest.mark.parametrize("happening", [happening for happening in Happening if happening in OF_WATCHES])
def test_a_watch_goes_on_after_an_event_and_not_after_its_end(happening: Happening) -> None:
    reflector = brought_to(State.WATCHING)
    happen(reflector, happening)
    assert reflector.under_way == (happening in (Happening.CHANGE, Happening.BOOKMARK, Happening.UNKNOWN_EVENT))


# --- what errors mean


@pytest.mark.parametrize(
    "error, happening",
    [
        (api_error(410), Happening.EXPIRED),
        (api_error(410, status_reason="Gone"), Happening.EXPIRED),
        (api_error(0, status_reason="Expired"), Happening.EXPIRED),
        (api_error(0, status_reason="Gone"), Happening.EXPIRED),
        (api_error(500, status_reason="Expired"), Happening.EXPIRED),
        (TOO_LARGE, Happening.TOO_LARGE),
        (api_error(504, message="Too large resource version: 7, current: 3"), Happening.TOO_LARGE),
        (api_error(0, status_reason="Timeout", causes=(Cause("ResourceVersionTooLarge"),)), Happening.TOO_LARGE),
        (api_error(504), Happening.BUSY),
        (
            api_error(504, status_reason="Timeout", causes=(Cause("Other", "ResourceVersionTooLarge"),)),
            Happening.BUSY,
        ),
        (api_error(429), Happening.BUSY),
        (api_error(0, status_reason="TooManyRequests"), Happening.BUSY),
        (api_error(0, status_reason="InternalError"), Happening.BUSY),
        (api_error(500), Happening.BUSY),
        (api_error(503), Happening.BUSY),
        (api_error(400), Happening.REFUSED),
        (api_error(401), Happening.REFUSED),
        (api_error(403), Happening.REFUSED),
        (api_error(404), Happening.REFUSED),
        (api_error(405), Happening.REFUSED),
        (api_error(0), Happening.REFUSED),
        (AnswerError("no JSON"), Happening.UNREADABLE),
        (UnreachableError("nobody is there"), Happening.UNREACHABLE),
        (CredentialError("no token"), Happening.UNREACHABLE),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["answer", "event"])
def test_an_error_means_the_same_as_an_answer_and_as_an_event(
    form: str, error: KubernetesError, happening: Happening
) -> None:
    reflector = brought_to(State.WATCHING)
    if form == "event" and isinstance(error, ApiError):
        assert reflector.event(error_event(error)) is None
    else:
        reflector.failed(error)
    expected = TABLE[State.WATCHING, happening]
    assert reflector.state is expected.state
    assert (reflector.position == "v1") == (expected.effect is Effect.KEEP)
    assert (reflector.pause() == 0) == (happening is Happening.EXPIRED)
    assert reflector.trouble is error
    assert reflector.failures == 1
    assert not reflector.under_way


def test_an_error_event_without_an_error_makes_no_sense() -> None:
    reflector = brought_to(State.WATCHING)
    reflector.event(Event("ERROR"))
    assert reflector.state is State.LISTING
    assert isinstance(reflector.trouble, AnswerError)


# --- requests


def test_the_parameters_of_requests() -> None:
    assert ListPage(500).params() == {"limit": "500"}
    assert ListPage(500, "t/1=").params() == {"limit": "500", "continue": "t/1="}
    assert ListPage(None).params() == {}
    assert Watch("v1", 300).params() == {
        "watch": "1",
        "allowWatchBookmarks": "true",
        "resourceVersion": "v1",
        "timeoutSeconds": "300",
    }


def test_the_timeouts_of_watches_are_spread_over_their_range() -> None:
    reflector = brought_to(State.WATCHING)
    timeouts = [int(reflector.request().params()["timeoutSeconds"]) for _ in range(1000)]
    low, high = WATCH_TIMEOUT
    assert low <= min(timeouts) < low + 10 < high - 10 < max(timeouts) <= high
    assert abs(sum(timeouts) / 1000 - (low + high) / 2) < 10


@pytest.mark.parametrize("size", [0, -1])
def test_a_page_holds_something(size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size is {size}"):
        Reflector(page_size=size, random=Random(1))


def test_a_page_without_a_list_is_the_callers_mistake() -> None:
    reflector = a_reflector()
    with pytest.raises(RuntimeError, match="no list is under way"):
        reflector.page(a_page())
    reflector = brought_to(State.WATCHING)
    with pytest.raises(RuntimeError, match="no list is under way"):
        reflector.page(a_page())


def test_what_arrives_after_the_end_of_a_watch_changes_nothing() -> None:
    """The rest of a chunk that an ERROR event stood in, and the end of the connection."""
    reflector = brought_to(State.WATCHING)
    reflector.event(error_event(api_error(429)))
    before = (repr(reflector), reflector.pause())
    assert reflector.event(Event("ADDED", P3, "v9", "new")) is None
    reflector.failed(UnreachableError("the connection broke"))
    reflector.ended(0.1)
    assert (repr(reflector), reflector.pause()) == before
    assert reflector.position == "v1"


def test_a_request_that_was_given_up_is_made_again() -> None:
    reflector = a_reflector()
    assert reflector.request() == reflector.request() == ListPage(2)
    reflector.page(a_page("v1", "t1", P1))
    assert reflector.request() == reflector.request() == ListPage(2, "t1")
    assert reflector.page(a_page("v1", "", P2)) == {P1: "old", P2: "old"}


# --- lists


def test_a_list_is_whole_with_its_last_page_and_never_before() -> None:
    reflector = a_reflector()
    for token, keys in (("t1", [P1]), ("t2", [])):
        reflector.request()
        assert reflector.page(a_page("v1", token, *keys)) is None
        assert not reflector.listed
        assert reflector.position == ""
    reflector.request()
    assert reflector.page(a_page("v1", "", P3)) == {P1: "old", P3: "old"}
    assert reflector.listed
    assert reflector.position == "v1"


def test_the_version_of_a_list_is_that_of_its_first_page() -> None:
    """A watch from a later one would leave out what changed between them."""
    reflector = a_reflector()
    reflector.request()
    reflector.page(a_page("v1", "t1", P1))
    reflector.request()
    reflector.page(a_page("v2", "", P2))
    assert reflector.position == "v1"


def test_a_second_list_holds_nothing_of_the_first() -> None:
    reflector = a_reflector()
    reflector.request()
    held = reflector.page(a_page("v1", "", P1, P2))
    reflector.request()
    reflector.failed(api_error(410))
    reflector.request()
    assert reflector.page(a_page("v2", "", P2, P3)) == {P2: "old", P3: "old"}
    assert held == {P1: "old", P2: "old"}, "what was given away is not touched"


def test_a_token_that_expires_every_time_leads_to_an_unpaged_list() -> None:
    """The body of the second page's 410 carries another token, which would join two versions in one list."""
    reflector = a_reflector()
    sent = []
    for _ in range(2):
        sent.append(reflector.request())
        assert reflector.page(a_page("v1", "t1", P1)) is None
        sent.append(reflector.request())
        reflector.failed(api_error(410, status_reason="Expired", continue_token="t2"))
        assert reflector.pause() == 0
    sent.append(reflector.request())
    assert sent == [ListPage(2), ListPage(2, "t1"), ListPage(2), ListPage(2, "t1"), ListPage(None)]
    assert reflector.page(a_page("v3", "", P2, P3)) == {P2: "old", P3: "old"}
    assert reflector.position == "v3"
    # And the next list is paged again.
    reflector.request()
    reflector.failed(api_error(410))
    assert reflector.request() == ListPage(2)


def test_a_410_to_each_and_every_list_is_not_asked_for_in_a_loop() -> None:
    reflector = a_reflector()
    pauses = []
    for _ in range(50):
        reflector.request()
        reflector.failed(api_error(410))
        pauses.append(reflector.pause())
    assert min(pauses) >= LEAST_PAUSE
    assert sum(pauses[10:]) / 40 > LONGEST_PAUSE / 4


def test_the_same_page_is_asked_for_again_and_the_ones_before_are_kept() -> None:
    reflector = a_reflector()
    reflector.request()
    reflector.page(a_page("v1", "t1", P1))
    for error in (api_error(429), UnreachableError("nobody is there"), api_error(503)):
        assert reflector.request() == ListPage(2, "t1")
        reflector.failed(error)
    reflector.request()
    assert reflector.page(a_page("v1", "", P2)) == {P1: "old", P2: "old"}


def test_a_page_resets_the_patience_with_the_next() -> None:
    reflector = a_reflector()
    tokens = ["", "t1", "t2", "t3"]
    for token, following in pairwise(tokens):
        for _ in range(PATIENCE - 1):
            assert reflector.request() == ListPage(2, token)
            reflector.failed(api_error(500))
        reflector.request()
        reflector.page(a_page("v1", following))
    assert reflector.request() == ListPage(2, "t3")


def test_a_list_that_begins_again_has_all_patience_again() -> None:
    reflector = brought_to(State.LISTING)
    for _ in range(PATIENCE - 1):
        reflector.failed(api_error(500))
        reflector.request()
    reflector.failed(api_error(410))
    for _ in range(PATIENCE - 1):
        reflector.request()
        reflector.failed(api_error(500))
        assert reflector.state is State.RELISTING


def test_a_list_that_gives_its_token_again_is_given_up() -> None:
    reflector = a_reflector()
    sent = []
    for token in ("t1", "t2", "t1"):
        sent.append(reflector.request())
        assert reflector.page(a_page("v1", token, P1)) is None
    assert sent == [ListPage(2), ListPage(2, "t1"), ListPage(2, "t2")]
    assert reflector.pause() > 0
    assert "token twice" in str(reflector.trouble)
    assert reflector.request() == ListPage(2)
    assert reflector.page(a_page("v2", "", P2)) == {P2: "old"}
    assert reflector.trouble is None


def test_a_list_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_PAGES", 5)
    reflector = a_reflector()
    for number in range(5):
        assert reflector.pause() == 0
        reflector.request()
        reflector.page(a_page("v1", f"t{number}"))
    assert reflector.pause() > 0
    assert "5 pages" in str(reflector.trouble)
    assert reflector.request() == ListPage(2)


def test_a_list_of_just_the_most_pages_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_PAGES", 5)
    reflector = a_reflector()
    for token in ("t1", "t2", "t3", "t4", ""):
        reflector.request()
        content = reflector.page(a_page("v1", token, P1))
    assert content == {P1: "old"}


def test_a_list_without_a_version_starts_no_watch() -> None:
    """A watch from "" would tell every object as added, and none as gone."""
    reflector = a_reflector()
    reflector.request()
    assert reflector.page(a_page("", "", P1)) is None
    assert not reflector.listed
    assert isinstance(reflector.request(), ListPage)
    assert reflector.pause() > 0


# --- watches


def test_events_are_changes_and_move_the_version() -> None:
    reflector = brought_to(State.WATCHING)
    assert reflector.event(Event("ADDED", P3, "v2", "new")) == Put(P3, "new")
    assert reflector.position == "v2"
    assert reflector.event(Event("MODIFIED", P3, "v3", "newer")) == Put(P3, "newer")
    assert reflector.event(Event("DELETED", P3, "v4", "newer")) == Gone(P3)
    assert reflector.position == "v4"
    assert reflector.event(Event("BOOKMARK", resource_version="v5")) is None
    assert reflector.position == "v5"
    assert reflector.event(Event("DELETED", P1, "", None)) == Gone(P1)
    assert reflector.event(Event("BOOKMARK")) is None
    assert reflector.position == "v5", "what has no version does not move it"


def test_unknown_and_nameless_events_are_skipped_and_counted() -> None:
    reflector = brought_to(State.WATCHING)
    for event in (Event[str]("RENAMED", P1, "v2", "new"), Event[str]("", None, "v2"), Event[str]("ADDED")):
        assert reflector.event(event) is None
    assert reflector.skipped == 3
    assert reflector.position == "v1"
    assert reflector.under_way


def test_a_version_that_is_gone_is_never_sent_again_whichever_form_says_so() -> None:
    """From bytes: a list of "100", a watch that is refused by 410, a list of "300", a bookmark, an unknown event."""

    class Pool(msgspec.Struct):
        spec: Any = None

    def listed(version: str, *names: str) -> Page[Pool]:
        items = [{"metadata": {"name": name, "namespace": "n", "resourceVersion": "7"}} for name in names]
        return decoder.page(json.dumps({"metadata": {"resourceVersion": version}, "items": items}).encode())

    for gone in ("event", "answer"):
        decoder = Decoder(Pool)
        reflector: Reflector[Pool] = Reflector(page_size=500, random=Random(1))
        lines = Lines()
        reflector.request()
        held = dict(reflector.page(listed("100", "p1", "p2")) or {})
        sent = [reflector.request().params()["resourceVersion"]]
        if gone == "event":
            for line in lines.feed(b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n'):
                reflector.event(decoder.event(line))
        else:
            reflector.failed(api_error(410))
        assert reflector.pause() == 0
        assert reflector.request() == ListPage(500)
        held = dict(reflector.page(listed("300", "p2", "p3")) or {})
        sent.append(reflector.request().params()["resourceVersion"])
        stream = (
            b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"350"}}}\n'
            b'{"type":"SHUFFLED","object":{"metadata":{"name":"p9","namespace":"n","resourceVersion":"360"}}}\n'
        )
        for line in lines.feed(stream):
            assert reflector.event(decoder.event(line)) is None
        reflector.ended(200.0)
        assert reflector.pause() == 0
        sent.append(reflector.request().params()["resourceVersion"])
        assert sent == ["100", "300", "350"]
        assert set(held) == {("n", "p2"), ("n", "p3")}
        assert reflector.skipped == 1


def test_a_watch_is_resumed_where_it_broke() -> None:
    reflector = brought_to(State.WATCHING)
    reflector.event(Event("ADDED", P3, "v2", "new"))
    reflector.failed(UnreachableError("the connection broke"), 30.0)
    assert reflector.pause() <= FIRST_PAUSE
    assert reflector.request().params()["resourceVersion"] == "v2"


def test_watches_that_bring_something_are_resumed_for_ever() -> None:
    reflector = brought_to(State.WATCHING)
    for number in range(10 * PATIENCE):
        reflector.event(Event("BOOKMARK", resource_version=f"v{number}"))
        reflector.failed(UnreachableError("the connection broke"), 30.0)
        assert reflector.request().params()["resourceVersion"] == f"v{number}"


@pytest.mark.parametrize("lasted, most", [(0.2, PATIENCE), (SILENCE_PER_PAGE / 3, 3)])
def test_watches_that_never_bring_anything_make_a_list_now_and_then(lasted: float, most: int) -> None:
    """A proxy that holds events back, or lets no watch through, must not freeze what is held."""
    reflector = brought_to(State.WATCHING)
    for _ in range(3):
        # One that brings something starts the count, and is not counted itself.
        reflector.event(Event("BOOKMARK", resource_version="v2"))
        reflector.ended(lasted)
        reflector.request()
        for _ in range(most):
            assert reflector.state is State.WATCHING
            reflector.ended(lasted)
            reflector.request()
        assert reflector.state is State.LISTING
        assert (reflector.trouble is None) == (lasted > SHORT_WATCH), "quiet is no trouble"
        assert reflector.page(a_page("v2", "", P1)) == {P1: "old"}
        reflector.request()


@pytest.mark.parametrize(
    "objects, patience",
    [(0, SILENCE_PER_PAGE), (2, SILENCE_PER_PAGE), (3, 2 * SILENCE_PER_PAGE), (1000, MOST_SILENCE)],
)
def test_the_larger_a_list_the_longer_silence_is_let_pass(objects: int, patience: float) -> None:
    """So that what silence costs is a page in so many seconds, whatever the size."""
    reflector: Reflector[str] = Reflector(page_size=2, random=Random(0))
    reflector.request()
    reflector.page(Page("v1", "", [(("ns", f"env-{number}"), "x") for number in range(objects)]))
    reflector.request()
    reflector.ended(patience - 2)
    assert isinstance(reflector.request(), Watch)
    reflector.ended(3)
    assert isinstance(reflector.request(), ListPage)
    assert reflector.pause() == 0


def test_a_silent_watch_of_a_server_without_bookmarks_is_no_trouble() -> None:
    reflector = brought_to(State.WATCHING)
    reflector.ended(300.0)
    assert reflector.pause() == 0
    assert reflector.trouble is None
    assert reflector.failures == 0


def test_a_short_watch_that_brought_something_is_followed_within_a_second_of_its_start() -> None:
    reflector = brought_to(State.WATCHING)
    for _ in range(10):
        reflector.event(Event("BOOKMARK", resource_version="v2"))
        reflector.ended(0.3)
        assert reflector.pause() == pytest.approx(SHORT_WATCH - 0.3), "it does not grow"
        reflector.request()


# --- pauses


@given(st.integers())
def test_pauses_are_drawn_from_a_range_that_doubles_up_to_a_limit(seed: int) -> None:
    reflector = a_reflector(seed)
    for failure in range(100):
        reflector.request()
        reflector.failed(api_error(403))
        assert LEAST_PAUSE <= reflector.pause() <= min(FIRST_PAUSE * 2**failure, LONGEST_PAUSE)
        assert reflector.pause() == reflector.pause()
        assert reflector.failures == failure + 1


def test_pauses_of_many_are_spread() -> None:
    pauses = []
    for seed in range(300):
        reflector = a_reflector(seed)
        for _ in range(20):
            reflector.request()
            reflector.failed(UnreachableError("nobody is there"))
        pauses.append(reflector.pause())
    assert min(pauses) < 1 < LONGEST_PAUSE - 1 < max(pauses)
    assert abs(sum(pauses) / 300 - LONGEST_PAUSE / 2) < 2


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize(
    "asked, least", [(7.0, 7.0), (10_000.0, LONGEST_RETRY_AFTER), (0.0, LEAST_PAUSE), (None, LEAST_PAUSE)]
)
def test_a_server_that_asks_for_patience_gets_it_within_reason(state: State, asked: float | None, least: float) -> None:
    reflector = brought_to(state)
    reflector.failed(api_error(429, retry_after=asked))
    assert least <= reflector.pause() <= max(least, FIRST_PAUSE)
    # The next failure says nothing of the kind.
    reflector.request()
    reflector.failed(api_error(429))
    assert reflector.pause() <= 2 * FIRST_PAUSE


def test_a_retry_after_that_is_no_number_counts_for_nothing() -> None:
    reflector = brought_to(State.WATCHING)
    reflector.failed(api_error(429, retry_after=float("nan")))
    assert LEAST_PAUSE <= reflector.pause() <= FIRST_PAUSE


def fail_after_a_list(reflector: Reflector[str], error: ApiError, lasted: float) -> float:
    """A list that works, then a watch that brings an event and fails. Returns the pause after it."""
    if reflector.state is not State.WATCHING:
        reflector.request()
        assert reflector.page(a_page("v1", "", P1)) is not None
        assert reflector.pause() == 0
    reflector.request()
    reflector.event(Event("ADDED", P2, "v2", "new"))
    reflector.event(error_event(error), lasted)
    return reflector.pause()


@pytest.mark.parametrize("code, first", [(410, 0.0), (403, LEAST_PAUSE)])
def test_lists_that_work_between_watches_that_fail_do_not_make_a_loop(code: int, first: float) -> None:
    reflector = a_reflector()
    pauses = [fail_after_a_list(reflector, api_error(code), 1.0) for _ in range(40)]
    assert (pauses[0] == 0) == (first == 0)
    assert min(pauses[1:]) >= LEAST_PAUSE
    assert sum(pauses[10:]) / 30 > LONGEST_PAUSE / 4
    assert reflector.failures == 40
    # One steady watch, and it is the first time again.
    assert (fail_after_a_list(reflector, api_error(code), STEADY_WATCH) == 0) == (first == 0)
    assert reflector.failures == 1


@pytest.mark.parametrize("way", ["event", "failed", "ended"])
def test_a_steady_watch_ends_a_row_of_failures(way: str) -> None:
    reflector = a_reflector()
    for _ in range(7):
        fail_after_a_list(reflector, api_error(403), 0.0)
    reflector.request()
    reflector.page(a_page("v1"))
    reflector.request()
    assert reflector.failures == 7
    if way == "event":
        reflector.event(Event("BOOKMARK", resource_version="v2"), STEADY_WATCH - 0.1)
        assert reflector.failures == 7
        reflector.event(Event("BOOKMARK", resource_version="v2"), STEADY_WATCH)
        assert reflector.failures == 0
    elif way == "failed":
        reflector.failed(UnreachableError("the connection broke"), STEADY_WATCH)
        assert reflector.failures == 1
        assert reflector.pause() <= FIRST_PAUSE
    else:
        reflector.ended(STEADY_WATCH)
        assert reflector.failures == 0


def test_a_list_that_was_slow_to_fail_is_no_steady_watch() -> None:
    reflector = a_reflector()
    for _ in range(7):
        fail_after_a_list(reflector, api_error(403), 0.0)
    reflector.request()
    reflector.failed(UnreachableError("the deadline has passed"), 30.0)
    assert reflector.failures == 8


def test_a_whole_list_ends_the_row_of_failed_lists_alone() -> None:
    reflector = a_reflector()
    for _ in range(3):
        fail_after_a_list(reflector, api_error(403), 0.0)
    for _ in range(4):
        reflector.request()
        reflector.failed(api_error(403))
    assert reflector.failures == 7
    reflector.request()
    reflector.page(a_page())
    assert reflector.failures == 3


# --- what it costs a server that fails, in requests by time

Outcome = Callable[[Reflector[str]], float]


def fails(error: KubernetesError) -> Outcome:
    def outcome(reflector: Reflector[str]) -> float:
        reflector.failed(error)
        return 0.0

    return outcome


def breaks_after_an_event(error: KubernetesError) -> Outcome:
    def outcome(reflector: Reflector[str]) -> float:
        reflector.event(Event("ADDED", P1, "v2", "new"))
        reflector.failed(error)
        return 0.0

    return outcome


def ends(reflector: Reflector[str]) -> float:
    reflector.ended(0.0)
    return 0.0


def ends_after_an_event(reflector: Reflector[str]) -> float:
    reflector.event(Event("ADDED", P1, "v2", "new"))
    reflector.ended(0.0)
    return 0.0


def is_listed(reflector: Reflector[str]) -> float:
    reflector.page(a_page("v1", "", P1))
    return 0.0


def has_a_token_twice(reflector: Reflector[str]) -> float:
    reflector.page(a_page("v1", "t1", P1))
    return 0.0


def expires_after_a_page(reflector: Reflector[str]) -> float:
    if "continue" in reflector.request().params():
        reflector.failed(api_error(410))
    else:
        reflector.page(a_page("v1", "t1", P1))
    return 0.0


ERRORS: dict[str, KubernetesError] = {
    **{str(code): api_error(code) for code in (400, 403, 404, 410, 429, 500, 503)},
    "too large": TOO_LARGE,
    "unreachable": UnreachableError("nobody is there"),
    "unreadable": AnswerError("no JSON"),
}
LIST_OUTCOMES: dict[str, Outcome] = {
    **{name: fails(error) for name, error in ERRORS.items()},
    "works": is_listed,
    "token twice": has_a_token_twice,
    "token expires": expires_after_a_page,
}
WATCH_OUTCOMES: dict[str, Outcome] = {
    **{name: fails(error) for name, error in ERRORS.items()},
    **{f"event, {name}": breaks_after_an_event(error) for name, error in ERRORS.items()},
    "ends": ends,
    "event, ends": ends_after_an_event,
}


def requests_in(seconds: float, lists: Callable[[], Outcome], watches: Callable[[], Outcome], seed: int) -> int:
    """How many requests are made of a server that answers in no time at all."""
    reflector = a_reflector(seed)
    now = 0.0
    requests = 0
    while now < seconds and requests < 100_000:
        request = reflector.request()
        requests += 1
        outcome = lists() if isinstance(request, ListPage) else watches()
        now += outcome(reflector) + reflector.pause()
    return requests


#: Requests in an hour at most: five between any two pauses, which are a quarter of a minute on average, and the first
#: minute's. A watch that brings something may come each second.
IN_AN_HOUR = 5 * 3600 / (LONGEST_PAUSE / 2) + 60


@pytest.mark.parametrize("watch", WATCH_OUTCOMES)
@pytest.mark.parametrize("listing", LIST_OUTCOMES)
def test_a_server_that_always_fails_the_same_way_is_not_asked_in_a_loop(listing: str, watch: str) -> None:
    count = requests_in(3600, lambda: LIST_OUTCOMES[listing], lambda: WATCH_OUTCOMES[watch], seed=1)
    assert 100 < count < (3700 if (listing, watch) == ("works", "event, ends") else IN_AN_HOUR)


@given(st.integers(), st.integers(0, 3))
def test_a_server_that_fails_differently_each_time_is_not_asked_in_a_loop(seed: int, mostly: int) -> None:
    draw = Random(seed)
    list_outcomes = [*LIST_OUTCOMES.values(), *[is_listed] * 10 * mostly]
    watch_outcomes = [outcome for name, outcome in WATCH_OUTCOMES.items() if name != "event, ends"]
    count = requests_in(3600, lambda: draw.choice(list_outcomes), lambda: draw.choice(watch_outcomes), seed)
    assert count < IN_AN_HOUR


# --- against a model of an API server


class Server:
    """A resource with a history of versions. Versions and tokens are words that mean nothing to anybody else."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.content: dict[Key, str] = {}
        #: what there was at each version, and the event that led there; None where there was none for this resource
        self.versions: dict[str, dict[Key, str]] = {}
        self.events: list[tuple[str, Event[str] | None]] = []
        #: how many of the events are forgotten; a watch from before them is gone
        self.compacted = 0
        self.tokens: dict[str, tuple[str, int]] = {}
        #: tokens offered for a list that goes on with another version
        self.inconsistent: set[str] = set()
        self.step(None)

    def word(self) -> str:
        return f"{self._random.getrandbits(40):x}"

    def step(self, event: Callable[[str], Event[str]] | None) -> None:
        """The next version."""
        version = self.word()
        self.versions[version] = dict(self.content)
        self.events.append((version, event(version) if event else None))

    def write(self, key: Key, value: str) -> None:
        kind = "MODIFIED" if key in self.content else "ADDED"
        self.content[key] = value
        self.step(lambda version: Event(kind, key, version, value))

    def delete(self, key: Key) -> None:
        value = self.content.pop(key, None)
        if value is not None:
            self.step(lambda version: Event("DELETED", key, version, value))

    def compact(self) -> None:
        self.compacted = len(self.events) - 1

    def place(self, version: str) -> int:
        return next(index for index, (other, _) in enumerate(self.events) if other == version)

    def page(self, request: ListPage) -> Page[str]:
        """A page; raises ApiError as an API server would answer."""
        if request.continue_token:
            assert request.continue_token not in self.inconsistent, "two versions in one list"
            version, begin = self.tokens[request.continue_token]
            if self.place(version) < self.compacted:
                offered = self.word()
                self.inconsistent.add(offered)
                raise api_error(410, status_reason="Expired", continue_token=offered)
        else:
            version, begin = self.events[-1][0], 0
        objects = sorted(self.versions[version].items())
        end = len(objects) if request.limit is None else begin + request.limit
        token = ""
        if end < len(objects):
            token = self.word()
            self.tokens[token] = (version, end)
        return Page(version, token, objects[begin:end])

    def since(self, request: Watch) -> list[Event[str]]:
        """What is to be told since then; raises ApiError as an API server would answer."""
        begin = self.place(request.resource_version)
        if begin < self.compacted:
            raise api_error(410, status_reason="Expired")
        return [event or Event("BOOKMARK", resource_version=version) for version, event in self.events[begin + 1 :]]


KEYS = st.sampled_from([("n", f"p{number}") for number in range(7)])
#: how a request may go wrong; None: it does not
FAULTS = st.none() | st.sampled_from(sorted(ERRORS))


class ReflectorMachine(RuleBasedStateMachine):
    """Objects are written, deleted and forgotten while the reflector makes its requests, any of which may go wrong."""

    @initialize(seed=st.integers(), page_size=st.integers(1, 4))
    def begin(self, seed: int, page_size: int) -> None:
        self.server = Server(Random(seed))
        self.reflector = a_reflector(seed, page_size)
        self.cache: dict[Key, str] = {}
        #: versions that the server has called gone, until a list names them again
        self.dead: set[str] = set()
        self.serial = 0

    @rule(key=KEYS)
    def write(self, key: Key) -> None:
        self.serial += 1
        self.server.write(key, f"value {self.serial}")

    @rule(key=KEYS)
    def delete(self, key: Key) -> None:
        self.server.delete(key)

    @rule()
    def another_resource_changes(self) -> None:
        self.server.step(None)

    @rule()
    def compact(self) -> None:
        self.server.compact()

    @rule(fault=FAULTS, told=st.integers(0, 5), strange=st.booleans(), lasted=st.sampled_from([0.0, 0.5, 3.0, 300.0]))
    def a_request(self, fault: str | None, told: int, strange: bool, lasted: float) -> None:
        self.request(fault, told, strange, lasted)

    def request(self, fault: str | None, told: int, strange: bool, lasted: float) -> None:
        """One request, of which a watch tells a few events before it ends or goes wrong."""
        assert 0 <= self.reflector.pause() <= LONGEST_RETRY_AFTER
        request = self.reflector.request()
        if isinstance(request, ListPage):
            self.list(request, ERRORS[fault] if fault else None)
        else:
            self.watch(request, ERRORS[fault] if fault else None, told, strange, lasted)
        assert not self.reflector.under_way

    @rule()
    def bad_page(self) -> None:
        """A page that no server should send: with the token that was just sent, or without a version."""
        request = self.reflector.request()
        if isinstance(request, ListPage):
            version = "odd" if request.continue_token else ""
            assert self.reflector.page(Page(version, request.continue_token, [(("n", "odd"), "odd")])) is None

    def list(self, request: ListPage, error: KubernetesError | None) -> None:
        if error is not None:
            self.reflector.failed(error)
            return
        try:
            page = self.server.page(request)
        except ApiError as gone:
            self.reflector.failed(gone)
            return
        content = self.reflector.page(page)
        assert (content is None) == bool(page.continue_token)
        if content is not None:
            self.cache = dict(content)
            self.dead.discard(self.reflector.position)

    def watch(self, request: Watch, error: KubernetesError | None, told: int, strange: bool, lasted: float) -> None:
        version = request.resource_version
        assert version not in self.dead, "a dead version is sent again"
        try:
            events = self.server.since(request)[:told]
        except ApiError as gone:
            self.dead.add(version)
            self.reflector.failed(gone)
            assert self.reflector.state is State.LISTING
            return
        for event in events:
            self.apply(event, lasted)
        if strange:
            self.apply(Event("SHUFFLED", ("n", "odd"), self.server.word(), "odd"), lasted)
        if error is None:
            self.reflector.ended(lasted)
            return
        if isinstance(error, ApiError) and error.code == 410:
            self.dead.add(self.reflector.position)
        if isinstance(error, ApiError) and strange:
            assert self.reflector.event(error_event(error), lasted) is None
            # What stood behind it in the same chunk.
            self.apply(Event("ADDED", ("n", "late"), self.server.word(), "late"), lasted)
        else:
            self.reflector.failed(error, lasted)

    def apply(self, event: Event[str], lasted: float) -> None:
        change = self.reflector.event(event, lasted)
        if isinstance(change, Put):
            self.cache[change.key] = change.object
        elif isinstance(change, Gone):
            self.cache.pop(change.key, None)

    @invariant()
    def what_is_held_is_what_there_was_at_the_position(self) -> None:
        if self.reflector.state is State.WATCHING:
            assert self.reflector.listed
            assert self.cache == self.server.versions[self.reflector.position]
        else:
            assert self.reflector.position == ""

    def teardown(self) -> None:
        """The server is well from now on: soon everything is held as it is there."""
        if not hasattr(self, "server"):
            return
        # What is left of a list whose token has expired, and one more, in pages of one object; then two watches.
        for _ in range(2 * len(self.server.content) + 6):
            self.request(None, len(self.server.events), False, 300.0)
        assert self.cache == self.server.content


TestReflector = ReflectorMachine.TestCase


# --- as it is drawn


def test_each_pair_stands_in_one_row_of_the_drawing_with_what_follows() -> None:
    found = {}
    for states, happenings, then, transition in reflector_table.merged(TABLE):
        for state, happening in product(states, happenings):
            assert (state, happening) not in found
            found[state, happening] = (state if then == "the same" else State(then), *transition[1:])
    assert found == {pair: tuple(transition) for pair, transition in TABLE.items()}


def drawing() -> tuple[Iterator[str], Mapping[str, set[str]]]:
    """The lines of the picture, and the happenings in the table by their states."""
    text = reflector_table.drawn()
    picture = text.split("```mermaid\n")[1].split("```")[0].splitlines()
    rows: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "| while")):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == 6
            rows.setdefault(cells[0], set()).update(cells[1].split("; "))
    return iter(picture), rows


def test_the_drawing_shows_every_state_and_every_happening() -> None:
    picture, rows = drawing()
    assert next(picture) == "stateDiagram-v2"
    lines = list(picture)
    for state in State:
        assert f'    state "{state.value}" as {state.name}' in lines
    edges = [line for line in lines if "-->" in line and "[*]" not in line]
    assert {tuple(edge.split(" : ")[0].split()[::2]) for edge in edges} == {
        (state.name, transition.state.name) for (state, _), transition in TABLE.items() if transition.state is not state
    }
    # More colons and semicolons than the one before the label are not understood by what draws the picture.
    assert all(edge.count(":") == 1 and ";" not in edge for edge in edges)
    assert {happening for happenings in rows.values() for happening in happenings} == {
        happening.value for happening in Happening
    }

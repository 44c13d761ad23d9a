"""How a copy of a resource's objects is kept true: list them all, page by page, then watch what changes, and know after
each failure whether to go on or to begin again. All of it is one table, TABLE: what is to happen next, by what the
reflector is doing (State) and what has happened to it (Happening). `docs/kubernetes.md` shows that table.

Nothing here reads, writes, waits or looks at a clock. Who does that is `informer.py`, which asks for the next request,
sends it, and tells what came of it. What the objects mean is the mappers' business.

    list, page by page ──▶ the whole content, with its version ──▶ watch from there ──▶ changes, each with its version
        ▲                                                            │      ▲  │
        └─────── the version is of no use any more ◀─────────────────┘      └──┘ the watch has ended, or was cut off

Ground rules:

- A resourceVersion is a word of the server's. It is sent back as it came, and never parsed, ordered or made up.
- Only a whole list replaces what is held, so an object that was removed while nobody watched does not survive it.
- A version that the server has called gone is dropped on the spot. Only a later list can name it again.
- Whatever fails, the next request comes later each time; what restarts at once can do so only a bounded number of
  times before it has to wait as well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from trio_federation_kubernetes.errors import AnswerError, ApiError, KubernetesError
from trio_federation_kubernetes.resources import Key

if TYPE_CHECKING:
    from trio_federation_kubernetes.decoding import Event, Page

T = TypeVar("T")

#: Seconds that a watch is asked to last, drawn for each. Long enough that the requests cost next to nothing, and below
#: the ten minutes after which many proxies cut a connection. Drawn, so that a thousand agents that a restart of the
#: server has thrown off together do not come back together for ever.
WATCH_TIMEOUT = (240, 480)

#: Seconds: after the first failure the pause is drawn from up to FIRST_PAUSE, after each further one from up to twice
#: as much, up to LONGEST_PAUSE. The first is short enough that a restart of the server is hardly noticed, and the
#: longest is half of the usual TTL, so that a server that is back is heard of soon; to one that stays away for hours it
#: makes eight requests a minute on average from each agent.
FIRST_PAUSE = 0.8
LONGEST_PAUSE = 15.0
#: Seconds below which no pause is drawn. A draw from zero would now and then be no pause at all, and that in a row.
LEAST_PAUSE = 0.2
#: Seconds: a server that asks for more patience than this is asked again all the same.
LONGEST_RETRY_AFTER = 120.0

#: Seconds: a watch that has ended sooner was not worth its request.
SHORT_WATCH = 1.0
#: Seconds: once a watch was open for so long, the failures of the ones before it do not count any more. Not when it
#: brings its first event: a watch that breaks after each event would be asked for in a loop.
STEADY_WATCH = 5.0

#: Tries in a row with the same version, or the same page, that bring nothing. Then the list begins again: should the
#: fault lie with that version, nothing else would help, and where no watch works at all the lists keep the copy fresh.
PATIENCE = 5

#: Seconds for which watches may bring nothing, not even a bookmark, for each page that the list had, and at most: then
#: it begins again, as no trouble. Where nothing at all happens to a resource, API servers send no bookmarks, so this
#: must not cost much: it is a page in so many seconds. What it bounds is how long a change stays unseen where something
#: on the way holds events back.
SILENCE_PER_PAGE = 85.0
MOST_SILENCE = 1800.0

#: Pages of one list: some million objects at the usual size of a page. What has more does not end.
MOST_PAGES = 10_000


class State(Enum):
    """What the reflector is doing. The values are for people."""

    LISTING = "listing"
    RELISTING = "listing again"
    UNPAGED = "listing unpaged"
    WATCHING = "watching"


class Happening(Enum):
    """What came of a request. The values are for people."""

    PAGE = "a page, with a token for the next"
    LAST_PAGE = "the last page"
    BAD_PAGE = "a page that leads nowhere (no version, the same token again, no end)"
    TOKEN_EXPIRED = "410 to a continue token"  # noqa: S105 - no secret
    CHANGE = "ADDED, MODIFIED or DELETED"
    BOOKMARK = "BOOKMARK"
    UNKNOWN_EVENT = "an event of an unknown type, or of an object without a name"
    ENDED = "the watch ends"
    ENDED_SOON = "the watch ends within a second"
    ENDED_SILENT = "the watch ends, and has brought nothing"
    ENDED_EMPTY = "the watch ends within a second, and has brought nothing"
    EXPIRED = "410"
    TOO_LARGE = "504, too large resource version"
    BUSY = "429 or 5xx"
    UNREACHABLE = "no answer, or no credential"
    SILENT = f"the watch ends, and nothing has come for {SILENCE_PER_PAGE:g} s for each page of the list"
    #: the version or the page was kept after each of them
    FRUITLESS = f"{PATIENCE} tries in a row that bring nothing"
    REFUSED = "any other refusal"
    UNREADABLE = "an answer that makes no sense"


class Effect(Enum):
    """What a transition does with what the reflector holds. The values are for people."""

    GATHER = "keep the page"
    REPLACE = "replace the copy, take the list's version"
    APPLY = "apply the change, take its version"
    MOVE = "take its version"
    SKIP = "count it"
    KEEP = "keep version and pages"
    DROP = "drop version and pages"


class Pause(Enum):
    """How long the next request waits. The values are for people."""

    NONE = "at once"
    SPACED = "one a second"
    SECOND = "at once, from the second time on backoff"
    BACKOFF = "backoff"


class Transition(NamedTuple):
    """What follows."""

    state: State
    effect: Effect
    pause: Pause
    #: the reason, in a line for people
    why: str


class _Rule(NamedTuple):
    """Some entries of the table at once."""

    states: tuple[State, ...]
    happenings: tuple[Happening, ...]
    #: None: stays what it is
    next: State | None
    effect: Effect
    pause: Pause
    why: str


_LISTS = (State.LISTING, State.RELISTING, State.UNPAGED)
_WATCH = (State.WATCHING,)

_RULES = (
    _Rule(_LISTS, (Happening.PAGE,), None, Effect.GATHER, Pause.NONE, "A part of a list replaces nothing."),
    _Rule(
        _LISTS,
        (Happening.LAST_PAGE,),
        State.WATCHING,
        Effect.REPLACE,
        Pause.NONE,
        "The list is whole. An absent or empty token ends it.",
    ),
    _Rule(
        (State.LISTING,),
        (Happening.TOKEN_EXPIRED,),
        State.RELISTING,
        Effect.DROP,
        Pause.NONE,
        "The list took longer than the server keeps its version; once more may do. "
        "The token that such an answer offers would join two versions into one list.",
    ),
    _Rule(
        (State.RELISTING,),
        (Happening.TOKEN_EXPIRED,),
        State.UNPAGED,
        Effect.DROP,
        Pause.NONE,
        "Paging is too slow here, and a single answer cannot expire.",
    ),
    _Rule(
        (State.UNPAGED,),
        (Happening.TOKEN_EXPIRED, Happening.EXPIRED),
        None,
        Effect.DROP,
        Pause.BACKOFF,
        "Nothing is left to try but the same again, later.",
    ),
    _Rule(
        (State.LISTING, State.RELISTING),
        (Happening.EXPIRED,),
        None,
        Effect.DROP,
        Pause.BACKOFF,
        "No version was asked for, so none can have expired: a fault of the server's.",
    ),
    _Rule(
        (State.LISTING,),
        (Happening.BAD_PAGE,),
        State.RELISTING,
        Effect.DROP,
        Pause.BACKOFF,
        "Following it would never end, or end in a watch from nowhere.",
    ),
    _Rule(
        (State.RELISTING,),
        (Happening.BAD_PAGE,),
        State.UNPAGED,
        Effect.DROP,
        Pause.BACKOFF,
        "Following it would never end, or end in a watch from nowhere.",
    ),
    _Rule(
        _LISTS,
        (Happening.BUSY, Happening.UNREACHABLE, Happening.TOO_LARGE),
        None,
        Effect.KEEP,
        Pause.BACKOFF,
        "The pages so far are good: the same page is asked for again.",
    ),
    _Rule(
        _LISTS,
        (Happening.FRUITLESS, Happening.REFUSED, Happening.UNREADABLE),
        State.LISTING,
        Effect.DROP,
        Pause.BACKOFF,
        "The same request would fail the same way, so all begins again.",
    ),
    _Rule(
        (State.UNPAGED,),
        (Happening.BAD_PAGE,),
        State.LISTING,
        Effect.DROP,
        Pause.BACKOFF,
        "The same request would fail the same way, so all begins again.",
    ),
    _Rule(_WATCH, (Happening.CHANGE,), None, Effect.APPLY, Pause.NONE, "This is what a watch is for."),
    _Rule(
        _WATCH,
        (Happening.BOOKMARK,),
        None,
        Effect.MOVE,
        Pause.NONE,
        "The version stays young enough to resume from, also where nothing changes.",
    ),
    _Rule(
        _WATCH,
        (Happening.UNKNOWN_EVENT,),
        None,
        Effect.SKIP,
        Pause.NONE,
        "A newer server may know more; what it means by it is unknown, its version included.",
    ),
    _Rule(_WATCH, (Happening.ENDED,), None, Effect.KEEP, Pause.NONE, "Each watch ends after its timeout."),
    _Rule(
        _WATCH,
        (Happening.ENDED_SILENT,),
        None,
        Effect.KEEP,
        Pause.NONE,
        "Where nothing happens to a resource, servers send no bookmarks either.",
    ),
    _Rule(
        _WATCH,
        (Happening.SILENT,),
        State.LISTING,
        Effect.DROP,
        Pause.NONE,
        "Perhaps nothing happened for long. Perhaps something on the way holds events back, and only a list can tell.",
    ),
    _Rule(
        _WATCH,
        (Happening.ENDED_SOON,),
        None,
        Effect.KEEP,
        Pause.SPACED,
        "It brought something; others like it must not come in a loop.",
    ),
    _Rule(
        _WATCH,
        (Happening.ENDED_EMPTY, Happening.BUSY, Happening.UNREACHABLE),
        None,
        Effect.KEEP,
        Pause.BACKOFF,
        "It says nothing against the version, and to resume costs the server least.",
    ),
    _Rule(
        _WATCH,
        (Happening.EXPIRED,),
        State.LISTING,
        Effect.DROP,
        Pause.SECOND,
        "The server has forgotten that version, and it is never sent again. "
        "A fresh list is all it takes, unless that ends the same way.",
    ),
    _Rule(
        _WATCH,
        (Happening.TOO_LARGE,),
        State.LISTING,
        Effect.DROP,
        Pause.BACKOFF,
        "The server knows less than we do: it catches up soon, or was restored from a backup.",
    ),
    _Rule(
        _WATCH,
        (Happening.FRUITLESS, Happening.REFUSED),
        State.LISTING,
        Effect.DROP,
        Pause.BACKOFF,
        "The version may be at fault; and where only watches fail, lists keep the copy fresh.",
    ),
    _Rule(
        _WATCH,
        (Happening.UNREADABLE,),
        State.LISTING,
        Effect.DROP,
        Pause.BACKOFF,
        "From the same version the same event would come again.",
    ),
)


def _expanded(rules: Iterable[_Rule]) -> Mapping[tuple[State, Happening], Transition]:
    table: dict[tuple[State, Happening], Transition] = {}
    for rule in rules:
        for state, happening in product(rule.states, rule.happenings):
            assert (state, happening) not in table, f"two rules for {state}, {happening}"
            table[state, happening] = Transition(rule.next or state, rule.effect, rule.pause, rule.why)
    return table


#: What follows, for each pair that can occur.
TABLE: Mapping[tuple[State, Happening], Transition] = _expanded(_RULES)

#: The HTTP status that belongs to a Status object's reason, for those that come without one.
_CODES = {
    "Expired": 410,
    "Gone": 410,
    "TooManyRequests": 429,
    "InternalError": 500,
    "ServerTimeout": 500,
    "ServiceUnavailable": 503,
    "Timeout": 504,
}


class ListPage(NamedTuple):
    """A request for a page of a list, as new and as consistent as the server can make it."""

    #: objects at most; None: all that there are
    limit: int | None
    #: where the page before has ended; "" for the first
    continue_token: str = ""

    def params(self) -> dict[str, str]:
        """What stands in its query, without a selector."""
        params: dict[str, str] = {}
        if self.limit is not None:
            params["limit"] = str(self.limit)
        if self.continue_token:
            params["continue"] = self.continue_token
        return params


class Watch(NamedTuple):
    """A request for the changes since a version."""

    resource_version: str
    #: seconds after which the server is to end it
    timeout: int

    def params(self) -> dict[str, str]:
        """What stands in its query, without a selector."""
        return {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self.resource_version,
            "timeoutSeconds": str(self.timeout),
        }


class Put(NamedTuple, Generic[T]):
    """The object `key` is now this."""

    key: Key
    object: T


class Gone(NamedTuple):
    """The object `key` is there no more."""

    key: Key


Change: TypeAlias = Put[T] | Gone


class Reflector(Generic[T]):
    """One resource in one place (a namespace, or all of them), with objects of type T.

    `page_size`: objects in a page, at least 1 (ValueError). `random`: draws pauses and the timeouts of watches.

    Whoever drives it waits `pause()` seconds, sends `request()`, and tells what came of it until it is not `under_way`
    any more; then the next. A ListPage ends with one call of `page` or `failed`. A Watch goes on over any number of
    calls of `event`, until one of them was an ERROR event, or with `failed` or `ended`; close the connection then. What
    arrives after that is ignored. A request may be given up without a word: the next one is made as if it had not been.
    """

    def __init__(self, *, page_size: int, random: Random) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}, and must be 1 or more")
        self._page_size = page_size
        self._random = random
        self._state = State.LISTING
        self._request: ListPage | Watch | None = None
        self._pause = 0.0
        # Of a list under way: what has come so far, its version, and the tokens that were given, the last one last.
        self._gathered: dict[Key, T] = {}
        self._version = ""
        self._tokens: dict[str, None] = {}
        # Of a watch: where it stands, and whether it has brought anything yet.
        self._position = ""
        self._brought = False
        # Failures in a row. Those of lists end with a whole one; those of watches do not, or a list between two of them
        # would let both go on in a loop.
        self._failed_lists = 0
        self._failed_watches = 0
        #: how many of the watches were told that their version is gone
        self._expired_watches = 0
        self._fruitless = 0
        #: seconds for which watches have brought nothing, and may
        self._silent = 0.0
        self._most_silence = MOST_SILENCE
        self._listed = False
        self._skipped = 0
        self._trouble: KubernetesError | None = None

    def __repr__(self) -> str:
        position = f" at {self._position!r}" if self._position else f", {len(self._gathered)} objects so far"
        return (
            f"<Reflector {self._state.value}{position}, {'' if self._listed else 'not '}listed, "
            f"{self.failures} failures, pause {self._pause:.1f} s>"
        )

    @property
    def state(self) -> State:
        """What it is doing."""
        return self._state

    @property
    def position(self) -> str:
        """The version up to which everything is known, in the server's word; "" where no watch can start."""
        return self._position

    @property
    def failures(self) -> int:
        """How often in a row lists and watches have failed. A whole list ends the row of lists, and a watch that was
        open for STEADY_WATCH seconds that of watches."""
        return self._failed_lists + self._failed_watches

    @property
    def listed(self) -> bool:
        """Whether a list was ever complete."""
        return self._listed

    @property
    def skipped(self) -> int:
        """How many events have come that are of an unknown type, or of an object without a name."""
        return self._skipped

    @property
    def trouble(self) -> KubernetesError | None:
        """What has failed last, also where no call of `failed` told it; None once something has come since."""
        return self._trouble

    @property
    def under_way(self) -> bool:
        """Whether the last request has not come to its end yet."""
        return self._request is not None

    def pause(self) -> float:
        """Seconds to wait before the next request: 0 where it may be sent at once. The same at each call, until
        something happens."""
        return self._pause

    def request(self) -> ListPage | Watch:
        """What is to be sent next. It is under way from now on; one before it that has not ended is given up."""
        self._brought = False
        request: ListPage | Watch
        if self._state is State.WATCHING:
            request = Watch(self._position, self._random.randint(*WATCH_TIMEOUT))
        else:
            limit = None if self._state is State.UNPAGED else self._page_size
            request = ListPage(limit, next(reversed(self._tokens), ""))
        self._request = request
        return request

    def page(self, page: Page[T]) -> Mapping[Key, T] | None:
        """A page has come. Returns the whole content, which replaces what was held, when this was the last one; None
        while there is more to come, and when the list has to begin again (see `trouble`).

        Raises RuntimeError when no list is under way."""
        if not isinstance(self._request, ListPage):
            raise RuntimeError(f"a page has come, but no list is under way: {self!r}")
        fault = self._fault(page)
        if fault:
            self._happened(Happening.BAD_PAGE, AnswerError(fault))
            return None
        # All pages of a list are of one version. Should a server see that otherwise, the first is the safe one: a watch
        # from there tells some changes twice, and leaves none out.
        self._version = self._version or page.resource_version
        self._gathered.update(page.objects)
        if page.continue_token:
            self._tokens[page.continue_token] = None
            self._happened(Happening.PAGE)
            return None
        content, version = self._gathered, self._version
        self._happened(Happening.LAST_PAGE)
        self._drop()
        self._position = version
        pages = max(1, math.ceil(len(content) / self._page_size))
        self._most_silence = min(MOST_SILENCE, pages * SILENCE_PER_PAGE)
        self._listed = True
        return content

    def event(self, event: Event[T], lasted: float = 0.0) -> Change[T] | None:
        """A watch has told something. Returns what it changes; None where that is nothing. `lasted`: seconds since the
        watch was asked for. Ignored where no watch is under way.

        An ERROR event is the end of the watch. It may be told by `failed`, too, but not by both."""
        if not isinstance(self._request, Watch):
            return None
        match event.type:
            case "ADDED" | "MODIFIED" if event.key is not None and event.object is not None:
                self._moved(Happening.CHANGE, event.resource_version, lasted)
                return Put(event.key, event.object)
            case "DELETED" if event.key is not None:
                self._moved(Happening.CHANGE, event.resource_version, lasted)
                return Gone(event.key)
            case "BOOKMARK":
                self._moved(Happening.BOOKMARK, event.resource_version, lasted)
            case "ERROR":
                self.failed(event.error or AnswerError("the watch sent an ERROR event without an error"), lasted)
            case _:
                self._skipped += 1
                self._happened(Happening.UNKNOWN_EVENT, lasted=lasted)
        return None

    def failed(self, error: KubernetesError, lasted: float = 0.0) -> None:
        """The request under way has failed: a page that was not had, a watch that could not be opened, or one that
        broke. `lasted`: seconds since it was sent; counts for a watch alone. Ignored where none is under way."""
        if self._request is not None:
            self._happened(self._kind(error), error, lasted)

    def ended(self, lasted: float) -> None:
        """The server has ended the watch, as it should. `lasted`: seconds since it was asked for. Ignored where none is
        under way."""
        if not isinstance(self._request, Watch):
            return
        if self._brought:
            self._happened(Happening.ENDED_SOON if lasted < SHORT_WATCH else Happening.ENDED, lasted=lasted)
            return
        if lasted < SHORT_WATCH:
            nothing = AnswerError(
                f"a watch has ended after {lasted:.1f} s with nothing; see what stands before the server"
            )
            self._happened(Happening.ENDED_EMPTY, nothing, lasted)
            return
        self._silent += lasted
        too_long = self._silent >= self._most_silence
        self._happened(Happening.SILENT if too_long else Happening.ENDED_SILENT, lasted=lasted)

    def _fault(self, page: Page[T]) -> str:
        """Why a page leads nowhere, "" where it does not."""
        if not self._version and not page.resource_version:
            return (
                "the list has no resourceVersion, so that nothing can be watched; see whether a proxy changes answers"
            )
        if page.continue_token in self._tokens:
            return "the list gives the same continue token twice, so that it has no end"
        if page.continue_token and len(self._tokens) + 1 >= MOST_PAGES:
            return f"the list has no end: {MOST_PAGES} pages, and a token for one more; raise page_size"
        return ""

    def _kind(self, error: KubernetesError) -> Happening:
        """What an error means for the request under way."""
        if isinstance(error, AnswerError):
            return Happening.UNREADABLE
        if not isinstance(error, ApiError):
            return Happening.UNREACHABLE  # or there was no credential, which says as little about the server
        code = error.code or _CODES.get(error.status_reason, 0)
        if code == 410 or error.status_reason in ("Expired", "Gone"):
            listing = isinstance(self._request, ListPage) and self._request.continue_token
            return Happening.TOKEN_EXPIRED if listing else Happening.EXPIRED
        if code == 504 and _is_too_large(error):
            return Happening.TOO_LARGE
        return Happening.BUSY if code == 429 or code >= 500 else Happening.REFUSED

    def _moved(self, happening: Happening, version: str, lasted: float) -> None:
        self._brought = True
        self._position = version or self._position
        self._happened(happening, lasted=lasted)

    def _happened(self, happening: Happening, error: KubernetesError | None = None, lasted: float = 0.0) -> None:
        """One step of the table; what needs the page or the event itself is left to the caller."""
        if lasted >= STEADY_WATCH and self._state is State.WATCHING:
            self._failed_watches = self._expired_watches = 0
        next_state, effect, pause, _ = TABLE[self._state, happening]
        if effect is Effect.KEEP and not self._brought and happening is not Happening.ENDED_SILENT:
            self._fruitless += 1
            if self._fruitless >= PATIENCE:
                next_state, effect, pause, _ = TABLE[self._state, Happening.FRUITLESS]
        self._pause = self._drawn(pause, lasted)
        if isinstance(error, ApiError) and error.retry_after is not None and error.retry_after > 0:
            self._pause = max(self._pause, min(error.retry_after, LONGEST_RETRY_AFTER))
        if error is not None and (effect is Effect.DROP or pause is not Pause.NONE):
            self._trouble = error
        if effect in (Effect.GATHER, Effect.REPLACE, Effect.APPLY, Effect.MOVE):
            self._trouble = None
            self._fruitless, self._silent = 0, 0.0
        if effect is Effect.REPLACE:
            self._failed_lists = 0
        if effect is Effect.DROP:
            self._drop()
        if effect not in (Effect.APPLY, Effect.MOVE, Effect.SKIP):
            self._request = None
        self._state = next_state

    def _drop(self) -> None:
        self._position = self._version = ""
        self._gathered = {}
        self._tokens = {}
        self._fruitless, self._silent = 0, 0.0

    def _drawn(self, pause: Pause, lasted: float) -> float:
        """The seconds of a pause; counts the failure that it is for."""
        if pause is Pause.NONE:
            return 0.0
        if pause is Pause.SPACED:
            return max(0.0, SHORT_WATCH - lasted)
        if self._state is State.WATCHING:
            self._failed_watches += 1
            failures = self._failed_watches
        else:
            self._failed_lists += 1
            failures = self._failed_lists
        if pause is Pause.SECOND:
            self._expired_watches += 1
            if self._expired_watches == 1:
                return 0.0  # whatever has failed before: the server is there, and has said what it takes
        # The doubling ends where the bound is reached for sure, long before the numbers would get too large.
        bound = min(LONGEST_PAUSE, math.ldexp(FIRST_PAUSE, min(failures, 30) - 1))
        return self._random.uniform(LEAST_PAUSE, bound)


def _is_too_large(error: ApiError) -> bool:
    """Whether a 504 means that the server has not got as far as the version that was sent, and not that it is slow."""
    # Servers before 1.18.6 say so in words alone.
    named = any(cause.reason == "ResourceVersionTooLarge" for cause in error.causes)
    return named or "Too large resource version" in error.message

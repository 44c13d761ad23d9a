"""What becomes of an env whose status the API server does not take from us, or not in the way that we would like: what
stands there is then less, and never old."""

from __future__ import annotations

from functools import partial
from typing import Any

import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.kubernetes.fake_api import Fault, Request, pool, refusal
from tests.kubernetes.mirroring import SOON, StatusServer, has, mirroring, told
from tests.kubernetes.waiting import within
from trio_federation_kubernetes.mirrored import LEAVE_ALONE
from trio_federation_kubernetes.sandboxenv import SANDBOXENVS

ENV_INTERVAL = 5.0
NOTHING: dict[str, dict[str, int]] = {}


def bare(value: Any) -> Any:
    """As Go writes a struct whose fields are all `omitempty`."""
    if isinstance(value, dict):
        return {name: bare(each) for name, each in value.items() if each not in (0, False, "", None)}
    return [bare(each) for each in value] if isinstance(value, list) else value


def without_zeros(status: dict[str, Any], idle: int) -> None:
    """A controller with a type of its own, which has no federation, has counted anew."""
    kept = bare(status)
    kept.pop("federation", None)
    (local,) = (entry for entry in kept["clusters"] if entry.get("isLocal"))
    local["observedMembers"] = [pool("own", idle)]
    status.clear()
    status.update(kept)


async def test_a_controller_that_writes_no_zeros_is_no_rival(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """It drops what is 0 or false of our entries, too, with each of its updates, and the summary. That means the same,
    so it goes on, and what is missing comes back with the next write."""
    server = StatusServer()
    server.make("env")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 0, running=3))
        await trio.sleep(SOON)
        for number in range(30):
            server.edit(SANDBOXENVS, "ns", "env", partial(without_zeros, idle=number))
            await trio.sleep(10.0)
        assert mirror.well()
        assert server.entries()["east"]["observedMembers"][0]["runningCount"] == 3
        assert len(mirror.sent) <= 1 + 300 / 60 + 1
        mirror.others.have(has("east", 1, running=2))
        await within(SOON + ENV_INTERVAL, lambda: server.foreign() == {"east": {"p1": 1}})
        assert server.summary() == (1, 1)
    assert set(told(logs)) == {"kubernetes_status_writes"}


class Objection(Fault):
    """Applies that hold this word are refused, as a definition does that has a list of words."""

    def __init__(self, word: str, code: int = 422) -> None:
        super().__init__(("apply",), error=lambda request: refusal(code, f"Unsupported value: {word}", where="fake"))
        self._word = word.encode()

    def meets(self, request: Request) -> bool:
        """Whether this one does."""
        return self._word in request.body and super().meets(request)


async def test_what_is_refused_again_is_not_shown_rather_than_old(autojump_clock: MockClock) -> None:
    """One cluster has a word that the definition here does not know. What the env showed of all of them goes, as it
    cannot be kept true; others are not concerned, and it comes back when the word is gone."""
    server = StatusServer()
    server.make("env", "other")
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 5), has("north", 5), has("east", 1, env="other"))
        await within(SOON, lambda: server.foreign() == {"east": {"p1": 5}, "north": {"p1": 5}})
        objection = Objection("Brandnew")
        server.faults.append(objection)
        mirror.others.have(has("east", 2, state="Brandnew"), has("north", 0))
        await trio.sleep(ENV_INTERVAL + SOON)
        assert server.foreign() == {"east": {"p1": 5}, "north": {"p1": 5}}, "once may be a slip"
        await within(30.0, lambda: server.foreign() == NOTHING)
        assert server.summary() is None
        assert mirror.troubles() == {("refused", ""): 1.0}
        text = mirror.shown()["last_error"]["text"]
        assert "is not shown, or old, in ns/env: " in text
        assert "Unsupported value" in text
        mirror.others.have(has("east", 3, env="other"))
        await within(ENV_INTERVAL + SOON, lambda: server.foreign("other") == {"east": {"p1": 3}})
        began = trio.current_time()
        await trio.sleep(3600.0)
        assert len([sent for sent in mirror.since(began) if sent.key[1] == "env"]) <= 3600 / LEAVE_ALONE + 6
        objection.end()
        await within(LEAVE_ALONE + SOON, lambda: server.foreign() == {"east": {"p1": 2}, "north": {"p1": 0}})
        await trio.sleep(SOON)
        assert mirror.well()


async def test_what_is_refused_is_forgotten_with_its_records_and_with_its_env(autojump_clock: MockClock) -> None:
    server = StatusServer()
    server.make("one", "two")
    async with mirroring(server) as mirror:
        server.refuse(422, "apply", message="no")
        mirror.others.have(has("east", 5, env="one"), has("east", 5, env="two"))
        await trio.sleep(60.0)
        assert mirror.troubles() == {("refused", ""): 1.0}
        assert "ns/one, ns/two" in mirror.shown()["last_error"]["text"]
        mirror.others.withdraw(has("east", 5, env="one"))
        server.delete(SANDBOXENVS, "ns", "two")
        await trio.sleep(5.0)
        assert mirror.well()


async def test_the_last_entry_of_a_list_that_is_somebody_elses_says_nothing(autojump_clock: MockClock) -> None:
    """A controller has made the list, and has no entry in it any more. Without ours it would be no list, which API
    servers refuse; so an entry stays, without pools and times. It goes when the list has another one."""
    server = StatusServer()
    server.make("env")
    server.edit(SANDBOXENVS, "ns", "env", lambda status: status.update(clusters=[]))
    async with mirroring(server) as mirror:
        mirror.others.have(has("east", 5), has("north", 1))
        await within(SOON, lambda: server.foreign() == {"east": {"p1": 5}, "north": {"p1": 1}})
        mirror.others.withdraw(has("east", 5), has("north", 1))
        await within(2 * ENV_INTERVAL + SOON, lambda: server.foreign() == {"east": {}})
        assert server.entries() == {"east": {"clusterID": "east", "isLocal": False}}
        assert server.summary() is None
        await trio.sleep(SOON)
        assert mirror.well()
        began = trio.current_time()
        await trio.sleep(3600.0)
        assert len(mirror.since(began)) <= 2 * 3600 / LEAVE_ALONE + 1
        mirror.others.have(has("east", 7))
        await within(SOON, lambda: server.foreign() == {"east": {"p1": 7}})
        assert server.summary() == (1, 7)
        server.edit(
            SANDBOXENVS,
            "ns",
            "env",
            lambda status: status["clusters"].insert(
                0, {"clusterID": "west", "isLocal": True, "observedMembers": [pool("own", 1)]}
            ),
        )
        mirror.others.withdraw(has("east", 7))
        await within(LEAVE_ALONE + 2 * ENV_INTERVAL, lambda: server.foreign() == NOTHING)
        await trio.sleep(SOON)
        assert mirror.well()


async def test_what_is_not_chosen_any_more_is_let_go_of(autojump_clock: MockClock) -> None:
    """An env that loses its label is out of sight, and still there; one that is deleted is not."""
    server = StatusServer()
    for name in ("stays", "leaves", "is-deleted"):
        server.put(SANDBOXENVS, "ns", name, {"mirror": "yes"}, status={"idleReplicas": 1})
    server.put(SANDBOXENVS, "ns", "never", {"mirror": "no"}, status={"idleReplicas": 1})
    names = ("stays", "leaves", "is-deleted", "never")
    async with mirroring(server, label_selector="mirror=yes") as mirror:
        mirror.others.have(*(has("east", 5, env=name) for name in names))
        await within(SOON, lambda: all(server.foreign(name) == {"east": {"p1": 5}} for name in names[:3]))
        await trio.sleep(ENV_INTERVAL)
        status = server.env("leaves")["status"]
        managed = server.env("leaves")["metadata"]["managedFields"]
        server.put(SANDBOXENVS, "ns", "leaves", {"mirror": "no"}, metadata={"managedFields": managed}, status=status)
        server.delete(SANDBOXENVS, "ns", "is-deleted")
        await within(ENV_INTERVAL + SOON, lambda: server.foreign("leaves") == NOTHING)
        assert server.summary("leaves") is None
        sent = len(mirror.sent)
        await trio.sleep(30.0)
        assert len(mirror.sent) == sent, "not again"
        assert server.foreign("stays") == {"east": {"p1": 5}}
        assert server.foreign("never") == NOTHING
        assert mirror.well()


async def test_an_entry_that_is_taken_as_a_whole_is_one_line(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """Each of its fields is a conflict then."""
    server = StatusServer()
    server.make("env")
    async with mirroring(server) as mirror:
        pools = [has("east", 5, f"p{number}", running=1, desired=6, pending=2) for number in range(20)]
        mirror.others.have(*pools, has("north", 1))
        await trio.sleep(SOON)
        entry = server.entries()["east"]
        for each in entry["observedMembers"]:
            each |= {name: each[name] + 10 for name in ("idleCount", "runningCount", "desiredReplicas")}
        server.apply_as(SANDBOXENVS, "ns", "env", {"status": {"clusters": [entry]}}, "ops", force=True)
        await trio.sleep(2 * ENV_INTERVAL)
        assert mirror.troubles() == {("conflict", "ops"): 1.0}
        assert server.foreign()["north"] == {"p1": 1}
    lines = [line for line in logs if line["event"] == "kubernetes_status_conflict"]
    assert [(line["owner"], line["fields"]) for line in lines] == [("ops", 60)]
    assert lines[0]["field"].startswith('.status.clusters[clusterID="east"].observedMembers[name="p0"].')


async def test_many_namespaces_without_the_right_cost_one_try_a_second(autojump_clock: MockClock) -> None:
    """All of them together, so that those that give it have their envs written; and they recover when it is given."""
    server = StatusServer()
    allowed, others = [f"a{number}" for number in range(5)], [f"n{number}" for number in range(200)]
    for namespace in (*allowed, *others):
        server.make("env", namespace=namespace)
    refusals = [server.refuse(403, "apply", namespace=namespace) for namespace in others]
    async with mirroring(server) as mirror:
        everywhere = (*allowed, *others)
        mirror.others.have(*(has("east", 5, namespace=namespace) for namespace in everywhere))
        await trio.sleep(60.0)
        began = trio.current_time()
        for number in range(30):
            mirror.others.have(*(has("east", number, namespace=namespace) for namespace in everywhere))
            expected = {"east": {"p1": number}}
            took = await within(9.0, lambda: all(server.foreign(namespace=each) == expected for each in allowed))  # noqa: B023
            await trio.sleep(10.0 - took)
        refused = [sent for sent in mirror.since(began) if sent.key[0] not in allowed]
        assert 200 <= len(refused) <= 400
        assert mirror.troubles() == {("forbidden", ""): 1.0}
        assert "grant its user patch on sandboxenvs/status" in mirror.shown()["last_error"]["text"]
        for each in refusals:
            each.end()
        await within(300.0, lambda: all(server.foreign(namespace=each) == expected for each in everywhere))
        await trio.sleep(SOON)
        assert mirror.well()

"""Errors that arrive alone and in groups, hubs that are older, newer or refuse: what is tried again, what ends the
agent, and that no hub's trouble is another's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import pytest
import trio
from structlog.typing import EventDict
from trio.testing import MockClock

from tests.federation.helpers import counted, item, lines, take_everything
from tests.simulation import SECRET, ScriptedHub, ScriptedSource, always, member, sampled, simulated_federation
from trio_federation.agent import Agent
from trio_federation.config import Federation, HubSettings
from trio_federation.credentials import make_token
from trio_federation.errors import RpcError, TlsFailed, Unauthenticated, Unavailable, Unimplemented
from trio_federation.pb.sandbox.sync.v1 import FederationBroadcast
from trio_federation.reporter import Reporter
from trio_federation.rpc import IncomingReport, IncomingWatch, ReportCall


def leaves(error: BaseException) -> list[BaseException]:
    """The errors that a group is made of."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in leaves(member)]
    return [error]


class Dialler:
    """Dials nothing, and fails in the way it was told."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure
        self.dialled = 0

    async def __call__(self) -> trio.abc.Stream:
        """Fail."""
        self.dialled += 1
        await trio.lowlevel.checkpoint()
        raise self.failure


def agent_of(*diallers: Dialler) -> Agent:
    """An agent with one record of its own, and a hub for each dialler."""
    source = ScriptedSource()
    source.set(member("west", idle=3))
    hubs = {f"hub-{number}": dialler for number, dialler in enumerate(diallers)}
    return Agent(
        "west", Federation(), sources={"set": always(source)}, hubs=hubs, credential=SECRET, generator=random.Random(0)
    )


# --- C24: errors alone and in groups ---------------------------------------------------------------------------------

RETRIED = [
    Unavailable("refused"),
    ExceptionGroup("one", [Unavailable("refused")]),
    ExceptionGroup("two", [Unavailable("refused"), Unauthenticated("who?")]),
    ExceptionGroup("deep", [ExceptionGroup("two", [Unavailable("refused"), Unavailable("reset")]), Unavailable("x")]),
]


@pytest.mark.parametrize("failure", RETRIED, ids=["alone", "group of one", "group of two", "deep group"])
async def test_connect_errors_are_tried_again(failure: Exception, autojump_clock: MockClock) -> None:
    """C24: (1) "the watch raises a connect error alone", (2) "it and the hub stream fail in the same tick"; right:
    "both parts retried, no exit"."""
    one, other = Dialler(failure), Dialler(failure)
    agent = agent_of(one, other)
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await trio.sleep(120.0)
        assert one.dialled > 10
        assert other.dialled > 10
        assert agent.registry.local_idle("ns", "env") == 3
        nursery.cancel_scope.cancel()


BUGS = [
    TypeError("a bug"),
    ExceptionGroup("both", [Unavailable("refused"), TypeError("a bug")]),
    ExceptionGroup("deep", [ExceptionGroup("one", [TypeError("a bug")]), Unavailable("refused")]),
]


@pytest.mark.parametrize("failure", BUGS, ids=["alone", "with a connect error", "deep"])
async def test_a_bug_ends_the_agent_with_everything_that_came_with_it(
    failure: Exception, autojump_clock: MockClock
) -> None:
    """C24: (3) "a connect error and a TypeError together"; right: "the TypeError is not swallowed: non-zero exit with
    both tracebacks"."""
    healthy = Dialler(Unavailable("refused"))
    with pytest.raises(BaseExceptionGroup) as caught:
        await agent_of(healthy, Dialler(failure)).run()
    assert sorted(type(leaf).__name__ for leaf in leaves(caught.value)) == sorted(
        type(leaf).__name__ for leaf in leaves(failure)
    )
    assert all(leaf.__traceback__ is not None for leaf in leaves(caught.value) if leaf is failure)


async def test_a_bug_inside_a_call_ends_the_agent_and_the_hubs_are_told(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that ends because of a fault of its own still withdraws where it can: it will not serve creates."""
    async with simulated_federation("west", hubs=2) as fed:
        await fed.settle()
        source = ScriptedSource()
        source.set(member("east", idle=3))
        east = fed.add("east")
        diallers = {name: route.dialer(east) for name, route in east.routes.items()}
        agent = Agent("east", fed.settings, sources={"set": always(source)}, hubs=diallers, credential=SECRET)
        real = Reporter.report

        async def report(self: Reporter, call: ReportCall, sent: Callable[[int], None]) -> None:
            if self is not agent.links[0].reporter:
                return await real(self, call, sent)
            await trio.sleep(3.0)
            raise TypeError("a bug")

        monkeypatch.setattr(Reporter, "report", report)
        began = trio.current_time()
        with pytest.raises(BaseExceptionGroup) as caught:
            await agent.run()
        assert [type(leaf) for leaf in leaves(caught.value)] == [TypeError]
        assert trio.current_time() - began <= 3.0 + 5.0
        assert fed["west"].known("east") == []


async def test_both_calls_that_fail_in_one_tick_are_tried_again(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """C24 (2), for real: a connection that breaks ends both calls and itself at the same moment, again and again."""
    async with simulated_federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        for _ in range(20):
            await trio.sleep(11.0)
            assert fed["west"].agent.links[0].watcher.watching
            assert fed["west"].idle("east") == [3]
            for name in ("west", "east"):
                fed[name].routes["hub-0"].cut()
        assert fed["west"].routes["hub-0"].dialled == 20


# --- hubs that fall silent -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaf", ["both", "the hub", "the agent"])
async def test_a_silent_connection_counts_as_broken(
    deaf: str, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """semantics.md, "Agent": "a stream silent for longer than silence_limit (15 s; keepalive every 5 s) counts as
    broken", on whichever side it is noticed; meanwhile what is foreign keeps ageing, and afterwards all is well."""
    async with simulated_federation("west", "east") as fed:
        fed["west"].source.set(member("west", idle=2))
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(10.5)
        last_true = fed["west"].known("east")[0].observed_at
        assert last_true is not None
        fed["west"].routes["hub-0"].hold(to_hub=deaf != "the agent", to_cluster=deaf != "the hub")
        dialled = await sampled(20.0, lambda: fed["west"].routes["hub-0"].dialled, step=0.5)
        noticed = dialled.index(2) * 0.5
        assert 10.0 <= noticed <= 16.0  # it was heard of last up to a keepalive before; and the first delay is short
        assert "silent for 15 s" in repr(logs)
        history = await sampled(60.0, lambda: (trio.current_time(), fed["west"].idle("east"), fed["east"].idle("west")))
        for now, of_east, of_west in history:
            assert of_east == ([3] if now <= last_true + 30.0 else []) or deaf == "the hub"
            assert of_west == [] or now <= 50.0 or deaf == "the agent"
        fed["west"].routes["hub-0"].release()
        await trio.sleep(27.0)  # an attempt that is lost already needs the silence limit, then the longest delay
        assert fed["west"].idle("east") == [3]
        assert fed["east"].idle("west") == [2]


async def test_a_hub_that_accepts_and_never_speaks_is_given_up(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """A peer that takes the connection and says nothing is no better than none, and never passes for one that works:
    not in the metrics, not in what `/readyz` says, not in the log."""

    class Mute(ScriptedHub):
        def serve(self, stream: trio.abc.Stream) -> None:
            self.streams.append(stream)

        streams: ClassVar[list[trio.abc.Stream]] = []

    mute = Mute("mute", take_everything, cannot_be_called)
    async with simulated_federation("west", "east", scripted_hubs=[mute]) as fed:
        fed["east"].source.set(member("east", idle=3))
        agent = fed["west"].agent

        def look() -> tuple[float, float, str, float | None]:
            hub = next(hub for hub in agent.health()["hubs"] if hub["name"] == "mute")
            connected = counted(agent, "trio_federation_hub_connected", hub="mute")
            sent = counted(agent, "trio_federation_hub_reported_records_total", hub="mute")
            return connected, sent, hub["state"], hub["last_success"]

        seen = set(await sampled(120.0, look, step=1.0))
        assert seen == {(0.0, 0.0, "connecting", None), (0.0, 0.0, "failing", None)}
        assert counted(agent, "trio_federation_hub_reconnects_total", hub="mute") == 0.0
        assert [line for line in lines(logs, "hub_works") if line["hub"] == "mute"] == []
        told = [line for line in lines(logs, "hub_failed") if line["log_level"] == "warning"]
        assert len(told) == 2  # one of each agent
        assert fed["west"].idle("east") == [3]
        # Five seconds of silence, and a delay of at most ten, each.
        assert 8 <= fed["west"].routes["mute"].dialled <= 24
        assert fed["west"].routes["hub-0"].dialled == 1


async def cannot_be_called(call: IncomingWatch) -> None:
    """For a hub that takes no calls."""
    raise AssertionError("nobody can have called")


async def test_metrics_tell_which_streams_are_up(autojump_clock: MockClock) -> None:
    """At the agent each stream to each hub, at the hub how many report and watch."""
    async with simulated_federation("west", "east", hubs=2) as fed:

        def streams(hub: str) -> list[float]:
            agent, name = fed["west"].agent, "trio_federation_hub_connected"
            return [counted(agent, name, hub=hub, stream=stream) for stream in ("report", "watch")]

        def clients() -> list[float]:
            return [counted(fed.hubs[1].hub, f"trio_federation_hub_{kind}") for kind in ("reporters", "watchers")]

        await fed.settle()
        assert streams("hub-0") == streams("hub-1") == [1.0, 1.0]
        assert clients() == [2.0, 2.0]
        fed.hubs[0].stop()
        await trio.sleep(60.0)
        assert (streams("hub-0"), streams("hub-1")) == ([0.0, 0.0], [1.0, 1.0])
        await fed.hubs[0].start()
        await fed["east"].stop()
        await trio.sleep(10.5)
        assert streams("hub-0") == streams("hub-1") == [1.0, 1.0]
        assert clients() == [1.0, 1.0]


async def test_reconnects_are_counted_and_not_tries(autojump_clock: MockClock) -> None:
    """trio_federation_hub_reconnects_total: "times that a stream to a hub was opened again after it broke": one for an
    outage, whether it was of seconds or of minutes."""
    async with simulated_federation("west", hubs=2) as fed:
        for outage in (1.0, 60.0):
            await fed.settle()
            await fed.restart_hub(0, down_for=outage)
            await trio.sleep(10.5)
        reconnects = "trio_federation_hub_reconnects_total"
        assert [counted(fed["west"].agent, reconnects, hub=hub) for hub in ("hub-0", "hub-1")] == [2.0, 0.0]


async def test_a_quiet_connection_is_kept(autojump_clock: MockClock) -> None:
    """A hub with nothing to tell answers keepalives, and that is a sign of life."""
    async with simulated_federation("west") as fed:
        await trio.sleep(600.0)
        assert fed["west"].routes["hub-0"].dialled == 1


# --- C21: older and newer hubs ---------------------------------------------------------------------------------------


async def test_a_hub_without_the_watch_method(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """C21: "hub without the watch method", right: "watch retried slowly (minutes), one line names version skew;
    reporting continues"; semantics.md, "Agent": "logged once, everything else goes on, tried again every 5 minutes"."""
    watched: list[float] = []
    told: list[int] = []

    async def report(call: IncomingReport) -> None:
        await call.accept()
        while (message := await call.receive()) is not None:
            told.extend(record.idle for record in message.items)
        await call.answer()

    async def watch(call: IncomingWatch) -> None:
        watched.append(trio.current_time())
        raise Unimplemented("Method not found")

    older = ScriptedHub("older", report, watch)
    async with simulated_federation("west", scripted_hubs=[older], hubs=0) as fed:
        began = trio.current_time()
        for idle in range(1, 1000, 100):
            fed["west"].source.set(member("west", idle=idle))
            await trio.sleep(100.0)
            assert told[-1] == idle
        assert [moment - began for moment in watched] == [0.0, 300.0, 600.0, 900.0]
        shown = [line for line in lines(logs, "hub_is_older") if line["log_level"] == "warning"]
        assert len(shown) == 1
        assert (shown[0]["hub"], shown[0]["call"], shown[0]["retry_in"]) == ("older", "watch", 300.0)
        assert fed["west"].routes["older"].dialled == 1
        agent = fed["west"].agent
        assert counted(agent, "trio_federation_hub_connected", hub="older", stream="report") == 1.0
        assert counted(agent, "trio_federation_hub_connected", hub="older", stream="watch") == 0.0


async def test_a_hub_without_the_report_method(autojump_clock: MockClock, logs: list[EventDict]) -> None:
    """The same the other way round: watching goes on."""

    async def report(call: IncomingReport) -> None:
        raise Unimplemented("Method not found")

    async def watch(call: IncomingWatch) -> None:
        await call.request()
        for idle in range(1, 100):
            await call.send(FederationBroadcast(items=[item(cluster="east", idle=idle)]))
            await trio.sleep(5.0)

    older = ScriptedHub("older", report, watch)
    async with simulated_federation("west", scripted_hubs=[older], hubs=0) as fed:
        await trio.sleep(400.5)
        assert fed["west"].idle("east") == [81]
        assert [line["call"] for line in lines(logs, "hub_is_older") if line["log_level"] == "warning"] == ["report"]


async def test_a_newer_hub_may_say_what_we_do_not_know(autojump_clock: MockClock) -> None:
    """C21: "newer hub sends unknown fields and an unknown enum value", right: "unknown fields ignored". Field 90, a
    string, in each record, and field 91 in the message; a state that we have no word for is for people, and shown."""
    newer_item = item(cluster="east", idle=4)
    newer_item.state = "Hibernating"
    newer_item._unknown_fields = b"\xd2\x05\x03new"
    message = FederationBroadcast(items=[newer_item])
    message._unknown_fields = b"\xda\x05\x03new"

    async def watch(call: IncomingWatch) -> None:
        await call.request()
        await call.send(message)
        await trio.sleep_forever()

    newer = ScriptedHub("newer", take_everything, watch)
    async with simulated_federation("west", scripted_hubs=[newer], hubs=0) as fed:
        await trio.sleep(1.0)
        assert [(record.idle, record.state) for record in fed["west"].known("east")] == [(4, "Hibernating")]


# --- hubs that refuse ------------------------------------------------------------------------------------------------


async def test_a_wrong_secret_is_told_once_and_costs_nothing_else(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """semantics.md, "Wire": "Missing or wrong credentials: UNAUTHENTICATED"; "Agent": no failure of one hub stops the
    others."""
    async with simulated_federation("west", "east", start=False) as fed:
        fed["west"].source.set(member("west", idle=3))
        fed["east"].credential = "not the secret"
        fed["east"].source.set(member("east", idle=9))
        for cluster in fed.clusters.values():
            await cluster.start()
        await trio.sleep(120.0)
        assert fed["west"].known("east") == fed["east"].known("west") == []
        assert fed["east"].registry.local_idle("ns", "env") == 9
        warned = [line for line in lines(logs, "hub_failed") if line["log_level"] == "warning"]
        # The hub also ends a connection of which it takes nothing, and that is not told as another failure.
        assert sorted(line["call"] for line in warned) == ["connection", "report", "watch"]
        assert {line["error"] for line in warned} == {
            "wrong credential: compare the agent's [federation] secret with the hub's [hub] secret"
        }
        refused = counted(fed.hubs[0].hub, "trio_federation_hub_calls_refused_total", status="UNAUTHENTICATED")
        # Two calls, a try every five seconds on average, after the first few.
        assert 2 * 12 <= refused <= 2 * 45
        assert "not the secret" not in repr(logs)


@pytest.mark.parametrize(
    "failure",
    [Unavailable("full"), ValueError("a fault of the hub"), trio.BrokenResourceError()],
    ids=lambda e: type(e).__name__,
)
async def test_one_hubs_trouble_is_not_anothers(
    failure: Exception, autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """semantics.md, "Agent": "no failure of one hub, source or sink stops the others"."""

    async def fail(call: IncomingReport | IncomingWatch) -> None:
        await trio.sleep(0.3)
        raise failure

    bad = ScriptedHub("bad", fail, fail)
    async with simulated_federation("west", "east", scripted_hubs=[bad]) as fed:
        fed["east"].source.set(member("east", idle=3))
        await trio.sleep(0.3)
        assert all(await sampled(60.0, lambda: fed["west"].idle("east") == [3]))
        assert fed["west"].routes["hub-0"].dialled == 1
        told = [line for line in lines(logs, "hub_failed") if line["log_level"] == "warning"]
        assert {line["hub"] for line in told} == {"bad"}
        logs[:] = [line for line in logs if line["log_level"] != "error"]  # the scripted hub's own


async def test_an_error_of_one_call_leaves_the_other_open(autojump_clock: MockClock) -> None:
    """A refused report is tried again on the connection that there is, and the watch on it goes on."""
    refusals: list[RpcError] = [Unavailable("later")] * 3

    async def report(call: IncomingReport) -> None:
        if refusals:
            raise refusals.pop()
        await take_everything(call)

    watches: list[float] = []

    async def watch(call: IncomingWatch) -> None:
        watches.append(trio.current_time())
        await call.request()
        await call.send(FederationBroadcast())
        await trio.sleep_forever()

    hub = ScriptedHub("hub", report, watch)
    async with simulated_federation("west", scripted_hubs=[hub], hubs=0) as fed:
        await trio.sleep(30.0)
        assert refusals == []
        assert fed["west"].agent.links[0].reporter.reporting
        assert len(watches) == fed["west"].routes["hub"].dialled == 1


# --- one line for each thing that is wrong ---------------------------------------------------------------------------


async def test_a_refusal_of_tls_is_told_after_a_hub_that_was_away(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Both mean that there is no connection; the one passes by itself, and the other is for somebody to put right."""
    dialler = Dialler(Unavailable("cannot connect: connection refused"))
    agent = agent_of(dialler)
    failures = [
        Unavailable("cannot connect: connection reset by peer"),
        TlsFailed("TLS failed: certificate not accepted: unable to get local issuer certificate"),
        Unavailable("cannot connect: connection refused"),
        TlsFailed("TLS failed: certificate not accepted: certificate has expired"),
    ]
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        await trio.sleep(10.0)
        for failure in failures:
            dialler.failure = failure
            await trio.sleep(10.0)
        nursery.cancel_scope.cancel()
    failed = lines(logs, "hub_failed")
    assert len(failed) > 10
    warned = [line["error"] for line in failed if line["log_level"] == "warning"]
    assert warned == ["cannot connect: connection refused", failures[1].message]


async def test_each_mistake_of_one_cluster_is_told_and_each_once(
    autojump_clock: MockClock, logs: list[EventDict]
) -> None:
    """Who puts the first one right and makes another hears of that one, too, although both have the same status."""
    token = make_token(SECRET, "east")
    async with simulated_federation("west", hub_settings=HubSettings(accept=("token",))) as fed:
        for credential in ("not the secret", "neither", token[:-1], "", token[:-2], "not the secret", ""):
            for _ in range(2):
                async with fed.connection("east", credential=credential) as connection, connection.report() as call:
                    with pytest.raises(Unauthenticated):
                        await call.wait_answered()
        refused = lines(logs, "call_refused")
        assert [line["cluster"] for line in refused] == ["east"] * 14
        told = [line["error"] for line in refused if line["log_level"] == "info"]
        assert [error[:24] for error in told] == [
            "this hub takes no shared",
            "wrong token: it was not ",
            "no credential: give the ",
        ]
        assert token not in repr(logs)

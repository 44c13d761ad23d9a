"""Tokens, the deny list, and clusters that are told apart by their uid, as grpcio meets them on a hub of ours."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from tests.interop.peers import PATIENCE, LogWatch, Schema, Worker, record
from tests.interop.strangers import (
    MASTER,
    NEXT_MASTER,
    ONE,
    OTHER,
    Code,
    Host,
    Seen,
    Steady,
    codes,
    ended,
    outcome,
    refusal,
    refusals,
    running_hub,
    trust,
    until,
)
from tests.process.running import COMMAND
from trio_federation.config import HubSettings, Secret
from trio_federation.credentials import DenyList, make_token

TOKENS = HubSettings(secret=Secret(MASTER), accept=("token",))
SHARED = HubSettings(secret=Secret(MASTER))
EITHER = HubSettings(secret=Secret(MASTER), accept=("shared", "token"))


@pytest.fixture
async def hub(logs: LogWatch) -> AsyncIterator[Host]:
    """A hub that takes tokens and nothing else."""
    async with running_hub(logs, TOKENS) as host:
        yield host


def mac(secret: str, cluster: str, serial: int) -> str:
    """What stands at the end of a token, worked out here anew."""
    message = b"trio-federation token 1\0" + f"{cluster}\0{serial}".encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


WEST = f"tf1.west.1.{mac(MASTER, 'west', 1)}"


def worker(
    hub: Host, schema: Schema, cluster: str, serial: int = 1, *, instance: str | None = ONE, uid: str | None = None
) -> Worker:
    """A worker with a good token."""
    metadata = [] if uid is None else [("x-federation-uid", uid)]
    secret = make_token(MASTER, cluster, serial)
    return Worker(schema, hub.port, cluster, secret=secret, instance=instance, metadata=metadata)


# --- tokens ----------------------------------------------------------------------------------------------------------


async def test_a_token_lets_its_cluster_in(hub: Host, schema: Schema) -> None:
    with worker(hub, schema, "west", 3) as west, worker(hub, schema, "east") as east:
        seen = Seen(east.watch())
        west.report(schema.report(record("west", idle=1)))
        await seen.shows("west", 1)
        assert hub.credentials == {"west": "token 3"}
        assert hub.metric("reporters_by_credential", credential="token") == 1
        Steady(east, "east")
        await seen.shows("east", 1)
        assert hub.credentials == {"west": "token 3", "east": "token 1"}
    assert hub.logs.of("call_refused") == []


async def test_the_command_prints_a_token_that_counts(hub: Host, schema: Schema, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(MASTER + "\n")
    command = [str(COMMAND), "token", "west", "--secret-file", str(tmp_path / "secret"), "--serial", "7"]
    printed = await trio.run_process(command, capture_stdout=True)
    token = printed.stdout.decode()
    assert token == f"tf1.west.7.{mac(MASTER, 'west', 7)}\n"
    with Worker(schema, hub.port, "west", secret=token.strip()) as west:
        await Steady(west, "west").goes_on()
    assert hub.told("reporter_came")[0]["credential"] == "token 7"


async def test_a_token_is_for_its_cluster_alone(hub: Host, schema: Schema) -> None:
    with (
        worker(hub, schema, "west") as west,
        Worker(schema, hub.port, "east", secret=WEST) as false_east,
        worker(hub, schema, "south") as south,
    ):
        steady = Steady(west, "west")
        seen = Seen(south.watch())
        for refused in await refusals(false_east, "east"):
            assert refused.code is Code.PERMISSION_DENIED
            assert "'east'" in refused.details
            assert "'west'" in refused.details
            assert mac(MASTER, "west", 1) not in refused.details
        await steady.goes_on()
        await seen.shows("west", 2)
        assert {cluster for cluster, _ in seen.named} == {"west"}
    assert hub.metric("calls_refused_total", status="PERMISSION_DENIED") == 2
    assert mac(MASTER, "west", 1) not in repr(hub.logs.entries)


@pytest.mark.parametrize(
    "sent",
    [
        None,
        "",
        "nonsense",
        "tf1.",
        "tf1.west.1",
        "tf1.west.1.",
        WEST[:-1],
        WEST + "0",
        WEST[:-1] + ("0" if WEST[-1] != "0" else "1"),
        WEST.replace("tf1.west.1.", "tf1.west.2."),
        WEST.replace("tf1.west.1.", "tf1.east.1."),
        WEST.replace("tf1.west.1.", "tf1.west.01."),
        WEST.replace("tf1.west.1.", "tf1.west.+1."),
        WEST.replace("tf1.", "tf2."),
        WEST.replace("tf1.", "TF1."),
        WEST.upper(),
        WEST[len("tf1.") :],
        WEST.rpartition(".")[2],
        f"tf1.west.0.{mac(MASTER, 'west', 0)}",
        f"tf1.west.2147483648.{mac(MASTER, 'west', 2147483648)}",
        f"tf1.WEST.1.{mac(MASTER, 'WEST', 1)}",
        f"tf1.west.1.{mac(MASTER, 'west', 1).upper()}",
        f"tf1.west.1.{mac('', 'west', 1)}",
        make_token(NEXT_MASTER, "west"),
        f"{WEST} {WEST}",
        f"{WEST},{WEST}",
    ],
    ids=lambda sent: "none" if sent is None else sent[:14] or "empty",
)
async def test_what_is_no_token_of_this_hub_proves_nothing(hub: Host, schema: Schema, sent: str | None) -> None:
    with Worker(schema, hub.port, "west", secret=sent) as stranger:
        for refused in await refusals(stranger):
            assert refused.code is Code.UNAUTHENTICATED
            assert "trio-federation token" in refused.details or "its token" in refused.details
            if sent and len(sent) > len("tf1.west.1."):
                assert sent[-32:] not in refused.details
    assert hub.idle == {}
    assert hub.credentials == {}
    if sent and len(sent) > len("tf1.west.1."):
        assert sent[-32:] not in repr(hub.logs.entries)


async def test_two_secrets_count_at_once_and_the_old_ones_streams_go_on_without_it(
    logs: LogWatch, schema: Schema
) -> None:
    both = trust(TOKENS, secrets=(MASTER, NEXT_MASTER))
    newer, third = make_token(NEXT_MASTER, "east"), make_token("another", "south")
    async with running_hub(logs, TOKENS, trusted=both) as hub:
        with (
            worker(hub, schema, "west") as west,
            Worker(schema, hub.port, "east", secret=newer) as east,
            Worker(schema, hub.port, "south", secret=third) as south,
        ):
            steady = [Steady(west, "west"), Steady(east, "east")]
            for each in steady:
                await each.goes_on()
            assert await codes(south) == {Code.UNAUTHENTICATED}
            hub.hub.trust(trust(TOKENS, secrets=(NEXT_MASTER,)))
            for each in steady:
                await each.goes_on()
            # New calls of the same connection need the new one.
            assert await codes(west) == {Code.UNAUTHENTICATED}
            await Seen(east.watch()).shows("west", 3)
            with Worker(schema, hub.port, "west", secret=make_token(NEXT_MASTER, "west"), instance=ONE) as renewed:
                again = Steady(renewed, "west", begin=10)
                await again.goes_on()
                assert (await refusal(steady[0].report.answer())).code is Code.ALREADY_EXISTS


async def test_the_identity_of_a_token_is_stamped_over_what_a_record_claims(hub: Host, schema: Schema) -> None:
    with worker(hub, schema, "west") as west, worker(hub, schema, "south") as south:
        seen = Seen(south.watch())
        await seen.take()
        west.report(
            schema.report(
                record("east", "p1", idle=1, seq=1),
                record("", "p2", idle=2, seq=1),
                record("NO LABEL", "p3", idle=3, seq=1),
                origins=[{"cluster_id": "east", "instance": ONE, "uptime_ms": 1000}],
            )
        )
        broadcast = await seen.take()
        assert seen.idle == {("west", "env/p1"): 1, ("west", "env/p2"): 2, ("west", "env/p3"): 3}
        assert [origin.cluster_id for origin in broadcast.origins] == ["west"]


async def test_one_cluster_cannot_withdraw_or_overwrite_what_another_says(hub: Host, schema: Schema) -> None:
    origins = [{"cluster_id": "west", "instance": ONE, "uptime_ms": 1000}]
    with (
        worker(hub, schema, "west") as west,
        worker(hub, schema, "evil") as evil,
        worker(hub, schema, "south") as south,
    ):
        seen = Seen(south.watch())
        west.report(schema.report(record("west", idle=5, seq=1), origins=origins))
        await seen.shows("west", 5)
        # With the very instance of west, which whoever watches gets to know.
        evil.report(
            schema.report(record("west", observed_for_ms=2**40, seq=100), origins=origins),
            schema.report(record("west", idle=2**31 - 1, seq=101), origins=origins),
            schema.report(record("west", "end", idle=1, seq=102), origins=origins),
        )
        await seen.shows("evil", 1, "end")
        assert seen.idle[("west", "env/p1")] == 5
        assert hub.idle == {("west", "p1"): 5, ("evil", "p1"): 2**31 - 1, ("evil", "end"): 1}


# --- the one kind where the other counts -----------------------------------------------------------------------------


async def test_the_hubs_secret_proves_nothing_where_tokens_count(hub: Host, schema: Schema) -> None:
    with (
        Worker(schema, hub.port, "west", secret=MASTER) as west,
        Worker(schema, hub.port, "east", secret=MASTER) as east,
    ):
        for refused in [*(await refusals(west)), *(await refusals(west))]:
            assert refused.code is Code.UNAUTHENTICATED
            assert "takes no shared secret" in refused.details
            assert MASTER not in refused.details
        assert [entry["cluster"] for entry in hub.told("credential_mixed_up")] == ["west"]
        await refusals(east)
    assert [entry["cluster"] for entry in hub.told("credential_mixed_up")] == ["west", "east"]
    assert {entry["level"] for entry in hub.logs.of("credential_mixed_up")} == {"warning"}


async def test_a_token_proves_nothing_where_the_secret_counts(logs: LogWatch, schema: Schema) -> None:
    async with running_hub(logs, SHARED) as hub:
        with Worker(schema, hub.port, "west", secret=WEST) as west:
            for refused in await refusals(west):
                assert refused.code is Code.UNAUTHENTICATED
                assert "takes no tokens" in refused.details
                assert WEST[-64:] not in refused.details
        assert [entry["cluster"] for entry in hub.told("credential_mixed_up")] == ["west"]
        assert WEST[-64:] not in repr(logs.entries)
        with Worker(schema, hub.port, "west", secret=MASTER) as west:
            await Steady(west, "west").goes_on()
            assert hub.credentials == {"west": "shared"}


async def test_where_both_count_each_is_taken_for_what_it_is(logs: LogWatch, schema: Schema) -> None:
    async with running_hub(logs, EITHER) as hub:
        with (
            worker(hub, schema, "west", 2) as west,
            Worker(schema, hub.port, "east", secret=MASTER) as east,
            Worker(schema, hub.port, "south", secret=WEST) as south,
            Worker(schema, hub.port, "south", secret=make_token(NEXT_MASTER, "south")) as forger,
        ):
            for each in (Steady(west, "west"), Steady(east, "east")):
                await each.goes_on()
            assert hub.credentials == {"west": "token 2", "east": "shared"}
            assert hub.metric("reporters_by_credential", credential="shared") == 1
            assert await codes(south, "south") == {Code.PERMISSION_DENIED}
            assert await codes(forger, "south") == {Code.UNAUTHENTICATED}
        assert hub.told("credential_mixed_up") == []


# --- the deny list ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["token", "shared"])
async def test_a_denied_cluster_loses_its_calls_and_its_records_and_nobody_else_does(
    logs: LogWatch, schema: Schema, accept: str
) -> None:
    settings = TOKENS if accept == "token" else SHARED

    def member(hub: Host, cluster: str, serial: int = 1) -> Worker:
        secret = make_token(MASTER, cluster, serial) if accept == "token" else MASTER
        return Worker(schema, hub.port, cluster, secret=secret, instance=ONE)

    async with running_hub(logs, settings) as hub:
        with member(hub, "west") as west, member(hub, "east") as east, member(hub, "west", 2) as renewed:
            denied, steady = Steady(west, "west"), Steady(east, "east")
            await denied.goes_on()
            await steady.seen.shows("west", 2)
            hub.hub.trust(trust(settings, denied=DenyList(clusters=frozenset({"west"}))))
            for refused in (await refusal(denied.report.answer()), await refusal(ended(denied.seen.watch))):
                assert refused.code is Code.PERMISSION_DENIED
                assert "'west'" in refused.details
                assert "deny list" in refused.details
            await steady.seen.until(lambda seen: ("west", "env/p1") not in seen)
            await steady.goes_on()
            assert [entry["cluster"] for entry in hub.told("call_ended")] == ["west", "west"]
            assert await codes(west) == {Code.PERMISSION_DENIED}
            assert await codes(renewed) == {Code.PERMISSION_DENIED}
            assert hub.idle == {("east", "p1"): 2}
            await until(lambda: set(hub.credentials) == {"east"})
            # Once it is off the list, it is let in again.
            hub.hub.trust(trust(settings))
            await Steady(west, "west", begin=10).goes_on()
            await steady.goes_on()


async def test_a_denied_serial_ends_the_calls_that_it_has_proven_and_a_newer_one_gets_in(
    hub: Host, schema: Schema
) -> None:
    with (
        worker(hub, schema, "west", 1) as west,
        worker(hub, schema, "west", 2) as renewed,
        worker(hub, schema, "east") as east,
    ):
        denied, steady, watch = Steady(west, "west"), Steady(east, "east"), Seen(renewed.watch())
        await denied.goes_on()
        await steady.goes_on()
        await watch.take()
        hub.hub.trust(trust(TOKENS, denied=DenyList(tokens=frozenset({("west", 1)}))))
        for refused in (await refusal(denied.report.answer()), await refusal(ended(denied.seen.watch))):
            assert refused.code is Code.PERMISSION_DENIED
            assert "token 1 of cluster 'west'" in refused.details
        # The same number is no matter for another cluster, nor is another number for the same one.
        await steady.goes_on()
        await watch.shows("east", 3)
        assert await codes(west) == {Code.PERMISSION_DENIED}
        # It is the token that is denied; what the cluster has said is still there.
        assert hub.idle == {("west", "p1"): 2, ("east", "p1"): 3}
        again = Steady(renewed, "west", begin=10)
        await again.goes_on()
        await steady.seen.shows("west", 11)
        assert hub.credentials == {"west": "token 2", "east": "token 1"}
        assert len(hub.logs.of("call_ended")) == 2


async def test_a_denied_serial_does_not_count_where_another_credential_has_proven_the_call(
    logs: LogWatch, schema: Schema
) -> None:
    async with running_hub(logs, EITHER) as hub:
        with worker(hub, schema, "west") as west, Worker(schema, hub.port, "east", secret=MASTER) as east:
            denied, steady = Steady(west, "west"), Steady(east, "east")
            await denied.goes_on()
            await steady.goes_on()
            hub.hub.trust(trust(EITHER, denied=DenyList(tokens=frozenset({("west", 1), ("east", 1)}))))
            assert (await refusal(denied.report.answer())).code is Code.PERMISSION_DENIED
            await steady.goes_on()


# --- who is who ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["East", "EAST", "eAst", "east.", " east", "east ", "e_ast"])
@pytest.mark.parametrize("accept", ["token", "shared"])
async def test_there_is_one_case_rule(logs: LogWatch, schema: Schema, accept: str, cluster: str) -> None:
    secret = make_token(MASTER, "east") if accept == "token" else MASTER
    async with running_hub(logs, TOKENS if accept == "token" else SHARED) as hub:
        with Worker(schema, hub.port, "east", secret=secret, instance=ONE) as east:
            steady = Steady(east, "east")
            await steady.goes_on()
            with Worker(schema, hub.port, cluster, secret=secret, instance=OTHER) as other:
                for refused in await refusals(other, cluster):
                    assert refused.code is Code.INVALID_ARGUMENT
                    assert f"x-federation-cluster {cluster!r}" in refused.details
            await steady.goes_on()
            assert set(hub.idle) == {("east", "p1")}


async def test_a_token_does_not_make_a_bad_id_good(hub: Host, schema: Schema) -> None:
    """An id that is none, in a token that was made for it from the right secret."""
    forged = f"tf1.East.1.{mac(MASTER, 'East', 1)}"
    with Worker(schema, hub.port, "East", secret=forged) as other:
        assert await codes(other, "East") == {Code.UNAUTHENTICATED}


async def test_of_two_clusters_under_one_id_the_first_is_steady(hub: Host, schema: Schema) -> None:
    with (
        worker(hub, schema, "east", instance=ONE, uid="uid-1") as first,
        worker(hub, schema, "east", instance=OTHER, uid="uid-2") as second,
    ):
        steady = Steady(first, "east")
        await steady.goes_on()
        for _ in range(2):
            refused = await refusal(second.report(schema.report(record("east", idle=666))).answer())
            assert refused.code is Code.ALREADY_EXISTS
            assert "'east'" in refused.details
            assert "their uids differ, so two clusters share one cluster_id" in refused.details
            await steady.goes_on()
        assert 666 not in hub.idle.values()
        # To watch is no claim to the id.
        await Seen(second.watch()).shows("east", 4)


async def test_one_cluster_under_two_ids_is_refused_by_name(hub: Host, schema: Schema) -> None:
    with (
        worker(hub, schema, "east", instance=ONE, uid="one-uid") as first,
        worker(hub, schema, "west", instance=OTHER, uid="one-uid") as same,
        worker(hub, schema, "south", instance=OTHER, uid="another-uid") as another,
    ):
        steady, unrelated = Steady(first, "east"), Steady(another, "south")
        await steady.goes_on()
        refused = await refusal(same.report(schema.report(record("west", idle=666))).answer())
        assert refused.code is Code.ALREADY_EXISTS
        assert "'east'" in refused.details
        assert "'west'" in refused.details
        await steady.goes_on()
        await unrelated.goes_on()
        assert set(hub.idle) == {("east", "p1"), ("south", "p1")}
        assert hub.metric("reporters") == 2
        # Once it has gone from the one id, it is welcome under the other.
        steady.report.end()
        await steady.report.answer()
        renamed = Steady(same, "west")
        await renamed.goes_on()
        # And the first id is refused now, by the same rule.
        refused = await refusal(first.report(schema.report(record("east", idle=666))).answer())
        assert refused.code is Code.ALREADY_EXISTS
        assert "'west'" in refused.details
        await renamed.goes_on()


async def test_clusters_that_do_not_say_their_uid_are_told_apart_by_id_alone(hub: Host, schema: Schema) -> None:
    with worker(hub, schema, "east") as east, worker(hub, schema, "west") as west:
        for each in (Steady(east, "east"), Steady(west, "west")):
            await each.goes_on()
        assert hub.metric("reporters") == 2


async def test_a_rebuilt_cluster_gets_in_after_the_goodbye_of_the_old_one(hub: Host, schema: Schema) -> None:
    with (
        worker(hub, schema, "east", instance=ONE, uid="old") as old,
        worker(hub, schema, "east", instance=OTHER, uid="new") as new,
    ):
        first = Steady(old, "east")
        await first.goes_on()
        first.report.end()
        await first.report.answer()
        rebuilt = Steady(new, "east", begin=10)
        await rebuilt.goes_on()
        assert hub.idle == {("east", "p1"): 11}


@pytest.mark.parametrize("accept", ["token", "shared"])
async def test_a_rebuilt_cluster_gets_in_when_the_old_one_has_vanished(
    logs: LogWatch, schema: Schema, accept: str
) -> None:
    # Long enough that a busy machine does not take the newcomer for silent, too.
    settings = HubSettings(secret=Secret(MASTER), accept=(accept,), silence_limit=2.0, keepalive=0.1)  # type: ignore[arg-type]
    secret = make_token(MASTER, "east") if accept == "token" else MASTER
    async with running_hub(logs, settings) as hub:
        with Worker(
            schema, hub.port, "east", secret=secret, instance=OTHER, metadata=[("x-federation-uid", "new")]
        ) as new:
            with Worker(
                schema, hub.port, "east", secret=secret, instance=ONE, metadata=[("x-federation-uid", "old")]
            ) as old:
                await Steady(old, "east").goes_on()
            await logs.wait_for("reporter_left")
            # As its agent does: again and again until it is let in, and by then that much time has gone by.
            left = logs.of("reporter_left")[0]["at"]
            refusals_so_far = 0
            with trio.fail_after(PATIENCE):
                while True:
                    report = new.report(schema.report(record("east", idle=7)))
                    report.end()
                    refused = await outcome(report.answer())
                    if refused is None:
                        break
                    refusals_so_far += 1
                    assert refused.code is Code.ALREADY_EXISTS
                    assert "their uids differ" in refused.details
            assert refusals_so_far > 0
            assert logs.of("reporter_came")[1]["at"] - left > 1.8
            assert hub.idle == {("east", "p1"): 7}


async def test_the_same_instance_moves_to_another_id_only_through_a_goodbye(hub: Host, schema: Schema) -> None:
    """An instance proves no cluster: it is in every broadcast."""
    with (
        worker(hub, schema, "east", instance=ONE, uid="one-uid") as first,
        worker(hub, schema, "west", instance=ONE, uid="one-uid") as same,
    ):
        steady = Steady(first, "east")
        await steady.goes_on()
        refused = await refusal(same.report(schema.report(record("west", idle=666))).answer())
        assert refused.code is Code.ALREADY_EXISTS
        await steady.goes_on()


@pytest.mark.parametrize("uid", ["", "u" * 129, "a b", "a/b", "ü".encode().hex() + "!"])
async def test_an_invalid_uid_is_refused(hub: Host, schema: Schema, uid: str) -> None:
    with worker(hub, schema, "east", uid=uid) as east:
        for refused in await refusals(east, "east"):
            assert refused.code is Code.INVALID_ARGUMENT
            assert "x-federation-uid" in refused.details


async def test_the_uid_of_another_cluster_ends_nobodys_session(hub: Host, schema: Schema) -> None:
    with (
        worker(hub, schema, "east", instance=ONE, uid="east-uid") as east,
        worker(hub, schema, "evil", instance=ONE, uid="east-uid") as evil,
        worker(hub, schema, "evil", instance=ONE) as nameless,
    ):
        steady = Steady(east, "east")
        await steady.goes_on()
        quiet = Steady(nameless, "evil")
        await quiet.goes_on()
        assert (await refusal(evil.report(schema.report(record("evil", idle=1))).answer())).code is Code.ALREADY_EXISTS
        await steady.goes_on()
        await quiet.goes_on()

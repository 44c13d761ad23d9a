"""The network of a simulated federation does what is done to it: to connections that there are, and to those that come
later; and tells how long it had what it carries."""

from __future__ import annotations

import math
import random

import pytest
import trio
from trio.testing import MockClock

from trio_federation.errors import Unavailable
from trio_federation.testing.network import Route
from trio_federation.testing.records import sampled
from trio_federation.waits import LEAK, LEAST


class Listener:
    """A hub's end of routes, which keeps what connects to it."""

    def __init__(self) -> None:
        self.name = "hub"
        self.routes: list[Route] = []
        self.up = True
        self.streams: list[trio.abc.Stream] = []

    def serve(self, stream: trio.abc.Stream) -> None:
        """Take in a connection."""
        if not self.up:
            raise Unavailable("nobody listens", peer=self.name)
        self.streams.append(stream)


class World:
    """A route from a cluster to a hub."""

    def __init__(self, seed: int = 0) -> None:
        self.hub = Listener()
        self.events: list[str] = []
        self.route = Route("west", self.hub, random.Random(seed), lambda event, **_: self.events.append(event))

    async def connect(self, owner: object = None) -> tuple[trio.abc.Stream, trio.abc.Stream]:
        """A new connection: the cluster's end and the hub's."""
        stream = await self.route.dialer(owner)()
        return stream, self.hub.streams[-1]

    async def refusal(self) -> tuple[float, str]:
        """After how many seconds a dial fails, and how."""
        began = trio.current_time()
        with pytest.raises(Unavailable) as caught:
            await self.route.dialer(None)()
        return round(trio.current_time() - began, 6), str(caught.value)


async def travel(sender: trio.abc.Stream, receiver: trio.abc.Stream, *, within: float = 60.0) -> float | None:
    """How many seconds a message takes; None where it does not arrive in time."""
    began = trio.current_time()
    await sender.send_all(b"message")
    with trio.move_on_after(within):
        assert await receiver.receive_some() == b"message"
        return round(trio.current_time() - began, 6)
    return None


async def test_a_route_is_healthy_and_fast_at_first(autojump_clock: MockClock) -> None:
    world = World()
    assert world.route.healthy
    assert world.route.longest_transit == 0.0
    cluster, hub = await world.connect()
    assert await travel(cluster, hub) == await travel(hub, cluster) == 0.0
    assert world.route.dialled == 1
    assert world.route.longest_wait("to_hub", since=0.0) == 0.0


async def test_a_partition_breaks_what_there_is_and_refuses_what_comes(autojump_clock: MockClock) -> None:
    world = World()
    ends = await world.connect()
    await trio.sleep(3.0)
    world.route.partition()
    assert not world.route.healthy
    assert world.route.touched_at == 3.0
    for end in ends:
        with pytest.raises(trio.BrokenResourceError):
            await end.receive_some()
    seconds, text = await world.refusal()
    assert seconds == 0.0
    assert "no route" in text
    world.route.heal()
    assert world.route.healthy
    assert await travel(*await world.connect()) == 0.0


async def test_a_silent_partition_leaves_dials_without_an_answer(autojump_clock: MockClock) -> None:
    """Who dials gives up after as long as over sockets; one that was lost is not found again by a heal."""
    world = World()
    world.route.partition(silently=True)
    seconds, text = await world.refusal()
    assert (seconds, "no connection within 5 s" in text) == (5.0, True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.refusal)
        await trio.sleep(1.0)
        world.route.heal()
        assert world.route.dial_lost_until == 10.0
        assert await travel(*await world.connect()) == 0.0
    assert trio.current_time() == 10.0


@pytest.mark.parametrize("direction", ["to_hub", "to_cluster"])
async def test_what_is_held_in_one_direction_arrives_after_the_release(
    direction: str, autojump_clock: MockClock
) -> None:
    world = World()
    cluster, hub = await world.connect()
    world.route.hold(to_hub=direction == "to_hub", to_cluster=direction == "to_cluster")
    assert not world.route.healthy
    sender, receiver = (cluster, hub) if direction == "to_hub" else (hub, cluster)
    assert await travel(receiver, sender) == 0.0
    assert await travel(sender, receiver, within=7.0) is None
    world.route.release()
    assert await receiver.receive_some() == b"message"
    waits = [world.route.longest_wait(each, since=0.0) for each in ("to_hub", "to_cluster")]
    assert waits == ([7.0, 0.0] if direction == "to_hub" else [0.0, 7.0])


async def test_a_hold_covers_connections_that_come_later(autojump_clock: MockClock) -> None:
    world = World()
    world.route.hold()
    cluster, hub = await world.connect()
    assert await travel(cluster, hub, within=5.0) is None
    world.route.heal()
    assert await hub.receive_some() == b"message"


async def test_a_delay_takes_its_time_each_way_and_twice_to_dial(autojump_clock: MockClock) -> None:
    world = World()
    cluster, hub = await world.connect()
    world.route.delay(1.5)
    assert world.route.healthy
    assert world.route.longest_transit == 1.5
    assert await travel(cluster, hub) == await travel(hub, cluster) == 1.5
    began = trio.current_time()
    later = await world.connect()
    assert trio.current_time() == began + 3.0
    assert await travel(*later) == 1.5
    world.route.heal()
    assert await travel(cluster, hub) == 0.0


async def test_jitter_is_drawn_anew_and_bounded_and_the_same_in_every_run(autojump_clock: MockClock) -> None:
    async def transits(seed: int) -> list[float]:
        world = World(seed)
        cluster, hub = await world.connect()
        world.route.delay(0.5, jitter=1.0)
        return [await travel(cluster, hub) or 0.0 for _ in range(20)]

    drawn = await transits(1)
    assert len(set(drawn)) == 20
    assert 0.5 <= min(drawn) < 0.7
    assert 1.3 < max(drawn) <= 1.5
    assert await transits(1) == drawn
    assert await transits(2) != drawn


async def test_a_route_that_is_too_slow_for_a_dial_is_not_healthy(autojump_clock: MockClock) -> None:
    world = World()
    cluster, hub = await world.connect()
    world.route.delay(2.4)
    assert world.route.healthy
    world.route.delay(2.0, jitter=1.0)
    assert not world.route.healthy
    world.route.delay(3.0)
    assert (await world.refusal())[0] == 5.0
    assert world.route.dial_lost_until == 5.0
    # What is connected goes on.
    assert await travel(cluster, hub) == 3.0


@pytest.mark.parametrize("seconds, jitter", [(-1.0, 0.0), (0.0, -0.1), (float("nan"), 0.0), (0.0, float("inf"))])
async def test_a_delay_must_be_seconds(seconds: float, jitter: float) -> None:
    world = World()
    with pytest.raises(ValueError, match="must be seconds from 0 up"):
        world.route.delay(seconds, jitter=jitter)
    assert world.route.longest_transit == 0.0


async def test_a_cut_may_be_of_one_owner_only(autojump_clock: MockClock) -> None:
    world = World()
    ours, theirs = await world.connect("us"), await world.connect("them")
    world.route.cut("us")
    assert await travel(*theirs) == 0.0
    with pytest.raises(trio.BrokenResourceError):
        await ours[0].receive_some()
    assert world.route.healthy
    world.route.cut()
    with pytest.raises(trio.BrokenResourceError):
        await theirs[0].receive_some()


async def test_a_suspended_machine_neither_dials_nor_hears_and_goes_on_afterwards(autojump_clock: MockClock) -> None:
    world = World()
    cluster, hub = await world.connect()
    world.route.suspend()
    connected: list[float] = []

    async def dial() -> None:
        await world.connect()
        connected.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        await trio.sleep(2.0)
        # Twice is once, and whoever waits already is not forgotten.
        world.route.suspend()
        nursery.start_soon(dial)
        assert await travel(hub, cluster, within=2.0) is None
        # Neither a heal nor a release wakes it.
        world.route.heal()
        await trio.sleep(1.0)
        assert connected == []
        world.route.resume()
    assert connected == [5.0, 5.0]
    assert await cluster.receive_some() == b"message"


async def test_a_flaky_route_breaks_at_random_until_it_is_healed(autojump_clock: MockClock) -> None:
    world = World()

    async def cuts(seconds: float) -> int:
        before = world.events.count("cut")
        await trio.sleep(seconds)
        return world.events.count("cut") - before

    async with trio.open_nursery() as nursery:
        world.route.flaky(10.0, nursery)
        assert 70 <= await cuts(1000.0) <= 130
        # The new interval replaces the old one.
        world.route.flaky(1000.0, nursery)
        assert await cuts(1000.0) <= 5
        world.route.flaky(1.0, nursery)
        world.route.heal()
        assert await cuts(1000.0) == 0
        assert await travel(*await world.connect()) == 0.0


@pytest.mark.parametrize("every", [0.0, -1.0, float("nan"), float("inf")])
async def test_how_often_a_flaky_route_breaks_must_be_seconds(every: float) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(ValueError, match="must be a positive number of seconds"):
            World().route.flaky(every, nursery)


async def test_the_longest_wait_is_of_what_was_read_since_a_moment(autojump_clock: MockClock) -> None:
    world = World()
    cluster, hub = await world.connect()
    for seconds in (1.0, 3.0, 2.0, 0.5):
        world.route.delay(seconds)
        assert await travel(cluster, hub) == seconds
    # Read at 1.0, 4.0, 6.0 and 6.5 s.
    since = [0.0, 1.0, 1.5, 4.0, 4.5, 6.0, 6.25, 6.5, 6.75]
    assert [world.route.longest_wait("to_hub", since=moment) for moment in since] == [
        *[3.0, 3.0, 3.0, 3.0],
        *[2.0, 2.0, 0.5, 0.5, 0.0],
    ]
    assert world.route.longest_wait("to_cluster", since=0.0) == 0.0


async def test_what_no_age_can_tell_of_a_wait(autojump_clock: MockClock) -> None:
    """Nothing of it, within a minute of the connection; after that what the line takes anyway, and a millisecond of
    each second in which a call may have been silent; all of it where no call is known."""
    world = World()
    opened_at = trio.current_time()
    cluster = await world.route.dialer(world, lambda _: opened_at)()
    hub = world.hub.streams[-1]
    world.route.delay(1.0)
    assert await travel(cluster, hub) == 1.0

    def uncounted(since: float) -> float:
        return world.route.longest_wait("to_hub", since=since, uncounted=True)

    assert uncounted(0.0) == LEAST
    await trio.sleep(99.0)
    assert await travel(cluster, hub) == 1.0
    assert uncounted(90.0) == 1.0
    world.route.delay(4.0)
    assert await travel(cluster, hub) == 4.0
    # Slow for a hundred seconds, of which a tenth of a second is forgotten.
    assert uncounted(104.0) == pytest.approx(1.0 + 105.0 * LEAK + LEAST)
    assert world.route.longest_wait("to_hub", since=104.0) == 4.0
    opened_at = math.inf
    assert await travel(cluster, hub) == 4.0
    assert uncounted(108.0) == 4.0


async def test_the_first_word_on_a_connection_is_remembered(autojump_clock: MockClock) -> None:
    """For as long as somebody may ask for it, also when the connection has ended."""
    world = World()
    world.route.delay(2.0)
    cluster, hub = await world.connect()
    assert await travel(cluster, hub) == 2.0
    world.route.delay(3.0)
    assert await travel(cluster, hub) == 3.0
    ended_at = trio.current_time()
    world.route.cut()
    assert world.route.first_word("to_cluster", since=0.0) == 0.0
    assert [world.route.first_word("to_hub", since=ended_at + each) for each in (0.0, 0.1)] == [2.0, 0.0]


async def test_a_hub_that_is_down_refuses(autojump_clock: MockClock) -> None:
    world = World()
    world.hub.up = False
    seconds, text = await world.refusal()
    assert (seconds, "nobody listens" in text) == (0.0, True)


async def test_connections_that_have_ended_are_forgotten(autojump_clock: MockClock) -> None:
    """A route that breaks a thousand times in an hour must not remember each of them."""
    world = World()
    for _ in range(5):
        for end in await world.connect():
            await end.aclose()
    assert await travel(*await world.connect()) == 0.0
    assert len(world.route.carried()) == 1


async def test_nothing_is_told_to_the_far_end_of_a_held_connection(autojump_clock: MockClock) -> None:
    """A hub that gives a connection up for its silence: the cluster finds out when the network is well again."""
    world = World()
    cluster, hub = await world.connect()
    world.route.hold()
    await hub.aclose()
    await cluster.send_all(b"is anybody there?")

    async def read() -> bytes | None:
        with trio.move_on_after(1.0):
            return bytes(await cluster.receive_some())
        return None

    assert await read() is None
    seen = await sampled(5.0, lambda: world.route.healthy, step=1.0)
    assert not any(seen)
    world.route.release()
    assert await read() == b""
    with pytest.raises(trio.BrokenResourceError):
        await cluster.send_all(b"nobody is")

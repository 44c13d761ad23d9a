"""How the capacity gauges of a scrape are written: a little at a time, into the text that prometheus_client would make.
What a record gives each gauge is in `capacity.py`, and what else a scrape shows in `health.py`.

They have a writer of their own because of what prometheus_client costs: a dict for each series and two dozen calls for
each line, about 0.1 ms for each member. Of 100,000 records that is more than ten seconds, in one piece, in which an
agent hears nothing and says nothing. The writer here takes a twentieth of that, and gives way after about every
millisecond (`make bench ARGS=exposition`). It writes the same bytes, which the tests hold it to, and nothing but these
gauges; the text of everything else is prometheus_client's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import trio
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from trio_federation.capacity import Capacity, rollup
from trio_federation.metrics.capacity import CAPACITY_FAMILIES, ENV_TABLE, MEMBER_TABLE, Table, age_table, empty_gauge

#: How many records are gathered, and how many lines are written, before others get their turn: about a millisecond of
#: work. A chunk of the answer has that many lines of some 100 bytes, or, at the end of a cluster, up to twice as many.
RECORDS_PER_SLICE = 250
LINES_PER_SLICE = 2000
#: How many different numbers a scrape remembers the text of.
NUMBERS_REMEMBERED = 16384

#: Work that is done in slices: a generator that yields a chunk of the answer, or b"" where there is nothing to send yet
#: and others should get their turn.
Slices: TypeAlias = Generator[bytes, None, None]


class _Only(Collector):
    """A collector of one family, for the text of that family alone."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        yield self._metric


def text_of(metric: Metric) -> bytes:
    """One family in Prometheus' text format, as prometheus_client writes it."""
    return generate_latest(_Only(metric))


class Numbers(dict[float, bytes]):
    """Counts as they end a line. Most of them are small and come often, so they are remembered."""

    def __missing__(self, number: float) -> bytes:
        end = end_of_line(number)
        if len(self) < NUMBERS_REMEMBERED:
            self[number] = end
        return end


_like_go: Callable[[float], str] = floatToGoString


def end_of_line(number: float) -> bytes:
    """A number as prometheus_client writes it: like Python, and from a million on like Go."""
    number = float(number)
    return b"%r\n" % number if -1e6 < number < 1e6 else f"{_like_go(number)}\n".encode()


def _escaped(value: str) -> str:
    """A label's value as the text format wants it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class _Labels(dict[str, bytes]):
    """A part of the labels, by the one name in it that changes; each is made once."""

    def __init__(self, before: str, after: str) -> None:
        self._before = before
        self._after = after

    def __missing__(self, name: str) -> bytes:
        part = self[name] = f"{self._before}{_escaped(name)}{self._after}".encode()
        return part


class _Rows:
    """Rows of one cluster for the families of one table. A line is a family's name, the cluster, the row's `middle` and
    `tail`, and the row's end for that family; the ends of all families take turns in one list.

    Three lists, whose items many rows share, instead of one of rows: that takes little memory, and does not call
    Python's garbage collector, which looks at every container, at no bytes, and makes everybody wait."""

    __slots__ = ("ends", "middles", "tails")

    def __init__(self) -> None:
        self.middles: list[bytes] = []
        self.tails: list[bytes] = []
        self.ends: list[bytes] = []

    def __len__(self) -> int:
        return len(self.middles)

    def add(self, middle: bytes, tail: bytes, ends: Iterable[bytes]) -> None:
        """One more row."""
        self.middles.append(middle)
        self.tails.append(tail)
        self.ends.extend(ends)

    def lines(self, head: bytes, column: int, columns: int, start: int) -> list[bytes]:
        """Up to LINES_PER_SLICE lines from row `start` on, in pieces, for the family in `column` of so many `columns`;
        `head`: its name and the cluster."""
        stop = start + LINES_PER_SLICE
        middles = self.middles[start:stop]
        pieces = [head] * (4 * len(middles))
        pieces[1::4] = middles
        pieces[2::4] = self.tails[start:stop]
        pieces[3::4] = self.ends[start * columns + column : stop * columns : columns]
        return pieces


class _Cluster(NamedTuple):
    """All rows of one cluster; `head`: how their labels begin."""

    head: bytes
    envs: _Rows
    members: _Rows
    ages: _Rows


class CapacityWriter:
    """The capacity gauges of one scrape: gathered env by env, and then written family by family, as Prometheus wants
    it, and in the order of a snapshot.

    Nothing is kept for the next scrape. Lines are put together from parts that many of them share, and that costs less
    than to look for the labels of the scrape before."""

    def __init__(self, now: float) -> None:
        #: how many records were gathered
        self.records = 0
        self._ages = age_table(now)
        self._clusters: dict[str, _Cluster] = {}
        self._pools = _Labels(',pool="', '"} ')
        self._count = Numbers().__getitem__

    def gather(self, envs: Iterable[Sequence[Capacity]]) -> Slices:
        """Take in everything. Whatever can fail does so here."""
        pause_at = RECORDS_PER_SLICE
        for records in envs:
            if not records:
                yield b""
                continue
            namespace, env_name = records[0].namespace, records[0].env_name
            groups = _Labels(f',env="{_escaped(env_name)}",group="', f'",namespace="{_escaped(namespace)}"')
            by_cluster: dict[str, list[Capacity]] = {}
            for record in records:
                by_cluster.setdefault(record.cluster_id, []).append(record)
            for cluster_id, found in by_cluster.items():
                self._add(cluster_id, found, groups)
                self.records += len(found)
                if self.records >= pause_at:
                    pause_at = self.records + RECORDS_PER_SLICE
                    yield b""

    def _add(self, cluster_id: str, records: list[Capacity], groups: _Labels) -> None:
        """Take in what one cluster has of one env."""
        cluster = self._clusters.get(cluster_id)
        if cluster is None:
            head = f'{{cluster="{_escaped(cluster_id)}"'.encode()
            cluster = self._clusters[cluster_id] = _Cluster(head, _Rows(), _Rows(), _Rows())
        if len(records) > 1:
            records.sort(key=_POOL_AND_GROUP)
        count = self._count
        for group, sums in _sums(records):
            cluster.envs.add(groups[group], b"} ", map(count, ENV_TABLE.values(sums)))
        for record in records:
            if record.member_pool:
                middle, tail = groups[record.scaling_group], self._pools[record.member_pool]
                cluster.members.add(middle, tail, map(count, MEMBER_TABLE.values(record)))
                if record.observed_at is not None:
                    cluster.ages.add(middle, tail, map(end_of_line, self._ages.values(record)))

    def text(self) -> Slices:
        """What was gathered. Cannot fail."""
        clusters = [self._clusters[cluster_id] for cluster_id in sorted(self._clusters)]
        yield from _text(ENV_TABLE, [(cluster.head, cluster.envs) for cluster in clusters])
        yield from _text(MEMBER_TABLE, [(cluster.head, cluster.members) for cluster in clusters])
        yield from _text(self._ages, [(cluster.head, cluster.ages) for cluster in clusters])


def _text(table: Table, clusters: Sequence[tuple[bytes, _Rows]]) -> Slices:
    """A table, family by family: of each cluster the head of its labels and its rows."""
    for column, family in enumerate(table.families):
        name = family.name.encode()
        pieces = [_HEADERS[family.name]]
        for head, rows in clusters:
            for start in range(0, len(rows), LINES_PER_SLICE):
                pieces += rows.lines(name + head, column, len(table.families), start)
                if len(pieces) > 4 * LINES_PER_SLICE:
                    yield b"".join(pieces)
                    pieces = []
        yield b"".join(pieces)


_POOL_AND_GROUP = attrgetter("member_pool", "scaling_group")
_HEADERS = {family.name: text_of(empty_gauge(family)) for family in CAPACITY_FAMILIES}


def _sums(records: Sequence[Capacity]) -> Iterable[tuple[str, Capacity]]:
    """The rows that `rollup` makes of what one cluster has of one env, each with its group. A single record adds up to
    itself, and most clusters have but one."""
    if len(records) > 1:
        return [(row.scaling_group, row) for row in rollup(records)]
    (record,) = records
    return [("", record), (record.scaling_group, record)] if record.scaling_group else [("", record)]


class Exposition(AsyncIterator[bytes]):
    """Does slices of work until there is a chunk to give; between any two of them all other tasks get their turn.

    A class, because an async generator that is not used up has to be closed by whoever stops, and servers do not."""

    def __init__(self, slices: Slices, turn: trio.Lock) -> None:
        self._slices = slices
        self._turn = turn

    async def __anext__(self) -> bytes:
        while True:
            async with self._turn:
                await trio.lowlevel.checkpoint()
                chunk = next(self._slices, None)
            if chunk is None:
                raise StopAsyncIteration
            if chunk:
                return chunk


def by_env(snapshot: Iterable[Capacity]) -> list[list[Capacity]]:
    """A snapshot as `FederationMetrics.exposition` takes it, where there is no registry to ask: a list for each env, by
    namespace and env."""
    envs: dict[tuple[str, str], list[Capacity]] = {}
    for record in snapshot:
        envs.setdefault((record.namespace, record.env_name), []).append(record)
    return [envs[env] for env in sorted(envs)]

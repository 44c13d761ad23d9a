"""The parts of the benchmark of faults that decide what is false, and where a frame ends."""

from __future__ import annotations

import pytest
from hyperframe.frame import DataFrame, PingFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.faults_line import Frames
from benchmarks.faults_process import SLACK, STEP, judged, step_at
from trio_federation import Capacity

NOW, TTL = 1000.03, 30.0


def record(true_at: float, observed_at: float, pool: str = "pool") -> Capacity:
    """What a source said that read the clock at one moment, and was asked at another one, as it claims."""
    return Capacity("far", "agents", "env", pool, running=step_at(true_at), observed_at=observed_at)


@given(age=st.floats(0.0, TTL))
def test_what_was_true_when_it_was_observed_is_not_false(age: float) -> None:
    found = judged([record(NOW - age, NOW - age)], "near", NOW, TTL)
    assert (found["judged"], found["false"]) == (1, 0)
    assert found["seen"] == {"far": [1, step_at(NOW - age)]}


@given(late=st.floats(STEP + SLACK + 0.001, 20.0))
def test_what_claims_to_be_younger_than_it_is_is_false(late: float) -> None:
    found = judged([record(NOW - late, NOW)], "near", NOW, TTL)
    assert found["false"] == 1
    assert found["younger"] == pytest.approx(late, abs=STEP + 0.001)


def test_what_is_past_its_ttl_is_false_however_honest_it_is() -> None:
    gone = NOW - TTL - SLACK - 0.01
    assert judged([record(gone, gone)], "near", NOW, TTL)["false"] == 1


def test_the_oldest_of_a_cluster_counts_and_the_own_one_does_not() -> None:
    records = [record(990.05, 990.05, "a"), record(980.05, 980.05, "b"), record(995.05, 995.05, "c")]
    assert judged(records, "near", NOW, TTL)["seen"] == {"far": [3, step_at(980.05)]}
    assert judged(records, "far", NOW, TTL) == {"seen": {}, "judged": 0, "false": 0, "younger": 0.0}


FRAMES = st.lists(
    st.one_of(
        st.binary(max_size=50).map(lambda data: DataFrame(1, data=data)),
        st.just(PingFrame(0, opaque_data=bytes(8))),
        st.just(SettingsFrame(0)),
    ),
    min_size=1,
    max_size=8,
)


@given(frames=FRAMES, data=st.data())
def test_it_is_known_where_a_frame_ends_however_the_bytes_come(
    frames: list[DataFrame | PingFrame | SettingsFrame], data: st.DataObject
) -> None:
    parts = [frame.serialize() for frame in frames]
    ends = [sum(map(len, parts[: number + 1])) for number in range(len(parts))]
    sent = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=6)))
    known = Frames()
    for start, stop in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        within = [end - start for end in ends if start < end <= stop]
        assert known.end_of_first(sent[start:stop]) == (within[0] if within else None)

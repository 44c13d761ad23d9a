"""The plugin for pytest, in runs of pytest as a user starts them: what the fixtures give, what a failure shows, and
that nobody else notices it."""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from trio_federation.testing import FederationFactory, simulated_federation

IMPORTS = """
import pytest
import trio
from trio_federation.testing import *
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Runs tests of a user, in a process of their own, with pytest-trio in its mode for Trio."""

    def run_tests(tests: str, *arguments: str, settings: str = "trio_mode = true") -> pytest.RunResult:
        pytester.makeini(f"[pytest]\n{settings}\n")
        pytester.makepyfile(test_user=IMPORTS + tests)
        return pytester.runpytest_subprocess(*arguments)

    return run_tests


def lines(result: pytest.RunResult) -> list[str]:
    """What pytest has said, with single spaces."""
    return [" ".join(line.split()) for line in result.stdout.lines]


def sections(result: pytest.RunResult) -> list[list[str]]:
    """What the reports of failures say of federations, in their order."""
    found: list[list[str]] = []
    inside = False
    for line in result.stdout.lines:
        if re.fullmatch(r"-+ Simulated federation -+", line):
            inside = True
            found.append([])
        elif re.fullmatch(r"([-_=])\1+ .* \1+", line):
            inside = False
        elif inside:
            found[-1].append(line)
    return found


def again(test: str, seed: int) -> str:
    """How a report begins."""
    return f"federation seed {seed}; the same again: pytest {test} --federation-seed {seed}"


# What a failure shows.


@pytest.mark.slow
def test_a_failure_is_shown_by_itself_with_the_seed_and_what_happened_until_then(run: Run) -> None:
    result = run(
        """
async def test_right(autojump_clock, federation):
    async with federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        assert fed["west"].idle("east") == [3]

async def test_wrong(autojump_clock, federation):
    async with federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        fed.partition("east")
        assert fed["west"].idle("east") == [4]

async def test_with_a_nursery(autojump_clock, federation, nursery):
    async with federation("west") as fed:
        nursery.start_soon(trio.sleep_forever)
        pytest.fail("as I please")

@pytest.fixture
async def fed(federation):
    async with federation("west", "east") as fed:
        yield fed

async def test_with_a_fixture_of_his_own(autojump_clock, fed):
    await trio.sleep(100)
    assert fed["west"].is_running is None

@pytest.mark.parametrize("clusters", [("a", "b")])
async def test_long(autojump_clock, federation, clusters):
    async with federation(*clusters, seed=4):
        pass
    async with federation(*clusters, seed=5) as fed:
        for _ in range(50):
            fed.cut("a")
        pytest.fail("after a long time")
""",
        "--federation-seed=7",
    )
    result.assert_outcomes(passed=1, failed=4)
    said = lines(result)
    for line in (
        "federation seed: 7",
        '> assert fed["west"].idle("east") == [4]',
        "E assert [3] == [4]",
        '> pytest.fail("as I please")',
        "E Failed: as I please",
        '> assert fed["west"].is_running is None',
        "E assert True is None",
    ):
        assert line in said
    assert not any("Exception Group" in line for line in said)
    wrong, nursery, own, long = sections(result)
    assert wrong[:2] == [again("test_user.py::test_wrong", 7), "every event:"]
    assert re.fullmatch(r" *0\.000000 west started( .*)?", next(line for line in wrong if "west" in line))
    assert re.fullmatch(r" *[1-9]\d*\.\d{6} east~hub-0 cut", wrong[-1])
    assert own[0] == again("test_user.py::test_with_a_fixture_of_his_own", 7)
    # What is torn down after the failure says nothing.
    for told in (wrong, nursery, own):
        assert told is own or any("hub-0 started" in line for line in told)
        assert not any("hub-0 stopped" in line for line in told)
    assert long[:3] == [
        again("'test_user.py::test_long[clusters0]'", 7),
        "its seed, given by the test, is 5",
        "of 2 federations that the test has made, this is the last one",
    ]
    assert re.fullmatch(r"the last 40 of \d\d+ events:", long[3])
    assert len(long) == 4 + 40


@pytest.mark.slow
def test_an_invariant_that_does_not_hold_is_shown_with_the_event(run: Run) -> None:
    """Whoever opens the federation: the test, or a fixture of the user's. Invariants can be replaced and switched
    off, and a look is had of every one by default."""
    result = run(
        """
class Early(Invariant):
    def look(self):
        if trio.current_time() > 20:
            raise InvariantBroken("it is late")

async def test_by_itself(autojump_clock, federation):
    async with federation("west", invariants=[Early()]):
        await trio.sleep(60)

@pytest.fixture
async def fed(federation):
    async with federation("west", invariants=[Early()]) as fed:
        yield fed

async def test_by_a_fixture(autojump_clock, fed):
    await trio.sleep(60)

async def test_switched_off(autojump_clock, federation):
    async with federation("west", invariants=()) as fed:
        assert fed.invariants == []

async def test_by_default(autojump_clock, federation):
    async with federation("west") as one, federation("west") as other:
        kinds = [type(each) for each in one.invariants]
        assert len(kinds) > 1
        assert kinds == [type(each) for each in other.invariants]
        assert not set(map(id, one.invariants)) & set(map(id, other.invariants))
"""
    )
    result.assert_outcomes(passed=2, failed=2)
    said = lines(result)
    assert not any("Exception Group" in line for line in said)
    assert len([line for line in said if re.fullmatch(r"E .*\bInvariantBroken: .*it is late.*", line)]) == 2
    for told in sections(result):
        assert re.fullmatch(r" *21\.000000 invariant broken .*it is late.*", told[-1])


@pytest.mark.slow
def test_what_is_skipped_or_expected_to_fail_stays_so(run: Run) -> None:
    result = run(
        """
async def test_skipped(autojump_clock, federation):
    async with federation("west"):
        pytest.skip("not today")

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
async def test_expected(autojump_clock, federation):
    async with federation("west"):
        1 / 0

@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
async def test_unexpected(autojump_clock, federation):
    async with federation("west"):
        pytest.fail("for another reason")

async def test_several(autojump_clock, federation):
    async def fail():
        raise KeyError
    async with federation("west"), trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        nursery.start_soon(fail)
"""
    )
    result.assert_outcomes(skipped=1, xfailed=1, failed=2)
    assert [told[0].split(";")[0] for told in sections(result)] == ["federation seed 0"] * 2
    assert any("Exception Group Traceback" in line for line in lines(result)), "more than one error stay a group"


# Seeds.


@pytest.mark.slow
def test_the_seed_of_the_run_makes_the_run(run: Run) -> None:
    """It is 0 unless it is said; with one seed two federations are alike, with two they are not; a test can bring its
    own; and what is no number is refused."""
    tests = """
async def test_alike(autojump_clock, federation, federation_seed):
    logs = []
    for seed in (None, None, federation_seed, federation_seed + 1):
        async with federation("west", "east", seed=seed) as fed:
            await fed.settle()
        logs.append(fed.log.text())
    assert logs[0] == logs[1] == logs[2] != logs[3]
    print("seed", federation_seed, "digest", fed.log.digest())

@pytest.mark.parametrize("federation_seed", [21, 22])
async def test_own(autojump_clock, federation, federation_seed):
    async with federation("west") as fed:
        assert fed.seed == federation_seed == federation.seed
    assert federation_seed != 22

def test_only_the_seed(federation_seed):
    assert federation_seed is None
"""
    result = run(tests, "-rP")
    result.assert_outcomes(passed=2, failed=2)
    assert "federation seed: 0" in lines(result)
    assert [told[0] for told in sections(result)] == [
        again("'test_user.py::test_own[22]'", 22),
        again("test_user.py::test_only_the_seed", 0),
    ]
    digests = {line for line in lines(result) if line.startswith("seed 0 digest ")}
    assert len(digests) == 1
    assert digests <= set(lines(run(tests, "-rP", "-k", "alike"))), "another process makes the same run"
    assert digests.isdisjoint(lines(run(tests, "-rP", "-k", "alike", "--federation-seed", "5")))
    refused = run(tests, "--federation-seed", "five")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["*--federation-seed: invalid int value: 'five'"])


@pytest.mark.slow
def test_the_command_that_repeats_a_test_is_for_the_folder_that_pytest_runs_in(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which need not be the one with the settings."""
    pytester.makeini("[pytest]\n")
    folder = pytester.mkdir("folder")
    (folder / "test_one.py").write_text("def test_one(federation_seed):\n    assert federation_seed is None\n")
    monkeypatch.chdir(folder)
    [[told]] = sections(pytester.runpytest_subprocess())
    assert told == again("test_one.py::test_one", 0)
    monkeypatch.chdir(pytester.mkdir("other"))
    [[told]] = sections(pytester.runpytest_subprocess(folder))
    assert told == again("../folder/test_one.py::test_one", 0)


# Beside others.


@pytest.mark.slow
def test_it_does_without_pytest_trio(run: Run) -> None:
    """In tests that are not async, and under the plugin of anyio, on real time and on virtual time."""
    result = run(
        """
from trio.testing import MockClock

async def story(federation):
    async with federation("west", "east") as fed:
        fed["east"].source.set(member("east", idle=3))
        await fed.settle()
        assert fed["west"].idle("east") == [3]
        return fed.log.text()

def test_of_no_task(federation):
    assert run_simulated(story, federation) == run_simulated(story, federation)

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("trio", {"clock": MockClock(autojump_threshold=0)})])
async def test_of_anyio(federation, anyio_backend):
    await story(federation)
    assert trio.current_time() >= 6

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_of_real_time(federation, anyio_backend):
    async with federation("west") as fed:
        await trio.sleep(0.01)
        pytest.fail("in real time")
""",
        "-p",
        "no:trio",
        settings="",
    )
    result.assert_outcomes(passed=2, failed=1)
    [told] = sections(result)
    assert told[1].startswith("it ran in real time, in which no two runs are alike")


@pytest.mark.slow
def test_it_can_be_left_out(run: Run) -> None:
    tests = """
def test_one():
    pass

async def test_two(autojump_clock):
    async with simulated_federation("west"):
        pass
"""
    result = run(tests, "-p", "no:trio_federation")
    result.assert_outcomes(passed=2)
    assert not any("federation seed" in line for line in lines(result))
    assert run(tests, "-p", "no:trio_federation", "--federation-seed=1").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.slow
def test_whoever_does_not_use_it_does_not_notice_it(pytester: pytest.Pytester) -> None:
    """Nothing is imported, and nothing is done to failures."""
    pytester.makeini("[pytest]\ntrio_mode = true\n")
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_imported():
            rooms = [name for name in sys.modules if name.startswith("trio_federation.")]
            assert sorted(rooms) == ["trio_federation.testing", "trio_federation.testing.pytest_plugin"]
            assert not {"betterproto2", "grpclib", "httpx", "hypercorn", "msgspec", "structlog"} & set(sys.modules)

        async def test_in_a_group():
            assert [3] == [4]
        """
    )
    result = pytester.runpytest_subprocess("-W", "error")
    result.assert_outcomes(passed=1, failed=1)
    assert sections(result) == []
    assert any("Exception Group Traceback" in line for line in lines(result)), "as pytest-trio has it"


@pytest.mark.slow
def test_its_fixtures_and_its_option_say_what_they_are_for(pytester: pytest.Pytester) -> None:
    listed = lines(pytester.runpytest_subprocess("--fixtures", "-v"))
    shown = " ".join(listed[next(i for i, line in enumerate(listed) if "federation_seed" in line) :])
    assert "federation_seed [session scope]" in shown
    for words in (
        "The seed of simulated federations",
        'async with federation("west", "east") as fed:',
        "`trio_federation.testing.simulated_federation`",
        "every invariant is switched on",
        "`autojump_clock`",
    ):
        assert words in shown
    helped = " ".join(lines(pytester.runpytest_subprocess("--help")))
    assert "simulated federations: --federation-seed=N " in helped


# Its signature.


async def test_every_argument_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: dict[str, object] = {}

    @asynccontextmanager
    async def record(*names: str, **arguments: object) -> AsyncIterator[object]:
        handed.update(arguments, names=names)
        yield SimpleNamespace(log=SimpleNamespace(lines=[]), broken_at_line=None)

    monkeypatch.setattr("trio_federation.testing.factory.simulated_federation", record)
    given: dict[str, Any] = {name: object() for name in list(inspect.signature(simulated_federation).parameters)[1:]}
    async with FederationFactory(1)("west", "east", **given):
        pass
    assert handed == {**given, "names": ("west", "east")}


def test_it_is_called_like_simulated_federation() -> None:
    """With the same arguments; but for the defaults of two, which it fills in."""
    theirs = inspect.signature(simulated_federation).parameters
    ours = dict(inspect.signature(FederationFactory.__call__).parameters)
    del ours["self"]
    assert list(ours) == list(theirs)
    different = {name for name, each in theirs.items() if ours[name] != each}
    assert different == {"seed", "invariants"}
    assert ours["seed"].default is ours["invariants"].default is None

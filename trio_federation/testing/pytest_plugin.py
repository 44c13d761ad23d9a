"""What pytest takes from this package, through the entry point `trio_federation` of the group `pytest11`: an option,
two fixtures, and what the report of a failing test shows of its simulated federation. It is imported by every run of
pytest on a machine where the package is installed, also by those that have nothing to do with it. So it imports nothing
but pytest before a test asks for a fixture, and leaves alone whatever does not use one."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from trio_federation.testing.factory import FederationFactory

#: of a test that uses the fixture `federation`: what it is
_FACTORY: pytest.StashKey[FederationFactory] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The seed of a run."""
    group = parser.getgroup("trio_federation", "simulated federations")
    group.addoption(
        "--federation-seed",
        type=int,
        default=0,
        metavar="N",
        help="what everything that is drawn by lot in a simulated federation follows from (default: 0)",
    )


def pytest_report_header(config: pytest.Config) -> str:
    """The seed, above all tests."""
    return f"federation seed: {config.getoption('--federation-seed')}"


@pytest.fixture(scope="session")
def federation_seed(pytestconfig: pytest.Config) -> int:
    """The seed of simulated federations: that of `--federation-seed`, by default 0.

    To run a test with several, parametrize it: `@pytest.mark.parametrize("federation_seed", range(10))`."""
    seed: int = pytestconfig.getoption("--federation-seed")
    return seed


@pytest.fixture
def federation(request: pytest.FixtureRequest, federation_seed: int) -> FederationFactory:
    """Makes simulated federations: `async with federation("west", "east") as fed:`.

    Takes the arguments of `trio_federation.testing.simulated_federation`. Seeded with `federation_seed`, every
    invariant is switched on, and the report of a failure shows the seed and the latest events. Time is simulated where
    the test also takes `autojump_clock` of pytest-trio."""
    from trio_federation.testing.factory import FederationFactory

    factory = request.node.stash[_FACTORY] = FederationFactory(federation_seed)
    return factory


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the failure of a test of a federation by itself, what the federation has to tell, and how the test is run
    again."""
    factory = item.stash.get(_FACTORY, None)
    if factory is not None and call.excinfo is not None:
        call.excinfo = _by_itself(call.excinfo)
    report = yield
    if report.failed:
        seed = getattr(item, "funcargs", {}).get("federation_seed") if factory is None else factory.seed
        if seed is not None:
            told = f"federation seed {seed}; the same again: pytest {_argument(item)} --federation-seed {seed}"
            if factory is not None and (happened := factory.report()):
                told = f"{told}\n{happened}"
            report.sections.append(("Simulated federation", told))
    return report


def _argument(item: pytest.Item) -> str:
    """What names a test on the command line, from the folder that pytest was started in."""
    _, colons, names = item.nodeid.partition("::")
    return shlex.quote(os.path.relpath(item.path, item.config.invocation_params.dir) + colons + names)


def _by_itself(found: pytest.ExceptionInfo[BaseException]) -> pytest.ExceptionInfo[BaseException]:
    """An exception without the groups around it, where it is the only one in them. Nurseries put everything into
    groups, and so does pytest-trio, of which pytest shows no source and no values."""
    error = found.value
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return found if error is found.value or isinstance(error, BaseExceptionGroup) else found.from_exception(error)

"""Fixtures for tests against a real API server. A test that asks for one of them belongs into this folder and is marked
slow by that alone. It is skipped where the programs cannot be built because there is no suitable Go; with CI=true, or
TRIO_FEDERATION_REQUIRE_APISERVER set, it fails instead.

Tests share `api_server`, each in namespaces of its own, and neither stop it nor count on being alone: definitions of
custom resources stay once they are there, and a list over all namespaces holds what others have made. Who stops a
server, or needs an empty one, starts it with `own_api_server`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

import pytest

from tests.apiserver.build import BuildError, NoToolchain, Programs, programs, required
from tests.apiserver.cluster import ApiServer, StartServer, started

#: fixtures that need the programs
NEEDY = {"apiserver_programs", "api_server", "own_api_server", "namespace"}


def needs_programs(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and not NEEDY.isdisjoint(item.fixturenames)


def pytest_itemcollected(item: pytest.Item) -> None:
    if needs_programs(item):
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds ahead of the first test, whose time limit is none for a build, and where progress can be seen. What goes
    wrong is told by the fixture, to each test that needs it."""
    if session.config.option.collectonly or not any(map(needs_programs, session.items)):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    with suppress(NoToolchain, BuildError):
        programs(os.environ, lambda line: reporter.write_line(line) if reporter is not None else None)


@pytest.fixture(scope="session")
def apiserver_programs() -> Programs:
    """Where etcd, kube-apiserver and kubectl are."""
    try:
        return programs(os.environ, lambda line: None)
    except NoToolchain as error:
        if required(os.environ):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    except BuildError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def api_server(apiserver_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The server that tests share; it starts with the first of them."""
    with started(ApiServer(apiserver_programs, tmp_path_factory.mktemp("api-server"))) as server:
        yield server


@pytest.fixture
def own_api_server(apiserver_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers that this test may do with as it likes; all of them end with it."""
    with ExitStack() as servers:

        def start(*, watch_cache: bool = True, arguments: Sequence[str] = ()) -> ApiServer:
            folder = tmp_path_factory.mktemp("own-api-server")
            server = ApiServer(apiserver_programs, folder, watch_cache=watch_cache, arguments=arguments)
            return servers.enter_context(started(server))

        yield start


@pytest.fixture
def namespace(api_server: ApiServer) -> Iterator[str]:
    """A namespace of `api_server` for this test alone, which is gone afterwards, with all that is in it."""
    name = api_server.namespace()
    yield name
    api_server.delete_namespace(name)

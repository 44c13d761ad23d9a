"""One process, put together from a configuration: an agent, a hub, or both, with their sources, hubs, listeners and
metrics. What each of them does is in its own room; this one only hands them to each other."""

from __future__ import annotations

import platform
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import structlog
import trio

from trio_federation.admin import Answers, admin_app, metrics_app, serve_http
from trio_federation.agent import Agent
from trio_federation.clock import trio_clock
from trio_federation.config import Config, PluginTable
from trio_federation.errors import ConfigurationError
from trio_federation.hub import Hub
from trio_federation.keyring import Keyring
from trio_federation.logs import lines_lost
from trio_federation.metrics import FederationMetrics
from trio_federation.plugins import PluginManager, table_name
from trio_federation.rpc import Dialer, open_listeners, tcp_dialer
from trio_federation.standing import Standing

log = structlog.get_logger("trio_federation.process")

_P = TypeVar("_P")

#: This package's.
VERSION = version("trio-federation")

#: Seconds that an agent gets to end before the rest of its process does: more than its own deadlines add up to.
AGENT_DEADLINE = 4.0
#: Seconds that a hub gets to pass on what the agent of its own process said last.
PASS_ON = 0.2


@dataclass(frozen=True, slots=True)
class Running:
    """A process that has started: what it runs, and the ports that it was given where the configuration left them
    open."""

    agent: Agent | None
    hub: Hub | None
    metrics_port: int
    admin_port: int
    hub_ports: list[int] = field(default_factory=list)


def faults(config: Config, plugin_faults: Mapping[str, Callable[[PluginTable], list[str]]]) -> list[str]:
    """What is wrong with a loaded configuration beyond what `config.load` can tell: with the plugins' options, as
    `plugin_faults` tells by the kind of table, and with the contents of the files that prove somebody. A line each."""
    return _checked(config, plugin_faults)[1]


def _checked(
    config: Config, plugin_faults: Mapping[str, Callable[[PluginTable], list[str]]]
) -> tuple[Keyring | None, list[str]]:
    """What `faults` tells, and the files that it has read for that."""
    tables = {"source": config.source, "sink": config.sink, "filter": config.filter}
    found = [
        f"{config.path}: {line}"
        for kind, each in tables.items()
        for table in each
        for line in plugin_faults[kind](table)
    ]
    try:
        return Keyring(config), found
    except ConfigurationError as error:
        return None, found + error.faults


async def run(
    config: Config,
    plugins: PluginManager,
    *,
    generator: random.Random | None = None,
    task_status: trio.TaskStatus[Running] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run what `config` asks for, until cancelled; an agent then withdraws its records first.

    Raises ConfigurationError, with every fault, before anything is started, and FederationError where an address cannot
    be listened on. A table whose plugin could not be loaded is no such fault: what is made of it fails, and the rest
    goes on."""
    keyring, found = _checked(config, plugins.faults_of_the_file)
    if keyring is None or found:
        raise ConfigurationError(found)
    generator = generator if generator is not None else random.SystemRandom()
    for warning in config.warnings:
        log.warning("configuration", note=warning)
    for failure in plugins.failures:
        log.warning("plugin_failed", plugin=failure.name, package=failure.package, error=failure.error)
    metrics = FederationMetrics(started_at=trio_clock()())
    metrics.build(
        VERSION,
        python=platform.python_version(),
        trio=version("trio"),
        grpclib=version("grpclib"),
    )
    metrics.log_lines(lines_lost)
    for info in plugins.plugins:
        metrics.plugin_failures(info.name, f"{info.distribution} {info.version}".rstrip(), len(info.failures))
    agent = _make_agent(config, plugins, generator, metrics, keyring) if config.has_agent else None
    hub = None
    if config.hub is not None:
        hub = Hub(config.hub, trusted=keyring.trusted(), metrics=metrics)
        keyring.trusted_changed = hub.trust
    answers = _answers(agent, hub, metrics, config.warnings, [str(failure) for failure in plugins.failures])
    async with trio.open_nursery() as nursery:
        services: list[trio.CancelScope] = []
        try:
            at, admin_at = config.metrics.bind, config.admin.bind
            metrics_port = await _start(
                nursery, services, partial(serve_http, metrics_app(answers), at.host, at.port, section="metrics")
            )
            admin = admin_app(answers, host=admin_at.host, token=keyring.admin_token)
            admin_port = await _start(
                nursery,
                services,
                partial(serve_http, admin, admin_at.host, admin_at.port, section="admin", tls=keyring.admin_tls),
            )
            hub_ports: list[int] = []
            if hub is not None:
                listeners = await open_listeners(hub.settings.bind.host, hub.settings.bind.port)
                hub_ports = [listener.socket.getsockname()[1] for listener in listeners]
                await _start(nursery, services, partial(hub.run, listeners, keyring.server_tls))
            nursery.start_soon(keyring.keep_fresh, metrics)
            if agent is not None:
                await nursery.start(agent.run)
            log.info(
                "started",
                cluster=config.cluster_id if agent is not None else None,
                hubs=[link.name for link in agent.links] if agent is not None else [],
                hub_bind=str(hub.settings.bind) if hub is not None else None,
                hub_ports=hub_ports,
                metrics_port=metrics_port,
                admin_port=admin_port,
            )
            task_status.started(Running(agent, hub, metrics_port, admin_port, hub_ports))
            await trio.sleep_forever()
        finally:
            nursery.cancel_scope.cancel()
            # The agent first, which says goodbye, also to the hub of this very process; that passes it on, and ends.
            if agent is not None and agent.started:
                with trio.move_on_after(AGENT_DEADLINE, shield=True):
                    await agent.ended.wait()
                    if hub is not None:
                        await trio.sleep(PASS_ON)
            for scope in services:
                scope.cancel()


async def _start(
    nursery: trio.Nursery, services: list[trio.CancelScope], service: Callable[..., Awaitable[None]]
) -> Any:
    """Start something that goes on when the nursery is cancelled, until its own scope, added to `services`, is. Returns
    what it tells when it has started."""
    scope = trio.CancelScope()
    services.append(scope)

    async def run(*, task_status: trio.TaskStatus[Any]) -> None:
        with scope:
            await service(task_status=task_status)

    told = await nursery.start(run)
    # Only now: a start that is shielded could not be called off.
    scope.shield = True
    return told


def _answers(
    agent: Agent | None,
    hub: Hub | None,
    metrics: FederationMetrics,
    notes: Sequence[str],
    plugin_failures: list[str],
) -> Answers:
    """What is served over HTTP."""
    clock = trio_clock()
    began = clock()

    def exposition() -> AsyncIterator[bytes]:
        if agent is not None:
            return agent.exposition()
        if hub is not None:
            return metrics.exposition(hub.by_env(), now=clock(), held=hub.held)
        return metrics.exposition([], now=clock())

    def readiness() -> dict[str, Any]:
        if agent is not None:
            known = agent.health()
        else:
            nothing: dict[str, Any] = {"sources": [], "sinks": [], "hubs": []}
            known = {"why_not": [], "cluster_id": None, "mode": "hub", "uptime": round(clock() - began, 3)} | nothing
        return {
            "ready": not known["why_not"],
            "version": VERSION,
            **known,
            "hub": hub.health() if hub is not None else None,
            "notes": list(notes),
            "plugin_failures": plugin_failures,
        }

    return Answers(
        exposition=exposition,
        readiness=readiness,
        registry=agent.registry if agent is not None else None,
        place=agent.place if agent is not None else None,
        placed=agent.placed if agent is not None else None,
        report_outcome=agent.report_outcome if agent is not None else None,
    )


def _make_agent(
    config: Config, plugins: PluginManager, generator: random.Random, metrics: FederationMetrics, keyring: Keyring
) -> Agent:
    clock = trio_clock()
    cluster_id = config.cluster_id or ""
    base_dir = (config.path or Path()).parent

    def makers(tables: tuple[PluginTable, ...], create: Callable[..., _P]) -> dict[str, Callable[[], _P]]:
        """What makes the plugin of each table, each time that it has to be made. A generator is one plugin's alone."""

        def maker(table: PluginTable) -> Callable[[], _P]:
            seed = generator.getrandbits(64)
            return lambda: create(table, cluster_id, clock, random.Random(seed), base_dir)

        return {table_name(table): maker(table) for table in tables}

    federation = config.federation
    # Made first: the sinks ask it, and the agent's links tell it.
    standing = Standing()
    return Agent(
        config.cluster_id,
        federation,
        sources=makers(config.source, partial(plugins.create_source, ttl=federation.ttl)),
        sinks=makers(config.sink, partial(plugins.create_sink, ttl=federation.ttl, is_reporter=standing.is_reporter)),
        filters=makers(config.filter, plugins.create_filter),
        isolated=True,
        hubs=_dialers(config, keyring) if config.enabled else {},
        credential=keyring.credential,
        renewals=keyring.renewals,
        clock=clock,
        generator=generator,
        metrics=metrics,
        standing=standing,
        placement=config.placement,
    )


def _dialers(config: Config, keyring: Keyring) -> dict[str, Dialer]:
    server_name = config.federation.tls.server_name if config.federation.tls is not None else None
    return {
        str(hub): tcp_dialer(
            hub.host,
            hub.port,
            tls=keyring.client_tls,
            server_name=server_name,
            deadline=config.federation.silence_limit,
        )
        for hub in config.federation.hubs
    }

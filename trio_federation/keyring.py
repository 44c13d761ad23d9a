"""Everything of a configuration that proves somebody, or is taken for proof, and stands in files: secrets, tokens,
certificates, the deny list. It is loaded here at the start, and read again when it changes. What each of it means is in
the rooms that use it; which secret wins over which, and what may be left out, is `config.py`."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import structlog
import trio

from trio_federation.admin import admin_tls
from trio_federation.certificates import watch_expiry
from trio_federation.clock import wall_clock
from trio_federation.config import (
    Config,
    HubSettings,
    Secret,
    read_admin_token_file,
    read_agent_secret_file,
    read_deny_file,
    read_hub_secret_file,
    read_next_secret_file,
    weak_secret,
)
from trio_federation.credentials import NOBODY, DenyList, same_secret
from trio_federation.errors import ConfigurationError
from trio_federation.identity import Trusted
from trio_federation.metrics import FederationMetrics
from trio_federation.reload import FileBacked, keep_fresh
from trio_federation.rpc import client_tls, server_tls

log = structlog.get_logger("trio_federation.keyring")

_T = TypeVar("_T")
#: A deny list, and the faults of lines that deny nobody.
_Denied: TypeAlias = tuple[DenyList, Sequence[str]]


class Keyring:
    """What a configuration holds of this.

    Raises ConfigurationError, with every fault, where a file cannot be used. `trusted_changed`, when set, is told what
    a hub takes for proof each time that it has become something else."""

    def __init__(self, config: Config) -> None:
        self.trusted_changed: Callable[[Trusted], None] | None = None
        self._config = config
        self._items: list[FileBacked[Any]] = []
        self._faults: list[str] = []
        #: by key, the files whose certificates run out some day
        self.certificates = dict(_certificates(config))
        #: the context for the next connection to a hub; None for plain text
        self.client_tls = self._make_client_tls()
        #: the context for the next agent's connection; None for plain text
        self.server_tls = self._make_server_tls()
        #: the context for the next connection to the admin interface; None for plain text
        self.admin_tls = self._make_admin_tls()
        #: what the admin interface asks for; None: nothing
        self.admin_token = self._make_admin_token()
        self._agent_secret = self._make_agent_secret()
        self._hub_secrets = self._make_hub_secrets()
        self._deny_list = self._make_deny_list()
        if self._faults:
            raise ConfigurationError([f"{config.path}: {fault}" for fault in self._faults])

    def credential(self) -> str | None:
        """What the agent proves itself by at the next call: the shared secret, or its token."""
        if self._agent_secret is not None:
            return self._agent_secret.value.reveal()
        secret = self._config.federation.secret
        return secret.reveal() if secret is not None else None

    def renewals(self) -> int:
        """How often what the agent proves itself by was replaced so far."""
        own = ("federation.secret_file", "federation.tls")
        return sum(item.generation for item in self._items if item.what in own)

    def trusted(self) -> Trusted:
        """What the hub takes for proof now."""
        settings = self._config.hub
        assert settings is not None
        secrets = self._hub_secrets.value if self._hub_secrets is not None else (settings.secret,)
        return Trusted(
            settings.accept,
            tuple(secret.reveal() for secret in secrets if secret is not None),
            self._deny_list.value[0] if self._deny_list is not None else NOBODY,
            settings.tls.cluster_san if settings.tls is not None else None,
        )

    async def keep_fresh(
        self, metrics: FederationMetrics, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Read the files again when they change, and say when certificates run out, until cancelled."""
        for item in self._items:
            metrics.reload_begins(item.what)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(keep_fresh, self._items, reloaded=metrics.reloaded))
            nursery.start_soon(
                partial(watch_expiry, self.certificates, wall_clock=wall_clock, told=metrics.certificate_expires)
            )
            task_status.started()

    # What there is.

    def _item(
        self,
        what: str,
        files: list[str],
        make: Callable[[], _T],
        *,
        changed: Callable[[_T], None] | None = None,
        doubts: Callable[[_T, _T], bool] = lambda _old, _new: False,
        at: str = "",
    ) -> FileBacked[_T] | None:
        """One more value from files, or None with its fault noted, `at` a key."""
        try:
            item = FileBacked(what, files, make, changed=changed, doubts=doubts)
        except ConfigurationError as error:
            self._faults += error.faults
            return None
        except ValueError as error:
            table, _, key = what.partition(".")
            self._faults.append(f"[{table}] {at or key}: {error}")
            return None
        self._items.append(item)
        return item

    def _make_client_tls(self) -> Callable[[], ssl.SSLContext] | None:
        tls = self._config.federation.tls
        if tls is None:
            return None
        files = [file for file in (tls.ca_file, tls.cert_file, tls.key_file) if file is not None]
        make = partial(client_tls, ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file)
        return _value_of(self._item("federation.tls", files, make))

    def _make_server_tls(self) -> Callable[[], ssl.SSLContext] | None:
        tls = self._config.hub.tls if self._config.hub is not None else None
        if self._config.hub is None or tls is None:
            return None
        make = partial(
            server_tls,
            cert_file=tls.cert_file,
            key_file=tls.key_file,
            client_ca_file=tls.client_ca_file,
            client_certificates="optional" if certificates_are_optional(self._config.hub) else "required",
        )
        files = [file for file in (tls.cert_file, tls.key_file, tls.client_ca_file) if file is not None]
        return _value_of(self._item("hub.tls", files, make))

    def _make_admin_tls(self) -> Callable[[], ssl.SSLContext] | None:
        tls = self._config.admin.tls
        if tls is None:
            return None
        make = partial(admin_tls, tls.cert_file, tls.key_file)
        return _value_of(self._item("admin.tls", [tls.cert_file, tls.key_file], make))

    def _make_admin_token(self) -> Callable[[], str] | None:
        admin = self._config.admin
        if admin.token_file is None:
            token = admin.token
            return token.reveal if token is not None else None
        item = self._item("admin.token_file", [admin.token_file], partial(read_admin_token_file, admin.token_file))
        return (lambda: item.value.reveal()) if item is not None else None

    def _make_agent_secret(self) -> FileBacked[Secret] | None:
        file = self._config.federation.secret_file
        if file is None or not self._config.has_agent:
            return None
        make = partial(read_agent_secret_file, file, self._config.cluster_id)
        return self._item("federation.secret_file", [file], make)

    def _make_hub_secrets(self) -> FileBacked[tuple[Secret | None, ...]] | None:
        """Both of a hub's secrets at once, so that one that moves from one file to the other counts all the time."""
        settings = self._config.hub
        if settings is None or (settings.secret_file is None and settings.next_secret_file is None):
            return None
        file, next_file = settings.secret_file, settings.next_secret_file

        def make() -> tuple[Secret | None, ...]:
            # In this order: one that moves from the second to the first between the two is then found twice, not never.
            next_secret = read_next_secret_file(next_file) if next_file is not None else None
            return (read_hub_secret_file(file) if file is not None else settings.secret, next_secret)

        files = [each for each in (file, next_file) if each is not None]

        # Of the first ones, the configuration says so itself.
        known: list[Secret] = []

        def changed(secrets: tuple[Secret | None, ...]) -> None:
            there = [secret for secret in secrets if secret is not None]
            for secret in there if settings.makes_tokens else ():
                weakness = weak_secret(secret)
                if weakness is not None and not same_secret(secret.reveal(), [each.reveal() for each in known]):
                    log.warning("configuration", note=f"a new secret of the hub {weakness}")
            known[:] = there
            self._changed(secrets)

        # What is wrong with the other one was found when the configuration was loaded.
        item = self._item("hub.secrets", files, make, changed=changed, at="next_secret_file")
        known += [secret for secret in (item.value if item is not None else ()) if secret is not None]
        return item

    def _make_deny_list(self) -> FileBacked[_Denied] | None:
        settings = self._config.hub
        if settings is None or (file := settings.deny_file) is None:
            return None

        def changed(denied: _Denied) -> None:
            for fault in denied[1]:
                log.warning("deny_line_ignored", file=file, error=fault)
            self._changed(denied)

        make = partial(read_deny_file, file)
        item = self._item("hub.deny_file", [file], make, changed=changed, doubts=_lets_somebody_in)
        if item is not None:
            # At the start a line that cannot be read is a fault; later the others have to count all the same.
            self._faults += [f"[hub] deny_file: {fault}" for fault in item.value[1]]
        return item

    def _changed(self, _value: object) -> None:
        if self.trusted_changed is not None:
            self.trusted_changed(self.trusted())


def certificates_are_optional(settings: HubSettings) -> bool:
    """Whether agents may come without a certificate although there is an authority for them: where some ways to prove a
    cluster have one, and others have none."""
    with_one = sum("certificate" in way for way in settings.accept)
    return 0 < with_one < len(settings.accept)


def _certificates(config: Config) -> Iterator[tuple[str, str]]:
    """Every file with certificates, by its key."""
    tables = {
        "federation.tls": config.federation.tls,
        "hub.tls": config.hub.tls if config.hub is not None else None,
        "admin.tls": config.admin.tls,
    }
    for name, table in tables.items():
        for key in ("cert_file", "ca_file", "client_ca_file"):
            file = getattr(table, key, None)
            if file is not None:
                yield f"{name}.{key}", file


def _value_of(item: FileBacked[_T] | None) -> Callable[[], _T] | None:
    return (lambda: item.value) if item is not None else None


def _lets_somebody_in(before: _Denied, after: _Denied) -> bool:
    """Whether a deny list no longer denies somebody whom it did, as one does that is just being written."""
    return not (before[0].clusters <= after[0].clusters and before[0].tokens <= after[0].tokens)

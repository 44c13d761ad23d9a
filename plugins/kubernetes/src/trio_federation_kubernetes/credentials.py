"""What requests are signed with: nothing, a fixed token, a token in a file that is read again and again, a name and a
password, or what an exec plugin hands out. Each is an `access.Credential`. Which of them a kubeconfig means is decided
in `kubeconfig.py`; how an answer 401 is dealt with, in `client.py`.

No error here shows a token, a key, a plugin's arguments, or anything that a plugin has written. That includes its
standard error: nothing can be known of it that would rule out a token in it, and a plugin that is asked for more detail
writes the requests that it makes. An error names the command and its exit code, and whoever wants more runs it."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import trio

from trio_federation_kubernetes.errors import CredentialError
from trio_federation_kubernetes.texts import one_line

#: seconds after which a token file is read again, in spite of no refusal; client-go waits 50. The kubelet has replaced
#: a pod's token long before the old one expires, and reading some kilobytes costs next to nothing.
REREAD_AFTER = 10.0
#: bytes above which a file holds no token
MOST_TOKEN_BYTES = 1 << 16
#: bytes above which what a plugin writes is no credential
MOST_PLUGIN_BYTES = 1 << 20
#: seconds that a plugin may run
PLUGIN_DEADLINE = 60.0
#: seconds before its expiry at which a plugin's credential is renewed; a tenth of its life where that is less
RENEW_BEFORE = 30.0
#: seconds between the end of one run of a plugin and the next at the earliest. A plugin is a process, often with a
#: network request of its own: many requests that fail together must not start many.
REST_BETWEEN_RUNS = 5.0
#: seconds that a killed plugin is waited for
_KILL_PATIENCE = 5.0
#: characters of an install hint that are shown
_MOST_HINT = 300

#: Runs a command, given its arguments and whole environment, and returns what it wrote. Raises CredentialError with a
#: text that starts with a verb: "failed with …".
Run = Callable[[Sequence[str], Mapping[str, str]], Awaitable[bytes]]


class NotFoundError(CredentialError):
    """A plugin's command does not exist, so that its install hint is of use."""


def bearer(token: str, place: str) -> str:
    """The Authorization header of a token. `place` names where it comes from, for the error.

    Raises CredentialError, without the token, where it is empty or cannot stand in a header."""
    if not token:
        raise CredentialError(f"{place}: the token is empty; put one there")
    # More than RFC 6750 allows and less than HTTP: a blank would end the token at the server.
    if not all("!" <= character <= "~" for character in token):
        raise CredentialError(
            f"{place}: the token has characters that cannot be sent, such as a blank, a line break or a letter outside "
            "of ASCII; put exactly the token there"
        )
    return f"Bearer {token}"


@dataclass(frozen=True, slots=True)
class NoCredential:
    """Requests go unsigned, or the certificate of the connection is all there is."""

    async def authorization(self) -> str | None:
        """None."""
        return None

    async def client_certificate(self) -> tuple[bytes, bytes] | None:
        """None."""
        return None

    def refused(self) -> None:
        """Changes nothing."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A header that never changes; `Fixed.token` and `Fixed.basic` make one."""

    header: str = field(repr=False)

    @classmethod
    def token(cls, token: str, place: str) -> Fixed:
        """For a token. Raises CredentialError as `bearer` does."""
        return cls(bearer(token, place))

    @classmethod
    def basic(cls, username: str, password: str, place: str) -> Fixed:
        """For a name and a password. Raises CredentialError where the name has a colon, which would end it."""
        if ":" in username:
            raise CredentialError(f"{place}: a user name with a colon cannot be sent; use a token instead")
        return cls("Basic " + base64.b64encode(f"{username}:{password}".encode()).decode())

    async def authorization(self) -> str | None:
        """The header."""
        return self.header

    async def client_certificate(self) -> tuple[bytes, bytes] | None:
        """None."""
        return None

    def refused(self) -> None:
        """Changes nothing: there is no other."""


class TokenFile:
    """A token that somebody else replaces from time to time, as the kubelet does that of a pod. It is read anew when
    the last reading is `REREAD_AFTER` seconds old, and after a refusal at once. While it cannot be read the token from
    the last time goes on, unless it has been refused."""

    def __init__(self, path: Path, *, clock: Callable[[], float], otherwise: str | None = None) -> None:
        """`clock`: seconds that only go forward. `otherwise`: the header to use where there is no token from the
        file, neither now nor from before."""
        self._path = path
        self._clock = clock
        self._otherwise = otherwise
        self._header: str | None = None
        self._read_at = 0.0

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r})"

    async def authorization(self) -> str | None:
        """The header. Raises CredentialError where the file cannot be read, is empty, or holds what is no token."""
        now = self._clock()
        if self._header is None or now - self._read_at >= REREAD_AFTER:
            try:
                self._header = bearer(self._read(), str(self._path))
            except CredentialError:
                if self._header is not None:
                    return self._header
                if self._otherwise is not None:
                    return self._otherwise
                raise
            self._read_at = now
        return self._header

    async def client_certificate(self) -> tuple[bytes, bytes] | None:
        """None."""
        return None

    def refused(self) -> None:
        """Drops the token, so that the next call reads the file."""
        self._header = None

    def _read(self) -> str:
        # Not in a thread: a few kilobytes of a local file, for the most part from memory.
        try:
            with self._path.open("rb") as file:
                content = file.read(MOST_TOKEN_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: for a path that none can be
            why = getattr(error, "strerror", None) or "no path"
            raise CredentialError(
                f"{self._path}: the token cannot be read ({why}); put it there, and make it readable"
            ) from error
        if len(content) > MOST_TOKEN_BYTES:
            raise CredentialError(f"{self._path}: more than {MOST_TOKEN_BYTES} bytes are no token; put just one there")
        # Latin-1 never fails. Whatever is no ASCII is found by `bearer`, which does not show it.
        return content.decode("latin-1").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A command that hands out credentials, by the protocol of client.authentication.k8s.io, v1 or v1beta1."""

    #: where it is told of, for errors: "/home/ana/.kube/config: users[ana].exec"
    place: str
    #: a path, or a name to be looked up in the environment's PATH
    command: str
    arguments: tuple[str, ...] = field(default=(), repr=False)
    #: all of its environment, but for KUBERNETES_EXEC_INFO
    environment: Mapping[str, str] = field(repr=False)
    #: "client.authentication.k8s.io/v1" or "…/v1beta1"
    api_version: str
    #: what the kubeconfig tells people that lack the command
    install_hint: str = ""
    #: what it is told about the cluster; None: nothing
    cluster: ClusterInfo | None = field(default=None, repr=False)


class ClusterInfo(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", omit_defaults=True):
    """What a plugin with `provideClusterInfo` is told, as in a kubeconfig."""

    server: str
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    certificate_authority_data: bytes = b""
    proxy_url: str = ""
    disable_compression: bool = False
    #: the cluster entry's extension "client.authentication.k8s.io/exec", whatever it is
    config: msgspec.Raw = msgspec.Raw(b"null")


class _Spec(msgspec.Struct, frozen=True, kw_only=True):
    cluster: ClusterInfo | msgspec.UnsetType = msgspec.UNSET
    interactive: bool = False


class _Question(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    kind: str = "ExecCredential"
    api_version: str
    spec: _Spec


class _Status(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None

    def __repr__(self) -> str:
        return "_Status(…)"


class _Reply(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    kind: str = ""
    api_version: str = ""
    status: _Status | None = None


@dataclass(frozen=True, slots=True)
class _Given:
    """What a run of a plugin has come to."""

    header: str | None = field(repr=False)
    certificate: tuple[bytes, bytes] | None = field(repr=False)
    #: Unix seconds; None: never
    expires_at: float | None
    #: Unix seconds from which on a new one should be had; None: never
    renew_at: float | None


def question(plugin: Plugin) -> str:
    """What KUBERNETES_EXEC_INFO says to a plugin: JSON."""
    spec = _Spec() if plugin.cluster is None else _Spec(cluster=plugin.cluster)
    return msgspec.json.encode(_Question(api_version=plugin.api_version, spec=spec)).decode()


class ExecPlugin:
    """What a plugin hands out, kept until it is about to expire, or is refused. However many ask at once, one process
    runs at a time, and all of them get what it says. When that fails, those who ask within the next
    `REST_BETWEEN_RUNS` seconds get the same error, or, as long as it is valid, the credential from before."""

    def __init__(
        self,
        plugin: Plugin,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        run: Run | None = None,
        deadline: float = PLUGIN_DEADLINE,
    ) -> None:
        """`clock`: seconds that only go forward. `wall`: Unix seconds, used for the expiry alone, which a plugin tells
        as a time of day; read anew at each call, as it may become better known. `run`: how the command is run.
        `deadline`: seconds that it may take."""
        #: what it runs
        self.plugin = plugin
        self._clock = clock
        self._wall = wall
        self._run = run_command if run is None else run
        self._deadline = deadline
        self._lock = trio.Lock()
        self._given: _Given | None = None
        self._failure: CredentialError | None = None
        self._refused = False
        self._ended_at = 0.0

    def __repr__(self) -> str:
        return f"ExecPlugin({self.plugin!r})"

    async def authorization(self) -> str | None:
        """The header of the plugin's token, None where it gives a certificate only. Raises CredentialError."""
        return (await self._credential()).header

    async def client_certificate(self) -> tuple[bytes, bytes] | None:
        """The certificate chain and key that the plugin gives, as PEM; None where it gives a token only. Raises
        CredentialError."""
        return (await self._credential()).certificate

    def refused(self) -> None:
        """The plugin runs again at the next call, but for a credential that is younger than `REST_BETWEEN_RUNS`: of
        many requests under way with the old one, only the first refusal leads to a run, and a server that refuses every
        credential leads to no stream of processes."""
        if self._given is not None:
            self._refused = True

    async def _credential(self) -> _Given:
        if self._given is not None and not self._is_due(self._given):
            return self._given
        # Not a common task that all wait for, but one after the other: the first one's cancellation is then its own
        # matter alone, and the next runs the plugin instead.
        async with self._lock:
            if self._given is not None and not self._is_due(self._given):
                return self._given
            if self._failure is not None and self._clock() - self._ended_at < REST_BETWEEN_RUNS:
                return self._despite(self._failure)
            try:
                given = await self._ask()
            except CredentialError as error:
                self._failure = error
                self._ended_at = self._clock()
                return self._despite(error)
            self._failure = None
            self._refused = False
            self._ended_at = self._clock()
            self._given = given
            return given

    def _is_due(self, given: _Given) -> bool:
        """Whether a new credential should be had in place of this one."""
        if self._clock() - self._ended_at < REST_BETWEEN_RUNS and self._failure is None:
            return False
        return self._refused or (given.renew_at is not None and self._wall() >= given.renew_at)

    def _despite(self, failure: CredentialError) -> _Given:
        """The credential from before, if it still is one; else raises."""
        given = self._given
        if given is None or self._refused or (given.expires_at is not None and self._wall() >= given.expires_at):
            # A new one each time, as a raised error keeps the traceback of whom it was raised for.
            raise type(failure)(*failure.args) from failure.__cause__
        return given

    async def _ask(self) -> _Given:
        plugin = self.plugin
        environment = {**plugin.environment, "KUBERNETES_EXEC_INFO": question(plugin)}
        try:
            with trio.move_on_after(self._deadline) as scope:
                output = await self._run((plugin.command, *plugin.arguments), environment)
            if scope.cancelled_caught:
                raise CredentialError(f"was stopped after {self._deadline:g} seconds without an end")
        except CredentialError as error:
            raise CredentialError(self._explained(error)) from error.__cause__
        return self._understood(output)

    def _explained(self, error: CredentialError) -> str:
        plugin = self.plugin
        text = f"{plugin.place}: the plugin {plugin.command} {error}"
        if not isinstance(error, NotFoundError):
            # The arguments may hold a secret; whoever may see them finds them at the place.
            text += "; run it by hand, as it may have written why: that is not shown here, as it could hold a secret"
        if plugin.install_hint:
            text += f"; hint of the kubeconfig: {one_line(plugin.install_hint, _MOST_HINT)}"
        return text

    def _understood(self, output: bytes) -> _Given:
        plugin = self.plugin
        place = f"{plugin.place}: the plugin {plugin.command}"
        try:
            reply = msgspec.json.decode(output, type=_Reply)
        except msgspec.MsgspecError as error:
            # msgspec's texts name a path or a byte, and show no value.
            raise CredentialError(f"{place} wrote no ExecCredential ({error}); it must write JSON only") from error
        if reply.kind != "ExecCredential" or reply.api_version != plugin.api_version:
            raise CredentialError(
                f"{place} wrote another kind or apiVersion than ExecCredential of {plugin.api_version}; give the "
                "version that it speaks in the kubeconfig, or update the plugin"
            )
        status = reply.status or _Status()
        certificate, key = status.client_certificate_data, status.client_key_data
        if bool(certificate) != bool(key):
            raise CredentialError(f"{place} gave a certificate without its key, or a key alone; it must give both")
        if not status.token and not certificate:
            raise CredentialError(f"{place} gave neither a token nor a certificate; run it by hand to see why")
        header = bearer(status.token, place) if status.token else None
        pair = (certificate.encode(), key.encode()) if certificate and key else None
        if status.expiration_timestamp is None:
            return _Given(header, pair, None, None)
        expires_at = status.expiration_timestamp.timestamp()
        # With a plugin that gives short-lived credentials a fixed margin would make each one due as soon as it comes.
        margin = min(RENEW_BEFORE, max(0.0, expires_at - self._wall()) / 10)
        return _Given(header, pair, expires_at, expires_at - margin)


async def run_command(arguments: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Runs a command, without a shell, without input, its errors thrown away, and returns what it wrote: `Run`.

    The command leads a process group of its own, which is killed as a whole when this is cancelled, or it writes too
    much: plugins are often scripts, and what a script waits for would outlive it. Raises CredentialError where it
    cannot be run, fails, or writes more than `MOST_PLUGIN_BYTES`."""
    command, *rest = arguments
    path = _located(command, environment)
    # Not `trio.run_process`, which keeps all that is written, without a bound.
    try:
        process = await trio.lowlevel.open_process(
            [path, *rest],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise NotFoundError("is not there, or names an interpreter that is not there; install it") from error
    except OSError as error:
        raise CredentialError(f"cannot be run ({error.strerror})") from error
    except ValueError as error:
        # A zero byte, or a variable's name that cannot be one. The text is Python's own and shows nothing of it.
        raise CredentialError("cannot be run (its arguments or its environment cannot be handed over)") from error
    try:
        output = await _read_all(process)
        await process.wait()
    except BaseException:
        _kill(process.pid)
        with trio.move_on_after(_KILL_PATIENCE, shield=True):
            await process.wait()
        raise
    code = process.returncode
    if code:
        raise CredentialError(
            f"failed with exit code {code}" if code > 0 else f"was ended by signal {_signal_name(-code)}"
        )
    return output


async def _read_all(process: trio.Process) -> bytes:
    assert process.stdout is not None
    output = bytearray()
    async with process.stdout:
        async for chunk in process.stdout:
            output += chunk
            if len(output) > MOST_PLUGIN_BYTES:
                raise CredentialError(f"was stopped, as it wrote more than {MOST_PLUGIN_BYTES} bytes")
    return bytes(output)


def _located(command: str, environment: Mapping[str, str]) -> str:
    """The path of a command. Folders of PATH that depend on where we are do not count, as in Go: what runs here is
    handed the keys to a cluster."""
    if os.sep in command:
        return command
    folders = [folder for folder in environment.get("PATH", "").split(os.pathsep) if os.path.isabs(folder)]
    path = shutil.which(command, path=os.pathsep.join(folders)) if folders else None
    if path is None:
        raise NotFoundError("is not in PATH; install it, or give its whole path in the kubeconfig")
    return path


def _kill(group: int) -> None:
    # Its leader has not been waited for, so the number cannot have become another's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)

"""What requests are signed with: token files that are replaced, and exec plugins, which are real scripts here wherever
time does not matter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from trio_federation_kubernetes.credentials import (
    MOST_PLUGIN_BYTES,
    MOST_TOKEN_BYTES,
    REREAD_AFTER,
    REST_BETWEEN_RUNS,
    ExecPlugin,
    Fixed,
    NoCredential,
    Plugin,
    TokenFile,
    bearer,
)
from trio_federation_kubernetes.errors import CredentialError

V1 = "client.authentication.k8s.io/v1"
V1BETA1 = "client.authentication.k8s.io/v1beta1"


class Time:
    """A clock that a test sets; monotonic and wall clock at once, some years apart."""

    EPOCH = 1_900_000_000.0

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.EPOCH + self.now


async def fault(call: Callable[[], Awaitable[object]]) -> str:
    """The text of the error; it is one line."""
    with pytest.raises(CredentialError) as caught:
        await call()
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- Those that never change.


async def test_nothing_is_nothing() -> None:
    credential = NoCredential()
    assert await credential.authorization() is None
    assert await credential.client_certificate() is None
    credential.refused()


async def test_fixed_ones_stay_and_do_not_show() -> None:
    for credential, header in (
        (Fixed.token("hunter2", "here"), "Bearer hunter2"),
        (Fixed.basic("Aladdin", "open sesame", "here"), "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="),
    ):
        assert await credential.authorization() == header
        credential.refused()
        assert await credential.authorization() == header
        assert await credential.client_certificate() is None
        assert header not in repr(credential)


@given(st.text())
def test_a_token_is_sent_as_it_is_or_not_at_all(token: str) -> None:
    if token and all("!" <= character <= "~" for character in token):
        assert bearer(token, "here") == f"Bearer {token}"
    else:
        with pytest.raises(CredentialError, match=r"^here: ") as caught:
            bearer(f"hunter2{token}hunter2" if token else "", "here")
        assert "hunter2" not in str(caught.value)


# --- Token files.


async def test_a_token_file_is_read_again_after_a_while(tmp_path: Path) -> None:
    time, file = Time(), tmp_path / "token"
    credential = TokenFile(file, clock=time.clock)
    file.write_text("  one\r\n")
    assert await credential.authorization() == "Bearer one"
    file.write_text("two")
    time.now += REREAD_AFTER - 0.001
    assert await credential.authorization() == "Bearer one"
    time.now += 0.001
    assert await credential.authorization() == "Bearer two"
    assert await credential.client_certificate() is None


async def test_a_refused_token_is_read_again_at_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    credential = TokenFile(file, clock=Time().clock)
    file.write_text("one")
    assert await credential.authorization() == "Bearer one"
    # As the kubelet does it: a link is moved to another folder.
    other = tmp_path / "other"
    other.write_text("two")
    file.unlink()
    file.symlink_to(other)
    credential.refused()
    assert await credential.authorization() == "Bearer two"


async def test_a_token_outlives_its_file_until_it_is_refused(tmp_path: Path) -> None:
    time, file = Time(), tmp_path / "token"
    credential = TokenFile(file, clock=time.clock)
    file.write_text("one")
    assert await credential.authorization() == "Bearer one"
    for broken in (b"", b"\n", b"a b", b"\xff", None):
        if broken is None:
            file.unlink()
        else:
            file.write_bytes(broken)
        time.now += 2 * REREAD_AFTER
        assert await credential.authorization() == "Bearer one"
    credential.refused()
    assert (await fault(credential.authorization)).startswith(f"{file}: the token cannot be read (No such file")
    file.write_text("two")
    assert await credential.authorization() == "Bearer two"


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, "the token cannot be read (No such file"),
        (b"", "the token is empty"),
        (b" \n\t", "the token is empty"),
        (b"hunter2 hunter2", "the token has characters that cannot be sent"),
        (b"hunter2\nhunter2", "the token has characters that cannot be sent"),
        (b"hunter2\xe9", "the token has characters that cannot be sent"),
        (b"hunter2\x00", "the token has characters that cannot be sent"),
        (b"hunter2" * MOST_TOKEN_BYTES, f"more than {MOST_TOKEN_BYTES} bytes are no token"),
    ],
)
async def test_what_is_no_token_is_named_and_not_shown(tmp_path: Path, content: bytes | None, expected: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    text = await fault(TokenFile(file, clock=Time().clock).authorization)
    assert text.startswith(f"{file}: {expected}")
    assert "hunter2" not in text
    # Where the kubeconfig has a token as well, that is used meanwhile.
    assert await TokenFile(file, clock=Time().clock, otherwise="Bearer x").authorization() == "Bearer x"


# --- Plugins, really run.


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\nset -eu\n{text}\n")
    path.chmod(0o755)
    return path


def reply(api_version: str = V1, **status: str | None) -> str:
    return json.dumps({"kind": "ExecCredential", "apiVersion": api_version, "status": status})


def plugin(command: Path | str, *arguments: str, **more: Any) -> Plugin:
    environment = {"PATH": os.environ["PATH"], **more.pop("environment", {})}
    return Plugin(
        place="/k: users[ana].exec",
        command=str(command),
        arguments=arguments,
        environment=environment,
        **{"api_version": V1, **more},
    )


def exec_plugin(command: Path | str, *arguments: str, time: Time | None = None, **more: Any) -> ExecPlugin:
    time = time or Time()
    return ExecPlugin(plugin(command, *arguments, **more), clock=time.clock, wall=time.wall)


def counting(tmp_path: Path, output: str) -> tuple[Path, Callable[[], int]]:
    """A plugin that writes `output`, and how often it has run."""
    runs = tmp_path / "runs"
    command = script(tmp_path / "plugin", f"echo run >> {runs}\ncat <<'END'\n{output}\nEND")
    return command, lambda: len(runs.read_text().splitlines()) if runs.exists() else 0


@pytest.mark.parametrize("api_version", [V1, V1BETA1])
async def test_a_token_of_a_plugin(tmp_path: Path, api_version: str) -> None:
    command, runs = counting(tmp_path, reply(api_version, token="abc"))
    credential = exec_plugin(command, api_version=api_version)
    assert await credential.authorization() == "Bearer abc"
    assert await credential.authorization() == "Bearer abc"
    assert await credential.client_certificate() is None
    assert runs() == 1
    assert "abc" not in repr(vars(credential))


async def test_a_certificate_of_a_plugin(tmp_path: Path) -> None:
    command, runs = counting(tmp_path, reply(clientCertificateData="cert\n", clientKeyData="key\n", token=None))
    credential = exec_plugin(command)
    assert await credential.client_certificate() == (b"cert\n", b"key\n")
    assert await credential.authorization() is None
    assert runs() == 1


async def test_a_plugin_in_another_language(tmp_path: Path) -> None:
    command = tmp_path / "plugin"
    command.write_text(f"#!{sys.executable}\nprint('''{reply(token='abc')}''')\n")
    command.chmod(0o755)
    assert await exec_plugin(command).authorization() == "Bearer abc"


@pytest.fixture
def typed() -> Iterator[None]:
    """Something stands in our own standard input."""
    kept = os.dup(0)
    reading, writing = os.pipe()
    os.write(writing, b"typed by somebody\n")
    os.dup2(reading, 0)
    try:
        for descriptor in (reading, writing):
            os.close(descriptor)
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)


async def test_what_a_plugin_sees(tmp_path: Path, capfd: pytest.CaptureFixture[str], typed: None) -> None:
    """No shell reads its arguments, its environment is the given one, there is nothing to read, and what it writes to
    standard error goes nowhere."""
    seen = tmp_path / "seen"
    command = script(
        tmp_path / "plugin",
        f'{{ printf "%s|" "$@"; echo "$FOO"; echo "$KUBERNETES_EXEC_INFO"; cat; env; }} > {seen}\n'
        f"echo noise >&2\necho '{reply(token='abc')}'",
    )
    credential = exec_plugin(command, "a b", "$(c)", "", environment={"FOO": "bar"})
    assert await credential.authorization() == "Bearer abc"
    assert capfd.readouterr() == ("", "")
    arguments, question, *rest = seen.read_text().splitlines()
    assert arguments == "a b|$(c)||bar"
    assert json.loads(question) == {"kind": "ExecCredential", "apiVersion": V1, "spec": {"interactive": False}}
    names = {line.partition("=")[0] for line in rest}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {"PATH", "FOO", "KUBERNETES_EXEC_INFO"}


async def test_a_plugin_is_found_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "some-plugin", f"echo '{reply(token='abc')}'")
    where = f"relative:{tmp_path}/bin:{os.environ['PATH']}"
    assert await exec_plugin("some-plugin", environment={"PATH": where}).authorization() == "Bearer abc"
    # But never in the folder where we happen to be.
    monkeypatch.chdir(tmp_path / "bin")
    for path in ("", ":", ".", "../bin"):
        text = await fault(exec_plugin("some-plugin", environment={"PATH": path}).authorization)
        assert text == (
            "/k: users[ana].exec: the plugin some-plugin is not in PATH; install it, or give its whole path in the "
            "kubeconfig"
        )


async def test_a_hint_helps_those_without_the_command(tmp_path: Path) -> None:
    hint = "get it\n at \x1b[31mhttps://x\n" + "y" * 1000
    text = await fault(exec_plugin("no-such-plugin", install_hint=hint).authorization)
    assert "is not in PATH; install it" in text
    assert "; hint of the kubeconfig: get it at [31mhttps://x yyy" in text
    assert text.isprintable()
    assert len(text) < 600
    text = await fault(exec_plugin(tmp_path / "missing", install_hint="get it").authorization)
    assert text.startswith(f"/k: users[ana].exec: the plugin {tmp_path}/missing is not there")
    assert text.endswith("; hint of the kubeconfig: get it")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("exit 3", "failed with exit code 3; run it by hand"),
        ("kill -TERM $$", "was ended by signal SIGTERM; run it by hand"),
        ("", "wrote no ExecCredential"),
        ("echo hunter2", "wrote no ExecCredential"),
        ("printf '\\377'", "wrote no ExecCredential"),
        ("echo '[]'", "wrote no ExecCredential"),
        ("echo '{}'", "wrote another kind or apiVersion than ExecCredential of"),
        (f"echo '{reply(V1BETA1, token='hunter2')}'", "wrote another kind or apiVersion than ExecCredential of"),
        ("""echo '{"kind":"hunter2","apiVersion":"client.authentication.k8s.io/v1"}'""", "wrote another kind or"),
        (f"echo '{reply()}'", "gave neither a token nor a certificate"),
        (f"echo '{reply(token='')}'", "gave neither a token nor a certificate"),
        (f"echo '{json.dumps({'kind': 'ExecCredential', 'apiVersion': V1, 'status': None})}'", "gave neither"),
        (f"echo '{reply(token='hunter2', clientKeyData='hunter2')}'", "gave a certificate without its key, or a key"),
        (f"echo '{reply(clientCertificateData='hunter2')}'", "gave a certificate without its key, or a key"),
        (f"echo '{reply(token='hunter2 hunter2')}'", ": the token has characters that cannot be sent"),
        (f"echo '{reply(token='hunter2', expirationTimestamp='hunter2')}'", "wrote no ExecCredential"),
        (f"echo '{reply(token='hunter2', expirationTimestamp='2030-01-01T00:00:00')}'", "wrote no ExecCredential"),
        ("""echo '{"kind":"ExecCredential","status":{"token":5}}'""", "wrote no ExecCredential"),
    ],
)
async def test_what_a_plugin_does_wrong_is_told_without_what_it_wrote(tmp_path: Path, text: str, expected: str) -> None:
    command = script(tmp_path / "plugin", f"echo hunter2 >&2\n{text}")
    said = await fault(exec_plugin(command, "--secret", "hunter2", environment={"X": "hunter2"}).authorization)
    assert said.startswith(f"/k: users[ana].exec: the plugin {command}")
    assert expected in said
    assert "hunter2" not in said


async def test_commands_that_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    assert "cannot be run (Permission denied)" in await fault(exec_plugin(tmp_path / "plain").authorization)
    (tmp_path / "plain").chmod(0o755)
    assert "cannot be run (Exec format error)" in await fault(exec_plugin(tmp_path / "plain").authorization)
    text = await fault(exec_plugin(script(tmp_path / "plugin", ""), "hunter2\0").authorization)
    assert "cannot be run (its arguments or its environment cannot be handed over)" in text
    assert "hunter2" not in text
    text = await fault(exec_plugin(tmp_path / "plugin", environment={"a=hunter2": ""}).authorization)
    assert "hunter2" not in text


async def test_a_plugin_that_writes_without_end_is_stopped(tmp_path: Path) -> None:
    command = script(tmp_path / "plugin", "exec cat /dev/zero")
    with trio.fail_after(30):
        text = await fault(exec_plugin(command).authorization)
    assert f"was stopped, as it wrote more than {MOST_PLUGIN_BYTES} bytes" in text


async def test_a_large_answer_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "answer").write_text(reply(token="a" * 500_000))
    header = await exec_plugin(script(tmp_path / "plugin", f"cat {tmp_path}/answer")).authorization()
    assert header == "Bearer " + "a" * 500_000


async def read_to_end(descriptor: int) -> bytes:
    """What comes until every process that holds the other end has gone."""
    content = b""
    while True:
        await trio.lowlevel.wait_readable(descriptor)
        chunk = os.read(descriptor, 1000)
        if not chunk:
            return content
        content += chunk


@pytest.mark.parametrize("ended_by", ["cancellation", "deadline"])
async def test_no_process_outlives_a_run_that_is_given_up(tmp_path: Path, ended_by: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        # The script waits for a child that ignores polite signals; both hold the other end open.
        command = script(tmp_path / "plugin", f"exec 3> {fifo}\necho up >&3\n(trap '' TERM HUP INT; sleep 1000)\n")
        time = Time()
        limit = 1.0 if ended_by == "deadline" else 60.0
        credential = ExecPlugin(plugin(command), clock=time.clock, wall=time.wall, deadline=limit)
        with trio.fail_after(30):
            if ended_by == "deadline":
                assert "was stopped after 1 seconds" in await fault(credential.authorization)
            else:
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(credential.authorization)
                        await trio.lowlevel.wait_readable(descriptor)
                        scope.cancel()
            assert await read_to_end(descriptor) == b"up\n"
    finally:
        os.close(descriptor)


async def test_those_who_ask_at_once_share_one_run(tmp_path: Path) -> None:
    command, runs = counting(tmp_path, reply(token="abc"))
    credential = exec_plugin(command)
    headers = []

    async def ask() -> None:
        headers.append(await credential.authorization())

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(ask)
            nursery.start_soon(credential.client_certificate)
    assert headers == ["Bearer abc"] * 50
    assert runs() == 1


async def test_those_who_ask_at_once_share_one_failure(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    time = Time()
    credential = exec_plugin(script(tmp_path / "plugin", f"echo run >> {runs}\nexit 1"), time=time)
    texts = set()

    async def ask() -> None:
        texts.add(await fault(credential.authorization))

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(ask)
    assert len(texts) == 1
    assert runs.read_text() == "run\n"
    # It is no failure for good.
    time.now += REST_BETWEEN_RUNS
    await ask()
    assert runs.read_text() == "run\nrun\n"
    assert len(texts) == 1


# --- When plugins run: the time is a test's own, and so is the plugin.


class Runs:
    """Stands in for the command: hands out the tokens "1", "2" … with a given life, or fails."""

    def __init__(self, time: Time, life: float | None = None) -> None:
        self.time = time
        self.life = life
        self.count = 0
        self.fails = False
        self.takes = 0.0

    async def __call__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> bytes:
        self.count += 1
        await trio.sleep(self.takes)
        if self.fails:
            raise CredentialError("failed with exit code 1")
        status = {"token": str(self.count)}
        if self.life is not None:
            status["expirationTimestamp"] = datetime.fromtimestamp(self.time.wall() + self.life, UTC).isoformat()
        return reply(**status).encode()

    def credential(self, deadline: float = 60.0) -> ExecPlugin:
        time = self.time
        return ExecPlugin(plugin("plugin"), clock=time.clock, wall=time.wall, run=self, deadline=deadline)


async def test_a_credential_is_renewed_a_little_before_it_expires() -> None:
    time = Time()
    runs = Runs(time, life=3600)
    credential = runs.credential()
    assert await credential.authorization() == "Bearer 1"
    time.now += 3569
    assert await credential.authorization() == "Bearer 1"
    time.now += 1
    assert await credential.authorization() == "Bearer 2"
    assert runs.count == 2


async def test_a_credential_without_expiry_stays() -> None:
    time = Time()
    credential = Runs(time).credential()
    assert await credential.authorization() == "Bearer 1"
    time.now += 1e9
    assert await credential.authorization() == "Bearer 1"


@pytest.mark.parametrize("life", [-3600.0, 0.0, 1.0, 20.0])
async def test_credentials_of_a_short_life_start_no_stream_of_processes(life: float) -> None:
    """Also when they have expired as they come, be it that our idea of the time of day is wrong."""
    time = Time()
    runs = Runs(time, life)
    credential = runs.credential()
    for _ in range(1000):
        assert await credential.authorization() == f"Bearer {runs.count}"
        time.now += 0.1
    assert runs.count <= 100 / max(REST_BETWEEN_RUNS, life * 0.9) + 1


async def test_a_better_idea_of_the_time_of_day_counts_at_once() -> None:
    time = Time()
    runs = Runs(time, life=3600)
    away = 0.0
    credential = ExecPlugin(plugin("plugin"), clock=time.clock, wall=lambda: time.wall() + away, run=runs)
    assert await credential.authorization() == "Bearer 1"
    time.now += 10
    away = 3600.0
    assert await credential.authorization() == "Bearer 2"


async def test_a_refused_credential_is_replaced_but_not_at_any_rate() -> None:
    time = Time()
    runs = Runs(time, life=3600)
    credential = runs.credential()
    credential.refused()
    assert await credential.authorization() == "Bearer 1"
    time.now += 60
    # Many requests with the old one are refused, some of them when there is a new one already.
    credential.refused()
    credential.refused()
    assert await credential.authorization() == "Bearer 2"
    credential.refused()
    assert await credential.authorization() == "Bearer 2"
    time.now += REST_BETWEEN_RUNS
    assert await credential.authorization() == "Bearer 3"
    time.now += 60
    assert await credential.authorization() == "Bearer 3"


async def test_a_failure_costs_nothing_while_the_credential_is_valid() -> None:
    time = Time()
    runs = Runs(time, life=3600)
    credential = runs.credential()
    assert await credential.authorization() == "Bearer 1"
    runs.fails = True
    time.now += 3580
    assert await credential.authorization() == "Bearer 1"
    assert await credential.authorization() == "Bearer 1"
    assert runs.count == 2
    time.now += 20
    assert "failed with exit code 1" in await fault(credential.authorization)
    runs.fails = False
    # The other failure is older than that, and the process has had its rest.
    time.now += REST_BETWEEN_RUNS
    assert await credential.authorization() == "Bearer 4"


async def test_a_failure_after_a_refusal_is_one() -> None:
    time = Time()
    runs = Runs(time, life=3600)
    credential = runs.credential()
    assert await credential.authorization() == "Bearer 1"
    time.now += 60
    runs.fails = True
    credential.refused()
    assert "failed with exit code 1" in await fault(credential.authorization)
    assert "failed with exit code 1" in await fault(credential.authorization)
    assert runs.count == 2


async def test_a_plugin_has_a_deadline(autojump_clock: MockClock) -> None:
    runs = Runs(Time())
    runs.takes = float("inf")
    began = trio.current_time()
    text = await fault(runs.credential(deadline=45).authorization)
    assert "the plugin plugin was stopped after 45 seconds without an end; run it by hand" in text
    assert trio.current_time() - began == pytest.approx(45)


async def test_whoever_is_cancelled_takes_nobody_along(autojump_clock: MockClock) -> None:
    runs = Runs(Time())
    runs.takes = 10.0
    credential = runs.credential()
    headers = []

    async def ask() -> None:
        headers.append(await credential.authorization())

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as first:
                first.start_soon(ask)
                await trio.sleep(1)
                nursery.start_soon(ask)
                nursery.start_soon(ask)
                await trio.sleep(1)
                scope.cancel()
    assert headers == ["Bearer 2", "Bearer 2"]


@given(
    life=st.one_of(st.none(), st.floats(-10, 200)),
    steps=st.lists(st.tuples(st.floats(0, 60), st.sampled_from(["ask", "refuse", "break", "mend"])), max_size=40),
)
def test_rules_that_hold_in_any_order_of_events(life: float | None, steps: list[tuple[float, str]]) -> None:
    """Two runs are never closer than their rest; a credential that is valid and not refused is always had."""

    async def play() -> None:
        time = Time()
        runs = Runs(time, life)
        credential = runs.credential()
        started: list[float] = []
        given_at: float | None = None
        refused = False
        for pause, event in steps:
            time.now += pause
            if event == "refuse":
                credential.refused()
                refused = given_at is not None
            elif event in ("break", "mend"):
                runs.fails = event == "break"
            else:
                before = runs.count
                try:
                    header = await credential.authorization()
                except CredentialError:
                    # A moment less, as a time of day is written to the microsecond.
                    valid = given_at is not None and (life is None or time.now < given_at + life - 0.001)
                    assert refused or not valid
                else:
                    assert header is not None
                    if runs.count > before and not runs.fails:
                        given_at, refused = time.now, False
                        assert header == f"Bearer {runs.count}"
                if runs.count > before:
                    assert runs.count == before + 1
                    assert not started or time.now - started[-1] >= REST_BETWEEN_RUNS
                    started.append(time.now)

    trio.run(play)

"""Completion by the shell: the scripts, the answers that they ask for, and a real shell that uses both."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.process.running import COMMAND, PATIENCE, environment
from trio_federation.cli.main import COMMANDS

SHELLS = ("bash", "zsh", "fish")

PLACE_OPTIONS = ("group", "not-these", "id", "url", "token-file", "ca-file", "timeout", "json", "help")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts(shell: str, call: Call) -> None:
    ended = call("completion", shell)
    assert ended.code == 0
    assert f"_TRIO_FEDERATION_COMPLETE={shell}_complete" in ended.output
    assert "trio-federation" in ended.output
    if program := shutil.which(shell):
        checked = subprocess.run([program, "-n"], input=ended.output, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_help_tells_how_to_install_them(call: Call) -> None:
    text = call("completion", "--help").output
    for words in ("~/.bashrc", "~/.zshrc", "~/.config/fish/completions/trio-federation.fish"):
        assert words in text
    for shell in SHELLS:
        assert f"trio-federation completion {shell}" in text


@pytest.mark.parametrize("arguments, words", [([], "Missing argument"), (["csh"], "'csh' is not one of 'bash', 'zsh'")])
def test_bad_usage(arguments: list[str], words: str, call: Call) -> None:
    ended = call("completion", *arguments)
    assert (ended.code, ended.output) == (2, "")
    assert words in "\n".join(ended.lines)


def completed(line: str, call: Call, monkeypatch: pytest.MonkeyPatch, of: str = "bash") -> list[str]:
    """The answer to the script of a shell, for the last word of a line."""
    words = line.split(" ")
    monkeypatch.setenv("_TRIO_FEDERATION_COMPLETE", f"{of}_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", words[-1] if of == "fish" else str(len(words) - 1))
    ended = call()
    assert (ended.code, ended.lines) == (0, [])
    return ended.output.splitlines()


@pytest.mark.parametrize(
    "line, answers",
    [
        ("trio-federation ", [f"plain,{name}" for name in sorted(COMMANDS)]),
        ("trio-federation pl", ["plain,place", "plain,plugins"]),
        ("trio-federation --verbose st", ["plain,status"]),
        ("trio-federation status --u", ["plain,--url"]),
        (
            "trio-federation place --",
            [f"plain,--{name}" for name in PLACE_OPTIONS],
        ),
        ("trio-federation status --to", ["plain,--token-file"]),
        ("trio-federation status --token-file run/", ["file,run/"]),
        ("trio-federation place --ca-file ", ["file,"]),
        ("trio-federation completion ", [f"plain,{shell}" for shell in SHELLS]),
        ("trio-federation check conf", ["file,conf"]),
        ("trio-federation run ", ["file,"]),
        ("trio-federation nothing ", [f"plain,{name}" for name in sorted(COMMANDS)]),
    ],
)
def test_answers(line: str, answers: list[str], call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed(line, call, monkeypatch) == answers


def test_answers_with_summaries(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the shells that show them."""
    for name, summary in COMMANDS.items():
        assert completed(f"trio-federation {name}", call, monkeypatch, "zsh") == ["plain", name, summary]
    assert completed("trio-federation stat", call, monkeypatch, "fish")[0].startswith("plain,status")


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@needs_bash
def test_bash_completes_commands_and_files(tmp_path: Path) -> None:
    """A real one, on a terminal of its own: what is typed, and the tab key."""
    (tmp_path / "quite-some-file.toml").touch()
    variables = environment() | {"PATH": f"{COMMAND.parent}:{os.environ['PATH']}", "PS1": "> ", "TERM": "dumb"}
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=tmp_path,
        env=variables,
        start_new_session=True,
    ) as bash:
        os.close(terminal)
        said = ""

        def until(words: str) -> None:
            """Read on until it says this; what it has said before does not count."""
            nonlocal said
            while words not in said:
                ready, _, _ = select.select([controller], [], [], PATIENCE)
                assert ready, f"{words!r} never came, but: {said!r}"
                said += os.read(controller, 65536).decode()
            said = said.partition(words)[2]

        try:
            until("> ")
            os.write(controller, b'eval "$(trio-federation completion bash)"; echo do"ne"\n')
            until("done")
            os.write(controller, b"echo trio-fed; trio-federation stat\t")
            until("trio-federation status ")
            os.write(controller, b"\x15trio-federation check quite-s\t")
            until("trio-federation check quite-some-file.toml ")
            os.write(controller, b"\x15trio-federation plugins --js\t")
            until("--json ")
        finally:
            bash.kill()
            with suppress(OSError):
                os.close(controller)

"""Does what a page of the documentation says, word for word, in an empty folder, and holds what comes out against what
the page shows.

    follow_docs.py docs/plugins.md --dist FOLDER     # pip takes this project's distributions from there
    follow_docs.py docs/plugins.md --installed       # pip finds everything installed already, and needs no network

How a page has to be written, so that it reads well and can be followed:

- A block after a line with nothing but a file's name, in bold and as code, is that file. It is written to the folder
  that the shell is in by then.
- A block of kind `console` is what a terminal shows. A line that begins with `$ ` is typed (and goes on where the next
  one begins with `> `), the lines below it are the whole answer. `…` stands for anything within a line, and on a line
  of its own for any number of lines. Every command has to succeed, unless the next one is `echo $?`.
- A command that ends in `&` goes on, and what it says may come with the answers to later commands. While there is one,
  an answer is waited for. The page has to stop it.
- A block of kind `python` is a program of its own, which has to run to its end and say nothing.
- There are no other blocks.

Commands are typed into one shell, on a terminal, one after the other. What is on a terminal in colour is compared
without it. Exit code 0: the page is right; 1: it is not, with the line of the page and what came instead."""

from __future__ import annotations

import argparse
import os
import pty
import re
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

ROOT = Path(__file__).resolve().parent.parent

#: Seconds that a command may take. The longest one creates an environment and fills it.
COMMAND_DEADLINE = 900.0
#: Seconds that an answer is waited for while something goes on in the background.
ANSWER_DEADLINE = 60.0
#: Seconds without another word after which such an answer counts as complete.
QUIET = 0.5
#: Seconds that what is left at the end gets to go by itself, and then to go when it is told to.
END_DEADLINE = 3.0

#: What stands for anything.
ANYTHING = "…"

#: Variables that would make something else happen than on the terminal of somebody who begins.
UNWANTED = re.compile(
    r"PIP_.*|PYTHON.*|VIRTUAL_ENV|TRIO_FEDERATION_.*|LOCAL_CLUSTER_ID|PYTEST_.*|HYPOTHESIS_.*"
    r"|NO_COLOR|FORCE_COLOR|CLICOLOR.*|TTY_.*|COLUMNS|LINES|BASH_ENV|ENV|PROMPT_COMMAND|TERM"
)


class PageError(Exception):
    """The page cannot be followed, or is not right; a line that says where and why, and more below it."""


# The page.


@dataclass(frozen=True, slots=True)
class WriteFile:
    """A file to write."""

    line: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command to type, and what the page shows as its answer."""

    line: int
    text: str
    answer: tuple[str, ...]
    #: whether the page shows the exit code next, so that it may be any
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """A program in Python to run."""

    line: int
    text: str


Step: TypeAlias = WriteFile | Command | Program

_FENCE = re.compile(r"(?P<indent> {0,3})(?P<fence>`{3,}|~{3,})(?P<kind>.*)")
_FILE_NAME = re.compile(r"\*\*`([^`]+)`\*\*")


def read_page(text: str) -> list[Step]:
    """What a page says is to be done, in its order. Raises PageError for a block of which that is not clear."""
    lines = text.splitlines()
    steps: list[Step] = []
    at = 0
    while at < len(lines):
        line, number = lines[at], at + 1
        at += 1
        opened = _FENCE.fullmatch(line)
        if opened is None:
            if line.startswith(("    ", "\t")) and line.strip() and not "".join(lines[at - 2 : at - 1]).strip():
                raise PageError(f"line {number}: a block by indentation; put it between lines of ``` and say its kind")
            continue
        if opened["indent"]:
            raise PageError(f"line {number}: a block inside of something else; begin it at the start of the line")
        before = next((each.strip() for each in reversed(lines[: at - 1]) if each.strip()), "")
        begin = at
        while at < len(lines) and lines[at] != opened["fence"]:
            at += 1
        if at == len(lines):
            raise PageError(f"line {number}: the block does not end")
        steps += _steps(number, opened["kind"].strip(), before, lines[begin:at])
        at += 1
    return steps


def _steps(number: int, kind: str, before: str, block: list[str]) -> list[Step]:
    """What a block says. `number`: that of its first line, which says its kind. `before`: the last line before it."""
    named = _FILE_NAME.fullmatch(before)
    if named is not None:
        return [WriteFile(number, named[1], "\n".join([*block, ""]))]
    if kind == "console":
        return [*_commands(number, block)]
    if kind == "python":
        return [Program(number, "\n".join([*block, ""]))]
    raise PageError(
        f"line {number}: a block of kind {kind!r} cannot be followed; make it console or python, or put the name of a "
        "file before it: **`name`**"
    )


def _commands(number: int, block: list[str]) -> Iterator[Command]:
    found: list[tuple[int, list[str], list[str]]] = []
    for offset, line in enumerate(block, 1):
        if line.startswith("$ "):
            found.append((number + offset, [line[2:]], []))
        elif not found:
            raise PageError(f"line {number + offset}: a console begins with a command, after `$ `")
        elif line.startswith("> ") and not found[-1][2]:
            found[-1][1].append(line[2:])
        else:
            found[-1][2].append(line)
    if not found:
        raise PageError(f"line {number}: there is no command in this console")
    for index, (line_number, command, answer) in enumerate(found):
        shown = index + 1 < len(found) and found[index + 1][1] == ["echo $?"]
        yield Command(line_number, "\n".join(command), tuple(answer), may_fail=shown)


# Answers.

#: What a terminal takes for colours and the like, and not for text.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def plain(output: str) -> list[str]:
    """What a terminal shows of an output, a line each: without colours, without spaces at the ends of lines, and
    without empty lines at the end."""
    text = _ESCAPES.sub("", output).replace("\r\n", "\n")
    # What is written over, as progress is, does not stay.
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def answers(shown: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether the lines that came are those that a page shows."""
    expected = [line.rstrip() for line in shown]
    while expected and not expected[-1]:
        expected.pop()
    pattern = "".join(
        r"(?:.*\n)*?" if line == ANYTHING else ".*?".join(map(re.escape, line.split(ANYTHING))) + r"\n"
        for line in expected
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


# The shell.

#: Reads commands, each up to a zero byte, and says after each one its exit code, how many commands go on in the
#: background, and the folder that it has led to.
_LOOP = r"""
code=0
while IFS= read -r -d '' -u 3 command; do
    eval "(exit $code)
$command" 3<&-
    code=$?
    running=($(jobs -rp))
    printf '\n%s %s %s %s\n' "$MARK" "$code" "${#running[@]}" "$PWD"
done
running=($(jobs -rp))
kill "${running[@]}" 2>/dev/null
wait
"""

#: Before the shell, in a network of its own: its loopback is down at first.
_LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Shell:
    """One shell on a terminal. What it has started ends with it.

    `folder`: where it begins. `environment`: its variables. `alone`: whether it gets a network of its own, with nothing
    but loopback, where the system lets people have one."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *, alone: bool = False) -> None:
        #: the folder that the commands have led to
        self.folder = folder
        #: how many of them went on in the background when the last one had ended
        self.background = 0
        self._mark = f"end-{secrets.token_hex(8)}"
        self._environment = {**environment, "MARK": self._mark}
        self._alone = alone
        self._rest = b""
        self._process: subprocess.Popen[bytes]
        self._terminal: int
        self._commands: int

    def __enter__(self) -> Shell:
        self._terminal, inside = pty.openpty()
        commands_end, self._commands = os.pipe()
        bash = ["bash", "--noprofile", "--norc", "-c", f"exec 3<&{commands_end} {commands_end}<&-\n{_LOOP}"]
        command = [*self._network(), *bash]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=inside,
                stderr=inside,
                pass_fds=[commands_end],
                start_new_session=True,
            )
        finally:
            os.close(inside)
            os.close(commands_end)
        return self

    def _network(self) -> list[str]:
        alone = ["unshare", "--user", "--map-root-user", "--net", "--", sys.executable, "-c", _LOOPBACK_UP]
        if not self._alone or shutil.which(alone[0]) is None:
            return []
        possible = subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0
        return alone if possible else []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The shell ends, and takes what runs in the background with it; what does not heed that is killed.
        os.close(self._commands)
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + END_DEADLINE
            while self._runs() and time.monotonic() < deadline:
                self._read(0.05)
            self._signal(number)
        self._process.wait()
        os.close(self._terminal)

    def _signal(self, number: signal.Signals) -> None:
        """To the shell and all that it has started, which is the group of processes that it leads."""
        if self._runs():
            os.killpg(self._process.pid, number)

    def _runs(self) -> bool:
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def type(self, command: str, is_answered: Callable[[list[str]], bool]) -> tuple[int, list[str]]:
        """Type a command; its exit code, and the lines that came: until it has ended and, while something goes on in
        the background, until `is_answered`, or nobody can wait for that any more.

        Raises PageError where it does not end."""
        os.write(self._commands, command.encode() + b"\0")
        output, code = self._until_mark()
        if self.background:
            deadline = time.monotonic() + ANSWER_DEADLINE
            quiet_since = time.monotonic()
            while time.monotonic() < deadline:
                more = self._read(0.05)
                output += more
                if more:
                    quiet_since = time.monotonic()
                if time.monotonic() - quiet_since > QUIET and is_answered(plain(output.decode(errors="replace"))):
                    break
        return code, plain(output.decode(errors="replace"))

    def _until_mark(self) -> tuple[bytes, int]:
        """What comes until a command has ended, and its exit code."""
        output = b""
        deadline = time.monotonic() + COMMAND_DEADLINE
        pattern = re.compile(rb"\r?\n%s (\d+) (\d+) ([^\r\n]*)\r?\n" % self._mark.encode())
        while time.monotonic() < deadline:
            output += self._read(0.2)
            found = pattern.search(output)
            if found is not None:
                self.background = int(found[2])
                self.folder = Path(os.fsdecode(found[3]))
                return output[: found.start()] + output[found.end() :], int(found[1])
            if self._process.poll() is not None and not self._read(0.2):
                break
        text = "\n".join(plain(output.decode(errors="replace"))[-20:])
        ended = self._process.poll() is not None
        why = "it has ended the shell" if ended else f"it has not ended within {COMMAND_DEADLINE:g} s"
        raise PageError(f"{why}; what it said last:\n{text}")

    def _read(self, within: float) -> bytes:
        """What there is to read, waiting for it for so many seconds at most."""
        ready, _, _ = select.select([self._terminal], [], [], within)
        if not ready:
            return b""
        try:
            return os.read(self._terminal, 65536)
        except OSError:  # everybody has let go of the other end
            time.sleep(within)  # noqa: TID251 - a script waits in real time
            return b""


# Following.


def follow(
    text: str,
    folder: Path,
    environment: Mapping[str, str],
    *,
    alone: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> None:
    """Do what a page says, in `folder`. `alone`: as for `Shell`. `say`: is told each step.

    Raises PageError at the first thing that is not as the page says."""
    steps = read_page(text)
    with tempfile.TemporaryDirectory() as programs, Shell(folder, environment, alone=alone) as shell:
        for step in steps:
            match step:
                case WriteFile():
                    say(f"write {step.name}")
                    path = shell.folder / step.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(step.text, encoding="utf-8")
                case Command():
                    say(f"$ {step.text}")
                    _type(shell, step)
                case Program():
                    say(f"run the program of line {step.line}")
                    path = Path(programs, f"line_{step.line}.py")
                    path.write_text(step.text, encoding="utf-8")
                    _type(shell, Command(step.line, f"python {shlex.quote(str(path))}", ()))
        if shell.background:
            raise PageError("something still runs at the end of the page; stop it, and wait until it has ended")


def _type(shell: Shell, step: Command) -> None:
    try:
        code, lines = shell.type(step.text, lambda lines: answers(step.answer, lines))
    except PageError as error:
        raise PageError(f"line {step.line}: {step.text}: {error}") from None
    if not answers(step.answer, lines):
        shown = "\n".join(f"    {line}" for line in step.answer) or "    (nothing)"
        came = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
        raise PageError(f"line {step.line}: {step.text}\n  the page shows:\n{shown}\n  and this came:\n{came}")
    if code != 0 and not step.may_fail:
        told = "\n".join(f"    {line}" for line in lines[-20:])
        raise PageError(f"line {step.line}: {step.text}: exit code {code}, after\n{told}")


# What a shell finds.


def beginners_environment(tools: Path) -> dict[str, str]:
    """The variables of somebody who begins, and whose `python3` is the interpreter that runs this. `tools`: a folder
    for what is put into PATH."""
    kept = {name: value for name, value in os.environ.items() if not UNWANTED.fullmatch(name)}
    _command(tools / "python3", f'{shlex.quote(sys.executable)} "$@"')
    return {
        **kept,
        "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "TERM": "xterm",
        "COLUMNS": "100",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
    }


def with_distributions(environment: Mapping[str, str], dist: Path, tools: Path) -> dict[str, str]:
    """The same, where pip takes the wheels of the folder `dist`, whatever an index has, and of everything else the
    versions of constraints.txt."""
    wheels = sorted(dist.resolve().glob("*.whl"))
    if not wheels:
        raise PageError(f"{dist} holds no wheels; build them first")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    own = [f"{wheel.name.split('-')[0].replace('_', '-')} @ {wheel.as_uri()}" for wheel in wheels]
    constraints, build_constraints = tools / "constraints.txt", tools / "build-constraints.txt"
    constraints.write_text("\n".join([pins, *own, ""]), encoding="utf-8")
    build_constraints.write_text(pins, encoding="utf-8")
    return {
        **environment,
        "PIP_FIND_LINKS": str(dist.resolve()),
        "PIP_CONSTRAINT": str(constraints),
        # the second name is what newer versions of pip ask for while they build
        "PIP_BUILD_CONSTRAINT": str(build_constraints),
    }


def with_installed(environment: Mapping[str, str], tools: Path) -> dict[str, str]:
    """The same, where every environment sees what is installed beside the interpreter that runs this, and pip asks no
    index. What pip finds installed it does not install, so the commands of those packages are put into PATH."""
    site_packages = sysconfig.get_path("purelib")
    (tools / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({site_packages!r})\n", encoding="utf-8")
    for name in ("trio-federation", "pytest"):
        start = "import sys; from importlib.metadata import entry_points; "
        start += f"sys.argv[0] = {name!r}; sys.exit(entry_points(group='console_scripts')[{name!r}].load()())"
        _command(tools / name, f'python -c {shlex.quote(start)} "$@"')
    return {
        **environment,
        "PYTHONPATH": str(tools),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which means, in this one case, that there is none
    }


def _command(path: Path, does: str) -> None:
    path.write_text(f"#!/bin/sh\nexec {does}\n", encoding="utf-8")
    path.chmod(0o755)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the page is right; 1: it is not; the reason is on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--into", type=Path, help="an empty folder to do it in, or one to make; else it is removed")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--dist", type=Path, help="a folder of wheels that pip takes this project's packages from")
    where.add_argument("--installed", action="store_true", help="use what is installed here, and no index")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            tools, folder = Path(temporary, "tools"), options.into or Path(temporary, "empty")
            tools.mkdir()
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise PageError(f"{folder} is not empty; name another folder, or empty it")
            environment = beginners_environment(tools)
            if options.dist is not None:
                environment = with_distributions(environment, options.dist, tools)
            if options.installed:
                environment = with_installed(environment, tools)
            text = options.page.read_text(encoding="utf-8")
            follow(text, folder.resolve(), environment, alone=options.installed, say=print)
    except (PageError, OSError) as error:
        print(f"{options.page}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What follows a page of the documentation: how a page is read, how answers are compared, what a shell does, and that
whatever is not as a page says is found."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import follow_docs
from scripts.follow_docs import (
    Command,
    PageError,
    Program,
    Shell,
    WriteFile,
    answers,
    beginners_environment,
    follow,
    main,
    plain,
    read_page,
    with_distributions,
)


def page(text: str) -> str:
    """A page as it stands in a test."""
    return textwrap.dedent(text)


# --- reading a page


def test_files_commands_and_programs_are_read() -> None:
    text = page(
        """\
        # A page

        **`folder/a.toml`**

        ```toml
        x = 1
        ```

        And then:

        ```console
        $ echo one
        one
        $ cat <<END
        > two
        > END
        two
        > three

        $ false
        $ echo $?
        1
        ```

        ```python
        x = 1

        ```
        """
    )
    assert read_page(text) == [
        WriteFile(5, "folder/a.toml", "x = 1\n"),
        Command(12, "echo one", ("one",)),
        Command(14, "cat <<END\ntwo\nEND", ("two", "> three", "")),
        Command(20, "false", (), may_fail=True),
        Command(21, "echo $?", ("1",)),
        Program(25, "x = 1\n\n"),
    ]


@pytest.mark.parametrize(
    "text, said",
    [
        ("```toml\nx = 1\n```\n", "line 1: a block of kind 'toml' cannot be followed"),
        ("text\n\n```\nx\n```\n", "line 3: a block of kind '' cannot be followed"),
        ("**`a`** is a file:\n\n```toml\nx = 1\n```\n", "line 3: a block of kind 'toml' cannot be followed"),
        ("```console\nout\n$ in\n```\n", r"line 2: a console begins with a command, after `\$ `"),
        ("```console\n```\n", "line 1: there is no command in this console"),
        ("```console\n$ echo\n", "line 1: the block does not end"),
        ("- item\n\n  ```console\n  $ echo\n  ```\n", "line 3: a block inside of something else"),
        ("text\n\n    code\n", "line 3: a block by indentation"),
        ("text\n\n\tcode\n", "line 3: a block by indentation"),
        ("~~~sh\necho\n~~~\n", "line 1: a block of kind 'sh' cannot be followed"),
    ],
)
def test_a_block_that_cannot_be_followed_is_refused(text: str, said: str) -> None:
    with pytest.raises(PageError, match=said):
        read_page(text)


def test_text_and_tables_are_no_blocks() -> None:
    assert read_page("# Title\n\n- item\n  goes on\n\n| a | b |\n| - | - |\n\ntext\n    goes on, badly\n") == []


# --- comparing answers

# without what is taken away at the ends of lines, and at the end of it all
words = st.text(
    st.characters(exclude_characters="…\n\r", exclude_categories=["Cs", "Cc", "Zs"]), min_size=1, max_size=8
)
lines = st.lists(words, max_size=6)


@given(lines)
def test_an_answer_is_itself(came: list[str]) -> None:
    assert answers(came, plain("\n".join(came)))


@given(lines, lines)
def test_two_different_answers_are_not_the_same(shown: list[str], came: list[str]) -> None:
    assert answers(shown, plain("\n".join(came))) == (plain("\n".join(shown)) == plain("\n".join(came)))


@given(lines, st.data())
def test_what_is_left_out_may_be_anything(came: list[str], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(came)))
    end = data.draw(st.integers(begin, len(came)))
    assert answers([*came[:begin], "…", *came[end:]], plain("\n".join(came)))
    if came:
        index = data.draw(st.integers(0, len(came) - 1))
        line = came[index]
        left = data.draw(st.integers(0, len(line)))
        right = data.draw(st.integers(left, len(line)))
        shown = [*came[:index], f"{line[:left]}…{line[right:]}", *came[index + 1 :]]
        assert answers(shown, plain("\n".join(came)))


def test_what_is_left_out_on_a_line_is_not_more_than_that_line() -> None:
    assert answers(["a … c"], ["a b c"])
    assert not answers(["a … c"], ["a b", "c"])
    assert not answers(["a …"], ["b a c"])
    assert answers([], [])
    assert not answers([], ["something"])
    assert answers(["…"], [])


def test_what_a_terminal_shows() -> None:
    output = "\x1b[1;32mready\x1b[0m  \r\n10 %\r20 %\r100 %\r\n\x1b]0;title\x07text\r\n\r\n"
    assert plain(output) == ["ready", "100 %", "text"]


# --- following


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(follow_docs, "QUIET", 0.1)
    monkeypatch.setattr(follow_docs, "END_DEADLINE", 0.5)
    tools = tmp_path / "tools"
    tools.mkdir()
    return beginners_environment(tools)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_a_page_is_followed_in_one_shell(environment: dict[str, str], empty: Path) -> None:
    said: list[str] = []
    follow(
        page(
            """\
            ```console
            $ mkdir folder
            $ cd folder
            $ name=value
            ```

            **`deep/file.txt`**

            ```text
            one
            two
            ```

            ```console
            $ cat deep/file.txt
            one
            two
            $ echo $name ${PWD##*/}
            value folder
            $ printf 'no end of line'
            no end of line
            $ ls nothing
            ls: …nothing…
            $ echo $?
            2
            $ test -t 1 && echo a terminal
            a terminal
            $ read line; echo "nobody types: $line"
            nobody types:
            ```

            ```python
            import sys
            assert sys.version_info >= (3, 11)
            ```
            """
        ).replace("import sys", f"import sys\nassert sys.version.startswith({sys.version.split()[0]!r})"),
        empty,
        # `python` is what an activated environment has
        environment | {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"},
        say=said.append,
    )
    assert (empty / "folder" / "deep" / "file.txt").read_text() == "one\ntwo\n"
    assert said[:2] == ["$ mkdir folder", "$ cd folder"]
    assert "write deep/file.txt" in said


@pytest.mark.parametrize(
    "console, said",
    [
        ("$ echo one\ntwo", r"line 2: echo one\n  the page shows:\n    two\n  and this came:\n    one"),
        ("$ echo one", r"line 2: echo one\n  the page shows:\n    \(nothing\)\n  and this came:\n    one"),
        ("$ true\none", r"line 2: true\n  the page shows:\n    one\n  and this came:\n    \(nothing\)"),
        ("$ true\n$ false\n$ true", "line 3: false: exit code 1"),
        ("$ sh -c 'echo bad; exit 3'\n…", "line 2: sh -c 'echo bad; exit 3': exit code 3, after\n    bad"),
        ("$ echo last words; exit 4\n…", "line 2: echo last words; exit 4: it has ended the shell; .*\nlast words"),
        ("$ sleep 60 &", "something still runs at the end of the page"),
    ],
)
def test_what_is_not_as_the_page_says_is_found(
    environment: dict[str, str], empty: Path, console: str, said: str
) -> None:
    with pytest.raises(PageError, match=said):
        follow(f"```console\n{console}\n```\n", empty, environment)


@pytest.mark.parametrize("program, said", [("print(3)", "and this came:\n    3"), ("1 / 0", "ZeroDivisionError")])
def test_a_program_that_speaks_or_fails_is_found(
    environment: dict[str, str], empty: Path, program: str, said: str
) -> None:
    with pytest.raises(PageError, match=f"(?s)line 1: python .*{said}"):
        follow(
            f"```python\n{program}\n```\n",
            empty,
            environment | {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"},
        )


def test_a_command_that_does_not_end_is_given_up(
    environment: dict[str, str], empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_docs, "COMMAND_DEADLINE", 0.5)
    with pytest.raises(PageError, match=r"(?s)sleep 60: it has not ended within 0.5 s; what it said last:\nwaiting"):
        follow("```console\n$ echo waiting; sleep 60\n```\n", empty, environment)


BACKGROUND = """\
```console
$ sh -c 'trap "exit 0" TERM; sleep 0.3; echo begun; sleep 0.3; echo ready; sleep 60 & wait' &
…
ready
$ echo meanwhile
meanwhile
$ kill %1
…
$ wait
…
$ jobs
```
"""


@pytest.mark.slow
def test_what_goes_on_in_the_background_is_waited_for(environment: dict[str, str], empty: Path) -> None:
    follow(BACKGROUND, empty, environment)


@pytest.mark.slow
def test_what_the_background_never_says_is_not_waited_for_for_ever(
    environment: dict[str, str], empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_docs, "ANSWER_DEADLINE", 1.0)
    with pytest.raises(PageError, match=r"(?s)the page shows:\n    …\n    ready\n  and this came:\n    begun"):
        follow(BACKGROUND.replace("sleep 0.3; echo ready", "sleep 60"), empty, environment)


@pytest.mark.slow
def test_nothing_that_was_started_is_left(environment: dict[str, str], empty: Path) -> None:
    """Not even what ignores to be told."""
    with Shell(empty, environment) as shell:
        _, answer = shell.type(
            "sh -c 'trap \"\" TERM; echo $$; while true; do sleep 0.1; done' &", lambda lines: len(lines) == 1
        )
    (number,) = answer
    deadline = time.monotonic() + 30
    while is_running(int(number)):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.02)  # noqa: TID251 - for the system to take it away


def is_running(number: int) -> bool:
    """Whether there is such a process, other than one that has ended and whose parent has not asked for it yet."""
    try:
        return ") Z " not in Path(f"/proc/{number}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True).returncode != 0,
    reason="this system lets nobody have a network of his own",
)
def test_a_shell_may_have_a_network_of_its_own(environment: dict[str, str], empty: Path) -> None:
    program = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname()); "
        "print([name for _, name in socket.if_nameindex()])"
    )
    with Shell(empty, environment, alone=True) as shell:
        assert shell.type(f'python3 -c "{program}"', lambda _: True) == (0, ["['lo']"])


# --- what a shell finds


def test_a_beginner_has_none_of_our_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "nowhere")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("TRIO_FEDERATION_SECRET", "hunter2")
    monkeypatch.setenv("LOCAL_CLUSTER_ID", "east")
    monkeypatch.setenv("SOMETHING_ELSE", "stays")
    environment = beginners_environment(tmp_path)
    assert environment.keys().isdisjoint(["PIP_INDEX_URL", "PYTHONPATH", "TRIO_FEDERATION_SECRET", "LOCAL_CLUSTER_ID"])
    assert environment["SOMETHING_ELSE"] == "stays"


def test_pip_is_led_to_the_wheels(tmp_path: Path) -> None:
    tools, dist = tmp_path / "tools", tmp_path / "dist"
    tools.mkdir()
    dist.mkdir()
    with pytest.raises(PageError, match="holds no wheels; build them first"):
        with_distributions({}, dist, tools)
    (dist / "trio_federation-0.1.0-py3-none-any.whl").touch()
    (dist / "trio_federation-0.1.0.tar.gz").touch()
    environment = with_distributions({"A": "b"}, dist, tools)
    assert environment["A"] == "b"
    assert environment["PIP_FIND_LINKS"] == str(dist)
    constraints = Path(environment["PIP_CONSTRAINT"]).read_text().splitlines()
    wheel = (dist / "trio_federation-0.1.0-py3-none-any.whl").as_uri()
    assert [line for line in constraints if "@" in line] == [f"trio-federation @ {wheel}"]
    pins = Path(environment["PIP_BUILD_CONSTRAINT"]).read_text().splitlines()
    assert [line for line in constraints if "@" not in line][: len(pins)] == pins
    assert any(line.startswith("trio==") for line in pins)


# --- the command


def test_the_command_tells_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "page.md"
    written.write_text("```console\n$ echo one\none\n```\n")
    assert main([str(written)]) == 0
    assert capsys.readouterr().out == "$ echo one\n"
    folder = tmp_path / "folder"
    assert main([str(written), "--into", str(folder)]) == 0
    (folder / "file").touch()
    assert main([str(written), "--into", str(folder)]) == 1
    assert f"{folder} is not empty; name another folder, or empty it" in capsys.readouterr().err
    written.write_text("```console\n$ echo two\none\n```\n")
    assert main([str(written)]) == 1
    assert re.match(rf"{re.escape(str(written))}: line 2: echo two\n", capsys.readouterr().err)
    assert main([str(tmp_path / "missing.md")]) == 1
    assert "missing.md" in capsys.readouterr().err

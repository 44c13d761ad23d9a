"""`trio-federation token`: what it prints is what any program that knows the secret computes, and nothing else; and
what it refuses."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.process.running import COMMAND, PATIENCE, environment
from trio_federation.credentials import make_token, read_token

SECRET = "not-to-be-seen by anybody"
#: Computed by hand: `printf 'trio-federation token 1\0CLUSTER\0SERIAL' | openssl dgst -sha256 -hmac SECRET`.
KNOWN = [
    ("s", "west", 1, "71758e314b4dba51acd276abaefcfaa110843032f10e331d747c8f43d21fd7f6"),
    (SECRET, "west", 1, "b855fcd22d5775ff61f47b75fb618d473531183ffb38221e171556854ce8f270"),
    (SECRET, "west", 2, "aae6fdc9619e294d03926774aac2e2c795f4c152d5aa7e32f7735b6fdeb6c27a"),
    (SECRET, "west", 2147483647, "0129250bb862870b88055067d87706963c81f304df1d257396f3250a9445d46d"),
    (SECRET, "e", 1, "197e558581c8e9e9daa0639c90900b13b18b9fdd645077d9a69a986a6b0391af"),
    (SECRET, "a-1-" + "z" * 59, 10, "9947028d9d9a52faf2ff161ebbecf9cd2575149984b2f83684f5be897734c7b2"),
    ("k" * 64, "north", 1, "3583a4488346c8cd566d8a9e46bd37d10257e49212f3f36c0217b222e947d687"),
    ("k" * 65, "north", 1, "6b593d0c5eaa83c368bfa5f9024cbeca5c40466f013a9cbf02988acfc6bd2f09"),
]
#: what is said on standard error of a secret that is short
NOTE = (
    "note: the secret is shorter than 32 characters: whoever has a token can try, at home, what it was made from; make "
    "another one with: openssl rand -hex 32"
)


def notes_on(secret: str) -> list[str]:
    """What standard error says of a secret."""
    return [NOTE] if len(secret) < 32 else []


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return path


@pytest.mark.parametrize("secret, cluster, serial, mac", KNOWN)
def test_known_tokens(secret: str, cluster: str, serial: int, mac: str, secret_file: Path, call: Call) -> None:
    secret_file.write_text(secret)
    expected = f"tf1.{cluster}.{serial}.{mac}\n"
    notes = notes_on(secret)
    assert call("token", cluster, "--secret-file", secret_file, "--serial", serial) == (0, expected, notes)
    assert call("token", f"--serial={serial}", f"--secret-file={secret_file}", cluster) == (0, expected, notes)
    if serial == 1:
        assert call("token", cluster, "--secret-file", secret_file).output == expected


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@needs_openssl
@pytest.mark.parametrize("cluster, serial", [("west", 1), ("west", 2), ("x-" + "y" * 60, 1), ("0", 2147483647)])
@pytest.mark.parametrize("secret", [SECRET, "s", "~" * 64, "k" * 65, "0123456789abcdef" * 256])
def test_openssl_computes_the_same(secret: str, cluster: str, serial: int, secret_file: Path, call: Call) -> None:
    secret_file.write_text(secret + "\r\n")
    ended = call("token", cluster, "--secret-file", secret_file, "--serial", serial)
    context = f"trio-federation token 1\0{cluster}\0{serial}".encode()
    command = ["openssl", "dgst", "-sha256", "-mac", "HMAC", "-macopt", f"hexkey:{secret.encode().hex()}", "-r"]
    computed = subprocess.run(command, input=context, capture_output=True, check=True).stdout.decode().split()[0]
    assert ended == (0, f"tf1.{cluster}.{serial}.{computed}\n", notes_on(secret))


@pytest.mark.parametrize("length", [1, 31, 32, 33])
def test_a_short_secret_makes_the_token_and_a_note_beside_it(length: int, secret_file: Path, call: Call) -> None:
    """On standard error, so that the token is alone where it goes; the line break at the file's end is no character of
    the secret. A secret that is long enough has no note."""
    secret = "x" * length
    secret_file.write_text(f"{secret}\n")
    ended = call("token", "west", "--secret-file", secret_file)
    assert ended == (0, make_token(secret, "west") + "\n", [NOTE] if length < 32 else [])


def test_a_hub_takes_what_is_printed(secret_file: Path, call: Call) -> None:
    """As the agent reads it from the file that the output was sent to."""
    token = read_token(call("token", "west", "--secret-file", secret_file, "--serial", "3").output.removesuffix("\n"))
    assert token is not None
    assert (token.cluster_id, token.serial) == ("west", 3)
    assert token.valid_for([SECRET])
    assert not token.valid_for([f"{SECRET}\n"])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["West"], "'West' is not a cluster id; use at most 63 lower-case letters"),
        (["we_st"], "'we_st' is not a cluster id"),
        (["west.1"], "'west.1' is not a cluster id"),
        ([""], "'' is not a cluster id"),
        (["a" * 64], "is not a cluster id"),
        (["w" * 100_000], "is not a cluster id"),
        (["we\nst"], r"'we\nst' is not a cluster id"),
        ([make_token("another secret", "west")], "the cluster id is a whole token"),
        *(
            (["west", "--serial", serial], "is not a whole number from 1 to 2147483647")
            for serial in (
                "0",
                "-1",
                "01",
                "+1",
                "1.0",
                "x",
                "",
                " 1",
                "1\n",
                "1_0",
                "2147483648",
                "9" * 5000,
                "\u0661",
            )
        ),
    ],
)
def test_bad_arguments(arguments: list[str], words: str, secret_file: Path, call: Call) -> None:
    ended = call("token", *arguments, "--secret-file", secret_file)
    assert (ended.code, ended.output, len(ended.lines)) == (2, "", 1)
    assert words in ended.lines[0]
    assert len(ended.lines[0]) < 300
    assert SECRET not in ended.lines[0]
    assert make_token("another secret", "west") not in ended.lines[0]


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "No such file or directory; create it or correct the path"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"hunter2" * 600, "holds more than 4096 characters"),
        (b"hunter2-\xff", "is not UTF-8"),
        ("hunter2-ä".encode(), "use printable ASCII"),
        (b"hunter2\nhunter2\n", "use printable ASCII"),
        (b"hunter2 \n", "without blanks or line breaks at its ends"),
        ("\ufeffhunter2".encode(), "use printable ASCII"),
        (make_token("hunter2", "west").encode(), "holds a token; a hub needs the secret that tokens are made from"),
        (b"tf1.hunter2", "holds a token"),
    ],
    ids=range(11),
)
@pytest.mark.parametrize("options", [[], ["--verbose"]], ids=["", "verbose"])
def test_bad_secret_files(
    options: list[str], content: bytes | None, words: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("some-secret").write_bytes(content)
    ended = call(*options, "token", "west", "--secret-file", "some-secret")
    assert (ended.code, ended.output) == (2, "")
    assert len(ended.lines) == 1 or "--verbose" in options
    assert "'some-secret'" in ended.lines[-1]
    assert words in ended.lines[-1]
    told = "\n".join(ended.lines)
    assert [secret for secret in ("hunter2", make_token("hunter2", "west")[-64:]) if secret in told] == []
    assert ("Traceback" in told) is ("--verbose" in options)


def test_a_folder_is_no_secret(tmp_path: Path, call: Call) -> None:
    ended = call("token", "west", "--secret-file", tmp_path)
    assert (ended.code, ended.output) == (2, "")
    assert "Is a directory" in "".join(ended.lines)


def test_a_traceback_shows_no_secret(secret_file: Path, call: Call) -> None:
    """Also where it goes through the lines that have it."""
    for arguments in (["West"], ["west", "--serial", "0"]):
        ended = call("--verbose", "token", *arguments, "--secret-file", secret_file)
        assert ended.code == 2
        assert "Traceback" in ended.lines[0]
        assert SECRET not in "\n".join(ended.lines)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "Missing argument 'CLUSTER'"),
        (["west"], "Missing option '--secret-file'"),
        (["west", "--secret-file"], "Option '--secret-file' requires an argument"),
        (["west", "east", "--secret-file", "x"], "unexpected extra argument"),
        (["west", "--secret", "x"], "No such option '--secret'"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, call: Call) -> None:
    ended = call("token", *arguments)
    assert (ended.code, ended.output) == (2, "")
    assert words in "\n".join(ended.lines)


def test_help_tells_what_it_is_for_and_how_to_revoke(call: Call) -> None:
    text = " ".join(call("token", "--help").output.split())
    for words in ('accept = ["token"]', "[federation] secret_file", "To revoke one", "higher --serial", "deny_file"):
        assert words in text
    assert "CLUSTER.SERIAL" in text
    assert "[default: 1]" in text


def test_the_environment_is_not_asked(secret_file: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those variables are an agent's."""
    monkeypatch.setenv("TRIO_FEDERATION_SECRET", "another")
    monkeypatch.setenv("LOCAL_CLUSTER_ID", "east")
    assert call("token", "west", "--secret-file", secret_file).output == make_token(SECRET, "west") + "\n"


def test_the_output_of_a_process(secret_file: Path, tmp_path: Path) -> None:
    """Into a file, and from a pipe as the secret's file, as a shell makes it of <(…)."""
    target = tmp_path / "token"
    with target.open("wb") as file:
        command: list[str | Path] = [COMMAND, "token", "west", "--secret-file", "/dev/stdin"]
        ended = subprocess.run(
            command, input=SECRET.encode(), stdout=file, stderr=subprocess.PIPE, check=True, env=environment()
        )
    assert ended.stderr.decode() == f"{NOTE}\n"
    assert target.read_bytes() == make_token(SECRET, "west").encode() + b"\n"


def test_a_terminal_gets_the_same(secret_file: Path) -> None:
    """No colour and no word more, whatever the terminal can."""
    controller, terminal = pty.openpty()
    try:
        variables = environment() | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "20"}
        command: list[str | Path] = [COMMAND, "token", "west", "--secret-file", secret_file]
        ended = subprocess.run(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=subprocess.PIPE,
            env=variables,
            timeout=PATIENCE,
            check=True,
        )
        assert ended.stderr.decode() == f"{NOTE}\n"
        said = b""
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([controller], [], [], PATIENCE)
            assert ready, said
            said += os.read(controller, 65536)
        # The terminal's own driver writes a line break as two.
        assert said == make_token(SECRET, "west").encode() + b"\r\n"
        assert select.select([controller], [], [], 0)[0] == []
    finally:
        os.close(terminal)
        os.close(controller)


def test_output_that_cannot_be_written_is_a_failure(secret_file: Path) -> None:
    """A token that went nowhere must not pass for one that is in a file."""
    with Path("/dev/full").open("wb") as full:
        command: list[str | Path] = [COMMAND, "token", "west", "--secret-file", secret_file]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment())
    note, problem = ended.stderr.splitlines()
    assert (ended.returncode, note) == (1, NOTE)
    assert "the output cannot be written" in problem
    assert SECRET not in ended.stderr

"""Values that are made from files and made again: what counts as a change, what is kept and told when it cannot be, and
that one filesystem that does not answer costs the others nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from trio.testing import MockClock

from trio_federation.config import LARGEST_FILE
from trio_federation.errors import ConfigurationError
from trio_federation.reload import READ_DEADLINE, REREAD_INTERVAL, FileBacked, Outcome, keep_fresh

#: Seconds of real time within which anything on this machine has happened.
SOON = 10


def reader(*paths: Path) -> Callable[[], str]:
    """Joins what files hold. Refuses what begins with "bad"."""

    def make() -> str:
        texts = [path.read_text() for path in paths]
        if any(text.startswith("bad") for text in texts):
            raise ValueError(f"cannot use {texts}")
        return "+".join(texts)

    return make


def backed(*paths: Path, changed: Callable[[str], None] | None = None, in_thread: bool = False) -> FileBacked[str]:
    return FileBacked("it", [str(path) for path in paths], reader(*paths), changed=changed, in_thread=in_thread)


def write(path: Path, text: str) -> None:
    path.write_text(text)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "value"
    write(path, "1")
    return path


def test_it_is_made_at_once_and_outside_of_trio(path: Path) -> None:
    item = backed(path)
    assert (item.value, item.generation, item.what, item.files) == ("1", 0, "it", (str(path),))


@pytest.mark.parametrize("error", [ValueError("a"), ConfigurationError(["b"]), OSError("c")])
def test_what_making_it_raises_at_first_comes_out(path: Path, error: Exception) -> None:
    def make() -> str:
        raise error

    with pytest.raises(type(error)) as caught:
        FileBacked("it", [str(path)], make)
    assert caught.value is error


@pytest.mark.parametrize("in_thread", [False, True])
async def test_other_bytes_make_another_value(path: Path, in_thread: bool) -> None:
    seen: list[tuple[str, str]] = []
    item = backed(path, changed=lambda value: seen.append((value, item.value)), in_thread=in_thread)
    assert await item.reread() is None
    write(path, "2")
    with capture_logs() as logs:
        assert await item.reread() == "ok"
        assert await item.reread() is None
    assert (item.value, item.generation) == ("2", 1)
    assert seen == [("2", "2")], "told once, and after the value was replaced"
    assert logs == [{"event": "reloaded", "log_level": "info", "what": "it"}]


async def test_times_do_not_count(path: Path) -> None:
    """Neither a newer file with the same bytes is a change, nor does an old time hide one."""
    item = backed(path)
    os.utime(path, (1, 1))
    assert await item.reread() is None
    other = path.with_name("other")
    write(other, "1")
    other.replace(path)
    assert await item.reread() is None
    before = os.stat(path)
    write(path, "2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await item.reread() == "ok"
    assert item.generation == 1


async def test_swapped_symlinks_are_seen(tmp_path: Path) -> None:
    """As Kubernetes replaces all files of a secret at once."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tls.crt").write_text(f"{name} certificate")
        (tmp_path / name / "tls.key").write_text(f"{name} key")
    (tmp_path / "..data").symlink_to("one")
    for file in ("tls.crt", "tls.key"):
        (tmp_path / file).symlink_to(f"..data/{file}")
    item = backed(tmp_path / "tls.crt", tmp_path / "tls.key")
    (tmp_path / "..data_tmp").symlink_to("two")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    assert await item.reread() == "ok"
    assert item.value == "two certificate+two key"


async def test_a_missing_file_is_a_state_like_others(path: Path) -> None:
    item = FileBacked("it", [str(path)], lambda: path.read_text() if path.exists() else "none", in_thread=False)
    remove(path)
    assert await item.reread() == "ok"
    assert await item.reread() is None
    assert item.value == "none"
    write(path, "")
    assert await item.reread() == "ok"
    assert item.value == ""


async def test_a_pair_that_is_replaced_one_by_one_warns_nobody(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    for each in (certificate, key):
        write(each, "1")

    def make() -> str:
        if certificate.read_text() != key.read_text():
            raise ConfigurationError(["they do not match"])
        return key.read_text()

    item = FileBacked("it", [str(certificate), str(key)], make, in_thread=False)
    with capture_logs() as logs:
        write(certificate, "2")
        assert await item.reread() is None
        assert (item.value, item.generation) == ("1", 0)
        write(key, "2")
        assert await item.reread() == "ok"
    assert (item.value, item.generation) == ("2", 1)
    assert [entry["event"] for entry in logs] == ["reloaded"]


async def test_what_stays_broken_is_told_once_and_counted_at_every_look(path: Path) -> None:
    item = backed(path)
    with capture_logs() as logs:
        write(path, "bad 1")
        outcomes = [await item.reread() for _ in range(3)]
        write(path, "bad 2")  # another fault, and again one look of patience
        outcomes += [await item.reread() for _ in range(3)]
        write(path, "bad 1")  # told already
        outcomes += [await item.reread() for _ in range(2)]
    assert outcomes == [None, "failed", "failed", None, "failed", "failed", None, "failed"]
    assert item.value == "1"
    assert logs == [
        {
            "event": "reload_failed",
            "log_level": "warning",
            "what": "it",
            "error": f"cannot use ['bad {number}']",
        }
        for number in (1, 2)
    ]
    with capture_logs() as logs:
        write(path, "2")
        assert await item.reread() == "ok"
        write(path, "bad 1")
        assert [await item.reread() for _ in range(2)] == [None, "failed"]
    assert [entry["event"] for entry in logs] == ["reloaded", "reload_failed"], "after it has worked it is news again"


async def test_bytes_that_come_back_end_the_trouble(path: Path) -> None:
    item = backed(path)
    write(path, "bad")
    assert [await item.reread() for _ in range(2)] == [None, "failed"]
    write(path, "1")
    with capture_logs() as logs:
        assert [await item.reread() for _ in range(2)] == ["ok", None]
    assert [entry["event"] for entry in logs] == ["reloaded"]
    assert (item.value, item.generation) == ("1", 0), "the value is the one that it was"
    write(path, "bad")
    assert await item.reread() is None
    write(path, "1")
    with capture_logs() as logs:
        assert await item.reread() is None
    assert logs == [], "what nobody was told of needs no end"


async def test_faults_that_never_repeat_take_no_memory(path: Path) -> None:
    item = backed(path)
    for number in range(100):
        write(path, f"bad {number}")
        assert [await item.reread() for _ in range(2)] == [None, "failed"]
    assert len(item._told) <= 16


async def test_what_changes_while_it_is_read_is_made_again(path: Path) -> None:
    """Nobody knows from which bytes it was made, so it counts for one look only."""
    texts = ["b", "c"]

    def make() -> str:
        text = path.read_text()
        if texts:
            write(path, texts.pop(0))
        return text

    item = FileBacked("it", [str(path)], make, in_thread=False)
    assert item.value == "1"
    assert await item.reread() == "ok"
    assert item.value == "b"
    assert [await item.reread() for _ in range(2)] == ["ok", None]
    assert item.value == "c"


async def test_bytes_that_were_there_for_a_moment_leave_nothing_behind(path: Path) -> None:
    """They were read, and are gone at the next look, when the files are again as they were before the last one."""
    moment: str | None = "a"

    def make() -> str:
        if moment is not None:
            path.write_text(moment)
        return path.read_text()

    item = FileBacked("it", [str(path)], make, in_thread=False)
    assert item.value == "a"
    write(path, "1")
    moment = None
    assert await item.reread() == "ok"
    assert item.value == "1"
    write(path, "2")
    moment = "b"
    assert await item.reread() == "ok"
    assert item.value == "b"
    write(path, "2")
    moment = None
    assert [await item.reread() for _ in range(2)] == ["ok", None]
    assert item.value == "2"


@pytest.mark.parametrize(
    "error, text",
    [
        (UnicodeDecodeError("utf-8", b"the secret", 0, 1, "invalid start byte"), "a file is not text in UTF-8"),
        (PermissionError(13, "Permission denied", "the secret"), "cannot read: permission denied"),
        (OSError("the secret"), "cannot read: oserror"),
        (ConfigurationError(["one", "two"]), "one; two"),
        (ValueError("as given"), "as given"),
    ],
)
async def test_errors_are_told_without_what_was_met(path: Path, error: Exception, text: str) -> None:
    good = True

    def make() -> str:
        if good:
            return "1"
        raise error

    item = FileBacked("it", [str(path)], make, in_thread=False)
    good = False
    write(path, "2")
    with capture_logs() as logs:
        assert [await item.reread() for _ in range(2)] == [None, "failed"]
    assert [entry["error"] for entry in logs] == [text]


async def test_a_fault_of_ours_is_not_taken_for_one_of_the_files(path: Path) -> None:
    item = FileBacked("it", [str(path)], lambda: {"1": 1}[path.read_text()], in_thread=False)
    write(path, "2")
    with pytest.raises(KeyError):
        await item.reread()


async def test_a_pipe_in_the_place_of_a_file_is_told(path: Path) -> None:
    """Nobody writes to it, so whoever opened it as a file would wait."""
    item = backed(path, in_thread=True)
    remove(path)
    os.mkfifo(path)
    with capture_logs() as logs, trio.fail_after(SOON):
        assert [await item.reread() for _ in range(2)] == [None, "failed"]
    assert [entry["error"] for entry in logs] == [f"{path} is not a file; put one in its place"]


async def test_no_more_than_the_largest_file_is_read(path: Path) -> None:
    """And one that is too large is still told apart from a good one."""
    write(path, "a" * (LARGEST_FILE + 1))
    item = FileBacked("it", [str(path)], lambda: path.stat().st_size, in_thread=False)
    write(path, "a" * (LARGEST_FILE + 1) + "b")
    assert await item.reread() is None
    write(path, "a" * LARGEST_FILE)
    assert await item.reread() == "ok"


@given(st.lists(st.sampled_from(["1", "2", "3", "bad 1", "bad 2", None]), max_size=12))
def test_the_value_is_always_the_last_good_one(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str | None]
) -> None:
    """None: no file. The generation counts the changes, each of which is told, and a warning comes exactly for what is
    looked at twice in a row."""
    path = tmp_path_factory.mktemp("value") / "value"
    write(path, "1")
    good, generation = "1", 0
    told: set[str | None] = set()
    seen: list[str] = []
    item = backed(path, changed=seen.append)

    async def rounds() -> None:
        nonlocal good, generation
        expected: Outcome | None
        before: str | None = "1"
        for text in texts:
            if text is None:
                remove(path)
            else:
                write(path, text)
            if text is None or text.startswith("bad"):
                expected = "failed" if text == before else None
                if expected and text not in told:
                    told.add(text)
                    warned = 1
                else:
                    warned = 0
            else:
                expected = "ok" if text != good or told else None
                generation += text != good
                good = text
                told.clear()
                warned = 0
            with capture_logs() as logs:
                assert await item.reread() == expected
            assert [entry["event"] for entry in logs].count("reload_failed") == warned
            assert (item.value, item.generation) == (good, generation)
            before = text

    trio.run(rounds)
    assert len(seen) == generation
    assert seen[-1:] == ([good] if generation else [])


# --- values that are doubted -----------------------------------------------------------------------------------------


def doubting(path: Path, changed: Callable[[str], None] | None = None) -> FileBacked[str]:
    """One that doubts what is shorter than what there was."""
    return FileBacked(
        "it",
        [str(path)],
        reader(path),
        changed=changed,
        doubts=lambda old, new: len(new) < len(old),
        in_thread=False,
    )


async def test_a_value_in_doubt_counts_when_it_is_found_again(path: Path) -> None:
    """Nobody is told of it before; one that is not in doubt counts at once, also in between."""
    seen: list[str] = []
    write(path, "1234")
    item = doubting(path, seen.append)
    with capture_logs() as logs:
        write(path, "12")
        assert await item.reread() is None
        assert (item.value, item.generation, seen, logs) == ("1234", 0, [], [])
        assert [await item.reread() for _ in range(2)] == ["ok", None]
        assert (item.value, item.generation, seen) == ("12", 1, ["12"])
        write(path, "")  # as it is before it is written
        assert await item.reread() is None
        write(path, "12345")
        assert [await item.reread() for _ in range(2)] == ["ok", None]
        assert seen == ["12", "12345"]
    assert [entry["event"] for entry in logs] == ["reloaded"] * 2


async def test_only_two_looks_in_a_row_remove_a_doubt(path: Path) -> None:
    """Other bytes, the old ones, and ones that cannot be used begin anew."""
    write(path, "1234")
    item = doubting(path)
    for between in ("123", "1234", "bad"):
        write(path, "12")
        assert await item.reread() is None
        write(path, between)
        assert await item.reread() is None
    write(path, "12")
    assert await item.reread() is None
    assert item.value == "1234"
    assert await item.reread() == "ok"
    assert item.value == "12"


async def test_what_changes_while_it_is_read_is_in_doubt_for_as_long(path: Path) -> None:
    """Two values that were read from bytes that nobody knows are not found twice."""
    write(path, "1234")
    changing = False

    def make() -> str:
        text = path.read_text()
        if changing:
            path.write_text(text + " ")
        return text.strip()

    item = FileBacked("it", [str(path)], make, doubts=lambda old, new: len(new) < len(old), in_thread=False)
    changing = True
    write(path, "12")
    assert [await item.reread() for _ in range(3)] == [None] * 3
    changing = False
    assert [await item.reread() for _ in range(2)] == [None, "ok"]
    assert item.value == "12"


@given(st.lists(st.sampled_from(["", "1", "22", "12", "bad", "1234"]), max_size=12))
def test_a_doubted_value_never_counts_at_its_first_look(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("value") / "value"
    write(path, "1234")
    seen: list[str] = []
    item = doubting(path, seen.append)

    async def rounds() -> None:
        value, before, expected = "1234", "1234", []
        for text in texts:
            write(path, text)
            await item.reread()
            if text not in (value, "bad") and (len(text) >= len(value) or text == before):
                value = text
                expected.append(text)
            assert (item.value, seen) == (value, expected)
            before = text

    with capture_logs():
        trio.run(rounds)


# --- threads and time ------------------------------------------------------------------------------------------------


class Stuck:
    """A filesystem that answers when the test says so."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.started = 0
        self.hangs = False

    def __call__(self) -> str:
        if self.hangs:
            self.started += 1
            assert self.answer.wait(SOON)
        return "answered"


async def test_one_that_hangs_is_given_up_and_not_joined_by_another(path: Path, autojump_clock: MockClock) -> None:
    stuck = Stuck()
    item = FileBacked("it", [str(path)], stuck)
    stuck.hangs = True
    write(path, "2")
    began = trio.current_time()
    try:
        with capture_logs() as logs:
            assert await item.reread() is None
            assert trio.current_time() == began + READ_DEADLINE
            outcomes = [await item.reread() for _ in range(3)]
        assert outcomes == ["failed"] * 3
        assert trio.current_time() == began + READ_DEADLINE, "it is known to hang"
        assert stuck.started <= 1
        assert [entry["error"] for entry in logs] == [f"{path}: cannot be read within {READ_DEADLINE:g} s"]
    finally:
        stuck.answer.set()


async def test_one_that_hung_is_read_again_once_it_answers(path: Path) -> None:
    stuck = Stuck()
    item = FileBacked("it", [str(path)], stuck)
    stuck.hangs = True
    write(path, "2")
    with trio.fail_after(SOON):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(item.reread)
            while not stuck.started:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert stuck.started == 1, "a cancellation does not wait for it"
        assert item.generation == 0
        stuck.hangs = False
        stuck.answer.set()
        while await item.reread() != "ok":
            await trio.lowlevel.checkpoint()
    assert (item.value, item.generation) == ("answered", 1)


async def test_those_who_ask_at_once_are_served_one_after_the_other(path: Path) -> None:
    item = backed(path, in_thread=True)
    write(path, "2")
    outcomes: list[Outcome | None] = []

    async def ask() -> None:
        outcomes.append(await item.reread())

    with trio.fail_after(SOON):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
    assert sorted(outcomes, key=str) == [None, None, None, "ok"]


async def test_files_are_looked_at_every_interval(tmp_path: Path, autojump_clock: MockClock) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for each in paths:
        write(each, "1")
    items = [FileBacked(each.name, [str(each)], reader(each), in_thread=False) for each in paths]
    told: list[tuple[float, str, Outcome]] = []
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def keep(task_status: trio.TaskStatus[None]) -> None:
            await keep_fresh(
                items,
                reloaded=lambda what, outcome: told.append((trio.current_time() - began, what, outcome)),
                task_status=task_status,
            )

        await nursery.start(keep)
        await trio.sleep(REREAD_INTERVAL * 1.5)
        write(paths[0], "2")
        write(paths[1], "bad")
        await trio.sleep(REREAD_INTERVAL * 3)
        nursery.cancel_scope.cancel()
    assert sorted(told) == [
        (2 * REREAD_INTERVAL, "a", "ok"),
        (3 * REREAD_INTERVAL, "b", "failed"),
        (4 * REREAD_INTERVAL, "b", "failed"),
    ]


async def test_one_that_hangs_holds_up_nobody(tmp_path: Path, autojump_clock: MockClock) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for each in (good, bad):
        write(each, "1")
    stuck = Stuck()
    items = [FileBacked("bad", [str(bad)], stuck), FileBacked("good", [str(good)], reader(good), in_thread=False)]
    stuck.hangs = True
    write(bad, "2")
    told: list[tuple[str, Outcome]] = []
    try:
        with trio.move_on_after(READ_DEADLINE / 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: keep_fresh(items, reloaded=lambda *each: told.append(each)))
                await trio.sleep(REREAD_INTERVAL * 1.5)
                write(good, "2")
        # The shutdown, at the end of that scope, did not wait for it either.
        assert told == [("good", "ok")]
    finally:
        stuck.answer.set()

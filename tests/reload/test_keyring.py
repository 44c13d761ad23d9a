"""A hub's secrets and its deny list while their files are replaced: what counts at each look, and what is told. That
files are looked at, and when, is shown in `test_reload.py`; what a credential is good for in `tests/core_agent`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import trio_federation.keyring
from trio_federation.config import Secret, load
from trio_federation.credentials import DenyList
from trio_federation.errors import ConfigurationError
from trio_federation.identity import Trusted
from trio_federation.keyring import Keyring
from trio_federation.reload import Outcome

OLD = "the-old-secret-0123456789"
NEW = "the-new-secret-0123456789"
SHORT = "a-short-secret-that-is-31-long-"


def keyring_of(folder: Path, keys: str) -> Keyring:
    """The keyring of a hub with these keys in its table, for which tokens count."""
    path = folder / "hub.toml"
    path.write_text(f'[hub]\nbind = "127.0.0.1:0"\ninsecure = true\naccept = ["token"]\n{keys}')
    return Keyring(load(path, {}))


async def look(keyring: Keyring, *, backwards: bool = False) -> list[Outcome]:
    """Look at every file once, in either order; how that has ended, where there is anything to be said."""
    items = reversed(keyring._items) if backwards else keyring._items
    outcomes = [await item.reread() for item in items]
    return [outcome for outcome in outcomes if outcome is not None]


# --- secrets ---------------------------------------------------------------------------------------------------------


def put(folder: Path, version: str, secret: str, next_secret: str) -> None:
    """Replace both files in one moment, as Kubernetes does."""
    (folder / version).mkdir()
    (folder / version / "secret").write_text(secret)
    (folder / version / "next").write_text(next_secret)
    os.symlink(version, folder / "..data_tmp")
    os.replace(folder / "..data_tmp", folder / "..data")


@pytest.mark.parametrize("backwards", [False, True])
async def test_a_secret_that_moves_from_one_file_to_the_other_counts_at_every_moment(
    backwards: bool, tmp_path: Path
) -> None:
    """Whichever file is looked at first, and also while it is told: agents have tokens of the new one by then, and
    would be refused."""
    put(tmp_path, "v1", OLD, "")
    keyring = keyring_of(tmp_path, 'secret_file = "..data/secret"\nnext_secret_file = "..data/next"\n')
    told: list[tuple[str, ...]] = []
    keyring.trusted_changed = lambda trusted: told.append(trusted.secrets)
    assert keyring.trusted().secrets == (OLD,)
    put(tmp_path, "v2", OLD, NEW)
    assert await look(keyring, backwards=backwards) == ["ok"]
    put(tmp_path, "v3", NEW, "")
    assert await look(keyring, backwards=backwards) == ["ok"]
    assert told == [(OLD, NEW), (NEW,)]
    assert keyring.trusted().secrets == (NEW,)


async def test_a_secret_that_moves_between_the_files_of_one_look_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files are read one after the other, and both may be replaced in between."""
    put(tmp_path, "v1", OLD, "")
    keyring = keyring_of(tmp_path, 'secret_file = "..data/secret"\nnext_secret_file = "..data/next"\n')
    told: list[tuple[str, ...]] = []
    keyring.trusted_changed = lambda trusted: told.append(trusted.secrets)
    put(tmp_path, "v2", OLD, NEW)
    moves = [True]

    def move_after(read: Callable[[str], Secret | None]) -> Callable[[str], Secret | None]:
        def reading(file: str) -> Secret | None:
            found = read(file)
            if moves:
                moves.clear()
                put(tmp_path, "v3", NEW, "")
            return found

        return reading

    for name in ("read_hub_secret_file", "read_next_secret_file"):
        monkeypatch.setattr(trio_federation.keyring, name, move_after(getattr(trio_federation.keyring, name)))
    for _ in range(3):
        await look(keyring)
    assert told[-1] == (NEW,)
    assert all(NEW in secrets for secrets in told)


async def test_a_second_secret_may_stand_beside_one_that_is_in_no_file(tmp_path: Path) -> None:
    """And be missing at first."""
    keyring = keyring_of(tmp_path, f'secret = "{OLD}"\nnext_secret_file = "next"\n')
    assert keyring.trusted().secrets == (OLD,)
    (tmp_path / "next").write_text(NEW)
    assert await look(keyring) == ["ok"]
    assert keyring.trusted().secrets == (OLD, NEW)
    (tmp_path / "next").unlink()
    assert await look(keyring) == ["ok"]
    assert keyring.trusted().secrets == (OLD,)


@pytest.mark.parametrize("file", ["secret", "next"])
async def test_of_a_pair_in_which_one_cannot_be_used_both_are_kept(file: str, tmp_path: Path) -> None:
    """Half of the old and half of the new is nothing that anybody has written."""
    put(tmp_path, "v1", OLD, NEW)
    keyring = keyring_of(tmp_path, 'secret_file = "..data/secret"\nnext_secret_file = "..data/next"\n')
    (tmp_path / "..data" / "secret").write_text("another-secret-0123456789")
    (tmp_path / "..data" / file).write_bytes(b"\xff\xfe")
    with capture_logs() as logs:
        assert [await look(keyring) for _ in range(2)] == [[], ["failed"]]
    assert keyring.trusted().secrets == (OLD, NEW)
    [line] = logs
    assert (line["event"], line["what"]) == ("reload_failed", "hub.secrets")
    assert "is not UTF-8" in line["error"]


NOTE = (
    "a new secret of the hub is shorter than 32 characters: whoever has a token can try, at home, what it was made "
    "from; make another one with: openssl rand -hex 32"
)


@pytest.mark.parametrize(
    "secret, next_secret, warned",
    [
        (SHORT, "", 1),
        ("n" * 32, SHORT, 1),
        (SHORT, SHORT, 2),
        ("n" * 32, "", 0),
        ("n" * 32, "m" * 32, 0),
    ],
)
async def test_a_short_secret_that_comes_while_it_runs_is_warned_of(
    secret: str, next_secret: str, warned: int, tmp_path: Path
) -> None:
    """Once for each, and it counts all the same; and not at the start, where the configuration says so."""
    put(tmp_path, "v1", "o" * 31, "")
    with capture_logs() as logs:
        keyring = keyring_of(tmp_path, 'secret_file = "..data/secret"\nnext_secret_file = "..data/next"\n')
        assert await look(keyring) == []
        assert logs == []
        put(tmp_path, "v2", secret, next_secret)
        assert [await look(keyring) for _ in range(3)] == [["ok"], [], []]
    assert keyring.trusted().secrets == tuple(filter(None, (secret, next_secret)))
    warnings = [line for line in logs if line["event"] == "configuration"]
    assert warnings == [{"event": "configuration", "log_level": "warning", "note": NOTE}] * warned
    assert not any(each in repr(logs) for each in (secret, next_secret) if each)


async def test_a_short_secret_that_no_token_is_made_from_is_not_warned_of(tmp_path: Path) -> None:
    put(tmp_path, "v1", OLD, "")
    path = tmp_path / "hub.toml"
    path.write_text(
        '[hub]\nbind = "127.0.0.1:0"\ninsecure = true\naccept = ["shared"]\nsecret_file = "..data/secret"\n'
    )
    keyring = Keyring(load(path, {}))
    put(tmp_path, "v2", SHORT, "")
    with capture_logs() as logs:
        assert await look(keyring) == ["ok"]
    assert keyring.trusted().secrets == (SHORT,)
    assert [line for line in logs if line["event"] == "configuration"] == []


# --- the deny list ---------------------------------------------------------------------------------------------------


@pytest.fixture
def denying(tmp_path: Path) -> Keyring:
    """A hub whose deny list has a cluster, and a token of another one."""
    (tmp_path / "secret").write_text(OLD)
    (tmp_path / "deny").write_text("west\neast.12\n")
    return keyring_of(tmp_path, 'secret_file = "secret"\ndeny_file = "deny"\n')


def denied_by(keyring: Keyring) -> list[str]:
    """Its entries, sorted."""
    denied: DenyList = keyring.trusted().denied
    tokens = [f"{cluster}.{serial}" for cluster, serial in denied.tokens]
    return sorted([*denied.clusters, *tokens])


@pytest.mark.parametrize("half_written", ["", "west\n", "west\neast.1", "wes", "# nobody\n", "west.1\neast.12\n"])
async def test_a_deny_list_lets_somebody_in_at_the_second_look_only(
    half_written: str, denying: Keyring, tmp_path: Path
) -> None:
    """A file that is emptied and then written is a list without anybody for a moment."""
    told: list[Trusted] = []
    denying.trusted_changed = told.append
    (tmp_path / "deny").write_text(half_written)
    assert await look(denying) == []
    (tmp_path / "deny").write_text("west\neast.12\n")
    assert await look(denying) == []
    assert (denied_by(denying), told) == (["east.12", "west"], [])
    # One that is meant is found again.
    (tmp_path / "deny").write_text(half_written)
    assert [await look(denying) for _ in range(3)] == [[], ["ok"], []]
    assert len(told) == 1
    assert "west" not in denied_by(denying) or "east.12" not in denied_by(denying)


async def test_a_deny_list_keeps_somebody_out_at_once(denying: Keyring, tmp_path: Path) -> None:
    told: list[Trusted] = []
    denying.trusted_changed = told.append
    (tmp_path / "deny").write_text("")
    assert await look(denying) == []
    (tmp_path / "deny").write_text("north\nwest\neast.12\neast.13\n")
    assert await look(denying) == ["ok"]
    assert denied_by(denying) == ["east.12", "east.13", "north", "west"]
    assert [len(trusted.denied) for trusted in told] == [4]


async def test_a_line_that_cannot_be_read_is_warned_of_once_and_the_others_count(
    denying: Keyring, tmp_path: Path
) -> None:
    """Once for each list that counts, and not while it is in doubt, or looked at without a change."""
    file = tmp_path / "deny"
    with capture_logs() as logs:
        file.write_text("west\neast.12\nNo Cluster\nnorth\n")
        assert [await look(denying) for _ in range(3)] == [["ok"], [], []]
        assert denied_by(denying) == ["east.12", "north", "west"]
        [warning] = [line for line in logs if line["event"] == "deny_line_ignored"]
        assert (warning["log_level"], warning["file"]) == ("warning", str(file))
        assert warning["error"].startswith("line 3 is neither CLUSTER nor CLUSTER.SERIAL")
        logs.clear()
        file.write_text("west\nNo Cluster\n")
        assert await look(denying) == []
        assert logs == []
        assert [await look(denying) for _ in range(2)] == [["ok"], []]
        assert [line["event"] for line in logs].count("deny_line_ignored") == 1
        assert denied_by(denying) == ["west"]


def test_a_line_that_cannot_be_read_is_a_fault_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(OLD)
    (tmp_path / "deny").write_text("west\nNo Cluster\n")
    with (
        capture_logs() as logs,
        pytest.raises(ConfigurationError, match=r"\[hub\] deny_file: line 2 is neither") as caught,
    ):
        keyring_of(tmp_path, 'secret_file = "secret"\ndeny_file = "deny"\n')
    assert (len(caught.value.faults), logs) == (1, [])

"""Builds the wheels and source distributions of this repository twice, and says whether both times gave the same bytes.

The first build takes each wheel and each source distribution from this folder. The second one takes place in a copy
elsewhere, with other file times, another umask, locale, time zone and order of hashes, and makes each wheel from the
source distribution. So equal bytes mean that a distribution is a function of the files in it, and that what somebody
builds from a source distribution is what is handed out as a wheel.

The date inside is the one that hatchling sets, always the same. SOURCE_DATE_EPOCH is taken out of the environment: with
the date of the last commit, files of the same content would make other distributions after another commit, and whoever
has the source distribution and no git would not know it. Beside the files only the versions of hatchling, which is
pinned, and of zlib count. Checks of what is inside live in tests/test_packaging.py.

Builds with the hatchling of this interpreter's environment, so that no index is asked; installing the source
distributions, which .ci/run does elsewhere, shows that their own build requirements suffice."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: what a copy of the repository leaves out: nothing of this may matter
LEFT_OUT = (".git", ".venv", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
#: a moment for the copied files, long before any of them was written; seconds since 1970
LONG_AGO = 1_000_000_000


def projects(root: Path) -> list[Path]:
    """The folders below `root` that a distribution is built from: the root itself, and every plugin."""
    return [root, *sorted(path.parent for path in root.glob("plugins/*/pyproject.toml"))]


def build(root: Path, into: Path, *options: str, umask: int, environment: Mapping[str, str]) -> None:
    """Build every project below `root` into the folder `into`, with further options of `python -m build`.

    Raises SystemExit with what the build said where it fails."""
    for project in projects(root):
        done = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(into), str(project)],
            cwd=project,
            env={name: value for name, value in environment.items() if name != "SOURCE_DATE_EPOCH"},
            umask=umask,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"building {project} failed, exit code {done.returncode}:\n{done.stdout}")


def build_here(into: Path) -> None:
    """The first build: everything from this repository. Raises SystemExit where it fails."""
    build(ROOT, into, "--sdist", "--wheel", umask=0o022, environment=os.environ)


def build_elsewhere(scratch: Path, into: Path) -> None:
    """The second build: from a copy below the folder `scratch`, the wheels from the source distributions.

    Raises SystemExit where it fails."""
    copy = scratch / "another place"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), copy_function=shutil.copyfile)
    for path in copy.rglob("*"):
        if path.is_file():
            path.chmod(0o755 if os.access(ROOT / path.relative_to(copy), os.X_OK) else 0o600)
        os.utime(path, (LONG_AGO, LONG_AGO))
    other = {"LC_ALL": "C", "TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "20", "HOME": str(scratch)}
    build(copy, into, umask=0o077, environment=os.environ | other)


@dataclass(frozen=True, slots=True)
class Member:
    """One file in an archive, so far as bytes depend on it."""

    sha256: str
    mode: str
    date: object
    #: of a source distribution: who it belongs to
    owner: object = None


def members(archive: Path) -> dict[str, Member]:
    """What an archive holds, by name, in its order."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {
                info.filename: Member(digest(wheel.read(info)), oct(info.external_attr >> 16), info.date_time)
                for info in wheel.infolist()
            }
    with tarfile.open(archive) as sdist:
        found: dict[str, Member] = {}
        for member in sdist:
            file = sdist.extractfile(member)
            content = file.read() if file is not None else member.linkname.encode()
            owner = (member.uid, member.gid, member.uname, member.gname)
            found[member.name] = Member(digest(content), oct(member.mode), member.mtime, owner)
        return found


def digest(content: bytes) -> str:
    """The SHA-256 of some bytes, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def differences(first: Path, second: Path) -> Iterator[str]:
    """What differs between two folders of archives, a line each: the files, and what is in those of the same name. None
    where all bytes are the same."""
    names = sorted({path.name for folder in (first, second) for path in folder.iterdir()})
    for name in names:
        one, other = first / name, second / name
        if not (one.is_file() and other.is_file()):
            yield f"{name}: built only {_where(one.is_file())}"
        elif one.read_bytes() != other.read_bytes():
            yield f"{name}: not the same bytes"
            yield from _differences_inside(members(one), members(other))


def _differences_inside(first: dict[str, Member], second: dict[str, Member]) -> Iterator[str]:
    for name in sorted(first.keys() | second.keys()):
        if (name in first) != (name in second):
            yield f"  {name}: only {_where(name in first)}"
            continue
        for field in fields(Member):
            one, other = getattr(first[name], field.name), getattr(second[name], field.name)
            if one != other:
                yield f"  {name}: {field.name} {one} here, {other} elsewhere"
    both = first.keys() & second.keys()
    if [name for name in first if name in both] != [name for name in second if name in both]:
        yield "  not in the same order"


def _where(here: bool) -> str:
    return "here" if here else "elsewhere"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: built, and the same twice, with the sums on standard output; 1: not the same, with what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="the folder for what is built (default: dist)")
    into: Path = parser.parse_args(arguments).into.resolve()
    with tempfile.TemporaryDirectory() as folder:
        here, elsewhere = Path(folder, "here"), Path(folder, "elsewhere")
        build_here(here)
        build_elsewhere(Path(folder), elsewhere)
        found = list(differences(here, elsewhere))
        if found:
            print(*found, "two builds of the same files differ: see above what in them", sep="\n", file=sys.stderr)
            return 1
        into.mkdir(parents=True, exist_ok=True)
        for path in sorted(here.iterdir()):
            shutil.copyfile(path, into / path.name)
            print(f"{digest(path.read_bytes())}  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

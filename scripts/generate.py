"""Regenerates trio_federation/pb from the .proto files, or, with --check, says whether it is current. The compiler runs
ruff over what it writes, so it runs in an empty folder, where this project's and the user's settings change nothing."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
GENERATED = ROOT / "trio_federation" / "pb"
OPTIONS = ("google_protobuf_descriptors", "client_generation=async", "server_generation=async")


def generate(into: Path) -> None:
    """Writes the Python package for every .proto file below proto/ into the folder `into`, which must exist.

    Raises SystemExit with what the compiler said where it fails."""
    sources = sorted(str(path) for path in PROTO.rglob("*.proto"))
    # The compiler's plugin and ruff are scripts beside the interpreter, which need not be on the path.
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    with tempfile.TemporaryDirectory() as empty:
        Path(empty, "ruff.toml").touch()
        compiler = subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO)),
                f"--python_betterproto2_out={into}",
                *(f"--python_betterproto2_opt={option}" for option in OPTIONS),
                *sources,
            ],
            cwd=empty,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            check=False,
        )
    if compiler.returncode:
        raise SystemExit(f"the compiler failed, exit code {compiler.returncode}:\n{compiler.stdout}")


def texts(folder: Path) -> dict[str, str]:
    """The text of every file below `folder` by its relative path, without compiled ones."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}


def differences(held: dict[str, str], fresh: dict[str, str]) -> Iterator[str]:
    """The lines of a unified diff from the files `held` to those freshly generated; none where they agree."""
    for name in sorted(held.keys() | fresh.keys()):
        if (name in held) != (name in fresh):
            yield f"{name}: {'not generated any more' if name in held else 'missing'}"
        elif held[name] != fresh[name]:
            before, after = held[name].splitlines(), fresh[name].splitlines()
            yield from difflib.unified_diff(before, after, f"held/{name}", f"fresh/{name}", lineterm="")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: written, or current; 1: not current, with the differences on standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether the code is current")
    check: bool = parser.parse_args(arguments).check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        if check:
            found = list(differences(texts(GENERATED), texts(fresh)))
            if found:
                print(*found, f"{GENERATED.relative_to(ROOT)} is not current: run `make generate`", sep="\n")
            return 1 if found else 0
        shutil.rmtree(GENERATED, ignore_errors=True)
        shutil.copytree(fresh, GENERATED)
        return 0


if __name__ == "__main__":
    sys.exit(main())

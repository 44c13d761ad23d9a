"""Builds h2spec, which tests what speaks HTTP/2 against its RFCs, from the Go modules that `h2spec/go.mod` and
`h2spec/go.sum` pin. It is built once, into a folder outside the tree, $XDG_CACHE_HOME/trio-federation/h2spec/KEY, like
the API server (`tests.apiserver.build`), from which what is the same about Go is taken. What it finds is in
`test_h2spec.py`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.apiserver.build import BuildError, NoToolchain, cache_folder, go_environment, take_lock, toolchain

#: the Go module that requires it
MODULE = Path(__file__).resolve().parent / "h2spec"
PACKAGE = "github.com/summerwind/h2spec/cmd/h2spec"
OPTIONS = ("-trimpath", "-buildvcs=false", "-ldflags=-s -w")


def h2spec(environment: Mapping[str, str]) -> Path:
    """The program, built where that has not been done yet, which takes some seconds. Several processes may ask at once:
    one builds, the others wait. Raises NoToolchain where there is no Go for it, and BuildError where Go fails or the
    folder cannot be written."""
    go = toolchain(environment, MODULE)
    key = hashlib.sha256("\0".join([go.version, go.platform, PACKAGE, *OPTIONS]).encode())
    for name in ("go.mod", "go.sum"):
        content = (MODULE / name).read_bytes()
        key.update(f"\0{name} {len(content)}\0".encode() + content)
    folder = cache_folder(environment).with_name("h2spec") / key.hexdigest()
    program = folder / "h2spec"
    if program.is_file():
        return program
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            take_lock(lock.fileno(), folder, lambda line: None)
            if not program.is_file():
                _build(go.go, program, environment)
    except OSError as error:
        raise BuildError(f"h2spec cannot be kept in {folder}: {error}") from error
    return program


def _build(go: str, program: Path, environment: Mapping[str, str]) -> None:
    # Renamed once it is whole, so that a build that was killed leaves no program.
    made = program.with_name("making")
    shutil.rmtree(made, ignore_errors=True)
    built = subprocess.run(
        [go, "build", *OPTIONS, "-o", str(made / "h2spec"), PACKAGE],
        cwd=MODULE,
        env=go_environment(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        raise BuildError(f"go build failed in {MODULE}:\n{built.stderr.strip()}")
    (made / "h2spec").rename(program)
    made.rmdir()


def main() -> None:
    """Builds the program, or finds it, and prints where it is."""
    try:
        sys.stdout.write(f"{h2spec(os.environ)}\n")
    except (NoToolchain, BuildError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()

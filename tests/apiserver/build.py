"""Builds the programs that tests of Kubernetes run against: etcd, kube-apiserver and kubectl, from the Go modules that
`server/go.mod` and `server/go.sum` pin. What they are started with is said in `tests.apiserver.cluster`.

They are built once, into a folder outside the tree, $XDG_CACHE_HOME/trio-federation/apiserver/KEY, with a key that
follows from the pinned modules, how they are built, and Go's version, system and architecture. Folders of old keys may
be deleted; nothing else does it. `python -m tests.apiserver.build` builds or finds the programs, and prints where they
are; `make apiserver` runs just that."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: the Go module that requires the programs
MODULE = Path(__file__).resolve().parent / "server"
#: program to the package that it is built from
PACKAGES = {
    "etcd": "./etcd",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
}
#: the Go package that keeps the version that the programs name; releases of Kubernetes set it in the same way
VERSION_PACKAGE = "k8s.io/component-base/version"
#: seconds between two lines of progress
PROGRESS_EVERY = 15.0
#: what `go build -v` says besides progress; bare lines are the packages that it compiles
COMPILED = re.compile(r"[\w.~/-]+")

Say = Callable[[str], None]


class NoToolchain(Exception):
    """There is no Go here, or none that `go.mod` is content with. The message says which, in one line."""


class BuildError(Exception):
    """The build has failed. The message is what Go had to say."""


class Toolchain(NamedTuple):
    """The Go that builds."""

    #: path of the program
    go: str
    #: such as "go1.26.8"
    version: str
    #: such as "linux/amd64"
    platform: str


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the programs are."""

    folder: Path
    #: of Kubernetes, such as "v1.36.3"
    version: str

    @property
    def etcd(self) -> Path:
        return self.folder / "etcd"

    @property
    def kube_apiserver(self) -> Path:
        return self.folder / "kube-apiserver"

    @property
    def kubectl(self) -> Path:
        return self.folder / "kubectl"


def required(environment: Mapping[str, str]) -> bool:
    """Whether a machine that cannot build the programs fails the tests that need them, instead of skipping them."""
    return environment.get("CI") == "true" or bool(environment.get("TRIO_FEDERATION_REQUIRE_APISERVER"))


def kubernetes_version(module: Path = MODULE) -> str:
    """The version of Kubernetes that `module` requires, such as "v1.36.3". Raises BuildError where none is named."""
    found = re.search(r"^\s*(?:require )?k8s\.io/kubernetes (v\S+)", (module / "go.mod").read_text(), re.MULTILINE)
    if found is None:
        raise BuildError(f"{module / 'go.mod'} requires no k8s.io/kubernetes: add it, or restore the file")
    return found[1]


def wanted_go(module: Path = MODULE) -> tuple[int, ...]:
    """The oldest Go that `module` is content with, such as (1, 26, 0)."""
    found = re.search(r"^go ([\d.]+)", (module / "go.mod").read_text(), re.MULTILINE)
    return tuple(map(int, found[1].split("."))) if found else (1,)


def toolchain(environment: Mapping[str, str], module: Path = MODULE) -> Toolchain:
    """The Go on the PATH, or the one that GOTOOLCHAIN makes of it. Raises NoToolchain."""
    wanted = wanted_go(module)
    needed = f"Go {'.'.join(map(str, wanted))} or newer builds the API server for tests"
    go = shutil.which("go", path=environment.get("PATH"))
    if go is None:
        raise NoToolchain(f"{needed}, and there is no `go` on the PATH: install it from your distribution or go.dev")
    asked = subprocess.run(
        [go, "env", "GOVERSION", "GOOS", "GOARCH"],
        cwd=module,
        env=go_environment(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        said = " ".join(asked.stderr.split())
        raise NoToolchain(f"{needed}, and {go} does not run here: {said or f'exit code {asked.returncode}'}")
    version, system, architecture = [*asked.stdout.split("\n"), "", "", ""][:3]
    # To Go, too, "go1.26rc2" is older than "1.26.0". What is built from Go's own tree has no number, and is new enough.
    numbers = re.match(r"go([\d.]+\d)", version)
    if numbers is not None and tuple(map(int, numbers[1].split("."))) < wanted:
        raise NoToolchain(f"{needed}, and {go} is {version}: install a newer one, or set GOTOOLCHAIN=auto")
    return Toolchain(go, version, f"{system}/{architecture}")


def go_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, without what would let the same sources become other programs."""
    return {
        **environment,
        # The pinned modules, exactly; no workspace around this repository takes part.
        "GOFLAGS": "-mod=readonly",
        "GOWORK": "off",
        # No C compiler is asked for, and the programs run with any C library.
        "CGO_ENABLED": "0",
    }


def build_options(version: str) -> list[str]:
    """Options of `go build`, so that the programs say that they are Kubernetes `version`."""
    major, minor = version.removeprefix("v").split(".")[:2]
    named = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitCommit": "", "gitTreeState": ""}
    settings = [f"-X {VERSION_PACKAGE}.{name}={value}" for name, value in named.items()]
    # Without tables for debuggers, which are a third of their size.
    return ["-trimpath", "-buildvcs=false", f"-ldflags={' '.join(['-s', '-w', *settings])}"]


def cache_key(module: Path, go: Toolchain) -> str:
    """Names what would be built from `module` with `go`: another name, another set of programs."""
    parts = [go.version, go.platform, *build_options(kubernetes_version(module)), *PACKAGES.values()]
    summed = hashlib.sha256("\0".join(parts).encode())
    for name in ("go.mod", "go.sum", "etcd/main.go"):
        content = (module / name).read_bytes()
        summed.update(f"\0{name} {len(content)}\0".encode() + content)
    return summed.hexdigest()


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where sets of programs are kept, one folder for each."""
    # What is not absolute is to be ignored, says the specification of these folders.
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "trio-federation" / "apiserver"


def programs(environment: Mapping[str, str], say: Say, module: Path = MODULE) -> Programs:
    """The programs, built where that has not been done yet: several minutes the first time, next to nothing later.

    `say` is told, line by line, of what takes long. Several processes may ask at once: one builds, the others wait.
    Raises NoToolchain, and BuildError where Go fails or the folder cannot be written."""
    go = toolchain(environment, module)
    version = kubernetes_version(module)
    cache = cache_folder(environment)
    folder = cache / cache_key(module, go)
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / f"{folder.name}.lock").open("w") as lock:
                take_lock(lock.fileno(), folder, say)
                if not folder.is_dir():
                    build(module, go, folder, environment, lock.fileno(), say)
        except OSError as error:
            raise BuildError(f"the API server for tests cannot be kept in {folder}: {error}") from error
    return Programs(folder, version)


def take_lock(file: int, folder: Path, say: Say) -> None:
    """Wait until no other process builds `folder`. A process that dies gives its lock back."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another process builds the API server for tests, waiting for it …")
        fcntl.flock(file, fcntl.LOCK_EX)


def build(module: Path, go: Toolchain, folder: Path, environment: Mapping[str, str], lock: int, say: Say) -> None:
    """Build the programs into `folder`, which appears only once all of them are there.

    `lock` is an open file on which the caller holds the lock for this folder. Raises BuildError, OSError."""
    version = kubernetes_version(module)
    say(f"building kube-apiserver {version}, kubectl and etcd with {go.version}; the first time takes some minutes …")
    started = time.monotonic()
    # Beside the folder, so that renaming is one step; a build that was killed has left its own here.
    scratch = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(scratch, ignore_errors=True)
    into = scratch / "programs"
    into.mkdir(parents=True)
    try:
        command = [go.go, "build", "-v", *build_options(version), "-o", str(into), *PACKAGES.values()]
        code, lines = run(command, module, environment, scratch / "said", lock, say)
        if code:
            # Of what it says by the way, only the warnings and errors are left.
            told = "\n".join(line for line in lines if not is_progress(line)) or f"exit code {code}, and nothing said"
            raise BuildError(f"go build failed in {module}:\n{told}")
        missing = [name for name in PACKAGES if not (into / name).is_file()]
        if missing:
            raise BuildError(f"go build in {module} made no {', '.join(missing)}: see PACKAGES in {__file__}")
        into.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"built in {time.monotonic() - started:.0f} s: {folder}")


def run(
    command: list[str], module: Path, environment: Mapping[str, str], said: Path, lock: int, say: Say
) -> tuple[int, list[str]]:
    """Run `command` of Go in `module`, with its output in the file `said`. Returns its exit code and its lines."""
    started = time.monotonic()

    def lines() -> list[str]:
        return said.read_text("utf-8", "replace").splitlines()

    with said.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=module,
            env=go_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Whoever is next waits for this process too, should it outlive the one that started it.
            pass_fds=[lock],
        )
    try:
        while True:
            try:
                return process.wait(PROGRESS_EVERY), lines()
            except subprocess.TimeoutExpired:
                say(progress(lines(), time.monotonic() - started))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def is_progress(line: str) -> bool:
    """Whether this line of `go build -v` says only how far it is."""
    return COMPILED.fullmatch(line) is not None or line.startswith("go: downloading ")


def progress(lines: list[str], seconds: float) -> str:
    """One line on how far the build is that has said `lines` in so many seconds."""
    downloads = sum(line.startswith("go: downloading ") for line in lines)
    packages = sum(is_progress(line) for line in lines) - downloads
    fetched = f"{downloads} modules fetched, " if downloads else ""
    return f"  {seconds:.0f} s: {fetched}{packages} packages compiled"


def main() -> None:
    """Builds the programs, or finds them, and prints the folder that they are in."""
    parser = argparse.ArgumentParser(prog="python -m tests.apiserver.build", description=main.__doc__)
    parser.add_argument(
        "--optional",
        action="store_true",
        help="where there is no suitable Go, say so and succeed, unless CI=true or TRIO_FEDERATION_REQUIRE_APISERVER",
    )
    options = parser.parse_args()

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    try:
        built = programs(os.environ, say)
    except NoToolchain as error:
        if options.optional and not required(os.environ):
            say(f"{error}; tests against a real API server will be skipped")
            return
        raise SystemExit(str(error)) from error
    except BuildError as error:
        raise SystemExit(str(error)) from error
    sys.stdout.write(f"{built.folder}\n")


if __name__ == "__main__":
    main()

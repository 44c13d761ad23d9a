"""How the programs are built: once, by whoever comes first, anew where something that counts has changed, and with a
clear word where it cannot be done. Go itself is played by a script; the real one has built what `test_harness` runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.apiserver import build
from tests.apiserver.build import BuildError, NoToolchain, Programs, Toolchain, cache_key, programs, required

ROOT = Path(__file__).resolve().parent.parent.parent
GO = Toolchain("/usr/bin/go", "go1.26.8", "linux/amd64")

#: what `go` does in these tests: answers `go env`, says on `go build` what a build would say, and makes the programs
SCRIPT = """\
#!/bin/sh
if [ "$1" = env ]; then
    printf '%s\\n' "$VERSION" linux amd64
    exit
fi
echo "$GOFLAGS $GOWORK $CGO_ENABLED $*" >> "$CALLS"
echo 'go: downloading k8s.io/api v0.36.3'
echo 'k8s.io/api/core/v1'
if [ -n "$BROKEN" ]; then
    echo '# k8s.io/kubernetes/pkg/quota'
    echo 'quota.go:7:2: undefined: limit'
    exit 1
fi
while [ "$1" != -o ]; do shift; done
sleep 0.3
touch "$2/etcd" "$2/kube-apiserver"
[ -n "$LESS" ] || touch "$2/kubectl"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With that `go` on the PATH, an empty cache, and a file CALLS of what it was called with."""
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(SCRIPT)
    go.chmod(0o755)
    return {
        "PATH": f"{go.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "CALLS": str(tmp_path / "calls"),
        "VERSION": "go1.26.8",
    }


def calls(environment: dict[str, str]) -> list[str]:
    path = Path(environment["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def without_go(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has Python and no Go."""
    (tmp_path / "empty").mkdir()
    left_out = {"CI", "TRIO_FEDERATION_REQUIRE_APISERVER"}
    return {name: value for name, value in os.environ.items() if name not in left_out} | {
        "PATH": str(tmp_path / "empty"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def test_the_programs_are_built_once(environment: dict[str, str]) -> None:
    said: list[str] = []
    first = programs(environment, said.append)
    assert said[0].startswith("building kube-apiserver v1.")
    assert said[-1].endswith(f": {first.folder}")
    assert all(path.is_file() for path in (first.etcd, first.kube_apiserver, first.kubectl))
    assert first.folder.is_relative_to(environment["XDG_CACHE_HOME"])
    assert programs(environment, pytest.fail) == first
    (call,) = calls(environment)
    assert call.startswith("-mod=readonly off 0 build ")
    assert f"-X k8s.io/component-base/version.gitVersion={first.version} " in call
    # Nothing but the programs stays, and the file of the lock.
    assert {path.suffix for path in first.folder.parent.iterdir()} == {"", ".lock"}


def test_two_at_once_build_once(environment: dict[str, str]) -> None:
    found: list[Programs] = []
    said: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(programs(environment, said.append))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 3
    assert len(calls(environment)) == 1
    assert said.count("another process builds the API server for tests, waiting for it …") == 2


def test_what_a_killed_build_has_left_does_not_matter(environment: dict[str, str]) -> None:
    folder = programs(environment, lambda line: None).folder
    shutil.rmtree(folder)
    left = folder.with_name(f"{folder.name}.building") / "programs"
    left.mkdir(parents=True)
    (left / "stale").touch()
    assert programs(environment, lambda line: None).folder == folder
    assert {path.name for path in folder.iterdir()} == {"etcd", "kube-apiserver", "kubectl"}


def test_a_build_that_fails_says_what_go_said_and_nothing_by_the_way(environment: dict[str, str]) -> None:
    with pytest.raises(BuildError) as failed:
        programs(environment | {"BROKEN": "yes"}, lambda line: None)
    assert str(failed.value) == (
        f"go build failed in {build.MODULE}:\n# k8s.io/kubernetes/pkg/quota\nquota.go:7:2: undefined: limit"
    )
    with pytest.raises(BuildError, match="made no kubectl"):
        programs(environment | {"LESS": "yes"}, lambda line: None)
    assert programs(environment, lambda line: None).kubectl.exists()


def test_a_folder_that_cannot_be_written_is_named(environment: dict[str, str]) -> None:
    Path(environment["XDG_CACHE_HOME"]).touch()
    with pytest.raises(BuildError, match=rf"cannot be kept in {re.escape(environment['XDG_CACHE_HOME'])}/"):
        programs(environment, lambda line: None)


@pytest.mark.parametrize("version", ["go1.9", "go1.25.12", "go1.26rc2"])
def test_an_old_go_is_refused(version: str, environment: dict[str, str]) -> None:
    with pytest.raises(NoToolchain, match=rf"^Go 1\.26\.0 or newer .* is {re.escape(version)}: "):
        programs(environment | {"VERSION": version}, lambda line: None)
    assert not calls(environment)


@pytest.mark.parametrize("version", ["go1.26.0", "go1.27rc1", "go1.27", "go1.100.1", "go2.0", "devel go1.28-1a2b3c"])
def test_a_new_go_is_taken(version: str, environment: dict[str, str]) -> None:
    assert build.toolchain(environment | {"VERSION": version}).version == version


def test_a_go_that_does_not_run_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "go").write_text("#!/bin/sh\necho 'go: broken' >&2\nexit 2\n")
    with pytest.raises(NoToolchain, match="does not run here: go: broken"):
        programs(environment, lambda line: None)


def test_what_counts_makes_another_key(tmp_path: Path) -> None:
    module = shutil.copytree(build.MODULE, tmp_path / "server")
    keys = {cache_key(module, GO), cache_key(build.MODULE, GO)}
    assert len(keys) == 1
    keys.add(cache_key(module, GO._replace(version="go1.26.9")))
    keys.add(cache_key(module, GO._replace(platform="linux/arm64")))
    for name in ("go.mod", "go.sum", "etcd/main.go"):
        content = (module / name).read_text()
        (module / name).write_text(f"{content}\n")
        keys.add(cache_key(module, GO))
        (module / name).write_text(content)
    assert len(keys) == 6
    assert cache_key(module, GO._replace(go="/elsewhere/go")) in keys


def test_the_cache_follows_the_environment() -> None:
    assert build.cache_folder({"XDG_CACHE_HOME": "/elsewhere"}) == Path("/elsewhere/trio-federation/apiserver")
    for unset in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert build.cache_folder(unset) == Path.home() / ".cache/trio-federation/apiserver"


def test_progress_is_counted() -> None:
    lines = ["go: downloading k8s.io/api v0.36.3", "k8s.io/api", "internal/abi", "# k8s.io/api", "a.go:1:2: oh no"]
    assert build.progress(lines, 30.2) == "  30 s: 1 modules fetched, 2 packages compiled"
    assert build.progress(lines[1:], 30.2) == "  30 s: 2 packages compiled"


def test_who_must_not_skip() -> None:
    assert required({"CI": "true"})
    assert required({"TRIO_FEDERATION_REQUIRE_APISERVER": "1"})
    assert not required({})
    assert not required({"CI": "", "TRIO_FEDERATION_REQUIRE_APISERVER": ""})


@pytest.mark.parametrize(
    "options, variables, code, ending",
    [
        ([], {}, 1, "from your distribution or go.dev"),
        (["--optional"], {}, 0, "tests against a real API server will be skipped"),
        (["--optional"], {"CI": "true"}, 1, "from your distribution or go.dev"),
        (["--optional"], {"TRIO_FEDERATION_REQUIRE_APISERVER": "1"}, 1, "from your distribution or go.dev"),
    ],
)
def test_without_go_the_command_says_so(
    options: list[str], variables: dict[str, str], code: int, ending: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.apiserver.build", *options],
        cwd=ROOT,
        env=without_go(tmp_path) | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("Go 1.26.0 or newer builds the API server for tests, and there is no `go` on the PATH")
    assert line.endswith(ending)
    assert (done.returncode, done.stdout) == (code, "")


@pytest.mark.slow
@pytest.mark.parametrize("variables, outcome", [({}, "1 skipped"), ({"CI": "true"}, "1 error")])
def test_without_go_tests_are_skipped_or_fail_where_they_must_run(
    variables: dict[str, str], outcome: str, tmp_path: Path
) -> None:
    test = "tests/apiserver/test_harness.py::test_kubectl_reads_what_it_has_written"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env=without_go(tmp_path) | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(rf"={{2,}} {outcome} in ", done.stdout), done.stdout
    assert "Go 1.26.0 or newer builds the API server for tests, and there is no `go` on the PATH" in done.stdout

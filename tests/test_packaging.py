"""What is installed is what is pinned: constraints.txt names one version of every package that running, testing,
checking and building need, and neither it nor a pyproject.toml says where packages come from. And what is built holds
what it should, and nothing else."""

from __future__ import annotations

import ast
import configparser
import email
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import package

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
#: environments that differ in what their packages need: the markers of the versions of Python that are supported
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def load(path: Path) -> dict[str, Any]:
    """A TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


OWN = {canonicalize_name(load(path)["project"]["name"]) for path in PROJECTS}


def lines(text: str) -> list[str]:
    """The lines of a requirements file that mean something."""
    return [line for line in (line.partition("#")[0].strip() for line in text.splitlines()) if line]


def pins() -> dict[str, str]:
    """The version of every package in constraints.txt, by its canonical name."""
    found: dict[str, str] = {}
    for line in lines((ROOT / "constraints.txt").read_text(encoding="utf-8")):
        matched = re.fullmatch(r"([a-z0-9][-.a-z0-9]*)==([0-9][a-z0-9.]*)", line)
        assert matched, f"{line!r} is not of the form name==version"
        name = canonicalize_name(matched[1])
        assert name not in found, f"{name} is pinned twice"
        found[name] = matched[2]
    return found


def required(path: Path) -> Iterator[str]:
    """Every requirement that a pyproject.toml states: to build, to run, and for each of its extras."""
    project = load(path)
    yield from project["build-system"]["requires"]
    yield from project["project"].get("dependencies", ())
    for extra in project["project"].get("optional-dependencies", {}).values():
        yield from extra
    # what hatchling asks for while it builds an editable wheel, and no pyproject.toml says
    yield "editables"


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether a requirement counts on Linux, with one of the supported versions of Python and one of the extras."""
    if requirement.marker is None:
        return True
    environments = (
        {"extra": extra, "python_version": python, "python_full_version": f"{python}.0"}
        for extra in (*extras, "")
        for python in PYTHONS
    )
    return any(requirement.marker.evaluate(environment) for environment in environments)


def needed(requirements: Iterable[str]) -> Iterator[tuple[Requirement, str]]:
    """Each requirement and, where its package is installed, what that one requires in turn; with who asked for it."""
    waiting = [(Requirement(text), "pyproject.toml") for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, asked_by = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in OWN:
            continue
        yield requirement, asked_by
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # what only builds need is installed in environments of its own
        candidates = [Requirement(text) for text in texts]
        waiting += [(each, name) for each in candidates if applies(each, requirement.extras)]


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_requirement_is_pinned_at_a_version_that_meets_it(path: Path) -> None:
    pinned = pins()
    faults = []
    for requirement, asked_by in needed(required(path)):
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None:
            faults.append(f"{requirement.name}, asked for by {asked_by}, is not in constraints.txt")
        elif not requirement.specifier.contains(version, prereleases=True):
            faults.append(f"{requirement.name}=={version} does not meet {requirement}, asked for by {asked_by}")
    assert faults == []


def test_what_is_installed_is_what_is_pinned() -> None:
    installed = {}
    for path in PROJECTS:
        for requirement, _ in needed(required(path)):
            name = canonicalize_name(requirement.name)
            try:
                installed[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    pinned = pins()
    assert {"trio", "grpclib", "pytest", "mypy"} <= installed.keys()
    assert installed == {name: pinned.get(name) for name in installed}


def test_no_pin_is_left_over() -> None:
    wanted = {canonicalize_name(requirement.name) for path in PROJECTS for requirement, _ in needed(required(path))}
    # Requirements of the build's own environments, which are not installed here.
    builds = {"hatchling", "editables", "tomlkit", "trove-classifiers", "pathspec", "pluggy", "packaging"}
    assert pins().keys() - wanted - builds == set()


@pytest.mark.parametrize("path", [ROOT / "constraints.txt", *PROJECTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_index_and_no_host_is_named(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"(?i)\w+://\S*|--?(?:index|extra-index|find-links|trusted-host)\S*|\s@\s", text) == []


def imported(folder: Path) -> Iterator[str]:
    """The top-level names that the modules below a folder import from elsewhere than the standard library."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), path.name)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            yield from {name.partition(".")[0] for name in names} - sys.stdlib_module_names


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_imported_is_required_in_so_many_words(path: Path) -> None:
    """A package that only comes along with another one may stay away with the next version of that."""
    [package] = load(path)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    providers = importlib.metadata.packages_distributions()
    own = Path(package).name
    names = set(imported(path.parent / package)) - {own}
    project = load(path)["project"]
    # What only pytest loads may need what only pytest's users have; a contract between the rooms keeps others from it.
    requirements = [*project["dependencies"], *project.get("optional-dependencies", {}).get("testing", ())]
    stated = {canonicalize_name(Requirement(each).name) for each in requirements}
    missing = {
        name
        for name in names
        # a name that nothing installed provides counts for itself
        if stated.isdisjoint(map(canonicalize_name, providers.get(name, [name.replace("_", "-")])))
    }
    assert names
    assert missing == set()


def test_the_plugins_need_no_newer_core_than_this_one() -> None:
    core = load(ROOT / "pyproject.toml")["project"]
    for path in PROJECTS[1:]:
        requirements = [Requirement(text) for text in load(path)["project"]["dependencies"]]
        [on_core] = [each for each in requirements if canonicalize_name(each.name) == canonicalize_name(core["name"])]
        assert on_core.specifier.contains(core["version"]), path


def test_every_dependency_is_argued_for() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    argued = {
        canonicalize_name(name)
        for row in re.findall(r"^\| (`.*?) \|", text, re.M)
        for name in re.findall(r"`([^`]+)`", row)
    }
    stated = {canonicalize_name(Requirement(each).name) for path in PROJECTS for each in required(path)}
    assert argued - OWN == stated - OWN


@dataclass(frozen=True)
class Built:
    """What was built from one pyproject.toml: the files in the wheel and in the source distribution, by their names, of
    the latter without the folder that they all are in."""

    project: Path
    wheel: dict[str, bytes]
    sdist: dict[str, bytes]

    @property
    def package(self) -> Path:
        """The folder of the import package."""
        [folder] = load(self.project)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        return self.project.parent / str(folder)

    def info(self, name: str) -> str:
        """A file of the wheel's metadata."""
        [found] = [file for file in self.wheel if re.fullmatch(rf"[^/]*\.dist-info/{re.escape(name)}", file)]
        return self.wheel[found].decode()


@pytest.fixture(scope="module", params=PROJECTS, ids=lambda path: str(path.relative_to(ROOT)))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The distributions, built with the pinned hatchling of this environment, the wheel from the tree."""
    project: Path = request.param
    into = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(into)]
    done = subprocess.run([*command, str(project.parent)], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    [wheel_path] = into.glob("*.whl")
    [sdist_path] = into.glob("*.tar.gz")
    with zipfile.ZipFile(wheel_path) as wheel, tarfile.open(sdist_path) as sdist:
        folder = sdist_path.name.removesuffix(".tar.gz")
        texts = {member.name: sdist.extractfile(member) for member in sdist}
        assert all(file is not None and name.startswith(f"{folder}/") for name, file in texts.items())
        return Built(
            project,
            {name: wheel.read(name) for name in wheel.namelist()},
            {name.removeprefix(f"{folder}/"): file.read() for name, file in texts.items() if file is not None},
        )


def files_of(folder: Path, below: Path) -> dict[str, bytes]:
    """All files of a folder but caches, by their path from another folder that it is in."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(below).as_posix(): path.read_bytes() for path in paths}


def test_a_wheel_holds_the_package_to_the_last_file_and_nothing_else(built: Built) -> None:
    """So no test, no cache and no folder of somebody else's can be in it, and no data file can be missing."""
    inside = {name: data for name, data in built.wheel.items() if ".dist-info/" not in name}
    assert inside == files_of(built.package, built.package.parent)
    assert f"{built.package.name}/py.typed" in inside
    metadata = {name.partition(".dist-info/")[2] for name in built.wheel.keys() - inside.keys()}
    assert metadata == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_a_distribution_holds_only_kinds_of_files_that_belong_there(built: Built) -> None:
    """A key, a dump or a note that lies about in the tree would be shipped with it. Whoever adds a file of another kind
    on purpose adds the kind here."""
    kinds = {".py", ".html"}
    strange = {name for name in built.wheel if ".dist-info/" not in name and Path(name).suffix not in kinds}
    assert {name for name in strange if Path(name).name != "py.typed"} == set()
    kinds |= {".md", ".toml", ".proto", ".svg", ".yaml"}
    strange = {name for name in built.sdist if Path(name).suffix not in kinds}
    known = {"py.typed", "LICENSE", "PKG-INFO", ".gitignore", "Containerfile"}
    assert {name for name in strange if Path(name).name not in known} == set()


def test_no_distribution_holds_tests_or_secrets(built: Built) -> None:
    for name, data in [*built.wheel.items(), *built.sdist.items()]:
        parts = Path(name).parts
        assert not {"tests", "__pycache__", ".git", ".venv", "dist"} & set(parts), name
        assert not re.match(r"test_|conftest\.", parts[-1]), name
        assert not re.search(rb"-----BEGIN [A-Z ]*PRIVATE KEY", data), name


def test_a_source_distribution_holds_what_building_takes(built: Built) -> None:
    """.ci/run builds from it and installs the result, without the repo."""
    package = files_of(built.package, built.project.parent)
    assert package.items() <= built.sdist.items()
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= built.sdist.keys()
    assert built.sdist["pyproject.toml"] == built.project.read_bytes()


def test_metadata_says_what_it_is(built: Built) -> None:
    project = load(built.project)["project"]
    metadata = email.message_from_string(built.info("METADATA"))
    assert metadata["Name"] == project["name"]
    assert metadata["Version"] == project["version"]
    assert metadata["Summary"] == project["description"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (built.project.parent / "README.md").read_text(encoding="utf-8")
    assert "Typing :: Typed" in (metadata.get_all("Classifier") or [])
    assert built.sdist["PKG-INFO"].decode() == built.info("METADATA")
    assert built.info("licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Tag: py3-none-any" in built.info("WHEEL").splitlines()


def test_entry_points_lead_somewhere(built: Built) -> None:
    """They are those of pyproject.toml, and can be imported."""
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign] # names keep their case
    parser.read_string(built.info("entry_points.txt"))
    found = {group: dict(parser.items(group)) for group in parser.sections()}
    project = load(built.project)["project"]
    stated = dict(project.get("entry-points", {}))
    if "scripts" in project:
        stated["console_scripts"] = project["scripts"]
    assert found == stated
    for group, entries in found.items():
        for name, value in entries.items():
            assert importlib.metadata.EntryPoint(name, value, group).load() is not None


def test_the_command_is_there_and_each_plugin_offers_itself() -> None:
    assert load(ROOT / "pyproject.toml")["project"]["scripts"] == {"trio-federation": "trio_federation.cli:main"}
    for path in PROJECTS[1:]:
        assert load(path)["project"]["entry-points"]["trio_federation"], path


def archive(path: Path, *contents: tuple[str, str]) -> None:
    """Write a wheel, or what looks like one, with files of these names and texts, in this order."""
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in contents:
            wheel.writestr(zipfile.ZipInfo(name), text)


def test_two_builds_are_held_against_each_other(tmp_path: Path) -> None:
    """A file that is missing, that has another content, and that stands at another place of the archive."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
        archive(folder / "same.whl", ("a", "1"), ("b", "2"))
    assert list(package.differences(here, elsewhere)) == []
    archive(elsewhere / "more.whl", ("a", "1"))
    archive(here / "text.whl", ("a", "1"), ("b", "2"))
    archive(elsewhere / "text.whl", ("a", "1"), ("b", "3"), ("c", "4"))
    archive(here / "order.whl", ("a", "1"), ("b", "2"))
    archive(elsewhere / "order.whl", ("b", "2"), ("a", "1"))
    assert list(package.differences(here, elsewhere)) == [
        "more.whl: built only elsewhere",
        "order.whl: not the same bytes",
        "  not in the same order",
        "text.whl: not the same bytes",
        f"  b: sha256 {package.digest(b'2')} here, {package.digest(b'3')} elsewhere",
        "  c: only elsewhere",
    ]


def test_files_of_another_mode_date_or_owner_are_seen(tmp_path: Path) -> None:
    """In a source distribution, which hatchling does not take them over into."""
    for name, mode, owner in (("here", 0o644, ""), ("elsewhere", 0o600, "somebody")):
        (tmp_path / name).mkdir()
        with tarfile.open(tmp_path / name / "a.tar.gz", "w:gz") as sdist:
            member = tarfile.TarInfo("a/b")
            member.mode, member.uname, member.mtime = mode, owner, len(owner)
            sdist.addfile(member)
    assert list(package.differences(tmp_path / "here", tmp_path / "elsewhere")) == [
        "a.tar.gz: not the same bytes",
        "  a/b: mode 0o644 here, 0o600 elsewhere",
        "  a/b: date 0 here, 8 elsewhere",
        "  a/b: owner (0, 0, '', '') here, (0, 0, 'somebody', '') elsewhere",
    ]


def test_a_build_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[build-system]\nrequires = []\nbuild-backend = 'nothing_there'\n")
    with pytest.raises(SystemExit, match=r"(?s)building .* failed, exit code 1:.*nothing_there"):
        package.build(tmp_path, tmp_path / "dist", "--wheel", umask=0o022, environment=os.environ)

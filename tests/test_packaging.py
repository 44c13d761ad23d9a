"""What is installed is what is pinned: constraints.txt names one version of every package that running, testing,
checking and building need, and neither it nor a pyproject.toml says where packages come from."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    stated = {canonicalize_name(Requirement(each).name) for each in load(path)["project"]["dependencies"]}
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


def test_the_command_and_the_types_are_part_of_the_distribution() -> None:
    assert load(ROOT / "pyproject.toml")["project"]["scripts"] == {"trio-federation": "trio_federation.cli:main"}
    assert (ROOT / "trio_federation" / "py.typed").is_file()
    assert all(list(path.parent.glob("src/*/py.typed")) for path in PROJECTS[1:])

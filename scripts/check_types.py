"""Checks programs against what is installed in another environment, as strictly as mypy can: whether the wheels bring
their types, and whether those let people write what the documentation shows.

    check_types.py --python VENV/bin/python README.md program.py folder …

Of a Markdown file every block of Python is checked, each as a module of its own; of a folder every module in it. They
are copied into one folder, from which neither this project's code nor its settings can be seen."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: what is set beside mypy's defaults
SETTINGS = "[mypy]\nstrict = True\nenable_error_code = ignore-without-code\n"


def blocks(text: str) -> list[str]:
    """The blocks of Python in a Markdown text. Empty lines stand for what comes before each, so that complaints about a
    line give its number in the text."""
    found = []
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S):
        found.append("\n" * text.count("\n", 0, match.start(1)) + match[1])
    return found


def lay_out(source: Path, into: Path) -> None:
    """Copy a file or a folder that is to be checked into the folder `into`.

    Raises SystemExit where it is a Markdown file without a block of Python."""
    if source.suffix == ".md":
        found = blocks(source.read_text(encoding="utf-8"))
        if not found:
            raise SystemExit(f"{source} has no block of Python that could be checked")
        for number, block in enumerate(found, 1):
            (into / f"{source.stem.lower()}_{number}.py").write_text(block, encoding="utf-8")
    elif source.is_dir():
        shutil.copytree(source, into, ignore=shutil.ignore_patterns(".*", "__pycache__"), dirs_exist_ok=True)
    else:
        shutil.copy(source, into)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: no errors; else mypy's, with the errors on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="the interpreter that it is installed for")
    parser.add_argument("sources", type=Path, nargs="+", help="Markdown files, modules, folders of modules")
    options = parser.parse_args(arguments)
    # Not resolved: what tells an environment's interpreter from that which it was made with is its path.
    python: Path = options.python.absolute()
    with tempfile.TemporaryDirectory() as folder:
        for source in options.sources:
            lay_out(source, Path(folder))
        Path(folder, "mypy.ini").write_text(SETTINGS, encoding="utf-8")
        command = [sys.executable, "-m", "mypy", "--no-error-summary", "--python-executable", str(python), "."]
        return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

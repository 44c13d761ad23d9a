"""Fuzzing that is led by coverage: `python -m tests.fuzz.with_atheris TARGET --seconds 60` mutates the inputs of one
target, keeps those that reach code which none has reached before, and goes on from them. It stops at the first input
that raises, or hangs, and says which file to keep. Needs atheris, which is no dependency of the development set-up:
`.venv/bin/pip install atheris`. The targets are in `targets.py`; what a run begins with is in `inputs.py`."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.apiserver.build import cache_folder

#: what coverage is looked at in: our packages, and those that see bytes of others before we do
INSTRUMENTED = [
    "trio_federation",
    "trio_federation_kubernetes",
    "grpclib",
    "h2",
    "hpack",
    "hyperframe",
    "hypercorn",
    "h11",
]
#: seconds after which an input hangs
HANGS = 20
#: bytes of the longest input
LONGEST = 4096
#: where inputs are kept that reach something, from one run to the next, and those that find a fault
FOLDER = cache_folder(os.environ).with_name("fuzzed")


def main() -> None:
    """Fuzz one target for a while. Exit code 0: nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.with_atheris", description=main.__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60, help="for how long; default 60")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="for what is reached and found; default %(default)s"
    )
    options = parser.parse_args()
    try:
        import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise SystemExit("atheris is not installed; run `.venv/bin/pip install atheris`") from error
    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.inputs import CORPUS, inputs
        from tests.fuzz.targets import TARGETS
    if options.target not in TARGETS:
        parser.error(f"there is no target {options.target!r}, choose one of {', '.join(TARGETS)}")
    feed = TARGETS[options.target]
    reached = options.folder / options.target
    reached.mkdir(parents=True, exist_ok=True)
    for data in inputs(options.target):
        (reached / named(data)).write_bytes(data)

    def feed_and_keep(data: bytes) -> None:
        try:
            feed(data)
        except BaseException:
            traceback.print_exc()
            found = options.folder / f"{options.target}-{named(data)}"
            found.write_bytes(data)
            sys.stderr.write(f"found {found}: mend it, and keep the file as {CORPUS / options.target}/WHAT-IT-IS\n")
            sys.stderr.flush()
            os._exit(1)

    settings = [f"-max_total_time={options.seconds}", f"-timeout={HANGS}", f"-max_len={LONGEST}", "-rss_limit_mb=4096"]
    hung = f"-artifact_prefix={options.folder}/{options.target}-"
    arguments: list[Any] = [sys.argv[0], *settings, hung, "-print_final_stats=1", str(reached)]
    atheris.Setup(arguments, feed_and_keep)
    atheris.Fuzz()


def named(data: bytes) -> str:
    """A name for an input that follows from it."""
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    main()

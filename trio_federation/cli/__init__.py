"""The command line: what people type. Commands only read options, call the rooms below and show what comes of it."""

from trio_federation.cli.main import main

__all__ = ["main"]

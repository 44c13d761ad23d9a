"""How logs come out: one form for our own and for libraries', levels, terminals, secrets, and a second set-up."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import structlog

from trio_federation.config import Log, Secret
from trio_federation.logs import ROOT, configure, get_logger, mask_secrets


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger(ROOT)
    before = (list(root.handlers), root.level, ours.level, structlog.get_config())
    yield
    root.handlers[:], root.level, ours.level = before[:3]
    structlog.configure(**before[3])
    # levels are cached by each logger, and only this way forgotten
    root.setLevel(before[1])


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines() -> None:
    stream = io.StringIO()
    configure(Log(), stream)
    get_logger("agent").bind(cluster="west").info("connected", hub="h:1", tries=2)
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "connected",
        "level": "info",
        "logger": "trio_federation.agent",
        "cluster": "west",
        "hub": "h:1",
        "tries": 2,
    }


@pytest.mark.parametrize(
    "wanted, stream, is_json",
    [
        ("auto", io.StringIO(), True),
        ("auto", Terminal(), False),
        ("json", Terminal(), True),
        ("console", io.StringIO(), False),
    ],
)
def test_format(
    wanted: Literal["auto", "console", "json"],
    stream: io.StringIO,
    is_json: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    configure(Log(format=wanted), stream)
    get_logger("agent").info("hello", key="value")
    text = stream.getvalue()
    assert text.startswith("{") is is_json
    assert ("\x1b[" in text) is (isinstance(stream, Terminal) and not is_json)
    assert "hello" in text
    assert "value" in text


@pytest.mark.parametrize("name, value", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_are_only_for_those_who_want_them(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    texts = []
    for refused in (False, True):
        if refused:
            monkeypatch.setenv(name, value)
        stream = Terminal()
        configure(Log(), stream)
        get_logger("agent").warning("hello", key="value")
        texts.append(stream.getvalue())
    # Still to be read by people.
    assert ["\x1b[" in text for text in texts] == [True, False]
    assert texts[1].rstrip().endswith("key=value")
    monkeypatch.setenv("NO_COLOR", "")  # which counts as unset
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    configure(Log(), stream)
    get_logger("agent").warning("hello")
    assert "\x1b[" in stream.getvalue()


def test_a_process_without_a_standard_error_logs_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    formats: list[Literal["auto", "console", "json"]] = ["auto", "console", "json"]
    for wanted in formats:
        configure(Log(format=wanted))
        get_logger("agent").error("hello", key="value")


def test_standard_error_is_where_logs_go(capsys: pytest.CaptureFixture[str]) -> None:
    configure(Log(format="json"))
    get_logger("agent").info("hello")
    captured = capsys.readouterr()
    assert (captured.out, json.loads(captured.err)["event"]) == ("", "hello")


@pytest.mark.parametrize(
    "level, own, libraries",
    [
        ("debug", ["debug", "info", "warning", "error"], ["warning", "error"]),
        ("info", ["info", "warning", "error"], ["warning", "error"]),
        ("warning", ["warning", "error"], ["warning", "error"]),
        ("error", ["error"], ["error"]),
    ],
)
def test_levels(level: Literal["debug", "info", "warning", "error"], own: list[str], libraries: list[str]) -> None:
    stream = io.StringIO()
    configure(Log(level=level), stream)
    # A library that has set a level of its own, as hypercorn does.
    noisy = logging.getLogger("noisy.library")
    noisy.setLevel(logging.DEBUG)
    for logger in (
        get_logger("agent"),
        logging.getLogger("grpclib"),
        noisy,
        logging.getLogger("trio_federation_other"),
    ):
        for name in ("debug", "info", "warning", "error"):
            getattr(logger, name)("hello")
    found = [(line["logger"], line["level"]) for line in lines(stream)]
    assert found == [
        *(("trio_federation.agent", name) for name in own),
        *((logger, name) for logger in ("grpclib", "noisy.library", "trio_federation_other") for name in libraries),
    ]


def test_libraries_log_in_the_same_form() -> None:
    stream = io.StringIO()
    configure(Log(), stream)
    logging.getLogger("asyncio").warning("took %s s", 5)
    logging.getLogger("trio_federation.admin").info("plain logging inside of this project")
    first, second = lines(stream)
    assert (first["event"], first["level"], first["logger"]) == ("took 5 s", "warning", "asyncio")
    assert "timestamp" in first
    assert second["logger"] == "trio_federation.admin"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_secrets_are_masked_everywhere(stream: io.StringIO) -> None:
    configure(Log(), stream)
    secret = Secret("hunter2")
    logger = get_logger("agent")
    logger.bind(bound=secret).info("with %s", secret, key=secret, nested={"list": [secret]})
    logging.getLogger("grpclib").warning("with %s", secret)
    try:
        raise ValueError(secret)
    except ValueError:
        logger.exception("raised")
        logging.getLogger("grpclib").exception("raised")
    text = stream.getvalue()
    assert text.count("***") == 7
    assert text.count("ValueError: Secret") == 2
    assert "hunter2" not in text


def test_tracebacks_show_no_local_variables() -> None:
    for stream in (io.StringIO(), Terminal()):
        configure(Log(), stream)
        credential = "hunter" + str(len("ab"))
        try:
            raise ValueError(len(credential))
        except ValueError:
            get_logger("agent").exception("raised")
            logging.getLogger("grpclib").exception("raised")
        assert "ValueError: 7" in stream.getvalue()
        assert "hunter2" not in stream.getvalue()


def test_mask_secrets_leaves_other_values_alone() -> None:
    event = {"event": "x", "a": Secret("hunter2"), "b": "hunter", "c": None}
    assert mask_secrets(None, "info", event) == {"event": "x", "a": "***", "b": "hunter", "c": None}


def test_values_that_json_does_not_know() -> None:
    stream = io.StringIO()
    configure(Log(), stream)
    get_logger("agent").info("odd", what=object, raw=b"\xff", text="\udc80\u2028\n")
    (line,) = lines(stream)
    assert (line["raw"], line["text"]) == ("b'\\xff'", "\udc80\u2028\n")
    assert len(stream.getvalue().splitlines()) == 1


def test_a_second_set_up_replaces_the_first() -> None:
    logger = get_logger("agent")
    first, second = io.StringIO(), io.StringIO()
    foreign = logging.NullHandler()
    logging.getLogger().addHandler(foreign)
    configure(Log(), first)
    logger.info("one")
    configure(Log(level="debug"), second)
    configure(Log(level="debug"), second)
    logger.debug("two")
    logging.getLogger("grpclib").warning("three")
    assert [line["event"] for line in lines(first)] == ["one"]
    assert [line["event"] for line in lines(second)] == ["two", "three"]
    assert foreign in logging.getLogger().handlers


@pytest.mark.parametrize(
    "name, full",
    [
        ("agent", "trio_federation.agent"),
        ("source.fixtures", "trio_federation.source.fixtures"),
        ("trio_federation", "trio_federation"),
        ("trio_federation.hub", "trio_federation.hub"),
        ("trio_federation_fixtures", "trio_federation.trio_federation_fixtures"),
    ],
)
def test_loggers_are_named_under_the_project(name: str, full: str) -> None:
    stream = io.StringIO()
    configure(Log(), stream)
    get_logger(name).info("x")
    assert lines(stream)[0]["logger"] == full

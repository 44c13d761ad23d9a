"""Values that hold secrets do not show them, whoever prints, formats, logs or serialises one; nor do errors carry along
what was at hand where they were raised. And the source itself: no secret is compared but in constant time, and none is
put into a text or a line of the log.

To copy or pickle a value is not to show it: the copy is as good as the value."""

from __future__ import annotations

import ast
import dataclasses
import gc
import hmac
import io
import json
import pprint
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import rich.pretty
import structlog
import trustme

import trio_federation
from trio_federation import config, credentials, logs
from trio_federation.admin.protection import token_fault
from trio_federation.cli.client import Access
from trio_federation.config import (
    Admin,
    Config,
    Federation,
    HubSettings,
    Log,
    PluginTable,
    Secret,
    load,
    read_admin_token_file,
    read_agent_secret_file,
    read_deny_file,
    read_hub_secret_file,
)
from trio_federation.credentials import DenyList, make_token, read_deny_list, read_token
from trio_federation.errors import ConfigurationError, FederationError
from trio_federation.identity import OwnIdentity, Part, Presented, Trusted, call_metadata, identify, mixed_up
from trio_federation.keyring import Keyring
from trio_federation.reload import FileBacked

HUBS = "hub-key-Rk7vPz2mQx9w"
NEXT = "next-key-Tb4nYc8sLd3f"
ADMIN = "admin-key-Wm6jXe1hGu5a"
OPTION = "option-key-Zq3rFt9kVy7p"
WEST = make_token(HUBS, "west", 3)
EVERY = {"hub": HUBS, "next": NEXT, "admin": ADMIN, "option": OPTION, "MAC": WEST.rpartition(".")[2]}


def shown_in(text: str) -> list[str]:
    """The names of the secrets of which some eight characters stand in a text (of a MAC: twelve)."""
    found = []
    for name, secret in EVERY.items():
        long = 12 if name == "MAC" else 8
        own = secret.partition("key-")[2] or secret
        if any(own[start : start + long] in text for start in range(len(own) - long + 1)):
            found.append(name)
    return found


def test_the_search_finds_every_secret() -> None:
    for name, secret in EVERY.items():
        assert shown_in(f"a{secret}b") == [name]
        assert shown_in(secret[-12:]) == [name]
        assert shown_in(secret[-7:]) == []
    assert shown_in(repr({"a": [WEST.encode()]})) == ["MAC"]


# --- values ----------------------------------------------------------------------------------------------------------


def _config(folder: Path) -> Config:
    """A configuration with a secret in every place for one."""
    for name, text in {"hub": HUBS, "next": NEXT, "admin": ADMIN, "west": WEST, "deny": "east\nwest.1\n"}.items():
        (folder / name).write_text(text + "\n")
    (folder / "config.toml").write_text(
        'cluster_id = "west"\n[federation]\nhubs = ["127.0.0.1:1"]\nsecret_file = "west"\n'
        '[hub]\nbind = "127.0.0.1:0"\naccept = ["token"]\nsecret_file = "hub"\nnext_secret_file = "next"\n'
        'deny_file = "deny"\n'
        f'[admin]\ntoken_file = "admin"\n[[source]]\ntype = "any"\npassword = "{OPTION}"\n'
    )
    return load(folder / "config.toml", {})


def _inline() -> Config:
    return Config(
        cluster_id="west",
        federation=Federation(secret=Secret(WEST)),
        hub=HubSettings(secret=Secret(HUBS)),
        admin=Admin(token=Secret(ADMIN)),
    )


def _values(folder: Path) -> dict[str, object]:
    """One of each kind of value that has a secret in it."""
    loaded = _config(folder)
    keyring = Keyring(loaded)
    token = read_token(WEST)
    assert token is not None
    return {
        "Secret": Secret(HUBS),
        "Token": token,
        "Presented": Presented(True, token, frozenset()),
        "Trusted": Trusted(("token",), (HUBS, NEXT), DenyList()),
        "the keyring's Trusted": keyring.trusted(),
        "OwnIdentity": OwnIdentity("west", "1", lambda: WEST),
        "the keyring's OwnIdentity": OwnIdentity("west", "1", keyring.credential),
        "Keyring": keyring,
        "FileBacked": FileBacked("hub.secret_file", [str(folder / "hub")], lambda: Secret(HUBS)),
        "Config": loaded,
        "Config, inline": _inline(),
        "Federation": loaded.federation,
        "HubSettings": loaded.hub,
        "Admin": loaded.admin,
        "PluginTable": PluginTable("any", {"password": OPTION}, "source[0]"),
        "Access": Access(Secret(ADMIN)),
        "admin_token": keyring.admin_token,
        "credential": keyring.credential,
        "read": config.read_admin_token_file,
    }


def _ways() -> dict[str, Callable[[object], str]]:
    """How a value becomes text where somebody shows it."""
    return {
        "repr": repr,
        "str": str,
        "format": lambda value: f"{value}",
        "a width": lambda value: format(str(value), ">300"),
        "percent": lambda value: "%s %r" % (value, value),  # noqa: UP031
        "in a list": lambda value: repr([value]),
        "in a dict": lambda value: repr({"a": (value,)}),
        "pprint": pprint.pformat,
        "rich": rich.pretty.pretty_repr,
        "an error": lambda value: "".join(traceback.format_exception(ValueError(value))),
        "a KeyError": lambda value: str(KeyError(value)),
        "json": lambda value: json.dumps(value, default=repr),
    }


def test_no_way_of_showing_a_value_shows_its_secret(tmp_path: Path) -> None:
    leaks = [
        (name, way, found)
        for name, value in _values(tmp_path).items()
        for way, shown in _ways().items()
        if (found := shown_in(shown(value)))
    ]
    assert leaks == []


_SERIALISERS = ("json", "json that asks", "msgpack", "builtins", "asdict")
_OF_IDENTITY = ("Token", "Presented", "Trusted", "the keyring's Trusted")


@pytest.mark.parametrize("how", _SERIALISERS)
def test_no_serialiser_writes_a_secret(how: str, tmp_path: Path) -> None:
    """Whether it is refused or masked. Options of a plugin are what stands in the file, and are left to it."""
    values = _values(tmp_path)
    assert _written(how, {name: value for name, value in values.items() if name not in _OF_IDENTITY}) == []


@pytest.mark.parametrize("how", _SERIALISERS)
def test_no_serialiser_writes_what_identity_holds(how: str, tmp_path: Path) -> None:
    """A dataclass is a record to a serialiser, which writes each of its fields, shown by repr or not."""
    values = _values(tmp_path)
    assert _written(how, {name: values[name] for name in _OF_IDENTITY}) == []


def _written(how: str, values: Mapping[str, object]) -> list[tuple[str, list[str]]]:
    """What a serialiser gives away of values, by their names."""
    serialisers: dict[str, Callable[[object], object]] = {
        "json": msgspec.json.encode,
        "json that asks": lambda value: msgspec.json.encode(value, enc_hook=str),
        "msgpack": lambda value: msgspec.msgpack.encode(value, enc_hook=repr),
        "builtins": lambda value: msgspec.to_builtins(value, enc_hook=str),
        "asdict": lambda value: dataclasses.asdict(value),  # type: ignore[call-overload]
    }
    leaks = []
    for name, value in values.items():
        if isinstance(value, PluginTable):
            continue
        if isinstance(value, Config):
            value = msgspec.structs.replace(value, source=())
        try:
            written = serialisers[how](value)
        except TypeError as error:
            written = error
        if found := shown_in(written.decode("latin-1") if isinstance(written, bytes) else repr(written)):
            leaks.append((name, found))
    return leaks


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_log_shows_a_secret(form: str, tmp_path: Path) -> None:
    """Neither a value that is logged, nor one beside an error, nor one in a text that the standard library formats."""
    stream = io.StringIO()
    try:
        logs.configure(Log(level="debug", format=form), stream)  # type: ignore[arg-type]
        log = logs.get_logger("secrets")
        for name, value in _values(tmp_path).items():
            log.warning("anything", name=name, value=value, several=[value], by_name={"a": value})
            try:
                raise ValueError(value)
            except ValueError:
                log.exception("anything", value=value)
            log.info("%s and %r", value, value)
    finally:
        logs.configure(Log(), io.StringIO())
        structlog.reset_defaults()
    assert stream.getvalue().count("anything") >= 2 * len(_values(tmp_path))
    assert shown_in(stream.getvalue()) == []


# --- errors ----------------------------------------------------------------------------------------------------------


def _carried(error: BaseException) -> str:
    """All that an error has with it: its traceback as it is printed, what it was made of, what it remembers, and the
    same of every error that it comes from or stands beside, also of one that is not printed."""
    texts = ["".join(traceback.format_exception(error))]
    waiting: list[BaseException] = [error]
    seen: list[BaseException] = []
    while waiting:
        each = waiting.pop()
        if any(each is known for known in seen):
            continue
        seen.append(each)
        texts += [repr(each), str(each), repr(each.args), repr(vars(each)), repr(getattr(each, "__notes__", []))]
        waiting += [other for other in (each.__cause__, each.__context__) if other is not None]
        waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else []
    return "\n".join(texts)


def _shown_by(function: Callable[[], object]) -> str:
    """What a call shows: by what it returns, or by what it raises."""
    try:
        return repr(function())
    except (ValueError, FederationError) as error:
        return _carried(error)


def test_what_an_error_carries_is_found_wherever_it_is() -> None:
    def raised(how: Callable[[], None]) -> BaseException:
        try:
            how()
        except BaseException as error:
            return error
        raise AssertionError

    def suppressed() -> None:
        try:
            raise KeyError(HUBS)
        except KeyError:
            raise ValueError("nothing to see") from None

    def noted() -> None:
        error = ValueError("nothing")
        error.add_note(HUBS)
        raise ExceptionGroup("several", [error])

    for how in (suppressed, noted):
        assert shown_in(_carried(raised(how))) == ["hub"]
    assert shown_in("".join(traceback.format_exception(raised(suppressed)))) == []


#: what may stand in a file in the place of a secret, by what is wrong with it
BAD_CONTENTS = {
    "not UTF-8": HUBS.encode() + b"\xff\xfe",
    "UTF-16": HUBS.encode("utf-16"),
    "too long": HUBS.encode() * 300,
    "cut in two": HUBS.encode() + "é".encode() * 3000,
    "two lines": f"{HUBS}\n{NEXT}\n".encode(),
    "blanks": f" {HUBS} ".encode(),
    "a control character": f"{HUBS}\0{NEXT}".encode(),
    "no ASCII": f"{HUBS}é".encode(),
    "a line break of Windows": f"{HUBS}\r\n\r\n".encode(),
    "empty": b"",
    "a token": WEST.encode(),
    "half a token": WEST[:-8].encode(),
    "a token in capitals": WEST.upper().encode(),
    "the token of another": make_token(HUBS, "east").encode(),
}


@pytest.mark.parametrize("contents", BAD_CONTENTS.values(), ids=BAD_CONTENTS)
def test_errors_about_the_file_of_a_secret_carry_nothing_of_it(contents: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(contents)
    for read in (
        read_hub_secret_file,
        read_admin_token_file,
        lambda path: read_agent_secret_file(path, "west"),
        read_deny_file,
    ):
        told = _shown_by(lambda read=read: read(str(file)))  # type: ignore[misc]
        assert shown_in(told) == []
        assert len(told) > 5
    for text in (contents.decode("latin-1"), f"west {contents!r}", f"{WEST} # denied"):
        assert shown_in(repr(read_deny_list(text))) == []


@pytest.mark.parametrize("contents", BAD_CONTENTS.values(), ids=BAD_CONTENTS)
async def test_a_file_that_becomes_bad_is_told_without_its_contents(contents: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    tellings = []
    for read in (read_hub_secret_file, read_admin_token_file, read_deny_file):
        file.write_text("good-enough-for-all\n" if read is not read_deny_file else "east\n")
        item: FileBacked[object] = FileBacked("any", [str(file)], lambda read=read: read(str(file)), in_thread=False)  # type: ignore[misc]
        file.write_bytes(contents)
        with structlog.testing.capture_logs() as told:
            await item.reread()
            await item.reread()
        tellings += told
        assert shown_in(repr(item)) == []
    assert tellings
    assert shown_in(repr(tellings)) == []


def _configurations() -> dict[str, bytes]:
    """Files that are no good, with a secret in them, by what is wrong."""
    texts = {
        "a key that is not there": f'[hub]\nsecrets = "{HUBS}"\n',
        "the wrong table": f'cluster_id = "west"\nsecret = "{HUBS}"\n',
        "an array": f'[hub]\nsecret = ["{HUBS}"]\n',
        "a table": f'[hub]\nsecret = {{ text = "{HUBS}" }}\n',
        "no ASCII": f'[hub]\nsecret = "{HUBS}é"\n',
        "a line break": f'[hub]\nsecret = """\n{HUBS}\n{NEXT}"""\n',
        "too long": f'[hub]\nsecret = "{HUBS * 300}"\n',
        "a token": f'[hub]\nsecret = "{WEST}"\n',
        "the token of another": f'cluster_id = "east"\n[federation]\nsecret = "{WEST}"\n',
        "half a token": f'cluster_id = "west"\n[federation]\nsecret = "{WEST[:-9]}"\n',
        "beside a file": f'[hub]\nsecret = "{HUBS}"\nsecret_file = "nothing"\n',
        "a short admin token": f'[hub]\nsecret = "{HUBS}"\n[admin]\ntoken = "{ADMIN[6:20]}"\n',
        "an admin token beside a file": f'[hub]\nsecret = "{HUBS}"\n[admin]\ntoken = "{ADMIN}"\ntoken_file = "a"\n',
        "a secret for the second": f'[hub]\nsecret = "{HUBS}"\nnext_secret = "{NEXT}"\n',
        "a token as the cluster's id": f'cluster_id = "{WEST}"\n',
        "a token as a file": f'cluster_id = "west"\n[federation]\nsecret_file = "{WEST}"\n',
        "a token as the admin's file": f'[hub]\nsecret = "{HUBS}"\n[admin]\ntoken_file = "{WEST}"\n',
        "a token as a way": f'[hub]\nsecret = "{HUBS}"\naccept = ["{WEST}"]\n',
        "a token as a deny list": f'[hub]\nsecret = "{HUBS}"\ndeny_file = "{WEST}"\n',
        "a token as a key": f'[hub]\nsecret = "{HUBS}"\n"{WEST}" = true\n',
        "an option": f'cluster_id = "west"\n[[source]]\ntype = 7\npassword = "{OPTION}"\n',
        "no end of a string": f'[hub]\nsecret = "{HUBS}\n',
        "no quotes": f"[hub]\nsecret = {HUBS}\n",
        "twice": f'[hub]\nsecret = "{HUBS}"\nsecret = "{NEXT}"\n',
        "a broken escape": f'[hub]\nsecret = "{HUBS}\\q"\n',
    }
    # On loopback, so that nothing else is wrong.
    there = '[hub]\nbind = "127.0.0.1:0"\n'
    files = {name: text.replace("[hub]\n", there, 1).encode() for name, text in texts.items()}
    files["not UTF-8"] = f'[hub]\nsecret = "{HUBS}'.encode() + b'\xff"\n'
    return files


@pytest.mark.parametrize("contents", _configurations().values(), ids=_configurations())
def test_errors_of_a_configuration_carry_no_secret(
    contents: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Relative, so that no name is cut off before the end of what is in it.
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_bytes(contents)
    environment = {"TRIO_FEDERATION_SECRET": f"{NEXT}\n", "LOCAL_CLUSTER_ID": ""}
    for environ in ({}, environment):
        with pytest.raises(ConfigurationError) as caught:
            Keyring(load("config.toml", environ))
        assert shown_in(_carried(caught.value)) == []


def test_errors_about_a_key_carry_nothing_of_it(tmp_path: Path) -> None:
    """Of a private key that is broken, encrypted or another's; and of what stands in its file instead of one."""
    authority = trustme.CA()
    issued = authority.issue_cert("hub.example")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "crt")
    good = issued.private_key_pem.bytes()
    another = authority.issue_cert("another.example").private_key_pem.bytes()
    (tmp_path / "hub").write_text(HUBS)
    for bad in (another, good[: len(good) // 2], HUBS.encode(), good.replace(b"PRIVATE", b"SECRET"), WEST.encode()):
        (tmp_path / "key").write_bytes(bad)
        (tmp_path / "config.toml").write_text(
            '[hub]\nsecret_file = "hub"\n[hub.tls]\ncert_file = "crt"\nkey_file = "key"\n'
            '[admin.tls]\ncert_file = "crt"\nkey_file = "key"\n'
        )
        with pytest.raises(ConfigurationError) as caught:
            Keyring(load(tmp_path / "config.toml", {}))
        carried = _carried(caught.value)
        assert shown_in(carried) == []
        for line in [*good.splitlines(), *another.splitlines()]:
            if b"-----" not in line:
                assert line.decode()[:16] not in carried


def test_errors_about_a_caller_carry_no_credential() -> None:
    """Whatever is sent as one, in whichever mode, and whatever else is wrong with the call."""
    other = make_token(HUBS, "east")
    sent = [HUBS, NEXT, WEST, other, WEST[:-5], WEST.upper(), f"{WEST} ", f"{HUBS}é", "", OPTION]
    headers = [f"{scheme}{text}" for text in sent for scheme in ("Bearer ", "bearer  ", "Basic ", "")]
    trusteds = [
        Trusted(accept, secrets, denied)
        for accept in (("shared",), ("token",), ("shared", "token"), ("token+certificate",))
        for secrets in ((HUBS,), (OPTION, NEXT))
        for denied in (DenyList(), DenyList(frozenset({"west"})), DenyList(frozenset(), frozenset({("west", 3)})))
    ]
    refused = 0
    for header in headers:
        for trusted in trusteds:
            for claims in (
                {},
                {"x-federation-cluster": "west"},
                {"x-federation-cluster": "w", "x-federation-uid": "ü"},
            ):
                metadata = {"authorization": header} | claims
                told = _shown_by(lambda metadata=metadata, trusted=trusted: identify(metadata, (), trusted))  # type: ignore[misc]
                refused += "Traceback" in told
                assert shown_in(told) == []
                assert shown_in(str(mixed_up(metadata, trusted))) == []
    assert refused > 100


def test_a_token_in_the_wrong_header_is_not_repeated() -> None:
    """As somebody writes it who has mixed up two headers: it may be a good one."""
    for key in ("x-federation-cluster", "x-federation-instance", "x-federation-uid"):
        metadata = {"authorization": f"Bearer {HUBS}", "x-federation-cluster": "west"} | {key: f"Bearer {WEST}"}
        with pytest.raises(FederationError) as caught:
            identify(metadata, (), Trusted(("shared",), (HUBS,)))
        assert shown_in(_carried(caught.value)) == []


def test_a_refused_request_is_told_without_what_it_has_sent() -> None:
    for sent in (ADMIN, f"Bearer {ADMIN}x", f"Basic {ADMIN}", f"Bearer {ADMIN}\xff", f"Bearer{ADMIN}"):
        assert token_fault([sent.encode("latin-1")], ADMIN) is not None
        assert shown_in(str(token_fault([sent.encode("latin-1")], ADMIN))) == []
        assert shown_in(str(token_fault([sent.encode("latin-1")] * 2, ADMIN))) == []


@pytest.mark.parametrize(
    "secret, cluster_id, serial",
    [(HUBS, WEST, 1), (HUBS, HUBS.upper(), 1), (HUBS, "west", 0), (HUBS, "west", 2**31), (WEST, "west", 1)],
)
def test_errors_about_a_token_that_is_made_carry_no_secret(secret: str, cluster_id: str, serial: int) -> None:
    carried = _shown_by(lambda: make_token(secret, cluster_id, serial))
    assert "ValueError" in carried
    assert "MAC" not in shown_in(carried)
    assert secret not in carried


# --- the source ------------------------------------------------------------------------------------------------------

#: names that hold a secret as text, wherever they are
_SECRET_NAMES = frozenset({"secret", "token", "mac", "credential", "password", "authorization", "sent", "_text"})
_LOGGING = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log", "msg"})


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _reveals(node: ast.AST) -> bool:
    """Whether a call of `.reveal()` is anywhere in it."""
    return any(isinstance(each, ast.Call) and _name_of(each.func) == "reveal" for each in ast.walk(node))


def _is_secret(node: ast.expr) -> bool:
    """Whether an expression is a secret's text: it is revealed, or called like one."""
    return _name_of(node) in _SECRET_NAMES or (isinstance(node, ast.Call) and _reveals(node))


def _is_known(node: ast.expr) -> bool:
    """Whether it is a constant, whose comparison tells nobody a secret: that there is none, or that it is empty."""
    return isinstance(node, ast.Constant) and node.value in ("", b"", None)


def _compared(node: ast.Compare) -> bool:
    operands = [node.left, *node.comparators]
    equal = any(isinstance(each, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for each in node.ops)
    return equal and any(map(_is_secret, operands)) and not any(map(_is_known, operands))


def _is_header(node: ast.JoinedStr) -> bool:
    """The one text that a credential belongs in: the value of a header."""
    first = node.values[0] if node.values else None
    return isinstance(first, ast.Constant) and first.value == "Bearer " and len(node.values) == 2


def _faults_of(source: str) -> Iterator[tuple[int, str, str]]:
    """The lines of a module that show a secret, or compare one in a time that tells of it: which line, what is wrong,
    and which expression it is."""
    for node in ast.walk(ast.parse(source)):
        found: list[tuple[ast.expr, str]] = []
        if isinstance(node, ast.Compare) and _compared(node):
            found = [(node, "compared in a time that depends on it; use hmac.compare_digest")]
        elif isinstance(node, ast.JoinedStr) and not _is_header(node):
            fields = [each.value for each in node.values if isinstance(each, ast.FormattedValue)]
            found = [(each, "in an f-string") for each in fields if _reveals(each) or _name_of(each) in _SECRET_NAMES]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _reveals(node.right):
            found = [(node, "formatted")]
        elif isinstance(node, ast.Raise) and node.exc is not None and _reveals(node.exc):
            found = [(node.exc, "in an error")]
        elif isinstance(node, ast.Call):
            name = _name_of(node.func)
            given = [*node.args, *(each.value for each in node.keywords)]
            logger = _name_of(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if (name in _LOGGING and logger.removeprefix("_") in ("log", "logger")) or name == "_tell_of_callers":
                found = [(each, "logged") for each in given if _is_secret(each) or _reveals(each)]
            elif name in ("format", "print", "echo", "repr"):
                found = [(each, f"given to {name}") for each in given if _reveals(each)]
        yield from ((expression.lineno, fault, ast.unparse(expression)) for expression, fault in found)


@pytest.mark.parametrize(
    "line, what",
    [
        ("if sent == secret: pass", "compared"),
        ("ok = token.reveal() == other", "compared"),
        ("ok = other != self.token.mac", "compared"),
        ("ok = credential in known", "compared"),
        ("ok = known.get('a') == settings.secret.reveal()", "compared"),
        ("self._text == other._text", "compared"),
        ("f'it is {secret.reveal()}'", "f-string"),
        ("f'it is {credential}'", "f-string"),
        ("f'Bearer {token.reveal()} and more'", "f-string"),
        ("'%s' % secret.reveal()", "formatted"),
        ("'{}'.format(secret.reveal())", "format"),
        ("raise ValueError(secret.reveal())", "error"),
        ("log.warning('anything', secret=secret.reveal())", "logged"),
        ("self._log.debug('anything', value=token)", "logged"),
        ("click.echo(secret.reveal())", "echo"),
    ],
)
def test_what_is_searched_for_in_the_source_is_found(line: str, what: str) -> None:
    assert [fault for _, fault, _ in _faults_of(line) if what in fault] != []


@pytest.mark.parametrize(
    "line",
    [
        "ok = hmac.compare_digest(sent, secret)",
        "ok = secret != ''",
        "ok = secret is None",
        "header = f'Bearer {token.reveal()}'",
        "log.info('reloaded', what=self.what)",
        "key = 'token' in ways",
    ],
)
def test_what_is_good_in_the_source_is_let_be(line: str) -> None:
    assert list(_faults_of(line)) == []


#: What is only called like a secret, or has to be there, by module and expression.
_LET_BE = {
    # "token 3", "certificate": what kind of credential it was
    ("trio_federation/hub.py", "caller.credential"),
    # the simulation's own world, and its search for secrets in logs
    ("trio_federation/testing/eventlog.py", "secret in line"),
    ("trio_federation/testing/eventlog.py", "sent"),
    ("trio_federation/testing/ways.py", "of.cluster.credential != SECRET"),
    ("trio_federation/testing/ways.py", "observer.cluster.credential != SECRET"),
    # a header's value, before it is put into base64
    ("plugins/kubernetes/src/trio_federation_kubernetes/credentials.py", "password"),
    # the path of a file
    ("plugins/kubernetes/src/trio_federation_kubernetes/kubeconfig.py", "token"),
}


def test_the_source_neither_shows_nor_compares_a_secret() -> None:
    package = Path(trio_federation.__file__).parent
    roots = [package, *sorted((package.parent / "plugins").glob("*/src"))]
    found, looked_at, let_be = [], 0, set()
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            looked_at += 1
            name = file.relative_to(package.parent).as_posix()
            for line, fault, expression in _faults_of(file.read_text(encoding="utf-8")):
                if (name, expression) in _LET_BE:
                    let_be.add((name, expression))
                else:
                    found.append(f"{name}:{line}: {expression}: {fault}")
    assert looked_at > 50
    assert found == []
    if len(roots) > 1:  # the plugins' sources are there, as they are in a clone
        assert sorted(let_be) == sorted(_LET_BE), "what is let be is there no more"


def test_the_three_places_that_compare_use_compare_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared secret, a token, the token of the admin interface: each is compared by it, and with what is wrong, too,
    in its whole length."""
    calls: list[tuple[object, object]] = []

    def counted(one: object, other: object) -> bool:
        calls.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for good in (True, False):
        calls.clear()
        assert credentials.same_secret(HUBS if good else OPTION, (NEXT, HUBS, ADMIN)) is good
        assert len(calls) == 3
        calls.clear()
        token = read_token(WEST if good else make_token(OPTION, "west"))
        assert token is not None
        assert token.valid_for((NEXT, HUBS, ADMIN)) is good
        assert len(calls) == 3
        calls.clear()
        assert (token_fault([f"Bearer {ADMIN if good else OPTION}".encode()], ADMIN) is None) is good
        assert len(calls) == 1


def test_what_is_sent_is_the_only_text_with_a_credential() -> None:
    """The metadata of a call hold it, as they must; nothing else of an agent's identity does."""
    own = OwnIdentity("west", "1", lambda: WEST)
    assert ("authorization", f"Bearer {WEST}") in own.metadata()
    assert call_metadata("west", "1", None) == [("x-federation-cluster", "west"), ("x-federation-instance", "1")]
    gc.collect()
    assert shown_in(repr(vars(own))) == []
    assert Part("token") is Part.TOKEN

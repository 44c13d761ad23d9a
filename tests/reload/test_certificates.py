"""When certificates run out: what is read from the files, and when somebody is warned, over simulated years."""

from __future__ import annotations

import datetime
import itertools
import math
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from trio.testing import MockClock

from trio_federation.certificates import (
    DAY,
    EXPIRY_INTERVAL,
    WARN_BELOW,
    Expiry,
    Warnings,
    expiry_of,
    first_to_expire,
    watch_expiry,
)
from trio_federation.clock import wall_clock

UTC = datetime.UTC
#: some moment, in whole seconds, as certificates have them
END = datetime.datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
SOON = 10


def written(expiry: Expiry | None) -> bytes | None:
    """The bytes of a file, where what is in it does not matter."""
    return f"{expiry.not_after} {expiry.subject}".encode() if expiry is not None else None


def read_back(data: bytes) -> Expiry | None:
    not_after, _, subject = data.decode().partition(" ")
    return Expiry(subject, float(not_after))


def issue(
    ca: trustme.CA, *names: str, end: datetime.datetime = END, common_name: str | None = None
) -> trustme.LeafCert:
    began = end - datetime.timedelta(days=90)
    return ca.issue_cert(
        *names, common_name=common_name, not_before=began, not_after=end, key_type=trustme.KeyType.ECDSA
    )


def chain_of(leaf: trustme.LeafCert) -> bytes:
    return b"".join(blob.bytes() for blob in leaf.cert_chain_pems)


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], str]:
    def write(data: bytes) -> str:
        path = tmp_path / "file.pem"
        path.write_bytes(data)
        return str(path)

    return write


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_first_to_run_out_counts(ca: trustme.CA, write: Callable[[bytes], str]) -> None:
    """In a chain and in a bundle alike, in whatever order."""
    later = issue(ca, "later.test", end=END + datetime.timedelta(days=1), common_name="later")
    first = issue(ca, "first.test", common_name="first")
    for data in (chain_of(later) + chain_of(first), chain_of(first) + chain_of(later)):
        found = expiry_of(write(data))
        assert found is not None
        assert found.not_after == END.timestamp()
        assert "first" in found.subject


def test_a_file_without_a_certificate_has_no_end(ca: trustme.CA, write: Callable[[bytes], str], tmp_path: Path) -> None:
    leaf = issue(ca, "west.test")
    assert expiry_of(write(leaf.private_key_pem.bytes())) is None
    assert expiry_of(write(b"")) is None
    assert expiry_of(write(b"\xff\0 nonsense")) is None
    assert expiry_of(write(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")) is None
    assert expiry_of(write(chain_of(leaf)[:100])) is None, "half a file"
    assert expiry_of(str(tmp_path / "missing")) is None
    assert expiry_of(str(tmp_path)) is None


def test_a_certificate_is_found_among_other_things(ca: trustme.CA, write: Callable[[bytes], str]) -> None:
    """A key in the same file, words around it, line breaks of another system, one before it that cannot be read."""
    leaf = issue(ca, "west.test")
    broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    data = b"Subject: west\n" + leaf.private_key_pem.bytes() + broken + chain_of(leaf).replace(b"\n", b"\r\n")
    found = expiry_of(write(data))
    assert found is not None
    assert found.not_after == END.timestamp()


def test_a_subject_is_one_short_line(ca: trustme.CA, write: Callable[[bytes], str]) -> None:
    for common_name in ("x" * 60 + "\n" + "y", "a\nb\0c\u2028d", "Zürich"):
        found = expiry_of(write(chain_of(issue(ca, "west.test", common_name=common_name))))
        assert found is not None
        assert found.subject.isprintable()
        assert 0 < len(found.subject) <= 80
    assert found is not None
    assert "Zürich" in found.subject


def openssl(folder: Path, *options: str) -> str:
    """A certificate that openssl has made and signed with its own key."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "made.pem"), *options]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return str(folder / "made.pem")


def test_a_certificate_of_openssl_is_read_as_openssl_reads_it(tmp_path: Path) -> None:
    path = openssl(tmp_path, "-days", "40", "-subj", "/O=Example/CN=west")
    command = ["openssl", "x509", "-in", path, "-noout", "-enddate"]
    end = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    not_after = datetime.datetime.strptime(end, "notAfter=%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)
    assert expiry_of(path) == Expiry("CN=west,O=Example", not_after.timestamp())


def test_one_without_a_subject_is_known_by_another_name(tmp_path: Path) -> None:
    named = openssl(tmp_path, "-days", "40", "-subj", "/", "-addext", "subjectAltName=URI:spiffe://fleet.test/west")
    found = expiry_of(named)
    assert found is not None
    assert found.subject == "spiffe://fleet.test/west"
    found = expiry_of(openssl(tmp_path, "-days", "40", "-subj", "/", "-set_serial", "0xabc"))
    assert found is not None
    assert found.subject == "serial number abc"


def odd_certificate(old: bytes, new: bytes) -> bytes:
    """A PEM file with an authority that has no subject, and whose bytes were changed in one place."""
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ca")]))
        .public_key(key.public_key())
        .serial_number(0xABC)
        .not_valid_before(END - datetime.timedelta(days=90))
        .not_valid_after(END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("zzzzzzzz")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    der = made.public_bytes(Encoding.DER)
    assert der.count(old) == 1
    return ssl.DER_cert_to_PEM_cert(der.replace(old, new)).encode()


@pytest.mark.parametrize(
    "old, new, is_read",
    [
        (b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x03", False),
        (b"\x82\x08zzzzzzzz", b"\xa5\x08\xa1\x06\x0c\x04zzzz", True),
        (b"\x55\x1d\x13", b"\x55\x1d\x11", True),
    ],
    ids=["version 4", "a name of a rare kind", "one extension twice"],
)
async def test_what_only_openssl_reads_ends_nothing(
    old: bytes, new: bytes, is_read: bool, write: Callable[[bytes], str], ca: trustme.CA, autojump_clock: MockClock
) -> None:
    """A process with such a certificate starts, as OpenSSL loads it, so that it must not end by the library with which
    it is looked at. The others of the file are warned of."""
    odd = odd_certificate(old, new)
    expiry = Expiry("serial number abc", END.timestamp()) if is_read else None
    path = write(odd)
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=path)
    assert expiry_of(path) == first_to_expire(odd) == expiry
    later = END + datetime.timedelta(days=1)
    good = chain_of(issue(ca, "west.test", end=later))
    found = first_to_expire(odd + good)
    assert found is not None
    assert found.not_after == (END if is_read else later).timestamp()
    told: list[str] = []
    with capture_logs(), trio.move_on_after(1.5 * EXPIRY_INTERVAL):
        await watch_expiry(
            {"odd": path, "good": write_beside(path, good)},
            wall_clock=lambda: END.timestamp() - 3 * DAY,
            told=lambda name, _: told.append(name),
            in_thread=False,
        )
    assert sorted(told) == sorted(["good", "odd"] * 2 if is_read else ["good"] * 2)


def write_beside(path: str, data: bytes) -> str:
    """Another file in the same folder."""
    other = Path(path).with_name("other.pem")
    other.write_bytes(data)
    return str(other)


def test_the_wall_clock_is_that_of_certificates(tmp_path: Path) -> None:
    """One that openssl makes now, for 40 days, runs out in 40 days."""
    before = math.floor(wall_clock())
    found = expiry_of(openssl(tmp_path, "-days", "40", "-subj", "/CN=west"))
    assert found is not None
    assert before <= found.not_after - 40 * DAY <= wall_clock()


def test_a_process_without_certificates_does_not_pay_for_them() -> None:
    code = "import sys, trio_federation.certificates; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- decisions -------------------------------------------------------------------------------------------------------


def warned(expiry: Expiry, moments: list[float]) -> list[tuple[float, int]]:
    """When it is warned of, and with how many days left."""
    warnings = Warnings()
    return [(now, days) for now in moments if (days := warnings.due(expiry, now)) is not None]


def test_a_certificate_nobody_renews() -> None:
    end = 100 * DAY
    hours = [hour * 3600.0 for hour in range(103 * 24 + 1)]
    assert [(now / DAY, days) for now, days in warned(Expiry("x", end), hours)] == [
        (70 + 1 / 24, 29),
        (93 + 1 / 24, 6),
        (99 + 1 / 24, 0),
        (100 + 1 / 24, -1),
        (101 + 1 / 24, -2),
        (102 + 1 / 24, -3),
    ]


def test_one_that_is_found_late_is_warned_of_once() -> None:
    assert warned(Expiry("x", 5 * DAY), [0.0, 1.0, 2.0]) == [(0.0, 5)]
    assert warned(Expiry("x", 0.0), [3 * DAY, 3 * DAY + 1]) == [(3 * DAY, -3)]


@given(
    st.floats(0, 200 * DAY),
    st.lists(st.floats(0.001, 40 * DAY), min_size=1, max_size=40),
)
def test_each_bound_is_warned_of_once_and_in_order(end: float, steps: list[float]) -> None:
    """However often it is looked at: at the first look below each bound, and after the end once a day at most."""
    moments, now = [], 0.0
    for step in steps:
        now += step
        moments.append(now)
    told = [now for now, _ in warned(Expiry("x", end), moments)]
    below = [[now for now in moments if end - now < days * DAY] for days in WARN_BELOW]
    # Of several bounds that are passed between two looks, one warning tells all.
    firsts = sorted({each[0] for each in below if each})
    assert [now for now in told if now <= end or now in firsts] == firsts
    after = [now for now in told if now > end]
    assert all(later - earlier >= DAY for earlier, later in itertools.pairwise(after))
    # And no day after the end is without one, if it was looked at.
    for now in moments:
        if now > end:
            assert any(now - DAY < each <= now for each in after)


@given(st.lists(st.tuples(st.sampled_from([10 * DAY, 60 * DAY]), st.floats(0, 50 * DAY)), max_size=30))
def test_another_certificate_begins_anew(looks: list[tuple[float, float]]) -> None:
    """Whatever was told of the one before it. Times may go back, as the date of a machine does."""
    warnings = Warnings()
    before = None
    for end, now in looks:
        days = warnings.due(Expiry("x", end), now)
        if end != before:
            assert (days is not None) == (end - now < 30 * DAY)
        if days is not None:
            assert days == math.floor((end - now) / DAY)
        before = end


def test_a_date_that_is_set_back_repeats_nothing_but_ends_no_warnings() -> None:
    expiry = Expiry("x", 100 * DAY)
    warnings = Warnings()
    assert warnings.due(expiry, 99.5 * DAY) == 0
    assert warnings.due(expiry, 80 * DAY) is None
    assert warnings.due(expiry, 400 * DAY) == -300
    assert warnings.due(expiry, 101 * DAY) == -1
    assert warnings.due(expiry, 101.5 * DAY) is None


# --- the watch -------------------------------------------------------------------------------------------------------


class Wall:
    """A date that a test can choose, and that then goes on with Trio's time."""

    def __init__(self, now: float) -> None:
        self._offset = now - trio.current_time()

    def __call__(self) -> float:
        return trio.current_time() + self._offset


async def test_the_metric_is_told_at_once_and_at_every_look(autojump_clock: MockClock) -> None:
    expiries: dict[str, Iterator[Expiry | None]] = {
        "a.pem": iter([Expiry("a", 50 * DAY), None, Expiry("a", 50 * DAY), Expiry("new", 80 * DAY)]),
        "b.pem": iter([None, None, None, None]),
    }
    told: list[tuple[float, str, float]] = []
    began = trio.current_time()
    with capture_logs() as logs, trio.move_on_after(3.5 * EXPIRY_INTERVAL):
        await watch_expiry(
            {"hub.tls.cert_file": "a.pem", "hub.tls.key_file": "b.pem"},
            wall_clock=Wall(25 * DAY + 60),
            told=lambda name, end: told.append((trio.current_time() - began, name, end)),
            read=lambda path: written(next(expiries[path])),
            parse=read_back,
            in_thread=False,
        )
    assert told == [
        (0, "hub.tls.cert_file", 50 * DAY),
        (2 * EXPIRY_INTERVAL, "hub.tls.cert_file", 50 * DAY),
        (3 * EXPIRY_INTERVAL, "hub.tls.cert_file", 80 * DAY),
    ]
    assert logs == [
        {
            "event": "certificate_expires",
            "log_level": "warning",
            "certificate": "hub.tls.cert_file",
            "file": "a.pem",
            "subject": "a",
            "days_left": 24,
        }
    ], "once, also after a look at which the file could not be read"


async def test_a_year_without_renewal(autojump_clock: MockClock) -> None:
    with capture_logs() as logs, trio.move_on_after(102.5 * DAY):
        await watch_expiry(
            {"hub.tls.cert_file": "a.pem"},
            wall_clock=Wall(0),
            told=lambda name, end: None,
            interval=3600,
            read=lambda path: written(Expiry("a", 100 * DAY)),
            parse=read_back,
            in_thread=False,
        )
    assert [entry["days_left"] for entry in logs] == [29, 6, 0, -1, -2, -3]


async def test_real_files_are_read_in_threads(ca: trustme.CA, write: Callable[[bytes], str]) -> None:
    path = write(chain_of(issue(ca, "west.test")))
    told: dict[str, float] = {}
    with trio.fail_after(SOON):
        async with trio.open_nursery() as nursery:

            def note(name: str, end: float) -> None:
                told[name] = end
                nursery.cancel_scope.cancel()

            with capture_logs() as logs:
                await watch_expiry({"x": path}, wall_clock=lambda: END.timestamp() - 3 * DAY, told=note)
    assert told == {"x": END.timestamp()}
    assert [entry["days_left"] for entry in logs] == [3]


async def test_a_file_that_hangs_holds_up_no_other(autojump_clock: MockClock) -> None:
    """And takes one thread, however long it takes."""
    answer = threading.Event()
    started: list[str] = []
    told: list[str] = []

    def read(path: str) -> bytes | None:
        started.append(path)
        if path == "stuck":
            assert answer.wait(SOON)
        return written(Expiry("x", 1e9))

    async def watch(name: str, in_thread: bool) -> None:
        await watch_expiry(
            {name: name},
            wall_clock=lambda: 0.0,
            told=lambda name, _: told.append(name),
            read=read,
            parse=read_back,
            in_thread=in_thread,
        )

    try:
        with trio.move_on_after(EXPIRY_INTERVAL * 9.5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, "stuck", True)
                nursery.start_soon(watch, "good", False)
        assert told == ["good"] * 10
        assert started.count("stuck") <= 1
    finally:
        answer.set()

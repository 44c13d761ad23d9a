"""When certificates run out: read from their files, told to the metrics, and warned of in time. Nothing here decides
who is trusted: that is OpenSSL's business, with the contexts of `tls.py`, and a certificate that has run out is
refused by whoever it is shown to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeAlias

import structlog
import trio

from trio_federation.config import LARGEST_FILE

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = structlog.get_logger("trio_federation.certificates")

#: Seconds between two looks at the files.
EXPIRY_INTERVAL = 10.0
#: Seconds that one look at one file may take.
READ_DEADLINE = 10.0
DAY = 24 * 3600.0
#: Days that are left below which a certificate is warned of, once each; the last one is its end, and from there on it
#: is every day.
WARN_BELOW = (30, 7, 1, 0)
#: Characters of a subject that are shown.
_LONGEST_SUBJECT = 80

_PEM = re.compile(rb"-----BEGIN (?:X509 )?CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END (?:X509 )?CERTIFICATE-----")


class Expiry(NamedTuple):
    """When a certificate runs out."""

    #: whose it is, in one short line
    subject: str
    #: the last moment at which it is good, in seconds since 1970
    not_after: float


def expiry_of(path: str) -> Expiry | None:
    """The certificate in a PEM file, with a chain or a bundle of authorities, that runs out first. None for a file that
    holds none, such as a key, or that cannot be read."""
    data = _bytes_of(path)
    return first_to_expire(data) if data is not None else None


def _bytes_of(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(LARGEST_FILE)
    except OSError:
        return None


def first_to_expire(data: bytes) -> Expiry | None:
    """The certificate among the bytes of a PEM file that runs out first; None where there is none.

    To be called on the main thread: the library is written in Rust, and a thread that is left behind in it when Python
    ends takes the process down with SIGABRT."""
    from cryptography import x509  # it takes a while to load, and where there is no TLS nobody needs it

    first: Expiry | None = None
    for block in _PEM.finditer(data):
        pem = b"-----BEGIN CERTIFICATE-----" + block[1] + b"-----END CERTIFICATE-----\n"
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            not_after = certificate.not_valid_after_utc.timestamp()
            if first is None or not_after < first.not_after:
                first = Expiry(_subject(certificate), not_after)
        except Exception:  # noqa: S112 - the library has many kinds, and to warn must not end the process
            continue
    return first


def _subject(certificate: Certificate) -> str:
    """Whose a certificate is. Those of services often name nobody as the subject, but have alternative names."""
    try:
        text = certificate.subject.rfc4514_string() or next(_alternative_names(certificate), "")
    except Exception:  # also for names that OpenSSL takes without complaint
        text = ""
    line = "".join(each if each.isprintable() else "\ufffd" for each in " ".join(text.split()))
    line = line or f"serial number {certificate.serial_number:x}"
    return line if len(line) <= _LONGEST_SUBJECT else line[: _LONGEST_SUBJECT - 1] + "…"


def _alternative_names(certificate: Certificate) -> Iterator[str]:
    from cryptography import x509

    for extension in certificate.extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            yield from (str(name.value) for name in extension.value)


class Warnings:
    """Decides when one certificate is warned of: once each time that fewer days are left than one of `WARN_BELOW`, and,
    once it has run out, every day. Another certificate begins anew."""

    def __init__(self) -> None:
        self._expiry: Expiry | None = None
        #: how many of the bounds were warned of
        self._stage = 0
        self._warned_at = 0.0

    def due(self, expiry: Expiry, now: float) -> int | None:
        """The whole days that are left, less than 0 for one that has run out, where that is to be warned of now. `now`:
        seconds since 1970."""
        if expiry != self._expiry:
            self._expiry, self._stage = expiry, 0
        left = expiry.not_after - now
        stage = sum(left < days * DAY for days in WARN_BELOW)
        # The date of a machine may be set back, too; then it is not told all over again.
        again = stage == len(WARN_BELOW) and not 0 <= now - self._warned_at < DAY
        if stage <= self._stage and not again:
            return None
        self._stage = stage
        self._warned_at = now
        return math.floor(left / DAY)


#: Reads the bytes of one file; None where there are none.
ReadBytes: TypeAlias = Callable[[str], bytes | None]


async def watch_expiry(
    files: Mapping[str, str],
    *,
    wall_clock: Callable[[], float],
    told: Callable[[str, float], None],
    interval: float = EXPIRY_INTERVAL,
    read: ReadBytes = _bytes_of,
    parse: Callable[[bytes], Expiry | None] = first_to_expire,
    in_thread: bool = True,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> NoReturn:
    """Warn of certificates that run out, until cancelled.

    `files`: path by name, for instance "hub.tls.cert_file". `wall_clock`: seconds since 1970. `told`: of each name,
    when what is in its file runs out, in seconds since 1970, at every look, so long as it can be read. Each file is
    looked at by itself, now and every `interval` seconds. `in_thread`: False where files are to be read on the loop: in
    simulations, whose time does not wait for threads."""

    async def keep(name: str, path: str) -> NoReturn:
        warnings = Warnings()
        # One thread and no more: one that hangs in a dead filesystem is waited for, not joined by others.
        limiter = trio.CapacityLimiter(1)
        known: bytes | None = None
        expiry: Expiry | None = None
        while True:
            data = None
            if not in_thread:
                data = read(path)
            else:
                with trio.move_on_after(READ_DEADLINE):
                    data = await trio.to_thread.run_sync(read, path, abandon_on_cancel=True, limiter=limiter)
            if data is not None and data != known:
                known, expiry = data, parse(data)
            if data is not None and expiry is not None:
                told(name, expiry.not_after)
                days_left = warnings.due(expiry, wall_clock())
                if days_left is not None:
                    log.warning(
                        "certificate_expires", certificate=name, file=path, subject=expiry.subject, days_left=days_left
                    )
            await trio.sleep(interval)

    async with trio.open_nursery() as nursery:
        for name, path in files.items():
            nursery.start_soon(keep, name, path)
        task_status.started()
        await trio.sleep_forever()

"""What an API server says when it says no: the Status object in the body of a refusal, and in an ERROR event of a
watch, read by one rule for both, whatever they hold. Pure. What was asked for, and so how the line about it begins, is
known in `client.py` and `decoding.py`; what follows is `reflector.py`'s business."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from trio_federation_kubernetes.errors import ApiError, Cause
from trio_federation_kubernetes.server_clock import unix_seconds
from trio_federation_kubernetes.texts import one_line

#: what is above these is no HTTP status, and no number of seconds to wait
_HIGHEST_CODE = 999
_LONGEST_WAIT = 10**9
#: More causes than these are not read. An apply has one for each field that another manager owns.
_MOST_CAUSES = 1000


@dataclass(frozen=True, slots=True)
class Status:
    """A Status object, as far as it can be read; the fields are those of `ApiError`."""

    code: int = 0
    reason: str = ""
    message: str = ""
    retry_after: float | None = None
    continue_token: str = ""
    causes: tuple[Cause, ...] = ()

    @classmethod
    def of_answer(cls, body: str, media_type: str) -> Status:
        """What came with an HTTP status of 400 and above. Of something else than a Status object only plain text is a
        message: a proxy's page or some other JSON is nothing for a line."""
        document = _document(body)
        if document.get("kind") == "Status":
            return cls._of(document)
        plain = media_type.partition(";")[0].strip().lower() == "text/plain"
        return cls(message=one_line(body) if plain else "")

    @classmethod
    def of_event(cls, content: str) -> Status:
        """The object of an ERROR event, as JSON; it need not say that it is a Status."""
        return cls._of(_document(content))

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> Status:
        details = _mapping(document.get("details"))
        code = _number(document.get("code"), _HIGHEST_CODE)
        token = _mapping(document.get("metadata")).get("continue")
        return cls(
            code=int(code) if code is not None and code.is_integer() else 0,
            reason=_words(document.get("reason")),
            message=_words(document.get("message")),
            retry_after=_number(details.get("retryAfterSeconds"), _LONGEST_WAIT),
            continue_token=token if isinstance(token, str) else "",
            causes=_causes(details.get("causes")),
        )

    def error(self, text: str) -> ApiError:
        """The error that says this, with `text` for people."""
        return ApiError(
            text,
            code=self.code,
            status_reason=self.reason,
            message=self.message,
            retry_after=self.retry_after,
            continue_token=self.continue_token,
            causes=self.causes,
        )


def retry_after(header: str | None, now: float | None) -> float | None:
    """The seconds to wait by a Retry-After header, which is a number or a date; None where it is neither, or a date
    without `now`, the server's time in Unix seconds."""
    header = (header or "").strip()
    if header.isascii() and header.isdigit():
        seconds = float(header)
        return seconds if math.isfinite(seconds) else None
    moment = unix_seconds(header)
    return None if moment is None or now is None else max(moment - now, 0.0)


def phrase(code: int) -> str:
    """What HTTP calls a status, or "" for one that it does not know."""
    try:
        return HTTPStatus(code).phrase
    except ValueError:
        return ""


def _document(text: str) -> Mapping[str, Any]:
    try:
        # Whole numbers as floats: those that are read are small, and of thousands of digits Python makes no int.
        return _mapping(json.loads(text, parse_int=float))
    except (ValueError, RecursionError):
        return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object, most: int) -> float | None:
    """A number from 0 to `most`; None for anything else."""
    return value if isinstance(value, float) and 0 <= value <= most else None


def _causes(value: object) -> tuple[Cause, ...]:
    """What can be read of a list of causes; one of which nothing can be read is none."""
    first = value[:_MOST_CAUSES] if isinstance(value, list) else ()
    read = (
        Cause(_words(each.get("reason")), _words(each.get("field")), _words(each.get("message")))
        for each in map(_mapping, first)
    )
    return tuple(cause for cause in read if any(cause))


def _words(value: object) -> str:
    return one_line(value) if isinstance(value, str) else ""

"""The web page, as the file `page.html` of this package: one document that needs nothing else, and the policy that
keeps a browser from loading or running anything else with it. What the page shows, it asks for under /v1 itself."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import NamedTuple

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page(NamedTuple):
    """A document, and the Content-Security-Policy that it is served with."""

    html: bytes
    policy: str


@cache
def load_page() -> Page:
    """The page of this version. Reads a file the first time."""
    html = resources.files("trio_federation.admin").joinpath("page.html").read_text(encoding="utf-8")
    return Page(html.encode(), content_security_policy(html))


def content_security_policy(html: str) -> str:
    """The strictest policy that `html` works under: of scripts and styles only those that stand in it, known by their
    hashes; requests to the server that it came from only; nothing else from anywhere, in no frame, and no text that
    could become markup.

    The hash of an inline element is that of the text between its tags, with the line ends that a browser sees."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html.replace("\r\n", "\n").replace("\r", "\n")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    directives = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]) or "'none'",
        "style-src": " ".join(hashes["style"]) or "'none'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in directives.items())

"""Whom the admin interface listens to. Pure rules about headers; where they are applied is `app.py`.

With a token, whoever sends it; no header of a browser's own making holds it, and no page but ours is given it. Beyond
loopback there is always one.

Without, it answers on loopback only, but there to every program of this machine; among them browsers, which can be made
to ask by any page that somebody looks at.

* A page on another site cannot read answers, because no CORS header allows it. It could read them, though, and place
  creates, once its own name resolves to this machine (DNS rebinding). Its requests then carry that name as their Host:
  so a name that is not known to be ours is refused. With a token, that page would have to know the token: so any name
  is good.
* It can send a POST of the kinds that forms send, without asking first. So a POST has to be JSON, which is not one of
  them, and where it says which page it came from (Origin), that has to be ours. With a token, too."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence

_HOST = re.compile(r"(?:\[(?P<bracketed>[^\[\]\s]+)\]|(?P<name>[^:\[\]/?#@\s]+))(?::(?P<port>[0-9]{1,5}))?")
_ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<host>.+)", re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}


_ASK_WITH = "send Authorization: Bearer TOKEN, with the token of [admin] in the configuration"


def token_fault(authorizations: Sequence[bytes], token: str) -> str | None:
    """Why a request with these Authorization headers is refused, as a line for people, which repeats nothing of them;
    None where there is one, and it holds `token`. Takes the same time for every token of the same length. An empty
    `token` is nobody's."""
    if not authorizations:
        return f"a token is needed; {_ASK_WITH}"
    if len(authorizations) > 1:
        return f"Authorization is given {len(authorizations)} times; give it once"
    scheme, _, sent = authorizations[0].strip(b" \t").partition(b" ")
    if scheme.lower() != b"bearer":
        return f"Authorization is not of the kind Bearer; {_ASK_WITH}"
    # In bytes, because compare_digest takes no text beyond ASCII, and anything may be sent.
    if not hmac.compare_digest(sent.lstrip(b" "), token.encode()) or not token:
        return f"the token is not the one that is asked for; {_ASK_WITH}"
    return None


def host_fault(hosts: Sequence[str], own_host: str) -> str | None:
    """Why a request with these Host headers is refused, as a line for people; None where it is not.

    Known are localhost, any IP address, which no DNS server can point elsewhere, and `own_host`, the host that the
    admin interface was bound to. The port is free: a forwarded one differs from ours."""
    if len(hosts) != 1:
        return "the request must say in one Host header which host it is for"
    parsed = _parse_host(hosts[0])
    if parsed is not None:
        name = parsed[0]
        if name in ("localhost", own_host.lower()) or _is_address(name):
            return None
    return f"Host {shown(hosts[0])} is not a name of this interface; ask for localhost or for an IP address instead"


def origin_fault(origins: Sequence[str], host: str) -> str | None:
    """Why a request that changes something is refused for its Origin headers, or None.

    `host`: its Host header. Programs send no Origin; a browser does, and then it has to be a page from that host."""
    if not origins:
        return None
    matched = _ORIGIN.fullmatch(origins[0]) if len(origins) == 1 else None
    if matched is not None:
        port = _DEFAULT_PORTS[matched["scheme"].lower()]
        ours, theirs = _parse_host(host, port), _parse_host(matched["host"], port)
        if ours is not None and ours == theirs:
            return None
    return f"Origin {shown(', '.join(origins))} is not the page of this interface; only its own page may post here"


def content_type_fault(content_types: Sequence[str]) -> str | None:
    """Why a body with these Content-Type headers is refused, or None where it is called JSON."""
    if len(content_types) == 1 and content_types[0].partition(";")[0].strip().lower() == "application/json":
        return None
    given = shown(", ".join(content_types)) if content_types else "missing"
    return f"Content-Type is {given}; send the fields as a JSON object, with Content-Type: application/json"


def shown(text: str) -> str:
    """What somebody sent, fit to be repeated to them: quoted, on one line, and short."""
    text = repr(text)
    return text if len(text) <= 80 else text[:79] + "…"


def _parse_host(host: str, default_port: int = 0) -> tuple[str, int] | None:
    """The name, lower-case, addresses in one spelling, and the port of a Host header; None where it is none."""
    matched = _HOST.fullmatch(host)
    if matched is None:
        return None
    name = (matched["bracketed"] or matched["name"]).lower()
    port = int(matched["port"]) if matched["port"] else default_port
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None if matched["bracketed"] else (name, port)
    if (address.version == 6) != bool(matched["bracketed"]):
        return None
    return str(address), port


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

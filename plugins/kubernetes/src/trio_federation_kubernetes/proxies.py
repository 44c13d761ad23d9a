"""Which proxy stands between us and an API server, if any, by the rules that kubectl goes by: the one that a kubeconfig
names, else those of Go's HTTP library for HTTPS_PROXY, HTTP_PROXY and NO_PROXY. Pure: environment in, address out. Who
connects through it is `client.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import httpx

from trio_federation_kubernetes.access import Access
from trio_federation_kubernetes.errors import KubeconfigError

_VARIABLES = {"https": ("HTTPS_PROXY", "https_proxy"), "http": ("HTTP_PROXY", "http_proxy")}
_NO_PROXY = ("NO_PROXY", "no_proxy")
_DEFAULT_PORTS = {"https": 443, "http": 80}

#: "host:port", "[address]:port"; what else holds a colon or a bracket is taken as it is, as a host
_WITH_PORT = re.compile(r"\[(?P<address>[^][]*)\]:(?P<port>[^][:]*)|(?P<host>[^][:]*):(?P<host_port>[^][:]*)")


def proxy_of(access: Access, environment: Mapping[str, str]) -> httpx.URL | None:
    """The proxy for connections to the server of `access`: its own, else the one that `proxy_for` finds; None for a
    direct connection.

    Raises KubeconfigError where it cannot be used, and where `proxy_for` does; its text does not hold an address."""
    source = "proxy-url" if access.proxy else "the environment's proxy"
    try:
        address = access.proxy or proxy_for(access.server, environment)
    except KubeconfigError as error:
        raise KubeconfigError(f"{access.name}: {error}") from error
    if address is None:
        return None
    url = _parsed(address)
    if url is None:
        raise KubeconfigError(f"{access.name}: {source} is no address; write it as http://host:port")
    if url.scheme not in ("http", "https"):
        raise KubeconfigError(
            f"{access.name}: {source} is a {url.scheme[:20]!r} proxy, which is not supported; use an http or https one"
        )
    if not url.host:
        raise KubeconfigError(f"{access.name}: {source} names no host; write it as http://host:port")
    return url


def proxy_for(server: str, environment: Mapping[str, str]) -> str | None:
    """The proxy for connections to `server` ("https://10.0.0.1:6443"), such as "http://user:password@proxy:3128"; None
    for a direct connection.

    The variable of the server's scheme counts, the upper-case one before the lower-case one; a value without a scheme
    gets "http://". "localhost" and loopback addresses are never proxied, nor is what NO_PROXY lists: entries with
    commas between them, in any case, unusable ones ignored. An entry is

    - "*", for everything;
    - an address, "10.0.0.1", "fd00::1", or with a port, "10.0.0.1:6443", "[fd00::1]:6443";
    - a range, "10.0.0.0/8", "fd00::/8";
    - a name, "example.com", for it and all names below it; ".example.com" or "*.example.com" for those below only; each
      also with a port.

    Raises KubeconfigError where `server` is no address, or the proxy's is none; its text holds neither, as they may
    hold a password."""
    url = _parsed(server)
    if url is None or url.scheme not in _VARIABLES or not url.host:
        raise KubeconfigError("the server's address is not like https://host:port")
    names = _VARIABLES[url.scheme]
    proxy = _first(environment, names)
    if not proxy or _is_direct(url, _first(environment, _NO_PROXY)):
        return None
    address = proxy if "://" in proxy else f"http://{proxy}"
    found = _parsed(address)
    if found is not None and found.scheme and found.host:
        return address
    raise KubeconfigError(
        f"the value of {names[0]} or {names[1]} is no address of a proxy; write it as http://host:port"
    )


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := environment.get(name, "").strip())), "")


def _parsed(address: str) -> httpx.URL | None:
    try:
        return httpx.URL(address)
    except httpx.InvalidURL:
        return None


def _is_direct(server: httpx.URL, exceptions: str) -> bool:
    host = server.raw_host.decode("ascii")
    port = str(server.port or _DEFAULT_PORTS[server.scheme])
    # a zone says by which interface an address is reached; it is the same address
    address = _address(host.partition("%")[0])
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    entries = [entry for part in exceptions.split(",") if (entry := part.strip().lower())]
    if "*" in entries:
        return True
    if address is not None:
        return any(_covers(entry, address, port) for entry in entries)
    return any(_names(entry, host, port) for entry in entries)


def _covers(entry: str, address: IPv4Address | IPv6Address, port: str) -> bool:
    network = _network(entry)
    if network is not None:
        return address in network
    wanted, wanted_port = _split(entry)
    return _address(wanted) == address and wanted_port in ("", port)


def _names(entry: str, host: str, port: str) -> bool:
    wanted, wanted_port = _split(entry)
    if _network(entry) is not None or _address(wanted) is not None or not wanted:
        return False
    suffix = _ascii(wanted.removeprefix("*") if wanted.startswith("*.") else wanted)
    matches = host.endswith(suffix) if suffix.startswith(".") else host == suffix or host.endswith(f".{suffix}")
    return matches and wanted_port in ("", port)


def _split(entry: str) -> tuple[str, str]:
    """Host and port ("" where there is none) of an entry."""
    found = _WITH_PORT.fullmatch(entry)
    if found is None:
        return entry, ""
    if found["address"] is not None:
        return found["address"], found["port"]
    return found["host"], found["host_port"]


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return None
        # the same address in a longer spelling
        return address.ipv4_mapped or address
    return address


def _network(text: str) -> IPv4Network | IPv6Network | None:
    base, slash, length = text.partition("/")
    # not "10.0.0.0/255.0.0.0", which Go takes for no range
    if not slash or not (length.isascii() and length.isdigit()):
        return None
    try:
        # kubectl reads "010.0.0.0/8" as "10.0.0.0/8"
        network = ip_network(f"{_LEADING_ZEROS.sub('', base)}/{length}", strict=False)
    except ValueError:
        return None
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped is not None:
        return ip_network((network.network_address.ipv4_mapped, network.prefixlen - 96), strict=False)
    return network


#: zeros before a digit, at the start of a part of an IPv4 address
_LEADING_ZEROS = re.compile(r"(?<![0-9a-f:])0+(?=[0-9])")


def _ascii(name: str) -> str:
    """The name as it stands in URLs: letters beyond ASCII in their encoded form."""
    if name.isascii():
        return name
    dot = "." if name.startswith(".") else ""
    url = _parsed(f"https://{name.removeprefix('.')}")
    return name if url is None else dot + url.raw_host.decode("ascii")

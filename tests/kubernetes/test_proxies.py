"""Which proxy a server is reached through, by the rules that kubectl goes by."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kubernetes.peers import access_to
from trio_federation_kubernetes.errors import KubernetesError
from trio_federation_kubernetes.proxies import proxy_for, proxy_of

PROXY = "http://proxy.test:3128"


def is_proxied(server: str, no_proxy: str) -> bool:
    found = proxy_for(server, {"HTTPS_PROXY": PROXY, "HTTP_PROXY": PROXY, "NO_PROXY": no_proxy})
    assert found in (None, PROXY)
    return found is not None


@pytest.mark.parametrize(
    "server, environment, expected",
    [
        ("https://a.test", {}, None),
        ("https://a.test", {"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ("https://a.test", {"https_proxy": "http://p:1"}, "http://p:1"),
        ("https://a.test", {"HTTPS_PROXY": "http://p:1", "https_proxy": "http://q:2"}, "http://p:1"),
        ("https://a.test", {"HTTPS_PROXY": "", "https_proxy": "http://q:2"}, "http://q:2"),
        ("https://a.test", {"HTTPS_PROXY": " "}, None),
        ("https://a.test", {"HTTP_PROXY": "http://p:1"}, None),
        ("http://a.test", {"HTTP_PROXY": "http://p:1"}, "http://p:1"),
        ("http://a.test", {"HTTPS_PROXY": "http://p:1"}, None),
        ("https://a.test", {"ALL_PROXY": "http://p:1", "all_proxy": "http://p:1"}, None),
        ("https://a.test", {"HTTPS_PROXY": "p:1"}, "http://p:1"),
        ("https://a.test", {"HTTPS_PROXY": "p"}, "http://p"),
        ("https://a.test", {"HTTPS_PROXY": "10.0.0.1:3128"}, "http://10.0.0.1:3128"),
        ("https://a.test", {"HTTPS_PROXY": "ana:secret@p:1"}, "http://ana:secret@p:1"),
        ("https://a.test", {"HTTPS_PROXY": "https://p:1"}, "https://p:1"),
        ("https://a.test", {"HTTPS_PROXY": "socks5://p:1"}, "socks5://p:1"),
        ("https://a.test", {"HTTPS_PROXY": "http://p:1\n"}, "http://p:1"),
        ("https://a.test", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a.test"}, None),
        ("https://a.test", {"HTTPS_PROXY": "http://p:1", "no_proxy": "a.test"}, None),
        ("https://a.test", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "b.test", "no_proxy": "a.test"}, "http://p:1"),
    ],
)
def test_variables(server: str, environment: dict[str, str], expected: str | None) -> None:
    assert proxy_for(server, environment) == expected


@pytest.mark.parametrize(
    "no_proxy, direct, proxied",
    [
        ("", ["localhost", "127.0.0.1", "127.8.8.8", "[::1]", "[::ffff:127.0.0.1]"], ["localhost.test", "10.0.0.1"]),
        ("*", ["a.test", "10.0.0.1", "[fd00::1]"], []),
        ("b.test,*", ["a.test", "10.0.0.1"], []),
        ("a.test", ["a.test", "x.a.test", "y.x.a.test", "A.TEST"], ["xa.test", "test", "a.test.b"]),
        ("A.Test", ["a.test"], []),
        (".a.test", ["x.a.test", "y.x.a.test"], ["a.test", "xa.test"]),
        ("*.a.test", ["x.a.test"], ["a.test", "xa.test"]),
        ("*a.test", [], ["xa.test", "a.test"]),
        ("a.test:6443", ["a.test:6443", "x.a.test:6443"], ["a.test", "a.test:443"]),
        ("a.test:443", ["a.test", "a.test:443"], ["a.test:6443"]),
        (".a.test:443", ["x.a.test"], ["a.test", "x.a.test:1"]),
        ("10.0.0.1", ["10.0.0.1", "10.0.0.1:6443", "[::ffff:10.0.0.1]"], ["10.0.0.10", "110.0.0.1"]),
        ("10.0.0.1:6443", ["10.0.0.1:6443"], ["10.0.0.1"]),
        ("0.0.1", [], ["10.0.0.1"]),
        ("10.0.0.0/8", ["10.0.0.1", "10.255.1.1:1", "[::ffff:10.1.1.1]"], ["11.0.0.1", "[fd00::1]"]),
        ("10.1.2.3/8", ["10.0.0.1"], ["11.0.0.1"]),
        ("010.0.0.0/8", ["10.0.0.1"], ["8.0.0.1"]),
        ("10.0.0.0/255.0.0.0", [], ["10.0.0.1"]),
        ("fd00::/8", ["[fd00::1]", "[fdff::]:6443"], ["[fe00::1]", "10.0.0.1"]),
        ("fd00::1", ["[fd00::1]", "[fd00:0:0::1]"], ["[fd00::2]"]),
        ("[fd00::1]:6443", ["[fd00::1]:6443"], ["[fd00::1]"]),
        ("::ffff:10.0.0.0/104", ["10.0.0.1"], ["11.0.0.1"]),
        ("::/0", ["[fd00::1]"], ["10.0.0.1"]),
        (" b.test ,, a.test\t,", ["a.test", "b.test"], ["c.test"]),
        (":443,[,[]:1,//,10.0.0.0/99,a b,%%,a.test", ["a.test"], ["b.test", "10.0.0.1"]),
        ("bücher.test", ["xn--bcher-kva.test", "bücher.test", "x.bücher.test"], ["xn--bcher-kva.com"]),
        ("127.0.0.0/8,fd00::/8", ["127.0.0.1", "[fd00::1]"], ["10.0.0.1", "a.test"]),
    ],
)
def test_exceptions(no_proxy: str, direct: list[str], proxied: list[str]) -> None:
    assert [host for host in direct if is_proxied(f"https://{host}/api", no_proxy)] == []
    assert [host for host in proxied if not is_proxied(f"https://{host}/api", no_proxy)] == []


def test_the_default_port_is_that_of_the_scheme() -> None:
    assert not is_proxied("http://a.test", "a.test:80")
    assert is_proxied("http://a.test", "a.test:443")


labels = st.text("abc", min_size=1, max_size=2)
names = st.lists(labels, min_size=1, max_size=4)


@given(host=names, listed=names, dot=st.sampled_from(["", ".", "*."]), port=st.sampled_from([None, 443, 6443]))
def test_names_match_by_whole_labels_from_the_right(
    host: list[str], listed: list[str], dot: str, port: int | None
) -> None:
    entry = dot + ".".join(listed) + ("" if port is None else f":{port}")
    below = len(host) - len(listed)
    ends = below >= 0 and host[below:] == listed
    expected = ends and (below > 0 or not dot) and port in (None, 443)
    assert is_proxied(f"https://{'.'.join(host)}", entry) is not expected


addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))


def cut(address: IPv4Address | IPv6Address, bits: int) -> IPv4Network | IPv6Network:
    if isinstance(address, IPv4Address):
        return IPv4Network((int(address), min(bits, 32)), strict=False)
    return IPv6Network((int(address), bits), strict=False)


@given(host=addresses, other=addresses, bits=st.integers(0, 128), near=st.booleans())
def test_ranges_cover_their_addresses(
    host: IPv4Address | IPv6Address, other: IPv4Address | IPv6Address, bits: int, near: bool
) -> None:
    network = cut(host if near else other, bits)
    server = f"https://[{host}]" if host.version == 6 else f"https://{host}"
    plain = host.ipv4_mapped or host if isinstance(host, IPv6Address) else host
    expected = plain.is_loopback or plain in network or host in network
    # a range of addresses in the long spelling is one of those in the short
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped:
        expected = plain.is_loopback or plain in cut(network.network_address.ipv4_mapped, network.prefixlen - 96)
    elif isinstance(plain, IPv4Address) and network.version == 6:
        expected = plain.is_loopback
    assert is_proxied(server, str(network)) is not expected


@given(st.text(max_size=20), st.sampled_from(["a.test", "10.0.0.1", "[fd00::1]"]))
def test_no_entry_does_harm(no_proxy: str, host: str) -> None:
    before = is_proxied(f"https://{host}", no_proxy)
    assert not is_proxied(f"https://{host}", f"{no_proxy},{host.strip('[]')}")
    # the other way round, what is good does not change what the rest means
    assert is_proxied(f"https://{host}", f"b.c,{no_proxy}") is before


@pytest.mark.parametrize("value", ["http://", "http://[::1", "http://ana:secret@p:port", "://"])
def test_a_broken_proxy_is_named_and_not_shown(value: str) -> None:
    with pytest.raises(KubernetesError, match="HTTPS_PROXY or https_proxy is no address") as caught:
        proxy_for("https://a.test", {"https_proxy": value})
    assert "secret" not in str(caught.value)
    # where it would not be used, it does not matter
    assert proxy_for("https://127.0.0.1", {"https_proxy": value}) is None


@pytest.mark.parametrize("server", ["a.test", "ftp://a.test", "https://", "https://[::1", ""])
def test_a_server_has_to_be_an_address(server: str) -> None:
    with pytest.raises(KubernetesError, match="the server's address"):
        proxy_for(server, {})


def test_a_zone_is_no_part_of_an_address() -> None:
    assert not is_proxied("https://[fd00::1]", "fd00::1")
    assert is_proxied("https://[fd00::1]", "fd00::1%eth0")


@pytest.mark.parametrize(
    "own, environment, expected",
    [
        (None, {}, None),
        (None, {"HTTPS_PROXY": "p:1"}, "http://p:1"),
        ("https://q:2", {"HTTPS_PROXY": "p:1"}, "https://q:2"),
        # neither the environment's exceptions nor its faults count for the kubeconfig's own
        ("https://q:2", {"HTTPS_PROXY": "http://[", "NO_PROXY": "*"}, "https://q:2"),
        (None, {"HTTPS_PROXY": "p:1", "NO_PROXY": "*"}, None),
    ],
)
def test_the_kubeconfigs_own_proxy_comes_first(
    own: str | None, environment: dict[str, str], expected: str | None
) -> None:
    found = proxy_of(access_to("https://a.test", proxy=own), environment)
    assert found == (None if expected is None else httpx.URL(expected))


@pytest.mark.parametrize(
    "proxy, reason",
    [("socks5://p", "is a 'socks5' proxy"), ("http://[::1", "is no address"), ("http://", "names no host")],
)
def test_a_proxy_that_cannot_be_used_is_named_by_where_it_is_from(proxy: str, reason: str) -> None:
    with pytest.raises(KubernetesError, match=f"^test: proxy-url {reason}"):
        proxy_of(access_to("https://a.test", proxy=proxy), {})
    # the environment's is told by its variables where it is no address at all
    named = "the environment's proxy" if "socks" in proxy else "the value of HTTPS_PROXY or https_proxy"
    with pytest.raises(KubernetesError, match=f"^test: {named} "):
        proxy_of(access_to("https://a.test"), {"HTTPS_PROXY": proxy})

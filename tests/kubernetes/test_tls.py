"""Whom a client trusts, and how it shows who it is, against real TLS servers on this machine."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.kubernetes.peers import Authority, FixedCredential, access_to, client_for, fine, proxying, serving
from trio_federation_kubernetes.access import Access
from trio_federation_kubernetes.errors import CredentialError, KubeconfigError, UnreachableError
from trio_federation_kubernetes.tls import proxy_ssl_context, ssl_context

#: nothing listens there
DEAD = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def stranger() -> Authority:
    return Authority()


async def ask(access: Access, environment: dict[str, str] | None = None) -> bytes:
    async with client_for(access, environment, connect_deadline=2.0) as client:
        return (await client.get("/api", deadline=5)).body


# --- the server's name


async def test_the_certificate_is_for_the_server_name_and_not_for_the_address(authority: Authority) -> None:
    async with serving(fine, authority.server("api.test")) as server:
        access = access_to(f"https://127.0.0.1:{server.port}", ca=authority.pem, server_name="api.test")
        # what the environment says of proxies is not for this server
        environment = {"HTTPS_PROXY": DEAD, "NO_PROXY": "127.0.0.0/8,fd00::/8"}
        assert await ask(access, environment) == b'{"kind": "List"}'
        assert server.names == ["api.test"]
        assert server.requests[0].headers["host"] == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("secure_proxy", [False, True])
async def test_the_server_name_holds_through_a_proxy_too(authority: Authority, secure_proxy: bool) -> None:
    names: list[str | None] = []
    context = authority.server("localhost") if secure_proxy else None
    if context is not None:
        context.sni_callback = lambda _socket, name, _context: names.append(name)
    scheme = "https" if secure_proxy else "http"
    async with (
        serving(fine, authority.server("api.test")) as server,
        proxying(server.port, context) as proxy,
    ):
        access = access_to(
            f"https://127.0.0.1:{server.port}",
            ca=authority.pem,
            server_name="api.test",
            proxy=f"{scheme}://localhost:{proxy.port}",
        )
        # the kubeconfig's proxy comes before the environment, and before its exceptions
        await ask(access, {"HTTPS_PROXY": DEAD, "NO_PROXY": "*"})
        assert [request.target for request in proxy.requests] == [f"127.0.0.1:{server.port}"]
        assert server.names == ["api.test"]
        # the proxy is checked under its own name
        assert names == (["localhost"] if secure_proxy else [])


async def test_a_server_name_that_the_certificate_is_not_for_is_refused_through_a_proxy(authority: Authority) -> None:
    async with serving(fine, authority.server("127.0.0.1")) as server, proxying(server.port) as proxy:
        access = access_to(
            f"https://127.0.0.1:{server.port}",
            ca=authority.pem,
            server_name="api.test",
            proxy=f"http://127.0.0.1:{proxy.port}",
        )
        with pytest.raises(UnreachableError, match="tls-server-name"):
            await ask(access)
        assert server.requests == []


async def test_an_address_as_server_name(authority: Authority) -> None:
    async with serving(fine, authority.server("10.9.8.7")) as server:
        address = f"https://127.0.0.1:{server.port}"
        await ask(access_to(address, ca=authority.pem, server_name="10.9.8.7"))
        # addresses are checked, and not sent
        assert server.names == [None]
        with pytest.raises(UnreachableError, match=r"10\.9\.8\.6"):
            await ask(access_to(address, ca=authority.pem, server_name="10.9.8.6"))
        assert len(server.requests) == 1


async def test_ipv6(authority: Authority) -> None:
    async with serving(fine, authority.server("::1"), host="::1") as server:
        access = access_to(f"https://[::1]:{server.port}", ca=authority.pem)
        await ask(access, {"HTTPS_PROXY": DEAD})
        assert server.requests[0].headers["host"] == f"[::1]:{server.port}"


# --- whom to trust


@pytest.mark.parametrize(
    "names, days, reason",
    [
        (
            ["other.test"],
            1,
            "the certificate is not trusted: .*; check the server's address, or name in tls-server-name",
        ),
        (
            ["127.0.0.2"],
            1,
            "the certificate is not trusted: .*; check the server's address, or name in tls-server-name",
        ),
        (["127.0.0.1"], -1, "the certificate is not trusted: certificate has expired; it has to be renewed"),
    ],
)
async def test_other_names_and_expired_certificates_are_refused(
    authority: Authority, names: list[str], days: int, reason: str
) -> None:
    async with serving(fine, authority.server(*names, days=days)) as server:
        with pytest.raises(UnreachableError, match=reason) as caught:
            await ask(access_to(f"https://127.0.0.1:{server.port}", ca=authority.pem))
        assert f"https://127.0.0.1:{server.port}/api" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is not None
        assert server.requests == []


async def test_a_name_that_is_only_the_common_name_counts_for_nothing(authority: Authority) -> None:
    async with serving(fine, authority.server("x@api.test", common_name="api.test")) as server:
        access = access_to(f"https://127.0.0.1:{server.port}", ca=authority.pem, server_name="api.test")
        with pytest.raises(UnreachableError, match="is not trusted"):
            await ask(access)


async def test_other_authorities_are_refused(authority: Authority, stranger: Authority) -> None:
    async with serving(fine, stranger.server("127.0.0.1")) as server:
        for ca in (authority.pem, None):
            with pytest.raises(UnreachableError, match=r"is not trusted: .*; check certificate-authority"):
                await ask(access_to(f"https://127.0.0.1:{server.port}", ca=ca))
        assert server.requests == []


async def test_a_certificate_that_vouches_for_itself_is_refused(
    authority: Authority, tmp_path: Path, stranger: Authority
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    path = tmp_path / "self.pem"
    path.write_bytes(stranger.pem + stranger.ca.private_key_pem.bytes())
    context.load_cert_chain(path)
    async with serving(fine, context) as server:
        with pytest.raises(UnreachableError, match="check certificate-authority"):
            await ask(access_to(f"https://127.0.0.1:{server.port}", ca=authority.pem))
        assert server.requests == []


async def test_the_authorities_of_the_system_where_the_kubeconfig_has_none(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "system.pem").write_bytes(authority.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "system.pem"))
    async with serving(fine, authority.server("127.0.0.1")) as server:
        await ask(access_to(f"https://127.0.0.1:{server.port}"))


async def test_the_systems_authorities_do_not_count_where_the_kubeconfig_has_some(
    authority: Authority, stranger: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "system.pem").write_bytes(stranger.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "system.pem"))
    async with serving(fine, stranger.server("127.0.0.1")) as server:
        with pytest.raises(UnreachableError, match="is not trusted"):
            await ask(access_to(f"https://127.0.0.1:{server.port}", ca=authority.pem))


async def test_an_intermediate_authority_may_be_the_one_that_is_trusted(authority: Authority) -> None:
    below = authority.below()
    async with serving(fine, below.server("127.0.0.1")) as server:
        await ask(
            access_to(f"https://127.0.0.1:{server.port}", ca=b"# Zertifikat f\xc3\xbcr den Cluster\n" + below.pem)
        )


async def test_insecure_only_where_the_kubeconfig_says_so(stranger: Authority) -> None:
    async with (
        serving(fine, stranger.server("other.test", days=-1)) as server,
        proxying(server.port, stranger.server("other.test")) as proxy,
    ):
        address = f"https://127.0.0.1:{server.port}"
        await ask(access_to(address, verify=False))
        await ask(access_to(address, verify=False, server_name="api.test"))
        await ask(access_to(address, verify=False, proxy=f"https://127.0.0.1:{proxy.port}"))
        assert server.names == [None, "api.test", None]
        assert len(server.requests) == 3


async def test_a_proxy_with_a_wrong_certificate_is_refused(authority: Authority, stranger: Authority) -> None:
    async with serving(fine, authority.server("127.0.0.1")) as server:
        for context in (stranger.server("127.0.0.1"), authority.server("other.test")):
            async with proxying(server.port, context) as proxy:
                access = access_to(
                    f"https://127.0.0.1:{server.port}", ca=authority.pem, proxy=f"https://127.0.0.1:{proxy.port}"
                )
                with pytest.raises(UnreachableError, match="is not trusted"):
                    await ask(access)
                assert proxy.requests == []


async def test_a_server_that_speaks_no_tls(authority: Authority) -> None:
    async with serving(fine) as server:
        with pytest.raises(UnreachableError, match="TLS"):
            await ask(access_to(f"https://127.0.0.1:{server.port}", ca=authority.pem))


# --- who we are


async def test_a_server_that_asks_for_a_certificate(authority: Authority, stranger: Authority) -> None:
    context = authority.server("127.0.0.1")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.pem.decode())
    pair = authority.issue("ana@users.test")
    other = stranger.issue("ana@users.test")
    async with serving(fine, context) as server:
        address = f"https://127.0.0.1:{server.port}"
        await ask(access_to(address, ca=authority.pem, client_certificate=pair))
        await ask(access_to(address, ca=authority.pem, credential=FixedCredential(certificate=pair)))
        # the kubeconfig's own comes first
        both = access_to(
            address, ca=authority.pem, client_certificate=pair, credential=FixedCredential(certificate=other)
        )
        await ask(both)
        for wrong in (None, other):
            with pytest.raises(UnreachableError):
                await ask(access_to(address, ca=authority.pem, client_certificate=wrong))
        assert len(server.requests) == 3


async def test_what_shows_who_we_are_says_nothing_of_whom_we_trust(authority: Authority, stranger: Authority) -> None:
    chain, key = stranger.issue("ana@users.test")
    async with serving(fine, stranger.server("127.0.0.1")) as server:
        access = access_to(
            f"https://127.0.0.1:{server.port}", ca=authority.pem, client_certificate=(chain + stranger.pem, key)
        )
        with pytest.raises(UnreachableError, match="is not trusted"):
            await ask(access)


PASSWORD = b"correct-horse-41"


def encrypted(key: bytes) -> bytes:
    loaded = load_pem_private_key(key, None)
    return loaded.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(PASSWORD))


def damaged(pem: bytes) -> bytes:
    lines = pem.splitlines(keepends=True)
    return b"".join([*lines[:2], b"!!!!" + lines[2][4:], *lines[3:]])


def test_bad_certificates_are_named(authority: Authority, stranger: Authority) -> None:
    chain, key = authority.issue("ana@users.test")
    _, other_key = stranger.issue("ana@users.test")

    def fault(**more: object) -> str:
        with pytest.raises(KubeconfigError) as caught:
            ssl_context(access_to("https://a.test", **more))
        text = str(caught.value)
        assert text.startswith("test: ")
        assert "\n" not in text
        return text.removeprefix("test: ")

    for ca in (b"", b"nothing", damaged(authority.pem), key):
        assert fault(ca=ca).startswith("certificate-authority holds no readable PEM certificates")
        with pytest.raises(KubeconfigError, match="certificate-authority"):
            proxy_ssl_context(access_to("https://a.test", ca=ca))
    for bad in (b"", b"nothing", damaged(chain), key):
        assert fault(client_certificate=(bad, key)).startswith("client-certificate is no readable PEM certificate")
    for bad in (b"", b"nothing", damaged(key), chain):
        assert fault(client_certificate=(chain, bad)).startswith("client-key is no readable PEM key")
    assert fault(client_certificate=(chain, other_key)) == "client-key does not belong to client-certificate"
    assert fault(client_certificate=(chain, encrypted(key))).startswith("client-key is encrypted with a password")
    for name in ("a..b", "x" * 64 + ".test", ".test", "a\0b"):
        assert fault(server_name=name).startswith("tls-server-name ")


def test_the_kubeconfigs_own_certificate_comes_before_an_exec_plugins(authority: Authority) -> None:
    access = access_to("https://a.test", client_certificate=authority.issue("ana@users.test"))
    bad = (b"nothing", b"nothing")
    # not even looked at
    ssl_context(access, bad)
    with pytest.raises(KubeconfigError):
        ssl_context(access_to("https://a.test"), bad)


def test_keys_never_show(authority: Authority) -> None:
    chain, key = authority.issue("ana@users.test")
    for bad in (damaged(key), encrypted(key)):
        with pytest.raises(KubeconfigError) as caught:
            ssl_context(access_to("https://a.test", client_certificate=(chain, bad)))
        error: BaseException | None = caught.value
        while error is not None:
            assert not any(line and line in repr(error).encode() for line in bad.splitlines()[1:-1])
            error = error.__cause__ or error.__context__


async def test_a_bad_certificate_of_an_exec_plugin(authority: Authority) -> None:
    credential = FixedCredential(certificate=(b"nothing", b"nothing"))
    with pytest.raises(CredentialError, match=r"exec plugin .*client-certificate is no readable"):
        await ask(access_to("https://127.0.0.1:1", ca=authority.pem, credential=credential))


@pytest.mark.parametrize("memory", [True, False])
def test_keys_are_left_in_no_file(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if memory:
        # where there is memory for it, nothing can be written, and nothing is
        tmp_path.chmod(0o500)
        monkeypatch.setattr("tempfile.NamedTemporaryFile", None)
    else:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    before = len(os.listdir("/dev/fd"))
    ssl_context(access_to("https://a.test", client_certificate=authority.issue("ana@users.test")))
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/dev/fd")) == before


def test_contexts_verify_unless_told_otherwise(authority: Authority) -> None:
    for access in (access_to("https://a.test"), access_to("https://a.test", ca=authority.pem, server_name="b.test")):
        for context in (ssl_context(access), proxy_ssl_context(access)):
            assert context.check_hostname
            assert context.verify_mode is ssl.CERT_REQUIRED
            assert context.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_a_client_certificate_is_not_shown_to_a_proxy(authority: Authority) -> None:
    context = authority.server("127.0.0.1")
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=authority.pem.decode())
    async with serving(fine, authority.server("127.0.0.1")) as server, proxying(server.port, context) as proxy:
        access = access_to(
            f"https://127.0.0.1:{server.port}",
            ca=authority.pem,
            client_certificate=authority.issue("ana@users.test"),
            proxy=f"https://127.0.0.1:{proxy.port}",
        )
        await ask(access)
        assert proxy.certificates == [None]

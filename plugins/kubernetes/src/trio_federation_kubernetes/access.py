"""How an API server is reached: everything that a kubeconfig, or a pod's service account, says about one connection,
already read, checked and merged. No file is named here any more but those that have to be read again. Who makes it is
`kubeconfig.py`; who uses it is `client.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class Credential(Protocol):
    """What a request is signed with."""

    async def authorization(self) -> str | None:
        """The value of the Authorization header ("Bearer …"), or None where there is none. Cheap when called often:
        what has to be read or run is kept until it expires. Raises CredentialError."""

    async def client_certificate(self) -> tuple[bytes, bytes] | None:
        """The certificate chain and the key, as PEM, that an exec plugin has given; None where it gives none, as all
        other credentials do. Raises CredentialError."""

    def refused(self) -> None:
        """The server has answered 401: whatever is kept is worth nothing any more, and is read or run anew at the next
        call, but for what was had only seconds ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One way to one API server."""

    #: names it in logs and errors: "context west of /home/ana/.kube/config", or "the pod's service account"
    name: str
    #: base address without a slash at its end: "https://10.0.0.1:6443", "https://[fd00::1]:6443/k8s/clusters/c-1"
    server: str
    #: the namespace that the context or the service account names; "default" where neither does
    namespace: str = "default"
    #: the certificates, as PEM, that the server's must descend from; None for those of the system
    ca: bytes | None = field(default=None, repr=False)
    #: False only where the kubeconfig says insecure-skip-tls-verify
    verify: bool = True
    #: the name that the certificate must be for, and that is sent as SNI, where it is not that of the server
    server_name: str | None = None
    #: certificate chain and key as PEM, where the kubeconfig has them
    client_certificate: tuple[bytes, bytes] | None = field(default=None, repr=False)
    #: what the kubeconfig itself asks for, "http://…", "https://…" or "socks5://…"; None: see the environment
    proxy: str | None = field(default=None, repr=False)
    credential: Credential = field(repr=False)

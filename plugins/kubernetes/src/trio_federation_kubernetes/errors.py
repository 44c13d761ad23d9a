"""What goes wrong between this plugin and a Kubernetes API server, each with the fields that decide what follows, and
with one line for people that names the place and what to do next. Foreign errors are turned into these where they
arise, with the cause chained. No message holds a credential."""

from __future__ import annotations

from typing import NamedTuple


class KubernetesError(Exception):
    """The base of all errors that this plugin raises on purpose."""

    #: why, fit for a metric's label: lower-case letters and underscores
    reason = "error"


class KubeconfigError(KubernetesError):
    """A kubeconfig, or a file that it names, cannot be used: the text names the file, the key in it, and the fault."""

    reason = "kubeconfig"


class CredentialError(KubernetesError):
    """A credential could not be had: a token file that cannot be read, an exec plugin that failed."""

    reason = "credential"


class UnreachableError(KubernetesError):
    """The API server gave no answer, or not the whole of it: no connection, no trust in its certificate, a deadline
    that passed, a connection that broke."""

    reason = "unreachable"


class AnswerError(KubernetesError):
    """The API server's answer makes no sense: no JSON, or JSON of another shape, a redirect, no end, a bad packing."""

    reason = "answer"


class Cause(NamedTuple):
    """One of the causes in the details of a Status object; each part is one line of a bounded length, and "" where the
    object does not say."""

    #: a word for programs, such as "FieldManagerConflict"
    reason: str = ""
    #: what it is about, as a path: `.status.clusters[clusterID="east"].isLocal`
    field: str = ""
    #: in the server's words
    message: str = ""


class ApiError(KubernetesError):
    """The API server said no: an HTTP status of 400 and above, or an ERROR event in a watch.

    `code`: the HTTP status, or that of the event's Status object; 0 where there was none. `status_reason`: the Status
    object's reason, such as "Expired"; "" where there was none. `message`: in the server's words, cut to a bounded
    length. `retry_after`: seconds that the server asks to wait; None where it does not say. `continue_token`: the token
    that the answer to an expired one carries; "" where there is none. `causes`: those in the Status object's
    details, at most 1,000."""

    def __init__(
        self,
        text: str,
        *,
        code: int,
        status_reason: str = "",
        message: str = "",
        retry_after: float | None = None,
        continue_token: str = "",
        causes: tuple[Cause, ...] = (),
    ) -> None:
        super().__init__(text)
        self.code = code
        self.status_reason = status_reason
        self.message = message
        self.retry_after = retry_after
        self.continue_token = continue_token
        self.causes = causes

    @property
    def reason(self) -> str:  # type: ignore[override]
        """Why, fit for a metric's label."""
        return _REASONS.get(self.code, "server" if self.code >= 500 else "refused")


_REASONS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 410: "expired", 429: "throttled"}

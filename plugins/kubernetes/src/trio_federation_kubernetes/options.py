"""The options of `[[source]]` tables of the types "kubernetes", "warmpool", "sandboxset" and "crd", of the table that
is inside of the last one, and of `[[sink]]` tables of the type "kubernetes-status". What they say is checked here as
far as it can be without a file or a server, so that `check` finds it: also the syntax of label selectors, by the rules
of the API server. Whether a resource has the fields that are named is `schema.py`; what is made of a kubeconfig is
`kubeconfig.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Annotated, NoReturn, TypeAlias

import msgspec
from msgspec import Meta

from trio_federation import Duration, seconds
from trio_federation_kubernetes.errors import KubeconfigError
from trio_federation_kubernetes.paths import Path, PathError, parse
from trio_federation_kubernetes.resources import Resource, is_namespace
from trio_federation_kubernetes.texts import quoted

#: objects that are asked for at once where nothing else is said; what kubectl asks for
DEFAULT_PAGE_SIZE = 500

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
#: RFC 1123, as the names of API groups are; the bound is that of the whole, as in the API server
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
#: RFC 1035, as the names of versions and resources are
_NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"

#: a path into an object, such as "status.free"; `paths.py` has the grammar, and `Fields` checks it
PathText: TypeAlias = Annotated[str, Meta(description='a path in quotes, such as "status.free"')]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all tables have in common."""


class ConnectionOptions(_Table, frozen=True, kw_only=True):
    """What every source and sink of this plugin may say: which API server, and which of its objects."""

    #: the path of a kubeconfig, relative to the folder of the configuration file; see `kubeconfig_path`. None: the
    #: pod's service account, else the files of KUBECONFIG, else ~/.kube/config
    kubeconfig: Annotated[str, Meta(min_length=1, description="the path of a kubeconfig")] | None = None
    #: a context of the kubeconfig; None for its current one
    context: Annotated[str, Meta(min_length=1, description="the name of a context in the kubeconfig")] | None = None
    #: the namespaces that are read, each by itself, so that no cluster-wide right is needed; None for all of them. What
    #: is not read is not written
    namespaces: (
        Annotated[
            tuple[str, ...],
            Meta(min_length=1, description="a list with at least one namespace; leave it out to read all of them"),
        ]
        | None
    ) = None
    #: only objects whose labels it matches are read; "" for all of them
    label_selector: Annotated[str, Meta(description='a label selector, such as "team=blue,tier in (a,b)"')] = ""
    #: objects per request when listing
    page_size: Annotated[int, Meta(ge=1, le=10_000, description="a whole number from 1 to 10000")] = DEFAULT_PAGE_SIZE

    def __post_init__(self) -> None:
        seen: dict[str, int] = {}
        for index, namespace in enumerate(self.namespaces or ()):
            if not is_namespace(namespace):
                text = "no lower-case RFC 1123 label (at most 63 characters), so it cannot be a namespace"
                raise ValueError(f"namespaces[{index}] {quoted(namespace)} is {text}")
            if namespace in seen:
                raise ValueError(f"namespaces[{index}] {namespace!r} is there twice, first as [{seen[namespace]}]")
            seen[namespace] = index
        if self.kubeconfig is not None and self.kubeconfig.startswith("~") and self.kubeconfig[1:2] not in ("", "/"):
            raise ValueError("kubeconfig names the home of another user; write the whole path instead of ~NAME")
        if (fault := selector_fault(self.label_selector)) is not None:
            raise ValueError(f"label_selector {quoted(self.label_selector)}: {fault}")

    def kubeconfig_path(self, base_dir: FilePath, environment: Mapping[str, str]) -> FilePath | None:
        """Where the named kubeconfig is: below HOME where it begins with "~", else relative to `base_dir`; None where
        none is named. Raises KubeconfigError where it begins with "~" and `environment` has no HOME."""
        if self.kubeconfig is None:
            return None
        if not self.kubeconfig.startswith("~"):
            return base_dir / self.kubeconfig
        if not (home := environment.get("HOME")):
            raise KubeconfigError(
                f"kubeconfig {quoted(self.kubeconfig)}: the environment has no HOME; write the whole path"
            )
        return FilePath(home) / self.kubeconfig[1:].lstrip("/")


class KubernetesOptions(ConnectionOptions, frozen=True, kw_only=True):
    """What a table of type "kubernetes" may hold."""


class WarmPoolOptions(ConnectionOptions, frozen=True, kw_only=True):
    """What a table of type "warmpool" may hold."""

    #: whether SandboxClaims are read too; without them running and pending are 0, and no right to read them is needed
    claims: bool = True


class SandboxSetOptions(ConnectionOptions, frozen=True, kw_only=True):
    """What a table of type "sandboxset" may hold."""


class Fields(_Table, frozen=True, kw_only=True):
    """The `[source.fields]` table: where in an object the fields of its pool's record stand, each a path.

    A count that is absent or null is 0: what is not there is not ready. What the others mean where they are absent, and
    which values are good, is said in `table.py`."""

    #: a text: the env that the pool belongs to
    env: PathText = "metadata.name"
    #: a text: the pool
    pool: PathText = "metadata.name"
    #: a text: the scaling group
    group: PathText | None = None
    #: counts of sandboxes: ready for use, in use, waited for, and wanted
    idle: PathText
    running: PathText | None = None
    pending: PathText | None = None
    desired: PathText | None = None
    #: a count: the most sandboxes that the pool's autoscaler may reach
    ceiling: PathText | None = None
    #: true or false: whether the pool's autoscaler is on. Without this path it is on where `ceiling` leads to something
    autoscaling: PathText | None = None

    def __post_init__(self) -> None:
        faults = []
        paths: dict[str, Path] = {}
        for name, text in self._given():
            try:
                path = parse(text)
            except PathError as error:
                faults.append(f"{name} {error}")
                continue
            if (fault := _path_fault(path)) is not None:
                faults.append(f"{name} {text!r}: {fault}")
                continue
            for other, before in paths.items():
                if (fault := _clash(path, before)) is not None:
                    faults.append(f"{name} {text!r} and {other} {str(before)!r}: {fault}")
            paths[name] = path
        if faults:
            raise ValueError("; ".join(faults))

    def paths(self) -> dict[str, Path]:
        """The paths that are given, by the name of their field here, in the order of the fields."""
        return {name: parse(text) for name, text in self._given()}

    def _given(self) -> list[tuple[str, str]]:
        texts = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return [(name, text) for name, text in texts if text is not None]


#: fields of every object's metadata that are texts
_METADATA_TEXTS = frozenset(["name", "namespace", "resourceVersion"])


def _path_fault(path: Path) -> str | None:
    """Why nothing can stand at a path, whatever the resource is, or None where something can."""
    first, *rest = path.steps
    if not isinstance(first, str):
        return "an object is no list; begin with the name of a field"
    if any(isinstance(step, str) and not _is_key(step) for step in path.steps):
        return "a name with quotes, backslashes or control characters cannot be read"
    if first == "metadata" and not (rest and isinstance(rest[0], str)):
        return 'metadata is an object; name a field of it, such as "metadata.name"'
    if first == "metadata" and rest[0] in _METADATA_TEXTS and len(rest) > 1:
        return f"metadata.{rest[0]} is a text; the path cannot go on behind it"
    return None


def _is_key(name: str) -> bool:
    # what a field of a decoder may be called
    return not any(character in '"\\' or ord(character) < 0x20 for character in name)


def _clash(one: Path, other: Path) -> str | None:
    """Why two paths cannot both lead to a value in the same object, or None where they can."""
    for step, beside in zip(one.steps, other.steps, strict=False):
        if type(step) is not type(beside):
            return "what is a list for the one is an object for the other"
        if step != beside:
            return None
    if len(one.steps) != len(other.steps):
        return "one goes on where the other ends, so only one of them can lead to a value"
    return None


class CrdOptions(ConnectionOptions, frozen=True, kw_only=True):
    """What a table of type "crd" may hold."""

    #: the resource's API group, "" for the core group
    group: Annotated[
        str,
        Meta(
            max_length=253,
            pattern=rf"\A({_SUBDOMAIN})?\Z",
            description='an API group, such as "pools.example.com", or "" for the core group',
        ),
    ]
    version: Annotated[
        str,
        Meta(
            max_length=63,
            pattern=rf"\A{_NAME}\Z",
            description='a version of the API group without the group, such as "v1"',
        ),
    ]
    #: the plural
    resource: Annotated[
        str,
        Meta(
            max_length=63,
            pattern=rf"\A{_NAME}\Z",
            description='the lower-case plural of a resource without its group, such as "runnerpools"',
        ),
    ]
    fields: Fields

    def watched(self) -> Resource:
        """The resource that is read."""
        return Resource(self.group, self.version, self.resource)


#: the shortest intervals of a sink
LEAST_REFRESH_INTERVAL = "10s"
LEAST_ENV_INTERVAL = "100ms"


class StatusOptions(ConnectionOptions, frozen=True, kw_only=True):
    """What a table of type "kubernetes-status" may hold. The envs that it chooses are those whose status is written."""

    #: how long after a write an env is written again although nothing but ages has moved; at least 10 seconds
    refresh_interval: Duration = "60s"
    #: the least time from the answer to one write of an env to its next; from 0.1 seconds to `refresh_interval`
    env_interval: Duration = "5s"
    #: the most writes per second, of all envs together
    writes_per_second: Annotated[float, Meta(ge=0.1, le=1000, description="a number from 0.1 to 1000")] = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        refresh = seconds(self.refresh_interval)
        if refresh < seconds(LEAST_REFRESH_INTERVAL):
            raise ValueError(
                f'refresh_interval "{self.refresh_interval}": expected "{LEAST_REFRESH_INTERVAL}" or longer'
            )
        if not seconds(LEAST_ENV_INTERVAL) <= seconds(self.env_interval) <= refresh:
            raise ValueError(
                f'env_interval "{self.env_interval}": expected "{LEAST_ENV_INTERVAL}" or longer, and no longer than '
                f'refresh_interval, which is "{self.refresh_interval}"'
            )


# --- label selectors, as the API server parses them (k8s.io/apimachinery/pkg/labels)

_TOKEN = re.compile(r"[ \t\r\n]*(==|!=|[=!<>(),]|[^ \t\r\n=!<>(),]+)")
_SYMBOLS = frozenset(["==", "!=", "=", "!", "<", ">", "(", ")", ","])
_LABEL_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_INT64_MAX = 2**63 - 1


def selector_fault(text: str) -> str | None:
    """Why a text is no label selector, with the position (from 1), or None where it is one. "" selects everything."""
    try:
        _Selector(text).check()
    except _SelectorFault as fault:
        return str(fault)
    return None


class _SelectorFault(Exception):
    """What is wrong with a label selector, and where."""


class _Selector:
    """Goes through the tokens of one label selector."""

    def __init__(self, text: str) -> None:
        #: each with its position; an empty one is the end
        self._tokens: list[tuple[str, int]] = []
        at = 0
        while match := _TOKEN.match(text, at):
            self._tokens.append((match[1], match.start(1) + 1))
            at = match.end()
        self._tokens.append(("", len(text) + 1))
        self._index = 0

    def check(self) -> None:
        if self._peek() == "":
            return
        self._requirement()
        while self._peek() != "":
            if self._peek() != ",":
                self._fault('expected "," or the end')
            self._take()
            self._requirement()

    def _requirement(self) -> None:
        absent = self._peek() == "!"
        if absent:
            self._take()
        if not self._is_word():
            self._fault("expected the key of a label")
        self._key()
        if absent or self._peek() in ("", ","):
            return
        match self._peek():
            case "in" | "notin":
                self._take()
                self._values()
            case "=" | "==" | "!=":
                self._take()
                if self._peek() not in ("", ","):  # else the value is empty
                    self._value()
            case "<" | ">":
                self._take()
                if not re.fullmatch(r"[0-9]+", self._peek()) or int(self._peek()[:63]) > _INT64_MAX:
                    self._fault("expected a whole number to compare with")
                self._value()
            case _:
                self._fault('expected one of in, notin, =, ==, !=, <, >, "," or the end')

    def _values(self) -> None:
        if self._peek() != "(":
            self._fault('expected "(" and values')
        self._take()
        # any of the values may be empty: "()", "(,a)", "(a,,b)"
        if self._is_word():
            self._value()
        while self._peek() == ",":
            self._take()
            if self._is_word():
                self._value()
        if self._peek() != ")":
            self._fault('expected "," or ")"')
        self._take()

    def _key(self) -> None:
        prefix, slash, name = self._peek().rpartition("/")
        if slash and not (len(prefix) <= 253 and re.fullmatch(_SUBDOMAIN, prefix)):
            self._fault("the part of a key before the slash must be a lower-case RFC 1123 subdomain")
        if not _is_label_part(name):
            self._fault(f"a key, after its slash if it has one, must be {_LABEL_PART_RULE}")
        self._take()

    def _value(self) -> None:
        if not self._is_word():
            self._fault("expected a value")
        if not _is_label_part(self._peek()):
            self._fault(f"a value must be empty or {_LABEL_PART_RULE}")
        self._take()

    def _is_word(self) -> bool:
        return self._peek() not in _SYMBOLS and self._peek() != ""

    def _peek(self) -> str:
        return self._tokens[self._index][0]

    def _take(self) -> None:
        self._index += 1

    def _fault(self, text: str) -> NoReturn:
        token, position = self._tokens[self._index]
        raise _SelectorFault(f"position {position}: {text}, got {quoted(token) if token else 'the end'}")


_LABEL_PART_RULE = "1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"


def _is_label_part(text: str) -> bool:
    return len(text) <= 63 and _LABEL_PART.fullmatch(text) is not None

"""How an API server is found and reached: kubeconfig files, read, merged and understood as kubectl does it, and a pod's
service account. All of it comes to one `access.Access`. Files are read synchronously, as they are small and local. When
to read them again is `connection.py`'s business; what only a credential has to read again is `credentials.py`'s.

Where this differs from kubectl, it refuses what kubectl lets pass without a word: no context, cluster or user is
assumed that no file has. And it does less: auth-provider and impersonation are refused, and nobody is asked for a
password."""

from __future__ import annotations

import base64
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import yaml

from trio_federation_kubernetes.access import Access, Credential
from trio_federation_kubernetes.credentials import ClusterInfo, ExecPlugin, Fixed, NoCredential, Plugin, TokenFile
from trio_federation_kubernetes.errors import CredentialError, KubeconfigError
from trio_federation_kubernetes.resources import is_namespace

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # pragma: no cover - only where PyYAML was built without its C library
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

#: where a pod finds its service account
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

#: bytes above which a file is no kubeconfig: thousands of clusters, each with its certificates, stay below it
MOST_BYTES = 8 << 20
#: values in a file, those counted again that an alias repeats; far more than fit into as many bytes by hand
MOST_VALUES = 1_000_000
#: levels of a file; a kubeconfig has eight, without extensions
MOST_LEVELS = 64
#: bytes above which a file holds no certificate
_MOST_PEM_BYTES = 4 << 20
#: names that an error lists
_MOST_NAMES = 10

_EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
#: the name of the extension of a cluster that is meant for exec plugins
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"

_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")

_T = TypeVar("_T")


# --- what is in a file; as in Go, null is as good as nothing everywhere, and keys that nobody knows do not matter


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """What all of these have in common: none of them shows itself, as any of them may hold a secret."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"


class Extension(_Said, frozen=True, kw_only=True):
    """Something that some other program has put there."""

    name: str | None = None
    extension: Any = None


class Cluster(_Said, frozen=True, kw_only=True, rename="kebab"):
    """A server, and how it is trusted."""

    server: str | None = None
    tls_server_name: str | None = None
    insecure_skip_tls_verify: bool | None = None
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    proxy_url: str | None = None
    disable_compression: bool | None = None
    extensions: list[Extension | None] | None = None


class Variable(_Said, frozen=True, kw_only=True):
    """One variable of a plugin's environment."""

    name: str | None = None
    value: str | None = None


class Exec(_Said, frozen=True, kw_only=True, rename="camel"):
    """A plugin that hands out credentials."""

    command: str | None = None
    args: list[str | None] | None = None
    env: list[Variable | None] | None = None
    api_version: str | None = None
    install_hint: str | None = None
    provide_cluster_info: bool | None = None
    interactive_mode: str | None = None


class User(_Said, frozen=True, kw_only=True, rename="kebab"):
    """What requests are signed with."""

    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    username: str | None = None
    password: str | None = None
    exec: Exec | None = None
    # What these hold does not matter, only that they are there.
    auth_provider: Any = None
    impersonated: Any = msgspec.field(default=None, name="as")
    as_uid: Any = None
    as_groups: Any = None
    as_user_extra: Any = None


class Context(_Said, frozen=True, kw_only=True):
    """A user of a cluster."""

    cluster: str | None = None
    user: str | None = None
    namespace: str | None = None


class _NamedCluster(_Said, frozen=True, kw_only=True):
    name: str | None = None
    cluster: Cluster | None = None


class _NamedUser(_Said, frozen=True, kw_only=True):
    name: str | None = None
    user: User | None = None


class _NamedContext(_Said, frozen=True, kw_only=True):
    name: str | None = None
    context: Context | None = None


class _File(_Said, frozen=True, kw_only=True, rename="kebab"):
    kind: str | None = None
    api_version: str | None = msgspec.field(default=None, name="apiVersion")
    current_context: str | None = None
    clusters: list[_NamedCluster | None] | None = None
    users: list[_NamedUser | None] | None = None
    contexts: list[_NamedContext | None] | None = None


# --- what files come to


class Entry(NamedTuple, Generic[_T]):
    """A cluster, user or context, and the file that it is from, which its relative paths start at."""

    file: Path
    value: _T


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """What one file says, or several that have been merged. None of it shows itself, as any of it may be secret."""

    files: tuple[Path, ...]
    current_context: str = field(default="", repr=False)
    clusters: Mapping[str, Entry[Cluster]] = field(default_factory=dict, repr=False)
    users: Mapping[str, Entry[User]] = field(default_factory=dict, repr=False)
    contexts: Mapping[str, Entry[Context]] = field(default_factory=dict, repr=False)


def find(
    kubeconfig: Path | None,
    context: str | None,
    environment: Mapping[str, str],
    *,
    clock: Callable[[], float],
    wall: Callable[[], float],
    service_account: Path = SERVICE_ACCOUNT,
) -> Access:
    """The API server to use: what the file `kubeconfig` says; else, unless a `context` is asked for, that of the pod we
    run in; else what the files in the variable KUBECONFIG say; else ~/.kube/config. `context` takes the place of the
    files' current one.

    `clock`: seconds that only go forward, for token files and plugins. `wall`: Unix seconds, used for the expiry of a
    plugin's credentials only. `service_account`: the folder of the pod's service account. Nothing is run here, and no
    token file is read. Raises KubeconfigError; also where nothing is found, saying what has been looked for."""
    if kubeconfig is not None:
        found = read(kubeconfig)
        if found is None:
            raise KubeconfigError(f"{kubeconfig}: there is no such file; name the kubeconfig that is to be used")
        return access(found, context, environment, clock=clock, wall=wall)
    looked_for = []
    if context is None:
        missing = _missing_of_pod(environment, service_account)
        if missing is None:
            return in_cluster(environment, clock=clock, service_account=service_account)
        looked_for.append(f"this is no pod with a service account ({missing})")
    variable = environment.get("KUBECONFIG", "")
    home = environment.get("HOME", "")
    if variable:
        # An empty part is no folder, and the same file twice would have nothing to add.
        paths = [Path(part) for part in dict.fromkeys(variable.split(os.pathsep)) if part]
        looked_for.append(f"KUBECONFIG names no file that is there ({', '.join(map(str, paths)) or 'it is empty'})")
    else:
        paths = [Path(home, ".kube", "config")] if home else []
        looked_for.append("KUBECONFIG is not set")
        looked_for.append(f"there is no {paths[0]}" if paths else "HOME is not set either")
    there = [one for one in map(read, paths) if one is not None]
    if not there:
        raise KubeconfigError(
            f"no API server is known: {'; '.join(looked_for)}; run in a pod with a service account, or set the option "
            '"kubeconfig" or the variable KUBECONFIG to a file that is there'
        )
    return access(merge(there), context, environment, clock=clock, wall=wall)


# --- the service account of a pod


def in_cluster(
    environment: Mapping[str, str], *, clock: Callable[[], float], service_account: Path = SERVICE_ACCOUNT
) -> Access:
    """The API server of the cluster that we are a pod of, by the environment and the files that every pod is given.

    Without its ca.crt the certificates of the system decide, as in client-go. Raises KubeconfigError where we are no
    pod, or what is there cannot be used."""
    missing = _missing_of_pod(environment, service_account)
    if missing is not None:
        raise KubeconfigError(f"this is no pod with a service account: {missing}")
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment["KUBERNETES_SERVICE_PORT"]
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    name = "the pod's service account"
    authority = service_account / "ca.crt"
    ca = None
    if authority.exists():
        ca = _certificates(_contents(authority, str(authority)), str(authority))
    else:
        name += f" (without {authority}: the system's certificates)"
    namespace = environment.get("POD_NAMESPACE", "")
    if not namespace and (service_account / "namespace").exists():
        place = str(service_account / "namespace")
        namespace = _text(_contents(service_account / "namespace", place), place).strip()
    return Access(
        name=name,
        server=_address(server, "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT"),
        namespace=_namespace(namespace, "the pod's namespace"),
        ca=ca,
        credential=TokenFile(service_account / "token", clock=clock),
    )


def _missing_of_pod(environment: Mapping[str, str], service_account: Path) -> str | None:
    """What a pod would have and we do not; None where we have it all."""
    for variable in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        if not environment.get(variable):
            return f"{variable} is not set"
    token = service_account / "token"
    return None if token.is_file() else f"there is no {token}"


# --- reading a file


def read(path: Path) -> Kubeconfig | None:
    """What one kubeconfig file says; None where there is no such file. An empty one says nothing.

    Raises KubeconfigError: it cannot be read, is too large, is no kubeconfig, has a value of a wrong type, two entries
    of one name, or data that is no base64, whether or not it would be used."""
    try:
        text = _text(_contents(path, str(path), MOST_BYTES), str(path))
    except KubeconfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    document = _document(text, path)
    if document is None:
        return Kubeconfig((path,))
    if not isinstance(document, dict):
        raise KubeconfigError(f"{path}: is no kubeconfig, as there are no keys in it; name another file")
    try:
        said = msgspec.convert(document, _File)
    except msgspec.ValidationError as error:
        # msgspec's texts show types and paths, no values.
        raise KubeconfigError(f"{path}: {_explained(str(error), document)}") from error
    if (said.kind or "Config") != "Config" or (said.api_version or "v1") != "v1":
        raise KubeconfigError(f"{path}: is no kubeconfig, as its kind and apiVersion are not Config and v1")
    clusters = [(one.name, one.cluster or Cluster()) for one in _items(said.clusters, _NamedCluster())]
    users = [(one.name, one.user or User()) for one in _items(said.users, _NamedUser())]
    contexts = [(one.name, one.context or Context()) for one in _items(said.contexts, _NamedContext())]
    kubeconfig = Kubeconfig(
        (path,),
        said.current_context or "",
        _by_name(path, "clusters", clusters),
        _by_name(path, "users", users),
        _by_name(path, "contexts", contexts),
    )
    for name, cluster in kubeconfig.clusters.items():
        _data(cluster.value.certificate_authority_data, f"{path}: clusters[{name}].certificate-authority-data")
    for name, user in kubeconfig.users.items():
        _data(user.value.client_certificate_data, f"{path}: users[{name}].client-certificate-data")
        _data(user.value.client_key_data, f"{path}: users[{name}].client-key-data")
    return kubeconfig


def _by_name(path: Path, kind: str, items: Iterable[tuple[str | None, _T]]) -> dict[str, Entry[_T]]:
    entries: dict[str, Entry[_T]] = {}
    for name, value in items:
        if (name or "") in entries:
            raise KubeconfigError(f"{path}: {kind}[{name or ''}] is there twice; take one out")
        entries[name or ""] = Entry(path, value)
    return entries


def _items(items: Sequence[_T | None] | None, empty: _T) -> Iterator[_T]:
    for item in items or ():
        yield empty if item is None else item


def _explained(text: str, document: dict[str, Any]) -> str:
    """msgspec's text about a wrong value, with the path to it as a person would write it: by names, not numbers."""
    match = re.fullmatch(r"(.*) - at `(key in )?\$\.?(.*)`", text, re.DOTALL)
    if match is None:
        return text
    fault, path = match[1].replace(" | null", ""), match[3]
    entry = re.match(r"(clusters|users|contexts)\[(\d+)\](\.(cluster|user|context)\b)?", path)
    if entry is not None:
        name = document[entry[1]][int(entry[2])]
        if isinstance(name, dict) and isinstance(name.get("name"), str):
            path = f"{entry[1]}[{name['name']}]{path[entry.end() :]}"
    advice = (
        "; put it in quotes"
        if fault.startswith("Expected `str") and fault.endswith(("`int`", "`float`", "`bool`"))
        else ""
    )
    return f"{path}: {fault[0].lower()}{fault[1:]}{advice}"


# --- YAML, as Go's reader in kubectl understands it


class _Loader(_SafeLoader):
    """Knows the types of JSON only, and tells them from text as Go's YAML does: dates and "12:30:45" are text. A tag
    that it does not know changes nothing."""

    # Its own, as it must not share those of the base class.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - typed so by PyYAML
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As in JSON, keys are text whatever they look like."""
        self.flatten_mapping(node)
        found = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "found a key that is no text", key.start_mark)
            found[key.value] = self.construct_object(value, deep=True)
        return found


_TRUE = ("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON")
_FALSE = ("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF")
_NULL = ("", "~", "null", "Null", "NULL")
_INTEGER = re.compile(r"[-+]?(0[bB][01]+|0[oO]?[0-7]+|0[xX][0-9a-fA-F]+|0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
#: characters; Python refuses to read longer ones, and no field takes any
_LONGEST_NUMBER = 1000
_NO_NUMBER = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def _number(text: str) -> int | float | str:
    """The number that a plain word is, or the word itself."""
    if _NO_NUMBER.fullmatch(text):
        return float(text.replace(".", "", 1))
    plain = text if text.startswith(".") else text.replace("_", "")
    if len(plain) > _LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(plain):
        digits = plain.lstrip("+-")
        octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
        number = int(digits, 8 if octal else 0) * (-1 if plain[0] == "-" else 1)
        if -(1 << 63) <= number < 1 << 64:
            return number
    if _FLOAT.fullmatch(plain) and math.isfinite(float(plain)):
        return float(plain)
    return text


def _construct_number(loader: _Loader, node: yaml.ScalarNode) -> int | float | str:
    return _number(str(loader.construct_scalar(node)))


def _construct_boolean(loader: _Loader, node: yaml.ScalarNode) -> bool:
    word = loader.construct_scalar(node)
    if word not in _TRUE and word not in _FALSE:
        raise yaml.constructor.ConstructorError(None, None, "found a !!bool that is none", node.start_mark)
    return word in _TRUE


def _words(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(?:{'|'.join(map(re.escape, words))})\Z")


_TAG = "tag:yaml.org,2002:"
_Loader.add_implicit_resolver(f"{_TAG}bool", _words((*_TRUE, *_FALSE)), list("yYnNtTfFoO"))
_Loader.add_implicit_resolver(f"{_TAG}null", _words(_NULL), ["", *"~nN"])
_Loader.add_implicit_resolver(f"{_TAG}merge", _words(["<<"]), ["<"])
# Whatever begins like a number; whether it is one shows when it is made.
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(r"[-+.0-9]"), list("-+.0123456789"))
_Loader.yaml_constructors.update(
    {
        f"{_TAG}null": lambda loader, node: None,
        f"{_TAG}bool": _construct_boolean,
        f"{_TAG}int": _construct_number,
        f"{_TAG}float": _construct_number,
    }
)


def _document(text: str, path: Path) -> Any:
    """The first document in a YAML text; kubectl reads no others either. None where there is none.

    Raises KubeconfigError where it is no YAML, nested too deeply, or, with its aliases written out, too large."""
    try:
        _check_size(text, path)
        loader = _Loader(text)
        try:
            node = loader.get_node() if loader.check_node() else None
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        # Without its cause, as PyYAML's own text may quote the line, and with it a token.
        line = _line(error.problem_mark or error.context_mark)
        raise KubeconfigError(f"{path}: is no YAML{line}: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise KubeconfigError(
            f"{path}: is no YAML: character {error.position + 1} is one that YAML does not allow"
        ) from None


def _line(mark: Any) -> str:
    """Where in a text, if that is known; `mark` is of PyYAML or of its C library."""
    return "" if mark is None else f" in line {mark.line + 1}"


def _check_size(text: str, path: Path) -> None:
    """Refuses what would need much time or memory, or never end: an alias costs a file nothing, but whoever follows it
    all that it stands for. Looks at the stream of events only, in which an alias is one event."""
    depth = values = 0
    sizes: dict[str, int] = {}
    #: of those collections that are not at their end: anchor, and how many values there were at the beginning
    within: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.DocumentEndEvent):
            return
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in within):
                raise KubeconfigError(f"{path}: an alias{_line(event.start_mark)} stands for what it is in")
            values += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            within.append((event.anchor, values))
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            anchor, before = within.pop()
            if anchor is not None:
                sizes[anchor] = values - before
        if values > MOST_VALUES:
            raise KubeconfigError(
                f"{path}: has more than {MOST_VALUES} values, aliases written out; is it the right file?"
            )
        if depth > MOST_LEVELS:
            raise KubeconfigError(f"{path}: has more than {MOST_LEVELS} levels; is it the right file?")


# --- merging files, and choosing from them


def merge(kubeconfigs: Iterable[Kubeconfig]) -> Kubeconfig:
    """Several files as one. The first that has an entry of a name has all of the entry: nothing of a later one of that
    name counts. The first that names a current context decides on that."""
    files: list[Path] = []
    current_context = ""
    clusters: dict[str, Entry[Cluster]] = {}
    users: dict[str, Entry[User]] = {}
    contexts: dict[str, Entry[Context]] = {}
    for one in kubeconfigs:
        files += one.files
        current_context = current_context or one.current_context
        clusters = {**one.clusters, **clusters}
        users = {**one.users, **users}
        contexts = {**one.contexts, **contexts}
    return Kubeconfig(tuple(files), current_context, clusters, users, contexts)


def access(
    kubeconfig: Kubeconfig,
    context: str | None,
    environment: Mapping[str, str],
    *,
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> Access:
    """What a kubeconfig says for `context`, or, without one, for its current context. `environment` is that of plugins;
    for `clock` and `wall` see `find`. Raises KubeconfigError."""
    files = ", ".join(map(str, kubeconfig.files))
    name = context or kubeconfig.current_context
    if not name:
        raise KubeconfigError(
            f'{files}: no context is current; set the option "context", or current-context in the file. '
            f"{_listed(kubeconfig.contexts)}"
        )
    asked = f'the option "context" names {name!r}' if context else f"current-context is {name!r}"
    chosen = _pick(kubeconfig.contexts, name, f"{files}: {asked}")
    place = f"{chosen.file}: contexts[{name}]"
    cluster_name, user_name = chosen.value.cluster or "", chosen.value.user or ""
    if not cluster_name:
        raise KubeconfigError(f"{place} names no cluster; name one. {_listed(kubeconfig.clusters)}")
    cluster = _pick(kubeconfig.clusters, cluster_name, f"{place}.cluster is {cluster_name!r}")
    user: Entry[User] = Entry(chosen.file, User())
    if user_name:
        user = _pick(kubeconfig.users, user_name, f"{place}.user is {user_name!r}")
    at_cluster, at_user = f"{cluster.file}: clusters[{cluster_name}]", f"{user.file}: users[{user_name}]"
    _check_user(user.value, at_user)
    server = _server(cluster.value, user.value, at_cluster)
    full_name = f"context {name} of {chosen.file}"
    namespace = _namespace(chosen.value.namespace or "", f"{place}.namespace")
    proxy = _proxy(cluster.value.proxy_url, f"{at_cluster}.proxy-url")
    if server.startswith("http:"):
        # Nothing that is secret goes over a connection that anybody can read.
        if _signs(user.value):
            full_name += " (plain http: no credential is sent)"
        return Access(name=full_name, server=server, namespace=namespace, proxy=proxy, credential=NoCredential())
    ca = _authority(cluster, at_cluster)
    return Access(
        name=full_name,
        server=server,
        namespace=namespace,
        ca=ca,
        verify=not cluster.value.insecure_skip_tls_verify,
        server_name=cluster.value.tls_server_name or None,
        client_certificate=_client_certificate(user, at_user),
        proxy=proxy,
        credential=_credential(user, at_user, cluster.value, ca, environment, clock, wall),
    )


def _pick(entries: Mapping[str, Entry[_T]], name: str, said: str) -> Entry[_T]:
    """The entry of that name. Raises KubeconfigError with what `said` so, the nearest name, and what there is."""
    if name in entries:
        return entries[name]
    folded = {one.casefold(): one for one in sorted(entries, reverse=True)}
    close = difflib.get_close_matches(name.casefold(), folded, n=1)
    meant = f"; did you mean {folded[close[0]]!r}?" if close else "."
    raise KubeconfigError(f"{said}, which is not there{meant} {_listed(entries)}")


def _listed(names: Iterable[str]) -> str:
    there = sorted(names)
    if not there:
        return "There is none at all"
    more = f" and {len(there) - _MOST_NAMES} more" if len(there) > _MOST_NAMES else ""
    return f"There is: {', '.join(map(repr, there[:_MOST_NAMES]))}{more}"


def _check_user(user: User, place: str) -> None:
    """Refuses what we do not do, and what contradicts itself."""
    if user.auth_provider is not None:
        raise KubeconfigError(
            f"{place}.auth-provider: is not supported; use an exec plugin instead, as kubectl now does"
        )
    for key, value in (
        ("as", user.impersonated),
        ("as-uid", user.as_uid),
        ("as-groups", user.as_groups),
        ("as-user-extra", user.as_user_extra),
    ):
        if value:
            raise KubeconfigError(f"{place}.{key}: is not supported; name a user that has the rights itself")
    if (user.token or user.token_file) and (user.username or user.password):
        raise KubeconfigError(f"{place}: has both a token and a user name with a password; take one of them out")


def _signs(user: User) -> bool:
    """Whether a user has anything to show."""
    return bool(
        user.token
        or user.token_file
        or user.username
        or user.exec
        or user.client_certificate
        or user.client_certificate_data
    )


def _server(cluster: Cluster, user: User, place: str) -> str:
    """The address of a cluster. One without a scheme means plain http, as in kubectl."""
    text = cluster.server or ""
    if not text:
        raise KubeconfigError(f"{place}.server: is not there; give the address of the API server, https://…")
    try:
        split = urlsplit(text)
        bare = not split.scheme or not split.netloc
    except ValueError:
        bare = False
    if not bare:
        return _address(text, f"{place}.server")
    # That kubectl sends no credential over http helps nobody here: it is https that must have been meant.
    if _signs(user) or any(
        (
            cluster.insecure_skip_tls_verify,
            cluster.certificate_authority,
            cluster.certificate_authority_data,
            cluster.tls_server_name,
        )
    ):
        raise KubeconfigError(f"{place}.server: has no scheme, which means plain http; put https:// before it")
    address = _address(f"http://{text}", f"{place}.server")
    if address.count("/") > 2:
        raise KubeconfigError(f"{place}.server: has a path and no scheme; put https:// before it")
    return address


def _address(text: str, place: str) -> str:
    """A URL of a server without slashes at its end, query and fragment. Raises KubeconfigError, which does not show it,
    as it may have a password in it."""
    fault = None
    try:
        split = urlsplit(text)
        if not text.isprintable() or " " in text:
            fault = "has characters that no address has"
        elif split.scheme not in ("http", "https"):
            fault = "is neither https nor http"
        elif "@" in split.netloc:
            fault = "has a user name or password in it; put that under users"
        elif not split.hostname or split.port == 0:
            fault = "names no host or no port"
    except ValueError:
        fault = "is no address; one of IPv6 stands in brackets, https://[fd00::1]:6443"
    if fault is not None:
        raise KubeconfigError(f"{place}: {fault}")
    return f"{split.scheme}://{split.netloc}{split.path.rstrip('/')}"


def _proxy(text: str | None, place: str) -> str | None:
    if not text:
        return None
    fault = None
    try:
        split = urlsplit(text)
        if split.scheme not in ("http", "https", "socks5"):
            fault = "is none of http://, https:// and socks5://"
        elif not split.hostname or split.port == 0 or not text.isprintable() or " " in text:
            fault = "names no host, or has characters that no address has"
    except ValueError:
        fault = "is no address; one of IPv6 stands in brackets, http://[fd00::1]:3128"
    if fault is not None:
        raise KubeconfigError(f"{place}: {fault}")
    return text


def _namespace(text: str, place: str) -> str:
    if text and not is_namespace(text):
        raise KubeconfigError(f"{place}: is no name of a namespace (at most 63 of a-z, 0-9 and -)")
    return text or "default"


def _authority(cluster: Entry[Cluster], place: str) -> bytes | None:
    said = cluster.value
    if not said.certificate_authority_data and not said.certificate_authority:
        return None
    if said.insecure_skip_tls_verify:
        raise KubeconfigError(
            f"{place}: has both a certificate-authority and insecure-skip-tls-verify; take the latter out"
        )
    key = "certificate-authority-data" if said.certificate_authority_data else "certificate-authority"
    content = _data_or_file(said.certificate_authority_data, said.certificate_authority, cluster.file, f"{place}.{key}")
    return _certificates(content, f"{place}.{key}")


def _client_certificate(user: Entry[User], place: str) -> tuple[bytes, bytes] | None:
    said = user.value
    # As in kubectl, a key alone means nothing.
    if not said.client_certificate_data and not said.client_certificate:
        return None
    if not said.client_key_data and not said.client_key:
        raise KubeconfigError(f"{place}: has a client-certificate without a client-key; give both")
    at_certificate = f"{place}.client-certificate{'-data' if said.client_certificate_data else ''}"
    at_key = f"{place}.client-key{'-data' if said.client_key_data else ''}"
    certificate = _data_or_file(said.client_certificate_data, said.client_certificate, user.file, at_certificate)
    key = _data_or_file(said.client_key_data, said.client_key, user.file, at_key)
    if b"PRIVATE KEY-----" not in key:
        raise KubeconfigError(f"{at_key}: has no private key in PEM")
    return _certificates(certificate, at_certificate), key


def _credential(
    user: Entry[User],
    place: str,
    cluster: Cluster,
    ca: bytes | None,
    environment: Mapping[str, str],
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> Credential:
    """What a user signs with, in the order of client-go: whoever has something else needs no plugin."""
    said = user.value
    try:
        if said.token_file:
            # The token beside it is for the time until the file can be read.
            otherwise = Fixed.token(said.token, f"{place}.token").header if said.token else None
            return TokenFile(_beside(user.file, said.token_file), clock=clock, otherwise=otherwise)
        if said.token:
            return Fixed.token(said.token, f"{place}.token")
        if said.username:
            return Fixed.basic(said.username, said.password or "", f"{place}.username")
    except CredentialError as error:
        raise KubeconfigError(str(error)) from error
    if said.exec is None or said.client_certificate_data or said.client_certificate:
        return NoCredential()
    plugin = _plugin(said.exec, user.file, f"{place}.exec", cluster, ca, environment)
    return ExecPlugin(plugin, clock=clock, wall=wall)


def _plugin(
    said: Exec, file: Path, place: str, cluster: Cluster, ca: bytes | None, environment: Mapping[str, str]
) -> Plugin:
    if not said.command:
        raise KubeconfigError(f"{place}.command: is not there; name the plugin")
    if said.api_version not in _EXEC_VERSIONS:
        raise KubeconfigError(
            f"{place}.apiVersion: is neither {' nor '.join(_EXEC_VERSIONS)}; update the plugin, and its entry"
        )
    mode = said.interactive_mode or ("" if said.api_version == _EXEC_VERSIONS[0] else "IfAvailable")
    if mode == "Always":
        raise KubeconfigError(
            f"{place}.interactiveMode: is Always, but there is nobody here to ask; use a plugin that needs no input"
        )
    if mode not in ("Never", "IfAvailable"):
        raise KubeconfigError(f"{place}.interactiveMode: must be Never or IfAvailable")
    variables = {}
    for variable in _items(said.env, Variable()):
        if not variable.name:
            raise KubeconfigError(f"{place}.env: has a variable without a name; give it one")
        variables[variable.name] = variable.value or ""
    return Plugin(
        place=place,
        command=str(_beside(file, said.command)) if os.sep in said.command else said.command,
        arguments=tuple(_items(said.args, "")),
        environment={**environment, **variables},
        api_version=said.api_version,
        install_hint=said.install_hint or "",
        cluster=_cluster_info(cluster, ca) if said.provide_cluster_info else None,
    )


def _cluster_info(cluster: Cluster, ca: bytes | None) -> ClusterInfo:
    extensions = {one.name or "": one.extension for one in _items(cluster.extensions, Extension())}
    return ClusterInfo(
        server=cluster.server or "",
        tls_server_name=cluster.tls_server_name or "",
        insecure_skip_tls_verify=bool(cluster.insecure_skip_tls_verify),
        certificate_authority_data=ca or b"",
        proxy_url=cluster.proxy_url or "",
        disable_compression=bool(cluster.disable_compression),
        config=msgspec.Raw(msgspec.json.encode(extensions.get(_EXEC_EXTENSION))),
    )


# --- files and data that a kubeconfig names or holds


def _beside(file: Path, reference: str) -> Path:
    """A path as it is meant in a file: from the folder of that file on. Its links are not followed, as in kubectl."""
    return Path(os.path.normpath(os.path.join(os.path.abspath(os.path.dirname(file)), reference)))


def _data_or_file(data: str | None, reference: str | None, file: Path, place: str) -> bytes:
    """What `data` holds, or else the file that is named; one of them is there."""
    return _data(data, place) if data else _contents(_beside(file, reference or ""), place)


def _data(text: str | None, place: str) -> bytes:
    # As in Go, line breaks do not count, and all else does. Python's own reader lets some faults pass.
    joined = (text or "").replace("\n", "").replace("\r", "")
    if not _BASE64.fullmatch(joined):
        raise KubeconfigError(f"{place}: not base64; copy it anew, or name a file instead")
    return base64.b64decode(joined)


def _certificates(content: bytes, place: str) -> bytes:
    if not re.search(rb"-----BEGIN (TRUSTED |X509 )?CERTIFICATE-----", content):
        raise KubeconfigError(f"{place}: has no certificate in PEM")
    return content


def _contents(path: Path, place: str, most: int = _MOST_PEM_BYTES) -> bytes:
    named = "" if place == str(path) else f" {path}"
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise KubeconfigError(f"{place}:{named} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise KubeconfigError(f"{place}: is no path, as it has a zero byte in it") from error
    if len(content) > most:
        raise KubeconfigError(f"{place}:{named} has more than {most} bytes; is it the right file?")
    return content


def _text(content: bytes, place: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        # Without its cause, which carries all of the content.
        raise KubeconfigError(f"{place}: is not UTF-8 (byte {error.start + 1}); save it as UTF-8") from None

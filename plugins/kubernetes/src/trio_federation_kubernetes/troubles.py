"""What a failed request means to people: which objects it is about, where, and what to do next. Pure. What follows for
the next request is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trio_federation import Trouble
from trio_federation_kubernetes.errors import KubernetesError
from trio_federation_kubernetes.resources import Resource

#: Names that are told where several have the same trouble; the others are counted.
NAMED = 3

#: By the reason of an error, what to do about it.
_ADVICE = {
    "forbidden": "grant its user list and watch on {resource}; config/kubernetes/rbac has the roles",
    "unauthorized": "see whether its token or certificate has expired or was revoked",
    "not_found": "install the CustomResourceDefinition of {resource}, or take the {table} out",
}


def trouble(
    resource: Resource, error: KubernetesError, namespaces: Sequence[str | None] = (), *, table: str = "source"
) -> Trouble:
    """A request about a resource that has failed, in these namespaces. `table`: what the configuration calls who has
    made it."""
    named = [namespace for namespace in namespaces if namespace is not None]
    places = some(named, "namespace")
    advice = _ADVICE.get(error.reason, "").format(resource=resource, table=table)
    if error.reason == "forbidden" and "system:anonymous" in str(error):
        advice = "the API server did not accept the credential of the kubeconfig's user, or there is none"
    return Trouble(
        error.reason,
        f"{resource}{f' in {places}' if places else ''}: {error}" + (f"; {advice}" if advice else ""),
    )


def troubles(
    failures: Iterable[tuple[Resource, str | None, KubernetesError | None]], *, table: str = "source"
) -> list[Trouble]:
    """What went wrong last with each resource and namespace (None: all), if anything. Namespaces with the same kind of
    trouble are told together, with the words of the first."""
    found: dict[tuple[str, Resource], tuple[KubernetesError, list[str | None]]] = {}
    for resource, namespace, error in failures:
        if error is not None:
            found.setdefault((error.reason, resource), (error, []))[1].append(namespace)
    return [trouble(resource, error, where, table=table) for (_, resource), (error, where) in found.items()]


def some(names: Sequence[str], what: str) -> str:
    """The first few names, and how many more there are of `what`: "a, b, c and 2 more namespaces"."""
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {counted(rest, f'more {what}')}" if rest > 0 else "")


def counted(number: int, what: str) -> str:
    """A number of things: "1 env", "2 envs"."""
    return f"{number} {what}{'s' if number != 1 else ''}"

"""What a failed request is to people: one line that names the place and says what to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_federation_kubernetes.errors import ApiError, KubernetesError, UnreachableError
from trio_federation_kubernetes.resources import Resource
from trio_federation_kubernetes.troubles import NAMED, counted, some, trouble, troubles

PODS = Resource("", "v1", "pods")
ENVS = Resource("agents.navix.sh", "v1alpha1", "sandboxenvs")


def error(code: int, text: str = "no") -> ApiError:
    return ApiError(text, code=code)


@pytest.mark.parametrize(
    "number, said", [(0, "0 envs"), (1, "1 env"), (2, "2 envs"), (1000, "1000 envs"), (-1, "-1 envs")]
)
def test_counts(number: int, said: str) -> None:
    assert counted(number, "env") == said


@pytest.mark.parametrize(
    "number, said",
    [
        (0, ""),
        (1, "n0"),
        (3, "n0, n1, n2"),
        (4, "n0, n1, n2 and 1 more namespace"),
        (6, "n0, n1, n2 and 3 more namespaces"),
    ],
)
def test_some_names(number: int, said: str) -> None:
    assert some([f"n{each}" for each in range(number)], "namespace") == said


@given(st.integers(0, 5000))
def test_the_line_does_not_grow_with_the_names(number: int) -> None:
    said = some([f"namespace-{each:04}" for each in range(number)], "namespace")
    assert said.count("namespace-") == min(number, NAMED)
    assert len(said) < 80


@pytest.mark.parametrize(
    "failure, reason, advice",
    [
        (error(403), "forbidden", "; grant its user list and watch on pods; config/kubernetes/rbac has the roles"),
        (error(401), "unauthorized", "; see whether its token or certificate has expired or was revoked"),
        (error(404), "not_found", "; install the CustomResourceDefinition of pods, or take the source out"),
        (error(429), "throttled", ""),
        (error(500), "server", ""),
        (error(400), "refused", ""),
        (UnreachableError("no"), "unreachable", ""),
        (KubernetesError("no"), "error", ""),
    ],
)
def test_a_trouble_says_what_to_do(failure: KubernetesError, reason: str, advice: str) -> None:
    found = trouble(PODS, failure)
    assert (found.reason, found.detail, found.party) == (reason, f"pods: no{advice}", "")


def test_what_is_to_be_taken_out_is_called_as_the_configuration_does() -> None:
    assert trouble(ENVS, error(404), table="sink").detail == (
        "sandboxenvs.agents.navix.sh: no; "
        "install the CustomResourceDefinition of sandboxenvs.agents.navix.sh, or take the sink out"
    )


def test_a_user_whom_the_server_does_not_know_lacks_no_right() -> None:
    found = trouble(PODS, error(403, 'pods is forbidden: User "system:anonymous" cannot list resource "pods"'), ["a"])
    assert "grant" not in found.detail
    assert "did not accept the credential" in found.detail
    assert found.detail.startswith("pods in a: ")


def test_namespaces_are_named_where_there_are_any() -> None:
    assert trouble(PODS, error(500), [None]).detail == "pods: no"
    assert trouble(PODS, error(500), ["a", "b"]).detail == "pods in a, b: no"
    assert trouble(PODS, error(500), list("abcde")).detail == "pods in a, b, c and 2 more namespaces: no"


def test_the_same_trouble_of_several_namespaces_is_told_once_in_the_words_of_the_first() -> None:
    first, second, third, fourth = error(403, "first"), error(403, "second"), error(500, "third"), error(403, "fourth")
    found = troubles(
        [
            (PODS, "a", first),
            (PODS, "b", None),
            (PODS, "c", third),
            (PODS, "d", second),
            (ENVS, "a", fourth),
        ]
    )
    assert [each.reason for each in found] == ["forbidden", "server", "forbidden"]
    assert found[0].detail.startswith("pods in a, d: first; grant")
    assert found[1].detail == "pods in c: third"
    assert found[2].detail.startswith("sandboxenvs.agents.navix.sh in a: fourth")


def test_where_nothing_went_wrong_there_is_no_trouble() -> None:
    assert troubles([(PODS, None, None), (ENVS, "a", None)]) == []
    assert troubles([]) == []


def test_each_trouble_says_what_the_configuration_calls_it() -> None:
    (found,) = troubles([(ENVS, None, error(404))], table="sink")
    assert found.detail.endswith("or take the sink out")

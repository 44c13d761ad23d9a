"""Who owns what in a status, as API servers say it. The shapes of metadata.managedFields and of conflicts in here are
those of Kubernetes 1.36 after the writes that each test names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kubernetes.json_texts import JSON, Verbatim, dump, listed, nested, places, replaced
from trio_federation_kubernetes.decoding import Decoder, reach
from trio_federation_kubernetes.errors import ApiError, Cause
from trio_federation_kubernetes.ownership import FIELD_MANAGER, Conflict, ManagedFields, Owners, conflicts, suspect

NOON = "2026-11-30T12:00:00Z"
LATER = "2026-11-30T12:00:10Z"


class Metadata(msgspec.Struct, frozen=True, gc=False):
    managedFields: list[ManagedFields] | None = None


class Env(msgspec.Struct, frozen=True, gc=False):
    metadata: Metadata | None = None


def decoded(managed_fields: object) -> Any:
    """What a decoder makes of this in an object."""
    item = {"metadata": {"name": "e", "namespace": "n", "managedFields": managed_fields}}
    ((_, env),) = Decoder(Env).page(listed(item)).objects
    return reach(env, "metadata", "managedFields")


def owners(*entries: object) -> Owners:
    return Owners.of(decoded(list(entries)))


def suspected(*clusters: str, of: Sequence[object]) -> str:
    return suspect(decoded(list(of)), clusters)


def entry(
    manager: str,
    fields: object,
    *,
    operation: str = "Update",
    subresource: str | None = "status",
    time: str | None = NOON,
) -> dict[str, Any]:
    found = {
        "apiVersion": "agents.navix.sh/v1alpha1",
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
        "manager": manager,
        "operation": operation,
        "subresource": subresource,
        "time": time,
    }
    return {name: value for name, value in found.items() if value is not None}


def key(cluster: str) -> str:
    return f"k:{json.dumps({'clusterID': cluster}, ensure_ascii=False)}"


def in_list(items: Mapping[str, object], *, itself: bool = False) -> dict[str, Any]:
    """Fields of status.clusters."""
    found = {key(name): each for name, each in items.items()}
    return {"f:status": {"f:clusters": {".": {}, **found} if itself else found}}


def whole(*counts: str) -> dict[str, Any]:
    """All the fields of an entry with one pool that has these counts."""
    pool: dict[str, Any] = {".": {}, "f:name": {}, "f:state": {}} | {f"f:{count}": {} for count in counts}
    return {
        ".": {},
        "f:clusterID": {},
        "f:isLocal": {},
        "f:lastSnapshotTime": {},
        "f:observedMembers": {'k:{"name":"small"}': pool},
    }


def a_count(count: str = "idleCount") -> dict[str, Any]:
    """What whoever changes one count of a pool owns of an entry."""
    return {"f:observedMembers": {'k:{"name":"small"}': {f"f:{count}": {}}}}


def ours(fields: object, time: str | None = NOON) -> dict[str, Any]:
    return entry(FIELD_MANAGER, fields, operation="Apply", time=time)


CREATOR = entry("kubectl-create", {"f:spec": {}}, subresource=None, time=LATER)
#: the env's own controller, with its own cluster
CONTROLLER = entry("controller", in_list({"west": whole("idleCount")}, itself=True))
OURS = ours(in_list({"east": whole("idleCount", "runningCount"), "north": whole("idleCount")}))


# --- as API servers say it


def test_what_is_ours() -> None:
    found = owners(OURS, CONTROLLER, CREATOR)
    assert found.ours == {"east", "north"}
    assert found.anything_ours
    assert found.owners("west") == ("controller",)
    assert found.owners("east") == found.owners("nowhere") == ()


def test_ours_is_what_we_apply_to_the_status_and_nothing_else() -> None:
    fields = in_list({"east": whole()})
    for other in (
        entry(FIELD_MANAGER, fields),
        entry(FIELD_MANAGER, fields, operation="Apply", subresource=None),
        entry(FIELD_MANAGER, fields, operation="Apply", subresource="scale"),
        entry("trio-federation-2", fields, operation="Apply"),
    ):
        found = owners(other)
        assert not found.ours
        assert not found.anything_ours


def test_our_sums_are_ours_too() -> None:
    found = owners(ours({"f:status": {"f:federation": {"f:clusters": {}, "f:idleReplicas": {}}}}))
    assert not found.ours
    assert found.anything_ours


def test_what_is_left_of_an_apply_of_an_empty_status_is_nothing() -> None:
    # The server gives it no time.
    nothings: list[dict[str, Any]] = [{"f:status": {}}, {"f:status": {".": {}}}, {}, {"f:spec": {"f:x": {}}}]
    for fields in nothings:
        assert not owners(ours(fields, time=None), CONTROLLER).anything_ours


def test_removed_by_a_merge_patch_of_a_list_without_our_entries() -> None:
    """The one who did it stays unknown where its list has nothing new: the best guess is who owns a part of it."""
    after = [CONTROLLER, CREATOR]
    found = owners(*after)
    assert not found.ours
    assert not found.anything_ours
    assert found.owners("east") == ()
    assert suspected("east", "north", of=after) == "controller"
    # One that has changed something in it is known.
    ops = entry("ops", in_list({"west": a_count()}), time=LATER)
    assert suspected("east", "north", of=[ops, *after]) == "ops"
    # One that writes some other part of the status all the time is not taken for it.
    health = entry("health", {"f:status": {"f:conditions": {".": {}}}}, time=LATER)
    assert suspected("east", of=[health, *after]) == "controller"
    assert suspected("east", of=[health, CREATOR]) == "health"


def test_removed_by_a_merge_patch_that_empties_the_list() -> None:
    # to the owner of the list, only the list is left
    after = [entry("controller", {"f:status": {".": {}, "f:clusters": {}, "f:idleReplicas": {}}}), CREATOR]
    assert owners(*after).owners("east") == ("controller",)
    assert owners(entry("a", in_list({}, itself=True))).owners("east") == ("a",)
    assert suspected("east", of=after) == "controller"
    # and it gets none of what others put into it then
    found = owners(OURS, *after)
    assert found.owners("east") == found.owners("west") == ()
    assert found.ours == {"east", "north"}


def test_rewritten_by_a_merge_patch_that_changes_a_count() -> None:
    without = ours(in_list({"east": whole("runningCount"), "north": whole("idleCount")}))
    after = [without, CONTROLLER, entry("ops", in_list({"east": a_count()})), CREATOR]
    found = owners(*after)
    assert found.ours == {"east", "north"}
    assert found.owners("east") == ("ops",)
    assert found.owners("north") == ()
    assert suspected("east", of=after) == suspected("north", "east", of=after) == "ops"
    assert suspected("north", of=after) == "controller"


def test_rewritten_by_a_forced_apply_of_another_manager() -> None:
    without = ours(in_list({"east": whole("runningCount"), "north": whole("idleCount")}))
    rival = entry("rival", in_list({"east": whole("idleCount", "runningCount")}), operation="Apply")
    after = [rival, without, CONTROLLER, CREATOR]
    found = owners(*after)
    assert found.ours == {"east", "north"}
    assert found.owners("east") == ("rival",)
    assert suspected("east", of=after) == "rival"
    # and when we have let go
    found = owners(rival, ours({"f:status": {}}, time=None), CONTROLLER)
    assert not found.ours
    assert found.owners("east") == ("rival",)


def test_rewritten_under_our_own_name() -> None:
    # by something that does not apply
    stranger = entry(FIELD_MANAGER, in_list({"east": a_count()}), time=LATER)
    assert owners(OURS, stranger).ours == {"east", "north"}
    assert owners(OURS, stranger).owners("east") == ()
    assert suspected("east", of=[OURS, stranger, CREATOR]) == FIELD_MANAGER
    # or by another agent, which leaves the same as we do
    assert suspected("east", of=[OURS, CREATOR]) == FIELD_MANAGER
    assert suspected("west", of=[OURS, CREATOR]) == ""


def test_of_several_suspects_the_last_one() -> None:
    def written(manager: str, time: str | None) -> dict[str, Any]:
        return entry(manager, in_list({"east": a_count()}), time=time)

    assert suspected("east", of=[written("a", NOON), written("b", LATER), written("c", NOON)]) == "b"
    assert suspected("east", of=[written("c", NOON), written("b", NOON)]) == "b"
    # times that are none, or without an offset, are older than any
    for odd in (None, "", "yesterday", "2027-01-01", "2027-01-01T00:00:00", "zzzZ", "2027-13-01T00:00:00Z"):
        assert suspected("east", of=[written("a", odd), written("b", NOON)]) == "b"
    # 13:00:05 there is earlier than 12:00:10 here
    assert suspected("east", of=[written("a", "2026-11-30T13:00:05+01:00"), written("b", LATER)]) == "b"


def test_fields_that_were_written_without_a_subresource() -> None:
    old = entry("ancient-changes", in_list({"west": whole()}), subresource=None)
    assert owners(old).owners("west") == ("ancient-changes",)
    assert suspected("east", of=[old]) == "ancient-changes"
    assert suspected("east", of=[CREATOR]) == ""
    assert suspected("east", of=[entry("scaler", {"f:status": {"f:replicas": {}}}, subresource="scale")]) == ""
    assert suspected("east", of=[entry("a", {"f:spec": {}, "f:status": {}}, subresource=None), CREATOR]) == "a"


def test_several_owners_each_once_by_name() -> None:
    fields = in_list({"east": a_count()})
    again = entry("b", fields, operation="Apply")
    assert owners(entry("c", fields), entry("b", fields), again, OURS).owners("east") == ("b", "c")


@pytest.mark.parametrize(
    "text, cluster",
    [
        ('k:{"clusterID":"east"}', "east"),
        ('k: { "clusterID" : "east" } ', "east"),
        ('k:{"clusterID":"\\u0065ast"}', "east"),
        ('k:{"a":1,"clusterID":"east","z":[{}]}', "east"),
        ('k:{"clusterID":"ea\\"st\\\\ é\\u2028"}', 'ea"st\\ é\u2028'),
        ('k:{"clusterID":5}', None),
        ('k:{"clusterID":null}', None),
        ('k:{"clusterid":"east"}', None),
        ("k:{}", None),
        ('k:["clusterID"]', None),
        ('k:"east"', None),
        ('k:{"clusterID":"east"', None),
        ('k:{"clusterID":"east"} x', None),
        ("k:" + '{"a":' * 50_000, None),
        ("k:", None),
        ('v:{"clusterID":"east"}', None),
        ('f:{"clusterID":"east"}', None),
        ("i:0", None),
        ("", None),
        ("east", None),
    ],
)
def test_keys(text: str, cluster: str | None) -> None:
    found = owners(ours({"f:status": {"f:clusters": {text: {}}}}))
    assert found.ours == (set() if cluster is None else {cluster})
    assert found.anything_ours
    # something is below the list, whatever it is
    of_the_list = entry("a", {"f:status": {"f:clusters": {}}})
    assert owners(of_the_list).owners("other") == ("a",)
    assert owners(of_the_list, entry("b", {"f:status": {"f:clusters": {text: {}}}})).owners("other") == ()


def test_a_key_that_is_no_unicode() -> None:
    fields: Any = {"f:status": {"f:clusters": {'k:{"clusterID":"\udcff"}': {}}}}
    assert Owners.of([ManagedFields("a", "Update", "status", NOON, fields)]).ours == set()


def test_long_and_odd_names_become_one_line() -> None:
    fields = in_list({"east": {}})
    found = owners(entry("a\nb\x1b[31m", fields), entry("x" * 10_000, fields), entry("", fields), entry(" \n", fields))
    first, second = found.owners("east")
    assert first == "a b [31m"
    assert len(second) <= 500
    assert suspected("east", of=[entry("a\nb", fields)]) == "a b"


# --- whatever stands there

GOOD = [
    ours(in_list({"east": whole("idleCount")})),
    entry("ops", in_list({"east": a_count()}, itself=True)),
    entry("controller", in_list({"west": whole()})),
]


@given(JSON)
@example(Verbatim('"\udcff"'))
@example(nested(500))
def test_any_json_in_place_of_all_of_it(odd: object) -> None:
    for managed_fields in (odd, [odd], [*GOOD, odd]):
        found = decoded(managed_fields)
        assert isinstance(Owners.of(found).ours, frozenset)
        assert suspect(found, ["east"]) in ("", "ops")
    assert Owners.of(decoded([odd, *GOOD])).owners("east") == ("ops",)


@given(st.sampled_from([place for place in places(GOOD) if place]), JSON)
def test_any_json_in_any_place(place: tuple[str | int, ...], odd: object) -> None:
    found = decoded(replaced(GOOD, place, odd))
    read = Owners.of(found)
    suspect(found, ["east"])
    # and it costs no other entry
    assert place[0] == 0 or read.ours >= {"east"}
    assert place[0] == 1 or "ops" in read.owners("east")
    assert place[0] == 2 or "controller" in read.owners("west")


@given(JSON)
def test_objects_that_are_not_from_a_decoder(odd: object) -> None:
    for managed_fields in (odd, [odd], [ManagedFields(*[odd] * 5)], [ManagedFields("a", "Apply", "status", NOON, odd)]):  # type: ignore[arg-type]
        Owners.of(managed_fields).owners("east")
        suspect(managed_fields, ["east"])


def test_no_managed_fields_at_all() -> None:
    nothings: list[object] = [None, [], {}, 5]
    for nothing in nothings:
        assert not Owners.of(nothing).ours
        assert not Owners.of(nothing).anything_ours
        assert Owners.of(nothing).owners("east") == ()
        assert suspect(nothing, ["east"]) == ""


CLUSTERS = st.sampled_from(["east", "north", "west", 'a"b\\c', "é\u2028", "a,b=c]", ""]) | st.text(max_size=5)
NAMES = st.sampled_from([FIELD_MANAGER, "ops", "rival", "controller", "Z"])


@given(st.dictionaries(NAMES, st.dictionaries(CLUSTERS, st.sampled_from([{}, {".": {}}, whole("idleCount")]))))
def test_generated_ownerships_are_read_as_they_were_meant(meant: dict[str, dict[str, Any]]) -> None:
    entries = [entry(name, in_list(items), operation="Apply") for name, items in meant.items()]
    found = owners(*entries)
    assert found.ours == meant.get(FIELD_MANAGER, {}).keys()
    for cluster in set[str]().union(*meant.values()):
        expected = sorted(name for name, items in meant.items() if cluster in items and name != FIELD_MANAGER)
        assert found.owners(cluster) == tuple(expected)
        who = suspected(cluster, of=entries)
        assert who in (expected or [*(set(meant) - {FIELD_MANAGER}), FIELD_MANAGER])


def test_a_book_of_a_hundred_kilobytes() -> None:
    """20 clusters with 5 pools each, of which a rival owns all but the names."""
    pool: dict[str, Any] = {".": {}} | {f"f:field{number}": {} for number in range(12)}
    item = {".": {}, "f:isLocal": {}, "f:observedMembers": {f'k:{{"name":"pool-{n}"}}': pool for n in range(5)}}
    fields = in_list({f"cluster-{number}": item for number in range(20)})
    entries = [ours(fields), entry("rival", fields), *(entry(f"ops-{number}", fields) for number in range(3))]
    assert len(dump(entries)) > 100_000
    found = owners(*entries)
    assert found.ours == {f"cluster-{number}" for number in range(20)}
    assert found.owners("cluster-7") == ("ops-0", "ops-1", "ops-2", "rival")
    # of which nothing is kept but the keys
    assert len(repr(decoded(entries))) < 10_000


# --- conflicts

EAST = '.status.clusters[clusterID="east"].observedMembers[name="small"].idleCount'
OPS = 'conflict with "ops" with subresource "status" using agents.navix.sh/v1alpha1 at 2026-11-30T12:01:15Z'


def refused(*causes: Cause, message: str = "", code: int = 409) -> ApiError:
    return ApiError("refused", code=code, status_reason="Conflict", message=message, causes=causes)


def cause(field: str, message: str = OPS, reason: str = "FieldManagerConflict") -> Cause:
    return Cause(reason, field, message)


@pytest.mark.parametrize(
    "message, owner",
    [
        (OPS, "ops"),
        ('conflict with "ops" with subresource "status" using agents.navix.sh/v1alpha1', "ops"),
        ('conflict with "ops" with subresource "status"', "ops"),
        ('conflict with "ops" using v1 at 2026-11-30T12:01:15Z', "ops"),
        ('conflict with "ops"', "ops"),
        ('conflict with "ri\\"val \\\\ é\\t\\u2028\\x07\\U0001f600"', 'ri"val \\ é \U0001f600'),
        ('conflict with "a with \\"b\\" using c" using v1', 'a with "b" using c'),
        ('conflict with "\\ud800\\U99999999\\q\\a"', "\ufffd\ufffdq"),
        ('conflict with "trio-federation" with subresource "status"', "trio-federation"),
        ('conflict with "', ""),
        ("conflict with ops", ""),
        ("", ""),
    ],
)
def test_the_owner_of_a_field(message: str, owner: str) -> None:
    assert conflicts(refused(cause(EAST, message))) == [Conflict("east", EAST, owner)]


@pytest.mark.parametrize(
    "field, cluster",
    [
        (EAST, "east"),
        ('.status.clusters[clusterID="east"]', "east"),
        ('.status.clusters[clusterID="east",kind="x"].isLocal', "east"),
        ('.status.clusters[a="x]\\",=",b=5,c=true,clusterID="east"].isLocal', "east"),
        ('.status.clusters[clusterID="ea\\"st\\\\ é\\u2028"].isLocal', 'ea"st\\ é\u2028'),
        ('.status.clusters[clusterID="a]b[c"].isLocal', "a]b[c"),
        ('.status.clusters[clusterID=""].isLocal', ""),
        ('.status.clusters[clusterID="eas…', None),
        (".status.clusters[clusterID=5].isLocal", None),
        ('.status.clusters[name="clusterID"].isLocal', None),
        ('.status.clusters[name="x"].y[clusterID="east"]', None),
        ('.status.clusters[name="x"]clusterID="east"]', None),
        (".status.clusters[0].isLocal", None),
        ('.status.clusters[="east"]', None),
        (".status.clusters[", None),
        (".status.clusters", None),
        (".status.federation.clusters", None),
        ('.spec.clusters[clusterID="east"].x', None),
        ('x.status.clusters[clusterID="east"]', None),
        ("", None),
    ],
)
def test_the_cluster_of_a_field(field: str, cluster: str | None) -> None:
    assert conflicts(refused(cause(field))) == [Conflict(cluster, field, "ops")]


def test_several_conflicts_in_order_and_each_once() -> None:
    sums = ".status.federation.clusters"
    # "ops" has written it in two versions, say
    found = conflicts(refused(cause(sums), cause(EAST), cause(sums, 'conflict with "ops" using v2'), cause(EAST, "")))
    assert found == [Conflict(None, sums, "ops"), Conflict("east", EAST, "ops"), Conflict("east", EAST, "")]
    # and of the message, which may be cut short, nothing besides
    message = f'Apply failed with 2 conflicts: conflicts with "ops": - {EAST} - .status.federation.clu…'
    assert conflicts(refused(cause(EAST), message=message)) == [Conflict("east", EAST, "ops")]


def test_what_is_no_conflict() -> None:
    message = 'Operation cannot be fulfilled on sandboxenvs "e": the object has been modified; please apply …'
    assert conflicts(refused(message=message)) == []
    assert conflicts(refused(cause(EAST, reason="FieldValueInvalid"))) == []
    assert conflicts(refused(cause(EAST), code=422)) == []
    assert conflicts(refused(message=f"Apply failed with 1 conflict: {OPS}: {EAST}", code=500)) == []
    assert conflicts(refused(message=f"It says: Apply failed with 1 conflict: {OPS}: {EAST}")) == []


@pytest.mark.parametrize(
    "message, expected",
    [
        (f"Apply failed with 1 conflict: {OPS}: {EAST}", [("east", EAST, "ops")]),
        (f'Apply failed with 1 conflict: conflict with "a: b - .c": {EAST}', [("east", EAST, "a: b - .c")]),
        (
            f'Apply failed with 3 conflicts: conflicts with "a" using v1: - {EAST} - .status.federation.clusters '
            f'conflicts with "b" with subresource "status": - .status.clusters[clusterID="x \\" - y"].isLocal',
            [
                ("east", EAST, "a"),
                (None, ".status.federation.clusters", "a"),
                ('x " - y', '.status.clusters[clusterID="x \\" - y"].isLocal', "b"),
            ],
        ),
        # cut short
        (
            f'Apply failed with 3 conflicts: conflicts with "a" using v1: - {EAST} - .status.clusters[clusterID="no…',
            [("east", EAST, "a")],
        ),
        ('Apply failed with 3 conflicts: conflicts with "a" using v1: - .status.clusters[cl…', [(None, "", "a")]),
        ("Apply failed with 1 conflict: …", [(None, "", "")]),
        ("Apply failed with 1 conflict:", [(None, "", "")]),
        (
            f'Apply failed with 2 conflicts: conflicts with "a": conflicts with "b": - {EAST}',
            [(None, "", "a"), ("east", EAST, "b")],
        ),
    ],
)
def test_conflicts_that_only_the_message_tells_of(message: str, expected: list[tuple[str | None, str, str]]) -> None:
    assert conflicts(refused(message=message)) == expected
    assert conflicts(refused(cause(EAST, reason=""), message=message)) == expected


def go_quoted(text: str) -> str:
    """As Go's %q."""
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\a": "\\a", "\b": "\\b", "\f": "\\f", "\r": "\\r"}
    quoted = (short.get(each) or (each if each.isprintable() else _escaped(ord(each))) for each in text)
    return f'"{"".join(quoted)}"'


def _escaped(code: int) -> str:
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@given(st.text(max_size=20), CLUSTERS, st.booleans())
def test_generated_conflicts_are_read_as_they_were_meant(owner: str, cluster: str, in_words: bool) -> None:
    field = f".status.clusters[clusterID={go_quoted(cluster)},z=5].isLocal"
    message = f"conflict with {go_quoted(owner)} using v1"
    if in_words:
        error = refused(message=f"Apply failed with 1 conflict: {message}: {field}")
    else:
        error = refused(cause(field, message))
    ((found, where, who),) = conflicts(error)
    assert (found, where) == (cluster, field)
    assert who.split() == "".join(each if each.isprintable() else " " for each in owner).split()


@given(
    st.lists(st.tuples(st.sampled_from(["FieldManagerConflict", "x", ""]), st.text(), st.text()), max_size=5),
    st.text() | st.text().map("Apply failed with 3 conflicts: {}".format),
    st.sampled_from([409, 0, 500]),
)
def test_any_causes_and_any_message(causes: list[tuple[str, str, str]], message: str, code: int) -> None:
    found = conflicts(refused(*(Cause(*each) for each in causes), message=message, code=code))
    assert len(found) == len(set(found))
    assert not found or code == 409


# Texts of the very alphabet that paths and messages are made of, in which a careless pattern could go astray.
@given(st.text(alphabet='[]"\\=,.: -ac', max_size=500))
@example('["' * 250)
@example('[a="' * 120)
@example("\\" * 500)
@example("a=5," * 120)
@example("[a" * 250)
@example(" .a" * 160)
def test_any_path(text: str) -> None:
    (found,) = conflicts(refused(cause(f".status.clusters[clusterID={text}")))
    assert found.field.endswith(text)
    assert conflicts(refused(message=f"Apply failed with 1 conflict: {text}"))

"""Credentials by themselves: one spelling for each token, good for one cluster and one serial of one secret; the names
of certificates that stand for a cluster; the deny list. Models here say the rules again, in the plainest way."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import re
from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from trio_federation.capacity import is_label
from trio_federation.credentials import (
    MAX_SERIAL,
    TOKEN_PREFIX,
    CertificateName,
    DenyList,
    Token,
    looks_like_token,
    make_token,
    read_deny_list,
    read_serial,
    read_token,
    same_secret,
)

labels = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
serials = st.integers(1, 30) | st.integers(1, MAX_SERIAL)
#: as a configuration has them: printable ASCII
secrets = st.text(alphabet=st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=80).filter(
    lambda text: not text.startswith(TOKEN_PREFIX)
)
SECRET = "a secret of a hub"
GOOD = make_token(SECRET, "west", 12)


def hmac_sha256(key: bytes, message: bytes) -> str:
    """RFC 2104, written out."""
    key = hashlib.sha256(key).digest() if len(key) > 64 else key
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(each ^ 0x36 for each in padded) + message).digest()
    return hashlib.sha256(bytes(each ^ 0x5C for each in padded) + inner).hexdigest()


# Tokens.


@given(secrets, labels, serials)
def test_a_token_is_what_the_design_says(secret: str, cluster_id: str, serial: int) -> None:
    message = f"trio-federation token 1\0{cluster_id}\0{serial}"
    mac = hmac_sha256(secret.encode(), message.encode())
    assert make_token(secret, cluster_id, serial) == f"tf1.{cluster_id}.{serial}.{mac}"


@given(secrets, labels, serials, st.lists(secrets, max_size=2), st.integers(0, 2))
def test_what_is_made_can_be_read_and_is_valid(
    secret: str, cluster_id: str, serial: int, others: list[str], position: int
) -> None:
    """Also where the hub has further secrets, wherever its own stands among them."""
    text = make_token(secret, cluster_id, serial)
    token = read_token(text)
    assert token is not None
    assert (token.cluster_id, token.serial) == (cluster_id, serial)
    assert text == f"tf1.{token.cluster_id}.{token.serial}.{token.mac}"
    assert looks_like_token(text)
    assert re.fullmatch("[!-~]+", text)
    others.insert(min(position, len(others)), secret)
    assert token.valid_for(others)
    assert token.valid_for(iter(others))


@given(st.tuples(secrets, labels, serials), st.tuples(secrets, labels, serials))
def test_no_token_is_valid_for_anything_else(one: tuple[str, str, int], other: tuple[str, str, int]) -> None:
    """Of two that differ, in whatever it is, neither has the other's MAC, nor is valid with it."""
    assume(one != other)
    mac = make_token(*one).rpartition(".")[2]
    assert make_token(*other).rpartition(".")[2] != mac
    assert not Token(other[1], other[2], mac).valid_for([other[0]])
    if one[0] != other[0]:
        assert not Token(one[1], one[2], mac).valid_for([other[0]])


@given(labels, serials, st.sampled_from(["secret", "serial", "cluster"]))
def test_one_thing_that_differs_is_enough(cluster_id: str, serial: int, what: str) -> None:
    mac = make_token(SECRET, cluster_id, serial).rpartition(".")[2]
    changed = {
        "secret": (cluster_id, serial, [SECRET + "x", SECRET[:-1], SECRET.upper()]),
        "serial": (cluster_id, serial - 1 or 2, [SECRET]),
        "cluster": ("x" + cluster_id[:62] if cluster_id[:1] != "x" else "y" + cluster_id[1:], serial, [SECRET]),
    }
    assert Token(cluster_id, serial, mac).valid_for([SECRET])
    new_id, new_serial, hub = changed[what]
    assert is_label(new_id)
    assert not Token(new_id, new_serial, mac).valid_for(hub)


def test_the_parts_of_what_is_authenticated_cannot_be_moved() -> None:
    """What two of them make when written together is the same here, and must not be."""
    pairs = [(("west-1", 1), ("west-", 11)), (("west1", 12), ("west", 112)), (("a1", 1), ("a", 11))]
    for one, other in pairs:
        assert f"{one[0]}{one[1]}" == f"{other[0]}{other[1]}"
        mac = make_token(SECRET, *one).rpartition(".")[2]
        assert not Token(*other, mac).valid_for([SECRET])


def test_a_mac_for_another_purpose_is_no_token() -> None:
    """With the same secret over the same id and serial, and every context but the one of tokens."""
    token = read_token(GOOD)
    assert token is not None
    contexts = [
        "trio-federation token 2",
        "trio-federation token 11",
        "trio-federation token",
        "Trio-federation token 1",
    ]
    messages = [f"{context}\0west\0{12}" for context in [*contexts, "", "tf1"]]
    messages += ["west\0" + "12", "west.12", "tf1.west.12", "trio-federation token 1west12", "trio-federation token 1"]
    messages += ["trio-federation token 1\0west\0" + "12\0", "trio-federation token 1.west.12"]
    for message in messages:
        assert not Token("west", 12, hmac_sha256(SECRET.encode(), message.encode())).valid_for([SECRET]), message
    # And it is not the MAC without a key, nor the secret's hash.
    for digest in (hashlib.sha256(b"trio-federation token 1\0west\x0012"), hashlib.sha256(SECRET.encode())):
        assert not Token("west", 12, digest.hexdigest()).valid_for([SECRET])
    assert token.valid_for([SECRET])


@pytest.mark.parametrize("position", range(len(GOOD)))
def test_every_character_counts(position: int) -> None:
    """Each one replaced by each other, left out, and doubled: no token, or none of this secret."""
    changed = {GOOD[:position] + character + GOOD[position + 1 :] for character in map(chr, range(1, 256))}
    changed |= {GOOD[:position] + GOOD[position + 1 :], GOOD[:position] + GOOD[position] + GOOD[position:]}
    changed -= {GOOD}
    assert len(changed) >= 255
    for text in sorted(changed):
        token = read_token(text)
        assert token is None or not token.valid_for([SECRET]), text


MAC = GOOD.rpartition(".")[2]


@pytest.mark.parametrize(
    "text",
    [
        *("", "tf1", "tf1.", "tf1...", "tf1.west", "tf1.west.12", "tf1.west.12.", f"tf1.west.{MAC}", MAC),
        *(f"tf1..12.{MAC}", f"tf1.west..{MAC}", f".tf1.west.12.{MAC}", f"tf1.west.12.{MAC}.", f"tf1.west.12..{MAC}"),
        *(f"tf1.west.12.{MAC}\n", f"tf1.west.12.{MAC}\r\n", f" tf1.west.12.{MAC}", f"tf1.west.12.{MAC} "),
        *(f"tf1.west\n.12.{MAC}", f"tf1.west.12\n.{MAC}", f"tf1.west.12.{MAC}\0", f"tf1.west. 12.{MAC}"),
        *(f"TF1.west.12.{MAC}", f"tf1.WEST.12.{MAC}", f"tf1.West.12.{MAC}", f"tf1.west.12.{MAC.upper()}"),
        *(f"tf2.west.12.{MAC}", f"tf01.west.12.{MAC}", f"tf.west.12.{MAC}", f"tf1west.12.{MAC}", f"tf1,west,12,{MAC}"),
        *(f"tf1.west.{serial}.{MAC}" for serial in ("0", "00", "012", "+12", "-12", "12.0", "1_2", "0x0c", "1e1", "")),
        *(f"tf1.west.{serial}.{MAC}" for serial in (MAX_SERIAL + 1, 2**32 + 12, 10**10, "9" * 4400, "\u0661\u0662")),
        *(f"tf1.west.{serial}.{MAC}" for serial in ("\uff11\uff12", "1\u0662", "\u00b2", "\u2460", "XII", "1 2")),
        *(f"tf1.{name}.12.{MAC}" for name in ("-west", "west-", "-", "we_st", "we.st", "w\u00e9st", "\uff57est", "*")),
        *(f"tf1.{name}.12.{MAC}" for name in ("a" * 64, "a" * 5000, "we/st", "w\u0435st", "west\u200b")),
        *(f"tf1.west.12.{mac}" for mac in (MAC[:-1], MAC + "0", MAC[:-1] + "g", MAC[:-2] + "0x", MAC[:-1] + "\uff10")),
    ],
)
def test_each_token_has_one_spelling(text: str) -> None:
    assert read_token(text) is None
    assert read_token(GOOD) is not None


@given(st.text(max_size=90) | st.text(alphabet="tf1.west0a-", max_size=90))
@example(f"tf1.0.{MAX_SERIAL}.{'0' * 64}")
def test_any_text_is_read_or_is_none(text: str) -> None:
    token = read_token(text)
    if token is None:
        return
    assert f"tf1.{token.cluster_id}.{token.serial}.{token.mac}" == text
    assert is_label(token.cluster_id)
    assert 1 <= token.serial <= MAX_SERIAL
    assert not token.valid_for([SECRET])


@given(st.text(max_size=12) | st.text(alphabet="0123456789", max_size=12) | st.integers().map(str))
@example(str(MAX_SERIAL))
@example(str(MAX_SERIAL + 1))
@example("9" * 5000)
@example("1\n")
@example("\u0661")
def test_serials(text: str) -> None:
    in_one_spelling = text.isascii() and text.isdigit() and len(text) <= 10 and str(int(text)) == text
    wanted = int(text) if in_one_spelling and 1 <= int(text) <= MAX_SERIAL else None
    assert read_serial(text) == wanted


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((SECRET, "West", 1), "'West' is not a cluster id"),
        ((SECRET, "", 1), "'' is not a cluster id"),
        ((SECRET, "a.b", 1), "is not a cluster id"),
        ((SECRET, "a" * 64, 1), "is not a cluster id"),
        ((SECRET, "west\n", 1), "is not a cluster id"),
        ((SECRET, GOOD, 1), "the cluster id is a whole token"),
        ((SECRET, "west", 0), "the serial is not from 1 to 2147483647"),
        ((SECRET, "west", -1), "the serial is not from 1 to"),
        ((SECRET, "west", MAX_SERIAL + 1), "the serial is not from 1 to"),
        (("", "west", 1), "the secret is empty"),
        ((GOOD, "west", 1), "the secret is itself a token"),
        (("tf1.x", "west", 1), "the secret is itself a token"),
    ],
)
def test_what_no_token_is_made_of(arguments: tuple[str, str, int], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        make_token(*arguments)
    assert [secret for secret in (SECRET, GOOD, MAC, "tf1.x") if secret in str(caught.value)] == []
    assert len(str(caught.value)) < 300


def test_nothing_shows_a_mac() -> None:
    token = read_token(GOOD)
    assert token is not None
    assert repr(token) == "Token(cluster_id='west', serial=12)"
    shown = [repr(token), str(token), f"{token}", "{}".format(token), "%s" % token, repr([token]), repr({"a": token})]  # noqa: UP031, UP032
    assert [text for text in shown if MAC[:8] in text] == []
    # Nor is it a sequence that a serialiser would write out.
    with pytest.raises(TypeError):
        json.dumps(token)
    with pytest.raises(TypeError):
        iter(token)  # type: ignore[call-overload]


def test_no_secrets_and_empty_ones_make_nothing_valid() -> None:
    """Everybody knows the empty one."""
    for cluster_id, serial in [("west", 1), ("east", 5)]:
        mac = hmac_sha256(b"", f"trio-federation token 1\0{cluster_id}\0{serial}".encode())
        token = Token(cluster_id, serial, mac)
        assert not token.valid_for([])
        assert not token.valid_for([""])
        assert not token.valid_for(["", SECRET])
    assert not same_secret("", [])
    assert not same_secret("", [""])
    assert not same_secret("", [SECRET, ""])
    assert same_secret(SECRET, ["", SECRET])


@given(secrets | st.text(max_size=8), st.lists(secrets, max_size=3))
@example("\ud800", ["\udfff"])
@example("\u00e4", ["ä"])
def test_same_secret_is_equality(sent: str, known: list[str]) -> None:
    """Also of what cannot be encoded: that must not end in an error that holds it."""
    assert same_secret(sent, known) is (sent != "" and sent in known)
    assert same_secret(sent, [*known, sent]) is (sent != "")


def test_strange_secrets_make_no_errors() -> None:
    token = read_token(GOOD)
    assert token is not None
    assert not token.valid_for(["\ud800", "ä"])


def test_looks_like_token() -> None:
    assert all(map(looks_like_token, [GOOD, "tf1.", "tf1.hunter2", "tf1..."]))
    assert not any(map(looks_like_token, ["", "tf1", "TF1.west", "tf2.west.1", " tf1.", "x" + GOOD, SECRET]))


# What certificates are called.

DNS = CertificateName.parse("DNS:{cluster}.agents.example")
URI = CertificateName.parse("URI:spiffe://fleet.example/cluster/{cluster}")
FORMS = [
    "DNS:{cluster}.agents.example",
    "DNS:{cluster}.example",
    "DNS:agent-{cluster}.example",
    "DNS:of.{cluster}.agents.example",
    "DNS:a.of-{cluster}.agents.example",
    "DNS:_x.{cluster}.x1-y.example",
    "URI:spiffe://fleet.example/cluster/{cluster}",
    "URI:spiffe://fleet.example/cluster/{cluster}/agent",
    "URI:spiffe://{cluster}/agent",
    "URI:urn:cluster:{cluster}",
    "URI:x-y+z.1:(.+)?[a-z]$\\{cluster}.+",
]


def model(name: CertificateName, names: Sequence[tuple[str, str]]) -> set[str]:
    """Every part of every name is tried for the id."""
    return {
        value[start:end]
        for kind, value in names
        for start in range(len(value) + 1)
        for end in range(start, len(value) + 1)
        if kind == name.kind and is_label(value[start:end]) and name.before + value[start:end] + name.after == value
    }


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_what_is_shown(form: str) -> None:
    name = CertificateName.parse(form)
    assert str(name) == form
    assert CertificateName.parse(str(name)) == name
    assert name.kind == form[:3]


@given(st.sampled_from(FORMS), labels)
def test_the_name_written_for_an_id_is_that_of_the_id_alone(form: str, cluster_id: str) -> None:
    name = CertificateName.parse(form)
    value = form[4:].replace("{cluster}", cluster_id)
    other = "URI" if name.kind == "DNS" else "DNS"
    assert name.cluster_ids([(name.kind, value)]) == {cluster_id}
    assert name.cluster_ids([(other, value), ("email", value), ("IP Address", value), ("", value)]) == frozenset()
    for changed in (value + ".", value + "x", "x" + value, "." + value, value[1:], value[:-1], value.upper() + "A"):
        assert name.cluster_ids([(name.kind, changed)]) <= {f"x{cluster_id}", f"{cluster_id}x", *parts(cluster_id)}
        assert cluster_id not in name.cluster_ids([(name.kind, changed)])


def parts(cluster_id: str) -> set[str]:
    """What is left of an id where one of its characters is cut off at an end."""
    return {cluster_id[1:], cluster_id[:-1], f"{cluster_id}."}


pieces = st.sampled_from(
    ["west", "a", "-", ".", "agents", "example", ".agents.example", "agent-", "x", "*", "W", "/", ""]
)
values = st.lists(pieces | labels, max_size=5).map("".join)


@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.sampled_from(["DNS", "URI", "dns", "IP Address"]), values), max_size=3),
    st.lists(labels, max_size=2),
)
def test_any_names(form: str, names: list[tuple[str, str]], ids: list[str]) -> None:
    name = CertificateName.parse(form)
    names += [(name.kind, f"{name.before}{value}{name.after}") for _, value in names[:1]]
    names += [(name.kind, f"{name.before}{each}{name.after}") for each in ids]
    found = name.cluster_ids(names)
    assert found == model(name, names)
    assert found >= set(ids)
    assert found == name.cluster_ids(iter(reversed(names)))


@pytest.mark.parametrize(
    "value",
    [
        *("", ".", "west", "agents.example", ".agents.example", "..agents.example", "west.agents.example."),
        *("west..agents.example", "a.west.agents.example", "*.agents.example", "w*.agents.example", "*"),
        *("West.agents.example", "WEST.AGENTS.EXAMPLE", "west.agents.Example", "-west.agents.example"),
        *("west-.agents.example", "we_st.agents.example", "west.agents.example.evil", "west.agents.example\n"),
        *("west\n.agents.example", "west\0.agents.example", "west.agents.example\0.evil", " west.agents.example"),
        *("westxagents.example", "west.agentsxexample", "wést.agents.example", "a" * 64 + ".agents.example"),
        *("agents.example.agents.example", "west.agents.example.agents.example", "xn--.agents.example"),
    ],
)
def test_names_that_stand_for_no_cluster(value: str) -> None:
    assert DNS.cluster_ids([("DNS", value)]) == frozenset()
    # Beside one that does, they change nothing.
    assert DNS.cluster_ids([("DNS", value), ("DNS", "east.agents.example"), ("DNS", value)]) == {"east"}


@pytest.mark.parametrize(
    "value",
    [
        *(
            "spiffe://fleet.example/cluster/",
            "spiffe://fleet.example/cluster/west/",
            "spiffe://fleet.example/cluster//west",
        ),
        *(
            "spiffe://fleet.example/cluster/West",
            "SPIFFE://fleet.example/cluster/west",
            "spiffe://fleet.example/cluster",
        ),
        *(
            "spiffe://Fleet.example/cluster/west",
            "spiffe://fleet.example/cluster/west?x",
            "spiffe://fleet.example/west",
        ),
        *("spiffe://fleet.example/cluster/west#x", "spiffe://fleet.example/cluster/%77est", "spiffe:/cluster/west"),
        *("spiffe://fleet.example/cluster/../west", "https://fleet.example/cluster/west", "x spiffe://fleet.example/a"),
        *("spiffe://fleet.example.evil/cluster/west", "spiffe://evil/spiffe://fleet.example/cluster/west"),
        *("spiffe://fleetxexample/cluster/west", "spiffe://fleet.example/cluster/west\n", "west"),
    ],
)
def test_addresses_that_stand_for_no_cluster(value: str) -> None:
    assert URI.cluster_ids([("URI", value)]) == frozenset()


def test_what_stands_around_the_id_does_not_overlap() -> None:
    name = CertificateName.parse("DNS:aa.{cluster}.aa.example")
    assert name.cluster_ids([("DNS", "aa.aa.example")]) == frozenset()
    assert name.cluster_ids([("DNS", "aa..aa.example")]) == frozenset()
    assert name.cluster_ids([("DNS", "aa.aa.aa.example")]) == {"aa"}
    name = CertificateName.parse("URI:a:aaa{cluster}aaa")
    assert name.cluster_ids([("URI", "a:aaaaa")]) == frozenset()
    assert name.cluster_ids([("URI", "a:aaaaaa")]) == frozenset()
    assert name.cluster_ids([("URI", "a:aaaaaaa")]) == {"a"}


def test_several_names() -> None:
    """All of them count, each by its own kind."""
    names = [("DNS", "west.agents.example"), ("DNS", "hub.example"), ("DNS", "east.agents.example")]
    names += [("URI", "north.agents.example"), ("URI", "spiffe://fleet.example/cluster/south"), *names[:1]]
    assert DNS.cluster_ids(names) == {"west", "east"}
    assert URI.cluster_ids(names) == {"south"}
    assert DNS.cluster_ids([]) == frozenset()


@pytest.mark.parametrize(
    "form, words",
    [
        *(
            (form, "names no place for the cluster id")
            for form in (
                *("", "DNS", "DNS:", "{cluster}", "{cluster}.example", "DNS:agents.example", "DNS:{}.example"),
                *("dns:{cluster}.example", "uri:spiffe://{cluster}", "IP:{cluster}.example", "URL:a://{cluster}"),
                *("DNS:{Cluster}.example", "DNS:{cluster.example", "DNS:cluster}.example", "DNS {cluster}.example"),
                *("DNS:{cluster}.{cluster}.example", "DNS:{{cluster}}.example", "DNS:{env}.{cluster}.example"),
                *(
                    "DNS:{cluster}.{env}.example",
                    "DNS:}{cluster}.example",
                    " DNS:{cluster}.example",
                    "email:{cluster}@x.y",
                ),
            )
        ),
        *(
            (form, "holds what no certificate's name can")
            for form in (
                *(
                    "DNS:{cluster}.*.example",
                    "DNS:*.{cluster}.example",
                    "DNS:{cluster}.exämple",
                    "DNS: {cluster}.example",
                ),
                *("DNS:{cluster}.example\n", "DNS:{cluster} .example", "URI:a://b c/{cluster}", "URI:a://\0/{cluster}"),
            )
        ),
        *(
            (form, "is no form of a DNS name")
            for form in (
                *(
                    "DNS:Agent.{cluster}.example",
                    "DNS:{cluster}.Example",
                    "DNS:agent{cluster}.example",
                    "DNS:{cluster}.",
                ),
                *(
                    "DNS:.{cluster}.example",
                    "DNS:-{cluster}.example",
                    "DNS:a..{cluster}.example",
                    "DNS:{cluster}..example",
                ),
                *(
                    "DNS:{cluster}.example.",
                    "DNS:{cluster}.-a",
                    "DNS:{cluster}.a-",
                    "DNS:{cluster}.a/b",
                    "DNS:a/{cluster}.b",
                ),
                *("DNS:{cluster}." + "a" * 64, "DNS:a-.{cluster}.b", "DNS:a:{cluster}.b"),
            )
        ),
        *((f"DNS:{form}", "leaves the domain open") for form in ("{cluster}", "a.{cluster}", "{cluster}-x.example")),
        *(
            (form, "is no form of a URI")
            for form in ("URI:{cluster}", "URI:{cluster}://x", "URI:x{cluster}", "URI:/x/{cluster}", "URI:x:{cluster}")
        ),
        *(
            (form, "is no form of a URI")
            for form in ("URI:1x://{cluster}", "URI:://{cluster}", "URI:SPIFFE://{cluster}")
        ),
    ],
)
def test_what_is_no_place_for_an_id(form: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        CertificateName.parse(form)
    assert "\n" not in str(caught.value)


@given(
    st.text(max_size=30) | st.lists(pieces | st.sampled_from(["DNS:", "URI:", "{cluster}"]), max_size=7).map("".join)
)
def test_any_form_is_read_or_refused(form: str) -> None:
    """One that is good finds the id that is written into it."""
    try:
        name = CertificateName.parse(form)
    except ValueError:
        return
    assert str(name) == form
    assert name.cluster_ids([(name.kind, form[4:].replace("{cluster}", "west-1"))]) == {"west-1"}


# Who is denied.


@given(
    st.lists(labels, max_size=4),
    st.lists(st.tuples(labels, serials), max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from(["", "\n", " ", "# done", "\t # \ud800"]),
)
def test_what_is_listed_is_denied_and_nothing_else(
    clusters: list[str], tokens: list[tuple[str, int]], random: Random, line_break: str, end: str
) -> None:
    lines = [*clusters, *(f"{cluster_id}.{serial}" for cluster_id, serial in tokens), "", "# a.1", " #west"]
    random.shuffle(lines)
    dressed = [f"  {line}\t# gone" if number % 2 and line else line for number, line in enumerate(lines)]
    denied, wrong = read_deny_list(line_break.join([*dressed, end]))
    assert list(wrong) == []
    assert denied == DenyList(frozenset(clusters), frozenset(tokens))
    assert len(denied) == len(set(clusters)) + len(set(tokens))
    for cluster_id, serial in [*tokens, ("west", 1), ("a", 1)]:
        for each in (serial, serial + 1, None):
            by_hand = cluster_id in clusters or (each is not None and (cluster_id, each) in tokens)
            assert denied.denies(cluster_id, each) is by_hand


@given(st.text(alphabet="ab.1-0#\n\r \tA", max_size=40))
def test_any_deny_list(text: str) -> None:
    """Every line is an entry, is nothing, or is a fault with its number."""
    denied, wrong = read_deny_list(text)
    clusters, tokens, faulty = set(), set(), []
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1):
        entry = line.split("#")[0].strip()
        cluster_id, *serial = entry.split(".")
        if is_label(entry):
            clusters.add(entry)
        elif is_label(cluster_id) and len(serial) == 1 and (found := read_serial(serial[0])) is not None:
            tokens.add((cluster_id, found))
        elif entry:
            faulty.append(f"line {number}")
    assert denied == DenyList(frozenset(clusters), frozenset(tokens))
    assert [" ".join(line.split()[:2]) for line in wrong] == faulty


@pytest.mark.parametrize(
    "entry",
    [
        *("West", "west.", ".1", "west.0", "west.01", "west.-1", "west.1.2", "west.x", "west .1", "west east", "*"),
        *(
            "west.2147483648",
            "west." + "9" * 5000,
            "a" * 64,
            "hunter2!",
            "west.\u0661",
            "w\u00e9st",
            "west,east",
            "west\0",
        ),
        *("west\x0beast", "west\x0ceast", "west\x85east", "west\u2028east", "west\x1ceast", "\ufeffwest"),
        *(GOOD, f"Bearer {GOOD}", GOOD.upper(), f"x {GOOD}", f"{GOOD}0", f"token={GOOD}", "0f" * 32, "tf1.hunter2"),
    ],
)
def test_faults_of_a_deny_list_tell_the_line_and_nothing_of_it(entry: str) -> None:
    """They are for logs, and a line may be a token, or the secret, that was pasted there."""
    denied, wrong = read_deny_list(f"north\n# a remark\r\n{entry}\nsouth.3\n")
    assert denied == DenyList(frozenset({"north"}), frozenset({("south", 3)}))
    (line,) = wrong
    assert line.startswith("line 3 ")
    assert ("whole token" in line) is entry.startswith("tf1.")
    assert [word for word in (MAC, MAC.upper(), "hunter2", "0f0f", "9999") if word in line] == []
    assert line.isprintable()
    assert len(line) < 120


def test_an_empty_list_denies_nobody() -> None:
    assert read_deny_list("") == (DenyList(), [])
    assert len(DenyList()) == 0
    assert not DenyList().denies("west")
    assert not DenyList().denies("west", 1)


def test_values_can_be_copied_compared_and_put_into_a_set() -> None:
    """As frozen values: a hub replaces them as a whole, and compares what it has with what it reads."""
    token = read_token(GOOD)
    for value in (token, DNS, URI, DenyList(), DenyList(frozenset({"a"}), frozenset({("b", 1)}))):
        assert copy.deepcopy(value) == value
        assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301 - made in the same line
        assert len({value, copy.copy(value)}) == 1
    assert DenyList(frozenset({"a"})) != DenyList()
    assert msgspec.to_builtins(DenyList()) == {"clusters": [], "tokens": []}

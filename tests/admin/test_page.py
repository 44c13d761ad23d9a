"""The web page: that its policy fits it, that it needs nothing else, and that it can only show text as text. How it
looks, a person has to look at."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import httpx
import pytest

from tests.admin.conftest import ServeAdmin
from tests.admin.helpers import answers, ask
from trio_federation.admin import admin_app
from trio_federation.admin.page import content_security_policy, load_page
from trio_federation.cli.status import STATE_STYLES, HubPart, LastError, OwnHub, Part, Readiness, Stream

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Document(HTMLParser):
    """What a browser makes of a page, as far as these tests need it."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        #: the text of each inline script and style
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self.elements: list[tuple[str, dict[str, str]]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], "elements are left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
        if tag in self.inline:
            self.inline[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in self.inline:
            self.inline[self._open[-1]][-1] += data

    def attributes(self, name: str) -> list[str]:
        """Every value of one attribute."""
        return [attributes[name] for _, attributes in self.elements if name in attributes]


@pytest.fixture
def html() -> str:
    return load_page().html.decode()


@pytest.fixture
def document(html: str) -> Document:
    return Document(html)


def directives(policy: str) -> dict[str, list[str]]:
    """A Content-Security-Policy, taken apart."""
    found = [directive.split() for directive in policy.split(";")]
    assert len({name for name, *_ in found}) == len(found), "only the first of two directives counts"
    return {name: values for name, *values in found}


def hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


async def test_the_policy_allows_the_inline_parts_and_nothing_else(document: Document) -> None:
    answer = await ask(admin_app(answers(), host="127.0.0.1"), "/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = directives(answer.headers["content-security-policy"])
    assert document.inline["script"]
    assert document.inline["style"]
    assert policy == {
        "default-src": ["'none'"],
        "script-src": [hashed(text) for text in document.inline["script"]],
        "style-src": [hashed(text) for text in document.inline["style"]],
        "img-src": ["data:"],
        "connect-src": ["'self'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
        "require-trusted-types-for": ["'script'"],
        "trusted-types": ["'none'"],
    }


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_hashes_are_of_what_a_browser_sees(newline: str) -> None:
    html = "<style>\na {}\n</style><p>x</p><script>\nlet a;\n</script><script>b</script>"
    policy = directives(content_security_policy(html.replace("\n", newline)))
    assert policy["style-src"] == [hashed("\na {}\n")]
    assert policy["script-src"] == [hashed("\nlet a;\n"), hashed("b")]


def test_a_page_without_scripts_allows_none() -> None:
    policy = directives(content_security_policy("<p>x</p>"))
    assert policy["script-src"] == policy["style-src"] == ["'none'"]


def test_every_script_and_style_is_a_plain_inline_one(document: Document) -> None:
    """Others would not be found, and so be blocked."""
    assert [attributes for tag, attributes in document.elements if tag in ("script", "style")] == [{}, {}]


def test_nothing_is_loaded_from_anywhere(document: Document, html: str) -> None:
    assert document.attributes("src") == []
    assert {tag for tag, _ in document.elements} & {
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "video",
        "audio",
    } == set()
    for link in document.attributes("href"):
        assert link.startswith(("#", "data:image/svg+xml,"))
    assert re.findall(r"https?://[^'\"\s]*", html) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"@import|url\(", document.inline["style"][0]) == []


def test_no_attribute_is_a_script_or_a_style(document: Document) -> None:
    """The policy would block them."""
    names = {name for _, attributes in document.elements for name in attributes}
    assert [name for name in names if name == "style" or name.startswith("on")] == []


def test_what_others_have_named_is_only_ever_text(document: Document) -> None:
    (script,) = document.inline["script"]
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "createContextualFragment",
        "DOMParser",
        "srcdoc",
        "eval(",
        "new Function",
        "cssText",
        "setAttributeNS",
        ".href",
        ".src",
    ):
        assert sink not in script
    assert re.findall(r"set(?:Timeout|Interval)\(\s*[\"'`]", script) == []


def test_the_page_changes_nothing(document: Document) -> None:
    """It asks with GET, which is what fetch does unless it is told otherwise."""
    (script,) = document.inline["script"]
    assert script.count("fetch(") == 1
    assert not re.search(r"method\s*:|sendBeacon|XMLHttpRequest|WebSocket|EventSource", script)
    assert set(re.findall(r"get\([\"'`]([^\"'`?]*)", script)) == {"readyz", "v1/capacity", "v1/place"}


def test_the_token_is_asked_for_as_a_secret(document: Document) -> None:
    controls = {attributes["id"]: attributes for tag, attributes in document.elements if tag == "input"}
    assert (controls["token"]["type"], controls["token"]["autocomplete"]) == ("password", "off")
    assert "name" not in controls["token"]
    assert "value" not in controls["token"]
    forms = {attributes["id"]: attributes for tag, attributes in document.elements if tag == "form"}
    assert forms["enter"] == {"class": "ask", "id": "enter", "autocomplete": "off"}  # sent nowhere by the browser


def test_the_token_stays_in_the_page_and_goes_to_one_place_only(document: Document) -> None:
    """Nothing outlives the page, and nothing but the one request carries it."""
    (script,) = document.inline["script"]
    assert not re.search(r"sessionStorage|localStorage|indexedDB|cookie|caches|console\.|postMessage|history\.", script)
    assert re.findall(r"^let token = (.*);$", script, re.MULTILINE) == ['""']
    (carried,) = re.findall(r".*[Aa]uthorization.*", script)
    assert carried.strip() == "if (sent) headers.authorization = `Bearer ${sent}`;"
    assert 'sent = path.startsWith("v1/") ? token : "";' in script


def test_the_form_says_what_is_wrong(document: Document) -> None:
    (script,) = document.inline["script"]
    assert "if (response.status === 401 && sent && sent === token) refuseToken();" in script
    assert "This token is wrong" in script
    (alert,) = [attributes for _, attributes in document.elements if attributes.get("id") == "token-refused"]
    assert (alert["role"], "hidden" in alert) == ("alert", True)
    (entry,) = [attributes for _, attributes in document.elements if attributes.get("id") == "entry"]
    assert "hidden" in entry


def test_the_page_takes_the_same_for_well_as_the_command(document: Document) -> None:
    (script,) = document.inline["script"]
    (table,) = re.findall(r"const KINDS = \{(.*?)\};", script)
    kinds = dict(re.findall(r'(\w+): "(\w+)"', table))
    ok = {"bold red": "bad", "yellow": None, "green": "ok"}
    assert kinds == {state: ok[style] for state, style in STATE_STYLES.items() if ok[style]}


def test_the_page_shows_all_that_readyz_tells(document: Document) -> None:
    """Each key is asked for somewhere; the names of times and numbers are those of its code, too."""
    (script,) = document.inline["script"]
    structs = (Readiness, OwnHub, HubPart, Part, Stream, LastError)
    keys = {name for struct in structs for name in struct.__struct_fields__}
    assert {"notes", "dropped", "clusters", "why_not"} <= keys
    assert {key for key in keys if not re.search(rf"\.{key}\b", script)} == set()


def test_names_in_the_script_are_those_of_the_page(document: Document) -> None:
    (script,) = document.inline["script"]
    identifiers = document.attributes("id")
    assert len(set(identifiers)) == len(identifiers)
    asked = set(re.findall(r"\$\(\"([^\"]+)\"\)", script))
    assert asked
    assert asked <= set(identifiers)
    for attribute in ("for", "list", "aria-labelledby"):
        assert set(document.attributes(attribute)) <= set(identifiers)
    for link in document.attributes("href"):
        assert not link.startswith("#") or link[1:] in identifiers


def test_every_control_has_a_name(document: Document) -> None:
    labelled = set(document.attributes("for"))
    controls = [attributes for tag, attributes in document.elements if tag in ("input", "select")]
    assert controls
    assert {control["id"] for control in controls} == labelled
    assert ("html", {"lang": "en"}) in document.elements


async def test_the_page_itself_needs_no_token_and_holds_none(
    serve_admin: ServeAdmin, client: httpx.AsyncClient
) -> None:
    token = "the-token-of-the-admin-interface"
    url = f"http://127.0.0.1:{await serve_admin(answers(), token=lambda: token)}"
    response = await client.get(f"{url}/", headers={"host": "west.example"})
    assert (response.status_code, token in response.text) == (200, False)
    assert response.headers["content-security-policy"] == load_page().policy
    assert (await client.get(f"{url}/v1/capacity")).status_code == 401


async def test_the_page_over_a_socket(serve_admin: ServeAdmin, client: httpx.AsyncClient, html: str) -> None:
    url = f"http://127.0.0.1:{await serve_admin(answers())}/"
    response = await client.get(url)
    assert (response.status_code, response.text) == (200, html)
    assert response.headers["content-security-policy"] == load_page().policy
    response = await client.head(url)
    assert (response.status_code, response.content) == (200, b"")
    assert (await client.post(url)).status_code == 405

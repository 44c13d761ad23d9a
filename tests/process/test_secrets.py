"""Secrets appear nowhere: not in what any command prints at its loudest, not in what is served, not in the arguments or
the environment that a process shows of itself. Every way of giving one is used, right ones and wrong ones."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trio
import trustme

from tests.process.running import COMMAND, PATIENCE, Program, agent_file, free_port, hub_file, start

#: Each is given in another way; any eight characters of one in a row would give it away.
HUBS = "hub-key-8fQ2xTz7vLp0"
IN_A_FILE = HUBS  # what a good agent has
WRONG = "wrong-key-3rJ9mWb5nKs1"
FROM_ENVIRONMENT = "env-key-6yHd4cGu8aXe2"
MISPLACED = "misplaced-key-7tVo1iRq5"
IN_OPTIONS = "option-key-9zBk3pFw6jM4"
EVERY = (HUBS, WRONG, FROM_ENVIRONMENT, MISPLACED, IN_OPTIONS)


def traces(secret: str) -> Iterator[str]:
    """What would give a secret away: any eight characters of it, or the whole in base64."""
    yield base64.b64encode(secret.encode()).decode().rstrip("=")
    part = secret.partition("key-")[2]
    yield from (part[start : start + 8] for start in range(len(part) - 7))


def assert_silent(text: str, where: str) -> None:
    for secret in EVERY:
        for trace in traces(secret):
            assert trace not in text, f"{where}: {text[max(0, text.find(trace) - 200) :][:400]}"


def test_the_search_finds_a_secret() -> None:
    """A test that could not fail would be no test."""
    for text in (f"x{HUBS[9:18]}y", base64.b64encode(WRONG.encode()).decode()):
        with pytest.raises(AssertionError):
            assert_silent(text, "here")


async def _ask_everything(port: int) -> str:
    """All that a process serves, also to those who ask wrongly."""
    answers = []
    paths = [
        "/",
        "/metrics",
        "/healthz",
        "/readyz",
        "/v1/capacity",
        "/v1/place?namespace=team-a&env=python",
        "/nothing",
    ]
    async with httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
        for path in paths:
            answers.append(await client.get(path, headers={"authorization": f"Bearer {WRONG}"}))
        for content in ('{"namespace": "team-a", "env": "python"}', f'{{"secret": "{WRONG}"}}', "{"):
            answers.append(
                await client.post("/v1/place", content=content, headers={"content-type": "application/json"})
            )
    return "\n".join(f"{answer.headers}\n{answer.text}" for answer in answers)


def _shown_by_the_system(program: Program) -> str:
    """What every user of the machine may see of a process."""
    return Path(f"/proc/{program.process.pid}/cmdline").read_text(encoding="utf-8")


@pytest.mark.slow
async def test_no_secret_appears_anywhere(nursery: trio.Nursery, tmp_path: Path) -> None:
    """A hub over TLS, a good agent, one with a wrong secret, one whose secret is the environment's, at level debug;
    what they serve; the goodbye, and a hub that is killed under them."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "hub.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    port = free_port()
    tls = f'[hub.tls]\ncert_file = "{tmp_path}/hub.pem"\nkey_file = "{tmp_path}/hub.pem"\n'
    hub_toml = hub_file(tmp_path / "hub.toml", port=port, secret=HUBS, more=tls)
    hub = await start(nursery, "run", hub_toml)
    await hub.started()

    (tmp_path / "secret").write_text(IN_A_FILE + "\n")
    more = f'[federation.tls]\nca_file = "{tmp_path}/ca.pem"\nserver_name = "localhost"\n'
    agents = {}
    for name, secret in (("good", None), ("wrong", WRONG), ("other", HUBS)):
        path = agent_file(tmp_path / f"{name}.toml", name, {name: 1}, hub_port=port, secret=secret, more=more)
        if name == "good":
            path.write_text(
                path.read_text().replace("[federation]\n", f'[federation]\nsecret_file = "{tmp_path}/secret"\n', 1)
            )
        variables = {"TRIO_FEDERATION_SECRET": FROM_ENVIRONMENT} if name == "other" else {}
        agents[name] = await start(nursery, "run", path, **variables)
    for each in agents.values():
        await each.started()
    await agents["good"].event("hub_works", call="watch")
    for name in ("wrong", "other"):
        await agents[name].event("hub_failed", number=2)
    programs = [hub, *agents.values()]

    for each in programs:
        assert_silent(_shown_by_the_system(each), f"{each.name}: arguments")
        assert_silent(await _ask_everything(each.admin_port), f"{each.name}: HTTP")
        assert_silent(await _ask_everything(each.metrics_port), f"{each.name}: HTTP")
    for command in ("status", "place team-a python"):
        asked = await start(
            nursery, "--verbose", *command.split(), "--url", f"http://127.0.0.1:{agents['good'].admin_port}"
        )
        assert await asked.ended() == 0, asked.lines
        programs.append(asked)

    hub.process.kill()
    await agents["good"].event("hub_failed", call="connection")
    for each in agents.values():
        assert await each.stop() == 0
    for each in programs:
        said = each.output + "\n".join(each.lines)
        assert len(said) > 100
        assert_silent(said, each.name)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "run"])
async def test_no_fault_of_a_configuration_shows_a_secret(command: str, nursery: trio.Nursery, tmp_path: Path) -> None:
    """In the wrong place, of the wrong type, with characters that no header can carry, beside another one: every fault
    is told, with a traceback for those who want one, and no value."""
    (tmp_path / "secret").write_bytes(IN_A_FILE.encode() + b"\n" + WRONG.encode())
    texts = [
        f'cluster_id = "west"\nsecret = "{MISPLACED}"\n',
        f'cluster_id = "west"\n[federation]\nsecret = ["{MISPLACED}"]\n',
        f'cluster_id = "west"\n[federation]\nsecret = {{ text = "{MISPLACED}" }}\n',
        f'cluster_id = "west"\n[federation]\nsecret = "{MISPLACED}\\u00e9"\n',
        f'cluster_id = "west"\n[federation]\nsecret = "{MISPLACED}"\nsecret_file = "{tmp_path}/secret"\n',
        f'cluster_id = "west"\n[federation]\nsecret_file = "{tmp_path}/secret"\n',
        f'cluster_id = "west"\n[[source]]\ntype = "fixtures"\npath = 7\ntoken = "{IN_OPTIONS}"\n',
        f'[hub]\nsecret = "{HUBS}"\nsecrets = "{MISPLACED}"\n',
        f'cluster_id = "west"\n[federation]\nsecret = "{MISPLACED}\n',
    ]
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        # What the environment gives wins, and then the file is not even read.
        variables = {} if number == 5 else {"TRIO_FEDERATION_SECRET": FROM_ENVIRONMENT}
        program = await start(nursery, "--verbose", command, path, **variables)
        assert await program.ended() == 2, text
        said = program.output + "\n".join(program.lines)
        assert str(path) in said
        assert_silent(said, text)


def test_the_command_is_the_installed_one() -> None:
    """Not some other one of this name."""
    assert COMMAND.is_file()

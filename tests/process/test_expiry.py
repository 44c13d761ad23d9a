"""Certificates that run out, as a real process tells of them: the wall clock, the files and the metrics are real here.
When somebody is warned is looked at over simulated years in `tests/reload/test_certificates.py`."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
import trio
import trustme
from prometheus_client.parser import text_string_to_metric_families

from tests.process.running import PATIENCE, SCRAPE_INTERVAL, hub_file, scrape, start
from trio_federation.clock import wall_clock

EXPIRES = "trio_federation_certificate_expires_timestamp_seconds"


def put(folder: Path, version: str, authority: trustme.CA, not_after: datetime.datetime) -> None:
    """Replace the hub's certificate and its key in one moment, as Kubernetes does."""
    issued = authority.issue_cert("127.0.0.1", not_before=not_after - datetime.timedelta(days=400), not_after=not_after)
    (folder / version).mkdir()
    issued.private_key_pem.write_to_path(folder / version / "hub.key")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(folder / version / "hub.crt", append=True)
    os.symlink(version, folder / "..data_tmp")
    os.replace(folder / "..data_tmp", folder / "..data")


async def expiries(port: int) -> dict[str, float]:
    """When each certificate runs out, by its key, as the metrics say."""
    return {
        sample.labels["certificate"]: sample.value
        for family in text_string_to_metric_families(await scrape(port))
        for sample in family.samples
        if sample.name == EXPIRES
    }


async def wait_expiries(port: int, wanted: dict[str, float]) -> None:
    """Scrape until the metrics say so."""
    found: dict[str, float] = {}
    with trio.move_on_after(PATIENCE):
        while True:
            found = await expiries(port)
            if found == wanted:
                return
            await trio.sleep(SCRAPE_INTERVAL)
    raise AssertionError(f"the metrics do not say {wanted} within {PATIENCE:g} s, but: {found}")


@pytest.mark.slow
async def test_a_certificate_that_runs_out_is_warned_of_until_there_is_another(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    authority = trustme.CA()
    now = datetime.datetime.fromtimestamp(int(wall_clock()), datetime.UTC)
    soon, later = now + datetime.timedelta(days=10), now + datetime.timedelta(days=365)
    put(tmp_path, "v1", authority, soon)
    tls = '[hub.tls]\ncert_file = "..data/hub.crt"\nkey_file = "..data/hub.key"\n'
    hub = await start(
        nursery, "run", hub_file(tmp_path / "hub.toml", secret="a-secret-of-more-than-32-characters", more=tls)
    )
    await hub.started()
    warning = await hub.event("certificate_expires", level="warning")
    assert (warning["certificate"], warning["file"]) == ("hub.tls.cert_file", str(tmp_path / "..data" / "hub.crt"))
    assert warning["days_left"] in (9, 10)
    await wait_expiries(hub.metrics_port, {"hub.tls.cert_file": soon.timestamp()})

    put(tmp_path, "v2", authority, later)
    await hub.event("reloaded", what="hub.tls")
    # What is warned of is said in the look that tells the metrics.
    await wait_expiries(hub.metrics_port, {"hub.tls.cert_file": later.timestamp()})
    assert await hub.stop() == 0
    assert len(hub.events("certificate_expires")) == 1
    assert hub.events("reload_failed") == []
    hub.assert_only_logged()

"""Drivers that a second server has where the first lacks them; both are named where neither has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuprov.core.changes import tell_nobody
from gpuprov.core.download import fetch, published_sha256, unreachable
from gpuprov.core.system import System
from gpuprov.driver_run import default_url
from gpuprov.protocol import tables
from gpuprov.protocol.errors import GpuprovError
from tests.unit.download_server import CONTENT, DIGEST, Site, site, system

__all__ = ["site", "system"]


@pytest.fixture
def two_servers(site: Site) -> Iterator[str]:
    """Yield the address on the first of two servers for drivers, as a site's table may name them."""
    tables.use({"servers": {"servers": {name: f"{site.url}{path}" for name, path in SERVERS.items()}}})
    yield f"{site.url}/aarch64"
    tables.use({})


SERVERS = {"nvidia-driver-aarch64": "/aarch64", "nvidia-driver-aarch64-2": "/Linux-aarch64"}


def test_a_driver_is_fetched_from_the_second_server_where_the_first_lacks_it(
    system: System, site: Site, two_servers: str
) -> None:
    site.files["/Linux-aarch64/a.run"] = CONTENT
    site.files["/Linux-aarch64/a.run.sha256sum"] = DIGEST.encode()
    assert unreachable(system, [f"{two_servers}/a.run"]) == ()
    assert published_sha256(system, f"{two_servers}/a.run") == DIGEST
    assert default_url("580.1", "aarch64") == f"{two_servers}/580.1/NVIDIA-Linux-aarch64-580.1.run"
    fetch(system, f"{two_servers}/a.run", "/file", sha256=DIGEST, tell=tell_nobody)
    assert system.read_bytes("/file") == CONTENT


def test_a_driver_on_neither_server_is_an_error_that_names_both(system: System, site: Site, two_servers: str) -> None:
    with pytest.raises(GpuprovError) as caught:
        fetch(system, f"{two_servers}/a.run", "/file", sha256=DIGEST, tell=tell_nobody)
    asked = (f"{site.url}/aarch64/a.run", f"{site.url}/Linux-aarch64/a.run")
    for problems in (caught.value.problems, unreachable(system, [f"{two_servers}/a.run"])):
        assert [problem.what.split()[0] for problem in problems] == list(asked)


def test_a_second_server_that_is_away_hides_no_missing_file(system: System, site: Site, two_servers: str) -> None:
    away = {"nvidia-driver-aarch64": two_servers, "nvidia-driver-aarch64-2": "http://127.0.0.1:9/Linux-aarch64"}
    tables.use({"servers": {"servers": away}})
    with pytest.raises(GpuprovError) as caught:
        fetch(system, f"{two_servers}/a.run", "/file", sha256=DIGEST, tell=tell_nobody)
    assert ["HTTP 404" in one.evidence for one in caught.value.problems] == [True, False]
    with pytest.raises(GpuprovError, match=r"127\.0\.0\.1:9"):
        published_sha256(system, f"{two_servers}/a.run")


def test_a_site_that_replaces_the_first_server_has_no_second_one() -> None:
    own = {"nvidia-driver-aarch64": "https://mirror.example/aarch64"}
    tables.use({"servers": {"servers": own}})
    url = default_url("580.1", "aarch64")
    found = tables.addresses(url)
    tables.use({})
    assert found == (url,)
    assert len(tables.addresses(default_url("580.1", "aarch64"))) == 2

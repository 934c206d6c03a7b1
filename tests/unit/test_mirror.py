"""A mirror of drivers: what its index lists, in the forms that servers give it, and what a branch then means."""

import functools
import http.server
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuprov.core.system import System
from gpuprov.driver import run_files
from gpuprov.driver_run import RunFile
from gpuprov.facts.host import gather
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, parse_spec, spec_to_json
from gpuprov.protocol.tables import PACKAGED
from tests.loopback import serving
from tests.unit.ask import ask
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root
NVIDIA = """\
<html><head><title>Linux x86_64</title></head><body><ul class="directory">
<li class='dir'><span class='dir'><a href='..'>..</a></span></li>
<li class='file'><span class='file'><a href='latest.txt'>latest.txt</a></span></li>
<li class='dir'><span class='dir'><a href='550.54.14/'>550.54.14/</a></span></li>
<li class='dir'><span class='dir'><a href='550.163.01/'>550.163.01/</a></span></li>
<li class='dir'><span class='dir'><a href='565.77/'>565.77/</a></span></li>
<li class='dir'><span class='dir'><a href='580.95.05/'>580.95.05/</a></span></li></ul></body></html>
"""
APACHE = """\
<table><tr><td><a href="?C=M;O=A">Last modified</a></td></tr>
<tr><td><a href="NVIDIA-Linux-x86_64-550.163.01.run">NVIDIA-Linux-x86_64-550.16..&gt;</a></td><td>307.52M</td></tr>
<tr><td><a href="NVIDIA-Linux-x86_64-550.163.01.run.sha256sum">…</a></td><td>2025-04-08</td></tr>
<tr><td><a href="NVIDIA-Linux-aarch64-580.95.05.run">…</a></td></tr>
<tr><td><a href="/elsewhere/570.211.01/">up</a></td></tr></table>
"""
LATEST_TXT = "580.95.05 580.95.05/NVIDIA-Linux-x86_64-580.95.05.run\n"


def nested(*versions: str) -> dict[str, str]:
    return {one: f"{one}/NVIDIA-Linux-x86_64-{one}.run" for one in versions}


INDEXES: dict[str, tuple[str, dict[str, str]]] = {
    "NVIDIA's folders": (NVIDIA, nested("550.54.14", "550.163.01", "565.77", "580.95.05")),
    "Apache's files": (APACHE, {"550.163.01": "NVIDIA-Linux-x86_64-550.163.01.run"}),
    "NVIDIA's latest.txt": (LATEST_TXT, nested("580.95.05")),
    "a text of versions": ("550.163.01\n570.211.01\n", nested("550.163.01", "570.211.01")),
    "relative paths": (
        "./550.163.01/ ./NVIDIA-Linux-x86_64-565.77.run sub/NVIDIA-Linux-x86_64-580.95.05.run",
        {**nested("550.163.01"), "565.77": "NVIDIA-Linux-x86_64-565.77.run",
         "580.95.05": "sub/NVIDIA-Linux-x86_64-580.95.05.run"},
    ),
    "file, folder": ("a/NVIDIA-Linux-x86_64-565.77.run 565.77/", {"565.77": "a/NVIDIA-Linux-x86_64-565.77.run"}),
    "other places": ("http://x/NVIDIA-Linux-x86_64-565.77.run ../NVIDIA-Linux-x86_64-565.77.run "
                     "/NVIDIA-Linux-x86_64-565.77.run ?/NVIDIA-Linux-x86_64-565.77.run "
                     "#/NVIDIA-Linux-x86_64-565.77.run", {}),
    "something else": ("<html>Please log in: release 550.163.01</html>", {}),
    "nothing": ("", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_is_read_in_the_forms_that_servers_give_it(name: str) -> None:
    text, expected = INDEXES[name]
    assert run_files.parse_index(text, "x86_64") == expected


NEWEST = {"550": "550.163.01", "565": "565.77", "latest": "580.95.05", "570": ""}


@pytest.mark.parametrize("wanted", NEWEST)
def test_a_branch_is_its_newest_by_number(wanted: str) -> None:
    assert run_files.newest_of_branch(wanted, run_files.parse_index(NVIDIA, "x86_64")) == NEWEST[wanted]


def test_latest_without_the_long_term_branch_is_the_newest() -> None:
    assert run_files.newest_of_branch("latest", {"550.163.01": "", "570.211.01": ""}) == "570.211.01"
    assert run_files.newest_of_branch("latest", {"580.95.05": "", "999.10": ""}) == "580.95.05"


@dataclass(frozen=True)
class Served:
    """A web server: its URL and what it was asked for."""

    url: str
    asked: list[str]


class _Handler(http.server.SimpleHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012 (one server at a time)

    def log_message(self, *words: object) -> None:
        self.asked.append(self.path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Folders as Python's own server lists them, and a text beside them."""
    folder = tmp_path_factory.mktemp("mirror")
    for version in ("550.54.14", "550.163.01"):
        (folder / version).mkdir()
    # Not UTF-8.
    (folder / "latest.txt").write_bytes(b"\xe9\n" + LATEST_TXT.encode())
    with serving(functools.partial(_Handler, directory=str(folder))) as url:
        yield Served(url, _Handler.asked)


def spec(version: str, url: str, **more: str) -> HostSpec:
    return parse_spec({"driver_version": version, "driver_mirror": url, **more})


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_branch_becomes_a_release_with_its_file_and_known_digest(server: Served, slash: str) -> None:
    found = run_files.resolved(System(), spec("550", server.url + slash), "x86_64")
    assert found.driver_version == "550.163.01"
    assert found.driver_url == f"{server.url}/550.163.01/NVIDIA-Linux-x86_64-550.163.01.run"
    assert found.driver_sha256 == PACKAGED.known_sha256("550.163.01", "x86_64")
    assert run_files.resolved(System(), found, "x86_64") == found


@pytest.mark.parametrize("slash", ["", "/"])
def test_an_index_of_text_is_named_itself(server: Served, slash: str) -> None:
    found = run_files.resolved(System(), spec("latest", f"{server.url}/latest.txt{slash}"), "x86_64")
    assert found.driver_url == f"{server.url}/580.95.05/NVIDIA-Linux-x86_64-580.95.05.run"


def test_a_version_needs_no_index(server: Served) -> None:
    server.asked.clear()
    found = run_files.resolved(System(), spec("565.77", server.url, driver_sha256="a" * 64), "aarch64")
    assert found.driver_url == f"{server.url}/565.77/NVIDIA-Linux-aarch64-565.77.run"
    assert (found.driver_version, found.driver_sha256, server.asked) == ("565.77", "a" * 64, [])
    known = run_files.resolved(System(), spec("550.163.01", f"{server.url}/X/"), "x86_64")
    assert known.driver_url == f"{server.url}/X/550.163.01/NVIDIA-Linux-x86_64-550.163.01.run"
    assert known.driver_sha256 == PACKAGED.known_sha256("550.163.01", "x86_64") != ""


def test_a_branch_that_is_not_there_is_told_with_those_that_are(server: Served) -> None:
    problem = refused(run_files.resolved, System(), spec("570", server.url), "x86_64")
    assert "has no driver of branch 570" in problem.what and problem.next_step
    assert problem.evidence == "branches in its index: 550"


@pytest.mark.parametrize(
    ("wanted", "held", "expected"),
    [
        ("580", "580.95.05", "580.95.05"), ("latest", "550.163.01", "550.163.01"),
        ("580", "550.163.01", PACKAGED.resolved("580")), ("565.77", "550.163.01", "565.77"),
    ],
)  # fmt: skip
def test_with_a_bundle_a_branch_is_the_release_in_it(wanted: str, held: str, expected: str) -> None:
    assert run_files.from_bundle(spec(wanted, "http://mirror.example"), held, PACKAGED).driver_version == expected


def test_without_a_mirror_a_branch_that_is_not_known_is_refused_at_once() -> None:
    assert parse_spec({"driver_version": "700", "driver": "packages"}).driver_version == "700"
    with pytest.raises(UsageError, match="gpuprov_driver_version is not a driver version"):
        parse_spec({"driver_version": "700"})


def test_an_installation_asks_the_mirror(server: Served, tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root")
    asked = spec("550", server.url)
    ended, _ = ask(host, Request("install", spec_to_json(asked), check=True))
    # The file itself is not on this server: the plan was made with its address.
    assert [one.evidence for one in ended.problems] == ["HTTP 404"]
    assert "550.163.01/NVIDIA-Linux-x86_64-550.163.01.run" in ended.problems[0].what
    assert RunFile(gather(host), run_files.resolved(System(), asked, "x86_64")).url.endswith("x86_64-550.163.01.run")

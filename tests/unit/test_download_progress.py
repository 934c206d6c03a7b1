"""What a download tells: progress, missing room, and what it found in the place of the file."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core import download
from gpuprov.core.changes import tell_nobody
from gpuprov.core.download import LARGEST, fetch, fetch_small, published_sha256, unreachable
from gpuprov.core.system import System
from gpuprov.driver.run_files import FetchRunfile
from gpuprov.driver_run import default_url
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.tables import PACKAGED, Tables
from tests.loopback import free_port
from tests.unit.download_server import CONTENT, DIGEST, PIECE, Impatient, Site, names, site, system
from tests.unit.refused import refused

__all__ = ["site", "system"]


class Clocked(Impatient):
    """A machine whose clock goes on by some seconds whenever it is looked at, and that has some room."""

    seconds = 1.0
    time = 0.0
    room = 10 << 30

    def now(self) -> float:
        self.time += self.seconds
        return self.time

    def free_bytes(self, path: str) -> int:
        return self.room


def progress(system: System, url: str) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    FetchRunfile(url, "/file", DIGEST).apply(system, lambda *words: told.append(words))
    return told


@pytest.mark.parametrize("lengths", [True, False])
@pytest.mark.parametrize("have", [0, 2 * PIECE])
def test_progress_counts_what_is_there_already(tmp_path: Path, site: Site, have: int, lengths: bool) -> None:
    system = Clocked(str(tmp_path))
    site.files["/f"], site.lengths = CONTENT, lengths
    if have:
        system.write("/file.part", CONTENT[:have])
    told = progress(system, f"{site.url}/f")
    total = len(CONTENT) if lengths else 0
    assert told[0] == ("downloading", have + PIECE, total)
    assert told[-1] == ("downloading", len(CONTENT), total)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert system.sha256("/file") == DIGEST


def test_progress_is_told_now_and_then_alone(tmp_path: Path, site: Site) -> None:
    system = Clocked(str(tmp_path))
    site.files["/f"], system.seconds = CONTENT, 0.25
    pieces = len(CONTENT) // PIECE + 1
    told = progress(system, f"{site.url}/f")
    # Each piece looks at the clock once, and once more if it is told of: every third piece.
    assert pieces // 4 <= len(told) <= pieces // 2
    system.remove("/file")
    system.seconds = 0.0
    assert progress(system, f"{site.url}/f") == []


@pytest.mark.parametrize("have", [0, 2 * PIECE])
def test_a_file_that_has_no_room_is_not_begun(tmp_path: Path, site: Site, have: int) -> None:
    system = Clocked(str(tmp_path))
    site.files["/f"] = CONTENT
    if have:
        system.write("/file.part", CONTENT[:have])
    system.room = len(CONTENT) - have - 1
    problem = refused(progress, system, f"{site.url}/f")
    assert problem.what == f"not enough room for {site.url}/f"
    assert problem.evidence == "2 MiB to come, 2 MiB free for /file.part"
    assert (system.status("/file.part") is None) == (have == 0)
    system.room += 1
    progress(system, f"{site.url}/f")
    assert system.sha256("/file") == DIGEST


def test_room_is_named_in_mebibytes_and_by_its_folder(tmp_path: Path, site: Site) -> None:
    system = Clocked(str(tmp_path))
    system.make_directory("/var/cache")
    site.files["/f"], system.room = CONTENT, 0
    problem = refused(fetch, system, f"{site.url}/f", "/var/cache/f", sha256=DIGEST, tell=lambda *_: None)
    assert problem.evidence == "2 MiB to come, 0 MiB free for /var/cache/f.part"
    assert problem.next_step == "make room: df -h /var/cache"


@pytest.mark.parametrize(
    "host, largest, what, evidence",
    [
        ({}, 1 << 20, "is larger than expected", "more than 0 GiB"),
        ({"seconds": 8 * 3600.0}, LARGEST, "takes too long", "no end after 28800 s"),
        ({"room": 255 << 20}, LARGEST, "not enough room for", "256 MiB to come, 255 MiB free"),
    ],
)
def test_a_file_of_unknown_length_has_an_end(
    tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch, host: dict[str, Any], largest: int, what: str,
    evidence: str,
) -> None:  # fmt: skip
    system = Clocked(str(tmp_path))
    vars(system).update(host)
    site.files["/f"], site.lengths = CONTENT, False
    monkeypatch.setattr(download, "LARGEST", largest)
    with pytest.raises(GpuprovError) as caught:
        progress(system, f"{site.url}/f")
    assert what in str(caught.value) and evidence in str(caught.value)
    assert system.status("/file") is None
    # What can't be resumed does not stay on a disk that it fills.
    assert (system.status("/file.part") is None) == ("seconds" not in host)


def test_a_small_file_that_comes_byte_by_byte_has_an_end(tmp_path: Path, site: Site) -> None:
    system = Clocked(str(tmp_path))
    site.files["/f"], system.seconds = b"x", 600.0
    with pytest.raises(GpuprovError, match="takes too long"):
        fetch_small(system, f"{site.url}/f")


# -- what is told ---------------------------------------------------------------------------------------------------


def test_part_of_another_file_is_reported_once_and_downloaded_again(system: System, site: Site) -> None:
    site.files["/run"] = CONTENT
    system.write("/file.part", b"of another file")
    told = progress(Clocked(str(system.root)), f"{site.url}/run")
    restarted = told.index(("what an earlier download left does not belong to this file; starting again", 0, 0))
    assert {message for message, _, _ in (*told[:restarted], *told[restarted + 1 :])} == {"downloading"}
    assert told[restarted + 1] == ("downloading", PIECE, len(CONTENT))


def test_a_local_file_replaces_what_an_earlier_run_left_of_it(system: System) -> None:
    system.write("/media.run", CONTENT)
    system.write("/file.part", CONTENT + b"more")
    assert progress(system, "file:///media.run") == []
    assert system.sha256("/file") == DIGEST
    problem = refused(fetch, system, "file:///nothing.run", "/other", sha256=DIGEST, tell=lambda *_: None)
    assert problem == Problem("there is no file /nothing.run", "", "check the path")


def test_what_is_not_the_file_is_told_with_both_digests_and_what_to_do(system: System, site: Site) -> None:
    site.files = {"/run": b"x", "/page": b" <!DOCTYPE html>" + b"y" * 600, "/empty": b""}
    system.write("/file", b"of last year")
    run, page, empty = (refused(progress, system, f"{site.url_with_login}/{name}") for name in ("run", "page", "empty"))
    assert (names(system), system.read_bytes("/file")) == (("file",), b"of last year")
    assert run.what == f"what {site.masked_url}/run gave is not the file that was asked for"
    assert page.what == f"{site.masked_url}/page gave a web page instead of a file"
    assert run.evidence == f"its SHA-256 is {hashlib.sha256(b'x').hexdigest()}, expected {DIGEST}"
    assert page.evidence == "<!DOCTYPE html>" + "y" * 104
    assert hashlib.sha256(b"").hexdigest() in empty.evidence
    assert "digest" in run.next_step
    assert "check the URL" in page.next_step and "proxy" in page.next_step


def test_small_files_that_can_not_be_had_say_what_to_do(system: System, site: Site) -> None:
    url = site.url_with_login
    site.files["/huge"] = b"x" * ((1 << 20) + 1)
    huge, nothing = (refused(fetch_small, system, address) for address in (f"{url}/huge", "file:///nothing"))
    assert huge == Problem(
        f"{site.masked_url}/huge is larger than expected", "more than 1048576 bytes", "check the URL"
    )
    assert nothing == Problem("there is no file file:///nothing", "", "check the path")
    system.write("/there", b"x" * (1 << 20))
    site.files["/there"] = b"x" * (1 << 20)
    assert fetch_small(system, "file:///there") == fetch_small(system, f"{url}/there") == site.files["/there"]


def test_of_a_huge_local_file_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    class Counting(System):
        def read_start(self, path: str, size: int) -> bytes | None:
            assert size == (1 << 20) + 1
            return super().read_start(path, size)

    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 34)
    with pytest.raises(GpuprovError, match="larger than expected"):
        fetch_small(Counting(str(tmp_path)), "file:///huge")


def test_what_can_not_be_had_is_told_in_order_and_redirections_are_followed(system: System, site: Site) -> None:
    site.files["/there"] = CONTENT
    site.moved = {"/a": "/there", "/b": "/gone"}
    urls = [f"{site.url_with_login}/{name}" for name in ("z", "b", "there", "a", "z")]
    found = unreachable(system, [*urls, "file:///anything"])
    next_step = "there is no such file: check version and URL"
    assert found == tuple(Problem(f"{site.masked_url}/{one} can't be had", "HTTP 404", next_step) for one in ("b", "z"))
    assert sorted({*site.asked}) == [(f"/{name}", "HEAD") for name in ("a", "b", "gone", "there", "z")]
    assert len([path for path, _ in site.asked if path == "/z"]) == 1
    (refusing,) = unreachable(system, [f"http://127.0.0.1:{free_port()}/x"])
    assert refusing.what.endswith("/x can't be reached: the connection is refused") and refusing.next_step


def test_a_wait_that_a_server_asks_for_is_not_shorter_than_ours(system: Impatient, site: Site) -> None:
    site.files["/f"] = CONTENT
    site.troubles, site.retry_after = [503, 503, 503], "2"
    told = progress(system, f"{site.url}/f")
    assert system.pauses == [2.0, 2.0, 4.0]
    assert told[0] == ("HTTP 503 Service Unavailable, trying again (2 of 4)", 0, 0)


@pytest.fixture
def two_servers(system: System, site: Site) -> str:
    """Return the address on the first of two servers for drivers, as a site's table may name them."""
    system.tables = Tables({"servers": {"servers": {name: f"{site.url}{path}" for name, path in SERVERS.items()}}})
    return f"{site.url}/aarch64"


SERVERS = {"nvidia-driver-aarch64": "/aarch64", "nvidia-driver-aarch64-2": "/Linux-aarch64"}


def test_a_driver_that_the_first_server_lacks_is_on_the_second(system: System, site: Site, two_servers: str) -> None:
    site.files["/Linux-aarch64/a.run"] = CONTENT
    site.files["/Linux-aarch64/a.run.sha256sum"] = DIGEST.encode()
    assert unreachable(system, [f"{two_servers}/a.run"]) == ()
    assert published_sha256(system, f"{two_servers}/a.run") == DIGEST
    assert default_url("580.1", "aarch64", system.tables) == f"{two_servers}/580.1/NVIDIA-Linux-aarch64-580.1.run"
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
    system.tables = Tables({"servers": {"servers": away}})
    with pytest.raises(GpuprovError) as caught:
        fetch(system, f"{two_servers}/a.run", "/file", sha256=DIGEST, tell=tell_nobody)
    assert ["HTTP 404" in one.evidence for one in caught.value.problems] == [True, False]
    with pytest.raises(GpuprovError, match=r"127\.0\.0\.1:9"):
        published_sha256(system, f"{two_servers}/a.run")


def test_a_site_that_replaces_the_first_server_has_no_second_one() -> None:
    own = {"nvidia-driver-aarch64": "https://mirror.example/aarch64"}
    tables = Tables({"servers": {"servers": own}})
    url = default_url("580.1", "aarch64", tables)
    assert tables.addresses(url) == (url,)
    assert len(PACKAGED.addresses(default_url("580.1", "aarch64", PACKAGED))) == 2

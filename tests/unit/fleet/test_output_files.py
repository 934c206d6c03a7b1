"""Files that a run writes for the user: through links, into FIFOs, beside files that others have."""

import os
import subprocess
from pathlib import Path

import pytest

from gpuprov.agent.result import HostResult
from gpuprov.fleet.command import require_writable
from gpuprov.fleet.first_inventory import write_new
from gpuprov.fleet.history import Run
from gpuprov.fleet.report import write_metrics, write_page
from gpuprov.protocol.errors import ExitCode, UsageError

RUN = Run("20261122T081500Z-7", "verify", "2026-11-22T08:15:00+0000", 9.5, (HostResult("lab-a", ExitCode.DONE),))


def test_metrics_go_through_a_link_that_is_the_users(tmp_path: Path) -> None:
    link, place = tmp_path / "gpuprov.prom", tmp_path / "disk/real.prom"
    place.parent.mkdir()
    link.symlink_to("disk/real.prom")
    for _ in range(2):  # the file is missing, and is there
        require_writable(str(link))
        write_metrics(RUN, str(link), 1.0)
        assert link.is_symlink() and "gpuprov_run_timestamp_seconds" in place.read_text()
        assert [one.name for one in place.parent.iterdir()] == ["real.prom"]


def test_a_page_goes_into_a_fifo_to_its_reader(tmp_path: Path) -> None:
    fifo = tmp_path / "page"
    os.mkfifo(fifo)
    with subprocess.Popen(("cat", fifo), stdout=subprocess.PIPE) as reader:
        require_writable(str(fifo))
        with fifo.open("wb"):  # once its reader has opened it
            write_page(RUN, str(fifo))
        read = reader.communicate(timeout=60)[0]
    assert read.startswith(b"<!doctype html>") and read.rstrip().endswith(b"</html>")


def test_a_fifo_without_a_reader_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "page")
    require_writable(str(tmp_path / "page"))
    with pytest.raises(UsageError, match=r"the report .*page cannot be written") as caught:
        write_page(RUN, str(tmp_path / "page"))
    assert f"gpuprov report --run {RUN.identifier} --html FILE" in str(caught.value)


def test_a_shorter_page_leaves_nothing_of_the_former_one(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("x" * 1_000_000)
    write_page(RUN, str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text().rstrip().endswith("</html>")


@pytest.mark.root
def test_a_link_that_another_user_has_put_there_leads_nowhere(tmp_path: Path) -> None:
    """As in /tmp, where anybody may make one of a name that root's command writes to."""
    theirs, own = tmp_path / "gpuprov.prom", tmp_path / "own.prom"
    (tmp_path / "shadow").write_text("root:*\n")
    theirs.symlink_to("shadow")
    os.lchown(theirs, 1000, 1000)
    own.symlink_to("gpuprov.prom")
    for link in (own, theirs):
        write_metrics(RUN, str(link), 1.0)
        assert (tmp_path / "shadow").read_text() == "root:*\n"
        assert "gpuprov_run_timestamp_seconds" in theirs.read_text()


def test_an_inventory_that_replaces_another_goes_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old\n")
    (tmp_path / "link").symlink_to("real")
    write_new(str(tmp_path / "link"), "new\n", force=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new\n"

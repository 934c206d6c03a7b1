"""The runtime's log: to a file or to the journal, one line whatever an image puts into it, and never a failure."""

import os
import re
import socket
from pathlib import Path

import pytest

from gpuprov.runtime_hook import record
from gpuprov.runtime_hook.settings import Settings

RUNTIME = "nvidia-container-runtime"


def settings(debug: str, level: str = "info") -> Settings:
    return Settings({f"{RUNTIME}.debug": debug, f"{RUNTIME}.log-level": level})


def test_a_thousand_records_stay_and_no_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", str(tmp_path / "containers"))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/config.json").touch()
    for number in range(1010):
        record.keep(f"c{number}", f"{tmp_path}/bundle", {})
        os.utime(tmp_path / f"containers/c{number}", (number, number))
    assert {*record.names()} == {f"c{number}" for number in range(10, 1010)}
    record.keep("large", f"{tmp_path}/bundle", {"decisions": ["x" * (256 << 10)]})
    assert record.read("large") is None


def test_it_is_off_by_default_for_the_null_device_and_without_a_journal(tmp_path: Path) -> None:
    for off in (Settings({}), settings("/dev/null"), settings("journal")):
        record.log(off, "error", "x", str(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wanted", "written"),
    [
        ("debug", ["debug", "info", "warning", "error"]), ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]), ("warn", ["warning", "error"]), ("error", ["error"]),
    ],
)  # fmt: skip
def test_lines_below_the_level_are_left_out(tmp_path: Path, wanted: str, written: list[str]) -> None:
    for level in ("debug", "info", "warning", "error"):
        record.log(settings(str(tmp_path / "log"), wanted), level, "text")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[1] for line in lines] == written
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \w+ text", line) for line in lines)


def test_an_images_words_forge_no_line_and_command_no_terminal(tmp_path: Path) -> None:
    record.log(settings(str(tmp_path / "log")), "info", "a\n2026 error forged\r\x1b[2J\udcff é")
    assert (tmp_path / "log").read_text().partition(" info ")[2] == "a 2026 error forged [2J é\n"


@pytest.mark.parametrize("text", ["x" * 1_000_000, "\n" * 1_000_000 + "x"])
def test_a_request_of_megabytes_fills_no_disk(tmp_path: Path, text: str) -> None:
    record.log(settings(str(tmp_path / "log")), "info", text)
    assert (tmp_path / "log").stat().st_size < 5000


def test_the_journal_gets_one_datagram_in_its_own_protocol(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(path))
        record.log(settings("journal"), "error", "GPU\nPRIORITY=0", str(path))
        assert journal.recv(1000).decode() == (
            "MESSAGE=GPU PRIORITY=0\nPRIORITY=3\nSYSLOG_IDENTIFIER=gpuprov-container-runtime\n"
        )


def test_a_new_file_is_for_root_alone_and_an_old_one_keeps_its_lines(tmp_path: Path) -> None:
    record.log(settings(str(tmp_path / "new")), "info", "x")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    (tmp_path / "old").write_text("first\n")
    mode = (tmp_path / "old").stat().st_mode
    record.log(settings(str(tmp_path / "old")), "info", "second")
    assert [line.split()[-1] for line in (tmp_path / "old").read_text().splitlines()] == ["first", "second"]
    assert (tmp_path / "old").stat().st_mode == mode


@pytest.mark.parametrize("kind", ["folder", "link", "missing folder", "no path"])
def test_where_it_cannot_be_written_nothing_happens(tmp_path: Path, kind: str) -> None:
    (tmp_path / "victim").write_text("")
    places = {"folder": tmp_path, "link": tmp_path / "link", "missing folder": tmp_path / "none/log", "no path": "/\0"}
    place = places[kind]
    (tmp_path / "link").symlink_to("victim")
    record.log(settings(str(place)), "error", "x")
    assert (tmp_path / "victim").read_text() == ""


def test_log_of_a_million_starts_has_a_bound(tmp_path: Path) -> None:
    log, old = tmp_path / "log", tmp_path / "log.1"
    old.symlink_to("/etc/hostname")
    log.touch()
    for number in range(3):
        os.truncate(log, (16 << 20) + 1)
        record.log(settings(str(log)), "info", f"start {number}")
    assert sorted(tmp_path.iterdir()) == [log, old] and not old.is_symlink()
    assert old.stat().st_size == (16 << 20) + 1
    assert re.fullmatch(r"\S+ info start 2\n", log.read_text())

"""Changes of files, links, device nodes and modes: what they show, and that their undo gives back what lay there."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from gpuprov.core.changes import (
    Change,
    FileFact,
    MakeNode,
    RefreshLoaderCache,
    RemoveFile,
    SetMode,
    WriteFile,
    capture_path,
    capture_path_itself,
    file_diff,
    file_digest,
    image_content,
    images_in,
    is_as_shown,
    restore_path,
    tell_nobody,
    text_diff,
    write_files,
)
from gpuprov.core.files import FileStatus, temporary_name
from gpuprov.core.system import System
from tests.unit.refused import refused
from tests.unit.scripted import Scripted

pytestmark = pytest.mark.root
PATH = "/a/b/x"


def lay(system: System, kind: str) -> None:
    """Put something of this kind at PATH, or nothing."""
    if kind != "nothing":
        system.make_directory("/a/b")
        system.remove(PATH)
    if kind == "file":
        system.write(PATH, b"old\n", mode=0o640, owner=(7, 8))
    elif kind == "empty file":
        system.write(PATH, b"")
    elif kind == "link":
        system.make_link(PATH, "target")
    elif kind == "node":
        system.make_node(PATH, 195, 3, 0o660, 44)


def tree(system: System) -> dict[str, tuple[FileStatus, bytes]]:
    found = {}
    for place in system.root.rglob("*"):
        path = f"/{place.relative_to(system.root)}"
        status = system.status(path)
        assert status is not None
        content = place.read_bytes() if status.kind == "file" else b""
        found[path] = (replace(status, modified=0.0), content)
    return found


PAIRS = [
    (before, then)
    for before in ("nothing", "empty folder", "file", "empty file", "link", "node")
    for then in ("file", "link", "node", "empty folder")
]


@pytest.mark.parametrize(("before", "then"), PAIRS)
def test_an_image_gives_back_what_lay_there(system: System, before: str, then: str) -> None:
    lay(system, before)
    whole = tree(system)
    image = json.loads(json.dumps(capture_path_itself(system, PATH)))
    lay(system, then)
    if then == "file":
        system.write(PATH, b"new\n", mode=0o600)
    for _ in range(2):
        restore_path(system, image)
        assert tree(system) == whole


def test_a_file_that_is_as_it_was_is_not_written_again(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(system, "file")
    left = temporary_name(system.path(PATH))
    left.write_text("half")
    monkeypatch.setattr(system, "write", None)  # a full disk
    restore_path(system, capture_path(system, PATH))
    assert not left.exists()


def test_what_is_in_use_is_not_removed_to_be_restored(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("node", "file"):
        lay(system, kind)
        image = capture_path(system, PATH)
        if kind == "file":
            system.write(PATH, b"new\n")
        with monkeypatch.context() as now:
            now.setattr(system, "remove", None)
            restore_path(system, image)
        assert capture_path(system, PATH) == image


def test_files_of_root_are_written_and_have_digests(system: System) -> None:
    lay(system, "file")
    write_files(system, ((PATH, b"new\n", 0o600), ("/c/d/y", b"", 0o644)))
    found = {path: (status.mode, status.uid, status.gid) for path, (status, _) in tree(system).items()}
    assert (found[PATH], found["/c/d/y"]) == ((0o600, 0, 0), (0o644, 0, 0))
    assert system.read_bytes(PATH) == b"new\n"
    assert file_digest(system, PATH) == hashlib.sha256(b"new\n").hexdigest()
    system.make_link("/link", "a/b/x")
    assert file_digest(system, "/c/d") == file_digest(system, "/nothing") == file_digest(system, "/link") == ""
    with system.path(PATH).open("wb") as sparse:
        sparse.truncate(1 << 42)
    assert file_digest(system, PATH) == "size 4398046511104"


def test_of_missing_folders_those_that_others_use_stay(system: System) -> None:
    image = capture_path(system, PATH)
    assert image_content(image) is None and not FileFact(b"", 0o644, 1, 0).is_roots(b"")
    assert FileFact(b"", 0o644, 0, 0).is_roots(b"") and not FileFact(b"", 0o600, 0, 0).is_roots(b"")
    lay(system, "file")
    system.write("/a/theirs", b"")
    restore_path(system, image)
    assert set(tree(system)) == {"/a", "/a/theirs"}


def test_a_link_that_came_in_the_place_of_a_missing_folder_stays(system: System) -> None:
    image = capture_path(system, PATH)
    lay(system, "file")
    system.rename("/a/b", "/elsewhere")
    system.make_link("/a/b", "/elsewhere")
    restore_path(system, image)
    assert tree(system)["/a/b"][0].target == "/elsewhere"


def test_what_a_later_link_leads_to_stays(system: System) -> None:
    lay(system, "file")
    image = capture_path(system, PATH)
    system.write("/a/b/target", b"theirs\n")
    lay(system, "link")
    restore_path(system, image)
    assert is_as_shown(system, image)
    assert system.read_bytes("/a/b/target") == b"theirs\n"


def test_an_image_of_a_link_is_of_the_file_behind_it(system: System) -> None:
    lay(system, "link")
    system.write("/a/b/target", b"old\n")
    image = capture_path(system, PATH)
    system.write("/a/b/target", b"new\n")
    restore_path(system, image)
    assert image["path"] == "/a/b/target"
    assert (system.read_bytes("/a/b/target"), system.read_bytes(PATH)) == (b"old\n", b"old\n")
    system.make_link("/folder", "a/b")
    assert capture_path(system, "/folder/target")["path"] == "/folder/target", "a folder may be a link, too"


@pytest.mark.parametrize("spoil", ["", "content", "mode", "owner", "group", "gone", "link"])
def test_what_the_disk_shows_is_compared_whole(system: System, spoil: str) -> None:
    lay(system, "file")
    image = capture_path(system, PATH)
    if spoil in ("content", "mode", "owner", "group"):
        content = b"new\n" if spoil == "content" else b"old\n"
        owner = (1 if spoil == "owner" else 7, 1 if spoil == "group" else 8)
        system.write(PATH, content, mode=0o600 if spoil == "mode" else 0o640, owner=owner)
    elif spoil:
        lay(system, "link" if spoil == "link" else "empty folder")
    assert is_as_shown(system, image) is (not spoil)
    missing = {"path": PATH, "kind": "missing", "missing_parents": []}
    assert is_as_shown(system, missing) is (spoil == "gone")


def test_every_image_in_a_captured_state_is_found(system: System) -> None:
    lay(system, "file")
    one, other = capture_path(system, PATH), capture_path(system, "/a/y")
    assert list(images_in({"files": [one, {"more": other}], "text": "x", "none": None})) == [one, other]
    lay(system, "link")
    link = capture_path_itself(system, PATH)
    state = {"files": [one, link, {"kind": "other"}]}
    assert (list(images_in(state)), list(images_in(state, links=True))) == ([one], [one, link])


CHANGES: dict[str, tuple[Any, str, FileStatus | None]] = {
    "write": (WriteFile(PATH, b"new\n", 0o600), "file", FileStatus("file", 0o600, 7, 8, 4)),
    "write into new folders": (WriteFile(PATH, b"new\n"), "nothing", FileStatus("file", 0o644, 0, 0, 4)),
    "remove": (RemoveFile(PATH, "why"), "file", None),
    "remove a link": (RemoveFile(PATH, "why"), "link", None),
    "node": (MakeNode(PATH, 195, 7, 0o660, 44), "empty folder", FileStatus("char", 0o660, 0, 44, 0, "", 195, 7)),
    "node in new folders": (MakeNode(PATH, 195, 7), "nothing", FileStatus("char", 0o666, 0, 0, 0, "", 195, 7)),
    "mode": (SetMode(PATH, 0o600), "file", FileStatus("file", 0o600, 7, 8, 4)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_made_and_undone(system: System, name: str) -> None:
    change, before, made = CHANGES[name]
    lay(system, before)
    whole = tree(system)
    captured = json.loads(json.dumps(change.capture(system)))
    change.apply(system, tell_nobody)
    status = system.status(PATH)
    assert (status and replace(status, modified=0.0)) == made
    for _ in range(2):
        type(change).undo(system, captured, None)
        assert tree(system) == whole


def test_the_loaders_cache_is_written_or_it_says_why_not() -> None:
    host = Scripted()
    RefreshLoaderCache().apply(host, tell_nobody)
    host.answer = lambda argv: (1, "", "disk full")  # type: ignore[method-assign]
    problem = refused(RefreshLoaderCache().apply, host, tell_nobody)
    assert problem.what and "disk full" in problem.evidence and "ldconfig" in problem.next_step
    assert host.asked == [("ldconfig",)] * 2 and all(host.timeouts)


def test_a_node_that_the_units_made_meanwhile_goes_and_one_of_other_numbers_comes_back(system: System) -> None:
    for numbers, left in (((195, 3), False), ((195, 7), True)):
        lay(system, "node")
        before = MakeNode(PATH, 195, 3).capture(system)
        MakeNode(PATH, *numbers).apply(system, tell_nobody)
        MakeNode.undo(system, before, None)
        assert (PATH in tree(system)) is ("/a/b" in tree(system)) is left
        if left:
            assert (tree(system)[PATH][0].minor, tree(system)[PATH][0].gid) == (3, 44)


def test_a_mode_is_not_given_back_to_what_has_gone(system: System) -> None:
    lay(system, "empty folder")
    missing = SetMode(PATH, 0o600).capture(system)
    lay(system, "file")
    there = SetMode(PATH, 0o600).capture(system)
    SetMode.undo(system, missing, None)
    assert tree(system)[PATH][0].mode == 0o640
    system.remove(PATH)
    SetMode.undo(system, there, None)
    assert PATH not in tree(system)


OLD, NEW = f"--- {PATH}\n", f"+++ {PATH}\n"
DIFFS: dict[str, tuple[bytes | None, bytes | None, str]] = {
    "the same": (b"a\n", b"a\n", ""),
    "nothing": (None, None, ""),
    "changed": (b"a\nb\n", b"a\nc\n", f"{OLD}{NEW}@@ -1,2 +1,2 @@\n a\n-b\n+c"),
    "new": (None, b"a\n", f"--- /dev/null\n{NEW}@@ -0,0 +1 @@\n+a"),
    "removed": (b"a\n", None, f"{OLD}+++ /dev/null\n@@ -1 +0,0 @@\n-a"),
    "binary": (b"\xff", b"a\n", f"binary file {PATH} differs"),
}


@pytest.mark.parametrize("name", DIFFS)
def test_diffs_of_texts(name: str) -> None:
    before, after, expected = DIFFS[name]
    assert text_diff(PATH, before, after) == expected


MODES = f"--- {PATH} (mode 0640)\n+++ {PATH} (mode 0644)"


@pytest.mark.parametrize(
    ("before", "content", "mode", "expected"),
    [
        ("file", b"old\n", 0o640, ""),
        ("file", b"old\n", 0o644, MODES),
        ("file", b"new\n", 0o644, f"{MODES}\n@@ -1 +1 @@\n-old\n+new"),
        ("file", b"\xff", 0o644, MODES),
        ("file", b"new\n", 0o640, f"{OLD}{NEW}@@ -1 +1 @@\n-old\n+new"),
        ("link", b"new\n", 0o644, f"{OLD}{NEW}@@ -1 +1 @@\n-old\n+new"),
        ("nothing", b"new\n", 0o644, f"--- /dev/null\n{NEW}@@ -0,0 +1 @@\n+new"),
    ],
)
def test_diffs_of_files_have_their_modes(system: System, before: str, content: bytes, mode: int, expected: str) -> None:
    lay(system, before)
    if before == "link":
        system.write("/a/b/target", b"old\n")
    assert file_diff(system, PATH, content, mode) == WriteFile(PATH, content, mode).diff(system) == expected


def test_diffs_of_a_mode_and_of_a_removal(system: System) -> None:
    assert (Change().diff(system), Change().diff_in_short(system)) == ("", "")
    assert SetMode(PATH, 0o644).diff(system) == ""
    lay(system, "file")
    assert SetMode(PATH, 0o644).diff(system) == MODES
    assert RemoveFile(PATH, "why").diff(system) == f"{OLD}+++ /dev/null\n@@ -1 +0,0 @@\n-old"

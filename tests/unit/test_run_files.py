"""A driver's .run file: what is kept of it, whether a replaced driver can come back, and how one is uninstalled."""

import base64
import errno
import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.journal import STATE_DIRECTORY, Entry
from gpuprov.core.places import CACHE_DIRECTORY, KEPT
from gpuprov.core.system import System
from gpuprov.driver import run_files
from gpuprov.driver.installer import Installation
from gpuprov.driver.run_files import INCOMPLETE_MARK, RECORD, UNPACK, FetchRunfile
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import PACKAGED
from tests import simgpu
from tests.unit.fake_host import FakeHost
from tests.unit.scripted import Scripted

pytestmark = pytest.mark.root
OLD, NEW = "535.261.03", simgpu.DRIVER_VERSION
SHA = hashlib.sha256(b"driver").hexdigest()
# A path with a control character comes back unchanged.
FORMER = Installation(OLD, "/home/old.run", SHA, "x86_64", kernel_modules=True, module_type="open", signing_key="/\1")
URL = "https://mirror.example"


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    made = FakeHost(tmp_path / "root")
    made.make_directory(STATE_DIRECTORY, 0o700)
    return made


@pytest.mark.parametrize(
    "values",
    [
        {"driver_version": "550"}, {"driver_version": "550", "driver_mirror": URL, "driver": "packages"},
        {"driver_version": "550", "driver_mirror": URL, "driver_url": f"{URL}/x.run"},
        {"driver_version": "", "driver_mirror": URL},
    ],
    ids=str,
)  # fmt: skip
def test_a_mirror_decides_only_where_it_is_used(values: dict[str, Any]) -> None:
    spec = HostSpec(**values)
    assert run_files.resolved(System("/nowhere"), spec, "x86_64") == spec


@pytest.mark.parametrize("values", [{"driver_version": "580"}, {"driver_version": "", "driver_mirror": URL}], ids=str)
def test_a_bundle_stands_in_for_a_mirror_alone(values: dict[str, Any]) -> None:
    spec = HostSpec(**values)
    assert run_files.from_bundle(spec, "580.95.05", PACKAGED) == spec


def test_a_download_is_private_shown_without_a_login_and_taken_back(tmp_path: Path) -> None:
    url = "https://me:opensesame@mirror.example/x.run"
    change = FetchRunfile(url, "/cache/x.run", SHA)
    assert "mirror.example/x.run" in change.summary() and "opensesame" not in change.summary()
    assert change.urls == (url,)
    system = System(str(tmp_path))
    system.make_directory("/mirror")
    system.write("/mirror/x.run", b"driver")
    change = FetchRunfile("file:///mirror/x.run", "/cache/x.run", SHA)
    captures = [change.capture(system)]
    change.apply(system, lambda *_: None)
    captures.append(change.capture(system))
    folder = system.status("/cache")
    assert folder is not None and folder.mode == 0o700
    for before, there in zip(reversed(captures), (True, False)):
        FetchRunfile.undo(system, before, None)
        assert system.exists("/cache/x.run") is there


@pytest.mark.parametrize(
    ("published", "given", "error"),
    [
        ("", "", "SHA-256 is not known"), (SHA, "", ""), ("0" * 64, SHA, ""), (SHA, "0" * 64, "not the file"),
    ],
)  # fmt: skip
def test_download_has_the_given_or_published_digest(tmp_path: Path, published: str, given: str, error: str) -> None:
    system = System(str(tmp_path))
    system.make_directory("/mirror")
    system.write("/mirror/x.run", b"driver")
    if published:
        system.write("/mirror/x.run.sha256sum", f"{published}  x.run\n".encode())
    change = FetchRunfile("file:///mirror/x.run", "/cache/x.run", given)
    with pytest.raises(GpuprovError, match=error) if error else nullcontext() as raised:
        change.apply(system, lambda *_: None)
    assert raised is None or raised.value.problems[0].next_step
    assert system.exists("/cache/x.run") is (not error)


def _image(content: bytes) -> Mapping[str, str]:
    return {"kind": "file", "content": base64.b64encode(content).decode()}


JSON = json.dumps(asdict(FORMER)).encode()
CAPTURES: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, False),
    "a record": ({"record": _image(JSON), "replaces": OLD}, True),
    "a record of another driver": ({"record": _image(JSON), "replaces": NEW}, False),
    "no record": ({"record": {"kind": "missing"}, "replaces": OLD}, False),
    "half a record": ({"record": _image(JSON[:-5]), "replaces": OLD}, False),
    "a record of something else": ({"record": _image(b"[]"), "replaces": OLD}, False),
    "installed by hand": ({"record": {"kind": "missing"}, "by_hand": asdict(FORMER), "replaces": OLD}, True),
    "another one by hand": ({"by_hand": asdict(FORMER), "replaces": NEW}, False),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_the_replaced_driver_is_known_by_its_record(name: str) -> None:
    before, known = CAPTURES[name]
    assert run_files.replaced_installation(before) == (FORMER if known else None)


@pytest.mark.parametrize(("version", "known"), [(OLD, True), (NEW, False)])
def test_the_installed_driver_is_known_by_its_record(host: FakeHost, version: str, known: bool) -> None:
    assert run_files.recorded_installation(host, version) is None
    run_files.record_installation(host, "/home/old.run", FORMER, content=False, replaces="", tell=lambda *_: None)
    assert run_files.recorded_installation(host, version) == (FORMER if known else None)


# The kept file, the driver's URL, whether the URL's file exists → the sentence, whether the driver comes back.
WAYS: dict[str, tuple[bytes | None, str, bool, str, bool]] = {
    "kept": (b"driver", "/home/old.run", False, f"driver {OLD} from {FORMER.kept_path}", True),
    "kept, with a mirror": (b"driver", "file:///mirror/x", False, f"driver {OLD} from {FORMER.kept_path}", True),
    "changed": (b"other", "/home/old.run", True, f"its file, {FORMER.kept_path}, has changed", False),
    "gone": (None, "/home/old.run", True, f"its file, {FORMER.kept_path}, is not kept", False),
    "on a mirror": (None, "file:///mirror/x", True, f"driver {OLD}, downloaded again from file:///mirror/x", True),
    "changed, on a mirror": (b"other", "file:///mirror/x", True, f"driver {OLD}, downloaded again", True),
    "no longer on a mirror": (None, "file:///mirror/x", False, f"driver {OLD} can't be restored: there is no /mirror/x",
                              False),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_whether_a_replaced_driver_comes_back_is_said(host: FakeHost, name: str) -> None:
    kept, url, exists, sentence, comes = WAYS[name]
    for path, content in ((FORMER.kept_path, kept), (url.removeprefix("file://"), b"driver" if exists else None)):
        if content is not None:
            host.make_directory(path.rpartition("/")[0])
            host.write(path, content)
    said, restorable = run_files.restoration(host, OLD, replace(FORMER, url=url))
    assert sentence in said and restorable is comes
    if comes:
        run_files.ensure_kept(host, replace(FORMER, url=url))
        assert host.read_bytes(FORMER.kept_path) == b"driver"
        folder = host.status(KEPT)
        assert kept is not None or (folder is not None and folder.mode == 0o700)


def test_a_driver_without_a_record_does_not_come_back() -> None:
    said, comes = run_files.restoration(System("/nowhere"), OLD, None)
    assert said.startswith(f"driver {OLD} can't be restored") and not comes


@pytest.mark.parametrize(
    ("content", "replaces", "left"),
    [
        (True, OLD, {OLD, NEW}), (True, "", {OLD, NEW, "470.1"}), (True, NEW, {OLD, NEW, "470.1"}),
        (True, "470.1", {NEW, "470.1"}), (False, OLD, set()), (False, "", set()), (False, NEW, {OLD, "470.1"}),
    ],
)  # fmt: skip
def test_present_and_former_files_are_kept(host: FakeHost, content: bool, replaces: str, left: set[str]) -> None:
    told: list[str] = []
    host.make_directory(KEPT, 0o700)
    for version in (OLD, "470.1"):
        host.write(f"{KEPT}/{version}.run", b"x")
    path = f"{CACHE_DIRECTORY}/new.run"
    host.write(path, b"driver")
    host.write(RECORD, b"of an earlier run", owner=(1, 1))
    former = replace(FORMER, version=NEW)
    run_files.record_installation(
        host, path, former, content=content, replaces=replaces, tell=lambda text, *_: told.append(text)
    )
    assert set(host.list_directory(KEPT)) == {f"{version}.run" for version in left}
    assert host.exists(path) is not content
    record = host.status(RECORD)
    assert record is not None and (record.mode, record.uid, record.gid) == (0o600, 0, 0)
    assert told == []


@pytest.mark.parametrize("changed", [True, False])
def test_a_copy_is_kept_if_it_is_the_file_that_was_installed(host: FakeHost, changed: bool) -> None:
    told: list[tuple[Any, ...]] = []
    host.make_directory("/home")
    host.write("/home/old.run", b"other" if changed else b"driver")
    run_files.record_installation(
        host, "/home/old.run", FORMER, content=True, replaces="", tell=lambda *words: told.append(words)
    )
    copy = ("cp", "--reflink=auto", "--no-preserve=all", "--", "/home/old.run", FORMER.kept_path)
    assert copy in host.commands and host.exists("/home/old.run")
    folder = host.status(KEPT)
    assert folder is not None and folder.mode == 0o700
    assert host.read_bytes(FORMER.kept_path) == (None if changed else b"driver")
    step = "put it in a folder that only root can write, install again"
    problem = Problem("/home/old.run has changed since it was installed", "", step)
    assert told == [(f"the driver's file is not kept: {problem}", 0, 0)] * changed


@pytest.mark.parametrize(
    ("path", "fails"), [("/old.run", "remove"), (f"{CACHE_DIRECTORY}/old.run", "rename"), ("/old.run", "_cp")]
)
def test_unkept_file_fails_no_install(host: FakeHost, path: str, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []

    def fail(*words: object) -> tuple[int, str]:
        if fails == "_cp":
            return 1, "Read-only file system"
        raise OSError(errno.EROFS, "Read-only file system")

    host.make_directory(CACHE_DIRECTORY)
    host.write(path, b"driver")
    monkeypatch.setattr(host, fails, fail)
    run_files.record_installation(host, path, FORMER, content=True, replaces="", tell=lambda *words: told.append(words))
    ((text, *progress),) = told
    assert "Read-only file system" in text and progress == [0, 0]
    assert not host.exists(FORMER.kept_path) and host.exists(path)


# The driver on the disk, the former one's URL, whether its file is there, whether it is required → whether it is kept.
FETCHED = [
    (NEW, "file:///mirror/x", True, False, True), (OLD, "file:///mirror/x", True, True, False),
    (NEW, "/mirror/x", True, True, False), (NEW, "file:///mirror/x", False, False, False),
]  # fmt: skip


@pytest.mark.parametrize(("there", "url", "exists", "required", "kept"), FETCHED)
def test_undo_fetches_first(host: FakeHost, there: str, url: str, exists: bool, required: bool, kept: bool) -> None:
    simgpu.install_tree(host.root, there)
    host.make_directory("/mirror")
    if exists:
        host.write("/mirror/x", b"driver")
    before = {"version": NEW, "replaces": OLD, "by_hand": asdict(replace(FORMER, url=url))}
    entries = [Entry(1, "driver", "InstallDriver", "done", before, {})]
    for some in ([], [replace(entries[0], outcome={"installed": False})]):
        run_files.fetch_former(host, some, required=True)
    assert not host.exists(FORMER.kept_path)
    run_files.fetch_former(host, entries, required=required)
    assert host.exists(FORMER.kept_path) is kept
    if not exists:
        with pytest.raises(GpuprovError):
            run_files.fetch_former(host, entries, required=True)


# What differs in the former driver, its file, the loaded driver, whether that is in use → whether the former driver
# comes back (None: an error), whether the loaded one was to be unloaded.
BACK: dict[str, tuple[dict[str, Any], bytes | None, str, bool, bool | None, bool]] = {
    "unused": ({}, b"driver", NEW, False, True, True),
    "in use": ({}, b"driver", NEW, True, None, True),
    "in use, a later installer": ({"version": "570.1"}, b"driver", NEW, True, True, True),
    "the former one is loaded": ({"version": NEW}, b"driver", NEW, True, True, False),
    "the former one is loaded, an old installer": ({}, b"driver", OLD, False, True, True),
    "in a container": ({"kernel_modules": False}, b"driver", NEW, True, True, False),
    "nothing is loaded": ({}, b"driver", "", True, True, False),
    "its file is gone": ({}, None, NEW, False, False, False),
    "its file is another one": ({}, b"other", NEW, False, False, False),
}


@pytest.mark.parametrize("name", BACK)
def test_restored_driver_replaces_loaded_one(host: FakeHost, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, content, loaded, in_use, back, unloads = BACK[name]
    former, asked = replace(FORMER, url="file:///mirror/x", **values), list[System]()
    host.make_directory("/mirror")
    if content is not None:
        host.write("/mirror/x", content)
    version = host.path("/proc/driver/nvidia/version")
    version.write_text(version.read_text().replace(NEW, loaded) if loaded else "")

    def unload(system: System) -> GpuprovError | None:
        asked.append(system)
        return GpuprovError("in use") if in_use else None

    monkeypatch.setattr(run_files, "unload_for_undo", unload)
    before = {"replaces": former.version, "by_hand": asdict(former)}
    with nullcontext() if back is not None else pytest.raises(GpuprovError, match="in use"):
        assert run_files.prepare_restoration(host, before) == (former if back else None)
    assert asked == [host] * unloads


class Uninstalled(Scripted):
    """A host that has the uninstaller, or not, and notes the mark and the folder while it runs."""

    def __init__(self, root: Path, program: str | None) -> None:
        super().__init__(root)
        self.program, self.marks, self.modes = program, list[str](), list[int]()
        self.make_directory(STATE_DIRECTORY)
        for name in ("nvidia", "nvidia_uvm", "ext4"):
            self.make_directory(f"/sys/module/{name}")

    def which(self, program: str) -> str | None:
        return self.program if program == "nvidia-uninstall" else None

    def answer(self, argv: tuple[str, ...]) -> str:
        folder = self.status(UNPACK)
        self.marks.append(self.read_text(INCOMPLETE_MARK) or "")
        self.modes += [folder.mode] if folder is not None else []
        return ""


@pytest.mark.parametrize("modules", [True, False])
@pytest.mark.parametrize(
    ("program", "files", "command"),
    [
        ("/usr/bin/nvidia-uninstall", (), ("/usr/bin/nvidia-uninstall", "--silent")),
        (None, ("/var/lib/nvidia/log", "/x.run"), ("sh", "/x.run", "--tmpdir", UNPACK, "--silent", "--uninstall")),
        (None, ("/x.run",), None), (None, ("/var/lib/nvidia/log",), None),
    ],
)  # fmt: skip
def test_the_uninstaller_of_the_host_or_of_the_file_is_run(
    tmp_path: Path, program: str | None, files: tuple[str, ...], command: tuple[str, ...] | None, modules: bool
) -> None:
    host = Uninstalled(tmp_path, program)
    for path in files:
        host.make_directory(path.rpartition("/")[0] or "/")
        host.write(path, b"")
    run_files.uninstall(host, {"version": NEW, "path": "/x.run", "kernel_modules": modules})
    if command is None:
        assert host.asked == [] and not host.exists(INCOMPLETE_MARK)
        return
    assert (host.asked[0], host.timeouts[0], host.marks[0]) == (command, 600, f"{NEW}\n")
    assert host.modes == ([0o700] if command[0] == "sh" else []) and not host.exists(UNPACK)
    assert {words[1] for words in host.asked[1:]} == ({"nvidia", "nvidia_uvm"} if modules else set())


# The driver on the disk, the mark, whether its nvidia-smi is lost, the entry's outcome, more of the entry → whole.
FORMERS: dict[str, tuple[str, str, bool, dict[str, Any] | None, dict[str, Any], bool]] = {
    "nothing was touched": (NEW, NEW, False, {"installed": False}, {}, True),
    "untouched yet": (OLD, "", False, None, {}, True),
    "replaced": (NEW, "", False, {}, {}, False),
    "back": (OLD, "", False, {}, {}, True),
    "half of the new one": (OLD, NEW, False, {}, {}, False),
    "cut off before it was removed": (OLD, NEW, False, None, {"by_hand": asdict(FORMER)}, True),
    "cut off while it was removed": (OLD, NEW, True, None, {"by_hand": asdict(FORMER)}, False),
    "cut off, and not known": (OLD, NEW, True, None, {}, True),
    "half restored": (OLD, OLD, False, None, {}, False),
    "replaced nothing": (OLD, "", False, None, {"replaces": ""}, False),
    "replaced nothing, and is gone": ("", "", False, {}, {"replaces": ""}, False),
    "replaced itself": (OLD, "", False, {}, {"version": OLD}, True),
    "damaged, and not replaced by itself yet": (OLD, "", True, None, {"version": OLD}, True),
    "not replaced by itself": (OLD, OLD, False, None, {"version": OLD}, True),
    "half replaced by itself": (OLD, OLD, True, None, {"version": OLD}, False),
}


@pytest.mark.parametrize("name", FORMERS)
def test_whether_the_replaced_driver_is_whole(host: FakeHost, name: str) -> None:
    version, mark, damaged, outcome, more, whole = FORMERS[name]
    if version:
        simgpu.install_tree(host.root, version)
    if mark:
        host.write(INCOMPLETE_MARK, f"{mark}\n".encode())
    if damaged:
        host.remove("/usr/bin/nvidia-smi")
    assert run_files.former_is_whole(host, {"version": NEW, "replaces": OLD, **more}, outcome) is whole


# The driver on the disk, more of the entry → the version that somebody else installed since.
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "somebody's": (OLD, {}, OLD),
    "none": ("", {}, ""),
    "this one": (NEW, {}, ""),
    "an older version's entry": (OLD, {"record": None}, ""),
    "the replaced one": (OLD, {"by_hand": asdict(FORMER), "replaces": OLD}, ""),
    "another of gpuprov's": (OLD, {"recorded": True}, ""),
    "half of another": (OLD, {"incomplete": True}, ""),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whose_driver_is_in_the_place_of_this_one(host: FakeHost, name: str) -> None:
    version, more, others = OTHERS[name]
    before: dict[str, Any] = {"version": NEW, "replaces": "", "record": {"kind": "missing"}, **more}
    if version:
        simgpu.install_tree(host.root, version)
    if before["record"] is None:
        del before["record"]
    if "recorded" in more:
        run_files.record_installation(host, "/home/old.run", FORMER, content=False, replaces="", tell=lambda *_: None)
    if "incomplete" in more:
        host.write(INCOMPLETE_MARK, b"")
    assert run_files.installed_by_others(host, before) == others

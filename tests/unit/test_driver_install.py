"""A driver's installation that fails: what it was to replace stays if the installer did not touch it yet."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.cdi.discover import discover
from gpuprov.core.apply import apply_changes
from gpuprov.core.commands import Completed
from gpuprov.core.journal import new_journal, read_runs
from gpuprov.core.places import CACHE_DIRECTORY
from gpuprov.driver.run_files import INCOMPLETE_MARK, FetchRunfile, require_room
from gpuprov.driver_run import InstallDriver, RunFile
from gpuprov.facts.host import gather
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import parse_spec
from gpuprov.protocol.tables import PACKAGED
from tests import simgpu
from tests.triplet import TRIPLET
from tests.unit.fake_host import FakeHost, write_runfile
from tests.unit.refused import refused

OLD, NEW = "535.261.03", simgpu.DRIVER_VERSION


class FailingHost(FakeHost):
    """Has the old driver; its installer of the new one fails, before or after it has taken the old one away."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._runfile(())
        for path in (root / f"usr/lib/{TRIPLET}").glob(f"*.so.{NEW}"):
            path.rename(path.with_name(path.name.replace(NEW, OLD)))
        for path in (root / f"usr/lib/{TRIPLET}").iterdir():
            if path.is_symlink() and NEW in str(path.readlink()):
                target = str(path.readlink()).replace(NEW, OLD)
                path.unlink()
                path.symlink_to(target)
        self.takes_old_away = False

    def _runfile(self, words: tuple[str, ...]) -> tuple[int, str]:
        if not words:
            return super()._runfile(words)
        if self.takes_old_away:
            self._uninstall(())
        (self.root / "var/log/nvidia-installer.log").write_text("ERROR: Unable to find the kernel source tree\n")
        return 1, "ERROR: Unable to find the kernel source tree"


@pytest.fixture
def host(tmp_path: Path) -> FailingHost:
    made = FailingHost(tmp_path)
    assert discover(made).library_version == OLD
    return made


def failed(host: FakeHost, path: str) -> str:
    change = InstallDriver(NEW, path, "", "x86_64", kernel_modules=False, replaces=OLD)
    with pytest.raises(GpuprovError) as caught:
        apply_changes([change], host, new_journal(host, "install"), lambda event: None)
    assert [entry.state for entry in read_runs(host)[-1].entries] == ["undone"]
    assert host.status(INCOMPLETE_MARK) is None
    return str(caught.value)


def test_a_file_that_is_not_the_driver_costs_nothing(host: FailingHost) -> None:
    before = host.tree()
    assert "there is no driver file" in failed(host, "/root/nothing.run")
    assert host.tree() == before


@pytest.mark.parametrize("label", [f"Linux-aarch64 {NEW}", f"Linux-x86_64 {OLD}"], ids=["architecture", "version"])
def test_a_driver_for_another_machine_or_of_another_version_is_not_run(host: FailingHost, label: str) -> None:
    text = f'#!/bin/sh\nlabel="NVIDIA Accelerated Graphics Driver for {label}"\n'
    (host.root / "driver.run").write_text(text)
    before = host.tree()
    architecture, version = label.removeprefix("Linux-").split()
    said = failed(host, "/driver.run")
    assert f"the driver file is {version} for {architecture}, asked for is {NEW} for x86_64" in said
    assert (host.tree(), any(command[0] == "sh" for command in host.commands)) == (before, False)


class SyncedHost(FakeHost):
    """Notes whether the mark of an installation that is not whole was there when all was synced."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.marked: list[bool] = []

    def sync(self) -> None:
        self.marked.append(self.exists(INCOMPLETE_MARK))


@pytest.mark.root
def test_the_driver_is_on_the_disk_before_it_is_called_whole(tmp_path: Path) -> None:
    """After a power cut its files may be empty: then the mark must be there."""
    host = SyncedHost(tmp_path)
    write_runfile(tmp_path / "driver.run")
    change = InstallDriver(NEW, "/driver.run", "", "x86_64", kernel_modules=False)
    change.apply(host, lambda message, done, total: None)
    assert host.marked == [True]
    assert host.status(INCOMPLETE_MARK) is None


def test_an_installer_that_gives_up_first_leaves_the_old_driver(host: FailingHost) -> None:
    write_runfile(host.root / "driver.run")
    before = host.tree()
    assert "was not installed" in failed(host, "/driver.run")
    log = "/var/log/nvidia-installer.log"
    assert {**host.tree(), log: before[log]} == before


def test_what_an_installer_leaves_of_two_drivers_is_taken_away(host: FailingHost) -> None:
    write_runfile(host.root / "driver.run")
    host.takes_old_away = True
    assert "was not installed" in failed(host, "/driver.run")
    assert discover(host).library_version == ""


@pytest.mark.root
def test_oracles_uek_8_is_built_with_the_compiler_that_built_it(tmp_path: Path) -> None:
    class Oracle(FakeHost):
        paths: list[str]

        def kernel_release(self) -> str:
            return "6.12.0-100.28.2.el9uek.x86_64"

        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            if argv[0] == "sh":
                self.paths.append((more.get("env") or {}).get("PATH", ""))
            return super().run(argv, **more)

    host = Oracle(tmp_path)
    host.paths = []
    host.write("/etc/os-release", b'ID="ol"\nVERSION_ID="9.6"\n')
    write_runfile(tmp_path / "driver.run")
    change = InstallDriver(NEW, "/driver.run", "", "x86_64", kernel_modules=False)
    change.apply(host, lambda *_: None)
    host.make_directory("/opt/rh/gcc-toolset-14/root/usr/bin")
    change.apply(host, lambda *_: None)
    # A host without the toolset keeps the usual path, on which the installer says what it lacks.
    assert host.paths[0] == "" and host.paths[-1].startswith("/opt/rh/gcc-toolset-14/root/usr/bin:/usr/local/sbin:")


@pytest.mark.parametrize("full", [CACHE_DIRECTORY, "/usr", ""])
def test_an_installation_needs_room_in_the_cache_and_in_its_place(tmp_path: Path, full: str) -> None:
    class Small(FakeHost):
        def free_bytes(self, path: str) -> int:
            return (30 << 20) - (path == full)

    host = Small(tmp_path / "root")
    (host.root / "driver.run").write_bytes(bytes(10 << 20))
    if not full:
        require_room(host, "/driver.run", 3, "/usr", "it")
        require_room(host, "/absent", 1 << 40, "/usr", "it")
        return
    problem = refused(require_room, host, "/driver.run", 3, "/usr", "it")
    assert f"not enough room on the file system of {full} to install it" in problem.what
    assert (problem.evidence, problem.next_step) == ("29 MiB free, 30 MiB needed", f"make room: df -h {full}")


_OURS = "https://us.download.nvidia.com/XFree86/Linux-x86_64/580.1.1/NVIDIA-Linux-x86_64-580.1.1.run"
_KNOWN = "580.178.04"


@pytest.mark.parametrize(
    ("wanted", "place", "needs", "fetched"),
    [
        ({"driver_version": "580.1.1"}, f"{CACHE_DIRECTORY}/NVIDIA-Linux-x86_64-580.1.1.run", False, True),
        ({"driver_url": "https://a.example/b/X/"}, f"{CACHE_DIRECTORY}/X", False, True),
        ({"driver_url": "/root/X/x.run"}, "/root/X/x.run", False, False),
        ({"driver_url": "http://a.example/x.run"}, f"{CACHE_DIRECTORY}/x.run", True, True),
        ({"driver_url": "http://a.example/x.run", "driver_sha256": "0" * 64}, f"{CACHE_DIRECTORY}/x.run", False, True),
        ({"driver_url": "http://a.example/x.run", "driver_version": _KNOWN}, f"{CACHE_DIRECTORY}/x.run", False, True),
        ({"driver": "preinstalled"}, f"{CACHE_DIRECTORY}/NVIDIA-Linux-x86_64-580.1.1.run", False, False),
    ],
)
def test_the_place_of_a_runfile(tmp_path: Path, wanted: dict[str, str], place: str, needs: bool, fetched: bool) -> None:
    spec = parse_spec({"driver_version": "580.1.1", **wanted})
    facts = gather(FakeHost(tmp_path / "root"))
    url = wanted.get("driver_url", _OURS)
    driver = RunFile(facts, spec)
    assert (driver.url, driver.path) == (url, place)
    assert any("over http" in one.what for one in refusals(source_of(facts, spec))) is needs
    digest = wanted.get("driver_sha256", "") or (
        PACKAGED.known_sha256(_KNOWN, "x86_64") if _KNOWN in wanted.values() else ""
    )
    assert source_of(facts, spec).plan_download() == ((FetchRunfile(url, place, digest),) if fetched else ())
    there = replace(facts, downloads={place: digest or "0" * 64})
    assert source_of(there, spec).plan_download() == ()
    other = replace(facts, downloads={place: "1" * 64})
    assert source_of(other, spec).plan_download() == ((FetchRunfile(url, place, digest),) if fetched and digest else ())

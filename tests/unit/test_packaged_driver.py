"""Another branch of a driver from packages: changed, loaded in the same run, and never while a process uses it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpuprov.bundle.manifest import BundlePackage
from gpuprov.cdi.discover import discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import render_json
from gpuprov.core.changes import tell_nobody
from gpuprov.core.commands import TIMED_OUT, Completed
from gpuprov.core.places import FOLDER, KEPT_PACKAGES
from gpuprov.core.retention import prune
from gpuprov.driver import packaged, running_driver
from gpuprov.driver.packaged import ChangeDriverPackages, InstallDriverPackages, InstallDriverRpms, LoadDriver, keep
from gpuprov.facts.boot import REBOOT_ASKED
from gpuprov.packages.apt_changes import InstallPackages
from gpuprov.packages.dnf import DNF
from gpuprov.packages.rpm import InstallRpmPackages
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.events import ChangeDone, ChangeStarted, Event, Finished, Note
from gpuprov.toolkit import CDI_SPECIFICATION
from tests import simgpu
from tests.unit.fake_host import FakeHost
from tests.unit.loaded_host import DCGM, NEW, OLD, PERSISTENCED, LoadedHost, install, loaded
from tests.unit.refused import refused

pytestmark = pytest.mark.root


class Plenty(dict[str, str]):
    """A repository that has every package."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> str:
        return "1.0"


class PackagedHost(LoadedHost):
    """That machine with the driver from NVIDIA's packages, whose branch is pinned."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.installed.update({"nvidia-open": f"{OLD}-1", "nvidia-driver-pinning-535": "535"})
        self.available = Plenty({"nvidia-open": f"{NEW}-1"})

    def _dpkg_query(self, words: tuple[str, ...]) -> tuple[int, str]:
        return (0, f"nvidia-driver:amd64: {words[-1]}\n") if "--search" in words else super()._dpkg_query(words)

    def _apt_get(self, words: tuple[str, ...]) -> tuple[int, str]:
        if "--simulate" in words and "purge" not in words:
            return 0, self.removes
        gone = [word.rstrip("-") for word in words if word.startswith("nvidia-") and word.endswith("-")]
        for name in gone:
            del self.installed[name]
        code, said = super()._apt_get(tuple(word for word in words if word.rstrip("-") not in gone))
        if "nvidia-open" in words:
            self._lay(NEW)
        if f"nvidia-open={OLD}-1" in words:
            self._lay(OLD)
            self.installed["nvidia-open"] = f"{OLD}-1"
        return code, said

    removes = "Remv libnvidia-compute-535 [535.261.03-1]\n"


def take_550(host: FakeHost, **values: Any) -> tuple[Finished, list[Event]]:
    """Install the packages of branch 550."""
    steps = ("packages", "reboot", "driver")
    return install(host, steps=steps, driver="packages", driver_version="550", driver_url="", **values)


@pytest.fixture
def host(tmp_path: Path) -> PackagedHost:
    return PackagedHost(tmp_path / "root")


def test_another_branch_of_packages_is_loaded_in_the_same_run(host: PackagedHost) -> None:
    finished, events = take_550(host)
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert loaded(host) == (NEW, NEW)
    assert host.units == {PERSISTENCED, DCGM}
    assert (host.installed["nvidia-open"], "nvidia-driver-pinning-535" in host.installed) == (f"{NEW}-1", False)
    keys = [event.key for event in events if isinstance(event, ChangeDone)]
    assert keys.index("change the driver's packages") < keys.index("load the driver that is installed")
    started = [event for event in events if isinstance(event, ChangeStarted)]
    (loads,) = (event.summary for event in started if event.key == "load the driver that is installed")
    assert loads.startswith(f"load driver {NEW} instead of {OLD}")
    assert take_550(host)[0].changed == 0


def test_a_rollback_restores_and_loads_the_packages_of_before(host: PackagedHost) -> None:
    take_550(host)
    for _ in range(2):
        finished, _ = install(host, command="rollback")
        assert finished.exit_code == ExitCode.DONE, finished.problems
        assert (host.installed["nvidia-open"], loaded(host)) == (f"{OLD}-1", (OLD, OLD))
        assert host.units == {PERSISTENCED, DCGM}
    assert not host.exists(REBOOT_ASKED)


def test_a_rollback_asks_for_a_reboot_if_a_container_uses_the_driver(host: PackagedHost) -> None:
    take_550(host)
    host.container("train", 900)
    finished, events = install(host, command="rollback")
    assert finished.exit_code == ExitCode.DONE, finished.problems
    assert (host.installed["nvidia-open"], loaded(host)) == (f"{OLD}-1", (NEW, OLD))
    told = [event.message for event in events if isinstance(event, Note)]
    assert f"reboot this host: the kernel still runs driver {NEW}, installed is {OLD}" in told


@pytest.mark.parametrize("used", [False, True])
def test_a_rollback_writes_specifications_again_which_another_hand_wrote(host: PackagedHost, used: bool) -> None:
    """The unit that watches for drivers may write them before the run does: they are not in its journal."""
    take_550(host)
    written = render_json(specification(discover(host)))
    host.make_directory("/etc/cdi")
    host.write(CDI_SPECIFICATION, written)
    if used:
        host.container("train", 900)
    assert install(host, command="rollback")[0].exit_code == ExitCode.DONE
    found = host.read_bytes(CDI_SPECIFICATION)
    assert found is not None
    # While the old module is in the kernel, neither driver's specification is right, and a reboot writes it.
    assert (found == written, f"libcuda.so.{OLD}".encode() in found) == (used, not used)


def test_packages_of_a_driver_in_use_are_left_alone(host: PackagedHost) -> None:
    host.container("train", 900)
    before = host.tree()
    finished, _ = take_550(host)
    (problem,) = finished.problems
    assert problem.what == f"driver {OLD} is loaded and in use, so 550 can't replace it"
    assert problem.evidence == "container train uses a GPU"
    assert (host.tree(), host.installed["nvidia-open"]) == (before, f"{OLD}-1")
    finished, _ = take_550(host, reboot="if-needed")
    assert finished.summary.startswith("rebooting")
    assert (host.running, host.installed["nvidia-open"]) == ({"train"}, f"{NEW}-1")


def test_packages_that_are_not_the_drivers_do_not_go_for_it(host: PackagedHost) -> None:
    gone = "Remv libnvidia-compute-535 [535.261.03-1]\nRemv pytorch [2.0]"
    host.removes = f"Inst nvidia-open\n{gone}\n"
    finished, _ = take_550(host)
    (problem,) = finished.problems
    assert (problem.what, problem.evidence) == ("apt would take away pytorch for driver 550", gone)
    assert "apt-get --simulate install --allow-downgrades -- nvidia-open" in problem.next_step
    assert (host.installed["nvidia-open"], loaded(host)) == (f"{OLD}-1", (OLD, OLD))


class BundledHost(PackagedHost):
    """That machine where only gpuprov's own folder has the former packages."""

    kept = f"{KEPT_PACKAGES}/{OLD}/nvidia-open_{OLD}-1_amd64.deb"

    def _apt_get(self, words: tuple[str, ...]) -> tuple[int, str]:
        by_version = f"nvidia-open={OLD}-1"
        if "--simulate" in words and by_version in words:
            return 100, "E: Version not found"
        return super()._apt_get(tuple(by_version if word == self.kept else word for word in words))


def test_packages_that_a_rollback_installs_outlive_those_that_it_undoes(tmp_path: Path) -> None:
    host = BundledHost(tmp_path / "root")
    for number, version in enumerate((OLD, NEW)):
        host.make_directory(f"{KEPT_PACKAGES}/{version}")
        os.utime(host.path(f"{KEPT_PACKAGES}/{version}"), (number, number))
    host.write(host.kept, b"")
    take_550(host)
    os.utime(host.path(f"{KEPT_PACKAGES}/{OLD}"), (0, 0))
    assert install(host, command="rollback")[0].exit_code == ExitCode.DONE
    assert host.installed["nvidia-open"] == f"{OLD}-1"
    # The next upgrade's.
    host.make_directory(f"{KEPT_PACKAGES}/580.82.07")
    prune(host, CHANGE_KINDS)
    assert host.list_directory(KEPT_PACKAGES) == (OLD, "580.82.07")
    assert host.list_directory(f"{KEPT_PACKAGES}/{OLD}") == (host.kept.rpartition("/")[2],)


def test_kept_packages_lie_in_the_folder_of_the_drivers_version(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root")
    own = {"libnvidia-egl-wayland1": "1:9.1.10-1", "libnvidia-ml1": "580.82.07-1", "nvidia-smi": "580.82.07-1"}
    toolkit = ("libnvidia-container1", "libnvidia-container-tools", "nvidia-container-toolkit")
    own.update(dict.fromkeys(toolkit, "1.18.0-1"))
    host.installed.update({**own, "vim": "9-1"})
    # Not the driver's; not installed; not in the bundle that was unpacked.
    every = {**own, "vim": "9-1", "nvidia-open": "580.82.07-1", "libnvidia-cfg1": "580.82.07-1"}
    packages = [BundlePackage(name, version, "amd64", f"repository/{name}.deb") for name, version in every.items()]
    host.make_directory(f"{FOLDER}/repository")
    for one in packages[:-1]:
        host.write(f"{FOLDER}/{one.file}", b"")
    keep(host, [])
    assert host.commands == []
    keep(host, [one for one in packages if "container" in one.name])
    assert host.list_directory(KEPT_PACKAGES) == ()
    keep(host, packages)
    assert host.list_directory(KEPT_PACKAGES) == ("580.82.07",)
    assert host.path(f"{KEPT_PACKAGES}/580.82.07").stat().st_mode & 0o777 == 0o700
    # One without a version of the driver's kind names no folder.
    assert packaged.driver_version("1-1") == ""
    files = {f"{name}_{version.replace(':', '%3a')}_amd64.deb" for name, version in own.items()}
    assert {*host.list_directory(f"{KEPT_PACKAGES}/580.82.07")} == files


# -- the way back of a change ------------------------------------------------------------------------------------------

FORMER = {"nvidia-open": f"1:{OLD}-1", "libcuda1:i386": f"{OLD}-1", "nvidia-smi": f"{OLD}-1"}
VERSIONS = {*(f"{name}={version}" for name, version in FORMER.items()), "libnvidia-ml1=1"}
OTHERS = VERSIONS - {f"nvidia-open=1:{OLD}-1"}
DEB = f"nvidia-open_1%3a{OLD}-1_amd64.deb"
ARCHIVED, KEPT = f"/var/cache/apt/archives/{DEB}", f"{KEPT_PACKAGES}/{OLD}/{DEB}"
I386_DEB = f"{KEPT_PACKAGES}/{OLD}/libcuda1_{OLD}-1_i386.deb"
# apt-get(8). What is not there is refused.
WORDS = {"install", "-q", "-o", *map("--{}".format, ("simulate", "allow-downgrades", "purge", "yes"))}
WORDS |= {"--allow-change-held-packages", "--no-install-recommends"}
WAYS: dict[str, tuple[set[str], str, str, bool, bool]] = {
    # What apt gets; a file that is kept; what goes for it; whether the versions can be had, and are restored.
    "repositories have them": (VERSIONS, "", "Remv libnvidia-ml1 [1]\n", True, True),
    "one is in no repository": (OTHERS, "", "", False, False),
    "apt keeps a file": ({*OTHERS, ARCHIVED}, ARCHIVED, "", True, True),
    "gpuprov keeps a file": ({*OTHERS, KEPT}, KEPT, "", True, True),
    "of another architecture too": (VERSIONS - {f"libcuda1:i386={OLD}-1"} | {I386_DEB}, I386_DEB, "", True, True),
    "a kept file is damaged": (VERSIONS - {"libnvidia-ml1=1"}, KEPT, "", True, True),
    "a stranger goes for them": (VERSIONS, "", "Remv pytorch [2.0]\n", True, False),
}  # fmt: skip


class AptHost(FakeHost):
    """A host where a change has replaced packages of FORMER, and removed nvidia-smi; apt gets the words of `gets`."""

    gets: set[str]
    removes = ""
    reports = 0
    half_done = True
    full: Exception = OSError(28, "No space left on device")
    before: ClassVar[dict[str, Any]] = {
        "installed": [], "versions": {**FORMER, "libnvidia-ml1": "1", "vim": "1", "nvidia-container-toolkit": "1"},
    }  # fmt: skip
    outcome: ClassVar[dict[str, Any]] = {
        "added": [], "changed": {one: ["1", "2"] for one in ("nvidia-open", "libcuda1:i386", "vim")},
    }  # fmt: skip

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        # Somebody has installed another libnvidia-ml1 since.
        self.installed.update({"nvidia-open": "2", "libcuda1:i386": "2", "libnvidia-ml1": "3", "vim": "2"})
        self.installed.update({"nvidia-container-toolkit": "1", "since": "1"})

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        # Each tells a line of progress.
        more.get("on_line", str)("Setting up a package")
        assert argv[0] not in ("apt-get", "apt-cache") or more["timeout"]
        done = Completed(tuple(argv), 1, "half done\n")
        return done if argv[0] == "dpkg" and self.half_done else super().run(argv, **more)

    def write(self, path: str, content: bytes, **more: Any) -> None:
        if path.endswith("/used"):
            raise self.full
        super().write(path, content, **more)

    def _apt_cache(self, words: tuple[str, ...]) -> tuple[int, str]:
        assert words[0] == "madison"
        rows = [word.split("=") for word in sorted(self.gets)]
        return 0, "".join(f"{one[0].partition(':')[0]} | {one[1]} | x Packages\n" for one in rows if one[1:])

    def _apt_get(self, words: tuple[str, ...]) -> tuple[int, str]:
        if "install" not in words or "--" not in words:
            return super()._apt_get(words)
        options, asked = words[: words.index("--")], words[words.index("--") + 1 :]
        if not {one for one in options if "=" not in one} <= WORDS or "--yes" not in options:
            return 100, "E: Command line option is not understood"
        if not self.gets.issuperset(asked) or (VERSIONS.intersection(asked) and "--allow-downgrades" not in options):
            return 100, "E: Version not found"
        if "--simulate" in words:
            return 0, self.removes
        self.installed.update({"libnvidia-ml1": "1"} if "libnvidia-ml1=1" in asked else FORMER)
        return self.reports, "E: Sub-process returned an error code"


@pytest.mark.parametrize("name", WAYS)
def test_undo_restores_replaced_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gets, kept, removes, offered, restored = WAYS[name]
    loaded_on: list[FakeHost] = []
    monkeypatch.setattr(running_driver, "load_installed", loaded_on.append)
    host = AptHost(tmp_path / "root")
    host.gets, host.removes = gets, removes
    if kept:
        host.full = GpuprovError("full", "", "") if kept == I386_DEB else host.full
        host.make_directory(kept.rpartition("/")[0])
        host.write(kept, b"")
    told = InstallDriverPackages.restores(host, host.before, host.outcome)
    assert ["libcuda1:i386=" in one and "and 2 more" in one for one in told] == [True] * restored
    stay = {one.split(" ")[0] for one in InstallDriverPackages.irreversible(host, host.before, host.outcome, ())}
    assert stay == ({"vim"} if restored else {"vim", "nvidia-open", "libcuda1:i386"})
    stay = {one.split(" ")[0] for one in InstallDriverPackages.irreversible(host, host.before, None, ())}
    all_again = restored and "libnvidia-ml1=1" in gets
    assert stay == ({"vim"} if all_again else {"vim", "nvidia-open", "libcuda1:i386", "libnvidia-ml1"})
    # An earlier gpuprov has noted neither versions nor changes.
    assert InstallDriverPackages.restores(host, {"installed": []}, {"added": []}) == ()
    assert host.commands[-1][0] == "dpkg-query", "there is nothing to ask apt for"
    assert InstallDriverPackages.irreversible(host, host.before, {"added": []}, ()) == ()
    # A package that was removed for it counts only if an undo does not restore it.
    instead = ChangeDriverPackages(("nvidia-open",), instead=("nvidia-smi",)).capture(host)["instead"]
    gone = ChangeDriverPackages.irreversible(host, {**host.before, "instead": instead}, host.outcome, ())
    others = InstallDriverPackages.irreversible(host, host.before, host.outcome, ())
    smi = () if restored else ("package nvidia-smi is not restored",)
    assert gone == (*smi, *others)
    # An earlier gpuprov has noted no packages that go for it.
    assert ChangeDriverPackages.irreversible(host, host.before, host.outcome, ()) is not None
    InstallDriverPackages.undo(host, host.before, host.outcome)
    assert loaded_on == [host] * restored
    found = {name: host.installed.get(name) for name in FORMER}
    assert (found == FORMER, host.installed["libnvidia-ml1"], "since" in host.installed) == (restored, "3", True)
    if restored:
        assert InstallDriverPackages.restores(host, host.before, host.outcome) == ()
        host.installed["nvidia-open"], host.reports = "2", 100
        problem = refused(InstallDriverPackages.undo, host, host.before, host.outcome)
        assert problem.what.startswith("the driver's packages could") and "Sub-process" in problem.evidence
    host.installed = {**FORMER, "nvidia-container-toolkit": "1.17"}
    (way,) = InstallDriverPackages(("nvidia-open=2", "vim")).way_back(host)
    # The first of several that there are, or all that can't be had.
    found_in = [one for one in ("can't", "nvidia-open=", "libcuda1:i386=", "and 2 more", "container") if one in way]
    assert found_in == (["libcuda1:i386=", "and 2 more"] if offered else ["can't", "nvidia-open="])
    assert InstallDriverPackages(("vim",)).way_back(host) == ()


def test_an_undo_restores_the_toolkit_and_loads_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(running_driver, "load_installed")
    host, name = AptHost(tmp_path / "root"), "nvidia-container-toolkit"
    host.gets = {f"{name}=0", f"{name}=1", *VERSIONS}
    before, outcome = {"installed": [], "versions": {name: "0"}}, {"added": [], "changed": {name: ["0", "1"]}}
    assert InstallDriverPackages.restores(host, before, outcome) == (f"restores the toolkit's packages ({name}=0)",)
    InstallDriverPackages.undo(host, before, outcome)
    assert [one[-2:] for one in host.commands if "--allow-downgrades" in one] == [("--", f"{name}=0")] * 3
    (way,) = InstallDriverPackages((name,)).way_back(host)
    assert way == f"way back: the toolkit's packages, by version ({name}=1)"
    host.installed = {name: "1", "nvidia-open": f"1:{OLD}-1"}
    (way,) = InstallDriverPackages((name, "nvidia-open")).way_back(host)
    assert way == f"way back: the driver and toolkit's packages, by version ({name}=1 and 1 more)"
    # What an apt-cache that hangs does not tell is neither a way back nor the lack of one.
    real = host.run
    silent = Completed(("apt-cache",), TIMED_OUT)
    monkeypatch.setattr(host, "run", lambda argv, **more: silent if argv[0] == "apt-cache" else real(argv, **more))
    assert InstallDriverPackages((name,)).way_back(host) == ()


def test_what_apt_has_not_done_is_an_error(tmp_path: Path) -> None:
    """It reports success, but the version is another one; or the loader takes the libraries of another branch."""
    host = AptHost(tmp_path / "root")
    host.gets, host.half_done = {"nvidia-open", "nvidia-open=1", "nvidia-old-"}, False
    more: dict[str, Any] = {"instead": ("nvidia-old",), "options": ("-o", "Dir=bundle")}
    for name, wanted in (("nvidia-open", "535"), ("nvidia-open=1", f"{OLD}-1")):
        ChangeDriverPackages((name,), wanted=wanted, **more).apply(host, tell_nobody)
    packaged.SwitchPin(("nvidia-open",), **more).apply(host, tell_nobody)
    found = [("Dir=bundle" in one, one[-1]) for one in host.commands if "install" in one and "--" in one]
    assert found == [(True, "nvidia-old-")] * 5
    host.gets.add("nvidia-gone")
    for change, what, seen, step in (
        (ChangeDriverPackages(("nvidia-open",), wanted="550"), OLD, "success", "apt-cache policy nvidia-open"),
        (ChangeDriverPackages(("nvidia-gone",), wanted="550"), " no driver,", "", "apt-cache policy nvidia-gone"),
        (ChangeDriverPackages(("missing",), wanted="550"), "changed to 550", "Version not found", ""),
        (packaged.SwitchBranch(("nvidia-open",), wanted="535", instead=("nvidia-old",)), "branch 535",
         "libnvidia-ml.so.1 is of no driver", "update-alternatives --display nvidia "),
        (packaged.SwitchPin(("missing",)), "missing could not", "Version not found", ""),
    ):  # fmt: skip
        problem = refused(change.apply, host, tell_nobody)
        assert what in problem.what and seen in problem.evidence and problem.next_step.startswith(step)
    assert host.commands[-1][-2:] == ("--", "missing")
    simgpu.install_tree(host.root, OLD)
    change = packaged.SwitchBranch(("nvidia-open",), wanted="535")
    change.apply(host, tell_nobody)
    assert replace(change, instead=("nvidia-old",)).summary() == f"{change.summary()}; remove nvidia-old"
    host.reports = 100
    assert refused(change.apply, host, tell_nobody).what.startswith("the driver's packages could not be changed to 535")


def test_nothing_is_changed_if_apt_does_not_tell_what_would_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = PackagedHost(tmp_path / "root")
    monkeypatch.setattr(host, "_apt_get", lambda words: (-9, "") if "--simulate" in words else (0, ""))
    with pytest.raises(GpuprovError, match="the driver's packages could not be changed to 550"):
        ChangeDriverPackages(("nvidia-open",), wanted="550").apply(host, tell_nobody)
    assert ["--simulate" in command for command in host.commands if command[0] == "apt-get"] == [True]


@pytest.mark.parametrize("ask", ["restores", "undo"])
def test_undo_needs_an_answer_of_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    host = AptHost(tmp_path / "root")
    monkeypatch.setattr(host, "_apt_get", lambda words: (137, "") if "--simulate" in words else (0, ""))
    problem = refused(getattr(InstallDriverPackages, ask), host, host.before, host.outcome)
    assert problem.what == "apt-get does not tell whether the driver's packages can be installed again"
    assert "apt-get --simulate" in problem.evidence and problem.next_step
    assert not [one for one in host.commands if one[0] == "apt-get" and "--simulate" not in one]


def test_an_installation_that_replaces_the_drivers_packages_restores_them() -> None:
    changes = (
        InstallPackages(("site=1", "nvidia-open=2")), InstallPackages(("vim",)), InstallPackages(("nvidia-smi",)),
        InstallRpmPackages(DNF, ("nvidia-container-toolkit",)), LoadDriver(),
    )  # fmt: skip
    assert packaged.restoring(changes, ("nvidia-open", "vim", "nvidia-container-toolkit")) == (
        InstallDriverPackages(("site=1", "nvidia-open=2")), *changes[1:3],
        InstallDriverRpms(DNF, ("nvidia-container-toolkit",)), LoadDriver(),
    )  # fmt: skip

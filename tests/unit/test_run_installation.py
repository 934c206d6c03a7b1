"""What a .run file's installation is given, runs, writes and refuses: each as a whole."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gpuprov.bundle.manifest import BundleFacts, Manifest
from gpuprov.core.changes import NextAction, capture_path, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.places import CACHE_DIRECTORY, KEPT, STOPPED
from gpuprov.core.system import System
from gpuprov.driver import running_driver
from gpuprov.driver.installer import Installation
from gpuprov.driver.run_files import INCOMPLETE_MARK, RECORD, UNPACK
from gpuprov.driver.running_driver import Unloading
from gpuprov.driver_run import InstallDriver, RunFile
from gpuprov.facts.boot import IN_USE_MARK
from gpuprov.facts.driver import INSTALLER_LOG, GpuHolder, RunningDriver
from gpuprov.facts.gpus import Chip
from gpuprov.facts.host import HostFacts, gather
from gpuprov.facts.kernels import ImageFacts
from gpuprov.machine.pci import PciGpu
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import parse_spec
from gpuprov.protocol.tables import PACKAGED
from tests.unit.fake_host import RELEASE, FakeHost
from tests.unit.loaded_host import DCGM, NEW, OLD, LoadedHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root
BLACKLISTS = [
    f"{folder}/nvidia-installer-disable-nouveau.conf" for folder in ("/etc/modprobe.d", "/usr/lib/modprobe.d")
]
KNOWN = "580.178.04"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    return gather(FakeHost(tmp_path_factory.mktemp("host") / "root", metal=True))


def test_the_whole_installation_is_planned(facts: HostFacts) -> None:
    mirror = "https://mirror.example"
    signed = {"module_signing_key": "/k", "module_signing_certificate": "/c", "driver_mirror": mirror,
              "kernel_module_type": "open"}  # fmt: skip
    spec = parse_spec({"driver_version": NEW, "driver_url": "/driver.run", "driver_sha256": "0" * 64, **signed})
    packages = replace(facts.packages, installed={**facts.packages.installed, "libgl1": "1"})
    facts = replace(facts, packages=packages, driver=replace(facts.driver, library_version=KNOWN))
    file, digest = f"NVIDIA-Linux-x86_64-{KNOWN}.run", PACKAGED.known_sha256(KNOWN, "x86_64")
    (found,) = RunFile(facts, spec).plan()
    by_hand = Installation(KNOWN, f"{mirror}/{KNOWN}/{file}", digest, "x86_64", True, "open", has_libgl=True)
    expected = InstallDriver(
        NEW, "/driver.run", "0" * 64, "x86_64", True, "open", True, "/k", "/c", replaces=KNOWN,
        gpu_device_ids=facts.gpu_device_ids, asked_module_type="open", keep=True, by_hand=by_hand,
    )  # fmt: skip
    assert found == expected
    (found,) = RunFile(facts, replace(spec, driver_mirror="", keep_driver=False)).plan()
    url = f"https://us.download.nvidia.com/XFree86/Linux-x86_64/{KNOWN}/{file}"
    assert found == replace(expected, keep=False, by_hand=replace(by_hand, url=url))
    unknown = replace(facts, packages=replace(packages, installed={"libglvnd-glx": "1"}),
                      driver=replace(facts.driver, library_version="1.2.3"))  # fmt: skip
    assert RunFile(unknown, spec).plan() == (replace(expected, replaces="1.2.3", by_hand=None),)
    image = replace(
        facts,
        image=ImageFacts((), offline=True),
        bundle=BundleFacts(Manifest("debian", "12", "x86_64", "")),
        packages=replace(packages, installed={}),
    )
    bare = replace(
        expected,
        gpu_device_ids=(),
        has_libgl=False,
        keep=False,
        by_hand=None,
        image_kernel=RELEASE,
        without_systemd=True,
    )
    assert RunFile(image, spec).plan() == (bare,)
    for device, kind in (("2941", "open"), ("1db4", "proprietary")):
        other = replace(image, image=None, bundle=None, gpus=(PciGpu("0000:01:00.0", device),))
        (found,) = RunFile(other, replace(spec, kernel_module_type="auto")).plan()
        assert isinstance(found, InstallDriver) and found.module_type == kind
        assert found.by_hand == replace(by_hand, module_type=kind, has_libgl=False)


@pytest.mark.parametrize("holders", [(), (GpuHolder(950, "python3", "/dev/nvidia0"),)])
def test_a_loaded_driver_gives_way_or_stays(facts: HostFacts, holders: tuple[GpuHolder, ...]) -> None:
    running = RunningDriver(OLD, ("nvidia",), (), {}, "", holders)
    there = replace(facts, driver=replace(facts.driver, kernel_version=OLD), running=running)
    driver = RunFile(there, parse_spec({"driver_version": NEW, "reboot": "if-needed"}))
    (change,) = driver.plan()
    assert isinstance(change, InstallDriver) and change.module_type == "auto"
    assert (change.unloading, change.keep_loaded) == (running_driver.replacement(driver).unloading, bool(holders))
    assert (change.unloading is None) is bool(holders)


# The driver in the kernel → the problem.
OUTSIDE: dict[str, Problem | None] = {
    "": Problem("the NVIDIA driver is not loaded on the container host", "there is no /proc/driver/nvidia/version",
                f"install driver {NEW} on the container host first, then run gpuprov again here"),
    OLD: Problem(
        f"driver {NEW} is asked for, but the container host runs {OLD}: the two must match",
        "/proc/driver/nvidia/version", f'set gpuprov_driver_version: "{OLD}", or update the container host'),
    NEW: None,
}  # fmt: skip


@pytest.mark.parametrize("loaded", OUTSIDE)
def test_libraries_match_the_kernel_outside(facts: HostFacts, loaded: str) -> None:
    problem = OUTSIDE[loaded]
    kernel = replace(facts.kernel, container="lxc")
    there = replace(facts, kernel=kernel, driver=replace(facts.driver, kernel_version=loaded), free_bytes={})
    spec = parse_spec({"driver_version": NEW})
    assert RunFile(there, spec).problems() == ((problem,) if problem else ())
    found = RunFile(there, replace(spec, driver_version="")).problems()
    assert [one.next_step.startswith("install the driver on the") for one in found] == [True] * (not loaded)
    assert RunFile(replace(there, image=ImageFacts(())), spec).problems() == ()


@pytest.mark.parametrize(("folder", "needed"), [(CACHE_DIRECTORY, 2400), ("/usr", 1200)])
def test_room_is_needed_for_nvidias_own_file_alone(facts: HostFacts, folder: str, needed: int) -> None:
    spec = parse_spec({"driver_version": NEW})
    there = {name: replace(facts, free_bytes={folder: size}) for name, size in
             (("full", (needed << 20) - 1), ("enough", needed << 20))}  # fmt: skip
    what = f"not enough room on the file system of {folder} for the driver"
    problem = Problem(what, f"{needed - 1} MiB free, {needed} MiB needed", f"make room: df -h {folder}")
    assert RunFile(there["full"], spec).problems() == (problem,)
    assert RunFile(there["enough"], spec).problems() == ()
    assert RunFile(there["full"], replace(spec, driver_url="/driver.run")).problems() == ()
    assert RunFile(replace(there["full"], driver_packaged="nvidia-driver"), spec).problems() == ()
    assert RunFile(there["full"], replace(spec, driver_version="600")).problems() == ()
    installed = replace(there["full"], driver=replace(facts.driver, library_version=NEW), has_module=True)
    assert RunFile(installed, spec).problems() == ()


def test_kernel_modules_of_the_other_kind_are_refused(facts: HostFacts) -> None:
    """By the driver's own list, and by its generation for a GPU that the list does not know."""
    there = replace(facts, gpus=(PciGpu("0000:01:00.0", "1db4"),), free_bytes={})
    spec = parse_spec({"driver_version": NEW, "kernel_module_type": "open"})
    for served, seen in (({}, "by their generation"), ({"1db4": Chip("V100", "", False, True)}, "supported-gpus.json")):
        (problem,) = RunFile(replace(there, served=served), spec).problems()
        assert seen in problem.evidence and "gpuprov_kernel_module_type" in problem.next_step
        assert RunFile(replace(there, served=served), replace(spec, kernel_module_type="auto")).problems() == ()


def test_a_summary_names_what_is_replaced_and_stopped() -> None:
    change = InstallDriver(NEW, "/driver.run", "", "x86_64", True)
    plain = f"install NVIDIA driver {NEW}"
    assert change.summary() == replace(change, replaces=NEW).summary() == f"{plain} (libraries and kernel modules)"
    assert replace(change, kernel_modules=False).summary() == f"{plain} (libraries only)"
    more = replace(change, replaces=OLD, unloading=Unloading(OLD, ("nvidia",), ("a.service",)), keep_loaded=True)
    meanwhile = "; stopped meanwhile: a.service; the loaded one stays until the reboot"
    assert more.summary() == f"{plain} (libraries and kernel modules) instead of {OLD}{meanwhile}"
    assert (change.diff(System("/nowhere")), more.diff(System("/nowhere"))) == ("", str(more.unloading))
    assert change.next_action({}) is NextAction.CONTINUE
    assert change.next_action({"installed": False}) is more.next_action({}) is NextAction.PLAN_AGAIN


class Watched(LoadedHost):
    """Notes what lies there while the installer runs, with which limit and environment, and lets it print a line."""

    registered = f"nvidia/{NEW}, {RELEASE}, x86_64: installed\n"

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[0] == "sh":
            self.limit, self.environment_given = more["timeout"], more["env"]
            self.seen = (self.path(UNPACK).stat().st_mode & 0o777, self.names_in(UNPACK), self.exists(INSTALLER_LOG),
                         self.read_text(INCOMPLETE_MARK))  # fmt: skip
            more["on_line"](" building \n")
        if argv[0] == "dkms":
            return Completed(tuple(argv), 0, self.registered)
        return super().run(argv, **more)

    def names_in(self, path: str) -> tuple[str, ...]:
        return self.list_directory(path)


@pytest.fixture
def host(tmp_path: Path) -> Watched:
    made = Watched(tmp_path / "root")
    for pid in (700, 701):
        made.remove_tree(f"/proc/{pid}")
    made.make_directory(UNPACK)
    made.write(f"{UNPACK}/left", b"")
    made.write(INSTALLER_LOG, b"ERROR: of an earlier run\n")
    made.make_directory(CACHE_DIRECTORY)
    made.path("/driver.run").rename(made.path(PLACE))
    return made


PLACE = f"{CACHE_DIRECTORY}/driver.run"
UNLOADING = Unloading(OLD, ("nvidia_modeset", "nvidia_uvm", "nvidia"), boot_id="boot-1")
CHANGE = InstallDriver(NEW, "https://a.example/driver.run", "", "x86_64", True, "open", replaces=OLD,
                       unloading=UNLOADING)  # fmt: skip


@pytest.mark.parametrize("dkms", [False, True])
def test_an_installation_by_exact_commands_is_recorded(host: Watched, dkms: bool) -> None:
    if dkms:
        host.write("/usr/bin/dkms", b"", mode=0o755)
    assert CHANGE.capture(host) == {
        "version": NEW, "replaces": OLD, "path": PLACE, "kernel_modules": True, "by_hand": None,
        "blacklists": [capture_path(host, path) for path in BLACKLISTS], "record": capture_path(host, RECORD),
    }  # fmt: skip
    by_hand = Installation(OLD, "/old.run", "0", "x86_64", True)
    assert replace(CHANGE, by_hand=by_hand).capture(host)["by_hand"] == asdict(by_hand)
    digest, told = host.sha256(PLACE), list[tuple[Any, ...]]()
    host.commands.clear()
    assert CHANGE.apply(host, lambda *words: told.append(words)) == {}
    options = ("--silent", "--no-questions", "--ui=none", f"--log-file-name={INSTALLER_LOG}")
    command = ("sh", PLACE, "--tmpdir", UNPACK, *options, *(("--dkms",) * dkms), "-m=kernel-open", "--install-libglvnd")
    unloads = [("rmmod", name) for name in UNLOADING.modules]
    assert host.commands == [*unloads, command, ("modinfo", "-k", RELEASE, "-F", "version", "nvidia")]
    assert (host.seen, host.environment_given) == ((0o700, (), False, f"{NEW}\n"), {})
    assert told == [("building", 0, 0)] and not host.exists(UNPACK) and not host.exists(INCOMPLETE_MARK)
    assert host.path(STATE_DIRECTORY).stat().st_mode & 0o777 == 0o700
    record = Installation(NEW, CHANGE.url, digest, "x86_64", True, "open")
    assert json.loads(host.read_text(RECORD) or "") == asdict(record)
    assert not host.exists(PLACE) and not host.exists(record.kept_path), "it is not to be kept"


@pytest.mark.parametrize("in_the_way", [False, True])
def test_the_file_is_kept_beside_that_of_the_replaced_driver(host: Watched, in_the_way: bool) -> None:
    host.make_directory(f"{KEPT}/{NEW}.run/in the way" if in_the_way else KEPT)
    for version in (OLD, "1.2.3"):
        host.write(f"{KEPT}/{version}.run", b"")
    running_driver.unload_unused(host)
    host.remove_tree(STATE_DIRECTORY)
    change, told, digest = replace(CHANGE, unloading=None, keep=True), list[str](), host.sha256(PLACE)
    assert replace(change, replaces="").way_back(host) == ()
    assert change.apply(host, lambda text, *_: told.append(text)) == {}
    assert ["is not kept" in text for text in told] == [False] + [True] * in_the_way
    assert in_the_way or {*host.list_directory(KEPT)} == {f"{OLD}.run", f"{NEW}.run"}
    assert in_the_way or host.sha256(f"{KEPT}/{NEW}.run") == digest
    assert host.path(STATE_DIRECTORY).stat().st_mode & 0o777 == 0o700


def test_a_driver_that_can_not_be_unloaded_is_left_to_a_reboot_if_one_helps(host: Watched) -> None:
    host.kernel_holds, told = True, list[tuple[Any, ...]]()
    change = replace(CHANGE, unloading=replace(UNLOADING, units=(DCGM,)))
    assert change.apply(host, lambda *words: told.append(words)) == {"installed": False}
    assert {words[1:] for words in told} == {(0, 0)} and DCGM in host.units
    assert [DCGM in told[0][0], DCGM in told[1][0], "nvidia_modeset can't be unloaded" in told[2][0]] == [True] * 3
    assert (host.read_text(IN_USE_MARK), host.exists(INCOMPLETE_MARK)) == ("boot-1\n", False)
    refused(replace(CHANGE, unloading=replace(UNLOADING, boot_id="")).apply, host, tell_nobody)


def test_installation_without_driver_is_an_error(host: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(code: int, log: str, *, lays: bool = False) -> Problem:
        def runfile(words: tuple[str, ...]) -> tuple[int, str]:
            host.write(INSTALLER_LOG, log.encode())
            if lays:
                host._lay(NEW)
            return code, "the last line"

        monkeypatch.setattr(host, "_runfile", runfile)
        return refused(replace(CHANGE, unloading=UNLOADING if lays else None).apply, host, tell_nobody)

    line = "ERROR: Unable to find the development tool `cc` in your path"
    problem = ends(1, f"{line}\n")
    assert problem.what.startswith(f"driver {NEW} was not installed: there is no compiler")
    assert problem.evidence == f"the installer exited 1; {INSTALLER_LOG}: {line}"
    assert problem.next_step.startswith("apt-get install")
    assert ends(1, "").evidence == f"the installer exited 1; {INSTALLER_LOG}: the last line"
    missing = ends(0, "-> now complete.\n")
    assert missing.what == f"the installer reported success, but driver {NEW} is missing"
    assert (missing.evidence, missing.next_step) == (
        f"the loader finds libnvidia-ml.so of version {OLD}", f"see {INSTALLER_LOG}",
    )  # fmt: skip
    assert not host.exists(UNPACK) and host.exists(INCOMPLETE_MARK)
    monkeypatch.setattr(host, "_load_installed", lambda words: (1, ""))
    unloaded = ends(0, "-> now complete.\n", lays=True)
    assert unloaded.what == f"driver {NEW} is installed, but the kernel runs none"
    assert unloaded.evidence == "/proc/driver/nvidia/version"
    assert unloaded.next_step.endswith("; then: modprobe nvidia")


def test_another_file_or_a_full_disk_is_refused_before_it_runs(host: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    label = f"NVIDIA Accelerated Graphics Driver for Linux-x86_64 {NEW}"
    found = [
        refused(replace(CHANGE, url="/gone.run").inspect, host),
        refused(replace(CHANGE, sha256="0" * 64).inspect, host),
        refused(replace(CHANGE, version=OLD).inspect, host),
        refused(replace(CHANGE, architecture="aarch64").inspect, host),
    ]
    assert [one.evidence for one in found] == [
        "", f"{PLACE} has SHA-256 {host.sha256(PLACE)}, gpuprov_driver_sha256 is {'0' * 64}",
        *(f"{PLACE}: {label}",) * 2,
    ]  # fmt: skip
    other = "correct gpuprov_driver_url or gpuprov_driver_version"
    assert [found[0].next_step, *(one.next_step for one in found[2:])] == ["check gpuprov_driver_url", other, other]
    assert "the driver file" in found[1].what and "/gone.run" in found[0].what
    size = host.path(PLACE).stat().st_size
    monkeypatch.setattr(host, "free_bytes", lambda path: 5 * size - (path == "/usr"))
    full = refused(CHANGE.apply, host, tell_nobody)
    assert full.what == "not enough room on the file system of /usr to install the driver"


@pytest.mark.parametrize("fails", [False, True])
def test_undo_removes_all_or_names_the_failure(host: Watched, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    host._lay(NEW)
    before = CHANGE.capture(host)
    for path in (*BLACKLISTS, RECORD):
        host.make_directory(path.rpartition("/")[0])
        host.write(path, b"x")
    running_driver.stop_users(host, Unloading(units=(DCGM,)), tell_nobody)
    if fails:
        monkeypatch.setattr(host, "_uninstall", lambda words: (1, "1\n2\n3\n4\nERROR: no log"))
        problem = refused(InstallDriver.undo, host, before, {})
        lines = ["`/usr/bin/nvidia-uninstall --silent` exited 1", "2", "3", "4", "ERROR: no log"]
        assert problem.evidence.splitlines() == lines and "/var/log/nvidia-uninstall.log" in problem.next_step
        assert problem.what == f"driver {NEW} could not be uninstalled, and is still there"
    else:
        InstallDriver.undo(host, before, {})
    assert host.exists(INCOMPLETE_MARK) is fails and DCGM in host.units
    assert not any(map(host.exists, (*BLACKLISTS, RECORD, STOPPED)))


FORMER = Installation(OLD, "/old.run", sha256(b"driver").hexdigest(), "x86_64", True, "open")
BY_HAND = {"by_hand": asdict(FORMER)}
GONE = "; no driver will remain installed"
# The driver on the disk, the entry's outcome, more of the entry, whether the former file is kept → whether the former
# driver comes back, and the end of the sentence about what does not.
ENDS: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any], bool, bool, str]] = {
    "its file is kept": (NEW, {}, BY_HAND, True, True, ""),
    "its file is lost": (NEW, {}, BY_HAND, False, False, GONE),
    "no record": (NEW, {}, {}, True, False, GONE),
    "left as it was": (NEW, {"installed": False}, BY_HAND, True, False, ""),
    "left as it was, its file is lost": (NEW, {"installed": False}, BY_HAND, False, False, ""),
    "replaced nothing": (NEW, {}, {"replaces": ""}, False, False, ""),
    "replaced itself": (NEW, {}, {"replaces": NEW}, False, False, ""),
    "of an earlier run": (NEW, {}, {"earlier": True}, False, False, ""),
    "somebody's since": ("570.1.2", {}, {}, False, False, "stays: gpuprov did not install it"),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_an_undo_will_bring_back_is_said_before(host: Watched, name: str) -> None:
    version, outcome, more, kept, comes, lost = ENDS[name]
    host._lay(version)
    before = {"version": NEW, "replaces": OLD, "record": capture_path(host, RECORD), **more}
    if kept:
        host.make_directory(KEPT)
        host.write(FORMER.kept_path, b"driver")
    restores = InstallDriver.restores(host, before, outcome)
    assert [one.startswith(f"restores driver {OLD} from ") for one in restores] == [True] * comes
    earlier = ({"version": OLD},) if before.pop("earlier", False) else ()
    said = InstallDriver.irreversible(host, before, outcome, earlier)
    assert [one.endswith(lost) for one in said] == [True] * bool(lost)
    if not comes and outcome != {}:
        # Nothing was touched, so nothing is uninstalled.
        InstallDriver.undo(host, before, outcome)
        assert host.on_disk == version and ("/usr/bin/nvidia-uninstall", "--silent") not in host.commands


def test_the_modules_of_the_chosen_kind_are_built(host: Watched) -> None:
    running_driver.unload_unused(host)
    CHANGE.install(host, "proprietary", tell_nobody)
    assert [("-m=kernel-open" in words, "--silent" in words) for words in host.commands if words[0] == "sh"] == [
        (False, True)
    ]


def test_dkms_must_have_the_modules(host: Watched) -> None:
    host.write("/usr/bin/dkms", b"", mode=0o755)
    host.registered = "nvidia/1.2.3, x, x86_64: installed\n"
    assert "is not registered with DKMS" in refused(CHANGE.apply, host, tell_nobody).what


def test_a_replaced_driver_comes_back_as_it_was_installed(host: Watched) -> None:
    former = Installation(NEW, "/old.run", host.sha256(PLACE), "x86_64", True, "open")
    for folder in (STATE_DIRECTORY, KEPT):
        host.make_directory(folder, 0o700)
    host.path(PLACE).rename(host.path(former.kept_path))
    host.commands.clear()
    InstallDriver.undo(host, {"version": OLD, "replaces": NEW, "by_hand": asdict(former)}, {})
    (words,) = (one for one in host.commands if one[0] == "sh")
    assert words[1] == former.kept_path and "-m=kernel-open" in words and host.on_disk == NEW

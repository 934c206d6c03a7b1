"""A driver from rpm packages: its stream, another version of it, and the way back to the former one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.bundle.manifest import BundlePackage
from gpuprov.core.changes import Json, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.places import FOLDER, KEPT_PACKAGES
from gpuprov.core.proxy import Proxy
from gpuprov.driver.packaged import ChangeDriverRpms, EnableStream, InstallDriverRpms, keep
from gpuprov.facts.boot import REBOOT_ASKED
from gpuprov.packages.dnf import DNF
from tests import simgpu
from tests.unit.loaded_host import NEW, OLD
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted

pytestmark = pytest.mark.root
VIM = "vim-8-1.x86_64"
ADDED, SINCE = "libnew-1-1.x86_64", "libsince-1-1.x86_64"


def rpm(version: str, name: str = "nvidia-open") -> str:
    return f"{name}-{version}-1.el9.noarch"


KMOD = f"kmod-nvidia-{OLD}-5.14.0-611.24.1-{OLD}-1.el9.x86_64"
NEW_KMOD, DKMS = KMOD.replace(OLD, NEW), rpm(OLD, "kmod-nvidia-latest-dkms")
ML = rpm(OLD, "libnvidia-ml")
TOOLKIT = rpm("1.17.8", "nvidia-container-toolkit"), rpm("1.18.0", "nvidia-container-toolkit")


class RpmHost(Scripted):
    """Rocky Linux: `offers` is what its repository has, `removes` what dnf would take away for an installation."""

    def __init__(self, root: Path, *packages: str) -> None:
        super().__init__(root)
        (root / "etc/dnf/plugins").mkdir(parents=True)
        (root / "etc/os-release").write_text('ID="rocky"\nVERSION_ID="9.5"\n')
        self.packages = {*packages, VIM}
        self.offers = {rpm(OLD): f"nvidia-open 3:{OLD}-1.el9.noarch\n"}
        self.removes = ""
        self.proxy = Proxy("http://proxy.example:3128")
        self.fails: tuple[str, ...] = ("nothing",)
        self.failure: Answer = (1, "", "it fails")
        self.epoch = "3:"

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        # Whatever may read a repository needs the proxy.
        assert argv[0] != "dnf" or "--assumeno" in argv or more["env"]["https_proxy"] == self.proxy.url
        more.get("on_line", str)("Installing : a package")
        return super().run(argv, **more)

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if {*self.fails} <= {*argv}:
            return self.failure
        if argv[:2] == ("rpm", "-qa") and "NVRA" in argv[3]:
            return "".join(f"{one}\n" for one in sorted(self.packages))
        if argv[:2] == ("rpm", "-qa"):
            rows = (one.rsplit("-", 2) for one in sorted(self.packages))
            return "".join(f"{name} {self.epoch}{version}-{release}\n" for name, version, release in rows)
        if argv[:2] == ("rpm", "-e"):
            self.packages -= {*argv[2:]}
        if "repoquery" in argv:
            return "".join(line for line in self.offers.values() if line.split()[0] in argv)
        if "--assumeno" in argv:
            return 1, f"Removing dependent packages:\n{self.removes}\n", "Operation aborted."
        if argv[0] == "dnf" and argv[-1].endswith((".noarch", ".rpm")):
            coming = {word.rpartition("/")[2].removesuffix(".rpm") for word in argv if "-1.el9." in word}
            names = {one.rsplit("-", 2)[0] for one in coming}
            self.packages = {one for one in self.packages if one.rsplit("-", 2)[0] not in names} | coming
        return ""


def upgraded(root: Path, old: str = rpm(OLD), new: str = rpm(NEW)) -> tuple[RpmHost, Json, Json]:
    """Return a host after an upgrade, and the journal's part; somebody has removed ML since, and installed SINCE."""
    host = RpmHost(root, old, ML)
    before = InstallDriverRpms(DNF, ("nvidia-open",)).capture(host)
    host.packages = {new, ADDED, SINCE, VIM}
    return host, before, {"added": [ADDED], "replaced": [old], "lift": []}


WAYS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    # What is otherwise; whether the former version can be had; whether an undo would install it.
    "a repository has it": ({}, True, True),
    "no repository has it": ({"offers": {"": f"nvidia-open 3:{NEW}-1.el9.noarch\n"}}, False, False),
    "no repository can be asked": ({"fails": ("repoquery",)}, False, False),
    "gpuprov keeps it": ({"offers": {}, "kept": True}, True, True),
    "another of the driver goes for it": ({"removes": " libnvidia-ml  x86_64"}, True, True),
    "a stranger goes for it": ({"removes": " libnvidia-ml  x86_64\n pytorch  x86_64"}, True, False),
    "it can't be installed": ({"fails": ("--assumeno",)}, True, False),
    "it is held, so nothing can be simulated": ({"fails": ("--assumeno",), "held": True}, True, True),
}


def keep_old(host: RpmHost) -> str:
    host.make_directory(FOLDER)
    host.write(f"{FOLDER}/a.rpm", b"")
    host.write(f"{FOLDER}/b.rpm", b"")
    there, host.packages = host.packages, {rpm(OLD), ML, VIM}
    # Not all have an epoch.
    versions = {"a": ("nvidia-open", f"3:{OLD}-1.el9"), "b": ("libnvidia-ml", f"{OLD}-1.el9")}
    keep(host, [BundlePackage(*one, "noarch", f"{file}.rpm") for file, one in versions.items()])
    host.packages = there
    assert host.list_directory(f"{KEPT_PACKAGES}/{OLD}") == (f"{ML}.rpm", f"{rpm(OLD)}.rpm")
    return f"{KEPT_PACKAGES}/{OLD}/{rpm(OLD)}.rpm"


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("interrupted", [False, True])
def test_the_way_back_is_told_before_and_after_the_change(tmp_path: Path, name: str, interrupted: bool) -> None:
    different, offered, restored = WAYS[name]
    host, before, outcome = upgraded(tmp_path)
    vars(host).update(different)
    if "kept" in different:
        keep_old(host)
    if "held" in different:
        host.write("/etc/dnf/plugins/versionlock.conf", b"")
        host.write("/etc/dnf/plugins/versionlock.list", f"nvidia-open-3:{OLD}-1.el9.*\n".encode())
    told = None if interrupted else outcome
    host.packages |= {ML} if interrupted else set()
    restores = InstallDriverRpms.restores(host, before, told)
    lost = InstallDriverRpms.irreversible(host, before, told, ())
    assert (len(restores), len(lost)) == (restored, not restored)
    assert all(rpm(OLD) in one and VIM not in one for one in restores)
    # gpuprov keeps exactly these.
    host.packages = {rpm(OLD), TOOLKIT[0], VIM, *[ML] * ("kept" in different)}
    (way,) = InstallDriverRpms(DNF, ("nvidia-open",)).way_back(host)
    assert ("can't" not in way, rpm(OLD) in way, TOOLKIT[0] in way) == (offered, True, False)
    assert InstallDriverRpms(DNF, ("nvidia-container-toolkit", "vim")).way_back(RpmHost(tmp_path / "other")) == ()


@pytest.mark.parametrize("ask", ["restores", "undo"])
def test_nothing_is_undone_if_dnf_does_not_tell_whether_it_can(tmp_path: Path, ask: str) -> None:
    host, before, outcome = upgraded(tmp_path)
    host.fails, host.failure = ("--assumeno",), (124, "", "")
    problem = refused(getattr(InstallDriverRpms, ask), host, before, outcome)
    assert problem.what == "dnf does not tell whether the driver's packages can be installed again"
    assert ADDED in host.packages


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("of_toolkit", [False, True])
def test_undo_loads_old_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool, of_toolkit: bool) -> None:
    host, before, outcome = upgraded(tmp_path, *TOOLKIT) if of_toolkit else upgraded(tmp_path)
    host.offers[TOOLKIT[0]] = "nvidia-container-toolkit 0:1.17.8-1.el9.noarch\n"
    simgpu.write_kernel_tree(tmp_path, 1, NEW)
    simgpu.install_tree(tmp_path, OLD)
    (tmp_path / "lib").symlink_to("usr/lib")
    path = keep_old(host) if kept else ""
    old = TOOLKIT[0] if of_toolkit else rpm(OLD)
    host.fails = ("-y", "install")
    problem = refused(InstallDriverRpms.undo, host, before, outcome)
    what = f"the {'toolkit' if of_toolkit else 'driver'}'s packages"
    assert problem.what.startswith(f"{what} could") and "it fails" in problem.evidence
    assert InstallDriverRpms.restores(host, before, outcome) == (f"restores {what} ({old})",)
    host.fails = ("repoquery",)
    if of_toolkit:
        # Without the driver's package, which somebody has removed.
        assert InstallDriverRpms.irreversible(host, before, outcome, ())[0].startswith(f"{what} stay")
    host.fails = ("-y", "install")
    with monkeypatch.context() as now:
        # As zypper's, some codes are no failures.
        now.setattr(type(DNF), "good_codes", (0, 1))
        InstallDriverRpms.undo(host, before, outcome)
    host.fails = ("nothing",)
    InstallDriverRpms.undo(host, before, outcome)
    assert host.packages == {old, SINCE, VIM}
    installed = next(one for one in reversed(host.asked) if one[0] == "dnf" and "-y" in one and "install" in one)
    assert installed[-1] == (path if kept and not of_toolkit else old)
    assert (("rmmod", "nvidia") in host.asked, host.exists(REBOOT_ASKED)) == (not of_toolkit, not of_toolkit)
    assert InstallDriverRpms.restores(host, before, outcome) == ()
    assert all(limit for argv, limit in zip(host.asked, host.timeouts) if argv[0] == "dnf")


def test_another_version_takes_away_compiled_modules_of_the_old_one(tmp_path: Path) -> None:
    host = RpmHost(tmp_path, rpm(OLD), KMOD, NEW_KMOD, DKMS)
    change = ChangeDriverRpms(DNF, ("nvidia-open",), options=("--option",), wanted=NEW.partition(".")[0])
    problem = refused(change.apply, host, tell_nobody)
    assert (
        OLD in problem.what
        and problem.evidence
        and problem.next_step.startswith("dnf list --showduplicates nvidia-open ")
    )
    assert KMOD in host.packages
    host.packages ^= {rpm(OLD), rpm(NEW)}
    change.apply(host, tell_nobody)
    (synced, _) = [one for one in host.asked if "distro-sync" in one]
    names = {one.rsplit("-", 2)[0] for one in (rpm(NEW), KMOD, NEW_KMOD, DKMS)}
    assert (synced[:4], {*synced[4:]}) == (("dnf", "-y", "--option", "distro-sync"), names)
    for host.epoch in ("", "3:"):
        change.apply(host, tell_nobody)
        assert host.packages == {rpm(NEW), NEW_KMOD, DKMS, VIM}
    assert " no driver," in refused(ChangeDriverRpms(DNF, ("gone",), wanted="1").apply, host, tell_nobody).what
    assert all(limit for argv, limit in zip(host.asked, host.timeouts) if {"distro-sync", "-e"} & {*argv})
    for fails in (("distro-sync",), ("-e",)):
        host.packages |= {KMOD}
        host.fails = fails
        problem = refused(change.apply, host, tell_nobody)
        assert "it fails" in problem.evidence and ("changed to 550" if "distro-sync" in fails else KMOD) in problem.what


@pytest.mark.parametrize("before", ["", "570"])
def test_a_stream_takes_the_place_of_another_and_goes_back_to_it(tmp_path: Path, before: str) -> None:
    host, change = RpmHost(tmp_path), EnableStream("580", before)
    assert change.summary() == f"enable stream nvidia-driver:580{' instead of 570' if before else ''}"
    module = ("dnf", "-y", "module")
    change.apply(host, tell_nobody)
    reset, enable = (*module, "reset", "nvidia-driver"), (*module, "enable", "nvidia-driver:580")
    assert host.asked == [reset, enable] if before else [enable]
    host.asked.clear()
    EnableStream.undo(host, change.capture(host), None)
    assert host.asked == [reset, *([(*module, "enable", "nvidia-driver:570")] if before else [])]
    host.fails = ("nvidia-driver:580",)
    problem = refused(change.apply, host, tell_nobody)
    assert (problem.what, "it fails" in problem.evidence) == ("dnf can't enable nvidia-driver:580", True)
    assert problem.next_step.startswith("dnf module list nvidia-driver ")
    host.fails = ("reset",)
    assert not before or refused(change.apply, host, tell_nobody).what == "dnf can't reset nvidia-driver"
    assert all(host.timeouts)

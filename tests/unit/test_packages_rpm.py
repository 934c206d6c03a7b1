"""What rpm, dnf and zypper say, what of it we say, and who holds their lock."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.changes import Change, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.packages.dnf import DNF
from gpuprov.packages.failures import Advice
from gpuprov.packages.interface import Installation, LockFacts, PackageFacts
from gpuprov.packages.keys import armored, dearmored, fingerprints, parse_keys, plan_bundle_keys
from gpuprov.packages.rpm import InstallRpmPackages, RefreshRpmIndex, RpmManager, added, parse_rpm, rpm_lock_holder
from gpuprov.packages.rpm_locks import HoldRpmPackages
from gpuprov.packages.zypper import ZYPPER
from gpuprov.protocol.errors import GpuprovError
from tests.files import put
from tests.unit.refused import refused
from tests.unit.scripted import Recorded
from tests.unit.test_packages import WithLocks, held_by_another

RPM = """gpg-pubkey 96055b96-6b0152d9.(none) gpg(lab) gpg(16f6ab6a96055b96)
kernel-devel 5.14.0-427.13.1.el9_4.x86_64 kernel-devel kernel-devel(x86-64) kernel-devel-uname-r
kernel-devel 5.14.0-503.11.1.el9_5.x86_64 kernel-devel kernel-devel(x86-64) kernel-devel-uname-r
vim-enhanced 2:8.2.2637-20.el9_1.x86_64 vim vim(plugins-supported) vim-enhanced
bash 5.1.8-9.el9.x86_64 /bin/bash /bin/sh bash bash(x86-64)
kernel-default-devel 6.4.0-150600.23.30.1.x86_64 kernel-default-devel multiversion(kernel)
nonsense
"""


def facts(manager: str = "dnf") -> PackageFacts:
    installed, provided = parse_rpm(RPM)
    return PackageFacts(manager, installed, provided=provided)


def test_versions_stand_side_by_side_and_keys_are_no_packages() -> None:
    installed, provided = parse_rpm(RPM)
    assert installed["kernel-devel"].split() == ["5.14.0-427.13.1.el9_4.x86_64", "5.14.0-503.11.1.el9_5.x86_64"]
    assert set(installed) == {"kernel-devel", "vim-enhanced", "bash", "kernel-default-devel"}
    assert provided == {"vim", "kernel-devel-uname-r"}
    assert parse_rpm("") == ({}, frozenset())


@pytest.mark.parametrize(
    ("manager", "name", "there"),
    [
        (DNF, "kernel-devel", True), (DNF, "kernel-devel=5.14.0-427.13.1.el9_4.x86_64", True),
        (DNF, "kernel-devel=5.14.0-503.11.1.el9_5.x86_64", True), (DNF, "kernel-devel=5.14.0-503.11.1.el9_5", True),
        (DNF, "kernel-devel=5.14.0", True), (DNF, "kernel-devel=5.14.0-427", False),
        (DNF, "kernel-devel=5.14.0-611.el9.x86_64", False),
        # Installed under another name.
        (DNF, "vim", True), (DNF, "vim=8.2.2637", False), (DNF, "vim-enhanced=8.2.2637-20.el9_1", True),
        (DNF, "vim-enhanced=2:8.2.2637", True), (DNF, "emacs", False),
        # The number of the rebuild does not count for zypper.
        (ZYPPER, "kernel-default-devel=6.4.0-150600.23.30", True),
        (ZYPPER, "kernel-default-devel=6.4.0-150600.23.30.1", True), (ZYPPER, "kernel-default-devel=6.4.0", True),
        (ZYPPER, "kernel-default-devel=6.4.0-150600.23", False),
        (DNF, "kernel-default-devel=6.4.0-150600.23.30", False),
    ],
)  # fmt: skip
def test_what_counts_as_installed(manager: RpmManager, name: str, there: bool) -> None:
    assert manager.missing(facts(manager.name), (name,)) == (() if there else (name,))


def test_what_is_missing_is_planned_once_and_in_order() -> None:
    refresh, install = DNF.plan_installation(facts(), Installation(("gcc", "bash", "make", "gcc")))
    assert refresh == RefreshRpmIndex(DNF)
    assert install == InstallRpmPackages(DNF, ("gcc", "make"))
    assert install.summary() == "install gcc, make"
    assert DNF.plan_installation(facts(), Installation(("bash", "vim"))) == ()


@dataclass
class Bundle:
    vendor_keys: tuple[str, ...]


@pytest.mark.parametrize("manager", [DNF, ZYPPER], ids=lambda one: one.name)
@pytest.mark.parametrize("bundle", [None, Bundle(("A", "B"))])
def test_bundle_or_limited_repository_is_the_only_source(manager: RpmManager, bundle: Bundle | None) -> None:
    locks = LockFacts("dnf", "/locks", frozenset({"gcc"}), frozenset({"gcc"}))
    there = PackageFacts("", {"gcc": "10-1.x86_64"}, trusted_keys=frozenset({"A"}), locks=locks)
    advice, units = Advice("gcc", "its meaning", "its step"), ("a.service",)
    wanted = Installation(("gcc=11", "make", "lib"), bundle, ("gcc",), units, advice, "hidden", "site", ("lib",))
    *found, last = manager.plan_installation(there, wanted)
    lift, hold = HoldRpmPackages("dnf", "/locks", (), ("gcc",)), HoldRpmPackages("dnf", "/locks", ("gcc",))
    some, rest = wanted.names, list[Change]()
    words: tuple[str, ...] = ("--setopt=hidden.module_hotfixes=1",)
    if bundle:
        words = manager.bundle_options
    elif manager is ZYPPER:
        some, words, more = wanted.names[:2], (), ("--plus-content", "site")
        rest = [RefreshRpmIndex(ZYPPER, more), InstallRpmPackages(ZYPPER, ("lib",), (), more)]
    keys = plan_bundle_keys(("B",), frozenset()) if bundle else ()
    install = InstallRpmPackages(manager, some, units, words, advice, (lift,))
    assert (found, last) == ([*keys, RefreshRpmIndex(manager, words), install, *rest], hold)
    assert {one.advice for one in found if isinstance(one, InstallRpmPackages)} == {advice}


def test_a_replaced_version_is_not_an_addition_and_a_second_one_is() -> None:
    before = {"a-1-1.noarch", "kernel-1-1.x86_64", "gone-1-1.noarch"}
    after = {"a-2-1.noarch", "kernel-1-1.x86_64", "kernel-2-1.x86_64", "new-with-dashes-1-1.noarch"}
    assert added(before, after) == {"kernel-2-1.x86_64", "new-with-dashes-1-1.noarch"}


class RecordedRpm(Recorded):
    """A machine whose rpm has some packages and whose package manager answers as recorded; it notes what was asked."""

    def __init__(self, root: Path, answer: tuple[int, str, str] = (0, "", "")) -> None:
        super().__init__(root, answer)
        self.packages = ["bash-5.1.8-9.el9.x86_64", "gpg-pubkey-96055b96-6b0152d9"]
        self.rpm_answers, self.details = 0, RPM
        self.slept = 0.0

    def now(self) -> float:
        return self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        argv = tuple(argv)
        if argv[:2] == ("rpm", "-qa"):
            text = self.details if "--queryformat" in argv else "".join(f"{name}\n" for name in self.packages)
            return Completed(argv, self.rpm_answers, text, "error: rpmdb: damaged" if self.rpm_answers else "")
        if argv[:2] == ("rpm", "-q"):
            return Completed(argv, 1, "package gpg-pubkey is not installed\n")
        return self.recorded(argv, **more)


COMMANDS = {
    "dnf": ("dnf", "--setopt=assumeno=0", "--setopt=cacheonly=0", "-y", "--setopt=install_weak_deps=False", "install",
            "gcc", "kernel-devel-5.14.0-427.el9.x86_64"),
    "zypper": ("zypper", "--non-interactive", "install", "--download-in-advance", "--no-recommends", "--", "gcc",
               "kernel-devel=5.14.0-427.el9.x86_64"),
}  # fmt: skip


@pytest.mark.parametrize("manager", [DNF, ZYPPER], ids=lambda one: one.name)
def test_each_manager_is_asked_in_its_own_words(tmp_path: Path, manager: RpmManager) -> None:
    host = RecordedRpm(tmp_path)
    InstallRpmPackages(manager, ("gcc", "kernel-devel=5.14.0-427.el9.x86_64")).apply(host, lambda *_: None)
    RefreshRpmIndex(manager).apply(host, lambda *_: None)
    assert host.asked[0] == COMMANDS[manager.name]
    assert host.asked[1] == (manager.refresh[0], *manager.as_asked(host), *manager.refresh[1:])
    assert not any("gpg-auto-import" in word or "nogpgcheck" in word for argv in host.asked for word in argv)


def test_dnf_5_has_another_value_for_what_is_off(tmp_path: Path) -> None:
    host = RecordedRpm(tmp_path)
    put(tmp_path / "usr/bin/dnf5", "#!/bin/sh\n", 0o755)
    (tmp_path / "usr/bin/dnf").symlink_to("dnf5")
    RefreshRpmIndex(DNF).apply(host, lambda *_: None)
    assert host.asked == [("dnf", "--setopt=assumeno=0", "--setopt=cacheonly=none", "-y", "makecache")]


@pytest.mark.parametrize("code", [102, 103])
def test_zypper_has_exit_codes_that_are_no_failures(tmp_path: Path, code: int) -> None:
    host = RecordedRpm(tmp_path, (code, "", ""))
    InstallRpmPackages(ZYPPER, ("gcc",)).apply(host, lambda *_: None)
    RefreshRpmIndex(ZYPPER).apply(host, lambda *_: None)
    with pytest.raises(GpuprovError):
        InstallRpmPackages(DNF, ("gcc",)).apply(host, lambda *_: None)


UNTRUSTED = "not signed with a key that this host trusts"
# Recorded from dnf 4.14, dnf 5.4 and zypper 1.14.
FAILURES = [
    ("System management is locked by the application with pid 4711 (zypper).", "holds the package manager's lock"),
    ("Error: There are no enabled repositories in \"/etc/yum.repos.d\".", "this host has no package repositories"),
    ("No match for argument: no-such\nError: Unable to find a match: no-such", "no repository has such a package"),
    ("'x=9' not found in package names. Trying capabilities.\nNo provider of 'x=9' found.",
     "no repository has such a package"),
    ("Warning: File 'repomd.xml' from repository 'site' is signed with an unknown key '374C81318826EB35'.\n"
     "History:\n - Signature verification failed for repomd.xml", UNTRUSTED),
    ("Package unsigned-one-1-1.noarch.rpm is not signed\nError: GPG check FAILED", UNTRUSTED),
    ("Error: Failed to download metadata for repo 'gpuprov-site': repomd.xml GPG signature verification error: "
     "Bad GPG signature", "a repository's signature is wrong"),
    ('Transaction failed: Signature verification failed.\nOpenPGP check for package "site-gpu-tools-1.0-1.noarch" '
     '(/var/cache/libdnf5/x.rpm) from repo "gpuprov-site" has failed: Import of the key didn\'t help, wrong key?',
     UNTRUSTED),
    ('Transaction failed: Signature verification failed.\nOpenPGP check for package "unsigned-1.0-1.noarch" '
     '(/var/cache/libdnf5/x.rpm) from repo "gpuprov-site" has failed: The package is not signed.', UNTRUSTED),
    ("repomd.xml GPG signature verification error: Signing key not found", UNTRUSTED),
    ("repomd.xml GPG signature verification error: Bad PGP signature", "a repository's signature is wrong"),
    ("Error: /usr is configured to be read-only. You may be running an image-based or immutable operating system.",
     "this host's system files can't be written"),
    ("Error: Failed to retrieve GPG key for repo 'gpuprov-site': Curl error (37): Couldn't read a file:// file for "
     "file:///etc/pki/rpm-gpg/K [Couldn't open file /etc/pki/rpm-gpg/K]", "a repository's key is missing"),
    ("  - Downloading successful, but checksum doesn't match. Calculated: e4c1(sha256)  Expected: ed2a(sha256) \n"
     "Error: Failed to download metadata for repo 'gpuprov-site': Yum repo downloading error: Cannot download",
     "a repository delivered a damaged file"),
    ("Error: \n Problem: conflicting requests\n  - nothing provides nobody >= 2 needed by needs-more-1-1.noarch",
     "the packages do not fit together"),
    # ollama/ollama issue 1593: NVIDIA's repository beside RPM Fusion.
    ("Error: \n Problem 1: package nvidia-driver-3:545.23.08-1.fc37.x86_64 from cuda-fedora37-x86_64 conflicts with "
     "xorg-x11-drv-nvidia provided by xorg-x11-drv-nvidia-3:550.78-1.fc40.x86_64 from @System\n"
     "  - package xorg-x11-drv-nvidia-3:550.78-1.fc40.x86_64 from rpmfusion-nonfree-nvidia-driver is filtered out by "
     "modular filtering", "two repositories bring NVIDIA's driver"),
    # negativo17/nvidia-driver issue 134; ollama/ollama issue 5062.
    ("Error: \n Problem 1: cannot install both nvidia-driver-3:525.60.11-1.fc37.x86_64 and "
     "nvidia-driver-3:520.56.06-1.fc37.x86_64", "the packages do not fit together"),
    ("  - package cuda-drivers-545.23.06-1.x86_64 from cuda-fedora37-x86_64 requires nvidia-driver >= 3:545.23.06, "
     "but none of the providers can be installed", "the packages do not fit together"),
    ("  - Curl error (6): Couldn't resolve host name for http://no-such-host.invalid/repodata/repomd.xml",
     "a repository's name is not known"),
    ("  - Status code: 404 for http://127.0.0.1:8765/nowhere/repodata/repomd.xml (IP: 127.0.0.1)",
     "there is no repository at that address"),
    ("  - Curl error (7): Couldn't connect to server for http://127.0.0.1:9/repodata/repomd.xml",
     "a repository can't be reached"),
    # dnf 5.4 with -q
    ('Failed to download metadata (baseurl: "http://127.0.0.1:9/rpm") for repository "site": Usable URL not found',
     "a repository can't be reached"),
    ("Error Summary\n-------------\nDisk Requirements:\n   At least 12MB more space needed on the / filesystem.",
     "the disk is full"),
    ("rpm: However assuming you know what you are doing...\n"
     "\tinstalling package large-1.0-1.noarch needs 17MB more space on the / filesystem", "the disk is full"),
    ("Warning: File 'repomd.xml' from repository 'site (gpuprov)' is signed with an unknown key ''.",
     "the disk is full"),
    ('Error: SQLite error on "/var/lib/dnf/history.sqlite": Executing an SQL statement failed: no such table: config',
     "dnf's history is half made"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "meaning"), FAILURES)
def test_failures_are_told_in_a_sentence(tmp_path: Path, said: str, meaning: str) -> None:
    host = RecordedRpm(tmp_path, (1, "Reading installed packages...", said))
    problem = refused(InstallRpmPackages(DNF, ("gcc", "make")).apply, host, tell_nobody)
    assert problem.what.startswith("gcc, make could not be installed: ") and meaning in problem.what
    assert problem.evidence.startswith("dnf exited 1: ") and "\n" not in problem.evidence
    assert problem.next_step


def test_a_failure_that_nobody_knows_shows_all_of_it(tmp_path: Path) -> None:
    host = RecordedRpm(tmp_path, (1, "", "Error: something new\nand more"))
    problem = refused(RefreshRpmIndex(DNF).apply, host, tell_nobody)
    assert problem.what == "the package index could not be refreshed"
    assert "Error: something new\nand more" in problem.evidence and "makecache" in problem.evidence


def test_progress_is_told_and_chatter_is_not(tmp_path: Path) -> None:
    printed = (
        "Dependencies resolved.\nInstalling:\n  Installing       : gcc-11-1.x86_64        1/1 \n"
        "Complete!\n(1/1) Installing: gcc-11-1.x86_64 [...done]\n[3/4] Installing gcc-0:11-1 100% | 20 KiB/s\n"
    )
    told: list[str] = []
    host = RecordedRpm(tmp_path, (0, printed, ""))
    InstallRpmPackages(DNF, ("gcc",)).apply(host, lambda message, *_: told.append(message))
    assert told == [
        "Installing : gcc-11-1.x86_64 1/1", "(1/1) Installing: gcc-11-1.x86_64 [...done]",
        "[3/4] Installing gcc-0:11-1 100% | 20 KiB/s",
    ]  # fmt: skip


def test_a_database_that_cannot_be_read_is_no_empty_one(tmp_path: Path) -> None:
    host = RecordedRpm(tmp_path)
    host.rpm_answers = 1
    assert "rpm's database can't be read" in refused(DNF.gather, host).what


def test_a_lost_database_of_rpm_is_no_host_without_packages(tmp_path: Path) -> None:
    """rpm makes an empty one in its place, and succeeds."""
    host = RecordedRpm(tmp_path)
    host.details = ""
    problem = refused(DNF.gather, host)
    assert (problem.what, problem.evidence) == ("rpm's database has no package", "rpm -qa: nothing")
    assert "rpm -E %_dbpath" in problem.next_step


KEY = dearmored(
    b"""-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEZ0AAABYJKwYBBAHaRw8BAQdAAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=
-----END PGP PUBLIC KEY BLOCK-----
"""
)


def test_trusted_keys_are_known_by_the_whole_fingerprint() -> None:
    (fingerprint,) = fingerprints(KEY)
    block = armored(KEY).decode().replace("BLOCK-----\n\n", "BLOCK-----\nVersion: rpm-4.18.0\n\n", 1)
    broken = "gpg-pubkey-aaaaaaaa-1\n-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nAAAA\n-----END PGP PUBLIC KEY BLOCK-----\n"
    assert parse_keys(f"{broken}gpg-pubkey-96055b96-6b0152d9\n{block}") == {fingerprint: "gpg-pubkey-96055b96-6b0152d9"}
    assert parse_keys("package gpg-pubkey is not installed\n") == {}


def test_who_is_at_work_with_packages_is_named_and_the_dead_are_not(tmp_path: Path) -> None:
    host = RecordedRpm(tmp_path)
    assert rpm_lock_holder(host) == ""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/zypp.pid").write_text("77\n")
    assert rpm_lock_holder(host) == ""
    (tmp_path / "proc/77").mkdir(parents=True)
    (tmp_path / "proc/77/comm").write_text("packagekitd\n")
    assert rpm_lock_holder(host) == "packagekitd (pid 77)"
    (tmp_path / "proc/self").symlink_to("77")
    (tmp_path / "run/zypp.pid").write_text("self\n")
    assert rpm_lock_holder(host) == ""


def test_the_wait_for_the_lock_is_told_and_has_an_end(tmp_path: Path) -> None:
    host = RecordedRpm(tmp_path)
    for path, text in (("run/zypp.pid", "77"), ("proc/77/comm", "YaST2\n")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    told: list[str] = []
    problem = refused(RefreshRpmIndex(ZYPPER).apply, host, lambda message, *_: told.append(message))
    assert problem.what == "another program holds the package manager's lock"
    assert "YaST2 (pid 77); waited 300 s for its end" in problem.evidence
    assert told == ["waiting up to 300 s for YaST2 (pid 77), which holds the package manager's lock"]
    assert host.asked == [] and 300 <= host.slept < 305
    host.lock_timeout = 7
    assert "waited 7 s" in refused(InstallRpmPackages(ZYPPER, ("gcc",)).apply, host, tell_nobody).evidence
    assert host.asked == [] and 307 <= host.slept < 313


def test_the_holder_of_rpms_own_lock_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "var/lib/rpm/.rpm.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert rpm_lock_holder(WithLocks(tmp_path)) == ""
    with held_by_another(lock) as holder:
        assert f"(pid {holder.pid}: " in rpm_lock_holder(WithLocks(tmp_path))

"""What apt and dpkg say, what of it we say, and who holds their lock."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.changes import Change, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.system import System
from gpuprov.facts.host import gather
from gpuprov.packages.apt_changes import HoldPackages, InstallPackages, RefreshPackageIndex, parse_conffiles, plan_holds
from gpuprov.packages.dpkg import gather_packages, lock_holder, missing
from gpuprov.packages.failures import FAILED, listed_under
from gpuprov.packages.interface import HELD_LIST, PackageFacts
from gpuprov.repos import AptRepository
from tests.files import put
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused
from tests.unit.scripted import Recorded

DPKG = """installed adduser 3.134
config-files old-kernel 6.1.0-9
installed libc6 2.36-9+deb12u13
half-configured docker.io 20.10.24+dfsg1-1+deb12u1
not-installed ghost\x20
unpacked vim 2:9.0.1378-2+deb12u2
installed libstdc++6 12.2.0-14+deb12u1
"""


def test_only_wholly_installed_packages_count(tmp_path: Path) -> None:
    assert gather_packages(Queried(tmp_path, text=DPKG)).installed == {
        "adduser": "3.134",
        "libc6": "2.36-9+deb12u13",
        "libstdc++6": "12.2.0-14+deb12u1",
    }


@pytest.mark.parametrize("text", ["", "dpkg-query: error: no database\n\n"])
def test_nonsense_from_dpkg_is_nothing(tmp_path: Path, text: str) -> None:
    assert gather_packages(Queried(tmp_path, text=text)).installed == {}


@pytest.mark.parametrize(
    ("text", "error", "what", "step"),
    [
        ("", "", "dpkg's database has no package", "cp -p /var/lib/dpkg/status-old /var/lib/dpkg/status"),
        ("", "dpkg-query: error: parsing file '/var/lib/dpkg/status' near line 2346 package 'libperl5.36:amd64':",
         "dpkg's database can't be read", "cp -p /var/lib/dpkg/status-old /var/lib/dpkg/status"),
        ("", "dpkg-query: too many open files", "dpkg's database can't be read", "dpkg --audit"),
    ],
)  # fmt: skip
def test_a_lost_database_of_dpkg_is_no_host_without_packages(
    tmp_path: Path, text: str, error: str, what: str, step: str
) -> None:
    """An installation would unpack all of docker's dependencies again, an undo would leave what the run installed."""
    host = Queried(tmp_path, text, error)
    put(tmp_path / "var/lib/dpkg/info/bash.list", "/.\n")
    problem = refused(gather_packages, host)
    assert problem.what == what and step in problem.next_step


def test_debians_manager_is_apt_though_rpms_are_there_too(tmp_path: Path) -> None:
    """The distribution decides, not which programs there are."""
    host = FakeHost(tmp_path)
    for name in ("dnf", "rpm", "zypper"):
        host.write(f"/usr/bin/{name}", b"#!/bin/sh\n", mode=0o755)
        assert host.which(name)
    facts = gather(host).packages
    assert (facts.manager, facts.installed["dpkg"]) == ("apt", "1.21.22")


def test_a_machine_without_apt_has_no_package_manager(tmp_path: Path) -> None:
    assert gather_packages(System(str(tmp_path))) == PackageFacts("", {})


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        ((), ()), (("adduser", "libc6=2.36-9+deb12u13"), ()), (("gcc", "adduser", "make", "gcc"), ("gcc", "make")),
        (("libc6=2.36",), ("libc6=2.36",)), (("docker.io",), ("docker.io",)),
    ],
)  # fmt: skip
def test_missing_packages_are_named_in_order(tmp_path: Path, names: tuple[str, ...], lacking: tuple[str, ...]) -> None:
    assert missing(gather_packages(Queried(tmp_path, text=DPKG)), names) == lacking


class RecordedApt(Recorded):
    """A machine whose dpkg has some packages and whose apt-get answers as recorded; it notes what was asked of it."""

    def __init__(self, root: Path, packages: Sequence[str] = (), answer: tuple[int, str, str] = (0, "", "")) -> None:
        super().__init__(root, answer)
        self.packages = list(packages)
        self.audit = ""
        self.automatic = (0, "")

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        argv = tuple(argv)
        if argv[:2] == ("apt-mark", "showauto"):
            return Completed(argv, *self.automatic)
        if argv[0] == "dpkg-query" and "${Conffiles}" in argv[2]:
            return Completed(argv, 0, "")
        if argv[0] == "dpkg-query":
            return Completed(argv, 0, "".join(f"installed {name} 1.0\n" for name in self.packages))
        if "--simulate" in argv:
            return Completed(argv, 0, "")
        if argv[:2] == ("dpkg", "--audit"):
            return Completed(argv, 0, self.audit)
        return self.recorded(argv, changes=argv[0] == "apt-get" and "install" in argv, **more)


NO_KEY = """W: An error occurred during the signature verification. The repository is not updated and the previous \
index files will be used. GPG error: http://example.org/apt ./ InRelease: The following signatures couldn't be \
verified because the public key is not available: NO_PUBKEY 55D8683531720410
E: Failed to fetch http://example.org/apt/./InRelease  The following signatures couldn't be verified because the \
public key is not available: NO_PUBKEY 55D8683531720410
E: Some index files failed to download. They have been ignored, or old ones used instead."""
BAD_SIGNATURE = """W: GPG error: http://example.org/apt ./ InRelease: The following signatures were invalid: BADSIG \
A148C242264A90DC lab <lab@example.org>
E: The repository 'http://example.org/apt ./ InRelease' is not signed."""
LOG_IN = """E: Failed to fetch http://example.org/apt/./InRelease  Clearsigned file isn't valid, got 'NOSPLIT' (does \
the network require authentication?)
E: The repository 'http://example.org/apt ./ InRelease' is not signed."""
HASH = """E: Failed to fetch http://example.org/apt/./Packages  Hash Sum mismatch
   Hashes of expected file:
    - Filesize:383 [weak]
E: Some index files failed to download. They have been ignored, or old ones used instead."""
REFUSED = """E: Failed to fetch http://127.0.0.1:9/apt/./InRelease  Could not connect to 127.0.0.1:9 (127.0.0.1). - \
connect (111: Connection refused)
E: Some index files failed to download. They have been ignored, or old ones used instead."""
LOCKED = """E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 2192 (unattended-upgr)
E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?"""
UNMET = """The following packages have unmet dependencies:
 nvidia-container-toolkit : Depends: libnvidia-container1 (>= 1.17.0) but it is not installable
E: Unable to correct problems, you have held broken packages."""
GONE = """E: Failed to fetch http://example.org/apt/./site-gpu-tools_1.0_all.deb  404  Not Found [IP: 192.0.2.1 80]
E: Unable to fetch some archives, maybe run apt-get update or try with --fix-missing?"""
EXPIRED = (
    "E: Release file for http://example.org/apt/./InRelease is expired (invalid since 1785d 3h 1min 56s). Updates for "
    "this repository will not be applied."
)
EARLY = (
    "E: Release file for http://example.org/apt/./InRelease is not valid yet (invalid for another 26703d 20h 57min "
    "53s). Updates for this repository will not be applied."
)


@pytest.mark.parametrize(
    ("said", "meaning", "line"),
    [
        (LOCKED, "another program holds the package manager's lock", "held by process 2192 (unattended-upgr)"),
        ("E: Unable to locate package nope", "no repository has such a package", "package nope"),
        ("E: Package 'vim' has no installation candidate", "no repository has such a package", "'vim'"),
        ("E: Version '9' for 'site-gpu-tools' was not found", "no repository has such a package", "Version '9'"),
        (NO_KEY, "a repository is not signed with a key that this host trusts", "NO_PUBKEY 55D8683531720410"),
        ("E: The repository 'http://example.org/apt ./ Release' is not signed.",
         "a repository is not signed with a key that this host trusts", "http://example.org/apt"),
        (BAD_SIGNATURE, "a repository's signature is wrong", "BADSIG A148C242264A90DC"),
        (BAD_SIGNATURE.replace("BADSIG", "EXPKEYSIG"), "a repository's key has expired", "EXPKEYSIG A148C242264A90DC"),
        (LOG_IN, "a repository gave something else than its index", "does the network require"),
        (HASH, "a repository delivered a damaged file", "http://example.org/apt/./Packages"),
        (EXPIRED, "this host's clock and a repository's disagree", "1785d"),
        (EARLY, "this host's clock and a repository's disagree", "26703d"),
        ("E: The repository 'http://example.org/apt ./ Release' does not have a Release file.",
         "there is no repository at that address", "http://example.org/apt"),
        (GONE, "or the file is gone from it", "site-gpu-tools_1.0_all.deb"),
        ("E: The repository 'cdrom://[Debian GNU/Linux 12.5.0] bookworm Release' does not have a Release file.",
         "a package source is a CD or DVD", "cdrom://[Debian"),
        ("E: ProxyAutoDetect command '/usr/bin/auto-apt-proxy' can not be executed! - access (2: No such file)",
         "the program that finds apt's proxy can't be run", "auto-apt-proxy"),
        (
            "E: Conflicting values set for option Signed-By regarding source http://example.org/apt/ ./: /a.gpg != \n"
            "E: The list of sources could not be read.",
            "two sources name the same repository, with different keys", "http://example.org/apt/",
        ),
        ("E: Failed to fetch http://no-such-host.invalid/apt/./InRelease  Could not resolve 'no-such-host.invalid'",
         "a repository's name is not known", "no-such-host.invalid"),
        (REFUSED, "a repository can't be reached", "127.0.0.1:9"),
        ("E: You don't have enough free space in /var/cache/apt/archives/.", "the disk is full", "/var/cache/apt"),
        ("dpkg: error: failed to write status database: No space left on device", "the disk is full",
         "status database"),
        (UNMET, "the packages do not fit together", "unmet dependencies"),
        ("E: Unmet dependencies. Try 'apt --fix-broken install' with no packages (or specify a solution).",
         "the packages do not fit together", "Unmet dependencies"),
    ],
)  # fmt: skip
def test_apts_failures_are_told_in_a_sentence(tmp_path: Path, said: str, meaning: str, line: str) -> None:
    host = RecordedApt(tmp_path, answer=(100, "Reading package lists...", said))
    host.lock_timeout = 0
    problem = refused(InstallPackages(("gcc", "make")).apply, host, tell_nobody)
    assert problem.what.startswith("gcc, make could not be installed: ") and meaning in problem.what
    assert "apt-get exited 100: " in problem.evidence and line in problem.evidence
    assert len(problem.evidence.splitlines()) == 1 + ("unmet" in said)
    assert problem.next_step


@pytest.mark.parametrize(
    "said",
    [
        # dpkg to 1.22, and 1.23.
        "installed foreign package post-installation script subprocess returned error exit status 1",
        "old foreign package postinst maintainer script subprocess failed with exit status 1",
    ],
)
def test_a_script_that_fails_is_named_by_its_package(tmp_path: Path, said: str) -> None:
    listed = f"dpkg: error processing package foreign (--configure):\n {said}\n{FAILED}\n foreign"
    host = RecordedApt(tmp_path, answer=(100, listed, "E: Sub-process /usr/bin/dpkg returned an error code (1)"))
    problem = refused(InstallPackages(("gcc",)).apply, host, tell_nobody)
    assert problem.what == "gcc could not be installed: a script of foreign failed"


def test_the_way_out_of_a_missing_key_opens_closed_folders(tmp_path: Path) -> None:
    """apt reads keys as the user _apt, and calls one that it may not read missing."""
    host = RecordedApt(tmp_path, answer=(100, "", NO_KEY))
    assert (
        "chmod go+rX /etc/apt /etc/apt/keyrings /etc/apt/keyrings/*"
        in refused(RefreshPackageIndex().apply, host, tell_nobody).next_step
    )


def test_the_way_out_of_an_expired_key_fetches_gpuprovs_own_again(tmp_path: Path) -> None:
    host = RecordedApt(tmp_path, answer=(100, "", BAD_SIGNATURE.replace("BADSIG", "EXPKEYSIG")))
    problem = refused(RefreshPackageIndex().apply, host, tell_nobody)
    # Its owner may have extended it: then the fingerprint, which is all that a plan compares, is the same.
    path = AptRepository("site", "", "", "", "", "", "").key_path
    assert f"rm {path.replace('site', '*')}, then run the same command again" in problem.next_step


def test_a_failure_that_nobody_knows_shows_all_of_it(tmp_path: Path) -> None:
    host = RecordedApt(tmp_path, answer=(100, "", "E: something new\nE: and more"))
    problem = refused(RefreshPackageIndex().apply, host, tell_nobody)
    assert problem.what == "the package index could not be refreshed"
    assert "E: something new\nE: and more" in problem.evidence and "apt-get" in problem.evidence


def test_only_what_was_added_is_purged(tmp_path: Path) -> None:
    host = RecordedApt(tmp_path, packages=["make", "libc6"])
    host.installs = ("gcc", "cpp")
    change = InstallPackages(("gcc", "make"))
    before = change.capture(host)
    outcome = change.apply(host, lambda *_: None)
    assert outcome == {"added": ["cpp", "gcc"], "changed": {}}
    host.packages += ["vim"]
    InstallPackages.undo(host, before, outcome)
    assert host.asked[-1][-4:] == ("purge", "--", "cpp", "gcc")
    host.asked.clear()
    InstallPackages.undo(host, before, {"added": ["gone"]})
    assert host.asked == []


def test_nothing_on_a_command_line_is_taken_for_an_option(tmp_path: Path) -> None:
    host = RecordedApt(tmp_path)
    host.installs = ("gcc",)
    InstallPackages(("gcc=1.0",)).apply(host, lambda *_: None)
    (asked,) = host.asked
    assert asked[asked.index("install") :] == ("install", "--no-remove", "--allow-downgrades", "--", "gcc=1.0")
    assert {"--yes", "APT::Get::AllowUnauthenticated=false", "Acquire::AllowInsecureRepositories=false"} <= {*asked}


@pytest.mark.parametrize("trace", ["audit", "updates"])
def test_a_killed_dpkg_is_finished_first(tmp_path: Path, trace: str) -> None:
    host = RecordedApt(tmp_path)
    host.installs = ("gcc",)
    if trace == "audit":
        host.audit = "The following packages are only half configured: docker.io\n"
    else:
        (tmp_path / "var/lib/dpkg/updates").mkdir(parents=True)
        (tmp_path / "var/lib/dpkg/updates/0001").touch()
    told: list[str] = []
    InstallPackages(("gcc",)).apply(host, lambda message, *_: told.append(message))
    assert [argv[0] for argv in host.asked] == ["dpkg", "apt-get"]
    assert host.asked[0][-2:] == ("--configure", "-a")
    assert told == ["finishing what an interrupted dpkg left half done"]


@pytest.mark.parametrize("change", [RefreshPackageIndex(), InstallPackages(("gcc",))])
def test_progress_is_told_and_chatter_is_not(tmp_path: Path, change: Change) -> None:
    lines = ["Get:1 http://example.org gcc", "Unpacking gcc (12) ...", "Setting up gcc (12) ..."]
    host = RecordedApt(tmp_path, ("gcc",), answer=(0, "\n".join(("Reading package lists...", *lines)), ""))
    told: list[str] = []
    change.apply(host, lambda message, *_: told.append(message))
    assert told == lines


class WithLocks(RecordedApt):
    """A machine below a folder with this machine's /proc, whose time goes fast."""

    waited = 0.0

    def read_text(self, path: str) -> str | None:
        return super().read_text(path) if not path.startswith("/proc/") else System().read_text(path)

    def sleep(self, seconds: float) -> None:
        self.waited += seconds

    def now(self) -> float:
        return self.waited


# $1: a file to lock as dpkg does, by fcntl(2), until the input ends.
HOLD = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('', flush=True); input()"
LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock", "/var/cache/apt/archives/lock")


@contextmanager
def held_by_another(lock: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process holds the lock for the time of the block."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    argv = (sys.executable, "-c", HOLD, str(lock))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        holder.stdout.readline()
        yield holder
        holder.stdin.close()
        holder.wait(10)


@pytest.mark.parametrize("path", LOCKS)
def test_the_holder_of_a_lock_is_named(tmp_path: Path, path: str) -> None:
    host = WithLocks(tmp_path)
    assert lock_holder(host) == ""
    with held_by_another(tmp_path / path.lstrip("/")) as holder:
        name = Path(f"/proc/{holder.pid}/comm").read_text().strip()
        assert lock_holder(host).startswith(f"{name} (pid {holder.pid}: {sys.executable} -c import fcntl")
    assert (tmp_path / path.lstrip("/")).exists()
    assert lock_holder(host) == ""


def test_one_who_waits_for_the_lock_is_not_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "var/lib/dpkg/lock"
    with held_by_another(lock) as holder:
        argv = (sys.executable, "-c", HOLD, str(lock))
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiter:
            while f"-> POSIX  ADVISORY  WRITE {waiter.pid}" not in Path("/proc/locks").read_text():
                time.sleep(0.01)
            assert f"(pid {holder.pid}: " in lock_holder(WithLocks(tmp_path))
            waiter.kill()


def test_waiting_for_the_lock_is_told_and_ends_when_it_is_free(tmp_path: Path) -> None:
    told: list[str] = []
    with held_by_another(tmp_path / LOCKS[2].lstrip("/")) as holder:

        class Freed(WithLocks):
            def sleep(self, seconds: float) -> None:
                super().sleep(seconds)
                holder.kill()
                holder.wait()

        host = Freed(tmp_path)
        host.lock_timeout = 20
        RefreshPackageIndex().apply(host, lambda message, *_: told.append(message))
    assert len(told) == 1
    assert told[0].startswith("waiting up to 20 s for python") and f"(pid {holder.pid}: " in told[0]


def test_a_lock_that_is_never_free_ends_in_its_holders_name(tmp_path: Path) -> None:
    host = WithLocks(tmp_path)
    host.lock_timeout = 7
    with held_by_another(tmp_path / LOCKS[2].lstrip("/")) as holder:
        problem = refused(RefreshPackageIndex().apply, host, tell_nobody)
    assert problem.what == "another program holds the package manager's lock"
    assert f"(pid {holder.pid}: " in problem.evidence and "waited 7 s" in problem.evidence
    assert "gpuprov_lock_timeout" in problem.next_step
    assert 7 < host.waited < 9 and host.asked == []


def test_one_who_was_faster_is_waited_for(tmp_path: Path) -> None:
    """The lock was free when we looked and taken when apt did: it is tried again."""

    class Raced(WithLocks):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            done = super().run(argv, **more)
            return Completed(done.argv, 100, "", LOCKED) if len(self.asked) < 3 else done

    host = Raced(tmp_path)
    RefreshPackageIndex().apply(host, lambda *_: None)
    assert len(host.asked) == 3


QUERY = """installed dpkg 1.21.22 amd64 install ok
installed mawk 1.3.4 amd64 install ok awk
installed libc6 2.36 amd64 hold ok libc6-2.36
installed libc6 2.36 i386 install ok libc6-2.36
installed tzdata 2026b all install ok tzdata-bookworm, tz (= 1)
triggers-pending man-db 2.11 amd64 install ok man, man-browser
installed torn 1.0 amd64 install reinstreq
half-installed half 1.0 amd64 install reinstreq gone
"""


class Queried(RecordedApt):
    def __init__(self, root: Path, text: str = QUERY, error: str = "") -> None:
        super().__init__(root)
        self.text, self.error = text, error

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        return Completed(tuple(argv), 2 if self.error else 0, self.text, self.error)


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("mawk", True), ("mawk:amd64", True), ("mawk:native", True), ("mawk:i386", False), ("awk", True),
        ("awk=1.3.4", False), ("libc6:i386", True), ("libc6:i386=2.36", True), ("libc6:i386=2.31", False),
        ("tzdata:all", True), ("tzdata:amd64", True), ("tz", True), ("man-db", True), ("man-browser", True),
        ("torn", False), ("half", False), ("gone", False), ("perl", False),
    ],
)  # fmt: skip
def test_names_as_apt_takes_them_are_found(tmp_path: Path, name: str, there: bool) -> None:
    """Else a second plan would ask for what is there: virtual packages, and those with an architecture."""
    assert (missing(gather_packages(Queried(tmp_path)), (name,)) == ()) is there


def test_holds_are_seen_and_ours_among_them(tmp_path: Path) -> None:
    host = Queried(tmp_path)
    host.make_directory("/var/lib/gpuprov")
    host.write("/var/lib/gpuprov/held", b"libc6\nmawk\n")
    facts = gather_packages(host)
    assert (set(facts.held), set(facts.held_here)) == ({"libc6"}, {"libc6"})


def test_a_hold_that_was_in_the_way_comes_back_with_the_undo(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root")
    host.held = {"docker.io"}
    change = InstallPackages(("site-gpu-tools",), unhold=("docker.io", "gone"))
    before = change.capture(host)
    outcome = change.apply(host, lambda *_: None)
    assert (host.held, "site-gpu-tools" in host.installed) == (set(), True)
    InstallPackages.undo(host, before, outcome)
    assert (host.held, "site-gpu-tools" in host.installed) == ({"docker.io"}, False)


HOLDS = PackageFacts("apt", {"a": "1", "b": "1", "c": "1"}, held=frozenset({"a", "c"}), held_here=frozenset({"a"}))


@pytest.mark.parametrize(
    ("names", "changes"),
    [(("a",), ()), (("a", "c"), ()), (("b",), (HoldPackages(("b",), ("a",)),)), ((), (HoldPackages((), ("a",)),))],
)
def test_holds_of_others_are_left_alone(names: tuple[str, ...], changes: tuple[HoldPackages, ...]) -> None:
    assert plan_holds(HOLDS, names) == changes


@pytest.mark.parametrize(
    ("said", "heading", "listed"),
    [
        ("x\nThe following packages will be REMOVED:\n  old-tool* other\n  third\n0 upgraded\n",
         "The following packages will be REMOVED:", ("old-tool", "other", "third")),
        ("The following packages have unmet dependencies:\n a : Depends: b (>= 2) but 1 is to be installed\nE: no\n",
         "The following packages have unmet dependencies:", ("a : Depends: b (>= 2) but 1 is to be installed",)),
        ("nothing of the kind\n", "The following packages will be REMOVED:", ()),
    ],
)  # fmt: skip
def test_what_apt_lists_is_read(said: str, heading: str, listed: tuple[str, ...]) -> None:
    assert listed_under(heading, said) == listed


def test_conffiles_are_read_below_their_package() -> None:
    text = "a\n /etc/a.conf 0123\n /etc/a.d/b 4567\nnone\n\nb\n /etc/b 89ab obsolete\n /etc/c cdef\n"
    assert parse_conffiles(text) == {"a": (("/etc/a.conf", "0123"), ("/etc/a.d/b", "4567")), "b": (("/etc/c", "cdef"),)}


@pytest.mark.root
@pytest.mark.parametrize("listed", ["docker-ce\nlibc6\n", None], ids=["a list", "no list"])
def test_undone_holds_leave_marks_and_list_as_they_were(tmp_path: Path, listed: str | None) -> None:
    host = FakeHost(tmp_path)
    host.installed.update({"docker-ce": "1", "libc6": "2", "nvidia-driver": "3"})
    host.held = {"docker-ce"}
    if listed is not None:
        host.make_directory(STATE_DIRECTORY, 0o700)
        host.write(HELD_LIST, listed.encode())
    before = host.everything()
    change = HoldPackages(("nvidia-driver", "libc6"), ("docker-ce",))
    captured = change.capture(host)
    change.apply(host, lambda message, done, total: None)
    assert host.held == {"nvidia-driver", "libc6"}
    assert (host.read_text(HELD_LIST) or "").split() == ["libc6", "nvidia-driver"]
    HoldPackages.undo(host, captured, {})
    assert host.held == {"docker-ce"}
    assert host.everything() == before

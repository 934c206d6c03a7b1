"""Packages of rpm installed, removed and brought back, and the repositories that a plan asks before it changes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.changes import Change, RemoveFile, WriteFile, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.places import COPIES, FOLDER
from gpuprov.packages.apt import APT
from gpuprov.packages.dnf import DNF
from gpuprov.packages.failures import Advice
from gpuprov.packages.interface import LockFacts, PackageFacts, PackageManager
from gpuprov.packages.keys import BUNDLE_KEY, RPM_KEYS, InstallRpmKey, RemoveRpmKey, armored, fingerprints
from gpuprov.packages.rpm import InstallRpmPackages, RefreshRpmIndex, RemoveRpms, RpmManager
from gpuprov.packages.rpm_locks import HoldRpmPackages
from gpuprov.packages.zypper import ZYPPER
from gpuprov.protocol.errors import GpuprovError
from tests.bundles import KEY
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted

GCC, CPP, VIM, LATER = "gcc-11-1.x86_64", "cpp-11-1.x86_64", "vim-8-1.x86_64", "later-1-1.noarch"
LIST = "/etc/dnf/plugins/versionlock.list"
REPOSITORIES = "/etc/yum.repos.d"


class Host(Scripted):
    """A host with dnf and rpm: `packages` are installed, `brings` come with the next installation."""

    def __init__(self, root: Path, *packages: str) -> None:
        super().__init__(root)
        self.packages = {*packages, VIM}
        self.brings: set[str] = set()
        self.replaces: set[str] = set()
        self.no_copy: set[str] = set()
        self.needed: dict[str, str] = {}
        self.fails: tuple[str, ...] = ("nothing",)
        self.error = "it fails"
        self.offers = ""
        self.repositories: list[dict[str, str]] = []
        self.synced = 0
        self.work: set[str] = set()  # the options that name temporary folders
        self.lock_timeout = 7
        for folder in ("var/tmp", "etc/yum.repos.d", "etc/dnf/plugins", "etc/nvidia"):
            (root / folder).mkdir(parents=True)

    def sync(self) -> None:
        self.synced += 1

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        changes = argv[0] in ("dnf", "zypper") or argv[1] in ("-e", "--install")
        changes = changes or (argv[1] == "--erase" and argv[2] != "--test")
        assert not changes or (more["timeout"] >= 600 and more["env"]["ZYPP_LOCK_TIMEOUT"] == "7")
        assert argv[0] != "systemctl" or more["timeout"]
        more.get("on_line", str)("Installing : a package")
        return super().run(argv, **more)

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if set(self.fails) <= set(argv):
            return 1, "", self.error
        if argv[0] == "rpm":
            return self._rpm(argv[1:])
        if argv[0] == "systemctl":
            return ""
        if "repoquery" in argv:
            return self._repoquery(argv)
        if "reinstall" in argv:
            if argv[-1] not in self.no_copy:
                assert f"--setopt=destdir={COPIES}" in argv
                self.write(f"{COPIES}/{argv[-1]}.rpm", b"rpm")
            return ""
        self.packages = self.packages - self.replaces | self.brings
        return ""

    def _rpm(self, words: tuple[str, ...]) -> Answer:
        if words[:2] == ("--erase", "--test"):
            said = [self.needed[name] for name in words[2:] if name in self.needed]
            return (1, "", "".join(said)) if said else ""
        if words[0] in ("-e", "--erase"):
            self.packages -= set(words[1:])
            for path in ("/etc/nvidia/edited.conf",):
                if self.exists(path):
                    self.rename(path, f"{path}.rpmsave")
        elif words[:2] == ("--install", "--oldpackage"):
            self.packages |= {word.rpartition("/")[2].removesuffix(".rpm") for word in words[2:]}
        elif words[:2] == ("--query", "--file"):
            return "owner\n" if words[2] == "/owned" else (1, "", "not owned")
        elif words[0] == "-qa":
            return "".join(f"{one}\n" for one in sorted(self.packages)) + "gpg-pubkey-96055b96-6b0152d9.(none)\n"
        return ""

    def _repoquery(self, argv: tuple[str, ...]) -> Answer:
        named = [word.rpartition("=")[2] for word in argv if word.startswith("--setopt=reposdir=")]
        (folder,) = named or [REPOSITORIES]
        assert folder == REPOSITORIES or any(word.startswith("--setopt=cachedir=") or "host.d" in word for word in argv)
        found = {name: self.read_text(f"{folder}/{name}") or "" for name in self.list_directory(folder)}
        self.repositories.append(found)
        self.work |= {word for word in argv if "/var/tmp/" in word or "None" in word}
        # A source may hold a login.
        modes = {0o600} if "host.d" in folder else {0o640} if named else set()
        assert not modes or {self.path(f"{folder}/{name}").stat().st_mode & 0o777 for name in found} <= modes
        return "".join(f"gcc 0:{text}-1.x86_64\n" for text in found.values())


# -- installing --------------------------------------------------------------------------------------------------------


def test_an_installation_lifts_holds_replaces_and_is_undone(tmp_path: Path) -> None:
    host = Host(tmp_path, "gcc-10-1.x86_64")
    host.write(LIST, b"gcc-0:10-1.*\nbash\n")
    lift = HoldRpmPackages("dnf", LIST, (), ("gcc",))
    change = InstallRpmPackages(DNF, ("gcc=11", "cpp"), ("a.service", "b.service"), ("--option",), lift=(lift,))
    assert change.summary() == "install gcc=11, cpp; enable a.service, b.service (taking the hold off gcc)"
    assert "-gcc-0:10-1" in change.diff(host)
    assert InstallRpmPackages(DNF, ("gcc",)).diff(host) == ""
    before = change.capture(host)
    assert before["installed"] == ["gcc-10-1.x86_64", VIM]
    host.brings, host.replaces = {GCC, CPP}, {"gcc-10-1.x86_64"}
    outcome = change.apply(host, tell_nobody)
    assert (outcome["added"], outcome["replaced"]) == ([CPP], ["gcc-10-1.x86_64"])
    install = ("dnf", "--option", "--setopt=assumeno=0", "--setopt=cacheonly=0", *DNF.install[1:], "gcc-11", "cpp")
    enabled = [("systemctl", "enable", unit) for unit in ("a.service", "b.service")]
    assert [argv for argv in host.asked if argv[0] != "rpm"] == [install, *enabled]
    assert host.read_text(LIST) == "bash\n"
    # What somebody holds or installs since then stays.
    host.append(LIST, b"vim\n")
    host.packages.add(LATER)
    InstallRpmPackages.undo(host, before, outcome)
    assert host.packages == {GCC, VIM, LATER} and host.asked[-1] != install
    assert host.read_text(LIST) == "bash\nvim\ngcc-0:10-1.*\n"
    host.asked.clear()
    InstallRpmPackages.undo(host, before, outcome)
    assert {words[:2] for words in host.asked} == {("rpm", "-qa")}


# Packages before the run, those that it added, those that are there later, those that stay.
UPDATES: dict[str, tuple[set[str], set[str], set[str], set[str]]] = {
    "updated": ({VIM}, {GCC}, {VIM, "gcc-12-1.x86_64"}, {VIM}),
    "a kernel's headers, and those of a later one": (
        {VIM},
        {GCC},
        {VIM, GCC, "gcc-12-1.x86_64"},
        {VIM, "gcc-12-1.x86_64"},
    ),
    "updated, beside one that was not": ({VIM}, {CPP, GCC}, {VIM, CPP, "gcc-12-1.x86_64"}, {VIM}),
    "one of two kernels": ({"gcc-9-1.x86_64"}, {GCC}, {"gcc-9-1.x86_64"}, {"gcc-9-1.x86_64"}),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_package_that_was_updated_since_goes_too(tmp_path: Path, name: str) -> None:
    before, added, there, stay = UPDATES[name]
    host = Host(tmp_path)
    host.packages = {*there}
    InstallRpmPackages.undo(host, {"installed": sorted(before)}, {"added": sorted(added), "lift": []})
    assert host.packages == stay
    host.packages, host.needed = {*there}, {"gcc-12-1.x86_64": "gcc is needed by clang"}
    InstallRpmPackages.undo(host, {"installed": sorted(before)}, {"added": sorted(added), "lift": []})
    assert host.packages == there - added


@pytest.mark.parametrize("outcome", [None, {}])
def test_killed_installation_is_undone_by_the_list_before(tmp_path: Path, outcome: dict[str, Any] | None) -> None:
    host = Host(tmp_path)
    host.write(LIST, b"gcc-0:10-1.*\n")
    change = InstallRpmPackages(DNF, ("gcc",), lift=(HoldRpmPackages("dnf", LIST, (), ("gcc",)),))
    before = change.capture(host)
    host.write(LIST, b"")
    host.packages |= {GCC, CPP}
    InstallRpmPackages.undo(host, before, outcome)
    assert host.packages == {VIM} and ("rpm", "-e", CPP, GCC) in host.asked
    assert host.read_text(LIST) == "gcc-0:10-1.*\n"
    # The journal of a version without `lift`.
    InstallRpmPackages.undo(host, {"installed": before["installed"]}, None)


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (("install",), "gcc, cpp could not be installed"),
        (("systemctl", "b.service"), "b.service can't be enabled"),
        (("rpm", "-qa"), "rpm's database can't be read"),
        (("rpm", "-e"), f"{CPP}, {GCC} could not be removed"),
    ],
)
def test_what_fails_is_named(tmp_path: Path, fails: tuple[str, ...], says: str) -> None:
    host = Host(tmp_path)
    change = InstallRpmPackages(DNF, ("gcc", "cpp"), ("a.service", "b.service"))
    before = change.capture(host)
    host.brings, host.fails = {GCC, CPP}, fails
    problem = refused(lambda: InstallRpmPackages.undo(host, before, change.apply(host, tell_nobody)))
    assert says in problem.what and "it fails" in problem.evidence
    assert problem.next_step or not {"systemctl", "-qa"} & {*fails}


def test_a_package_that_no_repository_has_gets_its_advice(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.fails, host.error = ("install",), "Error: Unable to find a match: gcc"
    advice = Advice("gcc", "its meaning", "its step")
    problem = refused(InstallRpmPackages(DNF, ("gcc",), advice=advice).apply, host, tell_nobody)
    assert problem.what.endswith("its meaning") and problem.next_step == "its step"


def test_a_refresh_has_the_options_of_its_installation(tmp_path: Path) -> None:
    host = Host(tmp_path)
    change = RefreshRpmIndex(DNF, ("--option",))
    assert change.summary() == "refresh the package index (dnf -y makecache)"
    change.apply(host, tell_nobody)
    assert host.asked == [("dnf", "--option", "--setopt=assumeno=0", "--setopt=cacheonly=0", "-y", "makecache")]


# -- removing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [False, True])
def test_removed_packages_come_back_from_their_copies(tmp_path: Path, killed: bool) -> None:
    host = Host(tmp_path, GCC, CPP)
    host.write("/etc/nvidia/edited.conf", b"mine\n")
    change = DNF.removal(("cpp", "gcc", "not-installed"), ("/etc/nvidia/edited.conf",))
    assert isinstance(change, RemoveRpms)
    before, told = change.capture(host), []
    assert (before["packages"], before["lock_timeout"]) == ([CPP, GCC], 7)
    change.apply(host, lambda *words: told.append(words))
    (one, other), line = ((f"keeping a copy of {name}", 0, 0) for name in (CPP, GCC)), ("Installing : a package", 0, 0)
    assert told == [one, line, other, line, line]
    assert host.packages == {VIM} and host.synced == 1
    # rpm has renamed the file: it stays where it was.
    assert host.list_directory("/etc/nvidia") == ("edited.conf",)
    assert host.read_text("/etc/nvidia/edited.conf") == "mine\n"
    assert host.path(COPIES).stat().st_mode & 0o777 == 0o700
    assert RemoveRpms.irreversible(host, before, None, ()) == ()
    if killed:
        host.packages.add(CPP)
    host.asked.clear()
    host.remove("/etc/nvidia/edited.conf")
    RemoveRpms.undo(host, before, None)
    files = [f"{COPIES}/{name}.rpm" for name in ((GCC,) if killed else (CPP, GCC))]
    assert ("rpm", "--install", "--oldpackage", *files) in host.asked
    assert host.packages == {VIM, GCC, CPP} and not host.exists(COPIES)
    assert host.read_text("/etc/nvidia/edited.conf") == "mine\n"
    host.asked.clear()
    RemoveRpms.undo(host, before, None)
    assert [words[:2] for words in host.asked] == [("rpm", "-qa")]


def test_a_package_without_a_copy_is_told_and_others_keep_theirs(tmp_path: Path) -> None:
    host = Host(tmp_path, GCC, CPP)
    host.no_copy = {CPP}
    change = RemoveRpms(DNF, ("cpp", "gcc"))
    before = change.capture(host)
    change.apply(host, tell_nobody)
    # zypper keeps copies in folders of its own; one is of another removal.
    host.make_directory(f"{COPIES}/repo/x86_64")
    host.rename(f"{COPIES}/{GCC}.rpm", f"{COPIES}/repo/x86_64/{GCC}.rpm")
    host.write(f"{COPIES}/other-1-1.noarch.rpm", b"")
    (said,) = RemoveRpms.irreversible(host, before, None, ())
    assert CPP in said
    RemoveRpms.undo(host, before, None)
    assert host.packages == {VIM, GCC}
    assert [one.name for one in host.path(COPIES).rglob("*.rpm")] == ["other-1-1.noarch.rpm"]


@pytest.mark.parametrize(
    ("fails", "says"),
    [(("--erase",), "cpp, gcc could not be removed"), (("--install",), "could not be installed again")],
)
def test_a_removal_that_fails_is_an_error(tmp_path: Path, fails: tuple[str, ...], says: str) -> None:
    host = Host(tmp_path, GCC, CPP)
    host.fails = fails
    host.write("/etc/nvidia/edited.conf", b"mine\n")
    change = RemoveRpms(DNF, ("cpp", "gcc"))
    before = change.capture(host)
    with pytest.raises(GpuprovError) as caught:
        change.apply(host, tell_nobody)
        RemoveRpms.undo(host, before, None)
    assert says in caught.value.problems[0].what and "it fails" in caught.value.problems[0].evidence
    assert host.list_directory(COPIES), "the copies stay"


def test_what_needs_a_package_is_named_without_those_that_go_with_it(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.needed = {
        "gcc": "error: Failed dependencies:\n\tgcc is needed by (installed) gcc-c++-11-1.x86_64\n"
        "\tgcc = 11 is needed by (installed) gcc-c++-11-1.x86_64\n\tgcc is needed by (installed) ada-11-1.x86_64\n"
        f"\tgcc is needed by (installed) {CPP}\n",
        "cpp": f"\tcpp is needed by (installed) {GCC}\n",
    }
    assert DNF.needed_by(host, ("gcc", "cpp", "vim")) == {"gcc": ("ada", "gcc-c++")}
    assert DNF.needed_by(host, ("gcc",)) == {"gcc": ("ada", "cpp", "gcc-c++")}
    host.asked.clear()
    host.needed = {}
    assert DNF.needed_by(host, ("gcc", "vim")) == {} == DNF.needed_by(host, ("vim",))
    assert host.asked == [("rpm", "--erase", "--test", "gcc", "vim"), ("rpm", "--erase", "--test", "vim")]
    host.asked.clear()
    host.needed = {"gcc": "\tgcc is needed by (installed) ada-11-1.x86_64\n"}
    assert DNF.needed_by(host, ("gcc",)) and len(host.asked) == 1


def test_files_that_no_package_owns(tmp_path: Path) -> None:
    assert DNF.unowned(Host(tmp_path), ("/owned", "/a", "/b")) == ("/a", "/b")


@pytest.mark.parametrize(("manager", "word"), [(DNF, "--file"), (APT, "--search")])
def test_a_file_of_which_nothing_is_told_is_not_taken_for_one_without_owner(manager: PackageManager, word: str) -> None:
    host = Scripted(answers={word: (137, "")})
    assert "does not tell which package has /a" in refused(manager.unowned, host, ["/a"]).what


@pytest.mark.parametrize(("manager", "word"), [(DNF, "a-1=2"), (ZYPPER, "a=1=2")])
def test_a_name_with_a_version_is_typed_as_the_program_takes_it(manager: RpmManager, word: str) -> None:
    assert manager.typed("a=1=2") == word and manager.typed("a b") == "'a b'"


# -- repositories ------------------------------------------------------------------------------------------------------


def repository(name: str, version: str, place: str = REPOSITORIES) -> WriteFile:
    return WriteFile(f"{place}/{name}.repo", version.encode(), mode=0o640)


@pytest.mark.parametrize(
    ("planned", "repositories", "versions"),
    [
        ((), [{"a.repo": "1", "b.repo": "2"}], ("0:1-1.x86_64", "0:2-1.x86_64")),
        ((repository("x", "9", "/etc/other"),), [{"a.repo": "1", "b.repo": "2"}], ("0:1-1.x86_64", "0:2-1.x86_64")),
        (
            (repository("b", "3"), repository("c", "4")), [{"a.repo": "1"}, {"b.repo": "3", "c.repo": "4"}],
            ("0:1-1.x86_64", "0:3-1.x86_64", "0:4-1.x86_64"),
        ),
        ((RemoveFile(f"{REPOSITORIES}/a.repo", "old"),), [{"b.repo": "2"}], ("0:2-1.x86_64",)),
        (
            (RemoveFile(f"{REPOSITORIES}/a.repo", "old"), repository("b", "3")),
            [{}, {"b.repo": "3"}], ("0:3-1.x86_64",),
        ),
    ],
)  # fmt: skip
def test_repositories_are_asked_as_they_will_be(
    tmp_path: Path, planned: tuple[Change, ...], repositories: list[dict[str, str]], versions: tuple[str, ...]
) -> None:
    host = Host(tmp_path)
    host.write(f"{REPOSITORIES}/a.repo", b"1")
    host.write(f"{REPOSITORIES}/b.repo", b"2")
    assert DNF.offered(host, ("gcc",), planned) == {"gcc": versions}
    assert host.repositories == repositories
    assert all(argv[-1] == "gcc" for argv in host.asked)
    assert host.list_directory("/var/tmp") == ()
    assert all("/var/tmp/gpuprov-tmp-" in word for word in host.work)


def test_zypper_trusts_the_keys_that_planned_repositories_name(tmp_path: Path) -> None:
    host = Host(tmp_path)
    text = b"[a]\nname=a\ngpgkey=file:///etc/keys/b.asc\n[b]\ngpgkey=file:///etc/keys/a.asc\n"
    ZYPPER.offered(host, ("gcc",), (WriteFile("/etc/zypp/repos.d/a.repo", text),))
    # One that is yet to come.
    host.write("/key", KEY)
    key = InstallRpmKey("/etc/keys/a.asc", "file:///key", next(iter(fingerprints(KEY))))
    ZYPPER.offered(host, ("gcc",), (key, WriteFile("/etc/zypp/repos.d/a.repo", text)))
    imports = [argv for argv in host.asked if argv[0] == "rpm"]
    *imports, _, placed = imports
    assert placed[-1] == f"{placed[2]}/a.asc"
    expected = [("--root", "--import", f"/etc/keys/{name}.asc") for name in ("a", "b")]
    assert [(argv[1], *argv[3:]) for argv in imports] == expected
    assert {argv[2].startswith("/var/tmp/gpuprov-tmp-") for argv in imports} == {True}


def test_the_bundles_source_is_signed_by_its_key(tmp_path: Path) -> None:
    host = Host(tmp_path)
    DNF.open_bundle(host, "ABCD")
    assert host.asked == [] and not host.exists(f"{FOLDER}/repos.d"), "a bundle without packages has no key"
    assert DNF.bundle_options == (f"--setopt=reposdir={FOLDER}/repos.d", f"--setopt=cachedir={FOLDER}/cache")
    host.make_directory(f"{FOLDER}/repository", 0o700)
    host.write(f"{FOLDER}/repository/key.gpg", KEY)
    DNF.open_bundle(host, "ABCD")
    assert host.asked == [("rpm", "--import", BUNDLE_KEY)]
    assert (host.read_text(BUNDLE_KEY) or "").startswith("-----BEGIN PGP PUBLIC KEY BLOCK-----")
    assert host.path(f"{FOLDER}/repos.d").stat().st_mode & 0o777 == 0o700
    lines = (host.read_text(f"{FOLDER}/repos.d/bundle.repo") or "").splitlines()
    assert lines[0] == "[gpuprov-bundle]" and {*DNF.bundle_lines} < {*lines}
    wanted = {f"baseurl=file://{FOLDER}/repository", f"gpgkey=file://{BUNDLE_KEY}", "repo_gpgcheck=1", "gpgcheck=1"}
    assert wanted | {"enabled=1"} < {*lines}
    host.fails = ("--import",)
    with pytest.raises(GpuprovError, match="can't import the key ABCD"):
        DNF.open_bundle(host, "ABCD")


@pytest.mark.parametrize("said", [(124, ""), (137, ""), (1, "", "error: rpmdb: damaged")])
def test_a_key_that_rpm_does_not_tell_of_is_not_taken_for_a_new_one(tmp_path: Path, said: Answer) -> None:
    host, fingerprint = Scripted(tmp_path, {"gpg-pubkey": said}), fingerprints(KEY)[0]
    for change in (InstallRpmKey(f"{RPM_KEYS}/one", "file:///key", fingerprint), RemoveRpmKey(fingerprint)):
        assert refused(change.capture, host).what == "rpm does not tell which keys it trusts"


class Gathering(Host):
    """A host that lacks some programs, and lists packages with what they provide."""

    lacks: tuple[str, ...] = ()

    def which(self, program: str) -> str | None:
        return None if program in self.lacks else super().which(program)

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if argv[:2] == ("rpm", "-qa") and "%{NAME} %" in argv[3]:
            return "gcc 11-1.x86_64 cc gcc gcc(x86-64)\nvim 8-1.x86_64\n"
        if argv[0] == "rpm" and "gpg-pubkey" in argv:
            return f"gpg-pubkey-1-1\n{armored(KEY).decode()}"
        return super().answer(argv)


@pytest.mark.parametrize("lacks", ["rpm", "dnf", ""])
def test_the_facts_of_packages(tmp_path: Path, lacks: str) -> None:
    host = Gathering(tmp_path)
    host.lacks = (lacks,)
    host.write("/etc/dnf/plugins/versionlock.conf", b"[main]\n")
    host.write(LIST, b"vim\n")
    if lacks:
        assert DNF.gather(host) == PackageFacts("", {}) and host.asked == []
        return
    facts = DNF.gather(host)
    assert (facts.manager, facts.provided) == ("dnf", frozenset({"cc"}))
    assert facts.installed == {"gcc": "11-1.x86_64", "vim": "8-1.x86_64"}
    assert facts.locks == LockFacts("dnf", LIST, frozenset({"vim"})) and facts.trusted_keys == {*fingerprints(KEY)}

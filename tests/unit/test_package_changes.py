"""The kinds of change that apt makes, by the commands that they type: options, holds, the undo and what it leaves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.changes import Change, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.places import SOURCES_LIST
from gpuprov.packages.apt_changes import (
    HoldPackages,
    InstallPackages,
    RefreshPackageIndex,
    RemovePackages,
    needed_by_others,
)
from gpuprov.packages.dpkg import gather_packages
from gpuprov.packages.failures import Advice
from gpuprov.packages.interface import (
    HELD_LIST,
    LockFacts,
    PackageFacts,
    lock_holder,
    pinned,
    read_held,
    reporter,
    shortened,
    versions_by_name,
    wait_until_free,
    write_held,
)
from gpuprov.protocol.errors import GpuprovError
from tests.unit.refused import refused
from tests.unit.scripted import Scripted
from tests.unit.test_packages import RecordedApt, WithLocks, held_by_another

OPTIONS = ("-o", "Dir::Etc::SourceList=/bundle")


class Apt(RecordedApt):
    """A machine whose packages have states of their own; it notes the time limits."""

    def __init__(self, root: Path, *states: str) -> None:
        super().__init__(root)
        self.states = list(states)
        self.limits: list[float] = []

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[0] == "dpkg-query" and "${Conffiles}" not in argv[2]:
            return Completed(tuple(argv), 0, "".join(f"{state}\n" for state in self.states))
        if argv[0] in ("apt-get", "apt-mark") and not {"--simulate", "showauto"} & {*argv}:
            self.limits.append(more["timeout"])
        return super().run(argv, **more)


def installed(*names: str, want: str = "install") -> list[str]:
    return [f"installed {name} 1.0 amd64 {want} ok " for name in names]


def test_the_index_is_refreshed_from_all_sources_or_not_at_all(tmp_path: Path) -> None:
    host = Apt(tmp_path)
    RefreshPackageIndex(options=OPTIONS).apply(host, lambda *_: None)
    assert host.asked[0][-5:] == (*OPTIONS, "-o", "APT::Update::Error-Mode=any", "update")
    assert host.limits == [600]


def test_what_a_bundle_is_read_by_goes_on_each_command_line(tmp_path: Path) -> None:
    host = Apt(tmp_path, "half-installed half 1.0 amd64 install reinstreq ")
    host.audit = "half"
    change = InstallPackages(("gcc",), options=OPTIONS)
    before = change.capture(host)
    assert before == {
        "installed": ["half"], "versions": {"half": "1.0"}, "left": {}, "unhold": [], "options": list(OPTIONS),
    }  # fmt: skip
    problem = refused(change.apply, host, tell_nobody)
    commands = [argv for argv in host.asked if argv[0] == "apt-get"]
    position = [argv.index(OPTIONS[1]) for argv in commands]
    assert [argv[at + 1 :] for argv, at in zip(commands, position)] == [
        ("install", "--reinstall", "--no-remove", "--", "half"),
        ("install", "--no-remove", "--", "gcc"),
        ("install", "--reinstall", "--no-remove", "--", "half"),
    ]
    assert problem.evidence == "dpkg-query: half is half-installed; gcc is not installed"
    assert "dpkg --audit" in problem.next_step


@pytest.mark.parametrize(
    ("states", "seen"), [([], "gcc is not installed"), (["unpacked gcc 1.0 amd64 install ok "], "gcc is unpacked")]
)
def test_success_without_the_packages_is_a_failure(tmp_path: Path, states: list[str], seen: str) -> None:
    problem = refused(InstallPackages(("gcc",)).apply, Apt(tmp_path, *states), tell_nobody)
    assert seen in problem.evidence and "not all packages are installed" in problem.what


def test_a_package_that_no_repository_has_gets_its_advice(tmp_path: Path) -> None:
    host = RecordedApt(tmp_path, answer=(100, "", "E: Unable to locate package linux-headers-6.1"))
    advice = Advice("linux-headers", "its meaning", "its step")
    problem = refused(InstallPackages(("linux-headers-6.1",), advice=advice).apply, host, tell_nobody)
    assert "its meaning" in problem.what and problem.next_step == "its step"


@pytest.mark.parametrize("bundle", [True, False])
def test_the_undo_reads_a_bundle_while_it_is_unpacked(tmp_path: Path, *, bundle: bool) -> None:
    host = Apt(tmp_path, "half-installed half 1.0 amd64 install reinstreq ")
    host.audit = "half"
    if bundle:
        host.make_directory(SOURCES_LIST.rpartition("/")[0])
        host.write(SOURCES_LIST, b"")
    change = InstallPackages(("gcc",), options=OPTIONS)
    InstallPackages.undo(host, change.capture(host), {"added": ["gcc"]})
    assert [OPTIONS[1] in argv for argv in host.asked if argv[0] == "apt-get"] == [bundle]


def test_configuration_of_a_removed_package_comes_back_with_the_undo(tmp_path: Path) -> None:
    class Left(Apt):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            argv = tuple(argv)
            if argv[0] == "dpkg-query" and "${Conffiles}" in argv[2]:
                return Completed(argv, 0, "old\n /etc/old 0123\n" if "old" in argv else "")
            if argv[-2:] == ("--", "old") and "--simulate" in argv and "install" in argv:
                assert argv[1:3] == OPTIONS
                return Completed(argv, 0, "Inst old (1.0)\n")
            return super().run(argv, **more)

    host = Left(tmp_path, "config-files old 1.0 amd64 deinstall ok ")
    host.make_directory("/etc")
    host.write("/etc/old", b"the administrator's")
    before = InstallPackages(("old",), options=OPTIONS).capture(host)
    host.states = installed("old")
    host.write("/etc/old", b"the package's")
    outcome = {"added": ["old"], "changed": {}}
    # Only a package that is purged takes what was changed along.
    assert InstallPackages.irreversible(host, before, outcome, ()) == ()
    assert InstallPackages.irreversible(host, {"installed": []}, outcome, ()) != ()
    InstallPackages.undo(host, before, outcome)
    assert host.asked[-1][-3:] == ("remove", "--", "old")
    assert host.read_text("/etc/old") == "the administrator's"


@pytest.mark.parametrize("word", ["--simulate", "--show"])
def test_nothing_is_installed_if_the_configuration_left_is_not_known(tmp_path: Path, word: str) -> None:
    """An undo would purge it."""

    class Killed(Apt):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            if "--simulate" in argv or "${Conffiles}" in argv[2]:
                return Completed(tuple(argv), 137 if word in argv else 0, "Inst old (1.0)\n")
            return super().run(argv, **more)

    host = Killed(tmp_path, "config-files old 1.0 amd64 deinstall ok ")
    assert refused(InstallPackages(("old",)).capture, host).what.endswith("the configuration that packages have left")


def test_holds_wait_for_the_lock_as_long_as_their_run_says(tmp_path: Path) -> None:
    class Locked(WithLocks, Apt):
        pass

    host = Locked(tmp_path, *installed("a"))
    told: list[str] = []
    undone = {"installed": [], "unhold": ["a"]}
    with held_by_another(tmp_path / "var/lib/dpkg/lock"):
        for act, seconds in (
            (lambda: HoldPackages(("a",)).apply(host, lambda message, *_: told.append(message)), 7),
            (lambda: InstallPackages(("b",), ("a",)).apply(host, lambda message, *_: told.append(message)), 8),
            (lambda: InstallPackages.undo(host, undone, {"added": []}), 9),
            (lambda: HoldPackages.undo(host, {"held": ["a"], "names": ["a"]}, {}), 6),
        ):
            host.lock_timeout = seconds
            assert f"waited {seconds} s" in refused(act).evidence
    assert len(told) == 2 and host.asked == []


def test_what_an_installation_leaves_unfinished_is_finished(tmp_path: Path) -> None:
    host = Apt(tmp_path, *installed("gcc"), "unpacked other 1.0 amd64 install ok ")
    host.audit = "other"
    with pytest.raises(GpuprovError, match="not all packages are installed"):
        InstallPackages(("gcc",)).apply(host, lambda *_: None)
    assert [argv[-2:] for argv in host.asked].count(("--configure", "-a")) == 2


# The journal of an earlier version has no versions.
@pytest.mark.parametrize("before", [{"installed": ["make"], "versions": {"make": "1.0"}}, {"installed": ["make"]}])
def test_what_a_killed_installation_brought_is_purged(tmp_path: Path, before: dict[str, Any]) -> None:
    host = Apt(tmp_path, *installed("make", "gcc"), "half-configured cpp 1.0 amd64 install ok ")
    assert InstallPackages.interrupted(host, before) == {"added": ["cpp", "gcc"], "changed": {}}
    host.make_directory(SOURCES_LIST.rpartition("/")[0])
    host.write(SOURCES_LIST, b"")
    InstallPackages.undo(host, before, None)
    assert host.asked[-1][-4:] == ("purge", "--", "cpp", "gcc")


def test_what_the_undo_leaves_is_told(tmp_path: Path) -> None:
    host = Apt(tmp_path, *installed("make", "gcc"))
    before = {"installed": ["gone", "make"], "versions": {"make": "0.9", "gone": "1.0"}, "left": {}}
    said = ("make stays at 1.0; before gpuprov it was 0.9",)
    assert InstallPackages.irreversible(host, before, None, ()) == said
    assert InstallPackages.irreversible(host, before, {"added": [], "changed": {"make": ["0.9", "1.0"]}}, ()) == said
    assert InstallPackages.irreversible(host, before, {"added": ["gcc"]}, ()) == ()


@pytest.mark.parametrize(
    ("docker", "told"),
    [
        ({}, ""),
        ({"docker ps": "c1\n", "docker images": "gpuprov-verify\nsite\n"}, "1 container, 1 image"),
        # What `docker compose down` leaves are the site's data, too.
        ({"docker volume": "database\n"}, "1 volume"),
        ({"docker": (1, "", "Cannot connect to the Docker daemon")}, "does not tell"),
        ({"docker ps": (124, "")}, "does not tell"),
    ],
    ids=["empty", "containers", "volume", "stopped", "hangs"],
)
def test_dockers_data_that_a_purge_takes_along_is_told(tmp_path: Path, docker: Any, told: str) -> None:
    class WithDocker(Apt):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            return Scripted(answers=docker).run(argv) if argv[0] == "docker" else super().run(argv, **more)

    host = WithDocker(tmp_path, *installed("docker.io"))
    host.make_directory("/var/lib/docker")
    said = " ".join(InstallPackages.irreversible(host, {"installed": []}, {"added": ["docker.io"]}, ()))
    assert told in said and ("/var/lib/docker" in said) is bool(told)


class Alternatives(Scripted):
    """Has `site-app`, which needs `a` or `b`, and `site-tool`, which needs `c`."""

    def answer(self, argv: tuple[str, ...]) -> str:
        names = {*argv[argv.index("--") + 1 :]}
        gone = [*names, *(["site-app"] if {"a", "b"} <= names else []), *(["site-tool"] if "c" in names else [])]
        return "".join(f"Purg {name} [1]\n" for name in gone)


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ("abd", {"a": ("site-app",)}), ("dba", {"b": ("site-app",)}), ("ad", {}),
        ("abcd", {"c": ("site-tool",), "a": ("site-app",)}),
    ],
)  # fmt: skip
def test_of_several_packages_that_another_needs_one_stays(names: str, kept: dict[str, tuple[str, ...]]) -> None:
    assert needed_by_others(Alternatives(), list(names)) == kept


@pytest.mark.parametrize("returncode", [124, 137])
def test_an_apt_that_comes_to_no_end_does_not_tell_that_nothing_goes_along(returncode: int) -> None:
    with pytest.raises(GpuprovError, match="apt-get does not tell what would go with gcc"):
        needed_by_others(Scripted(answers={"--simulate": (returncode, "")}), ["gcc"])


def test_a_removed_package_whose_copy_is_gone_is_told_and_prevents_no_undo(tmp_path: Path) -> None:
    host = Apt(tmp_path)
    before = {"names": {"nvidia-docker2": "2.6"}, "automatic": [], "keep": [], "lock_timeout": 7}
    (told,) = RemovePackages.irreversible(host, before, {}, ())
    assert told == "package nvidia-docker2 is not restored: gpuprov no longer has its copy"
    RemovePackages.undo(host, before, {})
    assert not [argv for argv in host.asked if "--install" in argv]


def test_a_link_of_another_user_leads_the_copy_of_a_package_nowhere(tmp_path: Path) -> None:
    class Attacked(RecordedApt):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            if "--status" in argv:
                # Everybody sees the names in /var/tmp, and may add others.
                for folder in list(place.iterdir()):
                    folder.with_name(f"{folder.name}.list").symlink_to("/etc/shadow")
            return super().run(argv, **more)

    place, shadow = tmp_path / "var/tmp", tmp_path / "etc/shadow"
    place.mkdir(parents=True)
    shadow.parent.mkdir()
    shadow.write_text("root:*\n")
    host = Attacked(tmp_path, ["nvidia-docker2"])
    RemovePackages(("nvidia-docker2",)).apply(host, tell_nobody)
    assert [argv[0] for argv in host.asked[-3:]] == ["sh", "dpkg-deb", "apt-get"]
    assert shadow.read_text() == "root:*\n"


@pytest.mark.parametrize("returncode", [124, 137])
def test_packages_that_dpkg_could_not_list_are_not_taken_for_new_ones(tmp_path: Path, returncode: int) -> None:
    class Stalled(Apt):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            done = super().run(argv, **more)
            return Completed(done.argv, returncode, "") if argv[0] == "dpkg-query" else done

    host = Stalled(tmp_path, *installed("vim", "wget"))
    for look in (InstallPackages(("gcc",)).capture, gather_packages):
        assert "dpkg's database can't be read" in refused(look, host).what


@pytest.mark.parametrize("returncode", [100, 124, 137])
def test_a_package_does_not_count_as_wanted_if_apt_mark_does_not_tell(tmp_path: Path, returncode: int) -> None:
    """A rollback would bring it back as one that somebody asked for, and `apt autoremove` would leave it."""
    host = Apt(tmp_path, *installed("libnvidia-container1"))
    host.automatic = (returncode, "")
    problem = refused(RemovePackages(("libnvidia-container1",)).apply, host, tell_nobody)
    assert "showauto" in problem.evidence and problem.next_step == "apt-mark showauto libnvidia-container1"
    assert not [argv for argv in host.asked if "purge" in argv]


def test_an_apt_without_dpkg_is_none(tmp_path: Path) -> None:
    class Half(Apt):
        def which(self, program: str) -> str | None:
            return None if program == "dpkg-query" else super().which(program)

    assert gather_packages(Half(tmp_path)) == PackageFacts("", {})


def test_unfinished_packages_are_facts(tmp_path: Path) -> None:
    states = (*installed("a"), "unpacked b 1 amd64 install ok ", "config-files c 1 amd64 deinstall ok ")
    assert gather_packages(Apt(tmp_path, *states)).unfinished == {"b": "unpacked"}


def test_holds_are_set_taken_off_and_brought_back(tmp_path: Path) -> None:
    host = Apt(tmp_path, *installed("a", "new"), *installed("old", want="hold"))
    host.make_directory(STATE_DIRECTORY)
    host.write(HELD_LIST, b"old\n")
    change = HoldPackages(("new", "gone"), ("old",))
    before = change.capture(host)
    change.apply(host, lambda *_: None)
    assert host.asked == [("apt-mark", "hold", "new", "gone"), ("apt-mark", "unhold", "old")]
    assert host.read_text(HELD_LIST) == "gone\nnew\n"
    host.asked.clear()
    HoldPackages.undo(host, before, {})
    assert host.asked == [("apt-mark", "hold", "old"), ("apt-mark", "unhold", "new")]
    assert host.read_text(HELD_LIST) == "old\n"
    HoldPackages(("a",)).apply(host, tell_nobody)
    assert host.asked[2:] == [("apt-mark", "hold", "a")]


def test_a_hold_that_is_refused_is_an_error(tmp_path: Path) -> None:
    host = RecordedApt(tmp_path, packages=["a", "b"], answer=(100, "", "E: something new"))
    with pytest.raises(GpuprovError, match="apt-mark hold a b failed"):
        HoldPackages(("a", "b")).apply(host, lambda *_: None)


def test_plans_hold_names_without_versions() -> None:
    assert pinned(("a=1", "b")) == ("a",)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, ""), (1, "p0"), (7, "p0, p1, p2, p3, p4, p5, p6"), (8, "p0, p1, p2, p3, p4, p5 and 2 more")],
)
def test_a_sentence_names_six_of_many_packages(count: int, text: str) -> None:
    assert shortened([f"p{number}" for number in range(count)]) == text


@pytest.mark.parametrize(
    ("change", "summary"),
    [
        (InstallPackages(("a", "b")), "install a, b"),
        (InstallPackages(("a", "b"), unhold=("b", "c")), "install a, b (taking the hold off b, c)"),
        (HoldPackages(("a", "b"), ("c", "d")), "hold a, b at this version; no longer hold c, d"),
        (HoldPackages((), ("c",)), "no longer hold c"),
        (HoldPackages((), driver=True), "hold the driver's packages at this version"),
        (HoldPackages(("a", "b"), driver=True), "hold the driver's packages at this version (a, b)"),
        (RemovePackages(("a", "b")), "remove a, b (a rollback installs them again from copies)"),
        (RemovePackages(("a",), ("/x", "/y")), "remove a (a rollback installs them again from copies); /x, /y stays"),
    ],
)
def test_summaries_name_each_package(change: Change, summary: str) -> None:
    assert change.summary() == summary


@pytest.mark.parametrize(
    ("names", "disturbs"),
    [(("docker-ce=5:27",), True), (("gcc", "containerd.io=1.7"), True), (("docker-ce", "gcc=12"), False), ((), False)],
)
def test_an_engine_in_another_version_disturbs_containers(names: tuple[str, ...], disturbs: bool) -> None:
    assert InstallPackages(names).disturbs is disturbs


def test_the_drivers_packages_and_which_of_them_gpuprov_holds() -> None:
    names = ("nvidia-driver", "libcuda1", "NVIDIA-settings", "gcc", "nvidia-container-toolkit", "nvidia-driver-dev")
    locks = LockFacts(held_here=frozenset({"NVIDIA-settings"}))
    held = frozenset({"libcuda1", "gcc"})
    facts = PackageFacts("apt", dict.fromkeys(names, "1"), held_here=held, locks=locks)
    assert facts.driver == {"nvidia-driver", "libcuda1", "NVIDIA-settings"}
    assert facts.driver_held == ("NVIDIA-settings", "libcuda1")


class Locked(Scripted):
    """A machine whose locks are held by these processes, whose clock goes on only by waiting."""

    def __init__(self, root: Path, **holders: int) -> None:
        super().__init__(root)
        self.holders = holders
        self.clock_shows = 1000.0

    def lock_holder(self, path: str) -> int | None:
        return self.holders.get(path)

    def now(self) -> float:
        return self.clock_shows

    def sleep(self, seconds: float) -> None:
        assert seconds == 0.5
        self.clock_shows += seconds


@pytest.mark.parametrize(
    ("holders", "comm", "command", "name"),
    [
        ({}, None, None, ""),
        ({"b": 7}, "apt-get\n", "apt-get\0install\0gcc\0", "apt-get (pid 7: apt-get install gcc)"),
        ({"b": 7, "a": 8}, "x\n", "", "x (pid 8)"),
        ({"a": 7}, None, None, "a process (pid 7)"),
        ({"a": 0}, None, None, "a process that can't be seen from here"),
    ],
)
def test_the_holder_of_a_lock_is_named(
    tmp_path: Path, holders: dict[str, int], comm: str | None, command: str | None, name: str
) -> None:
    host = Locked(tmp_path, **holders)
    for file, text in (("comm", comm), ("cmdline", command)):
        for pid in holders.values() if text is not None else ():
            host.make_directory(f"/proc/{pid}")
            host.write(f"/proc/{pid}/{file}", str(text).encode())
    assert lock_holder(host, ("a", "b")) == name


def test_each_holder_of_the_lock_is_told_once_until_the_deadline(tmp_path: Path) -> None:
    host, told = Locked(tmp_path), list[tuple[str, int, int]]()

    def tell(message: str, done: int, total: int) -> None:
        told.append((message, done, total))

    holders = iter(["apt (pid 1)", "apt (pid 1)", "dpkg (pid 2)", ""])
    wait_until_free(host, tell, lambda system: next(holders))
    assert [(message.split(" for ")[1], *counts) for message, *counts in told] == [
        (f"{name}, which holds the package manager's lock", 0, 0) for name in ("apt (pid 1)", "dpkg (pid 2)")
    ]
    assert host.now() == 1001.5
    problem = refused(lambda: wait_until_free(host, tell, lambda system: "apt (pid 1)", deadline=1003.0))
    assert host.now() == 1003.5
    assert problem.evidence == "apt (pid 1); waited 300 s for its end" and "gpuprov_lock_timeout" in problem.next_step


def test_lines_of_progress_are_told_without_their_padding() -> None:
    told: list[tuple[str, int, int]] = []
    report = reporter(r"\s*Setting up", lambda message, done, total: told.append((message, done, total)))
    for line in ("  Setting   up", "  Setting up  gcc\t(12) \n", "Reading. Setting up"):
        report(line)
    assert told == [("Setting up gcc (12)", 0, 0)]


def test_versions_of_a_name_stay_in_their_order() -> None:
    assert versions_by_name([("a", "2"), ("b", "1"), ("a", "1")]) == {"a": ("2", "1"), "b": ("1",)}


def test_the_list_of_held_packages_is_sorted_and_its_folder_is_roots(tmp_path: Path) -> None:
    host = Scripted(tmp_path)
    assert read_held(host) == frozenset()
    write_held(host, ("b", "a", "c"), ("b",))
    write_held(host, ("d",), ("c", "x"))
    assert host.read_text(HELD_LIST) == "a\nd\n" and read_held(host) == {"a", "d"}
    status = host.status(STATE_DIRECTORY)
    assert status is not None and status.mode == 0o700

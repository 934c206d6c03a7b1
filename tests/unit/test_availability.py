"""What the repositories lack is told before anything is changed; they are asked for nothing that is there."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.commands import Completed
from gpuprov.core.journal import new_journal
from gpuprov.packages import apt, dnf, managers, zypper
from gpuprov.packages.apt import APT
from gpuprov.packages.managers import Offers
from gpuprov.protocol.events import ChangeDone, ChangeStarted, Event, Finished, Note, Planned
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import parse_spec, spec_to_json
from tests.unit.ask import ask
from tests.unit.fake_host import RELEASE, FakeHost, write_runfile
from tests.unit.scripted import Scripted
from tests.unit.test_fabric_manager import SwitchHost
from tests.unit.test_packages import held_by_another

pytestmark = pytest.mark.root
_HEADERS = f"linux-headers-{RELEASE}"


@pytest.fixture
def metal(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "root", metal=True)


def install(host: FakeHost, *, lock_timeout: int = 300, **options: Any) -> tuple[Finished, list[Event]]:
    wanted = {"driver_version": "550.163.01", "driver_url": "/driver.run", "lock_timeout": lock_timeout}
    write_runfile(host.root / "driver.run")
    return ask(host, Request("install", spec_to_json(parse_spec(wanted)), **options))


def notes(events: list[Event], word: str) -> list[str]:
    """Return the notes that have this word."""
    return [one.message for one in events if isinstance(one, Note) and word in one.message]


@pytest.mark.parametrize("check", [True, False])
def test_headers_that_nobody_has_are_told_before_anything_is_changed(metal: FakeHost, *, check: bool) -> None:
    del metal.available[_HEADERS]
    before = sorted(metal.root.rglob("*"))
    finished, _ = install(metal, check=check)
    (problem,) = finished.problems
    assert problem.what == f"no repository of this host has the headers of the running kernel {RELEASE}"
    assert problem.evidence == f"apt was asked for {_HEADERS}"
    assert "boot the newest kernel: apt-get install linux-image-amd64" in problem.next_step
    changed = {path for path in metal.root.rglob("*") if path not in before}
    assert {path.name for path in changed} <= {"driver.run", "lock", "gpuprov", "gpuprov.lock"}, changed
    assert all("install" not in command for command in metal.commands)


def test_the_repositories_are_asked_once_and_told_so(metal: FakeHost) -> None:
    assert f"asking the repositories for {_HEADERS}" in notes(install(metal, check=True)[1], "asking")
    metal.installed[_HEADERS] = "6.1.55-1"
    assert notes(install(metal, check=True)[1], "asking") == []
    # The second dry run reads the sources for the packages that it would install; the headers are not asked for again.
    asked = [one for one in metal.commands if "madison" in one]
    assert _HEADERS in asked[0] and not any(_HEADERS in one for one in asked[1:])
    assert metal.list_directory("/var/tmp") == ()


def test_who_does_not_install_packages_need_not_ask(metal: FakeHost) -> None:
    install(metal, check=True, steps=("docker",))
    assert not any("madison" in command for command in metal.commands)


def test_a_repository_that_can_not_be_asked_is_a_problem_among_the_others(metal: FakeHost) -> None:
    said = "E: Failed to fetch http://x/InRelease  Could not connect to x:80"
    metal._apt_get = lambda words: (100, said)  # type: ignore[method-assign]
    (metal.root / "sys/class/drm").mkdir(parents=True, exist_ok=True)
    (problem,) = install(metal, check=True)[0].problems
    assert problem.what == "the package index could not be refreshed: a repository can't be reached"
    assert metal.list_directory("/var/tmp") == ()


def test_an_answer_of_apts() -> None:
    text = (
        "linux-headers-6.1.0-13-amd64 | 6.1.55-1 | http://mirror.example/debian bookworm/main amd64 Packages\n"
        "linux-headers-6.1.0-13-amd64 | 6.1.52-1 | http://security.example bookworm-security/main amd64 Packages\n"
        "   linux |   6.1.55-1 | http://mirror.example/debian bookworm/main Sources\n"
        "N: Unable to locate package nothing\n"
    )
    assert apt.parse_madison(text) == {"linux-headers-6.1.0-13-amd64": ("6.1.55-1", "6.1.52-1")}


def test_the_copy_of_the_sources_follows_links(tmp_path: Path) -> None:
    """A site may keep its sources elsewhere, by links from their usual places."""

    class Linked(Scripted):
        copied: tuple[str | None, ...] = ()

        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            if argv[0] == "cp":
                words = [str(self.path(word)) if word.startswith("/") else word for word in argv]
                subprocess.run(words, check=False, capture_output=True)
            elif argv[-1] == "update":
                work = argv[argv.index("-c") + 1].rpartition("/")[0]
                self.copied = tuple(self.read_text(f"{work}/{path}") for path in ("sources.list", *parts))
            return super().run(argv, **more)

    host, parts = Linked(tmp_path), ("sources.list.d/docker.list", "auth.conf.d/site.conf")
    for folder in ("/etc/apt/site", "/etc/apt/site/sources.list.d", "/etc/apt/site/auth.conf.d", "/var/tmp"):
        host.make_directory(folder)
    for path in ("sources.list", *parts):
        host.write(f"/etc/apt/site/{path}", path.encode())
        name = path.partition("/")[0]
        host.make_link(f"/etc/apt/{name}", f"site/{name}")
    APT.offered(host, ("docker-ce",), ())
    assert host.copied == ("sources.list", *parts)


@pytest.mark.parametrize("verb", ["madison", "policy"])
def test_endless_apt_cache_does_not_mean_no_such_package(tmp_path: Path, verb: str) -> None:
    host = Scripted(tmp_path, {verb: (124, "")})
    host.make_directory("/var/tmp")
    answer = managers.ask(host, APT, ("linux-headers-6.1",), ())
    (problem,) = answer.problems
    assert answer.lacking(("linux-headers-6.1",)) == ()
    assert problem.what == "apt-cache does not tell what the repositories have" and verb in problem.evidence


def test_versions_that_the_preferences_refuse_are_not_offered() -> None:
    offered = {"libcuda1": ("535.274.02-1", "535.247.01-1~deb12u1"), "cuda-drivers": ("580.1-1",)}
    policy = """\
libcuda1:
  Installed: (none)
  Candidate: 535.247.01-1~deb12u1
  Version table:
     535.274.02-1 -1
        500 file:/srv/nvidia ./ Packages
     535.247.01-1~deb12u1 500
        500 file:/srv/debian ./ Packages
cuda-drivers:
  Installed: (none)
  Candidate: (none)
  Version table:
     580.1-1 -1
        500 file:/srv/nvidia ./ Packages
"""
    found = apt.not_refused(offered, policy)
    assert found == {"libcuda1": ("535.247.01-1~deb12u1",), "cuda-drivers": ("580.1-1",)}


def test_an_answer_of_dnfs() -> None:
    text = "kernel-devel 0:5.14.0-427.13.1.el9_4.x86_64\n\nkernel-devel 0:5.14.0-427.el9.x86_64\nLast metadata check\n"
    found = dnf.parse_repoquery(text)
    assert found == {"kernel-devel": ("0:5.14.0-427.13.1.el9_4.x86_64", "0:5.14.0-427.el9.x86_64")}
    answer = Offers("dnf", found)
    assert answer.lacking(("kernel-devel=5.14.0-427.13.1.el9_4", "kernel-devel=5.14.0-1.el9", "gcc")) == (
        "kernel-devel=5.14.0-1.el9",
        "gcc",
    )


def test_an_answer_of_zyppers() -> None:
    text = (
        "S  | Name                 | Type    | Version               | Arch   | Repository\n"
        "---+----------------------+---------+-----------------------+--------+------------------\n"
        "   | kernel-default-devel | package | 6.4.0-150600.23.7.3   | x86_64 | SLES15-SP6-Updates\n"
        "i+ | kernel-default       | package | 6.4.0-150600.21.3     | x86_64 | (System Packages)\n"
    )
    found = zypper.parse_search(text)
    assert found == {"kernel-default-devel": ("6.4.0-150600.23.7.3.x86_64",)}
    assert Offers("zypper", found).lacking(("kernel-default-devel=6.4.0-150600.23.7",)) == ()


def test_who_is_at_work_with_packages_is_waited_for_before_the_first_change(metal: FakeHost) -> None:
    with held_by_another(metal.root / "var/lib/dpkg/lock-frontend") as holder:
        (note,) = notes(install(metal, check=True)[1], "holds")
        assert f"(pid {holder.pid}" in note or "a process that can't be seen" in note
        assert note.endswith("holds the package manager's lock; a run waits up to 300 s for it")
        # Nobody waits for it who installs no packages.
        assert notes(install(metal, check=True, steps=("docker",))[1], "holds") == []
        before = sorted(metal.root.rglob("*"))
        finished, events = install(metal, lock_timeout=0)
        (problem,) = finished.problems
        assert problem.what == "another program holds the package manager's lock"
        assert not any(isinstance(one, ChangeDone) for one in events)
        made = {path.name for path in set(metal.root.rglob("*")) - set(before)}
        assert made <= {"gpuprov", "lock", "gpuprov.lock"}, made
    assert any(isinstance(one, ChangeDone) for one in install(metal)[1])


def test_the_lock_is_awaited_for_the_fabric_managers_packages_too(tmp_path: Path) -> None:
    """They are installed in the step `driver`, for they must match it."""
    host = SwitchHost(tmp_path / "root")
    with held_by_another(host.root / "var/lib/dpkg/lock-frontend"):
        assert notes(install(host, check=True, steps=("download", "driver"))[1], "holds the package manager's lock")
        finished, events = install(host, steps=("download", "driver"), lock_timeout=0)
    (problem,) = finished.problems
    assert problem.what == "another program holds the package manager's lock"
    planned = next(one for one in events if isinstance(one, Planned))
    assert any("nvidia-fabricmanager" in change.summary for change in planned.changes)
    assert not any(isinstance(one, ChangeStarted) for one in events)


def undrained(host: FakeHost, *, check: bool = False) -> tuple[Finished, list[Event]]:
    """Install a version of docker on a host that was not drained for it."""
    host.available["docker.io"] = "26.1"
    spec = spec_to_json(parse_spec({"driver_version": "550.163.01", "packages": ["docker.io=26.1"]}))
    request = Request("install", spec, check=check, steps=("packages",), require_drained=not check)
    return ask(host, request)


def test_what_disturbs_containers_is_not_done_on_a_host_that_is_not_drained(tmp_path: Path) -> None:
    finished, events = undrained(FakeHost(tmp_path / "root"))
    (problem,) = finished.problems
    assert problem.what == "the host is not drained, and what is left to do disturbs containers"
    assert "docker.io=26.1" in problem.evidence and "drains the host first" in problem.next_step
    assert not any(isinstance(one, ChangeStarted) for one in events)


def test_what_a_cut_off_run_left_is_not_undone_on_a_host_that_is_not_drained(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root")
    new_journal(host, "install").begin("reconfigure docker", "ReconfigureDocker", {})
    finished, events = undrained(host)
    (problem,) = finished.problems
    assert problem.what.startswith("the host is not drained, and the undo of an earlier run's interrupted change")
    assert all(argv[:2] == ("systemctl", "show") for argv in host.commands) and events[-1:] == [finished]
    # A look at the plan tells it, so that the host is drained.
    host.installed["docker.io"] = "26.1"
    _, events = undrained(host, check=True)
    (planned,) = (one for one in events if isinstance(one, Planned))
    assert planned.disturbs and not any(change.disturbs for change in planned.changes)

"""Real apt and dpkg of three Debian releases where it hurts: conflicts, kills, holds, locks, wrong signatures."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov.core.apply import apply_changes, resume_run
from gpuprov.core.journal import last_undoable_run, new_journal
from gpuprov.driver import fabric_manager
from gpuprov.facts.gpus import FabricFacts
from gpuprov.facts.host import gather
from gpuprov.packages.apt import APT
from gpuprov.packages.apt_changes import InstallPackages, RefreshPackageIndex, plan_holds
from gpuprov.packages.dpkg import gather_packages, missing, repair
from gpuprov.packages.sources import gather_pinned_out, pin_problems
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.plan.software import plan_driver_hold
from gpuprov.plan.steps import CHANGE_KINDS
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec, parse_spec
from tests.clock import has_ended
from tests.integration.apt_chroot import (
    NEEDS,
    RELEASES,
    ChrootHost,
    SiteServer,
    chroot_host,
    configure_site,
    site_server,
)
from tests.lab.repository import sign
from tests.lab.shell import wait_for
from tests.runs import as_a_run, ignore, tell, undo_last
from tests.unit.refused import refused

pytestmark = NEEDS
# A script that says that it runs, and waits as long as a file is there.
_WAITS = "#!/bin/sh\n[ -e /tmp/{flag} ] || exit 0\necho > /tmp/{flag}-runs\nsleep 60\n"

_FAILS = "#!/bin/sh\n[ ! -e /tmp/fails ] || { echo foreign: the licence server does not answer >&2; exit 1; }\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteServer]:
    """A repository with all that the tests below install."""
    with site_server(tmp_path_factory.mktemp("site")) as made:
        made.add("old-tool")
        made.add("new-tool", Conflicts="old-tool")
        for version in ("1.0", "2.0"):
            made.add("pinned", version)
        for version in ("580.178.04-1", "580.200.01-1"):
            made.add("nvidia-fabricmanager", version)
            made.add("bystander", version)
        made.add("later", Depends="library")
        made.add("library")
        made.add("needs-library", Depends="library | mta-a")
        made.add("mta-a", Provides="site-mta")
        made.add("mta-b", Provides="site-mta")
        made.add("solo", Provides="site-solo")
        waits = {f"DEBIAN/{when}": _WAITS.format(flag=when) for when in ("preinst", "postinst")}
        made.add("slow", files={**waits, "usr/share/slow": "x\n"}, Depends="library")
        made.add("torn", files=waits)
        made.add("plain")
        made.add("suggesting", Suggests="plain", Depends="library")
        made.add("foreign", files={"DEBIAN/postinst": _FAILS})
        made.add(
            "configured", files={"etc/configured.conf": "as packaged\n", "DEBIAN/conffiles": "/etc/configured.conf\n"}
        )
        yield made


@pytest.fixture(params=RELEASES)
def host(request: pytest.FixtureRequest, server: SiteServer, tmp_path: Path) -> Iterator[ChrootHost]:
    with chroot_host(request.param, tmp_path) as made:
        configure_site(made, server)
        yield made


def install(host: ChrootHost, *names: str) -> None:
    host.lock_timeout = 5
    InstallPackages(names).apply(host, tell)


def installed(host: ChrootHost) -> dict[str, str]:
    return dict(gather_packages(host).installed)


def refusal(host: ChrootHost, *names: str) -> GpuprovError:
    with pytest.raises(GpuprovError) as caught:
        install(host, *names)
    return caught.value


def test_what_would_be_removed_is_named_and_stays(host: ChrootHost) -> None:
    install(host, "old-tool")
    (problem,) = refusal(host, "new-tool").problems
    assert "new-tool could not be installed: other packages would have to go" in problem.what
    assert problem.evidence.endswith("The following packages will be REMOVED: old-tool")
    assert "apt-get remove old-tool" in problem.next_step
    assert "old-tool" in installed(host)


def test_apt_settings_of_a_site_remove_nothing_and_keep_nothing(host: ChrootHost) -> None:
    install(host, "needs-library")
    assert all(host.run(words).ok for words in (("apt-mark", "auto", "library"), ("dpkg", "--purge", "needs-library")))
    before = installed(host)
    assert "library" in before
    host.write("/etc/apt/apt.conf.d/99site", b'APT::Get::AutomaticRemove "true";\nAPT::Get::Remove "false";\n')
    as_a_run(host, InstallPackages(("plain",)))
    assert installed(host) == {**before, "plain": "1.0"}
    undo_last(host)
    assert installed(host) == before


# What apt.conf may hold for a person at a terminal; apt takes the last value of a name.
SITE_SETTINGS = (
    'Get::Download-Only "true"', 'Get::Simulate "true"', 'Get::Assume-No "true"', 'Get::Print-URIs "true"',
    'Get::Trivial-Only "true"', 'Get::Only-Upgrade "true"', 'Get::Purge "true"', 'Install-Suggests "true"',
    'Get::Download "false"',
)  # fmt: skip


def test_apt_settings_for_people_do_not_change_what_is_done(host: ChrootHost) -> None:
    install(host, "configured")
    host.write("/etc/configured.conf", b"as edited\n")
    host.require(("dpkg", "--remove", "configured"), "")
    before = installed(host)
    for setting in SITE_SETTINGS:
        host.write("/etc/apt/apt.conf.d/99site", f"APT::{setting};\n".encode())
        as_a_run(host, InstallPackages(("suggesting", "configured")))
        assert installed(host) == {**before, "suggesting": "1.0", "configured": "1.0", "library": "1.0"}, setting
        undo_last(host)
        assert installed(host) == before and host.read_text("/etc/configured.conf") == "as edited\n", setting


def test_hooks_of_apt_neither_ask_nor_restart(host: ChrootHost) -> None:
    """What needrestart, apt-listchanges and apt-listbugs heed (their manuals): each is called by a hook of apt's."""
    hooks = 'DPkg::Pre-Install-Pkgs {"env > /tmp/before";};\nDPkg::Post-Invoke {"env > /tmp/after";};\n'
    host.write("/etc/apt/apt.conf.d/99site", hooks.encode())
    install(host, "plain")
    for name in ("/tmp/before", "/tmp/after"):
        found = set((host.read_text(name) or "").splitlines())
        assert found > {"NEEDRESTART_SUSPEND=1", "APT_LISTCHANGES_FRONTEND=none", "APT_LISTBUGS_FRONTEND=none"}


@pytest.mark.parametrize("when", ["Pre-Install-Pkgs", "Pre-Invoke", "Post-Invoke"])
def test_a_hook_of_apt_that_fails_is_named(host: ChrootHost, when: str) -> None:
    host.write("/etc/apt/apt.conf.d/99site", f'DPkg::{when} {{"echo locked; exit 3";}};\n'.encode())
    (problem,) = refusal(host, "plain").problems
    assert "a hook of apt failed" in problem.what and "echo locked; exit 3" in problem.evidence
    assert "/etc/apt/apt.conf.d" in problem.next_step


def test_a_pin_that_keeps_a_package_out_is_told_with_its_line(host: ChrootHost) -> None:
    host.write("/etc/apt/preferences.d/ours", b"# nothing of it\nPackage: old-*\nPin: release *\nPin-Priority: -1\n")
    host.write("/etc/apt/preferences.d/ignored.bak", b"Package: *\nPin: release *\nPin-Priority: -1\n")
    (one,) = gather_pinned_out(host, ("old-tool", "new-tool", "pinned=1.0"))
    assert (one.name, one.places) == ("old-tool", ("/etc/apt/preferences.d/ours:2",))
    (problem,) = pin_problems((one,))
    assert "apt-cache policy old-tool: Candidate: (none), of 1.0" in problem.evidence
    host.remove("/etc/apt/preferences.d/ours")
    assert gather_pinned_out(host, ("old-tool",)) == ()


def test_a_virtual_package_of_several_asks_for_one_and_of_one_settles(host: ChrootHost) -> None:
    assert "virtual package, which several provide" in str(refusal(host, "site-mta"))
    for name in ("site-solo", "solo:all", "solo:amd64", "solo:native"):
        install(host, name)
        assert missing(gather_packages(host), (name,)) == ()


def test_a_pinned_version_is_held_and_moves_when_the_pin_does(host: ChrootHost) -> None:
    def settle(spec: HostSpec) -> list[str]:
        changes = PlanContext(gather(host), spec).package_changes
        as_a_run(host, *changes)
        assert PlanContext(gather(host), spec).package_changes == ()
        return [change.summary() for change in changes]

    spec = HostSpec(driver="preinstalled", docker="preinstalled", packages=("pinned=2.0",))
    before = installed(host)
    assert settle(spec)[1:] == ["install pinned=2.0", "hold pinned at this version"]
    assert host.run(("apt-mark", "showhold")).stdout == "pinned\n"
    older = replace(spec, packages=("pinned=1.0",))
    assert settle(older)[1:] == ["install pinned=1.0 (taking the hold off pinned)", "hold pinned at this version"]
    assert installed(host)["pinned"] == "1.0"
    assert settle(replace(spec, packages=("pinned",))) == ["no longer hold pinned"]
    assert host.run(("apt-mark", "showhold")).stdout == ""
    for _ in range(3):
        undo_last(host)
    assert installed(host) == before


def test_an_upgrade_leaves_the_fabric_manager_beside_a_run_file(host: ChrootHost) -> None:
    facts = replace(gather(host), fabric=FabricFacts(("0000:c1:00.0",)))
    source = source_of(facts, parse_spec({"driver_version": "580.178.04"}))
    for change in (*fabric_manager.plan(source)[:-1], *plan_driver_hold(source, coming=True)):
        change.apply(host, tell)
    install(host, "bystander=580.178.04-1")
    done = host.run(("apt-get", "--yes", "dist-upgrade"))
    assert done.ok, done.stderr
    versions = gather_packages(host).installed
    assert (versions["nvidia-fabricmanager"], versions["bystander"]) == ("580.178.04-1", "580.200.01-1")


def test_a_hold_of_somebody_elses_is_told_when_it_is_in_the_way(host: ChrootHost, server: SiteServer) -> None:
    install(host, "pinned=1.0")
    host.run(("apt-mark", "hold", "pinned"))
    assert plan_holds(gather_packages(host), ()) == ()
    server.add("wants-two", Depends="pinned (>= 2.0)")
    RefreshPackageIndex().apply(host, tell)
    found = str(refusal(host, "wants-two"))
    assert "wants-two could not be installed" in found and "apt-mark" in found


def kill_in(host: ChrootHost, flag: str, change: InstallPackages) -> None:
    """Begin the change as a run of its own process, and kill it with all that it started while a script waits."""
    (host.root / "tmp" / flag).touch()
    worker = os.fork()
    if worker == 0:
        # What System.run starts gets a session of its own; here it shall die with the run.
        os.setpgid(0, 0)
        apply_changes([change], host, new_journal(host, "install"), ignore)
        os._exit(1)
    wait_for("the package's script runs", (host.root / "tmp" / f"{flag}-runs").exists)
    (host.root / "tmp" / flag).unlink()
    started = descendants(worker)
    for pid in [worker, *started]:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(worker, 0)
    wait_for("what was killed has ended", lambda: all(map(has_ended, started)))


def descendants(parent: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for child in children for pid in (int(child), *descendants(int(child)))]


@pytest.mark.parametrize(("flag", "status"), [("preinst", "half-installed"), ("postinst", "half-configured")])
def test_what_a_kill_left_half_done_is_finished_and_can_be_undone(host: ChrootHost, flag: str, status: str) -> None:
    before = installed(host)
    change = InstallPackages(("slow",))
    kill_in(host, flag, change)
    assert host.run(("dpkg-query", "-W", "-f", "${db:Status-Status}", "slow")).stdout == status
    assert "slow" not in installed(host)
    assert APT.gather(host).unfinished["slow"] == status
    journal = resume_run(host, CHANGE_KINDS, ignore)
    assert journal is not None
    apply_changes([change], host, journal, ignore)
    journal.end("done")
    assert {"slow", "library"} <= installed(host).keys()
    assert host.run(("dpkg", "--audit")).stdout == ""
    # What the killed part had brought goes too.
    undo_last(host)
    assert installed(host) == before
    assert not host.exists("/usr/share/slow")


def test_a_killed_installation_is_undone_without_being_finished_first(host: ChrootHost) -> None:
    before = installed(host)
    kill_in(host, "postinst", InstallPackages(("slow",)))
    undo_last(host)
    assert installed(host) == before and host.run(("dpkg", "--audit")).stdout == ""


def break_foreign(host: ChrootHost) -> None:
    """Leave a package that is not gpuprov's half-configured: its own script fails, now and again."""
    (host.root / "tmp/fails").touch()
    host.run(("apt-get", "--yes", "install", "foreign"))
    assert APT.gather(host).unfinished["foreign"] == "half-configured"


def test_another_packages_failing_script_is_named_and_can_be_undone(host: ChrootHost) -> None:
    break_foreign(host)
    before = installed(host)
    problem = refused(as_a_run, host, InstallPackages(("plain",)))
    assert problem.what.endswith("could not be finished: a script of foreign failed")
    assert "foreign: the licence server does not answer" in problem.evidence
    assert "apt-get purge foreign" in problem.next_step
    assert installed(host) == before
    # Both ways of the next step work.
    host.run(("apt-get", "--yes", "purge", "foreign"))
    as_a_run(host, InstallPackages(("plain",)))
    assert "plain" in installed(host)


def test_another_packages_failing_script_does_not_prevent_an_undo(host: ChrootHost) -> None:
    before = installed(host)
    as_a_run(host, InstallPackages(("plain", "later")))
    break_foreign(host)
    undo_last(host)
    assert installed(host) == before
    assert APT.gather(host).unfinished == {"foreign": "half-configured"}


def test_an_own_script_that_fails_is_named(host: ChrootHost) -> None:
    (host.root / "tmp/fails").touch()
    error = refusal(host, "foreign")
    assert "a script of foreign failed" in str(error) and "licence server does not answer" in str(error)


def test_apt_alone_answers_0_over_half_a_package_and_we_do_not(host: ChrootHost) -> None:
    kill_in(host, "preinst", InstallPackages(("torn",)))
    assert host.run(("dpkg", "--configure", "-a")).returncode == 0
    assert host.run(("apt-get", "--yes", "install", "torn")).returncode == 0
    assert host.run(("dpkg-query", "-W", "-f", "${db:Status-Status}", "torn")).stdout == "half-installed"
    repair(host, tell)
    assert host.run(("dpkg-query", "-W", "-f", "${db:Status-Status}", "torn")).stdout == "installed"


def test_what_is_needed_since_stays_and_is_told(host: ChrootHost) -> None:
    before = installed(host)
    as_a_run(host, InstallPackages(("slow",)))
    host.run(("apt-get", "--yes", "install", "needs-library"))
    run = last_undoable_run(host)
    assert run is not None
    (entry,) = run.undoable
    assert InstallPackages.irreversible(host, entry.before, entry.outcome, ()) == (
        "library stays: needs-library, installed since, needs it",
    )
    undo_last(host)
    assert installed(host).keys() == {*before, "library", "needs-library"}


def test_configuration_that_a_removed_package_had_left_comes_back(host: ChrootHost) -> None:
    path = host.root / "etc/configured.conf"
    install(host, "configured")
    path.write_text("of the site\n")
    host.run(("apt-get", "--yes", "remove", "configured"))
    as_a_run(host, InstallPackages(("configured",)))
    path.write_text("changed once more\n")
    undo_last(host)
    assert path.read_text() == "of the site\n"
    assert host.run(("dpkg-query", "-W", "-f", "${db:Status-Status}", "configured")).stdout == "config-files"


def test_changed_configuration_that_would_be_lost_is_told(host: ChrootHost) -> None:
    change = InstallPackages(("configured",))
    before = change.capture(host)
    outcome = change.apply(host, tell)
    assert InstallPackages.irreversible(host, before, outcome, ()) == ()
    (host.root / "etc/configured.conf").write_text("of the site\n")
    told = InstallPackages.irreversible(host, before, outcome, ())
    assert told == ("/etc/configured.conf, changed since configured was installed, goes with it",)


# $1, $2: two files to lock as apt does.
_HOLD = "import fcntl, sys\nfile = open(sys.argv[1], 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)\nprint(flush=True)\ninput()"


def test_update_waits_for_the_lists_lock_and_names_its_holder(host: ChrootHost) -> None:
    """apt-get update itself fails at once, whatever DPkg::Lock::Timeout says: that is why."""
    lock = str(host.root / "var/lib/apt/lists/lock")
    with subprocess.Popen((sys.executable, "-c", _HOLD, lock), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        holder.stdout.readline()
        # -1: for ever.
        assert host.run(("apt-get", "-o", "DPkg::Lock::Timeout=-1", "update"), timeout=300).returncode == 100
        host.lock_timeout = 1
        with pytest.raises(GpuprovError) as caught:
            RefreshPackageIndex().apply(host, tell)
        assert f"(pid {holder.pid}: " in str(caught.value) and "waited 1 s" in str(caught.value)
        holder.stdin.close()
        host.lock_timeout = 300
        RefreshPackageIndex().apply(host, tell)


# -- signatures, each from a pristine index ----------------------------------------------------------------------------


@pytest.fixture
def repository(server: SiteServer, tmp_path: Path) -> Iterator[SiteServer]:
    """The repository, brought back to order afterwards."""
    yield server
    sign(server.folder, server.gnupg)


@pytest.fixture(params=RELEASES)
def fresh(request: pytest.FixtureRequest, repository: SiteServer, tmp_path: Path) -> Iterator[ChrootHost]:
    """A host that has never read the repository."""
    with chroot_host(request.param, tmp_path) as made:
        configure_site(made, repository, refreshed=False)
        yield made


def not_refreshed(host: ChrootHost) -> str:
    with pytest.raises(GpuprovError) as caught:
        RefreshPackageIndex().apply(host, tell)
    return str(caught.value)


def key_of(host: ChrootHost) -> Path:
    return host.root / "etc/apt/keyrings/gpuprov-site.gpg"


def test_another_key_is_refused(fresh: ChrootHost, repository: SiteServer, tmp_path: Path) -> None:
    with site_server(tmp_path / "stranger") as stranger:
        shutil.copy(stranger.folder / "InRelease", repository.folder)
    found = not_refreshed(fresh)
    assert "not signed with a key that this host trusts" in found and repository.url in found


def test_a_key_file_that_is_gone_is_told(fresh: ChrootHost, repository: SiteServer) -> None:
    """gpgv can't tell it from a wrong key, sqv names the file."""
    key_of(fresh).unlink()
    found = not_refreshed(fresh)
    assert "can't be read" in found or "not signed with a key that this host trusts" in found


def test_an_expired_key_is_told(fresh: ChrootHost, repository: SiteServer, tmp_path: Path) -> None:
    home = tmp_path / "expired"
    home.mkdir(mode=0o700)

    def gpg(*words: str, at: str = "20240115") -> bytes:
        argv = ("gpg", "--homedir", str(home), "--batch", "--yes", "--faked-system-time", f"{at}T000000", *words)
        return subprocess.run(argv, check=True, capture_output=True).stdout

    gpg("--passphrase", "", "--quick-gen-key", "expired <e@example.org>", "rsa3072", "sign", "never", at="20240101")
    lines = gpg("--with-colons", "--list-keys").decode().splitlines()
    fingerprint = next(line.split(":")[9] for line in lines if line.startswith("fpr:"))
    target, source = str(repository.folder / "InRelease"), str(repository.folder / "Release")
    gpg("--clearsign", "--output", target, source, at="20240601")
    gpg("--quick-set-expire", fingerprint, "20240201T000000")
    key_of(fresh).write_bytes(gpg("--export"))
    subprocess.run(("gpgconf", "--homedir", str(home), "--kill", "all"), check=True)
    found = not_refreshed(fresh)
    assert "a repository's key has expired" in found and repository.url in found


def test_a_changed_index_is_told(fresh: ChrootHost, repository: SiteServer) -> None:
    path = repository.folder / "InRelease"
    path.write_bytes(path.read_bytes().replace(b"Date: ", b"Date:  "))
    found = not_refreshed(fresh)
    assert "a repository's signature is wrong" in found and repository.url in found


def test_a_log_in_page_is_told(fresh: ChrootHost, repository: SiteServer) -> None:
    (repository.folder / "InRelease").write_text("<html>please log in</html>")
    assert "gave something else than its index" in not_refreshed(fresh)


INSECURE = b'APT::Get::AllowUnauthenticated "true";\nAcquire::AllowInsecureRepositories "true";\n'


def test_a_host_that_allows_unsigned_packages_gets_none_from_us(fresh: ChrootHost, repository: SiteServer) -> None:
    fresh.write("/etc/apt/apt.conf.d/99insecure", INSECURE)
    (repository.folder / "InRelease").unlink()
    assert "not signed with a key that this host trusts" in not_refreshed(fresh)
    # Somebody else refreshed the index in spite of that.
    assert fresh.run(("apt-get", "update")).returncode == 0
    with pytest.raises(GpuprovError, match="comes from a repository that is not signed"):
        InstallPackages(("solo",)).apply(fresh, tell)
    assert "solo" not in installed(fresh)

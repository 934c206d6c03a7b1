"""The way back from a driver to the .run that it replaced: kept, announced, restored, resumed after a kill."""

import base64
import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.run import run_request
from gpuprov.cdi.discover import discover
from gpuprov.core.journal import RUNS_DIRECTORY, new_journal, read_runs
from gpuprov.core.places import KEPT
from gpuprov.driver.installer import Installation
from gpuprov.driver.run_files import INCOMPLETE_MARK, RECORD, restoration
from gpuprov.driver_run import InstallDriver
from gpuprov.facts.boot import REBOOT_ASKED
from gpuprov.fleet.rolling import install_or_roll_back
from gpuprov.protocol import tables
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.events import Finished, Note, Sink
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import parse_spec, spec_to_json
from tests import simgpu
from tests.loopback import served
from tests.unit.ask import ask
from tests.unit.fake_host import FakeHost, Tree, write_runfile

pytestmark = pytest.mark.root
OLD, NEW = "535.261.03", simgpu.DRIVER_VERSION


class Killed(BaseException):
    """Ends a run as a kill does."""


class Site:
    """A host, and a web server with two drivers' files."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.releases: dict[str, Any] = {}
        for version in (OLD, NEW):
            write_runfile(folder / f"{version}.run", version)
        (folder / "root").mkdir()
        self.host = FakeHost(folder / "root")

    def call(self, command: str, version: str = NEW, *, check: bool = False, url: str = "", keep: bool = True) -> str:
        """Carry out a command; return its notes and problems."""
        self.outside(version)
        url = url or f"{self.url}/{version}.run"
        digest = self.host.sha256(url) if url.startswith("/") else _sha256(self.folder / f"{version}.run")
        values = {"driver_version": version, "driver_url": url, "driver_sha256": digest, "keep_driver": keep}
        spec = parse_spec({**values, "driver_mirror": f"{self.url}/mirror"})
        sent = {tables.RELEASES: self.releases} if self.releases else {}
        ended, events = ask(self.host, Request(command, spec_to_json(spec), check=check, tables=sent))
        assert ended.exit_code == ExitCode.DONE, ended.problems
        return "\n".join(event.message for event in events if isinstance(event, Note))

    def outside(self, version: str) -> None:
        """The kernel is the container host's, and has the driver that is asked for."""
        place = self.host.path("/proc/driver/nvidia/version")
        place.write_text(place.read_text().replace(OLD, version).replace(NEW, version))

    def kept(self) -> set[str]:
        return set(self.host.list_directory(KEPT))

    def served(self, url: str) -> Path:
        """Return the file that the web server gives for a URL."""
        return self.folder / url[len(self.url) + 1 :]

    def tree(self) -> Tree:
        """Return all files of the host; without the content of the installer's log."""
        return {**self.host.tree(), "/var/log/nvidia-installer.log": (0, 0, 0, 0, b"")}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with served(tmp_path) as url:
        yield Site(tmp_path, url)


def version(site: Site) -> str:
    return discover(site.host).library_version


def test_rollback_restores_the_driver_that_a_run_replaced(site: Site) -> None:
    site.call("install", OLD)
    first = site.tree()
    assert site.kept() == {f"{OLD}.run"}
    way = f"way back: driver {OLD} from {KEPT}/{OLD}.run"
    said = f"upgrade: driver {OLD} → {NEW}; stops no container; reboot: no; {way}"
    assert said in site.call("install", check=True).splitlines()
    assert said in site.call("install").splitlines()
    assert (version(site), site.kept()) == (NEW, {f"{OLD}.run", f"{NEW}.run"})
    assert site.host.path(KEPT).stat().st_mode & 0o777 == 0o700
    told = site.call("rollback", check=True)
    assert f"restores driver {OLD} from {KEPT}/{OLD}.run" in told and "no driver will remain" not in told
    site.call("rollback", OLD)
    assert (version(site), site.host.exists(INCOMPLETE_MARK)) == (OLD, False)
    assert site.tree() == first
    assert json.loads(site.host.read_text(RECORD) or "")["version"] == OLD
    site.call("uninstall", OLD)
    assert version(site) == ""


def test_a_rollback_of_this_run_undoes_no_other(site: Site) -> None:
    site.call("install", OLD)
    before = site.host.tree()
    for run_id, changed in (("another", False), ("", True)):
        ended, _ = ask(site.host, Request("rollback", run_id=run_id, arguments={"this_run": True}))
        assert ended.exit_code == ExitCode.DONE
        assert (ended.changed > 0, site.host.tree() != before) == (changed, changed)


def test_run_whose_only_change_fails_rolls_back_no_earlier_run(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.call("install", OLD)
    site.outside(NEW)
    ends: list[Finished] = []
    url, digest = f"{site.url}/{NEW}.run", _sha256(site.folder / f"{NEW}.run")

    def carry_out(request: Request, sink: Sink) -> Finished:
        take = lambda event: ends.append(event) if isinstance(event, Finished) else sink(event)  # noqa: E731
        run_request(request, take, site.host)
        return ends[-1]

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gpuprov.driver.run_files.fetch", full)
    spec = parse_spec({"driver_version": NEW, "driver_url": url, "driver_sha256": digest})
    ended = install_or_roll_back(Request("install", spec_to_json(spec)), lambda _: None, carry_out)
    assert ended.problems[0].what.startswith("the changes failed; the host was rolled back")
    assert [one.changed for one in ends] == [0, 0, 0]
    assert (version(site), read_runs(site.host)[0].end) == (OLD, "done")


@pytest.mark.parametrize("between", [False, True])
def test_rollback_of_this_run_covers_one_it_resumed_and_none_after_it(site: Site, *, between: bool) -> None:
    run = new_journal(site.host, "install", "cut off")
    run.begin("k", "unknown", {})
    run.belongs_to("mine")
    if between:
        new_journal(site.host, "install", "theirs").begin("k", "unknown", {})
    ended, _ = ask(site.host, Request("rollback", run_id="mine", arguments={"this_run": True}))
    expected = "another run has changed this host since" if between else "can't undo a change of kind 'unknown'"
    assert expected in ended.problems[0].what


def test_undoing_it_again_has_no_effect(site: Site) -> None:
    site.call("install", OLD)
    site.call("install")
    (entry,) = (one for one in read_runs(site.host)[-1].entries if one.kind == "InstallDriver")
    InstallDriver.undo(site.host, entry.before, entry.outcome)
    commands = len(site.host.commands)
    InstallDriver.undo(site.host, entry.before, entry.outcome)
    again = [command[0] for command in site.host.commands[commands:]]
    assert (version(site), set(again) & {"sh", "nvidia-uninstall"}) == (OLD, set())


@pytest.mark.parametrize("last", ["nvidia-uninstall", "sh"])
def test_a_killed_rollback_is_resumed(site: Site, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    site.call("install", OLD)
    first = site.tree()
    site.call("install")
    run = site.host.run

    def killed(argv: tuple[str, ...], **more: object) -> object:
        done = run(argv, **more)
        if argv[0].rpartition("/")[2] == last:
            raise Killed
        return done

    with monkeypatch.context() as now:
        now.setattr(site.host, "run", killed)
        with pytest.raises(Killed):
            site.call("rollback", OLD)
    assert site.host.exists(INCOMPLETE_MARK)
    site.call("rollback", OLD)
    assert site.tree() == first
    assert not site.host.exists(INCOMPLETE_MARK)


def test_a_driver_that_can_not_be_uninstalled_is_not_called_undone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    before = site.host.tree().keys()
    site.call("install")
    uninstall = site.host._uninstall
    monkeypatch.setattr(site.host, "_uninstall", lambda words: (1, "ERROR: the log of the installation is gone"))
    with pytest.raises(AssertionError, match=f"driver {NEW} could not be uninstalled, and is still there"):
        site.call("uninstall")
    assert (version(site), read_runs(site.host)[-1].undoable != ()) == (NEW, True)
    monkeypatch.setattr(site.host, "_uninstall", uninstall)
    site.call("uninstall")
    assert version(site) == "" and before <= site.host.tree().keys()


@pytest.mark.parametrize("command", ["rollback", "uninstall"])
@pytest.mark.parametrize("runs", [(OLD,), (OLD, NEW)])
def test_a_driver_that_somebody_installed_since_stays(site: Site, command: str, runs: tuple[str, ...]) -> None:
    for one in runs:
        site.call("install", one)
    write_runfile(site.host.path("/new.run"), "999.1")
    assert site.host.run(("sh", "/new.run", "--silent")).ok and version(site) == "999.1"
    restored = command == "rollback" and len(runs) == 2
    said = site.call(command, check=True)
    assert ("driver 999.1 stays: gpuprov did not install it" in said) is not restored
    site.call(command)
    assert version(site) == (OLD if restored else "999.1")


def test_installation_killed_before_its_file_is_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.call("install", OLD)
    rename = site.host.rename

    def killed(path: str, new: str) -> None:
        if new.startswith(KEPT):
            raise Killed
        rename(path, new)

    with monkeypatch.context() as now:
        now.setattr(site.host, "rename", killed)
        with pytest.raises(Killed):
            site.call("install")
    site.call("install")
    assert site.kept() == {f"{OLD}.run", f"{NEW}.run"}
    site.call("rollback", OLD)
    assert (version(site), site.host.exists(INCOMPLETE_MARK)) == (OLD, False)
    site.call("uninstall", OLD)
    assert version(site) == ""


def test_installation_killed_without_a_driver(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.call("install", OLD)

    def killed(words: tuple[str, ...]) -> tuple[int, str]:
        site.host._uninstall(())
        raise Killed

    with monkeypatch.context() as now:
        now.setattr(site.host, "_runfile", killed)
        with pytest.raises(Killed):
            site.call("install")
    assert version(site) == ""
    site.call("install")
    assert site.kept() == {f"{OLD}.run", f"{NEW}.run"}


def test_a_file_that_is_not_kept_is_fetched_again(site: Site) -> None:
    site.call("install", OLD, keep=False)
    assert site.kept() == set()
    site.call("install", keep=False)
    assert f"restores driver {OLD}, downloaded again from {site.url}/{OLD}.run" in site.call("rollback", check=True)
    site.call("rollback", OLD)
    assert version(site) == OLD


def test_a_download_that_fails_leaves_the_driver_that_is_there(site: Site) -> None:
    site.call("install", OLD, keep=False)
    site.call("install", keep=False)
    (site.folder / f"{OLD}.run").write_text("another file")
    site.host.make_directory(KEPT, 0o700)
    site.host.write(f"{KEPT}/{OLD}.run.part", b"of another file")
    with pytest.raises(AssertionError, match="is not the file that was asked for"):
        site.call("rollback", NEW)
    assert version(site) == NEW


def test_keep_driver_false_empties_the_folder(site: Site) -> None:
    site.call("install", OLD)
    assert site.kept() == {f"{OLD}.run"}
    site.call("install", OLD, keep=False)
    assert site.kept() == set()


def test_three_drivers_leave_two_files(site: Site) -> None:
    site.host.make_directory(KEPT, 0o700)
    site.host.write(f"{KEPT}/470.1.run", b"x")
    site.call("install", OLD)
    site.call("install")
    assert site.kept() == {f"{OLD}.run", f"{NEW}.run"}


def test_a_file_on_the_host_is_copied_and_its_copy_is_checked(site: Site) -> None:
    place = site.host.path("/home")
    place.mkdir()
    write_runfile(place / "mine.run", OLD)
    site.call("install", OLD, url="/home/mine.run")
    assert (place / "mine.run").exists()
    (place / "mine.run").write_text("of a user")
    site.call("install")
    # A kept file that has changed is not run.
    site.host.write(f"{KEPT}/{OLD}.run", b"changed")
    told = site.call("rollback", check=True)
    assert f"driver {OLD} can't be restored: its file, {KEPT}/{OLD}.run, has changed; no driver will remain" in told
    commands = len(site.host.commands)
    site.call("rollback", OLD)
    assert version(site) == ""
    assert not any(command[0] == "sh" for command in site.host.commands[commands:])


def by_hand(site: Site) -> str:
    """Install a driver that gpuprov has no record of, and put its file on the mirror; return the file's URL there."""
    simgpu.install_tree(site.host.root, version=OLD)
    folder = site.folder / "mirror" / OLD
    folder.mkdir(parents=True)
    name = f"NVIDIA-Linux-x86_64-{OLD}.run"
    (folder / name).write_bytes((site.folder / f"{OLD}.run").read_bytes())
    known = json.loads(json.dumps(tables.packaged(tables.RELEASES)))
    known["sha256"]["x86_64"][OLD] = _sha256(folder / name)
    site.releases = known
    return f"{site.url}/mirror/{OLD}/{name}"


def test_a_run_file_installed_by_hand_is_fetched_by_its_digest(site: Site) -> None:
    url = by_hand(site)
    libraries = {path for path in site.host.tree() if "libcuda" in path}
    assert f"way back: driver {OLD}, downloaded again from {url}" in site.call("install", check=True)
    site.call("install")
    assert version(site) == NEW
    for command in ("uninstall", "rollback"):
        assert f"restores driver {OLD}, downloaded again from {url}" in site.call(command, check=True)
    site.call("rollback", OLD)
    assert (version(site), site.host.exists(INCOMPLETE_MARK)) == (OLD, False)
    assert {path for path in site.host.tree() if "libcuda" in path} == libraries
    # As before: gpuprov has no record of a driver that it did not install.
    assert not site.host.exists(RECORD)


def test_an_uninstall_needs_no_driver_that_an_earlier_gpuprov_installed(site: Site) -> None:
    """Its journal has no record of how: the next run takes the driver for one that was installed by hand."""
    site.call("install", OLD)
    (journal,) = site.host.path(RUNS_DIRECTORY).iterdir()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for one in lines:
        if one.get("kind") == "InstallDriver":
            del one["before"]["record"], one["before"]["by_hand"]
    journal.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    site.host.remove(RECORD)
    site.host.remove_tree(KEPT)
    url = by_hand(site)
    assert url in site.call("install")
    site.served(url).unlink()
    site.call("uninstall")
    assert version(site) == ""


def test_a_mirror_without_the_replaced_file_is_said_before_the_upgrade(site: Site) -> None:
    url = by_hand(site)
    site.served(url).unlink()
    told = site.call("install", check=True)
    assert f"way back: driver {OLD} can't be restored: " in told
    assert url in told


@pytest.mark.parametrize("command", ["rollback", "uninstall"])
def test_a_driver_that_can_not_be_fetched_prevents_no_undo(site: Site, command: str) -> None:
    url = by_hand(site)
    site.call("install")
    site.served(url).unlink()
    expected = f"driver {OLD} can't be restored: {url} can't be had; no driver will remain installed"
    assert expected in site.call(command, check=True)
    assert version(site) == NEW
    assert expected in site.call(command)
    assert (version(site), site.host.exists(INCOMPLETE_MARK)) == ("", False)


def test_a_mirror_on_this_host_that_is_gone_is_said(site: Site) -> None:
    site.host.make_directory("/mirror")
    write_runfile(site.host.path(f"/mirror/{OLD}.run"), OLD)
    digest = _sha256(site.host.path(f"/mirror/{OLD}.run"))
    former = Installation(OLD, f"file:///mirror/{OLD}.run", digest, "x86_64", kernel_modules=False)
    assert restoration(site.host, OLD, former) == (f"driver {OLD}, downloaded again from {former.url}", True)
    site.host.remove(f"/mirror/{OLD}.run")
    assert restoration(site.host, OLD, former) == (
        f"driver {OLD} can't be restored: there is no /mirror/{OLD}.run",
        False,
    )


def test_uninstall_goes_on_where_a_download_fails(site: Site) -> None:
    url = by_hand(site)
    site.call("install")
    site.served(url).write_text("a proxy's page")
    told = site.call("uninstall")
    assert f"what {url} gave is not the file that was asked for; no driver will remain installed" in told
    assert version(site) == ""


def test_a_rollback_that_nobody_watches_removes_no_driver_for_nothing(site: Site) -> None:
    url = by_hand(site)
    site.call("install")
    site.served(url).unlink()
    whole = site.host.tree()
    ended, _ = ask(site.host, Request("rollback", arguments={"this_run": True}))
    assert [one.what for one in ended.problems] == [f"{url} can't be had"]
    assert {path: text for path, text in site.host.tree().items() if KEPT not in path} == whole


def test_a_driver_of_others_is_said_not_to_come_back(site: Site) -> None:
    old = "535.999.01"
    simgpu.install_tree(site.host.root, version=old)
    expected = f"driver {old} can't be restored: gpuprov has no record of its installation, nor its file"
    assert f"way back: {expected}" in site.call("install", check=True)
    site.call("install")
    assert f"{expected}; no driver will remain installed" in site.call("rollback", check=True)


@pytest.mark.parametrize("removes", ["the driver", "libcuda"])
def test_a_failed_installation_restores_the_driver(site: Site, monkeypatch: pytest.MonkeyPatch, removes: str) -> None:
    site.call("install", OLD)
    install = site.host._runfile
    whole = site.host.tree()

    def broken(words: tuple[str, ...]) -> tuple[int, str]:
        if OLD in words[0]:
            return install(words)
        if removes == "libcuda":
            for path in site.host.root.rglob("libcuda.so*"):
                path.unlink()
        else:
            site.host._uninstall(())
        site.host.write("/var/log/nvidia-installer.log", b"ERROR: Unable to find the kernel source tree\n")
        return 1, "ERROR: Unable to find the kernel source tree"

    monkeypatch.setattr(site.host, "_runfile", broken)
    with pytest.raises(AssertionError, match="was not installed"):
        site.call("install")
    assert (version(site), site.host.exists(INCOMPLETE_MARK)) == (OLD, False)
    assert {path for path in whole if "libcuda" in path} == {path for path in site.host.tree() if "libcuda" in path}


def with_modules(site: Site) -> tuple[dict[str, object], dict[str, object] | None]:
    """Return what the journal has of the last driver, as if the one before it had brought kernel modules."""
    (entry,) = (one for one in read_runs(site.host)[-1].entries if one.kind == "InstallDriver")
    record = {**json.loads(base64.b64decode(entry.before["record"]["content"])), "kernel_modules": True}
    content = base64.b64encode(json.dumps(record).encode()).decode()
    before = {**entry.before, "record": {**entry.before["record"], "content": content}}
    return before, dict(entry.outcome or {})


@pytest.mark.parametrize("runs", [OLD, NEW])
def test_only_another_driver_that_stays_loaded_asks_for_a_reboot(site: Site, runs: str) -> None:
    site.call("install", NEW)
    site.call("install", OLD)
    site.outside(runs)
    InstallDriver.undo(site.host, *with_modules(site))
    assert version(site) == NEW
    installed = next(command for command in reversed(site.host.commands) if command[0] == "sh")
    assert "--skip-module-load" in installed
    reasons = json.loads(site.host.read_text(REBOOT_ASKED) or '{"reasons": []}')["reasons"]
    assert reasons == ([f"the kernel still runs driver {OLD}, installed is {NEW}"] if runs == OLD else [])


def test_an_old_installer_waits_for_a_reboot(site: Site) -> None:
    """535's does not know how to work beside a loaded driver."""
    site.call("install", OLD)
    site.call("install", NEW)
    with pytest.raises(GpuprovError, match="can't be unloaded"):
        InstallDriver.undo(site.host, *with_modules(site))
    assert (version(site), site.host.exists(INCOMPLETE_MARK)) == (NEW, False)

"""One run at a time: real processes, a real lock."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprov.core.lock import LOCK_PATH, host_lock, try_lock
from gpuprov.core.system import System
from gpuprov.protocol.errors import GpuprovError
from tests.unit.refused import refused

HOLD = """
import sys
from gpuprov.core.lock import host_lock
from gpuprov.core.system import System
from pathlib import Path
class Below(System):
    def path(self, path):
        return Path(path) if path.startswith("/proc") else super().path(path)
system = Below(sys.argv[1])
with host_lock(system, pid=system.own_pid(), command="install", since="12:00", wait_seconds=0, tell=print) as note:
    note("step 4 of 10")
    child = None
    if sys.argv[2] == "child":
        script = "echo started >&2; while test -d $1/run && ! test -e $1/over; do sleep 0.05; done"
        System().run(("sh", "-c", script, "sh", sys.argv[1]), on_line=lambda line: print(line, flush=True))
    print("held", flush=True)
    sys.stdin.read()
"""


class Below(System):
    """A temporary root with the machine's own /proc."""

    def read_text(self, path: str) -> str | None:
        return System().read_text(path) if path.startswith("/proc") else super().read_text(path)

    def list_directory(self, path: str) -> tuple[str, ...]:
        return System().list_directory(path) if path.startswith("/proc") else super().list_directory(path)

    def path(self, path: str) -> Path:
        return Path(path) if path.startswith("/proc") else super().path(path)

    def sleep(self, seconds: float) -> None:
        """End what a killed run left, for which somebody waits now."""
        self.path("/over").touch()
        super().sleep(seconds)


@pytest.fixture
def system(tmp_path: Path) -> System:
    (tmp_path / "run").mkdir()
    return Below(str(tmp_path))


def hold(root: Path, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(root), how], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def take(system: System, wait_seconds: int) -> list[str]:
    told: list[str] = []
    with host_lock(system, pid=1, command="install", since="now", wait_seconds=wait_seconds, tell=told.append):
        pass
    return told


def test_the_second_run_names_the_holder(system: System, tmp_path: Path) -> None:
    with hold(tmp_path, "alone") as first:
        said = str(refused(take, system, 5))
        first.kill()
    assert f"pid {first.pid}: gpuprov install, since 12:00, step 4 of 10" in said


def test_a_killed_holder_leaves_the_lock_free(system: System, tmp_path: Path) -> None:
    with hold(tmp_path, "alone") as first:
        first.kill()
        first.wait()
        assert take(system, 0) == []


@pytest.mark.root
def test_what_a_killed_run_left_running_is_waited_for_and_named(system: System, tmp_path: Path) -> None:
    with hold(tmp_path, "child") as first:
        first.kill()
        first.wait()
        with pytest.raises(GpuprovError, match="still goes on") as caught:
            take(system, 0)
        # Either: the shell becomes sleep a moment after it has said so.
        assert re.search(r"(sleep|sh) \(pid", str(caught.value))
        told = take(system, 300)
        assert len(told) == 1
        assert re.search(r"(sleep|sh) \(pid", told[0])


def test_a_spoiled_lock_file_holds_nobody_up(system: System, tmp_path: Path) -> None:
    (tmp_path / LOCK_PATH.lstrip("/")).write_text("garbage")
    assert take(system, 0) == []


def test_a_lock_that_cannot_be_opened_is_a_sentence(system: System, tmp_path: Path) -> None:
    (tmp_path / LOCK_PATH.lstrip("/")).mkdir()
    with pytest.raises(GpuprovError, match=r"the lock .* can.t be opened"):
        take(system, 0)


@pytest.mark.root
def test_the_lock_is_roots_alone_and_one_of_an_earlier_version_becomes_it(system: System, tmp_path: Path) -> None:
    path = tmp_path / LOCK_PATH.lstrip("/")
    assert take(system, 0) == []
    assert path.stat().st_mode & 0o777 == 0o600
    for mode in (0o644, 0o666, 0o400):
        path.chmod(mode)
        with try_lock(system) as held:
            assert held
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.root
def test_a_number_that_went_to_another_process_is_no_holder(system: System, tmp_path: Path) -> None:
    """The holder was killed, its command goes on, and another program has its number by now."""
    with hold(tmp_path, "child") as first, subprocess.Popen(("cat",), stdin=-1) as other:
        first.kill()
        first.wait()
        text = f'{{"pid": {other.pid}, "command": "install", "since": "12:00"}}'
        (tmp_path / LOCK_PATH.lstrip("/")).write_text(text)
        with pytest.raises(GpuprovError, match="a command of an earlier, killed run still goes on"):
            take(system, 0)
        (tmp_path / "over").touch()
        other.kill()


@pytest.mark.root
def test_another_users_process_that_holds_it_is_named_as_such(system: System, tmp_path: Path) -> None:
    path = tmp_path / LOCK_PATH.lstrip("/")
    path.touch(0o644)
    for folder in path.parents[:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    command = ("flock", "--no-fork", str(path), "sh", "-c", "echo held; read line")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=65534, group=65534) as other:
        assert other.stdout is not None
        other.stdout.readline()
        said = str(refused(take, system, 0))
        other.kill()
    assert "a process that is not root's keeps this host locked" in said
    assert f"sh (pid {other.pid}) of user 65534 has {LOCK_PATH} open" in said
    assert path.stat().st_mode & 0o777 == 0o600

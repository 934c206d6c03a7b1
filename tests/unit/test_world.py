"""The world that tests run in, and the guard that watches what is not of it."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import world
from tests.left_behind import look
from tests.spoilt import compare


def test_environment_umask_and_home_are_the_same_everywhere() -> None:
    names = {name for name in os.environ if not name.startswith(("GPUPROV_", "PYTEST", "PIP_", "DEBIAN", "FAKETIME"))}
    assert names - {"SIMGPU_CACHE", "LD_PRELOAD"} == {"PATH", "LANG", "TZ", "USER", "HOME"}
    assert os.umask(0o022) == 0o022


@pytest.mark.root
def test_devices_and_state_of_the_machine_are_not_seen() -> None:
    assert socket.gethostname() == socket.gethostbyaddr("127.0.0.1")[1][0] == "gpuprov-tests"
    outside = Path(f"/proc/{os.environ[world.OUTSIDE]}/root")
    for path in map(Path, ("/dev", "/run", "/etc", os.environ["HOME"])):
        assert not path.samefile(outside / path.relative_to("/"))
    assert not [path for path in Path("/dev").iterdir() if path.name.startswith("nvidia")]


@pytest.mark.root
def test_temporary_folders_lie_in_memory_if_there_is_enough(tmp_path: Path) -> None:
    if world.MEMORY.is_mount():
        assert tmp_path.is_relative_to(world.MEMORY)
        assert shutil.disk_usage(world.MEMORY).total == world.MEMORY_SIZE
    else:
        assert world.free_memory() < world.MEMORY_SIZE + world.MEMORY_LEFT


@pytest.mark.parametrize("place", ["etc/passwd", "run/new", "var/lib/new", "dev/nvidia0", "dev/char/195:0"])
def test_the_guard_sees_names_modes_and_contents(tmp_path: Path, place: str) -> None:
    for folder in ("etc", "run", "var/lib", "dev/char"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "etc/passwd").write_text("root\n")
    before = look(str(tmp_path))
    for changed in ("dev/char/4:1", "dev/loop0p1", "run/sshd.pid", "etc/mtab"):
        (tmp_path / changed).touch()
    assert look(str(tmp_path)) == before
    (tmp_path / place).write_text("more than before\n")
    after = look(str(tmp_path))
    assert {path for path in after if before.get(path) != after[path]} == {f"/{place}"}
    (tmp_path / place).chmod(0o640)
    assert look(str(tmp_path)) != after


# The second leaves a file in its machine's /run and gives /dev/null away, which the third finds as it was.
_TESTS = """
import os
from pathlib import Path

def test_clean():
    pass

def test_careless():
    os.chown("/dev/null", 100000, 100000)
    Path("/run/gpuprov.lock").touch()

def test_after():
    assert os.stat("/dev/null").st_uid == 0
"""
_MACHINE = """
mount -t tmpfs none /run && mknod -m 666 /run/null.sock c 1 3 && mount --bind /run/null.sock /dev/null || exit
GPUPROV_WORLD=$$ exec "$@"
"""


@pytest.mark.root
def test_a_test_that_changes_the_machine_fails_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    argv = ("unshare", "--mount", "sh", "-c", _MACHINE, "sh", sys.executable, "-m", "pytest", "-p", "tests.left_behind")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUPROV_TEST")}
    done = subprocess.run(
        (*argv, "-c", str(tmp_path / "pytest.ini"), str(tmp_path / "test_it.py")), cwd=world.REPOSITORY,
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "/run/gpuprov.lock: new\nwhile these tests ran:\n" in done.stdout
    assert "test_it.py::test_careless\n" in done.stdout
    assert "the test has changed mode or owner of /dev/null" in done.stdout
    assert "3 passed, 2 errors" in done.stdout


def test_another_outcome_on_the_spoilt_machine_is_named() -> None:
    clean = {"tests.unit.test_a::one": "passed", "tests.unit.test_a::two": "skipped: []", "tests.other::x": "passed"}
    assert compare(clean, {**clean, "tests.unit.test_a::one": "failure: ['no']"}, ("tests/unit", "tests/other.py")) == [
        "tests.unit.test_a::one: clean: passed; spoilt: failure: ['no']"
    ]
    assert compare(clean, {"tests.unit.test_a::one": "passed"}, ("tests/unit",)) == [
        "tests.unit.test_a::two: clean: skipped: []; spoilt: not run"
    ]

"""`--root`: what a hostile image, a second run or a wrong folder can do to the builder; the agent is a script."""

import json
import multiprocessing
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuprov.fleet.agent_file import Agent
from gpuprov.fleet.chroot import run_in_root
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import Event, Finished
from gpuprov.protocol.request import Request

pytestmark = pytest.mark.root
# Does in the image, as root, what it is told to, and says what came of each line.
HOSTILE = """
import json, os, signal, socket, sys, time
sys.stdin.readline()
said = []
for line in {lines!r}:
    try:
        said.append(str(eval(line)))
    except OSError as error:
        said.append(type(error).__name__ + " " + str(error.errno))
print(json.dumps({{"event": "Finished", "exit_code": 0, "summary": json.dumps(said)}}))
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Give a root whose /usr is a mount of its own, as a disk with several partitions has."""
    place = tmp_path / "root"
    for name in ("proc", "sys", "dev", "run", "etc", "usr", "tmp"):
        (place / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        if Path("/", name).exists():
            (place / name).symlink_to(f"usr/{name}")
    (place / "etc/resolv.conf").write_text("# the image's\n")
    subprocess.run(("mount", "--bind", "-o", "ro", "/usr", str(place / "usr")), check=True)
    yield place
    subprocess.run(("umount", str(place / "usr")), check=True)


def run(root: Path, *lines: str, command: str = "install", stop: Callable[[], bool] = lambda: False) -> list[str]:
    events: list[Event] = []
    content = HOSTILE.format(lines=lines).encode()
    run_in_root(str(root), Request(command), Agent(content, "0"), events.append, stop)
    (last,) = events
    assert isinstance(last, Finished)
    said = json.loads(last.summary)
    assert isinstance(said, list)
    return said


def test_mounts_below_the_root_are_seen(root: Path) -> None:
    assert run(root, "os.path.exists('/usr/bin')") == ["True"]


def test_the_builder_is_not_changed_by_what_runs_in_the_image(root: Path) -> None:
    null, name = stat.S_IMODE(Path("/dev/null").stat().st_mode), socket.gethostname()
    resolver = Path("/etc/resolv.conf").read_bytes()
    limit = Path("/proc/sys/kernel/threads-max").read_text()
    said = run(
        root, "os.chmod('/dev/null', 0o600)", "open('/dev/null', 'w').write('x')",
        "open('/etc/resolv.conf', 'a').write('# hostile')", "open('/proc/sys/kernel/threads-max', 'r+').write('')",
        "socket.sethostname('hostile')",
        "[int(line.split()[1], 16) >> 16 & 1 for line in open('/proc/self/status') if line.startswith('CapEff')]",
    )  # fmt: skip
    assert said == ["OSError 30", "1", "9", "OSError 30", "None", "[0]"]
    assert stat.S_IMODE(Path("/dev/null").stat().st_mode) == null and socket.gethostname() == name
    assert Path("/etc/resolv.conf").read_bytes() == resolver
    assert Path("/proc/sys/kernel/threads-max").read_text() == limit
    assert (root / "etc/resolv.conf").read_text() == "# the image's\n"


@pytest.mark.parametrize("target", ["../run/systemd/resolve/stub-resolv.conf", "/var/run/NetworkManager/resolv.conf"])
def test_names_are_looked_up_as_the_builder_does(root: Path, target: str) -> None:
    """The link of an image leads nowhere: what is in /run comes with the boot."""
    (root / "var").mkdir()
    (root / "var/run").symlink_to("../run")
    (root / "etc/resolv.conf").unlink()
    (root / "etc/resolv.conf").symlink_to(target)
    assert run(root, "open('/etc/resolv.conf').read()") == [Path("/etc/resolv.conf").read_text()]


def test_a_root_that_is_mounted_noexec_is_named(root: Path) -> None:
    subprocess.run(("mount", "-o", "remount,bind,ro,noexec", str(root / "usr")), check=True)
    with pytest.raises(GpuprovError, match=r"no program of .* can run: it is mounted noexec") as caught:
        run(root, "1")
    assert caught.value.problems[0].next_step == f"findmnt -T {root}/usr; mount -o remount,exec MOUNT"


def test_an_installation_into_a_read_only_root_is_refused(root: Path) -> None:
    """Inside, Python found no folder for temporary files, and the advice was to make room in /tmp."""
    subprocess.run(("mount", "--bind", "-o", "ro", str(root), str(root)), check=True)
    try:
        with pytest.raises(GpuprovError, match="is mounted read-only") as caught:
            run(root, "1")
    finally:
        subprocess.run(("umount", str(root)), check=True)
    assert caught.value.problems[0].next_step == f"findmnt -T {root}; mount -o remount,rw MOUNT"


def test_the_builders_docker_is_not_named_inside(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2375")
    assert run(root, "os.environ.get('DOCKER_HOST')") == ["None"]


def refused(root: Path) -> bool:
    try:
        return run(root, "1") != ["1"]
    except GpuprovError as error:
        assert "another gpuprov run works in" in str(error)
        return True


def started(root: Path) -> multiprocessing.process.BaseProcess:
    """Return a run that waits for a writer of tmp/first."""
    lines = "os.mkfifo('/tmp/first')", "open('/tmp/first').read()"
    first = multiprocessing.get_context("fork").Process(target=run, args=(root, *lines))
    first.start()
    while not (root / "tmp/first").exists():
        assert first.is_alive()
        time.sleep(0.01)
    return first


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_run_is_refused_until_the_processes_of_the_first_have_ended(root: Path, *, killed: bool) -> None:
    first = started(root)
    with (root / "tmp/first").open("w"):
        if killed:
            first.kill()
            first.join()
        assert refused(root)
        assert run(root, "1", command="verify") == ["1"]
    first.join()
    while killed and refused(root):
        time.sleep(0.01)
    assert not refused(root)


def test_a_killed_run_leaves_no_copy_of_the_agent(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "places"))
    (tmp_path / "places").mkdir()
    first = started(root)
    with (root / "tmp/first").open("w"):
        first.kill()
        first.join()
    assert list((tmp_path / "places").iterdir()) == []
    while refused(root):
        time.sleep(0.01)


def test_another_path_of_this_machines_root_is_refused(tmp_path: Path) -> None:
    subprocess.run(("mount", "--bind", "/", str(tmp_path)), check=True)
    try:
        with pytest.raises(GpuprovError, match="it is this machine's own"):
            run(tmp_path, "1")
    finally:
        subprocess.run(("umount", str(tmp_path)), check=True)


def test_a_root_from_which_a_container_runs_is_refused(root: Path) -> None:
    words = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "chroot", str(root), "sh", "-c", "echo; read x")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as container:
        assert container.stdout is not None
        container.stdout.readline()
        with pytest.raises(GpuprovError, match="a system runs from"):
            run(root, "1")
        assert run(root, "1", command="verify") == ["1"]
        container.communicate(b"\n")
    assert run(root, "1") == ["1"]


def test_a_stop_reaches_the_agent_inside(root: Path, tmp_path: Path) -> None:
    ready = root / "tmp/ready"
    lines = (
        "signal.signal(signal.SIGTERM, lambda *_: said.append('asked to stop'))", "open('/tmp/ready', 'w').close()",
        "[time.sleep(0.1) for _ in range(3000) if 'asked to stop' not in said] and None",
    )  # fmt: skip
    assert "asked to stop" in run(root, *lines, stop=ready.exists)


def test_programs_of_another_architecture_are_named(tmp_path: Path) -> None:
    for name in ("proc", "sys", "dev", "run", "etc", "usr/bin", "bin"):
        (tmp_path / name).mkdir(parents=True)
    # An executable for s390 (e_machine 22), 64 bits, little endian: no kernel runs it.
    program = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\x16\x00\x01\x00\x00\x00" + bytes(40)
    for name in ("usr/bin/python3", "bin/sh"):
        (tmp_path / name).write_bytes(program)
        (tmp_path / name).chmod(0o755)
    with pytest.raises(GpuprovError, match="are of another architecture") as caught:
        run(tmp_path, "1")
    assert "Exec format error" in caught.value.problems[0].evidence

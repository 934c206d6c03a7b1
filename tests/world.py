"""The world that tests run in: the machine's programs without the machine's state.

    python -m tests.world COMMAND …      runs a command in one, as tests/conftest.py runs pytest

For root it is a mount and a UTS namespace: /dev and /run are new, /etc is a copy, /var is an overlay, /usr/local and
the home folder are empty. What tests leave there goes with it. Network, processes, cgroups, /tmp and the clone are the
machine's.
Everybody gets the environment below, and umask 022; an ordinary user also an empty home folder.
"""

import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# The process that waits outside: /proc/PID/root is the machine as it is.
OUTSIDE = "GPUPROV_WORLD"
# Libraries for the command alone: the clock of tests/spoilt.py.
PRELOAD = "GPUPROV_PRELOAD"

# The environment of all tests.
_FIXED = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "USER": pwd.getpwuid(os.geteuid()).pw_name,
    "DEBIAN_FRONTEND": "noninteractive",
}
# And what goes through: our own variables, pytest's options, and what fetching packages needs. Proxies and certificates
# for all programs do not, because gpuprov's own downloads would heed them: pip and apt get them in their own words.
_PASSED = ("GPUPROV_", "FAKETIME", "PYTEST_ADDOPTS", "DEBIAN_MIRROR", "SIMGPU_CACHE", "PIP_")
_PACKAGE_FILES = (".config/pip/pip.conf", ".pip/pip.conf", ".netrc")
_APT_PROXY = Path("/etc/apt/apt.conf.d/99gpuprov-tests")

# An overlay can't be the upper layer of an engine's own.
_STORES = ("/var/lib/docker", "/var/lib/containerd", "/var/lib/containers")
_LOCAL = ("bin", "etc", "include", "lib", "sbin", "share")
# Pytest's temporary folders, and a place in memory for those of unit tests: tests/unit/conftest.py.
TEMPORARY = Path(f"/tmp/pytest-of-{_FIXED['USER']}")
MEMORY = TEMPORARY / "memory"
MEMORY_SIZE = 512 << 20
# What must be free beside it, for hosts, engines and the virtual machine.
MEMORY_LEFT = 5 << 29
_PLAIN_NODES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
_MACHINE_NODES = ("fuse", "kvm", "net/tun", "loop-control", "kmsg")
_LOOPS = 64
_ROOM = Path("/run/world")
_NAME = "gpuprov-tests"


def run(command: Sequence[str]) -> int:
    """Run a command in a world of its own, and return its exit code."""
    with _room() as (room, lock):
        inside = [sys.executable, str(Path(__file__).resolve()), "--inside", str(room), *command]
        if os.geteuid() == 0:
            inside = ["unshare", "--mount", "--uts", "--propagation", "private", *inside]
        environment = {**os.environ, OUTSIDE: str(os.getpid())}
        # Ctrl-C reaches the whole terminal. A handler, unlike what nohup and `&` of a shell ignore, is not inherited.
        numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
        before = {one: signal.signal(one, lambda *_: None) for one in numbers}
        process = subprocess.Popen(inside, env=environment, pass_fds=(lock,))
        for one in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, lambda number, _: process.send_signal(number))
        try:
            code = process.wait()
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
        return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _room() -> Iterator[tuple[Path, int]]:
    """Give a folder on a real file system for what the world writes; those that killed runs have left are removed."""
    cache = REPOSITORY / ".cache" if os.geteuid() == 0 else Path(tempfile.gettempdir())
    cache.mkdir(exist_ok=True)
    prefix = f"world-{os.geteuid()}-"
    with contextlib.ExitStack() as stack:
        # Nobody else takes a new room for one that was left.
        with _locked(cache, fcntl.LOCK_EX):
            for left in cache.glob(f"{prefix}*"):
                with contextlib.suppress(OSError), _locked(left):
                    shutil.rmtree(left)
            room = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
            lock = stack.enter_context(_locked(room))
        yield room, lock
        shutil.rmtree(room, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> Iterator[int]:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, how)
        yield lock
    finally:
        os.close(lock)


# -- inside ------------------------------------------------------------------------------------------------------------


def _inside(room: Path, command: Sequence[str]) -> None:
    """Furnish the world and become the command."""
    os.umask(0o022)
    folder = Path.cwd()
    home = room / "home"
    home.mkdir(mode=0o700)
    if os.geteuid() == 0:
        home = Path(pwd.getpwuid(0).pw_dir)
        _furnish(room, home)
        os.chdir(folder)
    else:
        _copy(_texts(Path(pwd.getpwuid(os.geteuid()).pw_dir)), home)
    os.execve(command[0], list(command), _environment(home))


def _environment(home: Path) -> dict[str, str]:
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
    made = {**_FIXED, **passed, "HOME": str(home)}
    proxy = _first("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    if proxy:
        made.setdefault("PIP_PROXY", proxy)
    bundle = _first("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
    if bundle:
        made.setdefault("PIP_CERT", bundle)
    if PRELOAD in made:
        made["LD_PRELOAD"] = made[PRELOAD]
    return made


def _first(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _furnish(room: Path, home: Path) -> None:
    nodes = {name: Path("/dev", name).stat() for name in _MACHINE_NODES if Path("/dev", name).exists()}
    texts, resolver = _texts(home), Path("/etc/resolv.conf").resolve()
    servers = resolver.read_text() if resolver.exists() else ""
    kept = _kept(home)

    # A copy of what another run has mounted would keep its disks in use.
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in (place for place in mounted if "/.cache/" in place):
        subprocess.run(("umount", "--lazy", place), capture_output=True, check=False)
    _mount("-t", "tmpfs", "-o", "mode=755", "gpuprov-run", "/run")
    for number, path in enumerate(kept):
        (_ROOM / f"kept{number}").mkdir(parents=True)
        _mount("--rbind", str(path), str(_ROOM / f"kept{number}"))
    own = _ROOM / "own"
    own.mkdir(parents=True, exist_ok=True)
    _mount("--bind", str(room), str(own))
    for folder in (own / "upper", own / "work", *(own / "local" / name for name in _LOCAL)):
        folder.mkdir(parents=True)
    _mount("-t", "overlay", "-o", f"lowerdir=/var,upperdir={own}/upper,workdir={own}/work", "gpuprov-tests", "/var")
    # What installs packages on the machine meanwhile changes /etc, and what lies below an overlay may not change.
    subprocess.run(("cp", "--archive", "/etc", str(own / "etc")), check=True)
    # Another run of pytest would close the folder of temporary files to user namespaces.
    for folder in (own / "temporary", TEMPORARY):
        folder.mkdir(mode=0o700, exist_ok=True)
    places = {"etc": "/etc", "local": "/usr/local", "home": str(home), "temporary": str(TEMPORARY)}
    for name, place in places.items():
        _mount("--bind", str(own / name), place)
    if free_memory() >= MEMORY_SIZE + MEMORY_LEFT:
        MEMORY.mkdir(mode=0o700)
        _mount("-t", "tmpfs", "-o", f"mode=700,size={MEMORY_SIZE}", "gpuprov-memory", str(MEMORY))
    _devices(nodes)
    for number, store in enumerate(_STORES):
        (own / f"store{number}").mkdir(mode=0o710)
        Path(store).mkdir(parents=True, exist_ok=True)
        _mount("--bind", str(own / f"store{number}"), store)
    for number, path in enumerate(kept):
        path.mkdir(parents=True, exist_ok=True)
        _mount("--rbind", str(_ROOM / f"kept{number}"), str(path))
    subprocess.run(("umount", "--recursive", "--lazy", *map(str, _ROOM.iterdir())), check=True)
    shutil.rmtree(_ROOM)

    Path("/run/lock").mkdir()
    Path("/run/lock").chmod(0o1777)
    _copy(texts, home)
    if resolver.is_relative_to("/run"):
        resolver.parent.mkdir(parents=True, exist_ok=True)
        resolver.write_text(servers)
    _APT_PROXY.write_text(
        "".join(
            f'Acquire::{scheme}::Proxy "{os.environ[f"{scheme}_proxy"]}";\n'
            for scheme in ("http", "https")
            if os.environ.get(f"{scheme}_proxy")
        )
    )
    socket.sethostname(_NAME)
    Path("/etc/hostname").write_text(f"{_NAME}\n")
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost {_NAME}\n::1 localhost ip6-localhost ip6-loopback\n")


def free_memory() -> int:
    """Return how many bytes of memory the machine has left, and this process's control groups."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = [int(memory["MemAvailable"].split()[0]) << 10]
    group = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/"))
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            found.append(int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    return min(found)


def _kept(home: Path) -> list[Path]:
    """Return what must be seen as it is below what is covered: the clone, and this interpreter."""
    covered = ["/var", "/usr/local", "/etc", "/run", "/dev", str(home)]
    wanted = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)]
    return [path for path in wanted if any(path.is_relative_to(place) for place in covered) and path != Path("/usr")]


def _devices(nodes: dict[str, os.stat_result]) -> None:
    dev = Path("/dev")
    subprocess.run(("umount", "--recursive", "--lazy", "/dev"), capture_output=True, check=False)
    _mount("-t", "tmpfs", "-o", "mode=755", "gpuprov-dev", "/dev")
    for name, options in (("pts", "newinstance,ptmxmode=0666,mode=0620,gid=5"), ("shm", "mode=1777")):
        (dev / name).mkdir()
        _mount("-t", "devpts" if name == "pts" else "tmpfs", "-o", options, f"gpuprov-{name}", str(dev / name))
    made = {name: (0o20666, os.makedev(1, minor)) for name, minor in _PLAIN_NODES.items()}
    made |= {"tty": (0o20666, os.makedev(5, 0))}
    made |= {name: (found.st_mode, found.st_rdev) for name, found in nodes.items()}
    if "loop-control" in nodes:
        made |= {f"loop{number}": (stat.S_IFBLK | 0o600, os.makedev(7, number)) for number in range(_LOOPS)}
    for name, (mode, number) in made.items():
        (dev / name).parent.mkdir(exist_ok=True)
        os.mknod(dev / name, mode, number)
        (dev / name).chmod(stat.S_IMODE(mode))
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        (dev / name).symlink_to(target)
    # A container in a user namespace gives its /dev/null away: the machine's stays out of reach.
    for number in range(3):
        if os.fstat(number).st_rdev == os.makedev(1, 3):
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, number)
            os.close(null)


def _texts(home: Path) -> dict[str, bytes]:
    return {name: (home / name).read_bytes() for name in _PACKAGE_FILES if (home / name).is_file()}


def _copy(texts: dict[str, bytes], home: Path) -> None:
    for name, text in texts.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(text)
        (home / name).chmod(0o600)


def _mount(*words: str) -> None:
    done = subprocess.run(("mount", *words), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"tests: `mount {' '.join(words)}` failed: {done.stderr.strip()}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        _inside(Path(sys.argv[2]), sys.argv[3:])
    command = [shutil.which(sys.argv[1]) or sys.argv[1], *sys.argv[2:]]
    sys.exit(run(command))

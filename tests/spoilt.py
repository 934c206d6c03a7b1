"""`make test-spoilt`: the tests on a machine that is spoilt on purpose end as on a clean one, test by test.

The spoilt machine is a root of its own for the time of the run: nothing of it is on this one. Unit tests that are not
marked as root's run there as an ordinary user.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import world

# Written by `make test`; what both runs below are compared with.
_CLEAN = Path("build/results.xml")
_PYTEST = (sys.executable, "-m", "pytest", "-n", "3", "--dist", "loadgroup", "--no-loadscope-reorder", "-q", "-m")
_ALL = "not slow and not long"
# Outside it is root, so that the clone, wherever it lies, is its own; it may do what the modes of root's files say.
_USER = 100001
_AS_USER = (sys.executable, "-m", "tests.world", "unshare", "--user", f"--map-user={_USER}", f"--map-group={_USER}")
_UNIT = ("tests/unit",)
# Those that depend most on what a machine has: containers, hooks, engines, apt, one lab host, Ansible.
_INTEGRATION = tuple(
    f"tests/integration/test_{name}.py"
    for name in (
        "ansible", "container", "docker", "engines", "host_program", "install", "params", "prestart", "repos",
        "start_details",
    )
)  # fmt: skip
_ENVIRONMENT = {
    "LC_ALL": "xx_XX.UTF-8", "TZ": "Asia/Kathmandu", "TERM": "no-such-terminal", "NO_COLOR": "1", "COLUMNS": "40",
    "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "DOCKER_HOST": "unix:///nonexistent/socket",
}  # fmt: skip
_FILES = {
    "/nonexistent/runc": "#!/bin/sh\nexit 42\n",
    "/usr/local/bin/docker": "#!/bin/sh\necho 'Docker version 99.0.0, build 0000000'; exit 42\n",
    "/usr/local/bin/runc": "#!/bin/sh\nexit 42\n",
    "/etc/containerd/conf.d/99-nvidia.toml": (
        "# gpuprov begin, new file: `gpuprov runtime configure --unset` takes this out\nversion = 2\n# gpuprov end\n"
    ),
    "/etc/docker/daemon.json": '{"data-root": "/nonexistent", "default-runtime": "kata", "runtimes": {"nvidia": {}}}',
    "/etc/passwd": f"taken:x:100000:100000::/nonexistent:/bin/false\nplain:x:{_USER}:{_USER}::/home/plain:/bin/sh\n",
    "/etc/group": "taken:x:100000:\n",
    "/etc/subuid": "taken:100000:65536\n",
    "/etc/subgid": "taken:100000:65536\n",
    "/root/.local/state/gpuprov/runs/20200101T000000-1.json": "{}",
    "/root/.ansible.cfg": "[defaults]\nstdout_callback = none_such\n",
    "/root/.ssh/config": "Host *\n  ProxyCommand false\n",
    "/root/.docker/config.json": json.dumps({"currentContext": "gone"}),
}
_LISTS = ("/etc/passwd", "/etc/group", "/etc/subuid", "/etc/subgid")
# Waits go by the monotonic clock, which stays. But libfaketime 0.9.10 takes some of its times for the other clock's:
# these two functions are the C library's again.
_CLOCK = {"FAKETIME": "+366d", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
_WAITS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *wanted, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, wanted, left) ? errno : 0;
}
static int (*timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
__attribute__((constructor)) static void find(void) {
    timedwait = dlvsym(dlopen("libc.so.6", RTLD_LAZY), "pthread_cond_timedwait", "GLIBC_2.3.2");
}
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    return timedwait(condition, mutex, until);
}
"""
# Left out under that clock: two compare it with the kernel's times of files, and one enters a root without /dev/shm.
_LEFT_OUT = (
    "tests/unit/fleet/test_agent_file.py::test_agents_unused_for_a_month_go",
    "tests/unit/fleet/test_agent_file.py::test_chroots_its_own_copy_of_what_the_user_stored",
    "tests/unit/fleet/test_chroot.py::test_a_root_from_which_a_container_runs_is_refused",
)


def main() -> int:
    """Run all, compare, and return the exit code."""
    argparse.ArgumentParser(prog="make test-spoilt", description=__doc__).parse_args()
    if os.geteuid() != 0:
        sys.exit("the machine can't be spoilt without root; next: sudo make test-spoilt")
    results = _CLEAN.parent.resolve()
    results.mkdir(exist_ok=True)
    if not _is_fresh(_CLEAN):
        print("clean results of `make test` are missing or old: these tests run clean first", flush=True)
        subprocess.run((*_PYTEST, _ALL, f"--junitxml={_CLEAN}", *_UNIT, *_INTEGRATION), check=False)
    spoilt: dict[str, str] = {}
    clock = _clock(results)
    unit = (*_UNIT, *(f"--deselect={test}" for test in _LEFT_OUT))
    for name, environment, command, files in (
        ("root", clock, (*_PYTEST, f"root and {_ALL}"), unit),
        ("user", clock, (*_AS_USER, *_PYTEST, f"not root and {_ALL}"), unit),
        ("integration", {}, (*_PYTEST, _ALL), _INTEGRATION),
    ):
        place = results / f"spoilt-{name}.xml"
        place.unlink(missing_ok=True)
        print(f"on the spoilt machine: tests of {name} {environment.get('FAKETIME', '')}", flush=True)
        run_spoilt((*command, f"--junitxml={place}", *files), environment)
        spoilt |= outcomes(place)
    left_out = {test.replace(".py::", "::").replace("/", ".") for test in _LEFT_OUT}
    clean = {name: outcome for name, outcome in outcomes(_CLEAN).items() if name not in left_out}
    differences = compare(clean, spoilt, _UNIT + _INTEGRATION)
    print(*differences, f"{len(spoilt)} tests compared, {len(differences)} differ", sep="\n")
    return int(bool(differences) or not spoilt)


def _is_fresh(results: Path) -> bool:
    """Say whether results are newer than all that they depend on."""
    listed = subprocess.run(("git", "ls-files", "-z"), stdout=subprocess.PIPE, text=True, check=True).stdout
    files = [Path(name) for name in listed.split("\0") if name]
    return results.exists() and results.stat().st_mtime > max(path.stat().st_mtime for path in files if path.exists())


def outcomes(results: Path) -> dict[str, str]:
    """Return what became of each test, by its name."""
    found = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        parts = [part for part in case if part.tag in ("failure", "error", "skipped")]
        said = [f"{part.tag}: {part.get('message', '').splitlines()[0:1]}" for part in parts]
        name, _, _ = (case.get("name") or "").partition("@tests/")  # xdist adds the group
        found[f"{case.get('classname')}::{name}"] = "; ".join(said) or "passed"
    return found


def compare(clean: dict[str, str], spoilt: dict[str, str], places: tuple[str, ...]) -> list[str]:
    """Return a line for each test of these files and folders whose outcome differs, or that ran in one of both only."""
    modules = tuple(place.removesuffix(".py").replace("/", ".") for place in places)
    wanted = [name for name in clean if any(name.startswith((f"{module}.", f"{module}::")) for module in modules)]
    every = sorted({*wanted, *spoilt})
    told = {name: (clean.get(name, "not run"), spoilt.get(name, "not run")) for name in every}
    return [f"{name}: clean: {one}; spoilt: {other}" for name, (one, other) in told.items() if one != other]


def _clock(folder: Path) -> dict[str, str]:
    """Return the environment in which the clock is ahead."""
    library = folder / "waits.so"
    command = ("gcc", "-shared", "-fPIC", "-O2", "-x", "c", "-", "-o", str(library))
    subprocess.run(command, input=_WAITS, text=True, check=True)
    return {**_CLOCK, world.PRELOAD: f"{library}:/usr/$LIB/faketime/libfaketimeMT.so.1"}


def run_spoilt(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command on the spoilt machine, with more in its environment."""
    with tempfile.TemporaryDirectory() as room:
        inside = (sys.executable, "-m", "tests.spoilt", "--inside", room, *command)
        subprocess.run(
            ("unshare", "--mount", "--propagation", "private", *inside),
            env={**os.environ, **_ENVIRONMENT, **environment}, check=False,
        )  # fmt: skip


# -- inside ------------------------------------------------------------------------------------------------------------


def _inside(room: Path, command: list[str]) -> None:
    """Make the spoilt root, go there, and become the command."""
    folder = Path.cwd()
    _mount("-t", "tmpfs", "spoilt", str(room))
    root = room / "root"
    root.mkdir()
    _mount("--bind", str(root), str(root))
    for path in Path("/").iterdir():
        place = root / path.name
        if path.is_symlink():
            place.symlink_to(path.readlink())
        elif path.is_dir():
            place.mkdir()
            _mount("--rbind", str(path), str(place))
    subprocess.run(("umount", "--recursive", "--lazy", f"{root}{room}"), check=True)
    for name in ("etc", "usr/local", "root"):
        layers = {layer: room / f"{layer}-{name.replace('/', '-')}" for layer in ("upper", "work")}
        for layer in layers.values():
            layer.mkdir()
        if name == "root":
            os.mknod(layers["upper"] / ".pyenv", 0o20000, 0)  # gone, in overlayfs' way
        options = f"lowerdir=/{name},upperdir={layers['upper']},workdir={layers['work']}"
        _mount("-t", "overlay", "-o", options, "spoilt", str(root / name))
    _spoil_devices(root / "dev")
    for name, text in _FILES.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if name in _LISTS and path.exists() else "") + text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)
    (root / "old").mkdir()
    subprocess.run(("pivot_root", ".", "old"), cwd=root, check=True)
    os.chdir(folder)
    subprocess.run(("umount", "--lazy", "/old"), check=True)
    Path("/old").rmdir()
    os.umask(0o077)
    os.execvp(command[0], command)


def _spoil_devices(dev: Path) -> None:
    _mount("-t", "tmpfs", "-o", "mode=755", "spoilt", str(dev))
    for path in Path("/dev").iterdir():
        if path.is_mount():
            (dev / path.name).mkdir()
            _mount("--rbind", str(path), str(dev / path.name))
        elif not path.name.startswith("nvidia"):
            subprocess.run(("cp", "--archive", str(path), str(dev)), check=True)
    shutil.rmtree(dev / "char", ignore_errors=True)
    (dev / "char").mkdir()
    for name, minor in (("nvidia0", 0), ("nvidia7", 7), ("nvidiactl", 255)):
        os.mknod(dev / name, 0o20600, os.makedev(195, minor))
        (dev / f"char/195:{minor}").symlink_to(f"../{name}")


def _mount(*words: str) -> None:
    subprocess.run(("mount", *words), check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        _inside(Path(sys.argv[2]), sys.argv[3:])
    sys.exit(main())

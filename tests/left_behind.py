"""Pytest's plugin that looks for what tests leave: processes, and changes of the machine beyond tests/world.py.

A test that starts a process ends it: daemons that a program starts by itself, as gpg does, are easily forgotten.
"""

import os
import pwd
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import world

_MARK = "GPUPROV_TEST_SESSION"
# How long a process that is about to end may take.
_SECONDS = 30
_HOME = pwd.getpwuid(os.geteuid()).pw_dir
# The folders of the machine that are compared: how deep, and whether with size and time of files. Other programs of the
# machine write too: what lies deep in /run, /var/lib and the home is theirs, but for what gpuprov and its engines keep.
# A user of gpuprov meanwhile stores runs in ~/.local/state/gpuprov: those are left out.
_COMPARED = (
    ("/etc", 6, True), ("/dev", 2, False), ("/run", 1, False), ("/var/lib", 1, False), (_HOME, 1, False),
    *((f"{_HOME}/{name}", 4, True) for name in (".ssh", ".docker", ".config/cdi")),
    *((place, 4, True) for place in ("/run/cdi", "/run/netns", "/var/lib/gpuprov", "/var/lib/cdi")),
)  # fmt: skip
# And these, which come, go and change by themselves: terminals, disks and what is plugged in; what the machine's own
# engines, daemons, logins, editors and shells write; names of the network.
_OTHERS = re.compile(
    r"/dev/(pts|shm|mqueue|hugepages|bus|char/(?!195:)|block|disk|input|snd|mapper|dri|loop\d|dm-|vcs|tty|console|log|ptmx).*"
    r"|/(run|var/lib)/(docker|containerd|containers|crun|runc|podman|machines).*"
    r"|/run/(utmp|mount|sudo|user|xtables\.lock|motd|reboot-required|.*\.pid|.*\.sock).*"
    r"|/etc/(mtab|adjtime|resolv\.conf|cups|printcap|\.pwd\.lock|.*~).*"
    rf"|{_HOME}/\.(.*(history|hst|hsts|auth.*|errors|lock|tmp|sw.)|viminfo.*|cache)"
)
# An installation of packages meanwhile changes /etc, /run and /var/lib: nobody knows then what else did.
_PACKAGES = ("/var/lib/dpkg/status", "/var/lib/rpm/rpmdb.sqlite", "/usr/lib/sysimage/rpm/rpmdb.sqlite")
_FILES = 20_000
# A look costs a few hundredths of a second.
_EVERY = 5
_NODES = tuple(Path("/dev", name) for name in ("null", "zero", "full", "random", "urandom", "tty"))
Look = dict[str, tuple[int, ...]]


def pytest_configure(config: pytest.Config) -> None:
    """Mark all that this session starts: processes inherit the environment, also those that leave their parent."""
    os.environ.setdefault(_MARK, f"{os.getpid()}-{time.time_ns()}")
    if not hasattr(config, "workerinput"):
        config.stash[_MACHINE] = _Machine()
        config.pluginmanager.register(config.stash[_MACHINE])
    config.stash[_DEVICES] = _devices()


# Last of the wrappers: after the workers have ended, before the summary is printed.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail the session if processes are left."""
    yield
    if hasattr(session.config, "workerinput"):
        return
    deadline = time.monotonic() + _SECONDS
    while (left := left_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    errors = [_report("processes left behind", [_LEFT, *left])] if left else []
    errors += [_report("the machine changed", lines) for lines in session.config.stash[_MACHINE].changes()]
    if errors and reporter is not None:
        reporter.stats.setdefault("error", []).extend(errors)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_LEFT = "processes of this session are left; the test that started them must end them:"
_DEVICES = pytest.StashKey[dict[Path, tuple[int, ...]]]()
_MACHINE = pytest.StashKey["_Machine"]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail the test that has given /dev/null away, as crun does with its stdin in a user namespace; take it back."""
    yield
    before, after = item.config.stash[_DEVICES], _devices()
    if before != after and os.geteuid() == 0:
        for path, (mode, user, group) in before.items():
            os.chown(path, user, group)
            path.chmod(stat.S_IMODE(mode))
        changed = [str(path) for path in before if before[path] != after.get(path)]
        pytest.fail(f"the test has changed mode or owner of {', '.join(changed)}: give what it starts another stdin")


def _devices() -> dict[Path, tuple[int, ...]]:
    found = {path: path.stat() for path in _NODES if path.exists()}
    return {path: (one.st_mode, one.st_uid, one.st_gid) for path, one in found.items()}


class _Machine:
    """The machine itself, compared again and again while tests run: what changes is theirs that ran meanwhile."""

    def __init__(self) -> None:
        outside = os.environ.get(world.OUTSIDE) if os.geteuid() == 0 else None
        self._root = f"/proc/{outside}/root" if outside else ""
        self._first = self._last = look(self._root)
        self._packages = self._package_times()
        self._looked = time.monotonic()
        self._since: dict[str, None] = {}
        self._running: set[str] = set()
        self._found: list[tuple[set[str], list[str]]] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._since[nodeid] = None
        self._running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.discard(nodeid)
        if time.monotonic() - self._looked > _EVERY:
            self._compare()

    def _compare(self) -> None:
        if self._root and not Path(self._root).exists():  # who waited outside was killed
            return
        now = look(self._root)
        changed = {path for path in {*self._last, *now} if self._last.get(path) != now.get(path)}
        if changed:
            self._found.append((changed, list(self._since)))
        self._last, self._looked, self._since = now, time.monotonic(), dict.fromkeys(self._running)

    def changes(self) -> list[list[str]]:
        """Return, for each group of tests, what they have changed and what is still not as before."""
        self._compare()
        others = self._packages != self._package_times()
        errors = []
        for changed, tests in self._found:
            irreversible = sorted(path for path in changed if self._first.get(path) != self._last.get(path))
            if others:
                irreversible = [path for path in irreversible if not path.startswith(("/etc/", "/run/", "/var/lib/"))]
            if irreversible:
                paths = [f"{path}: {_words(self._first.get(path), self._last.get(path))}" for path in irreversible]
                errors.append(["outside of tests/world.py has changed:", *paths, "while these tests ran:", *tests])
        return errors

    def _package_times(self) -> list[int]:
        paths = [Path(f"{self._root}{path}") for path in _PACKAGES]
        return [path.stat().st_mtime_ns for path in paths if path.exists()]


def look(root: str) -> Look:
    """Return mode, owner and device number of what is compared below a root, and size and time of files."""
    found: Look = {}
    for place, depth, whole in _COMPARED:
        _look(root, place, depth, whole, found)
    return found


def _look(root: str, folder: str, depth: int, whole: bool, found: Look) -> None:
    try:
        entries = sorted(os.scandir(f"{root}{folder}"), key=lambda entry: entry.name)
    except OSError:  # not there, or another user's
        return
    for entry in entries[: _FILES - len(found)]:
        path = f"{folder}/{entry.name}"
        if _OTHERS.fullmatch(path):
            continue
        try:
            one = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        more = (one.st_size, one.st_mtime_ns) if whole and stat.S_ISREG(one.st_mode) else ()
        found[path] = (one.st_mode, one.st_uid, one.st_gid, one.st_rdev, *more)
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            _look(root, path, depth - 1, whole, found)


def _words(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> str:
    if before is None or after is None:
        return "new" if before is None else "gone"
    names = ("mode", "owner", "group", "device", "size", "time")
    return ", ".join(name for name, old, new in zip(names, before, after, strict=False) if old != new)


def left_processes() -> list[str]:
    """Return a line for each process that carries this session's mark, with the test in which it began."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            environment = (place / "environ").read_bytes().split(b"\0")
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended, or another user's
            continue
        if mark in environment and int(place.name) != os.getpid():
            tests = [word[20:].decode() for word in environment if word.startswith(b"PYTEST_CURRENT_TEST=")]
            found.append(f"{place.name} {words.strip()} (from {', '.join(tests) or 'no test'})")
    return found


def _report(what: str, lines: list[str]) -> pytest.TestReport:
    return pytest.TestReport(what, ("tests", 0, what), {}, "failed", "\n".join(lines), "teardown")

"""The only access to the operating system: no other host-side module runs commands or touches files.

`System` is the real machine, or a part of it below a root prefix. Tests replace it with a recorded machine.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import os
import shlex
import shutil
import stat as stat_module
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Callable, TextIO, TypeVar

from gpuprov.core import files
from gpuprov.core.commands import SYSTEM_PATH, Completed, command_output, run_command
from gpuprov.core.proxy import NO_PROXY, Proxy
from gpuprov.protocol.errors import Problem, Stopped

if TYPE_CHECKING:
    import socket

    from gpuprov.protocol.tables import Tables

T = TypeVar("T")

# Folders that runs and their programs write to; each may be a file system.
_WRITTEN_PLACES = ("/", "/boot", "/etc", "/opt", "/usr", "/usr/local", "/var", "/var/cache", "/var/lib")
# Where sites mount file systems that may refuse even root, or whose server has forgotten them: nothing is there then.
_OF_SITES = ("/opt/", "/usr/local/")
_REFUSALS = (errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENOTCONN)
_CONNECT_SECONDS = 15
# Bytes of a command's output.
_MOST = 64 << 20


# A run looks at the same few hundred paths again and again.
@functools.lru_cache(maxsize=4096)
def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


class System:
    """A machine, or the part of it below `root`; paths are those that the machine itself uses."""

    def __init__(self, root: str = "/") -> None:
        self.root = Path(root)
        # Additional environment of commands, beyond core/commands.py's: the address of this host's docker.
        self.environment: dict[str, str] = {}
        # The proxy for downloads, and for commands that request its environment: package managers.
        self.proxy: Proxy = NO_PROXY
        # Seconds to wait for the package manager's lock: longer than unattended-upgrades usually takes.
        self.lock_timeout = 300
        # What this user may not read counts as missing, and is kept here; None: a refusal is an error.
        self.unreadable: set[str] | None = None
        # While the machine is only looked at: whether to stop. Changes are never interrupted.
        self._stop: Callable[[], bool] = _never

    @functools.cached_property
    def tables(self) -> Tables:
        """The tables of this run: the packaged ones, until others are set."""
        # The programs of a boot come without tables.
        from gpuprov.protocol.tables import PACKAGED

        return PACKAGED

    # -- reading -------------------------------------------------------------------------------------------------

    def path(self, path: str) -> Path:
        """Return the path that this process must use for `path`."""
        return _below(self.root, path)

    def read_bytes(self, path: str) -> bytes | None:
        """Return a file's content, or None if there is none: missing, not a regular file, or larger than 256 MiB.

        Never blocks: a FIFO made by another user counts as no file.
        """
        try:
            with self.open(path) as file:
                return files.read_whole(file)
        except files.NO_FILE:
            return None

    def read_foreign(self, path: str, size: int) -> str:
        """Return the text of a small file that any user may have made, "" for anything else; follows no link."""
        return files.read_foreign(self.path(path), size)

    def read_text(self, path: str) -> str | None:
        """Return a file's text (invalid UTF-8 replaced), or None if there is none."""
        content = self.read_bytes(path)
        return None if content is None else content.decode("utf-8", "replace")

    def read_start(self, path: str, size: int) -> bytes | None:
        """Return a file's first `size` bytes, or None if there is no regular file."""
        try:
            with self.open(path) as file:
                return file.read(size)
        except files.NO_FILE:
            return None

    def open(self, path: str) -> BinaryIO:
        """Open a regular file for reading, to look into parts of it. Raises OSError; never waits for a FIFO."""
        try:
            return files.open_regular(self.path(path))
        except OSError as error:
            raise self._without(path, error) from None

    def sha256(self, path: str) -> str:
        """Return a file's SHA-256 in hexadecimal, "" if there is no file. Large files are read in pieces."""
        digest = hashlib.sha256()
        try:
            with self.open(path) as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        except files.NO_FILE:
            return ""
        return digest.hexdigest()

    def status(self, path: str) -> files.FileStatus | None:
        """Return the status of `path`, or None if it does not exist."""
        return self._seen(path, lambda: files.status_of(self.path(path)))

    def device_number(self, path: str) -> tuple[int, int] | None:
        """Return major and minor of the character device at `path`, links followed, None for another file."""
        # The links of /proc/PID/fd lead to open files, which their names may not.
        return files.device_number(self.path(path if self.root == Path("/") else self.real_path(path)))

    def lock_holder(self, path: str) -> int | None:
        """Return the process that holds a record lock (fcntl(2)) on a file, or None; 0 for one that can't be seen."""
        return files.lock_holder(self.path(path))

    def exists(self, path: str) -> bool:
        """Say whether `path` exists, with links followed."""
        return bool(self._seen(path, lambda: self.path(self.real_path(path)).exists()))

    def list_directory(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory, an empty list if it is missing, or a loop of links."""
        try:
            return self._seen(path, lambda: tuple(sorted(entry.name for entry in self.path(path).iterdir()))) or ()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            return ()

    def _seen(self, path: str, look: Callable[[], T]) -> T | None:
        """Return what `look` finds, None for a refusal that counts as a missing file."""
        try:
            return look()
        except OSError as error:
            if self._without(path, error) is error:
                raise
            return None

    def _without(self, path: str, error: OSError) -> OSError:
        """Return the error as which a refusal counts."""
        if error.errno not in _REFUSALS or (self.unreadable is None and not f"{path}/".startswith(_OF_SITES)):
            return error
        if self.unreadable is not None:
            self.unreadable.add(path)
        return FileNotFoundError(errno.ENOENT, error.strerror, path)

    def real_path(self, path: str) -> str:
        """Return `path` with every link resolved, as the machine itself sees it."""
        return files.real_path(self.root, path)

    def free_bytes(self, path: str) -> int:
        """Return the free space, in bytes, of the file system that holds a folder (or its nearest existing parent)."""
        return shutil.disk_usage(self._existing(path)).free

    def df(self, path: str) -> str:
        """Return the command that shows what the file system of `path` is short of: `df -h PATH`, or `df -i PATH`."""
        return f"df {files.df(self._existing(path))} {path}"

    def _existing(self, path: str) -> Path:
        """Return the place of a folder, or of its nearest existing parent."""
        place = self.path(path)
        return next(one for one in (place, *place.parents) if one.is_dir())

    def which(self, program: str) -> str | None:
        """Return the absolute path of a program of the machine, or None."""
        places = (f"{folder}/{program}" for folder in SYSTEM_PATH.split(":"))
        return next((one for one in places if os.access(self.path(one), os.X_OK) and self.path(one).is_file()), None)

    def user_id(self) -> int:
        """Return the effective user id of this process."""
        return os.geteuid()

    def own_pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def kernel_release(self) -> str:
        """Return `uname -r`."""
        return os.uname().release

    def architecture(self) -> str:
        """Return `uname -m`."""
        return os.uname().machine

    def page_size(self) -> int:
        """Return the size of a memory page, in bytes."""
        return os.sysconf("SC_PAGE_SIZE")

    # -- commands ------------------------------------------------------------------------------------------------

    def run(
        self, argv: Sequence[str], *, timeout: float = 60, stdin: bytes = b"", env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:  # fmt: skip
        """Run a command to its end and return its result; a failure is a value, not an exception.

        The command gets a clean environment, its own process group and a time limit in seconds. A Ctrl-C at the
        terminal does not reach it, so begun work is finished or undone. `on_line` receives each line as it is printed.
        Of an output without end, as a hostile image may have, the last 64 MiB are kept.
        """
        env = {**self.environment, **(env or {})}
        done = run_command(argv, timeout=timeout, stdin=stdin, env=env, on_line=on_line, stop=self._stop, most=_MOST)
        self._leave_if_asked()
        return done

    @contextlib.contextmanager
    def interruptible(self, stop: Callable[[], bool]) -> Iterator[None]:
        """Within the block, end the running command and raise Stopped once `stop` is true: nothing is changed there."""
        self._stop = stop
        try:
            yield
            self._leave_if_asked()
        finally:
            self._stop = _never

    def _leave_if_asked(self) -> None:
        """Raise Stopped once; the commands after it, which remove what the look has made, are not interrupted."""
        if self._stop():
            self._stop = _never
            raise Stopped

    def output(self, argv: Sequence[str], *, timeout: float) -> contextlib.AbstractContextManager[BinaryIO]:
        """Return a command's output as it is written, for output too large for memory. Raises OSError."""
        return command_output(argv, timeout=timeout)

    def require(self, argv: Sequence[str], what: str, next_step: str = "", *, timeout: float = 60) -> Completed:
        """Run a command that must succeed; raise GpuprovError saying `what` failed otherwise."""
        return self.run(argv, timeout=timeout).require(what, next_step)

    def proxy_problem(self) -> Problem | None:
        """Return the problem of a proxy that refuses connections; None if it accepts one, or if there is no proxy."""
        if not self.proxy.url:
            return None
        # Most runs have no proxy.
        import socket

        host, port = self.proxy.host_and_port
        try:
            with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
                return None
        except OSError as error:
            return self.proxy.problem(f"connection to {host} port {port}: {error}")

    def connect(self, path: str, timeout: float) -> socket.socket:
        """Return a connection to the Unix socket at that path; each wait on it has this limit. Raises OSError."""
        import socket

        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout)
            connection.connect(str(self.path(path)))
        except OSError:
            connection.close()
            raise
        return connection

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, path: str, content: bytes, *, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
        """Write a file atomically: temporary file beside it, fsync, rename, fsync of the folder.

        A link is followed, so that a configuration file kept elsewhere stays there. `owner` is (uid, gid); without it
        an existing file's owner stays. The SELinux context of an existing file is kept.
        """
        files.write_whole(self.path(self.real_path(path)), content, mode, owner)

    def write_problems(self, paths: Iterable[str], executed: Iterable[str] = ()) -> tuple[Problem, ...]:
        """Return what prevents writing at these paths, and running programs below `executed`; changes nothing."""
        found: dict[tuple[str, str], list[str]] = {}
        no_folder, executed = functools.cache(self._no_folder), tuple(executed)
        for path in (*paths, *(f"{folder}/new" for folder in executed)):
            link = no_folder(str(Path(path).parent)) or self._no_file(path)
            found.setdefault(link or files.write_refusal(self.path(self.real_path(path))), []).append(path)
        found.pop(("", ""), None)
        noexec = {mount: path for path in executed if (mount := files.mounted_noexec(self.path(path)))}
        return (
            *(Problem(f"{', '.join(places)} cannot be written", *refusal) for refusal, places in found.items()),
            *(Problem(f"no program can run in {path}", f"{mount} is mounted noexec",
                      f"mount -o remount,exec {shlex.quote(mount)}") for mount, path in noexec.items()),
        )  # fmt: skip

    def _no_folder(self, path: str) -> tuple[str, str] | None:
        """Return the part of a folder's path that is no folder, nor leads to one, and how to remove it."""
        for folder in map(str, (*reversed(Path(path).parents), path)):
            found, name = self.status(folder), shlex.quote(folder)
            if found is None or self.path(self.real_path(folder)).is_dir():
                continue
            if found.kind != "link":
                return f"{folder} is no folder: {found.kind}", f"mv {name} {name}.old"
            lacks = "is no folder" if self.exists(folder) else "does not exist"
            return f"{folder} is a link to {found.target}, which {lacks}", f"rm {name}"
        return None

    def _no_file(self, path: str) -> tuple[str, str] | None:
        """Return that a path is a folder, or a link to no file (`systemctl mask` makes them), and how to remove it."""
        found, behind, name = self.status(path), self.status(self.real_path(path)), shlex.quote(path)
        if found is not None and found.kind == "directory":
            return f"{path} is a folder, as `docker run -v` makes for a missing file", f"mv {name} {name}.old"
        # A link to a folder is itself what is replaced, as /usr/local/cuda.
        if found is None or found.kind != "link" or behind is None or behind.kind in ("file", "directory"):
            return None
        return f"{path} is a link to {found.target}, which is no file", f"rm {name}"

    def append(self, path: str, content: bytes) -> None:
        """Append to a file, all or nothing, and wait until it is on disk."""
        files.append_whole(self.path(path), content)

    def sync(self) -> None:
        """Wait until everything written by any program is on disk. Raises OSError on a write error."""
        files.sync_file_systems(map(self.path, _WRITTEN_PLACES))

    def open_private(self, path: str) -> TextIO:
        """Open a file for root only (0600) to read and write.

        It is created if missing, and a wider mode is corrected.
        """
        handle = os.open(self.path(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if stat_module.S_IMODE(os.fstat(handle).st_mode) != 0o600:
            os.fchmod(handle, 0o600)
        return os.fdopen(handle, "r+", encoding="utf-8")

    def make_directory(self, path: str, mode: int = 0o755) -> tuple[str, ...]:
        """Make a directory and its missing parents; return the new ones, outermost first."""
        place = self.path(path)
        missing = [*itertools.takewhile(lambda one: not one.exists(), (place, *place.parents))][::-1]
        for one in missing:
            # Another process may make it meanwhile, as a container that starts makes /run/gpuprov.
            one.mkdir(exist_ok=True)
            one.chmod(mode)
            files.sync_path(one.parent)
        return tuple("/" + str(one.relative_to(self.root)) for one in missing)

    def make_link(self, path: str, target: str) -> None:
        """Make a symbolic link atomically, replacing any file or link at that path."""
        place = self.path(path)
        temporary = files.temporary_name(place)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(place)

    def rename(self, path: str, new: str) -> None:
        """Rename a file atomically, replacing any file of that name."""
        files.sync_path(self.path(path))
        self.path(path).replace(self.path(new))
        files.sync_path(self.path(new).parent)

    def make_node(self, path: str, major: int, minor: int, mode: int, group: int = 0) -> None:
        """Make a character device node, owned by root and a group, with the label that SELinux has for its name."""
        place = self.path(path)
        os.mknod(place, stat_module.S_IFCHR | mode, os.makedev(major, minor))
        if group:
            os.chown(place, 0, group)
        place.chmod(mode)
        if self.root == Path("/") and self.exists("/sys/fs/selinux/enforce"):
            self.run(("restorecon", path))  # its label would be that of /dev, which confined programs may not open

    def change_mode(self, path: str, mode: int) -> None:
        """Set permission bits."""
        self.path(path).chmod(mode)

    def remove(self, path: str) -> None:
        """Remove a file, link, node or empty directory; no effect if it does not exist."""
        place = self.path(path)
        with contextlib.suppress(FileNotFoundError):
            if place.is_dir() and not place.is_symlink():
                place.rmdir()
            else:
                place.unlink()

    def remove_leftover(self, path: str) -> None:
        """Remove the temporary file that a killed write of `path` may have left beside it."""
        files.temporary_name(self.path(path)).unlink(missing_ok=True)

    def remove_tree(self, path: str) -> None:
        """Remove a directory with all its content."""
        shutil.rmtree(self.path(path), ignore_errors=True)

    def remove_all(self, path: str) -> None:
        """Remove a file, a link or a directory with all its content; nothing may be there."""
        found = self.status(path)
        if found is not None and found.kind == "directory":
            self.remove_tree(path)
        else:
            self.remove(path)

    @contextlib.contextmanager
    def temporary_directory(self, near: str = "/tmp") -> Iterator[str]:
        """Yield the path of a private directory below `near`; it is removed with its content after the block."""
        made = Path(tempfile.mkdtemp(prefix="gpuprov-tmp-", dir=self.path(near)))
        try:
            yield "/" + str(made.relative_to(self.root))
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
        self._leave_if_asked()

    def clock(self) -> int:
        """Return the time of day, in seconds since 1970."""
        return int(time.time())

    def now(self) -> float:
        """Return a monotonic clock in seconds."""
        return time.monotonic()


def _never() -> bool:
    return False


def sha256_of(content: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


# systemd runs as process 1 (sd_booted(3)).
BOOTED = "/run/systemd/system"
_BUILDERS = (
    "/proc/driver/nvidia", "/proc/devices", "/proc/modules", "/proc/sys/kernel/modules_disabled", "/proc/cmdline",
    "/proc/keys", "/sys/bus/pci", "/sys/class/infiniband", "/sys/class/drm", "/sys/module", "/sys/firmware/efi",
    "/dev/nvidia", "/run/systemd/container", "/run/.containerenv", "/.dockerenv",
)  # fmt: skip
# All paths below a device are ignored.
_NOWHERE = Path("/dev/null/hidden")
# systemctl(1) commands that need a running systemd. `enable`, `disable` and `is-enabled` work on files too.
_ONLINE = frozenset(
    ("start", "stop", "restart", "try-restart", "reload", "reload-or-restart", "daemon-reload", "reset-failed")
)
_ASKING = frozenset(("is-active", "is-failed", "show", "is-system-running"))
_NOT_ACTIVE = 3  # exit code of `systemctl is-active`


class ImageSystem(System):
    """A machine whose disk becomes an image: its files and programs are used, but not its kernel and devices.

    The running kernel belongs to the machine that builds the image: its modules, GPUs and NVIDIA driver are not read.
    If systemd does not run (a chroot, a container build), no unit is started.

    `kernel`: the release that its copies will boot; "" if it has no kernel.
    """

    def __init__(self, below: System, kernel: str) -> None:
        super().__init__(str(below.root))
        self.environment = below.environment
        self.proxy, self.lock_timeout, self.tables = below.proxy, below.lock_timeout, below.tables
        self.kernel = kernel
        self.offline = not below.exists(BOOTED)
        if self.offline:
            # Maintainer scripts and installers also call systemctl (systemctl(1), ENVIRONMENT.md).
            self.environment["SYSTEMD_OFFLINE"] = "1"

    def path(self, path: str) -> Path:
        return _NOWHERE if path.startswith(_BUILDERS) else super().path(path)

    def kernel_release(self) -> str:
        """Return the release of the kernel that the image's copies will boot."""
        return self.kernel

    def run(
        self, argv: Sequence[str], *, timeout: float = 60, stdin: bytes = b"", env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:  # fmt: skip
        """Run a command; without systemd, commands that start, stop or query a unit do nothing."""
        if self.offline and argv[0] == "systemctl":
            verb = next((word for word in argv[1:] if not word.startswith("-")), "")
            if verb in _ONLINE:
                return Completed(tuple(argv), 0)
            if verb in _ASKING:
                return Completed(tuple(argv), _NOT_ACTIVE)
        return super().run(argv, timeout=timeout, stdin=stdin, env=env, on_line=on_line)

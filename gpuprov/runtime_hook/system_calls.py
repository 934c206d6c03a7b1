"""What the hook does by the C library's functions, for which Python's own modules have no call: namespaces, mounts.

CPython's C module `_ctypes` is used alone, because the package `ctypes` around it takes 2.5 ms of CPU time at every
start. A Python whose `_ctypes` lacks one of these names gets the package.

Kernels from 5.12 on clone a mount, set its attributes, and move it to its place, each on a descriptor: it is never seen
writable, and no path is looked up twice. Older ones (RHEL 8's 4.18) bind, look what is there, and restrict it.
"""

from __future__ import annotations

import posix
from _struct import pack
from typing import Any

from .errors import Refused
from .rootfs import mount_id

# The same numbers on x86-64 and AArch64, as for all calls since Linux 5.1.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_OPENAT2 = 437
_CLONE_NEWNS = 0x00020000
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_EMPTY_PATHS = 0x4 | 0x40
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC = 32, 4096, 16384
_MS_PRIVATE = 1 << 18
_FLAGS = {"ro": _MS_RDONLY, "nosuid": _MS_NOSUID, "nodev": _MS_NODEV, "noexec": _MS_NOEXEC}
_ENOSYS, _EINVAL, _EPERM, _EXDEV = 38, 22, 1, 18
_RESOLVE_NO_XDEV = 1
_PATH = posix.O_PATH | posix.O_NOFOLLOW | posix.O_CLOEXEC
# struct open_how (openat2(2)): flags, mode, resolve.
_OPEN_TARGET = pack("=QQQ", _PATH, 0, _RESOLVE_NO_XDEV)
# struct mount_attr (mount_setattr(2)): flags to set and to clear, propagation, user namespace. The flags used here have
# the numbers that they have in mount(2).
_MOUNT_ATTRIBUTES = "=QQQQ"
# Who makes files at the moment: a start without a user namespace never changes it.
_acting = [(0, 0)]


def _by_c_module() -> tuple[Any, ...]:
    from _ctypes import FUNCFLAG_CDECL, FUNCFLAG_USE_ERRNO, CFuncPtr, _SimpleCData, addressof, dlopen, dlsym, get_errno

    class Character(_SimpleCData):  # type: ignore[type-arg,unused-ignore]
        _type_ = "c"

    class Integer(_SimpleCData):  # type: ignore[type-arg,unused-ignore]
        _type_ = "i"

    class Long(_SimpleCData):  # type: ignore[type-arg,unused-ignore]
        _type_ = "l"

    class Function(CFuncPtr):
        _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
        _restype_ = Integer

    class SystemCall(CFuncPtr):
        _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
        _restype_ = Long

    handle = dlopen(None, 0)  # type: ignore[arg-type,unused-ignore]
    syscall = SystemCall(dlsym(handle, "syscall"))
    return lambda name: Function(dlsym(handle, name)), syscall, Character, Long, addressof, get_errno


def _by_package() -> tuple[Any, ...]:
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    syscall = library["syscall"]
    syscall.restype = ctypes.c_long
    return library.__getitem__, syscall, ctypes.c_char, ctypes.c_long, ctypes.addressof, ctypes.get_errno


# What makes a function of its name, syscall(2), two types of C, and two functions of the interpreter.
try:
    _function, _syscall, _Character, _Long, _addressof, _get_errno = _by_c_module()
except (ImportError, AttributeError):
    _function, _syscall, _Character, _Long, _addressof, _get_errno = _by_package()


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library's that returns an int, -1 for an error. Raises OSError.

    An argument is a number, bytes that the kernel only reads, None, or memory from `room`.
    """
    result: int = _function(name)(*_passed(arguments))
    if result == -1:
        raise _error()
    return result


def system_call(number: int, *arguments: Any) -> int:
    """Call the kernel by a number, with arguments as for `call`. Raises OSError."""
    result: int = _syscall(_Long(number), *_passed(arguments))
    if result < 0:
        raise _error()
    return result


def room(content: bytes, size: int = 0) -> Any:
    """Return memory of a size, or of the content's, which begins with this content; `.raw` is what it holds."""
    return (_Character * max(size, len(content))).from_buffer_copy(content.ljust(size, b"\0"))


def address(memory: Any) -> int:
    """Return where memory from `room` lies; it must be kept as long as the address is used."""
    return int(_addressof(memory))


def _passed(arguments: tuple[Any, ...]) -> list[Any]:
    # A variadic function takes a number as wide as a register.
    return [_Long(one) if isinstance(one, int) else one for one in arguments]


def _error() -> OSError:
    number = _get_errno()
    return OSError(number, posix.strerror(number))


def enter_mount_namespace(pid: int) -> None:
    """Enter a process's mount namespace. Raises Refused."""
    try:
        handle = posix.open(f"/proc/{pid}/ns/mnt", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError as error:
        raise Refused(f"the container's process {pid} is gone: {error.strerror}") from None
    try:
        call("setns", handle, _CLONE_NEWNS)
    except OSError as error:
        raise Refused(f"the container's mount namespace can't be entered: {error.strerror}") from None
    posix.close(handle)


def act_as(owner: tuple[int, int]) -> None:
    """Make files as this user and group from now on: a user namespace's file systems know no other (setfsuid(2))."""
    if owner == _acting[0]:
        return
    # They return the previous number, and no error.
    call("setfsgid", owner[1])
    call("setfsuid", owner[0])
    _acting[0] = owner


def bind(source: str, directory: int, name: str, options: list[str], *, folder: bool = False) -> None:
    """Bind a file of the host to a name in a directory of the container (a descriptor). Raises OSError.

    Or a `folder`, with all that is mounted in it. What stands there must be of the source's kind already, no link, and
    no volume: a mount on one may spread to the host.
    """
    target = _open_target(directory, name)
    try:
        try:
            _move(source, target, _flags(options), _AT_RECURSIVE if folder else 0)
        except OSError as error:
            if error.errno not in (_ENOSYS, _EINVAL, _EPERM):
                raise
            _bind_and_restrict(source, target, directory, name, _flags(options))
    finally:
        posix.close(target)


def _open_target(directory: int, name: str) -> int:
    try:
        return system_call(_OPENAT2, directory, name.encode(), _OPEN_TARGET, len(_OPEN_TARGET))
    except OSError as error:
        # Linux before 5.6, or a filter around the engine.
        if error.errno not in (_ENOSYS, _EPERM):
            raise
    target = posix.open(name, _PATH, dir_fd=directory)
    if mount_id(target) != mount_id(directory):
        posix.close(target)
        raise OSError(_EXDEV, "a volume is mounted there", name)
    return target


def _flags(options: list[str]) -> int:
    return sum(_FLAGS.get(option, 0) for option in set(options))


def _move(source: str, target: int, flags: int, recursive: int) -> None:
    tree = system_call(_OPEN_TREE, _AT_FDCWD, source.encode(), _OPEN_TREE_CLONE | posix.O_CLOEXEC | recursive)
    try:
        wanted = pack(_MOUNT_ATTRIBUTES, flags, 0, _MS_PRIVATE, 0)
        system_call(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH | recursive, wanted, len(wanted))
        system_call(_MOVE_MOUNT, tree, b"", target, b"", _MOVE_EMPTY_PATHS)
    finally:
        posix.close(tree)


def _bind_and_restrict(source: str, target: int, directory: int, name: str, flags: int) -> None:
    _mount(source, f"/proc/self/fd/{target}", _MS_BIND | _MS_REC)
    mounted = posix.open(name, _PATH, dir_fd=directory)
    try:
        ours, theirs = posix.stat(source), posix.fstat(mounted)
        # Between the two calls the name may have been given to something else (CVE-2024-0132).
        if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino):
            raise OSError(_EINVAL, "something else is there than what was mounted", name)
        place = f"/proc/self/fd/{mounted}"
        _mount("", place, _MS_PRIVATE | _MS_REC)
        _mount("", place, _MS_REMOUNT | _MS_BIND | flags)
    finally:
        posix.close(mounted)


def _mount(source: str, target: str, flags: int) -> None:
    call("mount", source.encode(), target.encode(), b"", flags, None)

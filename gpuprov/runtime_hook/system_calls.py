"""The C library's functions for the hook: what Python's own modules have no call for.

CPython's C module `_ctypes` is used alone, because the package `ctypes` around it takes 2.5 ms of CPU time at every
start. A Python whose `_ctypes` lacks one of these names gets the package.
"""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Library:
    """The C library: what makes a function of its name, syscall(2), two types, and two functions of the interpreter."""

    __slots__ = ("address", "character", "errno", "function", "long", "syscall")

    def __init__(self, function: Any, syscall: Any, character: Any, long: Any, address: Any, errno: Any) -> None:
        self.function = function
        self.syscall = syscall
        self.character = character
        self.long = long
        self.address = address
        self.errno = errno


def _by_c_module() -> _Library:
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
    return _Library(lambda name: Function(dlsym(handle, name)), syscall, Character, Long, addressof, get_errno)


def _by_package() -> _Library:
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    syscall = library["syscall"]
    syscall.restype = ctypes.c_long
    return _Library(
        library.__getitem__, syscall, ctypes.c_char, ctypes.c_long, ctypes.addressof, ctypes.get_errno
    )  # fmt: skip


try:
    _LIBRARY = _by_c_module()
except (ImportError, AttributeError):
    _LIBRARY = _by_package()


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library's that returns an int, -1 for an error. Raises OSError.

    An argument is a number, bytes that the kernel only reads, None, or memory from `room`.
    """
    result: int = _LIBRARY.function(name)(*_passed(arguments))
    if result == -1:
        raise _error()
    return result


def system_call(number: int, *arguments: Any) -> int:
    """Call the kernel by a number, with arguments as for `call`. Raises OSError."""
    result: int = _LIBRARY.syscall(_LIBRARY.long(number), *_passed(arguments))
    if result < 0:
        raise _error()
    return result


def room(content: bytes, size: int = 0) -> Any:
    """Return memory of a size, or of the content's, which begins with this content; `.raw` is what it holds."""
    return (_LIBRARY.character * max(size, len(content))).from_buffer_copy(content.ljust(size, b"\0"))


def address(memory: Any) -> int:
    """Return where memory from `room` lies; it must be kept as long as the address is used."""
    return int(_LIBRARY.address(memory))


def _passed(arguments: tuple[Any, ...]) -> list[Any]:
    # A variadic function takes a number as wide as a register.
    return [_LIBRARY.long(one) if isinstance(one, int) else one for one in arguments]


def _error() -> OSError:
    number = _LIBRARY.errno()
    return OSError(number, posix.strerror(number))

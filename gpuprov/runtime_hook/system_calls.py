"""The C library's functions for the hook: what Python's own modules have no call for.

CPython's C module `_ctypes` is used alone, because the package `ctypes` around it takes 2.5 ms of CPU time at every
start. A Python whose `_ctypes` lacks one of these names gets the package.
"""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

try:
    from _ctypes import (
        FUNCFLAG_CDECL,
        FUNCFLAG_USE_ERRNO,
        CFuncPtr,
        _SimpleCData,
        addressof,
        dlopen,
        dlsym,
        get_errno,
    )

    class _Character(_SimpleCData):  # type: ignore[type-arg,unused-ignore]
        _type_ = "c"

    class _Integer(_SimpleCData):  # type: ignore[type-arg,unused-ignore]
        _type_ = "i"

    class _Long(_SimpleCData):  # type: ignore[type-arg,unused-ignore]
        _type_ = "l"

    class _Function(CFuncPtr):
        _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
        _restype_ = _Integer

    class _SystemCall(CFuncPtr):
        _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
        _restype_ = _Long

    _LIBRARY = dlopen(None, 0)

    def _function(name: str) -> Any:
        return _Function(dlsym(_LIBRARY, name))

    _syscall = _SystemCall(dlsym(_LIBRARY, "syscall"))
except (ImportError, AttributeError):
    import ctypes
    from ctypes import addressof, get_errno

    _Character, _Long = ctypes.c_char, ctypes.c_long
    _PACKAGE = ctypes.CDLL(None, use_errno=True)

    def _function(name: str) -> Any:
        return _PACKAGE[name]

    _syscall = _PACKAGE["syscall"]
    _syscall.restype = _Long


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
    return int(addressof(memory))


def _passed(arguments: tuple[Any, ...]) -> list[Any]:
    # A variadic function takes a number as wide as a register.
    return [_Long(one) if isinstance(one, int) else one for one in arguments]


def _error() -> OSError:
    number = get_errno()
    return OSError(number, posix.strerror(number))

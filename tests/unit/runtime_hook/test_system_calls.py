"""The C library's functions without the package ctypes, and with it where `_ctypes` has other names."""

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "gpuprov"
# What each Python does with a system call, its error, memory that the kernel writes into, and a function's int.
PROBE = """
import posix, sys
sys.path.insert(0, {package!r})
{before}
from runtime_hook import system_calls as s
O_PATH = posix.O_PATH | posix.O_CLOEXEC
how = O_PATH.to_bytes(8, sys.byteorder) + bytes(16)
handle = s.system_call(437, -100, b"/usr", how, len(how))
assert posix.fstat(handle).st_ino == posix.stat("/usr").st_ino
try:
    s.system_call(437, -100, b"/none", how, len(how))
except OSError as error:
    print(error.errno, error.strerror)
try:
    s.call("mount", b"/none", b"/none", b"", 4096, None)
except OSError as error:
    print(error.errno in (1, 2))
memory = s.room(b"begin", 65)
assert (len(memory), memory.raw) == (65, b"begin" + bytes(60))
assert s.call("gethostname", s.address(memory), 65) == 0
assert memory.raw.split(b"\\0")[0].decode() == posix.uname().nodename
assert s.call("setfsuid", posix.geteuid()) == posix.geteuid()
print("ctypes" in sys.modules)
"""


def probe(python: str, before: str) -> list[str]:
    code = PROBE.format(package=str(PACKAGE), before=before)
    done = subprocess.run((python, "-ISEB", "-c", code), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_kernel_is_called_without_the_package() -> None:
    assert probe(sys.executable, "") == ["2 No such file or directory", "True", "False"]


@pytest.mark.parametrize("name", ["dlsym", "CFuncPtr", "_SimpleCData", "FUNCFLAG_USE_ERRNO"])
def test_a_python_whose_c_module_has_other_names_gets_the_package(name: str) -> None:
    # ctypes itself needs most of them: it is loaded before the name is gone.
    said = probe(sys.executable, f"import ctypes, _ctypes; del _ctypes.{name}")
    assert said == ["2 No such file or directory", "True", "True"]

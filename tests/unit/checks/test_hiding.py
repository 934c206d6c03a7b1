"""Libraries that hide the driver's: a real loader, real caches by ldconfig, the driver's own files below a root."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuprov.cdi.discover import discover
from gpuprov.checks.cuda.hiding import environment_of_logins, gather_hiding
from gpuprov.core.system import System
from gpuprov.facts.driver import HidingLibrary, damage
from gpuprov.packages.managers import manager_of
from tests import simgpu
from tests.triplet import LIBRARIES, TRIPLET
from tests.unit.scripted import Answer, Scripted

pytestmark = pytest.mark.root
VERSION, STALE = simgpu.DRIVER_VERSION, "535.261.03"
COMMANDS = manager_of(None, "apt").commands


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with the driver, and this machine's loader."""
    simgpu.install_tree(tmp_path)
    for name in ("lib", "lib64"):
        if not (tmp_path / name).exists():
            (tmp_path / name).symlink_to(f"usr/{name}")
    (tmp_path / "usr/lib64").mkdir(exist_ok=True)
    shutil.copy("/lib64/ld-linux-x86-64.so.2", tmp_path / "usr/lib64/ld-linux-x86-64.so.2")
    (tmp_path / "etc/ld.so.conf.d").mkdir(parents=True, exist_ok=True)
    (tmp_path / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    (tmp_path / "etc/ld.so.conf.d/libc.conf").write_text("# libc default configuration\n/usr/local/lib\n")
    (tmp_path / f"etc/ld.so.conf.d/{TRIPLET}.conf").write_text(f"{LIBRARIES}\n")
    return tmp_path


def stale(root: Path, folder: str, name: str) -> None:
    """Put an older driver's library into a folder, and let ldconfig take it up."""
    (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    file = f"{name}.so.{STALE}"
    shutil.copy(simgpu.build_libraries(STALE) / file, root / folder.lstrip("/") / file)
    ldconfig(root)


def ldconfig(root: Path) -> None:
    subprocess.run(("/sbin/ldconfig", "-r", str(root)), check=True, capture_output=True, timeout=60)


def found(root: Path, version: str = VERSION) -> tuple[HidingLibrary, ...]:
    return gather_hiding(System(str(root)), version)


def test_nothing_hides_the_libraries_of_a_host_that_is_well(root: Path) -> None:
    ldconfig(root)
    assert found(root) == ()
    assert damage(System(str(root)), discover(System(str(root)))) == ""


@dataclass(frozen=True)
class Case:
    """Where an older library lies, what leads the loader there, and what makes it take another one."""

    folder: str
    configured: str
    reason: str


CASES = (
    Case("/usr/local/lib", "", "/etc/ld.so.conf.d/libc.conf:2 names /usr/local/lib"),
    Case("/opt/old/lib", "a.conf", "/etc/ld.so.conf.d/a.conf:1 names /opt/old/lib"),
    Case("/usr/lib/nvidia-535", "a.conf", "/etc/ld.so.conf.d/a.conf:1 names /usr/lib/nvidia-535"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder)
@pytest.mark.parametrize("name", ["libnvidia-ml", "libcuda"])
def test_an_older_library_is_named_with_what_loads_it(root: Path, case: Case, name: str) -> None:
    if case.configured:
        (root / "etc/ld.so.conf.d" / case.configured).write_text(f"{case.folder}\n")
    stale(root, case.folder, name)
    (one,) = found(root)
    paths = (f"{case.folder}/{name}.so.1", f"{case.folder}/{name}.so.{STALE}")
    assert (one.paths, one.version, one.reason) == (paths, STALE, case.reason)
    assert one.hides.endswith(f"/{name}.so.1") and LIBRARIES.removeprefix("/usr") in one.hides
    assert one.way_out(COMMANDS) == f"rm {' '.join(paths)}; ldconfig"
    subprocess.run(("rm", *(f"{root}{path}" for path in paths)), check=True)
    ldconfig(root)
    assert found(root) == ()


def test_the_target_of_a_link_is_not_removed(root: Path) -> None:
    folder = root / "opt/a b/lib"
    folder.mkdir(parents=True)
    (root / "etc/precious").write_text("\x7fELF")
    (root / "etc/ld.so.conf.d/a.conf").write_text("/opt/a b/lib\n")
    stale(root, "/opt/a b/lib", "libcuda")
    (folder / "libcuda.so.1").unlink()
    (folder / f"libcuda.so.{STALE}").rename(root / "etc/precious")
    (folder / "libcuda.so.1").symlink_to("/etc/precious")
    ldconfig(root)
    (one,) = found(root)
    assert "/etc/precious" in one.paths and one.removable == ("/opt/a b/lib/libcuda.so.1",)
    assert one.way_out(COMMANDS) == "rm '/opt/a b/lib/libcuda.so.1'; ldconfig"


def test_a_library_in_a_users_folder_is_left_to_its_user(root: Path) -> None:
    stale(root, "/usr/local/lib", "libcuda")
    os.chown(root / "usr/local/lib", 1000, 1000)
    (one,) = found(root)
    assert one.foreign == "/usr/local/lib belongs to user 1000, not to root"


class Packaged(Scripted):
    """A host whose dpkg knows which package has brought a library."""

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}" if program == "dpkg-query" else None

    def answer(self, argv: tuple[str, ...]) -> Answer:
        path = next(one for one in argv if one.startswith("/usr/"))
        line = f"old-driver:amd64, other: {path.removeprefix('/usr')}\n"
        return 1, line, "dpkg-query: no path found matching pattern"


def test_a_library_of_a_package_is_removed_with_its_package(root: Path) -> None:
    """Packages from before the merge of /usr have their files below /lib."""
    (root / "etc/ld.so.conf.d/a.conf").write_text("/usr/lib/nvidia-535\n")
    stale(root, "/usr/lib/nvidia-535", "libcuda")
    (one,) = gather_hiding(Packaged(str(root)), VERSION)
    assert one.package == "old-driver"


def test_a_copy_without_a_version_in_its_name_hides_the_driver_too(root: Path) -> None:
    (root / "usr/local/lib").mkdir(parents=True)
    shutil.copy(simgpu.build_libraries(STALE) / f"libcuda.so.{STALE}", root / "usr/local/lib/libcuda.so.1")
    ldconfig(root)
    (one,) = found(root)
    assert (one.paths, one.version) == (("/usr/local/lib/libcuda.so.1",), "")
    assert "of an unknown driver" in one.what


def test_a_file_that_the_loader_stops_at_hides_the_driver(root: Path) -> None:
    stale(root, "/usr/local/lib", "libcuda")
    (root / f"usr/local/lib/libcuda.so.{STALE}").write_bytes(b"<html>404</html>")
    (one,) = found(root)
    assert one.fault and one.fault in one.what


def test_a_preload_and_a_variable_of_logins_are_told_with_their_line(root: Path) -> None:
    stale(root, "/opt/old", "libcuda")
    ldconfig(root)
    (root / "etc/environment").write_text('PATH="/usr/bin"\nLD_LIBRARY_PATH=/opt/old\n')
    (root / "opt/old/libcuda.so.1").symlink_to(f"libcuda.so.{STALE}")
    (one,) = found(root)
    assert one.reason == "/etc/environment:2 sets LD_LIBRARY_PATH"
    assert one.is_by_environment
    command = one.way_out(COMMANDS).partition("  # ")[0].replace("/etc/environment", f"{root}/etc/environment")
    subprocess.run(("sh", "-c", command), check=True)
    assert (root / "etc/environment").read_text() == 'PATH="/usr/bin"\n'
    assert found(root) == ()
    (root / "etc/ld.so.preload").write_text("/opt/other.so\n/opt/old/libcuda.so.1\n")
    (one,) = found(root)
    assert one.reason == "/etc/ld.so.preload:2 names /opt/old/libcuda.so.1"
    command = one.way_out(COMMANDS).replace("/etc/ld.so.preload", f"{root}/etc/ld.so.preload")
    subprocess.run(("sh", "-c", command), check=True)
    assert found(root) == ()


def test_a_driver_that_is_to_come_would_be_hidden_and_one_to_be_replaced_is_not(root: Path) -> None:
    ldconfig(root)
    assert found(root, "580.95.05") == ()
    stale(root, "/usr/local/lib", "libnvidia-ml")
    (one,) = found(root, "580.95.05")
    assert one.hides == "" and one.what.endswith("hides the driver's libnvidia-ml.so.1")


def test_the_loaders_variables_in_the_environment_file() -> None:
    text = "PATH=/usr/bin\nexport LD_LIBRARY_PATH=\"/a:/b\"\nLD_PRELOAD='/c.so'\n# LD_PRELOAD=/d.so\n"
    assert environment_of_logins(text) == {"LD_LIBRARY_PATH": "/a:/b", "LD_PRELOAD": "/c.so"}


@pytest.mark.parametrize(
    ("hurt", "told"),
    [
        ("rm usr/bin/nvidia-smi", "command -v nvidia-smi: nothing"),
        (f"rm .{LIBRARIES}/libcuda.so.{VERSION}", f"no libcuda.so.{VERSION}"),
        (f"truncate -s 1000 .{LIBRARIES}/libcuda.so.{VERSION}", "its end is missing"),
        (f"truncate -s 0 .{LIBRARIES}/libnvidia-ml.so.{VERSION}", "empty or too short"),
        (f"head -c 4096 /dev/zero > .{LIBRARIES}/libcuda.so.{VERSION}", "invalid ELF header"),
    ],
)
def test_a_file_of_the_driver_that_is_gone_or_broken_is_told(root: Path, hurt: str, told: str) -> None:
    ldconfig(root)
    subprocess.run(("sh", "-c", hurt), cwd=root, check=True)
    system = System(str(root))
    assert told in damage(system, discover(system))

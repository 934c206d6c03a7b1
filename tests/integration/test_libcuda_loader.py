"""What gpuprov says of the loader's choice, against the choice of the genuine loader (glibc's) in the same root."""

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuprov.checks.cuda.search import LIBCUDA, Libraries, Program, find_loader, search
from gpuprov.runtime_hook.rootfs import Root

pytestmark = pytest.mark.root

# Where a library lies is in it as text, so that a running program can say which one it has.
_MARK = b"@" * 80
_LIBRARY = f'const char *which(void) {{ return "{_MARK.decode()}"; }}'
_PROGRAM = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words) {
    void *library = dlopen(words[1], RTLD_NOW);
    const char *(*which)(void) = library ? (const char *(*)(void))dlsym(library, "which") : 0;
    printf("%s\n", which ? which() : dlerror());
    return library ? 0 : 1;
}
"""


@dataclass
class Ground:
    """A root file system with a C library, programs that load libcuda.so.1, and libraries of that name."""

    root: Path
    library: bytes
    folder: str = "/"
    environment: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, content: bytes | None = None) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        made = self.library.replace(_MARK, path.encode().ljust(len(_MARK), b"\0"))
        place.write_bytes(made if content is None else content)

    def link(self, path: str, target: str) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def cache(self, *folders: str) -> None:
        (self.root / "etc/ld.so.conf").write_text("".join(f"{one}\n" for one in folders))
        subprocess.run(("ldconfig", "-r", str(self.root)), check=True, stderr=subprocess.DEVNULL)

    def found(self) -> Libraries:
        root = Root(str(self.root))
        try:
            return search(root, find_loader(root), Program(self.environment, self.folder), LIBCUDA)
        finally:
            root.close()

    def ours(self) -> str:
        winner = self.found().winner
        return (winner.fault or winner.chain[-1]) if winner else "none"

    def genuine(self) -> str:
        script = 'cd "$1" && shift && exec "$@"'
        (self.root / self.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ("/usr/sbin/chroot", str(self.root), "/bin/sh", "-c", script, "sh", self.folder,
             "/bin/env", *(f"{name}={value}" for name, value in self.environment.items()), "/bin/program", LIBCUDA),
            capture_output=True, text=True, check=False, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )  # fmt: skip
        said = done.stdout.strip()
        if done.returncode == 0:
            return said
        if "error while loading shared libraries: libcuda.so.1: cannot open" in done.stderr:
            return "none"
        assert "libcuda.so.1" in said, done
        faults = ("file too short", "invalid ELF header")
        return next((one for one in faults if one in said), "none" if "No such file" in said else said)

    def agree(self) -> str:
        """Return the library that both name, which must be the same."""
        ours, genuine = self.ours(), self.genuine()
        assert ours == genuine
        return ours


def make_root(folder: Path) -> bytes:
    """Make folder/root, a root file system with glibc, busybox and a program; return a libcuda.so.1."""
    root = folder / "root"
    for name in ("bin", "etc", "lib64", "opt", "proc", "work"):
        (root / name).mkdir(parents=True)
    shutil.copy("/lib64/ld-linux-x86-64.so.2", root / "lib64")
    gcc = ("gcc", "-x", "c", "-")
    library = (*gcc, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "library"))
    subprocess.run(library, input=_LIBRARY.encode(), check=True)
    subprocess.run((*gcc, "-o", str(root / "bin/program")), input=_PROGRAM.encode(), check=True)
    shutil.copy(shutil.which("busybox") or "busybox", root / "bin/busybox")
    for applet in ("sh", "env", "sleep"):
        (root / "bin" / applet).symlink_to("busybox")
    libc = root / "lib/x86_64-linux-gnu"
    libc.mkdir(parents=True)
    for needed in ("libc.so.6", "libresolv.so.2"):
        shutil.copy(f"/lib/x86_64-linux-gnu/{needed}", libc)
    return (folder / "library").read_bytes()


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libcuda")
    make_root(folder)
    return folder


@pytest.fixture
def ground(pristine: Path, tmp_path: Path) -> Iterator[Ground]:
    shutil.copytree(pristine / "root", tmp_path / "root", symlinks=True)
    yield Ground(tmp_path / "root", (pristine / "library").read_bytes())


def test_no_library_at_all(ground: Ground) -> None:
    assert ground.agree() == "none"


def test_folders_of_the_variable_count_in_their_order(ground: Ground) -> None:
    ground.put("/opt/a/libcuda.so.1")
    ground.put("/opt/b/libcuda.so.1")
    ground.put("/usr/lib/libcuda.so.1")
    for value, wins in (
        ("/opt/b:/opt/a", "/opt/b"), ("/opt/none;/opt/a;/opt/b", "/opt/a"), ("", "/usr/lib"), ("/opt/a/", "/opt/a"),
    ):  # fmt: skip
        ground.environment = {"LD_LIBRARY_PATH": value}
        assert ground.agree() == f"{wins}/libcuda.so.1", value


def test_an_empty_part_is_the_working_folder(ground: Ground) -> None:
    ground.put("/work/libcuda.so.1")
    ground.put("/work/below/libcuda.so.1")
    ground.put("/usr/lib/libcuda.so.1")
    for value, wins in (
        (":", "/work"), ("/opt/none:", "/work"), (":/usr/lib", "/work"), ("/usr/lib::", "/usr/lib"), ("", "/usr/lib"),
        ("below", "/work/below"), (".", "/work"), ("./below/..", "/work"),
    ):  # fmt: skip
        ground.folder, ground.environment = "/work", {"LD_LIBRARY_PATH": value}
        assert ground.agree() == f"{wins}/libcuda.so.1", value


def test_the_cache_comes_before_the_default_folders(ground: Ground) -> None:
    ground.put("/opt/cached/libcuda.so.1")
    ground.put("/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    assert ground.agree() == "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
    ground.cache("/opt/cached")
    assert ground.agree() == "/opt/cached/libcuda.so.1"
    (ground.root / "opt/cached/libcuda.so.1").unlink()  # the cache is out of date
    assert ground.agree() == "/usr/lib/x86_64-linux-gnu/libcuda.so.1"


def test_default_folders_count_in_the_loaders_own_order(ground: Ground) -> None:
    folders = ("/usr/lib", "/lib", "/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu")
    ground.put("/usr/lib64/libcuda.so.1")  # not Debian's
    assert ground.agree() == "none"
    for folder in folders:
        ground.put(f"{folder}/libcuda.so.1")
        assert ground.agree() == f"{folder}/libcuda.so.1"


def test_a_stub_gets_its_name_by_ldconfig(ground: Ground) -> None:
    ground.put("/usr/local/cuda/lib64/stubs/libcuda.so")
    ground.put("/usr/lib/libcuda.so.1")
    assert ground.agree() == "/usr/lib/libcuda.so.1"
    assert [one.path for one in ground.found().others] == ["/usr/local/cuda/lib64/stubs/libcuda.so"]
    ground.cache("/usr/local/cuda/lib64/stubs")
    assert ground.agree() == "/usr/local/cuda/lib64/stubs/libcuda.so"
    winner = ground.found().winner
    assert winner is not None
    assert winner.stub


def test_a_preloaded_library_wins(ground: Ground) -> None:
    for path in ("/opt/pre/libcuda.so.535.1", "/opt/a/libcuda.so.1", "/usr/lib/libcuda.so.1"):
        ground.put(path)
    for value, wins in (
        ("/opt/none.so:/opt/pre/libcuda.so.535.1", "/opt/pre/libcuda.so.535.1"),
        ("libcuda.so.1", "/opt/a/libcuda.so.1"), ("", "/opt/a/libcuda.so.1"),
        ("/usr/lib/libcuda.so.1 /opt/pre/libcuda.so.535.1", "/usr/lib/libcuda.so.1"),
    ):  # fmt: skip
        ground.environment = {"LD_PRELOAD": value, "LD_LIBRARY_PATH": "/opt/a"}
        assert ground.agree() == wins, value
    ground.environment = {}
    (ground.root / "etc/ld.so.preload").write_text("# ours\n/opt/pre/libcuda.so.535.1 # why\n")
    assert ground.agree() == "/opt/pre/libcuda.so.535.1"


def test_a_library_for_another_machine_is_passed_over(ground: Ground) -> None:
    foreign = bytearray(ground.library)
    foreign[18:20] = (183).to_bytes(2, "little")  # AArch64
    ground.put("/opt/a/libcuda.so.1", bytes(foreign))
    ground.put("/opt/b/libcuda.so.1")
    ground.environment = {"LD_LIBRARY_PATH": "/opt/a:/opt/b"}
    assert ground.agree() == "/opt/b/libcuda.so.1"
    assert [one.fault for one in ground.found().others] == ["for aarch64: the loader passes over it"]


@pytest.mark.parametrize(("content", "fault"), [(b"", "file too short"), (b"\x7fEL", "file too short"),
                                                (b"#!/bin/sh\n" * 100, "invalid ELF header")],
                         ids=["empty", "torn", "script"])  # fmt: skip
def test_the_loader_stops_at_a_file_that_is_no_library(ground: Ground, content: bytes, fault: str) -> None:
    ground.put("/opt/a/libcuda.so.1", content)
    ground.put("/opt/b/libcuda.so.1")
    ground.environment = {"LD_LIBRARY_PATH": "/opt/a:/opt/b"}
    assert ground.agree() == fault


def test_links_lead_to_the_version(ground: Ground) -> None:
    ground.put("/opt/driver/libcuda.so.535.261.03")
    ground.link("/opt/driver/libcuda.so.1", "libcuda.so.535.261.03")
    ground.link("/opt/a", "driver")
    ground.link("/opt/broken/libcuda.so.1", "/opt/nowhere")
    ground.link("/opt/loop/libcuda.so.1", "libcuda.so.1")
    ground.link("/usr/lib/libcuda.so.1", "../../../../../opt/a/libcuda.so.1")
    for value in ("/opt/broken:/opt/loop:/opt/a", "/opt/broken", ""):
        ground.environment = {"LD_LIBRARY_PATH": value}
        assert ground.agree() == "/opt/driver/libcuda.so.535.261.03"
        winner = ground.found().winner
        assert winner is not None
        assert winner.version == "535.261.03"


_PLACES = ("/opt/a", "/opt/b", "/opt/run", "/work", "/lib", "/usr/lib", "/usr/lib/x86_64-linux-gnu", "/opt/cached")
_PARTS = ("/opt/a", "/opt/b", "/opt/none", "", ".", "/usr/lib", "/opt/a/../b", "/opt/link", "/opt/link/..")


@pytest.mark.parametrize("seed", range(20))
def test_random_roots(ground: Ground, seed: int) -> None:
    chosen = random.Random(seed)
    for place in chosen.sample(_PLACES, chosen.randint(1, 5)):
        ground.put(f"{place}/libcuda.so.1")
    ground.link("/opt/link", chosen.choice(("a", "/opt/b", "/work", "nowhere")))
    if chosen.random() < 0.5:
        (ground.root / "opt/cached").mkdir(exist_ok=True)
        ground.cache(*chosen.sample(("/opt/cached", "/opt/a", "/opt/run"), 2))
    for _ in range(3):
        ground.folder = chosen.choice(("/", "/work"))
        ground.environment = {"LD_LIBRARY_PATH": chosen.choice(":;").join(chosen.sample(_PARTS, chosen.randint(0, 4)))}
        ground.agree()


def test_a_path_out_of_the_root_is_none(ground: Ground, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(ground.root / "lib64/ld-linux-x86-64.so.2", outside / "libcuda.so.1")
    ground.link("/usr/lib/libcuda.so.1", f"/proc/self/root{outside}/libcuda.so.1")
    ground.link("/opt/up", "../" * 30 + os.fspath(outside))
    ground.environment = {"LD_LIBRARY_PATH": "/opt/up"}
    assert ground.found().winner is None

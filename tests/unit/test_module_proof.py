from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.changes import tell_nobody
from gpuprov.core.commands import SYSTEM_PATH
from gpuprov.core.system import System
from gpuprov.driver.kernel import BuildModules, build_environment, dkms_states, prove_modules
from tests import simgpu
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted

VERSION = "550.163.01"
KERNEL = "6.1.0-55-cloud-amd64"
OTHER = "6.1.0-56-cloud-amd64"
BUILT = "6.1.0-54-cloud-amd64"
# What DKMS 2.8 (Debian 11) and 3.0 (Debian 12) say.
STATES = {
    "": {},
    f"nvidia/{VERSION}: added\n": {"": "added"},
    f"nvidia, {VERSION}: added\n": {"": "added"},
    f"nvidia/{VERSION}, {KERNEL}, x86_64: installed\n": {KERNEL: "installed"},
    f"nvidia, {VERSION}, {KERNEL}, x86_64: installed\n": {KERNEL: "installed"},
    f"nvidia/{VERSION}, {KERNEL}, x86_64: built\nnvidia/{VERSION}, {OTHER}, x86_64: installed (WARNING! Diff)\n": {
        KERNEL: "built",
        OTHER: "installed",
    },
    f"nvidia/535.261.03, {KERNEL}, x86_64: installed\nother/{VERSION}, {KERNEL}, x86_64: installed\n": {},
}


@pytest.mark.parametrize("status", STATES)
def test_states_are_read_from_what_dkms_says(status: str) -> None:
    assert dkms_states(status, VERSION) == STATES[status]


class Host(Scripted):
    """A host on which dkms and modinfo say what they are told to."""

    which = System.which

    def __init__(self, root: Path, status: str, version: str) -> None:
        answers = {"dkms": status, "modinfo": version}
        super().__init__(root, {name: said or (1, "", f"{name}: ERROR: not found") for name, said in answers.items()})

    def kernel_release(self) -> str:
        return KERNEL


FAULTS = {
    "not registered": ("", VERSION, "not registered with DKMS"),
    "added alone": (f"nvidia/{VERSION}: added\n", VERSION, f"has not installed its modules for kernel {KERNEL}"),
    "another kernel's": (f"nvidia/{VERSION}, {OTHER}, x86_64: installed\n", VERSION, "has not installed its modules"),
    "another module wins": (f"nvidia/{VERSION}, {KERNEL}, x86_64: installed\n", "535.261.03", "version 535.261.03"),
    "no module": (f"nvidia/{VERSION}, {KERNEL}, x86_64: installed\n", "", "modinfo: ERROR"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_not_there_is_named_with_the_next_command(tmp_path: Path, name: str) -> None:
    status, version, sentence = FAULTS[name]
    problem = refused(lambda: prove_modules(Host(tmp_path, status, version), VERSION, dkms=True))
    assert sentence in f"{problem.what}\n{problem.evidence}"
    assert problem.what and problem.evidence
    assert "dkms" in problem.next_step


@pytest.mark.parametrize("silent", ["dkms", "modinfo"])
def test_a_program_that_comes_to_no_end_does_not_tell_that_there_is_no_module(tmp_path: Path, silent: str) -> None:
    host = Host(tmp_path, f"nvidia/{VERSION}, {KERNEL}, x86_64: installed\n", VERSION)
    host.replies = {**host.replies, silent: (124, "")}
    problem = refused(lambda: prove_modules(host, VERSION, dkms=True))
    assert problem.what == f"{silent} does not tell which modules there are" and "exited 124" in problem.evidence


@pytest.mark.parametrize("dkms", [True, False])
def test_modules_that_are_there_are_proof_enough(tmp_path: Path, dkms: bool) -> None:
    status = f"nvidia/{VERSION}, {KERNEL}, x86_64: installed\n" if dkms else ""
    host = Host(tmp_path, status, f"{VERSION}\n")
    prove_modules(host, VERSION, dkms=dkms)
    asked = [("dkms", "status")] if dkms else []
    assert host.asked == [*asked, ("modinfo", "-k", KERNEL, "-F", "version", "nvidia")]


class Image(Scripted):
    """An image whose first kernel has a module, and whose dkms builds one for the others if it `builds`."""

    def __init__(self, root: Path, *, builds: bool = True, has_dkms: bool = True) -> None:
        super().__init__(root)
        simgpu.install_tree(root)
        self._builds, self._has_dkms = builds, has_dkms
        for release, text in ((BUILT, "updates/dkms/nvidia.ko:\n"), (KERNEL, ""), (OTHER, "")):
            self.make_directory(f"/lib/modules/{release}")
            self.write(f"/lib/modules/{release}/modules.dep", text.encode())

    def which(self, program: str) -> str | None:
        return super().which(program) if program == "dkms" and self._has_dkms else None

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if not self._builds:
            return (10, "", "Error! Bad return status")
        self.write(f"/lib/modules/{argv[-1]}/modules.dep", b"updates/dkms/nvidia.ko.xz:\n")
        return ""


def test_modules_are_built_for_each_kernel_without_one(tmp_path: Path) -> None:
    host, told = Image(tmp_path), list[tuple[Any, ...]]()
    BuildModules((BUILT, KERNEL, OTHER)).apply(host, lambda *words: told.append(words))
    assert host.asked == [("dkms", "autoinstall", "-k", release) for release in (KERNEL, OTHER)]
    assert host.timeouts == [3600, 3600]
    assert [(text.split()[-1], *progress) for text, *progress in told] == [(KERNEL, 1, 3), (OTHER, 2, 3)]


@pytest.mark.parametrize(
    ("has_dkms", "evidence", "step"),
    [
        (True, "Error! Bad return status", f"/var/lib/dkms/nvidia/{simgpu.DRIVER_VERSION}/build/make.log"),
        (False, f"/lib/modules/{KERNEL}/modules.dep", "gpuprov_epel: true"),
    ],
)
def test_image_kernel_without_module_is_an_error(tmp_path: Path, has_dkms: bool, evidence: str, step: str) -> None:
    host = Image(tmp_path, builds=False, has_dkms=has_dkms)
    problem = refused(BuildModules((BUILT, KERNEL, OTHER)).apply, host, tell_nobody)
    assert f"kernel {KERNEL}" in problem.what
    assert evidence in problem.evidence and step in problem.next_step
    assert host.asked == ([("dkms", "autoinstall", "-k", KERNEL)] if has_dkms else [])


ORACLE = "6.12.0-100.28.2.el9uek.x86_64"


@pytest.mark.parametrize(
    ("release", "folder", "first"),
    [
        (ORACLE, "/opt/rh/gcc-toolset-14/root/usr/bin", "/opt/rh/gcc-toolset-14/root/usr/bin"), (ORACLE, "/opt", ""),
        (KERNEL, "/opt/rh/gcc-toolset-14/root/usr/bin", ""),
    ],
)  # fmt: skip
def test_compiler_of_kernel_comes_first_in_path(tmp_path: Path, release: str, folder: str, first: str) -> None:
    host = Host(tmp_path, "", "")
    host.kernel_release = lambda: release  # type: ignore[method-assign]
    for name in ("/etc", folder):
        host.make_directory(name)
    host.write("/etc/os-release", b'ID="ol"\nVERSION_ID="9.6"\n')
    assert build_environment(host) == ({"PATH": f"{first}:{SYSTEM_PATH}"} if first else {})

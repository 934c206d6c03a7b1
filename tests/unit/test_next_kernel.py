"""The kernel that boots next: is the driver built for it, and will the one after it have headers?"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuprov.core.system import System
from gpuprov.driver import kernel
from gpuprov.driver.precompiled import module_package
from gpuprov.facts.host import gather
from gpuprov.facts.kernels import InstalledKernel, flavour, gather_kernels, module_of, newest, next_kernel_fault
from gpuprov.packages.dnf import Dnf
from gpuprov.packages.interface import PackageFacts
from gpuprov.plan.context import source_of
from gpuprov.protocol.events import CheckDone
from gpuprov.protocol.spec import HostSpec, parse_spec
from tests.unit.ask import check_of
from tests.unit.fake_host import RELEASE, FakeHost

pytestmark = pytest.mark.root
NEXT = "6.1.0-40-amd64"

FLAVOURS = {
    "6.1.0-13-amd64": "amd64",
    "6.1.0-0.deb11.13-cloud-amd64": "cloud-amd64",
    "6.12.48+deb13-amd64": "amd64",
    "6.12.48+deb13-cloud-arm64": "cloud-arm64",
    "6.8.0-31-generic": "generic",
    "6.5.0-1014-aws": "aws",
    "6.4.0-150600.23.25-default": "default",
    "5.14.0-427.13.1.el9_4.x86_64": "",
    "5.14.0-427.13.1.el9_4.aarch64+64k": "64k",
    "5.14.0-427.13.1.el9_4.x86_64+rt": "rt",
    "5.14.0-427.13.1.el9_4.aarch64+64k-debug": "64k-debug",
    "6.1.0-50-arm64-16k": "arm64-16k",
    "5.15.0-206.153.7.1.el9uek.x86_64": "uek",
    "6.12.0-100.28.2.el10uek.aarch64+64k": "64k",
    "6.18.5": "",
}


@pytest.mark.parametrize("release", FLAVOURS)
def test_flavours(release: str) -> None:
    assert flavour(release) == FLAVOURS[release]


def test_an_installation_brings_them(tmp_path: Path) -> None:
    facts = gather(FakeHost(tmp_path / "root", metal=True))
    facts = replace(facts, packages=PackageFacts("apt", {"linux-image-amd64": "6.1"}))
    debian = (f"linux-headers-{RELEASE}", "linux-headers-amd64", "gcc", "make", "libc6-dev", "dkms", "kmod")
    assert kernel.packages(source_of(facts, HostSpec())) == debian
    release = "5.14.0-427.13.1.el9_4.x86_64"
    running = replace(facts.kernel, release=release)
    rocky = replace(facts, os=replace(facts.os, id="rocky", version="9.4"), kernel=running)
    rocky = replace(rocky, packages=PackageFacts("dnf", {"kernel-core": release}))
    assert kernel.packages(source_of(rocky, HostSpec())) == (
        f"kernel-devel={release}", "kernel-headers", f"kernel-devel-matched={release}", "gcc", "make",
        "elfutils-libelf-devel", "kmod",
    )  # fmt: skip


MODULES = {
    "updates/dkms/nvidia.ko: updates/dkms/i2c.ko\n": True,
    "kernel/fs/ext4/ext4.ko: x\nupdates/dkms/nvidia.ko.xz:\n": True,
    "updates/dkms/nvidia-current.ko:\n": True,
    "updates/dkms/nvidia-current-open.ko.xz: kernel/drivers/acpi/video.ko\n": True,
    "updates/dkms/nvidia-current-open-uvm.ko.xz: updates/dkms/nvidia-current-open.ko.xz\n": False,
    "kernel/nvidia-550/nvidia.ko.zst:\n": True,
    "kernel/drivers/platform/x86/nvidia-wmi-ec-backlight.ko: kernel/drivers/acpi/video.ko\n": False,
    "kernel/drivers/video/fbdev/nvidia/nvidiafb.ko: x\n": False,
    "updates/dkms/nvidia-uvm.ko: updates/dkms/nvidia.ko\n": False,
    "": False,
}


@pytest.mark.parametrize("text", MODULES)
def test_the_module_in_modules_dep(tmp_path: Path, text: str) -> None:
    (tmp_path / "lib/modules/6.1").mkdir(parents=True)
    (tmp_path / "lib/modules/6.1/modules.dep").write_text(text)
    assert bool(module_of(System(str(tmp_path)), "6.1")) is MODULES[text]


@pytest.mark.parametrize(
    "image", ["boot/vmlinuz-6.1", "boot/Image-6.1", "lib/modules/6.1/Image", "boot/System.map-6.1"]
)
def test_a_kernel_is_there_with_its_image(tmp_path: Path, image: str) -> None:
    for path in (tmp_path / "lib/modules/6.1/modules.dep", tmp_path / image):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [one.release for one in gather_kernels(System(str(tmp_path)))] == ["6.1"] * ("map" not in image)


def test_the_newest_by_number_and_of_the_same_flavour() -> None:
    releases = ("6.1.0-9-amd64", "6.1.0-13-amd64", "6.1.0-40-rt-amd64")
    found = newest([InstalledKernel(release, headers=True, module=True) for release in releases], "6.1.0-9-amd64")
    assert found and found.release == "6.1.0-13-amd64"


FAULTS: dict[str, tuple[bool, bool, bool, tuple[str, ...], str]] = {
    "all there": (True, True, True, (), ""),
    "prebuilt, no headers": (False, True, False, ("linux-headers-amd64",), ""),
    "no headers": (False, False, True, (), f"install linux-headers-{NEXT}; dkms autoinstall -k {NEXT}"),
    "not built": (True, False, True, (), f"has no NVIDIA module: dkms autoinstall -k {NEXT}"),
    "no dkms": (True, False, False, (), "DKMS does not build it"),
    "no headers to come": (True, True, True, ("linux-headers-amd64",), "install linux-headers-amd64"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    headers, module, dkms, missing, sentence = FAULTS[name]
    kernel = InstalledKernel(NEXT, headers=headers, module=module)
    found = next_kernel_fault(kernel, headers=(f"linux-headers-{NEXT}",), missing=missing, dkms=dkms)
    assert found == sentence if not sentence else sentence in found


def test_modules_that_come_compiled_come_as_a_package() -> None:
    running, following = "5.14.0-611.24.1.el9_7.x86_64", "5.14.0-611.30.1.el9_7.x86_64"
    package = module_package(("cuda-drivers", "kmod-nvidia-580.105.08-5.14.0-611.24.1"), following)
    assert package == "kmod-nvidia-580.105.08-5.14.0-611.30.1"
    assert module_package(("kmod-nvidia-latest-dkms",), following) == ""
    kmp = "nvidia-open-driver-G06-signed-cuda-kmp-default"
    assert module_package((kmp, "nv-prefer-signed-open-driver"), "6.4.0-150600.23.7-default") == kmp
    ubuntu = "linux-modules-nvidia-580-server-open"
    there = (f"{ubuntu}-generic", f"{ubuntu}-6.8.0-30-generic")
    assert module_package(there, "6.8.0-31-generic") == f"{ubuntu}-6.8.0-31-generic"
    for release, said in ((running, True), (following, False)):
        found = InstalledKernel(release, headers=False, module=said)
        reason = next_kernel_fault(found, headers=("kernel-devel",), missing=(), dkms=False, compiled=package)
        assert bool(reason) is not said
        assert said or f"install {package}, or boot an older one" in reason


def _line(host: FakeHost) -> CheckDone:
    return check_of("next kernel", host, parse_spec({}))


def _install_kernel(host: FakeHost, release: str, modules_dep: str) -> None:
    (host.root / f"boot/vmlinuz-{release}").write_text("")
    (host.root / f"lib/modules/{release}").mkdir(parents=True, exist_ok=True)
    (host.root / f"lib/modules/{release}/modules.dep").write_text(modules_dep)


def test_verify_names_the_kernel_that_would_boot_without_a_driver(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root", metal=True)
    _install_kernel(host, RELEASE, "updates/dkms/nvidia.ko:\n")
    assert (_line(host).status, _line(host).on_host) == ("ok", f"{RELEASE}, with the driver's module")
    _install_kernel(host, NEXT, "kernel/fs/ext4/ext4.ko:\n")
    assert _line(host).status == "failed"
    assert f"kernel {NEXT} has no NVIDIA module, and no headers" in _line(host).reason
    assert f"install linux-headers-{NEXT}" in _line(host).reason
    (host.root / f"usr/src/linux-headers-{NEXT}").mkdir(parents=True)
    (host.root / f"usr/src/linux-headers-{NEXT}/Makefile").write_text("")
    (host.root / f"lib/modules/{NEXT}/build").symlink_to(f"/usr/src/linux-headers-{NEXT}")
    assert [kernel.headers for kernel in gather_kernels(host)] == [False, True]
    assert "and no headers" not in _line(host).reason


@pytest.mark.parametrize(("module", "builds"), [("nvidia-current", True), ("nvidia", True), ("nvidia-fs", False)])
def test_only_the_drivers_own_module_counts_as_built_by_dkms(tmp_path: Path, module: str, builds: bool) -> None:
    """nvidia-fs, of GPUDirect Storage, is built against any driver."""
    host = FakeHost(tmp_path / "root", metal=True)
    _install_kernel(host, NEXT, "")
    host.make_directory(f"/lib/modules/{NEXT}/build")
    host.write(f"/lib/modules/{NEXT}/build/Makefile", b"")
    host.make_directory(f"/var/lib/dkms/{module}")
    assert ("DKMS does not build it" in _line(host).reason) is not builds


def test_headers_are_named_as_the_package_manager_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost(tmp_path / "root", metal=True)
    _install_kernel(host, NEXT, "")
    manager = SimpleNamespace(gather=lambda system: PackageFacts("dnf", {}), typed=Dnf().typed)
    monkeypatch.setattr("gpuprov.verify.manager_on", lambda system: manager)
    monkeypatch.setattr("gpuprov.verify.kernel_headers", lambda row, release: (f"kernel-devel={release}",))
    assert f"install kernel-devel-{NEXT}; dkms" in _line(host).reason


def test_left_over_modules_are_no_kernel(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root", metal=True)
    _install_kernel(host, NEXT, "")
    (host.root / f"boot/vmlinuz-{NEXT}").unlink()
    assert gather_kernels(host) == ()


def test_in_a_container_it_is_the_machines_outside(tmp_path: Path) -> None:
    found = _line(FakeHost(tmp_path / "root"))
    assert (found.status, found.on_host) == ("ok", "the container host's")

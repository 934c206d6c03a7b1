"""Kernel modules that come compiled: taken where there are some for the running kernel, and kept to."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.bundle.manifest import BundleFacts
from gpuprov.cdi.discover import DriverFacts
from gpuprov.core.changes import FileFact
from gpuprov.core.system import System
from gpuprov.driver import cuda_repository, kernel, precompiled
from gpuprov.driver.packaged import ChangeDriverRpms, EnableStream
from gpuprov.facts.host import HostFacts
from gpuprov.machine.machine import gather_kernel
from gpuprov.machine.pci import PciGpu
from gpuprov.packages.interface import PackageFacts
from gpuprov.packages.managers import Offers
from gpuprov.packages.rpm import InstallRpmPackages
from gpuprov.plan.context import source_of
from gpuprov.plan.refusals import refusals
from gpuprov.plan.steps import make_plan
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.spec import HostSpec, parse_spec
from tests.unit.bundle.test_rpm import MANIFEST

pytestmark = pytest.mark.root
_RHEL_KERNEL, _SLES_KERNEL = "5.14.0-611.24.1.el9_7.x86_64", "6.4.0-150600.23.7-default"
_V100 = (PciGpu("0000:01:00.0", "1db4"),)


@pytest.fixture(scope="module")
def metal(debian: HostFacts) -> HostFacts:
    """A bare machine with a V100, which the proprietary modules serve alone."""
    return replace(debian, driver=DriverFacts(), gpus=_V100)


def rhel(facts: HostFacts, installed: Mapping[str, str] | None = None, *, stream: str = "", **more: Any) -> HostFacts:
    """Return the machine with Red Hat Enterprise Linux 9."""
    os = replace(facts.os, id=more.pop("id", "rhel"), version=more.pop("version", "9.7"), name="RHEL", codename="")
    running = replace(facts.kernel, release=more.pop("release", _RHEL_KERNEL), container="", takes_modules=True, **more)
    file = FileFact(f"[nvidia-driver]\nstream={stream}\n".encode(), 0o644, 0, 0)
    files = {cuda_repository.STREAM_FILE: file} if stream else {}
    return replace(facts, os=os, kernel=running, packages=PackageFacts("dnf", installed or {}), files=files)


def sles(facts: HostFacts, installed: Mapping[str, str] | None = None) -> HostFacts:
    """Return the machine with SUSE Linux Enterprise 15 SP6 and an H100."""
    os = replace(facts.os, id="sles", version="15.6", name="SLES", codename="")
    running = replace(facts.kernel, release=_SLES_KERNEL, container="", takes_modules=True)
    gpus = (PciGpu("0000:01:00.0", "2330"),)
    return replace(facts, os=os, kernel=running, packages=PackageFacts("zypper", installed or {}), gpus=gpus)


def offered(facts: HostFacts, *packages: str) -> HostFacts:
    """Return the machine whose repositories offer `NAME VERSION-RELEASE.ARCH …`, and headers."""
    found: dict[str, tuple[str, ...]] = {}
    for package in packages:
        name, version = package.split()
        found[name] = (*found.get(name, ()), version)
    return replace(facts, offers=Offers(facts.packages.manager, found))


def module_problems(facts: HostFacts, wanted: HostSpec) -> tuple[Problem, ...]:
    return tuple(precompiled.problems(facts, wanted, precompiled.chosen(facts, wanted)))


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver": "packages", **values})


def kmod(driver: str, running: str = "5.14.0-611.24.1", kind: str = "") -> str:
    return f"kmod-nvidia-{kind}{driver}-{running} 3:{driver}-3.el9_7.x86_64"


def test_the_repositories_are_asked_for_this_kernels_modules_and_headers(metal: HostFacts) -> None:
    asked = kernel.questions(source_of(rhel(metal), spec()))
    assert asked[0] == "kmod-nvidia-[0-9]*-5.14.0-611.24.1"
    assert any(name.startswith("kernel-devel") for name in asked[1:])
    newer = replace(rhel(metal), gpus=(PciGpu("0000:01:00.0", "2330"),))
    assert kernel.questions(source_of(newer, spec()))[0] == "kmod-nvidia-open-[0-9]*-5.14.0-611.24.1"
    assert source_of(rhel(metal), spec(kernel_modules="build")).questions() == ()
    assert source_of(rhel(metal, id="rocky"), spec()).questions() == ()
    assert source_of(rhel(metal, id="rocky"), spec(kernel_modules="precompiled")).questions() == asked[:1]
    assert source_of(rhel(metal, release="5.14.0-custom"), spec()).questions() == ()
    assert source_of(rhel(metal), spec(module_signing_key="/root/mok.key")).questions() == ()


def test_newest_driver_with_modules_for_this_kernel_is_taken(metal: HostFacts) -> None:
    others = (kmod("580.200.01", "5.14.0-611.30.1"), kmod("580.99.01", kind="open-"), "kernel-devel 0:5-1.x86_64")
    facts = offered(rhel(metal), kmod("570.211.01"), kmod("580.95.05"), kmod("580.105.08"), *others)
    assert source_of(facts, spec()).plan_preparation() == (EnableStream("580"),)
    assert source_of(facts, spec()).packages() == ("cuda-drivers=580.105.08", "kmod-nvidia-580.105.08-5.14.0-611.24.1")
    assert kernel.packages(source_of(facts, spec())) == ()
    assert source_of(facts, spec(driver_version="570")).plan_preparation() == (EnableStream("570"),)
    assert source_of(facts, spec(driver_version="570")).packages()[0] == "cuda-drivers=570.211.01"


def test_a_driver_that_does_not_serve_the_gpus_is_passed_over(metal: HostFacts) -> None:
    found = precompiled.chosen(offered(rhel(metal), kmod("590.48.01"), kmod("580.105.08")), spec())
    assert found and found.driver == "580.105.08", "580 is the last branch for Volta"


def test_open_modules_have_streams_of_their_own(metal: HostFacts) -> None:
    facts = offered(replace(rhel(metal), gpus=(PciGpu("0000:01:00.0", "2330"),)), kmod("580.105.08", kind="open-"))
    assert source_of(facts, spec()).plan_preparation() == (EnableStream("580-open-gpu"),)
    assert source_of(facts, spec()).packages()[1] == "kmod-nvidia-open-580.105.08-5.14.0-611.24.1"


def test_release_10_has_no_streams(metal: HostFacts) -> None:
    facts = rhel(metal, version="10.1", release="6.12.0-124.20.1.el10_1.x86_64")
    facts = offered(facts, kmod("580.105.08", "6.12.0-124.20.1"))
    assert source_of(facts, spec()).plan_preparation() == ()
    assert source_of(facts, spec()).packages()[1] == "kmod-nvidia-580.105.08-6.12.0-124.20.1"


def test_where_there_are_none_they_are_built_or_their_lack_is_said(metal: HostFacts) -> None:
    facts = offered(rhel(metal), kmod("580.105.08", "5.14.0-611.30.1"), "kernel-devel 0:5.14.0-1.el9.x86_64")
    assert source_of(facts, spec()).plan_preparation() == (EnableStream("latest-dkms"),)
    assert source_of(facts, spec()).packages() == ("cuda-drivers",)
    assert kernel.packages(source_of(facts, spec())) != ()
    assert module_problems(facts, spec()) == ()
    (problem,) = module_problems(facts, spec(kernel_modules="precompiled"))
    assert problem.what.startswith("no repository has proprietary kernel modules that are compiled for the running")
    assert problem.evidence == "looked for kmod-nvidia-[0-9]*-5.14.0-611.24.1"
    assert "gpuprov_kernel_modules: build" in problem.next_step


_INSTALLED = {
    "cuda-drivers": "3:580.105.08-1.el9.noarch",
    "kmod-nvidia-580.105.08-5.14.0-611.24.1": "3:580.105.08-3.el9_7.x86_64",
}


@pytest.mark.parametrize("stream", ["580", "latest"])
def test_a_second_run_asks_nobody_and_changes_nothing(metal: HostFacts, stream: str) -> None:
    facts = rhel(metal, _INSTALLED, stream=stream)
    assert kernel.questions(source_of(facts, spec())) == ()
    assert source_of(facts, spec()).plan_preparation() == source_of(facts, spec()).plan_other_version() == ()
    assert set(source_of(facts, spec()).packages()) == set(_INSTALLED)
    assert kernel.packages(source_of(facts, spec())) == ()


def test_the_next_kernel_gets_its_modules_or_is_refused(metal: HostFacts) -> None:
    booted = rhel(metal, _INSTALLED, stream="580", release="5.14.0-611.30.1.el9_7.x86_64")
    assert source_of(booted, spec()).questions() == ("kmod-nvidia-[0-9]*-5.14.0-611.30.1",)
    assert module_problems(booted, spec()) == (), "nobody was asked yet"
    facts = offered(booted, kmod("580.105.08", "5.14.0-611.30.1"))
    assert source_of(facts, spec()).packages() == ("cuda-drivers", "kmod-nvidia-580.105.08-5.14.0-611.30.1")
    (problem,) = module_problems(offered(booted), spec())
    assert problem.evidence == "in use is kmod-nvidia-580.105.08-5.14.0-611.24.1"


def test_an_updated_driver_needs_modules_of_its_own(metal: HostFacts) -> None:
    facts = rhel(metal, {**_INSTALLED, "cuda-drivers": "3:580.126.16-1.el9.noarch"}, stream="580")
    assert precompiled.chosen(facts, spec()) is None
    found = precompiled.chosen(offered(facts, kmod("580.126.16")), spec())
    assert found and found.module == "kmod-nvidia-580.126.16-5.14.0-611.24.1"


def test_another_branch_brings_its_modules_first(metal: HostFacts) -> None:
    wanted = spec(driver_version="570")
    facts = offered(rhel(metal, _INSTALLED, stream="580"), kmod("570.211.01"))
    assert source_of(facts, wanted).plan_preparation() == (EnableStream("570", "580"),)
    changes = [item.change for item in make_plan(replace(facts, boot=facts.boot), wanted, ("packages",)).changes]
    kinds = [type(change) for change in changes]
    install = next(change for change in changes if isinstance(change, InstallRpmPackages))
    assert "kmod-nvidia-570.211.01-5.14.0-611.24.1" in install.names
    assert "cuda-drivers" not in install.names
    assert kinds.index(EnableStream) < kinds.index(InstallRpmPackages) < kinds.index(ChangeDriverRpms)


@pytest.mark.parametrize(
    ("installed", "asked", "says"),
    [
        ({"kmod-nvidia-latest-dkms": "3:580.105.08-1.el9.noarch"}, "precompiled", "which are compiled ones"),
        (_INSTALLED, "build", "which are ones built here"),
        ({"kmod-nvidia-latest-dkms": "3:580.105.08-1.el9.noarch"}, "auto", ""),
        (_INSTALLED, "auto", ""),
        (_INSTALLED, "precompiled", ""),
    ],
)
def test_built_and_compiled_ones_stay(metal: HostFacts, installed: Mapping[str, str], asked: str, says: str) -> None:
    found = module_problems(rhel(metal, installed), spec(kernel_modules=asked))
    assert [says in one.what for one in found] == [True] * bool(says)


def test_a_run_file_has_none(metal: HostFacts) -> None:
    wanted = parse_spec({"driver_version": "580.105.08", "kernel_modules": "precompiled"})
    steps = [problem.next_step for problem in refusals(source_of(rhel(metal), wanted))]
    assert "set gpuprov_driver: packages, or leave gpuprov_kernel_modules out" in steps


def test_secure_boot_wants_nvidias_key_enrolled_for_nvidias_modules(metal: HostFacts) -> None:
    def problems(facts: HostFacts) -> tuple[Problem, ...]:
        modules = kmod("580.105.08"), kmod("580.105.08", "6.12.0-124.20.1")
        return kernel.problems(source_of(offered(facts, *modules), spec()))

    (problem,) = problems(rhel(metal, secure_boot="enabled"))
    assert "rhel9/x86_64/NVIDIA2019-public_key.der" in problem.next_step
    assert problems(rhel(metal, secure_boot="enabled", trusts_nvidia=True)) == ()
    # Release 10's modules are Red Hat's own.
    ten = rhel(metal, secure_boot="enabled", version="10.1", release="6.12.0-124.20.1.el10_1.x86_64")
    assert problems(ten) == ()


def test_the_kernels_list_of_keys(tmp_path: Path) -> None:
    def trusts_nvidia(keys: str) -> bool:
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/keys").write_text(keys)
        return gather_kernel(System(str(tmp_path))).trusts_nvidia

    ours = "1f5e1f3c I------     1 perm 1f030000     0     0 asymmetri Debian Secure Boot CA: 6cceff: X509.rsa b4 []\n"
    assert not trusts_nvidia(ours)
    assert not trusts_nvidia("2a I--- 1 perm 3f 0 0 user NVIDIA: 8\n")
    assert trusts_nvidia(ours + "2b I------     1 perm 1f030000     0     0 asymmetri NVIDIA 2019: 9c: X509 []\n")


_KMP = "nvidia-open-driver-G06-signed-cuda-kmp-default"


def test_suse_signs_modules_for_a_service_pack(metal: HostFacts) -> None:
    assert _KMP in source_of(sles(metal), spec()).questions()
    facts = offered(
        sles(metal),
        "nv-prefer-signed-open-driver 580.105.08-150600.3.1.x86_64",
        "nv-prefer-signed-open-driver 580.126.16-150600.3.2.x86_64",
        f"{_KMP} 580.105.08_k6.4.0_150600.21-150600.3.1.x86_64",
        f"{_KMP} 580.126.16_k6.4.0_150700.51-150700.3.2.x86_64",
        "nvidia-compute-utils-G06 580.105.08-1.x86_64",
        "nvidia-compute-utils-G06 580.126.16-1.x86_64",
    )
    names = ("nvidia-compute-utils-G06", "nvidia-persistenced", "nv-prefer-signed-open-driver")
    module = f"{_KMP}=580.105.08_k6.4.0_150600.21"
    expected = (*(f"{name}=580.105.08" for name in names), module)
    assert source_of(facts, spec()).packages() == expected
    assert kernel.packages(source_of(facts, spec())) == ()
    utilities = dict.fromkeys(names, "580.105.08-1.x86_64")
    there = sles(metal, {**utilities, _KMP: "580.105.08_k6.4.0_150600.21-150600.3.1.x86_64"})
    assert kernel.questions(source_of(there, spec())) == ()
    assert source_of(there, spec()).packages() == expected
    secure = replace(there, kernel=replace(there.kernel, secure_boot="enabled"))
    assert kernel.problems(source_of(secure, spec())) == ()


def test_libraries_of_another_version_than_the_modules_are_none(metal: HostFacts) -> None:
    facts = offered(
        sles(metal),
        "nv-prefer-signed-open-driver 580.126.16-150600.3.2.x86_64",
        f"{_KMP} 580.126.16_k6.4.0_150600.21-150600.3.2.x86_64",
        "nvidia-compute-utils-G06 580.105.08-1.x86_64",
    )
    assert precompiled.chosen(facts, spec()) is None
    assert source_of(facts, spec()).packages() == ("nvidia-open",)


@pytest.mark.parametrize(
    "package",
    [
        "kmod-nvidia-4.18.0-553.el8_10 3:570.86.16-1.el8.x86_64",  # negativo17's
        "kmod-nvidia-6.9.7-200.fc40.x86_64 3:555.58-1.fc40.x86_64",  # RPM Fusion's
        "kmod-nvidia-580.105.08-5.14.0-611.24.1;reboot 3:580.105.08-3.el9_7.x86_64",
        "kmod-nvidia-latest-dkms 3:580.105.08-1.el9.noarch",
    ],
)
def test_packages_of_others_are_none(metal: HostFacts, package: str) -> None:
    assert precompiled.chosen(offered(rhel(metal), package), spec()) is None
    name, version = package.split()
    assert module_problems(rhel(metal, {name: version}), spec(kernel_modules="build")) == ()


def test_who_has_them_stays_with_them(metal: HostFacts) -> None:
    rocky = rhel(metal, _INSTALLED, stream="580", id="rocky")
    for wanted in (spec(), spec(module_signing_key="/root/mok.key", module_signing_certificate="/root/mok.der")):
        assert set(source_of(rocky, wanted).packages()) == set(_INSTALLED)
        assert source_of(rocky, wanted).plan_preparation() == ()
        assert kernel.packages(source_of(rocky, wanted)) == ()
    built = rhel(metal, {"cuda-drivers": "3:580.105.08-1.el9.noarch"}, stream="latest-dkms")
    assert source_of(built, spec()).questions() == ()
    assert source_of(offered(built, kmod("590.48.01")), spec()).packages() == ("cuda-drivers",)


def test_without_a_network_they_are_built(metal: HostFacts) -> None:
    facts = replace(offered(rhel(metal), kmod("580.105.08")), bundle=BundleFacts(MANIFEST))
    assert precompiled.chosen(facts, spec()) is None
    assert kernel.questions(source_of(facts, spec())) == ()

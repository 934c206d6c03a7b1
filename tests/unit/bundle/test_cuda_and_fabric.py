"""The CUDA toolkit's .run and the fabric manager in a bundle: what is taken along, and what a host makes of it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gpuprov.bundle.manifest import BundleFacts, BundlePackage, Manifest
from gpuprov.bundle_create.recipe import Mirror, Recipe, RunFile, Wanted, make_recipe, mirror_at
from gpuprov.core.places import FOLDER
from gpuprov.driver import fabric_manager
from gpuprov.facts.gpus import FabricFacts
from gpuprov.facts.host import HostFacts, gather
from gpuprov.packages.apt_changes import InstallPackages, RefreshPackageIndex
from gpuprov.packages.interface import LockFacts
from gpuprov.packages.keys import InstallRpmKey
from gpuprov.plan import software
from gpuprov.plan.context import PlanContext, source_of
from gpuprov.plan.preflight import preflight
from gpuprov.plan.steps import Step, make_plan
from gpuprov.protocol.errors import ExitCode, UsageError
from gpuprov.protocol.events import Finished
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, parse_spec, spec_to_json
from tests import simgpu
from tests.bundles import FILES, MANIFEST, listed, write_test_bundle
from tests.simgpu.cuda_run import build_cuda_run
from tests.unit.ask import ask
from tests.unit.test_cuda_runfile import PREFIX, CudaHost
from tests.unit.test_fabric_manager import SwitchHost

pytestmark = pytest.mark.root
VERSION = simgpu.DRIVER_VERSION
URL, DIGEST = "https://mirror.example/cuda_12.4.1_linux.run", "c" * 64
CUDA_FILE = "cuda/cuda-12.4-x86_64.run"
FABRIC_MANAGER = f"nvidia-fabricmanager-550={VERSION}-*"


def recipe(*specs: HostSpec, **options: Any) -> Recipe:
    return make_recipe(
        dataclasses.replace(Wanted("debian-12", "x86_64", mirror=mirror_at("http://m.example/debian")), **options),
        specs or (HostSpec(),),
    )


def refusal(*specs: HostSpec, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        recipe(*specs, **options)
    assert all(one.next_step for one in caught.value.problems)
    return str(caught.value)


# -- making it -------------------------------------------------------------------------------------------------------


def test_the_run_that_hosts_ask_for_comes_along_instead_of_packages() -> None:
    asked = HostSpec(cuda="12.4", cuda_url=URL, cuda_sha256=DIGEST)
    found = recipe(asked, HostSpec(), dataclasses.replace(asked, cuda_sha256=""))
    assert found.cuda == RunFile("12.4", URL, DIGEST)
    assert not any("cuda" in name for name in found.packages)
    assert found.inputs()["cuda_url"] == URL
    # A path is a file that the hosts have.
    assert recipe(HostSpec(cuda="12.4", cuda_url="/root/cuda.run")).cuda == RunFile()


def test_a_file_that_is_here_is_for_those_hosts_that_ask_for_cuda() -> None:
    local = HostSpec(cuda_url="file:///root/cuda.run", cuda_sha256=DIGEST)
    found = recipe(dataclasses.replace(local, cuda="12.4"), local)
    assert found.cuda == RunFile("12.4", local.cuda_url, DIGEST)
    assert "which version" in refusal(local)


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ((HostSpec(cuda="12.4", cuda_url=URL),), "the SHA-256 of the CUDA toolkit's .run is not known"),
        ((HostSpec(cuda="12.4", cuda_url=URL), HostSpec(cuda="12.6", cuda_url=URL)), "different CUDA toolkits"),
        (
            (HostSpec(cuda="12.4", cuda_url=URL, cuda_sha256=DIGEST),
             HostSpec(cuda="12.4", cuda_url=URL, cuda_sha256="d" * 64)),
            "different digests of one of the CUDA toolkits",
        ),
    ],
)  # fmt: skip
def test_a_run_that_could_not_be_trusted_is_refused(specs: tuple[HostSpec, ...], says: str) -> None:
    assert says in refusal(*specs)


def test_the_fabric_manager_is_the_drivers_from_nvidias_repository() -> None:
    spec = HostSpec(driver_version=VERSION, docker="preinstalled")
    found = recipe(spec, fabric_manager=True)
    assert found.packages == (FABRIC_MANAGER,)
    assert [(one.name, one.key_fingerprint) for one in found.repositories] == [
        ("cuda", "EB693B3035CD5710E231E123A4B469963BF863CC")
    ]
    rpm = recipe(spec, distro="rocky-9", fabric_manager=True)
    assert rpm.packages == (f"nvidia-fabric-manager={VERSION}",)
    # It lies in a module stream that nobody has enabled.
    assert [(one.name, one.all_streams) for one in rpm.rpm_sources][-1] == ("cuda", True)
    assert not any(one.all_streams for one in rpm.rpm_sources[:-1])
    assert recipe(spec).repositories == ()


UBUNTU = Mirror("http://m.example/ubuntu")


@pytest.mark.parametrize(
    ("distro", "values", "package"),
    [
        ("debian-12", {"imex": "dra"}, f"nvidia-imex-550={VERSION}-*"),
        ("debian-12", {"imex": "service"}, f"nvidia-imex-550={VERSION}-*"),
        ("rocky-9", {"imex_nodes": ("10.0.0.1 gpu1",), "driver_version": "580.178.04"}, "nvidia-imex=580.178.04"),
        ("ubuntu-24.04", {"imex": "dra", "driver": "distribution", "driver_version": "580"}, "nvidia-imex-580"),
        ("debian-12", {}, ""), ("debian-12", {"imex": "off", "imex_nodes": ("10.0.0.1 gpu1",)}, ""),
    ],
)  # fmt: skip
def test_imex_comes_along_for_hosts_that_run_it(distro: str, values: dict[str, Any], package: str) -> None:
    spec = HostSpec(**{"driver_version": VERSION, "docker": "preinstalled", **values})
    found = recipe(spec, distro=distro, mirror=UBUNTU)
    assert [name for name in found.packages if "imex" in name] == ([package] if package else [])
    names = {one.name for one in found.repositories} | {one.name for one in found.rpm_sources}
    assert ("cuda" in names) is ("=" in package)


def test_a_fabric_manager_that_can_not_be_had_is_told() -> None:
    assert "add --driver" in refusal(HostSpec(imex="dra", driver="preinstalled"))
    assert "there is no driver" in refusal(fabric_manager=True)
    spec = HostSpec(driver_version=VERSION)
    assert "does not know the fingerprint" in refusal(spec, distro="rocky-10", fabric_manager=True)
    assert "NVIDIA has no CUDA repository for" in refusal(spec, distro="opensuse-tumbleweed", fabric_manager=True,
                                                           sources=(f"https://a /key {'A' * 40}",))  # fmt: skip


# -- the CUDA toolkit on a host --------------------------------------------------------------------------------------


class UnpackedHost(CudaHost):
    """Sees what is unpacked when packages are looked for, or an installer runs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.unpacked: set[str] = set()

    def run(self, argv: Any, **more: Any) -> Any:
        self.unpacked |= {*self.list_directory(FOLDER)} & {"cuda", "driver", "repository"}
        return super().run(argv, **more)


@pytest.fixture
def host(tmp_path: Path) -> UnpackedHost:
    return UnpackedHost(tmp_path / "root")


def with_cuda(host: CudaHost, **fields: Any) -> Path:
    """Write a bundle with the toolkit in it."""
    manifest = dataclasses.replace(MANIFEST, cuda_version="12.4", cuda_file=CUDA_FILE, **fields)
    return write_test_bundle(host.root / "root/bundle.tar", manifest, {**FILES, CUDA_FILE: host.file.read_bytes()})


def install(host: CudaHost, **values: Any) -> Finished:
    spec = parse_spec({"driver": "preinstalled", **values})
    steps = ("download", "packages", "driver")
    return ask(host, Request("install", spec_to_json(spec), steps=steps, bundle="/root/bundle.tar"))[0]


@pytest.mark.parametrize("more", [{}, {"cuda_url": URL}])
def test_run_file_of_a_bundle_is_installed_once(host: UnpackedHost, more: dict[str, str]) -> None:
    with_cuda(host)
    done = install(host, cuda="12.4", **more)
    assert (done.exit_code, done.changed) == (ExitCode.DONE, 2), done.problems
    assert gather(host).cuda.toolkits == {PREFIX: "12.4.1"}
    assert host.unpacked == {"cuda"}
    assert host.list_directory("/var/cache/gpuprov") == ()
    assert install(host, cuda="12.4", **more).changed == 0


def test_who_asks_for_no_cuda_gets_none(host: UnpackedHost) -> None:
    with_cuda(host)
    assert install(host, packages=["site-gpu-tools"]).exit_code == ExitCode.DONE
    assert (gather(host).cuda.toolkits, host.unpacked) == ({}, {"repository"})


def test_packages_of_that_version_are_for_those_who_name_no_file(host: UnpackedHost) -> None:
    package = dataclasses.replace(MANIFEST.packages[0], name="cuda-toolkit-12-4")
    with_cuda(host, packages=(*MANIFEST.packages, package))
    host.available["cuda-toolkit-12-4"] = "1.0"
    assert install(host, cuda="12.4").exit_code == ExitCode.DONE
    assert "cuda-toolkit-12-4" in host.installed


def test_a_path_is_the_hosts_own_file(host: UnpackedHost) -> None:
    with_cuda(host)
    newer = build_cuda_run(host.root, "12.4.9")
    assert install(host, cuda="12.4", cuda_url=f"/{newer.name}").exit_code == ExitCode.DONE
    assert gather(host).cuda.toolkits == {PREFIX: "12.4.9"}
    assert host.unpacked == set()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"cuda": "12.6", "cuda_url": URL, "cuda_sha256": DIGEST}, "it holds 12.4, asked for is 12.6 from https://"),
        ({"cuda": "12.4", "cuda_sha256": DIGEST}, "the bundle's CUDA toolkit is not the one that is pinned"),
        ({"cuda": "12.6"}, "--package cuda-toolkit-12-6"),
    ],
)
def test_a_toolkit_that_it_does_not_hold_is_refused(host: UnpackedHost, values: dict[str, str], says: str) -> None:
    with_cuda(host)
    before = host.state()
    done = install(host, **values)
    assert done.exit_code == ExitCode.FAILED
    assert says in "\n".join(str(one) for one in done.problems)
    assert host.state() == before


# -- the fabric manager on a host ------------------------------------------------------------------------------------


def switches(tmp_path: Path, **fields: Any) -> HostFacts:
    """Return a machine with NVSwitches, and a bundle that holds what its kernel needs."""
    facts = gather(SwitchHost(tmp_path / "root"))
    file = MANIFEST.packages[0].file
    names = (f"linux-headers-{facts.kernel.release}", "gcc", "make", "libc6-dev", "dkms", "kmod", "libtirpc3")
    build = tuple(BundlePackage(name, "1.0", "amd64", file) for name in names)
    manifest = dataclasses.replace(listed(MANIFEST, FILES), packages=(*MANIFEST.packages, *build), **fields)
    return dataclasses.replace(facts, bundle=BundleFacts(manifest))


def asked(facts: HostFacts) -> HostSpec:
    assert facts.bundle is not None
    manifest = facts.bundle.manifest
    return HostSpec(driver_version=VERSION, driver_url=f"{FOLDER}/{manifest.driver_file}",
                    driver_sha256=manifest.file(manifest.driver_file).sha256)  # fmt: skip


def test_a_bundle_need_not_contain_the_plugin_by_which_dnf_holds_it(tmp_path: Path) -> None:
    facts = switches(tmp_path)
    lacking = dataclasses.replace(
        facts, packages=dataclasses.replace(facts.packages, locks=LockFacts(missing_plugin=("plugin",)))
    )
    assert software.unheld(source_of(facts, asked(facts))) == ""
    source = source_of(lacking, asked(facts))
    assert software.unheld(source) == "the driver's packages are not held: the bundle lacks plugin"
    assert "plugin" not in software.wanted(source) and software.plan_driver_hold(source, coming=True) == ()
    connected = dataclasses.replace(source, facts=dataclasses.replace(lacking, bundle=None))
    assert "plugin" in software.wanted(connected)


def test_the_bundle_is_the_only_source_of_the_fabric_manager(tmp_path: Path) -> None:
    facts = switches(tmp_path, inputs={"packages": [FABRIC_MANAGER]})
    assert [one.what for one in preflight(PlanContext(facts, asked(facts)))] == []
    refresh, installation, *_ = fabric_manager.plan(source_of(facts, asked(facts)))
    assert isinstance(refresh, RefreshPackageIndex) and isinstance(installation, InstallPackages)
    assert installation.names == (FABRIC_MANAGER,)
    assert f"Dir::Etc::sourcelist={FOLDER}/sources.list" in refresh.options
    assert installation.options == refresh.options


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [("fabricmanager", "--fabric-manager", {}), ("imex", "-e gpuprov_imex=service", {"imex": "dra"})],
)
@pytest.mark.parametrize(("version", "held"), [(f"{VERSION}-1", True), (f"{VERSION}-1ubuntu1", True), ("1-1", False)])
def test_a_bundle_without_the_very_version_is_refused(
    tmp_path: Path, version: str, name: str, option: str, values: dict[str, Any], *, held: bool
) -> None:
    """It may have come by --package, too."""
    facts = switches(tmp_path)
    facts = dataclasses.replace(facts, fabric=FabricFacts() if values else facts.fabric)
    assert facts.bundle is not None
    manifest: Manifest = facts.bundle.manifest
    package = BundlePackage(f"nvidia-{name}-550", version, "amd64", manifest.packages[0].file)
    more = dataclasses.replace(manifest, packages=(*manifest.packages, package))
    facts = dataclasses.replace(facts, bundle=BundleFacts(more))
    wanted = dataclasses.replace(asked(facts), **values)
    problems = [str(one) for one in preflight(PlanContext(facts, wanted))]
    assert (problems == []) is held, problems
    assert held or ("lacks packages" in problems[0] and f"create {option} …" in problems[0])


def test_a_key_that_two_steps_need_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, refresh = InstallRpmKey("/k", "file:///k", "A" * 40), RefreshPackageIndex()
    made = [Step(name, lambda _: (key, refresh)) for name in ("packages", "driver")]
    monkeypatch.setattr("gpuprov.plan.steps.STEPS", made)
    facts = switches(tmp_path, inputs={"packages": [FABRIC_MANAGER]})
    changes = [(one.step, one.change) for one in make_plan(facts, asked(facts)).changes]
    assert changes == [("packages", key), ("packages", refresh), ("driver", refresh)]

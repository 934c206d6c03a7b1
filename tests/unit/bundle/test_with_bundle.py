"""What a bundle lacks for a host, how it is unpacked for a run and goes again, and how its images are loaded."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gpuprov.bundle.manifest import BundleFacts, BundleFile, BundleImage, BundlePackage
from gpuprov.bundle.open import opened
from gpuprov.core.changes import Change
from gpuprov.core.commands import Completed
from gpuprov.core.places import CACHE_DIRECTORY, FOLDER, KEPT_PACKAGES
from gpuprov.driver.cuda_toolkit import InstallCudaToolkit
from gpuprov.engines.containers import image_identity
from gpuprov.facts.host import HostFacts
from gpuprov.facts.host import gather as gather_facts
from gpuprov.plan.with_bundle import LoadImage, gather, plan_images, problems, unpacked
from gpuprov.protocol.spec import HostSpec
from tests.bundles import DRIVER, FILES, MANIFEST, listed, write_test_bundle
from tests.unit.fake_host import RELEASE, FakeHost
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted

IMAGES = (BundleImage("app:1", "1" * 64, "images/app_1.tar"), BundleImage("base:2", "2" * 64, "images/base_2.tar"))
SHA = next(one.sha256 for one in listed(MANIFEST, FILES).files if one.path == DRIVER)
WANTED = HostSpec(driver_version=MANIFEST.driver_version, driver_sha256=SHA)
# A megabyte of each part.
FULL = replace(
    MANIFEST,
    files=tuple(
        BundleFile(path, 1 << 20, SHA if path == DRIVER else "0" * 64)
        for path in ("repository/a.deb", "keys/a.asc", DRIVER, "cuda/cuda.run", "images/app_1.tar", "agent/agent.pyz")
    ),
)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    return gather_facts(FakeHost(tmp_path_factory.mktemp("host") / "root"))


def with_bundle(
    facts: HostFacts, manifest: dict[str, Any], *, loaded: Sequence[str] = (), mib: int | None = None, **changes: Any
) -> HostFacts:
    bundle = BundleFacts(replace(FULL, **manifest), frozenset(loaded))
    return replace(facts, bundle=bundle, free_bytes={} if mib is None else {CACHE_DIRECTORY: mib << 20}, **changes)


_NO_IMAGES = ("app:1", "base:2")


@pytest.mark.parametrize(
    ("manifest", "spec", "packages", "driver", "says"),
    [
        ({}, {}, (), False, ""),
        ({"version": "*"}, {}, (), False, ""),
        ({"version": "1"}, {}, (), False, "the bundle is for debian 1 on x86_64"),
        ({"distribution": "ubuntu"}, {}, (), False, "ID=debian VERSION_ID=12"),
        ({"architecture": "aarch64"}, {}, (), False, "--distro debian-12 --arch x86_64"),
        ({"architecture": "aarch64"}, {}, (), False, "uname -m: x86_64"),
        # A driver is compared only where one is installed.
        ({"driver_file": "", "driver_version": ""}, {}, (), False, ""),
        ({}, {}, (), True, ""),
        ({"driver_file": "", "driver_version": ""}, {}, (), True, "its driver is (none), asked for is 550."),
        ({"driver_file": ""}, {}, (), True, "the bundle does not hold the driver"),
        ({}, {"driver_version": "535.1.2"}, (), True, "create --driver 535.1.2"),
        ({}, {"driver_version": ""}, (), True, "asked for is (none)"),
        ({}, {"driver_version": ""}, (), True, "create --driver VERSION"),
        ({}, {"driver_sha256": "f" * 64}, (), True, f"{DRIVER} has SHA-256 {SHA}, gpuprov_driver_sha256 is ffff"),
        # By name, with its version, as what provides it, by a pattern.
        ({}, {}, ("site-gpu-tools", "site-gpu-tools=1.0", "site-*"), False, ""),
        ({"inputs": {"packages": ["editor"]}}, {}, ("editor",), False, ""),
        ({"inputs": {}}, {}, ("site-gpu-tools",), False, ""),
        ({}, {}, ("site-gpu-tools=2.0",), False, "--package site-gpu-tools=2.0"),
        ({}, {}, ("site-gpu-tools", "b", "a"), False, "seen: b, a\n"),
        ({}, {}, ("b", "a"), False, "create --package b --package a …"),
        ({}, {}, ("nvidia-fabricmanager-550", "nvidia-fabric-manager=1"), False, "create --fabric-manager …"),
        ({}, {}, ("nvidia-imex-550",), False, "create -e gpuprov_imex=service …"),
        ({}, {}, ("datacenter-gpu-manager-4-core",), False,
         "create -e gpuprov_dcgm=true --package datacenter-gpu-manager-4-core …"),
        ({}, {}, (f"linux-headers-{RELEASE}",), False, f"create --kernel {RELEASE} …"),
        ({"images": IMAGES}, {}, (), False, ""),
        ({"images": IMAGES}, {"docker": "none"}, (), False, "neither docker nor podman"),
        ({"images": IMAGES}, {"docker": "none"}, (), False, "seen: app:1, base:2\n"),
        ({}, {"docker": "none"}, (), False, ""),
    ],
)  # fmt: skip
def test_a_bundle_that_does_not_serve_a_host_is_a_problem(
    facts: HostFacts, manifest: dict[str, Any], spec: dict[str, Any], packages: tuple[str, ...], driver: bool, says: str
) -> None:
    host = with_bundle(facts, manifest, loaded=_NO_IMAGES)
    found = [*problems(host, replace(WANTED, **spec), packages, installs_driver=driver)]
    assert len(found) == (1 if says else 0)
    for problem in found:
        assert says in str(problem) and problem.what and problem.evidence and problem.next_step


def test_a_host_without_a_bundle_and_one_of_a_minor_release_have_no_problem(facts: HostFacts) -> None:
    assert not [*problems(facts, WANTED, ("no-such",), installs_driver=True)]
    minor = with_bundle(facts, {"version": "9"}, os=replace(facts.os, version="9.4"))
    assert not [*problems(minor, WANTED, (), installs_driver=False)]
    other = with_bundle(facts, {"version": "9"}, os=replace(facts.os, version="91"))
    assert [*problems(other, WANTED, (), installs_driver=False)]


@pytest.mark.parametrize("version", ["11.4.1", "11.4.1-3.el9", "0:11.4.1-3.el9", "11.4.1-3.el9.x86_64"])
def test_a_bundle_of_rpms_has_a_package_in_every_form_of_its_version(facts: HostFacts, version: str) -> None:
    package = BundlePackage("gcc", "0:11.4.1-3.el9", "x86_64", "repository/gcc.rpm")
    manifest = {"distribution": "rocky", "version": "9", "packages": (package,)}
    host = with_bundle(facts, manifest, os=replace(facts.os, id="rocky", version="9.4"))
    assert not [*problems(host, WANTED, (f"gcc={version}",), installs_driver=False)]
    assert [*problems(host, WANTED, (f"gcc={version}0",), installs_driver=False)]


def test_podman_takes_the_images_of_a_host_without_docker(facts: HostFacts) -> None:
    host = with_bundle(facts, {"images": IMAGES}, engines={"podman": None})
    spec = replace(WANTED, docker="none")
    assert not [*problems(host, spec, (), installs_driver=False)]
    changes = plan_images(host, spec)
    assert changes == tuple(LoadImage(one.reference, one.identity, f"{FOLDER}/{one.file}", "podman") for one in IMAGES)
    assert [change.summary() for change in changes] == [f"load image {name} from the bundle" for name in _NO_IMAGES]
    (second,) = plan_images(with_bundle(facts, {"images": IMAGES}, loaded=("app:1",)), WANTED)
    assert second == LoadImage("base:2", "2" * 64, f"{FOLDER}/images/base_2.tar", "docker")
    assert plan_images(facts, WANTED) == ()


@pytest.mark.parametrize(
    ("packages", "driver", "cuda", "images", "need"),
    [
        ((), False, False, False, 0), (("site-gpu-tools",), False, False, False, 2), ((), True, False, False, 1),
        ((), False, True, False, 1), ((), False, False, True, 1), (("site-gpu-tools",), True, True, True, 5),
    ],
)  # fmt: skip
def test_the_parts_that_are_unpacked_need_room(
    facts: HostFacts, packages: tuple[str, ...], driver: bool, cuda: bool, images: bool, need: int
) -> None:
    def found(mib: int | None) -> list[str]:
        host = with_bundle(facts, {"images": IMAGES}, loaded=_NO_IMAGES[: 1 if images else 2], mib=mib)
        more = {"installs_cuda": True} if cuda else {}
        return [*map(str, problems(host, WANTED, packages, installs_driver=driver, **more))]

    assert found(need) == [] and found(None) == []
    if need:
        (text,) = found(need - 1)
        assert text.count("\n") == 2
        assert f"{need - 1} MiB free on the file system of {CACHE_DIRECTORY}, {need} MiB needed" in text
        assert f"df -h {CACHE_DIRECTORY}" in text


# -- unpacking ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part(Change):
    """A change that needs a part of a bundle, or none."""

    bundle_part: str  # type: ignore[misc]


class Host(Scripted):
    """A host with dpkg and a driver's package, and with the images that it has loaded."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.images: dict[str, str] = {}
        self.loads = "app:1 image"
        self.query: Answer = "installed libnvidia-ml 550.1-1 amd64 install ok \n"
        for path, text in {"etc/os-release": "ID=debian\nVERSION_ID=12\n", f"{FOLDER[1:]}/left": "x"}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        assert argv[1] != "load" or more["timeout"] > 600, "images are large"
        return super().run(argv, **more)

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if argv[0] == "dpkg-query":
            return self.query
        if argv[0] not in ("docker", "podman"):
            return ""
        if argv[1:3] == ("image", "inspect"):
            found = self.images.get(argv[-1])
            short = argv[3:-1] == ("--format", "{{.Id}}")
            return (1, "", "no such image") if found is None else f"{'sha256:' if short else ''}{found}\n"
        if argv[1] == "load":
            if self.loads:
                self.images["app:1"] = self.loads
            return "Loaded image\n" if self.loads else (1, "", "one\ntwo\nthree\nfour\nno space left on device")
        if argv[1] == "tag":
            self.images[argv[3]] = argv[2].removeprefix("sha256:")
        elif argv[1] == "rmi":
            del self.images[argv[2]]
        return ""


PACKAGE = BundlePackage("libnvidia-ml", "550.1-1", "amd64", "repository/libnvidia-ml.deb")
CONTENT = {**FILES, PACKAGE.file: b"deb", "cuda/cuda.run": b"cuda", "images/app_1.tar": b"image", "keys/a.asc": b"key"}
REPOSITORY_FILES = {path for path in CONTENT if path.startswith(("repository/", "keys/"))}
OWN_CUDA = InstallCudaToolkit("12.4.1", "/root/cuda.run")
ITS_CUDA = InstallCudaToolkit("12.4.1", f"{FOLDER}/cuda/cuda.run")


def contents(host: Host) -> set[str]:
    """What lies unpacked, without apt's own files; every folder is root's alone."""
    root = host.path(FOLDER)
    assert all(one.stat().st_mode & 0o777 == 0o700 for one in root.rglob("*") if one.is_dir())
    return {str(one.relative_to(root)) for one in root.rglob("*") if one.is_file()} - {"sources.list"}


@pytest.mark.parametrize(
    ("changes", "files"),
    [
        ((), set()),
        ((Part(""),), set()),
        ((Part("packages"), Part("")), REPOSITORY_FILES),
        ((Part("driver"),), {DRIVER}),
        ((Part("images"), Part("driver")), {DRIVER, "images/app_1.tar"}),
        ((ITS_CUDA,), {"cuda/cuda.run"}),
        ((OWN_CUDA,), set()),
        ((OWN_CUDA, Part("driver")), {DRIVER}),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_needed_files_come_and_go(tmp_path: Path, changes: tuple[Change, ...], files: set[str], fails: bool) -> None:
    host = Host(tmp_path)
    manifest = replace(MANIFEST, packages=(*MANIFEST.packages, PACKAGE))
    write_test_bundle(tmp_path / "root/bundle.tar", manifest, CONTENT)
    end = pytest.raises(KeyError) if fails else contextlib.nullcontext()
    with end, opened(host, "/root/bundle.tar") as bundle, unpacked(host, bundle, changes):
        assert contents(host) == files
        assert all(host.read_bytes(f"{FOLDER}/{path}") == CONTENT[path] for path in files)
        # What apt needs to read no source but the bundle.
        needed = ("none", "lists/partial", "archives/partial", "sources.list")
        assert all(host.exists(f"{FOLDER}/{name}") for name in needed)
        if fails:
            raise KeyError
    assert not host.exists(FOLDER) and not host.exists(KEPT_PACKAGES)


@pytest.mark.parametrize("query", ["", (1, "", "dpkg-query: error")])
@pytest.mark.parametrize("keep", [True, False])
def test_driver_packages_are_kept_if_wanted_and_possible(tmp_path: Path, keep: bool, query: Answer) -> None:
    host = Host(tmp_path)
    host.query = query or host.query
    write_test_bundle(tmp_path / "root/bundle.tar", replace(MANIFEST, packages=(PACKAGE,)), CONTENT)
    with opened(host, "/root/bundle.tar") as bundle, unpacked(host, bundle, (Part("packages"),), keep_driver=keep):
        pass
    assert not host.exists(FOLDER)
    assert bool(host.list_directory(KEPT_PACKAGES)) is (keep and not query)


def test_without_a_bundle_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    host = Host(tmp_path)
    with unpacked(host, None, (Part("packages"),), keep_driver=True):
        assert not host.exists(FOLDER)
    assert not host.exists(FOLDER)


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["docker", "podman"])
@pytest.mark.parametrize("before", ["another image", ""])
def test_an_image_is_loaded_and_the_undo_gives_its_name_back(tmp_path: Path, engine: str, before: str) -> None:
    host = Host(tmp_path)
    host.images = {"app:1": "app:1 image"}
    manifest = replace(MANIFEST, images=(BundleImage("app:1", image_identity(host, "app:1"), "images/app_1.tar"),))
    chosen = (engine,) if engine == "podman" else ()
    assert gather(host, manifest, *chosen) == BundleFacts(manifest, frozenset({"app:1"}))
    host.images = {"app:1": before} if before else {}
    assert gather(host, manifest, engine) == BundleFacts(manifest)
    change = LoadImage("app:1", manifest.images[0].identity, f"{FOLDER}/images/app_1.tar", engine)
    state = change.capture(host)
    assert state["id"] == (f"sha256:{before}" if before else "")
    assert {argv[0] for argv in host.asked[1:]} == {engine}
    host.asked.clear()
    change.apply(host, lambda *_: None)
    assert (engine, "load", "--input", f"{FOLDER}/images/app_1.tar") in host.asked
    # Journals of older versions know docker alone.
    LoadImage.undo(host, state if engine == "podman" else {**state, "engine": "docker"}, None)
    assert host.images == ({"app:1": before} if before else {})
    assert {argv[0] for argv in host.asked} == {engine}
    host.images = {"app:1": "x"}
    LoadImage.undo(host, {name: value for name, value in state.items() if name != "engine"}, None)
    assert host.asked[-1][0] == "docker"


@pytest.mark.parametrize(
    "said", [(124, ""), (137, ""), (1, "", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.")]
)
def test_an_image_of_which_the_engine_tells_nothing_is_not_taken_for_missing(tmp_path: Path, said: Answer) -> None:
    change = LoadImage("app:1", "1" * 64, "/x.tar")
    problem = refused(change.capture, Scripted(tmp_path, {"inspect": said}))
    assert problem.what == "docker does not tell whether it has app:1"
    assert str(said[0]) in problem.evidence or said[-1] in problem.evidence
    assert problem.next_step.startswith("docker info; ")


@pytest.mark.parametrize(("loads", "says"), [("", "no space left on device"), ("another", "Loaded image")])
def test_an_image_that_cannot_be_loaded_is_an_error(tmp_path: Path, loads: str, says: str) -> None:
    host = Host(tmp_path)
    host.loads = loads
    problem = refused(LoadImage("app:1", "1" * 64, "/x.tar", "podman").apply, host, lambda *_: None)
    assert "app:1" in problem.what and "podman" in problem.what and problem.next_step
    assert problem.evidence.splitlines()[-1] == says and "one" not in problem.evidence

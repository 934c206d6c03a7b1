"""Use a bundle on a host: open and check it, compare it with the host, unpack it for a run and remove it afterwards.

No content is trusted before every digest was compared with the manifest. The controller decides whether to trust the
manifest: by a signature, or because it made the bundle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, BinaryIO, ClassVar

from gpuprov.bundle.format import unpack
from gpuprov.bundle.manifest import CUDA, BundleFacts, BundleFile, Manifest
from gpuprov.bundle.open import OpenBundle
from gpuprov.core.changes import Change, Json, Tell
from gpuprov.core.places import CACHE_DIRECTORY, FOLDER, KEYS, REPOSITORY
from gpuprov.core.system import System
from gpuprov.driver import cuda_toolkit, packaged
from gpuprov.engines.containers import image_identity
from gpuprov.machine.distros import find_distribution
from gpuprov.packages.interface import PackageManager
from gpuprov.packages.keys import forget_bundle
from gpuprov.packages.managers import manager_of
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError, Problem
from gpuprov.protocol.spec import HostSpec

if TYPE_CHECKING:
    from gpuprov.facts.host import HostFacts


# The folders of a bundle's parts, by the names that changes have for these.
_FOLDERS = {
    "packages": (f"{REPOSITORY}/", f"{KEYS}/"), "driver": ("driver/",), "cuda": (f"{CUDA}/",), "images": ("images/",),
}  # fmt: skip


def bundle_manager(manifest: Manifest) -> PackageManager:
    """Return the package manager of the hosts that a bundle is for."""
    return manager_of(find_distribution(manifest.distribution, manifest.version))


def gather(system: System, manifest: Manifest, engine: str = "docker") -> BundleFacts:
    """Return the bundle as a fact about the host, with those of its images that the engine has."""
    found = (one for one in manifest.images if image_identity(system, one.reference, engine) == one.identity)
    return BundleFacts(manifest, frozenset(one.reference for one in found))


def problems(
    facts: HostFacts, spec: HostSpec, packages: tuple[str, ...], *, installs_driver: bool, installs_cuda: bool = False
) -> Iterator[Problem]:
    """Yield why the bundle can't serve this host. `packages`: those to be installed."""
    if facts.bundle is None:
        return
    manifest = facts.bundle.manifest
    fits = manifest.version in ("*", facts.os.version) or facts.os.version.startswith(f"{manifest.version}.")
    if not fits or (manifest.distribution, manifest.architecture) != (facts.os.id, facts.architecture):
        what = f"the bundle is for {manifest.target}, this host is another"
        seen = f"/etc/os-release: ID={facts.os.id} VERSION_ID={facts.os.version}; uname -m: {facts.architecture}"
        own = f"--distro {facts.os.id}-{facts.os.version} --arch {facts.architecture}"
        yield Problem(what, seen, f"make one: gpuprov bundle create {own} …")
        return
    if installs_driver and (wrong := _driver_problem(manifest, spec)):
        yield wrong
    if lacking := _package_problem(manifest, packages, facts.kernel.release):
        yield lacking
    if manifest.images and image_engine(spec) == "podman" and "podman" not in facts.engines:
        what = "the bundle holds images, and this host has neither docker nor podman to take them"
        seen = ", ".join(one.reference for one in manifest.images)
        yield Problem(what, seen, "make one without --image for such hosts; or add gpuprov_packages: [podman]")
    images = any(one.reference not in facts.bundle.loaded_images for one in manifest.images)
    needed = {"packages": bool(packages), "driver": installs_driver, "cuda": installs_cuda, "images": images}
    # Unpacking needs room in addition to the bundle itself.
    need = sum(one.size for one in _files_of(manifest, (part for part, is_needed in needed.items() if is_needed)))
    free = facts.free_bytes.get(CACHE_DIRECTORY, need)
    if free < need:
        seen = f"{free // 2**20} MiB free on the file system of {CACHE_DIRECTORY}, {need // 2**20} MiB needed"
        yield Problem("not enough room to unpack the bundle", seen, f"make room: df -h {CACHE_DIRECTORY}")


def image_engine(spec: HostSpec) -> str:
    """Return the engine that gets the images of a bundle."""
    return "podman" if spec.docker == "none" else "docker"


def _driver_problem(manifest: Manifest, spec: HostSpec) -> Problem | None:
    if not manifest.driver_file or spec.driver_version != manifest.driver_version:
        seen = f"its driver is {manifest.driver_version or '(none)'}, asked for is {spec.driver_version or '(none)'}"
        step = f"gpuprov bundle create --driver {spec.driver_version or 'VERSION'} …, or set gpuprov_driver_version"
        return Problem("the bundle does not hold the driver that is asked for", seen, step)
    held = manifest.file(manifest.driver_file).sha256
    if spec.driver_sha256 != held:
        seen = f"{manifest.driver_file} has SHA-256 {held}, gpuprov_driver_sha256 is {spec.driver_sha256}"
        return Problem("the bundle's driver file is not the one that is pinned", seen, "correct one of the two")
    return None


def _package_problem(manifest: Manifest, packages: tuple[str, ...], kernel: str) -> Problem | None:
    # The bundle has what it was made for, possibly under the name of the package that provides it.
    asked = {str(name) for name in manifest.inputs.get("packages", ())}
    manager = bundle_manager(manifest)
    held = {
        f"{one.name}={version}"
        for one in manifest.packages
        for version in manager.bundled_versions(one.version, one.architecture)
    }
    held |= asked | {one.name for one in manifest.packages}
    # The fabric manager is requested by a pattern (apt).
    lacking = [name for name in packages if not any(fnmatchcase(one, name) for one in held)]
    if not lacking:
        return None
    words = dict.fromkeys(_word(name, kernel) for name in lacking)
    what = "the bundle lacks packages that this host needs"
    return Problem(what, ", ".join(lacking), f"make it again with: gpuprov bundle create {' '.join(words)} …")


def _word(name: str, kernel: str) -> str:
    """Return the option that adds a package to a bundle."""
    if name.startswith(("nvidia-fabricmanager", "nvidia-fabric-manager")):
        return "--fabric-manager"
    if name.startswith("nvidia-imex"):
        return "-e gpuprov_imex=service"
    if name.startswith("datacenter-gpu-manager-"):
        return f"-e gpuprov_dcgm=true --package {name}"
    return f"--kernel {kernel}" if kernel in name else f"--package {name}"


def _files_of(manifest: Manifest, parts: Iterable[str]) -> list[BundleFile]:
    folders = tuple(folder for part in parts for folder in _FOLDERS[part])
    return [one for one in manifest.files if one.path.startswith(folders)]


@contextlib.contextmanager
def unpacked(
    system: System, bundle: OpenBundle | None, changes: Iterable[Change], *, keep_driver: bool = False
) -> Iterator[None]:
    """Unpack what these changes need, and remove it after the run in every case; `keep_driver`: not its packages."""
    # Remains of a killed run.
    _remove(system)
    if bundle is None:
        yield
        return
    try:
        # CUDA's gigabytes stay packed if the host has its own file.
        own = (one for one in changes if isinstance(one, cuda_toolkit.InstallCudaToolkit))
        unused = [one for one in own if not one.path.startswith(f"{FOLDER}/")]
        parts = {one.bundle_part for one in changes if one.bundle_part and one not in unused}
        paths = [one.path for one in _files_of(bundle.manifest, parts)]
        for folder in ("none", "lists/partial", "archives/partial"):
            system.make_directory(f"{FOLDER}/{folder}", 0o700)
        unpack(bundle.file, bundle.contents, paths, lambda path: _open_new(system, path))
        bundle_manager(bundle.manifest).open_bundle(system, bundle.manifest.repository_key)
        yield
    finally:
        if keep_driver:
            # A package that can't be kept fails no installation: the next upgrade says that there is no way back.
            with contextlib.suppress(GpuprovError, OSError):
                packaged.keep(system, bundle.manifest.packages)
        _remove(system)


def _remove(system: System) -> None:
    forget_bundle(system)
    system.remove_tree(FOLDER)


def _open_new(system: System, path: str) -> BinaryIO:
    place = f"{FOLDER}/{path}"
    system.make_directory(place.rpartition("/")[0], 0o700)
    # "x": a file that is there already, or a link, is an error.
    return system.path(place).open("xb")


_LOAD_SECONDS = 1800


def plan_images(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the changes that load each image of the bundle that the host's engine lacks."""
    if facts.bundle is None:
        return ()
    lacking = (one for one in facts.bundle.manifest.images if one.reference not in facts.bundle.loaded_images)
    return tuple(LoadImage(one.reference, one.identity, f"{FOLDER}/{one.file}", image_engine(spec)) for one in lacking)


@dataclass(frozen=True)
class LoadImage(Change):
    """Load this image into docker or podman, from a file in `docker save` format."""

    reference: str
    identity: str
    path: str
    engine: str = "docker"

    bundle_part: ClassVar[str] = "images"

    def summary(self) -> str:
        return f"load image {self.reference} from the bundle"

    def capture(self, system: System) -> Json:
        found = system.run((self.engine, "image", "inspect", "--format", "{{.Id}}", self.reference))
        if found.unanswered or "connect to" in found.stderr:
            # An undo would take away the image that has this name.
            what = f"{self.engine} does not tell whether it has {self.reference}"
            raise GpuprovError(what, found.evidence(4), f"{self.engine} info; then run the same command again")
        return {"reference": self.reference, "id": found.stdout.strip() if found.ok else "", "engine": self.engine}

    def apply(self, system: System, tell: Tell) -> None:
        done = system.run((self.engine, "load", "--input", self.path), timeout=_LOAD_SECONDS)
        done.require(f"{self.engine} can't load {self.reference}", f"is there room? {self.engine} system df", 4)
        if image_identity(system, self.reference, self.engine) != self.identity:
            what = f"the image that {self.engine} loaded is not the {self.reference} of the manifest"
            raise GpuprovError(what, done.stdout.strip(), "make the bundle again: gpuprov bundle create")

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Give the name back to the image that had it; an image without another name is removed."""
        # Journals of older versions know docker alone.
        engine = before.get("engine", "docker")
        if before["id"]:
            system.run((engine, "tag", before["id"], before["reference"]))
        else:
            system.run((engine, "rmi", before["reference"]))

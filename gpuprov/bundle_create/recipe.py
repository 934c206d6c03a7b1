"""The desired content of a bundle, from the command line and an inventory. Pure; create.py collects it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from gpuprov import toolkit
from gpuprov.bundle_create.rpm_sources import RpmSource, as_source, rpm_sources
from gpuprov.bundle_create.sources import DEBIAN_ARCHITECTURES, NO_MIRROR, Mirror, default_sources
from gpuprov.core.changes import Tell
from gpuprov.core.system import System
from gpuprov.driver import cuda_repository, cuda_toolkit, distribution, fabric_manager
from gpuprov.driver.installer import service_packages
from gpuprov.driver_run import default_url
from gpuprov.facts.gpus import FabricFacts
from gpuprov.machine.distros import (
    ROWS,
    Distribution,
    ExtraRepository,
    docker_repository,
    find_distribution,
    kernel_headers,
    next_kernel_headers,
    supported_names,
)
from gpuprov.machine.driver_rows import DriverBranch, own_driver
from gpuprov.packages.dnf import DNF
from gpuprov.packages.known_repositories import DKMS, dkms_repository
from gpuprov.packages.managers import manager_of
from gpuprov.plan import software
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.spec import HostSpec
from gpuprov.repos import AptRepository, RpmRepository, apt_repositories, rpm_repositories

_Repository = TypeVar("_Repository", AptRepository, RpmSource)


@dataclass(frozen=True)
class Wanted:
    """Options of the command line beside the hosts' specifications. `distro` is for example `debian-12`."""

    distro: str
    architecture: str
    kernels: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    fabric_manager: bool = False
    mirror: Mirror = NO_MIRROR


@dataclass(frozen=True)
class RunFile:
    """A .run file, from a URL or a path; without a `url` there is none.

    An empty `sha256` means the published digest.
    """

    version: str = ""
    url: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Recipe:
    """The desired content of a bundle.

    apt uses `sources` and `repositories`, the other package managers `rpm_sources`.
    """

    distribution: str
    version: str
    architecture: str
    packages: tuple[str, ...]
    sources: tuple[str, ...]
    repositories: tuple[AptRepository, ...]
    rpm_sources: tuple[RpmSource, ...] = ()
    kernels: tuple[str, ...] = ()
    driver: RunFile = RunFile()
    cuda: RunFile = RunFile()
    images: tuple[str, ...] = ()

    @property
    def debian_architecture(self) -> str:
        return DEBIAN_ARCHITECTURES[self.architecture]

    def inputs(self) -> dict[str, Any]:
        """Return what the bundle is made from, for its manifest, without passwords in addresses."""
        return {
            "kernels": list(self.kernels),
            "packages": list(self.packages),
            "images": list(self.images),
            "sources": [masked(line) for line in self.sources],
            "repositories": [
                {"name": one.name, "uri": masked(one.uri), "suite": one.suite, "key_fingerprint": one.key_fingerprint}
                for one in self.repositories
            ],
            "rpm_sources": [
                {"name": one.name, "uri": masked(one.uri), "keys": [fingerprint for _, fingerprint in one.keys]}
                for one in self.rpm_sources
            ],
            "driver_url": masked(self.driver.url),
            "cuda_url": masked(self.cuda.url),
        }


@dataclass(frozen=True)
class Collection:
    """A bundle under construction in the folder `work`; `places` maps each path to its file."""

    system: System
    recipe: Recipe
    work: str
    tell: Tell
    places: dict[str, str] = field(default_factory=dict)


def make_recipe(wanted: Wanted, specs: Sequence[HostSpec]) -> Recipe:
    """Return what hosts of these specifications need. Raises GpuprovError (exit code 2) for an impossible recipe."""
    row = _distribution(wanted.distro)
    if wanted.architecture not in DEBIAN_ARCHITECTURES:
        known = ", ".join(DEBIAN_ARCHITECTURES)
        raise _usage(f"the architecture {wanted.architecture} is not supported", "", f"supported are: {known}")
    driver, cuda_run = _driver(wanted, specs), _cuda(specs)
    version = wanted.distro[len(row.id) + 1 :] or row.version
    return Recipe(
        distribution=row.id,
        version=version,
        architecture=wanted.architecture,
        packages=tuple(sorted({*_packages(row, wanted, specs), *_fabric_manager(row, wanted, driver.version)})),
        kernels=tuple(sorted(set(wanted.kernels))),
        driver=driver,
        cuda=cuda_run,
        images=tuple(sorted(set(wanted.images))),
        **_sources(row, version, wanted, specs),
    )


def _sources(row: Distribution, version: str, wanted: Wanted, specs: Sequence[HostSpec]) -> dict[str, Any]:
    """Return where the packages come from: the distribution's servers or what replaces them, and what hosts add."""
    architecture = wanted.architecture
    if row.package_manager == "apt":
        found = [one for spec in specs for one in _repositories(row, wanted, spec)]
        components = sorted({one for spec in specs for one in _own_components(row, spec)})
        sources = wanted.sources or default_sources(row.id, row.version, architecture, wanted.mirror, components)
        return {"sources": sources, "repositories": _distinct(found)}
    hosts = [as_source(one) for spec in specs for one in _rpm_repositories(row, wanted, spec)]
    own = rpm_sources(row.id, version, architecture, wanted.sources)
    return {"sources": (), "repositories": (), "rpm_sources": (*own, *_distinct(hosts))}


def _distribution(distro: str) -> Distribution:
    """Return the row of a name such as `debian-12`, `opensuse-leap-15.6` or `opensuse-tumbleweed`."""
    name, _, version = distro.rpartition("-")
    row = find_distribution(name, version) or next(
        (one for one in ROWS if (one.id, one.version) == (distro, "*")), None
    )
    if row is None:
        raise _usage(
            f"--distro {distro} is not a distribution that bundles are made for",
            "",
            f"supported are: {supported_names()}",
        )
    return row


def _packages(row: Distribution, wanted: Wanted, specs: Sequence[HostSpec]) -> tuple[str, ...]:
    docker = (name for spec in specs for name in software.engine_packages(row, spec))
    headers = (name for kernel in wanted.kernels for name in _headers(row, kernel))
    services = (*service_packages(row.id, row.version), *manager_of(row).confinement_packages)
    build = (*row.build_packages, *services) if wanted.kernels else ()
    extra = (DKMS for spec in specs if _dkms(row, wanted, spec) is not None)
    others = (
        name
        for spec in specs
        for name in (
            *_own_driver(row, wanted, spec),
            *cuda_toolkit.toolkit_packages(spec),
            *toolkit.packages(spec),
            *spec.packages,
            *software.hold_packages(row, spec),
        )
    )
    return tuple(sorted({*docker, *headers, *build, *extra, *others, *wanted.packages}))


def _own_components(row: Distribution, spec: HostSpec) -> tuple[str, ...]:
    """Return the archive components that contain the distribution's own driver, if it is requested."""
    own = own_driver(row)
    return own.components if own is not None and spec.driver == "distribution" else ()


def _own_driver(row: Distribution, wanted: Wanted, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages of the distribution's own driver, with modules for the named kernels."""
    if spec.driver != "distribution":
        return ()
    own = own_driver(row)
    if own is None or not own.components or wanted.architecture not in own.architectures:
        raise _usage(
            f"a bundle for {row.name} {row.version} can't hold the distribution's own driver",
            "gpuprov_driver: distribution; bundles hold it for Debian and Ubuntu",
            "set gpuprov_driver: runfile and gpuprov_driver_version; or leave those hosts out: --limit",
        )
    branch = distribution.asked_branch(own, spec.driver_version) if spec.driver_version else own.branches[0]
    kind = distribution.preferred_kind(branch, (), spec.kernel_module_type) if branch else ""
    if branch is None or kind not in branch.built:
        raise _usage(
            f"{row.name} {row.version} has no {kind or 'such'} driver {spec.driver_version}".rstrip(),
            f"its branches: {', '.join(f'{one.branch} ({chr(44).join(sorted(one.built))})' for one in own.branches)}",
            "set gpuprov_driver_version to one of these, in quotes, or leave it out",
        )
    return (*branch.libraries, *_own_modules(branch, kind, wanted.kernels, spec))


def _own_modules(branch: DriverBranch, kind: str, kernels: Sequence[str], spec: HostSpec) -> tuple[str, ...]:
    if not kernels:
        return ()
    compiled = branch.compiled.get(kind, ())
    if not compiled or spec.kernel_modules == "build":
        return branch.built[kind]
    return tuple(name.format(kernel=kernel) for kernel in kernels for name in compiled)


def _headers(row: Distribution, kernel: str) -> tuple[str, ...]:
    """Return a kernel's headers, and what makes kernels to come bring theirs where that is asked for by this one."""
    cores = ("kernel-core", f"kernel-{kernel.partition('+')[2]}-core")
    return (*kernel_headers(row, kernel), *next_kernel_headers(row, kernel, cores))


def _repositories(row: Distribution, wanted: Wanted, spec: HostSpec) -> tuple[AptRepository, ...]:
    """Return the repositories besides the distribution's own: the site's, NVIDIA's, Docker's."""
    return apt_repositories(spec, wanted.architecture, _extra_repositories(row, wanted, spec))


def _rpm_repositories(row: Distribution, wanted: Wanted, spec: HostSpec) -> tuple[RpmRepository, ...]:
    """Return the same repositories for dnf, which also resolves zypper's packages."""
    return rpm_repositories(DNF, spec, wanted.architecture, _extra_repositories(row, wanted, spec))


def _extra_repositories(row: Distribution, wanted: Wanted, spec: HostSpec) -> tuple[ExtraRepository, ...]:
    """Return NVIDIA's CUDA repository and Docker's, if packages come from them."""
    _require_runfile(spec)
    if wanted.fabric_manager and (problems := cuda_repository.repository_problems(row, wanted.architecture, spec)):
        raise GpuprovError.several(problems, exit_code=ExitCode.USAGE)
    cuda = cuda_repository.repositories_of(row, wanted.architecture, spec, fabric=wanted.fabric_manager)
    docker = docker_repository(row, wanted.architecture) if spec.docker == "docker-ce" else None
    return tuple(one for one in (*cuda, docker, _dkms(row, wanted, spec)) if one is not None)


def _dkms(row: Distribution, wanted: Wanted, spec: HostSpec) -> ExtraRepository | None:
    """Return the repository of DKMS, if modules are built and the distribution lacks DKMS."""
    version = wanted.distro[len(row.id) + 1 :] or row.version
    if not (wanted.kernels and row.dkms_from and spec.epel):
        return None
    return dkms_repository(row, version, wanted.architecture, spec)


def _require_runfile(spec: HostSpec) -> None:
    if spec.driver == "packages":
        raise _usage(
            "a bundle holds the driver as a .run file, not as packages",
            "gpuprov_driver: packages",
            "set gpuprov_driver: runfile and gpuprov_driver_version; or leave those hosts out: --limit",
        )


def _fabric_manager(row: Distribution, wanted: Wanted, driver: str) -> tuple[str, ...]:
    """Return the package of the fabric manager of exactly the driver's version, if requested."""
    if not wanted.fabric_manager:
        return ()
    if not driver:
        raise _usage("the fabric manager is of the driver's version, and there is no driver", "", "add --driver")
    return fabric_manager.packages(driver, manager_of(row), FabricFacts())


def _driver(wanted: Wanted, specs: Sequence[HostSpec]) -> RunFile:
    """Return the driver that all specifications request; they must agree."""
    return _only(
        (
            RunFile(spec.driver_version, spec.driver_url or default_url(spec.driver_version, wanted.architecture),
                    spec.driver_sha256)
            for spec in specs
            if spec.driver == "runfile" and spec.driver_version
        ),
        "drivers",
    )  # fmt: skip


def _cuda(specs: Sequence[HostSpec]) -> RunFile:
    """Return the one .run of the CUDA toolkit that specifications ask for; a path is a file that hosts have already."""
    asked = [spec for spec in specs if spec.cuda_url and not spec.cuda_url.startswith("/")]
    if asked and not any(spec.cuda for spec in asked):
        seen = masked(asked[0].cuda_url)
        raise _usage("which version of the CUDA toolkit its .run holds is not known", seen, "add -e gpuprov_cuda=12.4")
    found = _only((RunFile(spec.cuda, spec.cuda_url, spec.cuda_sha256) for spec in asked if spec.cuda), "CUDA toolkits")
    # NVIDIA publishes none.
    if found.url and not found.sha256:
        raise _usage(
            "the SHA-256 of the CUDA toolkit's .run is not known, so a download could not be trusted",
            masked(found.url),
            "set gpuprov_cuda_sha256 (sha256sum FILE, of a file that you trust), or give the file: --cuda-file",
        )
    return found


def _only(asked: Iterable[RunFile], what: str) -> RunFile:
    """Return the only .run file requested, or none; a digest pinned for one host holds for all."""
    files = tuple(asked)
    kinds = {(one.version, one.url) for one in files}
    if len(kinds) > 1:
        seen = ", ".join(sorted(f"{version} from {masked(url)}" for version, url in kinds))
        raise _usage(f"the hosts ask for different {what}, and a bundle holds one", seen, "make one for each: --limit")
    digests = {one.sha256 for one in files} - {""}
    if len(digests) > 1:
        seen = ", ".join(sorted(digests))
        raise _usage(f"the hosts pin different digests of one of the {what}", seen, "correct one")
    return replace(files[0], sha256=next(iter(digests), "")) if files else RunFile()


def _distinct(found: Sequence[_Repository]) -> tuple[_Repository, ...]:
    """Return each repository once, by name. Raises GpuprovError if one name stands for two."""
    by_name: dict[str, _Repository] = {}
    for one in found:
        if by_name.setdefault(one.name, one) != one:
            seen = f"{masked(by_name[one.name].uri)} and {masked(one.uri)}"
            raise _usage(f"two repositories have the name {one.name}", seen, "give each its own name")
    return tuple(by_name[name] for name in sorted(by_name))


def _usage(what: str, evidence: str, next_step: str) -> GpuprovError:
    return GpuprovError(what, evidence, next_step, exit_code=ExitCode.USAGE)

"""What a bundle shall hold, from the command line and an inventory. Pure; collecting it is create.py's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gpuprov import boot
from gpuprov.bundle.rpm_sources import RpmSource, as_source, rpm_sources
from gpuprov.bundle.sources import DEBIAN_ARCHITECTURES, default_sources
from gpuprov.distros import (
    ROWS,
    Distribution,
    docker_repository,
    find_distribution,
    kernel_headers,
    next_kernel_headers,
    supported_names,
)
from gpuprov.download import masked
from gpuprov.driver import cuda
from gpuprov.driver_run import default_url
from gpuprov.errors import ExitCode, GpuprovError
from gpuprov.packaging import repos_rpm, software
from gpuprov.packaging.repos_rpm import RpmRepository
from gpuprov.repos import AptRepository, repositories, with_docker
from gpuprov.spec import HostSpec

_Repository = TypeVar("_Repository", AptRepository, RpmSource)


@dataclass(frozen=True)
class Wishes:
    """What the command line says besides the specifications of hosts. `distro` is such as `debian-12`."""

    distro: str
    architecture: str
    kernels: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """What a bundle shall hold. `driver_url` is empty without a driver; a `driver_sha256` of nothing: as published.

    apt's `sources` and `repositories` are the `rpm_sources` of the others.
    """

    distribution: str
    version: str
    architecture: str
    packages: tuple[str, ...]
    sources: tuple[str, ...]
    repositories: tuple[AptRepository, ...]
    rpm_sources: tuple[RpmSource, ...] = ()
    kernels: tuple[str, ...] = ()
    driver_version: str = ""
    driver_url: str = ""
    driver_sha256: str = ""
    images: tuple[str, ...] = ()

    @property
    def debian_architecture(self) -> str:
        return DEBIAN_ARCHITECTURES[self.architecture]

    def inputs(self) -> dict[str, Any]:
        """Return what the bundle is made from, for its manifest; passwords in addresses left out."""
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
            "driver_url": masked(self.driver_url),
        }


def make_recipe(wishes: Wishes, specs: Sequence[HostSpec]) -> Recipe:
    """Return what hosts of these specifications need. Raises GpuprovError (exit code 2) for what can't be."""
    row = _distribution(wishes.distro)
    if wishes.architecture not in DEBIAN_ARCHITECTURES:
        known = ", ".join(DEBIAN_ARCHITECTURES)
        raise _usage(f"the architecture {wishes.architecture} is not supported", "", f"supported are: {known}")
    driver, url, sha256 = _driver(wishes, specs)
    version = wishes.distro[len(row.id) + 1 :] or row.version
    return Recipe(
        distribution=row.id,
        version=version,
        architecture=wishes.architecture,
        packages=_packages(row, wishes, specs),
        kernels=tuple(sorted(set(wishes.kernels))),
        driver_version=driver,
        driver_url=url,
        driver_sha256=sha256,
        images=tuple(sorted(set(wishes.images))),
        **_sources(row, version, wishes, specs),
    )


def _sources(row: Distribution, version: str, wishes: Wishes, specs: Sequence[HostSpec]) -> dict[str, Any]:
    """Return where the packages come from: the distribution's servers or what replaces them, and what hosts add."""
    architecture = wishes.architecture
    if row.package_manager == "apt":
        found = [one for spec in specs for one in _repositories(row, architecture, spec)]
        sources = wishes.sources or default_sources(row.id, row.version, architecture)
        return {"sources": sources, "repositories": _distinct(found)}
    more = [as_source(one) for spec in specs for one in _rpm_repositories(row, architecture, spec)]
    own = rpm_sources(row.id, version, architecture, wishes.sources)
    return {"sources": (), "repositories": (), "rpm_sources": (*own, *_distinct(more))}


def _distribution(distro: str) -> Distribution:
    """Return the row of `debian-12`, `opensuse-leap-15.6` or `opensuse-tumbleweed`."""
    name, _, version = distro.rpartition("-")
    row = find_distribution(name, version) or next(
        (one for one in ROWS if (one.id, one.version) == (distro, "*")), None
    )
    if row is None:
        raise _usage(f"--distro {distro} is none that bundles are made for", "", f"supported are: {supported_names()}")
    return row


def _packages(row: Distribution, wishes: Wishes, specs: Sequence[HostSpec]) -> tuple[str, ...]:
    docker = (name for spec in specs for name in _engine(row, spec))
    headers = (name for kernel in wishes.kernels for name in _headers(row, kernel))
    services = (*boot.service_packages(row.id, row.version), *software.confinement_packages(row.package_manager))
    build = (*row.build_packages, *services) if wishes.kernels else ()
    more = (
        name
        for spec in specs
        for name in (
            *cuda.toolkit_packages(spec),
            *software.toolkit_packages(spec),
            *spec.packages,
            *software.lock_packages(row, spec),
        )
    )
    return tuple(sorted({*docker, *headers, *build, *more, *wishes.packages}))


def _headers(row: Distribution, kernel: str) -> tuple[str, ...]:
    """Return a kernel's headers, and what makes kernels to come bring theirs where that is asked for by this one."""
    cores = ("kernel-core", f"kernel-{kernel.partition('+')[2]}-core")
    return (*kernel_headers(row, kernel), *next_kernel_headers(row, kernel, cores))


def _engine(row: Distribution, spec: HostSpec) -> tuple[str, ...]:
    return () if spec.docker == "preinstalled" else software.engine_packages(row, spec)


def _repositories(row: Distribution, architecture: str, spec: HostSpec) -> tuple[AptRepository, ...]:
    """Return the repositories besides the distribution's own: the site's, NVIDIA's, Docker's."""
    _require_runfile(spec)
    docker = docker_repository(row, architecture) if spec.docker == "docker-ce" else None
    return repositories(with_docker(cuda.with_repository_of(row, architecture, spec), docker), architecture)


def _rpm_repositories(row: Distribution, architecture: str, spec: HostSpec) -> tuple[RpmRepository, ...]:
    """Return the same for dnf, which chooses zypper's and yum's packages too."""
    _require_runfile(spec)
    docker = docker_repository(row, architecture) if spec.docker == "docker-ce" else None
    return repos_rpm.repositories(cuda.with_repository_of(row, architecture, spec), "dnf", architecture, docker)


def _require_runfile(spec: HostSpec) -> None:
    if spec.driver == "packages":
        raise _usage(
            "a bundle holds the driver as a .run file, not as packages",
            "gpuprov_driver: packages",
            "set gpuprov_driver: runfile and gpuprov_driver_version; or leave those hosts out: --limit",
        )


def _driver(wishes: Wishes, specs: Sequence[HostSpec]) -> tuple[str, str, str]:
    """Return version, URL and digest of the one driver that all specifications ask for."""
    wanted = {
        (spec.driver_version, spec.driver_url or default_url(spec.driver_version, wishes.architecture))
        for spec in specs
        if spec.driver == "runfile" and spec.driver_version
    }
    if len(wanted) > 1:
        seen = ", ".join(sorted(f"{version} from {masked(url)}" for version, url in wanted))
        raise _usage("the hosts ask for different drivers, and a bundle holds one", seen, "make one for each: --limit")
    if not wanted:
        return "", "", ""
    ((version, url),) = wanted
    digests = {spec.driver_sha256 for spec in specs if spec.driver_version == version} - {""}
    if len(digests) > 1:
        raise _usage("the hosts pin different digests of one driver", ", ".join(sorted(digests)), "correct one")
    return version, url, next(iter(digests), "")


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

"""The desired content of a bundle, from the command line and an inventory. Pure; create.py collects it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from gpuprov import toolkit
from gpuprov.core.changes import Tell
from gpuprov.core.system import System
from gpuprov.driver import cuda_repository, cuda_toolkit, dcgm, distribution, fabric_manager, imex
from gpuprov.driver_run import default_url
from gpuprov.facts.gpus import FabricFacts
from gpuprov.machine import distros
from gpuprov.machine.distros import Distribution, ExtraRepository, kernel_headers, next_kernel_headers, own_driver
from gpuprov.packages.dnf import DNF
from gpuprov.packages.known_repositories import DKMS, TABLE, dkms_repository, vendor_key
from gpuprov.packages.managers import manager_of
from gpuprov.plan import software
from gpuprov.protocol.dataclass import dataclass, field, replace
from gpuprov.protocol.errors import UsageError
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import PACKAGED, Tables, rows
from gpuprov.repos import DEBIAN_ARCHITECTURES, AptRepository, apt_repositories, rpm_repositories

# -- where packages come from ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Archive:
    """A distribution's archive. Of apt: its components, `keyring`, and how to get that on a machine that lacks it.

    Of dnf: its `folders` below the server; {version}, {major} and {arch} are filled in.
    """

    id: str
    components: str = ""
    keyring: str = ""
    keyring_hint: str = ""
    folders: tuple[str, ...] = ()


ARCHIVES = {one.id: one for one in rows(TABLE, "bundle_archives", Archive)}


@dataclass(frozen=True)
class Mirror:
    """URLs of a distribution's archive and of its security updates; empty if unknown."""

    archive: str = ""
    security: str = ""


def mirror_at(url: str) -> Mirror:
    """Return the mirror at `url`. Debian's security updates are beside it, Ubuntu's in it."""
    archive = url.rstrip("/")
    return Mirror(archive, f"{archive}-security" if archive.endswith("/debian") else archive)


def machine_mirror(system: System, distribution: str) -> Mirror:
    """Return the mirror of `distribution` that this machine's apt uses; an empty one if it uses none."""
    fields = "$(REPO_URI)\t$(ORIGIN)\t$(CODENAME)"
    listing = system.run(("apt-get", "indextargets", "--format", fields, "Created-By: Packages"))
    found: dict[str, str] = {}
    for line in listing.stdout.splitlines() if listing.ok else ():
        url, origin, codename = line.split("\t")
        if origin.lower() == distribution:
            found.setdefault("security" if codename.endswith("-security") else "archive", url.rstrip("/"))
    return Mirror(found.get("archive", ""), found.get("security", ""))


def default_sources(
    row: Distribution, architecture: str, mirror: Mirror, tables: Tables, components: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return apt's one-line sources of a release: the release, its updates, its security updates.

    `components` are added to those that every bundle gets.
    Raises GpuprovError for Debian without a mirror. Ubuntu has servers of its own for all.
    """
    archive, name = ARCHIVES[row.id], row.codename
    if row.id == "ubuntu" and not mirror.archive:
        # Ubuntu keeps all but amd64 on a server of its own.
        mirror = mirror_at(tables.server("ubuntu" if architecture == "x86_64" else "ubuntu-ports"))
    if not mirror.archive:
        what = f"no mirror of {row.id} is known on this machine"
        raise UsageError(what, "apt-get indextargets lists none", "name it with --mirror URL")
    security = mirror.security or mirror_at(mirror.archive).security
    places = ((mirror.archive, name), (mirror.archive, f"{name}-updates"), (security, f"{name}-security"))
    words = " ".join(dict.fromkeys((*archive.components.split(), *components)))
    return tuple(f"deb [signed-by={archive.keyring}] {uri} {suite} {words}" for uri, suite in places)


@dataclass(frozen=True)
class RpmSource:
    """A repository to take packages from; `keys` holds each key's location and its full fingerprint.

    As in repos.py, either its metadata or every package must be signed. `all_streams`: also use packages of module
    streams that are not enabled. `only`: patterns of the packages that may come from it; empty means all.
    """

    name: str
    uri: str
    keys: tuple[tuple[str, str], ...]
    signed_metadata: bool = False
    signed_packages: bool = True
    all_streams: bool = False
    only: tuple[str, ...] = ()


_KEY = re.compile(r"(https?://|file://|/)\S+")
_FORM = "--source 'URL KEY-URL FINGERPRINT', for packages signed by several keys with a further pair for each"


def rpm_sources(
    distribution: str, version: str, architecture: str, lines: tuple[str, ...], tables: Tables
) -> tuple[RpmSource, ...]:
    """Return the sources that `lines` name, or the distribution's own.

    Raises GpuprovError (exit code 2) for a bad line.
    """
    if lines:
        sources = []
        for number, line in enumerate(lines, 1):
            uri, *words = line.split() or [""]
            keys = tuple(zip(words[::2], words[1::2]))
            sound = all(_KEY.fullmatch(url) and re.fullmatch(r"[0-9A-F]{40}", fingerprint) for url, fingerprint in keys)
            if not re.match(r"(https?|file)://", uri) or not keys or len(words) % 2 or not sound:
                raise UsageError("this is no source of packages for dnf", line, f"write {_FORM}")
            sources.append(RpmSource(f"source-{number}", uri, keys))
        return tuple(sources)
    major = version.partition(".")[0]
    key = vendor_key(distribution, version, tables)
    if key is None:
        what = f"where the packages of {distribution} {version} come from must be said"
        seen = "its repositories need a subscription, or packages in it are signed by several keys"
        raise UsageError(what, seen, f"name each repository, or your mirror of it: {_FORM}")
    filled = {"version": version, "major": major, "arch": architecture}
    return tuple(
        RpmSource(f"{distribution}-{number}", f"{tables.server(distribution)}/{folder.format(**filled)}", (key,))
        for number, folder in enumerate(ARCHIVES[distribution].folders, 1)
    )


# -- what hosts need -------------------------------------------------------------------------------------------------

_Repository = TypeVar("_Repository", AptRepository, RpmSource)
_SET_RUNFILE = "set gpuprov_driver: runfile and gpuprov_driver_version; or leave those hosts out: --limit"


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
    mirror: Mirror = Mirror()
    tables: Tables = PACKAGED


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
        raise UsageError(f"the architecture {wanted.architecture} is not supported", "", f"supported are: {known}")
    driver, cuda_run = _driver(wanted, specs), _cuda(specs)
    packages = _packages(row, wanted, specs)
    if wanted.fabric_manager and not driver.version:
        raise UsageError("the fabric manager is of the driver's version, and there is no driver", "", "add --driver")
    if wanted.fabric_manager:
        packages |= {*fabric_manager.packages(driver.version, manager_of(row), FabricFacts(), wanted.tables)}
    return Recipe(
        distribution=row.id,
        version=_version(row, wanted),
        architecture=wanted.architecture,
        packages=tuple(sorted(packages)),
        kernels=tuple(sorted(set(wanted.kernels))),
        driver=driver,
        cuda=cuda_run,
        images=tuple(sorted(set(wanted.images))),
        **_sources(row, wanted, specs),
    )


def _version(row: Distribution, wanted: Wanted) -> str:
    return wanted.distro[len(row.id) + 1 :] or row.version


def _distribution(distro: str) -> Distribution:
    """Return the row of a name such as `debian-12`, `opensuse-leap-15.6` or `opensuse-tumbleweed`."""
    name, _, version = distro.rpartition("-")
    rolling = (one for one in distros.ROWS if (one.id, one.version) == (distro, "*"))
    row = distros.find_distribution(name, version) or next(rolling, None)
    if row is None:
        supported = f"supported are: {distros.names_of(distros.ROWS)}"
        raise UsageError(f"--distro {distro} is not a distribution that bundles are made for", "", supported)
    return row


def _sources(row: Distribution, wanted: Wanted, specs: Sequence[HostSpec]) -> dict[str, Any]:
    """Return where the packages come from: the distribution's servers or what replaces them, and what hosts add."""
    architecture = wanted.architecture
    extra = [(spec, _extra_repositories(row, wanted, spec)) for spec in specs]
    if row.package_manager == "apt":
        own = own_driver(row)
        with_driver = own is not None and any(spec.driver == "distribution" for spec in specs)
        components = sorted(own.components) if own is not None and with_driver else ()
        sources = wanted.sources or default_sources(row, architecture, wanted.mirror, wanted.tables, components)
        added = [one for spec, more in extra for one in apt_repositories(spec, architecture, more)]
        return {"sources": sources, "repositories": _distinct(added)}
    # dnf resolves the packages for zypper, too.
    found = [one for spec, more in extra for one in rpm_repositories(DNF, spec, architecture, more)]
    # NVIDIA's: the fabric manager is in the stream of its driver's branch.
    hosts = [
        RpmSource(one.name, one.uri, ((one.key_url, one.key_fingerprint),), one.signed_metadata, one.signed_packages,
                  all_streams=one.name == "cuda", only=one.only)
        for one in found
    ]  # fmt: skip
    archives = rpm_sources(row.id, _version(row, wanted), architecture, wanted.sources, wanted.tables)
    return {"sources": (), "repositories": (), "rpm_sources": (*archives, *_distinct(hosts))}


def _packages(row: Distribution, wanted: Wanted, specs: Sequence[HostSpec]) -> set[str]:
    found = set(wanted.packages)
    for kernel in wanted.kernels:
        # What makes kernels to come bring their headers is asked for by the installed kernel's packages.
        cores = ("kernel-core", f"kernel-{kernel.partition('+')[2]}-core")
        found |= {*kernel_headers(row, kernel), *next_kernel_headers(row, kernel, cores), *row.build_packages}
        found |= {*row.service_packages, *manager_of(row).confinement_packages}
    for spec in specs:
        found |= {
            *software.engine_packages(row, spec),
            *([DKMS] if _dkms(row, wanted, spec) is not None else ()),
            *_own_driver(row, wanted, spec),
            *cuda_toolkit.toolkit_packages(spec),
            *_dcgm(row, spec),
            *_imex(row, spec),
            *toolkit.packages(spec),
            *spec.packages,
            *software.hold_packages(row, spec),
        }
    return found


def _own_driver(row: Distribution, wanted: Wanted, spec: HostSpec) -> tuple[str, ...]:
    """Return the packages of the distribution's own driver, with modules for the named kernels."""
    if spec.driver != "distribution":
        return ()
    own = own_driver(row)
    if own is None or not own.components or wanted.architecture not in own.architectures:
        what = f"a bundle for {row.name} {row.version} can't hold the distribution's own driver"
        raise UsageError(what, "gpuprov_driver: distribution; bundles hold it for Debian and Ubuntu", _SET_RUNFILE)
    branch = _own_branch(row, spec)
    kind = distribution.preferred_kind(branch, (), spec.kernel_module_type, wanted.tables) if branch else ""
    if branch is None or kind not in branch.built:
        what = f"{row.name} {row.version} has no {kind or 'such'} driver {spec.driver_version}".rstrip()
        seen = f"its branches: {', '.join(f'{one.branch} ({chr(44).join(sorted(one.built))})' for one in own.branches)}"
        raise UsageError(what, seen, "set gpuprov_driver_version to one of these, in quotes, or leave it out")
    compiled = branch.compiled.get(kind, ()) if spec.kernel_modules != "build" else ()
    modules = tuple(name.format(kernel=kernel) for kernel in wanted.kernels for name in compiled)
    return (*branch.libraries, *(modules if compiled or not wanted.kernels else branch.built[kind]))


def _own_branch(row: Distribution, spec: HostSpec) -> distros.DriverBranch | None:
    own = own_driver(row) if spec.driver == "distribution" else None
    if own is None or not own.branches:
        return None
    return distribution.asked_branch(own, spec.driver_version) if spec.driver_version else own.branches[0]


def _extra_repositories(row: Distribution, wanted: Wanted, spec: HostSpec) -> tuple[ExtraRepository, ...]:
    """Return NVIDIA's CUDA repository, Docker's and that of DKMS, if packages come from them."""
    if spec.driver == "packages":
        what = "a bundle holds the driver as a .run file, not as packages"
        raise UsageError(what, "gpuprov_driver: packages", _SET_RUNFILE)
    problems = cuda_repository.repository_problems(row, wanted.architecture, spec)
    # An own fabric manager's name has no version: its IMEX is in the same archive.
    fabric = wanted.fabric_manager or any("=" in name for name in _imex(row, spec))
    if (fabric or spec.dcgm) and problems:
        raise UsageError.several(problems)
    cuda = cuda_repository.repositories_of(row, wanted.architecture, spec, fabric=fabric)
    docker = distros.docker_repository(row, wanted.architecture) if spec.docker == "docker-ce" else None
    return tuple(one for one in (*cuda, docker, _dkms(row, wanted, spec)) if one is not None)


def _dkms(row: Distribution, wanted: Wanted, spec: HostSpec) -> ExtraRepository | None:
    """Return the repository of DKMS, if modules are built and the distribution lacks DKMS."""
    if not (wanted.kernels and row.dkms_from and spec.epel):
        return None
    return dkms_repository(row, _version(row, wanted), wanted.architecture, spec, wanted.tables)


def _imex(row: Distribution, spec: HostSpec) -> tuple[str, ...]:
    """Return the package of IMEX of exactly the driver's version, if hosts of this specification may need it."""
    if not imex.may_run(spec):
        return ()
    own = _own_branch(row, spec)
    if own is not None and own.fabric_manager:
        return (own.fabric_manager.replace("fabricmanager", "imex"),)
    if "." not in spec.driver_version:
        seen = f"gpuprov_driver: {spec.driver}; gpuprov_imex: {spec.imex}"
        step = "add --driver, or -e gpuprov_imex=off and --package NAME=VERSION"
        raise UsageError("IMEX is of the driver's version, which is not named", seen, step)
    return (imex.package(spec.driver_version, manager_of(row)),)


def _dcgm(row: Distribution, spec: HostSpec) -> tuple[str, ...]:
    """Return DCGM's packages for the driver that the hosts will have, if requested."""
    own = _own_branch(row, spec)
    found = dcgm.packages(spec.driver_version or (own.branch if own else ""), spec)
    if spec.dcgm and not found:
        step = "add -e gpuprov_driver_version=580, or that of the hosts"
        raise UsageError("which of DCGM's packages fit depends on the driver's branch", "no driver is named", step)
    return found


def _driver(wanted: Wanted, specs: Sequence[HostSpec]) -> RunFile:
    """Return the driver that all specifications request; they must agree."""
    files = []
    for spec in specs:
        if spec.driver == "runfile" and spec.driver_version:
            url = spec.driver_url or default_url(spec.driver_version, wanted.architecture, wanted.tables)
            files.append(RunFile(spec.driver_version, url, spec.driver_sha256))
    return _only(files, "drivers")


def _cuda(specs: Sequence[HostSpec]) -> RunFile:
    """Return the one .run of the CUDA toolkit that specifications ask for; a path is a file that hosts have already."""
    asked = [spec for spec in specs if spec.cuda_url and not spec.cuda_url.startswith("/")]
    if asked and not any(spec.cuda for spec in asked):
        seen = masked(asked[0].cuda_url)
        what = "which version of the CUDA toolkit its .run holds is not known"
        raise UsageError(what, seen, "add -e gpuprov_cuda=12.4")
    found = _only((RunFile(spec.cuda, spec.cuda_url, spec.cuda_sha256) for spec in asked if spec.cuda), "CUDA toolkits")
    # NVIDIA publishes none.
    if found.url and not found.sha256:
        what = "the SHA-256 of the CUDA toolkit's .run is not known, so a download could not be trusted"
        step = "set gpuprov_cuda_sha256 (sha256sum FILE, of a file that you trust), or give the file: --cuda-file"
        raise UsageError(what, masked(found.url), step)
    return found


def _only(asked: Iterable[RunFile], what: str) -> RunFile:
    """Return the only .run file requested, or none; a digest pinned for one host holds for all."""
    files = tuple(asked)
    kinds = {(one.version, one.url) for one in files}
    if len(kinds) > 1:
        seen = ", ".join(sorted(f"{version} from {masked(url)}" for version, url in kinds))
        what = f"the hosts ask for different {what}, and a bundle holds one"
        raise UsageError(what, seen, "make one for each: --limit")
    digests = {one.sha256 for one in files} - {""}
    if len(digests) > 1:
        seen = ", ".join(sorted(digests))
        raise UsageError(f"the hosts pin different digests of one of the {what}", seen, "correct one")
    return replace(files[0], sha256=next(iter(digests), "")) if files else RunFile()


def _distinct(found: Sequence[_Repository]) -> tuple[_Repository, ...]:
    """Return each repository once, by name. Raises GpuprovError if one name stands for two."""
    by_name: dict[str, _Repository] = {}
    for one in found:
        if by_name.setdefault(one.name, one) != one:
            seen = f"{masked(by_name[one.name].uri)} and {masked(one.uri)}"
            raise UsageError(f"two repositories have the name {one.name}", seen, "give each its own name")
    return tuple(by_name[name] for name in sorted(by_name))

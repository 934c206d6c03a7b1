"""Collects what a recipe names, on a machine with a network; needs no root and changes nothing but its own folder.

The packages are chosen and their signatures checked by apt itself, with a root of its own in which nothing is
installed: so all dependencies come along, whatever a host has already.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuprov import __version__, runfile
from gpuprov.bundle.images import image_identity
from gpuprov.bundle.manifest import REPOSITORY, BundleFile, BundleImage, BundlePackage, Manifest
from gpuprov.bundle.recipe import Recipe
from gpuprov.bundle.sources import ARCHIVES
from gpuprov.changes import Tell
from gpuprov.download import fetch, masked, published_sha256
from gpuprov.errors import GpuprovError
from gpuprov.repos import AptRepository, InstallKey
from gpuprov.system import System, sha256_of

_UPDATE_SECONDS = 900
_DOWNLOAD_SECONDS = 7200
_FIELD_SECONDS = 60
_HEADER_BYTES = 8192
AGENT = "agent/gpuprov-agent.pyz"
# Proxies and certificates are the site's; nothing else of this machine's apt configuration counts.
_PASSED = re.compile(r'^Acquire::(?:http|https|ftp)::.*";$', re.MULTILINE)
_APT = ("apt-get", "-q", "--yes", "--no-install-recommends", "-o", "Acquire::Retries=3")


@dataclass(frozen=True)
class Collected:
    """A manifest, and where each of its files lies on this machine."""

    manifest: Manifest
    places: Mapping[str, str]


def collect(system: System, recipe: Recipe, agent: bytes, work: str, cache: str, tell: Tell) -> Collected:
    """Return what the recipe names, collected in the folder `work`; large downloads are kept in `cache`.

    `agent` is gpuprov's own zipapp. Raises GpuprovError, naming what can't be had.
    """
    places = {AGENT: f"{work}/agent.pyz"}
    system.write(places[AGENT], agent)
    driver = _collect_driver(system, recipe, cache, tell, places)
    packages = _collect_packages(system, recipe, work, tell, places)
    images = _collect_images(system, recipe, work, tell, places)
    files = tuple(_described(system, path, places[path]) for path in sorted(places))
    manifest = Manifest(
        distribution=recipe.distribution,
        version=recipe.version,
        architecture=recipe.architecture,
        gpuprov=__version__,
        driver_version=recipe.driver_version,
        driver_file=driver,
        packages=packages,
        images=images,
        files=files,
        inputs=recipe.inputs(),
    )
    return Collected(manifest, places)


def with_file(system: System, collected: Collected, path: str, place: str) -> Collected:
    """Return the same with one more file."""
    places = {**collected.places, path: place}
    files = tuple(sorted((*collected.manifest.files, _described(system, path, place)), key=lambda one: one.path))
    return Collected(replace(collected.manifest, files=files), places)


def _described(system: System, path: str, place: str) -> BundleFile:
    status = system.status(place)
    return BundleFile(path, status.size if status else 0, system.sha256(place))


# -- the driver ------------------------------------------------------------------------------------------------------


def _collect_driver(system: System, recipe: Recipe, cache: str, tell: Tell, places: dict[str, str]) -> str:
    if not recipe.driver_url:
        return ""
    url = f"file://{recipe.driver_url}" if recipe.driver_url.startswith("/") else recipe.driver_url
    tell(f"driver {recipe.driver_version}: {masked(url)}", 0, 0)
    sha256 = recipe.driver_sha256 or published_sha256(system, url)
    if not sha256:
        raise GpuprovError(
            "the driver's SHA-256 is not known, so a download could not be trusted",
            f"there is no {masked(url)}.sha256sum",
            "add -e gpuprov_driver_sha256=… (sha256sum FILE, of a file that you trust)",
        )
    system.make_directory(cache, 0o700)
    place = f"{cache}/{sha256}.run"
    fetch(system, url, place, sha256=sha256, tell=tell)
    found = runfile.parse_header((system.read_start(place, _HEADER_BYTES) or b"").decode("latin-1"))
    if (found.version, found.architecture) != (recipe.driver_version, recipe.architecture):
        raise GpuprovError(
            f"the driver file is {found.version} for {found.architecture}, "
            f"asked for is {recipe.driver_version} for {recipe.architecture}",
            f"{masked(url)}: {found.label}",
            "correct --driver, --arch or gpuprov_driver_url",
        )
    path = f"driver/NVIDIA-Linux-{recipe.architecture}-{recipe.driver_version}.run"
    places[path] = place
    return path


# -- packages --------------------------------------------------------------------------------------------------------


def _collect_packages(
    system: System, recipe: Recipe, work: str, tell: Tell, places: dict[str, str]
) -> tuple[BundlePackage, ...]:
    if not recipe.packages:
        return ()
    environment = _private_apt(system, recipe, f"{work}/apt", tell, places)
    tell("reading the repositories' lists", 0, 0)
    update = (*_APT, "-o", "APT::Update::Error-Mode=any", "update")
    done = system.run(update, timeout=_UPDATE_SECONDS, env=environment)
    if not done.ok:
        raise GpuprovError("the repositories' lists can't be had", done.evidence(), "check the sources: --source")
    tell(f"downloading {', '.join(recipe.packages)} and all that they need", 0, 0)
    install = (*_APT, "--download-only", "install", "--", *recipe.packages)
    done = system.run(install, timeout=_DOWNLOAD_SECONDS, env=environment, on_line=lambda line: _tell_get(line, tell))
    if not done.ok:
        raise GpuprovError("the packages can't be had", done.evidence(), "is a repository missing? --source, --hosts")
    archives = f"{work}/apt/archives"
    found = [
        _package(system, f"{archives}/{name}", places) for name in system.list_directory(archives) if _is_deb(name)
    ]
    _require_all(done.stdout, len(found))
    found.sort(key=lambda pair: pair[0].file)
    _write_index(system, recipe, work, [stanza for _, stanza in found], places)
    return tuple(package for package, _ in found)


def _require_all(said: str, found: int) -> None:
    """Raise GpuprovError if apt would install more than was downloaded."""
    wanted = re.search(r"(\d+) newly installed", said)
    if wanted is None or int(wanted[1]) != found:
        seen = f"apt would install {wanted[1] if wanted else '?'} packages, {found} were downloaded"
        raise GpuprovError("some packages were not downloaded", seen, "are all sources reached by http, https or file?")


def _tell_get(line: str, tell: Tell) -> None:
    if line.startswith("Get:"):
        tell(line.strip(), 0, 0)


def _is_deb(name: str) -> bool:
    return name.endswith(".deb")


def _private_apt(system: System, recipe: Recipe, root: str, tell: Tell, places: dict[str, str]) -> dict[str, str]:
    """Make apt a root of its own in which nothing is installed; return the environment that leads it there."""
    if system.which("apt-get") is None or system.which("dpkg-deb") is None:
        raise GpuprovError(
            "there is no apt on this machine, and it chooses the packages",
            "apt-get and dpkg-deb are needed",
            "make the bundle on a Debian or Ubuntu machine, or in a container of one",
        )
    for folder in ("lists/partial", "archives/partial", "none", "keys"):
        system.make_directory(f"{root}/{folder}", 0o700)
    system.write(f"{root}/status", b"")
    sources = [*recipe.sources, *(_site_source(system, one, root, tell, places) for one in recipe.repositories)]
    _require_keyring(system, recipe)
    # What `file:` names, apt would use where it lies instead of bringing it here.
    lines = [re.sub(r"\sfile:", " copy:", line) for line in sources]
    system.write(f"{root}/sources.list", "".join(f"{line}\n" for line in lines).encode())
    settings = {
        "Dir::State": root, "Dir::State::lists": f"{root}/lists", "Dir::State::status": f"{root}/status",
        "Dir::Cache": root, "Dir::Cache::archives": f"{root}/archives",
        "Dir::Etc::sourcelist": f"{root}/sources.list", "Dir::Etc::sourceparts": f"{root}/none",
        "Dir::Etc::main": f"{root}/none/main", "Dir::Etc::parts": f"{root}/none",
        "Dir::Etc::trusted": f"{root}/none/trusted", "Dir::Etc::trustedparts": f"{root}/none",
        "Dir::Etc::preferences": f"{root}/none/preferences", "Dir::Etc::preferencesparts": f"{root}/none",
        "APT::Architecture": recipe.debian_architecture,
        "APT::Sandbox::User": "root", "Acquire::Languages": "none", "Dpkg::Use-Pty": "0",
    }  # fmt: skip
    lines = [f'{name} "{value}";' for name, value in settings.items()]
    lines.append(f'APT::Architectures {{ "{recipe.debian_architecture}"; }};')
    lines += [match[0] for match in _PASSED.finditer(system.run(("apt-config", "dump")).stdout)]
    system.write(f"{root}/apt.conf", "".join(f"{line}\n" for line in lines).encode())
    return {"APT_CONFIG": f"{root}/apt.conf"}


def _require_keyring(system: System, recipe: Recipe) -> None:
    archive = ARCHIVES[recipe.distribution, recipe.version]
    if any(archive.keyring in line for line in recipe.sources) and not system.exists(archive.keyring):
        raise GpuprovError(
            f"the key of {recipe.distribution}'s archive is not on this machine",
            f"there is no {archive.keyring}",
            archive.keyring_hint,
        )


def _site_source(system: System, one: AptRepository, root: str, tell: Tell, places: dict[str, str]) -> str:
    """Fetch a repository's key, hold it against its fingerprint, and return the repository as a line for apt."""
    key = f"{root}/keys/{one.name}.gpg"
    InstallKey(key, one.key_url, one.key_fingerprint).apply(system, tell)
    places[f"keys/{one.name}.gpg"] = key
    words = one.suite if one.suite.endswith("/") else f"{one.suite} {one.components or 'main'}"
    return f"deb [arch={one.architecture} signed-by={key}] {one.uri} {words}"


def _package(system: System, place: str, places: dict[str, str]) -> tuple[BundlePackage, str]:
    """Return a package and its stanza for the index, from what the .deb says of itself."""
    done = system.require(("dpkg-deb", "--field", place), f"{place} can't be read", timeout=_FIELD_SECONDS)
    control = done.stdout.rstrip("\n")
    fields = dict(re.findall(r"^(Package|Version|Architecture): *(\S+)", control, re.MULTILINE))
    # As in archives: without the epoch, whose colon would have to be written in another way.
    version = fields["Version"].partition(":")[2] or fields["Version"]
    name = f"{fields['Package']}_{version}_{fields['Architecture']}.deb"
    path = f"{REPOSITORY}/{name}"
    places[path] = place
    one = _described(system, path, place)
    stanza = f"{control}\nFilename: ./{name}\nSize: {one.size}\nSHA256: {one.sha256}\n"
    return BundlePackage(fields["Package"], fields["Version"], fields["Architecture"], path), stanza


def _write_index(system: System, recipe: Recipe, work: str, stanzas: list[str], places: dict[str, str]) -> None:
    """Write Packages and Release; no Date, or the same packages would not be the same bundle."""
    packages = "\n".join(stanzas).encode()
    release = (
        f"Origin: gpuprov\nLabel: gpuprov bundle\nSuite: {recipe.distribution}-{recipe.version}\n"
        f"Architectures: {recipe.debian_architecture}\nSHA256:\n {sha256_of(packages)} {len(packages)} Packages\n"
    )
    for name, content in (("Packages", packages), ("Release", release.encode())):
        place = f"{work}/{name}"
        system.write(place, content)
        places[f"{REPOSITORY}/{name}"] = place


# -- images ----------------------------------------------------------------------------------------------------------


def _collect_images(
    system: System, recipe: Recipe, work: str, tell: Tell, places: dict[str, str]
) -> tuple[BundleImage, ...]:
    return tuple(_image(system, reference, work, tell, places) for reference in recipe.images)


def _image(system: System, reference: str, work: str, tell: Tell, places: dict[str, str]) -> BundleImage:
    if not image_identity(system, reference):
        tell(f"pulling {reference}", 0, 0)
        done = system.run(("docker", "pull", "--quiet", reference), timeout=_DOWNLOAD_SECONDS)
        if not done.ok:
            raise GpuprovError(f"the image {reference} can't be had", done.evidence(4), "docker pull it by hand")
    # Two references may differ only in what a path can't show.
    name = re.sub(r"[^A-Za-z0-9.-]", "_", reference).strip("._-")[:60] + f"-{sha256_of(reference.encode())[:8]}"
    path, place = f"images/{name}.tar", f"{work}/{name}.tar"
    tell(f"saving {reference}", 0, 0)
    system.require(
        ("docker", "save", "--output", place, reference), f"{reference} can't be saved", timeout=_DOWNLOAD_SECONDS
    )
    places[path] = place
    return BundleImage(reference, image_identity(system, reference), path)

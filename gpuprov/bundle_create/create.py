"""Collect what a recipe names, on a machine with a network; needs no root and changes only its own folder.

The packages are chosen, and their signatures checked, by the hosts' own package manager (repository.py).
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from gpuprov import __version__
from gpuprov.bundle.manifest import CUDA, BundleFile, BundleImage, BundlePackage, Manifest
from gpuprov.bundle_create.recipe import Collection, RunFile
from gpuprov.bundle_create.repository import collect_apt, collect_rpm, new_key
from gpuprov.core.download import fetch, trusted_sha256
from gpuprov.core.files import make_user_folder
from gpuprov.core.system import System, sha256_of
from gpuprov.driver import cuda_toolkit, installer
from gpuprov.engines.containers import image_identity
from gpuprov.packages.keys import dearmored, fingerprints
from gpuprov.protocol.errors import GpuprovError, os_errors
from gpuprov.protocol.secrets import masked
from gpuprov.repos import DEBIAN_ARCHITECTURES

_DOWNLOAD_SECONDS = 7200
_SIGN_SECONDS = 300  # a person may have to type a passphrase
AGENT = "agent/gpuprov-agent.pyz"


def collect(to: Collection, own: Mapping[str, bytes], cache: str) -> Manifest:
    """Collect the files that the recipe names, and return the manifest; large downloads are kept in `cache`.

    `own`: path → content of gpuprov's files, such as its zipapp. Raises GpuprovError that names what is not available.
    """
    recipe, places = to.recipe, to.places
    for path, content in own.items():
        places[path] = f"{to.work}/own-{path.rpartition('/')[2]}"
        to.system.write(places[path], content)
    driver = _collect_driver(to, cache)
    cuda = _collect_cuda(to, cache)
    packages: tuple[BundlePackage, ...] = ()
    repository_key = ""
    if recipe.packages:
        with new_key(to.system, f"{to.work}/gnupg") as key:
            packages = (collect_rpm if recipe.rpm_sources else collect_apt)(to, key)
            repository_key = key.fingerprint
    images = tuple(_image(to, reference) for reference in recipe.images)
    found = ((path, places[path], to.system.status(places[path])) for path in sorted(places))
    files = tuple(BundleFile(path, one.size if one else 0, to.system.sha256(place)) for path, place, one in found)
    return Manifest(
        distribution=recipe.distribution,
        version=recipe.version,
        architecture=recipe.architecture,
        gpuprov=__version__,
        driver_version=recipe.driver.version,
        driver_file=driver,
        cuda_version=recipe.cuda.version,
        cuda_file=cuda,
        repository_key=repository_key,
        packages=packages,
        images=images,
        files=files,
        inputs=recipe.inputs(),
    )


def _collect_driver(to: Collection, cache: str) -> str:
    recipe, driver = to.recipe, to.recipe.driver
    if not driver.url:
        return ""
    place = _fetched(to, driver, "driver", cache)
    found = installer.parse_header((to.system.read_start(place, installer.HEADER_BYTES) or b"").decode("latin-1"))
    if (found.version, found.architecture) != (driver.version, recipe.architecture):
        asked = f"{driver.version} for {recipe.architecture}"
        what = f"the driver file is {found.version} for {found.architecture}, asked for is {asked}"
        step = "correct --driver, --arch or gpuprov_driver_url"
        raise GpuprovError(what, f"{masked(driver.url)}: {found.label}", step)
    path = f"driver/NVIDIA-Linux-{recipe.architecture}-{driver.version}.run"
    to.places[path] = place
    return path


def _collect_cuda(to: Collection, cache: str) -> str:
    cuda = to.recipe.cuda
    if not cuda.url:
        return ""
    place = _fetched(to, cuda, "CUDA toolkit", cache)
    cuda_toolkit.require_run_file(to.system, place, f"what lies at {masked(cuda.url)}")
    path = f"{CUDA}/cuda-{cuda.version}-{to.recipe.architecture}.run"
    to.places[path] = place
    return path


def _fetched(to: Collection, wanted: RunFile, what: str, cache: str) -> str:
    """Return where a file lies in the cache, its digest checked."""
    url = f"file://{wanted.url}" if wanted.url.startswith("/") else wanted.url
    to.tell(f"{what} {wanted.version}: {masked(url)}", 0, 0)
    sha256 = wanted.sha256 or trusted_sha256(to.system, url)
    if not sha256:
        seen = f"there is no {masked(url)}.sha256sum"
        step = "add -e gpuprov_driver_sha256=… (sha256sum FILE, of a file that you trust)"
        raise GpuprovError(f"the {what}'s SHA-256 is not known, so a download could not be trusted", seen, step)
    with os_errors(f"downloads can't be kept in {cache}", "set HOME to a folder that is there"):
        make_user_folder(Path(cache))
    place = f"{cache}/{sha256}.run"
    fetch(to.system, url, place, sha256=sha256, tell=to.tell)
    return place


def _image(to: Collection, reference: str) -> BundleImage:
    # docker's names of architectures are Debian's.
    wanted = DEBIAN_ARCHITECTURES[to.recipe.architecture]
    pull = ("docker", "pull", "--platform", f"linux/{wanted}", reference)
    if not image_identity(to.system, reference):
        to.tell(f"pulling {reference}", 0, 0)
        what = f"the image {reference} can't be had"
        to.system.require((*pull[:2], "--quiet", *pull[2:]), what, "docker pull it by hand", timeout=_DOWNLOAD_SECONDS)
    shown = ("docker", "image", "inspect", "--format", "{{.Architecture}}", reference)
    if (found := to.system.require(shown, f"docker does not show {reference}").stdout.strip()) != wanted:
        what = f"the image {reference} is of another architecture than the hosts, {to.recipe.architecture}"
        raise GpuprovError(what, f"{' '.join(shown)}: {found}", f"{' '.join(pull)}; then run the same command again")
    # Two references may differ only in characters that a path can't contain.
    name = re.sub(r"[^A-Za-z0-9.-]", "_", reference).strip("._-")[:60] + f"-{sha256_of(reference.encode())[:8]}"
    path, place = f"images/{name}.tar", f"{to.work}/{name}.tar"
    to.tell(f"saving {reference}", 0, 0)
    save = ("docker", "save", "--output", place, reference)
    to.system.require(save, f"{reference} can't be saved", timeout=_DOWNLOAD_SECONDS)
    to.places[path] = place
    return BundleImage(reference, image_identity(to.system, reference), path)


def user_gpg() -> dict[str, str]:
    """Return the environment that gpg needs to find the user's keys, and to ask for a passphrase by its agent."""
    names = ("HOME", "GNUPGHOME", "GPG_TTY", "TERM", "DISPLAY", "XDG_RUNTIME_DIR")
    # gpg would look for the terminal at its own standard input, which is what it signs.
    terminal = {"GPG_TTY": os.ttyname(0)} if os.isatty(0) else {}
    return {**terminal, **{name: os.environ[name] for name in names if name in os.environ}}


def export_key(system: System, key: str, environment: Mapping[str, str]) -> bytes:
    """Return the public half of a key in the user's keyring."""
    done = system.run(("gpg", "--batch", "--armor", "--export-options", "export-minimal", "--export", "--", key),
                      env=environment)  # fmt: skip
    if not done.ok or not done.stdout.strip():
        raise GpuprovError(f"gpg has no key {key}", done.evidence(4), "gpg --list-secret-keys shows what it has")
    content = dearmored(done.stdout.encode())
    if len(found := fingerprints(content)) != 1:
        raise GpuprovError(f"{key} names several keys", ", ".join(found), "give one fingerprint")
    return content


def sign(system: System, content: bytes, key: str, environment: Mapping[str, str]) -> bytes:
    """Return a detached, armored signature by the user's gpg and its agent."""
    command = ("gpg", "--yes", "--local-user", key, "--armor", "--detach-sign", "--output", "-")
    done = system.run(command, stdin=content, env=environment, timeout=_SIGN_SECONDS)
    return done.require(f"gpg could not sign with {key}", "try: gpg --local-user KEY --sign FILE", 6).stdout.encode()

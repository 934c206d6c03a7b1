"""A bundle's packages for apt: resolved and downloaded by apt itself, indexed and signed as a flat repository.

apt works in a separate root in which nothing is installed, so all dependencies are included for any host.
"""

from __future__ import annotations

import re
import time

from gpuprov.bundle.manifest import BundlePackage
from gpuprov.bundle_create.recipe import Collection, Recipe
from gpuprov.bundle_create.repository_key import SIGNED_AT, RepositoryKey
from gpuprov.bundle_create.sources import ARCHIVES
from gpuprov.core.changes import Tell
from gpuprov.core.places import REPOSITORY, REPOSITORY_KEY
from gpuprov.core.system import System, sha256_of
from gpuprov.packages.dpkg import proxy_options
from gpuprov.packages.keys import InstallKey
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.words import counted
from gpuprov.repos import AptRepository

_UPDATE_SECONDS = 900
_DOWNLOAD_SECONDS = 7200
_FIELD_SECONDS = 60
# Proxies and certificates come from the site; nothing else of this machine's apt configuration is used.
_PASSED = re.compile(r'^Acquire::(?:http|https|ftp)::.*";$', re.MULTILINE)
_APT = ("apt-get", "-q", "--yes", "--no-install-recommends", "-o", "Acquire::Retries=3")


def collect_apt(to: Collection, key: RepositoryKey) -> tuple[BundlePackage, ...]:
    """Return the recipe's packages and their dependencies, downloaded, indexed and signed.

    Their files are added to the collection. Raises GpuprovError that names what is not available.
    """
    system, recipe, tell = to.system, to.recipe, to.tell
    environment = _private_apt(to, f"{to.work}/apt")
    tell("reading the repositories' lists", 0, 0)
    update = (*_APT, *proxy_options(system), "-o", "APT::Update::Error-Mode=any", "update")
    done = system.run(update, timeout=_UPDATE_SECONDS, env=environment)
    if not done.ok:
        raise GpuprovError("the repositories' lists can't be had", done.evidence(), "check the sources: --source")
    tell(f"downloading {', '.join(recipe.packages)} and all that they need", 0, 0)
    install = (*_APT, *proxy_options(system), "--download-only", "install", "--", *recipe.packages)
    done = system.run(install, timeout=_DOWNLOAD_SECONDS, env=environment, on_line=lambda line: _tell_get(line, tell))
    if not done.ok:
        raise GpuprovError("the packages can't be had", done.evidence(), "is a repository missing? --source, --hosts")
    archives = f"{to.work}/apt/archives"
    found = [
        _package(system, f"{archives}/{name}", to.places) for name in system.list_directory(archives) if _is_deb(name)
    ]
    _require_all(done.stdout, len(found))
    found.sort(key=lambda pair: pair[0].file)
    _write_index(to, [stanza for _, stanza in found], key)
    return tuple(package for package, _ in found)


def _require_all(said: str, found: int) -> None:
    """Raise GpuprovError if apt would install more than was downloaded."""
    wanted = re.search(r"(\d+) newly installed", said)
    if wanted is None or int(wanted[1]) != found:
        seen = f"apt would install {counted(wanted[1] if wanted else '?', 'package')}, downloaded: {found}"
        raise GpuprovError("some packages were not downloaded", seen, "are all sources reached by http, https or file?")


def _tell_get(line: str, tell: Tell) -> None:
    if line.startswith("Get:"):
        tell(line.strip(), 0, 0)


def _is_deb(name: str) -> bool:
    return name.endswith(".deb")


def _private_apt(to: Collection, root: str) -> dict[str, str]:
    """Create a separate root for apt in which nothing is installed; return the environment that selects it."""
    system, recipe = to.system, to.recipe
    if system.which("apt-get") is None or system.which("dpkg-deb") is None:
        raise GpuprovError(
            "there is no apt on this machine, and it chooses the packages",
            "apt-get and dpkg-deb are needed",
            "make the bundle on a Debian or Ubuntu machine, or in a container of one",
        )
    for folder in ("lists/partial", "archives/partial", "none", "keys"):
        system.make_directory(f"{root}/{folder}", 0o700)
    system.write(f"{root}/status", b"")
    sources = [*recipe.sources, *(_site_source(to, one, root) for one in recipe.repositories)]
    _require_keyring(system, recipe)
    # apt would use a `file:` source in place instead of copying its packages.
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
    return {"APT_CONFIG": f"{root}/apt.conf", **system.proxy.environment}


def _require_keyring(system: System, recipe: Recipe) -> None:
    archive = ARCHIVES[recipe.distribution, recipe.version]
    if any(archive.keyring in line for line in recipe.sources) and not system.exists(archive.keyring):
        raise GpuprovError(
            f"the key of {recipe.distribution}'s archive is not on this machine",
            f"there is no {archive.keyring}",
            archive.keyring_hint,
        )


def _site_source(to: Collection, one: AptRepository, root: str) -> str:
    """Fetch a repository's key, compare its fingerprint, and return the repository as a line for apt."""
    key = f"{root}/keys/{one.name}.gpg"
    InstallKey(key, one.key_url, one.key_fingerprint).apply(to.system, to.tell)
    to.places[f"keys/{one.name}.gpg"] = key
    words = one.suite if one.suite.endswith("/") else f"{one.suite} {one.components or 'main'}"
    return f"deb [arch={one.architecture} signed-by={key}] {one.uri} {words}"


def _package(system: System, place: str, places: dict[str, str]) -> tuple[BundlePackage, str]:
    """Return a package and its stanza for the index, from the .deb's own control data."""
    done = system.require(("dpkg-deb", "--field", place), f"{place} can't be read", timeout=_FIELD_SECONDS)
    control = done.stdout.rstrip("\n")
    fields = dict(re.findall(r"^(Package|Version|Architecture): *(\S+)", control, re.MULTILINE))
    # As in archives: without the epoch, whose colon would need escaping.
    version = fields["Version"].partition(":")[2] or fields["Version"]
    name = f"{fields['Package']}_{version}_{fields['Architecture']}.deb"
    path = f"{REPOSITORY}/{name}"
    places[path] = place
    status = system.status(place)
    size = status.size if status else 0
    stanza = f"{control}\nFilename: ./{name}\nSize: {size}\nSHA256: {system.sha256(place)}\n"
    return BundlePackage(fields["Package"], fields["Version"], fields["Architecture"], path), stanza


def _write_index(to: Collection, stanzas: list[str], key: RepositoryKey) -> None:
    """Write Packages, the key, and InRelease (the signed Release) with a fixed date."""
    system, recipe, work = to.system, to.recipe, to.work
    packages = "\n".join(stanzas).encode()
    date = time.strftime("%a, %d %b %Y %H:%M:%S UTC", time.gmtime(SIGNED_AT))
    release = (
        f"Origin: gpuprov\nLabel: gpuprov bundle\nSuite: {recipe.distribution}-{recipe.version}\nDate: {date}\n"
        f"Architectures: {recipe.debian_architecture}\nSHA256:\n {sha256_of(packages)} {len(packages)} Packages\n"
    )
    system.write(f"{work}/Packages", packages)
    system.write(f"{work}/Release", release.encode())
    system.write(f"{work}/key.gpg", key.public)
    key.clear_sign(f"{work}/Release", f"{work}/InRelease")
    for name in ("Packages", "InRelease"):
        to.places[f"{REPOSITORY}/{name}"] = f"{work}/{name}"
    to.places[REPOSITORY_KEY] = f"{work}/key.gpg"

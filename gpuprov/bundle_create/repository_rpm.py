"""A bundle's packages for dnf, yum and zypper: resolved and downloaded by dnf, indexed and signed as a repository.

dnf works in a separate root in which nothing is installed, so all dependencies are included for any host. Packages keep
the signatures of their vendors. Unsigned packages, from repositories that sign only their metadata, get the bundle's
signature.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuprov.bundle.manifest import BundlePackage, is_safe_path
from gpuprov.bundle_create.recipe import Collection, Recipe
from gpuprov.bundle_create.repository_key import SIGNED_AT, RepositoryKey
from gpuprov.bundle_create.rpm_sources import RpmSource
from gpuprov.core.changes import Tell
from gpuprov.core.places import KEYS, REPOSITORY, REPOSITORY_KEY
from gpuprov.core.system import System, sha256_of
from gpuprov.packages.failures import finish_rpm
from gpuprov.packages.keys import armored, fetch_pinned_key, key_ids
from gpuprov.protocol.errors import GpuprovError

_DOWNLOAD_SECONDS = 7200
_SECONDS = 600
_PROGRAMS = {"dnf": "dnf", "rpm": "rpm", "rpmsign": "rpm", "createrepo_c": "createrepo-c"}
_QUERY = (
    "%{NAME}\\t%|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\\t%{ARCH}\\t"
    "%{RSAHEADER:pgpsig}%{DSAHEADER:pgpsig}%{SIGPGP:pgpsig}%{SIGGPG:pgpsig}\\n"
)
_SIGNER = re.compile(r"Key (?:ID|Fingerprint):? ?[0-9a-f]*([0-9a-f]{16})")


def collect_rpm(to: Collection, key: RepositoryKey) -> tuple[BundlePackage, ...]:
    """Return the recipe's packages and their dependencies, downloaded, indexed and signed.

    Their files are added to the collection. Raises GpuprovError that names what is not available.
    """
    system, recipe, places = to.system, to.recipe, to.places
    _require_programs(system)
    root = f"{to.work}/rpm"
    makers = _write_sources(system, recipe, root)
    _download(to, root)
    folder = f"{root}/packages"
    names = tuple(name for name in system.list_directory(folder) if name.endswith(".rpm"))
    if not names:
        raise GpuprovError("dnf downloaded nothing", ", ".join(recipe.packages), "check the sources: --source")
    packages = []
    for name, row in zip(names, _described(system, folder, names)):
        package = _package(system, folder, name, row, places)
        packages.append(package)
        signers = [makers[one] for one in _SIGNER.findall(row[3]) if one in makers]
        for place in signers:
            places[f"{KEYS}/{place.rpartition('/')[2]}"] = place
        if not signers:
            _sign(system, places[package.file], key)
    _index(system, folder, key, places)
    return tuple(sorted(packages, key=lambda one: one.file))


def _require_programs(system: System) -> None:
    lacking = [program for program in _PROGRAMS if system.which(program) is None]
    if lacking:
        install = " ".join(dict.fromkeys(_PROGRAMS[program] for program in lacking))
        raise GpuprovError(
            f"these programs are needed for a bundle of rpm packages: {', '.join(lacking)}",
            "dnf chooses the packages, createrepo_c indexes them",
            f"on Debian and Ubuntu: apt-get install {install}",
        )


def _write_sources(system: System, recipe: Recipe, root: str) -> Mapping[str, str]:
    """Write dnf's configuration and sources, with each source's keys after comparing their fingerprints.

    Return where the key of each key id lies.
    """
    makers: dict[str, str] = {}
    for folder in ("repos.d", "keys", "packages"):
        system.make_directory(f"{root}/{folder}", 0o700)
    for source in recipe.rpm_sources:
        for url, fingerprint in source.keys:
            place = f"{root}/keys/{fingerprint}.asc"
            key = fetch_pinned_key(system, f"file://{url}" if url.startswith("/") else url, fingerprint)
            system.write(place, armored(key))
            makers.update(dict.fromkeys(key_ids(key), place))
        system.write(f"{root}/repos.d/{source.name}.repo", _source_text(source, root).encode())
    system.write(f"{root}/dnf.conf", b"[main]\n")
    return makers


def _source_text(source: RpmSource, root: str) -> str:
    keys = " ".join(f"file://{root}/keys/{fingerprint}.asc" for _, fingerprint in source.keys)
    lines = (
        f"[{source.name}]", f"name={source.name}", f"baseurl={source.uri}", f"repo_gpgcheck={source.signed_metadata:d}",
        f"gpgcheck={source.signed_packages:d}", f"gpgkey={keys}", "skip_if_unavailable=0",
        f"module_hotfixes={source.all_streams:d}", *([f"includepkgs={' '.join(source.only)}"] if source.only else ()),
    )  # fmt: skip
    return "".join(f"{line}\n" for line in lines)


def _download(to: Collection, root: str) -> None:
    system, recipe, tell = to.system, to.recipe, to.tell
    major = recipe.version.partition(".")[0]
    settings = {
        "reposdir": f"{root}/repos.d", "cachedir": f"{root}/cache", "keepcache": "False",
        "install_weak_deps": "False", "module_platform_id": f"platform:el{major}", "plugins": "False",
    }  # fmt: skip
    command = (
        # dnf requires root even though nothing is installed; root of a user namespace is enough.
        *(() if system.user_id() == 0 else ("unshare", "--map-root-user")),
        "dnf", "-y", "--config", f"{root}/dnf.conf", "--installroot", f"{root}/root", "--releasever", recipe.version,
        "--forcearch", recipe.architecture, *(f"--setopt={name}={value}" for name, value in settings.items()),
        "--downloadonly", "--downloaddir", f"{root}/packages", "install",
        *(name.replace("=", "-", 1) for name in recipe.packages),
    )  # fmt: skip
    tell(f"downloading {', '.join(recipe.packages)} and all that they need", 0, 0)
    done = system.run(
        command, timeout=_DOWNLOAD_SECONDS, env=system.proxy.environment, on_line=lambda line: _tell_get(line, tell)
    )
    finish_rpm(done, "the packages can't be had")


def _tell_get(line: str, tell: Tell) -> None:
    if re.match(r"\(\d+/\d+\): ", line):
        tell(line.strip(), 0, 0)


def _described(system: System, folder: str, names: tuple[str, ...]) -> list[list[str]]:
    """Return name, version, architecture and signatures of each file."""
    done = system.require(
        ("rpm", "-qp", "--nosignature", "--queryformat", _QUERY, *(f"{folder}/{name}" for name in names)),
        "the downloaded packages can't be read", timeout=_SECONDS,
    )  # fmt: skip
    return [line.split("\t") for line in done.stdout.splitlines()]


def _package(system: System, folder: str, name: str, row: list[str], places: dict[str, str]) -> BundlePackage:
    """Return a package under a name that is allowed in a bundle."""
    path = f"{REPOSITORY}/{name}"
    if not is_safe_path(path):
        path = f"{REPOSITORY}/{sha256_of(name.encode())[:32]}.rpm"
        system.rename(f"{folder}/{name}", f"{folder}/{path.rpartition('/')[2]}")
    places[path] = f"{folder}/{path.rpartition('/')[2]}"
    return BundlePackage(row[0], row[1], row[2], path)


def _sign(system: System, place: str, key: RepositoryKey) -> None:
    macros = (
        f"__gpg {system.which('gpg')}", f"_gpg_path {key.home}", f"_gpg_name {key.fingerprint}",
        f"_gpg_sign_cmd_extra_args {' '.join(key.signing_words)}",
    )  # fmt: skip
    defines = (word for macro in macros for word in ("--define", macro))
    system.require(("rpmsign", *defines, "--addsign", place), f"{place} can't be signed", timeout=_SECONDS)


def _index(system: System, folder: str, key: RepositoryKey, places: dict[str, str]) -> None:
    """Write and sign the metadata, compressed with gzip, which every release reads, and with a fixed timestamp."""
    options = (
        "--quiet", "--no-database", "--simple-md-filenames", "--checksum", "sha256", "--general-compress-type", "gz",
        "--revision", str(SIGNED_AT), "--set-timestamp-to-revision",
    )  # fmt: skip
    system.require(("createrepo_c", *options, folder), "the packages can't be indexed", timeout=_SECONDS)
    key.detach_sign(f"{folder}/repodata/repomd.xml", f"{folder}/repodata/repomd.xml.asc")
    for name in system.list_directory(f"{folder}/repodata"):
        places[f"{REPOSITORY}/repodata/{name}"] = f"{folder}/repodata/{name}"
    system.write(f"{folder}/key.gpg", key.public)
    places[REPOSITORY_KEY] = f"{folder}/key.gpg"

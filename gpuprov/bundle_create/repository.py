"""A bundle's package repository: its packages resolved and downloaded by apt or dnf, indexed, and signed.

apt and dnf (for zypper too) work in a separate root in which nothing is installed, so all dependencies are included for
any host. rpm packages keep the signatures of their vendors; unsigned ones, from repositories that sign only their
metadata, get the bundle's signature. The signing key is generated for one bundle: its public half is in the bundle and
its fingerprint in the manifest, so it is trusted if the manifest is. The private key is deleted once the bundle is
complete: nothing else can be signed with it.
"""

import contextlib
import pkgutil
import re
import time
from collections.abc import Iterator, Mapping

from gpuprov.bundle.manifest import BundlePackage, is_safe_path
from gpuprov.bundle_create.recipe import ARCHIVES, Collection, Recipe, RpmSource
from gpuprov.core.places import KEYS, REPOSITORY, REPOSITORY_KEY
from gpuprov.core.system import System, sha256_of
from gpuprov.packages.dpkg import proxy_options
from gpuprov.packages.failures import finish_rpm
from gpuprov.packages.interface import reporter
from gpuprov.packages.keys import InstallKey, armored, fetch_pinned_key, fingerprints, key_ids
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.words import counted
from gpuprov.repos import DEBIAN_ARCHITECTURES

# plan/preflight.py rejects hosts with an earlier clock, so no signature is in a host's future.
SIGNED_AT = 1767225600
# The mark stops gpg's clock: with one that goes on, a slow gpg makes a key that is from the future for the next gpg.
_CLOCK = time.strftime("%Y%m%dT%H%M%S!", time.gmtime(SIGNED_AT))
# Options of gpg, for rpmsign too: no prompts, and a signature date that is not in the future.
_SIGNING = ("--batch", "--digest-algo", "SHA256", "--faked-system-time", _CLOCK)
# Every supported package manager can check it, down to rpm 4.14 of Enterprise Linux 8, which lacks ed25519.
_ALGORITHM = "rsa3072"
_NAME = "gpuprov bundle"
_GPG_SECONDS = 120
_DOWNLOAD_SECONDS = 7200
_INDEX_SECONDS = 600


@dataclass(frozen=True)
class RepositoryKey:
    """A key in a gpg home folder; `public` is its public half, not armored."""

    system: System
    home: str
    public: bytes
    fingerprint: str

    def sign(self, path: str, signed: str, *how: str) -> None:
        """Write the signature of the file `path` to `signed`."""
        _gpg(self.system, self.home, "--local-user", self.fingerprint, *how, "--output", signed, path)


@contextlib.contextmanager
def new_key(system: System, home: str) -> Iterator[RepositoryKey]:
    """Yield a new key in the folder `home`, which is removed with the private key afterwards."""
    if system.which("gpg") is None:
        what = "there is no gpg on this machine, and it signs the bundle's repository"
        raise GpuprovError(what, "", "apt-get install gpg")
    system.make_directory(home, 0o700)
    try:
        _gpg(system, home, "--passphrase", "", "--quick-gen-key", _NAME, _ALGORITHM, "sign", "never")
        _gpg(system, home, "--output", f"{home}/public", "--export-options", "export-minimal", "--export", _NAME)
        public = system.read_bytes(f"{home}/public") or b""
        (fingerprint,) = fingerprints(public)
        yield RepositoryKey(system, home, public, fingerprint)
    finally:
        system.run(("gpgconf", "--homedir", home, "--kill", "all"))
        system.remove_tree(home)


def _gpg(system: System, home: str, *words: str) -> None:
    system.require(
        ("gpg", "--homedir", home, "--yes", *_SIGNING, *words), "gpg could not sign the bundle's repository",
        "does gpg work here? gpg --version", timeout=_GPG_SECONDS,
    )  # fmt: skip


# -- apt -------------------------------------------------------------------------------------------------------------

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
    done = system.run(update, timeout=_INDEX_SECONDS, env=environment)
    done.require("the repositories' lists can't be had", "check the sources: --source")
    tell(f"downloading {', '.join(recipe.packages)} and all that they need", 0, 0)
    install = (*_APT, *proxy_options(system), "--download-only", "install", "--", *recipe.packages)
    done = system.run(install, timeout=_DOWNLOAD_SECONDS, env=environment, on_line=reporter("Get:", tell))
    done.require("the packages can't be had", "is a repository missing? --source, --hosts")
    archives = f"{to.work}/apt/archives"
    names = [name for name in system.list_directory(archives) if name.endswith(".deb")]
    found = [_deb(system, f"{archives}/{name}", to.places) for name in names]
    wanted = re.search(r"(\d+) newly installed", done.stdout)
    if wanted is None or int(wanted[1]) != len(found):
        seen = f"apt would install {counted(wanted[1] if wanted else '?', 'package')}, downloaded: {len(found)}"
        raise GpuprovError("some packages were not downloaded", seen, "are all sources reached by http, https or file?")
    found.sort(key=lambda pair: pair[0].file)
    _write_index(to, [stanza for _, stanza in found], key)
    return tuple(package for package, _ in found)


def _private_apt(to: Collection, root: str) -> dict[str, str]:
    """Create a separate root for apt in which nothing is installed; return the environment that selects it."""
    system, recipe = to.system, to.recipe
    if system.which("apt-get") is None or system.which("dpkg-deb") is None:
        what = "there is no apt on this machine, and it chooses the packages"
        seen = "apt-get and dpkg-deb are needed"
        raise GpuprovError(what, seen, "make the bundle on a Debian or Ubuntu machine, or in a container of one")
    for folder in ("lists/partial", "archives/partial", "none", "keys"):
        system.make_directory(f"{root}/{folder}", 0o700)
    system.write(f"{root}/status", b"")
    sources = [*recipe.sources]
    for one in recipe.repositories:
        key = f"{root}/keys/{one.name}.gpg"
        InstallKey(key, one.key_url, one.key_fingerprint).apply(system, to.tell)
        to.places[f"keys/{one.name}.gpg"] = key
        words = one.suite if one.suite.endswith("/") else f"{one.suite} {one.components or 'main'}"
        sources.append(f"deb [arch={one.architecture} signed-by={key}] {one.uri} {words}")
    archive = ARCHIVES[recipe.distribution]
    if any(archive.keyring in line for line in recipe.sources) and not system.exists(archive.keyring):
        what = f"the key of {recipe.distribution}'s archive is not on this machine"
        raise GpuprovError(what, f"there is no {archive.keyring}", archive.keyring_hint)
    # apt would use a `file:` source in place instead of copying its packages.
    lines = [re.sub(r"\sfile:", " copy:", line) for line in sources]
    system.write(f"{root}/sources.list", "".join(f"{line}\n" for line in lines).encode())
    text = (pkgutil.get_data("gpuprov.bundle_create", "apt.conf.template") or b"").decode()
    passed = "".join(f"{found[0]}\n" for found in _PASSED.finditer(system.run(("apt-config", "dump")).stdout))
    text = text.format(root=root, architecture=DEBIAN_ARCHITECTURES[recipe.architecture])
    system.write(f"{root}/apt.conf", (text + passed).encode())
    return {"APT_CONFIG": f"{root}/apt.conf", **system.proxy.environment}


def _deb(system: System, place: str, places: dict[str, str]) -> tuple[BundlePackage, str]:
    """Return a package and its stanza for the index, from the .deb's own control data."""
    control = system.require(("dpkg-deb", "--field", place), f"{place} can't be read").stdout.rstrip("\n")
    fields = dict(re.findall(r"^(Package|Version|Architecture): *(\S+)", control, re.MULTILINE))
    # As in archives: without the epoch, whose colon would need escaping.
    version = fields["Version"].partition(":")[2] or fields["Version"]
    name = f"{fields['Package']}_{version}_{fields['Architecture']}.deb"
    name = name if is_safe_path(f"{REPOSITORY}/{name}") else f"{sha256_of(name.encode())[:32]}.deb"
    path = f"{REPOSITORY}/{name}"
    places[path] = place
    status = system.status(place)
    stanza = f"{control}\nFilename: ./{name}\nSize: {status.size if status else 0}\nSHA256: {system.sha256(place)}\n"
    return BundlePackage(fields["Package"], fields["Version"], fields["Architecture"], path), stanza


def _write_index(to: Collection, stanzas: list[str], key: RepositoryKey) -> None:
    """Write Packages, the key, and InRelease (the signed Release) with a fixed date."""
    system, recipe, work = to.system, to.recipe, to.work
    packages = "\n".join(stanzas).encode()
    date = time.strftime("%a, %d %b %Y %H:%M:%S UTC", time.gmtime(SIGNED_AT))
    release = (
        f"Origin: gpuprov\nLabel: gpuprov bundle\nSuite: {recipe.distribution}-{recipe.version}\nDate: {date}\n"
        f"Architectures: {DEBIAN_ARCHITECTURES[recipe.architecture]}\n"
        f"SHA256:\n {sha256_of(packages)} {len(packages)} Packages\n"
    )
    system.write(f"{work}/Packages", packages)
    system.write(f"{work}/Release", release.encode())
    system.write(f"{work}/key.gpg", key.public)
    key.sign(f"{work}/Release", f"{work}/InRelease", "--clear-sign")
    for name in ("Packages", "InRelease"):
        to.places[f"{REPOSITORY}/{name}"] = f"{work}/{name}"
    to.places[REPOSITORY_KEY] = f"{work}/key.gpg"


# -- rpm -------------------------------------------------------------------------------------------------------------

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
    if lacking := [program for program in _PROGRAMS if system.which(program) is None]:
        install = " ".join(dict.fromkeys(_PROGRAMS[program] for program in lacking))
        what = f"these programs are needed for a bundle of rpm packages: {', '.join(lacking)}"
        seen = "dnf chooses the packages, createrepo_c indexes them"
        raise GpuprovError(what, seen, f"on Debian and Ubuntu: apt-get install {install}")
    root = f"{to.work}/rpm"
    makers = _write_sources(system, recipe, root)
    _download(to, root)
    folder = f"{root}/packages"
    names = tuple(name for name in system.list_directory(folder) if name.endswith(".rpm"))
    if not names:
        raise GpuprovError("dnf downloaded nothing", ", ".join(recipe.packages), "check the sources: --source")
    query = ("rpm", "-qp", "--nosignature", "--queryformat", _QUERY, *(f"{folder}/{name}" for name in names))
    done = system.require(query, "the downloaded packages can't be read", timeout=_INDEX_SECONDS)
    packages = []
    for name, row in zip(names, (line.split("\t") for line in done.stdout.splitlines())):
        package = _rpm(system, folder, name, row, places)
        packages.append(package)
        signers = [makers[one] for one in _SIGNER.findall(row[3]) if one in makers]
        for place in signers:
            places[f"{KEYS}/{place.rpartition('/')[2]}"] = place
        if not signers:
            _sign(system, places[package.file], key)
    _index(system, folder, key, places)
    return tuple(sorted(packages, key=lambda one: one.file))


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
        "destdir": f"{root}/packages",
    }  # fmt: skip
    command = (
        # dnf requires root even though nothing is installed; root of a user namespace is enough.
        *(() if system.user_id() == 0 else ("unshare", "--map-root-user")),
        "dnf", "-y", "--config", f"{root}/dnf.conf", "--installroot", f"{root}/root", "--releasever", recipe.version,
        "--forcearch", recipe.architecture, *(f"--setopt={name}={value}" for name, value in settings.items()),
        # For dnf 5 an option of `install` comes after it.
        "install", "--downloadonly", *(name.replace("=", "-", 1) for name in recipe.packages),
    )  # fmt: skip
    tell(f"downloading {', '.join(recipe.packages)} and all that they need", 0, 0)
    progress = reporter(r"\(\d+/\d+\): ", tell)
    done = system.run(command, timeout=_DOWNLOAD_SECONDS, env=system.proxy.environment, on_line=progress)
    finish_rpm(done, "the packages can't be had")


def _rpm(system: System, folder: str, name: str, row: list[str], places: dict[str, str]) -> BundlePackage:
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
        f"_gpg_sign_cmd_extra_args {' '.join(_SIGNING)}",
    )  # fmt: skip
    defines = (word for macro in macros for word in ("--define", macro))
    system.require(("rpmsign", *defines, "--addsign", place), f"{place} can't be signed", timeout=_INDEX_SECONDS)


def _index(system: System, folder: str, key: RepositoryKey, places: dict[str, str]) -> None:
    """Write and sign the metadata, compressed with gzip, which every release reads, and with a fixed timestamp."""
    options = (
        "--quiet", "--no-database", "--simple-md-filenames", "--checksum", "sha256", "--general-compress-type", "gz",
        "--revision", str(SIGNED_AT), "--set-timestamp-to-revision",
    )  # fmt: skip
    system.require(("createrepo_c", *options, folder), "the packages can't be indexed", timeout=_INDEX_SECONDS)
    metadata = f"{folder}/repodata/repomd.xml"
    key.sign(metadata, f"{metadata}.asc", "--armor", "--detach-sign")
    for name in system.list_directory(f"{folder}/repodata"):
        places[f"{REPOSITORY}/repodata/{name}"] = f"{folder}/repodata/{name}"
    system.write(f"{folder}/key.gpg", key.public)
    places[REPOSITORY_KEY] = f"{folder}/key.gpg"

"""The CUDA toolkit: from NVIDIA's packages, or from its .run file, without the driver in it, beside others.

Source: NVIDIA's CUDA Installation Guide for Linux, "Runfile Installation": --silent, --toolkit, --toolkitpath,
--override (no complaint about the compiler's version), --tmpdir; its log is /var/log/cuda-installer.log.
"""

from __future__ import annotations

import re
from typing import ClassVar

from gpuprov.bundle.manifest import Manifest
from gpuprov.core.changes import Change, Json, Jsons, Tell, capture_path_itself, restore_path, restore_paths
from gpuprov.core.commands import Completed
from gpuprov.core.places import CACHE_DIRECTORY, FOLDER
from gpuprov.core.system import System
from gpuprov.driver.run_files import FetchRunfile, local_path, require_digest, require_room
from gpuprov.facts.driver import OTHER_PROFILE, PROFILE, version_in
from gpuprov.facts.host import HostFacts
from gpuprov.protocol.dataclass import dataclass, replace
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec

LINK = "/usr/local/cuda"
_PROFILE_HEAD = b"# Written by gpuprov: programs of the CUDA toolkit.\n"
_PROFILE_TEXT = _PROFILE_HEAD + b'export PATH="/usr/local/cuda/bin${PATH:+:$PATH}"\n'
_LOG = "/var/log/cuda-installer.log"
_INSTALL_SECONDS = 3600
# It unpacks to about twice its size, and installs about as much again.
_UNPACKED_RATIO = 2
_TEMPORARY = f"{CACHE_DIRECTORY}/cuda"


def toolkit_packages(spec: HostSpec) -> tuple[str, ...]:
    """Return the CUDA toolkit as a package, if requested from there."""
    return (package_of(spec),) if spec.cuda and not spec.cuda_url else ()


def plan_profile(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the file that adds the CUDA toolkit's programs to users' PATH."""
    there = facts.files.get(PROFILE)
    path = PROFILE if there is None or there.content.startswith(_PROFILE_HEAD) else OTHER_PROFILE
    return facts.write(path, _PROFILE_TEXT) if spec.cuda else ()


def prefix_of(version: str) -> str:
    """Return the folder of a version, as in NVIDIA's installers and packages."""
    return f"{LINK}-{version}"


def installs(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether the toolkit's .run is to be installed."""
    is_installed = facts.cuda.toolkits.get(prefix_of(spec.cuda), "").startswith(f"{spec.cuda}.")
    return bool(spec.cuda and spec.cuda_url) and not is_installed


def package_of(spec: HostSpec) -> str:
    """Return the name of the toolkit's package."""
    return f"cuda-toolkit-{spec.cuda.replace('.', '-')}"


def takes_from_bundle(spec: HostSpec) -> bool:
    """Say whether the file comes from an unpacked bundle."""
    return spec.cuda_url.startswith(f"{FOLDER}/")


def from_bundle(spec: HostSpec, manifest: Manifest) -> HostSpec:
    """Return the spec with the file taken from a bundle that contains it; a digest pinned by the user stays.

    If the bundle also has packages of that version, they serve hosts that name no file. A path is the host's own file.
    """
    if not manifest.cuda_file or spec.cuda != manifest.cuda_version or spec.cuda_url.startswith("/"):
        return spec
    if not spec.cuda_url and package_of(spec) in {one.name for one in manifest.packages}:
        return spec
    sha256 = spec.cuda_sha256 or manifest.file(manifest.cuda_file).sha256
    return replace(spec, cuda_url=f"{FOLDER}/{manifest.cuda_file}", cuda_sha256=sha256)


def unpacks(facts: HostFacts, spec: HostSpec) -> bool:
    """Say whether the file has to be unpacked from a bundle."""
    return takes_from_bundle(spec) and installs(facts, spec)


def plan_download(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the download of the file; empty if it exists or is not needed."""
    url, path = spec.cuda_url, local_path(spec.cuda_url)
    if not installs(facts, spec) or url == path or facts.downloads.get(path) == spec.cuda_sha256:
        return ()
    return (FetchRunfile(url, path, spec.cuda_sha256),)


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the installation of the toolkit, or of the link to it, if needed."""
    if installs(facts, spec):
        return (InstallCudaToolkit(spec.cuda, local_path(spec.cuda_url), spec.cuda_sha256),)
    prefix = prefix_of(spec.cuda)
    links = bool(spec.cuda and spec.cuda_url) and facts.cuda.link != prefix
    return (LinkCudaToolkit(prefix),) if links else ()


def require_run_file(system: System, path: str, name: str) -> None:
    """Raise GpuprovError if a file is not a shell script; `name` is its name in the message."""
    start = system.read_start(path, 512)
    if start is None:
        raise GpuprovError(f"there is no file {path} on this host", "", "check gpuprov_cuda_url")
    if not start.startswith(b"#!"):
        seen = start[:80].decode("utf-8", "replace").strip()
        raise GpuprovError("this is no CUDA .run file", f"{name} begins with {seen!r}", "check gpuprov_cuda_url")


@dataclass(frozen=True)
class LinkCudaToolkit(Change):
    """Make /usr/local/cuda a link to this toolkit."""

    prefix: str

    def summary(self) -> str:
        return f"link {LINK} to {self.prefix}"

    def capture(self, system: System) -> Json:
        return {"link": capture_path_itself(system, LINK)}

    def apply(self, system: System, tell: Tell) -> None:
        _link(system, self.prefix)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        restore_path(system, before["link"])


def _link(system: System, prefix: str) -> None:
    found = system.status(LINK)
    if found is not None and found.kind == "directory":
        what = f"{LINK} is a folder, not a link: an older toolkit was installed into it"
        raise GpuprovError(what, f"{LINK}/version.json tells which", f"move it away: mv {LINK} {LINK}-old")
    system.make_link(LINK, prefix)


@dataclass(frozen=True)
class InstallCudaToolkit(Change):
    """Install the CUDA toolkit of this version from a .run file on the host, and link to it."""

    version: str
    path: str
    sha256: str = ""

    bundle_part: ClassVar[str] = "cuda"
    executes: ClassVar[str] = CACHE_DIRECTORY

    def summary(self) -> str:
        return f"install the CUDA toolkit {self.version} into {prefix_of(self.version)}, link {LINK} to it"

    @property
    def key(self) -> str:
        return f"install the CUDA toolkit {self.version}"

    def capture(self, system: System) -> Json:
        prefix = prefix_of(self.version)
        # The loader's list of the toolkit's libraries, as the installer names it.
        loader = f"/etc/ld.so.conf.d/cuda-{self.version.replace('.', '-')}.conf"
        paths = [capture_path_itself(system, path) for path in (LINK, loader)]
        return {"prefix": prefix, "existed": system.exists(prefix), "paths": paths, "log": system.exists(_LOG)}

    def apply(self, system: System, tell: Tell) -> None:
        require_run_file(system, self.path, self.path)
        require_digest(system, self.path, self.sha256, "the CUDA toolkit's file", "gpuprov_cuda_sha256")
        require_room(system, self.path, _UNPACKED_RATIO, "/usr/local", "the CUDA toolkit")
        prefix = prefix_of(self.version)
        system.remove_tree(_TEMPORARY)
        system.make_directory(_TEMPORARY, 0o700)
        arguments = ("--silent", "--toolkit", f"--toolkitpath={prefix}", "--override", f"--tmpdir={_TEMPORARY}")
        tell(f"installing into {prefix}; this takes minutes", 0, 0)
        try:
            done = system.run(("sh", self.path, *arguments), timeout=_INSTALL_SECONDS)
        finally:
            system.remove_tree(_TEMPORARY)
        self._prove(system, done)
        _link(system, prefix)
        if self.path.startswith(f"{CACHE_DIRECTORY}/"):
            system.remove(self.path)

    def _prove(self, system: System, done: Completed) -> None:
        """Verify the installation independently: the installer's log, the toolkit's version, its compiler."""
        prefix = prefix_of(self.version)
        log = system.read_text(_LOG) or ""
        decisive = next((line.strip() for line in log.splitlines() if re.match(r"\s*\[?ERROR\]?", line)), "")
        if not done.ok or not system.exists(f"{prefix}/bin/nvcc"):
            seen = f"{done.evidence(4)}\n{_LOG}: {decisive}".strip()
            step = f"see {_LOG}; what it lacks stands there"
            raise GpuprovError(f"the CUDA toolkit {self.version} was not installed", seen, step)
        found = version_in(system, prefix)
        if not found.startswith(f"{self.version}."):
            what = f"the file brought the CUDA toolkit {found or '(unknown)'}, asked for is {self.version}"
            raise GpuprovError(what, f"{prefix}/version.json", "correct gpuprov_cuda or gpuprov_cuda_url")

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Remove the new folder, and what the installer left beside it."""
        prefix = before["prefix"]
        if not before["existed"]:
            if system.exists(f"{prefix}/bin/cuda-uninstaller"):
                # The uninstaller removes menu entries and the like; the folder's remains are removed below.
                system.run((f"{prefix}/bin/cuda-uninstaller", "--silent"), timeout=_INSTALL_SECONDS)
            system.remove_tree(prefix)
        restore_paths(system, before["paths"])
        if not before["log"]:
            system.remove(_LOG)
        system.run(("ldconfig",), timeout=120)

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        if not before["existed"]:
            return ()
        return (f"{before['prefix']} was there before gpuprov installed into it, and stays",)

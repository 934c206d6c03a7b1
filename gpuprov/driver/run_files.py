"""NVIDIA's .run files: a site's mirror, their download, checks before they run (CUDA's too), and the way back to one.

KEPT holds the files of the installed driver and of the one before it. RECORD says how the installed driver was
installed; a journal keeps the record of the replaced one, so that its file can be fetched again.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gpuprov.cdi.discover import discover
from gpuprov.core.changes import Change, Json, Tell, image_content, parent_of, tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.download import fetch, fetch_small, trusted_sha256, unreachable
from gpuprov.core.journal import STATE_DIRECTORY, Entry
from gpuprov.core.places import CACHE_DIRECTORY, KEPT
from gpuprov.core.system import System
from gpuprov.driver.installer import Installation
from gpuprov.driver.running_driver import unload_for_undo, unload_unused
from gpuprov.facts.driver import damage
from gpuprov.protocol.codec import WrongDataError, load
from gpuprov.protocol.dataclass import asdict, dataclass, replace
from gpuprov.protocol.errors import GpuprovError, from_os_error
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import LONG_TERM_BRANCH, Tables
from gpuprov.protocol.versions import version_numbers

_VERSION = r"\d{3,4}\.\d{2,4}(?:\.\d{2})?"
RECORD = f"{STATE_DIRECTORY}/driver.json"
# Stands while an installer runs: libraries found beside it may be half an installation, whatever their version.
INCOMPLETE_MARK = f"{STATE_DIRECTORY}/driver-incomplete"
UNPACK = f"{CACHE_DIRECTORY}/unpack"
# The installer's own record of the installed files.
INSTALLER_STATE = "/var/lib/nvidia/log"
_UNINSTALL_SECONDS = 600


def resolved(system: System, spec: HostSpec, architecture: str) -> HostSpec:
    """Return the spec with version, URL and digest from the mirror, if it names one; this uses the network.

    Raises GpuprovError if the index is unavailable, or has no release of the branch.
    """
    if not spec.driver_mirror or spec.driver != "runfile" or spec.driver_url or not spec.driver_version:
        return spec
    if "." in spec.driver_version:
        url = url_on_mirror(spec.driver_mirror, spec.driver_version, architecture)
        return _with_file(spec, spec.driver_version, url, architecture, system.tables)
    found = mirror_releases(system, spec, architecture)
    version = newest_of_branch(spec.driver_version, found)
    if not version:
        branches = ", ".join(sorted({one.split(".")[0] for one in found})) or "none"
        what = f"the mirror {masked(_places(spec.driver_mirror)[1])} has no driver of branch {spec.driver_version}"
        step = "set gpuprov_driver_version to one of these, or gpuprov_driver_mirror to another mirror"
        raise GpuprovError(what, f"branches in its index: {branches}", step)
    return _with_file(spec, version, found[version], architecture, system.tables)


def mirror_releases(system: System, spec: HostSpec, architecture: str) -> Mapping[str, str]:
    """Return version → URL of the drivers that the mirror's index lists. Raises GpuprovError if it can't be read."""
    base, index = _places(spec.driver_mirror)
    found = parse_index(fetch_small(system, index).decode("utf-8", "replace"), architecture)
    return {version: f"{base}/{path}" for version, path in found.items()}


def from_bundle(spec: HostSpec, version: str, tables: Tables) -> HostSpec:
    """Return the spec where a bundle stands in for the mirror: a branch is the bundle's release, if that is of it."""
    if not spec.driver_mirror:
        return spec
    matches = spec.driver_version in ("latest", version.split(".")[0])
    return replace(spec, driver_version=version if matches else tables.resolved(spec.driver_version))


def _places(mirror: str) -> tuple[str, str]:
    """Return the folder and the index: the folder itself, or the named file in it."""
    place = mirror.rstrip("/")
    folder, _, name = place.rpartition("/")
    return (folder, place) if re.search(r"\.(txt|html?)$", name) else (place, f"{place}/")


def url_on_mirror(mirror: str, version: str, architecture: str) -> str:
    """Return the URL of a release on a mirror that has NVIDIA's own order of files, which needs no index."""
    return f"{_places(mirror)[0]}/{release_path(version, architecture)}"


def release_path(version: str, architecture: str) -> str:
    """Return where a release lies below NVIDIA's servers."""
    return f"{version}/NVIDIA-Linux-{architecture}-{version}.run"


def _with_file(spec: HostSpec, version: str, url: str, architecture: str, tables: Tables) -> HostSpec:
    # A known digest of NVIDIA's own file also applies to a mirror's copy.
    digest = spec.driver_sha256 or tables.known_sha256(version, architecture)
    return replace(spec, driver_version=version, driver_url=url, driver_sha256=digest)


def parse_index(text: str, architecture: str) -> Mapping[str, str]:
    """Return version → path below the index of the drivers that an index lists for an architecture."""
    found: dict[str, str] = {}
    # The relative links of a page, or the words of a text.
    for word in re.findall(r"""href\s*=\s*["']?([^"'\s>]+)""", text, re.IGNORECASE) or text.split():
        if ":" in word or ".." in word or word.startswith(("/", "?", "#")):
            continue
        file = re.fullmatch(rf"(?:.*/)?NVIDIA-Linux-{re.escape(architecture)}-({_VERSION})\.run", word)
        folder = re.fullmatch(rf"(?:\./)?({_VERSION})/?", word)
        if file:
            found[file[1]] = word[2:] if word.startswith("./") else word
        elif folder:
            found.setdefault(folder[1], release_path(folder[1], architecture))
    return found


def newest_of_branch(wanted: str, versions: Mapping[str, str]) -> str:
    """Return the newest version of a branch; for `latest` that of the long-term branch, or of all if it is missing."""
    branch = LONG_TERM_BRANCH if wanted == "latest" else wanted
    of_branch = [version for version in versions if version.split(".")[0] == branch]
    return max(of_branch or (versions if wanted == "latest" else ()), key=version_numbers, default="")


@dataclass(frozen=True)
class FetchRunfile(Change):
    """Download a .run file into the cache, and check its digest. A partial download is kept and resumed."""

    url: str
    path: str
    sha256: str

    undo_when_interrupted: ClassVar[bool] = False

    def summary(self) -> str:
        return f"download {masked(self.url)}"

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)

    def capture(self, system: System) -> Json:
        return {"path": self.path, "existed": system.exists(self.path)}

    def apply(self, system: System, tell: Tell) -> None:
        digest = self.sha256 or trusted_sha256(system, self.url)
        if not digest:
            what = "the driver's SHA-256 is not known, so a download could not be trusted"
            seen = f"there is no {masked(self.url)}.sha256sum, or not over https"
            raise GpuprovError(what, seen, "set gpuprov_driver_sha256 (sha256sum FILE, of a file that you trust)")
        system.make_directory(parent_of(self.path), 0o700)
        fetch(system, self.url, self.path, sha256=digest, tell=tell)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if not before["existed"]:
            system.remove(before["path"])


def local_path(url: str) -> str:
    """Return where a file lies on the host once it is there: in the cache, unless `url` is a path already."""
    return url if url.startswith("/") else f"{CACHE_DIRECTORY}/{url.rstrip('/').rpartition('/')[2]}"


def require_digest(system: System, path: str, sha256: str, what: str, variable: str) -> None:
    """Raise GpuprovError if the file is not the one with this SHA-256; an empty digest asks for none."""
    if sha256 and (digest := system.sha256(path)) != sha256:
        seen = f"{path} has SHA-256 {digest}, {variable} is {sha256}"
        step = "get the file again, or correct the digest"
        raise GpuprovError(f"{what} is not the one that was asked for", seen, step)


def require_room(system: System, path: str, ratio: int, place: str, what: str) -> None:
    """Raise GpuprovError if the cache or `place` has less room than `ratio` times the file's size.

    A full disk shows up as exit code 15 or a SIGBUS in the middle: look before.
    """
    found = system.status(path)
    need = (found.size if found else 0) * ratio
    for folder in (CACHE_DIRECTORY, place):
        free = system.free_bytes(folder)
        if free < need:
            seen = f"{free // 2**20} MiB free, {need // 2**20} MiB needed"
            step = f"make room: {system.df(folder)}"
            raise GpuprovError(f"not enough room on the file system of {folder} to install {what}", seen, step)


# -- the way back to a replaced driver -------------------------------------------------------------------------------


def recorded_installation(system: System, version: str) -> Installation | None:
    """Return how the installed driver, of this version, was installed; None if gpuprov did not."""
    return _parsed(system.read_bytes(RECORD), version)


def replaced_installation(before: Json) -> Installation | None:
    """Return how the driver was installed that a journal's entry replaced, None if that is not known."""
    image: Mapping[str, Any] = before.get("record") or {"kind": "missing"}
    version = before.get("replaces", "")
    return _parsed(image_content(image), version) or _parsed(json.dumps(before.get("by_hand")).encode(), version)


def _parsed(content: bytes | None, version: str) -> Installation | None:
    try:
        former = load(Installation, json.loads(content or b""), trusted=True)
    except (ValueError, WrongDataError):
        return None
    return former if former.version == version else None


def restoration(system: System, version: str, former: Installation | None) -> tuple[str, bool]:
    """Return how a rollback restores a driver, or why it can't, and which of both."""
    if former is None:
        return f"driver {version} can't be restored: gpuprov has no record of its installation, nor its file", False
    if _is_kept(system, former):
        return f"driver {version} from {former.kept_path}", True
    if not former.url.startswith("/"):
        file = former.url.removeprefix("file://")
        gone = file != former.url and not system.exists(file)
        lost = [f"there is no {file}"] if gone else [one.what for one in unreachable(system, (former.url,))]
        told = f"driver {version} can't be restored: {lost[0]}" if lost else ""
        return told or f"driver {version}, downloaded again from {masked(former.url)}", not lost
    reason = "has changed" if system.status(former.kept_path) is not None else "is not kept"
    return f"driver {version} can't be restored: its file, {former.kept_path}, {reason}", False


def _is_kept(system: System, former: Installation) -> bool:
    kept = system.status(former.kept_path)
    return kept is not None and kept.kind == "file" and system.sha256(former.kept_path) == former.sha256


def ensure_kept(system: System, former: Installation) -> None:
    """Make sure that the kept file is there and is the one that was installed. Raises GpuprovError."""
    if _is_kept(system, former):
        return
    system.make_directory(KEPT, 0o700)
    system.remove(former.kept_path)
    fetch(system, former.url, former.kept_path, sha256=former.sha256, tell=tell_nobody)


def record_installation(
    system: System, path: str, former: Installation, *, content: bool, replaces: str, tell: Tell
) -> None:
    """Record how a driver was installed, and keep its file if `content`; of older ones, only that of `replaces` stays.

    A file that can't be kept is reported, and fails no installation.
    """
    system.write(RECORD, f"{json.dumps(asdict(former))}\n".encode(), mode=0o600, owner=(0, 0))
    try:
        if content:
            system.make_directory(KEPT, 0o700)
        if content and path.startswith(f"{CACHE_DIRECTORY}/"):
            system.rename(path, former.kept_path)
        elif content:
            system.remove(former.kept_path)
            # A user could replace a file elsewhere: the digest of the copy counts.
            copied = ("cp", "--reflink=auto", "--no-preserve=all", "--", path, former.kept_path)
            system.require(copied, f"{path} can't be copied", timeout=600)
            if system.sha256(former.kept_path) != former.sha256:
                what = f"{path} has changed since it was installed"
                raise GpuprovError(what, "", "put it in a folder that only root can write, install again")
        stay = {former.kept_path, f"{KEPT}/{replaces}.run"} if content else set()
        # An interrupted installation that is repeated replaces itself, or nothing: the driver before it was removed.
        repeated = replaces == former.version or (content and not replaces)
        for name in () if repeated else system.list_directory(KEPT):
            if f"{KEPT}/{name}" not in stay:
                system.remove(f"{KEPT}/{name}")
    except (GpuprovError, OSError) as error:
        told = error if isinstance(error, GpuprovError) else from_os_error("it can't be stored", error)
        tell(f"the driver's file is not kept: {told.problems[0]}", 0, 0)
        with contextlib.suppress(OSError):
            system.remove(former.kept_path)


# -- undoing an installation -------------------------------------------------------------------------------------------


def former_is_whole(system: System, before: Json, outcome: Json | None) -> bool:
    """Say whether the replaced driver is complete: a failure came before it was touched, or it is restored already."""
    if outcome is not None and not outcome.get("installed", True):
        return True
    former, driver = before.get("replaces", ""), discover(system)
    mark = (system.read_text(INCOMPLETE_MARK) or "").strip()
    if not former or driver.library_version != former:
        return False
    # One that is installed again in its own version, for this kernel's module say, stays: its installer gives up first.
    if former == before["version"]:
        return not (mark and damage(system, driver))
    # An installer that was cut off while it removed the former one.
    if mark == before["version"] and replaced_installation(before) is not None and damage(system, driver):
        return False
    return not mark if outcome is not None else mark != former


def installed_by_others(system: System, before: Json) -> str:
    """Return the version of a driver that somebody installed since in the place of this one, "" if nobody did."""
    found = discover(system).library_version
    # Journals of older versions have no record; an uninstall of several has the oldest version.
    is_recorded = "record" not in before or recorded_installation(system, found) is not None
    ours = found in ("", before["version"]) or is_recorded
    return "" if ours or replaced_installation(before) is not None or system.exists(INCOMPLETE_MARK) else found


def fetch_former(system: System, entries: Sequence[Entry], *, required: bool) -> None:
    """Fetch the driver that the undo of these installations (latest first) restores, while the other one is there.

    Raises GpuprovError if the download fails; where nothing can be had, as was said before, only if it is `required`.
    """
    former = replaced_installation(entries[-1].before) if entries else None
    touched = any(not former_is_whole(system, one.before, one.outcome) for one in entries)
    if former is None or not touched or former.url.startswith("/"):
        return
    if required or restoration(system, former.version, former)[1]:
        ensure_kept(system, former)


def prepare_restoration(system: System, before: Json) -> Installation | None:
    """Return the replaced driver, unloading the other one, if its file can be had; None if not, as said before.

    Raises GpuprovError if the loaded driver has to be unloaded first and can't be.
    """
    former = replaced_installation(before)
    if former is None or not restoration(system, former.version, former)[1]:
        return None
    try:
        ensure_kept(system, former)
    except GpuprovError:
        return None
    # A driver that waited for a reboot was never loaded: the former one still is.
    stays = discover(system).kernel_version == former.version and former.knows("--skip-module-load")
    if former.kernel_modules and discover(system).kernel_version and not stays:
        error = unload_for_undo(system)
        if error is not None and not former.knows("--skip-module-load"):
            raise error
    return former


def uninstall(system: System, before: Json) -> Completed | None:
    """Run the installer's uninstaller and return how it ended; if its copy was not installed, use the .run.

    None: there is neither.
    """
    program, path = system.which("nvidia-uninstall"), before.get("path", "")
    if program is not None:
        command: tuple[str, ...] = (program, "--silent")
    elif system.exists(INSTALLER_STATE) and path and system.exists(path):
        system.make_directory(UNPACK, 0o700)
        command = ("sh", path, "--tmpdir", UNPACK, "--silent", "--uninstall")
    else:
        return None
    # A partial uninstallation leaves no driver: the next installation must not mistake it for one.
    system.write(INCOMPLETE_MARK, f"{before['version']}\n".encode())
    done = system.run(command, timeout=_UNINSTALL_SECONDS)
    system.remove_tree(UNPACK)
    # In a system container the modules are the container host's.
    if before.get("kernel_modules"):
        unload_unused(system)
    return done

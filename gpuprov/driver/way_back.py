"""The way back from a driver to the .run file that it replaced: how that was installed, and where its file is kept.

KEPT holds the files of the installed driver and of the one before it. RECORD says how the installed driver was
installed; a journal keeps the record of the replaced one, so that its file can be fetched again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpuprov.cdi.discover import discover
from gpuprov.core.changes import Json, Tell, image_content
from gpuprov.core.download import fetch
from gpuprov.core.journal import STATE_DIRECTORY
from gpuprov.core.places import CACHE_DIRECTORY, KEPT
from gpuprov.core.system import System
from gpuprov.driver import installer
from gpuprov.driver.running_driver import unload_for_undo, unload_unused
from gpuprov.facts.driver import damage
from gpuprov.protocol.codec import WrongDataError, load
from gpuprov.protocol.errors import GpuprovError, from_os_error
from gpuprov.protocol.secrets import masked

RECORD = f"{STATE_DIRECTORY}/driver.json"
# Stands while an installer runs: libraries found beside it may be half an installation, whatever their version.
INCOMPLETE_MARK = f"{STATE_DIRECTORY}/driver-incomplete"
UNPACK = f"{CACHE_DIRECTORY}/unpack"
# The installer's own record of the installed files.
_INSTALLER_STATE = "/var/lib/nvidia/log"
_UNINSTALL_SECONDS = 600


@dataclass(frozen=True)
class Former:
    """How a driver was installed from a .run file. `url`: where the file came from; a path if it was on the host."""

    version: str
    url: str
    sha256: str
    architecture: str
    kernel_modules: bool
    module_type: str
    has_libgl: bool
    signing_key: str = ""
    signing_certificate: str = ""

    @property
    def path(self) -> str:
        """Where the file is kept."""
        return f"{KEPT}/{self.version}.run"

    @property
    def can_be_fetched(self) -> bool:
        """Whether the file came from a server."""
        return not self.url.startswith("/")


def present(system: System, version: str) -> Former | None:
    """Return how the installed driver, of this version, was installed; None if gpuprov did not."""
    return _parsed(system.read_bytes(RECORD), version)


def former_of(before: Json) -> Former | None:
    """Return how the driver was installed that a journal's entry replaced, None if that is not known."""
    image: Mapping[str, Any] = before.get("record") or {"kind": "missing"}
    return _parsed(image_content(image), before.get("replaces", ""))


def _parsed(content: bytes | None, version: str) -> Former | None:
    try:
        former = load(Former, json.loads(content or b""), trusted=True)
    except (ValueError, WrongDataError):
        return None
    return former if former.version == version else None


def sentence(system: System, version: str, former: Former | None) -> tuple[str, bool]:
    """Return how a rollback restores a driver, or why it can't, and which of both."""
    if former is None:
        return f"driver {version} can't be restored: gpuprov has no record of its installation, nor its file", False
    kept = system.status(former.path)
    if kept is not None and kept.kind == "file" and system.sha256(former.path) == former.sha256:
        return f"driver {version} from {former.path}", True
    if former.can_be_fetched:
        return f"driver {version}, downloaded again from {masked(former.url)}", True
    reason = "has changed" if kept is not None else "is not kept"
    return f"driver {version} can't be restored: its file, {former.path}, {reason}", False


def provide(system: System, former: Former) -> None:
    """Make sure that the kept file is there and is the one that was installed. Raises GpuprovError."""
    kept = system.status(former.path)
    if kept is not None and kept.kind == "file" and system.sha256(former.path) == former.sha256:
        return
    system.make_directory(KEPT, 0o700)
    system.remove(former.path)
    fetch(system, former.url, former.path, sha256=former.sha256, tell=lambda message, done, total: None)


def keep(system: System, path: str, former: Former, *, content: bool, replaces: str, tell: Tell) -> None:
    """Record how a driver was installed, and keep its file if `content`; of older ones, only that of `replaces` stays.

    A file that can't be kept is reported, and fails no installation.
    """
    system.write(RECORD, f"{json.dumps(asdict(former))}\n".encode(), mode=0o600, owner=(0, 0))
    try:
        if content:
            _keep_file(system, path, former)
        stay = {former.path, f"{KEPT}/{replaces}.run"} if content else set()
        # An interrupted installation that is repeated replaces itself, or nothing: the driver before it was removed.
        repeated = replaces == former.version or (content and not replaces)
        for name in () if repeated else system.list_directory(KEPT):
            if f"{KEPT}/{name}" not in stay:
                system.remove(f"{KEPT}/{name}")
    except (GpuprovError, OSError) as error:
        told = error if isinstance(error, GpuprovError) else from_os_error("it can't be stored", error)
        tell(f"the driver's file is not kept: {told.problems[0]}", 0, 0)
        with contextlib.suppress(OSError):
            system.remove(former.path)


def _keep_file(system: System, path: str, former: Former) -> None:
    system.make_directory(KEPT, 0o700)
    if path.startswith(f"{KEPT.rpartition('/')[0]}/"):
        system.rename(path, former.path)
        return
    system.remove(former.path)
    # A user could replace a file elsewhere: the digest of the copy counts.
    copied = ("cp", "--reflink=auto", "--no-preserve=all", "--", path, former.path)
    system.require(copied, f"{path} can't be copied", timeout=600)
    if system.sha256(former.path) != former.sha256:
        raise GpuprovError(
            f"{path} has changed since it was installed",
            "",
            "put it in a folder that only root can write, install again",
        )


# -- undoing an installation -------------------------------------------------------------------------------------------


def former_is_whole(system: System, before: Json, outcome: Json | None) -> bool:
    """Say whether the replaced driver is complete: a failure came before it was touched, or it is restored already."""
    former = before.get("replaces", "")
    driver = discover(system)
    if former in ("", before["version"]) or driver.library_version != former:
        return False
    mark = (system.read_text(INCOMPLETE_MARK) or "").strip()
    # An installer that was cut off while it removed the former one.
    if mark == before["version"] and former_of(before) is not None and damage(system, driver):
        return False
    return not mark if outcome is not None else mark != former


def restorable(system: System, before: Json) -> Former | None:
    """Return the replaced driver if it can be installed again, its file in place. Raises GpuprovError.

    Nothing is removed before, so that a download that fails costs nothing.
    """
    former = former_of(before)
    if former is None or not sentence(system, former.version, former)[1]:
        return None
    provide(system, former)
    # A driver that waited for a reboot was never loaded: the former one still is.
    stays = discover(system).kernel_version == former.version and installer.knows(former.version, "--skip-module-load")
    if former.kernel_modules and discover(system).kernel_version and not stays:
        error = unload_for_undo(system)
        if error is not None and not installer.knows(former.version, "--skip-module-load"):
            raise error
    return former


def uninstall(system: System, before: Json) -> None:
    """Run the installer's uninstaller; if its copy was not installed, use the .run."""
    program, path = system.which("nvidia-uninstall"), before.get("path", "")
    if program is not None:
        command: tuple[str, ...] = (program, "--silent")
    elif system.exists(_INSTALLER_STATE) and path and system.exists(path):
        system.make_directory(UNPACK, 0o700)
        command = ("sh", path, "--tmpdir", UNPACK, "--silent", "--uninstall")
    else:
        return
    # A partial uninstallation leaves no driver: the next installation must not mistake it for one.
    system.write(INCOMPLETE_MARK, f"{before['version']}\n".encode())
    system.run(command, timeout=_UNINSTALL_SECONDS)
    system.remove_tree(UNPACK)
    # In a system container the modules are the container host's.
    if before.get("kernel_modules"):
        unload_unused(system)

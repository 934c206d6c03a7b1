"""A host of rpm's world below a folder: its own /etc, /var and /opt, and this machine's dnf, zypper and rpm."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from tests.lab.rpm_repository import BASE, RPM_MACROS, build_package

OS_RELEASES = Path(__file__).resolve().parents[1] / "data/os-release"
_PLACES = (
    "usr", "proc", "dev", "tmp", "run", "opt", "root", "etc/rpm", "etc/yum.repos.d", "etc/zypp/repos.d", "var/lib/rpm",
    "var/lib/dnf", "var/cache", "var/log", "var/tmp",
)  # fmt: skip
# What dnf and zypper, being Debian's here, need of /etc.
_COPIED = ("passwd", "group", "nsswitch.conf", "hosts", "ld.so.cache", "dnf", "zypp/zypper.conf", "alternatives")
# A mount namespace: this machine's programs, read-only, in the host's root. $1 is that root, the rest the command.
_ENTER = """
mount --bind /usr "$1/usr" && mount -o remount,bind,ro "$1/usr" && mount -t proc proc "$1/proc" &&
mount --rbind /dev "$1/dev" && exec chroot "$@"
"""


class RpmHost(System):
    """A machine below `root` that says it is the one of an os-release file in tests/data."""

    def __init__(self, root: Path, os_release: str, manager: str) -> None:
        super().__init__(str(root))
        self.programs = ("rpm", manager)
        for place in _PLACES:
            (root / place).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        for name in _COPIED:
            source, target = Path("/etc") / name, root / "etc" / name
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True)
            else:
                shutil.copyfile(source, target)
        shutil.copyfile(OS_RELEASES / os_release, root / "etc/os-release")
        (root / "etc/rpm/macros.lab").write_text(RPM_MACROS)
        package = build_package(BASE, root / "tmp")
        done = self.run(("rpm", "-i", "--nosignature", f"/tmp/{package.name}"))
        assert done.ok, done.evidence()

    def which(self, program: str) -> str | None:
        return System().which(program) if program in self.programs else None

    def kernel_release(self) -> str:
        return "5.14.0-427.13.1.el9_4.x86_64"

    def read_text(self, path: str) -> str | None:
        # It shares this machine's processes.
        return System().read_text(path) if path.startswith("/proc/") else super().read_text(path)

    def entered(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the command that runs `argv` on this host."""
        return ("unshare", "--mount", "sh", "-c", _ENTER, "sh", str(self.root), *argv)

    def end_agents(self) -> None:
        """End the gpg-agents that dnf leaves behind when it is interrupted."""
        for home in self.root.glob("var/cache/dnf/*/pubring"):
            self.run(("gpgconf", "--homedir", f"/{home.relative_to(self.root)}", "--kill", "all"))

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        done = super().run(self.entered(argv), **more)
        return replace(done, argv=tuple(argv))

"""dnf 4 and 5: Red Hat's family, Fedora, Amazon Linux 2023."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuprov.core.changes import tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.machine.distros import Distribution
from gpuprov.packages.failures import finish_rpm
from gpuprov.packages.interface import Commands, Versions, versions_by_name
from gpuprov.packages.rpm import NO_INDEX, QUERY_SECONDS, RpmManager, run_rpm
from gpuprov.packages.rpm_locks import LOCK_TOOLS

# fedoraproject.org/wiki/Changes/SwitchToDnf5
_DNF5_FEDORA = 41
# Module streams that are not enabled hide their packages from every other question (dnf(8), repoquery).
_QUERY = (
    "repoquery", "--available", "--disable-modular-filtering", "--queryformat",
    "%{name} %{epoch}:%{version}-%{release}.%{arch}\n",
)  # fmt: skip


class Dnf(RpmManager):
    """dnf; its fifth version holds packages in another list."""

    name = "dnf"
    commands = Commands(
        "dnf install -y",
        "dnf reinstall -y",
        "dnf remove",
        "dnf list --showduplicates",
        "dnf versionlock add",
        "dnf -q -y install",
    )
    refresh = ("dnf", "-y", "makecache")
    install = ("dnf", "-y", "--setopt=install_weak_deps=False", "install")
    version_joint = "-"
    repository_directory = "/etc/yum.repos.d"
    copied_directory = "repos.d"
    package_check = "gpgcheck"
    # Some distributions skip a repository that is out of reach, without a word.
    repository_lines = ("skip_if_unavailable=0",)
    # The bundle has packages of module streams without the lists of the streams.
    bundle_lines = ("skip_if_unavailable=0", "module_hotfixes=1")
    fetch = ("dnf", "-q", "-y", "--setopt=destdir={}", "reinstall", "--downloadonly")
    folder_option, cache_option = ("--setopt=reposdir={}",), ("--setopt=cachedir={}",)
    # dnf.conf(5), includepkgs and module_hotfixes.
    limited = True, "includepkgs={}"
    unfiltered_option = ("--setopt={}.module_hotfixes=1",)

    def hold_tool(self, system: System) -> str:
        program = system.which("dnf")
        return "dnf5" if program is not None and system.real_path(program).endswith("/dnf5") else "dnf"

    def hold_packages(self, row: Distribution) -> tuple[str, ...]:
        # A bundle may be asked for Fedora without a release.
        is_older = row.version.isdecimal() and int(row.version) < _DNF5_FEDORA
        tool = "dnf5" if row.id == "fedora" and not is_older else "dnf"
        return tuple(filter(None, (LOCK_TOOLS[tool].plugin,)))

    def as_asked(self, system: System) -> tuple[str, ...]:
        off = "none" if self.hold_tool(system) == "dnf5" else "0"
        return "--setopt=assumeno=0", f"--setopt=cacheonly={off}"

    def exact(self, system: System, names: Sequence[str], *, simulate: bool) -> tuple[str, ...]:
        # Packages of another stream than the enabled one count too (dnf.conf(5), module_hotfixes).
        options = ("--setopt=*.module_hotfixes=1", "--setopt=install_weak_deps=False")
        sources = ("--disablerepo=*",) if names[0].startswith("/") else ()
        words = ("--assumeno",) if simulate else ("-y", *self.as_asked(system))
        # For dnf 5 an option of `install` comes after it.
        return ("dnf", *options, *sources, *words, "install", "--allowerasing", *names)

    def unlocked(self, system: System) -> tuple[str, ...]:
        return ("--disableplugin=versionlock",) if self.hold_tool(system) == "dnf" else ()

    def removed_by(self, done: Completed) -> tuple[str, ...] | None:
        if "Operation aborted" not in done.stdout + done.stderr:
            return None
        removed = "".join(re.findall(r"^Removing.*:\n((?: .*\n)+)", done.stdout, re.MULTILINE))
        return tuple(line.split()[0] for line in removed.splitlines() if line[1:2] != " ")

    def query(self, system: System, options: tuple[str, ...], names: Sequence[str]) -> Versions:
        # dnf would answer from metadata of up to two days ago, or of any age, as metadata_expire says.
        command = ("dnf", "-q", "-y", *self.as_asked(system), "--refresh", *options, *_QUERY, *names)
        done = run_rpm(system, command, tell_nobody, QUERY_SECONDS)
        finish_rpm(done, NO_INDEX)
        return parse_repoquery(done.stdout)


def parse_repoquery(text: str) -> Versions:
    """Return name → versions from lines of `NAME EPOCH:VERSION-RELEASE.ARCH`."""
    rows = re.finditer(r"^(\S+) (\d+:\S+)$", text, re.MULTILINE)
    return versions_by_name((match[1], match[2]) for match in rows)


DNF = Dnf()

"""zypper: SUSE Linux Enterprise and openSUSE."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gpuprov.core.changes import tell_nobody
from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.packages.failures import finish_rpm
from gpuprov.packages.interface import Commands, Versions, versions_by_name
from gpuprov.packages.rpm import NO_INDEX, QUERY_SECONDS, RpmManager, run_rpm

_ZYPPER = ("zypper", "--non-interactive")
# A site's zypp.conf may say otherwise (commit.downloadMode).
_AS_ASKED = ("--download-in-advance",)
_QUERY = ("search", "--details", "--match-exact", "--type", "package")
# zypper(8): there are no repositories; no package has that name.
_NO_REPOSITORIES, _NOTHING_FOUND = 6, 104


class Zypper(RpmManager):
    """zypper; never with --gpg-auto-import-keys, which trusts every key that a repository shows."""

    name = "zypper"
    commands = Commands(
        "zypper install -y",
        "zypper install -y --force",
        "zypper remove",
        "zypper search -s",
        "zypper addlock",
        "zypper -q -n install",
    )
    refresh = (*_ZYPPER, "refresh")
    install = (*_ZYPPER, "install", *_AS_ASKED, "--no-recommends", "--")
    version_joint = "="
    # 102: reboot advised, 103: the package manager itself was updated.
    good_codes = (0, 102, 103)
    repository_directory = "/etc/zypp/repos.d"
    copied_directory = "etc/zypp/repos.d"
    # gpgcheck is both checks together.
    package_check = "pkg_gpgcheck"
    repository_lines = ("gpgcheck=1", "autorefresh=1")
    login_in_url = True
    bundle_lines = ("pkg_gpgcheck=1",)
    rebuilds = True
    fetch = (*_ZYPPER, "--pkg-cache-dir", "{}", "install", "--force", "--download-only", "--")
    folder_option, cache_option = ("--reposd-dir", "{}"), ("--cache-dir", "{}")
    # zypper has no such list: the repository counts for the one command that asks for it, after all others.
    limited = False, "priority=200"
    limited_option = ("--plus-content", "{}")

    def word(self, package: str) -> str:
        name, version, release = package.rsplit("-", 2)
        return f"{name}={version}-{release.rpartition('.')[0]}"

    def exact(self, system: System, names: Sequence[str], *, simulate: bool) -> tuple[str, ...]:
        words = ("--dry-run",) if simulate else _AS_ASKED
        options = ("--oldpackage", "--no-recommends", "--force-resolution", *words)
        if names[0].startswith("/"):
            return (*_ZYPPER, "--no-refresh", "install", *options, "--", *names)
        return (*_ZYPPER, "install", *options, "--", *map(self.word, names))

    def removed_by(self, done: Completed) -> tuple[str, ...] | None:
        removed = re.findall(r"going to be REMOVED:\n((?: .*\n)+)", done.stdout)
        return tuple("".join(removed).split()) if done.returncode in self.good_codes else None

    def only_from_copy(self, system: System, work: str, keys: Iterable[str]) -> tuple[str, ...]:
        # zypper trusts the keys of rpm's database only: this copy gets a database of its own.
        for place in keys:
            system.require(("rpm", "--root", work, "--import", place), "rpm can't import the key of a repository")
        return ("--root", work)

    def query(self, system: System, options: tuple[str, ...], names: Sequence[str]) -> Versions:
        # A search skips repositories that it can't read, and answers from the others: so refresh first.
        done = run_rpm(system, (*_ZYPPER, *options, "refresh"), tell_nobody, QUERY_SECONDS)
        if done.returncode == _NO_REPOSITORIES:
            return {}
        finish_rpm(done, NO_INDEX)
        done = run_rpm(system, (*_ZYPPER, *options, *_QUERY, *names), tell_nobody, QUERY_SECONDS)
        finish_rpm(done, NO_INDEX, (0, _NOTHING_FOUND))
        return parse_search(done.stdout)


def parse_search(text: str) -> Versions:
    """Return name → versions from zypper's table, without packages that are installed and in no repository."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.count("|") == 5]
    return versions_by_name((row[1], f"{row[3]}.{row[4]}") for row in rows if row[2] == "package" and row[5][:1] != "(")


ZYPPER = Zypper()

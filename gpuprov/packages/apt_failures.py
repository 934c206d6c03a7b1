"""apt's error messages: what each means and what to do. Recorded from apt 2.2, 2.6 and 3.0. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprov.core.commands import Completed, first_match
from gpuprov.core.download import LOG_IN
from gpuprov.packages.past_kernels import Advice, require_known
from gpuprov.protocol.errors import GpuprovError


@dataclass(frozen=True)
class Failure:
    """A row: what apt prints (a pattern within a line), what it means, what to do.

    apt lists packages after some lines: `heading` begins the list, {listed} stands for it in `next_step`.
    """

    pattern: str
    meaning: str
    next_step: str
    heading: str = ""


NO_SUCH_PACKAGE = r"Unable to locate package|has no installation candidate|Version '.*' for '.*' was not found"
# The first row that matches decides.
_FAILURES = (
    # First of all: on a full disk apt also says that an index can't be fetched, or is not signed.
    Failure(
        r"No space left on device|enough free space|Splitting up .* into data and signature failed",
        "the disk is full", "make room: df -h (inodes: df -i); /tmp must be writable, too",
    ),
    Failure(
        r"Could not get lock|Unable to acquire the dpkg frontend lock",
        "another program holds the package manager's lock",
        "wait for its end (ps -ef | grep -E 'apt|dpkg'), then run the same command again",
    ),
    Failure(
        r"Packages need to be removed but remove is disabled",
        "other packages would have to go, and gpuprov removes none",
        "if nobody needs them: apt-get remove {listed}; else leave out what conflicts with them",
        "The following packages will be REMOVED:",
    ),
    Failure(
        r"Held packages were changed", "a package that is held would have to change",
        "apt-mark unhold {listed}; or ask for the version that is held", "The following held packages will be changed:",
    ),
    Failure(
        r"Packages were downgraded", "a package would have to go back to an older version",
        "ask for it by its version, if that is meant: NAME=VERSION; it would be: {listed}",
        "The following packages will be DOWNGRADED:",
    ),
    Failure(
        r"is a virtual package", "that is the name of a virtual package, which several provide",
        "name one of them in gpuprov_packages: apt-cache showpkg NAME lists them",
    ),
    Failure(
        NO_SUCH_PACKAGE,
        "no repository has such a package", "apt-cache policy NAME shows what the repositories have; is one missing?",
    ),
    Failure(
        r"needs to be reinstalled, but I can't find an archive", "half of a package is there, and no repository has it",
        "apt-get update, then run the same command again; else dpkg --remove --force-remove-reinstreq NAME",
    ),
    # Before the row of unsigned repositories: apt also says that the repository is not signed.
    Failure(
        r"EXPKEYSIG|key on \S+ is bad:.*Expired on|KEYEXPIRED", "a repository's key has expired",
        "the line names the repository: get its current key (gpuprov_repositories: key_url, key_fingerprint)",
    ),
    Failure(
        r"REVKEYSIG|key on \S+ is bad:.*[Rr]evoked", "a repository's key was revoked by its owner",
        "the line names the repository: get its current key, and ask its owner what happened",
    ),
    Failure(
        r"SHA1 is not considered secure|not bound:",
        "a repository's key or signature rests on SHA-1, which this apt refuses",
        "the line names the repository: its owner must sign it again; NVIDIA has newer keys for newer releases",
    ),
    Failure(
        r"Clearsigned file isn't valid", "a repository gave something else than its index",
        "does the network want a log-in (a web page that asks for one)? curl the address that the line names",
    ),
    Failure(
        r"BADSIG|Message has been manipulated|signatures were invalid", "a repository's signature is wrong",
        "the line names the repository: a mirror or proxy delivers damaged or forged files; compare with the original",
    ),
    Failure(
        r"Failed to parse keyring", "the key file of a repository can't be read",
        "the line names the file: it must be there and readable by all (mode 0644); of gpuprov's own, run it again",
    ),
    Failure(
        r"NO_PUBKEY|Missing key|is not signed|no longer signed",
        "a repository is not signed with a key that this host trusts",
        "the line names the repository: correct its key (Signed-By), or remove it",
    ),
    Failure(
        r"can't be authenticated|unauthenticated packages", "a package comes from a repository that is not signed",
        "apt-cache policy {listed} names the repository: correct its key (Signed-By), or remove it",
        "WARNING: The following packages cannot be authenticated!",
    ),
    Failure(
        r"Hash Sum mismatch|File has unexpected size", "a repository delivered a damaged file",
        "a mirror in the middle of its update, or a proxy: run the same command again in some minutes",
    ),
    Failure(
        r"is not valid yet|Release file .* expired", "this host's clock and a repository's disagree",
        "check the clock: timedatectl; then the mirror",
    ),
    Failure(
        r"does not have a Release file|no longer has a Release file|  404  ",
        "there is no repository at that address, or the file is gone from it",
        "the line names it: check its URI and suite, and whether the mirror is whole",
    ),
    Failure(
        r"Conflicting values set for option", "two sources name the same repository, with different keys",
        "grep -rl the address that the line names /etc/apt; remove one of the two",
    ),
    Failure(
        r"Malformed (entry|stanza|line)|The list of sources could not be read|is not known on line \d+ in source list",
        "a package source can't be read", "the line names the file: correct it, or remove it",
    ),
    Failure(r"  407  |[Pp]roxy [Aa]uthentication", "the proxy refuses the login", LOG_IN),
    Failure(r"  401  ", "the repository, or the proxy, refuses the login", LOG_IN),
    Failure(
        r"Temporary failure resolving|Could not resolve", "a repository's name is not known",
        "check DNS: getent hosts NAME",
    ),
    Failure(
        r"Could not connect|Connection (refused|failed|timed out)|Network is unreachable|Failed to fetch",
        "a repository can't be reached", "check network and proxy, or remove the repository that the line names",
    ),
    Failure(
        r"unmet dependencies|held broken packages", "the packages do not fit together",
        "apt-get --fix-broken install; apt-mark showhold shows what is held",
        "The following packages have unmet dependencies:",
    ),
)  # fmt: skip


_UNREACHED = tuple(row for row in _FAILURES if row.meaning in (
    "there is no repository at that address, or the file is gone from it", "a repository's name is not known",
    "a repository can't be reached",
))  # fmt: skip


def finish(done: Completed, what: str, advice: Advice | None = None) -> None:
    """Raise GpuprovError, with apt's decisive line, if apt failed.

    `advice` is the answer if no repository has a package.
    """
    if done.ok:
        return
    text = f"{done.stderr}\n{done.stdout}"
    said = [line.strip() for line in text.splitlines() if line.strip()]
    require_known(done, said, advice, what, NO_SUCH_PACKAGE)
    found = first_match(_FAILURES, lambda row: row.pattern, said)
    if found is not None and found[0] in _UNREACHED:
        # Of several repositories the first is the cause, whatever its kind.
        found = next((row, line) for line in said for row in _UNREACHED if re.search(row.pattern, line))
    if found is not None:
        row, line = found
        listed = listed_under(row.heading, text) if row.heading else ()
        evidence = [
            f"{done.argv[0]} exited {done.returncode}: {line}",
            *([f"{row.heading} {', '.join(listed)}"] if listed else ()),
        ]
        next_step = row.next_step.replace("{listed}", " ".join(listed) or "NAME")
        raise GpuprovError(f"{what}: {row.meaning}", "\n".join(evidence), next_step)
    raise GpuprovError(what, done.evidence(), "run that command on the host to see all of it")


def listed_under(heading: str, text: str) -> tuple[str, ...]:
    """Return what apt lists in indented lines under a heading: packages by name, or one statement a line."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines, 1) if line.strip() == heading.strip()), len(lines))
    found: list[str] = []
    for line in lines[start:]:
        if not line.startswith(" "):
            break
        found += [line.strip()] if " : " in line else [word.rstrip("*") for word in line.split()]
    return tuple(found)

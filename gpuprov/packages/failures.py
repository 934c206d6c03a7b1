"""What apt, dnf, zypper and rpm print when they fail: what it means and what to do. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprov.core.commands import Completed, first_match
from gpuprov.core.download import LOG_IN
from gpuprov.protocol.errors import GpuprovError


@dataclass(frozen=True)
class Advice:
    """What to say when no repository has a package whose name holds `needle`."""

    needle: str
    meaning: str
    next_step: str


@dataclass(frozen=True)
class Failure:
    """A row: what a package manager prints (a pattern within a line), what it means, what to do.

    apt lists packages after some lines: `heading` begins the list, {listed} stands for it in `next_step`.
    """

    pattern: str
    meaning: str
    next_step: str
    heading: str = ""


_NO_REPOSITORY = "there is no repository at that address, or the file is gone from it"
_NO_NAME = "a repository's name is not known"
_NO_CONNECTION = "a repository can't be reached"
_UNREACHED = (_NO_REPOSITORY, _NO_NAME, _NO_CONNECTION)

_APT_LACKS = r"Unable to locate package|has no installation candidate|Version '.*' for '.*' was not found"
# Recorded from apt 2.2, 2.6 and 3.0. The first row that matches decides.
_APT = (
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
        _APT_LACKS, "no repository has such a package",
        "apt-cache policy NAME shows what the repositories have; is one missing?",
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
        _NO_REPOSITORY,
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
        r"Temporary failure resolving|Could not resolve", _NO_NAME, "check DNS: getent hosts NAME",
    ),
    Failure(
        r"Could not connect|Connection (refused|failed|timed out)|Network is unreachable|Failed to fetch",
        _NO_CONNECTION, "check network and proxy, or remove the repository that the line names",
    ),
    Failure(
        r"unmet dependencies|held broken packages", "the packages do not fit together",
        "apt-get --fix-broken install; apt-mark showhold shows what is held",
        "The following packages have unmet dependencies:",
    ),
)  # fmt: skip

_RPM_LACKS = r"Unable to find a match|No match for argument|No provider of '.*' found"
# Recorded from dnf 4.14, dnf 5.4 and zypper 1.14. The first row that matches decides.
_RPM = tuple(Failure(*row) for row in (
    # First of all: on a full disk they also say that a file can't be fetched, is damaged, or is not signed.
    (r"[Nn]o space left on device|Curl error \(23\)|Failed writing (received data|body)|Error code: Write error"
     r"|[Nn]ot enough (free )?space|more space (needed|on)|needs \d+ ?[KMG]i?B on|signed with an unknown key ''",
     "the disk is full", "make room: df -h (inodes: df -i)"),
    (r"history\.sqlite.*no such table", "dnf's history is half made, as a full disk leaves it",
     "rm /var/lib/dnf/history.sqlite*, then run the same command again"),
    (r"System management is locked|Waiting for process with pid|transaction lock",
     "another program holds the package manager's lock", "wait for its end, then run the same command again"),
    (r"There are no enabled repositories|No repositories defined|not registered with an entitlement",
     "this host has no package repositories",
     "register it (subscription-manager register; SUSEConnect -r CODE), or give it a mirror"),
    (r"immutable operating system|[Rr]ead-only file system", "this host's system files can't be written",
     "an image-based system (ostree, bootc, transactional-update) is changed by its own tools, not by gpuprov"),
    (r"filtered out by (exclude|modular) filtering", "an exclude, a lock or a module stream hides a package",
     "dnf versionlock list, excludepkgs in /etc/dnf/dnf.conf and dnf module list --enabled show what does"),
    (_RPM_LACKS, "no repository has such a package",
     "dnf list --showduplicates NAME, or zypper search -s NAME, shows what there is; is a repository missing?"),
    # Before the next rows: zypper also says that the verification failed.
    (r"signed with an unknown key|is unsigned|is not signed|GPG signature is not available|Signing key not found"
     r"|wrong key\?|Public key for .* not installed|public key is not available|not correct for this package",
     "a repository, or a package in it, is not signed with a key that this host trusts",
     "the line names it: correct its key (gpgkey), or remove the repository"),
    (r"Failed to retrieve GPG key|Couldn't open file .*gpg", "a repository's key is missing",
     "the line names the repository: correct its gpgkey"),
    (r"Bad (GPG|PGP) signature|Signature verification failed|digests? SIGNATURES NOT OK|BAD(,|$)",
     "a repository's signature is wrong, or its key has expired",
     "the line names the repository: get its current key; a mirror or proxy may also deliver damaged files"),
    (r"checksum doesn't match|Inconsistent server data|exceeded the expected filesize|[Dd]igest verification failed"
     r"|invalid checksum|[Cc]hecksum error",
     "a repository delivered a damaged file",
     "a mirror in the middle of its update, or a proxy: run the same command again in some minutes"),
    (r"nothing provides|is needed by|[Rr]equires: |conflicts with file from package",
     "the packages do not fit together", "the line names them; is a repository missing, or a module stream enabled?"),
    (r"conflicting requests|Depsolve Error|^Problem: ",
     "the packages do not fit together", "the line names them; is a repository missing, or a module stream enabled?"),
    (r"Status code: 407|HTTP Error 407|HTTP code 407|[Pp]roxy [Aa]uthentication",
     "the proxy refuses the login", LOG_IN),
    (r"Status code: 401|HTTP Error 401|HTTP code 401", "the repository, or the proxy, refuses the login", LOG_IN),
    (r"[Cc]ould(n't| not) resolve host", _NO_NAME, "check DNS: getent hosts NAME"),
    (r"Status code: 404|HTTP Error 404|Repository type can't be determined|not found on medium", _NO_REPOSITORY,
     "the line names it: check its address, and whether the mirror is whole"),
    (r"Curl error|Error trying to read from|Download \(curl\) error|Failed to connect|Connection failed|[Tt]imed out"
     r"|Cannot download|Couldn't connect",
     _NO_CONNECTION, "check network and proxy, or remove the repository that the line names"),
))  # fmt: skip
# Lines that name why a repository is not reached; zypper's first line about it does not.
_APT_REASON = "|".join(row.pattern for row in _APT if row.meaning in _UNREACHED)
_RPM_REASON = (
    r"[Cc]ould(n't| not) resolve host|Status code: 404|HTTP Error 404|not found on medium|Curl error \(\d+\)"
    r"|Failed to connect|Connection (failed|refused)|[Tt]imed out|Could(n't| not) connect"
)


def finish_apt(done: Completed, what: str, advice: Advice | None = None) -> None:
    """Raise GpuprovError, with the decisive line, if apt or dpkg failed.

    `advice` is the answer if no repository has a package.
    """
    if not done.ok:
        raise _failure(done, what, _APT, _APT_REASON, advice, _APT_LACKS)


def finish_rpm(done: Completed, what: str, good_codes: tuple[int, ...] = (0,), advice: Advice | None = None) -> None:
    """Raise GpuprovError in the same way if dnf, zypper or rpm failed."""
    if done.returncode not in good_codes:
        raise _failure(done, what, _RPM, _RPM_REASON, advice, _RPM_LACKS)


def _failure(
    done: Completed, what: str, rows: tuple[Failure, ...], reason: str, advice: Advice | None, lacks: str
) -> GpuprovError:
    # zypper says in three lines what belongs together: the address, a code and the reason.
    text = re.sub(r"\n(?=Error (code|message): )", " ", f"{done.stderr}\n{done.stdout}")
    said = [line.strip() for line in text.splitlines() if line.strip()]
    evidence = f"{done.argv[0]} exited {done.returncode}: "
    unknown = next((line for line in said if advice and advice.needle in line and re.search(lacks, line)), None)
    if advice and unknown is not None:
        return GpuprovError(f"{what}: {advice.meaning}", evidence + unknown, advice.next_step)
    found = first_match(rows, lambda row: row.pattern, said)
    if found is not None and found[0].meaning in _UNREACHED:
        # Of several repositories the first is the cause, whatever its kind.
        first = next((line for line in said if re.search(reason, line)), found[1])
        found = first_match(rows, lambda row: row.pattern, [first]) or found
    if found is None:
        return GpuprovError(what, done.evidence(), "run that command on the host to see all of it")
    row, line = found
    listed = listed_under(row.heading, text) if row.heading else ()
    evidence += f"{line}\n{row.heading} {', '.join(listed)}" if listed else line
    return GpuprovError(
        f"{what}: {row.meaning}", evidence, row.next_step.replace("{listed}", " ".join(listed) or "NAME")
    )


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

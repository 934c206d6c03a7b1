"""What dnf, zypper and rpm say when they fail, what it means, what to do; never runs them."""

from __future__ import annotations

import re

from gpuprov.core.commands import Completed, first_match
from gpuprov.core.download import LOG_IN
from gpuprov.packages.past_kernels import Advice, require_known
from gpuprov.protocol.errors import GpuprovError

NO_SUCH_PACKAGE = r"Unable to find a match|No match for argument|No provider of '.*' found"
# Recorded from dnf 4.14, dnf 5.4 and zypper 1.14. The first row that matches decides.
_FAILURES = (
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
    (NO_SUCH_PACKAGE,
     "no repository has such a package",
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
    (r"[Cc]ould(n't| not) resolve host", "a repository's name is not known", "check DNS: getent hosts NAME"),
    (r"Status code: 404|HTTP Error 404|Repository type can't be determined|not found on medium",
     "there is no repository at that address, or the file is gone from it",
     "the line names it: check its address, and whether the mirror is whole"),
    (r"Curl error|Error trying to read from|Download \(curl\) error|Failed to connect|Connection failed|[Tt]imed out"
     r"|Cannot download|Couldn't connect",
     "a repository can't be reached", "check network and proxy, or remove the repository that the line names"),
)  # fmt: skip

# Lines that name why a repository is not reached; zypper's first line about it does not.
_REASON = re.compile(
    r"[Cc]ould(n't| not) resolve host|Status code: 404|HTTP Error 404|not found on medium|Curl error \(\d+\)"
    r"|Failed to connect|Connection (failed|refused)|[Tt]imed out|Could(n't| not) connect"
)
_UNREACHED = (
    "a repository's name is not known", "there is no repository at that address, or the file is gone from it",
    "a repository can't be reached",
)  # fmt: skip


def finish(done: Completed, what: str, good_codes: tuple[int, ...] = (0,), advice: Advice | None = None) -> None:
    """Raise GpuprovError, with the decisive line, if the command failed.

    `advice` is the answer if no repository has a package.
    """
    if done.returncode in good_codes:
        return
    # zypper says in three lines what belongs together: the address, a code and the reason.
    text = re.sub(r"\n(?=Error (code|message): )", " ", f"{done.stderr}\n{done.stdout}")
    said = [line.strip() for line in text.splitlines() if line.strip()]
    require_known(done, said, advice, what, NO_SUCH_PACKAGE)
    found = first_match(_FAILURES, lambda row: row[0], said)
    if found is not None and found[0][1] in _UNREACHED:
        # Of several repositories the first is the cause, whatever its kind.
        first = next((line for line in said if _REASON.search(line)), found[1])
        found = first_match(_FAILURES, lambda row: row[0], [first]) or found
    if found is not None:
        (_, meaning, next_step), line = found
        raise GpuprovError(f"{what}: {meaning}", f"{done.argv[0]} exited {done.returncode}: {line}", next_step)
    raise GpuprovError(what, done.evidence(), "run that command on the host to see all of it")

"""What apt, dnf, zypper and rpm print when they fail: what it means and what to do. Pure."""

from __future__ import annotations

import re
import shlex

from gpuprov.core.commands import Completed, failures, first_match
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import GpuprovError


@dataclass(frozen=True)
class Advice:
    """What to say when no repository has a package whose name holds `needle`."""

    needle: str
    meaning: str
    next_step: str


# Above the names of packages whose own scripts have failed.
FAILED = "Errors were encountered while processing:"
# How dnf and zypper name a repository that can't be read.
_REPOSITORY = re.compile(r"(?:for repo(?:sitory)?|Repository) ['\"]([^'\"]+)['\"]")
# Lines that name why a repository is not reached; zypper's first line about it does not.
_REASONS = {"rpm": (
    r"[Cc]ould(n't| not) resolve host|Status code: 404|HTTP Error 404|not found on medium|Curl error \(\d+\)"
    r"|Failed to connect|Connection (failed|refused)|[Tt]imed out|Could(n't| not) connect"
)}  # fmt: skip


def finish_apt(done: Completed, what: str, advice: Advice | None = None) -> None:
    """Raise GpuprovError, with the decisive line, if apt or dpkg failed.

    `advice` is the answer if no repository has a package.
    """
    if not done.ok:
        raise _failure(done, what, "apt", advice)


def finish_rpm(done: Completed, what: str, good_codes: tuple[int, ...] = (0,), advice: Advice | None = None) -> None:
    """Raise GpuprovError in the same way if dnf, zypper or rpm failed."""
    if done.returncode not in good_codes:
        raise _failure(done, what, "rpm", advice)


def _patterns(program: str, kind: str) -> str:
    return "|".join(row.pattern for row in failures(program) if row.kind == kind)


def _failure(done: Completed, what: str, program: str, advice: Advice | None) -> GpuprovError:
    reason = _REASONS.get(program) or _patterns(program, "unreached")
    lacks = _patterns(program, "lacks")
    # zypper says in three lines what belongs together: the address, a code and the reason.
    text = re.sub(r"\n(?=Error (code|message): )", " ", f"{done.stderr}\n{done.stdout}")
    said = [line.strip() for line in text.splitlines() if line.strip()]
    evidence = f"{done.argv[0]} exited {done.returncode}: "
    unknown = next((line for line in said if advice and advice.needle in line and re.search(lacks, line)), None)
    if advice and unknown is not None:
        return GpuprovError(f"{what}: {advice.meaning}", evidence + unknown, advice.next_step)
    found = first_match(program, said)
    if found is not None and found[0].kind == "unreached":
        # Of several repositories the first is the cause, whatever its kind.
        first = next((line for line in said if re.search(reason, line)), found[1])
        found = first_match(program, [first]) or found
    if found is None:
        return GpuprovError(what, done.evidence(), "run that command on the host to see all of it")
    row, line = found
    listed = listed_under(row.heading, text) if row.heading else ()
    if row.kind == "unreached" and (named := _REPOSITORY.search(text)):
        listed, evidence = (shlex.quote(named[1]),), f"{evidence}repository {named[1]}: "
    names = " ".join(listed) or "NAME"
    if row.heading == FAILED:
        # The reason is what the script printed before.
        evidence = done.evidence()
    else:
        evidence += f"{line}\n{row.heading} {', '.join(listed)}" if listed and row.heading else line
    folder = "/etc/zypp/repos.d" if done.argv[0] == "zypper" else "/etc/yum.repos.d"
    meaning, step = row.what.replace("{listed}", names), row.next_step.replace("{folder}", folder)
    return GpuprovError(f"{what}: {meaning}", evidence, step.replace("{listed}", names))


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

"""Group what hosts have in common: failures by cause, versions, drains, and names in rows. Pure."""

import collections
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from gpuprov.agent.result import Drain, HostResult, check_text, machines
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.words import counted, plain

# Text that identifies one host in a sentence: `[name]:port`, `name port 22`, an IPv4 address.
# The bounds prevent quadratic time on long input from a host.
_PLACE = re.compile(
    r"\[[^\]\s]{1,255}\]:\d+|(?<![\w.:-])[\w.:-]{1,255} port \d+|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"
)
_LONGEST = 4000
_ANY_HOST = "HOST"
_MOST_EVIDENCE = 3
# The versions that come before all others.
_ORDER = ("os", "kernel", "driver", "docker", "gpus")
_NONE = "none"
_OF_GPU = re.compile(r"([0-9]{1,3}): ([\w.+, -]+)")
Spread = tuple[str, list[tuple[str, list[str]]]]
DRAIN_STATES = {
    "foreseen": ("would be drained", ""),
    "failed": ("drain failed", "red"),
    "drained": ("still drained", "bold yellow"),
    "undrained": ("undrained", "green"),
}
# The name of a host: what is before its number, the number, and what is after it.
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})(\D*)", re.DOTALL)
_SHORTEST_ROW = 3


@dataclass(frozen=True)
class Cause:
    """One fault and its hosts. If the texts differ only by the host, they say HOST."""

    what: str
    next_step: str
    hosts: tuple[str, ...]
    evidence: tuple[str, ...]


def causes(results: Iterable[HostResult]) -> tuple[Cause, ...]:
    """Return the problems and failed checks of all hosts by cause and next step, the most frequent first."""
    groups: dict[tuple[str, str], list[tuple[str, Problem]]] = {}
    found = [(host, _of_any_host(problem.what, host), problem) for host, problem in _problems(results)]
    # A command that names several hosts (--hosts a,b,) is the same for all of them as it is.
    same = collections.Counter((what, problem.next_step) for _, what, problem in found)
    for host, what, problem in found:
        step = problem.next_step
        key = (what, step if same[what, step] > 1 else _of_any_host(step, host))
        groups.setdefault(key, []).append((host, problem))
    made = (_cause(key, members) for key, members in groups.items())
    return tuple(sorted(made, key=lambda cause: -len(cause.hosts)))


def _problems(results: Iterable[HostResult]) -> Iterator[tuple[str, Problem]]:
    for result in results:
        reported = {problem.what for problem in result.problems}
        for check in result.checks:
            # The doctor's findings are among its causes; a problem has the evidence of its check.
            if check.status == "failed" and check.reason not in reported and (check.reason or not result.problems):
                yield result.host, Problem(check_text(check))
        for problem in result.problems:
            yield result.host, problem


def _cause(key: tuple[str, str], members: Sequence[tuple[str, Problem]]) -> Cause:
    evidence: dict[str, str] = {}
    for host, problem in members:
        if problem.evidence:
            evidence.setdefault(_of_any_host(problem.evidence, host), problem.evidence)
    return Cause(
        what=_the_one({problem.what for _, problem in members}, key[0]),
        next_step=_the_one({problem.next_step for _, problem in members}, key[1]),
        hosts=tuple(dict.fromkeys(host for host, _ in members)),
        evidence=tuple(evidence.values())[:_MOST_EVIDENCE],
    )


def _the_one(texts: set[str], otherwise: str) -> str:
    return next(iter(texts)) if len(texts) == 1 else otherwise


def _of_any_host(text: str, host: str) -> str:
    """Return the text without the parts that identify one host."""
    return _PLACE.sub(_ANY_HOST, re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", _ANY_HOST, text[:_LONGEST]))


def spreads(results: Sequence[HostResult]) -> list[Spread]:
    """Return (name, versions) of all that hosts reported, each version with its hosts, that of most hosts first."""
    reporting = [result for result in machines(results) if result.versions]
    found = []
    for name in dict.fromkeys((*_ORDER, *(name for result in reporting for name in result.versions))):
        hosts: dict[str, list[str]] = collections.defaultdict(list)
        for result in reporting:
            hosts[str(result.versions.get(name) or _NONE)].append(result.host)
        if any(result.versions.get(name) for result in reporting):
            found.append((name, sorted(hosts.items(), key=lambda item: -len(item[1]))))
    return found


def mig_instances(text: str) -> dict[int, tuple[str, ...]]:
    """Return each GPU's MIG instances from the text that facts.mig.mig_layout makes; {} from any other."""
    return {int(index): tuple(names.split(", ")) for index, names in _OF_GPU.findall(text)}


def command_of(drain: Drain) -> str:
    """Return the command to type, or the one that a run would begin with; "" if nothing is left to do."""
    return drain.before if drain.state == "foreseen" else drain.after if drain.lasts else ""


def drained(results: Sequence[HostResult]) -> tuple[tuple[str, Drain], ...]:
    """Return the hosts that were or would be drained, those still drained first."""
    found = [(result.host, result.drain) for result in results if result.drain is not None]
    return tuple(sorted(found, key=lambda one: not one[1].lasts))


def still_drained(results: Sequence[HostResult]) -> str:
    """Return `; still drained: a, b` for the last line of a report, or nothing."""
    found = drained(results)
    hosts = {state: [plain(host) for host, drain in found if drain.state == state] for state in ("drained", "failed")}
    return "".join(f"; {DRAIN_STATES[state][0]}: {listed(names)}" for state, names in hosts.items() if names)


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return names with commas, and how many there are beyond `most`.

    Three or more numbered names without a gap are one of Ansible's ranges: `gpu[01:37].example.org`.
    """
    rows: list[tuple[str, int]] = []  # a text, and the number of names that it stands for
    for _, members in itertools.groupby(enumerate(map(_parts, names)), _row_of):
        row = [parts for _, parts in members]
        (before, first, after), (_, last, _) = row[0], row[-1]
        few = len(row) < _SHORTEST_ROW
        rows += [("".join(one), 1) for one in row] if few else [(f"{before}[{first}:{last}]{after}", len(row))]
    rest = sum(number for _, number in rows[most:])
    return ", ".join(text for text, _ in rows[:most]) + (f" and {rest} more" if rest else "")


def _row_of(placed: tuple[int, tuple[str, str, str]]) -> tuple[str, str, int, int]:
    """Return what the parts of a name share with the next ones of a row: the number grows as the place does."""
    place, (before, number, after) = placed
    return before, after, len(number), int(number or 0) - place


def _parts(name: str) -> tuple[str, str, str]:
    """Split a name at the last number of its first label; in gpu07.dc1, dc1 is not part of the host's number."""
    label, dot, domain = name.partition(".")
    found = _NUMBERED.fullmatch(label)
    return (found.group(1), found.group(2), found.group(3) + dot + domain) if found else (name, "", "")


def shortened(text: str, *, lines: int = 20, columns: int = 400) -> str:
    """Return a host's text, cut if it is too long to read."""
    whole = text.rstrip("\n").splitlines()
    shown = [line if len(line) <= columns else line[:columns] + " …" for line in whole[:lines]]
    more = [f"… {counted(len(whole) - lines, 'line')} more"] if len(whole) > lines else []
    return "\n".join(shown + more)

"""Convert a playbook task to a request, and the agent's answer to a task result; never imports Ansible.

The action plugin (playbooks/plugins/action/agent.py) sends the request to a host and reads the answer. This module is
part of the agent's file, so the plugin finds it with the agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from gpuprov.agent.result import Recorder
from gpuprov.agent.site_tables import for_request
from gpuprov.agent.window import parse_window
from gpuprov.protocol import words
from gpuprov.protocol.codec import Limit, Line, LongText, Name, Text, load, parse
from gpuprov.protocol.dataclass import asdict, astuple, dataclass, field, replace
from gpuprov.protocol.errors import ExitCode, GpuprovError, Problem, UsageError
from gpuprov.protocol.events import MOST, CheckDone, Event, EventReader, Finished, MaybeChosen, Upgrade, no_agent_sends
from gpuprov.protocol.request import COMMANDS, Request
from gpuprov.protocol.spec import spec_from_variables, spec_to_json
from gpuprov.protocol.words import counted

PLAN, CUDA = "plan", "cuda"
TASK_COMMANDS = (PLAN, *COMMANDS)
# They make a plan, for which a bundle may replace the network.
INSTALLING = (PLAN, "install")
BOOTSTRAP_VARIABLE = "gpuprov_play_bootstrap_python"
BUNDLE_VARIABLE = "gpuprov_play_bundle"
BUNDLE_KEY_VARIABLE = "gpuprov_play_bundle_key"
UPGRADE_VARIABLE = "gpuprov_play_upgrade"
BOOTSTRAP_OPTION = f"-e {BOOTSTRAP_VARIABLE}=true"
_OWNERS = {
    "bundle": INSTALLING, "bundle_digest": INSTALLING, "upgrade": INSTALLING, "fix": ("doctor",), "allow": ("doctor",),
    "remember": ("verify",),
}  # fmt: skip
# These respect `check` or change nothing. Check mode cannot predict what any other command would do.
_IN_CHECK_MODE = (PLAN, "install", "health", "facts", "doctor", "cuda", "rollback", "uninstall")


def task_request(
    command: str, variables: Mapping[str, Any], *, container: str = "", this_run: bool = False, window: str = "",
    minutes: int = 10, now: float = 0.0, **asked: Any,
) -> Request:  # fmt: skip
    """Return the request of a task. `plan` is an installation in check mode that is never reported as changed.

    `asked`: fields of the request as the task has them; some belong to one command alone. `bundle` is the path of a
    bundle on this machine, not yet on the host. `container`: a container or image that `cuda` examines instead of the
    host; `this_run`: `rollback` undoes nothing else; `minutes`: of `accept`.

    Raises GpuprovError (exit code 2) that names each wrong variable, or the command; or if `window` is not open at the
    time `now`.
    """
    if command not in TASK_COMMANDS:
        raise UsageError(f"there is no command {command!r}", "", f"commands: {', '.join(TASK_COMMANDS)}")
    spec, opening = spec_from_variables(variables), parse_window(window, "window")
    check = asked.pop("check", False)
    closed = opening.closed(now, "run the same playbook again") if opening and not check else None
    if closed is not None:
        raise GpuprovError.several((closed,))
    arguments: dict[str, dict[str, Any]] = {
        CUDA: {"subject": container}, "rollback": {"this_run": this_run}, "accept": {"minutes": minutes},
    }  # fmt: skip
    others = {name for name, owners in _OWNERS.items() if command not in owners}
    given = ((name, value) for name, value in asked.items() if name not in others)
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
    # The plugin waits for a host that reboots, and retries.
    return Request(
        "install" if command == PLAN else command, spec_to_json(spec), check=check or command == PLAN,
        caller_returns=True, tables=for_request(spec), arguments=arguments.get(command, {}), **fields,
    )  # fmt: skip


def for_a_job(request: Request) -> Request:
    """Return the request for a host that nobody waits for (`async`). Raises GpuprovError if the host may reboot."""
    if request.changes_the_host and (request.spec.get("reboot") == "if-needed" or "reboot" in request.allow):
        what = "a task with async can't wait for a reboot, which gpuprov_reboot: if-needed and allow: [reboot] permit"
        raise UsageError(what, "", "take async from the task (it waits by itself), or do not permit the reboot")
    return replace(request, caller_returns=False)


def skipped_in_check_mode(command: str) -> dict[str, Any] | None:
    """Return the result of a task that check mode skips, or None if the task runs on the host."""
    if command in _IN_CHECK_MODE:
        return None
    return {"skipped": True, "msg": f"check mode: {command} is left out, it starts containers"}


def split_output(text: str) -> tuple[tuple[Event, ...], Finished | None, list[str]]:
    """Return the events of the agent's output, the last of them, and the last other lines. Raises GpuprovError."""
    read = EventReader()
    events = tuple(event for line in text.splitlines() if (event := read(line)) is not None)
    return events, read.finished, list(read.strays)


def one_line(result: Mapping[str, Any]) -> str:
    """Return the one-line summary shown without -v: what changed, by step, and how many checks passed.

    Empty for a task that did not change, check or fail anything. For a failure, the first line has the next step.
    """
    if result.get("failed"):
        return words.one_line(str(result.get("msg", "")).partition("\n")[0])
    upgrades = [load(Upgrade, one).sentence for one in result.get("upgrades", ())]
    by_step: dict[str, list[str]] = {}
    for change in result.get("changes", ()):
        by_step.setdefault(change["step"], []).append(change["summary"])
    checks = result.get("checks", ())
    good = sum(check["status"] == "ok" for check in checks)
    parts = [f"{step}: {', '.join(summaries)}" for step, summaries in by_step.items()]
    verified = [f"{good} of {counted(len(checks), 'check')} ok"] if checks else []
    details = "; ".join((*upgrades, *parts, *verified))
    shown = f" ({details})" if details else ""
    return words.one_line(f"{result.get('msg', '')}{shown}") if details or result.get("changed") else ""


@dataclass(frozen=True)
class TaskChange:
    """One of `changes` in a result."""

    step: Name
    summary: Line


@dataclass(frozen=True)
class Prepared:
    """One of `diff` in a result, in Ansible's form."""

    prepared: LongText


@dataclass(frozen=True)
class TaskResult:
    """Everything that a task may answer. Ansible obeys more keys than these: no other key of a host's is passed on."""

    failed: bool = False
    changed: bool = False
    msg: Text = ""
    changes: tuple[TaskChange, ...] = ()
    checks: Annotated[tuple[CheckDone, ...], Limit(MOST[CheckDone])] = ()
    problems: tuple[Problem, ...] = ()
    diff: tuple[Prepared, ...] = ()
    disturbs: bool | None = None
    upgrades: Annotated[tuple[Upgrade, ...], Limit(10)] = ()
    choice: MaybeChosen = None
    cuda: Mapping[Name, Any] | None = None
    versions: Mapping[Name, Name] = field(default_factory=dict)
    reboot_needed: bool = False
    warnings: tuple[Line, ...] = ()
    facts: Mapping[Name, Any] | None = None

    def answer(self, local_facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result in Ansible's keys. `local_facts`: the host's `ansible_local` as it is."""
        optional = ("disturbs", "upgrades", "choice", "cuda", "warnings")
        absent = {name for name in optional if getattr(self, name) in (None, ())}
        shown = {key: _as_json(value) for key, value in asdict(self).items() if key not in {*absent, "facts"}}
        # Ansible prints these as they are: no line of them may look like another host's.
        shown["msg"] = "\n".join((*self.msg.splitlines()[:1], *_indented(self.msg.splitlines()[1:], " ")))
        shown["diff"] = [
            {"prepared": "".join(f"{line}\n" for line in _indented(one.prepared.splitlines(), "+-@ "))}
            for one in self.diff
        ]
        if self.facts is not None:
            shown["ansible_facts"] = {"ansible_local": {**local_facts, "gpuprov": _as_json(self.facts)}}
        return shown


def _indented(lines: Iterable[str], beginnings: str) -> list[str]:
    """Return the lines, indented unless they begin with one of these characters."""
    return [line if line[:1] in beginnings else f"  {line}" for line in lines]


def _as_json(value: Any) -> Any:
    """Return JSON without the keys by which Ansible marks what it trusts, hides or encrypts."""
    if isinstance(value, Mapping):
        return {key: _as_json(one) for key, one in value.items() if not key.startswith(("_ansible_", "__ansible_"))}
    return [_as_json(one) for one in value] if isinstance(value, (list, tuple)) else value


def task_result(command: str, events: Iterable[Event]) -> TaskResult:
    """Return the result of a task from the agent's events. A failed run reports the changes made before, too."""
    recorder = Recorder()
    for event in events:
        recorder(event)
    result = recorder.result(again="run the same task again")
    failed = result.exit_code not in (ExitCode.DONE, ExitCode.DEGRADED)
    made = any(change.seconds is not None for change in result.made)
    checks = (check for check in result.checks if check.status == "failed")
    sides = ((check, check.in_container, check.on_host) for check in checks)
    problems = result.problems or tuple(
        Problem(f"{check.name}: {check.reason}", f"host: {here}, container: {there}" if there else here)
        for check, there, here in sides
    )
    is_wrong = result.exit_code != ExitCode.DONE and problems
    return TaskResult(
        failed=failed,
        changed=(made or (not failed and result.changed > 0)) and command != PLAN,
        msg=problem_text(problems) if is_wrong else words.one_line(result.summary),
        changes=tuple(TaskChange(change.step, change.summary) for change in result.plan),
        checks=result.checks,
        problems=problems,
        diff=tuple(Prepared(f"{change.diff}\n") for change in result.plan if change.diff),
        disturbs=recorder.planned.disturbs if recorder.planned else None,
        upgrades=recorder.planned.upgrades if recorder.planned else (),
        choice=result.choice,
        cuda=recorder.survey,
        versions=result.versions if recorder.facts is None else {},
        reboot_needed=result.exit_code == ExitCode.REBOOT_NEEDED,
        warnings=tuple(map(words.one_line, recorder.warnings)),
        facts=recorder.facts,
    )


def job_result(text: str) -> TaskResult | None:
    """Return the result in a job's file, None while the job runs. Raises GpuprovError for any other file."""
    try:
        # A login shell may print before it.
        data = parse(text.strip().rpartition("\n")[2])
        if data.get("started"):
            return None
        local = (data.get("ansible_facts") or {}).get("ansible_local") or {}
        return load(TaskResult, {**data, "facts": local.get("gpuprov")})
    except (ValueError, AttributeError, TypeError) as error:
        raise no_agent_sends(str(error)) from None


def problem_text(problems: Iterable[Problem]) -> str:
    """Return `what; next: step` of each, then its evidence, as `msg` shows it: callbacks cut long messages.

    No line of a host's begins as one of Ansible's does.
    """
    lines: list[str] = []
    for problem in problems:
        steps = words.plain(problem.next_step).strip().splitlines()
        what = words.one_line(problem.what)
        seen = (f"seen: {line}" for line in words.plain(problem.evidence).strip().splitlines())
        lines += [f"{what}; next: {steps[0]}" if steps else what, *(f"  {line}" for line in (*steps[1:], *seen))]
    return "\n".join(lines)


def failure(error: GpuprovError) -> TaskResult:
    """Return the result of a task that failed before the agent could report."""
    problems = tuple(Problem(*map(words.plain, astuple(problem))) for problem in error.problems)
    return TaskResult(failed=True, msg=problem_text(problems), problems=problems)

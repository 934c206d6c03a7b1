"""Convert a playbook task to a request, and the agent's answer to a task result; never imports Ansible.

The action plugin (playbooks/plugins/action/agent.py) sends the request to a host and reads the answer. This module is
part of the agent's file, so the plugin finds it with the agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from gpuprov.core.site_tables import for_request
from gpuprov.wire.errors import ExitCode, GpuprovError, Problem
from gpuprov.wire.events import (
    ChangeDone,
    CheckDone,
    CudaSurveyed,
    Event,
    FactsGathered,
    Finished,
    Note,
    Planned,
    from_line,
)
from gpuprov.wire.request import COMMANDS, Request
from gpuprov.wire.spec import spec_from_variables, spec_to_json
from gpuprov.wire.words import counted

PLAN, CUDA = "plan", "cuda"
TASK_COMMANDS = (PLAN, *COMMANDS)
BOOTSTRAP_VARIABLE = "gpuprov_play_bootstrap_python"
BUNDLE_VARIABLE = "gpuprov_play_bundle"
BUNDLE_KEY_VARIABLE = "gpuprov_play_bundle_key"
BOOTSTRAP_OPTION = f"-e {BOOTSTRAP_VARIABLE}=true"
# These respect `check` or change nothing. Check mode cannot predict what any other command would do.
_IN_CHECK_MODE = (PLAN, "install", "facts", "doctor", "cuda", "rollback", "uninstall")


def task_request(
    command: str,
    variables: Mapping[str, Any],
    *,
    steps: Iterable[str] = (),
    check: bool = False,
    diff: bool = False,
    run_id: str = "",
    bundle: str = "",
    bundle_digest: str = "",
    container: str = "",
    fix: bool = False,
) -> Request:
    """Return the request of a task. `plan` is an installation in check mode that is never reported as changed.

    `bundle` is the path of a bundle on this machine, not yet on the host; only commands that install receive it.
    `container`: a container or image that `cuda` examines instead of the host. `fix` belongs to the doctor.
    Raises GpuprovError (exit code 2) that names each wrong variable, or the command.
    """
    if command not in TASK_COMMANDS:
        raise GpuprovError(
            f"there is no command {command!r}", "", f"commands: {', '.join(TASK_COMMANDS)}", exit_code=ExitCode.USAGE
        )
    spec = spec_from_variables(variables)
    return Request(
        command="install" if command == PLAN else command,
        spec=spec_to_json(spec),
        tables=for_request(spec),
        check=check or command == PLAN,
        diff=diff,
        steps=tuple(steps),
        run_id=run_id,
        bundle=bundle if installs(command) else "",
        bundle_digest=bundle_digest if installs(command) else "",
        fix=fix and command == "doctor",
        # The plugin waits for a host that reboots, and retries.
        caller_returns=True,
        arguments={"subject": container} if command == CUDA else {},
    )


def for_a_job(request: Request) -> Request:
    """Return the request for a host that nobody waits for (`async`). Raises GpuprovError if the host may reboot."""
    if request.spec.get("reboot") == "if-needed":
        raise GpuprovError(
            "a task with async can't wait for a reboot, which gpuprov_reboot: if-needed allows",
            "",
            "take async from the task (it waits by itself), or set gpuprov_reboot: never",
            exit_code=ExitCode.USAGE,
        )
    return replace(request, caller_returns=False)


def installs(command: str) -> bool:
    """Say whether the command makes a plan, for which a bundle may replace the network."""
    return command in (PLAN, "install")


def skipped_in_check_mode(command: str) -> dict[str, Any] | None:
    """Return the result of a task that check mode skips, or None if the task runs on the host."""
    if command in _IN_CHECK_MODE:
        return None
    return {"skipped": True, "msg": f"check mode: {command} is left out, it starts containers"}


def split_output(text: str) -> tuple[tuple[Event, ...], list[str]]:
    """Return the events in the agent's output, and the lines that are not events."""
    lines = [(from_line(line), line) for line in text.splitlines()]
    return tuple(event for event, _ in lines if event is not None), [line for event, line in lines if event is None]


def left_boot(events: Iterable[Event]) -> str:
    """Return the id of the boot that a reboot by gpuprov ends, "" if the host stays up."""
    return next((event.left_boot for event in events if isinstance(event, Finished)), "")


def before_reboot(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return the events before a reboot, in a form to which the events after it can be appended."""
    return tuple(event for event in events if not isinstance(event, Finished))


def one_line(result: Mapping[str, Any]) -> str:
    """Return the one-line summary shown without -v: what changed, by step, and how many checks passed.

    Empty for a task that did not change, check or fail anything. For a failure, the first line has the next step.
    """
    if result.get("failed"):
        return str(result.get("msg", "")).partition("\n")[0]
    by_step: dict[str, list[str]] = {}
    for change in result.get("changes", ()):
        by_step.setdefault(change["step"], []).append(change["summary"])
    checks = result.get("checks", ())
    good = sum(check["status"] == "ok" for check in checks)
    parts = [f"{step}: {', '.join(summaries)}" for step, summaries in by_step.items()]
    verified = [f"{good} of {counted(len(checks), 'check')} ok"] if checks else []
    told = "; ".join((*parts, *verified))
    return f"{result.get('msg', '')} ({told})" if told else ""


def task_result(command: str, events: Iterable[Event], local_facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the result of a task in Ansible's keys, and `changes`, `checks`, `problems`, `versions` as data.

    `local_facts` is the host's `ansible_local`, to which its facts are added.
    """
    result: dict[str, Any] = {"changed": False, "changes": [], "checks": [], "problems": [], "diff": []}
    warnings: list[str] = []
    done = 0
    for event in events:
        if isinstance(event, Planned):
            result["changes"] = [{"step": change.step, "summary": change.summary} for change in event.changes]
            result["disturbs"] = event.disturbs
            result["diff"] = [{"prepared": f"{change.diff}\n"} for change in event.changes if change.diff]
        elif isinstance(event, ChangeDone):
            done += 1
        elif isinstance(event, CheckDone):
            result["checks"].append(asdict(event))
        elif isinstance(event, CudaSurveyed):
            result["cuda"] = dict(event.survey)
        elif isinstance(event, FactsGathered):
            result["ansible_facts"] = {"ansible_local": {**(local_facts or {}), "gpuprov": dict(event.facts)}}
        elif isinstance(event, Note) and event.level == "warning":
            warnings.append(event.message)
        elif isinstance(event, Finished):
            result.update(_end(command, event, done, result["checks"]))
    return {**result, "warnings": warnings} if warnings else result


def _end(command: str, finished: Finished, done: int, checks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the last event. A failed run also reports the changes that it made before."""
    failed = finished.exit_code != ExitCode.DONE
    changed = done if failed else max(done, finished.changed)
    problems = finished.problems or tuple(map(_check_problem, _failed(checks)))
    return {
        "failed": failed,
        "changed": changed > 0 and command != PLAN,
        "msg": problem_text(problems) if failed and problems else finished.summary,
        "problems": [asdict(problem) for problem in problems],
        "versions": dict(finished.versions),
        "reboot_needed": finished.exit_code == ExitCode.REBOOT_NEEDED,
    }


def _failed(checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [check for check in checks if check["status"] == "failed"]


def _check_problem(check: Mapping[str, Any]) -> Problem:
    there, here = check["in_container"], check["on_host"]
    seen = f"host: {here}, container: {there}" if there else str(here)
    return Problem(f"{check['name']}: {check['reason']}", seen)


def problem_text(problems: Iterable[Problem]) -> str:
    """Return the failure with the next step, then the evidence, as `msg` shows it: callbacks cut long messages."""
    return "\n".join(map(_problem_text, problems))


def _problem_text(problem: Problem) -> str:
    """Return `what; next: step`, then the evidence in separate lines."""
    steps = problem.next_step.strip().splitlines()
    first = f"{problem.what}; next: {steps[0]}" if steps else problem.what
    more = [*steps[1:], *(f"seen: {line}" for line in problem.evidence.strip().splitlines())]
    return "\n".join((first, *(f"  {line}" for line in more)))


def failure(error: GpuprovError) -> dict[str, Any]:
    """Return the result of a task that failed before the agent could report."""
    return {
        "failed": True,
        "msg": problem_text(error.problems),
        "problems": [asdict(problem) for problem in error.problems],
    }

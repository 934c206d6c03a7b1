"""`gpuprov health`, and its answers for Slurm's HealthCheckProgram and Kubernetes' node-problem-detector."""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
from typing import Any

import click

from gpuprov.cli import run
from gpuprov.fleet.options import options_of
from gpuprov.fleet.standard_streams import say
from gpuprov.protocol.errors import ExitCode, GpuprovError
from gpuprov.protocol.events import HealthFound, Kept

# node-problem-detector gives a plugin 5 s and shows 80 characters; slurmd ends a HealthCheckProgram after 60 s.
NPD_SECONDS, NPD_LENGTH, _UNKNOWN = 4.0, 80, 2
SLURM_SECONDS, _SMI_SECONDS, _SCONTROL_SECONDS = 30.0, 20.0, 10
_HANGS = "nvidia-smi-hangs"
# A drain with this reason is ours to end.
_OURS, _REASON_LENGTH = "gpuprov health: ", 120
# Slurm's own reason for a node that is down, which it takes back itself; another one is somebody's to end.
_SILENT = "Not responding"


@click.command(short_help="Say whether each GPU is fit for work; changes nothing.")
@click.option("--for", "caller", type=click.Choice(["slurm", "npd"]), help="On this machine, answer Slurm as its "
              "HealthCheckProgram, or node-problem-detector as its plugin.")  # fmt: skip
@options_of("health")
def health(caller: str | None, **options: Any) -> None:
    """Say whether each GPU, and the host, is fit for work: the driver's verdict, errors, links, heat. Changes nothing.

    It starts no container. Exit code 0: ok; 6: degraded (works; plan a repair); 7: unfit (no new work). With --for
    slurm it drains this node if it is unfit, and resumes it if it drained it.

    \b
    Examples:
      gpuprov health
      gpuprov health --hosts inventory.ini
      gpuprov health --hosts inventory.ini --json
      gpuprov health --metrics /var/lib/prometheus/node-exporter/gpuprov-health.prom
      gpuprov health --for slurm
    """
    if not caller:
        run("health", options)
    if any(options[name] for name in ("hosts", "json", "report", "metrics")):
        raise click.UsageError("--for judges this machine for one caller: leave out the other options")
    raise SystemExit(_for_slurm() if caller == "slurm" else _for_npd())


@click.command(short_help="Prove that a new or repaired host may take work; loads its GPUs.")
@options_of("accept")
def accept(**options: Any) -> None:
    """Prove that a new or repaired host may take work: verify, health, then a program that loads each GPU.

    The program runs in a container, so nothing is installed. Nothing is started while a program computes on a GPU. The
    figures of each GPU are compared with those of its model in the fleet and with its own last ones. Exit code 0: ok;
    6: degraded (works; plan a repair); 7: unfit (no new work).

    \b
    Examples:
      sudo gpuprov accept
      gpuprov accept --hosts inventory.ini --minutes 30
      gpuprov accept --hosts inventory.ini --sign ops@example.org --report accepted.html
    """
    run("accept", options)


def _judged(seconds: float, patience: float) -> tuple[ExitCode | None, str, set[str]]:
    """Return the exit code, the worst finding, and the rules by which this machine is unfit.

    The code is None if the machine can't be judged. `patience`: with nvidia-smi. A machine that does not answer hangs.
    """
    from gpuprov.checks.health import examine
    from gpuprov.core.system import System

    answers: list[tuple[ExitCode | None, str, set[str]]] = []

    def judge() -> None:
        found = Kept(HealthFound)
        try:
            finished = examine(System(), found, patience)
            text = finished.problems[0].what if finished.problems else finished.summary
            unfit = {one.rule for one in found.events if one.verdict == "unfit"}
            answers.append((ExitCode(finished.exit_code), text, unfit))
        except Exception as error:  # without an answer the machine would count as one that hangs
            answers.append((None, str(error) or repr(error), set()))

    # A command that the kernel does not let go (a GPU that hangs) keeps its thread.
    thread = threading.Thread(target=judge, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else (ExitCode.UNFIT, f"unfit: no answer within {seconds:g} s", {_HANGS})


def _for_npd() -> int:
    """Print one short line; return 0 for a host that works, 1 for a problem, 2 if it is not known.

    So little time tells a slow GPU not from one that hangs.
    """
    code, text, unfit = _judged(NPD_SECONDS, NPD_SECONDS - 1)
    code = None if unfit == {_HANGS} else code
    say(" ".join((text if code is not None else f"unknown: {text.removeprefix('unfit: ')}").split())[:NPD_LENGTH])
    return _UNKNOWN if code is None else int(code == ExitCode.UNFIT)


def _for_slurm() -> int:
    """Drain this node, or resume it after a drain of ours; return 0 if it has the state that it should have."""
    code, text, _ = _judged(SLURM_SECONDS, _SMI_SECONDS)
    if code is None:
        say(f"not judged, and left as it is: {text}", err=True)
        return int(ExitCode.FAILED)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    shown = _scontrol("show", "node", node, "--oneliner").strip()
    # A name may be a word or a pattern of Slurm's for more nodes than this one: ALL, gpu[1-100].
    if shown.partition(" ")[0] != f"NodeName={node}" or "\n" in shown:
        raise GpuprovError(f"Slurm has no node of the name {node!r:.80}", shown[:200], "set SLURMD_NODENAME")
    found = re.search(r"\bState=(\S+)", shown)
    why = re.search(r"\bReason=(.*?)(?: \[\S+@\S+\]|$)", shown, re.MULTILINE)
    state, reason = found[1] if found else "", why[1] if why else ""
    if code == ExitCode.UNFIT and "DRAIN" not in state:
        if "DOWN" in state and reason and not reason.startswith(_SILENT):
            say(f"{node} is {state} ({reason}), and left as it is: {text}")
            return int(ExitCode.DONE)
        sentence = " ".join(text.removeprefix("unfit: ").split())[:_REASON_LENGTH]
        _scontrol("update", f"NodeName={node}", "State=DRAIN", f"Reason={_OURS}{sentence}")
        say(f"drained {node}: {sentence}")
    elif code != ExitCode.UNFIT and "DRAIN" in state and "REBOOT" not in state and reason.startswith(_OURS):
        _scontrol("update", f"NodeName={node}", "State=RESUME")
        say(f"resumed {node}: {text}")
    return int(ExitCode.DONE)


def _scontrol(*words: str) -> str:
    """Return the output of Slurm's scontrol. Raises GpuprovError if it fails."""
    from gpuprov.core.commands import SYSTEM_PATH
    from gpuprov.core.system import System

    program = shutil.which("scontrol") or shutil.which("scontrol", path=SYSTEM_PATH) or "scontrol"
    settings = {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
    done = System().run((program, *words), timeout=_SCONTROL_SECONDS, env=settings)
    return done.require(f"scontrol {words[0]} fails", "scontrol ping; scontrol show nodes").stdout

"""`gpuprov cuda`: which libcuda a program gets on this host, in an image or in a container; changes nothing."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict
from typing import Any

import click

from gpuprov.cli import run
from gpuprov.fleet.options import options_of, pairs
from gpuprov.fleet.standard_streams import show
from gpuprov.protocol.errors import ExitCode, UsageError

# Variables of the caller's environment that apply on the host; engines set those of containers.
_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_VERSION", "PATH")
_PAIR = re.compile(r"([^=]+)=(.*)", re.DOTALL)


@click.command(short_help="Say which libcuda programs load, and what CUDA's results mean.")
@click.option("--env", "-e", "variables", metavar="NAME=VALUE", multiple=True,
              help="Set a variable of the call, as docker run does.")  # fmt: skip
@click.option("--explain", "result", metavar="RESULT", help="Explain a result of CUDA, by number or name.")
@click.argument("subject", metavar="[IMAGE|CONTAINER]", default="")
@options_of("cuda")
def cuda(variables: tuple[str, ...], result: str | None, subject: str, **options: Any) -> None:
    """Say which libcuda.so.1 and libnvidia-ml.so.1 the loader takes, why, and whether they fit driver and CUDA.

    Default: this host. IMAGE and CONTAINER are docker's or podman's; nothing of them is run. Exit code 1: something is
    wrong.

    \b
    Examples:
      gpuprov cuda
      sudo gpuprov cuda my-container
      sudo gpuprov cuda nvcr.io/nvidia/pytorch:24.05-py3 -e LD_LIBRARY_PATH=/opt/own
      gpuprov cuda --hosts inventory.ini --json
      gpuprov cuda my-container --hosts inventory.ini --limit gpu07
      gpuprov cuda --explain 803
    """
    as_json = bool(options["json"])
    if result is not None:
        _explain(result, as_json=as_json)
        return
    given = pairs("--env", variables, _PAIR, "NAME=VALUE, such as LD_LIBRARY_PATH=/opt/lib")
    if options["hosts"] or options["limit"]:
        run("cuda", options, arguments={"subject": subject, "variables": given})
    from gpuprov.checks.cuda import survey
    from gpuprov.checks.cuda.search import Program
    from gpuprov.core.system import System

    own = {} if subject else {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    call = Program({**own, **given}, os.getcwd())  # noqa: PTH109
    found = survey.survey(System("/"), subject, call)
    show(survey.as_json(found), survey.as_lines(found), as_json=as_json)
    if found.faults:
        sys.exit(int(ExitCode.FAILED))


def _explain(text: str, *, as_json: bool) -> None:
    from gpuprov.checks.cuda.compatibility import RESULTS, result_of

    found = result_of(text)
    if found is None:
        known = ", ".join(str(code) for one in RESULTS for code in one.codes)
        hint = "NVIDIA's CUDA Runtime API, `Data types used by CUDA Runtime`, has all results"
        raise UsageError(f"{text}: not in gpuprov's table of CUDA results", f"known: {known}", hint)
    head = f"{', '.join(map(str, found.codes))}  {', '.join(found.names)}: {found.meaning}"
    rows = (f"  {label:9} {getattr(found, label)}" for label in ("cause", "evidence", "remedy"))
    show(asdict(found), (head, *rows), as_json=as_json)

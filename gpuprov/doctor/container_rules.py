"""Rules about running containers: they load another libcuda or libnvidia-ml than the driver's. Pure."""

from __future__ import annotations

import shlex

from gpuprov.doctor.containers import Loaded
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ASIDE, CONTAINERS, Finding, Rule
from gpuprov.protocol.words import counted

_MOST_SHOWN = 5


def _other_library(x: Examined) -> Finding | None:
    ill = [one for one in x.containers.examined if one.findings]
    if not ill:
        return None
    first = ill[0].findings[0]
    results = f" (CUDA result {', '.join(map(str, first.results))})" if first.results else ""
    more = f"; the same of {counted(len(ill) - 1, 'more container')}" if len(ill) > 1 else ""
    seen = [_seen(one) for one in ill[:_MOST_SHOWN]]
    if len(ill) > _MOST_SHOWN:
        seen.append(f"and {counted(len(ill) - _MOST_SHOWN, 'more container')}")
    return Finding(
        f"the container {ill[0].name} loads a library that does not fit the driver: {first.what}{results}{more}",
        "\n".join(seen),
        f"{_command(ill[0])}  # {first.next_step}",
    )


def _seen(one: Loaded) -> str:
    finding = one.findings[0]
    return f"{one.name} ({one.engine}): {finding.evidence}"


def _command(one: Loaded) -> str:
    return f"gpuprov cuda {shlex.quote(one.name)}"


def _left_out(x: Examined) -> Finding | None:
    found = x.containers
    if not found.why:
        return None
    return Finding(
        f"not all running containers with GPUs were examined: {found.why}",
        f"examined: {len(found.examined)}, left out: {found.left or 'not known'}",
        "gpuprov cuda CONTAINER  # for each of the others",
        ASIDE,
    )


RULES = (
    Rule("container-library", CONTAINERS, "a running container of docker or podman with GPUs loads a libcuda.so.1 or "
         "libnvidia-ml.so.1 of another version, CUDA's stub, or a file that is no library; read from outside",
         _other_library, ("version-mismatch", "driver-damaged", "driver-incomplete")),
    Rule("containers-left-out", CONTAINERS, "more running containers with GPUs than are examined, or no time left",
         _left_out),
)  # fmt: skip

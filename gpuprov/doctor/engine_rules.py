"""Rules about engines besides docker, and about the units that keep a host up to date. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuprov import toolkit
from gpuprov.doctor import words
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ASIDE, ENGINES, LIKELY, Finding, Rule
from gpuprov.doctor.remedy import restart, steps
from gpuprov.engines.known import ENGINES as KNOWN
from gpuprov.engines.known import OF_THE_HOST
from gpuprov.engines.other_engines import Registration, registrations, restart_command
from gpuprov.facts.boot_files import PERSISTENCE, REFRESH
from gpuprov.protocol.versions import version_numbers

_FIRST_PODMAN_WITH_CDI = (4, 1)
_PACKAGES = {"crio": "cri-o"}


def _not_installed(x: Examined) -> Finding | None:
    name = next((name for name, facts in x.host.engines.items() if not facts.program), "")
    if x.spec.docker == "none" and not x.host.engines and not x.host.kubernetes:
        seen = f"command -v {' '.join(KNOWN[name].program for name in OF_THE_HOST)}: nothing"
        return Finding("no container engine is installed", seen, words.install_packages(x, "podman"))
    if not name:
        return None
    return Finding(
        f"{name} is asked for (gpuprov_engines) and not installed", f"command -v {KNOWN[name].program}: nothing",
        words.install_packages(x, _PACKAGES.get(name, name)),
    )  # fmt: skip


def registered(x: Examined) -> Mapping[str, Registration]:
    """Return engine → changes that its files need for the runtime of the specification."""
    return registrations(x.host.engines, toolkit.runtime_path(x.spec), set_default=x.spec.default_runtime)


def _unreadable(x: Examined) -> Finding | None:
    found = registered(x)
    problem = next((one.problem for one in found.values() if one.problem is not None), None)
    if problem is None:
        return None
    file = re.match(r"/\S+", problem.what)
    correct = f"${{EDITOR:-vi}} {file[0]}; gpuprov install" if file else "gpuprov install --check"
    return Finding(problem.what, problem.evidence, f"{correct}  # {problem.next_step}")


def _unconfigured(x: Examined) -> Finding | None:
    found = registered(x)
    name = next((name for name, one in found.items() if one.edits), "")
    if not name:
        return None
    path = found[name].edits[0].path
    return Finding(f"{name} does not know the runtime nvidia", f"{path}: not as `gpuprov runtime configure` writes it",
                   words.gpuprov_install(x), remedies=(steps("engines"),))  # fmt: skip


def _down(x: Examined) -> Finding | None:
    for name, facts in x.host.engines.items():
        name_of_unit = facts.unit or KNOWN[name].unit
        unit = x.units.get(name_of_unit)
        if facts.program and unit is not None and unit.active in ("failed", "inactive"):
            return Finding(
                f"{name} does not run", f"systemctl show {name_of_unit}: {unit.active}, {unit.result}",
                f"{restart_command(name, facts)}; journalctl -u {name_of_unit} -n 30 --no-pager",
                remedies=() if KNOWN[name].cluster else (restart(name_of_unit),),
            )  # fmt: skip
    return None


def _old_podman(x: Examined) -> Finding | None:
    version = re.sub(r"^\d+:", "", x.host.packages.installed.get("podman", ""))
    if not version or version_numbers(version) >= _FIRST_PODMAN_WITH_CDI:
        return None
    return Finding(
        f"podman {version} knows no CDI, so it can't give containers GPUs", f"package podman: {version}",
        words.install_packages(x, "podman"), LIKELY if "podman" in x.host.engines else ASIDE,
    )  # fmt: skip


def _refresh_failed(x: Examined) -> Finding | None:
    unit = x.units.get(REFRESH)
    if unit is None or unit.active != "failed":
        return None
    return Finding(
        "the CDI specification is not kept up to date", f"systemctl show {REFRESH}: {unit.active}, {unit.result}",
        f"systemctl start {REFRESH}; journalctl -b -u {REFRESH} -n 20", ASIDE, (restart(REFRESH),),
    )  # fmt: skip


def _persistence_failed(x: Examined) -> Finding | None:
    unit = x.units.get(PERSISTENCE)
    if unit is None or unit.active != "failed":
        return None
    return Finding(
        "nvidia-persistenced has failed: GPUs are initialized again for each container, which takes seconds",
        f"systemctl show {PERSISTENCE}: {unit.active}, {unit.result}",
        f"systemctl reset-failed {PERSISTENCE}; systemctl restart {PERSISTENCE}; journalctl -b -u {PERSISTENCE} -n 20",
        ASIDE,
        (restart(PERSISTENCE),),
    )


RULES = (
    Rule("engine-missing", ENGINES, "an engine of gpuprov_engines is not installed, or none at all", _not_installed),
    Rule("engine-unreadable", ENGINES, "an engine's configuration can't be read", _unreadable),
    Rule("engine-unconfigured", ENGINES, "an engine's configuration lacks runtime nvidia", _unconfigured),
    Rule("engine-down", ENGINES, "an engine's unit has failed, or is not active", _down),
    Rule("podman-without-cdi", ENGINES, "podman before 4.1", _old_podman),
    Rule("refresh-unit-failed", ENGINES, "gpuprov-refresh.service has failed", _refresh_failed),
    Rule("persistenced-failed", ENGINES, "nvidia-persistenced.service has failed", _persistence_failed),
)  # fmt: skip

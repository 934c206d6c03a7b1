"""Rules about files that replace the driver's: another library, another nvidia-smi. Pure."""

from __future__ import annotations

import re
import shlex

from gpuprov.doctor import words
from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ASIDE, CERTAIN, DRIVER, LIKELY, Finding, Rule
from gpuprov.doctor.remedy import INSTALL, LOADER_CACHE, Remedy, remove
from gpuprov.facts.hiding import PRELOAD

_NO_SMI = "/nvidia-smi:"


def _hidden(x: Examined) -> Finding | None:
    if not x.host.hiding or x.host.kernel.wsl:
        return None
    one = x.host.hiding[0]
    commands = x.host.package_manager.commands
    seen = [
        f"{other.reason}: {', '.join(other.paths)}" + (f"; {other.foreign}" if other.foreign else "")
        for other in x.host.hiding
    ]
    sure = LIKELY if one.is_by_environment or not (one.version or one.fault) else CERTAIN
    steps = dict.fromkeys(other.way_out(commands) for other in x.host.hiding)
    return Finding(
        f"programs load another library than the driver's: {one.what}",
        "\n".join(seen),
        _together(list(steps)),
        sure,
        _removal(x),
    )


def _removal(x: Examined) -> tuple[Remedy, ...]:
    """Return the removal of the files, if nothing else is to be done."""
    ours = (one for one in x.host.hiding if not (one.package or one.is_configured or one.foreign))
    files = [one.removable for one in ours if one.removable]
    whole = len(files) == len(x.host.hiding)
    return (remove(*(path for paths in files for path in paths)), LOADER_CACHE) if whole else ()


def _together(steps: list[str]) -> str:
    """Return the commands as one line: one rm for several files, and one ldconfig at the end."""
    files = [step[len("rm ") : -len("; ldconfig")] for step in steps if step.startswith("rm ")]
    others = [step for step in steps if not step.startswith("rm ")]
    removal = [f"rm {' '.join(files)}; ldconfig"] if files else []
    # A comment ends the line.
    return "; ".join(sorted((*others, *removal), key=lambda step: "  # " in step))


def _preload(x: Examined) -> Finding | None:
    named = re.findall(r"object '([^']+)' from /etc/ld\.so\.preload", x.preload_said)
    if not named:
        return None
    return Finding(
        f"the loader can't load {named[0]}, which {PRELOAD} names: every program complains, and docker starts no "
        "container whose shim does",
        f"/bin/true: {x.preload_said.splitlines()[0]}",
        "; ".join(f"sed -i {shlex.quote(f's|{path}||')} {PRELOAD}" for path in dict.fromkeys(named)),
    )


def _damaged(x: Examined) -> Finding | None:
    damage = x.host.driver_damage
    if not damage or _NO_SMI in damage or x.host.kernel.wsl:
        return None
    version = x.driver.library_version
    packages = [name for name, one in x.host.packages.installed.items() if version in one and "dkms" not in name]
    again = words.reinstall_packages(x, *sorted(packages)) if packages else words.driver_again(x)
    ours = not (packages or x.host.driver_packaged)
    return Finding("a file of the driver is missing or broken", damage, again, remedies=(INSTALL,) if ours else ())


def _other_smi(x: Examined) -> Finding | None:
    other = x.other_smi
    if other is None:
        return None
    what = f"{other.path} hides the driver's own nvidia-smi, {x.smi_path}"
    step = f"mv {shlex.join((other.path, f'{other.path}.old'))}"
    if other.smi.is_report or not x.smi.is_report:
        return Finding(what, f"command -v nvidia-smi: {other.path}", step, ASIDE)
    seen = f"{other.path} -q -x exited {other.smi.returncode}: {other.smi.first_line}"
    return Finding(f"{what}, and does not do its work", seen, step, CERTAIN)


def _wrapped_smi(x: Examined) -> Finding | None:
    if x.smi.reason or x.smi.is_report or (x.smi.returncode and not x.smi_is_script):
        return None
    kind = "is a script, not the driver's program, and" if x.smi_is_script else "is not the driver's program: it"
    return Finding(
        f"{x.smi_path} {kind} prints something else than its report",
        f"{x.smi_path} -q -x exited {x.smi.returncode}: {x.smi.first_line}",
        words.smi_again(x),
    )


RULES = (
    Rule("library-hidden", DRIVER, "the loader takes libnvidia-ml.so.1 or libcuda.so.1 of another version: by a file "
         "in /usr/local/lib or any folder of /etc/ld.so.conf.d, by /etc/ld.so.preload, by /etc/environment", _hidden),
    Rule("preload-broken", DRIVER, "the loader says of /etc/ld.so.preload: cannot be preloaded", _preload),
    Rule("driver-damaged", DRIVER, "libnvidia-ml or libcuda of the driver's version is missing, or its file is not "
         "whole", _damaged, ("driver-incomplete", "library-hidden")),
    Rule("nvidia-smi-hidden", DRIVER, "PATH has another nvidia-smi before the driver's", _other_smi),
    Rule("nvidia-smi-replaced", DRIVER, "nvidia-smi -q -x prints something else than a report", _wrapped_smi),
)  # fmt: skip

"""The container toolkit, gpuprov's own or NVIDIA's, remains of nvidia-docker, and the watch. Pure."""

from __future__ import annotations

import re
import shlex
import time

from gpuprov import __version__, toolkit
from gpuprov.core.system import sha256_of
from gpuprov.doctor import suggested_commands as commands
from gpuprov.doctor.docker_rules import in_daemon, in_file
from gpuprov.doctor.finding import CERTAIN, LIKELY, STEPS, WARNING, Remedy
from gpuprov.doctor.rules import Seen, conditions, quoted, seen_of
from gpuprov.doctor.snapshot import OPERATORS_RUNTIME, HostSnapshot, lines_that_match
from gpuprov.engines.known import NVIDIA_RUNTIME
from gpuprov.facts.interpreter import MISSING
from gpuprov.facts.leftovers import FOLDER, PLUGIN, UNIT
from gpuprov.facts.watch import TIMER
from gpuprov.packages import retired
from gpuprov.plan import preflight
from gpuprov.plan.steps import make_plan
from gpuprov.protocol import advisories
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.words import counted
from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, LIBRARY_PATH, NVIDIA_HOOK_PATH, STAND_IN
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH, SETTINGS_PATH

_OURS = (Remedy(STEPS, ("toolkit",)),)
_TOOLKITS = {LAUNCHER_PATH, NVIDIA_RUNTIME, "/usr/bin/nvidia-ctk", OPERATORS_RUNTIME}


def _uses_nvidias(x: HostSnapshot) -> bool:
    """Say whether docker's runtime nvidia is NVIDIA's own, so that NVIDIA's settings apply."""
    return (in_daemon(x) or in_file(x)).endswith("nvidia-container-runtime")


conditions({
    "run-cut-off": lambda x: bool(x.open_run) and not x.runs_now and "/var/lib/gpuprov/runs",
    "toolkit-missing": lambda x: not (_TOOLKITS & x.there or in_daemon(x) or in_file(x) or x.host.docker.snap)
        and f"ls {LAUNCHER_PATH} {NVIDIA_RUNTIME}: No such file or directory",
    "boot-incomplete": lambda x: (x.host.boot.lacking or x.boot_changed)
        and Seen(*(f"ls -l {path}: missing, empty or masked" for path in x.host.boot.lacking),
                 *(f"ls -l {path}: changed since gpuprov wrote it" for path in x.boot_changed),
                 confidence="" if x.host.boot.lacking else LIKELY),
    "others-can-change": lambda x: bool(x.changeable)
        and Seen(*(f"stat -c '%u %a' {path}: {seen}" for path, seen in x.changeable.items()),
                 paths=shlex.join(x.changeable)),
    "low-level-runtime-broken": lambda x: bool(x.broken)
        and Seen(*x.broken.values(), again=_restore(x, next(iter(x.broken)))),
    "python-missing": lambda x: x.host.interpreter.fault == MISSING
        and Seen(f"ls {x.host.interpreter.deployed}: No such file or directory", remedies=_with_python(x),
                 effect=f"; {STAND_IN} stands in for it" if x.host.interpreter.replaced else "",
                 confidence=WARNING if x.host.interpreter.replaced else ""),
    "python-unfit": lambda x: x.host.interpreter.fault not in ("", MISSING)
        and Seen(f"{x.host.interpreter.deployed}: {x.host.interpreter.fault}", remedies=_with_python(x)),
    "install-obstructed": lambda x: (
            problems := (*preflight.read_only(x.host, x.host.read_only), *preflight.host_problems(x.host)))
        and seen_of(problems[0]),
    "run-alive": lambda x: (found := re.search(r"pid (\d+): (gpuprov [\w-]+)", x.runs_now)) is not None
        and Seen(x.runs_now, pid=found[1], command=found[2]),
    "reboot-asked-for": lambda x: bool(x.host.reboot.asked_in) and x.host.reboot.asked_in == x.host.reboot.boot_id
        and Seen(f"/var/lib/gpuprov: {'; '.join(x.host.reboot.asked_for)}",
                 confidence=LIKELY if x.driver.kernel_version else ""),
    "runtime-not-executable": lambda x: (path := in_daemon(x) or in_file(x)) in x.not_executable
        and Seen(f"stat -c %a {path}: {x.not_executable[path]:o}", path=path, quoted=shlex.quote(path),
                 remedies=_OURS if path == LAUNCHER_PATH else ()),
})  # fmt: skip


def _with_python(x: HostSnapshot) -> tuple[Remedy, ...]:
    return (Remedy(STEPS, ("toolkit", "boot")),) if x.host.interpreter.path else ()


def runtime_missing(x: HostSnapshot) -> Seen | None:
    named = (("docker info", in_daemon(x)), (x.host.docker.config_path, in_file(x)))
    source, path = next(((source, path) for source, path in named if path in x.absent), ("", ""))
    if not path:
        return None
    is_default = x.host.docker.config.get("default-runtime") == "nvidia"
    effect = ": no container starts, for it is docker's default runtime" if is_default else ""
    looked = f"ls {path}: No such file or directory" if path.startswith("/") else f"command -v {path}: nothing"
    seen, base = (f"{source}: runtime nvidia is {path}", looked), "nvidia-container-toolkit-base"
    if path == LAUNCHER_PATH:
        return Seen(*seen, path=path, effect=effect, remedies=_OURS)
    step = commands.reinstall_packages(x, base) if base in x.host.packages.installed else ""
    return Seen(*seen, path=path, effect=effect, next_step=step)


def runtime_files_missing(x: HostSnapshot) -> Seen | None:
    if LAUNCHER_PATH not in x.there:
        return None
    change = next(iter(toolkit.plan_runtime(x.host, HostSpec())), None)
    if not isinstance(change, toolkit.InstallRuntime):
        return None
    if x.installed is not None and x.installed.fault is not None:
        return seen_of(x.installed.fault, WARNING, ())
    # What the host should have is what its own gpuprov wrote; another version has other files.
    wrote = x.installed.files if x.installed is not None else {}
    missing = [path for path in wrote or (path for path, _, _ in change.files) if path not in x.host.files]
    if missing := [path for path in missing if wrote.get(path) != ""]:
        return Seen(f"ls {missing[0]}: No such file", files=counted(len(missing), "file"))
    there = {path: x.host.files[path].content for path in wrote if path in x.host.files}
    there.pop("" if deploy.is_ours(there.get(NVIDIA_HOOK_PATH, b"")) else NVIDIA_HOOK_PATH, None)
    if changed := [path for path, content in there.items() if sha256_of(content) != wrote[path]]:
        what = f"of gpuprov's container runtime {counted(len(changed), 'file')} changed since gpuprov wrote it"
        return Seen(*changed[:4], meaning=what, confidence=LIKELY)
    if all(x.host.files[path].content == content for path, _, content in change.files if path in x.host.files):
        what = "the byte code of gpuprov's container runtime is out of date: containers start slower"
        return Seen(LIBRARY_PATH, meaning=what, confidence=WARNING)
    # Another Python alone makes the programs differ; python-missing and python-unfit tell that.
    return None if x.host.interpreter.fault else _another_version(x)


def _another_version(x: HostSnapshot) -> Seen:
    """Return the remark on a runtime that works, and that `gpuprov install` would replace."""
    plan = make_plan(x.host, x.spec, ("boot", "toolkit", "cdi"))
    number = len(plan.changes)
    stops = any(one.change.disturbs for one in plan.changes)
    count = f": {counted(number, 'change')}{'' if stops else ', no container stops'}" if number else ""
    step = f"{commands.gpuprov_install(x)}  # updates it{count}"
    if x.installed is None:
        what = "gpuprov's container runtime on this host is of another version than this gpuprov"
        return Seen(LIBRARY_PATH, meaning=what, next_step=step, confidence=WARNING)
    theirs = x.installed.version
    who = f"{'another build of ' if theirs == __version__ else ''}gpuprov {theirs}" if theirs else "an earlier gpuprov"
    day = time.strftime("%Y-%m-%d", time.gmtime(x.installed.time))
    what = f"this host was set up by {who} on {day}; this is gpuprov {__version__}"
    return Seen(x.installed.journal, meaning=what, next_step=step, confidence=WARNING)


def _line(x: HostSnapshot, pattern: str) -> str:
    """Return the place and the line of a setting, in the file that applies; "" if it is not set."""
    paths = (NVIDIA_SETTINGS_PATH,) if _uses_nvidias(x) else (SETTINGS_PATH, NVIDIA_SETTINGS_PATH)
    key = pattern.partition(r"\s*=")[0]
    files = {path: x.texts[path] for path in paths if path in x.texts}
    found = lines_that_match(files, rf"^\s*(?:[\w-]+\.)*{key}\s*=")[:1]
    return next(iter(quoted(one for one in found if re.search(pattern, one[1]))), "")


def _setting(line: str, confidence: str = "") -> Seen | None:
    """Return the finding of a line of the settings, with the command that comments it out; None without a line."""
    comment_out = commands.comment_out(line.partition(": ")[0]) if line else ""
    return Seen(line, comment_out=comment_out, confidence=confidence) if line else None


def low_level_runtime_missing(x: HostSnapshot) -> Seen | None:
    if any(x.programs.get(name) for name in ("runc", "crun")):
        return None
    if not x.host.docker.installed and not _owner(x):
        return None
    return Seen("command -v runc crun: nothing", next_step=_restore(x, ""))


def _owner(x: HostSnapshot) -> str:
    # A package stays installed if its program was removed by hand; containerd.io contains runc.
    return next((name for name in ("runc", "crun", "containerd.io") if name in x.host.packages.installed), "")


def _restore(x: HostSnapshot, path: str) -> str:
    """Return the command that restores a low-level runtime. What lies in /usr/local is of no package."""
    if path.startswith("/usr/local/"):
        return f"mv {path} {path}.broken"
    return commands.reinstall_packages(x, _owner(x)) if _owner(x) else commands.install_packages(x, "runc")


def settings_broken(x: HostSnapshot) -> Seen | None:
    if not x.settings_fault:
        return None
    path = SETTINGS_PATH if SETTINGS_PATH in x.settings_fault else NVIDIA_SETTINGS_PATH
    line = re.search(r"line (\d+)", x.settings_fault)
    nvidias = _uses_nvidias(x) and "/usr/bin/nvidia-ctk" in x.there
    aside = f"nvidia-ctk config default --output={path}" if nvidias else f"mv {path} {path}.broken"
    return Seen(x.settings_fault, path=path, aside=aside, line=line[1] if line else 1)


def _if_nvidias(x: HostSnapshot) -> str:
    """Return the confidence of a problem with a setting that only NVIDIA's runtime reads: remains prevent nothing."""
    there = NVIDIA_RUNTIME in x.there or OPERATORS_RUNTIME in x.there
    return CERTAIN if _uses_nvidias(x) and there else WARNING


def no_cgroups(x: HostSnapshot) -> Seen | None:
    found = _setting(_line(x, r"no-cgroups\s*=\s*true"))
    # gpuprov's hook also reads NVIDIA's settings.
    hook_alone = in_daemon(x) == LAUNCHER_PATH
    if not found or not x.host.docker.active or not (hook_alone or _if_nvidias(x) == CERTAIN):
        return None
    which = "each container of `docker run --gpus`" if hook_alone else "every container of a docker that runs as root"
    found.values["containers"] = which
    return found


def _missing_path(x: HostSnapshot, pattern: str) -> Seen | None:
    """Return the finding of a setting of NVIDIA's toolkit that names a path that does not exist."""
    line = _line(x, pattern)
    path = line.partition('"')[2].partition('"')[0].removeprefix("@")
    found = _setting(line, _if_nvidias(x)) if path in x.absent else None
    if found:
        found.values.update(path=path, line=line.partition(": ")[0].rpartition(":")[2])
    return found


conditions({
    "environment-refused": lambda x: _setting(
        _line(x, r"accept-nvidia-visible-devices-envvar-when-unprivileged\s*=\s*false")),
    "capabilities-left-out": lambda x: (line := _line(x, r"supported-driver-capabilities\s*="))
        and "all" not in (words := {*re.findall(r"\w+", line.partition("=")[2])})
        and not {"compute", "utility"} <= words and _setting(line),
    "driver-root-missing": lambda x: _missing_path(x, r'root\s*=\s*"/[^"]'),
    "ldconfig-missing": lambda x: _missing_path(x, r'ldconfig\s*=\s*"@?/'),
})  # fmt: skip


def toolkit_old(x: HostSnapshot) -> Seen | None:
    version = x.host.packages.installed.get(advisories.TOOLKIT_PACKAGE, "")
    found = advisories.vulnerabilities(advisories.TOOLKIT, version, advisories.advisories(x.host.tables))
    if found is None:
        return None
    seen = f"package {advisories.TOOLKIT_PACKAGE}: {version}; the advisories are of {advisories.updated(x.host.tables)}"
    return Seen(seen, meaning=f"{found}", next_step=commands.install_packages(x, *_versions(x)))


def _versions(x: HostSnapshot) -> dict[str, str]:
    installed = x.host.packages.installed
    return {name: installed[name] for name in retired.TOOLKIT if name in installed}


# Remains of nvidia-docker 1 and 2 prevent no container from using GPUs. The package manager's command would remove
# daemon.json, too.
conditions({
    "toolkit-mixed": lambda x: len({version.partition("-")[0] for version in _versions(x).values()}) > 1
        and Seen(*quoted(_versions(x).items()), next_step=commands.install_packages(x, *_versions(x))),
    "toolkit-retired": lambda x: (name := next(iter(retired.retired_packages(x.host.packages.installed)), "")) and Seen(
        f"package {name} is installed", name=name,
        comment="  # keeps daemon.json, which the package manager would remove with it"
        if name == "nvidia-docker2" else ""),
    "watch-stopped": lambda x: (unit := x.units.get(TIMER)) is not None and commands.has_unit(x, TIMER)
        and unit.active != "active" and f"systemctl show {TIMER}: {unit.active}",
    "nvidia-docker-repository": lambda x: retired.retired_sources(x.host.files),
    "nvidia-docker-key": lambda x: not retired.retired_sources(x.host.files)
        and retired.key_files(x.host.files, x.spec.toolkit_key_fingerprint),
})  # fmt: skip


def nvidia_docker_plugin(x: HostSnapshot) -> list[str] | None:
    found = x.host.leftovers
    if not found.has_plugin or PLUGIN in x.host.packages.installed:
        return None
    unit = f"systemctl is-active {UNIT}: {found.unit}" if found.unit else ""
    return list(filter(None, (*found.files, FOLDER if found.folder else "", unit)))


def nvidia_docker_volumes(x: HostSnapshot) -> Seen | None:
    volumes = x.host.leftovers.volumes or ()
    used = [f", used by {', '.join(one.containers)}" if one.containers else "" for one in volumes]
    comment = "  # a volume that a container refers to stays" if any(used) else ""
    seen = (f"docker volume ls: {one.name}{users}" for one, users in zip(volumes, used))
    return Seen(*seen, volumes=counted(len(volumes), "volume"), comment=comment) if volumes else None


def nvidia_docker_runtimes(x: HostSnapshot) -> Seen | None:
    docker, dead = x.host.docker, x.host.leftovers.dead_runtimes
    paths = {name: ((docker.config.get("runtimes") or {}).get(name) or {}).get("path") for name in dead}
    seen = (f"{docker.config_path}: runtime {name} is {path}, which is missing" for name, path in paths.items())
    return Seen(*seen, names=", ".join(dead)) if dead else None

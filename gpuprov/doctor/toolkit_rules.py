"""The container toolkit, gpuprov's own or NVIDIA's, remains of nvidia-docker, and the watch. Pure."""

from __future__ import annotations

import re
import shlex
import time

from gpuprov import __version__, toolkit
from gpuprov.core.system import sha256_of
from gpuprov.doctor.docker_rules import in_daemon, in_file
from gpuprov.doctor.finding import (
    CERTAIN,
    DOCKER,
    INSTALL,
    LIKELY,
    TOOLKIT,
    WARNING,
    Finding,
    Remedy,
    Rules,
    Text,
    failed_unit,
    finding_of,
    steps,
)
from gpuprov.doctor.parse import lines_that_match
from gpuprov.doctor.snapshot import OPERATORS_RUNTIME, HostSnapshot
from gpuprov.doctor.suggested_commands import comment_out, gpuprov_install, install_packages, reinstall_packages
from gpuprov.facts.interpreter import MISSING, packages_of_pythons
from gpuprov.facts.leftovers import FOLDER, PLUGIN, UNIT
from gpuprov.facts.watch import SERVICE, TIMER
from gpuprov.packages import retired
from gpuprov.plan import preflight
from gpuprov.plan.migration import VARIABLE
from gpuprov.plan.steps import make_plan
from gpuprov.protocol import advisories
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.words import counted
from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, LIBRARY_PATH, NVIDIA_HOOK_PATH
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH, SETTINGS_PATH

RULES = Rules()

INSTALL_OBSTRUCTED, RUN_ALIVE = "install-obstructed", "run-alive"
_NVIDIA_RUNTIME = "/usr/bin/nvidia-container-runtime"
_OURS = (steps("toolkit"),)
_PACKAGES = (
    "nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools", "libnvidia-container1",
)  # fmt: skip


def _again(x: HostSnapshot, path: str) -> str:
    """Return the command that restores a program of the toolkit."""
    ours = path == LAUNCHER_PATH or "nvidia-container-toolkit-base" not in x.host.packages.installed
    return gpuprov_install(x) if ours else reinstall_packages(x, "nvidia-container-toolkit-base")


def _uses_nvidias(x: HostSnapshot) -> bool:
    """Say whether docker's runtime nvidia is NVIDIA's own, so that NVIDIA's settings apply."""
    return (in_daemon(x) or in_file(x)).endswith("nvidia-container-runtime")


@RULES.add(
    INSTALL_OBSTRUCTED,
    TOOLKIT,
    "something must be installed, and a file system is full or read-only, or the clock was never set",
)
def _install_obstructed(x: HostSnapshot) -> Finding | None:
    problems = (*preflight.read_only(x.host, x.host.read_only), *preflight.host_problems(x.host))
    return Finding(problems[0].what, problems[0].evidence, problems[0].next_step) if problems else None


@RULES.add(RUN_ALIVE, TOOLKIT, "a process holds gpuprov's lock, /run/gpuprov.lock")
def _run_alive(x: HostSnapshot) -> Finding | None:
    found = re.search(r"pid (\d+): (gpuprov [\w-]+)", x.runs_now)
    if found is None:
        return None
    return Finding(
        f"a run is working on this host ({found[2]}): what it has not done yet looks as missing", x.runs_now,
        f"tail --pid={found[1]} -f /dev/null; gpuprov doctor  # the first ends when that run does", WARNING,
    )  # fmt: skip


@RULES.add("run-cut-off", TOOLKIT, "gpuprov's journal has a run without an end")
def _run_cut_off(x: HostSnapshot) -> Finding | None:
    if not x.open_run or x.runs_now:
        return None
    return Finding(
        f"a run of gpuprov was cut off{x.open_run}", "/var/lib/gpuprov/runs", gpuprov_install(x), LIKELY,
        (INSTALL,),
    )  # fmt: skip


@RULES.add("reboot-asked-for", TOOLKIT, "gpuprov has asked for a reboot, and there was none since")
def _reboot_asked_for(x: HostSnapshot) -> Finding | None:
    reboot = x.host.reboot
    if not reboot.asked_in or reboot.asked_in != reboot.boot_id:
        return None
    return Finding(
        "gpuprov waits for a reboot of this host", f"/var/lib/gpuprov: {'; '.join(reboot.asked_for)}",
        f"systemctl reboot  # then {gpuprov_install(x)}", CERTAIN if not x.driver.kernel_version else LIKELY,
    )  # fmt: skip


@RULES.add("toolkit-missing", TOOLKIT, "neither gpuprov's runtime nor NVIDIA's is there")
def _toolkit_missing(x: HostSnapshot) -> Finding | None:
    there = {LAUNCHER_PATH, _NVIDIA_RUNTIME, "/usr/bin/nvidia-ctk", OPERATORS_RUNTIME} & x.there
    if there or in_daemon(x) or in_file(x) or x.host.docker.snap:
        return None
    return Finding(
        "no container toolkit is installed, neither gpuprov's nor NVIDIA's",
        f"ls {LAUNCHER_PATH} {_NVIDIA_RUNTIME}: No such file or directory",
        gpuprov_install(x),
    )


@RULES.add("runtime-missing", TOOLKIT, "the program that docker has as runtime nvidia is not there")
def _runtime_missing(x: HostSnapshot) -> Finding | None:
    named = (("docker info", in_daemon(x)), (x.host.docker.config_path, in_file(x)))
    source, path = next(((source, path) for source, path in named if path in x.absent), ("", ""))
    if not path:
        return None
    is_default = x.host.docker.config.get("default-runtime") == "nvidia"
    effect = ": no container starts, for it is docker's default runtime" if is_default else ""
    looked = f"ls {path}: No such file or directory" if path.startswith("/") else f"command -v {path}: nothing"
    return Finding(
        f"the container runtime {path} is missing{effect}",
        f"{source}: runtime nvidia is {path}\n{looked}",
        _again(x, path),
        remedies=_OURS if path == LAUNCHER_PATH else (),
    )


def _another_python(x: HostSnapshot) -> str:
    """Return the command that records a suitable Python, and first installs one if the host has none."""
    if x.host.interpreter.path:
        return gpuprov_install(x)
    row = x.host.distribution
    names = packages_of_pythons(x.host.packages.installed)
    again = reinstall_packages(x, *names) if names else ""
    return f"{again or install_packages(x, row.pythons[0] if row else 'python3')}; {gpuprov_install(x)}"


def _with_python(x: HostSnapshot) -> tuple[Remedy, ...]:
    return (steps("toolkit", "boot"),) if x.host.interpreter.path else ()


@RULES.add("runtime-not-executable", TOOLKIT, "docker's runtime nvidia may not be executed")
def _runtime_not_executable(x: HostSnapshot) -> Finding | None:
    path = in_daemon(x) or in_file(x)
    if path not in x.not_executable:
        return None
    return Finding(
        f"the container runtime {path} may not be executed", f"stat -c %a {path}: {x.not_executable[path]:o}",
        f"chmod 0755 {shlex.quote(path)}", remedies=_OURS if path == LAUNCHER_PATH else (),
    )  # fmt: skip


@RULES.add(
    "runtime-files-missing",
    TOOLKIT,
    "files in /usr/lib/gpuprov are missing, changed since gpuprov wrote them, or of another version",
    ("run-cut-off", "python-missing", "python-unfit"),
)
def _runtime_files_missing(x: HostSnapshot) -> Finding | None:
    if LAUNCHER_PATH not in x.there:
        return None
    change = next(iter(toolkit.plan_runtime(x.host, HostSpec())), None)
    if not isinstance(change, toolkit.InstallRuntime):
        return None
    if x.installed is not None and x.installed.fault is not None:
        return finding_of(x.installed.fault, WARNING)
    # What the host should have is what its own gpuprov wrote; another version has other files.
    wrote = x.installed.files if x.installed is not None else {}
    missing = [path for path in wrote or (path for path, _, _ in change.files) if path not in x.host.files]
    if missing := [path for path in missing if wrote.get(path) != ""]:
        return Finding(
            f"gpuprov's container runtime lacks {counted(len(missing), 'file')}", f"ls {missing[0]}: No such file",
            gpuprov_install(x), remedies=_OURS,
        )  # fmt: skip
    there = {path: x.host.files[path].content for path in wrote if path in x.host.files}
    there.pop("" if deploy.is_ours(there.get(NVIDIA_HOOK_PATH, b"")) else NVIDIA_HOOK_PATH, None)
    changed = [path for path, content in there.items() if sha256_of(content) != wrote[path]]
    if changed:
        return Finding(
            f"of gpuprov's container runtime {counted(len(changed), 'file')} changed since gpuprov wrote it",
            "\n".join(changed[:4]), gpuprov_install(x), LIKELY, _OURS,
        )  # fmt: skip
    if all(x.host.files[path].content == content for path, _, content in change.files if path in x.host.files):
        what = "the byte code of gpuprov's container runtime is out of date: containers start slower"
        return Finding(what, LIBRARY_PATH, gpuprov_install(x), WARNING, _OURS)
    return _another_version(x)


def _another_version(x: HostSnapshot) -> Finding:
    """Return the remark on a runtime that works, and that `gpuprov install` would replace."""
    plan = make_plan(x.host, x.spec, ("boot", "toolkit", "cdi"))
    number = len(plan.changes)
    stops = any(one.change.disturbs for one in plan.changes)
    count = f": {counted(number, 'change')}{'' if stops else ', no container stops'}" if number else ""
    step = f"{gpuprov_install(x)}  # updates it{count}"
    if x.installed is None:
        what = "gpuprov's container runtime on this host is of another version than this gpuprov"
        return Finding(what, LIBRARY_PATH, step, WARNING, _OURS)
    theirs = x.installed.version
    who = "an earlier gpuprov" if not theirs else f"gpuprov {theirs}"
    if theirs == __version__:
        who = f"another build of gpuprov {theirs}"
    day = time.strftime("%Y-%m-%d", time.gmtime(x.installed.time))
    return Finding(
        f"this host was set up by {who} on {day}; this is gpuprov {__version__}", x.installed.journal, step, WARNING,
        _OURS,
    )  # fmt: skip


def _setting(x: HostSnapshot, pattern: str) -> tuple[str, str] | None:
    """Return the place and the line of a setting, in the file that applies."""
    files = {path: text for path, text in x.texts.items() if path in (SETTINGS_PATH, NVIDIA_SETTINGS_PATH)}
    return next(iter(lines_that_match(files, rf"^\s*{pattern}")), None)


@RULES.add("python-missing", TOOLKIT, "the Python that the launcher or the boot units name is not there")
def _python_missing(x: HostSnapshot) -> Finding | None:
    python = x.host.interpreter
    if python.fault != MISSING:
        return None
    return Finding(
        f"the Python that gpuprov's container runtime and boot units run on is missing: {python.deployed}",
        f"ls {python.deployed}: No such file or directory", _another_python(x), remedies=_with_python(x),
    )  # fmt: skip


@RULES.add("python-unfit", TOOLKIT, "that Python is older than 3.9, does not run, or others than root can write it")
def _python_unfit(x: HostSnapshot) -> Finding | None:
    python = x.host.interpreter
    if python.fault in ("", MISSING):
        return None
    return Finding(
        f"gpuprov's container runtime and boot units must not or can't run on their Python, {python.deployed}",
        f"{python.deployed}: {python.fault}", _another_python(x), remedies=_with_python(x),
    )  # fmt: skip


@RULES.add("low-level-runtime-missing", TOOLKIT, "docker or a package of runc is there, neither runc nor crun is")
def _low_level_runtime_missing(x: HostSnapshot) -> Finding | None:
    if any(x.programs.get(name) for name in ("runc", "crun")):
        return None
    # A package stays installed if its program was removed by hand; containerd.io contains runc.
    owner = next((name for name in ("runc", "crun", "containerd.io") if name in x.host.packages.installed), "")
    if not x.host.docker.installed and not owner:
        return None
    step = reinstall_packages(x, owner) if owner else install_packages(x, "runc")
    return Finding("neither runc nor crun is there", "command -v runc crun: nothing", step)


@RULES.add("settings-broken", TOOLKIT, f"`{SETTINGS_PATH}` or `{NVIDIA_SETTINGS_PATH}` can't be read")
def _settings_broken(x: HostSnapshot) -> Finding | None:
    if not x.settings_fault:
        return None
    path = SETTINGS_PATH if SETTINGS_PATH in x.settings_fault else NVIDIA_SETTINGS_PATH
    line = re.search(r"line (\d+)", x.settings_fault)
    nvidias = _uses_nvidias(x) and "/usr/bin/nvidia-ctk" in x.there
    aside = f"nvidia-ctk config default --output={path}" if nvidias else f"mv {path} {path}.broken"
    return Finding(
        f"the runtime's settings can't be read, so no GPU container starts: {path}",
        x.settings_fault,
        f"{aside}  # the defaults hold then; or correct it: ${{EDITOR:-vi}} +{line[1] if line else 1} {path}",
    )


def _if_nvidias(x: HostSnapshot) -> str:
    """Return the confidence of a problem with a setting that only NVIDIA's runtime reads: remains prevent nothing."""
    there = _NVIDIA_RUNTIME in x.there or OPERATORS_RUNTIME in x.there
    return CERTAIN if _uses_nvidias(x) and there else WARNING


@RULES.add("no-cgroups", TOOLKIT, "no-cgroups = true, and docker runs as root with NVIDIA's runtime")
def _no_cgroups(x: HostSnapshot) -> Finding | None:
    found = _setting(x, r"no-cgroups\s*=\s*true")
    # gpuprov's hook also reads NVIDIA's settings.
    hook_alone = in_daemon(x) == LAUNCHER_PATH
    if found is None or not x.host.docker.active or not (hook_alone or _if_nvidias(x) == CERTAIN):
        return None
    which = "each container of `docker run --gpus`" if hook_alone else "every container of a docker that runs as root"
    return Finding(
        f"no-cgroups = true keeps the devices closed in {which} (NVML: Unknown Error): only rootless engines need it",
        f"{found[0]}: {found[1]}", comment_out(found[0]), LIKELY,
    )  # fmt: skip


def _line(x: HostSnapshot, pattern: str) -> str:
    return ": ".join(_setting(x, pattern) or ())


def _place(x: HostSnapshot, pattern: str) -> str:
    return _line(x, pattern).partition(": ")[0]


def _few_capabilities(x: HostSnapshot) -> str:
    found = _line(x, _CAPABILITIES)
    words = set(re.findall(r"\w+", found.partition("=")[2]))
    return "" if "all" in words or {"compute", "utility"} <= words else found


_ENVIRONMENT = r"accept-nvidia-visible-devices-envvar-when-unprivileged\s*=\s*false"
_CAPABILITIES = r"supported-driver-capabilities\s*="
RULES.row(
    "environment-refused", TOOLKIT, "accept-nvidia-visible-devices-envvar-when-unprivileged = false",
    lambda x: _line(x, _ENVIRONMENT),
    "NVIDIA_VISIBLE_DEVICES and --gpus are ignored for every container that is not privileged, as the settings ask",
    lambda x: f"{comment_out(_place(x, _ENVIRONMENT))}  # or ask for devices by volume mounts or CDI, "
              "as the site wants it", LIKELY,
)  # fmt: skip
RULES.row(
    "capabilities-left-out", TOOLKIT, "supported-driver-capabilities without compute or utility", _few_capabilities,
    "containers get neither nvidia-smi nor CUDA: the settings leave out `compute` or `utility`",
    lambda x: comment_out(_place(x, _CAPABILITIES)), LIKELY,
)  # fmt: skip


@RULES.add("driver-root-missing", TOOLKIT, "config.toml: root names a folder that is not there")
def _driver_root_missing(x: HostSnapshot) -> Finding | None:
    found = _setting(x, r'root\s*=\s*"/[^"]')
    path = found[1].partition('"')[2].partition('"')[0] if found else ""
    if found is None or path not in x.absent:
        return None
    return Finding(
        f"NVIDIA's toolkit looks for the driver below {path}, which is not there",
        f"{found[0]}: {found[1]}", comment_out(found[0]), _if_nvidias(x),
    )  # fmt: skip


@RULES.add("ldconfig-missing", TOOLKIT, "config.toml: ldconfig names a program that is not there")
def _ldconfig_missing(x: HostSnapshot) -> Finding | None:
    found = _setting(x, r'ldconfig\s*=\s*"@?/')
    path = re.sub(r'.*?"@?(/[^"]*)".*', r"\1", found[1]) if found else ""
    if found is None or path not in x.absent:
        return None
    number = found[0].rpartition(":")[2]
    return Finding(
        f"NVIDIA's toolkit is configured to run {path}, which does not exist", f"{found[0]}: {found[1]}",
        f"""sed -i '{number}s|=.*|= "@/sbin/ldconfig"|' {NVIDIA_SETTINGS_PATH}""",
        _if_nvidias(x),
    )  # fmt: skip


@RULES.add("toolkit-old", TOOLKIT, "nvidia-container-toolkit has known security holes")
def _toolkit_old(x: HostSnapshot) -> Finding | None:
    version = x.host.packages.installed.get(advisories.TOOLKIT_PACKAGE, "")
    found = advisories.vulnerabilities(advisories.TOOLKIT, version)
    if found is None:
        return None
    return Finding(
        f"{found}",
        f"package {advisories.TOOLKIT_PACKAGE}: {version}; the advisories are of {advisories.updated()}",
        install_packages(x, *(name for name in _PACKAGES if name in x.host.packages.installed)),
        WARNING,
    )


@RULES.add("toolkit-mixed", TOOLKIT, "the toolkit's four packages are not of one version")
def _toolkit_mixed(x: HostSnapshot) -> Finding | None:
    found = {name: x.host.packages.installed[name] for name in _PACKAGES if name in x.host.packages.installed}
    if len({version.partition("-")[0] for version in found.values()}) < 2:
        return None
    return Finding(
        "the toolkit's packages are of different versions", "\n".join(f"{name}: {v}" for name, v in found.items()),
        install_packages(x, *found), LIKELY,
    )  # fmt: skip


def _migrate(x: HostSnapshot) -> str:
    """Return the command that removes the remains; not the package manager's, which would also remove daemon.json."""
    return f"{gpuprov_install(x)} -e {VARIABLE}=true"


def _retired(x: HostSnapshot) -> str:
    return next(iter(retired.retired_packages(x.host.packages.installed)), "")


def _plugin(x: HostSnapshot) -> str:
    found = x.host.leftovers
    if not found.has_plugin or PLUGIN in x.host.packages.installed:
        return ""
    unit = f"systemctl is-active {UNIT}: {found.unit}" if found.unit else ""
    return "\n".join(filter(None, (*found.files, FOLDER if found.folder else "", unit)))


def _volumes(x: HostSnapshot) -> str:
    return "\n".join(
        f"docker volume ls: {one.name}" + (f", used by {', '.join(one.containers)}" if one.containers else "")
        for one in x.host.leftovers.volumes or ()
    )


def _runtimes(x: HostSnapshot) -> str:
    docker = x.host.docker
    paths = {name: (docker.config.get("runtimes") or {})[name].get("path") for name in x.host.leftovers.dead_runtimes}
    return "\n".join(
        f"{docker.config_path}: runtime {name} is {path}, which is missing" for name, path in paths.items()
    )


def _key(x: HostSnapshot) -> str:
    files = x.host.files
    return "" if retired.retired_sources(files) else "\n".join(retired.key_files(files, x.spec.toolkit_key_fingerprint))


# Remains of nvidia-docker 1 and 2 prevent no container from using GPUs: rule, area, sign, evidence, meaning, command.
_REMAINS: tuple[tuple[str, str, str, Text, Text, Text], ...] = (
    ("toolkit-retired", TOOLKIT, "nvidia-docker2 or a package older than it",
     lambda x: f"package {_retired(x)} is installed" if _retired(x) else "",
     lambda x: f"{_retired(x)} is retired, and its repository clashes with the toolkit's",
     lambda x: _migrate(x) + ("  # keeps daemon.json, which the package manager would remove with it"
                              if _retired(x) == "nvidia-docker2" else "")),
    ("nvidia-docker-plugin", TOOLKIT, "nvidia-docker 1's programs, unit or folder, of no package",
     _plugin, "nvidia-docker 1's plugin is left", _migrate),
    ("nvidia-docker-repository", TOOLKIT, "a source of packages names one of NVIDIA's retired repositories",
     lambda x: "\n".join(retired.retired_sources(x.host.files)),
     "a repository that NVIDIA has retired is configured: it offers old packages of the toolkit's names", _migrate),
    ("nvidia-docker-key", TOOLKIT, "their key is in apt's keyrings for all repositories",
     _key, "apt trusts the key of NVIDIA's retired repositories, and no repository needs it", _migrate),
    ("nvidia-docker-volumes", DOCKER, "docker has volumes named nvidia_driver_VERSION",
     _volumes, lambda x: f"nvidia-docker 1 has left {counted(len(x.host.leftovers.volumes or ()), 'volume')}",
     lambda x: _migrate(x) + ("  # a volume that a container refers to stays"
                              if any(one.containers for one in x.host.leftovers.volumes or ()) else "")),
    ("nvidia-docker-runtimes", DOCKER, "daemon.json names a runtime of NVIDIA's, not `nvidia`, that is missing",
     _runtimes, lambda x: f"docker has runtimes without a program: {', '.join(x.host.leftovers.dead_runtimes)}",
     _migrate),
)  # fmt: skip
for _remains in _REMAINS:
    RULES.row(*_remains, WARNING)


def _stopped_timer(x: HostSnapshot) -> str:
    unit = x.units.get(TIMER)
    stopped = unit is not None and unit.load == "loaded" and unit.active != "active"
    return f"systemctl show {TIMER}: {unit.active}" if unit and stopped else ""


RULES.row(
    "watch-failed", TOOLKIT, f"{SERVICE} ended with an error", failed_unit(SERVICE),
    f"{SERVICE} has failed: this host's metrics are old", f"journalctl -u {SERVICE}; systemctl start {SERVICE}",
    WARNING,
)  # fmt: skip
RULES.row(
    "watch-stopped", TOOLKIT, f"{TIMER} is there and not active", _stopped_timer,
    f"{TIMER} is installed and does not run: this host is not watched", f"systemctl start {TIMER}", WARNING,
)  # fmt: skip

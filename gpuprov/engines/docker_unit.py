"""How docker is started on this host: its unit with every drop-in, dockerd's command line, and their effects.

systemd is the source, because the next start uses it; if dockerd was started by hand or by a script, its process is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from gpuprov.core.commands import unanswered_evidence
from gpuprov.core.system import System
from gpuprov.engines.known import Reader
from gpuprov.protocol.codec import json_at
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.errors import Problem

DAEMON_JSON = "/etc/docker/daemon.json"
UNIT = "docker.service"
SOCKET = "docker.socket"
PID_FILE = "/run/docker.pid"
_DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
_PROPERTIES = (
    "Id,LoadState,ActiveState,Result,UnitFileState,MainPID,ExecStart,Environment,EnvironmentFiles,Listen,FragmentPath,"
    "RefuseManualStop,Requires"
)
_SECONDS = 20
# Lines of docker's log that only report a stop or that it read its file, not why it failed.
_NOISE = re.compile(
    r"^(Starting|Stopping|Stopped|Started|Failed to start|Reloading|Reloaded|See 'dockerd --help'"
    r"|docker\.service: (?!Failed (?:at|to)|Unable))|level=(debug|info|warning)|Got signal to reload"
)
_DECISIVE = re.compile(
    r"level=(?:error|fatal)|^failed to start|^unable to |^invalid |^Error starting|specified both as a flag"
)


@dataclass(frozen=True)
class DockerUnit:
    """docker.service as systemd has loaded it, in `systemctl show`'s words; all empty where systemd does not answer.

    `command`: what starts dockerd, variables expanded. `running`: the command line of the running dockerd, which may be
    older. `socket`: where docker.socket listens; `on_demand`: whether that is enabled, so that docker starts when it is
    used. `refuses_restart`: RefuseManualStop; systemd also refuses a restart then. `socket_load`: LoadState of the
    socket that docker.service requires. `name`: dockerd's unit. `silent`: the evidence that systemd gave no answer.
    """

    load: str = ""
    enabled: str = ""
    active: str = ""
    result: str = ""
    command: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    socket: str = ""
    on_demand: bool = False
    refuses_restart: bool = False
    socket_load: str = ""
    name: str = "docker"
    silent: str = ""

    @property
    def word(self) -> str:
        """dockerd's unit for a shell: systemd escapes names with backslashes (systemd.unit(5))."""
        return shlex.quote(self.name)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The effective arguments: the unit's if they can be read, else those of the running dockerd."""
        is_readable = any(word.rpartition("/")[2] == "dockerd" for word in self.command)
        # A dollar sign that systemd leaves is for a shell in the unit; another unit has a command of its own.
        is_others = bool(self.running) and ("$" in "".join(self.command) or self.name != "docker")
        return _arguments(self.command if is_readable and not is_others else self.running)

    @property
    def config_path(self) -> str:
        """The configuration file that docker reads when it starts."""
        return _config_path(self.arguments)

    @property
    def is_outdated(self) -> bool:
        """Whether the running dockerd reads another file than its unit names: only a restart helps."""
        running = _arguments(self.running)
        return bool(running) and _config_path(running) != self.config_path

    @property
    def is_foreign(self) -> bool:
        """Whether systemd did not start the running dockerd: it can neither reload nor restart it."""
        return self.load in ("loaded", "masked") and self.active in ("inactive", "failed") and bool(self.running)

    @property
    def is_disabled(self) -> bool:
        """Whether docker does not start at boot: its containers' restart policies need more than docker.socket."""
        return self.load == "loaded" and self.enabled == "disabled" and self.name == "docker"

    @property
    def flag_runtimes(self) -> Mapping[str, str]:
        """The runtimes that the command line adds, name → path."""
        words = (value.partition("=") for value in flag_values(self.arguments, "--add-runtime"))
        return {name: path for name, _, path in words}


def gather_unit(system: Reader) -> DockerUnit:
    """Return how docker is started, by one systemd query."""
    blocks: dict[str, Mapping[str, Sequence[str]]] = {}
    silent = ""
    if system.which("systemctl") is not None:
        done = system.run(("systemctl", "show", UNIT, SOCKET, "-p", _PROPERTIES), timeout=_SECONDS)
        blocks, silent = dict(parse_show(done.stdout)) if done.ok else {}, unanswered_evidence(done)
    unit, socket = blocks.get(UNIT, {}), blocks.get(SOCKET, {})
    environment = _environment(system, unit)
    started = re.findall(r"argv\[\]=(.*?) ; ignore_errors=", "".join(unit.get("ExecStart", ())))
    command = expanded(_words(started[-1]) if started else (), environment)
    return DockerUnit(
        load=_one(unit, "LoadState"),
        enabled=_one(unit, "UnitFileState"),
        active=_one(unit, "ActiveState"),
        result=_one(unit, "Result"),
        command=command,
        running=_running(system, _one(unit, "MainPID")),
        socket=_one(socket, "Listen").partition(" ")[0],
        on_demand=_one(socket, "UnitFileState") == "enabled",
        refuses_restart=_one(unit, "RefuseManualStop") == "yes",
        socket_load=_one(socket, "LoadState") if SOCKET in _one(unit, "Requires").split() else "",
        name=_runner(system),
        silent=silent,
    )


def parse_show(text: str) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return unit → property → its lines, of `systemctl show` over several units."""
    found = {}
    for block in text.split("\n\n"):
        lines: dict[str, list[str]] = {}
        for line in block.splitlines():
            name, mark, value = line.partition("=")
            if mark:
                lines.setdefault(name, []).append(value)
        if lines.get("Id"):
            found[lines["Id"][0]] = lines
    return found


def expanded(words: Iterable[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words as systemd.service(5) expands them: $A as a word of its own is split, ${A} is not; $$ is $."""
    found: list[str] = []
    for word in words:
        if whole := re.fullmatch(r"\$(\w+)", word):
            found += _words(environment.get(whole[1], ""))
        else:
            found.append(re.sub(r"\$\$|\$\{(\w+)\}", lambda one: environment.get(one[1], "") if one[1] else "$", word))
    return tuple(found)


def flag_values(arguments: Sequence[str], *names: str) -> tuple[str, ...]:
    """Return the values of a flag in the forms that dockerd takes: --name=value, --name value, -Nvalue."""
    found: list[str] = []
    for number, word in enumerate(arguments):
        for name in names:
            if word == name:
                found += arguments[number + 1 : number + 2]
            elif word.startswith(f"{name}="):
                found.append(word[len(name) + 1 :])
            elif len(name) == 2 and word.startswith(name):
                found.append(word[2:])
    return tuple(found)


def local_address(unit: DockerUnit, hosts: object) -> str:
    """Return the address of this host's docker, for DOCKER_HOST; `hosts` is the value in its file.

    A socket before TCP: it needs no certificates.
    """
    listed = listens_at(unit, hosts)
    for host in listed:
        if host.startswith("unix://"):
            return host
        if host.startswith("fd://"):
            return f"unix://{unit.socket}" if unit.socket else _DEFAULT_ADDRESS
    tcp = next((host for host in listed if host.startswith("tcp://")), "")
    return re.sub(r"^tcp://(?:0\.0\.0\.0|\[::\])?(?=:|$)", "tcp://127.0.0.1", tcp) or _DEFAULT_ADDRESS


def dockerd_version(system: Reader) -> str:
    """Return the version of the installed dockerd, "" if unknown."""
    if system.which("dockerd") is None:
        return ""
    found = re.search(r"version ([^\s,]+)", system.run(("dockerd", "--version"), timeout=_SECONDS).stdout)
    return found[1] if found else ""


def listens_at(unit: DockerUnit, hosts: object) -> tuple[str, ...]:
    """Return docker's listen addresses from its flags or its file; never both set them."""
    of_file = tuple(str(host) for host in hosts) if isinstance(hosts, list) else ()
    return flag_values(unit.arguments, "-H", "--host") or of_file


def refusal(system: System, unit: DockerUnit, path: str) -> str:
    """Return why dockerd rejects a configuration file, in its own words; "" if it accepts the file.

    dockerd 23 and later has --validate. Earlier releases read the file and merge it with the flags before they check
    the log level. An invalid log level therefore ends dockerd at that point, before it starts anything.
    """
    if system.which("dockerd") is None:
        return ""
    arguments = unit.arguments
    if path != unit.config_path:
        # Only then: dockerd starts without its default file, but not without a named one.
        arguments = (*_without(arguments, "--config-file"), "--config-file", path)
    done = system.run(("dockerd", "--validate", *arguments), timeout=_SECONDS)
    if "unknown flag: --validate" in done.stderr + done.stdout:
        done = system.run(("dockerd", "--log-level=none", *_without(arguments, "--log-level", "-l")), timeout=_SECONDS)
    said = f"{done.stderr}\n{done.stdout}"
    found = re.search(rf"unable to configure the Docker daemon with file {re.escape(path)}: (.*)", said)
    words = found[1].strip() if found else ""
    # The file may also set the level that is given here: that is not an error of the file.
    return "" if re.search(r"configuration file: log-level: \(from flag: none, [^)]*\)$", words) else words


def last_words(system: System, since: int = 0) -> str:
    """Return why docker says that it did not start, from its log since a time (seconds since 1970)."""
    after = ("--since", f"@{since}") if since else ()
    done = system.run(("journalctl", "--unit", UNIT, "--lines", "60", "--no-pager", "--output", "cat", *after))
    return decisive_lines(done.stdout)


def runtime_flags_problem(path: str, flags: Sequence[str]) -> tuple[Problem, ...]:
    """Return the problem of these flags: dockerd does not start with a directive as a flag and in its file."""
    what = f"docker's unit sets runtimes by a flag; with runtimes in {path} too it would not start"
    step = "move what the flag says into the file: systemctl edit --full docker"
    return (Problem(what, f"systemctl show {UNIT}: {' '.join(flags)}", step),) if flags else ()


def text_of(system: Reader, path: str) -> str | None:
    """Return a file of docker's as `parse_config` takes it; None if it is missing."""
    content = system.read_bytes(path)
    return None if content is None else content.decode("utf-8", "surrogateescape")


def restart_stops_containers(system: System) -> bool | None:
    """Say whether a restart of docker stops containers that run now; None if docker or systemd does not tell."""
    form = "{{.ContainersRunning}} {{.LiveRestoreEnabled}}"
    done = system.run(("docker", "info", "--format", form), timeout=_SECONDS)
    if not done.ok or done.stdout.split()[:1] == ["0"]:
        return False if done.ok else None
    unit = gather_unit(system)
    lives = "true" in done.stdout and will_live_restore(unit, text_of(system, unit.config_path))
    return None if unit.silent else not lives


def will_live_restore(unit: DockerUnit, text: str | None) -> bool:
    """Say whether a dockerd that starts with this file has live-restore.

    One that starts without it ends the containers that a former one with it has left running.
    """
    by_flag = any(word in ("--live-restore", "--live-restore=true") for word in unit.arguments)
    return by_flag or json_at((text or "").lstrip("\ufeff"), "live-restore") is True


def failure(system: System) -> Problem | None:
    """Return the problem of a docker whose unit has failed, None for any other state."""
    unit = gather_unit(system)
    if (unit.load, unit.active) != ("loaded", "failed") or unit.is_foreign:
        return None
    seen = f"systemctl show {UNIT}: {unit.active}, {unit.result}\n{last_words(system)}".strip()
    return Problem("docker has failed and does not run", seen, "journalctl -u docker -n 50")


def decisive_lines(log: str) -> str:
    """Return the lines of docker's log that say why it failed; else its last lines with any content."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    decisive = list(dict.fromkeys(line for line in lines if _DECISIVE.search(line)))
    telling = decisive or [line for line in lines if not _NOISE.search(line)]
    limit = [line for line in lines if "Start request repeated too quickly" in line]
    return "\n".join((telling or limit)[-3:])


def _arguments(command: Sequence[str]) -> tuple[str, ...]:
    """Return what follows dockerd in a command; empty for a command that does not clearly start dockerd."""
    number = next((number for number, word in enumerate(command) if word.rpartition("/")[2] == "dockerd"), None)
    return () if number is None else tuple(command[number + 1 :])


def _config_path(arguments: Sequence[str]) -> str:
    named = flag_values(arguments, "--config-file")
    return f"/{named[-1].lstrip('/')}" if named and named[-1] else DAEMON_JSON


def _without(arguments: Sequence[str], *names: str) -> tuple[str, ...]:
    """Return the arguments without these flags and their values."""
    found: list[str] = []
    skip = False
    for word in arguments:
        if not skip and word not in names and not word.startswith(tuple(f"{name}=" for name in names)):
            found.append(word)
        skip = not skip and word in names
    return tuple(found)


def _environment(system: Reader, unit: Mapping[str, Sequence[str]]) -> Mapping[str, str]:
    """Return the unit's environment; files override what the unit sets (systemd.exec(5))."""
    found: dict[str, str] = {}
    lines = [word for line in unit.get("Environment", ()) for word in _words(line)]
    for line in unit.get("EnvironmentFiles", ()):
        text = _read(system, line.partition(" (")[0])
        lines += [one.strip() for one in text.splitlines() if one.strip()[:1] not in ("#", ";", "")]
    for line in lines:
        name, mark, value = line.partition("=")
        if mark:
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            found[name.strip()] = value[1:-1] if quoted else value
    return found


def _running(system: Reader, pid: str) -> tuple[str, ...]:
    """Return the command line of the running dockerd, empty if none runs."""
    pid = pid if pid.strip("0") else _read(system, PID_FILE).strip()
    if not pid.isdecimal():
        return ()
    words = _read(system, f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
    return tuple(words) if words[0].rpartition("/")[2] == "dockerd" else ()


def _runner(system: Reader) -> str:
    """Return the unit, other than docker.service, whose main process is the running dockerd; else docker."""
    pid = _read(system, "/run/docker.pid").strip()
    found = pid.isdecimal() and re.search(r"(?m)([^/\n]+\.service)$", _read(system, f"/proc/{pid}/cgroup"))
    shown = system.run(("systemctl", "show", found[1], "-p", "MainPID")).stdout if found and found[1] != UNIT else ""
    return found[1] if found and shown.strip() == f"MainPID={pid}" else "docker"


def _read(system: Reader, path: str) -> str:
    return (system.read_bytes(path) or b"").decode("utf-8", "replace")


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return tuple(text.split())


def _one(properties: Mapping[str, Sequence[str]], name: str) -> str:
    return (*properties.get(name, ()), "")[0]

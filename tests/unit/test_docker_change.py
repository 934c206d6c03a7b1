"""docker's file changed on a host: how docker takes it up, what happens where it does not, and the way back."""

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.core.commands import Completed
from gpuprov.engines.docker_change import ReconfigureDocker
from gpuprov.protocol.errors import GpuprovError
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted

PATH = "/etc/docker/daemon.json"
RUNTIME = "/usr/local/bin/gpuprov-runtime"
NEW = json.dumps({"runtimes": {"nvidia": {"path": RUNTIME, "args": []}}}) + "\n"
OLD = '{"debug": true}\n'
BAD = '{"no-such-option": true}\n'
_LOADED = '{{with index .Runtimes "nvidia"}}{{.Path}}{{end}} {{.DefaultRuntime}}'
_OURS = {"nvidia": {"path": RUNTIME}}
RESTART, RELOAD = ["reset-failed", "restart"], ["reload"]


class Docker(Scripted):
    """A host with docker: what its file says, and what the running docker has loaded of it."""

    def __init__(self, root: Path, text: str | None = OLD, *, active: bool = True) -> None:
        super().__init__(root)
        self.active = active
        self.version = "26.1.5"
        self.info: dict[str, Any] = {"Runtimes": {"runc": {}}, "DefaultRuntime": "runc"}
        self.containers = "0 false"
        self.flags = ""
        self.log: dict[int, str] = {}
        self.broken: dict[str, Answer] = {}  # a verb of systemctl that fails, and its answer
        self.loads_after = 0.0
        self.loads: dict[str, Any] = {}  # instead of what its file says
        self.refuses_old = False
        self.seconds = 0.0
        self.modes: list[int] = []
        self.without: tuple[str, ...] = ()
        for folder in ("etc/docker", "run"):
            (root / folder).mkdir(parents=True)
        if text is not None:
            self.write(PATH, text.encode(), mode=0o640)
        self.asked.clear()

    def which(self, program: str) -> str | None:
        return None if program in self.without else super().which(program)

    def now(self) -> float:
        return self.seconds

    def clock(self) -> int:
        return 1000 + int(self.seconds)

    def sleep(self, seconds: float) -> None:
        assert seconds < 1
        self.seconds += seconds

    @property
    def text(self) -> str | None:
        return self.read_text(PATH)

    @property
    def verbs(self) -> list[str]:
        """What systemctl was told to do, and with which unit."""
        told = [argv for argv in self.asked if argv[0] == "systemctl" and argv[1] not in ("is-active", "show")]
        assert all(argv[2:] == ("docker.service",) for argv in told)
        return [argv[1] for argv in told]

    def load(self) -> bool:
        """Read the file as dockerd does; return whether it takes it."""
        text = self.text or "{}"
        if text == BAD or (self.refuses_old and text == OLD):
            return False
        config = json.loads(text)
        runtimes = {"runc": {}, **config.get("runtimes", {})}
        self.info = self.loads or {"Runtimes": runtimes, "DefaultRuntime": config.get("default-runtime", "runc")}
        return True

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        assert argv[0] != "docker" or more["timeout"], "a docker that hangs is not waited for"
        return super().run(argv, **more)

    def answer(self, argv: tuple[str, ...]) -> Answer:
        if argv[0] == "systemctl":
            return self._systemctl(argv[1])
        if argv[0] == "journalctl":
            since = next(int(word[1:]) for word in argv if word.startswith("@"))
            self.seconds += 1
            return self.log.get(since, "")
        if argv[0] == "docker":
            return self._info(argv)
        if argv == ("dockerd", "--version"):
            return f"Docker version {self.version}, build x\n"
        assert argv[:2] == ("dockerd", "--validate")
        path = argv[argv.index("--config-file") + 1] if "--config-file" in argv else PATH
        found = self.status(path)
        self.modes += [found.mode] if found else []
        words = f"one\ntwo\nthree\nfour\nunable to configure the Docker daemon with file {path}: no such option"
        return (1, "", words) if self.read_text(path) == BAD else "configuration OK\n"

    def _systemctl(self, verb: str) -> Answer:
        if verb in self.broken:
            return self.broken[verb]
        if verb == "is-active":
            return (0 if self.active else 3), ""
        if verb == "show":
            return f"Id=docker.service\nExecStart={{ argv[]=/usr/bin/dockerd {self.flags} ; ignore_errors=no }}\n"
        if verb == "stop":
            self.active = False
        elif verb == "restart":
            self.active = self.load()
            return "" if self.active else (1, "", "Job for docker.service failed.")
        elif verb == "reload":
            self.load()
        return ""

    def _info(self, argv: tuple[str, ...]) -> Answer:
        assert argv[:3] == ("docker", "info", "--format") and len(argv) == 4
        if not self.active:
            return 1, "", "Cannot connect to the Docker daemon\n"
        if argv[3] == "{{json .}}":
            return json.dumps(self.info)
        if argv[3] != _LOADED:
            return f"{self.containers}\n"
        runtimes = self.info["Runtimes"] if self.seconds >= self.loads_after else {}
        return f"{runtimes.get('nvidia', {}).get('path', '')} {self.info['DefaultRuntime']}\n"


def change(content: str | None = NEW, **more: Any) -> ReconfigureDocker:
    return ReconfigureDocker(**{"content": content, "runtime_path": RUNTIME, "restart": True, **more})


def applied(host: Docker, what: ReconfigureDocker) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    what.apply(host, lambda *words: told.append(words))
    return told


@pytest.mark.parametrize(
    ("active", "options", "verbs", "told"),
    [
        (True, {}, RELOAD + RESTART, "restarting docker"),
        (True, {"restart": False}, RELOAD, "reloading docker"),
        (True, {"reload": False}, RESTART, "restarting docker"),
        (False, {"restart": False}, RESTART, "reloading docker"),
        (True, {"restart": False, "enable": True}, ["enable", "reload"], "reloading docker"),
        (True, {"enable": True, "is_loaded": True}, ["enable"], ""),
        (True, {"is_loaded": True}, [], ""),
    ],
)
@pytest.mark.parametrize(("before", "mode"), [(OLD, 0o640), (None, 0o644)])
def test_docker_takes_up_its_new_file(
    tmp_path: Path, active: bool, options: dict[str, Any], verbs: list[str], told: str, before: str | None, mode: int
) -> None:
    host = Docker(tmp_path, before, active=active)
    assert applied(host, change(**options)) == ([(told, 0, 0)] if told else [])
    assert host.verbs == verbs
    assert host.text == NEW and (tmp_path / PATH[1:]).stat().st_mode & 0o777 == mode
    assert not host.modes, "nothing is validated unless that is planned"


@pytest.mark.parametrize("said", [(1, "", "Failed to connect to bus: Connection timed out"), (124, ""), (137, "")])
@pytest.mark.parametrize("undo", [False, True])
def test_a_docker_of_which_systemd_tells_nothing_is_not_restarted(tmp_path: Path, said: Answer, undo: bool) -> None:
    """A restart stops the containers of a docker that runs."""
    host = Docker(tmp_path)
    what = change(restart=False, containers=("train",))
    before = what.capture(host)
    real, asked = host.answer, list[str]()

    def answer(argv: tuple[str, ...]) -> Answer:
        asked.extend(argv[1:2] if argv[:2] == ("systemctl", "is-active") else ())
        return said if argv[1] == "is-active" and (undo or len(asked) > 1) else real(argv)

    host.answer = answer  # type: ignore[method-assign]
    acts: Callable[[], object] = (lambda: what.undo(host, before, {})) if undo else (lambda: applied(host, what))
    assert refused(acts).what == "systemd does not tell about docker.service"
    assert "restart" not in host.verbs and host.active


def test_a_file_in_a_folder_that_is_not_there_is_written(tmp_path: Path) -> None:
    host = Docker(tmp_path)
    applied(host, change(path="/srv/docker/own.json", is_loaded=True))
    assert host.read_text("/srv/docker/own.json") == NEW and host.text == OLD


@pytest.mark.parametrize(("options", "seconds"), [({"restart": False}, 15), ({"reload": False}, 60)], ids=str)
def test_docker_has_time_to_take_up_its_file(tmp_path: Path, options: dict[str, Any], seconds: int) -> None:
    quick, slow = Docker(tmp_path / "quick"), Docker(tmp_path / "slow")
    quick.loads_after, slow.loads_after = seconds - 1, seconds + 1
    applied(quick, change(**options))
    with pytest.raises(GpuprovError):
        applied(slow, change(**options))


@pytest.mark.parametrize(
    ("options", "info", "evidence"),
    [
        ({}, {"Runtimes": _OURS, "DefaultRuntime": "crun"}, ""),
        ({}, {"Runtimes": {"nvidia": {"path": "/x"}}, "DefaultRuntime": "runc"}, "runtime nvidia: /x"),
        ({}, {"Runtimes": {}, "DefaultRuntime": "runc"}, "runtime nvidia: nothing"),
        ({"default_runtime": True}, {"Runtimes": _OURS, "DefaultRuntime": "nvidia"}, ""),
        ({"default_runtime": True}, {"Runtimes": _OURS, "DefaultRuntime": "runc"}, "default runtime runc"),
    ],
)
def test_docker_info_is_the_proof(tmp_path: Path, options: dict[str, Any], info: dict[str, Any], evidence: str) -> None:
    host = Docker(tmp_path, NEW)
    host.loads = info
    if not evidence:
        applied(host, change(None, restart=False, **options))
        assert host.seconds == 0
        return
    problem = refused(applied, host, change(None, restart=False, **options))
    assert PATH in problem.what and problem.evidence.endswith(evidence) and problem.next_step
    assert host.verbs == ["reload"], "there is no other file that could come back"


def test_bytes_that_are_no_utf_8_are_written_as_they_were(tmp_path: Path) -> None:
    host = Docker(tmp_path)
    content = b'{"log-driver": "caf\xe9"}\n'
    applied(host, change(content.decode("utf-8", "surrogateescape"), runtime_path="", restart=False))
    assert host.read_bytes(PATH) == content


@pytest.mark.parametrize(("said", "evidence"), [(" no daemon \n", "no daemon"), ("", "docker info fails")])
def test_a_docker_that_does_not_answer_is_the_evidence(tmp_path: Path, said: str, evidence: str) -> None:
    host = Docker(tmp_path, NEW)
    host._info = lambda argv: (1, "", said)  # type: ignore[method-assign]
    assert refused(applied, host, change(None)).evidence == evidence


_FAILED = "Job for docker.service failed."
_OLD_TOO = f"with the old file: `systemctl restart docker.service` exited 1\n{_FAILED}"
_NO_RELOAD = (1, "", "Job type reload is not applicable")
_REFUSED = (1, "", "Operation refused, unit may be requested by dependency only")
_AND_BACK = [*RELOAD, *RESTART, *RELOAD]
_DIES_OF_BOTH = {"refuses_old": True, "log": {1000: "failed to start: new\n", 1001: "failed to start: old\n"}}
_BOTH = "failed to start: new\nwith the old file: failed to start: old"


@pytest.mark.parametrize(
    ("setup", "options", "says", "evidence", "verbs"),
    [
        # It dies of the new file: the old one is restored, and docker started with it.
        ({}, {"content": BAD, "reload": False}, "docker runs with it", _FAILED, RESTART * 2),
        # A stopped one.
        ({"active": False}, {"content": BAD}, "docker runs with it", _FAILED, RESTART * 2),
        # It rejects the new file at a reload and keeps the old one: no restart.
        ({}, {"content": BAD}, "docker runs with it", "runtime nvidia: nothing", RELOAD * 2),
        ({"broken": {"reload": _NO_RELOAD}}, {}, "docker runs with it", _NO_RELOAD[2], RELOAD * 2),
        ({"broken": {"restart": _REFUSED}}, {}, "systemd does not restart docker", _REFUSED[2], _AND_BACK),
        # docker's own words count more.
        ({"log": {1000: "level=fatal new\n"}}, {"content": BAD}, "docker runs with it", "level=fatal new", RELOAD * 2),
        (_DIES_OF_BOTH, {"content": BAD, "reload": False}, "neither", _BOTH, RESTART * 2),
        ({"refuses_old": True}, {"content": BAD, "reload": False}, "neither", _OLD_TOO, RESTART * 2),
    ],
)
def test_a_docker_that_fails_gets_its_old_file_back(
    tmp_path: Path, setup: Mapping[str, Any], options: dict[str, Any], says: str, evidence: str, verbs: list[str]
) -> None:
    host = Docker(tmp_path)
    vars(host).update(setup)
    problem = refused(applied, host, change(**options))
    assert says in problem.what and PATH in problem.what and problem.next_step
    assert evidence in problem.evidence
    assert host.verbs == verbs and host.text == OLD


@pytest.mark.parametrize("content", [BAD, NEW])
def test_dockerd_validates_a_private_copy_before_anything_changes(tmp_path: Path, content: str) -> None:
    host = Docker(tmp_path)
    what = change(content, validates=True, is_loaded=True)
    if content == BAD:
        problem = refused(applied, host, what)
        assert PATH in problem.what
        assert problem.evidence.splitlines()[1:-1] == ["two", "three", "four"]
        assert problem.next_step.endswith(f"dockerd --validate --config-file {PATH}")
    else:
        applied(host, what)
    assert host.text == (OLD if content == BAD else NEW)
    assert host.modes == [0o600] and host.list_directory("/run") == ()


def test_a_docker_that_cannot_be_enabled_is_an_error_before_a_restart(tmp_path: Path) -> None:
    host = Docker(tmp_path)
    host.broken = {"enable": (1, "", "Unit file is masked")}
    problem = refused(applied, host, change(enable=True))
    assert "can't be enabled" in problem.what and "Unit file is masked" in problem.evidence
    assert problem.next_step == "systemctl enable docker.service"
    assert host.verbs == ["enable"]


@pytest.mark.parametrize(("number", "next_step"), [(errno.EPERM, True), (errno.EACCES, True), (errno.ENXIO, False)])
def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, number: int, next_step: bool) -> None:
    host = Docker(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, "no", PATH)

    host.write = refuse  # type: ignore[method-assign]
    problem = refused(applied, host, change())
    assert problem.what.startswith(f"{PATH} can't be written")
    # chattr +a forbids it, too, and no plan sees that.
    assert (problem.next_step == f"lsattr {PATH}; chattr -ia {PATH}") is next_step
    assert host.verbs == []


@pytest.mark.parametrize(
    ("content", "version", "features"),
    [
        (None, "26.1.5", {"cdi": True}), (None, "20.10.24", None), (NEW, "26.1.5", {"cdi": True}),
        (NEW, "28.2.0", None), (NEW, "20.10.24", None),
        (NEW.replace("{", '{"features": {"cdi": true}, ', 1), "26.1.5", {"cdi": True}),
    ],
)  # fmt: skip
def test_features_cdi_by_dockers_version(tmp_path: Path, content: str | None, version: str, features: object) -> None:
    host = Docker(tmp_path, NEW if content is None else "{}")
    host.version = version
    assert applied(host, change(content, cdi_by_version=True)) == [("restarting docker", 0, 0)]
    written = json.loads(host.text or "")
    assert (written.get("features"), "runtimes" in written) == (features, True)


@pytest.mark.parametrize(
    ("options", "summary"),
    [
        ({}, f"write {PATH} and restart docker (no container is running)"),
        ({"content": None, "enable": True}, "enable docker.service and restart docker (no container is running)"),
        ({"enable": True, "is_loaded": True}, f"write {PATH} and enable docker.service"),
        # Live-restore is not what keeps them through a reload.
        (
            {"content": None, "restart": False, "containers": ("a", "b"), "live_restore": True},
            "reload docker (2 running: a, b; they keep running)",
        ),
    ],
)
def test_the_summary_names_all_that_is_done(options: dict[str, Any], summary: str) -> None:
    assert change(**options).summary() == summary


def test_the_diff_is_of_the_file_that_is_written(tmp_path: Path) -> None:
    host = Docker(tmp_path)
    lines = change().diff(host).splitlines()
    assert f"-{OLD[:-1]}" in lines and f"+{NEW[:-1]}" in lines and any(PATH in line for line in lines[:2])
    assert change(None).diff(host) == ""


# -- undo --------------------------------------------------------------------------------------------------------------


def undone(host: Docker, before: Mapping[str, Any], outcome: Mapping[str, Any] | None = None) -> list[str]:
    host.asked.clear()
    ReconfigureDocker.undo(host, before, outcome)
    return host.verbs


_ELSEWHERE = "Id=docker.service\nLoadState=loaded\nActiveState=inactive\nMainPID=0\n"


@pytest.mark.parametrize(
    ("was_active", "enable", "setup", "verbs"),
    [
        (True, False, {}, RESTART),
        (True, True, {}, ["disable", *RESTART]),
        (False, False, {}, ["stop"]),
        (False, True, {}, ["disable", "stop"]),
        (False, False, {"active": False}, []),
        (True, False, {"active": False}, RESTART),
        # A restart would stop containers.
        (True, False, {"containers": "1 false"}, ["reload"]),
        (False, False, {"containers": "1 false"}, ["reload"]),
        (True, False, {"containers": "1 true", "flags": "--live-restore"}, RESTART),
        # It has live-restore, and would start without it.
        (True, False, {"containers": "1 true"}, ["reload"]),
        # It does not tell: there may be some.
        (True, False, {"_info": lambda argv: (124, "")}, ["reload"]),
        (False, False, {"_info": lambda argv: (1, "", "Cannot connect to the Docker daemon")}, ["reload"]),
        # docker was removed since.
        (True, True, {"without": ("dockerd",)}, []),
        # Another unit runs docker by now.
        (True, False, {"active": False, "broken": {"show": _ELSEWHERE}}, []),
        # Words of a docker that starts are no error.
        (True, False, {"log": {1000: "level=error msg=harmless\n"}}, RESTART),
    ],
)
def test_undo_restores(tmp_path: Path, was_active: bool, enable: bool, setup: dict[str, Any], verbs: list[str]) -> None:
    host = Docker(tmp_path, active=was_active)
    what = change(enable=enable)
    before = what.capture(host)
    applied(host, what)
    for path, content in (("/run/docker.pid", b"77"), ("/proc/77/cmdline", b"/usr/bin/dockerd\0")):
        host.make_directory(path.rpartition("/")[0])
        host.write(path, content)
    vars(host).update(setup)
    assert undone(host, before) == verbs
    assert host.text == OLD


_RUNTIMES = {"runtimes": {"a": {"path": "/a"}}}


@pytest.mark.parametrize(
    ("config", "flags", "loaded", "default", "runs"),
    [
        ({}, "", ["runc"], "runc", True),
        ({"runtimes": None}, "", ["runc", "io.containerd.runc.v2"], "runc", True),
        ({}, "", None, "runc", True),
        (_RUNTIMES, "", ["runc", "a"], "runc", True),
        (_RUNTIMES, "", ["runc"], "runc", False),
        ({}, "", ["runc", "nvidia"], "runc", False),
        ({}, "", ["runc"], "nvidia", False),
        ({**_RUNTIMES, "default-runtime": "a"}, "", ["a"], "a", True),
        (_RUNTIMES, "--default-runtime=a", ["a"], "a", True),
        (_RUNTIMES, "--default-runtime=a", ["a"], "runc", False),
        ({}, "--add-runtime b=/b", ["b"], "runc", True),
        ({}, "--add-runtime b=/b", [], "runc", False),
    ],
)
def test_undo_leaves_a_docker_that_runs_with_its_file(
    tmp_path: Path, config: dict[str, Any], flags: str, loaded: list[str] | None, default: str, runs: bool
) -> None:
    """A user may have restored the file, with a restart of docker or without one."""
    host = Docker(tmp_path, json.dumps(config))
    host.flags = flags
    host.info = {"Runtimes": loaded and {name: {} for name in loaded}, "DefaultRuntime": default}
    assert undone(host, change().capture(host)) == ([] if runs else RESTART)


@pytest.mark.parametrize("info", ["", "null", "{}", '{"Runtimes": {"x": {}}}', "[" * 100_000])
def test_undo_leaves_a_docker_that_does_not_say_what_it_has_loaded(tmp_path: Path, info: str) -> None:
    host = Docker(tmp_path)
    host._info = lambda argv: info  # type: ignore[method-assign]
    assert undone(host, change().capture(host)) == []


@pytest.mark.parametrize(
    ("text", "version", "verbs"),
    [
        ("{", "26.1.5", []),
        # A byte order mark, which docker reads since 23.
        ("\ufeff{}", "20.10.24", []),
        ("\ufeff{}", "26.1.5", RESTART),
    ],
)
def test_undo_leaves_a_docker_with_a_damaged_file(tmp_path: Path, text: str, version: str, verbs: list[str]) -> None:
    host = Docker(tmp_path, text)
    host.version = version
    host.info = {"Runtimes": {"x": {}}, "DefaultRuntime": "x"}
    host.load = lambda: True  # type: ignore[method-assign]
    assert undone(host, change().capture(host)) == verbs


def test_undo_does_not_restart_a_docker_with_a_file_that_prevents_its_start(tmp_path: Path) -> None:
    host = Docker(tmp_path, BAD)
    before = change().capture(host)
    host.write(PATH, NEW.encode())
    assert undone(host, before) == [] and host.text == BAD and host.active


@pytest.mark.parametrize(
    ("setup", "evidence"),
    [
        ({"broken": {"restart": (1, "", "Job failed")}}, "`systemctl restart docker.service` exited 1\nJob failed"),
        ({"broken": {"restart": (1, "", "Job failed")}, "log": {1000: "level=fatal x\n"}}, "level=fatal x"),
        ({"broken": {"restart": ""}}, "systemctl is-active docker.service: no"),
    ],
)
def test_undo_says_why_docker_does_not_start_again(tmp_path: Path, setup: dict[str, Any], evidence: str) -> None:
    host = Docker(tmp_path)
    before = change().capture(host)
    applied(host, change())
    vars(host).update({**setup, "active": False})
    problem = refused(undone, host, before, {})
    assert PATH in problem.what and problem.evidence == evidence and problem.next_step
    assert host.text == OLD
    # The failed change has said so already; a change that was made has not.
    assert undone(host, before, None) == RESTART
    with pytest.raises(GpuprovError):
        undone(host, before, {})

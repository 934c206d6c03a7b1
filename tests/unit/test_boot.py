"""What the next boot brings: which files on which host, and the program that runs there by itself."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.resources import files
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from gpuprov.boot import prepare, program_main
from gpuprov.boot.prepare import boot_program
from gpuprov.cdi.discover import discover
from gpuprov.cdi.files import DriverFile
from gpuprov.cdi.generate import difference
from gpuprov.core.changes import FileFact, parent_of
from gpuprov.core.lock import LOCK_PATH, try_lock
from gpuprov.facts import boot
from gpuprov.facts.boot import MODULES, NODES, PERSISTENCE, REFRESH, SERVE, SERVE_SOCKET, UDEV_RULES, UNITS, WATCH
from gpuprov.facts.host import HostFacts, gather
from gpuprov.machine.machine import OperatingSystem
from gpuprov.plan.context import source_of
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec, parse_spec
from gpuprov.runtime_hook.driver_files import CONTAINER
from tests import simgpu
from tests.pythons import VERSIONS
from tests.unit.fake_host import FakeHost

pytestmark = pytest.mark.root
CDI = "/etc/cdi/nvidia.json"


def spec(**values: Any) -> HostSpec:
    return parse_spec({"driver_version": simgpu.DRIVER_VERSION, **values})


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """A system container with the driver's libraries, whose device nodes are yet to be made."""
    made = FakeHost(tmp_path / "root")
    simgpu.install_tree(made.root)
    return made


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    return gather(FakeHost(tmp_path_factory.mktemp("container") / "root"))


@pytest.fixture(scope="module")
def metal(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    return gather(FakeHost(tmp_path_factory.mktemp("metal") / "root", metal=True))


def prepared(facts: HostFacts, wanted: HostSpec) -> prepare.PrepareBoot:
    (change,) = prepare.plan(source_of(facts, wanted))
    assert isinstance(change, prepare.PrepareBoot)
    return change


def written(facts: HostFacts, wanted: HostSpec) -> set[str]:
    return {path for path, _ in prepared(facts, wanted).files}


_OF_SYSTEMD = (NODES, REFRESH, WATCH, boot.CHANGED, boot.SOCKETS)
EVERYWHERE = {boot.PROGRAM, boot.USERS, boot.ROOT, UDEV_RULES, *(f"{UNITS}/{name}" for name in _OF_SYSTEMD)}
_ENGINES = (
    "docker", "containerd", "crio", "podman-restart", "k3s", "k3s-agent", "rke2-server", "rke2-agent", "kubelet"
)  # fmt: skip


def test_a_system_container_loads_no_modules_and_keeps_no_gpu_awake(container: HostFacts) -> None:
    assert written(container, spec()) == EVERYWHERE
    assert prepare.packages(source_of(container, spec())) == ()


def test_a_machine_with_its_own_kernel_does_both(metal: HostFacts) -> None:
    assert written(metal, spec()) == EVERYWHERE | {MODULES, f"{UNITS}/{PERSISTENCE}"}
    assert prepare.packages(source_of(metal, spec())) == ("libtirpc3",)
    mint = OperatingSystem("linuxmint", "22", "wilma", ("ubuntu", "debian"), "Linux Mint 22", "noble")
    assert prepare.packages(source_of(replace(metal, os=mint), spec())) == ("libtirpc3t64",)


def test_the_service_for_old_scripts_comes_where_it_is_asked_for_and_goes_again(host: FakeHost) -> None:
    assert written(gather(host), spec(serve=True)) == EVERYWHERE | {f"{UNITS}/{SERVE}", f"{UNITS}/{SERVE_SOCKET}"}
    prepared(gather(host), spec(serve=True)).apply(host, lambda *words: None)
    assert ("systemctl", "restart", SERVE_SOCKET) in host.commands
    assert ("systemctl", "restart", SERVE) not in host.commands  # the socket starts it
    assert prepare.plan(source_of(gather(host), spec(serve=True))) == ()
    change = prepared(gather(host), spec())
    assert set(change.stale) == {f"{UNITS}/{SERVE}", f"{UNITS}/{SERVE_SOCKET}"}
    before = change.capture(host)
    change.apply(host, lambda *words: None)
    assert not [path for path in host.root.rglob("gpuprov-serve*") if path.exists() or path.is_symlink()]
    host.commands.clear()
    prepare.PrepareBoot.undo(host, before, {})
    restarted = {name for command in host.commands if command[:2] == ("systemctl", "restart") for name in command[2:]}
    assert SERVE_SOCKET in restarted
    assert SERVE not in restarted
    assert prepare.plan(source_of(gather(host), spec(serve=True))) == ()


def test_engines_wait_for_nodes_and_specification_but_not_for_ever(container: HostFacts) -> None:
    files = {path: content.decode() for path, content in prepared(container, spec()).files if path != boot.PROGRAM}
    mig = prepare.content_of(f"{UNITS}/{boot.MIG}", **prepare.mig_values([("0000:17:00.0", "all-1g.5gb")])).decode()
    values = {"gpudirect": "nvidia-peermem", "dkms": ""}
    features = [prepare.content_of(f"{UNITS}/{one}", **values).decode() for one in (boot.GPUDIRECT, boot.CONFIDENTIAL)]
    for unit in (files[f"{UNITS}/{NODES}"], files[f"{UNITS}/{REFRESH}"], mig, *features):
        (before,) = (line.split() for line in unit.splitlines() if line.startswith("Before="))
        assert {f"{name}.service" for name in _ENGINES} <= {word.replace("Before=", "") for word in before}
        assert "TimeoutStartSec=" in unit and "TimeoutStopSec=5" in unit
        assert "Requires=" not in unit
    assert f"After={REFRESH}" in files[boot.USERS]
    # The daemons' sockets come later, and no engine waits for those.
    sockets = files[f"{UNITS}/{boot.SOCKETS}"]
    assert "Before=" not in sockets and f"After={REFRESH} {PERSISTENCE}" in sockets
    assert f"Wants={boot.SOCKETS}" in files[f"{UNITS}/{NODES}"]


@pytest.mark.parametrize("divided", [(), (0,)])
def test_the_mig_unit_divides_each_gpu_and_fails_with_one(tmp_path: Path, divided: tuple[int, ...]) -> None:
    """GPU 1 can't be divided, or not until the unit is started again; GPU 0 may be divided by then."""
    for index in divided:
        (tmp_path / str(index)).touch()
    script = f"""#!/bin/sh
echo "$*" >>{tmp_path}/log
index=$(echo "$*" | sed 's/.*-i \\([0-9]\\).*/\\1/')
case "$*" in
    *-lgi*) for name in {tmp_path}/[0-9]; do
        case "$*" in *-i*) test $name = {tmp_path}/$index || continue; esac
        test ! -e $name || echo "|   0  MIG 3g.40gb           9        2          4:4     |"; done ;;
    *-mig*) test $index = 0 -o -e {tmp_path}/free ;;
    *-cgi*) touch {tmp_path}/$index ;;
esac
"""
    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    values = prepare.mig_values([("1", "3g.40gb"), ("0", "3g.40gb")])
    unit = prepare.content_of(f"{UNITS}/{boot.MIG}", **values).decode()
    (start,) = re.findall(r"^ExecStart=/bin/sh -c '(.*)'$", unit, re.MULTILINE)

    def run() -> int:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(("sh", "-c", start.replace("$$", "$")), env=environment, check=False).returncode

    assert (run(), (tmp_path / "0").exists(), (tmp_path / "1").exists()) == (1, True, False)
    (tmp_path / "free").touch()
    assert (run(), (tmp_path / "1").exists()) == (0, True)
    assert (tmp_path / "log").read_text().count("mig -i 0 -cgi") == 1 - len(divided)


def test_a_change_starts_the_refresh_when_no_run_and_no_other_refresh_goes_on(container: HostFacts) -> None:
    """A refresh that is at work may have looked before the change, and none works beside a run of ours."""
    files = {path: content.decode() for path, content in prepared(container, spec()).files if path != boot.PROGRAM}
    assert f"Unit={boot.CHANGED}" in files[f"{UNITS}/{WATCH}"]
    assert set(re.findall(r"start (gpuprov\S+)\"", files[UDEV_RULES])) == {boot.CHANGED}
    assert re.findall(r"^ExecStart=(.+)", files[f"{UNITS}/{boot.CHANGED}"], re.MULTILINE) == [
        f"-/usr/bin/flock {LOCK_PATH} /bin/true",
        f"-/bin/systemctl --no-block --job-mode=ignore-requirements restart {REFRESH}",
    ]  # fmt: skip


class _ZipPath(zipfile.Path):
    """As in Python 3.10.0 to 3.10.9 and 3.11.0 and 3.11.1 (CPython issue 101144)."""

    def read_text(self, *args: Any, **kwargs: Any) -> str:
        kwargs["encoding"] = kwargs.get("encoding") or "locale"
        with self.open("rb") as stream:
            return TextIOWrapper(stream, *args, **kwargs).read()


def test_units_are_read_from_a_zip_by_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(prepare.__file__).parent
    with zipfile.ZipFile(tmp_path / "agent.pyz", "w") as archive:
        for path in (folder / "etc").rglob("*.*"):
            archive.write(path, path.relative_to(folder))
    there = prepare.content_of(boot.USERS)
    monkeypatch.setattr(prepare, "files", lambda name: _ZipPath(tmp_path / "agent.pyz"))
    assert prepare.content_of(boot.USERS) == there


@pytest.mark.needs("systemd-analyze")
def test_systemd_reads_the_units_without_a_complaint(tmp_path: Path) -> None:
    folder = files("gpuprov.boot").joinpath("etc/systemd/system")
    units = [one.name for one in folder.iterdir() if one.is_file()]
    values = {
        "python": sys.executable, "schedule": "daily", "delay": "2h", "command": sys.executable, "environment": "",
        "mps_threads": "100", "mps_memory": "", "gpudirect": "gdrdrv", "dkms": "gdrdrv",
        **prepare.mig_values([("0000:17:00.0", "all-1g.5gb")]),
    }  # fmt: skip
    for name in units:
        (tmp_path / name).write_bytes(prepare.content_of(f"{UNITS}/{name}", **values))
    done = subprocess.run(
        ("systemd-analyze", "verify", "--man=no", *(tmp_path / name for name in units)),
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    # systemctl is waited for until systemd itself ends the start.
    texts = "".join((tmp_path / name).read_text() for name in units)
    limits = re.findall(r"^TimeoutStartSec=(\d+)$", texts, re.MULTILINE)
    assert limits and max(map(int, limits)) < prepare.START_SECONDS
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "not executable" not in line]
    assert units and said == []


def test_our_unit_goes_when_a_package_brings_its_own(metal: HostFacts) -> None:
    path = f"{UNITS}/{PERSISTENCE}"
    packaged = replace(metal, boot=replace(metal.boot, persistence_packaged=True))
    assert written(packaged, spec()) == EVERYWHERE | {MODULES}
    ours = FileFact(prepare.content_of(path), 0o644, 0, 0)
    for file, stale in ((ours, (path,)), (replace(ours, content=b"[Unit]\n"), ())):
        assert prepared(replace(packaged, files={**metal.files, path: file}), spec()).stale == stale


@pytest.mark.parametrize("program", [boot.PERSISTENCE_PROGRAM, "/usr/bin/nvidia-smi"])
def test_a_driver_that_is_there_has_the_unit_for_its_daemon(metal: HostFacts, program: str) -> None:
    there = replace(metal, driver=replace(metal.driver, programs=(DriverFile(program, program),)))
    files = written(there, spec(driver="preinstalled"))
    assert (f"{UNITS}/{PERSISTENCE}" in files) is (program == boot.PERSISTENCE_PROGRAM)


@pytest.mark.parametrize("packaged", [True, False])
def test_a_packages_own_unit_takes_the_place_of_ours(host: FakeHost, packaged: bool) -> None:
    """Both are enabled by the link of the same name, which goes with ours: the daemon stayed off."""
    path, link = f"{UNITS}/{PERSISTENCE}", f"{boot.WANTS}/{PERSISTENCE}"
    for folder in (boot.WANTS, "/usr/lib/systemd/system"):
        host.make_directory(folder)
    host.write(path, prepare.content_of(path))
    host.make_link(link, path)
    if packaged:
        host.write(f"/usr/lib/systemd/system/{PERSISTENCE}", b"[Service]\n")
    change = prepared(gather(host), spec())
    assert change.stale == (path,)
    change.apply(host, lambda *words: None)
    told = [words[1:] for words in host.commands if words[0] == "systemctl" and words[-1] == PERSISTENCE]
    assert [words for words in told if words[0] in ("stop", "enable")] == [
        ("stop", PERSISTENCE), *([("enable", "--now", PERSISTENCE)] if packaged else []),
    ]  # fmt: skip


def test_a_list_of_modules_that_a_container_no_longer_needs_stops_no_unit(host: FakeHost) -> None:
    host.make_directory(parent_of(MODULES))
    host.write(MODULES, prepare.content_of(MODULES))
    change = prepared(gather(host), spec())
    assert change.stale == (MODULES,)
    before = change.capture(host)
    assert before["units"] == list(change.units)
    change.apply(host, lambda *words: None)
    assert not host.exists(MODULES)
    assert not [command for command in host.commands if command[:2] == ("systemctl", "stop")]
    prepare.PrepareBoot.undo(host, before, None)
    assert host.read_bytes(MODULES) == prepare.content_of(MODULES)


def test_the_diff_has_the_texts_the_programs_name_and_the_links(host: FakeHost) -> None:
    host.make_directory(UNITS)
    host.write(f"{UNITS}/{WATCH}", b"old\n")
    host.write(f"{UNITS}/{SERVE}", b"gone\n")
    files = ((boot.PROGRAM, b"PK"), (f"{UNITS}/{WATCH}", b"new\n"))
    change = prepare.PrepareBoot(files, (REFRESH, WATCH), (f"{UNITS}/{SERVE}",), (REFRESH, WATCH))
    assert change.diff(host).splitlines() == [
        f"+{boot.PROGRAM}",
        f"--- {UNITS}/{WATCH}", f"+++ {UNITS}/{WATCH}", "@@ -1 +1 @@", "-old", "+new",
        f"--- {UNITS}/{SERVE}", "+++ /dev/null", "@@ -1 +0,0 @@", "-gone",
        f"+{boot.WANTS}/{REFRESH}", f"+{boot.WANTS}/{WATCH}",
    ]  # fmt: skip
    assert change.summary().endswith(f" {REFRESH}, {WATCH}")


def test_a_unit_that_somebody_disabled_is_enabled_again(host: FakeHost) -> None:
    prepared(gather(host), spec()).apply(host, lambda *words: None)
    assert prepare.plan(source_of(gather(host), spec())) == ()
    host.remove(f"{boot.WANTS}/{WATCH}")
    change = prepared(gather(host), spec())
    assert (change.files, change.links) == ((), (WATCH,))


@pytest.mark.parametrize("path", [boot.PROGRAM, f"{UNITS}/{REFRESH}", UDEV_RULES])
@pytest.mark.parametrize("spoil", ["owner", "mode", "content"])
def test_what_root_runs_at_boot_shall_be_roots_with_our_mode_and_content(host: FakeHost, path: str, spoil: str) -> None:
    prepared(gather(host), spec()).apply(host, lambda *words: None)
    if spoil == "owner":
        os.chown(host.path(path), 1000, 0)
    elif spoil == "mode":
        host.change_mode(path, 0o666)
    else:
        host.append(path, b"#")
    assert written(gather(host), spec()) == {path}


def test_a_unit_that_does_not_start_is_an_error_that_says_why(host: FakeHost) -> None:
    host.failing_unit = REFRESH
    with pytest.raises(GpuprovError, match=f"{REFRESH} did not start") as raised:
        prepared(gather(host), spec()).apply(host, lambda *words: None)
    assert "the unit's last words" in str(raised.value)


# -- the program ---------------------------------------------------------------------------------------------------


def test_same_input_same_bytes() -> None:
    first = boot_program()
    boot_program.cache_clear()
    assert boot_program() == first


@pytest.mark.parametrize(
    ("content", "another"), [(None, False), (boot_program(), False), (b"PK", True)], ids=["none", "own", "another"]
)
def test_another_versions_program_is_known_by_its_bytes(host: FakeHost, content: bytes | None, another: bool) -> None:
    if content is not None:
        host.make_directory(parent_of(boot.PROGRAM))
        host.write(boot.PROGRAM, content)
    assert prepare.is_of_another_version(host) is another


@pytest.mark.parametrize("python", VERSIONS, indirect=True)
def test_the_program_needs_nothing_but_python(tmp_path: Path, python: str) -> None:
    """Every module in it can be imported from it alone."""
    path = tmp_path / "boot.pyz"
    path.write_bytes(boot_program())
    names = [name[:-3].replace("/", ".") for name in zipfile.ZipFile(BytesIO(boot_program())).namelist()]
    ours = [name for name in names if name.startswith("gpuprov.") and not name.endswith("__init__")]
    assert {"gpuprov.boot.program_main", "gpuprov.cdi.generate", "gpuprov.cdi.nvml_child"} <= set(ours)
    code = f"import sys; sys.path[:0] = [{str(path)!r}]; import elftools.elf.elffile, {', '.join(ours)}"
    done = subprocess.run((python, "-I", "-S", "-c", code), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


_COUNT = """
import collections, runpy, sys
compiled = collections.Counter()
sys.addaudithook(lambda event, details: event == "compile" and compiled.update([details[1]]))
try:
    runpy.run_path(sys.argv[1])
except SystemExit as error:
    print(error)
print({name: count for name, count in compiled.items() if "gpuprov" in str(name)})
"""


@pytest.mark.parametrize("python", VERSIONS, indirect=True)
def test_each_module_is_compiled_once(tmp_path: Path, python: str) -> None:
    path = tmp_path / "boot.pyz"
    path.write_bytes(boot_program())
    done = subprocess.run((python, "-I", "-S", "-c", _COUNT, path), capture_output=True, text=True, check=True)
    usage, counts = done.stdout.splitlines()
    assert usage.startswith("usage: ")
    compiled = ast.literal_eval(counts)
    assert f"{path}/gpuprov/boot/program_main.py" in compiled and set(compiled.values()) == {1}


class BusyHost(FakeHost):
    """A host on which nvidia-persistenced starts at the same time, and makes the GPUs' nodes."""

    def remove(self, path: str) -> None:
        super().remove(path)
        if minor := re.fullmatch(r"/dev/nvidia(\d)", path):
            super().make_node(path, 195, int(minor[1]), 0o666)


@pytest.mark.parametrize("kind", [FakeHost, BusyHost])
def test_nodes_and_their_links_are_made(tmp_path: Path, kind: type[FakeHost]) -> None:
    host = kind(tmp_path / "root")
    simgpu.install_tree(host.root)
    assert program_main.make_nodes(host) == "device nodes: 8, made now: 8"
    status = host.status("/dev/nvidia1")
    assert status is not None
    assert (status.kind, status.major, status.minor, status.mode) == ("char", 195, 1, 0o666)
    assert program_main.make_nodes(host) == "device nodes: 8, made now: 0"


def test_without_a_driver_there_are_no_nodes_and_one_reads_why(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root", metal=True)
    with pytest.raises(GpuprovError, match="driver is not loaded"):
        program_main.make_nodes(host)


def test_refresh_writes_what_has_changed_and_nothing_else(host: FakeHost) -> None:
    assert program_main.refresh(host) == f"refreshed: {CDI} (it is missing)"
    assert difference(host.read_bytes(CDI) or b"", discover(host)) == ""
    before = host.status(CDI)
    assert program_main.refresh(host) == "nothing has changed"
    assert host.status(CDI) == before


def test_refresh_sees_another_driver(host: FakeHost) -> None:
    program_main.refresh(host)
    library = next(path for path in host.root.rglob("libnvidia-encode.so.*") if not path.is_symlink())
    library.unlink()
    assert "refreshed" in program_main.refresh(host)
    assert "libnvidia-encode" not in (host.read_text(CDI) or "")


def test_refresh_leaves_half_a_driver_alone(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "root")
    assert "is not whole" in program_main.refresh(host)
    assert not host.exists(CDI)


def test_refresh_fails_and_says_why_if_files_and_module_differ(host: FakeHost) -> None:
    """The unit that failed is the mark of a boot that went on without."""
    program_main.refresh(host)
    before = host.read_bytes(CDI)
    simgpu.write_kernel_tree(host.root, 2, "535.261.03")
    with pytest.raises(GpuprovError, match=r"files are 550\.163\.01, the loaded module is 535.261.03"):
        program_main.refresh(host)
    assert host.read_bytes(CDI) == before


MARKS = ("/run/reboot-required", "/run/reboot-needed", "/run/reboot-required.pkgs")


@pytest.mark.parametrize("others", ["", "linux-base\n"])
def test_refresh_marks_a_reboot_until_files_and_module_agree_again(host: FakeHost, others: str) -> None:
    for path in (MARKS[0], MARKS[2]) if others else ():
        host.write(path, others.encode())
    host.remove(CONTAINER)
    before = {path: host.read_bytes(path) for path in MARKS}
    program_main.refresh(host)
    assert {path: host.read_bytes(path) for path in MARKS} == before
    simgpu.write_kernel_tree(host.root, 2, "535.261.03")
    host.write("/run/gpuprov/driver", b"535.261.03")
    for _ in range(2):
        with pytest.raises(GpuprovError, match="reboot, or run"):
            program_main.refresh(host)
        assert host.read_text(MARKS[2]) == f"{others}nvidia-driver\n"
        assert host.read_text(MARKS[0]) == (others or host.read_text(MARKS[1])) != ""
    simgpu.write_kernel_tree(host.root, 2)
    program_main.refresh(host)
    after = {path: host.read_bytes(path) for path in MARKS}
    assert {path: after[path] for path in (MARKS[0], MARKS[2])} == {path: before[path] for path in (MARKS[0], MARKS[2])}


@pytest.mark.parametrize("file", ["", CONTAINER])
def test_no_reboot_is_marked_that_would_not_help(host: FakeHost, file: str) -> None:
    """They differed at the boot already, or the module is the container host's."""
    host.remove(CONTAINER)
    if file:
        program_main.refresh(host)
        host.write(file, b"lxc\n")
    simgpu.write_kernel_tree(host.root, 2, "535.261.03")
    if file:
        host.write("/run/gpuprov/driver", b"535.261.03")
    with pytest.raises(GpuprovError):
        program_main.refresh(host)
    assert not any(host.exists(path) for path in MARKS)


def test_refresh_leaves_the_specification_to_a_run_that_goes_on(host: FakeHost) -> None:
    assert host.path(LOCK_PATH).parent.is_dir()
    with try_lock(host) as ours:
        assert ours
        assert "a gpuprov run is going on" in program_main.refresh(host)
    assert not host.exists(CDI)


@pytest.mark.parametrize("target", ["/dev/null", "/gone", "gpuprov-nodes.service", "."])
def test_a_unit_that_leads_to_no_file_is_missing(host: FakeHost, target: str) -> None:
    """Masked; a link to nothing and to itself; to a folder."""
    for path in (boot.PROGRAM, *(f"{UNITS}/{name}" for name in (NODES, REFRESH, WATCH))):
        host.make_directory(parent_of(path))
        host.write(path, b"x")
    host.make_directory(boot.WANTS)
    for name in (NODES, REFRESH, WATCH):
        host.make_link(f"{boot.WANTS}/{name}", f"{UNITS}/{name}")
    assert boot.lacking(host) == ()
    host.make_directory("/dev")
    host.make_node("/dev/null", 1, 3, 0o666, 0)
    host.make_link(f"{UNITS}/{NODES}", target)
    assert boot.lacking(host) == (f"{UNITS}/{NODES}", f"{boot.WANTS}/{NODES}")

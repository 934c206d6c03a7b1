"""The agent's zipapp: the same bytes every time, nothing of the controller, nothing compiled, a folder of its own."""

import ast
import contextlib
import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from importlib.util import cache_from_source
from pathlib import Path

import pytest

import gpuprov
from gpuprov import protocol
from gpuprov.agent.probe import Probe, Python
from gpuprov.agent.push import UNREADABLE, agent_command, store_command, unfinished_problem
from gpuprov.core.commands import Completed
from gpuprov.fleet import agent_file
from gpuprov.fleet.agent_file import Agent, build_agent
from gpuprov.protocol.codec import dump
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.request import Request
from tools import zipapps
from tools.zipapps import AGENT_START, locked, main_program, pack

CLONE = Path(gpuprov.__file__).parents[1]
_DIGEST = "from gpuprov.fleet.agent_file import build_agent; print(build_agent().digest)"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Agent:
    return build_agent(tmp_path_factory.mktemp("cache"))


def names(agent: Agent) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(agent.content)).namelist()


def test_same_input_gives_the_same_bytes(tmp_path: Path, agent: Agent) -> None:
    assert build_agent(tmp_path).content == agent.content
    assert pack({"a": b"1", "b": b"2"}) == pack({"b": b"2", "a": b"1"})


def test_second_build_comes_from_the_cache(tmp_path: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    build_agent(tmp_path)
    next(tmp_path.iterdir()).write_bytes(b"half a fi")
    assert build_agent(tmp_path) == agent
    monkeypatch.setattr(zipapps, "pack", lambda files: pytest.fail("built again"))
    assert zipapps.agent(tmp_path) == agent.content


def test_agent_is_built_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: Agent) -> None:
    (tmp_path / "file").write_text("")
    assert build_agent(tmp_path / "file" / "cache") == agent
    # A home directory that is missing is not made.
    monkeypatch.setenv("HOME", str(tmp_path / "nonexistent"))
    assert build_agent() == agent
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def digest_with(packages: Path, *flags: str) -> str:
    """Return the digest of the agent that a Python with these packages first, in their folder, builds."""
    environment = {"PYTHONPATH": f"{packages}:{CLONE}", "HOME": str(packages)}
    argv = (sys.executable, *flags, "-c", _DIGEST)
    done = subprocess.run(argv, cwd=packages, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


def test_the_packages_of_the_controller_change_nothing(tmp_path: Path, agent: Agent) -> None:
    """Another requests comes first on this controller's path, and its own packages are out of sight."""
    (tmp_path / "requests-99.0.dist-info").mkdir()
    (tmp_path / "requests-99.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: requests\nVersion: 99.0\n")
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests/__init__.py").write_text("raise SystemExit('the packages of the controller were asked')")
    assert digest_with(tmp_path, "-S") == agent.digest


def test_another_package_of_the_name_tools_is_not_run(tmp_path: Path, agent: Agent) -> None:
    for name in ("__init__", "zipapps"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / f"tools/{name}.py").write_text("raise SystemExit('a foreign package was run')")
    assert digest_with(tmp_path) == agent.digest


def test_a_wheel_with_another_digest_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, *_) = (one for one in locked() if one.in_agent)
    (tmp_path / f"{first.name}-{first.version}-py3-none-any.whl").write_bytes(b"changed")
    monkeypatch.setattr(zipapps, "WHEELS", tmp_path)
    with pytest.raises(GpuprovError, match=f"the wheel of {first.name} {first.version} is missing") as caught:
        zipapps.agent(tmp_path)
    assert first.sha256 in str(caught.value) and "\n  next: `make setup` in " in str(caught.value)


def test_an_installed_wheel_brings_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_file, "__file__", str(tmp_path / "agent_file.py"))
    (tmp_path / agent_file.RELEASED).write_bytes(b"an agent")
    assert build_agent().content == b"an agent"


def test_what_travels_of_others_is_locked_and_keeps_its_licence(agent: Agent) -> None:
    folders = {name.split("/")[0] for name in names(agent) if ".dist-info/" in name}
    licensed = {name.split("/")[0] for name in names(agent) if ".dist-info/" in name and not name.endswith("METADATA")}
    wanted = {f"{one.name.replace('-', '_')}-{one.version}.dist-info" for one in locked() if one.in_agent}
    assert folders == wanted
    # NVIDIA's stands at the head of its one module.
    assert [name.partition("-")[0] for name in folders - licensed] == ["nvidia_ml_py"]
    assert "LICENSE" in names(agent)


def test_what_travels_of_gpuprov_is_these_folders_and_files(agent: Agent) -> None:
    parts = {name.split("/")[1] for name in names(agent) if name.startswith("gpuprov/")}
    assert parts == {
        "__init__.py", "agent", "boot", "bundle", "cdi", "checks", "core", "doctor", "driver", "driver_run.py",
        "engines", "facts", "machine", "packages", "plan", "repos.py", "runtime_hook",
        "toolkit.py", "verify.py", "protocol",
    }  # fmt: skip
    tables = {f"gpuprov/protocol/{path.name}" for path in Path(protocol.__file__).parent.glob("*.json")}
    assert len(tables) > 10
    assert {"gpuprov/agent/agent.py", *tables} <= set(names(agent))
    tops = {name.split("/")[0] for name in names(agent)}
    assert tops.isdisjoint({"click", "rich", "fabric", "paramiko", "ansible", "jinja2", "yaml"})


def test_no_module_that_travels_names_a_package_of_the_controller(agent: Agent) -> None:
    archive = zipfile.ZipFile(io.BytesIO(agent.content))
    ours = {name: archive.read(name).decode() for name in names(agent) if name.startswith("gpuprov/")}
    words = re.compile(r"^\s*(?:from|import) (click|rich|fabric|paramiko|ansible|jinja2)\b", re.MULTILINE)
    assert {name: words.findall(text) for name, text in ours.items() if words.search(text)} == {}


def test_nothing_compiled_and_no_trace_of_this_machine_travels(agent: Agent) -> None:
    assert not [name for name in names(agent) if name.endswith((".pyc", ".so"))]
    assert "charset_normalizer/md.py" in names(agent)
    entries = zipfile.ZipFile(io.BytesIO(agent.content)).infolist()
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
    assert {entry.external_attr >> 16 for entry in entries} == {0o100644}


# -- the way it starts ---------------------------------------------------------------------------------------------

SAY = b"import sys\ndef main(compile_late): print(__file__); return 5\n"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a zipapp with the agent's real start and hardly anything to start; its cache lies in tmp_path/place."""
    main, digest = main_program("agent", AGENT_START, {})
    start = re.sub(r"PLACE = .*", f"PLACE = {str(tmp_path / 'place')!r}", main.decode().replace(digest, "d1"))
    path = tmp_path / "agent.pyz"
    empty = {"gpuprov/__init__.py": b"", "gpuprov/agent/__init__.py": b""}
    path.write_bytes(pack({"__main__.py": start.encode(), **empty, "gpuprov/agent/agent.py": SAY}))
    return path


def start(path: Path) -> tuple[int, str]:
    done = subprocess.run((sys.executable, "-I", path), capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


def test_agent_unpacks_itself_once(small: Path, tmp_path: Path) -> None:
    assert start(small) == (5, f"{tmp_path}/place/agent-d1/gpuprov/agent/agent.py")
    inode = (tmp_path / "place/agent-d1").stat().st_ino
    assert start(small)[0] == 5
    assert (tmp_path / "place/agent-d1").stat().st_ino == inode
    assert (tmp_path / "place").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (tmp_path / "place").iterdir()] == ["agent-d1"]


@pytest.mark.parametrize("prepared", ["place/agent-d1", "place"])
def test_folder_that_others_may_write_is_not_trusted(small: Path, tmp_path: Path, prepared: str) -> None:
    evil = tmp_path / prepared
    (tmp_path / "place").mkdir(mode=0o700)
    evil.mkdir(exist_ok=True)
    evil.chmod(0o777)
    (evil / "planted").write_text("")
    assert start(small) == (5, f"{small}/gpuprov/agent/agent.py")


def test_link_in_place_of_the_folder_is_not_followed(small: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere/gpuprov/agent").mkdir(parents=True)
    (tmp_path / "elsewhere/gpuprov/agent/agent.py").write_text("def main(): return 99\n")
    (tmp_path / "place").mkdir(mode=0o700)
    (tmp_path / "place/agent-d1").symlink_to(tmp_path / "elsewhere")
    assert start(small)[0] == 5


def test_a_home_that_is_anothers_is_not_used(small: Path, tmp_path: Path) -> None:
    """Its owner could swap the folder for another one at any time."""
    home = tmp_path / "home"
    home.mkdir()
    if os.geteuid() == 0:
        os.chown(home, 65534, 65534)
    else:
        home.chmod(0o777)
    move(small, str(home / ".cache/gpuprov"))
    assert start(small) == (5, f"{small}/gpuprov/agent/agent.py")
    assert list(home.iterdir()) == []


@pytest.mark.root
def test_a_folder_below_one_that_a_group_may_write_is_not_used(small: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, 0, 50)
    cache.chmod(0o775)
    move(small, str(cache / "gpuprov"))
    assert start(small) == (5, f"{small}/gpuprov/agent/agent.py")
    assert list(cache.iterdir()) == []
    cache.chmod(0o755)
    assert start(small) == (5, f"{cache}/gpuprov/agent-d1/gpuprov/agent/agent.py")


def test_without_a_home_nothing_is_written(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then `~` stands for itself, and would be a folder in the current one."""
    monkeypatch.chdir(tmp_path)
    move(small, "~/.cache/gpuprov")
    assert start(small) == (5, f"{small}/gpuprov/agent/agent.py")
    assert [path.name for path in tmp_path.iterdir()] == ["agent.pyz"]


def test_a_damaged_file_is_a_sentence(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    with zipfile.ZipFile(small) as archive:
        place = archive.getinfo("gpuprov/agent/agent.py").header_offset + 60
    small.write_bytes(content[:place] + b"\0\0\0\0" + content[place + 4 :])
    done = subprocess.run((sys.executable, "-I", small), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{small} is damaged\n  seen: ")
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "place").iterdir()) == []


# Where the kernel delivers it → the exit status: by the signal itself, or after the half-unpacked folder is removed.
CTRL_C = {"os.geteuid": -signal.SIGINT, "zipfile.ZipFile.extractall": 130, "os.utime": -signal.SIGINT}


@pytest.mark.parametrize("place", CTRL_C)
def test_ctrl_c_while_it_unpacks_leaves_no_traceback_and_no_folder(small: Path, tmp_path: Path, place: str) -> None:
    code = (
        "import os, runpy, signal, sys, zipfile\n"
        f"{place} = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)\n"
        f"runpy.run_path({str(small)!r}, run_name='__main__')"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (CTRL_C[place], "", "")
    assert not list((tmp_path / "place").glob(".*"))


def test_the_folder_gets_its_name_when_its_files_are_on_the_disk(small: Path, tmp_path: Path) -> None:
    """After a power cut, files would be empty in a folder that each later run takes for whole."""
    code = (
        "import runpy, sys\n"
        "asked = {'ctypes.dlsym': lambda library, name: name, 'os.rename': lambda old, new, *_: new}\n"
        "sys.addaudithook(lambda event, words: event in asked and print(asked[event](*words)))\n"
        f"runpy.run_path({str(small)!r}, run_name='__main__')"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=60)
    steps = [line for line in done.stdout.splitlines() if line in ("syncfs", f"{tmp_path}/place/agent-d1")]
    assert steps == ["syncfs", f"{tmp_path}/place/agent-d1"]


def test_a_first_run_compiles_what_an_installation_imports_late(agent: Agent, tmp_path: Path) -> None:
    """The worker of this request ends before it imports any of it."""
    path = tmp_path / "agent.pyz"
    path.write_bytes(agent.content)
    move(path, str(tmp_path / "place"))
    request = dump(Request("install", spec={"driver": "nonsense"}))
    subprocess.run((sys.executable, "-I", path), input=f"{request}\n".encode(), timeout=300, stdout=subprocess.PIPE)
    (folder,) = (tmp_path / "place").iterdir()
    text = zipfile.ZipFile(path).read("__main__.py").decode()
    late = ast.literal_eval(text.partition("LATE = ")[2].partition("\n\n")[0])
    sources = {name: sorted((folder / name).glob("*.py")) for name in late}
    assert all(sources.values()), sources
    compiled = [Path(cache_from_source(one)) for found in sources.values() for one in found]
    until = time.monotonic() + 120
    while not all(one.exists() for one in compiled):  # the run itself does not wait for it
        assert time.monotonic() < until, [one for one in compiled if not one.exists()]
        time.sleep(0.1)


def move(small: Path, place: str) -> None:
    """Give the zipapp another cache."""
    with zipfile.ZipFile(small) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    text = files["__main__.py"].decode()
    files["__main__.py"] = re.sub(r"PLACE = .*", f"PLACE = {place!r}", text).encode()
    small.write_bytes(pack(files))


@pytest.mark.parametrize("gone", ["gpuprov/agent/agent.py", "gpuprov"])
def test_an_unpacked_agent_that_lacks_a_part_is_unpacked_again(small: Path, tmp_path: Path, gone: str) -> None:
    assert start(small)[0] == 5
    part = tmp_path / "place/agent-d1" / gone
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    assert start(small) == (5, str(tmp_path / "place/agent-d1/gpuprov/agent/agent.py"))
    assert [path.name for path in (tmp_path / "place").iterdir()] == ["agent-d1"]


def test_agents_unused_for_a_month_go(small: Path, tmp_path: Path) -> None:
    for name in ("agent-old", "agent-new", "other"):
        (tmp_path / "place" / name).mkdir(parents=True)
    (tmp_path / "place").chmod(0o700)
    os.utime(tmp_path / "place/agent-old", (0, 0))
    os.utime(tmp_path / "place/other", (0, 0))
    start(small)
    assert sorted(path.name for path in (tmp_path / "place").iterdir()) == ["agent-d1", "agent-new", "other"]


# -- how it comes to a host --------------------------------------------------------------------------------------------


AGENT = b"import sys; print('ran', sys.argv[0], sys.argv[1:], sys.stdin.read())"
DIGEST = hashlib.sha256(AGENT).hexdigest()
MINE = f"/root/.cache/gpuprov/agent-{DIGEST}.pyz"


class Account:
    """A login user's home, and root's, which a mount namespace puts in the place of /root."""

    def __init__(self, folder: Path) -> None:
        self.home, self.root = folder / "home", folder / "root"
        self.home.mkdir()
        self.root.mkdir()
        self.stored = self.home / f".cache/gpuprov/agent-{DIGEST}.pyz"
        self.probe = Probe("Linux x86_64", 1000, str(self.stored.parent), "", (Python(sys.executable, (3, 11, 2)),), 0)

    def store(self) -> None:
        command = store_command(DIGEST)
        subprocess.run(
            command, input=AGENT, check=True, timeout=30, env={"HOME": str(self.home), "PATH": "/usr/bin:/bin"}
        )

    def run(self, first: str = ":") -> subprocess.CompletedProcess[str]:
        command = (*agent_command(self.probe, DIGEST), "job")
        begin = f'{first}; mount --bind "$1" /root; shift; exec "$@"'
        enter = ("unshare", "--mount", "sh", "-c", begin, "sh", str(self.root))
        return subprocess.run(
            (*enter, *command), input="request", capture_output=True, text=True, timeout=30, check=False
        )


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return Account(tmp_path)


def test_a_home_directory_that_is_missing_is_not_made(account: Account, capfd: pytest.CaptureFixture[str]) -> None:
    account.home.rmdir()
    with pytest.raises(subprocess.CalledProcessError):
        account.store()
    assert f"there is no home directory {account.home}" in capfd.readouterr().err
    assert not account.home.exists()


@pytest.mark.root
def test_chroots_its_own_copy_of_what_the_user_stored(account: Account) -> None:
    account.store()
    ran = f"ran {MINE} ['job'] request\n"
    assert account.run().stdout == ran
    kept = account.root / MINE.removeprefix("/root/")
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    # Later, the user's file no longer counts.
    account.stored.write_bytes(b"print('hostile')")
    assert account.run().stdout == ran
    # A copy that is not whole is stored again.
    kept.write_bytes(AGENT[:10])
    account.stored.write_bytes(AGENT)
    assert account.run().stdout == ran


@pytest.mark.root
@pytest.mark.parametrize("place", ["FIFO", "FIFO with a writer", "/dev/zero"])
def test_root_reads_regular_files_only(account: Account, place: str) -> None:
    account.store()
    account.stored.unlink()
    with contextlib.ExitStack() as stack:
        if place == "/dev/zero":
            account.stored.symlink_to(place)
        else:
            os.mkfifo(account.stored)
            if place == "FIFO with a writer":
                stack.callback(os.close, os.open(account.stored, os.O_RDWR))
        done = account.run()
    assert (done.returncode, done.stdout) == (66, "")
    assert "the stored agent is not the one that was sent" in done.stderr


@pytest.mark.root
def test_hosts_that_share_a_home_store_the_agent_at_once(account: Account) -> None:
    # Each shell is process 1 of its own host.
    command = ("unshare", "--pid", "--fork", *store_command(DIGEST))
    environment = {"HOME": str(account.home), "PATH": "/usr/bin:/bin"}
    hosts = [subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) for _ in range(12)]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.enter_context(host)
            stack.callback(host.kill)
        for _ in range(1000):
            if len([*account.stored.parent.glob(".agent-*")]) == len(hosts):
                break
            time.sleep(0.01)
        ends = []
        for host in hosts:
            host.communicate(AGENT, timeout=30)
            ends.append(host.returncode)
    assert ends == [0] * len(hosts)
    assert account.stored.read_bytes() == AGENT


def write_aged(folder: Path, names: Sequence[str], newest: int = 1_700_000_000) -> None:
    """Write empty files, each a second older than the one before; by default older than one that is stored now."""
    folder.mkdir(parents=True, exist_ok=True)
    for age, name in enumerate(names):
        (folder / name).touch()
        os.utime(folder / name, (newest - age, newest - age))


@pytest.mark.root
def test_the_eight_newest_agents_stay_in_both_homes(account: Account) -> None:
    newest = {f"agent-{number}.pyz" for number in range(7)}
    others = {"bundle-old.tar", "local-agent.pyz", "agent-unpacked"}
    folders = (account.stored.parent, account.root / ".cache/gpuprov")
    for folder in folders:
        (folder / "agent-unpacked").mkdir(parents=True)
        write_aged(folder, [*sorted(newest), ".agent-9", "agent-8.pyz", *others])
    account.store()
    assert account.run().returncode == 0
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {*newest, *others, account.stored.name}


@pytest.mark.root
def test_an_agent_stays_on_a_host_whose_clock_is_behind(account: Account) -> None:
    for folder in (account.stored.parent, account.root / ".cache/gpuprov"):
        write_aged(folder, [f"agent-{number}.pyz" for number in range(8)], newest=4_000_000_000)
    account.store()
    assert account.run().stdout == f"ran {MINE} ['job'] request\n"
    assert not (account.stored.parent / "agent-7.pyz").exists()


@pytest.mark.root
def test_large_agents_are_fewer_and_the_newest_stays(account: Account) -> None:
    names = [f"agent-{number}.pyz" for number in range(4)]
    write_aged(account.stored.parent, names)
    for name, size in zip(names, (30 << 20, 30 << 20, 30 << 20, 1)):
        os.truncate(account.stored.parent / name, size)
    write_aged(account.stored.parent, names)
    account.store()
    assert {path.name for path in account.stored.parent.iterdir()} == {*names[:2], account.stored.name}


@pytest.mark.root
@pytest.mark.parametrize("content", [b"print('hostile')", AGENT + b" ", b"", None])
def test_root_does_not_run_what_the_user_replaced(account: Account, content: bytes | None) -> None:
    account.store()
    if content is None:
        account.stored.unlink()
        account.stored.symlink_to("/etc/shadow")
    else:
        account.stored.write_bytes(content)
    done = account.run()
    assert (done.returncode, done.stdout) == (66, "")
    assert "the stored agent is not the one that was sent" in done.stderr
    assert list((account.root / ".cache/gpuprov").iterdir()) == []


@pytest.mark.root
def test_a_full_disk_of_roots_is_named(account: Account) -> None:
    account.store()
    done = account.run('mount -t tmpfs -o size=4k none "$1"; head -c 4k /dev/zero > "$1/full"')
    assert (done.returncode, done.stdout) == (UNREADABLE, "")
    assert "No space left on device" in done.stderr


@pytest.mark.root
def test_what_root_makes_in_a_users_home_is_that_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `sudo -E`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    os.chown(tmp_path, 65534, 65534)
    agent_file.keep(tmp_path / ".cache/gpuprov/agent.pyz", AGENT)
    folders = (tmp_path / ".cache", tmp_path / ".cache/gpuprov")
    assert [(one.stat().st_uid, one.stat().st_gid) for one in folders] == [(65534, 65534)] * 2


def test_sudo_that_lets_no_program_start_another_one_ends_the_agent() -> None:
    done = Completed(("sudo",), 126, "", "sh: 1: exec: sh: Permission denied\n")
    assert "(NOEXEC)" in unfinished_problem(done, []).what

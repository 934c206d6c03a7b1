"""What a host gets: a launcher, modules that stand alone and import little, byte code that belongs to them."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook import deploy
from gpuprov.runtime_hook.deploy import (
    LAUNCHER_PATH,
    LIBRARY_PATH,
    NVIDIA_HOOK_PATH,
    bytecode_is_current,
    compile_bytecode,
    deployed_files,
    render_hook,
    render_launcher,
)
from gpuprov.runtime_hook.driver_files import HOOK_PATH
from tests.files import put

# Each costs milliseconds at every container start.
EXPENSIVE = {
    "collections", "contextlib", "ctypes", "dataclasses", "enum", "functools", "importlib.util", "json", "logging",
    "pathlib", "re", "shutil", "signal", "subprocess", "tempfile", "typing",
}  # fmt: skip
PYTHON = "/usr/bin/python3.11"
SOURCES = Path(__file__).parents[3] / "gpuprov/runtime_hook"


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """The deployed package, alone below a folder of its own."""
    for path, mode, content in deployed_files(PYTHON):
        put(tmp_path / path.lstrip("/"), content, mode)
    return tmp_path / LIBRARY_PATH.lstrip("/") / "runtime_hook"


def isolated(modules: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code as the launcher runs the package."""
    start = f"import sys; sys.path.insert(0, {str(modules.parent)!r}); {code}"
    argv = (sys.executable, "-I", "-S", "-E", "-B", "-c", start, *arguments)
    return subprocess.run(argv, cwd="/", capture_output=True, text=True, check=False)


def test_everything_but_what_deploys_is_deployed() -> None:
    files = {path: (mode, content) for path, mode, content in deployed_files(PYTHON)}
    programs = {
        LAUNCHER_PATH: render_launcher(PYTHON),
        HOOK_PATH: render_hook(PYTHON),
        NVIDIA_HOOK_PATH: render_hook(PYTHON),
    }
    assert set(files) == {
        *programs,
        *(f"{LIBRARY_PATH}/runtime_hook/{path.name}" for path in SOURCES.glob("*.py") if path.stem != "deploy"),
    }
    assert {path: files[path] for path in programs} == {path: (0o755, text.encode()) for path, text in programs.items()}
    assert set(files) - {path for path, _, _ in deployed_files(PYTHON, docker_hook=False)} == {NVIDIA_HOOK_PATH}
    for path, (mode, content) in files.items():
        if path not in programs:
            assert mode == 0o644
            assert content == (SOURCES / path.rpartition("/")[2]).read_bytes()


def test_what_is_deployed_needs_nothing_else_of_gpuprov() -> None:
    for path, _, content in deployed_files(PYTHON):
        if not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("gpuprov") for name in node.names), path
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= 1, path
                assert not (node.module or "").startswith("gpuprov"), path


def test_every_deployed_module_imports_in_isolation(modules: Path) -> None:
    names = ", ".join(f"runtime_hook.{path.stem}" for path in modules.glob("*.py") if path.stem != "__init__")
    done = isolated(modules, f"import {names}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.root
@pytest.mark.parametrize("environment", ["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=void"])
def test_a_create_imports_nothing_expensive(modules: Path, tmp_path: Path, environment: str) -> None:
    """Up to the very exec, which the interpreter's audit hook sees."""
    compile_bytecode(str(modules))
    specification = tmp_path / "cdi/nvidia.json"
    specification.parent.mkdir()
    (tmp_path / "rootfs").mkdir()
    node = {"path": "/dev/nvidia0", "major": 195, "minor": 0}
    mounts = [{"hostPath": "/x", "containerPath": "/usr/lib64/libcuda.so.1", "options": ["ro"]}]
    devices = [{"name": "0", "containerEdits": {"deviceNodes": [node]}}]
    document: dict[str, Any] = {
        "kind": "nvidia.com/gpu",
        "devices": devices,
        "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "mounts": mounts},
    }
    words = ["gpuprov-container-runtime-hook", "createContainer", "--host-driver-version", "550.163.01"]
    words += ["--host-cuda-version", "12.4", "--link", "libcuda.so.1::/usr/lib64/libcuda.so"]
    document["containerEdits"]["hooks"] = [{"hookName": "createContainer", "path": f"/{words[0]}", "args": words}]
    specification.write_text(json.dumps(document))
    settings = tmp_path / "settings.toml"
    settings.write_text(f"[nvidia-container-runtime.modes.cdi]\nspec-dirs = ['{specification.parent}']\n")
    process = {"env": [environment, "NVIDIA_REQUIRE_CUDA=cuda>=12.0"]}
    (tmp_path / "config.json").write_text(json.dumps({"process": process, "root": {"path": "rootfs"}}))
    code = (
        "hook = lambda event, _: event == 'os.exec' and (print(*sys.modules), sys.stdout.flush()); "
        "sys.addaudithook(hook); import runtime_hook.main as main; "
        f"main.record.FOLDER = {str(tmp_path / 'run/containers')!r}; "
        f"main.prepare.__defaults__ = (({str(settings)!r}, '/none'),); "
        "main.main('/bin/true', sys.argv[3], '', sys.argv[1:])"
    )
    done = isolated(modules, code, "create", "--bundle", str(tmp_path), "id")
    assert (done.returncode, done.stderr) == (0, "")
    imported = set(done.stdout.split())
    assert "runtime_hook.edits" in imported
    assert imported & EXPENSIVE == set()
    equipped = "linux" in json.loads((tmp_path / "config.json").read_text())
    assert equipped is (environment == "NVIDIA_VISIBLE_DEVICES=0")


def test_byte_code_is_current_until_a_source_changes(modules: Path) -> None:
    assert not bytecode_is_current(str(modules))
    mask = os.umask(0o077)
    compile_bytecode(str(modules))
    os.umask(mask)
    # Rootless engines read it too.
    assert {path.stat().st_mode & 0o777 for path in (modules / "__pycache__").iterdir()} == {0o644}
    assert bytecode_is_current(str(modules))
    source = modules / "errors.py"
    content = source.read_bytes()
    source.write_bytes(content + b"# changed\n")
    assert not bytecode_is_current(str(modules))
    source.write_bytes(content)
    assert bytecode_is_current(str(modules))


def bundle_of(modules: Path, name: str) -> Path:
    (bundle,) = [path for path in (modules / "__pycache__").glob(f"{name}.*") if path.suffix != ".pyc"]
    return bundle


SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "another Python's": lambda content: b"\0\0\r\n" + content[4:],
    "unchecked": lambda content: content[:4] + b"\1\0\0\0" + content[8:],
    "a bundle of an older version": lambda content: b"\0" + content[1:],
}


@pytest.mark.parametrize("spoil", ["missing", *SPOILT])
def test_spoilt_byte_code_is_not_current(modules: Path, spoil: str) -> None:
    compile_bytecode(str(modules))
    (compiled,) = (modules / "__pycache__").glob("main.*.pyc")
    if "bundle" in spoil:
        compiled = bundle_of(modules, "main")
    content = compiled.read_bytes()
    compiled.unlink()
    if spoil in SPOILT:
        compiled.write_bytes(SPOILT[spoil](content))
    assert not bytecode_is_current(str(modules))
    compile_bytecode(str(modules))
    assert compiled.read_bytes() == content


@pytest.mark.parametrize("name", ["main", "hook_main"])
def test_a_start_loads_all_modules_from_one_file(modules: Path, name: str) -> None:
    compile_bytecode(str(modules))
    bundle, text = bundle_of(modules, name), deploy.render_start(name, str(modules.parent))
    watch = "import sys; sys.addaudithook(lambda event, words: event == 'open' and print(words[0]))\n"
    opened = isolated(modules, f"exec({watch + text!r})").stdout.split()
    assert str(bundle) in opened
    assert [path for path in opened if path.startswith(str(modules)) and path != str(bundle)] == []
    content = bundle.read_bytes()
    assert b"Gets" not in content and b"__future__" not in content
    bundle.unlink()
    assert not bytecode_is_current(str(modules))
    again = isolated(modules, f"exec({text!r}); print(main)")
    assert (again.returncode, again.stdout.startswith("<function main")) == (0, True)


@pytest.mark.parametrize("name", ["main", "hook_main"])
def test_a_start_during_compilation_reads_a_whole_file(modules: Path, name: str) -> None:
    compile_bytecode(str(modules))
    bundle = bundle_of(modules, name)
    before = bundle.read_bytes()
    with (modules / "errors.py").open("a") as source, bundle.open("rb") as reading:
        source.write("ANOTHER = 1\n")
        source.flush()
        compile_bytecode(str(modules))
        assert bundle.read_bytes() != before
        assert reading.read() == before
    assert len(list((modules / "__pycache__").glob(f"{name}.*"))) == 2


def test_an_edited_module_counts_at_the_next_start_in_spite_of_its_byte_code(modules: Path) -> None:
    compile_bytecode(str(modules))
    source = modules / "errors.py"
    status = source.stat()
    source.write_bytes(source.read_bytes() + b"EDITED = 1\n")
    done = isolated(modules, "import runtime_hook.errors as e; print(e.EDITED)")
    assert done.stdout == "1\n", done.stderr
    assert source.stat().st_mode == status.st_mode


LAUNCHER = render_launcher(PYTHON, "/usr/lib/gpuprov", ("runc", "/opt/crun"))


@pytest.mark.parametrize("text", [render_hook(PYTHON), LAUNCHER], ids=["hook", "launcher"])
def test_a_program_is_plain_shell_that_isolates_its_python(text: str) -> None:
    assert text.startswith("#!/bin/sh\n") and f"\npython={PYTHON}\n" in text
    assert re.search(r"""^ *exec "\$python" -I -S -E -B -c 'import sys$""", text, re.MULTILINE)
    assert subprocess.run(("sh", "-n"), input=text, text=True, check=False).returncode == 0


def test_the_launcher_has_fixed_paths() -> None:
    assert "for low_level in /usr/local/sbin/runc /usr/local/bin/runc /usr/sbin/runc /usr/bin/runc " in LAUNCHER
    assert " /opt/crun " in LAUNCHER and 'sys.path.append("/usr/lib/gpuprov")\n' in LAUNCHER


def test_the_launcher_says_so_where_there_is_no_low_level_runtime(tmp_path: Path) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(render_launcher(PYTHON, low_level=(f"{tmp_path}/none",)))
    done = subprocess.run(("sh", str(launcher), "state", "x"), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "gpuprov: neither runc nor crun is installed: install the package runc\n"


# -- the launcher reads the command line: which call is a create, which bundle and log it names -----------------------


@pytest.fixture
def called(tmp_path: Path) -> Callable[..., list[str]]:
    """Run the launcher, and return who was started and with what words, or what was said instead."""
    for name, skipped in (("python", 6), ("runc", 0)):
        put(tmp_path / name, f'#!/bin/sh\nshift {skipped}\nprintf "%s\\n" {name} "$@"\n', 0o755)
    launcher = tmp_path / "launcher"
    launcher.write_text(render_launcher(str(tmp_path / "python"), low_level=(str(tmp_path / "runc"),)))

    def call(*words: str) -> list[str]:
        # No bundle is there: what can't be read comes to Python, too.
        done = subprocess.run(("sh", launcher, *words), capture_output=True, text=True, check=False, cwd=tmp_path)
        return (done.stdout or done.stderr).splitlines()

    return call


@pytest.mark.parametrize(
    ("words", "create"),
    [
        ("create", True),
        ("create --bundle /b id", True),
        ("--root /r --log /l --log-format json --systemd-cgroup create --bundle /b --pid-file /p id", True),
        ("--root=/r create id", True),
        ("--root create create id", True),
        ("--log state create id", True),
        ("create --bundle /b create", True),
        ("create --bundle create id", True),
        ("-b create create id", True),
        ("--unknown-flag value create id", True),
        ("", False),
        ("state id", False),
        ("--version", False),
        # A container, or what runs in it, by that name.
        ("state create", False),
        ("--root /r --log /l --log-format json --systemd-cgroup delete --force create", False),
        ("kill create 9", False),
        ("exec id create", False),
        ("run --bundle create id", False),
        ("--root create state id", False),
        # A flag's value that looks like a flag with a value.
        ("--log --log create id", True),
        ("--root --bundle create id", True),
        ("--bundle create id", False),
        ("created", False),
    ],
)
def test_which_call_is_a_create(called: Callable[..., list[str]], words: str, create: bool) -> None:
    assert called(*words.split())[0] == ("python" if create else "runc")


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("create id", ""),
        ("create --bundle /b id", "/b"),
        ("create --bundle=/b=c id", "/b=c"),
        ("create -b /b id", "/b"),
        ("create -b=/b id", "/b"),
        ("create -bundle /b id", "/b"),
        ("create -bundle=/b id", "/b"),
        ("create --bundle /a -b /b id", "/b"),
        ("create --bundle= id", ""),
        ("create --bundles /b id", ""),
    ],
)
def test_the_bundle_that_a_call_names(called: Callable[..., list[str]], words: str, folder: str) -> None:
    assert called(*words.split())[2] == (folder or ".")


@pytest.mark.parametrize(
    ("words", "log"),
    [("--log /l create id", "/l"), ("--log=/l create id", "/l"), ("create id", ""), ("--root --log create id", "")],
)
def test_the_log_that_a_call_names(called: Callable[..., list[str]], words: str, log: str) -> None:
    assert called(*words.split())[3] == log


@pytest.mark.parametrize("flag", ["-b", "-bundle", "--bundle"])
def test_a_bundle_flag_without_a_folder_is_refused(called: Callable[..., list[str]], flag: str) -> None:
    assert called("create", flag) == [f"gpuprov: {flag} stands without a folder"]


def test_a_node_without_runc_on_its_path_has_that_of_its_engine() -> None:
    """CRI-O's packages, k3s, RKE2 and MicroK8s bring their own: each pod of the handler nvidia was refused."""
    places = render_launcher(PYTHON).partition("for low_level in ")[2].partition(";")[0].split()
    own = ("/usr/libexec/crio/{}", "/var/lib/rancher/k3s/data/current/bin/{}", "/var/lib/rancher/rke2/bin/{}",
           "/snap/microk8s/current/bin/{}")  # fmt: skip
    assert places[11:] == ["/bin/crun", *(path.format(name) for name in ("runc", "crun") for path in own)]

"""gpuprov-host.pyz: the commands for one machine in one file, on each Python of this machine from 3.9 on."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from gpuprov.cli.main import cli
from tests.pythons import VERSIONS, interpreter, too_old
from tools import host_packages, host_program, linux_packages
from tools.host_packages import OLDEST_PYTHON
from tools.zipapps import locked, wheels

_PYPROJECT = Path(host_program.__file__).parents[1] / "pyproject.toml"
# rich needs them for Markdown and for source code, neither of which gpuprov prints.
_LEFT_OUT = {"pygments", "markdown-it-py"}
# Imports all of gpuprov from the file that it is given, but the programs that run in containers.
_IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import gpuprov
names = [one.name for one in pkgutil.walk_packages(gpuprov.__path__, "gpuprov.") if not one.name.endswith("_program")]
for name in names:
    importlib.import_module(name)
print(len(names), sorted({"ansible", "fabric", "paramiko"} & set(sys.modules)))
"""
# `make test` takes the oldest.
_EACH = [pytest.param(path, marks=[pytest.mark.slow] if number else []) for number, path in enumerate(VERSIONS)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program, built."""
    path = tmp_path_factory.mktemp("program") / host_program.NAME
    path.write_bytes(host_program.build())
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home in which the program has been unpacked once for all tests."""
    return tmp_path_factory.mktemp("home")


def run(
    python: str, program: Path, *words: object, home: Path, limit: str = "unlimited"
) -> subprocess.CompletedProcess[str]:
    """Run it where /var/cache is an empty folder, for root too; `limit`: the bytes that a file may have."""
    argv = ("prlimit", f"--fsize={limit}:", python, str(program), *map(str, words))
    if os.geteuid() == 0:
        (home / "cache").mkdir(exist_ok=True)
        empty = ("sh", "-c", 'mount --bind "$0" /var/cache && exec "$@"', str(home / "cache"))
        argv = ("unshare", "--mount", *empty, *argv)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    return subprocess.run(argv, env=environment, cwd=home, capture_output=True, text=True, timeout=120, check=False)


def test_the_same_sources_give_the_same_bytes(program: Path) -> None:
    assert program.read_bytes() == host_program.build()


def test_what_is_inside_is_pinned_whole_and_runs_on_the_oldest_python() -> None:
    environment = {"python_version": OLDEST_PYTHON, "python_full_version": f"{OLDEST_PYTHON}.0", "extra": ""}
    versions = {one.name: one.version for one in locked()}
    in_agent = {one.name for one in locked() if one.in_agent}
    for name, wheel in wheels(locked()).items():
        found = host_packages.metadata_of(wheel)
        assert canonicalize_name(found["Name"]) == name
        assert found["Version"] == versions[name]
        assert SpecifierSet(found["Requires-Python"] or "").contains(OLDEST_PYTHON), name
        for line in found.get_all("Requires-Dist") or ():
            needed = Requirement(line)
            other = canonicalize_name(needed.name)
            if other not in _LEFT_OUT and (needed.marker is None or needed.marker.evaluate(environment)):
                assert needed.specifier.contains(versions[other]), f"{name} needs {line}"
                assert other in in_agent or name not in in_agent, f"{name} needs {line}"


def test_the_versions_are_those_that_the_package_asks_for() -> None:
    text = _PYPROJECT.read_text()
    versions = {one.name: one.version for one in locked()}
    asked = tomllib.loads(text)["project"]["dependencies"]
    needed = {canonicalize_name(one.name): one.specifier for one in map(Requirement, asked)}
    assert set(needed) - set(versions) == {"ansible-core", "cryptography", "fabric"}
    assert [name for name, specifier in needed.items() if name in versions and versions[name] not in specifier] == []
    on_hosts = set(re.findall(r'"([a-z0-9-]+)[^"]*",\s+# \[host\]', text))
    below = {"certifi", "charset-normalizer", "idna", "packaging"}
    assert {one.name for one in locked() if one.in_agent} - on_hosts == below


def test_the_controller_may_take_every_newer_release() -> None:
    """A host's agent has the locked ones. A run on this machine alone copies pyelftools into boot.pyz."""
    asked = map(Requirement, tomllib.loads(_PYPROJECT.read_text())["project"]["dependencies"])
    assert [one.name for one in asked if {each.operator for each in one.specifier} != {">="}] == ["pyelftools"]


def test_each_package_brings_its_licence_and_nothing_is_compiled(program: Path) -> None:
    names = zipfile.ZipFile(program).namelist()
    folders = {name.split("/")[0] for name in names if ".dist-info/" in name}
    licences = {name.split("/")[0] for name in names if ".dist-info/" in name and not name.endswith("METADATA")}
    assert len(folders) == len(locked())
    # NVIDIA's stands at the head of its one module.
    assert {name.partition("-")[0] for name in folders - licences} == {"nvidia_ml_py"}
    assert b"Redistribution and use in source and binary forms" in zipfile.ZipFile(program).read("pynvml.py")
    assert [name for name in names if name.endswith((".so", ".pyc", ".pyd", ".c"))] == []
    assert "LICENSE" in names


def contents(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file in a zip, and of each file in the zips in it."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            yield name, (inner := archive.read(name))
            yield from contents(inner) if zipfile.is_zipfile(io.BytesIO(inner)) else ()


@pytest.mark.parametrize("kind", ["wheel", "deb"])
def test_a_package_holds_nothing_of_one_architecture(tmp_path: Path, kind: str) -> None:
    if kind == "wheel":
        argv = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
        subprocess.run(argv, cwd=_PYPROJECT.parent, check=True, capture_output=True)
        (path,) = tmp_path.glob("*-py3-none-any.whl")
        files = dict(contents(path.read_bytes()))
        assert any(b"Root-Is-Purelib: true" in text for name, text in files.items() if name.endswith("/WHEEL"))
    else:
        linux_packages._build_deb(tmp_path, tmp_path / "work", 1_790_000_000)
        path = tmp_path / linux_packages.DEB
        field = subprocess.run(("dpkg-deb", "-f", path, "Architecture"), check=True, capture_output=True).stdout
        assert field == b"all\n"
        tree = subprocess.run(("dpkg-deb", "--fsys-tarfile", path), check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(tree)) as archive:
            files = {one.name: archive.extractfile(one).read() for one in archive if one.isfile()}  # type: ignore[union-attr]
        files.update(contents(files["./usr/bin/gpuprov"]))
    assert any(name.endswith("gpuprov/verify.py") for name in files)
    assert [name for name in files if re.search("x86[_-]64|amd64|aarch64|arm64", name)] == []
    assert [name for name, text in files.items() if text.startswith(b"\x7fELF")] == []


@pytest.mark.parametrize("python", _EACH, indirect=True)
def test_a_disk_that_was_full_once_leaves_no_half_byte_code(python: str, program: Path, tmp_path: Path) -> None:
    """A limit of file sizes cuts a write off as a full disk does; Python 3.11 keeps what was written."""
    run(python, program, "--version", home=tmp_path)
    for folder in list(tmp_path.rglob("__pycache__")):
        shutil.rmtree(folder)
    assert run(python, program, "--version", home=tmp_path, limit="9000").returncode == 0
    done = run(python, program, "--version", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(path.stat().st_size for path in tmp_path.rglob("*.pyc")) > 9000


@pytest.mark.parametrize("python", _EACH, indirect=True)
def test_every_module_can_be_imported(python: str, program: Path) -> None:
    argv = (python, "-I", "-B", "-c", _IMPORT_ALL, str(program))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    count, _, others = done.stdout.strip().partition(" ")
    assert int(count) > 200
    assert others == "[]"


@pytest.mark.parametrize("python", _EACH, indirect=True)
def test_it_answers(python: str, program: Path, home: Path) -> None:
    shown = run(python, program, "--help", home=home)
    assert shown.returncode == 0, shown.stderr
    assert all(f"\n  {name} " in shown.stdout for name in cli.commands)
    facts = run(python, program, "facts", "-e", "gpuprov_engines='[docker]'", home=home)
    assert facts.returncode == 2
    assert "gpuprov_engines" in facts.stderr
    facts = run(python, program, "facts", "-e", "gpuprov_driver_version=580.178.04", "--report", "page.html",
                "--metrics", "run.prom", home=home)  # fmt: skip
    assert facts.returncode == 0, facts.stderr
    assert "facts of 1 host" in facts.stdout
    assert "</html>" in (home / "page.html").read_text()
    assert "gpuprov_host_" in (home / "run.prom").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("facts", "--hosts", "a,b"),
        ("hook", "explain", "container", "--hosts", "inventory.ini"),
        ("bundle", "create", "--distro", "debian-12", "-o", "bundle.tar"),
        ("playbooks", "folder"),
        ("agent", "build", "-o", "agent.pyz"),
    ],
    ids=" ".join,
)
def test_what_needs_the_whole_program_says_so(words: tuple[str, ...], program: Path, home: Path) -> None:
    done = run(interpreter(VERSIONS[0]), program, *words, home=home)
    assert done.returncode == 2
    assert "the whole gpuprov" in done.stderr.splitlines()[0]
    assert "next: on a machine with Python 3.11 or later: pip install" in done.stderr


def test_an_extra_variable_for_ansible_alone_says_so(program: Path, home: Path) -> None:
    done = run(interpreter(VERSIONS[0]), program, "facts", "-e", "gpuprov_toolkit={{ other }}", home=home)
    assert done.returncode == 2
    assert "templates and vaults need the whole gpuprov" in done.stderr


def test_the_packages_program_starts_a_newer_python_where_python3_is_older(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "gpuprov"
    path.write_bytes(linux_packages.program())
    done = run(too_old(), path, "--version", home=home)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("gpuprov, version ")


def test_an_older_python_is_told_what_is_needed(program: Path, home: Path) -> None:
    done = run(too_old(), program, "facts", home=home)
    assert done.returncode == 1
    assert done.stderr.startswith("gpuprov needs Python 3.9 or later\n  seen: ")
    assert "  next: install a newer Python" in done.stderr

"""What `make release` builds: the same bytes twice, and a wheel that brings the playbooks."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from gpuprov import __version__
from gpuprov.cli.playbooks import write_playbooks
from gpuprov.protocol.errors import GpuprovError, UsageError
from tools.zipapps import locked

CLONE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (CLONE / ".git").exists(), reason="needs a clone: a release takes the commit's time"
)


def build(clone: Path, folder: Path, **more: str) -> dict[str, bytes]:
    environment = {**os.environ, "PYTHONPATH": str(clone), **more}
    subprocess.run((sys.executable, "-m", "tools.release", str(folder)), cwd=clone, env=environment, check=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def clone_and_build(folder: Path, **more: str) -> dict[str, bytes]:
    subprocess.run(("git", "clone", "-q", str(CLONE), str(folder / "clone")), check=True)
    return build(folder / "clone", folder / "dist", **more)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of a release of the last commit."""
    folder = tmp_path_factory.mktemp("release")
    clone_and_build(folder)
    return folder / "dist"


@pytest.mark.slow
def test_another_clone_of_the_same_commit_gives_the_same_bytes(release: Path, tmp_path: Path) -> None:
    # As distributions that rebuild packages set it.
    time = subprocess.run(("git", "log", "-1", "--format=%ct"), cwd=CLONE, check=True, capture_output=True, text=True)
    again = clone_and_build(tmp_path, SOURCE_DATE_EPOCH=time.stdout.strip())
    assert len(again) == 9
    assert {path.name: path.read_bytes() for path in release.iterdir()} == again


@pytest.mark.slow
def test_the_sums_are_right_and_the_sbom_names_what_the_programs_hold(release: Path) -> None:
    subprocess.run(("sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"), cwd=release, check=True)
    (path,) = release.glob("*.cdx.json")
    bom = json.loads(path.read_text())
    assert bom["bomFormat"] == "CycloneDX"
    named = {(one["name"], one["version"]) for one in bom["components"]}
    assert named == {(one.name, one.version) for one in locked()}
    assert all(one["version"] and one["purl"].startswith("pkg:pypi/") for one in bom["components"])


@pytest.mark.slow
@pytest.mark.parametrize("words", [("pipx", "install"), ("uv", "tool", "install")], ids=["pipx", "uv"])
def test_tools_that_install_programs_take_the_wheel(release: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """pipx and uv, from PyPI, into this test's own folder."""
    (wheel,) = release.glob("*.whl")
    tool, *install = words
    subprocess.run((sys.executable, "-m", "venv", tmp_path / "tools"), check=True)
    subprocess.run((tmp_path / "tools/bin/pip", "install", "-q", "--disable-pip-version-check", tool), check=True)
    names = ("PIPX_HOME", "PIPX_BIN_DIR", "UV_TOOL_DIR", "UV_TOOL_BIN_DIR", "UV_CACHE_DIR", "HOME")
    own = {**{name: str(tmp_path / name) for name in names}, "UV_NATIVE_TLS": "1", "UV_PYTHON": sys.executable}
    environment = {**os.environ, **own}
    done = subprocess.run(
        (tmp_path / "tools/bin" / tool, *install, wheel), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (program,) = (path for name in ("PIPX_BIN_DIR", "UV_TOOL_BIN_DIR") for path in (tmp_path / name).glob("gpuprov"))
    for argv, expected in ((("--version",), f"version {__version__}"), (("facts",), "facts of 1 host")):
        called = subprocess.run((program, *argv), env=environment, capture_output=True, text=True, check=False)
        assert called.returncode == 0 and expected in called.stdout, called.stdout + called.stderr


@pytest.mark.slow
def test_playbooks_from_the_wheel_run(release: Path, tmp_path: Path) -> None:
    (wheel,) = release.glob("*.whl")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-compile",
        "--prefix",
        str(tmp_path / "installed"),
    )
    subprocess.run(
        (*pip, "--ignore-installed", "--disable-pip-version-check", "--root-user-action=ignore", wheel), check=True
    )
    (packages,) = (tmp_path / "installed").rglob("gpuprov/__init__.py")
    environment = {**os.environ, "PYTHONPATH": str(packages.parents[1]), "HOME": str(tmp_path)}
    gpuprov = (sys.executable, "-P", "-m", "gpuprov")
    subprocess.run((*gpuprov, "playbooks", str(tmp_path / "hosts")), env=environment, cwd=tmp_path, check=True)
    written = tmp_path / "hosts/playbooks"
    expected = {path for path in (release.parent / "clone/playbooks").rglob("*.yml") if "collections" not in path.parts}
    assert {
        release.parent / "clone/playbooks" / path.relative_to(written) for path in written.rglob("*.yml")
    } == expected
    ansible = Path(sys.executable).with_name("ansible-playbook")
    argv = (ansible, "-i", "localhost,", "-c", "local", "playbooks/facts.yml")
    done = subprocess.run(argv, cwd=tmp_path / "hosts", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "GPU" in done.stdout
    # SHA256SUMS names the one agent that reaches hosts, by wheel or collection.
    (agent,) = release.glob("gpuprov-agent-*.pyz")
    (collection,) = release.glob("gpuprov-host-*.tar.gz")
    with tarfile.open(collection) as archive:
        packed = archive.extractfile("files/gpuprov-agent.pyz")
        assert packed and packed.read() == agent.read_bytes()
    assert (written / "files/gpuprov-agent.pyz").read_bytes() == agent.read_bytes()


def test_an_upgrade_replaces_playbooks_and_keeps_the_inventory(tmp_path: Path) -> None:
    assert len(write_playbooks(tmp_path)) == 3
    (tmp_path / "playbooks/old.yml").touch()
    (tmp_path / "inventories/example/hosts.yml").write_text("mine: {}\n")
    assert write_playbooks(tmp_path) == (tmp_path / "playbooks",)
    assert not (tmp_path / "playbooks/old.yml").exists()
    assert (tmp_path / "inventories/example/hosts.yml").read_text() == "mine: {}\n"


def test_somebody_elses_playbooks_stay(tmp_path: Path) -> None:
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks/site.yml").touch()
    with pytest.raises(UsageError, match="was not written by gpuprov"):
        write_playbooks(tmp_path)
    assert (tmp_path / "playbooks/site.yml").exists()


def test_a_link_is_not_followed_and_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    write_playbooks(tmp_path / "elsewhere")
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts/playbooks").symlink_to(tmp_path / "elsewhere/playbooks")
    with pytest.raises(GpuprovError, match="was not written by gpuprov"):
        write_playbooks(tmp_path / "hosts")
    assert (tmp_path / "elsewhere/playbooks/site.yml").exists()
    (tmp_path / "file").touch()
    with pytest.raises(GpuprovError, match="can't be written into"):
        write_playbooks(tmp_path / "file")


def test_without_a_clone_a_time_is_asked_for(tmp_path: Path) -> None:
    environment = {**os.environ, "GIT_DIR": str(tmp_path / "none"), "SOURCE_DATE_EPOCH": ""}
    words = (sys.executable, "-c", "from tools.release import release_time; release_time()")
    done = subprocess.run(words, cwd=CLONE, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 2), done.stderr
    assert "next: export SOURCE_DATE_EPOCH=SECONDS" in done.stderr


def test_a_folder_that_is_not_empty_gets_no_release(tmp_path: Path) -> None:
    (tmp_path / "old.whl").touch()
    done = subprocess.run(
        (sys.executable, "-m", "tools.release", str(tmp_path)), cwd=CLONE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "is not empty; next: remove it" in done.stderr

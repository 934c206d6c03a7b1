"""Which low-level runtime does the work, and how the launcher gets to know it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpuprov.runtime_hook import settings
from gpuprov.runtime_hook.settings import read_settings
from tests.deployed import Deployed, deploy_below


def program(path: Path) -> str:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_the_first_that_is_there_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "FOLDERS", (str(tmp_path / "a"), str(tmp_path / "b")))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    second, other = program(tmp_path / "b/second"), program(tmp_path / "other")
    (tmp_path / "a/second").write_text("no program")
    assert settings.find_low_level(("first", "second")) == second
    assert settings.find_low_level((other, "second")) == other
    assert settings.find_low_level((f"{tmp_path}/none", "second")) == second
    assert settings.find_low_level(("first",)) == ""


def test_the_answer_is_a_shells_word_whatever_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = program(tmp_path / "run'c $(touch x)")
    own = tmp_path / "own.toml"
    own.write_text(f'[nvidia-container-runtime]\nruntimes = ["{runtime}"]\n')
    monkeypatch.setattr(read_settings, "__defaults__", (str(own), str(tmp_path / "none")))
    settings.keep_low_level("", str(tmp_path / "run/low-level"))
    told = subprocess.run(
        ("sh", "-c", '. "$1"; printf %s "$low_level"', "sh", tmp_path / "run/low-level"), capture_output=True,
        text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert told.stdout == runtime
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["low-level"]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("configured", [True, False])
def test_where_none_is_installed_the_engine_is_told(tmp_path: Path, configured: bool) -> None:
    deployed = deploy_below(tmp_path, str(tmp_path / "absent/runc"))
    log = tmp_path / "log.json"
    if configured:
        deployed.settings.write_text('[nvidia-container-runtime]\nruntimes = ["crun-of-nobody"]\n')
    done = call(deployed, "--log", str(log), "--log-format", "json", "create", "id")
    says = "none of the low-level runtimes crun-of-nobody is" if configured else "neither runc nor crun is installed"
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"gpuprov: {says}")
    entry = json.loads(log.read_text())
    assert (entry["level"], entry["msg"]) == ("error", done.stderr.strip())
    assert not (tmp_path / "run").exists()


@pytest.fixture
def deployed(tmp_path: Path) -> Deployed:
    """A runtime over two low-level ones, which say which they are."""
    made = deploy_below(tmp_path)
    for name in ("first", "second"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho {name}\n")
        path.chmod(0o755)
    made.settings.write_text(f'[nvidia-container-runtime]\nruntimes = ["{tmp_path}/first", "{tmp_path}/second"]\n')
    return made


def call(deployed: Deployed, *words: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    return subprocess.run((deployed.runtime, *words), capture_output=True, text=True, check=False, umask=umask)


def test_one_that_is_gone_since_gives_way_to_the_next(deployed: Deployed, tmp_path: Path) -> None:
    """Docker's own packages bring runc to another folder than the distribution's."""
    assert [call(deployed, "state").stdout for _ in range(2)] == ["first\n", "first\n"]
    (tmp_path / "first").unlink()
    assert [call(deployed, "state").stdout for _ in range(2)] == ["second\n", "second\n"]
    (tmp_path / "second").unlink()
    done = call(deployed, "state")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "is installed" in done.stderr


@pytest.mark.parametrize("place", ["run", "run/low-level/x"])
def test_where_the_answer_cannot_be_kept_containers_start_all_the_same(
    deployed: Deployed, tmp_path: Path, place: str
) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("in the way")
    before = sorted(tmp_path.glob("run*"))
    done = call(deployed, "state")
    assert (done.returncode, done.stdout, done.stderr) == (0, "first\n", "")
    assert sorted(tmp_path.glob("run*")) == before


def test_nobody_but_root_may_write_what_a_shell_of_roots_reads(deployed: Deployed, tmp_path: Path) -> None:
    assert call(deployed, "state", umask=0).stdout == "first\n"
    assert (tmp_path / "run/low-level").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("slash", ["/", "\\/"])
def test_an_annotation_is_heard_however_its_slash_is_written(deployed: Deployed, tmp_path: Path, slash: str) -> None:
    text = '{"annotations": {"cdi.k8s.io/x": "vendor.com/class=0"}}'
    (tmp_path / "config.json").write_text(text.replace("/", slash))
    assert call(deployed, "create", "--bundle", str(tmp_path), "id").returncode == 1


@pytest.mark.parametrize(
    "setting",
    [
        "modes.cdi.annotation-prefixes = ['example.com/']",
        "'modes'.cdi.\"annotation-prefixes\" = ['example.com/']",
    ],
)
def test_a_prefix_of_ones_own_is_heard_however_its_key_is_written(
    deployed: Deployed, tmp_path: Path, setting: str
) -> None:
    with deployed.settings.open("a") as file:
        file.write(f"{setting}\n")
    (tmp_path / "config.json").write_text('{"annotations": {"example.com/x": "vendor.com/class=0"}}')
    done = call(deployed, "create", "--bundle", str(tmp_path), "id")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no CDI specification of vendor.com/class" in done.stderr

"""`gpuprov options --write`: what is chosen as YAML, the rest as comments; nothing of a host's but a version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from gpuprov.agent.result import HostResult
from gpuprov.cli import reference
from gpuprov.cli.main import cli
from gpuprov.fleet.history import Run, save
from gpuprov.protocol.errors import ExitCode, UsageError
from gpuprov.protocol.events import ChosenDriver
from gpuprov.protocol.spec import HostSpec, spec_from_variables

FILE = "inventory/group_vars/gpu_hosts.yml"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def write(*words: str) -> Result:
    return CliRunner().invoke(cli, ["options", "--write", FILE, *words])


def written(*words: str) -> dict[str, Any]:
    done = write(*words)
    assert done.exit_code == 0, done.output
    return yaml.safe_load(Path(FILE).read_text()) or {}


def installed(name: str, *versions: str, check: bool = False, driver: str = "runfile", gpus: str = "H100") -> None:
    """Store an installation of gpu01, gpu02 …, which left these versions of the driver."""
    results = tuple(
        HostResult(f"gpu{number:02}", ExitCode.DONE, choice=ChosenDriver(gpus, driver, version, "why"))
        for number, version in enumerate(versions, 1)
    )
    save(Run(name, "install", "", 1.0, results, check))


def test_what_all_hosts_have_in_common_is_chosen(here: Path) -> None:
    (here / "hosts.yml").write_text(
        "all: {hosts: {gpu01: {gpuprov_watch: daily}, gpu02: {gpuprov_watch: weekly}}, "
        "vars: {gpuprov_driver: packages, gpuprov_packages: [nvtop, 'a-b'], gpuprov_lock_timeout: 300}}"
    )
    assert written("--hosts", "hosts.yml", "-e", "gpuprov_reboot=if-needed") == {
        "gpuprov_driver": "packages", "gpuprov_packages": ["nvtop", "a-b"], "gpuprov_reboot": "if-needed",
    }  # fmt: skip


def test_without_comment_signs_it_is_every_variable() -> None:
    text = reference.as_yaml({"gpuprov_driver": "packages"})
    whole = yaml.safe_load(text.replace("\n#gpuprov_", "\ngpuprov_"))
    assert list(whole) == [one["name"] for one in reference.variables()]
    assert spec_from_variables(whole) == replace(HostSpec(), driver="packages")
    assert yaml.safe_load(text) == {"gpuprov_driver": "packages"}
    assert max(map(len, text.splitlines())) < 120


def test_the_driver_that_the_last_installation_left_is_chosen() -> None:
    installed("20261121T081500Z-1", "580.178.04", "580.178.04")
    installed("20261121T081600Z-1", "590.1.1", "590.1.1", check=True)
    assert written("--hosts", "gpu01,gpu02") == {"gpuprov_driver_version": "580.178.04"}
    assert written("--force", "--hosts", "gpu01,gpu03") == {}
    assert written("--force", "--hosts", "gpu01,gpu02", "-e", "gpuprov_driver_version=590.48.01") == {
        "gpuprov_driver_version": "590.48.01"
    }
    installed("20261121T081700Z-1", "580.178.04")  # gpu01 alone, with --limit
    assert written("--force", "--hosts", "gpu01,gpu02") == {"gpuprov_driver_version": "580.178.04"}
    # Not every repository can pin a version, and a branch of the distribution is no release.
    packages = {"gpuprov_driver": "packages"}
    assert written("--force", "--hosts", "gpu01,gpu02", "-e", "gpuprov_driver=packages") == packages


@pytest.mark.parametrize(
    "versions", [("580.178.04", "590.48.01"), ("{{ lookup('pipe', 'id') }}",), ("1\nx: y",), ("",)]
)
def test_versions_that_differ_or_are_none_are_not_chosen(versions: tuple[str, ...]) -> None:
    installed("20261121T081500Z-1", *versions)
    assert written("--hosts", ",".join(f"gpu{number + 1:02}" for number in range(len(versions))) + ",") == {}


def test_a_version_that_packages_or_a_kernel_outside_decide_is_not_chosen() -> None:
    installed("20261121T081500Z-1", "580.178.04", driver="preinstalled")
    assert written("--hosts", "gpu01,") == {}
    installed("20261121T081600Z-1", "580.178.04", gpus="")
    assert written("--force", "--hosts", "gpu01,") == {}


def test_a_password_stays_out() -> None:
    done = write("-e", "gpuprov_proxy=http://me:hunter2@proxy:3128", "-e", "gpuprov_no_proxy=localhost")
    assert done.stderr == "warning: gpuprov_proxy is left out: it has a password\n"
    text = Path(FILE).read_text()
    assert "hunter2" not in text and yaml.safe_load(text) == {"gpuprov_no_proxy": "localhost"}


def test_a_token_stays_out() -> None:
    done = write("-e", "gpuprov_driver_mirror=https://ghp_0123456789@mirror.example/drivers")
    assert done.stderr == "warning: gpuprov_driver_mirror is left out: it has a password\n"
    assert "ghp_" not in Path(FILE).read_text()


def test_an_existing_file_stays_without_force() -> None:
    Path(FILE).parent.mkdir(parents=True)
    Path(FILE).write_text("mine: {}\n")
    done = write("-e", "gpuprov_watch=daily")
    assert isinstance(done.exception, UsageError) and "exists" in str(done.exception)
    assert Path(FILE).read_text() == "mine: {}\n"
    assert written("--force", "-e", "gpuprov_watch=daily") == {"gpuprov_watch": "daily"}


def test_what_chooses_needs_a_file_to_write() -> None:
    done = CliRunner().invoke(cli, ["options", "-e", "gpuprov_watch=daily"])
    assert done.exit_code == 2 and "need --write" in done.output

"""`gpuprov runtime configure` as a user types it, on real files."""

import json
import os
from pathlib import Path

import pytest
import tomllib
from click.testing import CliRunner, Result

from gpuprov.cli.main import cli
from gpuprov.engines import containerd
from gpuprov.protocol.errors import ExitCode
from tests.files import put
from tests.unit.test_commands_for_containers import error_of

CONFIG = 'version = 2\n\n# mine\n[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "pause"  # why\n'


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["runtime", "configure", *map(str, words)])


@pytest.fixture
def main(tmp_path: Path) -> Path:
    """A containerd's main file, not everybody's to read."""
    return put(tmp_path / "config.toml", CONFIG, 0o640)


@pytest.fixture
def words(main: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A call for that file, of a containerd 1.7, on a machine without drop-ins."""
    monkeypatch.setattr(containerd, "DROP_IN", str(main.with_name("99-nvidia.toml")))
    program = put(main.with_name("containerd"), "#!/bin/sh\necho containerd v1.7.24\n", 0o755)
    return ["--runtime", "containerd", "--config", main, "--executable-path", program]


@pytest.mark.parametrize("command", [("runtime",), ("runtime", "configure")], ids=" ".join)
def test_help_has_examples(command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [*command, "--help"])
    assert done.exit_code == 0
    assert "Examples:" in done.output


def test_flags_of_nvidias_tool_are_known() -> None:
    help_text = run("--help").output
    for flag in (
        "--runtime", "--config", "--drop-in-config", "--config-source", "--executable-path", "--config-mode",
        "--oci-hook-path", "--nvidia-runtime-name", "--nvidia-runtime-path", "--runtime-path",
        "--nvidia-runtime-hook-path", "--nvidia-set-as-default", "--set-as-default", "--cdi.enabled", "--cdi.enable",
        "--enable-cdi", "--dry-run",
    ):  # fmt: skip
        assert flag in help_text


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--config", "daemon.json"), "--config must be an absolute path"),
        (("--config", "/etc"), "--config must name a file"),
        (("--runtime", "containerd", "--drop-in-config", "/dev/full"), "--drop-in-config must name a file"),
        (("--nvidia-runtime-name", ""), "is no name of a runtime"),
        (("--nvidia-runtime-name", "a b"), "is no name of a runtime"),
        (("--runtime", "containerd", "--config", "x.toml"), "--config"),
        (("--runtime", "containerd", "--drop-in-config", "x"), "--drop-in-config"),
        (("--runtime", "containerd", "--nvidia-runtime-path", "runtime"), "--nvidia-runtime-path"),
    ],
)
def test_wrong_values_are_refused_with_what_to_type(words: tuple[str, ...], what: str) -> None:
    for more in ((), ("--dry-run",)):
        error = error_of(run(*words, *more))
        assert what in str(error)
        assert (error.exit_code, bool(error.problems[0].next_step)) == (ExitCode.USAGE, True)


def test_docker_that_tells_no_configuration_is_said(tmp_path: Path) -> None:
    done = run("--config", tmp_path / "daemon.json", "--config-source", "command", "--dry-run")
    assert done.exit_code == 0
    assert "note: docker has no command that prints its configuration: its file is read" in done.stderr


def test_runtime_is_written_and_what_follows_is_said(main: Path, words: list[object]) -> None:
    done = run(*words, "--nvidia-runtime-path", "/opt/x")
    assert done.exit_code == 0
    assert f"wrote {main}\n" in done.output
    assert "nothing was restarted; the engine reads this after: systemctl restart containerd" in done.output
    found = tomllib.loads(main.read_text())["plugins"]["io.containerd.grpc.v1.cri"]
    assert found["containerd"]["runtimes"]["nvidia"]["options"]["BinaryName"] == "/opt/x"
    assert "default_runtime_name" not in found["containerd"] and "enable_cdi" not in found
    assert main.read_text().startswith(CONFIG)


def test_second_run_touches_no_file_and_mode_and_owner_stay(main: Path, words: list[object]) -> None:
    if os.geteuid() == 0:
        os.chown(main, 1234, 1234)
    owner = main.stat().st_uid
    run(*words)
    first = main.stat()
    assert (first.st_mode & 0o777, first.st_uid) == (0o640, owner)
    done = run(*words)
    assert "nothing to change" in done.output and "restart" not in done.output
    assert (main.stat().st_ino, main.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


def test_unset_gives_back_every_byte(main: Path, words: list[object]) -> None:
    run(*words, "--nvidia-set-as-default", "--cdi.enabled")
    assert main.read_text() != CONFIG
    done = run(*words, "--unset")
    assert done.exit_code == 0 and main.read_text() == CONFIG
    assert "nothing to change" in run(*words, "--unset").output


def test_file_that_a_link_names_is_edited_where_it_lies(main: Path, words: list[object]) -> None:
    real = main.rename(main.with_name("elsewhere.toml"))
    main.symlink_to(real)
    run(*words)
    assert main.is_symlink() and "nvidia" in real.read_text()


def test_dry_run_prints_the_file_and_writes_nothing(main: Path, words: list[object]) -> None:
    done = run(*words, "--dry-run")
    assert main.read_text() == CONFIG
    assert tomllib.loads(done.stdout)["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]["nvidia"]
    assert "nothing was written" in done.stderr


def test_diff_shows_what_changes(main: Path, words: list[object]) -> None:
    done = run(*words, "--dry-run", "--diff")
    assert f"--- {main}\n+++ {main}\n" in done.output
    assert [line for line in done.output.splitlines() if line.startswith("-") and not line.startswith("---")] == []


def test_json_for_programs(main: Path, words: list[object]) -> None:
    found = json.loads(run(*words, "--json").stdout)
    assert (found["changed"], found["written"], found["restart"]) == (True, True, "systemctl restart containerd")
    (file,) = found["files"]
    assert (file["path"], file["before"], file["after"]) == (str(main), CONFIG, main.read_text())
    again = json.loads(run(*words, "--json").stdout)
    assert (again["changed"], again["written"]) == (False, False)


@pytest.mark.parametrize(
    ("content", "seen"),
    [(b"version = 2\n[plugins\n", "line 2, column 9"), (b"version = 2\n# \xff\n", "line 2, column 3")],
)
def test_file_that_cannot_be_read_is_left_alone(main: Path, words: list[object], content: bytes, seen: str) -> None:
    main.write_bytes(content)
    for more in ((), ("--unset",), ("--dry-run",)):
        error = error_of(run(*words, *more))
        assert seen in error.problems[0].evidence and str(main) in error.problems[0].what
    assert main.read_bytes() == content


def test_docker_keeps_other_features(tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    text = '{\n  "features": {\n    "buildkit": true\n  },\n  "live-restore": true,\n  "exec-opts": ["x=y"]\n}'
    path.write_text(text)
    run("--config", path, "--cdi.enabled", "--nvidia-runtime-path", "/opt/x")
    found = json.loads(path.read_text())
    features, runtimes = {"buildkit": True, "cdi": True}, {"nvidia": {"path": "/opt/x", "args": []}}
    assert found == {**json.loads(text), "features": features, "runtimes": runtimes}
    done = run("--config", path, "--cdi.enabled", "--nvidia-runtime-path", "/opt/x", "--unset")
    assert path.read_text() == text
    assert "systemctl restart docker" in done.output


def test_docker_file_that_was_ours_alone_goes(tmp_path: Path) -> None:
    path = tmp_path / "etc/daemon.json"
    run("--config", path, "--nvidia-set-as-default")
    assert json.loads(path.read_text())["default-runtime"] == "nvidia"
    done = run("--config", path, "--unset")
    assert not path.exists()
    assert f"removed {path}" in done.output


def test_runtime_of_another_program_is_not_taken_out_of_docker(tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text('{"runtimes": {"nvidia": {"path": "/theirs"}}}')
    done = run("--config", path, "--unset")
    assert "left alone" in done.output and "/theirs" in path.read_text()


def test_broken_daemon_json_is_named_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text('{\n  "a": 1\n  "b": 2\n}\n')
    error = error_of(run("--config", path))
    assert str(path) in error.problems[0].what and "line 3, column 3" in error.problems[0].evidence


def test_docker_has_no_drop_ins(tmp_path: Path) -> None:
    assert error_of(run("--drop-in-config", tmp_path / "x.json")).exit_code is ExitCode.USAGE


@pytest.mark.parametrize("engine", [("--runtime", "podman"), ()])
def test_hook_goes_where_it_is_asked_to_and_needs_no_engine(tmp_path: Path, engine: tuple[str, ...]) -> None:
    path = tmp_path / "hooks.d/hook.json"
    words = ("--config-mode", "hook", "--hook-path", path, "--nvidia-runtime-hook-path", "/opt/h")
    done = run(*engine, *words)
    assert json.loads(path.read_text())["hook"]["path"] == "/opt/h"
    assert "the next container reads this" in done.output
    run(*engine, *words, "--unset")
    assert not path.exists()
    assert "docker reads no OCI hooks" in str(error_of(run(*words, "--runtime", "docker")))


@pytest.mark.parametrize("version", ['"2"', "true", "2.0", "[2]"])
def test_containerd_file_whose_version_is_no_number_is_left_alone(tmp_path: Path, version: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"version = {version}\n")
    words = ("--runtime", "containerd", "--config", path, "--drop-in-config", tmp_path / "conf.d/x.toml")
    error = str(error_of(run(*words)))
    assert "version must be a whole number" in error
    assert "version = 2" in error
    assert path.read_text() == f"version = {version}\n"
    assert not (tmp_path / "conf.d").exists()


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "can't be written" in str(error_of(run("--config", tmp_path / "file/daemon.json")))

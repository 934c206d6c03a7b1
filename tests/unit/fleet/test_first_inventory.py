"""`gpuprov init`: the file that answers make, what is refused, and hosts that say something hostile."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpuprov.agent.result import HostResult
from gpuprov.cli.main import cli
from gpuprov.fleet import first_inventory
from gpuprov.fleet.inventory import HostTarget, read_inventory
from gpuprov.fleet.options import Options
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def init(*words: str, answers: str = "") -> Result:
    return CliRunner().invoke(cli, ["init", *words], input=answers)


def read(file: str = "inventory.yml") -> dict[str, HostTarget]:
    return {one.name: one for one in read_inventory((file,)).hosts}


def answering(name: str, gpus: str = "2", **facts: Any) -> HostResult:
    versions = {"os": "Debian 12", "gpus": gpus, "driver": ""}
    return HostResult(name, ExitCode.DONE, versions={**versions, **facts.pop("versions", {})}, facts=facts)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> list[HostResult]:
    """Return the list of what the hosts are to answer."""
    results: list[HostResult] = []

    def look(options: Options) -> tuple[HostResult, ...]:
        assert len(read(options.hosts[0])) == len(results)
        return tuple(results)

    monkeypatch.setattr(first_inventory, "inspect_hosts", look)
    return results


def test_answers_become_an_inventory() -> None:
    done = init("--no-look", answers="gpu[01:02].example.org yes\nops\npackages\n580\ncontainerd, podman\ny\n")
    assert done.exit_code == 0, done.output
    assert "wrote inventory.yml; next: gpuprov install --hosts inventory.yml --check --diff\n" in done.stdout
    hosts = read()
    assert list(hosts) == ["gpu01.example.org", "gpu02.example.org", "yes"]
    for host in hosts.values():
        assert (host.user, host.spec.driver, host.spec.driver_version) == ("ops", "packages", "580")
        assert host.spec.engines == ("containerd", "podman")


def test_the_next_command_asks_for_the_same_passwords() -> None:
    done = init("--hosts", "gpu01", "--no-look", "--yes", "-k", "-K")
    assert done.stdout.endswith("next: gpuprov install --hosts inventory.yml -k -K --check --diff\n")


def test_enter_takes_what_fits_the_hosts(fleet: list[HostResult]) -> None:
    engines = {"podman": {"program": "/usr/bin/podman"}, "crio": {"program": ""}}
    driver = {"kernel_version": "580.178.04"}
    fleet += (answering(name, engines=engines, driver=driver, docker={}) for name in ("gpu01", "gpu02"))
    assert init("--hosts", "gpu[01:02]", answers="\n" * 5).exit_code == 0
    spec = read()["gpu02"].spec
    assert (spec.driver, spec.driver_version, spec.engines, spec.docker) == ("preinstalled", "", ("podman",), "none")
    assert "gpu[01:02]:\n" in Path("inventory.yml").read_text()


def test_hosts_without_a_gpu_are_left_out(fleet: list[HostResult]) -> None:
    fleet += (answering("gpu01"), answering("gpu02", "0"), HostResult("gpu03", ExitCode.UNREACHABLE))
    assert "left out, no NVIDIA GPU: gpu02\n" in init("--hosts", "gpu[01:03]", "--yes").stderr
    assert list(read()) == ["gpu01", "gpu03"]
    text = Path("inventory.yml").read_text()
    assert "gpu01:  # Debian 12, 2 GPUs, driver none\n" in text and "gpu03:  # not seen: unreachable\n" in text


def test_a_port_stays_where_others_are_left_out(fleet: list[HostResult]) -> None:
    fleet += (answering("gpu01"), answering("gpu02", "0"))
    assert init("--hosts", "gpu01:2222,gpu02", "--yes").exit_code == 0
    assert [(one.name, one.port) for one in read().values()] == [("gpu01", 2222)]


def test_no_host_with_a_gpu_writes_nothing(fleet: list[HostResult]) -> None:
    fleet.append(answering("gpu01", "0"))
    done = init("--hosts", "gpu01", "--yes")
    assert isinstance(done.exception, UsageError) and "no host has an NVIDIA GPU" in str(done.exception)
    assert not Path("inventory.yml").exists()


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\x1b[2K"], ids=ascii)
def test_what_a_host_says_stays_a_comment(fleet: list[HostResult], end: str) -> None:
    evil = f"x{end}  vars:{end}    ansible_connection: local{end}#" + "y" * 500
    fleet.append(answering("gpu01", versions={"os": evil}, engines={evil: {"program": evil}}, docker=[evil], driver=3))
    assert init("--hosts", "gpu01", "--yes").exit_code == 0
    (host,) = read().values()
    assert (host.connection, host.spec.engines) == ("ssh", ())
    assert all(len(one) < 150 and one.isascii() for one in Path("inventory.yml").read_text().splitlines())


def test_names_come_from_the_files_of_ssh(here: Path) -> None:
    (here / ".ssh").mkdir()
    (here / ".ssh/config").write_text("# Host old\nHost gpu01 gpu* !gpu09\n  User ops\nhost=gpu02\nMatch host x\n")
    lines = ("gpu03,192.0.2.3 ssh-rsa AAAA", "|1|c2FsdA==|aGFzaA== ssh-rsa AAAA", "[gpu04]:2222 ssh-rsa AAAA",
             "@revoked gpu05 ssh-rsa AAAA", "# gpu06 x y", "gpu03 ssh-ed25519 AAAA")  # fmt: skip
    (here / ".ssh/known_hosts").write_text("\n".join(lines))
    assert init("--hosts", "ssh-config,known-hosts", "--no-look", "--yes").exit_code == 0
    assert list(read()) == ["gpu01", "gpu02", "gpu03"]
    assert init("b.yml", "--hosts", "ssh-config", "--no-look", answers="gpu02\n" + "\n" * 5).exit_code == 0
    assert list(read("b.yml")) == ["gpu02"]


def test_scripts_get_one_document(here: Path, fleet: list[HostResult]) -> None:
    (here / ".ssh").mkdir()
    (here / ".ssh/known_hosts").write_text("gpu03 ssh-rsa AAAA\n")
    fleet.append(answering("gpu03"))
    words = ["init", "site.yml", "--hosts", "known-hosts", "--driver", "packages", "--driver-version", "580", "--yes"]
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert json.loads(done.stdout) == {
        "file": "site.yml", "hosts": ["gpu03"], "next": "gpuprov install --hosts site.yml --check --diff",
        "variables": {"gpuprov_driver": "packages", "gpuprov_driver_version": "580"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--hosts", "-oProxyCommand=x"), "that is no name of a host"),
        (("--hosts", "gpu[01:"), "that is no name of a host"),
        (("--hosts", "gpu01,gpu[16:01]"), "that is no name of a host\n  seen: 'gpu[16:01]'"),
        (("--hosts", "gpu[01:100]"), "the range in gpu[01:100] is invalid"),
        (("--hosts", "a{{x}}"), "that is no name of a host"),
        (("--hosts", "known-hosts"), "known-hosts names no host"),
        (("--hosts", "gpu01", "--driver-version", "new"), "gpuprov_driver_version"),
        (("--hosts", "gpu01", "--engines", "lxd"), "gpuprov_engines"),
        (("--hosts", "gpu01", "--user", "a\nb"), "ansible_user"),
        ((), "--yes needs --hosts"),
    ],
)
def test_a_wrong_value_is_refused_and_nothing_written(words: tuple[str, ...], what: str) -> None:
    done = init("--no-look", "--yes", *words)
    assert isinstance(done.exception, GpuprovError) and done.exception.exit_code == ExitCode.USAGE
    assert what in str(done.exception)
    assert not Path("inventory.yml").exists()


def test_a_full_disk_leaves_no_file_that_is_in_the_way_later(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*words: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(first_inventory, "write_whole", fails)
        done = init("--hosts", "gpu01", "--no-look", "--yes")
        assert "then run the same command again" in str(done.exception)
    assert list(here.glob("inventory*")) == []
    assert init("--hosts", "gpu01", "--no-look", "--yes").exit_code == 0


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_is_there_stays_without_force(here: Path, kind: str) -> None:
    place = here / "inventory.yml"
    if kind == "folder":
        place.mkdir()
    elif kind == "link":
        place.symlink_to(here / "elsewhere")
    else:
        place.write_text("mine\n")
    done = init("--hosts", "gpu01", "--no-look", "--yes")
    assert isinstance(done.exception, UsageError) and "inventory.yml exists" in str(done.exception)
    assert not (here / "elsewhere").exists()
    if kind == "file":
        assert place.read_text() == "mine\n"
        assert init("--hosts", "gpu01", "--no-look", "--yes", "--force").exit_code == 0
        assert list(read()) == ["gpu01"]


@pytest.mark.parametrize("answers", ["", "gpu01\nops\n", "gpu01\nops\nrunfile\n\n\nn\n"])
def test_no_and_the_end_of_input_write_nothing(answers: str) -> None:
    assert init("--no-look", answers=answers).exit_code == 1
    assert not Path("inventory.yml").exists()


def test_ctrl_c_writes_nothing(here: Path) -> None:
    argv = (sys.executable, "-m", "gpuprov", "init", "--no-look")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0) as process:
        assert process.stdin and process.stderr
        process.stdin.write("gpu01\n")
        shown = ""
        while "User for SSH" not in shown:
            more = process.stderr.read(1)
            assert more, shown
            shown += more
        # Python's input() drops the exception of a signal that comes before it reads (read(2) of x86_64 and aarch64).
        while Path(f"/proc/{process.pid}/syscall").read_text().split()[:2] not in (["0", "0x0"], ["63", "0x0"]):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()
    assert list(here.iterdir()) == []

"""The commands by which the units of a boot come and go, and what is said of those that do not start."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.boot import prepare
from gpuprov.core.commands import Completed
from gpuprov.facts.boot import NODES, PERSISTENCE, SERVE, UNITS
from tests import simgpu
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root


class Host(FakeHost):
    """A machine that loads its driver, and whose systemctl answers as it is told: (verb, unit) → exit code, stderr."""

    def __init__(self, root: Path, *, loads: bool = True) -> None:
        super().__init__(root, metal=True)
        simgpu.install_tree(root, simgpu.DRIVER_VERSION if loads else "570.1.2")
        simgpu.write_kernel_tree(root, 1)
        self.answers: dict[tuple[str, str], tuple[int, str]] = {}
        self.asked: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[0] in ("systemctl", "journalctl", "udevadm"):
            self.asked.append(tuple(argv))
        unit = next((word for word in argv[2:] if word.endswith(".service")), "")
        if argv[0] == "journalctl":
            return Completed(tuple(argv), 0, f"of {unit or argv[-1]}\nmore\n")
        if argv[0] == "systemctl" and (argv[1], unit) in self.answers:
            return Completed(tuple(argv), self.answers[argv[1], unit][0], "", self.answers[argv[1], unit][1])
        return super().run(argv, **more)


def applied(host: Host, *units: str) -> list[str]:
    """Return what is told while these units are started."""
    told: list[str] = []
    prepare.PrepareBoot((), (), (), units).apply(host, lambda text, *_: told.append(text))
    return told


@pytest.mark.parametrize("failed", [True, False])
def test_a_daemon_that_failed_before_the_libraries_came_is_started_again(tmp_path: Path, failed: bool) -> None:
    host = Host(tmp_path)
    host.answers = {("is-failed", PERSISTENCE): (0 if failed else 1, ""), ("restart", PERSISTENCE): (1, "no device")}
    assert ["did not start" in one and "no device" in one for one in applied(host)] == [True] * failed


@pytest.mark.parametrize(("loads", "fails"), [(True, PERSISTENCE), (False, NODES)])
def test_a_unit_that_may_be_missing_stops_no_other(tmp_path: Path, loads: bool, fails: str) -> None:
    """Persistence is optional; with another driver loaded none can work, and a reboot is planned next."""
    host = Host(tmp_path, loads=loads)
    host.answers = {("restart", fails): (1, "it failed"), ("is-failed", PERSISTENCE): (1, "")}
    (told,) = applied(host, fails, SERVE)
    assert told.startswith(f"{fails} did not start: of ") and told.endswith("; more")
    assert any(words[1] == "restart" and SERVE in words for words in host.asked)


def test_another_unit_that_does_not_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.answers = {("restart", NODES): (1, "it failed")}
    problem = refused(applied, host, NODES)
    assert (problem.what, problem.next_step) == (f"{NODES} did not start", f"systemctl status {NODES}")
    assert problem.evidence.splitlines()[1:][-2:] == [f"of {NODES}", "more"] and "it failed" in problem.evidence


@pytest.mark.parametrize("udev", [True, False])
def test_an_undo_stops_units_before_their_files_go_and_starts_what_is_left(tmp_path: Path, udev: bool) -> None:
    host = Host(tmp_path)
    if udev:
        host.write("/usr/bin/udevadm", b"", mode=0o755)
    host.make_directory(UNITS)
    host.write(f"{UNITS}/{NODES}", b"[Unit]\n")
    prepare.PrepareBoot.undo(host, {"files": [], "units": [NODES, SERVE]}, {})
    alone = "--job-mode=ignore-requirements"
    commands = [words for words in host.asked if words[1] in ("stop", "restart", "daemon-reload", "control")]
    assert commands == [
        ("systemctl", "stop", NODES, alone), ("systemctl", "stop", SERVE), ("systemctl", "daemon-reload"),
        *[("udevadm", "control", "--reload")] * udev, ("systemctl", "restart", NODES, alone),
    ]  # fmt: skip

"""A run that has installed podman is not undone under containers that run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuprov.core.commands import Completed
from gpuprov.packages.apt_changes import InstallPackages
from gpuprov.protocol.request import Request
from tests.runs import as_a_run
from tests.unit.ask import ask, finished
from tests.unit.fake_host import FakeHost

pytestmark = pytest.mark.root


class WithPodman(FakeHost):
    """A host whose podman has these containers."""

    running: tuple[str, ...] = ("web",)

    def which(self, program: str) -> str | None:
        return "/usr/bin/podman" if program == "podman" and program in self.installed else super().which(program)

    def run(self, argv: Sequence[str], **more: object) -> Completed:
        if argv[0] != "podman":
            return super().run(argv, **more)
        lines = {"ps": "4c5f", "inspect": "runc - - web"}
        return Completed(tuple(argv), 0, lines.get(argv[1], "") if self.running else "")


@pytest.mark.parametrize("command", ["rollback", "uninstall"])
def test_podman_does_not_go_under_its_containers(tmp_path: Path, command: str) -> None:
    host = WithPodman(tmp_path)
    host.available["podman"] = "4.3.1"
    as_a_run(host, InstallPackages(("podman",)))
    (problem,) = finished(ask(host, Request(command))[1]).problems
    assert problem.what.startswith("containers of podman still run") and problem.evidence == "podman ps: web"
    assert problem.next_step.startswith("podman stop web,") and "podman" in host.installed
    host.running = ()
    assert finished(ask(host, Request(command))[1]).problems == ()
    assert "podman" not in host.installed

"""A host that gpuprov has set up and on which nothing is wrong, and what its programs answer the doctor."""

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuprov.core.commands import Completed
from gpuprov.doctor.examine import Cause, diagnose
from gpuprov.doctor.gather import gather
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.protocol.request import Request
from gpuprov.protocol.spec import HostSpec, spec_to_json
from tests import simgpu
from tests.files import put
from tests.triplet import TRIPLET
from tests.unit.ask import ask
from tests.unit.fake_host import FakeHost

SPEC = HostSpec(driver="preinstalled", docker="preinstalled")
# `nvidia-smi -q -x` of driver 550.163.01 on a host with two GPUs.
SMI = (Path(__file__).parents[2] / "data/nvidia-smi-q-x-2-gpus.xml").read_text()


class DoctorHost(FakeHost):
    """A host whose programs answer the doctor, too: program → exit code and what it prints."""

    def __init__(self, root: Path, **more: Any) -> None:
        super().__init__(root, **more)
        self.answers: dict[str, tuple[int, str]] = {"nvidia-smi": (0, SMI), "dmesg": (0, "")}

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        code, said = self.answers.get(argv[0], (-1, ""))
        if code < 0:
            return super().run(argv, **more)
        self.commands.append(tuple(argv))
        return Completed(tuple(argv), code, said, said if code else "")

    def answer(self, program: str, said: str, code: int = 0) -> None:
        """Let a program be there and answer."""
        put(self.root / "usr/bin" / program, "#!/bin/sh\n", 0o755)
        self.answers[program] = (code, said)


def healthy(root: Path) -> DoctorHost:
    """Return a host on which gpuprov's own installation has just ended well."""
    host = healthy_tree(root)
    ended, _ = ask(host, Request("install", spec_to_json(SPEC)))
    assert ended.exit_code == 0, ended
    return host


def healthy_tree(root: Path) -> DoctorHost:
    """Return a host that has its driver, and on which gpuprov has not run yet."""
    host = DoctorHost(root)
    simgpu.install_tree(host.root)
    host.installed["runc"] = "1.1.5"
    for program in ("runc", "dmesg"):
        put(host.root / "usr/bin" / program, "#!/bin/sh\n", 0o755)
    (host.root / "etc/ld.so.conf").write_text(f"/usr/lib/{TRIPLET}\n")
    subprocess.run(("/sbin/ldconfig", "-r", str(root)), check=True, capture_output=True, timeout=60)
    return host


def examined(host: DoctorHost) -> HostSnapshot:
    return gather(host, SPEC)


def first(x: HostSnapshot) -> Cause:
    """Return the cause to fix first."""
    causes = diagnose(x)
    assert causes, "nothing found"
    return causes[0]


def names(x: HostSnapshot) -> list[str]:
    return [cause.rule.name for cause in diagnose(x)]


def with_driver(x: HostSnapshot, **changes: Any) -> HostSnapshot:
    return replace(x, host=replace(x.host, driver=replace(x.host.driver, **changes)))


def with_docker(x: HostSnapshot, **changes: Any) -> HostSnapshot:
    return replace(x, host=replace(x.host, docker=replace(x.host.docker, **changes)))


def with_kernel(x: HostSnapshot, **changes: Any) -> HostSnapshot:
    return replace(x, host=replace(x.host, kernel=replace(x.host.kernel, **changes)))

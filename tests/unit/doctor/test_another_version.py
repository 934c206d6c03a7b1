"""A host that another version of gpuprov set up: what works is healthy, and what its own record lacks is found."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from gpuprov import __version__
from gpuprov.core.journal import RUNS_DIRECTORY
from gpuprov.doctor.examine import diagnose
from gpuprov.doctor.finding import CERTAIN, LIKELY, WARNING
from gpuprov.doctor.snapshot import Installed
from gpuprov.protocol.errors import ExitCode
from gpuprov.protocol.events import CauseFound
from gpuprov.runtime_hook.deploy import LIBRARY_PATH, NVIDIA_HOOK_PATH
from tests.unit.ask import finished
from tests.unit.doctor.host import DoctorHost, examined
from tests.unit.doctor.test_fix import doctor, of
from tests.unit.doctor.test_fix import host as host
from tests.unit.doctor.test_fix import pristine as pristine

pytestmark = pytest.mark.root
_MODULES = f"{LIBRARY_PATH}/runtime_hook"
_OTHER = b"# another version's\n"


def by_another_version(host: DoctorHost, version: str | None) -> None:
    """Make it a host whose runtime lacks a module of this version, has one more, and another text of a third."""
    host.remove(f"{_MODULES}/volumes.py")
    for name in ("equipment.py", "decision.py"):
        host.write(f"{_MODULES}/{name}", _OTHER)
    (path,) = host.list_directory(RUNS_DIRECTORY)
    lines = [json.loads(line) for line in (host.read_text(f"{RUNS_DIRECTORY}/{path}") or "").splitlines()]
    lines[0].pop("version")
    lines[0].update({} if version is None else {"version": version})
    written = next(line["outcome"]["written"] for line in lines if _launches(line))
    written.update(
        dict.fromkeys((f"{_MODULES}/equipment.py", f"{_MODULES}/decision.py"), hashlib.sha256(_OTHER).hexdigest())
    )
    del written[f"{_MODULES}/volumes.py"]
    host.write(f"{RUNS_DIRECTORY}/{path}", "".join(f"{json.dumps(line)}\n" for line in lines).encode(), mode=0o600)


def _launches(line: dict[str, Any]) -> bool:
    return f"{_MODULES}/volumes.py" in line.get("outcome", {}).get("written", {})


def look(host: DoctorHost) -> list[CauseFound]:
    found: list[CauseFound] = of(CauseFound, doctor(host, fix=False))
    return found


@pytest.mark.parametrize(
    ("version", "who"),
    [
        (None, "an earlier gpuprov"),
        ("9.0.0", "gpuprov 9.0.0"),
        (__version__, f"another build of gpuprov {__version__}"),
    ],
)
def test_a_host_of_another_version_is_healthy(host: DoctorHost, version: str | None, who: str) -> None:
    by_another_version(host, version)
    events = doctor(host, fix=False)
    assert finished(events).exit_code == ExitCode.DONE and finished(events).summary == "nothing found wrong"
    (cause,) = (one for one in of(CauseFound, events) if one.rule == "runtime-files-missing")
    assert cause.confidence == WARNING and cause.evidence.startswith(RUNS_DIRECTORY)
    assert (
        cause.what.startswith(f"this host was set up by {who} on 20") and f"this is gpuprov {__version__}" in cause.what
    )
    assert cause.next_step.endswith("  # updates it: 1 change, no container stops")


def test_a_host_of_this_version_says_nothing_of_it(host: DoctorHost) -> None:
    assert not [one for one in look(host) if one.rule == "runtime-files-missing"]


def test_what_its_own_record_has_and_the_host_lacks_is_found(host: DoctorHost) -> None:
    by_another_version(host, None)
    host.write(f"{_MODULES}/main.py", b"# changed by hand\n")
    cause = next(one for one in look(host) if one.rule == "runtime-files-missing")
    assert (cause.confidence, cause.evidence) == (LIKELY, f"{_MODULES}/main.py")
    assert cause.what == "of gpuprov's container runtime 1 file changed since gpuprov wrote it"
    host.remove(f"{_MODULES}/equipment.py")
    cause = next(one for one in look(host) if one.rule == "runtime-files-missing")
    assert (cause.confidence, cause.evidence) == (CERTAIN, f"ls {_MODULES}/equipment.py: No such file")


def test_a_record_that_can_not_be_read_is_said(host: DoctorHost) -> None:
    by_another_version(host, "9.0.0")
    (name,) = host.list_directory(RUNS_DIRECTORY)
    path = f"{RUNS_DIRECTORY}/{name}"
    host.write(path, (host.read_bytes(path) or b"").replace(b'"format": 2', b'"format": 7'), mode=0o600)
    cause = next(one for one in look(host) if one.rule == "runtime-files-missing")
    assert cause.confidence == WARNING and "has format 7" in cause.evidence
    assert cause.what == "the journal of an earlier run has a format that this gpuprov can't read"


def test_a_hook_that_an_update_replaced_needs_no_restart_of_docker(host: DoctorHost) -> None:
    x = replace(examined(host), modified={NVIDIA_HOOK_PATH: 20.0, "/run/docker.pid": 10.0})
    assert "hook-unseen" in [cause.rule.name for cause in diagnose(x)]
    x = replace(x, installed=Installed(replaced=frozenset({NVIDIA_HOOK_PATH})))
    assert "hook-unseen" not in [cause.rule.name for cause in diagnose(x)]
    by_another_version(host, None)
    doctor(host, command="install")
    found = examined(host).installed
    assert found is not None and NVIDIA_HOOK_PATH in found.replaced

"""CRI-O's and podman's files, and the OCI hook."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomllib

from gpuprov.core.system import System
from gpuprov.engines import configure
from gpuprov.engines.known import ENGINES, ConfigureRequest, RuntimeEntry
from gpuprov.protocol.errors import GpuprovError
from tests.unit.engines.test_containerd import host as engine_host

RUNTIME = RuntimeEntry("nvidia", "/usr/bin/x")
CRIO, PODMAN = ENGINES["crio"], ENGINES["podman"]
# As CRI-O's own packages bring it: 10-crio.conf names crun as the default.
CRIO_CONF = '[crio.runtime]\nselinux = true\n[crio.runtime.runtimes.runc]\nruntime_root = "/run/runc"\n'
PACKAGED = """\
[crio.image]
signature_policy = "/etc/crio/policy.json"

[crio.runtime]
default_runtime = "crun"

[crio.runtime.runtimes.crun]
runtime_path = "/usr/libexec/crio/crun"
runtime_root = "/run/crun"
monitor_path = "/usr/libexec/crio/conmon"
allowed_annotations = ["io.containers.trace-syscall"]
"""


def host(tmp_path: Path, files: dict[str, str]) -> System:
    return engine_host(tmp_path, files, "")[0]


def configured(system: System, request: ConfigureRequest) -> dict[str, Any]:
    """Carry a request out, once more, and back; return what the file said in between."""
    found = configure.configuration(system, request)
    (edit,) = found.edits
    before = system.read_bytes(edit.path)
    configure.write(system, found.edits)
    assert not any(one.changes for one in configure.configuration(system, request).edits)
    between = tomllib.loads(str(system.read_text(edit.path)))
    undo = ConfigureRequest(request.engine, request.runtime, request.config, request.drop_in, unset=True)
    configure.write(system, configure.configuration(system, undo).edits)
    assert system.read_bytes(edit.path) == before
    return between


@pytest.mark.parametrize(
    ("files", "entry"),
    [
        ({}, {}),
        ({CRIO.main: CRIO_CONF}, {"runtime_root": "/run/runc"}),
        (
            {CRIO.main: CRIO_CONF, "/etc/crio/crio.conf.d/10-crio.conf": PACKAGED},
            {
                "runtime_root": "/run/crun",
                "monitor_path": "/usr/libexec/crio/conmon",
                "allowed_annotations": ["io.containers.trace-syscall"],
            },
        ),
    ],
)
def test_crio_drop_in_has_default_runtime_options(tmp_path: Path, files: dict[str, str], entry: dict[str, Any]) -> None:
    found = configured(host(tmp_path, files), ConfigureRequest("crio", RUNTIME))
    assert found == {
        "crio": {"runtime": {"runtimes": {"nvidia": {**entry, "runtime_path": "/usr/bin/x", "runtime_type": "oci"}}}}
    }


def test_crio_default_runtime_changes_when_asked(tmp_path: Path) -> None:
    system = host(tmp_path, {"/etc/crio/crio.conf.d/10-crio.conf": PACKAGED})
    found = configured(system, ConfigureRequest("crio", RuntimeEntry("nvidia", "/usr/bin/x", set_default=True)))
    assert found["crio"]["runtime"]["default_runtime"] == "nvidia"


def test_crio_main_file_takes_the_runtime_when_asked(tmp_path: Path) -> None:
    system = host(tmp_path, {CRIO.main: "# mine\n" + CRIO_CONF})
    found = configured(system, ConfigureRequest("crio", RUNTIME, drop_in=""))
    assert found["crio"]["runtime"]["selinux"] is True
    assert found["crio"]["runtime"]["runtimes"]["nvidia"]["runtime_path"] == "/usr/bin/x"


def test_crio_tells_its_configuration_by_command(tmp_path: Path) -> None:
    program = tmp_path / "crio"
    program.write_text(f'#!/bin/sh\n[ "$*" = "status config" ] && cat <<E\n{PACKAGED}\nE\n')
    program.chmod(0o755)
    request = ConfigureRequest("crio", RUNTIME, from_command=True, executable=str(program))
    found = configured(host(tmp_path, {}), request)
    assert found["crio"]["runtime"]["runtimes"]["nvidia"]["runtime_root"] == "/run/crun"
    program.write_text("#!/bin/sh\necho not running >&2; exit 1\n")
    with pytest.raises(GpuprovError, match="does not tell"):
        configure.configuration(host(tmp_path, {}), request)


def test_broken_file_of_crio_is_named(tmp_path: Path) -> None:
    system = host(tmp_path, {"/etc/crio/crio.conf.d/20-site.conf": "[crio\n"})
    with pytest.raises(GpuprovError, match=r"20-site\.conf is not valid TOML"):
        configure.configuration(system, ConfigureRequest("crio", RUNTIME))


def test_podman_gets_a_drop_in(tmp_path: Path) -> None:
    system = host(tmp_path, {PODMAN.main: '[engine]\nruntime = "crun"\n'})
    assert configured(system, ConfigureRequest("podman", RUNTIME)) == {
        "engine": {"runtimes": {"nvidia": ["/usr/bin/x"]}}
    }
    default = RuntimeEntry("nvidia", "/usr/bin/x", set_default=True)
    assert configured(system, ConfigureRequest("podman", default))["engine"]["runtime"] == "nvidia"
    found = configured(system, ConfigureRequest("podman", default, drop_in=""))
    assert found == {"engine": {"runtime": "nvidia", "runtimes": {"nvidia": ["/usr/bin/x"]}}}


@pytest.mark.parametrize("engine", ["crio", "podman"])
def test_cdi_needs_nothing_there_and_that_is_said(tmp_path: Path, engine: str) -> None:
    request = ConfigureRequest(engine, RuntimeEntry("nvidia", "/usr/bin/x", cdi=True))
    assert "by itself" in configure.configuration(host(tmp_path, {}), request).notes[0]


# -- the OCI hook ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "path"),
    [
        ("/usr/bin/nvidia-container-runtime-hook", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("/opt/n/hook", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/n"),
    ],
)
def test_hook_as_podman_reads_it(tmp_path: Path, program: str, path: str) -> None:
    system = host(tmp_path, {})
    configure.write(system, configure.hook(system, "podman", "", program, unset=False).edits)
    assert json.loads(str(system.read_text(configure.HOOK_FILE))) == {
        "version": "1.0.0",
        "hook": {"path": program, "args": [program.rpartition("/")[2], "prestart"], "env": [f"PATH={path}"]},
        "when": {"always": True, "commands": [".*"]},
        "stages": ["prestart"],
    }
    (edit,) = configure.hook(system, "podman", "", program, unset=False).edits
    assert not edit.changes
    assert configure.hook(system, "podman", "", "/another", unset=True).edits == ()
    configure.write(system, configure.hook(system, "podman", "", program, unset=True).edits)
    assert not system.exists(configure.HOOK_FILE)


@pytest.mark.parametrize("engine", ["docker", "containerd", "k3s"])
def test_hook_is_refused_where_nobody_would_run_it(tmp_path: Path, engine: str) -> None:
    with pytest.raises(GpuprovError, match="reads no OCI hooks"):
        configure.hook(host(tmp_path, {}), engine, "", "/x", unset=False)


@pytest.mark.parametrize(
    ("there", "runtime", "hook"),
    [
        ([], "/usr/bin/nvidia-container-runtime", "/usr/bin/nvidia-container-runtime-hook"),
        (
            ["/usr/bin/gpuprov-container-runtime", "/usr/bin/gpuprov-container-runtime-hook"],
            "/usr/bin/gpuprov-container-runtime",
            "/usr/bin/gpuprov-container-runtime-hook",
        ),
        (
            ["/usr/bin/gpuprov-container-runtime", "/usr/bin/nvidia-container-runtime"],
            "/usr/bin/nvidia-container-runtime",
            "/usr/bin/nvidia-container-runtime-hook",
        ),
    ],
)
def test_usual_programs(tmp_path: Path, there: list[str], runtime: str, hook: str) -> None:
    system = host(tmp_path, dict.fromkeys(there, ""))
    assert (configure.usual_runtime(system), configure.usual_hook(system)) == (runtime, hook)

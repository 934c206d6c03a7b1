"""What nvidia-docker 1 and 2 have left, with what the doctor must say of each."""

from __future__ import annotations

import json
from dataclasses import replace

from gpuprov.core.changes import FileFact
from gpuprov.doctor.finding import WARNING
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.facts.leftovers import FOLDER, Leftovers, Volume
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH
from tests.keys import key_fingerprint, key_packet
from tests.unit.doctor.ill import Change, Row, both, docker, host, installed

_MIGRATE = "-e gpuprov_migrate_nvidia_docker=true"
_LIST = "/etc/apt/sources.list.d/nvidia-docker.list"
_TEXT = b"deb https://nvidia.github.io/nvidia-docker/ubuntu18.04/$(ARCH) /\n"
_RUNTIMES = {"nvidia": {"path": LAUNCHER_PATH}, "nvidia-experimental": {"path": "/usr/bin/nvidia-container-runtime.x"}}


def _file(path: str, content: bytes) -> Change:
    def change(x: HostSnapshot) -> HostSnapshot:
        return replace(x, host=replace(x.host, files={**x.host.files, path: FileFact(content, 0o644, 0, 0)}))

    return change


def _own_key(x: HostSnapshot) -> HostSnapshot:
    return replace(x, spec=replace(x.spec, toolkit_key_fingerprint=key_fingerprint(1)))


def _left(**values: object) -> Change:
    return host(leftovers=Leftovers(**values))  # type: ignore[arg-type]


LEFTOVER_ROWS = (
    Row("toolkit-retired", installed(nvidia_docker2="2.13.0-1"), "nvidia-docker2", f"{_MIGRATE}  # keeps", WARNING),
    Row("toolkit-retired", installed(nvidia_container_runtime="3.4.0-1"), "nvidia-container-runtime", _MIGRATE,
        WARNING),
    Row("nvidia-docker-plugin", _left(files=("/usr/bin/nvidia-docker-plugin",), unit="active", folder=True),
        f"/usr/bin/nvidia-docker-plugin\n{FOLDER}\nsystemctl is-active nvidia-docker", _MIGRATE, WARNING),
    Row("nvidia-docker-volumes",
        _left(volumes=(Volume("nvidia_driver_375.26", "nvidia-docker", ("job (Exited (0) 2 years ago)",)),)),
        "nvidia_driver_375.26, used by job (Exited", "stays", WARNING),
    Row("nvidia-docker-repository", _file(_LIST, _TEXT), _LIST, _MIGRATE, WARNING),
    Row("nvidia-docker-key", both(_file("/etc/apt/trusted.gpg", key_packet(1) + key_packet(2)), _own_key),
        "/etc/apt/trusted.gpg", _MIGRATE, WARNING),
    Row("nvidia-docker-runtimes",
        both(docker(config_text=json.dumps({"runtimes": _RUNTIMES})), _left(dead_runtimes=("nvidia-experimental",))),
        "runtime nvidia-experimental is /usr/bin/nvidia-container-runtime.x", _MIGRATE, WARNING),
)  # fmt: skip

"""Pods through CRI, as the kubelet asks for them: a client made of Kubernetes' own api.proto.

The file is Debian's (golang-github-kubernetes-cri-api-dev); protoc of grpcio-tools makes the client of it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simgpu import cache, debian

_PACKAGE = "golang-github-kubernetes-cri-api-dev"
_PROTO = "unpacked/usr/share/gocode/src/k8s.io/cri-api/pkg/apis/runtime/v1/api.proto"
_LOGS = "/var/log/test-pods"
_SECONDS = 300
_COUNTER = itertools.count(1)


@functools.cache
def _modules() -> tuple[Any, Any, Any]:
    """Return grpc, and the messages and the stubs of CRI, generated once."""
    folder = str(cache.built("cri", cache.digest_of((_PACKAGE,)), _generate))
    if folder not in sys.path:
        sys.path.append(folder)
    return tuple(importlib.import_module(name) for name in ("grpc", "cri_pb2", "cri_pb2_grpc"))  # type: ignore[return-value]


def _generate(folder: Path) -> None:
    debian.fetch(folder, "trixie", "main", (_PACKAGE,))
    # Options of a Go code generator; without them the file needs no other one.
    text = re.sub(r"^.*gogoproto.*\n", "", (folder / _PROTO).read_text(), flags=re.MULTILINE)
    (folder / "cri.proto").write_text(text)
    argv = (sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=.", "cri.proto")
    subprocess.run(argv, cwd=folder, check=True)


@dataclass(frozen=True)
class Ended:
    """How a container ended, and what it wrote."""

    code: int
    said: str


@dataclass(frozen=True)
class Container:
    """What a container is asked for with. `devices`: qualified CDI names."""

    command: Sequence[str]
    image: str
    devices: Sequence[str] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Cri:
    """An engine's CRI socket. `root`: where the engine's root file system lies, in which it writes logs."""

    def __init__(self, socket: str, root: Path) -> None:
        grpc, self._types, stubs = _modules()
        self.error: type[Exception] = grpc.RpcError
        # containerd refuses the socket's path as the name of a host.
        self._channel = grpc.insecure_channel(f"unix://{socket}", options=[("grpc.default_authority", "localhost")])
        self._runtime = stubs.RuntimeServiceStub(self._channel)
        self._root = root

    def __enter__(self) -> Cri:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def run(self, container: Container, handler: str = "") -> Ended:
        """Run a container in a pod of its own with this runtime handler, on the host's network; remove both."""
        types, runtime = self._types, self._runtime
        name = f"pod-{next(_COUNTER)}"
        pod = types.PodSandboxConfig(
            metadata=types.PodSandboxMetadata(name=name, uid=name, namespace="default"),
            log_directory=f"{_LOGS}/{name}",
            linux=types.LinuxPodSandboxConfig(
                security_context=types.LinuxSandboxSecurityContext(
                    namespace_options=types.NamespaceOption(network=types.NODE)
                )
            ),
        )
        asked = types.RunPodSandboxRequest(config=pod, runtime_handler=handler)
        sandbox = runtime.RunPodSandbox(asked, timeout=_SECONDS).pod_sandbox_id
        try:
            return self._run_in(sandbox, pod, container)
        finally:
            runtime.StopPodSandbox(types.StopPodSandboxRequest(pod_sandbox_id=sandbox), timeout=_SECONDS)
            runtime.RemovePodSandbox(types.RemovePodSandboxRequest(pod_sandbox_id=sandbox), timeout=_SECONDS)

    def _run_in(self, sandbox: str, pod: Any, container: Container) -> Ended:
        types, runtime = self._types, self._runtime
        config = types.ContainerConfig(
            metadata=types.ContainerMetadata(name="one"),
            image=types.ImageSpec(image=container.image),
            command=container.command,
            envs=[types.KeyValue(key=key, value=value) for key, value in container.environment.items()],
            annotations=container.annotations,
            CDI_devices=[types.CDIDevice(name=device) for device in container.devices],
            log_path="one.log",
            linux=types.LinuxContainerConfig(
                security_context=types.LinuxContainerSecurityContext(
                    namespace_options=types.NamespaceOption(network=types.NODE)
                )
            ),
        )
        asked = types.CreateContainerRequest(pod_sandbox_id=sandbox, config=config, sandbox_config=pod)
        identity = runtime.CreateContainer(asked, timeout=_SECONDS).container_id
        runtime.StartContainer(types.StartContainerRequest(container_id=identity), timeout=_SECONDS)
        deadline = time.monotonic() + _SECONDS
        while True:
            asked = types.ContainerStatusRequest(container_id=identity)
            status = runtime.ContainerStatus(asked, timeout=_SECONDS).status
            if status.state == types.CONTAINER_EXITED:
                break
            assert time.monotonic() < deadline, status
            time.sleep(0.1)
        log = self._root / f"{pod.log_directory}/one.log".lstrip("/")
        # TIME STREAM F|P LINE
        lines = [line.split(" ", 3)[3] for line in log.read_text().splitlines()] if log.exists() else []
        return Ended(status.exit_code, "\n".join(lines))

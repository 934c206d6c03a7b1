"""What breaks hosts for test_doctor.py: the libraries, programs and leftovers of docs/host-cases.md, by groups.

The troubles of a group are there at once. A user who types what the doctor says first, and runs it again until it is
silent, has typed each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.lab.fixtures import DRIVER

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
OTHER_VERSION = "535.261.03"
OTHER = f"libnvidia-ml.so.{OTHER_VERSION}"
OTHER_CUDA = f"libcuda.so.{OTHER_VERSION}"
_RUNTIME = "/usr/bin/gpuprov-container-runtime"
_SETTINGS = "/etc/nvidia-container-runtime/config.toml"
_NVIDIA_DOCKER2 = (
    '{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}}}'
)


@dataclass(frozen=True)
class Group:
    """Troubles that are made together. `rules`: those that must be found, `first` the one that comes first.

    `by_hand`: rule → what is done in the test where the command is for a person (an editor, a reboot).
    """

    name: str
    breaking: tuple[str, ...]
    first: str
    rules: frozenset[str]
    by_hand: dict[str, str] = field(default_factory=dict)


def _wrapper(path: str, banner: str) -> str:
    script = f'#!/bin/sh\\necho {banner}\\nexec /usr/bin/nvidia-smi "$@"\\n'
    return f"printf '{script}' > {path}; chmod 755 {path}"


GROUPS = (
    Group(
        "programs get other files than the driver's",
        (
            f"cp /root/{OTHER} /root/{OTHER_CUDA} /usr/local/lib/; ldconfig",
            _wrapper("/usr/local/bin/nvidia-smi", "welcome"),
        ),
        "library-hidden",
        frozenset({"library-hidden", "nvidia-smi-hidden", "version-mismatch", "nvidia-smi-18", "cdi-stale"}),
    ),
    Group(
        "a preload that can't be loaded, a wrapper in the driver's place",
        (
            "mkdir -p /root/kept-smi; cp /usr/bin/nvidia-smi /root/kept-smi/; rm /usr/bin/nvidia-smi",
            "printf '#!/bin/sh\\necho welcome\\nexec /root/kept-smi/nvidia-smi \"$@\"\\n' > /usr/bin/nvidia-smi",
            "chmod 755 /usr/bin/nvidia-smi; echo /opt/none.so > /etc/ld.so.preload",
        ),
        "preload-broken",
        frozenset({"preload-broken", "nvidia-smi-replaced"}),
    ),
    Group(
        "files of the driver are gone or broken",
        (
            f"truncate -s 1000 {LIBRARIES}/libcuda.so.{DRIVER}; rm /usr/bin/nvidia-smi",
            "rm /dev/nvidia0 /dev/nvidiactl; touch /dev/nvidiactl",
        ),
        "driver-damaged",
        frozenset({"driver-damaged", "nvidia-smi-missing", "nodes-missing", "node-wrong"}),
    ),
    Group(
        "what nvidia-docker2 left",
        (
            "mkdir -p /etc/nvidia-container-runtime /run/cdi",
            f'printf \'[nvidia-container-cli]\\nldconfig = "@/sbin/none"\\nroot = "/run/none"\\n\' > {_SETTINGS}',
            f"sed s/{DRIVER}/{OTHER_VERSION}/ /etc/cdi/nvidia.json > /var/run/cdi/nvidia.json",
            f"echo '{_NVIDIA_DOCKER2}' > /etc/docker/daemon.json; systemctl restart docker",
        ),
        "runtime-missing",
        frozenset({"runtime-missing", "cdi-names-absent-files", "driver-root-missing", "ldconfig-missing"}),
    ),
    Group(
        "modes that keep users out",
        (f"chmod 700 /etc/cdi; chmod 600 /etc/cdi/nvidia.json /dev/nvidia0 /dev/nvidiactl; chmod 644 {_RUNTIME}",),
        "runtime-not-executable",
        frozenset({"runtime-not-executable", "cdi-closed", "nodes-closed"}),
    ),
    Group(
        "specifications in each other's way",
        (
            "mkdir -p /run/cdi; cp /etc/cdi/nvidia.json /etc/cdi/other.json",
            "cp /etc/cdi/nvidia.json /var/run/cdi/nvidia.json",
            "echo '{' > /var/run/cdi/nvidia-more.json",
        ),
        "cdi-conflict",
        frozenset({"cdi-conflict", "cdi-covered"}),
    ),
    Group(
        "a read-only /usr",
        (f"mv {_RUNTIME} /root/kept-runtime; mount --bind /usr /usr; mount -o remount,bind,ro /usr",),
        "install-obstructed",
        frozenset({"install-obstructed", "runtime-missing"}),
    ),
    Group(
        "docker is disabled and its clients are sent elsewhere",
        (
            "systemctl disable --now docker.service docker.socket",
            "printf 'DOCKER_HOST=tcp://192.0.2.1:2375\\n' >> /etc/environment",
        ),
        "docker-disabled",
        frozenset({"docker-disabled", "docker-down", "docker-host"}),
    ),
    Group(
        "settings that keep containers from GPUs",
        (
            'mkdir -p /etc/gpuprov; printf \'supported-driver-capabilities = "graphics"\\n'
            "accept-nvidia-visible-devices-envvar-when-unprivileged = false\\n' > /etc/gpuprov/container-runtime.toml",
            "echo /usr/local/cuda/lib64/stubs > /etc/ld.so.conf.d/stubs.conf",
            "mkdir -p /etc/nvidia-container-runtime",
            f"printf '[nvidia-container-cli]\\nno-cgroups = true\\n' > {_SETTINGS}",
        ),
        "no-cgroups",
        frozenset({"environment-refused", "capabilities-left-out", "cuda-stub-configured", "no-cgroups"}),
    ),
    Group(
        "files that gpuprov deployed are gone",
        (
            "rm /etc/cdi/nvidia.json /usr/bin/nvidia-container-runtime-hook /usr/lib/gpuprov/runtime_hook/mounts.py",
            "systemctl stop gpuprov-refresh.path",
        ),
        "runtime-files-missing",
        frozenset({"cdi-missing", "hook-missing", "runtime-files-missing"}),
    ),
    Group(
        "docker is masked, its client talks to another one",
        (
            "docker context create away --docker host=tcp://192.0.2.1:2375; docker context use away",
            "systemctl mask --now docker.service",
        ),
        "docker-masked",
        frozenset({"docker-masked", "docker-context"}),
    ),
    Group(
        "the configuration is emptied, docker not restarted yet",
        (
            "systemctl stop gpuprov-refresh.path; echo '{' > /etc/cdi/nvidia.json",
            "echo '{}' > /etc/docker/daemon.json",
        ),
        "cdi-broken",
        frozenset({"cdi-broken", "runtime-unsaved"}),
    ),
    Group(
        "the loader's cache has a stub",
        (
            f"mkdir -p /usr/local/cuda/lib64/stubs; cp /root/{OTHER_CUDA} /usr/local/cuda/lib64/stubs/libcuda.so.1",
            "echo /usr/local/cuda/lib64/stubs > /etc/ld.so.conf.d/000-cuda.conf; ldconfig",
        ),
        "cuda-stub",
        frozenset({"cuda-stub"}),
    ),
    Group(
        "programs that docker needs are gone",
        ("mv /usr/sbin/runc /root/kept-runc; apt-get purge -y -qq docker.io",),
        "low-level-runtime-missing",
        frozenset({"docker-missing", "low-level-runtime-missing"}),
    ),
    Group(
        "units that run at boot have failed",
        (
            "systemctl stop gpuprov-refresh.path; mv /usr/lib/gpuprov/boot.pyz /root/kept-boot",
            "systemctl restart gpuprov-nodes.service; systemctl restart gpuprov-refresh.service; true",
            "mv /root/kept-boot /usr/lib/gpuprov/boot.pyz",
        ),
        "nodes-unit-failed",
        frozenset({"nodes-unit-failed", "refresh-unit-failed"}),
    ),
)

"""Troubles of docker and other engines, with what the doctor must say of each.

Rows are made-up facts, and groups real troubles of a lab host, whose commands test_doctor.py types.
Messages are recorded where a row says from where: drivers and installers in Debian chroots, NVIDIA's open kernel
modules and documentation, bug reports of the projects named. All others follow the known formats and were written here.
"""

import json
from dataclasses import replace

from gpuprov.core.changes import FileFact
from gpuprov.doctor.finding import LIKELY, POSSIBLE, WARNING
from gpuprov.doctor.snapshot import Containers, HostSnapshot
from gpuprov.engines.cri_status import CriStatus
from gpuprov.engines.docker import DockerFacts
from gpuprov.engines.docker_unit import DAEMON_JSON, DockerUnit
from gpuprov.engines.known import KUBELET_CONFIG, EngineFacts, RuntimeEntry
from gpuprov.engines.other_engines import registrations
from gpuprov.facts.leftovers import FOLDER, Leftovers, Volume
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, NVIDIA_HOOK_PATH
from tests.integration.doctor_typing import FORGET, PROGRAM, SLEEPER, Group
from tests.keys import key_fingerprint, key_packet
from tests.unit.doctor.ill import (
    AVC,
    Change,
    Row,
    both,
    daemon_json,
    docker,
    docker_says,
    host,
    installed,
    nvidias,
    registered,
    text,
    there,
    unit,
    without,
)

_NO_LOG_SERVER = (
    'level=error msg="Handler for POST /v1.45/containers/4f/start returned error: failed to create task for container: '
    'failed to initialize logging driver: dial tcp 127.0.0.1:24224: connect: connection refused"'
)
_DEVICES, _XSERVER_DEVICES = "container_use_devices", "container_use_xserver_devices"
CRI = b'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n'


def containerd(config: bytes) -> dict[str, EngineFacts]:
    """Return the facts of a containerd 1.7 with this main file, in which the runtime is registered."""
    said = "containerd github.com/containerd/containerd 1.7.24 1.7.24~ds1-6\n"
    facts = EngineFacts("/usr/bin/containerd", said, {"/etc/containerd/config.toml": config})
    edits = registrations({"containerd": facts}, RuntimeEntry(path=LAUNCHER_PATH))["containerd"].edits
    return {"containerd": replace(facts, files={**facts.files, **{edit.path: edit.after or b"" for edit in edits}})}


def podman_with(name: str) -> Change:
    """Return a podman whose containers.conf.d has a file of this name, too, with another runtime nvidia."""
    facts = registered("podman")["podman"]
    file = {f"/etc/containers/containers.conf.d/{name}": b'[engine.runtimes]\nnvidia = ["/usr/bin/crun"]\n'}
    return host(engines={"podman": replace(facts, files={**facts.files, **file})})


ENGINE_ROWS = (
    # -- docker
    Row("docker-missing", docker(installed=False, active=False, runtimes=None, config_text=None), "command -v dockerd",
        "gpuprov install"),
    Row("docker-snap", docker(installed=False, snap=True, active=False, runtimes=None, config_text=None),
        "/snap/bin/docker", "snap remove docker"),
    Row("docker-is-podman", installed(podman_docker="4.3.1"), "podman-docker", "--device nvidia.com/gpu=all", WARNING),
    Row("daemon-json-broken",
        docker(config_text='{\n  "runtimes": {,\n}\n', refused="invalid character ',' looking for beginning of string"),
        "dockerd: invalid character ','", "+2 /etc/docker/daemon.json"),
    # dockerd 20.10.24 reads the first value, and nothing after it.
    Row("daemon-json-broken", lambda x: docker(config_text=f"{x.host.docker.config_text} x")(x), "Extra data",
        "/etc/docker/daemon.json", WARNING),
    Row("daemon-json-broken",
        docker(config_text="{}", config_path="/opt/dk/d.json", refused="no such option", active=False, runtimes=None),
        "dockerd: no such option", "${EDITOR:-vi} /opt/dk/d.json"),
    Row("daemon-json-broken",
        docker(config_text=None, config_kind="directory", refused="is a directory", active=False, runtimes=None),
        "stat /etc/docker/daemon.json: directory", "mv /etc/docker/daemon.json /etc/docker/daemon.json.old"),
    # docker.io purged, containerd and daemon.json left.
    Row("docker-missing",
        both(docker(installed=False, active=False, runtimes=None), there("/usr/bin/containerd", "/usr/bin/podman")),
        "command -v dockerd: nothing\n/etc/docker/daemon.json: runtime nvidia is", "gpuprov install"),
    Row("docker-missing",
        both(docker(installed=False, active=False, runtimes=None, config_text=None), there("/usr/bin/containerd")),
        "command -v dockerd: nothing", "gpuprov install"),
    Row("docker-disabled",
        both(docker(active=False, runtimes=None), unit("docker.service", active="inactive", enabled="disabled")),
        "systemctl show docker.service: disabled, inactive", "systemctl enable --now docker.service"),
    Row("docker-disabled", unit("docker.service", enabled="disabled"), "disabled, active", "systemctl enable", WARNING),
    Row("docker-unreachable",
        docker(active=False, runtimes=None, address="tcp://127.0.0.1:2376", error="client sent an HTTP request"),
        "docker --host tcp://127.0.0.1:2376 info: client sent an HTTP request",
        "docker --host tcp://127.0.0.1:2376 info", LIKELY),
    Row("docker-unreachable", docker(active=False, runtimes=None, error="docker's client is not installed"),
        "command -v docker: nothing", "apt-get install -y docker-cli", LIKELY),
    Row("docker-unit-changed",
        docker(unit=DockerUnit(load="loaded", command=("dockerd", "--config-file=/n"), running=("dockerd", "-H", "x"))),
        "/proc/PID/cmdline of dockerd: dockerd -H x", "systemctl restart docker"),
    Row("docker-unit-changed",
        docker(unit=DockerUnit("loaded", "", "failed", "", ("dockerd",), ("dockerd", "--config-file=x"))),
        "systemctl show docker.service: failed", "kill $pid; "),
    # `Restart=always`: systemd waits to start it once more.
    Row("docker-containerd-down",
        both(docker(unit=DockerUnit("loaded", command=("dockerd", "--containerd=/run/containerd/containerd.sock"))),
             unit("containerd.service", active="activating", result="exit-code")),
        "systemctl show containerd.service: activating, exit-code", "systemctl restart containerd"),
    Row("docker-containerd-down",
        both(docker(unit=DockerUnit("loaded", command=("dockerd", "--containerd=/run/containerd/containerd.sock"))),
             unit("containerd.service", active="failed", result="oom-kill")),
        "systemctl show containerd.service: failed, oom-kill", "systemctl restart containerd"),
    # docker was restarted since, or the host: it comes up no more.
    Row("docker-containerd-down",
        both(docker(unit=DockerUnit("loaded", command=("dockerd", "--containerd=/run/containerd/containerd.sock")),
                    active=False, runtimes=None),
             unit("docker.service", active="activating"),
             unit("containerd.service", active="activating", result="exit-code")),
        "systemctl show containerd.service: activating, exit-code", "systemctl restart containerd"),
    Row("docker-host",
        both(docker(unit=DockerUnit(load="loaded", command=("dockerd",)), address="unix:///var/run/docker.sock"),
             text("/etc/environment", "DOCKER_HOST=tcp://build.example:2375\n")),
        "/etc/environment: DOCKER_HOST=tcp://build.example:2375", "sed -i", LIKELY),
    # dockerd 20.10.24, its unit started with --add-runtime beside the file.
    Row("docker-flags-twice",
        both(docker(active=False, runtimes=None), unit("docker.service", active="failed", result="exit-code"),
             docker_says("unable to configure the Docker daemon with file /etc/docker/daemon.json: the following "
                         "directives are specified both as a flag and in the configuration file: hosts: (from flag: "
                         "[fd://], from file: [tcp://x])")),
        "specified both as a flag", "systemctl cat docker"),
    Row("docker-masked",
        both(docker(active=False, unit=DockerUnit(load="masked")),
             unit("docker.service", load="masked", active="inactive")),
        "masked", "systemctl unmask docker.service"),
    Row("docker-masked",
        docker(unit=DockerUnit("masked", active="inactive", running=("dockerd",), name=r"a\x2db.service"), runtimes={}),
        "docker.service: inactive", "gpuprov runtime configure --runtime-path /usr/bin/gpuprov-container-runtime "
        r"--cdi.enabled; systemctl restart 'a\x2db.service'; gpuprov install"),
    Row("docker-down",
        both(docker(active=False, error="Cannot connect"), unit("docker.service", active="failed", result="exit-code"),
             docker_says('level=error msg="failed to start daemon: error initializing graphdriver: driver not '
                         'supported"')),
        "failed, exit-code", "systemctl reset-failed docker; systemctl restart docker"),
    Row("docker-down",
        both(docker(active=False, runtimes=None, unit=DockerUnit("loaded", socket_load="not-found")),
             unit("docker.service", active="inactive")),
        "docker.socket: LoadState=not-found", "systemctl reset-failed docker; printf '[Socket]"),
    Row("docker-not-restarted", docker(runtimes={"runc": "runc"}), f"runtime nvidia is {LAUNCHER_PATH}",
        "systemctl restart docker"),
    Row("docker-not-restarted", docker(runtimes={"runc": "runc", "nvidia": "/opt/old"}),
        "has runtime nvidia as /opt/old", "systemctl restart docker"),
    Row("runtime-unregistered", docker(config_text="{}", runtimes={"runc": "runc"}), "no runtimes.nvidia",
        "gpuprov install"),
    Row("runtime-unregistered", both(nvidias, docker(config_text=None, runtimes={"runc": "runc"})), "No such file",
        "nvidia-ctk runtime configure --runtime=docker; systemctl restart docker"),
    Row("runtime-unsaved", docker(config_text="{}"), "no runtimes.nvidia", "gpuprov install", LIKELY),
    # A tool that manages the file has written it after each of two runs: the next installation would not last either.
    Row("runtime-unsaved",
        both(docker(config_text="{}"),
             lambda x: replace(x, docker_file_rewritten=2, modified={DAEMON_JSON: 1700000000.0})),
        "2 runs wrote it, and another tool wrote it after each",
        "journalctl --no-pager --since @1699999940 --until @1700000060; gpuprov install", LIKELY),
    # systemd 252: "Operation refused, unit docker.service may be requested by dependency only".
    Row("docker-not-restarted",
        docker(runtimes={"runc": "runc"}, unit=DockerUnit(load="loaded", active="active", refuses_restart=True)),
        f"runtime nvidia is {LAUNCHER_PATH}", "systemctl edit docker; systemctl restart docker  # RefuseManualStop=no"),
    # docker 26.1, `docker run` with fluentd stopped.
    Row("log-driver-unreachable",
        both(daemon_json({"log-driver": "fluentd"}), docker_says(_NO_LOG_SERVER)), "log-driver: fluentd",
        "${EDITOR:-vi} /etc/docker/daemon.json; systemctl restart docker  # or start the server of fluentd", LIKELY),
    Row("log-driver-unreachable", docker_says(_NO_LOG_SERVER), "dial tcp 127.0.0.1:24224", "logging driver", WARNING),
    Row("docker-mounts-apart",
        both(unit("containerd.service"),
             lambda x: replace(x, mount_namespaces="4026532674 /sbin/init\n4026532177 /usr/sbin/dockerd -H fd://\n",
                               docker_unit="# /lib/systemd/system/docker.service\nProtectHome=no\n"
                               "# /etc/systemd/system/docker.service.d/a b.conf\n[Service]\nPrivateTmp=yes\n")),
        "/etc/systemd/system/docker.service.d/a b.conf: PrivateTmp=yes",
        "sed -i 's/^PrivateTmp=/#&/' '/etc/systemd/system/docker.service.d/a b.conf'; systemctl daemon-reload; "
        "systemctl restart docker", LIKELY),
    Row("default-runtime-unknown", daemon_json({"default-runtime": "kata"}), "default-runtime: kata",
        "${EDITOR:-vi} /etc/docker/daemon.json; systemctl reset-failed docker", LIKELY),
    Row("default-runtime-unknown",
        both(daemon_json({"default-runtime": "sysbox-runc"},
                         runtimes={"nvidia": LAUNCHER_PATH, "sysbox-runc": "/usr/bin/sysbox-runc"}),
             lambda x: replace(x, absent=x.absent | {"/usr/bin/sysbox-runc"})),
        "ls /usr/bin/sysbox-runc: No such file or directory", "${EDITOR:-vi} /etc/docker/daemon.json", LIKELY),
    Row("default-runtime-isolates",
        daemon_json({"default-runtime": "kata", "runtimes": {"nvidia": {"path": LAUNCHER_PATH},
                                                             "kata": {"runtimeType": "io.containerd.kata.v2"}}}),
        "default-runtime: kata", "docker run --rm --runtime=nvidia --gpus all", LIKELY),
    Row("hook-covered",
        lambda x: replace(x, programs={**x.programs, "nvidia-container-runtime-hook": "/usr/local/bin/hook"}),
        "command -v nvidia-container-runtime-hook: /usr/local/bin/hook",
        "mv /usr/local/bin/hook /usr/local/bin/hook.old; systemctl restart docker", LIKELY),
    Row("hook-missing", both(without(NVIDIA_HOOK_PATH), lambda x: replace(x, programs={"runc": "/usr/bin/runc"})),
        "command -v nvidia-container-runtime-hook: nothing", "systemctl restart docker"),
    Row("hook-missing",
        both(lambda x: host(files={**x.host.files, NVIDIA_HOOK_PATH: FileFact(b"", 0o777, 0, 0)})(x),
             lambda x: replace(x, programs={"runc": "/usr/bin/runc"})),
        f"{NVIDIA_HOOK_PATH} is there, and no program", f"rm {NVIDIA_HOOK_PATH}; gpuprov install; systemctl restart"),
    Row("hook-missing",
        both(installed(nvidia_container_toolkit="1.19.1-1", nvidia_container_toolkit_base="1.19.1-1"),
             both(without(NVIDIA_HOOK_PATH), lambda x: replace(x, programs={"runc": "/usr/bin/runc"}))),
        "nvidia-container-runtime-hook: nothing", "apt-get install -y --reinstall nvidia-container-toolkit; "),
    # dockerd 20.10.24 and 26.1.5, `docker run --gpus all` without the hook at its start.
    Row("hook-unseen",
        docker_says('level=error msg="Handler for POST /v1.41/containers/x/start returned error: could not select '
                    'device driver \\"\\" with capabilities: [[gpu]]"'),
        "could not select device driver", "systemctl restart docker"),
    Row("hook-unseen", lambda x: replace(x, modified={NVIDIA_HOOK_PATH: 20.0, "/run/docker.pid": 10.0}), "stat",
        "systemctl restart docker", WARNING),
    Row("hook-not-on-path",
        lambda x: replace(x, docker_unit="[Service]\nEnvironment=PATH=/usr/bin\nEnvironment=PATH=/opt/bin:/bin\n"),
        "PATH=/opt/bin:/bin", "systemctl edit docker", LIKELY),
    Row("docker-context", text("/root/.docker/config.json", '{"currentContext": "desktop-linux"}'), "desktop-linux",
        "docker context use default", LIKELY),
    Row("docker-rootless", lambda x: replace(x, rootless=("/run/user/1000/docker.sock",)), "/run/user/1000",
        "systemctl --user restart docker", WARNING),
    Row("selinux-denies", lambda x: replace(x, selinux="Enforcing", selinux_off=(_DEVICES,), kernel_log=(AVC,)),
        "xserver_misc_device_t", "setsebool -P container_use_devices 1", LIKELY),
    # Fedora's policy has had a narrower boolean since 2023.
    Row("selinux-denies",
        lambda x: replace(x, selinux="Enforcing", selinux_off=(_DEVICES, _XSERVER_DEVICES), kernel_log=(AVC,)),
        "xserver_misc_device_t", "setsebool -P container_use_xserver_devices 1", LIKELY),
    Row("selinux-denies", lambda x: replace(x, selinux="Enforcing", audit_log=(AVC,)), "denied", "setsebool", POSSIBLE),
    Row("selinux-denies",
        lambda x: replace(x, selinux="Enforcing", audit_log=(AVC.replace("xserver_misc_device_t", "device_t"),)),
        "device_t", "restorecon -R -v /dev/nvidia*", LIKELY),
    # Debian 13 with its reference policy, podman 5.4.2.
    Row("selinux-denies",
        lambda x: replace(
            x, selinux="Enforcing", selinux_off=(_DEVICES,), audit_log=(
                'type=AVC msg=audit(1796131639.940:165): avc:  denied  { entrypoint } for  pid=1356 comm="crun" '
                'path="/usr/bin/nvidia-smi" dev="vda" ino=1033 scontext=system_u:system_r:container_t:s0:c677,c983 '
                "tcontext=system_u:object_r:bin_t:s0 tclass=file permissive=0",
            )),
        'path="/usr/bin/nvidia-smi"', "--security-opt=label=disable IMAGE", POSSIBLE),
    Row("apparmor-denies",
        lambda x: replace(
            x,
            kernel_log=(
                'audit: apparmor="DENIED" operation="open" profile="docker-default" name="/dev/nvidiactl" pid=1',
            ),
        ),
        "docker-default", "aa-status", POSSIBLE),
    # -- other engines
    Row("engine-missing", host(engines={"crio": EngineFacts()}), "command -v crio", "apt-get install -y cri-o"),
    Row("engine-missing", host(engines={"k3s": EngineFacts()}), "command -v k3s",
        "curl -sfL https://get.k3s.io | sh -"),
    Row("engine-missing", host(engines={"rke2": EngineFacts()}), "command -v rke2", "curl -sfL https://get.rke2.io"),
    Row("engine-missing", host(engines={"microk8s": EngineFacts()}), "command -v microk8s", "snap install microk8s"),
    Row("engine-missing", lambda x: replace(host(docker=DockerFacts())(x), spec=replace(x.spec, docker="none")),
        "command -v containerd crio podman", "apt-get install -y podman"),
    Row("engine-unreadable",
        host(engines={"containerd": EngineFacts("/bin/containerd", "", {"/etc/containerd/config.toml": b"a = "})}),
        "line 1", "${EDITOR:-vi} /etc/containerd/config.toml; gpuprov install  # correct it"),
    Row("engine-unconfigured",
        host(engines={
                 "containerd": EngineFacts(
                     "/bin/containerd", "", {"/etc/containerd/config.toml": b"[plugins.cri]\na = 1\n"}
                 )
             }),
        "/etc/containerd/config.toml", "gpuprov install"),
    Row("engine-down",
        both(host(engines=registered("containerd")), unit("containerd.service", active="failed", result="timeout")),
        "failed, timeout", "systemctl restart containerd"),
    Row("engine-down",
        both(host(engines=registered("containerd")),
             unit("containerd.service", active="activating", result="exit-code")),
        "activating, exit-code", "systemctl restart containerd"),
    # -- Kubernetes nodes
    Row("node-engine-unnamed", host(kubernetes=("kubelet",)), "kubernetes: kubelet; gpuprov_engines: not set",
        """gpuprov install -e '{"gpuprov_engines": ["containerd"]}'""", WARNING),
    Row("node-engine-unnamed",
        both(host(kubernetes=("k3s",)), lambda x: replace(x, spec=replace(x.spec, docker="none"))), "kubernetes: k3s",
        """gpuprov install -e '{"gpuprov_engines": ["k3s"]}'""", LIKELY),
    Row("engine-not-restarted",
        host(engines={"containerd": replace(registered("containerd")["containerd"], running=CriStatus(("runc",)))}),
        "handlers runc", "systemctl restart containerd"),
    # Nobody has named it, and pods depend on it.
    Row("engine-not-restarted",
        host(engines={"containerd": replace(registered("containerd")["containerd"], running=CriStatus(("runc",)))},
             kubernetes=("kubelet",)),
        "CRI Status at /run/containerd/containerd.sock", "systemctl restart containerd", WARNING),
    Row("containerd-cri-off",
        host(engines=containerd(b'version = 2\ndisabled_plugins = ["cri"]\n'), kubernetes=("kubelet",)),
        'disabled_plugins = ["cri"]', "systemctl restart containerd"),
    Row("containerd-cdi-off", host(engines=containerd(CRI + b"enable_cdi = false\n")), "enable_cdi = false",
        "systemctl restart containerd", WARNING),
    Row("cgroup-drivers-differ",
        both(host(engines=containerd(CRI), kubernetes=("kubelet",)),
             text(KUBELET_CONFIG, "apiVersion: kubelet.config.k8s.io/v1beta1\ncgroupDriver: systemd\n")),
        "no SystemdCgroup = true for runc", "SystemdCgroup = true", POSSIBLE),
    Row("podman-fails",
        both(host(engines=registered("podman")),
             lambda x: replace(x, containers=Containers(why="`podman ps` exited 125\ntoml: line 1"))),
        "toml: line 1", "podman info  # correct"),
    Row("podman-fails", lambda x: replace(x, containers=Containers(why="`podman ps` exited 125")), "exited 125",
        "podman info", WARNING),
    Row("podman-runtime-covered", podman_with("99-site.conf"),
        '/etc/containers/containers.conf.d/99-site.conf: nvidia = ["/usr/bin/crun"]',
        "${EDITOR:-vi} /etc/containers/containers.conf.d/99-site.conf  # take", LIKELY),
    Row("podman-without-cdi", both(installed(podman="3.0.1+dfsg1-3"), host(engines=registered("podman"))), "3.0.1",
        "apt-get install -y podman", LIKELY),
    Row("refresh-unit-failed", unit("gpuprov-refresh.service", active="failed", result="exit-code"), "exit-code",
        "systemctl start gpuprov-refresh", WARNING),
    Row("refresh-path-failed", unit("gpuprov-refresh.path", active="failed", result="resources"), "resources",
        "systemctl restart gpuprov-refresh.path", WARNING),
    Row("persistenced-failed", unit("nvidia-persistenced.service", active="failed", result="signal"), "signal",
        "systemctl reset-failed nvidia-persistenced.service; systemctl restart nvidia-persistenced.service; ", WARNING),
)  # fmt: skip


# -- nvidia-docker 1 and 2 ---------------------------------------------------------------------------------------------
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

# -- on lab hosts -----------------------------------------------------------------------------------------------------

_DAEMON_JSON = "/etc/docker/daemon.json"
_CONTAINERD = "/etc/containerd/config.toml"
# A key that the hosts have and apt does not trust stands for that of NVIDIA's retired repositories.
_RETIRED_KEY = "D051FE3A848DCABD4625787A6FFA8EF91DB114E0"


def _package(name: str, version: str) -> str:
    """Return the command that installs an empty package."""
    lines = (f"Package: {name}", f"Version: {version}", "Architecture: all", "Maintainer: A", "Description: -")
    control = "".join(f"{line}\\n" for line in lines)
    return (
        f"mkdir -p /root/{name}/DEBIAN; printf '{control}' > /root/{name}/DEBIAN/control; "
        f"dpkg-deb --build /root/{name} /root/{name}.deb; dpkg --install /root/{name}.deb"
    )


ENGINE_GROUPS = (
    Group("containerd is stopped under docker", ("systemctl stop containerd.service",),
          frozenset({"docker-containerd-down"})),
    Group("the file system of docker's sockets and containers' states is full",
          (SLEEPER, "mount -o remount,size=$(($(df --output=used -k /run | tail -n 1) + 512))k /run",
           "dd if=/dev/zero of=/run/filler bs=4k; docker run --rm sleeper:1 /bin/sleep 1 && exit 1; true"),
          frozenset({"docker-no-room"}),
          # What docker has said stays until then. The size is systemd-nspawn's own again.
          then={"docker-no-room": f"rm /run/filler; mount -o remount,size=20% /run; {FORGET}"}),
    Group("a container wants a limit that this machine may not raise",
          (SLEEPER, "docker run --rm --network none --ulimit memlock=-1 sleeper:1 /bin/sleep 1 && exit 1; true"),
          frozenset({"docker-limit-refused"}), then={"docker-limit-refused": FORGET}),
    Group("docker is disabled and its clients are sent elsewhere",
          ("systemctl disable --now docker.service docker.socket",
           "printf 'DOCKER_HOST=tcp://192.0.2.1:2375\\n' >> /etc/environment"),
          frozenset({"docker-disabled", "docker-host", "docker-down"}),
          then={"docker-host": "systemctl stop docker.service docker.socket"}),
    Group("the socket that docker requires is gone",
          ("systemctl stop docker.service docker.socket; mv /lib/systemd/system/docker.socket /root/kept.socket",
           "systemctl daemon-reload"),
          frozenset({"docker-down"})),
    Group("docker is masked, its client talks to another one",
          ("docker context create away --docker host=tcp://192.0.2.1:2375; docker context use away",
           "systemctl mask --now docker.service"),
          frozenset({"docker-masked", "docker-context"})),
    Group("programs that docker needs are gone", ("mv /usr/sbin/runc /root/kept-runc; apt-get purge -y -qq docker.io",),
          frozenset({"docker-missing", "low-level-runtime-missing"})),
    Group("files of docker's that it can't read, or does not know",
          (f"cp {_DAEMON_JSON} /root/kept.json; sed -i '1s/{{/{{,/' {_DAEMON_JSON}",),
          frozenset({"daemon-json-broken"}), editor="cp /root/kept.json $file"),
    Group(
        "docker's own settings keep it from its start",
        (
            f"cp {_DAEMON_JSON} /root/kept.json",
            f'sed -i \'1s/{{/{{"default-runtime": "kata", "debug": true,/\' {_DAEMON_JSON}',
            "mkdir -p /etc/systemd/system/docker.service.d",
            "printf '[Service]\nExecStart=\nExecStart=/usr/sbin/dockerd -H fd:// --debug\n' > "
            "/etc/systemd/system/docker.service.d/10-flags.conf; systemctl daemon-reload",
            "systemctl restart docker; true",
        ),
        frozenset({"docker-flags-twice", "default-runtime-unknown", "daemon-json-broken"}),
        # One fault at a time, as somebody does who reads the first message.
        editor="if grep -q debug $file; then sed -i 's/ \"debug\": true,//' $file; else cp /root/kept.json $file; fi",
        then={
            "default-runtime-unknown": "rm -r /etc/systemd/system/docker.service.d; systemctl daemon-reload; "
            "systemctl restart docker"
        },
    ),
    Group("docker reads another file since its unit changed",
          ("mkdir -p /etc/systemd/system/docker.service.d; echo '{}' > /etc/docker/other.json",
           "printf '[Service]\nExecStart=\nExecStart=/usr/sbin/dockerd -H fd:// "
           "--config-file /etc/docker/other.json\n' > /etc/systemd/system/docker.service.d/10-file.conf",
           "systemctl daemon-reload"),
          frozenset({"docker-unit-changed", "runtime-unregistered"}),
          then={
              "runtime-unregistered": "rm -r /etc/systemd/system/docker.service.d; systemctl daemon-reload; "
              "systemctl restart docker"
          }),
    Group("dockerd's PATH lacks the hook",
          ("mkdir -p /etc/systemd/system/docker.service.d",
           "printf '[Service]\nEnvironment=PATH=/usr/sbin:/sbin\n' > "
           "/etc/systemd/system/docker.service.d/10-path.conf; systemctl daemon-reload; systemctl restart docker"),
          frozenset({"hook-not-on-path"}),
          editor="printf '[Service]\nEnvironment=PATH=/usr/sbin:/usr/bin:/sbin:/bin\n' > $file"),
    Group("docker mounts file systems that containerd does not see",
          ("mkdir -p /etc/systemd/system/docker.service.d",
           "printf '[Service]\nPrivateTmp=yes\nProtectSystem=full\n' > "
           "/etc/systemd/system/docker.service.d/10-safe.conf; systemctl daemon-reload; systemctl restart docker"),
          frozenset({"docker-mounts-apart"})),
    Group("docker's client has no socket", ("rm /run/docker.sock",), frozenset({"docker-unreachable"}),
          then={"docker-unreachable": "systemctl restart docker.socket docker.service"}),
    Group("containerd is asked for, not configured, and stopped", (), frozenset({"engine-unconfigured", "engine-down"}),
          then={"engine-unconfigured": "systemctl stop containerd"}, options={"gpuprov_engines": ["containerd"]}),
    Group("a volume that nvidia-docker has left", ("docker volume create nvidia_driver_375.26",),
          frozenset({"nvidia-docker-volumes"})),
    Group("what nvidia-docker 1 and 2 have left",
          (_package("nvidia-docker2", "2.13.0-1"), "mkdir /var/lib/nvidia-docker; touch /usr/bin/nvidia-docker-plugin",
           "echo 'deb https://nvidia.github.io/nvidia-docker/debian10/amd64 /' > "
           "/etc/apt/sources.list.d/nvidia-docker.list",

           """sed -i 's|"runtimes": {|&"nvidia-x": {"path": "/usr/bin/nvidia-container-runtime-x"},|' """
           f"{_DAEMON_JSON}",
           "systemctl restart docker"),

          frozenset({"toolkit-retired", "nvidia-docker-plugin", "nvidia-docker-repository", "nvidia-docker-key",
                    "nvidia-docker-runtimes"}),

          then={"nvidia-docker-repository":
          "cp /usr/share/keyrings/debian-archive-removed-keys.gpg /usr/share/keyrings/nvidia-docker.gpg"},
          options={"gpuprov_toolkit_key_fingerprint": _RETIRED_KEY}),
    Group("containerd's file is invalid TOML, then one that it has not read",
          (f"{PROGRAM} runtime configure --runtime containerd; systemctl restart containerd",
           f"cp {_CONTAINERD} /root/kept.toml; echo '[[' >> {_CONTAINERD}"),
          frozenset({"engine-unreadable", "engine-not-restarted"}), editor="cp /root/kept.toml $file",
          then={"engine-unreadable": f"mv {_CONTAINERD} /root/kept.toml; systemctl restart containerd; "
          f"mv /root/kept.toml {_CONTAINERD}"},
          options={"gpuprov_engines": ["containerd"]}),
)  # fmt: skip
# Kind (test_doctor_typed.py) → rules whose command no test types.
ENGINE_EXCUSES = {
    "system": {"bpf-refused", "default-runtime-isolates", "docker-is-podman", "docker-rootless", "docker-snap",
               "gpus-without-cdi", "podman-fails", "selinux-denies"},
    "release": {"podman-without-cdi"},
    "container host": {"sysctl-refused"},
    "toolkit": {"driver-not-described", "driver-timed-out", "hook-refuses", "image-has-driver", "library-not-loaded"},
}  # fmt: skip

"""What breaks hosts for test_doctor.py: the libraries, programs, settings and leftovers, by groups.

The troubles of a group are there at once. A user who types what the doctor says first, and runs it again until it is
silent, has typed each of them.
"""

from gpuprov.boot.prepare import content_of
from gpuprov.facts.boot import PERSISTENCE, UNITS
from tests.integration.doctor_typing import PROGRAM, Group
from tests.lab.fixtures import DRIVER

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
OTHER_VERSION = "535.261.03"
OTHER = f"libnvidia-ml.so.{OTHER_VERSION}"
OTHER_CUDA = f"libcuda.so.{OTHER_VERSION}"
_DAEMON_JSON = "/etc/docker/daemon.json"
_PYTHON = "/usr/bin/python3.11"
_PERSISTENCE_UNIT = content_of(f"{UNITS}/{PERSISTENCE}").decode()
_RUNTIME = "/usr/bin/gpuprov-container-runtime"
_SETTINGS = "/etc/nvidia-container-runtime/config.toml"
# Holds the lock as a run does, and ends once somebody waits for its end.
_RUN = """flock 9
printf '{"pid": %s, "command": "install", "since": "now"}' $$ >&9
until pgrep -f "tail --pid=$$" > /dev/null; do sleep 1; done
"""
_NVIDIA_DOCKER2 = (
    '{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}}}'
)
# A key that the hosts have and apt does not trust stands for that of NVIDIA's retired repositories.
_RETIRED_KEY = "D051FE3A848DCABD4625787A6FFA8EF91DB114E0"
_CONTAINERD = "/etc/containerd/config.toml"
_CONTAINER = "docker run --detach --rm --network none --runtime nvidia -e NVIDIA_VISIBLE_DEVICES=all"
SLEEPER = (
    "mkdir -p /root/image; tar -hc /bin/sleep /lib/x86_64-linux-gnu/libc.so.6 /lib64/ld-linux-x86-64.so.2 "
    "-C /root/image . | docker import - sleeper:1"
)
FORGET = "journalctl --rotate; journalctl --vacuum-size=1"


def _package(name: str, version: str) -> str:
    """Return the command that installs an empty package."""
    lines = (f"Package: {name}", f"Version: {version}", "Architecture: all", "Maintainer: A", "Description: -")
    control = "".join(f"{line}\\n" for line in lines)
    return (
        f"mkdir -p /root/{name}/DEBIAN; printf '{control}' > /root/{name}/DEBIAN/control; "
        f"dpkg-deb --build /root/{name} /root/{name}.deb; dpkg --install /root/{name}.deb"
    )


def _wrapper(path: str, banner: str) -> str:
    script = f'#!/bin/sh\\necho {banner}\\nexec /usr/bin/nvidia-smi "$@"\\n'
    return f"printf '{script}' > {path}; chmod 755 {path}"


# So that the host does not put right by itself what is broken next.
_NO_REFRESH = "systemctl stop gpuprov-refresh.path gpuprov-changed.service gpuprov-refresh.service"
# systemd gives a path up that starts its unit too often. What mostly ends it, inotify's limits, hosts share.
_FAILED_PATH = """set -e; d=/run/systemd/system/gpuprov-refresh.path.d; mkdir -p $d
printf '[Path]\\nPathExists=/\\nTriggerLimitIntervalSec=1h\\nTriggerLimitBurst=2\\n' > $d/limit.conf
systemctl daemon-reload; systemctl restart gpuprov-refresh.path
until systemctl is-failed --quiet gpuprov-refresh.path; do sleep 0.1; done
rm -r $d; systemctl daemon-reload"""
SOFTWARE_GROUPS = (
    Group("programs get other files than the driver's",
          (f"cp /root/{OTHER} /root/{OTHER_CUDA} /usr/local/lib/; ldconfig",
           _wrapper("/usr/local/bin/nvidia-smi", "welcome")),
          frozenset({"library-hidden", "nvidia-smi-hidden"})),
    Group("a preload that can't be loaded, a wrapper in the driver's place",
          ("mkdir -p /root/kept-smi; cp /usr/bin/nvidia-smi /root/kept-smi/; rm /usr/bin/nvidia-smi",
           "printf '#!/bin/sh\\necho welcome\\nexec /root/kept-smi/nvidia-smi \"$@\"\\n' > /usr/bin/nvidia-smi",
           "chmod 755 /usr/bin/nvidia-smi; echo /opt/none.so > /etc/ld.so.preload"),
          frozenset({"preload-broken", "nvidia-smi-replaced"})),
    Group("files of the driver are gone or broken",
          (f"truncate -s 1000 {LIBRARIES}/libcuda.so.{DRIVER}; rm /usr/bin/nvidia-smi",),
          frozenset({"driver-damaged", "nvidia-smi-missing"})),
    Group("device nodes are gone, and a file lies in the place of one", ("rm /dev/nvidia0",),
          frozenset({"nodes-missing", "node-wrong"}),
          then={"nodes-missing": "rm /dev/nvidiactl; touch /dev/nvidiactl"}),
    Group("libraries of another driver than the loaded module's",
          (f"cp /root/{OTHER} {LIBRARIES}/; ln -sf {OTHER} {LIBRARIES}/libnvidia-ml.so.1",),
          frozenset({"version-mismatch", "nvidia-smi-18", "driver-damaged", "drivers-several"})),
    Group("what nvidia-docker2 left",
          ("mkdir -p /etc/nvidia-container-runtime /run/cdi",
           f'printf \'[nvidia-container-cli]\\nldconfig = "@/sbin/none"\\nroot = "/run/none"\\n\' > {_SETTINGS}',
           f"sed s/{DRIVER}/{OTHER_VERSION}/ /etc/cdi/nvidia.json > /var/run/cdi/nvidia.json",
           f"echo '{_NVIDIA_DOCKER2}' > /etc/docker/daemon.json; systemctl restart docker"),
          frozenset({"runtime-missing", "cdi-names-absent-files", "driver-root-missing", "ldconfig-missing"})),
    Group("modes that keep users out",
          (f"chmod 700 /etc/cdi; chmod 600 /etc/cdi/nvidia.json /dev/nvidia0 /dev/nvidiactl; chmod 644 {_RUNTIME}",),
          frozenset({"runtime-not-executable", "cdi-closed", "nodes-closed"})),
    Group("specifications in each other's way",
          ("mkdir -p /run/cdi; cp /etc/cdi/nvidia.json /etc/cdi/other.json",
           "cp /etc/cdi/nvidia.json /var/run/cdi/nvidia.json", "echo '{' > /var/run/cdi/nvidia-more.json"),
          frozenset({"cdi-conflict", "cdi-covered"})),
    Group("a read-only /usr",
          (f"mv {_RUNTIME} /root/kept-runtime; mount --bind /usr /usr; mount -o remount,bind,ro /usr",),
          frozenset({"install-obstructed", "runtime-missing"})),
    Group("docker is disabled and its clients are sent elsewhere",
          ("systemctl disable --now docker.service docker.socket",
           "printf 'DOCKER_HOST=tcp://192.0.2.1:2375\\n' >> /etc/environment"),
          frozenset({"docker-disabled", "docker-host", "docker-down"}),
          then={"docker-host": "systemctl stop docker.service docker.socket"}),
    Group("settings that keep containers from GPUs",
          ('mkdir -p /etc/gpuprov; printf \'supported-driver-capabilities = "graphics"\\n'
           "accept-nvidia-visible-devices-envvar-when-unprivileged = false\\n' > /etc/gpuprov/container-runtime.toml",
           "echo /usr/local/cuda/lib64/stubs > /etc/ld.so.conf.d/stubs.conf", "mkdir -p /etc/nvidia-container-runtime",
           f"printf '[nvidia-container-cli]\\nno-cgroups = true\\n' > {_SETTINGS}"),
          frozenset({"environment-refused", "capabilities-left-out", "cuda-stub-configured", "no-cgroups"})),
    Group("files that gpuprov deployed are gone", ("rm /usr/lib/gpuprov/runtime_hook/system_calls.py",),
          frozenset({"runtime-files-missing", "cdi-missing"}),
          then={"runtime-files-missing": f"{_NO_REFRESH}; rm /etc/cdi/nvidia.json"}),
    Group("docker is masked, its client talks to another one",
          ("docker context create away --docker host=tcp://192.0.2.1:2375; docker context use away",
           "systemctl mask --now docker.service"),
          frozenset({"docker-masked", "docker-context"})),
    Group("the configuration is emptied, docker not restarted yet",
          (f"{_NO_REFRESH}; echo '{{' > /etc/cdi/nvidia.json",
           "echo '{}' > /etc/docker/daemon.json"),
          frozenset({"cdi-broken", "runtime-unsaved"})),
    Group("the loader's cache has a stub",
          (f"mkdir -p /usr/local/cuda/lib64/stubs; cp /root/{OTHER_CUDA} /usr/local/cuda/lib64/stubs/libcuda.so.1",
           "echo /usr/local/cuda/lib64/stubs > /etc/ld.so.conf.d/000-cuda.conf; ldconfig"),
          frozenset({"cuda-stub"})),
    Group("programs that docker needs are gone", ("mv /usr/sbin/runc /root/kept-runc; apt-get purge -y -qq docker.io",),
          frozenset({"docker-missing", "low-level-runtime-missing"})),
    Group("units that run at boot have failed",
          (_FAILED_PATH,
           f"{_NO_REFRESH}; mv /usr/lib/gpuprov/boot.pyz /root/kept-boot",
           "systemctl restart gpuprov-nodes.service; systemctl restart gpuprov-refresh.service; true",
           "mv /root/kept-boot /usr/lib/gpuprov/boot.pyz"),
          frozenset({"nodes-unit-failed", "refresh-path-failed", "refresh-unit-failed"})),
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
    Group("docker's client has no socket", ("rm /run/docker.sock",), frozenset({"docker-unreachable"}),
          then={"docker-unreachable": "systemctl restart docker.socket docker.service"}),
    Group("the toolkit is gone, docker has forgotten it",
          (f"rm {_RUNTIME} /usr/bin/nvidia-container-runtime-hook; echo '{{}}' > {_DAEMON_JSON}",
           "systemctl restart docker"),
          frozenset({"toolkit-missing", "runtime-unregistered"})),
    Group("the driver is gone", ("nvidia-uninstall --silent; touch /var/lib/gpuprov/driver-incomplete; true",),
          frozenset({"driver-incomplete", "driver-missing"})),
    Group("the Python that gpuprov's runtime names is gone", (f"sed -i 's|{_PYTHON}|/usr/bin/python3.8|g' {_RUNTIME}",),
          frozenset({"python-missing", "runtime-files-missing"})),
    Group("the Python that gpuprov's runtime names is everybody's to write",
          (f"cp {_PYTHON} /opt/python3; chmod 777 /opt/python3", f"sed -i 's|{_PYTHON}|/opt/python3|g' {_RUNTIME}"),
          frozenset({"python-unfit", "runtime-files-missing"})),
    Group("a run is alive",
          (f"cat > /root/run <<'end'\n{_RUN}end",
           "setsid sh /root/run 9> /run/gpuprov.lock > /dev/null 2>&1 < /dev/null &",
           "until grep -q pid /run/gpuprov.lock; do sleep 0.2; done"),
          frozenset({"run-alive"})),
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
    Group("the watch has failed and is stopped",
          ("mkdir -p /var/lib/prometheus/node-exporter",
           f"{PROGRAM} install -e gpuprov_watch=daily -e gpuprov_driver=preinstalled",
           "systemctl stop gpuprov-watch.timer; mv /usr/lib/gpuprov/watch.pyz /root/",
           "systemctl start gpuprov-watch.service; mv /root/watch.pyz /usr/lib/gpuprov/"),
          frozenset({"watch-failed", "watch-stopped"}), options={"gpuprov_watch": "daily"}),
    Group("containers with a libcuda of their own, and more than are examined",
          (f"mkdir -p /root/cuda; cp /root/{OTHER_CUDA} /root/cuda; ln -sf {OTHER_CUDA} /root/cuda/libcuda.so.1",
           SLEEPER, f"for one in $(seq 21); do {_CONTAINER} --name gpu-$one sleeper:1 /bin/sleep 3600; done",
           f"{_CONTAINER} --name trainer -v /root/cuda:/cuda -e LD_LIBRARY_PATH=/cuda sleeper:1 /bin/sleep 3600"),
          frozenset({"container-library", "containers-left-out"}),
          then={
              "container-library": "docker rm --force trainer",
              "containers-left-out": "docker rm --force $(docker ps --quiet)",
          },
          names={"CONTAINER": "gpu-1"}),
    Group(
        "an image that needs another driver",
        (
            SLEEPER,
            f"{_CONTAINER} -e 'NVIDIA_REQUIRE_CUDA=cuda>=99' sleeper:1 /bin/sleep 1 && exit 1; true",
        ),
        frozenset({"requirement-unmet"}),
        # What docker has said stays until then.
        then={"requirement-unmet": FORGET},
    ),
    Group(
        "a daemon of the driver's that has failed, a run that was cut off",
        (
            # As a package brings it: in a system container gpuprov leaves the GPUs to the machine around it.
            f"cat > {UNITS}/{PERSISTENCE} <<'end'\n{_PERSISTENCE_UNIT}end",
            "mv /usr/bin/nvidia-persistenced /root/kept-persistenced; systemctl daemon-reload",
            f"systemctl start {PERSISTENCE}; until systemctl is-failed --quiet {PERSISTENCE}; do sleep 0.2; done",
            "mv /root/kept-persistenced /usr/bin/nvidia-persistenced",
            "sed -i '$d' $(ls /var/lib/gpuprov/runs/*.jsonl | tail -1)",
        ),
        frozenset({"persistenced-failed", "run-cut-off"}),
    ),
    Group("containerd's file is invalid TOML, then one that it has not read",
          (f"{PROGRAM} runtime configure --runtime containerd; systemctl restart containerd",
           f"cp {_CONTAINERD} /root/kept.toml; echo '[[' >> {_CONTAINERD}"),
          frozenset({"engine-unreadable", "engine-not-restarted"}), editor="cp /root/kept.toml $file",
          then={"engine-unreadable": f"mv {_CONTAINERD} /root/kept.toml; systemctl restart containerd; "
          f"mv /root/kept.toml {_CONTAINERD}"},
          options={"gpuprov_engines": ["containerd"]}),
)  # fmt: skip

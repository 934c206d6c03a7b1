"""Troubles of toolkit and CDI specification, with what the doctor must say of each.

Rows are made-up facts, and groups real troubles of a lab host, whose commands test_doctor.py types.
Messages are recorded where a row says from where: drivers and installers in Debian chroots, NVIDIA's open kernel
modules and documentation, bug reports of the projects named. All others follow the known formats and were written here.
"""

import json
from dataclasses import replace

from gpuprov.cdi.generate import PATH
from gpuprov.doctor.finding import LIKELY, WARNING
from gpuprov.doctor.snapshot import HostSnapshot
from gpuprov.facts.boot import RebootFacts
from gpuprov.facts.interpreter import MISSING, Interpreter
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH, NVIDIA_HOOK_PATH
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH, SETTINGS_PATH
from tests.integration.doctor_typing import FORGET, NO_REFRESH, OTHER_CUDA, OTHER_VERSION, PROGRAM, SLEEPER, Group
from tests.lab.fixtures import DRIVER
from tests.unit.doctor.ill import (
    CONFIG_TOML,
    NVIDIA_RUNTIME,
    Row,
    both,
    daemon_json,
    docker,
    host,
    installed,
    nvidias,
    text,
    unit,
    without,
)
from tests.unit.doctor.rows_engines import LEFTOVER_ROWS


def _without_package(x: HostSnapshot, name: str) -> HostSnapshot:
    names = {one: version for one, version in x.host.packages.installed.items() if one != name}
    return replace(x, host=replace(x.host, packages=replace(x.host.packages, installed=names)))


CONTAINER_ROWS = (
    # -- container toolkit
    Row("run-cut-off", lambda x: replace(x, open_run=" in: install packages"), "/var/lib/gpuprov/runs",
        "gpuprov install", LIKELY),
    Row("reboot-asked-for", host(reboot=RebootFacts("b", "b", ("nouveau has a GPU",))), "nouveau has a GPU",
        "systemctl reboot", LIKELY),
    Row("toolkit-missing", both(docker(runtimes={"runc": "runc"}, config_text=None), without(LAUNCHER_PATH)),
        f"ls {LAUNCHER_PATH}", "gpuprov install"),
    Row("runtime-missing", both(without(LAUNCHER_PATH), lambda x: replace(x, absent=frozenset({LAUNCHER_PATH}))),
        f"docker info: runtime nvidia is {LAUNCHER_PATH}", "gpuprov install"),
    Row("runtime-missing", both(nvidias, lambda x: replace(x, absent=frozenset({NVIDIA_RUNTIME}))),
        f"ls {NVIDIA_RUNTIME}", "apt-get install -y --reinstall nvidia-container-toolkit-base"),
    Row("runtime-missing",
        both(docker(runtimes={"runc": "runc", "nvidia": "nvidia-container-runtime"},
                    config_text=json.dumps(
                        {
                            "default-runtime": "nvidia",
                            "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}},
                        }
                    )),
             text(NVIDIA_SETTINGS_PATH, CONFIG_TOML.format('root = "/run/nvidia/driver"'), "/run/nvidia/driver"),
             lambda x: replace(x, absent=x.absent | {"nvidia-container-runtime"})),
        "command -v nvidia-container-runtime: nothing", "gpuprov install"),
    Row("install-obstructed",
        both(without(LAUNCHER_PATH), host(read_only={"/usr": "/usr (ro,relatime,rw)"}),
             lambda x: replace(x, absent=frozenset({LAUNCHER_PATH}))),
        "/proc/self/mountinfo: /usr (ro,relatime,rw)", "mount -o remount,rw /usr"),
    Row("run-alive",
        lambda x: replace(
            x,
            open_run=" in: install packages",
            runs_now="/run/gpuprov.lock: pid 4711: gpuprov install, since 2026-11-22 09:30:00",
        ),
        "pid 4711", "tail --pid=4711 -f /dev/null", WARNING),
    Row("runtime-not-executable", lambda x: replace(x, not_executable={LAUNCHER_PATH: 0o644}), ": 644",
        f"chmod 0755 {LAUNCHER_PATH}"),
    Row("runtime-files-missing",
        lambda x: host(files={path: file for path, file in x.host.files.items() if not path.endswith("/decision.py")})(
            x
        ),
        "decision.py", "gpuprov install"),
    Row("boot-incomplete",
        lambda x: host(boot=replace(x.host.boot, lacking=("/usr/lib/gpuprov/boot.pyz", "/etc/x.service")))(x),
        "ls -l /usr/lib/gpuprov/boot.pyz: missing, empty or masked", "gpuprov install"),
    Row("boot-incomplete", lambda x: replace(x, boot_changed=("/usr/lib/gpuprov/boot.pyz",)),
        "boot.pyz: changed since gpuprov wrote it", "gpuprov install", LIKELY),
    Row("others-can-change", lambda x: replace(x, changeable={"/etc/cdi": "0 777", PATH: "1000 644"}),
        f"stat -c '%u %a' {PATH}: 1000 644", f"chown root: /etc/cdi {PATH}; chmod go-w /etc/cdi {PATH}  # before it",
        WARNING),
    Row("runtime-files-missing", host(bytecode_current=False), "/usr/lib/gpuprov", "gpuprov install", WARNING),
    Row("python-missing",
        host(interpreter=Interpreter("/usr/bin/python3.13", deployed="/usr/bin/python3.11", fault=MISSING)),
        "ls /usr/bin/python3.11: No such file", "gpuprov install"),
    Row("python-missing", host(interpreter=Interpreter(deployed="/usr/bin/python3.11", fault=MISSING)),
        "ls /usr/bin/python3.11: No such file", "apt-get install -y python3; gpuprov install"),
    Row("python-missing",
        host(interpreter=Interpreter("/usr/bin/python3.13", deployed="/usr/bin/python3.11", fault=MISSING,
                                     replaced=True)),
        "ls /usr/bin/python3.11: No such file", "gpuprov install", WARNING),
    Row("python-unfit",
        host(interpreter=Interpreter(deployed="/opt/python", fault="it is Python 3.8.18, older than 3.9")),
        "/opt/python: it is Python 3.8.18", "apt-get install -y python3; gpuprov install"),
    Row("low-level-runtime-missing", lambda x: replace(x, programs={}), "command -v runc crun",
        "apt-get install -y --reinstall runc"),
    Row("low-level-runtime-missing", lambda x: replace(_without_package(x, "runc"), programs={}),
        "command -v runc crun", "apt-get install -y runc"),
    Row("low-level-runtime-broken",
        lambda x: replace(x, broken={"/usr/sbin/runc": "`/usr/sbin/runc --version` exited 126\nExec format error"}),
        "exited 126\nExec format error", "apt-get install -y --reinstall runc", LIKELY),
    Row("low-level-runtime-broken", lambda x: replace(x, broken={"/usr/local/sbin/runc": "exited 1"}), "exited 1",
        "mv /usr/local/sbin/runc /usr/local/sbin/runc.broken", LIKELY),
    Row("settings-broken", lambda x: replace(x, settings_fault=f"{SETTINGS_PATH} can't be read: line 3: no value"),
        "line 3", f"mv {SETTINGS_PATH} {SETTINGS_PATH}.broken"),
    Row("settings-broken", both(nvidias, lambda x: replace(x, settings_fault=f"{NVIDIA_SETTINGS_PATH}: line 2: x")),
        "line 2", f"nvidia-ctk config default --output={NVIDIA_SETTINGS_PATH}"),
    Row("no-cgroups", both(nvidias, text(NVIDIA_SETTINGS_PATH, CONFIG_TOML.format("no-cgroups = true"))),
        f"{NVIDIA_SETTINGS_PATH}:2: no-cgroups = true", f"sed -i '2s/^/#/' {NVIDIA_SETTINGS_PATH}", LIKELY),
    # What nvidia-docker2 left counts for gpuprov's own hook.
    Row("no-cgroups", text(NVIDIA_SETTINGS_PATH, CONFIG_TOML.format("no-cgroups = true")),
        f"{NVIDIA_SETTINGS_PATH}:2: no-cgroups = true", f"sed -i '2s/^/#/' {NVIDIA_SETTINGS_PATH}", LIKELY),
    Row("environment-refused", text(SETTINGS_PATH, "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"),
        f"{SETTINGS_PATH}:1", "sed -i '1s/^/#/'", LIKELY),
    Row("capabilities-left-out", text(SETTINGS_PATH, 'supported-driver-capabilities = "graphics,video"\n'),
        "graphics,video", "sed -i", LIKELY),
    Row("driver-root-missing",
        both(nvidias,
             text(NVIDIA_SETTINGS_PATH, CONFIG_TOML.format('root = "/run/nvidia/driver"'), "/run/nvidia/driver")),
        f"{NVIDIA_SETTINGS_PATH}:2", "sed -i '2s/^/#/'"),
    # What nvidia-docker2 left prevents nothing where another runtime is used.
    Row("driver-root-missing",
        text(NVIDIA_SETTINGS_PATH, CONFIG_TOML.format('root = "/run/nvidia/driver"'), "/run/nvidia/driver"),
        f"{NVIDIA_SETTINGS_PATH}:2", "sed -i '2s/^/#/'", WARNING),
    Row("ldconfig-missing",
        both(nvidias,
             text(NVIDIA_SETTINGS_PATH, CONFIG_TOML.format('ldconfig = "@/sbin/ldconfig.real"'),
                  "/sbin/ldconfig.real")),
        "ldconfig.real", """= "@/sbin/ldconfig"|' """),
    Row("toolkit-old", installed(nvidia_container_toolkit="1.14.3-1"), "1.14.3-1", "apt-get install -y", WARNING),
    Row("toolkit-mixed", installed(nvidia_container_toolkit="1.19.0-1", libnvidia_container1="1.18.2-1"),
        "libnvidia-container1: 1.18.2-1", "nvidia-container-toolkit libnvidia-container1", LIKELY),
    *LEFTOVER_ROWS,
    Row("watch-failed", unit("gpuprov-watch.service", active="failed", result="timeout"), "failed, timeout",
        "journalctl -u gpuprov-watch.service", WARNING),
    Row("watch-stopped", unit("gpuprov-watch.timer", active="inactive"), "inactive", "start", WARNING),
    # -- CDI specification
    Row("cdi-missing", lambda x: replace(x, texts={}), "/etc/cdi: nothing", "gpuprov install"),
    Row("cdi-missing", both(unit("gpuprov-refresh.service"), lambda x: replace(x, texts={})), "/var/run/cdi",
        "systemctl start gpuprov-refresh.service"),
    Row("cdi-missing", both(unit("gpuprov-refresh.service", active="failed"), lambda x: replace(x, texts={})),
        "/var/run/cdi", "gpuprov install"),
    Row("cdi-broken", text(PATH, '{"cdiVersion": "0.5.0",\n nvidia}'), f"{PATH}:2: column 2", "gpuprov install"),
    Row("cdi-broken", text(PATH, "[" * 100_000), f"{PATH}:1: nested too deeply", "gpuprov install"),
    Row("cdi-stale",
        lambda x: replace(
            x, specification_fault="driver-version: the specification says 535.261.03, the host has 550.163.01"
        ),
        "535.261.03", "gpuprov install"),
    Row("cdi-names-absent-files",
        text("/etc/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n    - hostPath: /usr/lib64/libcuda.so.535.261.03\n",
             "/usr/lib64/libcuda.so.535.261.03"),
        "/etc/cdi/nvidia.yaml:2: /usr/lib64/libcuda.so.535.261.03", "rm /etc/cdi/nvidia.yaml"),
    Row("cdi-names-absent-files",
        text("/var/run/cdi/nvidia.json", '{"kind": "nvidia.com/gpu", "x": [{"hostPath": "/gone"}]}', "/gone"),
        "/var/run/cdi/nvidia.json:1: /gone", "rm /var/run/cdi/nvidia.json"),
    Row("cdi-names-absent-files",
        both(unit("nvidia-cdi-refresh.service", active="inactive"),
             text("/var/run/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n- hostPath: /gone\n", "/gone")),
        "/var/run/cdi/nvidia.yaml:2: /gone", "systemctl restart nvidia-cdi-refresh.service"),
    # nvidia-container-toolkit issue 885, podman: failed to stat CDI host device "/dev/dri/renderD129".
    Row("cdi-names-absent-files",
        both(nvidias, without(PATH),
             text("/etc/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n    deviceNodes:\n    - path: /dev/dri/renderD129\n",
                  "/dev/dri/renderD129")),
        "/etc/cdi/nvidia.yaml:3: /dev/dri/renderD129", "nvidia-ctk cdi generate"),
    Row("cdi-closed", lambda x: replace(x, closed={"/etc/cdi": 0o700, PATH: 0o600}), "stat -c %a /etc/cdi: 700",
        f"chmod a+rx /etc/cdi; chmod a+r {PATH}", LIKELY),
    Row("cdi-names-absent-files",
        both(nvidias, without(PATH),
             text("/etc/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n- hostPath: /gone\n", "/gone")),
        ":2: /gone", "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"),
    Row("cdi-conflict", text("/etc/cdi/nvidia.yaml", 'kind: nvidia.com/gpu\ndevices:\n- name: "0"\n'),
        "nvidia.com/gpu=0", "rm /etc/cdi/nvidia.yaml", LIKELY),
    Row("cdi-covered", text("/var/run/cdi/nvidia.yaml", 'kind: nvidia.com/gpu\ndevices:\n- name: "0"\n- name: "1"\n'),
        "/var/run/cdi", "rm /var/run/cdi/nvidia.yaml", WARNING),
    Row("cdi-covered", text("/var/run/cdi/nvidia.yaml", 'kind: nvidia.com/gpu\ndevices:\n- name: "0"\n- name: all\n'),
        "/var/run/cdi", "rm /var/run/cdi/nvidia.yaml", LIKELY),
    # The unit would write it again, at the next boot at the latest.
    Row("cdi-covered",
        both(unit("nvidia-cdi-refresh.service", active="inactive", enabled="enabled"),
             text("/var/run/cdi/nvidia.yaml", 'kind: nvidia.com/gpu\ndevices:\n- name: "0"\n- name: all\n')),
        "/var/run/cdi", "systemctl restart nvidia-cdi-refresh.service", LIKELY),
    Row("cdi-covered",
        both(unit("nvidia-cdi-refresh.service", active="inactive", enabled="disabled"),
             text("/var/run/cdi/nvidia.yaml", 'kind: nvidia.com/gpu\ndevices:\n- name: "0"\n- name: all\n')),
        "/var/run/cdi", "rm /var/run/cdi/nvidia.yaml", LIKELY),
    Row("cdi-off-in-docker",
        daemon_json({"features": {"cdi": False}}, version="26.1.5"),
        "features.cdi is false", '"features": {"cdi": true}', LIKELY),
    Row("cdi-off-in-docker", docker(version="26.1.5"),
        "features.cdi is not set in /etc/docker/daemon.json, which docker 26.1.5 needs", "gpuprov install", LIKELY),
    Row("cdi-off-in-docker",
        daemon_json({"features": {"cdi": True}}, version="26.1.5"),
        "docker has not been restarted since features.cdi was set", "systemctl restart docker", LIKELY),
    Row("cdi-off-in-docker",
        daemon_json({"features": {"cdi": True}}, version="26.1.5", running_containers=("web",)),
        "docker has not been restarted since features.cdi was set", "systemctl restart docker", WARNING),
    Row("runtime-unregistered",
        both(nvidias, docker(version="28.5.2", config_text="{}", runtimes={"runc": "runc"}, cdi=True)),
        "docker info: runtimes runc", "nvidia-ctk runtime configure --runtime=docker", WARNING),
)  # fmt: skip

# -- on lab hosts -----------------------------------------------------------------------------------------------------

_DAEMON_JSON = "/etc/docker/daemon.json"
_PYTHON = "/usr/bin/python3.11"
# Holds the lock as a run does, and ends once somebody waits for its end.
_RUN = """flock 9
printf '{"pid": %s, "command": "install", "since": "now"}' $$ >&9
until pgrep -f "tail --pid=$$" > /dev/null; do sleep 1; done
"""
_NVIDIA_DOCKER2 = (
    '{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}}}'
)
_CONTAINER = "docker run --detach --rm --network none --runtime nvidia -e NVIDIA_VISIBLE_DEVICES=all"
TOOLKIT_OLD, TOOLKIT_NEW = "1.17.8-1", "1.19.1-1"
_HOOK_PATH = "/usr/bin/nvidia-container-runtime-hook"
# What apt-ftparchive would write: Debian's hosts have none.
_INDEX = (
    "{ dpkg-deb --field driver.deb; echo Filename: ./driver.deb; echo Size: $(stat -c %s driver.deb); "
    "echo SHA256: $(sha256sum driver.deb | cut -c -64); } > Packages"
)
_CONTAINERD = "/etc/containerd/config.toml"
_CRI = "io.containerd.grpc.v1.cri"
CONTAINER_GROUPS = (
    Group("what nvidia-docker2 left",
          ("mkdir -p /etc/nvidia-container-runtime /run/cdi",
           'printf \'[nvidia-container-cli]\\nldconfig = "@/sbin/none"\\nroot = "/run/none"\\n\' > '
           f"{NVIDIA_SETTINGS_PATH}",
           f"sed s/{DRIVER}/{OTHER_VERSION}/ /etc/cdi/nvidia.json > /var/run/cdi/nvidia.json",
           f"echo '{_NVIDIA_DOCKER2}' > /etc/docker/daemon.json; systemctl restart docker"),
          frozenset({"runtime-missing", "cdi-names-absent-files", "driver-root-missing", "ldconfig-missing"}),
          # The default stays where its owner has set it, and would be the other groups' too.
          then={"runtime-missing": f"""sed -i 's/"default-runtime": "nvidia", *//' {_DAEMON_JSON}; """
                "systemctl restart docker"}),
    Group("modes that keep users out",
          ("chmod 700 /etc/cdi; chmod 600 /etc/cdi/nvidia.json /dev/nvidia0 /dev/nvidiactl",
           f"chmod 644 {LAUNCHER_PATH}"),
          frozenset({"runtime-not-executable", "cdi-closed", "nodes-closed"})),
    Group("specifications in each other's way",
          ("mkdir -p /run/cdi; cp /etc/cdi/nvidia.json /etc/cdi/other.json",
           "cp /etc/cdi/nvidia.json /var/run/cdi/nvidia.json", "echo '{' > /var/run/cdi/nvidia-more.json",
           "chmod 777 /var/lib/gpuprov/runs"),
          frozenset({"cdi-conflict", "cdi-covered", "others-can-change"})),
    Group("a read-only /usr",
          (f"mv {LAUNCHER_PATH} /root/kept-runtime; mount --bind /usr /usr; mount -o remount,bind,ro /usr",),
          frozenset({"install-obstructed", "runtime-missing"})),
    Group("settings that keep containers from GPUs",
          ('mkdir -p /etc/gpuprov; printf \'supported-driver-capabilities = "graphics"\\n'
           "accept-nvidia-visible-devices-envvar-when-unprivileged = false\\n' > /etc/gpuprov/container-runtime.toml",
           "echo /usr/local/cuda/lib64/stubs > /etc/ld.so.conf.d/stubs.conf", "mkdir -p /etc/nvidia-container-runtime",
           f"printf '[nvidia-container-cli]\\nno-cgroups = true\\n' > {NVIDIA_SETTINGS_PATH}"),
          frozenset({"environment-refused", "capabilities-left-out", "cuda-stub-configured", "no-cgroups"})),
    Group("other programs come first, and a unit is spoilt",
          ("printf '#!/bin/sh\nexit 9\n' > /usr/local/sbin/runc; cp /usr/local/sbin/runc "
           "/usr/local/sbin/nvidia-container-runtime-hook; chmod 755 /usr/local/sbin/*",
           "echo spoilt >> /etc/systemd/system/gpuprov-nodes.service; mkdir -p /run/cdi; chmod 777 /run/cdi"),
          frozenset({"low-level-runtime-broken", "hook-covered", "boot-incomplete", "others-can-change"})),
    Group("files that gpuprov deployed are gone",
          ("rm /usr/lib/gpuprov/runtime_hook/system_calls.py /usr/lib/gpuprov/boot.pyz",
           "systemctl disable gpuprov-nodes.service"),
          frozenset({"runtime-files-missing", "boot-incomplete", "cdi-missing"}),
          then={"runtime-files-missing": f"{NO_REFRESH}; rm /etc/cdi/nvidia.json"}),
    Group("the hook and the boot unit are links to nothing",
          (f"ln -sfn /nowhere {NVIDIA_HOOK_PATH}; ln -sfn /nowhere /etc/systemd/system/gpuprov-nodes.service",),
          frozenset({"hook-missing", "boot-incomplete"})),
    Group("the configuration is emptied, docker not restarted yet",
          (f"{NO_REFRESH}; echo '{{' > /etc/cdi/nvidia.json",
           "echo '{}' > /etc/docker/daemon.json"),
          frozenset({"cdi-broken", "runtime-unsaved"})),
    Group("the toolkit is gone, docker has forgotten it",
          (f"rm {LAUNCHER_PATH} /usr/bin/nvidia-container-runtime-hook; echo '{{}}' > {_DAEMON_JSON}",
           "systemctl restart docker"),
          frozenset({"toolkit-missing", "runtime-unregistered"})),
    Group("the Python that gpuprov's runtime names is gone",
          (f"sed -i 's|{_PYTHON}|/usr/bin/python3.8|g' {LAUNCHER_PATH}",),
          frozenset({"python-missing", "runtime-files-missing"})),
    Group("the Python that gpuprov's runtime names is everybody's to write",
          (f"cp {_PYTHON} /opt/python3; chmod 777 /opt/python3",
           f"sed -i 's|{_PYTHON}|/opt/python3|g' {LAUNCHER_PATH}"),
          frozenset({"python-unfit", "runtime-files-missing"})),
    Group("a run is alive",
          (f"cat > /root/run <<'end'\n{_RUN}end",
           "setsid sh /root/run 9> /run/gpuprov.lock > /dev/null 2>&1 < /dev/null &",
           "until grep -q pid /run/gpuprov.lock; do sleep 0.2; done"),
          frozenset({"run-alive"})),
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
)  # fmt: skip
TOOLKIT_GROUPS = (
    Group(
        "packages of NVIDIA's toolkit that are old, a part of them, and without the hook",
        (
            "apt-get install --yes --allow-downgrades "
            f"nvidia-container-toolkit={TOOLKIT_OLD} nvidia-container-toolkit-base={TOOLKIT_OLD}",
        ),
        frozenset({"toolkit-old", "toolkit-mixed", "hook-missing"}),
        then={"toolkit-old": f"rm {_HOOK_PATH}"},
        options={"gpuprov_toolkit": "nvidia"},
    ),
    Group(
        "NVIDIA's runtime and no links to the nodes",
        ("rm /dev/char/195:*",),
        frozenset({"dev-char-links"}),
        options={"gpuprov_toolkit": "nvidia"},
    ),
)
CDI_GROUPS = (
    Group(
        "a container that asks for a device of no specification",
        (SLEEPER, "docker run --rm --device nvidia.com/gpu=none sleeper:1 /bin/sleep 1 && exit 1; true"),
        frozenset({"cdi-unresolved"}),
        # What docker has said stays until then.
        then={"cdi-unresolved": FORGET},
    ),
    Group(
        "a docker that does not read CDI specifications",
        (
            'python3 -c \'import json; path = "/etc/docker/daemon.json"; found = json.load(open(path)); '
            'del found["features"]; json.dump(found, open(path, "w"))\'; systemctl restart docker',
        ),
        frozenset({"cdi-off-in-docker"}),
    ),
    Group(
        "an engine that is asked for and not there",
        (
            "mkdir -p /etc/containers/containers.conf.d",
            "printf '[containers]\\npids_limit = 0\\n' > /etc/containers/containers.conf",
            "printf '[engine.runtimes]\\nnvidia = [\"/usr/bin/crun\"]\\n' > "
            "/etc/containers/containers.conf.d/99-site.conf",
        ),
        frozenset({"engine-missing", "engine-unconfigured", "podman-runtime-covered"}),
        editor="sed -i /nvidia/d $file",
        options={"gpuprov_engines": ["podman"]},
    ),
    # The last one of its host.
    Group(
        "a driver from a package over one from the installer",
        (
            "mkdir -p /root/driver/DEBIAN /root/offers",
            f"cp --archive --parents /usr/bin/nvidia-smi /usr/lib/x86_64-linux-gnu/*.{DRIVER} /root/driver/",
            "printf 'Package: nvidia-driver-cuda\\nVersion: 1\\nArchitecture: all\\nMaintainer: A\\nDescription: -\\n'"
            " > /root/driver/DEBIAN/control",
            "printf '#!/bin/sh\\nldconfig\\n' > /root/driver/DEBIAN/postinst; chmod 755 /root/driver/DEBIAN/postinst",
            "dpkg-deb --build /root/driver /root/offers/driver.deb; dpkg --install /root/offers/driver.deb",
            f"cd /root/offers && {_INDEX}; echo 'deb [trusted=yes] file:/root/offers ./' > "
            "/etc/apt/sources.list.d/driver.list; apt-get -qq update",
        ),
        frozenset({"drivers-mixed"}),
        options={"gpuprov_driver": "preinstalled"},
    ),
)
# A Kubernetes node: the kubelet is a file in its place.
NODE_GROUPS = (
    Group(
        "a node's containerd is not asked for",
        ("touch /usr/local/bin/kubelet; rm -f /etc/containerd/*.toml /etc/containerd/conf.d/*",),
        frozenset({"node-engine-unnamed"}),
    ),
    Group(
        "a node's containerd has parts switched off, and the kubelet another cgroup driver",
        (
            # As it is set up with kubeadm.
            "touch /usr/local/bin/kubelet; mkdir -p /var/lib/kubelet; rm -f /etc/containerd/conf.d/*",
            f"containerd config default > {_CONTAINERD}; {PROGRAM} runtime configure --runtime containerd",
            f"sed -i 's/^disabled_plugins.*/disabled_plugins = [\"{_CRI}\"]/' {_CONTAINERD}",
            "systemctl restart containerd",
        ),
        frozenset({"containerd-cri-off", "containerd-cdi-off", "cgroup-drivers-differ"}),
        then={
            "containerd-cri-off": f"sed -i '/^ *.plugins.\"{_CRI}\".$/a enable_cdi = false' {_CONTAINERD}",
            "containerd-cdi-off": "echo 'cgroupDriver: systemd' > /var/lib/kubelet/config.yaml",
        },
        # One fault at a time, as somebody does who reads the first message.
        editor="sed -i 's/^disabled_plugins.*//; /enable_cdi = false/d' $file; [ -e /var/lib/kubelet/config.yaml ] && "
        "sed -i 's/SystemdCgroup = false/SystemdCgroup = true/' $file",
        options={"gpuprov_engines": ["containerd"]},
    ),
    Group(
        "docker's log driver has no server",
        (
            "cp /etc/docker/daemon.json /root/kept.json",
            """sed -i '1s|{|{"log-driver": "fluentd", "log-opts": {"fluentd-address": "192.0.2.1:1"},|' """
            "/etc/docker/daemon.json; systemctl restart docker",
            SLEEPER,
            "docker run --rm --network none sleeper:1 /bin/sleep 1 && exit 1; true",
        ),
        frozenset({"log-driver-unreachable"}),
        editor="cp /root/kept.json $file",
        then={"log-driver-unreachable": FORGET},
    ),
)
# Kind (test_doctor_typed.py) → rules whose command no test types.
CONTAINER_EXCUSES = {
    "kernel": {"reboot-asked-for"},
}  # fmt: skip

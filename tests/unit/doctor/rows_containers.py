"""Troubles of toolkit and CDI specification, with what the doctor must say of each.

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
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH, SETTINGS_PATH
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
    Row("runtime-files-missing", host(bytecode_current=False), "/usr/lib/gpuprov", "gpuprov install", WARNING),
    Row("python-missing",
        host(interpreter=Interpreter("/usr/bin/python3.13", deployed="/usr/bin/python3.11", fault=MISSING)),
        "ls /usr/bin/python3.11: No such file", "gpuprov install"),
    Row("python-missing", host(interpreter=Interpreter(deployed="/usr/bin/python3.11", fault=MISSING)),
        "ls /usr/bin/python3.11: No such file", "apt-get install -y python3; gpuprov install"),
    Row("python-unfit",
        host(interpreter=Interpreter(deployed="/opt/python", fault="it is Python 3.8.18, older than 3.9")),
        "/opt/python: it is Python 3.8.18", "apt-get install -y python3; gpuprov install"),
    Row("low-level-runtime-missing", lambda x: replace(x, programs={}), "command -v runc crun",
        "apt-get install -y --reinstall runc"),
    Row("low-level-runtime-missing", lambda x: replace(_without_package(x, "runc"), programs={}),
        "command -v runc crun", "apt-get install -y runc"),
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

"""Troubles for test_doctor.py that need another host: NVIDIA's toolkit from packages, a docker with CDI."""

from tests.integration.doctor_cases import FORGET, SLEEPER
from tests.integration.doctor_typing import PROGRAM, Group
from tests.lab.fixtures import DRIVER

TOOLKIT_OLD, TOOLKIT_NEW = "1.17.8-1", "1.19.1-1"
_HOOK_PATH = "/usr/bin/nvidia-container-runtime-hook"
# What apt-ftparchive would write: Debian's hosts have none.
_INDEX = (
    "{ dpkg-deb --field driver.deb; echo Filename: ./driver.deb; echo Size: $(stat -c %s driver.deb); "
    "echo SHA256: $(sha256sum driver.deb | cut -c -64); } > Packages"
)
_CONTAINERD = "/etc/containerd/config.toml"
_CRI = "io.containerd.grpc.v1.cri"

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
        ("mkdir -p /etc/containers; printf '[containers]\\npids_limit = 0\\n' > /etc/containers/containers.conf",),
        frozenset({"engine-missing", "engine-unconfigured"}),
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

"""Troubles for test_doctor.py that need another host: NVIDIA's toolkit from packages, a docker with CDI."""

from __future__ import annotations

from tests.integration.doctor_typing import Group

TOOLKIT_OLD, TOOLKIT_NEW = "1.17.8-1", "1.19.1-1"
_HOOK_PATH = "/usr/bin/nvidia-container-runtime-hook"

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
)
CDI_GROUPS = (
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
)

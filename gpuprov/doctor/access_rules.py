"""Rules about access to docker: another docker than the intended one, and what denies a container its devices. Pure."""

from __future__ import annotations

import re

from gpuprov.doctor.examined import Examined
from gpuprov.doctor.finding import ASIDE, DOCKER, LIKELY, POSSIBLE, Finding, Rule
from gpuprov.doctor.parse import find_in_log
from gpuprov.engines.docker_unit import listens_at


def _podmans(x: Examined) -> Finding | None:
    if "podman-docker" not in x.host.packages.installed:
        return None
    return Finding(
        "`docker` is podman here: it takes --device nvidia.com/gpu=all, and older ones no --gpus",
        "package podman-docker is installed", "docker run --rm --device nvidia.com/gpu=all IMAGE nvidia-smi -L", ASIDE,
    )  # fmt: skip


def _other_context(x: Examined) -> Finding | None:
    found = re.search(r'"currentContext"\s*:\s*"([^"]+)"', x.texts.get("/root/.docker/config.json", ""))
    if found is None or found[1] == "default":
        return None
    return Finding(
        f"root's docker client talks to another docker: context {found[1]}",
        f"/root/.docker/config.json: currentContext is {found[1]}", "docker context use default", LIKELY,
    )  # fmt: skip


def _other_host(x: Examined) -> Finding | None:
    found = re.search(
        r"""^\s*(?:export )?DOCKER_HOST=["']?([^"'\s]+)""", x.texts.get("/etc/environment", ""), re.MULTILINE
    )
    docker = x.host.docker
    if found is None or not docker.installed or not docker.unit.load:
        return None
    if _place(found[1]) in {
        _place(one) for one in (docker.address, *listens_at(docker.unit, docker.config.get("hosts")))
    }:
        return None
    return Finding(
        f"docker's clients talk to another docker than this host's: DOCKER_HOST is {found[1]}",
        f"/etc/environment: DOCKER_HOST={found[1]}\nthis host's docker listens at {docker.address}",
        "sed -i '/^\\s*DOCKER_HOST=/d' /etc/environment  # then log in again", LIKELY,
    )  # fmt: skip


def _place(address: str) -> str:
    """Return an address without the names of this host's own interfaces."""
    address = re.sub(r"^tcp://(?:127\.0\.0\.1|localhost|0\.0\.0\.0|\[::1?\])", "tcp://", address)
    return address.replace("unix:///var/run/", "unix:///run/")


def _rootless(x: Examined) -> Finding | None:
    if not x.rootless:
        return None
    user = x.rootless[0].split("/")[3]
    return Finding(
        f"user {user} has a rootless docker of its own, which knows nothing of this one's runtimes",
        x.rootless[0],
        "${EDITOR:-vi} ~/.config/docker/daemon.json; systemctl --user restart docker  # as that user, with `runtimes` "
        "as in /etc/docker/daemon.json",
        ASIDE,
    )


def _selinux(x: Examined) -> Finding | None:
    pattern = r"avc: +denied +\{(?P<what>[^}]*)\}.*?(?:nvidia|xserver_misc_device_t|name=\"(?:nvidia|card|render)\S*\")"
    found = find_in_log((*x.kernel_log, *x.audit_log), pattern)
    if found is None or x.selinux != "Enforcing":
        return None
    return Finding(
        "SELinux denies containers the GPUs' devices", "\n".join(found[1]),
        "setsebool -P container_use_devices 1  # or per container: --security-opt=label=disable",
        LIKELY if x.container_use_devices == "off" else POSSIBLE,
    )  # fmt: skip


def _apparmor(x: Examined) -> Finding | None:
    found = find_in_log(x.kernel_log, r"apparmor=\"DENIED\".*?(?:nvidia|libcuda)")
    if found is None:
        return None
    return Finding(
        "AppArmor denies something of NVIDIA's", "\n".join(found[1]), "aa-status; dmesg | grep DENIED", POSSIBLE
    )


# Messages in docker's log about containers that did not start, mostly past ones: words, pattern, meaning, next command.
_CONTAINER_ERRORS = (
    ("bpf-refused", "bpf_prog_query(BPF_CGROUP_DEVICE) failed",
     r"bpf_prog_query\(BPF_CGROUP_DEVICE\) failed|bpf_prog_attach\S* failed",
     "a container could not be given its devices: the engine runs without the rights to a device cgroup (rootless)",
     "gpuprov cdi list  # ask by CDI, or set no-cgroups = true for the rootless user"),
    ("library-not-loaded", "load library failed",
     r"load library failed: (?P<library>\S+?):",
     "NVIDIA's toolkit could not load a library of the driver", "ldconfig; ldconfig -p | grep -e nvidia-ml -e libcuda"),
    ("cdi-unresolved", "unresolvable CDI devices",
     r"unresolvable CDI devices? (?P<device>\S+)",
     "a container asked for a CDI device that no specification has", "gpuprov cdi list"),
    ("requirement-unmet", "unsatisfied condition",
     r"unsatisfied condition: (?P<condition>[^,\"]+)|gpuprov: requires (?P<wanted>[^,]+)",
     "an image needs another driver than this host's", "nvidia-smi  # take an image for this driver"),
)  # fmt: skip


def _log_rule(name: str, said: str, pattern: str, what: str, step: str) -> Rule:
    def look(x: Examined) -> Finding | None:
        found = find_in_log(x.docker_log, pattern)
        if found is None:
            return None
        return Finding(what, f"journalctl -u docker: {found[1][0][:300]}", step, ASIDE)

    return Rule(name, DOCKER, f"docker's log: `{said}`", look)


RULES = (
    Rule("docker-is-podman", DOCKER, "package podman-docker", _podmans),
    Rule("docker-host", DOCKER, "/etc/environment: DOCKER_HOST is another docker's", _other_host),
    Rule("docker-context", DOCKER, "/root/.docker/config.json: currentContext is not default", _other_context),
    Rule("docker-rootless", DOCKER, "/run/user/UID/docker.sock is there", _rootless),
    Rule("selinux-denies", DOCKER, "Enforcing, and `avc: denied` with nvidia or xserver_misc_device_t", _selinux),
    Rule("apparmor-denies", DOCKER, "the kernel's log: apparmor=\"DENIED\" with nvidia", _apparmor),
    *(_log_rule(*row) for row in _CONTAINER_ERRORS),
)  # fmt: skip

"""Rules of the doctor whose commands no test types, by kind of reason. Each is tried on made-up facts (test_rules.py).

The kinds are a closed list, held to the rules and to what is typed by tests/unit/test_doctor_typed.py.
"""

from collections.abc import Mapping

# Kind → what such a reason is.
KINDS = {
    "firmware": "needs what a machine's firmware does: Secure Boot and its keys, the reset of a real GPU",
    "switches": "needs NVSwitches, and NVIDIA's own fabric manager, which no public package source has",
    "system": "needs another system than a lab's: SELinux, WSL, snap, a rootless docker, podman in docker's place",
    "toolkit": "only NVIDIA's own nvidia-container-cli says it, which no public package source has",
    "release": "advises a newer release than any package source of that system has",
    "container host": "the command is for the machine around a system container, whose kernel has no NVIDIA module",
    "hardware": "needs virtual GPUs with their driver, RDMA adapters, confidential computing, or MPS on a GPU",
    "kernel": "needs a kernel of its own that takes modules: a virtual machine could have it",
}
EXCUSES: Mapping[str, frozenset[str]] = {
    "firmware": frozenset({"key-rejected", "lockdown", "row-remap-pending", "secure-boot-unsigned"}),
    "switches": frozenset({"fabric-hidden", "fabric-manager-missing", "fabric-manager-version"}),
    "system": frozenset({
        "bpf-refused", "docker-is-podman", "docker-rootless", "docker-snap", "selinux-denies", "wsl-with-driver",
        "wsl-without-gpu",
    }),
    "release": frozenset({"podman-without-cdi"}),
    "container host": frozenset({"driver-outside"}),
    "hardware": frozenset({
        "confidential-not-ready", "gpudirect-failed", "mps-failed", "peermem-symbols", "unlicensed",
    }),
    "kernel": frozenset({
        "branch-without-gpu", "dkms-failed", "driver-old", "gpu-too-old-or-new", "gpu-unbound", "gsp-firmware-missing",
        "headers-missing", "known-problem", "module-blacklisted", "module-missing", "module-not-loaded",
        "module-of-another-kernel", "module-vermagic", "modules-disabled", "needs-open-modules",
        "needs-proprietary-modules", "next-kernel", "reboot-asked-for", "uvm-and-kaslr", "uvm-not-loaded",
    }),
    "toolkit": frozenset({"library-not-loaded"}),
}  # fmt: skip

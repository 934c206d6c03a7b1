"""What docker 29 does with `--gpus` if dockerd's PATH has nvidia-cdi-hook, done by docker 28.

docker 29 can't be had from a Debian mirror. From moby's source (daemon/devices_nvidia_linux.go, pull request 50228):
its driver `nvidia` turns the request into names of CDI devices (`getRequestedDevicesIDs`, `normalizeDeviceID`), and
hands these to its driver `cdi`; if that fails, it tries the prestart hook (`firstSuccessfulUpdater`). Capabilities are
dropped. The driver `cdi` (daemon/cdi.go) is docker 28's, which `--device` asks for. Pull request 52704 swaps the two:
then docker 29 with both programs does what docker 28 does.
"""

import subprocess

from tests.lab import Host

# daemon/cdi.go, which names what it could not find.
_FAILED = "CDI device injection failed"


def cdi_names(gpus: str) -> list[str]:
    """Return the CDI devices that a value of `--gpus` becomes: `all`, a count, or `device=` with names."""
    if gpus.startswith("device="):
        identities = gpus.removeprefix("device=").split(",")
    else:
        identities = ["all"] if gpus == "all" else [str(number) for number in range(int(gpus))]
    return [name if "=" in name else f"nvidia.com/gpu={name}" for name in identities]


def run(host: Host, gpus: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a container on a host with docker 28 as docker 29 does with `--gpus`; words: options, image and command."""
    devices = [word for name in cdi_names(gpus) for word in ("--device", name)]
    done = host.ssh(("docker", "run", "--rm", "--network=none", *devices, *words), check=False)
    return by_hook(host, gpus, *words) if _FAILED in done.stderr else done


def by_hook(host: Host, gpus: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it with docker 28's `--gpus`, which is docker 29's driver `nvidia.runtime-hook`."""
    return host.ssh(("docker", "run", "--rm", "--network=none", "--gpus", f'"{gpus}"', *words), check=False)

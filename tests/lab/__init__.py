"""The lab: real Debian hosts (systemd, SSH, apt, docker) in seconds, on one machine, by systemd-nspawn.

    python -m tests.lab up --hosts 2      boots lab-a and lab-b; `down` removes every trace; `--help` tells the rest

A host is an overlay over a cached root file system, booted with its own network address, SSH key and cgroup. With
`gpus`, its kernel seems to have NVIDIA GPUs and a loaded driver (tests/simgpu), as a system container has to which a
machine's GPUs are passed through.
"""

from tests.lab.host import Host, HostRequest
from tests.lab.lab import Lab
from tests.lab.shell import LabError

__all__ = ["Host", "HostRequest", "Lab", "LabError"]

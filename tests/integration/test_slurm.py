"""Slurm runs `gpuprov health --for slurm`: a node whose GPU is sick is drained, and taken back once it is fit.

Debian's Slurm on two lab hosts, whose GPUs are simulated; nvidia-smi is the genuine one.
"""

import time

import pytest

from tests.lab.fixtures import Site
from tests.lab.host import Host
from tools import host_program

pytestmark = [pytest.mark.long, pytest.mark.lab, pytest.mark.root]
_NAMES = ("main", "twin")
_CONF = """ClusterName=test
SlurmctldHost=main
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
HealthCheckProgram=/usr/local/sbin/gpuprov-health
HealthCheckInterval=3
HealthCheckNodeState=ANY
ReturnToService=2
NodeName=main NodeAddr={main}
NodeName=twin NodeAddr={twin}
PartitionName=all Nodes=ALL Default=YES
"""
_APT = "DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300"
_PACKAGES = "slurmctld slurmd slurm-client munge"
_SECONDS = 120
_LOGS = "journalctl --no-pager -n 60 -u slurmctld -u slurmd; cat /var/log/gpuprov-health"


def _node(host: Host, addresses: dict[str, str], key: str) -> None:
    """Install Slurm's daemons, with gpuprov as docs/health.md shows it."""
    host.ssh(f"{_APT} update; {_APT} install -y --no-install-recommends {_PACKAGES} >/dev/null 2>&1", timeout=600)
    host.ssh("systemctl stop slurmctld slurmd munge", check=False)
    program, script = host.root / "usr/local/bin/gpuprov", host.root / "usr/local/sbin/gpuprov-health"
    program.write_bytes(host_program.build())
    script.write_text("#!/bin/sh\nexec /usr/local/bin/gpuprov health --for slurm >> /var/log/gpuprov-health 2>&1\n")
    for path in (program, script):
        path.chmod(0o755)
    (host.root / "etc/slurm/slurm.conf").write_text(_CONF.format(**addresses))
    # By itself slurmd looks for cgroups, and refuses a kernel that has those of both versions.
    (host.root / "etc/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    with (host.root / "etc/hosts").open("a") as hosts:
        hosts.write("".join(f"{address} {name}\n" for name, address in addresses.items()))
    host.ssh(
        f"hostname {host.name}; mkdir -p /var/spool/slurmctld /run/simgpu; echo {key} > /etc/munge/munge.key; "
        "for n in 0 1; do echo 1 > /run/simgpu/persistence-$n; done; systemctl start munge"
    )


def _until(host: Host, **wanted: str) -> dict[str, str]:
    """Wait until the nodes have these states; return what Slurm says of each."""
    deadline = time.monotonic() + _SECONDS
    while True:
        rows = host.ssh("sinfo --noheader --Node --format '%N|%T|%E'", check=False).stdout.splitlines()
        found = {name: (state, reason) for name, state, reason in (row.split("|", 2) for row in rows)}
        if {name: state for name, (state, _) in found.items()} == wanted:
            return {name: reason for name, (_, reason) in found.items()}
        assert time.monotonic() < deadline, f"{found}\n{host.ssh(_LOGS, check=False).stdout}"
        time.sleep(1)


def test_slurm_drains_a_node_whose_gpu_is_sick_and_takes_it_back(site: Site) -> None:
    hosts = {name: site.installed(name) for name in _NAMES}
    addresses = {name: host.address for name, host in hosts.items()}
    for host in hosts.values():
        host.add_archive()
        _node(host, addresses, "0123456789abcdef" * 8)
    main, twin = hosts.values()
    main.ssh("systemctl start slurmctld slurmd")
    twin.ssh("systemctl start slurmd")
    _until(main, main="idle", twin="idle")

    twin.ssh("echo 1 > /run/simgpu/remap-failed-1")
    said = _until(main, main="idle", twin="drained")
    assert said["twin"] == "gpuprov health: GPU 1: broken memory rows could not be replaced"

    twin.ssh("rm /run/simgpu/remap-failed-1")
    _until(main, main="idle", twin="idle")

    main.ssh("scontrol update nodename=main state=drain reason='a fan is to be replaced'")
    main.ssh("/usr/local/sbin/gpuprov-health")
    assert _until(main, main="drained", twin="idle")["main"] == "a fan is to be replaced"
    logs = {name: host.ssh("cat /var/log/gpuprov-health").stdout.splitlines() for name, host in hosts.items()}
    assert [line.split()[:2] for line in logs["twin"]] == [["drained", "twin:"], ["resumed", "twin:"]]
    assert logs["main"] == []

"""A cgroup for each host: without, all hosts would share the cgroup of their docker.service."""

from pathlib import Path

from tests.lab.shell import LabError, wait_for

_BASE = Path("/sys/fs/cgroup")


def cgroup_directories(name: str) -> tuple[Path, ...]:
    """Return a host's directories: one on a machine with cgroup v2 alone, several on a hybrid one (v2 first)."""
    if (_BASE / "cgroup.controllers").exists():
        return (_BASE / f"gpuprov-{name}",)
    hierarchies = [_BASE / part for part in ("unified", "memory", "pids") if (_BASE / part).is_dir()]
    if not hierarchies or not (hierarchies[0] / "cgroup.procs").exists():
        raise LabError("no cgroup v2 hierarchy at /sys/fs/cgroup or /sys/fs/cgroup/unified; systemd hosts need one")
    return tuple(hierarchy / f"gpuprov-{name}" for hierarchy in hierarchies)


def hosts_of(lab: str) -> set[str]:
    """Return the names with which a lab's hosts have cgroups, from whichever clone they were booted."""
    found = (path.name for depth in ("", "*/") for path in _BASE.glob(f"{depth}gpuprov-{lab}-*"))
    return {name.removeprefix("gpuprov-") for name in found}


def end_processes(name: str) -> None:
    """Kill all that runs in a host's cgroups and remove them."""
    first = cgroup_directories(name)[0]
    if first.exists():
        (first / "cgroup.kill").write_text("1")
        wait_for(f"the end of {name}'s processes", lambda: not _populated(first))
    # Each hierarchy: systemd-nspawn makes the host's cgroup in some that we did not ask for.
    for directory in (*_BASE.glob(f"*/{first.name}"), *_BASE.glob(first.name)):
        for below in sorted(directory.rglob("*"), key=lambda path: -len(path.parts)):
            if below.is_dir():
                below.rmdir()
        directory.rmdir()


def runs(name: str) -> bool:
    """Say whether anything runs in a host's cgroup."""
    directory = cgroup_directories(name)[0]
    return directory.exists() and _populated(directory)


def cpu_seconds(name: str) -> float:
    """Return the CPU time that a host has used since its boot."""
    first, _ = (cgroup_directories(name)[0] / "cpu.stat").read_text().split("\n", 1)
    return int(first.removeprefix("usage_usec ")) / 1e6


def _populated(directory: Path) -> bool:
    return "populated 1" in (directory / "cgroup.events").read_text()

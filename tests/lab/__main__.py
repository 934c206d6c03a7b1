"""The lab's command line: up, down, status, shell."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable

from tests.lab.base import RELEASES, build_base
from tests.lab.host import HostRequest
from tests.lab.lab import CACHE, Lab
from tests.lab.shell import LabError


def main() -> None:
    """Run one command; exit code 1 with one sentence if it can't be done."""
    arguments = _parser().parse_args()
    begun = time.monotonic()

    def tell(message: str) -> None:
        print(f"[{time.monotonic() - begun:5.1f} s] {message}", flush=True)

    try:
        _run(arguments, Lab(tell=tell), tell)
    except LabError as error:
        sys.exit(f"lab: {error}")
    if arguments.command in ("up", "down", "bases"):
        tell("done")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="boot hosts; those that run are left alone")
    up.add_argument("--hosts", type=int, default=2, help="how many (default 2): lab-a, lab-b, …")
    up.add_argument("--release", default="bookworm", help="Debian release (default bookworm)")
    up.add_argument("--gpus", type=int, default=2, help="simulated GPUs a host (default 2)")
    down = commands.add_parser("down", help="remove every trace")
    down.add_argument("--purge", action="store_true", help="the cached root file systems too")
    bases = commands.add_parser("bases", help="build root file systems, if the cache lacks them")
    bases.add_argument("releases", nargs="*", choices=RELEASES, metavar="RELEASE", help=", ".join(RELEASES))
    commands.add_parser("status", help="say which hosts run")
    shell = commands.add_parser("shell", help="log in to a host, or run a command there")
    shell.add_argument("host")
    shell.add_argument("words", nargs=argparse.REMAINDER)
    return parser


def _run(arguments: argparse.Namespace, lab: Lab, tell: Callable[[str], None]) -> None:
    if arguments.command == "up":
        names = [f"lab-{chr(ord('a') + index)}" for index in range(arguments.hosts)]
        hosts = lab.up([HostRequest(name, arguments.release, arguments.gpus, archive=True) for name in names])
        for host in hosts:
            print(f"{host.name}: {host.address}, log in with: {' '.join(host.ssh_argv())}")
    elif arguments.command == "down":
        lab.down()
        if arguments.purge:
            shutil.rmtree(CACHE / "bases", ignore_errors=True)
    elif arguments.command == "bases":
        for release in arguments.releases:
            build_base(CACHE / "bases", release, tell)
    elif arguments.command == "status":
        print(lab.status())
    else:
        _shell(lab, arguments.host, arguments.words)


def _shell(lab: Lab, name: str, words: list[str]) -> None:
    lines = dict(zip(lab.host_names(), lab.known_hosts.read_text().splitlines(), strict=False))
    if name not in lines:
        raise LabError(f"there is no host {name}; running: {lab.status()}")
    options = ("-o", f"UserKnownHostsFile={lab.known_hosts}", "-i", str(lab.key))
    os.execvp("ssh", ("ssh", *options, f"root@{lines[name].split()[0]}", *words))


if __name__ == "__main__":
    main()

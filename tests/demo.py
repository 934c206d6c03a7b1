"""`make demo`: two lab hosts, installed over SSH and verified, shown as a user would type it; and its end."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

from tests import simgpu
from tests.lab import HostRequest, Lab, LabError

_GPUPROV = Path(sys.executable).with_name("gpuprov")
_INVENTORY = "inventories/lab"
HOSTS = (HostRequest("lab-a", gpus=2, archive=True), HostRequest("lab-b", gpus=4, archive=True))
_BEGUN = time.monotonic()


def main() -> None:
    """Run `up` or `down`; the exit code is the last command's."""
    lab = Lab(tell=_tell)
    try:
        if sys.argv[1:] == ["down"]:
            lab.down()
            _tell("every trace of the demo is gone; what was downloaded stays in .cache (make clean removes that)")
            return
        hosts = lab.up(HOSTS)
    except (LabError, simgpu.BuildError) as error:
        sys.exit(f"demo: {error}")
    _tell(f"hosts are up: {', '.join(f'{host.name} ({host.address})' for host in hosts)}")
    run_file = simgpu.build_run(lab.www)
    _tell(f"the test driver is served: {lab.url}/{run_file.name}")
    for words in (("install", "--hosts", _INVENTORY), ("verify", "--hosts", _INVENTORY)):
        code = _show("gpuprov", *words)
        if code != 0:
            sys.exit(code)
    image = "$(docker images -q gpuprov-verify)"
    for flags in ("--runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all", "--gpus 2"):
        line = f"docker run --rm {flags} {image} nvidia-smi -L"
        print(f"\nlab-b# {line}", flush=True)
        print(hosts[-1].ssh(line).stdout.rstrip())
    _tell("done; look around: .venv/bin/python -m tests.lab shell lab-a; end it: make demo-down")


def _show(*words: str) -> int:
    """Print a command as typed, run it, and return its exit code."""
    print(f"\n$ {shlex.join(words)}", flush=True)
    return subprocess.run([_GPUPROV, *words[1:]], check=False).returncode


def _tell(message: str) -> None:
    print(f"[{time.monotonic() - _BEGUN:5.1f} s] {message}", flush=True)


if __name__ == "__main__":
    main()

"""A bundle whose making a signal ends: nothing of it goes on, and nothing is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Prints the folder of the bundle to be and the id of a command, which a signal finds at work.
_CREATE = """
import sys
from gpuprov import __main__
from gpuprov.bundle_create import create

def collect(to, *_):
    print(to.work, flush=True)
    to.system.run(("sh", "-c", "echo $$; exec sleep 3600"), on_line=lambda line: print(line, flush=True))

create.collect = collect
sys.argv = ["gpuprov", "bundle", "create", "--distro", "ubuntu-24.04", "-e", "gpuprov_docker=none", "-o", sys.argv[1]]
__main__.main()
"""


def begin(folder: Path, *before: str) -> tuple[subprocess.Popen[str], Path, int]:
    """Return the process that makes a bundle, its folder, and the process of its command."""
    words = (*before, sys.executable, "-c", _CREATE, str(folder / "bundle.tar"))
    made = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert made.stdout is not None
    return made, Path(made.stdout.readline().strip()), int(made.stdout.readline())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_its_command_and_removes_what_it_made(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, a CI job that is cancelled, a connection that is lost; downloads may take an hour."""
    made, work, command = begin(tmp_path)
    assert work.is_dir()
    made.send_signal(number)
    with made:
        assert made.wait(timeout=300) == 128 + number
    assert not is_running(command) and not work.exists() and list(tmp_path.iterdir()) == []


def test_nohup_keeps_it(tmp_path: Path) -> None:
    made, work, command = begin(tmp_path, "nohup")
    with made:
        made.send_signal(signal.SIGHUP)
        os.kill(command, signal.SIGKILL)
        # What the stand-in collects is no manifest.
        assert made.wait(timeout=300) == 1
    assert not work.exists()

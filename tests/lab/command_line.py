"""gpuprov's command line in a process of its own that begins with all modules loaded.

To load them takes 0.7 s of a processor, more than all else that the command line does in a test's run. So one process
loads them once, and forks for each run.
"""

import atexit
import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path

GPUPROV = Path(sys.executable).with_name("gpuprov")
_MODULES = [
    "gpuprov.cli.main", "gpuprov.fleet.command", "gpuprov.fleet.rolling", "gpuprov.fleet.run",
    "gpuprov.fleet.report", "gpuprov.fleet.ssh", "fabric", "ansible.playbook.play_context",
    "ansible.inventory.manager", "ansible.vars.manager", "ansible.parsing.dataloader", "ansible.template",
]  # fmt: skip

_STARTING = threading.Lock()


def run(words: Sequence[object], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run gpuprov; stdout and stderr come together, as a user sees them.

    Raises subprocess.TimeoutExpired after so many seconds. Modules read the environment when they are loaded: a test
    that has changed it, or the folder, gets a new Python.
    """
    argv = [str(GPUPROV), *(str(word) for word in words)]
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
        context, surroundings = _loaded()
        if surroundings != _surroundings():
            return subprocess.run(
                argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
            )
        child = context.Process(target=_main, args=(argv, output.name))
        with _STARTING:
            child.start()
            # A start in another thread would read this one's exit code, and leave none for us.
            process._children.discard(child)  # type: ignore[attr-defined]
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(argv, timeout, output.read().encode())
        return subprocess.CompletedProcess(argv, child.exitcode, output.read())


def end() -> None:
    """End the process that has loaded the modules, which else ends after this one; CPython has no public way."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@functools.cache
def _loaded() -> tuple[ForkServerContext, tuple[object, ...]]:
    """Return the context in which processes begin, and what is around its server, which the first of them starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_MODULES)
    return context, _surroundings()


def _surroundings() -> tuple[object, ...]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return environment, Path.cwd(), os.umask(os.umask(0o22))


def _main(argv: list[str], output: str) -> None:
    """Be gpuprov, in the child."""
    with Path(output).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = argv
    from gpuprov.__main__ import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()

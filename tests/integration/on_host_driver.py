"""Runs on a lab host: one installation of a .run there, as a run would make it, and prints what came of it as JSON.

    python -m tests.integration.on_host_driver '{"url": "/root/driver.run", "version": "550.163.01"}'

Fields of InstallDriver, as JSON. Prints {"problem": [what, evidence, next step]}, or {"problem": null}.
"""

import json
import sys
from typing import Any

from gpuprov.core.apply import apply_changes
from gpuprov.core.journal import STATE_DIRECTORY, new_journal
from gpuprov.core.system import System
from gpuprov.driver_run import InstallDriver
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.events import Event


def _ignore(event: Event) -> None:
    """Nobody watches."""


def main() -> None:
    """Install, journalled, with whatever undoing follows."""
    fields: dict[str, Any] = json.loads(sys.argv[1])
    defaults: dict[str, Any] = {"sha256": "", "architecture": "x86_64", "kernel_modules": False}
    system = System()
    system.make_directory(STATE_DIRECTORY, 0o700)
    journal = new_journal(system, "install")
    problem = None
    try:
        apply_changes([InstallDriver(**{**defaults, **fields})], system, journal, _ignore)
    except GpuprovError as error:
        first = error.problems[0]
        problem = [first.what, first.evidence, first.next_step]
    journal.end("done")
    print(json.dumps({"problem": problem}))


if __name__ == "__main__":
    main()

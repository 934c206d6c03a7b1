"""The one-file program `gpuprov-host.pyz`: the missing features, and what to install for them."""

from __future__ import annotations

from gpuprov import __version__
from gpuprov.protocol.errors import UsageError

# Set by the program's first lines (tools/host_program.py).
active = False
WHOLE = (
    f"on a machine with Python 3.11 or later: pip install gpuprov-{__version__}-py3-none-any.whl (of the same "
    "release), or `make setup` in a clone; then run the same command there"
)


def require_whole_program(what: str) -> None:
    """Raise GpuprovError (exit code 2) in the one-file program: `what` needs Ansible, SSH or gpuprov's own packages."""
    if active:
        raise UsageError(
            f"{what} needs the whole gpuprov",
            "this is the one-file program, which serves the machine it runs on: it has no Ansible and no SSH",
            WHOLE,
        )  # fmt: skip

"""`gpuprov` as a program whose own machine is a fake host: `python -m tests.unit.on_fake_host ROOT WORD …`."""

import sys
from pathlib import Path

from gpuprov.__main__ import main
from gpuprov.agent import run
from tests.unit.fake_host import FakeHost

if __name__ == "__main__":
    host = FakeHost(Path(sys.argv.pop(1)))
    run.System = lambda: host  # type: ignore[attr-defined,assignment,misc]
    main()

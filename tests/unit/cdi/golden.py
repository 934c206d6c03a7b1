"""Rewrites the golden files of these tests, to be read before a commit: python -m tests.unit.cdi.golden."""

import tempfile
from pathlib import Path

from gpuprov.cdi.discover import ask_nvml, discover
from gpuprov.cdi.generate import specification
from gpuprov.cdi.specification import render_json
from gpuprov.core.system import System
from tests.unit.cdi.test_discover import DATA, Host, lay
from tests.unit.driver_tree import mounts, write_driver


def main() -> None:
    """Lay both trees and write what is found in them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        write_driver(root, 2)
        host = Host(root)
        (DATA / "specification-550.163.01.json").write_bytes(render_json(specification(ask_nvml(host, discover(host)))))
        debian = Path(folder) / "debian"
        lay(debian, "debian-535.261.03.tsv")
        found = mounts(discover(System(str(debian))))
        lines = "".join(f"{path} {real}\n" for path, real in sorted(found.items()))
        (DATA / "debian-535.261.03.mounts").write_text(lines)


if __name__ == "__main__":
    main()

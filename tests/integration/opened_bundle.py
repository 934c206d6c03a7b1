"""A bundle that was just collected, as a host opens it."""

from __future__ import annotations

import io

from gpuprov.bundle import use
from gpuprov.bundle.create import Collected
from gpuprov.bundle.format import read_contents, verify_files, write_bundle
from gpuprov.system import System


def opened(made: Collected) -> use.OpenBundle:
    """Write the bundle, check every digest, and give it back open."""
    file = io.BytesIO()
    write_bundle(file, made.manifest, lambda path: System().open(made.places[path]), b"")
    contents = read_contents(file)
    verify_files(file, contents)
    return use.OpenBundle(file, contents)

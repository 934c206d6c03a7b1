"""A bundle that was just collected, as a host opens it."""

from __future__ import annotations

import io

from gpuprov.bundle.format import read_contents, verify_files, write_bundle
from gpuprov.bundle.open import OpenBundle
from gpuprov.bundle_create.create import Collected
from gpuprov.core.system import System


def opened(made: Collected) -> OpenBundle:
    """Write the bundle, check every digest, and give it back open."""
    file = io.BytesIO()
    write_bundle(file, made.manifest, lambda path: System().open(made.places[path]), b"")
    contents = read_contents(file)
    verify_files(file, contents)
    return OpenBundle(file, contents)

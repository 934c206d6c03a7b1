"""A bundle that is collected here, and opened as a host does."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuprov.bundle.format import read_contents, verify_files, write_bundle
from gpuprov.bundle.manifest import Manifest
from gpuprov.bundle.open import OpenBundle
from gpuprov.bundle_create.create import AGENT, collect
from gpuprov.bundle_create.recipe import Collection, Recipe
from gpuprov.core.system import System


@dataclass(frozen=True)
class Collected:
    """A manifest, and where each of its files lies on this machine."""

    manifest: Manifest
    places: Mapping[str, str]


def collected(recipe: Recipe, folder: Path) -> Collected:
    """Collect what a recipe names, with some agent; `folder` gets the files and what is kept for the next bundle."""
    (folder / "work").mkdir()
    told: list[str] = []
    to = Collection(System(), recipe, f"{folder}/work", lambda text, done, total: told.append(text))
    manifest = collect(to, {AGENT: b"an agent"}, f"{folder}/cache")
    assert told or not recipe.packages
    return Collected(manifest, to.places)


def opened(made: Collected) -> OpenBundle:
    """Write the bundle, check every digest, and give it back open."""
    file = io.BytesIO()
    write_bundle(file, made.manifest, lambda path: System().open(made.places[path]), b"")
    contents = read_contents(file)
    verify_files(file, contents)
    return OpenBundle(file, contents)

"""Container images in a bundle: which of them docker or podman has, and the change that loads one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gpuprov.core.changes import Change, Json, Tell
from gpuprov.core.places import FOLDER
from gpuprov.core.system import System
from gpuprov.engines.containers import image_identity
from gpuprov.plan.with_bundle import image_engine
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import HostSpec

if TYPE_CHECKING:
    from gpuprov.facts.host import HostFacts

_LOAD_SECONDS = 1800


def plan(facts: HostFacts, spec: HostSpec) -> tuple[Change, ...]:
    """Return the changes that load each image of the bundle that the host's engine lacks."""
    if facts.bundle is None:
        return ()
    return tuple(
        LoadImage(one.reference, one.identity, f"{FOLDER}/{one.file}", image_engine(spec))
        for one in facts.bundle.manifest.images
        if one.reference not in facts.bundle.loaded_images
    )


@dataclass(frozen=True)
class LoadImage(Change):
    """Load this image into docker or podman, from a file in `docker save` format."""

    reference: str
    identity: str
    path: str
    engine: str = "docker"

    bundle_part: ClassVar[str] = "images"

    def summary(self) -> str:
        return f"load image {self.reference} from the bundle"

    def capture(self, system: System) -> Json:
        found = system.run((self.engine, "image", "inspect", "--format", "{{.Id}}", self.reference))
        return {"reference": self.reference, "id": found.stdout.strip() if found.ok else "", "engine": self.engine}

    def apply(self, system: System, tell: Tell) -> Json:
        done = system.run((self.engine, "load", "--input", self.path), timeout=_LOAD_SECONDS)
        if not done.ok:
            raise GpuprovError(
                f"{self.engine} can't load {self.reference}",
                done.evidence(4),
                f"is there room? {self.engine} system df",
            )
        if image_identity(system, self.reference, self.engine) != self.identity:
            raise GpuprovError(
                f"the image that {self.engine} loaded is not the {self.reference} of the manifest",
                done.stdout.strip(),
                "make the bundle again: gpuprov bundle create",
            )
        return {}

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        """Give the name back to the image that had it; an image without another name is removed."""
        # Journals of older versions know docker alone.
        engine = before.get("engine", "docker")
        if before["id"]:
            system.run((engine, "tag", before["id"], before["reference"]))
        else:
            system.run((engine, "rmi", before["reference"]))

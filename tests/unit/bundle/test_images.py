"""Container images that a bundle takes along: of the hosts' architecture, whatever this machine's is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuprov.bundle_create.create import collect
from gpuprov.bundle_create.recipe import Collection, Recipe
from gpuprov.core.changes import tell_nobody
from gpuprov.core.commands import Completed
from tests.unit.refused import refused
from tests.unit.scripted import Scripted


class Docker(Scripted):
    """Has images of some architectures, and pulls any image for the platform that it is asked for."""

    def __init__(self, root: Path, **architectures: str) -> None:
        super().__init__(root)
        self.architectures = architectures

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        argv, reference = tuple(argv), argv[-1]
        self.asked.append(argv)
        if argv[1] == "pull":
            platform = argv[argv.index("--platform") + 1] if "--platform" in argv else "linux/amd64"
            self.architectures[reference] = platform.rpartition("/")[2]
        elif argv[1] == "save":
            self.write(argv[3], b"an image")
        elif reference not in self.architectures:
            return Completed(argv, 1, "", f"Error: No such image: {reference}")
        elif "Architecture" in argv[-2]:
            return Completed(argv, 0, f"{self.architectures[reference]}\n")
        return Completed(argv, 0, '2026-01-01T00:00:00Z ["sha256:1"]\n')


def collected(host: Docker, architecture: str) -> Any:
    host.make_directory("/work")
    recipe = Recipe("debian", "12", architecture, (), (), (), images=("app",))
    return collect(Collection(host, recipe, "/work", tell_nobody), {}, "/cache")


@pytest.mark.parametrize(("architecture", "pulled"), [("aarch64", "arm64"), ("x86_64", "amd64")])
def test_an_image_is_pulled_for_the_hosts_architecture(tmp_path: Path, architecture: str, pulled: str) -> None:
    host = Docker(tmp_path)
    assert [one.reference for one in collected(host, architecture).images] == ["app"]
    assert host.architectures == {"app": pulled}


def test_an_image_of_another_architecture_is_refused_and_kept(tmp_path: Path) -> None:
    host = Docker(tmp_path, app="amd64")
    problem = refused(collected, host, "aarch64")
    assert "app" in problem.what and "amd64" in problem.evidence
    assert problem.next_step.startswith("docker pull --platform linux/arm64 app")
    assert not [argv for argv in host.asked if argv[1] in ("pull", "save")]

"""Troubles of running containers: another library than the driver's, and more containers than are looked at."""

from __future__ import annotations

from dataclasses import replace

from gpuprov.checks.cuda.judgement import Finding
from gpuprov.doctor.finding import WARNING
from gpuprov.doctor.snapshot import Containers, Loaded
from tests.unit.doctor.ill import Change, Row

# As test_cuda_libraries.py has it of an image with a libcuda of its own.
_WRONG = Finding(
    (803, 35, 36), "/opt/own/libcuda.so.1 is of driver 535.261.03, the loaded kernel module is 550.163.01",
    "/opt/own/libcuda.so.535.261.03: LD_LIBRARY_PATH has /opt/own",
    "correct LD_LIBRARY_PATH: in the image, or in the call, such as docker run --env LD_LIBRARY_PATH=",
    library="libcuda.so.1",
)  # fmt: skip

# Of a container that runs since before the host's driver was updated.
_UPDATED = Finding((803, 35, 36), _WRONG.what, _WRONG.evidence, "docker restart {}", library="libcuda.so.1")


def _containers(*examined: Loaded) -> Change:
    return lambda x: replace(x, containers=Containers(examined))


LIBRARY_ROWS = (
    Row("container-library",
        _containers(Loaded("docker", "sound"), Loaded("docker", "trainer", (_WRONG,)),
                    Loaded("podman", "b", (_WRONG,))),
        "trainer (docker): /opt/own/libcuda.so.535.261.03: LD_LIBRARY_PATH has /opt/own",
        "gpuprov cuda trainer  # correct LD_LIBRARY_PATH"),
    Row("container-library", _containers(*(Loaded("docker", f"job-{number}", (_WRONG,)) for number in range(9))),
        "and 4 more containers", "gpuprov cuda job-0"),
    Row("container-library",
        _containers(*(Loaded("docker", one, (replace(_UPDATED, next_step=f"docker restart {one}"),)) for one in "ab"),
                    Loaded("docker", "trainer", (_WRONG,))),
        "trainer (docker): ", "docker restart a b"),
    Row("containers-left-out",
        lambda x: replace(x, containers=Containers((Loaded("docker", "a"),), 7, "not done after 20 s")), "examined: 1",
        "gpuprov cuda CONTAINER", WARNING),
)  # fmt: skip

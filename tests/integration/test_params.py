"""The driver's parameters in a container: ModifyDeviceFiles is 0 there, so that no library makes device nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook import deploy, params
from tests.integration.container_bench import NAME, Bench, low_level_runtime
from tests.integration.test_start_details import in_user_namespace

pytestmark = pytest.mark.root

# No driver is loaded here. This file of the kernel's stands for its parameters, and its line for the one that counts.
STANDS_FOR_PARAMS = "/proc/sys/kernel/ostype"
ALL = "NVIDIA_VISIBLE_DEVICES=all"
SCRIPT = f"cat {STANDS_FOR_PARAMS}; grep {STANDS_FOR_PARAMS} /proc/mounts; (echo x > {STANDS_FOR_PARAMS}) || echo ro"


@pytest.fixture(params=["runc", "crun"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, low_level_runtime(request.param, tmp_path))
    library = made.folder / "deployed/host" / deploy.LIBRARY_PATH.lstrip("/") / "runtime_hook"
    text = (library / "params.py").read_text()
    for before, after in (
        (params.PARAMS, STANDS_FOR_PARAMS), (r"ModifyDeviceFiles: 1\n", r"Linux\n"),
        (params._COPY, str(made.folder / "run/params")),
    ):  # fmt: skip
        assert before in text
        text = text.replace(before, after)
    (library / "params.py").write_text(text)
    deploy.compile_bytecode(str(library))
    yield made
    made.delete()


@pytest.mark.parametrize("by_hook", ["", "prestart"], ids=["runtime", "hook"])
def test_containers_see_a_copy_that_forbids_to_make_nodes_and_cannot_change_it(bench: Bench, by_hook: str) -> None:
    report = bench.report(ALL, by_hook=by_hook, arguments=["sh", "-c", SCRIPT])
    assert report[0] == "ModifyDeviceFiles: 0"
    assert {"ro", "nosuid"} <= set(report[1].split()[3].split(","))
    assert report[-1] == "ro"
    assert (bench.folder / "run/params").read_text() == "ModifyDeviceFiles: 0\n"
    assert (bench.folder / "run/params").stat().st_mode & 0o777 == 0o644
    assert Path(STANDS_FOR_PARAMS).read_text() == "Linux\n"


def edited(bench: Bench, *environment: str, **changes: Any) -> list[str]:
    """Return what the hooks of the edited configuration mount."""
    bench.configure(*environment, **changes)
    done = bench.create()
    assert done.returncode == 0, done.stderr
    hooks = json.loads(bench.config.read_text()).get("hooks", {}).get("createContainer", [])
    return [hook["args"][-1] for hook in hooks if hook["args"][0] == "mount"]


def test_only_gpu_containers_have_it(bench: Bench) -> None:
    assert edited(bench, "A=1") == []
    bench.call("delete", "--force", NAME)
    assert edited(bench, ALL) == [f"{bench.root}{STANDS_FOR_PARAMS}"]


def test_a_relative_bundle_and_root_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.folder)
    bench.configure(ALL, arguments=["sh", "-c", SCRIPT])
    with (bench.folder / "output").open("w") as output:
        done = subprocess.run(
            (bench.runtime, "create", "--bundle", "bundle", NAME), stdin=subprocess.DEVNULL, stdout=output, check=False
        )
    assert done.returncode == 0
    assert bench.output()[0] == "ModifyDeviceFiles: 0"


def test_a_procfs_without_the_driver_and_a_user_namespace_do_without(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(params, "masked_copy", lambda: "/copy")
    monkeypatch.setattr(params, "PARAMS", "/proc/version")
    config = {"linux": bench.pristine["linux"], "mounts": bench.pristine["mounts"]}
    hook = params.masking_hook(config, "/root")
    assert hook is not None
    assert hook["args"][-2:] == ["/copy", f"/root{params.PARAMS}"]
    pids = [
        {**one, "options": ["subset=pid"]} if one["destination"] == "/proc" else one for one in bench.pristine["mounts"]
    ]
    of_the_host = [{"destination": "/proc", "type": "bind", "source": "/proc", "options": ["rbind"]}]
    for mounts in (pids, of_the_host, []):
        assert params.masking_hook({**config, "mounts": mounts}, "/root") is None
    linux, mounts = in_user_namespace(bench)
    assert params.masking_hook({"linux": linux, "mounts": mounts}, "/root") is None
    # Mounted over the host's procfs, as in a simulation: no container's own procfs has it.
    monkeypatch.setattr(params, "PARAMS", "/etc/passwd")
    assert params.masking_hook(config, "/root") is None

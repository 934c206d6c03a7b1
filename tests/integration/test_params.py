"""The driver's parameters in a container: ModifyDeviceFiles is 0 there, so that no library makes device nodes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuprov.runtime_hook import deploy, device_nodes
from tests.integration.container_bench import NAME, Bench, bench
from tests.integration.test_start_details import host_nodes, in_user_namespace

__all__ = ["bench", "host_nodes"]

pytestmark = pytest.mark.root

# No driver is loaded here. This file of the kernel's stands for its parameters, and its line for the one that counts.
STANDS_FOR_PARAMS = "/proc/sys/kernel/ostype"
ALL = "NVIDIA_VISIBLE_DEVICES=all"
SCRIPT = f"cat {STANDS_FOR_PARAMS}; grep {STANDS_FOR_PARAMS} /proc/mounts; (echo x > {STANDS_FOR_PARAMS}) || echo ro"


@pytest.fixture(autouse=True)
def stand_in(bench: Bench) -> None:
    """Let the bench's runtime take another file for the parameters."""
    library = bench.folder / "deployed/host" / deploy.LIBRARY_PATH.lstrip("/") / "runtime_hook"
    text = (library / "device_nodes.py").read_text()
    for before, after in (
        (device_nodes.PARAMS, STANDS_FOR_PARAMS), (r"ModifyDeviceFiles: 1\n", r"Linux\n"),
        (device_nodes.COPY, str(bench.folder / "run/params")),
    ):  # fmt: skip
        assert before in text
        text = text.replace(before, after)
    (library / "device_nodes.py").write_text(text)
    deploy.compile_bytecode(str(library))


@pytest.mark.parametrize("by_hook", ["", "prestart", "createContainer"], ids=["runtime", "hook", "CDI hook"])
def test_containers_see_a_copy_that_forbids_to_make_nodes_and_cannot_change_it(bench: Bench, by_hook: str) -> None:
    # What stands for the parameters lies in a folder that is read-only otherwise: crun mounts it before these hooks.
    linux = {**bench.pristine["linux"], "readonlyPaths": []}
    report = bench.report(ALL, by_hook=by_hook, arguments=["sh", "-c", SCRIPT], linux=linux)
    assert report[0] == "ModifyDeviceFiles: 0"
    assert {"ro", "nosuid"} <= set(report[1].split()[3].split(","))
    assert report[-1] == "ro"
    assert (bench.folder / "run/params").read_text() == "ModifyDeviceFiles: 0\n"
    assert (bench.folder / "run/params").stat().st_mode & 0o777 == 0o644
    assert Path(STANDS_FOR_PARAMS).read_text() == "Linux\n"


def test_every_hook_reads_its_state_to_the_end(bench: Bench) -> None:
    """A crun before 1.17 fails, now and then, where one ends before it has: what no pipe holds makes that certain."""
    bench.configure(ALL, linux={**bench.pristine["linux"], "readonlyPaths": []})
    done = bench.create()
    assert done.returncode == 0, done.stderr
    hooks = json.loads(bench.config.read_text())["hooks"]["createContainer"]
    assert len(hooks) == 1
    bench.call("delete", "--force", NAME)
    hooks += [{"path": str(bench.deployed.hook), "args": ["hook", stage]} for stage in ("createContainer", "poststop")]
    for hook in hooks:
        with subprocess.Popen(hook["args"], executable=hook["path"], stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.write(b" " * 200_000)
            process.stdin.close()


@pytest.mark.parametrize("stage", ["prestart", "createContainer"])
@pytest.mark.parametrize("proc", ["of the host", "in a user namespace"])
def test_hook_keeps_host_procfs_and_user_namespaces(bench: Bench, host_nodes: None, stage: str, proc: str) -> None:
    """A volume at /proc refuses no container: what is seen there is the host's.

    The prestart hook is outside of the container's user namespace, and masks the parameters there too.
    """
    linux, mounts = dict(bench.pristine["linux"]), bench.pristine["mounts"]
    if proc == "of the host":
        of_the_host = {"destination": "/proc", "type": "bind", "source": "/proc", "options": ["rbind"]}
        mounts = [of_the_host if one["destination"] == "/proc" else one for one in mounts]
        linux["namespaces"] = [one for one in linux["namespaces"] if one["type"] != "pid"]
    else:
        linux, mounts = in_user_namespace(bench)
    changes: dict[str, Any] = {"linux": linux, "mounts": mounts}
    asks = [ALL] if stage == "prestart" else []
    assert bench.report(*asks, by_hook=stage, arguments=["cat", STANDS_FOR_PARAMS], **changes) == [
        "ModifyDeviceFiles: 0" if (stage, proc) == ("prestart", "in a user namespace") else "Linux"
    ]


@pytest.mark.parametrize("stage", ["prestart", "createContainer"])
def test_a_mount_below_proc_is_left_as_it_is_and_the_container_starts(bench: Bench, stage: str) -> None:
    folder = STANDS_FOR_PARAMS.rpartition("/")[0]
    volume = {"destination": folder, "type": "bind", "source": folder, "options": ["rbind", "ro"]}
    mounts = [*bench.pristine["mounts"], volume]
    done = bench.begin(ALL, by_hook=stage, mounts=mounts, arguments=["cat", STANDS_FOR_PARAMS])
    if done.returncode:  # runc mounts nothing there
        assert "/proc" in done.stderr
        assert "gpuprov" not in done.stderr
    else:
        assert bench.output() == ["Linux"]


def edited(bench: Bench, *environment: str, **changes: Any) -> list[str]:
    """Return what the hooks of the edited configuration mount."""
    bench.configure(*environment, **changes)
    done = bench.create()
    assert done.returncode == 0, done.stderr
    hooks = json.loads(bench.config.read_text()).get("hooks", {}).get("createContainer", [])
    return [hook["args"][-1] for hook in hooks if "/usr/bin/mount" in hook["args"]]


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


def test_procfs_without_driver_and_user_namespace_work(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_nodes, "read_text", lambda path: "ModifyDeviceFiles: 1\n")
    monkeypatch.setattr(device_nodes, "PARAMS", "/proc/version")
    config = {"linux": bench.pristine["linux"], "mounts": bench.pristine["mounts"]}
    hook = device_nodes.masking_hook(config, "/root")
    assert hook is not None
    assert hook["args"][-2:] == [device_nodes.COPY, f"/root{device_nodes.PARAMS}"]
    pids = [
        {**one, "options": ["subset=pid"]} if one["destination"] == "/proc" else one for one in bench.pristine["mounts"]
    ]
    of_the_host = [{"destination": "/proc", "type": "bind", "source": "/proc", "options": ["rbind"]}]
    for mounts in (pids, of_the_host, []):
        assert device_nodes.masking_hook({**config, "mounts": mounts}, "/root") is None
    linux, mounts = in_user_namespace(bench)
    assert device_nodes.masking_hook({"linux": linux, "mounts": mounts}, "/root") is None
    # Mounted over the host's procfs, as in a simulation: no container's own procfs has it.
    monkeypatch.setattr(device_nodes, "PARAMS", "/etc/passwd")
    assert device_nodes.masking_hook(config, "/root") is None

"""The ways to an image that others drive: cloud-init, Packer's template, playbooks; on a host without a GPU."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.test_ansible import play_succeeds, recap, task_states
from tests.lab import Host, HostRequest, cgroups
from tests.lab.command_line import GPUPROV
from tests.lab.fixtures import Site, gpuprov, running
from tests.lab.lab import REPOSITORY
from tests.lab.shell import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.root]
_EXAMPLES = REPOSITORY / "examples"
_USER_DATA = _EXAMPLES / "cloud-init/user-data"
_TEMPLATE = _EXAMPLES / "packer/gpu-host.pkr.hcl"
# Modules are built in test_image.py; here the libraries are enough.
_LIBRARIES = {"gpuprov_image_gpus": "ampere", "gpuprov_image_nvswitch": False, "gpuprov_kernel_modules": "none"}
_WHEEL = "https://example.org/gpuprov-0.1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    requests = {
        "clouded": HostRequest("clouded", gpus=0, bind=(str(REPOSITORY),), archive=True),
        "played": HostRequest("played", gpus=0, archive=True),
        "used": HostRequest("used", gpus=1),
    }
    with running(requests, tmp_path_factory.mktemp("inventories")) as site:
        yield site


@pytest.fixture(scope="module")
def clouded(doors: Site) -> Host:
    """A host with Debian's own cloud-init and packer."""
    host = doors.fresh("clouded")
    host.ssh("apt-get -qq update && apt-get -qq install --no-install-recommends -y cloud-init packer", timeout=600)
    return host


def test_packer_takes_the_template(clouded: Host) -> None:
    clouded.ssh("ssh-keygen -q -t ed25519 -N '' -f /root/build-key")
    values = "-var base=https://example.org/base.qcow2 -var base_sha256=none -var key=/root/build-key"
    done = clouded.ssh(f"packer validate {values} {_TEMPLATE}", check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cloud_init_takes_the_user_data(clouded: Host) -> None:
    for path in (_USER_DATA, _EXAMPLES / "packer/seed/user-data"):
        done = clouded.ssh(f"cloud-init schema --config-file {path}", check=False)
        assert done.returncode == 0 and "Valid cloud-config" in done.stdout, done.stdout + done.stderr


def test_the_seed_lets_the_builds_key_in_and_the_last_provisioner_removes_it(clouded: Host) -> None:
    # mount(8) is left out: a container has no seed disk.
    (script,) = yaml.safe_load((_EXAMPLES / "packer/seed/user-data").read_text())["bootcmd"]
    keys, own = "/root/.ssh/authorized_keys", "/root/keys-of-this-test"
    assert script.count("mount ") == 2
    done = clouded.ssh(
        f"mkdir -p /run/gpuprov-seed && echo ssh-ed25519 AAAA build > /run/gpuprov-seed/k.pub; cp {keys} {own}\n"
        + "\n".join(line for line in script.splitlines() if "mount " not in line)
        + f"\ncat {keys}; stat -c %a {keys}; cp {own} {keys}"
    )
    assert done.stdout == "ssh-ed25519 AAAA build\n600\n"
    lines = [line.strip() for line in _TEMPLATE.read_text().splitlines()]
    install = next(number for number, line in enumerate(lines) if "gpuprov install" in line)
    assert lines[install + 1].startswith(f'"rm -rf {keys} ')


def _user_data(site: Site) -> str:
    """Return the example with this clone's gpuprov in place of the wheel, and this lab's driver."""
    data = yaml.safe_load(_USER_DATA.read_text())
    wanted = {key: value for key, value in site.variables.items() if key.startswith("gpuprov_")}
    data["write_files"][0]["content"] = json.dumps({**wanted, **_LIBRARIES})
    (script,) = data["runcmd"]
    assert f"/opt/gpuprov/bin/pip install {_WHEEL}" in script
    data["runcmd"] = [script.replace(f"/opt/gpuprov/bin/pip install {_WHEEL}", f"ln -s {GPUPROV} /opt/gpuprov/bin/")]
    return f"#cloud-config\n{yaml.safe_dump(data)}"


def test_the_user_data_builds_a_clean_image_and_powers_the_machine_off(doors: Site, clouded: Host) -> None:
    """By cloud-init's own first boot, from a NoCloud seed."""
    seed = clouded.root / "var/lib/cloud/seed/nocloud"
    seed.mkdir(parents=True)
    (seed / "user-data").write_text(_user_data(doors))
    (seed / "meta-data").write_text("instance-id: gpu-image\n")
    # The lab has no DHCP.
    (clouded.root / "etc/cloud/cloud.cfg.d/99-lab.cfg").write_text("network: {config: disabled}\n")
    clouded.ssh("systemctl reboot", check=False)
    wait_for("the machine's end", lambda: not cgroups.runs(clouded.cgroup), 420)
    log = clouded.root / "var/log/cloud-init-output.log"
    said = log.read_text() if log.exists() else ""
    assert (clouded.root / "etc/machine-id").read_bytes() == b"", said
    assert not list((clouded.root / "etc/ssh").glob("ssh_host_*")), said
    assert (clouded.root / "etc/gpuprov/image").exists()
    assert not (clouded.root / "var/lib/cloud/instance").exists()


def test_packers_provisioner_is_the_command_that_images_are_built_with() -> None:
    """The same words as in the user-data and in test_image.py, each variable one that gpuprov knows."""
    line = next(line for line in _TEMPLATE.read_text().splitlines() if "gpuprov install" in line)
    words = shlex.split(line.strip().strip('",'))
    assert words[:3] == ["/opt/gpuprov/bin/gpuprov", "install", "--image"]
    done = gpuprov(*words[1:], "--check")
    # Whether this machine could become such an image is another matter: what is asked for was understood, all of it.
    assert done.returncode in (0, 1) and "there is no variable" not in done.stdout, done.stdout


def test_a_machine_in_use_is_not_made_an_image_by_mistake(doors: Site) -> None:
    host = doors.fresh("used")
    before = host.snapshot("/etc")
    done = gpuprov("install", "--image", "--hosts", doors.inventory("used", **_LIBRARIES))
    assert done.returncode == 1, done.stdout
    assert "looks as if it were in use" in done.stdout and "GPU 0000:1b:00.0" in done.stdout
    assert "gpuprov_image_force: true" in done.stdout
    assert host.snapshot("/etc") == before


def test_the_playbook_makes_the_image_and_cleans_it_last(doors: Site) -> None:
    host = doors.fresh("played")
    inventory = doors.inventory("played", gpuprov_target="image", **_LIBRARIES)
    play_succeeds("site", inventory, "--check")
    assert (host.root / "etc/ssh/ssh_host_ed25519_key").exists()
    done = play_succeeds("site", inventory)
    assert list(task_states(done))[-1] == "image" and task_states(done)["image"] == "changed", done.stdout
    assert recap(done, "played")["failed"] == 0
    assert (host.root / "etc/machine-id").read_bytes() == b""
    assert not [path for path in Path(host.root / "etc/ssh").glob("ssh_host_*") if path.is_file()]

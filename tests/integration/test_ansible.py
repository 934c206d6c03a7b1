"""The playbooks on real hosts: what `gpuprov install --hosts` does, to the byte; check mode, changed, failures."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprov.fleet.agent_file import build_agent
from tests.integration.test_install import docker_start, etc, packages
from tests.lab import Host
from tests.lab.fixtures import DRIVER, Site, events, gpuprov, gpuprov_succeeds
from tests.lab.host import differences
from tests.lab.lab import REPOSITORY

pytestmark = [pytest.mark.lab, pytest.mark.root]
_ANSIBLE_PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
_NO_IMAGE = {"image": "skipping"}
_PARTS = ("repos", "driver", "toolkit", "engine")


def play(name: str, inventory: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a playbook of the clone as a user types it."""
    return run_ansible("-i", inventory, f"playbooks/{name}.yml", *words, **environment)


def play_succeeds(name: str, inventory: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a playbook, which must end with exit code 0."""
    done = play(name, inventory, *words, **environment)
    assert done.returncode == 0, done.stdout
    return done


def run_ansible(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ansible-playbook in the clone."""
    argv = (str(_ANSIBLE_PLAYBOOK), *(str(word) for word in words))
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_TIMEOUT": "60", **environment}
    return subprocess.run(
        argv, cwd=REPOSITORY, env=environment, timeout=300, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def recap(done: subprocess.CompletedProcess[str], host: str) -> dict[str, int]:
    """Return the counts of a host's line in the recap."""
    line = next((line for line in done.stdout.splitlines() if re.match(rf"{host} +: ok=", line)), "")
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", line)}


def task_states(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return role → ok, changed, skipping or fatal; without what does nothing unless it is asked to: the way back."""
    task = r"TASK \[gpuprov\.host\.(\w+) : (?!Go back\]).*\n(?:.*\n)*?(ok|changed|skipping|fatal): "
    pairs = re.findall(task, done.stdout)
    return {role: state for role, state in pairs if role not in ("drain", "undrain")}


@pytest.fixture(scope="module")
def twin(site: Site) -> Host:
    """A host that site.yml has installed, from bare."""
    host = site.fresh("twin")
    done = play_succeeds("site", site.inventory("twin"))
    assert task_states(done) == {"preflight": "ok", **dict.fromkeys(_PARTS, "changed"), "verify": "ok", **_NO_IMAGE}
    return host


def test_a_second_run_changes_nothing_and_restarts_nothing(site: Site, twin: Host) -> None:
    before = (etc(twin), packages(twin), docker_start(twin))
    done = play("site", site.inventory("twin"))
    assert (done.returncode, recap(done, "twin")["changed"]) == (0, 0), done.stdout
    assert (etc(twin), packages(twin), docker_start(twin)) == before


# What makes these two hosts two: names, keys, addresses, and what programs draw at random. Nothing of gpuprov's.
_HOST_SPECIFIC = {
    "/etc/hostname", "/etc/hosts", "/etc/systemd/network/10-lab.network",
    "/etc/ssh/ssh_host_ed25519_key", "/etc/ssh/ssh_host_ed25519_key.pub",
}  # fmt: skip


def enabled_units(host: Host) -> str:
    return host.ssh("systemctl list-unit-files --state=enabled --no-legend").stdout


def verified(site: Site, name: str) -> list[dict[str, object]]:
    return [
        {key: event[key] for key in ("name", "status", "on_host", "in_container", "reason")}
        for event in events(gpuprov("verify", "--hosts", site.inventory(name), "--json").stdout)
        # Its date is the last verification's, and the first one has none.
        if event.get("event") == "CheckDone" and event["name"] != "remembered GPUs"
    ]


@pytest.mark.sample
def test_both_ways_lead_to_the_same_host(site: Site, twin: Host) -> None:
    """Host A by the command line, host B by the playbook: /etc, programs, packages, units and verification agree."""
    main = site.fresh("main")
    gpuprov_succeeds("install", "--hosts", site.inventory("main"))
    assert differences(etc(main), etc(twin)) == _HOST_SPECIFIC
    assert packages(main) == packages(twin)
    assert enabled_units(main) == enabled_units(twin)
    checks = verified(site, "twin")
    # The simulated GPUs compute nothing.
    assert {check["name"] for check in checks if check["status"] != "ok"} == {"docker, CUDA kernel"}
    assert checks == verified(site, "main")


def test_the_agent_is_the_command_lines_and_is_pushed_once(site: Site, twin: Host) -> None:
    gpuprov_succeeds("facts", "--hosts", site.inventory("twin"))
    agents = list((twin.root / "root/.cache/gpuprov").glob("*.pyz"))
    assert [path.name for path in agents] == [f"agent-{build_agent().digest}.pyz"]


def test_verify_names_the_fault_and_site_fixes_that_part_alone(site: Site, twin: Host) -> None:
    twin.ssh("echo '{}' > /etc/docker/daemon.json")
    done = play("verify", site.inventory("twin"))
    assert done.returncode != 0
    assert "does not have runtime nvidia" in done.stdout
    repaired = play_succeeds("site", site.inventory("twin"))
    states = task_states(repaired)
    assert [role for role, state in states.items() if state == "changed"] == ["engine"]
    assert states["verify"] == "ok"
    twin.ssh("echo > /var/lib/gpuprov/remembered.json")
    play_succeeds("verify", site.inventory("twin"), "-e", "gpuprov_play_remember=true")
    assert twin.ssh("cat /var/lib/gpuprov/remembered.json").stdout.startswith('{"schema":1,')


def test_a_tag_does_that_part_alone(site: Site, twin: Host) -> None:
    twin.ssh("rm /etc/cdi/nvidia.json; echo '{}' > /etc/docker/daemon.json")
    done = play_succeeds("site", site.inventory("twin"), "--tags", "toolkit")
    assert task_states(done) == {"preflight": "ok", "toolkit": "changed"}
    assert (twin.root / "etc/docker/daemon.json").read_text() == "{}\n"
    assert play("site", site.inventory("twin")).returncode == 0


def test_facts_are_there_as_ansible_local(site: Site, twin: Host) -> None:
    done = play_succeeds("facts", site.inventory("twin"))
    assert re.search(rf"2 GPUs,\s+driver {re.escape(DRIVER)}", done.stdout)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"gpuprov_driver_verison": "1"}, "did you mean gpuprov_driver_version?"),
        ({"gpuprov_driver_version": 550.1}, "gpuprov_driver_version must be text"),
        ({"gpuprov_packages": ["{{ nothing_of_that_name }}"]}, "the template in gpuprov_packages does not resolve"),
    ],
)
def test_wrong_variable_is_named_first(site: Site, twin: Host, variables: dict[str, object], said: str) -> None:
    done = play("site", site.inventory("twin", **variables))
    assert done.returncode != 0
    assert said in done.stdout
    assert "Traceback" not in done.stdout
    assert recap(done, "twin")["ok"] == 0


_DELEGATED = """
- hosts: localhost
  gather_facts: false
  tasks:
    - gpuprov.host.agent:
        command: facts
      delegate_to: twin
    - ansible.builtin.assert:
        that: ansible_local.gpuprov.gpus | length == 2
"""
_IN_THE_BACKGROUND = """
- hosts: twin
  gather_facts: false
  tasks:
    - gpuprov.host.agent:
        command: facts
      async: 60
      poll: 1
    - ansible.builtin.assert:
        that: ansible_local.gpuprov.gpus | length == 2
    - gpuprov.host.agent:
      async: 300
      poll: 0
      register: job
    - ansible.builtin.async_status:
        jid: "{{ job.ansible_job_id }}"
      register: ended
      until: ended.finished
      retries: 200
      delay: 0.2
    - ansible.builtin.assert:
        that: not ended.changed and not ended.failed and ended.changes == []
"""


@pytest.mark.parametrize("text", [_DELEGATED, _IN_THE_BACKGROUND], ids=["delegated", "in the background"])
def test_a_task_takes_other_ways_of_ansible(site: Site, twin: Host, tmp_path: Path, text: str) -> None:
    path = tmp_path / "tasks.yml"
    path.write_text(text)
    done = run_ansible("-i", site.inventory("twin"), path)
    assert done.returncode == 0, done.stdout


def test_a_connection_without_standard_input_serves_as_well(site: Site, twin: Host) -> None:
    shutil.rmtree(twin.root / "root/.cache/gpuprov")
    inventory = site.inventory("twin", ansible_connection="paramiko")
    done = play("site", inventory, ANSIBLE_HOST_KEY_CHECKING="False", ANSIBLE_PARAMIKO_RECORD_HOST_KEYS="False")
    assert (done.returncode, recap(done, "twin")["changed"]) == (0, 0), done.stdout
    assert [path.name for path in (twin.root / "root/.ansible/tmp").iterdir()] == []


def test_a_jump_host_is_gone_through(site: Site, twin: Host) -> None:
    options = "-F none -o IdentitiesOnly=yes"
    key, known = site.lab.key, site.lab.known_hosts
    jump = f"ssh {options} -i {key} -o UserKnownHostsFile={known} -W %h:%p root@{site.hosts['bullseye'].address}"
    arguments = f"-o UserKnownHostsFile={known} -o ProxyCommand='{jump}'"
    inventory = site.inventory("twin", ansible_ssh_common_args=arguments)
    play_succeeds("facts", inventory, ANSIBLE_SSH_CONTROL_PATH_DIR="/tmp")


def test_check_mode_changes_nothing_and_rollback_undoes_the_whole_play_to_the_byte(site: Site) -> None:
    host = site.fresh("twin")
    before = (etc(host), packages(host), docker_start(host))
    foreseen = play_succeeds("site", site.inventory("twin"), "--check", "--diff")
    skipped = {"verify": "skipping", **_NO_IMAGE}
    assert task_states(foreseen) == {"preflight": "ok", **dict.fromkeys(_PARTS, "changed"), **skipped}
    assert re.search(r'^\+.*"path": "/usr/bin/gpuprov-container-runtime"', foreseen.stdout, re.MULTILINE)
    assert (etc(host), packages(host), docker_start(host)) == before
    assert not (host.root / "var/lib/gpuprov").exists()
    assert play("site", site.inventory("twin")).returncode == 0
    assert etc(host) != before[0]
    done = play_succeeds("rollback", site.inventory("twin"))
    assert recap(done, "twin")["changed"] == 1
    assert differences(before[0], etc(host)) == set()
    assert packages(host) == before[1]


def test_a_docker_that_names_the_runtime_before_the_first_run_is_restarted_once(site: Site) -> None:
    """As a site's configuration management writes daemon.json; `verify` starts a container with --gpus."""
    host = site.fresh("twin")
    runtime = '{"runtimes": {"nvidia": {"path": "/usr/bin/gpuprov-container-runtime"}}}'
    host.ssh(f"mkdir -p /etc/docker; echo '{runtime}' > /etc/docker/daemon.json; systemctl restart docker")
    begun = docker_start(host)
    assert task_states(play_succeeds("site", site.inventory("twin")))["engine"] == "changed"
    restarted = docker_start(host)
    assert restarted != begun
    assert recap(play_succeeds("site", site.inventory("twin")), "twin")["changed"] == 0
    assert docker_start(host) == restarted


def test_sudo_with_a_password_on_a_host_without_docker(site: Site) -> None:
    site.fresh("ops")
    login = {"ansible_user": "ops", "ansible_become_password": "correct horse"}
    done = play_succeeds("site", site.inventory("ops", **login))
    assert task_states(done)["verify"] == "ok"
    refused = play("verify", site.inventory("ops", **{**login, "ansible_become_password": "wrong"}))
    assert refused.returncode != 0
    assert "Traceback" not in refused.stdout


def test_a_host_without_python_says_how_to_get_it(site: Site) -> None:
    site.fresh("bare")
    done = play("facts", site.inventory("bare"))
    assert done.returncode != 0
    assert "there is no Python on the host" in done.stdout
    option = next(word for word in done.stdout.split() if word.startswith("gpuprov_play_"))
    checked = play("facts", site.inventory("bare"), "--check", "-e", option)
    assert "there is no Python on the host" in checked.stdout
    play_succeeds("facts", site.inventory("bare"), "-e", option)


def test_an_upgrade_goes_host_by_host_and_ends_with_the_first_failure(site: Site) -> None:
    inventory = site.inventory("main", "twin", gpuprov_driver_verison="1")
    done = play("upgrade", inventory)
    assert (recap(done, "main").get("failed"), recap(done, "twin")) == (1, {}), done.stdout
    both = play("upgrade", inventory, "-e", "gpuprov_play_serial=2")
    assert [recap(both, name).get("failed") for name in ("main", "twin")] == [1, 1], both.stdout

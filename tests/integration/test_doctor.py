"""The doctor on a real host: each trouble made for real comes first, and what the doctor says to type fixes it.

Of groups of troubles (tests/unit/doctor/rows_*.py), every `next:` is typed, one after the other, each asked for again.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpuprov.runtime_hook.settings import SETTINGS_PATH
from tests import simgpu
from tests.integration.doctor_typing import (
    OTHER,
    OTHER_CUDA,
    OTHER_VERSION,
    Group,
    prepare,
    type_until_silent,
)
from tests.integration.test_ansible import play, recap
from tests.lab import Host, HostRequest
from tests.lab.fixtures import DRIVER, Site, events, gpuprov, gpuprov_succeeds, running
from tests.lab.lab import REPOSITORY
from tests.lab.nvidia_toolkit import build_toolkit
from tests.triplet import LIBRARIES
from tests.unit.doctor.rows_containers import (
    CDI_GROUPS,
    CONTAINER_GROUPS,
    NODE_GROUPS,
    TOOLKIT_GROUPS,
    TOOLKIT_NEW,
    TOOLKIT_OLD,
)
from tests.unit.doctor.rows_driver import DRIVER_GROUPS
from tests.unit.doctor.rows_engines import ENGINE_GROUPS
from tests.unit.doctor.rows_kernel import GPU_GROUPS

pytestmark = [pytest.mark.lab, pytest.mark.root]
_KEPT = "/root/kept"
# What any login changes; and the byte code of gpuprov's own agent, which Python keeps when it loads a module first (on
# an overlay the folders above it change with it).
_VOLATILE = re.compile(
    r"/root/containers|/root$|/var/log|/var/lib/systemd|/run|/dev/(tty|console|pts|ptmx)|/var/cache/gpuprov/agent-|"
    r"/var(/cache(/gpuprov)?)?$"
)


@dataclass(frozen=True)
class Trouble:
    """What breaks a host, the rule that must come first, and how its command begins."""

    rule: str
    breaking: str
    command: str


TROUBLES = (
    Trouble("nvml-missing", f"mv {LIBRARIES}/libnvidia-ml.so.{DRIVER} {_KEPT}", "gpuprov install"),
    Trouble("library-not-in-cache", "rm /etc/ld.so.cache", "ldconfig"),
    Trouble("settings-broken", f"mkdir -p /etc/gpuprov; echo 'disable-require = maybe' > {SETTINGS_PATH}",
            f"mv {SETTINGS_PATH} {SETTINGS_PATH}.broken"),
    Trouble("cdi-stale", f"sed -i 's/{DRIVER}/535.261.03/g' /etc/cdi/nvidia.json", "systemctl start gpuprov-refresh"),
    Trouble("docker-not-restarted",
            f"cp /etc/docker/daemon.json {_KEPT}; echo '{{}}' > /etc/docker/daemon.json; systemctl restart docker; "
            f"cp {_KEPT} /etc/docker/daemon.json", "systemctl restart docker"),
    Trouble("hook-unseen",
            f"mv /usr/bin/nvidia-container-runtime-hook {_KEPT}; systemctl restart docker; "
            f"mv {_KEPT} /usr/bin/nvidia-container-runtime-hook; "
            "docker run --rm --gpus all $(docker images -q gpuprov-verify) true && exit 1; true",
            "systemctl restart docker"),
)  # fmt: skip

SOFTWARE_GROUPS = (*DRIVER_GROUPS, *CONTAINER_GROUPS, *ENGINE_GROUPS)
GROUPS = (*SOFTWARE_GROUPS, *NODE_GROUPS, *GPU_GROUPS, *TOOLKIT_GROUPS, *CDI_GROUPS)
# Of what the hardware does, two groups in each run; the others take minutes.
_CASES = [
    pytest.param(group, id=group.name, marks=() if group in SOFTWARE_GROUPS or group.short else pytest.mark.long)
    for group in (*SOFTWARE_GROUPS, *NODE_GROUPS, *GPU_GROUPS)
]


@pytest.fixture(scope="module")
def host(site: Site) -> Host:
    """A host that gpuprov has set up, and on which containers see the GPUs."""
    host = made_ready(site)
    gpuprov_succeeds("verify", "--hosts", site.inventory("main"))
    return host


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A host with a docker that reads CDI specifications, and one for NVIDIA's toolkit."""
    requests = [HostRequest("new", release="trixie", bind=(str(REPOSITORY),), archive=True),
                HostRequest("kit", bind=(str(REPOSITORY),))]  # fmt: skip
    with running({one.name: one for one in requests}, tmp_path_factory.mktemp("inventories")) as made:
        yield made


@pytest.fixture(scope="module")
def with_cdi(others: Site) -> tuple[Site, Host]:
    return others, set_up(others, "new")


@pytest.fixture(scope="module")
def with_toolkit(others: Site) -> tuple[Site, Host]:
    """NVIDIA's toolkit from packages, of which the mirror has an older version, too."""
    www, gnupg = others.lab.www / "toolkit", others.lab.directory / "gnupg"
    mirror = {
        "gpuprov_toolkit": "nvidia",
        "gpuprov_toolkit_repository": f"{others.lab.url}/toolkit",
        "gpuprov_toolkit_key_fingerprint": build_toolkit(www, gnupg, {"stable": (TOOLKIT_OLD, TOOLKIT_NEW)}),
    }
    site = replace(others, variables={**others.variables, **mirror})
    return site, set_up(site, "kit")


def set_up(site: Site, name: str) -> Host:
    host = site.fresh(name)
    for command in ("install", "verify"):
        gpuprov_succeeds(command, "--hosts", site.inventory(name))
    prepare(host)
    return host


def made_ready(site: Site) -> Host:
    host = site.installed("main")
    give_libraries(host)
    prepare(host)
    return host


def give_libraries(host: Host) -> None:
    """Lay libraries of another driver on the host."""
    for name in (OTHER, OTHER_CUDA):
        (host.root / "root" / name).write_bytes((simgpu.build_libraries(OTHER_VERSION) / name).read_bytes())


def doctor(site: Site) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Return the exit code, the causes, and the summary of the host."""
    done = gpuprov("doctor", "--hosts", site.inventory("main"), "--json")
    seen = events(done.stdout)
    assert seen, done.stdout
    causes = [event for event in seen if event.get("event") == "CauseFound"]
    return done.returncode, causes, seen[-1]["hosts"][0]


def fix(site: Site, host: Host, command: str) -> None:
    """Type what the doctor said: on the host, or here if it is an installation."""
    words = re.sub(r"  # .*", "", command)
    before, found, install = words.partition("gpuprov install")
    if before:
        host.ssh(before)
    if found:
        # As a rule tells it, or as the last line does, with the inventory.
        rest = install.split() if "--hosts" in install else ("--hosts", str(site.inventory("main")), *install.split())
        gpuprov_succeeds("install", *rest)


def test_nothing_is_wrong_with_a_host_that_was_just_set_up_and_nothing_changes(site: Site, host: Host) -> None:
    host.ssh("touch /root/mark; docker ps --all --quiet --no-trunc > /root/containers")
    done = gpuprov_succeeds("doctor", "--hosts", site.inventory("main"))
    assert done.stdout.splitlines()[-1] == "1 host: nothing found wrong in all that was looked at"
    assert re.search(r"^device nodes +ok \d present", done.stdout, re.MULTILINE), done.stdout
    # Every file and folder whose content, mode, owner or links have changed since, by the kernel's own books.
    changed = host.ssh("find / /dev -xdev -cnewer /root/mark").stdout.splitlines()
    assert [path for path in changed if not _VOLATILE.match(path)] == []
    assert host.ssh("docker ps --all --quiet --no-trunc").stdout == host.ssh("cat /root/containers").stdout


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.rule)
def test_the_trouble_is_named_first_and_its_command_fixes_it(site: Site, host: Host, trouble: Trouble) -> None:
    # systemd starts docker three times a minute, and then no more until this.
    host.ssh("systemctl reset-failed docker")
    host.ssh(trouble.breaking)
    code, causes, summary = doctor(site)
    told = [(cause["rule"], cause["confidence"], cause["follows"]) for cause in causes]
    assert code == 1
    assert causes[0]["rule"] == trouble.rule, told
    assert causes[0]["evidence"]
    step = summary["problems"][0]["next_step"]
    assert step.startswith(trouble.command), step
    fix(site, host, step)
    gpuprov_succeeds("verify", "--hosts", site.inventory("main"))


@pytest.mark.parametrize("group", _CASES)
def test_every_next_step_that_is_typed_changes_what_is_found(site: Site, host: Host, group: Group) -> None:
    """Type what is said first, run it again, until the doctor is silent; nothing is typed twice for the same cause."""
    try:
        type_until_silent(site, host, group)
    except BaseException:
        # Only this test fails.
        made_ready(site)
        raise


def test_verification_is_green_after_all_that_was_typed(site: Site, host: Host) -> None:
    gpuprov_succeeds("verify", "--hosts", site.inventory("main"))


_OTHERS = [("with_cdi", group) for group in CDI_GROUPS] + [("with_toolkit", group) for group in TOOLKIT_GROUPS]


@pytest.mark.long
@pytest.mark.parametrize(("made", "group"), _OTHERS, ids=lambda one: one if isinstance(one, str) else one.name)
def test_so_it_is_on_other_hosts(request: pytest.FixtureRequest, made: str, group: Group) -> None:
    """With a docker that reads CDI specifications, and with NVIDIA's toolkit."""
    site, host = request.getfixturevalue(made)
    type_until_silent(site, host, group)
    gpuprov_succeeds("verify", "--hosts", site.inventory(host.name, **group.options))


def test_on_the_machine_itself_and_by_playbook_it_is_the_same(site: Site, host: Host) -> None:
    host.ssh("rm /etc/cdi/nvidia.json")
    program = f"{REPOSITORY}/.venv/bin/gpuprov"
    failed = host.ssh(f"{program} verify", check=False)
    assert failed.returncode == 1
    assert failed.stdout.splitlines()[-1].endswith("; next: gpuprov doctor"), failed.stdout
    told = host.ssh(f"{program} doctor", check=False)
    assert told.returncode == 1
    assert "there is no CDI specification" in told.stdout
    assert "next: systemctl start gpuprov-refresh.service" in told.stdout
    played = play("doctor", site.inventory("main"))
    assert recap(played, "main")["failed"] == 1, played.stdout
    assert "there is no CDI specification" in played.stdout
    host.ssh("systemctl start gpuprov-refresh.service")
    assert "nothing found wrong" in host.ssh(f"{program} doctor").stdout


# Troubles that do not hide each other, and of which gpuprov can fix all but the last. Not the loader's cache, without
# which gpuprov-refresh.path would begin to fix things itself.
_SEVERAL = (
    "rm /dev/nvidia0 /usr/bin/gpuprov-container-runtime; "
    f"sed -i 's/{DRIVER}/535.261.03/g' /etc/cdi/nvidia.json; mkdir -p /etc/gpuprov; echo 'x = maybe' > {SETTINGS_PATH}"
)


def test_fix_does_what_gpuprov_can_proves_it_and_is_taken_back_by_a_rollback(site: Site, host: Host) -> None:
    inventory = ("--hosts", site.inventory("main"))
    host.ssh(_SEVERAL)
    broken = host.ssh("sha256sum /etc/cdi/nvidia.json").stdout
    foreseen = gpuprov("doctor", "--fix", "--check", "--diff", *inventory)
    assert foreseen.returncode == 1, foreseen.stdout
    assert "make device node /dev/nvidia0" in foreseen.stdout
    assert host.ssh("test -e /dev/nvidia0", check=False).returncode == 1

    fixed = gpuprov("doctor", "--fix", *inventory)
    assert fixed.returncode == 1, fixed.stdout
    assert f"mv {SETTINGS_PATH} {SETTINGS_PATH}.broken" in fixed.stdout
    assert "3 changes" in fixed.stdout, fixed.stdout
    host.ssh(f"rm {SETTINGS_PATH}")
    gpuprov_succeeds("verify", *inventory)

    gpuprov_succeeds("rollback", *inventory)
    assert host.ssh("sha256sum /etc/cdi/nvidia.json").stdout == broken
    assert host.ssh("ls /dev/nvidia0", check=False).returncode != 0

    # A library that is gone takes a whole installation, in a playbook too.
    host.ssh(f"mv {LIBRARIES}/libnvidia-ml.so.{DRIVER} {_KEPT}")
    checked = play("doctor", site.inventory("main"), "--check", "--diff", "-e", "gpuprov_play_fix=true")
    assert "535.261.03" in checked.stdout
    assert host.ssh("test -e /dev/nvidia0", check=False).returncode == 1
    played = play("doctor", site.inventory("main"), "-e", "gpuprov_play_fix=true")
    assert (recap(played, "main")["changed"], recap(played, "main")["failed"]) == (1, 0), played.stdout
    gpuprov_succeeds("doctor", *inventory)

"""Each rule over a host that has just its trouble: what it finds comes first, with evidence and what to type."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpuprov.doctor.examine import INSTALL_OBSTRUCTED, RULE_FAILED, RULES, diagnose, report
from gpuprov.doctor.finding import CERTAIN, CONFIDENCES, FILES, GPUS, LIKELY, TOOLKIT, WARNING, Finding, Remedy
from gpuprov.doctor.rules import ANY_ROOT, Rule
from gpuprov.doctor.snapshot import HostSnapshot, ModuleFile, Smi, telling_lines
from gpuprov.doctor.suggested_commands import (
    firmware_setup,
    gpuprov_install,
    headers_package,
    list_gpus,
    pass_iommu_through,
    rebuild_initramfs,
    reinstall_packages,
)
from gpuprov.engines.docker_unit import DockerUnit
from gpuprov.facts.driver import ENVIRONMENT, HidingLibrary, without_preload
from gpuprov.facts.interpreter import MISSING, Interpreter
from gpuprov.facts.kernels import InstalledKernel
from gpuprov.machine.machine import OperatingSystem
from gpuprov.machine.pci import PciGpu
from gpuprov.protocol.advisories import DRIVER, Advisory, table_of
from gpuprov.protocol.events import Event, Note
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import ADVISORIES
from gpuprov.runtime_hook.deploy import LAUNCHER_PATH
from gpuprov.runtime_hook.settings import NVIDIA_SETTINGS_PATH, SETTINGS_PATH
from tests.unit.doctor.host import SMI, examined, healthy, with_driver, with_kernel
from tests.unit.doctor.ill import (
    AVC,
    CONFIG_TOML,
    NODES,
    Change,
    Row,
    both,
    bound_to,
    daemon_json,
    docker,
    docker_says,
    fabric,
    hidden,
    host,
    kernel_says,
    mismatched,
    on_metal,
    switches,
    text,
    unit,
    without,
)
from tests.unit.doctor.rows_containers import CONTAINER_ROWS
from tests.unit.doctor.rows_docker_log import DOCKER_LOG_ROWS
from tests.unit.doctor.rows_driver import DRIVER_ROWS, LIBRARY_ROWS
from tests.unit.doctor.rows_engines import ENGINE_ROWS, podman_with
from tests.unit.doctor.rows_kernel import KERNEL_ROWS
from tests.unit.fake_host import RELEASE

pytestmark = pytest.mark.root
ROWS = (*KERNEL_ROWS, *DRIVER_ROWS, *CONTAINER_ROWS, *ENGINE_ROWS, *DOCKER_LOG_ROWS, *LIBRARY_ROWS)


@pytest.fixture(scope="module")
def x(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostSnapshot]:
    """A host with two GPUs on which nothing is wrong."""
    yield examined(healthy(tmp_path_factory.mktemp("host")))


# What else is found there follows from these, and is told after them: (rule, what makes the host ill, the first cause).
CONSEQUENCES = (
    ("version-mismatch", hidden(), "library-hidden"),
    ("module-not-loaded", kernel_says("NVRM: The NVIDIA probe routine failed for 2 device(s)."), "probe-failed"),
    ("probe-failed",
     kernel_says("NVRM: GPU 0000:17:00.0: RmInitAdapter failed! (0x24:0xffff:1220)",
                 "NVRM: The NVIDIA probe routine failed for 2 device(s)."),
     "init-failed"),
    ("runtime-missing",
     both(without(LAUNCHER_PATH), host(read_only={"/usr": "/usr (ro)"}),
          lambda x: replace(x, absent=frozenset({LAUNCHER_PATH}))),
     "install-obstructed"),
    ("node-does-not-open", lambda x: replace(mismatched(x), node_errors={"/dev/nvidia0": "Input/output error"}),
     "version-mismatch"),
    ("nodes-unit-failed", both(unit(NODES, active="failed"), lambda x: with_driver(x, present=())), "nodes-missing"),
    ("nvidia-smi-18", mismatched, "version-mismatch"),
    ("module-not-loaded", bound_to("nouveau"), "gpu-nouveau"),
    ("docker-down",
     both(docker(active=False, runtimes=None, config_text="{", refused="unexpected EOF"),
          unit("docker.service", active="failed", result="exit-code")),
     "daemon-json-broken"),
    ("docker-down",
     both(docker(active=False, runtimes=None), unit("docker.service", active="inactive", enabled="disabled")),
     "docker-disabled"),
)  # fmt: skip
COVERED = {row.rule for row in ROWS} | {name for name, _, _ in CONSEQUENCES}


def test_every_rule_is_tried() -> None:
    unmatched = {rule.name for rule in RULES} ^ COVERED
    assert not unmatched, "next: a Row for each rule in tests/unit/doctor/rows_*.py, none for others"
    assert len(RULES) >= 40


def read_by_docker(version: str, beginning: str) -> Change:
    """A file that docker reads; of what docker does not say nothing is certain."""
    return lambda x: docker(config_text=beginning + (x.host.docker.config_text or "")[1:], version=version, cdi=True)(x)


def leads_to_this_docker(address: str) -> Change:
    unit = DockerUnit(load="loaded", command=("dockerd", "-H", "fd://", "-H", "tcp://0.0.0.0:2375"))
    environment = f'PATH="/usr/bin"\nDOCKER_HOST={address}\n'
    return both(docker(unit=unit, address="unix:///run/docker.sock"), text("/etc/environment", environment))


def divided(x: HostSnapshot) -> HostSnapshot:
    parts = "<mig_device><index>0</index><gpu_instance_id>1</gpu_instance_id></mig_device>"
    mig = x.smi.text.replace("<current_mig>Disabled", "<current_mig>Enabled")
    said, count = re.subn(r"(?<=<mig_devices>)\s*None", parts, mig)
    assert count == 2
    return replace(x, smi=Smi(0, said))


def logged(line: str) -> Change:
    """A line that a user can make."""
    return lambda x: replace(x, kernel_log=(line,))


def docker_with_flag(name: str) -> Change:
    """A default runtime that dockerd's command line has, which docker allows beside runtimes in its file."""
    unit = DockerUnit(load="loaded", command=("dockerd", f"--add-runtime={name}=/usr/bin/{name}"))
    return both(docker(unit=unit), daemon_json({"default-runtime": name}))


_BY_VARIABLES = "accept-nvidia-visible-devices-envvar-when-unprivileged"
NO_TROUBLE: tuple[Change, ...] = (
    lambda x: x,
    read_by_docker("20.10.24", '{"debug": true, "debug": false, '),
    read_by_docker("26.1.5", '\ufeff{"debug": true, '),
    read_by_docker("20.10.24", '{"log-driver": "caf\udce9", '),
    read_by_docker("20.10.24", '{\r\n"debug": true,\r\n'),
    leads_to_this_docker("unix:///run/docker.sock"),
    leads_to_this_docker("tcp://localhost:2375"),
    leads_to_this_docker("tcp://127.0.0.1:2375"),
    divided,
    both(
        text(NVIDIA_SETTINGS_PATH, CONFIG_TOML.format("no-cgroups = true")),
        text(SETTINGS_PATH, "[nvidia-container-cli]\nno-cgroups = false\n"),
    ),
    both(text(NVIDIA_SETTINGS_PATH, f"{_BY_VARIABLES} = false\n"), text(SETTINGS_PATH, f"{_BY_VARIABLES} = true\n")),
    lambda x: replace(x, docker_unit="[Service]\n# Environment=PATH=/opt/bin\n"),
    docker_with_flag("kata"),
    # Of a display server: no container's.
    lambda x: replace(x, selinux="Enforcing", audit_log=(AVC.replace("container_t", "xserver_t"),)),
    # Lines that have nothing to do with each other.
    lambda x: replace(
        x, kernel_log=('audit: apparmor="DENIED" profile="snap.firefox"', "NVRM: loading NVIDIA UNIX x86")
    ),
    docker_says("error setting rlimits for ready process: invalid argument", "dial unix x.sock: permission denied"),
    # A program of an ordinary container's, and a line after it.
    lambda x: replace(
        x,
        selinux="Enforcing",
        audit_log=(AVC.replace("nvidia", "x").replace("xserver_misc_device_t", "fifo_t"), 'type=SYSCALL comm="nvidia"'),
    ),
    # By a container that asks for CDI, docker 25 without features.cdi (nvidia-container-toolkit issue 434).
    docker_says('level=error msg="could not select device driver \\"cdi\\" with capabilities: []"'),
    podman_with("10-site.conf"),
    podman_with("99-site.conf.old"),
    both(
        unit("nvidia-cdi-refresh.service", active="inactive", enabled="enabled"),
        text("/var/run/cdi/nvidia.yaml", 'kind: nvidia.com/gpu\ndevices:\n- name: "0"\n- name: "1"\n'),
    ),
    logged("[ 9.1] Xid (PCI:0): 79[4242]: segfault at 0 ip 0000000000401136 sp 00007ffc9d7c1d10 error 6 in a.out"),
    logged("[ 9.1] oom-kill:task_memcg=/user.slice/NVRM: Xid (PCI:0000:1b:00): 79, x,task=a.out,pid=7,uid=1000"),
    logged("[ 9.1] NVRM: Xid (PCI:0000:1b:00): 13, pid=7, name=Xid (PCI:0): 79, Ch 00000010"),
    logged("[ 9.1] NVRM: Xid (PCI:0000:1b:00): 13, pid=7, name=Xid (PCI:0): 48, Ch 00000010"),
    logged("[ 9.1] a[7]: NVRM: Xid (PCI:0): 119, segfault"),
    logged("[ 9.1] vfio-pci 0000:01:00.0: Unable to change power state from D3cold to D0, device inaccessible"),
)


@pytest.mark.parametrize("node", ["kubelet", "k3s", "rke2", "microk8s"])
def test_a_kubernetes_node_needs_no_docker(x: HostSnapshot, node: str) -> None:
    without_docker = docker(installed=False, active=False, runtimes=None, config_text=None)
    found = diagnose(both(without_docker, host(kubernetes=(node,)))(x))
    assert "docker-missing" not in [cause.rule.name for cause in found]


@pytest.mark.parametrize("change", NO_TROUBLE)
def test_what_is_odd_and_no_trouble(x: HostSnapshot, change: Change) -> None:
    assert diagnose(change(x)) == ()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_the_trouble_comes_first(x: HostSnapshot, row: Row) -> None:
    ill = row.change(x)
    # The doctor keeps some lines of the kernel's log only.
    causes = diagnose(replace(ill, kernel_log=telling_lines("\n".join(ill.kernel_log))))
    told = [(cause.rule.name, cause.follows, cause.finding) for cause in causes]
    assert causes, "nothing found"
    assert causes[0].rule.name == row.rule, told
    finding = causes[0].finding
    assert row.evidence in finding.evidence
    assert row.step in finding.next_step
    assert finding.confidence == row.confidence


def test_another_python_is_no_other_build(x: HostSnapshot) -> None:
    """The programs that name it differ, and that is all."""
    other = Interpreter("/usr/bin/python3.13", deployed="/usr/bin/python3.11", fault=MISSING, replaced=True)
    causes = diagnose(replace(x, host=replace(x.host, interpreter=other)))
    assert [cause.rule.name for cause in causes] == ["python-missing"]


@pytest.mark.parametrize(("rule", "change", "root"), CONSEQUENCES, ids=[row[0] for row in CONSEQUENCES])
def test_a_consequence_comes_after_its_root(x: HostSnapshot, rule: str, change: Change, root: str) -> None:
    causes = diagnose(change(x))
    assert causes[0].rule.name == root, [cause.rule.name for cause in causes]
    assert {cause.rule.name: cause.follows for cause in causes}[rule] == root


@pytest.mark.parametrize("row", [row for row in ROWS if row.rule.startswith("xid-")], ids=lambda row: row.rule)
def test_a_line_of_the_past_is_an_aside_where_all_gpus_are_served(x: HostSnapshot, row: Row) -> None:
    causes = diagnose(replace(row.change(x), smi=x.smi))
    assert [(cause.rule.name, cause.finding.confidence) for cause in causes] == [(row.rule, WARNING)]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        # The kernel prints it of each module with another key, also where it takes such modules.
        ("key-rejected", "PKCS#7 signature not signed with a trusted key"),
        ("lockdown", "Lockdown: modprobe: unsigned module loading is restricted; see man kernel_lockdown.7"),
        ("module-of-another-kernel", "nvidia_fs: disagrees about version of symbol x"),
    ],
)
def test_no_module_is_called_refused_that_is_loaded(x: HostSnapshot, name: str, line: str) -> None:
    ill = replace(x, smi=Smi(0, SMI.replace("<gpu id=", "<x id=", 1)), kernel_log=(f"[ 8.1] {line}",))
    confidences = {cause.rule.name: cause.finding.confidence for cause in diagnose(ill)}
    assert confidences == {"nvidia-smi-fewer": LIKELY, name: WARNING}


def test_causes_are_told_by_confidence_then_in_the_order_of_dependence(x: HostSnapshot) -> None:
    ill = both(docker(runtimes={"runc": "runc"}), unit("gpuprov-refresh.service", active="failed"),
               lambda x: replace(x, not_executable={LAUNCHER_PATH: 0o644}, open_run=" in: x"))(x)  # fmt: skip
    found = diagnose(ill)
    ranks = [CONFIDENCES.index(cause.finding.confidence) for cause in found]
    assert ranks == sorted(ranks)
    assert [cause.rule.name for cause in found] == [
        "runtime-not-executable", "docker-not-restarted", "run-cut-off", "refresh-unit-failed",
    ]  # fmt: skip


def test_what_obstructs_an_installation_does_not_follow_from_itself(x: HostSnapshot) -> None:
    finding = Finding("the disk is full", "df: 100 %", "make room, then: gpuprov install", CERTAIN)
    rules = [Rule(name, TOOLKIT, "…", lambda _: finding) for name in (INSTALL_OBSTRUCTED, "toolkit-missing")]
    causes = diagnose(x, rules)
    assert [cause.follows for cause in causes] == ["", INSTALL_OBSTRUCTED]
    events: list[Any] = []
    assert report(x, causes, events.append).problems[1].next_step == finding.next_step


def test_a_host_without_docker_needs_no_low_level_runtime(x: HostSnapshot) -> None:
    docker, packages = replace(x.host.docker, installed=False), replace(x.host.packages, installed={})
    without = replace(x, programs={}, host=replace(x.host, docker=docker, packages=packages))
    assert "low-level-runtime-missing" not in {cause.rule.name for cause in diagnose(without)}


def test_a_silent_systemd_is_a_warning_and_no_missing_fabric_manager(x: HostSnapshot) -> None:
    seen = "`systemctl is-active --quiet nvidia-fabricmanager.service` exited 124"
    silent = both(switches(), fabric(switches=("0000:c1:00.0",), silent=seen))(replace(x, units={}))
    events: list[Event] = []
    report(silent, diagnose(silent), events.append)
    assert "fabric-manager-missing" not in {cause.rule.name for cause in diagnose(silent)}
    notes = [one for one in events if isinstance(one, Note) and "of a unit" in one.message]
    assert [(one.level, one.message) for one in notes] == [
        ("warning", f"what depends on the state of a unit is not known: {seen}")
    ]
    report(docker(unit=DockerUnit(silent=seen))(x), (), events.append)
    assert [one for one in events if isinstance(one, Note) and "of a unit" in one.message] == notes * 2


def test_a_rule_that_fails_is_one_warning_and_keeps_no_other_back(x: HostSnapshot) -> None:
    told: list[Event] = []
    broken = Rule("no-gpu", GPUS, "…", lambda x: x.missing)  # type: ignore[attr-defined]
    causes = diagnose(replace(docker(active=False)(x), kernel_log=("Xid",)), (broken, *RULES))
    assert [(cause.rule.name, cause.rule.area) for cause in causes[-1:]] == [(RULE_FAILED, GPUS)]
    assert causes[0].rule.name == "docker-unreachable"
    done = report(x, causes[-1:], told.append)
    (warning,) = [event for event in told if isinstance(event, Note)]
    assert done.exit_code == 0 and "the rule no-gpu failed" in warning.message
    assert causes[-1].finding.evidence.startswith("AttributeError: ") and "rules.py:" in causes[-1].finding.evidence


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_a_rule_follows_from_exists(rule: Any) -> None:
    assert rule.follows == ANY_ROOT or set(rule.follows) <= {one.name for one in RULES} - {rule.name}
    assert rule.sign


# What a step may begin with: programs of a GPU host, its package managers, and gpuprov.
PROGRAMS = {
    "${EDITOR:-vi}", "aa-status", "apt-get", "chmod", "chown", "compute-sanitizer", "curl", "d=$(mktemp", "df", "dkms",
    "dmesg", "docker", "echo", "gpuprov", "grep", "install",
    "journalctl", "kill", "ldconfig", "ln", "ls", "lspci", "modprobe", "mokutil", "mount", "mv",
    "nvidia-bug-report.sh", "nvidia-ctk", "nvidia-imex-ctl", "openssl",
    "nvidia-modprobe", "nvidia-smi", "nvidia-uninstall", "pid=$(cat", "podman", "poweroff",
    "printf", "restorecon", "rm", "sed", "setsebool", "sh", "snap",
    "systemctl", "tail", "uname", "update-grub", "update-initramfs", "wsl",
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_what_to_type_is_a_line_that_a_shell_takes(x: HostSnapshot, row: Row) -> None:
    step = diagnose(row.change(x))[0].finding.next_step
    subprocess.run(("sh", "-n", "-c", step), check=True, timeout=300)
    commands = re.split(r"; | \| ", step.partition("  # ")[0])
    assert {command.split()[0] for command in commands} <= PROGRAMS


EVIL = "/opt/a|b $(id)\ntouch /x; #.so"


@pytest.mark.parametrize(("change", "rule"), [
    (docker(config_path=EVIL, config_text='{"default-runtime": "x"}'), "default-runtime-unknown"),
    (docker(config_path=EVIL, config_text="{"), "daemon-json-broken"),
    (both(docker(config_path=EVIL, config_text='{"log-driver": "x\\ntouch /x; #"}'),
          docker_says("failed to initialize logging driver: dial")), "log-driver-unreachable"),
    (docker(active=False, error="none", address=f"unix://{EVIL}"), "docker-unreachable"),
    (lambda x: replace(x, smi=Smi(0, "no report"), smi_path=EVIL), "nvidia-smi-replaced"),
    (on_metal(dkms=f"nvidia;id/550, {RELEASE}: added", module=ModuleFile(),
              kernels=(InstalledKernel(RELEASE, headers=True, module=False),)), "dkms-failed"),
])  # fmt: skip
def test_a_value_of_the_host_stays_one_word_of_a_command(x: HostSnapshot, change: Change, rule: str) -> None:
    (step,) = [cause.finding.next_step for cause in diagnose(change(x)) if cause.rule.name == rule]
    programs = re.split(r"; | \| ", re.sub(r"'[^']*'", "WORD", step).partition("  # ")[0])
    assert "\n" not in step and {one.split()[0] for one in programs} <= PROGRAMS, step


@pytest.mark.parametrize("name", ["/a/b.so", "/a|b.so", "/a[1]*.so", r"/a\b.so", "/a|touch x|e;.so"])
def test_a_library_is_taken_out_of_the_preloads_by_its_name_alone(name: str) -> None:
    words = without_preload(name).split(" -i ")[1].rpartition(" ")[0]
    done = subprocess.run(
        ("sh", "-c", f"sed {words}"), input=f"{name} /other.so", capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == " /other.so"


def test_a_gpu_that_no_safe_driver_serves_is_named_in_a_comment(x: HostSnapshot) -> None:
    hole = Advisory("2027/6001", "2027-01-20", DRIVER, "595", "595.91.07", 8.8)
    known = x.host.tables.with_table(ADVISORIES, table_of((hole,), "2027-01-20"))
    volta = replace(x, host=replace(x.host, gpus=(PciGpu("0000:17:00.0", "1db4", "nvidia"),), tables=known))
    (step,) = [one.finding.next_step for one in diagnose(volta) if one.rule.name == "driver-old"]
    assert "  # replace the GPU: driver 595.91.07 no longer serves" in step


def test_of_two_specifications_of_others_neither_is_removed(x: HostSnapshot) -> None:
    theirs = 'kind: nvidia.com/gpu\ndevices:\n- name: "0"\n'
    both_theirs = both(text("/etc/cdi/a.yaml", theirs), text("/etc/cdi/b.yaml", theirs))
    ours = text("/etc/cdi/z.yaml", theirs)
    for change, remedies in ((both_theirs, ()), (ours, (Remedy(FILES, ("/etc/cdi/z.yaml",)),))):
        assert [one.finding.remedies for one in diagnose(change(x)) if one.rule.name == "cdi-conflict"] == [remedies]


def test_a_machine_that_is_divided_on_purpose_is_not_ill(x: HostSnapshot) -> None:
    first, second = x.host.gpus
    shared = (first, replace(second, driver="vfio-pci"))
    half = replace(with_driver(x, gpus=x.driver.gpus[:1]), host=replace(x.host, gpus=shared))
    half = replace(half, host=replace(half.host, driver=replace(x.driver, gpus=x.driver.gpus[:1])))
    assert [(cause.rule.name, cause.finding.confidence) for cause in diagnose(half)] == [("gpu-vfio", WARNING)]
    # The driver counts and names those that are reserved, too.
    bus = second.bus_id
    for said, others in (
        (f"NVRM: GPU {bus} is already bound to vfio-pci.", []),
        ("NVRM: The NVIDIA probe routine was not called for 1 device(s).", []),
        ("NVRM: The NVIDIA probe routine was not called for 2 device(s).", ["probe-not-called"]),
        (f"NVRM: GPU {bus} is already bound to nouveau.", ["bound-to-another"]),
    ):
        found = diagnose(replace(half, kernel_log=(said,), smi=Smi(9, "it fails")))
        names = {cause.rule.name for cause in found}
        assert {one for one in names if not one.startswith("nvidia-smi")} == {"gpu-vfio", *others}


@pytest.mark.parametrize(("manager", "makes"), [
    ("apt", "update-grub"), ("zypper", "grub2-mkconfig -o /boot/grub2/grub.cfg"),
    ("dnf", "grubby --update-kernel=ALL --args=iommu=pt"),
])  # fmt: skip
def test_the_kernels_command_line_changes_as_the_distribution_has_it(x: HostSnapshot, manager: str, makes: str) -> None:
    """A command that is missing would be followed by a reboot that changes nothing."""
    step = pass_iommu_through(on(x, "any", "1", manager, RELEASE)).partition("  # ")[0]
    assert step.split("; ")[-2:] == [makes, "systemctl reboot"]


@pytest.mark.parametrize("name", ["DOCKER_HOST", "LD_LIBRARY_PATH"])
def test_a_variable_of_logins_goes_also_with_its_export(x: HostSnapshot, name: str) -> None:
    """pam_env(8) takes the word."""
    other = HidingLibrary("libcuda.so.1", ("/opt/libcuda.so.1",), "1", f"{ENVIRONMENT}:1 sets LD_LIBRARY_PATH")
    (row,) = [row for row in ROWS if row.rule == "docker-host"]
    steps = {
        "DOCKER_HOST": diagnose(row.change(x))[0].finding.next_step,
        "LD_LIBRARY_PATH": other.way_out(x.host.package_manager.commands),
    }
    words = shlex.split(steps[name], comments=True)
    assert words[-1] == ENVIRONMENT
    text = f"A=1\n  export {name}=/x\n{name}=/y\nMY_{name}=1\n"
    done = subprocess.run(("sed", *words[2:-1]), input=text, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"A=1\nMY_{name}=1\n"


def test_what_concerns_the_kernel_is_typed_outside_of_a_system_container(x: HostSnapshot) -> None:
    ill = replace(x, host=replace(x.host, gpus=tuple(replace(gpu, driver="nouveau") for gpu in x.host.gpus)))
    step = diagnose(ill)[0].finding.next_step
    assert step.endswith("; systemctl reboot  # on the host")


def on(x: HostSnapshot, name: str, version: str, manager: str, kernel: str) -> HostSnapshot:
    os = OperatingSystem(name, version, "", (), name)
    host = replace(x.host, os=os, packages=replace(x.host.packages, manager=manager))
    return with_kernel(replace(x, host=host), release=kernel)


@pytest.mark.parametrize(
    ("name", "version", "manager", "kernel", "headers", "again", "initramfs"),
    [
        ("debian", "12", "apt", "6.1.0-13-amd64", "apt-get install -y linux-headers-6.1.0-13-amd64",
         "apt-get install -y --reinstall p", "update-initramfs -u -k all"),
        ("rocky", "9.5", "dnf", "5.14.0-503.14.1.el9_5.x86_64",
         "dnf install -y kernel-devel-5.14.0-503.14.1.el9_5.x86_64 kernel-headers", "dnf reinstall -y p",
         "dracut --force --regenerate-all"),
        ("opensuse-leap", "15.6", "zypper", "6.4.0-150600.23.25-default", "zypper install -y kernel-default-devel",
         "zypper install -y --force p", "dracut --force --regenerate-all"),
        ("void", "1", "", "6.6.1_1", "apt-get install -y linux-headers-6.6.1_1", "apt-get install -y --reinstall p",
         "update-initramfs -u -k all"),
    ],
)  # fmt: skip
def test_packages(
    x: HostSnapshot, name: str, version: str, manager: str, kernel: str, headers: str, again: str, initramfs: str
) -> None:
    there = on(x, name, version, manager, kernel)
    assert headers_package(there).startswith(headers)
    assert reinstall_packages(there, "p") == again
    assert rebuild_initramfs(there) == initramfs


def test_a_held_package_is_reinstalled_in_its_version(x: HostSnapshot) -> None:
    """Without it, apt takes the newest: `Held packages were changed and -y was used`."""
    there = on(x, "debian", "12", "apt", "6.1.0-13-amd64")
    packages = replace(there.host.packages, installed={"p": "1.0-1", "q": "2"}, held=frozenset({"p"}))
    there = replace(there, host=replace(there.host, packages=packages))
    assert reinstall_packages(there, "p", "q") == "apt-get install -y --reinstall p=1.0-1 q"


def test_an_installation_names_the_driver_where_the_inventory_does_not(x: HostSnapshot) -> None:
    plain = replace(x, spec=HostSpec())
    assert gpuprov_install(plain) == "gpuprov install -e gpuprov_driver_version=550.163.01"
    assert gpuprov_install(replace(x, spec=HostSpec(driver_version="580.95.05"))) == "gpuprov install"
    assert gpuprov_install(replace(x, spec=HostSpec(driver="packages"))) == "gpuprov install"
    # A version means the .run file, which is refused over packages.
    assert gpuprov_install(replace(plain, host=replace(x.host, driver_packaged="libcuda1"))) == "gpuprov install"
    nothing = with_driver(plain, kernel_version="", library_version="")
    assert gpuprov_install(nothing) == "gpuprov install"


def test_only_efi_firmware_is_told_to_show_its_setup(x: HostSnapshot) -> None:
    assert firmware_setup(with_kernel(x, secure_boot="disabled")) == "systemctl reboot --firmware-setup  #"
    bios = firmware_setup(with_kernel(x, secure_boot="no-efi"))
    assert bios == "systemctl reboot  # and in the firmware's setup:"


def test_the_bus_is_listed_by_what_the_host_has(x: HostSnapshot) -> None:
    assert list_gpus(replace(x, programs={"lspci": "/usr/bin/lspci"})) == "lspci -d 10de:"
    assert list_gpus(replace(x, programs={})).startswith("grep -l 0x10de /sys/bus/pci/devices/")

"""What a boot brings by itself, and runs that go on behind one, on real hosts that really reboot."""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests import simgpu
from tests.integration.doctor_typing import SLEEPER
from tests.lab import Host, HostRequest
from tests.lab.command_line import GPUPROV
from tests.lab.drivers import bring_run_files, change_kernel_side, install_by_hand, leave_nodes_to_gpuprov
from tests.lab.fixtures import DRIVER, Site, gpuprov, gpuprov_succeeds, running
from tests.lab.lab import REPOSITORY
from tests.lab.shell import wait_for
from tests.simgpu.gpus import UVM_MAJOR, mig_nodes

pytestmark = [pytest.mark.lab, pytest.mark.root]
_UNITS = ("gpuprov-nodes.service", "gpuprov-refresh.service", "gpuprov-refresh.path")
_CDI = "/etc/cdi/nvidia.json"
_NEWER = "580.105.08"
# Instead of the lab's own: first nouveau has the GPUs of a bare machine, after the next boot NVIDIA's driver has them.
_NOUVEAU_ONCE = """
set -eu
tree=/usr/lib/simgpu
[ -e /var/lib/nouveau-was-here ] || tree=/usr/lib/simgpu-nouveau
touch /var/lib/nouveau-was-here
mount --bind $tree/sys/bus/pci/devices /sys/bus/pci/devices
[ $tree = /usr/lib/simgpu ] && mount --bind $tree/proc/driver /proc/driver
mount --bind $tree/proc/devices /proc/devices
"""
_UNIT_FILES = "/etc/systemd/system"
# gpuprov is to take the host for a bare machine: once systemd has read it, the mark of a container goes.
_UNMARK = "[Service]\nType=oneshot\nExecStart=/bin/rm -f /run/systemd/container\n[Install]\nWantedBy=basic.target\n"


@pytest.fixture(scope="module")
def lab_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    requests = {name: HostRequest(name, gpus=2, bind=(str(REPOSITORY),)) for name in ("boots", "metal")}
    with running(requests, tmp_path_factory.mktemp("inventories")) as site:
        yield site


@pytest.fixture(scope="module")
def main(lab_site: Site) -> Host:
    """A host that is installed, and whose own boot makes no device nodes any more."""
    gpuprov_succeeds("install", "--hosts", lab_site.inventory("boots"))
    host = lab_site.hosts["boots"]
    leave_nodes_to_gpuprov(host.root)
    return host


def active(host: Host, *units: str) -> list[str]:
    return host.ssh(("systemctl", "is-active", *units), check=False).stdout.split()


def test_after_a_reboot_nodes_exist_before_docker_starts(lab_site: Site, main: Host) -> None:
    main.ssh("rm -rf /dev/char")
    main.reboot()
    assert active(main, *_UNITS, "docker") == ["active", "inactive", "active", "active"]
    nodes = main.ssh("ls /dev/nvidia0 /dev/nvidia1 /dev/nvidiactl /dev/nvidia-uvm").stdout.split()
    assert len(nodes) == 4
    assert main.ssh("readlink /dev/char/195:1").stdout.strip() == "../nvidia1"
    assert main.ssh("systemctl show gpuprov-refresh --property=Result").stdout.strip() == "Result=success"
    times = main.ssh(
        "systemctl show gpuprov-nodes docker --property=ActiveEnterTimestampMonotonic --value"
    ).stdout.split()
    assert int(times[0]) <= int(times[1])
    gpuprov_succeeds("verify", "--hosts", lab_site.inventory("boots"))
    assert "0 changes" in gpuprov("install", "--hosts", lab_site.inventory("boots")).stdout


def test_another_set_of_libraries_changes_the_specification_without_anybody(main: Host) -> None:
    """As an update of a driver's packages does: libraries come or go, ldconfig runs."""
    before = (main.root / _CDI[1:]).read_text()
    assert "libnvidia-encode" in before
    main.ssh("mkdir /root/away && mv /usr/lib/x86_64-linux-gnu/libnvidia-encode.so* /root/away && ldconfig")
    wait_for("the refresh", lambda: "libnvidia-encode" not in (main.root / _CDI[1:]).read_text())
    main.ssh("mv /root/away/* /usr/lib/x86_64-linux-gnu/ && ldconfig")
    wait_for("the refresh", lambda: (main.root / _CDI[1:]).read_text() == before)


@pytest.mark.parametrize("seconds", ["0", "0.3", "0.6", "0.9", "1.2"])
def test_a_change_during_a_refresh_is_seen_too(main: Host, seconds: str) -> None:
    """systemd watches nothing meanwhile: at one of these moments, the refresh has looked and not ended yet."""
    before = (main.root / _CDI[1:]).read_text()
    libraries, gone = "/usr/lib/x86_64-linux-gnu", "/root/gone"
    main.ssh(
        f"mkdir -p {gone} && mv {libraries}/libnvidia-encode.so* {gone} && ldconfig && sleep {seconds} && "
        f"mv {gone}/* {libraries}/ && ldconfig"
    )

    def settled() -> bool:
        at_rest = set(active(main, "gpuprov-changed", "gpuprov-refresh")) == {"inactive"}
        return at_rest and (main.root / _CDI[1:]).read_text() == before

    wait_for("the specification of all libraries", settled)


def test_what_requires_the_refresh_runs_on_over_a_change(main: Host) -> None:
    """A container's unit, say: systemd restarts it with a unit that it requires."""
    main.ssh("systemd-run --unit=asking --property=Requires=gpuprov-refresh.service sleep infinity")
    before = main.ssh("systemctl show asking --property=MainPID").stdout
    refreshed = "systemctl show gpuprov-refresh --property=InvocationID"
    last = main.ssh(refreshed).stdout
    main.ssh("ldconfig")
    wait_for("a refresh", lambda: main.ssh(refreshed).stdout != last)
    wait_for("its end", lambda: set(active(main, "gpuprov-changed", "gpuprov-refresh")) == {"inactive"})
    assert main.ssh("systemctl show asking --property=MainPID").stdout == before
    main.ssh("systemctl stop asking")


def test_what_requires_gpuprovs_units_runs_on_over_an_upgrade_and_its_rollback(lab_site: Site, main: Host) -> None:
    """docker's own unit, say, which a site has made to require the nodes: a rollback would even leave it stopped."""
    units = "gpuprov-nodes.service gpuprov-refresh.service gpuprov-refresh.path"
    main.ssh(f"systemd-run --unit=asking --property='Requires={units}' sleep infinity")
    before = main.ssh("systemctl show asking --property=MainPID").stdout
    hosts = lab_site.inventory("boots")
    try:
        main.ssh(f"echo '# earlier' | tee -a {_UNIT_FILES}/gpuprov-nodes.service >> {_UNIT_FILES}/gpuprov-refresh.path")
        gpuprov_succeeds("install", "--hosts", hosts)
        assert main.ssh("systemctl show asking --property=MainPID").stdout == before
        gpuprov_succeeds("rollback", "--hosts", hosts)
        assert main.ssh("systemctl show asking --property=MainPID").stdout == before
    finally:
        main.ssh(f"systemctl stop asking; sed -i '/^# earlier$/d' {_UNIT_FILES}/gpuprov-*; systemctl daemon-reload")


def test_a_change_during_a_run_is_seen_when_the_run_has_ended(main: Host) -> None:
    """`gpuprov accept`, say, which computes for minutes and writes no specification; an upgrade comes meanwhile."""
    before = (main.root / _CDI[1:]).read_text()
    waiting = "pgrep --full ^/usr/bin/flock.*gpuprov.lock"
    try:
        main.ssh(
            "mv /usr/lib/x86_64-linux-gnu/libnvidia-encode.so* /root/ && "
            f"flock /run/gpuprov.lock sh -c 'ldconfig; until {waiting}; do sleep 0.1; done'"
        )
        wait_for("the refresh", lambda: "libnvidia-encode" not in (main.root / _CDI[1:]).read_text())
    finally:
        main.ssh("mv /root/libnvidia-encode.so* /usr/lib/x86_64-linux-gnu/ && ldconfig")
    wait_for("the refresh", lambda: (main.root / _CDI[1:]).read_text() == before)


def test_a_gpu_that_a_reboot_lost_is_missed_until_it_is_back(lab_site: Site, main: Host) -> None:
    inventory = lab_site.inventory("boots")
    attach = main.root / "usr/lib/simgpu/attach"
    whole = attach.read_text()
    simgpu.write_kernel_tree(main.root / "usr/lib/simgpu-one", 1, DRIVER)
    attach.write_text(whole.replace("/usr/lib/simgpu/", "/usr/lib/simgpu-one/"))
    main.reboot()
    main.ssh("rm -f /dev/nvidia1")
    failed = gpuprov("verify", "--hosts", inventory)
    missed = f"today: {simgpu.gpu(1).uuid} (NVIDIA H100 80GB HBM3 at 0000:2a:00.0) is gone"
    assert failed.returncode == 1 and f"1 {missed}" in failed.stdout, failed.stdout
    assert re.search(r"^remembered GPUs +failed", failed.stdout, re.MULTILINE), failed.stdout
    assert f"1 {missed}" in gpuprov("doctor", "--hosts", inventory).stdout
    again = gpuprov("install", "--hosts", inventory)
    assert again.returncode == 0 and "0 changes" in again.stdout and f"1 {missed}" in again.stdout, again.stdout
    attach.write_text(whole)
    main.reboot()
    done = gpuprov("verify", "--hosts", inventory)
    assert done.returncode == 0 and re.search(r"^remembered GPUs +ok +all 2 of", done.stdout, re.MULTILINE), done.stdout
    assert main.ssh("stat -c '%a %u' /var/lib/gpuprov/remembered.json").stdout.split() == ["600", "0"]


# -- containers with a restart policy ------------------------------------------------------------------------------

_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
# Without docker's CDI: up to 28.1 docker registers it after it has restarted containers (moby, 49989).
_CONTAINERS = {
    "flag": "docker run --gpus all",
    "runtime": "docker run --runtime=nvidia --env NVIDIA_VISIBLE_DEVICES=all",
    "podman": "podman --runtime=runc run --device nvidia.com/gpu=all",
    "rootless": "podman --runtime=runc run --device nvidia.com/gpu=all",
    "rootless docker": "docker run --runtime=nvidia --env NVIDIA_VISIBLE_DEVICES=all",
}
_IMPORT = SLEEPER.replace("docker import", "podman import")
# A user with a podman and a docker of its own; an overlay does not work on a lab host's overlay. The unit is what
# dockerd-rootless-setuptool.sh writes, with the host's network: a lab host has no /dev/net/tun.
_WORKER = """
set -e
useradd --create-home --shell /bin/sh worker && loginctl enable-linger worker && cd /home/worker
mkdir -p .config/containers .config/docker .config/systemd/user
printf '[storage]\ndriver = "vfs"\n' > .config/containers/storage.conf
cat > .config/docker/daemon.json <<'END'
{"storage-driver": "vfs", "iptables": false, "bridge": "none",
 "runtimes": {"nvidia": {"path": "/usr/bin/gpuprov-container-runtime"}}}
END
cat > .config/systemd/user/docker.service <<'END'
[Service]
Type=notify
NotifyAccess=all
Delegate=yes
KillMode=mixed
Environment=PATH=/usr/bin:/usr/sbin:/bin:/sbin
Environment=DOCKERD_ROOTLESS_ROOTLESSKIT_NET=host DOCKERD_ROOTLESS_ROOTLESSKIT_PORT_DRIVER=none
ExecStart=/usr/share/docker.io/contrib/dockerd-rootless.sh
[Install]
WantedBy=default.target
END
chown -R worker .config
"""
_ROOTLESS = "podman uidmap libpam-systemd dbus-user-session rootlesskit"


# Engines that a lab host has not, and its containerd: each leaves what it finds when it starts.
_ABSENT = ("crio", "k3s", "k3s-agent", "rke2-server", "rke2-agent", "kubelet", "snap.microk8s.daemon-containerd")
_LOOKING = f"""
set -e
cat > /usr/local/bin/look <<'END'
#!/bin/sh
echo /dev/nvidia[0-9]* $(grep -oE 'libcuda.so.[0-9]{{3}}[.][0-9.]*[0-9]' /etc/cdi/nvidia.json | sort -u) > /run/$1.found
END
chmod 755 /usr/local/bin/look && cd /etc/systemd/system && mkdir -p containerd.service.d
printf '[Service]\nExecStartPre=/usr/local/bin/look %%N\n' > containerd.service.d/look.conf
unit='[Service]\nType=oneshot\nExecStart=/usr/local/bin/look %%N\n[Install]\nWantedBy=multi-user.target\n'
for one in {" ".join(_ABSENT)}; do printf "$unit" > $one.service; done
systemctl daemon-reload && systemctl --quiet enable {" ".join(_ABSENT)}
"""


@dataclass(frozen=True)
class _Boot:
    """The kernel side that a boot finds: driver, number of GPUs, those with MIG instances, major of nvidia-uvm."""

    version: str = DRIVER
    gpus: int = 2
    divided: tuple[int, ...] = ()
    uvm_major: int = UVM_MAJOR

    @property
    def given(self) -> tuple[list[str], list[str]]:
        """What a container with all GPUs has, as `_given` returns it."""
        own = [node for node in simgpu.device_nodes(self.gpus) if re.search(r"(nvidia\d+|nvidia-uvm)$", node.path)]
        parts = [node for minor in self.divided for node in mig_nodes(minor)]
        majors = {UVM_MAJOR: self.uvm_major}
        return [self.version], sorted(f".{one.path}:{majors.get(one.major, one.major):x}" for one in (*own, *parts))


@pytest.fixture(scope="module")
def restarting(lab_site: Site, main: Host) -> Host:
    """The host with containers that come back at each boot, one of a user's, and the .run files of two drivers."""
    # A lab host has no pids controller.
    main.ssh("mkdir -p /etc/containers; printf '[containers]\npids_limit = 0\n' > /etc/containers/containers.conf")
    main.add_archive()
    main.ssh(f"apt-get update -qq; apt-get install -qq --no-install-recommends {_ROOTLESS}", timeout=300)
    main.ssh("sh -s", stdin=_WORKER)
    main.ssh("sh -s", stdin=_LOOKING)
    wait_for("the user's services", lambda: active(main, "user@1000.service") == ["active"])
    main.ssh(SLEEPER)
    main.ssh(_IMPORT)
    main.ssh(_by("rootless", "systemctl --user enable --now docker"))
    main.ssh(_by("rootless", _IMPORT.replace("/root/", "$HOME/")))
    main.ssh(_by("rootless docker", SLEEPER.replace("/root/", "$HOME/")))
    main.ssh("systemctl enable podman-restart.service")
    main.ssh(_by("rootless", "systemctl --user enable podman-restart.service"))
    for name, command in _CONTAINERS.items():
        words = f"{command} --detach --network=none --restart=always --name {name.split()[0]} sleeper:1 /bin/sleep 9999"
        main.ssh(_by(name, words))
    bring_run_files(lab_site.lab, main, DRIVER, _NEWER)
    return main


def _by(name: str, command: str) -> str:
    """Return a command as the user types it whose container it is."""
    if not name.startswith("rootless"):
        return command
    theirs = "XDG_RUNTIME_DIR=/run/user/1000 DOCKER_HOST=unix:///run/user/1000/docker.sock"
    return f"su - worker -c {shlex.quote(f'export {theirs}; {command}')}"


def _boot_with(host: Host, boot: _Boot) -> None:
    """Boot with that kernel side."""
    change_kernel_side(host, boot.version, boot.gpus, boot.divided)
    devices = host.root / "usr/lib/simgpu/proc/devices"
    devices.write_text(devices.read_text().replace(f"{UVM_MAJOR} nvidia-uvm", f"{boot.uvm_major} nvidia-uvm"))
    host.power_cycle()
    state = _by("rootless", "systemctl --user is-active podman-restart docker")
    wait_for(
        "the user's engines", lambda: host.ssh(state, check=False).stdout in ("active\nactive\n", "failed\nactive\n")
    )


def _engine(name: str) -> str:
    return _CONTAINERS[name].split()[0]


def _given(host: Host, name: str) -> tuple[list[str], list[str]]:
    """Return libcuda's versions and the GPUs' nodes (path:major) in a container, nothing of one that does not run."""
    state = _by(name, f"{_engine(name)} inspect --format '{{{{.State.Pid}}}}' {name.split()[0]}")
    seen = host.ssh(
        f"pid=$({state}); [ $pid -gt 0 ] && cd /proc/$pid/root && "
        f"find .{_LIBRARIES} -name 'libcuda.so.*.*' -size +0 && "
        r"find ./dev -regex '.*\(nvidia[0-9]+\|nvidia-uvm\|nvidia-cap[0-9]+\)' -exec stat --format %n:%t {} +",
        check=False,
    ).stdout.split()  # fmt: skip
    versions = [word.partition("libcuda.so.")[2] for word in seen if "libcuda" in word]
    return versions, sorted(word for word in seen if "/dev/" in word)


_BOOTS = {
    "upgraded": _Boot(_NEWER),
    "downgraded": _Boot(),
    "a GPU lost": _Boot(gpus=1),
    "a GPU added": _Boot(),
    "no specification": _Boot(),
    # Another kernel gives other numbers to drivers that ask for any.
    "another kernel": _Boot(uvm_major=UVM_MAJOR + 1),
    "GPU divided": _Boot(divided=(0,)),
    "other GPU divided": _Boot(divided=(1,)),
    "module late": _Boot(),
}


@pytest.mark.parametrize("case", _BOOTS)
def test_containers_with_a_restart_policy_have_their_gpus_after_a_boot(restarting: Host, case: str) -> None:
    boot = _BOOTS[case]
    if case in ("upgraded", "downgraded"):
        install_by_hand(restarting, boot.version)
    if case == "no specification":
        restarting.ssh(f"rm {_CDI}")
    with _module_that_modprobe_loads(restarting) if case == "module late" else contextlib.nullcontext():
        _boot_with(restarting, boot)
        assert {name: _given(restarting, name) for name in _CONTAINERS} == dict.fromkeys(_CONTAINERS, boot.given)
        found = " ".join((*(f"/dev/nvidia{number}" for number in range(boot.gpus)), f"libcuda.so.{boot.version}"))
        seen = restarting.ssh(f"cd /run && cat {'.found '.join((*_ABSENT, 'containerd'))}.found").stdout
        assert seen.splitlines() == [found] * (len(_ABSENT) + 1)


@contextlib.contextmanager
def _module_that_modprobe_loads(host: Host, *, works: bool = True) -> Iterator[None]:
    """Let the driver be loaded by nothing before gpuprov's unit asks nvidia-modprobe; `works`: it then succeeds."""
    attach, program = host.root / "usr/lib/simgpu/attach", host.root / "usr/bin/nvidia-modprobe"
    before, mode = (attach.read_text(), program.read_bytes()), program.stat().st_mode
    lines = before[0].splitlines(keepends=True)
    attach.write_text("".join(line for line in lines if "/proc/" not in line))
    loads = "".join(line for line in lines if "/proc/" in line)
    program.write_text(f"#!/bin/sh -e\n{loads if works else 'exit 1'}\n")
    try:
        yield
    finally:
        attach.write_text(before[0])
        program.write_bytes(before[1])
        program.chmod(mode)


def test_a_module_that_comes_after_the_engines_is_there_for_their_containers(restarting: Host) -> None:
    with _module_that_modprobe_loads(restarting, works=False):
        _boot_with(restarting, _Boot())
    assert active(restarting, "docker", "gpuprov-nodes.service") == ["active", "failed"]
    for name in ("flag", "runtime"):
        said = restarting.ssh(f"docker inspect --format '{{{{.State.Error}}}}' {name}").stdout
        assert f"the driver {DRIVER} is not loaded" in said
    # udev starts it with a module; a lab host's udev sees none.
    restarting.ssh("grep /proc/ /usr/lib/simgpu/attach | sh -e; systemctl start gpuprov-refresh.service")
    for name in _CONTAINERS:
        restarting.ssh(_by(name, f"{_engine(name)} start {name.split()[0]}"))
    assert {name: _given(restarting, name) for name in _CONTAINERS} == dict.fromkeys(_CONTAINERS, _Boot().given)


def test_a_driver_that_does_not_fit_its_module_is_said_and_engines_start(restarting: Host) -> None:
    """Files that changed without a boot, as an update by apt in the night leaves them."""
    install_by_hand(restarting, _NEWER)
    _boot_with(restarting, _Boot())
    assert active(restarting, "docker", "gpuprov-refresh.service") == ["active", "failed"]
    said = restarting.ssh("journalctl --boot --output=cat --unit gpuprov-refresh").stdout
    assert f"files are {_NEWER}, the loaded module is {DRIVER}" in said
    install_by_hand(restarting, DRIVER)
    wait_for("the refresh", lambda: active(restarting, "gpuprov-refresh.service") == ["inactive"])


def test_a_driver_that_hangs_delays_engines_and_does_not_stop_them(restarting: Host) -> None:
    """The limit is the unit's; a shorter one here."""
    hangs = (
        "mkdir -p {0} && printf '[Service]\\nTimeoutStartSec=1\\nExecStart=\\nExecStart=/bin/sleep 600\\n' > {0}/a.conf"
    )
    after = "systemctl show {} --property=After | grep -c gpuprov-refresh"
    assert restarting.ssh(after.format("user@1000.service")).stdout == "1\n"
    # The administrator who looks for the reason can log in.
    assert restarting.ssh(after.format("user@0.service"), check=False).stdout == "0\n"
    for unit in ("gpuprov-nodes.service", "gpuprov-refresh.service"):
        limit = restarting.ssh(f"systemctl show {unit} --property=TimeoutStartUSec --value").stdout.strip()
        assert limit == "1min 30s"
        restarting.ssh(hangs.format(f"/etc/systemd/system/{unit}.d"))
    _boot_with(restarting, _Boot())
    assert active(restarting, "gpuprov-nodes", "gpuprov-refresh", "docker") == ["failed", "failed", "active"]
    restarting.ssh("rm -r /etc/systemd/system/gpuprov-*.service.d; systemctl daemon-reload")
    restarting.ssh("systemctl restart gpuprov-nodes gpuprov-refresh; docker rm --force flag runtime")
    restarting.ssh("podman rm --force --time 0 podman; systemctl disable podman-restart")
    restarting.ssh(_by("rootless", "podman rm --force --time 0 rootless; docker rm --force rootless"))
    restarting.ssh("loginctl disable-linger worker; apt-get purge -qq podman rootlesskit")


def test_roll_back_takes_units_links_and_program_away(lab_site: Site, main: Host) -> None:
    gpuprov_succeeds("rollback", "--hosts", lab_site.inventory("boots"))
    found = main.ssh("find /etc /usr/lib/gpuprov -name '*gpuprov*' 2>&1", check=False).stdout
    assert "gpuprov-" not in found
    assert active(main, *_UNITS) == ["inactive"] * 3


# -- reboots -------------------------------------------------------------------------------------------------------


def _as_metal(lab_site: Site) -> Host:
    """Return a host with the driver's libraries that takes itself for a bare machine, nouveau on its GPUs."""
    if not lab_site.hosts.is_saved("metal"):
        _save_as_metal(lab_site, lab_site.fresh("metal"))
    host = lab_site.hosts.fresh("metal", saved=True)
    assert host.ssh("readlink /sys/bus/pci/devices/0000:1b:00.0/driver").stdout.strip().endswith("nouveau")
    return host


def _save_as_metal(lab_site: Site, host: Host) -> None:
    bring_run_files(lab_site.lab, host, DRIVER)
    install_by_hand(host, DRIVER)
    simgpu.write_kernel_tree(host.root / "usr/lib/simgpu-nouveau", 2, driver="nouveau")
    (host.root / "usr/lib/simgpu/attach").write_text(_NOUVEAU_ONCE)
    units = host.root / "etc/systemd/system"
    (units / "unmark.service").write_text(_UNMARK)
    host.ssh("systemctl enable unmark.service")
    host.save()


def _inventory(lab_site: Site, **variables: str) -> Path:
    path = lab_site.inventory("metal", gpuprov_driver="preinstalled", gpuprov_driver_url=None, **variables)
    assert yaml.safe_load(path.read_text())["all"]["vars"]["gpuprov_driver"] == "preinstalled"
    return path


def test_without_leave_the_run_ends_with_3_and_goes_on_after_somebodys_reboot(lab_site: Site) -> None:
    host = _as_metal(lab_site)
    boot = host.boot_id()
    done = gpuprov("install", "--hosts", _inventory(lab_site))
    assert done.returncode == 3, done.stdout
    assert "is bound to nouveau" in done.stdout
    assert "systemctl reboot" in done.stdout
    assert host.boot_id() == boot
    host.reboot()
    gpuprov_succeeds("install", "--hosts", _inventory(lab_site))
    # The .run brings the daemon's program without a unit.
    assert active(host, "nvidia-persistenced.service") == ["active"]
    gpuprov_succeeds("verify", "--hosts", _inventory(lab_site))


def test_over_ssh_the_run_waits_for_the_reboot_and_goes_on(lab_site: Site) -> None:
    host = _as_metal(lab_site)
    boot = host.boot_id()
    done = gpuprov_succeeds("install", "--hosts", _inventory(lab_site, gpuprov_reboot="if-needed"), timeout=600)
    assert "rebooting" in done.stdout
    assert host.boot_id() != boot
    assert "0 changes" in gpuprov("install", "--hosts", _inventory(lab_site, gpuprov_reboot="if-needed")).stdout
    # One run, before and behind the reboot: one roll-back.
    assert len(list((host.root / "var/lib/gpuprov/runs").iterdir())) == 1


def test_on_the_machine_itself_a_unit_goes_on_and_is_gone(lab_site: Site) -> None:
    host = _as_metal(lab_site)
    boot = host.boot_id()
    words = (GPUPROV, "install", "-e", "gpuprov_driver=preinstalled", "-e", "gpuprov_reboot=if-needed")
    done = host.ssh(shlex.join(map(str, words)), check=False, timeout=300)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "journalctl -u gpuprov-resume.service" in done.stdout
    wait_for("the reboot", lambda: host.boot_id() != boot)
    host.wait_until_settled()
    said = host.ssh("journalctl --output=cat --unit gpuprov-resume.service").stdout
    finished = [json.loads(line) for line in said.splitlines() if '"Finished"' in line]
    assert [event["exit_code"] for event in finished] == [0], said
    assert not (host.root / "etc/systemd/system/gpuprov-resume.service").exists()
    gpuprov_succeeds("verify", "--hosts", _inventory(lab_site))

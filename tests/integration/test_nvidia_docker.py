"""The command nvidia-docker and `gpuprov serve` on a real host: docker, systemd, the genuine nvidia-smi."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_ansible import play, recap
from tests.integration.test_clients import gpus
from tests.lab import Host
from tests.lab.command_line import GPUPROV
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds
from tests.lab.shell import LabError, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.root]
_COMMAND = "/usr/bin/nvidia-docker"
_UNITS = ("/etc/systemd/system/gpuprov-serve.service", "/etc/systemd/system/gpuprov-serve.socket")
_SOCKET = "/run/gpuprov/serve.sock"
_SMI = "nvidia-smi -L"
# A C library and some programs, of the driver nothing.
_IMAGES = r"""
set -e
cd / && tar -ch lib64/ld-linux-x86-64.so.2 bin/sh bin/sleep bin/cat usr/bin/env usr/bin/tty \
  $(printf 'lib/x86_64-linux-gnu/%s ' libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1) >/root/small.tar
import() { name=$1; shift; docker import "$@" /root/small.tar "$name" >/dev/null; }
import small:1
import newer:1 -c 'ENV NVIDIA_REQUIRE_CUDA=cuda>=99.0'
cat >/usr/local/bin/ask <<'END'
#!/usr/bin/python3
import socket, sys, http.client
def ask(target, unix="", method="GET"):
    connection = http.client.HTTPConnection("localhost", 3476, timeout=60)
    if unix:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(unix)
    connection.request(method, target)
    answer = connection.getresponse()
    sys.stdout.write(answer.read().decode())
    sys.exit(answer.status != 200)
ask(*sys.argv[1:])
END
chmod 755 /usr/local/bin/ask
"""
_RUN = "nvidia-docker run --rm --network=none"


def both(site: Site, name: str = "main") -> Path:
    """Return an inventory that asks for the command and the service."""
    return site.inventory(name, gpuprov_nvidia_docker=True, gpuprov_serve=True)


@pytest.fixture(scope="module")
def host(site: Site) -> Iterator[Host]:
    """A provisioned host with both, and images."""
    found = site.installed("main")
    done = gpuprov_succeeds("install", "--hosts", both(site), "--check", "--diff")
    for path in (_COMMAND, *_UNITS):
        assert path in done.stdout
        assert not (found.root / path[1:]).exists()
    gpuprov_succeeds("install", "--hosts", both(site))
    found.ssh(_IMAGES)
    yield found


def seen(host: Host, line: str) -> list[int]:
    """Return the numbers of the host's GPUs that a container sees, by their UUIDs."""
    known = gpus(host.ssh(_SMI).stdout)
    return [known.index(uuid) for uuid in gpus(host.ssh(line).stdout)]


def test_a_second_run_changes_nothing_by_either_door(host: Host, site: Site) -> None:
    assert "0 changes" in gpuprov("install", "--hosts", both(site)).stdout
    done = play("site", both(site))
    assert (done.returncode, recap(done, "main")["changed"]) == (0, 0), done.stdout


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        (f"{_RUN} small:1 {_SMI}", [0, 1]),
        (f"NV_GPU=1 {_RUN} small:1 {_SMI}", [1]),
        (f"NV_GPU='0 1' {_RUN} small:1 {_SMI}", [0, 1]),
        (f"NV_GPU=$({_SMI} | sed -n 's/.*(UUID: \\(.*\\)).*/\\1/p' | tail -1) {_RUN} small:1 {_SMI}", [1]),
        (f"NV_GPU=0 {_RUN} -e NVIDIA_VISIBLE_DEVICES=1 small:1 {_SMI}", [1]),
        (f"NV_GPU=0 {_RUN} --gpus device=1 small:1 {_SMI}", [1]),
        (f"nvidia-docker -D -l warn -H unix:///var/run/docker.sock container run --rm --network none small:1 {_SMI}",
         [0, 1]),
        (f"nvidia-docker --config /root/.docker --context default run --rm --network none small:1 {_SMI}", [0, 1]),
        ("id=$(NV_GPU=1 nvidia-docker create --network none small:1 nvidia-smi -L) && nvidia-docker start -a $id; "
         "nvidia-docker rm $id >/dev/null", [1]),
    ],
)  # fmt: skip
def test_containers_get_the_gpus_that_are_asked_for(host: Host, line: str, numbers: list[int]) -> None:
    assert seen(host, line) == numbers


def test_what_follows_the_image_and_every_other_command_is_left_alone(host: Host) -> None:
    echoed = host.ssh(f"{_RUN} small:1 sh -c 'echo \"$@\"' sh run --gpus all IMAGE").stdout
    assert echoed.strip() == "run --gpus all IMAGE"
    for line in ("ps -a", "version", "images -q small", "run --help", "--version"):
        assert host.ssh(f"nvidia-docker {line}").stdout == host.ssh(f"docker {line}").stdout


@pytest.mark.parametrize("line", [
    "run --rm --network none small:1 sh -c 'exit 42'", "run --rm small:1 /no/such/program", "run --no-such-option x",
    "run missing:1", "run", "no-such-command", "run --pull never missing:1",
])  # fmt: skip
def test_exit_codes_are_dockers(host: Host, line: str) -> None:
    ours, dockers = (host.ssh(f"{program} {line}", check=False) for program in ("nvidia-docker", "docker"))
    assert ours.returncode == dockers.returncode != 0
    assert ours.stdout == dockers.stdout


def test_terminal_and_standard_input_are_the_containers(host: Host) -> None:
    inside = f"{_RUN} -it small:1 sh -c 'tty && exit 7'"
    done = host.ssh(f"script --quiet --return --command {json.dumps(inside)} /dev/null", check=False)
    assert ("/dev/pts/0" in done.stdout, done.returncode) == (True, 7), done
    assert host.ssh(f"{_RUN} -i small:1 cat", stdin="from outside\n").stdout == "from outside\n"


# A program that starts the command, sends its signal to the very process that it started, and ends as that one.
_SIGNALLED = f"""
cat >/root/trap.sh <<'END'
trap 'echo got it; exit 9' TERM
echo ready
while :; do sleep 0.05; done
END
rm -f /root/out
{_RUN} -v /root/trap.sh:/trap.sh small:1 sh /trap.sh >/root/out & pid=$!
until grep -q ready /root/out; do sleep 0.05; done
cat /proc/$pid/comm
kill -TERM $pid; wait $pid; code=$?
cat /root/out
exit $code
"""


def test_the_process_is_dockers_own_and_signals_reach_the_container(host: Host) -> None:
    done = host.ssh(_SIGNALLED, check=False)
    assert (done.returncode, done.stdout.split("\n")[:3]) == (9, ["docker", "ready", "got it"]), done


def test_docker_starts_with_the_callers_signals(host: Host) -> None:
    """Python ignores SIGPIPE (13) and SIGXFSZ (25); docker shall not inherit that."""
    host.ssh("printf '#!/bin/sh\\ngrep SigIgn /proc/self/status' >/root/shown && chmod 755 /root/shown")
    line = host.ssh("env --default-signal=PIPE,XFSZ NV_DOCKER=/root/shown nvidia-docker ps").stdout
    ignored = int(line.split()[1], 16)
    assert not ignored & (1 << 12 | 1 << 24), line


def test_a_link_named_docker_does_not_run_in_circles(host: Host) -> None:
    host.ssh(f"mkdir -p /root/links && ln -sfn {_COMMAND} /root/links/docker")
    assert host.ssh("PATH=/root/links:$PATH docker --version").stdout.startswith("Docker version")
    done = host.ssh("PATH=/root/links /bin/sh -c 'docker ps'", check=False)
    assert (done.returncode, "there is no program docker" in done.stderr) == (127, True), done


def test_an_image_that_needs_a_newer_driver_is_refused(host: Host) -> None:
    done = host.ssh("nvidia-docker run --rm --network none newer:1 true", check=False)
    assert done.returncode == 125
    assert "requires cuda>=99.0, this host's driver" in done.stderr
    assert len(seen(host, f"{_RUN} -e NVIDIA_DISABLE_REQUIRE=1 newer:1 {_SMI}")) == 2


def test_a_user_who_may_use_docker_may_use_it(host: Host) -> None:
    host.ssh("id user >/dev/null 2>&1 || useradd --create-home --groups docker user")
    assert seen(host, f"su user -c 'cd && NV_GPU=1 {_RUN} small:1 {_SMI}'") == [1]


# -- gpuprov serve -------------------------------------------------------------------------------------------------


def test_an_old_script_gets_its_gpus(host: Host) -> None:
    for target, numbers in (("/docker/cli?dev=0+1\\&vol=nvidia_driver", [0, 1]), ("/v1.0/docker/cli?dev=1", [1])):
        line = f"docker run --rm --network=none --runtime=runc $(ask {target}) small:1 {_SMI}"
        assert seen(host, line) == numbers
    done = host.ssh("docker run --rm $(ask /docker/cli?dev=7) small:1 true", check=False)
    assert (done.returncode, "unknown flag: --gpuprov-error-" in done.stderr) == (125, True), done
    args = host.ssh(f"docker run --rm --network=none --runtime=runc small:1 {_SMI}", check=False)
    assert args.returncode != 0


def test_what_is_told_of_gpus_is_what_nvidia_smi_says(host: Host) -> None:
    info = json.loads(host.ssh("ask /gpu/info/json").stdout)
    query = "nvidia-smi --query-gpu=uuid,name,memory.total,driver_version --format=csv,noheader,nounits"
    rows = [line.split(", ") for line in host.ssh(query).stdout.splitlines()]
    told = [
        [one["UUID"], one["Model"], str(one["Memory"]["Global"]), info["Version"]["Driver"]] for one in info["Devices"]
    ]
    assert told == rows
    assert [one["Path"] for one in info["Devices"]] == ["/dev/nvidia0", "/dev/nvidia1"]
    status = json.loads(host.ssh("ask /v1.0/gpu/status/json").stdout)
    query = "nvidia-smi --query-gpu=temperature.gpu,memory.used --format=csv,noheader,nounits"
    rows = [line.split(", ") for line in host.ssh(query).stdout.splitlines()]
    assert [[str(one["Temperature"]), str(one["Memory"]["GlobalUsed"])] for one in status["Devices"]] == rows


def test_the_unix_socket_is_roots_and_the_service_nobodys(host: Host) -> None:
    assert json.loads(host.ssh(f"ask /docker/cli/json {_SOCKET}").stdout)["Devices"]
    assert host.ssh(f"stat -c '%U %a' {_SOCKET} /run/gpuprov").stdout.splitlines() == ["root 600", "root 755"]
    with pytest.raises(LabError, match="PermissionError"):
        host.ssh(f"su nobody -s /bin/sh -c 'ask /docker/cli {_SOCKET}'")
    pid = host.ssh("systemctl show gpuprov-serve --property=MainPID --value").stdout.strip()
    status = host.ssh(f"grep -E '^(Uid|CapEff|NoNewPrivs)' /proc/{pid}/status").stdout
    assert "Uid:\t0\t" not in status
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    # No other address of this host answers.
    connect = f'import socket; socket.create_connection(("{host.address}", 3476), 5)'
    assert "ConnectionRefusedError" in host.ssh(("python3", "-c", connect), check=False).stderr
    rated = host.ssh("systemd-analyze security --no-pager gpuprov-serve.service", check=False).stdout
    exposure = re.search(r"Overall exposure level for gpuprov-serve.service: ([\d.]+)", rated)
    assert exposure is not None, rated
    assert float(exposure[1]) < 2.0, rated
    print(exposure[0])


def test_it_loads_nothing_where_the_driver_is_not_whole(host: Host) -> None:
    host.ssh("mv /dev/nvidia1 /dev/moved")
    try:
        for target in ("/gpu/info/json", "/docker/cli"):
            done = host.ssh(f"ask {target}", check=False)
            assert done.stdout == "--gpuprov-error-the-device-node-/dev/nvidia1-is-missing\n"
        assert host.ssh("ls /dev/nvidia1", check=False).returncode != 0
    finally:
        host.ssh("mv /dev/moved /dev/nvidia1")


@pytest.mark.parametrize("name", ["bullseye", "trixie"])
def test_other_releases_have_other_pythons_and_another_systemd(site: Site, name: str) -> None:
    other = site.installed(name)
    gpuprov_succeeds("install", "--hosts", both(site, name))
    other.ssh(_IMAGES)
    last = len(gpus(other.ssh(_SMI).stdout)) - 1
    assert seen(other, f"NV_GPU={last} {_RUN} small:1 {_SMI}") == [last]
    assert len(json.loads(other.ssh("ask /gpu/info/json").stdout)["Devices"]) == last + 1
    line = f"docker run --rm --network=none --runtime=runc $(ask /docker/cli?dev={last}) small:1 {_SMI}"
    assert seen(other, line) == [last]


def test_in_the_foreground_until_ctrl_c(host: Host) -> None:
    done = host.ssh(f"{GPUPROV} serve", check=False)
    assert (done.returncode, "127.0.0.1:3476 can't be used" in done.stderr) == (1, True), done
    host.ssh("systemctl stop gpuprov-serve.socket")
    try:
        host.ssh(f"systemd-run --quiet --unit=foreground --collect {GPUPROV} serve")
        wait_for("an answer", lambda: host.ssh("ask /docker/cli", check=False).returncode == 0)
        assert host.ssh(f"stat -c '%U %a' {_SOCKET}").stdout.split() == ["root", "600"]
        assert "Temperature" in host.ssh(f"ask /gpu/status/json {_SOCKET}").stdout
        host.ssh("systemctl kill --signal=INT foreground")
        wait_for("its end", lambda: host.ssh(f"test -e {_SOCKET}", check=False).returncode != 0)
        assert "serving 127.0.0.1:3476 until Ctrl-C" in host.ssh("journalctl --unit foreground").stdout
    finally:
        host.ssh("systemctl stop foreground", check=False)
        host.ssh("systemctl start gpuprov-serve.socket")


# -- the ways back -------------------------------------------------------------------------------------------------


def test_without_the_variables_and_by_rollback_both_go_and_come(host: Host, site: Site) -> None:
    gpuprov_succeeds("install", "--hosts", site.inventory("main"))
    assert not [path for path in (_COMMAND, *_UNITS, _SOCKET) if (host.root / path[1:]).exists()]
    assert host.ssh("systemctl is-active gpuprov-serve.socket", check=False).stdout.strip() == "inactive"
    gpuprov_succeeds("rollback", "--hosts", site.inventory("main"))
    assert "0 changes" in gpuprov("install", "--hosts", both(site)).stdout
    assert host.ssh("systemctl is-active gpuprov-serve.socket").stdout.strip() == "active"


def test_a_command_of_another_package_is_kept(host: Host, site: Site) -> None:
    """A package that comes later takes the name; neither an install nor the way back touches what it brought."""
    host.ssh(f"printf '#!/bin/sh\\n# a package\\n' >{_COMMAND}.new && mv {_COMMAND}.new {_COMMAND}")
    done = gpuprov_succeeds("install", "--hosts", both(site))
    assert re.sub(r"\s+", " ", done.stdout).count(f"{_COMMAND} is not gpuprov's: gpuprov keeps it") == 1, done.stdout
    gpuprov_succeeds("uninstall", "--hosts", site.inventory("main"))
    assert host.ssh(f"cat {_COMMAND}").stdout == "#!/bin/sh\n# a package\n"
    assert not [path for path in _UNITS if (host.root / path[1:]).exists()]

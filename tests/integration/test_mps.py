"""MPS on a real host: real systemd runs the daemon's unit, verify asks it, and an uninstall takes it away."""

import pytest

from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.slow]
# NVIDIA's daemon forks, leaves its control file in its folder, and answers commands on standard input.
_DAEMON = """\
#!/bin/sh
control="$CUDA_MPS_PIPE_DIRECTORY/control"
if [ "$1" = -d ]; then
    setsid sleep infinity >/dev/null 2>&1 & echo $! > "$control"
    echo "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" > "$CUDA_MPS_LOG_DIRECTORY/limits"
    exit 0
fi
[ -e "$control" ] || { echo 'Cannot find MPS control daemon process' >&2; exit 1; }
read -r command
case "$command" in
    get_default_active_thread_percentage) echo 25.0;;
    quit) kill "$(cat "$control")"; rm "$control";;
esac
"""


def test_mps_runs_in_a_folder_of_its_own_and_goes_with_an_uninstall(site: Site) -> None:
    host = site.installed("main")
    host.ssh(f"cat > /usr/bin/nvidia-cuda-mps-control <<'X'\n{_DAEMON}X\nchmod 755 /usr/bin/nvidia-cuda-mps-control")
    inventory = site.inventory("main", gpuprov_mps=True, gpuprov_mps_threads=25, gpuprov_mps_memory="0=10G")
    gpuprov_succeeds("install", "--hosts", inventory)
    unit = "gpuprov-mps.service"
    assert host.ssh(f"systemctl is-active {unit}; systemctl is-enabled {unit}").stdout.split() == ["active", "enabled"]
    assert host.ssh("cat /var/log/gpuprov-mps/limits").stdout.split() == ["25", "0=10G"]
    assert host.ssh("ls /run/gpuprov-mps; test ! -e /tmp/nvidia-mps && echo elsewhere").stdout.split() == [
        "control", "elsewhere",
    ]  # fmt: skip
    assert "0 changes" in gpuprov("install", "--hosts", inventory).stdout
    verified = gpuprov("verify", "--hosts", inventory)
    assert verified.returncode == 0 and "MPS" in verified.stdout, verified.stdout
    host.ssh(f"systemctl stop {unit}")
    stopped = gpuprov("verify", "--hosts", inventory)
    assert stopped.returncode == 1 and "the daemon does not answer" in stopped.stdout, stopped.stdout
    gpuprov_succeeds("uninstall", "--hosts", inventory)
    left = host.ssh(f"systemctl is-active {unit} || ls /etc/systemd/system/{unit} /run/gpuprov-mps "
                    "/var/log/gpuprov-mps 2>&1 || true").stdout  # fmt: skip
    assert left.splitlines()[0] in ("inactive", "unknown") and left.count("No such file") == 3

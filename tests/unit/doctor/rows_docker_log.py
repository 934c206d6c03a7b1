"""Containers that did not start, by docker's log, with what the doctor must say of each.

Messages are recorded where a row says from where: bug reports of the projects named. All others follow the known
formats and were written here.
"""

from gpuprov.doctor.finding import WARNING
from tests.unit.doctor.ill import Row, docker_says

# dockerd 28.0.4 and runc 1.2, nvidia-container-toolkit issue 679; a line feed is two characters in its log.
_FAILED_START = (
    f'level=error msg="Handler for POST /v1.48/containers/{"4f" * 32}/start returned error: failed to create task for '
    "container: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container "
    "process: error during container init: "
)


def _cli_said(what: str) -> str:
    """Return docker's line of a start in which NVIDIA's hook failed."""
    hook = "error running hook #0: error running hook: exit status 1, stdout: , stderr: Auto-detected mode as 'legacy'"
    return f'{_FAILED_START}{hook}\\nnvidia-container-cli: {what}: unknown"'


DOCKER_LOG_ROWS = (
    Row("docker-no-room",
        docker_says('level=error msg="Handler for POST /v1.41/containers/x/start returned error: failed to start shim: '
                    'write /run/containerd/io.containerd.runtime.v2.task/moby/x/config.json: no space left on device"'),
        "write /run/containerd", "df -h /run", WARNING),
    Row("docker-no-room", docker_says("write /srv/docker/tmp/GetImageBlob1: disk quota exceeded"), "/srv/docker/tmp",
        "df -i /run", WARNING),
    Row("docker-limit-refused",
        docker_says('level=error msg="Handler for POST /v1.51/containers/x/start returned error: OCI runtime create '
                    'failed: error setting rlimits for ready process: error setting rlimit type 8: operation not '
                    'permitted"'),
        "error setting rlimit type 8", "default-ulimits", WARNING),
    # runc 1.3.3 in an unprivileged container of Proxmox VE, opencontainers/runc issues 4968 and 4972.
    Row("sysctl-refused",
        docker_says(f"{_FAILED_START}open sysctl net.ipv4.ip_unprivileged_port_start file: reopen fd 8: permission "
                    'denied: unknown"'),
        "file: reopen fd 8: permission denied", "install -y lxc-pve  # on the container host", WARNING),
    Row("bpf-refused",
        docker_says("nvidia-container-cli: mount error: failed to add device rules: bpf_prog_query("
                    "BPF_CGROUP_DEVICE) failed: operation not permitted"),
        "bpf_prog_query", "CDI", WARNING),
    # libnvidia-container issue 256; nvidia-docker issue 1546 (cgroup v1).
    Row("bpf-refused",
        docker_says(_cli_said("mount error: failed to add device rules: unable to generate new device filter program "
                              "from existing programs: unable to create new device filters program: load program: "
                              "invalid argument: 0: (69) r2 = *(u16 *)(r1 +0)")),
        "load program: invalid argument", "CDI", WARNING),
    Row("bpf-refused",
        docker_says(_cli_said("mount error: failed to add device rules: write /sys/fs/cgroup/devices/docker/ca6bba3e/"
                              "devices.allow: operation not permitted")),
        "devices.allow", "CDI", WARNING),
    # dstackai/dstack issue 2306.
    Row("hook-refuses",
        docker_says(f"{_FAILED_START}error running prestart hook #0: exit status 1, stdout: , stderr: Using requested "
                    "mode 'cdi'\\ninvoking the NVIDIA Container Runtime Hook directly (e.g. specifying the docker "
                    '--gpus flag) is not supported."'),
        "mode 'cdi'", "docker run --rm --runtime=nvidia", WARNING),
    # nvidia-container-toolkit issue 202; nvidia-docker issue 723.
    Row("driver-timed-out", docker_says(_cli_said("initialization error: driver rpc error: timed out")), "timed out",
        "nvidia-smi -pm 1", WARNING),
    Row("driver-timed-out", docker_says(_cli_said("initialization error: driver error: timed out")), "timed out",
        "nvidia-smi -pm 1", WARNING),
    # nvidia-container-toolkit issue 289.
    Row("image-has-driver",
        docker_says(_cli_said("mount error: file creation failed: /var/lib/docker/overlay2/706b/merged/usr/lib/"
                              "x86_64-linux-gnu/libnvidia-ml.so.1: file exists")),
        "libnvidia-ml.so.1: file exists", "journalctl -b -u docker", WARNING),
    # nvidia-container-toolkit issue 1537.
    Row("driver-not-described",
        docker_says('level=error msg="Handler for POST /v1.48/containers/x/start returned error: failed to create task '
                    "for container: failed to create shim task: OCI runtime create failed: could not apply required "
                    "modification to OCI specification: error modifying OCI spec: failed to inject CDI devices: "
                    'unresolvable CDI devices runtime.nvidia.com/gpu=all: unknown"'),
        "runtime.nvidia.com/gpu=all", "nvidia-ctk --debug cdi generate", WARNING),
    Row("library-not-loaded",
        docker_says("nvidia-container-cli: initialization error: load library failed: "
                    "libnvidia-ml.so.1: cannot open shared object file"),
        "libnvidia-ml", "ldconfig", WARNING),
    Row("library-not-loaded", docker_says(_cli_said("initialization error: load library failed: libcuda.so.1: x")),
        "load library failed: libcuda.so.1: x", "ldconfig", WARNING),
    Row("cdi-unresolved", docker_says("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=7"),
        "gpu=7", "gpuprov cdi list", WARNING),
    # docker 29, ShaneIsrael/fireshare issue 689.
    Row("gpus-without-cdi",
        docker_says('level=error msg="Handler for POST /v1.54/containers/x/start returned error: failed to discover '
                    'GPU vendor from CDI: no known GPU vendor found"'),
        "no known GPU vendor found", "gpuprov install; docker info", WARNING),
    Row("requirement-unmet", docker_says("requirement error: unsatisfied condition: cuda>=13.0, please update"),
        "cuda>=13.0", "image", WARNING),
)  # fmt: skip

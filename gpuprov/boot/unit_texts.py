"""Files with which a host's next boot ends with GPUs for containers: units, rules and lists, as text.

Each {python} stands for the Python that runs the boot program. boot/prepare.py decides which host gets what.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuprov.facts import watch
from gpuprov.facts.boot import (
    MARK,
    NODES,
    PERSISTENCE,
    PERSISTENCE_PROGRAM,
    PROGRAM,
    REFRESH,
    SERVE_SOCKET,
    SOCKETS,
    UDEV_RULES,
)

# All that starts containers at boot; a unit that a host lacks costs nothing. user@.service, for rootless engines, is
# a template: only its own files can order it (USERS_TEXT).
_ENGINES = (
    "docker.service containerd.service crio.service podman-restart.service k3s.service k3s-agent.service "
    "rke2-server.service rke2-agent.service kubelet.service snap.microk8s.daemon-containerd.service"
)
# A driver that hangs delays a boot and does not stop it: engines come after these units, and do not require them. A
# process that hangs in the kernel ignores signals: systemd gives it up after four times TimeoutStopSec.
_BOUNDED = "TimeoutStartSec={seconds}\nTimeoutStopSec=5"
NODES_TEXT = f"""\
{MARK}: device nodes do not outlive a boot, and the driver makes its own only when a program first asks for them.
[Unit]
Description=NVIDIA device nodes, and their links in /dev/char (gpuprov)
After=systemd-modules-load.service
Before={_ENGINES}
Wants={SOCKETS}

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={{python}} -I {PROGRAM} nodes
{_BOUNDED.format(seconds=90)}

[Install]
WantedBy=multi-user.target
"""
# Not after the daemons whose sockets stand in the specification: engines would wait for them. SOCKETS adds those.
REFRESH_TEXT = f"""\
{MARK}: rewrites /etc/cdi/nvidia.json if it is out of date; looks, and writes nothing, if it is up to date.
[Unit]
Description=CDI specification of the NVIDIA driver and its devices (gpuprov)
After={NODES}
Before={_ENGINES}
StartLimitIntervalSec=0

[Service]
Type=oneshot
ExecStart={{python}} -I {PROGRAM} refresh
{_BOUNDED.format(seconds=90)}

[Install]
WantedBy=multi-user.target
"""
# A path unit would not do: for a folder in /run that is missing it watches /run, and may miss other changes meanwhile.
SOCKETS_TEXT = f"""\
{MARK}: the driver's daemons make their sockets while engines start already.
[Unit]
Description=CDI specification with the sockets of the NVIDIA driver's daemons (gpuprov)
After={REFRESH} {PERSISTENCE} nvidia-fabricmanager.service

[Service]
Type=oneshot
# {REFRESH} shows what is wrong.
ExecStart=-{{python}} -I {PROGRAM} refresh
{_BOUNDED.format(seconds=90)}
"""
USERS_TEXT = f"""\
{MARK}: a user's rootless engine starts its containers after the specification is up to date.
[Unit]
After={REFRESH}
"""
# It replaces the file of that name for all users.
ROOT_TEXT = f"{MARK}: root's login, and root's engines' sessions, wait for no driver.\n"
# Libraries come with a new /etc/ld.so.cache, modules with a new modules.dep, MIG instances with nodes in nvidia-caps.
WATCH_TEXT = f"""\
{MARK}: a driver's libraries, its modules or MIG instances come and go; udev tells of GPUs ({UDEV_RULES}).
[Unit]
Description=Watch for another NVIDIA driver or other devices (gpuprov)

[Path]
PathChanged=/etc/ld.so.cache
PathChanged=/lib/modules/%v/modules.dep
PathChanged=/dev/nvidia-caps
Unit={REFRESH}

[Install]
WantedBy=multi-user.target
"""
# As in NVIDIA's template (nvidia-persistenced, init/systemd), but for its user: the .run makes none.
PERSISTENCE_TEXT = f"""\
{MARK}: the .run brings the program without a unit. It keeps GPUs initialised while nobody uses them.
[Unit]
Description=NVIDIA Persistence Daemon
After={NODES}
# Without a driver it could only fail; why there is none, {NODES} says.
ConditionPathExists=/proc/driver/nvidia/version

[Service]
Type=forking
PIDFile=/run/nvidia-persistenced/nvidia-persistenced.pid
ExecStart={PERSISTENCE_PROGRAM} --verbose
ExecStopPost=/bin/rm -rf /run/nvidia-persistenced
Restart=on-failure

[Install]
WantedBy=multi-user.target
"""
# systemd makes the sockets, so the service needs no right to: it runs as a user of its own without a network. Some of
# these settings mount another /proc, and in a system container /proc/driver may be a mount: it is taken along.
SERVE_SOCKET_TEXT = f"""\
{MARK}: the addresses of nvidia-docker-plugin's REST interface, for this host alone.
[Unit]
Description=GPU arguments and status for nvidia-docker scripts: sockets (gpuprov)

[Socket]
ListenStream=127.0.0.1:3476
ListenStream=/run/gpuprov/serve.sock
SocketUser=root
SocketGroup=root
SocketMode=0600
DirectoryMode=0755
RemoveOnStop=yes
IPAddressDeny=any
IPAddressAllow=localhost

[Install]
WantedBy=multi-user.target
"""
# In images: the unit is the package's, and a copy may have no GPU.
DRIVEN_TEXT = f"""\
{MARK}: copies of this image without a GPU have nothing for it to do.
[Unit]
After={NODES}
ConditionPathExists=/proc/driver/nvidia/version
"""
# In images: the keys are taken out of it, and not every distribution makes new ones.
SSH_KEYS_TEXT = f"""\
{MARK}: an image has no SSH host keys; each copy makes its own, unless cloud-init has.
[Unit]
Description=SSH host keys of this copy of the image (gpuprov)
ConditionPathExistsGlob=!/etc/ssh/ssh_host_*_key
After=cloud-init.service
Before=ssh.service sshd.service

[Service]
Type=oneshot
ExecStart=/usr/bin/ssh-keygen -A

[Install]
WantedBy=multi-user.target
"""
SERVE_TEXT = f"""\
{MARK}: answers GET on the sockets of {SERVE_SOCKET}; reads, and changes nothing.
[Unit]
Description=GPU arguments and status for nvidia-docker scripts (gpuprov)
Requires={SERVE_SOCKET}
After={SERVE_SOCKET} {NODES}

[Service]
ExecStart={{python}} -I {PROGRAM} serve
DynamicUser=yes
CapabilityBoundingSet=
AmbientCapabilities=
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateNetwork=yes
PrivateIPC=yes
RestrictAddressFamilies=AF_UNIX
IPAddressDeny=any
IPAddressAllow=localhost
DevicePolicy=closed
DeviceAllow=char-nvidia* rw
ProtectProc=invisible
BindReadOnlyPaths=-/proc/driver -/proc/devices
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM
UMask=0077
KeyringMode=private
MemoryMax=256M
TasksMax=32
LimitNOFILE=256
"""
_START = f"/bin/systemctl --no-block start {REFRESH}"
UDEV_TEXT = f"""\
{MARK}: the driver is loaded or unloaded, a GPU is bound to it or unbound.
ACTION=="add|remove", SUBSYSTEM=="module", KERNEL=="nvidia", RUN+="{_START}"
ACTION=="bind|unbind", SUBSYSTEM=="pci", ATTR{{vendor}}=="0x10de", ATTR{{class}}=="0x03*", RUN+="{_START}"
"""
# nvidia-uvm is loaded by no alias: CUDA's first user would have to be root.
MODULES_TEXT = f"{MARK}: loaded at boot.\nnvidia\nnvidia-uvm\n"
# gpuprov_watch: agent/watch.py is the program, boot/watch.py fills in the rest.
CHECK_TEXT = f"""\
{MARK}: checks and verifies this host, changes nothing, and writes the metrics (gpuprov_watch).
[Unit]
Description=Check and verification of the GPUs for containers (gpuprov)
Documentation=https://prometheus.io/docs/guides/node-exporter/
After=network-online.target docker.service containerd.service crio.service
ConditionPathExists={watch.STORED}

[Service]
Type=oneshot
ExecStart={{python}} -I {watch.PROGRAM} watch
Environment=HOME=/root
TimeoutStartSec=30min
Nice=19
IOSchedulingClass=idle
UMask=0077
# /usr, /boot and /etc are read-only. What it starts are containers, whose own rules must still fit.
ProtectSystem=full
ProtectHome=read-only
PrivateTmp=yes
ProtectClock=yes
ProtectHostname=yes
LockPersonality=yes
RestrictRealtime=yes
"""
CHECK_TIMER_TEXT = f"""\
{MARK}: how often this host is watched (gpuprov_watch).
[Unit]
Description=Check and verification of the GPUs for containers, {{schedule}} (gpuprov)

[Timer]
OnCalendar={{schedule}}
RandomizedDelaySec={{delay}}
Persistent=true

[Install]
WantedBy=timers.target
"""


def mig_text(layout: Sequence[tuple[int, str]]) -> str:
    """Return the unit that divides the GPUs of a layout (index → text, mig.py) at boot: MIG devices do not outlive one.

    From Hopper on the mode does not either. If MIG devices exist already it does nothing.
    """
    steps = "; ".join(f"nvidia-smi -i {index} -mig 1 && {_making(index, text)}" for index, text in layout)
    return f"""\
{MARK}: MIG devices do not outlive a boot.
[Unit]
Description=MIG devices of NVIDIA GPUs (gpuprov_mig_layout)
After={NODES} {PERSISTENCE}
Before={REFRESH} {_ENGINES}

[Service]
Type=oneshot
RemainAfterExit=yes
{_BOUNDED.format(seconds=120 + 60 * len(layout))}
ExecStart=/bin/sh -c 'nvidia-smi mig -lgi | grep -q " MIG " && exit 0; {steps}'

[Install]
WantedBy=multi-user.target
"""


def _making(index: int, text: str) -> str:
    if not text.startswith("all-"):
        return f"nvidia-smi mig -i {index} -cgi {text} -C"
    # The first must succeed; the others repeat until there is no room left.
    make = f"nvidia-smi mig -i {index} -cgi {text[4:]} -C"
    return f"{make} && while {make}; do :; done"

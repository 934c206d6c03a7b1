"""NVIDIA's retired repositories for apt, with stand-ins of the packages of nvidia-docker 1 and 2.

Names, dependencies, folders, paths and what the packages' scripts do are NVIDIA's. The repositories' own address is
theirs, too: a host reaches the lab's server by it with apt's option for a proxy (`PROXY`).
"""

from pathlib import Path

from tests.lab.nvidia_toolkit import NAMES, PACKAGES, files_of
from tests.lab.repository import build_package, build_repository, sign, stand_in

TOOLKIT, RUNTIME, DOCKER2, DOCKER1 = "1.13.5-1", "3.13.0-1", "2.13.0-1", "1.0.1-1"
PACKAGES_OF_2 = (*NAMES, "nvidia-container-runtime", "nvidia-docker2")
# As the installation guides of their time had it; the server has them as a proxy would ask for them.
SOURCES = """\
deb http://nvidia.github.io/libnvidia-container/stable/debian10/$(ARCH) /
deb http://nvidia.github.io/nvidia-container-runtime/stable/debian10/$(ARCH) /
deb http://nvidia.github.io/nvidia-docker/debian10/$(ARCH) /
"""
PROXY = 'Acquire::http::Proxy::nvidia.github.io "{url}";\n'
CONFIG = 'disable-require = false\n\n[nvidia-container-cli]\nload-kmods = true\nldconfig = "@/sbin/ldconfig"\n'
DAEMON_JSON = """\
{
    "runtimes": {
        "nvidia": {
            "path": "nvidia-container-runtime",
            "runtimeArgs": []
        }
    }
}
"""
_PLUGIN = '''#!/usr/bin/python3
"""A volume driver with docker's protocol of plugins: the volumes that nvidia-docker-plugin offers."""
import http.server, json, os, socketserver

ROOT, SOCKET = "/var/lib/nvidia-docker/volumes", "/run/docker/plugins/nvidia-docker.sock"


def answer(path, asked):
    name = asked.get("Name", "")
    place = os.path.join(ROOT, name)
    if path == "/Plugin.Activate":
        return {"Implements": ["VolumeDriver"]}
    if path == "/VolumeDriver.Create":
        os.makedirs(place, exist_ok=True)
    elif path == "/VolumeDriver.Remove":
        os.rmdir(place)
    elif path in ("/VolumeDriver.Mount", "/VolumeDriver.Path"):
        return {"Mountpoint": place, "Err": ""}
    elif path == "/VolumeDriver.Get":
        there = os.path.isdir(place)
        return {"Volume": {"Name": name, "Mountpoint": place}, "Err": ""} if there else {"Err": "no such volume"}
    elif path == "/VolumeDriver.List":
        names = os.listdir(ROOT) if os.path.isdir(ROOT) else []
        return {"Volumes": [{"Name": one, "Mountpoint": os.path.join(ROOT, one)} for one in names], "Err": ""}
    elif path == "/VolumeDriver.Capabilities":
        return {"Capabilities": {"Scope": "local"}}
    return {"Err": ""}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.dumps(answer(self.path, json.loads(text or b"{}"))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self):
        return "docker"


os.makedirs(os.path.dirname(SOCKET), exist_ok=True)
if os.path.exists(SOCKET):
    os.unlink(SOCKET)
socketserver.ThreadingUnixStreamServer(SOCKET, Handler).serve_forever()
'''
_UNIT = """\
[Unit]
Description=NVIDIA Docker plugin

[Service]
ExecStart=/usr/bin/nvidia-docker-plugin

[Install]
WantedBy=multi-user.target
"""
_POSTINST = """#!/bin/sh
set -e
if [ "$1" = configure ]; then
    id -u nvidia-docker >/dev/null 2>&1 ||
        useradd -r -M -d /var/lib/nvidia-docker -s /usr/sbin/nologin -c "NVIDIA Docker plugin" nvidia-docker
    chown nvidia-docker: /var/lib/nvidia-docker
    systemctl daemon-reload
    systemctl enable --now nvidia-docker.service
fi
"""
_PRERM = """#!/bin/sh
set -e
if [ "$1" = remove ]; then
    docker volume ls | awk '{if ($1 == "nvidia-docker") print $2}' | xargs -r docker volume rm || true
    systemctl disable --now nvidia-docker.service
fi
"""
_POSTRM = """#!/bin/sh
set -e
if [ "$1" = purge ]; then
    id -u nvidia-docker >/dev/null 2>&1 && userdel nvidia-docker || true
fi
"""


def build_retired(www: Path, gnupg: Path) -> str:
    """Build the three repositories below the server's folder `www`. Return the fingerprint of their key."""
    folder = www / "http:/nvidia.github.io"
    libraries = folder / "libnvidia-container/stable/debian10/amd64"
    runtimes = folder / "nvidia-container-runtime/stable/debian10/amd64"
    docker = folder / "nvidia-docker/debian10/amd64"
    for place in (libraries, runtimes, docker):
        fingerprint = build_repository(place, gnupg)
    for name, depends in PACKAGES.items():
        files = files_of(name)
        if name == "nvidia-container-toolkit-base":
            files |= {"etc/nvidia-container-runtime/config.toml": CONFIG}
            files |= {"DEBIAN/conffiles": "/etc/nvidia-container-runtime/config.toml\n"}
        build_package(libraries, stand_in(name, TOOLKIT, depends.format(version=TOOLKIT)), files)
    needs = "nvidia-container-toolkit (>= 1.13.0)"
    note = {"usr/share/doc/nvidia-container-runtime/copyright": "a stand-in\n"}
    build_package(runtimes, stand_in("nvidia-container-runtime", RUNTIME, needs), note)
    second = {
        "usr/bin/nvidia-docker": '#!/bin/sh\nexec docker "$@"\n',
        "etc/docker/daemon.json": DAEMON_JSON,
        "DEBIAN/conffiles": "/etc/docker/daemon.json\n",
    }
    build_package(docker, stand_in("nvidia-docker2", DOCKER2, needs), second)
    first = {
        "usr/bin/nvidia-docker": '#!/bin/sh\nexec docker "$@"\n',
        "usr/bin/nvidia-docker-plugin": _PLUGIN,
        "lib/systemd/system/nvidia-docker.service": _UNIT,
        "var/lib/nvidia-docker/.keep": "",
        "DEBIAN/postinst": _POSTINST,
        "DEBIAN/prerm": _PRERM,
        "DEBIAN/postrm": _POSTRM,
    }
    build_package(docker, stand_in("nvidia-docker", DOCKER1), first)
    for place in (libraries, runtimes, docker):
        sign(place, gnupg)
    return fingerprint

"""Answer requests to `gpuprov serve`: map a path and query to a response in the form of nvidia-docker-plugin 1.0.

It does not use sockets. Form: NVIDIA's wiki of nvidia-docker 1.0, page nvidia-docker-plugin, "REST API".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable
from urllib.parse import parse_qs, urlsplit

from gpuprov.boot.gpu_report import GpuReport, info_text, status_text
from gpuprov.boot.plain_gpus import granted_flags
from gpuprov.engines.plain_flags import Device, PlainFlags, shell_words
from gpuprov.protocol.errors import GpuprovError

# DNS rebinding: a page in a browser on this host can use a name that resolves to 127.0.0.1. The browser then sends that
# name as Host.
_HOSTS = frozenset(f"{name}{port}" for name in ("localhost", "127.0.0.1") for port in ("", ":3476"))
_VOLUME = "nvidia_driver"
_GPU = re.compile(r"(all|\d{1,3}(:\d{1,3})?|(GPU|MIG)-[0-9a-fA-F/-]{1,80})\Z")
_MOST_GPUS = 64
_MOST_FIELDS = 8
_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"
# Only the container's path if it equals the host's path with all rights: old programs read the text as a path.
_RIGHTS = "rwm"


@dataclass(frozen=True)
class Answer:
    """An HTTP status, the body and its type."""

    status: int
    body: str
    type: str = _TEXT


def refusal(status: int, sentence: str) -> Answer:
    """Return an error of no path, or of one that may be /docker/cli: a shell puts its text into a command of docker's.

    The first word of a sentence would be an image there.
    """
    return Answer(status, f"{_as_option(sentence)}\n")


class _BadQueryError(Exception):
    """The request is invalid; the text says why."""


Query = Mapping[str, list[str]]


class Answers:
    """The table of paths. `flags` returns the plain flags of some GPUs, `report` the GPU report."""

    def __init__(self, report: GpuReport, flags: Callable[[str], PlainFlags] = granted_flags) -> None:
        self._report = report
        self._flags = flags
        table: dict[str, Callable[[Query], Answer]] = {
            "/docker/cli": self._cli,
            "/docker/cli/json": self._cli_json,
            "/gpu/info": lambda _: Answer(200, info_text(report.read())),
            "/gpu/info/json": lambda _: _json(_info(report.read())),
            "/gpu/status": lambda _: Answer(200, status_text(report.read())),
            "/gpu/status/json": lambda _: _json({"Devices": report.read()["Status"]}),
        }
        self._table = {f"{version}{path}": answer for version in ("", "/v1.0") for path, answer in table.items()}

    def answer(self, method: str, target: str, hosts: list[str]) -> Answer:
        """Return the answer. `hosts` are the values of the header Host; exactly one must name this machine."""
        if len(hosts) != 1 or hosts[0].strip().lower() not in _HOSTS:
            return refusal(403, "only requests to localhost are answered")
        try:
            parts = urlsplit(target)
        except ValueError:
            return refusal(400, "the request's target is not valid")
        found = self._table.get(parts.path) if target.startswith("/") and not target.startswith("//") else None
        if found is None:
            return refusal(404, f"there is no such path; there are {' '.join(sorted(self._table)[:6])}")
        if method != "GET":
            return refusal(405, "only GET is answered")
        failed = _as_option if found == self._cli else str
        try:
            return found(parse_qs(parts.query, keep_blank_values=True, max_num_fields=_MOST_FIELDS))
        except (_BadQueryError, ValueError) as error:
            return Answer(400, f"{failed(str(error))}\n")
        except GpuprovError as error:
            return Answer(500, f"{failed(error.problems[0].what)}\n")
        except OSError as error:  # for example, /tmp is full
            return Answer(500, f"{failed(str(error))}\n")
        except Exception as error:  # a client that hears nothing takes the empty answer for no flags
            return Answer(500, f"{failed(f'internal error: {type(error).__name__}: {error}')}\n")

    def _cli(self, query: Query) -> Answer:
        # `vol` chose among the plugin's volumes; gpuprov mounts the driver's files one by one.
        return Answer(200, " ".join(shell_words(self._asked(query))))

    def _cli_json(self, query: Query) -> Answer:
        flags = self._asked(query)
        document = {
            "VolumeDriver": "",
            "Volumes": [f"{mount.source}:{mount.target}:ro" for mount in flags.mounts],
            "Devices": [_device(device) for device in flags.devices],
            # Not the plugin's; a client that ignores them still has the devices and the files.
            "Environment": list(flags.environment),
            "GroupAdd": [str(group) for group in flags.groups],
        }
        return _json(document)

    def _asked(self, query: Query) -> PlainFlags:
        volumes = _words(query, "vol")
        other = next((name for name in volumes if name not in (_VOLUME, "*")), "")
        if other:
            raise _BadQueryError(f"there is no volume {_printable(other)}, only {_VOLUME}")
        gpus = _words(query, "dev")
        wrong = next((name for name in gpus if name != "*" and not _GPU.match(name)), "")
        if wrong:
            raise _BadQueryError(f"{_printable(wrong)} is neither a GPU's index nor its UUID")
        if len(gpus) > _MOST_GPUS:
            raise _BadQueryError("too many GPUs")
        return self._flags("all" if not gpus or "*" in gpus else ",".join(gpus))


def _info(report: Mapping[str, Any]) -> dict[str, Any]:
    return {"Version": report["Version"], "Devices": report["Info"]}


def _words(query: Query, name: str) -> list[str]:
    """Return the words of a parameter; the plus sign between them is already decoded to a blank."""
    return [word for value in query.get(name, ()) for word in value.replace(",", " ").split()]


def _device(device: Device) -> str:
    plain = device.source == device.target and device.access == _RIGHTS
    return device.source if plain else f"{device.source}:{device.target}:{device.access}"


def _as_option(text: str) -> str:
    """Return an error as one option that docker does not know: docker then fails and starts no container."""
    return "--gpuprov-error-" + re.sub(r"[^A-Za-z0-9_./]+", "-", text).strip("-")


def _printable(text: str) -> str:
    return re.sub(r"[^ -~]", "?", text[:80])


def _json(document: Mapping[str, Any]) -> Answer:
    return Answer(200, json.dumps(document) + "\n", _JSON)

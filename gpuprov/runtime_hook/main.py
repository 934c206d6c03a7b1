"""The runtime's `create`: edits config.json for a GPU container, hands over to runc; fails closed."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]  # without signal, which brings enum
import posix
import sys

from . import jsonio, record
from .config import config_id
from .decision import SETTINGS, Decision, decide
from .device_nodes import link_nodes, masking_hook
from .edits import apply_edits, drop_nvidia_hooks
from .errors import Refused
from .files import replace_file
from .links import prepare_root
from .volumes import mounts_to_make

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_BUNDLE_FLAGS = ("-b", "-bundle", "--bundle")
# What precedes the command in a call of runc or crun, and has a value; and the commands that name a container.
_VALUE_FLAGS = ("--root", "--log", "--log-format", "--log-level", "--criu", "--rootless", "--cgroup-manager")
_OTHER_COMMANDS = (
    "checkpoint", "delete", "events", "exec", "kill", "pause", "ps", "restore", "resume", "run", "start", "state",
    "update",
)  # fmt: skip
_LONGEST_LINE = 2000


def main(low_level: str, arguments: list[str]) -> NoReturn:
    """Serve one call: `low_level` is runc's path, `arguments` what stood behind the runtime's name. Ends in runc."""
    try:
        if is_create(arguments):
            prepare(bundle_of(arguments) or posix.getcwd(), container=arguments[-1])
    except Refused as refused:
        refuse(arguments, f"gpuprov: {refused}")
    except Exception as error:  # a fault of ours must not let a half-equipped container start, nor print a traceback
        refuse(arguments, failure(error))
    # Python ignores these two; a low-level runtime in C would hand that down to the container.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        posix.execv(low_level, [low_level, *arguments])
    except OSError as error:
        refuse(arguments, f"gpuprov: {low_level} can't be started: {error.strerror}")


def failure(error: Exception) -> str:
    """Return the line for an error that is no refusal: what a file system does is no fault of ours."""
    if isinstance(error, OSError) and error.strerror:
        return f"gpuprov: the container's files can't be prepared: {error.filename or 'a file'}: {error.strerror}"
    return f"gpuprov: internal error {type(error).__name__}: {error}: please report this"


def is_create(arguments: list[str]) -> bool:
    """Say whether this is a `create`: not the value of a flag, nor what another command is for (`delete create`)."""
    for word, previous in zip(arguments, ["", *arguments]):
        if previous in _BUNDLE_FLAGS or previous in _VALUE_FLAGS:
            continue
        if word == "create":
            return True
        if word in _OTHER_COMMANDS:
            return False
    return False


def bundle_of(arguments: list[str]) -> str:
    """Return the bundle's folder as the arguments name it, nothing if they don't. Raises Refused for a flag alone."""
    bundle = ""
    for place, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag not in _BUNDLE_FLAGS:
            continue
        if not equals and place + 1 == len(arguments):
            raise Refused(f"{flag} stands without a folder")
        bundle = value if equals else arguments[place + 1]
    return bundle


def prepare(bundle: str, settings_paths: tuple[str, str] = SETTINGS, *, container: str = "") -> None:
    """Equip the bundle's container if it asks for GPUs; leave it untouched, bit for bit, if it does not.

    What it was given is kept under its id, if `container` has one.
    """
    decision = decide(bundle, settings_paths)
    if decision is None:
        return
    config, equipment, path = decision.config, decision.equipment, f"{bundle}/config.json"
    if equipment.edits.get("mounts"):
        equipment.edits["mounts"] = mounts_to_make(decision.root, decision.volumes, equipment.edits["mounts"])
    prepare_root(decision.root, equipment, cuda_compat=decision.settings.cuda_compat)
    masking = masking_hook(config, decision.root_path)
    if masking:
        equipment.edits.setdefault("hooks", []).append(masking)
    apply_edits(config, equipment.edits)
    drop_nvidia_hooks(config)
    link_nodes(equipment.edits.get("deviceNodes") or [])
    try:
        status = posix.stat(path)
        replace_file(path, jsonio.dumps(config), status.st_mode & 0o7777, (status.st_uid, status.st_gid), ".gpuprov")
    except OSError as error:
        raise Refused(f"{path} can't be written: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"{path} can't be written: {error}") from None
    _log(decision, bundle)
    record.keep(container, bundle, decision, "runtime")


def _log(decision: Decision, bundle: str) -> None:
    request, devices = decision.request, decision.request.devices
    given = ",".join(devices or ()) or "driver files, no device"
    record.log(
        decision.settings, "info",
        f"{config_id(bundle)}: {given}; {','.join(sorted(request.capabilities)) or 'no capability'}; "
        + "; ".join([*request.decisions, *decision.equipment.decisions]),
    )  # fmt: skip


def refuse(arguments: list[str], message: str) -> NoReturn:
    """End with the message where the engine looks for it: in runc's log, and on stderr."""
    line = printable(message)
    path = _value_of("--log", arguments)
    if path:
        _append(path, jsonio.dumps({"level": "error", "msg": line, "time": _now()}) + "\n")
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    posix._exit(1)


def printable(message: str) -> str:
    """Return one line: an image's words stand in it, and are no commands to a terminal."""
    text = "".join(character if character.isprintable() else " " for character in message[:_LONGEST_LINE])
    return " ".join(text.split())


def _value_of(flag: str, arguments: list[str]) -> str:
    for place, word in enumerate(arguments[:-1]):
        if word == flag:
            return arguments[place + 1]
    return next((word[len(flag) + 1 :] for word in arguments if word.startswith(f"{flag}=")), "")


def _append(path: str, text: str) -> None:
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        pass  # stderr has it too


def _now() -> str:
    import time

    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

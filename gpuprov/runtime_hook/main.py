"""The runtime's `create`: reads the request, edits config.json, hands over to runc; fails closed."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]  # without signal, which brings enum
import os
import sys

from . import jsonio
from .edits import apply_edits
from .errors import Refused
from .request import Request, parse_request
from .requirements import require
from .rootfs import LibraryFolder
from .settings import SETTINGS_PATH, Settings, parse_settings
from .specification import find_devices, load_specification, unusable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_BUNDLE_FLAGS = ("-b", "-bundle", "--bundle")
# What stands before the command in a call of runc or crun, and has a value; and the commands that name a container.
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
            prepare(bundle_of(arguments) or os.getcwd(), SETTINGS_PATH)
    except Refused as refused:
        refuse(arguments, f"gpuprov: {refused}")
    except Exception as error:  # a fault of ours must not let a half-equipped container start, nor print a traceback
        refuse(arguments, f"gpuprov: internal error {type(error).__name__}: {error}: please report this")
    # Python ignores these two; a low-level runtime in C would hand that down to the container.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execv(low_level, [low_level, *arguments])
    except OSError as error:
        refuse(arguments, f"gpuprov: {low_level} can't be started: {error.strerror}")


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


def prepare(bundle: str, settings_path: str) -> None:
    """Edit the bundle's config.json if the container asks for GPUs; leave it untouched, bit for bit, if it does not."""
    path = f"{bundle}/config.json"
    try:
        # runc too reads what is no UTF-8 as U+FFFD.
        with open(path, encoding="utf-8", errors="replace") as file:
            config = jsonio.loads(file.read())
    except OSError:
        # runc reads it next, and says what is wrong with it.
        return
    except ValueError as error:
        # runc takes some things for JSON that are none (something after the end): a GPU container must not slip by.
        raise Refused(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        return
    settings, trouble = read_settings(settings_path)
    request = parse_request(config, settings)
    if request is None:
        return
    if trouble:
        raise Refused(trouble)
    equip(config, request, settings, root_of(config, bundle))
    try:
        write(path, jsonio.dumps(config))
    except OSError as error:
        raise Refused(f"{path} can't be written: {error.strerror}") from None


def read_settings(path: str) -> tuple[Settings, str]:
    """Return the settings, and what is wrong with their file: that concerns none but GPU containers."""
    try:
        with open(path, encoding="utf-8") as file:
            return parse_settings(file.read()), ""
    except FileNotFoundError:
        return Settings({}), ""
    except (OSError, UnicodeDecodeError) as error:
        return Settings({}), f"{path} can't be read: {error}"
    except Refused as refused:
        return Settings({}), str(refused)


def equip(config: dict[str, Any], request: Request, settings: Settings, root: str) -> None:
    """Put into the configuration what the request asks for. Raises Refused if that can't be had."""
    specification = load_specification(settings.specification)
    require(request.requirements, specification.host)
    devices = find_devices(specification, request.devices)
    try:
        apply_edits(config, specification.common, devices, request.capabilities, LibraryFolder(root))
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(unusable(settings.specification, error)) from None


def root_of(config: dict[str, Any], bundle: str) -> str:
    """Return the folder of the container's root file system."""
    root = config.get("root")
    path = root.get("path", "") if isinstance(root, dict) else ""
    return path if str(path).startswith("/") else f"{bundle}/{path}"


def write(path: str, text: str) -> None:
    """Replace a file whole, its mode and owner kept."""
    status = os.stat(path)
    temporary = f"{path}.gpuprov"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        os.fchown(handle, status.st_uid, status.st_gid)
        os.fchmod(handle, status.st_mode & 0o7777)
        file.write(text)
    os.rename(temporary, path)


def refuse(arguments: list[str], message: str) -> NoReturn:
    """End with the message where the engine looks for it: in runc's log, and on stderr."""
    # An image's words stand in it: they are no commands to a terminal.
    printable = "".join(character if character.isprintable() else " " for character in message[:_LONGEST_LINE])
    line = " ".join(printable.split())
    log = _value_of("--log", arguments)
    if log:
        _append(log, jsonio.dumps({"level": "error", "msg": line, "time": _now()}) + "\n")
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    os._exit(1)


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

"""gpuprov-container-runtime-hook: what an engine runs as an OCI hook.

prestart, createRuntime: the whole work of the runtime, by hand (`docker run --gpus` with plain runc).
createContainer: the links, the loader's cache and the driver's parameters, after an engine has applied the CDI
specification itself.
poststart, poststop: nothing. Source: OCI runtime specification 1.1, "POSIX-platform Hooks"; the state is on stdin.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]  # without signal, which brings enum
import posix
import sys
from typing import Any, NoReturn

from . import record
from .config import STATE, config_id, has_user_namespace, mounts_of, owner_of, parse_config, parse_object, root_of
from .decision import HOOK, decide
from .device_nodes import link_nodes, masked_copy
from .edits import ContainerEdits, links_of
from .errors import Refused, printable, reason
from .files import read_text
from .links import find_compatibility, inject
from .rootfs import open_root
from .settings import read_settings
from .specification import host_of
from .volumes import volumes_of, watch

_LARGEST_STATE = 1 << 20
# A start takes 0.1 s. The CDI specification has the engine end the hook later, at 30.
PATIENCE_SECONDS = 20
_STAGES = ("prestart", "createRuntime", "createContainer", "poststart", "poststop")
_USAGE = f"usage: gpuprov-container-runtime-hook {'|'.join(_STAGES)}"


def main(arguments: list[str]) -> NoReturn:
    """Serve one call; never returns. The exit code is 0 for done, 1 for refused: then the container does not start."""
    # Engines hand over their own environment, or the container's: nothing here, and nothing started here, needs it.
    posix.environ.clear()
    # What is made is for everybody in the container, whatever the caller's umask is.
    posix.umask(0o022)
    _signal.signal(_signal.SIGALRM, _give_up)
    _signal.alarm(PATIENCE_SECONDS)
    try:
        code = serve(arguments)
    except Exception as error:  # a fault of ours must neither start a half-equipped container nor print a traceback
        code = _refuse(f"gpuprov: {reason(error)}")
    posix._exit(code)


def serve(arguments: list[str]) -> int:
    """Do what the first word that is a stage says, and return the exit code. Raises Refused."""
    # Before it, engines' old configurations have flags of NVIDIA's own hook: -debug, -config FILE.
    stage = next((word for word in arguments if word in _STAGES), "")
    if stage in ("prestart", "createRuntime"):
        return _inject(*_state())
    if stage == "createContainer":
        return _finish(_state()[1], arguments)
    if stage:
        sys.stdin.buffer.read(_LARGEST_STATE)  # crun before 1.17 fails where a hook does not (crun issue 1551)
        return 0
    raise Refused(_USAGE)


def _give_up(number: int, frame: object) -> NoReturn:
    # A file system that does not answer, or an engine that sends no state, keeps the hook waiting.
    what = f"the container's files were not ready after {PATIENCE_SECONDS} s"
    posix._exit(_refuse(f"gpuprov: {what}: something does not answer"))


def _refuse(message: str) -> int:
    sys.stderr.write(printable(message) + "\n")
    sys.stderr.flush()
    return 1


def _state() -> tuple[dict[str, Any], str]:
    """Return the state of the container, and its bundle. Raises Refused for anything else on stdin."""
    content = sys.stdin.buffer.read(_LARGEST_STATE)
    try:
        state = parse_object(content.decode("utf-8", "replace"), STATE)
    except ValueError as error:
        raise Refused(f"standard input holds no OCI state: {error}") from None
    if not isinstance(state, dict) or not isinstance(state.get("bundle", ""), str):
        raise Refused("standard input holds no OCI state")
    # Before runtime specification 1.0 it was called bundlePath.
    bundle = state.get("bundle") or state.get("bundlePath")
    if not bundle or not isinstance(bundle, str):
        raise Refused("the OCI state on standard input names no bundle")
    return state, bundle


def _inject(state: dict[str, Any], bundle: str) -> int:
    decision = decide(bundle, HOOK)
    if decision is None:
        return 0
    pid = state.get("pid")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        raise Refused("the OCI state on standard input names no process")
    from .prestart import inject_into  # with `_ctypes`, which no other stage needs

    record.log(decision.settings, "info", f"{config_id(bundle)}: {','.join(decision.request.devices or ())} by hook")
    link_nodes(decision.edits.cdi.get("deviceNodes") or [])
    # Before this process is in the container's mount namespace, where /run may be another.
    identifier = str(state.get("id", ""))
    record.keep(identifier, bundle, decision.record)
    inject_into(pid, identifier, decision)
    return 0


def _finish(bundle: str, arguments: list[str]) -> int:
    """Make what the specification's hook says, in the container's root: engines have mounted everything by then."""
    path = f"{bundle}/config.json"
    config = parse_config(path, read_text(path) or "null")
    if not config:
        raise Refused(f"{path} can't be read")
    settings, trouble = read_settings()
    if trouble:
        raise Refused(trouble)
    places = [str(mount.get("destination", "")) for mount in mounts_of(config)]
    mounted = [{"containerPath": place} for place in places if place.startswith("/usr/lib")]
    edits = ContainerEdits({"mounts": mounted}, links_of(arguments), host_of(arguments).get("driver", ""))
    root = open_root(root_of(config, bundle), (0, 0) if _in_user_namespace() else owner_of(config))
    watch(root, volumes_of(config, bundle))
    find_compatibility(root, edits, wanted=settings.cuda_compat)
    inject(root, edits)
    copy = "" if _in_user_namespace() or has_user_namespace(config) else masked_copy()
    if copy:
        from .prestart import mask_params  # with `_ctypes`

        mask_params(root, copy, config)
    return 0


def _in_user_namespace() -> bool:
    """Say whether this process is in the container's own user namespace, where its root user is number 0."""
    return (read_text("/proc/self/uid_map") or "0 0").split()[:2] != ["0", "0"]

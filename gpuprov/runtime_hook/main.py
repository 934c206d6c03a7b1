"""The runtime's `create`: edits config.json for a GPU container, hands over to runc; fails closed."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]  # without signal, which brings enum
import posix
from typing import NoReturn

from . import jsonio, record
from .config import config_id
from .decision import RUNTIME, SETTINGS, decide
from .device_nodes import link_nodes, masked_copy
from .edits import apply_edits, drop_nvidia_hooks
from .errors import Refused, reason, refuse
from .files import replace_file
from .links import inject


def main(low_level: str, bundle: str, log: str, arguments: list[str]) -> NoReturn:
    """Serve one `create`; ends in the low-level runtime.

    The launcher has read the `arguments` behind the runtime's name: the low-level runtime's path, the bundle, and the
    file in which the engine looks for errors ("" for none).
    """
    try:
        prepare(bundle, container=arguments[-1])
    except Exception as error:  # a fault of ours must not let a half-equipped container start, nor print a traceback
        refuse(log, f"gpuprov: {reason(error)}")
    # Python ignores these two; a low-level runtime in C would hand that down to the container.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    try:
        posix.execv(low_level, [low_level, *arguments])
    except OSError as error:
        refuse(log, f"gpuprov: {low_level} can't be started: {error.strerror}")


def prepare(bundle: str, settings_paths: tuple[str, str] = SETTINGS, *, container: str = "") -> None:
    """Give the bundle's container its GPUs if it asks for any; leave it untouched, bit for bit, if it does not.

    What it was given is kept under its id, if `container` has one.
    """
    decision = decide(bundle, RUNTIME, settings_paths)
    if decision is None:
        return
    config, edits, path = decision.config, decision.edits, f"{bundle}/config.json"
    assert decision.root is not None
    inject(decision.root, edits)
    if edits.masking and masked_copy():
        edits.cdi.setdefault("hooks", []).append(edits.masking)
    apply_edits(config, edits.cdi)
    drop_nvidia_hooks(config)
    link_nodes(edits.cdi.get("deviceNodes") or [])
    try:
        status = posix.stat(path)
        replace_file(path, jsonio.dumps(config), status.st_mode & 0o7777, (status.st_uid, status.st_gid), ".gpuprov")
    except (OSError, ValueError) as error:
        raise Refused(f"{path} can't be written: {getattr(error, 'strerror', error)}") from None
    given = ",".join(decision.request.devices or ()) or "driver files, no device"
    capabilities = ",".join(sorted(decision.request.capabilities)) or "no capability"
    record.log(
        decision.settings, "info", f"{config_id(bundle)}: {given}; {capabilities}; " + "; ".join(decision.sentences)
    )
    record.keep(container, bundle, decision.record)

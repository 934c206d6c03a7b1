"""The licence of virtual GPUs: gridd.conf from the GRID driver's template, the token's file, and nvidia-gridd.

Source: NVIDIA's Virtual GPU Client Licensing User Guide (names of files and keys); Azure/azhpc-images (settings of a
cloud that licenses its GPUs). Without a licence a virtual GPU is slow after a day.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from gpuprov.core import changes
from gpuprov.core.changes import Change, Json, Jsons, Tell, parent_of
from gpuprov.core.system import System
from gpuprov.core.units import RunUnits
from gpuprov.driver.source import DriverSource
from gpuprov.facts.gpus import GRIDD, GRIDD_CONFIG, GRIDD_TEMPLATE, TOKEN
from gpuprov.protocol.dataclass import dataclass, field
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.spec import Vgpu


def settings(licence: Vgpu) -> Mapping[str, str]:
    """Return the settings of gridd.conf; where the cloud licenses its GPUs, those that Azure documents."""
    server, _, port = licence.server.partition(":")
    feature = "" if licence.feature is None else str(licence.feature)
    found = {"FeatureType": feature, "ServerAddress": server, "ServerPort": port}
    if not (licence.token or server):
        found.update(IgnoreSP="FALSE", EnableUI="FALSE")
    return {name: value for name, value in found.items() if value}


def render(template: str, wanted: Mapping[str, str]) -> bytes:
    """Return gridd.conf: the template without the feature type and without our settings, then these."""
    ours = re.compile(rf"\s*({'|'.join(('FeatureType', *wanted))})\s*=")
    kept = [line for line in template.splitlines() if not ours.match(line)]
    added = (f"{name}={value}" for name, value in wanted.items())
    return "\n".join((*kept, "# By gpuprov: gpuprov_vgpu", *added, "")).encode()


def plan(driver: DriverSource) -> tuple[Change, ...]:
    """Return what the licence needs, to be done after the driver; nothing if it is not asked for, or done."""
    facts, licence = driver.facts, driver.spec.vgpu
    if licence is None:
        return ()
    wanted, files, starts = settings(licence), facts.files, facts.image is None
    template = files[GRIDD_TEMPLATE].content.decode("utf-8", "replace") if GRIDD_TEMPLATE in files else ""
    config, token = files.get(GRIDD_CONFIG), files.get(TOKEN)
    is_written = template and config is not None and config.content == render(template, wanted)
    has_token = token.is_roots(licence.token.encode(), 0o400) if token else not licence.token
    runs = GRIDD in facts.services.enabled and (GRIDD in facts.services.active or not starts)
    write = () if is_written and has_token else (LicenseVgpu(tuple(wanted.items()), licence.token),)
    return (*write, *(() if runs and not write else (RunUnits((GRIDD,), starts),)))


@dataclass(frozen=True)
class LicenseVgpu(Change):
    """Write gridd.conf with these settings, and the file of a token, which neither diff nor journal shows."""

    settings: tuple[tuple[str, str], ...]
    token: str = field(default="", repr=False)

    key: ClassVar[str] = "license virtual GPUs"

    def summary(self) -> str:
        return f"license virtual GPUs: {', '.join((GRIDD_CONFIG, *((TOKEN,) if self.token else ())))}"

    def _config(self, system: System) -> bytes:
        return render(system.read_text(GRIDD_TEMPLATE) or "", dict(self.settings))

    def diff(self, system: System) -> str:
        sign = "+" if self.token else "-" if system.exists(TOKEN) else ""
        secret = f"\n{sign}{TOKEN} (mode 0400; its content is not shown)" if sign else ""
        return changes.text_diff(GRIDD_CONFIG, system.read_bytes(GRIDD_CONFIG), self._config(system)) + secret

    def capture(self, system: System) -> Json:
        config, is_new = changes.capture_path(system, GRIDD_CONFIG), system.status(parent_of(TOKEN)) is None
        return {"config": config, "had_token": system.exists(TOKEN), "new_folder": is_new}

    def apply(self, system: System, tell: Tell) -> None:
        if not system.exists(GRIDD_TEMPLATE):
            what = "the installed driver takes no licence for virtual GPUs: it is not NVIDIA's GRID driver"
            step = "set gpuprov_driver_url to the .run file of the GRID driver"
            raise GpuprovError(what, f"there is no {GRIDD_TEMPLATE}", step)
        changes.write_files(system, ((GRIDD_CONFIG, self._config(system), 0o644),))
        if self.token:
            changes.write_files(system, ((TOKEN, self.token.encode(), 0o400),))
        else:
            system.remove(TOKEN)

    @classmethod
    def undo(cls, system: System, before: Json, outcome: Json | None) -> None:
        if not before["had_token"]:
            system.remove(TOKEN)
        if before["new_folder"] and not system.list_directory(parent_of(TOKEN)):
            system.remove(parent_of(TOKEN))
        changes.restore_path(system, before["config"])

    @classmethod
    def irreversible(cls, system: System, before: Json, outcome: Json | None, earlier: Jsons) -> tuple[str, ...]:
        return (f"{TOKEN}: the token before the newer one is in no journal",) if before["had_token"] else ()

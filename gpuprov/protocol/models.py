"""GPU models by PCI device id: generation, form, and what each needs. Rows and sources are in models.json. Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Literal

from gpuprov.protocol.codec import load
from gpuprov.protocol.dataclass import dataclass, fields
from gpuprov.protocol.tables import MODELS, Tables, invalid_table, require_table


@dataclass(frozen=True)
class Generation:
    """GPUs with device ids from `first` to `last`, served by driver branches from `oldest` to `newest` (0: all).

    `modules`: the supported kernel modules.
    """

    name: str
    first: str
    last: str
    modules: Literal["proprietary", "open", "both"]
    oldest: int = 0
    newest: int = 0


@dataclass(frozen=True)
class Fabric:
    """How NVLink is switched. `manager`: by the fabric manager, where switches are in sight; never by it otherwise.

    `modules`: kernel modules that are loaded before it, in this order; `packages`: what it needs besides. `board`: the
    GPUs of a whole board, which has switches; guests may have fewer GPUs, and none.
    """

    name: str
    what: str
    manager: bool
    modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    board: int = 0


@dataclass(frozen=True)
class Model:
    """A board. `form`: PCIe, HGX, NVL, Grace or workstation, "" if not known. `fabric`: the name of one.

    `mig`: it can be divided. `coherent_memory`: the driver has a mode for memory that it shares with the processor.
    `confidential`: it has a mode for confidential computing. `links`: its NVLinks where all of them are in use.
    `virtual`: device ids of subsystems that tell a virtual GPU, which NVIDIA's GRID driver serves. `options`: options
    of the proprietary module nvidia that are known to help.
    """

    name: str
    ids: tuple[str, ...]
    form: str = ""
    fabric: str = ""
    mig: bool = False
    coherent_memory: bool = False
    confidential: bool = False
    links: int = 0
    virtual: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """The lists of models.json."""

    generations: tuple[Generation, ...]
    fabrics: tuple[Fabric, ...]
    models: tuple[Model, ...]


@functools.lru_cache(4)
def models(tables: Tables) -> Table:
    """Return what these tables know of GPUs."""
    return _loaded(tables.table(MODELS))


def _loaded(data: Mapping[str, Any]) -> Table:
    return load(Table, {one.name: data.get(one.name) for one in fields(Table)}, trusted=True, exact=True)


def generation_of(device_id: str, tables: Tables) -> Generation | None:
    """Return the generation of a PCI device id (four hexadecimal digits), None for one that the tables do not know."""
    number = device_id.lower() if re.fullmatch(r"[0-9a-fA-F]{4}", device_id) else ""
    return next((row for row in models(tables).generations if row.first <= number <= row.last), None)


def model_of(device_id: str, tables: Tables) -> Model | None:
    """Return the model of a PCI device id, None for one that the tables do not know."""
    return next((row for row in models(tables).models if device_id in row.ids), None)


def fabric_of(device_id: str, tables: Tables) -> Fabric | None:
    """Return how a GPU's NVLink is switched; None if it is not, or if the switches themselves tell."""
    model = model_of(device_id, tables)
    return fabric_named(model.fabric, tables) if model else None


def fabric_named(name: str, tables: Tables) -> Fabric | None:
    """Return a row by its name."""
    return next((row for row in models(tables).fabrics if row.name == name), None)


def name_of(device_id: str, tables: Tables) -> str:
    """Return the name of a GPU's model, or of its generation; "" if the tables know neither."""
    known = model_of(device_id, tables) or generation_of(device_id, tables)
    return known.name if known else ""


def checked_models(data: Any, origin: str) -> Mapping[str, Any]:
    """Return a site's table if it is sound. Raises GpuprovError (exit code 2) that names what is wrong in it."""
    try:
        table = require_table(data, "GPU models", origin)
        found = _loaded(table)
        ids = [(one.name, number) for one in found.models for number in one.ids]
        ids += [(one.name, number) for one in found.generations for number in (one.first, one.last)]
        if wrong := next((f"{name}: {one[:20]!r}" for name, one in ids if not re.fullmatch("[0-9a-f]{4}", one)), ""):
            raise ValueError(f"{wrong} is no PCI device id, four hexadecimal digits in lower case")
        known = {one.name for one in found.fabrics} | {""}
        if wrong := next((one.name for one in found.models if one.fabric not in known), ""):
            raise ValueError(f"models: {wrong}: no such fabric")
    except ValueError as error:
        raise invalid_table(MODELS, "GPU models", origin, str(error)[:200]) from None
    return table

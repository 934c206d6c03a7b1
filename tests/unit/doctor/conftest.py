"""The host of these tests runs 550.163.01, the simulated GPU's driver: its known holes are no trouble of the host's."""

from typing import Any

import pytest

from gpuprov.protocol import tables
from gpuprov.protocol.advisories import DRIVER, TOOLKIT, Advisory, advisories, table_of

_OLD_BRANCH = Advisory("2026/5821", "2026-05-19", DRIVER, "535", "535.309.01", 8.8)


@pytest.fixture(scope="session")
def _table() -> dict[str, Any]:
    toolkit = (one for one in advisories(tables.PACKAGED) if one.product == TOOLKIT)
    return table_of((*toolkit, _OLD_BRANCH), "2026-11-22")


@pytest.fixture(autouse=True)
def _advisories_of_other_branches(monkeypatch: pytest.MonkeyPatch, _table: dict[str, Any]) -> None:
    packaged = tables.packaged
    monkeypatch.setattr(tables, "packaged", lambda name: _table if name == tables.ADVISORIES else packaged(name))

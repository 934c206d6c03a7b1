"""Files that a newer gpuprov wrote are named as such, with the version to use; none of them is called damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuprov.agent.site_tables import UPDATED, checked_servers, save_table
from gpuprov.bundle.manifest import Manifest
from gpuprov.core.journal import parse_run
from gpuprov.fleet.history import from_json
from gpuprov.protocol import tables
from gpuprov.protocol.errors import GpuprovError
from gpuprov.protocol.models import checked_models
from tests.unit.test_advisories import DOCUMENTS, run

READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "bundle": (
        lambda text: Manifest.from_bytes(text.encode()),
        '{"format": 99, "version": "12", "gpuprov": "9.1.0", "files": {"of": "another form"}}',
    ),
    "journal": (lambda text: parse_run("/0001.jsonl", text), '{"format": 99, "version": "9.1.0", "run": "install"}'),
    "report": (lambda text: from_json(json.loads(text)), '{"format": 99, "version": "9.1.0"}'),
    "releases": (lambda text: tables.checked_releases(json.loads(text), "site.json"), '{"format": 99}'),
    "servers": (lambda text: checked_servers(json.loads(text), "site.json"), '{"format": 99}'),
    "models": (lambda text: checked_models(json.loads(text), "site.json"), '{"format": 99}'),
    **{name: (lambda text, check=check: check(json.loads(text), "site.json"), '{"format": 99}')  # type: ignore[misc]
       for name, check in UPDATED.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_later_format_is_named_with_the_version_to_use(name: str) -> None:
    read, text = READERS[name]
    with pytest.raises(GpuprovError, match="a newer gpuprov made the ") as caught:
        read(text)
    (problem,) = caught.value.problems
    assert "format 99" in problem.evidence
    wanted = "gpuprov 9.1.0, or a newer one" if "9.1.0" in text else "a newer gpuprov"
    assert problem.next_step.startswith(f"run the command again with {wanted}")


def test_an_update_of_advisories_keeps_a_newer_gpuprovs_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = save_table(tables.ADVISORIES, {"format": 99, "updated": "2030-01-01", "rows": []})
    before = path.read_bytes()
    with pytest.raises(GpuprovError, match="a newer gpuprov"):
        run("update", "--from", str(DOCUMENTS))
    assert path.read_bytes() == before

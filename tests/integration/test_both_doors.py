"""Four hosts of three releases at once, from bare, by the command line; then the playbook finds nothing to do."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_ansible import play_succeeds, recap
from tests.lab import Host
from tests.lab.fixtures import Site, gpuprov

pytestmark = [pytest.mark.lab, pytest.mark.root]
_NAMES = ("bullseye", "main", "trixie", "twin")


def summary(*words: object) -> dict[str, Any]:
    """Return the last line that the command prints with --json."""
    done = gpuprov(*words, "--json")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_hosts_of_several_releases_in_one_run_and_both_doors_agree(site: Site, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(Host.reset, (site.hosts[name] for name in _NAMES)))
    hosts, page = site.inventory(*_NAMES), tmp_path / "report.html"
    first = summary("install", "--hosts", hosts, "--report", page)
    assert {host["host"]: host["result"] for host in first["hosts"]} == dict.fromkeys(_NAMES, "done"), first
    assert all(host["changed"] > 0 for host in first["hosts"])
    assert all(name in page.read_text() for name in (*_NAMES, "Debian GNU/Linux 11", "Debian GNU/Linux 13"))
    second = summary("install", "--hosts", hosts)
    assert [(host["result"], host["changed"]) for host in second["hosts"]] == [("done", 0)] * len(_NAMES), second
    # Its last role is the verification.
    done = play_succeeds("site", hosts)
    assert {name: recap(done, name)["changed"] for name in _NAMES} == dict.fromkeys(_NAMES, 0)
    verified = summary("verify", "--hosts", hosts)
    assert (verified["exit_code"], verified["causes"]) == (0, []), verified

"""`gpuprov hook explain CONTAINER --hosts` over a real sshd: as root, and by sudo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuprov.engines.containers import decision_of
from gpuprov.fleet.remote_system import RemoteSystem
from gpuprov.fleet.ssh import SshSettings, connected
from gpuprov.fleet.target import HostTarget
from gpuprov.runtime_hook import record
from gpuprov.wire.errors import GpuprovError
from gpuprov.wire.spec import HostSpec
from tests.integration.sshd import PASSWORD, Server, serving

pytestmark = pytest.mark.root
ID = "4f5c" * 16


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "containers"
    folder.mkdir(mode=0o700)
    (folder / ID).write_text(json.dumps({"format": record.FORMAT, "container": ID}))
    (folder / ID).chmod(0o600)
    monkeypatch.setattr(record, "FOLDER", str(folder))
    return folder


@pytest.mark.parametrize("user", ["root", "open", "plain"])
def test_a_decision_is_read_as_root_or_by_sudo(server: Server, kept: Path, tmp_path: Path, user: str) -> None:
    target = HostTarget(
        name="lab-a", spec=HostSpec(), address="127.0.0.1", port=server.port, user=user,
        identity_file=str(server.identity), become_password=PASSWORD if user == "plain" else "",
        ssh_options=(("UserKnownHostsFile", str(tmp_path / "known_hosts")),), ssh_config_file="/dev/null",
    )  # fmt: skip
    with connected(target, SshSettings(accept_new_host_keys=True)) as connection:
        system = RemoteSystem(connection, target)
        assert system.run(("id", "-u")).stdout == "0\n"
        assert decision_of(system, ID[:12])["container"] == ID
        with pytest.raises(GpuprovError, match="there is no container nobody; id with GPUs on this host"):
            decision_of(system, "nobody; id")

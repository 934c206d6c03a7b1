"""`gpuprov hook explain CONTAINER --hosts` over a real sshd: as root, and by sudo."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuprov.cli.main import cli
from gpuprov.engines.containers import decision_of
from gpuprov.fleet import options
from gpuprov.fleet.agent_run import RemoteSystem
from gpuprov.fleet.options import SshSettings
from gpuprov.fleet.ssh import connected
from gpuprov.protocol.errors import GpuprovError
from gpuprov.runtime_hook import record
from tests.integration.sshd import PASSWORD, Server
from tests.integration.sshd import server as server

pytestmark = pytest.mark.root
ID = "4f5c" * 16
KEPT = {
    "way": "hook", "devices": ["0"], "capabilities": ["compute"], "requirements": "", "privileged": False,
    "legacy": False, "nodes": [], "files": [], "links": [], "decisions": [],
}  # fmt: skip


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
    target = server.target(tmp_path, user)
    with connected(target, SshSettings(accept_new_host_keys=True)) as connection:
        system = RemoteSystem(connection, target)
        assert system.run(("id", "-u")).stdout == "0\n"
        assert decision_of(system, ID[:12])["container"] == ID
        with pytest.raises(GpuprovError, match="there is no container nobody; id with GPUs on this host"):
            decision_of(system, "nobody; id")


def explained(monkeypatch: pytest.MonkeyPatch, inventory: Path, *words: str, typed: str = "") -> Result:
    """Call the command line in this process, which keeps its decisions elsewhere; nobody sits at a terminal."""
    monkeypatch.setattr(options, "has_terminal", lambda: False)
    return CliRunner().invoke(cli, ["hook", "explain", ID, "--hosts", str(inventory), *words], input=typed)


def test_explain_has_host_options(server: Server, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kept / ID).write_text(json.dumps({**KEPT, "format": record.FORMAT, "container": ID}))
    inventory = tmp_path / "hosts"
    inventory.write_text(
        f"lab-a ansible_host=127.0.0.1 ansible_port={server.port} ansible_ssh_private_key_file={server.identity} "
        f"ansible_ssh_common_args='-F /dev/null -o UserKnownHostsFile={tmp_path}/known'\n"
    )
    words = ("--accept-new-host-keys", "--connect-timeout", "20", "-e", "ansible_user=plain")
    asked = explained(monkeypatch, inventory, *words)
    assert (asked.exit_code, "run again with -K" in asked.output) == (1, True), asked.output
    refused = explained(monkeypatch, inventory, *words, "-K", typed="wrong pony\n")
    assert (refused.exit_code, "sudo on the host refuses the password" in refused.output) == (1, True), refused.output
    assert "run again with -K" not in refused.output
    told = explained(monkeypatch, inventory, *words, "-K", "--json", typed=f"{PASSWORD}\n")
    assert told.exit_code == 0, told.output
    # This machine has no such container: the decision is told all the same.
    shown = json.loads(told.stdout)["lab-a"]
    assert shown["container"] == ID and "cuda" not in shown

"""`gpuprov accept` on a lab host: the program in a container of docker's, on simulated GPUs; its result is signed."""

import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.gpg import gpg_home, signing_key
from tests.lab.fixtures import Site, gpuprov, gpuprov_succeeds

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def test_accept_succeeds_and_leaves_no_container(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    host = site.installed("main")
    # Not in pytest's folder: the socket of gpg's agent would have too long a path.
    with tempfile.TemporaryDirectory(prefix="gpuprov-gpg-") as short, gpg_home(Path(short)) as home:
        monkeypatch.setenv("GNUPGHOME", str(home))
        words = ("--sign", signing_key(home, "ops@example.org"), "--report", tmp_path / "accepted.html")
        done = gpuprov("accept", "--hosts", site.inventory("main"), "--minutes", "1", "--json", *words)
        result = tmp_path / "gpuprov/accepted/main.json"
        subprocess.run(("gpg", "--verify", f"{result}.asc", result), check=True)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    measured = [one for one in events if one["event"] == "GpuMeasured"]
    checks = {one["name"]: one for one in events if one["event"] == "CheckDone"}
    assert len(measured) == 2, done.stdout + done.stderr
    assert all(one["figures"]["to_device"] > 0 for one in measured)
    assert checks["GPU 0, program"]["in_container"].startswith("simulated; ")
    assert not [one for one in events if one["event"] == "HealthFound" and one["rule"].startswith("accept-")]
    assert "gpuprov-verify" not in host.ssh("docker ps --all --format '{{.Names}}'").stdout
    assert [one["uuid"] for one in json.loads(result.read_bytes())["measured"]] == [one["uuid"] for one in measured]
    assert "accept" in (tmp_path / "accepted.html").read_text()


def test_figures_of_site_commands_are_kept(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    host = site.installed("main")
    gpuprov_succeeds("verify", "--hosts", site.inventory("main"))
    image = host.ssh("docker images --format '{{.Repository}}:{{.Tag}}' gpuprov-verify").stdout.split()[0]
    # The image has a shell and nvidia-smi; no lab has NVIDIA's programs.
    said = "# Out of bounds values : 0 OK\\n# Avg bus bandwidth    : 476.967\\n"
    commands = [
        {"image": image, "command": ["sh", "-c", "nvidia-smi -L"], "expect": "^GPU 1: "},
        {"image": image, "command": ["sh", "-c", f"printf '{said}'"], "expect": "nccl"},
        {"image": image, "command": ["sh", "-c", "nvidia-smi -L; exit 3"]},
        {"image": image, "command": ["sh", "-c", "exit 0"]},
    ]
    inventory = site.inventory("main", gpuprov_accept_commands=commands)
    done = gpuprov("accept", "--hosts", inventory, "--minutes", "1", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    checks = {one["name"]: one["status"] for one in events if one["event"] == "CheckDone"}
    assert {name: checks.get(f"command {name}") for name in (1, 2, 3, 4)} == {
        1: "ok", 2: "ok", 3: "failed", 4: "skipped",
    }, done.stdout  # fmt: skip
    (found,) = [one for one in events if one["event"] == "HealthFound" and one["rule"] == "accept-command"]
    assert found["evidence"].startswith("exit code 3")
    assert done.returncode == 7
    kept = json.loads((tmp_path / "gpuprov/accepted/main.json").read_bytes())["measured"]
    assert [list(one["figures"].values()) for one in kept if not one["uuid"]] == [[476.967e9]]
    assert "gpuprov-verify" not in host.ssh("docker ps --all --format '{{.Names}}'").stdout

"""`gpuprov accept` on a lab host: the program in a container of docker's, on simulated GPUs; its result is signed."""

import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.gpg import gpg_home, signing_key
from tests.lab.fixtures import Site, events, gpuprov, gpuprov_succeeds

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def test_accept_tests_gpus_and_runs_the_sites_commands(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    # Not in pytest's folder: the socket of gpg's agent would have too long a path.
    with tempfile.TemporaryDirectory(prefix="gpuprov-gpg-") as short, gpg_home(Path(short)) as home:
        monkeypatch.setenv("GNUPGHOME", str(home))
        words = ("--sign", signing_key(home, "ops@example.org"), "--report", tmp_path / "accepted.html")
        done = gpuprov("accept", "--hosts", inventory, "--minutes", "1", "--json", *words)
        result = tmp_path / "gpuprov/accepted/main.json"
        subprocess.run(("gpg", "--verify", f"{result}.asc", result), check=True)
    seen = events(done.stdout)
    measured = [one for one in seen if one["event"] == "GpuMeasured" and one["uuid"]]
    checks = {one["name"]: one for one in seen if one["event"] == "CheckDone"}
    assert len(measured) == 2, done.stdout + done.stderr
    assert all(one["figures"]["to_device"] > 0 for one in measured)
    assert checks["GPU 0, program"]["in_container"].startswith("simulated; ")
    assert [checks[f"command {number}"]["status"] for number in (1, 2, 3, 4)] == ["ok", "ok", "failed", "skipped"]
    # Of the GPUs there is no finding.
    (found,) = [one for one in seen if one["event"] == "HealthFound" and one["rule"].startswith("accept-")]
    assert found["rule"] == "accept-command" and found["evidence"].startswith("exit code 3")
    assert done.returncode == 7
    assert "gpuprov-verify" not in host.ssh("docker ps --all --format '{{.Names}}'").stdout
    kept = json.loads(result.read_bytes())["measured"]
    assert [one["uuid"] for one in kept if one["uuid"]] == [one["uuid"] for one in measured]
    assert [list(one["figures"].values()) for one in kept if not one["uuid"]] == [[476.967e9]]
    assert "accept" in (tmp_path / "accepted.html").read_text()

"""`gpuprov bundle show`, `verify`, and an installation that is given a bad bundle, as users call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuprov.bundle.manifest import manifest_to_bytes
from gpuprov.cli.main import cli
from gpuprov.core.system import sha256_of
from gpuprov.protocol.errors import ExitCode, GpuprovError
from tests.bundles import FILES, MANIFEST, bundle_bytes, listed, write_test_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_test_bundle(tmp_path / "bundle.tar")


def output(*words: object) -> str:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def refusal(*words: object) -> GpuprovError:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert isinstance(done.exception, GpuprovError), done.output
    return done.exception


def test_show_tells_what_it_is_for_and_what_it_holds(bundle: Path) -> None:
    said = output("bundle", "show", bundle)
    assert "for       debian 12 on x86_64" in said
    assert "driver    550.163.01" in said
    assert "signed    no" in said
    assert "  site-gpu-tools 1.0 all  asked for" in said


def test_show_as_json_is_the_manifest_and_the_digest(bundle: Path) -> None:
    found = json.loads(output("bundle", "show", bundle, "--json"))
    assert found["digest"] == sha256_of(manifest_to_bytes(listed(MANIFEST, FILES)))
    assert found["signed"] is False
    assert [one["path"] for one in found["files"]] == sorted(FILES)
    assert found["packages"][0]["name"] == "site-gpu-tools"


def test_verify_says_that_it_is_whole_and_what_was_not_looked_at(bundle: Path) -> None:
    said = output("bundle", "verify", bundle)
    assert "whole, 6 files, for debian 12 on x86_64, signature not looked at (--bundle-key)" in said
    assert json.loads(output("bundle", "verify", bundle, "--json"))["ok"] is True


def test_verify_takes_a_path_from_where_it_is_called(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle.parent)
    assert output("bundle", "verify", bundle.name).startswith(f"{bundle.name}: whole")


def test_verify_fails_for_a_damaged_one_in_words_and_in_json(bundle: Path) -> None:
    content = bytearray(bundle.read_bytes())
    content[-2000] ^= 1
    bundle.write_bytes(content)
    assert "tampered" in str(refusal("bundle", "verify", bundle))
    done = CliRunner().invoke(cli, ["bundle", "verify", str(bundle), "--json"])
    assert done.exit_code == ExitCode.FAILED
    found = json.loads(done.output)
    assert found["ok"] is False
    assert set(found["problems"][0]) == {"what", "evidence", "next_step"}


def test_an_installation_is_refused_before_the_inventory_is_read(tmp_path: Path) -> None:
    """The inventory does not exist; that is not what is complained of."""
    bad = tmp_path / "bundle.tar"
    bad.write_bytes(bundle_bytes()[:-100])
    call = ("install", "--hosts", tmp_path / "no-such-inventory", "--bundle")
    assert "the bundle is cut off" in str(refusal(*call, bad))
    assert "there is no bundle" in str(refusal(*call, tmp_path / "no-such-bundle"))
    whole = write_test_bundle(tmp_path / "whole.tar")
    assert "the bundle is not signed" in str(refusal(*call, whole, "--bundle-key", "A" * 40))
    wrong = refusal(*call, whole, "--bundle-key", "not a fingerprint")
    assert wrong.exit_code == ExitCode.USAGE


def test_a_key_without_a_bundle_is_a_wrong_call() -> None:
    assert refusal("install", "--hosts", "a,", "--bundle-key", "A" * 40).exit_code == ExitCode.USAGE


def test_create_without_a_distribution_of_ours_is_a_wrong_call(tmp_path: Path) -> None:
    found = refusal("bundle", "create", "--distro", "plan-9", "-o", tmp_path / "b.tar")
    assert found.exit_code == ExitCode.USAGE
    assert list(tmp_path.iterdir()) == []

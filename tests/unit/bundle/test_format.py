"""Bundles as tar files: what gpuprov writes is read again, and nothing else is, no matter who made it."""

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprov.bundle.format import Contents, chunks, header, read_contents, unpack, verify_files
from gpuprov.bundle.manifest import MANIFEST as MANIFEST_NAME
from gpuprov.bundle.manifest import Manifest, is_safe_path
from gpuprov.bundle_create.create import user_gpg
from gpuprov.cli.main import cli
from gpuprov.core.system import sha256_of
from gpuprov.protocol.errors import ExitCode, GpuprovError
from tests import simgpu
from tests.bundles import FILES, MANIFEST, bundle_bytes, listed, write_test_bundle
from tests.examples import examples
from tests.unit.fake_host import write_runfile

BUNDLE = bundle_bytes()
SIGNED = bundle_bytes(signature=b"a signature")
names = st.from_regex(r"[a-z0-9]{1,12}(/[A-Za-z0-9][a-z0-9+._~-]{0,10}){0,3}", fullmatch=True)


def read(content: bytes) -> Contents:
    """Read a bundle as an installation does: layout, then every digest."""
    file = io.BytesIO(content)
    contents = read_contents(file)
    verify_files(file, contents)
    return contents


def refusal(content: bytes) -> str:
    with pytest.raises(GpuprovError) as caught:
        read(content)
    problem = caught.value.problems[0]
    assert problem.what and problem.evidence and problem.next_step
    return str(caught.value)


def test_what_is_written_is_read() -> None:
    contents = read(SIGNED)
    assert contents.manifest == listed(MANIFEST, FILES)
    assert contents.digest == sha256_of(contents.manifest.to_bytes())
    assert contents.signature == b"a signature"
    file = io.BytesIO(SIGNED)
    found = {path: b"".join(chunks(file, contents.offsets[path], len(FILES[path]))) for path in FILES}
    assert found == FILES


def test_the_same_input_gives_the_same_bytes() -> None:
    assert bundle_bytes(files=dict(reversed(list(FILES.items())))) == BUNDLE


def test_tar_reads_it(tmp_path: Path) -> None:
    (tmp_path / "bundle.tar").write_bytes(SIGNED)
    listed_names = subprocess.run(("tar", "-tf", tmp_path / "bundle.tar"), check=True, capture_output=True, text=True)
    assert listed_names.stdout.split() == ["manifest.json", *sorted(FILES), "manifest.json.asc"]
    assert listed_names.stderr == ""
    with tarfile.open(tmp_path / "bundle.tar") as archive:
        assert {one.mode for one in archive} == {0o644}


def test_tar_reads_the_sizes_of_large_files() -> None:
    for size in (0, 8**11 - 1, 8**11, 1 << 40):
        found = tarfile.TarInfo.frombuf(header("images/large.tar", size), "ascii", "strict")
        assert (found.name, found.size, found.isreg()) == ("images/large.tar", size, True)


@given(files=st.dictionaries(names, st.binary(max_size=1500), max_size=6))
def test_any_files_come_back(files: dict[str, bytes]) -> None:
    # A name that is also another's folder can't be: such a manifest is refused, below.
    kept = {path: files[path] for path in files if not any(other.startswith(f"{path}/") for other in files)}
    plain = Manifest("debian", "12", "x86_64", "0.1.0")
    content = bundle_bytes(plain, kept)
    contents = read(content)
    written: dict[str, io.BytesIO] = {}

    class Kept(io.BytesIO):
        def close(self) -> None:
            """Its content is looked at after the end."""

    def open_new(path: str) -> io.BytesIO:
        return written.setdefault(path, Kept())

    unpack(io.BytesIO(content), contents, kept, open_new)
    assert {path: file.getvalue() for path, file in written.items()} == kept


@given(place=st.integers(0, len(BUNDLE) - 1), bit=st.integers(0, 7))
@settings(max_examples=examples(400))
def test_no_bit_can_be_changed(place: int, bit: int) -> None:
    changed = bytearray(BUNDLE)
    changed[place] ^= 1 << bit
    try:
        found = read(bytes(changed))
    except GpuprovError:
        return
    # The manifest may be changed into another one that is valid; its digest, which is the bundle's, tells.
    assert 512 <= place < 512 + len(found.manifest_bytes)
    assert found.digest != read(BUNDLE).digest


@given(length=st.integers(0, len(SIGNED) - 1))
def test_no_byte_may_be_missing(length: int) -> None:
    assert "cut off" in refusal(SIGNED[:length])


@given(more=st.binary(min_size=1, max_size=1200))
def test_no_byte_may_follow(more: bytes) -> None:
    refusal(BUNDLE + more)


@given(content=st.binary(max_size=4000))
def test_any_bytes_are_refused_in_words(content: bytes) -> None:
    refusal(content)


@given(content=st.binary(max_size=600))
def test_any_bytes_for_a_manifest_are_refused_in_words(content: bytes) -> None:
    refusal(header(MANIFEST_NAME, len(content)) + content + bytes(-len(content) % 512 + 1024))


def tar_of(*members: tuple[str, bytes, dict[str, Any]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """Return a tar file as Python's own tarfile writes it."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as archive:
        for name, content, fields in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            for field, value in fields.items():
                setattr(entry, field, value)
            archive.addfile(entry, io.BytesIO(content) if entry.isreg() else None)
    return made.getvalue()


def with_member(name: str, **fields: Any) -> bytes:
    """Return a bundle whose first file is replaced by another member, and with the manifest for the good one."""
    first = min(FILES)
    content = FILES[first]
    fields = {"size": 0 if fields.get("type", b"0") != b"0" else len(content), **fields}
    good = listed(MANIFEST, FILES).to_bytes()
    manifest = header(MANIFEST_NAME, len(good)) + good + bytes(-len(good) % 512)
    return manifest + tar_of((name, content, fields))


FIRST = min(FILES)
HOSTILE: dict[str, Callable[[], bytes]] = {
    "a way up": lambda: with_member("../../etc/cron.d/evil"),
    "an absolute path": lambda: with_member("/etc/cron.d/evil"),
    "a symbolic link": lambda: with_member(FIRST, type=tarfile.SYMTYPE, linkname="/etc"),
    "a hard link": lambda: with_member(FIRST, type=tarfile.LNKTYPE, linkname="etc/shadow"),
    "a device": lambda: with_member(FIRST, type=tarfile.BLKTYPE, devmajor=8),
    "a pipe": lambda: with_member(FIRST, type=tarfile.FIFOTYPE),
    "a folder": lambda: with_member(FIRST, type=tarfile.DIRTYPE),
    "a mode": lambda: with_member(FIRST, mode=0o4755),
    "an owner": lambda: with_member(FIRST, uid=1000),
    "a name of the owner": lambda: with_member(FIRST, uname="root"),
    "a time": lambda: with_member(FIRST, mtime=1),
    "an extended header": lambda: tar_of(("x" * 300, b"", {}), form=tarfile.PAX_FORMAT),
    "a long name of GNU's": lambda: tar_of(("x" * 300, b"", {}), form=tarfile.GNU_FORMAT),
    "gzip": lambda: b"\x1f\x8b\x08" + bytes(2000),
    "another first member": lambda: tar_of(("README", b"", {})),
    "a size below zero": lambda: BUNDLE[:124] + b"\xff" * 12 + BUNDLE[136:],
    "a manifest of eight gigabytes": lambda: header(MANIFEST_NAME, 8 << 30),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tar_is_refused(name: str) -> None:
    assert "no bundle that gpuprov wrote" in refusal(HOSTILE[name]())


def test_a_damaged_file_is_named_with_both_digests() -> None:
    place = read(BUNDLE).offsets["repository/site-gpu-tools_1.0_all.deb"]
    said = refusal(BUNDLE[:place] + b"?" + BUNDLE[place + 1 :])
    assert "tampered with or damaged" in said
    assert "repository/site-gpu-tools_1.0_all.deb: its SHA-256 is" in said


def test_something_hidden_in_the_padding_is_refused() -> None:
    place = read(BUNDLE).offsets[FIRST] + len(FILES[FIRST])
    assert "hidden" in refusal(BUNDLE[:place] + b"x" + BUNDLE[place + 1 :])


def test_a_file_that_changes_after_the_check_is_not_unpacked_unnoticed() -> None:
    contents = read(BUNDLE)
    changed = bytearray(BUNDLE)
    changed[contents.offsets[FIRST]] ^= 1
    with pytest.raises(GpuprovError, match="changed while it was unpacked"):
        unpack(io.BytesIO(bytes(changed)), contents, [FIRST], lambda path: io.BytesIO())


@pytest.mark.parametrize(
    "path",
    ["", "/", "/etc/passwd", "..", "../a", "a/../b", "a/..", "./a", "a//b", "a/", ".hidden", "a/.b", "a\\b", "a b",
     "a\nb", "a\0b", "a:b", "ä", "-rf", "a/-rf", "~root", "x" * 101],
)  # fmt: skip
def test_paths_that_lead_out_or_surprise_are_none(path: str) -> None:
    assert not is_safe_path(path)
    files = [{"path": path, "size": 0, "sha256": "0" * 64}]
    assert "is no path for a bundle" in manifest_refusal(files=files)


@given(path=st.text(max_size=30))
def test_a_safe_path_stays_inside(path: str) -> None:
    if is_safe_path(path):
        assert (Path("/inside") / path).resolve().is_relative_to("/inside")
        assert not path.startswith(("/", "."))


def test_a_manifest_that_is_nested_deeply_is_refused() -> None:
    data = {**json.loads(listed(MANIFEST, FILES).to_bytes()), "inputs": "DEEP"}
    text = json.dumps(data, indent=1, sort_keys=True).replace('"DEEP"', '{"a":' * 900 + "1" + "}" * 900)
    with pytest.raises(GpuprovError, match="damaged or not gpuprov's"):
        Manifest.from_bytes(f"{text}\n".encode())


def manifest_refusal(**changes: Any) -> str:
    data = {**json.loads(listed(MANIFEST, FILES).to_bytes()), **changes}
    with pytest.raises(GpuprovError) as caught:
        Manifest.from_bytes((json.dumps(data, indent=1, sort_keys=True) + "\n").encode())
    return str(caught.value)


def file(path: str, size: Any = 0, sha256: str = "0" * 64) -> dict[str, Any]:
    return {"path": path, "size": size, "sha256": sha256}


PLAIN = {"packages": [], "images": [], "driver_file": ""}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 1}, "its format is 1, this gpuprov reads 3 alone"),
        ({"version": 12}, "Manifest.version is not a text"), ({"surprise": "x"}, "keys that it does not know"),
        ({"files": {}}, "Manifest.files is not a list"),
        ({"files": [file("a", size=True)], **PLAIN}, "Manifest.files[0].size is not a whole number"),
        ({"files": [file("a", size=-1)], **PLAIN}, "size or digest of a"),
        ({"files": [file("a", sha256="0")], **PLAIN}, "size or digest of a"),
        ({"files": [file("b"), file("a")], **PLAIN}, "not in order"),
        ({"files": [file("a"), file("a")], **PLAIN}, "not in order"),
        ({"files": [file("a"), file("a/b/c")], **PLAIN}, "a file is named like a folder"),
        ({"files": [file("a/b"), file("a/b/c")], **PLAIN}, "a file is named like a folder"),
        ({"files": [file("manifest.json")], **PLAIN}, "is no path for a bundle"),
        ({"files": []}, "which it does not list"),
        ({"driver_file": "/root/evil.run"}, "which it does not list"),
        ({"cuda_version": "12.4", "cuda_file": "cuda/cuda.run"}, "which it does not list"),
        ({"inputs": []}, "Manifest.inputs is not an object"),
        ({"packages": [{"name": "a"}]}, "Manifest.packages[0].version is missing"),
    ],
)  # fmt: skip
def test_a_manifest_that_lies_is_refused(changes: dict[str, Any], says: str) -> None:
    assert says in manifest_refusal(**changes)


def test_a_manifest_in_another_hand_is_refused() -> None:
    data = json.loads(listed(MANIFEST, FILES).to_bytes())
    with pytest.raises(GpuprovError, match="not written as gpuprov writes"):
        Manifest.from_bytes(json.dumps(data).encode())
    with pytest.raises(GpuprovError):
        Manifest.from_bytes(b"[" * 100_000)


# -- the commands ------------------------------------------------------------------------------------------------------
@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_test_bundle(tmp_path / "bundle.tar")


def output(*words: object) -> str:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def refused_call(*words: object) -> GpuprovError:
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
    assert found["digest"] == sha256_of(listed(MANIFEST, FILES).to_bytes())
    assert found["signed"] is False
    assert [one["path"] for one in found["files"]] == sorted(FILES)
    assert found["packages"][0]["name"] == "site-gpu-tools"


def test_verify_says_that_it_is_whole_and_what_was_not_looked_at(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = output("bundle", "verify", bundle)
    assert "whole, 6 files, for debian 12 on x86_64, signature not looked at (--bundle-key)" in said
    assert json.loads(output("bundle", "verify", bundle, "--json"))["ok"] is True
    monkeypatch.chdir(bundle.parent)
    assert output("bundle", "verify", bundle.name).startswith(f"{bundle.name}: whole")


def test_verify_fails_for_a_damaged_one_in_words_and_in_json(bundle: Path) -> None:
    content = bytearray(bundle.read_bytes())
    content[-2000] ^= 1
    bundle.write_bytes(content)
    assert "tampered" in str(refused_call("bundle", "verify", bundle))
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
    assert "the bundle is cut off" in str(refused_call(*call, bad))
    assert "there is no bundle" in str(refused_call(*call, tmp_path / "no-such-bundle"))
    whole = write_test_bundle(tmp_path / "whole.tar")
    assert "the bundle is not signed" in str(refused_call(*call, whole, "--bundle-key", "A" * 40))
    wrong = refused_call(*call, whole, "--bundle-key", "not a fingerprint")
    assert wrong.exit_code == ExitCode.USAGE


def test_a_key_without_a_bundle_is_a_wrong_call() -> None:
    assert refused_call("install", "--hosts", "a,", "--bundle-key", "A" * 40).exit_code == ExitCode.USAGE


def test_create_without_a_distribution_of_ours_is_a_wrong_call(tmp_path: Path) -> None:
    found = refused_call("bundle", "create", "--distro", "plan-9", "-o", tmp_path / "b.tar")
    assert found.exit_code == ExitCode.USAGE
    assert list(tmp_path.iterdir()) == []


def test_unwritable_bundle_is_refused_before_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprov.bundle_create.recipe.make_recipe", lambda *words: pytest.fail("chooses packages"))
    fifo = tmp_path / "null"
    os.mkfifo(fifo)
    for output in (tmp_path / "missing/b.tar", fifo):
        found = refused_call("bundle", "create", "--distro", "debian-12", "--driver", "580.178.04", "-o", output)
        assert found.exit_code == ExitCode.USAGE
        assert f"the bundle {output} can't be written" in str(found)


def test_a_bundle_goes_where_a_link_of_its_name_leads(tmp_path: Path) -> None:
    driver, there, link = tmp_path / "driver.run", tmp_path / "disk", tmp_path / "bundle.tar"
    write_runfile(driver)
    there.mkdir()
    link.symlink_to("disk/bundle.tar")
    words = ("--driver", simgpu.DRIVER_VERSION, "--driver-file", driver, "-e", "gpuprov_docker=none", "-o", link)
    output("bundle", "create", "--distro", "ubuntu-24.04", "--arch", "x86_64", *words)
    assert link.is_symlink() and (there / "bundle.tar").is_file()


def test_hosts_that_name_different_tables_get_no_common_bundle(tmp_path: Path) -> None:
    """The servers of one would be asked for the packages of both."""
    lines = []
    for host in ("one", "two"):
        (tmp_path / f"{host}.json").write_text(f'{{"format": 1, "servers": {{"ubuntu": "https://{host}.example"}}}}')
        digest = hashlib.sha256((tmp_path / f"{host}.json").read_bytes()).hexdigest()
        lines.append(f"{host} gpuprov_servers={tmp_path}/{host}.json gpuprov_servers_sha256={digest}\n")
    (tmp_path / "hosts.ini").write_text("".join(lines))
    words = ("--hosts", tmp_path / "hosts.ini", "-o", tmp_path / "b.tar")
    found = refused_call("bundle", "create", "--distro", "ubuntu-24.04", *words)
    assert found.exit_code == ExitCode.USAGE and "different tables, and a bundle has one: servers" in str(found)


def test_key_without_signing_is_refused_before_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuprov.bundle_create.create.collect", lambda *words: pytest.fail("collects"))
    monkeypatch.setattr("gpuprov.bundle_create.create.export_key", lambda *words: b"")
    words = ("bundle", "create", "--distro", "ubuntu-24.04", "--driver", "580.178.04", "-o", tmp_path / "b.tar")
    assert "gpg could not sign with nobody" in str(refused_call(*words, "--sign", "nobody"))


@pytest.mark.parametrize(
    ("environment", "terminal", "asked_at"),
    [({}, True, "/dev/pts/7"), ({"GPG_TTY": "/dev/pts/8"}, True, "/dev/pts/8"), ({}, False, None)],
)
def test_gpg_asks_for_a_passphrase_at_the_users_terminal(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], terminal: bool, asked_at: str | None
) -> None:
    monkeypatch.setattr("os.environ", {"TERM": "xterm", **environment})
    monkeypatch.setattr("os.isatty", lambda handle: terminal)
    monkeypatch.setattr("os.ttyname", lambda handle: "/dev/pts/7")
    found = user_gpg()
    assert (found.get("GPG_TTY"), found["TERM"]) == (asked_at, "xterm")

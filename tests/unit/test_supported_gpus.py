"""What a .run's own list says of GPUs: read out of its payload, however that is packed, and decided upon."""

import io
import json
import lzma
import shutil
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprov.core.changes import tell_nobody
from gpuprov.core.system import System
from gpuprov.driver import generations
from gpuprov.driver.generations import gather_served, listed_module_type, parse_chips, read_supported_gpus
from gpuprov.driver.installer import parse_header
from gpuprov.driver_run import InstallDriver
from gpuprov.facts.gpus import Chip
from gpuprov.facts.host import gather
from gpuprov.machine.pci import PciGpu
from gpuprov.plan.context import source_of
from gpuprov.plan.inputs import gather_for
from gpuprov.protocol.spec import parse_spec
from tests import simgpu
from tests.unit.fake_host import FakeHost
from tests.unit.refused import refused

pytestmark = pytest.mark.root
H100, V100, K80, B200, T4 = "2330", "1db6", "102d", "2901", "1eb8"
# As in the file of 580: Blackwell has kernelopen and not gsp_proprietary_supported, Turing both, Volta neither.
_ROWS = [
    {"devid": "0x2330", "name": "H100", "features": ["kernelopen", "gsp_proprietary_supported"]},
    {"devid": "0x2901", "name": "B200", "features": ["kernelopen"]},
    {"devid": "0x1DB6", "name": "Tesla V100", "features": ["fp16"]},
    {"devid": "0x102D", "name": "Tesla K80", "legacybranch": "470.xx", "features": []},
    {"devid": "0x1EB8", "name": "Tesla T4", "features": ["kernelopen", "gsp_proprietary_supported"]},
    {"devid": "0x1EB8", "subdevid": "0x12A2", "name": "T4 16", "legacybranch": "470.xx", "features": []},
]
LIST = json.dumps({"chips": _ROWS})
CHIPS = parse_chips(LIST)


def test_the_list_is_read() -> None:
    assert CHIPS[V100] == Chip("Tesla V100", "", False, True)
    assert CHIPS[B200] == Chip("B200", "", True, False)
    assert CHIPS[K80].legacy_branch == "470"
    assert CHIPS[T4].legacy_branch == ""


def test_proprietary_modules_serve_all_in_the_list_of_550() -> None:
    old = parse_chips('{"chips": [{"devid": "0x2330", "name": "H100", "features": ["kernelopen"]}]}')
    assert old[H100] == Chip("H100", "", True, True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"chips": [{}]}', '{"chips": {"a": 1}}', "<html>",
                                  pytest.param("[" * 100_000, id="deep")])  # fmt: skip
def test_what_is_no_list_gives_none(text: str) -> None:
    assert parse_chips(text) == {}


CASES = {
    "both do": ([H100], "auto", "otherwise"),
    "an old one alone": ([V100], "auto", "proprietary"),
    "a new one alone": ([B200], "auto", "open"),
    "old and middle": ([V100, H100], "auto", "proprietary"),
    "new and middle": ([B200, H100], "auto", "open"),
    "not in the list": (["ffff"], "auto", "otherwise"),
    "asked": ([H100], "open", "open"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_modules_are_those_that_serve_all_gpus(name: str) -> None:
    ids, asked, expected = CASES[name]
    assert listed_module_type(ids, CHIPS, asked, "otherwise") == expected


REFUSED = {
    "old and new": ([V100, B200], "auto", "serves Tesla V100 and B200, but not in one host"),
    "open for an old one": ([V100], "open", "open kernel modules do not serve Tesla V100"),
    "proprietary for a new one": ([B200], "proprietary", "proprietary kernel modules do not serve B200"),
    "legacy": ([K80, H100], "auto", "no longer serves Tesla K80"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_driver_serves_is_refused(name: str) -> None:
    ids, asked, what = REFUSED[name]
    problem = refused(listed_module_type, ids, CHIPS, asked, "auto")
    assert what in problem.what and "10de:" in problem.evidence


# -- out of the file -------------------------------------------------------------------------------------------------


def archive() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in (("./nvidia-installer", b"x" * 100_000), ("./supported-gpus/supported-gpus.json", b"")):
            data = content or LIST.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def run_file(folder: Path, payload: bytes) -> Path:
    # Between stub and payload lies the decompressor: bytes, line ends among them.
    path = folder / "driver.run"
    path.write_bytes(b"#!/bin/sh\nskip=5\nexit 0\n\x00\x01\xff\n" + payload)
    return path


@pytest.mark.parametrize("kind", ["xz", "zstd", "none", "torn"])
def test_it_is_found_in_the_payload_however_that_is_packed(tmp_path: Path, kind: str) -> None:
    payload = archive()
    if kind == "zstd":
        if shutil.which("zstd") is None:
            pytest.skip("zstd is not installed here")
        payload = subprocess.run(("zstd", "-q"), input=payload, capture_output=True, check=True).stdout
    elif kind != "none":
        payload = lzma.compress(payload)
    path = run_file(tmp_path, payload[: len(payload) // 2] if kind == "torn" else payload)
    assert read_supported_gpus(System(), str(path), 5) == (CHIPS if kind in ("xz", "zstd") else {})


def test_a_zstd_payload_on_a_host_without_zstd_is_left_to_the_table(tmp_path: Path) -> None:
    (tmp_path / "driver.run").write_bytes(b"#!/bin/sh\nskip=3\n\x28\xb5\x2f\xfd....")
    assert read_supported_gpus(System(str(tmp_path)), "/driver.run", 3) == {}


def test_the_test_drivers_own_list_is_found(tmp_path: Path) -> None:
    path = simgpu.build_run(tmp_path)
    header = parse_header(path.read_bytes()[:8192].decode("latin-1"))
    assert set(read_supported_gpus(System(), str(path), header.skip)) == {H100, V100, K80}
    assert read_supported_gpus(System(), str(path), 0) == {}
    assert read_supported_gpus(System(), str(tmp_path / "absent"), 9) == {}


def test_list_of_the_file_beats_the_table_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table the host has what it needs; by the file it has a GPU that this driver has left behind."""
    host = FakeHost(tmp_path / "root", gpus=1, metal=True)
    path = simgpu.build_run(host.root)
    chosen: list[str] = []
    monkeypatch.setattr(InstallDriver, "install", lambda change, system, modules, tell: chosen.append(modules))
    spec = parse_spec({"driver_version": simgpu.DRIVER_VERSION, "driver_url": f"/{path.name}"})
    facts = gather(host)
    for device_id, expected in ((V100, "proprietary"), (H100, "auto"), ("ffff", "auto")):
        (change,) = source_of(replace(facts, gpus=(PciGpu("0000:17:00.0", device_id),)), spec).plan()
        assert isinstance(change, InstallDriver)
        change.apply(host, tell_nobody)
        assert chosen[-1] == expected
    (change,) = source_of(replace(facts, gpus=(PciGpu("0000:17:00.0", K80),)), spec).plan()
    assert "this driver no longer serves Tesla K80" in refused(change.apply, host, tell_nobody).what
    assert not any(command[0] == "sh" for command in host.commands)


# -- before anything is changed --------------------------------------------------------------------------------------


def bare(tmp_path: Path, *gpus: str) -> FakeHost:
    """A bare machine with these GPUs, and a driver file whose list is the one above."""
    host = FakeHost(tmp_path, metal=True)
    label = f"NVIDIA Accelerated Graphics Driver for Linux-x86_64 {simgpu.DRIVER_VERSION}"
    stub = f'#!/bin/sh\nlabel="{label}"\nskip="5"\nexit 0\n'.encode()
    (tmp_path / "driver.run").write_bytes(stub + lzma.compress(archive()))
    return host


def told(host: FakeHost, *gpus: str, url: str = "/driver.run") -> list[str]:
    spec = parse_spec({"driver_version": simgpu.DRIVER_VERSION, "driver_url": url, "kernel_modules": "build"})
    facts = gather_for(host, spec, None, ("driver",), lambda event: None)
    facts = replace(facts, gpus=tuple(PciGpu(f"0000:0{number}:00.0", one) for number, one in enumerate(gpus)))
    return [one.what for one in source_of(facts, spec).problems()]


def test_list_in_the_file_wins_over_pci_ids(tmp_path: Path) -> None:
    host = bare(tmp_path)
    # By its PCI id the B200 is too new for 550; the file's list has it. The K80 is legacy by both.
    assert told(host, B200) == []
    assert told(host, K80) == ["this driver no longer serves Tesla K80"]
    assert told(host, V100, B200) == ["this driver serves Tesla V100 and B200, but not in one host"]
    # What the list does not know is judged by its PCI id (GF100), as all is where no file is at hand.
    (what,) = told(host, B200, "06c0")
    assert what == f"driver {simgpu.DRIVER_VERSION} no longer serves this host's Fermi or older GPU"
    elsewhere = "https://mirror.example.org/other.run"
    assert any("does not know this host's Blackwell GPU yet" in one for one in told(host, B200, url=elsewhere))


@pytest.mark.parametrize(
    "content", [b"", b"<html>", b"#!/bin/sh\n", b'#!/bin/sh\nlabel="x Linux-x86_64  550.1"\nskip="9"\n']
)
def test_a_file_without_a_list_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "driver.run").write_bytes(content)
    assert gather_served(System(str(tmp_path)), "/driver.run") == {}
    assert gather_served(System(str(tmp_path)), "/missing.run") == {}
    assert generations.listed_problems([K80], {}, "auto") == ()

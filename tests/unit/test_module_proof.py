from __future__ import annotations

from pathlib import Path

import pytest

from gpuprov.core.system import System
from gpuprov.driver.kernel import dkms_states, prove_modules
from gpuprov.protocol.errors import GpuprovError
from tests.unit.scripted import Answer, Scripted

VERSION = "550.163.01"
KERNEL = "6.1.0-55-cloud-amd64"
OTHER = "6.1.0-56-cloud-amd64"
# What DKMS 2.8 (Debian 11) and 3.0 (Debian 12) say.
STATES = {
    "": {},
    f"nvidia/{VERSION}: added\n": {"": "added"},
    f"nvidia, {VERSION}: added\n": {"": "added"},
    f"nvidia/{VERSION}, {KERNEL}, x86_64: installed\n": {KERNEL: "installed"},
    f"nvidia, {VERSION}, {KERNEL}, x86_64: installed\n": {KERNEL: "installed"},
    f"nvidia/{VERSION}, {KERNEL}, x86_64: built\nnvidia/{VERSION}, {OTHER}, x86_64: installed (WARNING! Diff)\n": {
        KERNEL: "built",
        OTHER: "installed",
    },
    f"nvidia/535.261.03, {KERNEL}, x86_64: installed\nother/{VERSION}, {KERNEL}, x86_64: installed\n": {},
}


@pytest.mark.parametrize("status", STATES)
def test_states_are_read_from_what_dkms_says(status: str) -> None:
    assert dkms_states(status, VERSION) == STATES[status]


class Host(Scripted):
    """A host on which dkms and modinfo say what they are told to."""

    which = System.which

    def __init__(self, root: Path, status: str, version: str) -> None:
        super().__init__(root)
        self._answers = {"dkms": status, "modinfo": version}

    def kernel_release(self) -> str:
        return KERNEL

    def answer(self, argv: tuple[str, ...]) -> Answer:
        return self._answers[argv[0]] or (1, "", f"{argv[0]}: ERROR: not found")


FAULTS = {
    "not registered": ("", VERSION, "not registered with DKMS"),
    "added alone": (f"nvidia/{VERSION}: added\n", VERSION, f"has not installed its modules for kernel {KERNEL}"),
    "another kernel's": (f"nvidia/{VERSION}, {OTHER}, x86_64: installed\n", VERSION, "has not installed its modules"),
    "another module wins": (f"nvidia/{VERSION}, {KERNEL}, x86_64: installed\n", "535.261.03", "version 535.261.03"),
    "no module": (f"nvidia/{VERSION}, {KERNEL}, x86_64: installed\n", "", "modinfo: ERROR"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_not_there_is_named_with_the_next_command(tmp_path: Path, name: str) -> None:
    status, version, sentence = FAULTS[name]
    with pytest.raises(GpuprovError) as caught:
        prove_modules(Host(tmp_path, status, version), VERSION, dkms=True)
    (problem,) = caught.value.problems
    assert sentence in f"{problem.what}\n{problem.evidence}"
    assert "dkms" in problem.next_step


@pytest.mark.parametrize("dkms", [True, False])
def test_modules_that_are_there_are_proof_enough(tmp_path: Path, dkms: bool) -> None:
    status = f"nvidia/{VERSION}, {KERNEL}, x86_64: installed\n" if dkms else ""
    prove_modules(Host(tmp_path, status, f"{VERSION}\n"), VERSION, dkms=dkms)

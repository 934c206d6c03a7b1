"""A machine with one GPU whose nvidia-smi knows the commands of MIG, in the words of 535 and 550."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuprov.core.commands import Completed
from tests.unit.fake_host import FakeHost

# As they print it for H100.
LGIP = """\
+-----------------------------------------------------------------------------+
| GPU instance profiles:                                                      |
| GPU   Name             ID    Instances   Memory     P2P    SM    DEC   ENC  |
|                              Free/Total   GiB              CE    JPEG  OFA  |
|=============================================================================|
|   0  MIG 1g.10gb       19     7/7        9.50       No     14     1     0   |
|                                                             1     1     0   |
+-----------------------------------------------------------------------------+
|   0  MIG 1g.10gb+me    20     1/1        9.50       No     14     1     0   |
|                                                             1     1     1   |
+-----------------------------------------------------------------------------+
|   0  MIG 3g.40gb        9     0/2        39.25      No     42     2     0   |
|                                                             3     2     0   |
+-----------------------------------------------------------------------------+
"""
PENDING = """\
Warning: MIG mode is in pending enable state for GPU 00000000:0B:00.0:In use by another client
00000000:0B:00.0 is currently being used by one or more other processes (e.g. CUDA application or a monitoring \
application such as another instance of nvidia-smi). Please first kill all processes using the device and retry the \
command or reboot the system to make MIG mode effective.
All done.
"""
NONE = "No GPU instances found: Not Found\n"


class MigHost(FakeHost):
    """A bare machine with one GPU and an nvidia-smi that knows the commands of MIG; `busy`: only a reset helps.

    `bare`: how many of its first GPU instances have no compute instance, as `-cgi` without `-C` leaves them.
    `answers`: option → exit code and output instead of what the command would do. `corrupt`: a GPU's infoROM is.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root, gpus=1, metal=True)
        self.mode, self.pending = "Disabled", "Disabled"
        self.instances: list[str] = []
        self.bare = 0
        self.busy = self.resets = self.corrupt = False
        self.answers: dict[str, tuple[int, str]] = {}
        self.changes: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], **more: Any) -> Completed:
        if argv[0] != "nvidia-smi":
            return super().run(argv, **more)
        assert 0 < more["timeout"] <= 120
        code, text = self._smi(list(argv[1:]))
        if self.corrupt and code == 0:
            code, text = 14, f"{text}WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n"
        return Completed(tuple(argv), code, text)

    def _smi(self, words: list[str]) -> tuple[int, str]:
        if words[0].startswith("--query-gpu"):
            return 0, f"0, {self.mode}, {self.pending}\n"
        if words == ["mig", "-lgip"]:
            return 0, LGIP
        if words == ["mig", "-lgi"]:
            rows = "".join(
                f"|   0  MIG {one:<18} 9   {number}   4:4     |\n" for number, one in enumerate(self.instances)
            )
            return self.answers.get("-lgi", (0, rows) if rows else (6, NONE))
        if words == ["mig", "-lci"]:
            numbers = range(self.bare, len(self.instances))
            rows = "".join(
                f"|   0      {number}       MIG 1c.{self.instances[number]}  0  0  0:1 |\n" for number in numbers
            )
            return self.answers.get("-lci", (0, rows) if rows else (6, NONE))
        self.changes.append(tuple(words))
        if answer := next((self.answers[word] for word in words if word in self.answers), None):
            return answer
        if "-dgi" in words:
            self.instances, self.bare = [], 0
        elif "-cgi" in words:
            asked = words[words.index("-cgi") + 1].split(",")
            self.instances += asked
        elif "-mig" in words:
            self.pending = {"1": "Enabled", "0": "Disabled"}[words[-1]]
            if self.busy:
                return 0, PENDING
            self.mode = self.pending
        elif "--gpu-reset" in words and self.resets:
            self.mode = self.pending
        return 0, "All done.\n"

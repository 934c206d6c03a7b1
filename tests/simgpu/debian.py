"""Fetches the genuine nvidia-smi and nvml.h, which are not free and so never enter the repository, from Debian.

The machine's own apt does it, with its mirror, proxy and keys, but with a configuration directory of our own: the
machine's sources and package lists stay as they are.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from .cache import built, digest_of
from .commands import BuildError, output_of

SUITE = "trixie"
COMPONENT = "non-free"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# nvidia-smi is the program under test's best judge; nvml.h holds the structures that it passes to the library.
PACKAGES = ("nvidia-smi", "libnvidia-ml-dev")
_WITHOUT_UPDATES = ("sid", "unstable", "experimental")


def fetch(
    folder: Path, suite: str = SUITE, component: str = COMPONENT, packages: Sequence[str] = PACKAGES,
    *, updates: bool = True,
) -> None:  # fmt: skip
    """Download packages of a Debian suite and unpack them below folder/unpacked."""
    download(folder, suite, component, packages, updates=updates)
    for package in folder.glob("*.deb"):
        output_of("dpkg-deb", "-x", str(package), str(folder / "unpacked"), hint="install dpkg")
        package.unlink()


def download(folder: Path, suite: str, component: str, packages: Sequence[str], *, updates: bool = True) -> None:
    """Download packages of a Debian suite, and only these, into a folder; `component` may hold several words.

    `updates`: those of the suite, and its security updates, too. They bring a driver of another branch.
    """
    from tests.lab.sources import mirrors  # which imports this package

    state, cache = folder / "apt-state", folder / "apt-cache"
    for directory in (state / "lists" / "partial", cache / "archives" / "partial"):
        directory.mkdir(parents=True)
    # What this machine has installed is nothing to apt here: it would look for a source of that very version.
    (state / "status").touch()
    archive, security = mirrors()
    places = [(archive, suite)]
    if updates and suite not in _WITHOUT_UPDATES:
        places += [(archive, f"{suite}-updates"), (security, f"{suite}-security")]
    sources = folder / "debian.list"
    sources.write_text("".join(f"deb [signed-by={KEYRING}] {uri} {name} {component}\n" for uri, name in places))
    options = (
        f"Dir::State={state}",
        f"Dir::State::status={state / 'status'}",
        f"Dir::Cache={cache}",
        f"Dir::Etc::SourceList={sources}",
        f"Dir::Etc::SourceParts={folder / 'none'}",
        f"Dir::Etc::PreferencesParts={folder / 'none'}",
        "APT::Architecture=amd64",
        "APT::Sandbox::User=root",
        "APT::Update::Error-Mode=any",
    )
    (folder / "none").mkdir()
    apt = ("apt-get", "-qq", *(word for option in options for word in ("-o", option)))
    try:
        output_of(*apt, "update", hint="")
        output_of(*apt, "download", *packages, hint="", cwd=folder)
    except BuildError as error:
        # The cause is in apt's words; where they say that something is not there, this is where it was looked for.
        if re.search("Release file|Unable to locate", str(error)):
            raise BuildError(f"{error}; the mirror {archive} must offer {suite} ({component})") from None
        raise
    for scratch in (state, cache, folder / "none"):
        shutil.rmtree(scratch)
    sources.unlink()


def _unpacked(name: str) -> Path:
    folder = built("debian", digest_of((SUITE, *PACKAGES)), fetch)
    found = sorted(path for path in folder.rglob(name) if path.is_file())
    if not found:
        raise BuildError(f"Debian's packages {', '.join(PACKAGES)} hold no {name}; remove {folder} and try again")
    return found[-1]


def nvidia_smi() -> Path:
    """The genuine nvidia-smi (550.163.01 at the time of writing), an x86-64 program."""
    return next(path for path in sorted(_unpacked("nvml.h").parents[2].rglob("nvidia-smi")) if _is_elf(path))


def nvml_header() -> Path:
    """NVIDIA's nvml.h, for the compiler only."""
    return _unpacked("nvml.h")


def _is_elf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def nvml_names() -> tuple[str, ...]:
    """Every NVML function that the header declares or that nvidia-smi looks up by name."""
    words = re.compile(rb"\bnvml[A-Z][A-Za-z0-9_]*\b")
    declared = re.findall(rb"DECLDIR\s+\*?\s*(nvml[A-Za-z0-9_]+)\s*\(", nvml_header().read_bytes())
    looked_up = words.findall(nvidia_smi().read_bytes())
    return tuple(sorted({name.decode() for name in (*declared, *looked_up)}))

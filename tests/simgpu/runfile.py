"""Builds NVIDIA-Linux-x86_64-VERSION.run around the stub libraries: outside and in its habits like the real one.

Same input gives the same bytes. Debian's makeself is not used: NVIDIA's file comes from a makeself of 2002 (1.6.0-nv2),
whose header has other variables, whose checksums cover the header from line 4 on (today's cover the payload alone) and
whose options have other names. Writing that header ourselves is shorter than bending today's.
"""

import csv
import functools
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from .cache import DATA, SOURCES, built, digest_of, source_digest
from .commands import output_of
from .gpus import CUDA_VERSION, DRIVER_VERSION
from .kernel_sources import module_sources
from .layout import DEBIAN_LIBRARY_DIRECTORY, driver_files
from .libraries import build_libraries
from .payload import placeholder, supported_gpus

ARCHITECTURE = "x86_64"
LABEL = "NVIDIA Accelerated Graphics Driver for Linux-x86_64"
# A fixed date: the file's bytes must not depend on when it was built.
_DATE = "Tue Apr  8 12:41:17 UTC 2025"
_COMMON_OPTIONS = ("version", "help", "advanced-options")


def build_run(destination: Path, version: str = DRIVER_VERSION, cuda_version: str = CUDA_VERSION) -> Path:
    """Puts NVIDIA-Linux-x86_64-VERSION.run and its .sha256sum into that folder; returns the path of the .run.

    A second call costs a copy. Raises BuildError without gcc or without a Debian mirror.
    """
    digest = digest_of((version, cuda_version, source_digest()))
    folder = built("run", digest, lambda scratch: _build(scratch, version, cuda_version))
    destination.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        # A new file, not an open one overwritten: someone may be running the old one.
        partial = destination / f".{path.name}.{os.getpid()}"
        shutil.copy2(path, partial)
        partial.replace(destination / path.name)
    return destination / run_name(version)


def install_tree(
    root: Path,
    version: str = DRIVER_VERSION,
    *,
    library_directory: str = DEBIAN_LIBRARY_DIRECTORY,
    systemd: bool = True,
) -> None:
    """Lays the files of `--silent --no-kernel-modules --no-install-libglvnd` below `root`, without running the .run.

    For discovery with a root prefix: no log, no state in /var/lib/nvidia, no ld.so.cache (run `ldconfig -r root`).
    `library_directory` is /usr/lib64 for a RHEL-like tree. Modes are the real ones: nvidia-modprobe is setuid.
    """
    payload = _payload(version, CUDA_VERSION)
    for one in driver_files(version):
        if one.when == "libglvnd" or (one.when == "systemd" and not systemd):
            continue
        path = root / one.path.replace("@LIBDIR@", library_directory).lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if one.is_link:
            path.symlink_to(one.target)
        else:
            path.write_bytes(payload[one.payload_name][0])
            path.chmod(one.mode)


def run_name(version: str) -> str:
    """The file's name on NVIDIA's servers."""
    return f"NVIDIA-Linux-{ARCHITECTURE}-{version}.run"


def _build(folder: Path, version: str, cuda_version: str) -> None:
    files = _payload(version, cuda_version)
    packed = gzip.compress(_tar(files), compresslevel=9, mtime=0)
    size_kib = sum(len(data) for data, _ in files.values()) // 1024
    content = _with_header(packed, version, size_kib)
    path = folder / run_name(version)
    path.write_bytes(content)
    path.chmod(0o755)
    sums = folder / f"{path.name}.sha256sum"
    sums.write_text(f"{hashlib.sha256(content).hexdigest()}  {path.name}\n")


@functools.cache
def _payload(version: str, cuda_version: str) -> dict[str, tuple[bytes, int]]:
    """Name in the unpacked folder → content and mode. Hundreds of unit tests lay the same files."""
    libraries = build_libraries(version, cuda_version)
    options = _options(version)
    option_lines = "".join(f"{name} {short} {kind}\n" for name, short, kind in options)
    installer = _text("nvidia-installer.sh", version) + "".join(f"# {line}\n" for line in option_lines.splitlines())
    payload: dict[str, tuple[bytes, int]] = {
        "nvidia-installer": (installer.encode(), 0o755),
        ".manifest": (_manifest(version).encode(), 0o644),
        ".options": (option_lines.encode(), 0o644),
        "supported-gpus/supported-gpus.json": (supported_gpus().encode(), 0o644),
    }
    for one in driver_files(version):
        if one.is_link or one.payload_name in payload:
            continue
        built_file = libraries / one.name
        data = built_file.read_bytes() if built_file.is_file() else placeholder(one.name, version).encode()
        payload[one.payload_name] = (data, one.mode & 0o777)
    for flavour in ("kernel", "kernel-open"):
        for name, text in module_sources(version, flavour).items():
            payload[f"{flavour}/{name}"] = (text.encode(), 0o644)
    return payload


def _text(name: str, version: str) -> str:
    return (SOURCES / name).read_text().replace("@VERSION@", version).replace("@ARCH@", ARCHITECTURE)


def _manifest(version: str) -> str:
    """Description and version as the real one's first lines, then a row per file: ours, the real one has 20 columns."""
    rows = [
        f"{'l' if one.is_link else 'f'}\t{one.when}\t{one.mode:04o}\t{one.path}\t"
        f"{one.target if one.is_link else one.payload_name}\n"
        for one in driver_files(version)
    ]
    return f"{LABEL}\n{version}\n" + "".join(rows)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.replace("-", ".").split("."))


def _options(version: str) -> list[tuple[str, str, str]]:
    """The options that nvidia-installer of that version knows: name, short letter or -, kind."""
    with (DATA / "installer-options.tsv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [(row["name"], row["short"], row["kind"]) for row in rows if _number(row["first"]) <= _number(version)]


def _option_help(version: str, *, common: bool) -> str:
    lines = []
    for name, short, kind in _options(version):
        if (name in _COMMON_OPTIONS) != common:
            continue
        text = f"--{name}/--no-{name}" if kind == "boolean" else f"--{name}"
        if short != "-":
            text = f"-{short}, {text}"
        lines.append(f"  {text}={name.upper()}" if kind == "value" else f"  {text}")
    return "\n\n".join(lines)


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(files):
            data, mode = files[name]
            member = tarfile.TarInfo(f"./{name}")
            member.size, member.mode = len(data), mode
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _with_header(payload: bytes, version: str, size_kib: int) -> bytes:
    """The shell stub in front; the checksums cover everything after its third line, the line of MD5."""
    header = _text("run-header.sh", version)
    values = {
        "@LABEL@": f"{LABEL} {version}",
        "@USIZE@": str(size_kib),
        "@DATE@": _DATE,
        "@COMMON_OPTIONS@": _option_help(version, common=True),
        "@ADVANCED_OPTIONS@": _option_help(version, common=False),
    }
    for placeholder_name, value in values.items():
        header = header.replace(placeholder_name, value)
    header = header.replace("@SKIP@", str(header.count("\n") + 1))
    summed = header.split("\n", 3)[3].encode() + payload
    header = header.replace("@CRC@", _cksum(summed)).replace("@MD5@", hashlib.md5(summed).hexdigest())
    return header.encode() + payload


def _cksum(data: bytes) -> str:
    """The CRC of cksum(1), which POSIX defines and Python lacks."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return output_of("cksum", file.name, hint="install coreutils").split()[0]

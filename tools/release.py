"""Builds a release into a folder: wheel, sdist, collection, agent, one-file program, .deb, .rpm, SBOM, sums.

python -m tools.release dist
"""

from __future__ import annotations

import datetime
import gzip
import hashlib
import importlib.metadata as metadata
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import PackageMetadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from gpuprov import __version__
from gpuprov.fleet.agent_file import build_agent
from tools import host_packages, host_program, linux_packages
from tools.zipapps import locked, wheels

_CLONE = Path(__file__).resolve().parents[1]
_SBOM_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://github.com/gpuprov/gpuprov")


def write_release(folder: Path) -> None:
    """Write all files of a release into `folder`, which must be empty or missing. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty; next: remove it, or name another folder")
    # hatchling takes another time by itself.
    os.environ["SOURCE_DATE_EPOCH"] = str(release_time())
    host_packages.fetch()
    for target in ("sdist", "wheel"):
        _run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder))
    (folder / f"gpuprov-agent-{__version__}.pyz").write_bytes(build_agent().content)
    (folder / host_program.NAME).write_bytes(host_program.build())
    (folder / host_program.NAME).chmod(0o755)
    linux_packages.build(folder, release_time())
    (folder / f"gpuprov-host-{__version__}.tar.gz").write_bytes(_collection())
    (folder / f"gpuprov-{__version__}.cdx.json").write_text(sbom(), encoding="utf-8")
    (folder / "SHA256SUMS").write_text("".join(f"{line}\n" for line in _sums(folder)))


def sbom() -> str:
    """Return the CycloneDX description of what agent and one-file program hold: gpuprov and what is beside it."""
    own = _component("gpuprov", ComponentType.APPLICATION, metadata.distribution("gpuprov").metadata)
    bundled = [
        _component(name, ComponentType.LIBRARY, host_packages.metadata_of(wheel))
        for name, wheel in sorted(wheels(locked()).items())
    ]
    identity = " ".join(f"{component.name}=={component.version}" for component in (own, *bundled))
    bom = Bom(
        components=bundled,
        dependencies=[Dependency(own.bom_ref, [Dependency(one.bom_ref) for one in bundled])],
        serial_number=uuid.uuid5(_SBOM_NAMESPACE, identity),
    )
    bom.metadata.component = own
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(release_time(), datetime.timezone.utc)
    outputter = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6)
    return outputter.output_as_string(indent=2) + "\n"


def _component(name: str, kind: ComponentType, found: PackageMetadata | Message) -> Component:
    # Older metadata have a free text, newer ones an SPDX expression.
    text = next((found[key] for key in ("License-Expression", "License") if key in found), "")
    version = __version__ if name == "gpuprov" else found["Version"]
    purl = PackageURL("pypi", None, name, version)
    licenses = [LicenseFactory().make_from_string(text)] if text and "\n" not in text else []
    return Component(
        name=name, version=version, type=kind, purl=purl, bom_ref=purl.to_string(), licenses=licenses,
        description=found["Summary"],
    )  # fmt: skip


def _collection() -> bytes:
    """Return the collection as ansible-galaxy packs it, but files in order, of one owner and one time."""
    with tempfile.TemporaryDirectory() as name:
        _run(sys.executable, "playbooks/collection.py", f"{name}/gpuprov/host")
        galaxy = Path(sys.executable).with_name("ansible-galaxy")
        _run(str(galaxy), "collection", "build", "--output-path", name, f"{name}/gpuprov/host")
        (packed,) = Path(name).glob("*.tar.gz")
        with tarfile.open(packed) as source:
            members = {one.name: (one, _content(source, one)) for one in source}
    _sort_manifest(members)
    moment = release_time()
    made = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=made, mode="wb", mtime=0, filename="") as compressed,
        tarfile.open(fileobj=compressed, mode="w") as target,
    ):
        for _, (member, content) in sorted(members.items()):
            # A header of its own: the packed one has the time twice, the second with fractions of seconds.
            header = tarfile.TarInfo(member.name)
            header.type, header.mode, header.mtime, header.size = member.type, member.mode, moment, len(content)
            target.addfile(header, io.BytesIO(content))
    return made.getvalue()


def _content(source: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = source.extractfile(member) if member.isfile() else None
    return file.read() if file else b""


def _sort_manifest(members: dict[str, tuple[tarfile.TarInfo, bytes]]) -> None:
    """Sort FILES.json, which is in the disk's order, and give MANIFEST.json its digest."""
    files = json.loads(members["FILES.json"][1])
    files["files"].sort(key=lambda one: one["name"])
    text = json.dumps(files, indent=1).encode()
    manifest = json.loads(members["MANIFEST.json"][1])
    manifest["file_manifest_file"]["chksum_sha256"] = hashlib.sha256(text).hexdigest()
    members["FILES.json"] = (members["FILES.json"][0], text)
    members["MANIFEST.json"] = (members["MANIFEST.json"][0], json.dumps(manifest, indent=1).encode())


def release_time() -> int:
    """Return the time of the release in seconds: SOURCE_DATE_EPOCH, or that of the last commit."""
    try:
        return int(os.environ.get("SOURCE_DATE_EPOCH") or _run("git", "log", "-1", "--format=%ct"))
    except subprocess.CalledProcessError:
        raise SystemExit(
            "a release needs a time, and this is no clone; next: export SOURCE_DATE_EPOCH=SECONDS"
        ) from None


def _sums(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        # hatchling writes a .gitignore.
        if path.name.startswith("."):
            path.unlink()
        else:
            yield f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"


def _run(*argv: str) -> str:
    return subprocess.run(argv, cwd=_CLONE, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    write_release(Path(sys.argv[1]))

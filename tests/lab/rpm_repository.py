"""Signed rpm repositories with a few tiny packages, made by rpmbuild, rpmsign and createrepo_c."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.repository import make_key
from tests.lab.shell import run

# Debian's rpm keeps its database below $HOME, unlike any distribution of rpm's.
RPM_MACROS = "%_dbpath /var/lib/rpm\n"


@dataclass(frozen=True)
class RpmPackage:
    """A package with one file in /opt; with `size` there is one of so many bytes besides."""

    name: str
    version: str = "1.0"
    release: str = "1"
    requires: str = ""
    provides: str = ""
    size: int = 0

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}-{self.release}.noarch.rpm"

    def __str__(self) -> str:
        relations = [f"{word}: {value}\n" for word, value in self._relations() if value]
        head = f"""\
            Name: {self.name}
            Version: {self.version}
            Release: {self.release}
            Summary: a package for tests
            License: none
            BuildArch: noarch
            """
        body = f"""\
            %description
            One file.
            %install
            mkdir -p %{{buildroot}}/opt/{self.name}
            echo {self.version} > %{{buildroot}}/opt/{self.name}/version-{self.version}-{self.release}
            {f"truncate -s {self.size} %{{buildroot}}/opt/{self.name}/room" if self.size else ""}
            %files
            /opt/{self.name}
            """
        return textwrap.dedent(head) + "".join(relations) + textwrap.dedent(body)

    def _relations(self) -> tuple[tuple[str, str], ...]:
        return ("Requires", self.requires), ("Provides", self.provides)


TOOLS = RpmPackage("site-gpu-tools", requires="site-gpu-library")
PACKAGES = (
    TOOLS,
    RpmPackage("site-gpu-library", provides="site-gpu-abi"),
    RpmPackage("incomplete", requires="nobody-has-this >= 2"),
)
# As in NVIDIA's repositories for RHEL 8 and 9: what a stream holds is seen by dnf where that is enabled.
_STREAM = """\
---
document: modulemd
version: 2
data:
  name: nvidia-driver
  stream: {stream}
  version: 1
  context: 0123456789ab
  arch: x86_64
  summary: the driver
  description: the driver
  license: {{module: [MIT]}}
  artifacts: {{rpms: [{rpms}]}}
...
"""
# What is installed on every host: with an empty database zypper fails.
BASE = RpmPackage("base-system", provides="/bin/sh")


def build_package(package: RpmPackage, folder: Path) -> Path:
    """Build a package in `folder` and return its file."""
    work = folder / f"build-{package.name}"
    work.mkdir(parents=True)
    (work / "package.spec").write_text(str(package))
    file_name = "_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm"
    define = ("-D", f"_topdir {work}", "-D", f"_rpmdir {folder}", "-D", file_name)
    run(("rpmbuild", "--quiet", "-bb", *define, str(work / "package.spec")))
    shutil.rmtree(work)
    return folder / package.file_name


def sign_package(file: Path, gnupg: Path, fingerprint: str) -> None:
    """Put a signature into a package."""
    macros = ("__gpg /usr/bin/gpg", f"_gpg_path {gnupg}", f"_gpg_name {fingerprint}")
    run(("rpmsign", *(word for macro in macros for word in ("--define", macro)), "--addsign", str(file)))


def index(folder: Path, gnupg: Path) -> None:
    """Write the metadata of all packages in a folder, and sign it."""
    run(("createrepo_c", "--quiet", "--no-database", str(folder)))
    sign_index(folder, gnupg)


def add_streams(folder: Path, gnupg: Path, streams: Mapping[str, Sequence[RpmPackage]]) -> None:
    """Put packages of a repository into streams of the module nvidia-driver, and sign the metadata again."""
    texts = [
        _STREAM.format(stream=stream, rpms=", ".join(f'"{one.name}-0:{one.version}-1.noarch"' for one in packages))
        for stream, packages in streams.items()
    ]
    # modifyrepo_c takes the name from the file's.
    modules = folder.parent / "modules.yaml"
    modules.write_text("".join(texts))
    run(("modifyrepo_c", "--mdtype=modules", str(modules), str(folder / "repodata")))
    modules.unlink()
    sign_index(folder, gnupg)


def sign_index(folder: Path, gnupg: Path) -> None:
    """Sign the metadata that is there."""
    gpg = ("gpg", "--homedir", str(gnupg), "--batch", "--yes")
    run((*gpg, "--armor", "--detach-sign", str(folder / "repodata/repomd.xml")))


def build_rpm_repository(
    folder: Path, gnupg: Path, packages: tuple[RpmPackage, ...] = PACKAGES, *, signed_packages: bool = True
) -> str:
    """Build a repository in `folder` with a key in `gnupg` (made if missing); return its fingerprint.

    Its metadata are signed in any case.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = make_key(gnupg)
    (folder / "key.asc").write_text(run(("gpg", "--homedir", str(gnupg), "--armor", "--export", fingerprint)))
    (folder / "fingerprint").write_text(fingerprint)
    for package in packages:
        file = build_package(package, folder)
        if signed_packages:
            sign_package(file, gnupg, fingerprint)
    index(folder, gnupg)
    return fingerprint

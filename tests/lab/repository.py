"""A signed apt repository with one tiny package, as a site would have of its own."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.gpg import end_agents_later
from tests.lab.shell import run

PACKAGE = "site-gpu-tools"
_CONTROL = """Package: {package}
Version: 1.0
Architecture: all
Maintainer: The lab <lab@example.org>
Description: a site's own tools for its GPU hosts
 One script that says hello.
"""
_STAND_IN = """\
Package: {name}
Version: {version}
Architecture: amd64
Maintainer: The lab <lab@example.org>
{depends}Description: a stand-in of NVIDIA's
"""


def build_repository(folder: Path, gnupg: Path, package: str = PACKAGE) -> str:
    """Build the repository in `folder` with a key in `gnupg` (made if missing); return its fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = make_key(gnupg)
    gpg = ("gpg", "--homedir", str(gnupg), "--batch", "--yes")
    (folder / "key.asc").write_text(run((*gpg, "--armor", "--export", fingerprint)))
    (folder / "fingerprint").write_text(fingerprint)
    script = "#!/bin/sh\necho hello from the site\n"
    build_package(folder, _CONTROL.format(package=package), {f"usr/bin/{package}": script})
    sign(folder, gnupg)
    return fingerprint


def stand_in(name: str, version: str, depends: str = "") -> str:
    """Return the control file of a package that stands for one of NVIDIA's."""
    return _STAND_IN.format(name=name, version=version, depends=f"Depends: {depends}\n" if depends else "")


def sign(folder: Path, gnupg: Path) -> None:
    """Write the index of all packages in the folder, and sign it."""
    packages = run(("sh", "-c", 'cd "$1" && dpkg-scanpackages --multiversion . 2>/dev/null', "sh", str(folder)))
    (folder / "Packages").write_text(packages)
    (folder / "Release").write_text(run(("sh", "-c", 'cd "$1" && apt-ftparchive release .', "sh", str(folder))))
    gpg = ("gpg", "--homedir", str(gnupg), "--batch", "--yes")
    run((*gpg, "--clearsign", "--output", str(folder / "InRelease"), str(folder / "Release")))


def make_key(gnupg: Path) -> str:
    """Return the fingerprint of the key in `gnupg`, made if it is missing."""
    gpg = ("gpg", "--homedir", str(gnupg), "--batch")
    gnupg.mkdir(mode=0o700, parents=True, exist_ok=True)
    end_agents_later(gnupg)
    # The folder alone says nothing: its making may have been killed before the key was there.
    while not (found := re.search(r"^fpr:+([0-9A-F]{40}):", run((*gpg, "--with-colons", "--list-keys")), re.MULTILINE)):
        run((*gpg, "--passphrase", "", "--quick-gen-key", "lab <lab@example.org>", "rsa3072", "sign", "never"))
    return found[1]


def build_package(folder: Path, control: str, files: Mapping[str, str], tree: Path | None = None) -> Path:
    """Build a package into the folder: its control file, and path → text; scripts and lists are in DEBIAN/.

    `tree` has more files to take; it is used up.
    """
    tree = tree or folder / "tree"
    for name, text in {**files, "DEBIAN/control": control}.items():
        place = tree / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(0o755 if text.startswith("#!") else 0o644)
    fields = dict(line.split(": ", 1) for line in control.splitlines() if ": " in line)
    made = folder / f"{fields['Package']}_{fields['Version']}_{fields['Architecture']}.deb"
    run(("dpkg-deb", "--build", "--root-owner-group", str(tree), str(made)))
    run(("rm", "-r", str(tree)))
    return made

"""A signed apt repository with one tiny package, as a site would have of its own."""

from __future__ import annotations

import re
from pathlib import Path

from tests.lab.shell import run

PACKAGE = "site-gpu-tools"
_CONTROL = """Package: {package}
Version: 1.0
Architecture: all
Maintainer: The lab <lab@example.org>
Description: a site's own tools for its GPU hosts
 One script that says hello.
"""


def build_repository(folder: Path, gnupg: Path, package: str = PACKAGE) -> str:
    """Build the repository in `folder` with a key in `gnupg` (made if missing); return its fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = make_key(gnupg)
    gpg = ("gpg", "--homedir", str(gnupg), "--batch", "--yes")
    (folder / "key.asc").write_text(run((*gpg, "--armor", "--export", fingerprint)))
    (folder / "fingerprint").write_text(fingerprint)
    _package(folder, package)
    packages = run(("sh", "-c", 'cd "$1" && dpkg-scanpackages --multiversion . 2>/dev/null', "sh", str(folder)))
    (folder / "Packages").write_text(packages)
    (folder / "Release").write_text(run(("sh", "-c", 'cd "$1" && apt-ftparchive release .', "sh", str(folder))))
    run((*gpg, "--clearsign", "--output", str(folder / "InRelease"), str(folder / "Release")))
    return fingerprint


def make_key(gnupg: Path) -> str:
    """Return the fingerprint of the key in `gnupg`, made if it is missing."""
    gpg = ("gpg", "--homedir", str(gnupg), "--batch")
    gnupg.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The folder alone says nothing: its making may have been killed before the key was there.
    while not (found := re.search(r"^fpr:+([0-9A-F]{40}):", run((*gpg, "--with-colons", "--list-keys")), re.MULTILINE)):
        run((*gpg, "--passphrase", "", "--quick-gen-key", "lab <lab@example.org>", "rsa3072", "sign", "never"))
    return found[1]


def _package(folder: Path, package: str) -> None:
    tree = folder / "tree"
    script = tree / "usr/bin" / package
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("#!/bin/sh\necho hello from the site\n")
    script.chmod(0o755)
    (tree / "DEBIAN").mkdir(exist_ok=True)
    (tree / "DEBIAN/control").write_text(_CONTROL.format(package=package))
    run(("dpkg-deb", "--build", "--root-owner-group", str(tree), str(folder / f"{package}_1.0_all.deb")))
    run(("rm", "-r", str(tree)))

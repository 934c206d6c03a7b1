"""Keys of the real gpg, for tests."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def signing_key(home: Path, name: str) -> str:
    """Make a key in gpg's folder `home` and return its fingerprint."""
    home.mkdir(mode=0o700, exist_ok=True)
    home.chmod(0o700)
    gpg = ("gpg", "--homedir", str(home), "--batch")
    subprocess.run((*gpg, "--passphrase", "", "--quick-gen-key", name, "ed25519", "sign", "never"), check=True)
    listed = subprocess.run((*gpg, "--with-colons", "--list-keys", name), check=True, capture_output=True, text=True)
    found = re.search(r"^fpr:+([0-9A-F]{40}):", listed.stdout, re.MULTILINE)
    assert found is not None
    return found[1]

"""The signing key of a bundle's repository: generated for one bundle and discarded afterwards.

The public key is in the bundle and its fingerprint in the manifest, so it is trusted if the manifest is. The private
key is deleted once the bundle is complete: nothing else can be signed with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gpuprov.core.commands import Completed
from gpuprov.core.system import System
from gpuprov.packages.keys import fingerprints
from gpuprov.protocol.errors import GpuprovError

# plan/steps.py rejects hosts with an earlier clock, so no signature is in a host's future.
SIGNED_AT = 1767225600
_CLOCK = time.strftime("%Y%m%dT%H%M%S", time.gmtime(SIGNED_AT))
# Every supported package manager can check it, down to rpm 4.14 of Enterprise Linux 8, which lacks ed25519.
_ALGORITHM = "rsa3072"
_NAME = "gpuprov bundle"
_SECONDS = 120


@dataclass(frozen=True)
class RepositoryKey:
    """A key in a gpg home folder; `public` is its public half, not armored."""

    system: System
    home: str
    public: bytes
    fingerprint: str

    @property
    def signing_words(self) -> tuple[str, ...]:
        """Return gpg options for another program: no prompts, and a signature date that is not in the future."""
        return ("--batch", "--digest-algo", "SHA256", "--faked-system-time", _CLOCK)

    def clear_sign(self, path: str, signed: str) -> None:
        """Write the file `path` with an inline signature to `signed`."""
        _gpg(self.system, self.home, "--local-user", self.fingerprint, "--clear-sign", "--output", signed, path)

    def detach_sign(self, path: str, signature: str) -> None:
        """Write an armored signature of the file `path`."""
        words = ("--local-user", self.fingerprint, "--armor", "--detach-sign", "--output", signature, path)
        _gpg(self.system, self.home, *words)


@contextlib.contextmanager
def new_key(system: System, home: str) -> Iterator[RepositoryKey]:
    """Yield a new key in the folder `home`, which is removed with the private key afterwards."""
    if system.which("gpg") is None:
        raise GpuprovError(
            "there is no gpg on this machine, and it signs the bundle's repository", "", "apt-get install gpg"
        )
    system.make_directory(home, 0o700)
    try:
        _gpg(system, home, "--passphrase", "", "--quick-gen-key", _NAME, _ALGORITHM, "sign", "never")
        exported = f"{home}/public"
        _gpg(system, home, "--output", exported, "--export-options", "export-minimal", "--export", _NAME)
        public = system.read_bytes(exported) or b""
        (fingerprint,) = fingerprints(public)
        yield RepositoryKey(system, home, public, fingerprint)
    finally:
        system.run(("gpgconf", "--homedir", home, "--kill", "all"))
        system.remove_tree(home)


def _gpg(system: System, home: str, *words: str) -> Completed:
    argv = ("gpg", "--homedir", home, "--batch", "--yes", "--digest-algo", "SHA256", "--faked-system-time", _CLOCK)
    return system.require(
        (*argv, *words), "gpg could not sign the bundle's repository", "does gpg work here? gpg --version",
        timeout=_SECONDS,
    )  # fmt: skip

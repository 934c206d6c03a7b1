"""Check the certificate of a server as ssh(1) does: signed by an authority of known_hosts, for this host, now."""

from __future__ import annotations

import base64
from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.serialization import SSHCertificate, SSHCertPublicKeyTypes


def certificate_fault(kind: str, content: bytes, key: bytes, host: str, trusted: Container[bytes], now: float) -> str:
    """Return why a certificate does not prove that the server with this public key is `host`; "" if it does.

    `trusted`: the authorities' public keys, as in known_hosts. `now`: seconds since 1970. A certificate that names no
    host, which ssh(1) takes for every host, proves nothing here.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    try:
        found = serialization.load_ssh_public_identity(f"{kind} {base64.b64encode(content).decode()}".encode())
        if not isinstance(found, serialization.SSHCertificate):
            return "is a plain key"
        signer, certified = found.signature_key(), _in_known_hosts(found.public_key())
        authority = _in_known_hosts(signer)
        found.verify_cert_signature()
    # What a server sends may be anything.
    except Exception as error:
        return f"is invalid: {error or type(error).__name__}"
    if certified != key:
        return "is for another key"
    if authority not in trusted:
        return "is signed by no authority that known_hosts trusts for it"
    # ssh(1) takes none, either. Before the signature, as long as the key, and its length stands the algorithm.
    if isinstance(signer, RSAPublicKey) and content[: -((signer.key_size + 7) // 8 + 4)].endswith(b"ssh-rsa"):
        return "is signed with SHA-1"
    return _unfit(found, host.lower(), now)


def _in_known_hosts(key: SSHCertPublicKeyTypes) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])


def _unfit(found: SSHCertificate, host: str, now: float) -> str:
    from cryptography.hazmat.primitives.serialization import SSHCertificateType

    if found.type is not SSHCertificateType.HOST:
        return "is a user's"
    if found.critical_options:
        return "has conditions that nobody knows here"
    if not found.valid_after <= now < found.valid_before:
        return "has expired" if now >= found.valid_before else "is not valid yet"
    names = [name.decode("utf-8", "replace") for name in found.valid_principals]
    # Word by word: what looks like a pattern is none.
    if host not in names:
        return f"is for {', '.join(names)[:200] or 'no host by name'}"
    return ""

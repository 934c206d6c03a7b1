"""Check the certificate of a server as ssh(1) does: signed by an authority of known_hosts, for this host, now."""

from __future__ import annotations

import base64
from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.serialization import SSHCertificate, SSHCertPublicKeyTypes

_MOST_NAMES = 256


def certificate_fault(kind: str, content: bytes, key: bytes, host: str, trusted: Container[bytes], now: float) -> str:
    """Return why a certificate does not prove that the server with this public key is `host`; "" if it does.

    `trusted`: the authorities' public keys, as in known_hosts. `now`: seconds since 1970. A certificate that names no
    host, which ssh(1) takes for every host, proves nothing here.
    """
    from cryptography.hazmat.primitives import serialization

    try:
        found = serialization.load_ssh_public_identity(f"{kind} {base64.b64encode(content).decode()}".encode())
        if not isinstance(found, serialization.SSHCertificate):
            return "is a plain key"
        authority, certified = _in_known_hosts(found.signature_key()), _in_known_hosts(found.public_key())
        found.verify_cert_signature()
    # What a server sends may be anything.
    except Exception as error:
        return f"is invalid: {error or type(error).__name__}"
    if certified != key:
        return "is for another key"
    # The library takes an authority on a security key (sk-) for the plain key in it.
    signature = signature_by(content, authority)
    if authority not in trusted or not signature:
        return "is signed by no authority that known_hosts trusts for it"
    # ssh(1) takes none, either.
    if signature.startswith(_string(b"ssh-rsa")):
        return "is signed with SHA-1"
    return _unfit(found, host.lower(), now)


def signature_by(content: bytes, authority: bytes) -> bytes:
    """Return the signature, with its algorithm, of a certificate that names this authority; b"" if it does not.

    The signature is not checked. It is what follows the authority's key.
    """
    _, named, rest = content.rpartition(_string(authority))
    return rest[4:] if named and rest == _string(rest[4:]) else b""


def _string(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


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
    # ssh(1) does not read such a certificate.
    if len(names) > _MOST_NAMES:
        return f"has more than {_MOST_NAMES} names, which ssh does not read"
    if b"\0" in found.key_id + b"".join(found.valid_principals):
        return "has a NUL in a name"
    # Word by word: what looks like a pattern is none.
    if host not in names:
        return f"is for {', '.join(names)[:200] or 'no host by name'}"
    return ""

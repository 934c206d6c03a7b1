"""Public keys of no use but their fingerprints: one OpenPGP packet each (RFC 4880, 5.5.2)."""

import hashlib


def key_packet(number: int) -> bytes:
    """Return a key; another number gives another one."""
    body = b"\x04\x00\x00\x00" + bytes([number]) + b"\x01" + b"\x00\x08\xff" * 2
    return b"\x99" + len(body).to_bytes(2, "big") + body


def key_fingerprint(number: int) -> str:
    """Return that key's fingerprint."""
    return hashlib.sha1(key_packet(number)).hexdigest().upper()

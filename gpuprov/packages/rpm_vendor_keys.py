"""The keys that sign the packages of rpm's distributions, as data: where each lies, and its full fingerprint.

Sources: rockylinux.org/resources/gpg-key-info, almalinux.org/security, centos.org/keys, fedoraproject.org/security.
"""

from __future__ import annotations

from gpuprov.protocol.tables import server

# The server, and the file below it.
_ROCKY = ("rocky", "RPM-GPG-KEY-Rocky-{major}")
_ALMA = ("almalinux", "RPM-GPG-KEY-AlmaLinux-{major}")
_FEDORA = ("fedora-keys", "RPM-GPG-KEY-fedora-{major}-primary")
_KEYS = {
    ("rocky", "8"): (_ROCKY, "7051C470A929F454CEBE37B715AF5DAC6D745A60"),
    ("rocky", "9"): (_ROCKY, "21CB256AE16FC54C6E652949702D426D350D275D"),
    ("rocky", "10"): (_ROCKY, "FC226859C0860BF0DDB95B085B106C736FEDFC85"),
    ("almalinux", "8"): (_ALMA, "BC5EDDCADF502C077F1582882AE81E8ACED7258B"),
    ("almalinux", "9"): (_ALMA, "BF18AC2876178908D6E71267D36CB86CB86B3716"),
    ("almalinux", "10"): (_ALMA, "EE6DB7B98F5BF5EDD9DA0DE5DEE5C11CC2A1E572"),
    ("centos", "9"): (
        ("centos-keys", "RPM-GPG-KEY-CentOS-Official"), "99DB70FAE1D7CE227FB6488205B555B38483C65D",
    ),
    ("fedora", "42"): (_FEDORA, "B0F4950458F69E1150C6C5EDC8AC4916105EF944"),
    ("fedora", "43"): (_FEDORA, "C6E7F081CF80E13146676E88829B606631645531"),
    ("fedora", "44"): (_FEDORA, "36F612DCF27F7D1A48A835E4DBFCF71C6D9F90A6"),
}  # fmt: skip


def vendor_key(distribution: str, version: str) -> tuple[str, str] | None:
    """Return URL and fingerprint of the key of a distribution's release, or None where gpuprov knows none."""
    major = version.partition(".")[0]
    found = _KEYS.get((distribution, major))
    if found is None:
        return None
    (name, file), fingerprint = found
    return f"{server(name)}/{file.format(major=major)}", fingerprint

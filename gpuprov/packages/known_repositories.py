"""Repositories that gpuprov knows, as data: the vendors' keys, archives of past kernels, DKMS. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuprov.machine.distros import Distribution, ExtraRepository, kernel_headers
from gpuprov.packages.failures import Advice
from gpuprov.protocol.dataclass import dataclass
from gpuprov.protocol.spec import HostSpec
from gpuprov.protocol.tables import SERVERS, Tables, packaged, rows

TABLE = "repositories"


@dataclass(frozen=True)
class SigningKey:
    """The key of what `of` matches: a distribution's release, a folder of NVIDIA's. `file`: below the server."""

    of: str
    file: str
    fingerprint: str
    server: str = ""


def signing_key(kind: str, of: str) -> SigningKey | None:
    """Return the first key of a kind, `vendor_keys` or `cuda_keys`, that is of something; None if there is none."""
    return next((one for one in rows(TABLE, kind, SigningKey) if re.fullmatch(one.of, of)), None)


def vendor_key(distribution: str, version: str, tables: Tables) -> tuple[str, str] | None:
    """Return URL and fingerprint of the key of a distribution's release, or None where gpuprov knows none."""
    major = version.partition(".")[0]
    found = signing_key("vendor_keys", f"{distribution} {major}")
    return (f"{tables.server(found.server)}/{found.file.format(major=major)}", found.fingerprint) if found else None


# Distributions keep only the newest kernels in their repositories. The source of older ones differs, and mostly needs a
# decision (a subscription, a repository without updates). So gpuprov reports it and adds nothing unless requested.
@dataclass(frozen=True)
class _Archive:
    """Where one distribution's older kernels are. `version`: a major version, * for all; `kernel`: matches `uname -r`.

    The texts may hold {kernel}, {names} (the packages), {architecture}, {major}, {release}, the pattern's groups, and
    the servers of protocol/servers.json, such as {rocky_vault}.
    `base`: a repository of Enterprise Linux that anybody may read.
    """

    id: str
    next_step: str
    version: str = "*"
    kernel: str = r".+"
    base: str = ""


# In Enterprise Linux 8 kernel-devel lies in BaseOS, from 9 on in AppStream (access.redhat.com, Package Manifest).
_EL_FOLDERS = ("BaseOS/{architecture}/os/", "AppStream/{architecture}/os/")


def advice(row: Distribution, kernel: str, architecture: str, tables: Tables) -> Advice | None:
    """Return the advice if no repository has the headers of the running kernel, None for a kernel without a row."""
    found = _found(row, kernel, architecture, tables)
    if found is None:
        return None
    archive, words = found
    names = [name for name in kernel_headers(row, kernel) if words["needle"] in name]
    shown = {**words, "names": " ".join(name.replace("=", "-", 1) for name in names) or "the headers"}
    meaning = f"no repository of this host has the headers of the running kernel {kernel}"
    return Advice(words["needle"], meaning, archive.next_step.format(**shown))


def past_releases(row: Distribution, kernel: str, architecture: str, tables: Tables) -> tuple[ExtraRepository, ...]:
    """Return the repositories of the running kernel's own release, empty if no public archive exists.

    Their packages are signed by the distribution's key.
    """
    found = _found(row, kernel, architecture, tables)
    key = vendor_key(row.id, row.version, tables)
    if found is None or key is None or not found[0].base:
        return ()
    archive, words = found
    uris = (f"{archive.base}{folder}".format(**words) for folder in _EL_FOLDERS)
    return tuple(
        # The third part from the end names the repository: …/AppStream/x86_64/os/.
        ExtraRepository(f"past-{uri.split('/')[-4].lower()}", uri, *key, signed_metadata=False)
        for uri in uris
    )


def _found(row: Distribution, kernel: str, architecture: str, tables: Tables) -> tuple[_Archive, dict[str, str]] | None:
    """Return the table's row, and the words that its texts may hold."""
    major = row.version.partition(".")[0]
    for one in rows(TABLE, "archives", _Archive):
        match = re.fullmatch(one.kernel, kernel) if one.id == row.id and one.version in ("*", major) else None
        if match:
            servers = {name.replace("-", "_"): tables.server(name) for name in packaged(SERVERS)["servers"]}
            return one, _words(one, major, kernel, architecture, {**servers, **match.groupdict()})
    return None


def _words(one: _Archive, major: str, kernel: str, architecture: str, groups: dict[str, str]) -> dict[str, str]:
    version, _, flavour = kernel.partition("-")[2].rpartition("-")
    suse = one.id.startswith(("sles", "opensuse"))
    # Debian's flavours may have a dash (cloud-amd64), Ubuntu's have none.
    debian = re.search(r"-((?:cloud-|rt-)?[a-z][a-z0-9]*)$", kernel)
    words = {
        **groups, "kernel": kernel, "architecture": architecture, "major": major,
        "release": groups.get("release", "").replace("_", "."),
        "flavour": flavour if suse or not debian else debian[1],
        # SUSE's packages are asked for in the kernel's version without its flavour.
        "needle": kernel[: -len(flavour) - 1] if suse and version else kernel,
        "first": "BaseOS" if major == "8" else "AppStream",
    }  # fmt: skip
    return {**words, "base": one.base.format(**words)}


DKMS = "dkms"


@dataclass(frozen=True)
class _Dkms:
    """Where DKMS comes from on distributions that do not package it: below a server, the folder and its key.

    Only DKMS is taken from there: what it depends on is in the distribution's own repositories (dkms.spec: kernel
    headers, gcc, make, elfutils-libelf-devel, kmod, patch). A mirror is laid out in the same way.
    `fingerprints`: of the keys, by the major version.
    """

    name: str
    server: str
    folder: str
    key: str
    fingerprints: Mapping[str, str]


def dkms_repository(
    row: Distribution, version: str, architecture: str, spec: HostSpec, tables: Tables
) -> ExtraRepository | None:
    """Return the repository that has DKMS for a VERSION_ID, limited to it; None where its key or place is not known.

    gpuprov_epel_repository names a mirror, gpuprov_epel_key_fingerprint the key, of a release without a row too.
    """
    major, _, minor = version.partition(".")
    place = next((one for one in rows(TABLE, "dkms", _Dkms) if one.name == row.dkms_from), None)
    known = place.fingerprints.get(major, "") if place else ""
    fingerprint = spec.epel_key_fingerprint or known
    if place is None or not fingerprint or not (known or spec.epel_repository):
        return None
    base = (spec.epel_repository or tables.server(place.server)).rstrip("/")
    words = {"major": major, "minor": minor or "0", "arch": architecture}
    uri, key_url = (f"{base}/{path}".format(**words) for path in (place.folder, place.key))
    return ExtraRepository(row.dkms_from.lower(), uri, key_url, fingerprint, signed_metadata=False, only=(f"{DKMS}*",))
